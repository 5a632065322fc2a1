//! Pods that exist at an API server only, and whose validation has failed: what agents repair.

use serde_json::{Value, json};

/// A pod of the mesh with this name in the namespace `default`, on a node.
pub fn pod(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "web"},
            "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {
            "nodeName": node, "terminationGracePeriodSeconds": 0,
            "initContainers": [{"name": "istio-validation", "image": "proxy"}],
            "containers": [{"name": "app", "image": "app"}, {"name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar"]}],
        },
    })
}

/// The status with which a kubelet reports it held back.
pub fn held_back() -> Value {
    let time = "2026-11-21T00:00:00Z";
    let end = json!({"terminated": {"exitCode": 126, "reason": "Error", "startedAt": time, "finishedAt": time,
        "containerID": "containerd://1"}});
    json!({"status": {"phase": "Pending", "podIP": "10.1.0.2", "podIPs": [{"ip": "10.1.0.2"}],
        "initContainerStatuses": [{"name": "istio-validation", "image": "proxy", "imageID": "proxy", "ready": false,
            "restartCount": 0, "state": end}]}})
}
