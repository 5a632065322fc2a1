//! A program's system calls: noted, or made to fail, by strace(1).

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

use test_support::process;

/// Runs a program and what it starts under `strace`.
#[derive(Debug)]
pub struct Strace {
    trace: NamedTempFile,
    words: Vec<String>,
}

impl Strace {
    /// Notes these system calls, in the words of `strace -e trace=`, of the program and of what it starts.
    pub fn noting(calls: &str) -> Result<Self> {
        let trace = NamedTempFile::new()?;
        let mut words = ["strace", "-f", "-qq", "-yy", "-e", "signal=none"].map(str::to_owned).to_vec();
        words.extend(["-e".to_owned(), format!("trace={calls}")]);
        words.extend(["-o".to_owned(), trace.path().display().to_string()]);
        Ok(Self { trace, words })
    }

    /// Only of the program itself, not of what it starts.
    #[must_use]
    pub fn alone(mut self) -> Self {
        self.words.retain(|word| word != "-f");
        self
    }

    /// Only calls on these files and directories.
    #[must_use]
    pub fn on(mut self, paths: &[PathBuf]) -> Self {
        self.words.extend(paths.iter().flat_map(|path| ["-P".to_owned(), path.display().to_string()]));
        self
    }

    /// With numbers in the place of names.
    #[must_use]
    pub fn raw(mut self) -> Self {
        self.words.extend(["-X", "raw"].map(str::to_owned));
        self
    }

    /// Beside the program, not around it: the program is the caller's own child, and goes on when strace is killed.
    #[must_use]
    pub fn beside(mut self) -> Self {
        self.words.insert(1, "-D".to_owned());
        self
    }

    /// Tampers with calls, in the words of `strace -e inject=`. Each process and thread counts its own.
    #[must_use]
    pub fn tampering(mut self, fault: &str) -> Self {
        self.words.extend(["-e".to_owned(), format!("inject={fault}")]);
        self
    }

    /// What comes before a command.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// `command`, under it.
    pub fn command(&self, command: &Command) -> Command {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        process::prefixed(&words, command)
    }

    /// What it has noted.
    pub fn trace(&self) -> Result<String> {
        fs::read_to_string(self.trace.path()).context("cannot read the trace")
    }

    /// The calls that it has noted.
    pub fn calls(&self) -> Result<Vec<Call>> {
        Ok(calls(&self.trace()?))
    }
}

/// One system call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The process or thread that made it; 0 if it is the only one.
    pub process: u32,
    /// Its name.
    pub name: String,
    /// How many calls of this name the process had made, with this one.
    pub nth: usize,
    /// Its arguments and its result, as far as they are known when it begins.
    pub text: String,
}

/// Parses what `strace -f -o` writes: process, name, arguments.
fn calls(trace: &str) -> Vec<Call> {
    let mut counts: HashMap<(u32, String), usize> = HashMap::new();
    let mut found = Vec::new();
    for line in trace.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (process, rest) = first.parse().map_or((0, line), |process| (process, rest.trim_start()));
        let Some((name, text)) = rest.split_once('(') else { continue };
        // Ends of calls that were interrupted by other threads, signals, exits.
        if name.is_empty() || !name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_') {
            continue;
        }
        let nth = counts.entry((process, name.to_owned())).or_default();
        *nth += 1;
        found.push(Call { process, name: name.to_owned(), nth: *nth, text: text.to_owned() });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_process_and_name() {
        let trace = "7  execve(\"a\", [\"a\"], 0x1) = 0\n7  clone3({flags=CLONE_VM}, 88 <unfinished ...>\n8  sendto(3, [x], 1) = 1\n\
                     7  <... clone3 resumed>) = 8\n7  sendto(3, [y], 1) = 1\n7  sendto(3, [z], 1) = 1\n8  +++ exited with 0 +++\n";
        let seen: Vec<_> = calls(trace).into_iter().map(|call| (call.process, call.name, call.nth)).collect();
        let want = [(7, "execve", 1), (7, "clone3", 1), (8, "sendto", 1), (7, "sendto", 1), (7, "sendto", 2)];
        assert_eq!(seen, want.map(|(process, name, nth)| (process, name.to_owned(), nth)));
        assert_eq!(calls("sendto(3, [x], 1) = 1\n")[0].process, 0);
    }
}
