//! Which pods a node needs: the ConfigMap of Istio's first taint controller, or the agent's DaemonSet. Pure.

use anyhow::{anyhow, bail};
use cni_core::selector::{LabelSelector, split};
use cni_core::yaml;
use serde::Deserialize;
use serde_json::Value;

/// How many there may be: each is a watch.
const MOST: usize = 32;

/// Pods, of which a node needs one that is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// Their namespace.
    pub namespace: String,
    /// Their labels.
    pub selector: LabelSelector,
}

#[derive(Deserialize)]
struct SelectorEntry {
    /// Whatever it is: some names are booleans to YAML.
    #[serde(default)]
    name: Value,
    selector: String,
    #[serde(default)]
    namespace: String,
}

/// What a ConfigMap's data name. Each part of a selector is a requirement of its own; `own` is the namespace where none is named.
///
/// # Errors
/// What cannot be read.
pub fn read(data: &Value, own: &str) -> anyhow::Result<Vec<Requirement>> {
    let mut requirements = Vec::new();
    for (key, text) in data.as_object().into_iter().flatten() {
        let no_list =
            |what: String| anyhow!("key {key:?} is not a list of name, selector and namespace: {what}");
        let text = text.as_str().ok_or_else(|| no_list("it is not text".to_owned()))?;
        let documents = Value::Array(yaml::documents(text).map_err(no_list)?);
        let lists =
            Vec::<Vec<SelectorEntry>>::deserialize(documents).map_err(|error| no_list(error.to_string()))?;
        let entries = lists.into_iter().flatten();
        for SelectorEntry { name, selector, namespace } in entries {
            let wrong = |what: String| anyhow!("key {key:?}, {name}: {what}");
            let parts = split(&selector);
            if parts.is_empty() {
                return Err(wrong("the selector is empty".to_owned()));
            }
            for part in parts {
                let selector = LabelSelector::parse(part).map_err(|error| wrong(error.to_string()))?;
                let namespace = if namespace.is_empty() { own.to_owned() } else { namespace.clone() };
                let requirement = Requirement { namespace, selector };
                if !requirements.contains(&requirement) {
                    requirements.push(requirement);
                }
            }
        }
    }
    match requirements.len() {
        0 => bail!("it names no pods, so every node would count as ready"),
        count if count > MOST => bail!("it names {count} selectors, and {MOST} are the most"),
        _ => Ok(requirements),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn names(data: &Value) -> anyhow::Result<Vec<(String, String)>> {
        let read = read(data, "own")?;
        Ok(read.into_iter().map(|one| (one.namespace, one.selector.as_str().to_owned())).collect())
    }

    fn pair(namespace: &str, selector: &str) -> (String, String) {
        (namespace.to_owned(), selector.to_owned())
    }

    #[test]
    fn each_part_of_each_selector_of_each_key_is_needed() {
        let data = json!({
            "istio-cni": "- name: istio-cni\n  selector: k8s-app=istio-cni-node, tier in (a,b)\n  namespace: kube-system\n",
            "more": "- {name: other, selector: app=x}\n- {name: again, selector: app=x, namespace: own}\n",
        });
        assert_eq!(
            names(&data).expect("requirements"),
            [
                pair("kube-system", "k8s-app=istio-cni-node"),
                pair("kube-system", "tier in (a,b)"),
                pair("own", "app=x"),
            ]
        );
    }

    #[test]
    fn what_cannot_be_read_is_an_error_and_not_a_ready_node() {
        let many: String =
            (0..40).map(|number| format!("- {{name: n, selector: app=a{number}}}\n")).collect();
        for (data, part) in [
            (json!({}), "names no pods"),
            (Value::Null, "names no pods"),
            (json!({"a": "[]"}), "names no pods"),
            (json!({"a": "- {name: n"}), "\"a\" is not a list"),
            (json!({"a": "text"}), "\"a\" is not a list"),
            (json!({"a": "- {name: n}"}), "selector"),
            (json!({"a": "- {name: n, selector: ''}"}), "empty"),
            (json!({"a": "- {name: n, selector: 'a b'}"}), "is not a condition"),
            (json!({"a": many}), "40 selectors"),
        ] {
            let error = names(&data).expect_err("no requirements").to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,80}") {
            let _ = read(&json!({"a": text}), "own");
        }
    }
}
