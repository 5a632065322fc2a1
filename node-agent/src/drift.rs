//! The drift watch: compares every pod of the node with what the plugin made of it, at an interval, and says where they differ. It changes
//! nothing; [`crate::heal`] is told of every pod, and mends what has drifted where it is asked to.
//!
//! A round reads the node's pods and looks at those of the mesh one after the other, spread over the interval. Where a namespace is as it was when all was as
//! planned, its rules are not read again (`fingerprints`). What looks bad for the first
//! time is looked at again at the end of the round, with the pod read anew before and after, so that a pod that starts, ends or is changed at that
//! moment is no false alarm.

mod candidate;
mod fingerprints;
mod ledger;
mod look;
pub(crate) mod pod_state;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cni_core::conf::Conf;
use netns_apply::capabilities::{self, NET_ADMIN, SYS_ADMIN};
use tokio::sync::watch::Receiver;

use crate::cluster::{Cluster, Connection, PodsError, pod_reference};
use crate::heal::{Told, Wards, Wishes};
use crate::install::Installer;
use crate::metrics::{Metrics, ResultLabel};
use crate::plugin_conf::plugin_conf;
use crate::settings::{DriftSettings, Settings};
use crate::supervisor::Unneeded;
pub(crate) use candidate::Candidate;
use fingerprints::{Basis, Fingerprints};
use ledger::{Ledger, Report};
use look::look;
pub(crate) use look::{Comparison, Rules, Trouble, compare_here};
use pod_netns::{NamespaceIndex, Sandbox, SurveyError};
use pod_state::{PodState, PodStates};

/// The scope of the agent's lines.
const SCOPE: &str = "cni-agent";
/// The longest time between a bad look and the next: enough for a pod that ends to say so.
const LONGEST_DOUBT: Duration = Duration::from_secs(5);
/// The longest wait before the first round.
const LONGEST_START: Duration = Duration::from_secs(60);

/// Where a difference comes from.
const CHANGED: &str =
    "Its rules were changed after it started, or its annotations were; a new pod is redirected as planned";
/// Where rules of others come from.
const INTERFERENCE: &str = "A container with NET_ADMIN, or a program on the node, has made them; a new pod is redirected as planned unless it does so again";

/// Why a round could not be made.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(
        "the container lacks {}; add them to its capabilities, as deploy/istio-cni-node.yaml describes it",
        .0.join(" and ")
    )]
    Capability(Vec<&'static str>),
    #[error(transparent)]
    Pods(#[from] PodsError),
    #[error(transparent)]
    Namespaces(#[from] SurveyError),
    #[error("the plugin's entry cannot be read: {0}")]
    Entry(String),
}

impl RoundError {
    const fn word(&self) -> &'static str {
        match self {
            Self::Capability(_) => "no_capability",
            Self::Pods(_) => "no_pods",
            Self::Namespaces(_) => "no_namespaces",
            Self::Entry(_) => "no_entry",
        }
    }
}

/// What holds for one round.
struct Ground {
    conf: Arc<Conf>,
    rules: Arc<Rules>,
    /// The addresses of all pods.
    wanted: Arc<BTreeSet<IpAddr>>,
}

/// The drift watch.
pub struct Watch {
    settings: Settings,
    installer: Arc<Installer>,
    connection: Arc<Connection>,
    metrics: Arc<Metrics>,
    ledger: Ledger,
    states: PodStates,
    fingerprints: Fingerprints,
    /// Who mends what has drifted, and is told of every pod.
    wards: Wards,
    /// Why the last round could not be made.
    blind: Option<&'static str>,
    /// Whether the last event could not be sent.
    mute: bool,
}

impl Watch {
    /// Nothing is looked at yet.
    #[must_use]
    pub fn new(
        settings: Settings,
        installer: Arc<Installer>,
        connection: Arc<Connection>,
        metrics: Arc<Metrics>,
        wards: Wards,
    ) -> Self {
        Self {
            settings,
            installer,
            connection,
            metrics,
            ledger: Ledger::default(),
            states: PodStates::default(),
            fingerprints: Fingerprints::default(),
            wards,
            blind: None,
            mute: false,
        }
    }

    /// Watches as the settings say at any time, until nobody can change them any more.
    pub async fn run(mut self, mut settings: Receiver<DriftSettings>) -> Unneeded {
        loop {
            self.settings.drift = settings.borrow_and_update().clone();
            let interval = self.settings.drift.interval;
            if !self.heals() {
                self.wards.tell(Told::Off).await;
            }
            let rounds = async {
                match interval {
                    Some(interval) => self.rounds(interval).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = rounds => {}
                changed = settings.changed() => if changed.is_err() { return Unneeded },
            }
            if interval.is_some() && settings.borrow().interval.is_none() {
                log::info!(target: SCOPE, "the drift watch is off");
                (self.ledger, self.states, self.blind) = (Ledger::default(), PodStates::default(), None);
                self.fingerprints = Fingerprints::default();
                self.show();
                self.metrics.whole_node.off();
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
        // The agents of many nodes start together.
        let share = spread(&self.settings.identity.node);
        if self.heals() {
            // Whoever mends knows all pods soon; it is the interval of later rounds that is spread.
            tokio::time::sleep(interval.min(LONGEST_DOUBT).mul_f64(share)).await;
            let done = self.look_as_wished(&Wishes { new: true, ..Wishes::default() }).await;
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

    /// Waits, and meanwhile looks at the pods that somebody wishes to be looked at.
    async fn rest_until(&mut self, end: tokio::time::Instant) {
        loop {
            let wishes = tokio::select! {
                biased;
                () = tokio::time::sleep_until(end) => return,
                wishes = self.wards.wishes() => wishes,
            };
            if let Err(blind) = self.look_as_wished(&wishes).await {
                log::debug!(target: SCOPE, "no pod can be looked at out of turn: {blind}");
            }
        }
    }

    fn conclude(&mut self, done: &Result<(), RoundError>) {
        let result = done.as_ref().map_or_else(RoundError::word, |()| "complete");
        self.metrics.drift_rounds.get_or_create(&ResultLabel { result }).inc();
        let blind = done.as_ref().err().map(RoundError::word);
        match done {
            Err(blind) if self.blind != Some(blind.word()) => {
                log::warn!(target: SCOPE, "the drift watch sees nothing: {blind}");
            }
            Ok(()) if self.blind.is_some() => {
                log::info!(target: SCOPE, "the drift watch sees the pods again");
            }
            Ok(()) | Err(_) => {}
        }
        self.blind = blind;
        self.show();
    }

    async fn round(&mut self, start: tokio::time::Instant) -> Result<(), RoundError> {
        let (cluster, ground, pods) = self.begin().await?;
        let mut survey = None;
        let mut doubted = Vec::new();
        let count = u32::try_from(pods.len()).unwrap_or(u32::MAX).max(1);
        for (index, pod) in (0..).zip(pods) {
            // A quarter is left for the second looks.
            self.rest_until(start + self.interval() / 4 * 3 / count * index).await;
            let survey = match &survey {
                Some(survey) => Arc::clone(survey),
                None => survey.insert(self.survey(ground.wanted.clone()).await?).clone(),
            };
            doubted.extend(self.look_at(&cluster, pod, &survey, &ground.rules).await);
        }
        self.look_again(&cluster, &doubted, &ground).await
    }

    /// Looks at some pods at once, without waiting for their turn.
    async fn look_as_wished(&mut self, wishes: &Wishes) -> Result<(), RoundError> {
        let (cluster, ground, pods) = self.begin().await?;
        let is_wished = |pod: &Candidate| {
            wishes.pods.contains(&pod.uid) || (wishes.new && self.states.is_unseen(&pod.uid))
        };
        let pods: Vec<Candidate> = pods.into_iter().filter(is_wished).collect();
        if pods.is_empty() {
            return Ok(());
        }
        let survey = self.survey(ground.wanted.clone()).await?;
        let mut doubted = Vec::new();
        for pod in pods {
            doubted.extend(self.look_at(&cluster, pod, &survey, &ground.rules).await);
        }
        self.look_again(&cluster, &doubted, &ground).await
    }

    /// What there is to look at, and how.
    async fn begin(&mut self) -> Result<(Cluster, Ground, Vec<Candidate>), RoundError> {
        let missing =
            [NET_ADMIN, SYS_ADMIN].into_iter().filter(|wanted| capabilities::has(*wanted) == Some(false));
        let missing: Vec<&str> = missing.map(|capability| capability.name).collect();
        if !missing.is_empty() {
            return Err(RoundError::Capability(missing));
        }
        let cluster = self.connection.get().map_err(|error| PodsError::Unreachable(error.to_string()))?;
        let conf = Arc::new(plugin_conf(&self.installer).map_err(RoundError::Entry)?);
        let rules = Arc::new(Rules::of(&conf, &self.settings.drift.environment));
        let of_node = conf.clone();
        let pods = cluster.pods_of_node(move |pod| Candidate::of(pod, &of_node)).await?;
        self.forget_others(&pods).await;
        let wanted = Arc::new(pods.iter().flat_map(|pod| pod.addresses.iter().copied()).collect());
        Ok((cluster, Ground { conf, rules, wanted }, pods))
    }

    /// Looks at one pod; returns it where that has to be done a second time.
    async fn look_at(
        &mut self,
        cluster: &Cluster,
        pod: Candidate,
        survey: &Arc<NamespaceIndex>,
        rules: &Arc<Rules>,
    ) -> Option<Arc<Candidate>> {
        let pod = Arc::new(pod);
        let seen = self.looked(&pod, survey, rules).await;
        if self.ledger.doubts(&pod.uid, &seen) {
            return Some(pod);
        }
        self.settle(cluster, &pod, &seen).await;
        self.entrust(&pod, survey, rules, &seen).await;
        None
    }

    /// Looks at one pod, and remembers how its namespace looked if it is as planned.
    async fn looked(
        &mut self,
        pod: &Arc<Candidate>,
        survey: &Arc<NamespaceIndex>,
        rules: &Arc<Rules>,
    ) -> Comparison {
        let namespace = survey.find(&pod.addresses).ok().map(Sandbox::id);
        let known = namespace.and_then(|namespace| self.fingerprints.of(pod, rules, namespace));
        let keys = self.fingerprints.keys();
        let (of, there, all) = (pod.clone(), survey.clone(), rules.clone());
        let looked = tokio::task::spawn_blocking(move || look(&of, &there, &all, &keys, known)).await;
        let (seen, basis) = looked.unwrap_or_else(|error| {
            let trouble = look::Trouble::Failed(format!("the look panicked: {error}"));
            (Comparison::Trouble(trouble), Basis::Rules(None))
        });
        if basis == Basis::Fingerprint {
            self.metrics.drift_unread.inc();
        }
        if let Some(namespace) = namespace {
            self.fingerprints.note(pod, rules, namespace, &seen, basis);
        }
        seen
    }

    /// Hands a pod over to be watched, and mended where it has drifted.
    async fn entrust(
        &self,
        pod: &Arc<Candidate>,
        survey: &NamespaceIndex,
        rules: &Arc<Rules>,
        seen: &Comparison,
    ) {
        let is_verified = match seen {
            Comparison::AsPlanned => true,
            Comparison::Different(_) | Comparison::NotRedirected(_) | Comparison::Interference(_) => false,
            Comparison::Trouble(_) => return,
        };
        if let (true, Ok(sandbox)) = (self.heals(), survey.find(&pod.addresses)) {
            let (pod, rules, sandbox) = (pod.clone(), rules.clone(), sandbox.clone());
            self.wards.tell(Told::Seen { pod, rules, sandbox, is_verified }).await;
        }
    }

    async fn forget_others(&mut self, pods: &[Candidate]) {
        let uids: BTreeSet<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
        self.states.keep(&uids);
        self.fingerprints.keep(&uids);
        for pod in self.ledger.keep(&uids) {
            log::info!(target: SCOPE, pod = pod.to_string(); "the pod that had drifted has ended, or is not to be redirected any more");
        }
        self.show();
        if self.heals() {
            self.wards.tell(Told::Pods(uids.into_iter().map(str::to_owned).collect())).await;
        }
    }

    async fn survey(&self, wanted: Arc<BTreeSet<IpAddr>>) -> Result<Arc<NamespaceIndex>, SurveyError> {
        let directory: PathBuf = self.settings.paths.netns.clone();
        let panicked = |error: tokio::task::JoinError| SurveyError::Directory {
            directory: self.settings.paths.netns.clone(),
            cause: std::io::Error::other(error.to_string()),
        };
        let survey = tokio::task::spawn_blocking(move || NamespaceIndex::of(&directory, &wanted)).await;
        let survey = survey.map_err(panicked)??;
        let (namespaces, others) = survey.counts();
        log::debug!(target: SCOPE, namespaces = namespaces, others = others; "looked for network namespaces");
        Ok(Arc::new(survey))
    }

    /// Looks a second time at the pods that looked bad.
    async fn look_again(
        &mut self,
        cluster: &Cluster,
        doubted: &[Arc<Candidate>],
        ground: &Ground,
    ) -> Result<(), RoundError> {
        let Ground { conf, rules, wanted } = ground;
        if doubted.is_empty() {
            return Ok(());
        }
        tokio::time::sleep(LONGEST_DOUBT.min(self.interval() / 8)).await;
        let survey = self.survey(wanted.clone()).await?;
        for pod in doubted {
            let Some(now) = same(cluster, pod, conf).await? else {
                self.count("changed");
                continue;
            };
            let now = Arc::new(now);
            let seen = self.looked(&now, &survey, rules).await;
            // Only if it was this pod, with these settings, all the time.
            if seen != Comparison::AsPlanned && same(cluster, pod, conf).await?.as_ref() != Some(&*now) {
                self.count("changed");
                continue;
            }
            self.settle(cluster, &now, &seen).await;
            self.entrust(&now, &survey, rules, &seen).await;
        }
        Ok(())
    }

    /// Counts what a look has shown, and says what is new.
    async fn settle(&mut self, cluster: &Cluster, pod: &Candidate, seen: &Comparison) {
        self.count(match seen {
            Comparison::AsPlanned => "as_planned",
            Comparison::Different(_) | Comparison::NotRedirected(_) | Comparison::Interference(_) => {
                "drifted"
            }
            Comparison::Trouble(trouble) => trouble.word(),
        });
        self.states.note(&pod.uid, PodState::of(seen));
        let said = self.ledger.note(&pod.uid, &pod.name, seen, Instant::now());
        self.show();
        let name = pod.name.to_string();
        match said {
            None => {}
            Some(Report::Recovered) => {
                log::info!(target: SCOPE, pod = name; "the pod is redirected as planned again");
            }
            Some(Report::Visible) => {
                log::info!(target: SCOPE, pod = name; "the pod can be compared again, and is redirected as planned");
            }
            Some(Report::Trouble(trouble)) => {
                log::warn!(target: SCOPE, pod = name; "cannot tell whether the pod is redirected as planned: {trouble}");
            }
            Some(Report::Drifted { difference, event }) => {
                log::warn!(target: SCOPE, pod = name; "the pod is not redirected as planned: {difference}");
                if event {
                    let origin = match seen {
                        Comparison::Interference(_) => INTERFERENCE,
                        Comparison::Different(_)
                        | Comparison::NotRedirected(_)
                        | Comparison::AsPlanned
                        | Comparison::Trouble(_) => CHANGED,
                    };
                    self.send_event(cluster, pod, &format!("{difference}. {origin}")).await;
                }
            }
        }
    }

    async fn send_event(&mut self, cluster: &Cluster, pod: &Candidate, difference: &str) {
        let about = pod_reference(&pod.name.namespace, &pod.name.name, Some(&pod.uid));
        let message = format!("the pod is not redirected as planned: {difference}");
        let sent = cluster.warn_about(about, "RedirectDrift", &message).await;
        let result = if sent.is_ok() { "sent" } else { "failed" };
        self.metrics.events.get_or_create(&ResultLabel { result }).inc();
        match sent {
            Ok(()) => self.mute = false,
            Err(error) if !self.mute => {
                log::warn!(target: SCOPE, pod = pod.name.to_string(); "cannot send an event, which needs the verb create on events: {error}");
                self.mute = true;
            }
            Err(_) => {}
        }
    }

    fn count(&self, result: &'static str) {
        self.metrics.drift_checks.get_or_create(&ResultLabel { result }).inc();
    }

    fn show(&self) {
        self.metrics.drifted.set(i64::try_from(self.ledger.drifted()).unwrap_or(i64::MAX));
        self.metrics.whole_node.show(&self.states, self.blind);
    }
}

/// The pod as it is now, if it is still the same, where it was, and still to be looked at.
async fn same(cluster: &Cluster, pod: &Candidate, conf: &Conf) -> Result<Option<Candidate>, PodsError> {
    let now = cluster.pod(&pod.name.namespace, &pod.name.name).await?;
    Ok(now
        .and_then(|now| Candidate::of(&now, conf))
        .filter(|now| now.uid == pod.uid && now.addresses == pod.addresses))
}

/// From 0 to 1, evenly, and always the same for a node.
fn spread(node: &str) -> f64 {
    use std::hash::{Hash as _, Hasher as _};
    let mut hasher = std::collections::hash_map::DefaultHasher::new();
    node.hash(&mut hasher);
    let number = u16::try_from(hasher.finish() >> 48).unwrap_or_default();
    f64::from(number) / f64::from(u16::MAX)
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
    fn what_is_missing_is_said_with_the_remedy() {
        let text = RoundError::Capability(vec!["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]).to_string();
        assert!(text.contains("lacks CAP_NET_ADMIN and CAP_SYS_ADMIN"), "{text}");
        let denied = RoundError::from(PodsError::Denied { code: 403, message: "no".into() });
        assert!(denied.to_string().contains("list on pods") && denied.word() == "no_pods");
    }
}
