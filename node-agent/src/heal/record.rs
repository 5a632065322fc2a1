//! What became of a pod that is watched, what is worth saying of it, and when it is looked at again. Pure: time comes from outside.

use std::time::{Duration, Instant};

use super::mend::Outcome;
use super::metrics::INTERFERENCE;
use crate::fight::Fight;

/// Changes that are put right at once within a minute: one a second. Whoever makes more keeps making them.
const PATIENCE: usize = 60;
/// How long nothing is to be put right until a fight counts as ended: the longest wait and the minute that counts.
const CALM: Duration = Duration::from_secs(120);
/// How often what does not work is tried again by itself. After that, a change or the drift watch has to ask for it.
const MOST_TRIES: u32 = 10;
/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// The most events about one pod.
const MOST_EVENTS: usize = 4;
/// In this time.
const EVENT_PAUSE: Duration = Duration::from_secs(6 * 3600);

/// What is remembered of a pod.
#[derive(Debug)]
pub struct Record {
    fight: Fight,
    /// When the fight began to be one, or was last fought.
    contested: Option<Instant>,
    tries: u32,
    /// The reason of the failure that was said.
    said: Option<&'static str>,
    events: Vec<Instant>,
}

/// Something worth telling an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// It was put right.
    Healed,
    /// Somebody undoes it again and again; the next change is answered so much later.
    Contested(Duration),
    /// It could not be put right, for another reason than before.
    Failed,
    /// It is as planned, and could not be put right before.
    Recovered,
}

/// What follows from a look.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Next {
    /// What to say, and whether it is worth an event.
    pub report: Option<(Report, bool)>,
    /// How long to do nothing.
    pub wait: Duration,
    /// When to look again although nobody asks for it.
    pub retry: Option<Duration>,
}

impl Record {
    /// Nothing is known.
    #[must_use]
    pub const fn new() -> Self {
        Self { fight: Fight::after(PATIENCE), contested: None, tries: 0, said: None, events: Vec::new() }
    }

    /// Whether another writer undoes what is done.
    #[must_use]
    pub const fn is_contested(&self) -> bool {
        self.contested.is_some()
    }

    /// When the fight will have ended, if nothing happens.
    #[must_use]
    pub fn calm_at(&self) -> Option<Instant> {
        self.contested.map(|last| last + CALM)
    }

    /// Ends a fight that has not been fought for long.
    pub fn calm_down(&mut self, now: Instant) {
        self.contested = self.contested.filter(|last| now.duration_since(*last) < CALM);
    }

    /// Takes note of a look.
    pub fn ended(&mut self, outcome: &Outcome, now: Instant) -> Next {
        self.calm_down(now);
        match outcome {
            Outcome::AsPlanned => {
                self.tries = 0;
                let report = self.said.take().map(|_| (Report::Recovered, false));
                Next { report, ..Next::default() }
            }
            Outcome::Healed { .. } => self.healed(now),
            // What others have done is theirs to undo; the kernel tells when they do.
            Outcome::Interference(_) => Next { report: self.failed(INTERFERENCE, now), ..Next::default() },
            Outcome::Failed(trouble) => {
                let report = self.failed(trouble.reason, now);
                self.tries = self.tries.saturating_add(1);
                let wait = Duration::from_secs(1 << (self.tries - 1).min(6)).min(LONGEST_WAIT);
                let retry = (self.tries < MOST_TRIES).then_some(wait);
                // Whoever fails is not asked more often because something changes there.
                Next { report, wait: wait.min(Duration::from_secs(1)), retry }
            }
            Outcome::Gone => Next::default(),
        }
    }

    fn healed(&mut self, now: Instant) -> Next {
        (self.tries, self.said) = (0, None);
        let wait = self.fight.put_right(now);
        let was_contested = self.is_contested();
        if wait.is_some() {
            self.contested = Some(now);
        }
        let report = match wait {
            None if was_contested => None,
            None => Some((Report::Healed, self.may_send(now))),
            Some(_) if was_contested => None,
            Some(wait) => Some((Report::Contested(wait), self.may_send(now))),
        };
        Next { report, wait: wait.unwrap_or_default(), retry: wait }
    }

    fn failed(&mut self, reason: &'static str, now: Instant) -> Option<(Report, bool)> {
        let is_new = self.said.replace(reason) != Some(reason);
        is_new.then(|| (Report::Failed, self.may_send(now)))
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
    use crate::repair::action::Trouble;

    fn healed() -> Outcome {
        Outcome::Healed { difference: "a rule is missing".into(), words: String::new() }
    }

    fn failed(reason: &'static str) -> Outcome {
        Outcome::Failed(Trouble::new(reason, "words"))
    }

    #[test]
    fn what_is_put_right_is_said_and_events_are_few() {
        let (mut record, start) = (Record::new(), Instant::now());
        let mut events = 0;
        for count in 0..20 {
            let next = record.ended(&healed(), start + count * Duration::from_secs(200));
            let Some((Report::Healed, event)) = next.report else { panic!("{next:?}") };
            assert_eq!((next.wait, next.retry), (Duration::ZERO, None));
            events += usize::from(event);
        }
        assert_eq!(events, MOST_EVENTS);
        let next = record.ended(&healed(), start + EVENT_PAUSE + Duration::from_secs(4000));
        assert_eq!(next.report, Some((Report::Healed, true)), "after a long while");
    }

    #[test]
    fn another_writer_is_answered_later_and_later_and_said_once() {
        let (mut record, mut now) = (Record::new(), Instant::now());
        let (mut contested, mut waited) = (0, Duration::ZERO);
        for count in 1..=100 {
            let next = record.ended(&healed(), now);
            assert_eq!(next.wait, next.retry.unwrap_or_default());
            contested += usize::from(matches!(next.report, Some((Report::Contested(_), true | false))));
            assert_eq!(record.is_contested(), count >= PATIENCE, "{count}");
            waited = next.wait;
            now += next.wait + Duration::from_millis(20);
        }
        assert_eq!((contested, waited), (1, LONGEST_WAIT));
        let calm = record.calm_at().expect("a fight");
        record.calm_down(calm);
        assert!(!record.is_contested());
        assert_eq!(
            record.ended(&healed(), calm + Duration::from_secs(1)).report.map(|(report, _)| report),
            Some(Report::Healed)
        );
    }

    #[test]
    fn what_does_not_work_is_tried_again_with_pauses_and_not_for_ever() {
        let (mut record, now) = (Record::new(), Instant::now());
        let first = record.ended(&failed("not_found"), now);
        assert_eq!(first.report, Some((Report::Failed, true)));
        let mut pauses = vec![first.retry];
        for _ in 0..11 {
            let next = record.ended(&failed("not_found"), now);
            assert_eq!(next.report, None, "said once");
            pauses.push(next.retry);
        }
        let pauses: Vec<u64> =
            pauses.into_iter().map(|pause| pause.map_or(0, |pause| pause.as_secs())).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60, 0, 0, 0]);
        assert_eq!(
            record.ended(&failed("not_applied"), now).report,
            Some((Report::Failed, true)),
            "another reason"
        );
        assert_eq!(record.ended(&Outcome::AsPlanned, now).report, Some((Report::Recovered, false)));
        assert_eq!(record.ended(&Outcome::AsPlanned, now), Next::default());
        assert_eq!(
            record.ended(&failed("not_found"), now).retry,
            Some(Duration::from_secs(1)),
            "it begins anew"
        );
    }

    #[test]
    fn rules_of_others_are_said_once_and_not_waited_for() {
        let (mut record, now) = (Record::new(), Instant::now());
        let look = Outcome::Interference("table ip theirs".into());
        let next = record.ended(&look, now);
        assert_eq!(
            (next.report, next.wait, next.retry),
            (Some((Report::Failed, true)), Duration::ZERO, None)
        );
        assert_eq!(record.ended(&look, now), Next::default());
    }
}
