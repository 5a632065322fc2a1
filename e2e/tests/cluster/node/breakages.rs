//! What breaks on a real node, who says it first, and that all screens name the same cause: the second table of docs/tasks/troubleshooting.md. What needs no
//! kubelet is in the suite `agent`.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use crate::agent_support::{
    LOOPBACK, NAMESPACE, POD, agent_pod, apply_manifest, assert_redirected, entries, import_image, is_ready,
    run_dir, wait_loaded,
};
use crate::chart_support::rendered_without_tests;
use crate::node::kubectl_redirect::reached;
use anyhow::{Context, Result, ensure};
use e2e::guides::breakages;
use e2e::kube::ApiServer;
use e2e::node::{Node, PRIMARY_CONFLIST, Pod, plain_pod, sidecar_pod};
use serde_json::{Value, json};
use test_support::process::{self, Output, until};

/// How long a screen may take, however busy the machine.
const SAID: Duration = Duration::from_secs(60);
/// The agent's pod.
const AGENT: &str = "istio-cni-node-one";

/// A node with an agent that watches for drift.
struct World<'n> {
    api: &'n ApiServer,
    node: &'n Node<'n>,
    run: &'n dyn Fn(&[&str]) -> Result<Output>,
    /// What starts an agent's pod.
    daemon_set: Value,
}

/// Breaks something, which is healthy before. Returns the pod in question; nothing if it is the node.
type Break = fn(&World<'_>) -> Result<String>;

/// By the words of the page.
fn all() -> BTreeMap<&'static str, Break> {
    BTreeMap::from([
        ("A pod starts before the agent", (|_| Ok("default/early".to_owned())) as Break),
        ("An annotation of a pod cannot be read", |world| {
            let mut pod = sidecar_pod("annotated");
            pod["metadata"]["annotations"]["traffic.sidecar.istio.io/excludeInboundPorts"] = json!("http");
            world.node.start_pod(&pod)?;
            Ok("default/annotated".to_owned())
        }),
        ("A pod's rules are flushed", |world| {
            world.damage("flushed", "iptables-nft -t nat -F; ip6tables-nft -t nat -F")
        }),
        ("Another program redirects a pod's traffic", |world| {
            let rule = "-p tcp --dport 9080 -j DNAT --to-destination :8080";
            world.damage("foreign", &format!("iptables-nft -t nat -I PREROUTING 1 {rule}"))
        }),
        ("An ambient pod starts, and no ztunnel answers", |world| {
            let mut pod = plain_pod("ambient");
            pod["metadata"]["labels"] = json!({"istio.io/dataplane-mode": "ambient"});
            world.node.start_pod(&pod)?;
            Ok("default/ambient".to_owned())
        }),
        ("The node's network configuration is deleted", |world| {
            fs::remove_file(world.node.conf_dir().join(PRIMARY_CONFLIST))?;
            Ok(String::new())
        }),
    ])
}

impl World<'_> {
    /// A pod that is redirected, and then no more.
    fn damage(&self, name: &str, script: &str) -> Result<String> {
        let pod = self.node.start_pod(&sidecar_pod(name))?;
        pod.wait_running(POD)?;
        assert_redirected(self.node, &pod)?;
        pod.namespace()?.sh(script)?.ok()?;
        Ok(format!("default/{name}"))
    }

    /// The messages of the last events about a pod.
    fn events(&self, pod: &str) -> Result<Vec<String>> {
        let (namespace, name) = pod.split_once('/').context("a namespace")?;
        let events = self.api.list("events", namespace)?;
        let about = events.iter().filter(|event| event["involvedObject"]["name"] == name);
        Ok(about
            .filter_map(|event| {
                Some(format!("{}: {}", event["reason"].as_str()?, event["message"].as_str()?))
            })
            .collect())
    }

    /// What `kubectl redirect scan` says of a pod, or of the node.
    fn scanned(&self, subject: &str, list: &str, code: &str) -> Result<bool> {
        let output = (self.run)(&["scan", "-o", "json"])?;
        let scan: Value = serde_json::from_str(&output.stdout).with_context(|| format!("{output:?}"))?;
        let causes = scan[list].as_array().context("causes")?.iter();
        let mut of_code = causes.filter(|cause| cause["code"] == code);
        Ok(of_code.any(|cause| cause["subjects"].as_array().is_some_and(|all| all.contains(&json!(subject)))))
    }

    fn screens(&self, pod: &str) -> String {
        let scan = (self.run)(&["scan"]).map(|output| output.stdout).unwrap_or_default();
        format!("{scan}\n{:#?}", self.events(pod))
    }

    /// An agent's pod from this image.
    fn start_agent(&self, image: Option<&str>) -> Result<Pod<'_>> {
        let mut pod = agent_pod(&self.daemon_set, LOOPBACK, self.api, AGENT);
        if let Some(image) = image {
            pod["spec"]["containers"][0]["image"] = json!(image);
        }
        self.node.start_pod(&pod)
    }
}

#[test]
fn whatever_breaks_on_a_node_every_screen_names_the_same_cause() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let values =
        json!({"driftWatch": {"interval": "2s"}, "ambient": {"enabled": true}, "repair": {"enabled": false}});
    let daemon_set = apply_manifest(&api, &node, &rendered_without_tests(&values)?)?;
    node.start_pod(&sidecar_pod("early"))?.wait_running(POD)?;
    let run = reached(&api, &node)?;
    let world = World { api: &api, node: &node, run: &run, daemon_set };
    let agent = world.start_agent(None)?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;

    what_the_agent_repairs_costs_no_pod(&world, &agent)?;
    let mut breakages_here = all();
    for row in breakages("| what breaks on a node |")? {
        let [what, first, code, words] = &row[..] else { anyhow::bail!("not four cells: {row:?}") };
        let breaks = breakages_here.remove(what.as_str()).with_context(|| format!("not tried: {what}"))?;
        let (pod, began) = (breaks(&world)?, Instant::now());
        let (subject, list) = if pod.is_empty() { (node.name(), "nodes") } else { (pod.as_str(), "pods") };
        let about = if pod.is_empty() { format!("{NAMESPACE}/{AGENT}") } else { pod.clone() };
        let said = || -> Result<()> {
            until(&format!("{what}: an event"), SAID, &[], || {
                let is_it =
                    |event: &String| event.starts_with(first.as_str()) && event.contains(words.as_str());
                Ok(world.events(&about)?.iter().any(is_it).then_some(()))
            })?;
            println!("{what}: {first} after {:?}", began.elapsed());
            until(&format!("{what}: scan"), SAID, &[], || {
                Ok(world.scanned(subject, list, code)?.then_some(()))
            })?;
            if !pod.is_empty() {
                let output = run(&["pod", &pod])?;
                ensure!(
                    output.code() == Some(2) && output.stdout.contains(code.as_str()),
                    "{what}: {output:?}"
                );
            }
            Ok(())
        };
        said().with_context(|| world.screens(&about))?;
    }
    ensure!(breakages_here.is_empty(), "not on the page: {:?}", breakages_here.keys());

    // Last, because it takes the agent away.
    agent.delete(POD)?;
    world.start_agent(Some("hub.example/install-cni:missing"))?;
    until("the missing tag", POD, &[], || {
        let output = run(&["scan"])?;
        Ok((output.code() == Some(2) && output.stdout.contains("agent not running: ErrImageNeverPull"))
            .then_some(()))
    })
}

/// The page's list of what no one needs to do anything about.
fn what_the_agent_repairs_costs_no_pod(world: &World<'_>, agent: &Pod<'_>) -> Result<()> {
    let World { node, .. } = world;
    let redirected = |name: &str| -> Result<()> {
        let pod = node.start_pod(&sidecar_pod(name))?;
        pod.wait_running(POD)?;
        assert_redirected(node, &pod)?;
        pod.delete(POD)
    };
    // The entry is removed.
    node.write_conf(PRIMARY_CONFLIST, &node.primary_conflist())?;
    until("the entry", POD, &[], || Ok(entries(node)?.contains("\"istio-cni\"").then_some(())))?;
    // The plugin's token is lost.
    let credentials = run_dir(node).join("istio-cni-kubeconfig");
    fs::remove_file(&credentials)?;
    until("the plugin's credentials", POD, &[], || Ok(credentials.exists().then_some(())))?;
    wait_loaded(node)?;
    // containerd starts again.
    node.restart_containerd()?;
    redirected("after-containerd")?;
    // The agent is killed.
    let restarts = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
    node.run(&process::command("sh", ["-ec", "kill -9 $(pidof install-cni)"]))?.ok()?;
    redirected("while-agent-restarts")?;
    agent.wait("started again", POD, |pod| (restarts(pod) > 0 && is_ready(pod).is_some()).then_some(()))
}
