//! Whether the machine could do more.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Over how long is looked. A test that has just been started needs a while to show what it takes.
const TURN: Duration = Duration::from_millis(100);
/// What part of the time the processors have nothing to do where one more test is started.
const IDLE: f64 = 0.25;

/// The machine's processors.
#[derive(Debug)]
pub struct Processors {
    /// Their number.
    pub number: usize,
    since: Instant,
    before: Option<Ticks>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    all: u64,
}

impl Processors {
    /// Those of this machine.
    pub fn new() -> Self {
        let number = thread::available_parallelism().map_or(1, usize::from);
        Self { number, since: Instant::now(), before: now() }
    }

    /// Whether they had nothing to do in a part of the time since this last said so, or was last asked after a turn.
    pub fn are_idle(&mut self) -> bool {
        if self.since.elapsed() < TURN {
            return false;
        }
        let now = now();
        let part = self.before.zip(now).map_or(0.0, |(before, now)| idle(before, now));
        (self.before, self.since) = (now, Instant::now());
        part > IDLE
    }

    /// After what time to look again.
    pub fn turn(&self) -> Duration {
        TURN.saturating_sub(self.since.elapsed()).max(Duration::from_millis(1))
    }
}

fn now() -> Option<Ticks> {
    ticks(&fs::read_to_string("/proc/stat").ok()?)
}

/// The first line of proc_stat(5): `cpu`, then user, nice, system, idle, iowait and more.
fn ticks(stat: &str) -> Option<Ticks> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let fields: Vec<u64> = fields.map(|field| field.parse().ok()).collect::<Option<_>>()?;
    Some(Ticks { idle: fields.get(3)? + fields.get(4)?, all: fields.iter().take(8).sum() })
}

#[expect(clippy::cast_precision_loss, reason = "a part")]
fn idle(before: Ticks, now: Ticks) -> f64 {
    let all = now.all.saturating_sub(before.all).max(1);
    now.idle.saturating_sub(before.idle) as f64 / all as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_work_is_told_from_work() {
        let before = ticks("cpu  10 0 10 100 5 0 0 0 9 0\ncpu0 1 2 3 4").expect("is read");
        assert_eq!(before, Ticks { idle: 105, all: 125 });
        let busy = ticks("cpu  20 0 10 100 5 0 0 0 9 0").expect("is read");
        let idle_half = ticks("cpu  15 0 10 103 7 0 0 0 9 0").expect("is read");
        assert!(idle(before, busy) < 0.01 && (idle(before, idle_half) - 0.5).abs() < 0.01);
        assert_eq!(ticks("intr 1"), None);
    }
}
