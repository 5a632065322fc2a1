//! Asks the node agent to enrol a pod of ambient mode, and waits until it has.

use std::{
    fmt::Display,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use cni_core::plugin_event::{ADD_PATH, AddEvent, SOCKET_NAME};
use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::UnixStream,
    time::{Instant, timeout_at},
};

use crate::wire::{CniError, Code};

/// How long the agent may take, as in the reference.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How much of the agent's text is reported, in characters.
const LONGEST_TEXT: usize = 1000;
/// How much of it is read, in bytes.
const MOST_TEXT: usize = 4 * LONGEST_TEXT;

/// Why a pod is not enrolled.
#[derive(Debug, thiserror::Error)]
pub enum NotEnrolled {
    /// Nothing listens at the socket.
    #[error("the node agent is unreachable at {socket}: {error}", socket = .socket.display())]
    Unreachable {
        /// The socket's file.
        socket: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// It did not respond in time.
    #[error("the node agent did not respond at {socket} within {patience:?}", socket = .socket.display())]
    Silent {
        /// The socket's file.
        socket: PathBuf,
        /// How long it was given.
        patience: Duration,
    },
    /// It did not answer in HTTP, or ended the connection.
    #[error("unexpected response at {socket}; is this the node agent? {what}", socket = .socket.display())]
    Garbled {
        /// The socket's file.
        socket: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// It refused, or failed.
    #[error("the node agent did not enrol the pod ({code}): {text}")]
    Refused {
        /// The HTTP status.
        code: u16,
        /// The agent's reason.
        text: String,
    },
}

/// Has the agent whose run directory this is enrol a pod. Returns at the deadline at the latest.
///
/// # Errors
/// It has not; or that is not known.
pub fn enrol(run_dir: &Path, event: &AddEvent, deadline: std::time::Instant) -> Result<(), NotEnrolled> {
    let socket = run_dir.join(SOCKET_NAME);
    let patience = PATIENCE.min(deadline.saturating_duration_since(std::time::Instant::now()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| NotEnrolled::Unreachable { socket: socket.clone(), error })?;
    runtime.block_on(post(&socket, event, patience))
}

async fn post(socket: &Path, event: &AddEvent, patience: Duration) -> Result<(), NotEnrolled> {
    let deadline = Instant::now() + patience;
    let unreachable = |error| NotEnrolled::Unreachable { socket: socket.to_owned(), error };
    let garbled =
        |what: &dyn ToString| NotEnrolled::Garbled { socket: socket.to_owned(), what: what.to_string() };
    let stream = UnixStream::connect(socket).await.map_err(unreachable)?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| garbled(&error))?;
    let body = serde_json::to_vec(event).map_err(|error| garbled(&error))?;
    let request = Request::builder()
        .method(Method::POST)
        .uri(ADD_PATH)
        .header(HOST, "unix")
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| garbled(&error))?;
    let exchange = async {
        let answer = timeout_at(deadline, sender.send_request(request)).await;
        let answer = answer.map_err(|_| NotEnrolled::Silent { socket: socket.to_owned(), patience })?;
        let answer = answer.map_err(|error| garbled(&error))?;
        match answer.status() {
            StatusCode::OK => Ok(()),
            status => Err(NotEnrolled::Refused {
                code: status.as_u16(),
                text: text(answer.into_body(), deadline).await,
            }),
        }
    };
    // The connection only moves while it is polled. If it ends first, the answer says why.
    tokio::pin!(exchange);
    tokio::select! {
        done = &mut exchange => done,
        _ = connection => exchange.await,
    }
}

/// The beginning of an answer, in one line.
async fn text(mut body: Incoming, deadline: Instant) -> String {
    let mut bytes = Vec::new();
    // The reason is worth more than its end: what does not arrive is missing.
    while bytes.len() < MOST_TEXT
        && let Ok(Some(Ok(frame))) = timeout_at(deadline, body.frame()).await
    {
        bytes.extend(frame.into_data().unwrap_or_default());
    }
    let text: String = String::from_utf8_lossy(&bytes).trim().chars().take(LONGEST_TEXT).collect();
    if text.is_empty() { "no reason given".to_owned() } else { logging::escaped(&text) }
}

impl NotEnrolled {
    fn advice(&self) -> (Code, &'static str) {
        match self {
            Self::Unreachable { .. } => (
                Code::TryAgain,
                "install-cni's pod on this node does not run, or has AMBIENT_ENABLED=false, or another run directory than cni_agent_run_dir says; the \
                 runtime tries again",
            ),
            Self::Silent { .. } => (
                Code::TryAgain,
                "the log of install-cni's pod on this node says what it waits for; the runtime tries again",
            ),
            Self::Garbled { .. } => (
                Code::TryAgain,
                "restart install-cni's pod on this node if this goes on; the runtime tries again",
            ),
            Self::Refused { .. } => (
                Code::NotEnrolled,
                "the log of install-cni's pod on this node says more; without enrolment the pod's traffic would bypass the mesh, so it is not \
                 started. The runtime tries again",
            ),
        }
    }

    /// As it is reported about a pod.
    #[must_use]
    pub fn of(&self, pod: &dyn Display) -> CniError {
        let (code, details) = self.advice();
        CniError::new(code, format!("pod {pod} is in ambient mode: {self}")).with_details(details)
    }
}
