//! The steps from every configuration to every other are those in `tests/dumps/steps.told`. With `UPDATE_DUMPS=1` it is written again, and what changes
//! is for the review.

use super::{Goal, RulesIn, Step, in_force::in_force};
use crate::{change::IptablesChange, differences::Differences, netlink::recorded::dumps};
use redirect_core::{
    Family, RulePlan,
    options::{NativeForm, Variant},
    values::Mark,
};
use std::fmt::Write as _;

const PLACES: [(&str, RulesIn); 4] = [
    ("nft", RulesIn::Iptables(Variant::Nft)),
    ("legacy", RulesIn::Iptables(Variant::Legacy)),
    ("native", RulesIn::Native(NativeForm::Plain)),
    ("sets", RulesIn::Native(NativeForm::Sets)),
];

/// A change as its tables, each with how many steps it takes.
fn tables(family: Family, change: &IptablesChange) -> String {
    let tables: Vec<_> =
        change.tables.iter().map(|table| format!("{} {}", table.table.name(), table.steps.len())).collect();
    format!("{family} [{}]", tables.join(", "))
}

/// A step as it is reported, and how much it changes.
fn words(step: &Step) -> String {
    let mut words = step.to_string();
    match step {
        Step::Restore(_, family, change) => write!(words, ": {}", tables(*family, change)).unwrap(),
        Step::Transaction(transaction) => {
            words.push(':');
            for (family, change) in &transaction.iptables {
                write!(words, " {}", tables(*family, change)).unwrap();
            }
            if let Some(native) = &transaction.native {
                let names: Vec<&str> = native.names().collect();
                write!(words, " native [{}]", names.join(", ")).unwrap();
                for (set, table) in native.sets() {
                    write!(words, " {table} {set}").unwrap();
                }
            }
        }
        Step::AddRouting(_)
        | Step::MarkForRemoval(_)
        | Step::Grace
        | Step::ForgetClosed
        | Step::RemoveRouting(_) => {}
    }
    words
}

/// Every plan in every place, and no plan.
fn configurations() -> Vec<(String, RulePlan, RulesIn)> {
    let mut configurations = Vec::new();
    for (name, plan) in dumps::plans().into_iter().filter(|(name, _)| *name != "strict") {
        configurations
            .extend(PLACES.map(|(place, rules_in)| (format!("{name} {place}"), plan.clone(), rules_in)));
    }
    configurations.push(("nothing".into(), RulePlan::empty(), PLACES[0].1));
    configurations
}

/// What is reported where one plan is in force and another is wanted: all of it for some, and the first of it for all.
#[test]
fn what_is_not_as_planned_is_told_as_recorded() {
    let mut text = String::new();
    for (from_name, from, from_place) in &configurations() {
        let observed = in_force(from, *from_place);
        for (to_name, to, to_place) in &configurations() {
            let differences = Differences::between(&observed, to, *to_place);
            assert_eq!(
                (differences.is_empty(), differences.len()),
                (differences.first().is_none(), differences.iter().len())
            );
            writeln!(text, "{from_name} where {to_name} is wanted: {differences}").unwrap();
            if ["redirect nft", "redirect sets", "tproxy nft"].contains(&to_name.as_str())
                && *from_name != *to_name
            {
                differences.iter().for_each(|one| writeln!(text, "\t{one}").unwrap());
            }
        }
    }
    dumps::assert_recorded("differences.told", &text);
}

#[test]
fn from_every_configuration_to_every_other_the_steps_are_those_recorded() {
    let configurations = configurations();
    let mut text = String::new();
    for (from_name, from, from_place) in &configurations {
        let observed = in_force(from, *from_place);
        for (to_name, to, to_place) in &configurations {
            let goal = Goal::new(to, *to_place);
            let ways = [
                ("", goal),
                (", all again", Goal { force: true, ..goal }),
                (", by programs", Goal { nft_in_transaction: false, ..goal }),
            ];
            for (how, goal) in ways {
                writeln!(text, "{from_name} to {to_name}{how}").unwrap();
                goal.steps_from(&observed)
                    .iter()
                    .for_each(|step| writeln!(text, "\t{}", words(step)).unwrap());
            }
        }
    }
    dumps::assert_recorded("steps.told", &text);
}

#[test]
fn the_marks_of_a_plan_are_those_of_its_rules_wherever_they_are() {
    let [redirect, tproxy, _] = dumps::plans();
    for (place, rules_in) in PLACES {
        let marks = |plan: &RulePlan| -> Vec<u32> {
            in_force(plan, rules_in).marks().into_iter().map(Mark::value).collect()
        };
        assert!(marks(&redirect.1).is_empty(), "{place}");
        assert_eq!(marks(&tproxy.1), [0x539, 0x53a], "{place}");
    }
}

#[test]
fn a_backend_is_in_use_where_it_holds_rules() {
    let [(_, plan), ..] = dumps::plans();
    let all = [Variant::Nft, Variant::Legacy];
    for (place, rules_in) in PLACES {
        let observed = in_force(&plan, rules_in);
        let used = all.into_iter().filter(|variant| observed.in_use(*variant));
        assert!(
            used.eq(all.into_iter().filter(|variant| rules_in == RulesIn::Iptables(*variant))),
            "{place}"
        );
    }
}
