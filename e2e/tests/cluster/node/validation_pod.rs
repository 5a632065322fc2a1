//! `istio-validation` in a pod of a real kubelet, as the injector writes it (`manifests/validated-pod.yaml`): it holds
//! the pod back, says why in the termination message, and lets it start once it is programmed.

use e2e::iptables;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::node::Node;
use e2e::validation::{INJECTED, MANIFEST, image};
use serde_json::Value;

/// How long the kubelet may take to start, or start again, a container on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// How the container has ended, now or before it was started again, if that was with this exit code.
fn ended(pod: &Value, code: i64) -> Option<Value> {
    let mut statuses = pod["status"]["initContainerStatuses"].as_array()?.iter();
    let status = statuses.find(|status| status["name"] == "istio-validation")?;
    let ends = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
    let message = ends.into_iter().find(|end| end["exitCode"] == code)?["message"].as_str()?;
    serde_json::from_str(message).ok()
}

#[test]
fn a_pod_is_held_back_until_it_is_programmed() -> Result<()> {
    let node = Node::standalone()?;
    node.import(&image()?)?;
    let waiting = node.manifest_dir().join("validated.yaml");
    fs::write(&waiting, MANIFEST)?;
    let pod = node.pod("default", &format!("validated-{}", node.name()));

    // It is started repeatedly; the machine may have stood still while one of them looked for an address.
    let verdict = pod.wait("to be held back without rules", PATIENCE, |pod| {
        ended(pod, 126).filter(|verdict| verdict["reason"] == "no-rules")
    })?;
    assert_eq!((verdict["uid"].as_u64(), verdict["gid"].as_u64()), (Some(1337), Some(1337)));
    let families: Vec<&Value> =
        verdict["checks"].as_array().context("checks")?.iter().map(|c| &c["family"]).collect();
    assert!(families.contains(&&"IPv4".into()) && families.contains(&&"IPv6".into()), "{verdict:#}");

    // What repair does.
    let namespace = pod.namespace()?;
    iptables::apply(&namespace, &format!("{INJECTED} --dual-stack --redirect-dns --capture-all-dns"))?;
    pod.wait_running(PATIENCE)?;
    let object = pod.object()?.context("the pod is there")?;
    let verdict = ended(&object, 0).with_context(|| format!("{:#}", object["status"]))?;
    assert_eq!(verdict["reason"], "redirected", "{verdict:#}");
    fs::remove_file(waiting)?;
    Ok(())
}
