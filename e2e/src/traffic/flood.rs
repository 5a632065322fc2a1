//! Connections without a pause, for what only happens to a few in a million.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};

use super::server::listener;
use test_support::netns::Topology;
use test_support::parallel::Worker;

/// Connections that a client keeps before it drops the oldest: long enough for the handshake of each, which takes no wait between two namespaces.
const KEPT: usize = 200;
/// The source addresses are taken from networks of so many.
const ADDRESSES: u64 = 4096;
const FIRST_PORT: u64 = 1024;

/// A port, on both families, that accepts every client, counts, and hangs up.
#[derive(Debug)]
pub struct Turnstile {
    passed: Arc<AtomicUsize>,
    _accepting: Worker,
}

impl Turnstile {
    /// Opens one. It also accepts what TPROXY brings.
    pub fn open(namespace: &test_support::netns::Namespace, port: u16) -> Result<Self> {
        let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        let listeners = any.map(|any| namespace.enter(|| listener((any, port).into(), true)));
        let listeners = listeners.into_iter().flatten().collect::<Result<Vec<_>>>()?;
        listeners.iter().try_for_each(|listener| listener.set_nonblocking(true))?;
        let passed = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&passed);
        let accepting = Worker::start(move |stop| {
            while !stop.load(Ordering::Relaxed) {
                wait_for_any(&listeners);
                for listener in &listeners {
                    // A client that has gone again still counts.
                    while let Ok((stream, _)) = listener.accept() {
                        counter.fetch_add(1, Ordering::Relaxed);
                        forget_at_once(&stream);
                    }
                }
            }
        });
        Ok(Self { passed, _accepting: accepting })
    }

    /// How many have come so far.
    pub fn passed(&self) -> usize {
        self.passed.load(Ordering::Relaxed)
    }
}

/// Returns twenty times a second at least, so that it can be closed.
fn wait_for_any(listeners: &[TcpListener]) {
    let mut fds: Vec<PollFd<'_>> =
        listeners.iter().map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN)).collect();
    let _ = poll(&mut fds, PollTimeout::from(50_u8));
}

/// Closing it resets it: neither side remembers its addresses.
fn forget_at_once(socket: &impl AsFd) {
    let _ = setsockopt(socket, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 });
}

/// Clients, some of each family, that connect to a port of the pod without a pause and never from the same address and port again.
#[derive(Debug)]
pub struct Flood {
    begun: Arc<AtomicU64>,
    _clients: Vec<Worker>,
}

impl Flood {
    /// Lets `clients` of them loose on a port of the pod.
    pub fn start(topology: &Topology, port: u16, clients: usize) -> Result<Self> {
        // Every address of these networks is one of the client's, without having it.
        topology
            .client
            .sh("ip -4 route add local 10.2.0.0/16 dev lo; ip -6 route add local fd00:20::/64 dev lo")?;
        // Connections are reset, and connection tracking has to forget them before they are too many.
        topology.pod.sh(
            "cd /proc/sys/net/netfilter
             for state in close close_wait time_wait last_ack fin_wait syn_recv syn_sent; do echo 1 > nf_conntrack_tcp_timeout_$state; done",
        )?;
        let begun = Arc::new(AtomicU64::new(0));
        let clients = (0..clients).map(|index| {
            let begun = Arc::clone(&begun);
            let target = SocketAddr::new(test_support::netns::pod_address(index % 2 == 1), port);
            // The thread stays where the thread that starts it is.
            topology.client.enter(|| {
                Worker::start(move |over| {
                    let mut kept = VecDeque::with_capacity(KEPT + 1);
                    while !over.load(Ordering::Relaxed) {
                        let number = begun.fetch_add(1, Ordering::Relaxed);
                        // What cannot be begun shows by what does not arrive.
                        kept.extend(begin(source(number, target.is_ipv6()), target).ok());
                        if kept.len() > KEPT {
                            kept.pop_front();
                        }
                    }
                })
            })
        });
        let clients = clients.collect::<Result<Vec<_>>>().context("no clients")?;
        Ok(Self { begun, _clients: clients })
    }

    /// How many connections they have begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }
}

/// Another address and port for every number.
fn source(number: u64, v6: bool) -> SocketAddr {
    let host = u16::try_from(number % ADDRESSES + 1).unwrap_or(1);
    let ports = u64::from(u16::MAX) + 1 - FIRST_PORT;
    let (port, round) = (FIRST_PORT + number / ADDRESSES % ports, number / ADDRESSES / ports);
    let network = u16::try_from(round * ADDRESSES).unwrap_or(u16::MAX);
    let host = host.saturating_add(network);
    let [high, low] = host.to_be_bytes();
    let address: IpAddr = if v6 {
        Ipv6Addr::new(0xfd00, 0x20, 0, 0, 0, 0, 0, host).into()
    } else {
        Ipv4Addr::new(10, 2, high, low).into()
    };
    SocketAddr::new(address, u16::try_from(port).unwrap_or(u16::MAX))
}

/// Sends the first packet of a connection, and waits for nothing.
fn begin(source: SocketAddr, target: SocketAddr) -> nix::Result<OwnedFd> {
    let family = if target.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(family, SockType::Stream, flags, None)?;
    // For an IPv6 socket too: the kernel keeps one flag for both.
    setsockopt(&fd, sockopt::IpTransparent, &true)?;
    forget_at_once(&fd);
    bind(fd.as_raw_fd(), &SockaddrStorage::from(source))?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(target)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(fd),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_source_comes_twice() {
        let numbers = (0..20_000).chain(264_000_000..264_020_000);
        let sources: HashSet<SocketAddr> = numbers.map(|number| source(number, false)).collect();
        assert_eq!(sources.len(), 40_000);
    }
}
