//! `kubectl redirect` with a real API server: rights, a cluster of nodes whose kubelets answer `exec`, and what can go wrong there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::kubectl_support::kubelet::LIMIT;
use crate::kubectl_support::{Call, Kubelets, Reply, make_fleet};
use anyhow::{Context, Result, ensure};
use e2e::kube::{ApiServer, Sending};
use e2e::{program, tools};
use serde_json::{Value, json};
use test_support::process::{self, Background, Output};

/// A cluster whose nodes exist at the API server only, each with an agent.
struct Fleet {
    api: ApiServer,
    kubelets: Kubelets,
}

impl Fleet {
    fn start(nodes: usize, answer: impl Fn(&Call) -> Reply + Send + Sync + 'static) -> Result<Self> {
        let api = ApiServer::start()?;
        let kubelets = Kubelets::start(&api.node_identity("stand-in")?, answer)?;
        api.create_namespace("mesh")?;
        let names: Vec<String> = (0..nodes).map(|number| format!("node-{number}")).collect();
        let posts = names.iter().map(|name| {
            Sending::post(
                "/api/v1/nodes",
                &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}),
            )
        });
        let owners = make_fleet(&api, "mesh")?;
        let agents = names.iter().map(|name| {
            let mut agent = agent(name);
            agent["metadata"]["ownerReferences"] = owners.clone();
            Sending::post("/api/v1/namespaces/mesh/pods", &agent)
        });
        api.send_all(&posts.chain(agents).collect::<Vec<_>>())?;
        let node = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelets.port}}}});
        let statuses =
            names.iter().map(|name| Sending::merge(&format!("/api/v1/nodes/{name}/status"), &node));
        let agents = names.iter().map(|name| {
            Sending::merge(&format!("/api/v1/namespaces/mesh/pods/agent-{name}/status"), &running(true))
        });
        api.send_all(&statuses.chain(agents).collect::<Vec<_>>())?;
        Ok(Self { api, kubelets })
    }

    fn run(&self, words: &[&str]) -> Result<Output> {
        self.run_as(&self.api.admin_kubeconfig(), words)
    }

    fn run_as(&self, kubeconfig: &Path, words: &[&str]) -> Result<Output> {
        process::run(&mut command(kubeconfig, words)?, LIMIT)
    }
}

/// A node may take as long as a machine stands still, unless the test says otherwise.
pub fn command(kubeconfig: &Path, words: &[&str]) -> Result<Command> {
    let mut command = process::command(program::under_test("kubectl-redirect")?, words);
    command.env("KUBECONFIG", kubeconfig);
    if words.first() == Some(&"scan") && !words.contains(&"--timeout") {
        command.args(["--timeout", "150s"]);
    }
    Ok(command)
}

fn agent(node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("agent-{node}"), "namespace": "mesh", "labels": {"k8s-app": "istio-cni-node"}},
        "spec": {"nodeName": node, "containers": [{"name": "install-cni", "image": "hub/install-cni:0.1.0"}]},
    })
}

fn running(ready: bool) -> Value {
    json!({"status": {"phase": "Running", "containerStatuses": [{"name": "install-cni", "image": "i", "imageID": "i",
        "ready": ready, "restartCount": 0, "state": {"running": {"startedAt": "2026-11-21T00:00:00Z"}}}]}})
}

/// What `redirectctl scan --output json` answers for a node with `pods` mesh pods, the first `broken` of which are not redirected.
pub fn scan(node: &str, pods: usize, broken: usize) -> Reply {
    let pods: Vec<Value> = (0..pods)
        .map(|number| {
            let (state, findings) = if number < broken {
                (
                    "not-redirected",
                    json!([{"code": "not-redirected", "severity": "error", "meaning": "no rules of the mesh",
                    "seen": ["nothing"], "remedy": "restart the pod"}]),
                )
            } else {
                ("verified", json!([]))
            };
            json!({"subject": format!("shop/{node}-{number}"), "state": state, "consequences": [], "findings": findings})
        })
        .collect();
    let report = json!({"version": 1, "node": [], "pods": pods});
    Reply::ended(format!("{report:#}\n"), if broken > 0 { 2 } else { 0 })
}

/// The node of an agent of a [`Fleet`].
fn node_of(call: &Call) -> &str {
    call.container.trim_start_matches("mesh/agent-").trim_end_matches("/install-cni")
}

#[test]
fn a_hundred_nodes_are_asked_in_seconds_and_little_memory() -> Result<()> {
    let fleet = Fleet::start(100, |call| scan(node_of(call), 100, usize::from(node_of(call) == "node-7")))?;
    let folder = tempfile::tempdir()?;
    let began = Instant::now();
    let line = command(&fleet.api.admin_kubeconfig(), &["scan"])?;
    let log = folder.path().join("log");
    let program = Background::start("kubectl-redirect", &line, &log)?.killed_on_drop();
    // The peak is only known while it runs: the last reading counts.
    let mut most = 0;
    while program.ended().is_none() {
        most = memory(program.id()).unwrap_or(most);
        ensure!(began.elapsed() < LIMIT, "{}", program.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let took = began.elapsed();
    println!("100 nodes with 100 pods each: {took:?}, {most} KiB");
    let text = program.log();
    ensure!(text.contains("9999 of 10000 pods redirected, verified"), "{text}");
    ensure!(text.contains("100 of 100 nodes answered") && text.contains("shop/node-7-0"), "{text}");
    ensure!(text.contains("100 of hub/install-cni:0.1.0"), "{text}");
    ensure!(program.ended().and_then(|status| status.code()) == Some(2), "{:?}", program.ended());
    ensure!(most > 0 && most < 60 << 10, "{most} KiB");
    ensure!(fleet.kubelets.calls().len() == 100, "each agent is asked once");
    let most = fleet.kubelets.most_at_once();
    ensure!((2..=16).contains(&most), "{most} agents at once");
    Ok(())
}

/// What a scan needs.
const RIGHTS: [(&str, &str); 6] = [
    ("list", "nodes"),
    ("list", "pods"),
    ("get", "pods/exec"),
    ("create", "pods/exec"),
    ("list", "daemonsets.apps"),
    ("list", "clusterrolebindings.rbac.authorization.k8s.io"),
];

/// A user with rights on these: verb, and resource with the API group behind a dot.
fn user(api: &ApiServer, name: &str, rights: &[(&str, &str)]) -> Result<PathBuf> {
    api.create_service_account("mesh", name)?;
    let rules: Vec<Value> = rights
        .iter()
        .map(|(verb, resource)| {
            let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
            json!({"apiGroups": [group], "resources": [resource], "verbs": [verb]})
        })
        .collect();
    api.apply(
        &json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "mesh"}]},
        ]})
        .to_string(),
    )?;
    api.token_kubeconfig(name, &api.token("mesh", name)?)
}

#[test]
fn a_scan_needs_these_rights_and_names_the_one_that_is_missing() -> Result<()> {
    let fleet = Fleet::start(1, |call| scan(node_of(call), 1, 0))?;
    let rights = RIGHTS;
    let all = user(&fleet.api, "all", &rights)?;
    let output = fleet.run_as(&all, &["scan"])?;
    ensure!(
        output.code() == Some(0) && output.stdout.starts_with("1 of 1 pods redirected, verified"),
        "{output:?}"
    );
    // An administrator, as that user and as one without rights.
    fleet.run(&["scan", "--as", "system:serviceaccount:mesh:all"])?.ok()?;
    let output = fleet.run(&["scan", "--as", "nobody", "--as-group", "others"])?;
    ensure!(output.code() == Some(1) && output.stderr.contains("User \"nobody\" cannot list"), "{output:?}");
    // Servers from 1.35 on also ask for the right to create; this one is content with the other.
    for (index, words) in [
        (0, "missing right: list nodes"),
        (1, "missing right: list pods"),
        (2, "create pods/exec in namespace mesh"),
        (4, "missing right: list daemonsets"),
        (5, "missing right: list clusterrolebindings"),
    ] {
        let fewer: Vec<_> =
            rights.iter().enumerate().filter(|(at, _)| *at != index).map(|(_, right)| *right).collect();
        let kubeconfig = user(&fleet.api, &format!("without-{index}"), &fewer)?;
        let output = fleet.run_as(&kubeconfig, &["scan"])?;
        ensure!(
            output.code() == Some(1) && output.stdout.is_empty() && output.stderr.contains(words),
            "{output:?}"
        );
    }
    // Who names the namespace needs no right on bindings.
    let output =
        fleet.run_as(&user(&fleet.api, "names-it", &rights[..5])?, &["scan", "--agent-namespace", "mesh"])?;
    ensure!(output.code() == Some(0), "{output:?}");
    let without = user(&fleet.api, "pod-nobody", &rights[1..])?;
    let output = fleet.run_as(&without, &["pod", "shop/cart-0"])?;
    ensure!(
        output.code() == Some(1) && output.stderr.contains("missing right: get pods cart-0"),
        "{output:?}"
    );
    Ok(())
}

/// As kubectl finds it, with a credential helper, and a context that is not the current one.
#[test]
fn kubectl_runs_it_with_the_users_own_kubeconfig() -> Result<()> {
    let fleet = Fleet::start(1, |call| scan(node_of(call), 1, 0))?;
    user(&fleet.api, "helped", &RIGHTS)?;
    let token = fleet.api.token("mesh", "helped")?;
    let credential = json!({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token}});
    let helper = json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "echo", "args": [credential.to_string()],
        "interactiveMode": "Never"}});
    let mut config = fleet.api.kubeconfig(&helper)?;
    config["current-context"] = json!("other");
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("config");
    fs::write(&file, config.to_string())?;
    let programs = program::under_test("kubectl-redirect")?;
    let path = format!("{}:{}", programs.parent().context("a folder")?.display(), std::env::var("PATH")?);
    let run = |words: &[&str]| {
        let mut kubectl = process::command(tools::built("kubectl")?, [&["redirect"], words].concat());
        process::run(kubectl.env("PATH", &path).env("KUBECONFIG", &file), LIMIT)
    };
    let output = run(&["scan", "--context", "e2e"])?;
    ensure!(output.code() == Some(0) && output.stdout.starts_with("1 of 1 pods redirected"), "{output:?}");
    let output = run(&["scan"])?;
    ensure!(
        output.code() == Some(1) && output.stderr.contains("other") && output.stderr.contains("--context"),
        "{output:?}"
    );
    let output = run(&["scan", "--kubeconfig", "/nonexistent/config"])?;
    ensure!(output.code() == Some(1) && output.stderr.contains("/nonexistent/config"), "{output:?}");
    Ok(())
}

#[test]
fn every_node_that_does_not_answer_is_told_with_the_reason() -> Result<()> {
    const ISTIOS: &str = "failed to exec in container: OCI runtime exec failed: exec: \"redirectctl\": executable file not found in $PATH";
    let fleet = Fleet::start(7, |call| match node_of(call) {
        "node-1" => Reply::Silent,
        "node-2" => Reply::Refused(ISTIOS),
        "node-3" => Reply::Ended {
            stdout: Vec::new(),
            stderr: "error\tthe account needs the verb list on pods\n".to_owned(),
            code: 1,
        },
        "node-4" => Reply::ended("{\"version\": 9}", 0),
        node => scan(node, 2, 0),
    })?;
    let waiting = json!({"status": {"containerStatuses": [{"name": "install-cni", "image": "i", "imageID": "i", "ready": false,
        "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}});
    let status = |node: &str, status: &Value| {
        Sending::merge(&format!("/api/v1/namespaces/mesh/pods/agent-{node}/status"), status)
    };
    let mut mesh_pod = agent("node-6");
    mesh_pod["metadata"] =
        json!({"name": "cart", "namespace": "mesh", "annotations": {"sidecar.istio.io/status": "{}"}});
    fleet.api.send_all(&[
        status("node-5", &waiting),
        status("node-0", &running(false)),
        Sending::delete("/api/v1/namespaces/mesh/pods/agent-node-6"),
        Sending::post("/api/v1/namespaces/mesh/pods", &mesh_pod),
    ])?;
    let output = fleet.run(&["scan", "--timeout", "5s"])?;
    let text = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "2 of 2 pods redirected, verified 0 pods outside the mesh or excluded; 1 of 7 nodes answered",
        "no answer: no response within 5s; --timeout gives it longer: node-1",
        "no answer: image hub/install-cni:0.1.0 has no redirectctl; is it Istio's, or older than kubectl-redirect?: node-2",
        "the account needs the verb list on pods: node-3",
        "redirectctl answers in version 9 of its documents",
        "agent not running: CrashLoopBackOff: node-5",
        "no agent, and 1 mesh pod: node-6",
        "agents not ready: mesh/agent-node-0 on node-0",
    ] {
        ensure!(text.contains(words), "{words}: {}", output.stdout);
    }
    ensure!(output.code() == Some(2) && output.stderr.is_empty(), "{output:?}");
    let output = fleet.run(&["scan", "--node", "node-3"])?;
    ensure!(output.code() == Some(1) && output.stdout.contains("0 of 1 node answered"), "{output:?}");
    let output = fleet.run(&["scan", "--node", "node-9"])?;
    ensure!(output.code() == Some(1) && output.stderr.contains("no Linux node node-9"), "{output:?}");
    fleet.api.kubectl(&["delete", "pods", "-n", "mesh", "--all", "--grace-period=0", "--force"])?;
    let output = fleet.run(&["scan"])?;
    ensure!(output.code() == Some(1) && output.stderr.contains("no agent found"), "{output:?}");
    Ok(())
}

#[test]
fn pods_are_asked_for_by_namespace_and_labels() -> Result<()> {
    let fleet = Fleet::start(2, |call| scan(node_of(call), 3, 1))?;
    fleet.api.create_namespace("shop")?;
    for (name, app) in [("node-0-0", "cart"), ("node-1-2", "cart"), ("node-1-0", "web")] {
        let mut pod = agent("node-0");
        pod["metadata"] = json!({"name": name, "namespace": "shop", "labels": {"app": app}});
        fleet.api.create(&pod)?;
    }
    let json = |words: &[&str]| -> Result<(Value, Option<i32>)> {
        let output = fleet.run(&[&["scan", "-o", "json"], words].concat())?;
        Ok((serde_json::from_str(&output.stdout).with_context(|| format!("{output:?}"))?, output.code()))
    };
    let (all, code) = json(&[])?;
    ensure!(all["expected"] == 6 && all["redirected"] == 4 && code == Some(2), "{all}");
    ensure!(all["pods"][0]["subjects"] == json!(["shop/node-0-0", "shop/node-1-0"]), "{all}");
    let (some, code) = json(&["-n", "shop", "-l", "app=cart"])?;
    ensure!(some["expected"] == 2 && some["redirected"] == 1 && code == Some(2), "{some}");
    let (none, code) = json(&["-n", "other"])?;
    ensure!(none["expected"] == 0 && code == Some(0), "{none}");
    Ok(())
}

#[test]
fn commands_about_a_pod_run_on_its_node_with_the_same_words() -> Result<()> {
    let archive: Vec<u8> = (0..100_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    let bytes = archive.clone();
    let fleet = Fleet::start(2, move |call| match call.words.get(1).map(String::as_str) {
        Some("pod") => {
            Reply::Ended { stdout: b"not redirected\n".to_vec(), stderr: "a warning\n".to_owned(), code: 2 }
        }
        Some("bundle") => Reply::ended(bytes.clone(), 0),
        _ => Reply::ended("fine\n", 0),
    })?;
    let mut pod = agent("node-1");
    pod["metadata"] = json!({"name": "cart-0", "namespace": "default"});
    fleet.api.create(&pod)?;
    let words = |words: &[&str]| Call {
        container: "mesh/agent-node-1/install-cni".to_owned(),
        words: [&["redirectctl"], words].concat().iter().map(|word| (*word).to_owned()).collect(),
    };
    let output = fleet.run(&["pod", "default/cart-0", "--agent", "127.0.0.1:8000"])?;
    ensure!(
        (output.stdout.as_str(), output.stderr.as_str(), output.code())
            == ("not redirected\n", "a warning\n", Some(2)),
        "{output:?}"
    );
    ensure!(
        fleet.kubelets.calls() == [words(&["pod", "default/cart-0", "--agent", "127.0.0.1:8000"])],
        "{:?}",
        fleet.kubelets.calls()
    );
    let output = fleet.run(&["trace", "cart-0", "--to", "198.51.100.1:443", "-n", "default", "--every"])?;
    ensure!(output.stdout == "fine\n" && output.code() == Some(0), "{output:?}");
    let traced = words(&["trace", "--pod", "default/cart-0", "--to", "198.51.100.1:443", "--every"]);
    ensure!(fleet.kubelets.calls()[1..] == [traced], "{:?}", fleet.kubelets.calls());
    fleet.run(&["verify", "default/cart-0", "--netns", "/proc/1/ns/net"])?.ok()?;
    let verified = words(&["verify", "--pod", "default/cart-0", "--netns", "/proc/1/ns/net"]);
    ensure!(fleet.kubelets.calls()[2..] == [verified], "{:?}", fleet.kubelets.calls());
    fleet.run(&["why", "foreign-rule"])?.ok()?;
    let output = fleet.run(&["pod", "default/none"])?;
    ensure!(output.code() == Some(1) && output.stderr.contains("no pod default/none"), "{output:?}");
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("ticket.tar.gz").display().to_string();
    fleet.run(&["bundle", "default/cart-0", "--file", &file])?.ok()?;
    ensure!(fs::read(&file)? == archive, "the archive is not as it was sent");
    ensure!(fleet.kubelets.calls().last() == Some(&words(&["bundle", "-"])), "{:?}", fleet.kubelets.calls());
    let output = fleet.run(&["bundle", "--node", "node-1", "--file", &file])?;
    ensure!(output.code() == Some(1) && output.stderr.contains("nothing is overwritten"), "{output:?}");
    Ok(())
}

#[test]
fn a_precheck_reads_the_cluster_and_names_what_to_do() -> Result<()> {
    let fleet = Fleet::start(1, |_| Reply::Silent)?;
    let info = json!({"status": {"nodeInfo": {"kernelVersion": "4.9.0", "operatingSystem": "linux", "architecture": "amd64",
        "containerRuntimeVersion": "containerd://2.1.9", "kubeletVersion": "v1.34.4+k3s1", "kubeProxyVersion": "", "machineID": "",
        "systemUUID": "", "bootID": "", "osImage": ""}}});
    fleet.api.send_all(&[Sending::merge("/api/v1/nodes/node-0/status", &info)])?;
    fleet.api.kubectl(&["label", "namespace", "mesh", "pod-security.kubernetes.io/enforce=privileged"])?;
    let set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "cilium", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": {"k8s-app": "cilium"}}, "template": {"metadata": {"labels": {"k8s-app": "cilium"}},
            "spec": {"containers": [{"name": "a", "image": "a"}]}}}});
    let config = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "cilium-config", "namespace": "kube-system"},
        "data": {"cni-exclusive": "false", "bpf-lb-sock-hostns-only": "false"}});
    let mut exporter = agent("node-0");
    exporter["metadata"] = json!({"name": "exporter", "namespace": "mesh"});
    exporter["spec"]["hostNetwork"] = json!(true);
    exporter["spec"]["containers"][0]["ports"] = json!([{"containerPort": 15014}]);
    for object in [set, config, exporter] {
        fleet.api.create(&object)?;
    }
    let outcomes = |output: &Output| -> Result<Vec<(String, String)>> {
        let document: Value = serde_json::from_str(&output.stdout).with_context(|| format!("{output:?}"))?;
        let checks = document["checks"].as_array().context("checks")?.iter();
        let text = |check: &Value, name: &str| check[name].as_str().unwrap_or_default().to_owned();
        Ok(checks.map(|check| (text(check, "name"), text(check, "outcome"))).collect())
    };
    let of = |all: &[(String, String)], outcome: &str| -> Vec<String> {
        all.iter().filter(|(_, word)| word == outcome).map(|(name, _)| name.clone()).collect()
    };
    let output = fleet.run(&["precheck", "-n", "mesh", "-o", "json"])?;
    let all = outcomes(&output)?;
    ensure!(
        output.code() == Some(2)
            && of(&all, "failed") == ["kernel", "ports"]
            // The agents of the test are those of no Helm release.
            && of(&all, "warning") == ["cilium", "existing-agent"],
        "{output:?}"
    );
    let text =
        fleet.run(&["precheck", "-n", "mesh"])?.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "Kubernetes v1.34.4",
        "older than 4.14: node-0",
        "platform=k3s",
        "15014 is used on nodes by mesh/exporter",
        "--set monitoringPort=PORT",
        "socketLB.hostNamespaceOnly=true",
        "cannot be installed yet: 2 failed, 2 warnings",
    ] {
        ensure!(text.contains(words), "{words}: {text}");
    }
    let nobody = user(&fleet.api, "nobody", &[("list", "nodes")])?;
    let output = fleet.run_as(&nobody, &["precheck", "-n", "mesh"])?;
    let text = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "missing: create daemonsets.apps in namespace mesh,",
        "missing: list pods, list clusterrolebindings.rbac.authorization.k8s.io,",
        "network-plugin: not checked: missing right: list daemonsets",
    ] {
        ensure!(text.contains(words), "{words}: {text}");
    }
    fleet.api.stop();
    let output = fleet.run(&["precheck"])?;
    ensure!(output.code() == Some(1) && output.stderr.contains("cannot read the version"), "{output:?}");
    Ok(())
}

/// The most memory that a process had until now, in KiB.
fn memory(id: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}
