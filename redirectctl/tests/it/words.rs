//! What the program answers to words on its command line, run as it is.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::process::{Command, Output};

use redirectctl::commands::COMMANDS;
use serde_json::{Value, json};
use settings_table::ValueKind;
use test_support::netns::{Families, Namespace};

fn redirectctl(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_redirectctl"));
    command.args(words).env_clear().output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_namespace_that_is_compared_with_nothing_is_not_said_to_be_right() {
    let output = redirectctl(&["netns", "/proc/self/ns/net"]);
    let told = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(!told.contains("nothing is wrong") && told.contains("nothing was compared"), "{told}");
}

#[test]
fn a_path_that_is_empty_is_an_error_that_names_its_flag() {
    for command in COMMANDS {
        for flag in
            command.rows.iter().filter(|row| matches!(row.takes, ValueKind::Path)).filter_map(|row| row.flag)
        {
            let output = redirectctl(&[command.name(), &format!("--{flag}"), ""]);
            let told = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{} --{flag}: {output:?}", command.name());
            assert!(told.contains(&format!("flag --{flag}: is empty")), "{}: {told}", command.name());
        }
    }
    let output = redirectctl(&["trace", "--netns", "", "--to", "192.0.2.1:80"]);
    assert!(
        output.stdout.is_empty() && text(&output.stderr).contains("flag --netns: is empty"),
        "{output:?}"
    );
    let output = redirectctl(&["netns", ""]);
    assert!(text(&output.stderr).contains("PATH is missing"), "{output:?}");
}

#[test]
fn what_is_not_examined_is_a_note_and_no_failure() {
    let there = Namespace::pod(Families::V4).unwrap();
    let path = there.path().display().to_string();
    let trace = ["trace", "--netns", &path, "--as", "1000", "--to", "192.0.2.1:80"];
    let verify = ["verify", "--netns", &path, "-b", "*", "-i", "*"];
    let report = |output: &Output| serde_json::from_slice::<Value>(&output.stdout).unwrap();
    let as_json = |words: &[&str]| redirectctl(&[words, &["--output", "json"]].concat());
    let before = [&trace[..], &verify].map(redirectctl);
    assert!(before.iter().all(|output| !text(&output.stdout).contains("not examined")), "{before:?}");
    assert_eq!(report(&as_json(&trace)).get("unexamined"), None);
    assert_eq!(report(&as_json(&verify))["unexamined"], json!([]));
    there
        .sh("tc qdisc add dev eth0 clsact && tc filter add dev eth0 ingress protocol ip u32 match ip dport 80 0xffff classid 1:1")
        .unwrap()
        .ok()
        .unwrap();
    let filters = "tc filters of eth0, ingress (u32)";
    let after = [&trace[..], &verify].map(redirectctl);
    let told = after.each_ref().map(|output| text(&output.stdout));
    assert!(told[0].contains(&format!("note: not examined: {filters}\n")), "{told:?}");
    assert!(told[1].contains("not-examined") && told[1].contains(filters), "{told:?}");
    let codes = |outputs: &[Output; 2]| outputs.each_ref().map(|output| output.status.code());
    assert_eq!(codes(&before), codes(&after));
    for words in [&trace[..], &verify] {
        assert_eq!(report(&as_json(words))["unexamined"], json!([filters]));
    }
}

#[test]
fn there_is_nothing_to_scan_but_the_node() {
    let output = redirectctl(&["scan", "pods", "-f", "/nonexistent"]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(told.contains("\"pods\"") && told.contains("node"), "{told}");
}

#[test]
fn exit_codes_are_those_of_the_documentation() {
    let one = "flags:-b * -i *";
    let other = "flags:-b * -i * -o 3306";
    for (words, code) in [
        (vec!["diff", one, one], 0),
        (vec!["diff", one, other], 2),
        (vec!["diff", one], 1),
        (vec!["diff", one, "flags:-o x"], 1),
        (vec!["why", "foreign-rule"], 0),
        (vec!["why", "unheard-of"], 1),
        (vec!["unheard-of"], 1),
        (vec![], 1),
    ] {
        let output = redirectctl(&words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {output:?}");
        assert_eq!(output.stderr.is_empty(), code != 1, "{words:?}: {output:?}");
    }
}

#[test]
fn every_help_has_examples() {
    for command in COMMANDS {
        let help = text(&redirectctl(&[command.name(), "--help"]).stdout);
        assert!(help.contains("Examples:") && help.contains("--color"), "{}: {help}", command.name());
    }
}
