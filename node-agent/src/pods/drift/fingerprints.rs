//! Which pods were as planned, and the fingerprints of their network namespaces then. Comparing a fingerprint takes a tenth of the time that
//! reading its rules takes.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::RandomState;
use std::sync::Arc;

use netns_apply::Fingerprint;
use netns_apply::netns::NetnsId;

use crate::pods::check::{Basis, Comparison, ExpectedRules, MeshPod};

/// How many checks in a row may rely on a fingerprint. The next one finds what a fingerprint does not show (packets that fill another program's set).
pub const MOST_UNREAD: u32 = 11;

/// The fingerprints of the namespaces that were as planned, by the UIDs of their pods.
#[derive(Debug, Default)]
pub struct Fingerprints {
    keys: Arc<RandomState>,
    known: BTreeMap<String, CachedFingerprint>,
}

#[derive(Debug)]
struct CachedFingerprint {
    good: KnownGood,
    pod: Arc<MeshPod>,
    rules: Arc<ExpectedRules>,
    /// Checks since its rules were read.
    unread: u32,
}

/// What is known of a pod that was as planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownGood {
    namespace: NetnsId,
    fingerprint: Fingerprint,
}

impl KnownGood {
    /// The fingerprint that this namespace must still have; none if the pod was in another one.
    #[must_use]
    pub fn in_namespace(self, namespace: NetnsId) -> Option<Fingerprint> {
        (self.namespace == namespace).then_some(self.fingerprint)
    }
}

impl Fingerprints {
    /// What fingerprints are taken with.
    #[must_use]
    pub fn keys(&self) -> Arc<RandomState> {
        self.keys.clone()
    }

    /// Where this plan was in force for a pod. None if the rules must be read.
    #[must_use]
    pub fn of(&self, pod: &MeshPod, rules: &ExpectedRules) -> Option<KnownGood> {
        let known = self.known.get(&pod.uid)?;
        let is_the_same = *known.pod == *pod && *known.rules == *rules;
        (is_the_same && known.unread < MOST_UNREAD).then_some(known.good)
    }

    /// Takes note of a check.
    pub fn note(
        &mut self,
        pod: &Arc<MeshPod>,
        rules: &Arc<ExpectedRules>,
        namespace: NetnsId,
        seen: &Comparison,
        basis: Basis,
    ) {
        match basis {
            Basis::Fingerprint => {
                if let Some(known) = self.known.get_mut(&pod.uid) {
                    known.unread += 1;
                }
            }
            Basis::Rules(Some(fingerprint)) if *seen == Comparison::AsPlanned => {
                let (pod, rules) = (pod.clone(), rules.clone());
                let good = KnownGood { namespace, fingerprint };
                let known = CachedFingerprint { good, rules, unread: 0, pod: pod.clone() };
                self.known.insert(pod.uid.clone(), known);
            }
            Basis::Rules(_) => drop(self.known.remove(&pod.uid)),
        }
    }

    /// Forgets all other pods.
    pub fn keep(&mut self, uids: &BTreeSet<&str>) {
        self.known.retain(|uid, _| uids.contains(uid.as_str()));
    }
}
