//! One log line when something begins to fail, one when it works again; and growing pauses in between.

use std::fmt::Display;
use std::time::{Duration, Instant};

use cluster_client::Backoff;
use log::{Level, Record};

use crate::SCOPE;

/// The pauses after an API server that does not respond.
pub const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The longest of them.
pub const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// Logs an outage once.
#[derive(Debug)]
pub struct OutageLog {
    /// When it began, if it has.
    since: Option<Instant>,
    cannot: String,
    again: String,
}

impl OutageLog {
    /// The two lines: `cannot … : error` and `… again`.
    pub fn new(cannot: impl Into<String>, again: impl Into<String>) -> Self {
        Self { since: None, cannot: cannot.into(), again: again.into() }
    }

    /// Warns at the first failure; the others are for debugging.
    pub fn failed(&mut self, error: &dyn Display, keys: &[(&str, &str)]) {
        let cannot = &self.cannot;
        if self.since.is_none() {
            self.since = Some(Instant::now());
            write(Level::Warn, &format!("{cannot}: {error}"), keys);
        } else {
            write(Level::Debug, &format!("still {cannot}: {error}"), keys);
        }
    }

    /// Logs the end of an outage, with its length.
    pub fn worked(&mut self) {
        if let Some(since) = self.since.take() {
            log::info!(target: SCOPE, seconds = since.elapsed().as_secs(); "{}", self.again);
        }
    }
}

/// The macros of `log` take keys only where they are written out.
fn write(level: Level, text: &str, keys: &[(&str, &str)]) {
    if log::log_enabled!(target: SCOPE, level) {
        let mut record = Record::builder();
        record.level(level).target(SCOPE).key_values(&keys);
        log::logger().log(&record.args(format_args!("{text}")).build());
    }
}

/// The pauses between attempts that go on for ever, with the log of their outages.
#[derive(Debug)]
pub struct OutageRetry {
    pauses: Backoff,
    log: OutageLog,
}

impl OutageRetry {
    /// With the lines of [`OutageLog::new`].
    pub fn new(cannot: impl Into<String>, again: impl Into<String>) -> Self {
        Self { pauses: Backoff::new(FIRST_RETRY, LONGEST_RETRY), log: OutageLog::new(cannot, again) }
    }

    /// The same with another longest pause.
    #[must_use]
    pub fn longest(self, longest: Duration) -> Self {
        Self { pauses: Backoff::new(FIRST_RETRY, longest), ..self }
    }

    /// An attempt works.
    pub fn worked(&mut self) {
        self.log.worked();
    }

    /// The pause after an attempt that ended well: an API server that ends each watch at once is not asked all the time.
    pub fn after_success(&mut self) -> Duration {
        self.pauses.reset();
        self.pauses.pause(None)
    }

    /// The pause after an attempt that failed.
    pub fn after_failure(&mut self, error: &dyn Display, retry_after: Option<Duration>) -> Duration {
        self.log.failed(error, &[]);
        self.pauses.pause(retry_after)
    }

    /// The pause after an attempt whose failure is not an outage.
    pub fn quiet_pause(&mut self) -> Duration {
        self.pauses.pause(None)
    }

    /// The next pause is the first one again.
    pub const fn reset(&mut self) {
        self.pauses.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_begins_with_its_first_failure_and_ends_with_the_first_success() {
        let mut log = OutageLog::new("cannot list pods", "lists pods again");
        log.worked();
        assert_eq!(log.since, None);
        log.failed(&"refused", &[]);
        let began = log.since;
        assert!(began.is_some());
        log.failed(&"refused", &[]);
        assert_eq!(log.since, began, "a second failure is the same outage");
        log.worked();
        assert_eq!(log.since, None);
        log.failed(&"refused", &[]);
        assert!(log.since.is_some());
    }
}
