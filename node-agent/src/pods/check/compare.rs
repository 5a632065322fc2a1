//! Comparing a pod's network namespace with its plan. Read-only.

use std::collections::BTreeMap;
use std::hash::RandomState;
use std::net::IpAddr;
use std::time::Duration;

use cni_core::conf::Conf;
use cni_core::selection::{Acceptance, Programming, base_settings};
use netns_apply::facts::{addresses, of_namespace};
use netns_apply::{ApplyError, ApplyOptions, Fingerprint, Mismatch, Snapshot, Verdict};
use pod_netns::{LookupError, MountedNetns, Outside, suitable};
use reasons::{AgentReason, PodState};
use redirect_core::accepted::AcceptedRules;
use redirect_core::pod::{Decision, PodFacts};
use redirect_core::settings::InputErrors;

use super::room::{require_room, turn_of};
use super::{MeshPod, PodProblem};

/// How long a check waits for other programs that keep changing the rules it reads: a later one comes.
const PATIENCE: Duration = Duration::from_secs(1);

/// What holds for all pods of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedRules {
    /// What programs the rules, and in which form.
    pub programming: Programming,
    /// Whether pods get strict capture, unless their annotation decides.
    pub strict_capture: bool,
    /// Which rules of other programs are accepted.
    pub acceptance: Acceptance,
    /// The runtime's environment: variables and their values.
    pub environment: Vec<(&'static str, String)>,
}

impl ExpectedRules {
    /// Those of the plugin's configuration and the runtime's environment.
    #[must_use]
    pub fn of(conf: &Conf, environment: &[(&'static str, String)]) -> Self {
        Self {
            programming: conf.programming,
            strict_capture: conf.strict_capture,
            acceptance: conf.acceptance.clone(),
            environment: environment.to_vec(),
        }
    }

    /// What the plugin decides about a pod whose network namespace, the calling thread's, has these addresses.
    ///
    /// # Errors
    /// Everything that is wrong with the pod's settings.
    pub fn decide(&self, pod: &PodFacts, there: &[IpAddr]) -> Result<Decision, InputErrors> {
        let env = |name: &'static str| {
            self.environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
        };
        pod.decide_with(base_settings(self.strict_capture, env), &of_namespace(there))
    }

    /// The same as [`options()`], for a pod with these annotations.
    #[must_use]
    pub fn options(&self, annotations: &BTreeMap<String, String>, is_foreign: bool) -> ApplyOptions {
        // The plugin has logged why the pod's names do not count.
        let (accepted, _) = self.acceptance.of_pod(annotations);
        options(self.programming, accepted, is_foreign)
    }
}

/// What programs the rules in a network namespace, how many are read there, and which of other programs' are accepted; a foreign one is
/// owned by another user namespace than ours.
#[must_use]
pub fn options(programming: Programming, accepted: AcceptedRules, is_foreign: bool) -> ApplyOptions {
    let Programming { backend, native_form } = programming;
    let backend = suitable(backend, is_foreign);
    let (most_read, patience) = (Some(ApplyOptions::MOST_READ), PATIENCE);
    ApplyOptions::default()
        .backend(backend)
        .native_form(native_form)
        .accepted(accepted)
        .most_read(most_read)
        .patience(patience)
}

/// How a pod's namespace compares with its plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Comparison {
    /// All rules, routes and addresses are as planned.
    AsPlanned,
    /// This is the first difference.
    Different(String),
    /// It has no rules of the mesh; this is the first missing one.
    NotRedirected(String),
    /// All are, but rules or routing of other programs interfere, and a repair would not change that.
    Interference(String),
    /// It is not compared: rules do not bind its runtime, of this class.
    Sandboxed(String),
    /// It cannot be determined.
    Unknown(PodProblem),
}

impl Comparison {
    /// The state that it shows.
    #[must_use]
    pub const fn state(&self) -> PodState {
        match self {
            Self::AsPlanned => PodState::Verified,
            Self::NotRedirected(_) => PodState::NotRedirected,
            Self::Different(_) => PodState::Drifted,
            Self::Interference(_) => PodState::Interference,
            Self::Sandboxed(_) => PodState::Sandboxed,
            Self::Unknown(_) => PodState::Unknown,
        }
    }
}

/// How a comparison was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// The rules were read; this was the namespace's fingerprint just before, if it has one and that was asked for. As it is not newer than the rules, a
    /// concurrent change changes the next one.
    Rules(Option<Fingerprint>),
    /// Nothing has changed since they were read.
    Fingerprint,
}

impl From<ApplyError> for PodProblem {
    fn from(error: ApplyError) -> Self {
        let is_in_force = matches!(error, ApplyError::OthersUnread { .. });
        Self::new(if is_in_force { AgentReason::Unverifiable } else { AgentReason::Unreadable }, error)
    }
}

impl From<LookupError> for PodProblem {
    fn from(unfound: LookupError) -> Self {
        let is_ambiguous = matches!(unfound, LookupError::Ambiguous { .. });
        Self::new(if is_ambiguous { AgentReason::Ambiguous } else { AgentReason::NotFound }, unfound)
    }
}

/// Compares a pod's network namespace, which is this one, with its plan. If it still has the fingerprint of a time when everything was as planned, nothing else is
/// read. Takes a few milliseconds: not for an async thread.
#[must_use]
pub fn check(
    pod: &MeshPod,
    sandbox: &MountedNetns,
    rules: &ExpectedRules,
    keys: &RandomState,
    known: Option<Fingerprint>,
) -> PodComparison {
    let checked = || {
        // It may have gone since the survey.
        let netns = sandbox.open().map_err(|error| PodProblem::new(AgentReason::NotFound, error))?;
        let outside = Outside::of_this_process();
        let inside = || {
            if known.is_some() && Fingerprint::now(keys) == known {
                let (comparison, basis) = (Comparison::AsPlanned, Basis::Fingerprint);
                return Ok(PodComparison { comparison, basis, accepted: None });
            }
            compare_here(pod, rules, outside.finds_this_foreign(), Some(keys))
        };
        netns.run(inside).map_err(|error| PodProblem::new(AgentReason::Unreadable, error))?
    };
    let unknown = |error| {
        let (comparison, basis) = (Comparison::Unknown(error), Basis::Rules(None));
        PodComparison { comparison, basis, accepted: None }
    };
    checked().unwrap_or_else(unknown)
}

/// What a comparison has shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodComparison {
    /// Its result.
    pub comparison: Comparison,
    /// How it was made.
    pub basis: Basis,
    /// What interferes because it is accepted, each in words, where rules were read.
    pub accepted: Option<Vec<String>>,
}

/// Compares the calling thread's network namespace, which must be the pod's, with the pod's plan. With `keys`, says also what a difference means for
/// traffic, and takes the namespace's fingerprint.
///
/// # Errors
/// Why it cannot be determined.
pub fn compare_here(
    pod: &MeshPod,
    rules: &ExpectedRules,
    is_foreign: bool,
    keys: Option<&RandomState>,
) -> Result<PodComparison, PodProblem> {
    let there = addresses().map_err(|error| PodProblem::new(AgentReason::Unreadable, error))?;
    if !pod.addresses.iter().all(|address| there.contains(address)) {
        return Err(PodProblem::new(
            AgentReason::NotFound,
            "its network namespace has lost the pod's addresses",
        ));
    }
    let _turn = turn_of(&pod.facts);
    let decision = rules
        .decide(&pod.facts, &there)
        .map_err(|errors| PodProblem::new(AgentReason::Unreadable, errors))?;
    let Decision::Redirect(redirect) = decision else {
        let (comparison, basis) = (Comparison::AsPlanned, Basis::Rules(keys.and_then(Fingerprint::now)));
        return Ok(PodComparison { comparison, basis, accepted: Some(Vec::new()) });
    };
    let (plan, options) = (redirect.plan(), rules.options(&pod.facts.annotations, is_foreign));
    require_room(&plan)?;
    let snapshot = Snapshot::take(&plan, &options)?;
    let basis = Basis::Rules(keys.and_then(|keys| snapshot.fingerprint(keys)));
    let (verdict, words) = if keys.is_some() {
        snapshot.verify_in_words(&plan, &options)?
    } else {
        (snapshot.verify(&plan, &options)?, None)
    };
    let Verdict { mismatch, accepted, is_redirected } = verdict;
    let comparison = mismatch.map_or(Comparison::AsPlanned, |mismatch| {
        let words = words.unwrap_or_else(|| mismatch.to_string());
        if matches!(mismatch, Mismatch::Interference(..) | Mismatch::DoesNotConverge(_)) {
            Comparison::Interference(words)
        } else if is_redirected {
            Comparison::Different(words)
        } else {
            Comparison::NotRedirected(words)
        }
    });
    let accepted = accepted.iter().map(ToString::to_string).collect();
    Ok(PodComparison { comparison, basis, accepted: Some(accepted) })
}
