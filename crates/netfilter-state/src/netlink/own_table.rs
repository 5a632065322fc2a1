//! Small tables of ambient mode, of family inet, that one transaction writes whole: how their parts become messages, and are known again.

use super::{Message, Question, native_state::ChainHook};
use crate::expressions::{
    abi::{self, attribute, family, flags, kind},
    expression::Expressions,
    wire::{Attribute, Head, MessageWriter},
};
use crate::{ruleset::TableFamily::Inet, state::PerFamily};
use std::net::IpAddr;

/// The most elements of a message: an attribute holds less than 64 KiB.
const MOST_ELEMENTS: usize = 1024;
/// The number of the protocol.
pub(super) const TCP: u8 = 6;

/// A chain of such a table, whose policy accepts.
pub(super) struct BaseChain {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    pub(super) hook: u32,
    pub(super) priority: i32,
}

impl BaseChain {
    /// Whether the kernel's message is about this chain, as it should be.
    pub(super) fn is(&self, message: &Message<'_>) -> bool {
        let attributes = message.attributes();
        attributes.text(attribute::chain::NAME) == Some(self.name)
            && ChainHook::read(attributes) == Some(self.place())
    }

    fn place(&self) -> ChainHook {
        ChainHook {
            number: self.hook,
            priority: self.priority.cast_unsigned(),
            kind: self.kind.into(),
            policy: abi::POLICY_ACCEPT,
        }
    }
}

/// What the kernel has reported of a table and its chains, and how many rules it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) exists: bool,
    /// It is dormant, or another program's.
    pub(super) is_altered: bool,
    /// The numbers of chains, and of those among them that are hooked as ours are.
    pub(super) chains: (usize, usize),
    pub(super) rules: usize,
}

impl Seen {
    /// Takes a message about the table, which is to have these chains.
    pub(super) fn take(&mut self, message: &Message<'_>, chains: &[BaseChain]) {
        match message.kind {
            kind::NEW_TABLE => {
                self.exists = true;
                let flags = message.attributes().u32(attribute::table::FLAGS);
                self.is_altered = flags.is_some_and(|flags| flags != 0);
            }
            kind::NEW_CHAIN => {
                let is_ours = chains.iter().any(|ours| ours.is(message));
                self.chains.0 = self.chains.0.saturating_add(1);
                self.chains.1 = self.chains.1.saturating_add(usize::from(is_ours));
            }
            kind::NEW_RULE => self.rules = self.rules.saturating_add(1),
            _ => {}
        }
    }

    /// Whether it has these chains, with this number of rules, and acts.
    pub(super) fn has(&self, chains: &[BaseChain], rules: usize) -> bool {
        let all = (chains.len(), chains.len());
        self.exists && !self.is_altered && self.chains == all && self.rules == rules
    }
}

/// What is said of a set.
pub(super) struct SetForm {
    pub(super) flags: u32,
    pub(super) key_type: u32,
    pub(super) key_length: u32,
    /// After how many milliseconds an element goes, and how many there may be.
    pub(super) timeout: Option<(u64, u32)>,
}

/// What to ask about such a table, which has these sets.
pub(super) const fn questions(table: &'static str, sets: &PerFamily<&'static str>) -> [Question<'static>; 4] {
    [
        Question::Chains(Some(Inet)),
        Question::RulesOfTable(Inet, table),
        Question::Elements(Inet, table, sets.v4),
        Question::Elements(Inet, table, sets.v6),
    ]
}

/// Whether a message is about this table.
pub(super) fn is_about(message: &Message<'_>, table: &str) -> bool {
    let name = message.attributes().find(attribute::TABLE).map(Attribute::text_bytes);
    message.family == family::INET && name == Some(table.as_bytes())
}

/// The elements in a message.
pub(super) fn elements<'a>(message: &Message<'a>) -> impl Iterator<Item = Attribute<'a>> {
    let elements = message.attributes().find(attribute::elements::ELEMENTS);
    elements.into_iter().flat_map(|all| all.attributes().map(|(_, one)| one))
}

/// The key of an element.
pub(super) fn key(element: Attribute<'_>) -> Option<&[u8]> {
    element.attributes().value(attribute::element::KEY)
}

/// A rule's comment, as nft keeps it: type 0, its length, and its text.
pub(super) fn comment(text: &str) -> Vec<u8> {
    let text = format!("{text}\0");
    let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
    [&[0, length], text.as_bytes()].concat()
}

/// Whether a message about a rule has this comment.
pub(super) fn has_comment(rule: &Message<'_>, text: &str) -> bool {
    let user_data = rule.attributes().find(attribute::rule::USER_DATA);
    user_data.is_some_and(|data| data.0 == comment(text))
}

/// The address with these octets.
pub(super) fn address(octets: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(octets).ok().map(IpAddr::from);
    <[u8; 16]>::try_from(octets).ok().map(IpAddr::from).or_else(v4)
}

pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}

/// A transaction that removes a table, whether it exists or not.
pub(super) fn removal(sequence: u32, table: &'static str) -> Option<Vec<u8>> {
    let mut batch = TableBatch::new(sequence, table);
    batch.remove();
    batch.finish()
}

/// A transaction about one table. All its messages have one number: the first error is as good as any.
pub(super) struct TableBatch {
    table: &'static str,
    sequence: u32,
    writer: MessageWriter,
}

impl TableBatch {
    pub(super) fn new(sequence: u32, table: &'static str) -> Self {
        let mut writer = MessageWriter::default();
        writer.message(Head::of_transaction(kind::BATCH_BEGIN, sequence), |_| {});
        Self { table, sequence, writer }
    }

    fn part(&mut self, kind: u16, flags: u16, body: impl FnOnce(&mut MessageWriter)) {
        let flags = flags | flags::REQUEST;
        let head = Head { kind, flags, sequence: self.sequence, family: family::INET, resource: 0 };
        self.writer.message(head, |message| {
            message.text(attribute::TABLE, self.table);
            body(message);
        });
    }

    /// The messages; `None` if they are too long to be sent.
    pub(super) fn finish(mut self) -> Option<Vec<u8>> {
        self.writer.flag_last(flags::ACK);
        self.writer.message(Head::of_transaction(kind::BATCH_END, self.sequence), |_| {});
        self.writer.finish()
    }

    /// Removes the table, whether it exists or not.
    fn remove(&mut self) {
        // The first makes sure that the deletion finds one.
        self.part(kind::NEW_TABLE, flags::CREATE, |_| {});
        self.part(kind::DELETE_TABLE, 0, |_| {});
    }

    /// Replaces the table by an empty one.
    pub(super) fn renew(&mut self) {
        self.remove();
        self.part(kind::NEW_TABLE, flags::CREATE, |_| {});
    }

    pub(super) fn chain(&mut self, chain: &BaseChain) {
        self.part(kind::NEW_CHAIN, flags::CREATE, |body| {
            body.text(attribute::chain::NAME, chain.name);
            chain.place().write(body);
        });
    }

    /// Removes all rules of a chain.
    pub(super) fn flush(&mut self, chain: &BaseChain) {
        self.part(kind::DELETE_RULE, 0, |body| {
            body.text(attribute::rule::CHAIN, chain.name);
        });
    }

    pub(super) fn set(&mut self, name: &str, id: u32, form: &SetForm) {
        self.part(kind::NEW_SET, flags::CREATE, |body| {
            body.text(attribute::set::NAME, name);
            if form.flags != 0 {
                body.u32(attribute::set::FLAGS, form.flags);
            }
            body.u32(attribute::set::KEY_TYPE, form.key_type);
            body.u32(attribute::set::KEY_LENGTH, form.key_length);
            if let Some((timeout, size)) = form.timeout {
                body.u64(attribute::set::TIMEOUT, timeout);
                body.nested(attribute::set::DESCRIPTION, |description| {
                    description.u32(attribute::set_description::SIZE, size);
                });
            }
            body.u32(attribute::set::ID, id);
        });
    }

    pub(super) fn elements(&mut self, name: &str, id: u32, keys: &[Vec<u8>]) {
        for keys in keys.chunks(MOST_ELEMENTS) {
            self.part(kind::NEW_SET_ELEMENT, flags::CREATE, |body| {
                body.text(attribute::elements::SET, name);
                body.u32(attribute::elements::SET_ID, id);
                body.nested(attribute::elements::ELEMENTS, |list| {
                    for key in keys {
                        list.nested(attribute::ELEMENT, |element| {
                            element.value(attribute::element::KEY, key);
                        });
                    }
                });
            });
        }
    }

    pub(super) fn rule(&mut self, chain: &BaseChain, said: &str, write: impl FnOnce(&mut Expressions<'_>)) {
        self.part(kind::NEW_RULE, flags::CREATE | flags::APPEND, |body| {
            body.text(attribute::rule::CHAIN, chain.name);
            body.nested(attribute::rule::EXPRESSIONS, |list| write(&mut Expressions(list)));
            body.bytes(attribute::rule::USER_DATA, &comment(said));
        });
    }
}
