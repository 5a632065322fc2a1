//! The plan: rules as they will stand, policy routing, the loopback address.

use super::{Action, Condition, Source, VERSION, rule::mask_of, setting_name};
use crate::{
    RulePlan,
    plan::{self, Position},
    render::rule_text,
    rule,
    values::Family,
};
use alloc::{borrow::ToOwned, string::String, vec::Vec};
use core::net::Ipv6Addr;
use serde::{Deserialize, Serialize};

/// What makes a redirection real: the counterpart of [`RulePlan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Plan {
    /// The version of the schema.
    pub version: u32,
    /// What each family has; one that has no rules is missing.
    pub families: Vec<FamilyPlan>,
    /// Policy rules and routes; absent if empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_routing: Option<PolicyRouting>,
    /// The address that the loopback interface gets besides its own; missing where it gets none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loopback_address: Option<Ipv6Addr>,
}

/// What a plan has for one family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FamilyPlan {
    /// The family.
    pub family: Family,
    /// The tables with rules, in the order raw, mangle, nat.
    pub tables: Vec<Table>,
}

/// A table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Table {
    /// Its name in iptables.
    pub table: String,
    /// Its chains that have rules, or that rules jump to.
    pub chains: Vec<Chain>,
}

/// A chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Chain {
    /// Its name in iptables.
    pub chain: String,
    /// Whether it is a built-in chain, in which others may have rules as well.
    pub built_in: bool,
    /// The rules in the order in which they stand.
    pub rules: Vec<PlannedRule>,
}

/// A rule with what it is for: the counterpart of [`plan::PlannedRule`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct PlannedRule {
    /// The conditions.
    pub conditions: Vec<Condition>,
    /// What happens to a packet that fulfils them.
    pub target: Action,
    /// The same in the words of iptables-save.
    pub text: String,
    /// Whether it stands before the other programs' rules (in built-in chains). Written only where it does.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub before_others: bool,
    /// The name of the setting that asked for it.
    pub setting: String,
    /// Who said so.
    pub source: Source,
    /// What it is for; the wording may change.
    pub purpose: String,
}

/// Policy routing that delivers marked packets to the proxy: a policy rule and a route for each family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PolicyRouting {
    /// The mark of the packets.
    pub mark: u32,
    /// The bits of it that count; all where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<u32>,
    /// The priority of the policy rule; the kernel chooses one where missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// The routing table.
    pub table: u32,
    /// The families that have it.
    pub families: Vec<Family>,
}

impl From<&RulePlan> for Plan {
    fn from(plan: &RulePlan) -> Self {
        let families = plan.families().iter().copied();
        Self {
            version: VERSION,
            families: families.map(|family| family_plan(plan, family)).collect(),
            policy_routing: plan.policy_routes().map(PolicyRouting::from),
            loopback_address: plan.loopback_address(),
        }
    }
}

fn family_plan(plan: &RulePlan, family: Family) -> FamilyPlan {
    let rules = plan.explained_rules(family);
    let tables = rules.iter().map(|(table, chains)| Table {
        table: table.name().to_owned(),
        chains: chains
            .iter()
            .map(|(chain, rules)| Chain {
                chain: chain.name().to_owned(),
                built_in: matches!(chain, rule::Chain::Hook(_)),
                rules: rules.iter().copied().map(PlannedRule::from).collect(),
            })
            .collect(),
    });
    FamilyPlan { family, tables: tables.collect() }
}

impl From<&plan::PlannedRule> for PlannedRule {
    fn from(planned: &plan::PlannedRule) -> Self {
        let is_built_in = matches!(planned.chain(), rule::Chain::Hook(_));
        let rule = planned.rule().canonical();
        Self {
            conditions: rule.matches.iter().map(Condition::from).collect(),
            target: (&rule.target).into(),
            text: rule_text(planned.rule()),
            before_others: is_built_in && matches!(planned.position(), Position::Before(_)),
            setting: setting_name(planned.because()).to_owned(),
            source: planned.source().into(),
            purpose: planned.purpose().to_owned(),
        }
    }
}

impl From<&plan::PolicyRoutes> for PolicyRouting {
    fn from(routes: &plan::PolicyRoutes) -> Self {
        Self {
            mark: routes.mark().value(),
            mask: mask_of(routes.mark()),
            priority: routes.priority(),
            table: routes.table().number(),
            families: routes.families().to_vec(),
        }
    }
}
