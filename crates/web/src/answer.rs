//! Questions and their answers.

use std::net::IpAddr;

use packet_trace::TraceEvent;
use presentation::packet::{PacketQuestion, packet};
use presentation::picture::of_trace;
use presentation::plan::PlanLanguage;
use presentation::text_writer::TextLayout;
use presentation::traffic::{PlanComparison, report};
use presentation::{Printable, addresses};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::input::{Around, Side};

/// A question: the fields of the page.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct PageQuestion {
    /// A manifest, annotations or flags.
    pub text: String,
    /// Another one, to compare with.
    pub other: Option<String>,
    /// The pod's addresses, as of flag `--address`.
    pub address: String,
    /// The name servers of the pod, between commas.
    pub nameservers: String,
    /// The language in which the plan is written, a word of [`PlanLanguage::WORDS`].
    pub format: String,
    /// A packet.
    pub packet: Option<PacketQuestion>,
}

/// What is answered.
#[derive(Debug, Default, Serialize)]
pub struct PageAnswer {
    /// What is wrong with the fields around the text.
    pub errors: Vec<String>,
    /// What becomes of the text.
    pub side: Option<Side>,
    /// What becomes of the other one.
    pub other: Option<Side>,
    /// What differs between them, where both are understood.
    pub diff: Option<Diff>,
    /// The packet's way by the text, where both are understood.
    pub trace: Option<PageTrace>,
}

/// What differs between two plans.
#[derive(Debug, Serialize)]
pub struct Diff {
    /// Rules that only the first has, with their families.
    pub removed: Vec<(String, String)>,
    /// Rules that only the second has.
    pub added: Vec<(String, String)>,
    /// Traffic that they treat differently: which, and where it ends before and after.
    pub traffic: Vec<(String, String, String)>,
    /// What `redirectctl diff` writes.
    pub text: String,
    /// The same for programs.
    pub json: String,
}

/// The way of a packet.
#[derive(Debug, Default, Serialize)]
pub struct PageTrace {
    /// Everything wrong with the packet.
    pub errors: Vec<String>,
    /// The packet in words.
    pub packet: String,
    /// Where it ends, in words.
    pub end: String,
    /// The steps, as redirect-core's schema has them.
    pub way: Value,
    /// Who asked for the rule of each step, where that is known.
    pub said: Vec<Option<String>>,
    /// What `redirectctl trace` writes.
    pub text: String,
    /// The same for programs.
    pub json: String,
    /// The same as a picture.
    pub svg: String,
}

impl PageAnswer {
    /// To what is not a question.
    pub(crate) fn not_understood(why: &str) -> Self {
        Self {
            errors: vec![format!("the page does not fit its program ({why}); load it again")],
            ..Self::default()
        }
    }
}

/// The answer.
#[must_use]
pub fn answer(question: &PageQuestion) -> PageAnswer {
    let mut errors = Vec::new();
    let own = given("flag --address", &question.address, &mut errors);
    let nameservers = given("name servers", &question.nameservers, &mut errors);
    if !errors.is_empty() {
        return PageAnswer { errors, ..PageAnswer::default() };
    }
    let format = PlanLanguage::named(&question.format).unwrap_or(PlanLanguage::Text);
    let around = Around { addresses: &own, nameservers: &nameservers, format };
    let side = Side::of(&question.text, &around);
    let other = question.other.as_ref().map(|text| Side::of(text, &around));
    let diff = match (&side.plan, other.as_ref().and_then(|other| other.plan.as_ref())) {
        (Some(before), Some(after)) => Some(Diff::of(&PlanComparison::of(before, after))),
        (None, _) | (_, None) => None,
    };
    let trace = question.packet.as_ref().and_then(|way| PageTrace::of(way, &side, &own));
    PageAnswer { errors, side: Some(side), other, diff, trace }
}

/// The addresses in a field of this name; none where it is empty.
fn given(name: &str, text: &str, errors: &mut Vec<String>) -> Vec<IpAddr> {
    if text.trim().is_empty() {
        return Vec::new();
    }
    addresses(name, text).map_err(|error| errors.push(error)).unwrap_or_default()
}

impl Diff {
    fn of(compared: &PlanComparison) -> Self {
        let [removed, added] = compared.rules.each_ref().map(|rules| {
            rules.iter().map(|(family, rule)| (family.to_string(), rule.clone())).collect::<Vec<_>>()
        });
        let traffic = compared
            .traffic
            .iter()
            .map(|one| (one.region.to_string(), one.before.to_string(), one.after.to_string()));
        Self {
            removed,
            added,
            traffic: traffic.collect(),
            text: compared.text(TextLayout::default()).into(),
            json: Printable::json(&compared.json()).into(),
        }
    }
}

impl PageTrace {
    /// The packet's path; `None` without rules to follow it through.
    fn of(way: &PacketQuestion, side: &Side, addresses: &[IpAddr]) -> Option<Self> {
        let plan = side.plan.as_ref().filter(|_| side.left_alone.is_none())?;
        let packet = match packet(way, Some(&plan.plan), addresses) {
            Ok(packet) => packet,
            Err(errors) => return Some(Self { errors, ..Self::default() }),
        };
        let trace = plan.rules(packet.family()).trace(&packet);
        let steps = serde_json::to_value(&trace).unwrap_or_default();
        Some(Self {
            errors: Vec::new(),
            packet: trace.packet.to_string(),
            end: trace.fate().to_string(),
            said: trace.steps.iter().map(asked_by).collect(),
            text: report(&trace, way.detail()).into(),
            json: Printable::json(&steps).into(),
            svg: of_trace(&trace, way.detail()),
            way: steps,
        })
    }
}

/// Who asked for the rule of a step.
fn asked_by(step: &TraceEvent) -> Option<String> {
    if let TraceEvent::Rule { origin: Some(origin), .. } = step {
        return Some(origin.setting.said_by(origin.source));
    }
    None
}
