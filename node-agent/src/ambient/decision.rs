//! The next step of a pod's enrolment, from the pod's settings and its state. Nothing is remembered, so an agent that was killed at any step
//! goes on at that step.
//!
//! Enrolling: rules, then ztunnel, then probes, then the annotation. The other way round a pod would lose connections: without rules nothing
//! reaches ztunnel, with rules and no ztunnel nothing reaches the pod. Leaving: probes, then rules, then ztunnel.

use cni_core::enablement::REDIRECTION_ANNOTATION;

use crate::ambient_rules::RulesCheck;

/// What the annotation says about the pod. Whatever has another value counts as none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Redirection {
    /// It is enrolled: rules, ztunnel and probes are verified.
    Enabled,
    /// The pod is about to be enrolled, or to leave, and ztunnel's answer is late or a step failed.
    Pending,
}

impl Redirection {
    /// The annotation's key.
    pub const KEY: &str = REDIRECTION_ANNOTATION;

    /// Its value.
    #[must_use]
    pub const fn value(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Pending => "pending",
        }
    }

    /// What a value means.
    #[must_use]
    pub fn of(value: &str) -> Option<Self> {
        [Self::Enabled, Self::Pending].into_iter().find(|one| one.value() == value)
    }
}

/// ztunnel's part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Service {
    /// The newest ztunnel acknowledged the pod in its network namespace.
    Acknowledged,
    /// ztunnel received it, and has not acknowledged it; with the reason. It is overdue after a time in which a ztunnel can be replaced.
    Announced {
        /// Why it has not.
        why: String,
        /// Whether it is overdue.
        is_overdue: bool,
    },
    /// ztunnel did not receive it.
    Unannounced,
}

/// A pod as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodAsIs {
    /// Whether the rules in its network namespace are as planned. For a pod that is to leave: whether it has any.
    pub rules: RulesCheck,
    /// ztunnel's part.
    pub ztunnel: Service,
    /// Whether all its addresses are among those of probes. For a pod that is to leave: whether any is.
    pub probes: RulesCheck,
    /// What its annotation says.
    pub annotation: Option<Redirection>,
}

impl PodAsIs {
    /// Whether the pod's traffic goes through ztunnel, verified. The annotation follows.
    #[must_use]
    pub fn is_enrolled(&self) -> bool {
        let Self { rules, ztunnel, probes, .. } = self;
        (rules, ztunnel, probes) == (&Ok(true), &Service::Acknowledged, &Ok(true))
    }
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnrolmentStep {
    /// Put the rules in force, and verify them.
    ApplyRules,
    /// Pass the pod to ztunnel.
    AnnounceToZtunnel,
    /// Add its addresses to those of probes.
    AddProbes,
    /// Remove its addresses from those of probes.
    RemoveProbes,
    /// Remove the rules.
    RemoveRules,
    /// Withdraw the pod from ztunnel.
    Withdraw,
    /// Write the annotation, or remove it.
    Annotate(Option<Redirection>),
    /// Wait for a change, because of this.
    Wait(String),
    /// All is as wanted.
    Done,
}

/// The next step of a pod that is to be enrolled.
///
/// What can be repaired at once is repaired first: that takes milliseconds. If that fails, or takes long, the annotation is withdrawn.
#[must_use]
pub fn enrol(pod: &PodAsIs) -> EnrolmentStep {
    match (&pod.rules, &pod.ztunnel, &pod.probes) {
        (Ok(false), _, _) => EnrolmentStep::ApplyRules,
        (Err(why), _, _) => pending(pod, why),
        (Ok(true), Service::Unannounced, _) => EnrolmentStep::AnnounceToZtunnel,
        (Ok(true), Service::Announced { why, is_overdue }, _) => {
            // An answer usually comes in milliseconds, so one change of the pod is enough.
            if *is_overdue { pending(pod, why) } else { EnrolmentStep::Wait(why.clone()) }
        }
        (Ok(true), Service::Acknowledged, Ok(false)) => EnrolmentStep::AddProbes,
        (Ok(true), Service::Acknowledged, Err(why)) => pending(pod, why),
        (Ok(true), Service::Acknowledged, Ok(true)) => {
            annotated(pod, Some(Redirection::Enabled)).unwrap_or(EnrolmentStep::Done)
        }
    }
}

/// The next step of a pod that runs and is not to be enrolled. What cannot be removed stops the rest: rules without ztunnel would take the pod off the
/// network.
#[must_use]
pub fn leave(pod: &PodAsIs) -> EnrolmentStep {
    if pod.annotation == Some(Redirection::Enabled) {
        return EnrolmentStep::Annotate(Some(Redirection::Pending));
    }
    match (&pod.probes, &pod.rules, &pod.ztunnel) {
        (Ok(true), _, _) => EnrolmentStep::RemoveProbes,
        (Err(why), _, _) => EnrolmentStep::Wait(why.clone()),
        (Ok(false), Ok(true), _) => EnrolmentStep::RemoveRules,
        (Ok(false), Err(why), _) => EnrolmentStep::Wait(why.clone()),
        (Ok(false), Ok(false), Service::Acknowledged | Service::Announced { .. }) => EnrolmentStep::Withdraw,
        (Ok(false), Ok(false), Service::Unannounced) => annotated(pod, None).unwrap_or(EnrolmentStep::Done),
    }
}

/// The next step of a pod that cannot be enrolled, because of this, and that may be: what it has stays.
#[must_use]
pub fn stay(pod: &PodAsIs, why: &str) -> EnrolmentStep {
    if pod.annotation == Some(Redirection::Enabled) {
        pending(pod, why)
    } else {
        EnrolmentStep::Wait(why.to_owned())
    }
}

/// The annotation becomes pending; then the step is to wait.
fn pending(pod: &PodAsIs, why: &str) -> EnrolmentStep {
    annotated(pod, Some(Redirection::Pending)).unwrap_or_else(|| EnrolmentStep::Wait(why.to_owned()))
}

/// The step that makes the annotation this one, if it is not.
fn annotated(pod: &PodAsIs, wanted: Option<Redirection>) -> Option<EnrolmentStep> {
    (pod.annotation != wanted).then_some(EnrolmentStep::Annotate(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn condition() -> impl Strategy<Value = RulesCheck> {
        prop_oneof![Just(Ok(true)), Just(Ok(false)), Just(Err("it failed, or cannot be read".into()))]
    }

    fn service() -> impl Strategy<Value = Service> {
        prop_oneof![
            Just(Service::Acknowledged),
            any::<bool>().prop_map(|is_overdue| Service::Announced { why: "no answer".into(), is_overdue }),
            Just(Service::Unannounced),
        ]
    }

    fn observed() -> impl Strategy<Value = PodAsIs> {
        let annotation =
            prop::option::of(prop_oneof![Just(Redirection::Enabled), Just(Redirection::Pending)]);
        (condition(), service(), condition(), annotation)
            .prop_map(|(rules, ztunnel, probes, annotation)| PodAsIs { rules, ztunnel, probes, annotation })
    }

    /// What a step makes of the pod, if it succeeds or, `fails`, does not; and what waiting brings.
    fn after(mut pod: PodAsIs, step: &EnrolmentStep, fails: bool) -> PodAsIs {
        let done = |holds| if fails { Err("it failed".into()) } else { Ok(holds) };
        match step {
            EnrolmentStep::ApplyRules => pod.rules = done(true),
            EnrolmentStep::RemoveRules => pod.rules = done(false),
            EnrolmentStep::AddProbes => pod.probes = done(true),
            EnrolmentStep::RemoveProbes => pod.probes = done(false),
            EnrolmentStep::AnnounceToZtunnel => {
                pod.ztunnel = Service::Announced { why: "no answer".into(), is_overdue: false }
            }
            EnrolmentStep::Withdraw => pod.ztunnel = Service::Unannounced,
            EnrolmentStep::Annotate(annotation) if !fails => pod.annotation = *annotation,
            EnrolmentStep::Annotate(_) | EnrolmentStep::Done => {}
            EnrolmentStep::Wait(_) => {
                // The next try is due, and shows how it is.
                for part in [&mut pod.rules, &mut pod.probes] {
                    if part.is_err() {
                        *part = Ok(fails);
                    }
                }
                if matches!(pod.ztunnel, Service::Announced { .. }) {
                    pod.ztunnel = match fails {
                        true => Service::Announced { why: "refused".into(), is_overdue: true },
                        false => Service::Acknowledged,
                    };
                }
            }
        }
        pod
    }

    proptest! {
        #[test]
        fn enabled_is_written_only_of_enrolled_pods(pod in observed()) {
            for step in [enrol(&pod), leave(&pod), stay(&pod, "it is sandboxed")] {
                if step == EnrolmentStep::Annotate(Some(Redirection::Enabled)) {
                    prop_assert!(pod.is_enrolled(), "{pod:?}");
                }
            }
            prop_assert_ne!(leave(&pod), EnrolmentStep::Annotate(Some(Redirection::Enabled)));
        }

        #[test]
        fn enabled_does_not_stay_where_something_is_missing(mut pod in observed()) {
            pod.annotation = Some(Redirection::Enabled);
            prop_assert_eq!(leave(&pod), EnrolmentStep::Annotate(Some(Redirection::Pending)));
            // It is repaired, withdrawn, or waits for a ztunnel that is being replaced.
            let step = enrol(&pod);
            let repairs = [
                EnrolmentStep::ApplyRules,
                EnrolmentStep::AnnounceToZtunnel,
                EnrolmentStep::AddProbes,
                EnrolmentStep::Annotate(Some(Redirection::Pending)),
            ];
            let is_replaced = matches!(pod.ztunnel, Service::Announced { is_overdue: false, .. });
            let is_right = if pod.is_enrolled() {
                step == EnrolmentStep::Done
            } else {
                repairs.contains(&step) || (matches!(step, EnrolmentStep::Wait(_)) && is_replaced)
            };
            prop_assert!(is_right, "{pod:?}: {step:?}");
        }

        #[test]
        fn whatever_failed_before_all_ends_as_wanted(
            mut pod in observed(),
            failures in prop::collection::vec(any::<bool>(), 0..20),
            is_wanted in any::<bool>(),
        ) {
            let next = if is_wanted { enrol } else { leave };
            for fails in failures {
                let step = next(&pod);
                pod = after(pod, &step, fails);
            }
            let mut steps = Vec::new();
            while steps.last() != Some(&EnrolmentStep::Done) {
                steps.push(next(&pod));
                prop_assert!(steps.len() < 12, "it never ends: {steps:?}");
                pod = after(pod, steps.last().expect("one"), false);
            }
            let gone = PodAsIs {
                rules: Ok(false),
                ztunnel: Service::Unannounced,
                probes: Ok(false),
                annotation: None,
            };
            let is_as_wanted = if is_wanted { pod.is_enrolled() } else { pod == gone };
            prop_assert!(is_as_wanted, "{pod:?} after {steps:?}");
            prop_assert_eq!(pod.annotation, is_wanted.then_some(Redirection::Enabled));
        }

        #[test]
        fn no_step_takes_a_pod_off_the_network(pod in observed()) {
            let step = leave(&pod);
            prop_assert!(step != EnrolmentStep::Withdraw || pod.rules == Ok(false));
            prop_assert!(step != EnrolmentStep::RemoveRules || pod.probes == Ok(false));
            if enrol(&pod) == EnrolmentStep::AddProbes {
                prop_assert_eq!((&pod.rules, &pod.ztunnel), (&Ok(true), &Service::Acknowledged));
            }
        }
    }

    #[test]
    fn a_new_pod_is_enrolled_in_order() {
        let mut pod =
            PodAsIs { rules: Ok(false), ztunnel: Service::Unannounced, probes: Ok(false), annotation: None };
        let mut steps = Vec::new();
        loop {
            let step = enrol(&pod);
            pod = after(pod, &step, false);
            steps.push(step);
            if steps.last() == Some(&EnrolmentStep::Done) {
                break;
            }
        }
        let waiting = EnrolmentStep::Wait("no answer".into());
        let enabled = Some(Redirection::Enabled);
        assert_eq!(
            steps,
            [
                EnrolmentStep::ApplyRules,
                EnrolmentStep::AnnounceToZtunnel,
                waiting,
                EnrolmentStep::AddProbes,
                EnrolmentStep::Annotate(enabled),
                EnrolmentStep::Done
            ]
        );
    }

    #[test]
    fn after_a_reboot_an_annotation_proves_nothing() {
        let enabled = Some(Redirection::Enabled);
        let mut pod = PodAsIs {
            rules: Err("no network namespace has the pod's addresses".into()),
            ztunnel: Service::Unannounced,
            probes: Ok(false),
            annotation: enabled,
        };
        assert_eq!(enrol(&pod), EnrolmentStep::Annotate(Some(Redirection::Pending)));
        pod.rules = Ok(false);
        assert_eq!(enrol(&pod), EnrolmentStep::ApplyRules);
        assert_eq!(Redirection::of("enabled"), enabled);
        assert_eq!(Redirection::of("Enabled"), None);
    }
}
