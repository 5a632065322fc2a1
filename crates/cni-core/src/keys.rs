//! The keys of the plugin's configuration, as data: what is known, what it means, and what becomes of it.

use crate::{sandboxed::USUAL, wire::RawObject};
use serde_json::Value;
use settings_table::GivenSetting;
pub use settings_table::{NotInForce, SettingSpec, Status, ValueKind};

const TEXT: ValueKind = ValueKind::Text("TEXT");
const LIST: ValueKind = ValueKind::List("LIST");

const fn key(
    key: &'static str,
    takes: ValueKind,
    default: &'static str,
    meaning: &'static str,
) -> SettingSpec {
    SettingSpec::new(takes, meaning).key(key).default(default)
}

/// Every key that is a setting, in the order of the documentation.
#[rustfmt::skip]
pub const KEYS: &[SettingSpec] = &[
    key("plugin_log_level", TEXT, "info", "debug, info, warn, error, fatal or none; debug explains every rule of every pod."),
    key("cni_agent_run_dir", ValueKind::Path, "/var/run/istio-cni", "Holds istio-cni-kubeconfig, log.sock, pluginevent.sock and istio-cni.log."),
    key("agent_host_network", ValueKind::Switch, "false", "Whether the agent starts although the pods' network is not ready, so that STATUS may wait for what it brings."),
    key("drop_in", ValueKind::Switch, "false", "The entry is a file of its own beside the network's list; the plugin then reports to the agent which process called it by it."),
    key("exclude_namespaces", LIST, "", "Exclude pods in these namespaces."),
    key("pod_namespace", TEXT, "", "The agent's own namespace: its pods istio-cni-node-* pass first, whatever else is wrong."),
    key("native_nftables", ValueKind::Switch, "false", "Native nftables tables instead of iptables rules."),
    key("nft_sets", ValueKind::Switch, "false", "Native nftables rules gather long lists of ports and ranges in sets."),
    key("strict_capture", ValueKind::Switch, "false", "Pods get strict capture (docs/concepts/capture.md), unless annotation traffic.sidecar.istio.io/strictCapture says otherwise."),
    key("accepted_rules", TEXT, "", "Rules of other programs that are accepted in pods' network namespaces though they interfere (docs/concepts/capture.md): comment=TEXT, chain=CHAIN, chain=TABLE/CHAIN or table=TABLE, separated by semicolons."),
    key("accept_rules_of_pods", ValueKind::Switch, "true", "Whether pods may name such rules themselves, by annotation cni.istio.io/acceptedRules."),
    key("sandboxed_runtimes", LIST, USUAL, "Names of runtime classes, or of their handlers, whose pods rules do not bind (docs/concepts/capture.md); * at the end stands for anything."),
    key("sandboxed_pods", ValueKind::Choice(&["refuse", "skip"]), "refuse", "What is done with pods of the mesh there: refuse (they are not created) or skip (they are not redirected)."),
    key("add_timeout", ValueKind::Duration, "25s", "Timeout of one ADD, retries included; text, or a number of seconds; at most 600 s. Keep it below the runtime's timeout."),
    key("pod_manifest_dir", ValueKind::Path, "", "Pods are read from the manifests in this folder, not from an API server."),
    key("node_name", TEXT, "", "What the kubelet appends to names of static pods; without it, the manifest whose name fits best counts."),
    key("log_level", TEXT, "", "plugin_log_level, as it was written up to Istio 1.22."),
    key("kubernetes.kubeconfig", ValueKind::Path, "", "The kubeconfig, as it was said up to Istio 1.22; cni_agent_run_dir wins. The placeholder __KUBECONFIG_FILEPATH__ counts as unset."),
    key("kubernetes.exclude_namespaces", LIST, "", "exclude_namespaces, as it was written up to Istio 1.22."),
    key("kubernetes.node_name", TEXT, "", "node_name, as it was written up to Istio 1.22."),
    key("kubernetes.cni_bin_dir", ValueKind::Path, "", "Where plugins are, as it was said up to Istio 1.22.").status(Status::WithoutEffect("no other plugin is called")),
    key("log_uds_address", ValueKind::Path, "", "The agent's log socket.").status(Status::WithoutEffect("it is log.sock in cni_agent_run_dir")),
    key("ambient_enabled", ValueKind::Switch, "false", "Pods of ambient mode are passed to the agent, at pluginevent.sock in cni_agent_run_dir."),
    key("enablement_selectors", ValueKind::List("SELECTORS"), "", "Which pods are in ambient mode: objects with podSelector and namespaceSelector; without any, by label istio.io/dataplane-mode. A folder of manifests has no labels of namespaces."),
    key("enable_ambient_detection_retry", ValueKind::Switch, "", "Try again where pod or namespace cannot be read.").status(Status::WithoutEffect("the plugin always tries again, and fails ADD in the end")),
];

/// Keys of the specification and its conventions: those that the plugin obeys, and those that are for runtimes and other plugins.
const OF_THE_SPECIFICATION: [&str; 14] = [
    "cniVersion",
    "name",
    "type",
    "prevResult",
    "args",
    "capabilities",
    "runtimeConfig",
    "ipMasq",
    "ipam",
    "dns",
    "disableCheck",
    "disableGC",
    "cni.dev/attachments",
    "cni.dev/valid-attachments",
];

/// Keys that are not known here, by their path.
pub(crate) fn unknown(object: &RawObject<'_>) -> Vec<String> {
    let is_known =
        |path: &str| OF_THE_SPECIFICATION.contains(&path) || KEYS.iter().any(|row| row.key == Some(path));
    let paths = object.keys().flat_map(|name| {
        if !is_object(name) {
            return vec![name.to_owned()];
        }
        let inside = object.value(name).and_then(|value| value.as_object().cloned()).unwrap_or_default();
        inside.keys().map(|key| format!("{name}.{key}")).collect()
    });
    paths.filter(|path| !is_known(path)).collect()
}

/// Whether it contains keys.
fn is_object(name: &str) -> bool {
    let inside = |row: &SettingSpec| row.key?.strip_prefix(name)?.strip_prefix('.');
    KEYS.iter().any(|row| inside(row).is_some())
}

/// What a configuration asks for but does not get.
pub(crate) fn not_in_force(object: &RawObject<'_>) -> Vec<NotInForce> {
    let given = KEYS.iter().filter_map(|row| {
        let value = text(&object.at(row.key?)?);
        Some(GivenSetting { row, said: row.key?.to_owned(), value })
    });
    NotInForce::among(&given.collect::<Vec<_>>())
}

/// A value as a flag or variable would hold it; one that asks for nothing is empty.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::Array(items) if items.is_empty() => String::new(),
        Value::Object(keys) if keys.is_empty() => String::new(),
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        conf::{Conf, Envelope},
        wire::{CniCommand, CniError},
    };
    use serde_json::{Map, json};

    fn conf(keys: &[(&str, Value)]) -> Result<Conf, CniError> {
        let mut object =
            Map::from_iter([("cniVersion".to_owned(), json!("1.0.0")), ("name".to_owned(), json!("n"))]);
        for (path, value) in keys {
            match path.split_once('.') {
                Some((outer, inner)) => {
                    object.entry(outer).or_insert_with(|| json!({}))[inner] = value.clone();
                }
                None => drop(object.insert((*path).to_owned(), value.clone())),
            }
        }
        Envelope::read(Value::from(object).to_string().as_bytes(), CniCommand::Add)?.conf()
    }

    fn value(row: &SettingSpec) -> Value {
        match row.takes {
            ValueKind::Switch => json!(row.default != "true"),
            ValueKind::List("SELECTORS") => json!([{"podSelector": {}}]),
            ValueKind::List(_) => json!(["x"]),
            ValueKind::Path => json!("/x"),
            ValueKind::Duration => json!("7s"),
            ValueKind::Text(_) if row.key.is_some_and(|key| key.ends_with("level")) => json!("debug"),
            ValueKind::Choice(words) => json!(words.last()),
            ValueKind::Text(_) if row.key == Some("accepted_rules") => json!("comment=x"),
            ValueKind::Text(_) | ValueKind::Number | ValueKind::Levels => json!("x"),
        }
    }

    #[test]
    fn every_key_that_is_in_force_is_read() {
        let nothing = conf(&[]).unwrap();
        for row in KEYS.iter().filter(|row| row.status == Status::InForce) {
            let name = row.key.unwrap();
            let refused = conf(&[(name, json!(-5))]).unwrap_err().message;
            assert!(refused.starts_with(&format!("{name}: ")), "{refused}");
            assert_ne!(conf(&[(name, value(row))]).unwrap(), nothing, "{name}");
            let default = row.default;
            let default = match row.takes {
                ValueKind::Switch => json!(default == "true"),
                ValueKind::List(_) => json!(default.split(',').collect::<Vec<_>>()),
                ValueKind::Path
                | ValueKind::Duration
                | ValueKind::Text(_)
                | ValueKind::Choice(_)
                | ValueKind::Number
                | ValueKind::Levels => json!(default),
            };
            if !row.default.is_empty() {
                assert_eq!(conf(&[(name, default)]).unwrap(), nothing, "{name}");
            }
        }
    }

    #[test]
    fn every_key_that_is_not_in_force_is_told_unless_it_asks_for_nothing() {
        let told = |keys: &[(&str, Value)]| {
            let notices = conf(keys).unwrap().not_in_force;
            notices.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let (mut given, mut nothing, mut count) = (Vec::new(), Vec::new(), 0);
        for row in KEYS {
            let name = row.key.unwrap();
            given.push((name, value(row)));
            nothing.push((name, if row.takes == ValueKind::Switch { json!(false) } else { Value::Null }));
            let said = told(&[(name, value(row))]);
            assert_eq!(said.is_empty(), row.status == Status::InForce, "{said:?}");
            assert!(said.iter().all(|notice| notice.starts_with(name)), "{said:?}");
            count += said.len();
        }
        assert_eq!((count, told(&given).len()), (3, 3), "once for each reason");
        assert_eq!(told(&nothing), [""; 0]);
        assert_eq!(told(&[("enablement_selectors", json!([]))]), [""; 0]);
        assert_eq!(conf(&given).unwrap().unknown_keys, [""; 0]);
        let strange = [("kubernetes.surprise", json!(1)), ("exclude_namespace", json!([]))];
        assert_eq!(conf(&strange).unwrap().unknown_keys, ["exclude_namespace", "kubernetes.surprise"]);
    }
}
