//! Repair in place: the redirection of a pod that is surely broken.

use netns_apply::capabilities::{NET_ADMIN, SYS_ADMIN, SYS_PTRACE};

use super::action::RepairOutcome;
use crate::pod_check::{ExpectedRules, MeshPod, RepairError, repair, require};
use crate::settings::Paths;

/// What it takes.
///
/// # Errors
/// The agent's container lacks something.
pub fn require_capabilities() -> Result<(), RepairError> {
    require([NET_ADMIN, SYS_ADMIN, SYS_PTRACE]).map_err(|missing| {
        let text = format!("the agent's container lacks {}", missing.join(" and "));
        RepairError::new("no_capability", text)
    })
}

/// Redirects a pod.
///
/// # Errors
/// It could not be.
pub async fn repair_pod(
    pod: MeshPod,
    rules: ExpectedRules,
    paths: Paths,
) -> Result<RepairOutcome, RepairError> {
    let repaired = tokio::task::spawn_blocking(move || repair(&pod, &rules, &paths)).await;
    let panicked = |error: tokio::task::JoinError| {
        RepairError::new("not_applied", format!("the repair panicked: {error}"))
    };
    Ok(RepairOutcome::Done(repaired.map_err(panicked)??.words()))
}
