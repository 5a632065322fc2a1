//! What the chart starts, on a real node.
//!
//! `make test-cluster` and `make chart` build Helm and run this.

use std::collections::BTreeSet;

use crate::agent_support::{
    LOOPBACK, POD, agent_pod, apply_manifest, assert_redirected, ensure_redirectctl_works, entries,
    import_image, import_image_as, is_ready, metric, wait_loaded, wait_rolled_out,
};
use crate::chart_support::{NAMESPACE, chart, release, rendered_without_tests};
use anyhow::{Context, Result, ensure};
use e2e::broken;
use e2e::kube::{ApiServer, Controllers};
use e2e::node::{Node, sidecar_pod};
use serde_json::{Value, json};
use test_support::process::until;

/// The agent's own profile.
const PROFILE: &str = include_str!("../../../../deploy/seccomp/install-cni.json");
const PRIVILEGES: &str = include_str!("../../../../docs/reference/privileges.md");

#[test]
fn the_charts_defaults_run_an_agent_that_is_ready_and_has_nothing_to_complain_of() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let daemon_set = apply_manifest(&api, &node, &rendered_without_tests(&json!({}))?)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;
    let pod = node.start_pod(&sidecar_pod("web"))?;
    pod.wait_running(POD)?;
    assert_redirected(&node, &pod)?;
    let log = agent.log("install-cni")?;
    ensure!(!log.contains("\twarn\t") && !log.contains("\terror\t"), "{log}");
    // No proxy listens in it.
    ensure_redirectctl_works(&agent, &[("web", "verified")])?;
    ensure_the_page_tells_of_the_runtimes_profile(&node)
}

/// The calls that containerd's profile lets the agent make, whatever their arguments are: as many as docs/reference/privileges.md says, give or take what another
/// version of containerd brings.
fn ensure_the_page_tells_of_the_runtimes_profile(node: &Node<'_>) -> Result<()> {
    let agents =
        node.ctr(&["containers", "list", "-q", "labels.\"io.kubernetes.container.name\"==install-cni"])?;
    let info: Value = serde_json::from_str(&node.ctr(&["containers", "info", agents.stdout.trim()])?.stdout)?;
    let rules =
        info.pointer("/Spec/linux/seccomp/syscalls").and_then(Value::as_array).context("no profile")?;
    let allowing = rules.iter().filter(|rule| rule["action"] == "SCMP_ACT_ALLOW" && rule["args"].is_null());
    let names = allowing.flat_map(|rule| rule["names"].as_array().into_iter().flatten());
    let names: BTreeSet<&str> = names.filter_map(Value::as_str).collect();
    for name in ["mount", "bpf", "perf_event_open"] {
        ensure!(names.contains(name), "{name} is not let through");
    }
    let page = PRIVILEGES.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, told) = page.split_once("the runtime's profile, which lets through ").context("no number")?;
    let told: usize = told.split(' ').next().unwrap_or_default().parse()?;
    ensure!(told.abs_diff(names.len()) <= 20, "{} calls are let through, the page says {told}", names.len());
    Ok(())
}

/// With all that needs a capability switched on, the capabilities that the chart gives for that, and the profile of `deploy/seccomp`.
#[test]
fn the_agent_installs_probes_and_heals_under_its_own_seccomp_profile() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    node.write_seccomp_profile("install-cni.json", PROFILE)?;
    let values = json!({
        "seccompProfile": {"type": "Localhost", "localhostProfile": "install-cni.json"},
        "driftWatch": {"interval": "2s", "heal": true},
        "nodeCondition": {"enabled": true},
    });
    let daemon_set = apply_manifest(&api, &node, &rendered_without_tests(&values)?)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;
    let pod = node.start_pod(&sidecar_pod("web"))?;
    pod.wait_running(POD)?;
    assert_redirected(&node, &pod)?;
    let at_least_one = |name: &str| {
        until(name, POD, &[], || Ok(metric(&node, name)?.is_some_and(|value| value >= 1.0).then_some(())))
            .with_context(|| agent.log("install-cni").unwrap_or_default())
    };
    at_least_one("istio_cni_node_probes_total{result=\"redirected\"}")?;
    at_least_one("istio_cni_heal_watched_pods")?;
    pod.namespace()?.sh("iptables-nft -t nat -F OUTPUT")?.ok()?;
    at_least_one("istio_cni_heal_attempts_total{reason=\"healed\"}")?;
    let log = agent.log("install-cni")?;
    ensure!(!log.contains("not permitted") && !log.contains("\terror\t"), "{log}");
    ensure_redirectctl_works(&agent, &[("web", "verified")])
}

/// Agents lose their rights with the release, before they end.
#[test]
fn helm_uninstall_leaves_no_condition_taint_or_label() -> Result<()> {
    const TAINT: &str = "cni.istio.io/not-ready";
    const VALUES: &str = "nodeTaint.enabled=true,repair.repairPods=false,repair.labelPods=true";
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    let node = Node::joined(&api)?;
    let _service = node.as_usual()?;
    let controllers = Controllers::start_with(&api, &["job-controller"])?;
    import_image_as(&node, concat!("localhost/install-cni:", env!("CARGO_PKG_VERSION")), "")?;
    release(&api, "install", &[&chart().display().to_string(), "--set", VALUES])?.ok()?;
    wait_rolled_out(&api, &node, &controllers)?;
    let marks = || -> Result<(bool, bool)> {
        let object = api.get("node", "", node.name())?;
        let has = |list: &str, key: &str, value: &str| {
            let list = object.pointer(list).and_then(Value::as_array);
            list.into_iter().flatten().any(|one| one[key] == value)
        };
        Ok((has("/status/conditions", "type", "cni.istio.io/Ready"), has("/spec/taints", "key", TAINT)))
    };
    until("the condition without the taint", POD, &controllers.processes(), || {
        Ok((marks()? == (true, false)).then_some(()))
    })?;
    // The agent does not see it before its end: it reads its node once in a minute.
    api.kubectl(&["taint", "nodes", node.name(), &format!("{TAINT}:NoSchedule")])?;
    // As the agent of another node left it.
    api.create(&broken::pod("broken", "elsewhere"))?;
    api.kubectl(&["-n", "default", "label", "pod", "broken", "cni.istio.io/uninitialized=true"])?;

    release(&api, "uninstall", &[])?.ok()?;
    let pod = api.get("pod", "default", "broken")?;
    ensure!(pod["metadata"]["labels"] == json!({"app": "web"}), "{pod}");
    ensure!(marks()? == (false, false), "{:?} {}", marks()?, api.get("node", "", node.name())?);
    ensure!(!entries(&node)?.contains("istio-cni"), "{}", entries(&node)?);
    for kinds in ["daemonsets,jobs,pods,serviceaccounts,roles", "clusterroles,clusterrolebindings"] {
        let left = api.list(kinds, if kinds.contains("jobs") { NAMESPACE } else { "" })?;
        let mut names = left.iter().filter_map(|object| object["metadata"]["name"].as_str());
        ensure!(!names.any(|name| name.starts_with("istio-cni")), "{left:#?}");
    }
    Ok(())
}
