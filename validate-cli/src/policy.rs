//! Policy routing, read from the kernel, without privileges.

use crate::{
    ValidationRequest,
    reason::Reason,
    verdict::{Path, PathCheck},
};
use netfilter_state::routing::RoutingItem;
use netns_apply::routes::{Placed, RouteSocket};
use redirect_core::Family;

/// Whether the rule and the route that the plan needs for these families are there.
pub(crate) fn check(
    request: &ValidationRequest<'_>,
    families: impl Iterator<Item = Family>,
) -> Vec<PathCheck> {
    let plan = request.redirect.plan();
    let Some(routes) = plan.policy_routes() else { return Vec::new() };
    let placed = RouteSocket::open(usize::MAX)
        .and_then(|mut socket| socket.placed(&plan))
        .map_err(|error| error.to_string());
    let check = |family| {
        let wrong = placed.as_ref().map(|Placed { placement, found }| match &placement.obstacle {
            Some(obstacle) => Some(obstacle.to_string()),
            None => {
                let mut missing = RoutingItem::missing(&placement.plan, found).into_iter();
                let missing = missing.find(|item| item.family() == Some(family))?;
                let broken = found.iter().find(|one| one.item == missing);
                Some(match broken {
                    Some(one) => format!("does not work: {one}"),
                    None => format!("missing: {missing}"),
                })
            }
        });
        let (result, detail) = match wrong {
            Ok(None) => (Ok(()), "policy rule and route are there".to_owned()),
            Ok(Some(wrong)) => (Err(Reason::NoPolicyRoute), wrong),
            Err(error) => (Err(Reason::NoPolicyRoute), error.clone()),
        };
        PathCheck::without_probe(family, Path::PolicyRoute, result, detail)
    };
    families.filter(|family| routes.families().contains(family)).map(check).collect()
}
