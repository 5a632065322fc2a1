//! What changes when one configuration takes the place of another: the steps a run would take, and the rules that come and go.
//!
//! ```console
//! $ cargo run --example compare_configurations
//! ```

#![allow(clippy::print_stdout)] // what an example is for

use netfilter_state::{
    routing::FoundRouting,
    state::PerFamily,
    steps::{Goal, Observation, RulesIn},
};
use redirect_core::{
    Families, Family, Redirect, RulePlan, Tproxy, options::Variant, rule::Table, values::PortRange,
};
use std::{collections::BTreeSet, error::Error};

fn main() -> Result<(), Box<dyn Error>> {
    let before = Redirect::sidecar(Families::V4).exclude_outbound([PortRange::single(3306)]).build()?;
    let after = Redirect::sidecar(Families::V4).tproxy(Tproxy::default()).build()?;
    let (before, after) = (before.plan(), after.plan());

    // Rules in the tables that iptables-nft shows.
    let in_force = Observation {
        nft: PerFamily::each(|family| (&before.rules(family)).into()),
        routing: FoundRouting::all_working(&before),
        ..Observation::default()
    };
    println!("steps:");
    for step in Goal::new(&after, RulesIn::Iptables(Variant::Nft)).steps_from(&in_force) {
        println!("  {step}");
    }

    println!("rules:");
    let (before, after) = (rules(&before), rules(&after));
    for rule in before.difference(&after) {
        println!("- {rule}");
    }
    for rule in after.difference(&before) {
        println!("+ {rule}");
    }
    Ok(())
}

/// Every rule of a plan for IPv4, with its table and chain.
fn rules(plan: &RulePlan) -> BTreeSet<String> {
    let rules = plan.rules(Family::V4);
    let mut texts = BTreeSet::new();
    for table in Table::ALL {
        for (chain, entries) in rules.chains(*table) {
            for rule in entries {
                texts.insert(format!("{} {chain}: {}", table.name(), rule.text()));
            }
        }
    }
    texts
}
