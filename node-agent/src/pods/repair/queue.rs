//! Which broken pods to handle, and when. Pure: time comes from outside.
//!
//! Each failure of a pod is handled once. An attempt that fails is repeated with growing pauses and a limit; a response that the API server could not
//! give does not count against the pod.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cluster_client::Backoff;
use reasons::AgentReason;

use super::filter::{Broken, ContainerFailure};

/// The most pods that are remembered. No node has as many; a pod that does not fit is found by the next list.
pub const MOST_PODS: usize = 1024;
/// How often a pod is handled before it is given up, until it is sound again.
pub const MOST_TRIES: u32 = 10;
/// The pauses between tries.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The pods that are broken, by their UIDs.
#[derive(Debug, Default)]
pub struct RepairQueue {
    jobs: BTreeMap<String, RepairJob>,
    /// A pod did not fit.
    overflowed: bool,
}

#[derive(Debug)]
struct RepairJob {
    pod: Broken,
    /// When its present failure was seen first.
    since: Instant,
    tries: u32,
    pauses: Backoff,
    state: JobState,
    /// The reason of its last reported error.
    reported: Option<AgentReason>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum JobState {
    Due(Instant),
    /// This failure is being handled.
    InWork(ContainerFailure),
    /// This failure is handled.
    Settled(ContainerFailure),
    GivenUp,
}

/// What becomes of a pod that was found broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Noted {
    /// It is due.
    New,
    /// It was known already.
    Known,
    /// It does not fit.
    Overflow,
}

/// A pod to handle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairTask {
    /// The pod as it was last seen.
    pub pod: Broken,
    /// When its failure was seen first.
    pub since: Instant,
    /// How many tries count, this one included; more than [`MOST_TRIES`] if it is to be given up.
    pub tries: u32,
}

/// How a try ended, as far as the next one depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptEnd {
    /// The failure is handled.
    Settled,
    /// It did not work.
    Failed,
    /// The result is unknown, or nothing was done; it does not count. It may have to wait.
    Unanswered(Option<Duration>),
}

impl RepairQueue {
    /// Notes a broken pod.
    pub fn note(&mut self, pod: Broken, now: Instant) -> Noted {
        let is_full = self.jobs.len() >= MOST_PODS;
        let Some(job) = self.jobs.get_mut(&pod.observed.uid) else {
            if is_full {
                self.overflowed = true;
                return Noted::Overflow;
            }
            let pauses = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
            let uid = pod.observed.uid.clone();
            let state = JobState::Due(now);
            self.jobs.insert(uid, RepairJob { pod, since: now, tries: 0, pauses, state, reported: None });
            return Noted::New;
        };
        let is_again = matches!(&job.state, JobState::Settled(failure) if *failure != pod.failure);
        let begins_to_run = pod.runs && !job.pod.runs;
        job.pod = pod;
        if let (JobState::Due(at), true) = (&mut job.state, begins_to_run) {
            *at = now.min(*at);
            return Noted::New;
        }
        if !is_again {
            return Noted::Known;
        }
        job.since = now;
        if job.tries >= MOST_TRIES {
            // Taken once more, to be given up.
            job.state = JobState::Due(now);
        } else {
            job.retry(now, None);
        }
        Noted::New
    }

    /// Gives a pod up, until it is sound.
    pub fn give_up(&mut self, uid: &str) {
        if let Some(job) = self.jobs.get_mut(uid) {
            job.state = JobState::GivenUp;
        }
    }

    /// Forgets a pod that is sound, or gone; true if it was known.
    pub fn forget(&mut self, uid: &str) -> bool {
        self.jobs.remove(uid).is_some()
    }

    /// Forgets all pods but these.
    pub fn keep(&mut self, uids: &BTreeSet<String>) {
        self.jobs.retain(|uid, _| uids.contains(uid));
    }

    /// Whether a pod did not fit since the last call.
    pub fn take_overflowed(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    /// Whether a pod did not fit, and half of the queue is free: a new list is worthwhile.
    #[must_use]
    pub fn wants_list(&self) -> bool {
        self.overflowed && self.jobs.len() <= MOST_PODS / 2
    }

    /// The next pod to handle, if it is due.
    pub fn take(&mut self, now: Instant) -> Option<RepairTask> {
        let due = |job: &RepairJob| if let JobState::Due(at) = job.state { Some(at) } else { None };
        let jobs = self.jobs.values_mut().filter_map(|job| Some((due(job)?, job)));
        let (_, job) = jobs.filter(|(at, _)| *at <= now).min_by_key(|(at, _)| *at)?;
        job.state = JobState::InWork(job.pod.failure.clone());
        job.tries = job.tries.saturating_add(1);
        Some(RepairTask { pod: job.pod.clone(), since: job.since, tries: job.tries })
    }

    /// Notes how a try ended; true if the pod is given up.
    pub fn done(&mut self, uid: &str, ended: AttemptEnd, now: Instant) -> bool {
        let Some(job) = self.jobs.get_mut(uid) else { return false };
        let JobState::InWork(failure) = job.state.clone() else { return false };
        match ended {
            AttemptEnd::Settled if job.pod.failure == failure => job.state = JobState::Settled(failure),
            // It has failed again in between.
            AttemptEnd::Settled => {
                job.since = now;
                job.retry(now, None);
            }
            AttemptEnd::Failed => job.retry(now, None),
            AttemptEnd::Unanswered(after) => {
                job.tries = job.tries.saturating_sub(1);
                job.retry(now, after);
            }
        }
        job.state == JobState::GivenUp
    }

    /// Whether a pod's error, by its reason, differs from the last reported one.
    pub fn is_news(&mut self, uid: &str, error: AgentReason) -> bool {
        self.jobs.get_mut(uid).is_some_and(|job| job.reported.replace(error) != Some(error))
    }

    /// When the next pod is due.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        let due = self.jobs.values().filter_map(|job| match &job.state {
            JobState::Due(at) => Some(*at),
            JobState::InWork(_) | JobState::Settled(_) | JobState::GivenUp => None,
        });
        due.min()
    }

    /// How many pods wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.jobs.values().filter(|job| matches!(job.state, JobState::Due(_))).count()
    }
}

impl RepairJob {
    fn retry(&mut self, now: Instant, after: Option<Duration>) {
        self.state = if self.tries >= MOST_TRIES {
            JobState::GivenUp
        } else {
            JobState::Due(now + self.pauses.pause(after))
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::pods::ObservedPod;
    use AgentReason::{Ended, Refused};
    use cni_core::pod_source::PodName;
    use proptest::prelude::*;

    fn broken(uid: &str, run: &str) -> Broken {
        Broken {
            observed: ObservedPod {
                name: PodName { namespace: "shop".into(), name: uid.into() },
                uid: uid.into(),
                version: run.into(),
            },
            labels: None,
            owner: uid.into(),
            failure: ContainerFailure {
                container: "v".into(),
                exit_code: 126,
                id: run.into(),
                finished: "t".into(),
            },
            runs: false,
        }
    }

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn a_failure_is_handled_once_and_the_next_one_again() {
        let (mut queue, start) = (RepairQueue::default(), Instant::now());
        assert_eq!(queue.note(broken("a", "1"), start), Noted::New);
        let task = queue.take(start).expect("a task");
        assert_eq!((task.pod.observed.uid.as_str(), task.tries, queue.take(start)), ("a", 1, None));
        assert!(!queue.done("a", AttemptEnd::Settled, start));
        assert_eq!(queue.note(broken("a", "1"), start), Noted::Known);
        assert_eq!((queue.next(), queue.waiting()), (None, 0));
        assert_eq!(queue.note(broken("a", "2"), at(start, 9)), Noted::New);
        assert_eq!(queue.take(at(start, 9)), None, "not at once");
        let task = queue.take(at(start, 99)).expect("a task");
        assert_eq!((task.tries, task.since, task.pod.observed.version.as_str()), (2, at(start, 9), "2"));
    }

    #[test]
    fn a_pod_that_fails_after_every_repair_is_taken_once_more_to_be_given_up() {
        let (mut queue, mut now) = (RepairQueue::default(), Instant::now());
        for run in 1..=MOST_TRIES + 1 {
            assert_eq!(queue.note(broken("a", &run.to_string()), now), Noted::New);
            now = queue.next().expect("is due").max(now);
            assert_eq!(queue.take(now).expect("a task").tries, run);
            if run <= MOST_TRIES {
                assert!(!queue.done("a", AttemptEnd::Settled, now));
            }
        }
        queue.give_up("a");
        assert_eq!(queue.note(broken("a", "later"), now), Noted::Known);
        assert_eq!((queue.next(), queue.waiting()), (None, 0));
    }

    #[test]
    fn a_failure_during_a_try_is_another_one() {
        let (mut queue, start) = (RepairQueue::default(), Instant::now());
        queue.note(broken("a", "1"), start);
        queue.take(start).expect("a task");
        assert_eq!(queue.note(broken("a", "2"), start), Noted::Known);
        queue.done("a", AttemptEnd::Settled, start);
        assert_eq!(queue.waiting(), 1);
    }

    #[test]
    fn a_try_sees_the_newest_version() {
        let (mut queue, start) = (RepairQueue::default(), Instant::now());
        queue.note(broken("a", "1"), start);
        let mut newer = broken("a", "1");
        newer.observed.version = "77".into();
        assert_eq!(queue.note(newer, start), Noted::Known);
        assert_eq!(queue.take(start).expect("a task").pod.observed.version, "77");
    }

    #[test]
    fn a_pod_is_given_up_until_it_is_sound() {
        let (mut queue, start) = (RepairQueue::default(), Instant::now());
        let mut now = start;
        for run in 0..MOST_TRIES {
            queue.note(broken("a", &run.to_string()), now);
            now = queue.next().expect("is due").max(now);
            assert_eq!(queue.take(now).expect("a task").tries, run + 1);
            assert_eq!(queue.done("a", AttemptEnd::Failed, now), run + 1 == MOST_TRIES);
        }
        assert_eq!(queue.note(broken("a", "x"), now), Noted::Known);
        assert_eq!(queue.next(), None);
        assert!(queue.forget("a") && !queue.forget("a"));
        assert_eq!(queue.note(broken("a", "y"), now), Noted::New);
    }

    #[test]
    fn an_attempt_without_a_response_does_not_count() {
        let (mut queue, mut now) = (RepairQueue::default(), Instant::now());
        queue.note(broken("a", "1"), now);
        for _ in 0..3 * MOST_TRIES {
            assert_eq!(queue.take(now).expect("a task").tries, 1);
            assert!(!queue.done("a", AttemptEnd::Unanswered(Some(Duration::from_secs(3))), now));
            let next = queue.next().expect("is due");
            assert!(next >= at(now, 3) && next <= now + LONGEST_PAUSE, "{:?}", next - now);
            now = next;
        }
    }

    #[test]
    fn a_pod_that_waits_is_tried_at_once_when_its_container_runs() {
        let (mut queue, start) = (RepairQueue::default(), Instant::now());
        queue.note(broken("a", "1"), start);
        queue.take(start).expect("a task");
        queue.done("a", AttemptEnd::Failed, start);
        assert_eq!(queue.take(start), None);
        let runs = Broken { runs: true, ..broken("a", "1") };
        assert_eq!(queue.note(runs.clone(), start), Noted::New);
        assert!(queue.take(start).is_some());
        queue.done("a", AttemptEnd::Failed, start);
        assert_eq!((queue.note(runs, start), queue.take(start)), (Noted::Known, None), "once");
    }

    #[test]
    fn an_error_is_new_once() {
        let (mut queue, start) = (RepairQueue::default(), Instant::now());
        queue.note(broken("a", "1"), start);
        let news: Vec<bool> =
            [Refused, Refused, Ended, Refused].map(|reason| queue.is_news("a", reason)).into();
        assert_eq!((news, queue.is_news("b", Refused)), (vec![true, false, true, true], false));
    }

    #[test]
    fn who_does_not_fit_is_counted_and_found_later() {
        let (mut queue, now) = (RepairQueue::default(), Instant::now());
        for count in 0..MOST_PODS {
            assert_eq!(queue.note(broken(&format!("{count:04}"), "1"), now), Noted::New);
        }
        assert!(!queue.take_overflowed() && !queue.wants_list());
        assert_eq!(queue.note(broken("one more", "1"), now), Noted::Overflow);
        assert!(!queue.wants_list(), "not enough room yet");
        for count in 0..MOST_PODS / 2 {
            queue.forget(&format!("{:04}", MOST_PODS - 1 - count));
        }
        assert!(queue.wants_list());
        assert_eq!(queue.note(broken("0000", "1"), now), Noted::Known);
        assert_eq!((queue.take_overflowed(), queue.take_overflowed()), (true, false));
        queue.keep(&BTreeSet::from(["0007".to_owned()]));
        assert_eq!(queue.note(broken("one more", "1"), now), Noted::New);
        assert_eq!(queue.waiting(), 2);
    }

    #[derive(Debug, Clone)]
    enum QueueStep {
        Note(u8, u8),
        Forget(u8),
        Take,
        Done(u8, AttemptEnd),
        Wait(u64),
    }

    fn any_step() -> impl Strategy<Value = QueueStep> {
        let ended = prop_oneof![
            Just(AttemptEnd::Settled),
            Just(AttemptEnd::Failed),
            Just(AttemptEnd::Unanswered(None))
        ];
        prop_oneof![
            (0..4_u8, 0..3_u8).prop_map(|(uid, run)| QueueStep::Note(uid, run)),
            (0..4_u8).prop_map(QueueStep::Forget),
            Just(QueueStep::Take),
            (0..4_u8, ended).prop_map(|(uid, ended)| QueueStep::Done(uid, ended)),
            (0..100_u64).prop_map(QueueStep::Wait),
        ]
    }

    proptest! {
        #[test]
        fn a_pod_is_handled_once_at_a_time_and_only_on_request(steps in prop::collection::vec(any_step(), 0..200)) {
            let (mut queue, mut now) = (RepairQueue::default(), Instant::now());
            let mut in_work = BTreeSet::new();
            for step in steps {
                match step {
                    QueueStep::Note(uid, run) => { queue.note(broken(&uid.to_string(), &run.to_string()), now); }
                    QueueStep::Forget(uid) => {
                        queue.forget(&uid.to_string());
                        in_work.remove(&uid.to_string());
                    }
                    QueueStep::Take => if let Some(task) = queue.take(now) {
                        prop_assert!(in_work.insert(task.pod.observed.uid.clone()), "{:?}", task);
                        if task.tries > MOST_TRIES {
                            queue.give_up(&task.pod.observed.uid);
                            in_work.remove(&task.pod.observed.uid);
                        }
                        prop_assert!(task.tries <= MOST_TRIES + 1);
                    },
                    QueueStep::Done(uid, ended) => {
                        queue.done(&uid.to_string(), ended, now);
                        in_work.remove(&uid.to_string());
                    }
                    QueueStep::Wait(seconds) => now = at(now, seconds),
                }
                prop_assert!(queue.waiting() <= 4);
                prop_assert_eq!(queue.next().is_some(), queue.waiting() > 0);
            }
        }
    }
}
