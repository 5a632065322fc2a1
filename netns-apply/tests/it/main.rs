//! What the kernel does with what this crate tells it. Needs root, and network namespaces.

mod apply;
mod common;
mod dumps;
mod legacy;
mod netlink_errors;
mod netlink_native;
mod netlink_random;
mod netlink_recordings;
mod netlink_sets;
mod routes;
mod second_opinion;
