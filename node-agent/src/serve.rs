//! The agent's HTTP servers: health, metrics, run-time control.

mod slots;
mod start;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::install::Installer;
use crate::metrics::Metrics;
use crate::ready::{Reason, State};
use crate::supervisor::Supervisor;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use slots::Slots;

pub use start::{spawn, start};
use tokio::net::{TcpListener, TcpStream};

/// Connections of one server at a time. The one that has been idle for longest makes room for another.
const MOST_CONNECTIONS: usize = 32;
/// How long a request's head may take, also the next one on the same connection.
const HEAD_PATIENCE: Duration = Duration::from_secs(5);
/// How long a request's body may take.
pub const BODY_PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection may last.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(30);
/// The largest body of run-time control.
const LARGEST_CONTROL: usize = 4096;

/// An answer.
pub type Answer = Response<Full<Bytes>>;

/// What the servers show.
pub struct Served {
    /// The node's files.
    pub installer: Arc<Installer>,
    /// The loop's phase.
    pub state: Arc<State>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Logging, to be changed at run time; none in tests.
    pub logs: Option<logging::Handle>,
    /// Without one of these tasks the agent is neither healthy nor ready.
    pub tasks: Supervisor,
}

impl Served {
    /// Whether the agent is ready at this moment, looked up in the node's files.
    ///
    /// # Errors
    /// Why it is not, for people.
    pub async fn verdict(&self) -> Result<(), String> {
        if let Some(dead) = self.tasks.dead() {
            return Err(dead.to_string());
        }
        let installer = self.installer.clone();
        let files = tokio::task::spawn_blocking(move || installer.check()).await;
        let files = files.unwrap_or_else(|error| Err(Reason::Failed(format!("the check panicked: {error}"))));
        self.state.verdict(files)
    }

    /// Port 8000.
    pub async fn health(&self, request: Request<Incoming>) -> Answer {
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/healthz") => healthz(&self.tasks),
            (&Method::GET | &Method::HEAD, "/readyz") => {
                let more =
                    if is_verbose(&request) { self.metrics.whole_node.words() + "\n" } else { String::new() };
                match self.verdict().await {
                    Ok(()) => text(StatusCode::OK, format!("ready\n{more}")),
                    Err(reason) => {
                        text(StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n{more}"))
                    }
                }
            }
            (_, "/healthz" | "/readyz") => only("GET"),
            _ => text(StatusCode::NOT_FOUND, "there are /healthz and /readyz\n"),
        }
    }

    /// Port 15014.
    pub async fn metrics(&self, request: Request<Incoming>) -> Answer {
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/metrics") => {
                let is_ready = self.verdict().await.is_ok();
                let mut answer = text(StatusCode::OK, self.metrics.text(is_ready));
                let kind =
                    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
                answer.headers_mut().insert(CONTENT_TYPE, kind);
                answer
            }
            (_, "/metrics") => only("GET"),
            _ => text(StatusCode::NOT_FOUND, "there is /metrics\n"),
        }
    }

    /// Port 9876.
    pub async fn control(&self, request: Request<Incoming>) -> Answer {
        let Some(logs) = &self.logs else { return text(StatusCode::NOT_FOUND, "there are no logs\n") };
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/logging") => text(StatusCode::OK, format!("{}\n", levels(logs))),
            (&Method::PUT, "/logging") => {
                let body = Limited::new(request.into_body(), LARGEST_CONTROL).collect();
                let Ok(body) = tokio::time::timeout(BODY_PATIENCE, body).await else {
                    return text(StatusCode::REQUEST_TIMEOUT, "too slow\n");
                };
                let Ok(body) = body else { return text(StatusCode::PAYLOAD_TOO_LARGE, "too long\n") };
                let wanted = String::from_utf8_lossy(&body.to_bytes()).trim().parse();
                match wanted {
                    Ok(wanted) => {
                        logs.set_levels(cni_core::logs::quiet(wanted));
                        log::info!(target: "cni-agent", levels = levels(logs); "log levels changed");
                        text(StatusCode::OK, format!("{}\n", levels(logs)))
                    }
                    Err(error) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
                }
            }
            (_, "/logging") => only("GET, PUT"),
            _ => text(StatusCode::NOT_FOUND, "there is /logging\n"),
        }
    }
}

/// Whether the process works: whether none of its tasks has ended unexpectedly.
pub fn healthz(tasks: &Supervisor) -> Answer {
    match tasks.dead() {
        None => text(StatusCode::OK, "ok\n"),
        Some(dead) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{dead}\n")),
    }
}

/// Whether somebody wants to know about the pods that run, too: `/readyz?verbose`. Readiness is about those to come.
fn is_verbose(request: &Request<Incoming>) -> bool {
    let parameters = request.uri().query().into_iter().flat_map(|query| query.split('&'));
    parameters.filter_map(|parameter| parameter.split('=').next()).any(|name| name == "verbose")
}

/// The levels of the agent's scopes.
fn levels(logs: &logging::Handle) -> String {
    let levels = logs.levels();
    let scopes = [logging::DEFAULT_SCOPE, "cni-agent", "cni-plugin"];
    scopes.map(|scope| format!("{scope}:{}", levels.of(scope).name())).join(",")
}

/// A plain answer.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

fn only(methods: &'static str) -> Answer {
    let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, format!("only {methods}\n"));
    answer.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    answer
}

/// How long a port may be taken: an agent that is being replaced holds it for a moment longer.
const HANDOVER: Duration = Duration::from_secs(3);

/// Listens on a port of an address, or of every address, of both families where the node has both.
///
/// # Errors
/// When the port is taken, and stays so.
pub async fn listen(address: Option<IpAddr>, port: u16) -> io::Result<TcpListener> {
    let deadline = Instant::now() + HANDOVER;
    loop {
        match try_listen(address, port).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            result => return result,
        }
    }
}

async fn try_listen(address: Option<IpAddr>, port: u16) -> io::Result<TcpListener> {
    match address {
        Some(address) => TcpListener::bind(SocketAddr::new(address, port)).await,
        None => match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
            Ok(listener) => Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(error),
            Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await,
        },
    }
}

/// Something that accepts connections.
pub trait Listener {
    /// A connection.
    type Stream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static;
    /// The next connection.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;
    async fn next(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

/// Answers requests for ever. However many clients say nothing, whoever asks is answered.
pub async fn connections<L, A, F>(listener: L, answer: A) -> Infallible
where
    L: Listener,
    A: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let slots = Slots::new(MOST_CONNECTIONS);
    loop {
        let stream = match listener.next().await {
            Ok(stream) => stream,
            Err(error) => {
                // Out of file descriptors, most likely; asking again at once would only burn the processor.
                log::warn!(target: "cni-agent", "cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let slot = slots.take().await;
        let (answer, number, own) = (answer.clone(), slot.number(), slots.clone());
        #[expect(clippy::disallowed_methods, reason = "a connection is over soon; who has made it notices")]
        let task = tokio::spawn(async move {
            let service = service_fn(move |request| {
                let (answer, slots) = (answer(request), own.clone());
                async move {
                    slots.begin(number);
                    let answer = answer.await;
                    slots.end(number);
                    Ok::<_, Infallible>(answer)
                }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_PATIENCE)
                .max_buf_size(16 * 1024)
                .serve_connection(TokioIo::new(stream), service);
            // What a client does wrong is its own affair.
            let _ = tokio::time::timeout(CONNECTION_PATIENCE, connection).await;
            drop(slot);
        });
        slots.served_by(number, task.abort_handle());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Real;
    use crate::plugin::Program;
    use crate::settings::Settings;
    use std::io::{Read as _, Write as _};

    async fn get(address: SocketAddr, path: &'static str) -> String {
        let exchange = move || {
            let mut stream = std::net::TcpStream::connect(address)?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).map(|_| answer)
        };
        tokio::task::spawn_blocking(exchange).await.expect("asks").expect("is answered")
    }

    #[tokio::test]
    async fn without_one_of_its_tasks_an_agent_is_neither_healthy_nor_ready() {
        let env = [("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", "1")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let (settings, _) = Settings::read(&settings_cli::ParsedArgs::default(), &env).expect("settings");
        let tasks = Supervisor::default();
        let served = Arc::new(Served {
            installer: Arc::new(Installer::new(Arc::new(Real), Arc::new(Program), settings)),
            state: Arc::default(),
            metrics: Arc::new(Metrics::new()),
            logs: None,
            tasks: tasks.clone(),
        });
        let listener = listen(Some(Ipv4Addr::LOCALHOST.into()), 0).await.expect("listens");
        let address = listener.local_addr().expect("an address");
        spawn(&tasks, "health server", listener, move |request| {
            let served = served.clone();
            async move { served.health(request).await }
        });
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
