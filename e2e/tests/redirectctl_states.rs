//! Broken pods, each broken in one way: `redirectctl` names the cause of each, finds nothing wrong with a whole one, and changes nothing.

mod plugin_support;
mod redirectctl_support;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use redirectctl_support::{Patient, States, redirectctl};
use serde_json::Value;

/// The codes of a report's findings that are more than notes.
fn causes(report: &Value) -> Vec<String> {
    let findings = report["findings"].as_array().into_iter().flatten();
    let bad = findings.filter(|finding| finding["severity"] != "note");
    bad.map(|finding| finding["code"].as_str().unwrap_or("?").to_owned()).collect()
}

fn report(patient: &Patient) -> Result<Value> {
    let netns = patient.namespace().path().display().to_string();
    let manifest = patient.manifest()?;
    let output = redirectctl(&["netns", &netns, "-f", &manifest, "--output", "json"])?;
    let report: Value = serde_json::from_str(&output.stdout).with_context(|| output.stderr.clone())?;
    let code = if causes(&report).is_empty() { 0 } else { 2 };
    ensure!(output.code() == Some(code), "exit code {:?}, wanted {code}", output.code());
    Ok(report)
}

#[test]
fn a_whole_pod_is_found_to_be_one() -> Result<()> {
    for state in States::whole() {
        let patient = state.patient(0)?;
        let before = patient.namespace().snapshot()?;
        let report = report(&patient).with_context(|| state.name)?;
        assert_eq!(causes(&report), Vec::<String>::new(), "{}: {report:#}", state.name);
        let changes = patient.namespace().snapshot()?.changes_since(&before);
        assert!(changes.is_empty(), "{}: {changes:?}", state.name);
    }
    Ok(())
}

#[test]
fn every_broken_state_is_seen_with_its_cause() -> Result<()> {
    let mut wrong = Vec::new();
    for state in States::broken() {
        let told = state.patient(0).and_then(|patient| report(&patient));
        match told.with_context(|| state.name) {
            Ok(report) if causes(&report) == [state.cause] => {}
            Ok(report) => wrong.push(format!(
                "{}: {:?}, wanted {}\n{report:#}",
                state.name,
                causes(&report),
                state.cause
            )),
            Err(error) => wrong.push(format!("{error:#}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn what_is_told_fits_a_terminal_and_says_what_to_do() -> Result<()> {
    for state in States::broken() {
        let patient = state.patient(0)?;
        let netns = patient.namespace().path().display().to_string();
        let output = redirectctl(&["netns", &netns, "-f", &patient.manifest()?])?;
        let text = &output.stdout;
        assert!(text.contains(state.cause) && text.contains("what to do:"), "{}: {text}", state.name);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{}: {text}", state.name);
        assert!(!text.contains('\u{1b}'), "no colours where there is no terminal: {text}");
    }
    Ok(())
}

#[test]
fn a_rule_of_others_is_named_with_its_place() -> Result<()> {
    let state = States::named("foreign accept").context("is a state")?;
    let report = report(&state.patient(0)?)?;
    let seen = report["findings"][0]["seen"][0].as_str().unwrap_or_default();
    for word in ["table ip nat", "chain OUTPUT", "hook output, priority -100", "rule 1", "-j ACCEPT"] {
        assert!(seen.contains(word), "{word}: {seen}");
    }
    Ok(())
}

#[test]
fn a_difference_says_what_the_rule_is_for_and_who_asked_for_it() -> Result<()> {
    let state = States::named("capture removed").context("is a state")?;
    let patient = state.patient(0)?;
    let netns = patient.namespace().path().display().to_string();
    let output = redirectctl(&["verify", "--netns", &netns, "-f", &patient.manifest()?])?;
    assert_eq!(output.code(), Some(2), "{}", output.stdout);
    let text = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("is missing") && text.contains("it is there for this:"), "{text}");
    Ok(())
}

#[test]
fn a_packet_is_followed_through_rules_of_others_as_well() -> Result<()> {
    let trace = |name: &str, who: &str, to: &str| -> Result<String> {
        let patient = States::named(name).context("is a state")?.patient(0)?;
        let netns = patient.namespace().path().display().to_string();
        let output =
            redirectctl(&["trace", "--netns", &netns, "-f", &patient.manifest()?, "--as", who, "--to", to])?
                .ok()?;
        Ok(output.stdout)
    };
    let whole = trace("redirected", "app", "198.51.100.1:80")?;
    assert!(whole.contains("ends at: proxy, outbound listener (port 15001)"), "{whole}");
    let broken = trace("foreign accept", "app", "198.51.100.1:80")?;
    assert!(broken.contains("ends at: untouched"), "{broken}");
    let dropped = trace("foreign drop", "app", "198.51.100.1:80")?;
    assert!(dropped.contains("ends at: dropped"), "{dropped}");
    let excluded = trace("port excluded", "outside", "10.1.0.2:8080")?;
    assert!(
        excluded.contains("ends at: untouched") && excluded.contains("excludeInboundPorts"),
        "{excluded}"
    );
    Ok(())
}

/// What somebody notices who has such a pod, in the words of docs/troubleshooting.md.
fn symptom(state: &str) -> Option<&'static str> {
    Some(match state {
        "plugin never ran" => "The sidecar sees no traffic at all; the mesh's policies do not apply",
        "foreign accept" => "Calls of the application pass by the proxy although every rule is there",
        "foreign nat chain" => "Connections to one port of the pod reach another program",
        "foreign drop" => "Calls of the application hang, and the proxy never sees them",
        "port excluded" => "One port of the application is reached without the proxy",
        "nobody answers DNS" => "No name can be resolved in the pod",
        "no proxy yet" => "Every connection is refused",
        "stranger on the port" => "Connections reach a process that is not the proxy",
        "capture removed" => "Calls of the application pass by the proxy, those to it do not",
        "hook removed" => "Connections to the pod pass by the proxy, its own calls do not",
        "one family removed" => "IPv6 passes by the proxy, IPv4 does not",
        "policy rule removed" => "With TPROXY, connections to the pod hang",
        "passthrough address removed" => "IPv6 connections to the application fail behind the proxy",
        "legacy rules beside" => "Redirection works on some nodes only, or to the wrong port",
        "table asleep" => "All rules are listed, and none has an effect",
        "lo without address" => "Proxy and application cannot reach each other",
        "annotation that nobody understands" => "The pod is not created: error of the plugin, code 100",
        "annotation that is misspelt" => "An annotation has no effect",
        "one family not captured" => "In a dual-stack pod, one family passes by the proxy",
        "application with the proxy's user" => "Calls of one container pass by the proxy",
        "init container before the proxy" => "An init container has no network",
        "proxy taken away afterwards" => "A pod without a proxy has no network",
        "sandboxed runtime" => "Every rule is in force, and no traffic is redirected",
        _ => return None,
    })
}

#[test]
fn the_page_of_troubles_shows_what_is_really_told() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
    let mut page = fs::read_to_string(&path)?;
    let mut told = String::new();
    for state in States::broken() {
        let symptom = symptom(state.name).with_context(|| format!("{}: has no symptom", state.name))?;
        let patient = state.patient(0)?;
        let netns = patient.namespace().path().display().to_string();
        let output = redirectctl(&["netns", &netns, "-f", &patient.manifest()?])?;
        let lines = output
            .stdout
            .lines()
            .skip_while(|line| !line.starts_with("error") && !line.starts_with("warning"));
        let findings: Vec<&str> = lines.collect();
        told += &format!("### {symptom}\n\n```text\n{}\n```\n\n", findings.join("\n"));
    }
    let begin = "<!-- states -->\n";
    let start = page.find(begin).context("a place for it")? + begin.len();
    let end = start + page[start..].find("<!-- end -->").context("an end of it")?;
    if std::env::var_os("UPDATE_DOCS").is_some() {
        page.replace_range(start..end, &told);
        fs::write(path, page)?;
    } else {
        assert_eq!(&page[start..end], told, "run UPDATE_DOCS=1 cargo test -p e2e --test redirectctl_states");
    }
    Ok(())
}
