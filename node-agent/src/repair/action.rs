//! How a try to repair a broken pod can end.

use std::time::Duration;

use controller_runtime::ChangeError;

use crate::pod_check::{AMBIGUOUS, NOT_FOUND, PodProblem, SANDBOXED, UNVERIFIABLE};
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

/// Every reason of a try's end, for metrics.
pub const REASONS: [&str; 21] = [
    "done",
    "had_label",
    "gone",
    "changed",
    "unanswered",
    "refused",
    "rejected",
    "no_capability",
    "no_entry",
    "ended",
    "not_meshed",
    SANDBOXED,
    NOT_FOUND,
    AMBIGUOUS,
    "other_pod",
    "not_applied",
    "not_verified",
    UNVERIFIABLE,
    "not_severed",
    "no_process",
    THROTTLED,
];

/// Too many deletions came before.
pub const THROTTLED: &str = "throttled";

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
    /// The word for metrics, one of [`REASONS`].
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Done(_) => "done",
            Self::HadLabel => "had_label",
            Self::Gone => "gone",
            Self::Changed => "changed",
            Self::Unanswered { .. } => "unanswered",
            Self::Failed(error) => error.reason,
            Self::Throttled { .. } => THROTTLED,
        }
    }

    /// The label `result` of the metric that the reference has as well; none where nothing is decided yet.
    #[must_use]
    pub const fn result(&self) -> Option<&'static str> {
        match self {
            Self::Done(_) => Some("success"),
            Self::HadLabel => Some("skip"),
            Self::Failed(_) => Some("fail"),
            Self::Gone | Self::Changed | Self::Unanswered { .. } | Self::Throttled { .. } => None,
        }
    }

    /// What it means for the next try.
    #[must_use]
    pub fn ended(&self) -> AttemptEnd {
        match self {
            Self::Done(_) | Self::HadLabel | Self::Gone => AttemptEnd::Settled,
            // That is not about the pod, and may last: the pod has processes for moments only.
            Self::Failed(error) if error.reason == "no_process" => AttemptEnd::Unanswered(None),
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
                PodProblem::new("refused", text).into()
            }
            Err(ChangeError::Untrue(why) | ChangeError::Rejected(why)) => {
                PodProblem::new("rejected", why).into()
            }
            Err(ChangeError::Unanswered { text, retry_after }) => Self::Unanswered { text, retry_after },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::reasons;

    /// `redirectctl why` explains each of these words.
    #[test]
    fn every_published_word_is_explained() {
        let explained = |word: &str, docs: &[reasons::ReasonDoc]| docs.iter().any(|doc| doc.word == word);
        let used: Vec<&str> = REASONS.iter().chain(&crate::heal::REASONS).copied().collect();
        for reason in &used {
            assert!(explained(reason, &reasons::REPAIRS), "{reason}");
        }
        assert!(
            reasons::REPAIRS.iter().all(|sign| used.contains(&sign.word)),
            "every explained word is used"
        );
        for action in RepairAction::ALL {
            assert!(explained(action.event(), &reasons::EVENTS), "{action:?}");
        }
    }

    #[test]
    fn every_outcome_has_its_word_and_its_consequence() {
        let all = [
            (RepairOutcome::Done(String::new()), Some("success"), AttemptEnd::Settled),
            (RepairOutcome::HadLabel, Some("skip"), AttemptEnd::Settled),
            (RepairOutcome::Gone, None, AttemptEnd::Settled),
            (RepairOutcome::Changed, None, AttemptEnd::Unanswered(None)),
            (
                RepairOutcome::Unanswered { text: String::new(), retry_after: Some(Duration::from_secs(3)) },
                None,
                AttemptEnd::Unanswered(Some(Duration::from_secs(3))),
            ),
            (PodProblem::new(AMBIGUOUS, "x").into(), Some("fail"), AttemptEnd::Failed),
            (
                RepairOutcome::Throttled { text: String::new(), wait: Duration::from_secs(9) },
                None,
                AttemptEnd::Unanswered(Some(Duration::from_secs(9))),
            ),
        ];
        for (outcome, result, ended) in all {
            assert!(REASONS.contains(&outcome.reason()), "{outcome:?}");
            assert_eq!((outcome.result(), outcome.ended()), (result, ended), "{outcome:?}");
        }
    }
}
