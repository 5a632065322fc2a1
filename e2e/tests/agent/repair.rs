//! The repair controller of the real program: what it does with broken pods, and how it lives with an API server that fails.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::broken::{Api, Asked, Fault, TO_DELETE, TO_LABEL, TO_LIST, TO_TELL, TO_WATCH, Verb};
use e2e::agent::{CALICO, Node};
use e2e::pods::{mesh_pod, metric, wait, wait_at_least};
use serde_json::{Value, json};
use test_support::process::EARLY;

/// A node whose agent does this with broken pods.
fn node(action: &str) -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set(action, "true");
    node
}

const DELETE: &str = "REPAIR_DELETE_PODS";
const LABEL: &str = "REPAIR_LABEL_PODS";
const DONE: [(&str, &str, Asked); 2] = [(DELETE, "delete", TO_DELETE), (LABEL, "label", TO_LABEL)];

/// A pod that is held back by its validation, which has failed this often.
fn broken_pod(name: &str, failures: u32) -> Value {
    let mut pod = mesh_pod(name, &["10.1.0.2"]);
    pod["status"]["phase"] = json!("Pending");
    let end = json!({"terminated": {"exitCode": 126, "reason": "Error", "containerID": format!("containerd://{failures}"), "finishedAt": "2026-11-21T00:00:00Z"}});
    pod["status"]["initContainerStatuses"] =
        json!([{"name": "istio-validation", "restartCount": failures, "state": end}]);
    pod
}

fn recovered(pod: &mut Value) {
    pod["status"]["initContainerStatuses"][0]["state"] =
        json!({"terminated": {"exitCode": 0, "reason": "Completed"}});
}

fn fails_again(pod: &mut Value) {
    pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["containerID"] =
        json!("containerd://again");
}

fn touched(pod: &mut Value) {
    pod["metadata"]["annotations"]["touched"] = json!("yes");
}

fn repaired(kind: &str, result: &str) -> String {
    format!("istio_cni_repair_pods_repaired_total{{type=\"{kind}\",result=\"{result}\"}}")
}

fn attempts(kind: &str, reason: &str) -> String {
    format!("istio_cni_repair_attempts_total{{type=\"{kind}\",reason=\"{reason}\"}}")
}

/// How often it was done, as the metric says.
fn done(node: &Node, kind: &str) -> f64 {
    metric(node, &repaired(kind, "success")).unwrap_or_default()
}

/// Waits until the agent has seen what was put last: it deals with a pod that comes behind.
fn pass_by(node: &Node, api: &Api, kind: &str) {
    let name = format!("marker-{}", api.changes().len());
    let before = done(node, kind);
    api.put(broken_pod(&name, 1));
    wait(node, "the marker to be dealt with", || done(node, kind) > before);
}

#[test]
fn a_broken_pod_is_deleted_once_and_only_as_it_was_seen() {
    let mut node = node(DELETE);
    let api = Api::start(&mut node);
    api.put(broken_pod("web", 1));
    api.put(mesh_pod("sound", &["10.1.0.3"]));
    let _agent = node.start_ready();
    wait_at_least(&node, &repaired("delete", "success"), 1.0);
    wait(&node, "the event", || !api.events_about("web").is_empty());
    let event = api.events_about("web").remove(0);
    let named =
        [&event["reason"], &event["type"], &event["source"]["component"], &event["involvedObject"]["uid"]];
    assert_eq!(named, ["DeleteBrokenPod", "Warning", "cni-repair", "uid-of-web"]);
    let message = event["message"].as_str().expect("a message");
    assert!(message.starts_with("pod detected as broken (") && message.ends_with(", deleted"), "{message}");
    let changes = api.changes_of("web");
    assert_eq!(changes[0].body["preconditions"], json!({"uid": "uid-of-web", "resourceVersion": "101"}));
    // The end of its life is not a reason to delete it again.
    api.change("web", fails_again);
    api.remove("web");
    pass_by(&node, &api, "delete");
    assert_eq!((api.changes_of("web").len(), api.events_about("web").len()), (1, 1));
    assert!(api.changes_of("sound").is_empty());
}

#[test]
fn a_broken_pod_is_labelled_through_its_status_once_for_each_failure() {
    let mut node = node(LABEL);
    node.set("REPAIR_BROKEN_POD_LABEL_KEY", "example.com/broken");
    let api = Api::start(&mut node);
    let mut bare = broken_pod("bare", 1);
    bare["metadata"].as_object_mut().expect("metadata").remove("labels");
    let mut labelled = broken_pod("labelled", 1);
    labelled["metadata"]["labels"]["example.com/broken"] = json!("by another controller");
    for pod in [broken_pod("web", 1), bare, labelled] {
        api.put(pod);
    }
    let _agent = node.start_ready();
    wait_at_least(&node, &repaired("label", "success"), 2.0);
    wait_at_least(&node, &repaired("label", "skip"), 1.0);
    let patch = api.changes_of("web").remove(0);
    assert_eq!(patch.http.path(), "/api/v1/namespaces/shop/pods/web/status");
    assert!(patch.http.head.to_lowercase().contains("\r\ncontent-type: application/json-patch+json\r\n"));
    assert_eq!(patch.body[0], json!({"op": "test", "path": "/metadata/uid", "value": "uid-of-web"}));
    for name in ["web", "bare"] {
        let labels = api.pod(name).expect("the pod")["metadata"]["labels"].clone();
        assert_eq!(labels["example.com/broken"], "true", "{name}");
        wait(&node, "the event", || api.events_about(name).len() == 1);
    }
    assert_eq!(api.pod("web").expect("the pod")["metadata"]["labels"]["app"], "web");
    assert!(api.changes_of("labelled").is_empty() && api.events_about("labelled").is_empty());
    // It fails again, and has the label.
    api.change("web", touched);
    api.change("web", fails_again);
    wait_at_least(&node, &repaired("label", "skip"), 2.0);
    assert_eq!((api.changes_of("web").len(), api.events_about("web").len()), (1, 1));
}

/// A controller that replaces each deleted pod at once, by one that fails at once, while this becomes of the first requests to delete one.
fn replaced_by_pods_that_fail(faults: &[Fault]) {
    let mut node = node(DELETE);
    let api = Api::start(&mut node);
    let replica = |number: usize| {
        let mut pod = broken_pod(&format!("web-{number}"), 1);
        pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "rs", "controller": true}]);
        pod
    };
    (0..3).for_each(|number| api.put(replica(number)));
    api.fail(TO_DELETE, faults);
    let _agent = node.start_ready();
    let mut made = 3;
    let throttled = attempts("delete", "throttled");
    wait(&node, "the limit", || {
        let deleted = api.changes().len();
        while made < 3 + deleted {
            api.put(replica(made));
            made += 1;
        }
        deleted > 3 || metric(&node, &throttled).is_some_and(|count| count >= 3.0)
    });
    let deleted: BTreeSet<String> = api.changes().into_iter().map(|change| change.name).collect();
    assert_eq!(deleted, ["web-0", "web-1", "web-2"].map(String::from).into(), "{}", node.log());
    let event = api.events_about("web-3").remove(0);
    let message = event["message"].as_str().expect("a message");
    assert!(
        message.contains("but it could not be deleted: replacements of deleted pods failed as well, 1 times"),
        "{message}"
    );
}

#[test]
fn replacements_that_fail_at_once_are_not_deleted_at_once() {
    replaced_by_pods_that_fail(&[]);
}

#[test]
fn a_replacement_that_is_seen_before_the_answer_is_not_deleted_at_once() {
    replaced_by_pods_that_fail(&[Fault::DoneAndHang]);
}

#[test]
fn replacements_are_not_deleted_at_once_where_no_deletion_is_answered() {
    replaced_by_pods_that_fail(&[Fault::DoneInSilence; 3]);
}

/// The replacement of a pod that the plugin leaves alone would fail as well.
#[test]
fn a_pod_that_the_plugin_skips_is_neither_deleted_nor_labelled() {
    for (action, kind, _) in DONE {
        let mut node = node(action);
        let api = Api::start(&mut node);
        let mut skipped = broken_pod("skipped", 1);
        skipped["metadata"]["labels"]["sidecar.istio.io/inject"] = json!("false");
        api.put(skipped);
        let _agent = node.start_ready();
        wait_at_least(&node, &attempts(kind, "not_meshed"), 1.0);
        pass_by(&node, &api, kind);
        assert!(api.changes_of("skipped").is_empty(), "{kind}");
        assert_eq!(api.events_about("skipped").len(), 1, "{kind}");
    }
}

/// A pod whose container fails after each repair, with all the pauses between.
#[test]
#[ignore = "takes four minutes: make race"]
fn what_is_given_up_is_said_once() {
    let mut node = node(LABEL);
    let api = Api::start(&mut node);
    api.put(broken_pod("web", 1));
    let _agent = node.start_ready();
    let given_up = "istio_cni_repair_given_up_total{type=\"label\"}";
    let mut failures = 1;
    wait(&node, "the end", || {
        let labelled = api
            .pod("web")
            .is_some_and(|pod| pod["metadata"]["labels"]["cni.istio.io/uninitialized"] != Value::Null);
        if labelled {
            failures += 1;
            api.put(broken_pod("web", failures));
        }
        metric(&node, given_up) == Some(1.0)
    });
    let said = || {
        let events = api.events_about("web");
        events
            .iter()
            .filter(|event| event["message"].as_str().is_some_and(|text| text.contains("given up")))
            .count()
    };
    wait(&node, "the event", || said() == 1);
    api.put(broken_pod("web", failures + 1));
    pass_by(&node, &api, "label");
    assert_eq!((said(), metric(&node, given_up)), (1, Some(1.0)));
}

/// The pod gets the label between the watch and the reading before the action.
#[test]
fn a_label_that_another_client_gives_meanwhile_stays() {
    let mut node = node(LABEL);
    let api = Api::start(&mut node);
    api.put(broken_pod("web", 1));
    let faster = |pod: &mut Value| {
        pod["metadata"]["labels"]["cni.istio.io/uninitialized"] = json!("by another controller");
    };
    api.state().faster = Some(((Verb::Get, "pods"), faster));
    let _agent = node.start_ready();
    wait_at_least(&node, &repaired("label", "skip"), 1.0);
    let label = api.pod("web").expect("the pod")["metadata"]["labels"]["cni.istio.io/uninitialized"].clone();
    assert_eq!(label, "by another controller");
    assert!(api.changes_of("web").is_empty());
}

#[test]
fn a_concurrently_changed_pod_is_handled_in_its_new_state() {
    for (action, kind, asked) in DONE {
        let mut node = node(action);
        let api = Api::start(&mut node);
        api.put(broken_pod("web", 1));
        api.state().faster = Some((asked, touched));
        let _agent = node.start_ready();
        wait_at_least(&node, &repaired(kind, "success"), 1.0);
        assert_eq!(api.changes_of("web").len(), 2, "{kind}");
        assert_eq!(metric(&node, &attempts(kind, "changed")), Some(1.0), "{kind}");
        assert_eq!(metric(&node, &repaired(kind, "fail")), Some(0.0), "{kind}");
    }
}

#[test]
fn a_recovered_or_replaced_pod_stays_as_it_is() {
    for (action, kind, asked) in DONE {
        for (what, faster) in [
            ("recovered", recovered as fn(&mut Value)),
            ("replaced", |pod| {
                pod["metadata"]["uid"] = json!("uid-of-another");
                recovered(pod);
            }),
        ] {
            let mut node = node(action);
            let api = Api::start(&mut node);
            api.put(broken_pod("web", 1));
            api.state().faster = Some((asked, faster));
            let _agent = node.start_ready();
            wait(&node, "the try", || !api.changes_of("web").is_empty());
            pass_by(&node, &api, kind);
            assert_eq!(api.changes_of("web").len(), 1, "{kind} {what}");
            let pod = api.pod("web").expect("the pod");
            assert_eq!(pod["metadata"]["deletionTimestamp"], Value::Null, "{kind} {what}");
            assert_eq!(pod["metadata"]["labels"]["cni.istio.io/uninitialized"], Value::Null, "{kind} {what}");
            assert_eq!(done(&node, kind).to_string(), "1", "the marker's alone: {kind} {what}");
        }
    }
}

#[test]
fn an_api_server_that_fails_delays_and_doubles_nothing() {
    for (action, kind, asked) in DONE {
        let mut node = node(action);
        let api = Api::start(&mut node);
        api.put(broken_pod("web", 1));
        api.fail(asked, &[Fault::Status(500), Fault::Later(1), Fault::Silence]);
        api.fail(TO_LIST, &[Fault::Status(500)]);
        api.fail(TO_WATCH, &[Fault::Later(1), Fault::Silence]);
        let _agent = node.start_ready();
        wait_at_least(&node, &repaired(kind, "success"), 1.0);
        assert_eq!(metric(&node, &attempts(kind, "unanswered")), Some(3.0), "{kind}");
        assert_eq!(metric(&node, &repaired(kind, "fail")), Some(0.0), "nothing of it is the pod's fault");
        wait(&node, "the event", || api.events_about("web").len() == 1);
        let lines = |text: &str| node.log().matches(text).count();
        assert_eq!(lines("cannot repair a broken pod"), 1, "{}", node.log());
        wait(&node, "the end of the outage", || lines("broken pods are repaired again") == 1);
        pass_by(&node, &api, kind);
        assert_eq!(api.events_about("web").len(), 1, "{kind}");
    }
}

#[test]
fn what_was_done_without_a_word_is_not_done_twice() {
    for (action, kind, asked) in DONE {
        let mut node = node(action);
        let api = Api::start(&mut node);
        api.put(broken_pod("web", 1));
        api.fail(asked, &[Fault::DoneInSilence]);
        let _agent = node.start_ready();
        wait(&node, "the try", || !api.changes_of("web").is_empty());
        pass_by(&node, &api, kind);
        // The current pod shows that nothing is left to do.
        let version = api.pod("web").expect("the pod")["metadata"]["resourceVersion"].clone();
        assert_eq!(version, "102", "changed once: {kind}");
    }
}

/// The agent waits five seconds for an answer, then asks again.
#[test]
fn a_late_response_delays_nothing_and_repeats_nothing() {
    for (action, kind, asked) in DONE {
        let mut node = node(action);
        let api = Api::start(&mut node);
        api.put(broken_pod("slow", 1));
        api.fail(asked, &[Fault::Hang, Fault::DoneAndHang]);
        api.fail(TO_LIST, &[Fault::Hang]);
        api.fail(TO_WATCH, &[Fault::Hang]);
        let _agent = node.start_ready();
        // Neither list nor watch nor the first try are answered; the second try is, but its response is lost.
        wait(&node, "two tries", || metric(&node, &attempts(kind, "unanswered")) == Some(2.0));
        pass_by(&node, &api, kind);
        let version = api.pod("slow").expect("the pod")["metadata"]["resourceVersion"].clone();
        assert_eq!((api.changes_of("slow").len(), version), (1, json!("102")), "{kind}\n{}", node.log());
        assert_eq!(metric(&node, &repaired(kind, "fail")), Some(0.0), "{kind}");
        assert!(node.log().contains("did not respond within 5s"), "{}", node.log());
    }
}

#[test]
fn a_rejected_event_delays_no_other_pod_for_long() {
    let mut node = node(LABEL);
    let api = Api::start(&mut node);
    api.fail(TO_TELL, &[Fault::Hang, Fault::Status(500)]);
    for name in ["one", "two", "three"] {
        api.put(broken_pod(name, 1));
    }
    let _agent = node.start_ready();
    wait_at_least(&node, &repaired("label", "success"), 3.0);
    wait_at_least(&node, "istio_cni_events_total{result=\"failed\"}", 2.0);
    wait_at_least(&node, "istio_cni_events_total{result=\"sent\"}", 1.0);
    assert_eq!(api.changes().len(), 3, "the label is not given again for want of an event");
}

#[test]
fn an_agent_that_is_killed_between_change_and_event_does_nothing_twice() {
    for (action, kind, _) in DONE {
        let mut node = node(action);
        let api = Api::start(&mut node);
        api.put(broken_pod("web", 1));
        api.fail(TO_TELL, &[Fault::Hang]);
        let agent = node.start_ready();
        wait(&node, "the event to be begun", || api.state().faults.is_empty());
        agent.kill();
        assert_eq!((api.changes_of("web").len(), api.events_about("web").len()), (1, 0), "{kind}");
        let _agent = node.start_ready();
        pass_by(&node, &api, kind);
        assert_eq!(api.changes_of("web").len(), 1, "{kind}");
        // The event is missing because it was done before this agent came.
        let skipped = if kind == "label" { Some(1.0) } else { None };
        assert_eq!(metric(&node, &repaired(kind, "skip")), skipped, "{kind}");
    }
}

/// The agent respects an API server's Retry-After, for lists and watches too.
#[test]
fn a_retry_after_is_respected() {
    let mut node = node(DELETE);
    let api = Api::start(&mut node);
    api.put(broken_pod("web", 1));
    for asked in [TO_LIST, TO_WATCH, TO_DELETE] {
        api.fail(asked, &[Fault::Later(6)]);
    }
    let start = Instant::now();
    let _agent = node.start_ready();
    wait_at_least(&node, &repaired("delete", "success"), 1.0);
    // The pauses alone, without what the server asks for, are of less than four seconds altogether.
    assert!(start.elapsed() >= Duration::from_secs(12), "{:?}\n{}", start.elapsed(), node.log());
    assert_eq!(api.changes_of("web").len(), 1);
}

/// More pods than the queue holds. The watch of this server never ends, so the agent has to ask for those who did not fit.
#[test]
fn pods_that_did_not_fit_are_asked_for_as_soon_as_there_is_room() {
    let mut node = node(DELETE);
    let api = Api::start(&mut node);
    for number in 0..1100 {
        let mut pod = broken_pod(&format!("web-{number}"), 1);
        // The API server has seconds to answer, and this one writes a list anew for each request: what makes pods large is left out.
        pod["metadata"]["managedFields"] = json!([]);
        pod["metadata"]["annotations"] =
            json!({"sidecar.istio.io/status": pod["metadata"]["annotations"]["sidecar.istio.io/status"]});
        for container in pod["spec"]["containers"].as_array_mut().into_iter().flatten() {
            container["env"] = json!([]);
        }
        api.put(pod);
    }
    let _agent = node.start_ready();
    wait_at_least(&node, "istio_cni_repair_queue_overflows_total", 76.0);
    for number in 0..1000 {
        api.remove(&format!("web-{number}"));
    }
    // Of the hundred that are left, 24 fitted.
    wait_at_least(&node, "istio_cni_repair_waiting_pods", 60.0);
}

/// Takes five minutes, the longest silence of a watch: `make race` runs it.
#[test]
#[ignore = "takes five minutes: make race"]
fn a_silent_watch_is_restarted_and_misses_nothing() {
    let mut node = node(DELETE);
    let api = Api::start(&mut node);
    api.fail(TO_WATCH, &[Fault::SilentWatch]);
    let _agent = node.start_ready();
    wait(&node, "the watch", || api.lists_and_watches().1 == 1);
    api.put(broken_pod("unseen", 1));
    let waited = test_support::process::until("the pod to be seen", Duration::from_secs(900), &[], || {
        Ok((done(&node, "delete") >= 1.0).then_some(()))
    });
    waited.unwrap_or_else(|error| panic!("{error:#}\n{}", node.log()));
    assert_eq!(api.lists_and_watches().0, 1, "it went on from where it was");
    assert_eq!(metric(&node, "istio_cni_watch_restarts_total{watch=\"pods\"}"), Some(1.0));
}

/// The clock of the day jumps by days; what waits, waits by the kernel's monotonic clock.
#[test]
fn a_clock_that_jumps_makes_no_pod_wait_and_none_be_tried_more_often() {
    for jump in ["-3d", "+3d"] {
        let mut node = node(DELETE);
        let set_clock = node.fake_clock();
        let api = Api::start(&mut node);
        api.put(broken_pod("web", 1));
        api.fail(TO_DELETE, &[Fault::Later(3), Fault::Later(3)]);
        let _agent = node.start_ready();
        wait_at_least(&node, &attempts("delete", "unanswered"), 1.0);
        set_clock(jump);
        wait_at_least(&node, &repaired("delete", "success"), 1.0);
        assert_eq!(metric(&node, &attempts("delete", "unanswered")), Some(2.0), "{jump}");
        let waited =
            metric(&node, "istio_cni_repair_delay_seconds_sum{type=\"delete\"}").expect("the metric");
        assert!((4.0..EARLY.as_secs_f64()).contains(&waited), "{jump}: {waited}\n{}", node.log());
        wait(&node, "the event", || !api.events_about("web").is_empty());
        let days: BTreeSet<String> = node
            .log()
            .lines()
            .filter_map(|line| line.split_once('T').map(|(day, _)| day.to_owned()))
            .collect();
        assert!(days.len() > 1, "the clock did jump: {}", node.log());
    }
}

#[test]
fn an_expired_or_broken_watch_misses_nothing() {
    let mut node = node(DELETE);
    let api = Api::start(&mut node);
    let _agent = node.start_ready();
    wait(&node, "the watch", || api.lists_and_watches().1 == 1);
    // The version to go on from is too old.
    api.forget_history();
    api.put(broken_pod("while-unwatched", 1));
    api.forget_history();
    wait_at_least(&node, &repaired("delete", "success"), 1.0);
    // The same, said in the stream.
    let lists = api.lists_and_watches().0;
    assert!(lists >= 2, "{lists}");
    api.fail(TO_WATCH, &[Fault::InStream(410)]);
    api.forget_history();
    wait(&node, "another list", || api.lists_and_watches().0 > lists);
    // Another error in the stream: it goes on where it was.
    wait(&node, "the watch", || api.state().faults.is_empty());
    let lists = api.lists_and_watches().0;
    let watches = api.lists_and_watches().1;
    api.fail(TO_WATCH, &[Fault::InStream(500)]);
    api.set_down(false);
    wait(&node, "the watch after", || api.lists_and_watches().1 >= watches + 2);
    api.put(broken_pod("after-all", 1));
    wait_at_least(&node, &repaired("delete", "success"), 2.0);
    assert_eq!(api.lists_and_watches().0, lists, "the version was good still");
    assert!(
        metric(&node, "istio_cni_watch_restarts_total{watch=\"pods\"}").is_some_and(|count| count >= 3.0)
    );
}

#[test]
fn an_api_server_that_is_away_is_waited_for() {
    let mut node = node(DELETE);
    let api = Api::start(&mut node);
    api.set_down(true);
    let _agent = node.start_ready();
    wait(&node, "the complaint", || node.log().contains("cannot watch the node's pods"));
    api.put(broken_pod("web", 1));
    api.set_down(false);
    wait_at_least(&node, &repaired("delete", "success"), 1.0);
    api.set_down(true);
    api.put(broken_pod("shop", 1));
    api.set_down(false);
    wait_at_least(&node, &repaired("delete", "success"), 2.0);
    assert_eq!((api.changes_of("web").len(), api.changes_of("shop").len()), (1, 1));
    assert!(node.log().contains("watching the node's pods again"), "{}", node.log());
}

#[test]
fn a_missing_right_is_named_in_log_and_event_and_counted() {
    for (action, kind, asked, right) in [
        (DELETE, "delete", TO_DELETE, "the verb delete on pods"),
        (LABEL, "label", TO_LABEL, "the verb patch on pods/status"),
    ] {
        let mut node = node(action);
        let api = Api::start(&mut node);
        api.fail(asked, &[Fault::Status(403), Fault::Status(403)]);
        api.put(broken_pod("web", 1));
        let _agent = node.start_ready();
        wait_at_least(&node, &repaired(kind, "success"), 1.0);
        assert_eq!(metric(&node, &attempts(kind, "refused")), Some(2.0));
        assert_eq!(metric(&node, &repaired(kind, "fail")), Some(2.0));
        wait(&node, "both events", || api.events_about("web").len() == 2);
        let event = api.events_about("web").remove(0);
        let message = event["message"].as_str().expect("a message");
        assert!(message.contains("could not be") && message.contains(right), "{message}");
        assert_eq!(node.log().matches(right).count(), 1, "{}", node.log());
    }
}

#[test]
fn selectors_are_sent_and_checked() {
    let mut node = node(DELETE);
    node.set("REPAIR_LABEL_SELECTORS", "app in (web,shop)");
    node.set("REPAIR_FIELD_SELECTORS", "metadata.namespace!=kube-system");
    node.set("REPAIR_NODE_NAME", "node-1");
    node.set("NODE_NAME", "node-2");
    let api = Api::start(&mut node);
    let _agent = node.start_ready();
    // This server sends all pods, whatever is selected.
    api.put(broken_pod("bank", 1));
    let mut elsewhere = broken_pod("shop", 1);
    elsewhere["spec"]["nodeName"] = json!("node-2");
    api.put(elsewhere);
    api.put(broken_pod("web", 1));
    wait_at_least(&node, &repaired("delete", "success"), 1.0);
    assert!(api.changes_of("bank").is_empty() && api.changes_of("shop").is_empty());
    let requests = [api.done(TO_LIST), api.done(TO_WATCH)].concat();
    assert!(requests.len() >= 2);
    for request in &requests {
        let query = request.http.query();
        for part in [
            "fieldSelector=metadata.namespace%21%3Dkube-system%2Cspec.nodeName%3Dnode-1",
            "labelSelector=app+in+%28web%2Cshop%29",
        ] {
            assert!(query.contains(part), "{query}");
        }
    }
}

#[test]
fn without_an_action_or_a_node_pods_are_not_requested() {
    let cases: [&[(&str, &str)]; 3] =
        [&[], &[(DELETE, "true"), ("REPAIR_ENABLED", "false")], &[(DELETE, "true"), ("NODE_NAME", "")]];
    for env in cases {
        let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
        for (name, value) in env {
            node.set(name, value);
        }
        let api = Api::start(&mut node);
        api.put(broken_pod("web", 1));
        let agent = node.start_ready();
        // Its end asks for the DaemonSet, so all requests before have been made.
        assert_eq!(agent.end(), Some(0));
        assert_eq!((api.lists_and_watches(), api.changes().len()), ((0, 0), 0), "{env:?}");
    }
}
