//! Which pods are broken: a pure function of the pod and of the settings.
//!
//! A pod is broken when the container that proves its redirection has failed. The first failure counts, which stands in the container's
//! current state, as well as one before, which stands in its last state.

use std::collections::BTreeMap;

use agent_runtime::resync::Selection;
use serde_json::Value;

use crate::cluster::pods::ObservedPod;
pub use crate::settings::BrokenPodFilter;

/// A broken pod, as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// Which pod it is.
    pub observed: ObservedPod,
    /// Its labels; none where it has no such field.
    pub labels: Option<BTreeMap<String, String>>,
    /// What shows that it is broken.
    pub failure: ContainerFailure,
    /// The controller that will replace it, by its UID; its own UID where it has none.
    pub owner: String,
    /// Whether one of its init containers runs at the moment, so that the pod has processes.
    pub runs: bool,
}

/// The end of a container that shows a broken pod. Two are the same where they are one failure seen twice.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("init container {container} ended with exit code {exit_code}")]
pub struct ContainerFailure {
    /// The container.
    pub container: String,
    /// Its exit code.
    pub exit_code: i64,
    /// What the runtime calls that run of the container.
    pub id: String,
    /// When it ended, as the kubelet reports it.
    pub finished: String,
}

/// Why a pod is not broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NotBroken {
    /// It lacks a name, a UID or a version.
    Unnamed,
    /// It is on another node, or on none yet.
    OtherNode,
    /// The selectors do not select it.
    NotSelected,
    /// It is being deleted.
    BeingDeleted,
    /// It lacks the annotation.
    NotAnnotated,
    /// It has no such init container, or that has never run.
    NeverRan,
    /// The container has not failed: it runs for the first time, or waits to.
    NotEnded,
    /// The container ended well.
    EndedWell,
    /// The container failed in another way.
    FailedOtherwise,
}

impl BrokenPodFilter {
    /// The pods that it is about.
    #[must_use]
    pub fn selection(&self) -> Selection {
        Selection { fields: self.fields.on_node(&self.node), labels: self.labels.as_str().to_owned() }
    }

    /// What shows that a pod is broken.
    ///
    /// # Errors
    /// Why it is not.
    pub fn check(&self, pod: &Value) -> Result<Broken, NotBroken> {
        let observed = ObservedPod::of(pod).ok_or(NotBroken::Unnamed)?;
        if self.node.is_empty() || text(pod, "/spec/nodeName") != Some(&self.node) {
            return Err(NotBroken::OtherNode);
        }
        let labels = string_map(pod, "/metadata/labels");
        let label = |key: &str| labels.as_ref()?.get(key).map(String::as_str);
        if !self.labels.selects(label) || !self.fields.selects(pod) {
            return Err(NotBroken::NotSelected);
        }
        if pod.pointer("/metadata/deletionTimestamp").is_some_and(|at| !at.is_null()) {
            return Err(NotBroken::BeingDeleted);
        }
        let annotations = pod.pointer("/metadata/annotations").and_then(Value::as_object);
        if !self.annotation.is_empty() && annotations.is_none_or(|all| !all.contains_key(&self.annotation)) {
            return Err(NotBroken::NotAnnotated);
        }
        let failure = self.failure(pod)?;
        let statuses = pod.pointer("/status/initContainerStatuses").and_then(Value::as_array);
        let runs = statuses.into_iter().flatten().any(|status| status.pointer("/state/running").is_some());
        let owner = controller(pod).unwrap_or(&observed.uid).to_owned();
        Ok(Broken { observed, labels, failure, owner, runs })
    }

    /// The failure of one of the init containers, or what comes closest to one.
    fn failure(&self, pod: &Value) -> Result<ContainerFailure, NotBroken> {
        let statuses = pod.pointer("/status/initContainerStatuses").and_then(Value::as_array);
        let mut closest = NotBroken::NeverRan;
        for status in statuses.into_iter().flatten() {
            let name = text(status, "/name").unwrap_or_default();
            if !self.container.is_empty() && name != self.container {
                continue;
            }
            match self.failure_in(name, status) {
                Ok(failure) => return Ok(failure),
                Err(sound) => closest = closest.max(sound),
            }
        }
        Err(closest)
    }

    fn failure_in(&self, container: &str, status: &Value) -> Result<ContainerFailure, NotBroken> {
        let ends = ["/state/terminated", "/lastState/terminated"].map(|pointer| status.pointer(pointer));
        let ends = ends.map(|end| end.filter(|end| end.is_object()).map(TerminatedState));
        if ends[0].as_ref().is_some_and(TerminatedState::is_good) {
            return Err(NotBroken::EndedWell);
        }
        let mut ends = ends.into_iter().flatten().peekable();
        if ends.peek().is_none() {
            return Err(NotBroken::NotEnded);
        }
        let failed = ends.find(|end| self.is_wanted(end)).ok_or(NotBroken::FailedOtherwise)?;
        Ok(ContainerFailure {
            container: container.to_owned(),
            exit_code: failed.exit_code(),
            id: failed.text("/containerID"),
            finished: failed.text("/finishedAt"),
        })
    }

    fn is_wanted(&self, end: &TerminatedState<'_>) -> bool {
        let message = self.message.trim();
        !end.is_good()
            && (self.exit_code == 0 || end.exit_code() == self.exit_code)
            && (message.is_empty() || end.text("/message").trim() == message)
    }
}

/// A state `terminated` of a container.
struct TerminatedState<'a>(&'a Value);

impl TerminatedState<'_> {
    fn is_good(&self) -> bool {
        self.exit_code() == 0 || self.text("/reason") == "Completed"
    }

    fn exit_code(&self) -> i64 {
        self.0.get("exitCode").and_then(Value::as_i64).unwrap_or_default()
    }

    fn text(&self, pointer: &str) -> String {
        text(self.0, pointer).unwrap_or_default().to_owned()
    }
}

/// The UID of the controller that owns a pod.
fn controller(pod: &Value) -> Option<&str> {
    let owners = pod.pointer("/metadata/ownerReferences").and_then(Value::as_array);
    let mut controllers =
        owners.into_iter().flatten().filter(|owner| owner.get("controller") == Some(&Value::Bool(true)));
    text(controllers.next()?, "/uid")
}

fn text<'a>(value: &'a Value, pointer: &str) -> Option<&'a str> {
    value.pointer(pointer)?.as_str()
}

fn string_map(pod: &Value, pointer: &str) -> Option<BTreeMap<String, String>> {
    let map = pod.pointer(pointer)?.as_object()?;
    let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    Some(map.iter().filter_map(text).collect())
}

#[cfg(test)]
mod tests;
