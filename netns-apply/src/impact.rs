//! What it means for traffic that a network namespace is not as planned.

use crate::{
    ApplyError, ApplyOptions, Snapshot,
    live::Live,
    verify::{Mismatch, few},
};
use netfilter_state::differences::Difference;
use packet_trace::interference::{self, Consequence, Effect, Finding};
use redirect_core::RulePlan;

/// What it means that a network namespace is not as planned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Impact {
    /// What becomes of traffic that should come to the proxy, whole kinds of it first.
    pub consequences: Vec<Consequence>,
    /// Other programs' rules that have a part in it, the most certain first.
    pub foreign: Vec<Finding>,
}

impl Snapshot<'_> {
    /// What a mismatch means for traffic, whatever of the plan is in force.
    ///
    /// # Errors
    /// The namespace cannot be inspected.
    pub fn impact(
        self,
        mismatch: &Mismatch,
        plan: &RulePlan,
        options: &ApplyOptions,
    ) -> Result<Impact, ApplyError> {
        if matches!(mismatch, Mismatch::Interference(..)) {
            return Ok(Impact::of_interference(mismatch));
        }
        let live = match self.into_live(plan) {
            Some(live) => live,
            None => Live::examined(plan, options)?,
        };
        let consequences = interference::consequences(&live.ruleset, &live.routing, plan, &live.pod(options));
        let mut foreign = interference::find(&live.ruleset, plan, &live.pod(options));
        // What the mismatch says already.
        foreign.retain(|finding| match (mismatch, finding.effect) {
            (Mismatch::Asleep(_), Effect::Dormant) => false,
            (Mismatch::Different(differences), Effect::Routes) => {
                !differences.iter().any(Difference::is_routing)
            }
            (_, Effect::Unexplained) => false,
            _ => true,
        });
        Ok(Impact { consequences, foreign })
    }
}

impl Impact {
    /// What interference says of itself; of another mismatch, nothing.
    #[must_use]
    pub fn of_interference(mismatch: &Mismatch) -> Self {
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
