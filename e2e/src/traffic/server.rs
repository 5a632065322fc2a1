//! The server's side: threads that hold sockets of a namespace.

use std::io::{self, Read, Write};
use std::net::{
    Ipv6Addr, Shutdown, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream, UdpSocket,
};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
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

/// A TCP server. To every client it sends its [`Report`] as one line of JSON, then everything the client sends.
#[derive(Debug)]
pub struct TcpServer {
    server: Server,
    connections: Arc<Mutex<Vec<Connection>>>,
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    thread: JoinHandle<()>,
}

impl TcpServer {
    /// A server in a namespace. `name` is how its reports call it; port 0 takes a free port.
    /// A server on `::` serves IPv6 only, so that two servers can share a port.
    pub fn start(namespace: &Namespace, name: &str, address: impl Into<SocketAddr>) -> Result<Self> {
        Self::listen(namespace, name, address.into(), false)
    }

    /// Like [`TcpServer::start`], on a socket that also accepts connections to addresses that are not of the namespace
    /// (IP_TRANSPARENT), as TPROXY needs.
    pub fn start_transparent(
        namespace: &Namespace,
        name: &str,
        address: impl Into<SocketAddr>,
    ) -> Result<Self> {
        Self::listen(namespace, name, address.into(), true)
    }

    fn listen(namespace: &Namespace, name: &str, address: SocketAddr, transparent: bool) -> Result<Self> {
        let listener = namespace
            .enter(|| listener(address, transparent))?
            .with_context(|| format!("{name} cannot listen on {address}"))?;
        let connections = Arc::new(Mutex::new(Vec::new()));
        let (open, serving) = (Arc::clone(&connections), name.to_owned());
        let address = listener.local_addr()?;
        let server = Server::start(address, listener.as_fd().try_clone_to_owned()?, move |reports| {
            let (stream, peer) = listener.accept()?;
            let report = Report {
                server: serving.clone(),
                peer: unmapped(peer),
                local: stream.local_addr()?,
                original: original_destination(&stream),
            };
            let line = serde_json::to_string(&report)?;
            push(reports, report);
            let served = stream.try_clone()?;
            let thread = thread::spawn(move || {
                // The client may be gone already; its view is what a test checks.
                let _ = serve(&served, &line);
            });
            push(&open, Connection { stream, thread });
            Ok(())
        })?;
        Ok(Self { server, connections })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// What it has accepted so far, in order.
    pub fn accepted(&self) -> Vec<Report> {
        self.server.reports()
    }

    /// Waits until it has accepted `count` connections.
    pub fn wait_accepted(&self, count: usize, deadline: Duration) -> Result<Vec<Report>> {
        self.server.wait_reports(count, deadline)
    }

    /// Ends the connections that it has.
    pub fn hang_up(&self) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        for Connection { stream, thread } in connections.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
            let _ = thread.join();
        }
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.server.stop();
        self.hang_up();
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
        let server = Server::start(address, socket.as_fd().try_clone_to_owned()?, move |reports| {
            let mut buffer = [0; 2048];
            let (_, peer) = socket.recv_from(&mut buffer)?;
            let report = Report { server: serving.clone(), peer, local: address, original: None };
            let line = serde_json::to_vec(&report)?;
            push(reports, report);
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

impl Drop for UdpServer {
    fn drop(&mut self) {
        self.0.stop();
    }
}

pub(super) type Reports = Arc<Mutex<Vec<Report>>>;

/// A thread that handles what arrives at a socket until the other end of `alive` is closed.
#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
    reports: Reports,
    alive: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(
        address: SocketAddr,
        socket: OwnedFd,
        handle_one: impl Fn(&Reports) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        let (alive, stopped) = UnixStream::pair()?;
        let reports = Reports::default();
        let seen = Arc::clone(&reports);
        let thread = thread::spawn(move || {
            while wait_readable(&socket, &stopped) {
                // One client's failure, such as a connection that is gone before it is accepted, is not the server's.
                let _ = handle_one(&seen);
            }
            // A program that another test starts this moment has a copy of the socket for as long as it takes to be loaded, and closing ours would leave
            // the port taken. A datagram socket that is not connected has nothing to be shut down.
            let _ = shutdown(socket.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        });
        Ok(Self { address, reports, alive: Some(alive), thread: Some(thread) })
    }

    fn reports(&self) -> Vec<Report> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn wait_reports(&self, count: usize, deadline: Duration) -> Result<Vec<Report>> {
        process::until(&format!("{count} clients"), deadline, &[], || {
            let reports = self.reports();
            Ok((reports.len() >= count).then_some(reports))
        })
    }

    pub(super) fn stop(&mut self) {
        self.alive.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits for something at the socket; false when the server is to stop.
fn wait_readable(socket: &OwnedFd, stopped: &UnixStream) -> bool {
    let mut fds =
        [PollFd::new(socket.as_fd(), PollFlags::POLLIN), PollFd::new(stopped.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut fds, PollTimeout::NONE);
    ready.is_ok() && fds[1].revents().is_some_and(|events| events.is_empty())
}

fn serve(mut stream: &TcpStream, line: &str) -> io::Result<()> {
    stream.write_all(line.as_bytes())?;
    stream.write_all(b"\n")?;
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            length => stream.write_all(&buffer[..length])?,
        }
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
        let mut server = Server::start(address, first.as_fd().try_clone_to_owned()?, move |_| {
            first.accept()?;
            Ok(())
        })?;
        server.stop();
        listener(address, false)?;
        Ok(())
    }
}
