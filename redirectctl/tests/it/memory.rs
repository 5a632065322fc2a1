//! What a scan of many pods takes. A test file of its own: the kernel tells the most that any child of a process took.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::process::Command;

use nix::sys::resource::{UsageWho, getrusage};
use serde_json::json;
use test_support::netns::{Families, Namespace};
use test_support::sample;

/// How many pods, fewer where not all are asked for, and the most that their scan takes, in KiB. Up to 40 MiB of it is the program, as much as the kernel maps.
const SCANS: [(usize, i64); 2] = [(4_000, 56 << 10), (20_000, 100 << 10)];

/// A pod about as large as they are in a cluster, with words for what each has of its own.
fn template() -> String {
    let probe = json!({"httpGet": {"path": "/app-health/cart/livez", "port": 15020}, "periodSeconds": 10, "failureThreshold": 3});
    let mounts = json!([{"mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "name": "kube-api-access-NUMBER", "readOnly": true}]);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "cart-NUMBER", "namespace": "shop-NAMESPACE", "uid": "00000000-0000-0000-0000-00000NUMBER",
            "annotations": {"sidecar.istio.io/status": "{\"initContainers\":[\"istio-validation\"],\"containers\":[\"istio-proxy\"]}",
                "traffic.sidecar.istio.io/excludeOutboundPorts": "3306"},
            "labels": {"app": "cart", "pod-template-hash": "5d4f8c7b9", "security.istio.io/tlsMode": "istio"},
        },
        "spec": {
            "nodeName": "n1",
            "tolerations": [{"effect": "NoExecute", "key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300},
                {"effect": "NoExecute", "key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 300}],
            "volumes": [{"name": "kube-api-access-NUMBER", "projected": {"defaultMode": 420, "sources": [
                {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                {"configMap": {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": "kube-root-ca.crt"}},
                {"downwardAPI": {"items": [{"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}, "path": "namespace"}]}}]}},
                {"name": "istio-token", "projected": {"sources": [{"serviceAccountToken": {"audience": "istio-ca", "expirationSeconds": 43200, "path": "istio-token"}}]}}],
            "containers": [
                {"name": "app", "image": "registry.example/shop/cart:1.2.3", "ports": [{"containerPort": 8080}], "livenessProbe": probe, "volumeMounts": mounts},
                {"name": "istio-proxy", "image": "registry.example/istio/proxyv2:1.29.0", "args": ["proxy", "sidecar", "--domain", "$(POD_NAMESPACE).svc.cluster.local"],
                    "env": [{"name": "PILOT_CERT_PROVIDER", "value": "istiod"}], "volumeMounts": mounts},
            ],
        },
        "status": {"phase": "Running", "podIP": "ADDRESS", "podIPs": [{"ip": "ADDRESS"}], "conditions": [{"type": "Ready", "status": "True"}]},
    })
    .to_string()
}

#[test]
fn a_scan_of_many_pods_takes_little_memory() {
    let (pods, most) = SCANS[usize::from(sample::is_whole())];
    let there = Namespace::pod(Families::V4).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("pods.json");
    let mut file = BufWriter::new(File::create(&manifest).unwrap());
    file.write_all(br#"{"apiVersion": "v1", "kind": "List", "items": ["#).unwrap();
    let template = template();
    for number in 0..pods {
        let comma = if number == 0 { "" } else { "," };
        let address = format!("10.{}.{}.{}", 64 + number / 62_500, number / 250 % 250, number % 250 + 1);
        let namespace = (number % 100).to_string();
        let pod = template.replace("NUMBER", &format!("{number:07}")).replace("NAMESPACE", &namespace);
        write!(file, "{comma}{}", pod.replace("ADDRESS", &address)).unwrap();
    }
    file.write_all(b"]}").unwrap();
    file.flush().unwrap();
    let size = manifest.metadata().unwrap().len();
    assert!(size > pods as u64 * 1_750, "{size}");
    let output = Command::new(env!("CARGO_BIN_EXE_redirectctl"))
        .arg("scan")
        .arg("-f")
        .arg(&manifest)
        .arg("--netns-dir")
        .arg(there.path().parent().unwrap())
        .arg("--cni-conf-dir")
        .arg(folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains(&format!("{pods} unknown")),
        "{} {}",
        text.len(),
        String::from_utf8_lossy(&output.stderr)
    );
    let taken = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    println!("{pods} pods: {taken} KiB");
    assert!(taken < most, "{taken} KiB");
}
