//! What the agent costs while nothing happens. IDLE_SECONDS says for how long it is watched; deploy/measure-idle.sh does it for ten
//! minutes with the release build.

mod process;

use std::fs;
use std::thread;
use std::time::Duration;

use process::{CALICO, FakeApi, Node, daemon_set, get};

/// Clock ticks per second of `/proc/PID/stat`: the same on every Linux that runs this.
const TICKS: f64 = 100.0;

fn memory_kib(id: u32, what: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("a size");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

fn processor_seconds(id: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).expect("a process");
    let fields: Vec<&str> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number");
    (ticks(11) + ticks(12)) / TICKS
}

#[test]
fn an_idle_agent_costs_next_to_nothing() {
    let seconds = std::env::var("IDLE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let is_release = std::env::var_os("INSTALL_CNI").is_some();
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    let api = FakeApi::start(200, &daemon_set(false));
    api.serve(&mut node);
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
    thread::sleep(Duration::from_secs(2));
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
    // A debug build is larger, and one clock tick is much of a short time.
    assert!(now <= if is_release { 16 * 1024 } else { 32 * 1024 }, "{now} KiB");
    // Nor is a machine as fast as another: the probes may cost twice what they cost above.
    let allowed = (f64::from(seconds) * 0.001).max(0.05) + f64::from(seconds / 5) * probed * 2.0;
    assert!(used <= allowed, "{share} % of a core, {used} s where {allowed} s are allowed");
}
