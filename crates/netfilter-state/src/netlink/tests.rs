//! What is encoded is what iptables-nft sends, and what is encoded can be read back.

use super::{Batch, BatchError, Messages, NativeState, Observed, TableObstacle, iptables};
use crate::expressions::{
    abi::{self, attribute, flags, kind, meta},
    decode,
    expression::Expressions,
    reading,
    wire::{Attribute, Head, Message, MessageWriter},
};
use crate::{
    change::{EditOp, IptablesChange, TableChange},
    state::{Entry, IptablesTables},
};
use ipnet::IpNet;
use proptest::{prelude::*, sample::select};
use redirect_core::{
    Family,
    options::NativeForm,
    plan::FamilyRules,
    rule::{
        Chain, ConnState, Direction, Equality, Hook, Match, OurChain, Protocol, Rule, Table, Target,
        TcpFlags, Tracked,
    },
    settings::{Key, NamespaceFacts, RawSettings, Source},
    values::{InterfaceName, Mark, MaskedMark, Port, PortRange},
};
use std::collections::BTreeMap;

/// A rule in the words of iptables-save.
fn rule(text: &str) -> Rule {
    let Entry::Rule(rule) = Entry::saved(text) else { panic!("{text} is not a rule of ours") };
    rule
}

fn expressions(rule: &Rule, family: Family) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    iptables::rule(&mut Expressions(&mut writer), rule, family).unwrap();
    writer.finish().unwrap()
}

fn decoded(bytes: &[u8], family: Family) -> Option<Rule> {
    decode::rule(Attribute(bytes).attributes(), family)
}

#[test]
fn a_range_of_all_addresses_is_not_compared_with() {
    let condition = |is: Equality<IpNet>| [Match::Source(is.clone()), Match::Destination(is)];
    for (family, all) in [(Family::V4, "0.0.0.0/0"), (Family::V6, "::/0")] {
        let of = |conditions: Vec<Match>| {
            expressions(&Rule { matches: conditions, target: Target::Return }, family)
        };
        for one in condition(Equality::equals(all.parse().unwrap())) {
            assert_eq!(of(vec![one]), of(vec![]), "{all}");
        }
        for one in condition(Equality::not_equals(all.parse().unwrap())) {
            assert_ne!(of(vec![one]), of(vec![]), "! {all}");
        }
    }
}

#[test]
fn ports_of_both_ends_read_back_whether_they_are_compared_at_once_or_not() {
    for ports in [
        "--sport 9 --dport 7",
        "--sport 80:90 --dport 443",
        "--sport 443 --dport 80:90",
        "! --sport 80 --dport 443",
        "--sport 80 ! --dport 443",
        "--sport 0 --dport 443",
        "--sport 443 --dport 0",
    ] {
        let rule = rule(&format!("-p tcp -m tcp {ports} -j RETURN"));
        assert_eq!(decoded(&expressions(&rule, Family::V4), Family::V4), Some(rule), "{ports}");
    }
}

/// An attribute or message as it was sent.
type Sent = Vec<(u16, Vec<u8>)>;

/// What declared a chain, and its rules in order, each with its handle.
type HeldChain = (Sent, Vec<(u64, Sent)>);

/// What the kernel holds, as far as transactions change it.
#[derive(Default)]
struct Kernel {
    /// By family and name.
    tables: BTreeMap<(u8, String), Sent>,
    /// By family, table and name.
    chains: BTreeMap<(u8, String, String), HeldChain>,
    handle: u64,
}

impl Kernel {
    /// Carries out a transaction. What the kernel would refuse is a panic.
    fn commit(&mut self, bytes: &[u8]) {
        for message in Messages::new(bytes) {
            let sent: Sent = message.attributes().map(|(kind, value)| (kind, value.0.to_vec())).collect();
            let text = |kind| message.attributes().text(kind).unwrap().to_owned();
            let number = |kind| message.attributes().u64(kind);
            let family = message.family;
            let of_rule = || (family, text(attribute::TABLE), text(attribute::rule::CHAIN));
            match message.kind {
                kind::NEW_TABLE => drop(self.tables.insert((family, text(attribute::TABLE)), sent)),
                kind::NEW_CHAIN => {
                    let key = (family, text(attribute::TABLE), text(attribute::chain::NAME));
                    assert!(self.tables.contains_key(&(family, key.1.clone())), "{key:?} has no table");
                    let before = self.chains.insert(key, (sent, Vec::new()));
                    assert!(before.is_none(), "a chain is made twice");
                }
                kind::DELETE_CHAIN => {
                    let key = (family, text(attribute::TABLE), text(attribute::chain::NAME));
                    let (_, rules) = self.chains.remove(&key).expect("it is there");
                    assert!(rules.is_empty(), "{key:?} has rules");
                }
                kind::NEW_RULE => {
                    self.handle += 1;
                    let (_, rules) = self.chains.get_mut(&of_rule()).expect("it is there");
                    let at = match number(attribute::rule::POSITION) {
                        Some(before) => {
                            rules.iter().position(|(handle, _)| *handle == before).expect("it is there")
                        }
                        None if message.flags & flags::APPEND != 0 => rules.len(),
                        None => 0,
                    };
                    rules.insert(at, (self.handle, sent));
                }
                kind::DELETE_RULE => {
                    let (_, rules) = self.chains.get_mut(&of_rule()).expect("it is there");
                    let before = rules.len();
                    match number(attribute::rule::HANDLE) {
                        Some(gone) => rules.retain(|(handle, _)| *handle != gone),
                        None => rules.clear(),
                    }
                    assert_ne!(rules.len(), before, "no such rule");
                }
                kind::BATCH_BEGIN | kind::BATCH_END => {}
                other => panic!("message {other}"),
            }
        }
    }

    /// What it answers to a dump.
    fn dump(&self) -> Observed {
        let mut observed = Observed::at(2);
        let mut answer = |kind, family, sent: &Sent, handle: Option<u64>| {
            let mut writer = MessageWriter::default();
            writer.message(Head { kind, flags: 0, sequence: 0, family, resource: 0 }, |body| {
                for (kind, value) in
                    sent.iter().filter(|(kind, _)| *kind != attribute::rule::POSITION || handle.is_none())
                {
                    body.bytes(*kind, value);
                }
                if let Some(handle) = handle {
                    body.u64(attribute::rule::HANDLE, handle);
                }
            });
            observed.take(&Messages::new(&writer.finish().unwrap()).next().unwrap());
        };
        for ((family, _), sent) in &self.tables {
            answer(kind::NEW_TABLE, *family, sent, None);
        }
        for ((family, ..), (sent, _)) in &self.chains {
            answer(kind::NEW_CHAIN, *family, sent, None);
        }
        for ((family, ..), (_, rules)) in &self.chains {
            for (handle, sent) in rules {
                answer(kind::NEW_RULE, *family, sent, Some(*handle));
            }
        }
        observed
    }
}

/// What the kernel would answer to a dump once this transaction is in force on top of nothing.
fn in_force(bytes: &[u8]) -> Observed {
    let mut kernel = Kernel::default();
    kernel.commit(bytes);
    kernel.dump()
}

fn plan(flags: &[(Key, &'static str)]) -> redirect_core::RulePlan {
    let mut raw = RawSettings::new();
    for (key, text) in flags {
        raw.set(*key, *text, Source::Flag("test"));
    }
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    redirect_core::Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
}

fn everything() -> redirect_core::RulePlan {
    plan(&[
        (Key::InterceptionMode, "TPROXY"),
        (Key::InboundPorts, "*"),
        (Key::OutboundRanges, "*"),
        (Key::RedirectDns, "true"),
        (Key::CaptureAllDns, "true"),
        (Key::DropInvalid, "true"),
        (Key::DualStack, "true"),
        (Key::VirtualInterfaces, "eth1,tap+"),
        (Key::OutboundExcludePorts, "1,2,3:5"),
        (Key::OutboundExcludeRanges, "10.0.0.0/8,172.16.0.0/12,fd00::/33"),
    ])
}

/// As seen in what iptables-nft 1.8.9 on x86-64 sends.
#[test]
#[cfg(target_endian = "little")]
fn expressions_are_those_of_iptables() {
    const COUNTER: &str =
        "2c0001800c000100636f756e746572001c0002800c00010000000000000000000c0002000000000000000000";
    const RETURN: &str =
        "300001800e000100696d6d6564696174650000001c0002800800010000000000100002800c00028008000100fffffffb";
    const TCP: &str = "24000180090001006d6574610000000014000280080002000000001008000100000000012c00018008000100636d700020000280080001000000000108000200000000000c0003800500010006000000";
    const NOT_OPENING: &str = "340001800c0001007061796c6f6164002400028008000100000000010800020000000002080003000000000d0800040000000001440001800c0001006269747769736500340002800800010000000001080002000000000108000300000000010c00048005000100170000000c00058005000100000000002c00018008000100636d700020000280080001000000000108000200000000010c0003800500010002000000";
    const PORT_80: &str = "340001800c0001007061796c6f6164002400028008000100000000010800020000000002080003000000000208000400000000022c00018008000100636d700020000280080001000000000108000200000000000c0003800600010000500000";
    for (text, family, wanted) in [
        ("-j RETURN", Family::V4, format!("{COUNTER}{RETURN}")),
        ("-p tcp -j RETURN", Family::V6, format!("{TCP}{COUNTER}{RETURN}")),
        (
            "-d 10.0.0.0/8 -j RETURN",
            Family::V4,
            format!(
                "340001800c0001007061796c6f6164002400028008000100000000010800020000000001080003000000001008000400000000012c00018008000100636d700020000280080001000000000108000200000000000c000380050001000a000000{COUNTER}{RETURN}"
            ),
        ),
        (
            "-p tcp -m tcp --dport 80 ! --tcp-flags FIN,SYN,RST,ACK SYN -j RETURN",
            Family::V4,
            format!("{TCP}{NOT_OPENING}{PORT_80}{COUNTER}{RETURN}"),
        ),
        (
            "-p tcp -m tcp --sport 9 --dport 7 -j RETURN",
            Family::V4,
            format!(
                "{TCP}340001800c0001007061796c6f6164002400028008000100000000010800020000000002080003000000000008000400000000042c00018008000100636d700020000280080001000000000108000200000000000c0003800800010000090007{COUNTER}{RETURN}"
            ),
        ),
    ] {
        let bytes = expressions(&rule(text), family);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, wanted, "{text}");
    }
}

#[test]
fn a_transaction_declares_what_is_missing_and_nothing_else() {
    let rules = everything().rules(Family::V4);
    let (nothing, change) = (Observed::at(7), IptablesChange::between(&IptablesTables::new(), &rules));
    let mut batch = Batch::new(&nothing);
    batch.change(Family::V4, &change).unwrap();
    let first = batch.finish().unwrap();
    let kinds: Vec<u16> = Messages::new(first.bytes()).map(|message| message.kind).collect();
    assert_eq!((kinds[0], *kinds.last().unwrap()), (kind::BATCH_BEGIN, kind::BATCH_END));
    assert_eq!(kinds.iter().filter(|one| **one == kind::NEW_TABLE).count(), 3);
    let confirmed = Messages::new(first.bytes()).find(|message| message.flags & flags::ACK != 0).unwrap();
    assert_eq!(confirmed.sequence, first.confirmed());

    let observed = in_force(first.bytes());
    let change = IptablesChange::rewriting(observed.state(Family::V4), &rules);
    let mut batch = Batch::new(&observed);
    batch.change(Family::V4, &change).unwrap();
    assert!(!batch.is_empty() && Batch::new(&nothing).is_empty());
    let second = batch.finish().unwrap();
    assert!(second.part(1).is_none() && second.part(2).is_some(), "the first message begins the transaction");
    assert!(second.part(second.confirmed()).is_some() && second.part(second.confirmed() + 1).is_none());
    let declares = |message: &Message<'_>| matches!(message.kind, kind::NEW_TABLE | kind::NEW_CHAIN);
    assert_eq!(Messages::new(second.bytes()).filter(declares).count(), 0);
}

#[test]
fn what_was_sent_is_what_is_observed() {
    let plan = everything();
    let (nothing, mut sent) = (Observed::at(1), Vec::new());
    let changes: Vec<(Family, IptablesChange)> = Family::BOTH
        .map(|family| (family, IptablesChange::between(&IptablesTables::new(), &plan.rules(family))))
        .into();
    let mut batch = Batch::new(&nothing);
    for (family, change) in &changes {
        batch.change(*family, change).unwrap();
    }
    sent.extend(batch.finish().unwrap().bytes());
    let observed = in_force(&sent);
    for family in Family::BOTH {
        assert_eq!(*observed.state(family), IptablesTables::from(&plan.rules(family)), "{family}");
    }
}

#[test]
fn native_tables_that_were_sent_are_observed() {
    let plan = plan(&[(Key::InboundPorts, "*"), (Key::OutboundRanges, "*"), (Key::DualStack, "true")]);
    let (nothing, wanted) = (Observed::at(1), NativeState::wanted(&plan, NativeForm::Plain));
    let mut batch = Batch::new(&nothing);
    batch.native_change(nothing.native(), &wanted);
    let mut observed = in_force(batch.finish().unwrap().bytes());
    assert_eq!(observed.native(), &wanted);
    assert_eq!(observed.generation(), Some(2));
    // A chain that was not sent is one more.
    let mut writer = MessageWriter::default();
    writer.message(Head { kind: kind::NEW_CHAIN, flags: 0, sequence: 0, family: 1, resource: 0 }, |body| {
        body.text(attribute::TABLE, "istio-proxy-nat");
        body.text(attribute::chain::NAME, "another");
    });
    observed.take(&Messages::new(&writer.finish().unwrap()).next().unwrap());
    assert_ne!(observed.native(), &wanted);
}

#[test]
fn what_keeps_a_table_from_acting_is_told_with_a_remedy() {
    let table = String::from("ip nat");
    let dormant = TableObstacle::Dormant { table: table.clone() }.to_string();
    assert!(
        dormant.contains("table ip nat is dormant") && dormant.contains("nft 'add table ip nat { flags ; }'")
    );
    let owned = TableObstacle::Owned { table, owner: 4711 }.to_string();
    assert!(owned.contains("table ip nat is owned") && owned.contains("4711"), "{owned}");
}

#[test]
fn tables_that_are_dormant_or_owned_are_named_with_their_family() {
    let mut observed = Observed::at(1);
    let mut tell = |family, name: &str, flags, owner: Option<u32>| {
        let mut writer = MessageWriter::default();
        writer.message(Head { kind: kind::NEW_TABLE, flags: 0, sequence: 0, family, resource: 0 }, |body| {
            body.text(attribute::TABLE, name);
            body.u32(attribute::table::FLAGS, flags);
            if let Some(owner) = owner {
                body.u32(attribute::table::OWNER, owner);
            }
        });
        observed.take(&Messages::new(&writer.finish().unwrap()).next().unwrap());
    };
    tell(abi::family::IPV4, "nat", 3, Some(4711));
    tell(abi::family::IPV6, "mangle", 1, None);
    tell(abi::family::INET, "istio-proxy-nat", 1, None);
    tell(abi::family::IPV4, "raw", 2, None);
    tell(abi::family::IPV4, "filter", 1, None);
    tell(abi::family::INET, "theirs", 1, None);
    let dormant = |table: &str| TableObstacle::Dormant { table: table.into() };
    let owned = TableObstacle::Owned { table: "ip nat".into(), owner: 4711 };
    let wanted = [dormant("inet istio-proxy-nat"), dormant("ip nat"), dormant("ip6 mangle"), owned];
    assert_eq!(observed.obstacles().cloned().collect::<Vec<_>>(), wanted);
    let families = Family::BOTH
        .map(|family| Table::ALL.iter().filter(|table| observed.has_table(family, **table)).count());
    assert_eq!(families, [2, 1]);
}

#[test]
fn rules_of_others_keep_their_place_and_can_be_put_back() {
    let foreign = |target: &str| {
        let mut writer = MessageWriter::default();
        // No rule of ours asks whether bits of a mark are not set.
        Expressions(&mut writer).meta(meta::MARK);
        Expressions(&mut writer).mask(&[0, 0, 0, 1]);
        Expressions(&mut writer).is(false, &[0, 0, 0, 0]);
        Expressions(&mut writer).counter();
        Expressions(&mut writer).jump(target);
        Entry::Foreign(crate::state::RawRule::new(writer.attributes(), None).into())
    };
    let mut kernel = Kernel::default();
    let mut commit = |change: &IptablesChange| {
        let observed = kernel.dump();
        let mut batch = Batch::new(&observed);
        batch.change(Family::V4, change).unwrap();
        let finished = batch.finish().unwrap();
        kernel.commit(finished.bytes());
        kernel.dump().state(Family::V4).clone()
    };
    let output = Chain::from(Hook::Output);
    let rules = |state: &IptablesTables| state.rules(Table::Nat, &output).to_vec();
    let targets = |state: &IptablesTables| -> Vec<String> {
        let text = |entry: &Entry| entry.to_string().rsplit(' ').next().unwrap_or_default().to_owned();
        rules(state).iter().map(text).collect()
    };
    let mut steps = vec![EditOp::DeclareEmpty(Chain::named("ISTIO_OLD"))];
    steps.extend(["ONE", "ISTIO_OLD", "TWO"].map(|target| EditOp::Append(output.clone(), foreign(target))));
    let with = commit(&IptablesChange { tables: vec![TableChange { table: Table::Nat, steps }] });
    assert_eq!(targets(&with), ["ONE", "ISTIO_OLD", "TWO"]);
    let without = commit(&IptablesChange::between(&with, &FamilyRules::default()));
    assert_eq!(targets(&without), ["ONE", "TWO"]);
    let back = commit(&IptablesChange::back(&without, &with, &IptablesChange::default()));
    assert_eq!(rules(&back), rules(&with), "all of it is there again, between the same two");
    assert!(rules(&back).contains(&foreign("ISTIO_OLD")), "to the last byte: {back:?}");
}

/// Where others change the ruleset faster than it can be read, a chain may hold more than was read.
#[test]
fn rules_that_come_while_a_change_is_made_stay() {
    let (nothing, rules) = (Observed::at(1), everything().rules(Family::V4));
    let change = IptablesChange::between(&IptablesTables::new(), &rules);
    let mut batch = Batch::new(&nothing);
    batch.change(Family::V4, &change).unwrap();
    let mut kernel = Kernel::default();
    kernel.commit(batch.finish().unwrap().bytes());
    let observed = kernel.dump().of_any_generation();
    let theirs = (u64::MAX, vec![(attribute::rule::USER_DATA, b"theirs".to_vec())]);
    let output = (2, "nat".to_owned(), "OUTPUT".to_owned());
    kernel.chains.get_mut(&output).unwrap().1.push(theirs.clone());
    let change = IptablesChange::between(observed.state(Family::V4), &FamilyRules::default());
    let mut batch = Batch::new(&observed);
    batch.change(Family::V4, &change).unwrap();
    kernel.commit(batch.finish().unwrap().bytes());
    let left: Vec<_> = kernel.chains.values().flat_map(|(_, rules)| rules).collect();
    assert_eq!(left, [&theirs]);
}

#[test]
fn a_chain_that_is_not_iptables_is_left_alone() {
    let mut writer = MessageWriter::default();
    let head = Head { kind: kind::NEW_CHAIN, flags: 0, sequence: 0, family: 2, resource: 0 };
    writer.message(head, |body| {
        body.text(attribute::TABLE, "nat");
        body.text(attribute::chain::NAME, "OUTPUT");
    });
    let mut observed = Observed::at(1);
    observed.take(&Messages::new(&writer.finish().unwrap()).next().unwrap());
    let change = IptablesChange::between(&IptablesTables::new(), &everything().rules(Family::V4));
    let result = Batch::new(&observed).change(Family::V4, &change);
    assert_eq!(result, Err(BatchError::NotBuiltIn("IPv4 nat OUTPUT".into())));
}

#[test]
fn sets_take_the_place_of_long_lists() {
    let plan = everything();
    let count = |form| {
        let (nothing, wanted) = (Observed::at(1), NativeState::wanted(&plan, form));
        let mut batch = Batch::new(&nothing);
        batch.native_change(nothing.native(), &wanted);
        let finished = batch.finish().unwrap();
        let of = |wanted| Messages::new(finished.bytes()).filter(|message| message.kind == wanted).count();
        (of(kind::NEW_RULE), of(kind::NEW_SET))
    };
    let ((plain_rules, plain_sets), (rules, sets)) = (count(NativeForm::Plain), count(NativeForm::Sets));
    assert!(rules < plain_rules, "{rules} rules instead of {plain_rules}");
    assert_eq!((plain_sets + 3, plain_rules - 6), (sets, rules), "3 ports in TCP and UDP, 3 IPv4 ranges");
}

fn nets(family: Family) -> BoxedStrategy<IpNet> {
    let net = |address, prefix| IpNet::new(address, prefix).unwrap().trunc();
    match family {
        Family::V4 => (any::<[u8; 4]>(), 0..=32_u8).prop_map(move |(a, p)| net(a.into(), p)).boxed(),
        Family::V6 => (any::<[u8; 16]>(), 0..=128_u8).prop_map(move |(a, p)| net(a.into(), p)).boxed(),
    }
}

fn is<T: Clone + std::fmt::Debug + 'static>(
    value: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Equality<T>> {
    (value, any::<bool>()).prop_map(|(value, not)| Equality { value, not }).boxed()
}

fn port_ranges() -> impl Strategy<Value = PortRange> {
    (any::<u16>(), any::<u16>()).prop_map(|(a, b)| PortRange::new(a.min(b), a.max(b)).unwrap())
}

fn interfaces() -> impl Strategy<Value = InterfaceName> {
    "[a-z][a-z0-9._-]{0,13}\\+?".prop_map(|text| text.parse().unwrap())
}

fn matches(family: Family) -> impl Strategy<Value = Vec<Match>> {
    let before = prop::collection::vec(
        prop_oneof![
            is(nets(family)).prop_map(Match::Source),
            is(nets(family)).prop_map(Match::Destination),
            is(interfaces()).prop_map(Match::InInterface),
            is(interfaces()).prop_map(Match::OutInterface),
        ],
        0..4,
    );
    let protocol = select(vec![Protocol::Tcp, Protocol::Udp]);
    let ports = prop::collection::vec(
        prop_oneof![
            is(port_ranges()).prop_map(Match::SourcePort),
            is(port_ranges()).prop_map(Match::DestinationPort),
            is(prop::collection::vec(port_ranges(), 1..=7)).prop_map(Match::DestinationPorts),
        ],
        0..3,
    );
    let after = prop::collection::vec(
        prop_oneof![
            tracked().prop_map(Match::Tracked),
            is(any::<u32>()).prop_map(Match::OwnerUid),
            is(any::<u32>()).prop_map(Match::OwnerGid),
            is(masked_marks()).prop_map(Match::Mark),
            is(masked_marks()).prop_map(Match::ConnMark),
        ],
        0..4,
    );
    let flags = prop::option::of(is(tcp_flags()).prop_map(Match::TcpFlags));
    (before, protocol, ports, flags, after).prop_map(|(before, protocol, ports, flags, after)| {
        let protocol = if flags.is_some() { Protocol::Tcp } else { protocol };
        let flags = flags.into_iter().collect();
        [before, vec![Match::Protocol(protocol)], ports, flags, after].concat()
    })
}

fn masked_marks() -> impl Strategy<Value = MaskedMark> {
    let more = prop_oneof![any::<u32>(), Just(u32::MAX)];
    (1..=u32::MAX, more).prop_map(|(value, more)| MaskedMark::new(value, value | more).unwrap())
}

fn tcp_flags() -> impl Strategy<Value = TcpFlags> {
    (1..64_u8, any::<u8>()).prop_map(|(mask, set)| TcpFlags::new(mask, set & mask).unwrap())
}

fn tracked() -> impl Strategy<Value = Tracked> {
    let directions = vec![None, Some(Direction::Original), Some(Direction::Reply)];
    let states = vec![ConnState::Invalid, ConnState::RelatedOrEstablished];
    (select(states), select(directions)).prop_map(|(state, direction)| Tracked { state, direction })
}

fn targets() -> impl Strategy<Value = Target> {
    let ports = || (1..=u16::MAX).prop_map(|number| Port::new(number).unwrap());
    let marks = || (1..=u32::MAX).prop_map(|one| Mark::new(one).unwrap());
    let chains = select(OurChain::ALL.to_vec());
    prop_oneof![
        Just(Target::Accept),
        Just(Target::Drop),
        Just(Target::Return),
        chains.prop_map(|chain| Target::Jump(chain.into())),
        ports().prop_map(Target::Redirect),
        (ports(), marks()).prop_map(|(port, mark)| Target::Tproxy { port, mark }),
        marks().prop_map(Target::SetMark),
        Just(Target::SaveMark),
        Just(Target::RestoreMark),
        masked_marks().prop_map(Target::SetConnMark),
        any::<u16>().prop_map(Target::ConntrackZone),
    ]
}

fn rules() -> impl Strategy<Value = (Family, Rule)> {
    select(Family::BOTH.to_vec()).prop_flat_map(|family| {
        let rule = (matches(family), targets()).prop_map(|(matches, target)| Rule { matches, target });
        (Just(family), rule.prop_map(|rule| rule.canonical()))
    })
}

proptest! {
    #[test]
    fn a_rule_survives_being_encoded((family, rule) in rules()) {
        prop_assert_eq!(decoded(&expressions(&rule, family), family), Some(rule));
    }

    #[test]
    fn a_rule_survives_being_text((_, rule) in rules()) {
        // A comparison with all ports is read from the module that stays behind; two of them leave one.
        let any_ports = rule.matches.iter().filter(|m| matches!(
            m, Match::SourcePort(is) | Match::DestinationPort(is) if !is.not && is.value == PortRange::ALL
        ));
        prop_assume!(any_ports.count() == 0);
        prop_assert_eq!(Entry::saved(&rule.text()), Entry::Rule(rule));
    }

    #[test]
    fn any_bytes_can_be_observed(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut observed = Observed::at(0);
        for message in Messages::new(&bytes) {
            observed.take(&message);
        }
        let _ = decoded(&bytes, Family::V4);
    }

    #[test]
    fn a_damaged_rule_can_be_observed((family, rule) in rules(), at in any::<prop::sample::Index>(), to in any::<u8>()) {
        let mut bytes = expressions(&rule, family);
        let index = at.index(bytes.len());
        bytes[index] = to;
        let _ = decoded(&bytes, family);
        let rule = crate::state::RawRule::new(Attribute(&bytes).attributes(), None);
        let _ = (rule.to_string(), rule.jumps_to(), rule.protocol());
    }

    #[test]
    fn any_two_states_are_one_transaction_apart(from in chains(), to in chains()) {
        let nothing = Observed::at(1);
        let (from, to) = (state(&from), state(&to));
        let first = IptablesChange::back(&IptablesTables::new(), &from, &IptablesChange::default());
        let mut kernel = Kernel::default();
        let mut batch = Batch::new(&nothing);
        batch.change(Family::V4, &first).unwrap();
        kernel.commit(batch.finish().unwrap().bytes());
        let observed = kernel.dump();
        prop_assert_eq!(observed.state(Family::V4), &from);
        let second = IptablesChange::back(&from, &to, &IptablesChange::default());
        let mut batch = Batch::new(&observed);
        batch.change(Family::V4, &second).unwrap();
        kernel.commit(batch.finish().unwrap().bytes());
        // A built-in chain stays where it was once made; empty, it is as good as none.
        let now = kernel.dump();
        prop_assert_eq!(held(now.state(Family::V4)), held(&to));
    }
}

/// The chains that matter, with their rules.
fn held(state: &IptablesTables) -> Vec<(Chain, Vec<Entry>)> {
    let chains =
        state.chains(Table::Nat).filter(|(chain, rules)| chain.belongs_to_mesh() || !rules.is_empty());
    chains.map(|(chain, rules)| (chain.clone(), rules.to_vec())).collect()
}

fn chains() -> impl Strategy<Value = Vec<(OurChain, Vec<u16>)>> {
    let ports = prop::collection::vec(1..9_u16, 0..5);
    prop::collection::vec((select(OurChain::ALL.to_vec()), ports), 0..4)
}

/// Chains that return for some ports, each jumped to from the built-in chain.
fn state(chains: &[(OurChain, Vec<u16>)]) -> IptablesTables {
    let mut state = IptablesTables::new();
    for (chain, ports) in chains {
        for port in ports {
            let text = format!("-p tcp -m tcp --dport {port} -j RETURN");
            state.declare(Table::Nat, (*chain).into()).push(Entry::saved(&text));
        }
        state.declare(Table::Nat, (*chain).into());
        let jump = format!("-j {}", chain.name());
        state.declare(Table::Nat, Hook::Output.into()).push(Entry::saved(&jump));
    }
    state
}

#[test]
fn no_address_at_all_is_compared_with_every_bit_masked() {
    let none = Match::Destination(Equality::not_equals("0.0.0.0/0".parse().unwrap()));
    let rule = Rule { matches: [none].into(), target: Target::Return };
    let bytes = expressions(&rule, Family::V4);
    assert_eq!(decoded(&bytes, Family::V4), Some(rule));
    let lengths = Attribute(&bytes).attributes().filter_map(|(_, element)| {
        let (name, data) = reading::name_and_data(element)?;
        (name == "payload").then(|| data.u32(attribute::payload::LENGTH))?
    });
    assert_eq!(lengths.collect::<Vec<_>>(), [4]);
}

#[test]
fn nothing_goes_into_a_chain_that_is_not_there() {
    let nothing = Observed::at(1);
    let entry = Entry::saved("-p tcp -j RETURN");
    let chain = || Chain::from(OurChain::Output);
    for step in [
        EditOp::Append(chain(), entry.clone()),
        EditOp::Insert(chain(), 1, entry.clone()),
        EditOp::Delete(chain(), entry),
        EditOp::Flush(chain()),
        EditOp::RemoveChain(chain()),
    ] {
        // Neither in one that was never made, nor in one that is gone.
        for before in [&[][..], &[EditOp::DeclareEmpty(chain()), EditOp::RemoveChain(chain())]] {
            let steps = [before, std::slice::from_ref(&step)].concat();
            let change = IptablesChange { tables: [TableChange { table: Table::Nat, steps }].into() };
            let refused = Batch::new(&nothing).change(Family::V4, &change);
            assert!(matches!(refused, Err(BatchError::NoSuchChain(_))), "{before:?} {step:?}: {refused:?}");
        }
    }
}

#[test]
fn a_plan_of_native_rules_has_every_rule_once() {
    let plan = everything();
    let (nothing, wanted) = (Observed::at(1), NativeState::wanted(&plan, NativeForm::Plain));
    let mut batch = Batch::new(&nothing);
    batch.native_change(nothing.native(), &wanted);
    let finished = batch.finish().unwrap();
    let sent = Messages::new(finished.bytes()).filter(|message| message.kind == kind::NEW_RULE).count();
    let text = plan.nft_text(NativeForm::Plain);
    assert_eq!(sent, text.lines().filter(|line| line.starts_with("add rule")).count());
    let all = plan.merged_rules().into_values().flat_map(BTreeMap::into_values).flatten();
    // Native tproxy takes two: to hand over, and to drop what has no listener.
    let lines = |planned: &redirect_core::plan::PlannedRule| {
        1 + usize::from(matches!(planned.rule().target, Target::Tproxy { .. }))
    };
    let merged: usize = all.map(lines).sum();
    assert!(sent == merged && merged > 50, "{sent} sent, {merged} planned");
    // Those of both families stand once.
    let single = |family| IptablesTables::from(&plan.rules(family));
    let listed = |state: IptablesTables| -> usize {
        Table::ALL
            .iter()
            .flat_map(|table| state.chains(*table).map(|(_, rules)| rules.len()).collect::<Vec<_>>())
            .sum()
    };
    let (v4, v6) = (listed(single(Family::V4)), listed(single(Family::V6)));
    assert!(v4.max(v6) < sent && sent < v4 + v6, "{v4} and {v6} become {sent}");
}
