//! When to try again.

use alloc::string::String;
use core::time::Duration;

/// The first pause, which doubles.
const SHORTEST: Duration = Duration::from_millis(5);
/// The longest pause between two tries.
pub const LONGEST: Duration = Duration::from_secs(5);

/// What failed, and when it is tried again.
#[derive(Debug, Clone)]
pub struct Retry {
    /// Why it failed.
    pub error: String,
    /// When it is due.
    pub due: Duration,
    pause: Duration,
}

impl Retry {
    /// After a failure at this time, and perhaps others before.
    pub fn after(before: Option<&Self>, error: String, now: Duration) -> Self {
        let pause = before.map_or(SHORTEST, |before| (before.pause * 2).min(LONGEST));
        Self { error, due: now + pause, pause }
    }
}
