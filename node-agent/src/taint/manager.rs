//! Keeps the taint and the condition of the agent's node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_runtime::cluster::timestamp;
use agent_runtime::metrics::ChangeLabels;
use agent_runtime::node::{Node, RequestedTaint, node_reference};
use agent_runtime::outage::OutageRetry;
use agent_runtime::supervisor::Unneeded;
use agent_runtime::{ChangeError, SCOPE};
use reasons::{AgentReason, ConditionReason, EventReason};
use tokio::sync::watch::Receiver;

use super::health::{FlapDamper, NodeHealth, TaintBackoff, TaintPermission};
use super::probe::{ProbeError, probe};
use crate::cluster::{ApiHandle, Cluster, EventMessage};
use crate::pods::check::ExpectedRules;
use crate::serve::server::AgentContext;
use crate::settings::{DriftSettings, Settings};

/// The component of the events.
const COMPONENT: &str = "cni-taint";
/// How often the agent checks whether its node is fit for pods: before it is, and after.
const CHECK_UNFIT: Duration = Duration::from_secs(1);
const CHECK_FIT: Duration = Duration::from_secs(10);
/// How long it holds, of the same rules, that a probe namespace was redirected, and that it was not.
const PROBE_HOLDS: Duration = Duration::from_secs(300);
const FAILURE_HOLDS: Duration = Duration::from_secs(10);
/// How often the node's object is read although nothing has changed here.
const REREAD: Duration = Duration::from_secs(60);
/// How long the agent's end may take here.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Keeps the taint and the condition of the agent's node.
pub struct NodeTaintManager {
    settings: Settings,
    /// The container runtime's environment is part of it, and may change while the agent runs.
    drift: Receiver<DriftSettings>,
    served: Arc<AgentContext>,
    damper: FlapDamper,
    probed: Option<ProbeResult>,
    /// The verdict, and what it meant, when the node's object was last as it should be.
    settled: Option<(NodeHealth, Option<RequestedTaint>, Instant)>,
    backoff: TaintBackoff,
    retry: OutageRetry,
}

/// A redirection that was tried.
struct ProbeResult {
    at: Instant,
    /// The rules that pods would get, or why they are unknown.
    rules: Result<ExpectedRules, String>,
    health: NodeHealth,
}

impl ProbeResult {
    /// Whether another probe would have the same result.
    fn holds(&self, rules: &Result<ExpectedRules, String>) -> bool {
        let holds = if self.health == NodeHealth::Verified { PROBE_HOLDS } else { FAILURE_HOLDS };
        self.rules == *rules && self.at.elapsed() < holds
    }
}

impl NodeTaintManager {
    /// Checks nothing yet.
    #[must_use]
    pub fn new(settings: &Settings, drift: Receiver<DriftSettings>, served: Arc<AgentContext>) -> Self {
        Self {
            drift,
            damper: FlapDamper::new(settings.taint.marking.after),
            settings: settings.clone(),
            served,
            probed: None,
            settled: None,
            backoff: TaintBackoff::default(),
            retry: OutageRetry::new(
                "cannot keep the node's taint and condition",
                "the node's taint and condition are kept again",
            ),
        }
    }

    /// Works for ever, if the settings ask for anything.
    pub async fn run(mut self) -> Unneeded {
        let taint = &self.settings.taint;
        if !taint.keeps_taint && !taint.keeps_condition {
            return Unneeded;
        }
        if self.settings.identity.node.is_empty() {
            log::warn!(target: SCOPE, "not keeping the node's taint and condition: set NODE_NAME");
            return Unneeded;
        }
        self.served.parts.metrics.start_taint();
        log::info!(target: SCOPE, taint = taint.marking.taint.to_string(), keeps_taint = taint.keeps_taint, condition = taint.marking.condition_type.as_str(); "keeping the node's condition");
        loop {
            let pause = self.check().await;
            tokio::time::sleep(pause).await;
        }
    }

    /// Checks once; returns how long until the next check.
    async fn check(&mut self) -> Duration {
        let health = self.health().await;
        let now = Instant::now();
        let decision = self.damper.decide(&health, now);
        self.served.parts.metrics.node_verified.set(i64::from(health == NodeHealth::Verified));
        let pause = if health == NodeHealth::Verified { CHECK_FIT } else { CHECK_UNFIT };
        let is_settled = self.settled.as_ref().is_some_and(|(last, meant, at)| {
            health.is_like(last) && *meant == decision && now.duration_since(*at) < REREAD
        });
        if is_settled {
            return pause;
        }
        match self.settle(&health, decision).await {
            Ok(()) => {
                self.retry.worked();
                self.retry.reset();
                self.settled = Some((health, decision, now));
                pause
            }
            Err(error) => {
                self.settled = None;
                self.retry.after_failure(&error, error.retry_after())
            }
        }
    }

    async fn health(&mut self) -> NodeHealth {
        if let Err(reason) = self.served.verdict().await {
            self.probed = None;
            return NodeHealth::NotReady(reason);
        }
        if !self.settings.taint.probe {
            return NodeHealth::Verified;
        }
        let (installer, environment) =
            (self.served.parts.installer.clone(), self.drift.borrow().environment.clone());
        let rules = tokio::task::spawn_blocking(move || {
            installer.plugin_conf().map(|conf| ExpectedRules::of(&conf, &environment))
        });
        let rules = rules.await.unwrap_or_else(|error| Err(error.to_string()));
        if let Some(probed) = self.probed.as_ref().filter(|probed| probed.holds(&rules)) {
            return probed.health.clone();
        }
        let health = self.probe(rules.clone()).await;
        self.probed = Some(ProbeResult { at: Instant::now(), rules, health: health.clone() });
        health
    }

    async fn probe(&self, rules: Result<ExpectedRules, String>) -> NodeHealth {
        let probed = tokio::task::spawn_blocking(move || {
            rules.map_err(ProbeError::Failed).and_then(|rules| probe(&rules))
        });
        let probed = probed.await.unwrap_or_else(|error| Err(ProbeError::Failed(error.to_string())));
        let (result, health) = match probed {
            Ok(()) => (AgentReason::Redirected, NodeHealth::Verified),
            Err(error @ ProbeError::Impossible(_)) => {
                (AgentReason::Impossible, NodeHealth::ProbeImpossible(error.to_string()))
            }
            Err(error @ ProbeError::Failed(_)) => {
                (AgentReason::Failed, NodeHealth::ProbeFailed(error.to_string()))
            }
        };
        self.served.parts.metrics.node_probes.get_or_create(&result.into()).inc();
        health
    }

    /// Publishes the node's health. The condition comes first, so that a controller that reads it never contradicts the taint.
    async fn settle(
        &mut self,
        health: &NodeHealth,
        decision: Option<RequestedTaint>,
    ) -> Result<(), ChangeError> {
        let cluster = self.served.parts.connection.get()?;
        let node = cluster.node(&self.settings.identity.node).await?;
        let reported = self.report_condition(&cluster, &node, health, decision).await;
        if !self.settings.taint.keeps_taint {
            return reported;
        }
        match decision {
            None => reported,
            Some(RequestedTaint::Free) => {
                reported?;
                self.set(&cluster, &node, RequestedTaint::Free, health).await
            }
            // A node is tainted even if its condition cannot be published.
            Some(RequestedTaint::Tainted) if self.backs_off(&node).await => reported,
            Some(RequestedTaint::Tainted) => {
                self.set(&cluster, &node, RequestedTaint::Tainted, health).await?;
                reported
            }
        }
    }

    /// Publishes only decided states, unless the node has no condition yet.
    async fn report_condition(
        &self,
        cluster: &Cluster,
        node: &Node,
        health: &NodeHealth,
        decision: Option<RequestedTaint>,
    ) -> Result<(), ChangeError> {
        let of_type = &self.settings.taint.marking.condition_type;
        let is_unsettled = decision.is_none() && !matches!(health, NodeHealth::ProbeImpossible(_));
        if is_unsettled && node.condition(of_type).is_some() {
            return Ok(());
        }
        let condition = health.condition(of_type);
        let Some(patch) = node.condition_patch(&condition, &timestamp()) else { return Ok(()) };
        let done = cluster.patch_node_status(node.name(), patch).await;
        self.count(None, &done);
        done?;
        log::info!(target: SCOPE, condition = of_type.as_str(), status = condition.status.as_str(), reason = condition.reason.as_str(); "set the node's condition: {}", condition.message);
        if let NodeHealth::ProbeImpossible(why) = health {
            log::warn!(target: SCOPE, "the node's taint stays as it is: {why}");
        }
        Ok(())
    }

    async fn set(
        &mut self,
        cluster: &Cluster,
        node: &Node,
        requested: RequestedTaint,
        health: &NodeHealth,
    ) -> Result<(), ChangeError> {
        let marking = &self.settings.taint.marking;
        let done = cluster.set_taint(node, marking, requested).await;
        if done != Ok(false) {
            self.count(Some(requested), &done);
        }
        let is_changed = done?;
        self.backoff.note(requested == RequestedTaint::Tainted, node.uid());
        if is_changed {
            let (reason, message) = match requested {
                RequestedTaint::Tainted => {
                    (EventReason::NodeTainted, format!("taint {} added: {}", marking.taint, health.problem()))
                }
                RequestedTaint::Free => (
                    EventReason::NodeFreed,
                    format!(
                        "taint {} removed: pods of the mesh that start here are redirected",
                        marking.taint.key
                    ),
                ),
            };
            self.report(node, reason, message).await;
        }
        Ok(())
    }

    /// Whether another controller has removed this agent's taint; then the agent leaves it off for a while, longer each time.
    async fn backs_off(&mut self, node: &Node) -> bool {
        if node.has(&self.settings.taint.marking.taint) {
            return false;
        }
        match self.backoff.ask(node.uid(), Instant::now()) {
            TaintPermission::Granted => false,
            TaintPermission::Goes => true,
            TaintPermission::Begins(lasts) => {
                let message = format!(
                    "another controller removed taint {} from an unverified node; restoring it in {} s. Switch off the other controller of this taint, such as Istio's (PILOT_ENABLE_NODE_UNTAINT_CONTROLLERS)",
                    self.settings.taint.marking.taint,
                    lasts.as_secs()
                );
                self.report(node, EventReason::NodeTaintContested, message).await;
                true
            }
        }
    }

    /// At the shutdown of an agent whose plugin is removed: no other program would remove the taint or correct the condition.
    pub async fn release(settings: &Settings, connection: &ApiHandle) {
        let taint = &settings.taint;
        if settings.identity.node.is_empty() || !(taint.keeps_taint || taint.keeps_condition) {
            return;
        }
        let left = tokio::time::timeout(END_PATIENCE, async {
            let cluster = connection.get().map_err(|error| error.to_string())?;
            let node = cluster.node(&settings.identity.node).await.map_err(|error| error.to_string())?;
            let gone = NodeHealth::ProbeImpossible(
                "the agent and its plugin were removed from this node".to_owned(),
            );
            let mut condition = gone.condition(&taint.marking.condition_type);
            condition.reason = ConditionReason::Removed.to_string();
            let reported = match node.condition_patch(&condition, &timestamp()) {
                Some(patch) => cluster.patch_node_status(node.name(), patch).await.map(drop),
                None => Ok(()),
            };
            // The node is freed even if its condition cannot be published.
            let freed = if taint.keeps_taint {
                cluster.set_taint(&node, &taint.marking, RequestedTaint::Free).await.map(drop)
            } else {
                Ok(())
            };
            reported.and(freed).map_err(|error| error.to_string())
        });
        let slow = |_| Err(format!("no answer within {END_PATIENCE:?}"));
        if let Err(error) = left.await.unwrap_or_else(slow) {
            let remedy = if taint.keeps_taint {
                format!(
                    "; where it keeps its taint, kubectl taint nodes {} {}- removes it",
                    settings.identity.node, taint.marking.taint.key
                )
            } else {
                String::new()
            };
            log::warn!(target: SCOPE, "the node's condition {} may stay as it was{remedy}: {error}", taint.marking.condition_type);
        }
    }

    fn count<T>(&self, requested: Option<RequestedTaint>, done: &Result<T, ChangeError>) {
        let result = done.as_ref().err().map_or(AgentReason::Done, ChangeError::reason);
        self.served
            .parts
            .metrics
            .node_taint_changes
            .get_or_create(&ChangeLabels::of(requested, result))
            .inc();
    }

    async fn report(&self, node: &Node, reason: EventReason, message: String) {
        let is_good = reason == EventReason::NodeFreed;
        let (level, kind) =
            if is_good { (log::Level::Info, "Normal") } else { (log::Level::Warn, "Warning") };
        log::log!(target: SCOPE, level, "{message}");
        let event = EventMessage { about: node_reference(node), component: COMPONENT, kind, reason, message };
        let _ = self.served.parts.connection.publish(&self.served.parts.metrics.events, event).await;
    }
}
