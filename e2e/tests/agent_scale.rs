//! What the repair of pods costs an API server and an agent, on a real API server: pods are made and found broken as a rolling restart makes them, as
//! fast as the server takes them. `make scale` plays 5,000 and prints its figures; `make test` a few.

mod agent_support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use agent_support::fleet::FleetAgent;
use agent_support::{MANIFEST, NAMESPACE};
use anyhow::{Context, Result, ensure};
use e2e::kube::{ApiServer, Sending};
use e2e::process::until;
use serde_json::{Value, json};

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);
/// How many pods are made at once.
const BATCH: usize = 50;
const WAITING: &str = "istio_cni_repair_waiting_pods";

fn number(name: &str, usual: usize) -> Result<usize> {
    std::env::var(name).map_or(Ok(usual), |text| text.parse().with_context(|| format!("{name} is no number")))
}

fn pod(number: usize, node: usize) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("web-{number}"), "namespace": "default", "labels": {"app": "web"},
            "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {
            "nodeName": format!("node-{node}"), "terminationGracePeriodSeconds": 0,
            "initContainers": [{"name": "istio-validation", "image": "proxy"}],
            "containers": [{"name": "app", "image": "app"}, {"name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar"]}],
        },
    })
}

/// As a kubelet reports a pod that is held back.
fn held_back(number: usize) -> Value {
    let time = "2026-11-21T00:00:00Z";
    let end = json!({"terminated": {"exitCode": 126, "reason": "Error", "startedAt": time, "finishedAt": time,
        "containerID": format!("containerd://{number}")}});
    json!({"status": {"phase": "Pending", "podIP": "10.1.0.2", "podIPs": [{"ip": "10.1.0.2"}],
        "initContainerStatuses": [{"name": "istio-validation", "image": "proxy", "imageID": "proxy", "ready": false,
            "restartCount": 0, "state": end}]}})
}

/// A counter of the API server, all its series with these labels together.
fn counted(api: &ApiServer, name: &str, labels: &[&str]) -> Result<u64> {
    let text = api.kubectl(&["get", "--raw", "/metrics"])?.stdout;
    let of_name =
        text.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
    let fitting = of_name.filter(|line| labels.iter().all(|label| line.contains(label)));
    let values = fitting.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a counter")]
    Ok(values.sum::<f64>() as u64)
}

/// Requests that only agents make here: to delete and list pods, and to create events. Each agent has one watch beside.
#[derive(Debug)]
struct Calls {
    deletes: u64,
    events: u64,
    lists: u64,
}

impl Calls {
    fn so_far(api: &ApiServer) -> Result<Self> {
        let of = |verb: &str, resource: &str| {
            let (verb, resource) = (format!("verb=\"{verb}\""), format!("resource=\"{resource}\""));
            counted(api, "apiserver_request_total", &[&verb, &resource])
        };
        Ok(Self { deletes: of("DELETE", "pods")?, events: of("POST", "events")?, lists: of("LIST", "pods")? })
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            deletes: self.deletes - before.deletes,
            events: self.events - before.events,
            lists: self.lists - before.lists,
        }
    }
}

/// Asks agents again and again how many pods wait; the most.
fn most_waiting(agents: &[FleetAgent], done: &AtomicBool) -> Result<f64> {
    let mut most = 0.0_f64;
    while !done.load(Ordering::Relaxed) {
        for agent in agents.iter().take(3) {
            most = most.max(agent.metric(WAITING)?.unwrap_or_default());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(most)
}

/// Makes pods on nodes in turn, each held back by its validation.
fn make_pods(api: &ApiServer, from: usize, count: usize, nodes: usize) -> Result<()> {
    let numbers: Vec<usize> = (from..from + count).collect();
    for batch in numbers.chunks(BATCH) {
        let pods = "/api/v1/namespaces/default/pods";
        let made = batch.iter().map(|number| Sending::post(pods, &pod(*number, number % nodes)));
        api.send_all(&made.collect::<Vec<_>>())?;
        let failed = batch
            .iter()
            .map(|number| Sending::merge(&format!("{pods}/web-{number}/status"), &held_back(*number)));
        api.send_all(&failed.collect::<Vec<_>>())?;
    }
    Ok(())
}

fn sum(agents: &[FleetAgent], metric: &str) -> Result<f64> {
    agents.iter().map(|agent| Ok(agent.metric(metric)?.unwrap_or_default())).sum()
}

/// Plays it with so many nodes; one line of figures.
fn play(api: &ApiServer, first: usize, pods: usize, nodes: usize) -> Result<String> {
    let folder = tempfile::Builder::new().prefix(&format!("e2e-{}-scale", std::process::id())).tempdir()?;
    let (before, start, done) = (Calls::so_far(api)?, Instant::now(), AtomicBool::new(false));
    let agents: Vec<FleetAgent> = (0..nodes)
        .map(|node| {
            let name = format!("node-{node}");
            FleetAgent::start(api, &folder.path().join(&name), &name, &[("LOG_OUTPUT_LEVEL", "warn")])
        })
        .collect::<Result<_>>()?;
    let most = thread::scope(|scope| -> Result<f64> {
        let most = scope.spawn(|| most_waiting(&agents, &done));
        let success = "istio_cni_repair_pods_repaired_total{type=\"delete\",result=\"success\"}";
        let made = make_pods(api, first, pods, nodes).and_then(|()| {
            let enough = f64::from(u32::try_from(pods)?);
            until("all pods to be dealt with", LIMIT, &[], || {
                Ok((sum(&agents, success)? >= enough).then_some(()))
            })
        });
        done.store(true, Ordering::Relaxed);
        let most = most.join().map_err(|_| anyhow::anyhow!("the sampler panicked"))?;
        made.and(most)
    })?;
    let took = start.elapsed();
    until("the last event", LIMIT, &[], || {
        Ok((Calls::so_far(api)?.since(&before).events >= pods as u64).then_some(()))
    })?;
    let calls = Calls::so_far(api)?.since(&before);
    let memory = agents.iter().map(FleetAgent::most_memory).collect::<Result<Vec<_>>>()?;
    let memory = memory.into_iter().max().context("an agent")?;
    // One change and one event for each pod. Who has more than the queue holds lists again when half of it is done.
    let lists = nodes + pods / 512;
    ensure!(
        calls.deletes == pods as u64 && calls.events == pods as u64 && calls.lists <= lists as u64,
        "{calls:?}"
    );
    ensure!(most <= 1024.0, "{most}");
    ensure!(memory <= 64 << 10, "an agent took {memory} KiB, more than its manifest gives it");
    let delays = ["sum", "count"]
        .map(|part| sum(&agents, &format!("istio_cni_repair_delay_seconds_{part}{{type=\"delete\"}}")));
    let [sum, count] = delays;
    let all = calls.deletes + calls.events + calls.lists;
    Ok(format!(
        "| {nodes} | {pods} | {:.0} s | {:.3} | {most} | {:.1} MiB | {:.0} ms |",
        took.as_secs_f64(),
        all as f64 / pods as f64,
        memory as f64 / 1024.0,
        sum? / count? * 1000.0
    ))
}

#[test]
fn broken_pods_cost_two_calls_each_and_an_agent_stays_small() -> Result<()> {
    let (pods, nodes) = (number("SCALE_PODS", 200)?, number("SCALE_NODES", 4)?);
    let api = ApiServer::start()?;
    api.create_namespace(NAMESPACE)?;
    api.apply(&MANIFEST.replace("# repair-delete: ", ""))?;
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
