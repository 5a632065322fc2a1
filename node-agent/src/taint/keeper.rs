//! The agent's taint controller: its own node's taint and condition.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster_client::{Backoff, Outage};
use k8s_openapi::jiff::{Timestamp, Unit};
use tokio::sync::watch::Receiver;

use super::metrics::change;
use super::node::{Node, Wanted};
use super::probe::{ProbeError, probe};
use super::verdict::{Judgement, Leave, Steady, Truce, Verdict};
use crate::cluster::{Cluster, Connection, NodeError, Telling};
use crate::drift::Rules;
use crate::metrics::{Metrics, ResultLabel};
use crate::plugin_conf::plugin_conf;
use crate::serve::Served;
use crate::settings::{DriftSettings, Settings};
use crate::supervisor::Unneeded;

/// The scope of the agent's lines.
const SCOPE: &str = "cni-agent";
/// Who sends the events.
pub const COMPONENT: &str = "cni-taint";
/// How often the agent looks whether its node is fit for pods: until it is, and then.
const LOOK_UNFIT: Duration = Duration::from_secs(1);
const LOOK_FIT: Duration = Duration::from_secs(10);
/// How long it holds, of the same rules, that a probe namespace was redirected, and that it was not.
const PROBE_HOLDS: Duration = Duration::from_secs(300);
const FAILURE_HOLDS: Duration = Duration::from_secs(10);
/// How often the node's object is looked at although nothing has changed here.
const REREAD: Duration = Duration::from_secs(60);
/// The pauses after an API server that does not answer.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// How long the agent's end may take here.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Keeps the taint and the condition of the agent's node.
pub struct Keeper {
    settings: Settings,
    /// What the container runtime's environment says is part of it, and may change while the agent runs.
    drift: Receiver<DriftSettings>,
    served: Arc<Served>,
    connection: Arc<Connection>,
    metrics: Arc<Metrics>,
    steady: Steady,
    probed: Option<Probed>,
    /// The verdict, and what it meant, when the node's object was last as it should be.
    settled: Option<(Verdict, Judgement, Instant)>,
    truce: Truce,
    outage: Outage,
    pauses: Backoff,
}

/// A redirection that was tried.
struct Probed {
    at: Instant,
    /// What pods' rules were to be, or why that could not be told.
    rules: Result<Rules, String>,
    verdict: Verdict,
}

impl Probed {
    /// Whether trying again would say nothing new.
    fn holds(&self, rules: &Result<Rules, String>) -> bool {
        let holds = if self.verdict == Verdict::Verified { PROBE_HOLDS } else { FAILURE_HOLDS };
        self.rules == *rules && self.at.elapsed() < holds
    }
}

impl Keeper {
    /// Nothing is looked at yet.
    #[must_use]
    pub fn new(
        settings: &Settings,
        drift: Receiver<DriftSettings>,
        served: Arc<Served>,
        connection: Arc<Connection>,
    ) -> Self {
        Self {
            drift,
            steady: Steady::new(settings.taint.after),
            settings: settings.clone(),
            metrics: served.metrics.clone(),
            served,
            connection,
            probed: None,
            settled: None,
            truce: Truce::default(),
            outage: Outage::default(),
            pauses: Backoff::new(FIRST_RETRY, LONGEST_RETRY),
        }
    }

    /// Works for ever, if the settings ask for anything.
    pub async fn run(mut self) -> Unneeded {
        let taint = &self.settings.taint;
        if !taint.keeps_taint && !taint.keeps_condition {
            return Unneeded;
        }
        if self.settings.identity.node.is_empty() {
            log::warn!(target: SCOPE, "the node's taint and condition are left alone: set NODE_NAME, so that the agent knows its node");
            return Unneeded;
        }
        self.metrics.taint.start_at_nought();
        log::info!(target: SCOPE, taint = taint.taint.to_string(), keeps_taint = taint.keeps_taint, condition = taint.condition_type.as_str(); "keeping the node's condition");
        loop {
            let pause = self.look().await;
            tokio::time::sleep(pause).await;
        }
    }

    /// Looks once; how long until the next time.
    async fn look(&mut self) -> Duration {
        let verdict = self.verdict().await;
        let now = Instant::now();
        let judgement = self.steady.judge(&verdict, now);
        self.metrics.taint.verified.set(i64::from(verdict == Verdict::Verified));
        let pause = if verdict == Verdict::Verified { LOOK_FIT } else { LOOK_UNFIT };
        let is_settled = self.settled.as_ref().is_some_and(|(last, meant, at)| {
            verdict.is_like(last) && *meant == judgement && now.duration_since(*at) < REREAD
        });
        if is_settled {
            return pause;
        }
        match self.settle(&verdict, judgement).await {
            Ok(()) => {
                self.pauses.reset();
                if let Some(lasted) = self.outage.ends(Instant::now()) {
                    log::info!(target: SCOPE, seconds = lasted.as_secs(); "the node's taint and condition are kept again");
                }
                self.settled = Some((verdict, judgement, now));
                pause
            }
            Err(error) => {
                if self.outage.begins(Instant::now()) {
                    log::warn!(target: SCOPE, "cannot keep the node's taint and condition: {error}");
                } else {
                    log::debug!(target: SCOPE, "still cannot keep the node's taint and condition: {error}");
                }
                self.settled = None;
                let retry_after =
                    if let NodeError::Unanswered { retry_after, .. } = error { retry_after } else { None };
                self.pauses.pause(retry_after)
            }
        }
    }

    async fn verdict(&mut self) -> Verdict {
        if let Err(reason) = self.served.verdict().await {
            self.probed = None;
            return Verdict::NotReady(reason);
        }
        if !self.settings.taint.probe {
            return Verdict::Verified;
        }
        let (installer, environment) =
            (self.served.installer.clone(), self.drift.borrow().environment.clone());
        let rules = tokio::task::spawn_blocking(move || {
            plugin_conf(&installer).map(|conf| Rules::of(&conf, &environment))
        });
        let rules = rules.await.unwrap_or_else(|error| Err(error.to_string()));
        if let Some(probed) = self.probed.as_ref().filter(|probed| probed.holds(&rules)) {
            return probed.verdict.clone();
        }
        let verdict = self.probe(rules.clone()).await;
        self.probed = Some(Probed { at: Instant::now(), rules, verdict: verdict.clone() });
        verdict
    }

    async fn probe(&self, rules: Result<Rules, String>) -> Verdict {
        let probed = tokio::task::spawn_blocking(move || {
            rules.map_err(ProbeError::Failed).and_then(|rules| probe(&rules))
        });
        let probed = probed.await.unwrap_or_else(|error| Err(ProbeError::Failed(error.to_string())));
        let (result, verdict) = match probed {
            Ok(()) => ("redirected", Verdict::Verified),
            Err(error @ ProbeError::Impossible(_)) => {
                ("impossible", Verdict::ProbeImpossible(error.to_string()))
            }
            Err(error @ ProbeError::Failed(_)) => ("failed", Verdict::ProbeFailed(error.to_string())),
        };
        self.metrics.taint.probes.get_or_create(&ResultLabel { result }).inc();
        verdict
    }

    /// Makes the node's object say what was found out. The condition comes first, so that whoever goes by it never contradicts the taint.
    async fn settle(&mut self, verdict: &Verdict, judgement: Judgement) -> Result<(), NodeError> {
        let cluster = self.connection.get()?;
        let node = cluster.node(&self.settings.identity.node).await?;
        let said = self.say_condition(&cluster, &node, verdict, judgement).await;
        if !self.settings.taint.keeps_taint {
            return said;
        }
        match judgement {
            Judgement::AsItIs => said,
            Judgement::Free => {
                said?;
                self.set(&cluster, &node, Wanted::Free, verdict).await
            }
            // A node is held back also where that cannot be said.
            Judgement::Tainted if self.is_truce(&cluster, &node).await => said,
            Judgement::Tainted => {
                self.set(&cluster, &node, Wanted::Tainted, verdict).await?;
                said
            }
        }
    }

    /// What is not settled yet is not said, unless the node says nothing at all.
    async fn say_condition(
        &self,
        cluster: &Cluster,
        node: &Node,
        verdict: &Verdict,
        judgement: Judgement,
    ) -> Result<(), NodeError> {
        let of_type = &self.settings.taint.condition_type;
        let is_unsettled = judgement == Judgement::AsItIs && !matches!(verdict, Verdict::ProbeImpossible(_));
        if is_unsettled && node.condition(of_type).is_some() {
            return Ok(());
        }
        let said = verdict.condition(of_type);
        let Some(patch) = node.condition_patch(&said, &now()) else { return Ok(()) };
        let done = cluster.patch_node_status(node.name(), patch).await;
        self.count(None, &done);
        done?;
        log::info!(target: SCOPE, condition = of_type.as_str(), status = said.status.as_str(), reason = said.reason.as_str(); "the node's condition says: {}", said.message);
        if let Verdict::ProbeImpossible(why) = verdict {
            log::warn!(target: SCOPE, "the node's taint stays as it is: {why}");
        }
        Ok(())
    }

    async fn set(
        &mut self,
        cluster: &Cluster,
        node: &Node,
        wanted: Wanted,
        verdict: &Verdict,
    ) -> Result<(), NodeError> {
        let taint = &self.settings.taint;
        let done = cluster.set_taint(node, &taint.taint, &taint.old_keys, wanted).await;
        if !matches!(&done, Ok(settled) if !settled.changed) {
            self.count(Some(wanted), &done);
        }
        let settled = done?;
        self.truce.note(wanted == Wanted::Tainted, node.uid());
        if settled.changed {
            let (kind, reason, message) = match wanted {
                Wanted::Tainted => (
                    "Warning",
                    "NodeTainted",
                    format!("taint {} added: {}", self.settings.taint.taint, verdict.trouble()),
                ),
                Wanted::Free => (
                    "Normal",
                    "NodeFreed",
                    format!(
                        "taint {} removed: pods of the mesh that start here are redirected",
                        self.settings.taint.taint.key
                    ),
                ),
            };
            self.say(cluster, node, kind, reason, &message).await;
        }
        Ok(())
    }

    /// Whether somebody else has removed the taint that this agent had put there; then it is left so for a while, which gets longer.
    async fn is_truce(&mut self, cluster: &Cluster, node: &Node) -> bool {
        if node.has(&self.settings.taint.taint) {
            return false;
        }
        match self.truce.ask(node.uid(), Instant::now()) {
            Leave::Granted => false,
            Leave::Goes => true,
            Leave::Begins(lasts) => {
                let message = format!(
                    "somebody else removed taint {} although pods would not be redirected here; it comes back in {} s. Switch off the other controller of this taint, such as Istio's (PILOT_ENABLE_NODE_UNTAINT_CONTROLLERS)",
                    self.settings.taint.taint,
                    lasts.as_secs()
                );
                self.say(cluster, node, "Warning", "NodeTaintContested", &message).await;
                true
            }
        }
    }

    /// At the end of an agent whose plugin is removed: nobody else would take the taint away, nor the condition back.
    pub async fn leave(settings: &Settings, connection: &Connection) {
        let taint = &settings.taint;
        if settings.identity.node.is_empty() || !(taint.keeps_taint || taint.keeps_condition) {
            return;
        }
        let left = tokio::time::timeout(END_PATIENCE, async {
            let cluster = connection.get().map_err(|error| error.to_string())?;
            let node = cluster.node(&settings.identity.node).await.map_err(|error| error.to_string())?;
            let gone =
                Verdict::ProbeImpossible("the agent and its plugin were removed from this node".to_owned());
            let mut said = gone.condition(&taint.condition_type);
            "Removed".clone_into(&mut said.reason);
            let said = match node.condition_patch(&said, &now()) {
                Some(patch) => cluster.patch_node_status(node.name(), patch).await.map(drop),
                None => Ok(()),
            };
            // The node is freed also where that cannot be said.
            let freed = if taint.keeps_taint {
                cluster.set_taint(&node, &taint.taint, &taint.old_keys, Wanted::Free).await.map(drop)
            } else {
                Ok(())
            };
            said.and(freed).map_err(|error| error.to_string())
        });
        let slow = |_| Err(format!("no answer within {END_PATIENCE:?}"));
        if let Err(error) = left.await.unwrap_or_else(slow) {
            let remedy = if taint.keeps_taint {
                format!(
                    "; where it keeps its taint, kubectl taint nodes {} {}- removes it",
                    settings.identity.node, taint.taint.key
                )
            } else {
                String::new()
            };
            log::warn!(target: SCOPE, "the node's condition {} may stay as it was{remedy}: {error}", taint.condition_type);
        }
    }

    fn count<T>(&self, wanted: Option<Wanted>, done: &Result<T, NodeError>) {
        let result = done.as_ref().err().map_or("done", NodeError::word);
        self.metrics.taint.changes.get_or_create(&change(wanted, result)).inc();
    }

    async fn say(&self, cluster: &Cluster, node: &Node, kind: &str, reason: &str, message: &str) {
        if kind == "Normal" {
            log::info!(target: SCOPE, "{message}");
        } else {
            log::warn!(target: SCOPE, "{message}");
        }
        let telling = Telling { component: COMPONENT, kind, reason, message };
        let sent = cluster.tell_of_node(node, &telling).await;
        let result = if sent.is_ok() { "sent" } else { "failed" };
        self.metrics.events.get_or_create(&ResultLabel { result }).inc();
        if let Err(error) = sent {
            log::debug!(target: SCOPE, "cannot send an event about the node: {error}");
        }
    }
}

/// The time as the API server writes it.
fn now() -> String {
    Timestamp::now().round(Unit::Second).unwrap_or_else(|_| Timestamp::now()).to_string()
}
