//! Nodes to check, each once, and when. Has a limit. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// How many may wait.
pub const MOST: usize = 10_000;

/// Nodes, by when they are due.
#[derive(Debug, Default)]
pub struct NodeQueue {
    due: BTreeMap<String, Instant>,
    order: BTreeSet<(Instant, String)>,
    left_out: Option<String>,
}

impl NodeQueue {
    /// Puts a node in; one that is in already is due at the earlier of both times. False where it did not fit.
    pub fn put(&mut self, name: &str, at: Instant) -> bool {
        let old = self.due.get(name).copied();
        if old.is_none() && self.due.len() >= MOST {
            if self.left_out.as_deref().is_none_or(|first| name < first) {
                self.left_out = Some(name.to_owned());
            }
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

    /// The first by name of those that did not fit since this was asked last.
    pub fn take_left_out(&mut self) -> Option<String> {
        self.left_out.take()
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// Whether it is empty.
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
        let (mut queue, now) = (NodeQueue::default(), Instant::now());
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
        let (mut queue, now) = (NodeQueue::default(), Instant::now());
        assert!((0..MOST).all(|number| queue.put(&number.to_string(), now)));
        assert_eq!(queue.take_left_out(), None);
        assert!(queue.put("7", now), "it is in already");
        assert!(!queue.put("one-more", now) && !queue.put("another", now) && !queue.put("zero", now));
        assert_eq!((queue.take_left_out(), queue.take_left_out()), (Some("another".to_owned()), None));
        assert_eq!(queue.len(), MOST);
    }

    #[test]
    fn however_many_do_not_fit_each_has_its_turn_once() {
        let (mut queue, now) = (NodeQueue::default(), Instant::now());
        let names: Vec<String> = (0..2 * MOST + 7).map(|number| format!("node-{number:06}")).collect();
        let (mut looked_at, mut from) = (Vec::new(), Some(String::new()));
        while let Some(first) = from {
            for name in names.iter().filter(|name| **name >= first) {
                queue.put(name, now);
            }
            looked_at.extend(std::iter::from_fn(|| queue.take(now)).map(|(name, _)| name));
            from = queue.take_left_out();
        }
        assert_eq!(looked_at, names);
    }
}
