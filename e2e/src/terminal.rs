//! A terminal of this machine (pty(7)): what a program writes to it, its keys and its size.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::pty::{Winsize, openpty};

use test_support::process::{self, Killed, until};

/// A terminal. What programs write to it is read all the time.
#[derive(Debug)]
pub struct Terminal {
    keys: File,
    line: OwnedFd,
    written: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Terminal {
    /// One with so many columns and lines.
    pub fn new(columns: u16, lines: u16) -> Result<Self> {
        let size = Winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(Some(&size), None).context("cannot make a terminal")?;
        let mut screen = File::from(pair.master.try_clone()?);
        let written = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&written);
        // It ends when the last program and this value have closed the other end.
        let reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = screen.read(&mut buffer) {
                shared.lock().unwrap_or_else(PoisonError::into_inner).extend(&buffer[..length]);
            }
        });
        Ok(Self { keys: File::from(pair.master), line: pair.slave, written, reader })
    }

    /// Starts a program whose terminal this is.
    pub fn start(&self, command: &Command) -> Result<Program> {
        let mut command =
            process::prefixed(&["setpriv", "--pdeathsig", "KILL", "--", "setsid", "--ctty", "--"], command);
        command.stdin(self.end()?).stdout(self.end()?).stderr(self.end()?);
        let shown = process::command_line(&command);
        let child = command.spawn().with_context(|| format!("cannot start {shown}"))?;
        Ok(Program { child: Mutex::new(Killed(child)) })
    }

    /// Everything that was written to it until now.
    pub fn written(&self) -> String {
        let bytes = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// All that was written, once no program has the terminal any more.
    pub fn to_the_end(self) -> Result<String> {
        let Self { keys, line, written, reader } = self;
        drop(line);
        ensure!(reader.join().is_ok(), "the terminal's reader failed");
        drop(keys);
        let bytes = written.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Presses keys.
    pub fn press(&self, keys: &str) -> Result<()> {
        Ok((&self.keys).write_all(keys.as_bytes())?)
    }

    /// Makes it larger or smaller. stty changes one after the other, so a program that draws at once may be seen to draw a screen in between.
    pub fn resize(&self, columns: u16, lines: u16) -> Result<()> {
        self.stty(&["columns", &columns.to_string(), "rows", &lines.to_string()]).map(drop)
    }

    /// How it is set, in the words of stty(1).
    pub fn settings(&self) -> Result<String> {
        self.stty(&["--save"])
    }

    fn stty(&self, words: &[&str]) -> Result<String> {
        let output = process::command("stty", words).stdin(self.end()?).output()?;
        ensure!(output.status.success(), "stty {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn end(&self) -> Result<Stdio> {
        Ok(self.line.try_clone()?.into())
    }
}

/// A program on a terminal; killed when the value is dropped.
#[derive(Debug)]
pub struct Program {
    child: Mutex<Killed>,
}

impl Program {
    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).id()
    }

    /// Waits for its end.
    pub fn wait(&self, deadline: Duration) -> Result<ExitStatus> {
        until("the program on the terminal to end", deadline, &[], || {
            Ok(self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()?)
        })
    }
}

/// Text without the sequences that colour it or move the cursor.
pub fn plain(text: &str) -> String {
    let mut rest = text;
    let mut plain = String::new();
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        plain += before;
        let end = after.find(|letter: char| ('@'..='~').contains(&letter)).map_or(after.len(), |at| at + 1);
        rest = &after[end..];
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::process::SHORT;

    #[test]
    fn a_program_sees_a_terminal_of_the_size_it_was_given() {
        let terminal = Terminal::new(71, 19).expect("a terminal");
        let program = terminal.start(&process::command("stty", ["size"])).expect("starts");
        assert!(program.wait(SHORT).expect("ends").success());
        terminal.resize(40, 10).expect("resizes");
        let size = terminal.stty(&["size"]).expect("asks");
        assert_eq!(size, "10 40\n");
        assert_eq!(terminal.to_the_end().expect("ends"), "19 71\r\n");
    }

    #[test]
    fn what_is_not_shown_is_taken_out() {
        assert_eq!(plain("\u{1b}[?1049h\u{1b}[31mred\u{1b}[0m\u{1b}[K."), "red.");
    }
}
