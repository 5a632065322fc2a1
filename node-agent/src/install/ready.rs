//! Whether the agent is ready, and why not.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use agent_runtime::lock;

use crate::install::conflist_edits::EntryObstacle;
use crate::install::plugin::PluginRefusal;

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
    Plugin(PluginRefusal),
    /// The runtime would not call the plugin, or with other orders.
    #[error("{0}")]
    Directory(EntryObstacle),
}

/// The state of the agent's loop; the node's files are read separately.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Phase {
    /// The first pass is not done.
    #[default]
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

/// The least time between two events that the agent became unready.
const EVENT_PAUSE: Duration = Duration::from_secs(60);

/// Which changes of readiness are worth an event: those that last, and each once.
#[derive(Debug, Default)]
pub struct Transitions {
    is_unready: bool,
    last: Option<Instant>,
}

impl Transitions {
    /// Whether to report what the agent is now. That it is ready is worth an event only after one that it was not.
    pub fn note(&mut self, is_ready: bool, now: Instant) -> bool {
        let is_early = self.last.is_some_and(|last| now.duration_since(last) < EVENT_PAUSE);
        let is_news = self.is_unready == is_ready && (is_ready || !is_early);
        if is_news {
            self.is_unready = !is_ready;
            if !is_ready {
                self.last = Some(now);
            }
        }
        is_news
    }
}

/// The phase, shared by the loop and the servers.
#[derive(Debug, Default)]
pub struct AgentState(Mutex<Phase>);

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_readiness_are_reported_once_and_not_at_every_flap() {
        let (mut transitions, start) = (Transitions::default(), Instant::now());
        for (second, is_ready, is_reported) in [
            (0, true, false),
            (5, false, true),
            (10, false, false),
            (15, true, true),
            (20, true, false),
            (25, false, false),
            (30, true, false),
            (35, false, false),
            (65, false, true),
            (70, true, true),
        ] {
            let now = start + Duration::from_secs(second);
            assert_eq!(transitions.note(is_ready, now), is_reported, "after {second} s");
        }
    }
}
