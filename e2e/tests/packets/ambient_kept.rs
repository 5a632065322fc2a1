//! What becomes of connections that are open when a pod is enrolled in ambient mode, with packets of both families under both backends.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::mesh::{Mesh, any, assert_reaches};
use e2e::segments::{ACK, FIN, RST, Segment, Wire};
use install_cni::ambient_rules::{are_in_force, ensure_in_force, exist, put_in_force, remove};
use netfilter_state::netlink::kept::KeptTable;
use netns_apply::{ApplyOptions, netlink::NftConnection};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};
use redirect_core::options::BackendChoice;
use redirect_core::{AmbientRedirect, Families};
use test_support::netns::{Namespace, client_address, pod_address, remote_address};
use test_support::process::until;
use test_support::sample;

const BACKENDS: [BackendChoice; 2] = [BackendChoice::Netlink, BackendChoice::NativeNft];
const BOTH: [bool; 2] = [false, true];
/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);
/// How long one end waits for what the other sent, or for a reset, in milliseconds.
const PATIENCE: u16 = 5_000;

/// How many segments come to pods of both backends and families altogether; `SEGMENTS` says how many otherwise.
const SEGMENTS: u32 = 48_000;
/// Of segments that open no connection.
const FLAGS: [u8; 6] = [ACK, ACK | 0x08, FIN | ACK, RST, 0x12, 0];

/// A connection, by both of its ends.
struct Stream {
    client: TcpStream,
    server: TcpStream,
}

/// What became of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Alive,
    Reset,
    Silent,
}

impl Stream {
    /// Sends something each way.
    fn fate(&self) -> Result<Fate> {
        Ok(match sent(&self.client, &self.server)? {
            Fate::Alive => sent(&self.server, &self.client)?,
            fate @ (Fate::Reset | Fate::Silent) => fate,
        })
    }

    /// Ends it so that its ports are free at once.
    fn abort(self) -> Result<()> {
        let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
        setsockopt(&self.client, sockopt::Linger, &linger)?;
        Ok(())
    }
}

fn sent(mut from: &TcpStream, mut to: &TcpStream) -> Result<Fate> {
    if from.write_all(b"ping").is_err() {
        return Ok(Fate::Reset);
    }
    let mut ends =
        [PollFd::new(to.as_fd(), PollFlags::POLLIN), PollFd::new(from.as_fd(), PollFlags::POLLERR)];
    if poll(&mut ends, PollTimeout::from(PATIENCE))? == 0 {
        return Ok(Fate::Silent);
    }
    let mut bytes = [0; 4];
    let is_there = ends[0].any() == Some(true);
    Ok(if is_there && to.read_exact(&mut bytes).is_ok() && bytes == *b"ping" {
        Fate::Alive
    } else {
        Fate::Reset
    })
}

/// A server for streams, and those who connect to it.
struct Streams {
    listener: TcpListener,
    at: SocketAddr,
    open: Vec<Stream>,
}

impl Streams {
    /// Opens this many.
    fn open(server: &Namespace, client: &Namespace, at: IpAddr, count: usize) -> Result<Self> {
        let listener = server.enter(|| TcpListener::bind(SocketAddr::new(any(at.is_ipv6()), 0)))??;
        let at = SocketAddr::new(at, listener.local_addr()?.port());
        let open = client.enter(|| {
            let one = |_| Ok(Stream { client: TcpStream::connect(at)?, server: listener.accept()?.0 });
            (0..count).map(one).collect::<Result<Vec<_>>>()
        })??;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, at, open })
    }

    /// Whether somebody has connected to the server itself since.
    fn is_reached(&self) -> Result<bool> {
        match self.listener.accept() {
            Ok(_) => Ok(true),
            Err(none) if none.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(other) => Err(other.into()),
        }
    }
}

/// A pod with streams both ways and in both families.
struct Pod {
    mesh: Mesh,
    all: Vec<Streams>,
    redirect: AmbientRedirect,
    options: ApplyOptions,
}

impl Pod {
    fn new(backend: BackendChoice, each: usize) -> Result<Self> {
        let mesh = Mesh::new()?;
        let (pod, others) = (mesh.pod(), &mesh.topology.client);
        let mut all = Vec::new();
        for v6 in BOTH {
            all.push(Streams::open(pod, others, pod_address(v6), each)?);
            all.push(Streams::open(others, pod, remote_address(v6), each)?);
        }
        let redirect = AmbientRedirect::new(Families::Both);
        let pod = Self { mesh, all, redirect, options: ApplyOptions::default().backend(backend) };
        ensure!(pod.fates()? == BTreeMap::from([(Fate::Alive, 4 * each)]), "{:?}", pod.fates());
        Ok(pod)
    }

    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.mesh.pod().enter(work)
    }

    fn enrol(&self, keep: Duration) -> Result<()> {
        self.inside(|| put_in_force(&self.redirect, keep, &self.options))?.map_err(anyhow::Error::msg)
    }

    fn is_in_force(&self) -> Result<bool> {
        self.inside(|| are_in_force(&self.redirect, &self.options))?.map_err(anyhow::Error::msg)
    }

    fn table(&self) -> Result<KeptTable> {
        Ok(self.inside(|| NftConnection::open()?.kept_connections())??)
    }

    fn fates(&self) -> Result<BTreeMap<Fate, usize>> {
        let mut fates = BTreeMap::new();
        for stream in self.all.iter().flat_map(|streams| &streams.open) {
            *fates.entry(stream.fate()?).or_default() += 1;
        }
        Ok(fates)
    }

    /// All that is opened from now on goes to ztunnel.
    fn assert_captures(&self) {
        for v6 in BOTH {
            assert_reaches(self.mesh.visit(v6, 8080), "inbound");
            assert_reaches(self.mesh.app().tcp((remote_address(v6), 80)), "outbound");
        }
    }
}

/// Connects from a port of the client that has been used before.
fn connect_from(client: &Namespace, from: SocketAddr, to: SocketAddr) -> Result<TcpStream> {
    client.enter(|| {
        let family = if to.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
        let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        // A process that another test starts has all sockets for a moment, also those that are closed here.
        until("the port to be free", Duration::from_secs(10), &[], || {
            match bind(fd.as_raw_fd(), &SockaddrStorage::from(from)) {
                Err(Errno::EADDRINUSE) => Ok(None),
                bound => Ok(Some(bound?)),
            }
        })?;
        connect(fd.as_raw_fd(), &SockaddrStorage::from(to))?;
        Ok(TcpStream::from(fd))
    })?
}

fn each() -> usize {
    sample::number("STREAMS", 100)
}

#[test]
fn open_streams_survive_enrolment_and_new_ones_are_captured() -> Result<()> {
    for backend in BACKENDS {
        let pod = Pod::new(backend, each())?;
        let begun = std::time::Instant::now();
        pod.enrol(LONG)?;
        println!("{backend:?}: {} streams, enrolled within {:?}", 4 * each(), begun.elapsed());
        pod.assert_captures();
        let alive = BTreeMap::from([(Fate::Alive, 4 * each())]);
        ensure!(pod.fates()? == alive, "{backend:?}: {:?}", pod.fates());
        let table = pod.table()?;
        ensure!(table.is_settled() && table.connections().len() == 4 * each(), "{table:?}");
        ensure!(table.left() <= LONG && table.left() > LONG / 2, "{:?}", table.left());
        ensure!(pod.is_in_force()?, "{backend:?}");
        // Rules are repaired, and connections that began in between are not kept.
        let gone = if backend == BackendChoice::NativeNft {
            "nft delete table inet istio-ambient-nat"
        } else {
            "iptables-nft -t nat -F; ip6tables-nft -t nat -F"
        };
        pod.mesh.pod().sh(gone)?.ok()?;
        ensure!(!pod.is_in_force()?);
        pod.enrol(Duration::ZERO)?;
        pod.assert_captures();
        ensure!(pod.fates()? == alive, "{backend:?}: {:?}", pod.fates());
        let preview = pod.inside(|| netns_apply::cleanup_preview(&pod.options))??;
        ensure!(preview.contains("delete table inet istio-ambient-kept"), "{preview}");
        // A pod that leaves keeps what it has, and no table.
        pod.inside(|| remove(&pod.options))?.map_err(anyhow::Error::msg)?;
        ensure!(!pod.table()?.exists() && pod.fates()? == alive, "{backend:?}: {:?}", pod.fates());
        ensure!(pod.inside(|| exist(&pod.options))? == Ok(false));
    }
    Ok(())
}

#[test]
fn without_the_option_they_are_reset() -> Result<()> {
    for backend in BACKENDS {
        let pod = Pod::new(backend, 5)?;
        pod.enrol(Duration::ZERO)?;
        ensure!(pod.fates()? == BTreeMap::from([(Fate::Reset, 20)]), "{backend:?}: {:?}", pod.fates());
        ensure!(!pod.table()?.exists());
    }
    Ok(())
}

#[test]
fn after_the_deadline_none_passes_whoever_runs() -> Result<()> {
    let pod = Pod::new(BackendChoice::Netlink, 5)?;
    pod.enrol(Duration::from_secs(4))?;
    ensure!(pod.fates()? == BTreeMap::from([(Fate::Alive, 20)]), "{:?}", pod.fates());
    until("the kernel to let them go", Duration::from_secs(30), &[], || {
        Ok(pod.table()?.connections().is_empty().then_some(()))
    })?;
    ensure!(pod.fates()? == BTreeMap::from([(Fate::Reset, 20)]), "{:?}", pod.fates());
    pod.assert_captures();
    ensure!(pod.is_in_force()?);
    // The next pass of the agent tidies up.
    let ensured = pod.inside(|| ensure_in_force(&pod.redirect, LONG, &pod.options))?;
    ensure!(ensured == Ok(Ok(true)) && !pod.table()?.exists(), "{ensured:?}");
    Ok(())
}

#[test]
fn nothing_but_what_was_open_comes_past_ztunnel() -> Result<()> {
    let mut sent = 0;
    for backend in BACKENDS {
        let mut pod = Pod::new(backend, 5)?;
        pod.enrol(LONG)?;
        for v6 in BOTH {
            let at = usize::from(v6) * 2;
            let (to, wire) = (pod.all[at].at, Wire::open(&pod.mesh.topology.client, v6)?);
            let known = pod.all[at].open[0].client.local_addr()?;
            // Of connections that are not open: every port but those of the streams, with flags of all kinds.
            let listed: Vec<u16> = pod.all[at]
                .open
                .iter()
                .map(|stream| Ok(stream.client.local_addr()?.port()))
                .collect::<Result<_>>()?;
            for (number, port, flags) in segments().filter(|(_, port, _)| !listed.contains(port)) {
                wire.send(&Segment {
                    source: SocketAddr::new(client_address(v6), port),
                    destination: to,
                    sequence: number,
                    acknowledged: 1,
                    flags,
                    payload: b"past ztunnel".to_vec(),
                })?;
                sent += 1;
            }
            let client = &pod.mesh.topology.client;
            let opened = connect_from(client, SocketAddr::new(client_address(v6), 10_007), to)?;
            ensure!(!pod.all[at].is_reached()?, "{backend:?}: a segment that opens nothing has made way");
            drop(opened);
            // The tuple of a stream that has ended.
            pod.all[at].open.remove(0).abort()?;
            let opened = connect_from(client, known, to).context("the tuple of a stream that has ended")?;
            ensure!(!pod.all[at].is_reached()?, "{backend:?}: a tuple in the set was opened again");
            drop(opened);
            let kept = pod.table()?.connections().iter().any(|(_, peer)| *peer == known);
            ensure!(!kept, "it is not kept any more");
        }
        ensure!(pod.fates()? == BTreeMap::from([(Fate::Alive, 18)]), "{backend:?}: {:?}", pod.fates());
    }
    println!("{sent} segments of connections that are not open; none reached an application");
    Ok(())
}

/// Sequence numbers, source ports and flags of all kinds.
fn segments() -> impl Iterator<Item = (u32, u16, u8)> {
    let ports = (10_000..60_000).flat_map(|port| FLAGS.map(|flags| (port, flags)));
    let all = (1..=sample::number("SEGMENTS", SEGMENTS) / 4).zip(ports.cycle());
    all.map(|(number, (port, flags))| (number, port, flags))
}

#[test]
fn a_table_that_was_changed_by_hand_is_found_and_goes() -> Result<()> {
    for by_hand in [
        "add rule inet istio-ambient-kept prerouting meta l4proto tcp notrack",
        "insert rule inet istio-ambient-kept output accept",
        "flush chain inet istio-ambient-kept output",
        "add chain inet istio-ambient-kept more { type filter hook input priority 0; policy drop; }",
    ] {
        let pod = Pod::new(BackendChoice::NativeNft, 2)?;
        pod.enrol(LONG)?;
        ensure!(pod.is_in_force()?);
        pod.mesh.pod().sh(&format!("nft '{by_hand}'"))?.ok()?;
        ensure!(!pod.is_in_force()?, "{by_hand}");
        pod.enrol(LONG)?;
        ensure!(pod.is_in_force()? && !pod.table()?.exists(), "{by_hand}");
        pod.assert_captures();
    }
    Ok(())
}

#[test]
fn an_agent_that_died_half_way_is_followed_by_one_that_ends_right() -> Result<()> {
    for backend in BACKENDS {
        // Before the rules.
        let pod = Pod::new(backend, 5)?;
        pod.inside(|| NftConnection::open()?.keep_connections(LONG))??;
        ensure!(!pod.is_in_force()? && pod.inside(|| exist(&pod.options))? == Ok(true));
        pod.enrol(LONG)?;
        ensure!(pod.is_in_force()? && pod.table()?.is_settled());
        ensure!(pod.fates()? == BTreeMap::from([(Fate::Alive, 20)]), "{backend:?}: {:?}", pod.fates());
        pod.assert_captures();

        // Behind them.
        let pod = Pod::new(backend, 5)?;
        pod.inside(|| NftConnection::open()?.keep_connections(LONG))??;
        let plan = pod.redirect.plan();
        pod.inside(|| netns_apply::apply(&plan, &pod.options))??;
        ensure!(!pod.is_in_force()?, "new connections would pass");
        let ensured = pod.inside(|| ensure_in_force(&pod.redirect, Duration::ZERO, &pod.options))?;
        ensure!(ensured == Ok(Ok(true)), "{ensured:?}");
        ensure!(pod.is_in_force()? && pod.table()?.is_settled());
        ensure!(pod.fates()? == BTreeMap::from([(Fate::Alive, 20)]), "{backend:?}: {:?}", pod.fates());
        pod.assert_captures();
    }
    Ok(())
}

/// Whatever is opened while a pod is enrolled reaches the application and stays, or reaches ztunnel.
#[test]
fn streams_that_begin_meanwhile_are_whole() -> Result<()> {
    for backend in BACKENDS {
        let pod = Pod::new(backend, 5)?;
        let (is_over, has_begun) = (AtomicBool::new(false), AtomicBool::new(false));
        let (streams, client) = (&pod.all[0], &pod.mesh.topology.client);
        let opened = std::thread::scope(|scope| {
            let opener = scope.spawn(|| {
                client.enter(|| {
                    let mut opened = Vec::new();
                    while !is_over.load(Ordering::Relaxed) {
                        let client = TcpStream::connect(streams.at)?;
                        // What ztunnel has got is not the application's to accept.
                        let mut ready = [PollFd::new(streams.listener.as_fd(), PollFlags::POLLIN)];
                        if poll(&mut ready, PollTimeout::from(PATIENCE / 10))? == 0 {
                            break;
                        }
                        let (server, _) = streams.listener.accept()?;
                        server.set_nonblocking(false)?;
                        let stream = Stream { client, server };
                        ensure!(stream.fate()? == Fate::Alive, "stream {}", opened.len());
                        opened.push(stream);
                        has_begun.store(true, Ordering::Relaxed);
                    }
                    Ok(opened)
                })?
            });
            let begun = || Ok(has_begun.load(Ordering::Relaxed).then_some(()));
            until("the first stream", Duration::from_secs(10), &[], begun)?;
            let enrolled = pod.enrol(LONG);
            is_over.store(true, Ordering::Relaxed);
            let opened = opener.join().map_err(|_| anyhow::anyhow!("it panicked"))?;
            enrolled.and(opened)
        })?;
        for (number, stream) in opened.iter().enumerate() {
            ensure!(stream.fate()? == Fate::Alive, "{backend:?}: stream {number} of {}", opened.len());
        }
        pod.assert_captures();
    }
    Ok(())
}
