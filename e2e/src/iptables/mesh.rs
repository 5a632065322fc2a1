//! A pod with an application and a stand-in proxy, and a world around it.

use std::net::{IpAddr, SocketAddr};

use crate::traffic::{Client, Outcome, PROXY_ID, Report, TcpServer, UdpServer, as_user};
use anyhow::Result;
use test_support::netns::{
    CLIENT_MAC, Families, Namespace, POD_MAC, Topology, client_address, pod_address, remote_address,
};

/// The application's ports. Only the rules treat them differently.
pub const APP: [u16; 3] = [8080, 8081, 15008];
/// The ports of the service far away.
pub const SERVICE: [u16; 4] = [80, 81, 4443, 53];

/// A second service far away.
pub fn other_address(v6: bool) -> IpAddr {
    if v6 { [0x2001, 0xdb8, 0, 0, 0, 0, 0, 2].into() } else { [198, 51, 100, 2].into() }
}

/// Servers everywhere: `app` in the pod; `inbound`, `outbound` and `dns` of the proxy; `remote` and `resolver` far away.
pub struct Mesh {
    /// The namespaces.
    pub topology: Topology,
    _tcp: Vec<TcpServer>,
    udp: Vec<UdpServer>,
}

impl Mesh {
    /// All of it, not redirected.
    pub fn new() -> Result<Self> {
        let topology = Topology::new(Families::Dual)?;
        let (pod, client) = (&topology.pod, &topology.client);
        let mut tcp = Vec::new();
        let mut udp = Vec::new();
        for v6 in [false, true] {
            let any = any(v6);
            client.add_address("lo", &format!("{}/{}", other_address(v6), if v6 { 128 } else { 32 }))?;
            for port in APP {
                tcp.push(TcpServer::start(pod, "app", (any, port))?);
            }
            // Ready for TPROXY; connections that REDIRECT brings are accepted all the same.
            tcp.push(TcpServer::start_transparent(pod, "inbound", (any, 15006))?);
            tcp.push(TcpServer::start(pod, "outbound", (any, 15001))?);
            tcp.push(TcpServer::start(pod, "dns", (loopback(v6), 15053))?);
            udp.push(proxy_dns(pod, v6)?);
            for port in SERVICE {
                tcp.push(TcpServer::start(client, "remote", (any, port))?);
            }
            for address in [remote_address(v6), other_address(v6)] {
                udp.push(UdpServer::start(client, "resolver", (address, 53))?);
                udp.push(UdpServer::start(client, "resolver", (address, 81))?);
            }
        }
        Ok(Self { topology, _tcp: tcp, udp })
    }

    /// The pod's namespace.
    pub fn pod(&self) -> &Namespace {
        &self.topology.pod
    }

    /// The datagrams that any server has received so far.
    pub fn datagrams(&self) -> Vec<Report> {
        self.udp.iter().flat_map(UdpServer::received).collect()
    }

    /// A peer outside connects to a port of the pod.
    pub fn visit(&self, v6: bool, port: u16) -> Result<Outcome> {
        Client::new(&self.topology.client).tcp((pod_address(v6), port))
    }

    /// A process of the application.
    pub fn app(&self) -> Client<'_> {
        Client::new(self.pod()).user(1000, 1000)
    }

    /// A process of the proxy.
    pub fn proxy(&self) -> Client<'_> {
        Client::new(self.pod()).as_proxy()
    }
}

/// The answers have to belong to the proxy's user: their conntrack zone depends on it.
fn proxy_dns(pod: &Namespace, v6: bool) -> Result<UdpServer> {
    as_user(PROXY_ID, PROXY_ID, || UdpServer::start(pod, "dns", (loopback(v6), 15053)))
}

/// Gives both ends of the link addresses that the other end knows: rules of other programs may drop what asks for them.
pub fn fix_neighbours(topology: &Topology) -> Result<()> {
    let fix = |at: &Namespace, own: u8, (other, hardware): (u8, &str), address: fn(bool) -> IpAddr| {
        at.ip_batch(&format!(
            "addr add fe80::{own}/64 dev eth0 nodad\n\
             neigh replace fe80::{other} lladdr {hardware} dev eth0 nud permanent\n\
             neigh replace {} lladdr {hardware} dev eth0 nud permanent\n\
             neigh replace {} lladdr {hardware} dev eth0 nud permanent\n",
            address(false),
            address(true)
        ))
    };
    fix(&topology.pod, 2, (1, CLIENT_MAC), client_address)?;
    fix(&topology.client, 1, (2, POD_MAC), pod_address)
}

/// The unspecified address of a family.
pub fn any(v6: bool) -> IpAddr {
    if v6 { [0_u16; 8].into() } else { [0_u8; 4].into() }
}

/// The loopback address of a family.
pub fn loopback(v6: bool) -> IpAddr {
    if v6 { [0, 0, 0, 0, 0, 0, 0, 1].into() } else { [127, 0, 0, 1].into() }
}

/// The source address of the proxy's connections to the application.
pub fn passthrough(v6: bool) -> IpAddr {
    if v6 { [0, 0, 0, 0, 0, 0, 0, 6].into() } else { [127, 0, 0, 6].into() }
}

/// Asserts which server answered, and what the client had asked for by its account.
#[track_caller]
pub fn assert_asked(outcome: Result<Outcome>, server: &str, asked: SocketAddr) {
    let report = outcome.and_then(Outcome::report).expect("is answered");
    assert_eq!((report.server.as_str(), report.original), (server, Some(asked)), "{report:?}");
}

/// Asserts which server answered.
#[track_caller]
pub fn assert_reaches(outcome: Result<Outcome>, server: &str) {
    let outcome = outcome.expect("can be tried");
    assert_eq!(outcome.server(), Some(server), "{outcome:?}");
}
