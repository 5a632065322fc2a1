//! A clock that no one sets, and that a machine's sleep does not stop.

use std::ops::Add;
use std::time::Duration;

use nix::time::ClockId;

/// A moment by `CLOCK_BOOTTIME`: `SystemTime` can be set, and `Instant` stands still while the machine sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    /// This moment.
    ///
    /// # Panics
    /// As `Instant::now` does: the kernel has no such clock, which all have since Linux 2.6.39.
    #[must_use]
    pub fn now() -> Self {
        Self(ClockId::CLOCK_BOOTTIME.now().expect("CLOCK_BOOTTIME").into())
    }

    /// How long after `earlier` this is; zero if it is not.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for BootTime {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const SLEPT: Duration = Duration::from_secs(1_000_000);
    const INSIDE: &str = "BOOT_TIME_INSIDE";

    /// A time namespace moves the clock as a sleep does: it goes ahead of the one of `Instant`.
    #[test]
    fn it_counts_the_time_that_a_machine_sleeps() {
        let start = BootTime::now();
        if std::env::var_os(INSIDE).is_some() {
            println!("now={}", start.0.as_secs());
            return;
        }
        let this = std::env::current_exe().expect("a path");
        let seconds = SLEPT.as_secs().to_string();
        let inside = Command::new("unshare")
            .args(["--user", "--map-root-user", "--time", "--boottime", &seconds, "--fork"])
            .arg(this)
            .args(["--nocapture", "--exact", "boot_time::tests::it_counts_the_time_that_a_machine_sleeps"])
            .env(INSIDE, "1")
            .output()
            .expect("unshare");
        let output = String::from_utf8_lossy(&inside.stdout);
        let now = output.split_once("now=").and_then(|(_, rest)| rest.lines().next()?.parse().ok());
        let now = BootTime(Duration::from_secs(now.unwrap_or_else(|| panic!("{inside:?}"))))
            + Duration::from_secs(1);
        assert!(
            now.since(start) >= SLEPT && now.since(BootTime::now()) <= SLEPT + Duration::from_secs(1),
            "{now:?} {start:?}"
        );
        assert_eq!(start.since(now), Duration::ZERO);
    }
}
