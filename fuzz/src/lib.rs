//! What the targets have in common: how an input is cut into parts, and what must be true of every plan.

pub mod kernel;
pub mod parts;
pub mod plan;
pub mod text;
