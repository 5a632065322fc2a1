//! Where the plugin's log lines go: JSON to standard error, to the agent, to a file in the run directory.
//!
//! Standard output belongs to the runtime. The kubelet's journal gets standard error, so the lines are found there as well.

use logging::{AgentSocket, Config, Format, Handle, Level, Levels, RollingFile, Target};
use std::path::Path;

pub use cni_core::logs::{SCOPE, levels};

/// The log file in the run directory.
pub const FILE_NAME: &str = "istio-cni.log";

/// Starts logging to standard error. `None` if the process already logs, as in tests.
#[must_use]
pub fn start() -> Option<Handle> {
    let config = Config {
        levels: levels(Level::Info),
        format: Format::Json,
        targets: vec![Target::Stderr],
        caller: false,
    };
    logging::init(config).ok()
}

/// Continues as the configuration says: its level, the agent's socket, the file. Skips missing ones.
pub fn configure(handle: &Handle, levels: Levels, run_dir: &Path) {
    handle.set_levels(levels);
    if let Some(agent) = AgentSocket::find(run_dir.join(logging::SOCKET_NAME)) {
        handle.add_sink(Box::new(agent));
    }
    handle.add_sink(Box::new(RollingFile::new(run_dir.join(FILE_NAME), Level::Info)));
}
