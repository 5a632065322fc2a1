//! nf_tables over netlink: changes as bytes for the kernel, and the kernel's answers as rules. No socket: bytes only.
//!
//! A [`Batch`] holds the changes of both families, and of native tables, in one transaction. Rules of iptables' tables are
//! encoded as iptables-nft 1.8.9 does, so that its tools print, find and remove them: nf_tables' own expressions for
//! interfaces, addresses, single ports and packet marks, xt matches and targets for the rest (an iptables that reads an
//! expression where it expects an xt extension declares the whole table incompatible). Native tables hold native
//! expressions only.
//!
//! [`Observed`] reads rules of any origin; those that no plan can have made become [`Entry::Foreign`](crate::state::Entry).
//!
//! Numbers are in network order, xt structures and values that the kernel compares with its own in the machine's.

mod abi;
mod batch;
#[cfg(feature = "model")]
mod damage;
mod decode;
mod expression;
mod foreign;
mod hooks;
mod iptables;
mod layout;
mod native;
mod native_change;
mod native_difference;
mod native_state;
mod observed;
mod part;
mod reading;
pub mod request;
mod ruleset;
mod seen;
pub(crate) mod sets;
mod wire;
mod xt;
mod xtables;

#[cfg(test)]
pub(crate) mod recorded;
#[cfg(test)]
mod tests;

pub use abi::family_number;
pub use batch::{Batch, BatchError, FinishedBatch};
pub(crate) use foreign::RawRule;
pub use iptables::Unencodable;
pub use native_difference::{NativeDifference, NativeDifferenceKind};
pub use native_state::NativeState;
pub use observed::{Observed, Obstacle};
pub use part::{ChainRef, Part, extensions};
pub(crate) use reading::sets::Sets;
pub use wire::{Answer, Message, Messages};
pub use xt::Extension;
pub use xtables::{LegacyChains, LegacyTable, MalformedTable};
