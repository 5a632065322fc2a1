//! When to try again.

use core::time::Duration;

use super::PodState;

/// The first pause, which doubles.
const SHORTEST: Duration = Duration::from_millis(5);
/// The longest pause between two tries.
pub const LONGEST: Duration = Duration::from_secs(5);

/// How a pod's last add failed, and when the next one is due.
#[derive(Debug, Clone)]
pub struct AddRetry {
    /// What is reported of the pod.
    pub state: PodState,
    /// When it is due.
    pub due: Duration,
    pause: Duration,
}

impl AddRetry {
    /// After a failure at this time, and perhaps others before.
    pub fn after(before: Option<&Self>, state: PodState, now: Duration) -> Self {
        let pause = before.map_or(SHORTEST, |before| (before.pause * 2).min(LONGEST));
        Self { state, due: now + pause, pause }
    }
}
