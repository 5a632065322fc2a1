//! Each alert's runbook, typed where what it is about has happened: its first step shows the cause.

use std::fs;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_runtime::metrics::exposition::ScrapeFormat;
use anyhow::{Context, Result, ensure};
use e2e::agent::{CALICO, Node, exchange};
use e2e::broken;
use e2e::http::StandIn;
use e2e::kube::{ApiServer, Sending};
use e2e::redirectctl::{Patient, patient, redirectctl};
use install_cni::metrics::Metrics;
use install_cni::serve::notes;
use serde_json::{Value, json};
use test_support::netns::NetnsDirectory;
use test_support::process::{self, Output, until};

use crate::agent_support::{MANIFEST, NAMESPACE};
use crate::kubectl_redirect::{command, scan};
use crate::kubectl_support::kubelet::LIMIT;
use crate::kubectl_support::{Call, Kubelets, Reply};
use crate::monitoring_support::{alerts, name, read};

/// How long what an agent reports may take to be shown, on a busy machine.
const SHOWN: Duration = Duration::from_secs(90);

/// What brings about the state that an alert is about.
enum State {
    /// Done with a real agent or real pods; the runbook is typed where it is called.
    Done(fn(&World, &Typing<'_>) -> Result<()>),
    /// Counted by an agent: what its metrics have beside those of a healthy one.
    Counted(&'static [&'static str]),
}

/// Types the runbook until it shows the cause.
type Typing<'t> = dyn Fn() -> Result<()> + 't;

use State::{Counted, Done};

/// Each alert: its state, and what its runbook shows then.
const RUNBOOKS: &[(&str, State, &[&str])] = &[
    ("IstioCniAgentNotReady", Done(no_network), &["agent-not-ready", "no network configuration"]),
    ("IstioCniPreempted", Done(preempted), &["agent-not-ready", "05-other.conflist", "10-calico.conflist"]),
    (
        "IstioCniAgentDown",
        Done(agent_down),
        &["agent not running: CrashLoopBackOff", "exit code 137, OOMKilled"],
    ),
    (
        "IstioCniAgentRestarting",
        Done(wrong_setting),
        &["restarted 4 times", "exit code 1, Error", "NATIVE_NFTABLES"],
    ),
    (
        "IstioCniVersionsMixed",
        Done(rollout_hangs),
        &["agent not running: ImagePullBackOff: node-2", "hub/install-cni:0.0.9"],
    ),
    (
        "IstioCniInstallFailing",
        Done(plugin_that_cannot_run),
        &["agent-not-ready", "cannot be run as a plugin"],
    ),
    (
        "IstioCniConfigurationContested",
        Done(contested),
        &["NetworkConfigContested", "istio_cni_fights_total 1"],
    ),
    (
        "IstioCniConfigurationRewritten",
        Done(entry_removed),
        &["kind=\"missing\"}", "Times the network configuration was found out of sync"],
    ),
    ("IstioCniConfigurationChanged", Done(entry_removed), &["kind=\"missing\"}"]),
    (
        "IstioCniSettingsRefused",
        Done(settings_refused),
        &["agent-limited", "are refused", "SettingsRefused", "NATIVE_NFTABLES"],
    ),
    ("IstioCniPolling", Done(polling), &["istio_cni_polling 1", "because they cannot be watched"]),
    (
        "IstioCniTokenRefused",
        Done(token_refused),
        &["PluginTokenRefused", "serviceaccounts", "result=\"refused\""],
    ),
    (
        "IstioCniTokenExpiring",
        Counted(&[
            "istio_cni_plugin_token_expiry_timestamp_seconds SOON",
            "istio_cni_plugin_token_requests_total{result=\"failed\"} 3",
        ]),
        &["agent-limited", "the plugin's token ends in 10 min", "result=\"failed\"} 3"],
    ),
    (
        "IstioCniMemoryHigh",
        Counted(&["process_resident_memory_bytes 62914560"]),
        &["agent-limited", "60 MiB of memory"],
    ),
    (
        "IstioCniFileDescriptorsScarce",
        Counted(&["process_open_fds 900", "process_max_fds 1000"]),
        &["agent-limited", "900 of 1000 file descriptors"],
    ),
    (
        "IstioCniPluginFailing",
        Done(plugin_fails),
        &["not-set-up", "default/new", "does not let this plugin read pods (403)"],
    ),
    (
        "IstioCniPluginSlow",
        Counted(&[
            "istio_cni_plugin_add_duration_seconds_count{outcome=\"redirect\"} 7",
            "istio_cni_plugin_add_duration_seconds_bucket{le=\"1.0\",outcome=\"redirect\"} 5",
        ]),
        &["2 of 7 ADDs took more than a second"],
    ),
    (
        "IstioCniLogEntriesDropped",
        Done(malformed_log),
        &["istio_cni_log_entries_total{result=\"malformed\"}"],
    ),
    (
        "IstioCniLogSocketRefused",
        Counted(&["istio_cni_log_connections_refused_total 1"]),
        &["istio_cni_log_connections_refused_total 1", "neither root nor the agent's user"],
    ),
    ("IstioCniPodsNotRedirected", Done(plugin_never_ran), &["not-redirected", "default/web-0"]),
    ("IstioCniPodsDrifted", Done(foreign_rule), &["foreign-rule", "-j ACCEPT"]),
    ("IstioCniPodsUnknown", Done(namespace_missing), &["namespace-not-found", "default/web-0"]),
    (
        "IstioCniDriftWatchBlind",
        Counted(&["istio_cni_drift_rounds_total{result=\"no_pods\"} 3"]),
        &["agent-limited", "the drift watch has completed no round", "result=\"no_pods\"} 3"],
    ),
    ("IstioCniHealingFails", Done(foreign_rule), &["foreign-rule", "-j ACCEPT"]),
    ("IstioCniHealingContested", Done(fought_over), &["not-healed", "default/web-0"]),
    (
        "IstioCniHealingDeaf",
        Counted(&["istio_cni_heal_unwatched_pods 2"]),
        &["istio_cni_heal_unwatched_pods 2", "Pods that are not monitored"],
    ),
    ("IstioCniAmbientPending", Done(no_ztunnel), &["not-enrolled", "no ztunnel is connected"]),
    ("IstioCniRepairFailing", Done(repair_failed), &["held-back", "lacks CAP_SYS_PTRACE"]),
    ("IstioCniPodsGivenUp", Done(repair_failed), &["held-back", "given up after 10 tries"]),
    ("IstioCniBrokenPodsWaiting", Done(held_back), &["held-back", "default/web-0"]),
    (
        "IstioCniNodeNotVerified",
        Done(not_verified),
        &["node-not-verified", "ProbeFailed", "no module nft_redir"],
    ),
    ("IstioCniNodeProbeFailing", Done(not_verified), &["node-not-verified", "no module nft_redir"]),
    (
        "IstioCniNodeChangeRefused",
        Counted(&["istio_cni_node_taint_changes_total{change=\"add\",result=\"refused\"} 2"]),
        &["change=\"add\",result=\"refused\"} 2", "Changes of the node's taint"],
    ),
    ("IstioCniManyNodesTainted", Done(tainted), &["node-tainted", "node-1 has taint"]),
    (
        "IstioCniTaintControllerLeaderless",
        Done(leaderless),
        &[
            "taint controller not ready",
            "Lease istio-taint-lock",
            "istio-system/taint-controller-a on node-1",
        ],
    ),
    (
        "IstioCniFleetNotReady",
        Done(fleet_not_ready),
        &["agents not ready: istio-system/agent-node-1 on node-1, istio-system/agent-node-2"],
    ),
    (
        "IstioCniFleetPluginFailing",
        Done(plugin_fails),
        &["not-set-up", "does not let this plugin read pods (403)"],
    ),
    ("IstioCniFleetPodsNotVerified", Done(plugin_never_ran), &["not-redirected", "0 of 1 pods redirected"]),
    ("IstioCniNoAgents", Done(no_agents), &["no agent found"]),
];

/// Alerts that `kubectl redirect` does not explain, so that their first steps are kubectl's and are not typed here: what the API server answered the taint
/// controller, and when, is in its metrics and log alone, which no right of a scan reads; nodes, pods and events show only that taints are wrong.
const OF_THE_CONTROLLER: [&str; 2] = ["IstioCniTaintChangeRefused", "IstioCniTaintsLate"];

/// The label of the taint controller's pods.
const CONTROLLER: &str = "istio-cni-taint-controller";

/// Two nodes of an API server, whose agents answer as a test wants.
struct World {
    api: ApiServer,
    /// Flags of the first node's `redirectctl`.
    flags: Arc<Mutex<Vec<String>>>,
}

impl World {
    fn new() -> Result<Self> {
        let api = ApiServer::start()?;
        let flags = Arc::new(Mutex::new(Vec::new()));
        let of_node = flags.clone();
        let kubelets =
            Kubelets::start(&api.node_identity("stand-in")?, move |call| answered(call, &of_node))?;
        api.create_namespace(NAMESPACE)?;
        api.apply(MANIFEST)?;
        let set = api.get("daemonset", NAMESPACE, "istio-cni-node")?;
        for (node, version) in [("node-1", "0.1.0"), ("node-2", "0.0.9")] {
            api.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}))?;
            api.create(&json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": format!("agent-{node}"), "namespace": NAMESPACE, "labels": {"k8s-app": "istio-cni-node"},
                    "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "istio-cni-node",
                        "uid": set["metadata"]["uid"], "controller": true}]},
                "spec": {"nodeName": node, "serviceAccountName": "istio-cni",
                    "containers": [{"name": "install-cni", "image": format!("hub/install-cni:{version}")}]}}))?;
            let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelets.port}}}});
            api.send_all(&[Sending::merge(&format!("/api/v1/nodes/{node}/status"), &status)])?;
        }
        Ok(Self { api, flags })
    }

    /// As where all is well.
    fn reset(&self) -> Result<()> {
        for node in ["node-1", "node-2"] {
            self.agent_is(node, &running(true))?;
        }
        for what in ["events", "pods"] {
            self.api.delete_all(what, "default")?;
        }
        self.api.delete_all("events", NAMESPACE)?;
        let replicas = format!("/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app={CONTROLLER}");
        self.api.send(&Sending::delete(&replicas)).map(drop)
    }

    /// The status of an agent's container.
    fn agent_is(&self, node: &str, container: &Value) -> Result<()> {
        self.container_is(&format!("agent-{node}"), "install-cni", container)
    }

    /// The status of the only container of a pod.
    fn container_is(&self, pod: &str, name: &str, container: &Value) -> Result<()> {
        let mut container = container.clone();
        for (key, value) in [("name", name), ("image", "i"), ("imageID", "i")] {
            container[key] = json!(value);
        }
        let status = json!({"status": {"phase": "Running", "containerStatuses": [container]}});
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status");
        self.api.send_all(&[Sending::merge(&path, &status)]).map(drop)
    }

    /// Agent directories whose API server is this one.
    fn node(&self, confs: &[(&str, &str)]) -> Result<Node> {
        let mut node = Node::new(confs);
        fs::copy(self.api.ca_path(), node.path("account/ca.crt"))?;
        fs::write(node.path("account/token"), self.api.token(NAMESPACE, "istio-cni")?)?;
        for name in ["KUBERNETES_SERVICE_PROTOCOL", "SKIP_TLS_VERIFY"] {
            node.env.remove(name);
        }
        node.set("KUBERNETES_SERVICE_PORT", &self.api.port().to_string());
        node.set("POD_NAME", "agent-node-1");
        Ok(node)
    }

    /// Has the first node scanned with these pods and other objects, and the agent that serves this port.
    fn scanned<T>(
        &self,
        health: u16,
        conf_dir: &str,
        objects: &[Value],
        pods: &[&Patient],
        run: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("pods.json");
        // Without any pod nothing can be scanned.
        let other = patient("outside the mesh", 9)?;
        let all: Vec<&Value> =
            pods.iter().copied().chain([&other]).flat_map(Patient::objects).chain(objects).collect();
        fs::write(&file, json!({"kind": "List", "items": all}).to_string())?;
        let namespaces = pods.iter().copied().chain([&other]).map(Patient::namespace);
        let runtime = NetnsDirectory::of(namespaces)?;
        let flags = [
            ("--file", file.display().to_string()),
            ("--netns-dir", runtime.path().display().to_string()),
            ("--cni-conf-dir", conf_dir.to_owned()),
            ("--agent", format!("127.0.0.1:{health}")),
        ];
        *self.flags.lock().unwrap_or_else(PoisonError::into_inner) =
            flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        run()
    }

    /// The same with a real agent.
    fn with_agent(&self, node: &Node, run: &Typing<'_>) -> Result<()> {
        self.scanned(node.health, &node.path("net.d").display().to_string(), &[], &[], run)
    }

    /// The same with an agent that is ready, and has more to report.
    fn with_ready(&self, more: &str, objects: &[Value], pods: &[&Patient], run: &Typing<'_>) -> Result<()> {
        let health = StandIn::of(format!("ready\n{more}"), |_, more| (200, more.clone()));
        self.scanned(health.port, "/nonexistent", objects, pods, run)
    }

    /// The same with one pod, which is `default/web-0`.
    fn with_pod(&self, state: &str, run: &Typing<'_>) -> Result<()> {
        let pod = patient(state, 0)?;
        self.api.create(&broken::pod("web-0", "node-1"))?;
        self.with_ready("", &[], &[&pod], run)
    }

    /// An event about a pod.
    fn event(&self, pod: &Value, reason: &str, message: &str) -> Result<()> {
        let of = &pod["metadata"];
        self.api.create(&json!({"apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason, "message": message,
            "metadata": {"name": reason.to_lowercase(), "namespace": of["namespace"]}, "lastTimestamp": "2026-11-28T00:00:00Z",
            "involvedObject": {"kind": "Pod", "namespace": of["namespace"], "name": of["name"], "uid": of["uid"]}}))?;
        Ok(())
    }

    fn run(&self, line: &str) -> Result<Output> {
        let words: Vec<&str> = line.split(' ').skip(2).collect();
        process::run(&mut command(&self.api.admin_kubeconfig(), &words)?, LIMIT)
    }

    /// Types a runbook's first step, until that shows the cause: what an agent reports comes a moment later.
    fn type_it(&self, alert: &str, wanted: &[&str]) -> Result<()> {
        let mut shown = String::new();
        let found = until(alert, SHOWN, &[], || {
            shown.clear();
            for line in first_steps(alert)? {
                let line = line.replace("$node", "node-1").replace("NAMESPACE/NAME", "default/web-0");
                let output = self.run(&line)?;
                shown += &format!("{}{}\n", output.stdout, output.stderr);
            }
            // Lines are broken between words.
            shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
            Ok(wanted.iter().all(|words| shown.contains(words)).then_some(()))
        });
        found.with_context(|| format!("{alert}: not all of {wanted:?} in: {shown}"))
    }
}

/// The commands of a runbook's first step.
fn first_steps(alert: &str) -> Result<Vec<String>> {
    let text = read("docs/tasks/alerts.md");
    let section = text.split("\n### ").find(|section| section.lines().next() == Some(alert));
    let first = section.and_then(|text| text.split("**First**: ").nth(1)?.split("\n- **").next());
    let first = first.with_context(|| format!("{alert} has no first step"))?;
    Ok(first.split('`').skip(1).step_by(2).filter(|code| code.contains(' ')).map(str::to_owned).collect())
}

/// What the containers of both agents answer.
fn answered(call: &Call, flags: &Mutex<Vec<String>>) -> Reply {
    if call.container.contains("node-2") {
        return scan("node-2", 0, 0);
    }
    let flags = flags.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let words: Vec<&str> = call.words.iter().skip(1).chain(&flags).map(String::as_str).collect();
    let output = redirectctl(&words).expect("redirectctl runs");
    let code = output.code().and_then(|code| u8::try_from(code).ok()).expect("an exit code");
    Reply::Ended { stdout: output.stdout.into_bytes(), stderr: output.stderr, code }
}

fn running(is_ready: bool) -> Value {
    json!({"ready": is_ready, "restartCount": 0, "state": {"running": {}}, "lastState": null})
}

#[test]
fn each_runbook_begins_with_a_command_that_shows_the_cause() -> Result<()> {
    let mut covered: Vec<&str> = RUNBOOKS.iter().map(|(alert, ..)| *alert).chain(OF_THE_CONTROLLER).collect();
    covered.sort_unstable();
    let all = alerts();
    let mut named: Vec<&str> = all.iter().map(name).collect();
    named.sort_unstable();
    ensure!(covered == named, "alerts: {named:?}\nrunbooks: {covered:?}");
    for alert in &named {
        for (step, line) in first_steps(alert)?.iter().enumerate() {
            let is_ours = ["kubectl redirect scan", "kubectl redirect pod NAMESPACE/NAME"]
                .iter()
                .any(|ours| line.starts_with(ours));
            ensure!(is_ours != OF_THE_CONTROLLER.contains(alert), "{alert}, command {step}: {line}");
        }
    }
    let world = World::new()?;
    let mut wrong = Vec::new();
    for (alert, state, wanted) in RUNBOOKS {
        world.reset()?;
        let typing = || world.type_it(alert, wanted);
        let done = match state {
            Done(provoke) => provoke(&world, &typing),
            Counted(series) => world.with_ready(&counted(series)?, &[], &[], &typing),
        };
        wrong.extend(done.err().map(|error| format!("{alert}: {error:#}")));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// What an agent reports whose metrics have these series instead of a healthy one's.
fn counted(series: &[&str]) -> Result<String> {
    let soon = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() + 630;
    let (metrics, registry) = Metrics::new();
    metrics.start_taint();
    let mut text = ScrapeFormat::Text.write(&registry);
    for sample in series {
        let (name, _) = sample.rsplit_once(' ').context("a sample has a value")?;
        text = text
            .lines()
            .filter(|line| !line.starts_with(&format!("{name} ")))
            .map(|line| format!("{line}\n"))
            .collect();
        text += &format!("{}\n", sample.replace("SOON", &soon.to_string()));
    }
    Ok(notes::of_metrics(&text).to_string())
}

fn no_network(world: &World, typing: &Typing<'_>) -> Result<()> {
    let node = world.node(&[])?;
    let _agent = node.start();
    world.with_agent(&node, typing)
}

fn preempted(world: &World, typing: &Typing<'_>) -> Result<()> {
    let mut node = world.node(&[("05-other.conflist", CALICO), ("10-calico.conflist", CALICO)])?;
    node.set("CNI_CONF_NAME", "10-calico.conflist");
    let _agent = node.start();
    world.with_agent(&node, typing)
}

fn agent_down(world: &World, typing: &Typing<'_>) -> Result<()> {
    let end = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
    let waits = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    world
        .agent_is("node-1", &json!({"ready": false, "restartCount": 3, "state": waits, "lastState": end}))?;
    typing()
}

/// The kubelet has the end of the log of a container that failed.
fn wrong_setting(world: &World, typing: &Typing<'_>) -> Result<()> {
    ensure!(
        MANIFEST.contains("terminationMessagePolicy: FallbackToLogsOnError"),
        "the kubelet has no message"
    );
    let mut node = world.node(&[("10-calico.conflist", CALICO)])?;
    node.set("NATIVE_NFTABLES", "maybe");
    ensure!(node.start().wait_end() == Some(1), "it ends: {}", node.log());
    let end = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": node.log()}});
    world.agent_is(
        "node-1",
        &json!({"ready": true, "restartCount": 4, "state": {"running": {}}, "lastState": end}),
    )?;
    world.with_ready("", &[], &[], typing)
}

fn rollout_hangs(world: &World, typing: &Typing<'_>) -> Result<()> {
    let waits = json!({"waiting": {"reason": "ImagePullBackOff"}});
    world
        .agent_is("node-2", &json!({"ready": false, "restartCount": 0, "state": waits, "lastState": null}))?;
    world.with_ready("", &[], &[], typing)
}

fn plugin_that_cannot_run(world: &World, typing: &Typing<'_>) -> Result<()> {
    let node = world.node(&[("10-calico.conflist", CALICO)])?;
    fs::write(node.path("image/istio-cni"), "#!/nonexistent\n")?;
    let _agent = node.start();
    world.with_agent(&node, typing)
}

fn contested(world: &World, typing: &Typing<'_>) -> Result<()> {
    let node = world.node(&[("10-calico.conflist", CALICO)])?;
    let agent = node.start_ready();
    let fights = "istio_cni_fights_total";
    agent.wait(fights, || {
        if node.calls_us() {
            node.write_conf("10-calico.conflist", CALICO);
        }
        agent.metric(fights) >= 1.0
    });
    world.with_agent(&node, typing)
}

fn entry_removed(world: &World, typing: &Typing<'_>) -> Result<()> {
    let node = world.node(&[("10-calico.conflist", CALICO)])?;
    let agent = node.start_ready();
    node.write_conf("10-calico.conflist", CALICO);
    agent.wait("the entry", || node.calls_us());
    world.with_agent(&node, typing)
}

fn settings_refused(world: &World, typing: &Typing<'_>) -> Result<()> {
    let mut node = world.node(&[("10-calico.conflist", CALICO)])?;
    let settings = node.path("settings");
    fs::create_dir(&settings)?;
    node.set("SETTINGS_DIR", &settings.display().to_string());
    let _agent = node.start_ready();
    fs::write(settings.join("NATIVE_NFTABLES"), "maybe")?;
    world.with_agent(&node, typing)
}

fn polling(world: &World, typing: &Typing<'_>) -> Result<()> {
    let node = world.node(&[("10-calico.conflist", CALICO)])?;
    let script = "echo 0 > /proc/sys/user/max_inotify_instances; exec \"$@\"";
    let _agent = node.start_as(&["unshare", "--user", "--map-root-user", "sh", "-ec", script, "sh"]);
    world.with_agent(&node, typing)
}

fn token_refused(world: &World, typing: &Typing<'_>) -> Result<()> {
    let mut node = world.node(&[("10-calico.conflist", CALICO)])?;
    node.set("PLUGIN_SERVICE_ACCOUNT", "missing");
    let _agent = node.start_ready();
    world.with_agent(&node, typing)
}

fn plugin_fails(world: &World, typing: &Typing<'_>) -> Result<()> {
    let pod = world.api.create(&broken::pod("new", "node-1"))?;
    let message =
        "plugin type=\"istio-cni\" failed (add): the API server does not let this plugin read pods (403)";
    world.event(&pod, "FailedCreatePodSandBox", message)?;
    world.with_ready("", &[pod], &[], typing)
}

fn malformed_log(world: &World, typing: &Typing<'_>) -> Result<()> {
    let node = world.node(&[("10-calico.conflist", CALICO)])?;
    let _agent = node.start_ready();
    let stream = UnixStream::connect(node.path("run/log.sock"))?;
    exchange(stream, "POST", "/log", br#"["no JSON"]"#).context("no answer")?;
    world.with_agent(&node, typing)
}

fn plugin_never_ran(world: &World, typing: &Typing<'_>) -> Result<()> {
    world.with_pod("plugin never ran", typing)
}

fn foreign_rule(world: &World, typing: &Typing<'_>) -> Result<()> {
    world.with_pod("foreign accept", typing)
}

fn fought_over(world: &World, typing: &Typing<'_>) -> Result<()> {
    world.with_pod("rules fought over", typing)
}

fn repair_failed(world: &World, typing: &Typing<'_>) -> Result<()> {
    world.with_pod("repair failed", typing)
}

fn held_back(world: &World, typing: &Typing<'_>) -> Result<()> {
    world.with_pod("held back", typing)
}

/// A pod whose network namespace is in no folder of the runtime.
fn namespace_missing(world: &World, typing: &Typing<'_>) -> Result<()> {
    let lost = patient("redirected", 0)?;
    world.with_ready("", &[lost.pod().clone()], &[], typing)
}

fn no_ztunnel(world: &World, typing: &Typing<'_>) -> Result<()> {
    let pod = patient("no ztunnel", 0)?;
    let report = "0 of 1 ambient pods enrolled, verified\n  default/web-0: no ztunnel is connected\n";
    world.with_ready(report, &[], &[&pod], typing)
}

fn not_verified(world: &World, typing: &Typing<'_>) -> Result<()> {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}, "status": {"conditions": [
        {"type": "cni.istio.io/Ready", "status": "False", "reason": "ProbeFailed", "message": "no module nft_redir"}]}});
    world.with_ready("", &[node], &[], typing)
}

fn tainted(world: &World, typing: &Typing<'_>) -> Result<()> {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"},
        "spec": {"taints": [{"key": "cni.istio.io/not-ready", "effect": "NoSchedule"}]}});
    world.with_ready("", &[node], &[], typing)
}

/// A replica that may not write the Lease is not ready.
fn leaderless(world: &World, typing: &Typing<'_>) -> Result<()> {
    for (name, node) in [("taint-controller-a", "node-1"), ("taint-controller-b", "node-2")] {
        world.api.create(&json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": CONTROLLER}},
            "spec": {"nodeName": node, "containers": [{"name": "taint-controller", "image": "hub/install-cni:0.1.0"}]}}))?;
        world.container_is(name, "taint-controller", &running(false))?;
    }
    world.with_ready("", &[], &[], typing)
}

fn fleet_not_ready(world: &World, typing: &Typing<'_>) -> Result<()> {
    for node in ["node-1", "node-2"] {
        world.agent_is(node, &running(false))?;
    }
    world.with_ready("", &[], &[], typing)
}

/// The last: nothing brings the agents back.
fn no_agents(world: &World, typing: &Typing<'_>) -> Result<()> {
    world.api.kubectl(&["-n", NAMESPACE, "delete", "daemonset", "istio-cni-node"])?;
    typing()
}
