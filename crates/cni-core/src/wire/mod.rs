//! The wire protocol of the Container Network Interface: environment in, JSON in, JSON out.
//!
//! Follows the specification at <https://www.cni.dev/docs/spec/>, versions 0.1.0 to 1.1.0.

mod compatibility;
mod environment;
mod error;
mod object;
mod result;
mod version;

pub(crate) use environment::is_plain_name;
pub use environment::{CniCommand, Invocation, PodArgs};
pub use error::{CniError, Code};
pub use object::RawObject;
pub use result::PrevResult;
pub use version::Version;
