//! The repair controller and a real API server, with the roles of the manifest as it ships: broken pods are dealt with as configured, others
//! never, whoever changes them meanwhile.

use std::time::Duration;

use crate::agent_support::fleet::FleetAgent;
use crate::agent_support::{MANIFEST, apply_in};
use anyhow::{Context, Result, ensure};
use e2e::kube::{ApiServer, fresh};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::process::{SHORT, until};

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);
const LABEL: &str = "cni.istio.io/uninitialized";

/// The node with an agent, as scenarios name it; each cluster has a name of its own for it.
const NODE: &str = "node-1";

/// A pod in some state, and whether it is broken.
struct Scenario {
    name: &'static str,
    change: fn(&mut Value),
    broken: bool,
}

const fn broken(name: &'static str, change: fn(&mut Value)) -> Scenario {
    Scenario { name, change, broken: true }
}

const fn sound(name: &'static str, change: fn(&mut Value)) -> Scenario {
    Scenario { name, change, broken: false }
}

fn end(code: i64, reason: &str, message: &str) -> Value {
    let time = "2026-11-21T00:00:00Z";
    json!({"terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": time, "finishedAt": time,
        "containerID": format!("containerd://{code}{}", message.len())}})
}

fn failed() -> Value {
    end(126, "Error", "")
}

fn waits() -> Value {
    json!({"waiting": {"reason": "CrashLoopBackOff"}})
}

fn done() -> Value {
    end(0, "Completed", "")
}

fn runs() -> Value {
    json!({"running": {"startedAt": "2026-11-21T00:00:00Z"}})
}

/// The states, present and last, of the validation.
fn validation(pod: &mut Value, state: Value, last: Value) {
    pod["status"]["initContainerStatuses"][0]["state"] = state;
    pod["status"]["initContainerStatuses"][0]["lastState"] = last;
}

/// What nobody has set anything for.
const USUAL: &[Scenario] = &[
    broken("first-failure", |pod| validation(pod, failed(), json!({}))),
    broken("waits-after-failure", |pod| validation(pod, waits(), failed())),
    broken("stands-in-second-failure", |pod| validation(pod, failed(), failed())),
    broken("runs-after-failure", |pod| validation(pod, runs(), failed())),
    broken("fails-otherwise-after-failure", |pod| validation(pod, end(1, "Error", ""), failed())),
    broken("with-a-message", |pod| validation(pod, end(126, "Error", "whatever"), json!({}))),
    broken("never-restarted", |pod| {
        pod["spec"]["restartPolicy"] = json!("Never");
        pod["status"]["phase"] = json!("Failed");
        validation(pod, failed(), json!({}));
    }),
    broken("of-a-job", |pod| {
        pod["spec"]["restartPolicy"] = json!("OnFailure");
        pod["metadata"]["labels"] = json!({"batch.kubernetes.io/job-name": "work"});
        validation(pod, failed(), json!({}));
    }),
    broken("with-a-native-sidecar", |pod| {
        let sidecar = json!({"name": "istio-proxy-native", "image": "proxy", "restartPolicy": "Always"});
        pod["spec"]["initContainers"].as_array_mut().expect("a list").push(sidecar);
        validation(pod, waits(), failed());
    }),
    broken("without-labels", |pod| {
        validation(pod, waits(), failed());
    }),
    broken("with-an-odd-annotation", |pod| {
        pod["metadata"]["annotations"]["sidecar.istio.io/status"] = json!("");
        validation(pod, waits(), failed());
    }),
    sound("no-status-yet", |pod| pod["status"] = json!({"phase": "Pending"})),
    sound("waits-for-the-first-time", |pod| {
        validation(pod, json!({"waiting": {"reason": "PodInitializing"}}), json!({}));
    }),
    sound("runs-for-the-first-time", |pod| validation(pod, runs(), json!({}))),
    sound("ended-well", |pod| validation(pod, done(), json!({}))),
    sound("ended-well-after-failure", |pod| validation(pod, done(), failed())),
    sound("completed-with-a-code", |pod| validation(pod, end(126, "Completed", ""), failed())),
    sound("failed-with-another-code", |pod| validation(pod, waits(), end(1, "Error", ""))),
    sound("never-restarted-another-code", |pod| {
        pod["spec"]["restartPolicy"] = json!("Never");
        pod["status"]["phase"] = json!("Failed");
        validation(pod, end(255, "Error", ""), json!({}));
    }),
    sound("killed-for-memory", |pod| validation(pod, end(137, "OOMKilled", ""), json!({}))),
    sound("not-injected", |pod| {
        pod["metadata"]["annotations"] = json!({});
        validation(pod, waits(), failed());
    }),
    sound("another-container-failed", |pod| {
        pod["status"]["initContainerStatuses"][0]["name"] = json!("other");
        validation(pod, waits(), failed());
    }),
    sound("on-another-node", |pod| {
        pod["spec"]["nodeName"] = json!("node-2");
        validation(pod, waits(), failed());
    }),
    sound("being-deleted", |pod| validation(pod, waits(), failed())),
    sound("runs-well", |pod| {
        pod["status"]["phase"] = json!("Running");
        validation(pod, done(), json!({}));
    }),
];

/// With `REPAIR_INIT_CONTAINER_*`, `REPAIR_SIDECAR_ANNOTATION` and selectors of its own.
const CHOSEN: &[Scenario] = &[
    broken("message-as-wanted", |pod| validation(pod, end(3, "Error", "  no rules\n"), json!({}))),
    broken("message-as-wanted-before", |pod| validation(pod, waits(), end(126, "Error", "no rules"))),
    sound("another-message", |pod| validation(pod, waits(), end(3, "Error", "bad rules"))),
    sound("no-message", |pod| validation(pod, waits(), failed())),
    sound("message-and-then-well", |pod| validation(pod, done(), end(3, "Error", "no rules"))),
    sound("said-in-success", |pod| validation(pod, end(0, "Completed", "no rules"), json!({}))),
    broken("another-container", |pod| {
        pod["status"]["initContainerStatuses"][0]["name"] = json!("other");
        validation(pod, waits(), end(1, "Error", "no rules"));
    }),
    broken("annotation-of-choice-is-empty", |pod| {
        pod["metadata"]["annotations"] = json!({"is.it/meshed": ""});
        validation(pod, waits(), end(1, "Error", "no rules"));
    }),
    sound("usual-annotation-only", |pod| {
        pod["metadata"]["annotations"] = json!({"sidecar.istio.io/status": "{}"});
        validation(pod, waits(), end(1, "Error", "no rules"));
    }),
    sound("labels-not-selected", |pod| {
        pod["metadata"]["labels"] = json!({"team": "other"});
        validation(pod, waits(), end(1, "Error", "no rules"));
    }),
    sound("fields-not-selected", |pod| {
        pod["spec"]["restartPolicy"] = json!("Never");
        validation(pod, waits(), end(1, "Error", "no rules"));
    }),
];

const CHOICE: [(&str, &str); 6] = [
    ("REPAIR_INIT_CONTAINER_NAME", ""),
    ("REPAIR_INIT_CONTAINER_EXIT_CODE", "0"),
    ("REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE", "no rules"),
    ("REPAIR_SIDECAR_ANNOTATION", "is.it/meshed"),
    ("REPAIR_LABEL_SELECTORS", "team notin (other)"),
    ("REPAIR_FIELD_SELECTORS", "spec.restartPolicy!=Never"),
];

impl Scenario {
    fn pod(&self) -> Value {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name,
                "annotations": {"sidecar.istio.io/status": "{}", "is.it/meshed": "yes"}},
            "spec": {
                "nodeName": NODE,
                "initContainers": [{"name": "istio-validation", "image": "proxy"}],
                "containers": [{"name": "app", "image": "app"}, {"name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar"]}],
            },
            "status": {"phase": "Pending", "podIP": "10.1.0.2", "podIPs": [{"ip": "10.1.0.2"}],
                "initContainerStatuses": [{"name": "istio-validation", "image": "proxy", "imageID": "proxy", "ready": false, "restartCount": 1}]},
        });
        (self.change)(&mut pod);
        pod
    }
}

struct Cluster {
    api: ApiServer,
    /// The agents' namespace, and that of pods.
    system: String,
    shop: String,
    /// That with an agent, and another one.
    nodes: [String; 2],
    folder: TempDir,
}

impl Cluster {
    fn new(action: &str) -> Result<Self> {
        Self::on(ApiServer::shared()?, action)
    }

    /// With the manifest as it is after its own sed command for an action.
    fn on(api: ApiServer, action: &str) -> Result<Self> {
        let (system, shop) = (api.fresh_namespace("istio-system")?, api.fresh_namespace("shop")?);
        ensure!(MANIFEST.contains(&format!(
            "#   sed 's/# {action}: //' deploy/istio-cni-node.yaml | kubectl apply -f -\n"
        )));
        apply_in(&api, &system, &MANIFEST.replace(&format!("# {action}: "), ""))?;
        let nodes = [NODE, "node-2"].map(fresh);
        for name in &nodes {
            api.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))?;
        }
        let folder =
            tempfile::Builder::new().prefix(&format!("e2e-{}-repair", std::process::id())).tempdir()?;
        Ok(Self { api, system, shop, nodes, folder })
    }

    /// Makes pods, with their status as a kubelet reports it.
    fn put(&self, mut pods: Vec<Value>) -> Result<()> {
        for pod in &mut pods {
            let node = &self.nodes[usize::from(pod["spec"]["nodeName"] != NODE)];
            pod["spec"]["nodeName"] = json!(node);
            pod["metadata"]["namespace"] = json!(self.shop);
        }
        self.api.apply(&json!({"apiVersion": "v1", "kind": "List", "items": pods}).to_string())?;
        pods.iter().try_for_each(|pod| self.api.apply_status(pod))
    }

    /// The agent of the first node.
    fn agent(&self, env: &[(&str, &str)]) -> Result<FleetAgent> {
        FleetAgent::start(&self.api, &self.system, self.folder.path(), &self.nodes[0], env)
    }

    /// None where it is gone.
    fn pod(&self, name: &str) -> Result<Option<Value>> {
        self.api.find("pod", &self.shop, name)
    }

    fn delete(&self, pod: &str) -> Result<()> {
        self.api.delete("pod", &self.shop, pod)
    }

    /// Events of the repair controller about a pod: their reasons and messages.
    fn events(&self, pod: &str) -> Result<Vec<(String, String)>> {
        let all = self.api.list("events", &self.shop)?;
        let about = all.iter().filter(|event| {
            event["involvedObject"]["name"] == pod && event["source"]["component"] == "cni-repair"
        });
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(about.map(|event| (text(&event["reason"]), text(&event["message"]))).collect())
    }

    /// Waits for what is told of a pod; it is reported after it is counted.
    fn wait_event(&self, pod: &str, agent: &FleetAgent) -> Result<()> {
        until("the event", LIMIT, &[&agent.process], || Ok((!self.events(pod)?.is_empty()).then_some(())))
    }

    /// Whether the agent's account may do something with pods.
    fn may(&self, verb: &str, what: &str) -> Result<bool> {
        let account = format!("system:serviceaccount:{}:istio-cni", self.system);
        let admin = self.api.admin_kubeconfig();
        // Behind a slash kubectl expects a name.
        let (what, part) = what.split_once('/').unwrap_or((what, ""));
        let part = format!("--subresource={part}");
        let args = ["auth", "can-i", verb, what, &part, "--as", &account, "--all-namespaces"];
        Ok(self.api.kubectl_as(&admin, &args)?.stdout.trim() == "yes")
    }
}

/// A pod that runs no more is gone at once when it is deleted.
fn is_dealt_with(action: &str, pod: Option<&Value>) -> bool {
    match (action, pod) {
        ("repair-delete", Some(pod)) => !pod["metadata"]["deletionTimestamp"].is_null(),
        ("repair-delete", None) => true,
        (_, pod) => pod.is_some_and(|pod| pod["metadata"]["labels"][LABEL] == "true"),
    }
}

/// Plays scenarios with an action: what is broken is dealt with once, with an event; what is sound is the same pod in the same version at the end.
fn play(action: &str, scenarios: &[Scenario], env: &[(&str, &str)]) -> Result<()> {
    let cluster = Cluster::new(action)?;
    cluster.put(scenarios.iter().map(Scenario::pod).collect())?;
    if scenarios.iter().any(|scenario| scenario.name == "being-deleted") {
        cluster.delete("being-deleted")?;
    }
    let before: Vec<Option<Value>> =
        scenarios.iter().map(|scenario| cluster.pod(scenario.name)).collect::<Result<_>>()?;
    let agent = cluster.agent(env)?;
    for scenario in scenarios.iter().filter(|scenario| scenario.broken) {
        until(scenario.name, LIMIT, &[&agent.process], || {
            Ok(is_dealt_with(action, cluster.pod(scenario.name)?.as_ref()).then_some(()))
        })
        .with_context(|| agent.process.log())?;
    }
    // Who comes while it is watched comes behind all others.
    let count = scenarios.iter().filter(|scenario| scenario.broken).count();
    let last = Scenario {
        name: "last",
        ..scenarios.iter().find(|one| one.broken).map(|one| broken("", one.change)).context("one")?
    };
    cluster.put(vec![last.pod()])?;
    let kind = action.trim_start_matches("repair-");
    let success = format!("istio_cni_repair_pods_repaired_total{{type=\"{kind}\",result=\"success\"}}");
    agent.wait_metric(&success, f64::from(u32::try_from(count + 1)?))?;
    ensure!(agent.metric(&success) == Some(f64::from(u32::try_from(count + 1)?)), "each once");
    for (scenario, before) in scenarios.iter().zip(before) {
        let after = cluster.pod(scenario.name)?;
        let events = cluster.events(scenario.name)?;
        if scenario.broken {
            let reason = if action == "repair-delete" { "DeleteBrokenPod" } else { "LabelBrokenPod" };
            ensure!(events.len() == 1 && events[0].0 == reason, "{}: {events:?}", scenario.name);
        } else {
            ensure!(
                after == before && events.is_empty(),
                "{} was touched: {after:?}\n{events:?}",
                scenario.name
            );
        }
    }
    for result in ["fail", "skip"] {
        let name = format!("istio_cni_repair_pods_repaired_total{{type=\"{kind}\",result=\"{result}\"}}");
        ensure!(agent.count(&name) == 0.0, "{name}\n{}", agent.process.log());
    }
    Ok(())
}

#[test]
fn broken_pods_are_deleted_and_no_others() -> Result<()> {
    play("repair-delete", USUAL, &[])
}

#[test]
fn broken_pods_are_labelled_and_no_others() -> Result<()> {
    play("repair-label", USUAL, &[])
}

/// Agents that end leave labels to those who act on them.
#[test]
fn the_command_of_the_page_removes_labels_and_no_others() -> Result<()> {
    let command =
        "kubectl label pods --all-namespaces -l cni.istio.io/uninitialized cni.istio.io/uninitialized-";
    let page = include_str!("../../../docs/get-started/upgrade.md");
    ensure!(page.contains(&format!("`{command}`")), "the page has another command");
    let words: Vec<&str> = command.split(' ').skip(1).collect();
    // All namespaces are its own.
    let api = ApiServer::start()?;
    for (name, labels) in [("labelled", json!({LABEL: "true", "app": "a"})), ("other", json!({"app": "b"}))] {
        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let metadata = json!({"name": name, "namespace": "default", "labels": labels});
        api.create(&json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}))?;
    }
    // The second time, none has it.
    for _ in 0..2 {
        api.kubectl(&words)?;
        for (name, app) in [("labelled", "a"), ("other", "b")] {
            let labels = api.get("pod", "default", name)?["metadata"]["labels"].clone();
            ensure!(labels == json!({"app": app}), "{name}: {labels}");
        }
    }
    Ok(())
}

#[test]
fn what_is_broken_can_be_chosen() -> Result<()> {
    play("repair-label", CHOSEN, &CHOICE)
}

/// No namespace of this machine is that of a pod of this cluster.
#[test]
fn pods_whose_namespace_is_not_found_are_left_as_they_are() -> Result<()> {
    let cluster = Cluster::new("repair-in-place")?;
    cluster.put(USUAL.iter().map(Scenario::pod).collect())?;
    cluster.delete("being-deleted")?;
    let before: Vec<Option<Value>> =
        USUAL.iter().map(|scenario| cluster.pod(scenario.name)).collect::<Result<_>>()?;
    let agent = cluster.agent(&[])?;
    for scenario in USUAL.iter().filter(|scenario| scenario.broken) {
        until(scenario.name, LIMIT, &[&agent.process], || {
            let events = cluster.events(scenario.name)?;
            Ok(events
                .iter()
                .any(|(reason, message)| reason == "RepairBrokenPod" && message.contains("could not be"))
                .then_some(()))
        })
        .with_context(|| agent.process.log())?;
    }
    for (scenario, before) in USUAL.iter().zip(before) {
        ensure!(cluster.pod(scenario.name)? == before, "{} was touched", scenario.name);
        ensure!(scenario.broken != cluster.events(scenario.name)?.is_empty(), "{}", scenario.name);
    }
    ensure!(
        agent.metric("istio_cni_repair_pods_repaired_total{type=\"repair\",result=\"success\"}") == Some(0.0)
    );
    Ok(())
}

#[test]
fn an_action_has_the_rights_it_needs_and_no_others() -> Result<()> {
    let rights = [
        ("delete", "pods"),
        ("patch", "pods/status"),
        ("list", "pods"),
        ("watch", "pods"),
        ("create", "events"),
    ];
    for (action, wanted) in [
        ("repair-delete", [true, false, true, true, true]),
        ("repair-label", [false, true, true, true, true]),
        ("repair-in-place", [false, false, true, true, true]),
    ] {
        let cluster = Cluster::new(action)?;
        until("the roles to count", SHORT, &[], || Ok(cluster.may("list", "pods")?.then_some(())))?;
        for ((verb, what), wanted) in rights.into_iter().zip(wanted) {
            ensure!(cluster.may(verb, what)? == wanted, "{action}: {verb} {what}");
        }
        for (verb, what) in [
            ("update", "pods"),
            ("patch", "pods"),
            ("update", "pods/status"),
            ("deletecollection", "pods"),
            ("patch", "nodes"),
        ] {
            ensure!(!cluster.may(verb, what)?, "{action}: {verb} {what}");
        }
    }
    Ok(())
}

#[test]
fn an_api_server_that_is_restarted_and_has_forgotten_is_found_again_and_nothing_is_done_twice() -> Result<()>
{
    let cluster = Cluster::on(ApiServer::start()?, "repair-label")?;
    let pod = |name| broken(name, |pod| validation(pod, waits(), failed())).pod();
    cluster.put(vec![pod("before")])?;
    let agent = cluster.agent(&[])?;
    let success = "istio_cni_repair_pods_repaired_total{type=\"label\",result=\"success\"}";
    agent.wait_metric(success, 1.0)?;
    cluster.wait_event("before", &agent)?;
    for (index, name) in ["one", "two"].into_iter().enumerate() {
        cluster.api.stop();
        cluster.api.start_again()?;
        cluster.api.compact()?;
        cluster.put(vec![pod(name)])?;
        agent.wait_metric(success, f64::from(u32::try_from(index + 2)?))?;
        cluster.wait_event(name, &agent)?;
    }
    for name in ["before", "one", "two"] {
        ensure!(is_dealt_with("repair-label", cluster.pod(name)?.as_ref()), "{name}");
        ensure!(cluster.events(name)?.len() == 1, "{name}: {:?}", cluster.events(name)?);
    }
    ensure!(agent.metric(success) == Some(3.0));
    let log = agent.process.log();
    ensure!(log.contains("the version to watch from is too old (410)"), "{log}");
    let restarts = agent.metric("istio_cni_watch_restarts_total{watch=\"pods\"}");
    ensure!(restarts.is_some_and(|count| count >= 2.0), "{restarts:?}");
    Ok(())
}
