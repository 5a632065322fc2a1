//! How soon a pod is looked at again after a look. Pure: time comes from outside.
//!
//! A container with CAP_NET_ADMIN can change something a thousand times a second. It is to be looked at soon, and not a thousand times.

use std::time::{Duration, Instant};

/// The first pause after a look.
const FIRST: Duration = Duration::from_millis(10);
/// The longest: with it, what is deleted is still back within a second.
const LONGEST: Duration = Duration::from_millis(500);
/// Who was looked at no more for so long begins anew.
const QUIET: Duration = Duration::from_secs(2);

/// The pauses after looks at one pod.
#[derive(Debug, Default)]
pub struct Pace {
    last: Option<Instant>,
    pause: Duration,
}

impl Pace {
    /// How long to pause after a look that has just ended.
    pub fn looked(&mut self, now: Instant) -> Duration {
        let is_quiet = self.last.is_none_or(|last| now.duration_since(last) > QUIET);
        self.last = Some(now);
        self.pause = if is_quiet { FIRST } else { (self.pause * 2).min(LONGEST) };
        self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_changes_something_all_the_time_is_looked_at_twice_a_second() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let (mut now, mut looks) = (start, 0);
        while now < start + Duration::from_secs(60) {
            now += Duration::from_millis(3) + pace.looked(now);
            looks += 1;
        }
        assert!((120..130).contains(&looks), "{looks}");
    }

    #[test]
    fn rare_changes_are_looked_at_at_once() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let pauses = (1..100).map(|count| pace.looked(start + count * Duration::from_secs(3)));
        assert!(pauses.into_iter().all(|pause| pause == FIRST));
    }
}
