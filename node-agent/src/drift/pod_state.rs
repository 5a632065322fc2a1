//! The whole node's answer: how many of its meshed pods are known to be redirected as planned, and why not the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::look::Comparison;

/// What is known of one pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodState {
    /// It is redirected as planned, and nothing comes in the way.
    Verified,
    /// Nothing of the mesh is in its network namespace.
    NotRedirected,
    /// It is redirected otherwise than planned.
    Drifted,
    /// It cannot be told.
    Unknown,
    /// Nobody has looked yet.
    Unseen,
}

impl PodState {
    const ALL: [Self; 5] = [Self::Verified, Self::NotRedirected, Self::Drifted, Self::Unknown, Self::Unseen];

    /// What a comparison says.
    #[must_use]
    pub const fn of(seen: &Comparison) -> Self {
        match seen {
            Comparison::AsPlanned => Self::Verified,
            Comparison::NotRedirected(_) => Self::NotRedirected,
            Comparison::Different(_) | Comparison::Interference(_) => Self::Drifted,
            Comparison::Trouble(_) => Self::Unknown,
        }
    }

    /// The word for metrics.
    const fn word(self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::NotRedirected => "not_redirected",
            Self::Drifted => "drifted",
            Self::Unknown => "unknown",
            Self::Unseen => "unseen",
        }
    }

    /// The words for people.
    const fn words(self) -> &'static str {
        match self {
            Self::Verified => "verified",
            Self::NotRedirected => "not redirected",
            Self::Drifted => "drifted",
            Self::Unknown => "unknown",
            Self::Unseen => "not yet looked at",
        }
    }
}

/// What is known of the node's meshed pods, by their UIDs.
#[derive(Debug, Default)]
pub struct PodStates(BTreeMap<String, PodState>);

impl PodStates {
    /// These are the pods that there are.
    pub fn keep(&mut self, uids: &BTreeSet<&str>) {
        self.0.retain(|uid, _| uids.contains(uid.as_str()));
        for uid in uids {
            if !self.0.contains_key(*uid) {
                self.0.insert((*uid).to_owned(), PodState::Unseen);
            }
        }
    }

    /// Takes note of a look.
    pub fn note(&mut self, uid: &str, state: PodState) {
        self.0.insert(uid.to_owned(), state);
    }

    /// Whether nobody has looked at a pod yet.
    #[must_use]
    pub fn is_unseen(&self, uid: &str) -> bool {
        self.0.get(uid).is_none_or(|state| *state == PodState::Unseen)
    }

    fn count(&self, of: PodState) -> usize {
        self.0.values().filter(|state| **state == of).count()
    }

    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        let mut words =
            format!("{} of {} meshed pods verified", self.count(PodState::Verified), self.0.len());
        let others = PodState::ALL.into_iter().filter(|state| *state != PodState::Verified);
        let others = others.map(|state| (state, self.count(state))).filter(|(_, count)| *count > 0);
        for (index, (state, count)) in others.enumerate() {
            // Writing to a string does not fail.
            let _ = write!(words, "{}{count} {}", if index == 0 { ": " } else { ", " }, state.words());
        }
        words
    }
}

/// One label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabel {
    state: &'static str,
}

/// The answer, shared by the drift watch and the servers.
#[derive(Debug)]
pub struct WholeNode {
    /// By state.
    pub pods: Family<StateLabel, Gauge>,
    words: Mutex<String>,
}

/// The answer where nobody looks.
const OFF: &str =
    "the drift watch is off (DRIFT_WATCH_INTERVAL), so whether the pods that run are redirected is not known";

impl Default for WholeNode {
    fn default() -> Self {
        let answer = Self { pods: Family::default(), words: Mutex::new(OFF.to_owned()) };
        answer.count(&PodStates::default());
        answer
    }
}

impl WholeNode {
    /// What is known now; or why nothing new can be known.
    pub fn show(&self, states: &PodStates, blind: Option<&str>) {
        self.count(states);
        let words = states.words();
        self.say(match blind {
            None => words,
            Some(reason) => {
                format!("{words}, as far as was known before the drift watch saw nothing any more ({reason})")
            }
        });
    }

    /// Nobody looks any more.
    pub fn off(&self) {
        self.count(&PodStates::default());
        self.say(OFF.to_owned());
    }

    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        self.words.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn say(&self, words: String) {
        *self.words.lock().unwrap_or_else(PoisonError::into_inner) = words;
    }

    fn count(&self, states: &PodStates) {
        for state in PodState::ALL {
            let count = i64::try_from(states.count(state)).unwrap_or(i64::MAX);
            self.pods.get_or_create(&StateLabel { state: state.word() }).set(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_counts_every_pod_once_and_names_every_cause() {
        let mut states = PodStates::default();
        assert_eq!(states.words(), "0 of 0 meshed pods verified");
        states.keep(&BTreeSet::from(["a", "b", "c", "d", "e", "f"]));
        states.note("a", PodState::of(&Comparison::AsPlanned));
        states.note("b", PodState::of(&Comparison::NotRedirected("x".into())));
        states.note("c", PodState::of(&Comparison::Different("x".into())));
        states.note("d", PodState::of(&Comparison::Interference("x".into())));
        states.note("e", PodState::of(&Comparison::Trouble(crate::drift::look::Trouble::Failed("x".into()))));
        assert_eq!(
            states.words(),
            "1 of 6 meshed pods verified: 1 not redirected, 2 drifted, 1 unknown, 1 not yet looked at"
        );
        assert!(states.is_unseen("f") && states.is_unseen("never heard of") && !states.is_unseen("a"));
        states.keep(&BTreeSet::from(["a"]));
        assert_eq!(states.words(), "1 of 1 meshed pods verified");
    }

    #[test]
    fn where_nobody_looks_nothing_is_claimed() {
        let (node, mut states) = (WholeNode::default(), PodStates::default());
        let verified = || node.pods.get_or_create(&StateLabel { state: "verified" }).get();
        assert!(node.words().contains("DRIFT_WATCH_INTERVAL") && verified() == 0);
        states.note("a", PodState::Verified);
        node.show(&states, None);
        assert_eq!((node.words().as_str(), verified()), ("1 of 1 meshed pods verified", 1));
        node.show(&states, Some("no_pods"));
        assert!(node.words().contains("saw nothing any more (no_pods)"), "{}", node.words());
        node.off();
        assert!(node.words().contains("DRIFT_WATCH_INTERVAL") && verified() == 0);
    }
}
