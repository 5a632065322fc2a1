//! Nodes at the API server: reading one, patching its taints and its condition.

use cluster_client::Request;
use cluster_client::params::{GetParams, Patch, PatchParams};
use serde_json::Value;

use crate::ChangeError;
use crate::cluster::{Cluster, as_json_patch};
use crate::node::{NODES, Node, NodeMarking, RequestedTaint};

/// How often a patch is computed again because another client was faster.
pub const TRIES: usize = 5;

impl Cluster {
    /// A node as it is now.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn node(&self, name: &str) -> Result<Node, ChangeError> {
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
        NodeMarking { taint, old_keys, .. }: &NodeMarking,
        requested: RequestedTaint,
    ) -> Result<bool, ChangeError> {
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
    pub async fn read_again(&self, seen: &Node, error: ChangeError) -> Result<Node, ChangeError> {
        let untrue = match error {
            ChangeError::Changed(_) => None,
            ChangeError::Untrue(why) => Some(why),
            ChangeError::Gone
            | ChangeError::Refused(_)
            | ChangeError::Rejected(_)
            | ChangeError::Unanswered { .. } => return Err(error),
        };
        let now = self.node(seen.name()).await?;
        match untrue {
            _ if now.uid() != seen.uid() => Err(ChangeError::Gone),
            // It did not change: the API server rejects the patch.
            Some(why) if now == *seen => Err(ChangeError::Rejected(why)),
            Some(_) | None => Ok(now),
        }
    }

    /// Sends a JSON patch of a node.
    ///
    /// # Errors
    /// Why it was not accepted.
    pub async fn patch_taints(&self, name: &str, patch: Value) -> Result<(), ChangeError> {
        let request = Request::new(NODES).patch(name, &PatchParams::default(), &Patch::Merge(patch));
        Ok(self.json::<Value>(as_json_patch(request)).await.map(drop)?)
    }

    /// Sends a strategic merge patch of a node's status.
    ///
    /// # Errors
    /// Why it was not accepted.
    pub async fn patch_node_status(&self, name: &str, patch: Value) -> Result<(), ChangeError> {
        let nodes = Request::new(NODES);
        let request =
            nodes.patch_subresource("status", name, &PatchParams::default(), &Patch::Strategic(patch));
        match self.json::<Value>(request).await.map_err(ChangeError::from) {
            // It contains no tests.
            Err(ChangeError::Untrue(why)) => Err(ChangeError::Rejected(why)),
            done => done.map(drop),
        }
    }
}
