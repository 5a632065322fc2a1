//! Where packets end.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // tests read recordings

mod dependencies;
#[path = "../../../../redirect-core/tests/it/generated/mod.rs"]
mod generated;
mod json;
#[path = "../../../../redirect-core/tests/it/linked/mod.rs"]
mod linked;
#[path = "../../../../redirect-core/tests/it/recorded/mod.rs"]
mod recorded;
mod traffic_difference;
