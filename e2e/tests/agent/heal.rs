//! Healing of drift by the real program, on real network namespaces with real rules. Needs root.
//!
//! The drift watch checks once an hour here, so an early repair follows a kernel notification.

use std::hash::RandomState;
use std::path::Path;

use e2e::agent::{CALICO, Node, get, memory_kib};
use e2e::pods::{
    self, Foreign, LIMIT, PodApi, Proc, Sandboxes, THEIRS, flood, hosts, lost_or_added, mesh_pod_of, metric,
    mismatch, redirect, redirect_as, wait, wait_at_least,
};
use netns_apply::Fingerprint;
use redirect_core::options::BackendChoice;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{Background, command, until};
use test_support::sample;

use crate::drift::settle;

const WATCHED: &str = "istio_cni_heal_watched_pods";
const UNWATCHED: &str = "istio_cni_heal_unwatched_pods";
const DELETE_RULE: &str = "iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT";

fn node() -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("DRIFT_WATCH_INTERVAL", "1h");
    node.set("DRIFT_HEAL", "true");
    node
}

fn attempts(reason: &str) -> String {
    format!("istio_cni_heal_attempts_total{{reason=\"{reason}\"}}")
}

fn looks(result: &str) -> String {
    format!("istio_cni_heal_looks_total{{result=\"{result}\"}}")
}

fn state(state: &str) -> String {
    format!("istio_cni_meshed_pods{{state=\"{state}\"}}")
}

fn is(node: &Node, name: &str, value: f64) -> bool {
    metric(node, name) == Some(value)
}

fn uid(number: u8) -> String {
    format!("0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1{number:02x}")
}

/// A pod whose UID is one that cgroups have.
fn pod(name: &str, number: u8, addresses: &[&str]) -> Value {
    mesh_pod_of(&uid(number), name, addresses)
}

/// The namespace of pod 1, redirected, with a process of the pod in it.
fn redirected(sandboxes: &mut Sandboxes, proc: &Proc) -> Namespace {
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    redirect(&web);
    proc.add_of(71, &uid(1), &web.path());
    web
}

/// A kind of pod, and deletions of its redirection.
struct Case {
    addresses: &'static [&'static str],
    annotations: &'static [(&'static str, &'static str)],
    is_native: bool,
    deletions: &'static [&'static str],
}

const CASES: [Case; 4] = [
    Case {
        addresses: &["10.1.0.2"],
        annotations: &[],
        is_native: false,
        deletions: &[DELETE_RULE, "iptables-nft -t nat -F ISTIO_REDIRECT"],
    },
    Case {
        addresses: &["fd00:10::2"],
        annotations: &[],
        is_native: false,
        deletions: &["ip6tables-nft -t nat -F", "nft delete table ip6 nat", "ip -6 addr del ::6/128 dev lo"],
    },
    Case {
        addresses: &["10.1.0.2"],
        annotations: &[("sidecar.istio.io/interceptionMode", "TPROXY")],
        is_native: false,
        deletions: &[
            "ip rule del lookup 133",
            "ip route flush table 133",
            "iptables-nft -t mangle -F ISTIO_TPROXY",
        ],
    },
    Case {
        addresses: &["10.1.0.2"],
        annotations: &[],
        is_native: true,
        deletions: &["nft delete table inet istio-proxy-nat", "nft flush table inet istio-proxy-nat"],
    },
];

impl Case {
    const fn choice(&self) -> BackendChoice {
        if self.is_native { BackendChoice::NativeNft } else { BackendChoice::Auto }
    }

    fn pod(&self, name: &str, number: u8) -> Value {
        let mut pod = pod(name, number, self.addresses);
        for (key, value) in self.annotations {
            pod["metadata"]["annotations"][key] = json!(value);
        }
        pod
    }
}

#[test]
fn what_is_deleted_is_back_and_the_event_says_who_deleted_it() {
    for case in CASES {
        let mut node = node();
        node.set("NATIVE_NFTABLES", if case.is_native { "true" } else { "false" });
        let proc = Proc::new(&mut node);
        let mut sandboxes = Sandboxes::new(&mut node);
        let web = sandboxes.add("cni-web", case.addresses);
        redirect_as(&web, case.annotations, case.choice());
        web.sh(THEIRS).expect("others' rules");
        proc.add_of(71, &uid(1), &web.path());
        let api = PodApi::start(&mut node, vec![case.pod("web", 1)]);
        let agent = node.start_ready();
        wait_at_least(&node, WATCHED, 1.0);
        wait_at_least(&node, &looks("verified"), 1.0);
        let before = web.snapshot().expect("a snapshot");
        for (count, deletion) in (1_u8..).zip(case.deletions) {
            web.sh(deletion).expect("deletes");
            wait_at_least(&node, &attempts("healed"), f64::from(count));
            assert_eq!(lost_or_added(&web, &before), [""; 0], "{deletion}\n{}", node.log());
            assert_eq!(mismatch(&web, case.annotations, case.choice()), None, "{deletion}");
        }
        wait(&node, "the event", || !api.events_about("web").is_empty());
        let event = api.events_about("web").remove(0);
        assert_eq!([&event["reason"], &event["type"]], ["RedirectHealed", "Normal"], "{event}");
        let message = event["message"].as_str().expect("a message");
        assert!(message.contains("in force now and verified"), "{message}");
        let is_routing = case.deletions[0].starts_with("ip ");
        assert!(is_routing || message.contains("rules were changed by "), "{message}");
        assert_eq!(agent.end(), Some(0));
    }
}

/// The kernel frees a network namespace, with all that is in it, when the last reference is gone.
#[test]
fn when_a_pod_ends_nothing_of_its_namespace_is_kept() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let outside = Namespace::empty(Families::V4).expect("a namespace");
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    let stays = sandboxes.add("cni-stays", &["10.1.0.3"]);
    redirect(&web);
    redirect(&stays);
    outside
        .ip_batch(&format!(
            "link add inside type veth peer name outside\nlink set inside netns {}\n",
            web.name()
        ))
        .expect("a wire");
    let pods = vec![pod("web", 1, &["10.1.0.2"]), pod("stays", 2, &["10.1.0.3"])];
    let _api = PodApi::start(&mut node, pods);
    let _agent = node.start_ready();
    wait_at_least(&node, WATCHED, 2.0);
    // Now only the runtime's mount holds it, and the agent's sockets.
    drop(web);
    assert!(outside.sh("ip link show dev outside").is_ok(), "the mount holds it");
    sandboxes.remove("cni-web");
    until("the other end of the wire to go with its namespace", LIMIT, &[], || {
        Ok(outside.sh("ip link show dev outside").is_err().then_some(()))
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", node.log()));
    wait(&node, "one pod to be watched", || is(&node, WATCHED, 1.0));
}

#[test]
fn a_pod_whose_namespace_is_replaced_is_found_again() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let old = sandboxes.add("cni-1", &["10.1.0.2"]);
    redirect(&old);
    let _api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, WATCHED, 1.0);
    let new = sandboxes.add("cni-2", &["10.1.0.2"]);
    redirect(&new);
    proc.add_of(71, &uid(1), &new.path());
    drop(old);
    sandboxes.remove("cni-1");
    wait(&node, "the new one", || {
        // Until it is watched, the kernel does not report changes.
        let _ = new.sh(DELETE_RULE);
        metric(&node, &attempts("healed")).is_some_and(|count| count >= 1.0)
    });
    wait(&node, "all to be as planned", || mismatch(&new, &[], BackendChoice::Auto).is_none());
}

#[test]
fn a_running_pod_that_was_never_redirected_is_healed_and_reported() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let bare = sandboxes.add("cni-bare", &["10.1.0.2"]);
    let good = sandboxes.add("cni-good", &["10.1.0.3"]);
    redirect(&good);
    let pods =
        vec![pod("bare", 1, &["10.1.0.2"]), pod("good", 2, &["10.1.0.3"]), pod("lost", 3, &["10.1.0.4"])];
    let _api = PodApi::start(&mut node, pods);
    let agent = node.start_ready();
    // The namespace's owner is ambiguous.
    wait_at_least(&node, &attempts("no_process"), 1.0);
    let verbose = || get(node.health, "/readyz?verbose").expect("answers");
    let words = "ready\n1 of 3 meshed pods verified: 1 not-redirected, 1 unknown; 1 unwatched\n  shop/bare: ";
    wait(&node, "the node's answer", || verbose().0 == 200 && verbose().1.starts_with(words));
    assert!(is(&node, &state("not-redirected"), 1.0) && is(&node, &state("verified"), 1.0));
    assert_eq!(agent.readyz().expect("answers").1, "ready\n", "only a verbose request gets it");
    proc.add_of(71, &uid(1), &bare.path());
    wait_at_least(&node, &attempts("healed"), 1.0);
    assert_eq!(mismatch(&bare, &[], BackendChoice::Auto), None);
    let words = "ready\n2 of 3 meshed pods verified: 1 unknown; 1 unwatched\nheld";
    wait(&node, "the node's answer", || verbose().0 == 200 && verbose().1.starts_with(words));
    wait(&node, "the gauge", || is(&node, "istio_cni_drifted_pods", 0.0));
}

#[test]
fn what_was_verified_stays_although_annotations_and_settings_say_something_else_now() {
    const PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";
    let mut node = node();
    node.set("DRIFT_WATCH_INTERVAL", "1s");
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    let api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, WATCHED, 1.0);
    let before = web.snapshot().expect("a snapshot");
    api.state().pods[0]["metadata"]["annotations"][PORTS] = json!("3306");
    wait(&node, "the drift watch to report it", || is(&node, "istio_cni_drifted_pods", 1.0));
    pods::wait_rounds(&node, 2.0);
    web.sh(DELETE_RULE).expect("deletes");
    wait_at_least(&node, &attempts("healed"), 1.0);
    pods::wait_rounds(&node, 2.0);
    assert_eq!(lost_or_added(&web, &before), [""; 0], "{}", node.log());
    assert!(is(&node, &attempts("healed"), 1.0) && is(&node, "istio_cni_drifted_pods", 1.0));
}

/// What must not be touched, and why it is not.
#[test]
fn a_namespace_without_proof_of_its_pod_is_not_healed() {
    type Scene = fn(&Proc, &Namespace);
    let scenes: [(&str, Scene); 4] = [
        ("no_process", |_, _| {}),
        ("no_process", |proc, web| proc.add_of(71, &uid(9), &web.path())),
        ("other_pod", |proc, web| {
            proc.add_of(71, &uid(1), &web.path());
            proc.add_of(72, &uid(9), &web.path());
        }),
        ("no_process", |proc, _| proc.add_of(71, &uid(1), &hosts())),
    ];
    for (index, (reason, scene)) in scenes.into_iter().enumerate() {
        let mut node = node();
        let proc = Proc::new(&mut node);
        let mut sandboxes = Sandboxes::new(&mut node);
        // Every namespace has it, also the host's, which is mounted there as well.
        sandboxes.mount("default", &hosts());
        let web = sandboxes.add("cni-web", &["10.1.0.2"]);
        redirect(&web);
        scene(&proc, &web);
        let api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"])]);
        let _agent = node.start_ready();
        wait_at_least(&node, WATCHED, 1.0);
        web.sh("iptables-nft -t nat -F ISTIO_REDIRECT").expect("deletes");
        let after = web.snapshot().expect("a snapshot");
        wait_at_least(&node, &attempts(reason), 2.0);
        assert_eq!(lost_or_added(&web, &after), [""; 0], "{index}: {reason}");
        assert!(is(&node, &attempts("healed"), 0.0), "{index}: {reason}\n{}", node.log());
        // The drift watch reports the state of pods without waiting for its hour.
        wait(&node, "both events", || {
            let events = api.events_about("web");
            let has = |reason: &str| events.iter().any(|event| event["reason"] == reason);
            has("RedirectNotHealed") && has("RedirectDrift")
        });
        assert_eq!(api.events_about("web").len(), 2, "{:?}", api.events_about("web"));
    }
}

/// Also a pod that had no monitor yet when a neighbour took its addresses.
#[test]
fn a_neighbour_that_takes_a_pods_addresses_prevents_no_healing() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    let shop = sandboxes.add("cni-shop", &["10.1.0.3"]);
    redirect(&shop);
    let hostile = sandboxes.add("cni-hostile", &["10.1.0.7"]);
    proc.add_of(79, &uid(9), &hostile.path());
    for address in ["10.1.0.2/32", "10.1.0.3/32"] {
        hostile.add_address("lo", address).expect("adds");
    }
    let before = hostile.snapshot().expect("a snapshot");
    let _api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"]), pod("shop", 2, &["10.1.0.3"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, WATCHED, 1.0);
    wait(&node, "the pod without a process to count", || is(&node, UNWATCHED, 1.0));
    let (_, verbose) = get(node.health, "/readyz?verbose").expect("answers");
    assert!(verbose.contains("1 of 2 meshed pods verified: 1 unknown; 1 unwatched"), "{verbose}");
    web.sh(DELETE_RULE).expect("deletes");
    wait_at_least(&node, &attempts("healed"), 1.0);
    assert_eq!(mismatch(&web, &[], BackendChoice::Auto), None);
    assert_eq!(lost_or_added(&hostile, &before), [""; 0]);
    // As soon as it has a process, and a runtime makes a namespace, it is found.
    proc.add_of(72, &uid(2), &shop.path());
    sandboxes.add("cni-new", &["10.1.0.8"]);
    wait(&node, "the pod to be found", || is(&node, WATCHED, 2.0) && is(&node, UNWATCHED, 0.0));
}

#[test]
fn interfering_rules_stay_and_are_reported() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    let api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, WATCHED, 1.0);
    web.sh("nft 'table ip theirs { chain out { type nat hook output priority -150; meta l4proto tcp redirect to :1; }; }'")
        .expect("adds a table");
    let before = web.snapshot().expect("a snapshot");
    wait_at_least(&node, &attempts("interference"), 1.0);
    wait(&node, "the event", || !api.events_about("web").is_empty());
    assert_eq!(api.events_about("web")[0]["reason"], "RedirectDrift");
    assert_eq!(lost_or_added(&web, &before), [""; 0]);
    web.sh("nft delete table ip theirs").expect("deletes");
    wait(&node, "the node's answer", || is(&node, &state("verified"), 1.0));
}

/// What other programs route before anything that the mesh could: a repair would change nothing, so none is tried.
#[test]
fn a_pod_that_cannot_converge_is_named_and_left_alone_and_hides_no_other() {
    let tproxy = &[("sidecar.istio.io/interceptionMode", "TPROXY")];
    for (rule, words) in [
        ("pref 0 to 10.1.0.1 lookup 200", "the policy rule of priority 0 (table 200)"),
        ("pref 9 fwmark 0x539 prohibit", "the policy rule of priority 9 (prohibit)"),
    ] {
        let mut node = node();
        node.set("DRIFT_WATCH_INTERVAL", "1s");
        let proc = Proc::new(&mut node);
        let mut sandboxes = Sandboxes::new(&mut node);
        let web = sandboxes.add("cni-web", &["10.1.0.2"]);
        redirect_as(&web, tproxy, BackendChoice::Auto);
        proc.add_of(71, &uid(1), &web.path());
        let shop = sandboxes.add("cni-shop", &["10.1.0.3"]);
        redirect(&shop);
        proc.add_of(72, &uid(2), &shop.path());
        settle(&web);
        let mut of_tproxy = pod("web", 1, &["10.1.0.2"]);
        of_tproxy["metadata"]["annotations"][tproxy[0].0] = json!(tproxy[0].1);
        let api = PodApi::start(&mut node, vec![of_tproxy, pod("shop", 2, &["10.1.0.3"])]);
        let agent = node.start_ready();
        wait(&node, "both", || is(&node, &state("verified"), 2.0) && is(&node, WATCHED, 2.0));

        web.sh("ip route add default dev eth0 table 200").expect("adds");
        web.sh(&format!("ip rule add {rule}")).expect("adds");
        let keys = RandomState::new();
        let print = || web.enter(|| Fingerprint::now(&keys)).expect("enters").expect("a fingerprint");
        let (before, all) = (print(), web.snapshot().expect("a snapshot"));
        wait_at_least(&node, &attempts("interference"), 1.0);
        wait(&node, "the event", || !api.events_about("web").is_empty());
        wait(&node, "the state", || is(&node, &state("interference"), 1.0));
        let event = api.events_about("web").remove(0);
        let message = event["message"].as_str().expect("a message");
        assert_eq!(event["reason"], "RedirectDrift");
        let (ready, verbose) = get(node.health, "/readyz?verbose").expect("answers");
        assert_eq!(ready, 200, "a pod makes no node unready: {verbose}");
        for text in [message, &verbose] {
            assert!(text.contains("does not converge: ") && text.contains(words), "{text}");
        }
        // Between the two, a slow machine's agent says how old the oldest check is.
        assert!(verbose.contains("1 of 2 meshed pods verified: 1 interference"), "{verbose}");
        assert!(verbose.contains("\n  shop/web: "), "{verbose}");

        // Every round finds the same, and says and does nothing more; meanwhile others are healed.
        shop.sh(DELETE_RULE).expect("deletes");
        wait_at_least(&node, &attempts("healed"), 1.0);
        pods::wait_rounds(&node, 3.0);
        assert_eq!(print(), before, "not one transaction, policy rule or route\n{}", node.log());
        assert!(web.snapshot().expect("a snapshot").changes_since(&all).is_empty());
        assert_eq!(api.events_about("web").len(), 1, "{}", node.log());
        assert_eq!(node.log().matches("the pod is not redirected as planned: ").count(), 1, "{}", node.log());
        // Once for each round and each change that the kernel reported.
        let rounds = metric(&node, "istio_cni_drift_rounds_total{result=\"complete\"}").expect("a number");
        let checks = metric(&node, &attempts("interference")).expect("a number");
        assert!(checks <= rounds + 4.0, "{checks} of {rounds} rounds\n{}", node.log());
        web.sh(&format!("ip rule del {rule}")).expect("deletes");
        wait(&node, "the pod to be verified again", || is(&node, &state("verified"), 2.0));
        assert_eq!(agent.end(), Some(0));
    }
}

/// What an agent may take for a plan that the default memory limit allows, in KiB: the release build, and a debug build, which takes 90 MiB, and
/// 120 beside other tests.
const MOST_FOR_LARGE: [u64; 2] = [64 * 1024, 136 * 1024];

#[test]
fn a_plan_of_ten_thousand_ports_is_verified_and_healed_within_the_agents_memory() {
    let name = "traffic.sidecar.istio.io/excludeOutboundPorts";
    let ports: Vec<String> = (0..10_000).map(|at| (20_001 + 2 * at).to_string()).collect();
    let ports = ports.join(",");
    let annotations = [(name, ports.as_str())];
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    redirect_as(&web, &annotations, BackendChoice::Auto);
    proc.add_of(71, &uid(1), &web.path());
    let mut large = pod("web", 1, &["10.1.0.2"]);
    large["metadata"]["annotations"][name] = json!(ports);
    let _api = PodApi::start(&mut node, vec![large]);
    let agent = node.start_ready();
    wait_at_least(&node, &looks("verified"), 1.0);
    web.sh("iptables-nft -t nat -F ISTIO_OUTPUT").expect("deletes");
    wait_at_least(&node, &attempts("healed"), 1.0);
    assert_eq!(mismatch(&web, &annotations, BackendChoice::Auto), None);
    wait(&node, "the node's answer", || is(&node, &state("verified"), 1.0));
    let (most, is_release) = (memory_kib(agent.id(), "VmHWM:"), std::env::var_os("INSTALL_CNI").is_some());
    println!("an agent that heals a plan of 10,000 ports: {most} KiB at most");
    assert!(most <= MOST_FOR_LARGE[usize::from(!is_release)], "{most} KiB");
}

/// Istio's plugin leaves an empty legacy table behind; pods that it set up are watched like all others.
#[test]
fn a_pod_with_an_empty_legacy_table_is_verified_and_healed() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    web.sh("iptables-legacy -t nat -L; ip6tables-legacy -t nat -L").expect("creates the tables");
    let _api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, WATCHED, 1.0);
    wait(&node, "the node's answer", || is(&node, &state("verified"), 1.0));
    web.sh("iptables-nft -t nat -F ISTIO_OUTPUT").expect("deletes");
    wait_at_least(&node, &attempts("healed"), 1.0);
    assert_eq!(mismatch(&web, &[], BackendChoice::Auto), None);
}

#[test]
fn a_pod_with_its_own_users_is_monitored_and_healed() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let foreign = Foreign::start();
    let pod_of = Namespace::attach(&foreign.network()).expect("attaches");
    pod_of.ip_batch("link set lo up\n").and_then(|()| pod_of.add_eth0(["10.1.0.2"])).expect("addresses");
    sandboxes.mount("cni-foreign", &pod_of.path());
    redirect(&pod_of);
    proc.add_of(71, &uid(1), &pod_of.path());
    let _api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, WATCHED, 1.0);
    pod_of.sh("nft delete table inet istio-proxy-nat").expect("deletes");
    wait_at_least(&node, &attempts("healed"), 1.0);
    assert_eq!(mismatch(&pod_of, &[], BackendChoice::NativeNft), None);
}

#[test]
fn by_default_nothing_is_healed_or_monitored() {
    let mut node = node();
    node.set("DRIFT_WATCH_INTERVAL", "1s");
    node.set("DRIFT_HEAL", "false");
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    let _api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"])]);
    let _agent = node.start_ready();
    pods::wait_rounds(&node, 2.0);
    web.sh(DELETE_RULE).expect("deletes");
    wait(&node, "the gauge", || is(&node, "istio_cni_drifted_pods", 1.0));
    pods::wait_rounds(&node, 2.0);
    assert!(is(&node, WATCHED, 0.0) && is(&node, &attempts("healed"), 0.0));
    assert!(mismatch(&web, &[], BackendChoice::Auto).is_some());
}

/// What a pod can make the agent read is limited; what the agent can still do, it does.
#[test]
fn a_pod_with_too_many_rules_is_healed_as_far_as_possible_and_reported() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    let api = PodApi::start(&mut node, vec![pod("web", 1, &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &looks("verified"), 1.0);
    let messages = || -> Vec<String> {
        api.events_about("web").iter().map(|event| event["message"].to_string()).collect()
    };
    let said = |words: &str| {
        wait(&node, words, || messages().iter().any(|message| message.contains(words)));
    };
    // No captured packet meets these.
    flood(&web, "filter", "FORWARD");
    web.sh(DELETE_RULE).expect("runs").ok().expect("deletes");
    wait_at_least(&node, &attempts("healed"), 1.0);
    assert_eq!(mismatch(&web, &[], BackendChoice::Auto), None);
    flood(&web, "nat", "ISTIO_OUTPUT");
    wait_at_least(&node, &attempts("cannot-look"), 1.0);
    said("and repair failed: this network namespace has more than ");
    said("bytes of rules, more than the plan");
}

/// What a pod's container may do that is dear to read or to follow. A command line cannot hold it. RULES is [`RULES`] on most machines.
const DEAR: [&str; 3] = [
    "{ echo 'add table ip hostile; add chain ip hostile c { type filter hook prerouting priority -300; }'; \
       echo 'add rule ip hostile c ip saddr vmap {'; \
       seq 0 39999 | awk '{ printf \"192.%d.%d.%d : drop,\\n\", 2 + int($1 / 65536), int($1 / 256) % 256, $1 % 256 }'; \
       echo '}'; } | nft -f -",
    "{ seq 0 999 | awk '{ printf \"route add 172.16.%d.%d/32 dev eth0 table 200\\n\", int($1 / 256), $1 % 256 }'; \
       seq 1 999 | awk '{ printf \"rule add pref %d ipproto tcp dport %d-60000 lookup 200\\n\", $1, $1 }'; } | ip -batch -",
    "seq $RULES | sed 's/.*/-A INPUT -p udp -m udp --dport 1 -m mark --mark & -j DROP/' | \
       { echo '*filter'; cat; echo COMMIT; } | iptables-nft-restore --noflush",
];

const RULES: usize = 100_000;

/// Another program that never stops changing the rules of a namespace.
fn restless(namespace: &Namespace, log: &Path) -> Background {
    const SCRIPT: &str = "nft add table ip restless; while echo 'add chain ip restless c; delete chain ip restless c' | nft -f -; do :; done";
    let command = namespace.command(&command("sh", ["-c", SCRIPT]));
    Background::start("the restless program", &command, log).expect("starts").killed_on_drop()
}

#[test]
fn pods_that_are_dear_to_check_hold_up_no_other_and_not_the_end() {
    let mut node = node();
    node.set("DRIFT_WATCH_INTERVAL", "1s");
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    let mut pods = vec![pod("web", 1, &["10.1.0.2"])];
    let mut hostile = Vec::new();
    for (number, script) in (3_u8..).zip(DEAR.into_iter().chain([""])) {
        let address = format!("10.1.0.{number}");
        let namespace = sandboxes.add(&format!("cni-{number}"), &[&address]);
        redirect(&namespace);
        if !script.is_empty() {
            let rules = sample::crowd(sample::times(RULES / 3, RULES));
            namespace.sh(&format!("RULES={rules}\n{script}")).expect("runs").ok().expect("loads");
        }
        pods.push(pod(&format!("hostile-{number}"), number, &[&address]));
        hostile.push(namespace);
    }
    let _restless = hostile.last().map(|namespace| restless(namespace, &node.path("restless.log")));
    let _api = PodApi::start(&mut node, pods);
    let agent = node.start_ready();
    wait_at_least(&node, WATCHED, 5.0);
    for count in 1..=3_u8 {
        web.sh(DELETE_RULE).expect("runs").ok().expect("deletes");
        wait_at_least(&node, &attempts("healed"), f64::from(count));
        assert_eq!(mismatch(&web, &[], BackendChoice::Auto), None);
    }
    // What is dear is judged all the same, or doubtful by name.
    wait(&node, "two that interfere", || {
        metric(&node, &state("interference")).is_some_and(|count| count >= 2.0)
    });
    assert_eq!(agent.end(), Some(0));
}
