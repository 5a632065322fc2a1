//! Whether the machine could do more.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Over how long is looked. A test that has just been started needs a while to show what it takes.
const TURN: Duration = Duration::from_millis(100);
/// More tests are started where processors have nothing to do in more than one part of so many.
const IDLE: usize = 4;

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
    idle: usize,
    all: usize,
}

impl Processors {
    /// Those of this machine.
    pub fn new() -> Self {
        let number = thread::available_parallelism().map_or(1, usize::from);
        Self { number, since: Instant::now(), before: now() }
    }

    /// How many tests to let run where so many do: more, once a turn, while the processors have nothing to do in a part of the time.
    pub fn room(&mut self, running: usize) -> usize {
        if self.since.elapsed() < TURN {
            return running;
        }
        let now = now();
        let room = self.before.zip(now).map_or(running, |(before, now)| room(running, before, now));
        (self.before, self.since) = (now, Instant::now());
        room
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
    let fields: Vec<usize> = fields.map(|field| field.parse().ok()).collect::<Option<_>>()?;
    Some(Ticks { idle: fields.get(3)? + fields.get(4)?, all: fields.iter().take(8).sum() })
}

/// The longer nothing was done, the more are added at once, as short tests have ended before the next turn; half of what would fill the processors, as
/// others have only begun.
fn room(running: usize, before: Ticks, now: Ticks) -> usize {
    let idle = now.idle.saturating_sub(before.idle);
    let all = now.all.saturating_sub(before.all).max(1);
    if idle * IDLE > all { running + (running * idle).div_ceil(2 * all) } else { running }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_without_work_are_given_some_at_once() {
        let before = ticks("cpu  10 0 10 100 5 0 0 0 9 0\ncpu0 1 2 3 4").expect("is read");
        assert_eq!(before, Ticks { idle: 105, all: 125 });
        let after = |stat| room(6, before, ticks(stat).expect("is read"));
        assert_eq!(after("cpu  20 0 10 100 5 0 0 0 9 0"), 6);
        assert_eq!(after("cpu  18 0 10 102 5 0 0 0 9 0"), 6);
        assert_eq!(after("cpu  15 0 10 103 7 0 0 0 9 0"), 8);
        assert_eq!(after("cpu  10 0 10 110 5 0 0 0 9 0"), 9);
        assert_eq!(ticks("intr 1"), None);
    }
}
