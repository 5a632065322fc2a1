//! Tests that try again, and why. The causes are a closed set, and each time one is met it is noted: `scripts/test.sh` prints them all
//! at its end.
//!
//! A test may only try again what never succeeds where the code is broken.

use crate::program::target_folder;
use anyhow::{Context, Result, bail};
use std::{
    fmt,
    fs::OpenOptions,
    io::Write as _,
    path::{Path, PathBuf},
    thread,
};

/// The file in the target folder that has a line for each retry: the test, the cause, what had failed.
pub const FILE: &str = "retries.txt";

/// Why a test tries again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// What is tested gives something a few seconds, and the machine stood still in them.
    Standstill,
    /// A datagram got lost, which the network may do: no sender repeats it.
    LostDatagram,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Standstill => "the machine stood still in a window of seconds",
            Self::LostDatagram => "a datagram got lost",
        })
    }
}

/// Plays a scenario that has to meet a moment: again until it succeeds, or has failed `times` times. Only for what never succeeds where the
/// code is broken.
pub fn once_in<T>(times: usize, cause: Cause, mut scenario: impl FnMut() -> Result<T>) -> Result<T> {
    let mut failures = Vec::new();
    while failures.len() < times {
        match scenario() {
            Ok(done) => return Ok(done),
            Err(error) => failures.push(format!("{error:#}")),
        }
        if failures.len() < times {
            note(cause, failures.last().map_or("", String::as_str))?;
        }
    }
    bail!("failed {times} times:\n{}", failures.join("\n"))
}

/// Notes that a test tries again.
pub fn note(cause: Cause, failed: &str) -> Result<()> {
    note_in(&target_folder()?, cause, failed)
}

fn note_in(folder: &Path, cause: Cause, failed: &str) -> Result<()> {
    let path: PathBuf = folder.join(FILE);
    let thread = thread::current();
    let failed = failed.split_whitespace().collect::<Vec<_>>().join(" ");
    let failed: String = failed.chars().take(200).collect();
    let line = format!("{}: {cause}: {failed}\n", thread.name().unwrap_or("a thread of a test"));
    let file = OpenOptions::new().create(true).append(true).open(&path);
    // One call of write: lines of other processes are before it or behind it.
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .with_context(|| format!("cannot note a retry in {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_retry_is_a_line_with_its_cause() -> Result<()> {
        let folder = tempfile::tempdir()?;
        note_in(folder.path(), Cause::Standstill, "no\nanswer")?;
        note_in(folder.path(), Cause::LostDatagram, &"x".repeat(1000))?;
        let text = std::fs::read_to_string(folder.path().join(FILE))?;
        let lines: Vec<&str> = text.lines().collect();
        let [first, second] = lines[..] else { bail!("{text}") };
        assert_eq!(
            first,
            "retries::tests::each_retry_is_a_line_with_its_cause: the machine stood still in a window of seconds: no answer"
        );
        assert!(second.ends_with(&"x".repeat(200)) && second.contains(": a datagram got lost: "), "{second}");
        Ok(())
    }

    #[test]
    fn what_succeeds_at_once_is_no_retry_and_what_never_does_is_a_failure() {
        let mut tries = 0;
        assert!(once_in(1, Cause::Standstill, || Ok(())).is_ok());
        let failed: Result<()> = once_in(1, Cause::Standstill, || {
            tries += 1;
            bail!("no")
        });
        assert_eq!((failed.is_err(), tries), (true, 1));
    }
}
