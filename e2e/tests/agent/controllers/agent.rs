//! The agent's controller, which knows its own node.

use std::fs;
use std::time::{Duration, Instant};

use super::*;
use e2e::agent::CALICO;
use e2e::pods::wait_at_least;

const NAME: &str = "node-1";
const GET: Asked = (Verb::Get, "nodes");
const STATUS: Asked = (Verb::Patch, "nodes/status");
const CONF: &str = "10-calico.conflist";

/// A node whose agent keeps its taint, born with it.
fn born_tainted() -> (Node, Objects) {
    let mut node = Node::new(&[(CONF, CALICO)]);
    for (name, value) in [("NODE_TAINT", "true"), ("TAINT_PROBE", "false"), ("TAINT_AFTER", "1s")] {
        node.set(name, value);
    }
    let api = api(&mut node);
    joins(&api, NAME, true);
    (node, api)
}

fn changes(change: &str, result: &str) -> String {
    format!("istio_cni_node_taint_changes_total{{change=\"{change}\",result=\"{result}\"}}")
}

/// The network configuration goes, and with it the agent's readiness.
fn breaks(node: &Node) {
    fs::remove_file(node.path("net.d").join(CONF)).expect("removes");
}

fn recovers(node: &Node) {
    node.write_conf(CONF, CALICO);
}

fn condition(api: &Objects) -> (String, String) {
    let node = api.object(&path(NAME)).expect("the node");
    let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.into_iter().find(|one| one["type"] == TYPE).unwrap_or_default();
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"))
}

fn wait_condition(node: &Node, api: &Objects, status: &str) {
    wait(node, &format!("the condition to be {status}"), || condition(api).0 == status);
}

/// Pods that tolerate the taint still start, so the node does not wait for itself.
#[test]
fn a_node_whose_plugin_is_not_seen_called_is_tainted_until_it_is() {
    let (mut node, api) = born_tainted();
    node.use_real_plugin();
    node.set("CHAINED_CNI_PLUGIN", "false");
    let agent = node.start();
    agent.wait_not_ready("installed, not seen called");
    wait_condition(&node, &api, "False");
    assert_eq!(condition(&api).1, "AgentNotReady");
    assert_eq!(taints(&api, NAME), [ours()]);
    node.runtime_asks("ADD", "YYY-istio-cni.conf");
    agent.wait_ready();
    wait_condition(&node, &api, "True");
    wait_at_least(&node, &changes("remove", "done"), 1.0);
}

#[test]
fn an_api_server_that_fails_delays_a_change_and_doubles_nothing() {
    let (node, api) = born_tainted();
    api.fail(GET, &[Fault::Status(500)]);
    api.fail(STATUS, &[Fault::Later(1)]);
    api.fail(PATCH, &[Fault::Status(500), Fault::Silence]);
    let _agent = node.start_ready();
    wait_at_least(&node, &changes("remove", "done"), 1.0);
    assert_eq!(count(&node, &changes("remove", "unanswered")).to_string(), "2");
    assert_eq!(count(&node, &changes("condition", "unanswered")).to_string(), "1");
    assert!(taints(&api, NAME).is_empty());
    assert_eq!(condition(&api), ("True".to_owned(), "Verified".to_owned()));
    wait(&node, "the end of the outage", || lines(&node, "taint and condition are kept again") == 1);
    assert_eq!(lines(&node, "cannot keep the node's taint"), 1, "{}", node.log());
    // The same on the way back.
    api.fail(GET, &[Fault::Silence]);
    api.fail(STATUS, &[Fault::Status(500)]);
    api.fail(PATCH, &[Fault::Later(1)]);
    breaks(&node);
    wait_at_least(&node, &changes("add", "done"), 1.0);
    wait_condition(&node, &api, "False");
    assert_eq!(count(&node, &changes("add", "unanswered")).to_string(), "1");
    assert_eq!(taints(&api, NAME), [ours()]);
    assert_eq!(api.requests(PATCH).len(), 5, "{}", node.log());
    wait(&node, "the event", || api.events_about(NAME).len() == 2);
    assert_eq!(api.events_about(NAME), ["NodeFreed", "NodeTainted"]);
}

#[test]
fn a_retry_after_is_respected() {
    let (node, api) = born_tainted();
    for asked in [GET, STATUS, PATCH] {
        api.fail(asked, &[Fault::Later(6)]);
    }
    let _agent = node.start_ready();
    wait_at_least(&node, &changes("remove", "done"), 1.0);
    for asked in [GET, STATUS, PATCH] {
        let pause = pause_after_first(&api, asked);
        assert!(pause >= Duration::from_secs(6), "{asked:?} after {pause:?}\n{}", node.log());
    }
}

#[test]
fn a_server_that_does_not_answer_in_time_is_asked_again_and_nothing_is_done_twice() {
    let (node, api) = born_tainted();
    api.fail(GET, &[Fault::Hang]);
    api.fail(STATUS, &[Fault::Hang, Fault::DoneAndHang]);
    api.fail(PATCH, &[Fault::Hang, Fault::DoneAndHang]);
    let _agent = node.start_ready();
    // What was done in silence is found when the node is read again.
    wait(&node, "the end of the outage", || lines(&node, "taint and condition are kept again") == 1);
    assert!(taints(&api, NAME).is_empty());
    let said = api.requests(STATUS);
    let times = said.iter().filter(|said| said.body["status"]["conditions"][0]["status"] == "True").count();
    assert!(times <= 2 && condition(&api).0 == "True", "{said:?}");
    assert_eq!(api.requests(PATCH).len(), 2, "{}", node.log());
    assert_eq!(count(&node, &changes("remove", "unanswered")).to_string(), "2");
    assert!(node.log().contains("did not respond within 5s"), "{}", node.log());
}

#[test]
fn a_conflict_is_resolved_and_keeps_other_taints() {
    let (node, api) = born_tainted();
    api.fail(STATUS, &[Fault::Status(409)]);
    api.fail(PATCH, &[Fault::Status(409); 3]);
    let _agent = node.start_ready();
    wait_at_least(&node, &changes("remove", "done"), 1.0);
    assert_eq!(count(&node, &changes("remove", "rejected")).to_string(), "0", "{}", node.log());
    assert_eq!(count(&node, &changes("condition", "changed")).to_string(), "1", "{}", node.log());
    assert_eq!(api.requests(PATCH).len(), 4);
    // Another controller's taint comes at the same moment as ours.
    breaks(&node);
    wait_condition(&node, &api, "False");
    wait_tainted(&node, &api, NAME, true);
    recovers(&node);
    wait_condition(&node, &api, "True");
    wait_tainted(&node, &api, NAME, false);
    api.change(&path(NAME), taints_in_front);
    breaks(&node);
    wait_tainted(&node, &api, NAME, true);
    assert_eq!(taints(&api, NAME), [another_controllers(), ours()]);
}

/// The decision was made before the server asked for a pause: after it, the decision differs.
#[test]
fn what_was_decided_before_an_outage_is_not_done_after_it() {
    let (node, api) = born_tainted();
    api.fail(PATCH, &[Fault::Later(6)]);
    let _agent = node.start_ready();
    wait(&node, "the try", || !api.requests(PATCH).is_empty());
    breaks(&node);
    wait_condition(&node, &api, "False");
    assert!(is_tainted(&api, NAME));
    assert_eq!(api.requests(PATCH).len(), 1, "{}", node.log());
    recovers(&node);
    wait_tainted(&node, &api, NAME, false);
}

/// A controller that reads the condition must not be contradicted when a node is freed. A node is tainted without it.
#[test]
fn a_condition_that_cannot_be_written_keeps_a_node_from_being_freed_and_not_from_being_tainted() {
    let (node, api) = born_tainted();
    api.fail_always(STATUS, Fault::Status(500));
    let _agent = node.start_ready();
    wait_at_least(&node, &changes("condition", "unanswered"), 3.0);
    assert!(api.requests(PATCH).is_empty(), "{}", node.log());
    api.recover();
    wait_tainted(&node, &api, NAME, false);
    api.fail_always(STATUS, Fault::Status(500));
    breaks(&node);
    wait_tainted(&node, &api, NAME, true);
    assert_eq!(condition(&api).0, "True", "it could not be written");
    api.recover();
    wait_condition(&node, &api, "False");
    assert_eq!(api.requests(PATCH).len(), 2, "{}", node.log());
}

#[test]
fn a_clock_that_jumps_taints_no_node_early_and_none_late() {
    for jump in ["-3d", "+3d"] {
        let (mut node, api) = born_tainted();
        node.set("TAINT_AFTER", "6s");
        let set_clock = node.fake_clock();
        let agent = node.start_ready();
        wait_tainted(&node, &api, NAME, false);
        let start = Instant::now();
        breaks(&node);
        agent.wait_not_ready("");
        set_clock(jump);
        wait_tainted(&node, &api, NAME, true);
        let patches = api.requests(PATCH);
        assert_eq!(patches.len(), 2, "{jump}\n{}", node.log());
        assert!(patches[1].at - start >= Duration::from_secs(6), "{jump}\n{}", node.log());
        assert!(has_jumped(&node), "{}", node.log());
    }
}

/// Another machine has the agent's node's name: its taint is removed by a patch that tests its owner.
#[test]
fn a_node_replaced_during_a_change_is_read_again() {
    let (node, api) = born_tainted();
    api.fail(STATUS, &[Fault::DoneInSilence]);
    let _agent = node.start_ready();
    wait_tainted(&node, &api, NAME, false);
    api.remove(&path(NAME));
    breaks(&node);
    wait(&node, "the missing node to be noticed", || lines(&node, "the object is gone") >= 1);
    joins(&api, NAME, false);
    wait_tainted(&node, &api, NAME, true);
    wait(&node, "the event", || api.events_about(NAME).last().is_some_and(|reason| reason == "NodeTainted"));
    assert_eq!(api.events_about(NAME), ["NodeFreed", "NodeTainted"]);
}

/// The runtime's environment counts for every pod, so a probe uses it, and is repeated when it changes.
#[test]
fn a_node_is_verified_with_the_current_settings_folder() {
    let (mut node, api) = born_tainted();
    let folder = node.path("settings");
    fs::create_dir(&folder).expect("makes");
    node.set("SETTINGS_DIR", &folder.display().to_string());
    node.set("TAINT_PROBE", "true");
    let _agent = node.start_ready();
    wait_condition(&node, &api, "True");
    let range = folder.join("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR");
    fs::write(&range, "nonsense").expect("writes");
    wait_condition(&node, &api, "False");
    assert_eq!(condition(&api).1, "ProbeFailed", "{}", node.log());
    fs::remove_file(&range).expect("removes");
    wait_condition(&node, &api, "True");
}

/// The agent names what it cannot take back, for the operator.
#[test]
fn what_cannot_be_said_at_the_end_is_logged() {
    for keeps_taint in ["true", "false"] {
        let (mut node, api) = born_tainted();
        node.set("NODE_TAINT", keeps_taint);
        node.set("NODE_CONDITION", "true");
        let agent = node.start_ready();
        wait_condition(&node, &api, "True");
        if keeps_taint == "true" {
            wait_tainted(&node, &api, NAME, false);
        }
        api.remove(AGENTS);
        api.fail_always(STATUS, Fault::Status(500));
        assert_eq!(agent.end(), Some(0));
        let log = node.log();
        assert!(log.contains("the plugin is removed"), "{log}");
        assert!(log.contains("the node's condition cni.istio.io/Ready may stay as it was"), "{log}");
        assert_eq!(log.contains("kubectl taint nodes node-1"), keeps_taint == "true", "{log}");
    }
}
