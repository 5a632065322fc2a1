//! Asks the node agent: for a pod that is being created, and to enrol one of ambient mode.

use std::{
    fmt::Display,
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use agent_socket::{AgentRequest, RequestFailure};
use cni_core::plugin_event::{ADD_PATH, AddEvent, GivenPod, POD_PATH, PodRequest, SOCKET_NAME};
use serde::Serialize;

use crate::wire::{CniError, Code};

/// The status of what was done.
const OK: u16 = 200;
/// How long the agent may take, as in the reference.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How long it may take for a pod at most, and a quarter of the time that is left: the API server is asked after that.
const LONGEST_SHARE: Duration = Duration::from_secs(1);
/// How much of the agent's text is reported, in characters.
const LONGEST_TEXT: usize = 1000;
/// How much of it is read, in bytes.
const MOST_TEXT: usize = 4 * LONGEST_TEXT;
/// The longest pod, in bytes: an API server stores none that is longer.
const MOST_POD: usize = 2 << 20;

/// Why the agent did not do as asked.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
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
    #[error("the node agent did not {what} ({code}): {text}")]
    Refused {
        /// What was asked.
        what: &'static str,
        /// The HTTP status.
        code: u16,
        /// The agent's reason.
        text: String,
    },
}

/// Asks the agent whose run directory this is for a pod. Returns after its share of the time at the latest.
///
/// # Errors
/// It has not got it; or that is not known.
pub fn pod(run_dir: &Path, wanted: &PodRequest, deadline: Instant) -> Result<GivenPod, AgentError> {
    let left = deadline.saturating_duration_since(Instant::now());
    let question = Question { path: POD_PATH, what: "give the pod", most: MOST_POD };
    let text = ask(run_dir, &question, wanted, LONGEST_SHARE.min(left / 4))?;
    serde_json::from_slice(&text)
        .map_err(|error| AgentError::Garbled { socket: run_dir.join(SOCKET_NAME), what: error.to_string() })
}

/// Has the agent whose run directory this is enrol a pod. Returns at the deadline at the latest.
///
/// # Errors
/// It has not; or that is not known.
pub fn enrol(run_dir: &Path, event: &AddEvent, deadline: Instant) -> Result<(), AgentError> {
    let patience = PATIENCE.min(deadline.saturating_duration_since(Instant::now()));
    let question = Question { path: ADD_PATH, what: "enrol the pod", most: 0 };
    ask(run_dir, &question, event, patience).map(drop)
}

/// What is asked.
struct Question {
    path: &'static str,
    /// What the agent is to do, for a refusal.
    what: &'static str,
    /// How much is read of the answer that it has done so, in bytes.
    most: usize,
}

/// Posts a question, and returns the body of the answer: what arrives of it in time, because a reason is worth more than its end, and a pod that is
/// cut off is not one.
fn ask(
    run_dir: &Path,
    question: &Question,
    about: &impl Serialize,
    patience: Duration,
) -> Result<Vec<u8>, AgentError> {
    let socket = run_dir.join(SOCKET_NAME);
    let garbled = |what: String| AgentError::Garbled { socket: socket.clone(), what };
    let body = serde_json::to_vec(about).map_err(|error| garbled(error.to_string()))?;
    let request = AgentRequest { method: "POST", path: question.path, body: &body };
    let most = |status| if status == OK { question.most } else { MOST_TEXT };
    match request.send(&socket, patience, most) {
        Ok(answer) if answer.status == OK => Ok(answer.body),
        Ok(answer) => {
            Err(AgentError::Refused { what: question.what, code: answer.status, text: text(&answer.body) })
        }
        Err(RequestFailure::Unreachable(error)) => Err(AgentError::Unreachable { socket, error }),
        Err(RequestFailure::Silent) => Err(AgentError::Silent { socket, patience }),
        Err(RequestFailure::Garbled(what)) => Err(garbled(what)),
    }
}

/// The beginning of a text, in one line.
fn text(bytes: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(bytes).trim().chars().take(LONGEST_TEXT).collect();
    if text.is_empty() { "no reason given".to_owned() } else { logging::escaped(&text) }
}

impl AgentError {
    /// Whether this says no more than that no agent runs that gives pods.
    #[must_use]
    pub const fn is_usual(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Refused { code: 404, .. })
    }

    /// About enrolment.
    fn advice(&self) -> (Code, &'static str) {
        match self {
            Self::Unreachable { .. } => (
                Code::TryAgain,
                "install-cni's pod on this node does not run, or has AMBIENT_ENABLED=false (chart: ambient.enabled), or another run directory than \
                 cni_agent_run_dir says; the runtime tries again",
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
