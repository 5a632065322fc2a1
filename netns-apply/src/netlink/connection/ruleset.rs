//! Everything that hangs on the namespace's hooks, from any program.

use super::{Connection, NetlinkError};
use netfilter_state::{
    netlink::request,
    ruleset::{HookList, Ruleset, TableFamily},
};
use redirect_core::{Family, rule::Hook};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

/// How many bytes of set elements are read at most. Other programs' sets may hold millions of addresses.
const MOST_OF_SETS: usize = 8 << 20;

/// Whether the kernel has refused to list what hangs on a hook. Without the module, it searches for it on every request, which
/// takes longer than everything else together.
static LISTS_NO_HOOKS: AtomicBool = AtomicBool::new(false);

impl Connection {
    /// Reads all tables of all families that IP packets meet, at one generation of the ruleset.
    ///
    /// # Errors
    /// As [`observe`](Self::observe).
    pub fn ruleset(&mut self, deadline: Instant) -> Result<Ruleset, NetlinkError> {
        loop {
            self.read = 0;
            let generation = self.generation()?;
            let mut ruleset = Ruleset::default();
            let whole = self.ruleset_into(&mut ruleset)?;
            if whole && self.generation()? == generation {
                return Ok(ruleset);
            }
            if Instant::now() >= deadline {
                return Err(NetlinkError::Contended);
            }
        }
    }

    fn ruleset_into(&mut self, ruleset: &mut Ruleset) -> Result<bool, NetlinkError> {
        let mut whole = self.hooks_into(ruleset)?;
        whole &= self.ask("list tables", request::tables, |message| ruleset.take(message))?;
        if ruleset.tables.is_empty() {
            return Ok(whole);
        }
        // Sets before the rules that look something up in them.
        whole &= self.ask("list sets", request::all_sets, |message| ruleset.take(message))?;
        let mut left = MOST_OF_SETS;
        for (family, table, set) in ruleset.sets() {
            whole &= self.elements_into(ruleset, (family, &table, &set), &mut left)?;
        }
        whole &= self.ask("list chains", request::all_chains, |message| ruleset.take(message))?;
        whole &= self.ask("list rules", request::all_rules, |message| ruleset.take(message))?;
        Ok(whole)
    }

    /// Reads what hangs on the hooks, legacy tables included; nothing where the kernel does not list it.
    fn hooks_into(&mut self, ruleset: &mut Ruleset) -> Result<bool, NetlinkError> {
        if LISTS_NO_HOOKS.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let (mut list, mut whole) = (HookList::default(), true);
        for (family, hook) in
            Family::BOTH.into_iter().flat_map(|family| Hook::ALL.iter().map(move |hook| (family, *hook)))
        {
            let question = |sequence| request::hooks(sequence, family, hook);
            match self.ask("list what hangs on a hook", question, |message| list.take(message)) {
                Ok(is_whole) => whole &= is_whole,
                // An older kernel, or one without this. Rules are read all the same.
                Err(NetlinkError::Question { .. }) => {
                    LISTS_NO_HOOKS.store(true, Ordering::Relaxed);
                    return Ok(true);
                }
                Err(cause) => return Err(cause),
            }
        }
        ruleset.hooks = Some(list);
        Ok(whole)
    }

    /// Reads the elements of a set, as long as some bytes are left for them. Rules that look something up in a set that was not
    /// read are unsupported; all others are supported, regardless of that set's content.
    fn elements_into(
        &mut self,
        ruleset: &mut Ruleset,
        (family, table, set): (TableFamily, &str, &str),
        left: &mut usize,
    ) -> Result<bool, NetlinkError> {
        let limits = (self.most, self.read);
        (self.most, self.read) = (*left, 0);
        let elements = |sequence| request::elements(sequence, family, table, set);
        let whole = if *left == 0 {
            Err(NetlinkError::TooMuch(0))
        } else {
            self.ask("list the elements of a set", elements, |message| ruleset.take(message))
        };
        *left = left.saturating_sub(self.read);
        (self.most, self.read) = limits;
        match whole {
            Err(NetlinkError::TooMuch(_)) => {
                ruleset.leave_unread(family, table, set);
                Ok(true)
            }
            whole => whole,
        }
    }
}
