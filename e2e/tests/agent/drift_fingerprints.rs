//! What the drift watch remembers of pods that were as planned, with fingerprints of real network namespaces. Needs root.

use std::collections::BTreeSet;
use std::sync::Arc;

use cni_core::pod_source::PodName;
use cni_core::selection::{Acceptance, Programming};
use install_cni::pods::check::{Basis, Comparison, ExpectedRules, MeshPod};
use install_cni::pods::drift::fingerprints::{Fingerprints, MOST_UNREAD};
use netns_apply::Fingerprint;
use netns_apply::netns::Netns;
use redirect_core::pod::PodFacts;
use test_support::netns::{Families, Namespace};

fn pod(annotation: &str) -> Arc<MeshPod> {
    let name = PodName { namespace: "shop".into(), name: "web".into() };
    let facts = PodFacts::sidecar([("traffic.sidecar.istio.io/excludeOutboundPorts", annotation)]);
    Arc::new(MeshPod { name, uid: "u".into(), addresses: Vec::new(), runtime_class: None, facts })
}

fn rules(strict_capture: bool) -> Arc<ExpectedRules> {
    let programming = Programming::new(false, false);
    let (acceptance, environment) = (Acceptance::default(), Vec::new());
    Arc::new(ExpectedRules { programming, strict_capture, acceptance, environment })
}

#[test]
fn a_fingerprint_counts_for_one_plan_in_one_namespace_and_not_for_ever() {
    let namespace = Namespace::empty(Families::V4).expect("a namespace");
    let here = Netns::open(namespace.path()).expect("a namespace").id();
    let elsewhere = Netns::current().expect("a namespace").id();
    let mut known = Fingerprints::default();
    let taken = namespace.enter(|| Fingerprint::now(&known.keys())).expect("enters");
    let taken = taken.expect("a fingerprint");
    let (web, all) = (pod("1"), rules(false));
    assert_eq!(known.of(&web, &all), None, "not checked yet");
    known.note(&web, &all, here, &Comparison::AsPlanned, Basis::Rules(Some(taken)));
    let good = known.of(&web, &all).expect("it was as planned");
    assert_eq!((good.in_namespace(here), good.in_namespace(elsewhere)), (Some(taken), None));
    assert_eq!(known.of(&pod("2"), &all), None);
    assert_eq!(known.of(&web, &rules(true)), None);
    for _ in 0..MOST_UNREAD {
        assert_eq!(known.of(&web, &all), Some(good));
        known.note(&web, &all, here, &Comparison::AsPlanned, Basis::Fingerprint);
    }
    assert_eq!(known.of(&web, &all), None, "it is time to read them");
    known.note(&web, &all, here, &Comparison::AsPlanned, Basis::Rules(Some(taken)));
    assert_eq!(known.of(&web, &all), Some(good));
    known.note(&web, &all, here, &Comparison::Different("x".into()), Basis::Rules(Some(taken)));
    assert_eq!(known.of(&web, &all), None, "it was not as planned");
    known.note(&web, &all, here, &Comparison::AsPlanned, Basis::Rules(None));
    assert_eq!(known.of(&web, &all), None, "it has none");
    known.note(&web, &all, here, &Comparison::AsPlanned, Basis::Rules(Some(taken)));
    known.keep(&BTreeSet::from(["another"]));
    assert_eq!(known.of(&web, &all), None, "it is gone");
}
