//! What netfilter holds, as values: rules, native tables and routing found in a network namespace, how they differ from a
//! plan, and the steps that put one in force or take it back.
//!
//! In go the kernel's messages and the text of iptables-save, and plans of `redirect-core`. Out come observations, rulesets,
//! differences, changes and steps, and messages for the kernel ([`netlink::Batch`]).
//!
//! It opens no socket and runs no program; it knows nothing of pods and settings, nor where a packet ends.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::panic
    )
)]
// What is pure, clippy.toml says; tests read recordings.
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

mod align;
pub mod change;
pub mod differences;
mod expressions;
#[cfg(feature = "serde")]
pub mod json;
pub mod netlink;
mod parse;
pub mod route_tables;
pub mod routing;
pub mod ruleset;
pub mod saved;
mod saved_rule;
pub mod state;
pub mod steps;
pub mod xtables;

/// The snippets of the README, as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
