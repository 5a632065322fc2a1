//! Nodes at the API server: one is read, its taint and its condition are patched, events tell of it.

use cluster_client::params::{GetParams, Patch, PatchParams};
use cluster_client::{AccessError, ApiError, Limits, Request};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::Value;
use std::time::Duration;

use super::{Cluster, PATIENCE, Telling};
use crate::taint::node::{Node, Taint, Wanted};

/// All nodes.
pub const NODES: &str = "/api/v1/nodes";
/// How often a patch is worked out anew because somebody else was faster.
pub const TRIES: usize = 5;

/// Why a node was not read or changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// There is no such node.
    #[error("the node is gone")]
    Gone,
    /// Somebody else wrote it in the same moment (409).
    #[error("the node changed meanwhile: {0}")]
    Changed(String),
    /// A test of the patch does not hold, or the server does not want it: it answers 422 in both cases.
    #[error("the node is not as it was seen, or the change is not allowed: {0}")]
    Untrue(String),
    /// The server refuses (401, 403).
    #[error("{0}")]
    Refused(String),
    /// The server does not want it, whenever it is asked.
    #[error("{0}")]
    Rejected(String),
    /// No answer, or none that says whether it was done.
    #[error("{text}")]
    Unanswered {
        /// What there was instead.
        text: String,
        /// When the server wants to be asked again.
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

/// How a node came to be as it is wanted.
#[derive(Debug, Clone, PartialEq)]
pub struct Settled {
    /// As it was before.
    pub node: Node,
    /// Whether it was changed.
    pub changed: bool,
}

impl Cluster {
    /// A node as it is now.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn node(&self, name: &str) -> Result<Node, NodeError> {
        let request = Request::new(NODES).get(name, &GetParams::default());
        Ok(self.client.json(request, Limits::object(PATIENCE)).await?)
    }

    /// Makes a node have the taint, or be free of it. Where somebody else changes the node meanwhile, it is read anew; a node of
    /// another UID than that of `known` is left alone. `known` is what is known of the node; it may be out of date.
    ///
    /// # Errors
    /// Why it is not as wanted.
    pub async fn set_taint(
        &self,
        known: &Node,
        taint: &Taint,
        old_keys: &[String],
        wanted: Wanted,
    ) -> Result<Settled, NodeError> {
        let mut node = known.clone();
        let mut tries = 0;
        loop {
            let Some(patch) = node.taint_patch(taint, old_keys, wanted) else {
                return Ok(Settled { node, changed: false });
            };
            tries += 1;
            match self.patch_taints(node.name(), patch).await {
                Ok(()) => return Ok(Settled { node, changed: true }),
                Err(error) if tries < TRIES => node = self.read_anew(&node, error).await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// A node as it is after a patch that was worked out on `seen` did not fit: to work it out anew.
    ///
    /// # Errors
    /// The error itself where it is another one, or why the patch will never fit.
    pub async fn read_anew(&self, seen: &Node, error: NodeError) -> Result<Node, NodeError> {
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
            // Nobody changed it: it is the patch that the server does not want.
            Some(why) if now == *seen => Err(NodeError::Rejected(why)),
            Some(_) | None => Ok(now),
        }
    }

    /// Sends a JSON patch of a node.
    ///
    /// # Errors
    /// Why it was not taken.
    pub async fn patch_taints(&self, name: &str, patch: Value) -> Result<(), NodeError> {
        let mut request = Request::new(NODES).patch(name, &PatchParams::default(), &Patch::Merge(patch));
        if let Ok(request) = &mut request {
            // The library's own JSON patches need two more crates, and are the same bytes.
            let kind = HeaderValue::from_static("application/json-patch+json");
            request.headers_mut().insert(CONTENT_TYPE, kind);
        }
        Ok(self.client.json::<Value>(request, Limits::object(PATIENCE)).await.map(drop)?)
    }

    /// Sends a strategic merge patch of a node's status.
    ///
    /// # Errors
    /// Why it was not taken.
    pub async fn patch_node_status(&self, name: &str, patch: Value) -> Result<(), NodeError> {
        let nodes = Request::new(NODES);
        let request =
            nodes.patch_subresource("status", name, &PatchParams::default(), &Patch::Strategic(patch));
        match self.client.json::<Value>(request, Limits::object(PATIENCE)).await.map_err(NodeError::from) {
            // There are no tests in it.
            Err(NodeError::Untrue(why)) => Err(NodeError::Rejected(why)),
            done => done.map(drop),
        }
    }

    /// Sends an event about a node. It goes into namespace default, where the API server wants those about what has no namespace.
    ///
    /// # Errors
    /// When the server does not take it.
    pub async fn tell_of_node(&self, node: &Node, telling: &Telling<'_>) -> Result<(), String> {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.name().to_owned()),
            uid: Some(node.uid().to_owned()),
            ..ObjectReference::default()
        };
        self.send_event("default", about, telling).await
    }
}
