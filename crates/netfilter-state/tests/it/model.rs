//! The model of a kernel: it takes what is planned, goes back, refuses what Linux refuses, and can be damaged.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::model_kernel::{Kernel, Refusal, Tables, Writer};
use netfilter_state::{
    change::{EditOp, IptablesChange, TableChange},
    routing::{FoundRouting, RoutingItem},
    state::{Entry, IptablesTables},
    steps::{self, Goal, RulesIn},
};
use redirect_core::{
    AmbientRedirect, Families, Family, RulePlan,
    options::{NativeForm, Variant},
    pod::{Decision, PodFacts},
    rule::{Chain, Hook, OurChain, Rule, Table, Target},
    settings::NamespaceFacts,
};

const PLACES: [RulesIn; 4] = [
    RulesIn::Iptables(Variant::Nft),
    RulesIn::Iptables(Variant::Legacy),
    RulesIn::Native(NativeForm::Plain),
    RulesIn::Native(NativeForm::Sets),
];

fn plan(mode: &str) -> RulePlan {
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    let annotations = [
        ("sidecar.istio.io/interceptionMode", mode),
        ("traffic.sidecar.istio.io/excludeOutboundPorts", "3306,5432,6379"),
    ];
    let mut pod = PodFacts::sidecar(annotations);
    pod.proxy.as_mut().unwrap().env.insert("ISTIO_DUAL_STACK".into(), "true".into());
    match pod.decide(&NamespaceFacts::new(&addresses)).unwrap() {
        Decision::Redirect(redirect) => redirect.plan(),
        Decision::Skip(reason) => panic!("{reason}"),
    }
}

fn goals(plans: &[RulePlan]) -> Vec<Goal<'_>> {
    plans.iter().flat_map(|plan| PLACES.map(|place| Goal::new(plan, place))).collect()
}

#[test]
fn every_run_can_be_taken_back_after_any_of_its_steps() {
    let plans = [plan("REDIRECT"), plan("TPROXY"), RulePlan::empty()];
    let mut taken_back = 0;
    for from in goals(&plans) {
        for to in goals(&plans) {
            let mut before = Kernel::new();
            before.run(&from).unwrap();
            let observed = before.observe();
            let steps = to.steps_from(&observed);
            for until in 0..=steps.len() {
                let mut kernel = before.clone();
                let mut inverses = Vec::new();
                for step in &steps[..until] {
                    let now = kernel.observe();
                    inverses.push(step.clone().inverse(&now, &now.native));
                    kernel.take(step).unwrap();
                }
                for inverse in inverses.iter().rev() {
                    kernel.take_back(inverse).unwrap();
                    taken_back += 1;
                }
                let (found, wanted) = (kernel.observe(), before.observe());
                assert!(found.differences_to(&wanted).is_empty(), "{:?}", found.differences_to(&wanted));
            }
        }
    }
    assert!(taken_back > 500, "{taken_back}");
}

/// What may be there already of what a run adds, removes or marks: the same, the same that does not work, one that an earlier run has marked,
/// and another program's of another priority; each also twice.
fn likes(item: RoutingItem) -> Vec<Vec<FoundRouting>> {
    let same = FoundRouting::working(item);
    let shadowed = FoundRouting { flaw: Some("another takes its packets".to_owned()), ..same.clone() };
    let another = FoundRouting { message: vec![1; 16], ..same.clone() };
    let of_rules = [
        vec![shadowed.clone()],
        vec![shadowed.clone(), shadowed.clone()],
        vec![same.clone(), same.clone()],
        vec![same.mark_for_removal()],
        vec![same.mark_for_removal(), shadowed.clone()],
        vec![shadowed, same.mark_for_removal(), another.clone()],
        vec![another.clone(), another.clone()],
    ];
    match item {
        RoutingItem::Rule(..) => of_rules.into(),
        RoutingItem::Route(..) => vec![vec![same.clone()], vec![same, another]],
        RoutingItem::LoopbackAddress => vec![vec![same]],
    }
}

#[test]
fn what_is_like_the_runs_own_is_there_as_often_as_before_when_it_is_taken_back() {
    let plans = [plan("TPROXY"), AmbientRedirect::new(Families::Both).plan(), RulePlan::empty()];
    let items = |plan: &RulePlan| RoutingItem::wanted(plan);
    let all: Vec<RoutingItem> = plans.iter().flat_map(items).collect();
    let mut taken_back = 0;
    for (from, to) in plans.iter().flat_map(|from| plans.iter().map(move |to| (from, to))) {
        for there in all.iter().flat_map(|item| likes(*item)) {
            let mut before = Kernel::new();
            before.run(&Goal::new(from, PLACES[0])).unwrap();
            there.iter().for_each(|one| before.insert_routing(one.clone()));
            let observed = before.observe();
            let steps = Goal::new(to, PLACES[0]).steps_from(&observed);
            for until in 0..=steps.len() {
                let mut kernel = before.clone();
                for step in &steps[..until] {
                    kernel.take(step).unwrap();
                }
                for step in steps[..until].iter().rev() {
                    kernel.take_back(&step.clone().inverse(&observed, &observed.native)).unwrap();
                    taken_back += 1;
                }
                let (now, then) = (kernel.routing(), before.routing());
                let (more, less) = (FoundRouting::surplus(now, then), FoundRouting::surplus(then, now));
                assert!(more.is_empty() && less.is_empty(), "{there:?}: too much {more:?}, gone {less:?}");
            }
        }
    }
    assert!(taken_back > 1000, "{taken_back}");
}

#[test]
fn any_damage_is_mended_by_the_next_run_and_by_no_other() {
    for plan in [plan("REDIRECT"), plan("TPROXY")] {
        for goal in PLACES.map(|place| Goal::new(&plan, place)) {
            let mut whole = Kernel::new();
            whole.run(&goal).unwrap();
            assert_eq!(whole.run(&goal).unwrap(), []);
            let damaged = damage(&whole, &plan);
            assert!(damaged.len() > 10, "{}", damaged.len());
            for (what, mut kernel) in damaged {
                assert_ne!(kernel, whole, "{what}");
                assert_ne!(kernel.run(&goal).unwrap(), [], "{what}");
                assert_eq!(kernel.run(&goal).unwrap(), [], "{what}");
                assert_eq!(kernel.observe().differences_to(&whole.observe()), Vec::<String>::new(), "{what}");
            }
        }
    }
}

/// Every rule deleted in turn, and the routing where there is any.
fn damage(whole: &Kernel, plan: &RulePlan) -> Vec<(String, Kernel)> {
    let mut damaged = Vec::new();
    for variant in Variant::ALL {
        for family in Family::BOTH {
            let state = whole.tables(variant, family).observe();
            for (table, chain, number) in places(&state) {
                let mut kernel = whole.clone();
                let lost = kernel.tables_mut(variant, family).delete(table, &chain, number);
                let what = format!("{} {family} {} {chain} {number}: {lost:?}", variant.name(), table.name());
                damaged.push((what, kernel));
            }
        }
    }
    for (table, chains) in plan.merged_rules() {
        for (chain, rules) in chains {
            for number in 1..=rules.len() {
                let mut kernel = whole.clone();
                if kernel.delete_native_rule(table, &chain, number) {
                    damaged.push((format!("native {} {chain} {number}", table.name()), kernel));
                }
            }
        }
    }
    let mut kernel = whole.clone();
    kernel.lose_routing();
    damaged.push(("routing".to_owned(), kernel));
    damaged
}

fn places(state: &IptablesTables) -> Vec<(Table, Chain, usize)> {
    let mut places = Vec::new();
    for table in Table::ALL.iter().copied() {
        for (chain, rules) in state.chains(table) {
            places.extend((1..=rules.len()).map(|number| (table, chain.clone(), number)));
        }
    }
    places
}

#[test]
fn rules_of_others_stay_where_they_are() {
    let plan = plan("REDIRECT");
    let goal = Goal::new(&plan, RulesIn::Iptables(Variant::Nft));
    let theirs = Entry::saved("-p tcp -m tcp --dport 22 -m comment --comment \"ssh\" -j ACCEPT");
    let mut kernel = Kernel::new();
    kernel.tables_mut(Variant::Nft, Family::V4).insert(Table::Nat, Hook::Output, 1, theirs.clone());
    let before = kernel.clone();
    kernel.run(&goal).unwrap();
    let output = Chain::Hook(Hook::Output);
    assert!(kernel.tables(Variant::Nft, Family::V4).rules(Table::Nat, &output).any(|rule| *rule == theirs));
    let nothing = RulePlan::empty();
    kernel.run(&Goal::new(&nothing, goal.rules_in)).unwrap();
    assert_eq!(kernel, before);
}

#[test]
fn what_linux_refuses_is_refused_and_changes_nothing() {
    let (inbound, output) = (Chain::Ours(OurChain::Inbound), Chain::Hook(Hook::Output));
    let jump = |to: &Chain| Rule { matches: Vec::new(), target: Target::Jump(to.clone()) }.into();
    let accept = || Entry::saved("-p tcp -j ACCEPT");
    let declared = || EditOp::DeclareEmpty(inbound.clone());
    let cases = [
        (vec![EditOp::DeclareEmpty(output.clone())], Refusal::BuiltIn),
        (vec![EditOp::RemoveChain(output.clone())], Refusal::BuiltIn),
        (vec![EditOp::Append(inbound.clone(), accept())], Refusal::NoSuchChain),
        (vec![EditOp::Flush(inbound.clone())], Refusal::NoSuchChain),
        (vec![EditOp::Insert(output.clone(), 2, accept())], Refusal::NoSuchNumber),
        (vec![EditOp::Insert(output.clone(), 0, accept())], Refusal::NoSuchNumber),
        (vec![EditOp::Delete(output.clone(), accept())], Refusal::NoSuchRule),
        (vec![EditOp::Append(output.clone(), jump(&inbound))], Refusal::NoTarget),
        (
            vec![declared(), EditOp::Append(inbound.clone(), accept()), EditOp::RemoveChain(inbound.clone())],
            Refusal::NotEmpty,
        ),
        (
            vec![
                declared(),
                EditOp::Append(output.clone(), jump(&inbound)),
                EditOp::RemoveChain(inbound.clone()),
            ],
            Refusal::InUse,
        ),
    ];
    for (steps, why) in cases {
        let change = IptablesChange { tables: vec![TableChange { table: Table::Nat, steps }] };
        let mut tables = Tables::new();
        let refused = tables.apply(&change, Writer::Netlink).unwrap_err();
        assert_eq!(refused.why, why, "{refused}");
        assert_eq!(tables, Tables::new(), "{refused}");
    }
}

#[test]
fn a_transaction_is_refused_as_a_whole() {
    let good = IptablesChange::between(&Tables::new().observe(), &plan("REDIRECT").rules(Family::V4));
    let bad = TableChange { table: Table::Nat, steps: vec![EditOp::Flush(Chain::named("NONE"))] };
    let transaction = steps::Transaction {
        iptables: vec![(Family::V4, good), (Family::V6, IptablesChange { tables: vec![bad] })],
        native: None,
    };
    let mut kernel = Kernel::new();
    let refused = kernel.take(&steps::Step::Transaction(transaction)).unwrap_err();
    assert!(refused.to_string().starts_with("IPv6 nat: "), "{refused}");
    assert_eq!(kernel, Kernel::new());
}

#[test]
fn routing_is_added_once_and_removed_once() {
    let mut kernel = Kernel::new();
    let address = FoundRouting::working(RoutingItem::LoopbackAddress);
    let add = steps::Step::AddRouting(RoutingItem::LoopbackAddress);
    let remove = steps::Step::RemoveRouting(address.clone());
    kernel.take(&add).unwrap();
    assert_eq!(kernel.take(&add).unwrap_err().why, Refusal::Exists);
    kernel.take(&remove).unwrap();
    assert_eq!(kernel.take(&remove).unwrap_err().why, Refusal::NotThere);
    assert_eq!(kernel.take(&steps::Step::MarkForRemoval(address)).unwrap_err().why, Refusal::NotThere);
}

#[test]
fn only_a_rule_that_is_there_is_deleted() {
    let output = Chain::Hook(Hook::Output);
    let mut tables = Tables::default();
    for port in ["80", "443"] {
        let rule = Entry::saved(&format!("-p tcp -m tcp --dport {port} -j RETURN"));
        tables.insert(Table::Nat, output.clone(), 1, rule);
    }
    for number in [0, 3, 4] {
        assert_eq!(tables.delete(Table::Nat, &output, number), None, "{number}");
    }
    let deleted = tables.delete(Table::Nat, &output, 2).map(|entry| format!("{entry}"));
    assert_eq!(deleted.as_deref(), Some("-p tcp -m tcp --dport 80 -j RETURN"));
    assert_eq!(tables.delete(Table::Nat, &output, 2), None);
}
#[test]
fn a_step_does_what_it_says_or_is_refused_as_the_kernel_refuses_it() {
    let (hook, own, other) =
        (|| Chain::Hook(Hook::Output), || Chain::named("ISTIO_OUTPUT"), || Chain::named("ISTIO_REDIRECT"));
    let rule = |port: u16| Entry::saved(&format!("-p tcp -m tcp --dport {port} -j RETURN"));
    let jump = || Entry::saved("-j ISTIO_OUTPUT");
    let before = || {
        let mut tables = Tables::new();
        let steps = [
            EditOp::DeclareEmpty(own()),
            EditOp::DeclareEmpty(other()),
            EditOp::Append(own(), rule(1)),
            EditOp::Append(own(), rule(2)),
            EditOp::Append(hook(), jump()),
        ];
        take_all(&mut tables, &steps).unwrap();
        tables
    };
    let held = |tables: &Tables, chain: &Chain| tables.rules(Table::Nat, chain).cloned().collect::<Vec<_>>();
    assert_eq!(held(&before(), &own()), [rule(1), rule(2)]);
    for (step, chain, rules) in [
        (EditOp::DeclareEmpty(own()), own(), &[][..]),
        (EditOp::Append(own(), rule(3)), own(), &[rule(1), rule(2), rule(3)]),
        (EditOp::Insert(own(), 1, rule(3)), own(), &[rule(3), rule(1), rule(2)]),
        (EditOp::Insert(own(), 3, rule(3)), own(), &[rule(1), rule(2), rule(3)]),
        (EditOp::Insert(Chain::Hook(Hook::Input), 1, rule(3)), Chain::Hook(Hook::Input), &[rule(3)]),
        (EditOp::Delete(own(), rule(2)), own(), &[rule(1)]),
        (EditOp::Flush(own()), own(), &[]),
        (EditOp::RemoveChain(other()), other(), &[]),
    ] {
        let mut after = before();
        take_all(&mut after, std::slice::from_ref(&step)).unwrap();
        assert_eq!(held(&after, &chain), rules, "{step:?}");
        let gone = after.observe().chains(Table::Nat).all(|(name, _)| *name != other());
        assert_eq!(gone, matches!(step, EditOp::RemoveChain(_)), "{step:?}");
        // A chain that is declared again is the same one, empty; every other step makes a difference.
        assert_ne!(after, before(), "{step:?}");
    }
    let mut free = before();
    take_all(&mut free, &[EditOp::Flush(own()), EditOp::Delete(hook(), jump()), EditOp::RemoveChain(own())])
        .unwrap();
    let nowhere = || Chain::named("ISTIO_INBOUND");
    for (step, why) in [
        (EditOp::DeclareEmpty(hook()), Refusal::BuiltIn),
        (EditOp::RemoveChain(hook()), Refusal::BuiltIn),
        (EditOp::Append(nowhere(), rule(1)), Refusal::NoSuchChain),
        (EditOp::Flush(nowhere()), Refusal::NoSuchChain),
        (EditOp::RemoveChain(nowhere()), Refusal::NoSuchChain),
        (EditOp::Append(own(), Entry::saved("-j ISTIO_INBOUND")), Refusal::NoTarget),
        (EditOp::Insert(own(), 0, rule(3)), Refusal::NoSuchNumber),
        (EditOp::Insert(own(), 4, rule(3)), Refusal::NoSuchNumber),
        (EditOp::Delete(own(), rule(3)), Refusal::NoSuchRule),
        (EditOp::RemoveChain(own()), Refusal::NotEmpty),
    ] {
        let mut after = before();
        assert_eq!(take_all(&mut after, std::slice::from_ref(&step)), Err(why), "{step:?}");
        assert_eq!(after, before(), "{step:?}");
    }
    let mut after = before();
    assert_eq!(
        take_all(&mut after, &[EditOp::Flush(own()), EditOp::RemoveChain(own())]),
        Err(Refusal::InUse)
    );
    assert_eq!(after, before(), "wholly or not at all");
}

fn take_all(tables: &mut Tables, steps: &[EditOp]) -> Result<(), Refusal> {
    let change = IptablesChange { tables: [TableChange { table: Table::Nat, steps: steps.into() }].into() };
    tables.apply(&change, Writer::Iptables).map_err(|refused| refused.why)
}

#[test]
fn what_another_program_does_is_done() {
    let own = Chain::named("ISTIO_OUTPUT");
    let mut tables = Tables::new();
    assert!(!tables.duplicate(Table::Nat, &own, 1));
    tables.flush(Table::Nat, &own);
    for (number, text) in [(1, "-j RETURN"), (9, "-j ACCEPT"), (0, "-j DROP")] {
        tables.insert(Table::Nat, own.clone(), number, Entry::saved(text));
    }
    let texts =
        |tables: &Tables| tables.rules(Table::Nat, &own).map(|one| format!("{one}")).collect::<Vec<_>>();
    assert_eq!(texts(&tables), ["-j DROP", "-j RETURN", "-j ACCEPT"]);
    assert!(!tables.duplicate(Table::Nat, &own, 0) && !tables.duplicate(Table::Nat, &own, 4));
    assert!(tables.duplicate(Table::Nat, &own, 2));
    assert_eq!(texts(&tables), ["-j DROP", "-j RETURN", "-j RETURN", "-j ACCEPT"]);
    tables.flush(Table::Nat, &own);
    assert!(texts(&tables).is_empty() && tables.observe().chains(Table::Nat).count() == 1);
}

#[test]
fn only_netlink_signs_rules_and_only_those_of_built_in_chains() {
    let (hook, own) = (Chain::Hook(Hook::Output), Chain::named("ISTIO_OUTPUT"));
    // Of no shape by which one without a signature is known.
    let rule = || Entry::saved("-p tcp -j RETURN");
    let steps = [
        EditOp::DeclareEmpty(own.clone()),
        EditOp::Append(own, rule()),
        EditOp::Append(hook.clone(), rule()),
    ];
    let change = IptablesChange { tables: [TableChange { table: Table::Nat, steps: steps.into() }].into() };
    for (writer, is_signed) in [(Writer::Netlink, true), (Writer::Iptables, false)] {
        let mut tables = Tables::new();
        tables.apply(&change, writer).unwrap();
        let state = tables.observe();
        assert_eq!(state.owns_beside(&IptablesTables::new(), Table::Nat, &hook, &rule()), is_signed);
    }
}
