//! What breaks on a node, and that everyone who shows whether its agent is ready names the same cause: the first table of docs/tasks/troubleshooting.md. A real node
//! breaks in the suite `cluster`.

use std::collections::BTreeMap;

use e2e::agent::{Agent, Node};
use e2e::guides;
use serde_json::Value;

use crate::cluster::{Api, node, report};

/// Breaks something of a node on which all was well.
type Break = fn(&Node);

/// By the words of the page.
fn breakages() -> BTreeMap<&'static str, Break> {
    BTreeMap::from([
        (
            "A file in front of the network's cannot be loaded",
            (|node| node.write_conf("05-new.conflist", "{broken")) as Break,
        ),
        ("The kernel refuses the rules of a pod", |node| {
            report(node, "fail", 7, "cannot redirect the pod: the kernel lacks nf_tables");
        }),
    ])
}

/// The messages of the events with a reason.
fn events(api: &Api, reason: &str) -> Vec<String> {
    let state = api.state();
    let events = state.events.iter().map(|event| serde_json::from_str::<Value>(event).expect("JSON"));
    let of_reason = events.filter(|event| event["reason"] == reason);
    of_reason.map(|event| event["message"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Health, the pod's event and the gauge of the alert.
fn ensure_all_agree(agent: &Agent<'_>, api: &Api, words: &str) {
    let said = agent.wait_not_ready(words);
    agent.wait("the event", || !events(api, "AgentNotReady").is_empty());
    let told = events(api, "AgentNotReady");
    assert!(told.len() == 1 && told[0].contains(words), "{words}: {told:?}, readyz: {said}");
    assert_eq!(agent.metric("istio_cni_install_ready"), 0.0, "{words}");
}

#[test]
fn whatever_breaks_everyone_names_the_same_cause() {
    let mut breakages = breakages();
    for row in guides::breakages("| what breaks |").expect("a table") {
        let [what, words] = &row[..] else { panic!("not two cells: {row:?}") };
        let breaks = breakages.remove(what.as_str()).unwrap_or_else(|| panic!("not tried: {what}"));
        let mut node = node();
        node.use_real_plugin();
        let api = Api::start(&mut node);
        let agent = node.start_ready();
        breaks(&node);
        ensure_all_agree(&agent, &api, words);
    }
    assert!(breakages.is_empty(), "not on the page: {:?}", breakages.keys());
}
