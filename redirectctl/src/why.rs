//! What every reason and code means, without a cluster.

use cni_core::wire::Code;
use istio_validation::Reason;
use reasons::{
    AgentReason, ConditionReason, EventReason, Explained, ObstacleKind, PodState, ReasonDoc, linked,
};
use redirect_core::pod::SkipReason;

use crate::cause::Cause;
use crate::printable::Printable;
use crate::text_writer::{TextLayout, TextWriter};
use crate::{FAILED, FINE, FOUND};

/// Something that a word stands for.
struct Entry {
    word: String,
    /// Where it is met.
    place: &'static str,
    meaning: String,
    remedy: String,
}

impl Entry {
    fn new(
        place: &'static str,
        word: impl Into<String>,
        meaning: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { word: word.into(), place, meaning: meaning.into(), remedy: remedy.into() }
    }

    fn of(place: &'static str, doc: ReasonDoc) -> Self {
        Self::new(place, doc.word, doc.meaning, doc.remedy)
    }

    /// What node agent and taint controller write, by where it is met.
    fn all_of<R: Explained>(place: &'static str, reasons: &'static [R]) -> impl Iterator<Item = Self> {
        reasons.iter().map(move |reason| Self::of(place, reason.doc()))
    }
}

/// Exit codes, by the program that ends with them.
const EXIT_CODES: &[(u8, &str)] = &[
    (FINE, "done, and nothing is wrong"),
    (FAILED, "bad input, or it could not be done; standard error says why"),
    (FOUND, "of redirectctl: done, and something is wrong"),
    (
        126,
        "of istio-validation and istio-iptables --run-validation: the pod is not redirected, or it could not be proven",
    ),
];

fn all() -> Vec<Entry> {
    let causes = Cause::ALL.iter().map(|cause| Entry::of("a finding of redirectctl", cause.doc()));
    let skips = SkipReason::ALL.iter().map(|reason| {
        Entry::new("a reason of istio-cni to leave a pod alone", reason.word(), reason.explanation(), "")
    });
    let reasons = Reason::ALL.iter().map(|reason| Entry::of("a reason of istio-validation", reason.doc()));
    let codes = EXIT_CODES
        .iter()
        .map(|(code, meaning)| Entry::new("an exit code", format!("exit-{code}"), *meaning, ""));
    let errors = Code::ALL.iter().map(|(code, meaning)| {
        Entry::new("a code in an error of istio-cni", format!("cni-{}", code.number()), *meaning, "")
    });
    causes
        .chain(Entry::all_of("the state of a pod", PodState::ALL))
        .chain(skips)
        .chain(reasons)
        .chain(Entry::all_of("a reason of the agent's repairs", AgentReason::REPAIRS))
        .chain(Entry::all_of("an event of the node agent", EventReason::ALL))
        .chain(Entry::all_of("a reason of the node's condition cni.istio.io/Ready", ConditionReason::ALL))
        .chain(Entry::all_of("an obstacle in the network configuration", ObstacleKind::ALL))
        .chain(Entry::all_of("a result in the agent's metrics", AgentReason::RESULTS))
        .chain(alerts())
        .chain(codes)
        .chain(errors)
        .collect()
}

/// The alerts as shipped.
const RULES: &str = include_str!("../../deploy/charts/istio-cni/files/rules.yaml");

fn alerts() -> Vec<Entry> {
    let of = |line: &str, key: &str| {
        line.trim_start().strip_prefix(key).map(|value| value.trim().trim_matches('"').to_owned())
    };
    let mut all: Vec<Entry> = Vec::new();
    for line in RULES.lines() {
        if let Some(word) = of(line, "- alert:") {
            all.push(Entry::new("an alert", word, "", ""));
        }
        let Some(alert) = all.last_mut() else { continue };
        if let Some(summary) = of(line, "summary:") {
            alert.meaning = plain(&summary);
        }
        if let Some(url) = of(line, "runbook_url:") {
            alert.remedy = format!("see {url}");
        }
    }
    all
}

/// A summary without the places that Prometheus fills in.
fn plain(summary: &str) -> String {
    let mut text = summary.to_owned();
    while let Some((before, rest)) = text.split_once("{{") {
        let Some((filled, after)) = rest.split_once("}}") else { break };
        let name = filled.trim().trim_start_matches("$labels.").trim_start_matches('$');
        text = format!("{before}<{name}>{after}");
    }
    text
}

/// What a word means, in every place where it is met; an error where it is met in none.
///
/// # Errors
/// What is meant, perhaps.
pub fn explain(word: &str, layout: TextLayout) -> Result<Printable, String> {
    let all = all();
    // Labels of metrics have underscores where other words have hyphens.
    let is_it = |entry: &&Entry| entry.word.replace('_', "-") == word.replace('_', "-");
    let found: Vec<&Entry> = all.iter().filter(is_it).collect();
    if found.is_empty() {
        let words = all.iter().map(|entry| entry.word.as_str());
        let near: Vec<&str> = words.filter(|known| known.contains(word) && word.len() > 2).collect();
        return Err(if near.is_empty() {
            format!("{word:?} is not a known reason or code; redirectctl why lists all")
        } else {
            format!("{word:?} is not a known reason or code; did you mean {}?", near.join(" or "))
        });
    }
    let mut paper = TextWriter::new(layout);
    for entry in found {
        paper.heading(&format!("{} ({})", entry.word, entry.place));
        paper.line(2, &entry.meaning);
        if !entry.remedy.is_empty() {
            paper.labelled(2, "what to do: ", &linked(&entry.remedy));
        }
    }
    Ok(paper.into_text())
}

/// Every word, place by place.
#[must_use]
pub fn list(layout: TextLayout) -> Printable {
    let mut paper = TextWriter::new(layout);
    let mut place = "";
    for entry in all() {
        if entry.place != place {
            place = entry.place;
            paper.heading(place);
        }
        paper.labelled(2, &format!("{:28}", entry.word), &entry.meaning);
    }
    paper.into_text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_explained_where_it_is_met() {
        for entry in all() {
            let text = explain(&entry.word, TextLayout::default()).expect("is known");
            assert!(text.contains(entry.place), "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        }
    }

    #[test]
    fn a_word_that_is_nearly_one_is_told_which() {
        assert!(explain("dormant", TextLayout::default()).expect_err("no").contains("table-dormant"));
        assert!(explain("x", TextLayout::default()).expect_err("no").contains("redirectctl why"));
    }
}
