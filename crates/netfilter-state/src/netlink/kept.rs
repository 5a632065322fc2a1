//! A pod's table for connections that were open before it was enrolled in ambient mode, and go on past ztunnel until a deadline.
//!
//! ```text
//! being made:  a SYN          its connection is added to the set, and is not tracked
//! settled:     a SYN          its connection is removed from the set, so it is captured as any other
//! both:        another segment of a connection in the set is not tracked
//! ```
//!
//! Without an entry of connection tracking no rule of nat sees a packet, whichever program wrote it. A connection in the set that the kernel did not
//! track would otherwise begin, for nat, with its next segment, and be redirected to a listener that knows nothing of it. All chains come before
//! connection tracking, so the table works beside rules of either backend.
//!
//! An element is a connection as the pod has it: own address and port, then the peer's. Each goes after the time that the set was made with, also
//! without the program that made it.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use super::{
    Message, Question,
    own_table::{self, BaseChain, SetForm, TCP, TableBatch, octets},
    sets,
};
use crate::expressions::{
    abi::{self, attribute, dynamic_set, kind, register, set},
    expression::{DESTINATION_PORT, Expressions, SOURCE_PORT, address_offset},
    wire::Attribute,
};
use crate::{ruleset::Endpoint, state::PerFamily};
use redirect_core::{
    plan::native::SetKind,
    rule::{Equality, TcpFlags},
    values::Family,
};

const SETS: PerFamily<&str> = PerFamily { v4: "kept-v4", v6: "kept-v6" };
/// Before connection tracking, at -200.
const PRIORITY: i32 = -300;
const PREROUTING: BaseChain = BaseChain { name: "prerouting", kind: "filter", hook: 0, priority: PRIORITY };
const OUTPUT: BaseChain = BaseChain { name: "output", kind: "filter", hook: 3, priority: PRIORITY };
const CHAINS: [BaseChain; 2] = [PREROUTING, OUTPUT];
/// How a rule's comment begins. Another form of the rules takes another number.
const COMMENT: &str = "istio ambient, kept connections 1,";
/// How many connections may be added while the table is made, besides those that were listed.
const MOST_ADDED: u32 = 65_536;
/// How many rules the table has: for each chain and family one about a SYN, and one about other segments.
const RULES: usize = 8;

/// A connection as the pod has it: its own end, and its peer's.
type Connection = (SocketAddr, SocketAddr);

/// What a SYN does to the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Connections are still added.
    BeingMade,
    /// No connection is added any more.
    Settled,
}

impl Form {
    fn comment(self) -> String {
        let form = match self {
            Self::BeingMade => "being made",
            Self::Settled => "settled",
        };
        format!("{COMMENT} {form}")
    }
}

/// The table as the kernel holds it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptTable {
    seen: own_table::Seen,
    /// The numbers of rules of each form.
    being_made: usize,
    settled: usize,
    connections: BTreeSet<Connection>,
    /// The longest time that a connection has left.
    left: Duration,
}

impl KeptTable {
    /// Its name; it is of family inet.
    pub const NAME: &'static str = "istio-ambient-kept";

    /// What to ask the kernel about it, once its list of tables has it.
    pub const QUESTIONS: [Question<'static>; 4] = own_table::questions(Self::NAME, &SETS);

    /// Whether it exists.
    #[must_use]
    pub const fn exists(&self) -> bool {
        self.seen.exists
    }

    /// Whether it is whole, and no connection is added any more.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.seen.has(&CHAINS, RULES) && self.settled == RULES
    }

    /// Whether it was being made when its maker ended: no rule has the last form, and nothing else is wrong.
    #[must_use]
    pub fn is_being_made(&self) -> bool {
        self.seen.has(&CHAINS, RULES) && self.being_made == RULES
    }

    /// The connections that are kept.
    #[must_use]
    pub const fn connections(&self) -> &BTreeSet<Connection> {
        &self.connections
    }

    /// How long the last of them is kept.
    #[must_use]
    pub const fn left(&self) -> Duration {
        self.left
    }

    /// Takes a message of the kernel about tables, chains, rules or elements.
    pub fn take(&mut self, message: &Message<'_>) {
        if !own_table::is_about(message, Self::NAME) {
            return;
        }
        self.seen.take(message, &CHAINS);
        match message.kind {
            kind::NEW_RULE => {
                let count = |form: Form| usize::from(own_table::has_comment(message, &form.comment()));
                self.being_made = self.being_made.saturating_add(count(Form::BeingMade));
                self.settled = self.settled.saturating_add(count(Form::Settled));
            }
            kind::NEW_SET_ELEMENT => {
                for element in own_table::elements(message) {
                    self.connections.extend(own_table::key(element).and_then(connection));
                    let left = element.attributes().find(attribute::element::EXPIRATION);
                    let left = left.and_then(Attribute::u64).map(Duration::from_millis);
                    self.left = self.left.max(left.unwrap_or_default());
                }
            }
            _ => {}
        }
    }

    /// A transaction that makes the table, in place of an older one; until it is settled, rules add connections. Each is kept for this time. `None` if it is
    /// too long to be sent.
    #[must_use]
    pub fn make(sequence: u32, connections: &BTreeSet<Connection>, keep: Duration) -> Option<Vec<u8>> {
        let mut batch = TableBatch::new(sequence, Self::NAME);
        batch.renew();
        CHAINS.iter().for_each(|chain| batch.chain(chain));
        for of in Family::BOTH {
            let parts = [SetKind::Addresses(of), SetKind::Ports, SetKind::Addresses(of), SetKind::Ports];
            let listed = u32::try_from(connections.len()).unwrap_or(u32::MAX);
            let timeout = u64::try_from(keep.as_millis()).unwrap_or(u64::MAX);
            let form = SetForm {
                flags: set::TIMEOUT | set::CHANGED_BY_RULES,
                key_type: parts
                    .into_iter()
                    .fold(0, |all, kind| all << abi::key_type::BITS | sets::key_type(kind)),
                key_length: part_length(of).saturating_mul(2),
                // Without a time the kernel would keep them for ever.
                timeout: Some((timeout.max(1), MOST_ADDED.saturating_add(listed))),
            };
            batch.set(SETS.of(of), set_id(of), &form);
        }
        write_connections(&mut batch, connections);
        write_rules(&mut batch, Form::BeingMade);
        batch.finish()
    }

    /// A transaction that adds connections to the table.
    #[must_use]
    pub fn add(sequence: u32, connections: &BTreeSet<Connection>) -> Option<Vec<u8>> {
        let mut batch = TableBatch::new(sequence, Self::NAME);
        write_connections(&mut batch, connections);
        batch.finish()
    }

    /// A transaction after which no connection is added any more.
    #[must_use]
    pub fn settle(sequence: u32) -> Option<Vec<u8>> {
        let mut batch = TableBatch::new(sequence, Self::NAME);
        CHAINS.iter().for_each(|chain| batch.flush(chain));
        write_rules(&mut batch, Form::Settled);
        batch.finish()
    }

    /// A transaction that removes the table, whether it exists or not.
    #[must_use]
    pub fn remove(sequence: u32) -> Option<Vec<u8>> {
        own_table::removal(sequence, Self::NAME)
    }
}

/// The number of a family's set in a transaction.
fn set_id(of: Family) -> u32 {
    of.number().into()
}

fn write_connections(batch: &mut TableBatch, connections: &BTreeSet<Connection>) {
    for of in Family::BOTH {
        let of_family = connections.iter().filter(|(own, _)| Family::of(&own.ip()) == of);
        let keys: Vec<Vec<u8>> = of_family.map(|(own, peer)| [end(*own), end(*peer)].concat()).collect();
        batch.elements(SETS.of(of), set_id(of), &keys);
    }
}

fn write_rules(batch: &mut TableBatch, form: Form) {
    for of in Family::BOTH {
        for (chain, sends) in [(&PREROUTING, false), (&OUTPUT, true)] {
            batch.rule(chain, &form.comment(), |rule| {
                load(rule, of, sends, &Equality::equals(TcpFlags::OPENING));
                match form {
                    Form::BeingMade => {
                        rule.update(dynamic_set::ADD, SETS.of(of), set_id(of));
                        rule.untrack();
                    }
                    Form::Settled => rule.update(dynamic_set::DELETE, SETS.of(of), set_id(of)),
                }
            });
            batch.rule(chain, &form.comment(), |rule| {
                load(rule, of, sends, &Equality::not_equals(TcpFlags::OPENING));
                rule.lookup_in(false, SETS.of(of), set_id(of));
                rule.untrack();
            });
        }
    }
}

/// Loads a segment's connection as the pod has it, if its flags are so.
fn load(rule: &mut Expressions<'_>, of: Family, sends: bool, flags: &Equality<TcpFlags>) {
    rule.family(of.number());
    rule.protocol(TCP);
    rule.flags(flags);
    let source = (address_offset(Endpoint::Source, of), SOURCE_PORT);
    let destination = (address_offset(Endpoint::Destination, of), DESTINATION_PORT);
    let ends = if sends { [source, destination] } else { [destination, source] };
    let (address_length, port_length) = (sets::length(SetKind::Addresses(of)), sets::length(SetKind::Ports));
    // Registers hold four bytes each.
    let step = part_length(of) / WORD;
    for ((address, port), first) in ends.into_iter().zip([0, step]) {
        let to = register::FIRST_PART.saturating_add(first);
        rule.payload_in(to, abi::base::NETWORK, address, address_length);
        let to = to.saturating_add(address_length / WORD);
        rule.payload_in(to, abi::base::TRANSPORT, port, port_length);
    }
}

/// How many bytes each part of a key is filled to.
const WORD: u32 = 4;

/// The length of one end in a key, in bytes.
const fn part_length(of: Family) -> u32 {
    sets::length(SetKind::Addresses(of)).saturating_add(WORD)
}

/// One end in a key.
fn end(at: SocketAddr) -> Vec<u8> {
    [octets(at.ip()), at.port().to_be_bytes().into(), [0; 2].into()].concat()
}

/// The connection that a key names.
fn connection(key: &[u8]) -> Option<Connection> {
    let (own, peer) = key.split_at_checked(key.len() / 2)?;
    let read = |end: &[u8]| {
        let (address, port) = end.split_at_checked(end.len().checked_sub(4)?)?;
        Some(SocketAddr::new(own_table::address(address)?, u16::from_be_bytes(port.first_chunk().copied()?)))
    };
    Some((read(own)?, read(peer)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Messages;
    use crate::ruleset::{Condition, HookedRules, Selector};
    use std::net::IpAddr;

    const KEEP: Duration = Duration::from_secs(600);

    fn seen(transactions: &[Vec<u8>]) -> KeptTable {
        // The kernel shows what it was sent, in messages of the same kind.
        let mut table = KeptTable::default();
        for message in transactions.iter().flat_map(|bytes| Messages::new(bytes)) {
            match message.kind {
                kind::DELETE_TABLE => table = KeptTable::default(),
                kind::DELETE_RULE => (table.seen.rules, table.being_made, table.settled) = (0, 0, 0),
                _ => table.take(&message),
            }
        }
        table
    }

    fn connections() -> BTreeSet<Connection> {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let pairs = [("10.1.0.2:8080", "10.1.0.9:40000"), ("[fd00::2]:33333", "[fd00::9]:9090")];
        pairs.map(|(own, peer)| (at(own), at(peer))).into()
    }

    #[test]
    fn what_is_written_is_read() {
        let made = KeptTable::make(7, &connections(), KEEP).expect("it fits");
        let table = seen(std::slice::from_ref(&made));
        assert!(table.is_being_made() && !table.is_settled(), "{table:?}");
        assert_eq!(table.connections(), &connections());
        let settled = KeptTable::settle(8).expect("it fits");
        let table = seen(&[made.clone(), settled.clone()]);
        assert!(table.is_settled() && !table.is_being_made(), "{table:?}");
        assert_eq!(table.connections(), &connections());
        let more = KeptTable::add(9, &connections()).expect("it fits");
        let table = seen(&[KeptTable::make(7, &BTreeSet::new(), KEEP).expect("it fits"), more]);
        assert_eq!(table.connections(), &connections());
        assert!(!seen(&[made, settled, KeptTable::remove(9).expect("it fits")]).exists());
    }

    /// Whichever way a segment goes.
    #[test]
    fn rules_ask_for_a_connection_with_the_pods_end_first() {
        let made = KeptTable::make(7, &connections(), KEEP).expect("it fits");
        let rules = HookedRules::of_messages(&made);
        let (_, table) = rules.tables.first_key_value().expect("a table");
        for (chain, sends) in [("prerouting", false), ("output", true)] {
            let mut asked = Vec::new();
            for condition in table.chains[chain].rules.iter().flat_map(|rule| &rule.conditions) {
                if let Condition::Among(is) = condition
                    && is.value.name.is_some()
                {
                    asked.push(is.value.selectors.clone());
                }
            }
            let ends = Family::BOTH.map(|of| {
                let source = [Selector::Source(of), Selector::SourcePort];
                let destination = [Selector::Destination(of), Selector::DestinationPort];
                if sends { [source, destination].concat() } else { [destination, source].concat() }
            });
            assert_eq!(asked, ends, "{chain}");
        }
    }

    #[test]
    fn a_table_that_another_program_changed_is_neither_settled_nor_being_made() {
        let made = KeptTable::make(7, &connections(), KEEP).expect("it fits");
        let mut batch = TableBatch::new(9, KeptTable::NAME);
        batch.rule(&PREROUTING, "by hand", |rule| rule.verdict(abi::verdict::ACCEPT));
        let by_hand = batch.finish().expect("it fits");
        for before in [&[made.clone()][..], &[made.clone(), KeptTable::settle(8).expect("it fits")]] {
            let table = seen(&[before, std::slice::from_ref(&by_hand)].concat());
            assert!(table.exists() && !table.is_settled() && !table.is_being_made(), "{table:?}");
        }
    }

    #[test]
    fn as_many_connections_fit_as_a_busy_pod_has() {
        let peer = |number: u32| SocketAddr::new(IpAddr::from(u128::from(number).to_be_bytes()), 443);
        let own = "[fd00::2]:8080".parse().expect("an address");
        let many: BTreeSet<Connection> = (1..=10_000).map(|number| (own, peer(number))).collect();
        assert_eq!(seen(&[KeptTable::make(7, &many, KEEP).expect("it fits")]).connections().len(), 10_000);
    }

    #[test]
    fn bytes_of_any_kind_are_read_without_a_panic() {
        let bytes = KeptTable::make(7, &connections(), KEEP).expect("it fits");
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0xff;
            let _ = seen(&[damaged]);
            let _ = seen(&[bytes[..at].to_vec()]);
        }
    }
}
