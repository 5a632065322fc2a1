//! Watching the network namespaces of enrolled pods: the kernel reports when their rules or routes change, and the pod is examined at once.
//!
//! The sockets of a monitor keep its namespace alive, so a monitor goes as soon as the runtime has removed the namespace's file. Pods whose namespaces have no file are
//! examined at intervals only.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_runtime::SCOPE;
use agent_runtime::supervisor::OwnedTask;
use netns_apply::netns::{Netns, NetnsId};
use tokio::time::{Instant, sleep};

use super::inventory::Inventory;
use crate::pods::heal::{RecheckBackoff, most_monitors};
use crate::pods::netns_changes::{ChangeSubscriptions, Sockets, subscribe};

/// The monitors, by pods' UIDs.
#[derive(Debug, Default)]
pub struct Monitors(BTreeMap<String, Monitor>);

#[derive(Debug)]
struct Monitor {
    path: PathBuf,
    id: NetnsId,
    task: OwnedTask,
}

/// A namespace that is to be monitored.
pub struct Opened {
    uid: String,
    path: PathBuf,
    id: NetnsId,
    sockets: Sockets,
}

impl Monitors {
    /// Ends those of pods and namespaces that are gone.
    pub fn release(&mut self, is_there: impl Fn(&str) -> bool) {
        let is_same =
            |monitor: &Monitor| Netns::open(&monitor.path).is_ok_and(|there| there.id() == monitor.id);
        self.0.retain(|uid, monitor| is_there(uid) && !monitor.task.0.is_finished() && is_same(monitor));
    }

    /// Which of these pods, in these namespaces, have none.
    #[must_use]
    pub fn missing(&self, pods: BTreeMap<String, NetnsId>) -> BTreeMap<NetnsId, String> {
        let has = |uid: &str, id| self.0.get(uid).is_some_and(|monitor| monitor.id == id);
        let mut missing = pods;
        missing.retain(|uid, id| !has(uid, *id));
        let room = most_monitors().saturating_sub(self.0.len());
        missing.into_iter().take(room).map(|(uid, id)| (id, uid)).collect()
    }

    /// Monitors these namespaces. Needs a tokio run-time.
    pub fn add(&mut self, opened: Vec<Opened>, inventory: &Arc<Inventory>) {
        for Opened { uid, path, id, sockets } in opened {
            match ChangeSubscriptions::new(sockets) {
                Ok(subscriptions) => {
                    let watched = watch(subscriptions, inventory.clone(), uid.clone());
                    #[expect(
                        clippy::disallowed_methods,
                        reason = "a pod whose monitor has ended is examined at intervals, and gets another one"
                    )]
                    let task = OwnedTask(tokio::spawn(watched).abort_handle());
                    self.0.insert(uid, Monitor { path, id, task });
                }
                Err(error) => {
                    log::debug!(target: SCOPE, uid = uid; "cannot monitor a pod's network namespace: {error}");
                }
            }
        }
    }
}

/// Opens sockets in those namespaces that have a file in the runtime's directory.
#[must_use]
pub fn open(wanted: &BTreeMap<NetnsId, String>, directory: &Path) -> Vec<Opened> {
    let entries = if wanted.is_empty() { None } else { std::fs::read_dir(directory).ok() };
    let open = |entry: io::Result<std::fs::DirEntry>| {
        let netns = Netns::open(entry.ok()?.path()).ok()?;
        let uid = wanted.get(&netns.id())?.clone();
        let sockets = subscribe(&netns).ok()?;
        Some(Opened { uid, path: netns.path().to_owned(), id: netns.id(), sockets })
    };
    entries.into_iter().flatten().filter_map(open).collect()
}

async fn watch(mut subscriptions: ChangeSubscriptions, inventory: Arc<Inventory>, uid: String) {
    let mut backoff = RecheckBackoff::default();
    // What changed before the sockets were open.
    inventory.examine(&uid);
    while subscriptions.receive().await.is_ok() {
        inventory.examine(&uid);
        sleep(backoff.checked(Instant::now().into_std(), std::time::Duration::ZERO)).await;
    }
}
