//! The policy that keeps the proxy's user and group for the proxy, on a real API server: pods of the mesh whose other containers say that they run as
//! it are refused, and no others.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use serde_json::{Value, json};
use test_support::process::until;

const POLICY: &str = include_str!("../../../deploy/proxy-user-only.yaml");
const LIMIT: Duration = Duration::from_secs(300);
const REFUSED: &str = "ValidatingAdmissionPolicy 'istio-cni-proxy-user' with binding";

/// A container with a security context.
fn container(name: &str, context: &Value) -> Value {
    json!({"name": name, "image": "x", "securityContext": context})
}

/// A pod of the mesh with these fields of its spec, and its proxy beside the containers there.
fn mesh_pod(name: &str, proxy: &Value, spec: &Value) -> Value {
    let mut spec = spec.clone();
    let proxy = container("istio-proxy", proxy);
    match spec["containers"].as_array_mut() {
        Some(containers) => containers.push(proxy),
        None => spec["containers"] = json!([proxy]),
    }
    json!({"apiVersion": "v1", "kind": "Pod", "spec": spec,
        "metadata": {"name": name, "namespace": "shop", "annotations": {"sidecar.istio.io/status": "{}"}}})
}

/// Pods, and what the policy finds in each.
fn pods() -> Vec<(Value, Option<&'static str>)> {
    let injected = json!({"runAsUser": 1337, "runAsGroup": 1337});
    let app = |context: Value| json!({"containers": [container("app", &context)]});
    let pod_level = |context: Value, app: Value| json!({"securityContext": context, "containers": [container("app", &app)]});
    let init = |restarts: &str| {
        let mut init = container("early", &json!({"runAsUser": 1337, "runAsGroup": 1337}));
        if !restarts.is_empty() {
            init["restartPolicy"] = json!(restarts);
        }
        json!({"initContainers": [init], "containers": [container("app", &json!({}))]})
    };
    let mut outside = mesh_pod("p", &injected, &app(json!({"runAsUser": 1337})));
    outside["metadata"]["annotations"] = json!({"a": "b"});
    let mut native = mesh_pod("p", &json!({}), &app(json!({"runAsGroup": 2000})));
    native["spec"]["containers"].as_array_mut().expect("containers").pop();
    let mut behind = native.clone();
    let early = |name: &str| container(name, &json!({"runAsUser": 1337}));
    let proxy =
        json!({"name": "istio-proxy", "image": "x", "restartPolicy": "Always", "securityContext": injected});
    let of_init = |behind: &mut Value, all: Value| behind["spec"]["initContainers"] = all;
    of_init(&mut behind, json!([proxy, early("late")]));
    let mut before = behind.clone();
    of_init(&mut before, json!([early("first"), proxy]));
    native["spec"]["initContainers"] = json!([{"name": "istio-proxy", "image": "x", "restartPolicy": "Always", "securityContext": {"runAsUser": 2000, "runAsGroup": 2000}}]);
    let in_mesh = |spec: Value| mesh_pod("p", &injected, &spec);
    vec![
        (in_mesh(app(json!({}))), None),
        (in_mesh(app(json!({"runAsUser": 1000, "runAsGroup": 1000}))), None),
        (in_mesh(app(json!({"runAsUser": 1337}))), Some("container app runs as user 1337")),
        (
            in_mesh(app(json!({"runAsUser": 1000, "runAsGroup": 1337}))),
            Some("container app runs as group 1337"),
        ),
        (in_mesh(pod_level(json!({"runAsUser": 1337}), json!({}))), Some("container app runs as user 1337")),
        (
            in_mesh(pod_level(json!({"runAsGroup": 1337}), json!({"runAsUser": 1}))),
            Some("container app runs as group 1337"),
        ),
        (in_mesh(pod_level(json!({"runAsUser": 1337}), json!({"runAsUser": 1}))), None),
        // The kernel's owner match knows neither.
        (in_mesh(pod_level(json!({"fsGroup": 1337, "supplementalGroups": [1337]}), json!({}))), None),
        (in_mesh(init("")), None),
        (in_mesh(init("Always")), Some("container early runs as user 1337")),
        // The proxy's user is what the proxy's container says.
        (
            mesh_pod("p", &json!({"runAsUser": 2000}), &app(json!({"runAsUser": 2000}))),
            Some("container app runs as user 2000"),
        ),
        (mesh_pod("p", &json!({"runAsUser": 2000}), &app(json!({"runAsUser": 1337}))), None),
        (
            mesh_pod("p", &json!({"runAsUser": 0}), &app(json!({"runAsUser": 1337}))),
            Some("container app runs as user 1337"),
        ),
        (
            mesh_pod("p", &json!({}), &app(json!({"runAsGroup": 1337}))),
            Some("container app runs as group 1337"),
        ),
        (native, Some("container app runs as group 2000")),
        (behind, Some("container late runs as user 1337")),
        (before, None),
        (outside, None),
    ]
}

/// What the server says of a pod that it is asked to create; none if it would.
fn refusal(api: &ApiServer, pod: &Value) -> Result<Option<String>> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("pod.json");
    fs::write(&file, pod.to_string())?;
    let args = ["create", "--dry-run=server", "-f", &file.display().to_string()];
    let done = api.kubectl_as(&api.admin_kubeconfig(), &args)?;
    Ok((!done.status.success()).then_some(done.stderr))
}

#[test]
fn only_the_proxy_has_its_user_and_group_in_pods_of_the_mesh() -> Result<()> {
    let api = ApiServer::start()?;
    api.create_namespace("shop")?;
    let pods = pods();
    for (pod, _) in &pods {
        ensure!(refusal(&api, pod)?.is_none(), "without the policy: {pod}");
    }
    api.apply(POLICY)?;
    until("the policy to count", LIMIT, &[], || Ok(refusal(&api, &pods[2].0)?.map(drop)))?;
    for (pod, wanted) in &pods {
        let refusal = refusal(&api, pod)?;
        match (wanted, &refusal) {
            (None, None) => {}
            (Some(words), Some(said)) if said.contains(words) && said.contains(REFUSED) => {}
            _ => anyhow::bail!("wanted {wanted:?}, received {refusal:?}: {pod}"),
        }
    }
    Ok(())
}

#[test]
fn a_container_that_comes_later_is_no_way_around() -> Result<()> {
    let api = ApiServer::start()?;
    api.create_namespace("shop")?;
    api.create(&mesh_pod(
        "web",
        &json!({"runAsUser": 1337}),
        &json!({"containers": [container("app", &json!({}))]}),
    ))?;
    // One from before the policy keeps getting others.
    api.create(&mesh_pod(
        "old",
        &json!({}),
        &json!({"containers": [container("app", &json!({"runAsUser": 1337}))]}),
    ))?;
    let folder = tempfile::tempdir()?;
    let debug = |pod: &str, name: &str, user: u32| -> Result<Option<String>> {
        let file = folder.path().join(format!("{name}.json"));
        fs::write(&file, json!({"securityContext": {"runAsUser": user}}).to_string())?;
        let custom = format!("--custom={}", file.display());
        let name = format!("--container={name}");
        let args =
            ["-n", "shop", "debug", pod, "--image=x", "--profile=general", "--attach=false", &name, &custom];
        let done = api.kubectl_as(&api.admin_kubeconfig(), &args)?;
        Ok((!done.status.success()).then_some(done.stderr))
    };
    ensure!(debug("web", "before", 1337)?.is_none());
    api.apply(POLICY)?;
    let mut tries = 0;
    until("the policy to count", LIMIT, &[], || {
        tries += 1;
        Ok(debug("old", &format!("try-{tries}"), 1337)?.map(drop))
    })?;
    let said = debug("old", "late", 1337)?.context("it is allowed")?;
    ensure!(said.contains("runs as user 1337") && said.contains(REFUSED), "{said}");
    // What is there already hinders no other.
    for pod in ["old", "web"] {
        let said = debug(pod, "harmless", 1000)?;
        ensure!(said.is_none(), "{pod}: {said:?}");
    }
    Ok(())
}
