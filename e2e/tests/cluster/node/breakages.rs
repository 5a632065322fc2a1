//! What breaks on a real node, who says it first, and that all screens name the same cause: the second table of docs/tasks/troubleshooting.md. With
//! UPDATE_DOCS=1 its two last columns, which time changes, are written. What needs no kubelet is in the suite `agent`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::agent_support::{
    LOOPBACK, NAMESPACE, POD, agent_pod, apply_manifest, assert_redirected, entries, import_image, metric,
    readyz, run_dir, wait_loaded,
};
use crate::chart_support::rendered_without_tests;
use crate::node::kubectl_redirect::reached;
use anyhow::{Context, Result, bail, ensure};
use e2e::guides::{breakages, record_breakages};
use e2e::kube::ApiServer;
use e2e::node::{Node, PRIMARY_CONFLIST, Pod, plain_pod, sidecar_pod};
use serde_json::{Value, json};
use test_support::process::{self, Output, until};

/// How long a screen may take, however busy the machine.
const SAID: Duration = Duration::from_secs(90);
/// The agent's pod.
const AGENT: &str = "istio-cni-node-one";
/// A pod that is redirected, whatever becomes of its node.
const STEADY: &str = "default/steady";
/// Screens that run a program on the node.
const ASKED: [&str; 2] = ["scan", "pod"];
/// What fires the alert of a node.
const READY: &str = "istio_cni_install_ready";
/// How the table begins.
const TABLE: &str = "| what breaks on a node |";
/// What the table has where nobody has to say anything.
const NOTHING: &str = "-";

/// A node with an agent that watches for drift and publishes the node's condition.
struct World<'n> {
    api: &'n ApiServer,
    node: &'n Node<'n>,
    run: &'n dyn Fn(&[&str]) -> Result<Output>,
    /// What starts an agent's pod.
    daemon_set: Value,
}

/// What a breakage is about.
enum Subject {
    Pod(String),
    Node,
    /// The same, and the agent may not read pods.
    NodeWithoutRight,
    /// The same, and the agent may not even write the condition.
    NodeWithoutAccount,
    /// The agent does not run.
    Agent,
    /// Nobody: it is well again, and no pod bypassed the proxy.
    Healed,
}

/// Breaks something, which is healthy before.
type Break = fn(&World<'_>) -> Result<Subject>;

/// By the words of the page.
fn all() -> BTreeMap<&'static str, Break> {
    BTreeMap::from([
        ("A pod starts before the agent", (|_| Ok(Subject::of_pod("early"))) as Break),
        ("The plugin's entry is removed", |world| {
            world.node.write_conf(PRIMARY_CONFLIST, &world.node.primary_conflist())?;
            until("the entry", POD, &[], || {
                Ok(entries(world.node)?.contains("\"istio-cni\"").then_some(()))
            })?;
            world.is_healed("without-entry")
        }),
        ("The plugin's credentials are deleted", |world| {
            fs::remove_file(world.credentials())?;
            until("the plugin's credentials", POD, &[], || Ok(world.credentials().exists().then_some(())))?;
            world.is_healed("without-credentials")
        }),
        ("The API server rejects the plugin's token", |world| {
            world.delete("serviceaccount", "istio-cni-plugin")?;
            world.wait_rejected()?;
            world.api.create_service_account(NAMESPACE, "istio-cni-plugin")?;
            world.is_healed("with-old-token")
        }),
        ("containerd is restarted", |world| {
            world.node.restart_containerd()?;
            world.is_healed("after-containerd")
        }),
        ("The agent is killed", |world| {
            world.node.run(&process::command("sh", ["-ec", "kill -9 $(pidof install-cni)"]))?.ok()?;
            world.is_healed("while-agent-restarts")
        }),
        ("The node reboots", reboot),
        ("An annotation of a pod cannot be read", |world| {
            let mut pod = sidecar_pod("annotated");
            pod["metadata"]["annotations"]["traffic.sidecar.istio.io/excludeInboundPorts"] = json!("http");
            world.node.start_pod(&pod)?;
            Ok(Subject::of_pod("annotated"))
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
            Ok(Subject::of_pod("ambient"))
        }),
        ("The network configuration is deleted", |world| {
            fs::remove_file(world.node.conf_dir().join(PRIMARY_CONFLIST))?;
            Ok(Subject::Node)
        }),
        ("The network configuration is broken", |world| {
            world.restore_network()?;
            fs::write(world.node.conf_dir().join(PRIMARY_CONFLIST), "{broken")?;
            Ok(Subject::Node)
        }),
        ("The accounts lose the right to read pods", |world| {
            world.restore_network()?;
            world.delete("clusterrolebinding", "istio-cni-plugin")?;
            world.leave_agent(&["nodes", "nodes/status"])?;
            world.node.start_pod(&sidecar_pod("without-right"))?;
            Ok(Subject::NodeWithoutRight)
        }),
        ("The accounts are deleted", |world| {
            world.delete("serviceaccount", "istio-cni-plugin")?;
            world.delete("serviceaccount", "istio-cni")?;
            world.wait_rejected()?;
            world.node.start_pod(&sidecar_pod("without-account"))?;
            Ok(Subject::NodeWithoutAccount)
        }),
        ("The agent's image is missing", |world| {
            world.agent().delete(POD)?;
            world.start_agent(Some("hub.example/install-cni:missing"))?;
            Ok(Subject::Agent)
        }),
    ])
}

fn reboot(world: &World<'_>) -> Result<Subject> {
    // What is in /run of a node of users.
    world.node.reboot(|| Ok(fs::remove_dir_all(run_dir(world.node))?))?;
    let steady = world.node.pod("default", "steady");
    until("the pod to be redirected", POD, &[], || Ok(assert_redirected(world.node, &steady).ok()))?;
    world.wait_ready()?;
    Ok(Subject::Healed)
}

impl Subject {
    /// A pod of namespace default.
    fn of_pod(name: &str) -> Self {
        Self::Pod(format!("default/{name}"))
    }
}

/// A row of the page, but for what time changes.
struct Row<'r> {
    what: &'r str,
    /// The code of `scan` and `pod`.
    finding: &'r str,
    words: &'r str,
    /// What counts it.
    metric: &'r str,
}

/// Something that shows what is wrong.
type Screen<'s> = (&'static str, Box<dyn Fn() -> Result<bool> + 's>);

impl World<'_> {
    /// A pod that is redirected.
    fn redirected(&self, name: &str) -> Result<Pod<'_>> {
        let pod = self.node.start_pod(&sidecar_pod(name))?;
        pod.wait_running(POD)?;
        assert_redirected(self.node, &pod)?;
        Ok(pod)
    }

    /// A pod that is redirected, and then no more.
    fn damage(&self, name: &str, script: &str) -> Result<Subject> {
        self.redirected(name)?.namespace()?.sh(script)?.ok()?;
        Ok(Subject::of_pod(name))
    }

    /// A pod that starts now is redirected, and the agent is ready.
    fn is_healed(&self, name: &str) -> Result<Subject> {
        self.redirected(name)?.delete(POD)?;
        self.wait_ready()?;
        Ok(Subject::Healed)
    }

    fn restore_network(&self) -> Result<()> {
        self.node.write_conf(PRIMARY_CONFLIST, &self.node.primary_conflist())?;
        self.wait_ready()?;
        // A condition that stays False has its old words for a minute.
        until("the condition", POD, &[], || Ok((self.condition()?.0 == "True").then_some(())))
    }

    fn wait_ready(&self) -> Result<()> {
        until("the agent to be ready", POD, &[], || Ok((readyz(self.node, "")? == "ready").then_some(())))
            .with_context(|| self.agent().log("install-cni").unwrap_or_default())
    }

    fn credentials(&self) -> PathBuf {
        run_dir(self.node).join("istio-cni-kubeconfig")
    }

    fn delete(&self, kind: &str, name: &str) -> Result<()> {
        self.api.kubectl(&["-n", NAMESPACE, "delete", kind, name]).map(drop)
    }

    /// Waits until the API server no longer takes the plugin's token: for ten seconds it takes one that it knows.
    fn wait_rejected(&self) -> Result<()> {
        let copy = self.node.state_dir().join("rejected");
        fs::copy(self.credentials(), &copy)?;
        until("the token to be rejected", POD, &[], || {
            let asked = self.api.kubectl_as(&copy, &["-n", "default", "get", "pods", "none"])?;
            Ok(asked.stderr.contains("Unauthorized").then_some(()))
        })
    }

    /// Leaves the agent no rights outside its namespace but those to these.
    fn leave_agent(&self, resources: &[&str]) -> Result<()> {
        let mut role = self.api.get("clusterrole", "", "istio-cni")?;
        role["metadata"] = json!({"name": "istio-cni"});
        role["rules"] = json!([{"apiGroups": [""], "resources": resources, "verbs": ["get", "patch"]}]);
        self.api.apply(&role.to_string())
    }

    fn agent(&self) -> Pod<'_> {
        self.node.pod(NAMESPACE, AGENT)
    }

    /// An agent's pod from this image.
    fn start_agent(&self, image: Option<&str>) -> Result<()> {
        let mut pod = agent_pod(&self.daemon_set, LOOPBACK, self.api, AGENT);
        if let Some(image) = image {
            pod["spec"]["containers"][0]["image"] = json!(image);
        }
        self.node.start_pod(&pod).map(drop)
    }

    /// Puts this configuration of the agents in place, and starts one.
    fn install(&mut self, values: &Value) -> Result<()> {
        self.daemon_set = apply_manifest(self.api, self.node, &rendered_without_tests(values)?)?;
        self.start_agent(None)?;
        self.wait_ready()?;
        wait_loaded(self.node)
    }

    /// Whether an event about a pod has these words.
    fn is_event(&self, pod: &str, words: &str) -> Result<bool> {
        Ok(self.events(pod)?.iter().any(|event| event.contains(words)))
    }

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

    /// The status and the message of the node's condition.
    fn condition(&self) -> Result<(String, String)> {
        let node = self.api.get("node", "", self.node.name())?;
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ours = conditions.iter().find(|condition| condition["type"] == "cni.istio.io/Ready");
        let text = |key: &str| ours.and_then(|ours| ours[key].as_str()).unwrap_or_default().to_owned();
        Ok((text("status"), text("message")))
    }

    /// Whether `kubectl redirect scan` has this finding of a pod or node, with these words.
    fn is_scanned(&self, list: &str, subject: &str, row: &Row<'_>) -> Result<bool> {
        let output = (self.run)(&["scan", "-o", "json"])?;
        let scan: Value = serde_json::from_str(&output.stdout).with_context(|| format!("{output:?}"))?;
        let of_subject = |list: &str| -> Vec<&Value> {
            let all = scan[list].as_array().into_iter().flatten();
            all.filter(|cause| {
                cause["subjects"].as_array().is_some_and(|subjects| subjects.contains(&json!(subject)))
            })
            .collect()
        };
        let causes = of_subject(list);
        let has_words = |said: &&Value| said.to_string().contains(row.words);
        Ok(output.code() == Some(2)
            && causes.iter().any(|cause| cause["code"] == row.finding)
            && (causes.iter().any(has_words) || of_subject("consequences").iter().any(has_words)))
    }

    /// Whether `scan` names the node as one without an answer, for this reason.
    fn is_unanswered(&self, row: &Row<'_>) -> Result<bool> {
        let output = (self.run)(&["scan"])?;
        // Lines are broken between words.
        let text = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(output.code() == Some(2) && text.contains(row.finding) && text.contains(row.words))
    }

    /// Whether `kubectl redirect pod` has it.
    fn is_shown(&self, pod: &str, row: &Row<'_>) -> Result<bool> {
        let output = (self.run)(&["pod", pod, "-o", "json"])?;
        Ok(output.code() == Some(2)
            && output.stdout.contains(row.finding)
            && output.stdout.contains(row.words))
    }

    /// Who shows what is wrong, those who need not be asked first.
    fn screens<'s>(&'s self, subject: &'s Subject, row: &'s Row<'s>) -> Vec<Screen<'s>> {
        let counts = move || Ok(metric(self.node, row.metric)?.is_some_and(|count| count > 0.0));
        let page = move || Ok(readyz(self.node, "")?.contains(row.words));
        let is_unready = move || Ok(metric(self.node, READY)? == Some(0.0));
        let condition = move || {
            let (status, message) = self.condition()?;
            Ok(status == "False" && message.contains(row.words))
        };
        let unanswered = move || self.is_unanswered(row);
        let failed = move || {
            let output = (self.run)(&["pod", STEADY])?;
            Ok(output.code() != Some(0) && format!("{}{}", output.stdout, output.stderr).contains(row.words))
        };
        match subject {
            Subject::Healed => Vec::new(),
            Subject::Pod(pod) => vec![
                ("event", Box::new(|| self.is_event(pod, row.words)) as Box<dyn Fn() -> Result<bool>>),
                ("metric", Box::new(counts)),
                ("scan", Box::new(|| self.is_scanned("pods", pod, row))),
                ("pod", Box::new(|| self.is_shown(pod, row))),
            ],
            Subject::Node => vec![
                ("/readyz", Box::new(page)),
                ("metric", Box::new(is_unready)),
                ("condition", Box::new(condition)),
                ("scan", Box::new(move || self.is_scanned("nodes", self.node.name(), row))),
                ("pod", Box::new(|| self.is_shown(STEADY, row))),
            ],
            Subject::NodeWithoutRight => vec![
                ("/readyz", Box::new(page)),
                ("metric", Box::new(is_unready)),
                ("condition", Box::new(condition)),
                ("scan", Box::new(unanswered)),
                ("pod", Box::new(failed)),
            ],
            Subject::NodeWithoutAccount => vec![
                ("/readyz", Box::new(page)),
                ("metric", Box::new(is_unready)),
                ("scan", Box::new(unanswered)),
                ("pod", Box::new(failed)),
            ],
            Subject::Agent => vec![
                ("event", Box::new(|| self.is_event(&format!("{NAMESPACE}/{AGENT}"), row.words))),
                ("scan", Box::new(unanswered)),
                ("pod", Box::new(failed)),
            ],
        }
    }

    /// Waits until every screen shows it. Returns which was the first, and when.
    fn wait_shown(&self, screens: &[Screen<'_>], began: Instant) -> Result<(&'static str, Duration)> {
        let mut seen: BTreeMap<&str, Duration> = BTreeMap::new();
        let unasked = screens.iter().filter(|(name, _)| !ASKED.contains(name)).count();
        let all = until("every screen", SAID, &[], || {
            for (name, shows) in screens {
                // The others change while these are asked, which takes a second.
                if ASKED.contains(name) && seen.len() < unasked {
                    break;
                }
                if !seen.contains_key(name) && shows()? {
                    seen.insert(name, began.elapsed());
                }
            }
            Ok((seen.len() == screens.len()).then_some(()))
        });
        all.with_context(|| format!("shown by {seen:?}"))?;
        let first = screens.iter().min_by_key(|(name, _)| seen[name]);
        first.map_or(Ok((NOTHING, began.elapsed())), |(name, _)| Ok((*name, seen[name])))
    }

    /// Everything at once, where a row is not as it should be.
    fn everything(&self) -> String {
        let said = |words: &[&str]| (self.run)(words).map(|output| output.stdout).unwrap_or_default();
        format!(
            "readyz: {:?}\ncondition: {:?}\n{}\n{}\n{}",
            readyz(self.node, "?verbose"),
            self.condition(),
            said(&["scan"]),
            said(&["pod", STEADY]),
            self.agent().log("install-cni").unwrap_or_default(),
        )
    }
}

#[test]
fn whatever_breaks_on_a_node_every_screen_names_the_same_cause() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let values = |is_ambient: bool| {
        json!({"driftWatch": {"interval": "2s"}, "ambient": {"enabled": is_ambient}, "repair": {"enabled": false},
            "nodeCondition": {"enabled": true}, "env": {"TAINT_AFTER": "1s"}})
    };
    let early = node.start_pod(&sidecar_pod("early"))?;
    early.wait_running(POD)?;
    let run = reached(&api, &node)?;
    let mut world = World { api: &api, node: &node, run: &run, daemon_set: Value::Null };
    world.install(&values(true))?;
    world.redirected("steady")?;

    let mut breakages_here = all();
    let (mut record, mut wrong) = (Vec::new(), Vec::new());
    for cells in breakages(TABLE)? {
        let [what, finding, words, metric, ..] = &cells[..] else { bail!("not six cells: {cells:?}") };
        let row = Row { what, finding, words, metric };
        let breaks = breakages_here.remove(row.what).with_context(|| format!("not tried: {what}"))?;
        let began = Instant::now();
        let subject = breaks(&world).with_context(|| format!("{what}\n{}", world.everything()))?;
        let shown = world.wait_shown(&world.screens(&subject, &row), began);
        let (first, after) = match shown {
            Ok(shown) => shown,
            Err(error) => {
                wrong.push(format!("{what}: {error:#}\n{}", world.everything()));
                continue;
            }
        };
        println!("{what}: {first} after {after:?}; all after {:?}", began.elapsed());
        record.push((what.clone(), first, after));
        match subject {
            // One pod makes no node unready.
            Subject::Pod(_) | Subject::Healed => {
                ensure!(readyz(world.node, "")? == "ready", "{what}: {}", world.everything());
            }
            Subject::Node | Subject::NodeWithoutRight | Subject::NodeWithoutAccount => {}
            Subject::Agent => {
                world.agent().delete(POD)?;
                world.install(&values(false))?;
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    ensure!(breakages_here.is_empty(), "not on the page: {:?}", breakages_here.keys());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        record_breakages(TABLE, &record)?;
    }
    Ok(())
}
