//! What the kernel does with what this crate tells it. Needs root, and network namespaces.

mod apply;
mod common;
mod connections;
mod dumps;
mod examples;
mod fingerprint;
mod large;
mod legacy;
mod links;
mod netlink_errors;
mod netlink_native;
mod netlink_random;
mod netlink_recordings;
mod netlink_sets;
mod netns;
mod notify;
mod routes;
#[path = "../../../redirect-core/tests/it/running/mod.rs"]
mod running;
mod saved_dumps;
mod second_opinion;
mod xtables_read;
