//! A plan for people: what each rule is for, and who asked for it.

use super::{commands::routing_commands, line};
use crate::{
    plan::{PlannedRule, RulePlan},
    rule::{Chain, Scope, Table},
    settings::{Key, Source},
    values::Family,
};
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};

/// A chain of a plan with its rules, or its routing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Section {
    /// What it is.
    pub title: String,
    /// Its rules, each with its purpose and who asked for it; or commands, of which none has these.
    pub lines: Vec<(String, String)>,
}

impl RulePlan {
    /// The plan table by table, chain by chain, then the commands for what no table holds.
    #[must_use]
    pub fn sections(&self) -> Vec<Section> {
        let mut all = Vec::new();
        for (table, chains) in self.merged_rules() {
            for (chain, rules) in &chains {
                let lines = rules.iter().map(|planned| (planned.scoped_text(), planned.reason()));
                all.push(Section { title: title(table, chain), lines: lines.collect() });
            }
        }
        let routing: Vec<_> =
            routing_commands(self).into_iter().map(|command| (command, String::new())).collect();
        if !routing.is_empty() {
            all.push(Section { title: "routing".to_string(), lines: routing });
        }
        all
    }

    /// The same in plain text, a rule on each line.
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = String::new();
        for Section { title, lines } in self.sections() {
            line(&mut text, format_args!("{title}"));
            for (rule, reason) in lines {
                let reason = if reason.is_empty() { reason } else { format!("  # {reason}") };
                line(&mut text, format_args!("  {rule}{reason}"));
            }
        }
        text
    }
}

impl PlannedRule {
    /// The rule in the words of iptables-save, behind the family that it is for if only one.
    #[must_use]
    pub fn scoped_text(&self) -> String {
        let family = match self.scope {
            Scope::Every => "",
            Scope::Only(Family::V4) => "IPv4 only: ",
            Scope::Only(Family::V6) => "IPv6 only: ",
        };
        format!("{family}{}", self.rule.text())
    }

    /// What the rule is for, and who asked for it.
    #[must_use]
    pub fn reason(&self) -> String {
        format!("{} [{}]", self.purpose, self.setting.said_by(self.source()))
    }
}

impl Key {
    /// Who said the setting, which has this source.
    #[must_use]
    pub fn said_by(self, source: Source) -> String {
        if source == Source::Default {
            return format!("default of {}", self.setting().name());
        }
        source.to_string()
    }
}

fn title(table: Table, chain: &Chain) -> String {
    let hook = if matches!(chain, Chain::Hook(_)) { " (hook)" } else { "" };
    format!("{} {chain}{hook}", table.name())
}
