//! The agent's own DaemonSet and pod: watched while the agent runs, looked up when it shuts down.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use cluster_client::params::{GetParams, WatchParams};
use cluster_client::{ApiError, Limits, PartialObjectMeta, Request, WatchEvent};
use controller_runtime::daemon_set::{self, is_deleted, wants};
use controller_runtime::outage::Retry;
use controller_runtime::resync::WATCH_PATIENCE;
use controller_runtime::supervisor::Unneeded;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};

use super::{Cluster, Connection, PATIENCE};

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
pub enum Lookup {
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

/// The state of the DaemonSet when it was last observed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LastObserved {
    /// Never observed.
    #[default]
    Never,
    /// It existed.
    Present,
    /// It was deleted.
    Gone,
}

/// That state, shared by the watch and the shutdown.
#[derive(Debug, Default)]
pub struct SharedObservation(AtomicU8);

impl SharedObservation {
    /// The state.
    #[must_use]
    pub fn get(&self) -> LastObserved {
        match self.0.load(Ordering::Relaxed) {
            1 => LastObserved::Present,
            2 => LastObserved::Gone,
            _ => LastObserved::Never,
        }
    }

    fn note(&self, object: &PartialObjectMeta<DaemonSet>) {
        let deleting = object.metadata.deletion_timestamp.is_some();
        self.set(if deleting { LastObserved::Gone } else { LastObserved::Present });
    }

    fn set(&self, state: LastObserved) {
        let value = match state {
            LastObserved::Never => 0,
            LastObserved::Present => 1,
            LastObserved::Gone => 2,
        };
        self.0.store(value, Ordering::Relaxed);
    }
}

/// Watches the DaemonSet for as long as the agent lives. Calls `restarted` each time the watch broke.
pub async fn follow(connection: &Connection, observed: &SharedObservation, restarted: impl Fn()) -> Unneeded {
    let mut retry = Retry::new("cannot watch the agent's DaemonSet", "watching the agent's DaemonSet again");
    loop {
        let done = match connection.get() {
            Ok(cluster) => watch_once(&cluster, observed).await,
            Err(error) => Err(format!("the agent has no working API client: {error}").into()),
        };
        let pause = match done {
            Ok(()) => {
                retry.worked();
                retry.after_success()
            }
            Err(WatchError { text, retry_after }) => {
                restarted();
                retry.after_failure(&text, retry_after)
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Why a watch broke.
struct WatchError {
    text: String,
    retry_after: Option<Duration>,
}

impl From<String> for WatchError {
    fn from(text: String) -> Self {
        Self { text, retry_after: None }
    }
}

impl From<ApiError> for WatchError {
    fn from(failure: ApiError) -> Self {
        Self { retry_after: failure.retry_after(), text: failure.to_string() }
    }
}

/// Watches the DaemonSet, one object without its content, until the API server ends the watch.
///
/// Not by `resync`, which lists first: that needs one more verb than a get of this one object.
async fn watch_once(cluster: &Cluster, observed: &SharedObservation) -> Result<(), WatchError> {
    let identity = cluster.identity();
    if identity.namespace.is_empty() {
        return Err(NO_NAMESPACE.to_owned().into());
    }
    let version = observe(cluster, &identity.daemon_set, observed).await?;
    let only = WatchParams::default().fields(&format!("metadata.name={}", identity.daemon_set));
    let request = daemon_set::collection(cluster).watch_metadata(&only, &version);
    let start = Instant::now();
    let mut response = cluster.client().open(request, PATIENCE).await?;
    loop {
        let left = WATCH_PATIENCE.saturating_sub(start.elapsed());
        match response.line::<WatchEvent<PartialObjectMeta<DaemonSet>>>(left).await? {
            Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => observed.note(&object),
            Some(WatchEvent::Deleted(_)) => observed.set(LastObserved::Gone),
            Some(WatchEvent::Bookmark(_)) => {}
            Some(WatchEvent::Error(status)) => return Err(status.message.into()),
            None => return Ok(()),
        }
    }
}

/// Reads the DaemonSet before the watch; returns the version to watch from.
async fn observe(cluster: &Cluster, name: &str, observed: &SharedObservation) -> Result<String, WatchError> {
    let request = daemon_set::collection(cluster).get_metadata(name, &GetParams::default());
    let found =
        cluster.client().json::<PartialObjectMeta<DaemonSet>>(request, Limits::object(PATIENCE)).await;
    match found {
        Ok(found) => {
            observed.note(&found);
            Ok(found.metadata.resource_version.unwrap_or_default())
        }
        Err(ApiError::NotFound(words)) if words.by_api && observed.get() == LastObserved::Never => {
            Err(format!("DaemonSet {name} not found; if the agent's has another name, set DAEMONSET_NAME").into())
        }
        Err(ApiError::NotFound(words)) if words.by_api => {
            observed.set(LastObserved::Gone);
            Ok("0".to_owned())
        }
        Err(failure) if failure.is_refusal() => Err(format!(
            "the agent may not get DaemonSet {name}; at shutdown, losing its rights counts as removal ({failure})"
        )
        .into()),
        Err(failure) => Err(failure.into()),
    }
}

/// Looks the DaemonSet up when the agent shuts down. One refusal does not count if the DaemonSet existed a moment ago: while an
/// API server starts, or roles are replaced, it denies what it allows a second later.
pub async fn look_up(connection: &Connection, observed: &SharedObservation) -> Lookup {
    let start = Instant::now();
    loop {
        let lookup = match connection.get() {
            Ok(cluster) => look_up_once(&cluster).await,
            Err(error) => Lookup::Unreachable(error.to_string()),
        };
        let is_final = !matches!(lookup, Lookup::Denied { .. }) || observed.get() != LastObserved::Present;
        if is_final || start.elapsed() >= REFUSAL_PATIENCE {
            return lookup;
        }
        tokio::time::sleep(REFUSAL_PAUSE).await;
    }
}

async fn look_up_once(cluster: &Cluster) -> Lookup {
    let identity = cluster.identity();
    if identity.namespace.is_empty() {
        return Lookup::Unreachable(NO_NAMESPACE.to_owned());
    }
    let found = match daemon_set::find(cluster).await {
        Ok(Some(found)) => found,
        Ok(None) => return Lookup::Absent,
        Err(failure) if failure.is_refusal() => {
            return Lookup::Denied { plugin_works: None, pod: OwnPod::Unknown };
        }
        Err(failure) => return Lookup::Unreachable(failure.to_string()),
    };
    let request = Request::new("/api/v1/nodes").get_metadata(&identity.node, &GetParams::default());
    let node = cluster.client().json::<PartialObjectMeta<Node>>(request, Limits::object(PATIENCE)).await;
    // An agent that cannot read the labels stays.
    let wants_node =
        node.map_or(true, |node| wants(&found, &identity.node, &node.metadata.labels.unwrap_or_default()));
    Lookup::Present { deleting: is_deleted(&found), wants_node }
}

/// What becomes of the agent's pod, for an agent that may not read its DaemonSet, as with the roles of Istio's own chart. A rollout and the
/// deletion of the DaemonSet look the same in the pod, so the agent observes whether it loses its rights; the last response counts,
/// because roles that are replaced are missing for a moment.
pub async fn own_pod(connection: &Connection) -> OwnPod {
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
    let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
    let request = pods.get_metadata(name, &GetParams::default());
    match cluster.client().json::<PartialObjectMeta<Pod>>(request, Limits::object(PATIENCE)).await {
        Ok(pod) if pod.metadata.deletion_timestamp.is_none() => OwnPod::Stays,
        Ok(pod) => {
            let mut owners = pod.metadata.owner_references.iter().flatten();
            let is_owned = owners.any(|owner| owner.controller == Some(true));
            if is_owned { OwnPod::Replaced } else { OwnPod::Unowned }
        }
        Err(ApiError::NotFound(words)) if words.by_api => OwnPod::Gone,
        Err(failure) if failure.is_refusal() => OwnPod::Refused,
        Err(_) => OwnPod::Silent,
    }
}
