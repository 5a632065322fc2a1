//! Which runtime classes are sandboxed: by their names or, where a name is unknown, by their handlers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use cluster_client::params::GetParams;
use cluster_client::{ApiError, Request};
use cni_core::sandboxed::{RUNTIME_CLASSES, SandboxedRuntimes};
use controller_runtime::lock;
use serde_json::Value;
use tokio::time::Instant;

use super::{Cluster, Connection};

/// How long a handler that was read is believed. A runtime class cannot change its handler, but another class can take its name.
const BELIEVED: Duration = Duration::from_secs(300);

/// Handlers of the runtime classes of pods that are created, as they were read.
#[derive(Debug, Default)]
pub struct RuntimeHandlers(Mutex<BTreeMap<String, (String, Instant)>>);

impl RuntimeHandlers {
    /// The handler of a runtime class, read every few minutes; an older one is better than none while the API server does not answer.
    pub async fn handler(&self, connection: &Connection, class: &str, patience: Duration) -> Option<String> {
        let known = lock(&self.0).get(class).cloned();
        if let Some((handler, at)) = &known
            && at.elapsed() < BELIEVED
        {
            return Some(handler.clone());
        }
        let cluster = connection.get().ok();
        let read = match &cluster {
            Some(cluster) => tokio::time::timeout(patience, read(cluster, class)).await.ok(),
            None => None,
        };
        match read {
            Some(Ok(found)) => {
                let found = found?;
                lock(&self.0).insert(class.to_owned(), (found.clone(), Instant::now()));
                Some(found)
            }
            Some(Err(_)) | None => known.map(|(handler, _)| handler),
        }
    }
}

/// Handlers of runtime classes, as they were read.
#[derive(Debug, Default)]
pub struct Handlers {
    by_class: BTreeMap<String, ReadHandler>,
}

/// A class's handler, if the API server has the class and shows it.
#[derive(Debug)]
struct ReadHandler {
    handler: Option<String>,
    read: Instant,
}

impl Handlers {
    /// Those of some runtime classes that are sandboxed: every few minutes one request for each whose name does not say it. Where the API server does not
    /// let the agent read one, or has none, its name alone decides, as for the plugin. Forgets all other classes.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn sandboxed<'a>(
        &mut self,
        cluster: &Cluster,
        known: &SandboxedRuntimes,
        classes: impl Iterator<Item = &'a str>,
    ) -> Result<BTreeSet<String>, ApiError> {
        let classes: BTreeSet<&str> = classes.collect();
        self.keep(&classes, Instant::now());
        let mut sandboxed = BTreeSet::new();
        for class in classes {
            if known.has(class)
                || self.handler(cluster, class).await?.is_some_and(|handler| known.has(handler))
            {
                sandboxed.insert(class.to_owned());
            }
        }
        Ok(sandboxed)
    }

    /// Forgets classes that no pod names, and what was read too long ago.
    fn keep(&mut self, classes: &BTreeSet<&str>, now: Instant) {
        self.by_class
            .retain(|class, of| classes.contains(class.as_str()) && now.duration_since(of.read) < BELIEVED);
    }

    async fn handler(&mut self, cluster: &Cluster, class: &str) -> Result<Option<&str>, ApiError> {
        if !self.by_class.contains_key(class) {
            let handler = read(cluster, class).await?;
            self.by_class.insert(class.to_owned(), ReadHandler { handler, read: Instant::now() });
        }
        Ok(self.by_class.get(class).and_then(|of| of.handler.as_deref()))
    }
}

async fn read(cluster: &Cluster, class: &str) -> Result<Option<String>, ApiError> {
    let request = Request::new(RUNTIME_CLASSES).get(class, &GetParams::default());
    match cluster.json::<Value>(request).await {
        Ok(found) => Ok(found.get("handler").and_then(Value::as_str).map(str::to_owned)),
        Err(ApiError::Forbidden(_) | ApiError::NotFound(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_is_read_again_after_five_minutes_or_when_no_pod_named_its_class() {
        let start = Instant::now();
        let after = |seconds, classes: &[&str]| {
            let of = ReadHandler { handler: Some("runsc".to_owned()), read: start };
            let mut handlers = Handlers { by_class: [("secure".to_owned(), of)].into() };
            handlers.keep(&classes.iter().copied().collect(), start + Duration::from_secs(seconds));
            handlers.by_class.contains_key("secure")
        };
        assert!(after(0, &["secure"]) && after(299, &["nvidia", "secure"]));
        assert!(!after(300, &["secure"]) && !after(1, &["nvidia"]));
    }
}
