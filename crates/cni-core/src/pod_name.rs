//! The name of a pod.

use std::fmt;

/// Which pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl PodName {
    /// Reads `NAMESPACE/NAME`, or a name in this namespace.
    ///
    /// # Errors
    /// It cannot be a pod's name.
    pub fn parse(text: &str, namespace: &str) -> Result<Self, String> {
        let (namespace, name) = text.split_once('/').unwrap_or((namespace, text));
        if is_name(namespace, 63) && is_name(name, 253) {
            return Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() });
        }
        Err(format!("{text:?} is not a pod; write NAMESPACE/NAME"))
    }
}

/// Whether Kubernetes accepts this as a name of at most so many bytes: names become part of a path at the API server.
pub(crate) fn is_name(text: &str, most: usize) -> bool {
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    text.len() <= most && text.split('.').all(is_label)
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
