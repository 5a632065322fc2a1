//! Where lines go.

use crate::{InitError, LineFormat, LogEntry};
use std::{
    fs::File,
    io::{self, Write},
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

/// A place lines go to. What cannot be logged is lost: logging never fails the program.
pub trait Sink: Send + Sync {
    /// Takes one entry.
    fn write(&self, entry: &LogEntry);

    /// Sends what was held back to where it belongs.
    fn flush(&self) {}
}

/// A place named by the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogTarget {
    /// Standard error.
    Stderr,
    /// Standard output.
    Stdout,
    /// The end of this file; made where missing.
    File(PathBuf),
}

impl From<&str> for LogTarget {
    fn from(text: &str) -> Self {
        match text {
            "stderr" => Self::Stderr,
            "stdout" => Self::Stdout,
            path => Self::File(path.into()),
        }
    }
}

pub(crate) fn open(target: &LogTarget, format: LineFormat) -> Result<Box<dyn Sink>, InitError> {
    let writer: Box<dyn Write + Send> = match target {
        LogTarget::Stderr => Box::new(io::stderr()),
        LogTarget::Stdout => Box::new(io::stdout()),
        LogTarget::File(path) => Box::new(
            File::options()
                .create(true)
                .append(true)
                .open(path)
                .map_err(|error| InitError::Target { path: path.clone(), error })?,
        ),
    };
    Ok(Box::new(Lines { writer: Mutex::new(writer), format }))
}

struct Lines {
    writer: Mutex<Box<dyn Write + Send>>,
    format: LineFormat,
}

impl Sink for Lines {
    fn write(&self, entry: &LogEntry) {
        let line = entry.line(self.format) + "\n";
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        // One write per line, so that lines of processes that share a file do not mix.
        let _ = writer.write_all(line.as_bytes()).and_then(|()| writer.flush());
    }
}
