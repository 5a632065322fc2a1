//! Random deletions and flushes in the network namespaces of many pods, all of them healed by the real program. HEALS says how many; `make heal` does a
//! thousand over 50 pods with the release build and prints how long each took. Needs root.

use std::thread;
use std::time::{Duration, Instant};

use e2e::agent::{CALICO, Node};
use e2e::pods::{
    LIMIT, PodApi, Proc, Sandboxes, THEIRS, deletions, lost_or_added, mesh_pod_of, metric, mismatch,
    redirect_as, wait, wait_at_least,
};
use netns_apply::notify::{Notification, Subscription};
use proptest::test_runner::{RngAlgorithm, TestRng};
use redirect_core::options::BackendChoice;
use serde_json::json;
use test_support::netns::{Namespace, Snapshot};
use test_support::process::until;

/// The number of deletions for one pod.
const PER_POD: usize = 20;
const MODE: &str = "sidecar.istio.io/interceptionMode";

/// A pod, and what it was at first.
struct Victim {
    namespace: Namespace,
    annotations: &'static [(&'static str, &'static str)],
    choice: BackendChoice,
    deletions: &'static [&'static str],
    ears: [Subscription; 2],
    before: Snapshot,
}

impl Victim {
    fn new(number: usize, is_native: bool, sandboxes: &mut Sandboxes) -> Self {
        let namespace = sandboxes.add(&format!("cni-{number}"), &[&address(number)]);
        let is_tproxy = number % 3 == 1 && !is_native;
        let annotations: &[_] = if is_tproxy { &[(MODE, "TPROXY")] } else { &[] };
        let choice = if is_native { BackendChoice::NativeNft } else { BackendChoice::Auto };
        redirect_as(&namespace, annotations, choice);
        namespace.sh(THEIRS).expect("others' rules");
        let deletions = deletions(is_native, is_tproxy);
        let ears =
            || [Subscription::to_rules().expect("listens"), Subscription::to_routing().expect("listens")];
        let ears = namespace.enter(ears).expect("enters");
        let before = namespace.snapshot().expect("a snapshot");
        Self { namespace, annotations, choice, deletions, ears, before }
    }

    /// Deletes something; how long it took until all was as planned again, the deleting included.
    fn suffer(&self, number: usize, node: &Node) -> Duration {
        let deletion = self.deletions[number % self.deletions.len()];
        self.is_notified();
        let (start, mut looked) = (Instant::now(), Instant::now());
        self.namespace.sh(deletion).expect("deletes");
        let mut difference = None;
        until("it to be as planned again", LIMIT, &[], || {
            // A notification just before the last check does not come again.
            let may_have_changed = self.is_notified() || looked.elapsed() > Duration::from_millis(100);
            if may_have_changed {
                difference = mismatch(&self.namespace, self.annotations, self.choice);
                looked = Instant::now();
            }
            thread::sleep(Duration::from_millis(1));
            Ok((may_have_changed && difference.is_none()).then_some(()))
        })
        .unwrap_or_else(|error| panic!("{deletion}: {error:#}: {difference:?}\n{}", node.log()));
        start.elapsed()
    }

    fn is_notified(&self) -> bool {
        let mut notification = Notification::default();
        for ear in &self.ears {
            assert!(ear.drain(&mut notification, usize::MAX).expect("listens"));
        }
        !notification.is_nothing()
    }
}

fn address(number: usize) -> String {
    format!("10.1.0.{}", number + 1)
}

fn uid(number: usize) -> String {
    format!("0f1e2d3c-4b5a-6978-8796-a5b4c3d2{number:04x}")
}

fn heals() -> Option<usize> {
    std::env::var("HEALS").ok()?.parse().ok()
}

#[expect(clippy::print_stdout, reason = "the figures are what `make heal` is for")]
fn random_deletions(is_native: bool, count: usize) {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("DRIFT_WATCH_INTERVAL", "1h");
    node.set("DRIFT_HEAL", "true");
    node.set("NATIVE_NFTABLES", if is_native { "true" } else { "false" });
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let (mut pods, mut victims) = (Vec::new(), Vec::new());
    for number in 0..count.div_ceil(PER_POD).max(2) {
        let victim = Victim::new(number, is_native, &mut sandboxes);
        let mut pod = mesh_pod_of(&uid(number), &format!("web-{number}"), &[&address(number)]);
        for (key, value) in victim.annotations {
            pod["metadata"]["annotations"][key] = json!(value);
        }
        proc.add_of(u32::try_from(number).expect("few") + 100, &uid(number), &victim.namespace.path());
        pods.push(pod);
        victims.push(victim);
    }
    let many = f64::from(u32::try_from(victims.len()).expect("few"));
    let _api = PodApi::start(&mut node, pods);
    let agent = node.start_ready();
    wait_at_least(&node, "istio_cni_heal_looks_total{result=\"verified\"}", many);
    assert_eq!(metric(&node, "istio_cni_heal_watched_pods"), Some(many));
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", agent.id())).expect("a process").count();

    let mut random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut draw = |below: usize| usize::try_from(rand_u32(&mut random)).expect("a number") % below;
    let mut took: Vec<Duration> =
        (0..count).map(|_| victims[draw(victims.len())].suffer(draw(1 << 16), &node)).collect();
    took.sort_unstable();
    for victim in &victims {
        assert_eq!(lost_or_added(&victim.namespace, &victim.before), [""; 0], "{}", node.log());
    }
    let attempts = |reason: &str| {
        metric(&node, &format!("istio_cni_heal_attempts_total{{reason=\"{reason}\"}}")).expect("a number")
    };
    let spoiled = || ["not_applied", "not_verified", "cannot-look"].map(attempts).iter().sum::<f64>();
    let asked = f64::from(u32::try_from(count).expect("few"));
    // A deletion between a repair and its verification fails that repair, and the next one restores both; one that comes while a repair is
    // under way is restored by that repair. Most come when all is at rest.
    wait(&node, "most to be counted", || attempts("healed") + spoiled() >= asked / 2.0);
    let spoiled = spoiled();
    assert_eq!(metric(&node, "istio_cni_heal_contested_pods"), Some(0.0), "{}", node.log());
    let at = |share: usize| took[(took.len() * share / 100).min(took.len() - 1)];
    println!(
        "{count} deletions in {many} namespaces{}: all healed; median {:?}, 99 % {:?}, longest {:?}; {} tries were spoiled by a further change; {descriptors} descriptors",
        if is_native { " with native tables" } else { "" },
        at(50),
        at(99),
        at(100),
        spoiled
    );
    // Only the one who asks for so many has a machine for it.
    if heals().is_some() {
        assert!(at(50) < Duration::from_millis(200), "{:?}", at(50));
        assert!(at(99) < Duration::from_secs(1), "{:?}", at(99));
    }
}

fn rand_u32(random: &mut TestRng) -> u32 {
    use proptest::prelude::Rng as _;
    random.next_u32()
}

#[test]
fn random_deletions_and_flushes_are_healed_and_nothing_else_is_touched() {
    random_deletions(false, heals().unwrap_or(40));
}

#[test]
fn random_deletions_and_flushes_of_native_tables_are_healed() {
    random_deletions(true, heals().unwrap_or(40) / 2);
}
