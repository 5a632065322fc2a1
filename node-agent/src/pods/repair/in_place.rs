//! Repair in place: the redirection of a pod that is surely broken.

use cni_core::conf::Conf;
use netns_apply::Capability;
use reasons::AgentReason;
use serde_json::Value;

use super::action::RepairOutcome;
use super::confirm::meshed;
use crate::pods::check::{ExpectedRules, PodProblem, repair, require};
use crate::settings::Paths;

/// What it takes.
///
/// # Errors
/// The agent's container lacks something.
pub fn require_capabilities() -> Result<(), PodProblem> {
    require([Capability::NET_ADMIN, Capability::SYS_ADMIN, Capability::SYS_PTRACE]).map_err(|missing| {
        PodProblem::new(AgentReason::NoCapability, format!("the agent's container lacks {missing}"))
    })
}

/// Redirects a pod.
///
/// # Errors
/// It could not be.
pub async fn repair_pod(
    object: &Value,
    conf: &Conf,
    rules: ExpectedRules,
    paths: Paths,
) -> Result<RepairOutcome, PodProblem> {
    can_restart(object)?;
    let pod = meshed(object, conf)?;
    let repaired = tokio::task::spawn_blocking(move || repair(&pod, &rules, &paths)).await;
    let panicked = |error: tokio::task::JoinError| {
        PodProblem::new(AgentReason::NotApplied, format!("the repair panicked: {error}"))
    };
    Ok(RepairOutcome::Done(repaired.map_err(panicked)??.words()))
}

/// A pod that has ended stays as it is.
fn can_restart(pod: &Value) -> Result<(), PodProblem> {
    match pod.pointer("/status/phase").and_then(Value::as_str) {
        Some(phase @ ("Failed" | "Succeeded")) => {
            let text = format!(
                "the pod has ended ({phase}) and will not run again; only another pod can be redirected"
            );
            Err(PodProblem::new(AgentReason::Ended, text))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::check::MeshPod;
    use cni_core::conf::Envelope;
    use cni_core::wire::CniCommand;
    use serde_json::json;

    fn target(pod: &Value) -> Result<MeshPod, AgentReason> {
        let conf =
            br#"{"cniVersion":"1.0.0","name":"n","type":"istio-cni","exclude_namespaces":["kube-system"]}"#;
        let conf = Envelope::read(conf, CniCommand::Add).expect("JSON").conf().expect("a configuration");
        can_restart(pod).and_then(|()| meshed(pod, &conf)).map_err(|error| error.reason)
    }

    #[test]
    fn only_a_pod_that_the_plugin_would_redirect_is_redirected_in_place() {
        let pod = json!({"metadata": {"namespace": "shop", "name": "web", "uid": "u-1", "annotations": {"sidecar.istio.io/status": "{}"}},
            "spec": {"containers": [{"name": "istio-proxy", "args": ["proxy", "sidecar"]}]},
            "status": {"phase": "Pending", "podIPs": [{"ip": "10.1.0.2"}, {"ip": "fd00::2"}]}});
        let good = target(&pod).expect("a pod of the mesh");
        assert_eq!((good.uid.as_str(), good.addresses.len()), ("u-1", 2));
        for (pointer, value, reason) in [
            ("/spec/hostNetwork", json!(true), AgentReason::NotMeshed),
            ("/status/phase", json!("Failed"), AgentReason::Ended),
            ("/status/phase", json!("Succeeded"), AgentReason::Ended),
            ("/metadata/namespace", json!("kube-system"), AgentReason::NotMeshed),
            ("/metadata/annotations", json!({}), AgentReason::NotMeshed),
            ("/spec/initContainers", json!([{"name": "istio-init"}]), AgentReason::NotMeshed),
            ("/spec/containers", json!([{"name": "app"}]), AgentReason::NotMeshed),
            ("/spec/containers", json!(7), AgentReason::NotMeshed),
        ] {
            let mut pod = pod.clone();
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            pod.pointer_mut(parent).expect("a parent")[key] = value;
            assert_eq!(target(&pod).err(), Some(reason), "{pointer}");
        }
    }
}
