//! The agent's end: who tells it to, and whether the plugin stays.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::SCOPE;
use crate::cluster::{Connection, LastSeen};
use crate::install::Installer;
use crate::leave::{self, Departure, Lookup};
use crate::metrics::{Metrics, WatchLabel};
use crate::plugin_token::{Keeper, PluginToken};
use crate::settings::Settings;
use crate::supervisor::Unneeded;
use crate::taint;

/// How long the last renewal of the plugin's token may take.
const LAST_RENEWAL: Duration = Duration::from_secs(5);

/// The signals that end the agent.
pub(super) struct Ends {
    terminate: Signal,
    interrupt: Signal,
}

impl Ends {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    pub(super) async fn told(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

pub(super) async fn follow_daemon_set(
    connection: Arc<Connection>,
    seen: Arc<LastSeen>,
    metrics: Arc<Metrics>,
) -> Unneeded {
    let restarted = || {
        metrics.watch_restarts.get_or_create(&WatchLabel { watch: "daemonset" }).inc();
    };
    connection.watch_daemon_set(&seen, restarted).await
}

/// Leaves the plugin or removes it.
pub(super) async fn depart(
    settings: &Settings,
    installer: Arc<Installer>,
    connection: &Connection,
    seen: &LastSeen,
    token: &PluginToken,
    keeper: &Keeper,
) {
    let lookup = match connection.last_look(seen).await {
        Lookup::Denied { .. } => {
            // In this order: it takes some seconds until the plugin's rights have gone as well.
            let pod = connection.own_pod_at_the_end().await;
            Lookup::Denied { plugin_works: token.works(connection).await, pod }
        }
        other @ (Lookup::Present { .. } | Lookup::Absent | Lookup::Unreachable(_)) => other,
    };
    match leave::decide(&lookup, seen.get()) {
        Departure::Stay(because) => {
            // It has to last until the next agent runs, however long that takes.
            if tokio::time::timeout(LAST_RENEWAL, keeper.renew_if_own()).await == Ok(true) {
                let written = tokio::task::spawn_blocking(move || installer.kubeconfig()).await;
                if let Ok(Err(error)) = written {
                    log::warn!(target: SCOPE, "cannot write the plugin's new token: {error}");
                }
            }
            log::info!(target: SCOPE, "ending; the plugin stays: {because}");
        }
        Departure::Remove(because) => {
            log::info!(target: SCOPE, "ending; the plugin is removed: {because}");
            let removed = tokio::task::spawn_blocking(move || leave::remove_patiently(&installer)).await;
            match removed {
                Ok(Ok(())) => {
                    log::info!(target: SCOPE, "the plugin is removed");
                    taint::keeper::Keeper::leave(settings, connection).await;
                }
                // The node keeps its taint, and what is said of it: pods may still meet the plugin.
                Ok(Err(errors)) => {
                    for error in errors {
                        log::error!(target: SCOPE, "removal: {error}");
                    }
                }
                Err(error) => log::error!(target: SCOPE, "removal panicked: {error}"),
            }
        }
    }
}
