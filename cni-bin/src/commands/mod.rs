//! What each command does.

mod attachment;
mod status;

pub use attachment::{Attachment, add, check};
pub use status::status;
