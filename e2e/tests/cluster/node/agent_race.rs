//! Pods that start before the plugin is in place, or while it comes, changes and goes: on a real node, each is redirected or held back, and none
//! ever runs outside the mesh. The pods are as the injector writes them; traffic tells.

use e2e::validation;
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::agent_support::host_agent::HostAgent;
use crate::agent_support::{
    LOOPBACK, MANIFEST, POD, agent_pod, apply_manifest, import_image, is_ready, metric, programs, run_dir,
};
use anyhow::{Context, Result, ensure};
use e2e::image::BUSYBOX;
use e2e::kube::ApiServer;
use e2e::node::{Node, PRIMARY_CONFLIST, Pod, plain_pod};
use e2e::traffic::TcpServer;
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_support::process::{self, until};
use test_support::sample;

/// The node as its pods reach it.
const GATEWAY: &str = "10.88.0.1";
/// One connection out to the node at a time, again when it ends.
const CONNECT_OUT: &str = "while :; do nc 10.88.0.1 9000 -e cat; sleep 1; done";
const REPAIRED: &str = "istio_cni_repair_pods_repaired_total{type=\"repair\",result=\"success\"}";

/// The manifest with repair where pods stand.
fn repairing() -> String {
    MANIFEST.replace("# repair-in-place: ", "")
}

/// The pod of `manifests/validated-pod.yaml`, as the API server understands it.
fn validated_pod(api: &ApiServer, node: &Node<'_>) -> Result<Value> {
    let file = node.state_dir().join("validated-pod.yaml");
    fs::write(&file, validation::MANIFEST)?;
    let file = file.display().to_string();
    let pod = api.kubectl(&["create", "--dry-run=client", "-o", "json", "-f", &file])?.stdout;
    Ok(serde_json::from_str(&pod)?)
}

fn validation(pod: &Value) -> impl Iterator<Item = &Value> {
    let statuses = pod["status"]["initContainerStatuses"].as_array().into_iter().flatten();
    statuses.filter(|status| status["name"] == "istio-validation")
}

/// How the pod's validation has ended, now or before it was started again.
fn validation_ends(pod: &Value) -> Vec<i64> {
    let ends = validation(pod).flat_map(|status| [&status["lastState"], &status["state"]]);
    ends.filter_map(|end| end["terminated"]["exitCode"].as_i64()).collect()
}

/// Whether the pod's validation has failed at first. Of a container that has ended in success the kubelet forgets within a minute how it ended before
/// (`--maximum-dead-containers-per-container` is 1), but not how often it was started again.
fn was_held_back(pod: &Value) -> bool {
    validation_ends(pod).contains(&126)
        || validation(pod).any(|status| status["restartCount"].as_u64() > Some(0))
}

fn is_held_back(pod: &Value) -> bool {
    let ends = validation_ends(pod);
    ends.contains(&126) && !ends.contains(&0)
}

/// An end of a connection that is not to read for ever.
fn patient(stream: TcpStream) -> Result<TcpStream> {
    stream.set_read_timeout(Some(POD))?;
    Ok(stream)
}

/// Waits until a connection breaks. One that does not is read from until patience ends, which is an error of another kind.
fn wait_broken(what: &str, stream: &mut TcpStream) -> Result<()> {
    match stream.read(&mut [0; 64]) {
        Ok(0) => Ok(()),
        Ok(_) => anyhow::bail!("{what} goes on"),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(()),
        Err(error) => Err(error).context(what.to_owned()),
    }
}

/// Waits until the program that had a connection out to the node connects again, and gets the proxy.
fn wait_captured(proxy: &TcpServer) -> Result<()> {
    let captured = proxy.wait_accepted(1, POD)?;
    assert_eq!(captured[0].original, Some(SocketAddr::new(GATEWAY.parse()?, 9000)));
    Ok(())
}

/// No other connection has arrived beside the proxy.
/// The proxy's outbound listener. A validation that the kubelet starts again has the port until it has failed.
fn proxy_in(pod: &Pod<'_>) -> Result<TcpServer> {
    let inside = pod.namespace()?;
    until("the validation to free the proxy's port", POD, &[], || {
        match TcpServer::start(&inside, "proxy", (Ipv4Addr::UNSPECIFIED, 15001)) {
            Err(error) if error.root_cause().downcast_ref() == Some(&Errno::EADDRINUSE) => Ok(None),
            proxy => proxy.map(Some),
        }
    })
}

fn ensure_silent(listener: &TcpListener) -> Result<()> {
    listener.set_nonblocking(true)?;
    ensure!(listener.accept().is_err(), "the pod has connected beside the proxy");
    Ok(())
}

/// The pod with a native sidecar before its validation, which has one connection out to the node, and takes such from outside.
fn pod_with_early_sidecar(api: &ApiServer, node: &Node<'_>) -> Result<Value> {
    let mut pod = validated_pod(api, node)?;
    let talk = format!("nc -ll -p 7000 -e cat & {CONNECT_OUT}");
    let early = json!({"name": "early", "image": BUSYBOX, "imagePullPolicy": "Never", "restartPolicy": "Always",
        "command": ["/bin/sh", "-c", talk]});
    pod["spec"]["initContainers"].as_array_mut().context("init containers")?.insert(0, early);
    Ok(pod)
}

#[test]
fn a_pod_that_started_before_the_plugin_is_repaired_where_it_stands() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    node.import(&validation::image()?)?;
    import_image(&node)?;
    let daemon_set = apply_manifest(&api, &node, &repairing())?;

    // The listener stays: what comes later than the repair would be seen here as well.
    let listener = node.namespace().enter(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 9000)))??;
    let pod = node.start_pod(&pod_with_early_sidecar(&api, &node)?)?;
    pod.wait("to be held back", POD, |pod| is_held_back(pod).then_some(()))?;
    let (out, peer) = listener.accept()?;
    let address = pod.address(false)?;
    ensure!(peer.ip() == address, "the pod's connection comes from {peer}");
    let inward = node.namespace().enter(|| TcpStream::connect((address, 7000)))??;
    let (mut out, mut inward) = (patient(out)?, patient(inward)?);
    inward.write_all(b"x")?;
    inward.read_exact(&mut [0]).context("the test can determine whether the connection is alive")?;

    let proxy = proxy_in(&pod)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    let log = || agent.log("install-cni").unwrap_or_default();
    wait_broken("the connection out of the pod", &mut out).with_context(log)?;
    wait_broken("the connection into the pod", &mut inward).with_context(log)?;
    wait_captured(&proxy)?;
    pod.wait_running(POD).with_context(log)?;
    let ends = validation_ends(&pod.object()?.context("the pod")?);
    ensure!(ends.contains(&0), "validation: {ends:?}");
    ensure_silent(&listener)?;

    until("the metric", POD, &[], || Ok(metric(&node, REPAIRED)?.filter(|count| *count > 0.0).map(drop)))
        .with_context(log)?;
    assert_eq!(metric(&node, REPAIRED)?, Some(1.0), "{}", log());
    let events = api.list("events", "default")?;
    let of_repair: Vec<&Value> =
        events.iter().filter(|event| event["source"]["component"] == "cni-repair").collect();
    assert_eq!(of_repair.len(), 1, "{of_repair:#?}");
    let event = of_repair[0];
    assert_eq!([&event["reason"], &event["type"]], ["RepairBrokenPod", "Normal"], "{event:#}");
    assert_eq!(event["involvedObject"]["uid"], api.get("pod", "default", "validated")?["metadata"]["uid"]);
    let message = event["message"].as_str().unwrap_or_default();
    // If the validation probes just then, its connections are among those that were ended.
    let ended = message
        .strip_suffix(" connections that bypassed the proxy were ended")
        .and_then(|rest| rest.rsplit(' ').next()?.parse::<usize>().ok());
    ensure!(ended.is_some_and(|ended| ended >= 2), "{message}");
    agent.wait("still ready", POD, is_ready)
}

/// How often everything that can happen to an agent happens; `make race` asks for more.
fn races() -> usize {
    sample::number("RACES", 1)
}

/// What an application does as soon as it runs, and goes on doing: it calls the node. A call that the proxy gets first never arrives.
fn call_node(container: &mut Value) {
    container["command"] = json!([
        "/bin/sh",
        "-c",
        "while :; do echo x | nc -w 2 10.88.0.1 9100; sleep 1; done & exec nc -ll -p 8080 -e echo hello"
    ]);
}

/// Where calls of applications arrive that are not redirected.
struct Beacon {
    server: TcpServer,
    /// The pod outside the mesh that shows that calls do arrive.
    control: IpAddr,
}

impl Beacon {
    fn start(node: &Node<'_>) -> Result<Self> {
        let server = TcpServer::start(node.namespace(), "beacon", (Ipv4Addr::UNSPECIFIED, 9100))?;
        let mut plain = plain_pod("control");
        call_node(&mut plain["spec"]["containers"][0]);
        let pod = node.start_pod(&plain)?;
        pod.wait_running(POD)?;
        server.wait_accepted(1, POD)?;
        Ok(Self { server, control: pod.address(false)? })
    }

    fn ensure_heard_none_of_the_mesh(&self) -> Result<()> {
        let callers: BTreeSet<IpAddr> =
            self.server.accepted().iter().map(|report| report.peer.ip()).collect();
        ensure!(callers == BTreeSet::from([self.control]), "called beside the proxy: {callers:?}");
        Ok(())
    }
}

/// The most pods that are there at once.
const CROWD: usize = 16;

/// Pods of the mesh, made without a pause until `done`.
struct Load<'n> {
    node: &'n Node<'n>,
    pod: Value,
    done: AtomicBool,
    created: AtomicUsize,
}

/// How pods came to run.
#[derive(Debug, Default)]
struct Figures {
    at_once: usize,
    held_back_first: usize,
}

impl Load<'_> {
    fn run(&self) -> Result<Figures> {
        let mut figures = Figures::default();
        let mut pods = Vec::new();
        for number in 0.. {
            if self.done.load(Ordering::Relaxed) {
                break;
            }
            if pods.len() == CROWD {
                let oldest: Pod<'_> = pods.remove(0);
                figures.count(&wait_redirected(&oldest)?);
                oldest.delete(POD)?;
            }
            pods.push(self.start(&format!("race-{number}"))?);
            self.created.fetch_add(1, Ordering::Relaxed);
        }
        for pod in &pods {
            figures.count(&wait_redirected(pod)?);
        }
        Ok(figures)
    }

    fn start(&self, name: &str) -> Result<Pod<'_>> {
        let mut pod = self.pod.clone();
        pod["metadata"]["name"] = json!(name);
        self.node.start_pod(&pod)
    }

    /// Waits until as many more have been made.
    fn more(&self, count: usize) -> Result<()> {
        let enough = self.created.load(Ordering::Relaxed) + count;
        until("more pods", POD, &[], || {
            ensure!(!self.done.load(Ordering::Relaxed), "no more pods are made");
            Ok((self.created.load(Ordering::Relaxed) >= enough).then_some(()))
        })
    }
}

impl Figures {
    fn count(&mut self, pod: &Value) {
        if was_held_back(pod) {
            self.held_back_first += 1;
        } else {
            self.at_once += 1;
        }
    }
}

/// Waits until a pod is redirected: its validation says so, or it is held back still, and has the rules by now that its next try will find.
fn wait_redirected(pod: &Pod<'_>) -> Result<Value> {
    let mut asked = None;
    pod.wait("to be redirected", POD, |object| {
        let ends = validation_ends(object);
        if ends.contains(&0) {
            return Some(object.clone());
        }
        // Every look into a namespace takes a moment.
        let is_time = asked.is_none_or(|asked: Instant| asked.elapsed() > Duration::from_secs(1));
        if !ends.contains(&126) || !is_time {
            return None;
        }
        asked = Some(Instant::now());
        let rules = pod.namespace().and_then(|namespace| namespace.state_with_nft());
        rules.is_ok_and(|rules| !rules.is_pristine()).then(|| object.clone())
    })
}

/// What happens to the agent and to what it works on.
type Disturbance = (&'static str, fn(&mut HostAgent<'_>, &Node<'_>, usize) -> Result<()>);

const DISTURBANCES: [Disturbance; 6] = [
    ("upgraded", |agent, _, round| {
        agent.new_version(round)?;
        agent.stop(Signal::SIGTERM)?;
        agent.start()?;
        agent.wait_ready()
    }),
    ("killed", |agent, _, _| {
        agent.stop(Signal::SIGKILL)?;
        agent.start()?;
        agent.wait_ready()
    }),
    ("killed at its start", |agent, _, round| {
        agent.stop(Signal::SIGTERM)?;
        agent.start()?;
        thread::sleep(Duration::from_millis(7 * (round as u64 % 20)));
        agent.stop(Signal::SIGKILL)?;
        agent.start()?;
        agent.wait_ready()
    }),
    ("containerd killed", |_, node, _| node.restart_containerd()),
    ("the conflist written again by the network's plugin", |_, node, _| {
        node.write_conf(PRIMARY_CONFLIST, &node.primary_conflist())
    }),
    ("all at once, and no agent for a while", |agent, node, _| {
        agent.stop(Signal::SIGKILL)?;
        node.write_conf(PRIMARY_CONFLIST, &node.primary_conflist())?;
        node.restart_containerd()
    }),
];

/// The agent is installed while pods are held back, then everything happens to it, and at the end it is there.
fn disturb(agent: &mut HostAgent<'_>, node: &Node<'_>, load: &Load<'_>) -> Result<()> {
    until("the first pod to be held back", POD, &[], || {
        ensure!(!load.done.load(Ordering::Relaxed), "no more pods are made");
        Ok(node.pods()?.iter().any(is_held_back).then_some(()))
    })?;
    agent.start()?;
    agent.wait_ready()?;
    for round in 0..races() {
        for (what, happens) in DISTURBANCES {
            load.more(1)?;
            happens(agent, node, round).with_context(|| what)?;
            load.more(1)?;
        }
        agent.stop(Signal::SIGKILL)?;
        agent.start()?;
        agent.wait_ready()?;
    }
    Ok(())
}

/// A node of a cluster that allows repair where pods stand, with the validation's image.
fn repairing_node(api: &ApiServer) -> Result<Node<'_>> {
    let node = Node::joined(api)?;
    node.import(&validation::image()?)?;
    apply_manifest(api, &node, &repairing())?;
    Ok(node)
}

/// An agent that repairs where pods stand.
fn repairing_agent<'n>(api: &ApiServer, node: &'n Node<'n>) -> Result<HostAgent<'n>> {
    let mut agent = HostAgent::new(node, api, &programs()?)?;
    agent.env = vec![
        ("REPAIR_REPAIR_PODS", "true".to_owned()),
        ("MOUNTED_PROC_DIR", "/proc".to_owned()),
        ("MOUNTED_CNI_NETNS_DIR", "/run/netns".to_owned()),
    ];
    Ok(agent)
}

#[test]
fn whatever_happens_to_the_agent_no_pod_runs_outside_the_mesh() -> Result<()> {
    let start = Instant::now();
    let api = ApiServer::start()?;
    let node = repairing_node(&api)?;
    let mut agent = repairing_agent(&api, &node)?;
    let beacon = Beacon::start(&node)?;
    let mut pod = validated_pod(&api, &node)?;
    call_node(&mut pod["spec"]["containers"][0]);
    let load = Load { node: &node, pod, done: AtomicBool::new(false), created: AtomicUsize::new(0) };
    let figures = thread::scope(|scope| -> Result<Figures> {
        let pods = scope.spawn(|| {
            let figures = load.run();
            load.done.store(true, Ordering::Relaxed);
            figures
        });
        let disturbed = disturb(&mut agent, &node, &load);
        load.done.store(true, Ordering::Relaxed);
        let figures = pods.join().map_err(|_| anyhow::anyhow!("the load panicked"))?;
        match (disturbed, figures) {
            // Why there is no agent, and which pod waits for it: either may be behind the other.
            (Err(agent), Err(pods)) => Err(pods.context(format!("{agent:#}"))),
            (Err(agent), Ok(_)) => Err(agent),
            (Ok(()), figures) => figures,
        }
    })?;
    beacon.ensure_heard_none_of_the_mesh()?;
    ensure!(figures.held_back_first > 0 && figures.at_once > 0, "{figures:?}: the test met one kind only");
    let refused = api.list("events", "default")?;
    let refused = refused.iter().filter(|event| event["reason"] == "FailedCreatePodSandBox");
    println!(
        "{} pods in {:.0?}: {} redirected at their start, {} held back and repaired where they stood, none ran outside the mesh; {} refusals by the runtime",
        figures.at_once + figures.held_back_first,
        start.elapsed(),
        figures.at_once,
        figures.held_back_first,
        refused.filter_map(|event| event["count"].as_u64()).sum::<u64>()
    );
    Ok(())
}

/// What a node finds on its disk when it has booted. The run directory is in memory, so it is empty.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Boot {
    /// The plugin and its entry.
    Both,
    /// The plugin; the network's own plugin has written its conflist again.
    NoEntry,
    /// The entry; the image that the node boots has no such plugin.
    NoPlugin,
}

impl Boot {
    fn leaves(self, node: &Node<'_>) -> Result<()> {
        fs::remove_dir_all(run_dir(node))?;
        fs::create_dir(run_dir(node))?;
        match self {
            Self::Both => Ok(()),
            Self::NoEntry => node.write_conf(PRIMARY_CONFLIST, &node.primary_conflist()),
            Self::NoPlugin => Ok(fs::remove_file(node.bin_dir().join("istio-cni"))?),
        }
    }

    /// Waits until the first pod after the boot is held back: by the plugin that cannot do its work, or by its validation.
    fn wait_held_back(self, pod: &Pod<'_>) -> Result<()> {
        match self {
            Self::Both | Self::NoPlugin => pod.wait_sandbox_failure(POD).map(drop),
            Self::NoEntry => {
                pod.wait("to be held back", POD, |pod| is_held_back(pod).then_some(()))?;
                Ok(())
            }
        }
    }
}

#[test]
fn after_a_reboot_the_first_pod_is_held_back_and_then_redirected() -> Result<()> {
    let api = ApiServer::start()?;
    let node = repairing_node(&api)?;
    let mut agent = repairing_agent(&api, &node)?;
    let mut pod = validated_pod(&api, &node)?;
    call_node(&mut pod["spec"]["containers"][0]);
    let load = Load { node: &node, pod, done: AtomicBool::new(false), created: AtomicUsize::new(0) };
    let beacon = Beacon::start(&node)?;
    node.pod("default", "control").delete(POD)?;
    agent.start()?;
    agent.wait_ready()?;
    wait_redirected(&load.start("before")?)?;
    let boots = if races() > 1 {
        vec![Boot::Both, Boot::NoEntry, Boot::NoPlugin]
    } else {
        vec![Boot::Both, Boot::NoEntry]
    };
    for boot in boots {
        // An application that is only created when the node goes down is the next test's.
        for pod in node.pods()? {
            let name = pod["metadata"]["name"].as_str().context("the pod has no name")?;
            node.pod("default", name).wait_running(POD)?;
        }
        agent.stop(Signal::SIGKILL)?;
        node.reboot(|| boot.leaves(&node))?;
        let first = load.start(&format!("first-{boot:?}").to_lowercase())?;
        boot.wait_held_back(&first).with_context(|| format!("{boot:?}"))?;
        agent.start()?;
        agent.wait_ready()?;
        for pod in [first, node.pod("default", "before")] {
            wait_redirected(&pod).with_context(|| format!("{boot:?}"))?;
        }
        beacon.ensure_heard_none_of_the_mesh().with_context(|| format!("{boot:?}"))?;
        println!(
            "rebooted ({boot:?}): the first pod was held back, then redirected; none ran outside the mesh"
        );
    }
    Ok(())
}

/// A node that starts no application: the runtime creates the container, and hangs when it is to start it.
struct HeldStarts {
    folder: PathBuf,
}

impl HeldStarts {
    fn of(node: &Node<'_>) -> Result<Self> {
        let folder = node.state_dir();
        let front = r#"#!/bin/sh
for word; do
    if test -e FOLDER/hold && grep -qs 'cri.container-name":"app"' -- "$word/config.json"; then
        touch FOLDER/held
        exec sleep 1000
    fi
done
exec FOLDER/runc "$@"
"#;
        fs::write(folder.join("front"), front.replace("FOLDER", &folder.display().to_string()))?;
        let put_in_front = r#"cd "$0"; touch hold; cp "$(command -v runc)" runc
            chmod +x front; mount --bind front "$(command -v runc)""#;
        let mut script = process::command("sh", ["-ec", put_in_front]);
        node.run(script.arg(&folder))?.ok()?;
        Ok(Self { folder })
    }

    fn wait_for_one(&self) -> Result<()> {
        until("an application to be created", POD, &[], || {
            Ok(self.folder.join("held").exists().then_some(()))
        })
    }

    fn end(&self) -> Result<()> {
        Ok(fs::remove_file(self.folder.join("hold"))?)
    }
}

/// A kubelet without kubernetes/kubernetes#138514 takes an application that was created and not started in the sandbox before the reboot for a sign
/// that the new sandbox has been initialized. Where the plugin's entry is lost as well, nothing of the mesh runs before that application.
#[test]
fn an_application_that_the_kubelet_starts_beside_its_validation_is_redirected_where_it_runs() -> Result<()> {
    let api = ApiServer::start()?;
    let node = repairing_node(&api)?;
    let mut agent = repairing_agent(&api, &node)?;
    let listener = node.namespace().enter(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 9000)))??;
    listener.set_nonblocking(true)?;
    let starts = HeldStarts::of(&node)?;
    agent.start()?;
    agent.wait_ready()?;

    let mut pod = validated_pod(&api, &node)?;
    pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", CONNECT_OUT]);
    let pod = node.start_pod(&pod)?;
    starts.wait_for_one()?;
    agent.stop(Signal::SIGKILL)?;
    node.reboot(|| {
        starts.end()?;
        Boot::NoEntry.leaves(&node)
    })?;
    let (out, _) =
        until("the application to call beside its validation", POD, &[], || Ok(listener.accept().ok()))?;
    pod.wait("to be found broken", POD, |pod| is_held_back(pod).then_some(()))?;

    let proxy = proxy_in(&pod)?;
    agent.start()?;
    agent.wait_ready()?;
    wait_broken("the connection out of the pod", &mut patient(out)?)?;
    wait_captured(&proxy)?;
    ensure_silent(&listener)
}
