use super::*;
use agent_runtime::node::{Taint, TaintEffect};
use proptest::prelude::*;
use serde_json::json;
use std::time::Duration;

const KEY: &str = "cni.istio.io/not-ready";
const TYPE: &str = "cni.istio.io/Ready";
const AFTER: Duration = Duration::from_secs(30);

fn node(name: &str, keys: &[&str], status: &str) -> Node {
    node_of(name, "u", keys, status)
}

fn node_of(name: &str, uid: &str, keys: &[&str], status: &str) -> Node {
    let taints: Vec<Value> = keys.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
    let conditions = if status.is_empty() { json!([]) } else { json!([{"type": TYPE, "status": status}]) };
    let object = json!({"metadata": {"name": name, "uid": uid}, "spec": {"taints": taints}, "status": {"conditions": conditions}});
    Node::of(&object).expect("a node")
}

fn pod(name: &str, node: &str, ready: bool) -> AgentPod {
    AgentPod { name: name.into(), node: node.into(), is_ready: ready }
}

/// By a DaemonSet that wants the node of this name alone.
fn on(generation: i64, node: &str) -> AgentPlacement {
    let named = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]});
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [named]}});
    let pod = json!({"affinity": {"nodeAffinity": required}, "containers": []});
    let spec = json!({"selector": {}, "template": {"spec": pod}});
    let set = json!({"metadata": {"generation": generation}, "spec": spec});
    AgentPlacement::On(serde_json::from_value(set).expect("a DaemonSet"))
}

fn marking() -> NodeMarking {
    let taint = Taint { key: KEY.into(), value: String::new(), effect: TaintEffect::NoSchedule };
    NodeMarking { taint, old_keys: vec!["NodeReadiness".into()], condition_type: TYPE.into(), after: AFTER }
}

/// A model that knows everything: one requirement, and one node that was there from the first.
fn model(first: Node, pods: Vec<AgentPod>) -> Model {
    let mut model = Model::new(marking(), 1);
    model.list_nodes(vec![first]);
    model.list_pods(0, pods);
    model.place(AgentPlacement::Everywhere);
    model
}

#[test]
fn a_node_is_as_its_agent_is() {
    let now = Instant::now();
    let later = TaintAction::Wait(now + AFTER);
    for (taints, status, ready, expected) in [
        // An agent that is ready, by what it says.
        (vec![], "", true, TaintAction::Leave),
        (vec![], "True", true, TaintAction::Leave),
        (vec![KEY], "", true, TaintAction::Free(TaintReason::AgentReady)),
        (vec![KEY], "True", true, TaintAction::Free(TaintReason::AgentReady)),
        (vec!["NodeReadiness"], "True", true, TaintAction::Free(TaintReason::AgentReady)),
        (vec!["other"], "True", true, TaintAction::Leave),
        (vec![KEY], "False", true, TaintAction::Leave),
        (vec![], "False", true, later),
        (vec![KEY], "Unknown", true, TaintAction::Leave),
        (vec![], "Unknown", true, TaintAction::Leave),
        // None that is ready.
        (vec![], "", false, later),
        (vec![], "True", false, later),
        (vec!["NodeReadiness"], "", false, later),
        (vec![KEY], "True", false, TaintAction::Leave),
        (vec![KEY], "", false, TaintAction::Leave),
    ] {
        let mut model = model(node("n", &taints, status), vec![pod("p", "n", ready)]);
        assert_eq!(model.next_action("n", now), expected, "{taints:?} {status} {ready}");
    }
}

#[test]
fn what_lasts_taints_and_what_does_not_does_not() {
    let now = Instant::now();
    let mut model = model(node("n", &[], "True"), vec![pod("p", "n", true)]);
    assert_eq!(model.next_action("n", now), TaintAction::Leave);
    assert_eq!(model.remove_pod(0, "p").as_deref(), Some("n"));
    assert_eq!(model.next_action("n", now), TaintAction::Wait(now + AFTER));
    assert_eq!(model.next_action("n", now + AFTER / 2), TaintAction::Wait(now + AFTER));
    // The next agent came in time.
    assert_eq!(model.put_pod(0, pod("q", "n", true)), "n");
    assert_eq!(model.next_action("n", now + AFTER / 2), TaintAction::Leave);
    model.put_pod(0, pod("q", "n", false));
    let then = now + AFTER;
    assert_eq!(model.next_action("n", then), TaintAction::Wait(then + AFTER));
    assert_eq!(model.next_action("n", then + AFTER), TaintAction::Taint(TaintReason::AgentGone));
    model.put_node(node("n", &[], "False"));
    model.put_pod(0, pod("q", "n", true));
    assert_eq!(model.next_action("n", then + AFTER), TaintAction::Taint(TaintReason::AgentSaysNo));
}

#[test]
fn a_node_that_joins_is_tainted_at_once_and_one_that_was_there_is_not() {
    let now = Instant::now();
    let mut model = model(node("old", &[], ""), vec![]);
    assert_eq!(model.next_action("old", now), TaintAction::Wait(now + AFTER));
    model.put_node(node("new", &[], ""));
    assert_eq!(model.next_action("new", now), TaintAction::Taint(TaintReason::Joined));
    // Another of the same name, and one that joined while the watch was broken.
    model.put_node(node_of("old", "u2", &[], ""));
    assert_eq!(model.next_action("old", now), TaintAction::Taint(TaintReason::Joined));
    model.list_nodes(vec![node_of("old", "u2", &[], ""), node("third", &[], "")]);
    assert_eq!(model.next_action("third", now), TaintAction::Taint(TaintReason::Joined));
    assert_eq!(model.next_action("new", now), TaintAction::Leave, "gone");
    // Born tainted.
    model.put_node(node("born", &[KEY], ""));
    assert_eq!(model.next_action("born", now), TaintAction::Leave);
}

#[test]
fn an_agent_that_frees_a_node_gets_time_to_be_proved_right() {
    let now = Instant::now();
    let mut model = model(node("there", &[], ""), vec![]);
    model.put_node(node("n", &[KEY], ""));
    assert_eq!(model.next_action("n", now), TaintAction::Leave);
    // The node's agent is verified before the kubelet reports that its pod is ready.
    let long_after = now + 10 * AFTER;
    model.put_node(node("n", &[KEY], "True"));
    model.put_node(node("n", &[], "True"));
    assert_eq!(model.next_action("n", long_after), TaintAction::Wait(long_after + AFTER));
    model.put_pod(0, pod("p", "n", true));
    assert_eq!(model.next_action("n", long_after + AFTER), TaintAction::Leave);
}

#[test]
fn nothing_is_decided_before_everything_is_known() {
    let now = Instant::now();
    let marking = NodeMarking { old_keys: Vec::new(), after: Duration::ZERO, ..marking() };
    let mut model = Model::new(marking, 2);
    model.list_nodes(vec![node("n", &[], "")]);
    model.place(AgentPlacement::Everywhere);
    assert_eq!(model.next_action("n", now), TaintAction::Leave);
    model.list_pods(0, vec![pod("p", "n", true)]);
    assert_eq!(model.next_action("n", now), TaintAction::Leave);
    // One of each is needed.
    model.list_pods(1, vec![]);
    assert_eq!(model.next_action("n", now), TaintAction::Taint(TaintReason::AgentGone));
    model.list_pods(1, vec![pod("q", "n", true)]);
    assert_eq!(model.next_action("n", now), TaintAction::Leave);
}

#[test]
fn where_no_agent_is_wanted_nothing_is_tainted_and_where_all_are_gone_nodes_are_freed() {
    let now = Instant::now();
    let mut model = model(node("n", &[], ""), vec![]);
    model.put_node(node("windows", &[], ""));
    model.put_node(node("tainted", &[KEY], ""));
    let on = |generation| on(generation, "n");
    assert!(model.place(on(1)) && model.place(on(2)) && !model.place(on(2)));
    assert_eq!(model.next_action("windows", now), TaintAction::Leave);
    assert_eq!(model.next_action("n", now), TaintAction::Wait(now + AFTER));
    assert_eq!(model.next_action("tainted", now), TaintAction::Leave);
    assert!(model.place(AgentPlacement::NotSaid));
    assert_eq!(
        (model.next_action("n", now + AFTER), model.next_action("tainted", now)),
        (TaintAction::Leave, TaintAction::Leave)
    );
    model.place(AgentPlacement::Nowhere);
    assert_eq!(model.next_action("n", now + AFTER), TaintAction::Leave);
    assert_eq!(model.next_action("tainted", now), TaintAction::Free(TaintReason::AgentsRemoved));
}

#[test]
fn what_was_wrong_before_all_was_well_does_not_count_later() {
    let now = Instant::now();
    let long_after = now + 10 * AFTER;
    // The agent became ready in between, with an unknown state.
    let mut model = model(node("n", &[], "Unknown"), vec![pod("p", "n", false)]);
    assert_eq!(model.next_action("n", now), TaintAction::Wait(now + AFTER));
    model.put_pod(0, pod("p", "n", true));
    assert_eq!(model.next_action("n", now), TaintAction::Leave);
    model.put_pod(0, pod("p", "n", false));
    assert_eq!(model.next_action("n", long_after), TaintAction::Wait(long_after + AFTER));
    // No agent was wanted there in between.
    model.place(on(1, "another"));
    assert_eq!(model.next_action("n", long_after), TaintAction::Leave);
    model.place(AgentPlacement::Everywhere);
    let longer_after = long_after + 10 * AFTER;
    assert_eq!(model.next_action("n", longer_after), TaintAction::Wait(longer_after + AFTER));
}

#[test]
fn on_what_may_be_out_of_date_a_node_that_joins_is_tainted_and_nothing_else_is_done() {
    let now = Instant::now();
    let later = now + 10 * AFTER;
    for lost in [WatchedList::Nodes, WatchedList::Pods(0)] {
        let mut model = model(node("unfit", &[], ""), vec![pod("p", "tainted", true), pod("q", "fit", true)]);
        assert_eq!(model.next_action("unfit", now), TaintAction::Wait(now + AFTER));
        model.put_node(node("tainted", &[KEY], ""));
        model.put_node(node("fit", &[], ""));
        model.mark_stale(lost);
        model.put_node(node("joined", &[], ""));
        model.put_node(node("born", &[KEY], ""));
        for (name, expected) in [
            ("unfit", TaintAction::Leave),
            ("tainted", TaintAction::Leave),
            ("fit", TaintAction::Leave),
            ("born", TaintAction::Leave),
            ("joined", TaintAction::Taint(TaintReason::Joined)),
        ] {
            assert_eq!(model.next_action(name, later), expected, "{lost:?} {name}");
        }
        match lost {
            WatchedList::Nodes => model.list_nodes(vec![node("unfit", &[], ""), node("tainted", &[KEY], "")]),
            WatchedList::Pods(at) => model.list_pods(at, vec![pod("p", "tainted", true)]),
        }
        assert_eq!(
            model.next_action("tainted", later),
            TaintAction::Free(TaintReason::AgentReady),
            "{lost:?}"
        );
        assert_eq!(model.next_action("unfit", later), TaintAction::Taint(TaintReason::AgentGone), "{lost:?}");
    }
}

#[test]
fn pods_are_read_as_they_count() {
    let ready = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    assert_eq!(AgentPod::of(&ready), Some(pod("p", "n", true)));
    for (pointer, value, expected) in [
        ("/metadata/deletionTimestamp", json!("2026-11-22T00:00:00Z"), Some(pod("p", "n", false))),
        ("/status/conditions", json!([{"type": "Ready", "status": "False"}]), Some(pod("p", "n", false))),
        ("/status/conditions", json!(null), Some(pod("p", "n", false))),
        ("/spec/nodeName", json!(""), None),
        ("/spec/nodeName", json!(null), None),
    ] {
        let mut object = ready.clone();
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
        object.pointer_mut(parent).expect("a parent")[key] = value;
        assert_eq!(AgentPod::of(&object), expected, "{pointer}");
    }
}

#[derive(Debug, Clone)]
enum Change {
    Node(&'static str, bool, &'static str),
    NoNode(&'static str),
    Pod(&'static str, &'static str, bool),
    NoPod(&'static str),
}

fn change() -> impl Strategy<Value = Change> {
    let name = || prop::sample::select(vec!["a", "b", "c"]);
    let status = prop::sample::select(vec!["", "True", "False", "Unknown"]);
    prop_oneof![
        (name(), any::<bool>(), status)
            .prop_map(|(name, tainted, status)| Change::Node(name, tainted, status)),
        name().prop_map(Change::NoNode),
        (name(), name(), any::<bool>()).prop_map(|(pod, node, ready)| Change::Pod(pod, node, ready)),
        name().prop_map(Change::NoPod),
    ]
}

proptest! {
    /// In every order of events: a fit node is never tainted, an unfit one never freed, and changes come to an end.
    #[test]
    fn steps_follow_from_what_is_and_come_to_rest(changes in prop::collection::vec(change(), 0..40)) {
        let mut now = Instant::now();
        let mut model = model(node("a", &[], ""), vec![]);
        let mut pods: BTreeMap<&str, (&str, bool)> = BTreeMap::new();
        for change in changes {
            now += AFTER / 3;
            match change {
                Change::Node(name, tainted, status) => model.put_node(node(name, if tainted { &[KEY] } else { &[] }, status)),
                Change::NoNode(name) => model.remove_node(name),
                Change::Pod(name, on, ready) => {
                    pods.insert(name, (on, ready));
                    model.put_pod(0, pod(name, on, ready));
                }
                Change::NoPod(name) => {
                    pods.remove(name);
                    model.remove_pod(0, name);
                }
            }
            for name in ["a", "b", "c"] {
                let is_ready = pods.values().any(|(on, ready)| *ready && *on == name);
                let reported = model.node(name).map(|node| model.reported(node));
                for _ in 0..3 {
                    match model.next_action(name, now) {
                        TaintAction::Leave | TaintAction::Wait(_) => break,
                        TaintAction::Taint(_) => {
                            prop_assert!(!is_ready || reported == Some(ReportedCondition::No), "{name}");
                            let status = model.node(name).and_then(|node| node.condition(TYPE)).map(|one| one.status.clone());
                            model.put_node(node(name, &[KEY], status.as_deref().unwrap_or_default()));
                        }
                        TaintAction::Free(_) => {
                            prop_assert!(is_ready && reported != Some(ReportedCondition::No), "{name}");
                            let status = model.node(name).and_then(|node| node.condition(TYPE)).map(|one| one.status.clone());
                            model.put_node(node(name, &[], status.as_deref().unwrap_or_default()));
                        }
                    }
                }
                prop_assert!(matches!(model.next_action(name, now), TaintAction::Leave | TaintAction::Wait(_)), "{name}");
            }
        }
    }
}
