//! The drift watch: compares every pod of the node with its plan, at an interval, and reports differences. It is
//! read-only; [`crate::pods::heal`] receives every pod, and repairs drifted ones if the settings ask for that.
//!
//! A round reads the node's pods and checks those of the mesh one after the other, in short bursts spread over the interval. If a namespace has not changed since everything was as
//! planned, its rules are not read again (`fingerprints`). A pod that drifted for the first
//! time is checked again at the end of the round, with the pod read again before and after, so that a pod that starts, ends or changes at that
//! moment is not a false alarm.

pub mod fingerprints;
mod late;
mod pod_state;
mod tracker;

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_runtime::metrics::{Explained, gauged};
use agent_runtime::resync::ReadError;
use agent_runtime::supervisor::Unneeded;
use agent_runtime::{SCOPE, or_never};
use cni_core::conf::Conf;
use netns_apply::Capability;
use pod_netns::{MountedNetns, SurveyError};
use reasons::{AgentReason, EventReason, PodState};
use tokio::sync::watch::Receiver;
use tokio::task::JoinError;

use crate::cluster::pods::{self, NodePods};
use crate::cluster::{Cluster, warning};
use crate::parts::AgentParts;
use crate::pods::check::{
    Basis, Comparison, ExpectedRules, LONGEST_CHECK, MeshPod, NodeNamespaces, PodComparison, PodProblem,
    check, require,
};
use crate::pods::heal::{CheckRequests, DesiredRedirect, HealHandle, HealRequest};
use crate::pods::held_pods::HeldPods;
use crate::settings::{DriftSettings, Settings};
use fingerprints::Fingerprints;
use late::LateChecks;
pub use pod_state::NodeSummary;
use pod_state::PodStates;
use tracker::{DriftReport, DriftTracker};

/// The longest time between a bad check and the next: enough for the API server to report a pod's end.
const LONGEST_RECHECK: Duration = Duration::from_secs(5);
/// How many pods are checked one right after the other, before the next pause: where each has a pause of its own, all caches are cold.
const BURST: u32 = 10;
/// The longest wait before the first round.
const LONGEST_START: Duration = Duration::from_secs(60);

/// Why a round could not be made.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(
        "the container lacks {0}; add them to its capabilities, as deploy/istio-cni-node.yaml describes it"
    )]
    Capability(String),
    #[error("NODE_NAME is not set, so the agent does not know which pods are those of its node")]
    NoNode,
    #[error("{}", unread(.0))]
    Pods(#[from] ReadError),
    #[error(transparent)]
    Namespaces(#[from] SurveyError),
    #[error("the plugin's entry cannot be read: {0}")]
    Entry(String),
}

fn unread(error: &ReadError) -> String {
    match error {
        ReadError::Denied { code, message } => format!(
            "the agent may not read pods ({code}): {message}; give its service account the verbs get and list on pods (ClusterRole istio-cni)"
        ),
        ReadError::NoClient(_) | ReadError::Expired | ReadError::Failed { .. } => {
            format!("cannot read the node's pods: {error}")
        }
    }
}

impl RoundError {
    const fn reason(&self) -> AgentReason {
        match self {
            Self::Capability(_) => AgentReason::NoCapability,
            Self::NoNode | Self::Pods(_) => AgentReason::NoPods,
            Self::Namespaces(_) => AgentReason::NoNamespaces,
            Self::Entry(_) => AgentReason::NoEntry,
        }
    }
}

/// What holds for one round.
struct RoundContext {
    conf: Arc<Conf>,
    rules: Arc<ExpectedRules>,
    /// The addresses of all pods.
    wanted: Arc<BTreeSet<IpAddr>>,
    /// Sandboxed runtime classes of pods.
    sandboxed: BTreeSet<String>,
}

impl RoundContext {
    /// The class of a pod's runtime, if it is sandboxed.
    fn sandbox<'a>(&self, pod: &'a MeshPod) -> Option<&'a str> {
        pod.runtime_class.as_deref().filter(|class| self.sandboxed.contains(*class))
    }
}

/// What came of a check.
struct CheckedPod {
    seen: Comparison,
    /// The pod's network namespace, if it was found.
    sandbox: Option<MountedNetns>,
}

/// What a check was made for: a pod as it was, and how its plan was put in force.
type CheckContext = (Arc<MeshPod>, Arc<ExpectedRules>);

/// What a check of a pod found in the namespace that is the pod's.
type Found = Result<(MountedNetns, PodComparison), PodProblem>;

/// What is known of pods while they are checked.
#[derive(Default)]
struct DriftMemory {
    /// The node's pods at the last list, as they are under `conf`.
    pods: NodePods<Arc<MeshPod>>,
    conf: Option<Arc<Conf>>,
    tracker: DriftTracker,
    states: PodStates,
    fingerprints: Fingerprints,
    /// Why the last round could not be made.
    blind: Option<AgentReason>,
}

/// The drift watch.
pub struct DriftWatch {
    settings: Settings,
    parts: AgentParts,
    summary: Arc<NodeSummary>,
    /// The node's pods, where another part of the agent follows them.
    held: Arc<HeldPods>,
    memory: DriftMemory,
    /// Receives every pod, and heals it.
    healer: HealHandle,
    /// Pods whose runtime was reported to be sandboxed.
    sandboxed: BTreeSet<String>,
    /// Whether the last event could not be sent.
    mute: bool,
    late: LateChecks<CheckContext, Found>,
}

impl DriftWatch {
    /// Checks nothing yet.
    #[must_use]
    pub fn new(
        settings: Settings,
        parts: AgentParts,
        (summary, held): (Arc<NodeSummary>, Arc<HeldPods>),
        healer: HealHandle,
    ) -> Self {
        Self {
            settings,
            parts,
            summary,
            held,
            memory: DriftMemory::default(),
            healer,
            sandboxed: BTreeSet::new(),
            mute: false,
            late: LateChecks::new(LONGEST_CHECK),
        }
    }

    /// Watches according to the current settings, until they cannot change any more.
    pub async fn run(mut self, mut settings: Receiver<DriftSettings>) -> Unneeded {
        loop {
            self.settings.drift = settings.borrow_and_update().clone();
            let interval = self.settings.drift.interval;
            if !self.heals() {
                self.healer.send(HealRequest::Off).await;
            }
            tokio::select! {
                () = or_never(interval.map(|interval| self.rounds(interval))) => {}
                changed = settings.changed() => if changed.is_err() { return Unneeded },
            }
            if interval.is_some() && settings.borrow().interval.is_none() {
                log::info!(target: SCOPE, "the drift watch is off");
                self.memory = DriftMemory::default();
                self.show();
                self.summary.off();
            }
        }
    }

    const fn heals(&self) -> bool {
        self.settings.drift.heal && self.settings.drift.interval.is_some()
    }

    fn interval(&self) -> Duration {
        self.settings.drift.interval.unwrap_or_default()
    }

    /// Goes round for ever.
    async fn rounds(&mut self, interval: Duration) {
        log::info!(target: SCOPE, interval = format!("{interval:?}"); "watching the node's pods for drift");
        self.summary.begin(interval);
        // The agents of many nodes start together.
        let share = spread(&self.settings.identity.node);
        if self.heals() {
            // Healing knows all pods soon; only later rounds are spread over the interval.
            tokio::time::sleep(interval.min(LONGEST_RECHECK).mul_f64(share)).await;
            let done =
                self.run_requested_checks(&CheckRequests { new: true, ..CheckRequests::default() }).await;
            self.conclude(&done);
        }
        self.rest_until(tokio::time::Instant::now() + interval.min(LONGEST_START).mul_f64(share)).await;
        loop {
            let start = tokio::time::Instant::now();
            let done = self.round(start).await;
            self.conclude(&done);
            self.rest_until(start + interval).await;
        }
    }

    /// Waits, runs requested checks, and reports those that end late.
    async fn rest_until(&mut self, end: tokio::time::Instant) {
        loop {
            let done = tokio::select! {
                biased;
                () = tokio::time::sleep_until(end) => return,
                (made_for, found) = self.late.next() => self.settle_late(made_for, found).await,
                requests = self.healer.requests() => self.run_requested_checks(&requests).await,
            };
            if let Err(blind) = done {
                log::debug!(target: SCOPE, "cannot run requested checks: {blind}");
            }
        }
    }

    /// Reports what a late check found, if it is still about this pod with these settings. It needs no second check, which would be as
    /// late: a pod does not start or end for that long.
    async fn settle_late(
        &mut self,
        (pod, rules): CheckContext,
        found: Result<Found, JoinError>,
    ) -> Result<(), RoundError> {
        let (_, ground, pods) = self.begin().await?;
        if ground.rules == rules && pods.contains(&pod) {
            let checked = self.concluded(&pod, &rules, found);
            self.settle(&pod, &checked.seen).await;
            self.entrust(&pod, &rules, checked).await;
        }
        Ok(())
    }

    fn conclude(&mut self, done: &Result<(), RoundError>) {
        let result = done.as_ref().map_or_else(RoundError::reason, |()| AgentReason::Complete);
        self.parts.metrics.drift_rounds.get_or_create(&result.into()).inc();
        let blind = done.as_ref().err().map(RoundError::reason);
        match done {
            Err(blind) if self.memory.blind != Some(blind.reason()) => {
                log::warn!(target: SCOPE, "cannot check pods: {blind}");
            }
            Ok(()) if self.memory.blind.is_some() => {
                log::info!(target: SCOPE, "checking pods again");
            }
            Ok(()) | Err(_) => {}
        }
        self.memory.blind = blind;
        self.show();
    }

    async fn round(&mut self, start: tokio::time::Instant) -> Result<(), RoundError> {
        let (cluster, ground, pods) = self.begin().await?;
        let pods = self.without_sandboxed(pods, &ground).await;
        let mut survey = None;
        let mut unconfirmed = Vec::new();
        let count = u32::try_from(pods.len()).unwrap_or(u32::MAX);
        for (index, pod) in (0..).zip(pods) {
            self.rest_until(start + due(index, count, self.interval())).await;
            let survey = match &survey {
                Some(survey) => Arc::clone(survey),
                None => survey.insert(self.survey(ground.wanted.clone()).await?).clone(),
            };
            unconfirmed.extend(self.check_one(pod, &survey, &ground.rules).await);
        }
        self.check_again(&cluster, &unconfirmed, &ground).await
    }

    /// Checks some pods at once, out of turn.
    async fn run_requested_checks(&mut self, requests: &CheckRequests) -> Result<(), RoundError> {
        let (cluster, ground, pods) = self.begin().await?;
        let is_requested = |pod: &Arc<MeshPod>| {
            requests.pods.contains(&pod.uid) || (requests.new && self.memory.states.wants_check(&pod.uid))
        };
        let pods: Vec<Arc<MeshPod>> = pods.into_iter().filter(is_requested).collect();
        let pods = self.without_sandboxed(pods, &ground).await;
        if pods.is_empty() {
            return Ok(());
        }
        let survey = self.survey(ground.wanted.clone()).await?;
        let mut unconfirmed = Vec::new();
        for pod in pods {
            unconfirmed.extend(self.check_one(pod, &survey, &ground.rules).await);
        }
        self.check_again(&cluster, &unconfirmed, &ground).await
    }

    /// Reports the pods whose runtimes are sandboxed, and returns the others: only these are compared with their plans.
    async fn without_sandboxed(
        &mut self,
        pods: Vec<Arc<MeshPod>>,
        ground: &RoundContext,
    ) -> Vec<Arc<MeshPod>> {
        let (mut bound, mut sandboxed) = (Vec::new(), Vec::new());
        for pod in pods {
            match ground.sandbox(&pod).map(str::to_owned) {
                None => bound.push(pod),
                Some(class) => sandboxed.push((pod, class)),
            }
        }
        for (pod, class) in sandboxed {
            self.settle(&pod, &Comparison::Sandboxed(class.clone())).await;
            if self.sandboxed.insert(pod.uid.clone()) {
                let text = format!("runtimeClassName {class}: {}", PodState::Sandboxed.meaning());
                log::warn!(target: SCOPE, pod = pod.name.to_string(); "{text}");
                self.publish(&pod, EventReason::SandboxedRuntime, text).await;
            }
        }
        bound
    }

    /// Which pods to check, and how.
    async fn begin(&mut self) -> Result<(Cluster, RoundContext, Vec<Arc<MeshPod>>), RoundError> {
        require([Capability::NET_ADMIN, Capability::SYS_ADMIN]).map_err(RoundError::Capability)?;
        if self.settings.identity.node.is_empty() {
            return Err(RoundError::NoNode);
        }
        let cluster = self.parts.connection.get().map_err(ReadError::from)?;
        let conf = Arc::new(self.parts.installer.plugin_conf().map_err(RoundError::Entry)?);
        let rules = Arc::new(ExpectedRules::of(&conf, &self.settings.drift.environment));
        let of_node = conf.clone();
        if self.memory.conf != Some(conf.clone()) {
            self.memory.conf = Some(conf.clone());
            self.memory.pods = NodePods::default();
        }
        let read = move |pod: &serde_json::Value| MeshPod::running(pod, &of_node).map(Arc::new);
        let pods = match self.held.all() {
            Some(held) => self.memory.pods.take(held, read),
            None => self.memory.pods.list(&cluster, read).await?,
        };
        self.forget_others(&pods).await;
        let wanted = Arc::new(pods.iter().flat_map(|pod| pod.addresses.iter().copied()).collect());
        let classes = pods.iter().filter_map(|pod| pod.runtime_class.as_deref());
        let sandboxed = self.parts.handlers.sandboxed(&cluster, &conf.sandboxed, classes).await;
        let sandboxed = sandboxed.map_err(ReadError::from)?;
        Ok((cluster, RoundContext { conf, rules, wanted, sandboxed }, pods))
    }

    /// Checks one pod; returns it if a second check has to confirm the result.
    async fn check_one(
        &mut self,
        pod: Arc<MeshPod>,
        survey: &Arc<NodeNamespaces>,
        rules: &Arc<ExpectedRules>,
    ) -> Option<Arc<MeshPod>> {
        let checked = self.compare(&pod, survey, rules).await;
        if self.memory.tracker.is_news(&pod.uid, &checked.seen) {
            return Some(pod);
        }
        self.settle(&pod, &checked.seen).await;
        self.entrust(&pod, rules, checked).await;
        None
    }

    /// Checks one pod.
    async fn compare(
        &mut self,
        pod: &Arc<MeshPod>,
        survey: &Arc<NodeNamespaces>,
        rules: &Arc<ExpectedRules>,
    ) -> CheckedPod {
        let known = self.memory.fingerprints.of(pod, rules);
        let keys = self.memory.fingerprints.keys();
        let (of, there, all) = (pod.clone(), survey.clone(), rules.clone());
        let check = move || {
            let sandbox = there.find(&of)?;
            let known = known.and_then(|known| known.in_namespace(sandbox.id()));
            let compared = check(&of, &sandbox, &all, &keys, known);
            Ok((sandbox, compared))
        };
        match self.late.run(&pod.uid, (pod.clone(), rules.clone()), check).await {
            Some(found) => self.concluded(pod, rules, found),
            None => CheckedPod { seen: not_ended(), sandbox: None },
        }
    }

    /// What came of a check. Keeps the namespace's fingerprint if the pod is as planned.
    fn concluded(
        &mut self,
        pod: &Arc<MeshPod>,
        rules: &Arc<ExpectedRules>,
        found: Result<Found, JoinError>,
    ) -> CheckedPod {
        let unknown = |problem| CheckedPod { seen: Comparison::Unknown(problem), sandbox: None };
        let (sandbox, PodComparison { comparison: seen, basis, accepted }) = match found {
            Ok(Ok(found)) => found,
            Ok(Err(unfound)) => return unknown(unfound),
            Err(error) => return unknown(panicked(&error)),
        };
        if basis == Basis::Fingerprint {
            self.parts.metrics.drift_unread.inc();
        }
        if let Some(accepted) = accepted {
            self.note_accepted(pod, &accepted);
        }
        self.memory.fingerprints.note(pod, rules, sandbox.id(), &seen, basis);
        CheckedPod { seen, sandbox: Some(sandbox) }
    }

    /// Reports rules of other programs that interfere in a pod because that is accepted, where they are not those of the check before.
    fn note_accepted(&mut self, pod: &MeshPod, accepted: &[String]) {
        if self.memory.states.accepts(&pod.uid, accepted) {
            for rule in accepted {
                log::info!(target: SCOPE, pod = pod.name.to_string(), accepted = accepted.len(); "accepted: {rule}");
            }
            self.show();
        }
    }

    /// Hands a pod over to healing, or reports to it that the pod cannot be monitored.
    async fn entrust(&self, pod: &Arc<MeshPod>, rules: &Arc<ExpectedRules>, checked: CheckedPod) {
        if !self.heals() {
            return;
        }
        let is_verified = match &checked.seen {
            Comparison::AsPlanned => true,
            Comparison::Different(_) | Comparison::NotRedirected(_) | Comparison::Interference(_) => false,
            Comparison::Sandboxed(_) => return,
            Comparison::Unknown(error) => {
                if error.is_unfound() {
                    self.healer.send(HealRequest::Unfound { uid: pod.uid.clone() }).await;
                }
                return;
            }
        };
        if let Some(sandbox) = checked.sandbox {
            let desired = DesiredRedirect { pod: pod.clone(), rules: rules.clone(), is_verified };
            self.healer.send(HealRequest::Checked { desired, sandbox }).await;
        }
    }

    async fn forget_others(&mut self, pods: &[Arc<MeshPod>]) {
        let uids: BTreeSet<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
        self.memory.states.keep(&uids, Instant::now());
        self.memory.fingerprints.keep(&uids);
        self.sandboxed.retain(|uid| uids.contains(uid.as_str()));
        for pod in self.memory.tracker.keep(&uids) {
            log::info!(target: SCOPE, pod = pod.to_string(); "the pod that had drifted has ended, or is not to be redirected any more");
        }
        self.show();
        if self.heals() {
            self.healer.send(HealRequest::Pods(uids.into_iter().map(str::to_owned).collect())).await;
        }
    }

    async fn survey(&self, wanted: Arc<BTreeSet<IpAddr>>) -> Result<Arc<NodeNamespaces>, SurveyError> {
        let paths = self.settings.paths.clone();
        let survey = tokio::task::spawn_blocking(move || NodeNamespaces::of(&paths, &wanted)).await;
        let survey = survey.map_err(|error| SurveyError::Stopped(error.to_string()))??;
        let (namespaces, others) = survey.counts();
        log::debug!(target: SCOPE, namespaces = namespaces, others = others; "searched network namespaces");
        Ok(Arc::new(survey))
    }

    /// Checks a second time the pods that seemed drifted.
    async fn check_again(
        &mut self,
        cluster: &Cluster,
        unconfirmed: &[Arc<MeshPod>],
        ground: &RoundContext,
    ) -> Result<(), RoundError> {
        let RoundContext { conf, rules, wanted, .. } = ground;
        if unconfirmed.is_empty() {
            return Ok(());
        }
        tokio::time::sleep(LONGEST_RECHECK.min(self.interval() / 8)).await;
        let survey = self.survey(wanted.clone()).await?;
        for pod in unconfirmed {
            let Some(now) = same(cluster, pod, conf).await? else {
                self.count(AgentReason::Changed);
                continue;
            };
            let now = Arc::new(now);
            let checked = self.compare(&now, &survey, rules).await;
            // Only if it was this pod, with these settings, all the time.
            if checked.seen != Comparison::AsPlanned
                && same(cluster, pod, conf).await?.as_ref() != Some(&*now)
            {
                self.count(AgentReason::Changed);
                continue;
            }
            self.settle(&now, &checked.seen).await;
            self.entrust(&now, rules, checked).await;
        }
        Ok(())
    }

    /// Counts the result of a check, and reports what is new.
    async fn settle(&mut self, pod: &MeshPod, seen: &Comparison) {
        if let Comparison::Unknown(error) = seen {
            self.count(error.reason);
        } else {
            self.count(seen.state());
        }
        let is_unwatched = matches!(seen, Comparison::Unknown(error) if error.is_unfound());
        let was_verified = self.memory.states.was_verified(&pod.uid);
        let is_news = self.memory.states.note(&pod.uid, seen.state(), is_unwatched, Instant::now());
        let report = self.memory.tracker.note(&pod.uid, &pod.name, seen, Instant::now());
        if is_news || report.is_some() {
            self.show();
        }
        let name = pod.name.to_string();
        match report {
            None => {}
            Some(DriftReport::Recovered) => {
                log::info!(target: SCOPE, pod = name; "the pod is redirected as planned again");
            }
            Some(DriftReport::Visible) => {
                log::info!(target: SCOPE, pod = name; "the pod can be checked again, and is redirected as planned");
            }
            Some(DriftReport::Unknown(error)) => {
                log::warn!(target: SCOPE, pod = name; "cannot determine whether the pod is redirected as planned: {error}");
            }
            Some(DriftReport::Drifted { difference, event }) => {
                log::warn!(target: SCOPE, pod = name; "the pod is not redirected as planned: {difference}");
                if event {
                    let origin = tracker::origin(seen, was_verified);
                    let message = format!("the pod is not redirected as planned: {difference}. {origin}");
                    self.publish(pod, EventReason::RedirectDrift, message).await;
                }
            }
        }
    }

    async fn publish(&mut self, pod: &MeshPod, reason: EventReason, message: String) {
        let event = warning(pod.reference(), reason, message);
        match self.parts.connection.publish(&self.parts.metrics.events, event).await {
            Ok(()) => self.mute = false,
            Err(error) if !self.mute => {
                log::warn!(target: SCOPE, pod = pod.name.to_string(); "cannot send an event, which needs the verb create on events: {error}");
                self.mute = true;
            }
            Err(_) => {}
        }
    }

    fn count(&self, result: impl Explained) {
        self.parts.metrics.drift_checks.get_or_create(&result.into()).inc();
    }

    fn show(&self) {
        self.parts.metrics.drifted.set(gauged(self.memory.tracker.drifted()));
        let blind = self.memory.blind.map(AgentReason::word);
        self.summary.show(&self.memory.states, self.memory.tracker.differences(), blind, self.interval());
    }
}

/// How long after the start of a round the pod at this place of `count` is checked. A quarter of the interval is left for the second checks.
fn due(index: u32, count: u32, interval: Duration) -> Duration {
    interval / 4 * 3 / count.max(1) * (index - index % BURST)
}

/// The pod in its current state, if it still has its UID and addresses and is still to be checked.
async fn same(cluster: &Cluster, pod: &MeshPod, conf: &Conf) -> Result<Option<MeshPod>, ReadError> {
    let found = pods::get(cluster, &pod.name.namespace, &pod.name.name).await?;
    let now = found.and_then(|found| MeshPod::running(&found, conf));
    Ok(now.filter(|now| now.uid == pod.uid && now.addresses == pod.addresses))
}

fn not_ended() -> Comparison {
    let text = format!("the check has not ended within {} s", LONGEST_CHECK.as_secs());
    Comparison::Unknown(PodProblem::new(AgentReason::Unreadable, text))
}

fn panicked(error: &JoinError) -> PodProblem {
    PodProblem::new(AgentReason::Unreadable, format!("the check panicked: {error}"))
}

/// From 0 to 1, evenly, and always the same for a node.
fn spread(node: &str) -> f64 {
    let number = u16::try_from(hash(node) >> 48).unwrap_or_default();
    f64::from(number) / f64::from(u16::MAX)
}

/// The same in every process of this program.
fn hash<T: Hash + ?Sized>(value: &T) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_begin_at_different_moments() {
        let shares: Vec<f64> = (0..100).map(|count| spread(&format!("node-{count}"))).collect();
        assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)));
        let early = shares.iter().filter(|share| **share < 0.5).count();
        assert!((25..75).contains(&early), "{early}");
    }

    #[test]
    fn pods_are_checked_in_bursts_over_three_quarters_of_the_interval() {
        let interval = Duration::from_secs(300);
        let dues: Vec<Duration> = (0..250).map(|index| due(index, 250, interval)).collect();
        let bursts: Vec<&[Duration]> = dues.chunk_by(|one, other| one == other).collect();
        assert!(bursts.len() == 25 && bursts.iter().all(|burst| burst.len() == 10), "{dues:?}");
        assert!(dues.is_sorted() && dues[249] < interval / 4 * 3 && dues[249] > interval / 2, "{dues:?}");
        assert_eq!((due(0, 0, interval), due(9, 10, interval)), (Duration::ZERO, Duration::ZERO));
    }

    #[test]
    fn what_is_missing_is_said_with_the_remedy() {
        let text = RoundError::Capability("CAP_NET_ADMIN and CAP_SYS_ADMIN".into()).to_string();
        assert!(text.contains("lacks CAP_NET_ADMIN and CAP_SYS_ADMIN"), "{text}");
        let denied = RoundError::from(ReadError::Denied { code: 403, message: "no".into() });
        assert!(denied.to_string().contains("list on pods") && denied.reason() == AgentReason::NoPods);
    }
}
