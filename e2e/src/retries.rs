//! Tests that try again, for one reason: what is tested gives something a few seconds, and the machine stood still in them. Each time is noted:
//! `scripts/test.sh` prints them all at its end.
//!
//! A test may only try again what never succeeds where the code is broken.

use crate::program::target_folder;
use anyhow::{Context, Result, bail};
use std::{
    fmt,
    fs::{self, OpenOptions},
    io::Write as _,
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// The file in the target folder that has a line for each retry: the test, and what had failed.
pub const FILE: &str = "retries.txt";

/// Plays a scenario that has to meet a moment: again until it succeeds, or has failed `times` times. Only for what never succeeds where the
/// code is broken, and only while the machine is too slow for it: where nothing had to wait, the first failure is the last.
pub fn once_in<T>(times: usize, scenario: impl FnMut() -> Result<T>) -> Result<T> {
    tried(times, scenario, |waited, failed| {
        if waited.is_standstill() {
            note(&target_folder()?, failed)?;
        }
        Ok(waited.is_standstill())
    })
}

/// Tries until it succeeds, has failed `times` times, or `goes_on` refuses, which sees what the machine did in a failed try.
fn tried<T>(
    times: usize,
    mut scenario: impl FnMut() -> Result<T>,
    goes_on: impl Fn(&Waited, &str) -> Result<bool>,
) -> Result<T> {
    let mut failures = Vec::new();
    loop {
        let watch = Watch::start();
        let failed = match scenario() {
            Ok(done) => return Ok(done),
            Err(error) => format!("{error:#}"),
        };
        let waited = watch.end();
        let failed = format!("{failed} ({waited})");
        let is_last = failures.len() + 1 >= times || !goes_on(&waited, &failed)?;
        failures.push(failed);
        if is_last {
            bail!("failed {} times:\n{}", failures.len(), failures.join("\n"))
        }
    }
}

/// Notices when the machine stands still: a thread that only sleeps, and the kernel's count of tasks that had to wait for a processor.
struct Watch {
    ends: mpsc::Sender<()>,
    sleeper: JoinHandle<Duration>,
    pressure: Option<Duration>,
}

/// How long the machine kept work waiting.
struct Waited {
    /// The longest time by which a thread woke up late.
    late: Duration,
    /// For how long some task was ready to run and no processor was free; none from a kernel that does not count it.
    pressure: Option<Duration>,
}

impl Watch {
    fn start() -> Self {
        /// Short beside any moment that a scenario has to meet.
        const NAP: Duration = Duration::from_millis(20);
        let (ends, ended) = mpsc::channel();
        let sleeper = thread::spawn(move || {
            let mut late = Duration::ZERO;
            loop {
                let slept = Instant::now();
                if ended.recv_timeout(NAP) != Err(RecvTimeoutError::Timeout) {
                    return late;
                }
                late = late.max(slept.elapsed().saturating_sub(NAP));
            }
        });
        Self { ends, sleeper, pressure: pressure() }
    }

    fn end(self) -> Waited {
        drop(self.ends);
        let late = self.sleeper.join().unwrap_or_default();
        let pressure = pressure().zip(self.pressure).map(|(now, then)| now.saturating_sub(then));
        Waited { late, pressure }
    }
}

impl Waited {
    /// Moments to meet are seconds: a quarter of one is not lost on a machine that has time.
    fn is_standstill(&self) -> bool {
        const LOST: Duration = Duration::from_millis(250);
        self.late >= LOST || self.pressure.is_some_and(|waited| waited >= LOST)
    }
}

impl fmt::Display for Waited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a thread woke up {} ms late", self.late.as_millis())?;
        match self.pressure {
            Some(waited) => write!(f, ", tasks waited for a processor for {} ms", waited.as_millis()),
            None => Ok(()),
        }
    }
}

/// For how long, since the machine started, some task has waited for a processor (Documentation/accounting/psi.rst).
fn pressure() -> Option<Duration> {
    let text = fs::read_to_string("/proc/pressure/cpu").ok()?;
    let total = text.lines().next()?.rsplit_once("total=")?.1;
    Some(Duration::from_micros(total.parse().ok()?))
}

/// Notes that a test tries again.
fn note(folder: &Path, failed: &str) -> Result<()> {
    let path: PathBuf = folder.join(FILE);
    let thread = thread::current();
    let failed = failed.split_whitespace().collect::<Vec<_>>().join(" ");
    let failed: String = failed.chars().take(200).collect();
    let line = format!("{}: {failed}\n", thread.name().unwrap_or("a thread of a test"));
    let file = OpenOptions::new().create(true).append(true).open(&path);
    // One call of write: lines of other processes are before it or behind it.
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .with_context(|| format!("cannot note a retry in {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::ensure;

    #[test]
    fn each_retry_is_a_line() -> Result<()> {
        let folder = tempfile::tempdir()?;
        note(folder.path(), "no\nanswer")?;
        note(folder.path(), &"x".repeat(1000))?;
        let text = std::fs::read_to_string(folder.path().join(FILE))?;
        let lines: Vec<&str> = text.lines().collect();
        let [first, second] = lines[..] else { bail!("{text}") };
        assert_eq!(first, "retries::tests::each_retry_is_a_line: no answer");
        assert!(second.ends_with(&format!(": {}", "x".repeat(200))), "{second}");
        Ok(())
    }

    #[test]
    fn only_what_failed_on_a_machine_that_stood_still_is_tried_again() {
        let tries = |stood_still: bool, fails: usize| {
            let mut tries = 0;
            let scenario = || {
                tries += 1;
                ensure!(tries > fails, "no");
                Ok(())
            };
            let done = tried(3, scenario, |_, _| Ok(stood_still));
            (done.is_ok(), tries)
        };
        assert_eq!(tries(true, 0), (true, 1));
        assert_eq!(tries(false, 1), (false, 1));
        assert_eq!(tries(true, 1), (true, 2));
        assert_eq!(tries(true, 3), (false, 3));
    }

    #[test]
    fn only_a_machine_that_kept_work_waiting_stood_still() {
        let waited = |late, pressure: Option<u64>| Waited {
            late: Duration::from_millis(late),
            pressure: pressure.map(Duration::from_millis),
        };
        for (one, stood_still) in [
            (waited(0, None), false),
            (waited(249, Some(249)), false),
            (waited(250, None), true),
            (waited(1, Some(250)), true),
        ] {
            assert_eq!(one.is_standstill(), stood_still, "{one}");
        }
    }
}
