//! The monitor of one pod: a task with two sockets in the pod's network namespace. Dropping the monitor closes the sockets.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agent_runtime::supervisor::OwnedTask;
use agent_runtime::{SCOPE, lock, or_never};
use netns_apply::notify::Notification;
use pod_netns::MountedNetns;
use prometheus_client::metrics::gauge::Gauge;
use reasons::{AgentReason, EventReason, PodState};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::backoff::RecheckBackoff;
use super::history::{HealDecision, HealHistory, HealReport};
use super::repair::{HealJob, HealOutcome, check_and_repair};
use super::{DesiredRedirect, HealContext};
use crate::cluster::EventMessage;
use crate::pods::check::{LONGEST_CHECK, PodProblem};
use crate::pods::netns_changes::{ChangeSubscriptions, subscribe};

/// The component of the events.
const COMPONENT: &str = "cni-heal";
/// The name of the threads that enter namespaces, with which the kernel reports our own changes.
const OWN_NAME: &str = "netns";

/// What the healer and the monitor's task share.
#[derive(Debug)]
struct MonitorState {
    desired: Mutex<DesiredRedirect>,
    sandbox: MountedNetns,
    /// Requests a check.
    recheck: Notify,
    /// The drift watch has reported that it drifted.
    is_reported: AtomicBool,
}

/// A monitored pod.
#[derive(Debug)]
pub struct PodMonitor {
    state: Arc<MonitorState>,
    task: OwnedTask,
}

impl PodMonitor {
    /// Subscribes, then checks the pod.
    pub(super) async fn start(
        context: &Arc<HealContext>,
        desired: DesiredRedirect,
        sandbox: MountedNetns,
    ) -> Result<Self, String> {
        let there = sandbox.clone();
        let subscribe = move || subscribe(&there.open().map_err(|error| error.to_string())?);
        let opened = tokio::task::spawn_blocking(subscribe).await;
        let sockets = opened.map_err(|error| error.to_string())??;
        let subscriptions = ChangeSubscriptions::new(sockets).map_err(|error| error.to_string())?;
        let state = MonitorState {
            is_reported: AtomicBool::new(!desired.is_verified),
            desired: Mutex::new(desired),
            sandbox,
            recheck: Notify::new(),
        };
        let state = Arc::new(state);
        let task_state = MonitorTask {
            context: context.clone(),
            state: state.clone(),
            subscriptions,
            history: HealHistory::new(),
            backoff: RecheckBackoff::default(),
            contested: None,
            netns_proven: false,
            connections_remain: false,
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "a pod without a monitor gets one at the drift watch's next check"
        )]
        let task = OwnedTask(tokio::spawn(task_state.run()).abort_handle());
        Ok(Self { state, task })
    }

    /// Where it is.
    #[must_use]
    pub fn sandbox(&self) -> &MountedNetns {
        &self.state.sandbox
    }

    /// Whether its task has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.task.0.is_finished()
    }

    /// The drift watch has checked it again.
    pub fn update(&self, later: DesiredRedirect) {
        let is_verified = later.is_verified;
        lock(&self.state.desired).update(later);
        if !is_verified {
            self.state.is_reported.store(true, Ordering::Relaxed);
            self.state.recheck.notify_one();
        }
    }
}

/// Counts a contested pod for as long as it lives.
struct Contested(Gauge);

impl Contested {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Contested {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The monitor's task.
struct MonitorTask {
    context: Arc<HealContext>,
    state: Arc<MonitorState>,
    subscriptions: ChangeSubscriptions,
    history: HealHistory,
    backoff: RecheckBackoff,
    contested: Option<Contested>,
    netns_proven: bool,
    connections_remain: bool,
}

impl MonitorTask {
    /// Checks the pod now, and after every notification, until the namespace is gone.
    async fn run(mut self) {
        let mut cause = Some((Instant::now(), Notification::default()));
        let mut retry: Option<Instant> = None;
        loop {
            let (since, notification) = match cause.take() {
                Some(cause) => cause,
                None => match self.wait(retry).await {
                    Ok(Some(cause)) => cause,
                    Ok(None) => continue,
                    Err(error) => {
                        log::warn!(target: SCOPE, pod = self.desired().pod.name.to_string(); "cannot monitor the pod's network namespace any more, so only the drift watch checks it: {error}");
                        return;
                    }
                },
            };
            if notification.lost {
                self.context.metrics.heal_lost.inc();
            }
            let desired = self.desired();
            let (outcome, took) = self.check(&desired).await;
            if outcome == HealOutcome::Gone {
                return;
            }
            let next = self.settle(&desired, &outcome, since, &notification);
            let now = Instant::now();
            retry = next.retry.map(|after| now + after);
            let pause = self.backoff.checked(now.into_std(), took).max(next.wait);
            sleep(pause).await;
        }
    }

    fn desired(&self) -> DesiredRedirect {
        lock(&self.state.desired).clone()
    }

    /// Waits for a reason to check.
    async fn wait(&mut self, retry: Option<Instant>) -> io::Result<Option<(Instant, Notification)>> {
        let calm = self.history.calm_at().map(Instant::from_std);
        tokio::select! {
            notification = self.subscriptions.receive() => notification.map(Some),
            () = self.state.recheck.notified() => Ok(Some((Instant::now(), Notification::default()))),
            () = or_never(retry.map(sleep_until)) => Ok(Some((Instant::now(), Notification::default()))),
            () = or_never(calm.map(sleep_until)) => {
                self.history.calm_down(Instant::now().into_std());
                self.contested = None;
                Ok(None)
            }
        }
    }

    /// Checks and repairs the pod; returns also how long that took.
    async fn check(&mut self, desired: &DesiredRedirect) -> (HealOutcome, Duration) {
        // It is never closed.
        let slot = self.context.slots.acquire().await;
        let job = HealJob {
            desired: desired.clone(),
            sandbox: self.state.sandbox.clone(),
            netns_proven: self.netns_proven,
            connections_remain: self.connections_remain,
            paths: self.context.paths.clone(),
        };
        let start = Instant::now();
        let mut done = tokio::task::spawn_blocking(move || check_and_repair(&job));
        let ended = timeout(LONGEST_CHECK, &mut done).await;
        // Other pods do not wait for one that hangs.
        drop(slot);
        let done = match ended {
            Ok(done) => done,
            Err(_) => done.await,
        };
        let outcome = done.unwrap_or_else(|error| {
            HealOutcome::Failed(PodProblem::new(
                AgentReason::Unreadable,
                format!("the check panicked: {error}"),
            ))
        });
        self.connections_remain = outcome.reason() == Some(AgentReason::NotSevered);
        self.netns_proven |= matches!(outcome, HealOutcome::Healed { .. });
        (outcome, start.elapsed())
    }

    /// Counts the result of a check, and reports what is new.
    fn settle(
        &mut self,
        desired: &DesiredRedirect,
        outcome: &HealOutcome,
        since: Instant,
        notification: &Notification,
    ) -> HealDecision {
        self.count(outcome, since);
        let next = self.history.ended(outcome, Instant::now().into_std());
        match (self.history.is_contested(), &self.contested) {
            (true, None) => self.contested = Some(Contested::new(&self.context.metrics.heal_contested)),
            (false, Some(_)) => self.contested = None,
            (true, Some(_)) | (false, None) => {}
        }
        if matches!(outcome, HealOutcome::Healed { .. }) {
            lock(&self.state.desired).is_verified = true;
        }
        let was_reported = match outcome {
            HealOutcome::Healed { .. } | HealOutcome::AsPlanned => {
                self.state.is_reported.swap(false, Ordering::Relaxed)
            }
            HealOutcome::Interference(_) | HealOutcome::Failed(_) | HealOutcome::Gone => false,
        };
        let is_new = match next.report {
            Some((HealReport::Failed | HealReport::Recovered, _)) => true,
            // It was not reported before.
            Some((HealReport::Healed | HealReport::Contested(_), _)) | None => false,
        };
        if was_reported || is_new {
            // Only the drift watch reports the state of pods.
            let uid = desired.pod.uid.clone();
            self.context.requests.send_modify(|requests| requests.pods.extend([uid]));
        }
        if let Some((report, is_event)) = &next.report {
            self.report(desired, outcome, report, *is_event, notification);
        }
        next
    }

    fn count(&self, outcome: &HealOutcome, since: Instant) {
        let metrics = &self.context.metrics;
        let state = match outcome {
            HealOutcome::AsPlanned => PodState::Verified,
            HealOutcome::Interference(_) => PodState::Interference,
            HealOutcome::Failed(error)
                if [AgentReason::Unreadable, AgentReason::Unverifiable].contains(&error.reason) =>
            {
                PodState::Unknown
            }
            HealOutcome::Healed { .. } | HealOutcome::Failed(_) => PodState::Drifted,
            HealOutcome::Gone => return,
        };
        metrics.heal_checks.get_or_create(&state.into()).inc();
        let reason = outcome.reason();
        if let Some(reason) = reason {
            metrics.heal_attempts.get_or_create(&reason.into()).inc();
        }
        if reason == Some(AgentReason::Healed) {
            metrics.heal_durations.observe(since.elapsed().as_secs_f64());
        }
    }

    fn report(
        &self,
        desired: &DesiredRedirect,
        outcome: &HealOutcome,
        report: &HealReport,
        is_event: bool,
        notification: &Notification,
    ) {
        let (difference, words) = match outcome {
            HealOutcome::Healed { difference, words } => (difference.as_str(), words.as_str()),
            // The drift watch reports it.
            HealOutcome::Interference(_) => return,
            HealOutcome::Failed(error) => (error.text.as_str(), ""),
            HealOutcome::AsPlanned | HealOutcome::Gone => ("", ""),
        };
        let by = writers(notification);
        let (reason, message) = match report {
            HealReport::Recovered => {
                log::info!(target: SCOPE, pod = desired.pod.name.to_string(); "the pod is redirected as planned again");
                return;
            }
            HealReport::Healed => (
                EventReason::RedirectHealed,
                format!("restored the pod's redirection: {difference}{by}. {words}"),
            ),
            HealReport::Contested(wait) => (
                EventReason::RedirectContested,
                format!(
                    "another program keeps changing the pod's rules{by}; backing off {} s (at most 60 s); traffic may bypass the proxy. Last difference: {difference}",
                    wait.as_secs()
                ),
            ),
            HealReport::Failed => {
                let is_in_force = outcome.reason() == Some(AgentReason::Unverifiable);
                let what = if is_in_force {
                    "cannot verify the pod's redirection"
                } else {
                    "the pod is not redirected as planned, and repair failed"
                };
                (EventReason::RedirectNotHealed, format!("{what}: {difference}{by}"))
            }
        };
        log::warn!(target: SCOPE, pod = desired.pod.name.to_string(); "{message}");
        if is_event {
            let about = desired.pod.reference();
            let kind = if *report == HealReport::Healed { "Normal" } else { "Warning" };
            self.context.events.send(EventMessage { about, component: COMPONENT, kind, reason, message });
        }
    }
}

/// Which programs changed rules, if the kernel reported it. Names are those that processes give themselves.
fn writers(notification: &Notification) -> String {
    let others = notification.writers.iter().filter(|(_, name)| name != OWN_NAME);
    let named: Vec<String> =
        others.map(|(process, name)| format!("{} (process {process})", name.escape_debug())).collect();
    if named.is_empty() { String::new() } else { format!("; rules were changed by {}", named.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::check::{ExpectedRules, MeshPod};
    use cni_core::pod_source::PodName;
    use cni_core::selection::{Acceptance, Programming};
    use redirect_core::pod::PodFacts;
    use std::collections::BTreeSet;

    fn order(ports: &str, is_strict: bool, is_verified: bool) -> DesiredRedirect {
        let facts = PodFacts::sidecar([("traffic.sidecar.istio.io/excludeOutboundPorts", ports)]);
        let name = PodName { namespace: "shop".into(), name: "web".into() };
        let pod = MeshPod { name, uid: "u".into(), addresses: Vec::new(), runtime_class: None, facts };
        let programming = Programming::new(false, false);
        let (acceptance, environment) = (Acceptance::default(), Vec::new());
        let rules = ExpectedRules { programming, strict_capture: is_strict, acceptance, environment };
        DesiredRedirect { pod: Arc::new(pod), rules: Arc::new(rules), is_verified }
    }

    fn wants(desired: &DesiredRedirect) -> (String, bool) {
        (
            desired
                .pod
                .facts
                .annotations
                .values()
                .find(|value| !value.is_empty())
                .cloned()
                .unwrap_or_default(),
            desired.rules.strict_capture,
        )
    }

    #[test]
    fn a_verified_state_stays_the_desired_one() {
        let mut now = order("1", false, false);
        now.update(order("2", true, false));
        assert_eq!(wants(&now), ("2".into(), true), "nothing was verified yet");
        now.update(order("3", false, true));
        now.update(order("4", true, false));
        assert_eq!(wants(&now), ("3".into(), false), "an annotation changed while it runs");
        now.update(order("5", true, true));
        assert_eq!(wants(&now), ("5".into(), true), "as it is means the same");
    }

    #[test]
    fn writers_are_named_and_cannot_forge_lines() {
        let writers_of = |names: &[(u32, &str)]| {
            let named: BTreeSet<(u32, String)> =
                names.iter().map(|(id, name)| (*id, (*name).to_owned())).collect();
            writers(&Notification { messages: 1, lost: false, writers: named })
        };
        assert_eq!(writers_of(&[]), "");
        assert_eq!(writers_of(&[(7, "netns")]), "");
        assert_eq!(
            writers_of(&[(7, "netns"), (8, "iptables"), (9, "a\nb")]),
            "; rules were changed by iptables (process 8), a\\nb (process 9)"
        );
    }
}
