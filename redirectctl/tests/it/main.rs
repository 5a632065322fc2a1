//! The program, and its library, without a node.

mod docs;
mod memory;
mod plan;
mod schema;
mod words;
