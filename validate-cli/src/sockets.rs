//! The sockets of a round: stand-ins that listen where the proxy will, and connections under way.

use nix::{
    errno::Errno,
    libc,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, connect, getsockopt, listen,
        setsockopt, socket, sockopt,
    },
};
use redirect_core::rule::Protocol;
use std::{
    io::{self, Read},
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

/// The text that only the two ends of a probe know: 16 random bytes, as hexadecimal digits.
pub(crate) const TOKEN: usize = 32;
pub(crate) type Token = [u8; TOKEN];

/// A stand-in for the proxy, or for where a packet goes that nothing diverts.
pub(crate) enum StandIn {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

/// A probe that arrived: what it said, where it came from, where it arrived, and where it was sent first.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) token: Vec<u8>,
    pub(crate) peer: SocketAddr,
    pub(crate) at: SocketAddr,
    /// SO_ORIGINAL_DST; `None` where connection tracking knows nothing, and for UDP.
    pub(crate) original: Option<SocketAddr>,
}

impl StandIn {
    /// Listens. Port 0 leaves the choice to the kernel.
    pub(crate) fn listen(protocol: Protocol, address: SocketAddr) -> Result<Self, Errno> {
        let fd = bound(protocol, address)?;
        Ok(match protocol {
            Protocol::Tcp => {
                listen(&fd, Backlog::new(16)?)?;
                Self::Tcp(TcpListener::from(fd))
            }
            Protocol::Udp => Self::Udp(UdpSocket::from(fd)),
        })
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr(),
            Self::Udp(socket) => socket.local_addr(),
        }
    }

    /// The next connection that has come in; `None` without one, an error when it may not be taken. A datagram is an
    /// arrival at once.
    pub(crate) fn next(&self) -> Result<Option<Incoming>, Errno> {
        match self {
            Self::Tcp(listener) => match listener.accept() {
                Ok((stream, _)) => Ok(Incoming::new(stream).ok()),
                Err(error) => match Errno::from_raw(error.raw_os_error().unwrap_or_default()) {
                    error if is_lack(error) => Err(error),
                    _ => Ok(None),
                },
            },
            Self::Udp(socket) => Ok(datagram(socket)),
        }
    }
}

fn datagram(socket: &UdpSocket) -> Option<Incoming> {
    let mut buffer = [0; 512];
    let (length, peer) = socket.recv_from(&mut buffer).ok()?;
    let at = socket.local_addr().ok()?;
    let token = buffer.get(..length)?.to_vec();
    Some(Incoming::Whole(Arrival { token, peer, at, original: None }))
}

impl AsFd for StandIn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Udp(socket) => socket.as_fd(),
        }
    }
}

/// Whether an error means that this process has reached a limit: descriptors, memory, local ports.
pub(crate) const fn is_lack(error: Errno) -> bool {
    matches!(error, Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM | Errno::EADDRINUSE)
}

/// Something that came in at a stand-in.
pub(crate) enum Incoming {
    /// A connection that has not said all it has to say.
    Partial(TcpStream, Vec<u8>),
    /// All of it.
    Whole(Arrival),
}

impl Incoming {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        // Closed by reset: nothing of ours lingers on the proxy's port.
        setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
        Ok(Self::Partial(stream, Vec::with_capacity(TOKEN)))
    }

    /// Reads on; `None` when the connection is not worth keeping.
    pub(crate) fn read(self) -> Option<Self> {
        let Self::Partial(mut stream, mut token) = self else { return Some(self) };
        let mut buffer = [0; TOKEN];
        let room = TOKEN.saturating_sub(token.len());
        match stream.read(buffer.get_mut(..room)?) {
            Ok(0) => None,
            Ok(length) => {
                token.extend_from_slice(buffer.get(..length)?);
                if token.len() < TOKEN {
                    return Some(Self::Partial(stream, token));
                }
                let (peer, at) = (stream.peer_addr().ok()?, stream.local_addr().ok()?);
                let original = original_destination(&stream);
                Some(Self::Whole(Arrival { token, peer: plain(peer), at: plain(at), original }))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Some(Self::Partial(stream, token)),
            Err(_) => None,
        }
    }
}

/// A connection on its way, or a datagram sent.
pub(crate) struct ProbeSocket {
    fd: OwnedFd,
    pub(crate) local: SocketAddr,
}

impl ProbeSocket {
    /// Sets out. What the kernel refuses at once is an error.
    pub(crate) fn start(
        protocol: Protocol,
        source: Option<IpAddr>,
        destination: SocketAddr,
    ) -> Result<Self, Errno> {
        let fd = match source {
            Some(source) => bound(protocol, SocketAddr::new(source, 0))?,
            None => unbound(protocol, destination)?,
        };
        match connect(fd.as_raw_fd(), &SockaddrStorage::from(destination)) {
            Ok(()) | Err(Errno::EINPROGRESS) => {}
            // The address exists, or binding would have failed: the port is taken.
            Err(Errno::EADDRNOTAVAIL) if source.is_some() => return Err(Errno::EADDRINUSE),
            Err(error) => return Err(error),
        }
        // The address and port the kernel chose; to be recognised by.
        let name: SockaddrStorage = nix::sys::socket::getsockname(fd.as_raw_fd())?;
        let local = socket_addr(&name).ok_or(Errno::EAFNOSUPPORT)?;
        Ok(Self { fd, local })
    }

    /// How the attempt to connect ended.
    pub(crate) fn connected(&self) -> Result<(), Errno> {
        match getsockopt(&self.fd, sockopt::SocketError)? {
            0 => Ok(()),
            error => Err(Errno::from_raw(error)),
        }
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        // Without SIGPIPE when the other end is gone.
        let flags = nix::sys::socket::MsgFlags::MSG_NOSIGNAL;
        nix::sys::socket::send(self.fd.as_raw_fd(), bytes, flags).map(drop)
    }
}

impl AsFd for ProbeSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn unbound(protocol: Protocol, like: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if like.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let kind = match protocol {
        Protocol::Tcp => SockType::Stream,
        Protocol::Udp => SockType::Datagram,
    };
    socket(family, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)
}

fn bound(protocol: Protocol, address: SocketAddr) -> Result<OwnedFd, Errno> {
    let fd = unbound(protocol, address)?;
    if protocol == Protocol::Tcp {
        // For ports in TIME_WAIT; a port something listens on stays taken. (For UDP it would share the port.)
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    }
    if address.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    Ok(fd)
}

/// What the proxy will ask of each connection (netfilter's SO_ORIGINAL_DST).
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

fn socket_addr(name: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = name.as_sockaddr_in().map(|v4| SocketAddr::new(IpAddr::V4(v4.ip()), v4.port()));
    v4.or_else(|| name.as_sockaddr_in6().map(|v6| SocketAddr::new(IpAddr::V6(v6.ip()), v6.port())))
}

/// Without the scope and flow that make two equal addresses differ.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}
