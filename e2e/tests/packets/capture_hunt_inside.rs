//! A hunt for a way past the proxy from inside the pod: a process without any privilege does with sockets whatever comes to its mind, on the few
//! ports that a proxy with moods uses as well, towards peers that keep to no protocol. HUNT_INSIDE says how often it is to open connections.
//!
//! Who gets out is seen by a rule that notes, behind all others, what leaves the pod and is not the proxy's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::{
    self,
    crafted::{FORMS, stranger},
};
use e2e::iptables::{apply, mesh::any};
use e2e::meddler::{Meddler, Orders, Tally};
use e2e::segments::{ACK, FIN, RST, SYN, Segment, Wire};
use e2e::traffic::{PROXY_ID, TcpServer, as_user};
use serde_json::Value;
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, Topology, pod_address, remote_address};
use test_support::parallel::Worker;
use test_support::sample;

/// How often `make test` tries to open a connection; `HUNT_INSIDE` says how often otherwise.
const CALLS: usize = 12_000;
/// How often in one pod: after that all ports are in use, or known to the kernel.
const IN_ONE_POD: usize = 300;
/// How many moves are made in turn by the application and by the proxy.
const MOVES: usize = 40;
const APP: u32 = 1000;
/// The port of the service far away.
const SERVICE: u16 = 80;
const USUAL: &str = "--dual-stack -b * -i *";
const MODES: [&str; 4] = ["", "-m TPROXY", "--strict-capture", "-m TPROXY --strict-capture"];

/// Ports, by what happens there. A connection that gets out shows by its port which way it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    /// The application calls from there over `lo`, too.
    OverLoopback,
    /// The proxy calls from there, too.
    Shared,
    /// The application's alone; tied to `eth0` at times.
    Own,
}

impl Origin {
    const ALL: [Self; 3] = [Self::OverLoopback, Self::Shared, Self::Own];

    const fn ports(self) -> std::ops::Range<u16> {
        match self {
            Self::OverLoopback => 21_000..21_005,
            Self::Shared => 22_000..22_005,
            Self::Own => 23_000..23_005,
        }
    }

    fn of(port: impl TryInto<u16>) -> Option<Self> {
        let port = port.try_into().ok()?;
        Self::ALL.into_iter().find(|place| place.ports().contains(&port))
    }

    /// The interfaces that the application's sockets are tied to there.
    fn interfaces(self) -> Vec<Option<String>> {
        let tied = match self {
            Self::OverLoopback => "lo",
            Self::Shared | Self::Own => "eth0",
        };
        vec![None, None, Some(tied.to_owned())]
    }
}

/// A way in which a connection got past the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    /// The application called a peer outside.
    Out(Origin),
    /// The application answered a peer outside.
    Back(Origin),
}

impl Direction {
    /// The ways that docs/concepts/capture.md names.
    fn known(mode: &str, v6: bool) -> BTreeSet<Self> {
        if mode.contains("--strict-capture") {
            return BTreeSet::new();
        }
        if mode.contains("TPROXY") {
            // Where a peer has called the pod, nat has left a connection that is not translated, whatever the port.
            return Origin::ALL.map(Self::Out).into();
        }
        // The kernel knows no way from lo to an outside IPv6 address.
        let places = [Origin::Shared, Origin::OverLoopback].into_iter().take(if v6 { 1 } else { 2 });
        // Whoever was called from there calls back.
        places.flat_map(|place| [Self::Out(place), Self::Back(place)]).collect()
    }

    /// Those of them that come up so often that also a short hunt finds them.
    fn frequent(mode: &str, v6: bool) -> BTreeSet<Self> {
        let rare = |way: &Self| match way {
            Self::Out(Origin::OverLoopback) => v6,
            Self::Out(Origin::Shared) => false,
            Self::Out(Origin::Own) | Self::Back(_) => true,
        };
        Self::known(mode, v6).into_iter().filter(|way| !rare(way)).collect()
    }
}

fn targets(v6: bool) -> Vec<SocketAddr> {
    [(stranger(v6), 80), (stranger(v6), 443), (remote_address(v6), 80)].map(SocketAddr::from).into()
}

/// A pod, its proxy's listeners, and a service far away.
struct Pod {
    topology: Topology,
    _proxy: Vec<TcpServer>,
    remote: Vec<TcpServer>,
}

impl Pod {
    fn new() -> Result<Self> {
        let topology = Topology::new(Families::Dual)?;
        let (mut proxy, mut remote) = (Vec::new(), Vec::new());
        for v6 in [false, true] {
            for (name, port) in [("outbound", 15001), ("inbound", 15006)] {
                let start = || match port {
                    15006 => TcpServer::start_transparent(&topology.pod, name, (any(v6), port)),
                    _ => TcpServer::start(&topology.pod, name, (any(v6), port)),
                };
                proxy.push(as_user(PROXY_ID, PROXY_ID, start)?);
            }
            remote.push(TcpServer::start(&topology.client, "remote", (any(v6), SERVICE))?);
        }
        Ok(Self { topology, _proxy: proxy, remote })
    }

    /// From now on it is noted who opens a connection to the outside, or answers one, and is not the proxy. What belongs to no socket any more has no
    /// user, and is noted, too. Not noted is what was captured, but is tied to `eth0` by its socket: it leaves there with the proxy's address on `lo` as
    /// its destination, which no host takes.
    fn watch(&self) -> Result<()> {
        let set = |(set, v6, _): (&str, bool, &str)| {
            let address = if v6 { "ipv6_addr" } else { "ipv4_addr" };
            let ports = "type inet_service . inet_service . inet_service . inet_service";
            format!(
                "set {set} {{ type {address} . inet_service . {address} . inet_service; flags dynamic; size 65535; }}
                set {set}_tracked {{ {ports}; flags dynamic; size 65535; }}\n"
            )
        };
        // Of what connection tracking does not know, the second statement notes nothing.
        let rule = |(set, v6, flags): (&str, bool, &str)| {
            let (family, ip, own) = if v6 { ("ipv6", "ip6", "::1") } else { ("ipv4", "ip", "127.0.0.0/8") };
            format!(
                "meta nfproto {family} {ip} daddr != {own} tcp flags & (syn | ack) == {flags} \
                 add @{set} {{ {ip} saddr . tcp sport . {ip} daddr . tcp dport }} \
                 add @{set}_tracked {{ tcp sport . tcp dport . ct original proto-src . ct original proto-dst }}\n"
            )
        };
        let (sets, rules) = (WATCHED.map(set).concat(), WATCHED.map(rule).concat());
        self.topology.pod.sh(&format!(
            "nft 'table inet watch {{
                set of_proxy {{ type inet_service . inet_service; flags dynamic; size 65535; }}
                {sets}
                chain out {{
                    type filter hook postrouting priority 500
                    oifname != eth0 return
                    meta l4proto != tcp return
                    meta skuid {PROXY_ID} tcp flags & (syn | ack) == syn add @of_proxy {{ tcp sport . tcp dport }}
                    meta skuid {PROXY_ID} return
                    {rules}
                }}
            }}'"
        ))?;
        Ok(())
    }

    /// From which ports the service far away was reached, and whose they are.
    fn callers(&self, v6: bool) -> Result<Vec<(SocketAddr, Option<Origin>)>> {
        let origins = self.origins(if v6 { "out6" } else { "out4" })?;
        let callers = self.remote.iter().flat_map(TcpServer::accepted).map(|report| report.peer);
        let whose = |peer: SocketAddr| (peer, origins.of(peer.port().into(), SERVICE.into()));
        // The proxy calls from the shared ones, which is no way past it.
        Ok(callers.map(whose).filter(|(_, place)| *place != Some(Origin::Shared)).collect())
    }

    /// What is known of those in a set of the watch.
    fn origins(&self, set: &str) -> Result<Origins> {
        let noted = |set: &str| noted(&self.topology.pod, set);
        Ok(Origins { of_proxy: noted("of_proxy")?, tracked: noted(&format!("{set}_tracked"))? })
    }

    /// The ways that were taken since the watch began.
    fn ways(&self, v6: bool) -> Result<BTreeMap<Direction, usize>> {
        let mut ways = BTreeMap::new();
        for (set, _, flags) in WATCHED.iter().filter(|(_, is_v6, _)| *is_v6 == v6) {
            let origins = self.origins(set)?;
            for tuple in noted(&self.topology.pod, set)? {
                let ports = tuple[1].as_u64().zip(tuple[3].as_u64());
                let place = ports.and_then(|(own, peer)| origins.of(own, peer));
                let place = place.with_context(|| format!("from a port of nobody: {tuple:?}"))?;
                let way = if *flags == "syn" { Direction::Out(place) } else { Direction::Back(place) };
                *ways.entry(way).or_default() += 1;
            }
        }
        Ok(ways)
    }
}

/// Between which ports connections left the pod.
struct Origins {
    /// Those that the proxy opens.
    of_proxy: Vec<Vec<Value>>,
    /// Everybody else's, where connection tracking knows them, and between which ports they were opened.
    tracked: Vec<Vec<Value>>,
}

impl Origins {
    /// Whose port a connection was opened from that left the pod between these ports. nat gives a connection any other port where its own is taken, one of
    /// those above too, and a peer that calls back comes to that.
    fn of(&self, own: u64, peer: u64) -> Option<Origin> {
        let is_between = |ports: &&Vec<Value>| ports[0] == own && ports[1] == peer;
        if self.of_proxy.iter().any(|ports| is_between(&ports)) {
            return Some(Origin::Shared);
        }
        let tracked = self.tracked.iter().filter(is_between);
        let at_first: Vec<u64> = tracked.flat_map(|ports| &ports[2..]).filter_map(Value::as_u64).collect();
        if at_first.is_empty() || at_first.contains(&own) {
            return Origin::of(own);
        }
        at_first.into_iter().find_map(Origin::of)
    }
}

/// Sets of the watch: name, family, flags of what is noted there.
const WATCHED: [(&str, bool, &str); 4] = [
    ("out4", false, "syn"),
    ("back4", false, "(syn | ack)"),
    ("out6", true, "syn"),
    ("back6", true, "(syn | ack)"),
];

/// The elements of a set.
fn noted(pod: &Namespace, set: &str) -> Result<Vec<Vec<Value>>> {
    let listed = pod.sh(&format!("nft -j list set inet watch {set}"))?.stdout;
    let listed: Value = serde_json::from_str(&listed)?;
    let objects = listed["nftables"].as_array().context("objects")?;
    let elements = objects.iter().filter_map(|object| object["set"]["elem"].as_array()).flatten();
    elements
        .map(|element| {
            Ok(element["concat"].as_array().with_context(|| format!("no tuple: {element}"))?.clone())
        })
        .collect()
}

/// A peer outside that answers by hand, as it likes, and calls whoever called it. At its end it says how many segments it has sent.
struct Peers(Worker<Result<usize>>);

impl Peers {
    fn start(client: &Namespace, v6: bool, seed: u64) -> Result<Self> {
        let wire = Wire::open(client, v6)?;
        Ok(Self(Worker::start(move |stop| {
            let (mut dice, mut sent) = (Dice::new(seed), 0);
            while !stop.load(Ordering::Relaxed) {
                for segment in wire.seen_within(Duration::from_millis(20))? {
                    if segment.destination.ip() == stranger(v6) && Origin::of(segment.source.port()).is_some()
                    {
                        for answer in answers(&segment, &mut dice).into_iter().chain(unasked(v6, &mut dice)) {
                            wire.send(&answer)?;
                            sent += 1;
                        }
                    }
                }
            }
            Ok(sent)
        })))
    }
}

/// What a peer says to a segment. It answers no answers of its own, so that nobody talks for ever.
fn answers(segment: &Segment, dice: &mut Dice) -> Vec<Segment> {
    let length =
        u32::from(segment.flags & (SYN | FIN) != 0) + u32::try_from(segment.payload.len()).unwrap_or(0);
    let answer = |flags, sequence| Segment {
        source: segment.destination,
        destination: segment.source,
        sequence,
        acknowledged: if flags & ACK == 0 { 0 } else { segment.sequence.wrapping_add(length) },
        flags,
        payload: Vec::new(),
    };
    let calls_back = answer(SYN, 3_000_000_000);
    match (segment.flags & (SYN | RST), dice.below(8)) {
        // Never answered.
        (SYN, 0 | 1) => Vec::new(),
        (SYN, 2) => vec![answer(RST | ACK, 0)],
        // At the same time.
        (SYN, 3) => vec![calls_back],
        (SYN, 4) => vec![answer(SYN | ACK, 1000), answer(RST | ACK, 1001)],
        (SYN, 5) => vec![answer(SYN | ACK, 1000), answer(FIN | ACK, 1001)],
        (SYN, 6) => vec![answer(SYN | ACK, 1000), answer(RST | ACK, 1001), calls_back],
        (SYN, _) => vec![answer(SYN | ACK, 1000)],
        (0, 0) => vec![answer(RST, segment.acknowledged)],
        (0, 1) => vec![answer(FIN | ACK, segment.acknowledged)],
        (0, 2) => vec![answer(ACK, segment.acknowledged)],
        (_, 3) => vec![calls_back],
        _ => Vec::new(),
    }
}

/// Peers also call ports from which they may have been called, by whomever and over which interface ever.
fn unasked(v6: bool, dice: &mut Dice) -> Option<Segment> {
    let ports: Vec<u16> = Origin::ALL.into_iter().flat_map(Origin::ports).collect();
    let call = Segment {
        source: SocketAddr::new(stranger(v6), dice.pick(&[80, 443])),
        destination: SocketAddr::new(pod_address(v6), dice.pick(&ports)),
        sequence: 4_000_000_000,
        acknowledged: 0,
        flags: SYN,
        payload: Vec::new(),
    };
    dice.one_in(2).then_some(call)
}

/// What a hunt came to.
#[derive(Default)]
struct Bag {
    calls: usize,
    moves: BTreeMap<String, usize>,
    by_peers: usize,
    by_proxy: usize,
    captured: usize,
    ways: BTreeMap<Direction, usize>,
}

/// nat moves all that the proxy calls from its shared ports to those from which the application calls over lo.
const MOVED: &str = "table inet moved {
    chain move {
        type nat hook postrouting priority 150
        oifname eth0 tcp sport 22000-22004 masquerade to :21000-21004
    }
}";

/// Hunts in one pod and one family, with another program's rules in it.
fn hunt(mode: &str, form: &str, v6: bool, time: u64, others: &str) -> Result<Bag> {
    let seed = mode
        .bytes()
        .chain(form.bytes())
        .map(u64::from)
        .fold(2 * time + u64::from(v6) + 1, |all, byte| all * 31 % 0xffff_ffff + byte);
    let pod = Pod::new()?;
    apply(&pod.topology.pod, &format!("{USUAL} {mode} {form}"))?;
    pod.topology.pod.sh(&format!("nft '{others}'"))?;
    pod.watch()?;
    let peers = Peers::start(&pod.topology.client, v6, seed)?;
    let mut app = Meddler::start(&pod.topology.pod, &orders(APP, v6, seed, &Origin::ALL))?;
    let mut proxy = Meddler::start(&pod.topology.pod, &orders(PROXY_ID, v6, seed + 1, &[Origin::Shared]))?;
    let (mut by_app, mut by_proxy) = (Tally::default(), Tally::default());
    while by_app.calls < IN_ONE_POD {
        by_proxy = proxy.moves(MOVES)?;
        by_app = app.moves(MOVES)?;
    }
    let ways = pod.ways(v6)?;
    agree(&by_app, &pod, v6, &ways)?;
    let by_peers = peers.0.end()?;
    let captured = by_app.greeted.get("outbound").map_or(0, Vec::len);
    let by_proxy = by_proxy.greeted.get("remote").map_or(0, Vec::len);
    Ok(Bag { calls: by_app.calls, moves: by_app.moves, by_peers, by_proxy, captured, ways })
}

fn orders(user: u32, v6: bool, seed: u64, places: &[Origin]) -> Orders {
    let interfaces = |place: Origin| if user == APP { place.interfaces() } else { vec![None] };
    let ports =
        places.iter().flat_map(|place| place.ports().map(|port| (port, interfaces(*place)))).collect();
    Orders { user, seed, own: pod_address(v6), targets: targets(v6), ports, listens: user == APP }
}

/// Whoever has reached the service far away, or accepted somebody from outside, was seen on the way by the watch.
fn agree(by_app: &Tally, pod: &Pod, v6: bool, ways: &BTreeMap<Direction, usize>) -> Result<()> {
    let greeted = by_app.greeted.get("remote").into_iter().flatten();
    let greeted = greeted.map(|(own, _)| (*own, Origin::of(own.port())));
    for (own, place) in greeted.chain(pod.callers(v6)?) {
        let place = place.with_context(|| format!("{own} is nobody's"))?;
        ensure!(ways.contains_key(&Direction::Out(place)), "{own} reached the service, unseen: {ways:?}");
    }
    let origins = pod.origins(if v6 { "back6" } else { "back4" })?;
    for (own, peer) in &by_app.accepted {
        let place = origins.of(own.port().into(), peer.port().into());
        let place = place.with_context(|| format!("{own} is nobody's"))?;
        let is_seen =
            [Direction::Back(place), Direction::Out(place)].iter().any(|way| ways.contains_key(way));
        ensure!(is_seen, "{own} accepted {peer}, unseen: {ways:?}");
    }
    Ok(())
}

/// nat moved the shared port's connection to a port that the application calls over lo from.
#[test]
fn a_connection_that_nat_moved_counts_for_the_port_it_was_opened_from() {
    let noted = |ports: &[u16]| ports.iter().copied().map(Value::from).collect();
    let moved = Origins {
        of_proxy: [noted(&[21_002, 80])].into(),
        tracked: [noted(&[21_001, 80, 22_001, 80]), noted(&[21_001, 443, 443, 21_001])].into(),
    };
    assert_eq!(moved.of(21_001, 80), Some(Origin::Shared));
    assert_eq!(moved.of(21_001, 443), Some(Origin::OverLoopback), "called back from the port it calls from");
    assert_eq!(moved.of(21_002, 80), Some(Origin::Shared), "called back at the port that the proxy left by");
    assert_eq!(moved.of(21_002, 443), Some(Origin::OverLoopback), "which it did to another peer");
    assert_eq!(moved.of(23_001, 80), Some(Origin::Own), "connection tracking knows nothing of it");
    assert_eq!(moved.of(40_000, 80), None);
}

#[test]
fn what_the_proxy_calls_from_ports_of_the_application_counts_as_the_proxys() -> Result<()> {
    let pods = sample::number("HUNT_INSIDE", 4 * IN_ONE_POD) / IN_ONE_POD;
    for time in 0..pods as u64 {
        let v6 = time % 2 == 0;
        let bag = hunt("", "", v6, time, MOVED)?;
        assert!(bag.by_proxy > 0, "the proxy reached nobody, so nothing was moved");
        let found: BTreeSet<Direction> = bag.ways.keys().copied().collect();
        assert!(found.is_subset(&Direction::known("", v6)), "{found:?} {}", bag.figures());
    }
    Ok(())
}

/// With strict capture nobody gets out; without, by the known ways only, and those are found.
#[test]
fn an_application_gets_out_by_the_known_ways_only_and_with_strict_capture_by_none() -> Result<()> {
    let is_long = std::env::var_os("HUNT_INSIDE").is_some();
    let calls = sample::number("HUNT_INSIDE", CALLS);
    let of_mode = |mode| FORMS.iter().flat_map(move |form| [false, true].map(|v6| (mode, *form, v6)));
    let once: Vec<(&str, &str, bool)> = MODES.into_iter().flat_map(of_mode).collect();
    let times = calls.div_ceil(IN_ONE_POD * once.len()) as u64;
    let places: Vec<_> = (0..times).flat_map(|time| once.iter().map(move |place| (time, *place))).collect();
    let bags = Mutex::new(BTreeMap::<(&str, bool), Bag>::new());
    let problems = iptables::in_parallel(2, &places, |_, (time, (mode, form, v6))| {
        let what = format!("{mode} {form} {}", if *v6 { "IPv6" } else { "IPv4" });
        let bag = hunt(mode, form, *v6, *time, "").with_context(|| what.clone())?;
        let known = Direction::known(mode, *v6);
        let unknown = bag.ways.iter().filter(|(way, _)| !known.contains(way));
        let unknown = unknown.map(|(way, count)| format!("{what}: {count} connections {way:?}")).collect();
        let mut bags = bags.lock().unwrap_or_else(PoisonError::into_inner);
        bags.entry((*mode, *v6)).or_default().add(bag);
        Ok(unknown)
    });
    let bags = bags.into_inner().unwrap_or_else(PoisonError::into_inner);
    for ((mode, v6), bag) in &bags {
        println!("{mode} {}: {}", if *v6 { "IPv6" } else { "IPv4" }, bag.figures());
    }
    assert!(problems.is_empty(), "{} ways past the proxy:\n{}", problems.len(), problems.join("\n"));
    for ((mode, v6), bag) in &bags {
        let found: BTreeSet<Direction> = bag.ways.keys().copied().collect();
        assert!(
            bag.captured > 0 && bag.by_proxy > 0,
            "the proxy saw nobody, or reached nobody, so nothing is shown"
        );
        let expected = if is_long { Direction::known(mode, *v6) } else { Direction::frequent(mode, *v6) };
        let missed: Vec<&Direction> = expected.difference(&found).collect();
        assert!(
            missed.is_empty(),
            "{mode} {v6}: not found are {missed:?}: a hunt that does not find what is there shows nothing"
        );
    }
    Ok(())
}

impl Bag {
    fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.by_peers += other.by_peers;
        self.by_proxy += other.by_proxy;
        self.captured += other.captured;
        for (what, count) in other.moves {
            *self.moves.entry(what).or_default() += count;
        }
        for (way, count) in other.ways {
            *self.ways.entry(way).or_default() += count;
        }
    }

    fn figures(&self) -> String {
        format!(
            "{} calls, {} segments by peers, {} connections to the proxy, {} by it; past it: {:?}; moves: {:?}",
            self.calls, self.by_peers, self.captured, self.by_proxy, self.ways, self.moves
        )
    }
}
