//! Whether a pod that was seen broken still is one that can be helped, whatever the action: a replacement of a pod that the plugin skips
//! fails as well, and so does one that starts while the plugin is not installed.

use cni_core::conf::Conf;
use controller_runtime::resync::ReadError;
use serde_json::Value;

use super::action::RepairOutcome;
use super::filter::{Broken, BrokenCheck, Filter};
use crate::cluster::{Cluster, pods};
use crate::install::Installer;
use crate::pod_check::{MeshPod, NotMeshed, RepairError, plugin_conf};

/// A pod as it is now.
pub struct Confirmed {
    /// What shows that it is broken.
    pub broken: Broken,
    /// What of it decides how it is redirected.
    pub pod: MeshPod,
    /// The plugin's configuration.
    pub conf: Conf,
}

/// Reads a broken pod again.
///
/// # Errors
/// It is not to be touched, now or at all.
pub async fn confirm(
    cluster: &Cluster,
    installer: &Installer,
    filter: &Filter,
    seen: &Broken,
) -> Result<Confirmed, RepairOutcome> {
    let conf = plugin_conf(installer).map_err(|error| {
        RepairError::new("no_entry", format!("the plugin's entry cannot be read: {error}"))
    })?;
    let pod =
        pods::get(cluster, &seen.name.namespace, &seen.name.name).await.map_err(|error| unread(&error))?;
    let object = pod.ok_or(RepairOutcome::Gone)?;
    let broken = match filter.check(&object) {
        BrokenCheck::Broken(now) if now.uid == seen.uid => *now,
        BrokenCheck::Broken(_) => return Err(RepairOutcome::Gone),
        BrokenCheck::Sound(_) => return Err(RepairOutcome::Changed),
    };
    can_restart(&object)?;
    let pod = MeshPod::read(&object, &conf).map_err(not_meshed)?;
    Ok(Confirmed { broken, pod, conf })
}

fn unread(error: &ReadError) -> RepairOutcome {
    match error {
        ReadError::Denied { .. } => RepairError::new(
            "refused",
            format!("{error}; give the agent's service account the verb get on pods (ClusterRole istio-cni)"),
        )
        .into(),
        ReadError::NoClient(_) | ReadError::Expired | ReadError::Failed { .. } => {
            RepairOutcome::Unanswered { text: error.to_string(), retry_after: error.retry_after() }
        }
    }
}

/// A pod that has ended stays as it is.
fn can_restart(pod: &Value) -> Result<(), RepairError> {
    match pod.pointer("/status/phase").and_then(Value::as_str) {
        Some(phase @ ("Failed" | "Succeeded")) => {
            let text = format!(
                "the pod has ended ({phase}) and will not run again; only another pod can be redirected"
            );
            Err(RepairError::new("ended", text))
        }
        Some(_) | None => Ok(()),
    }
}

fn not_meshed(why: NotMeshed) -> RepairError {
    RepairError::new("not_meshed", why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::conf::Envelope;
    use cni_core::wire::Command;
    use serde_json::json;

    fn target(pod: &Value) -> Result<MeshPod, &'static str> {
        let conf =
            br#"{"cniVersion":"1.0.0","name":"n","type":"istio-cni","exclude_namespaces":["kube-system"]}"#;
        let conf = Envelope::read(conf, Command::Add).expect("JSON").conf().expect("a configuration");
        can_restart(pod)
            .and_then(|()| MeshPod::read(pod, &conf).map_err(not_meshed))
            .map_err(|error| error.reason)
    }

    #[test]
    fn only_a_pod_that_the_plugin_would_redirect_is_redirected_in_place() {
        let pod = json!({"metadata": {"namespace": "shop", "name": "web", "uid": "u-1", "annotations": {"sidecar.istio.io/status": "{}"}},
            "spec": {"containers": [{"name": "istio-proxy", "args": ["proxy", "sidecar"]}]},
            "status": {"phase": "Pending", "podIPs": [{"ip": "10.1.0.2"}, {"ip": "fd00::2"}]}});
        let good = target(&pod).expect("a pod of the mesh");
        assert_eq!((good.uid.as_str(), good.addresses.len()), ("u-1", 2));
        for (pointer, value, reason) in [
            ("/spec/hostNetwork", json!(true), "not_meshed"),
            ("/status/phase", json!("Failed"), "ended"),
            ("/status/phase", json!("Succeeded"), "ended"),
            ("/metadata/namespace", json!("kube-system"), "not_meshed"),
            ("/metadata/annotations", json!({}), "not_meshed"),
            ("/spec/initContainers", json!([{"name": "istio-init"}]), "not_meshed"),
            ("/spec/containers", json!([{"name": "app"}]), "not_meshed"),
            ("/spec/containers", json!(7), "not_meshed"),
        ] {
            let mut pod = pod.clone();
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            pod.pointer_mut(parent).expect("a parent")[key] = value;
            assert_eq!(target(&pod).err(), Some(reason), "{pointer}");
        }
    }
}
