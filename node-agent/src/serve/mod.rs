//! What the agent answers: probes and metrics, the plugin's log lines, events and questions about pods.
//!
//! In: requests at ports and sockets, and what the other rooms report. Out: answers, and readiness with its reasons.
//! It decides nothing about the node, and writes nothing but its sockets.

pub mod log_socket;
pub mod notes;
pub mod plugin_requests;
pub mod plugin_socket;
pub mod server;
