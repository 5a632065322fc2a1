//! A stand-in for the sidecar proxy: it takes what the rules bring and reports to the client what it saw.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use anyhow::Result;
use e2e::traffic::{PROXY_ID, Report, TcpServer, UdpServer, as_user};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use test_support::netns::Namespace;

/// What the proxy calls itself on each of its ports.
pub(crate) const INBOUND: &str = "proxy inbound 15006";
/// See [`INBOUND`].
pub(crate) const OUTBOUND: &str = "proxy outbound 15001";
/// See [`INBOUND`].
pub(crate) const DNS: &str = "proxy DNS 15053";

/// The proxy's sockets in a pod, of user and group 1337.
#[derive(Debug)]
pub(crate) struct Proxy {
    _connections: Vec<TcpServer>,
    _queries: Vec<UdpServer>,
}

impl Proxy {
    /// Listens for both families.
    pub(crate) fn start(pod: &Namespace) -> Result<Self> {
        as_proxy(|| {
            let (mut connections, mut queries) = (Vec::new(), Vec::new());
            for (any, loopback) in [
                (IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv4Addr::LOCALHOST)),
                (IpAddr::from(Ipv6Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::LOCALHOST)),
            ] {
                connections.push(TcpServer::start_transparent(pod, INBOUND, (any, 15006))?);
                connections.push(TcpServer::start(pod, OUTBOUND, (any, 15001))?);
                connections.push(TcpServer::start(pod, DNS, (loopback, 15053))?);
                queries.push(UdpServer::start(pod, DNS, (loopback, 15053))?);
            }
            Ok(Self { _connections: connections, _queries: queries })
        })
    }
}

/// The mark of packets that TPROXY is done with.
const MARK: u32 = 1337;

/// A connection the proxy makes to the application on behalf of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Onward {
    /// From an address of the pod that the rules know for that.
    From(IpAddr),
    /// From the client's own address, as only a privileged proxy can: its user is root, its group still the proxy's.
    Transparent(IpAddr),
}

impl Onward {
    /// What the application should see.
    pub(crate) fn source(self) -> IpAddr {
        match self {
            Self::From(source) | Self::Transparent(source) => source,
        }
    }

    /// Connects, and returns what the application saw.
    pub(crate) fn connect(self, pod: &Namespace, target: SocketAddr) -> Result<Report> {
        match self {
            Self::From(_) => as_proxy(|| pod.enter(|| self.connect_here(target)))?,
            Self::Transparent(_) => as_user(0, PROXY_ID, || pod.enter(|| self.connect_here(target)))?,
        }
    }

    fn connect_here(self, target: SocketAddr) -> Result<Report> {
        let family = if target.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        if let Self::Transparent(_) = self {
            setsockopt(&fd, sockopt::IpTransparent, &true)?;
            setsockopt(&fd, sockopt::Mark, &MARK)?;
        }
        // Limits what connecting may take, too.
        setsockopt(&fd, sockopt::SendTimeout, &TimeVal::new(2, 0))?;
        bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(self.source(), 0)))?;
        connect(fd.as_raw_fd(), &SockaddrStorage::from(target))?;
        let stream = TcpStream::from(fd);
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }
}

fn as_proxy<T: Send>(action: impl FnOnce() -> T + Send) -> T {
    as_user(PROXY_ID, PROXY_ID, action)
}
