//! Where the plugin's log lines go: JSON to standard error, to the agent, to a file in the run directory.
//!
//! Standard output belongs to the runtime. The kubelet's journal gets standard error, so the lines are found there as well.

use cni_core::conf::Conf;
use cni_core::logs::{ASKED_BY_AGENT, CALLED, READER};
use logging::{
    AgentSocket, Config, Level, LineFormat, LogEntry, LogHandle, LogTarget, RollingFile, Sink as _,
};
use std::{ffi::OsString, os::unix::process::parent_id, time::SystemTime};

pub use cni_core::logs::{SCOPE, levels};

/// The log file in the run directory.
pub const FILE_NAME: &str = "istio-cni.log";

/// Starts logging to standard error. `None` if the process already logs, as in tests.
#[must_use]
pub fn start() -> Option<LogHandle> {
    let config = Config {
        levels: levels(Level::Info),
        format: LineFormat::Json,
        targets: vec![LogTarget::Stderr],
        caller: false,
    };
    logging::init(config).ok()
}

/// The command of an invocation that shows the agent that the runtime uses its configuration: the others may use a remembered one.
#[must_use]
pub fn called(env: &dyn Fn(&str) -> Option<OsString>) -> Option<String> {
    let command = env("CNI_COMMAND")?.into_string().ok()?;
    let is_runtimes = ["ADD", "STATUS"].contains(&command.as_str()) && env(ASKED_BY_AGENT).is_none();
    is_runtimes.then_some(command)
}

/// Continues as the configuration says: its level, the agent's socket, the file. Skips missing ones. The agent receives the command in
/// `called`, at any level.
pub fn configure(handle: &LogHandle, conf: &Conf, called: Option<String>) {
    let run_dir = &conf.run_dir;
    handle.set_levels(conf.levels.clone());
    if let Some(agent) = AgentSocket::find(run_dir.join(logging::SOCKET_NAME)) {
        if let Some(command) = called {
            let reader = conf.drop_in.then(|| (READER.to_owned(), parent_id().into()));
            let labels = [(CALLED.to_owned(), command.into())].into_iter().chain(reader).collect();
            agent.write(&LogEntry {
                time: SystemTime::now(),
                level: Level::Info,
                scope: None,
                caller: None,
                message: "called".to_owned(),
                labels,
            });
        }
        handle.add_sink(Box::new(agent));
    }
    handle.add_sink(Box::new(RollingFile::new(run_dir.join(FILE_NAME), Level::Info)));
}
