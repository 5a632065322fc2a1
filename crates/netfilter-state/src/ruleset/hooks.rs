//! What hangs on the hooks of IP, in the order in which the kernel asks it.

use super::TableName;
use redirect_core::{rule::Hook, values::Family};
use std::collections::BTreeMap;

/// What hangs on the hooks of IP.
///
/// Priorities alone do not determine the order: at equal priority, the kernel first runs the chain registered last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HookList {
    /// By family and hook. What hangs on a hook for both families is in the lists of both.
    pub entries: BTreeMap<(Family, Hook), Vec<HookEntry>>,
}

impl HookList {
    /// What hangs on a hook, in the order in which the kernel asks it.
    #[must_use]
    pub fn on(&self, family: Family, hook: Hook) -> &[HookEntry] {
        self.entries.get(&(family, hook)).map_or(&[], Vec::as_slice)
    }
}

/// One that hangs on a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookEntry {
    /// Its priority: the lowest goes first.
    pub priority: i32,
    /// Its owner.
    pub owner: HookOwner,
}

/// Whose function hangs on a hook.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HookOwner {
    /// A base chain of nf_tables: table and chain.
    Chain(TableName, String),
    /// Connection tracking begins.
    Tracking,
    /// Address translation: for the first packet of a connection it asks the chains of type nat. Where the kernel lists these,
    /// they follow it, in the order in which it asks them.
    Nat,
    /// A legacy table, by its name.
    Legacy(String),
    /// A function that is known not to decide about a packet's way, by its name.
    Harmless(String),
    /// Another: a BPF program, a function of another module. The name says which.
    Unknown(String),
}
