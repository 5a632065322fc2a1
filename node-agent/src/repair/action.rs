//! What is done with a broken pod, and how that can end.

use std::time::Duration;

use cni_core::reasons;

use crate::cluster::pods::ChangeError;
use crate::pod_check::{RepairError, UNVERIFIABLE};
use crate::settings::RepairSettings;

use super::queue::AttemptEnd;

/// What is done with a broken pod. If the settings ask for several, the first one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RepairAction {
    /// It is redirected in place.
    Repair,
    /// The pod is deleted; its controller creates another one.
    Delete,
    /// It is labelled, for another controller to handle it.
    Label,
}

impl RepairAction {
    /// What the settings ask for.
    #[must_use]
    pub const fn of(settings: &RepairSettings) -> Option<Self> {
        match settings {
            RepairSettings { enabled: false, .. } => None,
            RepairSettings { repair_pods: true, .. } => Some(Self::Repair),
            RepairSettings { delete_pods: true, .. } => Some(Self::Delete),
            RepairSettings { label_pods: true, .. } => Some(Self::Label),
            RepairSettings { .. } => None,
        }
    }

    /// The label `type` of metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Repair => "repair",
            Self::Delete => "delete",
            Self::Label => "label",
        }
    }

    /// The results that its attempts may have.
    #[must_use]
    pub const fn results(self) -> &'static [&'static str] {
        match self {
            Self::Repair | Self::Delete => &["success", "fail"],
            Self::Label => &["success", "skip", "fail"],
        }
    }

    /// The reason of events.
    #[must_use]
    pub const fn event(self) -> &'static str {
        let [repair, delete, label] = reasons::REPAIR_EVENTS;
        match self {
            Self::Repair => repair,
            Self::Delete => delete,
            Self::Label => label,
        }
    }

    /// The past participle, for events.
    #[must_use]
    pub const fn past(self) -> &'static str {
        match self {
            Self::Repair => "redirected",
            Self::Delete => "deleted",
            Self::Label => "labelled",
        }
    }

    /// What a service account needs for it, for messages.
    #[must_use]
    pub const fn needs(self) -> &'static str {
        match self {
            Self::Repair => "the verb get on pods",
            Self::Delete => "the verb delete on pods",
            Self::Label => "the verb patch on pods/status",
        }
    }
}

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
    Failed(RepairError),
}

/// Every reason of a try's end, for metrics.
pub const REASONS: [&str; 19] = [
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
    "not_found",
    "ambiguous",
    "other_pod",
    "not_applied",
    "not_verified",
    UNVERIFIABLE,
    "not_severed",
    "no_process",
];

impl From<RepairError> for RepairOutcome {
    fn from(error: RepairError) -> Self {
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
        }
    }

    /// The label `result` of the metric that the reference has as well; none where nothing is decided yet.
    #[must_use]
    pub const fn result(&self) -> Option<&'static str> {
        match self {
            Self::Done(_) => Some("success"),
            Self::HadLabel => Some("skip"),
            Self::Failed(_) => Some("fail"),
            Self::Gone | Self::Changed | Self::Unanswered { .. } => None,
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
        }
    }

    /// From a change of the pod's object.
    #[must_use]
    pub fn of_change(action: RepairAction, changed: Result<(), ChangeError>) -> Self {
        match changed {
            Ok(()) => Self::Done(String::new()),
            Err(ChangeError::Gone) => Self::Gone,
            Err(ChangeError::Changed) => Self::Changed,
            Err(ChangeError::Refused(why)) => {
                let text = format!("{why}; the agent's service account needs {}", action.needs());
                RepairError::new("refused", text).into()
            }
            Err(ChangeError::Rejected(why)) => RepairError::new("rejected", why).into(),
            Err(ChangeError::Unanswered(failure)) => {
                Self::Unanswered { retry_after: failure.retry_after(), text: failure.to_string() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;

    fn settings(env: &[(&str, &str)]) -> RepairSettings {
        let needed = [("KUBERNETES_SERVICE_HOST", "h"), ("KUBERNETES_SERVICE_PORT", "1")];
        let env = needed.iter().chain(env).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let no_flags = settings_cli::ParsedArgs::default();
        Settings::read(&no_flags, &env.collect::<Vec<_>>()).expect("settings").0.repair
    }

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
        for action in [RepairAction::Repair, RepairAction::Delete, RepairAction::Label] {
            assert!(explained(action.event(), &reasons::EVENTS), "{action:?}");
        }
    }

    #[test]
    fn one_action_is_chosen_in_the_references_order() {
        let names = ["REPAIR_REPAIR_PODS", "REPAIR_DELETE_PODS", "REPAIR_LABEL_PODS"];
        for asked in 0..8_u8 {
            let on = |index: usize| asked & (1 << index) != 0;
            let env: Vec<(&str, &str)> = names
                .iter()
                .enumerate()
                .filter(|(index, _)| on(*index))
                .map(|(_, name)| (*name, "true"))
                .collect();
            let first =
                [RepairAction::Repair, RepairAction::Delete, RepairAction::Label].into_iter().enumerate();
            let wanted = first.filter(|(index, _)| on(*index)).map(|(_, action)| action).next();
            assert_eq!(RepairAction::of(&settings(&env)), wanted, "{env:?}");
            let off: Vec<(&str, &str)> = env.iter().copied().chain([("REPAIR_ENABLED", "false")]).collect();
            assert_eq!(RepairAction::of(&settings(&off)), None, "{off:?}");
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
            (RepairError::new("ambiguous", "x").into(), Some("fail"), AttemptEnd::Failed),
        ];
        for (outcome, result, ended) in all {
            assert!(REASONS.contains(&outcome.reason()), "{outcome:?}");
            assert_eq!((outcome.result(), outcome.ended()), (result, ended), "{outcome:?}");
        }
    }
}
