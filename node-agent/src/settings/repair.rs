//! What is done with broken pods, and the settings of that.

use cni_core::selector::{FieldSelector, LabelSelector, is_key, is_value};
use reasons::{AgentReason, EventReason};

use super::first;
use super::raw::Raw;
use super::table::Key;

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
    /// All of them, the ones that win first.
    pub const ALL: [Self; 3] = [Self::Repair, Self::Delete, Self::Label];

    /// The setting that switches it on.
    #[must_use]
    pub const fn switch(self) -> Key {
        match self {
            Self::Repair => Key::REPAIR_REPAIR_PODS,
            Self::Delete => Key::REPAIR_DELETE_PODS,
            Self::Label => Key::REPAIR_LABEL_PODS,
        }
    }

    /// The notice about a switch after it.
    pub(super) const fn wins(self) -> &'static str {
        match self {
            Self::Repair => "REPAIR_REPAIR_PODS wins",
            Self::Delete => "REPAIR_DELETE_PODS wins",
            Self::Label => "REPAIR_LABEL_PODS wins",
        }
    }

    /// The label `type` of metrics.
    #[must_use]
    pub const fn label(self) -> AgentReason {
        match self {
            Self::Repair => AgentReason::Repair,
            Self::Delete => AgentReason::Delete,
            Self::Label => AgentReason::Label,
        }
    }

    /// The results that its attempts may have.
    #[must_use]
    pub const fn results(self) -> &'static [AgentReason] {
        match self {
            Self::Repair | Self::Delete => &[AgentReason::Success, AgentReason::Fail],
            Self::Label => &[AgentReason::Success, AgentReason::Skip, AgentReason::Fail],
        }
    }

    /// The reason of events.
    #[must_use]
    pub const fn event(self) -> EventReason {
        match self {
            Self::Repair => EventReason::RepairBrokenPod,
            Self::Delete => EventReason::DeleteBrokenPod,
            Self::Label => EventReason::LabelBrokenPod,
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

/// The repair controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairSettings {
    /// What is done with broken pods, if anything.
    pub action: Option<RepairAction>,
    /// The label.
    pub label: (String, String),
    /// Which pods are broken.
    pub filter: BrokenPodFilter,
}

/// What makes a pod a broken one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenPodFilter {
    /// The node that it is on; empty if unknown.
    pub node: String,
    /// The labels it has.
    pub labels: LabelSelector,
    /// The fields it has.
    pub fields: FieldSelector,
    /// The annotation it has, with any value; empty for none in particular.
    pub annotation: String,
    /// The init container that failed; empty for any.
    pub container: String,
    /// Its termination message, without surrounding white space; empty for any.
    pub message: String,
    /// Its exit code; 0 for any but success.
    pub exit_code: i64,
}

pub(super) fn read(raw: &mut Raw<'_>) -> RepairSettings {
    let label = (raw.text(Key::REPAIR_BROKEN_POD_LABEL_KEY), raw.text(Key::REPAIR_BROKEN_POD_LABEL_VALUE));
    let on = RepairAction::ALL.map(|action| raw.switch(action.switch()).then_some(action));
    let is_label_on = on.contains(&Some(RepairAction::Label));
    if is_label_on && !is_key(&label.0) {
        raw.reject(Key::REPAIR_BROKEN_POD_LABEL_KEY, "not the key of a label, such as example.com/name");
    }
    if is_label_on && !is_value(&label.1) {
        raw.reject(
            Key::REPAIR_BROKEN_POD_LABEL_VALUE,
            "not the value of a label: at most 63 letters, digits, dashes, dots and underscores",
        );
    }
    let labels = raw.read(Key::REPAIR_LABEL_SELECTORS, LabelSelector::default(), LabelSelector::parse);
    let fields = raw.read(Key::REPAIR_FIELD_SELECTORS, FieldSelector::default(), FieldSelector::parse);
    let enabled = raw.switch(Key::REPAIR_ENABLED);
    RepairSettings {
        action: on.into_iter().flatten().next().filter(|_| enabled),
        label,
        filter: BrokenPodFilter {
            node: first(raw, &[Key::REPAIR_NODE_NAME, Key::NODE_NAME, Key::KUBERNETES_NODE_NAME]),
            labels,
            fields,
            annotation: raw.text(Key::REPAIR_SIDECAR_ANNOTATION),
            container: raw.text(Key::REPAIR_INIT_CONTAINER_NAME),
            message: raw.text(Key::REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE),
            exit_code: raw.number(Key::REPAIR_INIT_CONTAINER_EXIT_CODE),
        },
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

    #[test]
    fn one_action_is_chosen_in_the_references_order() {
        let names = RepairAction::ALL.map(|action| action.switch().row().name());
        for asked in 0..1_u8 << names.len() {
            let on = |index: usize| asked & (1 << index) != 0;
            let env: Vec<(&str, &str)> = names
                .iter()
                .enumerate()
                .filter(|(index, _)| on(*index))
                .map(|(_, name)| (*name, "true"))
                .collect();
            let wanted = RepairAction::ALL
                .into_iter()
                .enumerate()
                .filter(|(index, _)| on(*index))
                .map(|(_, action)| action)
                .next();
            assert_eq!(settings(&env).action, wanted, "{env:?}");
            let off: Vec<(&str, &str)> = env.iter().copied().chain([("REPAIR_ENABLED", "false")]).collect();
            assert_eq!(settings(&off).action, None, "{off:?}");
        }
    }
}
