//! The one place where helper programs are started.
//!
//! Absolute paths, no shell, and none of the caller's environment. Programs are looked up in folders the caller names, or in the usual ones.

use crate::{lock::NetnsLock, pause::pause};
use std::{
    ffi::{OsStr, OsString},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// How long a helper program may take. The legacy variant waits for its lock, hence the length.
const PATIENCE: Duration = Duration::from_secs(45);
/// How many bytes are kept of what a helper program says about itself: its version, and why it failed.
const MOST_WORDS: usize = 64 * 1024;

/// Where helper programs are.
///
/// Most runs need none, so the folders are worked out only when one is looked for.
#[derive(Debug, Clone)]
pub struct Programs {
    /// In the form of a PATH variable.
    path: OsString,
    /// Searched after those of the path.
    usual: &'static [&'static str],
}

/// Where a system keeps its programs.
const USUAL: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Why a helper program did not do its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// It was not found.
    #[error("{program} is not in {folders}; install it (Debian: apt-get install {package})")]
    Missing {
        /// Its name.
        program: String,
        /// Where it was looked for.
        folders: String,
        /// The package that has it.
        package: &'static str,
    },
    /// It could not be started.
    #[error("cannot run {program}: {cause}", program = .program.display())]
    Start {
        /// Its path.
        program: PathBuf,
        /// What the kernel said.
        cause: io::Error,
    },
    /// It ran and failed.
    #[error("{program} failed ({status}): {message}", program = .program.display())]
    Failed {
        /// Its path.
        program: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote to standard error, in one line.
        message: String,
    },
    /// It did not end in time.
    #[error("{program} did not exit within {patience:?} and was killed", program = .program.display())]
    Hangs {
        /// Its path.
        program: PathBuf,
        /// How long it had.
        patience: Duration,
    },
    /// It printed more than the caller reads.
    #[error("{program} printed more than {most} bytes and was killed", program = .program.display())]
    TooMuch {
        /// Its path.
        program: PathBuf,
        /// How many bytes the caller reads.
        most: usize,
    },
}

impl ExecError {
    /// Whether the error says something about the machine rather than about this moment: the program is not there, or
    /// it ran and failed.
    pub(crate) const fn is_lasting(&self) -> bool {
        matches!(self, Self::Missing { .. } | Self::Failed { .. })
    }
}

impl Programs {
    /// Searches these folders, in the form of a PATH variable; the usual system folders follow.
    #[must_use]
    pub fn in_path(path: &OsStr) -> Self {
        Self { path: path.to_owned(), usual: &USUAL }
    }

    /// Searches the usual system folders.
    #[must_use]
    pub fn usual() -> Self {
        Self { path: OsString::new(), usual: &USUAL }
    }

    /// Searches these folders, in the form of a PATH variable, and no others.
    #[must_use]
    pub fn only_in(path: &OsStr) -> Self {
        Self { path: path.to_owned(), usual: &[] }
    }

    /// Where to search, in order.
    fn folders(&self) -> impl Iterator<Item = PathBuf> {
        let given = || std::env::split_paths(&self.path).filter(|folder| folder.is_absolute());
        let usual = self.usual.iter().map(PathBuf::from);
        given().chain(usual.filter(move |folder| given().all(|other| other != *folder)))
    }

    /// The path of a program.
    pub(crate) fn find(&self, name: &str) -> Option<PathBuf> {
        self.folders().map(|folder| folder.join(name)).find(|path| path.is_file())
    }

    /// The error for a program that was not found.
    pub(crate) fn missing(&self, program: &str, package: &'static str) -> ExecError {
        let folders: Vec<String> = self.folders().map(|folder| folder.display().to_string()).collect();
        ExecError::Missing { program: program.to_owned(), folders: folders.join(":"), package }
    }
}

/// Runs a program that only reads, and returns what it prints. If that is more than `most` bytes, the program is killed and nothing
/// is returned.
pub(crate) fn read(program: &Path, args: &[&str], most: usize) -> Result<String, ExecError> {
    let mut command = command(program, args);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    finish(program, command, "", most)
}

/// The version of a program, in its own words.
pub(crate) fn version(program: &Path) -> Result<String, ExecError> {
    read(program, &["--version"], MOST_WORDS)
}

/// Runs a program that changes the namespace, with `input` on its standard input; the program holds the lock while it runs.
pub(crate) fn write(program: &Path, args: &[&str], input: &str, lock: &NetnsLock) -> Result<(), ExecError> {
    let stdout = lock.inherit().map_err(|cause| ExecError::Start { program: program.to_owned(), cause })?;
    let mut command = command(program, args);
    command.stdin(Stdio::piped()).stdout(stdout);
    finish(program, command, input, MOST_WORDS).map(drop)
}

fn command(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env_clear().env("LC_ALL", "C").stderr(Stdio::piped());
    // The legacy variant locks a file of the node, for which hundreds of pods may wait. We hold a lock on the
    // namespace, so any file that no other program locks will do: this one is different for every process.
    command.env("XTABLES_LOCKFILE", "/proc/self/limits");
    command
}

/// Starts a program, and feeds, drains and waits at the same time, so that none of them blocks another.
fn finish(program: &Path, mut command: Command, input: &str, most: usize) -> Result<String, ExecError> {
    let not_started = |cause| ExecError::Start { program: program.to_owned(), cause };
    let mut child = command.spawn().map_err(not_started)?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let feed = move || {
        // A program that ends without reading everything says why on standard error.
        let _ = stdin.map(|mut stdin| stdin.write_all(input.as_bytes()));
    };
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let helper = || thread::Builder::new().name("helper".to_owned());
        let threads = (|| {
            helper().spawn_scoped(scope, feed)?;
            let stdout = helper().spawn_scoped(scope, move || read_all(stdout, most, is_over))?;
            Ok((stdout, helper().spawn_scoped(scope, move || drain(stderr))?))
        })();
        let (stdout, stderr) = match threads {
            Ok(threads) => threads,
            Err(cause) => {
                // Without its threads the program would wait for ever. It has done nothing beyond what it was fed.
                let _ = child.kill().and_then(|()| child.wait());
                return Err(not_started(cause));
            }
        };
        let status = wait(program, &mut child, is_over).inspect_err(|_| {
            // Its threads end when it does.
            let _ = child.kill().and_then(|()| child.wait());
        })?;
        let (stdout, stderr) = (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
        if is_over.load(Ordering::Relaxed) {
            return Err(ExecError::TooMuch { program: program.to_owned(), most });
        }
        if status.success() {
            return Ok(stdout);
        }
        let message =
            stderr.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
        Err(ExecError::Failed { program: program.to_owned(), status, message })
    })
}

/// What a program prints, up to `most` bytes; sets `is_over` as soon as it prints more.
fn read_all(stream: Option<impl Read>, most: usize, is_over: &AtomicBool) -> String {
    let mut bytes = Vec::new();
    let one_more = u64::try_from(most).unwrap_or(u64::MAX).saturating_add(1);
    // What cannot be read counts as not written.
    let _ = stream.map(|stream| {
        let read = stream.take(one_more).read_to_end(&mut bytes);
        is_over.store(bytes.len() > most, Ordering::Relaxed);
        read
    });
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The beginning of what a program writes to standard error. The rest is read, too: a program that changes something is not to fail over its
/// words.
fn drain(stream: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    let _ = stream.map(|mut stream| {
        stream.by_ref().take(MOST_WORDS as u64).read_to_end(&mut bytes)?;
        io::copy(&mut stream, &mut io::sink())
    });
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits until a program ends, but not for ever; kills it when it has printed too much.
fn wait(program: &Path, child: &mut Child, is_over: &AtomicBool) -> Result<ExitStatus, ExecError> {
    let error = |cause| ExecError::Start { program: program.to_owned(), cause };
    let deadline = Instant::now() + PATIENCE;
    let mut interval = Duration::from_micros(200);
    loop {
        // Read the clock first: a program that ended while the machine stood still has ended in time.
        let is_late = Instant::now() >= deadline;
        if let Some(status) = child.try_wait().map_err(error)? {
            return Ok(status);
        }
        if is_over.load(Ordering::Relaxed) {
            return child.kill().and_then(|()| child.wait()).map_err(error);
        }
        if is_late {
            child.kill().and_then(|()| child.wait()).map_err(error)?;
            return Err(ExecError::Hangs { program: program.to_owned(), patience: PATIENCE });
        }
        pause(interval);
        interval = (interval * 2).min(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_carry_what_the_program_said() {
        let error = read(Path::new("/bin/sh"), &["-c", "echo no >&2; exit 3"], 0).unwrap_err();
        assert!(error.to_string().contains("/bin/sh failed (exit status: 3): no"), "{error}");
    }

    #[test]
    fn programs_start_with_an_empty_environment() {
        let text = read(Path::new("/usr/bin/env"), &[], 1000).unwrap();
        assert_eq!(text, "LC_ALL=C\nXTABLES_LOCKFILE=/proc/self/limits\n");
    }

    /// One that prints for ever would never end, and ignores that its reader is gone.
    #[test]
    fn a_program_that_prints_too_much_is_killed() {
        let shell = |script, most| read(Path::new("/bin/sh"), &["-c", script], most);
        for script in ["exec yes", "trap '' PIPE; while :; do echo y; done", "printf 0123456789"] {
            let error = shell(script, 9).unwrap_err();
            assert!(matches!(&error, ExecError::TooMuch { most: 9, .. }), "{script}: {error}");
            assert_eq!(error.to_string(), "/bin/sh printed more than 9 bytes and was killed");
            assert!(!error.is_lasting(), "the program works");
        }
        assert_eq!(shell("printf 0123456789", 10).unwrap(), "0123456789");
    }

    #[test]
    fn a_long_complaint_is_cut() {
        let script = "head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 3";
        let error = read(Path::new("/bin/sh"), &["-c", script], 0).unwrap_err();
        let ExecError::Failed { message, .. } = error else { panic!("{error}") };
        assert_eq!(message.len(), MOST_WORDS);
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let programs = Programs::only_in(OsStr::new("/nowhere"));
        assert_eq!(programs.find("iptables"), None);
        let text = programs.missing("iptables-nft-restore", "iptables").to_string();
        assert_eq!(
            text,
            "iptables-nft-restore is not in /nowhere; install it (Debian: apt-get install iptables)"
        );
    }
}
