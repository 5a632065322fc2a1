//! Random plans and packets, and where a packet arrives that is really sent.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use crate::traffic::{PROXY_ID, Report, TcpServer, UdpServer, as_user, over_tcp};
use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt,
};
use packet_trace::{Fate, Packet, Sender};
use redirect_core::{
    Family, Redirect, RulePlan,
    options::{BackendChoice, NativeForm, Variant},
    rule::Protocol,
    settings::{Key, NamespaceFacts, RawSettings, Source},
};
use test_support::dice::Dice;
use test_support::netns::{Namespace, client_address, pod_address, remote_address};
use test_support::process;

use super::mesh::{Mesh, any, fix_neighbours, loopback, other_address, passthrough};

/// For packets that no server is expected to answer.
pub const IMPATIENT: Duration = Duration::from_millis(150);
/// A port of a stranger in the pod, who is not the proxy.
pub const STRANGER: u16 = 3128;
/// A port of the application for datagrams.
const DATAGRAMS: u16 = 5353;

/// A way to put rules in force.
pub const FORMS: [(&str, BackendChoice, NativeForm); 5] = [
    ("netlink", BackendChoice::Netlink, NativeForm::Plain),
    ("iptables-nft", BackendChoice::Restore(Some(Variant::Nft)), NativeForm::Plain),
    ("iptables-legacy", BackendChoice::Restore(Some(Variant::Legacy)), NativeForm::Plain),
    ("native nftables", BackendChoice::NativeNft, NativeForm::Plain),
    ("native nftables with sets", BackendChoice::NativeNft, NativeForm::Sets),
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

/// What is said of a plan.
pub type Said = BTreeMap<Key, &'static str>;

/// Settings as text, some of them.
pub fn random_settings(dice: &mut Dice) -> Said {
    let mut said: Said = [(Key::DualStack, "true")].into();
    said.insert(Key::InboundPorts, dice.pick(&INBOUND));
    said.insert(Key::OutboundRanges, dice.pick(&OUTBOUND));
    for (key, one_in, texts) in SETTINGS {
        if dice.one_in(one_in) {
            said.insert(key, dice.pick(texts));
        }
    }
    said
}

/// The same settings but for one to three of them.
pub fn with_changes(said: &Said, dice: &mut Dice) -> Said {
    let mut changed = said.clone();
    for _ in 0..=dice.below(3) {
        match dice.below(SETTINGS.len() + 2) {
            0 => {
                changed.insert(Key::InboundPorts, dice.pick(&INBOUND));
            }
            1 => {
                changed.insert(Key::OutboundRanges, dice.pick(&OUTBOUND));
            }
            other => {
                let (key, _, texts) = SETTINGS[other - 2];
                if changed.remove(&key).is_none() {
                    changed.insert(key, dice.pick(texts));
                }
            }
        }
    }
    changed
}

/// A resolver in the pod.
pub fn resolver(v6: bool) -> IpAddr {
    if v6 { loopback(v6) } else { [127, 0, 0, 53].into() }
}

/// The plan that settings make where `resolv.conf` names a server far away and one in the pod.
pub fn plan(said: &Said) -> Result<RulePlan> {
    let mut raw = RawSettings::new();
    for (key, text) in said {
        raw.set(*key, *text, Source::Default);
    }
    let addresses = [pod_address(false), pod_address(true)];
    let servers = [remote_address(false), remote_address(true), resolver(false), resolver(true)];
    let facts = NamespaceFacts::new(&addresses).with_nameservers(&servers);
    let redirect = Redirect::parse(&raw, &facts).map_err(|errors| anyhow::anyhow!("{errors}: {said:?}"))?;
    Ok(redirect.plan())
}

/// A packet to send; its source port is given to it when it is sent.
pub fn random_packet(dice: &mut Dice) -> Packet {
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
    let mut packet = match dice.below(9) {
        0..=2 => local(pod, at(far, dice.pick(&tcp_ports))).by("eth0"),
        3 | 4 => local(pod, at(far, dice.pick(&[53, 53, 81]))).by("eth0").over_udp(),
        5 => local(pod, at(pod, dice.pick(&[8080, 8081, 15008]))).by("lo"),
        6 => local(lo, at(lo, dice.pick(&[8080, 8081, 15008]))).by("lo"),
        7 => {
            let query = local(lo, at(resolver(v6), 53)).by("lo");
            if dice.one_in(2) { query } else { query.over_udp() }
        }
        _ => local(passthrough(v6), at(if dice.one_in(2) { pod } else { lo }, 8080)).by("lo"),
    };
    packet.mark = dice.pick(&[0, 0, 0, 7, 1338]);
    packet
}

/// The source ports of packets, below those that the kernel chooses. No two packets have the same: the second would go the way of the
/// first, whose connection is still tracked, or be taken for it at a server.
#[derive(Debug, Default)]
pub struct SourcePorts(AtomicU16);

impl SourcePorts {
    const ALL: Range<u16> = 20_000..32_000;

    fn next(&self) -> Result<u16> {
        let port = Self::ALL.start + self.0.fetch_add(1, Ordering::Relaxed);
        ensure!(Self::ALL.contains(&port), "more packets than source ports");
        Ok(port)
    }
}

/// A pod that packets are sent to and from, with a stranger's servers beside the mesh's.
pub struct World {
    /// The pod, its client and the mesh's servers.
    pub mesh: Mesh,
    more: (Vec<TcpServer>, Vec<UdpServer>),
    ports: SourcePorts,
}

impl World {
    /// Not redirected.
    pub fn new() -> Result<Self> {
        let mesh = Mesh::new()?;
        // No datagram is lost to an answer about a neighbour that does not come in time.
        fix_neighbours(&mesh.topology)?;
        let mut more = (Vec::new(), Vec::new());
        for v6 in [false, true] {
            more.0.push(TcpServer::start(mesh.pod(), "stranger", (any(v6), STRANGER))?);
            more.1.push(UdpServer::start(mesh.pod(), "app", (any(v6), DATAGRAMS))?);
            more.0.push(TcpServer::start(mesh.pod(), "app", (resolver(v6), 53))?);
            more.1.push(UdpServer::start(mesh.pod(), "app", (resolver(v6), 53))?);
        }
        Ok(Self { mesh, more, ports: SourcePorts::default() })
    }

    /// The pod's network namespace.
    pub fn pod(&self) -> &Namespace {
        self.mesh.pod()
    }

    /// Opens a connection or sends a datagram; returns the packet as it was sent, with its source port, and what came of it.
    pub fn play(&self, packet: &Packet, patience: Duration) -> Result<(Packet, Arrived)> {
        let (namespace, owner) = match packet.sender {
            Sender::Outside => (&self.mesh.topology.client, (0, 0)),
            Sender::Local { uid, gid } => (self.pod(), (uid, gid)),
        };
        let sent = |packet: &Packet| as_user(owner.0, owner.1, || open(packet, &self.ports, bind_in_time));
        let (fd, sent) = namespace.enter(|| sent(packet))??;
        let seen = if packet.protocol == Protocol::Tcp {
            over_tcp(fd, packet.destination, patience)
                .and_then(|outcome| outcome.report().map(Arrived::of).map_err(io::Error::other))
        } else {
            let socket = UdpSocket::from(fd);
            let said = socket.connect(packet.destination).and_then(|()| socket.send(b"hello\n"));
            said.map(|_| self.arrived(&sent, patience))
        };
        let seen = seen.or_else(|error| {
            if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset) {
                Ok(Arrived::Refused)
            } else if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::PermissionDenied) {
                // A rule that drops what is sent forbids sending it.
                Ok(Arrived::Nothing)
            } else {
                Err(error)
            }
        });
        Ok((sent, seen.with_context(|| packet.to_string())?))
    }

    /// Where a datagram has come to. Its answer may get lost: conntrack zones keep apart what does not belong together, also
    /// where only the query is excluded.
    fn arrived(&self, packet: &Packet, patience: Duration) -> Arrived {
        let from = packet.source.zip(packet.source_port).map(|(ip, port)| SocketAddr::new(ip, port));
        let found = process::until("the datagram", patience, &[], || {
            let more = self.more.1.iter().flat_map(UdpServer::received);
            let mut all = self.mesh.datagrams().into_iter().chain(more);
            Ok(all.find(|report| Some(report.peer) == from))
        });
        found.map_or(Arrived::Nothing, Arrived::of)
    }
}

/// What was seen of a packet.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrived {
    /// This server answered, which was reached at this address.
    At(String, SocketAddr),
    /// Refused: by a reset, or an ICMP error.
    Refused,
    /// No answer came in time.
    Nothing,
}

impl Arrived {
    fn of(report: Report) -> Self {
        Self::At(report.server, report.local)
    }

    /// Whether this is where the packet ends.
    pub fn is(&self, fate: Fate, packet: &Packet) -> bool {
        match (self, fate) {
            (Self::At(server, at), Fate::Proxy { listener, port, rewritten }) => {
                let is_there = if rewritten { at.port() == port } else { *at == packet.destination };
                server.eq_ignore_ascii_case(listener.name()) && is_there
            }
            (Self::At(server, _), Fate::Untouched) => *server == addressed(packet),
            (Self::At(server, _), Fate::Redirected { port: STRANGER }) => server == "stranger",
            (Self::Nothing, Fate::Dropped) | (Self::Refused, Fate::Rejected | Fate::Broken) => true,
            (Self::At(..) | Self::Refused | Self::Nothing, _) => false,
        }
    }
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

/// A socket for a packet, and the packet with the socket's port. Its address is given to it by `bind`.
pub fn open(
    packet: &Packet,
    ports: &SourcePorts,
    bind: impl Fn(&OwnedFd, SocketAddr) -> Result<()>,
) -> Result<(OwnedFd, Packet)> {
    let family = if packet.family() == Family::V4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let kind = if packet.protocol == Protocol::Tcp { SockType::Stream } else { SockType::Datagram };
    let fd = socket(family, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    if packet.mark != 0 {
        setsockopt(&fd, sockopt::Mark, &packet.mark).context("cannot set the mark")?;
    }
    let port = ports.next()?;
    let source = SocketAddr::new(packet.source.context("no source")?, port);
    bind(&fd, source).with_context(|| format!("cannot bind to {source}"))?;
    let mut packet = packet.clone();
    packet.source_port = Some(port);
    Ok((fd, packet))
}

/// The kernel takes a moment until an address that was just added can be used.
fn bind_in_time(fd: &OwnedFd, source: SocketAddr) -> Result<()> {
    process::until("the address of the packet", process::SHORT, &[], || {
        match bind(fd.as_raw_fd(), &SockaddrStorage::from(source)) {
            Err(Errno::EADDRNOTAVAIL) => Ok(None),
            bound => Ok(Some(bound?)),
        }
    })
}
