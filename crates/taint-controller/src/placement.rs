//! What the agents' DaemonSet says of where agents are to be, and when that is believed. Pure.

use std::sync::Arc;

use cluster_client::Failure;
use controller_runtime::daemon_set::wants;
use k8s_openapi::api::apps::v1::DaemonSet;

use crate::model::Placement;

/// What bad news about it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DaemonSetLoss {
    Gone,
    Refused,
}

/// Goes by what is heard of the DaemonSet. That it is gone, or may not be read, is believed when it is said twice: one that is replaced is gone for a
/// moment, and an API server that starts refuses what it allows a second later.
#[derive(Debug, Default)]
pub struct DaemonSetTracker {
    /// Whether there ever was one.
    has_been: bool,
    /// Whether it was ever said whether there is one.
    is_told: bool,
    /// What was said last, if it was bad.
    last: Option<DaemonSetLoss>,
}

impl DaemonSetTracker {
    /// Where agents are to be; none where what was true before counts.
    pub fn receive(&mut self, found: Result<Option<DaemonSet>, Failure>) -> Option<Placement> {
        let bad = match found {
            Ok(Some(set)) => {
                *self = Self { has_been: true, is_told: true, last: None };
                return Some(Placement::On {
                    generation: set.metadata.generation.unwrap_or_default(),
                    wants: Arc::new(move |name, labels| wants(&set, name, labels)),
                });
            }
            // Nodes that are born tainted wait for agents that are yet to be deployed.
            Ok(None) if !self.has_been => {
                self.is_told = true;
                return Some(Placement::NotSaid);
            }
            Ok(None) => DaemonSetLoss::Gone,
            Err(failure) if failure.is_refusal() => DaemonSetLoss::Refused,
            Err(_) => return None,
        };
        let is_said_again = self.last.replace(bad) == Some(bad);
        match bad {
            DaemonSetLoss::Gone => is_said_again.then_some(Placement::Nowhere),
            // It may be that nobody has given the right to read it: then every node is to have an agent.
            DaemonSetLoss::Refused => (is_said_again && !self.is_told).then_some(Placement::Everywhere),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cluster_client::Words;

    fn refused() -> Result<Option<DaemonSet>, Failure> {
        Err(Failure::Forbidden(Words { text: "no".into(), by_api: true }))
    }

    fn word(placement: Option<&Placement>) -> &'static str {
        match placement {
            None => "as before",
            Some(Placement::Everywhere) => "everywhere",
            Some(Placement::On { .. }) => "on",
            Some(Placement::NotSaid) => "not said",
            Some(Placement::Nowhere) => "nowhere",
        }
    }

    #[test]
    fn bad_news_is_believed_when_it_is_said_twice() {
        let there = || Ok(Some(DaemonSet::default()));
        let silent = || Err(Failure::Impossible("silence".into()));
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
