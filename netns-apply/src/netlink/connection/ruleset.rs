//! Everything that hangs on the namespace's hooks, from any program.

use super::{NetlinkError, NftConnection};
use netfilter_state::{
    netlink::Question,
    ruleset::{HookList, HookedRules, TableFamily},
};
use redirect_core::{Family, rule::Hook};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

/// How many bytes of set elements are read at most, and how many of sets without intervals: of these, the kernel passes over all that it
/// has listed with each datagram. Other programs' sets may hold millions of addresses.
const MOST_OF_SETS: usize = 4 << 20;
const MOST_OF_HASHES: usize = 3 << 19;

/// How many bytes that may be read stand for one rule: what reading and following it costs, whatever its length.
const BYTES_PER_RULE: usize = 550;

/// How many sets are asked for their elements at most, and how many chains for their rules where all together have too many: each is a
/// request.
const MOST_ASKED: usize = 1 << 9;

/// Whether the kernel has refused to list what hangs on a hook. Without the module, it searches for it on every request, which
/// takes longer than everything else together.
static LISTS_NO_HOOKS: AtomicBool = AtomicBool::new(false);

impl NftConnection {
    /// How many rules are read and followed at most.
    pub(crate) const fn most_rules(&self) -> usize {
        self.most / BYTES_PER_RULE
    }

    /// Reads all tables of all families that IP packets meet, at one generation of the ruleset.
    ///
    /// # Errors
    /// As [`observe`](Self::observe).
    pub fn ruleset(&mut self, deadline: Instant) -> Result<HookedRules, NetlinkError> {
        loop {
            self.read = 0;
            let generation = self.generation()?;
            let mut ruleset = HookedRules::default();
            let whole = self.ruleset_into(&mut ruleset)?;
            if whole && self.generation()? == generation {
                ruleset.forget_elements();
                return Ok(ruleset);
            }
            if Instant::now() >= deadline {
                return Err(NetlinkError::Contended);
            }
        }
    }

    fn ruleset_into(&mut self, ruleset: &mut HookedRules) -> Result<bool, NetlinkError> {
        let mut whole = self.hooks_into(ruleset, &Family::BOTH)?;
        whole &= self.ask("list tables", Question::Tables, |message| ruleset.take(message))?;
        if ruleset.tables.is_empty() {
            return Ok(whole);
        }
        // Sets before the rules that look something up in them.
        whole &= self.ask("list sets", Question::Sets, |message| ruleset.take(message))?;
        let (mut left, mut left_of_hashes, sets) = (MOST_OF_SETS, MOST_OF_HASHES, ruleset.sets());
        // The kernel searches its list for each.
        let most = MOST_ASKED.saturating_mul(MOST_ASKED).checked_div(sets.len()).unwrap_or_default();
        for (number, (family, table, set)) in sets.into_iter().enumerate() {
            if number >= most.min(MOST_ASKED) {
                (left, left_of_hashes) = (0, 0);
            }
            let has_intervals = ruleset.has_intervals(family, &table, &set);
            let left = if has_intervals { &mut left } else { &mut left_of_hashes };
            whole &= self.elements_into(ruleset, (family, &table, &set), left)?;
        }
        match self.ask("list chains", Question::Chains(None), |message| ruleset.take(message)) {
            // The list of hooks has those that are missing.
            Err(NetlinkError::TooMuch(_)) if ruleset.hooks.is_some() => {
                self.read = 0;
            }
            chains => whole &= chains?,
        }
        Ok(whole & self.rules_into(ruleset)?)
    }

    /// Reads the rules of all chains or, where they are too many, of one after the other: what a long one holds makes doubtful only
    /// what passes it.
    fn rules_into(&mut self, ruleset: &mut HookedRules) -> Result<bool, NetlinkError> {
        const WHAT: &str = "list rules";
        let (chains, mut left) = (ruleset.chains_to_read(), self.most_rules());
        let all = chains.iter().fold(0_usize, |all, one| all.saturating_add(one.rules));
        if all <= left {
            match self.ask(WHAT, Question::Rules, |message| ruleset.take(message)) {
                Err(NetlinkError::TooMuch(_)) => ruleset.forget_rules(),
                whole => return whole,
            }
        }
        self.read = 0;
        let mut whole = true;
        for (number, chain) in chains.iter().enumerate() {
            let of_chain = Question::RulesOfChain(chain.family, &chain.table, &chain.chain);
            let read = if chain.rules > left || number >= MOST_ASKED {
                Err(NetlinkError::TooMuch(self.most))
            } else {
                self.ask(WHAT, of_chain, |message| ruleset.take(message))
            };
            match read {
                Err(NetlinkError::TooMuch(_)) => ruleset.leave_chain_unread(chain),
                read => {
                    whole &= read?;
                    left = left.saturating_sub(chain.rules);
                }
            }
        }
        Ok(whole)
    }

    /// Reads what hangs on the hooks of these families, legacy tables included; nothing where the kernel does not list it. `false` if it
    /// changed concurrently.
    pub(crate) fn hooks_into(
        &mut self,
        ruleset: &mut HookedRules,
        families: &[Family],
    ) -> Result<bool, NetlinkError> {
        if LISTS_NO_HOOKS.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let (mut list, mut whole) = (HookList::default(), true);
        for (family, hook) in
            families.iter().flat_map(|family| Hook::ALL.iter().map(move |hook| (*family, *hook)))
        {
            let question = Question::Hooks(family, hook);
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
        ruleset: &mut HookedRules,
        (family, table, set): (TableFamily, &str, &str),
        left: &mut usize,
    ) -> Result<bool, NetlinkError> {
        let limits = (self.most, self.read);
        (self.most, self.read) = (*left, 0);
        let elements = Question::Elements(family, table, set);
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
