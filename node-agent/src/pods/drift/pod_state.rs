//! The state of the node's meshed pods: how many are verified to be redirected as planned, and what the others are.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent_runtime::lock;
use agent_runtime::metrics::gauged;
use cni_core::enrolment_report::reasons;
use reasons::PodState;

use super::hash;
use crate::metrics::{Metrics, StateLabel};

/// After how many intervals without a check a verified pod is unverified.
const STALE_AFTER: u32 = 3;

/// What a check has found.
#[derive(Debug, Clone, Copy)]
struct Found {
    state: PodState,
    at: Instant,
    /// Its network namespace is not known, so that nothing watches it.
    is_unwatched: bool,
    /// What interferes because it is accepted, if anything: a hash of the words.
    accepted: Option<u64>,
}

impl Found {
    const fn nothing(at: Instant) -> Self {
        Self { state: PodState::Unseen, at, is_unwatched: false, accepted: None }
    }

    /// How the pod stands now.
    fn state_at(self, now: Instant, interval: Duration) -> PodState {
        let is_stale = now.saturating_duration_since(self.at) > interval * STALE_AFTER;
        if self.state == PodState::Verified && is_stale { PodState::Unverified } else { self.state }
    }
}

/// What is known of the node's meshed pods, by their UIDs.
#[derive(Debug, Default, Clone)]
pub struct PodStates {
    states: BTreeMap<String, Found>,
}

impl PodStates {
    /// These are all pods.
    pub fn keep(&mut self, uids: &BTreeSet<&str>, now: Instant) {
        self.states.retain(|uid, _| uids.contains(uid.as_str()));
        for uid in uids {
            if !self.states.contains_key(*uid) {
                self.states.insert((*uid).to_owned(), Found::nothing(now));
            }
        }
    }

    /// Takes note of a check, and of whether the pod's network namespace is not known. Returns whether that is news.
    pub fn note(&mut self, uid: &str, state: PodState, is_unwatched: bool, now: Instant) -> bool {
        let found = self.states.entry(uid.to_owned()).or_insert(Found::nothing(now));
        let is_news = (found.state, found.is_unwatched) != (state, is_unwatched);
        *found = Found { state, at: now, is_unwatched, ..*found };
        is_news
    }

    /// Whether the last check of a pod has verified it.
    #[must_use]
    pub fn was_verified(&self, uid: &str) -> bool {
        self.states.get(uid).is_some_and(|found| found.state == PodState::Verified)
    }

    /// Takes note of what interferes in a pod with its effect accepted. Returns whether it is new.
    pub fn accepts(&mut self, uid: &str, accepted: &[String]) -> bool {
        let now = (!accepted.is_empty()).then(|| hash(accepted));
        self.states.get_mut(uid).is_some_and(|found| std::mem::replace(&mut found.accepted, now) != now)
    }

    /// Whether a pod was not checked yet, or its network namespace was not known then.
    #[must_use]
    pub fn wants_check(&self, uid: &str) -> bool {
        self.states.get(uid).is_none_or(|found| found.is_unwatched || found.state == PodState::Unseen)
    }

    /// Whether no pod was checked yet.
    fn is_unchecked(&self) -> bool {
        self.states.values().all(|found| found.state == PodState::Unseen)
    }

    /// How many pods are in a state, where they are checked at this interval.
    fn count(&self, of: PodState, now: Instant, interval: Duration) -> usize {
        self.states.values().filter(|found| found.state_at(now, interval) == of).count()
    }

    /// Of the pods that count as verified and whose check is overdue: their number, and the age of the oldest check.
    fn overdue(&self, now: Instant, interval: Duration) -> Option<(usize, Duration)> {
        let verified =
            self.states.values().filter(|found| found.state_at(now, interval) == PodState::Verified);
        let ages = verified.map(|found| now.saturating_duration_since(found.at));
        // A pod's place in a round may change.
        let overdue: Vec<Duration> = ages.filter(|age| *age > interval * 3 / 2).collect();
        Some((overdue.len(), overdue.into_iter().max()?))
    }

    /// In words.
    #[must_use]
    pub fn words(&self, now: Instant, interval: Duration) -> String {
        let verified = self.count(PodState::Verified, now, interval);
        let mut words = format!("{verified} of {} meshed pods verified", self.states.len());
        let others = PodState::MESHED.into_iter().filter(|state| *state != PodState::Verified);
        let others = others.map(|state| (state, self.count(state, now, interval)));
        let others = others.filter(|(_, count)| *count > 0);
        for (index, (state, count)) in others.enumerate() {
            // Writing to a string does not fail.
            let _ = write!(words, "{}{count} {}", if index == 0 { ": " } else { ", " }, state.word());
        }
        if let Some((count, age)) = self.overdue(now, interval) {
            let _ = write!(words, "; {count} verified not checked for up to {} s", age.as_secs());
        }
        let unwatched = self.states.values().filter(|found| found.is_unwatched).count();
        let accepting = self.states.values().filter(|found| found.accepted.is_some()).count();
        for (count, what) in [(unwatched, "unwatched"), (accepting, "with accepted rules of other programs")]
        {
            if count > 0 {
                let _ = write!(words, "; {count} {what}");
            }
        }
        words
    }
}

/// The summary, shared by the drift watch and the servers.
#[derive(Debug)]
pub struct NodeSummary {
    metrics: Arc<Metrics>,
    shown: Mutex<Option<Shown>>,
}

/// What the drift watch knows.
#[derive(Debug)]
struct Shown {
    states: PodStates,
    /// The pods that are not redirected as planned, each with its difference.
    different: Vec<(String, String)>,
    /// Why it knows nothing new.
    blind: Option<&'static str>,
    interval: Duration,
}

/// The summary while the drift watch is off.
const OFF: &str = "the drift watch is off (DRIFT_WATCH_INTERVAL, chart: driftWatch.interval), so the redirection of running pods is not known";

impl NodeSummary {
    /// Of a node whose pods are not checked.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>) -> Self {
        let summary = Self { metrics, shown: Mutex::default() };
        summary.off();
        summary
    }

    /// What is known now of pods that are checked at this interval, with those that are not redirected as planned, each with its
    /// difference; or why nothing new is.
    pub fn show(
        &self,
        states: &PodStates,
        different: Vec<(String, String)>,
        blind: Option<&'static str>,
        interval: Duration,
    ) {
        *lock(&self.shown) = Some(Shown { states: states.clone(), different, blind, interval });
        self.count(Instant::now());
    }

    /// The pods will be checked at this interval.
    pub fn begin(&self, interval: Duration) {
        if lock(&self.shown).is_none() {
            self.show(&PodStates::default(), Vec::new(), Some("starting"), interval);
        }
    }

    /// The pods are not checked any more.
    pub fn off(&self) {
        *lock(&self.shown) = None;
        self.count(Instant::now());
    }

    /// In words, as of this moment: a drift watch that is stuck shows nothing new.
    #[must_use]
    pub fn words(&self, now: Instant) -> String {
        match &*lock(&self.shown) {
            None => OFF.to_owned(),
            Some(Shown { states, blind: Some(reason), .. }) if states.is_unchecked() => {
                format!("no meshed pod was checked yet ({reason})")
            }
            Some(Shown { states, different, blind, interval }) => {
                let mut words = states.words(now, *interval);
                if let Some(reason) = blind {
                    // Writing to a string does not fail.
                    let _ = write!(words, ", as of the last successful check ({reason})");
                }
                words + &reasons(different)
            }
        }
    }

    /// Sets the metric, as of this moment.
    pub fn count(&self, now: Instant) {
        let shown = lock(&self.shown);
        for state in PodState::MESHED {
            let label = StateLabel { state: state.into() };
            let of = |shown: &Shown| shown.states.count(state, now, shown.interval);
            self.metrics.meshed_pods.get_or_create(&label).set(gauged(shown.as_ref().map_or(0, of)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::check::{Comparison, PodProblem};
    use crate::pods::drift::tracker::DriftTracker;
    use cni_core::pod_source::PodName;
    use reasons::AgentReason;

    const INTERVAL: Duration = Duration::from_secs(100);

    #[test]
    fn a_verdict_that_no_check_renews_ages_and_ends() {
        let (metrics, _) = Metrics::new();
        let (node, mut states, start) =
            (NodeSummary::new(metrics.clone()), PodStates::default(), Instant::now());
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        states.note("a", PodState::Verified, false, start);
        states.note("b", PodState::Drifted, false, start);
        states.note("c", PodState::Verified, false, after(290));
        node.show(&states, Vec::new(), None, INTERVAL);
        let words = |seconds| node.words(after(seconds));
        assert_eq!(words(150), "2 of 3 meshed pods verified: 1 drifted");
        assert_eq!(
            words(151),
            "2 of 3 meshed pods verified: 1 drifted; 1 verified not checked for up to 151 s"
        );
        assert_eq!(
            words(300),
            "2 of 3 meshed pods verified: 1 drifted; 1 verified not checked for up to 300 s"
        );
        assert_eq!(words(301), "1 of 3 meshed pods verified: 1 unverified, 1 drifted");
        node.count(after(301));
        let counted = |state: PodState| metrics.meshed_pods.get_or_create(&state.into()).get();
        assert_eq!([PodState::Verified, PodState::Unverified, PodState::Drifted].map(counted), [1, 1, 1]);
        assert!(!states.note("a", PodState::Verified, false, after(302)), "it was verified before");
        node.show(&states, Vec::new(), None, INTERVAL);
        assert_eq!(words(303), "2 of 3 meshed pods verified: 1 drifted");
    }

    #[test]
    fn the_answer_counts_every_pod_once_and_names_every_cause() {
        let (mut states, now) = (PodStates::default(), Instant::now());
        let words = |states: &PodStates| states.words(now, INTERVAL);
        assert_eq!(words(&states), "0 of 0 meshed pods verified");
        states.keep(&BTreeSet::from(["a", "b", "c", "d", "e", "f"]), now);
        assert!(states.note("a", Comparison::AsPlanned.state(), false, now));
        assert!(!states.note("a", Comparison::AsPlanned.state(), false, now));
        states.note("b", Comparison::NotRedirected("x".into()).state(), false, now);
        states.note("c", Comparison::Different("x".into()).state(), false, now);
        states.note("d", Comparison::Interference("x".into()).state(), false, now);
        states.note(
            "e",
            Comparison::Unknown(PodProblem::new(AgentReason::Unreadable, "x")).state(),
            false,
            now,
        );
        assert_eq!(
            words(&states),
            "1 of 6 meshed pods verified: 1 not-redirected, 1 drifted, 1 interference, 1 unknown, 1 unseen"
        );
        assert!(states.wants_check("f") && states.wants_check("unknown") && !states.wants_check("a"));
        assert!(
            states.note("e", PodState::Unknown, true, now) && !states.note("e", PodState::Unknown, true, now)
        );
        assert!(states.wants_check("e") && words(&states).ends_with("1 unseen; 1 unwatched"));
        let rule = ["a rule".to_owned()];
        assert!(states.accepts("a", &rule) && !states.accepts("a", &rule) && states.accepts("f", &rule));
        assert!(words(&states).ends_with("; 2 with accepted rules of other programs"), "{}", words(&states));
        states.keep(&BTreeSet::from(["a"]), now);
        assert!(states.accepts("a", &[]) && !states.accepts("a", &[]));
        assert_eq!(words(&states), "1 of 1 meshed pods verified");
    }

    #[test]
    fn the_gauge_of_drifted_pods_is_the_sum_of_three_states_and_of_pods_unknown_since() {
        let (mut states, mut tracker, now) = (PodStates::default(), DriftTracker::default(), Instant::now());
        let mut check = |uid: &str, seen: Comparison| {
            states.note(uid, seen.state(), false, now);
            tracker.note(uid, &PodName { namespace: "shop".into(), name: uid.into() }, &seen, now);
            let count = |state| states.count(state, now, INTERVAL);
            let differ = [PodState::NotRedirected, PodState::Drifted, PodState::Interference].map(count);
            (tracker.drifted(), differ.iter().sum::<usize>())
        };
        let unknown = || Comparison::Unknown(PodProblem::new(AgentReason::Unreadable, "x"));
        assert_eq!(check("a", Comparison::NotRedirected("x".into())), (1, 1));
        assert_eq!(check("b", Comparison::Different("x".into())), (2, 2));
        assert_eq!(check("c", Comparison::Interference("x".into())), (3, 3));
        assert_eq!(check("d", unknown()), (3, 3), "it was never seen to differ");
        assert_eq!(check("b", unknown()), (3, 2), "it has not recovered");
        assert_eq!(check("b", Comparison::AsPlanned), (2, 2));
        assert_eq!(check("a", Comparison::Sandboxed("x".into())), (1, 1));
    }

    #[test]
    fn while_the_watch_is_off_nothing_is_claimed() {
        let (metrics, _) = Metrics::new();
        let (node, mut states) = (NodeSummary::new(metrics.clone()), PodStates::default());
        let verified = || metrics.meshed_pods.get_or_create(&PodState::Verified.into()).get();
        let words = || node.words(Instant::now());
        node.begin(INTERVAL);
        assert_eq!(words(), "no meshed pod was checked yet (starting)");
        node.show(&PodStates::default(), Vec::new(), Some("no_namespaces"), INTERVAL);
        assert_eq!(words(), "no meshed pod was checked yet (no_namespaces)");
        node.begin(INTERVAL);
        assert_eq!(words(), "no meshed pod was checked yet (no_namespaces)", "it has begun");
        // Pods that are only listed are not checked.
        let mut listed = PodStates::default();
        listed.keep(&BTreeSet::from(["a", "b"]), Instant::now());
        node.show(&listed, Vec::new(), Some("no_namespaces"), INTERVAL);
        assert_eq!(words(), "no meshed pod was checked yet (no_namespaces)");
        node.off();
        assert!(words().contains("chart: driftWatch.interval") && verified() == 0);
        states.note("a", PodState::Verified, false, Instant::now());
        node.show(&states, Vec::new(), None, INTERVAL);
        assert_eq!((words().as_str(), verified()), ("1 of 1 meshed pods verified", 1));
        let different = vec![("shop/web".to_owned(), "does not converge".to_owned())];
        node.show(&states, different, Some("no_pods"), INTERVAL);
        let expected = "1 of 1 meshed pods verified, as of the last successful check (no_pods)\n  shop/web: does not converge";
        assert_eq!(words(), expected);
        node.off();
        assert!(words().contains("chart: driftWatch.interval") && verified() == 0);
    }
}
