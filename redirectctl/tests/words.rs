//! What the program answers to words on its command line, run as it is.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::process::{Command, Output};

use redirectctl::commands::COMMANDS;

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
        let help = text(&redirectctl(&[command.name, "--help"]).stdout);
        assert!(help.contains("Examples:") && help.contains("--color"), "{}: {help}", command.name);
    }
}
