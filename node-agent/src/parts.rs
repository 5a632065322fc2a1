//! What the parts of the agent that act on pods work with.

use std::sync::Arc;

use crate::cluster::ApiHandle;
use crate::cluster::runtime_classes::RuntimeHandlers;
use crate::install::installer::Installer;
use crate::metrics::Metrics;

/// What these parts share: all clones are one.
#[derive(Clone)]
pub struct AgentParts {
    /// The API server.
    pub connection: Arc<ApiHandle>,
    /// The node's files.
    pub installer: Arc<Installer>,
    /// What the runtime classes of pods are.
    pub handlers: Arc<RuntimeHandlers>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
}
