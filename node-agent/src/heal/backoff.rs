//! How soon a pod is looked at again after a look. Pure: time comes from outside.
//!
//! A container with CAP_NET_ADMIN can change something a thousand times a second. It is to be looked at soon, and not a thousand times.

use std::time::{Duration, Instant};

/// The pause after a look, usually.
const USUAL: Duration = Duration::from_millis(10);
/// The pause after a look at a pod that was looked at too often: with it, what is deleted is still back within a second.
const LONG: Duration = Duration::from_millis(500);
/// How many checks may follow each other with the usual pause. One of them comes back with every long pause, so that two checks follow each of these.
const BURST: u32 = 20;

/// The pauses after checks at one pod.
#[derive(Debug, Default)]
pub struct RecheckBackoff {
    /// When all checks that were made will be forgotten.
    paid: Option<Instant>,
}

impl RecheckBackoff {
    /// How long to pause after a look that has just ended.
    pub fn checked(&mut self, now: Instant) -> Duration {
        let paid = self.paid.map_or(now, |paid| paid.max(now)) + LONG;
        self.paid = Some(paid.min(now + LONG * BURST));
        if paid.duration_since(now) < LONG * BURST { USUAL } else { LONG }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_changes_something_all_the_time_is_looked_at_four_times_a_second() {
        let (mut backoff, start) = (RecheckBackoff::default(), Instant::now());
        let (mut now, mut checks) = (start, 0);
        while now < start + Duration::from_secs(60) {
            now += Duration::from_millis(3) + backoff.checked(now);
            checks += 1;
        }
        assert!((200..280).contains(&checks), "{checks}");
    }

    #[test]
    fn rare_changes_are_looked_at_at_once() {
        let (mut backoff, start) = (RecheckBackoff::default(), Instant::now());
        // What is mended is looked at twice.
        let moments = (1..1000_u32).map(|count| start + Duration::from_millis(u64::from(count) * 1001 / 2));
        assert!(moments.map(|moment| backoff.checked(moment)).all(|pause| pause == USUAL));
    }

    #[test]
    fn who_was_quiet_for_a_while_begins_anew() {
        let (mut backoff, mut now) = (RecheckBackoff::default(), Instant::now());
        for _ in 0..100 {
            let _ = backoff.checked(now);
        }
        assert_eq!(backoff.checked(now), LONG);
        now += LONG * BURST;
        let burst = (0..BURST - 1).map(|_| backoff.checked(now));
        assert!(burst.into_iter().all(|pause| pause == USUAL));
        assert_eq!(backoff.checked(now), LONG);
    }
}
