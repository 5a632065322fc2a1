//! Where first packets arrive, whatever becomes of their answers.
//!
//! A connection's first segment carries data (TCP Fast Open without cookies), so a listener reports it before any answer of its own has
//! been sent. Neighbours are fixed, so rules that drop neighbour discovery or ARP lose no packet.

use std::cell::Cell;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::traffic::{PROXY_ID, as_user, listener};
use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, bind, connect, getpeername, getsockopt,
    sendto, setsockopt, socket, sockopt,
};
use packet_trace::{Fate, Packet, Sender, Trace, TraceEvent};
use redirect_core::{Family, rule::Protocol};
use test_support::netns::{Families, Namespace, Topology, client_address, pod_address, remote_address};
use test_support::process::Patience;

use super::mesh::{APP, any, fix_neighbours, loopback, other_address};
use super::packets::{Arrived, STRANGER, SourcePorts, open};

/// For packets that no test expects to arrive, counted from when all others have.
pub const QUIET: Duration = Duration::from_millis(100);
/// The client opens connections with data, listeners accept them with that, neither asks for a cookie.
const FAST_OPEN: u32 = 0x1 | 0x2 | 0x4 | 0x200 | 0x400;
/// Ports of the services far away. The pod listens on these as well: a packet that rules keep in the pod arrives there.
pub const FAR: [u16; 5] = [80, 81, 443, 4443, 53];
/// Ports for datagrams.
const DATAGRAMS: [u16; 3] = [53, 81, 5353];

/// A third service far away, in another network than the others.
pub fn elsewhere(v6: bool) -> IpAddr {
    if v6 { [0x2001, 0xdb8, 9, 0, 0, 0, 0, 9].into() } else { [203, 0, 113, 9].into() }
}

/// An address that is at the pod, for the client.
pub const ROUTED: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

/// The link-local address of the pod, or of the client.
pub fn link_local(of_pod: bool) -> IpAddr {
    [0xfe80, 0, 0, 0, 0, 0, 0, if of_pod { 2 } else { 1 }].into()
}

/// What a listener has received first.
#[derive(Clone, Debug)]
struct Arrival {
    server: &'static str,
    local: SocketAddr,
    source_port: u16,
}

type Arrivals = Arc<(Mutex<Vec<Arrival>>, Condvar)>;

/// A pod and a client with listeners everywhere, in whose namespaces every arrival is noted.
#[derive(Debug)]
pub struct Ground {
    /// The pod and the client.
    pub topology: Topology,
    arrivals: Arrivals,
    _ears: [Ear; 2],
    ports: SourcePorts,
}

/// A packet that was sent.
#[derive(Debug)]
pub struct SentPacket {
    /// With its source port, which is its data as well: rules may translate the one on the way.
    pub packet: Packet,
    fd: OwnedFd,
    refused: Cell<Option<Errno>>,
}

impl Ground {
    /// Not redirected.
    pub fn new() -> Result<Self> {
        let topology = Topology::new(Families::Dual)?;
        let (pod, client) = (&topology.pod, &topology.client);
        for v6 in [false, true] {
            for address in [other_address(v6), elsewhere(v6)] {
                client.add_address("lo", &format!("{address}/{}", if v6 { 128 } else { 32 }))?;
            }
        }
        fix_neighbours(&topology)?;
        client.ip_batch(&format!("route add {ROUTED} via {} dev eth0\n", pod_address(false)))?;
        for namespace in [pod, client] {
            let set = || fs::write("/proc/sys/net/ipv4/tcp_fastopen", FAST_OPEN.to_string());
            namespace.enter(set)?.context("cannot switch on TCP Fast Open")?;
        }
        pod.settled()?;
        client.settled()?;
        let arrivals = Arrivals::default();
        let ears = [Ear::new(pod, &of_pod(), &arrivals)?, Ear::new(client, &of_client(), &arrivals)?];
        Ok(Self { topology, arrivals, _ears: ears, ports: SourcePorts::default() })
    }

    /// The pod's network namespace.
    pub fn pod(&self) -> &Namespace {
        &self.topology.pod
    }

    /// Sends packets, one right after the other, each from a port of its own.
    pub fn send(&self, packets: &[Packet]) -> Result<Vec<SentPacket>> {
        packets.iter().map(|packet| self.send_one(packet)).collect()
    }

    fn send_one(&self, packet: &Packet) -> Result<SentPacket> {
        let (namespace, (uid, gid)) = match packet.sender {
            Sender::Outside => (&self.topology.client, (0, 0)),
            Sender::Local { uid, gid } => (self.pod(), (uid, gid)),
        };
        let act = || -> Result<SentPacket> {
            let (fd, packet) = open(packet, &self.ports, bind_freely)?;
            let refused = Cell::new(push_off(&fd, &packet).err());
            Ok(SentPacket { packet, fd, refused })
        };
        let shot = namespace.enter(|| as_user(uid, gid, act))?;
        shot.with_context(|| packet.to_string())
    }

    /// Where they have arrived. Those that are `expected` to arrive are waited for with patience, the others not for long.
    pub fn outcome(
        &self,
        shots: &[SentPacket],
        expected: impl Fn(&SentPacket) -> bool,
        patience: Duration,
    ) -> Vec<Arrived> {
        let mut patience = Patience::new(patience);
        let is_open = |shot: &SentPacket| self.seen(shot) == Arrived::Nothing && shot.refused.get().is_none();
        while shots.iter().any(|shot| expected(shot) && is_open(shot)) && !patience.is_over() {
            self.wait();
        }
        let mut quiet = Patience::new(QUIET);
        while shots.iter().any(is_open) && !quiet.is_over() {
            self.wait();
        }
        shots.iter().map(|shot| self.seen(shot)).collect()
    }

    /// How many packets listeners of either namespace have dropped, such as those whose answers have no route.
    pub fn dropped_by_listeners(&self) -> Result<u64> {
        let mut all = 0;
        for namespace in [self.pod(), &self.topology.client] {
            let text = namespace.enter(|| fs::read_to_string("/proc/thread-self/net/netstat"))??;
            let mut lines =
                text.lines().filter(|line| line.starts_with("TcpExt:")).map(str::split_whitespace);
            let (names, values) = lines.next().zip(lines.next()).context("no TcpExt in netstat")?;
            let drops =
                names.zip(values).find(|(name, _)| *name == "ListenDrops").context("no ListenDrops")?;
            all += drops.1.parse::<u64>()?;
        }
        Ok(all)
    }

    /// Sends packets and sees where they arrive.
    pub fn play(&self, packets: &[Packet], patience: Duration) -> Result<Vec<(Packet, Arrived)>> {
        let shots = self.send(packets)?;
        let seen = self.outcome(&shots, |_| true, patience);
        Ok(shots.into_iter().map(|shot| shot.packet).zip(seen).collect())
    }

    /// Until something arrives, or for the next check sockets, which report refusals.
    fn wait(&self) {
        let arrivals = self.arrivals.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.arrivals.1.wait_timeout(arrivals, Duration::from_millis(2));
    }

    fn seen(&self, shot: &SentPacket) -> Arrived {
        let arrivals = self.arrivals.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(arrival) =
            arrivals.iter().find(|arrival| Some(arrival.source_port) == shot.packet.source_port)
        {
            return Arrived::At(arrival.server.to_owned(), arrival.local);
        }
        drop(arrivals);
        if shot.refused.get().is_none() {
            let error = getsockopt(&shot.fd, sockopt::SocketError).unwrap_or_default();
            shot.refused.set((error != 0).then(|| Errno::from_raw(error)));
        }
        match shot.refused.get() {
            Some(Errno::ECONNREFUSED | Errno::ECONNRESET) => Arrived::Refused,
            _ => Arrived::Nothing,
        }
    }
}

impl SentPacket {
    /// Whether the client has an answer: its connection is open. Always true of datagrams.
    pub fn is_answered(&self) -> bool {
        self.packet.protocol != Protocol::Tcp || {
            // Writable, too, is a socket whose connection has failed; that has no peer.
            let _ = Patience::new(QUIET).wait_for(&self.fd, PollFlags::POLLOUT);
            getpeername::<SockaddrStorage>(self.fd.as_raw_fd()).is_ok()
        }
    }
}

/// Also where a route of other programs is missing by which the kernel would know the address for its own.
fn bind_freely(fd: &OwnedFd, source: SocketAddr) -> Result<()> {
    // For IPv6 too: the kernel keeps one flag.
    setsockopt(fd, sockopt::IpFreebind, &true)?;
    // A link-local address is one of an interface.
    if matches!(source.ip(), IpAddr::V6(at) if at.is_unicast_link_local()) {
        setsockopt(fd, sockopt::BindToDevice, &"eth0".into())?;
    }
    Ok(bind(fd.as_raw_fd(), &SockaddrStorage::from(source))?)
}

/// What the kernel says at once, such as that it has no route, is as good as an answer.
fn push_off(fd: &OwnedFd, packet: &Packet) -> nix::Result<()> {
    let source_port = packet.source_port.expect("is given when the packet's socket is opened");
    let (to, data) = (SockaddrStorage::from(packet.destination), source_port.to_be_bytes());
    if packet.protocol == Protocol::Tcp {
        sendto(fd.as_raw_fd(), &data, &to, MsgFlags::from_bits_retain(libc::MSG_FASTOPEN))?;
    } else {
        connect(fd.as_raw_fd(), &to)?;
        nix::sys::socket::send(fd.as_raw_fd(), &data, MsgFlags::empty())?;
    }
    Ok(())
}

/// Who listens where: TCP or not, and as which user.
struct Post {
    server: &'static str,
    at: SocketAddr,
    is_tcp: bool,
    user: u32,
}

fn post(server: &'static str, ip: IpAddr, port: u16, is_tcp: bool) -> Post {
    Post { server, at: SocketAddr::new(ip, port), is_tcp, user: 0 }
}

fn of_pod() -> Vec<Post> {
    let mut posts = Vec::new();
    for v6 in [false, true] {
        let tcp = APP.into_iter().chain(FAR).map(|port| post("app", any(v6), port, true));
        let udp = DATAGRAMS.into_iter().map(|port| post("app", any(v6), port, false));
        posts.extend(tcp.chain(udp));
        posts.extend([post("inbound", any(v6), 15006, true), post("outbound", any(v6), 15001, true)]);
        for is_tcp in [true, false] {
            posts.push(post("stranger", any(v6), STRANGER, is_tcp));
            // The answers have to belong to the proxy's user: their conntrack zone depends on it.
            posts.push(Post { user: PROXY_ID, ..post("dns", loopback(v6), 15053, is_tcp) });
        }
    }
    posts
}

fn of_client() -> Vec<Post> {
    let mut posts = Vec::new();
    for v6 in [false, true] {
        posts.extend(FAR.into_iter().chain(APP).map(|port| post("remote", any(v6), port, true)));
        posts.extend(DATAGRAMS.into_iter().map(|port| post("resolver", any(v6), port, false)));
    }
    posts
}

/// What something listens with, or a connection whose first data is awaited.
enum Socket {
    Listener(TcpListener),
    Datagrams(UdpSocket),
    Connection(TcpStream),
}

/// A thread that notes what arrives at all listeners of a namespace.
#[derive(Debug)]
struct Ear {
    alive: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Ear {
    fn new(namespace: &Namespace, posts: &[Post], arrivals: &Arrivals) -> Result<Self> {
        let sockets = namespace.enter(|| posts.iter().map(Socket::of).collect::<Result<Vec<_>>>())??;
        let sockets = posts.iter().map(|post| post.server).zip(sockets).collect();
        let (alive, stopped) = UnixStream::pair()?;
        let arrivals = Arc::clone(arrivals);
        let thread = thread::spawn(move || listen(sockets, &stopped, &arrivals));
        Ok(Self { alive: Some(alive), thread: Some(thread) })
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.alive.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Socket {
    fn of(post: &Post) -> Result<Self> {
        let open = || {
            if !post.is_tcp {
                let socket = UdpSocket::bind(post.at).or_else(|_| two_families(post.at))?;
                socket.set_nonblocking(true)?;
                return Ok(Self::Datagrams(socket));
            }
            // All of them accept connections to foreign addresses: marks and routes of other programs may bring such packets.
            let socket = listener(post.at, true)?;
            socket.set_nonblocking(true)?;
            Ok(Self::Listener(socket))
        };
        let socket: Result<Self> = if post.user == 0 { open() } else { as_user(post.user, post.user, open) };
        socket.with_context(|| format!("{} cannot listen on {}", post.server, post.at))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Listener(socket) => socket.as_fd(),
            Self::Datagrams(socket) => socket.as_fd(),
            Self::Connection(socket) => socket.as_fd(),
        }
    }
}

/// The IPv6 socket of a port whose IPv4 socket exists.
fn two_families(at: SocketAddr) -> std::io::Result<UdpSocket> {
    let fd = socket(AddressFamily::Inet6, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(at))?;
    Ok(UdpSocket::from(fd))
}

/// Until the other end of `stopped` is closed.
fn listen(mut sockets: Vec<(&'static str, Socket)>, stopped: &UnixStream, arrivals: &Arrivals) {
    // Those that have reported stay open: this module ignores what comes after the first packet.
    let mut done = Vec::new();
    loop {
        let fds = sockets.iter().map(|(_, socket)| socket.fd()).chain([stopped.as_fd()]);
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        if !matches!(poll(&mut fds, PollTimeout::NONE), Ok(_) | Err(Errno::EINTR)) {
            return;
        }
        let ready: Vec<bool> =
            fds.iter().map(|fd| fd.revents().is_some_and(|events| !events.is_empty())).collect();
        if ready.last() == Some(&true) {
            return;
        }
        // From last to first, so that what is removed moves none that is still to be checked.
        for at in (0..sockets.len()).rev().filter(|at| ready[*at]) {
            let server = sockets[at].0;
            match &mut sockets[at].1 {
                Socket::Listener(socket) => {
                    let Ok((stream, _)) = socket.accept() else { continue };
                    let _ = stream.set_nonblocking(true);
                    sockets.push((server, Socket::Connection(stream)));
                }
                Socket::Datagrams(socket) => {
                    let mut data = [0; 2];
                    let Ok((2, peer)) = socket.recv_from(&mut data) else { continue };
                    if let Ok(local) = socket.local_addr() {
                        note(arrivals, server, local, data);
                    }
                    let _ = socket.send_to(b"seen", peer);
                }
                Socket::Connection(stream) => {
                    let mut data = [0; 2];
                    match stream.read_exact(&mut data) {
                        Ok(()) => {
                            if let Ok(local) = stream.local_addr() {
                                note(arrivals, server, SocketAddr::new(local.ip(), local.port()), data);
                            }
                            let _ = stream.write_all(b"seen");
                        }
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                        Err(_) => {}
                    }
                    done.push(sockets.remove(at));
                }
            }
        }
    }
}

fn note(arrivals: &Arrivals, server: &'static str, local: SocketAddr, data: [u8; 2]) {
    let source_port = u16::from_be_bytes(data);
    arrivals.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arrival { server, local, source_port });
    arrivals.1.notify_all();
}

/// Whether a packet that is said to end there has come there.
pub fn agrees(seen: &Arrived, fate: Fate, packet: &Packet) -> bool {
    match (seen, fate) {
        (Arrived::At(server, at), Fate::Proxy { listener, port, rewritten }) => {
            let is_there = if rewritten { at.port() == port } else { *at == packet.destination };
            server.eq_ignore_ascii_case(listener.name()) && is_there
        }
        (Arrived::At(server, at), Fate::Untouched) => is_addressed(server, *at, packet),
        // TPROXY of other programs leaves the destination as it is.
        (Arrived::At(server, at), Fate::Redirected { port }) => {
            at.port() == port || port == STRANGER && server == "stranger"
        }
        // The first packet has come to a listener, and what follows it has not; or it stays in the pod, whose own it is not, where those who
        // listen are transparent, as few are.
        (Arrived::At(_, at), Fate::Broken) => *at != packet.destination || is_far(packet),
        // What another program has translated is not followed: it may be dropped behind that.
        (Arrived::At(server, at), Fate::Translated) => server == "stranger" || *at != packet.destination,
        (Arrived::Nothing | Arrived::Refused, Fate::Translated) => true,
        // No host answers for what is lost; whether the sender receives an error depends on what becomes of that answer.
        (Arrived::Nothing, Fate::Dropped | Fate::Rejected | Fate::Broken)
        | (Arrived::Refused, Fate::Rejected | Fate::Broken) => true,
        (_, _) => false,
    }
}

/// Whether no packet is ever sent: a socket finds no route for it. That is not a finding of CHECK's.
pub fn is_unsent(trace: &Trace) -> bool {
    matches!(trace.steps.first(), Some(TraceEvent::Route { .. }))
}

fn is_far(packet: &Packet) -> bool {
    let v6 = packet.family() == Family::V6;
    [client_address(v6), remote_address(v6), other_address(v6), elsewhere(v6), link_local(false)]
        .contains(&packet.destination.ip())
}

/// Datagrams are received by sockets that have no address of their own.
fn is_addressed(server: &str, at: SocketAddr, packet: &Packet) -> bool {
    let named = match (is_far(packet), packet.protocol) {
        (true, Protocol::Tcp) => "remote",
        (true, _) => "resolver",
        (false, _) => "app",
    };
    server == named && at.port() == packet.destination.port()
}
