//! `watch` shows what changes, until a signal comes.

use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::access::{MESH, objects_of};
use crate::schema::ours;
use crate::server::{Reply, Server};

/// A cluster whose pod is as planned when it is asked about first, and never again.
fn cluster() -> Server {
    let count = AtomicUsize::new(0);
    Server::start(objects_of(&["n"]), move |_| {
        let state = if count.fetch_add(1, Ordering::Relaxed) == 0 { "verified" } else { "drifted" };
        Reply::of(json!({"version": 1, "pods": [{"subject": "shop/cart", "state": state}]}).to_string())
    })
}

fn words<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["watch", "--interval", "10ms"][..], more, &MESH].concat()
}

#[test]
fn each_change_is_a_line_and_a_signal_ends_it_well() {
    let is_told = |log: &str| log.lines().count() == 2;
    let (code, log) = cluster().interrupted(&words(&[]), Signal::SIGINT, is_told);
    assert_eq!(code, Some(0), "{log}");
    let lines: Vec<&str> =
        log.lines().map(|line| line.split_once(' ').map_or("", |(_, rest)| rest)).collect();
    assert_eq!(lines, ["watching 1 node and 1 pod, 1 verified", "pod shop/cart on n: verified -> drifted"]);

    let (code, log) = cluster().interrupted(&words(&["-o", "json"]), Signal::SIGTERM, is_told);
    assert_eq!(code, Some(0), "{log}");
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(lines.iter().all(|line| ours(line).is_empty()), "{log}");
    let last = &lines[1];
    assert_eq!(
        (&last["event"], &last["before"]["state"], &last["after"]["state"]),
        (&json!("changed"), &json!("verified"), &json!("drifted")),
        "{log}"
    );
}

#[test]
fn what_is_not_possible_at_first_ends_it() {
    let output = Server::start(objects_of(&[]), |_| Reply::of("")).run(&words(&[]));
    assert!(output.code() == Some(1) && output.stderr.contains("no agent found"), "{output:?}");
    let output = cluster().run(&words(&["--interval", "0s"]));
    assert!(output.code() == Some(1) && output.stderr.contains("--interval"), "{output:?}");
}
