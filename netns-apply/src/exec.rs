//! The one place where helper programs are started.
//!
//! Absolute paths, no shell, and none of the caller's environment. Programs are looked up in folders the caller names, or in the usual ones.

use crate::{lock::NetnsLock, pause::pause};
use std::{
    ffi::{OsStr, OsString},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How long a helper program may take. The legacy variant waits for its lock, hence the length.
const PATIENCE: Duration = Duration::from_secs(45);

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
    #[error("{program} has not ended after {patience:?} and was killed", program = .program.display())]
    Hangs {
        /// Its path.
        program: PathBuf,
        /// How long it had.
        patience: Duration,
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

/// Runs a program that only reads, and returns what it prints.
pub(crate) fn read(program: &Path, args: &[&str]) -> Result<String, ExecError> {
    let mut command = command(program, args);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    finish(program, start(program, &mut command)?, "")
}

/// Runs a program that changes the namespace, with `input` on its standard input; the program holds the lock while it runs.
pub(crate) fn write(program: &Path, args: &[&str], input: &str, lock: &NetnsLock) -> Result<(), ExecError> {
    let stdout = lock.inherit().map_err(|cause| ExecError::Start { program: program.to_owned(), cause })?;
    let mut command = command(program, args);
    command.stdin(Stdio::piped()).stdout(stdout);
    finish(program, start(program, &mut command)?, input).map(drop)
}

fn command(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env_clear().env("LC_ALL", "C").stderr(Stdio::piped());
    // The legacy variant locks a file of the node, for which hundreds of pods may wait. We hold a lock on the
    // namespace, so any file that nobody else locks will do: this one is different for every process.
    command.env("XTABLES_LOCKFILE", "/proc/self/limits");
    command
}

fn start(program: &Path, command: &mut Command) -> Result<Child, ExecError> {
    command.spawn().map_err(|cause| ExecError::Start { program: program.to_owned(), cause })
}

/// Feeds, drains and waits at the same time, so that none of them blocks another.
fn finish(program: &Path, mut child: Child, input: &str) -> Result<String, ExecError> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let feed = move || {
        // A program that ends without reading everything says why on standard error.
        let _ = stdin.map(|mut stdin| stdin.write_all(input.as_bytes()));
    };
    thread::scope(|scope| {
        let helper = || thread::Builder::new().name("helper".to_owned());
        let threads = (|| {
            helper().spawn_scoped(scope, feed)?;
            let stdout = helper().spawn_scoped(scope, move || drain(stdout))?;
            Ok((stdout, helper().spawn_scoped(scope, move || drain(stderr))?))
        })();
        let (stdout, stderr) = match threads {
            Ok(threads) => threads,
            Err(cause) => {
                // Without its threads the program would wait for ever. It has done nothing beyond what it was fed.
                let _ = child.kill().and_then(|()| child.wait());
                return Err(ExecError::Start { program: program.to_owned(), cause });
            }
        };
        let status = wait(program, &mut child).inspect_err(|_| {
            // Its threads end when it does.
            let _ = child.kill().and_then(|()| child.wait());
        })?;
        let (stdout, stderr) = (stdout.join().unwrap_or_default(), stderr.join().unwrap_or_default());
        if status.success() {
            return Ok(stdout);
        }
        let message =
            stderr.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
        Err(ExecError::Failed { program: program.to_owned(), status, message })
    })
}

fn drain(stream: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    // What cannot be read counts as not written.
    let _ = stream.map(|mut stream| stream.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

fn wait(program: &Path, child: &mut Child) -> Result<ExitStatus, ExecError> {
    let error = |cause| ExecError::Start { program: program.to_owned(), cause };
    let deadline = Instant::now() + PATIENCE;
    let mut interval = Duration::from_micros(200);
    loop {
        // Read the clock first: a program that ended while the machine stood still has ended in time.
        let is_late = Instant::now() >= deadline;
        if let Some(status) = child.try_wait().map_err(error)? {
            return Ok(status);
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
        let error = read(Path::new("/bin/sh"), &["-c", "echo no >&2; exit 3"]).unwrap_err();
        assert!(error.to_string().contains("/bin/sh failed (exit status: 3): no"), "{error}");
    }

    #[test]
    fn programs_start_with_an_empty_environment() {
        let text = read(Path::new("/usr/bin/env"), &[]).unwrap();
        assert_eq!(text, "LC_ALL=C\nXTABLES_LOCKFILE=/proc/self/limits\n");
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
