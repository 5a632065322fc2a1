//! A plan's rules, table by table, as the page shows them.

use redirect_core::plan::PlannedRule;
use redirect_core::rule::{Chain as RuleChain, Scope};
use redirect_core::{Family, RulePlan};
use serde::Serialize;

/// A table.
#[derive(Debug, Serialize)]
pub struct PageTable {
    /// Its name.
    pub table: String,
    /// Its chains.
    pub chains: Vec<PageChain>,
}

/// A chain.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PageChain {
    /// Its name.
    pub chain: String,
    /// Whether packets come to it by themselves.
    pub is_hook: bool,
    /// Its rules, those of both families in one order.
    pub rows: Vec<Row>,
}

/// A rule.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    /// Its number among the rules of its chain for IPv4, counted from 1; missing where it is for IPv6 only.
    pub number_v4: Option<usize>,
    /// The same for IPv6.
    pub number_v6: Option<usize>,
    /// The one family it is for; absent if for all of the plan's.
    pub only: Option<String>,
    /// The rule, as iptables-save writes it.
    pub rule: String,
    /// What it is for.
    pub purpose: String,
    /// Who asked for it.
    pub said: String,
}

/// The tables of a plan.
pub(crate) fn tables(plan: &RulePlan) -> Vec<PageTable> {
    let merged = plan.merged_rules();
    let tables = merged.iter().map(|(table, chains)| PageTable {
        table: table.name().to_owned(),
        chains: chains
            .iter()
            .map(|(chain, rules)| PageChain {
                chain: chain.name().to_owned(),
                is_hook: matches!(chain, RuleChain::Hook(_)),
                rows: rows(plan, rules),
            })
            .collect(),
    });
    tables.collect()
}

fn rows(plan: &RulePlan, rules: &[&PlannedRule]) -> Vec<Row> {
    let mut counts = [0_usize; 2];
    let row = |planned: &&PlannedRule| {
        let mut number = |family: Family, count: usize| {
            (planned.scope().covers(family) && plan.families().contains(&family)).then(|| {
                counts[count] += 1;
                counts[count]
            })
        };
        Row {
            number_v4: number(Family::V4, 0),
            number_v6: number(Family::V6, 1),
            only: match planned.scope() {
                Scope::Every => None,
                Scope::Only(family) => Some(family.to_string()),
            },
            rule: planned.rule().text(),
            purpose: planned.purpose().to_owned(),
            said: planned.setting().said_by(planned.source()),
        }
    };
    rules.iter().map(row).collect()
}
