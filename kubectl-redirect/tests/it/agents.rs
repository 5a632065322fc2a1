//! Who is asked: the agents, and no pod of a tenant that passes itself off as one.

use serde_json::{Value, json};

use crate::server::{Call, Reply, Server};

const LABELS: [(&str, &str); 1] = [("k8s-app", "istio-cni-node")];

fn labels() -> Value {
    LABELS
        .into_iter()
        .map(|(key, value)| (key.to_owned(), json!(value)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn daemon_set(namespace: &str, name: &str, uid: &str, account: &str) -> (&'static str, Value) {
    let set = json!({"metadata": {"namespace": namespace, "name": name, "uid": uid, "labels": labels()},
        "spec": {"template": {"metadata": {"labels": labels()}, "spec": {"serviceAccountName": account, "containers": []}}}});
    ("daemonsets", set)
}

fn binding(name: &str, label: &str, namespace: &str, account: &str) -> (&'static str, Value) {
    let binding = json!({"metadata": {"name": name, "labels": {"app": label}},
        "roleRef": {"kind": "ClusterRole", "name": name, "apiGroup": "rbac.authorization.k8s.io"},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]});
    ("clusterrolebindings", binding)
}

/// A pod with the agents' labels and container, of the owner with this UID, if any.
fn pod(namespace: &str, name: &str, owner: Option<&str>, account: &str) -> (&'static str, Value) {
    let owners: Vec<Value> = owner
        .into_iter()
        .map(|uid| json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "istio-cni-node", "uid": uid, "controller": true}))
        .collect();
    let pod = json!({"kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": labels(), "ownerReferences": owners},
        "spec": {"nodeName": "n", "serviceAccountName": account, "containers": [{"name": "install-cni", "image": format!("of/{namespace}")}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "install-cni", "image": "i", "imageID": "i", "ready": true,
            "restartCount": 0, "state": {"running": {}}}]}});
    ("pods", pod)
}

/// A node with a pod `tenant/cart` of the mesh, and what comes first in lists.
fn cluster(first: Vec<(&'static str, Value)>, rest: Vec<(&'static str, Value)>) -> Server {
    let cart = json!({"kind": "Pod", "metadata": {"namespace": "tenant", "name": "cart"}, "spec": {"nodeName": "n"}});
    let node = json!({"metadata": {"name": "n"}, "status": {"nodeInfo": {"operatingSystem": "linux"}}});
    let between = vec![("nodes", node), ("pods", cart)];
    Server::start([first, between, rest].concat(), |call| {
        let is_agents = call.container.starts_with("mesh/agent/");
        let state = if is_agents { "not-redirected" } else { "verified" };
        match call.words.first().map(String::as_str) {
            Some("scan") => Reply::of(
                json!({"version": 1, "pods": [{"subject": "tenant/cart", "state": state}]}).to_string(),
            ),
            _ => Reply::of(format!("{}\n", call.container)),
        }
    })
}

fn release() -> Vec<(&'static str, Value)> {
    vec![
        binding("istio-cni", "istio-cni", "mesh", "istio-cni"),
        daemon_set("mesh", "istio-cni-node", "real", "istio-cni"),
        pod("mesh", "agent", Some("real"), "istio-cni"),
    ]
}

/// Every command that asks an agent.
const COMMANDS: [&[&str]; 6] = [
    &["scan", "-o", "json"],
    &["pod", "tenant/cart"],
    &["verify", "tenant/cart"],
    &["trace", "tenant/cart", "--to", "192.0.2.1:80"],
    &["bundle", "tenant/cart"],
    &["why", "foreign-rule"],
];

/// Every command, run once; only the real agent was asked, if any.
fn all_ask(server: &Server, more: &[&str]) {
    for words in COMMANDS {
        let output = server.run(&[words, more].concat());
        assert!(output.code() != Some(1), "{words:?}: {output:?}");
        if words[0] == "scan" {
            assert!(output.stdout.contains("\"redirected\": 0") && output.code() == Some(2), "{output:?}");
        }
    }
    let calls = server.calls();
    let wrong: Vec<&Call> = calls.iter().filter(|call| call.container != "mesh/agent/install-cni").collect();
    assert!(wrong.is_empty() && calls.len() == COMMANDS.len(), "{calls:?}");
}

#[test]
fn no_pod_of_a_tenant_answers_for_a_node() {
    let tenants = vec![
        pod("tenant", "plain", None, "istio-cni"),
        pod("tenant", "owned", Some("fake"), "istio-cni"),
        pod("tenant", "forged", Some("real"), "istio-cni"),
        daemon_set("tenant", "istio-cni-node", "fake", "istio-cni"),
        // Others in the release's own namespace are not the agents either.
        pod("mesh", "plain", None, "istio-cni"),
        pod("mesh", "other-account", Some("real"), "default"),
        // A binding without the chart's label says nothing.
        binding("other", "other", "tenant", "istio-cni"),
    ];
    all_ask(&cluster(tenants.clone(), release()), &[]);
    all_ask(&cluster(tenants.clone(), release()), &["--agent-namespace", "mesh"]);
    // Where the real agent has no pod, nobody answers in its place.
    let without_agent = cluster(tenants, release().into_iter().filter(|(of, _)| *of != "pods").collect());
    for words in COMMANDS {
        let output = without_agent.run(words);
        assert!(
            output.code() == Some(1) && output.stderr.contains("no pod of DaemonSet mesh/istio-cni-node"),
            "{words:?}: {output:?}"
        );
    }
    assert_eq!(without_agent.calls(), []);
}

#[test]
fn a_tenant_alone_is_no_release() {
    let tenant = || {
        vec![
            daemon_set("tenant", "istio-cni-node", "fake", "istio-cni"),
            pod("tenant", "agent", Some("fake"), "istio-cni"),
        ]
    };
    let server = cluster(tenant(), Vec::new());
    let output = server.run(&["scan"]);
    assert!(
        output.code() == Some(1)
            && output.stderr.contains("no ClusterRoleBinding with the label app=istio-cni"),
        "{output:?}"
    );
    // The binding of a release that is gone, whose namespace has a DaemonSet with another account.
    let leftover = vec![
        binding("istio-cni", "istio-cni", "tenant", "istio-cni"),
        daemon_set("tenant", "x", "x", "default"),
    ];
    let server = cluster(Vec::new(), leftover);
    let output = server.run(&["pod", "tenant/cart"]);
    assert!(
        output.code() == Some(1) && output.stderr.contains("no DaemonSet of pods with the label"),
        "{output:?}"
    );
    assert_eq!(server.calls(), []);
}

#[test]
fn of_several_candidates_none_is_chosen() {
    let second = vec![
        binding("istio-cni-canary", "istio-cni", "canary", "istio-cni"),
        daemon_set("canary", "istio-cni-node", "second", "istio-cni"),
        pod("canary", "agent", Some("second"), "istio-cni"),
    ];
    let server = cluster(second, release());
    for words in COMMANDS {
        let output = server.run(words);
        let names_both =
            output.stderr.contains("DaemonSet canary/istio-cni-node, DaemonSet mesh/istio-cni-node");
        assert!(
            output.code() == Some(1) && names_both && output.stderr.contains("--agent-namespace"),
            "{words:?}: {output:?}"
        );
    }
    assert_eq!(server.calls(), []);
    all_ask(&server, &["--agent-namespace", "mesh"]);
    // Two in one namespace.
    let server = cluster(vec![daemon_set("mesh", "copy", "copy", "istio-cni")], release());
    let output = server.run(&["scan", "--agent-namespace", "mesh"]);
    assert!(output.code() == Some(1) && output.stderr.contains("DaemonSet mesh/copy"), "{output:?}");
}

/// The agents may not read events, so only the user who asks can learn why a pod does not start.
#[test]
fn a_pod_that_does_not_start_is_a_finding_with_its_reason() {
    let pod_of = |uid: &str| json!({"kind": "Pod", "metadata": {"namespace": "tenant", "name": "new", "uid": uid}, "spec": {"nodeName": "n"}, "status": {"phase": "Pending"}});
    let event = |uid: &str, reason: &str, message: &str| {
        let about = json!({"kind": "Pod", "namespace": "tenant", "name": "new", "uid": uid});
        (
            "events",
            json!({"metadata": {"namespace": "tenant"}, "involvedObject": about, "reason": reason, "message": message,
            "lastTimestamp": null}),
        )
    };
    let events = |uid: &str| {
        vec![event(uid, "FailedCreatePodSandBox", "may not read pods (403)"), event(uid, "Pulled", "fine")]
    };
    let scanned = |events: Vec<(&'static str, Value)>| {
        let node = json!({"metadata": {"name": "n"}, "status": {"nodeInfo": {"operatingSystem": "linux"}}});
        let mut objects = vec![
            ("nodes", node),
            ("pods", pod_of("u-1")),
            daemon_set("mesh", "istio-cni-node", "u", "istio-cni"),
        ];
        objects.extend([
            binding("istio-cni", "istio-cni", "mesh", "istio-cni"),
            pod("mesh", "agent", Some("u"), "istio-cni"),
        ]);
        let server = Server::start([objects, events].concat(), |_| {
            let unseen =
                json!({"version": 1, "findings": [], "pods": [{"subject": "tenant/new", "state": "unseen"}]});
            Reply::of(unseen.to_string())
        });
        let scan = server.run(&["scan"]);
        // The agent knows nothing of it.
        (scan, server.run(&["pod", "tenant/new"]))
    };
    let (found, of_pod) = scanned(events("u-1"));
    let report: Value = serde_json::from_str(&of_pod.stdout).expect("JSON");
    let finding = &report["findings"][0];
    assert_eq!(
        (of_pod.code(), &finding["code"], &finding["seen"][0]),
        (Some(2), &json!("not-set-up"), &json!("may not read pods (403)")),
        "{of_pod:?}"
    );
    assert_eq!(found.status.code(), Some(2), "{}{}", found.stdout, found.stderr);
    let words = found.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("1 not started") && words.contains("tenant/new - may not read pods (403)"),
        "{words}"
    );
    for other in [Vec::new(), events("u-0")] {
        let (fine, of_pod) = scanned(other);
        assert_eq!(of_pod.code(), Some(0), "{of_pod:?}");
        assert_eq!(fine.status.code(), Some(0), "{}{}", fine.stdout, fine.stderr);
    }
}
