//! The cluster's taint controller: the leader of its replicas taints nodes without a ready agent.
//!
//! In: nodes, the agents' pods and their DaemonSet, as the API server has them. Out: patches of nodes' taints, events, metrics. It knows nothing of
//! what is on a node. [`model`], [`queue`], [`election`], `placement` and [`requirement`] are pure. A new leader knows nothing, and decides nothing
//! before it has listed everything.

pub mod cleanup;
pub mod election;
mod leader;
mod leases;
pub mod metrics;
pub mod model;
mod placement;
pub mod queue;
pub mod requirement;

use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_runtime::cluster::{ApiHandle, ControllerIdentity};
use agent_runtime::node::NodeMarking;
use agent_runtime::outage::{FIRST_RETRY, LONGEST_RETRY, OutageLog};
use agent_runtime::serve::{self, Address, HttpResponse, handler, text};
use agent_runtime::supervisor::{OwnedTask, Supervisor};
use agent_runtime::{BootTime, SCOPE};
use anyhow::{Context as _, bail};
use cluster_client::params::GetParams;
use cluster_client::{Account, Backoff, Request};
use cni_core::selector::LabelSelector;
use hyper::body::Incoming;
use hyper::{Method, StatusCode};
use prometheus_client::registry::Registry;
use reasons::AgentReason;
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use election::{Candidate, PAUSE};
use leader::Leader;
use leases::Round;
use metrics::ControllerMetrics;
use requirement::Requirement;

/// The Lease, by the name that Istio's first taint controller gave it.
const LEASE_NAME: &str = "istio-taint-lock";
/// The pods of the agents, as every chart labels them.
const AGENTS: &str = "k8s-app=istio-cni-node";
/// How long a response of the API server makes the controller ready.
const RESPONSE_COUNTS: Duration = Duration::from_secs(30);
/// The longest pause that the API server may ask for: less than the Lease lasts.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long the last request may take.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// What the controller is asked to do.
#[derive(Debug)]
pub struct ControllerSettings {
    /// Which replica this is, and where the agents are.
    pub identity: ControllerIdentity,
    /// The API server, and how to authenticate there.
    pub account: Account,
    /// The taint, and when nodes get it.
    pub marking: NodeMarking,
    /// The namespace and name of the ConfigMap of selectors; empty: the agents' DaemonSet counts.
    pub config_map: (String, String),
    /// The key and value of the label that agents gave to broken pods, if they did: for [`cleanup`].
    pub broken_label: Option<(String, String)>,
    /// Where to serve health.
    pub health: Address,
    /// Where to serve metrics, if at all.
    pub monitoring: Option<Address>,
}

/// Runs the controller until a signal ends it.
///
/// # Errors
/// It does not know who it is, cannot serve health, cannot use the ConfigMap, or one of its tasks has ended.
pub async fn run(settings: ControllerSettings) -> anyhow::Result<()> {
    run_with(settings, Supervisor::default()).await
}

async fn run_with(settings: ControllerSettings, tasks: Supervisor) -> anyhow::Result<()> {
    let ControllerSettings { identity, account, marking, config_map, health, monitoring, broken_label: _ } =
        settings;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    if identity.pod.is_empty() || identity.namespace.is_empty() {
        bail!("set POD_NAME and POD_NAMESPACE: they identify this replica to the others");
    }
    let candidate = Candidate::new(identity.pod.clone(), identity.namespace.clone(), LEASE_NAME.to_owned());
    let own = identity.namespace.clone();
    let connection = Arc::new(ApiHandle::new(account, identity));
    let metrics = Arc::new(ControllerMetrics::default());
    let (responded, responses) = watch::channel(None);
    serve(health, monitoring, &tasks, &metrics, responses).await?;
    let outage = OutageLog::new(
        format!("cannot use Lease {LEASE_NAME}, which needs the verbs get, create and update on leases"),
        "the Lease can be used again",
    );
    let mut election = Election { candidate, connection: connection.clone(), metrics, responded, outage };
    let done = tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        error = lead(marking, &config_map, &own, &tasks, &mut election) => error,
        dead = tasks.death() => Err(dead.into()),
    };
    if let Ok(cluster) = connection.get() {
        let _ = tokio::time::timeout(END_PATIENCE, leases::step_down(&cluster, &election.candidate)).await;
    }
    done
}

/// Stands for election for ever, and leads when elected.
async fn lead(
    marking: NodeMarking,
    config_map: &(String, String),
    own: &str,
    tasks: &Supervisor,
    election: &mut Election,
) -> anyhow::Result<()> {
    let requirements = requirements(config_map, own, &election.connection).await?;
    for Requirement { namespace, selector } in &requirements {
        log::info!(target: SCOPE, namespace = namespace.as_str(), selector = selector.as_str(); "every node needs one of these pods, ready");
    }
    // Its term, until when it may act, and what it does.
    let mut leader: Option<(u64, watch::Sender<Option<BootTime>>, Vec<OwnedTask>)> = None;
    loop {
        let pause = election.round().await;
        let term = election.candidate.term(BootTime::now());
        election.metrics.leader.set(i64::from(term.is_some()));
        if leader.take_if(|(led, ..)| Some(*led) != term).is_some() {
            log::warn!(target: SCOPE, "this replica does not lead any more");
        }
        let until = election.candidate.acts_until;
        if let Some((_, acts_until, _)) = &leader {
            acts_until.send_replace(until);
        } else if let Some(term) = term {
            log::info!(target: SCOPE, "this replica leads");
            // A leader of an earlier term, which may still be ending, does not learn of this one.
            let (acts_until, leads) = watch::channel(until);
            let work = Leader::new(
                marking.clone(),
                config_map.1.is_empty(),
                requirements.clone(),
                election.connection.clone(),
                election.metrics.clone(),
                leads,
            );
            leader = Some((term, acts_until, work.start(tasks)));
        }
        tokio::time::sleep(pause).await;
    }
}

struct Election {
    candidate: Candidate,
    connection: Arc<ApiHandle>,
    metrics: Arc<ControllerMetrics>,
    /// The last response of the API server.
    responded: watch::Sender<Option<Instant>>,
    outage: OutageLog,
}

impl Election {
    /// One round; how long until the next.
    async fn round(&mut self) -> Duration {
        let mut pause = PAUSE;
        let round = match self.connection.get() {
            Ok(cluster) => leases::round(&cluster, &mut self.candidate).await.map_err(|failure| {
                pause = PAUSE.max(failure.retry_after().unwrap_or_default().min(LONGEST_PAUSE));
                failure.to_string()
            }),
            Err(error) => Err(error.to_string()),
        };
        let count = |result: AgentReason| {
            self.metrics.lease_writes.get_or_create(&result.into()).inc();
        };
        match &round {
            Ok(Round::Won) => count(AgentReason::Done),
            Ok(Round::Conflict) => count(AgentReason::Conflict),
            Ok(Round::Waits) => {}
            Err(_) => count(AgentReason::Failed),
        }
        match round {
            Ok(_) => {
                self.responded.send_replace(Some(Instant::now()));
                self.outage.worked();
            }
            Err(error) => self.outage.failed(&error, &[]),
        }
        pause
    }
}

/// Which pods every node needs. Repeats the request until the API server responds.
async fn requirements(
    (namespace, name): &(String, String),
    own: &str,
    connection: &ApiHandle,
) -> anyhow::Result<Vec<Requirement>> {
    if name.is_empty() {
        let selector = LabelSelector::parse(AGENTS).context("the agents' labels")?;
        return Ok(vec![Requirement { namespace: own.to_owned(), selector }]);
    }
    let mut pauses = Backoff::new(FIRST_RETRY, LONGEST_RETRY);
    loop {
        let path = format!("/api/v1/namespaces/{namespace}/configmaps");
        let request = Request::new(path).get(name, &GetParams::default());
        let found = match connection.get() {
            Ok(cluster) => cluster.client().find::<Value>(request, END_PATIENCE).await,
            Err(error) => bail!("no working API client: {error}"),
        };
        match found {
            Ok(Some(found)) => {
                let read = requirement::read(&found["data"], own);
                return read.with_context(|| format!("ConfigMap {namespace}/{name}"));
            }
            Ok(None) => {
                bail!("ConfigMap {namespace}/{name} not found; correct TAINT_CONFIGMAP_NAME");
            }
            Err(failure) => {
                log::warn!(target: SCOPE, "cannot read ConfigMap {namespace}/{name}, which needs the verb get on configmaps: {failure}");
                tokio::time::sleep(pauses.pause(failure.retry_after())).await;
            }
        }
    }
}

/// When the API server responded last.
type Responses = watch::Receiver<Option<Instant>>;

/// Starts the servers of health and metrics.
async fn serve(
    health: Address,
    monitoring: Option<Address>,
    tasks: &Supervisor,
    metrics: &Arc<ControllerMetrics>,
    responses: Responses,
) -> anyhow::Result<()> {
    if let Some(address) = monitoring {
        let answer = handler(&Arc::new(metrics.registry()), show);
        serve::start_optional(tasks, "metrics server", address, answer).await;
    }
    let answer = handler(&Arc::new((tasks.clone(), responses)), report);
    serve::start(tasks, "health server", health, answer)
        .await
        .with_context(|| format!("cannot serve health on port {}", health.1))
}

async fn show(registry: Arc<Registry>, request: hyper::Request<Incoming>) -> HttpResponse {
    match request.uri().path() {
        "/metrics" => serve::metrics(&registry, request.headers()),
        _ => text(StatusCode::NOT_FOUND, "not found; use /metrics\n"),
    }
}

async fn report(known: Arc<(Supervisor, Responses)>, request: hyper::Request<Incoming>) -> HttpResponse {
    let (tasks, responses) = &*known;
    let is_ready = responses.borrow().is_some_and(|at| at.elapsed() < RESPONSE_COUNTS);
    match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") => serve::healthz(tasks),
        (&Method::GET | &Method::HEAD, "/readyz") if is_ready => text(StatusCode::OK, "ready\n"),
        (&Method::GET | &Method::HEAD, "/readyz") => {
            text(StatusCode::SERVICE_UNAVAILABLE, "not ready: the API server denied access to the Lease\n")
        }
        _ => text(StatusCode::NOT_FOUND, "not found; use /healthz or /readyz\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_runtime::node::{Taint, TaintEffect};
    use cluster_client::Trust;
    use std::collections::BTreeSet;
    use std::net::Ipv4Addr;

    /// For what must come, however slow the machine.
    const LONG: Duration = Duration::from_secs(600);

    fn settings() -> ControllerSettings {
        let text = str::to_owned;
        let taint = Taint { key: text("k"), value: String::new(), effect: TaintEffect::NoSchedule };
        let marking =
            NodeMarking { taint, old_keys: Vec::new(), condition_type: text("t"), after: Duration::ZERO };
        ControllerSettings {
            identity: ControllerIdentity {
                namespace: text("istio-system"),
                pod: text("taint-controller-x"),
                node: String::new(),
                daemon_set: text("istio-cni-node"),
            },
            account: Account::new(
                text("https://127.0.0.1:1"),
                Trust::Unverified,
                "/nonexistent/token".into(),
            ),
            marking,
            config_map: (text("kube-system"), String::new()),
            broken_label: None,
            health: (Some(Ipv4Addr::LOCALHOST.into()), 0),
            monitoring: Some((Some(Ipv4Addr::LOCALHOST.into()), 0)),
        }
    }

    #[tokio::test]
    async fn a_controller_ends_when_one_of_its_servers_does_and_names_it() {
        for name in ["health server", "metrics server"] {
            let tasks = Supervisor::default();
            tasks.sabotage.strike(name);
            let ended = tokio::time::timeout(LONG, run_with(settings(), tasks)).await;
            let error = ended.expect("ends").expect_err("no orderly end").to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[tokio::test]
    async fn all_that_a_leader_does_is_supervised() {
        let all = ["leader", "node watch", "pod watch", "watch of the agents' DaemonSet"];
        for name in all {
            let ControllerSettings { identity, account, marking, config_map, .. } = settings();
            let connection = Arc::new(ApiHandle::new(account, identity));
            let needed = requirements(&config_map, "istio-system", &connection).await.expect("requirements");
            let (_acts_until, leads) = watch::channel(None);
            let tasks = Supervisor::default();
            tasks.sabotage.strike(name);
            let leader = Leader::new(marking, true, needed, connection, Arc::default(), leads);
            let _work = leader.start(&tasks);
            let dead = tokio::time::timeout(LONG, tasks.death()).await.expect("a death");
            assert_eq!(dead.name, name);
            while *tasks.sabotage.started.lock().expect("names") != BTreeSet::from(all) {
                tokio::task::yield_now().await;
            }
        }
    }
}
