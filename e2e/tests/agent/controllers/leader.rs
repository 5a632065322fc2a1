//! The cluster's controller.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;
use e2e::agent::Agent;
use e2e::pods::wait_at_least;

const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/istio-system/leases/istio-taint-lock";
const LEADS: &str = "istio_cni_taint_controller_leader";
const NODES: &str = "istio_cni_taint_controller_nodes";

/// A place for the controller, and its API server.
fn cluster() -> (Node, Objects) {
    let mut node = Node::new(&[]);
    node.set("TAINT_AFTER", "1s");
    let api = api(&mut node);
    (node, api)
}

fn start(node: &Node) -> Agent<'_> {
    node.start_with(&["taint-controller", "--log_output_level=debug"])
}

fn agent_of(node: &str) -> String {
    format!("/api/v1/namespaces/istio-system/pods/agent-{node}")
}

/// The agent's pod on a node.
fn agent(api: &Objects, node: &str, is_ready: bool) {
    let status = if is_ready { "True" } else { "False" };
    api.put(
        &agent_of(node),
        json!({"metadata": {"name": format!("agent-{node}"), "namespace": "istio-system"},
        "spec": {"nodeName": node}, "status": {"conditions": [{"type": "Ready", "status": status}]}}),
    );
}

fn changes(change: &str, result: &str) -> String {
    format!("istio_cni_taint_controller_changes_total{{change=\"{change}\",result=\"{result}\"}}")
}

fn watch_restarts(watch: &str) -> String {
    format!("istio_cni_taint_controller_watch_restarts_total{{watch=\"{watch}\"}}")
}

/// A node joins and is tainted: whatever was put before has been dealt with.
fn pass_by(node: &Node, api: &Objects) {
    let marker = format!("marker-{}", api.state().requests.len());
    joins(api, &marker, false);
    wait_tainted(node, api, &marker, true);
    wait(node, "the marker's event", || !api.events_about(&marker).is_empty());
}

fn says(node: &mut Value, status: &str) {
    node["status"]["conditions"] = json!([{"type": TYPE, "status": status}]);
}

#[test]
fn an_api_server_that_fails_delays_a_change_and_doubles_nothing() {
    let (node, api) = cluster();
    for asked in [
        (Verb::Get, "leases"),
        (Verb::Create, "leases"),
        (Verb::Get, "daemonsets"),
        (Verb::List, "nodes"),
        (Verb::List, "pods"),
        (Verb::Watch, "nodes"),
        (Verb::Watch, "pods"),
        PATCH,
    ] {
        api.fail(asked, &DELAYS);
    }
    joins(&api, "n1", false);
    let _controller = start(&node);
    wait_at_least(&node, &changes("add", "done"), 1.0);
    assert_eq!(count(&node, &changes("add", "unanswered")).to_string(), "3");
    assert_eq!(taints(&api, "n1"), [ours()]);
    wait(&node, "the end of the outage", || lines(&node, "nodes are tainted and freed again") == 1);
    for once in
        ["cannot use Lease", "cannot watch nodes", "cannot watch pods", "cannot change a node's taint,"]
    {
        assert_eq!(lines(&node, once), 1, "{once}\n{}", node.log());
    }
    for watch in ["nodes", "pods"] {
        assert!(count(&node, &watch_restarts(watch)) >= 6.0);
        wait(&node, "the watch", || lines(&node, &format!("watching {watch} again")) == 1);
    }
    let lease_writes = "istio_cni_taint_controller_lease_writes_total{result=\"failed\"}";
    assert_eq!(count(&node, lease_writes).to_string(), "6");
    // The same on the way back.
    api.fail(PATCH, &DELAYS);
    agent(&api, "n1", true);
    wait_at_least(&node, &changes("remove", "done"), 1.0);
    pass_by(&node, &api);
    assert!(taints(&api, "n1").is_empty());
    assert_eq!(api.requests_about(PATCH, "n1").len(), 8, "three that failed and one that did not, twice");
    assert_eq!(api.events_about("n1"), ["NodeTainted", "NodeFreed"]);
}

/// Only a Retry-After explains such a late request: the first pauses are of a second at most. All nodes wait, whichever it was about.
#[test]
fn a_retry_after_is_respected() {
    let (node, api) = cluster();
    let asked = [
        (Verb::Get, "leases"),
        (Verb::List, "nodes"),
        (Verb::List, "pods"),
        (Verb::Watch, "nodes"),
        (Verb::Watch, "pods"),
        PATCH,
    ];
    for asked in asked {
        api.fail(asked, &[Fault::Later(5)]);
    }
    for name in ["n1", "n2", "n3"] {
        joins(&api, name, false);
    }
    let _controller = start(&node);
    wait_at_least(&node, &changes("add", "done"), 3.0);
    wait(&node, "both watches", || {
        ["nodes", "pods"].iter().all(|what| api.requests((Verb::Watch, what)).len() >= 2)
    });
    for asked in asked {
        let pause = pause_after_first(&api, asked);
        assert!(pause >= Duration::from_secs(5), "{asked:?} after {pause:?}\n{}", node.log());
    }
    assert_eq!(api.requests(PATCH).len(), 4);
}

/// Five seconds is how long a request may take, and three one about the Lease.
#[test]
fn a_late_response_delays_nothing_and_repeats_nothing() {
    let (node, api) = cluster();
    for asked in
        [(Verb::Get, "leases"), (Verb::Get, "daemonsets"), (Verb::List, "nodes"), (Verb::Watch, "pods")]
    {
        api.fail(asked, &[Fault::Hang]);
    }
    // It was written, but the response was lost: the writer finds its own name there.
    api.fail((Verb::Create, "leases"), &[Fault::DoneAndHang]);
    api.fail(PATCH, &[Fault::Hang, Fault::DoneAndHang]);
    joins(&api, "n1", false);
    let _controller = start(&node);
    wait_at_least(&node, &changes("add", "unanswered"), 2.0);
    pass_by(&node, &api);
    assert_eq!(api.requests_about(PATCH, "n1").len(), 2, "{}", node.log());
    assert_eq!(taints(&api, "n1"), [ours()]);
    assert_eq!(count(&node, &changes("add", "done")).to_string(), "1", "the marker's alone");
    assert!(node.log().contains("did not respond within 5s"), "{}", node.log());
    assert!(node.log().contains("did not respond within 3s"), "{}", node.log());
    assert_eq!(lines(&node, "does not lead any more"), 0, "{}", node.log());
}

/// How long a node waited for its change does not depend on how long the API server takes to write down what is said of it.
#[test]
fn an_event_that_is_not_taken_delays_nothing_that_is_counted() {
    let (node, api) = cluster();
    api.fail((Verb::Create, "events"), &[Fault::Hang]);
    joins(&api, "n1", false);
    let _controller = start(&node);
    wait_at_least(&node, "istio_cni_taint_controller_events_total{result=\"failed\"}", 1.0);
    assert_eq!(count(&node, &changes("add", "done")).to_string(), "1");
    let delay = count(&node, "istio_cni_taint_controller_delay_seconds_sum");
    assert!(delay < 5.0, "{delay} s, and five is how long a request may take\n{}", node.log());
}

#[test]
fn an_expired_watch_misses_nothing() {
    let (node, api) = cluster();
    for name in ["n1", "n2"] {
        joins(&api, name, false);
        agent(&api, name, true);
    }
    let _controller = start(&node);
    wait_at_least(&node, NODES, 2.0);
    wait(&node, "the watches", || {
        ["nodes", "pods"].iter().all(|what| !api.requests((Verb::Watch, what)).is_empty())
    });
    // Changes during a broken watch cannot be watched later.
    api.forget_history();
    api.remove(&agent_of("n1"));
    api.forget_history();
    wait_tainted(&node, &api, "n1", true);
    assert!(count(&node, &watch_restarts("pods")) >= 1.0);
    // The same, said in the stream; a node that was not there joins without its agent.
    for what in ["nodes", "pods"] {
        api.fail((Verb::Watch, what), &[Fault::InStream(410)]);
    }
    api.end_watches();
    joins(&api, "n3", false);
    wait_tainted(&node, &api, "n3", true);
    agent(&api, "n3", true);
    wait_tainted(&node, &api, "n3", false);
    pass_by(&node, &api);
    assert!(taints(&api, "n2").is_empty() && api.requests_about(PATCH, "n2").is_empty());
    assert_eq!(api.requests_about(PATCH, "n1").len(), 1);
    assert!(count(&node, &watch_restarts("nodes")) >= 2.0);
}

/// A leader's stale pods do not count for a node that joined while their watch was broken.
#[test]
fn a_leader_without_pods_frees_nothing_and_taints_new_nodes() {
    let (node, api) = cluster();
    joins(&api, "n1", false);
    agent(&api, "n1", true);
    let _controller = start(&node);
    wait_at_least(&node, NODES, 1.0);
    wait(&node, "the watch", || !api.requests((Verb::Watch, "pods")).is_empty());
    for verb in [Verb::Watch, Verb::List] {
        api.fail_always((verb, "pods"), Fault::Status(500));
    }
    api.end_watches();
    wait_at_least(&node, &watch_restarts("pods"), 1.0);
    // Another machine of that name, which is born tainted; the agent of the one before is gone with it.
    api.remove(&path("n1"));
    api.remove(&agent_of("n1"));
    joins(&api, "n1", true);
    pass_by(&node, &api);
    assert!(api.requests_about(PATCH, "n1").is_empty(), "{}", node.log());
    api.recover();
    wait(&node, "pods to be seen", || lines(&node, "watching pods again") == 1);
    pass_by(&node, &api);
    assert!(api.requests_about(PATCH, "n1").is_empty(), "{}", node.log());
    agent(&api, "n1", true);
    wait_tainted(&node, &api, "n1", false);
}

#[test]
fn a_conflict_is_resolved_and_keeps_other_taints() {
    let (node, api) = cluster();
    let _controller = start(&node);
    wait_at_least(&node, LEADS, 1.0);
    // Another controller taints the node at the same moment.
    api.state().faster = Some((PATCH, taints_in_front));
    joins(&api, "n1", false);
    wait_at_least(&node, &changes("add", "done"), 1.0);
    assert_eq!(taints(&api, "n1"), [another_controllers(), ours()]);
    api.state().faster =
        Some((PATCH, |node| node["spec"]["taints"] = json!([ours(), another_controllers()])));
    agent(&api, "n1", true);
    wait_at_least(&node, &changes("remove", "done"), 1.0);
    assert_eq!(taints(&api, "n1"), [another_controllers()]);
    assert_eq!(api.requests_about(PATCH, "n1").len(), 4);
    // Conflicts about ignored fields, such as heartbeats.
    api.fail(PATCH, &[Fault::Status(409); 3]);
    joins(&api, "n2", false);
    wait_tainted(&node, &api, "n2", true);
    assert_eq!(api.requests_about(PATCH, "n2").len(), 4);
    pass_by(&node, &api);
    for result in ["changed", "rejected", "unanswered"] {
        assert_eq!(count(&node, &changes("add", result)).to_string(), "0", "{result}\n{}", node.log());
    }
    // One conflict after the other is a matter of its own: it is counted, and tried again with pauses.
    api.fail(PATCH, &[Fault::Status(409); 8]);
    joins(&api, "n3", false);
    wait_tainted(&node, &api, "n3", true);
    assert!(count(&node, &changes("add", "changed")) >= 1.0);
    pass_by(&node, &api);
    assert_eq!(api.requests_about(PATCH, "n3").len(), 9);
    assert_eq!(api.events_about("n3"), ["NodeTainted"]);
}

#[test]
fn a_node_whose_agent_objects_in_the_moment_of_a_conflict_is_not_freed() {
    let (node, api) = cluster();
    joins(&api, "n1", true);
    api.state().faster = Some((PATCH, |node| {
        taints_in_front(node);
        says(node, "False");
    }));
    agent(&api, "n1", true);
    let _controller = start(&node);
    wait(&node, "the try", || !api.requests_about(PATCH, "n1").is_empty());
    pass_by(&node, &api);
    assert_eq!(taints(&api, "n1"), [another_controllers(), ours()], "{}", node.log());
    assert_eq!(api.requests_about(PATCH, "n1").len(), 1);
    api.change(&path("n1"), |node| says(node, "True"));
    wait_tainted(&node, &api, "n1", false);
}

/// A Lease that another replica holds.
fn held_by(holder: &str, seconds: u64, renewed: &str) -> Value {
    json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "istio-taint-lock", "namespace": "istio-system"},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": seconds, "renewTime": renewed, "acquireTime": renewed, "leaseTransitions": 3}})
}

/// Waits for so many further reads of the Lease.
fn wait_looks(node: &Node, api: &Objects, more: usize) {
    let reads = || api.requests((Verb::Get, "leases")).len();
    let before = reads();
    wait(node, "reads of the Lease", || reads() >= before + more);
}

#[test]
fn a_leader_that_lost_its_lease_stops() {
    let (node, api) = cluster();
    let _controller = start(&node);
    wait_at_least(&node, LEADS, 1.0);
    pass_by(&node, &api);
    let patches = api.requests(PATCH).len();
    api.put(LEASE, held_by("another", 60, "2026-11-21T00:00:00.000000Z"));
    wait(&node, "the end of the lead", || count(&node, LEADS) == 0.0);
    assert_eq!(lines(&node, "does not lead any more"), 1);
    joins(&api, "n1", false);
    joins(&api, "n2", true);
    agent(&api, "n2", true);
    wait_looks(&node, &api, 4);
    assert_eq!(api.requests(PATCH).len(), patches, "{}", node.log());
    assert_eq!(api.object(LEASE).expect("the Lease")["spec"]["holderIdentity"], "another");
    // The other one steps down.
    api.change(LEASE, |lease| lease["spec"]["holderIdentity"] = json!(""));
    wait_tainted(&node, &api, "n1", true);
    wait_tainted(&node, &api, "n2", false);
    let lease = api.object(LEASE).expect("the Lease");
    assert_eq!(
        (&lease["spec"]["holderIdentity"], &lease["spec"]["leaseTransitions"]),
        (&json!("istio-cni-node-x"), &json!(4))
    );
    assert_eq!(
        count(&node, "istio_cni_taint_controller_lease_writes_total{result=\"conflict\"}").to_string(),
        "0"
    );
}

#[test]
fn a_leader_that_cannot_renew_its_lease_stops_and_leads_again_when_it_can() {
    for fault in [Fault::Status(500), Fault::Hang, Fault::Later(1)] {
        let (node, api) = cluster();
        let _controller = start(&node);
        wait_at_least(&node, LEADS, 1.0);
        pass_by(&node, &api);
        let patches = api.requests(PATCH).len();
        api.fail_always((Verb::Update, "leases"), fault);
        wait(&node, "the end of the lead", || count(&node, LEADS) == 0.0);
        joins(&api, "n1", false);
        wait_looks(&node, &api, 3);
        assert_eq!(api.requests(PATCH).len(), patches, "{fault:?}\n{}", node.log());
        api.recover();
        wait_tainted(&node, &api, "n1", true);
        wait(&node, "the lead", || count(&node, LEADS) == 1.0);
        assert_eq!(lines(&node, "the Lease can be used again"), 1, "{}", node.log());
    }
}

#[test]
fn two_concurrent_writers_of_the_lease_leave_one_leader() {
    let (node, api) = cluster();
    let _controller = start(&node);
    wait_at_least(&node, LEADS, 1.0);
    api.fail((Verb::Update, "leases"), &[Fault::Status(409)]);
    wait_at_least(&node, "istio_cni_taint_controller_lease_writes_total{result=\"conflict\"}", 1.0);
    wait_at_least(&node, LEADS, 1.0);
    pass_by(&node, &api);
}

/// What a Lease says of the time is another machine's clock: only whether it changes counts.
#[test]
fn the_clocks_of_two_replicas_need_not_agree() {
    let updates = |api: &Objects| api.requests((Verb::Update, "leases"));
    // Renewed years ago, it seems, and held.
    let (node, api) = cluster();
    api.put(LEASE, held_by("another", 600, "2020-01-01T00:00:00.000000Z"));
    let controller = start(&node);
    wait_looks(&node, &api, 3);
    assert!(updates(&api).is_empty(), "{}", node.log());
    drop(controller);
    // Renewed in years to come, it seems, and silent.
    let (node, api) = cluster();
    let start_of_silence = Instant::now();
    api.put(LEASE, held_by("another", 4, "2050-01-01T00:00:00.000000Z"));
    let _controller = start(&node);
    wait_at_least(&node, LEADS, 1.0);
    assert!(updates(&api)[0].at - start_of_silence >= Duration::from_secs(4));
}

#[test]
fn a_jumping_clock_taints_neither_early_nor_late() {
    for jump in ["-3d", "+3d"] {
        let (mut node, api) = cluster();
        node.set("TAINT_AFTER", "6s");
        let set_clock = node.fake_clock();
        joins(&api, "n1", false);
        agent(&api, "n1", true);
        let _controller = start(&node);
        wait_at_least(&node, NODES, 1.0);
        pass_by(&node, &api);
        let start = Instant::now();
        agent(&api, "n1", false);
        wait_at_least(&node, "istio_cni_taint_controller_queue_nodes", 1.0);
        set_clock(jump);
        wait_tainted(&node, &api, "n1", true);
        let patches = api.requests_about(PATCH, "n1");
        assert_eq!(patches.len(), 1, "{jump}");
        assert!(patches[0].at - start >= Duration::from_secs(6), "{jump}\n{}", node.log());
        wait_looks(&node, &api, 2);
        assert!(has_jumped(&node), "{}", node.log());
        assert_eq!(lines(&node, "does not lead any more"), 0, "{jump}\n{}", node.log());
    }
}

#[test]
fn a_config_map_is_requested_until_the_server_responds() {
    let (mut node, api) = cluster();
    node.set("TAINT_CONFIGMAP_NAME", "selectors");
    node.set("TAINT_CONFIGMAP_NAMESPACE", "istio-system");
    let map = json!({"metadata": {"name": "selectors"}, "data": {"x": "- {name: a, selector: 'k8s-app=istio-cni-node', namespace: istio-system}"}});
    api.put("/api/v1/namespaces/istio-system/configmaps/selectors", map);
    let asked = (Verb::Get, "configmaps");
    api.fail(asked, &[Fault::Later(5), Fault::Status(500), Fault::Silence, Fault::Hang]);
    joins(&api, "n1", false);
    let _controller = start(&node);
    wait_tainted(&node, &api, "n1", true);
    assert!(pause_after_first(&api, asked) >= Duration::from_secs(5));
    let answered = api.requests(asked)[4].at;
    assert!(api.requests((Verb::Get, "leases"))[0].at >= answered, "{}", node.log());
    assert_eq!(lines(&node, "cannot read ConfigMap"), 4, "{}", node.log());
}

/// While an API server starts it may refuse what it allows a second later, and an object that is replaced is gone for a moment.
#[test]
fn one_odd_answer_about_the_agents_daemon_set_is_not_believed() {
    let (node, api) = cluster();
    api.change(AGENTS, |set| set["spec"]["template"]["spec"]["nodeSelector"] = json!({"agents": "yes"}));
    let selected =
        |name: &str| api.change(&path(name), |node| node["metadata"]["labels"]["agents"] = json!("yes"));
    let _controller = start(&node);
    wait_at_least(&node, LEADS, 1.0);
    wait(&node, "the first look", || !api.requests((Verb::Get, "daemonsets")).is_empty());
    joins(&api, "n1", false);
    joins(&api, "n2", true);
    selected("n2");
    wait_at_least(&node, NODES, 2.0);
    api.fail((Verb::Get, "daemonsets"), &[Fault::Status(403), Fault::Status(404)]);
    let reads = || api.requests((Verb::Get, "daemonsets")).len();
    let before = reads();
    wait(&node, "three looks", || reads() >= before + 3);
    joins(&api, "n3", false);
    selected("n3");
    wait_tainted(&node, &api, "n3", true);
    for untouched in ["n1", "n2"] {
        assert!(api.requests_about(PATCH, untouched).is_empty(), "{untouched}\n{}", node.log());
    }
    // A repeated report is true: the agents are gone.
    api.remove(AGENTS);
    wait_tainted(&node, &api, "n2", false);
    wait_tainted(&node, &api, "n3", false);
    assert!(api.requests_about(PATCH, "n1").is_empty());
}
