//! The node's table for ambient mode: TCP connections that the node's own processes, such as the kubelet, open to enrolled pods get a source address
//! that the pods' rules let through, so that probes need no mesh identity. What comes to the node from that address is dropped: a pod that claims it
//! would reach other pods' applications past ztunnel. What the node would forward to that address is dropped, too: answers to probes have the node's own
//! address before that, and the node's route to the probes' source leads through `lo`, where anything else would circulate until its time to live is over.
//!
//! It holds one set of pods' addresses for each family, and one rule of each chain. Whatever it holds, one transaction replaces it whole; connections
//! that were open before go on, because connection tracking has their addresses.

use std::{collections::BTreeSet, net::IpAddr};

use redirect_core::ambient::ProbeSources;

use super::{
    Message, Question,
    own_table::{self, BaseChain, SetForm, TCP, TableBatch, octets},
    sets,
};
use crate::expressions::{
    abi::{self, attribute, family, flags, kind, meta},
    expression::address_offset,
    wire::{Head, MessageWriter},
};
use crate::{ruleset::Endpoint, state::PerFamily};
use redirect_core::{plan::native::SetKind, values::Family};

const SETS: PerFamily<&str> = PerFamily { v4: "pods-v4", v6: "pods-v6" };
/// Before chains that masquerade, at 100: the first chain that translates a connection decides.
const POSTROUTING: BaseChain = BaseChain { name: "postrouting", kind: "nat", hook: 4, priority: 99 };
/// Before connection tracking, at -200: what is dropped leaves no entry.
const PREROUTING: BaseChain = BaseChain { name: "prerouting", kind: "filter", hook: 0, priority: -300 };
const FORWARD: BaseChain = BaseChain { name: "forward", kind: "filter", hook: 2, priority: 0 };
const CHAINS: [BaseChain; 3] = [POSTROUTING, PREROUTING, FORWARD];
/// For each chain and family one.
const RULES: usize = 6;
/// No process has this user. A packet without a local socket ends the rule as soon as its user is loaded; the comparison is for nft, which prints no rule
/// without one.
const NO_USER: u32 = u32::MAX;
/// How a rule's comment begins. Rules cannot change, so one with this comment, and the source that is wanted, is as it was written; another form of
/// them takes another number.
const COMMENT: &str = "istio ambient, probes 4,";

/// The table as the kernel holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeTable {
    sources: ProbeSources,
    seen: own_table::Seen,
    /// The number of rules that are ours.
    rules: usize,
    addresses: BTreeSet<IpAddr>,
}

impl ProbeTable {
    /// Its name; it is of family inet.
    const NAME: &'static str = "istio-ambient-probes";

    /// What to ask the kernel about it, once its list of tables has it.
    pub const QUESTIONS: [Question<'static>; 4] = own_table::questions(Self::NAME, &SETS);

    /// One of which the kernel has reported nothing, and which is to give probes these sources.
    #[must_use]
    pub fn new(sources: ProbeSources) -> Self {
        Self { sources, seen: own_table::Seen::default(), rules: 0, addresses: BTreeSet::new() }
    }

    /// Whether it exists.
    #[must_use]
    pub const fn exists(&self) -> bool {
        self.seen.exists
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
        self.seen.has(&CHAINS, RULES) && self.rules == RULES
    }

    /// Takes a message of the kernel about tables, chains, rules or elements.
    pub fn take(&mut self, message: &Message<'_>) {
        if !own_table::is_about(message, Self::NAME) {
            return;
        }
        self.seen.take(message, &CHAINS);
        match message.kind {
            kind::NEW_RULE => {
                let is_of = |of| own_table::has_comment(message, &comment(self.sources.of(of)));
                let is_ours = Family::BOTH.into_iter().any(is_of);
                self.rules = self.rules.saturating_add(usize::from(is_ours));
            }
            kind::NEW_SET_ELEMENT => self.addresses.extend(
                own_table::elements(message).filter_map(own_table::key).filter_map(own_table::address),
            ),
            _ => {}
        }
    }

    /// A transaction that puts the table in force for these addresses, in place of what it held: probes to them get these sources. `None` if it is too
    /// long to be sent.
    #[must_use]
    pub fn replace(sequence: u32, addresses: &BTreeSet<IpAddr>, sources: ProbeSources) -> Option<Vec<u8>> {
        let mut batch = TableBatch::new(sequence, Self::NAME);
        batch.renew();
        CHAINS.iter().for_each(|chain| batch.chain(chain));
        for (id, of) in (1..).zip(Family::BOTH) {
            let kind = SetKind::Addresses(of);
            let form = SetForm {
                flags: 0,
                key_type: sets::key_type(kind),
                key_length: sets::length(kind),
                timeout: None,
            };
            batch.set(SETS.of(of), id, &form);
            let of_family = addresses.iter().filter(|address| Family::of(address) == of);
            let keys: Vec<Vec<u8>> = of_family.map(|address| octets(*address)).collect();
            batch.elements(SETS.of(of), id, &keys);
            translate(&mut batch, of, id, sources.of(of));
            // The node's probes leave it by that chain, and never come.
            drop_all(&mut batch, &PREROUTING, of, Endpoint::Source, sources.of(of));
            // There answers to probes have the node's own address already.
            drop_all(&mut batch, &FORWARD, of, Endpoint::Destination, sources.of(of));
        }
        batch.finish()
    }

    /// A transaction that removes the table, whether it exists or not.
    #[must_use]
    pub fn remove(sequence: u32) -> Option<Vec<u8>> {
        own_table::removal(sequence, Self::NAME)
    }

    /// A request that destroys a set of ipset. One that rules look addresses up in stays.
    #[must_use]
    pub fn destroy_ipset(sequence: u32, name: &str) -> Option<Vec<u8>> {
        /// Of Linux 2.6.39 and newer.
        const PROTOCOL: u8 = 6;
        // Exclusive: the kernel reports a missing set.
        let flags = flags::REQUEST | flags::ACK | flags::EXCLUSIVE;
        let head =
            Head { kind: kind::DESTROY_IPSET, flags, sequence, family: family::UNSPECIFIED, resource: 0 };
        let mut writer = MessageWriter::default();
        writer.message(head, |body| {
            body.bytes(attribute::ipset::PROTOCOL, &[PROTOCOL]);
            body.text(attribute::ipset::NAME, name);
        });
        writer.finish()
    }
}

/// A rule's comment.
fn comment(source: IpAddr) -> String {
    format!("{COMMENT} {source}")
}

/// TCP from a local socket to one of the pods: another source.
fn translate(batch: &mut TableBatch, of: Family, id: u32, source: IpAddr) {
    batch.rule(&POSTROUTING, &comment(source), |rule| {
        rule.family(of.number());
        rule.protocol(TCP);
        rule.meta(meta::SOCKET_USER);
        rule.is(true, &NO_USER.to_ne_bytes());
        let length = sets::length(SetKind::Addresses(of));
        rule.payload(abi::base::NETWORK, address_offset(Endpoint::Destination, of), length);
        rule.lookup_in(false, SETS.of(of), id);
        rule.value(&octets(source));
        rule.source_nat(of.number());
    });
}

/// What comes from a probes' source, or goes to it.
fn drop_all(batch: &mut TableBatch, chain: &BaseChain, of: Family, end: Endpoint, source: IpAddr) {
    batch.rule(chain, &comment(source), |rule| {
        rule.family(of.number());
        rule.payload(abi::base::NETWORK, address_offset(end, of), sets::length(SetKind::Addresses(of)));
        rule.is(false, &octets(source));
        rule.verdict(abi::verdict::DROP);
    });
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
        let table = seen(&ProbeTable::replace(7, &addresses, USUAL).expect("it fits"));
        assert!(table.is_for(&addresses), "{table:?}");
        assert!(!table.is_for(&BTreeSet::new()));
        assert_eq!(table.addresses(), &addresses);
        let none = seen(&ProbeTable::remove(7).expect("it fits"));
        assert!(!none.exists() && !none.works());
    }

    #[test]
    fn rules_with_another_source_are_not_those_that_are_wanted() {
        let addresses = BTreeSet::from([IpAddr::from([10, 1, 0, 2])]);
        for (of, text) in [(Family::V4, "169.254.8.1"), (Family::V6, "fd00::7")] {
            let other = USUAL.with(of, text).expect("an address");
            let table = seen(&ProbeTable::replace(7, &addresses, other).expect("it fits"));
            assert!(table.exists() && !table.works(), "{table:?}");
        }
    }

    #[test]
    fn more_pods_than_a_node_has_fit() {
        let address = |number: u32| IpAddr::from(number.to_be_bytes());
        let addresses: BTreeSet<IpAddr> = (0x0a00_0000..0x0a00_1000).map(address).collect();
        let table = seen(&ProbeTable::replace(7, &addresses, USUAL).expect("it fits"));
        assert!(table.is_for(&addresses) && addresses.len() == 4096);
    }

    #[test]
    fn bytes_of_any_kind_are_read_without_a_panic() {
        let bytes =
            ProbeTable::replace(7, &BTreeSet::from([IpAddr::from([10, 1, 0, 2])]), USUAL).expect("it fits");
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            let _ = seen(&damaged);
            let _ = seen(&bytes[..at]);
        }
    }
}
