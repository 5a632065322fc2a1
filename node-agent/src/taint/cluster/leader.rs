//! What the leader does: it keeps the model as the API server has nodes and pods, and does what follows, one node after the other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cluster_client::{AccessError, Backoff, Outage};
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::metrics::ControllerMetrics;
use super::model::{AgentPod, Because, Model, Placement, Step, Watched};
use super::placing::Placing;
use super::queue::Queue;
use super::requirement::Requirement;
use super::{COMPONENT, SCOPE};
use crate::cluster::{
    Connection, Freshness, NODES, NodeError, PodEvent, PodsError, Selection, TRIES, Telling, WatchEnd,
};
use crate::metrics::{ResultLabel, WatchLabel};
use crate::settings::TaintSettings;
use crate::supervisor::{Supervisor, Unneeded};
use crate::taint::metrics::change;
use crate::taint::node::{Node, Wanted};

/// The pauses after an API server that does not answer.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// How often the agents' DaemonSet is looked at.
const LOOK_AT_AGENTS: Duration = Duration::from_secs(10);
/// The time after a request to change a node: agents that all go at once do not make a storm.
const PACE: Duration = Duration::from_millis(20);

/// The leader's tasks, which end when this is dropped.
pub struct Work(Vec<AbortHandle>);

impl Drop for Work {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// The leader, from the moment it leads until it does not.
pub struct Leader {
    settings: TaintSettings,
    requirements: Vec<Requirement>,
    /// Whether the agents' DaemonSet says where agents are to be.
    asks_daemon_set: bool,
    connection: Arc<Connection>,
    metrics: Arc<ControllerMetrics>,
    /// Until when it may act.
    acts_until: watch::Receiver<Option<Instant>>,
    model: Mutex<Model>,
    queue: Mutex<Queue>,
    failures: Mutex<BTreeMap<String, Backoff>>,
    outage: Mutex<Outage>,
    news: Notify,
}

#[derive(Debug, thiserror::Error)]
enum Unavailable {
    #[error("there is no working API client: {0}")]
    NoClient(#[from] AccessError),
    #[error("{}", Self::of_list(.0))]
    List(#[from] PodsError),
    #[error("{}", Self::of_watch(.0))]
    Watch(#[from] WatchEnd),
}

/// What is to be done about a node, as it was known when that was decided.
struct Decision {
    node: Node,
    wanted: Wanted,
    because: Because,
    patch: Value,
}

impl Leader {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(
        settings: TaintSettings,
        requirements: Vec<Requirement>,
        connection: Arc<Connection>,
        metrics: Arc<ControllerMetrics>,
        acts_until: watch::Receiver<Option<Instant>>,
    ) -> Self {
        let TaintSettings { taint, old_keys, condition_type, after, config_map, .. } = settings.clone();
        let model = Model::new(taint, old_keys, condition_type, after, requirements.len());
        Self {
            asks_daemon_set: config_map.1.is_empty(),
            settings,
            requirements,
            connection,
            metrics,
            acts_until,
            model: Mutex::new(model),
            queue: Mutex::default(),
            failures: Mutex::default(),
            outage: Mutex::default(),
            news: Notify::new(),
        }
    }

    /// Works until what is returned is dropped.
    pub fn start(self, tasks: &Supervisor) -> Work {
        let leader = Arc::new(self);
        let watches = (0..leader.requirements.len()).map(Watched::Pods).chain([Watched::Nodes]);
        let watches = watches.map(|watched| {
            let leader = leader.clone();
            let name = match watched {
                Watched::Nodes => "node watch",
                Watched::Pods(_) => "pod watch",
            };
            tasks.spawn(name, async move { leader.watch(watched).await })
        });
        let mut work = Work(watches.collect());
        let (placing, leading) = (leader.clone(), leader);
        work.0.push(tasks.spawn("watch of the agents' DaemonSet", async move { placing.place().await }));
        work.0.push(tasks.spawn("leader", async move { leading.work().await }));
        work
    }

    /// Keeps the model as the API server has nodes, or pods.
    async fn watch(&self, watched: Watched) -> Unneeded {
        let (mut outage, mut pauses) = (Outage::default(), Backoff::new(FIRST_RETRY, LONGEST_RETRY));
        let mut version = None;
        let what = watched.word();
        loop {
            let start = Instant::now();
            let done = self.watch_once(watched, &mut version, || {
                if let Some(lasted) = outage.ends(Instant::now()) {
                    log::info!(target: SCOPE, seconds = lasted.as_secs(); "{what} are watched again");
                }
            });
            let retry_after = match done.await {
                Ok(()) => {
                    pauses.reset();
                    None
                }
                Err(unavailable) => {
                    // What happens until it is listed again is not seen.
                    version = None;
                    self.model().lose_sight(watched);
                    if start.elapsed() >= LONGEST_RETRY {
                        pauses.reset();
                    }
                    self.metrics.watch_restarts.get_or_create(&WatchLabel { watch: what }).inc();
                    if matches!(unavailable, Unavailable::Watch(WatchEnd::Expired)) {
                        log::debug!(target: SCOPE, "listing {what} anew: {unavailable}");
                    } else if outage.begins(Instant::now()) {
                        log::warn!(target: SCOPE, "cannot watch {what}, which needs the verbs list and watch on them: {unavailable}");
                    } else {
                        log::debug!(target: SCOPE, "still cannot watch {what}: {unavailable}");
                    }
                    unavailable.retry_after()
                }
            };
            tokio::time::sleep(pauses.pause(retry_after)).await;
        }
    }

    async fn watch_once(
        &self,
        watched: Watched,
        version: &mut Option<String>,
        mut sees: impl FnMut(),
    ) -> Result<(), Unavailable> {
        let cluster = self.connection.get()?;
        let (path, selection) = match watched {
            Watched::Nodes => (NODES.to_owned(), Selection { fields: String::new(), labels: String::new() }),
            Watched::Pods(index) => {
                let Requirement { namespace, selector } = &self.requirements[index];
                let labels = selector.as_str().to_owned();
                (format!("/api/v1/namespaces/{namespace}/pods"), Selection { fields: String::new(), labels })
            }
        };
        if version.is_none() {
            *version = Some(match watched {
                Watched::Nodes => {
                    let listed = cluster.list_of(&path, &selection, Freshness::Newest, Node::of).await?;
                    self.model().list_nodes(listed.kept);
                    listed.version
                }
                Watched::Pods(index) => {
                    let listed = cluster.list_of(&path, &selection, Freshness::Newest, AgentPod::of).await?;
                    self.model().list_pods(index, listed.kept);
                    listed.version
                }
            });
            self.look_at_all();
        }
        let Some(from) = version else { return Ok(()) };
        let end = cluster.follow_of(&path, &selection, from, |event| {
            sees();
            self.note(watched, &event);
        });
        match end.await {
            WatchEnd::InTime => Ok(()),
            end @ (WatchEnd::Expired | WatchEnd::Denied(_) | WatchEnd::Broken { .. }) => Err(end.into()),
        }
    }

    fn note(&self, watched: Watched, event: &PodEvent) {
        let name = match (watched, event) {
            (_, PodEvent::Watching) => None,
            (Watched::Nodes, PodEvent::Seen(object)) => Node::of(object).map(|node| {
                let name = node.name().to_owned();
                self.model().put_node(node);
                name
            }),
            (Watched::Nodes, PodEvent::Gone(object)) => {
                if let Some(node) = Node::of(object) {
                    self.model().remove_node(node.name());
                    lock(&self.failures).remove(node.name());
                }
                None
            }
            (Watched::Pods(index), PodEvent::Seen(object)) => {
                AgentPod::of(object).map(|pod| self.model().put_pod(index, pod))
            }
            (Watched::Pods(index), PodEvent::Gone(object)) => {
                let name = object.pointer("/metadata/name").and_then(|name| name.as_str());
                name.and_then(|name| self.model().remove_pod(index, name))
            }
        };
        if let Some(name) = name {
            self.put(&name, Instant::now());
        }
        self.show();
    }

    /// Keeps the model as the agents' DaemonSet has it.
    async fn place(&self) -> Unneeded {
        let mut placing = Placing::default();
        loop {
            let placement = if self.asks_daemon_set {
                self.placement(&mut placing).await
            } else {
                Some(Placement::Everywhere)
            };
            if let Some(placement) = placement
                && self.model().place(placement)
            {
                self.look_at_all();
            }
            tokio::time::sleep(LOOK_AT_AGENTS).await;
        }
    }

    /// None where it cannot be told at present: then what was true before counts.
    async fn placement(&self, placing: &mut Placing) -> Option<Placement> {
        let found = self.connection.get().ok()?.agents().await;
        if let Err(failure) = &found {
            log::debug!(target: SCOPE, "cannot read the agents' DaemonSet: {failure}");
        }
        placing.hear(found)
    }

    fn look_at_all(&self) {
        self.look_at_all_from("");
    }

    /// Those whose names are not before `first`: names come in order, so what did not fit the last time is what comes from there on.
    fn look_at_all_from(&self, first: &str) {
        let model = self.model();
        let names: Vec<String> = model.names().filter(|name| *name >= first).map(str::to_owned).collect();
        drop(model);
        let now = Instant::now();
        for name in names {
            self.put(&name, now);
        }
        self.show();
    }

    fn put(&self, name: &str, at: Instant) {
        if lock(&self.queue).put(name, at) {
            self.news.notify_one();
        } else {
            self.metrics.overflows.inc();
        }
    }

    fn show(&self) {
        let (nodes, tainted) = self.model().counts();
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.nodes.set(number(nodes));
        self.metrics.tainted.set(number(tainted));
        self.metrics.queued.set(number(lock(&self.queue).len()));
    }

    /// Does what is due, one node after the other.
    async fn work(&self) -> Unneeded {
        loop {
            let next = lock(&self.queue).next();
            match next {
                None => self.news.notified().await,
                Some(at) => {
                    tokio::select! {
                        () = self.news.notified() => {}
                        () = tokio::time::sleep_until(at.into()) => {}
                    }
                }
            }
            loop {
                let due = lock(&self.queue).take(Instant::now());
                let Some((name, since)) = due else { break };
                self.look_at(&name, since).await;
                self.show();
                // Many that need nothing must not keep the election and the watches waiting.
                tokio::task::yield_now().await;
            }
            let left_out = lock(&self.queue).take_left_out();
            if let Some(first) = left_out {
                self.look_at_all_from(&first);
            }
        }
    }

    async fn look_at(&self, name: &str, since: Instant) {
        for tries in 1.. {
            // Worked out anew at each try: who has lost the Lease meanwhile, or learnt better, does nothing.
            let Some(Decision { node, wanted, because, patch }) = self.decide(name) else { return };
            match self.patch(name, patch).await {
                Ok(()) => {
                    self.succeeds(name, wanted, since);
                    self.tell(&node, wanted, because).await;
                    return tokio::time::sleep(PACE).await;
                }
                Err(error) if tries < TRIES => {
                    if let Err(error) = self.read_anew(&node, error).await {
                        return self.fails(name, wanted, &error).await;
                    }
                }
                Err(error) => return self.fails(name, wanted, &error).await,
            }
        }
    }

    /// What is to be done about a node now, if anything, and by this replica.
    fn decide(&self, name: &str) -> Option<Decision> {
        let mut model = self.model();
        let (wanted, because) = match model.step(name, Instant::now()) {
            Step::Leave => return None,
            Step::Wait(at) => {
                self.put(name, at);
                return None;
            }
            Step::Taint(because) => (Wanted::Tainted, because),
            Step::Free(because) => (Wanted::Free, because),
        };
        let node = model.node(name)?.clone();
        drop(model);
        let may_act = self.acts_until.borrow().is_some_and(|until| Instant::now() < until);
        if !may_act {
            // Whether it will lead again is told within seconds.
            self.put(name, Instant::now() + FIRST_RETRY);
        }
        let TaintSettings { taint, old_keys, .. } = &self.settings;
        let patch = node.taint_patch(taint, old_keys, wanted)?;
        may_act.then_some(Decision { node, wanted, because, patch })
    }

    /// Looks at a node again after a patch that did not fit.
    async fn read_anew(&self, node: &Node, error: NodeError) -> Result<(), NodeError> {
        let cluster = self.connection.get()?;
        let now = cluster.read_anew(node, error).await?;
        let mut model = self.model();
        // It may have gone while it was read.
        if model.node(now.name()).is_some() {
            model.put_node(now);
        }
        Ok(())
    }

    fn succeeds(&self, name: &str, wanted: Wanted, since: Instant) {
        self.metrics.changes.get_or_create(&change(Some(wanted), "done")).inc();
        self.metrics.delays.observe(since.elapsed().as_secs_f64());
        lock(&self.failures).remove(name);
        if let Some(lasted) = lock(&self.outage).ends(Instant::now()) {
            log::info!(target: SCOPE, seconds = lasted.as_secs(); "nodes are tainted and freed again");
        }
    }

    async fn fails(&self, name: &str, wanted: Wanted, error: &NodeError) {
        self.metrics.changes.get_or_create(&change(Some(wanted), error.word())).inc();
        if *error == NodeError::Gone {
            lock(&self.failures).remove(name);
            return;
        }
        if lock(&self.outage).begins(Instant::now()) {
            log::warn!(target: SCOPE, node = name; "cannot change a node's taint, which needs the verb patch on nodes: {error}");
        } else {
            log::debug!(target: SCOPE, node = name; "cannot change a node's taint either: {error}");
        }
        let retry_after =
            if let NodeError::Unanswered { retry_after, .. } = error { *retry_after } else { None };
        let pause = self.pause(name, retry_after);
        self.put(name, Instant::now() + pause);
        // A server that says when to come back means everybody, whichever node it was about.
        tokio::time::sleep(if retry_after.is_some() { pause } else { PACE }).await;
    }

    fn pause(&self, name: &str, retry_after: Option<Duration>) -> Duration {
        let mut failures = lock(&self.failures);
        let new = || Backoff::new(FIRST_RETRY, LONGEST_RETRY);
        failures.entry(name.to_owned()).or_insert_with(new).pause(retry_after)
    }

    async fn patch(&self, name: &str, patch: Value) -> Result<(), NodeError> {
        self.connection.get()?.patch_taints(name, patch).await
    }

    /// Says what was done to a node, in the log and as an event of the node: an event that the API server does not take is not sent again, and neither the node nor what was counted waits for it.
    async fn tell(&self, node: &Node, wanted: Wanted, because: Because) {
        let TaintSettings { taint, .. } = &self.settings;
        let (kind, reason, message) = match wanted {
            Wanted::Tainted => {
                ("Warning", "NodeTainted", format!("taint {taint} added: {}", because.words()))
            }
            Wanted::Free => {
                ("Normal", "NodeFreed", format!("taint {} removed: {}", taint.key, because.words()))
            }
        };
        log::info!(target: SCOPE, node = node.name(); "{message}");
        let telling = Telling { component: COMPONENT, kind, reason, message: &message };
        let sent = match self.connection.get() {
            Ok(cluster) => cluster.tell_of_node(node, &telling).await,
            Err(error) => Err(error.to_string()),
        };
        let result = if sent.is_ok() { "sent" } else { "failed" };
        self.metrics.events.get_or_create(&ResultLabel { result }).inc();
        if let Err(error) = sent {
            log::debug!(target: SCOPE, node = node.name(); "cannot send an event, which needs the verb create on events: {error}");
        }
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        lock(&self.model)
    }
}

impl Watched {
    const fn word(self) -> &'static str {
        match self {
            Self::Nodes => "nodes",
            Self::Pods(_) => "pods",
        }
    }
}

impl Unavailable {
    /// Without what an agent would say of its own node's pods and of its own role.
    fn of_list(error: &PodsError) -> String {
        match error {
            PodsError::Denied { code, message } => {
                format!("the API server does not allow it ({code}): {message}")
            }
            PodsError::Later { text, .. } | PodsError::Unreachable(text) => text.clone(),
            PodsError::NoNode => error.to_string(),
        }
    }

    fn of_watch(end: &WatchEnd) -> String {
        match end {
            WatchEnd::Denied(words) => format!("the API server does not allow it: {words}"),
            WatchEnd::InTime | WatchEnd::Expired | WatchEnd::Broken { .. } => end.to_string(),
        }
    }

    const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Watch(WatchEnd::Broken { retry_after, .. }) => *retry_after,
            Self::List(PodsError::Later { after, .. }) => Some(*after),
            Self::NoClient(_)
            | Self::List(PodsError::NoNode | PodsError::Denied { .. } | PodsError::Unreachable(_))
            | Self::Watch(WatchEnd::InTime | WatchEnd::Expired | WatchEnd::Denied(_)) => None,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
