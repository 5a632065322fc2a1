//! Why a network namespace is not as planned, and what that means for traffic.

use netfilter_state::differences::Differences;
use packet_trace::{
    interference::{Consequence, Finding},
    placement::RoutingObstacle,
};
use std::fmt;

/// Why a namespace is not as planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// Rules or routing are not as planned: all that differs, at least one thing.
    #[error("{0}")]
    Different(Differences),
    /// Rules are in both variants of iptables, or in iptables and native tables.
    #[error("the mesh has rules in more than one backend")]
    TwoBackends,
    /// A table exists but is dormant.
    #[error("{0}")]
    Asleep(String),
    /// Packets with the plan's mark do not reach the proxy, because of what other programs route; a run would not change that.
    #[error("{0}")]
    DoesNotConverge(Box<RoutingObstacle>),
    /// Everything is as planned, but other programs' rules interfere: the most certain first, at least one; and what that means for
    /// traffic.
    #[error("all rules are in force, but other programs' rules interfere: {}", few(.0))]
    Interference(Vec<Finding>, Vec<Consequence>),
}

/// How many other programs' rules are named in one text.
const MOST_NAMED: usize = 3;

/// The first of several things.
fn few<T: fmt::Display>(all: &[T]) -> String {
    let mut named: Vec<String> = all.iter().take(MOST_NAMED).map(ToString::to_string).collect();
    let more = all.len().saturating_sub(MOST_NAMED);
    if more > 0 {
        named.push(format!("and {more} more"));
    }
    named.join("; ")
}

impl Mismatch {
    /// What interferes with a plan in force, each in a line for a log; nothing where the plan itself is not in force.
    #[must_use]
    pub fn log_lines(&self) -> Vec<String> {
        let Self::Interference(findings, _) = self else { return Vec::new() };
        findings.iter().map(Finding::log_line).collect()
    }
}

/// What it means that a network namespace is not as planned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Impact {
    /// What becomes of traffic that should come to the proxy, whole kinds of it first.
    pub consequences: Vec<Consequence>,
    /// Other programs' rules that have a part in it, the most certain first.
    pub foreign: Vec<Finding>,
}

impl Impact {
    /// What interference says of itself; of another mismatch, nothing.
    pub(crate) fn of_interference(mismatch: &Mismatch) -> Self {
        let Mismatch::Interference(findings, consequences) = mismatch else { return Self::default() };
        Self { consequences: consequences.clone(), foreign: findings.clone() }
    }

    /// The mismatch that has it for people: what it means for traffic, then what is not as planned, then which rules of other programs have a
    /// part in it.
    #[must_use]
    pub fn describe(&self, mismatch: &Mismatch) -> String {
        let mut text = mismatch.to_string();
        if !self.consequences.is_empty() {
            text = format!("{}: {text}", few(&self.consequences));
        }
        if !self.foreign.is_empty() && !matches!(mismatch, Mismatch::Interference(..)) {
            text = format!("{text}; other programs' rules interfere, too: {}", few(&self.foreign));
        }
        text
    }
}
