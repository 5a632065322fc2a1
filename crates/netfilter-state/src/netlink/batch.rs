//! One transaction: the changes of both families and of the native tables, in force at one instant or not at all.

use super::{
    batch_error::BatchError,
    iptables,
    layout::ChainLayout,
    native_state::ChainHook,
    observed::{Observed, SIGNATURE},
    part::{ChainRef, MessagePart},
};
use crate::expressions::{
    abi::{self, attribute, family, flags, kind},
    expression::Expressions,
    wire::{Head, MessageWriter},
};
use crate::{
    change::{IptablesChange, TableChange},
    state::Entry,
};
use redirect_core::{plan::DataPlane, rule::Chain, values::Family};

/// A transaction being written. Nothing is sent by this type.
#[derive(Debug)]
pub struct Batch<'a> {
    observed: &'a Observed,
    writer: MessageWriter,
    parts: Vec<MessagePart<'a>>,
    /// How many sets have been written; the next one's number.
    pub(super) sets: u32,
}

/// The number of the message that begins a transaction; the messages of its parts follow.
const BEGIN: u32 = 1;

impl<'a> Batch<'a> {
    /// A transaction that is valid as long as the ruleset is as observed, if that was bound to a generation.
    #[must_use]
    pub fn new(observed: &'a Observed) -> Self {
        let mut writer = MessageWriter::default();
        writer.message(Head::of_transaction(kind::BATCH_BEGIN, BEGIN), |body| {
            if let Some(generation) = observed.generation() {
                body.u32(attribute::BATCH_GENERATION, generation);
            }
        });
        Self { observed, writer, parts: Vec::new(), sets: 0 }
    }

    /// Adds a family's change.
    ///
    /// # Errors
    /// When it is not a change of what was observed, or has no encoding.
    pub fn change(&mut self, family: Family, change: &'a IptablesChange) -> Result<(), BatchError> {
        change.tables.iter().try_for_each(|table| self.table(family, table))
    }

    /// Whether nothing is left to send.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Ends the transaction.
    ///
    /// # Errors
    /// [`BatchError::TooLong`].
    pub fn finish(mut self) -> Result<FinishedBatch<'a>, BatchError> {
        // One confirmation is enough: the kernel sends it only when the whole transaction is in force.
        self.writer.flag_last(flags::ACK);
        let confirmed = self.next_sequence().saturating_sub(1);
        let end = Head::of_transaction(kind::BATCH_END, self.next_sequence());
        self.writer.message(end, |_| {});
        let bytes = self.writer.finish().ok_or(BatchError::TooLong)?;
        Ok(FinishedBatch { bytes, parts: self.parts, confirmed })
    }

    /// Writes one message of the transaction, which is about a table of this name or what it holds.
    pub(super) fn part(
        &mut self,
        (kind, flags): (u16, u16),
        family: u8,
        table: &str,
        part: MessagePart<'a>,
        body: impl FnOnce(&mut MessageWriter),
    ) {
        let head =
            Head { kind, flags: flags | flags::REQUEST, sequence: self.next_sequence(), family, resource: 0 };
        self.writer.message(head, |message| {
            message.text(attribute::TABLE, table);
            body(message);
        });
        self.parts.push(part);
    }

    fn next_sequence(&self) -> u32 {
        u32::try_from(self.parts.len()).unwrap_or(u32::MAX).saturating_add(BEGIN).saturating_add(1)
    }

    fn table(&mut self, family: Family, change: &'a TableChange) -> Result<(), BatchError> {
        let table = change.table;
        let layouts = ChainLayout::of(self.observed, family, change)?;
        let (number, name) = (family.number(), table.name());
        if !self.observed.has_table(family, table) {
            self.part((kind::NEW_TABLE, flags::CREATE), number, name, MessagePart::Table(name), |_| {});
        }
        let place = |chain: &'a Chain| ChainRef { family, table, chain };
        for (chain, _) in layouts.iter().filter(|(_, layout)| layout.is_new()) {
            self.new_chain(place(chain));
        }
        for (chain, layout) in &layouts {
            self.removals(place(chain), layout);
        }
        for (chain, _) in layouts.iter().filter(|(_, layout)| layout.is_removed()) {
            let part = MessagePart::RemovedChain(place(chain));
            self.part((kind::DELETE_CHAIN, 0), number, name, part, |body| {
                body.text(attribute::chain::NAME, chain.name());
            });
        }
        for (chain, layout) in &layouts {
            for (entry, before) in layout.added() {
                self.rule(place(chain), entry, before)?;
            }
        }
        Ok(())
    }

    fn new_chain(&mut self, place: ChainRef<'a>) {
        let ChainRef { family, table, chain } = place;
        let head = (kind::NEW_CHAIN, flags::CREATE | flags::EXCLUSIVE);
        self.part(head, family.number(), table.name(), MessagePart::Chain(place), |body| {
            body.text(attribute::chain::NAME, chain.name());
            if let Chain::Hook(hook) = chain {
                ChainHook::built_in(table, *hook).write(body);
            }
        });
    }

    /// Rules that go: each by its handle, or all of the chain at once where no rule can have been added since.
    fn removals(&mut self, place: ChainRef<'a>, layout: &ChainLayout<'a>) {
        let ChainRef { family, table, chain } = place;
        let is_of_one_generation = self.observed.generation().is_some();
        let mut remove = |handle: Option<u64>| {
            let part = MessagePart::RemovedRule(place);
            self.part((kind::DELETE_RULE, 0), family.number(), table.name(), part, |body| {
                body.text(attribute::rule::CHAIN, chain.name());
                if let Some(handle) = handle {
                    body.u64(attribute::rule::HANDLE, handle);
                }
            });
        };
        if layout.keeps_nothing() && is_of_one_generation {
            remove(None);
        } else {
            layout.removed.iter().for_each(|handle| remove(Some(*handle)));
        }
    }

    fn rule(&mut self, place: ChainRef<'a>, entry: &'a Entry, before: Option<u64>) -> Result<(), BatchError> {
        let ChainRef { family, table, chain } = place;
        let flags = flags::CREATE | if before.is_some() { 0 } else { flags::APPEND };
        let part = MessagePart::Rule(place, entry);
        let mut result = Ok(());
        self.part((kind::NEW_RULE, flags), family.number(), table.name(), part, |body| {
            body.text(attribute::rule::CHAIN, chain.name());
            result = rule_body(body, entry, family);
            if matches!((chain, entry), (Chain::Hook(_), Entry::Rule(_))) {
                body.bytes(attribute::rule::USER_DATA, SIGNATURE);
            }
            if let Some(handle) = before {
                body.u64(attribute::rule::POSITION, handle);
            }
        });
        result.map_err(|why| BatchError::Unencodable {
            place: place.to_string(),
            rule: entry.to_string(),
            why,
        })
    }
}

/// The expressions of a rule, its protocol for xt extensions, and another's comment.
fn rule_body(body: &mut MessageWriter, entry: &Entry, family: Family) -> Result<(), &'static str> {
    let compat = |body: &mut MessageWriter, protocol: u32| {
        body.nested(attribute::rule::COMPAT, |compat| {
            compat.u32(attribute::compat::PROTOCOL, protocol);
            compat.u32(attribute::compat::FLAGS, 0);
        });
    };
    match entry {
        Entry::Rule(rule) => {
            let mut result = Ok(());
            body.nested(attribute::rule::EXPRESSIONS, |list| {
                result = iptables::rule(&mut Expressions(list), rule, family);
            });
            compat(body, rule.protocol().map_or(0, |protocol| u32::from(protocol.number())));
            result
        }
        Entry::Foreign(rule) => {
            let raw =
                rule.raw().ok_or("it is another program's rule of which only a description is known")?;
            body.nested(attribute::rule::EXPRESSIONS, |list| list.raw(&raw.expressions));
            compat(body, raw.protocol());
            if let Some(user_data) = &raw.user_data {
                body.bytes(attribute::rule::USER_DATA, user_data);
            }
            Ok(())
        }
    }
}

/// A transaction ready to be sent.
#[derive(Debug)]
pub struct FinishedBatch<'a> {
    bytes: Vec<u8>,
    parts: Vec<MessagePart<'a>>,
    confirmed: u32,
}

impl<'a> FinishedBatch<'a> {
    /// What to send, in one datagram.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The number of the message whose confirmation means that everything is in force.
    #[must_use]
    pub const fn confirmed(&self) -> u32 {
        self.confirmed
    }

    /// What the message with this number is about; `None` for those that begin and end the transaction.
    #[must_use]
    pub fn part(&self, sequence: u32) -> Option<&MessagePart<'a>> {
        let index = sequence.checked_sub(BEGIN)?.checked_sub(1)?;
        self.parts.get(usize::try_from(index).ok()?)
    }
}

impl Batch<'_> {
    /// A transaction that makes the table that is this network namespace's lock: it belongs to the socket that sends it and
    /// ends with that socket. Refused with EEXIST while another socket has it.
    ///
    /// The message about the table has a number of its own, so that a refusal of the table can be determined from one of the whole
    /// transaction. `None` if a length does not fit, which cannot happen.
    #[must_use]
    pub fn take_lock(transaction: u32, table: u32) -> Option<Vec<u8>> {
        lock_transaction(kind::NEW_TABLE, flags::CREATE | flags::EXCLUSIVE, transaction, table)
    }

    /// A transaction that ends the lock's table.
    #[must_use]
    pub fn release_lock(transaction: u32) -> Option<Vec<u8>> {
        lock_transaction(kind::DELETE_TABLE, 0, transaction, transaction)
    }
}

fn lock_transaction(kind: u16, table_flags: u16, transaction: u32, table: u32) -> Option<Vec<u8>> {
    let mut writer = MessageWriter::default();
    writer.message(Head::of_transaction(kind::BATCH_BEGIN, transaction), |_| {});
    let flags = table_flags | flags::REQUEST | flags::ACK;
    writer.message(Head { kind, flags, sequence: table, family: family::INET, resource: 0 }, |body| {
        body.text(attribute::TABLE, DataPlane::NFT_LOCK_TABLE);
        if kind == kind::NEW_TABLE {
            body.u32(attribute::table::FLAGS, abi::OWNED_BY_SOCKET);
        }
    });
    writer.message(Head::of_transaction(kind::BATCH_END, transaction), |_| {});
    writer.finish()
}
