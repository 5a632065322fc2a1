//! `precheck`: whether a cluster can run the agent, before it is installed and later. [`checks`] judges, without asking.

pub mod checks;
mod facts;
mod nodes;
mod workloads;

use explain::Printable;
use explain::text_writer::{Layout, TextStyle, TextWriter};
use reasons::linked;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::terminal::layout;
use crate::wait::{Answer, Goal, until_fine};
use crate::{FINE, FOUND, Failure};
pub use facts::{Facts, PodFacts};
pub(crate) use workloads::is_ours;

/// The version of the document.
const VERSION: u32 = 1;
/// Where the agent is installed unless another namespace is named.
pub const USUAL_NAMESPACE: &str = "istio-system";

/// What a check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Nothing is to be done.
    Ok,
    /// The agent can be installed, and something needs a decision.
    Warning,
    /// The agent cannot work like this.
    Failed,
}

impl Outcome {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
        }
    }

    const fn style(self) -> TextStyle {
        match self {
            Self::Ok => TextStyle::Green,
            Self::Warning => TextStyle::Yellow,
            Self::Failed => TextStyle::Red,
        }
    }
}

/// A check and what it came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was checked, in a word that does not change.
    pub name: &'static str,
    /// What it came to.
    pub outcome: Outcome,
    /// What was seen.
    pub seen: String,
    /// What to do, unless nothing is.
    pub remedy: Option<String>,
}

impl Check {
    /// One of this name, made or not.
    pub(crate) fn of(name: &'static str, found: Result<Found, &Failure>) -> Self {
        let not_checked = |why| Found::warning(format!("not checked: {why}"), "run it again with that right");
        let Found { outcome, seen, remedy } = found.unwrap_or_else(not_checked);
        Self { name, outcome, seen, remedy }
    }
}

/// What a check came to, without its name.
pub(crate) struct Found {
    outcome: Outcome,
    seen: String,
    remedy: Option<String>,
}

impl Found {
    /// Nothing is to be done.
    pub(crate) fn ok(seen: impl Into<String>) -> Self {
        Self { outcome: Outcome::Ok, seen: seen.into(), remedy: None }
    }

    /// Something needs a decision.
    pub(crate) fn warning(seen: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::with_remedy(Outcome::Warning, seen.into(), &remedy.into())
    }

    /// It cannot work like this.
    pub(crate) fn failed(seen: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::with_remedy(Outcome::Failed, seen.into(), &remedy.into())
    }

    fn with_remedy(outcome: Outcome, seen: String, remedy: &str) -> Self {
        Self { outcome, seen, remedy: Some(linked(remedy)) }
    }
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Whether the answer is JSON.
    pub is_json: bool,
    /// What is good enough.
    pub goal: Goal,
}

/// `precheck`
///
/// # Errors
/// The API server cannot be asked.
pub async fn run(cluster: &Cluster, namespace: Option<&str>, wanted: &Wanted) -> Result<u8, Failure> {
    let Wanted { is_json, goal } = *wanted;
    let look = async || {
        let facts = Facts::of(cluster, namespace.unwrap_or(USUAL_NAMESPACE)).await?;
        let checks = checks::all(&facts);
        let text = if is_json { Printable::json(&json(&checks)) } else { text(&checks, layout()) };
        Ok(Ok(Answer { text, headline: headline(&checks), code: code(&checks, goal.ignores_warnings) }))
    };
    until_fine(goal.wait, look).await?.print()
}

fn code(checks: &[Check], ignores_warnings: bool) -> u8 {
    let most = if ignores_warnings { Outcome::Warning } else { Outcome::Ok };
    if checks.iter().any(|check| check.outcome > most) { FOUND } else { FINE }
}

fn count(checks: &[Check], outcome: Outcome) -> usize {
    checks.iter().filter(|check| check.outcome == outcome).count()
}

/// What they come to.
fn headline(checks: &[Check]) -> String {
    let [failed, warnings, ok] =
        [Outcome::Failed, Outcome::Warning, Outcome::Ok].map(|outcome| count(checks, outcome));
    let can = if failed > 0 { "the agent cannot be installed yet" } else { "the agent can be installed" };
    format!("{can}: {failed} failed, {warnings} warnings, {ok} ok")
}

/// For people.
#[must_use]
pub fn text(checks: &[Check], layout: Layout) -> Printable {
    let mut paper = TextWriter::new(layout);
    for check in checks {
        let label = format!("{:8} ", check.outcome.word());
        paper.marked(0, &label, check.outcome.style(), &format!("{}: {}", check.name, check.seen));
        if let Some(remedy) = &check.remedy {
            paper.labelled(9, "what to do: ", remedy);
        }
    }
    paper.gap();
    let style = if count(checks, Outcome::Failed) > 0 { TextStyle::Red } else { TextStyle::Green };
    paper.inked(0, &headline(checks), style);
    paper.into_text()
}

/// For programs.
#[must_use]
pub fn json(checks: &[Check]) -> Value {
    let checks: Vec<Value> = checks
        .iter()
        .map(|check| json!({"name": check.name, "outcome": check.outcome.word(), "seen": check.seen, "remedy": check.remedy}))
        .collect();
    json!({"version": VERSION, "checks": checks})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_fail_unless_they_are_ignored() {
        let of = |outcomes: &[Outcome]| {
            let check = |outcome: &Outcome| Check {
                name: "check",
                outcome: *outcome,
                seen: String::new(),
                remedy: None,
            };
            let checks: Vec<Check> = outcomes.iter().map(check).collect();
            (code(&checks, false), code(&checks, true))
        };
        assert_eq!(of(&[Outcome::Ok]), (FINE, FINE));
        assert_eq!(of(&[Outcome::Ok, Outcome::Warning]), (FOUND, FINE));
        assert_eq!(of(&[Outcome::Warning, Outcome::Failed]), (FOUND, FOUND));
    }
}
