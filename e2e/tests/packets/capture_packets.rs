//! Nothing passes by: segments made by hand, from outside and by processes of the pod, against what earlier connections
//! have left in connection tracking. docs/concepts/capture.md says what is closed, and what stays open.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use e2e::iptables::{
    self,
    crafted::{FORMS, Lossy, stranger},
};
use e2e::iptables::{apply, mesh::any};
use e2e::segments::{ACK, FIN, Peer, RST, SYN, Segment, Wire};
use e2e::traffic::{ANSWER, Client, GREETING, PROXY_ID, TcpServer, as_user};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, bind, connect, send, setsockopt, socket,
    sockopt,
};
use test_support::netns::{Families, Namespace, Topology, client_address, pod_address, remote_address};
use test_support::process;

const BOTH: [bool; 2] = [false, true];

/// Everything captured, but a port each way.
const USUAL: &str = "--dual-stack -b * -d 8081 -i * -o 81";

/// The application.
const APP: u32 = 1000;

/// A pod whose application listens on 8080, and on 8081, which is left alone.
struct Pod {
    topology: Topology,
    app: Vec<TcpServer>,
    proxy: Vec<TcpServer>,
    _others: Vec<TcpServer>,
}

impl Pod {
    fn new() -> Result<Self> {
        let topology = Topology::new(Families::Dual)?;
        let (mut app, mut proxy, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for v6 in BOTH {
            app.push(TcpServer::start(&topology.pod, "app", (any(v6), 8080))?);
            others.push(TcpServer::start(&topology.pod, "app", (any(v6), 8081))?);
            others.push(TcpServer::start(&topology.pod, "outbound", (any(v6), 15001))?);
            others.push(TcpServer::start(&topology.client, "remote", (any(v6), 81))?);
            proxy.push(TcpServer::start_obedient(&topology.pod, (any(v6), 15006))?);
        }
        Ok(Self { topology, app, proxy, _others: others })
    }

    fn namespace(&self) -> &Namespace {
        &self.topology.pod
    }

    fn wire(&self, v6: bool) -> Result<Wire> {
        Wire::open(&self.topology.client, v6)
    }

    /// Whom the application has accepted on the captured port.
    fn accepted(&self) -> Vec<SocketAddr> {
        self.app.iter().flat_map(TcpServer::accepted).map(|report| report.peer).collect()
    }
}

/// What an inbound connection has left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Nothing,
    Answered,
    AnsweredAndReset,
    Established,
    ClientFinished,
    ClientReset,
    ProxyReset,
    ProxyFinished,
    LastAck,
    BothFinished,
    /// The proxy is gone, and nobody has seen its reset.
    ProxyLost,
    /// Likewise, after the client has finished.
    ProxyLostHalfClosed,
}

impl Before {
    const ALL: [Self; 12] = [
        Self::Nothing,
        Self::Answered,
        Self::AnsweredAndReset,
        Self::Established,
        Self::ClientFinished,
        Self::ClientReset,
        Self::ProxyReset,
        Self::ProxyFinished,
        Self::LastAck,
        Self::BothFinished,
        Self::ProxyLost,
        Self::ProxyLostHalfClosed,
    ];

    fn is_lost(self) -> bool {
        matches!(self, Self::ProxyLost | Self::ProxyLostHalfClosed)
    }

    fn play(self, peer: &mut Peer<'_>) -> Result<()> {
        match self {
            Self::Nothing => return Ok(()),
            Self::Answered => return peer.open(),
            Self::AnsweredAndReset => {
                peer.open()?;
                return peer.send(RST);
            }
            Self::Established
            | Self::ClientFinished
            | Self::ClientReset
            | Self::ProxyReset
            | Self::ProxyFinished
            | Self::LastAck
            | Self::BothFinished
            | Self::ProxyLost
            | Self::ProxyLostHalfClosed => {}
        }
        peer.open()?;
        let greeting = peer.greeted()?;
        ensure!(greeting == GREETING, "{self:?} begins with {greeting}");
        match self {
            Self::Nothing | Self::Answered | Self::AnsweredAndReset | Self::Established => Ok(()),
            Self::ClientFinished => {
                peer.say_and_finish(b"")?;
                peer.acknowledged()
            }
            Self::ClientReset => peer.send(RST | ACK),
            Self::ProxyReset => {
                peer.say(b"r")?;
                peer.wait_for_flags(RST)
            }
            Self::ProxyLost => peer.say(b"r"),
            Self::ProxyLostHalfClosed => peer.say_and_finish(b"r"),
            Self::ProxyFinished => {
                peer.say(b"c")?;
                peer.wait_for_flags(FIN)
            }
            Self::LastAck | Self::BothFinished => {
                peer.say(b"f")?;
                peer.say_and_finish(b"")?;
                peer.wait_for_flags(FIN)?;
                if self == Self::BothFinished { peer.send(ACK) } else { Ok(()) }
            }
        }
    }
}

/// All sets of the six old flags, and a SYN with the younger ones.
fn flag_sets() -> impl Iterator<Item = u8> {
    (0..64).chain([0x42, 0x82, 0xc2, 0x52, 0x92, 0xd2, 0x46, 0x43])
}

/// Those of them that open a connection.
const OPENING: [u8; 7] = [0x02, 0x0a, 0x22, 0x2a, 0x42, 0x82, 0xc2];

/// Sends every flag set on top of what a connection has left; returns those that the application answered, and how many
/// were answered at all. Every connection has a port of its own from `ports` on.
fn probes(pod: &Pod, wire: &Wire, v6: bool, before: Before, ports: u16) -> Result<(Vec<String>, usize)> {
    let probes = left_behind(pod, wire, v6, before, (ports..).zip(flag_sets()))?;
    wire.forget()?;
    answers(wire, v6, before, probes, ports.checked_add(100).context("out of ports")?)
}

/// Plays a connection from every port; returns what is to be sent on top of each.
fn left_behind<'w>(
    pod: &Pod,
    wire: &'w Wire,
    v6: bool,
    before: Before,
    probed: impl Iterator<Item = (u16, u8)>,
) -> Result<Vec<(u8, Peer<'w>)>> {
    let _lossy = before.is_lost().then(|| Lossy::new(pod.namespace())).transpose()?;
    let to = SocketAddr::new(pod_address(v6), 8080);
    let (mut probes, mut ports) = (Vec::new(), Vec::new());
    for (port, flags) in probed {
        ports.push(port);
        let mut earlier = Peer::new(wire, SocketAddr::new(stranger(v6), port), to, 1_000_000);
        before.play(&mut earlier).with_context(|| format!("{before:?}"))?;
        let mut probe = Peer::new(wire, earlier.source, to, 2_000_000_000);
        probe.expected = earlier.expected;
        probes.push((flags, probe));
    }
    if let (true, [first, .., last]) = (before.is_lost(), ports.as_slice()) {
        let family = if v6 { 6 } else { 4 };
        let its_sockets = format!("ss -Hta{family}n dport ge :{first} and dport le :{last}");
        process::until("the proxy to be gone", ANSWER, &[], || {
            Ok(pod.namespace().sh(&its_sockets)?.stdout.trim().is_empty().then_some(()))
        })?;
    }
    Ok(probes)
}

/// Sends the probes, and a marker after them from a port of its own; says which the application answered, and how many were answered at all.
fn answers(
    wire: &Wire,
    v6: bool,
    before: Before,
    probes: Vec<(u8, Peer<'_>)>,
    marker: u16,
) -> Result<(Vec<String>, usize)> {
    for (flags, probe) in &probes {
        probe.send(*flags)?;
    }
    let seen = seen_until_settled(wire, v6, marker)?;
    let (mut passed, mut answered) = (Vec::new(), 0);
    for (flags, mut probe) in probes {
        if let Some(answer) = seen.iter().find(|segment| probe.is_answer(segment)) {
            answered += 1;
            probe.take_answer(answer)?;
            let greeting = probe.greeted()?;
            if greeting != GREETING {
                passed.push(format!("{before:?}, flags {flags:#04x}: {greeting}"));
            }
            probe.send(RST)?;
        }
    }
    Ok((passed, answered))
}

/// What comes back until everything sent so far has been dealt with: a connection to the port left alone, from a port of its own.
fn seen_until_settled(wire: &Wire, v6: bool, port: u16) -> Result<Vec<Segment>> {
    let (from, to) = (SocketAddr::new(stranger(v6), port), SocketAddr::new(pod_address(v6), 8081));
    Peer::new(wire, from, to, 1).settle("\"app\"")
}

/// Every state and flag set, from outside; honest clients; and a proxy that does not listen.
fn from_outside(mode: &str) -> Result<()> {
    let problems = iptables::in_parallel(2, &FORMS, |_, form| {
        let pod = Pod::new()?;
        apply(pod.namespace(), &format!("{USUAL} {mode} {form}"))?;
        let mut problems = Vec::new();
        for v6 in BOTH {
            let wire = pod.wire(v6)?;
            for (before, ports) in Before::ALL.into_iter().zip((10_000..).step_by(200)) {
                let (passed, answered) = probes(&pod, &wire, v6, before, ports)?;
                problems.extend(passed.into_iter().map(|probe| format!("{mode} {form}: {probe}")));
                if before == Before::Nothing && answered == 0 {
                    problems.push(format!("{mode} {form}: not even a SYN is answered"));
                }
            }
            if let Err(error) = honest_clients(&pod, v6) {
                problems.push(format!("{mode} {form}: honest clients: {error:#}"));
            }
        }
        problems.extend(pod.accepted().iter().map(|peer| format!("{mode} {form}: accepted {peer}")));
        let unheld = without_a_proxy(pod)?;
        problems.extend(unheld.into_iter().map(|problem| format!("{mode} {form}: {problem}")));
        Ok(problems)
    });
    assert!(problems.is_empty(), "{} pass by:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

#[test]
fn no_segment_from_outside_reaches_the_application_redirect() -> Result<()> {
    from_outside("")
}

#[test]
fn no_segment_from_outside_reaches_the_application_tproxy() -> Result<()> {
    from_outside("-m TPROXY")
}

#[test]
fn no_segment_from_outside_reaches_the_application_strictly() -> Result<()> {
    from_outside("-m TPROXY --strict-capture")?;
    from_outside("--strict-capture")
}

/// TPROXY leaves connections that nat has not translated. What opens one in their place, after REDIRECT has taken over, is not taken for them.
#[test]
fn nothing_that_tproxy_left_is_exempt_once_redirect_has_taken_over() -> Result<()> {
    let problems = iptables::in_parallel(2, &FORMS, |index, before_form| {
        // Another form each time: the rules move from one set of tables to another.
        let form = FORMS[(index + usize::from(index % 2 == 1)) % FORMS.len()];
        let exchange = format!("from TPROXY {before_form} to REDIRECT {form}");
        let pod = Pod::new()?;
        let mut problems = Vec::new();
        for v6 in BOTH {
            apply(pod.namespace(), &format!("{USUAL} -m TPROXY --reconcile {before_form}"))?;
            let wire = pod.wire(v6)?;
            let mut left = Vec::new();
            for (before, ports) in Before::ALL.into_iter().zip((10_000..).step_by(200)) {
                let probed = (ports..).zip(OPENING);
                left.push((before, ports + 100, left_behind(&pod, &wire, v6, before, probed)?));
            }
            apply(pod.namespace(), &format!("{USUAL} --reconcile {form}"))?;
            wire.forget()?;
            for (before, marker, probes) in left {
                let (passed, _) = answers(&wire, v6, before, probes, marker)?;
                problems.extend(passed.into_iter().map(|probe| format!("{exchange}: {probe}")));
            }
        }
        problems.extend(pod.accepted().iter().map(|peer| format!("{exchange}: accepted {peer}")));
        Ok(problems)
    });
    assert!(problems.is_empty(), "{} pass by:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// While nothing listens on the inbound port.
fn without_a_proxy(mut pod: Pod) -> Result<Vec<String>> {
    pod.proxy.clear();
    let mut problems = Vec::new();
    for v6 in BOTH {
        let wire = pod.wire(v6)?;
        let to = SocketAddr::new(pod_address(v6), 8080);
        let probes: Vec<(u8, Peer<'_>)> = (30_000..)
            .zip(flag_sets())
            .map(|(port, flags)| (flags, Peer::new(&wire, SocketAddr::new(stranger(v6), port), to, 1)))
            .collect();
        for (flags, probe) in &probes {
            probe.send(*flags)?;
        }
        let seen = seen_until_settled(&wire, v6, 29_999)?;
        let answered = probes.iter().filter(|(_, probe)| seen.iter().any(|segment| probe.is_answer(segment)));
        problems
            .extend(answered.map(|(flags, _)| format!("flags {flags:#04x} are answered without a proxy")));
    }
    Ok(problems)
}

/// Long streams, half-closed connections, and the same address and port again after a reset.
fn honest_clients(pod: &Pod, v6: bool) -> Result<()> {
    const LONG: usize = 4 << 20;
    const AGAIN: usize = 20;
    let to = SocketAddr::new(pod_address(v6), 8080);
    pod.topology.client.enter(|| -> Result<()> {
        let mut stream = greeted(SocketAddr::new(client_address(v6), 0), to)?;
        let mut sending = stream.try_clone()?;
        let sender = thread::spawn(move || -> std::io::Result<()> {
            sending.write_all(&vec![b'e'; LONG])?;
            sending.shutdown(Shutdown::Write)
        });
        let mut received = vec![0; LONG];
        stream.read_exact(&mut received).context("the stream breaks off")?;
        ensure!(received.iter().all(|byte| *byte == b'e'), "the stream is damaged");
        sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
        for round in 0..AGAIN {
            let mut stream = greeted(SocketAddr::new(client_address(v6), 20_000), to)
                .with_context(|| format!("round {round} after a reset"))?;
            stream.write_all(b"r")?;
            let end = stream.read(&mut [0]).map_err(|error| error.kind());
            ensure!(end == Err(std::io::ErrorKind::ConnectionReset), "not reset: {end:?}");
        }
        Ok(())
    })?
}

/// A connection that the proxy has greeted.
fn greeted(from: SocketAddr, to: SocketAddr) -> Result<TcpStream> {
    let fd = connected(from, to, |fd| connect(fd.as_raw_fd(), &SockaddrStorage::from(to)))?;
    let mut stream = TcpStream::from(fd.with_context(|| format!("no way from {from} to {to}"))?);
    stream.set_read_timeout(Some(ANSWER))?;
    let mut greeting = vec![0; GREETING.len()];
    stream.read_exact(&mut greeting)?;
    ensure!(greeting == GREETING.as_bytes(), "greeted with {}", String::from_utf8_lossy(&greeting));
    Ok(stream)
}

/// A socket that `connect` has connected; `None` where the kernel knows no way. A program that another test starts this
/// moment may hold the socket that had the address before, for as long as it takes to be loaded.
fn connected(
    from: SocketAddr,
    to: SocketAddr,
    connect: impl Fn(&OwnedFd) -> nix::Result<()>,
) -> Result<Option<OwnedFd>> {
    process::until(&format!("the port of the connection before {from}"), ANSWER, &[], || {
        let fd = bound(from)?;
        match connect(&fd) {
            Ok(()) | Err(Errno::EINPROGRESS) => Ok(Some(Some(fd))),
            Err(Errno::ENETUNREACH) => Ok(Some(None)),
            Err(Errno::EADDRNOTAVAIL) => Ok(None),
            Err(error) => bail!("{from} calls {to}: {error}"),
        }
    })
}

fn bound(from: SocketAddr) -> Result<OwnedFd> {
    let family = if from.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(from)).with_context(|| format!("cannot bind {from}"))?;
    Ok(fd)
}

/// A call of a user of the pod that nobody waits for: the SYN is sent when this returns. `None` where the kernel knows
/// no way.
fn call(
    pod: &Namespace,
    user: u32,
    from: SocketAddr,
    to: SocketAddr,
    interface: Option<&str>,
) -> Result<Option<OwnedFd>> {
    pod.enter(|| {
        as_user(user, user, || {
            connected(from, to, |fd| {
                if let Some(interface) = interface {
                    setsockopt(fd, sockopt::BindToDevice, &interface.into())?;
                }
                fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
                connect(fd.as_raw_fd(), &SockaddrStorage::from(to))
            })
        })
    })?
}

/// What leaves an entry that nat has not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exempt {
    /// The application's own call, over `lo`.
    OverLoopback,
    /// The proxy's, which is not answered.
    Unanswered,
    /// The proxy's, which is reset.
    Reset,
    /// The proxy's, whose entry has expired, so that the kernel makes a new one in its middle.
    PickedUp,
}

/// How long the kernel keeps an entry of an idle connection, in seconds.
fn established_for(pod: &Namespace, seconds: u32) -> Result<()> {
    pod.sh(&format!("echo {seconds} >/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"))?.ok()?;
    Ok(())
}

/// Keeps resets that the pod sends from connection tracking.
const HIDE_RESETS: &str = "nft 'table inet hide {
    chain out { type filter hook output priority -310; tcp flags & rst == rst drop; }
}'";

impl Exempt {
    const ALL: [Self; 4] = [Self::OverLoopback, Self::Unanswered, Self::Reset, Self::PickedUp];

    /// Leaves it; whether there is one.
    fn leave(self, pod: &Pod, wire: &Wire, from: SocketAddr, to: SocketAddr) -> Result<bool> {
        let (user, interface) = match self {
            Self::OverLoopback => (APP, Some("lo")),
            Self::Unanswered | Self::Reset | Self::PickedUp => (PROXY_ID, None),
        };
        if self == Self::PickedUp {
            // The timeout of an entry is that of its last packet.
            established_for(pod.namespace(), 1)?;
        }
        let socket = call(pod.namespace(), user, from, to, interface)?;
        let is_there = socket.is_some();
        if matches!(self, Self::Reset | Self::PickedUp) {
            let is_syn = |segment: &Segment| (segment.source, segment.destination) == (from, to);
            let syn =
                wire.wait_for("call of the proxy", |segment| is_syn(segment).then(|| segment.clone()))?;
            let mut peer = Peer::new(wire, to, from, 5_000);
            peer.expected = syn.sequence.wrapping_add(1);
            peer.send(SYN | ACK)?;
            peer.sequence += 1;
            peer.acknowledged()?;
            match socket {
                Some(socket) if self == Self::PickedUp => forgotten_and_picked_up(pod, socket, from)?,
                _ => peer.send(RST)?,
            }
            seen_until_settled(wire, to.is_ipv6(), from.port())?;
        }
        Ok(is_there)
    }
}

/// Lets the entry of an idle connection expire, sends on the connection, and closes it unseen by connection tracking.
fn forgotten_and_picked_up(pod: &Pod, socket: OwnedFd, from: SocketAddr) -> Result<()> {
    let pod = pod.namespace();
    let family = if from.is_ipv6() { "ipv6" } else { "ipv4" };
    let entry = format!(" sport={} ", from.port());
    process::until("the entry to expire", Duration::from_secs(120), &[], || {
        let entries = pod.sh("cat /proc/net/nf_conntrack")?.stdout;
        let is_there = |line: &str| line.starts_with(family) && line.contains(&entry);
        Ok((!entries.lines().any(is_there)).then_some(()))
    })?;
    established_for(pod, 432_000)?;
    send(socket.as_raw_fd(), b"still here", MsgFlags::empty())?;
    pod.sh(HIDE_RESETS)?.ok()?;
    setsockopt(&socket, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 })?;
    drop(socket);
    pod.sh("nft delete table inet hide")?.ok()?;
    Ok(())
}

/// The ways in which the application gets out beside the proxy, on what others have left.
fn ways_out(pod: &Pod, v6: bool, ports: u16) -> Result<Vec<Exempt>> {
    let wire = pod.wire(v6)?;
    let mut ways = Vec::new();
    for (port, exempt) in (ports..).zip(Exempt::ALL) {
        let from = SocketAddr::new(pod_address(v6), port);
        let to = SocketAddr::new(stranger(v6), 80);
        if !exempt.leave(pod, &wire, from, to)? {
            continue;
        }
        wire.forget()?;
        let socket = call(pod.namespace(), APP, from, to, None)?;
        // Whatever it sends is on the wire before a whole connection that is left alone.
        let marker = Client::new(pod.namespace()).user(APP, APP).tcp((remote_address(v6), 81))?;
        ensure!(marker.server() == Some("remote"), "{marker:?}");
        let seen = wire.forget()?;
        if seen.iter().any(|segment| (segment.source, segment.destination) == (from, to)) {
            ways.push(exempt);
        }
        drop(socket);
    }
    Ok(ways)
}

/// Who answers a peer that the proxy has called, and that calls back to the port the proxy called from, where the
/// application listens.
fn called_back(pod: &Pod, v6: bool, port: u16) -> Result<Option<String>> {
    let wire = pod.wire(v6)?;
    let own = SocketAddr::new(pod_address(v6), port);
    let peer = SocketAddr::new(stranger(v6), 80);
    Exempt::Reset.leave(pod, &wire, own, peer)?;
    let _app = TcpServer::start(pod.namespace(), "app", own)?;
    wire.forget()?;
    let mut back = Peer::new(&wire, peer, own, 3_000_000_000);
    back.send(SYN)?;
    let seen = seen_until_settled(&wire, v6, port + 1)?;
    let Some(answer) = seen.iter().find(|segment| back.is_answer(segment)) else { return Ok(None) };
    back.take_answer(answer)?;
    back.greeted().map(Some)
}

#[test]
fn strict_capture_closes_what_exempt_connections_leave_open() -> Result<()> {
    for mode in ["", "-m TPROXY"] {
        let problems = iptables::in_parallel(2, &FORMS, |_, form| {
            let pod = Pod::new()?;
            let mut problems = Vec::new();
            // Other ports each time: entries outlive the rules. The kernel gives out none of them itself.
            for (strict, is_open, ports) in [("", true, 21_000), ("--strict-capture", false, 22_000)] {
                apply(pod.namespace(), "--cleanup-only")?;
                apply(pod.namespace(), &format!("{USUAL} {mode} {form} {strict}"))?;
                for v6 in BOTH {
                    let what = format!("{mode} {form} {strict} {}", if v6 { "IPv6" } else { "IPv4" });
                    let ways = ways_out(&pod, v6, ports).with_context(|| what.clone())?;
                    // The kernel knows no way from lo to an outside IPv6 address.
                    let known: &[Exempt] = if v6 { &Exempt::ALL[1..] } else { &Exempt::ALL };
                    if ways != if is_open { known } else { &[] } {
                        problems.push(format!("{what}: the application gets out by {ways:?}"));
                    }
                    let back = called_back(&pod, v6, ports + 100).with_context(|| what.clone())?;
                    let by_app = back.as_ref().is_some_and(|greeting| greeting.contains("\"app\""));
                    if by_app != (is_open && mode.is_empty()) {
                        problems.push(format!("{what}: a peer that calls back is answered by {back:?}"));
                    }
                }
            }
            Ok(problems)
        });
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }
    Ok(())
}

/// A connection to the application that was open when the rules came, with connection tracking at work already: in
/// REDIRECT mode it goes on as it began. TPROXY has no socket of the proxy for it, and drops it.
#[test]
fn what_was_open_before_never_moves_to_the_proxy() -> Result<()> {
    for (mode, goes_on) in [
        ("", true),
        ("--native-nftables --strict-capture", true),
        ("-m TPROXY", false),
        ("-m TPROXY --native-nftables", false),
    ] {
        let pod = Pod::new()?;
        apply(pod.namespace(), "--dual-stack -b 8081")?;
        let mut streams = Vec::new();
        for v6 in BOTH {
            let to = SocketAddr::new(pod_address(v6), 8080);
            let mut stream = pod.topology.client.enter(|| TcpStream::connect(to))??;
            stream.set_read_timeout(Some(ANSWER))?;
            says(&mut stream, "before")?;
            streams.push(stream);
        }
        apply(pod.namespace(), &format!("{USUAL} {mode}"))?;
        for (mut stream, v6) in streams.into_iter().zip(BOTH) {
            if goes_on {
                says(&mut stream, "after").with_context(|| mode.to_owned())?;
                continue;
            }
            stream.write_all(b"after")?;
            seen_until_settled(&pod.wire(v6)?, v6, 50_000)?;
            stream.set_nonblocking(true)?;
            let found = stream.read(&mut [0; 512]).map_err(|error| error.kind());
            assert_eq!(found, Err(std::io::ErrorKind::WouldBlock), "{mode}: it passes");
        }
    }
    Ok(())
}

/// Says something to a server that repeats it.
fn says(stream: &mut TcpStream, word: &str) -> Result<()> {
    stream.write_all(word.as_bytes())?;
    let mut answer = Vec::new();
    while !answer.ends_with(word.as_bytes()) {
        let mut buffer = [0; 512];
        let length = stream.read(&mut buffer)?;
        ensure!(length > 0, "the connection ends with {}", String::from_utf8_lossy(&answer));
        answer.extend(&buffer[..length]);
    }
    Ok(())
}
