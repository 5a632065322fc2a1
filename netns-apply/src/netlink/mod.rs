//! nf_tables over a netlink socket: everything in one transaction, no helper program, no lock.
//!
//! [`NftConnection::observe`] reads the state, [`NftConnection::commit`] sends changes based on it; the kernel refuses them
//! if another program has changed anything since, and then they are sent again as long as they still fit. The encoding is
//! [`netfilter_state::netlink`]'s business.

mod connection;
mod error;

pub use connection::NftConnection;
pub use error::{Missing, NetlinkError};
