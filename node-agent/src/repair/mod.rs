//! The repair controller: pods of the node whose redirection was found missing are redirected where they stand, deleted, or labelled.
//!
//! ```text
//! API server ──► list, watch ──► filter ──► queue ──► action ──► metrics, event
//! ```
//!
//! [`filter`], [`selector`] and [`queue`] are pure. One task watches, one acts; between them is the queue, which has a limit and forgets nobody
//! for good: whoever did not fit is found by the list that follows. Each request has a time limit.

pub mod action;
pub mod filter;
pub(crate) mod in_place;
pub mod metrics;
pub mod processes;
pub mod queue;
pub(crate) mod sandbox;
pub mod selector;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cluster_client::{AccessError, Backoff, Outage};
use cni_core::reasons::COULD_NOT_BE;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::sync::watch::Receiver;

use crate::cluster::{Cluster, Connection, PodEvent, PodsError, SeenPod, Selection, Telling, WatchEnd};
use crate::install::Installer;
use crate::metrics::{Metrics, ResultLabel, WatchLabel};
use crate::settings::{DriftSettings, Settings};
use crate::supervisor::Unneeded;
use action::{Action, Outcome, Trouble, UNVERIFIABLE};
use filter::{Broken, Filter, Sound, Verdict};
use in_place::Mender;
use queue::{Noted, Queue, Task};

/// The scope of the agent's lines.
const SCOPE: &str = "cni-agent";
/// Who sends the events, as people know it.
const COMPONENT: &str = "cni-repair";
/// The pauses before a broken watch is made anew.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// The repair controller.
pub struct Controller {
    action: Action,
    filter: Filter,
    selection: Selection,
    label: (String, String),
    mender: Mender,
    connection: Arc<Connection>,
    metrics: Arc<Metrics>,
    queue: Mutex<Queue>,
    /// Somebody is new in the queue.
    news: Notify,
    /// There is room for those who did not fit.
    room: Notify,
    /// The API server does not answer what pods are done with.
    outage: Mutex<Outage>,
}

/// Why pods are not seen at present.
#[derive(Debug, thiserror::Error)]
enum PodsUnavailable {
    #[error("the agent has no working API client: {0}")]
    NoClient(#[from] AccessError),
    #[error(transparent)]
    List(#[from] PodsError),
    #[error(transparent)]
    Watch(#[from] WatchEnd),
}

impl Controller {
    /// Works for ever, if the settings ask for anything.
    pub async fn run(
        settings: Settings,
        drift: Receiver<DriftSettings>,
        installer: Arc<Installer>,
        connection: Arc<Connection>,
        metrics: Arc<Metrics>,
    ) -> Unneeded {
        let Some(action) = Action::of(&settings.repair) else { return Unneeded };
        let repair = &settings.repair;
        if repair.node.is_empty() {
            log::warn!(target: SCOPE, "broken pods are left alone: set NODE_NAME or REPAIR_NODE_NAME, so that the agent knows which pods are those of its node");
            return Unneeded;
        }
        let filter = Filter {
            node: repair.node.clone(),
            labels: repair.label_selectors.clone(),
            fields: repair.field_selectors.clone(),
            annotation: repair.sidecar_annotation.clone(),
            container: repair.init_container.clone(),
            message: repair.termination_message.clone(),
            exit_code: repair.exit_code,
        };
        let selection = Selection {
            fields: filter.fields.on_node(&filter.node),
            labels: filter.labels.as_str().to_owned(),
        };
        metrics.repair.start_at_nought(action);
        log::info!(target: SCOPE, action = action.word(), fields = selection.fields.as_str(), labels = selection.labels.as_str(); "watching for broken pods");
        let label = repair.label.clone();
        let mender = Mender::new(&settings, drift, installer);
        let (queue, outage) = <(Mutex<Queue>, Mutex<Outage>)>::default();
        let (news, room) = <(Notify, Notify)>::default();
        let controller =
            Self { action, filter, selection, label, mender, connection, metrics, queue, news, room, outage };
        let (never, _) = tokio::join!(controller.watch(), controller.work());
        match never {}
    }

    /// Keeps the queue as the API server has the pods.
    async fn watch(&self) -> Infallible {
        let (mut outage, mut pauses) = (Outage::default(), Backoff::new(FIRST_RETRY, LONGEST_RETRY));
        let mut version = None;
        loop {
            let done = self.watch_once(&mut version, || {
                if let Some(lasted) = outage.ends(Instant::now()) {
                    log::info!(target: SCOPE, seconds = lasted.as_secs(); "watching for broken pods again");
                }
            });
            let retry_after = match done.await {
                Ok(()) => {
                    pauses.reset();
                    None
                }
                Err(blind) => {
                    self.metrics.watch_restarts.get_or_create(&WatchLabel { watch: "pods" }).inc();
                    if matches!(blind, PodsUnavailable::Watch(WatchEnd::Expired)) {
                        log::debug!(target: SCOPE, "listing pods anew: {blind}");
                    } else if outage.begins(Instant::now()) {
                        log::warn!(target: SCOPE, "cannot watch for broken pods: {blind}");
                    } else {
                        log::debug!(target: SCOPE, "still cannot watch for broken pods: {blind}");
                    }
                    blind.retry_after()
                }
            };
            tokio::time::sleep(pauses.pause(retry_after)).await;
        }
    }

    /// Watches until the server ends it. What was listed is watched from there, as long as the server knows that version.
    async fn watch_once(
        &self,
        version: &mut Option<String>,
        mut sees: impl FnMut(),
    ) -> Result<(), PodsUnavailable> {
        let cluster = self.connection.get()?;
        if self.queue().take_overflowed() {
            *version = None;
        }
        let from = match version {
            Some(from) => from,
            None => version.insert(self.list(&cluster).await?),
        };
        let end = cluster.follow_pods(&self.selection, from, |event| {
            sees();
            match event {
                PodEvent::Watching => {}
                PodEvent::Seen(pod) => self.seen(&pod),
                PodEvent::Gone(pod) => self.gone(&pod),
            }
        });
        let end = tokio::select! {
            end = end => end,
            // All pods are listed again, and watched from there.
            () = self.room.notified() => return Ok(()),
        };
        match end {
            WatchEnd::InTime => Ok(()),
            end @ WatchEnd::Expired => {
                *version = None;
                Err(end.into())
            }
            end @ (WatchEnd::Denied(_) | WatchEnd::Broken { .. }) => Err(end.into()),
        }
    }

    /// Lists pods; the version to watch from.
    async fn list(&self, cluster: &Cluster) -> Result<String, PodsError> {
        let filter = self.filter.clone();
        let listed = cluster.list_pods(&self.selection, move |pod| match filter.judge(pod) {
            Verdict::Broken(broken) => Some(*broken),
            Verdict::Sound(_) => None,
        });
        let listed = listed.await?;
        let uids: BTreeSet<String> = listed.kept.iter().map(|broken| broken.uid.clone()).collect();
        self.queue().keep(&uids);
        for broken in listed.kept {
            self.note(broken);
        }
        self.show();
        Ok(listed.version)
    }

    fn seen(&self, pod: &Value) {
        match self.filter.judge(pod) {
            Verdict::Broken(broken) => self.note(*broken),
            Verdict::Sound(sound) => {
                if self.forget(pod) && sound == Sound::EndedWell {
                    let metadata = &pod["metadata"];
                    let name = [&metadata["namespace"], &metadata["name"]]
                        .map(|part| part.as_str().unwrap_or_default());
                    log::info!(target: SCOPE, pod = name.join("/"); "the pod is not broken any more");
                }
            }
        }
        self.show();
    }

    fn gone(&self, pod: &Value) {
        self.forget(pod);
        self.show();
    }

    fn forget(&self, pod: &Value) -> bool {
        let uid = pod.pointer("/metadata/uid").and_then(Value::as_str);
        uid.is_some_and(|uid| self.queue().forget(uid))
    }

    fn note(&self, broken: Broken) {
        let name = broken.name.to_string();
        match self.queue().note(broken, Instant::now()) {
            Noted::New => self.news.notify_one(),
            Noted::Known => {}
            Noted::Overflow => {
                self.metrics.repair.overflows.inc();
                log::debug!(target: SCOPE, pod = name; "too many broken pods at once; this one is found again later");
            }
        }
    }

    fn show(&self) {
        let (waiting, wants_list) = {
            let queue = self.queue();
            (queue.waiting(), queue.wants_list())
        };
        if wants_list {
            self.room.notify_one();
        }
        self.metrics.repair.waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
    }

    /// Deals with one pod after the other, as they are due.
    async fn work(&self) -> Infallible {
        loop {
            let next = self.queue().next();
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
                let task = self.queue().take(Instant::now());
                let Some(task) = task else { break };
                self.deal(&task).await;
            }
        }
    }

    async fn deal(&self, task: &Task) {
        let start = Instant::now();
        let cluster = self.connection.get();
        let outcome = match &cluster {
            Ok(cluster) => self.act(cluster, &task.pod).await,
            Err(error) => Outcome::Unanswered { text: error.to_string(), retry_after: None },
        };
        let end = Instant::now();
        self.count(task, &outcome, end.duration_since(start), end.duration_since(task.since));
        let gave_up = self.queue().done(&task.pod.uid, outcome.ended(), end);
        if gave_up {
            self.metrics.repair.given_up.get_or_create(&metrics::of(self.action)).inc();
        }
        self.show();
        self.say(cluster.ok().as_ref(), task, &outcome, gave_up).await;
    }

    async fn act(&self, cluster: &Cluster, broken: &Broken) -> Outcome {
        let (key, value) = (self.label.0.as_str(), self.label.1.as_str());
        match self.action {
            Action::Repair => self.mender.mend(cluster, &self.filter, broken).await,
            Action::Delete => Outcome::of_change(self.action, cluster.delete_pod(&seen(broken)).await),
            Action::Label if broken.labels.as_ref().is_some_and(|labels| labels.contains_key(key)) => {
                Outcome::HadLabel
            }
            Action::Label => {
                let done = cluster.label_pod(&seen(broken), broken.labels.is_some(), (key, value)).await;
                Outcome::of_change(self.action, done)
            }
        }
    }

    fn count(&self, task: &Task, outcome: &Outcome, took: Duration, since: Duration) {
        let metrics = &self.metrics.repair;
        metrics.attempts.get_or_create(&metrics::attempt(self.action, outcome.reason())).inc();
        metrics.durations.get_or_create(&metrics::of(self.action)).observe(took.as_secs_f64());
        if let Some(result) = outcome.result() {
            metrics.repaired.get_or_create(&metrics::repaired(self.action, result)).inc();
        }
        if matches!(outcome, Outcome::Done(_)) {
            metrics.delays.get_or_create(&metrics::of(self.action)).observe(since.as_secs_f64());
        }
        log::debug!(target: SCOPE, pod = task.pod.name.to_string(), action = self.action.word(), r#try = task.tries; "{outcome:?}");
    }

    /// Says what is new: in the log, and where it is about the pod, in an event of it.
    async fn say(&self, cluster: Option<&Cluster>, task: &Task, outcome: &Outcome, gave_up: bool) {
        let pod = task.pod.name.to_string();
        match outcome {
            Outcome::Unanswered { text, .. } => {
                if self.outage().begins(Instant::now()) {
                    log::warn!(target: SCOPE, pod = pod, action = self.action.word(); "cannot deal with a broken pod at present: {text}");
                }
                return;
            }
            Outcome::HadLabel | Outcome::Gone | Outcome::Changed | Outcome::Done(_) | Outcome::Failed(_) => {}
        }
        if let Some(lasted) = self.outage().ends(Instant::now()) {
            log::info!(target: SCOPE, seconds = lasted.as_secs(); "broken pods are dealt with again");
        }
        let failure = &task.pod.failure;
        match outcome {
            Outcome::Done(more) => {
                let more = if more.is_empty() { String::new() } else { format!(": {more}") };
                let message = format!("pod detected as broken ({failure}), {}{more}", self.action.past());
                log::info!(target: SCOPE, pod = pod, action = self.action.word(); "{message}");
                // Nothing is left to be done about a pod that is redirected.
                let kind = if self.action == Action::Repair { "Normal" } else { "Warning" };
                self.send(cluster, task, kind, &message).await;
            }
            Outcome::Failed(trouble) => self.say_trouble(cluster, task, trouble, gave_up).await,
            Outcome::HadLabel | Outcome::Gone | Outcome::Changed | Outcome::Unanswered { .. } => {}
        }
    }

    async fn say_trouble(&self, cluster: Option<&Cluster>, task: &Task, trouble: &Trouble, gave_up: bool) {
        let is_new = self.queue().says_new(&task.pod.uid, trouble.reason);
        if !is_new && !gave_up {
            return;
        }
        let end = if gave_up { format!("; given up after {} tries", task.tries) } else { String::new() };
        let (failure, past) = (&task.pod.failure, self.action.past());
        let what = if trouble.reason == UNVERIFIABLE {
            format!("{past}, {COULD_NOT_BE} verified")
        } else {
            format!("{COULD_NOT_BE} {past}")
        };
        let message = format!("pod detected as broken ({failure}), {what}: {trouble}{end}");
        log::warn!(target: SCOPE, pod = task.pod.name.to_string(), action = self.action.word(), reason = trouble.reason; "{message}");
        self.send(cluster, task, "Warning", &message).await;
    }

    async fn send(&self, cluster: Option<&Cluster>, task: &Task, kind: &str, message: &str) {
        let Some(cluster) = cluster else { return };
        let telling = Telling { component: COMPONENT, kind, reason: self.action.event(), message };
        let sent = cluster.tell(seen(&task.pod).reference(), &telling).await;
        let result = if sent.is_ok() { "sent" } else { "failed" };
        self.metrics.events.get_or_create(&ResultLabel { result }).inc();
        if let Err(error) = sent {
            log::debug!(target: SCOPE, pod = task.pod.name.to_string(); "cannot send an event, which needs the verb create on events: {error}");
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outage(&self) -> MutexGuard<'_, Outage> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PodsUnavailable {
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

fn seen(broken: &Broken) -> SeenPod<'_> {
    SeenPod {
        namespace: &broken.name.namespace,
        name: &broken.name.name,
        uid: &broken.uid,
        version: &broken.version,
    }
}
