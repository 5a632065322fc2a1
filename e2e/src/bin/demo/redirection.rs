//! The first part: `istio-iptables` in a namespace that looks like a pod's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Result;
use e2e::iptables::mesh::{any, passthrough};
use e2e::traffic::{Client, PROXY_ID, Protocol, TcpServer, UdpServer};
use test_support::netns::{
    CLIENT_V4, CLIENT_V6, Families, POD_V4, POD_V6, REMOTE_V4, REMOTE_V6, State, Tables, Topology,
    client_address, pod_address, remote_address,
};
use test_support::process;

use crate::connection::{Connection, Reach};
use crate::proxy::{self, Proxy};
use crate::screen::{Screen, typed};

const APPLICATION: &str = "application";
const REMOTE: &str = "remote server";
const DNS_SERVER: &str = "DNS server";
/// The port that the rules leave alone.
const EXCLUDED_PORT: u16 = 9090;
/// The mark of packets that TPROXY is done with.
const TPROXY_MARK: u32 = 1337;
const DNS_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 53);
const DNS_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53);

/// Shows redirection coming and going.
pub(crate) fn show(screen: &mut Screen) -> Result<()> {
    screen.part("istio-iptables: programming a network namespace")?;
    let stage = Stage::new()?;
    let before = stage.world.pod.state_with_nft()?;
    stage.introduce(screen)?;

    screen.step("No rules yet: every connection goes where it is meant to go")?;
    stage.show_untouched(screen)?;

    screen.step("istio-iptables programs the pod's namespace")?;
    stage.istio_iptables(screen, &captured("REDIRECT"))?;
    stage.count_rules(screen)?;

    screen.step("The same connections now reach the proxy, which knows where they were going")?;
    stage.show_redirected(screen)?;

    screen.step("What the rules leave alone: an excluded port, and the proxy's own connections")?;
    stage.show_left_alone(screen)?;

    screen.step("TPROXY: nothing is rewritten, so that the application can see the client's address")?;
    stage.istio_iptables(screen, &captured("TPROXY"))?;
    stage.count_rules(screen)?;
    stage.show_tproxy(screen)?;

    screen.step("istio-iptables --cleanup-only removes it all")?;
    stage.istio_iptables(screen, &["--cleanup-only".to_owned()])?;
    stage.show_nothing_left(screen, &before)?;
    stage.show_untouched(screen)
}

/// Both namespaces and everybody in them.
struct Stage {
    _proxy: Proxy,
    _connections: Vec<TcpServer>,
    _queries: Vec<UdpServer>,
    // Last, because it is dropped last.
    world: Topology,
}

impl Stage {
    fn new() -> Result<Self> {
        let world = Topology::new(Families::Dual)?;
        for address in [format!("{DNS_V4}/32"), format!("{DNS_V6}/128")] {
            world.client.add_address("lo", &address)?;
        }
        world.pod.set_nameservers(&[DNS_V4.to_string(), DNS_V6.to_string()])?;
        let (mut connections, mut queries) = (Vec::new(), Vec::new());
        for v6 in [false, true] {
            let any = any(v6);
            connections.push(TcpServer::start(&world.pod, APPLICATION, (any, 8080))?);
            connections.push(TcpServer::start(&world.pod, APPLICATION, (any, EXCLUDED_PORT))?);
            connections.push(TcpServer::start(&world.client, REMOTE, (remote_address(v6), 80))?);
            connections.push(TcpServer::start(&world.client, DNS_SERVER, (dns_address(v6), 53))?);
            queries.push(UdpServer::start(&world.client, DNS_SERVER, (dns_address(v6), 53))?);
        }
        let proxy = Proxy::start(&world.pod)?;
        Ok(Self { _proxy: proxy, _connections: connections, _queries: queries, world })
    }

    fn introduce(&self, screen: &mut Screen) -> Result<()> {
        screen.step("Two network namespaces, joined by a cable")?;
        screen.note(&format!(
            "pod     {POD_V4} and {POD_V6}\n\
             \x20       an application on 8080 and {EXCLUDED_PORT}; a stand-in for the proxy, of user 1337, on 15001, 15006 and 15053\n\
             client  {CLIENT_V4} and {CLIENT_V6}, and all the pod sees of the world:\n\
             \x20       a remote server, {REMOTE_V4} and {REMOTE_V6}, and a DNS server, {DNS_V4} and {DNS_V6}\n\
             Every server answers with its name and with what it saw of the connection."
        ))
    }

    fn show_untouched(&self, screen: &mut Screen) -> Result<()> {
        for v6 in [false, true] {
            self.inbound(v6, 8080).show(screen, Reach::Directly(APPLICATION))?;
            self.outbound(v6).show(screen, Reach::Directly(REMOTE))?;
            self.query(v6, Protocol::Udp).show(screen, Reach::Directly(DNS_SERVER))?;
            self.query(v6, Protocol::Tcp).show(screen, Reach::Directly(DNS_SERVER))?;
        }
        Ok(())
    }

    fn show_redirected(&self, screen: &mut Screen) -> Result<()> {
        for v6 in [false, true] {
            self.inbound(v6, 8080).show(screen, Reach::Redirected(proxy::INBOUND))?;
            self.outbound(v6).show(screen, Reach::Redirected(proxy::OUTBOUND))?;
            self.query(v6, Protocol::Udp).show(screen, Reach::Answering(proxy::DNS))?;
            self.query(v6, Protocol::Tcp).show(screen, Reach::Redirected(proxy::DNS))?;
        }
        Ok(())
    }

    fn show_left_alone(&self, screen: &mut Screen) -> Result<()> {
        for v6 in [false, true] {
            self.inbound(v6, EXCLUDED_PORT).show(screen, Reach::Directly(APPLICATION))?;
            let proxy = Client::new(&self.world.pod).as_proxy();
            let own = Connection { from: "proxy", client: proxy.clone(), ..self.outbound(v6) };
            own.show(screen, Reach::Directly(REMOTE))?;
            self.show_onward(screen, passthrough(v6), proxy.from(passthrough(v6)))?;
        }
        Ok(())
    }

    fn show_tproxy(&self, screen: &mut Screen) -> Result<()> {
        for v6 in [false, true] {
            self.inbound(v6, 8080).show(screen, Reach::Transparently(proxy::INBOUND))?;
        }
        screen.note("In this mode the proxy runs as root, group 1337, and may use the client's address for its own connection:")?;
        for v6 in [false, true] {
            let proxy = Client::new(&self.world.pod).user(0, PROXY_ID).mark(TPROXY_MARK);
            let client = client_address(v6);
            self.show_onward(screen, client, proxy.in_the_name_of(client))?;
        }
        screen.note("The excluded port and outbound connections are as before:")?;
        for v6 in [false, true] {
            self.inbound(v6, EXCLUDED_PORT).show(screen, Reach::Directly(APPLICATION))?;
            self.outbound(v6).show(screen, Reach::Redirected(proxy::OUTBOUND))?;
        }
        Ok(())
    }

    /// A connection of the proxy to the application, on behalf of a client.
    fn show_onward(&self, screen: &mut Screen, source: IpAddr, client: Client<'_>) -> Result<()> {
        let target = SocketAddr::new(pod_address(source.is_ipv6()), 8080);
        let protocol = Protocol::Tcp;
        let onward =
            Connection { from: "proxy for the client", source, client, to: "application", target, protocol };
        onward.show(screen, Reach::Directly(APPLICATION))
    }

    fn inbound(&self, v6: bool, port: u16) -> Connection<'_> {
        Connection {
            from: "client",
            source: client_address(v6),
            client: Client::new(&self.world.client),
            to: "pod",
            target: SocketAddr::new(pod_address(v6), port),
            protocol: Protocol::Tcp,
        }
    }

    fn outbound(&self, v6: bool) -> Connection<'_> {
        Connection {
            from: "application",
            source: pod_address(v6),
            client: Client::new(&self.world.pod),
            to: "remote",
            target: SocketAddr::new(remote_address(v6), 80),
            protocol: Protocol::Tcp,
        }
    }

    fn query(&self, v6: bool, protocol: Protocol) -> Connection<'_> {
        let target = SocketAddr::new(dns_address(v6), 53);
        Connection { to: "DNS", target, protocol, ..self.outbound(v6) }
    }

    /// Runs the program in the pod's namespace, as its init container does.
    fn istio_iptables(&self, screen: &mut Screen, args: &[String]) -> Result<()> {
        let command = process::command(crate::program("istio-iptables")?, args);
        let output = self.world.pod.run(&command)?.ok()?;
        screen.command(&typed(&command), &output)
    }

    fn count_rules(&self, screen: &mut Screen) -> Result<()> {
        let state = self.world.pod.state_with_nft()?;
        screen.note(&format!(
            "now there: {} iptables and {} ip6tables rules, {} ip rules, {} local routes, lo has {}",
            count(&state.v4),
            count(&state.v6),
            state.rule4.len() + state.rule6.len(),
            state.route4.len() + state.route6.len(),
            state.lo.join(" "),
        ))
    }

    fn show_nothing_left(&self, screen: &mut Screen, before: &State) -> Result<()> {
        let now = self.world.pod.state_with_nft()?;
        let lines = [
            ("iptables rules and chains", texts(&now.v4), texts(&before.v4)),
            ("ip6tables rules and chains", texts(&now.v6), texts(&before.v6)),
            ("native nftables chains", now.nft.into_keys().collect(), before.nft.keys().cloned().collect()),
            ("ip rules", [now.rule4, now.rule6].concat(), [&*before.rule4, &*before.rule6].concat()),
            (
                "local default routes",
                [now.route4, now.route6].concat(),
                [&*before.route4, &*before.route6].concat(),
            ),
            ("addresses on lo", now.lo, before.lo.clone()),
        ];
        for (what, now, before) in lines {
            screen.check(what, &listed(&now), now == before, &listed(&before))?;
        }
        Ok(())
    }
}

/// The arguments that capture everything but one port, in both families.
fn captured(mode: &str) -> Vec<String> {
    let excluded = EXCLUDED_PORT.to_string();
    let words = ["-m", mode, "-b", "*", "-d", &excluded, "-i", "*", "--redirect-dns", "--dual-stack"];
    words.map(str::to_owned).to_vec()
}

fn count(tables: &Tables) -> usize {
    tables.values().flat_map(|chains| chains.values()).map(Vec::len).sum()
}

/// Every chain and rule in one line of text.
fn texts(tables: &Tables) -> Vec<String> {
    let chains = tables.iter().flat_map(|(table, chains)| chains.iter().map(move |chain| (table, chain)));
    chains.map(|(table, (chain, rules))| format!("{table} {chain}: {}", rules.join("; "))).collect()
}

fn listed(items: &[String]) -> String {
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

fn dns_address(v6: bool) -> IpAddr {
    if v6 { DNS_V6.into() } else { DNS_V4.into() }
}
