//! Everything that is written as JSON follows the schema, and what agents write is read as their schema has it.

use kubectl_redirect::precheck::{self, ClusterFacts, NamedCheck, PodCounts, checks};
use kubectl_redirect::verdict::{Audience as _, ClusterVerdict, PodFilter, Unasked};
use kubectl_redirect::{CommandFailure, agents::Agent, agents::Reachability};
use presentation::node_scan::NodeScan;
use serde_json::{Value, json};

fn errors(schema: &str, document: &Value) -> Vec<String> {
    let schema: Value = serde_json::from_str(schema).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    validator.iter_errors(document).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

/// What of a document of this program its schema does not have.
pub fn ours(document: &Value) -> Vec<String> {
    errors(include_str!("../../schema/kubectl-redirect-1.schema.json"), document)
}

#[test]
fn a_scan_follows_the_schema() {
    let finding = |code: &str, severity: &str| json!({"code": code, "severity": severity, "meaning": "m", "seen": ["s"], "remedy": "r"});
    let scan = json!({"version": 1, "node": [finding("agent-not-ready", "error"), finding("not-told", "note")], "pods": [
        {"subject": "shop/cart", "state": "not-redirected", "dataPlane": "ambient", "consequences": ["traffic bypasses the proxy"], "findings": [finding("not-redirected", "error")]},
        {"subject": "/run/netns/x", "state": "unexpected", "dataPlane": null, "consequences": [], "findings": [finding("unowned-rules", "warning")]},
    ]});
    let of_agents = include_str!("../../../redirectctl/schema/redirectctl-1.schema.json");
    // Its other documents refer to another schema.
    let mut schema: Value = serde_json::from_str(of_agents).expect("JSON");
    schema["oneOf"] = json!([{"$ref": "#/$defs/scan"}]);
    schema["$defs"].as_object_mut().expect("definitions").retain(|name, _| {
        ["scan", "consequences", "finding", "findings", "podState"].contains(&name.as_str())
    });
    assert_eq!(errors(&schema.to_string(), &scan), [""; 0]);

    let read: NodeScan = serde_json::from_value(scan.clone()).expect("is read");
    assert_eq!(json!(read), scan, "nothing of it is lost");

    let mut verdict = ClusterVerdict::new(PodFilter::default());
    verdict.see(&Agent {
        namespace: "mesh".to_owned(),
        name: "a".to_owned(),
        node: "n".to_owned(),
        container: "install-cni".to_owned(),
        image: "i".to_owned(),
        state: Reachability::NotReady,
        restarts: None,
    });
    verdict.add("n", read);
    verdict.miss("m", Unasked::NoAgent(1));
    let document = verdict.json();
    assert_eq!(ours(&document), [""; 0], "{document:#}");
    assert_eq!(
        (&document["nodes"][0]["subjects"], &document["pods"][1]["subjects"]),
        (&json!(["n"]), &json!(["n:/run/netns/x"]))
    );
    assert_ne!(ours(&json!({"version": 1, "redirected": -1})), [""; 0]);
}

#[test]
fn a_precheck_follows_the_schema() {
    let failure = || CommandFailure::of("missing right");
    let facts = ClusterFacts {
        server: ("https://api".to_owned(), "v1".to_owned()),
        namespace: ("mesh".to_owned(), Ok(None)),
        rights: Vec::new(),
        nodes: Err(failure()),
        daemon_sets: Err(failure()),
        deployments: Err(failure()),
        pods: Ok(PodCounts::default()),
        cilium: Ok(None),
        agent: Ok(None),
    };
    let checks: Vec<NamedCheck> = checks::all(&facts);
    let document = precheck::json(&checks);
    assert_eq!(ours(&document), [""; 0], "{document:#}");
}
