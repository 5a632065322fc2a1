//! The drift watch of the real program, on real network namespaces with real rules. Needs root.

use std::{
    hash::RandomState,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use e2e::agent::{CALICO, Node, get};
use e2e::pods::{
    self, Foreign, PodApi, Proc, Sandboxes, UID, check, mesh_pod, mesh_pod_of, metric, read_and_unread,
    redirect, redirect_as, redirect_with, wait, wait_at_least, wait_rounds,
};
use netns_apply::Fingerprint;
use redirect_core::options::{BackendChoice, Variant};
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::{Background, prefixed};

const DRIFTED: &str = "istio_cni_drifted_pods";
const DELETE_RULE: &str = "iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT";

/// A node whose agent looks every second.
fn node() -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("DRIFT_WATCH_INTERVAL", "1s");
    node.set("EXCLUDE_NAMESPACES", "kube-system");
    node
}

fn is(node: &Node, name: &str, value: f64) -> bool {
    metric(node, name) == Some(value)
}

#[test]
fn a_deleted_rule_is_drift_until_it_is_restored() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2", "fd00:10::2"]);
    let shop = sandboxes.add("cni-shop", &["10.1.0.3", "fd00:10::3"]);
    redirect(&web);
    redirect(&shop);
    let pods =
        vec![mesh_pod("web", &["10.1.0.2", "fd00:10::2"]), mesh_pod("shop", &["10.1.0.3", "fd00:10::3"])];
    let api = PodApi::start(&mut node, pods);
    let agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 4.0);
    assert!(is(&node, DRIFTED, 0.0) && api.state().gets == 0, "a sound pod is checked once");

    web.sh(DELETE_RULE).expect("deletes");
    wait(&node, "the gauge", || is(&node, DRIFTED, 1.0));
    wait(&node, "the event", || !api.events_about("web").is_empty());
    let event = api.events_about("web").remove(0);
    assert_eq!(
        [&event["reason"], &event["type"], &event["involvedObject"]["uid"], &event["metadata"]["namespace"]],
        ["RedirectDrift", "Warning", "uid-of-web", "shop"]
    );
    let message = event["message"].as_str().expect("a message");
    assert!(message.contains("IPv4") && message.contains("ISTIO_OUTPUT"), "{message}");
    assert_eq!(agent.readyz().expect("answers").0, 200, "readiness is about pods to come");

    wait_rounds(&node, 3.0);
    assert_eq!((api.events_about("web").len(), api.events_about("shop").len()), (1, 0), "said once");
    let lines = node.log().matches("the pod is not redirected as planned: ").count();
    assert_eq!(lines, 1, "{}", node.log());

    redirect(&web);
    wait(&node, "the gauge to go down", || is(&node, DRIFTED, 0.0));
    assert!(
        node.log().contains("shop/web") && node.log().contains("redirected as planned again"),
        "{}",
        node.log()
    );
    assert_eq!(agent.end(), Some(0));
}

/// Waits until the kernel has added the routes of a namespace's IPv6 addresses, which takes as long as it looks for duplicates.
pub(crate) fn settle(namespace: &Namespace) {
    let keys = RandomState::new();
    let take = || namespace.enter(|| Fingerprint::now(&keys)).expect("enters");
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let before = take();
        thread::sleep(Duration::from_millis(2500));
        if take() == before {
            return;
        }
        assert!(Instant::now() < give_up, "routes keep changing");
    }
}

/// How many looks in a row may go by without reading.
const MOST_UNREAD: f64 = 11.0;

#[test]
fn rules_are_read_only_where_something_may_have_changed_and_any_change_is_seen_by_the_next_look() {
    let tproxy = &[("sidecar.istio.io/interceptionMode", "TPROXY")][..];
    for (annotations, change) in [
        (&[][..], DELETE_RULE),
        // The kernel does not count or report changes of such tables.
        (&[][..], "iptables-legacy -t nat -A OUTPUT -p tcp -j REDIRECT --to-ports 1"),
        // No transaction of nf_tables.
        (tproxy, "ip route flush table 133"),
    ] {
        let mut node = node();
        let mut sandboxes = Sandboxes::new(&mut node);
        let web = sandboxes.add("cni-web", &["10.1.0.2", "fd00:10::2"]);
        redirect_as(&web, annotations, BackendChoice::Auto);
        settle(&web);
        let mut pod = mesh_pod("web", &["10.1.0.2", "fd00:10::2"]);
        for (key, value) in annotations {
            pod["metadata"]["annotations"][key] = json!(value);
        }
        let _api = PodApi::start(&mut node, vec![pod]);
        let _agent = node.start_ready();
        wait_at_least(&node, "istio_cni_drift_unread_total", 3.0);
        let (read, unread) = read_and_unread(&node);
        assert!(read <= 1.0 + unread / MOST_UNREAD, "{read} of {}", read + unread);
        web.sh(change).expect("changes");
        let (_, before) = read_and_unread(&node);
        wait(&node, change, || is(&node, DRIFTED, 1.0));
        let (_, after) = read_and_unread(&node);
        // One may have begun before the change.
        assert!(after <= before + 1.0, "{change}: {} looks have missed it", after - before);
    }
}

/// With any earlier rules: changes of such tables are not detectable.
#[test]
fn legacy_rules_are_read_by_every_look() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    redirect_with(&web, BackendChoice::Restore(Some(Variant::Legacy)));
    let _api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 4.0);
    assert!(read_and_unread(&node).1 == 0.0);
    web.sh("iptables-legacy -t nat -D OUTPUT -j ISTIO_OUTPUT").expect("deletes");
    wait(&node, "the gauge", || is(&node, DRIFTED, 1.0));
}

#[test]
fn rules_of_others_that_keep_packets_from_the_proxy_are_drift() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    let shop = sandboxes.add("cni-shop", &["10.1.0.3"]);
    redirect(&web);
    redirect(&shop);
    let api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"]), mesh_pod("shop", &["10.1.0.3"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 2.0);
    shop.sh("iptables-nft -t nat -I OUTPUT 1 -o tun0 -j ACCEPT").expect("is harmless");
    web.sh("nft 'table ip theirs { chain out { type nat hook output priority -150; meta l4proto tcp redirect to :1; }; }'")
        .expect("adds a table");
    wait(&node, "the event", || !api.events_about("web").is_empty());
    let event = api.events_about("web").remove(0);
    let message = event["message"].as_str().expect("a message");
    for words in
        ["table ip theirs, chain out (hook output, priority -150), rule 1", "A container with NET_ADMIN"]
    {
        assert!(message.contains(words), "{words} is not in {message}");
    }
    wait_rounds(&node, 2.0);
    assert!(is(&node, DRIFTED, 1.0) && api.events_about("shop").is_empty(), "{}", node.log());
    web.sh("nft delete table ip theirs").expect("deletes");
    wait(&node, "the gauge to go down", || is(&node, DRIFTED, 0.0));
}

#[test]
fn accepted_rules_are_no_faults_and_hide_none() {
    const OF_POD: &str = "iptables-nft -t nat -I OUTPUT 1 -p tcp -m comment --comment ours -j ACCEPT";
    for of_pods in [true, false] {
        let mut node = node();
        node.set("ACCEPTED_RULES", "table=backup");
        node.set("ACCEPT_RULES_OF_PODS", &of_pods.to_string());
        let mut sandboxes = Sandboxes::new(&mut node);
        let (mut pods, mut namespaces) = (Vec::new(), Vec::new());
        for (number, name) in (2..).zip(["web", "shop", "bare"]) {
            let address = format!("10.1.0.{number}");
            let namespace = sandboxes.add(&format!("cni-{name}"), &[&address]);
            redirect(&namespace);
            let mut pod = mesh_pod(name, &[&address]);
            if name == "web" {
                namespace.sh("nft 'table ip backup { chain out { type nat hook output priority -150; meta l4proto tcp redirect to :1; }; }'")
            } else {
                namespace.sh(OF_POD)
            }
            .expect("adds a rule");
            if name == "shop" {
                pod["metadata"]["annotations"]["cni.istio.io/acceptedRules"] = json!("comment=ours");
            }
            pods.push(pod);
            namespaces.push(namespace);
        }
        let api = PodApi::start(&mut node, pods);
        let agent = node.start_ready();
        let verbose = || get(node.health, "/readyz?verbose").expect("answers").1;
        let (verified, accepted) = if of_pods { (2, 2) } else { (1, 1) };
        // Between the two, a slow machine's agent says how old the oldest check is.
        let words = [
            format!("{verified} of 3 meshed pods verified: {} interference", 3 - verified),
            format!("; {accepted} with accepted rules of other programs\n"),
        ];
        wait(&node, "the node's answer", || {
            let verbose = verbose();
            words.iter().all(|words| verbose.contains(words))
        });
        wait_rounds(&node, 2.0);
        assert!(is(&node, DRIFTED, f64::from(3 - verified)) && api.events_about("web").is_empty());
        assert_eq!(api.events_about("shop").is_empty(), of_pods, "{}", node.log());
        assert_eq!(api.events_about("bare").len(), 1, "{}", node.log());
        let said =
            |words: &str| node.log().lines().any(|line| line.contains("accepted: ") && line.contains(words));
        assert!(said("setting ACCEPTED_RULES") && said("annotation cni.istio.io/acceptedRules") == of_pods);
        // What another rule does to the same packets is judged.
        namespaces[0].sh("iptables-nft -t nat -I OUTPUT 1 -p tcp --dport 9 -j ACCEPT").expect("adds a rule");
        wait(&node, "the event", || !api.events_about("web").is_empty());
        let message = api.events_about("web")[0]["message"].to_string();
        assert!(message.contains("--dport 9") && !message.contains("backup"), "{message}");
        assert_eq!(agent.end(), Some(0));
    }
}

#[test]
fn a_pod_that_drifted_and_went_is_forgotten() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let _bare = sandboxes.add("cni-1", &["10.1.0.2"]);
    let api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait(&node, "the gauge", || is(&node, DRIFTED, 1.0));
    api.state().pods.clear();
    wait(&node, "the gauge to go down", || is(&node, DRIFTED, 0.0));
    assert!(node.log().contains("the pod that had drifted has ended"), "{}", node.log());
}

#[test]
fn pods_outside_the_mesh_are_not_checked() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let good = sandboxes.add("cni-good", &["10.1.0.2"]);
    redirect(&good);
    let _bare = sandboxes.add("cni-bare", &["10.1.0.9"]);
    let other = |name: &str, pointer: &str, value: Value| {
        let mut pod = mesh_pod(name, &["10.1.0.9"]);
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
        pod.pointer_mut(parent).expect("a parent")[key] = value;
        pod
    };
    let pods = vec![
        other("skipped", "/metadata/annotations", json!({"sidecar.istio.io/inject": "false"})),
        other("plain", "/spec/containers", json!([{"name": "app"}])),
        other("excluded", "/metadata/namespace", json!("kube-system")),
        other("host", "/spec/hostNetwork", json!(true)),
        other("starting", "/status/phase", json!("Pending")),
        other("finished", "/status/phase", json!("Succeeded")),
        other("ending", "/metadata/deletionTimestamp", json!("2026-11-21T00:00:00Z")),
        mesh_pod("good", &["10.1.0.2"]),
    ];
    let api = PodApi::start(&mut node, pods);
    let _agent = node.start_ready();
    wait_rounds(&node, 3.0);
    for result in [
        "not-redirected",
        "drifted",
        "interference",
        "changed",
        "namespace-not-found",
        "namespace-ambiguous",
        "cannot-look",
    ] {
        assert!(is(&node, &check(result), 0.0), "{result}\n{}", node.log());
    }
    assert!(metric(&node, &check("verified")).is_some_and(|count| count >= 3.0));
    assert!(api.state().events.is_empty());
    // The same namespace, once a pod is to be redirected there.
    api.state().pods.push(mesh_pod("now", &["10.1.0.9"]));
    wait(&node, "the gauge", || is(&node, DRIFTED, 1.0));
}

#[test]
fn a_pod_that_is_replaced_at_that_moment_is_no_false_alarm() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let _bare = sandboxes.add("cni-1", &["10.1.0.2"]);
    let api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"])]);
    let mut newer = mesh_pod("web", &["10.1.0.2"]);
    newer["metadata"]["uid"] = json!("another");
    api.state().newer.insert("web".into(), newer);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("changed"), 2.0);
    // And one that is being deleted.
    let mut newer = mesh_pod("web", &["10.1.0.2"]);
    newer["metadata"]["deletionTimestamp"] = json!("2026-11-21T00:00:00Z");
    api.state().newer.insert("web".into(), newer);
    wait_at_least(&node, &check("changed"), 4.0);
    assert_eq!((metric(&node, DRIFTED), &*api.state().events), (Some(0.0), &[][..]), "{}", node.log());
    api.state().newer.clear();
    wait(&node, "the gauge", || is(&node, DRIFTED, 1.0));
}

#[test]
fn two_namespaces_with_a_pods_address_are_not_guessed_between() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let good = sandboxes.add("cni-good", &["10.1.0.2"]);
    redirect(&good);
    // Two mounts of one namespace are one namespace.
    sandboxes.mount("cni-again", &good.path());
    let hostile = sandboxes.add("cni-hostile", &["10.1.0.7"]);
    let api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 2.0);
    hostile.add_address("lo", "10.1.0.2/32").expect("adds");
    wait_at_least(&node, &check("namespace-ambiguous"), 3.0);
    assert!(is(&node, DRIFTED, 0.0) && api.state().events.is_empty());
    let log = node.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("cannot determine whether")).collect();
    let [line] = lines[..] else { panic!("{lines:?}\n{log}") };
    assert!(line.contains("cni-again") && line.contains("cni-hostile"), "{line}");
    assert!(line.contains("SYS_PTRACE"), "it says what would decide: {line}");
    let (_, verbose) = get(node.health, "/readyz?verbose").expect("answers");
    assert!(verbose.contains("1 unknown; 1 unwatched"), "{verbose}");
    hostile.ip_batch("addr del 10.1.0.2/32 dev lo\n").expect("deletes");
    wait(&node, "the pod to be determined again", || node.log().contains("the pod can be checked again"));
}

/// Any container with NET_ADMIN can take its neighbours' addresses, but none of their processes.
#[test]
fn a_neighbour_that_takes_a_pods_addresses_hides_no_drift() {
    const NEIGHBOUR: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e109";
    let mut node = node();
    // With which the agent may read processes.
    node.set("REPAIR_REPAIR_PODS", "true");
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2", "fd00:10::2"]);
    redirect(&web);
    let hostile = sandboxes.add("cni-hostile", &["10.1.0.7"]);
    hostile.add_address("lo", "10.1.0.2/32").expect("adds");
    hostile.add_address("lo", "fd00:10::2/128").expect("adds");
    proc.add_of(71, UID, &web.path());
    proc.add_of(72, NEIGHBOUR, &hostile.path());
    let api = PodApi::start(&mut node, vec![mesh_pod_of(UID, "web", &["10.1.0.2", "fd00:10::2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 2.0);
    web.sh(DELETE_RULE).expect("deletes");
    wait(&node, "the event", || !api.events_about("web").is_empty());
    assert!(is(&node, DRIFTED, 1.0) && is(&node, &check("namespace-ambiguous"), 0.0), "{}", node.log());
    redirect(&web);
    wait(&node, "the gauge to go down", || is(&node, DRIFTED, 0.0));
    // A neighbour in whose namespace the pod has a process as well leaves it open.
    proc.add_of(73, UID, &hostile.path());
    wait_at_least(&node, &check("namespace-ambiguous"), 1.0);
    assert!(node.log().contains("processes"), "{}", node.log());
}

#[test]
fn a_namespace_full_of_rules_is_not_read_to_the_end() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    redirect(&web);
    let api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 1.0);
    pods::flood(&web, "nat", "POSTROUTING");
    let said = || node.log().matches("bytes of rules, more than the plan").count();
    wait(&node, "the limit of bytes", || said() > 0);
    let looks = metric(&node, &check("cannot-look")).expect("a number");
    wait_at_least(&node, &check("cannot-look"), looks + 1.0);
    assert!(said() == 1 && api.state().events.is_empty(), "{}", node.log());
    web.sh("iptables-nft -t nat -F POSTROUTING").expect("empties");
    wait(&node, "the pod to be determined again", || node.log().contains("the pod can be checked again"));
}

#[test]
fn a_pod_with_users_of_its_own_is_compared_with_native_rules() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let foreign = Foreign::start();
    let pod = Namespace::attach(&foreign.network()).expect("attaches");
    pod.ip_batch("link set lo up\n").and_then(|()| pod.add_eth0(["10.1.0.2"])).expect("addresses");
    sandboxes.mount("cni-foreign", &pod.path());
    redirect(&pod);
    let api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 2.0);
    pod.sh("nft delete table inet istio-proxy-nat").expect("deletes");
    wait(&node, "the event", || !api.events_about("web").is_empty());
    let message = api.events_about("web")[0]["message"].to_string();
    assert!(message.contains("native tables"), "{message}");
    redirect(&pod);
    wait(&node, "the gauge to go down", || is(&node, DRIFTED, 0.0));
}

#[test]
fn the_hosts_namespace_belongs_to_no_pod() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    sandboxes.mount("default", "/proc/self/ns/net".as_ref());
    let bare = sandboxes.add("cni-1", &["10.1.0.2"]);
    redirect(&bare);
    // Every namespace has this address, also the host's.
    let _api = PodApi::start(&mut node, vec![mesh_pod("web", &["127.0.0.1"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 2.0);
}

fn blind(result: &str) -> String {
    format!("istio_cni_drift_rounds_total{{result=\"{result}\"}}")
}

#[test]
fn what_is_missing_is_said_once_and_shown_and_pods_still_start() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    node.set("MOUNTED_CNI_NETNS_DIR", &sandboxes.path().join("none").display().to_string());
    let api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"])]);
    api.state().refuse = Some(403);
    let agent = node.start();
    agent.wait_not_ready("the plugin cannot read pods");
    wait_at_least(&node, &blind("no_pods"), 2.0);
    let count = |part: &str| {
        node.log().lines().filter(|line| line.contains("\twarn\t") && line.contains(part)).count()
    };
    assert_eq!(count("the agent may not read pods (403)"), 1, "{}", node.log());
    api.state().refuse = None;
    wait_at_least(&node, &blind("no_namespaces"), 2.0);
    assert_eq!(count("MOUNTED_CNI_NETNS_DIR"), 1, "{}", node.log());
    agent.wait_ready();

    let web = sandboxes.add("none", &["10.1.0.2"]);
    drop(sandboxes);
    redirect(&web);
    assert!(is(&node, DRIFTED, 0.0));
    assert_eq!(agent.end(), Some(0));
}

#[test]
fn legacy_rules_are_checked_without_the_programs_of_iptables() {
    let mut node = node();
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    redirect_with(&web, BackendChoice::Restore(Some(Variant::Legacy)));
    let api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2"])]);
    // As in the image: legacy iptables is not there.
    let hide = "mount --bind /dev/null /usr/sbin/xtables-legacy-multi; exec \"$@\"";
    let agent = start_in(&node, &["unshare", "--mount", "sh", "-euc", hide, "sh"]);
    wait_at_least(&node, &check("verified"), 2.0);
    assert!(is(&node, DRIFTED, 0.0) && api.state().events.is_empty(), "{}", agent.log());
    web.sh("iptables-legacy -t nat -F ISTIO_OUTPUT").expect("deletes");
    wait(&node, "the drift to be seen", || is(&node, DRIFTED, 1.0));
    assert!(is(&node, &check("cannot-look"), 0.0), "{}", agent.log());
}

/// The agent, started by another program.
fn start_in(node: &Node, program: &[&str]) -> Background {
    let command: Command = prefixed(program, &node.command(&["--ctrlz_port=0"]));
    Background::start("install-cni", &command, &node.path("log")).expect("starts").killed_on_drop()
}
