//! What each command does.

mod attachment;
mod status;

pub use attachment::{Job, add, check};
pub use status::status;
