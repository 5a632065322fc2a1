//! The node's table for ambient mode: TCP connections that the node's own processes, such as the kubelet, open to enrolled pods get a source address
//! that the pods' rules let through, so that probes need no mesh identity. What comes to the node from that address is dropped: a pod that claims it
//! would reach other pods' applications past ztunnel. What the node would forward to that address is dropped, too: answers to probes have the node's own
//! address before that, and the node's route to the probes' source leads through `lo`, where anything else would circulate until its time to live is over.
//!
//! It holds one set of pods' addresses for each family, and one rule of each chain. Whatever it holds, one transaction replaces it whole; connections
//! that were open before go on, because connection tracking has their addresses.

use std::{collections::BTreeSet, net::IpAddr};

use redirect_core::ambient::ProbeSources;

use super::{Message, family_number, sets};
use crate::expressions::{
    abi::{self, attribute, family, flags, kind, meta},
    expression::{AddressOffset, Expressions},
    wire::{Attribute, Head, Writer},
};
use redirect_core::{plan::native::Kind, values::Family};

/// The table, of family inet.
pub const TABLE: &str = "istio-ambient-probes";
/// Before chains that masquerade, at 100: the first chain that translates a connection decides.
const POSTROUTING: BaseChain = BaseChain { name: "postrouting", kind: "nat", hook: 4, priority: 99 };
/// Before connection tracking, at -200: what is dropped leaves no entry.
const PREROUTING: BaseChain = BaseChain { name: "prerouting", kind: "filter", hook: 0, priority: -300 };
const FORWARD: BaseChain = BaseChain { name: "forward", kind: "filter", hook: 2, priority: 0 };
/// No process has this user. A packet without a local socket ends the rule as soon as its user is loaded; the comparison is for nft, which prints no rule
/// without one.
const NO_USER: u32 = u32::MAX;
/// How a rule's comment begins. Rules cannot change, so one with this comment, and the source that is wanted, is as it was written; another form of
/// them takes another number.
const COMMENT: &str = "istio ambient, probes 4,";
/// The most elements of a message: an attribute holds less than 64 KiB.
const MOST_ELEMENTS: usize = 1024;

/// A chain of the table, whose policy accepts.
struct BaseChain {
    name: &'static str,
    kind: &'static str,
    hook: u32,
    priority: i32,
}

/// The table as the kernel holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeTable {
    sources: ProbeSources,
    exists: bool,
    /// It is dormant, or another program's.
    is_altered: bool,
    /// The numbers of chains, and of those among them that are hooked as ours are.
    chains: (usize, usize),
    /// The numbers of rules, and of ours among them.
    rules: (usize, usize),
    addresses: BTreeSet<IpAddr>,
}

impl ProbeTable {
    /// One of which the kernel has reported nothing, and which is to give probes these sources.
    #[must_use]
    pub const fn new(sources: ProbeSources) -> Self {
        Self {
            sources,
            exists: false,
            is_altered: false,
            chains: (0, 0),
            rules: (0, 0),
            addresses: BTreeSet::new(),
        }
    }

    /// Whether it exists.
    #[must_use]
    pub const fn exists(&self) -> bool {
        self.exists
    }

    /// The addresses in its sets.
    #[must_use]
    pub const fn addresses(&self) -> &BTreeSet<IpAddr> {
        &self.addresses
    }

    /// Whether it does what it should for these addresses and no others.
    #[must_use]
    pub fn is_for(&self, addresses: &BTreeSet<IpAddr>) -> bool {
        self.works() && self.addresses == *addresses
    }

    /// Whether its rules are those that were written, for whichever addresses.
    #[must_use]
    pub fn works(&self) -> bool {
        self.exists && !self.is_altered && self.chains == (3, 3) && self.rules == (6, 6)
    }

    /// Takes a message of the kernel about tables, chains, rules or elements.
    pub fn take(&mut self, message: &Message<'_>) {
        if message.family != family::INET {
            return;
        }
        let attributes = message.attributes();
        let text = |kind| attributes.find(kind).map(Attribute::text_bytes);
        // The table's name has the same number in all of them.
        if text(attribute::table::NAME) != Some(TABLE.as_bytes()) {
            return;
        }
        match message.kind {
            kind::NEW_TABLE => {
                self.exists = true;
                let flags = attributes.find(attribute::table::FLAGS).and_then(Attribute::u32);
                self.is_altered = flags.is_some_and(|flags| flags != 0);
            }
            kind::NEW_CHAIN => {
                let is_ours = [POSTROUTING, PREROUTING, FORWARD].iter().any(|ours| ours.is(message));
                self.chains.0 = self.chains.0.saturating_add(1);
                self.chains.1 = self.chains.1.saturating_add(usize::from(is_ours));
            }
            kind::NEW_RULE => {
                let user_data = attributes.find(attribute::rule::USER_DATA);
                let is_of = |of| user_data.is_some_and(|data| data.0 == comment(self.sources.of(of)));
                let is_ours = Family::BOTH.into_iter().any(is_of);
                self.rules.0 = self.rules.0.saturating_add(1);
                self.rules.1 = self.rules.1.saturating_add(usize::from(is_ours));
            }
            kind::NEW_SET_ELEMENT => {
                let elements = attributes.find(attribute::elements::ELEMENTS);
                let elements = elements.into_iter().flat_map(|all| all.attributes().map(|(_, one)| one));
                self.addresses.extend(elements.filter_map(address));
            }
            _ => {}
        }
    }
}

impl BaseChain {
    /// Whether the kernel's message is about this chain, as it should be.
    fn is(&self, message: &Message<'_>) -> bool {
        let attributes = message.attributes();
        let text = |kind| attributes.find(kind).and_then(Attribute::text);
        let hook = attributes.find(attribute::chain::HOOK).map(Attribute::attributes);
        let number = |kind| hook.and_then(|hook| hook.find(kind)).and_then(Attribute::u32);
        let policy = attributes.find(attribute::chain::POLICY).and_then(Attribute::u32);
        text(attribute::chain::NAME) == Some(self.name)
            && text(attribute::chain::TYPE) == Some(self.kind)
            && number(attribute::hook::NUMBER) == Some(self.hook)
            && number(attribute::hook::PRIORITY) == Some(self.priority.cast_unsigned())
            && policy == Some(abi::POLICY_ACCEPT)
    }
}

/// The address that an element holds.
fn address(element: Attribute<'_>) -> Option<IpAddr> {
    let key = element.attributes().find(attribute::element::KEY)?;
    let bytes = key.attributes().find(attribute::data::VALUE)?.0;
    let v4 = || <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from).or_else(v4)
}

/// The name of a family's set.
#[must_use]
pub const fn set_name(of: Family) -> &'static str {
    match of {
        Family::V4 => "pods-v4",
        Family::V6 => "pods-v6",
    }
}

/// A rule's comment, as nft keeps it: type 0, its length, and its text.
fn comment(source: IpAddr) -> Vec<u8> {
    let text = format!("{COMMENT} {source}\0");
    // An address has at most 39 characters.
    let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
    [&[0, length], text.as_bytes()].concat()
}

/// A transaction that puts the table in force for these addresses, in place of what it held: probes to them get these sources. `None` if it is too
/// long to be sent.
#[must_use]
pub fn replace(sequence: u32, addresses: &BTreeSet<IpAddr>, sources: ProbeSources) -> Option<Vec<u8>> {
    let mut parts = Parts::new(sequence);
    // The first makes sure that the deletion finds one.
    parts.table(kind::NEW_TABLE, flags::CREATE);
    parts.table(kind::DELETE_TABLE, 0);
    parts.table(kind::NEW_TABLE, flags::CREATE);
    parts.chain(&POSTROUTING);
    parts.chain(&PREROUTING);
    parts.chain(&FORWARD);
    for (id, of) in (1..).zip(Family::BOTH) {
        parts.set(of, id);
        let keys: Vec<IpAddr> =
            addresses.iter().copied().filter(|address| address.is_ipv4() == (of == Family::V4)).collect();
        keys.chunks(MOST_ELEMENTS).for_each(|keys| parts.elements(of, id, keys));
        parts.translate(of, id, sources.of(of));
        parts.drop_forged(of, sources.of(of));
        parts.drop_stray(of, sources.of(of));
    }
    parts.finish()
}

/// A transaction that removes the table, whether it exists or not.
#[must_use]
pub fn remove(sequence: u32) -> Option<Vec<u8>> {
    let mut parts = Parts::new(sequence);
    parts.table(kind::NEW_TABLE, flags::CREATE);
    parts.table(kind::DELETE_TABLE, 0);
    parts.finish()
}

/// A request that destroys a set of ipset. One that rules look addresses up in stays.
#[must_use]
pub fn destroy_ipset(sequence: u32, name: &str) -> Vec<u8> {
    /// Of Linux 2.6.39 and newer.
    const PROTOCOL: u8 = 6;
    // Exclusive: the kernel reports a missing set.
    let flags = flags::REQUEST | flags::ACK | flags::EXCLUSIVE;
    let head = Head { kind: kind::DESTROY_IPSET, flags, sequence, family: family::UNSPECIFIED, resource: 0 };
    let mut writer = Writer::default();
    writer.message(head, |body| {
        body.bytes(attribute::ipset::PROTOCOL, &[PROTOCOL]);
        body.text(attribute::ipset::NAME, name);
    });
    // A name is short; it always fits.
    writer.finish().unwrap_or_default()
}

/// A transaction being written. All its messages have one number: the first error is as good as any.
struct Parts {
    sequence: u32,
    writer: Writer,
}

impl Parts {
    fn new(sequence: u32) -> Self {
        let mut writer = Writer::default();
        writer.message(Head::of_transaction(kind::BATCH_BEGIN, sequence), |_| {});
        Self { sequence, writer }
    }

    fn part(&mut self, kind: u16, flags: u16, body: impl FnOnce(&mut Writer)) {
        let flags = flags | flags::REQUEST;
        let head = Head { kind, flags, sequence: self.sequence, family: family::INET, resource: 0 };
        self.writer.message(head, body);
    }

    fn finish(mut self) -> Option<Vec<u8>> {
        self.writer.flag_last(flags::ACK);
        self.writer.message(Head::of_transaction(kind::BATCH_END, self.sequence), |_| {});
        self.writer.finish()
    }

    fn table(&mut self, kind: u16, flags: u16) {
        self.part(kind, flags, |body| body.text(attribute::table::NAME, TABLE));
    }

    fn chain(&mut self, chain: &BaseChain) {
        self.part(kind::NEW_CHAIN, flags::CREATE, |body| {
            body.text(attribute::chain::TABLE, TABLE);
            body.text(attribute::chain::NAME, chain.name);
            body.nested(attribute::chain::HOOK, |hook| {
                hook.u32(attribute::hook::NUMBER, chain.hook);
                hook.u32(attribute::hook::PRIORITY, chain.priority.cast_unsigned());
            });
            body.u32(attribute::chain::POLICY, abi::POLICY_ACCEPT);
            body.text(attribute::chain::TYPE, chain.kind);
        });
    }

    fn set(&mut self, of: Family, id: u32) {
        let kind = Kind::Addresses(of);
        self.part(kind::NEW_SET, flags::CREATE, |body| {
            body.text(attribute::set::TABLE, TABLE);
            body.text(attribute::set::NAME, set_name(of));
            body.u32(attribute::set::KEY_TYPE, sets::key_type(kind));
            body.u32(attribute::set::KEY_LENGTH, sets::length(kind));
            body.u32(attribute::set::ID, id);
        });
    }

    fn elements(&mut self, of: Family, id: u32, keys: &[IpAddr]) {
        self.part(kind::NEW_SET_ELEMENT, flags::CREATE, |body| {
            body.text(attribute::elements::TABLE, TABLE);
            body.text(attribute::elements::SET, set_name(of));
            body.u32(attribute::elements::SET_ID, id);
            body.nested(attribute::elements::ELEMENTS, |list| {
                for key in keys {
                    list.nested(attribute::list::ELEMENT, |element| {
                        element.nested(attribute::element::KEY, |data| {
                            data.bytes(attribute::data::VALUE, &octets(*key));
                        });
                    });
                }
            });
        });
    }

    /// TCP from a local socket to one of the pods: another source.
    fn translate(&mut self, of: Family, id: u32, source: IpAddr) {
        self.rule(&POSTROUTING, source, |rule| {
            rule.family(family_number(of));
            rule.protocol(TCP);
            rule.meta(meta::SOCKET_USER);
            rule.is(true, &NO_USER.to_ne_bytes());
            let length = sets::length(Kind::Addresses(of));
            rule.payload(abi::base::NETWORK, AddressOffset::destination(of).0, length);
            rule.lookup_in(false, set_name(of), id);
            rule.value(&octets(source));
            rule.source_nat(family_number(of));
        });
    }

    /// The node's probes leave it by here, and never come.
    fn drop_forged(&mut self, of: Family, source: IpAddr) {
        self.drop(&PREROUTING, of, AddressOffset::source(of), source);
    }

    /// Here answers to probes have the node's own address already.
    fn drop_stray(&mut self, of: Family, source: IpAddr) {
        self.drop(&FORWARD, of, AddressOffset::destination(of), source);
    }

    fn drop(&mut self, chain: &BaseChain, of: Family, offset: AddressOffset, source: IpAddr) {
        self.rule(chain, source, |rule| {
            rule.family(family_number(of));
            rule.payload(abi::base::NETWORK, offset.0, sets::length(Kind::Addresses(of)));
            rule.is(false, &octets(source));
            rule.verdict(abi::verdict::DROP);
        });
    }

    fn rule(&mut self, chain: &BaseChain, source: IpAddr, write: impl FnOnce(&mut Expressions<'_>)) {
        self.part(kind::NEW_RULE, flags::CREATE | flags::APPEND, |body| {
            body.text(attribute::rule::TABLE, TABLE);
            body.text(attribute::rule::CHAIN, chain.name);
            body.nested(attribute::rule::EXPRESSIONS, |list| write(&mut Expressions(list)));
            body.bytes(attribute::rule::USER_DATA, &comment(source));
        });
    }
}

/// The number of the protocol.
const TCP: u8 = 6;

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Messages;

    const USUAL: ProbeSources = ProbeSources::USUAL;

    fn seen(bytes: &[u8]) -> ProbeTable {
        // The kernel shows what it was sent, in messages of the same kind.
        let mut table = ProbeTable::new(USUAL);
        for message in Messages::new(bytes) {
            if message.kind == kind::DELETE_TABLE {
                table = ProbeTable::new(USUAL);
            }
            table.take(&message);
        }
        table
    }

    #[test]
    fn what_is_written_is_read() {
        let addresses: BTreeSet<IpAddr> =
            ["10.1.0.2", "10.1.0.3", "fd00::2"].map(|text| text.parse().expect("an address")).into();
        let table = seen(&replace(7, &addresses, USUAL).expect("it fits"));
        assert!(table.is_for(&addresses), "{table:?}");
        assert!(!table.is_for(&BTreeSet::new()));
        assert_eq!(table.addresses(), &addresses);
        let none = seen(&remove(7).expect("it fits"));
        assert!(!none.exists() && !none.works());
    }

    #[test]
    fn rules_with_another_source_are_not_those_that_are_wanted() {
        let addresses = BTreeSet::from([IpAddr::from([10, 1, 0, 2])]);
        for (of, text) in [(Family::V4, "169.254.8.1"), (Family::V6, "fd00::7")] {
            let other = USUAL.with(of, text).expect("an address");
            let table = seen(&replace(7, &addresses, other).expect("it fits"));
            assert!(table.exists() && !table.works(), "{table:?}");
        }
    }

    #[test]
    fn more_pods_than_a_node_has_fit() {
        let address = |number: u32| IpAddr::from(number.to_be_bytes());
        let addresses: BTreeSet<IpAddr> = (0x0a00_0000..0x0a00_1000).map(address).collect();
        let table = seen(&replace(7, &addresses, USUAL).expect("it fits"));
        assert!(table.is_for(&addresses) && addresses.len() == 4096);
    }

    #[test]
    fn bytes_of_any_kind_are_read_without_a_panic() {
        let bytes = replace(7, &BTreeSet::from([IpAddr::from([10, 1, 0, 2])]), USUAL).expect("it fits");
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            let _ = seen(&damaged);
            let _ = seen(&bytes[..at]);
        }
    }
}
