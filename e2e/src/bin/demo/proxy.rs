//! A stand-in for the sidecar proxy: it takes what the rules bring and reports to the client what it saw.

use anyhow::Result;
use e2e::iptables::mesh::{any, loopback};
use e2e::traffic::{PROXY_ID, TcpServer, UdpServer, as_user};
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
        as_user(PROXY_ID, PROXY_ID, || {
            let (mut connections, mut queries) = (Vec::new(), Vec::new());
            for (any, loopback) in [false, true].map(|v6| (any(v6), loopback(v6))) {
                connections.push(TcpServer::start_transparent(pod, INBOUND, (any, 15006))?);
                connections.push(TcpServer::start(pod, OUTBOUND, (any, 15001))?);
                connections.push(TcpServer::start(pod, DNS, (loopback, 15053))?);
                queries.push(UdpServer::start(pod, DNS, (loopback, 15053))?);
            }
            Ok(Self { _connections: connections, _queries: queries })
        })
    }
}
