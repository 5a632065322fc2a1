//! What two plans treat differently is exactly what the walk of single packets finds: nothing more, nothing less, each packet once.
//!
//! DIFF_PACKETS says how many packets are tried (`make trace`: 100,000).
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::generated::{Settings, settings};
use ipnet::IpNet;
use packet_trace::{ConnectionState, ConntrackEntry, Fate, Packet, Sender, TraceRules, TrafficDifference};
use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use redirect_core::{
    Family, RulePlan,
    rule::{Match, TcpFlags},
    settings::{Key, Source},
    values::PortRange,
};
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};
use test_support::sample;

/// How many packets are tried for each pair of plans.
const FOR_EACH: usize = 200;

fn runner() -> TestRunner {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    TestRunner::new_with_rng(Config::default(), rng)
}

fn generate<T>(strategy: &impl Strategy<Value = T>, runner: &mut TestRunner) -> T {
    strategy.new_tree(runner).unwrap().current()
}

/// The same settings, and some others instead of some.
fn changed(settings: &Settings, others: &Settings, kept: usize) -> Settings {
    let mut said = settings.said.clone();
    let new = others.said.iter().enumerate().filter(|(index, _)| index % 5 == kept % 5);
    for (_, (key, text)) in new {
        said.retain(|(known, _)| known != key);
        said.push((*key, text.clone()));
    }
    Settings { said, ..settings.clone() }
}

/// What the rules of two plans compare with, and what lies beside it.
#[derive(Default)]
struct Constants {
    addresses: [Vec<IpAddr>; 2],
    ports: Vec<u16>,
    ids: Vec<u32>,
    interfaces: Vec<String>,
    marks: Vec<u32>,
}

impl Constants {
    fn of(plans: [&RulePlan; 2]) -> Self {
        let mut all = Self {
            ports: vec![0, 53, 80, 15_008, u16::MAX],
            ids: vec![0, 1337],
            interfaces: vec!["lo".into(), "eth0".into()],
            marks: vec![0, 1],
            ..Self::default()
        };
        for text in
            ["127.0.0.1", "127.0.0.6", "10.1.0.2", "192.0.2.1", "::1", "::6", "fd00::2", "2001:db8::1"]
        {
            all.address(text.parse().unwrap());
        }
        for planned in plans.iter().flat_map(|plan| plan.planned_rules()) {
            planned.rule().matches.iter().for_each(|condition| all.take(condition));
        }
        all
    }

    fn address(&mut self, address: IpAddr) {
        self.addresses[usize::from(address.is_ipv6())].push(address);
    }

    fn port(&mut self, range: &PortRange) {
        let (first, last) = (range.first(), range.last());
        self.ports.extend([first, last, first.wrapping_sub(1), last.wrapping_add(1)]);
    }

    fn take(&mut self, condition: &Match) {
        match condition {
            Match::Source(is) | Match::Destination(is) => {
                self.address(is.value.network());
                self.address(is.value.broadcast());
            }
            Match::SourcePort(is) | Match::DestinationPort(is) => self.port(&is.value),
            Match::DestinationPorts(is) => is.value.iter().for_each(|range| self.port(range)),
            Match::OwnerUid(is) | Match::OwnerGid(is) => {
                self.ids.extend([is.value, is.value.wrapping_add(1)]);
            }
            Match::InInterface(is) | Match::OutInterface(is) => {
                self.interfaces.push(is.value.name().to_owned());
                self.interfaces.push(format!("{}0", is.value.name()).chars().take(15).collect());
            }
            Match::Mark(is) | Match::ConnMark(is) => {
                self.marks.extend([is.value.value(), is.value.value() | !is.value.mask()]);
            }
            Match::Protocol(_) | Match::TcpFlags(_) | Match::Tracked(_) => {}
        }
    }
}

fn pick<T: Clone>(from: &[T], random: &mut impl FnMut() -> usize) -> T {
    from[random() % from.len()].clone()
}

/// One of the packets there are: nothing comes in over lo from outside, nothing goes to a loopback address elsewhere.
fn packet(constants: &Constants, random: &mut impl FnMut() -> usize) -> Option<Packet> {
    let addresses = &constants.addresses[random() % 2];
    let (source, destination) = (pick(addresses, random), pick(addresses, random));
    let interface = pick(&constants.interfaces, random);
    let is_local = !random().is_multiple_of(3);
    let strange = interface != "lo" && destination.is_loopback()
        || !is_local && (interface == "lo" || source.is_loopback());
    if strange {
        return None;
    }
    let is_tcp = !random().is_multiple_of(4);
    let states = [
        ConnectionState::New,
        ConnectionState::New,
        ConnectionState::New,
        ConnectionState::Related,
        ConnectionState::Established,
        ConnectionState::Reply,
        ConnectionState::Invalid,
    ];
    let state = pick(&states, random);
    let is_known = matches!(state, ConnectionState::Established | ConnectionState::Reply);
    let mut number = || pick(&constants.ids, random);
    let sender = if is_local { Sender::Local { uid: number(), gid: number() } } else { Sender::Outside };
    let mut port = || pick(&constants.ports, random);
    let ends = (SocketAddr::new(source, port()), SocketAddr::new(destination, port()));
    let mut packet = Packet::from_outside(ends.0, ends.1).by(&interface);
    packet.sender = sender;
    if is_tcp {
        packet.flags = pick(&[TcpFlags::SYN, TcpFlags::SYN | TcpFlags::ACK, TcpFlags::ACK, 0], random);
    } else {
        packet = packet.over_udp();
    }
    packet.mark = if is_local { pick(&constants.marks, random) } else { 0 };
    let mark = if is_known { pick(&constants.marks, random) } else { 0 };
    packet.connection = ConntrackEntry { state, mark, translated_to: None };
    Some(packet)
}

/// Two plans, and what becomes of a packet by each.
struct Pair([[TraceRules; 2]; 2]);

impl Pair {
    fn of(plans: [&RulePlan; 2]) -> Self {
        Self(plans.map(|plan| Family::BOTH.map(|family| TraceRules::of_plan(plan, family))))
    }

    fn fates(&self, packet: &Packet) -> (Fate, Fate) {
        let family = usize::from(packet.family() == Family::V6);
        (self.0[0][family].fate(packet), self.0[1][family].fate(packet))
    }
}

/// Whether what is said of a packet is so.
fn judge(pair: &Pair, differences: &[TrafficDifference], packet: &Packet) -> bool {
    let (before, after) = pair.fates(packet);
    let said: Vec<_> = differences.iter().filter(|one| one.region.contains(packet)).collect();
    let right = match said.as_slice() {
        [] => before == after,
        [one] => before != after && (one.before, one.after) == (before, after),
        _ => false,
    };
    assert!(right, "{packet}: {before:?} and {after:?}, but {said:#?}\n{packet:#?}");
    before != after
}

#[test]
fn sampled_packets_agree() {
    let packets = sample::number("DIFF_PACKETS", 3_000);
    let mut runner = runner();
    let strategy = settings();
    let (mut tried, mut differing, mut pairs) = (0, 0, 0);
    while tried < packets {
        let (one, other) = (generate(&strategy, &mut runner), generate(&strategy, &mut runner));
        let other = changed(&one, &other, pairs);
        let (before, after) = (one.plan(), other.plan());
        let differences = TrafficDifference::of_plans(&before, &after);
        let pair = Pair::of([&before, &after]);
        for one in &differences {
            let example = one.region.example();
            assert!(one.region.contains(&example), "{one}: {example:#?}");
            assert!(judge(&pair, &differences, &example), "{one}: {example:#?}");
        }
        let constants = Constants::of([&before, &after]);
        let mut random = || usize::try_from(runner.rng().next_u64() >> 1).unwrap();
        for _ in 0..FOR_EACH {
            if let Some(packet) = packet(&constants, &mut random) {
                differing += usize::from(judge(&pair, &differences, &packet));
                tried += 1;
            }
        }
        pairs += 1;
    }
    println!("{tried} packets over {pairs} pairs of plans, {differing} of them treated differently");
    assert!(differing * 100 > tried, "hardly one of {tried} packets is treated differently: {differing}");
}

const LISTS: [Key; 11] = [
    Key::InboundPorts,
    Key::InboundExcludePorts,
    Key::OutboundPorts,
    Key::OutboundExcludePorts,
    Key::OutboundRanges,
    Key::OutboundExcludeRanges,
    Key::ExcludeInterfaces,
    Key::ProxyUid,
    Key::ProxyGid,
    Key::OwnerGroups,
    Key::OwnerGroupsExclude,
];

/// Ways to say the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Spelling {
    /// Lists in another order, with an element twice.
    Repeated,
    /// Ranges of ports and addresses in two halves.
    Halved,
    /// Ranges of addresses by another of their addresses.
    Renamed,
    /// Ranges with a part of them beside them.
    Overlapping,
}

impl Spelling {
    const ALL: [Self; 4] = [Self::Repeated, Self::Halved, Self::Renamed, Self::Overlapping];

    fn of(self, key: Key, text: &str) -> String {
        let items = text.split(',').flat_map(|item| self.item(item));
        let mut items: Vec<String> = items.collect();
        // What the first of several users or groups calls within the pod is captured, as in the reference; so their order means something.
        if self == Self::Repeated && !matches!(key, Key::ProxyUid | Key::ProxyGid) {
            items.reverse();
        }
        if self == Self::Repeated {
            items.extend(items.first().cloned());
        }
        items.join(",")
    }

    fn item(self, item: &str) -> Vec<String> {
        let as_it_is = || vec![item.to_owned()];
        if let Ok(net) = item.parse::<IpNet>() {
            let halves =
                || net.subnets(net.prefix_len() + 1).map(|halves| halves.map(|half| half.to_string()));
            return match self {
                Self::Repeated => as_it_is(),
                Self::Halved => halves().map_or_else(|_| as_it_is(), Iterator::collect),
                Self::Renamed => vec![format!("{}/{}", net.broadcast(), net.prefix_len())],
                Self::Overlapping => {
                    as_it_is().into_iter().chain(halves().into_iter().flatten().take(1)).collect()
                }
            };
        }
        let Some((first, last)) = item.split_once(':').and_then(|(first, last)| {
            Some((first.parse::<u16>().ok()?, last.parse::<u16>().ok()?)).filter(|(first, last)| first < last)
        }) else {
            return as_it_is();
        };
        let middle = first + (last - first) / 2;
        match self {
            Self::Repeated | Self::Renamed => as_it_is(),
            Self::Halved => vec![format!("{first}:{middle}"), format!("{}:{last}", middle + 1)],
            Self::Overlapping => vec![item.to_owned(), format!("{first}:{middle}")],
        }
    }
}

#[test]
fn what_means_the_same_differs_in_nothing() {
    let mut runner = runner();
    let strategy = settings();
    let mut respelt = BTreeSet::new();
    for round in 0..24 {
        let one = generate(&strategy, &mut runner);
        let plan = one.plan();
        assert_eq!(TrafficDifference::of_plans(&plan, &plan), [], "{one:?}");
        // Every second time the one that every list has.
        let spelling = if round % 2 == 0 { Spelling::Repeated } else { Spelling::ALL[1 + round / 2 % 3] };
        let mut other = one.clone();
        for (key, text) in &mut other.said {
            if LISTS.contains(key) && !text.is_empty() && *text != "*" {
                let new = spelling.of(*key, text);
                if new != *text {
                    respelt.insert((spelling, *key));
                }
                *text = new;
            }
        }
        other.said.reverse();
        assert_eq!(TrafficDifference::of_plans(&plan, &other.plan()), [], "{one:?} is {other:?}");
        let by_flags =
            one.redirect_said_as(one.said.iter().map(|(key, text)| (*key, text.as_str(), Source::Flag("x"))));
        assert_eq!(TrafficDifference::of_plans(&plan, &by_flags.plan()), []);
    }
    let repeated = respelt.iter().filter(|(spelling, _)| *spelling == Spelling::Repeated).count();
    assert_eq!(repeated, LISTS.len(), "{respelt:?}");
    for spelling in Spelling::ALL {
        assert!(respelt.iter().filter(|(one, _)| *one == spelling).count() >= 2, "{respelt:?}");
    }
}

#[test]
fn a_port_left_alone_is_one_region_each_for_what_the_application_sends() {
    let with = |said: &[(Key, &str)]| {
        let said = said.iter().map(|(key, text)| (*key, (*text).to_owned())).collect();
        let addresses = vec!["10.1.0.2".parse().unwrap()];
        Settings { said, pod: true, addresses, nameservers: Vec::new() }.plan()
    };
    let differences = TrafficDifference::of_plans(&with(&[]), &with(&[(Key::OutboundExcludePorts, "3306")]));
    let text: Vec<String> = differences.iter().map(ToString::to_string).collect();
    let [own, left_alone] = ["port 15020", "port 3306"];
    let (outbound, inbound) =
        ("proxy, outbound listener (port 15001)", "proxy, inbound listener (port 15006)");
    let sent = |port| format!("IPv4 TCP outbound, {port}, user not 1337, group not 1337, first packets");
    let called = |port| {
        format!(
            "IPv4 TCP within the pod, from not 127.0.0.6, to not 127.0.0.1, {port}, user 1337, first packets"
        )
    };
    let untouched = "untouched, to its destination";
    // The annotation's value replaces the port excluded by default.
    let expected = [
        format!("{}: {untouched} → {outbound}", sent(own)),
        format!("{}: {untouched} → {inbound}", called(own)),
        format!("{}: {outbound} → {untouched}", sent(left_alone)),
        format!("{}: {inbound} → {untouched}", called(left_alone)),
    ];
    assert_eq!(text, expected);
}
