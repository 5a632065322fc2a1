//! What the agent serves: health, metrics, run-time control, the log socket.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use agent_runtime::metrics::exposition::ScrapeFormat;
use agent_runtime::metrics::gauged;
use agent_runtime::serve::{self, BodyError, HttpResponse, handler, healthz, only, text};
use agent_runtime::supervisor::Supervisor;
use agent_runtime::{SCOPE, lock};
use anyhow::Context as _;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use prometheus_client::registry::Registry;
use reasons::EventReason;

use crate::ambient::state::AmbientState;
use crate::cluster::events::EventPublisher;
use crate::cluster::{EventMessage, warning};
use crate::install::plugin_health::PluginHealth;
use crate::install::ready::{AgentState, Phase, Reason, Transitions};
use crate::parts::AgentParts;
use crate::pods::drift::NodeSummary;
use crate::pods::held_pods::HeldPods;
use crate::serve::log_socket;
use crate::serve::notes;
use crate::serve::plugin_socket::PluginSocket;
use crate::settings::Settings;

/// The largest body of run-time control.
const LARGEST_CONTROL: usize = 4096;

/// What the servers show.
pub struct AgentContext {
    /// What others work with as well.
    pub parts: AgentParts,
    /// The loop's phase.
    pub state: Arc<AgentState>,
    /// What the next ADD would meet.
    pub plugin: Arc<PluginHealth>,
    /// What is scraped.
    pub registry: Registry,
    /// The state of the node's pods.
    pub summary: Arc<NodeSummary>,
    /// The node's pods, where a part of the agent follows them.
    pub held: Arc<HeldPods>,
    /// The node's pods in ambient mode, if it is on.
    pub ambient: Option<Arc<AmbientState>>,
    /// Sends events about the agent's own pod.
    pub events: EventPublisher,
    /// Which of its changes of readiness were reported.
    pub transitions: Mutex<Transitions>,
    /// Logging, to be changed at run time; none in tests.
    pub logs: Option<logging::LogHandle>,
    /// Without one of these tasks the agent is neither healthy nor ready.
    pub tasks: Supervisor,
}

impl AgentContext {
    /// Whether the agent is ready at this moment, looked up in the node's files. Sends an event if that changed: the kubelet's probe asks often enough.
    ///
    /// # Errors
    /// Why it is not, for people.
    pub async fn verdict(&self) -> Result<(), String> {
        // Before the judging, which takes a while: of an agent that was starting then, nothing is a fault yet.
        let is_starting = self.state.phase() == Phase::Starting || !self.plugin.was_asked();
        let verdict = self.judge().await;
        // Neither a start nor an end is a fault.
        let is_passing = is_starting || self.state.phase() == Phase::Leaving;
        if !is_passing && lock(&self.transitions).note(verdict.is_ok(), Instant::now()) {
            self.events.send(self.event_about(&verdict));
        }
        verdict
    }

    fn event_about(&self, verdict: &Result<(), String>) -> EventMessage {
        let about = self.parts.connection.own_pod();
        match verdict {
            Ok(()) => {
                let message = "ready again: pods of the mesh that start here are redirected".to_owned();
                EventMessage { kind: "Normal", ..warning(about, EventReason::AgentReady, message) }
            }
            Err(reason) => warning(about, EventReason::AgentNotReady, format!("not ready: {reason}")),
        }
    }

    async fn judge(&self) -> Result<(), String> {
        if let Some(dead) = self.tasks.dead() {
            return Err(dead.to_string());
        }
        let installer = self.parts.installer.clone();
        let files = tokio::task::spawn_blocking(move || installer.check()).await;
        let files = files.unwrap_or_else(|error| Err(Reason::Failed(format!("the check panicked: {error}"))));
        self.state.verdict(files, self.parts.connection.problem())?;
        self.plugin.verdict(Instant::now())?;
        self.ambient.as_ref().map_or(Ok(()), |ambient| ambient.verdict())
    }

    /// The pods that run, a line for each data plane; those that are held for plugins; and what alerts are about.
    fn words(&self) -> String {
        let ambient = self.ambient.as_ref().map(|ambient| ambient.words() + "\n");
        let notes = notes::of_metrics(&ScrapeFormat::Text.write(&self.registry));
        let (pods, held) = (self.summary.words(Instant::now()), self.held_words());
        format!("{pods}\n{}{held}\n{notes}", ambient.unwrap_or_default())
    }

    fn held_words(&self) -> String {
        let watch = self.held.watch().silence().map_or_else(
            || "which no watch keeps current".to_owned(),
            |silence| format!("from a watch that last brought something {} s ago", silence.as_secs()),
        );
        format!("held for plugins: {} pods, {watch}", self.held.count())
    }

    fn count_held(&self) {
        let age = self.held.watch().silence().and_then(|silence| i64::try_from(silence.as_secs()).ok());
        self.parts.metrics.held_pods.set(gauged(self.held.count()));
        self.parts.metrics.held_pods_age.set(age.unwrap_or(-1));
    }

    /// Port 8000.
    pub async fn health(self: Arc<Self>, request: Request<Incoming>) -> HttpResponse {
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/healthz") => healthz(&self.tasks),
            (&Method::GET | &Method::HEAD, "/readyz") => {
                let more = if is_verbose(&request) { self.words() } else { String::new() };
                match self.verdict().await {
                    Ok(()) => text(StatusCode::OK, format!("ready\n{more}")),
                    Err(reason) => {
                        text(StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n{more}"))
                    }
                }
            }
            (_, "/healthz" | "/readyz") => only("GET"),
            _ => text(StatusCode::NOT_FOUND, "not found; use /healthz or /readyz\n"),
        }
    }

    /// Port 15014.
    pub async fn metrics(self: Arc<Self>, request: Request<Incoming>) -> HttpResponse {
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/metrics") => {
                self.summary.count(Instant::now());
                self.count_held();
                self.parts.metrics.ready.set(i64::from(self.verdict().await.is_ok()));
                serve::metrics(&self.registry, request.headers())
            }
            (_, "/metrics") => only("GET"),
            _ => text(StatusCode::NOT_FOUND, "not found; use /metrics\n"),
        }
    }

    /// Port 9876.
    pub async fn control(self: Arc<Self>, request: Request<Incoming>) -> HttpResponse {
        let Some(logs) = &self.logs else {
            return text(StatusCode::NOT_FOUND, "logging is not initialized\n");
        };
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/logging") => text(StatusCode::OK, format!("{}\n", levels(logs))),
            (&Method::PUT, "/logging") => {
                let body = match serve::body(request, LARGEST_CONTROL).await {
                    Ok(body) => body,
                    Err(BodyError::Slow) => return text(StatusCode::REQUEST_TIMEOUT, "too slow\n"),
                    Err(BodyError::Unreadable(_)) => {
                        return text(StatusCode::PAYLOAD_TOO_LARGE, "too long\n");
                    }
                };
                match String::from_utf8_lossy(&body).trim().parse() {
                    Ok(wanted) => {
                        logs.set_levels(cni_core::logs::quiet(wanted));
                        log::info!(target: SCOPE, levels = levels(logs); "log levels changed");
                        text(StatusCode::OK, format!("{}\n", levels(logs)))
                    }
                    Err(error) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
                }
            }
            (_, "/logging") => only("GET, PUT"),
            _ => text(StatusCode::NOT_FOUND, "not found; use /logging\n"),
        }
    }
}

/// Starts the servers. Only health and the log socket are necessary.
///
/// # Errors
/// One of these two cannot be opened.
pub async fn start(settings: &Settings, served: &Arc<AgentContext>) -> anyhow::Result<PluginSocket> {
    let tasks = &served.tasks;
    if let Some(address) = settings.serve.monitoring {
        let answer = handler(served, AgentContext::metrics);
        serve::start_optional(tasks, "metrics server", address, answer).await;
    }
    if let Some((address, port)) = settings.serve.control {
        let answer = handler(served, AgentContext::control);
        serve::start_optional(tasks, "run-time control", (Some(address), port), answer).await;
    }
    let (plugin, logs) = (served.plugin.clone(), served.logs.clone());
    let log_server = log_socket::start(&settings.paths.run, &served.parts, plugin, logs, tasks.clone())?;
    let started =
        serve::start(tasks, "health server", settings.serve.health, handler(served, AgentContext::health));
    started.await.with_context(|| format!("cannot serve health on port {}", settings.serve.health.1))?;
    Ok(log_server)
}

/// Whether the request includes the pods that run: `/readyz?verbose`. Readiness is about new pods.
fn is_verbose(request: &Request<Incoming>) -> bool {
    let parameters = request.uri().query().into_iter().flat_map(|query| query.split('&'));
    parameters.filter_map(|parameter| parameter.split('=').next()).any(|name| name == "verbose")
}

/// The levels of the agent's scopes.
fn levels(logs: &logging::LogHandle) -> String {
    let levels = logs.levels();
    let scopes = [logging::DEFAULT_SCOPE, "cni-agent", "cni-plugin"];
    scopes.map(|scope| format!("{scope}:{}", levels.of(scope).name())).join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::disk::Real;
    use crate::install::installer::Installer;
    use crate::install::plugin::PluginProgram;
    use crate::metrics::Metrics;
    use crate::settings::Settings;
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, SocketAddr};

    async fn get(address: SocketAddr, path: &'static str) -> String {
        let exchange = move || {
            let mut stream = std::net::TcpStream::connect(address)?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).map(|_| answer)
        };
        tokio::task::spawn_blocking(exchange).await.expect("asks").expect("is answered")
    }

    /// An agent that has installed nothing yet.
    fn served(tasks: &Supervisor) -> Arc<AgentContext> {
        let env = [("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", "1")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let (settings, _) = Settings::read(&settings_cli::ParsedArgs::default(), &env).expect("settings");
        let (metrics, registry) = Metrics::new();
        let connection = Arc::new(crate::cluster::connection(&settings));
        Arc::new(AgentContext {
            events: EventPublisher::start("agent events", connection.clone(), metrics.clone(), tasks),
            transitions: Mutex::default(),
            plugin: Arc::default(),
            state: Arc::default(),
            summary: Arc::new(NodeSummary::new(metrics.clone())),
            parts: AgentParts {
                connection,
                installer: Arc::new(Installer::new(Arc::new(Real), Arc::new(PluginProgram), settings)),
                handlers: Arc::default(),
                metrics,
            },
            registry,
            held: Arc::default(),
            ambient: None,
            logs: None,
            tasks: tasks.clone(),
        })
    }

    #[test]
    fn an_agent_that_starts_while_it_is_judged_was_not_unready() {
        let one_reader =
            tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
        one_reader.expect("a runtime").block_on(async {
            let served = served(&Supervisor::default());
            // The thread that reads files is busy until this is dropped.
            let (hold, held) = std::sync::mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || held.recv());
            let judged = served.verdict();
            tokio::pin!(judged);
            tokio::select! {
                biased;
                _ = &mut judged => panic!("no thread was free to read files"),
                () = std::future::ready(()) => {}
            }
            served.state.set(Phase::Installed);
            served.plugin.note_served();
            drop(hold);
            assert!(judged.await.is_err(), "the files were those of before");
            assert!(
                !lock(&served.transitions).note(true, Instant::now()),
                "an event said that it was not ready"
            );
            // The same files are a fault of an agent that has started.
            assert!(served.verdict().await.is_err());
            assert!(lock(&served.transitions).note(true, Instant::now()), "no event");
            assert!(busy.await.expect("no panic").is_err(), "it was held to the end");
        });
    }

    #[tokio::test]
    async fn without_one_of_its_tasks_an_agent_is_neither_healthy_nor_ready() {
        let tasks = Supervisor::default();
        let served = served(&tasks);
        let listener = serve::listen(Some(Ipv4Addr::LOCALHOST.into()), 0).await.expect("listens");
        let address = listener.local_addr().expect("an address");
        serve::spawn(&tasks, "health server", listener, handler(&served, AgentContext::health));
        let healthy = get(address, "/healthz").await;
        assert!(healthy.starts_with("HTTP/1.1 200 ") && healthy.ends_with("\r\n\r\nok\n"), "{healthy}");

        tasks.spawn("healer", async { panic!("on purpose") });
        let dead = tasks.death().await.to_string();
        for path in ["/healthz", "/readyz"] {
            let answer = get(address, path).await;
            assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains(&dead), "{path}: {answer}");
        }
    }
}
