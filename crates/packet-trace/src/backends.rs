//! A plan in force in every backend is walked through as the plan itself is, and nothing of it is in its own way.

use super::{
    Detail, Packet, Trace, TraceEvent, TraceRules,
    interference::{Effect, PodTraffic},
    kernel::dumps::{self, dump, dumped, read_saved},
};
use netfilter_state::{
    change::IptablesChange,
    netlink::{Batch, NativeState, Observed},
    routing::FoundRouting,
    ruleset::{Condition, Counter, HookedRules},
    state::IptablesTables,
};
use redirect_core::{
    Family, Redirect, RulePlan,
    options::NativeForm,
    rule::{Chain, Match, Target},
    settings::{Key, NamespaceFacts, RawSettings, Source},
    values::PortRange,
};
use std::{collections::BTreeMap, net::IpAddr};

fn plan(settings: &[(Key, &'static str)]) -> RulePlan {
    let mut raw = RawSettings::new();
    let all = [
        (Key::InboundPorts, "*"),
        (Key::OutboundRanges, "*"),
        (Key::RedirectDns, "true"),
        (Key::CaptureAllDns, "true"),
        (Key::DropInvalid, "true"),
        (Key::OutboundExcludePorts, "3306,5432,8000:8099"),
        (Key::OutboundExcludeRanges, "10.96.0.0/12,fd00:96::/64"),
        (Key::ExcludeInterfaces, "eth1"),
        (Key::DualStack, "true"),
    ];
    for (key, text) in all.iter().chain(settings) {
        raw.set(*key, *text, Source::Flag("x"));
    }
    Redirect::parse(&raw, &NamespaceFacts::new(&addresses())).unwrap().plan()
}

fn addresses() -> [IpAddr; 2] {
    ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()]
}

fn iptables(plan: &RulePlan) -> HookedRules {
    let observed = Observed::default();
    let changes = Family::BOTH
        .map(|family| (family, IptablesChange::between(&IptablesTables::new(), &plan.rules(family))));
    let mut batch = Batch::new(&observed);
    for (family, change) in &changes {
        batch.change(*family, change).unwrap();
    }
    dumped(batch.finish().unwrap().bytes())
}

fn native(plan: &RulePlan, form: NativeForm) -> HookedRules {
    let (observed, wanted) = (Observed::default(), NativeState::wanted(plan, form));
    let mut batch = Batch::new(&observed);
    batch.native_change(observed.native(), &wanted);
    dumped(batch.finish().unwrap().bytes())
}

#[test]
fn what_this_library_writes_it_understands_and_finds_nothing_in_its_own_way() {
    let interfaces = ["eth0".to_string()];
    for mode in ["REDIRECT", "TPROXY"] {
        let plan = plan(&[(Key::InterceptionMode, mode)]);
        for ruleset in [iptables(&plan), native(&plan, NativeForm::Plain), native(&plan, NativeForm::Sets)] {
            let chains = ruleset.tables.values().flat_map(|table| table.chains.values());
            let rules: Vec<_> = chains.flat_map(|chain| &chain.rules).collect();
            let strange = rules
                .iter()
                .flat_map(|rule| &rule.conditions)
                .filter(|condition| matches!(condition, Condition::Unknown(_)));
            assert!(rules.len() > 30 && strange.count() == 0, "{rules:#?}");
            let pod =
                PodTraffic { addresses: &addresses(), interfaces: &interfaces, ..PodTraffic::default() };
            assert_eq!(pod.judge(&ruleset, &plan).findings, [], "{mode}");
        }
    }
}

#[test]
fn every_rule_of_a_plan_in_force_is_known_as_the_plans() {
    for mode in ["REDIRECT", "TPROXY"] {
        let plan = plan(&[(Key::InterceptionMode, mode), (Key::InboundPorts, "80,82")]);
        let routing: Vec<FoundRouting> = FoundRouting::all_working(&plan);
        for ruleset in [iptables(&plan), native(&plan, NativeForm::Plain), native(&plan, NativeForm::Sets)] {
            // A rule of one family is the plan's in the eyes of that one.
            let mut origins = BTreeMap::<String, usize>::new();
            for family in Family::BOTH {
                for rule in TraceRules::of_ruleset(&ruleset, &routing, family, Some(&plan)).of_mesh() {
                    *origins.entry(format!("{:?} {}", rule.place, rule.rule)).or_default() +=
                        rule.origins.len();
                }
            }
            // Where no socket takes a packet the target of iptables drops it, and native tables have a rule for that.
            let is_of_target = |rule: &str| rule.contains("\"istio-tproxy\"") && rule.ends_with("-j DROP");
            let unknown: Vec<_> =
                origins.iter().filter(|(rule, origins)| **origins == 0 && !is_of_target(rule)).collect();
            assert!(origins.len() > 30 && unknown.is_empty(), "{mode}: {unknown:#?}");
        }
    }
}

/// Who may write rules, and chooses the settings, may choose both to be many.
#[test]
fn rules_that_stand_for_many_cost_no_product_of_both() {
    let ports = (1_000..1_400).map(|port| (2 * port).to_string()).collect::<Vec<_>>().join(",");
    let plan = plan(&[(Key::InboundPorts, ports.leak())]);
    let mut ruleset = native(&plan, NativeForm::Plain);
    let chains = ruleset.tables.values_mut().flat_map(|table| &mut table.chains);
    let (_, chain) = chains.into_iter().find(|(name, _)| *name == "istio-inbound").unwrap();
    let mut wide = chain.rules.last().unwrap().clone();
    for condition in &mut wide.conditions {
        if let Condition::Plain(Match::DestinationPort(is)) = condition {
            is.value = PortRange::new(1, u16::MAX).unwrap();
        }
    }
    assert_ne!(chain.rules.last(), Some(&wide));
    chain.rules.extend(std::iter::repeat_n(wide, 400));
    let rules = TraceRules::of_ruleset(&ruleset, &[], Family::V4, Some(&plan));
    let origins: usize = rules.of_mesh().map(|rule| rule.origins.len()).sum();
    assert!((10_000..20_000).contains(&origins), "{origins}");
}

#[test]
fn a_chain_of_the_mesh_with_another_policy_is_found_in_native_tables_too() {
    let plan = plan(&[]);
    let mut ruleset = native(&plan, NativeForm::Plain);
    for table in ruleset.tables.values_mut() {
        for base in table.chains.values_mut().filter_map(|chain| chain.base.as_mut()) {
            base.drops = true;
        }
    }
    let findings = PodTraffic::default().judge(&ruleset, &plan).findings;
    assert!(findings.len() >= 4 && findings.iter().all(|finding| finding.effect == Effect::PolicyDrops));
}

/// Packets of every kind: what the rules of the plans here name, and what lies beside it.
fn packets() -> Vec<Packet> {
    let ports = [53, 80, 3306, 7999, 8000, 8050, 8100];
    let far = [
        "10.95.255.255",
        "10.96.0.0",
        "10.111.255.255",
        "10.112.0.0",
        "192.168.7.7",
        "fd00:96::",
        "fd00:97::",
    ];
    let mut packets = Vec::new();
    for (to, port) in far.iter().flat_map(|to| ports.map(|port| (to.parse::<IpAddr>().unwrap(), port))) {
        let own = addresses()[usize::from(to.is_ipv6())];
        packets.push(Packet::from_outside((to, 40000).into(), (own, port).into()).by("eth0"));
        for (uid, gid) in [(1000, 1000), (1337, 1337), (7, 2000)] {
            for by in ["eth0", "eth1"] {
                let packet = Packet::from_pod(uid, gid, (own, 40000).into(), (to, port).into()).by(by);
                packets.extend([packet.clone().over_udp(), packet]);
            }
            packets.push(Packet::from_pod(uid, gid, (own, 40000).into(), (own, port).into()));
        }
    }
    packets
}

#[test]
fn native_rules_with_sets_are_traced_exactly_as_their_plan() {
    let lists: [&[(Key, &str)]; 3] = [
        &[],
        &[(Key::InboundExcludePorts, "8000,8050,8099"), (Key::InboundPorts, "53,80,3306,8000:8100")],
        &[
            (Key::OutboundRanges, "10.96.0.0/16,192.168.0.0/16,10.111.0.0/16,fd00:96::/64,fd00:98::/64"),
            (Key::OutboundPorts, "53,80,8100"),
            (Key::OwnerGroups, "1000,1337"),
        ],
    ];
    for (settings, mode) in lists.iter().flat_map(|list| ["REDIRECT", "TPROXY"].map(|mode| (list, mode))) {
        let plan = plan(&[*settings, &[(Key::InterceptionMode, mode)]].concat());
        let routing: Vec<FoundRouting> = FoundRouting::all_working(&plan);
        for (form, family) in [NativeForm::Plain, NativeForm::Sets]
            .into_iter()
            .flat_map(|form| Family::BOTH.map(|family| (form, family)))
        {
            let planned = TraceRules::of_plan(&plan, family);
            let live = TraceRules::of_ruleset(&native(&plan, form), &routing, family, Some(&plan));
            for packet in packets().iter().filter(|packet| packet.family() == family).step_by(3) {
                let (wanted, trace) = (planned.trace(packet), live.trace(packet));
                let text = || {
                    format!(
                        "{settings:?} {form:?}\n{}{}",
                        trace.text(Detail::Every),
                        wanted.text(Detail::Every)
                    )
                };
                assert_eq!(trace.may, wanted.may, "{}", text());
                let behind = |trace: &Trace| match trace.deciding() {
                    Some(TraceEvent::Rule { origin: Some(origin), .. }) => Some(*origin),
                    _ => None,
                };
                assert_eq!(behind(&trace), behind(&wanted), "{}", text());
            }
        }
    }
}

#[test]
fn the_rules_of_the_mesh_are_known_in_every_backend() {
    let plan = plan(&[]);
    let count = |ruleset: &HookedRules, family, known| {
        let rules = TraceRules::of_ruleset(ruleset, &[], family, known);
        let of_mesh: Vec<_> = rules.of_mesh().collect();
        assert!(of_mesh.iter().all(|one| one.rule.counter == Some(Counter::default())), "{of_mesh:?}");
        of_mesh.len()
    };
    let ruleset = iptables(&plan);
    for family in Family::BOTH {
        let chains = plan.explained_rules(family);
        let planned: usize = chains.values().flat_map(|chains| chains.values()).map(Vec::len).sum();
        assert_eq!(count(&ruleset, family, Some(&plan)), planned, "{family}");
        // Without a plan, the owner of a rule in a built-in chain is unknown unless it leads to a chain of the mesh.
        let hooks = chains.values().flatten().filter(|(chain, _)| matches!(chain, Chain::Hook(_)));
        let alone: Vec<_> = hooks
            .flat_map(|(_, rules)| rules)
            .filter(|one| !matches!(one.rule().target, Target::Jump(_)))
            .collect();
        assert!(!alone.is_empty());
        assert_eq!(count(&ruleset, family, None), planned - alone.len(), "{family}");
    }
    for form in [NativeForm::Plain, NativeForm::Sets] {
        let ruleset = native(&plan, form);
        let in_tables: usize = ruleset
            .tables
            .values()
            .flat_map(|table| table.chains.values())
            .map(|chain| chain.rules.len())
            .sum();
        assert_eq!(count(&ruleset, Family::V4, None), in_tables, "{form:?}");
    }
}

/// A plan in force, as every backend leaves it.
fn in_force(name: &str) -> [(&'static str, HookedRules); 4] {
    let dumped = |name: String| dumped(&dump(&name));
    [
        ("iptables-nft", dumped(dumps::of_iptables(name))),
        ("iptables-legacy", read_saved(name)),
        ("native", dumped(dumps::of_native(name, NativeForm::Plain))),
        ("native with sets", dumped(dumps::of_native(name, NativeForm::Sets))),
    ]
}

// The dumps are those of a machine that puts the low byte first.
#[cfg(target_endian = "little")]
#[test]
fn a_packet_is_traced_through_a_plan_in_force_as_through_the_plan() {
    for (name, plan) in dumps::plans() {
        let routing: Vec<_> = FoundRouting::all_working(&plan);
        for ((backend, ruleset), family) in
            in_force(name).iter().flat_map(|one| Family::BOTH.map(|family| (one, family)))
        {
            let planned = TraceRules::of_plan(&plan, family);
            let live = TraceRules::of_ruleset(ruleset, &routing, family, Some(&plan));
            // Enough to meet every rule; all of them are traced elsewhere.
            for packet in packets().iter().filter(|packet| packet.family() == family).step_by(11) {
                let (wanted, trace) = (planned.trace(packet), live.trace(packet));
                let text = || [&trace, &wanted].map(|trace| trace.text(Detail::Every)).concat();
                assert_eq!(trace.may, wanted.may, "{name} {backend}\n{}", text());
            }
        }
    }
}
