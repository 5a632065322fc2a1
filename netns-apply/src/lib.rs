//! Applies, observes and undoes a plan in a Linux network namespace.
//!
//! A [`Session`] does all of it in a namespace that a path names. Beneath it, everything acts on the network namespace of the calling
//! thread ([`netns::Netns::run`] runs work in another one): [`apply()`] puts a plan in force wholly or not at all; [`cleanup`] leaves
//! nothing behind; [`verify()`] names what is not as planned.
//!
//! The environment of the process is never read: what a caller wants from it, it passes in.

// A program that only looks uses less of what reads.
#![cfg_attr(not(feature = "write"), allow(dead_code))]

#[cfg(feature = "write")]
mod apply;
#[cfg(feature = "write")]
mod backend;
#[cfg(feature = "write")]
mod branch_interfaces;
#[cfg(feature = "write")]
mod capabilities;
#[cfg(feature = "write")]
pub mod connections;
#[cfg(feature = "write")]
mod error;
#[cfg(feature = "write")]
mod exec;
pub mod facts;
#[cfg(feature = "write")]
mod fingerprint;
#[cfg(feature = "write")]
mod handles;
#[cfg(feature = "write")]
mod kept;
#[cfg(feature = "write")]
mod legacy;
#[cfg(feature = "write")]
mod live;
#[cfg(feature = "write")]
mod lock;
#[cfg(feature = "write")]
mod mismatch;
#[cfg(feature = "write")]
pub mod netlink;
pub mod netns;
#[cfg(feature = "write")]
pub mod notify;
#[cfg(feature = "write")]
mod observe;
#[cfg(feature = "write")]
mod options;
#[cfg(feature = "write")]
mod pause;
#[cfg(feature = "write")]
mod preview;
#[cfg(feature = "write")]
mod probe_routes;
#[cfg(feature = "write")]
mod probes;
#[cfg(feature = "write")]
mod restore;
pub mod routes;
#[cfg(feature = "write")]
mod session;
mod socket;
mod system_error;
#[cfg(feature = "write")]
mod verify;

#[cfg(feature = "write")]
pub use self::{
    apply::{ApplyOutcome, apply, apply_and_search, cleanup, preflight},
    backend::{Backend, Because},
    capabilities::Capability,
    error::{ApplyError, LegacyError, RollbackOutcome, RunError},
    exec::{ExecError, Programs},
    fingerprint::Fingerprint,
    live::Live,
    lock::LockError,
    mismatch::{Impact, Mismatch},
    options::ApplyOptions,
    preview::cleanup_preview,
    probe_routes::ProbeRouteError,
    session::{Session, SessionError},
    verify::{Snapshot, Verdict, verify},
};
pub use system_error::SystemError;

/// The snippet of the README, as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
