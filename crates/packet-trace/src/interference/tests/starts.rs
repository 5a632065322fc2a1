//! Which packets are asked about.

use super::*;
use crate::{Fate, Interface, TraceRules};
use netfilter_state::netlink::{Messages, kept::KeptTable};
use netfilter_state::routing::FoundRouting;
use proptest::{collection, prelude::*, sample};
use std::collections::BTreeSet;

/// A pod of one family with these interfaces, addresses and routes.
struct World {
    family: Family,
    interfaces: Vec<String>,
    by_interface: Vec<(String, IpAddr)>,
    addresses: Vec<IpAddr>,
    tables: RouteTables,
}

impl World {
    /// Addresses, each with its interface, and routes: `local 10.9.0.0/24 dev lo table 7`.
    fn new(family: Family, addresses: &[(&str, &str)], routes: &[&str]) -> Self {
        let by_interface: Vec<(String, IpAddr)> =
            addresses.iter().map(|(by, at)| ((*by).to_string(), at.parse().unwrap())).collect();
        let mut interfaces: Vec<String> = by_interface.iter().map(|(by, _)| by.clone()).collect();
        interfaces.retain(|by| by != "lo");
        interfaces.dedup();
        let loopback = if family == Family::V4 { "local 127.0.0.0/8 dev lo" } else { "local ::1/128 dev lo" };
        let own = by_interface.iter().map(|(by, at)| format!("local {at} dev {by}"));
        let all = own.chain([loopback.to_string()]).chain(routes.iter().map(ToString::to_string));
        let routes: Vec<Route> = all.map(|text| route(family, &text)).collect();
        let tables = BTreeSet::from_iter(routes.iter().map(|route| route.table));
        let others =
            tables.into_iter().filter(|table| ![RouteTables::LOCAL, RouteTables::MAIN].contains(table));
        let rules = [(0, RouteTables::LOCAL), (32_766, RouteTables::MAIN)]
            .into_iter()
            .chain(others.map(|table| (table, table)));
        let mut rules: Vec<PolicyRule> =
            rules.map(|(priority, table)| PolicyRule::lookup(family, priority, table)).collect();
        rules.sort_by_key(|rule| rule.priority);
        let tables = RouteTables { complete: true, loopback_is_up: true, rules, routes };
        let addresses = by_interface.iter().map(|(_, at)| *at).collect();
        Self { family, interfaces, by_interface, addresses, tables }
    }

    fn v4() -> Self {
        Self::new(Family::V4, &[("eth0", OWN)], &["unicast 0.0.0.0/0 dev eth0"])
    }

    fn pod(&self) -> PodTraffic<'_> {
        PodTraffic {
            addresses: &self.addresses,
            interfaces: &self.interfaces,
            by_interface: Some(&self.by_interface),
            routes: Some(&self.tables),
            ..PodTraffic::default()
        }
    }

    fn findings(&self, plan: &RulePlan, others: &str) -> Vec<Finding> {
        self.pod().judge(&in_force_of(plan, self.family, others), plan).findings
    }

    /// What is found, each `Does nat OUTPUT 1 EndsChain Outbound`.
    fn found(&self, plan: &RulePlan, others: &str) -> Vec<String> {
        let said = |finding: &Finding| {
            let RuleRef { table, chain, rule, .. } = &finding.place;
            let rule =
                rule.filter(|_| !table.name.is_empty()).map_or_else(String::new, |rule| format!(" {rule}"));
            let traffic =
                finding.traffic.iter().map(|(_, traffic)| format!(" {traffic:?}")).collect::<String>();
            format!("{:?} {} {chain}{rule} {:?}{traffic}", finding.severity, table.name, finding.effect)
        };
        self.findings(plan, others).iter().map(said).collect()
    }

    #[track_caller]
    fn check(&self, plan: &RulePlan, cases: &[(&str, &[&str])]) {
        let wrong = cases.iter().filter_map(|(others, wanted)| {
            let found = self.found(plan, others);
            (found != *wanted).then(|| format!("{others}\n  wants {wanted:?}\n  found {found:?}"))
        });
        let wrong: Vec<String> = wrong.collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

fn route(family: Family, text: &str) -> Route {
    let words: Vec<&str> = text.split(' ').collect();
    let kind = match words[0] {
        "local" => RouteKind::Local,
        "broadcast" => RouteKind::Broadcast,
        "unicast" => RouteKind::Unicast,
        kind => panic!("{kind}"),
    };
    let to = words[1].parse().unwrap_or_else(|_| words[1].parse::<IpAddr>().unwrap().into());
    let usual = if kind == RouteKind::Unicast { RouteTables::MAIN } else { RouteTables::LOCAL };
    let table = words.get(5).map_or(usual, |table| table.parse().unwrap());
    Route { family, table, to, kind, interface: Some(words[3].into()), metric: 0, unknown: false }
}

fn v6_plan() -> RulePlan {
    plan_for(&[], &NamespaceFacts::new(&["fd00::2".parse().unwrap()]))
}

/// A tunnel beside eth0, with an address or without: what leaves by it, and what comes.
#[test]
fn every_interface_is_asked_about_whatever_addresses_it_has() {
    let mut bare = World::new(Family::V4, &[("eth0", OWN)], &["unicast 0.0.0.0/0 dev t0"]);
    bare.interfaces.push("t0".into());
    let tunnel = World::new(Family::V4, &[("eth0", OWN), ("t0", "10.64.0.2")], &["unicast 0.0.0.0/0 dev t0"]);
    for world in [bare, tunnel] {
        world.check(
            &plan(&[]),
            &[
                // What REDIRECT drops for want of an address does not count as lost.
                ("", &[]),
                ("-I OUTPUT -o t0 -j ACCEPT", &["Does nat OUTPUT 1 EndsChain Outbound"]),
                ("-I PREROUTING -i t0 -j ACCEPT", &["Does nat PREROUTING 1 EndsChain Inbound"]),
                ("-I OUTPUT -o t1 -j ACCEPT\n-I PREROUTING -i t1 -j ACCEPT", &[]),
            ],
        );
    }
}

#[test]
fn addresses_of_the_link_are_the_pods_too() {
    let world = World::new(
        Family::V4,
        &[("eth0", OWN), ("eth0", "169.254.5.5")],
        &["broadcast 10.1.0.255 dev eth0", "unicast 0.0.0.0/0 dev eth0"],
    );
    world.check(
        &plan(&[]),
        &[
            ("-I PREROUTING -d 169.254.5.5/32 -j ACCEPT", &["Does nat PREROUTING 1 EndsChain Inbound"]),
            ("-I OUTPUT -s 169.254.0.0/16 ! -o lo -j ACCEPT", &["Does nat OUTPUT 1 EndsChain Outbound"]),
            ("-I OUTPUT -d 169.254.169.254/32 -j ACCEPT", &["Does nat OUTPUT 1 EndsChain Outbound"]),
            ("-I PREROUTING -s 169.254.0.0/16 -j ACCEPT", &["Does nat PREROUTING 1 EndsChain Inbound"]),
            ("-I PREROUTING -d 10.1.0.255/32 -j ACCEPT", &[]),
            ("-I OUTPUT -s 10.1.0.255/32 -j ACCEPT", &[]),
        ],
    );
    let (global, link) = (("eth0", "fd00::2"), ("eth0", "fe80::2"));
    let routes = &["unicast fe80::/64 dev eth0", "unicast ::/0 dev eth0"];
    for world in [
        World::new(Family::V6, &[global, link], routes),
        // Neighbours reach a pod without another address all the same.
        World::new(Family::V6, &[link], routes),
    ] {
        world.check(
            &v6_plan(),
            &[
                ("", &[]),
                ("-I PREROUTING -d fe80::/10 -j ACCEPT", &["Does nat PREROUTING 1 EndsChain Inbound"]),
                ("-I PREROUTING -s fe80::/10 -j ACCEPT", &["Does nat PREROUTING 1 EndsChain Inbound"]),
                ("-I OUTPUT -s fe80::/10 ! -o lo -j ACCEPT", &["Does nat OUTPUT 1 EndsChain Outbound"]),
                ("-I OUTPUT -d fe80::/10 ! -o lo -j ACCEPT", &["Does nat OUTPUT 1 EndsChain Outbound"]),
            ],
        );
    }
}

/// Those that no interface has, and which routing delivers here.
#[test]
fn addresses_with_a_local_route_alone_are_the_pods_too() {
    let default = "unicast 0.0.0.0/0 dev eth0";
    let inbound = "Does nat PREROUTING 1 EndsChain Inbound";
    World::new(Family::V4, &[("eth0", OWN)], &["local 10.9.0.0/24 dev lo", default]).check(
        &plan(&[]),
        &[
            ("", &[]),
            ("-I PREROUTING -d 10.9.0.0/24 -j ACCEPT", &[inbound]),
            ("-I PREROUTING -d 10.9.0.7/32 -j ACCEPT", &[inbound]),
            ("-I PREROUTING -d 10.8.0.0/24 -j ACCEPT", &[]),
            ("-I OUTPUT -s 10.9.0.0/24 -j ACCEPT", &["Does nat OUTPUT 1 EndsChain Outbound"]),
        ],
    );
    let by_policy = World::new(Family::V4, &[("eth0", OWN)], &["local 10.9.0.0/24 dev lo table 7", default]);
    let found = by_policy.found(&plan(&[]), "-I PREROUTING -d 10.9.0.7/32 -j ACCEPT");
    assert_eq!(found[0], inbound);
}

/// From an address to itself, which the kernel drops once a rule delivers what comes from there.
#[test]
fn nobody_connects_from_outside_to_its_own_address() {
    let default = "unicast 0.0.0.0/0 dev eth0";
    let mut world = World::new(Family::V4, &[("eth0", OWN)], &["local 0.0.0.0/0 dev lo table 209", default]);
    let found = |world: &mut World, from: &str| {
        let of_table = world.tables.rules.iter_mut().find(|rule| rule.priority == 209).unwrap();
        of_table.from = Some(from.parse().unwrap());
        world.found(&plan(TPROXY), "")
    };
    assert_eq!(found(&mut world, "198.51.100.1/32"), NONE);
    // Neighbours do connect to each other.
    assert_eq!(found(&mut world, "198.51.100.0/31"), ["Does   Routes Inbound"]);
}

/// Of two addresses, one whose packets a policy rule keeps in the pod: where the pod sends is asked of each.
#[test]
fn what_a_policy_rule_keeps_in_the_pod_is_lost() {
    let routes = &["local ::/0 dev lo table 209", "unicast fe80::/64 dev eth0", "unicast ::/0 dev eth0"];
    let mut world = World::new(Family::V6, &[("eth0", "fd00::2"), ("eth0", "fe80::2")], routes);
    for rule in world.tables.rules.iter_mut().filter(|rule| rule.priority == 209) {
        rule.from = Some("fd00::2/128".parse().unwrap());
    }
    assert_eq!(world.found(&v6_plan(), ""), ["Does   Routes Outbound ByProxy"]);
}

/// By REDIRECT, TPROXY or routing alone, a connection comes to the port that it names.
#[test]
fn the_proxys_connections_to_its_own_listener_reach_it() {
    let left_alone = "-I OUTPUT -o lo -p tcp -m tcp --dport 15006 -j RETURN";
    World::v4().check(&plan(TPROXY), &[(left_alone, &[])]);
    // Also at the address of the mesh itself, which is not the pod's, and at that of the link, from which the kernel redirects nothing.
    let routes = &["local ::6/128 dev lo", "unicast fe80::/64 dev eth0", "unicast ::/0 dev eth0"];
    let untracked = "*raw\n-I OUTPUT -o lo -p tcp -m tcp --dport 15006 -j NOTRACK";
    let world = World::new(Family::V6, &[("eth0", "fd00::2"), ("eth0", "fe80::2")], routes);
    world.check(&v6_plan(), &[(untracked, &[])]);
}

/// A process that may set marks gets past a rule that exempts one, though nothing sets it.
#[test]
fn marks_that_an_application_may_set_are_asked_about() {
    let may: &[&str] = &["May nat OUTPUT 1 EndsChain Outbound"];
    World::v4().check(
        &plan(&[]),
        &[
            ("-I OUTPUT -m mark --mark 0x1/0x1 -j ACCEPT", may),
            ("-I OUTPUT -m mark --mark 7 -j RETURN", may),
            ("-I OUTPUT -m mark ! --mark 0 -j ACCEPT", may),
            ("-I OUTPUT -m mark --mark 0x1/0x1 -m mark --mark 0x20/0xf0 -j ACCEPT", may),
            (":X\n-A X -m mark --mark 0x20/0x20 -j ACCEPT\n-I OUTPUT -m mark --mark 0x1/0x1 -j X", &[
                "May nat X 1 EndsChain Outbound",
            ]),
            (
                "*raw\n-I OUTPUT -m mark --mark 0x200/0xf00 -j NOTRACK",
                &["May raw OUTPUT 1 Untracks Outbound"],
            ),
            (
                "*mangle\n-A OUTPUT -j CONNMARK --save-mark\n*nat\n-I OUTPUT -m connmark --mark 9 -j ACCEPT",
                may,
            ),
            // Certain anyway.
            (
                "-I OUTPUT -m mark ! --mark 7 -j ACCEPT",
                &["Does nat OUTPUT 1 EndsChain Outbound ProxyToSelf"],
            ),
            // Who loses what it marks itself bypasses nothing.
            (KUBE_PROXY, &[]),
            ("*filter\n-A OUTPUT -m mark --mark 0x1/0x1 -j REJECT", &[]),
            // Others' packets have no mark: it ends with their namespace.
            ("-I PREROUTING -m mark --mark 0x1/0x1 -j ACCEPT", &[]),
            // Behind ours.
            ("-A OUTPUT -m mark --mark 0x1/0x1 -j ACCEPT", &[]),
            // A mark that is cleared first.
            ("*mangle\n-A OUTPUT -j MARK --set-xmark 0/0xffffffff\n*nat\n-I OUTPUT -m mark --mark 7 -j ACCEPT", &[]),
        ],
    );
    let dns = ["May nat OUTPUT 1 EndsChain Outbound Dns"];
    World::v4().check(&plan(DNS), &[("-I OUTPUT -m mark --mark 0x1/0x1 -j ACCEPT", &dns)]);
    // The plan's own: ztunnel's.
    let ambient = AmbientRedirect::new(Families::V4).plan();
    World::v4().check(
        &ambient,
        &[
            ("", &[]),
            ("-I OUTPUT -m mark --mark 0x539/0xfff -j ACCEPT", &[]),
            ("-I OUTPUT -m mark --mark 0x53a/0xfff -j ACCEPT", &["May nat OUTPUT 1 EndsChain Outbound"]),
        ],
    );
}

/// What kube-proxy and the kubelet write, in short.
const KUBE_PROXY: &str = ":KUBE-MARK-MASQ
:KUBE-SERVICES
:KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE
-I OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
*filter
:KUBE-FIREWALL
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
-A OUTPUT -j KUBE-FIREWALL";

/// Rules that test marks by any mask cost sets of a few marks, not each bit of each.
#[test]
fn any_number_of_marks_is_followed() {
    let mut others = String::new();
    for bit in 0..32_u32 {
        others += &format!(
            "-I OUTPUT -m mark --mark {0:#x}/{0:#x} -p tcp -m tcp --dport {bit} -j ACCEPT\n",
            1 << bit
        );
    }
    let found = World::v4().findings(&plan(&[]), &others);
    assert!(found.len() == 16 && found.iter().all(|one| one.effect == EndsChain), "{found:?}");
    let mut others = String::from(":X\n");
    for mark in 0..3000 {
        others += &format!("-A X -m mark --mark {mark:#x} -j RETURN\n");
    }
    assert_eq!(World::v4().found(&plan(&[]), &format!("{others}-I OUTPUT -j X")), NONE);
}

/// What cannot be sent for want of a route is lost to no rule; what comes is judged all the same.
#[test]
fn a_family_without_a_way_to_others_is_judged_by_what_comes() {
    let link =
        World::new(Family::V6, &[("eth0", "fd00::2"), ("eth0", "fe80::2")], &["unicast fe80::/64 dev eth0"]);
    let mut refused = World::new(Family::V6, &[("eth0", "fd00::2")], &["unicast ::/0 dev lo"]);
    refused.tables.routes.last_mut().unwrap().kind = RouteKind::Unreachable;
    for world in [link, refused] {
        let ambient = AmbientRedirect::new(Families::Both).with_dns_capture(true).plan();
        world.check(
            &ambient,
            &[("", &[]), ("-I PREROUTING -j ACCEPT", &["Does nat PREROUTING 1 EndsChain Inbound"])],
        );
        world.check(
            &v6_plan(),
            &[(
                "*filter\n:INPUT input 0 filter drop\n-A INPUT -i lo -j ACCEPT",
                &["Does filter INPUT PolicyDrops Inbound ToProxy"],
            )],
        );
    }
}

#[test]
fn first_packets_of_related_connections_are_asked_about_both_ways() {
    let related = "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT";
    World::v4().check(
        &plan(DNS),
        &[
            (&format!("-I PREROUTING {related}"), &["May nat PREROUTING 1 EndsChain Inbound"]),
            (&format!("-I OUTPUT {related}"), &["May nat OUTPUT 1 EndsChain Outbound ProxyToSelf Dns"]),
            ("-I OUTPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT", &[]),
            (&format!("*filter\n-A OUTPUT {related}\n-A INPUT {related}"), &[]),
            ("*filter\n:OUTPUT output 0 filter drop\n-A OUTPUT -m conntrack --ctstate NEW -j ACCEPT", &[]),
        ],
    );
}

/// What a plan leaves alone because it is the proxy's has to arrive, too.
#[test]
fn what_a_plan_exempts_has_to_arrive() {
    let ports = &[(Key::InboundExcludePorts, "15020,15021,15090")];
    World::v4().check(
        &plan(ports),
        &[
            ("", &[]),
            // From outside to the proxy's own ports.
            ("*filter\n-A INPUT -p tcp -m tcp --dport 15021 -j DROP", &["Does filter INPUT 1 Drops ToProxy"]),
            (
                "*filter\n-A INPUT -p tcp -m tcp --dport 15008 -j REJECT",
                &["Does filter INPUT 1 Drops ToProxy"],
            ),
            (
                "-I PREROUTING -p tcp -m tcp --dport 15090 -j REDIRECT --to-ports 1",
                &["Does nat PREROUTING 1 Translates ToProxy"],
            ),
            ("-I PREROUTING -p tcp -m tcp --dport 15090 -j DNAT --to-destination 10.1.0.9", &[]),
            ("*filter\n-A INPUT ! -i lo -p tcp -m tcp --dport 15022 -j DROP", &[]),
            ("-I PREROUTING -p tcp -m tcp --dport 15021 -j ACCEPT", &[]),
            // From the proxy to the application.
            (
                "*filter\n-A OUTPUT -o lo -s 127.0.0.6/32 -j DROP",
                &["Does filter OUTPUT 1 Drops ToApplication"],
            ),
            (
                "*filter\n-A INPUT -i lo -p tcp -m tcp --dport 8080 -j REJECT",
                &["Does filter INPUT 1 Drops ToApplication"],
            ),
            (
                "-I OUTPUT -s 127.0.0.6/32 -p tcp -j REDIRECT --to-ports 1",
                &["Does nat OUTPUT 1 Translates ToApplication"],
            ),
            ("-I OUTPUT -s 127.0.0.6/32 -p tcp -j DNAT --to-destination 10.0.2.2", &[]),
            ("*filter\n-A OUTPUT -o lo -s 127.0.0.6/32 -m owner --uid-owner 1000 -j DROP", &[]),
        ],
    );
    World::v4().check(
        &plan(DNS),
        &[(
            "*filter\n-A OUTPUT ! -o lo -p udp -m owner --uid-owner 1337 -j REJECT",
            &["Does filter OUTPUT 1 Drops ByProxy"],
        )],
    );
    let mark = "-m mark --mark 0x539/0xfff";
    World::v4().check(
        &AmbientRedirect::new(Families::V4).with_dns_capture(true).plan(),
        &[
            ("", &[]),
            (&format!("*filter\n-A OUTPUT ! -o lo {mark} -j DROP"), &["Does filter OUTPUT 1 Drops ByProxy"]),
            (
                &format!("*filter\n-A OUTPUT -o lo {mark} -j DROP"),
                &["Does filter OUTPUT 1 Drops ToApplication"],
            ),
            ("*filter\n-A INPUT -p tcp -m tcp --dport 15008 -j DROP", &["Does filter INPUT 1 Drops ToProxy"]),
            (
                "*filter\n-A INPUT -i lo -p tcp -m tcp --dport 8080 -j DROP",
                &["Does filter INPUT 1 Drops ToApplication"],
            ),
        ],
    );
    // TPROXY hands over tunnels as well.
    let tproxy = [ports[0], (Key::InterceptionMode, "TPROXY")];
    World::v4().check(
        &plan(&tproxy),
        &[
            ("", &[]),
            ("*filter\n-A INPUT -p tcp -m tcp --dport 15021 -j DROP", &["Does filter INPUT 1 Drops ToProxy"]),
        ],
    );
}

/// What other programs write, in parts to be put together.
const CONDITIONS: &[&str] = &[
    "-o eth0",
    "-o tun0",
    "-o lo",
    "-i eth0",
    "-i tun0",
    "-i lo",
    "-p tcp",
    "-p udp",
    "-d 192.0.2.0/24",
    "-s 10.1.0.2/32",
    "-p tcp -m tcp --dport 80",
    "-p tcp -m tcp --dport 15021",
    "-m mark --mark 0x1/0x1",
    "-m conntrack --ctstate RELATED,ESTABLISHED",
    "-m conntrack --ctstate NEW",
    "-m owner --uid-owner 1337",
    "-m limit --limit 5/sec",
    "-p tcp -m tcp ! --tcp-flags FIN,SYN,RST,PSH,ACK,URG SYN",
    "-m connmark --mark 7",
];
const TARGETS: &[&str] = &[
    "ACCEPT",
    "RETURN",
    "DROP",
    "REJECT",
    "MARK --set-xmark 0x1/0x1",
    "CONNMARK --set-xmark 0x7/0xffffffff",
];

const SETTINGS: &[&[(Key, &str)]] = &[&[], TPROXY, DNS];

prop_compose! {
    fn foreign_rule()(
        table in sample::select(&["raw", "mangle", "nat", "filter"][..]),
        chain in sample::select(&["PREROUTING", "OUTPUT", "INPUT"][..]),
        conditions in collection::vec(sample::select(CONDITIONS), 1..3),
        target in sample::select(TARGETS),
        place in sample::select(&["-A", "-I"][..]),
    ) -> String {
        format!("*{table}\n{place} {chain} {} -j {target}\n", conditions.join(" "))
    }
}

/// What a trace says of the packet that a finding shows, and what the plan means for it.
fn traced(world: &World, plan: &RulePlan, others: &str, finding: &Finding) -> (Vec<Fate>, Fate) {
    let mut packet = finding.example.clone().unwrap();
    let ruleset = in_force_of(plan, world.family, others);
    let routing: Vec<_> = FoundRouting::all_working(plan);
    let live = world.pod().trace_rules(&ruleset, &routing, world.family, Some(plan));
    if packet.interface == Interface::Named("eth0".into()) {
        // Which is the only one.
        packet.interface = Interface::Elsewhere;
    }
    (live.trace(&packet).may.into_iter().collect(), TraceRules::of_plan(plan, world.family).fate(&packet))
}

#[test]
fn a_rule_about_an_interface_that_is_not_there_leaves_nothing_unknown() {
    let (world, plan) = (World::v4(), plan(&[]));
    let others = "*filter\n-A OUTPUT -o lo -j ACCEPT\n-A OUTPUT -o tun0 -j ACCEPT\n-A OUTPUT -j DROP";
    let found = world.findings(&plan, others);
    assert_eq!(found[0].severity, Does);
    assert_eq!(traced(&world, &plan, others, &found[0]).0, [Fate::Dropped]);
}

proptest! {
    /// A verdict and the trace of the packet that it shows agree.
    #[test]
    fn a_verdict_and_the_trace_of_its_packet_agree(
        rules in collection::vec(foreign_rule(), 1..5),
        settings in sample::select(SETTINGS),
    ) {
        let (world, plan, others) = (World::v4(), plan(settings), rules.concat());
        for finding in world.findings(&plan, &others) {
            let (may, planned) = traced(&world, &plan, &others, &finding);
            // A mark or a zone alone takes nothing from the proxy.
            let only_may = finding.severity == May && matches!(finding.effect, Remarks | EndsChain);
            match finding.severity {
                Does => prop_assert!(!may.contains(&planned), "{finding}: {may:?}\n{others}"),
                May => prop_assert!(only_may || may != [planned], "{finding}: {may:?}\n{others}"),
            }
        }
    }
}

#[test]
fn connections_that_are_kept_are_no_first_packets_and_what_lets_those_pass_is_found() {
    let plan = AmbientRedirect::new(Families::V4).plan();
    let connection = ["10.1.0.2:8080", "10.1.0.9:40000"].map(|at| at.parse().unwrap());
    let hour = std::time::Duration::from_secs(3600);
    let made = KeptTable::make(1, &[connection.into()].into(), hour).unwrap();
    let found = |is_settled: bool, by_hand: &str| {
        let mut table = HookedRules::default();
        Messages::new(&made).for_each(|message| table.take(&message));
        if is_settled {
            table.forget_rules();
            let settled = KeptTable::settle(2).unwrap();
            Messages::new(&settled).for_each(|message| table.take(&message));
        }
        table.forget_elements();
        for chain in table.tables.values_mut().flat_map(|table| table.chains.values_mut()) {
            let by_hand = Some(by_hand).filter(|words| !words.is_empty());
            chain.rules.extend(by_hand.map(KernelRule::saved));
        }
        let mut ruleset = in_force(&plan, "");
        ruleset.tables.extend(table.tables);
        let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
        let interfaces = ["eth0".to_string()];
        let pod = PodTraffic { addresses: &addresses, interfaces: &interfaces, ..PodTraffic::default() };
        let effects = pod.judge(&ruleset, &plan).findings.into_iter().map(|one| one.effect);
        effects.collect::<BTreeSet<_>>()
    };
    assert_eq!(found(true, ""), BTreeSet::new());
    assert_eq!(found(false, ""), [Effect::Untracks].into(), "being made, it adds what opens a connection");
    assert_eq!(found(true, "-p tcp -j NOTRACK"), [Effect::Untracks].into());
    assert_eq!(found(true, "-p tcp -j DROP"), [Effect::Drops].into());
}
