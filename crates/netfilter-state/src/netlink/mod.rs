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

mod batch;
mod batch_error;
mod hooks;
mod iptables;
pub mod kept;
mod layout;
mod native;
mod native_change;
mod native_difference;
mod native_state;
mod observed;
mod own_table;
mod part;
mod probes;
mod request;
mod ruleset;
pub use ruleset::ChainToRead;
pub(crate) mod sets;

#[cfg(test)]
pub(crate) mod recorded;
#[cfg(test)]
mod tests;

pub use crate::expressions::wire::{AnswerEnd, Message, Messages};
pub use crate::expressions::xt::Extension;
pub use batch::{Batch, FinishedBatch};
pub use batch_error::BatchError;
pub use native_difference::{NativeDifference, NativeDifferenceKind};
pub use native_state::NativeState;
pub use observed::{Observed, TableObstacle};
pub use part::{ChainRef, MessagePart};
pub use probes::ProbeTable;
pub use request::Question;
