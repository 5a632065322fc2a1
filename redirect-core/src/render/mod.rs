//! A plan as text: for iptables-restore, for nft, for people.

mod commands;
mod explain;
mod nft;
mod restore;

pub use commands::{ip_address, ip_route, ip_rule};
pub use explain::Section;
pub use nft::{NFT_LOCK_TABLE, NFT_TABLES, nft_remove};
