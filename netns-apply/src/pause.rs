//! Waiting, in ways that cannot panic.

use nix::poll::{PollTimeout, poll};
use std::{
    fs, thread,
    time::{Duration, Instant},
};

/// How long a packet may take through the hooks, where the kernel cannot be asked to wait for it.
const GRACE: Duration = Duration::from_millis(100);

/// When a patience that begins now ends. One that is too long for the clock counts as a year, because adding it would panic.
pub(crate) fn deadline(patience: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(patience).unwrap_or_else(|| now + YEAR)
}

/// Sleeps for this long. `std::thread::sleep` panics where the system call is refused.
pub(crate) fn pause(time: Duration) {
    let until = Instant::now() + time;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        if poll(&mut [], timeout).is_err() {
            thread::yield_now();
        }
    }
}

/// Waits until every packet that is on its way has left the hook it is at.
///
/// The kernel handles packets within RCU read-side critical sections, and membarrier(2)'s command GLOBAL waits for all of
/// those. It does so only on more than one processor, and not on kernels without periodic ticks (`nohz_full`); there we
/// wait a fixed time.
pub(crate) fn grace() {
    let waited =
        has_processors() && rustix::thread::membarrier(rustix::thread::MembarrierCommand::Global).is_ok();
    if !waited {
        pause(GRACE);
    }
}

/// Whether more than one processor is online: `0` is one, `0-3` and `0,2` are more.
fn has_processors() -> bool {
    fs::read_to_string("/sys/devices/system/cpu/online").is_ok_and(|list| list.contains(['-', ',']))
}
