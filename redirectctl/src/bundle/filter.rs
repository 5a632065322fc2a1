//! What may go into an archive, source by source. Everything that is not listed here stays behind.

use cni_core::keys::KEYS;
use redirect_core::pod::SkipReason;
use serde_json::{Map, Value, json};

use crate::cause::Cause;

/// Said in the place of a value that is not listed.
const REMOVED: &str = "(removed)";
/// Keys of every network configuration that say how plugins are chained.
const OF_NETWORK: [&str; 6] = ["cniVersion", "cniVersions", "name", "type", "disableCheck", "disableGC"];
/// Beginnings of the names of modules that rules need.
const MODULES: [&str; 6] = ["nf_", "nft_", "xt_", "ip_", "ip6", "iptable_"];
/// Labels of the agent's metrics, whose values are closed sets.
const LABELS: [&str; 9] = ["result", "kind", "watch", "outcome", "reason", "type", "state", "change", "le"];
/// Levels of log lines.
const LEVELS: [&str; 5] = ["debug", "info", "warn", "error", "fatal"];
/// What the plugin decides.
const DECISIONS: [&str; 4] = ["redirect", "enrol", "skip", "fail"];
/// Variables of the agent that say how it works. Not among them is CNI_NETWORK_CONFIG, which may hold anything.
pub const AGENT_VARIABLES: &[&str] = &[
    "CHAINED_CNI_PLUGIN",
    "CNI_AGENT_RUN_DIR",
    "CNI_CONF_GROUP_READ",
    "CNI_CONF_NAME",
    "CNI_INSTALL",
    "DRIFT_HEAL",
    "DRIFT_WATCH_INTERVAL",
    "EXCLUDE_NAMESPACES",
    "FORCE_IPTABLES_BINARY",
    "HEALTH_ADDRESS",
    "HEALTH_PORT",
    "ISTIO_OWNED_CNI_CONFIG",
    "KUBECONFIG_MODE",
    "LANDLOCK",
    "LOG_LEVEL",
    "LOG_OUTPUT_LEVEL",
    "MONITORING_ADDRESS",
    "MONITORING_PORT",
    "MOUNTED_CNI_BIN_DIR",
    "MOUNTED_CNI_NETNS_DIR",
    "MOUNTED_CNI_NET_DIR",
    "NATIVE_NFTABLES",
    "NFT_SETS",
    "NODE_CONDITION",
    "NODE_TAINT",
    "PLUGIN_TOKEN_LIFETIME",
    "REPAIR_DELETE_PODS",
    "REPAIR_ENABLED",
    "REPAIR_LABEL_PODS",
    "REPAIR_REPAIR_PODS",
    "SETTINGS_DIR",
    "SKIP_TLS_VERIFY",
    "STRICT_CAPTURE",
    "TAINT_PROBE",
];

/// A network configuration: how plugins are chained, and how the mesh's is configured.
#[must_use]
pub fn network(list: &Value) -> Value {
    let Some(object) = list.as_object() else { return Value::Null };
    let mut kept = listed(object, &|key| OF_NETWORK.contains(&key) || key == "plugins");
    if let Some(plugins) = object.get("plugins").and_then(Value::as_array) {
        kept.insert("plugins".to_owned(), plugins.iter().map(plugin).collect());
    } else if let Value::Object(alone) = plugin(list) {
        kept = alone;
    }
    Value::Object(kept)
}

fn plugin(plugin: &Value) -> Value {
    let Some(object) = plugin.as_object() else { return Value::Null };
    let is_ours = object.get("type").and_then(Value::as_str) == Some(crate::cni::PLUGIN);
    let is_known = |key: &str| is_ours && KEYS.iter().any(|row| row.key == Some(key));
    let mut kept = listed(object, &|key| OF_NETWORK.contains(&key) || is_known(key));
    let inside = object.get("ipam").and_then(|ipam| ipam.get("type"));
    if let Some(kind) = inside.filter(|kind| is_plain(kind)) {
        kept.insert("ipam".to_owned(), json!({"type": kind}));
    }
    Value::Object(kept)
}

/// The keys that are listed, and the number of the others: their names may be secrets, too.
fn listed(object: &Map<String, Value>, is_listed: &dyn Fn(&str) -> bool) -> Map<String, Value> {
    let kept = object.iter().filter(|(key, _)| is_listed(key));
    let shown = |value: &Value| if is_plain(value) { value.clone() } else { REMOVED.into() };
    let mut kept: Map<String, Value> = kept.map(|(key, value)| (key.clone(), shown(value))).collect();
    let others = object.len().saturating_sub(kept.len());
    if others > 0 {
        kept.insert("(other keys)".to_owned(), others.into());
    }
    kept
}

/// A value that is not an object: its contents are unknown.
fn is_plain(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
        Value::Array(items) => items.iter().all(Value::is_string),
        Value::Object(_) => false,
    }
}

/// The variables of the agent that are listed, as its container has them; the number of the others.
#[must_use]
pub fn agent(pod: &Value) -> Value {
    let containers = pod.pointer("/spec/containers").and_then(Value::as_array).into_iter().flatten();
    let all: Vec<&Value> =
        containers.filter_map(|container| container.get("env")?.as_array()).flatten().collect();
    let known = |variable: &&Value| {
        let name = variable.get("name")?.as_str().filter(|name| AGENT_VARIABLES.contains(name))?;
        // Without a value it comes from elsewhere, perhaps from a secret.
        let value = variable.get("value").filter(|value| value.is_string())?;
        Some((name.to_owned(), value.clone()))
    };
    let kept: Map<String, Value> = all.iter().filter_map(known).collect();
    let others = all.len().saturating_sub(kept.len());
    json!({"variables": kept, "others": others})
}

/// A line of the plugin's log: when, about which pod, what was decided and why, in the words that are closed sets. What it says
/// in its own words may quote anything, and stays behind.
#[must_use]
pub fn log_line(line: &str) -> Option<String> {
    let fields: Value = serde_json::from_str(line).ok()?;
    let text = |key: &str| fields.get(key).and_then(Value::as_str);
    let mut kept = Map::new();
    let mut keep = |key: &str, is_listed: &dyn Fn(&str) -> bool| {
        if let Some(value) = text(key).filter(|value| is_listed(value)) {
            kept.insert(key.to_owned(), value.into());
        }
    };
    keep("time", &|value| humantime::parse_rfc3339(value).is_ok());
    keep("level", &|value| LEVELS.contains(&value));
    keep("pod", &|value| crate::input::pod_name(value).is_ok());
    keep("decision", &|value| DECISIONS.contains(&value));
    keep("reason", &|value| SkipReason::ALL.iter().any(|reason| reason.word() == value));
    keep("ms", &is_phases);
    if let Some(code) = fields.get("code").and_then(Value::as_u64) {
        kept.insert("code".to_owned(), code.into());
    }
    (kept.contains_key("time") && kept.contains_key("level")).then(|| Value::Object(kept).to_string())
}

/// Such as `read:0.1 pod:4.2 total:10.6`.
fn is_phases(text: &str) -> bool {
    const PHASES: [&str; 5] = ["read", "pod", "plan", "apply", "total"];
    text.split(' ').all(|part| {
        part.split_once(':')
            .is_some_and(|(name, number)| PHASES.contains(&name) && number.parse::<f64>().is_ok())
    })
}

/// A sample of the agent's own metrics.
#[must_use]
pub fn metric(line: &str) -> Option<String> {
    let (name, value) = line.trim_end().rsplit_once(' ')?;
    value.parse::<f64>().ok()?;
    let (name, labels) =
        name.split_once('{').map_or((name, ""), |(name, labels)| (name, labels.trim_end_matches('}')));
    let is_word = |text: &str, more: &str| {
        text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c)) && text.len() <= 64
    };
    let is_ours = name.starts_with("istio_cni_") && is_word(name, "_");
    let is_listed = |label: &str| {
        label
            .split_once('=')
            .is_some_and(|(name, value)| LABELS.contains(&name) && is_word(value.trim_matches('"'), "_-+."))
    };
    (is_ours && (labels.is_empty() || labels.split(',').all(is_listed))).then(|| line.trim_end().to_owned())
}

/// A document with findings. What was seen is kept where it was read from the kernel or the node's files; where the cluster said it, it may
/// quote what pods print. Comments of rules are other people's text.
#[must_use]
pub fn findings(document: Value) -> Value {
    match document {
        Value::Object(object) => {
            let code = object.get("code").and_then(Value::as_str);
            let is_quotable =
                Cause::ALL.iter().any(|cause| cause.is_quotable() && code == Some(cause.code()));
            let filtered = object.into_iter().map(|(key, value)| match (key.as_str(), value) {
                ("seen", Value::Array(seen)) if !is_quotable => (key, vec![REMOVED; seen.len()].into()),
                ("seen", Value::Array(seen)) => {
                    (key, seen.iter().filter_map(Value::as_str).map(without_comments).collect())
                }
                (_, value) => (key, findings(value)),
            });
            Value::Object(filtered.collect())
        }
        Value::Array(items) => items.into_iter().map(findings).collect(),
        plain @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => plain,
    }
}

/// As other programs' rules are reported, their comment stands in quotation marks and has none inside.
fn without_comments(text: &str) -> String {
    let (mut kept, mut rest) = (String::new(), text);
    while let Some((before, comment)) = rest.split_once("(comment \"") {
        kept.push_str(before);
        kept.push_str("(with a comment)");
        rest = comment.split_once("\")").map_or("", |(_, behind)| behind);
    }
    kept + rest
}

/// What a distribution calls itself.
#[must_use]
pub fn os_release(text: &str) -> Value {
    let listed = text.lines().filter_map(|line| {
        let (key, value) = line.split_once('=')?;
        ["ID", "VERSION_ID"].contains(&key).then(|| (key.to_owned(), value.trim_matches('"').into()))
    });
    Value::Object(listed.collect())
}

/// The modules that have to do with rules, by their names.
#[must_use]
pub fn modules(text: &str) -> Vec<String> {
    let names = text.lines().filter_map(|line| line.split_ascii_whitespace().next());
    let mut names: Vec<String> =
        names.filter(|name| MODULES.iter().any(|begin| name.starts_with(begin))).map(str::to_owned).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_configuration_only_what_is_listed_is_kept() {
        let list = json!({"cniVersion": "1.0.0", "name": "k8s", "SECRET": 1, "plugins": [
            {"type": "calico", "policy": {"token": "SECRET"}, "ipam": {"type": "host-local", "key": "SECRET"}, "kubernetes": "SECRET"},
            {"type": "istio-cni", "plugin_log_level": "debug", "exclude_namespaces": ["a"], "SECRET": true, "add_timeout": {"x": "SECRET"}},
        ]});
        let kept = network(&list);
        assert!(!kept.to_string().contains("SECRET"), "{kept:#}");
        assert_eq!(kept["(other keys)"], 1);
        assert_eq!(
            kept["plugins"][0],
            json!({"type": "calico", "ipam": {"type": "host-local"}, "(other keys)": 3})
        );
        assert_eq!(kept["plugins"][1]["exclude_namespaces"], json!(["a"]));
        assert_eq!(kept["plugins"][1]["add_timeout"], REMOVED);
        let alone = network(&json!({"type": "istio-cni", "plugin_log_level": "info", "x": "SECRET"}));
        assert_eq!(alone, json!({"type": "istio-cni", "plugin_log_level": "info", "(other keys)": 1}));
        assert_eq!(network(&json!("SECRET")), Value::Null);
    }

    #[test]
    fn of_a_log_only_closed_words_are_kept() {
        let line = json!({"time": "2026-01-01T00:00:00Z", "level": "info", "scope": "cni-plugin", "msg": "SECRET", "pod": "a/b",
            "decision": "skip", "reason": "no_proxy", "ms": "read:0.1 total:2", "code": 11, "token": "SECRET"});
        let kept: Value = serde_json::from_str(&log_line(&line.to_string()).expect("a line")).expect("JSON");
        assert_eq!(
            kept,
            json!({"time": "2026-01-01T00:00:00Z", "level": "info", "pod": "a/b", "decision": "skip", "reason": "no_proxy", "ms": "read:0.1 total:2", "code": 11})
        );
        for key in ["time", "level", "pod", "decision", "reason", "ms", "code"] {
            let mut planted = line.clone();
            planted[key] = "SECRET".into();
            assert!(!log_line(&planted.to_string()).unwrap_or_default().contains("SECRET"), "{key}");
        }
        assert_eq!(log_line("SECRET"), None);
    }

    #[test]
    fn of_metrics_only_the_agents_own_are_kept() {
        for good in [
            "istio_cni_install_ready 1",
            "istio_cni_plugin_add_total{outcome=\"skip\",reason=\"no_proxy\"} 3",
        ] {
            assert_eq!(metric(good).as_deref(), Some(good));
        }
        for bad in [
            "# HELP istio_cni_install_ready SECRET",
            "process_env{value=\"SECRET\"} 1",
            "istio_cni_plugin_add_total{pod=\"SECRET\"} 1",
            "istio_cni_plugin_add_total{reason=\"SECRET or more\"} 1",
            "istio_cni_x SECRET",
        ] {
            assert_eq!(metric(bad), None, "{bad}");
        }
    }

    #[test]
    fn of_the_agent_only_values_that_stand_there_are_kept() {
        let pod = json!({"spec": {"containers": [{"env": [
            {"name": "NATIVE_NFTABLES", "value": "true"},
            {"name": "SETTINGS_DIR", "valueFrom": {"secretKeyRef": {"name": "SECRET"}}},
            {"name": "CNI_NETWORK_CONFIG", "value": "SECRET"},
            {"name": "TOKEN", "value": "SECRET"},
        ]}]}});
        assert_eq!(agent(&pod), json!({"variables": {"NATIVE_NFTABLES": "true"}, "others": 3}));
    }

    #[test]
    fn the_variables_are_those_of_the_agent() {
        let path = test_support::project::file("docs/reference/agent.md");
        let text = std::fs::read_to_string(path).expect("the documentation");
        for name in AGENT_VARIABLES {
            assert!(text.contains(&format!("`{name}`")), "{name} is not a variable of the agent");
        }
    }

    #[test]
    fn of_findings_only_what_the_kernel_said_is_quoted() {
        let found = json!({"pods": [{"findings": [
            {"code": "foreign-rule", "seen": ["a (comment \"SECRET\") b (comment \"SECRET", "c"]},
            {"code": "heard-of-tomorrow", "seen": ["SECRET"]},
        ]}]});
        let kept = findings(found);
        assert_eq!(
            kept["pods"][0]["findings"][0]["seen"],
            json!(["a (with a comment) b (with a comment)", "c"])
        );
        assert_eq!(kept["pods"][0]["findings"][1]["seen"], json!([REMOVED]));
    }

    #[test]
    fn of_the_machine_only_what_rules_need_is_kept() {
        assert_eq!(
            modules("xt_owner 16384 1 - Live\nsecret_driver 1 0\nnf_tables 2 1"),
            ["nf_tables", "xt_owner"]
        );
        assert_eq!(
            os_release("ID=debian\nVERSION_ID=\"12\"\nX_SECRET=SECRET"),
            json!({"ID": "debian", "VERSION_ID": "12"})
        );
    }
}
