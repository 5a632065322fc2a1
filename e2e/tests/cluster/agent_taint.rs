//! The taint controllers and a real API server, with the roles of the manifests as they ship: nodes are tainted and freed as they should be, nothing
//! else of them is touched, whoever changes them meanwhile.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::agent::DIRECTORIES;
use e2e::kube::{ApiServer, fresh};
use e2e::program;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::process::{SHORT, until};

use crate::agent_support::fleet::{CONFLIST, FleetAgent};
use crate::agent_support::{MANIFEST as AGENTS, NAMESPACE as SYSTEM, apply_in};

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);
const CONTROLLER: &str = include_str!("../../../deploy/taint-controller.yaml");
const OWN_NODE_ONLY: &str = include_str!("../../../deploy/own-node-only.yaml");
const KEY: &str = "cni.istio.io/not-ready";
const TYPE: &str = "cni.istio.io/Ready";

fn taint(key: &str, value: &str, effect: &str) -> Value {
    if value.is_empty() {
        json!({"key": key, "effect": effect})
    } else {
        json!({"key": key, "value": value, "effect": effect})
    }
}

fn ours() -> Value {
    taint(KEY, "", "NoSchedule")
}

struct Cluster {
    api: ApiServer,
    /// The agents' namespace.
    system: String,
    /// What is behind the names of nodes that the tests give: something where others use the API server, too.
    ending: String,
    folder: TempDir,
}

/// Ends it in order.
fn end(process: &FleetAgent) -> Result<()> {
    process.process.signal(Signal::SIGTERM)?;
    ensure!(process.process.wait(LIMIT)?.success(), "{}", process.process.log());
    Ok(())
}

impl Cluster {
    /// With the agents' manifest as it is after its own sed command for this, where the cluster's controller or a policy sees all nodes.
    fn alone(mark: &str) -> Result<Self> {
        let api = ApiServer::start()?;
        api.create_namespace(SYSTEM)?;
        let cluster = Self::of(api, SYSTEM.to_owned(), String::new())?;
        cluster.api.apply(&Self::agents(mark)?)?;
        Ok(cluster)
    }

    /// Likewise, where each agent keeps to a node of its own.
    fn of_agents(mark: &str) -> Result<Self> {
        let api = ApiServer::shared()?;
        let system = api.fresh_namespace(SYSTEM)?;
        let cluster = Self::of(api, system, fresh(""))?;
        cluster.apply(&Self::agents(mark)?)?;
        Ok(cluster)
    }

    fn of(api: ApiServer, system: String, ending: String) -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix(&format!("e2e-{}-taint", std::process::id())).tempdir()?;
        Ok(Self { api, system, ending, folder })
    }

    fn agents(mark: &str) -> Result<String> {
        let mark = format!("# {mark}: ");
        ensure!(
            AGENTS
                .contains(&format!("#   sed 's/{mark}//' deploy/istio-cni-node.yaml | kubectl apply -f -\n"))
                || mark == "# : "
        );
        Ok(AGENTS.replace(&mark, ""))
    }

    /// A manifest, in a namespace of the cluster of agents.
    fn apply(&self, manifest: &str) -> Result<()> {
        apply_in(&self.api, &self.system, manifest)
    }

    /// The whole name of a node.
    fn full(&self, node: &str) -> String {
        format!("{node}{}", self.ending)
    }

    fn node(&self, name: &str, taints: &[Value]) -> Result<()> {
        let labels = json!({"kubernetes.io/os": "linux"});
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.full(name), "labels": labels}, "spec": {"taints": taints}});
        self.api.create(&node).map(drop)
    }

    fn read(&self, node: &str) -> Result<Value> {
        self.api.read(&format!("/api/v1/nodes/{}", self.full(node)))
    }

    /// Its taints; the server adds one of its own to nodes that no kubelet reports, which the tests' server is reported not to.
    fn taints(&self, node: &str) -> Result<Vec<Value>> {
        Ok(self.read(node)?["spec"]["taints"].as_array().cloned().unwrap_or_default())
    }

    fn wait_taints(&self, node: &str, wanted: &[Value], by: &FleetAgent) -> Result<()> {
        let mut last = Vec::new();
        until(node, LIMIT, &[&by.process], || {
            last = self.taints(node)?;
            Ok((last == wanted).then_some(()))
        })
        .with_context(|| format!("{node} has {last:?} instead of {wanted:?}\n{}", by.process.log()))
    }

    fn condition(&self, node: &str) -> Result<Option<Value>> {
        let node = self.read(node)?;
        let mut conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default().into_iter();
        Ok(conditions.find(|condition| condition["type"] == TYPE))
    }

    fn wait_condition(&self, node: &str, status: &str, reason: &str, by: &FleetAgent) -> Result<()> {
        let mut last = None;
        until("the condition", LIMIT, &[&by.process], || {
            last = self.condition(node)?;
            let is_so = last.as_ref().is_some_and(|one| one["status"] == status && one["reason"] == reason);
            Ok(is_so.then_some(()))
        })
        .with_context(|| format!("{node} says {last:?}\n{}", by.process.log()))
    }

    /// What a kubelet or another program says of a node.
    fn say(&self, node: &str, of_type: &str, status: &str) -> Result<()> {
        let time = "2026-11-22T00:00:00Z";
        let patch = json!({"status": {"conditions": [{"type": of_type, "status": status, "reason": "Test", "message": "m",
            "lastHeartbeatTime": time, "lastTransitionTime": time}]}});
        let patch = patch.to_string();
        let node = self.full(node);
        self.api.kubectl(&["patch", "node", &node, "--subresource=status", "-p", &patch]).map(drop)
    }

    /// An agent's pod, as the DaemonSet's controller and a kubelet would have it.
    fn pod(&self, name: &str, node: &str, is_ready: bool) -> Result<()> {
        let status = if is_ready { "True" } else { "False" };
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": self.system, "labels": {"k8s-app": "istio-cni-node"}},
            "spec": {"nodeName": self.full(node), "terminationGracePeriodSeconds": 0, "containers": [{"name": "install-cni", "image": "x"}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": status}]}});
        self.api.apply(&pod.to_string())?;
        self.api.apply_status(&pod)
    }

    fn delete(&self, kind: &str, name: &str) -> Result<()> {
        self.api.delete_now(kind, &self.system, name)
    }

    /// Events about a node: who says them, and their reasons.
    fn events(&self, node: &str) -> Result<Vec<(String, String)>> {
        let all = self.api.read("/api/v1/namespaces/default/events")?;
        let about = all["items"].as_array().into_iter().flatten().filter(|event| {
            event["involvedObject"]["name"] == self.full(node) && event["involvedObject"]["kind"] == "Node"
        });
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(about.map(|event| (text(&event["source"]["component"]), text(&event["reason"]))).collect())
    }

    fn wait_event(&self, node: &str, component: &str, reason: &str, by: &FleetAgent) -> Result<()> {
        let wanted = (component.to_owned(), reason.to_owned());
        until("the event", LIMIT, &[&by.process], || Ok(self.events(node)?.contains(&wanted).then_some(())))
            .with_context(|| by.process.log())
    }

    fn path(&self, of: &str, part: &str) -> PathBuf {
        self.folder.path().join(of).join(part)
    }

    /// A process with the rights of a service account, in a folder of its own.
    fn start(
        &self,
        of: &str,
        account: &str,
        prefix: &[&str],
        args: &[&str],
        env: &[(&str, &str)],
    ) -> Result<FleetAgent> {
        let mut command = Command::new(program::under_test("install-cni")?);
        command.args(args).args(["--log_output_level=debug", "--ctrlz_port=0"]);
        let mut command =
            if prefix.is_empty() { command } else { test_support::process::prefixed(prefix, &command) };
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        for (name, part) in DIRECTORIES {
            fs::create_dir_all(self.path(of, part))?;
            command.env(name, self.path(of, part));
        }
        fs::copy(program::under_test("istio-cni")?, self.path(of, "image/istio-cni"))?;
        FleetAgent::run(&self.api, &self.folder.path().join(of), command, [&self.system, account, of], env)
    }

    /// The agent of a node, which keeps its node's taint.
    fn agent(&self, node: &str, env: &[(&str, &str)]) -> Result<FleetAgent> {
        self.agent_as(&[], node, env)
    }

    fn agent_as(&self, prefix: &[&str], node: &str, env: &[(&str, &str)]) -> Result<FleetAgent> {
        fs::create_dir_all(self.path(node, "net.d"))?;
        fs::write(self.path(node, "net.d/10-net.conflist"), CONFLIST)?;
        let name = self.full(node);
        let usual = [("NODE_TAINT", "true"), ("NODE_NAME", &name), ("TAINT_AFTER", "1s")];
        let env: Vec<(&str, &str)> = usual.iter().chain(env).copied().collect();
        self.start(node, "istio-cni", prefix, &[], &env)
    }

    /// One replica of the cluster's controller.
    fn controller(&self, name: &str, env: &[(&str, &str)]) -> Result<FleetAgent> {
        let env: Vec<(&str, &str)> = [("TAINT_AFTER", "1s")].iter().chain(env).copied().collect();
        self.start(name, "istio-cni-taint-controller", &[], &["taint-controller"], &env)
    }

    /// With the controller's manifest.
    fn with_controller() -> Result<Self> {
        let cluster = Self::alone("")?;
        cluster.api.apply(CONTROLLER)?;
        Ok(cluster)
    }

    fn may(&self, account: &str, namespace: &str, verb: &str, what: &str, name: &str) -> Result<bool> {
        let account = format!("system:serviceaccount:{}:{account}", self.system);
        let (what, part) = what.split_once('/').unwrap_or((what, ""));
        let what = if name.is_empty() { what.to_owned() } else { format!("{what}/{name}") };
        let part = format!("--subresource={part}");
        let mut args = vec!["auth", "can-i", verb, &what, &part, "--as", &account];
        if !namespace.is_empty() {
            args.extend(["-n", namespace]);
        }
        Ok(self.api.kubectl_as(&self.api.admin_kubeconfig(), &args)?.stdout.trim() == "yes")
    }
}

const ADDED: &str = "istio_cni_node_taint_changes_total{change=\"add\",result=\"done\"}";
const FREED: &str = "istio_cni_node_taint_changes_total{change=\"remove\",result=\"done\"}";

#[test]
fn an_agent_frees_its_node_when_it_is_verified_and_taints_it_when_that_ends() -> Result<()> {
    let cluster = Cluster::of_agents("node-taint")?;
    let (a, b) = (taint("example.com/a", "1", "NoSchedule"), taint("example.com/b", "", "NoExecute"));
    // Born tainted, with a value, between the taints of others.
    cluster.node("born", &[a.clone(), taint(KEY, "true", "NoSchedule"), b.clone()])?;
    let agent = cluster.agent("born", &[])?;
    let others = [a.clone(), b.clone()];
    cluster.wait_taints("born", &others, &agent)?;
    cluster.wait_condition("born", "True", "Verified", &agent)?;
    cluster.wait_event("born", "cni-taint", "NodeFreed", &agent)?;
    agent.wait_metric("istio_cni_node_verified", 1.0)?;
    ensure!(agent.count("istio_cni_node_probes_total{result=\"redirected\"}") >= 1.0);
    // No network configuration is left.
    let conflist = cluster.path("born", "net.d/10-net.conflist");
    fs::remove_file(&conflist)?;
    cluster.wait_taints("born", &[a.clone(), b.clone(), ours()], &agent)?;
    cluster.wait_condition("born", "False", "AgentNotReady", &agent)?;
    cluster.wait_event("born", "cni-taint", "NodeTainted", &agent)?;
    fs::write(&conflist, CONFLIST)?;
    cluster.wait_taints("born", &others, &agent)?;
    cluster.wait_condition("born", "True", "Verified", &agent)?;
    ensure!((agent.count(ADDED), agent.count(FREED)) == (1.0, 2.0), "{}", agent.process.log());
    // An upgrade leaves all as it is.
    let before = cluster.read("born")?;
    end(&agent)?;
    ensure!(cluster.read("born")? == before);
    ensure!(cluster.path("born", "bin/istio-cni").exists(), "the plugin stays");
    Ok(())
}

#[test]
fn an_agent_does_with_taints_what_it_is_told() -> Result<()> {
    let cluster = Cluster::of_agents("node-taint")?;
    let old = taint("NodeReadiness", "", "NoSchedule");
    let other_effect = taint(KEY, "", "NoExecute");
    cluster.node("other-effect", &[other_effect])?;
    cluster.node("old-key", &[old.clone(), ours()])?;
    cluster.node("old-key-of-others", &[old.clone(), ours()])?;
    cluster.node("own-key", &[ours(), taint("example.com/mesh", "", "NoExecute")])?;
    let mine = [("TAINT_KEY", "example.com/mesh"), ("TAINT_EFFECT", "NoExecute"), ("TAINT_VALUE", "v")];
    for (node, env, taints) in [
        ("other-effect", &[][..], vec![]),
        ("old-key", &[("TAINT_OLD_KEYS", "NodeReadiness")][..], vec![]),
        ("old-key-of-others", &[][..], vec![old.clone()]),
        ("own-key", &mine[..], vec![ours()]),
    ] {
        let agent = cluster.agent(node, env)?;
        cluster.wait_taints(node, &taints, &agent)?;
        if node == "own-key" {
            fs::remove_file(cluster.path(node, "net.d/10-net.conflist"))?;
            let added = taint("example.com/mesh", "v", "NoExecute");
            cluster.wait_taints(node, &[ours(), added], &agent)?;
        }
    }
    // A node that is not there yet is found when it is.
    let agent = cluster.agent("late", &[])?;
    agent.wait_metric("istio_cni_node_verified", 1.0)?;
    cluster.node("late", &[ours()])?;
    cluster.wait_taints("late", &[], &agent)
}

#[test]
fn a_node_is_not_freed_by_an_agent_that_has_not_verified_it() -> Result<()> {
    let cluster = Cluster::of_agents("node-taint")?;
    for node in ["fails", "cannot", "unprobed", "blip"] {
        cluster.node(node, &[ours()])?;
    }
    // As a pod would fail, for what the runtime's environment says.
    let fails = cluster.agent("fails", &[("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "nonsense")])?;
    cluster.wait_condition("fails", "False", "ProbeFailed", &fails)?;
    let unprivileged = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"];
    let cannot = cluster.agent_as(&unprivileged, "cannot", &[])?;
    cluster.wait_condition("cannot", "Unknown", "ProbeImpossible", &cannot)?;
    let unprobed = cluster.agent_as(&unprivileged, "unprobed", &[("TAINT_PROBE", "false")])?;
    cluster.wait_taints("unprobed", &[], &unprobed)?;
    for (node, agent) in [("fails", &fails), ("cannot", &cannot)] {
        ensure!(cluster.taints(node)? == [ours()], "{node}");
        ensure!(agent.count(FREED) == 0.0 && agent.count("istio_cni_install_ready") == 1.0, "{node}");
    }
    // What does not last taints nobody.
    let blip = cluster.agent("blip", &[("TAINT_AFTER", "1h")])?;
    cluster.wait_taints("blip", &[], &blip)?;
    let conflist = cluster.path("blip", "net.d/10-net.conflist");
    fs::remove_file(&conflist)?;
    until("the blip", LIMIT, &[&blip.process], || {
        Ok((blip.count("istio_cni_node_verified") == 0.0).then_some(()))
    })?;
    fs::write(&conflist, CONFLIST)?;
    blip.wait_metric("istio_cni_node_verified", 1.0)?;
    cluster.wait_condition("blip", "True", "Verified", &blip)?;
    ensure!(blip.count(ADDED) == 0.0);
    Ok(())
}

#[test]
fn an_agent_that_may_not_says_so_and_one_that_is_killed_or_removed_leaves_what_it_should() -> Result<()> {
    // The rights of an agent that is to tell only.
    let cluster = Cluster::of_agents("node-condition")?;
    cluster.node("n", &[ours()])?;
    let agent = cluster.agent("n", &[])?;
    agent.wait_metric("istio_cni_node_taint_changes_total{change=\"remove\",result=\"refused\"}", 1.0)?;
    ensure!(cluster.taints("n")? == [ours()] && agent.count("istio_cni_install_ready") == 1.0);
    cluster.wait_condition("n", "True", "Verified", &agent)?;
    drop(agent);
    let teller = cluster.agent("n", &[("NODE_TAINT", "false"), ("NODE_CONDITION", "true")])?;
    fs::remove_file(cluster.path("n", "net.d/10-net.conflist"))?;
    cluster.wait_condition("n", "False", "AgentNotReady", &teller)?;
    ensure!(cluster.taints("n")? == [ours()]);
    teller.process.signal(Signal::SIGKILL)?;
    let _ = teller.process.wait(LIMIT)?;
    let said = cluster.condition("n")?.context("a condition")?;
    ensure!(said["status"] == "False" && cluster.taints("n")? == [ours()], "{said}");
    // With all rights: removal frees the node, whatever state it is in.
    cluster.apply(&AGENTS.replace("# node-taint: ", ""))?;
    let agent = cluster.agent("n", &[])?;
    cluster.wait_taints("n", &[], &agent)?;
    fs::remove_file(cluster.path("n", "net.d/10-net.conflist"))?;
    cluster.wait_taints("n", &[ours()], &agent)?;
    cluster.delete("daemonset", "istio-cni-node")?;
    end(&agent)?;
    ensure!(cluster.taints("n")?.is_empty(), "nothing may stay behind that blocks the node");
    let said = cluster.condition("n")?.context("a condition")?;
    ensure!(said["status"] == "Unknown" && said["reason"] == "Removed", "{said}");
    Ok(())
}

#[test]
fn the_cluster_taints_nodes_without_an_agent_and_frees_those_with_one() -> Result<()> {
    let cluster = Cluster::with_controller()?;
    let (a, b) = (taint("example.com/a", "1", "NoSchedule"), taint("example.com/b", "", "NoExecute"));
    cluster.node("there", &[])?;
    cluster.node("served", &[])?;
    cluster.pod("agent-served", "served", true)?;
    let controller = cluster.controller("one", &[])?;
    cluster.wait_taints("there", &[ours()], &controller)?;
    // It joins; its agent comes; goes; fails; says no.
    cluster.node("joins", &[a.clone(), b.clone()])?;
    cluster.wait_taints("joins", &[a.clone(), b.clone(), ours()], &controller)?;
    cluster.wait_event("joins", "cni-taint-controller", "NodeTainted", &controller)?;
    cluster.pod("agent-1", "joins", true)?;
    cluster.wait_taints("joins", &[a.clone(), b.clone()], &controller)?;
    cluster.wait_event("joins", "cni-taint-controller", "NodeFreed", &controller)?;
    cluster.delete("pod", "agent-1")?;
    cluster.wait_taints("joins", &[a.clone(), b.clone(), ours()], &controller)?;
    cluster.pod("agent-2", "joins", true)?;
    cluster.wait_taints("joins", &[a.clone(), b.clone()], &controller)?;
    cluster.pod("agent-2", "joins", false)?;
    cluster.wait_taints("joins", &[a.clone(), b.clone(), ours()], &controller)?;
    cluster.say("joins", TYPE, "False")?;
    cluster.pod("agent-2", "joins", true)?;
    cluster.say("joins", "Ready", "True")?;
    cluster.say("there", TYPE, "True")?;
    // Whoever comes behind has been seen behind.
    cluster.pod("agent-there", "there", true)?;
    cluster.wait_taints("there", &[], &controller)?;
    ensure!(cluster.taints("joins")? == [a.clone(), b.clone(), ours()], "its agent says no");
    cluster.say("joins", TYPE, "True")?;
    cluster.wait_taints("joins", &[a.clone(), b.clone()], &controller)?;
    // Of any effect, and born tainted.
    cluster.node("born", &[taint(KEY, "x", "NoExecute"), a.clone(), ours()])?;
    cluster.pod("agent-born", "born", true)?;
    cluster.wait_taints("born", std::slice::from_ref(&a), &controller)?;
    // No agent is wanted there.
    let windows = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "windows", "labels": {"kubernetes.io/os": "windows"}}});
    cluster.api.create(&windows)?;
    cluster.node("last", &[])?;
    cluster.wait_taints("last", &[ours()], &controller)?;
    ensure!(cluster.taints("windows")?.is_empty() && cluster.taints("served")?.is_empty());
    ensure!(cluster.events("served")?.is_empty() && cluster.events("windows")?.is_empty());
    // A node that goes is nobody's trouble.
    cluster.api.kubectl(&["delete", "node", "joins"])?;
    // The agents are removed: no node stays blocked.
    cluster.delete("daemonset", "istio-cni-node")?;
    cluster.wait_taints("last", &[], &controller)?;
    cluster.delete("pod", "agent-served")?;
    cluster.node("after", &[])?;
    cluster.node("after-and-born", &[ours()])?;
    cluster.wait_taints("after-and-born", &[], &controller)?;
    ensure!(cluster.taints("after")?.is_empty() && cluster.taints("served")?.is_empty());
    for result in ["refused", "rejected", "unanswered"] {
        let name = format!("istio_cni_taint_controller_changes_total{{change=\"add\",result=\"{result}\"}}");
        ensure!(controller.count(&name) == 0.0, "{name}\n{}", controller.process.log());
    }
    end(&controller)
}

/// While the controller taints and frees a node, another program writes other taints of it without a pause: not one of either is lost.
#[test]
fn another_writer_of_taints_loses_none_and_costs_none() -> Result<()> {
    let cluster = Cluster::with_controller()?;
    for node in ["n1", "n2", "n3"] {
        cluster.node(node, &[])?;
    }
    let controller = cluster.controller("one", &[])?;
    let rounds = 8;
    thread::scope(|scope| -> Result<()> {
        let writer = scope.spawn(|| -> Result<()> {
            for round in 0..rounds {
                for node in ["n1", "n2", "n3"] {
                    cluster.api.kubectl(&[
                        "taint",
                        "node",
                        node,
                        &format!("example.com/t{round}=x:NoSchedule"),
                    ])?;
                }
            }
            Ok(())
        });
        for (round, is_ready) in [true, false, true].into_iter().enumerate() {
            for node in ["n1", "n2", "n3"] {
                cluster.pod(&format!("agent-{node}"), node, is_ready)?;
            }
            until(&format!("round {round}"), LIMIT, &[&controller.process], || {
                let held: Result<Vec<bool>> = ["n1", "n2", "n3"]
                    .iter()
                    .map(|node| Ok(cluster.taints(node)?.contains(&ours())))
                    .collect();
                Ok(held?.iter().all(|held| *held != is_ready).then_some(()))
            })
            .with_context(|| controller.process.log())?;
        }
        writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?
    })?;
    for node in ["n1", "n2", "n3"] {
        // kubectl puts a new one first.
        let wanted: Vec<Value> = (0..rounds)
            .rev()
            .map(|round| taint(&format!("example.com/t{round}"), "x", "NoSchedule"))
            .collect();
        ensure!(cluster.taints(node)? == wanted, "{node}: {:?}", cluster.taints(node)?);
    }
    Ok(())
}

#[test]
fn of_two_replicas_one_acts_and_the_other_takes_over() -> Result<()> {
    let cluster = Cluster::with_controller()?;
    let first = cluster.controller("first", &[])?;
    let leader = "istio_cni_taint_controller_leader";
    let added = "istio_cni_taint_controller_changes_total{change=\"add\",result=\"done\"}";
    first.wait_metric(leader, 1.0)?;
    let second = cluster.controller("second", &[])?;
    cluster.node("a", &[])?;
    cluster.wait_taints("a", &[ours()], &first)?;
    ensure!(second.count(leader) == 0.0 && second.count("istio_cni_taint_controller_nodes") == 0.0);
    // Killed: the other one waits until the lease has run out.
    first.process.signal(Signal::SIGKILL)?;
    let _ = first.process.wait(LIMIT)?;
    cluster.node("b", &[])?;
    cluster.wait_taints("b", &[ours()], &second)?;
    ensure!(second.count(added) == 1.0 && second.count(leader) == 1.0, "{}", second.process.log());
    // Told to end: it steps down, and another one takes over at once.
    let third = cluster.controller("third", &[])?;
    end(&second)?;
    let lease = cluster.api.get("lease", SYSTEM, "istio-taint-lock")?;
    ensure!(lease["spec"]["holderIdentity"] != "second", "{lease}");
    third.wait_metric(leader, 1.0)?;
    // The API server is away for longer than a lease lasts; nodes are not touched for that.
    cluster.pod("agent-a", "a", true)?;
    cluster.wait_taints("a", &[], &third)?;
    cluster.api.stop();
    until("the leader to step back", LIMIT, &[&third.process], || {
        Ok((third.count(leader) == 0.0).then_some(()))
    })?;
    cluster.api.start_again()?;
    cluster.node("c", &[])?;
    cluster.wait_taints("c", &[ours()], &third)?;
    third.wait_metric(leader, 1.0)?;
    ensure!(cluster.taints("a")?.is_empty(), "{}", third.process.log());
    Ok(())
}

#[test]
fn a_config_map_of_selectors_says_which_pods_a_node_needs() -> Result<()> {
    let cluster = Cluster::with_controller()?;
    let named =
        [("TAINT_CONFIGMAP-NAME", "istio-cni-taint-configmap"), ("TAINT_CONFIGMAP-NAMESPACE", SYSTEM)];
    let ends = |part: &str| -> Result<()> {
        let controller = cluster.controller("bad", &named)?;
        let status = controller.process.wait(LIMIT)?;
        ensure!(
            status.code() == Some(1) && controller.process.log().contains(part),
            "{}",
            controller.process.log()
        );
        Ok(())
    };
    cluster.api.apply(&CONTROLLER.replace("# configmap: ", ""))?;
    cluster.delete("configmap", "istio-cni-taint-configmap")?;
    ends("istio-cni-taint-configmap not found")?;
    for (selectors, part) in [("[]", "names no pods"), ("- {selector: 'a b'}", "is not a condition")] {
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "istio-cni-taint-configmap", "namespace": SYSTEM}, "data": {"x": selectors}});
        cluster.api.apply(&map.to_string())?;
        ends(part)?;
    }
    // The one that ships, with another pod beside.
    let agents = "k8s-app=istio-cni-node\", namespace: \"istio-system\"}";
    let both = format!("{agents}\n    - {{name: \"other\", selector: \"app=other\"}}");
    let manifest = CONTROLLER.replace("# configmap: ", "");
    let map = manifest.replace(agents, &both);
    ensure!(map != manifest, "the manifest names other selectors");
    cluster.api.apply(&map)?;
    let controller = cluster.controller("one", &named)?;
    cluster.node("n", &[])?;
    cluster.wait_taints("n", &[ours()], &controller)?;
    cluster.pod("agent", "n", true)?;
    let other = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "namespace": SYSTEM, "labels": {"app": "other"}},
        "spec": {"nodeName": "n", "containers": [{"name": "x", "image": "x"}]}});
    cluster.node("marker", &[])?;
    cluster.wait_taints("marker", &[ours()], &controller)?;
    ensure!(cluster.taints("n")? == [ours()], "the other one is missing");
    cluster.api.create(&other)?;
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}).to_string();
    cluster.api.kubectl(&["patch", "pod", "other", "-n", SYSTEM, "--subresource=status", "-p", &ready])?;
    cluster.wait_taints("n", &[], &controller)
}

#[test]
fn accounts_have_the_rights_they_need_and_no_others() -> Result<()> {
    let cluster = Cluster::of_agents("node-taint")?;
    cluster.apply(CONTROLLER)?;
    let (agent, controller, system) = ("istio-cni", "istio-cni-taint-controller", &*cluster.system);
    until("the roles to count", SHORT, &[], || {
        Ok(cluster.may(agent, "", "patch", "nodes", "")?.then_some(()))
    })?;
    for (account, namespace, verb, what, name, wanted) in [
        (agent, "", "patch", "nodes/status", "", true),
        (agent, "", "list", "nodes", "", false),
        (agent, "", "update", "nodes", "", false),
        (agent, "default", "create", "events", "", true),
        (agent, "shop", "create", "events", "", false),
        (agent, system, "get", "leases", "istio-taint-lock", false),
        (controller, "", "watch", "nodes", "", true),
        (controller, "", "patch", "nodes", "", true),
        (controller, "", "update", "nodes", "", false),
        (controller, "", "delete", "nodes", "", false),
        (controller, "", "patch", "nodes/status", "", false),
        (controller, "", "list", "pods", "", false),
        (controller, system, "list", "pods", "", true),
        (controller, system, "delete", "pods", "", false),
        (controller, system, "get", "daemonsets", "istio-cni-node", true),
        (controller, system, "get", "daemonsets", "another", false),
        (controller, system, "update", "leases", "istio-taint-lock", true),
        (controller, system, "update", "leases", "another", false),
        (controller, system, "get", "configmaps", "istio-cni-taint-configmap", false),
        (controller, system, "get", "secrets", "", false),
        (controller, "default", "create", "events", "", true),
        (controller, "shop", "create", "events", "", false),
    ] {
        let may = cluster.may(account, namespace, verb, what, name)?;
        ensure!(may == wanted, "{account} in {namespace:?}: {verb} {what} {name}: {may}");
    }
    Ok(())
}

/// With the policy beside its roles an agent keeps taint and condition of its node; e2e/tests/cluster/own_node.rs tries what it may not.
#[test]
fn an_agent_that_is_held_to_its_own_node_does_all_its_work() -> Result<()> {
    let cluster = Cluster::alone("node-taint")?;
    let foreign = taint("example.com/a", "1", "NoSchedule");
    cluster.node("own", &[foreign.clone(), ours()])?;
    cluster.say("own", "Ready", "True")?;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent", "namespace": SYSTEM},
        "spec": {"nodeName": "own", "serviceAccountName": "istio-cni", "containers": [{"name": "x", "image": "x"}]}});
    cluster.api.create(&pod)?;
    let bound = ["--bound-object-kind=Pod", "--bound-object-name=agent"];
    let args = [&["create", "token", "istio-cni", "-n", SYSTEM][..], &bound].concat();
    let token = cluster.api.kubectl(&args)?.stdout.trim().to_owned();
    let account = cluster.path("own", "bound");
    fs::create_dir_all(&account)?;
    fs::copy(cluster.api.ca_path(), account.join("ca.crt"))?;
    fs::write(account.join("token"), &token)?;
    cluster.api.apply(OWN_NODE_ONLY)?;
    let kubeconfig = cluster.api.token_kubeconfig("agent", &token)?;
    let foreign_change =
        ["patch", "node", "own", "--dry-run=server", "-p", r#"{"metadata":{"annotations":{"x":"y"}}}"#];
    until("the policy to count", LIMIT, &[], || {
        let answer = cluster.api.kubectl_as(&kubeconfig, &foreign_change)?;
        Ok(answer.stderr.contains("istio-cni-own-node-only").then_some(()))
    })?;
    let agent = cluster.agent("own", &[("SERVICE_ACCOUNT_DIR", &account.display().to_string())])?;
    cluster.wait_taints("own", std::slice::from_ref(&foreign), &agent)?;
    cluster.wait_condition("own", "True", "Verified", &agent)?;
    cluster.wait_event("own", "cni-taint", "NodeFreed", &agent)?;
    fs::remove_file(cluster.path("own", "net.d/10-net.conflist"))?;
    cluster.wait_taints("own", &[foreign, ours()], &agent)?;
    cluster.wait_condition("own", "False", "AgentNotReady", &agent)?;
    end(&agent)
}
