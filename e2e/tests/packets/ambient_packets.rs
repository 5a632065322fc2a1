//! Where real packets go under the rules of `install-cni ambient`: both families, both backends, each compared with the trace of
//! the plan and with that of the rules in force.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::ambient_support::run;
use anyhow::{Context, Result, ensure};
use e2e::iptables::mesh::{Mesh, loopback};
use e2e::program;
use e2e::traffic::{ANSWER, Client, Outcome, Report, TcpServer, UdpServer};
use netns_apply::{ApplyOptions, Live};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use packet_trace::{Detail, Fate, Listener, Packet, TraceRules};
use redirect_core::ambient::ProbeSources;
use redirect_core::options::BackendChoice;
use redirect_core::settings::{Key, RawSettings, Setting, Source};
use redirect_core::{AmbientRedirect, Families, Family};
use test_support::netns::{client_address, pod_address, remote_address};
use test_support::process::{self, Output};

const BOTH: [bool; 2] = [false, true];
/// ztunnel's mark, alone and beside bits of others.
const ZTUNNEL: [u32; 2] = [0x539, 0x12539];
/// How long somebody waits who expects no answer.
const IMPATIENT: Duration = Duration::from_secs(2);
/// A mark of another program's packets.
const OTHER_MARK: u32 = 0x7_0000;

/// Who sends a packet.
#[derive(Debug, Clone, Copy)]
enum From {
    /// The application.
    App,
    /// Whoever sets this mark.
    Marked(u32),
    /// A peer outside.
    Outside,
    /// The kubelet, by the address that the node gives to its probes.
    Probe,
}

/// A packet, and who has to get it: the name of a server, and whether it learns the destination that the sender asked for.
type Case = (From, IpAddr, u16, bool, &'static str);

/// A pod in ambient mode, and a plan that was put in force in it.
struct Pod {
    mesh: Mesh,
    redirect: AmbientRedirect,
    backend: BackendChoice,
    /// The kubelet's probes come from here, and calls to that address go there.
    _probe: [TcpServer; 2],
    _dns: [UdpServer; 2],
}

impl Pod {
    fn new(backend: &str, redirect: AmbientRedirect, words: &str) -> Result<Self> {
        let mesh = Mesh::new()?;
        let client = &mesh.topology.client;
        for v6 in BOTH {
            client.add_address("lo", &format!("{}/{}", probe(v6), if v6 { 128 } else { 32 }))?;
        }
        let server = |v6| TcpServer::start(client, "kubelet", (probe(v6), 10250));
        let probe = [server(false)?, server(true)?];
        // Other names than those of a resolver, on a port of their own.
        let datagrams = |v6| UdpServer::start(mesh.pod(), "app", (pod_address(v6), 8080));
        let dns = [datagrams(false)?, datagrams(true)?];
        run(mesh.pod(), &format!("apply --backend {backend} {words}"))?.ok()?;
        let backend = if backend == "native" { BackendChoice::NativeNft } else { BackendChoice::Netlink };
        Ok(Self { mesh, redirect, backend, _probe: probe, _dns: dns })
    }

    /// What becomes of each packet, as a server tells it, as the plan's trace and as the live rules' trace says.
    fn assert(&self, cases: &[Case]) -> Result<()> {
        let plan = self.redirect.plan();
        let live = self.mesh.pod().enter(|| Live::now(None, &ApplyOptions::default()))??;
        for (from, to, port, is_udp, wanted) in cases.iter().copied() {
            let what = format!("{:?}: {from:?} to {to} port {port} udp {is_udp}", self.backend);
            let target = SocketAddr::new(to, port);
            let outcome = self.send(from, target, is_udp)?;
            let report = outcome.report().with_context(|| what.clone())?;
            ensure!(report.server == wanted, "{what}: {report:?} instead of {wanted}");
            is_told_the_destination(&report, target, is_udp).with_context(|| what.clone())?;
            let packet = packet(from, target, is_udp);
            let family = packet.family();
            for rules in [
                TraceRules::of_plan_in(&plan, family, self.backend),
                live.rules(family, Some(&plan)),
                live.rules(family, None),
            ] {
                let trace = rules.trace(&packet);
                ensure!(agrees(trace.fate(), wanted), "{what}: {wanted}\n{}", trace.text(Detail::Every));
            }
        }
        Ok(())
    }

    fn send(&self, from: From, to: SocketAddr, is_udp: bool) -> Result<Outcome> {
        let client = match from {
            From::App => self.mesh.app(),
            From::Marked(mark) => self.mesh.app().mark(mark),
            From::Outside => Client::new(&self.mesh.topology.client),
            From::Probe => Client::new(&self.mesh.topology.client).from(probe(to.is_ipv6())),
        };
        if is_udp { client.udp(to) } else { client.tcp(to) }
    }
}

/// Whom REDIRECT brings a connection knows whom it was for.
fn is_told_the_destination(report: &Report, target: SocketAddr, is_udp: bool) -> Result<()> {
    let is_told = is_udp || report.original.is_none_or(|original| original == target);
    ensure!(is_told, "{report:?}");
    let is_redirected = ["outbound", "inbound", "dns"].contains(&report.server.as_str()) && !is_udp;
    ensure!(!is_redirected || report.original == Some(target), "{report:?}");
    Ok(())
}

fn agrees(fate: Fate, server: &str) -> bool {
    match (fate, server) {
        (Fate::Proxy { listener: Listener::Outbound, port: 15001, .. }, "outbound")
        | (Fate::Proxy { listener: Listener::Inbound, port: 15006, .. }, "inbound")
        | (Fate::Proxy { listener: Listener::Dns, port: 15053, .. }, "dns") => true,
        (fate, server) => fate == Fate::Untouched && !["outbound", "inbound", "dns"].contains(&server),
    }
}

fn packet(from: From, to: SocketAddr, is_udp: bool) -> Packet {
    let v6 = to.is_ipv6();
    let at = |address| SocketAddr::new(address, 40_000);
    let sent = |mark| {
        let source = if to.ip().is_loopback() { to.ip() } else { pod_address(v6) };
        let packet = Packet::from_pod(1000, 1000, at(source), to);
        let stays = to.ip() == source;
        if stays { packet } else { packet.by("eth0") }.with_mark(mark)
    };
    let packet = match from {
        From::App => sent(0),
        From::Marked(mark) => sent(mark),
        From::Outside => Packet::from_outside(at(client_address(v6)), to).by("eth0"),
        From::Probe => Packet::from_outside(at(probe(v6)), to).by("eth0"),
    };
    if is_udp { packet.over_udp() } else { packet }
}

fn probe(v6: bool) -> IpAddr {
    ProbeSources::USUAL.of(if v6 { Family::V6 } else { Family::V4 })
}

/// What every plan does.
fn usual(v6: bool, inbound: &'static str, dns: [&'static str; 2]) -> Vec<Case> {
    let (pod, far) = (pod_address(v6), remote_address(v6));
    let [over_udp, over_tcp] = dns;
    let mut cases = vec![
        (From::App, far, 80, false, "outbound"),
        (From::App, far, 4443, false, "outbound"),
        (From::Marked(OTHER_MARK), far, 80, false, "outbound"),
        (From::Outside, pod, 8080, false, inbound),
        (From::Outside, pod, 15008, false, "app"),
        (From::Outside, pod, 8080, true, "app"),
        (From::Probe, pod, 8080, false, "app"),
        (From::App, probe(v6), 10250, false, "kubelet"),
        // By whatever address, the pod calls itself without ztunnel.
        (From::App, pod, 8080, false, "app"),
        (From::App, loopback(v6), 8080, false, "app"),
        (From::App, far, 53, true, over_udp),
        (From::App, far, 53, false, over_tcp),
    ];
    for mark in ZTUNNEL {
        cases.push((From::Marked(mark), far, 80, false, "remote"));
        cases.push((From::Marked(mark), far, 53, true, "resolver"));
        cases.push((From::Marked(mark), far, 53, false, "remote"));
        cases.push((From::Marked(mark), pod, 8080, false, "app"));
    }
    cases
}

#[test]
fn packets_go_where_the_plan_says_without_dns_capture() -> Result<()> {
    for backend in ["netlink", "native"] {
        let pod = Pod::new(backend, AmbientRedirect::new(Families::Both), "")?;
        for v6 in BOTH {
            pod.assert(&usual(v6, "inbound", ["resolver", "outbound"]))?;
        }
    }
    Ok(())
}

#[test]
fn packets_go_where_the_plan_says_with_dns_capture() -> Result<()> {
    for backend in ["netlink", "native"] {
        let redirect = AmbientRedirect::new(Families::Both).with_dns_capture(true);
        let pod = Pod::new(backend, redirect, "--dns-proxy=true")?;
        for v6 in BOTH {
            pod.assert(&usual(v6, "inbound", ["dns", "dns"]))?;
        }
        run(pod.mesh.pod(), "remove")?.ok()?;
        for v6 in BOTH {
            for (port, is_udp, server) in [(80, false, "remote"), (53, true, "resolver")] {
                let outcome = pod.send(From::App, (remote_address(v6), port).into(), is_udp)?;
                ensure!(outcome.server() == Some(server), "removed: {outcome:?}");
            }
        }
    }
    Ok(())
}

/// `redirectctl verify` finds nothing wrong where ztunnel listens, and names the rule that somebody removed.
#[test]
fn redirectctl_compares_a_namespace_with_the_plan() -> Result<()> {
    for (backend, native, removes) in [
        ("netlink", "", "iptables-nft -t nat -F ISTIO_PRERT"),
        ("native", "--native-nftables", "nft flush chain inet istio-ambient-nat istio-prert"),
    ] {
        let redirect = AmbientRedirect::new(Families::Both).with_dns_capture(true);
        let pod = Pod::new(backend, redirect, "--redirect-dns")?;
        let verify = || -> Result<Output> {
            let program = program::under_test("redirectctl")?;
            let mut command = process::command(program, ["verify", "--ambient", "--redirect-dns", "--netns"]);
            command.arg(pod.mesh.pod().path()).args(native.split_whitespace());
            process::run(&mut command, process::SHORT)
        };
        let whole = verify()?;
        ensure!(whole.code() == Some(0) && whole.stdout.contains("node's ztunnel"), "{backend}: {whole:?}");
        pod.mesh.pod().sh(removes)?;
        let damaged = verify()?;
        let is_told = ["rules-differ", "15006"].iter().all(|word| damaged.stdout.contains(word));
        ensure!(damaged.code() == Some(2) && is_told, "{backend}: {damaged:?}");
    }
    Ok(())
}

#[test]
fn a_gateway_gets_what_is_sent_to_it() -> Result<()> {
    for backend in ["netlink", "native"] {
        let redirect = AmbientRedirect::new(Families::Both).with_inbound_capture(false);
        let pod = Pod::new(backend, redirect, "--ingress")?;
        for v6 in BOTH {
            pod.assert(&usual(v6, "app", ["resolver", "outbound"]))?;
        }
    }
    Ok(())
}

#[test]
fn what_comes_from_a_virtual_interface_is_outbound() -> Result<()> {
    for backend in ["netlink", "native"] {
        let redirect = AmbientRedirect::new(Families::Both).with_virtual_interfaces(["eth0".parse()?]);
        let pod = Pod::new(backend, redirect, "--virtual-interfaces eth0")?;
        for v6 in BOTH {
            pod.assert(&[
                (From::Outside, pod_address(v6), 8080, false, "outbound"),
                (From::App, remote_address(v6), 80, false, "outbound"),
            ])?;
        }
    }
    Ok(())
}

#[test]
fn ipv6_alone_can_be_left_alone() -> Result<()> {
    let pod = Pod::new("netlink", AmbientRedirect::new(Families::V4), "--ipv6=false")?;
    pod.assert(&usual(false, "inbound", ["resolver", "outbound"]))?;
    let outcome = pod.send(From::App, (remote_address(true), 80).into(), false)?;
    ensure!(outcome.server() == Some("remote"), "{outcome:?}");
    Ok(())
}

/// A plan with these annotations, and the flags that ask for the same.
fn limited(annotations: &[(&'static str, &'static str)]) -> Result<(AmbientRedirect, String)> {
    let mut raw = RawSettings::for_pod();
    raw.set(Key::AmbientCaptureScope, "true", Source::CommandLine);
    raw.set(Key::AmbientDnsCapture, "true", Source::CommandLine);
    let of = |name: &str| annotations.iter().find(|(one, _)| *one == name).map(|(_, text)| *text);
    raw.read_ambient_annotations(of);
    let flag = |setting: &Setting| {
        let text = setting.annotations.iter().find_map(|name| of(name))?;
        // Flags write ranges of ports in another way.
        Some(format!(" --{}={}", setting.flag?, text.replace('-', ":")))
    };
    let flags: String = Setting::AMBIENT.iter().filter_map(flag).collect();
    Ok((AmbientRedirect::parse(&raw)?, format!("--redirect-dns{flags}")))
}

/// What a pod limits, by which annotation, and where packets go then.
fn limits(v6: bool) -> Vec<(&'static str, &'static str, Vec<Case>)> {
    const FAR: &str = "198.51.100.0/24,2001:db8::/32";
    const ELSEWHERE: &str = "192.0.2.0/24,2001:db9::/32";
    let (pod, far, near) = (pod_address(v6), remote_address(v6), client_address(v6));
    let sent = |name, value, to: &[(IpAddr, u16, &'static str)]| {
        let case = |(to, port, server): &(IpAddr, u16, &'static str)| (From::App, *to, *port, false, *server);
        (name, value, to.iter().map(case).collect())
    };
    let received = |name, value, server| {
        (
            name,
            value,
            vec![(From::Outside, pod, 8080, false, server), (From::Outside, pod, 15008, false, "app")],
        )
    };
    let (app, outbound) = ((pod, 8080, "app"), (far, 80, "outbound"));
    vec![
        sent(
            "traffic.istio.io/excludeOutboundPorts",
            "4443,53",
            &[outbound, (far, 4443, "remote"), (far, 53, "remote")],
        ),
        sent(
            "traffic.istio.io/excludeOutboundIPRanges",
            FAR,
            &[(near, 80, "outbound"), (far, 80, "remote"), (far, 53, "dns")],
        ),
        sent(
            "traffic.istio.io/includeOutboundIPRanges",
            FAR,
            &[outbound, (near, 80, "remote"), (far, 53, "dns")],
        ),
        sent(
            "traffic.istio.io/includeOutboundIPRanges",
            ELSEWHERE,
            &[(far, 80, "remote"), (far, 53, "dns"), app],
        ),
        sent(
            "traffic.istio.io/includeOutboundIPRanges",
            "",
            &[(far, 4443, "remote"), (loopback(v6), 8080, "app")],
        ),
        sent("traffic.istio.io/includeOutboundPorts", "4443", &[outbound, (far, 4443, "outbound")]),
        sent("traffic.istio.io/excludeInterfaces", "eth0", &[(far, 80, "remote"), (far, 53, "remote"), app]),
        received("traffic.istio.io/excludeInboundPorts", "8080", "app"),
        received("traffic.istio.io/excludeInboundPorts", "9000-9100", "inbound"),
        received("traffic.istio.io/includeInboundPorts", "8080,15000-15010", "inbound"),
        received("traffic.istio.io/includeInboundPorts", "9090", "app"),
        received("traffic.istio.io/includeInboundPorts", "", "app"),
        received("traffic.istio.io/excludeInterfaces", "eth0", "app"),
    ]
}

/// What ztunnel sends on reaches the application, and the answers come back to ztunnel, whatever the pod excludes.
fn assert_ztunnel_serves(pod: &Pod) -> Result<()> {
    for v6 in BOTH {
        let (client, app) = (client_address(v6), pod_address(v6));
        pod.assert(&[
            (From::Marked(ZTUNNEL[0]), app, 8080, false, "app"),
            (From::Marked(ZTUNNEL[0]), remote_address(v6), 80, false, "remote"),
            (From::Probe, app, 8080, false, "app"),
        ])?;
        let report = pod.mesh.pod().enter(|| in_the_name_of(client, app, ZTUNNEL[0], ANSWER))??;
        ensure!(report.server == "app" && report.peer.ip() == client, "{report:?}");
    }
    Ok(())
}

#[test]
fn what_a_pod_excludes_reaches_its_destination_and_nothing_else_does() -> Result<()> {
    for backend in ["netlink", "native"] {
        for ((name, value, v4), (_, _, v6)) in limits(false).into_iter().zip(limits(true)) {
            let what = || format!("{backend}, {name}: {value:?}");
            let (redirect, words) = limited(&[(name, value)])?;
            let pod = Pod::new(backend, redirect, &words).with_context(what)?;
            pod.assert(&[v4, v6].concat()).with_context(what)?;
            assert_ztunnel_serves(&pod).with_context(what)?;
        }
    }
    Ok(())
}

/// An excluded port exempts DNS from capture, and the answers find the application all the same.
#[test]
fn queries_to_an_excluded_port_are_answered_by_the_servers_themselves() -> Result<()> {
    for backend in ["netlink", "native"] {
        let (redirect, words) = limited(&[("traffic.istio.io/excludeOutboundPorts", "53")])?;
        let pod = Pod::new(backend, redirect, &words)?;
        pod.assert(&BOTH.map(|v6| (From::App, remote_address(v6), 53, true, "resolver")))?;
    }
    Ok(())
}

/// ztunnel calls the application with the client's address: the answer, which is for a host far away, has to come back to it.
#[test]
fn the_applications_answers_go_to_ztunnel() -> Result<()> {
    for backend in ["netlink", "native"] {
        let pod = Pod::new(backend, AmbientRedirect::new(Families::Both), "")?;
        for v6 in BOTH {
            let (client, app) = (client_address(v6), pod_address(v6));
            let answer =
                |mark, patience| pod.mesh.pod().enter(|| in_the_name_of(client, app, mark, patience));
            let report = answer(ZTUNNEL[0], ANSWER)?.with_context(|| format!("{backend} {v6}"))?;
            ensure!(report.server == "app" && report.peer.ip() == client, "{report:?}");
            // Without ztunnel's mark the answer leaves the pod, to a host that knows nothing of it.
            ensure!(
                answer(OTHER_MARK, IMPATIENT)?.is_err(),
                "{backend} {v6}: every connection is answered so"
            );
        }
    }
    Ok(())
}

/// Whether the application answers ztunnel, in the name of a neighbour.
fn is_answered(mesh: &Mesh) -> Result<bool> {
    Ok(mesh
        .pod()
        .enter(|| in_the_name_of(client_address(false), pod_address(false), ZTUNNEL[0], IMPATIENT))?
        .is_ok())
}

/// What strongSwan, Tailscale and `sbr` leave in a pod, before or after its rules.
#[test]
fn policy_rules_of_others_lose_no_answer_and_keep_what_is_theirs() -> Result<()> {
    let empty = "ip rule add pref 220 lookup 220; ip rule add pref 5270 lookup 52";
    let takes = "ip rule add pref 100 from 10.1.0.2 lookup 200; ip route add default via 10.1.0.1 table 200";
    let second = "ip link add net1 type veth peer name pe1; ip link set net1 up; ip link set pe1 up
        ip addr add 192.0.2.10/24 dev net1; ip rule add from 192.0.2.10 table 100
        ip route add 192.0.2.0/24 dev net1 table 100; ip route add default via 10.1.0.1 table 100";
    for script in [empty, takes, second] {
        for comes_first in BOTH {
            let mesh = Mesh::new()?;
            let what = format!("{script}, before the rules: {comes_first}");
            let before = mesh.pod().snapshot()?;
            if comes_first {
                mesh.pod().sh(script)?;
                run(mesh.pod(), "apply")?.ok()?;
            } else {
                run(mesh.pod(), "apply")?.ok()?;
                // `sbr` takes the first table without a policy rule.
                mesh.pod().sh(&script.replace("table 100", "table 101"))?;
            }
            let route = |from: &str| mesh.pod().sh(&format!("ip route get 198.51.100.1 from {from}"));
            let theirs = if script == second { route("192.0.2.10")?.stdout } else { String::new() };
            ensure!(!theirs.contains("local"), "{what}: {theirs}");
            for again in 0..2 {
                let again = run(mesh.pod(), "apply")?.ok().with_context(|| format!("{what}: run {again}"))?;
                ensure!(is_answered(&mesh)?, "{what}: {again:?}");
            }
            let verify = program::under_test("redirectctl")?;
            let mut verify = process::command(verify, ["verify", "--ambient", "--netns"]);
            let verified = process::run(verify.arg(mesh.pod().path()), process::SHORT)?;
            ensure!(verified.code() == Some(0), "{what}: {verified:?}");
            run(mesh.pod(), "remove")?.ok()?;
            let left = mesh.pod().snapshot()?.changes_since(&before);
            let lines: Vec<String> = left.iter().map(ToString::to_string).collect();
            let is_ours = |line: &&String| line.contains("0x111") || line.contains("local default");
            ensure!(
                !lines.iter().any(|line| is_ours(&line)) && left.iter().all(|one| !one.is_lost),
                "{what}: {lines:?}"
            );
        }
    }
    Ok(())
}

/// What nothing can stand before is named, and a run that meets it takes nothing away.
#[test]
fn what_takes_the_answers_whatever_the_priority_is_named_before_anything_changes() -> Result<()> {
    for (script, words) in [
        (
            "ip rule add pref 0 to 10.1.0.1 lookup 200; ip route add default via 10.1.0.1 table 200",
            "priority 0 (table 200)",
        ),
        ("ip rule add pref 9 fwmark 0x111/0xfff prohibit", "priority 9 (prohibit)"),
    ] {
        for comes_first in BOTH {
            let mesh = Mesh::new()?;
            if !comes_first {
                run(mesh.pod(), "apply")?.ok()?;
            }
            mesh.pod().sh(script)?;
            let before = mesh.pod().snapshot()?;
            let output = run(mesh.pod(), "apply")?;
            let told = format!("{}{}", output.stdout, output.stderr);
            for word in ["does not converge", words, "nothing was changed"] {
                ensure!(output.code() == Some(1) && told.contains(word), "{script}: {told}");
            }
            ensure!(!told.contains("another program changes them"), "{script}: {told}");
            let changes = mesh.pod().snapshot()?.changes_since(&before);
            ensure!(changes.is_empty(), "{script}: {changes:?}");
        }
    }
    Ok(())
}

/// Connects to the application from an address that is not the pod's.
fn in_the_name_of(client: IpAddr, pod: IpAddr, mark: u32, patience: Duration) -> Result<Report> {
    let family = if pod.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::IpTransparent, &true)?;
    setsockopt(&fd, sockopt::Mark, &mark)?;
    // An answer that goes astray is answered by a reset, or not at all.
    setsockopt(&fd, sockopt::SendTimeout, &TimeVal::seconds(patience.as_secs().try_into()?))?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(client, 0)))?;
    connect(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(pod, 8080)))?;
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(patience))?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
