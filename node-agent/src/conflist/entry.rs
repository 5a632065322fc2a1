//! Our entry in a network configuration.

use super::format::JsonStyle;
use super::{OWN_VERSION, PLUGIN_TYPE, kind, object, value_of};
use cni_core::conf::POD_ANNOTATIONS;
use cni_core::sandboxed::SandboxedRuntimes;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::ops::Not;

/// The key of an entry in a file beside the list.
const DROP_IN: &str = "drop_in";

/// The content of the plugin's entry: its keys in the order in which they are written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EntryContent {
    /// The plugin's log level.
    #[serde(rename = "plugin_log_level")]
    pub log_level: String,
    /// Where the plugin finds its kubeconfig and the agent's sockets.
    #[serde(rename = "cni_agent_run_dir")]
    pub run_dir: String,
    /// Whether ambient mode is on.
    pub ambient_enabled: bool,
    /// Its selectors, a list; without any, the usual ones count.
    pub enablement_selectors: Value,
    /// Pods of these namespaces are skipped.
    pub exclude_namespaces: Vec<String>,
    /// The agent's namespace.
    pub pod_namespace: String,
    /// Whether the agent is on the host's network, and so starts before the pods' network is ready. The reference lacks this key: it is written only
    /// if set.
    #[serde(skip_serializing_if = "Not::not")]
    pub agent_host_network: bool,
    /// Whether rules are written as native nftables.
    pub native_nftables: bool,
    /// Whether those gather long lists in sets. Likewise.
    #[serde(skip_serializing_if = "Not::not")]
    pub nft_sets: bool,
    /// Whether pods get strict capture. Likewise.
    #[serde(skip_serializing_if = "Not::not")]
    pub strict_capture: bool,
    /// The rules of other programs that are accepted; empty for none. Likewise.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub accepted_rules: String,
    /// Whether pods may name more. The reference lacks this key: it is written only if they may not.
    #[serde(skip_serializing_if = "is_allowed")]
    pub accept_rules_of_pods: bool,
    /// Runtimes whose pods rules do not bind. Likewise, if they are not the usual ones.
    #[serde(flatten)]
    pub sandboxed: SandboxedRuntimes,
}

fn is_allowed(named_by_pods: &bool) -> bool {
    *named_by_pods
}

/// What an entry has beside them.
#[derive(Serialize)]
struct Keys<'a> {
    name: &'static str,
    r#type: &'static str,
    ipam: Map<String, Value>,
    dns: Map<String, Value>,
    /// The reference lacks this key. A runtime passes what it knows of these, and ignores the others.
    capabilities: Value,
    #[serde(flatten)]
    facts: &'a EntryContent,
    enable_ambient_detection_retry: bool,
}

/// Our entry.
#[derive(Debug, Clone, PartialEq)]
pub struct PluginEntry {
    /// A JSON object.
    text: String,
    /// The same without the keys that the runtime replaces in a list.
    chained: Map<String, Value>,
}

/// Why a text is not our entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// It is not a JSON object.
    #[error("not a JSON object: {0}")]
    NoObject(String),
    /// It has another type.
    #[error("its type is {0:?}, not \"istio-cni\": the agent would not know it again")]
    Type(String),
    /// It has an unknown placeholder.
    #[error(
        "unknown placeholder {0}; known are {1}. Remove it, or unset CNI_NETWORK_CONFIG and CNI_NETWORK_CONFIG_FILE: the built-in entry follows the agent's other settings"
    )]
    Placeholder(String, String),
}

impl PluginEntry {
    /// The entry with these facts.
    #[must_use]
    pub fn of(facts: &EntryContent) -> Self {
        let keys = Keys {
            name: PLUGIN_TYPE,
            r#type: PLUGIN_TYPE,
            ipam: Map::new(),
            dns: Map::new(),
            capabilities: json!({ POD_ANNOTATIONS: true }),
            facts,
            enable_ambient_detection_retry: false,
        };
        let text = serde_json::to_string(&keys).unwrap_or_default();
        let chained = chained(&text);
        Self { text, chained }
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// It is not a JSON object, or not of our type.
    pub fn parse(text: &str) -> Result<Self, EntryError> {
        let parsed = object(text).map_err(|invalid| EntryError::NoObject(invalid.to_string()))?;
        match kind(&parsed) {
            Some(PLUGIN_TYPE) => Ok(Self { text: text.trim().to_owned(), chained: chained(text) }),
            other => Err(EntryError::Type(other.unwrap_or_default().to_owned())),
        }
    }

    /// The entry that a text with placeholders makes, as older charts give it. The values stand for each placeholder, by its name without
    /// underscores at the ends: `LOG_LEVEL` for `__LOG_LEVEL__`.
    ///
    /// # Errors
    /// It has unknown placeholders, or the result is not our entry.
    pub fn from_template(template: &str, values: &[(&str, String)]) -> Result<Self, EntryError> {
        let mut text = template.to_owned();
        for (name, value) in values {
            let quoted = Value::from(value.as_str()).to_string();
            text = text.replace(&format!("__{name}__"), &quoted[1..quoted.len() - 1]);
        }
        match placeholder(&text) {
            Some(unknown) => {
                let known: Vec<String> = values.iter().map(|(name, _)| format!("__{name}__")).collect();
                Err(EntryError::Placeholder(unknown.to_owned(), known.join(", ")))
            }
            None => Self::parse(&text),
        }
    }

    /// The same for a file beside the list: with the key by which the plugin reports that it was called by this one.
    #[must_use]
    pub fn as_drop_in(&self) -> Self {
        // An entry has a type, so a comma fits, and of a key that is given twice the last counts.
        let keys = self.text.trim_end().strip_suffix('}').unwrap_or(&self.text).trim_end();
        let text = format!("{keys},\"{DROP_IN}\":true}}");
        Self { chained: chained(&text), text }
    }

    /// Which keys of an entry differ from ours, beside those that the runtime replaces.
    pub(super) fn differing_keys(&self, there: &str) -> Vec<String> {
        let there = chained(there);
        let keys = self.chained.keys().chain(there.keys().filter(|key| !self.chained.contains_key(*key)));
        keys.filter(|key| self.chained.get(*key) != there.get(*key)).cloned().collect()
    }

    /// The entry for a list, which has a version of its own.
    pub(super) fn formatted(&self, style: &JsonStyle) -> String {
        self.write(style, |key| key != "cniVersion")
    }

    /// A whole file of its own: one plugin.
    #[must_use]
    pub fn standalone(&self) -> String {
        let body = self.write(&JsonStyle::plain(), |_| true);
        if self.has("cniVersion") {
            return format!("{body}\n");
        }
        let rest = body.strip_prefix('{').unwrap_or_default();
        format!("{{\n  \"cniVersion\": \"{OWN_VERSION}\",{rest}\n")
    }

    fn has(&self, key: &str) -> bool {
        object(&self.text).is_ok_and(|object| value_of(&object, key).is_some())
    }

    fn write(&self, style: &JsonStyle, wanted: impl Fn(&str) -> bool) -> String {
        match object(&self.text) {
            Ok(mut object) => {
                object.properties.retain(|property| wanted(property.name.as_str()));
                style.write(&self.text, &object)
            }
            Err(_) => self.text.clone(),
        }
    }
}

/// An entry's keys and values, without those that the runtime replaces by the list's.
fn chained(text: &str) -> Map<String, Value> {
    let mut keys: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
    keys.remove("cniVersion");
    keys
}

/// The first `__NAME__` in a text.
fn placeholder(text: &str) -> Option<&str> {
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
    text.match_indices("__").find_map(|(start, _)| {
        let end = start + 2 + text[start + 2..].find("__")?;
        is_name(&text[start + 2..end]).then(|| &text[start..end + 2])
    })
}
