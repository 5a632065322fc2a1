//! The pods that have drifted, and what to report about them. Pure: time comes from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cni_core::pod_source::PodName;
use reasons::AgentReason;

use super::hash;
use crate::pods::check::{Comparison, PodProblem};

/// How long the same difference of the same pod is not an event again.
const EVENT_PAUSE: Duration = Duration::from_secs(6 * 3600);
/// The most events about one pod in that time. A process in the pod may make a new difference every second.
const MOST_EVENTS: usize = 4;

/// The pods that have, or had, drifted, by their UIDs.
#[derive(Debug, Default)]
pub struct DriftTracker {
    histories: BTreeMap<String, DriftHistory>,
}

#[derive(Debug)]
struct DriftHistory {
    name: PodName,
    /// The current difference, if any.
    drift: Option<String>,
    /// The kind of the current error, if any.
    error: Option<AgentReason>,
    /// Differences that were events, and when.
    events: Vec<(u64, Instant)>,
}

/// A report about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriftReport {
    /// It has drifted, or in another way than before.
    Drifted {
        /// The first difference.
        difference: String,
        /// Whether it is worth an event.
        event: bool,
    },
    /// It is as planned again.
    Recovered,
    /// It cannot be determined.
    Unknown(PodProblem),
    /// It can be determined again.
    Visible,
}

/// Where a difference comes from, as far as that is known. The agent may have seen the pod as planned before.
#[must_use]
pub const fn origin(seen: &Comparison, was_verified: bool) -> &'static str {
    match (seen, was_verified) {
        (Comparison::Interference(_), _) => {
            "A container with NET_ADMIN, or a program on the node, has made them; a new pod is redirected as planned unless it does so again"
        }
        (Comparison::NotRedirected(_), true) => {
            "Its rules were removed after the agent had verified them; a new pod is redirected as planned"
        }
        (Comparison::NotRedirected(_), false) => {
            "Either the plugin did not run when the pod started, or its rules were removed later; a new pod is redirected as planned while the agent is ready"
        }
        (
            Comparison::Different(_)
            | Comparison::AsPlanned
            | Comparison::Sandboxed(_)
            | Comparison::Unknown(_),
            _,
        ) => {
            "Either its rules were changed after it started, or its annotations or the plugin's settings were; a new pod is redirected as planned"
        }
    }
}

impl DriftTracker {
    /// Whether a check found a new problem, which a second check has to confirm.
    #[must_use]
    pub fn is_news(&self, uid: &str, result: &Comparison) -> bool {
        let history = self.histories.get(uid);
        match result {
            Comparison::AsPlanned | Comparison::Sandboxed(_) => false,
            Comparison::Different(now) | Comparison::NotRedirected(now) | Comparison::Interference(now) => {
                history.and_then(|history| history.drift.as_ref()) != Some(now)
            }
            Comparison::Unknown(now) => history.and_then(|history| history.error) != Some(now.reason),
        }
    }

    /// Takes note of the result of a check, and returns what to report.
    pub fn note(
        &mut self,
        uid: &str,
        name: &PodName,
        result: &Comparison,
        now: Instant,
    ) -> Option<DriftReport> {
        if matches!(result, Comparison::AsPlanned | Comparison::Sandboxed(_))
            && !self.histories.contains_key(uid)
        {
            return None;
        }
        let history = self.histories.entry(uid.to_owned()).or_insert_with(|| DriftHistory::new(name.clone()));
        let report = match result {
            Comparison::AsPlanned => history.clear(),
            // Reported by what is not the tracker's: it has not recovered.
            Comparison::Sandboxed(_) => {
                (history.drift, history.error) = (None, None);
                None
            }
            Comparison::Different(difference)
            | Comparison::NotRedirected(difference)
            | Comparison::Interference(difference) => history.differs(difference, now),
            Comparison::Unknown(error) => history.failed(error),
        };
        history.events.retain(|(_, at)| now.duration_since(*at) < EVENT_PAUSE);
        if history.drift.is_none() && history.error.is_none() && history.events.is_empty() {
            self.histories.remove(uid);
        }
        report
    }

    /// Forgets all other pods; returns the names of those that had drifted.
    pub fn keep(&mut self, uids: &BTreeSet<&str>) -> Vec<PodName> {
        let mut gone = Vec::new();
        self.histories.retain(|uid, history| {
            let stays = uids.contains(uid.as_str());
            if !stays && history.drift.is_some() {
                gone.push(history.name.clone());
            }
            stays
        });
        gone
    }

    /// The pods that have drifted, each with its difference.
    #[must_use]
    pub fn differences(&self) -> Vec<(String, String)> {
        let drifted = |history: &DriftHistory| Some((history.name.to_string(), history.drift.clone()?));
        let mut all: Vec<_> = self.histories.values().filter_map(drifted).collect();
        all.sort_unstable();
        all
    }

    /// How many pods have drifted, as far as is known.
    #[must_use]
    pub fn drifted(&self) -> usize {
        self.histories.values().filter(|history| history.drift.is_some()).count()
    }
}

impl DriftHistory {
    const fn new(name: PodName) -> Self {
        Self { name, drift: None, error: None, events: Vec::new() }
    }

    fn clear(&mut self) -> Option<DriftReport> {
        let (drift, error) = (self.drift.take(), self.error.take());
        match (drift, error) {
            (Some(_), _) => Some(DriftReport::Recovered),
            (None, Some(_)) => Some(DriftReport::Visible),
            (None, None) => None,
        }
    }

    fn differs(&mut self, difference: &str, now: Instant) -> Option<DriftReport> {
        self.error = None;
        if self.drift.as_deref() == Some(difference) {
            return None;
        }
        self.drift = Some(difference.to_owned());
        let hash = hash(difference);
        self.events.retain(|(_, at)| now.duration_since(*at) < EVENT_PAUSE);
        let event = self.events.len() < MOST_EVENTS && self.events.iter().all(|(other, _)| *other != hash);
        if event {
            self.events.push((hash, now));
        }
        Some(DriftReport::Drifted { difference: difference.to_owned(), event })
    }

    /// What is not seen has not recovered.
    fn failed(&mut self, error: &PodProblem) -> Option<DriftReport> {
        let is_new = self.error.replace(error.reason) != Some(error.reason);
        is_new.then(|| DriftReport::Unknown(error.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(tracker: &mut DriftTracker, result: &Comparison, now: Instant) -> Option<DriftReport> {
        tracker.note("u", &PodName { namespace: "shop".into(), name: "web".into() }, result, now)
    }

    fn different(text: &str) -> Comparison {
        Comparison::Different(text.to_owned())
    }

    fn drifted(text: &str, event: bool) -> Option<DriftReport> {
        Some(DriftReport::Drifted { difference: text.to_owned(), event })
    }

    #[test]
    fn a_difference_is_said_once_and_its_end_too() {
        let (mut tracker, now) = (DriftTracker::default(), Instant::now());
        assert_eq!(note(&mut tracker, &Comparison::AsPlanned, now), None);
        assert!(tracker.is_news("u", &different("a")));
        assert_eq!(note(&mut tracker, &different("a"), now), drifted("a", true));
        assert!(!tracker.is_news("u", &different("a")) && tracker.is_news("u", &different("b")));
        assert_eq!((note(&mut tracker, &different("a"), now), tracker.drifted()), (None, 1));
        assert_eq!(note(&mut tracker, &Comparison::AsPlanned, now), Some(DriftReport::Recovered));
        assert_eq!((note(&mut tracker, &Comparison::AsPlanned, now), tracker.drifted()), (None, 0));
    }

    #[test]
    fn a_pod_that_comes_and_goes_is_no_stream_of_events() {
        let (mut tracker, now) = (DriftTracker::default(), Instant::now());
        assert_eq!(note(&mut tracker, &different("a"), now), drifted("a", true));
        note(&mut tracker, &Comparison::AsPlanned, now);
        assert_eq!(
            note(&mut tracker, &different("a"), now),
            drifted("a", false),
            "reported, without an event"
        );
        let events = (0..100).filter(|count| {
            note(&mut tracker, &different(&count.to_string()), now) == drifted(&count.to_string(), true)
        });
        assert_eq!(events.count(), MOST_EVENTS - 1);
        assert_eq!(tracker.histories["u"].events.len(), MOST_EVENTS);
        assert_eq!(
            note(&mut tracker, &different("a"), now + EVENT_PAUSE),
            drifted("a", true),
            "after a long while"
        );
    }

    #[test]
    fn a_cause_is_stated_only_where_it_is_known() {
        let missing = Comparison::NotRedirected("no rules".into());
        assert!(origin(&missing, false).starts_with("Either the plugin did not run"));
        assert!(origin(&missing, true).starts_with("Its rules were removed after the agent had verified"));
        for was_verified in [false, true] {
            assert!(origin(&different("a"), was_verified).starts_with("Either its rules were changed"));
            let other = Comparison::Interference("a rule".into());
            assert!(!origin(&other, was_verified).contains("annotations"));
        }
    }

    #[test]
    fn what_is_not_seen_has_not_recovered() {
        let (mut tracker, now) = (DriftTracker::default(), Instant::now());
        note(&mut tracker, &different("a"), now);
        let error = PodProblem::new(AgentReason::NotFound, "nowhere");
        assert_eq!(
            note(&mut tracker, &Comparison::Unknown(error.clone()), now),
            Some(DriftReport::Unknown(error.clone()))
        );
        assert_eq!(
            (note(&mut tracker, &Comparison::Unknown(error.clone()), now), tracker.drifted()),
            (None, 1)
        );
        assert!(!tracker.is_news("u", &Comparison::Unknown(error)));
        assert!(tracker.is_news("u", &Comparison::Unknown(PodProblem::new(AgentReason::Ambiguous, "two"))));
        assert_eq!(note(&mut tracker, &Comparison::AsPlanned, now), Some(DriftReport::Recovered));
        note(&mut tracker, &Comparison::Unknown(PodProblem::new(AgentReason::Unreadable, "no")), now);
        assert_eq!(note(&mut tracker, &Comparison::AsPlanned, now), Some(DriftReport::Visible));
    }

    #[test]
    fn pods_that_are_gone_are_forgotten() {
        let (mut tracker, now) = (DriftTracker::default(), Instant::now());
        for uid in ["a", "b"] {
            let name = PodName { namespace: "shop".into(), name: uid.into() };
            tracker.note(uid, &name, &different("x"), now);
        }
        let gone = tracker.keep(&BTreeSet::from(["b", "c"]));
        assert_eq!(gone.iter().map(ToString::to_string).collect::<Vec<_>>(), ["shop/a"]);
        assert_eq!((tracker.drifted(), tracker.histories.len()), (1, 1));
        assert_eq!(tracker.differences(), [("shop/b".to_owned(), "x".to_owned())]);
        note(&mut tracker, &different("a"), now);
        note(&mut tracker, &Comparison::AsPlanned, now + EVENT_PAUSE);
        assert_eq!(tracker.histories.len(), 1, "nothing is kept of a pod that is well and was so for long");
    }
}
