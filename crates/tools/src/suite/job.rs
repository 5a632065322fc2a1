//! One test in a process of its own, or one program of unit tests.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, pidfd_open};

use super::built::Program;
use super::cost::Cost;
use super::running;

/// A test that hangs is killed and named after this time: long before CI gives up on all of them.
const LONGEST: Duration = Duration::from_secs(1200);

/// What is run.
#[derive(Clone, Debug)]
pub struct Job {
    /// `PROGRAM::PATH` of a test, or a program's name.
    pub name: String,
    program: PathBuf,
    folder: PathBuf,
    words: Vec<String>,
    /// How many tests it has.
    tests: usize,
}

/// What came of it.
#[derive(Debug)]
pub struct Ended {
    /// The job's name.
    pub name: String,
    /// Tests that passed.
    pub passed: usize,
    /// Tests that failed, or never ended.
    pub failed: usize,
    /// What it took.
    pub cost: Cost,
    /// What it printed.
    pub output: String,
}

/// The jobs of a program: those of its tests whose names contain one of the filters, and that are not ignored.
pub fn of(program: &Program, filters: &[String]) -> Result<Vec<Job>> {
    let mut list = Command::new(&program.path);
    list.current_dir(&program.folder).args(["--list", "--format", "terse"]).args(filters);
    let listed = |command: &mut Command| -> Result<Vec<String>> {
        let output = command.output().with_context(|| format!("cannot run {}", program.path.display()))?;
        ensure!(output.status.success(), "{} does not list its tests", program.path.display());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    };
    let mut tests = listed(&mut list)?;
    let ignored = listed(list.arg("--ignored"))?;
    tests.retain(|test| !ignored.contains(test));
    let job = |name: String, words: Vec<String>, tests: usize| Job {
        name,
        program: program.path.clone(),
        folder: program.folder.clone(),
        words,
        tests,
    };
    if program.has_unit_tests {
        let count = tests.len();
        return Ok(if count == 0 {
            Vec::new()
        } else {
            vec![job(program.name.clone(), filters.to_vec(), count)]
        });
    }
    let one = |test: String| job(format!("{}::{test}", program.name), vec!["--exact".to_owned(), test], 1);
    Ok(tests.into_iter().map(one).collect())
}

/// The jobs of all programs, each program's spread over the whole list, or over its first half: what mostly waits runs beside what computes.
pub fn interleaved(programs: Vec<(Vec<Job>, bool)>) -> Vec<Job> {
    let placed = programs.into_iter().flat_map(|(jobs, is_early)| {
        // In millionths of the list, each in the middle of its share.
        let share = if is_early { 500_000 } else { 1_000_000 } / jobs.len().max(1);
        jobs.into_iter().enumerate().map(move |(index, job)| (share * index + share / 2, job))
    });
    let mut placed: Vec<_> = placed.collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, job)| job).collect()
}

/// Begins with what took longest the last time: so that nothing long is left when all else is done. What is new comes first.
pub fn longest_first(jobs: &mut [Job], record: &Path) {
    let text = fs::read_to_string(record).unwrap_or_default();
    let known: HashMap<&str, f64> = text
        .lines()
        .filter_map(|line| {
            let (wall, rest) = line.split_once('\t')?;
            Some((rest.split_once('\t')?.1, wall.parse().ok()?))
        })
        .collect();
    let last = |job: &Job| known.get(&*job.name).copied().unwrap_or(f64::MAX);
    jobs.sort_by(|one, other| last(other).total_cmp(&last(one)));
}

impl Job {
    /// Runs it to its end.
    pub fn run(self) -> Ended {
        let start = Instant::now();
        let (passed, cost, output) =
            self.output().unwrap_or_else(|error| (false, Cost::default(), format!("{error:#}\n")));
        let all_pass = passed && closing(&output, " passed") == Some(self.tests);
        let failed = if all_pass { 0 } else { closing(&output, " failed").unwrap_or(1).max(1) };
        Ended {
            name: self.name,
            passed: self.tests.saturating_sub(failed),
            failed,
            cost: Cost { wall: start.elapsed(), ..cost },
            output,
        }
    }

    fn output(&self) -> Result<(bool, Cost, String)> {
        let mut log = tempfile::tempfile().context("no file for its output")?;
        let (mut child, group) = self.start(&log)?;
        let has_ended = wait(&child, LONGEST)?;
        if !has_ended {
            running::end(group);
        }
        // A process that has ended and was not waited for still says what it took, and its children that it waited for.
        let cost = if has_ended { Cost::of(child.id())? } else { Cost::default() };
        let status = child.wait()?;
        // Processes that it left running.
        running::end(group);
        let mut output = Vec::new();
        log.rewind()?;
        log.read_to_end(&mut output)?;
        let mut output = String::from_utf8_lossy(&output).into_owned();
        if !has_ended {
            output +=
                &format!("\nit did not end within {} minutes, and was killed\n", LONGEST.as_secs() / 60);
        }
        Ok((status.success(), cost, output))
    }

    fn start(&self, log: &File) -> Result<(Child, Pid)> {
        let mut command = Command::new(&self.program);
        command.args(&self.words).current_dir(&self.folder).process_group(0);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
        // Cargo's word for where a test's own files are.
        command.env("CARGO_MANIFEST_DIR", &self.folder);
        running::start(&mut command)
    }
}

/// Waits until a child has ended, without taking its end away. Whether it did.
fn wait(child: &Child, limit: Duration) -> Result<bool> {
    // Pidfds are readable when the process has ended (pidfd_open(2)).
    let process = pidfd_open(rustix::process::Pid::from_child(child), PidfdFlags::empty())?;
    let limit = Timespec::try_from(limit)?;
    Ok(poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit))? > 0)
}

/// The number before a word in a program's last line: of `test result: ok. 12 passed; 0 failed; ...`.
fn closing(output: &str, what: &str) -> Option<usize> {
    let line = output.lines().rev().find_map(|line| line.strip_prefix("test result: "))?;
    let before = &line[..line.find(what)?];
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn job(name: &str, words: Vec<String>, tests: usize) -> Job {
        Job { name: name.to_owned(), program: "/bin/sh".into(), folder: "/".into(), words, tests }
    }

    fn shell(script: &str, tests: usize) -> Ended {
        job("a test", vec!["-c".to_owned(), script.to_owned()], tests).run()
    }

    #[test]
    fn no_program_comes_all_at_once_where_nothing_is_known_of_its_tests() {
        let of = |names: &str, is_early| {
            (names.split_whitespace().map(|name| job(name, Vec::new(), 1)).collect(), is_early)
        };
        let names = |jobs: &[Job]| jobs.iter().map(|job| job.name.clone()).collect::<Vec<_>>().join(" ");
        let programs = [of("a1 a2 a3 a4 a5 a6", false), of("", false), of("b1", false), of("c1 c2", true)];
        let mut jobs = interleaved(programs.into());
        assert_eq!(names(&jobs), "a1 c1 a2 c2 a3 b1 a4 a5 a6");
        longest_first(&mut jobs, Path::new("/nowhere"));
        assert_eq!(names(&jobs), "a1 c1 a2 c2 a3 b1 a4 a5 a6");
    }

    #[test]
    fn what_a_program_says_counts_only_if_all_its_tests_ran() {
        let ok = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored'";
        assert_eq!((shell(ok, 2).passed, shell(ok, 2).failed), (2, 0));
        // Its end was another than it said.
        assert_eq!(shell(&format!("{ok}; exit 1"), 2).failed, 1);
        // It ended before its tests did.
        assert_eq!(shell("true", 2).failed, 1);
        assert_eq!(shell(ok, 3).failed, 1);
        let three = "echo 'test result: FAILED. 4 passed; 3 failed; 0 ignored'; exit 101";
        assert_eq!((shell(three, 7).passed, shell(three, 7).failed), (4, 3));
    }

    #[test]
    fn a_test_that_dies_fails_with_what_it_had_printed() {
        let ended = shell("echo before; kill -SEGV $$", 1);
        assert_eq!((ended.failed, &*ended.output), (1, "before\n"));
    }

    #[test]
    fn what_its_children_took_counts() {
        let ended = shell("i=0; (while [ $i -lt 300000 ]; do i=$((i+1)); done); true", 1);
        assert!(ended.cost.processor > Duration::from_millis(20), "{:?}", ended.cost);
    }

    #[test]
    fn what_it_leaves_running_is_ended() {
        let ended = shell("sleep 1000 & echo $!", 1);
        let left: i32 = ended.output.trim().parse().expect("a process");
        let gone = || {
            std::fs::read_to_string(format!("/proc/{left}/stat")).map_or(true, |stat| stat.contains(") Z "))
        };
        let start = Instant::now();
        while !gone() {
            assert!(start.elapsed() < Duration::from_secs(60), "{left} lives");
            thread::yield_now();
        }
    }
}
