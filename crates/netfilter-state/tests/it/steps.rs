//! The steps from one configuration to another, for every pair of configurations in every place that rules can stand.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

#[path = "../../src/steps/in_force.rs"]
mod in_force;

use crate::model_kernel::Kernel;
use in_force::in_force;
use netfilter_state::{
    netlink::NativeState,
    routing::{FoundRouting, RoutingChange},
    state::PerFamily,
    steps::{Goal, Inverse, Observation, RulesIn, Step},
};
use redirect_core::{
    AmbientRedirect, Family, Redirect, RulePlan,
    options::{NativeForm, Variant},
    rule::Table,
    settings::{Key, NamespaceFacts, RawSettings, Source},
};

const PLACES: [RulesIn; 4] = [
    RulesIn::Iptables(Variant::Nft),
    RulesIn::Iptables(Variant::Legacy),
    RulesIn::Native(NativeForm::Plain),
    RulesIn::Native(NativeForm::Sets),
];

fn plan(mode: &'static str, excluded: &'static str) -> RulePlan {
    let mut raw = RawSettings::new();
    let settings = [
        (Key::InterceptionMode, mode),
        (Key::InboundPorts, "*"),
        (Key::OutboundRanges, "*"),
        (Key::OutboundExcludePorts, excluded),
        (Key::ExcludeInterfaces, "eth9"),
        (Key::DualStack, "true"),
    ];
    settings.into_iter().for_each(|(key, text)| raw.set(key, text, Source::Flag("x")));
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
}

/// Where inbound connections are captured: backend, family and table.
fn captures(observed: &Observation) -> Vec<String> {
    let mut places = Vec::new();
    for table in Table::ALL.iter().copied() {
        for family in Family::BOTH {
            for variant in [Variant::Legacy, Variant::Nft] {
                if observed.rules(variant).of(family).captures_inbound(table) {
                    places.push(format!("{} {family} {}", variant.name(), table.name()));
                }
            }
            if observed.native.captures_inbound(table) {
                places.push(format!("native {family} {}", table.name()));
            }
        }
    }
    places
}

/// Every configuration, with its plan and where its rules stand.
fn configurations() -> Vec<(String, RulePlan, RulesIn)> {
    let mut all = Vec::new();
    for mode in ["REDIRECT", "TPROXY"] {
        for excluded in ["1,3,5,7", "2,4,6,8"] {
            for place in PLACES {
                all.push((format!("{mode} {excluded} {place:?}"), plan(mode, excluded), place));
            }
        }
    }
    all
}

#[test]
fn what_is_in_force_takes_no_step() {
    for (name, plan, place) in configurations() {
        assert_eq!(Goal::new(&plan, place).steps_from(&in_force(&plan, place)), [], "{name}");
    }
    assert_eq!(Goal::new(&RulePlan::empty(), PLACES[0]).steps_from(&Observation::default()), []);
}

#[test]
fn a_first_run_and_a_cleanup_wait_for_nothing() {
    for (name, plan, place) in configurations() {
        let empty = Observation::default();
        for steps in [
            Goal::new(&plan, place).steps_from(&empty),
            Goal::new(&RulePlan::empty(), place).steps_from(&in_force(&plan, place)),
        ] {
            assert!(!steps.is_empty() && !steps.contains(&Step::Grace), "{name}: {steps:?}");
        }
    }
}

/// At every moment something captures that captured before the last wait: what takes over is there before what captured goes.
#[test]
fn capture_moves_by_taking_over_waiting_and_letting_go() {
    let (mut waits, mut at_once) = (0, 0);
    for (from_name, from, from_place) in configurations() {
        for (to_name, to, to_place) in configurations() {
            let name = format!("{from_name} to {to_name}");
            let (mut kernel, wanted) =
                (Kernel::holding(&in_force(&from, from_place)), in_force(&to, to_place));
            let steps = Goal::new(&to, to_place).steps_from(&kernel.observe());
            // Where a packet may have been captured that is on its way: in all of these places.
            let mut since_last_wait = captures(&kernel.observe());
            for step in &steps {
                kernel.take(step).unwrap();
                let now = kernel.observe();
                if *step == Step::Grace {
                    since_last_wait = captures(&now);
                    waits += 1;
                }
                let here = captures(&now);
                since_last_wait.retain(|place| here.contains(place));
                for family in ["IPv4", "IPv6"] {
                    let kept = since_last_wait.iter().any(|place| place.contains(family));
                    assert!(kept, "{name}: {family} is captured nowhere for good: {steps:?}");
                }
            }
            at_once += usize::from(!steps.is_empty() && !steps.contains(&Step::Grace));
            let now = kernel.observe();
            assert!(now.differences_to(&wanted).is_empty(), "{name}: {:?}", now.differences_to(&wanted));
            assert_eq!(Goal::new(&to, to_place).steps_from(&now), [], "{name}");
        }
    }
    assert!(waits > 100 && at_once > 0, "{waits} waits, {at_once} changes at once");
}

#[test]
fn a_pod_of_ambient_mode_changes_its_scope_in_one_step() {
    let plan = |excluded: &'static str| {
        let mut raw = RawSettings::for_pod();
        for key in [Key::AmbientInboundExcludePorts, Key::AmbientOutboundExcludePorts] {
            raw.set(key, excluded, Source::Annotation("x"));
        }
        AmbientRedirect::parse(&raw).unwrap().plan()
    };
    for place in [RulesIn::Iptables(Variant::Nft), RulesIn::Native(NativeForm::Plain)] {
        for (from, to) in [("", "80,9090"), ("80,9090", "9090,22"), ("22", "")] {
            let steps = Goal::new(&plan(to), place).steps_from(&in_force(&plan(from), place));
            assert_eq!(steps.len(), 1, "{place:?}: {steps:?}");
        }
    }
}

#[test]
fn routing_comes_before_the_rules_and_goes_behind_them() {
    for (from_name, from, from_place) in configurations() {
        for (to_name, to, to_place) in configurations() {
            let steps = Goal::new(&to, to_place).steps_from(&in_force(&from, from_place));
            let is_routing = |step: &Step| {
                matches!(step, Step::AddRouting(_) | Step::MarkForRemoval(_) | Step::RemoveRouting(_))
            };
            let inner: Vec<&Step> = steps
                .iter()
                .skip_while(|step| matches!(step, Step::AddRouting(_) | Step::MarkForRemoval(_)))
                .take_while(|step| !matches!(step, Step::RemoveRouting(_)))
                .collect();
            assert!(!inner.into_iter().any(is_routing), "{from_name} to {to_name}: {steps:?}");
        }
    }
}

#[test]
fn sets_on_either_side_take_over_before_the_old_rules_go() {
    let sets = RulesIn::Native(NativeForm::Sets);
    for (from, to) in [(PLACES[2], sets), (sets, PLACES[2]), (sets, sets)] {
        let steps = Goal::new(&plan("REDIRECT", "2,4,6,8"), to)
            .steps_from(&in_force(&plan("REDIRECT", "1,3,5,7"), from));
        let [Step::Transaction(first), Step::Grace, Step::Transaction(last)] = steps.as_slice() else {
            panic!("{from:?} to {to:?}: {steps:?}");
        };
        assert_ne!(first.native, last.native);
    }
}

#[test]
fn native_rules_without_sets_change_at_one_instant_where_capture_stays() {
    let plain = RulesIn::Native(NativeForm::Plain);
    for mode in ["REDIRECT", "TPROXY"] {
        let observed = in_force(&plan(mode, "1,3,5,7"), plain);
        let steps = Goal::new(&plan(mode, "2,4,6,8"), plain).steps_from(&observed);
        assert!(matches!(steps.as_slice(), [Step::Transaction(_)]), "{mode}: {steps:?}");
    }
}

/// From TPROXY, which translates nothing, to REDIRECT: while both stand, and after the packets that met TPROXY alone.
#[test]
fn what_tproxy_left_is_forgotten_while_both_stand() {
    for (from_name, from, from_place) in configurations() {
        for (to_name, to, to_place) in configurations() {
            let steps = Goal::new(&to, to_place).steps_from(&in_force(&from, from_place));
            let forgets = steps.iter().position(|step| *step == Step::ForgetClosed);
            let is_needed = from_name.contains("TPROXY") && to_name.contains("REDIRECT");
            assert_eq!(forgets.is_some(), is_needed, "{from_name} to {to_name}: {steps:?}");
            if let Some(at) = forgets {
                assert_eq!(steps[at - 1], Step::Grace, "{from_name} to {to_name}: {steps:?}");
                let rules = |step: &Step| matches!(step, Step::Transaction(_) | Step::Restore(..));
                assert!(steps[..at].iter().any(rules) && steps[at..].iter().any(rules), "{steps:?}");
            }
        }
    }
}

#[test]
fn every_step_has_an_inverse_that_names_what_was_there() {
    let (from, to) = (plan("TPROXY", "1"), plan("REDIRECT", "2"));
    let before = in_force(&from, PLACES[0]);
    for step in Goal::new(&to, PLACES[2]).steps_from(&before) {
        let routing =
            |item| before.routing.iter().filter(|one| one.item == item).cloned().collect::<Vec<_>>();
        match (&step, step.clone().inverse(&before, &before.native)) {
            (Step::AddRouting(item), Inverse::Routing { change, before }) => {
                assert_eq!((change, before), (RoutingChange::Added(*item), routing(*item)));
            }
            (Step::RemoveRouting(found), Inverse::Routing { change, before }) => {
                assert_eq!((change, before), (RoutingChange::Removed(found.clone()), routing(found.item)));
            }
            (Step::MarkForRemoval(found), Inverse::Routing { change, before }) => {
                assert_eq!((change, before), (RoutingChange::Marked(found.clone()), routing(found.item)));
            }
            (Step::Grace, Inverse::Grace) | (Step::ForgetClosed, Inverse::Nothing) => {}
            (Step::Transaction(transaction), Inverse::Rules { iptables, native }) => {
                assert_eq!(native.is_some(), transaction.native.is_some());
                assert_eq!(iptables.len(), transaction.iptables.len());
                for (variant, family, _, rules) in &iptables {
                    assert_eq!(rules, before.rules(*variant).of(*family));
                }
            }
            (step, inverse) => panic!("{step:?} is not taken back by {inverse:?}"),
        }
    }
}
