//! All that routes packets in a network namespace, and whether it has changed since it was read.

use crate::{
    notify::Subscription,
    routes::{RouteError, RouteSocket, Survey},
};

/// Routing, interfaces and addresses, and what has changed since they were read: they have no generation.
pub(crate) struct Surroundings {
    pub(crate) survey: Survey,
    pub(crate) since: Subscription,
}

impl Surroundings {
    /// Those of the calling thread's network namespace; nothing where interfaces or addresses cannot be read: no run fails for what its plan does not need.
    pub(crate) fn now(routes: &mut RouteSocket) -> Result<Option<Self>, RouteError> {
        let Ok(since) = Subscription::to_surroundings() else { return Ok(None) };
        let (Ok(links), Ok(assigned)) = (routes.links(), routes.assigned()) else { return Ok(None) };
        Ok(Some(Self { survey: routes.survey(&links, &assigned)?, since }))
    }
}
