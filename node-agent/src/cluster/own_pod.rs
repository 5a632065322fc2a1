//! The agent's own pod, looked at when the agent ends and may not ask for its DaemonSet, as with the roles of Istio's own chart.

use std::time::{Duration, Instant};

use cluster_client::params::GetParams;
use cluster_client::{ApiError, Limits, PartialObjectMeta, Request};
use k8s_openapi::api::core::v1::Pod;

use super::{Cluster, Connection, PATIENCE, REFUSAL_PAUSE};
use crate::leave::OwnPod;

/// How long the agent waits for its rights to go. Uninstalling deletes the DaemonSet and the roles with one command, a few requests apart.
const UNINSTALL_PATIENCE: Duration = Duration::from_secs(5);
/// How long refusals have to last to be believed: older charts leave the agent five seconds in all.
const BELIEVED: Duration = Duration::from_secs(2);

impl Connection {
    /// What becomes of the agent's pod. A rollout and the deletion of the DaemonSet look the same in the pod, so the agent watches whether it
    /// loses its rights meanwhile; the last answer counts, because roles that are applied anew are missing for a moment.
    pub async fn own_pod_at_the_end(&self) -> OwnPod {
        let start = Instant::now();
        let (mut last, mut refused_since) = (OwnPod::Silent, None);
        loop {
            let seen = match self.get() {
                Ok(cluster) => cluster.own_pod().await,
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
            let is_believed = refused_since.is_some_and(|since| since.elapsed() >= BELIEVED);
            // A refusal of just now has still to last.
            let is_late = start.elapsed() >= UNINSTALL_PATIENCE && refused_since.is_none();
            if is_believed || is_late {
                return last;
            }
            tokio::time::sleep(REFUSAL_PAUSE).await;
        }
    }
}

impl Cluster {
    async fn own_pod(&self) -> OwnPod {
        let (namespace, name) = (&self.identity.namespace, &self.identity.pod);
        if namespace.is_empty() || name.is_empty() {
            return OwnPod::Unknown;
        }
        let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
        let request = pods.get_metadata(name, &GetParams::default());
        match self.client.json::<PartialObjectMeta<Pod>>(request, Limits::object(PATIENCE)).await {
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
}
