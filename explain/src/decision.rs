//! What is to be done with a pod.

use cni_core::pod_name::PodName;
use redirect_core::pod::{Decision, PodFacts, SkipReason};
use redirect_core::settings::{InputErrors, NamespaceFacts, RawSettings};
use redirect_core::{Redirect, RulePlan, json};

/// What is to be done with a pod.
#[derive(Debug, Clone)]
pub enum PodDecision {
    /// It is redirected, as these settings say.
    Redirect(Box<Redirect>, Box<RawSettings>),
    /// It is left alone.
    Skip(SkipReason),
    /// It is on the host's network, so that nobody asks the plugin about it.
    HostNetwork,
    /// Its settings cannot be understood.
    Wrong(InputErrors),
    /// Nobody said which pod it is.
    Unknown,
}

impl PodDecision {
    /// Decides about a pod that is on a network of its own and not left alone for its name, starting from settings that hold for every
    /// pod.
    #[must_use]
    pub fn of(pod: &PodFacts, base: RawSettings, facts: &NamespaceFacts<'_>) -> Self {
        if let Some(reason) = pod.skip_reason() {
            return Self::Skip(reason);
        }
        let settings = pod.settings(base);
        match Redirect::parse(&settings, facts) {
            Ok(redirect) => Self::Redirect(Box::new(redirect), Box::new(settings)),
            Err(errors) => Self::Wrong(errors),
        }
    }

    /// The plan, where there is one.
    #[must_use]
    pub fn plan(&self) -> Option<RulePlan> {
        match self {
            Self::Redirect(redirect, _) => Some(redirect.plan()),
            Self::Skip(_) | Self::HostNetwork | Self::Wrong(_) | Self::Unknown => None,
        }
    }

    /// How the pod is redirected, or why it is left alone.
    ///
    /// # Errors
    /// Why neither can be told.
    pub fn settled(self) -> Result<Result<Box<Redirect>, SkipReason>, Vec<String>> {
        match self {
            Self::Redirect(redirect, _) => Ok(Ok(redirect)),
            Self::Skip(reason) => Ok(Err(reason)),
            Self::HostNetwork => Err(vec![
                "the pod is on the host's network: no plugin is asked about it, and it has no plan"
                    .to_owned(),
            ]),
            Self::Wrong(all) => Err(all.iter().map(ToString::to_string).collect()),
            Self::Unknown => Err(vec!["nothing is decided about the pod".to_owned()]),
        }
    }
}

/// What is said of a pod that is left alone, in the place of its plan.
#[must_use]
pub fn left_alone(name: &PodName, reason: SkipReason, is_json: bool) -> String {
    if is_json {
        let decision = json::Decision::from(&Decision::Skip(reason));
        return crate::pretty(&serde_json::to_value(decision).unwrap_or_default());
    }
    format!("# pod {name} is left alone: {} ({})\n", reason.explanation(), reason.word())
}
