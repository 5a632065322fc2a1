//! The harness tested by itself: what it makes works and is gone afterwards.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use e2e::traffic::{Client, Outcome, PROXY_ID, TcpServer, UdpServer};
use serde_json::Value;
use test_support::netns::{
    Families, Namespace, POD_V4, POD_V6, State, Topology, client_address, pod_address, remote_address,
};
use test_support::process;
use test_support::project;

#[test]
fn a_namespace_comes_and_goes() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.set_nameservers(&["10.96.0.10"])?;
    let (path, etc) = (namespace.path(), Path::new("/etc/netns").join(namespace.name()));

    let shown = namespace.sh("cat /etc/resolv.conf; ip -o addr show dev eth0")?.stdout;
    assert!(shown.contains("nameserver 10.96.0.10"), "{shown}");
    assert!(shown.contains(&format!("{POD_V4}/24")) && shown.contains(&format!("{POD_V6}/64")), "{shown}");
    let state = namespace.state_with_nft()?;
    assert!(state.is_pristine(), "{state:?}");
    assert_eq!(state.lo, ["127.0.0.1/8", "::1/128"]);

    drop(namespace);
    assert!(!path.exists() && !etc.exists());
    Ok(())
}

#[test]
fn a_namespace_is_gone_after_a_panic() {
    let panicked = std::thread::spawn(|| {
        let namespace = Namespace::pod(Families::Dual).expect("makes a namespace");
        std::panic::panic_any(namespace.path());
    });
    let path = panicked.join().expect_err("the thread panics");
    let path = path.downcast::<PathBuf>().expect("with the path");
    assert!(!path.exists());
}

#[test]
fn a_namespace_without_a_family_has_no_address_of_it() -> Result<()> {
    let v4 = Namespace::pod(Families::V4)?;
    assert_eq!(v4.state()?.lo, ["127.0.0.1/8"]);
    assert!(!v4.sh("ip -o addr")?.stdout.contains("inet6"));
    let v6 = Namespace::pod(Families::V6)?;
    assert!(!v6.sh("ip -o addr show dev eth0")?.stdout.contains("inet "));
    Ok(())
}

#[test]
fn the_state_shows_rules_of_both_variants_and_families() -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    namespace.sh("iptables-nft -t nat -A OUTPUT -p tcp -j RETURN; ip6tables-legacy -t nat -N MINE")?;
    namespace.sh("ip rule add fwmark 0x539 lookup 133; ip -6 route add local default dev lo table 133")?;
    namespace.sh("nft add table inet istio-test; nft 'add chain inet istio-test mine'")?;
    let state = namespace.state_with_nft()?;
    assert_eq!(state.v4["nat"]["OUTPUT"], ["-A OUTPUT -p tcp -j RETURN"]);
    assert!(state.v6["nat"]["MINE"].is_empty());
    assert_eq!(state.rule4, ["from all fwmark 0x539 lookup 133"]);
    assert!(state.rule6.is_empty() && state.route4.is_empty());
    assert!(state.route6[0].starts_with("local default dev lo table 133"), "{:?}", state.route6);
    assert_eq!(state.nft.keys().collect::<Vec<_>>(), ["table inet istio-test / chain mine"]);
    assert!(!state.is_pristine());

    namespace.sh("iptables-legacy -t nat -A OUTPUT -p udp -j RETURN")?;
    let both = namespace.state()?.v4;
    assert!(both.contains_key("BOTH BACKENDS PROGRAMMED"), "{both:?}");
    Ok(())
}

#[test]
fn a_recording_equals_the_state_its_input_makes() -> Result<()> {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../../fixtures/rules.json"))?;
    let case = cases.iter().find(|case| case["name"] == "inbound-all").expect("is recorded");
    let namespace = Namespace::pod(Families::Dual)?;
    let input = case["restore_input"][0]["lines"].as_array().expect("lines").iter();
    let input: String = input.map(|line| format!("{}\n", line.as_str().unwrap_or_default())).collect();
    let mut restore = namespace.command(&process::command("iptables-nft-restore", ["--noflush"]));
    process::run_with_input(&mut restore, &input.replace("* nat", "*nat"), process::SHORT)?.ok()?;

    let (got, want) = (namespace.state()?.without_routes_and_addresses(), State::recorded(case)?);
    assert_eq!(got.differences(&want), Vec::<String>::new());
    assert!(!got.is_pristine());
    Ok(())
}

#[test]
fn a_server_reports_what_was_asked_for_before_a_redirect() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    for (v6, iptables, any) in [(false, "iptables", "0.0.0.0:15006"), (true, "ip6tables", "[::]:15006")] {
        let any: SocketAddr = any.parse()?;
        let _proxy = TcpServer::start(&topology.pod, "inbound", any)?;
        topology
            .pod
            .sh(&format!("{iptables}-nft -t nat -A PREROUTING -p tcp -j REDIRECT --to-ports 15006"))?;
        let asked = SocketAddr::new(pod_address(v6), 8080);
        let report = Client::new(&topology.client).tcp(asked)?.report()?;
        assert_eq!(report.server, "inbound");
        assert_eq!(report.peer.ip(), client_address(v6));
        assert_eq!(report.original, Some(asked));
        assert_eq!(report.local.port(), 15006);
    }
    Ok(())
}

#[test]
fn a_client_has_the_user_source_and_mark_it_is_given() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    let remote = TcpServer::start(&topology.client, "remote", (remote_address(false), 80))?;
    let reject = "iptables-nft -A OUTPUT -p tcp -j REJECT --reject-with tcp-reset";
    topology
        .pod
        .sh(&format!("{reject} -m owner --uid-owner {PROXY_ID} --gid-owner {PROXY_ID} -m mark --mark 7"))?;
    let client = Client::new(&topology.pod);
    assert_eq!(client.clone().as_proxy().mark(7).tcp(remote.address())?, Outcome::Refused);
    for other in [client.clone().mark(7), client.clone().as_proxy(), client.user(PROXY_ID, 1).mark(7)] {
        assert_eq!(other.tcp(remote.address())?.server(), Some("remote"));
    }
    topology.pod.add_address("lo", "10.9.9.9/32")?;
    topology.client.sh("ip route add 10.9.9.9/32 dev eth0")?;
    let report = Client::new(&topology.pod).from([10, 9, 9, 9]).tcp(remote.address())?.report()?;
    assert_eq!(report.peer.ip().to_string(), "10.9.9.9");
    assert_eq!(remote.accepted().len(), 4);
    Ok(())
}

#[test]
fn outcomes_tell_silence_from_refusal() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    let client = Client::new(&topology.client);
    for v6 in [false, true] {
        let nobody = SocketAddr::new(pod_address(v6), 9);
        assert_eq!(client.tcp(nobody)?, Outcome::Refused);
        assert_eq!(client.udp(nobody)?, Outcome::Refused);
    }
    topology.pod.sh("iptables-nft -A INPUT -p tcp -j DROP")?;
    let impatient = client.clone().patience(Duration::from_millis(300));
    assert_eq!(impatient.tcp(SocketAddr::new(pod_address(false), 9))?, Outcome::NoAnswer);
    let nowhere: SocketAddr = "203.0.113.1:80".parse()?;
    assert!(matches!(client.tcp(nowhere)?, Outcome::Unreachable(_)));
    Ok(())
}

#[test]
fn a_transparent_server_is_reached_through_tproxy() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    for (v6, iptables, ip, any) in
        [(false, "iptables", "ip -4", "0.0.0.0:15006"), (true, "ip6tables", "ip -6", "[::]:15006")]
    {
        let any: SocketAddr = any.parse()?;
        let _proxy = TcpServer::start_transparent(&topology.pod, "inbound", any)?;
        topology.pod.sh(&format!(
            "{iptables}-nft -t mangle -A PREROUTING -p tcp -i eth0 -j TPROXY --on-port 15006 --tproxy-mark 1337
             {ip} rule add fwmark 1337 lookup 133
             {ip} route add local default dev lo table 133"
        ))?;
        let asked = SocketAddr::new(pod_address(v6), 8080);
        let report = Client::new(&topology.client).tcp(asked)?.report()?;
        assert_eq!((report.server.as_str(), report.local), ("inbound", asked));
    }
    Ok(())
}

#[test]
fn a_udp_server_answers() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    for v6 in [false, true] {
        let server = UdpServer::start(&topology.pod, "dns", (pod_address(v6), 53))?;
        let report = Client::new(&topology.client).udp(server.address())?.report()?;
        assert_eq!((report.server.as_str(), report.peer.ip()), ("dns", client_address(v6)));
        assert_eq!(server.received(), [report]);
    }
    Ok(())
}

#[test]
fn a_command_that_hangs_is_ended() {
    let start = std::time::Instant::now();
    let mut command = process::command("sh", ["-c", "echo hello; sleep infinity"]);
    let error = process::run(&mut command, Duration::from_secs(3)).expect_err("does not end");
    assert!(error.to_string().contains("hello"), "{error}");
    assert!(start.elapsed() < process::EARLY);
}

/// Where a disk fills up while tests run, each of them fails in its own words.
#[test]
fn a_disk_that_is_too_small_is_told_before_anything_is_compiled() -> Result<()> {
    let disk = tempfile::tempdir()?;
    let script = project::file("scripts/test.sh");
    let inside = r#"mount -t tmpfs -o size=64m none "$1" && { CARGO_TARGET_DIR=$1/new/target "$2"; code=$?; ls "$1"; exit $code; }"#;
    let mut command = process::command("unshare", ["--mount", "sh", "-c", inside, "sh"]);
    let output = process::run(command.arg(disk.path()).arg(script), process::SHORT)?;
    assert_eq!(output.code(), Some(1), "{output:?}");
    assert!(output.stderr.contains(&format!("1 are free in {};", disk.path().display())), "{output:?}");
    assert_eq!(output.stdout, "", "{output:?}");
    Ok(())
}
