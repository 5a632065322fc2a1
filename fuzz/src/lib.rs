//! What the targets have in common: how an input is cut into parts, and what must be true of every plan.

pub mod kernel;
#[path = "../../crates/netfilter-state/tests/it/of_mesh.rs"]
pub mod of_mesh;
pub mod parts;
pub mod plan;
pub mod text;
