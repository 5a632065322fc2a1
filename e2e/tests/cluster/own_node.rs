//! The policy that confines an agent to its own node, on a real API server: an account that its roles allow everything is refused every change but those
//! that an agent makes. All requests are dry runs, so each finds nodes and pods as they were.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use serde_json::{Value, json};
use test_support::process::{self, SHORT, until};

const POLICY: &str = include_str!("../../../deploy/own-node-only.yaml");
const LIMIT: Duration = Duration::from_secs(300);
/// How refusals by the policy begin.
const REFUSED: &str = "ValidatingAdmissionPolicy 'istio-cni-own-node-only' with binding";
const OWN: &str = "/api/v1/nodes/own";
const OTHER: &str = "/api/v1/nodes/other";
const HERE: &str = "/api/v1/namespaces/shop/pods/here";
const ELSEWHERE: &str = "/api/v1/namespaces/shop/pods/elsewhere";
const NOWHERE: &str = "/api/v1/namespaces/shop/pods/nowhere";
const PODS: &str = "/api/v1/namespaces/shop/pods";

struct Request {
    what: String,
    method: &'static str,
    path: String,
    body: Value,
    is_agents: bool,
}

fn taint(key: &str, effect: &str) -> Value {
    json!({"key": key, "effect": effect})
}

fn condition(of_type: &str, status: &str) -> Value {
    json!({"type": of_type, "status": status, "reason": "Test", "message": "m",
        "lastHeartbeatTime": "2026-11-22T00:00:00Z", "lastTransitionTime": "2026-11-22T00:00:00Z"})
}

/// A node with something in every field that is tried.
fn node_parts() -> (Value, Value) {
    let images: Vec<Value> = (0..50)
        .map(|number| json!({"names": [format!("example.com/image-{number}:1")], "sizeBytes": number}))
        .collect();
    let metadata = json!({"labels": {"kubernetes.io/os": "linux"}, "annotations": {"a": "b"}, "finalizers": ["example.com/f"]});
    let spec = json!({"taints": [taint("example.com/a", "NoSchedule"), taint("example.com/b", "NoExecute")]});
    let status = json!({
        "conditions": [condition("Ready", "True"), condition("MemoryPressure", "False"), condition("cni.istio.io/Ready", "False")],
        "addresses": [{"type": "InternalIP", "address": "192.0.2.7"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "capacity": {"cpu": "4"}, "allocatable": {"cpu": "4"}, "images": images,
    });
    (json!({"metadata": metadata, "spec": spec}), json!({"status": status}))
}

/// Changes of metadata, by either way to write an object.
fn metadata_changes() -> Vec<(&'static str, Value)> {
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "u"}]);
    vec![
        ("a label", json!({"metadata": {"labels": {"x": "y"}}})),
        ("a label called like a field", json!({"metadata": {"labels": {"labels": "y"}}})),
        ("no label", json!({"metadata": {"labels": {"kubernetes.io/os": null}}})),
        ("an annotation", json!({"metadata": {"annotations": {"x": "y"}}})),
        ("no annotation", json!({"metadata": {"annotations": null}})),
        ("a finalizer", json!({"metadata": {"finalizers": ["example.com/f", "example.com/x"]}})),
        ("no finalizer", json!({"metadata": {"finalizers": null}})),
        ("an owner", json!({"metadata": {"ownerReferences": owner}})),
    ]
}

/// Changes of a node's specification, and whether an agent makes them.
fn spec_changes() -> Vec<(&'static str, Value, bool)> {
    let (a, b) = (taint("example.com/a", "NoSchedule"), taint("example.com/b", "NoExecute"));
    let ours = |effect: &str| taint("cni.istio.io/not-ready", effect);
    let taints = |taints: &[&Value]| json!({"spec": {"taints": taints}});
    vec![
        ("our taint", taints(&[&a, &b, &ours("NoSchedule")]), true),
        ("our taint with another effect", taints(&[&ours("NoExecute"), &a, &b]), true),
        ("our taint instead of another", taints(&[&a, &ours("NoSchedule")]), false),
        ("another taint", taints(&[&a, &b, &taint("example.com/c", "NoSchedule")]), false),
        ("another taint's effect", taints(&[&a, &taint("example.com/b", "NoSchedule")]), false),
        ("no taint", json!({"spec": {"taints": null}}), false),
        ("unschedulable", json!({"spec": {"unschedulable": true}}), false),
        ("a provider's name", json!({"spec": {"providerID": "x"}}), false),
    ]
}

fn status_changes() -> Vec<(&'static str, Value, bool)> {
    let (ready, pressure) = (condition("Ready", "True"), condition("MemoryPressure", "False"));
    let ours = |status: &str| condition("cni.istio.io/Ready", status);
    let conditions = |conditions: &[&Value]| json!({"status": {"conditions": conditions}});
    vec![
        ("our condition", conditions(&[&ready, &pressure, &ours("True")]), true),
        ("no condition of ours", conditions(&[&ready, &pressure]), true),
        ("another condition", conditions(&[&condition("Ready", "False"), &pressure, &ours("False")]), false),
        ("one condition less", conditions(&[&ready, &ours("False")]), false),
        (
            "one condition more",
            conditions(&[&ready, &pressure, &ours("False"), &condition("x", "True")]),
            false,
        ),
        (
            "addresses",
            json!({"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.8"}]}}),
            false,
        ),
        (
            "daemonEndpoints",
            json!({"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 10251}}}}),
            false,
        ),
        ("no daemonEndpoints", json!({"status": {"daemonEndpoints": null}}), false),
        ("capacity", json!({"status": {"capacity": {"cpu": "5"}}}), false),
        ("images", json!({"status": {"images": []}}), false),
        ("a new field", json!({"status": {"volumesInUse": ["x"]}}), false),
    ]
}

/// Both ways to write a change: a patch, and the whole object.
fn writes(api: &ApiServer, path: &str, part: &str, changes: &[(&str, Value, bool)]) -> Result<Vec<Request>> {
    let mut requests = Vec::new();
    for (name, change, is_agents) in changes {
        let mut whole = api.read(path)?;
        merge(&mut whole, change);
        for (method, body) in [("PATCH", change.clone()), ("PUT", whole)] {
            let what = format!("{method} {path}{part}: {name}");
            requests.push(Request {
                what,
                method,
                path: format!("{path}{part}"),
                body,
                is_agents: *is_agents,
            });
        }
    }
    Ok(requests)
}

/// RFC 7396.
fn merge(into: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *into = patch.clone();
        return;
    };
    for (name, value) in fields {
        if value.is_null() {
            into.as_object_mut().map(|object| object.remove(name));
        } else {
            merge(&mut into[name], value);
        }
    }
}

/// Every request that is tried.
fn table(api: &ApiServer) -> Result<Vec<Request>> {
    let denied = |changes: Vec<(&'static str, Value)>| -> Vec<_> {
        changes.into_iter().map(|(name, change)| (name, change, false)).collect()
    };
    let elsewhere = |changes: &[(&'static str, Value, bool)]| -> Vec<_> {
        changes.iter().map(|(name, change, _)| (*name, change.clone(), false)).collect()
    };
    let nothing = [("nothing", json!({}), true)];
    let metadata = denied(metadata_changes());
    // The server itself keeps a pod's owners.
    let of_pod: Vec<_> = metadata.iter().filter(|(name, ..)| *name != "an owner").cloned().collect();
    let label = |key: &str| json!({"metadata": {"labels": {key: "true"}}});
    let annotation =
        |value: &str| json!({"metadata": {"annotations": {"ambient.istio.io/redirection": value}}});
    let repair = [
        ("the repair label", label("cni.istio.io/uninitialized"), true),
        ("ambient mode's annotation", annotation("enabled"), true),
    ];
    let of_node = [("ambient mode's annotation", annotation("enabled"), false)];
    let pod_status = [
        ("phase", json!({"status": {"phase": "Failed"}}), false),
        ("a condition", json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}), false),
        ("an address", json!({"status": {"podIP": "192.0.2.9"}}), false),
    ];
    let mut all = Vec::new();
    for (path, part, changes) in [
        (OWN, "", nothing.to_vec()),
        (OWN, "", metadata.clone()),
        (OWN, "/status", metadata.clone()),
        (OWN, "", of_node.to_vec()),
        (OWN, "", spec_changes()),
        (OWN, "/status", status_changes()),
        (OTHER, "", elsewhere(&spec_changes())),
        (OTHER, "/status", elsewhere(&status_changes())),
        (OTHER, "", metadata.clone()),
        (HERE, "/status", repair.to_vec()),
        (HERE, "/status", of_pod),
        (HERE, "/status", pod_status.to_vec()),
        (HERE, "", elsewhere(&repair)),
        (ELSEWHERE, "/status", elsewhere(&repair)),
        (NOWHERE, "/status", elsewhere(&repair)),
    ] {
        all.extend(writes(api, path, part, &changes)?);
    }
    let mut add = |method: &'static str, path: String, body: Value, is_agents: bool| {
        all.push(Request { what: format!("{method} {path}"), method, path, body, is_agents });
    };
    // Of a deletion with options, the server ignores those in the address.
    let dry = json!({"apiVersion": "v1", "kind": "DeleteOptions", "dryRun": ["All"]});
    for (pod, is_agents) in [(HERE, true), (ELSEWHERE, false), (NOWHERE, false)] {
        add("DELETE", pod.to_owned(), dry.clone(), is_agents);
    }
    add("DELETE", PODS.to_owned(), dry.clone(), false);
    for node in [OWN, OTHER] {
        add("DELETE", node.to_owned(), dry.clone(), false);
    }
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "here", "namespace": "shop"}});
    add("POST", format!("{HERE}/eviction"), eviction, false);
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "nowhere"}, "target": {"kind": "Node", "name": "own"}});
    add("POST", format!("{NOWHERE}/binding"), binding, false);
    add("POST", PODS.to_owned(), pod("new", "own"), false);
    add(
        "POST",
        "/api/v1/nodes".to_owned(),
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "new"}}),
        false,
    );
    let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e", "namespace": "shop"},
        "involvedObject": {"kind": "Pod", "name": "elsewhere", "namespace": "shop"}, "reason": "Test", "type": "Normal"});
    add("POST", "/api/v1/namespaces/shop/events".to_owned(), event, true);
    Ok(all)
}

fn pod(name: &str, node: &str) -> Value {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "labels": {"kubernetes.io/os": "linux"},
            "annotations": {"a": "b"}, "finalizers": ["example.com/f"]},
        "spec": {"containers": [{"name": "x", "image": "x"}]}});
    if !node.is_empty() {
        pod["spec"]["nodeName"] = json!(node);
    }
    pod
}

/// Sends dry runs, one after the other over one connection; for each the server's words unless it succeeds.
fn send<'r>(
    api: &ApiServer,
    token: &str,
    requests: impl IntoIterator<Item = &'r Request>,
) -> Result<Vec<Option<String>>> {
    let quoted = |text: &str| format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
    let authority = quoted(&api.ca_path().display().to_string());
    let of_request = |request: &Request| {
        let kind =
            if request.method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let lines = [
            ("cacert", authority.clone()),
            ("max-time", "30".to_owned()),
            ("request", request.method.to_owned()),
            ("header", quoted(&format!("Content-Type: {kind}"))),
            ("header", quoted(&format!("Authorization: Bearer {token}"))),
            ("data-binary", quoted(&request.body.to_string())),
            ("url", quoted(&format!("{}{}?dryRun=All", api.url(), request.path))),
        ];
        lines.map(|(name, value)| format!("{name} = {value}\n")).concat()
    };
    let sections: Vec<String> = requests.into_iter().map(of_request).collect();
    let mut curl = process::command("curl", ["--silent", "--show-error", "--fail-early", "--config", "-"]);
    let answered = process::run_with_input(&mut curl, &sections.join("next\n"), SHORT)?.ok()?.stdout;
    let answers: Vec<Value> = serde_json::Deserializer::from_str(&answered)
        .into_iter()
        .collect::<Result<_, _>>()
        .with_context(|| answered.clone())?;
    ensure!(answers.len() == sections.len(), "{} answers to {} requests", answers.len(), sections.len());
    let words = |answer: &Value| {
        let is_failure = answer["kind"] == "Status" && answer["status"] != "Success";
        is_failure.then(|| answer["message"].as_str().unwrap_or_default().to_owned())
    };
    Ok(answers.iter().map(words).collect())
}

/// Sends all requests, and lists those with an answer that is not the right one.
fn wrong(api: &ApiServer, token: &str, requests: &[Request], is_confined: bool) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for (request, answer) in requests.iter().zip(send(api, token, requests)?) {
        let is_right = match &answer {
            None => request.is_agents || !is_confined,
            Some(message) => is_confined && !request.is_agents && message.contains(REFUSED),
        };
        if !is_right {
            wrong.push(format!("{}: {}", request.what, answer.unwrap_or_else(|| "done".to_owned())));
        }
    }
    Ok(wrong)
}

/// Nodes, pods, and in a namespace the agents' account, with more rights than its roles give.
fn cluster() -> Result<ApiServer> {
    let api = ApiServer::start()?;
    let (node, status) = node_parts();
    for name in ["own", "other"] {
        let mut node = node.clone();
        merge(&mut node, &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}));
        api.create(&node)?;
        let flags =
            ["patch", "node", name, "--subresource=status", "--type=merge", "-p", &status.to_string()];
        api.kubectl(&flags)?;
    }
    api.create_namespace("shop")?;
    for (name, node) in [("here", "own"), ("elsewhere", "other"), ("nowhere", "")] {
        api.create(&pod(name, node))?;
    }
    api.apply(&json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "much"},
        "rules": [{"apiGroups": [""], "resources": ["*"], "verbs": ["*"]}]}).to_string())?;
    Ok(api)
}

/// A namespace with the agents' account, and the token of its pod on node `own`.
fn agents_token(api: &ApiServer, namespace: &str) -> Result<String> {
    api.create_namespace(namespace)?;
    api.create_service_account(namespace, "istio-cni")?;
    let account = json!({"kind": "ServiceAccount", "name": "istio-cni", "namespace": namespace});
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "much"});
    api.apply(&json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": namespace},
        "roleRef": role, "subjects": [account]}).to_string())?;
    let mut agent = pod("agent", "own");
    merge(
        &mut agent,
        &json!({"metadata": {"namespace": namespace}, "spec": {"serviceAccountName": "istio-cni"}}),
    );
    api.create(&agent)?;
    let bound = ["--bound-object-kind=Pod", "--bound-object-name=agent"];
    let args = [&["create", "token", "istio-cni", "-n", namespace][..], &bound].concat();
    Ok(api.kubectl(&args)?.stdout.trim().to_owned())
}

#[test]
fn an_agent_changes_what_agents_change_on_its_own_node_and_nothing_else() -> Result<()> {
    let api = cluster()?;
    let requests = table(&api)?;
    ensure!(requests.iter().filter(|request| request.is_agents).count() >= 10);
    for (namespace, policy) in
        [("istio-system", POLICY.to_owned()), ("mesh", POLICY.replace(":istio-system:", ":mesh:"))]
    {
        let token = agents_token(&api, namespace)?;
        // Whatever is refused below is refused by the policy alone.
        let mut failed = Vec::new();
        until("the rights to count", LIMIT, &[], || {
            Ok(send(&api, &token, &requests[..1])?[0].is_none().then_some(()))
        })?;
        failed.extend(wrong(&api, &token, &requests, false)?);
        ensure!(failed.is_empty(), "without the policy, in {namespace}:\n{}", failed.join("\n"));
        api.apply(&policy)?;
        let other = || requests.iter().filter(|request| request.path == OTHER).take(1);
        until("the policy to count", LIMIT, &[], || Ok(send(&api, &token, other())?.remove(0).map(drop)))?;
        let failed = wrong(&api, &token, &requests, true)?;
        ensure!(
            failed.is_empty(),
            "in {namespace}, {} of {}:\n{}",
            failed.len(),
            requests.len(),
            failed.join("\n")
        );
        // A token that does not name a node.
        let unbound = api.token(namespace, "istio-cni")?;
        let changes = || requests.iter().filter(|request| !request.path.contains("/events"));
        for (request, message) in changes().zip(send(&api, &unbound, changes())?) {
            let message = message.with_context(|| request.what.clone())?;
            ensure!(message.contains("token does not name its node"), "{}: {message}", request.what);
        }
        // Other accounts have what their roles give.
        let failed = wrong(&api, &agents_token(&api, &format!("{namespace}-2"))?, &requests, false)?;
        ensure!(failed.is_empty(), "another account:\n{}", failed.join("\n"));
    }
    Ok(())
}
