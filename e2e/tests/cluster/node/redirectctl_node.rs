//! `redirectctl` on a real node of a real cluster, with the agent's own entry: the predicate of every pod that is left alone, the cause of every
//! pod that is broken, each with its remedy, and what is wrong with the node. One cluster for all of it.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

use crate::agent_support::host_agent::HostAgent;
use crate::agent_support::{MANIFEST, NAMESPACE, POD, apply_manifest, programs, run_dir, wait_loaded};
use anyhow::{Context, Result, ensure};
use e2e::archive;
use e2e::kube::ApiServer;
use e2e::node::{Node, Pod, plain_pod, sidecar_pod};
use e2e::program;
use e2e::traffic::{PROXY_ID, TcpServer, UdpServer, as_user};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::{self, Output, until};

const QUIET: &str = "quiet";
/// The proxy's ports as the container of a proxy serves them.
const SERVES: &str = "nc -ll -p 15001 -e true & nc -ll -p 15006 -e true & exec sleep 1000000";
/// Planted in every pod and in the node's configuration; each place adds its own ending.
const SECRET: &str = "pa55w0rd-";
/// The pod whose proxy answers DNS.
const WITH_DNS: &str = "with-dns";
/// The pod that no plugin is asked about.
const HOST: &str = "host";
const APP: usize = 0;
const PROXY: usize = 1;

/// A pod, how it differs from one with nothing wrong, and what is to be said of it.
struct Case {
    name: &'static str,
    namespace: &'static str,
    /// The reason to leave it alone; empty where it is redirected.
    skip: &'static str,
    /// All causes that are more than notes.
    causes: &'static [&'static str],
    /// How its object differs.
    change: fn(&mut Value),
    /// What happens in its network namespace once it runs.
    script: &'static str,
    /// Whether it comes to run.
    runs: bool,
}

const WHOLE: Case = Case {
    name: "whole",
    namespace: "default",
    skip: "",
    causes: &[],
    change: |_| (),
    script: "",
    runs: true,
};

const fn skipped(name: &'static str, reason: &'static str, change: fn(&mut Value)) -> Case {
    Case { name, skip: reason, change, ..WHOLE }
}

const fn broken(name: &'static str, causes: &'static [&'static str], script: &'static str) -> Case {
    Case { name, causes, script, ..WHOLE }
}

const fn odd(name: &'static str, causes: &'static [&'static str], change: fn(&mut Value)) -> Case {
    Case { name, causes, change, ..WHOLE }
}

fn annotate(pod: &mut Value, name: &str, value: &str) {
    pod["metadata"]["annotations"][format!("traffic.sidecar.istio.io/{name}")] = json!(value);
}

fn proxy_serves(pod: &mut Value, command: &str) {
    pod["spec"]["containers"][PROXY]["command"] = json!(["/bin/sh", "-c", command]);
}

fn proxy_says(pod: &mut Value, name: &str) {
    let env = &mut pod["spec"]["containers"][PROXY]["env"];
    env.as_array_mut().expect("a list").push(json!({"name": name, "value": "true"}));
}

fn init_container(pod: &mut Value, name: &str, command: &str) {
    let image = pod["spec"]["containers"][APP]["image"].clone();
    pod["spec"]["initContainers"] = json!([{"name": name, "image": image, "imagePullPolicy": "Never", "command": ["/bin/sh", "-c", command]}]);
}

/// Every reason of the plugin to leave a pod alone, but the one that no Kubernetes node has: that no pod is named.
const SKIPPED: &[Case] = &[
    Case { namespace: NAMESPACE, ..skipped("istio-cni-node-pod", "agent_pod", |_| ()) },
    Case { namespace: QUIET, ..skipped("excluded", "namespace_excluded", |_| ()) },
    // That one does not do what it is there for.
    Case {
        causes: &["not-redirected"],
        ..skipped("has-init", "has_init_container", |pod| init_container(pod, "istio-init", "true"))
    },
    skipped("disabled", "proxy_disabled", |pod| proxy_says(pod, "DISABLE_ENVOY")),
    skipped("router", "not_a_sidecar", |pod| {
        pod["spec"]["containers"][PROXY]["args"] = json!(["proxy", "router"]);
    }),
    skipped("labelled", "injection_disabled", |pod| {
        pod["metadata"]["labels"] = json!({"sidecar.istio.io/inject": "false"});
    }),
    skipped("no-status", "not_injected", |pod| {
        pod["metadata"]["annotations"] = json!({});
    }),
    skipped("no-mode", "interception_none", |pod| {
        pod["metadata"]["annotations"]["sidecar.istio.io/interceptionMode"] = json!("NONE");
    }),
    skipped("plain", "no_proxy", |pod| *pod = plain_pod("plain")),
];

/// Everything else, each with one thing wrong.
const OTHERS: &[Case] = &[
    WHOLE,
    broken("emptied", &["not-redirected"], "nft flush ruleset"),
    broken("accepted", &["foreign-rule"], "iptables -t nat -I OUTPUT 1 -j ACCEPT"),
    broken(
        "stolen",
        &["foreign-rule"],
        "nft 'add table ip other; add chain ip other in { type nat hook prerouting priority -150; }; \
         add rule ip other in tcp dport 8080 redirect to :3128'",
    ),
    broken(
        "dropped",
        &["foreign-rule"],
        "nft 'add table inet other; add chain inet other out { type filter hook output priority -300; }; \
         add rule inet other out meta l4proto tcp tcp dport 80 drop'",
    ),
    broken(
        "limited",
        &["foreign-rule-may-interfere"],
        "iptables -t nat -I OUTPUT 1 -p tcp -m limit --limit 5/min -j ACCEPT",
    ),
    broken("uncaptured", &["rules-differ"], "iptables -t nat -D ISTIO_OUTPUT -j ISTIO_REDIRECT"),
    broken("unhooked", &["rules-differ"], "iptables -t nat -D PREROUTING -p tcp -j ISTIO_INBOUND"),
    broken("one-family", &["one-family-missing"], "nft delete table ip6 nat"),
    broken("no-passthrough", &["passthrough-address-missing"], "ip addr del ::6/128 dev lo"),
    broken(
        "legacy",
        &["two-backends"],
        "iptables-legacy -t nat -N ISTIO_OUTPUT; iptables-legacy -t nat -A OUTPUT -p tcp -j ISTIO_OUTPUT; \
         iptables-legacy -t nat -A ISTIO_OUTPUT -j RETURN",
    ),
    broken("no-loopback", &["loopback-down"], "ip addr flush dev lo scope host"),
    Case {
        script: "ip rule del fwmark 0x539",
        ..odd("tproxy", &["routing-missing"], |pod| {
            pod["metadata"]["annotations"]["sidecar.istio.io/interceptionMode"] = json!("TPROXY");
        })
    },
    odd(WITH_DNS, &[], |pod| proxy_says(pod, "ISTIO_META_DNS_CAPTURE")),
    odd("no-dns", &["dns-nobody-listens"], |pod| proxy_says(pod, "ISTIO_META_DNS_CAPTURE")),
    odd("no-proxy-yet", &["nobody-listens"], |pod| proxy_serves(pod, "exec sleep 1000000")),
    odd("stranger", &["stranger-listens"], |pod| {
        proxy_serves(pod, "nc -ll -p 15006 -e true & exec sleep 1000000");
        pod["spec"]["containers"][APP]["command"] = json!(["/bin/sh", "-c", "exec nc -ll -p 15001 -e true"]);
    }),
    odd("port", &["port-not-captured"], |pod| annotate(pod, "excludeInboundPorts", "8080")),
    odd("misspelt", &["misspelt-setting"], |pod| annotate(pod, "excludeOutboundPort", "80")),
    odd("single-stack", &[], |pod| {
        pod["spec"]["containers"][PROXY]["env"] = json!([]);
    }),
    odd("same-user", &["uid-collision"], |pod| {
        pod["spec"]["containers"][APP]["securityContext"] = json!({"runAsUser": 1337});
    }),
    odd("migrates", &["init-without-network"], |pod| init_container(pod, "migrate", "true")),
    odd(HOST, &["host-network"], |pod| pod["spec"]["hostNetwork"] = json!(true)),
    Case {
        runs: false,
        ..odd("unreadable", &["bad-settings", "not-set-up"], |pod| {
            annotate(pod, "excludeOutboundPorts", "http");
        })
    },
    Case {
        runs: false,
        ..odd("held", &["not-repaired", "awaits-validation"], |pod| {
            let verdict = json!({"reason": "no-rules", "message": "m"}).to_string();
            init_container(
                pod,
                "istio-validation",
                &format!("echo '{verdict}' >/dev/termination-log; exit 126"),
            );
        })
    },
];

/// A node with its agent outside of any pod, and `redirectctl` on it.
struct Ward<'n> {
    node: &'n Node<'n>,
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Ward<'_> {
    fn redirectctl(&self, kubeconfig: &Path, args: &[&str]) -> Result<Output> {
        let mut command = process::command(&self.program, args);
        command.args(["--kubeconfig", &kubeconfig.display().to_string()]);
        if ["cni", "bundle"].contains(&args[0]) {
            command.args(["--cni-bin-dir", &self.node.bin_dir().display().to_string()]);
        }
        if ["pod", "scan", "cni", "bundle"].contains(&args[0]) {
            command.args(["--cni-conf-dir", &self.node.conf_dir().display().to_string()]);
        }
        command.env("NODE_NAME", self.node.name());
        self.node.run(&command)
    }

    /// What a code means and what to do, as the program explains it without a cluster.
    fn why(&self, code: &str) -> Result<String> {
        let mut command = process::command(&self.program, ["why", code]);
        let text = process::run(&mut command, POD)?.ok()?.stdout;
        let lines = text.lines().skip(1).take_while(|line| line.starts_with(' '));
        Ok(flat(&lines.collect::<Vec<_>>().join(" ")))
    }

    fn json(&self, args: &[&str]) -> Result<Value> {
        let output = self.redirectctl(&self.kubeconfig, &[args, &["--output", "json"]].concat())?;
        ensure!(output.stderr.is_empty(), "{}", output.stderr);
        serde_json::from_str(&output.stdout).with_context(|| output.stdout.clone())
    }
}

/// Codes of findings that are more than notes.
fn codes(findings: &Value) -> Vec<&str> {
    let findings = findings.as_array().into_iter().flatten();
    findings.filter(|one| one["severity"] != "note").filter_map(|one| one["code"].as_str()).collect()
}

/// Text without line ends and indentation.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl Case {
    fn object(&self) -> Value {
        let mut pod = sidecar_pod(self.name);
        pod["metadata"]["annotations"]["vault.example.com/token"] = format!("{SECRET}annotation").into();
        pod["spec"]["containers"][APP]["env"] =
            json!([{"name": "PASSWORD", "value": format!("{SECRET}variable")}]);
        pod["spec"]["containers"][APP]["ports"] = json!([{"containerPort": 8080}]);
        pod["spec"]["containers"][PROXY]["env"] = json!([{"name": "ISTIO_DUAL_STACK", "value": "true"}]);
        proxy_serves(&mut pod, SERVES);
        (self.change)(&mut pod);
        pod["metadata"]["namespace"] = json!(self.namespace);
        pod
    }

    fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Waits until the pod is as far as it comes, and breaks it.
    fn arrange(&self, api: &ApiServer, pod: &Pod<'_>) -> Result<()> {
        if self.runs {
            pod.wait_running(POD)?;
        }
        if !self.script.is_empty() {
            pod.namespace()?.sh(self.script).with_context(|| self.name)?;
        }
        // The kubelet reports to the API server later than it knows itself.
        let path = format!("/api/v1/namespaces/{}", self.namespace);
        until(&format!("the status of {}", self.name), POD, &[], || {
            let now = api.read(&format!("{path}/pods/{}", self.name))?;
            if self.runs {
                let wanted = if now["spec"]["hostNetwork"] == true { 1 } else { 2 };
                let listed = now["status"]["podIPs"].as_array().is_some_and(|all| all.len() == wanted);
                return Ok((now["status"]["phase"] == "Running" && listed).then_some(()));
            }
            if self.causes.contains(&"awaits-validation") {
                return Ok(now["status"].to_string().contains("\"exitCode\":126").then_some(()));
            }
            let events = api.read(&format!("{path}/events?fieldSelector=reason=FailedCreatePodSandBox"))?;
            Ok(events.to_string().contains(self.name).then_some(()))
        })
    }
}

/// The proxy's part in DNS, for as long as the value lives.
fn answer_dns(inside: &Namespace) -> Result<(TcpServer, UdpServer)> {
    let any = (Ipv6Addr::UNSPECIFIED, 15053);
    as_user(PROXY_ID, PROXY_ID, || {
        Ok((TcpServer::start(inside, "dns", any)?, UdpServer::start(inside, "dns", any)?))
    })
}

/// An event as the agent sends it.
fn send_event(api: &ApiServer, pod: &str, reason: &str, message: &str) -> Result<()> {
    let uid = api.get("pod", "default", pod)?["metadata"]["uid"].clone();
    let time = "2026-11-22T00:00:00Z";
    api.create(&json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": format!("{pod}.1"), "namespace": "default"},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": pod, "uid": uid}, "source": {"component": "cni-repair"},
        "type": "Warning", "reason": reason, "message": message, "firstTimestamp": time, "lastTimestamp": time, "count": 1}))
    .map(drop)
}

#[test]
fn every_pod_of_a_real_node_is_told_with_its_predicate_or_its_cause_and_remedy() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    apply_manifest(&api, &node, MANIFEST)?;
    api.create_namespace(QUIET)?;
    let mut agent = HostAgent::new(&node, &api, &programs()?)?;
    agent.env.push(("EXCLUDE_NAMESPACES", QUIET.to_owned()));
    // A pod that was there before the plugin.
    let early = node.start_pod(&Case { name: "early", ..WHOLE }.object())?;
    early.wait_running(POD)?;
    agent.start()?;
    agent.wait_ready()?;
    wait_loaded(&node)?;

    let cases: Vec<&Case> = SKIPPED.iter().chain(OTHERS).collect();
    let pods = cases.iter().map(|case| node.start_pod(&case.object())).collect::<Result<Vec<_>>>()?;
    for (case, pod) in cases.iter().zip(&pods) {
        case.arrange(&api, pod)?;
    }
    let _dns = answer_dns(&node.pod("default", WITH_DNS).namespace()?)?;
    send_event(
        &api,
        "held",
        "RepairBrokenPod",
        "pod detected as broken (x), but it could not be redirected: y",
    )?;
    let ward = Ward {
        node: &node,
        program: program::under_test("redirectctl")?,
        kubeconfig: api.admin_kubeconfig(),
    };

    one_scan_tells_them_all(&ward, &cases)?;
    each_pod_is_told_with_its_reason_and_remedy(&ward, &cases)?;
    packets_of_pods_are_followed(&ward)?;
    the_plugin_is_asked_as_its_runtime_asks_it(&ward)?;
    a_bundle_has_what_a_ticket_needs_and_no_secret(&ward, &api, &cases)?;
    fewer_rights_tell_less_and_say_so(&ward, &node)?;
    what_is_wrong_with_the_node_comes_first(&ward, &api, &node, &mut agent)
}

/// How many ADDs a line of the agent's counts says were refused for a pod's settings.
fn refused_adds(line: &Value) -> Option<usize> {
    let count =
        line.as_str()?.strip_prefix("istio_cni_plugin_add_total{outcome=\"fail\",reason=\"100\"} ")?;
    count.strip_suffix(": ADD calls the plugin reported")?.parse().ok()
}

fn one_scan_tells_them_all(ward: &Ward<'_>, cases: &[&Case]) -> Result<()> {
    // The kubelet tries a pod that was refused again, every ten seconds or so.
    let log = fs::read_to_string(ward.node.state_dir().join("agent.log"))?;
    let logged = log.lines().filter(|line| line.contains("code=100 decision=fail ")).count();
    ensure!(logged > 0, "{log}");
    let scan = ward.json(&["scan"])?;
    ensure!(codes(&scan["node"]).is_empty(), "nothing is wrong with the node: {:#}", scan["node"]);
    let seen = |code: &str| {
        let mut notes = scan["node"].as_array().into_iter().flatten();
        notes.find(|note| note["code"] == code).map(|note| &note["seen"])
    };
    ensure!(seen("family-not-captured") == Some(&json!(["pod default/single-stack"])), "{:#}", scan["node"]);
    // A slow machine has slow ADDs beside it.
    let counts = seen("agent-counts").and_then(Value::as_array).context("no counts")?;
    let counted = counts.iter().find_map(refused_adds).with_context(|| format!("{counts:#?}"))?;
    ensure!(counted >= logged, "the agent logs an ADD once it has counted it: {logged}, {counts:#?}");
    // The runtime ends after the plugin.
    let unreadable = ward.node.pod("default", "unreadable");
    let as_many = || Ok((unreadable.sandbox_failures().len() >= counted).then_some(()));
    until(&format!("{counted} sandboxes of the unreadable pod to fail"), POD, &[], as_many)?;
    let told: BTreeMap<&str, Vec<&str>> = scan["pods"]
        .as_array()
        .context("pods")?
        .iter()
        .map(|pod| (pod["subject"].as_str().unwrap_or("?"), codes(&pod["findings"])))
        .collect();
    let mut wanted: BTreeMap<String, Vec<&str>> =
        cases.iter().map(|case| (case.full_name(), case.causes.to_vec())).collect();
    wanted.insert("default/early".to_owned(), vec!["not-redirected"]);
    let told: BTreeMap<String, Vec<&str>> =
        told.into_iter().map(|(name, codes)| (name.to_owned(), codes)).collect();
    assert_eq!(told, wanted);
    Ok(())
}

fn each_pod_is_told_with_its_reason_and_remedy(ward: &Ward<'_>, cases: &[&Case]) -> Result<()> {
    for case in cases {
        let output = ward.redirectctl(&ward.kubeconfig, &["pod", &case.full_name()])?;
        let text = flat(&output.stdout);
        ensure!(output.stderr.is_empty(), "{}: {}", case.name, output.stderr);
        ensure!(output.code() == Some(if case.causes.is_empty() { 0 } else { 2 }), "{}: {text}", case.name);
        if case.skip.is_empty() {
            let decision = match case.name {
                HOST => "none: the pod is on the host's network",
                "unreadable" => "none: its settings cannot be understood",
                _ => "to be redirected: ",
            };
            let is_decided = text.contains(decision);
            ensure!(is_decided, "{}: {text}", case.name);
        } else {
            ensure!(
                text.contains(&format!("({})", case.skip)),
                "{}, wanted {}: {text}",
                case.name,
                case.skip
            );
            ward.why(case.skip)?;
        }
        for cause in case.causes {
            let meaning = ward.why(cause)?;
            let (meaning, remedy) = meaning.split_once("what to do: ").context("a remedy")?;
            for wanted in [format!("{cause}: {}", meaning.trim()), format!("what to do: {remedy}")] {
                ensure!(text.contains(&wanted), "{}, wanted {wanted}: {text}", case.name);
            }
        }
    }
    let held = flat(&ward.redirectctl(&ward.kubeconfig, &["pod", "default/held"])?.stdout);
    ensure!(held.contains("no-rules: ") && held.contains("it could not be redirected: y"), "{held}");
    let unreadable = flat(&ward.redirectctl(&ward.kubeconfig, &["pod", "default/unreadable"])?.stdout);
    ensure!(
        unreadable.contains("istio-cni") && unreadable.contains("\"http\" is not a whole number"),
        "{unreadable}"
    );
    Ok(())
}

fn packets_of_pods_are_followed(ward: &Ward<'_>) -> Result<()> {
    let trace = |pod: &str| -> Result<String> {
        let args = ["trace", "--as", "app", "--to", "198.51.100.1:80", "--pod", pod];
        Ok(ward.redirectctl(&ward.kubeconfig, &args)?.ok()?.stdout)
    };
    let whole = trace("default/whole")?;
    ensure!(whole.contains("ends at: proxy, outbound listener (port 15001)"), "{whole}");
    let plain = trace("default/plain")?;
    ensure!(plain.contains("ends at: untouched"), "{plain}");
    Ok(())
}

/// With what containerd remembers of each pod's ADD, and the plugin's own way to the API server.
fn the_plugin_is_asked_as_its_runtime_asks_it(ward: &Ward<'_>) -> Result<()> {
    let check = |pod: &str| -> Result<Output> {
        ward.redirectctl(&ward.kubeconfig, &["cni", "check", pod, "--output", "json"])
    };
    for (pod, code) in [
        ("default/whole", Value::Null),
        ("default/plain", Value::Null),
        ("default/uncaptured", json!(111)),
        ("default/early", json!(111)),
        ("default/accepted", json!(111)),
    ] {
        let inside = ward.node.pod("default", pod.trim_start_matches("default/")).namespace()?;
        let before = inside.snapshot()?;
        let output = check(pod)?;
        let told: Value =
            serde_json::from_str(&output.stdout).with_context(|| format!("{pod}: {output:?}"))?;
        assert_eq!(output.code(), Some(if code.is_null() { 0 } else { 2 }), "{pod}: {told:#}");
        assert_eq!(told["answer"]["asPlanned"], code.is_null(), "{pod}: {told:#}");
        assert_eq!(told["answer"].get("code").cloned().unwrap_or_default(), code, "{pod}: {told:#}");
        let remembered = told["previous"].as_str().unwrap_or_default();
        ensure!(remembered.starts_with("/var/lib/cni/results/"), "{pod}: {told:#}");
        assert_eq!(told["notes"], json!([]), "{pod}: a runtime would ask the same");
        let container = told["environment"]["CNI_CONTAINERID"].as_str().unwrap_or_default();
        ensure!(container.len() == 64 && remembered.contains(container), "{pod}: {told:#}");
        let changes = inside.snapshot()?.changes_since(&before);
        ensure!(changes.is_empty(), "{pod}: CHECK changes nothing: {changes:?}");
    }
    let text = ward.redirectctl(&ward.kubeconfig, &["cni", "check", "default/uncaptured"])?;
    ensure!(flat(&text.stdout).contains("redirectctl why cni-111 explains the code"), "{text:?}");
    let nobody = check("default/nobody")?;
    ensure!(nobody.code() == Some(1) && nobody.stdout.is_empty(), "{nobody:?}");
    ensure!(nobody.stderr.lines().count() == 1 && nobody.stderr.contains("default/nobody"), "{nobody:?}");
    Ok(())
}

fn a_bundle_has_what_a_ticket_needs_and_no_secret(
    ward: &Ward<'_>,
    api: &ApiServer,
    cases: &[&Case],
) -> Result<()> {
    let secret = json!({"cniVersion": "1.0.0", "name": "other", "type": "ptp", "token": format!("{SECRET}configuration")});
    ward.node.write_conf("99-other.conf", &secret)?;
    let credentials = fs::read_to_string(run_dir(ward.node).join("istio-cni-kubeconfig"))?;
    let token =
        credentials.lines().find_map(|line| line.trim().strip_prefix("token: ")).context("a token")?;
    let file = ward.node.state_dir().join("ticket.tar.gz");
    // The agent is outside of any pod here, and one of the pods is called as its would be.
    let (path, metrics) = (file.display().to_string(), "127.0.0.1:15014");
    let output = ward.redirectctl(&ward.kubeconfig, &["bundle", &path, "--metrics", metrics])?.ok()?;
    ensure!(output.stderr.is_empty(), "{output:?}");
    let entries = archive::entries(&file)?;
    for (name, text) in &entries {
        for what in [SECRET, token.trim_matches('"'), "PRIVATE KEY", "client-key-data"] {
            ensure!(!text.contains(what), "{name} has {what}:\n{text}");
        }
    }
    let scan: Value = serde_json::from_str(entries.get("scan.json").context("scan.json")?)?;
    let live = ward.json(&["scan"])?;
    for (at, pod) in live["pods"].as_array().context("pods")?.iter().enumerate() {
        let found = |pod: &Value| codes(&pod["findings"]).join(" ");
        assert_eq!(found(&scan["pods"][at]), found(pod), "{}", pod["subject"]);
    }
    for case in cases {
        let report = format!("pods/{}/report.json", case.full_name());
        ensure!(entries.contains_key(&report), "{report} is missing: {:?}", entries.keys());
    }
    for (name, has) in [
        ("pods/default/whole/rules.json", "to the proxy's outbound listener"),
        ("node/network-configurations.json", "istio-cni"),
        // By the annotations that containerd passes, without a question.
        ("node/plugin-log.jsonl", "not_injected"),
        ("agent/metrics.txt", "istio_cni_install_ready 1"),
    ] {
        let text = entries.get(name).with_context(|| format!("{name} is missing: {output:?}"))?;
        ensure!(text.contains(has), "{name} lacks {has}:\n{text}");
    }
    let pod = api.get("pod", "default", "whole")?.to_string();
    ensure!(pod.contains(SECRET), "the secrets were planted: {pod}");
    fs::remove_file(ward.node.conf_dir().join("99-other.conf")).map_err(Into::into)
}

/// The plugin's own account may get pods, the kubelet's may list those of its node.
fn fewer_rights_tell_less_and_say_so(ward: &Ward<'_>, node: &Node<'_>) -> Result<()> {
    let plugin = run_dir(node).join("istio-cni-kubeconfig");
    let refused = ward.redirectctl(&plugin, &["scan"])?;
    ensure!(refused.code() == Some(1) && refused.stderr.lines().count() == 1, "{refused:?}");
    ensure!(refused.stderr.contains("verb list on pods"), "{refused:?}");
    let pod = ward.redirectctl(&plugin, &["pod", "default/accepted"])?;
    ensure!(pod.stdout.contains("not-told: ") && pod.stdout.contains("foreign-rule: "), "{pod:?}");
    let kubelet = ward.redirectctl(&node.conf_dir().join("../node.kubeconfig"), &["scan"])?;
    ensure!(kubelet.code() == Some(2) && kubelet.stdout.contains("default/accepted"), "{kubelet:?}");
    Ok(())
}

fn what_is_wrong_with_the_node_comes_first(
    ward: &Ward<'_>,
    api: &ApiServer,
    node: &Node<'_>,
    agent: &mut HostAgent<'_>,
) -> Result<()> {
    api.kubectl(&["taint", "node", node.name(), "cni.istio.io/not-ready=:NoSchedule"])?;
    let condition = json!({"type": "cni.istio.io/Ready", "status": "False", "reason": "ProbeFailed", "message": "no module"});
    let patch = json!({"status": {"conditions": [condition]}}).to_string();
    api.kubectl(&["patch", "node", node.name(), "--subresource=status", "-p", &patch])?;
    agent.stop(Signal::SIGKILL)?;
    let mine = fs::read_to_string(node.conf_dir().join(e2e::node::PRIMARY_CONFLIST))?;
    let mut list: Value = serde_json::from_str(&mine)?;
    list["plugins"].as_array_mut().context("a list")?.push(json!({"type": "multinet"}));
    node.write_conf(e2e::node::PRIMARY_CONFLIST, &list)?;
    fs::rename(run_dir(node).join("istio-cni-kubeconfig"), run_dir(node).join("gone"))?;
    let told = ward.json(&["pod", "default/whole"])?;
    let mut wanted = ["no-credentials", "node-not-verified", "plugin-order", "agent-silent", "node-tainted"];
    let mut codes = codes(&told["findings"]);
    codes.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(codes, wanted, "{:#}", told["findings"]);
    let seen = told["findings"].to_string();
    for word in
        ["ProbeFailed", "multinet after istio-cni", "istio-cni-kubeconfig is missing", "not-ready:NoSchedule"]
    {
        ensure!(seen.contains(word), "{word}: {seen}");
    }

    node.write_conf("00-other.conf", &json!({"cniVersion": "1.0.0", "name": "other", "type": "ptp"}))?;
    let told = ward.json(&["scan"])?;
    let first = &told["node"][0];
    assert_eq!(first["code"], "no-plugin-entry", "{:#}", told["node"]);
    ensure!(first["seen"].to_string().contains("sorts before it"), "{first:#}");
    Ok(())
}
