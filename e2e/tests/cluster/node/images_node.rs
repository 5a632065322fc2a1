//! The images that `deploy/build-images.sh` makes, on a real node, with a real Envoy as the sidecar: the agent's under what the chart starts, the
//! others under what Istio's injector writes.
//!
//! `make images` builds them, fetches Envoy and runs this.

use std::net::{Ipv4Addr, SocketAddr};

use crate::agent_support::{
    GATEWAY, IMAGE, LOOPBACK, MANIFEST, POD, agent_pod, apply_manifest, is_ready, wait_loaded,
};
use crate::chart_support::test_pod;
use crate::node::images_support::{First, import, import_envoy, injected_pod};
use anyhow::{Context, Result, ensure};
use e2e::envoy::logged;
use e2e::kube::ApiServer;
use e2e::node::{APP_PORT, GREETING, Node, Pod, Runtime};
use e2e::traffic::{Client, TcpServer};
use serde_json::{Value, json};
use test_support::process::{self, until};

/// How an init container has ended, now or before it was started again, if that was with this exit code.
fn ended(pod: &Value, name: &str, code: i64) -> Option<Value> {
    let mut statuses = pod["status"]["initContainerStatuses"].as_array()?.iter();
    let status = statuses.find(|status| status["name"] == name)?;
    let ends = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
    ends.into_iter().find(|end| end["exitCode"] == code).cloned()
}

/// What comes in and what goes out passes Envoy, which is reported where it was going, and arrives.
fn ensure_passes_envoy(node: &Node<'_>, pod: &Pod<'_>) -> Result<()> {
    pod.wait_running(POD)
        .with_context(|| format!("{:?} {:?}", pod.log("istio-init"), pod.log("istio-proxy")))?;
    let app = SocketAddr::new(pod.address(false)?, APP_PORT);
    let script = format!("nc -w 5 {} {} </dev/null", app.ip(), app.port());
    let mut greet = node.namespace().command(&process::command("busybox", ["sh", "-c", &script]));
    // Envoy listens a moment after it has started.
    until("the application to answer through Envoy", POD, &[], || {
        Ok((process::run(&mut greet, POD)?.stdout == GREETING).then_some(()))
    })
    .with_context(|| pod.log("istio-proxy").unwrap_or_default())?;

    let peer = TcpServer::start(node.namespace(), "peer", (Ipv4Addr::UNSPECIFIED, 0))?;
    let target = SocketAddr::new(GATEWAY.parse()?, peer.address().port());
    let inside = pod.namespace()?;
    let report = Client::new(&inside).tcp(target)?.report()?;
    ensure!((report.server.as_str(), report.local) == ("peer", target), "{report:?}");
    for line in [logged("inbound", app), logged("outbound", target)] {
        until(&format!("Envoy to log {line}"), POD, &[], || {
            Ok(pod.log("istio-proxy")?.lines().any(|logged| logged.ends_with(&line)).then_some(()))
        })
        .with_context(|| pod.log("istio-proxy").unwrap_or_default())?;
    }
    Ok(())
}

/// Starts the pod of `helm test` and waits until it has ended: how, and its verdict.
fn helm_test(node: &Node<'_>, name: &str) -> Result<(Value, Value)> {
    let mut pod = test_pod(&json!({"pullPolicy": "Never"}))?;
    (pod["metadata"]["name"], pod["metadata"]["namespace"]) = (json!(name), json!("default"));
    let pod = node.start_pod(&pod)?;
    let end = pod.wait("to end", POD, |pod| {
        // Where the application's part fails, the proxy's never begins.
        let [application, proxy] = ["initContainerStatuses", "containerStatuses"]
            .map(|list| &pod["status"][list][0]["state"]["terminated"]);
        let end = if application["exitCode"] == 0 { proxy } else { application };
        end.is_object().then(|| end.clone())
    })?;
    let verdict = serde_json::from_str(end["message"].as_str().unwrap_or_default());
    Ok((end["exitCode"].clone(), verdict.with_context(|| end.to_string())?))
}

fn the_images_do_their_work(runtime: Runtime) -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined_with(runtime, &api)?;
    let [agent_image, init, validator] =
        ["install-cni", "proxy-init", "validator"].map(|image| import(&node, image));
    let (init, validator) = (init?, validator?);
    node.ctr(&["images", "tag", &agent_image?, IMAGE])?;
    import_envoy(&node)?;

    // Without the plugin: proxy-init takes the place of istio-init.
    let pod = node.start_pod(&injected_pod("with-init", First::Init, &init)?)?;
    ensure_passes_envoy(&node, &pod)?;
    let object = pod.object()?.context("the pod is there")?;
    ensure!(ended(&object, "istio-init", 0).is_some(), "{:#}", object["status"]);
    pod.delete(POD)?;

    // Without the plugin and without istio-init: both images hold the pod back, and say why.
    for (name, image) in [("held-by-validator", &validator), ("held-by-proxy-init", &init)] {
        let pod = node.start_pod(&injected_pod(name, First::Validation, image)?)?;
        let end = pod.wait("to be held back", POD, |pod| ended(pod, "istio-validation", 126))?;
        let verdict: Value = serde_json::from_str(end["message"].as_str().unwrap_or_default())?;
        ensure!(verdict["reason"] == "no-rules" && verdict["uid"] == 1337, "{verdict:#}");
        pod.delete(POD)?;
    }

    let (code, verdict) = helm_test(&node, "test-without-agent")?;
    ensure!(code == 126 && verdict["reason"] == "no-rules", "helm test passes without an agent: {verdict:#}");

    // With the agent: its image puts the plugin on the node, the plugin programs the pod, both images let it start.
    let daemon_set = apply_manifest(&api, &node, MANIFEST)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;
    let (code, verdict) = helm_test(&node, "test-with-agent")?;
    ensure!(code == 0 && verdict["reason"] == "redirected", "{verdict:#}");
    for (name, image) in [("validated", &validator), ("validated-by-proxy-init", &init)] {
        let pod = node.start_pod(&injected_pod(name, First::Validation, image)?)?;
        ensure_passes_envoy(&node, &pod)?;
        let object = pod.object()?.context("the pod is there")?;
        let end = ended(&object, "istio-validation", 0).with_context(|| format!("{:#}", object["status"]))?;
        let verdict: Value = serde_json::from_str(end["message"].as_str().unwrap_or_default())?;
        ensure!(verdict["reason"] == "redirected", "{verdict:#}");
    }
    Ok(())
}

#[test]
#[ignore = "needs the images, Envoy and helm: make images"]
fn the_images_do_their_work_under_debians_containerd() -> Result<()> {
    the_images_do_their_work(Runtime::Debian)
}

#[test]
#[ignore = "needs the images, Envoy, helm and containerd 2: make images"]
fn the_images_do_their_work_under_containerd_2() -> Result<()> {
    the_images_do_their_work(Runtime::Containerd2)
}
