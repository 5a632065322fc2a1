//! Healing drift: pods that are not redirected as planned any more are so again, as soon as the kernel tells of the change.
//!
//! ```text
//! drift watch ──► healer ──► ward, one for each pod ──► look ──► mend ──► metrics, event
//!      ▲             │        ▲ nf_tables, routing of the pod's network namespace
//!      └── wishes ───┴────────┘
//! ```
//!
//! The drift watch says which pods there are and where. For each of them a ward listens in the pod's network namespace; it is a task, not a thread. Its two
//! sockets would keep that namespace alive, so the ward goes as soon as the runtime has taken its file away. `record` and `pace` decide, and
//! are pure.

mod herald;
mod mend;
pub mod metrics;
mod pace;
mod record;
mod ward;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::future::pending;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use netns_apply::netns::Netns;
use nix::sys::resource::{Resource, getrlimit};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::time::{Instant, sleep, sleep_until};

use crate::cluster::Connection;
use crate::drift::{Candidate, Rules};
use crate::metrics::Metrics;
use crate::settings::{Paths, Settings};
use crate::supervisor::{Supervisor, Unneeded};
use crate::watch::{Watch, Watched};
use herald::Herald;
use pod_netns::Sandbox;
use ward::Ward;

/// The scope of the agent's lines.
const SCOPE: &str = "cni-agent";
/// The most pods that are listened to. No node has as many.
const MOST_WARDS: u64 = 1024;
/// Descriptors that are left to everything else.
const RESERVED: u64 = 256;
/// Descriptors of one ward.
const PER_WARD: u64 = 2;
/// How many namespaces are looked into at the same time.
const AT_ONCE: usize = 4;
/// How many messages of the drift watch may wait.
const MOST_TOLD: usize = 16;
/// How long wishes are gathered before the drift watch hears of them.
const GATHER: Duration = Duration::from_secs(1);
/// When the drift watch is to look for pods whose namespaces have appeared: they have no address at first, and do not run yet.
const NEWS_AFTER: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(10), Duration::from_secs(40)];
/// How often files are compared with wards where the directory is watched: a runtime may unmount a file and leave it there.
const TICK: Duration = Duration::from_secs(30);
/// How often, where it cannot be watched.
const POLL: Duration = Duration::from_secs(2);

/// What the drift watch tells.
#[derive(Debug)]
pub enum Told {
    /// It has looked at a pod.
    Seen {
        /// The pod as it is now.
        pod: Arc<Candidate>,
        /// What holds for all pods now.
        rules: Arc<Rules>,
        /// Its network namespace.
        sandbox: Sandbox,
        /// Whether it is redirected as planned; otherwise it is not, for sure.
        is_verified: bool,
    },
    /// The UIDs of all pods that there are.
    Pods(BTreeSet<String>),
    /// Nothing is to be mended any more.
    Off,
}

/// Pods that somebody wishes the drift watch to look at, out of turn.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Wishes {
    /// Their UIDs.
    pub pods: BTreeSet<String>,
    /// And all that nobody has looked at yet.
    pub new: bool,
}

#[derive(Debug, Default)]
struct WishList {
    wishes: Mutex<Wishes>,
    added: Notify,
}

impl WishList {
    fn add(&self, add: impl FnOnce(&mut Wishes)) {
        add(&mut self.wishes.lock().unwrap_or_else(PoisonError::into_inner));
        self.added.notify_one();
    }

    fn is_empty(&self) -> bool {
        *self.wishes.lock().unwrap_or_else(PoisonError::into_inner) == Wishes::default()
    }
}

/// The drift watch's end of the link.
#[derive(Debug)]
pub struct Wards {
    told: mpsc::Sender<Told>,
    wishes: Arc<WishList>,
}

impl Wards {
    /// Tells the healer.
    pub async fn tell(&self, told: Told) {
        // Who has ended mends nothing.
        let _ = self.told.send(told).await;
    }

    /// Waits until there are wishes. May be dropped and called again.
    pub async fn wishes(&self) -> Wishes {
        while self.wishes.is_empty() {
            self.wishes.added.notified().await;
        }
        sleep(GATHER).await;
        std::mem::take(&mut *self.wishes.wishes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Makes a healer, and the drift watch's link to it.
#[must_use]
pub fn link(
    settings: &Settings,
    connection: Arc<Connection>,
    metrics: Arc<Metrics>,
    tasks: &Supervisor,
) -> (Wards, Healer) {
    let (send, told) = mpsc::channel(MOST_TOLD);
    let wishes = Arc::new(WishList::default());
    let common = Common {
        paths: settings.paths.clone(),
        herald: Herald::start(connection, metrics.clone(), tasks),
        metrics,
        slots: Semaphore::new(AT_ONCE),
        wishes: wishes.clone(),
    };
    let healer = Healer {
        told,
        common: Arc::new(common),
        wards: BTreeMap::new(),
        unwatched: BTreeSet::new(),
        directory: None,
        next: None,
        news: Vec::new(),
        said: BTreeSet::new(),
    };
    (Wards { told: send, wishes }, healer)
}

/// What all wards have in common.
#[derive(Debug)]
struct Common {
    paths: Paths,
    metrics: Arc<Metrics>,
    herald: Herald,
    slots: Semaphore,
    wishes: Arc<WishList>,
}

/// Has a ward for each pod.
#[derive(Debug)]
pub struct Healer {
    told: mpsc::Receiver<Told>,
    common: Arc<Common>,
    wards: BTreeMap<String, Ward>,
    /// Pods that have none and should.
    unwatched: BTreeSet<String>,
    directory: Option<Directory>,
    /// When to look at the directory again, if nothing happens; none while nothing is to be mended.
    next: Option<Instant>,
    /// When to ask the drift watch for new pods.
    news: Vec<Instant>,
    /// Why pods have no ward, as far as it was said.
    said: BTreeSet<&'static str>,
}

/// The runtime's directory of network namespaces.
#[derive(Debug, Default)]
struct Directory {
    watch: Option<Watch>,
    names: BTreeSet<OsString>,
}

impl Healer {
    /// Works until the drift watch has ended.
    pub async fn run(mut self) -> Unneeded {
        loop {
            let next = self.next.into_iter().chain(self.news.iter().copied()).min();
            let time = async {
                match next {
                    Some(next) => sleep_until(next).await,
                    None => pending().await,
                }
            };
            let changed = async {
                match self.directory.as_mut().and_then(|directory| directory.watch.as_mut()) {
                    Some(watch) => watch.changed().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                told = self.told.recv() => match told {
                    Some(told) => self.take(told).await,
                    None => return Unneeded,
                },
                change = changed => {
                    if !matches!(change, Ok(crate::watch::Change::Files)) {
                        self.directory = None;
                    }
                    self.look_around();
                }
                () = time => self.look_around(),
            }
            self.show();
        }
    }

    async fn take(&mut self, told: Told) {
        if matches!(told, Told::Off) {
            self.wards.clear();
            self.unwatched.clear();
            self.news.clear();
            (self.directory, self.next) = (None, None);
            return;
        }
        if self.directory.is_none() {
            self.look_around();
        }
        match told {
            Told::Off => {}
            Told::Pods(uids) => {
                self.wards.retain(|uid, _| uids.contains(uid));
                self.unwatched.retain(|uid| uids.contains(uid));
            }
            Told::Seen { pod, rules, sandbox, is_verified } => {
                let uid = pod.uid.clone();
                let is_there = |ward: &&Ward| !ward.is_over() && ward.sandbox().id() == sandbox.id();
                match self.wards.get(&uid).filter(is_there) {
                    Some(ward) => ward.tell(pod, rules, is_verified),
                    None => self.ward(&uid, Ward::order(pod, rules, is_verified), sandbox).await,
                }
            }
        }
    }

    /// Gives a pod a ward, if that is possible.
    async fn ward(&mut self, uid: &str, order: ward::Order, sandbox: Sandbox) {
        self.wards.remove(uid);
        let is_anothers = self.wards.values().any(|ward| ward.sandbox().id() == sandbox.id());
        let made = if self.wards.len() >= most_wards() {
            Err((
                "too_many",
                "there are too many pods, or too few file descriptors (RLIMIT_NOFILE)".to_owned(),
            ))
        } else if is_anothers {
            let text = format!("{} has the addresses of two pods", sandbox.path().display());
            Err(("ambiguous", text))
        } else {
            Ward::start(&self.common, order, sandbox).await.map_err(|error| ("no_socket", error))
        };
        match made {
            Ok(ward) => {
                self.unwatched.remove(uid);
                self.wards.insert(uid.to_owned(), ward);
            }
            Err((reason, text)) => {
                self.unwatched.insert(uid.to_owned());
                if self.said.insert(reason) {
                    log::warn!(target: SCOPE, uid = uid; "cannot listen for changes in the network namespace of a pod, so only the drift watch looks at it: {text}");
                }
            }
        }
    }

    /// Lets go of namespaces whose files are gone, and asks for the pods of those that have come.
    fn look_around(&mut self) {
        let now = Instant::now();
        self.wards.retain(|_, ward| {
            let sandbox = ward.sandbox();
            !ward.is_over() && Netns::open(sandbox.path()).is_ok_and(|there| there.id() == sandbox.id())
        });
        let path = &self.common.paths.netns;
        let directory = self.directory.get_or_insert_default();
        if directory.watch.is_none() {
            directory.watch = watch(path, &mut self.said);
        }
        let names = names(path);
        if !names.is_subset(&directory.names) {
            self.news = NEWS_AFTER.map(|after| now + after).to_vec();
        }
        directory.names = names;
        self.next = Some(now + if directory.watch.is_some() { TICK } else { POLL });
        let due = self.news.len();
        self.news.retain(|at| *at > now);
        if self.news.len() < due {
            self.common.wishes.add(|wishes| wishes.new = true);
        }
    }

    fn show(&self) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.common.metrics.heal.watched.set(count(self.wards.len()));
        self.common.metrics.heal.unwatched.set(count(self.unwatched.len()));
    }
}

fn watch(path: &Path, said: &mut BTreeSet<&'static str>) -> Option<Watch> {
    let watched = Watched { directory: path.to_path_buf(), matters: Box::new(|_| true) };
    match Watch::new(vec![watched]) {
        Ok(watch) => Some(watch),
        Err(error) => {
            if said.insert("no_watch") {
                log::warn!(target: SCOPE, "cannot watch the directory of network namespaces, and looks every {} s instead: {error}", POLL.as_secs());
            }
            None
        }
    }
}

fn names(path: &Path) -> BTreeSet<OsString> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).collect()
}

/// As many as there are descriptors for.
fn most_wards() -> usize {
    let most = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) => (soft.saturating_sub(RESERVED) / PER_WARD).min(MOST_WARDS),
        Err(_) => MOST_WARDS,
    };
    usize::try_from(most).unwrap_or(usize::MAX)
}
