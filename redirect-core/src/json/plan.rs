//! Decisions and plans. A decision says its reason in two ways, and a plan's rules are listed as they will stand: the documents differ
//! from the types.

use super::VERSION;
use crate::{
    RulePlan,
    plan::{PlannedRule, PolicyRoutes, Position},
    pod::Decision,
    rule::{Chain, Match, Table, Target},
    settings::{Key, Source},
    values::Family,
};
use alloc::{string::String, vec::Vec};
use core::{net::Ipv6Addr, ops::Not};
use serde::{Serialize, Serializer, ser::SerializeStruct as _};

impl Serialize for Decision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut document = serializer.serialize_struct("Decision", 4)?;
        document.serialize_field("version", &VERSION)?;
        match self {
            Self::Redirect(redirect) => {
                document.serialize_field("decision", "redirect")?;
                document.serialize_field("redirect", redirect)?;
            }
            Self::Skip(reason) => {
                document.serialize_field("decision", "skip")?;
                document.serialize_field("reason", reason.word())?;
                document.serialize_field("explanation", reason.explanation())?;
            }
        }
        document.end()
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PlanDocument<'a> {
    version: u32,
    families: Vec<FamilyPlan<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy_routing: Option<&'a PolicyRoutes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    loopback_address: Option<Ipv6Addr>,
}

#[derive(Serialize)]
struct FamilyPlan<'a> {
    family: Family,
    tables: Vec<TablePlan<'a>>,
}

#[derive(Serialize)]
struct TablePlan<'a> {
    table: Table,
    chains: Vec<ChainPlan<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ChainPlan<'a> {
    chain: Chain,
    built_in: bool,
    rules: Vec<&'a PlannedRule>,
}

impl Serialize for RulePlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let chain = |(chain, rules)| {
            let built_in = matches!(chain, Chain::Hook(_));
            ChainPlan { chain, built_in, rules }
        };
        let family = |family: &Family| {
            let tables = self.explained_rules(*family).into_iter();
            let tables = tables
                .map(|(table, chains)| TablePlan { table, chains: chains.into_iter().map(chain).collect() });
            FamilyPlan { family: *family, tables: tables.collect() }
        };
        let document = PlanDocument {
            version: VERSION,
            families: self.families().iter().map(family).collect(),
            policy_routing: self.policy_routes(),
            loopback_address: self.loopback_address(),
        };
        document.serialize(serializer)
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RuleDocument<'a> {
    conditions: Vec<Match>,
    target: Target,
    text: String,
    #[serde(skip_serializing_if = "Not::not")]
    before_others: bool,
    setting: Key,
    source: Source,
    purpose: &'a str,
}

/// As it will stand, in canonical form; `beforeOthers` is about other programs' rules, and written only where true.
impl Serialize for PlannedRule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let is_built_in = matches!(self.chain(), Chain::Hook(_));
        let rule = self.rule().canonical();
        let document = RuleDocument {
            conditions: rule.matches,
            target: rule.target,
            text: self.rule().text(),
            before_others: is_built_in && matches!(self.position, Position::Before(_)),
            setting: self.setting(),
            source: self.source(),
            purpose: self.purpose(),
        };
        document.serialize(serializer)
    }
}
