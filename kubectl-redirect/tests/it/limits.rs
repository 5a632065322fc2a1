//! What a cluster and an agent send: escaped for the terminal, limited in size and time.

use std::io::Write as _;

use serde_json::{Value, json};

use crate::server::{Reply, Server};

/// Clipboards, clearing, C1's way to begin a sequence, a line of its own, other directions.
const HOSTILE: &str = "a\u{1b}]52;c;eA==\u{7}\u{1b}[2Jb\u{9b}31m\rc\nFORGED\u{202e}e\u{2066}f\u{7f}";

fn is_safe(text: &str) -> bool {
    !text.chars().any(|c| {
        (c.is_control() && c != '\n') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    })
}

fn objects() -> Vec<(&'static str, Value)> {
    let labels = json!({"k8s-app": "istio-cni-node"});
    let spec = json!({"nodeName": "n", "containers": [{"name": "install-cni", "image": HOSTILE}]});
    vec![
        (
            "clusterrolebindings",
            json!({"metadata": {"name": "istio-cni", "labels": {"app": "istio-cni"}},
                "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": "mesh"}]}),
        ),
        (
            "daemonsets",
            json!({"metadata": {"namespace": "mesh", "name": "agent", "uid": "u"},
            "spec": {"template": {"metadata": {"labels": labels}, "spec": {"containers": []}}}}),
        ),
        (
            "pods",
            json!({"metadata": {"namespace": "mesh", "name": "agent", "labels": labels,
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "agent", "uid": "u", "controller": true}]},
            "spec": spec, "status": {"phase": "Running", "containerStatuses": [{"name": "install-cni", "image": "i", "imageID": "i",
                "ready": true, "restartCount": 0, "state": {"running": {}}}]}}),
        ),
        (
            "pods",
            json!({"kind": "Pod", "metadata": {"namespace": "shop", "name": "cart"}, "spec": {"nodeName": "n"}}),
        ),
        ("nodes", json!({"metadata": {"name": "n"}})),
    ]
}

fn finding() -> Value {
    json!({"code": HOSTILE, "severity": "error", "meaning": HOSTILE, "remedy": HOSTILE})
}

#[test]
fn what_agents_say_does_nothing_to_a_terminal() {
    let server = Server::start(objects(), |call| match call.words.first().map(String::as_str) {
        Some("scan") => Reply::of(
            json!({"version": 1, "node": [finding()], "pods": [{"subject": HOSTILE,
            "state": HOSTILE, "consequences": [HOSTILE], "findings": [finding()]}]})
            .to_string(),
        ),
        _ => Reply::Ended { stdout: HOSTILE.into(), stderr: HOSTILE.into(), code: 1 },
    });
    let scan = server.run(&["scan"]);
    assert!(is_safe(&scan.stdout) && scan.stdout.contains("\\u{1b}]52"), "{scan:?}");
    assert!(!scan.stdout.lines().any(|line| line.trim_start().starts_with("FORGED")), "{scan:?}");
    let json = server.run(&["scan", "-o", "json"]);
    let document: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert!(is_safe(&json.stdout) && document["pods"][0]["code"] == HOSTILE, "{json:?}");
    for words in [
        &["pod", "shop/cart"][..],
        &["trace", "shop/cart", "--netns", "/x"],
        &["verify", "shop/cart"],
        &["bundle", "--node", "n"],
        &["why"],
    ] {
        let output = server.run(words);
        assert!(
            is_safe(&output.stdout) && is_safe(&output.stderr) && output.code() == Some(1),
            "{words:?}: {output:?}"
        );
    }
}

#[test]
fn what_the_api_server_says_does_nothing_to_a_terminal() {
    let status = json!({"kind": "Status", "status": "Failure", "code": 500, "message": HOSTILE.repeat(1000)})
        .to_string();
    let server = Server::with(
        objects(),
        |_| Reply::of(""),
        move |target, stream| {
            let is_it = target.contains("/pods");
            if is_it {
                let head = format!(
                    "HTTP/1.1 500 X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
                    status.len()
                );
                let _ = stream.write_all((head + &status).as_bytes());
            }
            is_it
        },
    );
    for words in [&["scan"][..], &["pod", "shop/cart"]] {
        let output = server.run(words);
        assert!(output.code() == Some(1) && is_safe(&output.stderr), "{output:?}");
        assert!(output.stderr.lines().count() == 1 && output.stderr.len() < 10_000, "{output:?}");
    }
}

#[test]
fn an_agent_that_does_not_end_is_given_up_in_time() {
    let server = Server::start(objects(), |_| Reply::Endless(b"begin\n".to_vec()));
    for words in [&["pod", "shop/cart"][..], &["verify", "shop/cart"], &["bundle", "--node", "n"], &["why"]] {
        let output = server.run(&[words, &["--timeout", "500ms"]].concat());
        let says_so = output.stderr.contains("no response within 500ms; --timeout gives it longer");
        assert!(output.code() == Some(1) && says_so, "{words:?}: {output:?}");
    }
    let scan = server.run(&["scan", "--timeout", "500ms"]);
    assert!(scan.code() == Some(1) && scan.stdout.contains("no response within 500ms"), "{scan:?}");
}

#[test]
fn an_answer_beyond_its_limit_ends_the_command() {
    let server = Server::start(objects(), |_| Reply::Flood(vec![b'x'; 1 << 20]));
    // How long it takes to receive that much is not what is tested.
    for words in
        [&["bundle", "--node", "n", "--timeout", "10m"][..], &["verify", "shop/cart", "--timeout", "10m"]]
    {
        let output = server.run(words);
        assert!(
            output.code() == Some(1) && output.stderr.contains("the answer has more than"),
            "{words:?}: {output:?}"
        );
    }
}

#[test]
fn answers_of_the_api_server_are_lists_within_limits() {
    let answering = |body: &'static str| {
        Server::with(
            objects(),
            |_| Reply::of(""),
            move |target, stream| {
                let is_it = target.contains("/nodes");
                if is_it {
                    let head = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
                    let mut sent = stream.write_all((head.to_owned() + body).as_bytes());
                    while body.is_empty() && sent.is_ok() {
                        sent = stream.write_all(&[b' '; 64 << 10]);
                    }
                }
                is_it
            },
        )
    };
    for (body, words) in [
        ("{}", "the response is not a NodeList: it has no kind"),
        ("{\"kind\":\"Status\"}", "its kind is \"Status\""),
        ("{\"kind\":\"NodeList\",\"metadata\":{}}", "it has no items"),
        ("{\"kind\":\"NodeList\",\"metadata\":{\"continue\":\"x\"},\"items\":[]}", "more than 1000 pages"),
        ("", "the answer has more than"),
    ] {
        let output = answering(body).run(&["scan"]);
        assert!(output.code() == Some(1) && output.stderr.contains(words), "{words}: {output:?}");
    }
}
