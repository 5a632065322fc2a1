//! A socket in the run directory at which plugins reach the agent over HTTP.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use agent_runtime::serve::{self, Handler};
use agent_runtime::supervisor::Supervisor;
use agent_runtime::{SCOPE, lock};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::AbortHandle;
use zds::socket::{Place, SocketFile, SocketKind};

use crate::install::disk;
use crate::metrics::Metrics;

/// The least time between two lines about refused connections.
const LOG_AGAIN: Duration = Duration::from_secs(60);

/// A server of a socket, which can be restarted.
pub struct PluginSocket {
    /// What it is, for tasks and log lines.
    name: &'static str,
    file: SocketFile,
    answer: Handler,
    metrics: Arc<Metrics>,
    tasks: Supervisor,
    running: AbortHandle,
}

impl PluginSocket {
    /// Serves the socket of this file name in the run directory, which is made if it is missing. Needs a tokio run-time.
    ///
    /// # Errors
    /// When directory or socket cannot be made.
    pub fn start(
        name: &'static str,
        (run, file): (&Path, &str),
        metrics: Arc<Metrics>,
        tasks: Supervisor,
        answer: Handler,
    ) -> anyhow::Result<Self> {
        disk::context(std::fs::create_dir_all(run), "make the run directory", run)?;
        let path = run.join(file);
        let (file, listener) =
            disk::context(SocketFile::bind(&path, SocketKind::Stream), "make the socket", &path)?;
        let listener = disk::context(of_runtime(listener), "serve the socket", &path)?;
        let running = run_server(name, listener, &answer, &metrics, &tasks);
        Ok(Self { name, file, answer, metrics, tasks, running })
    }

    /// Recreates the socket if its file was removed, or another agent took its place and is gone: plugins could not connect any more.
    pub fn keep(&mut self) {
        match self.file.place() {
            Place::Ours | Place::Taken => return,
            Place::Missing | Place::Abandoned => {}
        }
        let name = self.name;
        match self.file.bind_again().and_then(of_runtime) {
            Ok(listener) => {
                log::info!(target: SCOPE, "the {name} was removed, or belonged to an agent that is gone; recreated it");
                self.running.abort();
                self.running = run_server(name, listener, &self.answer, &self.metrics, &self.tasks);
            }
            Err(error) => log::warn!(target: SCOPE, "cannot recreate the {name}: {error}"),
        }
    }
}

fn run_server(
    name: &'static str,
    listener: UnixListener,
    answer: &Handler,
    metrics: &Arc<Metrics>,
    tasks: &Supervisor,
) -> AbortHandle {
    let (metrics, own) = (metrics.clone(), nix::unistd::geteuid().as_raw());
    let peers = Peers { name, listener, metrics, own, logged: Mutex::default() };
    serve::spawn(tasks, name, peers, answer.clone())
}

/// The socket as tokio waits for it.
fn of_runtime(listener: OwnedFd) -> io::Result<UnixListener> {
    UnixListener::from_std(listener.into())
}

/// Accepts connections of root, which runtimes run as, and of the agent's own user. All others are closed, even if
/// the socket's mode was changed.
struct Peers {
    name: &'static str,
    listener: UnixListener,
    metrics: Arc<Metrics>,
    own: u32,
    /// The last refusal that was logged.
    logged: Mutex<Option<Instant>>,
}

impl Peers {
    fn may_write(&self, stream: &UnixStream) -> bool {
        let user = stream.peer_cred().map(|peer| peer.uid());
        if user.as_ref().is_ok_and(|user| *user == 0 || *user == self.own) {
            return true;
        }
        self.metrics.log_refused.inc();
        let mut logged = lock(&self.logged);
        if logged.is_none_or(|logged| logged.elapsed() > LOG_AGAIN) {
            let user = user.map_or_else(|error| error.to_string(), |user| user.to_string());
            log::warn!(target: SCOPE, user = user; "refused a connection to the {}: the peer is neither root nor the agent's user", self.name);
            *logged = Some(Instant::now());
        }
        false
    }
}

impl serve::Acceptor for Peers {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<UnixStream> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            if self.may_write(&stream) {
                return Ok(stream);
            }
        }
    }
}
