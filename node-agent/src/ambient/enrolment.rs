//! Enrolling all pods of the node, one step after the other, as [`decision`](super::decision) has it. What a step does is behind [`Effects`].
//!
//! What is remembered only saves work: when to try again, and which pods have nothing to do with ambient mode. An enrolment that begins without it
//! examines every pod once, and ends the same.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use zds::{NetnsInode, PodState};

use super::decision::{EnrolmentStep, PodAsIs, Redirection, Service, enrol, leave, stay};
use super::pod::AmbientPod;
use crate::ambient_rules::RulesCheck;
use redirect_core::AmbientRedirect;

/// How long ztunnel may be away, as when it is replaced, before pods count as not enrolled.
pub const REPLACEMENT: Duration = Duration::from_secs(5);
/// The first pause after a failure; it doubles.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The most steps of a pod at once: more than any pod needs.
const MOST_STEPS: usize = 16;

/// What enrolment does on the node and at the API server.
pub trait Effects {
    /// The pod's network namespace: one that holds all its addresses, and a process of the pod.
    ///
    /// # Errors
    /// It cannot be determined, and why.
    fn find(&mut self, pod: &AmbientPod) -> Result<NetnsInode, String>;
    /// These pods are about to be enrolled, one after the other. What waits for the kernel can be done for all of them at once: the steps find it done, or do
    /// it.
    fn prepare(&mut self, pods: &[&AmbientPod]) {
        let _ = pods;
    }
    /// Whether the rules of this redirection are in force; without one, whether any rules of ambient mode exist.
    fn rules(&mut self, pod: &AmbientPod, redirect: Option<&AmbientRedirect>) -> RulesCheck;
    /// Puts the rules of this redirection in force; without one, removes all.
    ///
    /// # Errors
    /// Why they are not.
    fn change_rules(&mut self, pod: &AmbientPod, redirect: Option<&AmbientRedirect>) -> Result<(), String>;
    /// The network namespace that ztunnel received for a pod, and the pod's state there.
    fn ztunnel(&self, pod: &AmbientPod) -> Option<(NetnsInode, PodState)>;
    /// Passes a pod to ztunnel.
    fn announce(&mut self, pod: &AmbientPod, netns: NetnsInode);
    /// Withdraws a pod, by its UID, from ztunnel.
    fn withdraw(&mut self, uid: &str);
    /// The addresses of probes.
    ///
    /// # Errors
    /// They cannot be read.
    fn probes(&mut self) -> Result<BTreeSet<IpAddr>, String>;
    /// Makes these the addresses of probes.
    ///
    /// # Errors
    /// They are as they were.
    fn set_probes(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<(), String>;
    /// Writes the annotation, or removes it, soon. The list of pods shows it when that is done; if it fails,
    /// [`Enrolment::annotation_failed`] is to learn it.
    fn annotate(&mut self, pod: &AmbientPod, annotation: Option<Redirection>);
}

/// The node's pods, as far as enrolment is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Enrolled {
    /// Pods that are to be enrolled.
    pub wanted: usize,
    /// Those of them of which everything is verified.
    pub enrolled: usize,
    /// By UID: why each other one is not, why an annotation is not written, and why a pod that is to leave has not.
    pub pending: BTreeMap<String, String>,
}

/// Enrolment, with what it remembers of each pod, by UID.
#[derive(Debug, Default)]
pub struct Enrolment {
    memory: BTreeMap<String, Memory>,
}

/// What to wait for.
#[derive(Debug, Default)]
struct Memory {
    rules: Option<Failure>,
    probes: Option<Failure>,
    annotation: Option<Failure>,
    /// Since when ztunnel has not acknowledged it.
    unserved: Option<Duration>,
    /// What was written, and when, if the list of pods does not show it yet.
    annotated: Option<(Option<Redirection>, Duration)>,
    /// It is not to be enrolled, and nothing of ambient mode was left of it when that was examined.
    is_clean: bool,
    /// Whether it counts as one that is to be enrolled.
    counts: bool,
    /// Whether it was enrolled when it was examined last.
    is_enrolled: bool,
    /// What it waited for then; none before that.
    outcome: Option<Result<(), String>>,
}

#[derive(Debug)]
struct Failure {
    why: String,
    due: Duration,
    pause: Duration,
}

impl Failure {
    /// Notes how a try ended.
    fn note(before: &mut Option<Self>, done: Result<(), String>, now: Duration) {
        *before = done.err().map(|why| {
            let pause =
                before.as_ref().map_or(SHORTEST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
            Self { why, due: now + pause, pause }
        });
    }

    /// A condition, unless the next try is not due.
    fn over(failure: Option<&Self>, seen: RulesCheck, now: Duration) -> RulesCheck {
        match failure {
            Some(failure) if failure.due > now => Err(failure.why.clone()),
            Some(_) | None => seen,
        }
    }
}

impl Enrolment {
    /// Brings some of all pods of the node as far as they get at this time, on a clock that only advances: those that this selects, new ones, and those
    /// that are not as wanted.
    pub fn reconcile(
        &mut self,
        now: Duration,
        pods: &[AmbientPod],
        selects: impl Fn(&str) -> bool,
        effects: &mut impl Effects,
    ) -> Enrolled {
        self.forget_others(pods, effects);
        let is_due = |pod: &&AmbientPod| {
            let memory = self.memory.get(pod.workload.uid());
            memory.is_none_or(|memory| memory.outcome != Some(Ok(()))) || selects(pod.workload.uid())
        };
        let due: Vec<&AmbientPod> = pods.iter().filter(is_due).collect();
        let has_failed = |pod: &&AmbientPod| {
            let memory = self.memory.get(pod.workload.uid());
            memory.is_some_and(|memory| memory.rules.is_some() || memory.probes.is_some())
        };
        let unhindered: Vec<&AmbientPod> = due.iter().copied().filter(|pod| !has_failed(pod)).collect();
        effects.prepare(&unhindered);
        for pod in due {
            let memory = self.memory.entry(pod.workload.uid().to_owned()).or_default();
            let outcome = memory.advance(now, pod, effects);
            memory.outcome = Some(outcome);
        }
        self.enrolled()
    }

    /// As it was when each pod was examined last.
    #[must_use]
    pub fn enrolled(&self) -> Enrolled {
        let mut enrolled = Enrolled::default();
        for (uid, memory) in &self.memory {
            enrolled.wanted += usize::from(memory.counts);
            enrolled.enrolled += usize::from(memory.counts && memory.is_enrolled);
            if let Some(Err(why)) = &memory.outcome {
                enrolled.pending.insert(uid.clone(), why.clone());
            }
        }
        enrolled
    }

    /// Whether this pod's traffic goes through ztunnel, verified when it was examined last; otherwise why not, if that is known.
    ///
    /// # Errors
    /// It is not.
    pub fn is_enrolled(&self, uid: &str) -> Result<(), Option<String>> {
        match self.memory.get(uid) {
            Some(memory) if memory.is_enrolled => Ok(()),
            Some(memory) => Err(memory.outcome.clone().and_then(Result::err)),
            None => Err(None),
        }
    }

    /// An annotation could not be written, because of this.
    pub fn annotation_failed(&mut self, now: Duration, uid: &str, why: String) {
        if let Some(memory) = self.memory.get_mut(uid) {
            memory.annotated = None;
            Failure::note(&mut memory.annotation, Err(why), now);
        }
    }

    /// When the next try of anything is due, after this moment.
    #[must_use]
    pub fn next_due(&self, now: Duration) -> Option<Duration> {
        self.memory.values().flat_map(Memory::due).filter(|due| *due > now).min()
    }

    /// What ended leaves nothing behind: ztunnel drops it, and its addresses may soon be another pod's.
    fn forget_others(&mut self, pods: &[AmbientPod], effects: &mut impl Effects) {
        let uids: BTreeSet<&str> = pods.iter().map(|pod| pod.workload.uid()).collect();
        self.memory.retain(|uid, _| {
            let stays = uids.contains(uid.as_str());
            if !stays {
                effects.withdraw(uid);
            }
            stays
        });
        let of_pods: BTreeSet<IpAddr> = pods.iter().flat_map(|pod| pod.addresses.iter().copied()).collect();
        if let Ok(probes) = effects.probes()
            && !probes.is_subset(&of_pods)
        {
            // If that fails, the next pass does it.
            let _ = effects.set_probes(&probes.intersection(&of_pods).copied().collect());
        }
    }
}

impl Memory {
    /// When tries are due.
    fn due(&self) -> impl Iterator<Item = Duration> {
        let failures = [&self.rules, &self.probes, &self.annotation];
        let retries = failures.into_iter().flatten().map(|failure| failure.due);
        retries.chain(self.unserved.map(|since| since + REPLACEMENT))
    }

    /// Takes steps until one has to wait; with the reason.
    fn advance(&mut self, now: Duration, pod: &AmbientPod, effects: &mut impl Effects) -> Result<(), String> {
        (self.counts, self.is_enrolled) = (pod.is_wanted() && !pod.is_ending, false);
        self.expect_annotation(now, pod);
        let has_traces = pod.annotation.is_some() || effects.ztunnel(pod).is_some();
        self.is_clean &= !pod.is_wanted() && !has_traces;
        if self.is_clean {
            return Ok(());
        }
        let netns = effects.find(pod);
        if netns.is_err() && (pod.is_ending || !(pod.is_wanted() || has_traces)) {
            // Its namespace may be gone before it is, or it never had to do with ambient mode.
            return Ok(());
        }
        self.take_steps(now, pod, effects)
    }

    /// Notes what the list of pods shows of the annotation that was written.
    fn expect_annotation(&mut self, now: Duration, pod: &AmbientPod) {
        let Some((annotation, at)) = self.annotated else { return };
        if annotation == pod.annotation {
            (self.annotated, self.annotation) = (None, None);
        } else if now.saturating_sub(at) >= LONGEST_PAUSE {
            // A list that still differs after a while shows what another client wrote.
            self.annotated = None;
        }
    }

    fn take_steps(
        &mut self,
        now: Duration,
        pod: &AmbientPod,
        effects: &mut impl Effects,
    ) -> Result<(), String> {
        for _ in 0..MOST_STEPS {
            let netns = effects.find(pod);
            let observed = observe(now, pod, &netns, self, effects);
            self.is_enrolled = observed.is_enrolled();
            let step = match &pod.wanted {
                Ok(_) => enrol(&observed),
                Err(why) if why.is_obstacle() => stay(&observed, &why.to_string()),
                Err(_) => leave(&observed),
            };
            match (step, netns) {
                (EnrolmentStep::Done, _) => {
                    self.is_clean = !pod.is_wanted();
                    return Ok(());
                }
                (EnrolmentStep::Wait(why), _) => return Err(why),
                (EnrolmentStep::ApplyRules | EnrolmentStep::RemoveRules, _) => {
                    let done = effects.change_rules(pod, pod.wanted.as_ref().ok());
                    Failure::note(&mut self.rules, done, now);
                }
                (EnrolmentStep::AddProbes | EnrolmentStep::RemoveProbes, _) => {
                    Failure::note(&mut self.probes, change_probes(pod, effects), now);
                }
                (EnrolmentStep::AnnounceToZtunnel, Ok(netns)) => effects.announce(pod, netns),
                // Rules that hold, or do not, were found in a namespace.
                (EnrolmentStep::AnnounceToZtunnel, Err(why)) => return Err(why),
                (EnrolmentStep::Withdraw, _) => effects.withdraw(pod.workload.uid()),
                // The pod is about to go, and its annotation with it.
                (EnrolmentStep::Annotate(annotation), _) if pod.is_ending => {
                    self.annotated = Some((annotation, now));
                }
                (EnrolmentStep::Annotate(annotation), _) => {
                    if let Some(failure) = self.annotation.as_ref().filter(|failure| failure.due > now) {
                        return Err(failure.why.clone());
                    }
                    effects.annotate(pod, annotation);
                    self.annotated = Some((annotation, now));
                }
            }
        }
        Err("the pod's state keeps changing".to_owned())
    }
}

/// The pod as it is.
fn observe(
    now: Duration,
    pod: &AmbientPod,
    netns: &Result<NetnsInode, String>,
    memory: &mut Memory,
    effects: &mut impl Effects,
) -> PodAsIs {
    let rules = match netns {
        Ok(_) => effects.rules(pod, pod.wanted.as_ref().ok()),
        Err(why) => Err(why.clone()),
    };
    let announced = effects.ztunnel(pod);
    // A pod that leaves must be withdrawn from wherever it is served.
    let announced = announced.filter(|(announced, _)| !pod.is_wanted() || netns.as_ref() == Ok(announced));
    let ztunnel = match announced {
        None => Service::Unannounced,
        Some((_, PodState::Acknowledged)) => Service::Acknowledged,
        Some((_, state)) => {
            let since = *memory.unserved.get_or_insert(now);
            Service::Announced {
                why: state.to_string(),
                is_overdue: now.saturating_sub(since) >= REPLACEMENT,
            }
        }
    };
    if ztunnel == Service::Acknowledged || ztunnel == Service::Unannounced {
        memory.unserved = None;
    }
    let has = |probes: BTreeSet<IpAddr>| {
        let mut there = pod.addresses.iter().map(|address| probes.contains(address));
        if pod.is_wanted() { there.all(|is_there| is_there) } else { there.any(|is_there| is_there) }
    };
    let probes = effects.probes().map(has);
    PodAsIs {
        rules: Failure::over(memory.rules.as_ref(), rules, now),
        ztunnel,
        probes: Failure::over(memory.probes.as_ref(), probes, now),
        annotation: memory.annotated.map_or(pod.annotation, |(annotation, _)| annotation),
    }
}

fn change_probes(pod: &AmbientPod, effects: &mut impl Effects) -> Result<(), String> {
    let mut probes = effects.probes()?;
    if pod.is_wanted() {
        probes.extend(&pod.addresses);
    } else {
        probes.retain(|address| !pod.addresses.contains(address));
    }
    effects.set_probes(&probes)
}

#[cfg(test)]
mod tests;
