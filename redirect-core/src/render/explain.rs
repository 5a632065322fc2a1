//! A plan for people: what each rule is for, and who asked for it.

use super::rule_text;
use crate::{
    plan::{PlannedRule, RulePlan},
    rule::{Chain, Scope, Table},
    settings::Source,
    values::Family,
};
use alloc::string::String;
use core::fmt::Write;

/// The plan in plain text: table by table, chain by chain, each rule with its purpose and who asked for it.
#[must_use]
pub fn explain(plan: &RulePlan) -> String {
    let mut text = String::new();
    for (table, chains) in plan.merged_rules() {
        for (chain, rules) in &chains {
            let _ = writeln!(text, "{}", heading(table, chain));
            for planned in rules {
                let _ = writeln!(text, "  {}", rule_line(planned));
            }
        }
    }
    if let Some(routes) = plan.policy_routes() {
        for family in &routes.families {
            let (mark, table) = (routes.mark, routes.table);
            let _ =
                writeln!(text, "{family}: packets with mark {mark} are delivered locally (table {table})");
        }
    }
    if let Some(address) = plan.loopback_address() {
        let _ = writeln!(
            text,
            "lo: address {address}/128, the source of the proxy's connections to the application"
        );
    }
    text
}

fn heading(table: Table, chain: &Chain) -> String {
    match chain {
        Chain::Hook(hook) => alloc::format!("{} {} (hook)", table.name(), hook.name()),
        Chain::Ours(_) | Chain::Other(_) => alloc::format!("{} {chain}", table.name()),
    }
}

fn rule_line(planned: &PlannedRule) -> String {
    let family = match planned.scope {
        Scope::Every => "",
        Scope::Only(Family::V4) => "IPv4 only: ",
        Scope::Only(Family::V6) => "IPv6 only: ",
    };
    let rule = rule_text(&planned.rule);
    let (purpose, source) = (planned.purpose, planned.source());
    if source == Source::Default {
        let setting = planned.because.setting().name();
        return alloc::format!("{family}{rule}  # {purpose} [default of {setting}]");
    }
    alloc::format!("{family}{rule}  # {purpose} [{source}]")
}
