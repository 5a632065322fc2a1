//! The cluster's taint controller: nodes without an agent that is ready are tainted, by the leader of its replicas.
//!
//! [`model`], [`queue`], [`election`] and [`requirement`] are pure. The leader begins with nothing each time it comes to lead, and decides nothing
//! before it has listed everything.

pub mod election;
mod leader;
mod leases;
pub mod metrics;
pub mod model;
mod placing;
pub mod queue;
pub mod requirement;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cluster_client::params::GetParams;
use cluster_client::{ApiError, Backoff, Limits, Outage, Request};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, StatusCode};
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::cluster::Connection;
use crate::metrics::ResultLabel;
use crate::ready::State;
use crate::repair::selector::LabelSelector;
use crate::serve::{self, Answer, text};
use crate::settings::Settings;
use crate::supervisor::Supervisor;
use election::{Candidate, PAUSE};
use leader::Leader;
use leases::Round;
use metrics::ControllerMetrics;
use requirement::Requirement;

/// The scope of its lines.
const SCOPE: &str = "cni-agent";
/// Who sends the events.
const COMPONENT: &str = "cni-taint-controller";
/// The Lease, by the name that Istio's first taint controller gave it.
const LEASE_NAME: &str = "istio-taint-lock";
/// The pods of the agents, as every chart labels them.
const AGENTS: &str = "k8s-app=istio-cni-node";
/// How long an answer of the API server makes the controller ready.
const HEARD: Duration = Duration::from_secs(30);
/// The longest that is waited with the Lease where the server asks for that: less than the Lease lasts.
const LONGEST_WISH: Duration = Duration::from_secs(10);
/// How long the last request may take.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Runs the controller until it is told to end.
///
/// # Errors
/// When it does not know who it is, cannot serve health, the ConfigMap says nothing that can be used, or one of its tasks has ended.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    run_with(settings, Supervisor::default()).await
}

async fn run_with(settings: Settings, tasks: Supervisor) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let identity = &settings.identity;
    if identity.pod.is_empty() || identity.namespace.is_empty() {
        bail!(
            "POD_NAME and POD_NAMESPACE have to be set: the controller is known by them to its other replicas"
        );
    }
    let connection = Arc::new(Connection::new(&settings, Arc::new(State::default())));
    let metrics = Arc::new(ControllerMetrics::default());
    let (heard, is_heard) = watch::channel(None);
    serve(&settings, &tasks, &metrics, is_heard).await?;
    let candidate = Candidate::new(identity.pod.clone(), identity.namespace.clone(), LEASE_NAME.to_owned());
    let mut election =
        Election { candidate, connection: connection.clone(), metrics, heard, outage: Outage::default() };
    let done = tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        error = lead(&settings, &tasks, &mut election) => error,
        dead = tasks.death() => Err(dead.into()),
    };
    if let Ok(cluster) = connection.get() {
        let _ = tokio::time::timeout(END_PATIENCE, leases::step_down(&cluster, &election.candidate)).await;
    }
    done
}

/// Stands for election for ever, and leads when elected.
async fn lead(settings: &Settings, tasks: &Supervisor, election: &mut Election) -> anyhow::Result<()> {
    let requirements = requirements(settings, &election.connection).await?;
    for Requirement { namespace, selector } in &requirements {
        log::info!(target: SCOPE, namespace = namespace.as_str(), selector = selector.as_str(); "every node needs one of these pods that is ready");
    }
    let (acts_until, leads) = watch::channel(None);
    let mut leader = None;
    loop {
        let pause = election.round(&acts_until).await;
        let is_leader = election.candidate.acts_until().is_some_and(|until| Instant::now() < until);
        election.metrics.leader.set(i64::from(is_leader));
        if is_leader && leader.is_none() {
            log::info!(target: SCOPE, "this replica leads");
            let work = Leader::new(
                settings.taint.clone(),
                requirements.clone(),
                election.connection.clone(),
                election.metrics.clone(),
                leads.clone(),
            );
            leader = Some(work.start(tasks));
        } else if !is_leader && leader.take().is_some() {
            log::warn!(target: SCOPE, "this replica does not lead any more");
        }
        tokio::time::sleep(pause).await;
    }
}

struct Election {
    candidate: Candidate,
    connection: Arc<Connection>,
    metrics: Arc<ControllerMetrics>,
    /// When the API server answered last.
    heard: watch::Sender<Option<Instant>>,
    outage: Outage,
}

impl Election {
    /// One round; how long until the next.
    async fn round(&mut self, acts_until: &watch::Sender<Option<Instant>>) -> Duration {
        let mut pause = PAUSE;
        let round = match self.connection.get() {
            Ok(cluster) => leases::round(&cluster, &mut self.candidate).await.map_err(|failure| {
                pause = PAUSE.max(failure.retry_after().unwrap_or_default().min(LONGEST_WISH));
                failure.to_string()
            }),
            Err(error) => Err(error.to_string()),
        };
        acts_until.send_replace(self.candidate.acts_until());
        let count = |result| self.metrics.lease_writes.get_or_create(&ResultLabel { result }).inc();
        match &round {
            Ok(Round::Won) => drop(count("done")),
            Ok(Round::Conflict) => drop(count("conflict")),
            Ok(Round::Waits) => {}
            Err(_) => drop(count("failed")),
        }
        match round {
            Ok(_) => {
                self.heard.send_replace(Some(Instant::now()));
                if let Some(lasted) = self.outage.ends(Instant::now()) {
                    log::info!(target: SCOPE, seconds = lasted.as_secs(); "the Lease can be used again");
                }
            }
            Err(error) if self.outage.begins(Instant::now()) => {
                log::warn!(target: SCOPE, "cannot use Lease {LEASE_NAME}, which needs the verbs get, create and update on leases: {error}");
            }
            Err(error) => log::debug!(target: SCOPE, "still cannot use the Lease: {error}"),
        }
        pause
    }
}

/// Which pods every node needs. The API server is asked until it answers.
async fn requirements(settings: &Settings, connection: &Connection) -> anyhow::Result<Vec<Requirement>> {
    let own = &settings.identity.namespace;
    let (namespace, name) = &settings.taint.config_map;
    if name.is_empty() {
        let selector = LabelSelector::parse(AGENTS).context("the agents' labels")?;
        return Ok(vec![Requirement { namespace: own.clone(), selector }]);
    }
    let mut pauses = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
    loop {
        let path = format!("/api/v1/namespaces/{namespace}/configmaps");
        let request = Request::new(path).get(name, &GetParams::default());
        let found = match connection.get() {
            Ok(cluster) => cluster.client().json::<Value>(request, Limits::object(END_PATIENCE)).await,
            Err(error) => bail!("there is no working API client: {error}"),
        };
        match found {
            Ok(found) => {
                let read = requirement::read(&found["data"], own);
                return read.with_context(|| format!("ConfigMap {namespace}/{name}"));
            }
            Err(ApiError::NotFound(words)) if words.by_api => {
                bail!("there is no ConfigMap {namespace}/{name}, which TAINT_CONFIGMAP_NAME names");
            }
            Err(failure) => {
                log::warn!(target: SCOPE, "cannot read ConfigMap {namespace}/{name}, which needs the verb get on configmaps: {failure}");
                tokio::time::sleep(pauses.pause(failure.retry_after())).await;
            }
        }
    }
}

/// Starts the servers of health and metrics.
async fn serve(
    settings: &Settings,
    tasks: &Supervisor,
    metrics: &Arc<ControllerMetrics>,
    heard: watch::Receiver<Option<Instant>>,
) -> anyhow::Result<()> {
    if let Some((address, port)) = settings.serve.monitoring {
        match serve::listen(address, port).await {
            Ok(listener) => {
                let metrics = metrics.clone();
                serve::spawn(tasks, "metrics server", listener, move |request| {
                    let answer = show(&request, &metrics);
                    async move { answer }
                });
            }
            Err(error) => log::error!(target: SCOPE, port = port; "no metrics: cannot listen: {error}"),
        }
    }
    let (address, port) = settings.serve.health;
    let listener =
        serve::listen(address, port).await.with_context(|| format!("cannot serve health on port {port}"))?;
    let alive = tasks.clone();
    serve::spawn(tasks, "health server", listener, move |request| {
        let answer = health(&request, *heard.borrow(), &alive);
        async move { answer }
    });
    Ok(())
}

fn show(request: &hyper::Request<Incoming>, metrics: &ControllerMetrics) -> Answer {
    if request.uri().path() != "/metrics" {
        return text(StatusCode::NOT_FOUND, "there is /metrics\n");
    }
    let mut answer = text(StatusCode::OK, metrics.text());
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}

fn health(request: &hyper::Request<Incoming>, heard: Option<Instant>, tasks: &Supervisor) -> Answer {
    let is_heard = heard.is_some_and(|at| at.elapsed() < HEARD);
    match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") => serve::healthz(tasks),
        (&Method::GET | &Method::HEAD, "/readyz") if is_heard => text(StatusCode::OK, "ready\n"),
        (&Method::GET | &Method::HEAD, "/readyz") => {
            text(StatusCode::SERVICE_UNAVAILABLE, "not ready: the API server lets nobody use the Lease\n")
        }
        _ => text(StatusCode::NOT_FOUND, "there are /healthz and /readyz\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::net::Ipv4Addr;

    /// For what must come, however slow the machine.
    const LONG: Duration = Duration::from_secs(600);

    fn settings() -> Settings {
        let env = [
            ("KUBERNETES_SERVICE_HOST", "127.0.0.1"),
            ("KUBERNETES_SERVICE_PORT", "1"),
            ("POD_NAMESPACE", "istio-system"),
            ("POD_NAME", "taint-controller-x"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let (mut settings, _) = Settings::read(&settings_cli::ParsedArgs::default(), &env).expect("settings");
        settings.serve.health = (Some(Ipv4Addr::LOCALHOST.into()), 0);
        settings.serve.monitoring = Some(settings.serve.health);
        settings
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
            let settings = settings();
            let connection = Arc::new(Connection::new(&settings, Arc::default()));
            let needed = requirements(&settings, &connection).await.expect("requirements");
            let (_acts_until, leads) = watch::channel(None);
            let tasks = Supervisor::default();
            tasks.sabotage.strike(name);
            let leader = Leader::new(settings.taint, needed, connection, Arc::default(), leads);
            let _work = leader.start(&tasks);
            let dead = tokio::time::timeout(LONG, tasks.death()).await.expect("a death");
            assert_eq!(dead.name, name);
            while *tasks.sabotage.started.lock().expect("names") != BTreeSet::from(all) {
                tokio::task::yield_now().await;
            }
        }
    }
}
