//! How soon a pod is checked again after a check. Pure: time comes from outside.
//!
//! A container with CAP_NET_ADMIN can change something a thousand times a second. It should be checked soon, and not a thousand times.

use std::time::{Duration, Instant};

/// The pause after a check, usually.
const USUAL: Duration = Duration::from_millis(10);
/// The pause after a check of a pod that was checked too often: with it, the agent still restores deleted rules within a second.
const LONG: Duration = Duration::from_millis(500);
/// How many checks may follow each other with the usual pause. One of them comes back with every long pause, so that two checks follow each of these.
const BURST: u32 = 20;

/// A check that takes longer has met more rules than usual: the pod gets a tenth of the time at most.
const DEAR: Duration = Duration::from_millis(100);
const SHARE: u32 = 9;
const LONGEST: Duration = Duration::from_secs(30);

/// The pauses after checks at one pod.
#[derive(Debug, Default)]
pub struct RecheckBackoff {
    /// When all checks that were made will be forgotten.
    paid: Option<Instant>,
}

impl RecheckBackoff {
    /// How long to pause after a check that has just ended, and took so long.
    pub fn checked(&mut self, now: Instant, took: Duration) -> Duration {
        let share = if took > DEAR { (took * SHARE).min(LONGEST) } else { Duration::ZERO };
        self.counted(now).max(share)
    }

    fn counted(&mut self, now: Instant) -> Duration {
        let paid = self.paid.map_or(now, |paid| paid.max(now)) + LONG;
        self.paid = Some(paid.min(now + LONG * BURST));
        if paid.duration_since(now) < LONG * BURST { USUAL } else { LONG }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_millis(3);

    #[test]
    fn a_pod_whose_checks_are_dear_gets_a_tenth_of_the_time() {
        let (now, pause) = (Instant::now(), |took| RecheckBackoff::default().checked(Instant::now(), took));
        assert_eq!(
            (RecheckBackoff::default().checked(now, DEAR), pause(DEAR * 2)),
            (USUAL, DEAR * 2 * SHARE)
        );
        assert_eq!(pause(Duration::from_secs(60)), LONGEST);
    }

    #[test]
    fn a_pod_that_always_changes_is_checked_four_times_a_second() {
        let (mut backoff, start) = (RecheckBackoff::default(), Instant::now());
        let (mut now, mut checks) = (start, 0);
        while now < start + Duration::from_secs(60) {
            now += Duration::from_millis(3) + backoff.checked(now, QUICK);
            checks += 1;
        }
        assert!((200..280).contains(&checks), "{checks}");
    }

    #[test]
    fn rare_changes_are_checked_at_once() {
        let (mut backoff, start) = (RecheckBackoff::default(), Instant::now());
        // A pod that is repaired is checked twice.
        let moments = (1..1000_u32).map(|count| start + Duration::from_millis(u64::from(count) * 1001 / 2));
        assert!(moments.map(|moment| backoff.checked(moment, QUICK)).all(|pause| pause == USUAL));
    }

    #[test]
    fn a_pod_that_was_quiet_for_a_while_starts_again() {
        let (mut backoff, mut now) = (RecheckBackoff::default(), Instant::now());
        for _ in 0..100 {
            let _ = backoff.checked(now, QUICK);
        }
        assert_eq!(backoff.checked(now, QUICK), LONG);
        now += LONG * BURST;
        let burst = (0..BURST - 1).map(|_| backoff.checked(now, QUICK));
        assert!(burst.into_iter().all(|pause| pause == USUAL));
        assert_eq!(backoff.checked(now, QUICK), LONG);
    }
}
