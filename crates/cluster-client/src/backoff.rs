//! How long to wait before asking again.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    time::Duration,
};

/// Limit on a server's requested delay: a proxy in front of one may ask for an hour.
const LONGEST_WISH: Duration = Duration::from_secs(10);

/// Pauses that double up to a longest one. Up to a half is taken off each at random, so that many who failed together do not come back
/// together; and none is shorter than the server asks for.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
    random: fn() -> f64,
}

impl Backoff {
    /// From the first to the longest.
    #[must_use]
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self::with_random(first, longest, random)
    }

    /// The same with another source of numbers from 0 to 1.
    #[must_use]
    pub const fn with_random(first: Duration, longest: Duration, random: fn() -> f64) -> Self {
        Self { first, longest, next: first, random }
    }

    /// The next pause, where the server may have said when to come back.
    pub fn pause(&mut self, retry_after: Option<Duration>) -> Duration {
        let pause = self.next.mul_f64(1.0 - (self.random)() / 2.0);
        self.next = (self.next * 2).min(self.longest);
        pause.max(retry_after.unwrap_or_default().min(LONGEST_WISH))
    }

    /// Resets the delay after a success.
    pub const fn reset(&mut self) {
        self.next = self.first;
    }
}

/// A number from 0 to 1, another one in every process and at every call.
#[must_use]
pub fn random() -> f64 {
    // The keys are the kernel's random bytes; one more for every call.
    let bits = RandomState::new().build_hasher().finish();
    f64::from(u32::try_from(bits >> 32).unwrap_or_default()) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew() {
        let mut pauses = Backoff::with_random(SECOND, 5 * SECOND, || 0.0);
        let seconds: Vec<u64> = (0..5).map(|_| pauses.pause(None).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 5, 5]);
        pauses.reset();
        assert_eq!(pauses.pause(None), SECOND);
    }

    #[test]
    fn the_servers_wish_counts_within_reason() {
        let mut pauses = Backoff::with_random(SECOND, SECOND, || 1.0);
        assert_eq!(pauses.pause(None), SECOND / 2);
        assert_eq!(pauses.pause(Some(3 * SECOND)), 3 * SECOND);
        assert_eq!(pauses.pause(Some(3600 * SECOND)), LONGEST_WISH);
    }

    #[test]
    fn pauses_of_many_are_not_the_same() {
        let numbers: Vec<f64> = (0..64).map(|_| random()).collect();
        assert!(numbers.iter().all(|number| (0.0..=1.0).contains(number)), "{numbers:?}");
        let low = numbers.iter().filter(|number| **number < 0.5).count();
        assert!((8..56).contains(&low), "{numbers:?}");
    }
}
