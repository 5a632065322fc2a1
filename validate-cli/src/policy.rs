//! Policy routing, read from the kernel, without privileges.

use crate::{
    Request,
    reason::Reason,
    verdict::{Check, Path},
};
use netfilter_state::routing;
use netns_apply::routes::RouteSocket;
use redirect_core::Family;

/// Whether the rule and the route that the plan needs for these families are there.
pub(crate) fn check(request: &Request<'_>, families: impl Iterator<Item = Family>) -> Vec<Check> {
    let plan = request.redirect.plan();
    let Some(routes) = plan.policy_routes() else { return Vec::new() };
    let found = RouteSocket::open(usize::MAX)
        .and_then(|mut socket| socket.observe())
        .map_err(|error| error.to_string());
    let check = |family| {
        let missing = found.as_ref().map(|found| {
            routing::missing(&plan, found).into_iter().find(|item| item.family() == Some(family))
        });
        let (result, detail) = match missing {
            Ok(None) => (Ok(()), "policy rule and route are there".to_owned()),
            Ok(Some(missing)) => (Err(Reason::NoPolicyRoute), format!("missing: {missing}")),
            Err(error) => (Err(Reason::NoPolicyRoute), error.clone()),
        };
        Check { family, path: Path::PolicyRoute, target: None, captures: false, result, detail }
    };
    families.filter(|family| routes.families().contains(family)).map(check).collect()
}
