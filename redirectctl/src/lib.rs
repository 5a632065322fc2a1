//! `redirectctl`: what is planned, what is in force, and what is wrong, in pods' network namespaces.
//!
//! Nothing is ever changed. What is decided from what was read is pure ([`diagnosis`]); what reads is [`api`], [`health`],
//! [`inspect`], [`listeners`], [`node`].

pub mod api;
pub mod bundle;
pub mod cause;
pub mod cluster;
pub mod cni;
pub mod commands;
pub mod diagnosis;
pub mod error;
pub mod health;
pub mod input;
pub mod inspect;
pub mod listeners;
pub mod lost_probes;
pub mod meaning;
pub mod node;
pub mod object;
pub mod packed;
pub mod pod;
pub mod processes;
pub mod report;
pub mod scan;
mod service_translation;
pub mod show;
pub mod status;
pub mod validation;
pub mod watch;
pub mod why;

pub use presentation::{FAILED, FINE, FOUND, packet, picture, plan, printable, text_writer, traffic};

use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the program with these words, without its name, and this environment.
pub fn run(
    words: impl IntoIterator<Item = OsString>,
    env: impl IntoIterator<Item = (OsString, OsString)>,
) -> ExitCode {
    commands::run(words.into_iter().collect(), env.into_iter().collect())
}
