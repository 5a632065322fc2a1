//! A plan as text: for iptables-restore, for nft, for people.

mod commands;
mod explain;
mod nft;
mod restore;

pub use commands::{ip_address, ip_route, ip_rule, program_text};
pub use explain::{Section, explain, reason, said_by, scoped_rule_text, sections};
pub use nft::{
    NFT_LOCK_TABLE, NFT_TABLES, chain_name as nft_chain_name, nft_remove, nft_table, nft_text, nft_text_in,
};
pub use restore::{restore_text, rule_text};
