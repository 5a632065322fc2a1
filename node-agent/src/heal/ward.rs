//! One pod that is listened to: a task with two sockets in the pod's network namespace. When the value is dropped, the sockets are closed.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use netns_apply::notify::{Notification, Subscription};
use prometheus_client::metrics::gauge::Gauge;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::herald::News;
use super::mend::{Job, Outcome, look_and_mend};
use super::metrics::{HEALED, ReasonLabel};
use super::pace::Pace;
use super::record::{Next, Record, Report};
use super::{Common, SCOPE};
use crate::drift::{Candidate, Rules};
use crate::metrics::ResultLabel;
use crate::repair::action::{Trouble, UNVERIFIABLE};
use pod_netns::Sandbox;

/// How long to wait for the rest of a burst.
const BURST: Duration = Duration::from_millis(5);
/// How many datagrams are read at a time. More of them say no more.
const MOST_READ: usize = 64;
/// The name of the threads that enter namespaces, under which our own changes are told.
const OWN_NAME: &str = "netns";

/// How a pod is to be.
#[derive(Debug, Clone)]
pub struct Order {
    pod: Arc<Candidate>,
    rules: Arc<Rules>,
    /// Whether it was seen to be so.
    is_verified: bool,
}

impl Order {
    /// Takes note of a later look. What was verified once stays what is wanted: a pod's annotations, and what all pods get, may change while it runs, and
    /// neither is a reason to redirect it otherwise.
    fn update(&mut self, later: Self) {
        if later.is_verified || !self.is_verified {
            *self = later;
        }
    }
}

/// What the healer and the ward's task share.
#[derive(Debug)]
struct Charge {
    order: Mutex<Order>,
    sandbox: Sandbox,
    /// Somebody wants it to be looked at.
    nudge: Notify,
    /// The drift watch has said that it has drifted.
    is_reported: AtomicBool,
}

/// A pod that is listened to.
#[derive(Debug)]
pub struct Ward {
    charge: Arc<Charge>,
    task: AbortHandle,
}

impl Ward {
    /// How a pod is to be that the drift watch has seen.
    pub const fn order(pod: Arc<Candidate>, rules: Arc<Rules>, is_verified: bool) -> Order {
        Order { pod, rules, is_verified }
    }

    /// Begins to listen, then looks at the pod.
    pub(super) async fn start(common: &Arc<Common>, order: Order, sandbox: Sandbox) -> Result<Self, String> {
        let there = sandbox.clone();
        let opened = tokio::task::spawn_blocking(move || subscribe(&there)).await;
        let [rules, routing] = opened.map_err(|error| error.to_string())??;
        let ears = Ears::new(rules, routing).map_err(|error| error.to_string())?;
        let charge = Charge {
            is_reported: AtomicBool::new(!order.is_verified),
            order: Mutex::new(order),
            sandbox,
            nudge: Notify::new(),
        };
        let charge = Arc::new(charge);
        let attendant = Attendant {
            common: common.clone(),
            charge: charge.clone(),
            ears,
            record: Record::new(),
            pace: Pace::default(),
            contested: None,
            is_sure: false,
            is_unfinished: false,
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "a pod without a ward gets one at the drift watch's next look"
        )]
        let task = tokio::spawn(attendant.attend()).abort_handle();
        Ok(Self { charge, task })
    }

    /// Where it is.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.charge.sandbox
    }

    /// Whether nobody listens any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// The drift watch has looked at it again.
    pub fn tell(&self, pod: Arc<Candidate>, rules: Arc<Rules>, is_verified: bool) {
        let later = Self::order(pod, rules, is_verified);
        self.charge.order.lock().unwrap_or_else(PoisonError::into_inner).update(later);
        if !is_verified {
            self.charge.is_reported.store(true, Ordering::Relaxed);
            self.charge.nudge.notify_one();
        }
    }
}

impl Drop for Ward {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn subscribe(sandbox: &Sandbox) -> Result<[Subscription; 2], String> {
    let netns = sandbox.open().map_err(|error| error.to_string())?;
    let opened = netns.run(|| Ok([Subscription::to_rules()?, Subscription::to_routing()?]));
    opened.map_err(|error| error.to_string())?.map_err(|error: io::Error| error.to_string())
}

/// Both sockets.
struct Ears([AsyncFd<Subscription>; 2]);

impl Ears {
    fn new(rules: Subscription, routing: Subscription) -> io::Result<Self> {
        Ok(Self([register(rules)?, register(routing)?]))
    }

    /// Waits until something is told, and for the end of the burst it belongs to.
    async fn hear(&self) -> io::Result<(Instant, Notification)> {
        let [rules, routing] = &self.0;
        let mut heard = Notification::default();
        while heard.is_nothing() {
            let mut ready: AsyncFdReadyGuard<'_, Subscription> = tokio::select! {
                ready = rules.readable() => ready?,
                ready = routing.readable() => ready?,
            };
            if ready.get_inner().drain(&mut heard, MOST_READ)? {
                ready.clear_ready();
            }
        }
        let since = Instant::now();
        sleep(BURST).await;
        self.drain(&mut heard)?;
        Ok((since, heard))
    }

    fn drain(&self, heard: &mut Notification) -> io::Result<()> {
        self.0.iter().try_for_each(|ear| ear.get_ref().drain(heard, MOST_READ).map(drop))
    }
}

#[expect(
    deprecated,
    reason = "the replacement is unsafe, for types that may change their descriptor; ours has the same for life"
)]
fn register(subscription: Subscription) -> io::Result<AsyncFd<Subscription>> {
    AsyncFd::with_interest(subscription, tokio::io::Interest::READABLE)
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

/// The ward's task.
struct Attendant {
    common: Arc<Common>,
    charge: Arc<Charge>,
    ears: Ears,
    record: Record,
    pace: Pace,
    contested: Option<Contested>,
    is_sure: bool,
    is_unfinished: bool,
}

impl Attendant {
    /// Looks at the pod now, and whenever something was told, until the namespace is gone.
    async fn attend(mut self) {
        let mut cause = Some((Instant::now(), Notification::default()));
        let mut retry: Option<Instant> = None;
        loop {
            let (since, heard) = match cause.take() {
                Some(cause) => cause,
                None => match self.wait(retry).await {
                    Ok(Some(cause)) => cause,
                    Ok(None) => continue,
                    Err(error) => {
                        log::warn!(target: SCOPE, pod = self.order().pod.name.to_string(); "cannot listen to the pod's network namespace any more, so only the drift watch looks at it: {error}");
                        return;
                    }
                },
            };
            if heard.lost {
                self.common.metrics.heal.lost.inc();
            }
            let order = self.order();
            let outcome = self.look(&order).await;
            if outcome == Outcome::Gone {
                return;
            }
            let next = self.settle(&order, &outcome, since, &heard);
            let now = Instant::now();
            retry = next.retry.map(|after| now + after);
            let pause = self.pace.looked(now.into_std()).max(next.wait);
            sleep(pause).await;
        }
    }

    fn order(&self) -> Order {
        self.charge.order.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for a reason to look.
    async fn wait(&mut self, retry: Option<Instant>) -> io::Result<Option<(Instant, Notification)>> {
        let calm = self.record.calm_at().map(Instant::from_std);
        let at = |time: Option<Instant>| async move {
            match time {
                Some(time) => sleep_until(time).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            heard = self.ears.hear() => heard.map(Some),
            () = self.charge.nudge.notified() => Ok(Some((Instant::now(), Notification::default()))),
            () = at(retry) => Ok(Some((Instant::now(), Notification::default()))),
            () = at(calm) => {
                self.record.calm_down(Instant::now().into_std());
                self.contested = None;
                Ok(None)
            }
        }
    }

    async fn look(&mut self, order: &Order) -> Outcome {
        // It is never closed.
        let slot = self.common.slots.acquire().await;
        let job = Job {
            pod: order.pod.clone(),
            rules: order.rules.clone(),
            sandbox: self.charge.sandbox.clone(),
            is_sure: self.is_sure,
            is_unfinished: self.is_unfinished,
            proc: self.common.paths.proc.clone(),
            mounted: self.common.paths.netns.clone(),
        };
        let done = tokio::task::spawn_blocking(move || look_and_mend(&job)).await;
        drop(slot);
        let outcome = done.unwrap_or_else(|error| {
            Outcome::Failed(Trouble::new("failed", format!("the look panicked: {error}")))
        });
        self.is_unfinished = outcome.reason() == Some("not_severed");
        self.is_sure |= matches!(outcome, Outcome::Healed { .. });
        outcome
    }

    /// Counts what came of a look, and says what is new.
    fn settle(&mut self, order: &Order, outcome: &Outcome, since: Instant, heard: &Notification) -> Next {
        self.count(outcome, since);
        let next = self.record.ended(outcome, Instant::now().into_std());
        match (self.record.is_contested(), &self.contested) {
            (true, None) => self.contested = Some(Contested::new(&self.common.metrics.heal.contested)),
            (false, Some(_)) => self.contested = None,
            (true, Some(_)) | (false, None) => {}
        }
        if matches!(outcome, Outcome::Healed { .. }) {
            self.charge.order.lock().unwrap_or_else(PoisonError::into_inner).is_verified = true;
        }
        let was_reported = match outcome {
            Outcome::Healed { .. } | Outcome::AsPlanned => {
                self.charge.is_reported.swap(false, Ordering::Relaxed)
            }
            Outcome::Interference(_) | Outcome::Failed(_) | Outcome::Gone => false,
        };
        let is_new = match next.report {
            Some((Report::Failed | Report::Recovered, _)) => true,
            // Nobody was told of it before.
            Some((Report::Healed | Report::Contested(_), _)) | None => false,
        };
        if was_reported || is_new {
            // It is the drift watch that says how pods are.
            let uid = order.pod.uid.clone();
            self.common.wishes.add(|wishes| wishes.pods.extend([uid]));
        }
        if let Some((report, is_event)) = &next.report {
            self.say(order, outcome, report, *is_event, heard);
        }
        next
    }

    fn count(&self, outcome: &Outcome, since: Instant) {
        let heal = &self.common.metrics.heal;
        let result = match outcome {
            Outcome::AsPlanned => "as_planned",
            Outcome::Healed { .. } | Outcome::Interference(_) => "drifted",
            Outcome::Failed(_) => "failed",
            Outcome::Gone => return,
        };
        heal.looks.get_or_create(&ResultLabel { result }).inc();
        let reason = outcome.reason();
        if let Some(reason) = reason {
            heal.attempts.get_or_create(&ReasonLabel { reason }).inc();
        }
        if reason == Some(HEALED) {
            heal.durations.observe(since.elapsed().as_secs_f64());
        }
    }

    fn say(&self, order: &Order, outcome: &Outcome, report: &Report, is_event: bool, heard: &Notification) {
        let (difference, words) = match outcome {
            Outcome::Healed { difference, words } => (difference.as_str(), words.as_str()),
            // The drift watch says it.
            Outcome::Interference(_) => return,
            Outcome::Failed(trouble) => (trouble.text.as_str(), ""),
            Outcome::AsPlanned | Outcome::Gone => ("", ""),
        };
        let by = writers(heard);
        let (kind, reason, message) = match report {
            Report::Recovered => {
                log::info!(target: SCOPE, pod = order.pod.name.to_string(); "the pod is redirected as planned again");
                return;
            }
            Report::Healed => (
                "Normal",
                "RedirectHealed",
                format!("the pod was not redirected as planned, and is again: {difference}{by}. {words}"),
            ),
            Report::Contested(wait) => (
                "Warning",
                "RedirectContested",
                format!(
                    "another writer keeps changing the pod's rules{by}; from now on they are put right only after some time, {} s at first and a minute at most, in which traffic may bypass the proxy. The last difference: {difference}",
                    wait.as_secs()
                ),
            ),
            Report::Failed if outcome.reason() == Some(UNVERIFIABLE) => (
                "Warning",
                "RedirectNotHealed",
                format!("cannot verify the pod's redirection: {difference}{by}"),
            ),
            Report::Failed => (
                "Warning",
                "RedirectNotHealed",
                format!(
                    "the pod is not redirected as planned, or that cannot be told, and it could not be mended: {difference}{by}"
                ),
            ),
        };
        log::warn!(target: SCOPE, pod = order.pod.name.to_string(); "{message}");
        if is_event {
            self.common.herald.send(News { pod: order.pod.clone(), kind, reason, message });
        }
    }
}

/// Who has changed rules, as far as the kernel told. Names are what processes call themselves.
fn writers(heard: &Notification) -> String {
    let others = heard.writers.iter().filter(|(_, name)| name != OWN_NAME);
    let named: Vec<String> =
        others.map(|(process, name)| format!("{} (process {process})", name.escape_debug())).collect();
    if named.is_empty() { String::new() } else { format!("; rules were changed by {}", named.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::pod_source::PodName;
    use cni_core::selection::Programming;
    use redirect_core::pod::PodFacts;
    use std::collections::BTreeSet;

    fn order(ports: &str, is_strict: bool, is_verified: bool) -> Order {
        let facts = PodFacts::sidecar([("traffic.sidecar.istio.io/excludeOutboundPorts", ports)]);
        let name = PodName { namespace: "shop".into(), name: "web".into() };
        let pod = Candidate { name, uid: "u".into(), addresses: Vec::new(), facts };
        let programming = Programming::new(false, false);
        let rules = Rules { programming, strict_capture: is_strict, environment: Vec::new() };
        Ward::order(Arc::new(pod), Arc::new(rules), is_verified)
    }

    fn wants(order: &Order) -> (String, bool) {
        (
            order.pod.facts.annotations.values().find(|value| !value.is_empty()).cloned().unwrap_or_default(),
            order.rules.strict_capture,
        )
    }

    #[test]
    fn what_was_verified_once_stays_what_is_wanted() {
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
