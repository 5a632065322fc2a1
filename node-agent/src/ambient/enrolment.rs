//! Enrolling all pods of the node, one step after the other, as [`decision`](super::decision) has it. What a step does is behind [`Effects`].
//!
//! What is remembered only saves work: when to try again, and which pods have nothing to do with ambient mode. An enrolment that begins without it
//! examines every pod once, and ends the same.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use zds::{NetnsInode, PodState};

use super::decision::{Observed, Redirection, Service, Step, enrol, leave};
use super::pod::AmbientPod;
use crate::ambient_rules::Condition;
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
    /// Whether the rules of this redirection are in force; without one, whether any rules of ambient mode exist.
    fn rules(&mut self, pod: &AmbientPod, redirect: Option<&AmbientRedirect>) -> Condition;
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
    /// Writes the annotation, or removes it.
    ///
    /// # Errors
    /// It may be as it was.
    fn annotate(&mut self, pod: &AmbientPod, annotation: Option<Redirection>) -> Result<(), String>;
}

/// The node's pods, as far as enrolment is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Enrolled {
    /// Pods that are to be enrolled.
    pub wanted: usize,
    /// Those of them of which everything is verified.
    pub enrolled: usize,
    /// Why each other one is not, and pods that are to leave and have not, by UID.
    pub pending: BTreeMap<String, String>,
}

impl Enrolled {
    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        format!("{} of {} ambient pods enrolled, verified", self.enrolled, self.wanted)
    }
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
    fn over(failure: Option<&Self>, seen: Condition, now: Duration) -> Condition {
        match failure {
            Some(failure) if failure.due > now => Condition::Waits(failure.why.clone()),
            Some(_) | None => seen,
        }
    }
}

impl Enrolment {
    /// Brings all running pods of the node as far as they get at this time, on a clock that only advances.
    pub fn reconcile(&mut self, now: Duration, pods: &[AmbientPod], effects: &mut impl Effects) -> Enrolled {
        self.forget_others(pods, effects);
        let mut enrolled = Enrolled::default();
        for pod in pods {
            enrolled.wanted += usize::from(pod.wanted.is_ok());
            match self.advance(now, pod, effects) {
                Ok(()) => enrolled.enrolled += usize::from(pod.wanted.is_ok()),
                Err(why) => drop(enrolled.pending.insert(pod.workload.uid().to_owned(), why)),
            }
        }
        enrolled
    }

    /// When the next try of anything is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Duration> {
        let due = |memory: &Memory| {
            let failures = [&memory.rules, &memory.probes, &memory.annotation];
            let retries = failures.into_iter().flatten().map(|failure| failure.due);
            retries.chain(memory.unserved.map(|since| since + REPLACEMENT)).min()
        };
        self.memory.values().filter_map(due).min()
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

    /// Takes steps until one has to wait; with the reason.
    fn advance(&mut self, now: Duration, pod: &AmbientPod, effects: &mut impl Effects) -> Result<(), String> {
        let memory = self.memory.entry(pod.workload.uid().to_owned()).or_default();
        // A list that still differs after a while shows what another client wrote.
        let is_awaited = |(annotation, at): &(Option<Redirection>, Duration)| {
            *annotation != pod.annotation && now.saturating_sub(*at) < LONGEST_PAUSE
        };
        memory.annotated = memory.annotated.filter(is_awaited);
        if pod.wanted.is_ok() || pod.annotation.is_some() || effects.ztunnel(pod).is_some() {
            memory.is_clean = false;
        }
        if memory.is_clean {
            return Ok(());
        }
        for _ in 0..MOST_STEPS {
            let netns = effects.find(pod);
            let observed = observe(now, pod, &netns, memory, effects);
            let step = if pod.wanted.is_ok() { enrol(&observed) } else { leave(&observed) };
            match (step, netns) {
                (Step::Done, _) => {
                    memory.is_clean = pod.wanted.is_err();
                    return Ok(());
                }
                (Step::Wait(why), _) => return Err(why),
                (Step::ApplyRules | Step::RemoveRules, _) => {
                    let done = effects.change_rules(pod, pod.wanted.as_ref().ok());
                    Failure::note(&mut memory.rules, done, now);
                }
                (Step::AddProbes | Step::RemoveProbes, _) => {
                    Failure::note(&mut memory.probes, change_probes(pod, effects), now);
                }
                (Step::AnnounceToZtunnel, Ok(netns)) => effects.announce(pod, netns),
                // Rules that hold, or do not, were found in a namespace.
                (Step::AnnounceToZtunnel, Err(why)) => return Err(why),
                (Step::Withdraw, _) => effects.withdraw(pod.workload.uid()),
                (Step::Annotate(annotation), _) => {
                    if let Some(failure) = memory.annotation.as_ref().filter(|failure| failure.due > now) {
                        return Err(failure.why.clone());
                    }
                    let done = effects.annotate(pod, annotation);
                    if done.is_ok() {
                        memory.annotated = Some((annotation, now));
                    }
                    Failure::note(&mut memory.annotation, done, now);
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
) -> Observed {
    let rules = match netns {
        Ok(_) => effects.rules(pod, pod.wanted.as_ref().ok()),
        Err(why) => Condition::Unknown(why.clone()),
    };
    let announced = effects.ztunnel(pod);
    // A pod that leaves must be withdrawn from wherever it is served.
    let announced = announced.filter(|(announced, _)| pod.wanted.is_err() || netns.as_ref() == Ok(announced));
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
        let is_member =
            if pod.wanted.is_ok() { there.all(|is_there| is_there) } else { there.any(|is_there| is_there) };
        if is_member { Condition::Holds } else { Condition::Lacks }
    };
    let probes = effects.probes().map_or_else(Condition::Unknown, has);
    Observed {
        rules: Failure::over(memory.rules.as_ref(), rules, now),
        ztunnel,
        probes: Failure::over(memory.probes.as_ref(), probes, now),
        annotation: memory.annotated.map_or(pod.annotation, |(annotation, _)| annotation),
    }
}

fn change_probes(pod: &AmbientPod, effects: &mut impl Effects) -> Result<(), String> {
    let mut probes = effects.probes()?;
    if pod.wanted.is_ok() {
        probes.extend(&pod.addresses);
    } else {
        probes.retain(|address| !pod.addresses.contains(address));
    }
    effects.set_probes(&probes)
}

#[cfg(test)]
mod tests;
