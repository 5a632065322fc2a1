//! One check of a pod's network namespace, and its repair if it has drifted. Takes milliseconds: not for an async thread.

use pod_netns::{MountedNetns, Outside};
use reasons::AgentReason;

use super::DesiredRedirect;
use crate::pods::check::{Comparison, PodProblem, compare_here, repair_known};
use crate::settings::Paths;

/// What to check, and how it should be.
#[derive(Debug, Clone)]
pub struct HealJob {
    /// The pod, and the expected rules.
    pub desired: DesiredRedirect,
    /// Its network namespace.
    pub sandbox: MountedNetns,
    /// Whether the pod's processes have proved that it is the pod's.
    pub netns_proven: bool,
    /// The rules are in force, but connections may go on beside the proxy.
    pub connections_remain: bool,
    /// Where the host's processes and the runtime's network namespaces are.
    pub paths: Paths,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealOutcome {
    /// All is as planned.
    AsPlanned,
    /// It was not, and is again, verified.
    Healed {
        /// The first thing that was not.
        difference: String,
        /// What was done.
        words: String,
    },
    /// The mesh's rules are in force, but other programs' rules interfere.
    Interference(String),
    /// Its redirection differs from the plan or is unknown, and repair failed.
    Failed(PodProblem),
    /// The namespace is gone.
    Gone,
}

impl HealOutcome {
    /// The reason for metrics, one of those that `Metrics` starts with, if a repair was due.
    #[must_use]
    pub const fn reason(&self) -> Option<AgentReason> {
        match self {
            Self::AsPlanned | Self::Gone => None,
            Self::Healed { .. } => Some(AgentReason::Healed),
            Self::Interference(_) => Some(AgentReason::Interference),
            Self::Failed(error) => Some(error.reason),
        }
    }
}

/// Checks and repairs it. The pod's network namespace is known by device and inode, and its file is reopened each time.
#[must_use]
pub fn check_and_repair(job: &HealJob) -> HealOutcome {
    let Ok(netns) = job.sandbox.open() else { return HealOutcome::Gone };
    let outside = Outside::of_this_process();
    let failed = |error: &dyn std::fmt::Display| {
        HealOutcome::Failed(PodProblem::new(AgentReason::Unreadable, error.to_string()))
    };
    let compare = || {
        // A repair that is due does not wait for what the difference means.
        compare_here(&job.desired.pod, &job.desired.rules, outside.finds_this_foreign(), None)
    };
    let seen = match netns.run(compare) {
        Ok(Ok(seen)) => seen.comparison,
        Ok(Err(error)) => Comparison::Unknown(error),
        Err(error) => return failed(&error),
    };
    let difference = match seen {
        Comparison::Unknown(problem) if problem.reason != AgentReason::Unverifiable => {
            return failed(&problem);
        }
        Comparison::AsPlanned | Comparison::Unknown(_) if job.connections_remain => {
            "connections opened earlier may bypass the proxy".to_owned()
        }
        Comparison::Unknown(problem) => return HealOutcome::Failed(problem),
        // Its rules are none of healing's business.
        Comparison::AsPlanned | Comparison::Sandboxed(_) => return HealOutcome::AsPlanned,
        Comparison::Interference(findings) => return HealOutcome::Interference(findings),
        Comparison::Different(difference) | Comparison::NotRedirected(difference) => difference,
    };
    match repair_known(&job.desired.pod, &job.desired.rules, &job.paths, &job.sandbox, job.netns_proven) {
        Ok(report) => HealOutcome::Healed { difference, words: report.words() },
        Err(error) if error.reason == AgentReason::Unverifiable => HealOutcome::Failed(PodProblem::new(
            AgentReason::Unverifiable,
            format!("{}; before: {difference}", error.text),
        )),
        Err(error) => {
            HealOutcome::Failed(PodProblem::new(error.reason, format!("{difference}; {}", error.text)))
        }
    }
}
