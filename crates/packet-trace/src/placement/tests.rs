//! Where policy routing stands among that of other programs.

use super::*;
use redirect_core::{
    AmbientRedirect, Families, Redirect,
    settings::{Key, NamespaceFacts, RawSettings, Source},
    values::MaskedMark,
};

fn ambient() -> RulePlan {
    AmbientRedirect::new(Families::V4).plan()
}

fn tproxy() -> RulePlan {
    let mut raw = RawSettings::new();
    raw.set(Key::InterceptionMode, "TPROXY", Source::Flag("test"));
    raw.set(Key::InboundPorts, "*", Source::Flag("test"));
    let addresses = ["10.1.0.2".parse().unwrap()];
    Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
}

fn route(to: &str, kind: RouteKind, interface: &str, table: u32) -> Route {
    let interface = Some(interface.into());
    Route { family: Family::V4, table, to: to.parse().unwrap(), kind, interface, metric: 0, unknown: false }
}

fn rule(priority: u32, table: u32) -> PolicyRule {
    PolicyRule::lookup(Family::V4, priority, table)
}

fn marked(mark: MaskedMark, priority: u32, table: u32) -> PolicyRule {
    PolicyRule { mark: Some((mark.value(), mark.mask())), ..rule(priority, table) }
}

/// A pod with an address and a default route, and these rules and routes.
fn pod(rules: &[PolicyRule], routes: &[Route]) -> RouteTables {
    let mut all =
        [rule(0, RouteTables::LOCAL), rule(32766, RouteTables::MAIN), rule(32767, RouteTables::DEFAULT)]
            .to_vec();
    all.extend(rules.iter().cloned());
    all.sort_by_key(|rule| rule.priority);
    let mut own = [
        route("10.1.0.2/32", RouteKind::Local, "eth0", RouteTables::LOCAL),
        route("127.0.0.0/8", RouteKind::Local, "lo", RouteTables::LOCAL),
        route("10.1.0.0/24", RouteKind::Unicast, "eth0", RouteTables::MAIN),
        route("0.0.0.0/0", RouteKind::Unicast, "eth0", RouteTables::MAIN),
    ]
    .to_vec();
    own.extend(routes.iter().cloned());
    RouteTables { rules: all, routes: own, loopback_is_up: true, complete: true }
}

fn placed(plan: &RulePlan, tables: &RouteTables) -> Placement {
    Placement::of(plan, tables, |_| None)
}

/// The table and the priority that a plan gets.
#[track_caller]
fn chosen(plan: &RulePlan, tables: &RouteTables) -> (u32, Option<u32>) {
    let placement = placed(plan, tables);
    assert_eq!(placement.obstacle, None);
    let routes = placement.plan.policy_routes().unwrap();
    (routes.table().number(), routes.priority())
}

const OWN: (u32, Option<u32>) =
    (AmbientRedirect::ANSWER_TABLE.number(), Some(AmbientRedirect::ANSWER_PRIORITY));

fn in_force() -> (PolicyRule, Route) {
    (
        marked(
            AmbientRedirect::ANSWER_MARK,
            AmbientRedirect::ANSWER_PRIORITY,
            AmbientRedirect::ANSWER_TABLE.number(),
        ),
        route("0.0.0.0/0", RouteKind::Local, "lo", AmbientRedirect::ANSWER_TABLE.number()),
    )
}

#[test]
fn a_rule_whose_table_has_no_route_takes_nothing() {
    let (ours, local) = in_force();
    let elsewhere = route("192.168.0.0/16", RouteKind::Throw, "eth0", 52);
    for before in [rule(220, 220), rule(5270, 52), PolicyRule { action: RuleAction::Nop, ..rule(1, 0) }] {
        for there in [&[][..], std::slice::from_ref(&ours)] {
            let tables =
                pod(&[there, std::slice::from_ref(&before)].concat(), &[local.clone(), elsewhere.clone()]);
            assert_eq!(chosen(&ambient(), &tables), OWN, "{before}");
            assert!(placed(&ambient(), &tables).flaws.is_empty(), "{before}");
        }
    }
}

#[test]
fn what_takes_the_answers_is_named_and_ours_goes_before_it() {
    let (ours, local) = in_force();
    let away = route("0.0.0.0/0", RouteKind::Unicast, "eth0", 200);
    let of = |change: &dyn Fn(&mut PolicyRule)| {
        let mut rule = rule(100, 200);
        change(&mut rule);
        rule
    };
    let takers = [
        of(&|rule| rule.from = "10.1.0.2/32".parse().ok()),
        of(&|rule| rule.to = "192.0.2.0/24".parse().ok()),
        of(&|rule| rule.ports = Some((1, 1023))),
        of(&|rule| rule.protocol = Some(6)),
        of(&|rule| rule.in_interface = Some("lo".into())),
        of(&|rule| rule.users = Some((0, 0))),
        of(&|rule| rule.mark = Some((1, 1))),
        of(&|rule| (rule.not, rule.to) = (true, "10.1.0.0/16".parse().ok())),
        of(&|rule| (rule.mark, rule.action) = (Some((1, 1)), RuleAction::Prohibit)),
        of(&|rule| rule.action = RuleAction::Goto(32766)),
    ];
    for taker in takers {
        let tables = pod(&[taker.clone(), rule(99, 7), ours.clone()], &[away.clone(), local.clone()]);
        let placement = placed(&ambient(), &tables);
        let flaw = placement.flaws.first().map(ToString::to_string).unwrap_or_default();
        assert!(flaw.contains(&taker.named()) && flaw.contains("takes"), "{taker}: {flaw}");
        // 99 is another program's.
        assert_eq!(chosen(&ambient(), &tables), (OWN.0, Some(98)), "{taker}");
    }
    // None of the answers is theirs.
    for harmless in [of(&|rule| rule.users = Some((5, 6))), of(&|rule| rule.protocol = Some(17))] {
        let tables = pod(&[harmless.clone(), ours.clone()], &[away.clone(), local.clone()]);
        assert!(placed(&ambient(), &tables).flaws.is_empty(), "{harmless}");
    }
}

#[test]
fn what_cannot_be_stood_before_is_an_obstacle_with_its_number() {
    let away = route("0.0.0.0/0", RouteKind::Unicast, "eth0", 200);
    let obstacle = |taker: PolicyRule| {
        let tables = pod(&[taker], std::slice::from_ref(&away));
        placed(&ambient(), &tables).obstacle.map(|obstacle| obstacle.to_string()).unwrap_or_default()
    };
    let text = obstacle(rule(0, 200));
    for words in ["does not converge", "the policy rule of priority 0 (table 200) takes", "203.0.113.77"] {
        assert!(text.contains(words), "{text}");
    }
    // Another program has the same mark for something else.
    for mark in [AmbientRedirect::ANSWER_MARK, MaskedMark::new(0x111, u32::MAX).unwrap()] {
        let text = obstacle(marked(mark, 50, 200));
        assert!(text.contains("priority 50 (table 200)") && text.contains("same mark"), "{text}");
    }
    // Also where the plan's would stand before it.
    let mark = tproxy().policy_routes().unwrap().mark();
    let prohibits = PolicyRule { action: RuleAction::Prohibit, ..marked(mark, 9, 0) };
    let placement = placed(&tproxy(), &pod(&[prohibits], &[]));
    assert!(matches!(placement.obstacle, Some(RoutingObstacle::MarkInUse(_))), "{placement:?}");
}

#[test]
fn before_a_rule_of_priority_one_there_is_room_behind_the_kernels_own() {
    let away = route("0.0.0.0/0", RouteKind::Unicast, "eth0", 200);
    assert_eq!(chosen(&ambient(), &pod(&[rule(1, 200)], &[away])), (100, Some(0)));
}

#[test]
fn a_table_of_another_program_is_left_to_it_and_the_chosen_one_is_found_again() {
    let first = *RoutingItem::CHOSEN_TABLES.start();
    let from = PolicyRule { from: "192.0.2.10/32".parse().ok(), ..rule(32765, 100) };
    let theirs = route("192.0.2.0/24", RouteKind::Unicast, "net1", 100);
    for (rules, routes) in [
        (&[from.clone()][..], &[theirs.clone()][..]),
        (std::slice::from_ref(&from), &[]),
        (&[], std::slice::from_ref(&theirs)),
        (&[marked(MaskedMark::new(7, u32::MAX).unwrap(), 9, 100)], &[]),
    ] {
        assert_eq!(chosen(&ambient(), &pod(rules, routes)), (first, OWN.1), "{rules:?} {routes:?}");
        // As an earlier version has left it.
        let (ours, local) = in_force();
        let before = pod(&[rules, &[ours]].concat(), &[routes, &[local]].concat());
        assert_eq!(chosen(&ambient(), &before).0, first, "{rules:?} {routes:?}");
        // As this version leaves it, where the first was not free then.
        let chosen_rule = marked(AmbientRedirect::ANSWER_MARK, AmbientRedirect::ANSWER_PRIORITY, first + 3);
        let after = pod(&[rules, &[chosen_rule]].concat(), routes);
        assert_eq!(chosen(&ambient(), &after).0, first + 3, "{rules:?} {routes:?}");
        assert!(placed(&ambient(), &after).flaws.is_empty());
    }
    let own = tproxy().policy_routes().unwrap().table().number();
    let theirs = route("192.0.2.0/24", RouteKind::Unicast, "net1", own);
    assert_eq!(chosen(&tproxy(), &pod(&[], &[theirs])).0, first);
    // Their tables may be any, but those beyond are not tried.
    let all: Vec<Route> = RoutingItem::CHOSEN_TABLES
        .chain([100])
        .map(|table| route("192.0.2.0/24", RouteKind::Unicast, "net1", table))
        .collect();
    let obstacle = placed(&ambient(), &pod(&[], &all)).obstacle.unwrap().to_string();
    assert!(obstacle.contains("table 100 is another program's (route 192.0.2.0/24 dev net1"), "{obstacle}");
}

#[test]
fn tproxy_needs_what_arrives_too_and_the_kernel_chooses_where_that_suffices() {
    let away = route("0.0.0.0/0", RouteKind::Unicast, "eth0", 200);
    let own = tproxy().policy_routes().unwrap().table().number();
    assert_eq!(chosen(&tproxy(), &pod(&[], &[])), (own, None));
    assert_eq!(chosen(&tproxy(), &pod(&[rule(100, 200)], std::slice::from_ref(&away))), (own, None));
    let arrives = PolicyRule { in_interface: Some("eth0".into()), ..rule(7, 200) };
    let mark = tproxy().policy_routes().unwrap().mark();
    let tables = pod(&[arrives, marked(mark, 32765, own)], &[away]);
    let flaw = placed(&tproxy(), &tables).flaws[0].to_string();
    assert!(flaw.contains("priority 7 (table 200) takes inbound connections"), "{flaw}");
    assert_eq!(chosen(&tproxy(), &tables), (own, None));
}

#[test]
fn what_is_not_modelled_is_asked_of_the_kernel_or_stood_before() {
    let (ours, local) = in_force();
    let away = route("0.0.0.0/0", RouteKind::Unicast, "eth0", 200);
    let odd = PolicyRule { unknown: ["tos"].into(), ..rule(100, 200) };
    let tables = pod(&[odd, ours], &[away, local]);
    assert!(Placement::of(&ambient(), &tables, |_| Some(true)).flaws.is_empty());
    let flaw = |answer| Placement::of(&ambient(), &tables, |_| answer).flaws[0].to_string();
    assert!(flaw(None).contains("may take") && flaw(Some(false)).contains("takes"), "{}", flaw(None));
    assert_eq!(chosen(&ambient(), &tables), (100, Some(99)));
    // Where it can be anything's, what is known counts, and what may work stays.
    let first = PolicyRule { unknown: ["tos"].into(), action: RuleAction::Blackhole, ..rule(0, 0) };
    let known = PolicyRule { protocol: Some(6), action: RuleAction::Goto(32766), ..rule(50, 0) };
    assert_eq!(chosen(&ambient(), &pod(&[first.clone(), known.clone()], &[])), (100, Some(49)));
    let (ours, local) = in_force();
    let works = pod(&[first.clone(), ours.clone()], std::slice::from_ref(&local));
    assert!(placed(&ambient(), &works).flaws.is_empty());
    let taken = pod(&[first, known, ours], &[local]);
    assert_eq!(Placement::of(&ambient(), &taken, |_| Some(false)).obstacle, None);
    // The kernel's word counts more than the model's.
    let fine = pod(&[in_force().0], &[in_force().1]);
    let obstacle = Placement::of(&ambient(), &fine, |_| Some(false)).obstacle.unwrap().to_string();
    assert!(obstacle.contains("the kernel's routing takes the application's answers"), "{obstacle}");
    // And what cannot be read counts as fine.
    assert!(placed(&ambient(), &RouteTables { complete: false, ..tables }).flaws.is_empty());
}

#[test]
fn what_no_route_carries_without_the_mark_is_not_asked_about() {
    let (ours, local) = in_force();
    let refuses =
        PolicyRule { to: "192.0.2.0/24".parse().ok(), action: RuleAction::Prohibit, ..rule(100, 0) };
    let tables = pod(&[refuses, ours], &[local]);
    assert!(placed(&ambient(), &tables).flaws.is_empty());
}
