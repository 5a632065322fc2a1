//! What the leader does: it keeps the model as the API server has nodes and pods, and does what follows, one node after the other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent_runtime::cluster::{ApiHandle, EventMessage};
use agent_runtime::metrics::{ChangeLabels, WatchLabel, gauged};
use agent_runtime::node::{NODES, Node, NodeMarking, RequestedTaint, node_reference};
use agent_runtime::outage::{FIRST_RETRY, LONGEST_RETRY, OutageLog};
use agent_runtime::resync::{self, Collection, Freshness, ListLimits, ListSource, Replica, Selection};
use agent_runtime::supervisor::{OwnedTask, Supervisor, Unneeded};
use agent_runtime::{BootTime, ChangeError, SCOPE, TRIES, added_or_due, daemon_set, lock};
use cluster_client::Backoff;
use reasons::{AgentReason, EventReason};
use serde_json::Value;
use tokio::sync::{Notify, watch};

use crate::election::may_act;
use crate::metrics::ControllerMetrics;
use crate::model::{AgentPlacement, AgentPod, Model, TaintAction, TaintReason, WatchedList};
use crate::placement::DaemonSetTracker;
use crate::queue::NodeQueue;
use crate::requirement::Requirement;

/// The component of its events.
const COMPONENT: &str = "cni-taint-controller";
/// How often the agents' DaemonSet is read.
const DAEMON_SET_INTERVAL: Duration = Duration::from_secs(10);
/// The time after a request to change a node: agents that all go at once do not make a storm.
const PACE: Duration = Duration::from_millis(20);

/// The leader, from the moment it leads until it does not.
pub struct Leader {
    marking: NodeMarking,
    requirements: Vec<Requirement>,
    /// Whether the agents' DaemonSet determines which nodes need an agent.
    asks_daemon_set: bool,
    connection: Arc<ApiHandle>,
    metrics: Arc<ControllerMetrics>,
    /// Until when it may act.
    acts_until: watch::Receiver<Option<BootTime>>,
    model: Mutex<Model>,
    queue: Mutex<NodeQueue>,
    failures: Mutex<BTreeMap<String, Backoff>>,
    outage: Mutex<OutageLog>,
    /// A node was added to the queue.
    added: Notify,
}

/// What to change about a node, and the node as it was when that was decided.
struct Decision {
    node: Node,
    requested: RequestedTaint,
    reason: TaintReason,
    patch: Value,
}

impl Leader {
    /// Knows nothing yet. Without `asks_daemon_set` every node needs an agent.
    #[must_use]
    pub fn new(
        marking: NodeMarking,
        asks_daemon_set: bool,
        requirements: Vec<Requirement>,
        connection: Arc<ApiHandle>,
        metrics: Arc<ControllerMetrics>,
        acts_until: watch::Receiver<Option<BootTime>>,
    ) -> Self {
        let outage = OutageLog::new(
            "cannot change a node's taint, which needs the verb patch on nodes",
            "nodes are tainted and freed again",
        );
        Self {
            model: Mutex::new(Model::new(marking.clone(), requirements.len())),
            marking,
            asks_daemon_set,
            requirements,
            connection,
            metrics,
            acts_until,
            queue: Mutex::default(),
            failures: Mutex::default(),
            outage: Mutex::new(outage),
            added: Notify::new(),
        }
    }

    /// Works until what is returned is dropped.
    pub fn start(self, tasks: &Supervisor) -> Vec<OwnedTask> {
        let leader = Arc::new(self);
        let watched = (0..leader.requirements.len()).map(WatchedList::Pods).chain([WatchedList::Nodes]);
        let watches = watched.map(|watched| {
            let leader = leader.clone();
            let name = match watched {
                WatchedList::Nodes => "node watch",
                WatchedList::Pods(_) => "pod watch",
            };
            OwnedTask(tasks.spawn(name, async move { leader.watch(watched).await }))
        });
        let mut work: Vec<OwnedTask> = watches.collect();
        let (placing, leading) = (leader.clone(), leader);
        let placing = tasks.spawn("watch of the agents' DaemonSet", async move { placing.place().await });
        let leading = tasks.spawn("leader", async move { leading.work().await });
        work.extend([OwnedTask(placing), OwnedTask(leading)]);
        work
    }

    /// Keeps the model current.
    async fn watch(&self, watched: WatchedList) -> Unneeded {
        let (what, kind, path, labels, remedy) = match watched {
            WatchedList::Nodes => (
                "nodes",
                "NodeList",
                NODES.to_owned(),
                String::new(),
                "the controller needs the verbs list and watch on nodes",
            ),
            WatchedList::Pods(index) => {
                let Requirement { namespace, selector } = &self.requirements[index];
                let path = format!("/api/v1/namespaces/{namespace}/pods");
                (
                    "pods",
                    "PodList",
                    path,
                    selector.as_str().to_owned(),
                    "the controller needs the verbs list and watch on pods",
                )
            }
        };
        let selection = Selection { fields: String::new(), labels };
        let (freshness, spread) = (Freshness::Newest, Duration::ZERO);
        let source = ListSource { path, kind, limits: ListLimits::OF_NODES };
        let collection = Collection { what, source, selection, freshness, remedy, spread };
        match watched {
            WatchedList::Nodes => {
                match resync::run(&self.connection, &collection, &NodeReplica(self)).await {}
            }
            WatchedList::Pods(index) => {
                let replica = PodReplica { leader: self, index };
                match resync::run(&self.connection, &collection, &replica).await {}
            }
        }
    }

    fn mark_stale(&self, watched: WatchedList) {
        lock(&self.model).mark_stale(watched);
        let watch = match watched {
            WatchedList::Nodes => "nodes",
            WatchedList::Pods(_) => "pods",
        };
        self.metrics.watch_restarts.get_or_create(&WatchLabel { watch }).inc();
    }

    /// Keeps the model as the agents' DaemonSet is.
    async fn place(&self) -> Unneeded {
        let mut tracker = DaemonSetTracker::default();
        loop {
            let placement = if self.asks_daemon_set {
                self.placement(&mut tracker).await
            } else {
                Some(AgentPlacement::Everywhere)
            };
            if let Some(placement) = placement
                && lock(&self.model).place(placement)
            {
                self.check_all();
            }
            tokio::time::sleep(DAEMON_SET_INTERVAL).await;
        }
    }

    /// None if it cannot be determined: the last answer counts.
    async fn placement(&self, tracker: &mut DaemonSetTracker) -> Option<AgentPlacement> {
        let found = daemon_set::find(&self.connection.get().ok()?).await;
        if let Err(failure) = &found {
            log::debug!(target: SCOPE, "cannot read the agents' DaemonSet: {failure}");
        }
        tracker.receive(found.map(|found| found.filter(|set| !daemon_set::is_deleted(set))))
    }

    fn check_all(&self) {
        self.check_all_from("");
    }

    /// Those whose names are not before `first`: names come in order, so what did not fit the last time is what comes from there on.
    fn check_all_from(&self, first: &str) {
        let model = lock(&self.model);
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
            self.added.notify_one();
        } else {
            self.metrics.overflows.inc();
        }
    }

    fn show(&self) {
        let (nodes, tainted) = lock(&self.model).counts();
        self.metrics.nodes.set(gauged(nodes));
        self.metrics.tainted.set(gauged(tainted));
        self.metrics.queued.set(gauged(lock(&self.queue).len()));
    }

    /// Does what is due, one node after the other.
    async fn work(&self) -> Unneeded {
        loop {
            let next = lock(&self.queue).next();
            added_or_due(&self.added, next).await;
            loop {
                let due = lock(&self.queue).take(Instant::now());
                let Some((name, since)) = due else { break };
                self.check(&name, since).await;
                self.show();
                // Many that need nothing must not keep the election and the watches waiting.
                tokio::task::yield_now().await;
            }
            let left_out = lock(&self.queue).take_left_out();
            if let Some(first) = left_out {
                self.check_all_from(&first);
            }
        }
    }

    async fn check(&self, name: &str, since: Instant) {
        for tries in 1.. {
            // Decided again at each try: a replica that has lost the Lease, or has new information, does nothing.
            let Some(Decision { node, requested, reason, patch }) = self.decide(name) else { return };
            match self.patch(name, patch).await {
                Ok(()) => {
                    self.succeeded(name, requested, since);
                    self.report(&node, requested, reason).await;
                    return tokio::time::sleep(PACE).await;
                }
                Err(error) if tries < TRIES => {
                    if let Err(error) = self.read_again(&node, error).await {
                        return self.failed(name, requested, &error).await;
                    }
                }
                Err(error) => return self.failed(name, requested, &error).await,
            }
        }
    }

    /// What to change about a node now, if anything, and if this replica may do it.
    fn decide(&self, name: &str) -> Option<Decision> {
        let mut model = lock(&self.model);
        let (requested, reason) = match model.next_action(name, Instant::now()) {
            TaintAction::Leave => return None,
            TaintAction::Wait(at) => {
                self.put(name, at);
                return None;
            }
            TaintAction::Taint(reason) => (RequestedTaint::Tainted, reason),
            TaintAction::Free(reason) => (RequestedTaint::Free, reason),
        };
        let node = model.node(name)?.clone();
        drop(model);
        let may_act = may_act(*self.acts_until.borrow(), BootTime::now());
        if !may_act {
            // Within seconds this replica leads again or ends its work.
            self.put(name, Instant::now() + FIRST_RETRY);
        }
        let patch = node.taint_patch(&self.marking.taint, &self.marking.old_keys, requested)?;
        may_act.then_some(Decision { node, requested, reason, patch })
    }

    /// Reads a node again after a patch that failed.
    async fn read_again(&self, node: &Node, error: ChangeError) -> Result<(), ChangeError> {
        let cluster = self.connection.get()?;
        let now = cluster.read_again(node, error).await?;
        let mut model = lock(&self.model);
        // It may have been removed during the read.
        if model.node(now.name()).is_some() {
            model.put_node(now);
        }
        Ok(())
    }

    fn succeeded(&self, name: &str, requested: RequestedTaint, since: Instant) {
        self.metrics.changes.get_or_create(&ChangeLabels::of(Some(requested), AgentReason::Done)).inc();
        self.metrics.delays.observe(since.elapsed().as_secs_f64());
        lock(&self.failures).remove(name);
        lock(&self.outage).worked();
    }

    async fn failed(&self, name: &str, requested: RequestedTaint, error: &ChangeError) {
        self.metrics.changes.get_or_create(&ChangeLabels::of(Some(requested), error.reason())).inc();
        if *error == ChangeError::Gone {
            lock(&self.failures).remove(name);
            return;
        }
        lock(&self.outage).failed(error, &[("node", name)]);
        let retry_after = error.retry_after();
        let pause = self.pause(name, retry_after);
        self.put(name, Instant::now() + pause);
        // A server that asks for a pause means all requests, not only those about this node.
        tokio::time::sleep(if retry_after.is_some() { pause } else { PACE }).await;
    }

    fn pause(&self, name: &str, retry_after: Option<Duration>) -> Duration {
        let mut failures = lock(&self.failures);
        let new = || Backoff::new(FIRST_RETRY, LONGEST_RETRY);
        failures.entry(name.to_owned()).or_insert_with(new).pause(retry_after)
    }

    async fn patch(&self, name: &str, patch: Value) -> Result<(), ChangeError> {
        self.connection.get()?.patch_taints(name, patch).await
    }

    /// Reports a change in the log and as an event of the node. The event is sent once: neither the node nor the counters wait for it.
    async fn report(&self, node: &Node, requested: RequestedTaint, reason: TaintReason) {
        let taint = &self.marking.taint;
        let (kind, reason, message) = match requested {
            RequestedTaint::Tainted => {
                ("Warning", EventReason::NodeTainted, format!("taint {taint} added: {}", reason.words()))
            }
            RequestedTaint::Free => {
                ("Normal", EventReason::NodeFreed, format!("taint {} removed: {}", taint.key, reason.words()))
            }
        };
        log::info!(target: SCOPE, node = node.name(); "{message}");
        let event = EventMessage { about: node_reference(node), component: COMPONENT, kind, reason, message };
        let _ = self.connection.publish(&self.metrics.events, event).await;
    }
}

/// The model's nodes.
struct NodeReplica<'a>(&'a Leader);

impl Replica for NodeReplica<'_> {
    type Item = Node;

    fn parser(&self) -> impl Fn(&Value) -> Option<Node> + Clone + Send + Sync + 'static {
        Node::of
    }

    fn replace(&self, nodes: Vec<Node>) {
        lock(&self.0.model).list_nodes(nodes);
        self.0.check_all();
    }

    fn changed(&self, object: &Value) {
        if let Some(node) = Node::of(object) {
            let name = node.name().to_owned();
            lock(&self.0.model).put_node(node);
            self.0.put(&name, Instant::now());
        }
        self.0.show();
    }

    fn removed(&self, object: &Value) {
        if let Some(node) = Node::of(object) {
            lock(&self.0.model).remove_node(node.name());
            lock(&self.0.failures).remove(node.name());
        }
        self.0.show();
    }

    /// Until the next list, changes go unnoticed.
    fn interrupted(&self) -> bool {
        self.0.mark_stale(WatchedList::Nodes);
        true
    }
}

/// The model's pods of one requirement.
struct PodReplica<'a> {
    leader: &'a Leader,
    index: usize,
}

impl PodReplica<'_> {
    fn check(&self, node: Option<String>) {
        if let Some(node) = node {
            self.leader.put(&node, Instant::now());
        }
        self.leader.show();
    }
}

impl Replica for PodReplica<'_> {
    type Item = AgentPod;

    fn parser(&self) -> impl Fn(&Value) -> Option<AgentPod> + Clone + Send + Sync + 'static {
        AgentPod::of
    }

    fn replace(&self, pods: Vec<AgentPod>) {
        lock(&self.leader.model).list_pods(self.index, pods);
        self.leader.check_all();
    }

    fn changed(&self, object: &Value) {
        let pod = AgentPod::of(object);
        self.check(pod.map(|pod| lock(&self.leader.model).put_pod(self.index, pod)));
    }

    fn removed(&self, object: &Value) {
        let name = object.pointer("/metadata/name").and_then(Value::as_str);
        self.check(name.and_then(|name| lock(&self.leader.model).remove_pod(self.index, name)));
    }

    fn interrupted(&self) -> bool {
        self.leader.mark_stale(WatchedList::Pods(self.index));
        true
    }
}
