//! One line about something that fails repeatedly.

use std::time::{Duration, Instant};

/// Whether something fails now, and since when. Says what is new and keeps quiet about the rest.
#[derive(Debug, Default)]
pub struct Outage(Option<Instant>);

impl Outage {
    /// Notes a failure; true if it is the first since all was well.
    pub fn begins(&mut self, now: Instant) -> bool {
        let is_new = self.0.is_none();
        self.0.get_or_insert(now);
        is_new
    }

    /// Notes a success; how long it did not work, if it did not.
    pub fn ends(&mut self, now: Instant) -> Option<Duration> {
        self.0.take().map(|since| now.duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_one_line_at_its_beginning_and_one_at_its_end() {
        let (mut outage, start) = (Outage::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(outage.ends(at(0)), None);
        assert_eq!([1, 2, 3].map(|seconds| outage.begins(at(seconds))), [true, false, false]);
        assert_eq!(outage.ends(at(9)), Some(Duration::from_secs(8)));
        assert_eq!(outage.ends(at(10)), None);
        assert!(outage.begins(at(11)));
    }
}
