//! The Lease at the API server: written only as it was seen.

use std::time::Duration;

use agent_runtime::BootTime;
use agent_runtime::cluster::Cluster;
use cluster_client::params::{GetParams, PostParams};
use cluster_client::{ApiError, Request};
use k8s_openapi::jiff::{Timestamp, Unit};
use serde_json::Value;

use crate::election::{Candidate, LeaseWrite};

/// How long a request may take. With [`crate::election::ACTS`] it is less than the lease.
const PATIENCE: Duration = Duration::from_secs(3);

/// How a round of the election ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// The Lease is ours for another while.
    Won,
    /// Another replica has it.
    Waits,
    /// Another replica wrote it at this moment.
    Conflict,
}

/// One round: reads the Lease, and creates, renews or takes it if that is allowed.
///
/// # Errors
/// The API server does not answer, or refuses.
pub async fn round(cluster: &Cluster, candidate: &mut Candidate) -> Result<Round, ApiError> {
    let (path, name) = (path(candidate), candidate.name.clone());
    let leases = || Request::new(path.as_str());
    let asked = BootTime::now();
    let get = leases().get(&name, &GetParams::default());
    let found = cluster.client().find::<Value>(get, PATIENCE).await?;
    let step = candidate.consider(found.as_ref(), BootTime::now(), &time());
    let request = match &step {
        LeaseWrite::Wait => {
            candidate.lost();
            return Ok(Round::Waits);
        }
        LeaseWrite::Create(lease) => leases().create(&PostParams::default(), lease.to_string().into_bytes()),
        LeaseWrite::Replace(lease) => {
            leases().replace(&name, &PostParams::default(), lease.to_string().into_bytes())
        }
    };
    match cluster.client().json::<Value>(request, PATIENCE).await {
        Ok(_) => {
            candidate.won(asked);
            Ok(Round::Won)
        }
        Err(ApiError::Busy { code: 409, .. }) => {
            candidate.lost();
            Ok(Round::Conflict)
        }
        Err(failure) => Err(failure),
    }
}

/// Releases the Lease, so that another replica need not wait until it expires. A failure does not matter.
pub async fn step_down(cluster: &Cluster, candidate: &Candidate) {
    let leases = || Request::new(path(candidate));
    let get = leases().get(&candidate.name, &GetParams::default());
    let Ok(found) = cluster.client().json::<Value>(get, PATIENCE).await else { return };
    if let Some(lease) = candidate.release_lease(&found, &time()) {
        let request =
            leases().replace(&candidate.name, &PostParams::default(), lease.to_string().into_bytes());
        let _ = cluster.client().json::<Value>(request, PATIENCE).await;
    }
}

fn path(candidate: &Candidate) -> String {
    format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", candidate.namespace)
}

/// The time as the API server writes it in a Lease.
fn time() -> String {
    let now = Timestamp::now();
    let now = now.round(Unit::Microsecond).unwrap_or(now);
    format!("{now:.6}")
}
