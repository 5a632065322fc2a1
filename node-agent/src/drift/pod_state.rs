//! The state of the node's meshed pods: how many are verified to be redirected as planned, and what the others are.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex};

use cni_core::enrolment_report::reasons;
use cni_core::states::PodState;
use controller_runtime::lock;
use controller_runtime::metrics::gauged;

use crate::metrics::{Metrics, StateLabel};

/// What is known of the node's meshed pods, by their UIDs.
#[derive(Debug, Default)]
pub struct PodStates {
    states: BTreeMap<String, PodState>,
    /// Those whose network namespace is not known, so that nothing watches them.
    unwatched: BTreeSet<String>,
    /// What interferes in a pod because it is accepted: a hash of the words.
    accepted: BTreeMap<String, u64>,
}

impl PodStates {
    /// These are all pods.
    pub fn keep(&mut self, uids: &BTreeSet<&str>) {
        self.states.retain(|uid, _| uids.contains(uid.as_str()));
        self.unwatched.retain(|uid| uids.contains(uid.as_str()));
        self.accepted.retain(|uid, _| uids.contains(uid.as_str()));
        for uid in uids {
            if !self.states.contains_key(*uid) {
                self.states.insert((*uid).to_owned(), PodState::Unseen);
            }
        }
    }

    /// Takes note of a check, and of whether the pod's network namespace is not known. Returns whether that is news.
    pub fn note(&mut self, uid: &str, state: PodState, is_unwatched: bool) -> bool {
        if self.states.get(uid) == Some(&state) && self.unwatched.contains(uid) == is_unwatched {
            return false;
        }
        self.states.insert(uid.to_owned(), state);
        if is_unwatched {
            self.unwatched.insert(uid.to_owned());
        } else {
            self.unwatched.remove(uid);
        }
        true
    }

    /// Takes note of what interferes in a pod with its effect accepted. Returns whether it is new.
    pub fn accepts(&mut self, uid: &str, accepted: &[String]) -> bool {
        if accepted.is_empty() {
            return self.accepted.remove(uid).is_some();
        }
        let mut hasher = DefaultHasher::new();
        accepted.hash(&mut hasher);
        let now = hasher.finish();
        self.accepted.insert(uid.to_owned(), now) != Some(now)
    }

    /// Whether a pod was not checked yet, or its network namespace was not known then.
    #[must_use]
    pub fn wants_check(&self, uid: &str) -> bool {
        self.unwatched.contains(uid) || self.states.get(uid).is_none_or(|state| *state == PodState::Unseen)
    }

    fn count(&self, of: PodState) -> usize {
        self.states.values().filter(|state| **state == of).count()
    }

    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        let mut words =
            format!("{} of {} meshed pods verified", self.count(PodState::Verified), self.states.len());
        let others = PodState::MESHED.into_iter().filter(|state| *state != PodState::Verified);
        let others = others.map(|state| (state, self.count(state))).filter(|(_, count)| *count > 0);
        for (index, (state, count)) in others.enumerate() {
            // Writing to a string does not fail.
            let _ = write!(words, "{}{count} {}", if index == 0 { ": " } else { ", " }, state.word());
        }
        if !self.unwatched.is_empty() {
            let _ = write!(words, "; {} unwatched", self.unwatched.len());
        }
        if !self.accepted.is_empty() {
            let _ = write!(words, "; {} with accepted rules of other programs", self.accepted.len());
        }
        words
    }
}

/// The summary, shared by the drift watch and the servers.
#[derive(Debug)]
pub struct NodeSummary {
    metrics: Arc<Metrics>,
    words: Mutex<String>,
}

/// The summary while the drift watch is off.
const OFF: &str =
    "the drift watch is off (DRIFT_WATCH_INTERVAL), so the redirection of running pods is not known";

impl NodeSummary {
    /// Of a node whose pods are not checked.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>) -> Self {
        let summary = Self { metrics, words: Mutex::default() };
        summary.off();
        summary
    }

    /// What is known now, with the pods that are not redirected as planned, each with its difference; or why nothing new is.
    pub fn show(&self, states: &PodStates, different: &[(String, String)], blind: Option<&str>) {
        let mut words = states.words();
        if let Some(reason) = blind {
            // Writing to a string does not fail.
            let _ = write!(words, ", as of the last successful check ({reason})");
        }
        self.set(states, words + &reasons(different));
    }

    /// The pods are not checked any more.
    pub fn off(&self) {
        self.set(&PodStates::default(), OFF.to_owned());
    }

    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        lock(&self.words).clone()
    }

    fn set(&self, states: &PodStates, words: String) {
        *lock(&self.words) = words;
        for state in PodState::MESHED {
            let label = StateLabel { state: state.word() };
            self.metrics.meshed_pods.get_or_create(&label).set(gauged(states.count(state)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod_check::{Comparison, PodProblem, UNREADABLE};

    #[test]
    fn the_answer_counts_every_pod_once_and_names_every_cause() {
        let mut states = PodStates::default();
        assert_eq!(states.words(), "0 of 0 meshed pods verified");
        states.keep(&BTreeSet::from(["a", "b", "c", "d", "e", "f"]));
        assert!(states.note("a", Comparison::AsPlanned.state(), false));
        assert!(!states.note("a", Comparison::AsPlanned.state(), false));
        states.note("b", Comparison::NotRedirected("x".into()).state(), false);
        states.note("c", Comparison::Different("x".into()).state(), false);
        states.note("d", Comparison::Interference("x".into()).state(), false);
        states.note("e", Comparison::Unknown(PodProblem::new(UNREADABLE, "x")).state(), false);
        assert_eq!(
            states.words(),
            "1 of 6 meshed pods verified: 1 not-redirected, 1 drifted, 1 interference, 1 unknown, 1 unseen"
        );
        assert!(states.wants_check("f") && states.wants_check("unknown") && !states.wants_check("a"));
        assert!(states.note("e", PodState::Unknown, true) && !states.note("e", PodState::Unknown, true));
        assert!(states.wants_check("e") && states.words().ends_with("1 unseen; 1 unwatched"));
        let rule = ["a rule".to_owned()];
        assert!(states.accepts("a", &rule) && !states.accepts("a", &rule) && states.accepts("f", &rule));
        assert!(states.words().ends_with("; 2 with accepted rules of other programs"), "{}", states.words());
        states.keep(&BTreeSet::from(["a"]));
        assert!(states.accepts("a", &[]) && !states.accepts("a", &[]));
        assert_eq!(states.words(), "1 of 1 meshed pods verified");
    }

    #[test]
    fn while_the_watch_is_off_nothing_is_claimed() {
        let (metrics, _) = Metrics::new();
        let (node, mut states) = (NodeSummary::new(metrics.clone()), PodStates::default());
        let verified = || metrics.meshed_pods.get_or_create(&StateLabel { state: "verified" }).get();
        assert!(node.words().contains("DRIFT_WATCH_INTERVAL") && verified() == 0);
        states.note("a", PodState::Verified, false);
        node.show(&states, &[], None);
        assert_eq!((node.words().as_str(), verified()), ("1 of 1 meshed pods verified", 1));
        let different = [("shop/web".to_owned(), "does not converge".to_owned())];
        node.show(&states, &different, Some("no_pods"));
        let words = "1 of 1 meshed pods verified, as of the last successful check (no_pods)\n  shop/web: does not converge";
        assert_eq!(node.words(), words);
        node.off();
        assert!(node.words().contains("DRIFT_WATCH_INTERVAL") && verified() == 0);
    }
}
