//! Plans as messages and text of the kernel, and back.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)] // tests read recordings

mod ambient_recordings;
mod dependencies;
mod examples;
#[path = "../../../../redirect-core/tests/it/generated/mod.rs"]
mod generated;
#[path = "../../../../redirect-core/tests/it/linked/mod.rs"]
mod linked;
mod model;
mod model_kernel;
mod of_mesh;
mod properties;
#[path = "../../../../redirect-core/tests/it/recorded/mod.rs"]
mod recorded;
mod recordings;
#[path = "../../../../redirect-core/tests/it/running/mod.rs"]
mod running;
mod steps;
