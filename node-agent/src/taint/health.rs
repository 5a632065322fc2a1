//! Whether a node is verified, and when that is believed. Pure.

use std::time::{Duration, Instant};

use agent_runtime::node::{NodeCondition, RequestedTaint};
use reasons::ConditionReason;

/// What the agent has found out about its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeHealth {
    /// A pod that starts now is redirected: the agent is ready, and a probe namespace was redirected.
    Verified,
    /// A pod that starts now would not be redirected, or would not start.
    NotReady(String),
    /// The agent is ready, and redirecting a probe namespace failed.
    ProbeFailed(String),
    /// The agent is ready, and cannot try it on a probe namespace. Neither good nor bad: the taint stays as it is.
    ProbeImpossible(String),
}

impl NodeHealth {
    /// The node's condition for it.
    #[must_use]
    pub fn condition(&self, of_type: &str) -> NodeCondition {
        let (status, reason, message) = match self {
            Self::Verified => {
                ("True", ConditionReason::Verified, "pods of the mesh that start here are redirected")
            }
            Self::NotReady(why) => ("False", ConditionReason::AgentNotReady, why.as_str()),
            Self::ProbeFailed(why) => ("False", ConditionReason::ProbeFailed, why.as_str()),
            Self::ProbeImpossible(why) => ("Unknown", ConditionReason::ProbeImpossible, why.as_str()),
        };
        NodeCondition {
            r#type: of_type.to_owned(),
            status: status.to_owned(),
            reason: reason.to_string(),
            message: message.chars().take(1000).collect(),
            last_transition_time: None,
        }
    }

    /// Whether another health is the same except for details, which may change all the time.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    /// What is wrong; nothing where nothing is.
    #[must_use]
    pub fn problem(&self) -> &str {
        match self {
            Self::Verified => "",
            Self::NotReady(why) | Self::ProbeFailed(why) | Self::ProbeImpossible(why) => why,
        }
    }
}

/// Believes what is good at once, and what is bad when it has lasted.
#[derive(Debug)]
pub struct FlapDamper {
    after: Duration,
    bad_since: Option<Instant>,
}

impl FlapDamper {
    /// Believes what is bad after so long.
    #[must_use]
    pub const fn new(after: Duration) -> Self {
        Self { after, bad_since: None }
    }

    /// What a health means for the taint at this moment; none if it stays as it is, for now at least.
    pub fn decide(&mut self, health: &NodeHealth, now: Instant) -> Option<RequestedTaint> {
        match health {
            NodeHealth::Verified => {
                self.bad_since = None;
                Some(RequestedTaint::Free)
            }
            NodeHealth::ProbeImpossible(_) => {
                self.bad_since = None;
                None
            }
            NodeHealth::NotReady(_) | NodeHealth::ProbeFailed(_) => {
                let since = *self.bad_since.get_or_insert(now);
                (now.duration_since(since) >= self.after).then_some(RequestedTaint::Tainted)
            }
        }
    }
}

/// How long the agent leaves a taint off that another controller removed, at first and at most.
const FIRST_BACKOFF: Duration = Duration::from_secs(60);
const LONGEST_BACKOFF: Duration = Duration::from_secs(960);

/// Backs off from a controller that removes this agent's taint, longer each time.
#[derive(Debug, Default)]
pub struct TaintBackoff {
    /// The UID of the node where this agent has put it.
    is_ours_on: Option<String>,
    until: Option<Instant>,
    last: Option<Duration>,
}

/// Whether the taint may be put there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaintPermission {
    /// It may.
    Granted,
    /// Another controller has just removed it; the agent leaves it off for this long.
    Begins(Duration),
    /// The agent leaves it off.
    Goes,
}

impl TaintBackoff {
    /// Notes what this agent has made of the taint of a node.
    pub fn note(&mut self, is_tainted: bool, uid: &str) {
        if is_tainted {
            self.is_ours_on = Some(uid.to_owned());
        } else {
            *self = Self::default();
        }
    }

    /// Whether a missing taint may be put on a node. A new node of the same name never had it.
    pub fn ask(&mut self, uid: &str, now: Instant) -> TaintPermission {
        if self.is_ours_on.as_deref() != Some(uid) {
            *self = Self::default();
        }
        match self.until {
            _ if self.is_ours_on.is_none() => TaintPermission::Granted,
            Some(until) if now < until => TaintPermission::Goes,
            Some(_) => {
                self.until = None;
                TaintPermission::Granted
            }
            None => {
                let lasts = self.last.map_or(FIRST_BACKOFF, |last| (last * 2).min(LONGEST_BACKOFF));
                (self.until, self.last) = (Some(now + lasts), Some(lasts));
                TaintPermission::Begins(lasts)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AFTER: Duration = Duration::from_secs(30);

    fn bad() -> NodeHealth {
        NodeHealth::NotReady("no entry".into())
    }

    #[test]
    fn a_blip_does_not_taint_and_what_lasts_does() {
        let (start, mut damper) = (Instant::now(), FlapDamper::new(AFTER));
        let at = |seconds| start + Duration::from_secs(seconds);
        for (second, health, decision) in [
            (0, bad(), None),
            (1, NodeHealth::Verified, Some(RequestedTaint::Free)),
            (10, bad(), None),
            (39, NodeHealth::ProbeFailed(String::new()), None),
            (40, bad(), Some(RequestedTaint::Tainted)),
            (500, bad(), Some(RequestedTaint::Tainted)),
            (501, NodeHealth::Verified, Some(RequestedTaint::Free)),
            (502, bad(), None),
            (520, NodeHealth::ProbeImpossible(String::new()), None),
            (533, bad(), None),
            (563, bad(), Some(RequestedTaint::Tainted)),
        ] {
            assert_eq!(damper.decide(&health, at(second)), decision, "{second} {health:?}");
        }
    }

    #[test]
    fn the_agent_backs_off_longer_from_each_removal() {
        let (start, mut backoff) = (Instant::now(), TaintBackoff::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(backoff.ask("u", at(0)), TaintPermission::Granted, "it was not removed");
        backoff.note(true, "u");
        assert_eq!(backoff.ask("u", at(10)), TaintPermission::Begins(Duration::from_secs(60)));
        assert_eq!(backoff.ask("u", at(69)), TaintPermission::Goes);
        assert_eq!(backoff.ask("u", at(70)), TaintPermission::Granted);
        backoff.note(true, "u");
        assert_eq!(backoff.ask("u", at(80)), TaintPermission::Begins(Duration::from_secs(120)));
        assert_eq!(backoff.ask("u", at(200)), TaintPermission::Granted);
        for _ in 0..9 {
            backoff.note(true, "u");
            let now = at(10_000);
            let TaintPermission::Begins(lasts) = backoff.ask("u", now) else { panic!("it was removed") };
            assert!(lasts <= LONGEST_BACKOFF && backoff.ask("u", now + lasts) == TaintPermission::Granted);
        }
        backoff.note(false, "u");
        assert_eq!(backoff.ask("u", at(20_000)), TaintPermission::Granted);
    }

    #[test]
    fn a_replaced_node_has_no_contested_taint() {
        let (now, mut backoff) = (Instant::now(), TaintBackoff::default());
        backoff.note(true, "old");
        assert_eq!(backoff.ask("new", now), TaintPermission::Granted);
        backoff.note(true, "new");
        assert_eq!(backoff.ask("new", now), TaintPermission::Begins(FIRST_BACKOFF));
    }

    #[test]
    fn the_condition_follows_the_health() {
        for (health, status, reason) in [
            (NodeHealth::Verified, "True", "Verified"),
            (bad(), "False", "AgentNotReady"),
            (NodeHealth::ProbeFailed("p".into()), "False", "ProbeFailed"),
            (NodeHealth::ProbeImpossible("p".into()), "Unknown", "ProbeImpossible"),
        ] {
            let condition = health.condition("t");
            assert_eq!((condition.status.as_str(), condition.reason.as_str()), (status, reason));
            assert!(!condition.message.is_empty());
        }
    }

    proptest! {
        #[test]
        fn only_what_was_bad_all_the_time_taints(steps in prop::collection::vec((0_u64..20, any::<bool>()), 1..40)) {
            let (mut now, mut damper, mut bad_since) = (Instant::now(), FlapDamper::new(AFTER), None);
            for (seconds, good) in steps {
                now += Duration::from_secs(seconds);
                let health = if good { NodeHealth::Verified } else { bad() };
                bad_since = if good { None } else { bad_since.or(Some(now)) };
                let has_lasted = bad_since.is_some_and(|since| now.duration_since(since) >= AFTER);
                prop_assert_eq!(damper.decide(&health, now) == Some(RequestedTaint::Tainted), has_lasted);
                prop_assert_eq!(damper.decide(&health, now) == Some(RequestedTaint::Free), good);
            }
        }
    }
}
