//! One operation on one pod: which pod it is, how it should be redirected, how its network namespace differs, and redirecting it there.
//!
//! Its clients decide when: the drift watch at an interval ([`crate::pods::drift`]), healing when the kernel reports a change ([`crate::pods::heal`]), repair when a
//! container failed ([`crate::pods::repair`]), and the taint's probe on a namespace of its own ([`crate::taint`]). All of it is the code of the plugin's ADD and CHECK.

mod apply;
mod compare;
mod namespace;
mod pod;
mod room;
mod surroundings;

use std::time::Duration;

use netns_apply::Capability;
use reasons::AgentReason;

pub use apply::{ApplyFailure, RepairReport, redirect_here, repair, repair_known};
pub use compare::{Basis, Comparison, ExpectedRules, PodComparison, check, compare_here, options};
pub use namespace::{census, find, pod_addresses};
pub use pod::MeshPod;
pub use room::remember_memory;
pub use surroundings::NodeNamespaces;

/// How long the check of one pod may take before all others go on without it.
pub const LONGEST_CHECK: Duration = Duration::from_secs(5);

/// Why a pod cannot be checked, or repaired.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct PodProblem {
    /// The reason for metrics.
    pub reason: AgentReason,
    /// The message.
    pub text: String,
}

impl PodProblem {
    /// A reason and a message.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "callers have a text or an error that they do not need"
    )]
    pub fn new(reason: AgentReason, text: impl ToString) -> Self {
        Self { reason, text: text.to_string() }
    }

    /// Whether the pod's network namespace is not known, so that nothing watches the pod.
    #[must_use]
    pub fn is_unfound(&self) -> bool {
        [AgentReason::NotFound, AgentReason::Ambiguous].contains(&self.reason)
    }
}

/// Whether this process has these capabilities.
///
/// # Errors
/// The names of those that it lacks.
pub fn require<const N: usize>(wanted: [Capability; N]) -> Result<(), String> {
    let missing = wanted.into_iter().filter(|wanted| wanted.is_held() == Some(false));
    let missing: Vec<&str> = missing.map(|capability| capability.name).collect();
    if missing.is_empty() { Ok(()) } else { Err(missing.join(" and ")) }
}
