//! A plan as text: for iptables-restore, for nft, for people.

mod explain;
mod nft;
mod restore;

pub use explain::explain;
pub use nft::{NFT_LOCK_TABLE, NFT_TABLES, nft_remove, nft_text, nft_text_in};
pub(crate) use nft::{chain_name as nft_chain_name, nft_table};
pub use restore::{restore_text, rule_text};
