//! Who listens in a pod, by both ways in which `redirectctl` asks the kernel.

use std::env::consts::ARCH;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};

use netns_apply::connections;
use redirectctl::listeners::listeners;
use seccompiler::{apply_filter, compile_from_json};
use test_support::netns::{Families, Namespace};

/// No netlink sockets (`AF_NETLINK`), as on a kernel without inet_diag: `EAFNOSUPPORT`.
const NO_NETLINK: &str = r#"{"it": {"mismatch_action": "allow", "match_action": {"errno": 97}, "filter":
    [{"syscall": "socket", "args": [{"index": 0, "type": "dword", "op": "eq", "val": 16}]}]}}"#;

#[test]
fn both_ways_to_ask_list_the_same() {
    let there = Namespace::pod(Families::Dual).expect("a namespace");
    let any6: IpAddr = Ipv6Addr::UNSPECIFIED.into();
    let loopback: IpAddr = Ipv4Addr::LOCALHOST.into();
    let arch = ARCH.try_into().expect("a known architecture");
    let no_netlink = compile_from_json(NO_NETLINK.as_bytes(), arch).expect("a filter");
    let (asked, in_proc) = there
        .enter(|| {
            let listener = TcpListener::bind((any6, 15001)).expect("binds");
            let _own = TcpListener::bind((loopback, 15006)).expect("binds");
            let _open = UdpSocket::bind((any6, 15053)).expect("binds");
            // None of these three waits for a peer to send first.
            let connected = UdpSocket::bind((loopback, 0)).expect("binds");
            connected.connect((loopback, 15053)).expect("connects");
            let _there = TcpStream::connect((loopback, 15001)).expect("connects");
            let _accepted = listener.accept().expect("accepts");
            let asked = connections::listeners().map(|_| listeners());
            // For this thread alone, which ends here.
            apply_filter(&no_netlink["it"]).expect("filters");
            connections::listeners().expect_err("there is no netlink any more");
            (asked, listeners())
        })
        .expect("enters");
    let asked = asked.expect("this kernel has inet_diag").expect("lists");
    assert_eq!(asked, in_proc.expect("lists"));
    let ports: Vec<(&str, u16)> = asked.iter().map(|one| (one.protocol.name(), one.port)).collect();
    assert_eq!(ports, [("tcp", 15001), ("tcp", 15006), ("udp", 15053)]);
}
