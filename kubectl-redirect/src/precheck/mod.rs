//! `precheck`: whether a cluster can run the agent, before it is installed and later. [`checks`] judges, without asking.

pub mod checks;
mod facts;
mod nodes;
mod workloads;

use presentation::Printable;
use presentation::text_writer::{TextLayout, TextStyle, TextWriter};
use reasons::linked;
use serde_json::{Value, json};

use crate::cluster::KubeApi;
use crate::terminal::layout;
use crate::wait::{CommandText, WaitGoal, until_fine};
use crate::{CommandFailure, FINE, FOUND};
pub use facts::{ClusterFacts, PodCounts};
pub(crate) use workloads::is_ours;

/// The version of the document.
const VERSION: u32 = 1;
/// Where the agent is installed unless another namespace is named.
pub const USUAL_NAMESPACE: &str = "istio-system";

/// What a check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckOutcome {
    /// Nothing is to be done.
    Ok,
    /// The agent can be installed, and something needs a decision.
    Warning,
    /// The agent cannot work like this.
    Failed,
}

impl CheckOutcome {
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
pub struct NamedCheck {
    /// What was checked, in a word that does not change.
    pub name: &'static str,
    /// What it came to.
    pub outcome: CheckOutcome,
    /// What was seen.
    pub seen: String,
    /// What to do, unless nothing is.
    pub remedy: Option<String>,
}

impl NamedCheck {
    /// One of this name, made or not.
    pub(crate) fn of(name: &'static str, found: Result<CheckResult, &CommandFailure>) -> Self {
        let not_checked =
            |why| CheckResult::warning(format!("not checked: {why}"), "run it again with that right");
        let CheckResult { outcome, seen, remedy } = found.unwrap_or_else(not_checked);
        Self { name, outcome, seen, remedy }
    }
}

/// What a check came to, without its name.
pub(crate) struct CheckResult {
    outcome: CheckOutcome,
    seen: String,
    remedy: Option<String>,
}

impl CheckResult {
    /// Nothing is to be done.
    pub(crate) fn ok(seen: impl Into<String>) -> Self {
        Self { outcome: CheckOutcome::Ok, seen: seen.into(), remedy: None }
    }

    /// Something needs a decision.
    pub(crate) fn warning(seen: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::with_remedy(CheckOutcome::Warning, seen.into(), &remedy.into())
    }

    /// It cannot work like this.
    pub(crate) fn failed(seen: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::with_remedy(CheckOutcome::Failed, seen.into(), &remedy.into())
    }

    fn with_remedy(outcome: CheckOutcome, seen: String, remedy: &str) -> Self {
        Self { outcome, seen, remedy: Some(linked(remedy)) }
    }
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrecheckRequest {
    /// Whether the answer is JSON.
    pub is_json: bool,
    /// What is good enough.
    pub goal: WaitGoal,
}

/// `precheck`
///
/// # Errors
/// The API server cannot be asked.
pub async fn run(
    cluster: &KubeApi,
    namespace: Option<&str>,
    wanted: &PrecheckRequest,
) -> Result<u8, CommandFailure> {
    let PrecheckRequest { is_json, goal } = *wanted;
    let look = async || {
        let facts = ClusterFacts::of(cluster, namespace.unwrap_or(USUAL_NAMESPACE)).await?;
        let checks = checks::all(&facts);
        let text = if is_json { Printable::json(&json(&checks)) } else { text(&checks, layout()) };
        Ok(Ok(CommandText { text, headline: headline(&checks), code: code(&checks, goal.ignores_warnings) }))
    };
    until_fine(goal.wait, look).await?.print()
}

fn code(checks: &[NamedCheck], ignores_warnings: bool) -> u8 {
    let most = if ignores_warnings { CheckOutcome::Warning } else { CheckOutcome::Ok };
    if checks.iter().any(|check| check.outcome > most) { FOUND } else { FINE }
}

fn count(checks: &[NamedCheck], outcome: CheckOutcome) -> usize {
    checks.iter().filter(|check| check.outcome == outcome).count()
}

/// What they come to.
fn headline(checks: &[NamedCheck]) -> String {
    let [failed, warnings, ok] =
        [CheckOutcome::Failed, CheckOutcome::Warning, CheckOutcome::Ok].map(|outcome| count(checks, outcome));
    let can = if failed > 0 { "the agent cannot be installed yet" } else { "the agent can be installed" };
    format!("{can}: {failed} failed, {warnings} warnings, {ok} ok")
}

/// For people.
#[must_use]
pub fn text(checks: &[NamedCheck], layout: TextLayout) -> Printable {
    let mut paper = TextWriter::new(layout);
    for check in checks {
        let label = format!("{:8} ", check.outcome.word());
        paper.marked(0, &label, check.outcome.style(), &format!("{}: {}", check.name, check.seen));
        if let Some(remedy) = &check.remedy {
            paper.labelled(9, "what to do: ", remedy);
        }
    }
    paper.gap();
    let style = if count(checks, CheckOutcome::Failed) > 0 { TextStyle::Red } else { TextStyle::Green };
    paper.inked(0, &headline(checks), style);
    paper.into_text()
}

/// For programs.
#[must_use]
pub fn json(checks: &[NamedCheck]) -> Value {
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
        let of = |outcomes: &[CheckOutcome]| {
            let check = |outcome: &CheckOutcome| NamedCheck {
                name: "check",
                outcome: *outcome,
                seen: String::new(),
                remedy: None,
            };
            let checks: Vec<NamedCheck> = outcomes.iter().map(check).collect();
            (code(&checks, false), code(&checks, true))
        };
        assert_eq!(of(&[CheckOutcome::Ok]), (FINE, FINE));
        assert_eq!(of(&[CheckOutcome::Ok, CheckOutcome::Warning]), (FOUND, FINE));
        assert_eq!(of(&[CheckOutcome::Warning, CheckOutcome::Failed]), (FOUND, FOUND));
    }
}
