//! Which runtime classes are sandboxed: by their names or, where a name is unknown, by their handlers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use agent_runtime::lock;
use cluster_client::params::GetParams;
use cluster_client::{ApiError, Request};
use cni_core::sandboxed::{RUNTIME_CLASSES, SandboxedRuntimes};
use serde_json::Value;
use tokio::time::Instant;

use super::Cluster;

/// How long a handler that was read is believed. A runtime class cannot change its handler, but another class can take its name.
const BELIEVED: Duration = Duration::from_secs(300);

/// Handlers of the runtime classes of the node's pods, as they were read. The API server accepts no pod with a class that it does not have, so these are few.
#[derive(Debug, Default)]
pub struct RuntimeHandlers(Mutex<BTreeMap<String, ReadHandler>>);

/// A class's handler, if the API server has the class and shows it.
#[derive(Debug, Clone)]
pub struct ReadHandler {
    /// The handler.
    pub handler: Option<String>,
    read: Instant,
}

impl ReadHandler {
    /// Whether it does not have to be read again.
    #[must_use]
    pub fn is_believed(&self, now: Instant) -> bool {
        now.duration_since(self.read) < BELIEVED
    }
}

impl RuntimeHandlers {
    /// What was read of a runtime class last.
    pub fn known(&self, class: &str) -> Option<ReadHandler> {
        lock(&self.0).get(class).cloned()
    }

    /// Reads a runtime class's handler. Where the API server does not let the agent read one, or has none, it is unknown, as for the plugin.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn read(&self, cluster: &Cluster, class: &str) -> Result<Option<String>, ApiError> {
        let request = Request::new(RUNTIME_CLASSES).get(class, &GetParams::default());
        let handler = match cluster.json::<Value>(request).await {
            Ok(found) => found.get("handler").and_then(Value::as_str).map(str::to_owned),
            Err(ApiError::Forbidden(_) | ApiError::NotFound(_)) => None,
            Err(failure) => return Err(failure),
        };
        let read = ReadHandler { handler: handler.clone(), read: Instant::now() };
        lock(&self.0).insert(class.to_owned(), read);
        Ok(handler)
    }

    /// Those of some runtime classes that are sandboxed: every few minutes one request for each whose name does not say it. Where a handler is unknown, the
    /// name alone decides.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn sandboxed<'a>(
        &self,
        cluster: &Cluster,
        runtimes: &SandboxedRuntimes,
        classes: impl Iterator<Item = &'a str>,
    ) -> Result<BTreeSet<String>, ApiError> {
        let mut sandboxed = BTreeSet::new();
        for class in classes.collect::<BTreeSet<&str>>() {
            let is_sandboxed = runtimes.has(class) || {
                let known = self.known(class).filter(|known| known.is_believed(Instant::now()));
                let handler = match known {
                    Some(known) => known.handler,
                    None => self.read(cluster, class).await?,
                };
                handler.is_some_and(|handler| runtimes.has(&handler))
            };
            if is_sandboxed {
                sandboxed.insert(class.to_owned());
            }
        }
        Ok(sandboxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_is_read_again_after_five_minutes() {
        let start = Instant::now();
        let of = ReadHandler { handler: Some("runsc".to_owned()), read: start };
        let is_believed = |seconds| of.is_believed(start + Duration::from_secs(seconds));
        assert!(is_believed(0) && is_believed(299) && !is_believed(300));
    }
}
