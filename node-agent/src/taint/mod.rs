//! The agent's taint manager: the taint and the condition of its own node.
//!
//! ```text
//! readiness, probe ──► health ──► damper ──► patch of the node
//! ```
//!
//! [`health`] is pure. The controller of all nodes is a process of its own (crate `taint-controller`).

pub mod health;
mod manager;
pub mod probe;

pub use manager::NodeTaintManager;
