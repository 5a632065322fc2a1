//! The server's side: threads that hold sockets of a namespace.

use std::io::{self, Read, Write};
use std::net::{
    Ipv6Addr, Shutdown, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream, UdpSocket,
};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, getsockopt, listen, setsockopt,
    shutdown, socket, sockopt,
};

use super::Report;
use test_support::netns::Namespace;
use test_support::process;

/// What an obedient server says first.
pub const GREETING: &str = "obedient\n";

/// A TCP server. To every client it sends its [`Report`] as one line of JSON, then everything the client sends.
#[derive(Debug)]
pub struct TcpServer(Server);

impl TcpServer {
    /// A server in a namespace. `name` is how its reports call it; port 0 takes a free port.
    /// A server on `::` serves IPv6 only, so that two servers can share a port.
    pub fn start(namespace: &Namespace, name: &str, address: impl Into<SocketAddr>) -> Result<Self> {
        Self::reporting(namespace, name, address.into(), false)
    }

    /// Like [`TcpServer::start`], on a socket that also accepts connections to addresses that are not of the namespace
    /// (IP_TRANSPARENT), as TPROXY needs.
    pub fn start_transparent(
        namespace: &Namespace,
        name: &str,
        address: impl Into<SocketAddr>,
    ) -> Result<Self> {
        Self::reporting(namespace, name, address.into(), true)
    }

    /// A server that ends its connections on its clients' command. It greets with [`GREETING`], on a socket as TPROXY needs it, and then does
    /// what the first byte it gets says: `r` resets the connection, `c` closes it. Anything else comes back with all that follows until the
    /// client has finished; then it closes after `f`, and else leaves the connection half open.
    pub fn start_obedient(namespace: &Namespace, address: impl Into<SocketAddr>) -> Result<Self> {
        let greet = |_: &Seen, _: &TcpStream, _| Ok(GREETING.to_owned());
        Self::serve(namespace, "an obedient server", (address.into(), true), greet, obey)
    }

    fn reporting(namespace: &Namespace, name: &str, address: SocketAddr, transparent: bool) -> Result<Self> {
        let server = name.to_owned();
        let greet = move |seen: &Seen, stream: &TcpStream, peer| {
            let report = Report {
                server: server.clone(),
                peer: unmapped(peer),
                local: stream.local_addr()?,
                original: original_destination(stream),
            };
            let line = serde_json::to_string(&report)? + "\n";
            push(&seen.reports, report);
            Ok(line)
        };
        Self::serve(namespace, name, (address, transparent), greet, |stream| echo(stream).map(|()| true))
    }

    /// `greet` has the first words to a client, `serve` the rest, and whether the connection stays open after that.
    fn serve(
        namespace: &Namespace,
        name: &str,
        (address, transparent): (SocketAddr, bool),
        greet: impl Fn(&Seen, &TcpStream, SocketAddr) -> Result<String> + Send + 'static,
        serve: fn(&TcpStream) -> io::Result<bool>,
    ) -> Result<Self> {
        let listener = namespace
            .enter(|| listener(address, transparent))?
            .with_context(|| format!("{name} cannot listen on {address}"))?;
        let address = listener.local_addr()?;
        let server = Server::start(address, listener.as_fd().try_clone_to_owned()?, move |seen| {
            let (stream, peer) = listener.accept()?;
            let greeting = greet(seen, &stream, peer)?;
            let stream = Arc::new(stream);
            let ends = vec![Arc::downgrade(&stream)];
            let thread = thread::spawn(move || {
                // The client may be gone at any time; its view is what a test checks.
                let served = (&*stream).write_all(greeting.as_bytes()).and_then(|()| serve(&stream));
                served.is_ok_and(|stays_open| stays_open).then_some(stream)
            });
            push(&seen.connections, Connection { ends, threads: vec![thread] });
            Ok(())
        })?;
        Ok(Self(server))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// What it has accepted so far, in order.
    pub fn accepted(&self) -> Vec<Report> {
        self.0.reports()
    }

    /// Waits until it has accepted `count` connections.
    pub fn wait_accepted(&self, count: usize, deadline: Duration) -> Result<Vec<Report>> {
        process::until(&format!("{count} clients"), deadline, &[], || {
            let reports = self.accepted();
            Ok((reports.len() >= count).then_some(reports))
        })
    }

    /// Ends the connections that it has.
    pub fn hang_up(&self) {
        self.0.hang_up();
    }
}

/// A UDP server. It answers every datagram with its [`Report`].
#[derive(Debug)]
pub struct UdpServer(Server);

impl UdpServer {
    /// A server in a namespace; see [`TcpServer::start`].
    pub fn start(namespace: &Namespace, name: &str, address: impl Into<SocketAddr>) -> Result<Self> {
        let address = address.into();
        let socket = namespace
            .enter(|| bound_socket(SockType::Datagram, address, false).map(UdpSocket::from))?
            .with_context(|| format!("{name} cannot listen on {address}"))?;
        let address = socket.local_addr()?;
        let serving = name.to_owned();
        let server = Server::start(address, socket.as_fd().try_clone_to_owned()?, move |seen| {
            let mut buffer = [0; 2048];
            let (_, peer) = socket.recv_from(&mut buffer)?;
            let report = Report { server: serving.clone(), peer, local: address, original: None };
            let line = serde_json::to_vec(&report)?;
            push(&seen.reports, report);
            socket.send_to(&line, peer)?;
            Ok(())
        })?;
        Ok(Self(server))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// What it has received so far, in order.
    pub fn received(&self) -> Vec<Report> {
        self.0.reports()
    }
}

/// A connection that is served. Only its threads hold its sockets: what they close is closed, and what they return stays open.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ends: Vec<Weak<TcpStream>>,
    pub(super) threads: Vec<JoinHandle<Option<Arc<TcpStream>>>>,
}

/// What a server has seen, and the connections that it has.
#[derive(Debug, Default)]
pub(super) struct Seen {
    reports: Mutex<Vec<Report>>,
    pub(super) connections: Mutex<Vec<Connection>>,
}

/// A thread that handles what arrives at a socket until the other end of `alive` is closed. Its connections end with it.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) address: SocketAddr,
    seen: Arc<Seen>,
    alive: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(
        address: SocketAddr,
        socket: OwnedFd,
        handle_one: impl Fn(&Seen) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        let (alive, stopped) = UnixStream::pair()?;
        let seen = Arc::<Seen>::default();
        let shared = Arc::clone(&seen);
        let thread = thread::spawn(move || {
            while wait_readable(&socket, &stopped) {
                // One client's failure, such as a connection that is gone before it is accepted, is not the server's.
                let _ = handle_one(&shared);
            }
            // A program that another test starts this moment has a copy of the socket for as long as it takes to be loaded, and closing ours would leave
            // the port taken. A datagram socket that is not connected has nothing to be shut down.
            let _ = shutdown(socket.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        });
        Ok(Self { address, seen, alive: Some(alive), thread: Some(thread) })
    }

    fn reports(&self) -> Vec<Report> {
        self.seen.reports.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn hang_up(&self) {
        let mut connections = self.seen.connections.lock().unwrap_or_else(PoisonError::into_inner);
        for Connection { ends, threads } in connections.drain(..) {
            for end in ends.iter().filter_map(Weak::upgrade) {
                let _ = end.shutdown(Shutdown::Both);
            }
            for thread in threads {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.alive.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.hang_up();
    }
}

/// Waits for something at the socket; false when the server is to stop.
fn wait_readable(socket: &OwnedFd, stopped: &UnixStream) -> bool {
    let mut fds =
        [PollFd::new(socket.as_fd(), PollFlags::POLLIN), PollFd::new(stopped.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut fds, PollTimeout::NONE);
    ready.is_ok() && fds[1].revents().is_some_and(|events| events.is_empty())
}

fn echo(mut stream: &TcpStream) -> io::Result<()> {
    let mut buffer = [0; 65_536];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            length => stream.write_all(&buffer[..length])?,
        }
    }
}

/// Whether the connection stays half open.
fn obey(mut stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    stream.peek(&mut first)?;
    match first[0] {
        // What is not read makes a reset of the end.
        b'r' => Ok(false),
        b'c' => stream.read(&mut first).map(|_| false),
        _ => echo(stream).map(|()| first[0] != b'f'),
    }
}

fn bound_socket(kind: SockType, address: SocketAddr, transparent: bool) -> Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    if address.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    }
    if transparent {
        // For an IPv6 socket too: the kernel keeps one flag for both.
        setsockopt(&fd, sockopt::IpTransparent, &true)?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    Ok(fd)
}

/// A listener, in the namespace of the calling thread; one on `::` takes IPv6 only. A transparent one (IP_TRANSPARENT) accepts for addresses that
/// are not the namespace's, as TPROXY needs.
///
/// # Errors
/// The kernel refuses.
pub fn listener(address: SocketAddr, transparent: bool) -> Result<TcpListener> {
    let fd = bound_socket(SockType::Stream, address, transparent)?;
    listen(&fd, Backlog::new(128)?)?;
    Ok(TcpListener::from(fd))
}

/// Asked of connection tracking; it answers with the connection's own address where nothing was rewritten.
fn original_destination(stream: &TcpStream) -> Option<SocketAddr> {
    if stream.local_addr().ok()?.is_ipv4() {
        let raw = getsockopt(stream, sockopt::OriginalDst).ok()?;
        let address = u32::from_be(raw.sin_addr.s_addr).into();
        Some(SocketAddrV4::new(address, u16::from_be(raw.sin_port)).into())
    } else {
        let raw = getsockopt(stream, sockopt::Ip6tOriginalDst).ok()?;
        let address = Ipv6Addr::from(raw.sin6_addr.s6_addr);
        Some(SocketAddrV6::new(address, u16::from_be(raw.sin6_port), 0, 0).into())
    }
}

/// Without the scope and flow that make two equal addresses differ.
fn unmapped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}

pub(super) fn push<T>(list: &Mutex<Vec<T>>, item: T) {
    list.lock().unwrap_or_else(PoisonError::into_inner).push(item);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_free_when_its_server_has_stopped_even_if_another_program_has_the_socket() -> Result<()> {
        let first = listener(([127, 0, 0, 1], 0).into(), false)?;
        let address = first.local_addr()?;
        let _of_another_program = first.try_clone()?;
        let server = Server::start(address, first.as_fd().try_clone_to_owned()?, move |_| {
            first.accept()?;
            Ok(())
        })?;
        drop(server);
        listener(address, false)?;
        Ok(())
    }
}
