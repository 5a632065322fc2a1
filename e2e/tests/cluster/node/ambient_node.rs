//! Ambient mode on a real node: what the manifest starts, the plugin that a runtime calls, and a stand-in for ztunnel.

use crate::agent_support::{
    GATEWAY, LOOPBACK, MANIFEST, POD, agent_pod, apply_manifest, assert_redirected, import_image, is_ready,
    readyz, run_dir, wait_loaded,
};
use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{Node, Pod, plain_pod, sidecar_pod};
use e2e::ztunnel::Obedient;
use serde_json::{Value, json};
use test_support::process::until;

/// The manifest with ambient mode switched on, as its head says.
fn manifest() -> String {
    MANIFEST.replace("# ambient: ", "")
}

fn wait_for_words(node: &Node<'_>, words: &str) -> Result<()> {
    let waited = until(words, POD, &[], || Ok(readyz(node, "?verbose")?.contains(words).then_some(())));
    waited.with_context(|| readyz(node, "?verbose").unwrap_or_default())
}

/// What the pod's annotation says at the API server.
fn annotation(api: &ApiServer, name: &str) -> Result<Value> {
    Ok(api.get("pod", "default", name)?["metadata"]["annotations"]["ambient.istio.io/redirection"].clone())
}

fn uid(api: &ApiServer, pod: &Pod<'_>) -> Result<String> {
    let pod = api.get("pod", "default", pod.name())?;
    Ok(pod["metadata"]["uid"].as_str().context("a UID")?.to_owned())
}

fn decision(node: &Node<'_>, name: &str) -> Result<Option<String>> {
    let log = std::fs::read_to_string(run_dir(node).join("istio-cni.log"))?;
    let about = format!("\"default/{name}\"");
    let line = log.lines().rfind(|line| line.contains(&about) && line.contains("\"decision\""));
    let line: Option<Value> = line.map(serde_json::from_str).transpose()?;
    Ok(line.and_then(|line| line["decision"].as_str().map(str::to_owned)))
}

fn has_rules(pod: &Pod<'_>) -> Result<bool> {
    let listed = pod.namespace()?.sh("iptables-nft-save; nft list tables")?.ok()?.stdout;
    Ok(listed.contains("ISTIO_PRERT") || listed.contains("istio-ambient"))
}

#[test]
fn ambient_pods_start_enrolled_and_wait_where_ztunnel_is_missing_and_leave_with_their_label() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let daemon_set = apply_manifest(&api, &node, &manifest())?;
    // Older than the agent.
    let older = node.start_pod(&plain_pod("older"))?;
    older.wait_running(POD)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;
    let with_log = |what: &str| format!("{what}: {}", agent.log("install-cni").unwrap_or_default());

    let ztunnel = Obedient::start(node.file("/run/ztunnel/ztunnel.sock"));
    api.kubectl(&["label", "namespace", "default", "istio.io/dataplane-mode=ambient"])?;
    wait_for_words(&node, "1 of 1 ambient pods enrolled").with_context(|| with_log("the older pod"))?;
    ensure!(annotation(&api, "older")? == "enabled" && has_rules(&older)?);

    let web = node.start_pod(&plain_pod("web"))?;
    web.wait_running(POD).with_context(|| with_log("a new pod"))?;
    ensure!(decision(&node, "web")?.as_deref() == Some("enrol"));
    ensure!(ztunnel.served().contains_key(&uid(&api, &web)?), "{:?}", ztunnel.served());
    wait_for_words(&node, "2 of 2 ambient pods enrolled")?;
    ensure!(has_rules(&web)?);

    // A sidecar stays with its proxy.
    let meshed = node.start_pod(&sidecar_pod("meshed"))?;
    meshed.wait_running(POD)?;
    ensure!(decision(&node, "meshed")?.as_deref() == Some("redirect"));
    assert_redirected(&node, &meshed)?;
    ensure!(annotation(&api, "meshed")?.is_null());

    // Without ztunnel no ambient pod starts, and the kubelet's event says why; with the next one it does.
    drop(ztunnel);
    let held = node.start_pod(&plain_pod("held"))?;
    // The agent of a busy node may say so after the plugin has given up; the runtime tries again.
    let told = until("the kubelet to name ztunnel", POD, &[], || {
        let told = held.wait_sandbox_failure(POD)?;
        Ok(told.contains("ztunnel").then_some(told))
    })?;
    ensure!(told.contains("in ambient mode"), "{told}");
    let ztunnel = Obedient::start(node.file("/run/ztunnel/ztunnel.sock"));
    held.wait_running(POD).with_context(|| with_log("a pod that was held back"))?;
    wait_for_words(&node, "3 of 3 ambient pods enrolled")?;

    // A pod that is deleted is dropped; the rest leave with the label.
    let gone = uid(&api, &web)?;
    web.delete(POD)?;
    until("ztunnel to drop the pod", POD, &[], || Ok((!ztunnel.served().contains_key(&gone)).then_some(())))?;
    api.kubectl(&["label", "namespace", "default", "istio.io/dataplane-mode-"])?;
    wait_for_words(&node, "0 of 0 ambient pods enrolled").with_context(|| with_log("leaving"))?;
    until("the annotation to go", POD, &[], || Ok(annotation(&api, "older")?.is_null().then_some(())))?;
    ensure!(!has_rules(&older)? && !has_rules(&held)?);
    ensure!(ztunnel.served().is_empty(), "{:?}", ztunnel.served());
    drop(ztunnel);
    assert_redirected(&node, &meshed)?;
    let log = agent.log("install-cni")?;
    let mut errors = log.lines().filter(|line| line.contains("\terror\t"));
    ensure!(!log.contains("not permitted") && errors.all(|line| line.contains("pod=default/held")), "{log}");
    Ok(())
}

/// The node's own network namespace is the one where probes are let through, whatever network the agent is on.
#[test]
fn an_agent_on_the_pods_network_lets_probes_through_on_the_node() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let on_pods_network =
        ["hostNetwork: true\n", "host: 127.0.0.1, ", "- {name: HEALTH_ADDRESS, value: 127.0.0.1}\n"]
            .iter()
            .try_fold(manifest(), |manifest, part| {
            ensure!(manifest.contains(part), "the manifest has no {part}");
            Ok(manifest.replace(part, if part.ends_with('\n') { "\n" } else { "" }))
        })?;
    let daemon_set = apply_manifest(&api, &node, &on_pods_network)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, GATEWAY, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;
    let ztunnel = Obedient::start(node.file("/run/ztunnel/ztunnel.sock"));
    let mut web = plain_pod("web");
    web["metadata"]["labels"] = json!({"istio.io/dataplane-mode": "ambient"});
    let web = node.start_pod(&web)?;
    let addresses = web.wait_running(POD).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    until("the annotation", POD, &[], || Ok((annotation(&api, "web")? == "enabled").then_some(())))
        .with_context(|| agent.log("install-cni").unwrap_or_default())?;
    let tables = "nft list ruleset";
    let on_node = node.namespace().sh(tables)?.ok()?.stdout;
    ensure!(addresses.iter().all(|address| on_node.contains(&address.to_string())), "{on_node}");
    let of_agent = agent.namespace()?.sh(tables)?.ok()?.stdout;
    ensure!(!of_agent.contains("istio-ambient-probes"), "it is in the agent's own namespace: {of_agent}");
    drop(ztunnel);
    Ok(())
}
