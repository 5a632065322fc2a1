//! The node's pods with a sidecar: whether their rules are what the plugin made of them, and what is done where they are not.
//!
//! In: the API server's pods, network namespaces, changes that the kernel reports. Out: rules in force, labels, events, evictions and metrics.
//! It may not know how the plugin came to the node; ambient mode has a room of its own.

pub mod check;
pub mod drift;
pub mod heal;
pub mod held_pods;
pub mod netns_changes;
pub mod repair;
