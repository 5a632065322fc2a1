//! The repair controller: it redirects, deletes or labels pods of the node whose redirection failed validation.
//!
//! ```text
//! API server ──► list, watch ──► filter ──► queue ──► confirm ──► action ──► metrics, event
//! ```
//!
//! [`filter`], [`queue`] and [`limit`] are pure. The watch of the node's pods notes, another task acts. The queue between them has a limit; a pod that does not fit is found by
//! the next list. Each request has a time limit.

pub mod action;
mod confirm;
pub mod filter;
mod in_place;
pub mod limit;
pub mod queue;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent_runtime::metrics::gauged;
use agent_runtime::outage::OutageLog;
use agent_runtime::resync::Selection;
use agent_runtime::{ChangeError, SCOPE, added_or_due, lock};
use reasons::{AgentReason, COULD_NOT_BE};
use serde_json::Value;
use tokio::sync::Notify;
use tokio::sync::watch::Receiver;

use crate::cluster::pods;
use crate::cluster::{Cluster, EventMessage};
use crate::metrics::{AttemptLabels, RepairedLabels};
use crate::parts::AgentParts;
use crate::pods::check::{ExpectedRules, PodProblem};
use crate::settings::{DriftSettings, Paths, RepairAction, RepairSettings, Settings};
use action::{RepairOutcome, possible_reasons};
use confirm::{Confirmed, confirm};
use filter::{Broken, BrokenPodFilter, NotBroken};
use limit::DeletionLimit;
use queue::{MOST_TRIES, Noted, RepairQueue, RepairTask};

/// The component of the events.
const COMPONENT: &str = "cni-repair";

/// The repair controller.
pub struct RepairController {
    action: RepairAction,
    /// Which pods are broken.
    pub filter: BrokenPodFilter,
    label: (String, String),
    paths: Paths,
    /// The container runtime's environment is part of it, and may change while the agent runs.
    drift: Receiver<DriftSettings>,
    limit: Mutex<DeletionLimit>,
    parts: AgentParts,
    queue: Mutex<RepairQueue>,
    /// A pod was added to the queue.
    added: Notify,
    /// The queue has room again.
    room: Notify,
    /// The API server does not respond to actions.
    outage: Mutex<OutageLog>,
}

impl RepairController {
    /// A controller, if the settings ask for one.
    #[must_use]
    pub fn new(settings: Settings, drift: Receiver<DriftSettings>, parts: AgentParts) -> Option<Arc<Self>> {
        let action = settings.repair.action?;
        let RepairSettings { label, filter, .. } = settings.repair;
        if filter.node.is_empty() {
            log::warn!(target: SCOPE, "repair is off: set NODE_NAME or REPAIR_NODE_NAME to identify the node's pods");
            return None;
        }
        let Selection { fields, labels } = filter.selection();
        parts.metrics.start_repair(action, possible_reasons());
        log::info!(target: SCOPE, action = action.label().word(), fields = fields, labels = labels; "watching for broken pods");
        let outage = OutageLog::new("cannot repair a broken pod", "broken pods are repaired again");
        Some(Arc::new(Self {
            action,
            filter,
            label,
            paths: settings.paths,
            drift,
            limit: Mutex::new(DeletionLimit::new(Instant::now())),
            parts,
            queue: Mutex::default(),
            added: Notify::new(),
            room: Notify::new(),
            outage: Mutex::new(outage),
        }))
    }

    fn forget(&self, pod: &Value) -> bool {
        let uid = pod.pointer("/metadata/uid").and_then(Value::as_str);
        uid.is_some_and(|uid| lock(&self.queue).forget(uid))
    }

    fn note(&self, broken: Broken) {
        let name = broken.observed.name.to_string();
        match lock(&self.queue).note(broken, Instant::now()) {
            Noted::New => self.added.notify_one(),
            Noted::Known => {}
            Noted::Overflow => {
                self.parts.metrics.repair_overflows.inc();
                log::debug!(target: SCOPE, pod = name; "the repair queue is full; a later list retries this pod");
            }
        }
    }

    fn show(&self) {
        let (waiting, wants_list) = {
            let queue = lock(&self.queue);
            (queue.waiting(), queue.wants_list())
        };
        if wants_list {
            self.room.notify_one();
        }
        self.parts.metrics.repair_waiting.set(gauged(waiting));
    }

    /// Handles one broken pod after the other, as they are due, for ever.
    pub async fn work(&self) -> Infallible {
        loop {
            let next = lock(&self.queue).next();
            added_or_due(&self.added, next).await;
            loop {
                let task = lock(&self.queue).take(Instant::now());
                let Some(task) = task else { break };
                self.handle(&task).await;
            }
        }
    }

    async fn handle(&self, task: &RepairTask) {
        if task.tries > MOST_TRIES {
            self.give_up(task).await;
            return;
        }
        let start = Instant::now();
        let cluster = self.parts.connection.get();
        let outcome = match &cluster {
            Ok(cluster) => self.act(cluster, task).await.unwrap_or_else(|outcome| outcome),
            Err(error) => RepairOutcome::Unanswered { text: error.to_string(), retry_after: None },
        };
        let end = Instant::now();
        self.count(task, &outcome, end.duration_since(start), end.duration_since(task.since));
        let gave_up = lock(&self.queue).done(&task.pod.observed.uid, outcome.ended(), end);
        if gave_up {
            self.parts.metrics.repair_given_up.get_or_create(&self.action.label().into()).inc();
        }
        self.show();
        self.report(task, &outcome, gave_up).await;
    }

    /// A pod whose container fails again after every repair that succeeded.
    async fn give_up(&self, task: &RepairTask) {
        lock(&self.queue).give_up(&task.pod.observed.uid);
        self.parts.metrics.repair_given_up.get_or_create(&self.action.label().into()).inc();
        self.show();
        let (failure, past) = (&task.pod.failure, self.action.past());
        let message = format!(
            "pod detected as broken ({failure}), given up: it was {past} {MOST_TRIES} times, and failed again each time"
        );
        log::warn!(target: SCOPE, pod = task.pod.observed.name.to_string(), action = self.action.label().word(); "{message}");
        self.send(task, "Warning", message).await;
    }

    async fn act(&self, cluster: &Cluster, task: &RepairTask) -> Result<RepairOutcome, RepairOutcome> {
        let (key, value) = (self.label.0.as_str(), self.label.1.as_str());
        let has_label =
            |broken: &Broken| broken.labels.as_ref().is_some_and(|labels| labels.contains_key(key));
        // The watch also reports the agent's own change, which must not cost another read.
        if self.action == RepairAction::Label && has_label(&task.pod) {
            return Ok(RepairOutcome::HadLabel);
        }
        if self.action == RepairAction::Delete {
            lock(&self.limit).ask(&task.pod.owner, task.since, Instant::now())?;
        }
        if self.action == RepairAction::Repair {
            in_place::require_capabilities()?;
        }
        let Confirmed { broken, object, conf } =
            confirm(cluster, &self.parts, &self.filter, &task.pod).await?;
        Ok(match self.action {
            RepairAction::Repair => {
                let rules = ExpectedRules::of(&conf, &self.drift.borrow().environment);
                in_place::repair_pod(&object, &conf, rules, self.paths.clone()).await?
            }
            RepairAction::Delete => {
                // A replacement may be seen before the answer.
                let asked = Instant::now();
                let done = pods::delete(cluster, &broken.observed).await;
                // A server that names a time for the next try has not done it.
                if matches!(done, Ok(()) | Err(ChangeError::Unanswered { retry_after: None, .. })) {
                    lock(&self.limit).deleted(&broken.owner, task.since, asked);
                }
                RepairOutcome::of_change(self.action, done)
            }
            RepairAction::Label if has_label(&broken) => RepairOutcome::HadLabel,
            RepairAction::Label => {
                let done =
                    pods::label(cluster, &broken.observed, broken.labels.is_some(), (key, value)).await;
                RepairOutcome::of_change(self.action, done)
            }
        })
    }

    fn count(&self, task: &RepairTask, outcome: &RepairOutcome, took: Duration, since: Duration) {
        let (metrics, r#type) = (&self.parts.metrics, self.action.label().into());
        let attempt = AttemptLabels { r#type, reason: outcome.reason().into() };
        metrics.repair_attempts.get_or_create(&attempt).inc();
        metrics.repair_durations.get_or_create(&self.action.label().into()).observe(took.as_secs_f64());
        if let Some(result) = outcome.result() {
            metrics.repaired.get_or_create(&RepairedLabels { r#type, result: result.into() }).inc();
        }
        if matches!(outcome, RepairOutcome::Done(_)) {
            metrics.repair_delays.get_or_create(&self.action.label().into()).observe(since.as_secs_f64());
        }
        log::debug!(target: SCOPE, pod = task.pod.observed.name.to_string(), action = self.action.label().word(), r#try = task.tries; "{outcome:?}");
    }

    /// Reports what is new: in the log, and if it is about the pod, in an event of it.
    async fn report(&self, task: &RepairTask, outcome: &RepairOutcome, gave_up: bool) {
        let pod = task.pod.observed.name.to_string();
        if let RepairOutcome::Unanswered { text, .. } = outcome {
            lock(&self.outage).failed(text, &[("pod", &pod), ("action", self.action.label().word())]);
            return;
        }
        lock(&self.outage).worked();
        let failure = &task.pod.failure;
        match outcome {
            RepairOutcome::Done(more) => {
                let more = if more.is_empty() { String::new() } else { format!(": {more}") };
                let message = format!("pod detected as broken ({failure}), {}{more}", self.action.past());
                log::info!(target: SCOPE, pod = pod, action = self.action.label().word(); "{message}");
                // Nothing is left to be done about a pod that is redirected.
                let kind = if self.action == RepairAction::Repair { "Normal" } else { "Warning" };
                self.send(task, kind, message).await;
            }
            RepairOutcome::Failed(error) => self.report_failure(task, error, gave_up).await,
            RepairOutcome::Throttled { text, .. } => {
                self.report_failure(task, &PodProblem::new(AgentReason::Throttled, text), false).await;
            }
            RepairOutcome::HadLabel
            | RepairOutcome::Gone
            | RepairOutcome::Changed
            | RepairOutcome::Unanswered { .. } => {}
        }
    }

    async fn report_failure(&self, task: &RepairTask, error: &PodProblem, gave_up: bool) {
        let is_new = lock(&self.queue).is_news(&task.pod.observed.uid, error.reason);
        if !is_new && !gave_up {
            return;
        }
        let end = if gave_up { format!("; given up after {} tries", task.tries) } else { String::new() };
        let (failure, past) = (&task.pod.failure, self.action.past());
        let what = if error.reason == AgentReason::Unverifiable {
            format!("{past}, {COULD_NOT_BE} verified")
        } else {
            format!("{COULD_NOT_BE} {past}")
        };
        let message = format!("pod detected as broken ({failure}), {what}: {error}{end}");
        log::warn!(target: SCOPE, pod = task.pod.observed.name.to_string(), action = self.action.label().word(), reason = error.reason.word(); "{message}");
        self.send(task, "Warning", message).await;
    }

    async fn send(&self, task: &RepairTask, kind: &'static str, message: String) {
        let (about, reason) = (task.pod.observed.reference(), self.action.event());
        let event = EventMessage { about, component: COMPONENT, kind, reason, message };
        let _ = self.parts.connection.publish(&self.parts.metrics.events, event).await;
    }
}

/// What the watch of the node's pods reports.
impl RepairController {
    /// These are all broken pods.
    pub fn replace(&self, pods: Vec<Broken>) {
        let uids: BTreeSet<String> = pods.iter().map(|broken| broken.observed.uid.clone()).collect();
        lock(&self.queue).keep(&uids);
        pods.into_iter().for_each(|broken| self.note(broken));
        self.show();
    }

    /// A pod is new, or changed.
    pub fn changed(&self, pod: &Value) {
        match self.filter.check(pod) {
            Ok(broken) => self.note(broken),
            Err(why) => {
                if self.forget(pod) && why == NotBroken::EndedWell {
                    let metadata = &pod["metadata"];
                    let name = [&metadata["namespace"], &metadata["name"]]
                        .map(|part| part.as_str().unwrap_or_default());
                    log::info!(target: SCOPE, pod = name.join("/"); "the pod is not broken any more");
                }
            }
        }
        self.show();
    }

    /// A pod is gone.
    pub fn removed(&self, pod: &Value) {
        self.forget(pod);
        self.show();
    }

    /// Whether broken pods were not noted for lack of room, which a list would find again.
    pub fn is_incomplete(&self) -> bool {
        lock(&self.queue).take_overflowed()
    }

    /// Waits until such a list is worthwhile.
    pub async fn wants_list(&self) {
        self.room.notified().await;
    }
}
