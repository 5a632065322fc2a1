//! Healing drift: a pod that drifted is redirected as planned again as soon as the kernel reports the change.
//!
//! ```text
//! drift watch ──► healer ──► monitor, one for each pod ──► check ──► repair ──► metrics, event
//!      ▲             │        ▲ nf_tables, routing of the pod's network namespace
//!      └─ requests ──┴────────┘
//! ```
//!
//! The drift watch reports all pods and their namespaces. For each of them a monitor subscribes in the pod's network namespace; it is a task, not a thread. Its two
//! sockets would keep that namespace alive, so the monitor goes as soon as the runtime has removed its file. `history` and `backoff` decide, and
//! are pure.

mod backoff;
mod history;
mod monitor;
mod repair;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_runtime::metrics::gauged;
use agent_runtime::supervisor::{Supervisor, Unneeded};
use agent_runtime::{SCOPE, or_never};
use netns_apply::netns::NetnsId;
use nix::sys::resource::{Resource, getrlimit};
use pod_netns::MountedNetns;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use crate::cluster::ApiHandle;
use crate::cluster::events::EventPublisher;
use crate::install::file_watch::{FileEvent, FileWatch, WatchedDir};
use crate::metrics::Metrics;
use crate::pods::check::{ExpectedRules, MeshPod};
use crate::settings::{Paths, Settings};
pub use backoff::RecheckBackoff;
use monitor::PodMonitor;

/// The most pods that are monitored. No node has as many.
const MOST_MONITORS: u64 = 1024;
/// Descriptors that are left to everything else.
const RESERVED: u64 = 256;
/// Descriptors of one monitor.
const PER_MONITOR: u64 = 2;
/// How many namespaces are checked at the same time.
const AT_ONCE: usize = 4;
/// How many messages of the drift watch may wait.
const MOST_WAITING: usize = 16;
/// How long requests are collected before the drift watch receives them.
const GATHER: Duration = Duration::from_secs(1);
/// When the drift watch should check pods whose namespaces have appeared: they have no address at first, and do not run yet.
const RECHECKS_AFTER: [Duration; 3] =
    [Duration::from_secs(2), Duration::from_secs(10), Duration::from_secs(40)];
/// How often files are compared with monitors if the directory is watched: a runtime may unmount a file and leave it there.
const TICK: Duration = Duration::from_secs(30);
/// How often, where it cannot be watched.
const POLL: Duration = Duration::from_secs(2);

/// A message of the drift watch.
#[derive(Debug)]
pub enum HealRequest {
    /// It has checked a pod.
    Checked {
        /// How it should be redirected.
        desired: DesiredRedirect,
        /// Its network namespace.
        sandbox: MountedNetns,
    },
    /// It does not know this pod's network namespace.
    Unfound {
        /// The pod's UID.
        uid: String,
    },
    /// The UIDs of all pods.
    Pods(BTreeSet<String>),
    /// Healing is off.
    Off,
}

/// How a pod should be redirected.
#[derive(Debug, Clone)]
pub struct DesiredRedirect {
    /// The pod, as it is now.
    pub pod: Arc<MeshPod>,
    /// What holds for all pods.
    pub rules: Arc<ExpectedRules>,
    /// Whether it was verified to be so; otherwise it certainly is not.
    pub is_verified: bool,
}

impl DesiredRedirect {
    /// Takes note of a later check. A verified state stays the desired one: a pod's annotations, and the settings of all pods, may change while it runs, and
    /// neither is a reason to redirect it otherwise.
    fn update(&mut self, later: Self) {
        if later.is_verified || !self.is_verified {
            *self = later;
        }
    }
}

/// Pods that the drift watch should check out of turn.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CheckRequests {
    /// Their UIDs.
    pub pods: BTreeSet<String>,
    /// And all that were not checked yet.
    pub new: bool,
}

/// The requests that the drift watch has not received yet.
type CheckQueue = watch::Sender<CheckRequests>;

/// The drift watch's handle of the healer.
#[derive(Debug)]
pub struct HealHandle {
    sender: mpsc::Sender<HealRequest>,
    queue: Arc<CheckQueue>,
}

impl HealHandle {
    /// Sends a message to the healer.
    pub async fn send(&self, request: HealRequest) {
        // A healer that has ended needs no messages.
        let _ = self.sender.send(request).await;
    }

    /// Waits for requests. May be dropped and called again.
    pub async fn requests(&self) -> CheckRequests {
        // The sender lives as long as this does.
        let _ = self.queue.subscribe().wait_for(|requests| *requests != CheckRequests::default()).await;
        sleep(GATHER).await;
        self.queue.send_replace(CheckRequests::default())
    }
}

/// Makes a healer, and the drift watch's handle of it.
#[must_use]
pub fn link(
    settings: &Settings,
    connection: Arc<ApiHandle>,
    metrics: Arc<Metrics>,
    tasks: &Supervisor,
) -> (HealHandle, Healer) {
    let (sender, requests) = mpsc::channel(MOST_WAITING);
    let queue = Arc::new(CheckQueue::default());
    let context = HealContext {
        paths: settings.paths.clone(),
        events: EventPublisher::start("events of healing", connection, metrics.clone(), tasks),
        metrics,
        slots: Semaphore::new(AT_ONCE),
        requests: queue.clone(),
    };
    let healer = Healer {
        requests,
        context: Arc::new(context),
        monitors: BTreeMap::new(),
        unwatched: BTreeSet::new(),
        directory: None,
        next: None,
        rechecks: Vec::new(),
        logged: BTreeSet::new(),
    };
    (HealHandle { sender, queue }, healer)
}

/// What all monitors share.
#[derive(Debug)]
struct HealContext {
    paths: Paths,
    metrics: Arc<Metrics>,
    events: EventPublisher,
    slots: Semaphore,
    requests: Arc<CheckQueue>,
}

/// What keeps the healer from noticing changes, and is logged once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LoggedOnce {
    TooMany,
    Ambiguous,
    NoSocket,
    NoDirectoryWatch,
}

/// Has a monitor for each pod.
pub struct Healer {
    requests: mpsc::Receiver<HealRequest>,
    context: Arc<HealContext>,
    monitors: BTreeMap<String, PodMonitor>,
    /// Pods that have none and should.
    unwatched: BTreeSet<String>,
    directory: Option<NamespaceDirectory>,
    /// When to read the directory again, if nothing happens; none while healing is off.
    next: Option<Instant>,
    /// When to ask the drift watch for new pods.
    rechecks: Vec<Instant>,
    /// What was logged.
    logged: BTreeSet<LoggedOnce>,
}

/// The runtime's directory of network namespaces.
#[derive(Default)]
struct NamespaceDirectory {
    watch: Option<FileWatch>,
    names: BTreeSet<OsString>,
}

impl Healer {
    /// Works until the drift watch has ended.
    pub async fn run(mut self) -> Unneeded {
        loop {
            let next = self.next.into_iter().chain(self.rechecks.iter().copied()).min();
            let watch = self.directory.as_mut().and_then(|directory| directory.watch.as_mut());
            tokio::select! {
                request = self.requests.recv() => match request {
                    Some(request) => self.receive(request).await,
                    None => return Unneeded,
                },
                change = or_never(watch.map(FileWatch::changed)) => {
                    if !matches!(change, Ok(FileEvent::Files)) {
                        self.directory = None;
                    }
                    self.scan_directory();
                }
                () = or_never(next.map(sleep_until)) => self.scan_directory(),
            }
            self.show();
        }
    }

    async fn receive(&mut self, request: HealRequest) {
        if matches!(request, HealRequest::Off) {
            self.monitors.clear();
            self.unwatched.clear();
            self.rechecks.clear();
            (self.directory, self.next) = (None, None);
            return;
        }
        if self.directory.is_none() {
            self.scan_directory();
        }
        match request {
            HealRequest::Off => {}
            HealRequest::Pods(uids) => {
                self.monitors.retain(|uid, _| uids.contains(uid));
                self.unwatched.retain(|uid| uids.contains(uid));
            }
            // A monitor that it has already goes on.
            HealRequest::Unfound { uid } => {
                if self.monitors.get(&uid).is_none_or(PodMonitor::is_over) {
                    self.unwatched.insert(uid);
                }
            }
            HealRequest::Checked { desired, sandbox } => {
                let uid = desired.pod.uid.clone();
                let is_there =
                    |monitor: &&PodMonitor| !monitor.is_over() && monitor.sandbox().id() == sandbox.id();
                match self.monitors.get(&uid).filter(is_there) {
                    Some(monitor) => monitor.update(desired),
                    None => self.monitor(&uid, desired, sandbox).await,
                }
            }
        }
    }

    /// Gives a pod a monitor, if that is possible.
    async fn monitor(&mut self, uid: &str, desired: DesiredRedirect, sandbox: MountedNetns) {
        self.monitors.remove(uid);
        let is_anothers = self.monitors.values().any(|monitor| monitor.sandbox().id() == sandbox.id());
        let made = if self.monitors.len() >= most_monitors() {
            Err((
                LoggedOnce::TooMany,
                "too many pods, or too few file descriptors (RLIMIT_NOFILE)".to_owned(),
            ))
        } else if is_anothers {
            let text = format!("{} has the addresses of two pods", sandbox.path().display());
            Err((LoggedOnce::Ambiguous, text))
        } else {
            PodMonitor::start(&self.context, desired, sandbox)
                .await
                .map_err(|error| (LoggedOnce::NoSocket, error))
        };
        match made {
            Ok(monitor) => {
                self.unwatched.remove(uid);
                self.monitors.insert(uid.to_owned(), monitor);
            }
            Err((reason, text)) => {
                self.unwatched.insert(uid.to_owned());
                if self.logged.insert(reason) {
                    log::warn!(target: SCOPE, uid = uid; "cannot monitor the network namespace of a pod, so only the drift watch checks it: {text}");
                }
            }
        }
    }

    /// Releases namespaces whose files are gone, and requests checks of those that appeared.
    fn scan_directory(&mut self) {
        let now = Instant::now();
        self.monitors.retain(|_, monitor| {
            let sandbox = monitor.sandbox();
            !monitor.is_over() && NetnsId::at(sandbox.path()).is_ok_and(|there| there == sandbox.id())
        });
        let path = &self.context.paths.netns;
        let directory = self.directory.get_or_insert_default();
        if directory.watch.is_none() {
            directory.watch = open_watch(path, &mut self.logged);
        }
        let names = names(path);
        if !names.is_subset(&directory.names) {
            self.rechecks = RECHECKS_AFTER.map(|after| now + after).to_vec();
        }
        directory.names = names;
        self.next = Some(now + if directory.watch.is_some() { TICK } else { POLL });
        let due = self.rechecks.len();
        self.rechecks.retain(|at| *at > now);
        if self.rechecks.len() < due {
            self.context.requests.send_modify(|requests| requests.new = true);
        }
    }

    fn show(&self) {
        self.context.metrics.heal_watched.set(gauged(self.monitors.len()));
        self.context.metrics.heal_unwatched.set(gauged(self.unwatched.len()));
    }
}

fn open_watch(path: &Path, logged: &mut BTreeSet<LoggedOnce>) -> Option<FileWatch> {
    match FileWatch::new(vec![WatchedDir::all(path)]) {
        Ok(watch) => Some(watch),
        Err(error) => {
            if logged.insert(LoggedOnce::NoDirectoryWatch) {
                log::warn!(target: SCOPE, "cannot watch the directory of network namespaces; polling every {} s: {error}", POLL.as_secs());
            }
            None
        }
    }
}

fn names(path: &Path) -> BTreeSet<OsString> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).collect()
}

/// How many pods may be monitored, as the file descriptors allow.
pub fn most_monitors() -> usize {
    let most = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) => (soft.saturating_sub(RESERVED) / PER_MONITOR).min(MOST_MONITORS),
        Err(_) => MOST_MONITORS,
    };
    usize::try_from(most).unwrap_or(usize::MAX)
}
