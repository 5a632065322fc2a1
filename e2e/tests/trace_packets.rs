//! A trace says what the kernel does: random packets through random plans, with rules of others among theirs, are really sent,
//! and arrive where the trace of the live rules, and that of the plan where nobody else has rules, says.
//!
//! TRACE_PLANS says how many plans are tried (`make trace`: 200), TRACE_SEED with which numbers the tests begin. Each plan gets 25
//! packets.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{ErrorKind, Read as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use common::in_parallel;
use common::mesh::{Mesh, any, loopback, other_address, passthrough};
use e2e::dice::Dice;
use e2e::netns::{client_address, pod_address, remote_address};
use e2e::process::{self, Patience};
use e2e::traffic::{ANSWER, PROXY_ID, Report, TcpServer, UdpServer, as_user};
use netns_apply::{ApplyOptions, Live, apply};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrIn, SockaddrIn6, SockaddrStorage, bind, connect,
    getsockname, getsockopt, send, setsockopt, socket, sockopt,
};
use redirect_core::{
    Family, Redirect, RulePlan,
    netlink::NativeForm,
    options::{BackendChoice, Variant},
    rule::{Protocol, TcpFlags},
    settings::{Key, NamespaceFacts, RawSettings, Source},
    trace::{Change, Connection, ConnectionState, Detail, Fate, Packet, Rules, Sender, Step, Trace},
};

const THREADS: usize = 2;
const FEW_PLANS: usize = 20;
const PACKETS: usize = 25;
/// For packets that nobody is expected to answer.
const IMPATIENT: Duration = Duration::from_millis(150);
/// How often a datagram is looked for before it is sent again.
const SEND_AGAIN: usize = 100;
/// A port of a stranger in the pod, who is not the proxy.
const STRANGER: u16 = 3128;
/// A port of the application for datagrams.
const DATAGRAMS: u16 = 5353;

/// A way to put rules in force.
const FORMS: [(&str, BackendChoice, NativeForm); 4] = [
    ("netlink", BackendChoice::Netlink, NativeForm::Plain),
    ("iptables-nft", BackendChoice::Restore(Some(Variant::Nft)), NativeForm::Plain),
    ("iptables-legacy", BackendChoice::Restore(Some(Variant::Legacy)), NativeForm::Plain),
    ("native nftables", BackendChoice::NativeNft, NativeForm::Plain),
];

/// What each setting may be, and one in how many plans says it.
const SETTINGS: [(Key, usize, &[&str]); 17] = [
    (Key::InterceptionMode, 2, &["TPROXY"]),
    (Key::InboundExcludePorts, 2, &["8081", "15008", "8080:8081"]),
    (Key::OutboundExcludePorts, 3, &["81", "4443", "53", "80:81"]),
    (Key::OutboundPorts, 3, &["81", "4443", "80:4443"]),
    (Key::OutboundExcludeRanges, 4, &["198.51.100.2/32,2001:db8::2/128", "198.51.100.0/24", "2001:db8::/32"]),
    (Key::ExcludeInterfaces, 6, &["eth1", "eth0", "et+"]),
    (Key::VirtualInterfaces, 8, &["eth1", "eth0"]),
    (Key::ProxyUid, 4, &["1337,7", "7"]),
    (Key::ProxyGid, 4, &["1337,7", "2000"]),
    (Key::OwnerGroups, 6, &["1000", "1000,7"]),
    (Key::OwnerGroupsExclude, 5, &["2000"]),
    (Key::RedirectDns, 2, &["true"]),
    (Key::CaptureAllDns, 2, &["true"]),
    (Key::DropInvalid, 3, &["true"]),
    (Key::StrictCapture, 3, &["true"]),
    (Key::TproxyMark, 4, &["1400"]),
    (Key::LoopbackRange, 6, &["127.0.0.1/8"]),
];

/// What the two settings may be that are always said.
const INBOUND: [&str; 5] = ["*", "*", "*", "8080", "8080,15008"];
const OUTBOUND: [&str; 7] = [
    "*",
    "*",
    "*",
    "*",
    "198.51.100.0/24,2001:db8::/64",
    "198.51.100.1/32,127.0.0.0/8",
    "2001:db8::1/128,::1/128",
];

/// Rules of others. `$ipt` is iptables or ip6tables of a variant, `$far` and `$other` services far away, `$pod` the pod. They
/// concern packets that open connections, so that the answer comes back.
const FOREIGN: [&str; 17] = [
    "$ipt -t nat -I OUTPUT 1 -p tcp --dport 81 -j RETURN",
    "$ipt -t nat -I OUTPUT 1 -p tcp -d $other -j ACCEPT",
    "$ipt -t nat -I OUTPUT 1 -p tcp --dport 4443 -j REDIRECT --to-ports 3128",
    "$ipt -t nat -I PREROUTING 1 -p tcp --dport 8081 -j REDIRECT --to-ports 3128",
    "$ipt -t nat -I OUTPUT 1 -m owner --uid-owner 7 -j RETURN",
    "$ipt -t nat -I OUTPUT 1 -m mark --mark 0x7/0xf -j ACCEPT",
    "$ipt -t nat -I OUTPUT 1 -p tcp -m multiport --dports 80,4443 -m owner ! --gid-owner 1337 -j RETURN",
    "$ipt -t filter -A OUTPUT -p tcp -d $other --dport 80 -j DROP",
    "$ipt -t filter -A INPUT -p tcp --dport 15006 -j DROP",
    "$ipt -t filter -A INPUT -p tcp --dport 8080 -j REJECT --reject-with tcp-reset",
    "$ipt -t mangle -I PREROUTING 1 -p tcp --dport 8080 -j MARK --set-mark 1337",
    "$ipt -t mangle -A OUTPUT -p tcp --dport 81 -j DROP",
    "$ipt -t filter -A INPUT -i lo -j ACCEPT; $ipt -t filter -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; \
     $icmp $ipt -t filter -P INPUT DROP",
    "$ipt -t filter -N THEIRS; $ipt -t filter -A THEIRS -p tcp --dport 4443 -j DROP; $ipt -t filter -A OUTPUT -d $far -g THEIRS",
    "nft add table inet theirs; nft add chain inet theirs out '{ type nat hook output priority -110; }'; \
     nft add rule inet theirs out tcp dport 80 redirect to :3128",
    "nft add table inet theirs; nft add chain inet theirs out '{ type filter hook output priority -160; }'; \
     nft add rule inet theirs out tcp dport 80-81 meta mark 7 drop",
    "nft add table inet theirs; nft add chain inet theirs in '{ type filter hook prerouting priority -160; }'; \
     nft add rule inet theirs in tcp dport '{ 8080, 9 }' counter drop",
];

/// A pod with a plan and rules of others.
struct Pod {
    mesh: Mesh,
    words: String,
    plan: RulePlan,
    foreign: Vec<String>,
    live: [Rules; 2],
    more: (Vec<TcpServer>, Vec<UdpServer>),
}

impl Pod {
    fn new(dice: &mut Dice) -> Result<Self> {
        let mesh = Mesh::new()?;
        let mut more = (Vec::new(), Vec::new());
        for v6 in [false, true] {
            more.0.push(TcpServer::start(mesh.pod(), "stranger", (any(v6), STRANGER))?);
            more.1.push(UdpServer::start(mesh.pod(), "app", (any(v6), DATAGRAMS))?);
        }
        let (form, backend, native_form) = dice.pick(&FORMS);
        let (plan, mut words) = random_plan(dice)?;
        write!(words, " by {form}")?;
        let options = ApplyOptions { backend, native_form, ..ApplyOptions::default() };
        mesh.pod().enter(|| apply(&plan, &options))?.with_context(|| words.clone())?;
        let foreign = if dice.one_in(2) { random_rules(dice, form) } else { Vec::new() };
        for script in &foreign {
            mesh.pod().sh(script).with_context(|| words.clone())?;
        }
        let live = mesh.pod().enter(|| Live::now(&ApplyOptions::default()))??;
        let live = Family::BOTH.map(|family| live.rules(family, Some(&plan)));
        Ok(Self { mesh, words, plan, foreign, live, more })
    }

    /// Where a datagram has come to. Its answer may get lost: conntrack zones keep apart what does not belong together, also
    /// where only the query was left alone.
    ///
    /// The network may lose one, such as when nobody answers in time who has an address. So it is sent again now and then: from the
    /// same port, so it goes the way of the first.
    fn arrived(&self, fd: &OwnedFd, packet: &Packet, patience: Duration) -> Seen {
        let from = packet.source.zip(packet.source_port).map(|(ip, port)| SocketAddr::new(ip, port));
        let mut looks = 0;
        let found = process::until("the datagram", patience, &[], || {
            looks += 1;
            if looks % SEND_AGAIN == 0 {
                // What an earlier one has met is told now; it does not matter.
                let _ = send(fd.as_raw_fd(), b"hello\n", MsgFlags::empty());
            }
            let more = self.more.1.iter().flat_map(UdpServer::received);
            let mut all = self.mesh.datagrams().into_iter().chain(more);
            Ok(all.find(|report| Some(report.peer) == from))
        });
        found.map_or(Seen::Nothing, |report| Seen::At(report.server))
    }

    /// What the trace says against what the kernel does; nothing where they agree.
    fn judge(&self, packet: &Packet, seen: &Seen, tally: &mut Tally) -> Option<String> {
        let live = &self.live[usize::from(packet.family() == Family::V6)];
        let trace = live.trace(packet);
        tally.count(trace.fate());
        let agrees = trace.may.iter().any(|fate| seen.is(*fate, packet))
            || *seen == Seen::Nothing && packet.sender == Sender::Outside && stays(&trace, live);
        // Where nobody else has rules the plan alone says the same.
        let planned = Rules::of_plan(&self.plan, packet.family()).fate(packet);
        let says_the_same = trace.may.contains(&planned) && seen.is(planned, packet);
        if agrees && (!self.foreign.is_empty() || says_the_same) {
            return None;
        }
        Some(format!(
            "{seen:?} instead of {:?} (by the plan {planned:?})\n{}\n{}\n{}",
            trace.may,
            self.words,
            self.foreign.join("\n"),
            trace.text(Detail::Every)
        ))
    }
}

fn random_plan(dice: &mut Dice) -> Result<(RulePlan, String)> {
    let mut raw = RawSettings::new();
    let mut words = String::new();
    let mut say = |key: Key, text: &'static str| -> Result<()> {
        write!(words, "{key:?}={text} ")?;
        raw.set(key, text, Source::Default);
        Ok(())
    };
    say(Key::DualStack, "true")?;
    say(Key::InboundPorts, dice.pick(&INBOUND))?;
    say(Key::OutboundRanges, dice.pick(&OUTBOUND))?;
    for (key, one_in, texts) in SETTINGS {
        if dice.one_in(one_in) {
            say(key, dice.pick(texts))?;
        }
    }
    let addresses = [pod_address(false), pod_address(true)];
    let servers = [remote_address(false), remote_address(true)];
    let facts = NamespaceFacts::new(&addresses).with_nameservers(&servers);
    let redirect = Redirect::parse(&raw, &facts).map_err(|errors| anyhow::anyhow!("{errors}: {words}"))?;
    Ok((redirect.plan(), words))
}

fn random_rules(dice: &mut Dice, form: &str) -> Vec<String> {
    let ipt = if form == "iptables-legacy" { "legacy" } else { "nft" };
    let mut chosen = BTreeSet::new();
    for _ in 0..=dice.below(3) {
        chosen.insert(dice.below(FOREIGN.len()));
    }
    let of = |index: usize, v6: bool| {
        let icmp = if v6 { "$ipt -t filter -A INPUT -p icmpv6 -j ACCEPT;" } else { "" };
        FOREIGN[index]
            .replace("$icmp", icmp)
            .replace("$ipt", &format!("{}-{ipt} -w", if v6 { "ip6tables" } else { "iptables" }))
            .replace("$far", &remote_address(v6).to_string())
            .replace("$other", &other_address(v6).to_string())
    };
    let both = |index: usize| {
        let each = if FOREIGN[index].starts_with("nft") { 1 } else { 2 };
        [false, true].into_iter().take(each).map(move |v6| of(index, v6))
    };
    // Only one table can have the name.
    let mut nft = chosen.iter().copied().filter(|index| FOREIGN[*index].starts_with("nft"));
    let kept = nft.next();
    chosen
        .iter()
        .copied()
        .filter(|index| !FOREIGN[*index].starts_with("nft") || Some(*index) == kept)
        .flat_map(both)
        .collect()
}

/// A packet to send; its source port is whichever is free.
fn random_packet(dice: &mut Dice) -> Packet {
    let v6 = dice.one_in(2);
    let at = |ip: IpAddr, port: u16| SocketAddr::new(ip, port);
    let (pod, lo) = (pod_address(v6), loopback(v6));
    let tcp_ports = [80, 81, 4443, 53];
    if dice.one_in(4) {
        let packet = |port| Packet::from_outside(at(client_address(v6), 0), at(pod, port)).by("eth0");
        return if dice.one_in(6) {
            packet(DATAGRAMS).over_udp()
        } else {
            packet(dice.pick(&[8080, 8081, 15008]))
        };
    }
    let uid = dice.pick(&[1000, 1000, 1000, 1000, PROXY_ID, 0, 7]);
    let gid = dice.pick(&[1000, 1000, 1000, 1000, PROXY_ID, 7, 2000]);
    let local = |source, to| Packet::from_pod(uid, gid, at(source, 0), to);
    let far = if dice.one_in(2) { remote_address(v6) } else { other_address(v6) };
    let mut packet = match dice.below(8) {
        0..=2 => local(pod, at(far, dice.pick(&tcp_ports))).by("eth0"),
        3 | 4 => local(pod, at(far, dice.pick(&[53, 53, 81]))).by("eth0").over_udp(),
        5 => local(pod, at(pod, dice.pick(&[8080, 8081, 15008]))).by("lo"),
        6 => local(lo, at(lo, dice.pick(&[8080, 8081, 15008]))).by("lo"),
        _ => local(passthrough(v6), at(if dice.one_in(2) { pod } else { lo }, 8080)).by("lo"),
    };
    packet.mark = dice.pick(&[0, 0, 0, 7, 1338]);
    packet
}

/// What was seen of a packet.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    /// This server answered.
    At(String),
    Refused,
    Nothing,
}

impl Seen {
    fn is(&self, fate: Fate, packet: &Packet) -> bool {
        match (self, fate) {
            (Self::At(server), Fate::Proxy { listener, .. }) => server.eq_ignore_ascii_case(listener.name()),
            (Self::At(server), Fate::Untouched) => *server == addressed(packet),
            (Self::At(server), Fate::Redirected(STRANGER)) => server == "stranger",
            (Self::Nothing, Fate::Dropped) | (Self::Refused, Fate::Rejected | Fate::Broken) => true,
            (Self::At(_) | Self::Refused | Self::Nothing, _) => false,
        }
    }
}

/// Whether what the pod answers never leaves it, so that nobody sees where the packet has come to: a rule of others gave the packet
/// TPROXY's mark, and the answer gets the connection's.
fn stays(trace: &Trace, live: &Rules) -> bool {
    let mark =
        trace.steps.iter().rev().find_map(|step| {
            if let Step::Changed(Change::ConnectionMark(mark)) = step { *mark } else { None }
        });
    let Some((mark, source)) = mark.zip(trace.packet.source) else { return false };
    let to = SocketAddr::new(source, trace.packet.source_port.unwrap_or_default());
    let answer = Packet::from_pod(0, 0, trace.packet.destination, to).by("eth0");
    let connection = Connection { state: ConnectionState::Reply, mark, translated_to: None };
    let answer = live.trace(&Packet { connection, flags: TcpFlags::SYN | TcpFlags::ACK, ..answer });
    answer.steps.contains(&Step::Changed(Change::Rerouted(Some("lo".into()))))
}

/// Who serves where a packet is sent.
fn addressed(packet: &Packet) -> &'static str {
    let v6 = packet.family() == Family::V6;
    let is_far = [remote_address(v6), other_address(v6)].contains(&packet.destination.ip());
    match (is_far, packet.protocol) {
        (true, Protocol::Tcp) => "remote",
        (true, _) => "resolver",
        (false, _) => "app",
    }
}

/// Opens a connection or sends a datagram; returns the packet as it was sent, with its source port, and what came of it.
fn play(pod: &Pod, packet: &Packet, patience: Duration) -> Result<(Packet, Seen)> {
    let (namespace, owner) = match packet.sender {
        Sender::Outside => (&pod.mesh.topology.client, (0, 0)),
        Sender::Local { uid, gid } => (pod.mesh.pod(), (uid, gid)),
    };
    let sent = |packet: &Packet| as_user(owner.0, owner.1, || open(packet));
    let (fd, sent) = namespace.enter(|| sent(packet))??;
    let is_tcp = packet.protocol == Protocol::Tcp;
    let seen = match connected(&fd, packet.destination, is_tcp, patience) {
        Ok(()) if is_tcp => answered(fd, patience)?,
        Ok(()) => pod.arrived(&fd, &sent, patience),
        Err(Errno::ECONNREFUSED | Errno::ECONNRESET) => Seen::Refused,
        Err(Errno::ETIMEDOUT | Errno::EPERM) => Seen::Nothing,
        Err(error) => return Err(error).with_context(|| packet.to_string()),
    };
    Ok((sent, seen))
}

/// A socket for a packet, and the packet with the socket's port.
fn open(packet: &Packet) -> Result<(OwnedFd, Packet)> {
    let family = if packet.family() == Family::V4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let kind = if packet.protocol == Protocol::Tcp { SockType::Stream } else { SockType::Datagram };
    let fd = socket(family, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    if packet.mark != 0 {
        setsockopt(&fd, sockopt::Mark, &packet.mark).context("cannot set the mark")?;
    }
    let source = SocketAddr::new(packet.source.context("no source")?, 0);
    // The kernel takes a moment until an address that was just added can be used.
    process::until("the address of the packet", process::SHORT, &[], || {
        match bind(fd.as_raw_fd(), &SockaddrStorage::from(source)) {
            Err(Errno::EADDRNOTAVAIL) => Ok(None),
            bound => Ok(Some(bound.with_context(|| format!("cannot bind to {source}"))?)),
        }
    })?;
    let bound: SockaddrStorage = getsockname(fd.as_raw_fd())?;
    let port = bound
        .as_sockaddr_in()
        .map(SockaddrIn::port)
        .or_else(|| bound.as_sockaddr_in6().map(SockaddrIn6::port));
    Ok((fd, Packet { source_port: port, ..packet.clone() }))
}

fn connected(fd: &OwnedFd, to: SocketAddr, is_tcp: bool, patience: Duration) -> nix::Result<()> {
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS) => {
            if Patience::new(patience).wait_for(fd, PollFlags::POLLOUT).is_err() {
                return Err(Errno::ETIMEDOUT);
            }
            match getsockopt(fd, sockopt::SocketError)? {
                0 => {}
                error => return Err(Errno::from_raw(error)),
            }
        }
        Err(error) => return Err(error),
    }
    if !is_tcp {
        send(fd.as_raw_fd(), b"hello\n", MsgFlags::empty())?;
    }
    Ok(())
}

fn answered(fd: OwnedFd, patience: Duration) -> Result<Seen> {
    if Patience::new(patience).wait_for(&fd, PollFlags::POLLIN).is_err() {
        return Ok(Seen::Nothing);
    }
    let mut buffer = vec![0; 2048];
    let mut stream = TcpStream::from(fd);
    stream.set_nonblocking(false)?;
    let mut line = Vec::new();
    while !line.contains(&b'\n') {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => line.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(Seen::Refused),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Seen::At(server_of(&line)?))
}

fn server_of(answer: &[u8]) -> Result<String> {
    let report: Report =
        serde_json::from_slice(answer).with_context(|| format!("{answer:?} is no report"))?;
    Ok(report.server)
}

/// How many packets had which fate.
#[derive(Default)]
struct Tally(BTreeMap<String, usize>);

impl Tally {
    fn count(&mut self, fate: Fate) {
        *self.0.entry(fate.to_string()).or_default() += 1;
    }
}

fn try_plan(seed: u64) -> Result<(Vec<String>, Tally)> {
    let mut dice = Dice::new(seed.wrapping_mul(0x5851_f42d_4c95_7f2d));
    let pod = Pod::new(&mut dice)?;
    let (mut problems, mut tally) = (Vec::new(), Tally::default());
    for _ in 0..PACKETS {
        let packet = random_packet(&mut dice);
        let live = &pod.live[usize::from(packet.family() == Family::V6)];
        // Who expects no answer need not wait long for it.
        let trace = live.trace(&packet);
        let may_be_lost =
            trace.may.contains(&Fate::Dropped) || packet.sender == Sender::Outside && stays(&trace, live);
        let patience = if may_be_lost { IMPATIENT } else { ANSWER };
        let (packet, seen) = play(&pod, &packet, patience)?;
        problems
            .extend(pod.judge(&packet, &seen, &mut tally).map(|problem| format!("seed {seed}: {problem}")));
    }
    Ok((problems, tally))
}

#[test]
fn the_kernel_does_with_every_packet_what_its_trace_says() -> Result<()> {
    let number = |name: &str, usual: usize| -> Result<usize> {
        std::env::var(name)
            .map_or(Ok(usual), |text| text.parse().with_context(|| format!("{name} is a number")))
    };
    let (first, plans) = (number("TRACE_SEED", 1)?, number("TRACE_PLANS", FEW_PLANS)?);
    let seeds: Vec<u64> = (first..first + plans).map(|seed| seed as u64).collect();
    let all = std::sync::Mutex::new(Tally::default());
    let problems = in_parallel(THREADS, &seeds, |_, seed| {
        let (problems, tally) = try_plan(*seed).with_context(|| format!("seed {seed}"))?;
        let mut all = all.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (fate, count) in tally.0 {
            *all.0.entry(fate).or_default() += count;
        }
        Ok(problems)
    });
    let tally = all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).0;
    let packets: usize = tally.values().sum();
    println!("{packets} packets over {plans} plans: {tally:#?}");
    ensure!(problems.is_empty(), "{} disagree\n{}", problems.len(), problems.join("\n\n"));
    ensure!(packets == plans * PACKETS, "only {packets} packets were sent");
    let fates = [Fate::Untouched, Fate::Dropped].map(|fate| fate.to_string());
    ensure!(
        fates.iter().all(|fate| tally.contains_key(fate)) && tally.len() >= 6,
        "hardly a variety: {tally:?}"
    );
    Ok(())
}
