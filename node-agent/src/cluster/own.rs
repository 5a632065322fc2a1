//! The agent's own DaemonSet and pod: looked up when the agent starts, and when it shuts down.
//!
//! Nothing is watched. The DaemonSet's status changes whenever one of its pods does, so watches of all agents would get each node's every step.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use agent_runtime::SCOPE;
use agent_runtime::daemon_set::{self, is_deleted, wants};
use agent_runtime::outage::OutageRetry;
use agent_runtime::supervisor::Unneeded;
use cluster_client::params::GetParams;
use cluster_client::{ApiError, PartialObjectMeta, Request};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};

use super::pods::of_namespace;
use super::{ApiHandle, Cluster};

/// How long, and how often, the agent repeats a request that is denied when it shuts down.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(10);
const REFUSAL_PAUSE: Duration = Duration::from_millis(500);
/// How long the agent waits for its rights to go. Uninstalling deletes the DaemonSet and the roles with one command, a few requests apart.
const UNINSTALL_PATIENCE: Duration = Duration::from_secs(5);
/// How long refusals have to last to count: older charts leave the agent five seconds in all.
const LASTING: Duration = Duration::from_secs(2);
const NO_NAMESPACE: &str = "POD_NAMESPACE is not set, so the agent cannot find its DaemonSet";

/// What the API server reports about the agent's own DaemonSet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnDaemonSet {
    /// It exists.
    Present {
        /// Whether it is being deleted.
        deleting: bool,
        /// Whether it still wants an agent on this node.
        wants_node: bool,
    },
    /// It does not exist.
    Absent,
    /// The agent may not read it: its roles or credentials are gone, or never existed.
    Denied {
        /// Whether the plugin's own credentials still work; none if unknown.
        plugin_works: Option<bool>,
        /// What becomes of the agent's pod.
        pod: OwnPod,
    },
    /// The API server does not respond.
    Unreachable(String),
}

/// The state of the agent's own pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnPod {
    /// It is not being deleted: only its container ends.
    Stays,
    /// It is being deleted and has a controller, and the agent has kept its rights.
    Replaced,
    /// It is being deleted and has no controller.
    Unowned,
    /// It is gone already, as after a forced deletion, and the agent has kept its rights.
    Gone,
    /// The agent may not read it.
    Refused,
    /// The agent does not know its pod.
    Unknown,
    /// The API server does not respond.
    Silent,
}

/// Whether the agent could ever read its DaemonSet, shared by its start and its shutdown.
#[derive(Debug, Default)]
pub struct WasReadable(AtomicBool);

/// Reads the DaemonSet, and repeats that until the API server answers. A name without a DaemonSet, or a refusal, is worth a warning.
pub async fn look_at_start(connection: &ApiHandle, readable: &WasReadable) -> Unneeded {
    let mut retry =
        OutageRetry::new("cannot read the agent's DaemonSet", "the agent's DaemonSet can be read again");
    loop {
        let read = match connection.get() {
            Ok(cluster) if cluster.identity().namespace.is_empty() => Err((NO_NAMESPACE.to_owned(), None)),
            Ok(cluster) => warn_unless_readable(&cluster, readable)
                .await
                .map_err(|failure| (failure.to_string(), failure.retry_after())),
            Err(error) => Err((format!("the agent has no working API client: {error}"), None)),
        };
        match read {
            Ok(()) => {
                retry.worked();
                return Unneeded;
            }
            Err((text, retry_after)) => tokio::time::sleep(retry.after_failure(&text, retry_after)).await,
        }
    }
}

/// Reads it without its content.
///
/// # Errors
/// The API server does not answer.
async fn warn_unless_readable(cluster: &Cluster, readable: &WasReadable) -> Result<(), ApiError> {
    let name = &cluster.identity().daemon_set;
    let request = daemon_set::collection(cluster).get_metadata(name, &GetParams::default());
    match cluster.find::<PartialObjectMeta<DaemonSet>>(request).await {
        Ok(Some(_)) => readable.0.store(true, Ordering::Relaxed),
        Ok(None) => {
            log::warn!(target: SCOPE, "DaemonSet {name} not found; if the agent's has another name, set DAEMONSET_NAME");
        }
        Err(failure) if failure.is_refusal() => {
            log::warn!(target: SCOPE, "the agent may not get DaemonSet {name}; at shutdown, losing its rights counts as removal ({failure})");
        }
        Err(failure) => return Err(failure),
    }
    Ok(())
}

/// Looks the DaemonSet up when the agent shuts down. One refusal does not count if the agent could read it before: while an
/// API server starts, or roles are replaced, it denies what it allows a second later.
pub async fn look_up(connection: &ApiHandle, readable: &WasReadable) -> OwnDaemonSet {
    let start = Instant::now();
    loop {
        let lookup = match connection.get() {
            Ok(cluster) => look_up_once(&cluster).await,
            Err(error) => OwnDaemonSet::Unreachable(error.to_string()),
        };
        let is_final = !matches!(lookup, OwnDaemonSet::Denied { .. }) || !readable.0.load(Ordering::Relaxed);
        if is_final || start.elapsed() >= REFUSAL_PATIENCE {
            return lookup;
        }
        tokio::time::sleep(REFUSAL_PAUSE).await;
    }
}

async fn look_up_once(cluster: &Cluster) -> OwnDaemonSet {
    let identity = cluster.identity();
    if identity.namespace.is_empty() {
        return OwnDaemonSet::Unreachable(NO_NAMESPACE.to_owned());
    }
    let found = match daemon_set::find(cluster).await {
        Ok(Some(found)) => found,
        Ok(None) => return OwnDaemonSet::Absent,
        Err(failure) if failure.is_refusal() => {
            return OwnDaemonSet::Denied { plugin_works: None, pod: OwnPod::Unknown };
        }
        Err(failure) => return OwnDaemonSet::Unreachable(failure.to_string()),
    };
    let request = Request::new("/api/v1/nodes").get_metadata(&identity.node, &GetParams::default());
    let node = cluster.json::<PartialObjectMeta<Node>>(request).await;
    // An agent that cannot read the labels stays.
    let wants_node =
        node.map_or(true, |node| wants(&found, &identity.node, &node.metadata.labels.unwrap_or_default()));
    OwnDaemonSet::Present { deleting: is_deleted(&found), wants_node }
}

/// What becomes of the agent's pod, for an agent that may not read its DaemonSet, as with the roles of Istio's own chart. A rollout and the
/// deletion of the DaemonSet look the same in the pod, so the agent observes whether it loses its rights; the last response counts,
/// because roles that are replaced are missing for a moment.
pub async fn own_pod(connection: &ApiHandle) -> OwnPod {
    let start = Instant::now();
    let (mut last, mut refused_since) = (OwnPod::Silent, None);
    loop {
        let seen = match connection.get() {
            Ok(cluster) => own_pod_once(&cluster).await,
            Err(_) => OwnPod::Silent,
        };
        match seen {
            OwnPod::Stays | OwnPod::Unowned | OwnPod::Gone => return seen,
            OwnPod::Replaced => (last, refused_since) = (seen, None),
            OwnPod::Refused => {
                last = seen;
                refused_since.get_or_insert_with(Instant::now);
            }
            OwnPod::Unknown => last = seen,
            OwnPod::Silent => {}
        }
        let is_lasting = refused_since.is_some_and(|since| since.elapsed() >= LASTING);
        // A refusal that has just begun has to last.
        let is_late = start.elapsed() >= UNINSTALL_PATIENCE && refused_since.is_none();
        if is_lasting || is_late {
            return last;
        }
        tokio::time::sleep(REFUSAL_PAUSE).await;
    }
}

async fn own_pod_once(cluster: &Cluster) -> OwnPod {
    let (namespace, name) = (&cluster.identity().namespace, &cluster.identity().pod);
    if namespace.is_empty() || name.is_empty() {
        return OwnPod::Unknown;
    }
    let request = of_namespace(namespace).get_metadata(name, &GetParams::default());
    match cluster.find::<PartialObjectMeta<Pod>>(request).await {
        Ok(Some(pod)) if pod.metadata.deletion_timestamp.is_none() => OwnPod::Stays,
        Ok(Some(pod)) => {
            let mut owners = pod.metadata.owner_references.iter().flatten();
            let is_owned = owners.any(|owner| owner.controller == Some(true));
            if is_owned { OwnPod::Replaced } else { OwnPod::Unowned }
        }
        Ok(None) => OwnPod::Gone,
        Err(failure) if failure.is_refusal() => OwnPod::Refused,
        Err(_) => OwnPod::Silent,
    }
}
