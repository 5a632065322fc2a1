//! The examples run and print what they promise.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::running::{printed, run};
use redirect_core::{Families, Family, Redirect};
use serde_json::{Value, json};
use std::{fs, process::Output};

/// What pr_check says about two manifests.
fn checked(name: &str, before: &Value, after: &Value) -> Output {
    let file = |which: &str, manifest: &Value| {
        let path = std::env::temp_dir().join(format!("pr-check-{}-{name}-{which}.json", std::process::id()));
        fs::write(&path, manifest.to_string()).unwrap();
        path
    };
    let files = [file("before", before), file("after", after)];
    let output = run("pr_check", &[files[0].to_str().unwrap(), files[1].to_str().unwrap()], "");
    files.iter().for_each(|file| fs::remove_file(file).unwrap());
    output
}

fn deployment(annotations: &Value) -> Value {
    json!({"kind": "Deployment", "metadata": {"name": "cart"}, "spec": {"template": {
        "metadata": {"annotations": annotations},
        "spec": {"containers": [{"name": "app"}]},
    }}})
}

#[test]
fn a_change_that_bypasses_the_proxy_ends_with_1_and_names_the_annotation() {
    let excluded = json!({"traffic.sidecar.istio.io/excludeOutboundPorts": "3306,5432"});
    let output = checked("bypass", &deployment(&json!({})), &deployment(&excluded));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let annotation = "annotation traffic.sidecar.istio.io/excludeOutboundPorts";
    assert!(text.contains(annotation) && text.contains("untouched") && text.contains("port 3306"), "{text}");
    assert!(text.lines().count() <= 6, "{text}");
}

#[test]
fn a_change_that_bypasses_nothing_ends_with_0() {
    let captured = json!({"traffic.sidecar.istio.io/includeOutboundPorts": "3306"});
    for (name, before, after) in [
        ("same", json!({}), json!({"other": "annotation"})),
        // Without the annotation, 15020 is excluded.
        ("more", json!({"traffic.sidecar.istio.io/excludeOutboundPorts": "15020,3306"}), json!({})),
        ("asked", json!({}), captured),
    ] {
        let output = checked(name, &deployment(&before), &deployment(&after));
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0), "{name}: {text}");
        assert_eq!(text.is_empty(), name != "more", "{name}: {text}");
    }
}

#[test]
fn what_a_manifest_leaves_open_is_told_by_the_file() {
    let misspelt = json!({"traffic.sidecar.istio.io/excludeOutboundPort": "3306"});
    let output = checked("misspelt", &deployment(&json!({})), &deployment(&misspelt));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("after.json: annotation") && told.contains("did you mean"), "{told}");
}

#[test]
fn a_dump_is_audited() {
    let plan = Redirect::sidecar(Families::Both).build().unwrap().plan();
    for (family, to) in [(Family::V4, "203.0.113.7:443"), (Family::V6, "[2001:db8::7]:443")] {
        let saved = plan.rules(family).restore_text();
        let text = printed("audit", &[to], &saved);
        assert!(text.contains("ends at: proxy, outbound listener (port 15001)"), "{text}");
        let damaged = saved.replace("-A OUTPUT -j ISTIO_OUTPUT\n", "");
        assert_ne!(damaged, saved);
        let output = run("audit", &[to], &damaged);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("nat OUTPUT: rule 1 is missing") && text.contains("ends at: untouched"),
            "{text}"
        );
    }
    let other = run("audit", &["[2001:db8::7]:443"], "*nat\n-A OUTPUT -d 10.0.0.0/8 -j RETURN\nCOMMIT\n");
    assert!(String::from_utf8(other.stderr).unwrap().contains("OtherFamily"));
}
