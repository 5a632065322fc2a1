//! A hunt for a way past the proxy: segments that follow no protocol, thrown like dice, on connections that live, die and are
//! used again. `capture_packets.rs` tries what is known; this looks for what nobody has thought of.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use e2e::iptables::{
    self,
    crafted::{FORMS, Lossy, stranger},
};
use e2e::iptables::{apply, mesh::any};
use e2e::segments::{ACK, Delivery, FIN, PADDED, Peer, RST, SYN, Segment, Wire};
use e2e::traffic::{TcpServer, listener};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, Topology, pod_address};
use test_support::parallel::Worker;
use test_support::sample;

/// How many segments `make test` sends; `HUNT` says how many otherwise.
const SEGMENTS: usize = 20_000;
/// How many go out before what came back is checked.
const BURST: usize = 25;
/// How many go out between two looks whether the application was reached.
const BATCH: usize = 250;
/// Ports that clients come from: so few that each is used repeatedly.
const PORTS: std::ops::Range<u16> = 20_000..20_024;
const CAPTURED: u16 = 8080;
/// Left alone, so that something answers that shows that all before has been dealt with.
const LEFT_ALONE: u16 = 8081;
const PROXY: u16 = 15006;

const USUAL: &str = "--dual-stack -b * -d 8081 -i *";
const MODES: [&str; 4] = ["", "-m TPROXY", "--strict-capture", "-m TPROXY --strict-capture"];
/// TCP options, as a peer might send them: none, those of an ordinary SYN, a timestamp, and nonsense (an unknown one, one without an end).
const OPTIONS: [&[u8]; 5] = [
    &[],
    &[2, 4, 5, 0xb4, 1, 3, 3, 7, 4, 2, 1, 1],
    &[1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0],
    &[253, 8, 1, 2, 3, 4, 5, 6],
    &[2, 40, 0, 0],
];

/// A pod whose application listens, and whose proxy has moods.
struct Pod {
    topology: Topology,
    app: Vec<TcpServer>,
    _left_alone: Vec<TcpServer>,
    proxy: MoodyProxy,
}

impl Pod {
    fn new(seed: u64) -> Result<Self> {
        let topology = Topology::new(Families::Dual)?;
        let (mut app, mut left_alone) = (Vec::new(), Vec::new());
        for v6 in [false, true] {
            app.push(TcpServer::start(&topology.pod, "app", (any(v6), CAPTURED))?);
            left_alone.push(TcpServer::start(&topology.pod, "left alone", (any(v6), LEFT_ALONE))?);
        }
        let proxy = MoodyProxy::start(&topology.pod, seed)?;
        Ok(Self { topology, app, _left_alone: left_alone, proxy })
    }

    /// Whom the application has accepted.
    fn reached(&self) -> Vec<SocketAddr> {
        self.app.iter().flat_map(TcpServer::accepted).map(|report| report.peer).collect()
    }
}

/// Accepts what is handed to the proxy and does with it what comes to its mind: greets, ends, resets, half closes, or forgets it for a while.
struct MoodyProxy {
    moods: Arc<Mutex<Kinds>>,
    _accepting: Worker,
}

impl MoodyProxy {
    fn start(pod: &Namespace, seed: u64) -> Result<Self> {
        let open = |v6| -> Result<TcpListener> {
            let listener = listener((any(v6), PROXY).into(), true)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let listeners = pod.enter(|| -> Result<_> { Ok([open(false)?, open(true)?]) })??;
        let moods = Arc::new(Mutex::new(Kinds::new()));
        let had = Arc::clone(&moods);
        let accepting = Worker::start(move |stop| {
            let (mut dice, mut kept) = (Dice::new(seed), VecDeque::new());
            while !stop.load(Ordering::Relaxed) {
                let mut fds = listeners.each_ref().map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN));
                let _ = poll(&mut fds, PollTimeout::from(20_u8));
                for (stream, _) in listeners.iter().filter_map(|one| one.accept().ok()) {
                    let (mood, stream) = moody(stream, &mut dice);
                    *had.lock().unwrap_or_else(PoisonError::into_inner).entry(mood).or_default() += 1;
                    kept.extend(stream);
                }
                while kept.len() > 32 {
                    kept.pop_front();
                }
            }
        });
        Ok(Self { moods, _accepting: accepting })
    }

    /// What it has done with how many of the connections that it accepted.
    fn moods(&self) -> Kinds {
        self.moods.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What becomes of a connection, and itself where it is kept. The client may break it at any time.
fn moody(mut stream: TcpStream, dice: &mut Dice) -> (&'static str, Option<TcpStream>) {
    let _ = stream.set_nonblocking(true);
    if dice.one_in(2) {
        let _ = stream.write_all(b"proxy\n");
    }
    match dice.below(5) {
        0 => ("closed by the proxy", None),
        1 => {
            let at_once = nix::libc::linger { l_onoff: 1, l_linger: 0 };
            let _ = setsockopt(&stream, sockopt::Linger, &at_once);
            ("reset by the proxy", None)
        }
        2 => {
            let _ = stream.shutdown(std::net::Shutdown::Write);
            ("half closed by the proxy", Some(stream))
        }
        _ => ("forgotten by the proxy for a while", Some(stream)),
    }
}

/// What a client at a port knows of its connection, as far as it cares.
#[derive(Clone, Copy, Default)]
struct Known {
    sequence: u32,
    expected: u32,
}

/// Sends segments from one address, and remembers what came back.
struct Hunter<'a> {
    wire: &'a Wire,
    v6: bool,
    dice: Dice,
    known: HashMap<u16, Known>,
    /// Answers to a SYN that are not acknowledged.
    unanswered: Vec<Segment>,
    sent: usize,
    kinds: Kinds,
    answered: usize,
    marker: u16,
}

impl<'a> Hunter<'a> {
    fn new(wire: &'a Wire, v6: bool, seed: u64) -> Self {
        let (known, unanswered) = (HashMap::new(), Vec::new());
        let (dice, kinds) = (Dice::new(seed), Kinds::new());
        Self { wire, v6, dice, known, unanswered, sent: 0, kinds, answered: 0, marker: 30_000 }
    }

    /// Sends a batch. When this returns the pod has dealt with all of it, and every connection that it wanted to open is open.
    fn batch(&mut self) -> Result<()> {
        for _ in 0..BATCH / BURST {
            for _ in 0..BURST {
                self.throw()?;
            }
            self.look()?;
        }
        self.settle()?;
        let answers = std::mem::take(&mut self.unanswered);
        for answer in answers {
            self.complete(&answer)?;
        }
        self.settle()
    }

    /// One segment.
    fn throw(&mut self) -> Result<()> {
        let port = PORTS.start + u16::try_from(self.dice.below(PORTS.len()))?;
        let to = if self.dice.one_in(20) { PROXY } else { CAPTURED };
        let known = *self.known.entry(port).or_default();
        let (flags, payload) = self.flags_and_payload();
        let segment = Segment {
            source: SocketAddr::new(stranger(self.v6), port),
            destination: SocketAddr::new(pod_address(self.v6), to),
            sequence: self.near(known.sequence),
            acknowledged: if flags & ACK == 0 { 0 } else { self.near(known.expected) },
            flags,
            payload,
        };
        let delivery = self.delivery();
        let (identification, backwards) = (u16::try_from(self.dice.below(65_536))?, self.dice.one_in(2));
        self.wire.send_as(&segment, &delivery, identification, backwards)?;
        self.sent += 1;
        for kind in kinds(&segment, &delivery) {
            *self.kinds.entry(kind).or_default() += 1;
        }
        // What it would send next; wrong where nobody took it, which is as good.
        let length = u32::try_from(segment.payload.len())? + u32::from(flags & (SYN | FIN) != 0);
        self.known.insert(port, Known { sequence: segment.sequence.wrapping_add(length), ..known });
        Ok(())
    }

    fn flags_and_payload(&mut self) -> (u8, Vec<u8>) {
        let flags = match self.dice.below(10) {
            0..=3 => SYN,
            4 => ACK,
            5 => FIN | ACK,
            6 => RST,
            7 => SYN | ACK,
            _ => u8::try_from(self.dice.below(256)).unwrap_or_default(),
        };
        let length = if self.dice.one_in(3) { self.dice.below(40) } else { 0 };
        (flags, vec![b'x'; length])
    }

    /// A number as it should be, next to that, or anywhere.
    fn near(&mut self, right: u32) -> u32 {
        match self.dice.below(8) {
            0..=4 => right,
            5 => right.wrapping_sub(1),
            6 => right.wrapping_add(u32::try_from(self.dice.below(100_000)).unwrap_or_default()),
            _ => u32::try_from(self.dice.next() >> 32).unwrap_or_default(),
        }
    }

    fn delivery(&mut self) -> Delivery {
        if !self.dice.one_in(3) {
            return Delivery::default();
        }
        Delivery {
            options: self.dice.pick(&OPTIONS).to_vec(),
            cut: self.dice.one_in(4).then(|| 8 * self.dice.below(5)),
            padding: self.dice.one_in(4).then(|| self.dice.pick(&PADDED)),
            is_damaged: self.dice.one_in(10),
        }
    }

    /// Takes in what came back, and acknowledges most answers to a SYN at once.
    fn look(&mut self) -> Result<()> {
        for segment in self.wire.forget()? {
            self.take(segment)?;
        }
        Ok(())
    }

    fn take(&mut self, segment: Segment) -> Result<()> {
        let is_ours =
            segment.destination.ip() == stranger(self.v6) && PORTS.contains(&segment.destination.port());
        if !is_ours {
            return Ok(());
        }
        let length = u32::try_from(segment.payload.len())? + u32::from(segment.flags & (SYN | FIN) != 0);
        let known = Known { sequence: segment.acknowledged, expected: segment.sequence.wrapping_add(length) };
        self.known.insert(segment.destination.port(), known);
        if segment.flags & (SYN | ACK | RST) == SYN | ACK {
            self.answered += 1;
            if self.dice.one_in(4) {
                self.unanswered.push(segment);
            } else {
                self.complete(&segment)?;
            }
        }
        Ok(())
    }

    /// The last segment of a handshake: whoever listens accepts the connection.
    fn complete(&self, answer: &Segment) -> Result<()> {
        self.wire.send(&Segment {
            source: answer.destination,
            destination: answer.source,
            sequence: answer.acknowledged,
            acknowledged: answer.sequence.wrapping_add(1),
            flags: ACK,
            payload: Vec::new(),
        })
    }

    /// A connection by hand to the port that is left alone; what was sent before has been dealt with once that is answered.
    fn settle(&mut self) -> Result<()> {
        self.marker = if self.marker == 60_000 { 30_000 } else { self.marker + 1 };
        let (from, to) = (stranger(self.v6), pod_address(self.v6));
        let (from, to) = (SocketAddr::new(from, self.marker), SocketAddr::new(to, LEFT_ALONE));
        let seen = Peer::new(self.wire, from, to, u32::try_from(self.sent)?).settle("left alone")?;
        seen.into_iter().try_for_each(|segment| self.take(segment))
    }
}

/// How often there was what.
type Kinds = BTreeMap<&'static str, usize>;

/// What is unusual about a segment.
fn kinds(segment: &Segment, delivery: &Delivery) -> impl Iterator<Item = &'static str> {
    let flags = segment.flags;
    let fragments = delivery.cut.is_some_and(|cut| cut > 0);
    let padding = match (delivery.padding.is_some(), segment.source.is_ipv6()) {
        (false, _) => None,
        (true, false) => Some("options of IPv4"),
        (true, true) => Some("extension headers of IPv6"),
    };
    [
        (flags & SYN != 0 && flags & !SYN != 0).then_some("SYN with other flags"),
        (flags & SYN != 0 && !segment.payload.is_empty()).then_some("SYN with data"),
        (flags & RST != 0).then_some("reset by the client"),
        (flags & (SYN | FIN | RST) == FIN).then_some("end by the client"),
        (flags == 0).then_some("no flag"),
        fragments.then_some("two fragments"),
        padding,
        (!delivery.options.is_empty()).then_some("options of TCP"),
        delivery.is_damaged.then_some("wrong checksum"),
    ]
    .into_iter()
    .flatten()
}

/// All of them, and what a proxy does.
const KINDS: [&str; 15] = [
    "SYN with other flags",
    "SYN with data",
    "reset by the client",
    "end by the client",
    "no flag",
    "two fragments",
    "options of IPv4",
    "extension headers of IPv6",
    "options of TCP",
    "wrong checksum",
    "closed by the proxy",
    "reset by the proxy",
    "half closed by the proxy",
    "forgotten by the proxy for a while",
    "while nobody sees the pod's resets",
];

/// What a hunt came to.
#[derive(Default)]
struct Bag {
    sent: usize,
    answered: usize,
    kinds: Kinds,
    through: Vec<String>,
}

/// Hunts in one pod, in both families.
fn hunt(mode: &str, form: &str, segments: usize, prepare: impl Fn(&Namespace) -> Result<()>) -> Result<Bag> {
    let mut bag = Bag::default();
    let seed =
        mode.bytes().chain(form.bytes()).map(u64::from).fold(1, |all, byte| all * 31 % 0xffff_ffff + byte);
    let pod = Pod::new(seed)?;
    apply(&pod.topology.pod, &format!("{USUAL} {mode} {form}"))?;
    prepare(&pod.topology.pod)?;
    for v6 in [false, true] {
        let wire = Wire::open(&pod.topology.client, v6)?;
        let mut hunter = Hunter::new(&wire, v6, seed);
        while hunter.sent < segments / 2 {
            // Half of the time nobody sees the resets that the pod sends: not the client, and not connection tracking.
            let lossy = hunter.dice.one_in(2).then(|| Lossy::new(&pod.topology.pod)).transpose()?;
            let from = hunter.sent;
            hunter.batch()?;
            if lossy.is_some() {
                *hunter.kinds.entry("while nobody sees the pod's resets").or_default() += BATCH;
            }
            drop(lossy);
            let reached = pod.reached();
            if !reached.is_empty() {
                let family = if v6 { "IPv6" } else { "IPv4" };
                bag.through.push(format!(
                    "{mode} {form} {family}: {reached:?} by segments {from} to {}",
                    hunter.sent
                ));
                break;
            }
        }
        bag.sent += hunter.sent;
        bag.answered += hunter.answered;
        add(&mut bag.kinds, &hunter.kinds);
    }
    add(&mut bag.kinds, &pod.proxy.moods());
    Ok(bag)
}

fn add(all: &mut Kinds, more: &Kinds) {
    for (kind, count) in more {
        *all.entry(kind).or_default() += count;
    }
}

#[test]
fn nothing_thrown_from_outside_gets_past_the_proxy() -> Result<()> {
    let segments = sample::number("HUNT", SEGMENTS);
    let places: Vec<(&str, &str)> =
        MODES.iter().flat_map(|mode| FORMS.iter().map(move |form| (*mode, *form))).collect();
    let total = Mutex::new(Bag::default());
    let problems = iptables::in_parallel(2, &places, |_, (mode, form)| {
        let bag = hunt(mode, form, segments / places.len(), |_| Ok(()))
            .with_context(|| format!("{mode} {form}"))?;
        ensure!(
            bag.kinds.contains_key("forgotten by the proxy for a while") && bag.answered > 0,
            "{mode} {form}: the proxy saw nobody, so nothing is shown"
        );
        let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
        total.sent += bag.sent;
        total.answered += bag.answered;
        add(&mut total.kinds, &bag.kinds);
        Ok(bag.through)
    });
    let total = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!(
        "{} segments, {} times a SYN was answered, {} ways past the proxy; {:?}",
        total.sent,
        total.answered,
        problems.len(),
        total.kinds
    );
    assert!(problems.is_empty(), "{} ways past the proxy:\n{}", problems.len(), problems.join("\n"));
    assert!(total.sent >= segments, "only {} segments", total.sent);
    let missing: Vec<_> = KINDS.into_iter().filter(|kind| !total.kinds.contains_key(kind)).collect();
    assert!(
        missing.is_empty() && total.kinds.len() == KINDS.len(),
        "none of {missing:?} in {:?}",
        total.kinds
    );
    Ok(())
}

/// A hunt that finds nothing shows nothing unless it finds what is there: the rule with which TPROXY is often set up, which takes for known
/// whatever connection tracking knows.
#[test]
fn the_hunt_finds_a_way_that_is_there() -> Result<()> {
    let open_a_way = |pod: &Namespace| -> Result<()> {
        let known = "PREROUTING 1 -p tcp --dport 8080 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT";
        pod.sh(&format!("iptables-nft -t mangle -I {known}; ip6tables-nft -t mangle -I {known}"))?.ok()?;
        Ok(())
    };
    let bag = hunt("-m TPROXY", "", 20_000, open_a_way)?;
    ensure!(bag.through.len() == 2, "found in {} of two families", bag.through.len());
    Ok(())
}
