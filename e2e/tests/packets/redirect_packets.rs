//! Where real packets go under the rules `istio-iptables` programs: IPv4 and IPv6, every backend.

use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::iptables::mesh::{Mesh, any, assert_asked, assert_reaches, loopback, other_address, passthrough};
use e2e::iptables::{self, apply};
use e2e::traffic::{ANSWER, Client, Outcome, PROXY_ID, Report, TcpServer, as_user};
use netns_apply::{ApplyOptions, Live};
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;
use packet_trace::{Detail, Fate, Packet, PacketEdit, TraceEvent};
use test_support::netns::{Families, Namespace, client_address, pod_address, remote_address};
use test_support::process;

/// For packets that nobody is expected to answer.
const UNANSWERED: Duration = Duration::from_millis(300);
const BOTH: [bool; 2] = [false, true];

/// What a pod gets that says little: everything captured but a port, a destination and a range each way, and DNS.
const USUAL: &str = "--dual-stack -b * -d 8081 -i * -o 81 -x 198.51.100.2/32,2001:db8::2/128 --redirect-dns --capture-all-dns";

#[test]
fn redirect_over_netlink() -> Result<()> {
    usual_paths("", false)
}

#[test]
fn redirect_with_iptables_nft() -> Result<()> {
    usual_paths("--backend restore", false)
}

#[test]
fn redirect_with_iptables_legacy() -> Result<()> {
    usual_paths("--force-iptables-binary legacy", false)
}

#[test]
fn redirect_with_native_nftables() -> Result<()> {
    usual_paths("--native-nftables", false)
}

#[test]
fn tproxy_over_netlink() -> Result<()> {
    usual_paths("-m TPROXY", true)
}

#[test]
fn tproxy_with_iptables_nft() -> Result<()> {
    usual_paths("-m TPROXY --backend restore", true)
}

#[test]
fn tproxy_with_iptables_legacy() -> Result<()> {
    usual_paths("-m TPROXY --force-iptables-binary legacy", true)
}

#[test]
fn tproxy_with_native_nftables() -> Result<()> {
    usual_paths("-m TPROXY --native-nftables", true)
}

#[test]
fn strict_capture_leaves_the_usual_paths_as_they_are() -> Result<()> {
    for backend in [
        "",
        "--backend restore",
        "--force-iptables-binary legacy",
        "--native-nftables",
        "--native-nftables --nft-sets",
    ] {
        usual_paths(&format!("--strict-capture {backend}"), false)?;
        usual_paths(&format!("--strict-capture -m TPROXY {backend}"), true)?;
    }
    Ok(())
}

fn usual_paths(backend: &str, tproxy: bool) -> Result<()> {
    let mesh = Mesh::new()?;
    for v6 in BOTH {
        nothing_is_captured(&mesh, v6);
    }
    apply(mesh.pod(), &format!("{USUAL} {backend}"))?;
    for v6 in BOTH {
        inbound(&mesh, v6, tproxy)?;
        outbound(&mesh, v6);
        the_proxys_own(&mesh, v6);
        dns(&mesh, v6);
        zones(&mesh, v6)?;
        if tproxy {
            the_application_sees_the_client(&mesh, v6)?;
        }
    }
    apply(mesh.pod(), "--cleanup-only")?;
    for v6 in BOTH {
        nothing_is_captured(&mesh, v6);
    }
    Ok(())
}

fn nothing_is_captured(mesh: &Mesh, v6: bool) {
    assert_reaches(mesh.visit(v6, 8080), "app");
    assert_reaches(mesh.app().tcp((remote_address(v6), 80)), "remote");
    assert_reaches(mesh.app().tcp((remote_address(v6), 53)), "remote");
    assert_reaches(mesh.app().udp((remote_address(v6), 53)), "resolver");
}

fn inbound(mesh: &Mesh, v6: bool, tproxy: bool) -> Result<()> {
    let asked = SocketAddr::new(pod_address(v6), 8080);
    let report = mesh.visit(v6, 8080)?.report()?;
    assert_eq!((report.server.as_str(), report.original), ("inbound", Some(asked)));
    assert_eq!(report.peer.ip(), client_address(v6));
    // REDIRECT rewrites the destination, TPROXY does not.
    assert_eq!(report.local.port(), if tproxy { 8080 } else { 15006 });
    assert_reaches(mesh.visit(v6, 8081), "app");
    // The tunnel's port is exempt from REDIRECT only, as in the reference.
    assert_reaches(mesh.visit(v6, 15008), if tproxy { "inbound" } else { "app" });
    // Also where nothing listens.
    assert_reaches(mesh.visit(v6, 9), "inbound");
    Ok(())
}

fn outbound(mesh: &Mesh, v6: bool) {
    let asked = SocketAddr::new(remote_address(v6), 80);
    assert_asked(mesh.app().tcp(asked), "outbound", asked);
    assert_reaches(mesh.app().tcp((remote_address(v6), 81)), "remote");
    assert_reaches(mesh.app().udp((remote_address(v6), 81)), "resolver");
    assert_reaches(mesh.app().tcp((other_address(v6), 80)), "remote");
    // The application calling itself.
    assert_reaches(mesh.app().tcp((pod_address(v6), 8080)), "app");
    assert_reaches(mesh.app().tcp((loopback(v6), 8080)), "app");
}

fn the_proxys_own(mesh: &Mesh, v6: bool) {
    let service = SocketAddr::new(remote_address(v6), 80);
    assert_reaches(mesh.proxy().tcp(service), "remote");
    assert_reaches(Client::new(mesh.pod()).user(PROXY_ID, 7).tcp(service), "remote");
    assert_reaches(Client::new(mesh.pod()).user(7, PROXY_ID).tcp(service), "remote");
    assert_reaches(Client::new(mesh.pod()).user(7, 7).tcp(service), "outbound");
    // Its connections to the application, and its calls of its own pod.
    let app = SocketAddr::new(pod_address(v6), 8080);
    assert_reaches(mesh.proxy().from(passthrough(v6)).tcp(app), "app");
    assert_reaches(mesh.proxy().tcp(app), "inbound");
    assert_reaches(mesh.proxy().tcp((loopback(v6), 8080)), "app");
}

fn dns(mesh: &Mesh, v6: bool) {
    let resolver = SocketAddr::new(remote_address(v6), 53);
    // Each answer comes back from the address asked, or the client would not take it.
    assert_reaches(mesh.app().udp(resolver), "dns");
    assert_asked(mesh.app().tcp(resolver), "dns", resolver);
    assert_reaches(mesh.app().udp((other_address(v6), 53)), "dns");
    assert_reaches(mesh.proxy().udp(resolver), "resolver");
    assert_reaches(mesh.proxy().tcp(resolver), "remote");
    assert_reaches(mesh.app().udp((loopback(v6), 53)), "dns");
}

/// A query of the application and the proxy's own query to the same server, from the same port: without conntrack
/// zones the second would be taken for a packet of the first.
fn zones(mesh: &Mesh, v6: bool) -> Result<()> {
    let source = SocketAddr::new(pod_address(v6), 40_053);
    let resolver = SocketAddr::new(remote_address(v6), 53);
    for round in 0..2 {
        assert_eq!(query(mesh.pod(), 1000, source, resolver)?, "dns", "round {round}");
        assert_eq!(query(mesh.pod(), PROXY_ID, source, resolver)?, "resolver", "round {round}");
    }
    Ok(())
}

/// Asks from a port of one's own choice; returns which server answered.
fn query(pod: &Namespace, user: u32, source: SocketAddr, server: SocketAddr) -> Result<String> {
    let answer = || -> Result<Report> {
        // A program that another test starts this moment may hold the socket before for as long as it takes to be loaded.
        let socket = process::until("the port of the query before", process::SHORT, &[], || {
            match UdpSocket::bind(source) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
                bound => Ok(Some(bound?)),
            }
        })?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.connect(server)?;
        socket.send(b"?")?;
        let mut buffer = [0; 2048];
        let length = socket.recv(&mut buffer).context("no answer")?;
        Ok(serde_json::from_slice(&buffer[..length])?)
    };
    let report = pod.enter(|| as_user(user, user, answer))?;
    report.map(|report| report.server).with_context(|| format!("user {user} asks {server}"))
}

const PATIENCE: Duration = Duration::from_secs(60);

/// With TPROXY a proxy that runs as root may call the application in the client's name: the application sees the client's
/// address, and its answers find their way to the proxy.
fn the_application_sees_the_client(mesh: &Mesh, v6: bool) -> Result<()> {
    let client = mesh.visit(v6, 8080)?.report()?.peer;
    let app = SocketAddr::new(pod_address(v6), 8080);
    let report = mesh.pod().enter(|| in_the_name_of(client.ip(), app))??;
    assert_eq!((report.server.as_str(), report.peer.ip()), ("app", client_address(v6)));
    Ok(())
}

/// Connects as a proxy with "original source" does: transparent, from the client's address, with the mark of inbound packets.
fn in_the_name_of(client: IpAddr, target: SocketAddr) -> Result<Report> {
    let family = if target.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::IpTransparent, &true)?;
    setsockopt(&fd, sockopt::Mark, &1337)?;
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::new(60, 0))?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(client, 0)))?;
    connect(fd.as_raw_fd(), &SockaddrStorage::from(target)).context("cannot connect")?;
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

#[test]
fn only_what_is_listed_is_captured() -> Result<()> {
    let lists = "--dual-stack -b 8080,9000:9002 -i 198.51.100.1/32,2001:db8::1/128 -q 4443";
    for backend in ["", "-m TPROXY", "--backend restore", "--native-nftables"] {
        let mesh = Mesh::new()?;
        apply(mesh.pod(), &format!("{lists} {backend}"))?;
        for v6 in BOTH {
            assert_reaches(mesh.visit(v6, 8080), "inbound");
            assert_reaches(mesh.visit(v6, 9001), "inbound");
            assert_reaches(mesh.visit(v6, 8081), "app");
            assert_eq!(mesh.visit(v6, 9003)?, Outcome::Refused);
            assert_reaches(mesh.app().tcp((remote_address(v6), 80)), "outbound");
            assert_reaches(mesh.app().tcp((other_address(v6), 80)), "remote");
            let asked = SocketAddr::new(other_address(v6), 4443);
            assert_asked(mesh.app().tcp(asked), "outbound", asked);
        }
    }
    Ok(())
}

#[test]
fn what_nobody_lists_is_left_alone() -> Result<()> {
    let mesh = Mesh::new()?;
    apply(mesh.pod(), "--dual-stack")?;
    for v6 in BOTH {
        nothing_is_captured(&mesh, v6);
    }
    Ok(())
}

#[test]
fn without_dual_stack_ipv6_is_left_alone() -> Result<()> {
    let mesh = Mesh::new()?;
    apply(mesh.pod(), "-b * -i *")?;
    assert_reaches(mesh.visit(false, 8080), "inbound");
    nothing_is_captured(&mesh, true);
    Ok(())
}

#[test]
fn strict_capture_leaves_no_family_out() -> Result<()> {
    for backend in ["", "--backend restore", "--force-iptables-binary legacy", "--native-nftables"] {
        for mode in ["", "-m TPROXY"] {
            let mesh = Mesh::new()?;
            apply(mesh.pod(), &format!("-b * -i * --strict-capture {mode} {backend}"))?;
            for v6 in BOTH {
                assert_reaches(mesh.visit(v6, 8080), "inbound");
                assert_reaches(mesh.app().tcp((remote_address(v6), 80)), "outbound");
            }
            // What every neighbour has.
            assert_reaches(Client::new(&mesh.topology.client).tcp(link_local(&mesh)?), "inbound");
            apply(mesh.pod(), "--cleanup-only")?;
            nothing_is_captured(&mesh, true);
        }
    }
    Ok(())
}

/// The pod's link-local address and the application's port, as its neighbour connects to it.
fn link_local(mesh: &Mesh) -> Result<SocketAddr> {
    let addresses = mesh.pod().enter(netns_apply::facts::addresses)??;
    let of_neighbours = |address: &IpAddr| match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some(*v6),
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    };
    let address = addresses.iter().find_map(of_neighbours).context("no link-local address")?;
    let scope = mesh.topology.client.enter(|| if_nametoindex("eth0"))??;
    Ok(SocketAddrV6::new(address, 8080, 0, scope).into())
}

#[test]
fn strict_capture_asks_nothing_of_a_pod_without_ipv6() -> Result<()> {
    for backend in ["", "--backend restore", "--native-nftables"] {
        let pod = Namespace::pod(Families::V4)?;
        apply(&pod, &format!("-b * -i * --strict-capture {backend}"))?;
        let state = pod.state_with_nft()?;
        ensure!(!pod.sh("ip -6 addr")?.stdout.contains("::6"), "{backend}: {state:?}");
        ensure!(pod.sh("ip6tables-nft-save")?.stdout.is_empty(), "{backend}");
    }
    Ok(())
}

#[test]
fn dns_limited_to_the_servers_of_resolv_conf() -> Result<()> {
    for backend in ["", "--backend restore", "--native-nftables"] {
        let mesh = Mesh::new()?;
        mesh.pod().set_nameservers(&[remote_address(false).to_string(), remote_address(true).to_string()])?;
        apply(mesh.pod(), &format!("--dual-stack -b * -i * --redirect-dns {backend}"))?;
        for v6 in BOTH {
            let (listed, other) = ((remote_address(v6), 53), (other_address(v6), 53));
            assert_reaches(mesh.app().udp(listed), "dns");
            assert_reaches(mesh.app().tcp(listed), "dns");
            assert_reaches(mesh.app().udp(other), "resolver");
            // No longer DNS to the rules, but outbound TCP still.
            assert_reaches(mesh.app().tcp(other), "outbound");
            assert_reaches(mesh.proxy().udp(listed), "resolver");
            zones(&mesh, v6)?;
        }
    }
    Ok(())
}

#[test]
fn groups_of_owners() -> Result<()> {
    let with = |mesh: &Mesh, name: &str, groups: &str| -> Result<()> {
        let env = [(name.to_owned(), groups.to_owned())];
        let args = ["--dual-stack", "-b", "*", "-i", "*"];
        let command = iptables::with_environment(iptables::istio_iptables(), &args, &env);
        mesh.pod().run(&command)?.ok()?;
        Ok(())
    };
    let mesh = Mesh::new()?;
    let captured = |group: u32, v6| {
        let outcome = Client::new(mesh.pod()).user(1000, group).tcp((remote_address(v6), 80));
        outcome.map(|outcome| outcome.server() == Some("outbound"))
    };
    with(&mesh, "ISTIO_OUTBOUND_OWNER_GROUPS", "202,203")?;
    for v6 in BOTH {
        assert!(captured(202, v6)? && captured(203, v6)? && !captured(204, v6)?, "only 202 and 203");
        assert_reaches(mesh.visit(v6, 8080), "inbound");
    }
    with(&mesh, "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "202,203")?;
    for v6 in BOTH {
        assert!(!captured(202, v6)? && !captured(203, v6)? && captured(204, v6)?, "all but 202 and 203");
    }
    Ok(())
}

/// A virtual machine, or a container in the pod's own network: behind a second interface of the pod, `vif0`.
struct Guest {
    namespace: Namespace,
    _server: [TcpServer; 2],
}

impl Guest {
    const POD: [&str; 2] = ["10.2.0.1", "fd00:20::1"];
    const OWN: [&str; 2] = ["10.2.0.2", "fd00:20::2"];

    fn new(mesh: &Mesh) -> Result<Self> {
        let namespace = Namespace::empty(Families::Dual)?;
        let pod = mesh.pod();
        pod.ip_batch(&format!("link add vif0 type veth peer name eth0 netns {}\n", namespace.name()))?;
        for (namespace, interface, addresses) in [(pod, "vif0", Self::POD), (&namespace, "eth0", Self::OWN)] {
            namespace.ip_batch(&format!("link set {interface} up\n"))?;
            namespace.add_address(interface, &format!("{}/24", addresses[0]))?;
            namespace.add_address(interface, &format!("{}/64", addresses[1]))?;
        }
        let (v4, v6) = (Self::POD[0], Self::POD[1]);
        namespace.ip_batch(&format!("route add default via {v4}\nroute add ::/0 via {v6}\n"))?;
        // What is not captured has to find its way through the pod and back.
        pod.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")?;
        let (v4, v6) = (pod_address(false), pod_address(true));
        mesh.topology
            .client
            .ip_batch(&format!("route add 10.2.0.0/24 via {v4}\nroute add fd00:20::/64 via {v6}\n"))?;
        let server = [
            TcpServer::start(&namespace, "guest", (any(false), 80))?,
            TcpServer::start(&namespace, "guest", (any(true), 80))?,
        ];
        let guest = Self { namespace, _server: server };
        for v6 in BOTH {
            process::until("the guest's way out", PATIENCE, &[], || {
                Ok(guest.client().tcp((remote_address(v6), 80))?.server().map(drop))
            })?;
        }
        Ok(guest)
    }

    fn client(&self) -> Client<'_> {
        Client::new(&self.namespace)
    }

    fn address(addresses: [&str; 2], v6: bool) -> IpAddr {
        addresses[usize::from(v6)].parse().expect("is an address")
    }
}

#[test]
fn what_comes_from_a_virtual_interface_is_outbound() -> Result<()> {
    for backend in ["", "--backend restore", "--native-nftables"] {
        let mesh = Mesh::new()?;
        let guest = Guest::new(&mesh)?;
        apply(mesh.pod(), &format!("--dual-stack -b * -i * -k vif0 {backend}"))?;
        for v6 in BOTH {
            let asked = SocketAddr::new(remote_address(v6), 80);
            assert_asked(guest.client().tcp(asked), "outbound", asked);
            assert_reaches(mesh.visit(v6, 8080), "inbound");
        }
        apply(
            mesh.pod(),
            &format!("--dual-stack -b * -i 198.51.100.1/32,2001:db8::1/128 -k vif0 {backend}"),
        )?;
        for v6 in BOTH {
            assert_reaches(guest.client().tcp((remote_address(v6), 80)), "outbound");
            assert_reaches(guest.client().tcp((other_address(v6), 80)), "remote");
        }
    }
    Ok(())
}

#[test]
fn a_redirect_leads_to_the_first_address_of_the_interface_that_a_packet_comes_in_by() -> Result<()> {
    let mesh = Mesh::new()?;
    let guest = Guest::new(&mesh)?;
    apply(mesh.pod(), "--dual-stack -b 3306 -i 198.51.100.0/24,2001:db8::/64 -k vif0")?;
    for change in [
        "true",
        "ip addr add 10.3.0.1/24 dev vif0; ip addr add fd00:30::1/64 dev vif0 nodad",
        "ip addr del 10.2.0.1/24 dev vif0; ip addr del fd00:20::1/64 dev vif0
         ip route add 10.2.0.2 dev vif0; ip route add fd00:20::2 dev vif0",
        "ip addr flush dev vif0; ip route replace 10.2.0.2 dev vif0; ip route replace fd00:20::2 dev vif0",
    ] {
        mesh.pod().sh(change)?;
        for v6 in BOTH {
            let own = SocketAddr::new(Guest::address(Guest::OWN, v6), 0);
            let packet = Packet::from_outside(own, SocketAddr::new(remote_address(v6), 80)).by("vif0");
            let live = mesh.pod().enter(|| Live::now(None, &ApplyOptions::default()))??;
            let trace = live.rules(packet.family(), None).trace(&packet);
            let moved = trace.steps.iter().find_map(|step| {
                if let TraceEvent::Changed(PacketEdit::Destination { destination: to }) = step {
                    Some(*to)
                } else {
                    None
                }
            });
            let wanted = moved.map(|to| ("outbound".to_owned(), to.ip(), to.port()));
            let patience = if wanted.is_some() { ANSWER } else { UNANSWERED };
            let seen = guest.client().patience(patience).tcp(packet.destination)?.report().ok();
            let delivered = seen.map(|report| (report.server, report.local.ip(), report.local.port()));
            assert_eq!(delivered, wanted, "{change}\n{}", trace.text(Detail::Every));
            let is_dropped = trace.fate() == Fate::Dropped;
            assert_eq!(is_dropped, wanted.is_none(), "{change}");
        }
    }
    Ok(())
}

#[test]
fn an_excluded_interface_is_left_alone_both_ways() -> Result<()> {
    for mode in ["", "-m TPROXY", "--backend restore", "--native-nftables"] {
        let mesh = Mesh::new()?;
        let guest = Guest::new(&mesh)?;
        let paths = |from_guest, to_guest| {
            for v6 in BOTH {
                assert_reaches(guest.client().tcp((Guest::address(Guest::POD, v6), 8080)), from_guest);
                assert_reaches(mesh.app().tcp((Guest::address(Guest::OWN, v6), 80)), to_guest);
                assert_reaches(mesh.visit(v6, 8080), "inbound");
                assert_reaches(mesh.app().tcp((remote_address(v6), 80)), "outbound");
            }
        };
        apply(mesh.pod(), &format!("--dual-stack -b * -i * {mode}"))?;
        paths("inbound", "outbound");
        apply(mesh.pod(), &format!("--dual-stack -b * -i * -c vif0 {mode}"))?;
        paths("app", "guest");
    }
    Ok(())
}

#[test]
fn packets_of_no_connection_are_dropped() -> Result<()> {
    for backend in ["", "--backend restore", "--force-iptables-binary legacy", "--native-nftables"] {
        let mesh = Mesh::new()?;
        let answered = |v6| mesh.topology.client.enter(|| Stray::new(v6)?.is_answered())?;
        apply(mesh.pod(), &format!("--dual-stack -b * -i * {backend}"))?;
        for v6 in BOTH {
            assert!(answered(v6)?, "the kernel resets what belongs to no connection ({backend})");
        }
        apply(mesh.pod(), &format!("--dual-stack -b * -i * --drop-invalid {backend}"))?;
        for v6 in BOTH {
            assert!(!answered(v6)?, "dropped, and therefore not reset ({backend})");
            assert_reaches(mesh.visit(v6, 8080), "inbound");
            assert_reaches(mesh.app().tcp((remote_address(v6), 80)), "outbound");
        }
    }
    Ok(())
}

/// A segment that belongs to no connection: a SYN-ACK that answers no SYN. Made by hand, on a raw socket.
struct Stray {
    /// Works on any socket that has datagrams.
    socket: UdpSocket,
    from: IpAddr,
    to: IpAddr,
}

impl Stray {
    const SYN: u8 = 0x02;
    const RST: u8 = 0x04;
    const SYN_ACK: u8 = 0x12;
    const STRAY_PORT: u16 = 50_001;
    const MARKER_PORT: u16 = 50_002;

    fn new(v6: bool) -> Result<Self> {
        let family = if v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
        let fd = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Tcp)?;
        let socket = UdpSocket::from(fd);
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { socket, from: client_address(v6), to: pod_address(v6) })
    }

    /// Whether the pod answers it with a reset. A SYN sent behind it is answered in any case; packets keep their order.
    fn is_answered(&self) -> Result<bool> {
        self.send(Self::STRAY_PORT, Self::SYN_ACK)?;
        self.send(Self::MARKER_PORT, Self::SYN)?;
        let deadline = Instant::now() + PATIENCE;
        let mut reset = false;
        while Instant::now() < deadline {
            match self.receive()? {
                (Self::STRAY_PORT, flags) => reset |= flags & Self::RST != 0,
                (Self::MARKER_PORT, _) => return Ok(reset),
                _ => {}
            }
        }
        anyhow::bail!("the pod does not answer a SYN")
    }

    fn send(&self, port: u16, flags: u8) -> Result<()> {
        let mut segment = Vec::new();
        segment.extend(port.to_be_bytes());
        segment.extend(8080_u16.to_be_bytes());
        segment.extend(1_u32.to_be_bytes());
        segment.extend(if flags == Self::SYN_ACK { 1_u32 } else { 0 }.to_be_bytes());
        segment.extend([5 << 4, flags]);
        segment.extend(65_535_u16.to_be_bytes());
        // The checksum's place, and no urgent data.
        segment.extend([0; 4]);
        let sum = self.checksum(&segment).to_be_bytes();
        segment[16..18].copy_from_slice(&sum);
        // A raw socket has no ports.
        self.socket.send_to(&segment, SocketAddr::new(self.to, 0))?;
        Ok(())
    }

    /// The pod's next segment to us: our port, and its flags.
    fn receive(&self) -> Result<(u16, u8)> {
        let mut buffer = [0; 2048];
        let (length, _) = self.socket.recv_from(&mut buffer).context("nothing comes back")?;
        // A raw IPv4 socket shows the header of the packet, an IPv6 one does not.
        let header = if self.to.is_ipv4() { usize::from(buffer[0] & 0xf) * 4 } else { 0 };
        ensure!(length >= header + 20, "too short");
        let segment = &buffer[header..];
        Ok((u16::from_be_bytes([segment[2], segment[3]]), segment[13]))
    }

    /// RFC 9293, section 3.1: over addresses, protocol and length too.
    fn checksum(&self, segment: &[u8]) -> u16 {
        let mut bytes = Vec::new();
        for address in [self.from, self.to] {
            match address {
                IpAddr::V4(address) => bytes.extend(address.octets()),
                IpAddr::V6(address) => bytes.extend(address.octets()),
            }
        }
        bytes.extend([0, 6]);
        bytes.extend(u16::try_from(segment.len()).expect("is short").to_be_bytes());
        bytes.extend(segment);
        let words = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
        let mut sum: u32 = words.sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).expect("is folded")
    }
}
