//! Repair in place: whether a broken pod still is one, and its redirection.

use std::sync::Arc;

use controller_runtime::resync::ReadError;
use netns_apply::capabilities::{NET_ADMIN, SYS_ADMIN, SYS_PTRACE};
use serde_json::Value;
use tokio::sync::watch::Receiver;

use super::action::RepairOutcome;
use super::filter::{Broken, BrokenCheck, Filter};
use crate::cluster::{Cluster, pods};
use crate::install::Installer;
use crate::pod_check::{
    ExpectedRules, MeshPod, NotMeshed, RepairError, RepairReport, plugin_conf, repair, require,
};
use crate::settings::{DriftSettings, Paths, Settings};

/// Redirects pods in place.
pub struct InPlaceRepairer {
    installer: Arc<Installer>,
    paths: Paths,
    /// The container runtime's environment is part of it, and may change while the agent runs.
    drift: Receiver<DriftSettings>,
}

impl InPlaceRepairer {
    /// Reads nothing yet.
    #[must_use]
    pub fn new(settings: &Settings, drift: Receiver<DriftSettings>, installer: Arc<Installer>) -> Self {
        Self { installer, paths: settings.paths.clone(), drift }
    }

    /// Redirects a broken pod, if it is still broken.
    pub async fn repair(&self, cluster: &Cluster, filter: &Filter, broken: &Broken) -> RepairOutcome {
        match self.try_repair(cluster, filter, broken).await {
            Ok(report) => RepairOutcome::Done(report.words()),
            Err(outcome) => outcome,
        }
    }

    async fn try_repair(
        &self,
        cluster: &Cluster,
        filter: &Filter,
        broken: &Broken,
    ) -> Result<RepairReport, RepairOutcome> {
        require([NET_ADMIN, SYS_ADMIN, SYS_PTRACE]).map_err(|missing| {
            let text = format!("the agent's container lacks {}", missing.join(" and "));
            RepairError::new("no_capability", text)
        })?;
        let conf = plugin_conf(&self.installer).map_err(|error| {
            RepairError::new("no_entry", format!("the plugin's entry cannot be read: {error}"))
        })?;
        // Its addresses may have changed since its container failed.
        let pod = pods::get(cluster, &broken.name.namespace, &broken.name.name)
            .await
            .map_err(|error| unread(&error))?;
        let pod = pod.ok_or(RepairOutcome::Gone)?;
        match filter.check(&pod) {
            BrokenCheck::Broken(now) if now.uid == broken.uid => {}
            BrokenCheck::Broken(_) => return Err(RepairOutcome::Gone),
            BrokenCheck::Sound(_) => return Err(RepairOutcome::Changed),
        }
        can_restart(&pod)?;
        let pod = MeshPod::read(&pod, &conf).map_err(not_meshed)?;
        let rules = ExpectedRules::of(&conf, &self.drift.borrow().environment);
        let paths = self.paths.clone();
        let repaired = tokio::task::spawn_blocking(move || repair(&pod, &rules, &paths)).await;
        let panicked = |error: tokio::task::JoinError| {
            RepairError::new("not_applied", format!("the repair panicked: {error}"))
        };
        Ok(repaired.map_err(panicked)??)
    }
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
