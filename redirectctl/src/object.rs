//! Parts of Kubernetes objects of any kind: conditions, events, texts.

use serde_json::Value;

/// A condition of a node or pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectCondition {
    /// Its type.
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Why, in a word.
    pub reason: String,
    /// Why, in words.
    pub message: String,
}

/// Something that happened to a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodEvent {
    /// When it happened last, as the API server writes it.
    pub time: String,
    /// What happened, in a word.
    pub reason: String,
    /// What happened, in words.
    pub message: String,
}

impl ObjectCondition {
    /// The conditions in an object's status.
    #[must_use]
    pub fn all(object: &Value) -> Vec<Self> {
        let all = object.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
        let condition = |one: &Value| Self {
            kind: text(one, "/type"),
            status: text(one, "/status"),
            reason: text(one, "/reason"),
            message: text(one, "/message"),
        };
        all.map(condition).collect()
    }
}

impl PodEvent {
    pub(crate) fn of(object: &Value) -> Self {
        let times =
            ["/lastTimestamp", "/series/lastObservedTime", "/eventTime", "/metadata/creationTimestamp"];
        let time = times.into_iter().map(|pointer| text(object, pointer)).find(|time| !time.is_empty());
        Self {
            time: time.unwrap_or_default(),
            reason: text(object, "/reason"),
            message: text(object, "/message"),
        }
    }
}

/// A text in an object; empty if absent.
#[must_use]
pub fn text(object: &Value, pointer: &str) -> String {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}
