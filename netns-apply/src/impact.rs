//! What it means for traffic that a network namespace is not as planned.

use crate::mismatch::{Mismatch, few};
use packet_trace::interference::{Consequence, Finding};

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
