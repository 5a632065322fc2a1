//! The tests' runner when a signal ends it, or its script ends before it: no test goes on.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Child;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tempfile::TempDir;
use test_support::process::{self, Killed, SHORT, until};

/// A test program whose one test says which process it is, and which signals are blocked there, and never ends.
const PROGRAM: &str = r#"#!/bin/sh
case "$*" in *--ignored*) exit ;; *--list*) echo 'a: test'; exit ;; esac
echo "$$ $(sed -n 's/^SigBlk:[[:space:]]*0*//p' /proc/$$/status)" >"$0.id.new" && mv "$0.id.new" "$0.id"
sleep 1000
"#;

fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    fs::write(&program, PROGRAM).expect("writes");
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("sets the mode");
    let message = json!({"manifest_path": folder.path().join("Cargo.toml"), "target": {"name": "program", "kind": ["test"]},
        "profile": {"test": true}, "executable": program});
    fs::write(folder.path().join("built"), message.to_string()).expect("writes");
    folder
}

/// Starts the runner by this script, whose `$0` and `$1` are the runner and its argument, and waits until the test runs.
fn start(folder: &Path, script: &str) -> (Killed, Pid) {
    let runner = process::command("sh", ["-c", script, env!("CARGO_BIN_EXE_run-tests")])
        .arg(folder.join("built"))
        .spawn()
        .expect("starts");
    let runner = Killed(runner);
    let said =
        until("the test to run", SHORT, &[], || Ok(fs::read_to_string(folder.join("program.id")).ok()));
    let said = said.expect("runs");
    let (id, blocked) = said.trim_end_matches('\n').split_once(' ').expect("a process and signals");
    assert_eq!(blocked, "", "no signal would end what a test starts");
    (runner, Pid::from_raw(id.parse().expect("an id")))
}

fn wait_gone(process: Pid) {
    let gone = until("the test to end", SHORT, &[], || {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        Ok((stat.is_empty() || stat.contains(") Z ")).then_some(()))
    });
    gone.expect("ends");
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().try_into().expect("an id"))
}

#[test]
fn a_signal_to_the_runner_ends_its_tests() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let folder = folder();
        let (mut runner, test) = start(folder.path(), r#"exec "$0" "$1""#);
        kill(pid(&runner), signal).expect("signals");
        let status = runner.wait().expect("ends");
        assert_eq!((status.code(), status.signal()), (Some(128 + signal as i32), None), "{signal}");
        wait_gone(test);
    }
}

#[test]
fn a_runner_whose_script_is_killed_ends_its_tests() {
    let folder = folder();
    let (mut script, test) = start(folder.path(), r#""$0" "$1"; true"#);
    script.kill().expect("kills");
    script.wait().expect("ends");
    wait_gone(test);
}
