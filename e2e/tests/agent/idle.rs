//! What the agent costs while nothing happens, on a node with 250 pods. IDLE_SECONDS says for how long it is watched;
//! deploy/measure-idle.sh does it for ten minutes with the release build. Where nobody says, the pods whose namespaces are redirected are fewer.

use std::fs;
use std::thread;
use std::time::Duration;

use e2e::agent::{Agent, CALICO, Node, get, memory_kib};
use e2e::pods::{self, PodApi, Sandboxes, check, mesh_pod, metric, read_and_unread, redirect, wait_rounds};
use serde_json::Value;
use test_support::netns::Namespace;
use test_support::process::{SHORT, until};
use test_support::sample;

/// Clock ticks per second of `/proc/PID/stat`: the same on every Linux that runs this.
const TICKS: f64 = 100.0;
/// How many pods the node has; and where each has a network namespace, which takes more time than all else, if not all are asked for.
const PODS: u8 = 250;
const FEW_PODS: u8 = 80;
/// How many pods the agent asks for at once.
const PAGE: usize = 50;
/// What an agent of such a node may have resident, in KiB: the release build, and a debug build, which is larger.
const MOST: [u64; 2] = [12 * 1024, 48 * 1024];

fn seconds() -> u32 {
    sample::number("IDLE_SECONDS", 20)
}

fn is_release() -> bool {
    std::env::var_os("INSTALL_CNI").is_some()
}

fn most() -> u64 {
    MOST[usize::from(!is_release())]
}

/// How many pods are redirected.
fn redirected_pods() -> u8 {
    if sample::is_whole() || std::env::var_os("IDLE_SECONDS").is_some() { PODS } else { FEW_PODS }
}

/// The node's pods as the API server has them.
fn all_pods(number: u8) -> Vec<Value> {
    let address = |count: u8| [format!("10.1.0.{count}"), format!("fd00:10::{count:x}")];
    let pod = |count: u8| {
        let [v4, v6] = address(count);
        mesh_pod(&format!("web-{count}"), &[&v4, &v6])
    };
    (1..=number).map(pod).collect()
}

fn processor_seconds(id: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).expect("a process");
    let fields: Vec<&str> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number");
    (ticks(11) + ticks(12)) / TICKS
}

/// Waits until the agent has done what it had to: it uses no tick of a processor, several times in a row.
fn await_rest(agent: &Agent<'_>) {
    let (mut quiet, mut used) = (0, processor_seconds(agent.id()));
    until("rest", SHORT, &[], || {
        let now = processor_seconds(agent.id());
        quiet = if now > used { 0 } else { quiet + 1 };
        used = now;
        Ok((quiet == 15).then_some(()))
    })
    .expect("the agent comes to rest");
}

#[test]
fn an_idle_agent_costs_next_to_nothing() {
    let seconds = seconds();
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    let api = PodApi::start(&mut node, all_pods(PODS));
    let agent = node.start_ready();
    // The kubelet's probes and a scrape are part of idling; let the first of them settle.
    let probe = || {
        assert_eq!(agent.readyz().expect("answers").0, 200);
        assert_eq!(get(node.monitoring, "/metrics").expect("answers").0, 200);
    };
    probe();
    let probed = processor_seconds(agent.id());
    (0..50).for_each(|_| probe());
    let probed = (processor_seconds(agent.id()) - probed) / 50.0;
    await_rest(&agent);
    let (used, resident, passes) = (
        processor_seconds(agent.id()),
        memory_kib(agent.id(), "VmRSS:"),
        agent.metric("istio_cni_passes_total"),
    );
    for _ in 0..seconds / 5 {
        thread::sleep(Duration::from_secs(5));
        probe();
    }
    let used = processor_seconds(agent.id()) - used;
    let now = memory_kib(agent.id(), "VmRSS:");
    let share = used / f64::from(seconds) * 100.0;
    println!(
        "{seconds} s: {resident} KiB resident at first, {now} KiB at the end, {share:.3} % of a core, anonymous {} KiB",
        memory_kib(agent.id(), "RssAnon:")
    );
    assert!(now <= resident + 256, "grew from {resident} to {now} KiB");
    assert_eq!(agent.metric("istio_cni_passes_total"), passes, "it does not poll");
    assert!(now <= most(), "{now} KiB");
    // One clock tick is much of a short time, and no machine is as fast as another: the probes may cost twice what they cost above.
    let allowed = (f64::from(seconds) * 0.001).max(0.05) + f64::from(seconds / 5) * probed * 2.0;
    assert!(used <= allowed, "{share} % of a core, {used} s where {allowed} s are allowed");
    let state = api.state();
    assert_eq!((state.lists, state.gets), (0, 0), "it asks for no pod");
}

/// The pods' network namespaces, redirected.
fn redirected(sandboxes: &mut Sandboxes, pods: &[Value]) -> Vec<Namespace> {
    let one = |pod: &Value| {
        let addresses: Vec<String> = pods::addresses_of(pod).iter().map(ToString::to_string).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        let namespace = sandboxes.add(pod["metadata"]["name"].as_str().expect("a name"), &addresses);
        redirect(&namespace);
        namespace
    };
    pods.iter().map(one).collect()
}

/// A watch that checks 250 pods every five seconds, sixty times as often as needed.
#[test]
fn an_agent_that_watches_for_drift_does_not_grow() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("DRIFT_WATCH_INTERVAL", "5s");
    let mut sandboxes = Sandboxes::new(&mut node);
    let number = redirected_pods();
    let pods = all_pods(number);
    let namespaces = redirected(&mut sandboxes, &pods);
    let api = PodApi::start(&mut node, pods);
    let agent = node.start_ready();
    wait_rounds(&node, 2.0);
    let checks = || metric(&node, &check("verified")).expect("a number");
    let (checked, used, resident) =
        (checks(), processor_seconds(agent.id()), memory_kib(agent.id(), "VmRSS:"));
    // The first thousands of looks fill what the allocator keeps for threads; after that nothing may be added.
    let halves: [u64; 2] = std::array::from_fn(|_| {
        for _ in 0..seconds().div_ceil(20) {
            wait_rounds(&node, 2.0);
        }
        memory_kib(agent.id(), "VmRSS:")
    });
    let used = processor_seconds(agent.id()) - used;
    let [half, now] = halves;
    let looks = checks() - checked;
    let (read, unread) = read_and_unread(&node);
    // Eleven looks in a row may go by without reading.
    let allowed = f64::from(number) + unread / 11.0;
    assert!(
        unread > 0.0 && read <= allowed,
        "the rules of pods were read {read} times in {} looks",
        read + unread
    );
    println!(
        "{looks} looks: {resident} KiB resident at first, {half} KiB after half of them, {now} KiB at the end, {} KiB at most, {:.2} ms of a processor each",
        memory_kib(agent.id(), "VmHWM:"),
        used / looks * 1000.0
    );
    assert!(looks >= f64::from(number) * 3.0, "{looks}\n{}", node.log());
    assert_eq!(metric(&node, "istio_cni_drifted_pods"), Some(0.0), "{}", node.log());
    // Half of a short time is not enough to fill it.
    let grown = if looks > 10_000.0 { now.saturating_sub(half) } else { 0 };
    assert!(grown <= 1024 && now <= resident + 4096, "grew from {resident} and {half} to {now} KiB");
    assert!(now <= most(), "{now} KiB");
    let state = api.state();
    let pages = usize::from(number).div_ceil(PAGE);
    // Of the last list not every page may have been asked for.
    assert!(
        state.pages + pages > state.lists * pages && state.gets == 0,
        "{} pages, {} lists",
        state.pages,
        state.lists
    );
    drop(namespaces);
}

/// An agent that monitors 250 pods without changes, and checks them as often as the documents advise.
#[test]
fn an_agent_that_heals_costs_next_to_nothing_while_nothing_drifts() {
    let seconds = seconds();
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("DRIFT_WATCH_INTERVAL", "5m");
    node.set("DRIFT_HEAL", "true");
    let mut sandboxes = Sandboxes::new(&mut node);
    let number = redirected_pods();
    let pods = all_pods(number);
    let namespaces = redirected(&mut sandboxes, &pods);
    let _api = PodApi::start(&mut node, pods);
    let agent = node.start_ready();
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", agent.id())).expect("a process").count();
    let before = descriptors();
    pods::wait_at_least(&node, "istio_cni_heal_looks_total{result=\"verified\"}", f64::from(number));
    assert_eq!(metric(&node, "istio_cni_heal_watched_pods"), Some(f64::from(number)));
    let each = (descriptors() - before) as f64 / f64::from(number);
    assert!((1.9..2.1).contains(&each), "{each} descriptors for a pod");
    let looks = || metric(&node, &check("verified")).expect("a number");
    // The first check of each pod reads its rules, and a new agent lists the pods several times. What a node at rest costs begins with the first check after that.
    if seconds >= 300 {
        until("the first round", Duration::from_secs(600), &[], || {
            Ok((looks() > f64::from(number)).then_some(()))
        })
        .expect("the pods are checked again");
    }
    let (used, resident) = (processor_seconds(agent.id()), memory_kib(agent.id(), "VmRSS:"));
    let looked = looks();
    thread::sleep(Duration::from_secs(u64::from(seconds)));
    let used = processor_seconds(agent.id()) - used;
    let now = memory_kib(agent.id(), "VmRSS:");
    println!(
        "{seconds} s, {number} pods listened to, {each} descriptors each, {} looks of the drift watch: {resident} KiB resident at first, {now} KiB at the end, {} KiB at most, {:.3} % of a core",
        looks() - looked,
        memory_kib(agent.id(), "VmHWM:"),
        used / f64::from(seconds) * 100.0
    );
    assert!(now <= most(), "{now} KiB");
    assert!(now <= resident + 4096, "grew from {resident} to {now} KiB");
    // Of a short time one look of the drift watch is much, and a debug build is slower.
    if is_release() && seconds >= 300 {
        assert!(used <= f64::from(seconds) * 0.0015, "{used} s");
    }
    drop(namespaces);
}
