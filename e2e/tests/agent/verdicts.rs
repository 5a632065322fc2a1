//! Agent and `redirectctl` say the same of the same pods, in words that `redirectctl why` explains. Needs root.

use std::collections::{BTreeMap, BTreeSet};

use e2e::agent::{CALICO, Node, get};
use e2e::pods::{
    PodApi, Sandboxes, check, flood, mesh_pod, metric, redirect, wait, wait_at_least, wait_rounds,
};
use reasons::PodState;
use redirectctl::cause::Cause;
use redirectctl::pod::Pod;
use redirectctl::scan::Scan;
use redirectctl::text_writer::TextLayout;
use redirectctl::why::explain;

/// Labels whose values are a state, a cause or a result.
const LABELS: [&str; 6] = ["state", "result", "reason", "kind", "outcome", "type"];

/// The values of labels in the text of metrics.
fn values(text: &str) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for line in text.lines().filter(|line| line.starts_with("istio_cni_")) {
        let Some((_, rest)) = line.split_once('{') else { continue };
        let Some((labels, _)) = rest.split_once('}') else { continue };
        for label in labels.split(',') {
            let Some((name, value)) = label.split_once('=') else { continue };
            let value = value.trim_matches('"');
            if LABELS.contains(&name) && !value.is_empty() {
                found.insert((name.to_owned(), value.to_owned()));
            }
        }
    }
    found
}

#[test]
fn every_word_of_the_metrics_is_explained() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    let all = [
        ("DRIFT_WATCH_INTERVAL", "1s"),
        ("DRIFT_HEAL", "true"),
        ("NODE_TAINT", "true"),
        ("REPAIR_ENABLED", "true"),
        ("REPAIR_LABEL_PODS", "true"),
    ];
    for (name, value) in all {
        node.set(name, value);
    }
    let mut sandboxes = Sandboxes::new(&mut node);
    redirect(&sandboxes.add("cni-web", &["10.1.0.2", "fd00:10::2"]));
    let _api = PodApi::start(&mut node, vec![mesh_pod("web", &["10.1.0.2", "fd00:10::2"])]);
    let _agent = node.start_ready();
    wait_at_least(&node, &check("verified"), 1.0);
    let (_, text) = get(node.monitoring, "/metrics").expect("metrics");
    let values = values(&text);
    for label in LABELS {
        assert!(values.iter().any(|(name, _)| name == label), "no label {label} in\n{text}");
    }
    let unknown: Vec<_> =
        values.iter().filter(|(_, word)| explain(word, TextLayout::default()).is_err()).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn every_alert_is_explained() {
    let rules = include_str!("../../../deploy/charts/istio-cni/files/rules.yaml");
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 20, "{alerts:?}");
    for alert in alerts {
        let text = explain(alert, TextLayout::default()).expect("is known");
        assert!(text.contains("docs/tasks/alerts.md") && !text.contains("{{"), "{text}");
    }
}

/// A dual-stack node with a pod in every state that the agent tells apart.
#[test]
fn a_scan_finds_every_pod_in_the_state_that_the_agent_reports() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("DRIFT_WATCH_INTERVAL", "1s");
    let mut sandboxes = Sandboxes::new(&mut node);
    let (mut pods, mut namespaces) = (Vec::new(), Vec::new());
    let states = [
        ("sound", PodState::Verified, ""),
        ("bare", PodState::NotRedirected, "nft flush ruleset"),
        ("emptied", PodState::Drifted, "iptables-nft -t nat -F ISTIO_OUTPUT"),
        ("raced", PodState::Interference, "iptables-nft -t nat -I OUTPUT -j ACCEPT"),
        ("claimed", PodState::Unknown, ""),
        ("lost", PodState::Unknown, ""),
        // The mesh's rules can be compared, and those of others are too many.
        ("flooded", PodState::Drifted, "iptables-nft -t nat -F ISTIO_OUTPUT"),
    ];
    for ((name, _, script), number) in states.into_iter().zip(2..) {
        let addresses = [format!("10.1.0.{number}"), format!("fd00:10::{number}")];
        let addresses = addresses.each_ref().map(String::as_str);
        pods.push(mesh_pod(name, &addresses));
        if name == "lost" {
            continue;
        }
        let namespace = sandboxes.add(&format!("cni-{name}"), &addresses);
        redirect(&namespace);
        if !script.is_empty() {
            namespace.sh(script).expect("runs").ok().expect("breaks it");
        }
        if name == "flooded" {
            flood(&namespace, "filter", "FORWARD");
        }
        namespaces.push(namespace);
    }
    // Istio's default on a dual-stack node: IPv4 alone is captured.
    let claimed = sandboxes.add("cni-claim", &["10.1.0.6", "fd00:10::6"]);
    let _api = PodApi::start(&mut node, pods.clone());
    let _agent = node.start_ready();
    wait_rounds(&node, 3.0);
    wait(&node, "every pod to be checked", || metric(&node, &meshed(PodState::Unseen)) == Some(0.0));

    let pods: Vec<Pod> = pods.iter().map(|pod| Pod::from_json(pod).expect("a pod")).collect();
    let scan =
        Scan::of(&pods, sandboxes.path(), &redirectctl::node::NodeConfiguration::default()).expect("scans");
    let scanned: BTreeMap<&str, PodState> =
        scan.entries.iter().map(|entry| (entry.subject.as_str(), entry.state)).collect();
    for (name, state, _) in states {
        assert_eq!(scanned.get(format!("shop/{name}").as_str()), Some(&state), "{name}: {scan:#?}");
    }
    for state in PodState::MESHED {
        let count =
            f64::from(u8::try_from(scanned.values().filter(|one| **one == state).count()).expect("few"));
        assert_eq!(metric(&node, &meshed(state)), Some(count), "{}\n{}", state.word(), node.log());
    }
    let advice: Vec<_> = scan.node.iter().filter(|one| one.cause == Cause::FamilyNotCaptured).collect();
    assert_eq!(advice.len(), 1, "{advice:?}");
    drop(claimed);
}

fn meshed(state: PodState) -> String {
    format!("istio_cni_meshed_pods{{state=\"{}\"}}", state.word())
}
