//! A plan as text: for iptables-restore, for nft, for people.

mod commands;
mod explain;
mod nft;
mod restore;

pub use explain::Section;
