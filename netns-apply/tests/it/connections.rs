//! Real connections in real network namespaces, opened before the rules. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use netns_apply::{
    ApplyOptions, apply,
    connections::{ClosedConnections, sever, socket_groups},
    facts,
};
use nix::sys::{
    socket::{
        setsockopt,
        sockopt::{Linger, ReceiveTimeout},
    },
    time::{TimeVal, TimeValLike as _},
};
use redirect_core::{
    RulePlan,
    pod::{Decision, PodFacts},
    settings::NamespaceFacts,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{ErrorKind, Read, Write},
    net::{IpAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};
use test_support::netns::{Families, Namespace, Topology, remote_address};

/// How long an answer may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn plan(annotations: &[(&str, &str)]) -> RulePlan {
    let mut facts = PodFacts::sidecar(annotations.iter().copied());
    let proxy = facts.proxy.as_mut().unwrap();
    proxy.env.insert("ISTIO_DUAL_STACK".into(), "true".into());
    proxy.env.insert("ISTIO_META_DNS_CAPTURE".into(), "true".into());
    match facts.decide(&NamespaceFacts::new(&facts::addresses().unwrap())).unwrap() {
        Decision::Redirect(redirect) => redirect.plan(),
        Decision::Skip(reason) => panic!("{reason}"),
    }
}

fn groups_here(inodes: &BTreeSet<u32>) -> BTreeMap<u32, u32> {
    let here = netns_apply::netns::Netns::open("/proc/thread-self/ns/net").unwrap().id();
    socket_groups(Path::new("/proc"), here, inodes)
}

fn redirect(pod: &Namespace, annotations: &[(&str, &str)]) -> ClosedConnections {
    pod.enter(|| {
        let plan = plan(annotations);
        apply(&plan, &ApplyOptions::default()).unwrap();
        sever(&plan, &groups_here).unwrap()
    })
    .unwrap()
}

/// A connection from one namespace to a listener in another: both ends.
fn connect(from: &Namespace, to: &Namespace, address: IpAddr, port: u16) -> (TcpStream, TcpStream) {
    let listener = to.enter(|| TcpListener::bind((address, port))).unwrap().unwrap();
    let one = from.enter(|| TcpStream::connect((address, port))).unwrap().unwrap();
    let (other, _) = listener.accept().unwrap();
    for stream in [&one, &other] {
        stream.set_read_timeout(Some(LONG)).unwrap();
    }
    // It listens as long as its connection may be asked for.
    std::mem::forget(listener);
    (one, other)
}

fn is_alive((one, other): &mut (TcpStream, TcpStream)) -> bool {
    let mut byte = [0];
    match one.write_all(b"x").and_then(|()| other.read_exact(&mut byte)) {
        Ok(()) => true,
        Err(error) => {
            let kinds = [
                ErrorKind::ConnectionAborted,
                ErrorKind::ConnectionReset,
                ErrorKind::BrokenPipe,
                ErrorKind::UnexpectedEof,
            ];
            assert!(kinds.contains(&error.kind()), "{error}");
            false
        }
    }
}

#[test]
fn connections_that_were_open_before_do_not_go_on_beside_the_proxy() {
    for v6 in [false, true] {
        for tracked in [false, true] {
            let topology = Topology::new(Families::Dual).unwrap();
            if tracked {
                // As if a rule had matched connections before: the kernel tracks them.
                topology.pod.sh("nft 'table inet t { chain c { type filter hook output priority 0; ct state new counter; }; }'").unwrap().ok().unwrap();
            }
            let remote = remote_address(v6);
            let own = test_support::netns::pod_address(v6);
            let mut out = connect(&topology.pod, &topology.client, remote, 80);
            let mut excluded = connect(&topology.pod, &topology.client, remote, 3306);
            let mut inward = connect(&topology.client, &topology.pod, own, 8080);
            let mut open_door = connect(&topology.client, &topology.pod, own, 15021);
            let mut itself = connect(&topology.pod, &topology.pod, own, 9090);
            let severed =
                redirect(&topology.pod, &[("traffic.sidecar.istio.io/excludeOutboundPorts", "3306")]);
            assert_eq!(severed.sockets, 2, "v6 {v6}, tracked {tracked}: {severed:?}");
            assert!(!is_alive(&mut out) && !is_alive(&mut inward), "v6 {v6}, tracked {tracked}");
            assert!(
                is_alive(&mut excluded) && is_alive(&mut open_door) && is_alive(&mut itself),
                "v6 {v6}, tracked {tracked}"
            );
            // And what it leaves alone it leaves alone for ever.
            assert_eq!(
                topology
                    .pod
                    .enter(|| {
                        let plan = plan(&[("traffic.sidecar.istio.io/excludeOutboundPorts", "3306")]);
                        sever(&plan, &groups_here)
                    })
                    .unwrap(),
                Ok(ClosedConnections::default())
            );
        }
    }
}

#[test]
fn connections_that_the_rules_have_captured_go_on() {
    let topology = Topology::new(Families::Dual).unwrap();
    redirect(&topology.pod, &[]);
    let proxy = topology.pod.enter(|| TcpListener::bind("0.0.0.0:15001")).unwrap().unwrap();
    let inbound = topology.pod.enter(|| TcpListener::bind("0.0.0.0:15006")).unwrap().unwrap();
    let remote = remote_address(false);
    let own = test_support::netns::pod_address(false);
    let out = topology.pod.enter(|| TcpStream::connect((remote, 80))).unwrap().unwrap();
    let come = topology.client.enter(|| TcpStream::connect((own, 8080))).unwrap().unwrap();
    let mut pairs = [(out, proxy.accept().unwrap().0), (come, inbound.accept().unwrap().0)];
    assert_eq!(redirect(&topology.pod, &[]), ClosedConnections::default());
    for pair in &mut pairs {
        pair.1.set_read_timeout(Some(LONG)).unwrap();
        assert!(is_alive(pair));
    }
}

/// With TPROXY the proxy runs as root, like many an application, and nothing is translated.
#[test]
fn with_tproxy_the_proxys_own_connections_go_on() {
    let topology = Topology::new(Families::Dual).unwrap();
    let (remote, own) = (remote_address(false), test_support::netns::pod_address(false));
    let to_control_plane = topology.client.enter(|| TcpListener::bind((remote, 15012))).unwrap().unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let script = format!("sleep 600 | busybox nc {remote} 15012");
    let proxy =
        test_support::process::command("setpriv", ["--regid=1337", "--clear-groups", "sh", "-c", &script]);
    let _proxy = test_support::process::Background::start("proxy", &topology.pod.command(&proxy), log.path())
        .unwrap()
        .killed_on_drop();
    let (mut control_plane, _) = to_control_plane.accept().unwrap();
    let mut beside = connect(&topology.pod, &topology.client, remote, 80);
    let mut inward = connect(&topology.client, &topology.pod, own, 8080);

    let tproxy = [("sidecar.istio.io/interceptionMode", "TPROXY")];
    assert_eq!(redirect(&topology.pod, &tproxy).sockets, 2);
    assert!(!is_alive(&mut beside) && !is_alive(&mut inward));
    control_plane.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let nothing = control_plane.read(&mut [0]).unwrap_err();
    assert!([ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&nothing.kind()), "{nothing}");

    // What the proxy opens in a client's name reaches the application, whose end looks as if the client had come past the proxy.
    let application = topology.pod.enter(|| TcpListener::bind((own, 8081))).unwrap().unwrap();
    let client = test_support::netns::client_address(false);
    let named = topology.pod.enter(|| open_in_the_name_of(client, (own, 8081).into())).unwrap();
    let mut pair = (named, application.accept().unwrap().0);
    assert_eq!(pair.1.peer_addr().unwrap().ip(), client);
    pair.1.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(redirect(&topology.pod, &tproxy), ClosedConnections::default());
    assert!(is_alive(&mut pair));
}

/// As Envoy does with its filter `original_src`.
fn open_in_the_name_of(client: IpAddr, to: std::net::SocketAddr) -> TcpStream {
    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
    };
    use std::os::fd::AsRawFd;
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&fd, sockopt::IpTransparent, &true).unwrap();
    setsockopt(&fd, sockopt::Mark, &1337).unwrap();
    bind(fd.as_raw_fd(), &SockaddrStorage::from(std::net::SocketAddr::new(client, 0))).unwrap();
    connect(fd.as_raw_fd(), &SockaddrStorage::from(to)).unwrap();
    TcpStream::from(fd)
}

#[test]
fn connections_that_are_captured_while_others_are_looked_for_go_on() {
    const CALLS: usize = 3000;
    let topology = Topology::new(Families::Dual).unwrap();
    redirect(&topology.pod, &[]);
    let proxy = topology.pod.enter(|| TcpListener::bind("0.0.0.0:15001")).unwrap().unwrap();
    // Time to see that all is done: of accept(2) too (socket(7)).
    setsockopt(&proxy, ReceiveTimeout, &TimeVal::milliseconds(50)).unwrap();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                drop(proxy.accept());
            }
        });
        let looks = scope.spawn(|| {
            let mut closed = ClosedConnections::default();
            topology
                .pod
                .enter(|| {
                    let plan = plan(&[]);
                    while !is_done.load(Ordering::Relaxed) {
                        closed.sockets += sever(&plan, &groups_here).unwrap().sockets;
                    }
                })
                .unwrap();
            closed
        });
        topology
            .pod
            .enter(|| {
                for _ in 0..CALLS {
                    if let Ok(call) = TcpStream::connect((remote_address(false), 80)) {
                        // A reset leaves no socket that waits: the lists stay short, and are made often.
                        setsockopt(&call, Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
                    }
                }
            })
            .unwrap();
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(looks.join().unwrap(), ClosedConnections::default());
    });
}

#[test]
fn datagrams_that_were_tracked_before_meet_the_rules() {
    let topology = Topology::new(Families::Dual).unwrap();
    topology.pod.sh("nft 'table inet t { chain c { type nat hook output priority -100; udp dport 9 redirect to :9; }; }'").unwrap().ok().unwrap();
    let remote = remote_address(false);
    let server = topology.client.enter(|| UdpSocket::bind((remote, 53))).unwrap().unwrap();
    // Not connected: it cannot be aborted, and keeps the same ports.
    let resolver = topology.pod.enter(|| UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
    let connected = topology.pod.enter(|| UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
    topology.pod.enter(|| connected.connect((remote, 53))).unwrap().unwrap();
    for socket in [&server, &resolver, &connected] {
        socket.set_read_timeout(Some(LONG)).unwrap();
    }
    let mut buffer = [0; 8];
    resolver.send_to(b"before", (remote, 53)).unwrap();
    let (_, from) = server.recv_from(&mut buffer).unwrap();
    server.send_to(b"answer", from).unwrap();
    resolver.recv_from(&mut buffer).unwrap();

    let severed = redirect(&topology.pod, &[]);
    assert_eq!((severed.sockets, severed.tracked), (1, 1), "{severed:?}");
    let agent = topology.pod.enter(|| UdpSocket::bind("127.0.0.1:15053")).unwrap().unwrap();
    agent.set_read_timeout(Some(LONG)).unwrap();
    resolver.send_to(b"after", (remote, 53)).unwrap();
    let (length, _) = agent.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"after");
    connected.send(b"x").unwrap_err();
}
