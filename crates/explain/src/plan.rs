//! A plan as text, in several languages.

use redirect_core::plan::PlannedRule;
use redirect_core::rule::{Chain, Scope, Table};
use redirect_core::settings::{Key, Source};
use redirect_core::{Family, RulePlan, options::NativeForm, render};
use serde::Deserialize;

use crate::picture::{self, Language};
use crate::printable::Printable;
use crate::text_writer::{Layout, TextWriter};

/// The language of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// For people: each rule with its purpose and who asked for it.
    Text,
    /// Input for iptables-restore.
    Restore,
    /// Input for nft.
    Nft,
    /// JSON, as redirect-core's schema describes it.
    Json,
    /// A picture for Graphviz.
    Dot,
    /// A picture for Mermaid.
    Mermaid,
    /// A picture.
    Svg,
}

impl Format {
    /// All of them, by their words.
    pub const WORDS: &'static [&'static str] = &["text", "restore", "nft", "json", "dot", "mermaid", "svg"];

    /// The language of a word.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        serde_json::from_value(word.into()).ok()
    }
}

/// A plan in a language.
#[must_use]
pub fn written(plan: &RulePlan, format: Format, native: NativeForm, layout: Layout) -> Printable {
    Printable::lines(&match format {
        Format::Text => return plan_text(plan, layout),
        Format::Restore => restore(plan),
        Format::Nft => render::nft_text_in(plan, native) + &routing(plan, "# "),
        Format::Json => {
            // Strings and numbers only: nothing in it can fail.
            let mut text = serde_json::to_string_pretty(plan).unwrap_or_default();
            text.push('\n');
            text
        }
        Format::Dot => picture::of_plan(plan, Language::Dot),
        Format::Mermaid => picture::of_plan(plan, Language::Mermaid),
        Format::Svg => picture::of_plan(plan, Language::Svg),
    })
}

fn restore(plan: &RulePlan) -> String {
    let of = |family: &Family| format!("# {family}\n{}", render::restore_text(&plan.rules(*family)));
    plan.families().iter().map(of).collect::<String>() + &routing(plan, "# ")
}

/// The commands for what no table holds.
fn routing(plan: &RulePlan, before: &str) -> String {
    let mut text = String::new();
    if let Some(routes) = plan.policy_routes() {
        let (mark, table) = (routes.mark(), routes.table());
        for family in routes.families() {
            let option = if *family == Family::V4 { "-4" } else { "-6" };
            let priority = routes.priority().map(|priority| format!(" pref {priority}")).unwrap_or_default();
            text += &format!("{before}ip {option} rule add fwmark {mark} lookup {table}{priority}\n");
            text += &format!("{before}ip {option} route add local default dev lo table {table}\n");
        }
    }
    if let Some(address) = plan.loopback_address() {
        text += &format!("{before}ip -6 addr add {address}/128 dev lo\n");
    }
    text
}

fn plan_text(plan: &RulePlan, layout: Layout) -> Printable {
    let mut paper = TextWriter::new(layout);
    for (table, chains) in plan.merged_rules() {
        for (chain, rules) in &chains {
            paper.heading(&heading(table, chain));
            for planned in rules {
                let family = match planned.scope() {
                    Scope::Every => "",
                    Scope::Only(Family::V4) => "IPv4 only: ",
                    Scope::Only(Family::V6) => "IPv6 only: ",
                };
                paper.line(2, &format!("{family}{}", render::rule_text(planned.rule())));
                paper.labelled(6, "# ", &format!("{} [{}]", planned.purpose(), said(planned)));
            }
        }
    }
    let routing = routing(plan, "");
    if !routing.is_empty() {
        paper.heading("routing");
        for line in routing.lines() {
            paper.line(2, line);
        }
    }
    paper.into_text()
}

fn heading(table: Table, chain: &Chain) -> String {
    match chain {
        Chain::Hook(hook) => format!("{} {} (hook)", table.name(), hook.name()),
        Chain::Ours(_) | Chain::Other(_) => format!("{} {}", table.name(), chain.name()),
    }
}

/// Who asked for a rule.
#[must_use]
pub fn said(planned: &PlannedRule) -> String {
    said_by(planned.because(), planned.source())
}

/// Who said a setting.
#[must_use]
pub fn said_by(setting: Key, source: Source) -> String {
    if source == Source::Default {
        return format!("default of {}", setting.setting().name());
    }
    source.to_string()
}
