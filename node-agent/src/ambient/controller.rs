//! The task that keeps the node's pods enrolled: it waits for a reason to examine pods, and lets [`Enrolment`] take their steps.
//!
//! ```text
//! API server: pods, namespaces ──┐
//! plugins, at their socket ──────┼──► inventory ──► pass ──► rules, ztunnel, probes, annotation
//! ztunnel, kernel, time ─────────┘
//! ```
//!
//! At the start ztunnel receives nothing until pods and namespaces were listed: it would drop pods that are missing. Then it keeps what it has of them, and each is examined.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use agent_runtime::metrics::{gauged, start_at_zero};
use agent_runtime::resync;
use agent_runtime::supervisor::{Supervisor, Unneeded};
use agent_runtime::{SCOPE, or_never};
use cni_core::pod_source::PodName;
use cni_core::selection::Programming;
use netns_apply::netns::Netns;
use pod_netns::namespace_of;
use reasons::{AgentReason, EventReason};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use zds::socket::SocketEvent;

use super::add_event::{AddEvents, AddRequest};
use super::annotations::{self, AnnotationFailure, AnnotationQueue};
use super::enrolment::{Enrolled, Enrolment, REPLACEMENT};
use super::inventory::{Due, Inventory, NamespaceReplica, namespaces};
use super::monitor::{self, Monitors, Opened};
use super::node::{NamedNamespaces, NodePass, NodeTools, ProbePath, ZtunnelLink};
use super::pod::AmbientPod;
use super::state::{AmbientState, ambient_rules};
use crate::cluster::events::EventPublisher;
use crate::cluster::{EventMessage, pod_reference};
use crate::confine::outside;
use crate::install::file_watch::{FileEvent, FileWatch, WatchedDir};
use crate::metrics::{CodeLabel, EnrolmentLabel, Metrics};
use crate::parts::AgentParts;
use crate::pods::held_pods::HeldPods;
use crate::settings::{AmbientSettings, Paths, Settings};

/// How often all pods are examined, whatever is reported.
const FULL_PASS: Duration = Duration::from_secs(60);
/// How soon pods that are not as wanted are examined again, if nothing else says when.
const PENDING_PASS: Duration = Duration::from_secs(2);
/// How soon to try again what the agent itself lacks.
const RETRY: Duration = Duration::from_secs(2);
/// How long a pod that the API server does not list is believed to be one that starts.
const LONGEST_START: Duration = Duration::from_secs(60);
/// How many plugins may wait for their turn.
const MOST_WAITING: usize = 64;
/// The component of the events.
const COMPONENT: &str = "cni-ambient";

/// Keeps the node's pods enrolled.
pub struct AmbientController {
    settings: AmbientSettings,
    paths: Paths,
    node: String,
    parts: AgentParts,
    events: EventPublisher,
    state: Arc<AmbientState>,
    adds: mpsc::Receiver<AddRequest>,
    reports: BTreeMap<String, Report>,
    monitors: Monitors,
    /// Plugins that wait for a pod.
    waiting: Vec<AddRequest>,
}

/// What is said of a pod that is not as wanted.
struct Report {
    why: String,
    since: Instant,
    is_sent: bool,
}

/// Makes a controller, and what answers plugins, if ambient mode is on.
#[must_use]
pub fn link(
    settings: &Settings,
    parts: &AgentParts,
    held: Arc<HeldPods>,
    tasks: &Supervisor,
) -> Option<(AmbientController, AddEvents)> {
    let ambient = settings.ambient.clone()?;
    let (state, AgentParts { connection, metrics, .. }) = (Arc::new(AmbientState::default()), parts);
    start_at_zero(&metrics.ambient_pods, ["enrolled", "pending"].map(|state| EnrolmentLabel { state }));
    start_at_zero(&metrics.annotations, [AgentReason::Done, AgentReason::Gone, AgentReason::Failed]);
    start_at_zero(&metrics.plugin_requests, [200, 500].map(|response_code| CodeLabel { response_code }));
    let (sender, adds) = mpsc::channel(MOST_WAITING);
    let events = AddEvents {
        settings: ambient.clone(),
        paths: settings.paths.clone(),
        parts: parts.clone(),
        held,
        state: state.clone(),
        adds: sender,
    };
    let controller = AmbientController {
        settings: ambient,
        paths: settings.paths.clone(),
        node: settings.identity.node.clone(),
        events: EventPublisher::start("events of ambient mode", connection.clone(), metrics.clone(), tasks),
        parts: parts.clone(),
        state,
        adds,
        reports: BTreeMap::new(),
        monitors: Monitors::default(),
        waiting: Vec::new(),
    };
    Some((controller, events))
}

impl AmbientController {
    /// Works for ever.
    pub async fn run(self) -> Unneeded {
        if self.node.is_empty() {
            let why = "NODE_NAME is not set, so the agent does not know which pods are those of its node";
            log::warn!(target: SCOPE, "no pod is enrolled in ambient mode: {why}");
            self.state.hinder(why.to_owned());
            return Unneeded;
        }
        let watched = namespaces(self.settings.has_usual_selectors);
        let (connection, inventory) = (self.parts.connection.clone(), self.state.inventory.clone());
        let queue = Arc::new(AnnotationQueue::default());
        let (failures, failed) = mpsc::unbounded_channel();
        let written =
            annotations::write(queue.clone(), connection.clone(), self.parts.metrics.clone(), failures);
        let namespace_replica = NamespaceReplica(&inventory);
        tokio::select! {
            never = resync::run(&connection, &watched, &namespace_replica) => match never {},
            never = written => match never {},
            never = self.work(queue, failed) => match never {},
        }
    }

    async fn work(
        mut self,
        queue: Arc<AnnotationQueue>,
        mut failures: mpsc::UnboundedReceiver<AnnotationFailure>,
    ) -> std::convert::Infallible {
        let start = Instant::now();
        let mut worker = self.begin(queue).await;
        let mut directory = self.watch_directory();
        let (mut next_full, mut next) = (Instant::now(), None);
        let mut adds = Vec::new();
        loop {
            let wake = [next, self.waiting.iter().map(|waiting| waiting.deadline).min(), Some(next_full)];
            let wake = wake.into_iter().flatten().min().unwrap_or(next_full);
            tokio::select! {
                () = self.state.inventory.changed() => {}
                Some(add) = self.adds.recv() => adds.push(add),
                Some((uid, why)) = failures.recv() => {
                    worker.enrolment.annotation_failed(start.elapsed(), &uid, why);
                    self.state.inventory.examine(&uid);
                }
                change = or_never(directory.as_mut().map(FileWatch::changed)) => {
                    self.monitors.release(|_| true);
                    if !matches!(change, Ok(FileEvent::Files)) {
                        directory = self.watch_directory();
                    }
                    continue;
                }
                () = sleep_until(wake) => {}
            }
            while let Ok(add) = self.adds.try_recv() {
                adds.push(add);
            }
            let now = Instant::now();
            let (rules, programming) = match ambient_rules(&self.parts.installer, &self.settings) {
                Ok(read) => read,
                Err(why) => {
                    for add in adds.drain(..).chain(self.waiting.drain(..)) {
                        let _ = add.reply.send(Err(why.clone()));
                    }
                    self.hinder(why).await;
                    continue;
                }
            };
            // What changes from now on is examined next time.
            let mut due = self.state.inventory.take();
            let Some(pods) = self.state.inventory.pods(&rules) else {
                self.refuse_late(now, &mut adds);
                next_full = now + RETRY;
                continue;
            };
            due.all |= now >= next_full;
            if due.all {
                next_full = now + FULL_PASS;
                directory = directory.or_else(|| self.watch_directory());
                self.monitors.release(|uid| self.state.inventory.has(uid));
            }
            let pass = Pass { now: start.elapsed(), pods, due, programming, adds: std::mem::take(&mut adds) };
            let (mut done, monitored) = (pass, std::mem::take(&mut self.monitors));
            let state = self.state.clone();
            let finished = tokio::task::spawn_blocking(move || {
                let opened = worker.pass(&mut done, &monitored, &state);
                (worker, done, monitored, opened)
            });
            // The supervisor reports it.
            let (back, done, monitored, opened) =
                finished.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
            (worker, self.monitors) = (back, monitored);
            self.monitors.add(opened, &self.state.inventory);
            self.conclude(&worker, done);
            let since = start.elapsed();
            let retries = worker.enrolment.next_due(since).map(|due| Instant::now() + (due - since));
            let pending = self.state.has_pending().then(|| Instant::now() + PENDING_PASS);
            next = retries.into_iter().chain(pending).min();
        }
    }

    /// Opens what enrolment needs, as soon as that is possible.
    async fn begin(&mut self, queue: Arc<AnnotationQueue>) -> Worker {
        loop {
            match self.try_begin(&queue) {
                Ok(worker) => {
                    log::info!(target: SCOPE, socket = self.settings.socket.display().to_string(); "serving ztunnel; enrolling the node's ambient pods");
                    return worker;
                }
                Err(why) => self.hinder(why).await,
            }
        }
    }

    fn try_begin(&self, queue: &Arc<AnnotationQueue>) -> Result<Worker, String> {
        let path = namespace_of(&self.paths.proc, 1);
        let host =
            outside::run(move || Netns::open(path)).ok_or("opening the node's network namespace panicked")?;
        let host = host.map_err(|error| {
            format!("the node's network namespace cannot be opened: {error}; mount the host's /proc at MOUNTED_PROC_DIR, and add SYS_PTRACE to the capabilities")
        })?;
        let (socket, newcomer) = (&self.settings.socket, self.settings.newcomer);
        if let Some(folder) = socket.parent() {
            std::fs::create_dir_all(folder).map_err(|error| {
                format!("{}: {error}; mount the node's directory for ztunnel there", folder.display())
            })?;
        }
        let (inventory, metrics) = (self.state.inventory.clone(), self.parts.metrics.clone());
        let ztunnel = ZtunnelLink::serve(socket, newcomer, move |event| observe(event, &inventory, &metrics))
            .map_err(|error| format!("cannot serve ztunnel at {}: {error}", socket.display()))?;
        let path = ProbePath {
            sources: self.settings.defaults.probes,
            routes_branches: self.settings.routes_branch_probes,
        };
        let node = NodeTools {
            paths: self.paths.clone(),
            path,
            host,
            ztunnel,
            annotations: queue.clone(),
            named: NamedNamespaces::default(),
        };
        Ok(Worker {
            node,
            enrolment: Enrolment::default(),
            starting: BTreeMap::new(),
            has_begun: false,
            next_takeover: Some(Duration::ZERO),
        })
    }

    /// Says why nothing can be enrolled, once, and waits before the next try.
    async fn hinder(&self, why: String) {
        if self.state.hinder(why.clone()) {
            log::warn!(target: SCOPE, "no pod can be enrolled in ambient mode: {why}");
        }
        sleep(RETRY).await;
    }

    /// Pods cannot be enrolled yet.
    fn refuse_late(&self, now: Instant, adds: &mut Vec<AddRequest>) {
        let (late, early) = std::mem::take(adds).into_iter().partition(|add| add.deadline <= now);
        *adds = early;
        for add in Vec::<AddRequest>::from_iter(late) {
            let why = self.state.verdict().err().unwrap_or_else(|| "the agent is starting".to_owned());
            let _ = add.reply.send(Err(why));
        }
    }

    fn watch_directory(&self) -> Option<FileWatch> {
        FileWatch::new(vec![WatchedDir::all(&self.paths.netns)]).ok()
    }

    /// Answers plugins, counts, and reports what is new.
    fn conclude(&mut self, worker: &Worker, done: Pass) {
        let now = Instant::now();
        self.waiting.extend(done.adds);
        let (mut still, enrolment) = (Vec::new(), &worker.enrolment);
        for waiting in std::mem::take(&mut self.waiting) {
            match enrolment.is_enrolled(waiting.pod.workload.uid()) {
                Ok(()) => drop(waiting.reply.send(Ok(()))),
                Err(why) if now >= waiting.deadline => {
                    let why = why.unwrap_or_else(|| "the pod was not examined in time".to_owned());
                    drop(waiting.reply.send(Err(why)));
                }
                Err(_) => still.push(waiting),
            }
        }
        self.waiting = still;
        let enrolled = worker.enrolment.enrolled();
        let pending = enrolled.wanted.saturating_sub(enrolled.enrolled);
        for (state, count) in [("enrolled", enrolled.enrolled), ("pending", pending)] {
            self.parts.metrics.ambient_pods.get_or_create(&EnrolmentLabel { state }).set(gauged(count));
        }
        let limits =
            |pod: &&AmbientPod| pod.wanted.as_ref().is_ok_and(|redirect| !redirect.captures_everything());
        self.parts.metrics.ambient_limited.set(gauged(done.pods.iter().filter(limits).count()));
        let names = done.pods.into_iter().map(|pod| (pod.workload.uid().to_owned(), pod.name)).collect();
        self.report(now, &enrolled, &names);
        self.state.examined(enrolled, names);
    }

    /// Reports pods that stay pending, and those that are not any more.
    fn report(&mut self, now: Instant, enrolled: &Enrolled, names: &BTreeMap<String, PodName>) {
        self.reports.retain(|uid, report| {
            let stays = enrolled.pending.contains_key(uid);
            if !stays && report.is_sent && let Some(name) = names.get(uid) {
                log::info!(target: SCOPE, pod = name.to_string(); "the pod is as its settings for ambient mode want it again");
            }
            stays
        });
        for (uid, why) in &enrolled.pending {
            let new = Report { why: why.clone(), since: now, is_sent: false };
            let report = self.reports.entry(uid.clone()).or_insert(new);
            report.is_sent &= report.why == *why;
            report.why.clone_from(why);
            if report.is_sent || now.duration_since(report.since) < REPLACEMENT {
                continue;
            }
            let Some(name) = names.get(uid) else { continue };
            report.is_sent = true;
            log::warn!(target: SCOPE, pod = name.to_string(); "the pod is not as its settings for ambient mode want it: {why}");
            self.events.send(EventMessage {
                about: pod_reference(&name.namespace, &name.name, Some(uid)),
                component: COMPONENT,
                kind: "Warning",
                reason: EventReason::AmbientPending,
                message: why.clone(),
            });
        }
    }
}

fn observe(event: &SocketEvent, inventory: &Inventory, metrics: &Metrics) {
    match event {
        SocketEvent::Pod(uid, ..) => inventory.examine(uid),
        SocketEvent::Ztunnels(count) => {
            metrics.ztunnels.set(gauged(*count));
            log::info!(target: SCOPE, ztunnels = *count; "ztunnel connected or disconnected");
        }
        SocketEvent::Closed(why) => log::warn!(target: SCOPE, "a connection of ztunnel ended: {why}"),
        SocketEvent::Restored => {
            log::info!(target: SCOPE, "ztunnel's socket was removed, or belonged to an agent that is gone; recreated it");
        }
        SocketEvent::Failed(why) => log::error!(target: SCOPE, "{why}"),
    }
}

/// Removes the rules and ipsets of Istio's agent from the node. Returns whether that succeeded.
fn take_over(node: &NodePass<'_>) -> bool {
    match node.remove_istios() {
        Ok(true) => {
            log::info!(target: SCOPE, "removed the rules and ipsets by which Istio's agent let probes through");
        }
        Ok(false) => {}
        Err(why) => {
            log::warn!(target: SCOPE, "the rules and ipsets by which Istio's agent let probes through stay on the node: {why}");
            return false;
        }
    }
    true
}

/// The pods of a pass, and after it the requests that wait.
struct Pass {
    now: Duration,
    /// The pods that the API server lists; after the pass also those that are being created.
    pods: Vec<AmbientPod>,
    due: Due,
    programming: Programming,
    /// Pods that are being created. After the pass: those whose plugins wait.
    adds: Vec<AddRequest>,
}

/// A pod that is being created.
struct Starting {
    pod: AmbientPod,
    since: Duration,
}

/// What passes work with, on a thread that may block.
struct Worker {
    node: NodeTools,
    enrolment: Enrolment,
    /// By UID.
    starting: BTreeMap<String, Starting>,
    has_begun: bool,
    /// When to remove the rules and ipsets of Istio's agent from the node; none when that is done.
    next_takeover: Option<Duration>,
}

impl Worker {
    /// Examines pods; opens sockets in namespaces that lack a monitor.
    fn pass(&mut self, pass: &mut Pass, monitors: &Monitors, state: &AmbientState) -> Vec<Opened> {
        self.take_adds(pass);
        let listed: BTreeSet<&str> = pass.pods.iter().map(|pod| pod.workload.uid()).collect();
        let now = pass.now;
        self.starting.retain(|uid, starting| {
            let is_known = state.inventory.has(uid) || now.saturating_sub(starting.since) < LONGEST_START;
            is_known && !listed.contains(uid.as_str())
        });
        pass.pods.extend(self.starting.values().map(|starting| starting.pod.clone()));
        let pods = &pass.pods;
        let uids: BTreeSet<&str> = pods.iter().map(|pod| pod.workload.uid()).collect();
        self.node.named.retain(|uid| uids.contains(uid));
        if !self.has_begun {
            // ztunnel keeps what it has of these, and drops all others.
            let has_traces = |pod: &&AmbientPod| pod.is_wanted() || pod.annotation.is_some();
            let ztunnel = &self.node.ztunnel;
            ztunnel.begin(pods.iter().filter(has_traces).map(|pod| (pod.workload.clone(), None)).collect());
            self.has_begun = true;
        }
        let Self { node: tools, enrolment, next_takeover, .. } = self;
        let mut node = NodePass::new(tools, pass.programming);
        let is_due = |uid: &str| pass.due.all || pass.due.uids.contains(uid);
        enrolment.reconcile(now, pods, is_due, &mut node);
        // Not before our own table lets the probes of all pods through.
        if next_takeover.is_some_and(|due| due <= now) && enrolment.enrolled().pending.is_empty() {
            *next_takeover = (!take_over(&node)).then(|| now + FULL_PASS);
        }
        let mut found = node.found();
        found.retain(|uid, _| enrolment.is_enrolled(uid).is_ok());
        monitor::open(&monitors.missing(found), &tools.paths.netns)
    }

    /// Notes pods that are being created. What cannot be is answered at once.
    fn take_adds(&mut self, pass: &mut Pass) {
        let mut waiting = Vec::new();
        for add in std::mem::take(&mut pass.adds) {
            let uid = add.pod.workload.uid().to_owned();
            match self.node.named.note(&uid, &add.pod.addresses, &add.netns) {
                Ok(()) => {
                    let new = Starting { pod: add.pod.clone(), since: pass.now };
                    self.starting.insert(uid.clone(), new);
                    pass.due.uids.insert(uid);
                    waiting.push(add);
                }
                Err(why) => drop(add.reply.send(Err(why))),
            }
        }
        pass.adds = waiting;
    }
}
