//! Where agents should run according to their DaemonSet, and when that counts. Pure.

use cluster_client::ApiError;
use k8s_openapi::api::apps::v1::DaemonSet;

use crate::model::AgentPlacement;

/// A loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DaemonSetLoss {
    Gone,
    Refused,
}

/// Tracks the DaemonSet. Its loss, or a denial, counts once two lists report it: a replaced one is gone for a
/// moment, and an API server that starts refuses what it allows a second later.
#[derive(Debug, Default)]
pub struct DaemonSetTracker {
    /// Whether it ever existed.
    has_been: bool,
    /// Whether its existence was ever known.
    is_told: bool,
    /// The last report, if it was a loss.
    last: Option<DaemonSetLoss>,
}

impl DaemonSetTracker {
    /// Where agents should run; none if the last answer counts.
    pub fn receive(&mut self, found: Result<Option<DaemonSet>, ApiError>) -> Option<AgentPlacement> {
        let bad = match found {
            Ok(Some(set)) => {
                *self = Self { has_been: true, is_told: true, last: None };
                return Some(AgentPlacement::On(Box::new(set)));
            }
            // Nodes that join with the taint wait for agents that are yet to be deployed.
            Ok(None) if !self.has_been => {
                self.is_told = true;
                return Some(AgentPlacement::NotSaid);
            }
            Ok(None) => DaemonSetLoss::Gone,
            Err(failure) if failure.is_refusal() => DaemonSetLoss::Refused,
            Err(_) => return None,
        };
        let is_said_again = self.last.replace(bad) == Some(bad);
        match bad {
            DaemonSetLoss::Gone => is_said_again.then_some(AgentPlacement::Nowhere),
            // The right to read it may be missing: then every node should have an agent.
            DaemonSetLoss::Refused => (is_said_again && !self.is_told).then_some(AgentPlacement::Everywhere),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cluster_client::StatusMessage;

    fn refused() -> Result<Option<DaemonSet>, ApiError> {
        Err(ApiError::Forbidden(StatusMessage { text: "no".into(), by_api: true }))
    }

    fn word(placement: Option<&AgentPlacement>) -> &'static str {
        match placement {
            None => "as before",
            Some(AgentPlacement::Everywhere) => "everywhere",
            Some(AgentPlacement::On(_)) => "on",
            Some(AgentPlacement::NotSaid) => "not said",
            Some(AgentPlacement::Nowhere) => "nowhere",
        }
    }

    #[test]
    fn a_loss_counts_when_it_is_reported_twice() {
        let there = || Ok(Some(DaemonSet::default()));
        let silent = || Err(ApiError::Impossible("silence".into()));
        let mut tracker = DaemonSetTracker::default();
        for (found, expected) in [
            (refused(), "as before"),
            (silent(), "as before"),
            (refused(), "everywhere"),
            (Ok(None), "not said"),
            (refused(), "as before"),
            (refused(), "as before"),
            (there(), "on"),
            (Ok(None), "as before"),
            (there(), "on"),
            (refused(), "as before"),
            (refused(), "as before"),
            (Ok(None), "as before"),
            (Ok(None), "nowhere"),
            (Ok(None), "nowhere"),
            (there(), "on"),
        ] {
            assert_eq!(word(tracker.receive(found).as_ref()), expected, "{tracker:?}");
        }
    }
}
