//! Settings of the taint controllers: the agent's, which knows one node, and the cluster's.

use agent_runtime::node::{NodeMarking, Taint, TaintEffect};
use cni_core::selector::{is_key, is_value};

use super::raw::Raw;
use super::table::Key;

/// Settings of the taint controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaintSettings {
    /// Whether the agent keeps its node's taint.
    pub keeps_taint: bool,
    /// Whether the agent keeps its node's condition.
    pub keeps_condition: bool,
    /// How nodes are marked.
    pub marking: NodeMarking,
    /// Whether a probe namespace is redirected.
    pub probe: bool,
    /// The ConfigMap of selectors: its namespace and name; empty for the agent's DaemonSet.
    pub config_map: (String, String),
}

pub(super) fn read(raw: &mut Raw<'_>) -> TaintSettings {
    let keeps_taint = raw.switch(Key::NODE_TAINT);
    let key = raw.text(Key::TAINT_KEY);
    if !is_key(&key) {
        raw.reject(Key::TAINT_KEY, "not the key of a taint, such as example.com/name");
    }
    let value = raw.text(Key::TAINT_VALUE);
    if !is_value(&value) {
        raw.reject(
            Key::TAINT_VALUE,
            "not the value of a taint: at most 63 letters, digits, dashes, dots and underscores",
        );
    }
    let parse = |word: &str| TaintEffect::parse(word).ok_or("not NoSchedule, PreferNoSchedule or NoExecute");
    let effect = raw.read(Key::TAINT_EFFECT, TaintEffect::NoSchedule, parse);
    let old_keys = raw.list(Key::TAINT_OLD_KEYS);
    if let Some(wrong) = old_keys.iter().find(|key| !is_key(key)) {
        let reason = format!("{wrong:?} is not the key of a taint");
        raw.reject(Key::TAINT_OLD_KEYS, &reason);
    }
    let condition_type = raw.text(Key::NODE_CONDITION_TYPE);
    if !is_key(&condition_type) {
        raw.reject(Key::NODE_CONDITION_TYPE, "not the type of a condition, such as example.com/Ready");
    }
    TaintSettings {
        keeps_taint,
        keeps_condition: raw.switch(Key::NODE_CONDITION) || keeps_taint,
        marking: NodeMarking {
            taint: Taint { key, value, effect },
            old_keys,
            condition_type,
            after: raw.duration(Key::TAINT_AFTER),
        },
        probe: raw.switch(Key::TAINT_PROBE),
        config_map: (raw.text(Key::TAINT_CONFIGMAP_NAMESPACE), raw.text(Key::TAINT_CONFIGMAP_NAME)),
    }
}
