//! `test` creates pods only with the user's consent, says what became of them, and deletes them whatever happens.

use std::io::Write as _;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::access::{MESH, objects_of};
use crate::schema::ours;
use crate::server::{Reply, Server};

/// What the API server shows of a pod.
fn pod(phase: &str, ends: &[(i32, &str)]) -> Value {
    let status = |(code, message): &(i32, &str)| {
        json!({"name": "c", "image": "i", "imageID": "i", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": code, "message": message}}})
    };
    let (init, main) = ends.split_at(ends.len().min(1));
    let [init, main] = [init, main].map(|ends| ends.iter().map(status).collect::<Vec<_>>());
    json!({"metadata": {"namespace": "tenant", "name": "x"},
        "status": {"phase": phase, "initContainerStatuses": init, "containerStatuses": main}})
}

const FINE: (i32, &str) = (0, r#"{"reason": "redirected"}"#);
const BAD: (i32, &str) = (126, r#"{"reason": "no-rules", "message": "nothing redirects traffic"}"#);

/// Nodes with agents; the first pod becomes one of these, the second another. `refused` is what creating is answered with, if not with success.
fn cluster(nodes: &[&str], pods: [Value; 2], refused: Option<u16>) -> Server {
    let answer = move |target: &str, stream: &mut std::net::TcpStream| {
        let Some((_, rest)) = target.split_once("/namespaces/tenant/pods") else { return false };
        let name = rest.split('?').next().unwrap_or_default();
        let (code, body) = match (name.is_empty(), refused) {
            (true, Some(code)) => (
                code,
                json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": code, "message": "no"}),
            ),
            (true, None) => (201, json!({})),
            (false, _) => (200, pods[usize::from(name.ends_with("-2"))].clone()),
        };
        let body = body.to_string();
        let head =
            format!("HTTP/1.1 {code} X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        let _ = stream.write_all((head + &body).as_bytes());
        true
    };
    Server::with(objects_of(nodes), |_| Reply::of(""), answer)
}

/// How many requests of this method were about pods of the tenant, and about how many pods.
fn requests(server: &Server, method: &str) -> usize {
    let heads = server.heads();
    let of_method = heads.iter().filter(|head| head.starts_with(&format!("{method} ")));
    of_method.filter(|head| head.contains("/namespaces/tenant/pods")).count()
}

fn words<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["test"][..], more, &MESH].concat()
}

#[test]
fn nothing_is_created_without_consent() {
    let server =
        cluster(&["a", "b"], [pod("Succeeded", &[FINE, FINE]), pod("Succeeded", &[FINE, FINE])], None);
    let output = server.run(&words(&[]));
    assert_eq!(output.code(), Some(1), "{output:?}");
    for part in [
        "creates 2 pods of image hub/validator:0.1.0 in namespace tenant, and deletes what it created:",
        "-1 on node a\n",
        "-2 on node b\n",
        "nothing was created: standard input is not a terminal to agree on; --yes agrees",
    ] {
        assert!(output.stderr.contains(part), "{part}: {output:?}");
    }
    assert_eq!((requests(&server, "post"), requests(&server, "delete")), (0, 0));
}

#[test]
fn two_pods_on_two_nodes_prove_it_and_are_deleted() {
    let fine = || pod("Succeeded", &[FINE, FINE]);
    let server = cluster(&["a", "b", "c"], [fine(), fine()], None);
    let output = server.run(&words(&["--yes"]));
    assert_eq!(output.code(), Some(0), "{output:?}");
    assert!(
        output.stdout.starts_with("a: redirected") && output.stdout.contains("\nb: redirected"),
        "{output:?}"
    );
    assert!(output.stderr.ends_with("deleted 2 pods\n"), "{output:?}");
    assert_eq!((requests(&server, "post"), requests(&server, "delete")), (2, 2));
    // On one node, one.
    let server = cluster(&["a"], [fine(), fine()], None);
    assert_eq!(server.run(&words(&["--yes"])).code(), Some(0));
    assert_eq!((requests(&server, "post"), requests(&server, "delete")), (1, 1));
}

#[test]
fn a_pod_that_is_not_redirected_is_a_problem_with_its_reason() {
    let server = cluster(&["a", "b"], [pod("Succeeded", &[FINE, FINE]), pod("Failed", &[BAD])], None);
    let output = server.run(&words(&["--yes"]));
    assert_eq!(output.code(), Some(2), "{output:?}");
    let told = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(told.contains("b: not redirected: nothing redirects traffic (no-rules)"), "{told}");
    assert!(told.contains("kubectl redirect scan --node b"), "{told}");
    let output = server.run(&words(&["-y", "-o", "json", "--image", "other:1"]));
    let document: Value = serde_json::from_str(&output.stdout).expect("JSON");
    assert_eq!(ours(&document), [""; 0], "{document:#}");
    assert_eq!(
        (&document["image"], &document["tested"][1]["outcome"]),
        (&json!("other:1"), &json!("not-redirected"))
    );
    assert_eq!(requests(&server, "delete"), 4);
}

#[test]
fn pods_are_deleted_also_after_ctrl_c_a_late_end_and_a_refusal() {
    let waits = || pod("Pending", &[]);
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let server = cluster(&["a", "b"], [waits(), waits()], None);
        let (code, log) = server.interrupted(&words(&["--yes"]), signal, |_| requests(&server, "get") > 0);
        assert_eq!(code, Some(1), "{log}");
        assert!(log.contains("interrupted"), "{log}");
        assert_eq!(requests(&server, "delete"), 2, "{log}");
    }
    let server = cluster(&["a", "b"], [waits(), waits()], None);
    let output = server.run(&words(&["--yes", "--timeout", "1ms"]));
    assert_eq!((output.code(), requests(&server, "delete")), (Some(2), 2), "{output:?}");
    assert!(output.stdout.contains("a: has not ended in time: pending"), "{output:?}");
    // The request may have succeeded nevertheless.
    let server = cluster(&["a", "b"], [waits(), waits()], Some(403));
    let output = server.run(&words(&["--yes"]));
    assert_eq!((output.code(), requests(&server, "delete")), (Some(1), 2), "{output:?}");
    assert!(output.stderr.contains("missing right: create pods in namespace tenant"), "{output:?}");
}
