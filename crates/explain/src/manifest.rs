//! Pods from the text of a manifest.

mod stream;

use std::net::IpAddr;

use cni_core::pod_name::PodName;
use cni_core::yaml;
use redirect_core::pod::PodFacts;
use redirect_core::pod_json::PodJsonErrors;
use serde_json::Value;

pub use stream::each_of_json;

/// A pod, as far as its plan depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its name.
    pub name: PodName,
    /// What the decision depends on.
    pub facts: PodFacts,
    /// Its addresses, as far as they are known.
    pub addresses: Vec<IpAddr>,
    /// Whether it is on the host's network: then no plugin is asked for it.
    pub host_network: bool,
}

impl Pod {
    /// Reads a pod.
    ///
    /// # Errors
    /// Everything wrong with the fields that a decision depends on.
    pub fn from_json(pod: &Value) -> Result<Self, PodJsonErrors> {
        let facts = PodFacts::from_json(pod)?;
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        let name = PodName {
            namespace: text("/metadata/namespace")
                .filter(|name| !name.is_empty())
                .unwrap_or_else(|| "default".into()),
            name: text("/metadata/name")
                .or_else(|| text("/metadata/generateName"))
                .unwrap_or_else(|| "?".into()),
        };
        let host_network = pod.pointer("/spec/hostNetwork") == Some(&Value::Bool(true));
        Ok(Self { name, facts, addresses: addresses(pod), host_network })
    }
}

fn addresses(pod: &Value) -> Vec<IpAddr> {
    let all = pod.pointer("/status/podIPs").and_then(Value::as_array);
    let all = all.into_iter().flatten().filter_map(|entry| entry.get("ip")?.as_str());
    let one = pod.pointer("/status/podIP").and_then(Value::as_str);
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in all.chain(one).filter_map(|text| text.parse().ok()) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

/// The objects of a text in YAML or JSON. A list, as `kubectl get pods -o json` prints it, counts as its items.
///
/// # Errors
/// It is not YAML, in words.
pub fn objects(text: &str) -> Result<Vec<Value>, String> {
    let mut objects = Vec::new();
    for mut document in yaml::documents(text)?.into_iter().filter(|document| !document.is_null()) {
        match document.get_mut("items").and_then(Value::as_array_mut) {
            Some(items) => objects.append(items),
            None => objects.push(document),
        }
    }
    Ok(objects)
}

/// Everything wrong with a pod's object, each with its name.
#[must_use]
pub fn faults(object: &Value, errors: &PodJsonErrors) -> Vec<String> {
    let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("?");
    errors.iter().map(|error| format!("{name}: {error}")).collect()
}
