//! An agent as far as the API server meets it.

use std::sync::Arc;

use agent_runtime::supervisor::{OwnedTask, Supervisor};
use tokio::sync::watch;

use super::{renewer, served, start_lookup, start_work};
use crate::settings::{DriftSettings, Settings};

/// The tasks by which an agent asks the API server, without its loop, the node's files, its servers and ambient mode: with many of them
/// in one process, tests measure what a large cluster costs. They end when this is dropped.
#[derive(Debug)]
pub struct ApiTasks {
    _work: Vec<OwnedTask>,
    /// Without it the tasks would take their settings for gone.
    _drift: watch::Sender<DriftSettings>,
}

impl ApiTasks {
    /// Starts them. Needs a tokio run-time.
    #[must_use]
    pub fn start(settings: &Settings) -> Self {
        let (served, token, _) = served(settings, None, Supervisor::default());
        let drift = watch::Sender::new(settings.drift.clone());
        let renewer = Arc::new(renewer(settings, &token, &served));
        start_lookup(&served);
        let work = start_work(settings, &drift, &served, (token, renewer));
        Self { _work: work.into_iter().map(OwnedTask).collect(), _drift: drift }
    }
}
