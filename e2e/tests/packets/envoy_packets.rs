//! A real Envoy where other tests have a stand-in for the proxy: what the rules bring it, and whether that arrives.
//!
//! `make envoy` fetches Envoy and runs this.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result, ensure};
use e2e::envoy::{Envoy, Interception, KNOWN_NAME};
use e2e::iptables::apply;
use e2e::iptables::mesh::{any, passthrough};
use e2e::traffic::{ANSWER, Client, Report, TcpServer, as_user};
use test_support::netns::{Families, Namespace, Topology, client_address, pod_address, remote_address};
use test_support::process;

const APP: u16 = 8080;
const NOT_CAPTURED: u16 = 8081;
const SERVICE: u16 = 80;
const NOT_CAPTURED_SERVICE: u16 = 81;
const APP_ID: u32 = 1000;
const USUAL: &str = "-b * -d 8081 -i * -o 81 --redirect-dns";

/// A pod with an application and Envoy, redirected, and a service far away.
struct Mesh {
    topology: Topology,
    families: Families,
    interception: Interception,
    envoy: Envoy,
    args: String,
    _servers: Vec<TcpServer>,
}

impl Mesh {
    fn new(families: Families, interception: Interception, backend: &str) -> Result<Self> {
        let topology = Topology::new(families)?;
        let mut servers = Vec::new();
        let mut resolvers = Vec::new();
        for v6 in families.each() {
            for (namespace, name, ports) in [
                (&topology.pod, "app", [APP, NOT_CAPTURED]),
                (&topology.client, "service", [SERVICE, NOT_CAPTURED_SERVICE]),
            ] {
                for port in ports {
                    servers.push(TcpServer::start(namespace, name, (any(v6), port))?);
                }
            }
            resolvers.push(remote_address(v6).to_string());
        }
        topology.pod.set_nameservers(&resolvers)?;
        let envoy = Envoy::start(&topology.pod, families, interception)?;
        let mode = match interception {
            Interception::Redirect => "REDIRECT",
            Interception::Tproxy => "TPROXY",
        };
        let dual = if families == Families::Dual { "--dual-stack" } else { "" };
        let args = format!("{USUAL} -m {mode} {dual} {backend}");
        let mesh = Self { topology, families, interception, envoy, args, _servers: servers };
        apply(mesh.pod(), &mesh.args)?;
        Ok(mesh)
    }

    fn pod(&self) -> &Namespace {
        &self.topology.pod
    }

    fn app(&self) -> Client<'_> {
        Client::new(self.pod()).user(APP_ID, APP_ID)
    }

    /// Whom the application sees behind Envoy: Envoy, or with TPROXY the client.
    fn who_calls(&self, v6: bool) -> std::net::IpAddr {
        match self.interception {
            Interception::Redirect => passthrough(v6),
            Interception::Tproxy => client_address(v6),
        }
    }
}

fn every_way(mesh: &Mesh) -> Result<()> {
    for v6 in mesh.families.each() {
        inbound(mesh, v6)?;
        outbound(mesh, v6)?;
        names(mesh, v6)?;
    }
    Ok(())
}

fn inbound(mesh: &Mesh, v6: bool) -> Result<()> {
    let visit = |port| Client::new(&mesh.topology.client).tcp((pod_address(v6), port))?.report();
    let app = SocketAddr::new(pod_address(v6), APP);
    let seen = visit(APP)?;
    ensure!(
        (seen.server.as_str(), seen.local, seen.peer.ip()) == ("app", app, mesh.who_calls(v6)),
        "{seen:?}"
    );
    mesh.envoy.wait_passed("inbound", app, 1)?;

    let seen = visit(NOT_CAPTURED)?;
    ensure!((seen.server.as_str(), seen.peer.ip()) == ("app", client_address(v6)), "{seen:?}");
    let passed = mesh.envoy.passed("inbound", SocketAddr::new(pod_address(v6), NOT_CAPTURED));
    ensure!(passed == 0, "Envoy has seen a port that is not captured");
    Ok(())
}

fn outbound(mesh: &Mesh, v6: bool) -> Result<()> {
    let service = SocketAddr::new(remote_address(v6), SERVICE);
    let seen = mesh.app().tcp(service)?.report()?;
    ensure!(
        (seen.server.as_str(), seen.local, seen.peer.ip()) == ("service", service, pod_address(v6)),
        "{seen:?}"
    );
    mesh.envoy.wait_passed("outbound", service, 1)?;

    let past = SocketAddr::new(remote_address(v6), NOT_CAPTURED_SERVICE);
    let seen = mesh.app().tcp(past)?.report()?;
    ensure!((seen.server.as_str(), seen.local) == ("service", past), "{seen:?}");
    ensure!(mesh.envoy.passed("outbound", past) == 0, "Envoy has seen a port that is not captured");

    // The application's call of its own pod stays in the application.
    let own = SocketAddr::new(pod_address(v6), APP);
    let before = mesh.envoy.passed("inbound", own);
    let seen = mesh.app().tcp(own)?.report()?;
    ensure!((seen.server.as_str(), seen.peer.ip()) == ("app", pod_address(v6)), "{seen:?}");
    ensure!(mesh.envoy.passed("inbound", own) == before, "Envoy has seen what stays in the pod");
    Ok(())
}

/// The C library asks the server of resolv.conf, where nobody answers queries: Envoy does.
fn names(mesh: &Mesh, v6: bool) -> Result<()> {
    let ids = [format!("--reuid={APP_ID}"), format!("--regid={APP_ID}")];
    let mut query = process::command("setpriv", ids);
    query.args(["--clear-groups", "getent", if v6 { "ahostsv6" } else { "ahostsv4" }, KNOWN_NAME]);
    let answer = mesh.pod().run(&query)?.ok()?.stdout;
    let wanted = remote_address(v6).to_string();
    ensure!(answer.split_whitespace().next() == Some(&wanted), "{answer}");
    Ok(())
}

fn every_way_in_both_modes(backend: &str) -> Result<()> {
    for interception in Interception::ALL {
        every_way(&Mesh::new(Families::Dual, interception, backend)?)
            .with_context(|| format!("{interception:?}"))?;
    }
    Ok(())
}

#[test]
#[ignore = "needs Envoy: make envoy"]
fn netlink_brings_envoy_what_it_has_to() -> Result<()> {
    every_way_in_both_modes("")
}

#[test]
#[ignore = "needs Envoy: make envoy"]
fn iptables_nft_brings_envoy_what_it_has_to() -> Result<()> {
    every_way_in_both_modes("--backend restore")
}

#[test]
#[ignore = "needs Envoy: make envoy"]
fn iptables_legacy_brings_envoy_what_it_has_to() -> Result<()> {
    every_way_in_both_modes("--force-iptables-binary legacy")
}

#[test]
#[ignore = "needs Envoy: make envoy"]
fn native_tables_bring_envoy_what_they_have_to() -> Result<()> {
    every_way_in_both_modes("--native-nftables")?;
    every_way_in_both_modes("--native-nftables --nft-sets")
}

#[test]
#[ignore = "needs Envoy: make envoy"]
fn strict_capture_brings_envoy_the_same() -> Result<()> {
    every_way_in_both_modes("--strict-capture")
}

#[test]
#[ignore = "needs Envoy: make envoy"]
fn a_pod_of_one_family_needs_no_other() -> Result<()> {
    for families in [Families::V4, Families::V6] {
        for interception in Interception::ALL {
            for backend in ["", "--native-nftables"] {
                every_way(&Mesh::new(families, interception, backend)?)
                    .with_context(|| format!("{families:?} {interception:?} {backend}"))?;
            }
        }
    }
    Ok(())
}

/// An open connection to one of the servers, which says what it saw and then repeats what it hears.
struct Stream {
    way: String,
    reader: BufReader<TcpStream>,
}

impl Stream {
    fn open(way: String, to: SocketAddr) -> Result<(Self, Report)> {
        let stream = TcpStream::connect_timeout(&to, ANSWER).with_context(|| way.clone())?;
        stream.set_read_timeout(Some(ANSWER))?;
        let mut opened = Self { way, reader: BufReader::new(stream) };
        let report = serde_json::from_str(&opened.line()?)?;
        Ok((opened, report))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.reader.read_line(&mut line).with_context(|| self.way.clone())?;
        ensure!(read > 0, "{}: the connection has ended", self.way);
        Ok(line)
    }

    fn lives(&mut self) -> Result<()> {
        self.reader.get_mut().write_all(b"still there?\n").with_context(|| self.way.clone())?;
        let echo = self.line()?;
        ensure!(echo == "still there?\n", "{}: {echo}", self.way);
        Ok(())
    }
}

/// Opens so many connections through Envoy, of each family and in each direction; all of them are open at the end.
fn streams(mesh: &Mesh, each: usize) -> Result<Vec<Stream>> {
    let mut all = Vec::new();
    for v6 in mesh.families.each() {
        let app = SocketAddr::new(pod_address(v6), APP);
        let open = || (0..each).map(|n| Stream::open(format!("inbound {n} to {app}"), app)).collect();
        let inbound: Result<Vec<_>> = mesh.topology.client.enter(open)?;
        for (stream, seen) in inbound? {
            ensure!((seen.local, seen.peer.ip()) == (app, mesh.who_calls(v6)), "{}: {seen:?}", stream.way);
            all.push(stream);
        }
        let service = SocketAddr::new(remote_address(v6), SERVICE);
        let open =
            || (0..each).map(|n| Stream::open(format!("outbound {n} to {service}"), service)).collect();
        let outbound: Result<Vec<_>> = mesh.pod().enter(|| as_user(APP_ID, APP_ID, open))?;
        for (stream, seen) in outbound? {
            ensure!((seen.local, seen.peer.ip()) == (service, pod_address(v6)), "{}: {seen:?}", stream.way);
            all.push(stream);
        }
    }
    Ok(all)
}

#[test]
#[ignore = "needs Envoy: make envoy"]
fn two_hundred_connections_at_once_pass_envoy() -> Result<()> {
    const EACH: usize = 50;
    for interception in Interception::ALL {
        for backend in ["", "--native-nftables"] {
            let mesh = Mesh::new(Families::Dual, interception, backend)?;
            let mut open = streams(&mesh, EACH)?;
            ensure!(open.len() == 200, "{} are open", open.len());
            open.iter_mut().try_for_each(Stream::lives)?;
            drop(open);
            for v6 in mesh.families.each() {
                mesh.envoy.wait_passed("inbound", SocketAddr::new(pod_address(v6), APP), EACH)?;
                mesh.envoy.wait_passed("outbound", SocketAddr::new(remote_address(v6), SERVICE), EACH)?;
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs Envoy: make envoy"]
fn streams_through_envoy_outlive_runs_other_backends_and_other_settings() -> Result<()> {
    for interception in Interception::ALL {
        let mesh = Mesh::new(Families::Dual, interception, "")?;
        let mut open = streams(&mesh, 2)?;
        for more in [
            "",
            "--reconcile",
            "--native-nftables",
            "--native-nftables --nft-sets -x 192.0.2.0/24",
            "--force-iptables-binary legacy",
            "--backend restore --reconcile",
            "--strict-capture",
            "",
        ] {
            apply(mesh.pod(), &format!("{} {more}", mesh.args))?;
            let lives = open.iter_mut().try_for_each(Stream::lives);
            lives.with_context(|| format!("{interception:?}, then {more:?}"))?;
            // And new ones pass Envoy, too.
            let mut new = streams(&mesh, 1).with_context(|| format!("{interception:?}, then {more:?}"))?;
            new.iter_mut().try_for_each(Stream::lives)?;
        }
    }
    Ok(())
}
