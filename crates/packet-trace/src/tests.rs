use super::*;
use netfilter_state::{
    routing::{FoundRouting, RoutingItem},
    ruleset::{
        Api, Base, ChainState, Condition, HookedRules, KernelRule, Selector, SetLookup, Statement,
        TableFamily, TableName, VerdictMap,
    },
};
use redirect_core::{
    Families, Redirect,
    rule::{Equality, Hook},
    settings::{Key, NamespaceFacts, RawSettings, Source},
    values::{Mark, MaskedMark, RouteTable},
};

fn plan(settings: &[(Key, &'static str)]) -> redirect_core::RulePlan {
    let mut raw = RawSettings::new();
    raw.set(Key::InboundPorts, "*", Source::Flag("-b"));
    raw.set(Key::OutboundRanges, "*", Source::Flag("-i"));
    for (key, text) in settings {
        raw.set(*key, *text, Source::Flag("x"));
    }
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
}

fn rules(settings: &[(Key, &'static str)]) -> TraceRules {
    TraceRules::of_plan(&plan(settings), Family::V4)
}

fn app(to: &str) -> Packet {
    Packet::from_pod(1000, 1000, "10.1.0.2:40000".parse().unwrap(), to.parse().unwrap())
}

fn proxy(from: &str, to: &str) -> Packet {
    Packet::from_pod(1337, 1337, from.parse().unwrap(), to.parse().unwrap())
        .by(if to.starts_with("10.1.0.2") || to.starts_with("127.") { "lo" } else { "eth0" })
}

fn visit(to: &str) -> Packet {
    Packet::from_outside("192.0.2.9:40000".parse().unwrap(), to.parse().unwrap()).by("eth0")
}

const fn to_proxy(listener: Listener, port: u16, rewritten: bool) -> Fate {
    Fate::Proxy { listener, port, rewritten }
}

#[test]
fn the_usual_ways() {
    for mode in ["REDIRECT", "TPROXY"] {
        let rules = rules(&[(Key::InterceptionMode, mode), (Key::InboundExcludePorts, "8081")]);
        let outbound = to_proxy(Listener::Outbound, 15001, true);
        assert_eq!(rules.fate(&app("192.0.2.1:80")), outbound);
        assert_eq!(rules.fate(&app("192.0.2.1:80").over_udp()), Fate::Untouched);
        assert_eq!(rules.fate(&app("127.0.0.1:80")), Fate::Untouched);
        assert_eq!(rules.fate(&proxy("10.1.0.2:1", "192.0.2.1:80")), Fate::Untouched);
        let rewritten = mode == "REDIRECT";
        assert_eq!(rules.fate(&visit("10.1.0.2:80")), to_proxy(Listener::Inbound, 15006, rewritten));
        assert_eq!(rules.fate(&visit("10.1.0.2:8081")), Fate::Untouched);
        let itself = proxy("10.1.0.2:1", "10.1.0.2:80");
        assert_eq!(rules.fate(&itself), to_proxy(Listener::Inbound, 15006, true), "{mode}");
        assert_eq!(rules.fate(&proxy("127.0.0.6:1", "10.1.0.2:80")), Fate::Untouched);
    }
}

#[test]
fn where_a_packet_ends_is_told_in_words() {
    for (listener, port, words) in [
        (Listener::Outbound, 15001, "proxy, outbound listener (port 15001)"),
        (Listener::Inbound, 15006, "proxy, inbound listener (port 15006)"),
        (Listener::Dns, 15053, "proxy, DNS listener (port 15053)"),
    ] {
        assert_eq!(to_proxy(listener, port, true).to_string(), words);
    }
}

#[test]
fn a_process_that_calls_its_own_pod_goes_over_lo() {
    for own in ["127.0.0.1:80", "10.1.0.2:80"] {
        assert_eq!(app(own).interface, Interface::Named("lo".into()), "{own}");
    }
    assert_eq!(app("192.0.2.1:80").interface, Interface::Elsewhere);
}

#[test]
fn a_datagram_has_no_flags() {
    assert_eq!((app("192.0.2.1:80").flags, app("192.0.2.1:80").over_udp().flags), (TcpFlags::SYN, 0));
}

#[test]
fn the_setting_behind_the_deciding_rule_is_told() {
    let rules = rules(&[(Key::OutboundExcludePorts, "3306")]);
    let setting = |packet: &Packet| {
        let trace = rules.trace(packet);
        let Some(TraceEvent::Rule { origin: Some(origin), .. }) = trace.deciding() else { return None };
        Some((origin.setting, origin.source))
    };
    assert_eq!(setting(&app("192.0.2.1:3306")), Some((Key::OutboundExcludePorts, Source::Flag("x"))));
    assert_eq!(setting(&app("192.0.2.1:80")), Some((Key::OutboundRanges, Source::Flag("-i"))));
    assert_eq!(setting(&visit("10.1.0.2:80")), Some((Key::InboundPorts, Source::Flag("-b"))));
    assert_eq!(setting(&visit("10.1.0.2:80").over_udp()), None);
}

#[test]
fn marks_of_tproxy_lead_to_the_pod_itself() {
    let rules = rules(&[(Key::InterceptionMode, "TPROXY")]);
    // What the application answers to a connection that the proxy opened in a client's name.
    let answer = Packet {
        flags: TcpFlags::SYN | TcpFlags::ACK,
        connection: ConntrackEntry { state: ConnectionState::Reply, mark: 1337, translated_to: None },
        ..app("192.0.2.9:40000")
    };
    let trace = rules.trace(&answer.by("eth0"));
    assert!(
        trace.steps.contains(&TraceEvent::Changed(PacketEdit::Rerouted { interface: Some("lo".into()) })),
        "{:#?}",
        trace.steps
    );
    assert_eq!(trace.fate(), Fate::Untouched);
}

#[test]
fn a_known_connection_goes_where_its_first_packet_went() {
    let rules = rules(&[]);
    let to = "127.0.0.1:15001".parse().unwrap();
    let connection = ConntrackEntry { state: ConnectionState::Established, mark: 0, translated_to: Some(to) };
    let trace = rules.trace(&Packet { connection, ..app("192.0.2.1:80").by("eth0") });
    assert!(trace.steps.contains(&TraceEvent::Changed(PacketEdit::Destination { destination: to })));
    assert!(!trace.steps.iter().any(|step| matches!(step, TraceEvent::Rule { .. })), "nat was asked");
}

/// A plan's rules as iptables-legacy-save prints them, behind other rules.
fn saved(settings: &[(Key, &'static str)], others: &str) -> HookedRules {
    behind(others, plan(settings).rules(Family::V4).restore_text())
}

fn behind(others: &str, mut own: String) -> HookedRules {
    let mut ruleset = HookedRules::default();
    let heads = ["raw", "mangle", "nat", "filter"].map(|table| {
        format!("*{table}\n:PREROUTING ACCEPT\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:POSTROUTING ACCEPT\nCOMMIT\n")
    });
    for number in 1..9 {
        own = own.replace(&format!("-I PREROUTING {number}"), "-A PREROUTING");
    }
    ruleset.add_saved(Family::V4, &heads.concat()).unwrap();
    ruleset.add_saved(Family::V4, others).unwrap();
    ruleset.add_saved(Family::V4, &own).unwrap();
    ruleset
}

fn through(others: &str, packet: &Packet) -> Trace {
    let settings = [(Key::OutboundExcludePorts, "3306")];
    TraceRules::of_ruleset(&saved(&settings, others), &[], Family::V4, Some(&plan(&settings))).trace(packet)
}

#[test]
fn rules_of_others_are_met_as_far_as_they_are_understood() {
    let outbound = to_proxy(Listener::Outbound, 15001, true);
    for (others, fate) in [
        ("", outbound),
        ("*nat\n-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT\nCOMMIT", Fate::Untouched),
        ("*nat\n-A OUTPUT -p tcp -m tcp --dport 81 -j ACCEPT\nCOMMIT", outbound),
        ("*nat\n-A OUTPUT -p tcp -j REDIRECT --to-ports 9\nCOMMIT", Fate::Redirected { port: 9 }),
        ("*nat\n-A OUTPUT -p tcp -j DNAT --to-destination 192.0.2.5\nCOMMIT", Fate::Translated),
        ("*raw\n-A OUTPUT -p tcp -j CT --notrack\nCOMMIT", Fate::Untouched),
        ("*filter\n-A OUTPUT -d 127.0.0.1/32 -j DROP\nCOMMIT", Fate::Dropped),
        ("*filter\n-A OUTPUT -d 192.0.2.1/32 -j REJECT\nCOMMIT", outbound),
        ("*filter\n:INPUT DROP\nCOMMIT", Fate::Dropped),
        ("*filter\n-A OUTPUT -m set --match-set x src -j DROP\nCOMMIT", Fate::Unknown),
        ("*filter\n-A OUTPUT -m set --match-set x src -j LOG\nCOMMIT", outbound),
        ("*filter\n-A OUTPUT -m set --match-set x src -j ACCEPT\nCOMMIT", outbound),
    ] {
        let trace = through(others, &app("192.0.2.1:80").by("eth0"));
        assert_eq!(trace.fate(), fate, "{others}\n{}", trace.text(Detail::Every));
    }
    let trace = through("*filter\n-A OUTPUT -m set --match-set x src -j DROP\nCOMMIT", &app("192.0.2.1:80"));
    assert_eq!(trace.may, [outbound, Fate::Dropped].into());
}

#[test]
fn rules_about_the_pods_own_addresses_are_decided_where_those_are_known() {
    let others = "*filter\n-A OUTPUT -m addrtype --dst-type LOCAL -j ACCEPT\n-A OUTPUT -j DROP\nCOMMIT";
    let rules = || TraceRules::of_ruleset(&saved(&[], others), &[], Family::V4, Some(&plan(&[])));
    let packet = |to: &str| proxy("10.1.0.2:1", to).by("eth0");
    assert_eq!(rules().trace(&packet("192.0.2.1:80")).may, [Fate::Untouched, Fate::Dropped].into());
    let known = rules().with_addresses(&["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()]);
    for (to, fate) in [
        ("192.0.2.1:80", Fate::Dropped),
        ("10.1.0.3:80", Fate::Dropped),
        ("10.1.0.2:80", Fate::Untouched),
        ("127.0.0.1:80", Fate::Untouched),
        ("127.255.255.254:80", Fate::Untouched),
        ("128.0.0.1:80", Fate::Dropped),
    ] {
        assert_eq!(known.fate(&packet(to)), fate, "{to}");
    }
    let others = "*filter\n-A OUTPUT -m addrtype ! --dst-type LOCAL -j ACCEPT\n-A OUTPUT -j DROP\nCOMMIT";
    let rules = TraceRules::of_ruleset(&saved(&[], others), &[], Family::V4, Some(&plan(&[])));
    let known = rules.with_addresses(&["10.1.0.2".parse().unwrap()]);
    for (to, fate) in [("192.0.2.1:80", Fate::Untouched), ("10.1.0.2:80", Fate::Dropped)] {
        assert_eq!(known.fate(&packet(to)), fate, "! {to}");
    }
}

/// The address to which REDIRECT sends a packet that comes in by an interface.
fn redirected_to(interfaces: &[(&str, &str)], to: &str, by: Option<&str>) -> (Fate, Option<String>) {
    let family = if to.starts_with('[') { Family::V6 } else { Family::V4 };
    let all = "*nat\n-A PREROUTING -p tcp -j REDIRECT --to-ports 9\nCOMMIT";
    let mut ruleset = HookedRules::default();
    ruleset.add_saved(family, &format!("*nat\n:PREROUTING ACCEPT\nCOMMIT\n{all}")).unwrap();
    let interfaces: Vec<(String, IpAddr)> =
        interfaces.iter().map(|(name, address)| ((*name).into(), address.parse().unwrap())).collect();
    let rules = TraceRules::of_ruleset(&ruleset, &[], family, None).with_interfaces(&interfaces);
    let from = if family == Family::V6 { "[2001:db8::9]:1" } else { "192.0.2.9:1" };
    let packet = Packet::from_outside(from.parse().unwrap(), to.parse().unwrap());
    let trace = rules.trace(&by.map_or_else(|| packet.clone(), |by| packet.clone().by(by)));
    let moved = trace.steps.iter().find_map(|step| {
        if let TraceEvent::Changed(PacketEdit::Destination { destination: to }) = step {
            Some(to.to_string())
        } else {
            None
        }
    });
    (trace.fate(), moved)
}

#[test]
fn what_comes_in_is_redirected_to_the_first_address_of_its_interface() {
    let at = |to: &str| (Fate::Redirected { port: 9 }, Some(to.to_string()));
    let dropped = (Fate::Dropped, None);
    let pod = [
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("eth0", "10.1.0.2"),
        ("eth0", "10.1.0.3"),
        ("vnet0", "10.2.1.2"),
        ("eth0", "fd00::2"),
        ("eth0", "fe80::2"),
        ("net1", "fe80::3"),
    ];
    for (to, by, wanted) in [
        ("10.1.0.3:80", Some("eth0"), at("10.1.0.2:9")),
        ("172.26.61.239:15008", Some("vnet0"), at("10.2.1.2:9")),
        ("10.1.0.2:80", Some("vnet0"), at("10.2.1.2:9")),
        ("10.1.0.2:80", Some("net1"), dropped.clone()),
        ("10.1.0.2:80", Some("unknown"), dropped.clone()),
        ("127.0.0.1:80", Some("lo"), at("127.0.0.1:9")),
        // By one of those with an address.
        ("10.1.0.2:80", None, at("10.1.0.2:9")),
        ("[fd00::2]:80", Some("eth0"), at("[fd00::2]:9")),
        ("[fe80::2]:80", Some("eth0"), at("[fe80::2]:9")),
        ("[fd00::2]:80", Some("net1"), at("[fe80::3]:9")),
        ("[fd00::2]:80", Some("vnet0"), dropped.clone()),
    ] {
        assert_eq!(redirected_to(&pod, to, by), wanted, "{to} by {by:?}");
    }
    let unnumbered = [("lo", "127.0.0.1"), ("lo", "10.1.0.2"), ("lo", "fd00::2")];
    assert_eq!(redirected_to(&unnumbered, "10.1.0.2:80", None), dropped);
    assert_eq!(redirected_to(&unnumbered, "[fd00::2]:80", None), dropped);
}

#[test]
fn every_end_that_a_packet_may_have_is_told_and_why_it_has_it() {
    let last_lines = |others: &str, to: &str| {
        let text = through(others, &app(to).by("eth0")).text(Detail::Met);
        let from = text.find("ends at:").unwrap();
        text[from..].lines().map(|line| line.trim().to_string()).collect::<Vec<_>>()
    };
    let outbound = "proxy, outbound listener (port 15001)";
    let unknown = "*filter\n-A OUTPUT -m set --match-set x src -j DROP\nCOMMIT";
    let several = last_lines(unknown, "192.0.2.1:80");
    assert_eq!(
        several[..3],
        [
            "ends at: unknown: a rule on its path is unsupported".into(),
            format!("may be: {outbound}"),
            "may be: dropped".to_string()
        ]
    );
    let because = "because of another program's rule in table ip nat (legacy)";
    for target in ["ACCEPT", "RETURN"] {
        let others = format!("*nat\n-A OUTPUT -p tcp -m tcp --dport 80 -j {target}\nCOMMIT");
        assert_eq!(last_lines(&others, "192.0.2.1:80"), ["ends at: untouched, to its destination", because]);
    }
    // Through a chain of theirs; but returning from it does not leave the base chain, and no rule follows the mesh's.
    let by_way = |target: &str| format!("*nat\n-A OUTPUT -j theirs\n-A theirs -j {target}\nCOMMIT");
    assert_eq!(last_lines(&by_way("ACCEPT"), "192.0.2.1:80")[1], because);
    let own = "because of --istio-service-cidr (flag ---i): captured outbound";
    assert_eq!(last_lines(&by_way("RETURN"), "192.0.2.1:80")[1], own);
    let elsewhere = "*filter\n-A OUTPUT -p tcp -j ACCEPT\nCOMMIT";
    assert_eq!(last_lines(elsewhere, "127.0.0.1:80")[1], last_lines("", "127.0.0.1:80")[1]);
    let untracked = "*raw\n-A OUTPUT -p tcp -j CT --notrack\nCOMMIT";
    let because = "because of another program's rule in table ip raw (legacy)";
    assert_eq!(last_lines(untracked, "192.0.2.1:80")[1], because);
    let because = "because of --istio-local-outbound-ports-exclude (flag --x): excluded outbound port";
    assert_eq!(last_lines("", "192.0.2.1:3306")[1..].join(" "), because);
}

#[test]
fn the_steps_of_the_first_way_are_recorded_where_they_are_asked_for() {
    let others = "*filter\n-A OUTPUT -m set --match-set x src -j DROP\nCOMMIT";
    let rules = TraceRules::of_ruleset(&saved(&[], others), &[], Family::V4, Some(&plan(&[])));
    let recorded = |records: bool| {
        let (found, may) = rules.ways(&app("192.0.2.1:80"), records);
        assert_eq!(may.len(), 2);
        found.ways.iter().map(|way| !way.steps.is_empty()).collect::<Vec<_>>()
    };
    assert_eq!(recorded(true), [true, false]);
    assert_eq!(recorded(false), [false, false]);
}

#[test]
fn chains_are_followed_as_deep_as_the_kernel_follows_them() {
    let fate = |jumps: usize| {
        let jump = |number: usize| format!("-A c{number} -j c{}\n", number + 1);
        let jumps = (1..jumps).map(jump).collect::<String>() + &format!("-A c{jumps} -j DROP");
        through(&format!("*filter\n-A OUTPUT -j c1\n{jumps}\nCOMMIT"), &app("192.0.2.1:80")).fate()
    };
    assert_eq!([1, 16].map(fate), [Fate::Dropped; 2]);
    assert_eq!(fate(17), to_proxy(Listener::Outbound, 15001, true));
}

#[test]
fn what_a_verdict_map_says_ends_its_rule() {
    let outbound = to_proxy(Listener::Outbound, 15001, true);
    for (port, statement, fate) in [
        (80, Statement::Continue, Fate::Dropped),
        (81, Statement::Accept, outbound),
        (82, Statement::Drop, Fate::Dropped),
        (83, Statement::Goto("refused".into()), Fate::Rejected),
        (84, Statement::Return, outbound),
    ] {
        let rules = behind_a_map(port, statement.clone());
        assert_eq!(rules.fate(&app(&format!("192.0.2.1:{port}"))), fate, "{statement:?}");
        assert_eq!(rules.fate(&app("192.0.2.1:9")), Fate::Dropped, "{statement:?}: nothing found");
    }
}

/// A plan's rules, and a table with a map of one port to one statement, behind which everything is dropped.
fn behind_a_map(port: u16, statement: Statement) -> TraceRules {
    let range = (u128::from(port), u128::from(port));
    let map = VerdictMap {
        among: SetLookup::range(Selector::DestinationPort, range),
        verdicts: [statement].into(),
    };
    let rule = |statement| KernelRule { statements: [statement].into(), ..KernelRule::default() };
    // Before nat, which rewrites the port.
    let base = Base { hook: Hook::Output, priority: -150, is_nat: false, drops: false, reroutes: false };
    let output = ChainState {
        base: Some(base),
        rules: [rule(Statement::Map(map)), rule(Statement::Drop)].into(),
        ..ChainState::default()
    };
    let refused = ChainState { base: None, rules: [rule(Statement::Reject)].into(), ..ChainState::default() };
    with_table_of([("output", output), ("refused", refused)])
}

/// A plan's rules, and a table of another program's with these chains.
fn with_table_of<const N: usize>(chains: [(&str, ChainState); N]) -> TraceRules {
    let mut ruleset = saved(&[], "");
    let name = TableName { api: Api::NfTables, family: TableFamily::Inet, name: "theirs".into() };
    ruleset.table(name).chains = chains.map(|(name, chain)| (name.into(), chain)).into();
    TraceRules::of_ruleset(&ruleset, &[], Family::V4, Some(&plan(&[])))
}

#[test]
fn of_two_base_chains_that_translate_the_first_does() {
    assert_eq!(beside(-99, true, Statement::Redirect(Some(9))), to_proxy(Listener::Outbound, 15001, true));
    assert_eq!(beside(-101, true, Statement::Redirect(Some(9))), Fate::Redirected { port: 9 });
}

#[test]
fn connections_are_left_untracked_until_they_are_tracked() {
    assert_eq!(beside(-201, false, Statement::Untrack), Fate::Untouched);
    // At the very priority, whichever was registered last goes first, and here that is unknown.
    assert_eq!(beside(-200, false, Statement::Untrack), Fate::Unknown);
    assert_eq!(beside(-199, false, Statement::Untrack), to_proxy(Listener::Outbound, 15001, true));
}

/// Where a call ends with a plan's rules and, beside them, a base chain of one rule.
fn beside(priority: i32, is_nat: bool, statement: Statement) -> Fate {
    let base = Base { hook: Hook::Output, priority, is_nat, drops: false, reroutes: false };
    let rule = KernelRule { statements: [statement].into(), ..KernelRule::default() };
    let chain = ChainState { base: Some(base), rules: [rule].into(), ..ChainState::default() };
    with_table_of([("output", chain)]).fate(&app("192.0.2.1:80"))
}

#[test]
fn what_is_translated_after_tproxy_is_reset() {
    let settings = [(Key::InterceptionMode, "TPROXY")];
    let others = "*nat\n-A PREROUTING -p tcp -m tcp --dport 81 -j REDIRECT --to-ports 9\nCOMMIT";
    let rules = TraceRules::of_ruleset(&saved(&settings, others), &[], Family::V4, None);
    assert_eq!(rules.fate(&visit("10.1.0.2:81")), Fate::Broken);
    assert_eq!(rules.fate(&visit("10.1.0.2:80")), to_proxy(Listener::Inbound, 15006, false));
}

#[test]
fn a_packet_without_an_interface_has_an_empty_name() {
    use netfilter_state::ruleset::Condition;
    let drops = |range: (u128, u128), not: bool| {
        let value = SetLookup::range(Selector::InInterface, range);
        let rule = KernelRule {
            conditions: [Condition::Among(Equality { value, not })].into(),
            statements: [Statement::Drop].into(),
            ..KernelRule::default()
        };
        let base = Base { hook: Hook::Output, priority: 0, is_nat: false, drops: false, reroutes: false };
        let chain = ChainState { base: Some(base), rules: [rule].into(), ..ChainState::default() };
        with_table_of([("output", chain)]).fate(&app("192.0.2.1:80")) == Fate::Dropped
    };
    for (range, not, wanted) in [
        ((0, u128::MAX), false, true),
        ((0, u128::MAX), true, false),
        ((1, u128::MAX), false, false),
        ((1, u128::MAX), true, true),
    ] {
        assert_eq!(drops(range, not), wanted, "{range:?} {not}");
    }
}

#[test]
fn a_rule_of_the_mesh_in_the_kernel_knows_its_setting() {
    let trace = through("", &app("192.0.2.1:3306").by("eth0"));
    let Some(TraceEvent::Rule { origin: Some(origin), .. }) = trace.deciding() else {
        panic!("{}", trace.text(Detail::Every))
    };
    assert_eq!(origin.setting, Key::OutboundExcludePorts);
}

#[test]
fn a_rule_that_stands_for_several_knows_the_setting_of_each() {
    let plan = plan(&[(Key::InboundExcludePorts, "15090")]);
    let merged = plan
        .rules(Family::V4)
        .restore_text()
        .replace(
            "-p tcp -m tcp --dport 15008 -j RETURN",
            "-p tcp -m multiport --dports 15008,15090 -j RETURN",
        )
        .replace("-A ISTIO_INBOUND -p tcp -m tcp --dport 15090 -j RETURN\n", "");
    let rules = TraceRules::of_ruleset(&behind("", merged), &[], Family::V4, Some(&plan));
    for (port, setting) in [(15008, Key::InboundTunnelPort), (15090, Key::InboundExcludePorts)] {
        let trace = rules.trace(&visit(&format!("10.1.0.2:{port}")));
        let Some(TraceEvent::Rule { origin: Some(origin), rule, .. }) = trace.deciding() else {
            panic!("{}", trace.text(Detail::Every))
        };
        assert!(rule.contains("multiport"), "{rule}");
        assert_eq!(origin.setting, setting);
    }
}

#[test]
fn what_is_not_known_of_a_packet_leaves_its_fate_open_only_where_it_matters() {
    let rules = rules(&[(Key::ExcludeInterfaces, "eth1")]);
    assert_eq!(rules.fate(&app("192.0.2.1:80")), Fate::Unknown, "eth1 is not captured");
    assert_eq!(rules.fate(&app("192.0.2.1:80").by("eth0")), to_proxy(Listener::Outbound, 15001, true));
    let packet = Packet { source: None, ..app("127.0.0.1:80") };
    assert_eq!(rules.fate(&packet), Fate::Untouched, "wherever it comes from");
}

#[test]
fn text_is_no_wider_than_a_terminal() {
    let rules =
        rules(&[(Key::InterceptionMode, "TPROXY"), (Key::RedirectDns, "true"), (Key::CaptureAllDns, "true")]);
    for packet in [app("192.0.2.1:80"), visit("10.1.0.2:80"), proxy("10.1.0.2:1", "10.1.0.2:80")] {
        for detail in [Detail::Met, Detail::Every] {
            let text = rules.trace(&packet).text(detail);
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        }
    }
}

#[test]
fn rules_that_are_not_about_a_packet_are_told_where_every_rule_is_asked_for() {
    let trace = rules(&[]).trace(&app("127.0.0.1:80"));
    let [met, every] = [Detail::Met, Detail::Every].map(|detail| trace.text(detail));
    assert!(!met.contains("[not:") && every.contains("[not:"), "{met}{every}");
    let lines = |text: &str| text.lines().filter(|line| line.contains("ISTIO_OUTPUT ")).count();
    assert!(lines(&met) < lines(&every), "{met}{every}");
}

#[test]
fn marks_that_are_routed_locally_are_those_of_the_family_whose_table_has_the_route() {
    let [mark, other] = [0x539, 0x53a].map(|mark| MaskedMark::from(Mark::new(mark).unwrap()));
    let (table, empty) = (RouteTable::new(133).unwrap(), RouteTable::new(134).unwrap());
    let routing = [
        RoutingItem::Route(Family::V4, table),
        RoutingItem::Rule(Family::V4, mark, table),
        RoutingItem::Rule(Family::V4, other, empty),
        RoutingItem::Rule(Family::V6, other, table),
    ];
    let routing = routing.map(FoundRouting::working);
    let marks = |family| TraceRules::of_ruleset(&HookedRules::default(), &routing, family, None).local_marks;
    assert_eq!((marks(Family::V4), marks(Family::V6)), (vec![mark], vec![]));
}

#[test]
fn a_family_without_rules_is_left_alone() {
    let only_v4 = Redirect::sidecar(Families::V4).build().unwrap().plan();
    let packet = Packet::from_pod(1, 1, "[fd00::2]:1".parse().unwrap(), "[2001:db8::1]:80".parse().unwrap());
    assert_eq!(TraceRules::of_plan(&only_v4, Family::V6).fate(&packet), Fate::Untouched);
}

#[test]
fn the_rules_of_the_mesh_are_listed_with_what_they_counted() {
    let plan = plan(&[]);
    let text: String = plan
        .rules(Family::V4)
        .restore_text()
        .lines()
        .map(|line| match line.get(..1) {
            Some("-") => format!("[3:180] {line}\n"),
            Some("*") => format!("{line}\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    let foreign = "*nat\n:OTHER - [0:0]\n[7:7] -A OUTPUT -p tcp -j OTHER\n[9:9] -A OTHER -j RETURN\n[1:2 -A OTHER -j ACCEPT\nCOMMIT\n";
    let mut ruleset = HookedRules::default();
    assert!(ruleset.add_saved(Family::V4, &format!("{text}{foreign}")).is_err(), "a counter that is cut");
    let mut ruleset = HookedRules::default();
    ruleset.add_saved(Family::V4, &format!("{text}{}", foreign.replace("[1:2 ", ""))).unwrap();
    let wanted: usize =
        plan.explained_rules(Family::V4).values().flat_map(|chains| chains.values()).map(Vec::len).sum();
    for known in [None, Some(&plan)] {
        let rules = TraceRules::of_ruleset(&ruleset, &[], Family::V4, known);
        let of_mesh: Vec<MeshRule<'_>> = rules.of_mesh().collect();
        assert_eq!(of_mesh.len(), wanted, "{of_mesh:?}");
        for one in of_mesh {
            assert_eq!(
                one.rule.counter.map(|counter| (counter.packets, counter.bytes)),
                Some((3, 180)),
                "{one:?}"
            );
            assert_eq!(one.origins.is_empty(), known.is_none(), "{one:?}");
        }
    }
}

#[test]
fn chains_that_an_earlier_version_left_are_the_meshs() {
    let mut ruleset = HookedRules::default();
    let saved = "*nat\n:OUTPUT ACCEPT\n:ISTIO_OLD -\n:THEIRS -\n-A ISTIO_OLD -j RETURN\n-A THEIRS -j RETURN\nCOMMIT\n";
    ruleset.add_saved(Family::V4, saved).unwrap();
    let rules = TraceRules::of_ruleset(&ruleset, &[], Family::V4, None);
    let chains: Vec<String> = rules.of_mesh().map(|one| one.place.chain).collect();
    assert_eq!(chains, ["ISTIO_OLD"]);
}

#[test]
fn packets_of_one_family_have_no_address_of_the_other() {
    let own: SocketAddr = "10.1.0.2:80".parse().unwrap();
    let packet = Packet::from_outside("192.0.2.1:1000".parse().unwrap(), own);
    for (not, fate) in [(false, Fate::Untouched), (true, Fate::Dropped)] {
        for selector in [Selector::Source(Family::V6), Selector::Destination(Family::V6)] {
            let among = SetLookup::range(selector, (0, u128::MAX));
            let rule = KernelRule {
                conditions: [Condition::Among(Equality { value: among, not })].into(),
                statements: [Statement::Drop].into(),
                ..KernelRule::default()
            };
            let base =
                Base { hook: Hook::Prerouting, priority: 0, is_nat: false, drops: false, reroutes: false };
            let chain = ChainState { base: Some(base), rules: [rule].into(), ..ChainState::default() };
            let mut ruleset = HookedRules::default();
            let name = TableName { api: Api::NfTables, family: TableFamily::Inet, name: "theirs".into() };
            ruleset.table(name).chains.insert("in".into(), chain);
            let rules = TraceRules::of_ruleset(&ruleset, &[], Family::V4, None);
            assert_eq!(rules.fate(&packet), fate, "{selector:?} {not}");
        }
    }
}
