//! ZDS, by which a node's agent passes pods to ztunnel: their identities, and a descriptor of each network namespace, over a Unix socket that
//! keeps the bounds of messages (SOCK_SEQPACKET).
//!
//! ztunnel connects and sends a hello. The server answers with a snapshot of all pods, then with what changes. Each message is one datagram,
//! and the next one waits for ztunnel's acknowledgement.
//!
//! - [`Server`] is the protocol for any number of connections: pure, without sockets and without a clock.
//! - [`wire`] has the messages.
//! - `socket`, with the feature of that name, serves a socket file on a thread of its own.

#![cfg_attr(not(feature = "socket"), no_std)]

extern crate alloc;

mod server;
#[cfg(feature = "socket")]
pub mod socket;
pub mod wire;
mod workload;

pub use server::{
    CloseReason, ConnectionId, DEADLINE, LONGEST_RETRY, MOST_CONNECTIONS, Newcomer, PodState, Server,
    ServerAction, ServerInput,
};
pub use workload::{NetnsInode, ZdsWorkload};
