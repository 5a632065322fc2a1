//! Taints that keep pods off nodes where they would not be redirected.
//!
//! ```text
//! agent:    readiness, probe ──► verdict ──► steady ──► patch of its own node
//! cluster:  nodes, agents' pods ──► model ──► queue ──► patches, by the leader
//! ```
//!
//! [`node`], [`verdict`] and the cluster's model are pure. [`keeper`] knows one node, its agent's; [`cluster`] knows all nodes, and nothing of what
//! is on them but whether an agent is ready.

pub mod cluster;
pub mod keeper;
pub mod metrics;
pub mod node;
pub mod probe;
pub mod verdict;
