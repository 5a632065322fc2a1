//! Whether a node is verified, and when that is believed. Pure.

use std::time::{Duration, Instant};

use super::node::Condition;

/// What the agent has found out about its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// A pod that starts now is redirected: the agent is ready, and a probe namespace was redirected.
    Verified,
    /// A pod that starts now would not be redirected, or would not start.
    NotReady(String),
    /// The agent is ready, and redirecting a probe namespace failed.
    ProbeFailed(String),
    /// The agent is ready, and cannot try it on a probe namespace. Neither good nor bad: the taint stays as it is.
    ProbeImpossible(String),
}

impl Verdict {
    /// What the node's condition says.
    #[must_use]
    pub fn condition(&self, of_type: &str) -> Condition {
        let (status, reason, message) = match self {
            Self::Verified => ("True", "Verified", "pods of the mesh that start here are redirected"),
            Self::NotReady(why) => ("False", "AgentNotReady", why.as_str()),
            Self::ProbeFailed(why) => ("False", "ProbeFailed", why.as_str()),
            Self::ProbeImpossible(why) => ("Unknown", "ProbeImpossible", why.as_str()),
        };
        Condition {
            r#type: of_type.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: message.chars().take(1000).collect(),
            last_transition_time: None,
        }
    }

    /// Whether another verdict says the same, details aside, which may change all the time.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    /// What is wrong; nothing where nothing is.
    #[must_use]
    pub fn trouble(&self) -> &str {
        match self {
            Self::Verified => "",
            Self::NotReady(why) | Self::ProbeFailed(why) | Self::ProbeImpossible(why) => why,
        }
    }
}

/// What a verdict means for the taint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// The node is to be free of it.
    Free,
    /// The node is to have it.
    Tainted,
    /// It stays as it is, for now at least.
    AsItIs,
}

/// Believes what is good at once, and what is bad when it has lasted.
#[derive(Debug)]
pub struct Steady {
    after: Duration,
    bad_since: Option<Instant>,
}

impl Steady {
    /// Believes what is bad after so long.
    #[must_use]
    pub const fn new(after: Duration) -> Self {
        Self { after, bad_since: None }
    }

    /// What a verdict means at this moment.
    pub fn judge(&mut self, verdict: &Verdict, now: Instant) -> Judgement {
        match verdict {
            Verdict::Verified => {
                self.bad_since = None;
                Judgement::Free
            }
            Verdict::ProbeImpossible(_) => {
                self.bad_since = None;
                Judgement::AsItIs
            }
            Verdict::NotReady(_) | Verdict::ProbeFailed(_) => {
                let since = *self.bad_since.get_or_insert(now);
                if now.duration_since(since) >= self.after { Judgement::Tainted } else { Judgement::AsItIs }
            }
        }
    }
}

/// How long a taint that somebody else has removed is left so, at first and at most.
const FIRST_TRUCE: Duration = Duration::from_secs(60);
const LONGEST_TRUCE: Duration = Duration::from_secs(960);

/// Gives way to somebody who removes the taint that this agent has put there: each time for longer.
#[derive(Debug, Default)]
pub struct Truce {
    /// The UID of the node where this agent has put it.
    is_ours_on: Option<String>,
    until: Option<Instant>,
    last: Option<Duration>,
}

/// Whether the taint may be put there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// It may.
    Granted,
    /// Somebody else has removed it, which is new; it is left so for this long.
    Begins(Duration),
    /// It is left so.
    Goes,
}

impl Truce {
    /// Notes what this agent has made of the taint of a node.
    pub fn note(&mut self, is_tainted: bool, uid: &str) {
        if is_tainted {
            self.is_ours_on = Some(uid.to_owned());
        } else {
            *self = Self::default();
        }
    }

    /// Whether a taint that is missing may be put on a node. From another node of its name nobody has removed anything.
    pub fn ask(&mut self, uid: &str, now: Instant) -> Leave {
        if self.is_ours_on.as_deref() != Some(uid) {
            *self = Self::default();
        }
        match self.until {
            _ if self.is_ours_on.is_none() => Leave::Granted,
            Some(until) if now < until => Leave::Goes,
            Some(_) => {
                self.until = None;
                Leave::Granted
            }
            None => {
                let lasts = self.last.map_or(FIRST_TRUCE, |last| (last * 2).min(LONGEST_TRUCE));
                (self.until, self.last) = (Some(now + lasts), Some(lasts));
                Leave::Begins(lasts)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AFTER: Duration = Duration::from_secs(30);

    fn bad() -> Verdict {
        Verdict::NotReady("no entry".into())
    }

    #[test]
    fn a_blip_does_not_taint_and_what_lasts_does() {
        let (start, mut steady) = (Instant::now(), Steady::new(AFTER));
        let at = |seconds| start + Duration::from_secs(seconds);
        for (second, verdict, judgement) in [
            (0, bad(), Judgement::AsItIs),
            (1, Verdict::Verified, Judgement::Free),
            (10, bad(), Judgement::AsItIs),
            (39, Verdict::ProbeFailed(String::new()), Judgement::AsItIs),
            (40, bad(), Judgement::Tainted),
            (500, bad(), Judgement::Tainted),
            (501, Verdict::Verified, Judgement::Free),
            (502, bad(), Judgement::AsItIs),
            (520, Verdict::ProbeImpossible(String::new()), Judgement::AsItIs),
            (533, bad(), Judgement::AsItIs),
            (563, bad(), Judgement::Tainted),
        ] {
            assert_eq!(steady.judge(&verdict, at(second)), judgement, "{second} {verdict:?}");
        }
    }

    #[test]
    fn whoever_removes_the_taint_again_and_again_is_given_way_for_longer() {
        let (start, mut truce) = (Instant::now(), Truce::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(truce.ask("u", at(0)), Leave::Granted, "nobody has removed anything");
        truce.note(true, "u");
        assert_eq!(truce.ask("u", at(10)), Leave::Begins(Duration::from_secs(60)));
        assert_eq!(truce.ask("u", at(69)), Leave::Goes);
        assert_eq!(truce.ask("u", at(70)), Leave::Granted);
        truce.note(true, "u");
        assert_eq!(truce.ask("u", at(80)), Leave::Begins(Duration::from_secs(120)));
        assert_eq!(truce.ask("u", at(200)), Leave::Granted);
        for _ in 0..9 {
            truce.note(true, "u");
            let now = at(10_000);
            let Leave::Begins(lasts) = truce.ask("u", now) else { panic!("it was removed") };
            assert!(lasts <= LONGEST_TRUCE && truce.ask("u", now + lasts) == Leave::Granted);
        }
        truce.note(false, "u");
        assert_eq!(truce.ask("u", at(20_000)), Leave::Granted);
    }

    #[test]
    fn a_node_that_was_replaced_has_lost_its_taint_to_nobody() {
        let (now, mut truce) = (Instant::now(), Truce::default());
        truce.note(true, "old");
        assert_eq!(truce.ask("new", now), Leave::Granted);
        truce.note(true, "new");
        assert_eq!(truce.ask("new", now), Leave::Begins(FIRST_TRUCE));
    }

    #[test]
    fn the_condition_says_what_the_verdict_is() {
        for (verdict, status, reason) in [
            (Verdict::Verified, "True", "Verified"),
            (bad(), "False", "AgentNotReady"),
            (Verdict::ProbeFailed("p".into()), "False", "ProbeFailed"),
            (Verdict::ProbeImpossible("p".into()), "Unknown", "ProbeImpossible"),
        ] {
            let condition = verdict.condition("t");
            assert_eq!((condition.status.as_str(), condition.reason.as_str()), (status, reason));
            assert!(!condition.message.is_empty());
            assert!(
                cni_core::reasons::VERDICTS.iter().any(|sign| sign.word == reason),
                "explained: {reason}"
            );
        }
    }

    proptest! {
        #[test]
        fn only_what_was_bad_all_the_time_taints(steps in prop::collection::vec((0_u64..20, any::<bool>()), 1..40)) {
            let (mut now, mut steady, mut bad_since) = (Instant::now(), Steady::new(AFTER), None);
            for (seconds, good) in steps {
                now += Duration::from_secs(seconds);
                let verdict = if good { Verdict::Verified } else { bad() };
                bad_since = if good { None } else { bad_since.or(Some(now)) };
                let has_lasted = bad_since.is_some_and(|since| now.duration_since(since) >= AFTER);
                prop_assert_eq!(steady.judge(&verdict, now) == Judgement::Tainted, has_lasted);
                prop_assert_eq!(steady.judge(&verdict, now) == Judgement::Free, good);
            }
        }
    }
}
