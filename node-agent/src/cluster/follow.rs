//! Watching pods, one event after the other: no more than one pod is in memory.
//!
//! Not with the library's watcher: that one brings a client of its own, whose answers have limits neither in time nor in size, and whose token
//! stays what it was when the watch began.

use std::time::{Duration, Instant};

use cluster_client::params::WatchParams;
use cluster_client::{ApiError, Request, WatchEvent};
use serde_json::Value;

use super::pods::{PODS, Selection};
use super::{Cluster, PATIENCE, WATCH_PATIENCE};

/// How long the server is to watch, in seconds: for less than we wait for it.
const WATCH_SECONDS: u32 = 240;

/// What happened to a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum PodEvent {
    /// Nothing yet: the watch has begun.
    Watching,
    /// It is new, or other than before.
    Seen(Value),
    /// It is gone, or is not selected any more.
    Gone(Value),
}

/// Why a watch is over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WatchEnd {
    /// The server ended it; it goes on where it ended.
    #[error("the server ended it in time")]
    InTime,
    /// The server has forgotten the version it was to begin at: pods have to be listed.
    #[error("the version to watch from is too old (410)")]
    Expired,
    /// The server refuses (401, 403).
    #[error(
        "the agent may not watch pods: {0}; give its service account the verbs get, list and watch on pods (ClusterRole istio-cni)"
    )]
    Denied(String),
    /// It broke.
    #[error("{text}")]
    Broken {
        /// How.
        text: String,
        /// When the server wants to be asked again.
        retry_after: Option<Duration>,
    },
}

impl From<ApiError> for WatchEnd {
    fn from(failure: ApiError) -> Self {
        match failure {
            ApiError::Busy { code: 410, .. } => Self::Expired,
            ApiError::Unauthorized(words) | ApiError::Forbidden(words) => Self::Denied(words.text),
            ApiError::Impossible(_)
            | ApiError::NotFound(_)
            | ApiError::Busy { .. }
            | ApiError::Garbled { .. }
            | ApiError::Untrusted { .. }
            | ApiError::Unreachable { .. }
            | ApiError::Silent { .. } => {
                Self::Broken { retry_after: failure.retry_after(), text: failure.to_string() }
            }
        }
    }
}

impl Cluster {
    /// Watches pods from a version on, which is kept up to date, until the watch is over.
    pub async fn follow_pods(
        &self,
        of: &Selection,
        version: &mut String,
        each: impl FnMut(PodEvent),
    ) -> WatchEnd {
        self.follow_of(PODS, of, version, each).await
    }

    /// The same of any collection, by its path.
    pub async fn follow_of(
        &self,
        path: &str,
        of: &Selection,
        version: &mut String,
        each: impl FnMut(PodEvent),
    ) -> WatchEnd {
        match self.follow(path, of, version, each).await {
            Ok(end) | Err(end) => end,
        }
    }

    async fn follow(
        &self,
        path: &str,
        of: &Selection,
        version: &mut String,
        mut each: impl FnMut(PodEvent),
    ) -> Result<WatchEnd, WatchEnd> {
        let params = WatchParams::default().fields(&of.fields).timeout(WATCH_SECONDS);
        let params = if of.labels.is_empty() { params } else { params.labels(&of.labels) };
        let start = Instant::now();
        let mut answer = self.client.open(Request::new(path).watch(&params, version), PATIENCE).await?;
        each(PodEvent::Watching);
        loop {
            let left = WATCH_PATIENCE.saturating_sub(start.elapsed());
            let Some(event) = answer.line::<WatchEvent<Value>>(left).await? else {
                return Ok(WatchEnd::InTime);
            };
            match event {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    advance(version, &pod);
                    each(PodEvent::Seen(pod));
                }
                WatchEvent::Deleted(pod) => {
                    advance(version, &pod);
                    each(PodEvent::Gone(pod));
                }
                WatchEvent::Bookmark(mark) => *version = mark.metadata.resource_version,
                WatchEvent::Error(status) if status.code == 410 => return Ok(WatchEnd::Expired),
                WatchEvent::Error(status) => {
                    let text = format!("the API server says {}: {}", status.code, status.message);
                    return Ok(WatchEnd::Broken { text, retry_after: None });
                }
            }
        }
    }
}

fn advance(version: &mut String, pod: &Value) {
    if let Some(newer) = pod.pointer("/metadata/resourceVersion").and_then(Value::as_str) {
        newer.clone_into(version);
    }
}
