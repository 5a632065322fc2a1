//! Where packets end.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // tests read recordings

mod dependencies;
mod examples;
#[path = "../../../../redirect-core/tests/it/generated/mod.rs"]
mod generated;
mod json;
#[path = "../../../../redirect-core/tests/it/linked/mod.rs"]
mod linked;
#[path = "../../../netfilter-state/tests/it/model_kernel/mod.rs"]
mod model_kernel;
#[path = "../../../../redirect-core/tests/it/recorded/mod.rs"]
mod recorded;
#[path = "../../../../redirect-core/tests/it/running/mod.rs"]
mod running;
mod traffic_difference;
