//! HTTP servers of a controller: listening, connections within limits, plain responses.

mod slots;

use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::SCOPE;
use crate::metrics::exposition::ScrapeFormat;
use crate::supervisor::Supervisor;
use http_body_util::{BodyExt, Collected, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderMap, HeaderValue, VARY};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use slots::Slots;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// Connections of one server at a time. The one that has been idle for longest makes room for another.
const MOST_CONNECTIONS: usize = 32;
/// How long a request's head may take, also the next one on the same connection.
const HEAD_PATIENCE: Duration = Duration::from_secs(5);
/// How long a request's body may take.
const BODY_PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection may last.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(30);

/// An address, none for every address of the machine, and a port.
pub type Address = (Option<IpAddr>, u16);

/// An answer.
pub type HttpResponse = Response<Full<Bytes>>;

/// Answers requests.
pub type Handler =
    Arc<dyn Fn(Request<Incoming>) -> Pin<Box<dyn Future<Output = HttpResponse> + Send>> + Send + Sync>;

/// Answers requests by what is known to all of them.
pub fn handler<S, F>(shared: &Arc<S>, answer: fn(Arc<S>, Request<Incoming>) -> F) -> Handler
where
    S: Send + Sync + 'static,
    F: Future<Output = HttpResponse> + Send + 'static,
{
    let shared = shared.clone();
    Arc::new(move |request| Box::pin(answer(shared.clone(), request)))
}

/// Why a request's body cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// It did not arrive in time.
    #[error("the body took too long")]
    Slow,
    /// It is too large, or its connection broke.
    #[error("the body cannot be read: {0}")]
    Unreadable(Box<dyn Error + Send + Sync>),
}

/// The body of a request, of at most so many bytes.
///
/// # Errors
/// Why it cannot be used.
pub async fn body(request: Request<Incoming>, most: usize) -> Result<Bytes, BodyError> {
    let body = Limited::new(request.into_body(), most).collect();
    let body = tokio::time::timeout(BODY_PATIENCE, body).await.map_err(|_| BodyError::Slow)?;
    body.map(Collected::to_bytes).map_err(BodyError::Unreadable)
}

/// Whether the process works: whether none of its tasks has ended unexpectedly.
#[must_use]
pub fn healthz(tasks: &Supervisor) -> HttpResponse {
    match tasks.dead() {
        None => text(StatusCode::OK, "ok\n"),
        Some(dead) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{dead}\n")),
    }
}

/// The metrics of a registry, in the format that a request with these headers prefers.
#[must_use]
pub fn metrics(registry: &Registry, headers: &HeaderMap) -> HttpResponse {
    let format = ScrapeFormat::wanted(headers);
    let mut answer = text(StatusCode::OK, format.write(registry));
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
    answer.headers_mut().insert(VARY, HeaderValue::from_static("Accept"));
    answer
}

/// A plain answer.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> HttpResponse {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

/// A response to a method that is not supported.
#[must_use]
pub fn only(methods: &'static str) -> HttpResponse {
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

/// Starts a server on an address.
///
/// # Errors
/// The port is taken, and stays so.
pub async fn start(
    tasks: &Supervisor,
    name: &'static str,
    (address, port): Address,
    answer: Handler,
) -> io::Result<()> {
    spawn(tasks, name, listen(address, port).await?, answer);
    Ok(())
}

/// Starts a server that the process can do without: a port that is taken is logged.
pub async fn start_optional(tasks: &Supervisor, name: &'static str, address: Address, answer: Handler) {
    if let Err(error) = start(tasks, name, address, answer).await {
        log::error!(target: SCOPE, port = address.1; "no {name}: cannot listen: {error}");
    }
}

/// Something that accepts connections.
pub trait Acceptor {
    /// A connection.
    type Stream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static;
    /// The next connection.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Acceptor for TcpListener {
    type Stream = TcpStream;
    async fn next(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

/// Answers requests for ever. Silent clients, however many, do not block others.
pub async fn connections(listener: impl Acceptor, answer: Handler) -> Infallible {
    answer_within(HEAD_PATIENCE, listener, answer).await
}

/// `patience`: how long a request's head may take.
async fn answer_within(patience: Duration, listener: impl Acceptor, answer: Handler) -> Infallible {
    let slots = Slots::new(MOST_CONNECTIONS);
    loop {
        let stream = match listener.next().await {
            Ok(stream) => stream,
            Err(error) => {
                // Out of file descriptors, most likely; asking again at once would only burn the processor.
                log::warn!(target: SCOPE, "cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let slot = slots.take().await;
        let (answer, number, own) = (answer.clone(), slot.number, slots.clone());
        #[expect(clippy::disallowed_methods, reason = "a connection ends soon; its client notices")]
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
                .header_read_timeout(patience)
                .max_buf_size(16 * 1024)
                .serve_connection(TokioIo::new(stream), service);
            // Errors of a client do not matter here.
            let _ = tokio::time::timeout(CONNECTION_PATIENCE, connection).await;
            drop(slot);
        });
        slots.served_by(number, task.abort_handle());
    }
}

/// Starts a server as a supervised task.
pub fn spawn(
    tasks: &Supervisor,
    name: &'static str,
    listener: impl Acceptor + Send + Sync + 'static,
    answer: Handler,
) -> AbortHandle {
    tasks.spawn(name, async move { match connections(listener, answer).await {} })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(240);

    /// What a client gets from a server with this patience.
    async fn with_server<T>(patience: Duration, client: impl AsyncFnOnce(SocketAddr) -> io::Result<T>) -> T {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let answer = handler(&Arc::new(()), |_, _| async { text(StatusCode::OK, "ok") });
        tokio::select! {
            got = tokio::time::timeout(LONG, client(address)) => got.expect("in time").expect("gets it"),
            never = answer_within(patience, listener, answer) => match never {},
        }
    }

    /// Waits until something arrives, or the connection ends: with nothing.
    async fn receive(stream: &TcpStream) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; 1024];
        loop {
            stream.readable().await?;
            match stream.try_read(&mut bytes) {
                Ok(count) => {
                    bytes.truncate(count);
                    return Ok(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn of_silent_clients_only_the_oldest_make_room() {
        const SILENT: usize = 300;
        const REQUESTS: usize = 8;
        with_server(LONG, async |address| {
            let mut silent = Vec::new();
            for _ in 0..SILENT {
                silent.push(TcpStream::connect(address).await?);
            }
            for _ in 0..REQUESTS {
                let stream = TcpStream::connect(address).await?;
                stream.writable().await?;
                stream.try_write(b"GET / HTTP/1.0\r\n\r\n")?;
                assert!(receive(&stream).await?.starts_with(b"HTTP/1.0 200 OK"));
            }
            let (closed, newer) = silent.split_at(SILENT - MOST_CONNECTIONS);
            for stream in closed {
                assert_eq!(receive(stream).await?, b"");
            }
            for stream in &newer[REQUESTS..] {
                let read = stream.try_read(&mut [0]).map_err(|error| error.kind());
                assert_eq!(read, Err(io::ErrorKind::WouldBlock));
            }
            Ok(())
        })
        .await;
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_client_that_stays_silent_is_hung_up_on() {
        let end =
            with_server(Duration::from_millis(1), async |to| receive(&TcpStream::connect(to).await?).await);
        assert_eq!(end.await, b"");
    }
}
