//! What is to be done with a pod.

use cni_core::pod_name::PodName;
use redirect_core::pod::{Decision, PodFacts, SkipReason};
use redirect_core::settings::{InputErrors, NamespaceFacts, RawSettings};
use redirect_core::{AmbientRedirect, Redirect, RulePlan};

use crate::printable::Printable;

/// What is to be done with a pod.
#[derive(Debug, Clone)]
pub enum PodDecision {
    /// It is redirected, as these settings say.
    Redirect(Box<Redirect>, Box<RawSettings>),
    /// It is redirected to the node's ztunnel, as these settings say.
    Ambient(Box<AmbientRedirect>, Box<RawSettings>),
    /// It is not redirected.
    Skip(SkipReason),
    /// On the host's network: the runtime never calls the plugin for it.
    HostNetwork,
    /// Its settings cannot be understood.
    Wrong(InputErrors),
    /// The pod is unknown.
    Unknown,
}

impl PodDecision {
    /// Decides about a pod that is on a network of its own and not excluded by its name, starting from settings that hold for every
    /// pod.
    #[must_use]
    pub fn of(pod: &PodFacts, base: RawSettings, facts: &NamespaceFacts<'_>) -> Self {
        match pod.decide_with(base.clone(), facts) {
            Ok(Decision::Redirect(redirect)) => Self::Redirect(redirect, Box::new(pod.settings(base))),
            Ok(Decision::Skip(reason)) => Self::Skip(reason),
            Err(errors) => Self::Wrong(errors),
        }
    }

    /// The plan, if any.
    #[must_use]
    pub fn plan(&self) -> Option<RulePlan> {
        match self {
            Self::Redirect(redirect, _) => Some(redirect.plan()),
            Self::Ambient(redirect, _) => Some(redirect.plan()),
            Self::Skip(_) | Self::HostNetwork | Self::Wrong(_) | Self::Unknown => None,
        }
    }

    /// The settings of a pod that is redirected.
    #[must_use]
    pub fn settings(&self) -> Option<&RawSettings> {
        match self {
            Self::Redirect(_, settings) | Self::Ambient(_, settings) => Some(settings),
            Self::Skip(_) | Self::HostNetwork | Self::Wrong(_) | Self::Unknown => None,
        }
    }

    /// The plan of a pod that is redirected, or why it is not.
    ///
    /// # Errors
    /// Why neither can be determined.
    pub fn settled(self) -> Result<Result<RulePlan, SkipReason>, Vec<String>> {
        match self {
            Self::Redirect(redirect, _) => Ok(Ok(redirect.plan())),
            Self::Ambient(redirect, _) => Ok(Ok(redirect.plan())),
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

/// The text for a pod that is not redirected, in place of its plan.
#[must_use]
pub fn left_alone(name: &PodName, reason: SkipReason, is_json: bool) -> Printable {
    if is_json {
        return Printable::json(&serde_json::to_value(Decision::Skip(reason)).unwrap_or_default());
    }
    Printable::line(&format!("# pod {name} is not redirected: {} ({})", reason.explanation(), reason.word()))
}
