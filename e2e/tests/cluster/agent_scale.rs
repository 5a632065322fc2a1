//! What the controllers cost an API server, and how small they stay, on a real API server. Pods are made and found broken as a rolling restart makes
//! them, as fast as the server takes them; nodes join, get agents and lose them. `make scale` plays 5,000 pods and 1,000 nodes and prints its
//! figures; `make test-cluster` a few.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::agent_support::fleet::FleetAgent;
use crate::agent_support::{MANIFEST, NAMESPACE};
use anyhow::{Context, Result, ensure};
use e2e::kube::{ApiServer, Sending};
use serde_json::{Value, json};
use test_support::process::until;
use test_support::sample;

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);
/// How many pods are made at once.
const BATCH: usize = 50;
const WAITING: &str = "istio_cni_repair_waiting_pods";

/// Requests to read, label and list pods, and to create events. Each agent has one watch beside.
#[derive(Debug)]
struct Calls {
    reads: u64,
    /// Those that make the pods are among them.
    changes: u64,
    events: u64,
    lists: u64,
}

impl Calls {
    fn so_far(api: &ApiServer) -> Result<Self> {
        let metrics = api.metrics()?;
        let of = |verb: &str, resource: &str| metrics.requests(verb, resource, &[]);
        Ok(Self {
            reads: of("GET", "pods"),
            changes: of("PATCH", "pods"),
            events: of("POST", "events"),
            lists: of("LIST", "pods"),
        })
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            reads: self.reads - before.reads,
            changes: self.changes - before.changes,
            events: self.events - before.events,
            lists: self.lists - before.lists,
        }
    }
}

/// Asks agents repeatedly how many pods wait; the most.
fn most_waiting(agents: &[FleetAgent], done: &AtomicBool) -> f64 {
    let mut most = 0.0_f64;
    while !done.load(Ordering::Relaxed) {
        for agent in agents.iter().take(3) {
            most = most.max(agent.count(WAITING));
        }
        thread::sleep(Duration::from_millis(20));
    }
    most
}

/// Makes pods on nodes in turn, each held back by its validation.
fn make_pods(api: &ApiServer, from: usize, count: usize, nodes: usize) -> Result<()> {
    let numbers: Vec<usize> = (from..from + count).collect();
    for batch in numbers.chunks(BATCH) {
        let pods = "/api/v1/namespaces/default/pods";
        let made = batch.iter().map(|number| {
            Sending::post(
                pods,
                &e2e::broken::pod(&format!("web-{number}"), &format!("node-{}", number % nodes)),
            )
        });
        api.send_all(&made.collect::<Vec<_>>())?;
        let failed = batch
            .iter()
            .map(|number| Sending::merge(&format!("{pods}/web-{number}/status"), &e2e::broken::held_back()));
        api.send_all(&failed.collect::<Vec<_>>())?;
    }
    Ok(())
}

fn sum(agents: &[FleetAgent], metric: &str) -> f64 {
    agents.iter().map(|agent| agent.count(metric)).sum()
}

/// Plays it with so many nodes; one line of figures.
fn play(api: &ApiServer, first: usize, pods: usize, nodes: usize) -> Result<String> {
    let folder = tempfile::Builder::new().prefix(&format!("e2e-{}-scale", std::process::id())).tempdir()?;
    let (before, start, done) = (Calls::so_far(api)?, Instant::now(), AtomicBool::new(false));
    let agents: Vec<FleetAgent> = (0..nodes)
        .map(|node| {
            let name = format!("node-{node}");
            let folder = folder.path().join(&name);
            FleetAgent::start(api, NAMESPACE, &folder, &name, &[("LOG_OUTPUT_LEVEL", "warn")])
        })
        .collect::<Result<_>>()?;
    let most = thread::scope(|scope| -> Result<f64> {
        let most = scope.spawn(|| most_waiting(&agents, &done));
        let success = "istio_cni_repair_pods_repaired_total{type=\"label\",result=\"success\"}";
        let made = make_pods(api, first, pods, nodes).and_then(|()| {
            let enough = f64::from(u32::try_from(pods)?);
            until("all pods to be dealt with", LIMIT, &[], || {
                Ok((sum(&agents, success) >= enough).then_some(()))
            })
        });
        done.store(true, Ordering::Relaxed);
        let most = most.join().map_err(|_| anyhow::anyhow!("the sampler panicked"))?;
        made.map(|()| most)
    })?;
    let took = start.elapsed();
    until("the last event", LIMIT, &[], || {
        Ok((Calls::so_far(api)?.since(&before).events >= pods as u64).then_some(()))
    })?;
    let calls = Calls::so_far(api)?.since(&before);
    let memory = agents.iter().map(FleetAgent::most_memory).max().context("an agent")?;
    // One read, one change and one event for each pod. Who has more than the queue holds lists again when half of it is done.
    let made = pods as u64;
    let calls = Calls { changes: calls.changes - made, ..calls };
    let lists = nodes + pods / 512;
    ensure!([calls.changes, calls.events] == [made; 2] && calls.lists <= lists as u64, "{calls:?}");
    // Each agent reads its own pod, too, and asks for one as the plugin does: at the start, and once the credentials are there.
    ensure!((made..=made + 3 * nodes as u64).contains(&calls.reads), "{calls:?}");
    ensure!(most <= 1024.0, "{most}");
    ensure!(memory <= 64 << 10, "an agent took {memory} KiB, more than its manifest gives it");
    let delays = ["sum", "count"]
        .map(|part| sum(&agents, &format!("istio_cni_repair_delay_seconds_{part}{{type=\"label\"}}")));
    let [sum, count] = delays;
    let all = calls.reads + calls.changes + calls.events + calls.lists;
    Ok(format!(
        "| {nodes} | {pods} | {:.0} s | {:.3} | {most} | {:.1} MiB | {:.0} ms |",
        took.as_secs_f64(),
        all as f64 / pods as f64,
        memory as f64 / 1024.0,
        sum / count * 1000.0
    ))
}

#[test]
fn broken_pods_cost_three_calls_each_and_an_agent_stays_small() -> Result<()> {
    let (pods, nodes) = (sample::number("SCALE_PODS", 200), sample::number("SCALE_NODES", 4));
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    api.apply(&MANIFEST.replace("# repair-label: ", ""))?;
    let objects: Vec<Value> = (0..nodes)
        .map(|node| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("node-{node}")}}))
        .collect();
    api.apply(&json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string())?;
    let one = play(&api, 0, pods, 1)?;
    let many = play(&api, pods, pods, nodes)?;
    println!(
        "| nodes | broken pods | in | API calls a pod | most waiting at an agent | memory of the largest agent | from failure to done |\n|---:|---:|---:|---:|---:|---:|---:|\n{one}\n{many}"
    );
    Ok(())
}

const CONTROLLER: &str = include_str!("../../../deploy/taint-controller.yaml");
/// What its manifest allows the cluster's taint controller, in KiB.
const CONTROLLER_MEMORY: u64 = 128 << 10;

/// Requests that only the cluster's taint controller makes here.
#[derive(Debug, PartialEq)]
struct TaintCalls {
    patches: u64,
    events: u64,
    /// Of single nodes, which it needs only where another program changes one meanwhile.
    gets: u64,
}

impl TaintCalls {
    fn so_far(api: &ApiServer) -> Result<Self> {
        let metrics = api.metrics()?;
        let of = |verb: &str, resource: &str| metrics.requests(verb, resource, &["subresource=\"\""]);
        Ok(Self { patches: of("PATCH", "nodes"), events: of("POST", "events"), gets: of("GET", "nodes") })
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            patches: self.patches - before.patches,
            events: self.events - before.events,
            gets: self.gets - before.gets,
        }
    }
}

/// A node as large as real ones are: kubelets report fifty images.
fn large_node(number: usize) -> Value {
    let image = |image: usize| {
        let name = format!("registry.example.com/team-{image}/application-{image}");
        json!({"names": [format!("{name}@sha256:{image:064}"), format!("{name}:1.0.{image}")], "sizeBytes": 123_456_789})
    };
    let name = format!("node-{number:04}");
    json!({"apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/os": "linux", "kubernetes.io/hostname": name}},
        "status": {"images": (0..50).map(image).collect::<Vec<_>>()}})
}

fn agents_pod(number: usize) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("agent-{number}"), "labels": {"k8s-app": "istio-cni-node"}},
        "spec": {"nodeName": format!("node-{number:04}"), "containers": [{"name": "install-cni", "image": "x"}]}})
}

fn send(api: &ApiServer, numbers: std::ops::Range<usize>, request: impl Fn(usize) -> Sending) -> Result<()> {
    for batch in numbers.collect::<Vec<_>>().chunks(BATCH) {
        api.send_all(&batch.iter().map(|number| request(*number)).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Waits until so many nodes have the taint; the most nodes that were seen to wait meanwhile.
fn wait_tainted(controller: &FleetAgent, nodes: usize, tainted: usize) -> Result<f64> {
    let metric = |name: &str| controller.metric(&format!("istio_cni_taint_controller_{name}"));
    let [nodes, tainted] = [u32::try_from(nodes)?, u32::try_from(tainted)?].map(f64::from);
    let mut most = 0.0_f64;
    until("the nodes to be as they should", LIMIT, &[&controller.process], || {
        most = most.max(metric("queue_nodes").unwrap_or_default());
        Ok((metric("nodes") == Some(nodes) && metric("tainted_nodes") == Some(tainted)).then_some(()))
    })?;
    Ok(most)
}

/// The names of nodes that have a taint.
fn tainted_nodes(api: &ApiServer) -> Result<Vec<String>> {
    let nodes = api.list("nodes", "")?;
    let tainted = nodes.iter().filter(|node| node["spec"]["taints"].is_array());
    Ok(tainted.filter_map(|node| Some(node["metadata"]["name"].as_str()?.to_owned())).collect())
}

/// How the controller's own figures have to be where nothing failed.
fn ensure_nothing_failed(controller: &FleetAgent) -> Result<()> {
    let failures = ["gone", "changed", "refused", "rejected", "unanswered"].iter().flat_map(|result| {
        ["add", "remove"].map(|change| format!("changes_total{{change=\"{change}\",result=\"{result}\"}}"))
    });
    let others = [
        "queue_overflows_total",
        "events_total{result=\"failed\"}",
        "watch_restarts_total{watch=\"nodes\"}",
        "watch_restarts_total{watch=\"pods\"}",
    ];
    for name in failures.chain(others.map(str::to_owned)) {
        let value = controller.metric(&format!("istio_cni_taint_controller_{name}"));
        ensure!(value == Some(0.0), "{name}: {value:?}\n{}", controller.process.log());
    }
    Ok(())
}

/// Nodes join, get agents, and a tenth of them lose theirs: the most that waited, at each of these.
fn play_nodes(api: &ApiServer, controller: &FleetAgent, nodes: usize) -> Result<[f64; 3]> {
    let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods");
    send(api, 0..nodes, |number| Sending::post("/api/v1/nodes", &large_node(number)))?;
    let joined = wait_tainted(controller, nodes, nodes)?;
    send(api, 0..nodes, |number| Sending::post(&pods, &agents_pod(number)))?;
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    send(api, 0..nodes, |number| Sending::merge(&format!("{pods}/agent-{number}/status"), &ready))?;
    let freed = wait_tainted(controller, nodes, 0)?;
    send(api, 0..nodes / 10, |number| Sending::delete(&format!("{pods}/agent-{number}")))?;
    Ok([joined, freed, wait_tainted(controller, nodes, nodes / 10)?])
}

#[test]
fn each_change_of_a_taint_costs_two_calls_however_many_nodes_there_are() -> Result<()> {
    let nodes = sample::number("SCALE_TAINT_NODES", 60);
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    api.apply(MANIFEST)?;
    api.apply(CONTROLLER)?;
    let folder = tempfile::Builder::new().prefix(&format!("e2e-{}-taints", std::process::id())).tempdir()?;
    let start = |name: &str| {
        FleetAgent::taint_controller(&api, &folder.path().join(name), name, &[("TAINT_AFTER", "2s")])
    };
    let leads = |controller: &FleetAgent| {
        until("the controller to lead", LIMIT, &[&controller.process], || {
            Ok((controller.metric("istio_cni_taint_controller_leader") == Some(1.0)).then_some(()))
        })
    };
    let controller = start("first")?;
    leads(&controller)?;
    let (before, began) = (TaintCalls::so_far(&api)?, Instant::now());
    let most = play_nodes(&api, &controller, nodes)?;
    let took = began.elapsed();
    // Each is tainted once and freed once; those without an agent are tainted once more, and no others.
    let (gone, changes) = (nodes / 10, 2 * nodes + nodes / 10);
    let wanted = TaintCalls { patches: changes as u64, events: changes as u64, gets: 0 };
    let mut calls = TaintCalls::so_far(&api)?.since(&before);
    until("the last event", LIMIT, &[&controller.process], || {
        calls = TaintCalls::so_far(&api)?.since(&before);
        Ok((calls.events >= wanted.events).then_some(()))
    })?;
    ensure!(calls == wanted, "{calls:?} instead of {wanted:?}");
    let vanished: Vec<String> = (0..gone).map(|number| format!("node-{number:04}")).collect();
    ensure!(tainted_nodes(&api)? == vanished, "{:?}", tainted_nodes(&api)?);
    ensure_nothing_failed(&controller)?;
    let most_waiting = most.into_iter().fold(0.0, f64::max);
    ensure!(most_waiting <= f64::from(u32::try_from(nodes)?), "{most:?}");
    let (memory, processor) = (controller.most_memory(), controller.processor_seconds()?);
    // Another replica comes to lead and lists all nodes as they are. If it took one for unfit, it would taint that before the one that loses its agent
    // only then.
    let before = TaintCalls::so_far(&api)?;
    let next = start("second")?;
    controller.process.signal(nix::sys::signal::Signal::SIGTERM)?;
    ensure!(controller.process.wait(LIMIT)?.success(), "{}", controller.process.log());
    leads(&next)?;
    wait_tainted(&next, nodes, gone)?;
    let last = format!("/api/v1/namespaces/{NAMESPACE}/pods/agent-{}", nodes - 1);
    api.send_all(&[Sending::delete(&last)])?;
    wait_tainted(&next, nodes, gone + 1)?;
    let again = TaintCalls::so_far(&api)?.since(&before);
    ensure!(again.patches == 1 && again.gets == 0, "a new leader changed what was settled: {again:?}");
    ensure_nothing_failed(&next)?;
    let largest = memory.max(next.most_memory());
    ensure!(largest <= CONTROLLER_MEMORY, "{largest} KiB are more than its manifest gives it");
    println!(
        "| nodes | changes | in | API calls a change | most nodes waiting | memory of the leader | of one that lists all at once | processor |\n|---:|---:|---:|---:|---:|---:|---:|---:|\n| {nodes} | {changes} | {:.0} s | {:.3} | {most_waiting} | {:.1} MiB | {:.1} MiB | {processor:.1} s |",
        took.as_secs_f64(),
        (calls.patches + calls.events + calls.gets) as f64 / changes as f64,
        memory as f64 / 1024.0,
        next.most_memory() as f64 / 1024.0,
    );
    Ok(())
}
