//! Agents of many nodes on one real API server: what they ask when they start, when nothing happens, for each broken pod, and when the API server was
//! gone. They are tasks of this process, as an agent starts them, without the node's files.
//!
//! `FLEET` lists numbers of agents, `FLEET_IDLE` says for how many seconds nothing happens. `make fleet` plays 10 to 5,000.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use e2e::agent::DIRECTORIES;
use e2e::broken;
use e2e::kube::{ApiServer, Sending};
use install_cni::agent::ApiTasks;
use install_cni::install::plugin_health;
use install_cni::settings::Settings;
use serde_json::json;

use crate::agent_support::{MANIFEST, NAMESPACE};

/// For what must come, however slow the machine.
const LONG: Duration = Duration::from_secs(900);
/// How fast nodes join: 500 a minute.
const JOIN: Duration = Duration::from_millis(120);
/// How many pods break.
const BROKEN: usize = 100;
/// What an idle agent may ask, in requests a second.
const MOST_IDLE: f64 = 0.01;
/// How long it may take until everyone watches again after the API server was gone.
const SPREAD: Duration = Duration::from_secs(60);

fn numbers(name: &str, usual: &str) -> Result<Vec<usize>> {
    let text = std::env::var(name).unwrap_or_else(|_| usual.to_owned());
    text.split_whitespace()
        .map(|number| number.parse().with_context(|| format!("{name}: {number:?}")))
        .collect()
}

/// What agents may ask, by verb and resource. The test itself, and the server, ask other things.
const ASKED: [(&str, &str); 9] = [
    ("GET", "daemonsets"),
    ("WATCH", "daemonsets"),
    ("POST", "serviceaccounts"),
    ("GET", "pods"),
    ("LIST", "pods"),
    ("WATCH", "pods"),
    ("PATCH", "pods"),
    ("POST", "events"),
    ("GET", "nodes"),
];

/// Requests that the API server has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Requests(BTreeMap<(&'static str, &'static str), u64>);

impl Requests {
    fn so_far(api: &ApiServer) -> Result<Self> {
        let metrics = api.metrics()?;
        let count = |(verb, resource)| ((verb, resource), metrics.requests(verb, resource, &[]));
        Ok(Self(ASKED.into_iter().map(count).collect()))
    }

    fn of(&self, verb: &'static str, resource: &'static str) -> u64 {
        self.0[&(verb, resource)]
    }

    fn all(&self) -> u64 {
        self.0.values().sum()
    }

    fn since(&self, before: &Self) -> Self {
        Self(self.0.iter().map(|(of, count)| (*of, count - before.0[of])).collect())
    }
}

/// How many watches of pods are open.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
fn watches(api: &ApiServer) -> Result<u64> {
    let labels = ["resource=\"pods\"", "verb=\"WATCH\"", "scope=\"cluster\""];
    Ok(api.metrics()?.sum("apiserver_longrunning_requests", &labels) as u64)
}

/// Waits until so many watch, but for the few whose watch has just ended as it was asked to; returns the most that came in a second.
async fn wait_watching(api: &ApiServer, agents: usize) -> Result<(Duration, u64)> {
    let (start, mut last, mut most) = (Instant::now(), (Instant::now(), 0), 0);
    loop {
        let open = watches(api).unwrap_or_default();
        let second = last.0.elapsed().as_secs_f64().max(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a count"
        )]
        let rate = (open.saturating_sub(last.1) as f64 / second) as u64;
        (last, most) = ((Instant::now(), open), most.max(rate));
        if open >= (agents - agents / 100) as u64 {
            return Ok((start.elapsed(), most));
        }
        ensure!(start.elapsed() < LONG, "only {open} of {agents} watch");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn settings(api: &ApiServer, account: &Path, node: usize) -> Result<Settings> {
    let mut env: Vec<(String, String)> = [
        ("KUBERNETES_SERVICE_HOST", "127.0.0.1".to_owned()),
        ("KUBERNETES_SERVICE_PORT", api.port().to_string()),
        ("SERVICE_ACCOUNT_DIR", account.display().to_string()),
        ("POD_NAMESPACE", NAMESPACE.to_owned()),
        ("POD_NAME", format!("istio-cni-node-{node}")),
        ("NODE_NAME", format!("node-{node}")),
        ("REPAIR_LABEL_PODS", "true".to_owned()),
        ("PLUGIN_SERVICE_ACCOUNT", "istio-cni-plugin".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    env.extend(
        DIRECTORIES
            .iter()
            .filter(|(name, _)| *name != "SERVICE_ACCOUNT_DIR")
            .map(|(name, part)| ((*name).to_owned(), account.join(part).display().to_string())),
    );
    let (settings, _) =
        Settings::read(&settings_cli::ParsedArgs::default(), &env).map_err(|errors| anyhow!("{errors:?}"))?;
    Ok(settings)
}

/// Breaks pods on nodes in turn, and waits until all have their label and their event; what that took of agents.
async fn break_pods(api: &ApiServer, agents: usize, tag: &str) -> Result<Requests> {
    let path = "/api/v1/namespaces/default/pods";
    let names: Vec<String> = (0..BROKEN).map(|number| format!("{tag}-{number}")).collect();
    let made = names
        .iter()
        .enumerate()
        .map(|(number, name)| Sending::post(path, &broken::pod(name, &format!("node-{}", number % agents))));
    api.send_all(&made.collect::<Vec<_>>())?;
    let before = Requests::so_far(api)?;
    let failed =
        names.iter().map(|name| Sending::merge(&format!("{path}/{name}/status"), &broken::held_back()));
    api.send_all(&failed.collect::<Vec<_>>())?;
    let start = Instant::now();
    loop {
        let taken = Requests::so_far(api)?.since(&before);
        if taken.of("POST", "events") >= BROKEN as u64 {
            return Ok(taken);
        }
        ensure!(start.elapsed() < LONG, "{taken:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Processor time and resident memory of the API server, in seconds and MiB.
fn cost(api: &ApiServer) -> Result<(f64, f64)> {
    let metrics = api.metrics()?;
    let memory = metrics.sum("process_resident_memory_bytes", &[]) / f64::from(1 << 20);
    Ok((metrics.sum("process_cpu_seconds_total", &[]), memory))
}

/// Plays it with so many agents; one line of figures.
async fn play(api: &ApiServer, account: &Path, agents: usize, idle: Duration) -> Result<String> {
    #[expect(clippy::cast_precision_loss, reason = "a count")]
    let each = |count: u64| count as f64 / agents as f64;
    // The plugin's token is bound to its node.
    let nodes = (0..agents).map(|node| {
        let object =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("node-{node}")}});
        Sending::post("/api/v1/nodes", &object)
    });
    api.send_all(&nodes.collect::<Vec<_>>())?;
    let before = Requests::so_far(api)?;
    let cpu = cost(api)?.0;
    let mut fleet = Vec::new();
    for node in 0..agents {
        fleet.push(ApiTasks::start(&settings(api, account, node)?));
        tokio::time::sleep(JOIN).await;
    }
    let (late, _) = wait_watching(api, agents).await?;
    let start = Requests::so_far(api)?.since(&before);
    let start_cpu = cost(api)?.0 - cpu;
    // The DaemonSet, the plugin's token, a try of it, and the list. While the last ones join, the first ones watch again.
    let asked = each(start.all() - start.of("WATCH", "pods")) + 1.0;
    ensure!(asked <= 5.5, "an agent that starts asks too much: {start:?}");

    let (before, cpu) = (Requests::so_far(api)?, cost(api)?.0);
    tokio::time::sleep(idle).await;
    let quiet = Requests::so_far(api)?.since(&before);
    let idle_cpu = (cost(api)?.0 - cpu) / idle.as_secs_f64() * 100.0;
    let rate = each(quiet.all()) / idle.as_secs_f64();
    // Watches that end within a short time are more than the mean.
    // These have no plugin on a node, for which an agent asks as well: in ambient mode for a pod and its namespace.
    let tries = 2.0 / plugin_health::INTERVAL.as_secs_f64();
    ensure!(
        rate + tries <= MOST_IDLE || idle < Duration::from_secs(240),
        "{rate} requests a second: {quiet:?}"
    );
    ensure!(quiet.of("LIST", "pods") == 0 && quiet.of("WATCH", "daemonsets") == 0, "{quiet:?}");

    let repaired = break_pods(api, agents, &format!("a{agents}")).await?;
    // The test itself changes each once.
    let changes = repaired.of("PATCH", "pods") - BROKEN as u64;
    ensure!(repaired.of("GET", "pods") <= BROKEN as u64, "more than one read: {repaired:?}");
    ensure!(changes == BROKEN as u64, "not one change a pod: {repaired:?}");

    api.stop();
    tokio::time::sleep(Duration::from_secs(5)).await;
    api.start_again()?;
    let (back, most) = wait_watching(api, agents).await?;
    let again = Requests::so_far(api)?;
    ensure!(back <= SPREAD * 2, "all watch again after {back:?} only");
    // Evenly, it would be a sixtieth each second.
    ensure!(most <= (agents as u64 / 10).max(20), "{most} of {agents} came back in one second");
    ensure!(each(again.of("LIST", "pods")) <= 1.1, "lists after a restart: {again:?}");
    let memory = cost(api)?.1;
    let missed = break_pods(api, agents, &format!("b{agents}")).await?;
    ensure!(missed.of("POST", "events") == BROKEN as u64, "{missed:?}");
    Ok(format!(
        "| {agents} | {:.0} s, {start_cpu:.0} s | {:.1} | {rate:.4} | {idle_cpu:.1} % | {:.1} | {:.0} s, {most} | {:.2} | {memory:.0} MiB |",
        late.as_secs_f64(),
        asked,
        (repaired.of("GET", "pods") + changes) as f64 / BROKEN as f64,
        back.as_secs_f64(),
        each(again.of("LIST", "pods")),
    ))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::print_stdout, reason = "figures for people")]
async fn a_fleet_asks_little_and_comes_back_spread_out() -> Result<()> {
    let idle = Duration::from_secs(numbers("FLEET_IDLE", "5")?[0] as u64);
    println!(
        "| agents | all watch after the last has started, processor time of the API server | requests to start | idle, requests a second | API server, idle | requests for a broken pod, without its event | all back after, most in a second | lists after a restart | API server |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    );
    for agents in numbers("FLEET", "40")? {
        let api = ApiServer::start()?;
        api.create_namespace(NAMESPACE)?;
        // With a repair that needs no node.
        api.apply(&MANIFEST.replace("# repair-label: ", ""))?;
        let folder = tempfile::tempdir()?;
        std::fs::copy(api.ca_path(), folder.path().join("ca.crt"))?;
        std::fs::write(folder.path().join("token"), api.token(NAMESPACE, "istio-cni")?)?;
        println!("{}", play(&api, folder.path(), agents, idle).await?);
    }
    Ok(())
}
