//! A plan as text: for iptables-restore, for nft, for people.

mod commands;
mod explain;
mod nft;
mod restore;

use core::fmt::{self, Write};
pub use explain::Section;

fn line(text: &mut alloc::string::String, words: fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{words}");
}
