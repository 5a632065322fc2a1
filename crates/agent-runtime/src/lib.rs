//! What the node agent and the taint controller share: how a long-running controller works and how it sees the API server.
//!
//! In: a service account, a task, a request, a collection to follow. Out: supervised tasks, HTTP responses, metrics, current copies of
//! collections, patches of nodes, events. It does not know the plugin, pods' network namespaces or anything of a node's file system.

mod boot_time;
mod change_error;
pub mod cluster;
pub mod daemon_set;
pub mod metrics;
pub mod node;
mod node_api;
pub mod outage;
pub mod resync;
pub mod serve;
pub mod supervisor;
mod wait;

pub use boot_time::BootTime;
pub use change_error::ChangeError;
pub use node_api::TRIES;
pub use wait::{added_or_due, lock, or_never};

/// The scope of the log lines of both programs.
pub const SCOPE: &str = "cni-agent";
