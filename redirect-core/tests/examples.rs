//! The examples run and print what they promise.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use serde_json::{Value, json};
use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

/// Cargo builds examples along with the tests of a package, unless it is asked for single tests.
fn run(example: &str, arguments: &[&str], input: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    let program = program.parent().and_then(Path::parent).unwrap().join("examples").join(example);
    assert!(
        is_up_to_date(&program),
        "{} is missing or older than its source: run all tests of redirect-core, or 'cargo build -p redirect-core --examples' first",
        program.display()
    );
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // An example that ends without reading all of it is judged by its output.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn is_up_to_date(program: &Path) -> bool {
    let written = |path: &Path| fs::metadata(path).and_then(|file| file.modified());
    let Ok(built) = written(program) else { return false };
    let mut folders = vec![
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        Path::new(env!("CARGO_MANIFEST_DIR")).join("examples"),
    ];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if written(&path).unwrap() > built {
                return false;
            }
        }
    }
    true
}

/// What an example prints when it succeeds; it must have nothing to complain about, nor the compiler.
fn printed(example: &str, arguments: &[&str], input: &str) -> String {
    let output = run(example, arguments, input);
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && complaints.is_empty(), "{example}: {}: {complaints}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

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
fn a_change_of_mode_is_told_in_steps_and_rules() {
    let text = printed("compare_configurations", &[], "");
    let (steps, rules) = text.split_once("rules:\n").unwrap();
    assert_eq!(
        steps.lines().collect::<Vec<_>>(),
        [
            "steps:",
            "  add IPv4 route: local default dev lo table 133",
            "  add IPv4 policy rule: fwmark 0x539 lookup 133",
            "  IPv4 mangle (iptables-nft)",
            "  wait for packets on their way",
            "  IPv4 nat (iptables-nft)",
        ]
    );
    let (gone, come): (Vec<&str>, Vec<&str>) = rules.lines().partition(|line| line.starts_with("- "));
    assert!(gone.contains(&"- nat ISTIO_OUTPUT: -p tcp -m tcp --dport 3306 -j RETURN"), "{rules}");
    assert!(gone.contains(&"- nat PREROUTING: -p tcp -j ISTIO_INBOUND"), "{rules}");
    assert!(come.contains(&"+ mangle PREROUTING: -p tcp -j ISTIO_INBOUND"), "{rules}");
    assert!(come.iter().all(|line| line.starts_with("+ ")), "{rules}");
}

#[test]
fn the_output_of_iptables_save_is_checked() {
    let saved = printed("annotations_to_restore", &[], "");
    let saved = saved.strip_prefix("# IPv4\n").unwrap();
    assert_eq!(printed("check_iptables_save", &[], saved), "as planned\n");
    // As iptables-save prints it, beside a rule of another program's.
    let theirs = "*filter\n:INPUT ACCEPT [0:0]\n[7:420] -A INPUT -p icmp -j ACCEPT\nCOMMIT\n";
    assert_eq!(printed("check_iptables_save", &[], &format!("{theirs}{saved}")), "as planned\n");

    let damaged = saved.replace("-A PREROUTING -p tcp -j ISTIO_INBOUND\n", "");
    let damaged = damaged.replace("--to-ports 15006\n", "--to-ports 15007\n");
    assert_ne!(damaged, saved);
    let output = run("check_iptables_save", &[], &damaged);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stdout).unwrap();
    let wanted = [
        "nat PREROUTING: rule 1 is missing: -p tcp -j ISTIO_INBOUND",
        "nat ISTIO_IN_REDIRECT: rule 1 is -p tcp -j REDIRECT --to-ports 15007, not -p tcp -j REDIRECT --to-ports 15006",
    ];
    assert_eq!(told.lines().collect::<Vec<_>>(), wanted);
}

#[test]
fn every_setting_has_its_line() {
    let table = printed("settings_table", &[], "");
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), redirect_core::settings::SETTINGS.len() + 2);
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
