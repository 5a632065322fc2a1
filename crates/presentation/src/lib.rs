//! What `redirectctl` and the web page say of plans, their differences, and the way of a packet: text, JSON and pictures.
//!
//! Nothing here reads a file, asks the kernel or prints: whatever is shown depends on what is given, and both show the same.

pub mod decision;
pub mod flags;
pub mod manifest;
pub mod node_scan;
pub mod packet;
pub mod picture;
pub mod plan;
pub mod printable;
mod severity;
pub mod text_writer;
pub mod traffic;

pub use printable::Printable;
pub use severity::Severity;

use std::net::{IpAddr, Ipv4Addr};

/// The exit code where everything that was asked for was done, and nothing is wrong.
pub const FINE: u8 = 0;
/// What was asked for is not understood, or could not be done.
pub const FAILED: u8 = 1;
/// It was done, and something is wrong.
pub const FOUND: u8 = 2;
/// The version of the JSON that `redirectctl` writes.
pub const VERSION: u32 = 1;
/// The address of a pod that has none yet: one of the documentation.
pub const SOMEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
/// What is said where a pod's plan is made for [`SOMEWHERE`].
pub const NO_ADDRESS: &str =
    "the pod has no address yet; the plan is made for an IPv4 address; --address says others";

/// The addresses of a list, which a flag or a field of this name has.
///
/// # Errors
/// The first word that is not an address.
pub fn addresses(name: &str, text: &str) -> Result<Vec<IpAddr>, String> {
    let parse = |word: &str| word.trim().parse().map_err(|_| format!("{name}: {word:?} is not an address"));
    text.split(',').map(parse).collect()
}
