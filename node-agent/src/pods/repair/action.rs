//! How a try to repair a broken pod can end.

use std::time::Duration;

use agent_runtime::ChangeError;
use reasons::AgentReason;

use crate::pods::check::PodProblem;
use crate::settings::RepairAction;

use super::limit::Throttled;
use super::queue::AttemptEnd;

/// How one try ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RepairOutcome {
    /// It is done; with details, if any.
    Done(String),
    /// The label was there already.
    HadLabel,
    /// The pod is gone, or another one has its name.
    Gone,
    /// The pod changed since it was read; the watch reports it again.
    Changed,
    /// The API server did not confirm whether it was done.
    Unanswered {
        /// What happened.
        text: String,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// It cannot be done, at least now.
    Failed(PodProblem),
    /// It has to wait, because of what was done before.
    Throttled {
        /// Why.
        text: String,
        /// How long.
        wait: Duration,
    },
}

/// Every reason of a try's end, for metrics: those of [`REPAIRS`](AgentReason::REPAIRS) that are not healing's alone.
pub fn possible_reasons() -> impl Iterator<Item = AgentReason> {
    let of_healing = [AgentReason::Healed, AgentReason::Interference, AgentReason::Unreadable];
    AgentReason::REPAIRS.iter().copied().filter(move |reason| !of_healing.contains(reason))
}

impl From<Throttled> for RepairOutcome {
    fn from(Throttled { why, wait }: Throttled) -> Self {
        let text = format!("{why}; tried again in {} s", wait.as_secs().saturating_add(1));
        Self::Throttled { text, wait }
    }
}

impl From<PodProblem> for RepairOutcome {
    fn from(error: PodProblem) -> Self {
        Self::Failed(error)
    }
}

impl RepairOutcome {
    /// The reason for metrics, one of [`possible_reasons`].
    #[must_use]
    pub const fn reason(&self) -> AgentReason {
        match self {
            Self::Done(_) => AgentReason::Done,
            Self::HadLabel => AgentReason::HadLabel,
            Self::Gone => AgentReason::Gone,
            Self::Changed => AgentReason::Changed,
            Self::Unanswered { .. } => AgentReason::Unanswered,
            Self::Failed(error) => error.reason,
            Self::Throttled { .. } => AgentReason::Throttled,
        }
    }

    /// The label `result` of the metric that the reference has as well; none where nothing is decided yet.
    #[must_use]
    pub const fn result(&self) -> Option<AgentReason> {
        match self {
            Self::Done(_) => Some(AgentReason::Success),
            Self::HadLabel => Some(AgentReason::Skip),
            Self::Failed(_) => Some(AgentReason::Fail),
            Self::Gone | Self::Changed | Self::Unanswered { .. } | Self::Throttled { .. } => None,
        }
    }

    /// What it means for the next try.
    #[must_use]
    pub fn ended(&self) -> AttemptEnd {
        match self {
            Self::Done(_) | Self::HadLabel | Self::Gone => AttemptEnd::Settled,
            // That is not about the pod, and may last: the pod has processes for moments only.
            Self::Failed(error) if error.reason == AgentReason::NoProcess => AttemptEnd::Unanswered(None),
            Self::Failed(_) => AttemptEnd::Failed,
            Self::Changed => AttemptEnd::Unanswered(None),
            Self::Unanswered { retry_after, .. } => AttemptEnd::Unanswered(*retry_after),
            Self::Throttled { wait, .. } => AttemptEnd::Unanswered(Some(*wait)),
        }
    }

    /// From a change of the pod's object.
    #[must_use]
    pub fn of_change(action: RepairAction, changed: Result<(), ChangeError>) -> Self {
        match changed {
            Ok(()) => Self::Done(String::new()),
            Err(ChangeError::Gone) => Self::Gone,
            Err(ChangeError::Changed(_)) => Self::Changed,
            Err(ChangeError::Refused(why)) => {
                let text = format!("{why}; the agent's service account needs {}", action.needs());
                PodProblem::new(AgentReason::Refused, text).into()
            }
            Err(ChangeError::Untrue(why) | ChangeError::Rejected(why)) => {
                PodProblem::new(AgentReason::Rejected, why).into()
            }
            Err(ChangeError::Unanswered { text, retry_after }) => Self::Unanswered { text, retry_after },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outcome_has_its_word_and_its_consequence() {
        let all = [
            (RepairOutcome::Done(String::new()), Some(AgentReason::Success), AttemptEnd::Settled),
            (RepairOutcome::HadLabel, Some(AgentReason::Skip), AttemptEnd::Settled),
            (RepairOutcome::Gone, None, AttemptEnd::Settled),
            (RepairOutcome::Changed, None, AttemptEnd::Unanswered(None)),
            (
                RepairOutcome::Unanswered { text: String::new(), retry_after: Some(Duration::from_secs(3)) },
                None,
                AttemptEnd::Unanswered(Some(Duration::from_secs(3))),
            ),
            (
                PodProblem::new(AgentReason::Ambiguous, "x").into(),
                Some(AgentReason::Fail),
                AttemptEnd::Failed,
            ),
            (
                RepairOutcome::Throttled { text: String::new(), wait: Duration::from_secs(9) },
                None,
                AttemptEnd::Unanswered(Some(Duration::from_secs(9))),
            ),
        ];
        for (outcome, result, ended) in all {
            assert!(possible_reasons().any(|reason| reason == outcome.reason()), "{outcome:?}");
            assert_eq!((outcome.result(), outcome.ended()), (result, ended), "{outcome:?}");
        }
    }
}
