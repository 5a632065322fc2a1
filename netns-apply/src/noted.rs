//! What a run notes of its network namespace, so that nothing is read again to see what interferes with its plan.

use crate::{
    notify::Subscription,
    routes::{RouteError, RouteSocket, Survey},
};
use netfilter_state::{routing::FoundRouting, ruleset::Ruleset};

/// What a run has noted of what packets meet.
#[derive(Default)]
pub(crate) struct Noted {
    /// All rules of nf_tables, if the run's one transaction has made them and no program had any table.
    pub(crate) ruleset: Option<Ruleset>,
    /// Routing, interfaces and addresses as the last look has shown them, and what has changed since.
    pub(crate) surroundings: Option<(Survey, Subscription)>,
}

impl Noted {
    /// What exists of the routing that a plan needs, read with what is around it.
    pub(crate) fn observe(&mut self, routes: &mut RouteSocket) -> Result<Vec<FoundRouting>, RouteError> {
        self.surroundings = None;
        // No run fails for what its plan does not need.
        let Ok(since) = Subscription::to_surroundings() else { return routes.observe() };
        let Some(mut survey) = routes.survey()? else { return routes.observe() };
        let found = std::mem::take(&mut survey.found);
        self.surroundings = Some((survey, since));
        Ok(found)
    }
}
