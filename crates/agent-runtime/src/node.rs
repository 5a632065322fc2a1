//! A node as far as its taint and its condition go, and the patches that change them. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// What a taint does to pods that do not tolerate it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaintEffect {
    /// None is scheduled.
    NoSchedule,
    /// None is scheduled if another node fits.
    PreferNoSchedule,
    /// None is scheduled, and those that run are evicted.
    NoExecute,
}

impl TaintEffect {
    /// As the API server spells it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::PreferNoSchedule => "PreferNoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }

    /// Reads it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::NoSchedule, Self::PreferNoSchedule, Self::NoExecute]
            .into_iter()
            .find(|effect| effect.word() == text)
    }
}

/// All nodes.
pub const NODES: &str = "/api/v1/nodes";

/// How controllers mark nodes that are not ready for pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeMarking {
    /// The taint.
    pub taint: Taint,
    /// Keys of taints that are removed too, and never added.
    pub old_keys: Vec<String>,
    /// The type of the condition.
    pub condition_type: String,
    /// How long a node is not ready before it is tainted.
    pub after: Duration,
}

/// A taint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// Its key, which identifies its owner.
    pub key: String,
    /// Its value; may be empty.
    pub value: String,
    /// What it does.
    pub effect: TaintEffect,
}

impl fmt::Display for Taint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let equals = if self.value.is_empty() { "" } else { "=" };
        write!(f, "{}{equals}{}:{}", self.key, self.value, self.effect.word())
    }
}

impl Taint {
    /// As a node has it: an empty value is omitted.
    fn json(&self) -> Value {
        if self.value.is_empty() {
            json!({"key": self.key, "effect": self.effect.word()})
        } else {
            json!({"key": self.key, "value": self.value, "effect": self.effect.word()})
        }
    }
}

/// A node, read from its object. Everything else in it is ignored.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Node {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(default)]
    name: String,
    #[serde(default)]
    uid: String,
    #[serde(default, deserialize_with = "or_none")]
    labels: BTreeMap<String, String>,
    deletion_timestamp: Option<String>,
}

/// A map that may be null.
fn or_none<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
struct Spec {
    /// As they came: a patch tests that they are still these.
    taints: Option<Vec<Value>>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
struct Status {
    conditions: Option<Vec<NodeCondition>>,
}

/// A node's condition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCondition {
    /// What it is about.
    pub r#type: String,
    /// True, False or Unknown.
    #[serde(default)]
    pub status: String,
    /// The word for programs.
    #[serde(default)]
    pub reason: String,
    /// The sentence for people.
    #[serde(default)]
    pub message: String,
    /// Since when it has this status.
    pub last_transition_time: Option<String>,
}

/// Whether a node should have the taint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestedTaint {
    /// It should.
    Tainted,
    /// It should not, with any value and effect, nor one of the older keys.
    Free,
}

/// A node, for events about it.
#[must_use]
pub fn node_reference(node: &Node) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.name().to_owned()),
        uid: Some(node.uid().to_owned()),
        ..ObjectReference::default()
    }
}

impl Node {
    /// Reads a node's object; none if it is not a node.
    #[must_use]
    pub fn of(object: &Value) -> Option<Self> {
        Self::deserialize(object).ok()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.metadata.name
    }

    /// Which of all nodes that ever had this name.
    #[must_use]
    pub fn uid(&self) -> &str {
        &self.metadata.uid
    }

    /// Its labels.
    #[must_use]
    pub const fn labels(&self) -> &BTreeMap<String, String> {
        &self.metadata.labels
    }

    /// Whether it is being deleted.
    #[must_use]
    pub const fn is_leaving(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Its condition of this type.
    #[must_use]
    pub fn condition(&self, of_type: &str) -> Option<&NodeCondition> {
        self.status.conditions.iter().flatten().find(|condition| condition.r#type == of_type)
    }

    /// Whether its kubelet reports that it is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.condition("Ready").is_some_and(|ready| ready.status == "True")
    }

    /// Whether it has the taint: this key and this effect, which is what the API server takes for one and the same.
    #[must_use]
    pub fn has(&self, taint: &Taint) -> bool {
        let mut taints = self.taints().iter();
        taints.any(|one| one["key"] == taint.key.as_str() && one["effect"] == taint.effect.word())
    }

    /// Whether it has a taint with one of these keys.
    #[must_use]
    pub fn has_key<'a>(&self, mut keys: impl Iterator<Item = &'a str>) -> bool {
        keys.any(|key| self.taints().iter().any(|one| one["key"] == key))
    }

    fn taints(&self) -> &[Value] {
        self.spec.taints.as_deref().unwrap_or_default()
    }

    /// The JSON patch that makes the node as wanted; none where it is so. It tests what it was worked out on, changes nothing but the taint,
    /// and leaves the other taints in their order.
    #[must_use]
    pub fn taint_patch(&self, taint: &Taint, old_keys: &[String], wanted: RequestedTaint) -> Option<Value> {
        let changes = match wanted {
            RequestedTaint::Tainted if self.has(taint) => return None,
            RequestedTaint::Tainted => self.addition(taint),
            RequestedTaint::Free => self.removal(taint, old_keys)?,
        };
        let same_node = json!({"op": "test", "path": "/metadata/uid", "value": self.uid()});
        Some(Value::Array([vec![same_node], changes].concat()))
    }

    fn addition(&self, taint: &Taint) -> Vec<Value> {
        let taints = "/spec/taints";
        if self.taints().is_empty() {
            // The server omits empty lists; a test against null tests for that.
            vec![
                json!({"op": "test", "path": taints, "value": null}),
                json!({"op": "add", "path": taints, "value": [taint.json()]}),
            ]
        } else {
            vec![
                json!({"op": "test", "path": taints, "value": self.taints()}),
                json!({"op": "add", "path": "/spec/taints/-", "value": taint.json()}),
            ]
        }
    }

    fn removal(&self, taint: &Taint, old_keys: &[String]) -> Option<Vec<Value>> {
        let is_ours = |one: &Value| {
            one["key"] == taint.key.as_str() || old_keys.iter().any(|key| one["key"] == key.as_str())
        };
        // From the end, so that the places of those before stay what they are.
        let ours = self.taints().iter().enumerate().rev().filter(|(_, one)| is_ours(one));
        let changes: Vec<Value> = ours
            .flat_map(|(place, one)| {
                let path = format!("/spec/taints/{place}");
                [json!({"op": "test", "path": path, "value": one}), json!({"op": "remove", "path": path})]
            })
            .collect();
        (!changes.is_empty()).then_some(changes)
    }

    /// The strategic merge patch of the status that removes the condition of this type and keeps the others; none if the node has none.
    #[must_use]
    pub fn condition_removal(&self, of_type: &str) -> Option<Value> {
        self.condition(of_type)?;
        let removed = json!([{"$patch": "delete", "type": of_type}]);
        // Another node of this name has another UID, and the server answers 409.
        Some(json!({"metadata": {"uid": self.uid()}, "status": {"conditions": removed}}))
    }

    /// The strategic merge patch of the status that sets this condition and keeps the others; none if it is set already.
    /// `now` is a time as the API server writes it.
    #[must_use]
    pub fn condition_patch(&self, wanted: &NodeCondition, now: &str) -> Option<Value> {
        let old = self.condition(&wanted.r#type);
        if old.is_some_and(|old| {
            (&old.status, &old.reason, &old.message) == (&wanted.status, &wanted.reason, &wanted.message)
        }) {
            return None;
        }
        let since = old.filter(|old| old.status == wanted.status);
        let since = since.and_then(|old| old.last_transition_time.as_deref()).unwrap_or(now);
        let condition = json!({
            "type": wanted.r#type, "status": wanted.status, "reason": wanted.reason, "message": wanted.message,
            "lastHeartbeatTime": now, "lastTransitionTime": since,
        });
        // Another node of this name has another UID, and the server answers 409.
        Some(json!({"metadata": {"uid": self.uid()}, "status": {"conditions": [condition]}}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: &str = "cni.istio.io/not-ready";

    fn ours() -> Taint {
        Taint { key: KEY.into(), value: String::new(), effect: TaintEffect::NoSchedule }
    }

    fn node(taints: &[Value]) -> Node {
        let spec = if taints.is_empty() { json!({}) } else { json!({"taints": taints}) };
        let object =
            json!({"metadata": {"name": "n", "uid": "u", "labels": null}, "spec": spec, "status": {}});
        Node::of(&object).expect("a node")
    }

    fn taint(key: &str, value: &str, effect: &str) -> Value {
        json!({"key": key, "value": value, "effect": effect})
    }

    /// The taints after a patch, as RFC 6902 has it; none where a test fails.
    fn patched(before: &[Value], patch: &Value) -> Option<Vec<Value>> {
        let mut taints = before.to_vec();
        for step in patch.as_array().expect("a list") {
            let (op, path) = (step["op"].as_str().expect("op"), step["path"].as_str().expect("path"));
            let place = path.strip_prefix("/spec/taints/").and_then(|place| place.parse::<usize>().ok());
            match (op, path, place) {
                ("test", "/metadata/uid", _) => {}
                ("test", "/spec/taints", _) => {
                    let is = if taints.is_empty() { Value::Null } else { json!(taints) };
                    if step["value"] != is {
                        return None;
                    }
                }
                ("test", _, Some(place)) => {
                    if taints.get(place) != Some(&step["value"]) {
                        return None;
                    }
                }
                ("remove", _, Some(place)) => drop(taints.remove(place)),
                ("add", "/spec/taints", _) => taints = step["value"].as_array().expect("a list").clone(),
                ("add", "/spec/taints/-", _) => taints.push(step["value"].clone()),
                other => panic!("{other:?}"),
            }
        }
        Some(taints)
    }

    #[test]
    fn only_what_has_the_key_is_touched_and_the_rest_keeps_its_order() {
        let bare = json!({"key": KEY, "effect": "NoSchedule"});
        let (a, b) = (taint("a", "1", "NoSchedule"), taint("b", "", "NoExecute"));
        let valued = taint(KEY, "born", "NoSchedule");
        let other_effect = taint(KEY, "", "NoExecute");
        let old = taint("NodeReadiness", "", "NoSchedule");
        let none: Option<Vec<Value>> = None;
        for (before, wanted, after) in [
            (vec![], RequestedTaint::Free, none.clone()),
            (vec![a.clone(), b.clone()], RequestedTaint::Free, none.clone()),
            (vec![bare.clone()], RequestedTaint::Free, Some(vec![])),
            (
                vec![a.clone(), bare.clone(), b.clone()],
                RequestedTaint::Free,
                Some(vec![a.clone(), b.clone()]),
            ),
            (
                vec![valued.clone(), a.clone(), other_effect.clone()],
                RequestedTaint::Free,
                Some(vec![a.clone()]),
            ),
            (vec![old.clone(), a.clone()], RequestedTaint::Free, Some(vec![a.clone()])),
            (vec![], RequestedTaint::Tainted, Some(vec![bare.clone()])),
            (vec![bare.clone()], RequestedTaint::Tainted, none.clone()),
            (vec![valued], RequestedTaint::Tainted, none),
            (vec![other_effect.clone()], RequestedTaint::Tainted, Some(vec![other_effect, bare.clone()])),
            (vec![b.clone(), old.clone(), a.clone()], RequestedTaint::Tainted, Some(vec![b, old, a, bare])),
        ] {
            let patch = node(&before).taint_patch(&ours(), &["NodeReadiness".to_owned()], wanted);
            let result = patch.map(|patch| patched(&before, &patch).expect("its own tests hold"));
            assert_eq!(result, after, "{before:?} {wanted:?}");
        }
    }

    #[test]
    fn an_older_key_belongs_to_another_controller_unless_it_is_named() {
        let before = [taint("NodeReadiness", "", "NoSchedule")];
        assert_eq!(node(&before).taint_patch(&ours(), &[], RequestedTaint::Free), None);
    }

    #[test]
    fn a_value_is_written_where_there_is_one() {
        let valued = Taint { value: "true".into(), ..ours() };
        let patch = node(&[]).taint_patch(&valued, &[], RequestedTaint::Tainted).expect("a patch");
        assert_eq!(patch[2]["value"], json!([taint(KEY, "true", "NoSchedule")]));
        assert_eq!(
            (ours().to_string(), valued.to_string()),
            (format!("{KEY}:NoSchedule"), format!("{KEY}=true:NoSchedule"))
        );
    }

    #[test]
    fn a_condition_keeps_its_transition_while_its_status_stays() {
        let condition = |status: &str, message: &str| NodeCondition {
            r#type: "cni.istio.io/Ready".into(),
            status: status.into(),
            reason: "Verified".into(),
            message: message.into(),
            last_transition_time: None,
        };
        let object = json!({"metadata": {"name": "n", "uid": "u"}, "status": {"conditions": [
            {"type": "Ready", "status": "False"},
            {"type": "cni.istio.io/Ready", "status": "True", "reason": "Verified", "message": "m", "lastTransitionTime": "old"}]}});
        let node = Node::of(&object).expect("a node");
        assert_eq!(node.condition_patch(&condition("True", "m"), "now"), None);
        let patch = node.condition_patch(&condition("True", "other"), "now").expect("a patch");
        assert_eq!(patch["status"]["conditions"][0]["lastTransitionTime"], "old");
        assert_eq!(patch["status"]["conditions"].as_array().map(Vec::len), Some(1));
        let patch = node.condition_patch(&condition("False", "m"), "now").expect("a patch");
        assert_eq!(
            (&patch["status"]["conditions"][0]["lastTransitionTime"], &patch["metadata"]["uid"]),
            (&json!("now"), &json!("u"))
        );
    }

    fn taints() -> impl Strategy<Value = Vec<Value>> {
        let key =
            prop::sample::select(vec!["a", "b", KEY, "NodeReadiness", "node.kubernetes.io/unreachable"]);
        let effect = prop::sample::select(vec!["NoSchedule", "PreferNoSchedule", "NoExecute"]);
        // One of a key and an effect, as the server holds it to.
        prop::collection::btree_map((key, effect), "[a-z]{0,2}", 0..6)
            .prop_map(|all| {
                all.into_iter().map(|((key, effect), value)| taint(key, &value, effect)).collect()
            })
            .prop_shuffle()
    }

    proptest! {
        #[test]
        fn a_patch_brings_the_node_there_and_a_second_one_is_not_needed(before in taints(), free in any::<bool>()) {
            let wanted = if free { RequestedTaint::Free } else { RequestedTaint::Tainted };
            let old = ["NodeReadiness".to_owned()];
            let after = match node(&before).taint_patch(&ours(), &old, wanted) {
                Some(patch) => patched(&before, &patch).expect("its own tests hold"),
                None => before.clone(),
            };
            prop_assert_eq!(node(&after).taint_patch(&ours(), &old, wanted), None);
            prop_assert_eq!(node(&after).has(&ours()), !free);
            let others = |all: &[Value]| {
                let mine = |one: &&Value| one["key"] != KEY && (wanted == RequestedTaint::Tainted || one["key"] != "NodeReadiness");
                all.iter().filter(mine).cloned().collect::<Vec<_>>()
            };
            prop_assert_eq!(others(&before), others(&after));
        }

        #[test]
        fn a_patch_never_changes_concurrent_changes(before in taints(), now in taints(), free in any::<bool>()) {
            let wanted = if free { RequestedTaint::Free } else { RequestedTaint::Tainted };
            if let Some(patch) = node(&before).taint_patch(&ours(), &[], wanted)
                && let Some(after) = patched(&now, &patch) {
                let others = |all: &[Value]| all.iter().filter(|one| one["key"] != KEY).cloned().collect::<Vec<_>>();
                prop_assert_eq!(others(&now), others(&after));
            }
        }

        #[test]
        fn any_object_is_read_or_refused(text in "\\PC{0,20}", taints in taints()) {
            prop_assert!(Node::of(&json!(text)).is_none());
            let _ = Node::of(&json!({"metadata": {"name": text}, "spec": {"taints": taints}}));
        }
    }
}
