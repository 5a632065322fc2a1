//! Nodes at the API server: reading one, patching its taints and its condition.

use cluster_client::params::{GetParams, Patch, PatchParams};
use cluster_client::{AccessError, ApiError, Request};
use serde_json::Value;
use std::time::Duration;

use crate::cluster::{Cluster, as_json_patch};
use crate::node::{NODES, Node, RequestedTaint, Taint};

/// How often a patch is computed again because another client was faster.
pub const TRIES: usize = 5;

/// Why a node was not read or changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// The node does not exist.
    #[error("the node is gone")]
    Gone,
    /// Another client wrote it at the same time (409).
    #[error("the node changed concurrently: {0}")]
    Changed(String),
    /// A test of the patch fails, or the API server rejects the change: its status is 422 in both cases.
    #[error("the node changed since it was read, or the change is not allowed: {0}")]
    Untrue(String),
    /// The API server denies access (401, 403).
    #[error("{0}")]
    Refused(String),
    /// The API server rejects it, now and later.
    #[error("{0}")]
    Rejected(String),
    /// No response, or none that shows whether the change was made.
    #[error("{text}")]
    Unanswered {
        /// What happened.
        text: String,
        /// When the API server wants the next request.
        retry_after: Option<Duration>,
    },
}

impl NodeError {
    /// The word for metrics.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Changed(_) | Self::Untrue(_) => "changed",
            Self::Refused(_) => "refused",
            Self::Rejected(_) => "rejected",
            Self::Unanswered { .. } => "unanswered",
        }
    }

    /// When the API server wants the next request, if it said so.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        if let Self::Unanswered { retry_after, .. } = self { *retry_after } else { None }
    }
}

impl From<AccessError> for NodeError {
    fn from(error: AccessError) -> Self {
        Self::Unanswered { text: error.to_string(), retry_after: None }
    }
}

impl From<ApiError> for NodeError {
    fn from(failure: ApiError) -> Self {
        let text = failure.to_string();
        match &failure {
            ApiError::NotFound(words) if words.by_api => Self::Gone,
            ApiError::Busy { code: 409, .. } => Self::Changed(text),
            ApiError::Busy { code: 422, .. } => Self::Untrue(text),
            ApiError::Unauthorized(_) | ApiError::Forbidden(_) => Self::Refused(text),
            ApiError::Busy { code: 408 | 429 | 500..=599, retry_after, .. } => {
                Self::Unanswered { text, retry_after: *retry_after }
            }
            ApiError::Busy { .. } | ApiError::Impossible(_) => Self::Rejected(text),
            ApiError::NotFound(_)
            | ApiError::Garbled { .. }
            | ApiError::Untrusted { .. }
            | ApiError::Unreachable { .. }
            | ApiError::Silent { .. } => Self::Unanswered { text, retry_after: None },
        }
    }
}

impl Cluster {
    /// A node as it is now.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn node(&self, name: &str) -> Result<Node, NodeError> {
        let request = Request::new(NODES).get(name, &GetParams::default());
        Ok(self.json(request).await?)
    }

    /// Adds the taint to a node, or removes it; whether that took a patch. If another client changes the node at the same time, it is read again;
    /// a node with another UID than that of `known` stays as it is. `known` may be stale.
    ///
    /// # Errors
    /// Why the node is not as requested.
    pub async fn set_taint(
        &self,
        known: &Node,
        taint: &Taint,
        old_keys: &[String],
        requested: RequestedTaint,
    ) -> Result<bool, NodeError> {
        let mut node = known.clone();
        let mut tries = 0;
        loop {
            let Some(patch) = node.taint_patch(taint, old_keys, requested) else {
                return Ok(false);
            };
            tries += 1;
            match self.patch_taints(node.name(), patch).await {
                Ok(()) => return Ok(true),
                Err(error) if tries < TRIES => node = self.read_again(&node, error).await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads a node again after a patch that was computed from `seen` failed, so that the patch can be computed again.
    ///
    /// # Errors
    /// The error itself if it is another one, or why the patch will always fail.
    pub async fn read_again(&self, seen: &Node, error: NodeError) -> Result<Node, NodeError> {
        let untrue = match error {
            NodeError::Changed(_) => None,
            NodeError::Untrue(why) => Some(why),
            NodeError::Gone
            | NodeError::Refused(_)
            | NodeError::Rejected(_)
            | NodeError::Unanswered { .. } => return Err(error),
        };
        let now = self.node(seen.name()).await?;
        match untrue {
            _ if now.uid() != seen.uid() => Err(NodeError::Gone),
            // It did not change: the API server rejects the patch.
            Some(why) if now == *seen => Err(NodeError::Rejected(why)),
            Some(_) | None => Ok(now),
        }
    }

    /// Sends a JSON patch of a node.
    ///
    /// # Errors
    /// Why it was not accepted.
    pub async fn patch_taints(&self, name: &str, patch: Value) -> Result<(), NodeError> {
        let request = Request::new(NODES).patch(name, &PatchParams::default(), &Patch::Merge(patch));
        Ok(self.json::<Value>(as_json_patch(request)).await.map(drop)?)
    }

    /// Sends a strategic merge patch of a node's status.
    ///
    /// # Errors
    /// Why it was not accepted.
    pub async fn patch_node_status(&self, name: &str, patch: Value) -> Result<(), NodeError> {
        let nodes = Request::new(NODES);
        let request =
            nodes.patch_subresource("status", name, &PatchParams::default(), &Patch::Strategic(patch));
        match self.json::<Value>(request).await.map_err(NodeError::from) {
            // It contains no tests.
            Err(NodeError::Untrue(why)) => Err(NodeError::Rejected(why)),
            done => done.map(drop),
        }
    }
}
