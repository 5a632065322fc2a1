//! The one-shot mode: what a pass of the agent does, done once, for a node image's build, a systemd unit, or by hand.
//!
//! The same plan, in the same order, under the same lock as the agent's: it may be cut short at any moment, and run beside agents
//! and others of its kind.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use agent_socket::{AgentRequest, RequestFailure};
use anyhow::{anyhow, bail};

use crate::install::conflist_edits::EntryObstacle;
use crate::install::disk::context;
use crate::install::installer::{InstallError, Installer, Pass};
use crate::install::leave::{self, RemovalError};
use crate::install::ready::Reason;
use crate::settings::Paths;

/// How often it is tried if another program writes a file at the same moment.
const ATTEMPTS: u32 = 20;
/// How long it waits in between.
const PAUSE: Duration = Duration::from_millis(50);

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The runtime calls the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// What this run changed.
    pub changed: Pass,
    /// Whether the plugin has the credentials it needs; without them it holds back every pod that it has to query.
    pub credentials: bool,
}

/// The earlier problem, if it differs from the current one.
fn before(reason: &Reason, obstacle: Option<&EntryObstacle>) -> String {
    let is_said = |obstacle: &EntryObstacle| matches!(reason, Reason::Directory(now) if now == obstacle);
    obstacle
        .filter(|obstacle| !is_said(obstacle))
        .map_or_else(String::new, |obstacle| format!(" (before: {obstacle})"))
}

/// Sees to it that the node's directories are there. The one of the plugin's credentials is made: it is ours alone, and gone after each boot.
///
/// # Errors
/// Those that are missing, by the settings that name them.
pub fn prepare(paths: &Paths) -> anyhow::Result<()> {
    let needed = [
        ("SOURCE_CNI_BIN_DIR", &paths.source_bin),
        ("MOUNTED_CNI_BIN_DIR", &paths.bin),
        ("MOUNTED_CNI_NET_DIR", &paths.net),
    ];
    let missing = needed.into_iter().filter(|(_, path)| !path.is_dir());
    let missing: Vec<String> = missing.map(|(name, path)| format!("{name} {}", path.display())).collect();
    if !missing.is_empty() {
        bail!(
            "not there: {}. Directories are named as a container has them mounted; on the node itself they are usually /etc/cni/net.d and /opt/cni/bin",
            missing.join(", ")
        );
    }
    Ok(context(fs::create_dir_all(&paths.run), "make", &paths.run)?)
}

/// Installs the plugin once; none if an agent runs on this node, which keeps its own installation.
///
/// # Errors
/// The reason why pods would not be redirected.
pub fn install(installer: &Installer) -> anyhow::Result<Option<Installed>> {
    if agent(installer).is_some() { Ok(None) } else { install_alone(installer).map(Some) }
}

/// As [`install`], on a node without a running agent.
///
/// # Errors
/// The reason why pods would not be redirected.
pub fn install_alone(installer: &Installer) -> anyhow::Result<Installed> {
    installer.sweep().map_err(|error| anyhow!("cannot begin: {error}"))?;
    let changed = pass(installer)?;
    // Every step was taken, and pods would not be redirected all the same.
    let credentials = installer.check_once().map_err(|reason| {
        let before = before(&reason, changed.obstacle.as_ref());
        anyhow!("{reason}{before}; everything else is installed, fix this and run it again")
    })?;
    Ok(Installed { changed, credentials })
}

/// Takes everything of ours out of the node.
///
/// # Errors
/// An agent runs here; or everything that could not be removed.
pub fn uninstall(installer: &Installer) -> Result<(), Vec<RemovalError>> {
    match agent(installer) {
        Some(socket) => Err(vec![RemovalError::AgentRuns(socket)]),
        None => leave::remove(installer),
    }
}

/// The socket of an agent that runs on this node.
fn agent(installer: &Installer) -> Option<PathBuf> {
    let socket = installer.settings.paths.run.join(logging::SOCKET_NAME);
    is_answered(&socket).then_some(socket)
}

/// Whether a process answers at a socket. The file of an agent that ended has no listener; and a child that an agent was about to
/// start when it was killed holds the socket for a moment, and ends it without an answer. A silent process is a working agent.
fn is_answered(socket: &Path) -> bool {
    let request = AgentRequest { method: "GET", path: "/", body: &[] };
    matches!(request.send(socket, PATIENCE, |_status| 0), Ok(_) | Err(RequestFailure::Silent))
}

/// One pass, repeated while another program writes at the same time.
fn pass(installer: &Installer) -> Result<Pass, InstallError> {
    let mut attempt = 1;
    loop {
        match installer.pass(None) {
            Err(error) if error.is_collision() && attempt < ATTEMPTS => {
                attempt += 1;
                thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

/// The warning about a plugin without credentials.
#[must_use]
pub fn without_credentials(installer: &Installer) -> String {
    let file = installer.settings.paths.kubeconfig();
    format!(
        "the plugin has no credentials: KUBERNETES_SERVICE_HOST is not set, and {} is not there. Pods are held back, but for those in \
         EXCLUDE_NAMESPACES and the agent's own, until an agent, or another run with credentials, writes that file",
        file.display()
    )
}
