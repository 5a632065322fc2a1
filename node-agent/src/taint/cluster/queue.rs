//! Nodes that are to be looked at, each once, and when. Has a limit. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// How many may wait.
pub const MOST: usize = 10_000;

/// Nodes, by when they are due.
#[derive(Debug, Default)]
pub struct Queue {
    due: BTreeMap<String, Instant>,
    order: BTreeSet<(Instant, String)>,
    overflowed: bool,
}

impl Queue {
    /// Puts a node in; one that is in already is due at the earlier of both times. False where it did not fit.
    pub fn put(&mut self, name: &str, at: Instant) -> bool {
        let old = self.due.get(name).copied();
        if old.is_none() && self.due.len() >= MOST {
            self.overflowed = true;
            return false;
        }
        if let Some(old) = old {
            if old <= at {
                return true;
            }
            self.order.remove(&(old, name.to_owned()));
        }
        self.due.insert(name.to_owned(), at);
        self.order.insert((at, name.to_owned()));
        true
    }

    /// When the next one is due.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Takes one that is due, and since when it is.
    pub fn take(&mut self, now: Instant) -> Option<(String, Instant)> {
        if self.next()? > now {
            return None;
        }
        let (at, name) = self.order.pop_first()?;
        self.due.remove(&name);
        Some((name, at))
    }

    /// Whether some did not fit since this was asked last.
    pub fn take_overflowed(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn each_is_in_it_once_and_the_earlier_time_counts() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        for (name, seconds) in [("a", 5), ("b", 3), ("a", 1), ("b", 9)] {
            assert!(queue.put(name, at(seconds)));
        }
        assert_eq!((queue.len(), queue.next()), (2, Some(at(1))));
        assert_eq!(queue.take(now), None);
        assert_eq!(queue.take(at(9)), Some(("a".to_owned(), at(1))));
        assert_eq!(queue.take(at(9)), Some(("b".to_owned(), at(3))));
        assert!(queue.take(at(9)).is_none() && queue.is_empty() && queue.order.is_empty());
    }

    #[test]
    fn what_does_not_fit_is_remembered_as_such() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        assert!((0..MOST).all(|number| queue.put(&number.to_string(), now)));
        assert!(!queue.take_overflowed());
        assert!(queue.put("7", now), "it is in already");
        assert!(!queue.put("one-more", now));
        assert!(queue.take_overflowed() && !queue.take_overflowed());
        assert_eq!(queue.len(), MOST);
    }
}
