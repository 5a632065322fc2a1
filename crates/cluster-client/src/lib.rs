//! The API client of plugin and agent.
//!
//! ```text
//! kubeconfig file ──► kubeconfig::load ──┐
//!                                        ├─► Access ──► Client ──► answer within limits, or a Failure
//! service account ──► Account ───────────┘
//! ```
//!
//! Nothing is taken from the machine: no certificate store, no proxy variable, no credential helper. Every file is a regular one of limited
//! size, every answer has a time limit and a size limit, and every failure says whose fault it is.

mod access;
mod account;
mod backoff;
mod client;
mod failure;
pub mod files;
pub mod kubeconfig;

pub use access::{Access, AccessError};
pub use account::{Account, Trust, server_url};
pub use backoff::{Backoff, random};
pub use client::{ApiResponse, Built, Client};
pub use failure::{ApiError, StatusMessage};

/// Requests as values, and what some of them are answered with.
pub use kube::core::{PartialObjectMeta, Request, WatchEvent, params, request::Error as RequestError};
