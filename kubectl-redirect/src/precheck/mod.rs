//! `precheck`: whether a cluster can run the agent, before it is installed and later. [`checks`] judges, without asking.

pub mod checks;
mod facts;
mod nodes;
mod workloads;

use explain::Printable;
use explain::text_writer::{Layout, TextStyle, TextWriter};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::terminal::{layout, print};
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
        Self { outcome: Outcome::Warning, seen: seen.into(), remedy: Some(remedy.into()) }
    }

    /// It cannot work like this.
    pub(crate) fn failed(seen: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { outcome: Outcome::Failed, seen: seen.into(), remedy: Some(remedy.into()) }
    }
}

/// `precheck`
///
/// # Errors
/// The API server cannot be asked.
pub async fn run(cluster: &Cluster, namespace: Option<&str>, is_json: bool) -> Result<u8, Failure> {
    let facts = Facts::of(cluster, namespace.unwrap_or(USUAL_NAMESPACE)).await?;
    let checks = checks::all(&facts);
    print(&if is_json { Printable::json(&json(&checks)) } else { text(&checks, layout()) })?;
    Ok(if checks.iter().any(|check| check.outcome > Outcome::Ok) { FOUND } else { FINE })
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
    let count = |outcome: Outcome| checks.iter().filter(|check| check.outcome == outcome).count();
    paper.gap();
    let (failed, warnings) = (count(Outcome::Failed), count(Outcome::Warning));
    let style = if failed > 0 { TextStyle::Red } else { TextStyle::Green };
    let can = if failed > 0 { "the agent cannot be installed yet" } else { "the agent can be installed" };
    paper.inked(0, &format!("{can}: {failed} failed, {warnings} warnings, {} ok", count(Outcome::Ok)), style);
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
