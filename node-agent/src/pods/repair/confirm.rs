//! Whether a pod that was seen broken still is one that can be helped, whatever the action: a replacement of a pod that the plugin skips
//! fails as well, and so does one that starts while the plugin is not installed.

use agent_runtime::resync::ReadError;
use cni_core::conf::Conf;
use cni_core::pod_source::PodName;
use reasons::{AgentReason, PodState};
use serde_json::Value;

use super::action::RepairOutcome;
use super::filter::{Broken, BrokenPodFilter};
use crate::cluster::runtime_classes::RuntimeHandlers;
use crate::cluster::{Cluster, pods};
use crate::parts::AgentParts;
use crate::pods::check::{MeshPod, PodProblem};

/// A pod as it is now.
pub struct Confirmed {
    /// What shows that it is broken.
    pub broken: Broken,
    /// Its object.
    pub object: Value,
    /// The plugin's configuration.
    pub conf: Conf,
}

/// Reads a broken pod again.
///
/// # Errors
/// It is not to be touched, now or at all.
pub async fn confirm(
    cluster: &Cluster,
    parts: &AgentParts,
    filter: &BrokenPodFilter,
    seen: &Broken,
) -> Result<Confirmed, RepairOutcome> {
    let conf = parts.installer.plugin_conf().map_err(|error| {
        PodProblem::new(AgentReason::NoEntry, format!("the plugin's entry cannot be read: {error}"))
    })?;
    let PodName { namespace, name } = &seen.observed.name;
    let pod = pods::get(cluster, namespace, name).await.map_err(|error| unread(&error))?;
    let object = pod.ok_or(RepairOutcome::Gone)?;
    let broken = match filter.check(&object) {
        Ok(now) if now.observed.uid == seen.observed.uid => now,
        Ok(_) => return Err(RepairOutcome::Gone),
        Err(_) => return Err(RepairOutcome::Changed),
    };
    // Settings that name another annotation say by that which pods are meant.
    if filter.annotation == redirect_core::pod::PodFacts::STATUS_ANNOTATION {
        let pod = meshed(&object, &conf)?;
        bound(cluster, &parts.handlers, &conf, &pod).await?;
    }
    Ok(Confirmed { broken, object, conf })
}

/// Whether rules bind a pod: repairing one in a sandbox would be in vain, and so would another pod in its place.
async fn bound(
    cluster: &Cluster,
    handlers: &RuntimeHandlers,
    conf: &Conf,
    pod: &MeshPod,
) -> Result<(), RepairOutcome> {
    let sandboxed = handlers.sandboxed(cluster, &conf.sandboxed, pod.runtime_class.as_deref().into_iter());
    let sandboxed = sandboxed.await.map_err(|failure| RepairOutcome::Unanswered {
        retry_after: failure.retry_after(),
        text: failure.to_string(),
    })?;
    match sandboxed.first() {
        None => Ok(()),
        Some(class) => {
            let text = format!(
                "the runtime of runtimeClassName {class} is sandboxed: rules do not bind it; {}",
                PodState::Sandboxed.remedy()
            );
            Err(PodProblem::new(AgentReason::Sandboxed, text).into())
        }
    }
}

fn unread(error: &ReadError) -> RepairOutcome {
    match error {
        ReadError::Denied { .. } => PodProblem::new(
            AgentReason::Refused,
            format!("{error}; give the agent's service account the verb get on pods (ClusterRole istio-cni)"),
        )
        .into(),
        ReadError::NoClient(_) | ReadError::Expired | ReadError::Failed { .. } => {
            RepairOutcome::Unanswered { text: error.to_string(), retry_after: error.retry_after() }
        }
    }
}

/// What of a pod decides how it is redirected.
///
/// # Errors
/// The plugin would not redirect it.
pub fn meshed(pod: &Value, conf: &Conf) -> Result<MeshPod, PodProblem> {
    MeshPod::read(pod, conf).map_err(|why| PodProblem::new(AgentReason::NotMeshed, why))
}
