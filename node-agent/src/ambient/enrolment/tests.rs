//! Pods that come, go, fail and change in any order, with an agent that is killed now and then, in a world of memory.

use super::*;
use crate::ambient::pod::NotEnrolled;
use cni_core::enablement::NotAmbient;
use cni_core::pod_source::PodName;
use proptest::prelude::*;
use redirect_core::Families;
use redirect_core::accepted::AcceptedRules;
use zds::ZdsWorkload;

/// A node, its ztunnel, and the API server.
#[derive(Debug, Default)]
struct World {
    pods: BTreeMap<String, Pod>,
    probes: BTreeSet<IpAddr>,
    /// What ztunnel received, and its answers.
    announced: BTreeMap<String, (NetnsInode, PodState)>,
    /// What fails: rules, probes, the API server, finding namespaces.
    broken: [bool; 4],
    /// Whether ztunnel answers.
    serves: bool,
    /// Pods whose annotations the API server refused, until the agent receives that.
    refused: BTreeSet<String>,
}

#[derive(Debug, Clone)]
struct Pod {
    number: u8,
    is_wanted: bool,
    netns: u64,
    has_rules: bool,
    annotation: Option<Redirection>,
    is_ending: bool,
}

#[derive(Debug, Clone)]
enum Event {
    Start(u8, bool),
    /// Its deletion begins.
    Ending(u8),
    End(u8),
    /// The pod's labels change.
    Want(u8, bool),
    /// Its sandbox is made again.
    MountedNetns(u8),
    /// Another program removes its rules.
    Drift(u8),
    /// Another program removes the probes.
    Flush,
    Break([bool; 4]),
    Ztunnel(bool),
    /// The node restarts: names and annotations are the same, everything else is gone.
    Reboot,
    /// The agent is killed, and another begins.
    Kill,
    Reconcile,
    Wait(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let pod = 0..4_u8;
    prop_oneof![
        4 => (pod.clone(), any::<bool>()).prop_map(|(pod, is_wanted)| Event::Start(pod, is_wanted)),
        1 => pod.clone().prop_map(Event::Ending),
        2 => pod.clone().prop_map(Event::End),
        2 => (pod.clone(), any::<bool>()).prop_map(|(pod, is_wanted)| Event::Want(pod, is_wanted)),
        1 => pod.clone().prop_map(Event::MountedNetns),
        1 => pod.prop_map(Event::Drift),
        1 => Just(Event::Flush),
        2 => prop::array::uniform4(prop::bool::weighted(0.3)).prop_map(Event::Break),
        3 => any::<bool>().prop_map(Event::Ztunnel),
        1 => Just(Event::Reboot),
        1 => Just(Event::Kill),
        8 => Just(Event::Reconcile),
        3 => (1..8000_u64).prop_map(Event::Wait),
    ]
}

impl Pod {
    fn uid(&self) -> String {
        format!("u{}", self.number)
    }

    fn address(&self) -> IpAddr {
        IpAddr::from([10, 1, 0, self.number])
    }

    fn listed(&self) -> AmbientPod {
        let name = format!("p{}", self.number);
        AmbientPod {
            name: PodName { namespace: "shop".into(), name: name.clone() },
            workload: ZdsWorkload::new(self.uid(), name, "shop".into(), "a".into()).expect("short"),
            addresses: vec![self.address()],
            wanted: if self.is_wanted {
                Ok(AmbientRedirect::new(Families::Both))
            } else {
                Err(NotEnrolled::NotAmbient(NotAmbient::NotSelected))
            },
            keep: Duration::ZERO,
            accepted: AcceptedRules::default(),
            annotation: self.annotation,
            is_ending: self.is_ending,
        }
    }
}

impl World {
    fn pod(&mut self, pod: &AmbientPod) -> &mut Pod {
        self.pods.get_mut(pod.workload.uid()).expect("a pod that runs")
    }

    fn is_enrolled(&self, uid: &str) -> bool {
        let pod = &self.pods[uid];
        pod.has_rules
            && self.announced.get(uid) == Some(&(NetnsInode(pod.netns), PodState::Acknowledged))
            && self.probes.contains(&pod.address())
    }

    fn done(&self, what: usize) -> Result<(), String> {
        if self.broken[what] { Err(format!("{what} is broken")) } else { Ok(()) }
    }

    fn set_ztunnel(&mut self, serves: bool) {
        self.serves = serves;
        let state = if serves { PodState::Acknowledged } else { PodState::NoZtunnel };
        self.announced.values_mut().for_each(|announced| announced.1 = state.clone());
    }

    fn happen(&mut self, event: &Event) {
        let edit = |world: &mut Self, pod: u8, edit: &dyn Fn(&mut Pod)| {
            if let Some(pod) = world.pods.get_mut(&format!("u{pod}")) {
                edit(pod);
            }
        };
        match event {
            Event::Start(number, is_wanted) => {
                let pod = Pod {
                    number: *number,
                    is_wanted: *is_wanted,
                    netns: 1,
                    has_rules: false,
                    annotation: None,
                    is_ending: false,
                };
                self.pods.entry(pod.uid()).or_insert(pod);
            }
            Event::Ending(pod) => edit(self, *pod, &|pod| pod.is_ending = true),
            Event::End(pod) => drop(self.pods.remove(&format!("u{pod}"))),
            Event::Want(pod, is_wanted) => edit(self, *pod, &|pod| pod.is_wanted = *is_wanted),
            Event::MountedNetns(pod) => {
                edit(self, *pod, &|pod| (pod.netns, pod.has_rules) = (pod.netns + 1, false));
            }
            Event::Drift(pod) => edit(self, *pod, &|pod| pod.has_rules = false),
            Event::Flush => self.probes.clear(),
            Event::Break(broken) => self.broken = *broken,
            Event::Ztunnel(serves) => self.set_ztunnel(*serves),
            Event::Reboot => {
                self.probes.clear();
                self.announced.clear();
                for pod in self.pods.values_mut() {
                    (pod.netns, pod.has_rules) = (pod.netns + 1, false);
                }
            }
            // What ztunnel has without this agent does not count.
            Event::Kill => self.announced.clear(),
            Event::Reconcile | Event::Wait(_) => {}
        }
    }

    fn listed(&self) -> Vec<AmbientPod> {
        self.pods.values().map(Pod::listed).collect()
    }
}

impl Effects for World {
    fn find(&mut self, pod: &AmbientPod) -> Result<NetnsInode, String> {
        self.done(3)?;
        Ok(NetnsInode(self.pod(pod).netns))
    }

    fn rules(&mut self, pod: &AmbientPod, _: Option<&AmbientRedirect>) -> RulesCheck {
        Ok(self.pod(pod).has_rules)
    }

    fn change_rules(&mut self, pod: &AmbientPod, redirect: Option<&AmbientRedirect>) -> Result<(), String> {
        self.done(0)?;
        self.pod(pod).has_rules = redirect.is_some();
        Ok(())
    }

    fn ztunnel(&self, pod: &AmbientPod) -> Option<(NetnsInode, PodState)> {
        self.announced.get(pod.workload.uid()).cloned()
    }

    fn announce(&mut self, pod: &AmbientPod, netns: NetnsInode) {
        let state = if self.serves { PodState::Acknowledged } else { PodState::NoZtunnel };
        self.announced.insert(pod.workload.uid().to_owned(), (netns, state));
    }

    fn withdraw(&mut self, uid: &str) {
        if let Some(pod) = self.pods.get(uid) {
            assert!(!pod.has_rules, "rules without ztunnel take a pod off the network");
        }
        self.announced.remove(uid);
    }

    fn probes(&mut self) -> Result<BTreeSet<IpAddr>, String> {
        self.done(1)?;
        Ok(self.probes.clone())
    }

    fn set_probes(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<(), String> {
        self.done(1)?;
        self.probes = addresses.clone();
        Ok(())
    }

    fn annotate(&mut self, pod: &AmbientPod, annotation: Option<Redirection>) {
        if annotation == Some(Redirection::Enabled) {
            assert!(self.is_enrolled(pod.workload.uid()), "enabled is written of a pod that is not");
        }
        match self.done(2) {
            Ok(()) => self.pod(pod).annotation = annotation,
            Err(_) => drop(self.refused.insert(pod.workload.uid().to_owned())),
        }
    }
}

/// Passes until nothing changes any more, as time goes by.
fn settle(world: &mut World, enrolment: &mut Enrolment, now: &mut Duration) -> Enrolled {
    world.broken = [false; 4];
    world.set_ztunnel(true);
    let mut last = Enrolled::default();
    for _ in 0..4 {
        *now += LONGEST_PAUSE;
        last = enrolment.reconcile(*now, &world.listed(), |_| true, world);
    }
    last
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn all_pods_end_as_wanted_and_no_annotation_lies(events in prop::collection::vec(event(), 0..60)) {
        let (mut world, mut enrolment, mut now) = (World::default(), Enrolment::default(), Duration::ZERO);
        for event in &events {
            world.happen(event);
            if matches!(event, Event::Kill | Event::Reboot) {
                enrolment = Enrolment::default();
            }
            if let Event::Wait(milliseconds) = event {
                now += Duration::from_millis(*milliseconds);
            }
            if matches!(event, Event::Reconcile) {
                let listed = world.listed();
                let enrolled = enrolment.reconcile(now, &listed, |_| true, &mut world);
                prop_assert_eq!(enrolled.wanted, listed.iter().filter(|pod| pod.is_wanted() && !pod.is_ending).count());
                prop_assert!(enrolled.enrolled <= enrolled.wanted);
                let refused = std::mem::take(&mut world.refused);
                for (uid, pod) in &world.pods {
                    let counts = pod.is_wanted && !pod.is_ending && !enrolled.pending.contains_key(uid);
                    prop_assert!(!counts || world.is_enrolled(uid), "{} is not enrolled", uid);
                    // What was claimed and is not so waits only for ztunnel's replacement, or for the API server.
                    let is_claimed = pod.annotation == Some(Redirection::Enabled);
                    let waits = enrolled.pending.contains_key(uid) || refused.contains(uid);
                    prop_assert!(!is_claimed || counts || pod.is_ending || waits, "{}", uid);
                }
                for uid in refused {
                    enrolment.annotation_failed(now, &uid, "the API server is silent".into());
                }
            }
        }
        let enrolled = settle(&mut world, &mut enrolment, &mut now);
        prop_assert!(enrolled.pending.is_empty(), "{:?}", enrolled);
        prop_assert_eq!(enrolled.enrolled, enrolled.wanted);
        let mut probes = BTreeSet::new();
        for (uid, pod) in &world.pods {
            if pod.is_wanted {
                // Also while it is being deleted: its connections go on.
                prop_assert!(world.is_enrolled(uid), "{}", uid);
                prop_assert!(pod.is_ending || pod.annotation == Some(Redirection::Enabled), "{}", uid);
                probes.insert(pod.address());
            } else {
                prop_assert!(!pod.has_rules && !world.announced.contains_key(uid), "{} has not left", uid);
                prop_assert!(pod.is_ending || pod.annotation.is_none(), "{}", uid);
            }
        }
        prop_assert_eq!(&world.probes, &probes);
        let gone = world.announced.keys().find(|uid| !world.pods.contains_key(*uid));
        prop_assert_eq!(gone, None, "ztunnel serves pods that ended");
    }
}

#[test]
fn a_ztunnel_that_is_replaced_withdraws_no_annotation_and_one_that_stays_away_does() {
    let (mut world, mut enrolment, mut now) = (World::default(), Enrolment::default(), Duration::ZERO);
    world.happen(&Event::Start(1, true));
    let seen = settle(&mut world, &mut enrolment, &mut now);
    assert_eq!((seen.enrolled, seen.wanted), (1, 1));
    world.set_ztunnel(false);
    let seen = enrolment.reconcile(now, &world.listed(), |_| true, &mut world);
    assert!(seen.enrolled == 0 && seen.pending["u1"].contains("no ztunnel is connected"), "{seen:?}");
    assert_eq!(world.pods["u1"].annotation, Some(Redirection::Enabled), "it may be back in a moment");
    assert_eq!(enrolment.next_due(now), Some(now + REPLACEMENT));
    now += REPLACEMENT;
    enrolment.reconcile(now, &world.listed(), |_| true, &mut world);
    assert_eq!(world.pods["u1"].annotation, Some(Redirection::Pending));
    settle(&mut world, &mut enrolment, &mut now);
    assert_eq!(world.pods["u1"].annotation, Some(Redirection::Enabled));
}

#[test]
fn what_fails_is_tried_again_later_and_says_why() {
    let (mut world, mut enrolment) = (World::default(), Enrolment::default());
    world.happen(&Event::Start(1, true));
    world.happen(&Event::Break([true, false, false, false]));
    let seen = enrolment.reconcile(Duration::ZERO, &world.listed(), |_| true, &mut world);
    assert_eq!(seen.pending["u1"], "0 is broken");
    assert_eq!((seen.enrolled, seen.wanted), (0, 1));
    assert_eq!(world.pods["u1"].annotation, Some(Redirection::Pending));
    let mut pauses = Vec::new();
    let mut now = Duration::ZERO;
    for _ in 0..10 {
        let due = enrolment.next_due(now).expect("a try is due");
        pauses.push(due - now);
        now = due;
        enrolment.reconcile(now, &world.listed(), |_| true, &mut world);
    }
    assert!(pauses.is_sorted() && pauses[0] == SHORTEST_PAUSE && pauses[9] == LONGEST_PAUSE, "{pauses:?}");
}

#[test]
fn a_pod_that_cannot_be_enrolled_keeps_what_it_has_and_does_not_claim_it() {
    let (mut world, mut enrolment, mut now) = (World::default(), Enrolment::default(), Duration::ZERO);
    world.happen(&Event::Start(1, true));
    settle(&mut world, &mut enrolment, &mut now);
    let mut pod = world.listed().remove(0);
    pod.wanted = Err(NotEnrolled::Settings("the annotation is misspelt".into()));
    let seen = enrolment.reconcile(now, &[pod], |_| true, &mut world);
    assert_eq!((seen.wanted, seen.enrolled), (1, 1), "its traffic goes through ztunnel as before");
    assert!(seen.pending["u1"].contains("misspelt"), "{seen:?}");
    assert_eq!(world.pods["u1"].annotation, Some(Redirection::Pending));
    assert!(world.is_enrolled("u1"));
}

#[test]
fn a_pod_that_ends_is_served_until_it_is_gone_and_nobody_is_told_of_its_namespace() {
    let (mut world, mut enrolment, mut now) = (World::default(), Enrolment::default(), Duration::ZERO);
    world.happen(&Event::Start(1, true));
    settle(&mut world, &mut enrolment, &mut now);
    world.happen(&Event::Ending(1));
    world.happen(&Event::Drift(1));
    enrolment.reconcile(now, &world.listed(), |_| true, &mut world);
    assert!(world.is_enrolled("u1"), "its connections go on");
    world.happen(&Event::Break([false, false, false, true]));
    let seen = enrolment.reconcile(now, &world.listed(), |_| true, &mut world);
    assert_eq!(seen, Enrolled::default(), "no operator has to act");
    world.happen(&Event::End(1));
    enrolment.reconcile(now, &[], |_| true, &mut world);
    assert!(world.announced.is_empty() && world.probes.is_empty());
}

#[test]
fn an_annotation_that_cannot_be_written_is_tried_again_ever_later() {
    let (mut world, mut enrolment) = (World::default(), Enrolment::default());
    world.happen(&Event::Start(1, true));
    world.set_ztunnel(true);
    let (mut now, mut pauses) = (Duration::ZERO, Vec::new());
    for _ in 0..10 {
        enrolment.reconcile(now, &world.listed(), |_| true, &mut world);
        // What was written was lost on the way.
        world.pods.get_mut("u1").expect("a pod").annotation = None;
        enrolment.annotation_failed(now, "u1", "the API server is silent".into());
        let seen = enrolment.reconcile(now, &world.listed(), |_| true, &mut world);
        assert_eq!((seen.enrolled, &*seen.pending["u1"]), (1, "the API server is silent"));
        let due = enrolment.next_due(now).expect("a try is due");
        pauses.push(due - now);
        now = due;
    }
    assert!(pauses.is_sorted() && pauses[9] == LONGEST_PAUSE, "{pauses:?}");
}

#[test]
fn only_pods_that_are_named_new_or_due_are_examined() {
    let (mut world, mut enrolment, mut now) = (World::default(), Enrolment::default(), Duration::ZERO);
    world.happen(&Event::Start(1, true));
    settle(&mut world, &mut enrolment, &mut now);
    world.happen(&Event::Drift(1));
    world.happen(&Event::Start(2, true));
    let seen = enrolment.reconcile(now, &world.listed(), |_| false, &mut world);
    assert_eq!(seen.enrolled, 2, "the second one is new");
    assert!(!world.pods["u1"].has_rules, "the first one was not examined");
    enrolment.reconcile(now, &world.listed(), |uid| uid == "u1", &mut world);
    assert!(world.pods["u1"].has_rules);
}
