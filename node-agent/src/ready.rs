//! Whether the agent is ready, and why not.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use controller_runtime::lock;

use crate::plan::Obstacle;
use crate::plugin::Refusal;

/// Why the agent is not ready.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The first pass is not done.
    #[error("starting: the first reconcile is not finished")]
    Starting,
    /// The agent ends.
    #[error("the agent is shutting down")]
    Leaving,
    /// The last pass failed.
    #[error("{0}")]
    Failed(String),
    /// A file is missing.
    #[error("{} is missing", .0.display())]
    Missing(PathBuf),
    /// A binary is not the one that was installed.
    #[error("{} is not the one that was installed", .0.display())]
    Changed(PathBuf),
    /// The installed plugin would not serve pods.
    #[error("{0}")]
    Plugin(Refusal),
    /// The runtime would not call the plugin, or with other orders.
    #[error("{0}")]
    Directory(Obstacle),
}

/// The state of the agent's loop; the node's files are read separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The first pass is not done.
    Starting,
    /// The last pass went well.
    Installed,
    /// The last pass failed.
    Failed(String),
    /// Another program undoes our changes; the agent backs off.
    Fighting {
        /// Who that may be, and what to do about it.
        who: String,
        /// When we try again.
        until: Instant,
    },
    /// The agent ends.
    Leaving,
}

/// The phase, shared by the loop and the servers.
#[derive(Debug)]
pub struct AgentState(Mutex<Phase>);

impl Default for AgentState {
    fn default() -> Self {
        Self(Mutex::new(Phase::Starting))
    }
}

impl AgentState {
    /// Changes it.
    pub fn set(&self, phase: Phase) {
        *lock(&self.0) = phase;
    }

    /// What it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        lock(&self.0).clone()
    }

    /// Whether the agent is ready, from the phase, the node's files at this moment, and the problem with the client of the API server, if any.
    ///
    /// # Errors
    /// The reasons why not, for people.
    pub fn verdict(&self, files: Result<(), Reason>, no_client: Option<String>) -> Result<(), String> {
        let no_client = no_client.map(|problem| format!("the agent has no working API client: {problem}"));
        match (self.verdict_without_client(files), no_client) {
            (verdict, None) => verdict,
            (Ok(()), Some(problem)) => Err(problem),
            (Err(reason), Some(problem)) => Err(format!("{reason}; {problem}")),
        }
    }

    fn verdict_without_client(&self, files: Result<(), Reason>) -> Result<(), String> {
        match (self.phase(), files) {
            (Phase::Starting, _) => Err(Reason::Starting.to_string()),
            (Phase::Leaving, _) => Err(Reason::Leaving.to_string()),
            (Phase::Failed(error), Ok(())) => Err(error),
            // The error explains more than its consequence.
            (Phase::Failed(error), Err(reason)) => Err(format!("{error}; {reason}")),
            (Phase::Installed | Phase::Fighting { .. }, Ok(())) => Ok(()),
            (Phase::Installed, Err(reason)) => Err(reason.to_string()),
            (Phase::Fighting { who, until }, Err(reason)) => {
                let wait = until.saturating_duration_since(Instant::now()) + Duration::from_millis(999);
                Err(format!("{reason}; {who}; next attempt in {} s", wait.as_secs()))
            }
        }
    }
}
