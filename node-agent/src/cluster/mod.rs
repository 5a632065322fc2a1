//! The agent's requests to the API server: its own DaemonSet and pod, the node's pods, the plugin's token.

pub mod events;
pub mod own;
pub mod pods;
pub mod runtime_classes;
pub mod token;

pub use agent_runtime::cluster::{ApiHandle, Cluster, EventMessage, pod_reference};
use cluster_client::Account;
use k8s_openapi::api::core::v1::ObjectReference;
use reasons::EventReason;

use crate::settings::Settings;

/// A warning of the agent itself, as opposed to one of its controllers.
#[must_use]
pub const fn warning(about: ObjectReference, reason: EventReason, message: String) -> EventMessage {
    EventMessage { about, component: "install-cni", kind: "Warning", reason, message }
}

/// The account that these settings describe.
#[must_use]
pub fn account(settings: &Settings) -> Account {
    let token = settings.paths.service_account.join("token");
    Account::new(settings.kubeconfig.server.clone(), settings.kubeconfig.trust.clone(), token)
}

/// The agent's connection.
#[must_use]
pub fn connection(settings: &Settings) -> ApiHandle {
    ApiHandle::new(account(settings), settings.identity.clone())
}
