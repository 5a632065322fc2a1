use super::*;
use crate::{Fate, Packet};
use netfilter_state::route_tables::{PolicyRule, Route, RouteKind, RouteTables, RuleAction};
use netfilter_state::ruleset::{
    Api, Base, ChainState, KernelRule, Selector, SetLookup, Statement, TableFamily, TableName, TableState,
    VerdictMap,
};
use redirect_core::{
    AmbientRedirect, Families, Redirect,
    accepted::{AcceptedBy, AcceptedRules},
    rule::Hook,
    settings::{Key, NamespaceFacts, RawSettings, Source},
    values::Family,
};
use std::net::{IpAddr, Ipv4Addr};

mod starts;

const OWN: &str = "10.1.0.2";

fn plan(settings: &[(Key, &'static str)]) -> RulePlan {
    plan_for(settings, &NamespaceFacts::new(&[OWN.parse().unwrap()]))
}

fn plan_for(settings: &[(Key, &'static str)], facts: &NamespaceFacts<'_>) -> RulePlan {
    let mut raw = RawSettings::new();
    raw.set(Key::InboundPorts, "*", Source::Flag("b"));
    raw.set(Key::OutboundRanges, "*", Source::Flag("i"));
    for (key, text) in settings {
        raw.set(*key, *text, Source::Flag("x"));
    }
    Redirect::parse(&raw, facts).unwrap().plan()
}

/// A plan's rules in force in the tables of iptables, and then what others have: in the form of iptables-save, but with any
/// table (`*inet/theirs`), with hooks (`:theirs output -150 nat drop`), with `-I` for rules in front, and with `!dormant`.
fn in_force(plan: &RulePlan, others: &str) -> HookedRules {
    in_force_of(plan, Family::V4, others)
}

/// The same of a family.
fn in_force_of(plan: &RulePlan, family: Family, others: &str) -> HookedRules {
    let mut ruleset = HookedRules::default();
    let mut own = plan.rules(family).restore_text();
    for number in 1..9 {
        own = own.replace(&format!("-I PREROUTING {number}"), "-A PREROUTING");
    }
    ruleset.add_saved(family, &own).unwrap();
    for (table, priority) in [("raw", -300), ("mangle", -150), ("nat", -100), ("filter", 0)] {
        let name = TableName { api: Api::XTables, family: family.into(), name: table.into() };
        let state = ruleset.tables.remove(&name).unwrap_or_default();
        let table = ruleset.table(TableName { api: Api::NfTables, ..name.clone() });
        *table = state;
        for hook in [Hook::Prerouting, Hook::Output, Hook::Input, Hook::Postrouting] {
            let chain = table.chains.entry(hook.name().into()).or_default();
            chain.base =
                Some(Base { hook, priority, is_nat: name.name == "nat", drops: false, reroutes: false });
        }
    }
    let mut name = TableName { api: Api::NfTables, family: family.into(), name: "nat".into() };
    for line in others.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(table) = line.strip_prefix('*') {
            let (of, table) = table.split_once('/').unwrap_or(("", table));
            let families = [TableFamily::Ip, TableFamily::Ip6, TableFamily::Inet];
            let family =
                families.into_iter().find(|known| known.name() == of).unwrap_or_else(|| family.into());
            name = TableName { api: Api::NfTables, family, name: table.into() };
        }
        let table = ruleset.table(name.clone());
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match words.as_slice() {
            ["!dormant"] => table.dormant = true,
            [chain, rest @ ..] if chain.starts_with(':') => declare(table, &chain[1..], rest),
            ["-A", chain, rest @ ..] => chain_of(table, chain).rules.push(KernelRule::saved(&rest.join(" "))),
            ["-I", chain, rest @ ..] => {
                chain_of(table, chain).rules.insert(0, KernelRule::saved(&rest.join(" ")));
            }
            _ => assert!(line.starts_with('*'), "{line}"),
        }
    }
    ruleset
}

fn chain_of<'a>(table: &'a mut TableState, name: &str) -> &'a mut ChainState {
    table.chains.entry(name.into()).or_default()
}

fn declare(table: &mut TableState, name: &str, words: &[&str]) {
    let chain = chain_of(table, name);
    let [hook, priority, kind, policy @ ..] = words else { return };
    chain.base = Some(Base {
        hook: Hook::ALL.iter().copied().find(|known| known.name().eq_ignore_ascii_case(hook)).unwrap(),
        priority: priority.parse().unwrap(),
        is_nat: *kind == "nat",
        reroutes: *kind == "route",
        drops: policy == ["drop"],
    });
}

fn found(plan: &RulePlan, others: &str) -> Vec<Finding> {
    let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
    let interfaces = ["eth0".to_string()];
    PodTraffic { addresses: &addresses, interfaces: &interfaces, ..PodTraffic::default() }
        .judge(&in_force(plan, others), plan)
        .findings
}

/// One case: other programs' rules, and what is found: severity, table, chain, rule number, effect, traffic.
type Case = (&'static str, &'static [Wanted]);
type Wanted = (Certainty, &'static str, Effect, &'static [Traffic]);

#[track_caller]
fn check(settings: &[(Key, &'static str)], cases: &[Case]) {
    let plan = plan(settings);
    let mut problems = Vec::new();
    for (others, wanted) in cases {
        let findings = found(&plan, others);
        let said: Vec<_> = findings
            .iter()
            .map(|finding| {
                let RuleRef { table, chain, rule, .. } = &finding.place;
                let place = match rule {
                    Some(number) => format!("{} {chain} {number}", table.name),
                    None => format!("{} {chain}", table.name),
                };
                let traffic: Vec<Traffic> = finding.traffic.iter().map(|(_, traffic)| *traffic).collect();
                (finding.severity, place, finding.effect, traffic)
            })
            .collect();
        let wanted: Vec<_> = wanted
            .iter()
            .map(|(severity, place, effect, traffic)| {
                (*severity, (*place).to_string(), *effect, traffic.to_vec())
            })
            .collect();
        if said != wanted {
            let lines: Vec<_> = findings.iter().map(ToString::to_string).collect();
            problems.push(format!("{others}\n  wants {wanted:?}\n  found {said:?}\n  {lines:#?}"));
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

use Certainty::{Does, May};
use Effect::*;
use Traffic::{ByProxy, Dns, Inbound, Outbound, ProxyToSelf, ToApplication, ToProxy};

const NOTHING: &[(Certainty, &str, Effect, &[Traffic])] = &[];
const TPROXY: &[(Key, &str)] = &[(Key::InterceptionMode, "TPROXY")];
const DNS: &[(Key, &str)] = &[(Key::RedirectDns, "true"), (Key::CaptureAllDns, "true")];

#[test]
fn of_very_many_findings_the_first_are_told() {
    let rules = "-A theirs -p tcp -m statistic --mode random --probability 0.5 -j DROP\n".repeat(40);
    let others = format!("*inet/theirs\n:theirs output -150 filter\n{rules}");
    assert_eq!(found(&plan(&[]), &others).len(), 16);
}

#[test]
fn a_plan_alone_is_not_in_its_own_way() {
    for settings in [
        &[][..],
        TPROXY,
        DNS,
        &[(Key::DropInvalid, "true"), (Key::ExcludeInterfaces, "eth1"), (Key::VirtualInterfaces, "net1")],
        &[(Key::OutboundRanges, "10.0.0.0/8,172.16.0.0/12"), (Key::OutboundExcludeRanges, "10.1.0.0/16")],
        &[(Key::InboundPorts, "80,443"), (Key::OutboundExcludePorts, "3306,5432")],
        &[(Key::OwnerGroups, "2000,3000")],
    ] {
        check(settings, &[("", NOTHING)]);
    }
}

#[test]
fn what_goes_first_in_a_built_in_chain_is_found() {
    check(
        &[],
        &[
            ("-I OUTPUT -j ACCEPT", &[(Does, "nat OUTPUT 1", EndsChain, &[Outbound, ProxyToSelf])]),
            ("-I OUTPUT -j RETURN", &[(Does, "nat OUTPUT 1", EndsChain, &[Outbound, ProxyToSelf])]),
            ("-I PREROUTING -j ACCEPT", &[(Does, "nat PREROUTING 1", EndsChain, &[Inbound])]),
            ("-A PREROUTING -j ACCEPT\n-A OUTPUT -j ACCEPT", NOTHING),
            (
                "-I OUTPUT -p tcp -m tcp --dport 9999 -j RETURN",
                &[(Does, "nat OUTPUT 1", EndsChain, &[Outbound, ProxyToSelf])],
            ),
            ("-I OUTPUT -d 192.0.2.0/24 -j ACCEPT", &[(Does, "nat OUTPUT 1", EndsChain, &[Outbound])]),
            (
                "-I OUTPUT -m owner --uid-owner 1000 -j ACCEPT",
                &[(Does, "nat OUTPUT 1", EndsChain, &[Outbound])],
            ),
            ("-I PREROUTING -s 192.0.2.7/32 -j ACCEPT", &[(Does, "nat PREROUTING 1", EndsChain, &[Inbound])]),
            (
                "-I PREROUTING -p tcp -j DNAT --to-destination 10.1.0.9",
                &[(Does, "nat PREROUTING 1", Translates, &[Inbound])],
            ),
            (
                "-I OUTPUT -p tcp -j REDIRECT --to-ports 3128",
                &[(Does, "nat OUTPUT 1", Translates, &[Outbound, ProxyToSelf, ByProxy, ToApplication])],
            ),
            (
                ":X\n-A X -p tcp -j ACCEPT\n-I OUTPUT -j X",
                &[(Does, "nat X 1", EndsChain, &[Outbound, ProxyToSelf])],
            ),
            (":X\n-A X -p tcp -j RETURN\n-I OUTPUT -j X", NOTHING),
            (
                ":X\n-A X -p tcp -j RETURN\n-I OUTPUT -g X",
                &[(Does, "nat OUTPUT 1", EndsChain, &[Outbound, ProxyToSelf])],
            ),
            (
                "-I OUTPUT -m limit --limit 5/sec -j ACCEPT",
                &[(May, "nat OUTPUT 1", EndsChain, &[Outbound, ProxyToSelf])],
            ),
            (
                "-I OUTPUT -m set --match-set x dst -j MYSTERY",
                &[(May, "nat OUTPUT 1", Unknown, &[Outbound, ProxyToSelf, ByProxy, ToApplication])],
            ),
        ],
    );
}

#[test]
fn what_is_about_other_traffic_is_left_alone() {
    check(
        &[(Key::OutboundExcludePorts, "3306"), (Key::InboundExcludePorts, "9090")],
        &[
            ("-I OUTPUT -p udp -j ACCEPT", NOTHING),
            ("-I OUTPUT -p icmp -j ACCEPT", NOTHING),
            ("-I OUTPUT -o tun0 -j ACCEPT\n-I PREROUTING -i tun0 -j ACCEPT", NOTHING),
            ("-I PREROUTING -i lo -j ACCEPT", NOTHING),
            ("-I OUTPUT -p tcp -m tcp --dport 3306 -j ACCEPT", NOTHING),
            ("-I PREROUTING -p tcp -m tcp --dport 9090 -j ACCEPT", NOTHING),
            ("-I PREROUTING -d 10.9.0.0/16 -j ACCEPT", NOTHING),
            ("-I OUTPUT -m owner --uid-owner 1337 -d 192.0.2.0/24 -j ACCEPT", NOTHING),
            ("*filter\n-A OUTPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", NOTHING),
            (LOOPBACK_RESOLVER, NOTHING),
            // A rule of the plan, met by another program's: what the proxy sends comes back to it.
            (
                "-I OUTPUT -p tcp -j ISTIO_REDIRECT",
                &[(Does, "nat ISTIO_REDIRECT 1", Unexplained, &[ProxyToSelf, ByProxy, ToApplication])],
            ),
            ("-A POSTROUTING -j MASQUERADE", NOTHING),
            ("*filter\n-A INPUT -m conntrack --ctstate INVALID -j DROP\n-A INPUT -j ACCEPT", NOTHING),
            ("*filter\n-A INPUT ! -i lo -p tcp -m tcp --dport 8080 -j DROP", NOTHING),
            (
                "*inet/theirs\n:pre prerouting -150 filter\n-A pre -j ACCEPT\n:out output -150 filter\n-A out -j ACCEPT",
                NOTHING,
            ),
            ("*inet/theirs\n:pre prerouting -150 filter\n-A pre -j MARK --set-xmark 0x7/0xffffffff", NOTHING),
            ("*inet/theirs\n!dormant\n:pre prerouting -150 filter drop", NOTHING),
            ("*ip6/theirs\n:pre prerouting -150 filter drop", NOTHING),
            ("*inet/theirs\n:fwd forward 0 filter drop", NOTHING),
        ],
    );
}

#[test]
fn another_chain_that_goes_first_is_found() {
    check(
        &[],
        &[
            (
                "*theirs\n:out output -150 nat\n-A out -p tcp -j REDIRECT --to-ports 1",
                &[(Does, "theirs out 1", Translates, &[Outbound, ProxyToSelf, ByProxy, ToApplication])],
            ),
            ("*theirs\n:out output -150 nat\n-A out -j ACCEPT", NOTHING),
            (
                "*inet/theirs\n:pre prerouting -150 nat\n-A pre -p tcp -m tcp --dport 443 -j DNAT --to-destination 10.1.0.9",
                &[(Does, "theirs pre 1", Translates, &[Inbound])],
            ),
            (
                "*theirs\n:out output -100 nat\n-A out -p tcp -j REDIRECT --to-ports 1",
                &[
                    (Does, "theirs out 1", Translates, &[ByProxy, ToApplication]),
                    (May, "theirs out 1", Translates, &[Outbound, ProxyToSelf]),
                ],
            ),
            (
                "*inet/theirs\n:pre prerouting -400 filter\n-A pre -p tcp -j DROP",
                &[(Does, "theirs pre 1", Drops, &[Inbound, Outbound, ProxyToSelf, ToProxy, ToApplication])],
            ),
            (
                "*inet/theirs\n:pre prerouting -201 filter\n-A pre -p tcp -j CT --notrack",
                &[(Does, "theirs pre 1", Untracks, &[Inbound])],
            ),
            (
                "*inet/theirs\n:pre prerouting -200 filter\n-A pre -p tcp -j CT --notrack",
                &[(May, "theirs pre 1", Untracks, &[Inbound])],
            ),
            ("*inet/theirs\n:pre prerouting -199 filter\n-A pre -p tcp -j CT --notrack", NOTHING),
            (
                "*raw\n-I PREROUTING -p tcp -j CT --notrack",
                &[(Does, "raw PREROUTING 1", Untracks, &[Inbound])],
            ),
            ("*raw\n-I OUTPUT -j NOTRACK", &[(Does, "raw OUTPUT 1", Untracks, &[Outbound, ProxyToSelf])]),
            (
                // What the pod sends to the proxy comes in over lo.
                "*mangle\n-I PREROUTING -p tcp -j TPROXY --on-port 1",
                &[(
                    Does,
                    "mangle PREROUTING 1",
                    Tproxies,
                    &[Inbound, Outbound, ProxyToSelf, ToProxy, ToApplication],
                )],
            ),
            (
                "*mangle\n-I OUTPUT -p tcp -j NFQUEUE",
                &[(May, "mangle OUTPUT 1", Queues, &[Outbound, ProxyToSelf, ByProxy, ToApplication])],
            ),
            (
                "*inet/theirs\n:pre prerouting -10 filter\n-A pre -p tcp -m string --algo bm -j DROP",
                &[(May, "theirs pre 1", Drops, &[Inbound, Outbound, ProxyToSelf, ToProxy, ToApplication])],
            ),
        ],
    );
}

#[test]
fn of_two_chains_at_one_priority_either_may_go_first_in_either_mode() {
    let others =
        "*aa\n:out output -100 nat\n-A out -p tcp -m multiport --dports 80,443 -j REDIRECT --to-ports 3128";
    for settings in [&[][..], TPROXY] {
        let by_tproxy = settings == TPROXY;
        // What the proxy's group alone sends to its own pod is TPROXY's, and no nat of the mesh translates it before or behind.
        let to_self = (Does, "aa out 1", Translates, &[ProxyToSelf, ByProxy][..]);
        let by_proxy = (Does, "aa out 1", Translates, &[ByProxy, ToApplication][..]);
        let either: (_, _, _, &[Traffic]) =
            (May, "aa out 1", Translates, if by_tproxy { &[Outbound] } else { &[Outbound, ProxyToSelf] });
        let wanted = [if by_tproxy { to_self } else { by_proxy }, either];
        let plan = plan(settings);
        let found: Vec<_> = found(&plan, others)
            .into_iter()
            .map(|one| (one.severity, one.effect, one.traffic.iter().map(|(_, of)| *of).collect::<Vec<_>>()))
            .collect();
        let wanted: Vec<_> = wanted
            .iter()
            .map(|(severity, _, effect, traffic)| (*severity, *effect, traffic.to_vec()))
            .collect();
        assert_eq!(found, wanted);
    }
}

#[test]
fn what_drops_captured_packets_further_on_is_found() {
    check(
        &[],
        &[
            (
                "*filter\n-A INPUT -p tcp -m tcp --dport 15006 -j DROP",
                &[(Does, "filter INPUT 1", Drops, &[Inbound, ProxyToSelf, ToApplication])],
            ),
            (
                "*filter\n-A OUTPUT -d 127.0.0.1/32 -p tcp -m tcp --dport 15001 -j REJECT",
                &[(Does, "filter OUTPUT 1", Drops, &[Outbound])],
            ),
            (
                "*filter\n-A INPUT -s 192.0.2.0/24 -j DROP",
                &[(Does, "filter INPUT 1", Drops, &[Inbound, ToProxy])],
            ),
            (
                "*inet/theirs\n:pre prerouting -310 filter\n-A pre -m set --match-set a src -j ACCEPT\n-A pre -p tcp -j DROP\n\
                 :later prerouting -305 filter\n-A later -p tcp -j DROP",
                &[
                    (
                        Does,
                        "theirs later 1",
                        Drops,
                        &[Inbound, Outbound, ProxyToSelf, ToProxy, ToApplication],
                    ),
                    (May, "theirs pre 2", Drops, &[Inbound, Outbound, ProxyToSelf, ToProxy, ToApplication]),
                ],
            ),
            (
                "*inet/theirs\n:post postrouting 100 nat\n-A post -p tcp -j DROP",
                &[(Does, "theirs post 1", Drops, &[Outbound, ProxyToSelf, ByProxy, ToApplication])],
            ),
            (
                "*filter\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -j DROP",
                &[(Does, "filter INPUT 2", Drops, &[Inbound, ToProxy])],
            ),
            (
                "*filter\n:INPUT input 0 filter drop",
                &[(
                    Does,
                    "filter INPUT",
                    PolicyDrops,
                    &[Inbound, Outbound, ProxyToSelf, ToProxy, ToApplication],
                )],
            ),
            (
                "*filter\n:INPUT input 0 filter drop\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -m multiport --dports 15006,15008 -j ACCEPT",
                NOTHING,
            ),
            (
                "*filter\n:INPUT input 0 filter drop\n-A INPUT -i lo -j ACCEPT\n-A INPUT -m set --match-set a src -j ACCEPT",
                &[(May, "filter INPUT", PolicyDrops, &[Inbound, ToProxy])],
            ),
        ],
    );
}

#[test]
fn the_mark_is_tproxys() {
    let mark = "-j MARK --set-xmark 0x7/0xffffffff";
    let our_mark = "-j MARK --set-xmark 0x539/0xffffffff";
    check(
        TPROXY,
        &[
            (
                "*inet/theirs\n:pre prerouting -140 filter\n-A pre -p tcp -j MARK --set-xmark 0x7/0xffffffff",
                &[(May, "theirs pre 1", Remarks, &[Inbound])],
            ),
            (
                "*inet/theirs\n:pre prerouting -140 filter\n-A pre -p tcp -j MARK --set-xmark 0x2/0x2",
                &[(May, "theirs pre 1", Remarks, &[Inbound])],
            ),
            // TPROXY's mark, 0x539, has this bit.
            ("*inet/theirs\n:pre prerouting -140 filter\n-A pre -p tcp -j MARK --set-xmark 0x1/0x1", NOTHING),
            ("*inet/theirs\n:pre prerouting -140 filter\n-A pre -p udp -j MARK --set-xmark 0x1/0x1", NOTHING),
            // The proxy's calls to the port of tunnels are handed over, too.
            (
                "*mangle\n-I PREROUTING -j ACCEPT",
                &[(Does, "mangle PREROUTING 1", EndsChain, &[Inbound, ProxyToSelf])],
            ),
            ("*raw\n-I PREROUTING -p tcp -j CT --notrack", NOTHING),
            (
                "-I PREROUTING -p tcp -j DNAT --to-destination 10.1.0.9",
                &[(Does, "nat PREROUTING 1", Translates, &[Inbound])],
            ),
            ("-I PREROUTING -p tcp -j ACCEPT", NOTHING),
        ],
    );
    let plan = plan(TPROXY);
    // What others send is handed over with any mark but TPROXY's own; what the proxy sends to its own pod only with the mark
    // that its packets have there.
    let remarked = |mark: &str| {
        let findings = found(&plan, &format!("*mangle\n-I PREROUTING {mark}"));
        let traffic =
            |finding: &Finding| finding.traffic.iter().map(|(_, traffic)| *traffic).collect::<Vec<_>>();
        findings.iter().map(|finding| (finding.effect, traffic(finding))).collect::<Vec<_>>()
    };
    assert_eq!(remarked(mark), [(Remarks, vec![ProxyToSelf])]);
    assert_eq!(remarked(our_mark), [(Remarks, vec![Inbound, ProxyToSelf])]);
}

/// What is the plan's is a rule that it has, in its table, chain and place.
#[test]
fn a_name_like_the_meshs_makes_no_rule_its_own() {
    check(
        &[],
        &[
            (
                "*ip/f\n:ISTIO_X output -300 filter\n-A ISTIO_X -j NOTRACK",
                &[(Does, "f ISTIO_X 1", Untracks, &[Outbound, ProxyToSelf])],
            ),
            (
                "*ip/f\n:ISTIO_X prerouting -300 filter\n-A ISTIO_X -j NOTRACK",
                &[(Does, "f ISTIO_X 1", Untracks, &[Inbound])],
            ),
            (
                "*filter\n:ISTIO_X\n-A ISTIO_X -p tcp -j DROP\n-A INPUT -j ISTIO_X",
                &[(
                    Does,
                    "filter ISTIO_X 1",
                    Drops,
                    &[Inbound, Outbound, ProxyToSelf, ToProxy, ToApplication],
                )],
            ),
            (
                "*inet/istio-proxy-nat\n:istio-redirect output -110 nat\n-A istio-redirect -p tcp -j REDIRECT --to-ports 7",
                &[(
                    Does,
                    "istio-proxy-nat istio-redirect 1",
                    Translates,
                    &[Outbound, ProxyToSelf, ByProxy, ToApplication],
                )],
            ),
            // In the plan's own chain, too.
            (
                "-I ISTIO_OUTPUT -d 192.0.2.0/24 -j RETURN",
                &[(Does, "nat ISTIO_OUTPUT 1", EndsChain, &[Outbound])],
            ),
        ],
    );
}

/// A connection may be opened with more flags than SYN, and by a packet that another connection asked for.
#[test]
fn every_kind_of_first_packet_is_one() {
    check(
        &[],
        &[
            (
                "-I OUTPUT -p tcp -m tcp ! --tcp-flags FIN,SYN,RST,PSH,ACK,URG SYN -j ACCEPT",
                &[(Does, "nat OUTPUT 1", EndsChain, &[Outbound, ProxyToSelf])],
            ),
            (
                "-I PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
                &[(May, "nat PREROUTING 1", EndsChain, &[Inbound])],
            ),
            ("-I OUTPUT -p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -j ACCEPT", NOTHING),
        ],
    );
}

/// What the plan leaves alone because it is the proxy's has to get out; a service may lead it elsewhere.
#[test]
fn the_proxys_own_connections_are_judged_too() {
    check(
        &[],
        &[
            (
                "*filter\n-A OUTPUT ! -o lo -m owner --uid-owner 1337 -j REJECT",
                &[(Does, "filter OUTPUT 1", Drops, &[ByProxy])],
            ),
            (
                "*theirs\n:out output -50 nat\n-A out -p tcp -j REDIRECT --to-ports 1",
                &[(Does, "theirs out 1", Translates, &[ByProxy, ToApplication])],
            ),
            ("-A OUTPUT -d 10.96.0.0/12 -p tcp -j DNAT --to-destination 10.1.0.9:80", NOTHING),
            ("*filter\n-A OUTPUT -m owner --uid-owner 1000 -p udp -j REJECT", NOTHING),
        ],
    );
}

#[test]
fn a_translation_to_where_packets_go_anyway_is_one() {
    check(
        &[],
        &[
            ("*ip/p\n:p prerouting -150 nat\n-A p -j REDIRECT", &[(Does, "p p 1", Translates, &[Inbound])]),
            ("*ip/p\n:p prerouting -50 nat\n-A p -j REDIRECT", NOTHING),
        ],
    );
}

/// Where another source address leads answers is not known; that of the interface leads them back.
#[test]
fn a_source_that_is_another_one_may_lose_answers() {
    check(
        &[],
        &[
            (
                "-A POSTROUTING -o lo -p tcp -j SNAT --to-source 240.0.0.1",
                &[(May, "nat POSTROUTING 1", Unknown, &[Outbound, ProxyToSelf, ToApplication])],
            ),
            (
                "-A POSTROUTING -o eth0 -p tcp -j SNAT --to-source 240.0.0.1",
                &[(May, "nat POSTROUTING 1", Unknown, &[ByProxy])],
            ),
            (
                "-A INPUT -i eth0 -p tcp -j SNAT --to-source 240.0.0.1",
                &[(May, "nat INPUT 1", Unknown, &[Inbound, ToProxy])],
            ),
            ("-A POSTROUTING -j MASQUERADE", NOTHING),
        ],
    );
}

/// Findings in a pod whose routes are these.
fn found_among(others: &str, edit: impl Fn(&mut RouteTables)) -> Vec<(Certainty, Effect)> {
    let mut tables = route_tables();
    edit(&mut tables);
    let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
    let interfaces = ["eth0".to_string()];
    let pod = PodTraffic {
        addresses: &addresses,
        interfaces: &interfaces,
        routes: Some(&tables),
        ..PodTraffic::default()
    };
    let plan = plan(&[]);
    pod.judge(&in_force(&plan, others), &plan).findings.iter().map(|one| (one.severity, one.effect)).collect()
}

#[test]
fn another_class_of_traffic_may_be_routed_otherwise() {
    let others = |kind: &str| format!("*ip/f\n:o output -150 {kind}\n-A o -p tcp -j TOS --set-tos 0x10/0xff");
    let by_class = |tables: &mut RouteTables| {
        let lost = PolicyRule { action: RuleAction::Blackhole, ..PolicyRule::lookup(Family::V4, 10, 0) };
        tables.rules.insert(1, PolicyRule { unknown: ["tos"].into(), ..lost });
    };
    assert!(found_among(&others("route"), by_class).contains(&(May, Routes)));
    // Nothing is routed again.
    assert_eq!(found_among(&others("filter"), by_class), []);
    assert_eq!(found_among(&others("route"), |_| ()), []);
}

#[test]
fn an_address_is_local_by_its_route() {
    let others = "-I OUTPUT -m addrtype --dst-type LOCAL -j DROP";
    let plan = plan(&[]);
    let is_dropped = |added: &[(RouteKind, &str)]| {
        let mut tables = route_tables();
        for (kind, to) in added {
            let like = tables.routes[0].clone();
            tables.routes.push(Route { to: to.parse().unwrap(), kind: *kind, ..like });
        }
        let rules = TraceRules::of_ruleset(&in_force(&plan, others), &[], Family::V4, Some(&plan));
        let rules = rules.with_addresses(&[OWN.parse().unwrap()]).with_routes(&tables);
        let to_others = Packet::from_pod(
            1000,
            1000,
            (OWN.parse::<IpAddr>().unwrap(), 1).into(),
            "198.51.100.1:80".parse().unwrap(),
        );
        rules.fate(&to_others.by("eth0")) == Fate::Dropped
    };
    let local = (RouteKind::Local, "198.51.100.0/24");
    assert!(!is_dropped(&[]) && is_dropped(&[local]));
    assert!(!is_dropped(&[local, (RouteKind::Broadcast, "198.51.100.0/25")]), "of another kind");
}

/// A foreign rule hands packets over only to a listener; iptables drop them otherwise.
#[test]
fn what_nobody_listens_for_goes_on() {
    let plan = plan(&[]);
    let severities = |ends: bool| {
        let mut ruleset = in_force(&plan, "*inet/f\n:p prerouting -160 filter");
        let statements = [Statement::Tproxy { port: Some(9), mark: Some((1, 1)), ends }].into();
        let name = TableName { api: Api::NfTables, family: TableFamily::Inet, name: "f".into() };
        chain_of(ruleset.table(name), "p").rules.push(KernelRule { statements, ..KernelRule::default() });
        let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
        let interfaces = ["eth0".to_string()];
        let pod = PodTraffic { addresses: &addresses, interfaces: &interfaces, ..PodTraffic::default() };
        pod.judge(&ruleset, &plan).findings.iter().map(|one| (one.severity, one.effect)).collect::<Vec<_>>()
    };
    assert_eq!((severities(true), severities(false)), (vec![(Does, Tproxies)], vec![(May, Tproxies)]));
    let others = "*mangle\n-I PREROUTING -p tcp -j TPROXY --on-port 9 --tproxy-mark 0x1/0x1";
    let rules = TraceRules::of_ruleset(&in_force(&plan, others), &[], Family::V4, Some(&plan));
    let to_pod = Packet::from_outside("192.0.2.1:1".parse().unwrap(), format!("{OWN}:80").parse().unwrap());
    assert!(rules.trace(&to_pod.by("eth0")).may.contains(&Fate::Dropped));
}

/// Answers, which belong to no zone, do not answer a connection in one.
#[test]
fn a_zone_of_others_may_lose_answers() {
    let zone = "*raw\n-I PREROUTING -i eth0 -p tcp -j CT --zone 5";
    check(&[], &[(zone, &[(May, "raw PREROUTING 1", Untracks, &[Inbound])])]);
    check(TPROXY, &[(zone, NOTHING)]);
}

/// The socket that TPROXY has chosen is the packet's from there on.
#[test]
fn what_is_handed_over_may_have_the_owner_of_its_listener() {
    let by_owner = "*inet/f\n:i input 0 filter\n-A i -m owner --uid-owner 1337 -j DROP";
    check(TPROXY, &[(by_owner, &[(May, "f i 1", Drops, &[Inbound, ProxyToSelf])])]);
    check(&[], &[(by_owner, NOTHING)]);
}

/// A source that is translated to itself is not (`nf_nat_setup_info`).
#[test]
fn a_translated_source_may_be_the_same() {
    let others = |verdict: &str| {
        let nat = "*ip/f\n:p postrouting 100 nat\n-A p -j MASQUERADE\n";
        format!(
            "{nat}:q postrouting 200 filter\n-A q -m conntrack --ctstate SNAT -j {verdict}\n-A q -p tcp -j DROP"
        )
    };
    let severities = |verdict: &str| {
        found(&plan(&[]), &others(verdict))
            .iter()
            .map(|one| (one.severity, one.place.rule))
            .collect::<Vec<_>>()
    };
    assert_eq!(severities("ACCEPT"), [(May, Some(2))]);
    assert!(severities("DROP").contains(&(May, Some(1))), "{:?}", severities("DROP"));
}

#[test]
fn what_another_rule_sends_to_the_listener_is_not_lost() {
    check(
        &[],
        &[
            // Those that the proxy opens with its group alone come back to it.
            (
                "-I OUTPUT -p tcp -m owner ! --uid-owner 1337 -j REDIRECT --to-ports 15001",
                &[(Does, "nat OUTPUT 1", Translates, &[ByProxy])],
            ),
            (
                "-I OUTPUT -p tcp -m owner ! --uid-owner 1337 -j REDIRECT --to-ports 15006",
                &[(Does, "nat OUTPUT 1", Translates, &[Outbound, ByProxy])],
            ),
        ],
    );
}

#[test]
fn what_is_redirected_to_the_port_it_has_stays_in_the_pod() {
    const HERE: &[Wanted] = &[(Does, "nat OUTPUT 2", Translates, &[ByProxy])];
    check(
        &[],
        &[
            ("-A OUTPUT -p tcp -j REDIRECT", HERE),
            (
                "-A OUTPUT -p tcp -m tcp --dport 80 -j REDIRECT",
                &[(Does, "nat OUTPUT 2", Translates, &[ByProxy, ToApplication])],
            ),
            ("-A OUTPUT -p tcp -j DNAT --to-destination 192.0.2.7", NOTHING),
        ],
    );
}

#[test]
fn dns_queries_are_traffic_too() {
    check(
        DNS,
        &[
            (
                "-I OUTPUT -p udp -m udp --dport 53 -j DNAT --to-destination 1.1.1.1",
                &[(Does, "nat OUTPUT 1", Translates, &[Dns])],
            ),
            // Without its zone a query arrives all the same, but its answer may be taken for another connection's.
            ("*raw\n-I OUTPUT -p udp -j ACCEPT", &[(May, "raw OUTPUT 1", EndsChain, &[Dns, ByProxy])]),
            (
                "*filter\n-A OUTPUT -p udp -m udp --dport 15053 -j DROP",
                &[(Does, "filter OUTPUT 1", Drops, &[Dns])],
            ),
            ("-I OUTPUT -p udp -m udp --dport 123 -j ACCEPT", NOTHING),
        ],
    );
    check(&[], &[("-I OUTPUT -p udp -m udp --dport 53 -j DNAT --to-destination 1.1.1.1", NOTHING)]);
}

/// Docker's, KinD's and others' name servers.
const LOOPBACK_RESOLVER: &str = ":DOCKER_OUTPUT
-A DOCKER_OUTPUT -d 127.0.0.11/32 -p tcp -m tcp --dport 53 -j DNAT --to-destination 127.0.0.11:3
-A DOCKER_OUTPUT -d 127.0.0.11/32 -p udp -m udp --dport 53 -j DNAT --to-destination 127.0.0.11:4
-I OUTPUT -d 127.0.0.11/32 -j DOCKER_OUTPUT
:DOCKER_POSTROUTING
-A DOCKER_POSTROUTING -s 127.0.0.11/32 -p tcp -m tcp --sport 3 -j SNAT --to-source :53
-A POSTROUTING -d 127.0.0.11/32 -j DOCKER_POSTROUTING";

#[test]
fn a_query_to_a_resolver_in_the_pod_is_a_query() {
    check(
        DNS,
        &[
            (
                LOOPBACK_RESOLVER,
                &[
                    (Does, "nat DOCKER_OUTPUT 1", Translates, &[Dns]),
                    (Does, "nat DOCKER_OUTPUT 2", Translates, &[Dns]),
                ],
            ),
            ("-I OUTPUT -d 127.0.0.53/32 -p udp -j ACCEPT", &[(Does, "nat OUTPUT 1", EndsChain, &[Dns])]),
            ("-I OUTPUT -d 10.1.0.2/32 -p udp -j ACCEPT", &[(Does, "nat OUTPUT 1", EndsChain, &[Dns])]),
            ("-I OUTPUT -o lo -p tcp -j ACCEPT", &[(Does, "nat OUTPUT 1", EndsChain, &[ProxyToSelf, Dns])]),
            ("*filter\n-A OUTPUT -d 127.0.0.11/32 -p udp -j DROP", NOTHING),
            ("-I OUTPUT -d 127.0.0.11/32 -p udp -m udp --dport 54 -j ACCEPT", NOTHING),
            ("-I OUTPUT -d 127.0.0.11/32 -m owner --uid-owner 1337 -j ACCEPT", NOTHING),
        ],
    );
    check(&[], &[(LOOPBACK_RESOLVER, NOTHING)]);
}

#[test]
fn of_resolvers_in_the_pod_those_count_whose_queries_are_captured() {
    let found = |server: &str, others: &str| {
        let (addresses, nameservers) = ([OWN.parse().unwrap()], [server.parse().unwrap()]);
        let facts = NamespaceFacts::new(&addresses).with_nameservers(&nameservers);
        let plan = plan_for(&[(Key::RedirectDns, "true")], &facts);
        found(&plan, others).into_iter().map(|finding| finding.effect).collect::<Vec<_>>()
    };
    assert_eq!(found("127.0.0.11", LOOPBACK_RESOLVER), [Translates, Translates]);
    assert_eq!(found("127.0.0.53", LOOPBACK_RESOLVER), []);
    assert_eq!(found("10.96.0.10", LOOPBACK_RESOLVER), []);
}

#[test]
fn in_ambient_mode_queries_to_a_resolver_in_the_pod_are_captured_over_tcp() {
    let redirect = AmbientRedirect::new(Families::V4).with_dns_capture(true);
    let found = found(&redirect.plan(), LOOPBACK_RESOLVER);
    let rules: Vec<_> = found.iter().map(|finding| (finding.rule.as_str(), finding.effect)).collect();
    assert!(matches!(rules.as_slice(), [(rule, Translates)] if rule.contains("-p tcp")), "{rules:?}");
}

#[test]
fn a_dormant_table_and_a_policy_of_the_meshs_own_are_found() {
    check(
        &[],
        &[
            ("!dormant", &[(Does, "nat ", Dormant, &[])]),
            (":OUTPUT output -100 nat drop", &[(Does, "nat OUTPUT", PolicyDrops, &[ByProxy, ToApplication])]),
        ],
    );
    let place = |others| found(&plan(&[]), others).into_iter().map(|finding| finding.place).next().unwrap();
    let policy = place(":OUTPUT output -100 nat drop");
    assert_eq!((policy.base_chain.as_str(), policy.hook), ("OUTPUT", Some((Hook::Output, -100))));
    let whole = place("!dormant");
    assert_eq!((whole.base_chain.as_str(), whole.hook), ("", None));
}

/// A chain of other programs whose last jump but one is this many jumps away from where packets come in.
fn nested(jumps: usize) -> String {
    let jump = |number: usize| format!("-A c{number} -j c{}\n", number + 1);
    let last = format!("-A c{jumps} -d 192.0.2.7/32 -p tcp -m tcp --dport 4242 -j DROP");
    let jumps: String = (0..jumps).map(jump).collect::<String>() + &last;
    format!("*theirs\n:c0 output -150 nat\n{jumps}")
}

#[test]
fn chains_are_followed_as_deep_as_the_kernel_follows_them() {
    let plan = plan(&[]);
    for (jumps, chain) in [(1, Some("c1")), (16, Some("c16")), (17, None)] {
        let findings = found(&plan, &nested(jumps));
        assert_eq!(findings.first().map(|finding| finding.place.chain.as_str()), chain, "{jumps}");
    }
}

/// Rules mark the packets, perhaps twice, before routing, and all alike behind it.
#[test]
fn ways_that_differ_in_the_mark_that_routing_has_seen_stay_two() {
    let marks = "*theirs\n:pre prerouting -140 filter\n-A pre -j MARK --set-xmark 0x10000/0x0
        -A pre -m statistic --mode random --probability 0.5 -j MARK --set-xmark 0x1/0x0
        -A pre -j MARK --set-xmark 0x10000/0x0\n*mangle\n-A INPUT -j MARK --set-xmark 0x5/0xffffffff";
    check(TPROXY, &[(marks, &[(May, "theirs pre 3", Remarks, &[Inbound])])]);
}

#[test]
fn only_ranges_that_are_captured_count() {
    check(
        &[(Key::OutboundRanges, "10.0.0.0/8"), (Key::OutboundExcludeRanges, "10.96.0.0/12")],
        &[
            ("-I OUTPUT -d 192.168.0.0/16 -j ACCEPT", NOTHING),
            ("-I OUTPUT -d 10.96.3.0/24 -j ACCEPT", NOTHING),
            ("-I OUTPUT -d 10.3.0.0/16 -j ACCEPT", &[(Does, "nat OUTPUT 1", EndsChain, &[Outbound])]),
            (
                "-I OUTPUT ! -d 10.0.0.0/8 -p tcp -m tcp --dport 80 -j ACCEPT",
                &[(Does, "nat OUTPUT 1", EndsChain, &[ProxyToSelf])],
            ),
        ],
    );
}

#[test]
fn a_family_the_pod_has_no_address_of_is_not_judged() {
    let plan = plan(&[]);
    let ruleset = in_force(&plan, "-I PREROUTING -j ACCEPT\n-I OUTPUT -j ACCEPT");
    assert_eq!(PodTraffic::default().judge(&ruleset, &plan).findings, []);
}

#[test]
fn what_redirect_drops_for_want_of_an_address_is_lost() {
    let tables = route_tables();
    let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
    let lost = |by_interface: &[(&str, &str)]| {
        let interfaces = ["eth0".to_string(), "net1".to_string()];
        let by_interface: Vec<(String, IpAddr)> =
            by_interface.iter().map(|(name, at)| ((*name).into(), at.parse().unwrap())).collect();
        let pod = PodTraffic {
            addresses: &addresses,
            interfaces: &interfaces,
            by_interface: Some(&by_interface),
            routes: Some(&tables),
            ..PodTraffic::default()
        };
        let plan = plan(&[]);
        let findings = pod.judge(&in_force(&plan, ""), &plan).findings;
        findings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    // No host has to reach the pod over IPv4 by an interface of IPv6.
    assert_eq!(lost(&[("eth0", OWN), ("net1", "fe80::3")]), Vec::<String>::new());
    assert_eq!(lost(&[("eth0", "10.1.0.9"), ("lo", OWN)]), Vec::<String>::new());
    assert_eq!(
        lost(&[("lo", OWN), ("eth0", "fe80::2")]),
        [
            "REDIRECT without an address on the receiving interface keeps packets from the proxy: IPv4 inbound connections"
        ]
    );
}

/// Of a query that the pod does not deliver to itself nothing is said.
#[test]
fn a_resolver_that_no_route_leads_to_is_not_judged() {
    let mut tables = route_tables();
    tables.routes.retain(|route| route.to.to_string() != "10.1.0.2/32");
    let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
    let interfaces = ["eth0".to_string()];
    let pod = PodTraffic {
        addresses: &addresses,
        interfaces: &interfaces,
        routes: Some(&tables),
        ..PodTraffic::default()
    };
    let plan = plan(DNS);
    let found = pod.judge(&in_force(&plan, ""), &plan).findings;
    assert!(
        found.iter().flat_map(|finding| &finding.traffic).all(|(_, traffic)| *traffic != Dns),
        "{found:?}"
    );
}

/// The own addresses and a default route.
fn route_tables() -> RouteTables {
    let route = |to: &str, kind: RouteKind, table: u32, by: &str| Route {
        family: Family::V4,
        table,
        to: to.parse().unwrap(),
        kind,
        interface: Some(by.into()),
        metric: 0,
        unknown: false,
    };
    let local = |to: &str| route(to, RouteKind::Local, RouteTables::LOCAL, "lo");
    let default = route("0.0.0.0/0", RouteKind::Unicast, RouteTables::MAIN, "eth0");
    RouteTables {
        complete: true,
        loopback_is_up: true,
        rules: [(0, RouteTables::LOCAL), (32_766, RouteTables::MAIN)]
            .map(|(priority, table)| PolicyRule::lookup(Family::V4, priority, table))
            .into(),
        routes: vec![local("127.0.0.0/8"), local("10.1.0.2/32"), local("10.1.0.9/32"), default],
    }
}

#[test]
fn a_finding_is_one_readable_line() {
    let lines: Vec<_> =
        found(&plan(&[]), "-I OUTPUT -p tcp -m tcp --dport 80 -m comment --comment \"a b\" -j ACCEPT")
            .iter()
            .map(ToString::to_string)
            .collect();
    assert_eq!(
        lines,
        [
            "table ip nat, chain OUTPUT (hook output, priority -100), rule 1 (-p tcp -m tcp --dport 80 -j ACCEPT) ends the chain \
          before the mesh's rules: IPv4 outbound connections, IPv4 the proxy's connections to its own pod"
        ]
    );
    let lines: Vec<_> = found(
        &plan(&[]),
        "*th\u{1b}eirs\n:a output -150 nat\n:b\n-A a -j b\n-A b -m limit --limit 1/s -j DNAT",
    )
    .iter()
    .map(ToString::to_string)
    .collect();
    assert_eq!(
        lines,
        [
            "table ip th\\u{1b}eirs, chain b (from a, hook output, priority -150), rule 1 ([-m limit --limit] -j DNAT) may translate the \
          destination before the mesh's rules: IPv4 outbound connections, IPv4 the proxy's connections to its own pod"
        ]
    );
}

/// A map with so many entries, each for one value of each of these, behind what the plan has.
fn mapped(many: u128, selectors: &[Selector], verdict: impl Fn(u128) -> Statement) -> Vec<Finding> {
    let plan = plan(&[]);
    let mut ruleset = in_force(&plan, "*inet/theirs\n:theirs prerouting 50 filter");
    let mut among = SetLookup::range(selectors[0], (0, 0));
    among.selectors = selectors.into();
    // Not next to each other, so that they do not become one range.
    let value = |number: u128| 0xcb00_0000 + 2 * number;
    among.values = (0..many).map(|number| vec![(value(number), value(number)); selectors.len()]).collect();
    let map = VerdictMap { among, verdicts: (0..many).map(verdict).collect() };
    let name = TableName { api: Api::NfTables, family: TableFamily::Inet, name: "theirs".into() };
    let rule = KernelRule { statements: [Statement::Map(map)].into(), ..KernelRule::default() };
    let table = ruleset.table(name);
    table.chains.get_mut("theirs").unwrap().rules.push(rule);
    for number in 0..many {
        let drops = KernelRule { statements: [Statement::Drop].into(), ..KernelRule::default() };
        table.chains.insert(format!("c{number}"), ChainState { rules: [drops].into(), ..Default::default() });
    }
    let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
    PodTraffic { addresses: &addresses, interfaces: &["eth0".into()], ..PodTraffic::default() }
        .judge(&ruleset, &plan)
        .findings
}

/// What a map says of all packets is found in one step, and what takes too much is said to.
#[test]
fn maps_of_any_size_are_followed_or_named() {
    let source = [Selector::Source(Family::V4)];
    let said = |findings: Vec<Finding>| -> Vec<_> {
        findings.into_iter().map(|one| (one.severity, one.effect, one.place.table.name)).collect()
    };
    let jump = |number: u128| Statement::Jump(format!("c{number}"));
    assert_eq!(said(mapped(10_000, &source, |_| Statement::Drop)), [(Does, Drops, "theirs".into())]);
    let each = said(mapped(2000, &source, jump));
    assert!(each.len() == 16 && each.iter().all(|one| *one == (Does, Drops, "theirs".into())), "{each:?}");
    for (many, selectors) in
        [(20_000, &source[..]), (10_000, &[Selector::Source(Family::V4), Selector::Mark])]
    {
        let found = said(mapped(many, selectors, jump));
        assert!(found.iter().any(|one| *one == (May, Unfollowed, "theirs".into())), "{many}: {found:?}");
    }
}

/// A chain that was not read makes doubtful what passes it, even where the mesh's own rules stand in it.
#[test]
fn chains_that_were_not_read_are_named_by_what_passes_them() {
    let plan = plan(&[]);
    let pod = [OWN.parse().unwrap()];
    let said = |table: &str, chain: &str| -> Vec<_> {
        let mut ruleset = in_force(&plan, "*filter");
        let name = TableName { api: Api::NfTables, family: TableFamily::Ip, name: table.into() };
        let unread = chain_of(ruleset.table(name), chain);
        (unread.rules, unread.is_partial) = (Vec::new(), true);
        let pod = PodTraffic { addresses: &pod, interfaces: &["eth0".into()], ..PodTraffic::default() };
        let judged = pod.judge(&ruleset, &plan);
        assert!(judged.consequences.iter().all(|one| one.severity == May), "{:?}", judged.consequences);
        judged.findings.into_iter().map(|one| (one.severity, one.effect, one.place.chain)).collect()
    };
    assert_eq!(said("filter", "FORWARD"), []);
    for (table, chain) in [("filter", "INPUT"), ("nat", "OUTPUT"), ("nat", "PREROUTING")] {
        assert_eq!(said(table, chain), [(May, Effect::Unknown, chain.into())]);
    }
}

/// The kernel has a chain for each jump.
#[test]
fn jumps_to_chains_that_were_not_read_are_doubtful() {
    let plan = plan(&[]);
    let pod = [OWN.parse().unwrap()];
    let ruleset = in_force(&plan, "*filter\n-A INPUT -s 198.51.100.1/32 -j missing");
    let pod = PodTraffic { addresses: &pod, interfaces: &["eth0".into()], ..PodTraffic::default() };
    let found: Vec<_> =
        pod.judge(&ruleset, &plan).findings.iter().map(|one| (one.severity, one.effect)).collect();
    assert_eq!(found, [(May, Effect::Unknown)]);
}

/// Packets to any number of addresses are not all followed, which is said.
#[test]
fn any_number_of_addresses_is_bounded() {
    let plan = plan(&[]);
    let many: Vec<IpAddr> =
        (0..3000_u32).map(|number| Ipv4Addr::from(0x0a02_0000 + 2 * number).into()).collect();
    let pod = |addresses| PodTraffic { addresses, ..PodTraffic::default() };
    assert_eq!(pod(&many[..16]).judge(&in_force(&plan, ""), &plan).findings, []);
    let found = pod(&many).judge(&in_force(&plan, ""), &plan).findings;
    assert_eq!(found.iter().map(|one| (one.severity, one.effect)).collect::<Vec<_>>(), [(May, Unfollowed)]);
}

#[test]
fn any_number_of_rules_is_bounded() {
    let plan = plan(&[]);
    let mut others = String::from("*filter\n");
    for number in 0..3000 {
        others += &format!("-A INPUT -s 198.51.{}.{}/32 -j DROP\n", number / 250, number % 250);
    }
    let findings = found(&plan, &others);
    assert_eq!(findings.len(), 16);
    // Rules that shield each other.
    let shielded = |many: usize| {
        let mut others = String::from("*filter\n");
        for number in 0..many {
            // Not next to each other, so that they do not become one range.
            let source = format!("198.{}.{}.{}", number / 25_000, number / 100 % 250, number % 100 * 2);
            others += &format!("-A INPUT -s {source}/32 -j ACCEPT\n-A INPUT -s {source}/32 -j DROP\n");
        }
        found(&plan, &others)
    };
    assert_eq!(shielded(300), []);
    let findings = shielded(30_000);
    assert_eq!(findings.iter().map(|finding| finding.effect).collect::<Vec<_>>(), vec![Unfollowed]);
    let place = RuleRef { rule: None, hook: None, chain: String::new(), ..findings[0].place.clone() };
    assert_eq!(findings[0].place, place, "it is about no single chain");
}

proptest::proptest! {
    #[test]
    fn any_saved_text_is_read_or_refused(text in "(\\*[a-z]{1,6}\n(:[A-Z]{1,9} [A-Z]{1,6}\n|-A [A-Z]{1,9}( !? ?-{1,2}[a-z-]{1,8}| [a-z0-9.:/,\"]{1,9}){0,6}\n){0,9}(COMMIT\n)?){0,3}") {
        let mut ruleset = HookedRules::default();
        let _ = ruleset.add_saved(Family::V4, &text);
        let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
        let pod = PodTraffic { addresses: &addresses, interfaces: &[], ..PodTraffic::default() };
        let _ = pod.judge(&ruleset, &plan(&[])).findings.iter().map(ToString::to_string).collect::<Vec<_>>();
    }
}

/// What it means that rules of a plan, after an edit, are in force beside those of other programs.
fn means(settings: &[(Key, &'static str)], others: &str, edit: impl Fn(&mut HookedRules)) -> Vec<String> {
    let plan = plan(settings);
    let mut ruleset = in_force(&plan, others);
    edit(&mut ruleset);
    let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
    let interfaces = ["eth0".to_string()];
    let pod = PodTraffic { addresses: &addresses, interfaces: &interfaces, ..PodTraffic::default() };
    pod.consequences(&ruleset, &[], &plan).iter().map(ToString::to_string).collect()
}

fn chain<'a>(ruleset: &'a mut HookedRules, chain: &str) -> &'a mut ChainState {
    let nat = TableName { api: Api::NfTables, family: TableFamily::Ip, name: "nat".into() };
    chain_of(ruleset.table(nat), chain)
}

#[test]
fn where_all_is_captured_there_is_no_consequence() {
    assert_eq!(means(&[], "", |_| ()), Vec::<String>::new());
    // A rule that changes nothing for captured traffic.
    assert_eq!(means(&[], "*filter\n-A INPUT -j ACCEPT", |_| ()), Vec::<String>::new());
}

#[test]
fn rules_that_are_gone_are_told_by_the_traffic_that_they_captured() {
    let outbound = "all outbound connections bypass the proxy";
    assert_eq!(means(&[], "", |all| chain(all, "ISTIO_OUTPUT").rules.clear()), [outbound]);
    let inbound = "all inbound connections bypass the proxy";
    assert_eq!(means(&[], "", |all| chain(all, "PREROUTING").rules.clear()), [inbound]);
    assert_eq!(means(&[], "", |all| all.tables.clear()), [inbound, outbound]);
    let settings = [(Key::RedirectDns, "true"), (Key::CaptureAllDns, "true")];
    let dns = "all DNS queries bypass the proxy";
    assert_eq!(means(&settings, "", |all| chain(all, "OUTPUT").rules.clear()), [outbound, dns]);
}

#[test]
fn a_part_of_the_traffic_is_told_by_what_is_its_own() {
    let returns = "-I ISTIO_OUTPUT -p tcp -m tcp --dport 8080 -j RETURN";
    assert_eq!(means(&[], returns, |_| ()), ["outbound connections bypass the proxy (port 8080)"]);
    let itself = "-I OUTPUT -o lo -p tcp -m tcp --dport 8080 -j RETURN";
    let wanted = "the proxy's connections to its own pod bypass the proxy (port 8080)";
    assert_eq!(means(&[], itself, |_| ()), [wanted]);
    let drops = "*filter\n-A INPUT -p tcp -m tcp --dport 15006 -s 192.0.2.0/24 -j DROP";
    assert_eq!(means(&[], drops, |_| ()), ["inbound connections are dropped (from 192.0.2.0-192.0.2.255)"]);
}

#[test]
fn traffic_that_goes_elsewhere_is_told_where() {
    let elsewhere = "-I PREROUTING -p tcp -m tcp --dport 8080 -j REDIRECT --to-ports 3128";
    assert_eq!(
        means(&[], elsewhere, |_| ()),
        ["inbound connections reach another program, at port 3128 (port 8080)"]
    );
    let marked = "-I OUTPUT -m mark --mark 0x7/0xff -j ACCEPT";
    let wanted = ["outbound connections may bypass the proxy (mark 0x7)"];
    assert_eq!(means(&[], marked, |_| ()), wanted);
    let refuses = "*filter\n-A OUTPUT -p tcp -j REJECT";
    let found = means(&[], refuses, |_| ());
    assert!(found.contains(&"all outbound connections are refused".to_string()), "{found:?}");
}

#[test]
fn what_is_not_understood_may_have_a_consequence() {
    let found = means(&[], "-I OUTPUT -m limit --limit 5/sec -j ACCEPT", |_| ());
    assert!(found.contains(&"outbound connections may bypass the proxy".to_string()), "{found:?}");
}

/// Many numbers without an order, each once.
fn shuffled(count: u32) -> Vec<u32> {
    (0..count).map(|at| 1024 + at * 7919 % 16_381).collect()
}

fn listed(numbers: &[u32], item: impl Fn(&u32) -> String) -> &'static str {
    numbers.iter().map(item).collect::<Vec<String>>().join(",").leak()
}

#[test]
fn a_plan_of_any_size_is_followed_to_its_end_and_a_rule_of_others_is_found_beside_it() {
    let numbers = shuffled(2_000);
    let ports = listed(&numbers, ToString::to_string);
    let ranges = listed(&numbers, |at| format!("192.{}.{}.0/24", at / 256, at % 256));
    for mode in ["REDIRECT", "TPROXY"] {
        for (key, text) in [
            (Key::InboundPorts, ports),
            (Key::InboundExcludePorts, ports),
            (Key::OutboundExcludePorts, ports),
            (Key::OutboundRanges, ranges),
            (Key::OutboundExcludeRanges, ranges),
        ] {
            let plan = plan(&[(Key::InterceptionMode, mode), (key, text)]);
            let found = |others: &str| {
                let interfaces = ["eth0".into()];
                let pod = PodTraffic {
                    addresses: &[OWN.parse().unwrap()],
                    interfaces: &interfaces,
                    ..PodTraffic::default()
                };
                pod.judge(&in_force(&plan, others), &plan).findings
            };
            let alone: Vec<String> = found("").iter().map(ToString::to_string).collect();
            assert_eq!(alone, [""; 0], "{mode} {key:?}");
            let inbound = if key == Key::InboundPorts { numbers[7] } else { 20_000 };
            let others = format!(
                "*raw\n-A PREROUTING -p tcp -m tcp --dport {inbound} -j DROP\n-A OUTPUT -p tcp -m tcp --dport 443 -j DROP"
            );
            let beside: Vec<String> = found(&others).iter().map(|finding| finding.rule.clone()).collect();
            assert!(beside.len() == 2, "{mode} {key:?}: {beside:?}");
        }
    }
}

#[test]
fn pairs_of_rules_are_joined_only_where_no_packet_could_tell() {
    use crate::{Packet, TraceRules};
    // A port that is written twice, ports out of order, and one pair alone.
    for ports in ["80,443,80,8080", "9000,80,443", "80", "80,81,82,80,81"] {
        let plan = plan(&[(Key::InterceptionMode, "TPROXY"), (Key::InboundPorts, ports)]);
        let rules = TraceRules::of_plan(&plan, Family::V4);
        for port in [80, 81, 82, 443, 8080, 9000, 9001] {
            let packet = Packet::from_outside(
                "192.0.2.1:40000".parse().unwrap(),
                format!("{OWN}:{port}").parse().unwrap(),
            );
            // One packet is asked of every rule where its way is recorded, and of joined rules where it is not.
            let recorded = rules.trace(&packet).fate();
            let is_listed = ports.split(',').any(|listed| listed == port.to_string());
            assert_eq!(matches!(recorded, crate::Fate::Proxy { .. }), is_listed, "{ports} {port}");
        }
        let pod = PodTraffic {
            addresses: &[OWN.parse().unwrap()],
            interfaces: &["eth0".into()],
            ..PodTraffic::default()
        };
        assert_eq!(pod.judge(&in_force(&plan, ""), &plan).findings, [], "{ports}");
        // Without one of the rules of a pair, its port alone is not captured.
        let mut damaged = in_force(&plan, "");
        let mangle = TableName { api: Api::NfTables, family: TableFamily::Ip, name: "mangle".into() };
        let chain = damaged.table(mangle).chains.get_mut("ISTIO_INBOUND").unwrap();
        chain.rules.pop();
        let lost = pod.consequences(&damaged, &[], &plan);
        assert!(ports == "80,443,80,8080" || ports == "80,81,82,80,81" || !lost.is_empty(), "{ports}");
    }
}

/// What is found, and what is accepted and by whom, where these names are said.
fn judged(
    settings: &[(Key, &'static str)],
    others: &str,
    names: &[(&str, AcceptedBy)],
) -> (Vec<String>, Vec<String>) {
    let mut accepted = AcceptedRules::default();
    for (list, by) in names {
        accepted.add(list, *by).unwrap();
    }
    let plan = plan(settings);
    let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
    let interfaces = ["eth0".to_string()];
    let pod = PodTraffic {
        addresses: &addresses,
        interfaces: &interfaces,
        accepted: Some(&accepted),
        ..PodTraffic::default()
    };
    let Judgement { findings, accepted, .. } = pod.judge(&in_force(&plan, others), &plan);
    let place = |finding: &Finding| {
        let RuleRef { table, chain, rule, .. } = &finding.place;
        let traffic: Vec<_> = finding.traffic.iter().map(|(_, traffic)| format!("{traffic:?}")).collect();
        let number = rule.map_or_else(String::new, |number| format!(" {number}"));
        format!("{} {chain}{number} {:?} [{}]", table.name, finding.effect, traffic.join(" "))
    };
    let accepted = accepted.iter().map(|one| format!("{}: {}", one.by.word(), place(&one.finding))).collect();
    (findings.iter().map(place).collect(), accepted)
}

const NONE: Vec<String> = Vec::new();
use AcceptedBy::{Node, Pod as Owner};

#[test]
fn a_rule_is_accepted_by_comment_by_chain_or_by_table() {
    let out = "nat VPN 1 Translates [Outbound ByProxy]";
    let vpn = ":VPN\n-A VPN -d 192.0.2.0/24 -p tcp -m comment --comment backups -j REDIRECT --to-ports 1\n-I OUTPUT -j VPN";
    for (name, by) in [
        ("comment=backups", Owner),
        ("chain=VPN", Node),
        ("chain=nat/VPN", Owner),
        ("chain=other; comment=backups", Node),
    ] {
        assert_eq!(judged(&[], vpn, &[(name, by)]), (NONE, vec![format!("{}: {out}", by.word())]), "{name}");
    }
    for name in ["comment=backup", "comment=backups2", "chain=vpn", "chain=raw/VPN", "table=VPN", ""] {
        assert_eq!(judged(&[], vpn, &[(name, Owner)]), (vec![out.to_string()], NONE), "{name}");
    }
    let table = "*inet/theirs\n:pre prerouting -400 filter drop\n-A pre -i lo -j ACCEPT";
    let policy = "theirs pre PolicyDrops [Inbound ToProxy]";
    assert_eq!(judged(&[], table, &[("table=theirs", Node)]), (NONE, vec![format!("node: {policy}")]));
    assert_eq!(judged(&[], table, &[("chain=theirs/pre", Owner)]), (NONE, vec![format!("pod: {policy}")]));
    assert_eq!(judged(&[], table, &[("comment=pre", Node)]), (vec![policy.to_string()], NONE));
}

#[test]
fn an_accepted_rule_hides_no_other() {
    // The second takes some of what the first takes, and then what the first leaves.
    let two =
        "-A OUTPUT -p tcp -m comment --comment other -m multiport --dports 80,81 -j REDIRECT --to-ports 2";
    let ours = "-I OUTPUT -d 192.0.2.0/24 -p tcp -m comment --comment ours -j REDIRECT --to-ports 1";
    let drop = "*filter\n-A OUTPUT -p tcp -m tcp --dport 15001 -s 10.1.0.2 -j DROP";
    let (own, other) = (
        "nat OUTPUT 1 Translates [Outbound ByProxy]",
        "nat OUTPUT 2 Translates [Outbound ProxyToSelf ByProxy ToApplication]",
    );
    let second = two.replace("-A OUTPUT", "-I OUTPUT");
    let both = format!("{second}\n{ours}");
    assert_eq!(
        judged(&[], &both, &[("comment=ours", Owner)]),
        (vec![other.to_string()], vec![format!("pod: {own}")])
    );
    // Behind the accepted one, and in another table.
    let (found, accepted) = judged(&[], &format!("{ours}\n{drop}"), &[("comment=ours", Owner)]);
    assert_eq!(found, ["filter OUTPUT 1 Drops [Outbound ByProxy ToApplication]"]);
    assert_eq!(accepted, [format!("pod: {own}")]);
    // What is lost to the second alone.
    let only = "-I OUTPUT -d 192.0.2.7/32 -p tcp -j ACCEPT";
    let (found, accepted) = judged(&[], &format!("{only}\n{ours}"), &[("comment=ours", Owner)]);
    assert_eq!(found, ["nat OUTPUT 2 EndsChain [Outbound]"]);
    assert_eq!(accepted, [format!("pod: {own}")]);
    // Of rules that are asked at once, one.
    let three = "-I OUTPUT -p tcp -m tcp --dport 80 -m comment --comment a -j ACCEPT\n\
                 -I OUTPUT -p tcp -m tcp --dport 81 -m comment --comment b -j ACCEPT\n\
                 -I OUTPUT -p tcp -m tcp --dport 82 -m comment --comment c -j ACCEPT";
    let (found, accepted) = judged(&[], three, &[("comment=b", Owner)]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(accepted, ["pod: nat OUTPUT 2 EndsChain [Outbound ProxyToSelf]"]);
    // All of them: nothing is left.
    let all = [("comment=a; comment=b", Owner), ("comment=c", Node)];
    let (found, accepted) = judged(&[], three, &all);
    assert_eq!((found, accepted.len()), (NONE, 3));
}

#[test]
fn what_is_accepted_is_no_consequence() {
    let plan = plan(&[]);
    let others = "-I OUTPUT -p tcp -m tcp --dport 80 -m comment --comment ours -j ACCEPT";
    let mut ruleset = in_force(&plan, others);
    let addresses: [IpAddr; 1] = [OWN.parse().unwrap()];
    let mut accepted = AcceptedRules::default();
    let described = |ruleset: &HookedRules, accepted: &AcceptedRules| {
        let pod = PodTraffic { addresses: &addresses, accepted: Some(accepted), ..PodTraffic::default() };
        pod.consequences(ruleset, &[], &plan).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert!(!described(&ruleset, &accepted).is_empty());
    accepted.add("comment=ours", Owner).unwrap();
    assert_eq!(described(&ruleset, &accepted), NONE);
    chain(&mut ruleset, "PREROUTING").rules.clear();
    assert_eq!(described(&ruleset, &accepted), ["all inbound connections bypass the proxy"]);
}

/// What KubeVirt's masquerade binding makes for a machine in a mesh, in nft's chains and without named ports.
const KUBEVIRT: &str = "*nat
:prerouting prerouting -100 nat
:output output -100 nat
:postrouting postrouting 100 nat
:KUBEVIRT_PREINBOUND
:KUBEVIRT_POSTINBOUND
-A postrouting -s 10.0.2.2/32 -j MASQUERADE
-A prerouting -i eth0 -j KUBEVIRT_PREINBOUND
-A postrouting -o k6t-eth0 -j KUBEVIRT_POSTINBOUND
-A output -s 127.0.0.1/32 -p tcp -m multiport --dports 15000,15001,15004,15006,15008,15009,15020,15021,15053,15090 -j RETURN
-A KUBEVIRT_PREINBOUND -p tcp -m tcp --dport 22 -j DNAT --to-destination 10.0.2.2
-A KUBEVIRT_POSTINBOUND -s 127.0.0.1/32 -j SNAT --to-source 10.0.2.1
-A output -d 127.0.0.1/32 -j DNAT --to-destination 10.0.2.2
-A output -d 10.1.0.2/32 -j DNAT --to-destination 10.0.2.2";

#[test]
fn kubevirts_rules_for_a_mesh_are_known() {
    let (found, accepted) = judged(&[], KUBEVIRT, &[]);
    assert_eq!(found, NONE);
    assert!(
        accepted.iter().all(|one| one.starts_with("kubevirt: nat ")) && accepted.len() >= 2,
        "{accepted:?}"
    );
    let (found, accepted) = judged(DNS, KUBEVIRT, &[]);
    assert_eq!(found, NONE);
    assert!(accepted.iter().any(|one| one.contains("Dns")), "{accepted:?}");
    // The same in the chains of iptables.
    let in_iptables =
        ["prerouting", "output", "postrouting"].into_iter().fold(KUBEVIRT.to_string(), |text, chain| {
            let upper = chain.to_ascii_uppercase();
            text.lines()
                .filter(|line| !line.starts_with(&format!(":{chain}")))
                .map(|line| line.replace(&format!("-A {chain}"), &format!("-I {upper}")) + "\n")
                .collect()
        });
    let (found, accepted) = judged(&[], &in_iptables, &[]);
    assert_eq!(found, NONE, "{accepted:?}");
    assert!(accepted.len() >= 2, "{accepted:?}");
}

#[test]
fn nothing_else_is_taken_for_kubevirts() {
    // Another program's chains of these names: all inbound, another port, another destination, other ports that stay, another table.
    for (from, to) in [
        ("-A KUBEVIRT_PREINBOUND -p tcp -m tcp --dport 22", "-A KUBEVIRT_PREINBOUND"),
        ("--dport 22", "--dport 8080"),
        ("--dport 22", "--dport 22:80"),
        ("-A output -d 127.0.0.1/32", "-A output -d 192.0.2.0/24"),
        ("-A output -d 127.0.0.1/32", "-A output"),
        ("*nat", "*theirs"),
        ("KUBEVIRT_POSTINBOUND", "POSTINBOUND"),
    ] {
        let (found, _) = judged(&[], &KUBEVIRT.replace(from, to), &[]);
        assert!(!found.is_empty(), "{from} {to}");
    }
    // In the chain that the mesh shares: other ports that stay, or of other senders.
    let stays = KUBEVIRT.replace(":output output -100 nat\n", "").replace("-A output", "-I OUTPUT");
    assert_eq!(judged(&[], &stays, &[]).0, NONE);
    for (from, to) in
        [("15090 -j", "15090,8080 -j"), ("-s 127.0.0.1/32 -p tcp -m multiport", "-p tcp -m multiport")]
    {
        let (found, _) = judged(&[], &stays.replace(from, to), &[]);
        assert!(!found.is_empty(), "{from} {to}");
    }
}
