//! How the validation of a pod failed, as the status of its container says.

use istio_validation::Reason;
use reasons::ReasonDoc;
use serde_json::Value;

use crate::object::text;

/// The container that proves the redirection before the proxy starts; it needs no network.
pub const VALIDATION_CONTAINER: &str = "istio-validation";

/// How the validation failed last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastValidation {
    /// The exit code.
    pub code: i64,
    /// The termination message: usually the JSON of a verdict.
    pub message: String,
}

impl LastValidation {
    /// From a pod's status; none where it has ended well, or has not ended yet.
    #[must_use]
    pub fn of(pod: &Value) -> Option<Self> {
        let statuses = pod.pointer("/status/initContainerStatuses")?.as_array()?;
        let status = statuses.iter().find(|status| text(status, "/name") == VALIDATION_CONTAINER)?;
        let ended = ["/state/terminated", "/lastState/terminated"].map(|pointer| status.pointer(pointer));
        let last = ended.into_iter().flatten().next()?;
        let code = last.get("exitCode")?.as_i64().filter(|code| *code != 0)?;
        Some(Self { code, message: text(last, "/message") })
    }

    fn reason(&self) -> Option<Reason> {
        let verdict: Value = serde_json::from_str(&self.message).unwrap_or_default();
        let reason = text(&verdict, "/reason");
        Reason::ALL.into_iter().find(|known| known.code() == reason)
    }

    /// Whether it found the pod not redirected, or gave no reason: other validations could not prove anything.
    pub(crate) fn denies(&self) -> bool {
        self.reason().is_none_or(|reason| reason.is_redirected() == Some(false))
    }

    /// The lines of a finding about it.
    pub(crate) fn seen(&self) -> Vec<String> {
        let ended = format!("{VALIDATION_CONTAINER} ended with exit code {}", self.code);
        match self.reason() {
            Some(known) => {
                let ReasonDoc { word, meaning, remedy } = known.doc();
                vec![ended, format!("{word}: {meaning}"), remedy.to_owned()]
            }
            None if self.message.trim().is_empty() => vec![ended],
            None => vec![format!("{ended}: {}", self.message.trim())],
        }
    }
}
