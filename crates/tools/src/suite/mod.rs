//! Runs the tests that cargo has built, each in a process of its own, and says what each one cost.
//!
//! ```text
//! cargo test --no-run --message-format=json >BUILT
//! run-tests BUILT [--only PROGRAM] [--early PROGRAM] [--at-most N PREFIX] [--record FILE] [FILTER]...
//! ```
//!
//! A program of unit tests is one process: its tests share nothing but the processor, and take milliseconds. Of every other test program
//! each test is a process. So all of them share one list, a test that hangs or dies fails alone, and the kernel knows what each one took.
//! As many run at once as keep the processors busy: three for each of them in any case, and 24 at most. `--early` names a
//! program whose tests mostly wait, and should not be what is waited for in the end. `--at-most` limits the
//! tests whose `PROGRAM::PATH` begins so: those that take turns at something anyway. What tests leave mounted is a failure.

mod built;
mod cost;
mod job;
mod mounts;
mod processors;
mod report;
mod running;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, Result, bail};

use built::Program;
use job::Job;
use mounts::Mounts;
use processors::Processors;
use report::Report;

/// How many tests run at once for each processor, also where something else keeps the machine busy.
const AT_LEAST: usize = 3;
/// How many run at once at most.
const AT_MOST: usize = 24;

/// What the command line says.
#[derive(Debug, Default)]
struct Asked {
    built: PathBuf,
    only: Option<String>,
    early: Option<String>,
    /// The most that run at once of the tests whose names begin so.
    at_most: (usize, String),
    record: Option<PathBuf>,
    filters: Vec<String>,
}

/// The program `run-tests`.
pub fn main() -> Result<ExitCode> {
    running::end_all_on_signals()?;
    let asked = Asked::read(std::env::args().skip(1))?;
    let programs = built::programs(&asked.built)?;
    let programs = programs.into_iter().filter(|program| asked.wants(program));
    let of = |program: Program| {
        Ok((job::of(&program, &asked.filters)?, asked.early.as_ref() == Some(&program.name)))
    };
    let mut jobs = job::interleaved(programs.map(of).collect::<Result<_>>()?);
    if jobs.is_empty() {
        bail!("no test has such a name");
    }
    if let Some(record) = &asked.record {
        job::longest_first(&mut jobs, record);
    }
    let before = Mounts::now()?;
    let mut report = run(jobs, &asked);
    report.left_mounted = Mounts::now()?.more_than(&before);
    report.close(asked.record.as_deref())?;
    Ok(if report.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs all of them: more at a time while processors have nothing to do, because many tests mostly wait.
fn run(jobs: Vec<Job>, asked: &Asked) -> Report {
    let (most, prefix) = &asked.at_most;
    let (limited, others): (Vec<_>, Vec<_>) =
        jobs.into_iter().partition(|job| *most > 0 && job.name.starts_with(prefix));
    let (mut limited, mut others) = (VecDeque::from(limited), VecDeque::from(others));
    let (mut report, mut processors) = (Report::default(), Processors::new());
    let (mut running, mut limited_running) = (0, 0);
    let (send, ended) = mpsc::channel();
    thread::scope(|scope| {
        let start = |job: Job, is_limited: bool| {
            let send = send.clone();
            scope.spawn(move || send.send((job.run(), is_limited)));
        };
        while running > 0 || !limited.is_empty() || !others.is_empty() {
            while limited_running < *most
                && let Some(job) = limited.pop_front()
            {
                limited_running += 1;
                running += 1;
                start(job, true);
            }
            let wanted = processors.room(running).min(AT_MOST).max(processors.number * AT_LEAST);
            for job in others.drain(..others.len().min(wanted.saturating_sub(running))) {
                running += 1;
                start(job, false);
            }
            if let Ok((job, is_limited)) = ended.recv_timeout(processors.turn()) {
                running -= 1;
                limited_running -= usize::from(is_limited);
                report.add(job);
            }
        }
    });
    report
}

fn number(option: &str, text: &str) -> Result<usize> {
    text.parse().with_context(|| format!("{option} {text:?} is not a number"))
}

impl Asked {
    fn read(mut words: impl Iterator<Item = String>) -> Result<Self> {
        let built = words.next().context("which file has the messages of cargo?")?.into();
        let mut asked = Self { built, ..Self::default() };
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} takes a value"));
            match &*word {
                "--only" => asked.only = Some(value()?),
                "--early" => asked.early = Some(value()?),
                "--at-most" => asked.at_most = (number(&word, &value()?)?, value()?),
                "--record" => asked.record = Some(value()?.into()),
                _ if word.starts_with('-') => bail!("{word} is not an option"),
                _ => asked.filters.push(word),
            }
        }
        Ok(asked)
    }

    fn wants(&self, program: &Program) -> bool {
        self.only.as_ref().is_none_or(|only| *only == program.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(words: &[&str]) -> Result<Asked> {
        Asked::read(words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn a_command_line_that_says_nothing_is_refused() {
        for (words, what) in [
            (&[][..], "which file"),
            (&["built", "--at-most"], "--at-most takes a value"),
            (&["built", "--at-most", "two"], "\"two\""),
            (&["built", "--job", "2"], "--job is not an option"),
        ] {
            let error = asked(words).expect_err("is refused").to_string();
            assert!(error.contains(what), "{words:?}: {error}");
        }
    }

    #[test]
    fn what_is_left_out_is_not_run() {
        let program = |name: &str| Program { name: name.to_owned(), ..Program::default() };
        let all = asked(&["built", "--early", "agent"]).expect("is read");
        assert!(all.wants(&program("agent")) && all.wants(&program("cluster")));
        let one = asked(&["built", "--only", "cluster", "redirect_"]).expect("is read");
        assert!(!one.wants(&program("agent")) && one.wants(&program("cluster")));
        assert_eq!(one.filters, ["redirect_"]);
    }
}
