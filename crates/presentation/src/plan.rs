//! A plan as text, in several languages.

use redirect_core::render::Section;
use redirect_core::{RulePlan, options::NativeForm};
use serde::Deserialize;

use crate::picture;
use crate::printable::Printable;
use crate::text_writer::{TextLayout, TextWriter};

/// The language of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlanLanguage {
    /// For people: each rule with its purpose and who asked for it.
    Text,
    /// Input for iptables-restore.
    Restore,
    /// Input for nft.
    Nft,
    /// JSON, as redirect-core's schema describes it.
    Json,
    /// A picture.
    Svg,
}

impl PlanLanguage {
    /// All of them, by their words.
    pub const WORDS: &'static [&'static str] = &["text", "restore", "nft", "json", "svg"];

    /// The language of a word.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        serde_json::from_value(word.into()).ok()
    }
}

/// A plan in a language.
#[must_use]
pub fn written(plan: &RulePlan, format: PlanLanguage, native: NativeForm, layout: TextLayout) -> Printable {
    Printable::lines(&match format {
        PlanLanguage::Text => return plan_text(plan, layout),
        PlanLanguage::Restore => plan.program_text(None),
        PlanLanguage::Nft => plan.program_text(Some(native)),
        PlanLanguage::Json => {
            // Strings and numbers only: nothing in it can fail.
            let mut text = serde_json::to_string_pretty(plan).unwrap_or_default();
            text.push('\n');
            text
        }
        PlanLanguage::Svg => picture::of_plan(plan),
    })
}

fn plan_text(plan: &RulePlan, layout: TextLayout) -> Printable {
    let mut paper = TextWriter::new(layout);
    for Section { title, lines, .. } in plan.sections() {
        paper.heading(&title);
        for (line, reason) in lines {
            paper.line(2, &line);
            if !reason.is_empty() {
                paper.labelled(6, "# ", &reason);
            }
        }
    }
    paper.into_text()
}
