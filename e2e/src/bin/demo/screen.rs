//! What the demo prints, and its count of what was checked.

use std::io::{Stdout, Write};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use test_support::process::Output;

use crate::interrupt::Interrupt;

/// Where a line's second column begins.
const COLUMN: usize = 58;

/// Numbered steps and checked lines on standard output.
#[derive(Debug)]
pub(crate) struct Screen {
    out: Stdout,
    interrupt: Interrupt,
    steps: u32,
    passed: u32,
    failed: u32,
}

impl Screen {
    pub(crate) fn new(out: Stdout, interrupt: Interrupt) -> Self {
        Self { out, interrupt, steps: 0, passed: 0, failed: 0 }
    }

    /// A part of the demo begins.
    pub(crate) fn part(&mut self, title: &str) -> Result<()> {
        Ok(writeln!(self.out, "\n=== {title}")?)
    }

    /// The next step begins.
    pub(crate) fn step(&mut self, title: &str) -> Result<()> {
        self.interrupt.check()?;
        self.steps += 1;
        Ok(writeln!(self.out, "\n{}. {title}", self.steps)?)
    }

    /// Something to know. Nothing is claimed that would have to be checked.
    pub(crate) fn note(&mut self, text: &str) -> Result<()> {
        for line in text.lines() {
            writeln!(self.out, "   {line}")?;
        }
        Ok(())
    }

    /// A command line as a person would type it, and what it logged.
    pub(crate) fn command(&mut self, typed: &str, output: &Output) -> Result<()> {
        writeln!(self.out, "   # {typed}")?;
        self.note(output.stderr.trim_end())
    }

    /// Something that was checked: what was found, whether that is right, and what should be there.
    pub(crate) fn check(&mut self, what: &str, found: &str, is_right: bool, wanted: &str) -> Result<()> {
        let mark = if is_right {
            self.passed += 1;
            "✓".to_owned()
        } else {
            self.failed += 1;
            format!("✗ expected {wanted}")
        };
        writeln!(self.out, "   {what:COLUMN$} {found}  {mark}")?;
        self.interrupt.check()
    }

    /// The last line. Whether everything was as expected.
    pub(crate) fn end(&mut self, took: Duration) -> Result<bool> {
        let Self { passed, failed, .. } = *self;
        let verdict = if failed == 0 { "as expected" } else { "NOT as expected" };
        let counts = if failed == 0 {
            format!("all {passed} checks")
        } else {
            format!("{failed} of {} checks", passed + failed)
        };
        writeln!(self.out, "\n{counts} were {verdict}, in {:.1} seconds.", took.as_secs_f64())?;
        Ok(failed == 0)
    }
}

/// A command line as a person would type it: the program by its name alone, words quoted where a shell would want it.
pub(crate) fn typed(command: &Command) -> String {
    let program = command.get_program().to_string_lossy();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    let args = command.get_args().map(|arg| quoted(&arg.to_string_lossy()));
    std::iter::once(program).chain(args).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "-_=/.,:".contains(character);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{word}'") }
}
