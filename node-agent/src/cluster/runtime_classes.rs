//! Which runtime classes are sandboxed: by their names or, where a name is unknown, by their handlers.

use std::collections::BTreeSet;

use cluster_client::params::GetParams;
use cluster_client::{ApiError, Limits, Request};
use cni_core::sandboxed::{RUNTIME_CLASSES, SandboxedRuntimes};
use serde_json::Value;

use super::{Cluster, PATIENCE};

/// Those of some runtime classes that are sandboxed: one request for each whose name does not say it. Where the API server does not let the agent read
/// one, or has none, its name alone decides, as for the plugin.
///
/// # Errors
/// The API server does not answer.
pub async fn sandboxed<'a>(
    cluster: &Cluster,
    known: &SandboxedRuntimes,
    classes: impl Iterator<Item = &'a str>,
) -> Result<BTreeSet<String>, ApiError> {
    let classes: BTreeSet<&str> = classes.collect();
    let mut sandboxed = BTreeSet::new();
    for class in classes {
        if known.has(class) || handler(cluster, class).await?.is_some_and(|handler| known.has(&handler)) {
            sandboxed.insert(class.to_owned());
        }
    }
    Ok(sandboxed)
}

async fn handler(cluster: &Cluster, class: &str) -> Result<Option<String>, ApiError> {
    let request = Request::new(RUNTIME_CLASSES).get(class, &GetParams::default());
    match cluster.client().json::<Value>(request, Limits::object(PATIENCE)).await {
        Ok(found) => Ok(found.get("handler").and_then(Value::as_str).map(str::to_owned)),
        Err(ApiError::Forbidden(_) | ApiError::NotFound(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}
