//! The history of a monitored pod: what to report, and when to check it again. Pure: time comes from outside.

use std::time::{Duration, Instant};

use reasons::AgentReason;

use super::repair::HealOutcome;
use crate::install::conflict::WriteConflict;

/// Changes that are reverted at once within a minute: one a second. A program that makes more keeps making them.
const PATIENCE: usize = 60;
/// How long nothing is reverted until a conflict counts as ended: the longest wait and the minute that counts.
const CALM: Duration = Duration::from_secs(120);
/// The pauses after the first attempts that fail. Most of these fail because another program is still changing rules, as a script of several commands does, and the
/// next one works: all of them fit into a second. Until then nothing is reported.
const SOON: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];
/// How often a failed repair is repeated after these, and the longest wait. After that, a change or the drift watch has to request it.
const MOST_LATER: usize = 9;
/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// The most events about one pod.
const MOST_EVENTS: usize = 4;
/// In this time.
const EVENT_PAUSE: Duration = Duration::from_secs(6 * 3600);

/// What is remembered of a pod.
#[derive(Debug)]
pub struct HealHistory {
    conflict: WriteConflict,
    /// When the conflict began to be one, or was last fought.
    contested: Option<Instant>,
    /// How many tries have failed, one after the other.
    failures: usize,
    /// The reason of the failure that was reported.
    reported: Option<AgentReason>,
    events: Vec<Instant>,
}

/// Something worth reporting to an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealReport {
    /// It was restored.
    Healed,
    /// Another program undoes it repeatedly; the next change is reverted so much later.
    Contested(Duration),
    /// It could not be restored, for another reason than before.
    Failed,
    /// It is as planned, and could not be restored before.
    Recovered,
}

/// What follows from a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealDecision {
    /// What to report, and whether as an event too.
    pub report: Option<(HealReport, bool)>,
    /// How long to do nothing.
    pub wait: Duration,
    /// When to check again without a request.
    pub retry: Option<Duration>,
}

impl HealHistory {
    /// Nothing is known.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            conflict: WriteConflict::after(PATIENCE),
            contested: None,
            failures: 0,
            reported: None,
            events: Vec::new(),
        }
    }

    /// Whether another program undoes repairs.
    #[must_use]
    pub const fn is_contested(&self) -> bool {
        self.contested.is_some()
    }

    /// When the conflict will have ended, if nothing happens.
    #[must_use]
    pub fn calm_at(&self) -> Option<Instant> {
        self.contested.map(|last| last + CALM)
    }

    /// Ends a conflict that has not been fought for long.
    pub fn calm_down(&mut self, now: Instant) {
        self.contested = self.contested.filter(|last| now.duration_since(*last) < CALM);
    }

    /// Takes note of a check.
    pub fn ended(&mut self, outcome: &HealOutcome, now: Instant) -> HealDecision {
        self.calm_down(now);
        match outcome {
            HealOutcome::AsPlanned => {
                self.failures = 0;
                let report = self.reported.take().map(|_| (HealReport::Recovered, false));
                HealDecision { report, ..HealDecision::default() }
            }
            HealOutcome::Healed { .. } => self.healed(now),
            // Other programs have to undo their rules; the kernel reports when they do.
            HealOutcome::Interference(_) => {
                HealDecision { report: self.worse(AgentReason::Interference, now), ..HealDecision::default() }
            }
            HealOutcome::Failed(error) => self.failed(error.reason, now),
            HealOutcome::Gone => HealDecision::default(),
        }
    }

    fn healed(&mut self, now: Instant) -> HealDecision {
        (self.failures, self.reported) = (0, None);
        let wait = self.conflict.restored(now);
        let was_contested = self.is_contested();
        if wait.is_some() {
            self.contested = Some(now);
        }
        let report = match wait {
            None if was_contested => None,
            None => Some((HealReport::Healed, self.may_send(now))),
            Some(_) if was_contested => None,
            Some(wait) => Some((HealReport::Contested(wait), self.may_send(now))),
        };
        HealDecision { report, wait: wait.unwrap_or_default(), retry: wait }
    }

    fn failed(&mut self, reason: AgentReason, now: Instant) -> HealDecision {
        let before = self.failures;
        self.failures = before.saturating_add(1);
        if let Some(pause) = SOON.get(before) {
            return HealDecision { report: None, wait: *pause, retry: Some(*pause) };
        }
        let later = before - SOON.len();
        let pause = Duration::from_secs(1 << later.min(6)).min(LONGEST_WAIT);
        let retry = (later < MOST_LATER).then_some(pause);
        // Attempts that fail are not repeated more often because something changes there.
        HealDecision { report: self.worse(reason, now), wait: pause.min(Duration::from_secs(1)), retry }
    }

    fn worse(&mut self, reason: AgentReason, now: Instant) -> Option<(HealReport, bool)> {
        let is_new = self.reported.replace(reason) != Some(reason);
        is_new.then(|| (HealReport::Failed, self.may_send(now)))
    }

    fn may_send(&mut self, now: Instant) -> bool {
        self.events.retain(|at| now.duration_since(*at) < EVENT_PAUSE);
        let may = self.events.len() < MOST_EVENTS;
        if may {
            self.events.push(now);
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::check::PodProblem;

    fn healed() -> HealOutcome {
        HealOutcome::Healed { difference: "a rule is missing".into(), words: String::new() }
    }

    fn failed(reason: AgentReason) -> HealOutcome {
        HealOutcome::Failed(PodProblem::new(reason, "words"))
    }

    #[test]
    fn what_is_restored_is_said_and_events_are_few() {
        let (mut history, start) = (HealHistory::new(), Instant::now());
        let mut events = 0;
        for count in 0..20 {
            let next = history.ended(&healed(), start + count * Duration::from_secs(200));
            let Some((HealReport::Healed, event)) = next.report else { panic!("{next:?}") };
            assert_eq!((next.wait, next.retry), (Duration::ZERO, None));
            events += usize::from(event);
        }
        assert_eq!(events, MOST_EVENTS);
        let next = history.ended(&healed(), start + EVENT_PAUSE + Duration::from_secs(4000));
        assert_eq!(next.report, Some((HealReport::Healed, true)), "after a long while");
    }

    #[test]
    fn another_program_is_backed_off_from_and_reported_once() {
        let (mut history, mut now) = (HealHistory::new(), Instant::now());
        let (mut contested, mut waited) = (0, Duration::ZERO);
        for count in 1..=100 {
            let next = history.ended(&healed(), now);
            assert_eq!(next.wait, next.retry.unwrap_or_default());
            contested += usize::from(matches!(next.report, Some((HealReport::Contested(_), true | false))));
            assert_eq!(history.is_contested(), count >= PATIENCE, "{count}");
            waited = next.wait;
            now += next.wait + Duration::from_millis(20);
        }
        assert_eq!((contested, waited), (1, LONGEST_WAIT));
        let calm = history.calm_at().expect("a conflict");
        history.calm_down(calm);
        assert!(!history.is_contested());
        assert_eq!(
            history.ended(&healed(), calm + Duration::from_secs(1)).report.map(|(report, _)| report),
            Some(HealReport::Healed)
        );
    }

    #[test]
    fn a_transient_failure_is_repaired_within_a_second_and_not_reported() {
        let (mut history, mut now) = (HealHistory::new(), Instant::now());
        let start = now;
        for _ in SOON {
            let next = history.ended(&failed(AgentReason::NotVerified), now);
            assert_eq!((&next.report, next.retry), (&None, Some(next.wait)));
            now += next.wait;
        }
        assert!(now.duration_since(start) < Duration::from_millis(500));
        assert_eq!(history.ended(&healed(), now).report, Some((HealReport::Healed, true)));
        let again = history.ended(&failed(AgentReason::NotVerified), now);
        assert_eq!((again.report, again.retry), (None, Some(SOON[0])), "it starts again");
        assert_eq!(
            history.ended(&HealOutcome::AsPlanned, now),
            HealDecision::default(),
            "the failure was not reported"
        );
    }

    #[test]
    fn failed_repairs_are_repeated_with_pauses_and_a_limit() {
        let (mut history, now) = (HealHistory::new(), Instant::now());
        let nexts: Vec<HealDecision> =
            (0..14).map(|_| history.ended(&failed(AgentReason::NotFound), now)).collect();
        let pauses: Vec<u128> =
            nexts.iter().map(|next| next.retry.map_or(0, |pause| pause.as_millis())).collect();
        assert_eq!(
            pauses,
            [20, 200, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000, 60_000, 0, 0, 0]
        );
        let reported: Vec<usize> =
            (0..).zip(&nexts).filter(|(_, next)| next.report.is_some()).map(|(at, _)| at).collect();
        assert_eq!(
            (reported, &nexts[2].report),
            (vec![2], &Some((HealReport::Failed, true))),
            "reported once"
        );
        assert!(nexts.iter().all(|next| next.wait <= Duration::from_secs(1)), "a change is an occasion");
        assert_eq!(
            history.ended(&failed(AgentReason::NotApplied), now).report,
            Some((HealReport::Failed, true)),
            "another reason"
        );
        assert_eq!(history.ended(&HealOutcome::AsPlanned, now).report, Some((HealReport::Recovered, false)));
        assert_eq!(history.ended(&HealOutcome::AsPlanned, now), HealDecision::default());
        assert_eq!(
            history.ended(&failed(AgentReason::NotFound), now).retry,
            Some(SOON[0]),
            "it starts again"
        );
    }

    #[test]
    fn interference_is_reported_once_and_not_waited_for() {
        let (mut history, now) = (HealHistory::new(), Instant::now());
        let outcome = HealOutcome::Interference("table ip theirs".into());
        let next = history.ended(&outcome, now);
        assert_eq!(
            (next.report, next.wait, next.retry),
            (Some((HealReport::Failed, true)), Duration::ZERO, None)
        );
        assert_eq!(history.ended(&outcome, now), HealDecision::default());
    }
}
