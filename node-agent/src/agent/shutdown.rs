//! The agent's shutdown: its signals, and whether the plugin stays.

use std::io;
use std::time::Duration;

use agent_runtime::SCOPE;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cluster::own::{self, OwnDaemonSet, WasReadable};
use crate::install::leave::{self, Departure};
use crate::install::plugin_token::{PluginToken, TokenRenewer};
use crate::serve::server::AgentContext;
use crate::settings::Settings;
use crate::taint;

/// How long the last renewal of the plugin's token may take.
const LAST_RENEWAL: Duration = Duration::from_secs(5);

/// The signals that end the agent.
pub(super) struct ShutdownSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl ShutdownSignals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    pub(super) async fn next_signal(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Leaves the plugin or removes it.
pub(super) async fn shut_down(
    settings: &Settings,
    served: &AgentContext,
    readable: &WasReadable,
    token: &PluginToken,
    renewer: &TokenRenewer,
) {
    let (installer, connection) = (served.parts.installer.clone(), &served.parts.connection);
    let lookup = match own::look_up(connection, readable).await {
        OwnDaemonSet::Denied { .. } => {
            // In this order: the plugin's rights go some seconds after the agent's.
            let pod = own::own_pod(connection).await;
            OwnDaemonSet::Denied { plugin_works: token.works(connection).await, pod }
        }
        other @ (OwnDaemonSet::Present { .. } | OwnDaemonSet::Absent | OwnDaemonSet::Unreachable(_)) => other,
    };
    match leave::decide(&lookup) {
        Departure::Stay(because) => {
            // It has to last until the next agent runs, however long that takes.
            let is_new = tokio::time::timeout(LAST_RENEWAL, renewer.renew_if_own()).await == Ok(true);
            let hand_over = move || {
                if is_new && let Err(error) = installer.kubeconfig() {
                    log::warn!(target: SCOPE, "cannot write the plugin's new token: {error}");
                }
                if let Err(error) = leave::hand_over(&installer) {
                    log::warn!(target: SCOPE, "originals of network configurations stay: {error}");
                }
            };
            if let Err(error) = tokio::task::spawn_blocking(hand_over).await {
                log::error!(target: SCOPE, "handing over panicked: {error}");
            }
            log::info!(target: SCOPE, "shutting down; keeping the plugin: {because}");
        }
        Departure::Remove(because) => {
            log::info!(target: SCOPE, "shutting down; removing the plugin: {because}");
            let removed = tokio::task::spawn_blocking(move || leave::remove_patiently(&installer)).await;
            match removed {
                Ok(Ok(())) => {
                    log::info!(target: SCOPE, "the plugin is removed");
                    taint::NodeTaintManager::release(settings, connection).await;
                }
                // The node keeps its taint and condition: pods may still meet the plugin.
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
