//! The examples run and print what they promise.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::running::{printed, run};
use redirect_core::settings::Setting;
use serde_json::{Value, json};

#[test]
fn annotations_become_text_for_iptables_restore() {
    let text = printed(
        "annotations_to_restore",
        &["traffic.sidecar.istio.io/excludeOutboundPorts=3306,8000-8099"],
        "",
    );
    assert!(text.starts_with("# IPv4\n*nat\n:ISTIO_INBOUND - [0:0]\n"), "{text}");
    for rule in [
        "-A PREROUTING -p tcp -j ISTIO_INBOUND",
        "-A ISTIO_OUTPUT -p tcp -m tcp --dport 3306 -j RETURN",
        "-A ISTIO_OUTPUT -p tcp -m tcp --dport 8000:8099 -j RETURN",
    ] {
        assert_eq!(text.lines().filter(|line| *line == rule).count(), 1, "{rule}: {text}");
    }
    let skipped = printed("annotations_to_restore", &["sidecar.istio.io/interceptionMode=NONE"], "");
    assert_eq!(skipped, "# not redirected: annotation sidecar.istio.io/interceptionMode is NONE\n");
}

#[test]
fn what_is_wrong_with_annotations_is_told_together() {
    let arguments = [
        "traffic.sidecar.istio.io/excludeOutboundPorts=mysql",
        "traffic.sidecar.istio.io/includeOutboundIPRanges=10.0.0.0",
    ];
    let output = run("annotations_to_restore", &arguments, "");
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && complaints.contains("mysql"), "{complaints}");
    assert!(complaints.contains("10.0.0.0/32"), "{complaints}");
}

#[test]
fn every_setting_has_its_line() {
    let table = printed("settings_table", &[], "");
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), Setting::ALL.len() + 2);
    for line in &lines {
        let bars = line.replace("\\|", "").matches('|').count();
        assert_eq!(bars, 6, "{line}");
    }
    let ports = lines.iter().find(|line| line.contains("| --istio-local-exclude-ports |")).unwrap();
    assert!(ports.contains("traffic.sidecar.istio.io/excludeInboundPorts"), "{ports}");
}

#[test]
fn a_pod_becomes_a_decision_and_a_plan() {
    let pod = json!({
        "kind": "Pod",
        "metadata": {"annotations": {
            "sidecar.istio.io/status": "{}",
            "traffic.sidecar.istio.io/excludeOutboundPorts": "3306",
        }},
        "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]},
        "status": {"podIPs": [{"ip": "10.1.0.2"}]},
    });
    let text = printed("plan_as_json", &[], &pod.to_string());
    let documents: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [decision, plan] = documents.as_slice() else { panic!("{text}") };
    assert_eq!(decision["redirect"]["outboundPortsExclude"], json!(["3306"]));
    let chains = plan["families"][0]["tables"][0]["chains"].as_array().unwrap();
    let rules = chains.iter().flat_map(|chain| chain["rules"].as_array().unwrap());
    let asked: Vec<&Value> = rules.filter(|rule| rule["source"]["kind"] == "annotation").collect();
    let texts: Vec<&Value> = asked.iter().map(|rule| &rule["text"]).collect();
    assert_eq!(texts, ["-p tcp -m tcp --dport 3306 -j RETURN", "-p udp -m udp --dport 3306 -j RETURN"]);
    let names = asked.iter().map(|rule| &rule["source"]["name"]);
    assert!(names.eq(["traffic.sidecar.istio.io/excludeOutboundPorts"; 2]), "{plan:#}");

    let mut skipped = pod;
    skipped["spec"]["containers"][1]["name"] = json!("proxy");
    let text = printed("plan_as_json", &[], &skipped.to_string());
    let decision: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(decision["reason"], "no_proxy");
}
