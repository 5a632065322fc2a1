//! From a pod as the API server or a manifest has it to the facts a decision depends on.

use crate::fields::Reader;
use redirect_core::pod::{PROXY_CONTAINER, PodFacts, ProxyContainer};
use serde_json::Value;
use std::collections::BTreeMap;

/// Takes from a pod what a decision depends on.
///
/// # Errors
/// Everything of the wrong type among it, each with its field.
pub fn pod_facts(pod: &Value) -> Result<PodFacts, Vec<String>> {
    let mut reader = Reader::default();
    let mut facts = PodFacts::default();
    if pod.as_object().is_none() {
        return Err(vec![format!("pod: is {}, not an object", crate::fields::kind(pod))]);
    }
    if let Some(kind) = reader.string("kind", pod.get("kind"))
        && kind != "Pod"
    {
        reader.problem(format!("kind: {kind:?} is not Pod"));
    }
    let metadata = pod.get("metadata");
    if reader.object("metadata", metadata).is_some() {
        let field = |name: &str| metadata.and_then(|metadata| metadata.get(name));
        facts.labels = string_map("metadata.labels", field("labels"), &mut reader);
        facts.annotations = string_map("metadata.annotations", field("annotations"), &mut reader);
    }
    match reader.object("spec", pod.get("spec")) {
        Some(spec) => {
            // In this order, because a later istio-proxy wins over an earlier one.
            for list in ["initContainers", "containers"] {
                containers(&format!("spec.{list}"), spec.get(list), &mut facts, &mut reader);
            }
        }
        None if pod.get("spec").is_none_or(Value::is_null) => reader.problem("spec: missing".to_owned()),
        None => {}
    }
    inherit_ids(pod, &mut facts, &mut reader);
    let problems = reader.into_problems();
    if problems.is_empty() { Ok(facts) } else { Err(problems) }
}

/// What the container's securityContext does not say, the pod's does.
fn inherit_ids(pod: &Value, facts: &mut PodFacts, reader: &mut Reader) {
    let context = pod.get("spec").and_then(|spec| spec.get("securityContext"));
    let (user, group) = ids("spec", context, reader);
    if let Some(proxy) = &mut facts.proxy {
        proxy.run_as_user = proxy.run_as_user.or(user);
        proxy.run_as_group = proxy.run_as_group.or(group);
    }
}

/// `runAsUser` and `runAsGroup` of a securityContext.
fn ids(path: &str, context: Option<&Value>, reader: &mut Reader) -> (Option<i64>, Option<i64>) {
    reader.object(&format!("{path}.securityContext"), context);
    let mut id = |name: &str| {
        let field = context.and_then(|context| context.get(name));
        reader.integer(&format!("{path}.securityContext.{name}"), field)
    };
    (id("runAsUser"), id("runAsGroup"))
}

fn containers(path: &str, list: Option<&Value>, facts: &mut PodFacts, reader: &mut Reader) {
    for (index, item) in reader.list(path, list).iter().enumerate() {
        let path = format!("{path}[{index}]");
        if reader.object(&path, Some(item)).is_none() {
            continue;
        }
        match reader.string(&format!("{path}.name"), item.get("name")) {
            Some(name) => {
                facts.containers.insert(name.to_owned());
                if name == PROXY_CONTAINER {
                    facts.proxy = Some(proxy(&path, item, reader));
                }
            }
            None if item.get("name").is_none_or(Value::is_null) => {
                reader.problem(format!("{path}.name: missing"));
            }
            None => {}
        }
    }
}

fn proxy(path: &str, container: &Value, reader: &mut Reader) -> ProxyContainer {
    let (run_as_user, run_as_group) = ids(path, container.get("securityContext"), reader);
    let args = reader.strings(&format!("{path}.args"), container.get("args"));
    let mut env = BTreeMap::new();
    for (index, item) in reader.list(&format!("{path}.env"), container.get("env")).iter().enumerate() {
        let path = format!("{path}.env[{index}]");
        if reader.object(&path, Some(item)).is_none() {
            continue;
        }
        let value = reader.string(&format!("{path}.value"), item.get("value")).unwrap_or_default();
        if let Some(name) = reader.string(&format!("{path}.name"), item.get("name")) {
            env.insert(name.to_owned(), value.to_owned());
        }
    }
    let mut proxy = ProxyContainer::default();
    (proxy.args, proxy.env) = (args, env);
    (proxy.run_as_user, proxy.run_as_group) = (run_as_user, run_as_group);
    proxy
}

fn string_map(path: &str, value: Option<&Value>, reader: &mut Reader) -> BTreeMap<String, String> {
    let mut map = BTreeMap::new();
    for (key, value) in reader.object(path, value).into_iter().flatten() {
        let field = format!("{path}[{key:?}]");
        // The API server never says null here; a manifest may, and means an empty text.
        let text = if value.is_null() { Some("") } else { reader.string(&field, Some(value)) };
        map.extend(text.map(|text| (key.clone(), text.to_owned())));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_is_read() {
        let pod = json!({"kind": "Pod", "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}, "uid": 5},
            "spec": {"initContainers": [{"name": "istio-proxy", "args": ["x"]}], "containers": [{"name": "app", "env": 7},
            {"name": "istio-proxy", "args": ["proxy", "sidecar"], "securityContext": {"runAsUser": 1338},
             "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {}}]}]}});
        let facts = pod_facts(&pod).unwrap();
        assert_eq!(facts.containers.iter().collect::<Vec<_>>(), ["app", "istio-proxy"]);
        let proxy = facts.proxy.unwrap();
        assert_eq!(
            (proxy.args, proxy.run_as_user, proxy.run_as_group),
            (vec!["proxy".into(), "sidecar".into()], Some(1338), None)
        );
        assert_eq!(proxy.env, BTreeMap::from([("A".into(), "1".into()), ("B".into(), String::new())]));
        assert_eq!((&facts.labels["a"], &facts.annotations["c"]), (&"b".to_owned(), &"d".to_owned()));
    }

    #[test]
    fn who_runs_the_proxy_is_said_by_its_container_else_by_the_pod() {
        let read = |pod: Value, container: Value| {
            let proxy = json!({"name": "istio-proxy", "securityContext": container});
            let facts = pod_facts(&json!({"spec": {"securityContext": pod, "containers": [proxy]}})).unwrap();
            let proxy = facts.proxy.unwrap();
            (proxy.run_as_user, proxy.run_as_group)
        };
        let pod = json!({"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3});
        assert_eq!(read(pod.clone(), json!(null)), (Some(1), Some(2)));
        assert_eq!(read(pod.clone(), json!({"runAsUser": 7})), (Some(7), Some(2)));
        // 0 is said as well; it counts as unset later on.
        assert_eq!(read(pod, json!({"runAsUser": 0, "runAsGroup": 8})), (Some(0), Some(8)));
        assert_eq!(read(json!(null), json!({"runAsGroup": 8})), (None, Some(8)));
    }

    #[test]
    fn every_problem_names_its_field() {
        let pod = json!({"kind": "Job", "metadata": {"labels": ["a"], "annotations": {"x\n": 5}},
            "spec": {"securityContext": {"runAsUser": "x"}, "containers": [{"name": "istio-proxy", "args": "proxy", "env": [{"name": 1}, 2],
            "securityContext": {"runAsUser": "root", "runAsGroup": 1.5}}, {}, "x"], "initContainers": {}}});
        let problems = pod_facts(&pod).unwrap_err();
        let fields: Vec<&str> = problems.iter().filter_map(|problem| problem.split(": ").next()).collect();
        assert_eq!(
            fields,
            [
                "kind",
                "metadata.labels",
                "metadata.annotations[\"x\\n\"]",
                "spec.initContainers",
                "spec.containers[0].securityContext.runAsUser",
                "spec.containers[0].securityContext.runAsGroup",
                "spec.containers[0].args",
                "spec.containers[0].env[0].name",
                "spec.containers[0].env[1]",
                "spec.containers[1].name",
                "spec.containers[2]",
                "spec.securityContext.runAsUser",
            ]
        );
        assert_eq!(pod_facts(&json!({})), Err(vec!["spec: missing".to_owned()]));
        assert!(pod_facts(&json!([])).is_err());
    }
}
