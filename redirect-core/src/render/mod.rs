//! A plan as text: for iptables-restore, for nft, for people.

mod explain;
mod nft;
mod restore;

pub use explain::explain;
pub use nft::{
    NFT_LOCK_TABLE, NFT_TABLES, chain_name as nft_chain_name, nft_remove, nft_table, nft_text, nft_text_in,
};
pub use restore::{restore_text, rule_text};
