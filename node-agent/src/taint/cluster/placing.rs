//! What the agents' DaemonSet says of where agents are to be, and when that is believed. Pure.

use std::sync::Arc;

use cluster_client::ApiError;
use k8s_openapi::api::apps::v1::DaemonSet;

use super::model::Placement;
use crate::cluster::wants;

/// What bad news about it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bad {
    Gone,
    Refused,
}

/// Goes by what is heard of the DaemonSet. That it is gone, or may not be read, is believed when it is said twice: one that is replaced is gone for a
/// moment, and an API server that starts refuses what it allows a second later.
#[derive(Debug, Default)]
pub struct Placing {
    /// Whether there ever was one.
    has_been: bool,
    /// Whether it was ever said whether there is one.
    is_told: bool,
    /// What was said last, if it was bad.
    last: Option<Bad>,
}

impl Placing {
    /// Where agents are to be; none where what was true before counts.
    pub fn hear(&mut self, found: Result<Option<DaemonSet>, ApiError>) -> Option<Placement> {
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
            Ok(None) => Bad::Gone,
            Err(failure) if failure.is_refusal() => Bad::Refused,
            Err(_) => return None,
        };
        let is_said_again = self.last.replace(bad) == Some(bad);
        match bad {
            Bad::Gone => is_said_again.then_some(Placement::Nowhere),
            // It may be that nobody has given the right to read it: then every node is to have an agent.
            Bad::Refused => (is_said_again && !self.is_told).then_some(Placement::Everywhere),
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
        let silent = || Err(ApiError::Impossible("silence".into()));
        let mut placing = Placing::default();
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
            assert_eq!(word(placing.hear(found).as_ref()), expected, "{placing:?}");
        }
    }
}
