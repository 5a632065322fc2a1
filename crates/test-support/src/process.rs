//! Running programs: to their end with a deadline, or in the background with a log.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Deadline of a command that has nothing to wait for, on a machine that is ten times slower than it should be.
pub const SHORT: Duration = Duration::from_secs(180);

/// What takes seconds and is not to wait for a deadline of [`LATE`] takes less than this, also where the machine stands still for a minute.
pub const EARLY: Duration = Duration::from_secs(240);
/// The deadline that a test gives what has to end [`EARLY`].
pub const LATE: &str = "10m";

/// Lines of a log that an error shows.
const TAIL: usize = 25;

/// How a program ended and what it printed.
#[derive(Clone, Debug)]
pub struct Output {
    /// The command line, for messages.
    pub command: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error; bytes that are not UTF-8 are replaced.
    pub stderr: String,
}

impl Output {
    /// Itself if the program exited with 0, else an error that shows what it printed.
    pub fn ok(self) -> Result<Self> {
        if self.status.success() {
            return Ok(self);
        }
        bail!("{} ended with {}\n{}{}", self.command, self.status, self.stdout, self.stderr)
    }

    /// The exit code; none after a signal.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }
}

/// A time limit that a machine that stands still does not use up: however long that lasts, it counts as a tenth of the limit and no more than
/// five seconds.
///
/// Without it, a waiter would time out when the machine goes on, before what it waits for could happen.
#[derive(Debug)]
pub struct Patience {
    left: Duration,
    turn: Duration,
    asked: Instant,
}

impl Patience {
    /// It begins now.
    pub fn new(limit: Duration) -> Self {
        Self { left: limit, turn: (limit / 10).min(Duration::from_secs(5)), asked: Instant::now() }
    }

    /// How long to wait for something before [`Patience::is_over`] is asked.
    pub fn turn(&self) -> Duration {
        self.turn
    }

    /// Whether the time is over. What passed since this was asked last counts as one turn at most.
    pub fn is_over(&mut self) -> bool {
        let now = Instant::now();
        self.left = self.left.saturating_sub(now.duration_since(self.asked).min(self.turn));
        self.asked = now;
        self.left.is_zero()
    }

    /// Waits for something at a socket; the error is [`io::ErrorKind::TimedOut`].
    pub fn wait_for(&mut self, socket: &impl AsFd, what: PollFlags) -> io::Result<()> {
        let turn = PollTimeout::try_from(self.turn).unwrap_or(PollTimeout::MAX);
        loop {
            match poll(&mut [PollFd::new(socket.as_fd(), what)], turn) {
                Ok(0) | Err(Errno::EINTR) if self.is_over() => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Runs a command to its end with nothing on standard input. After `deadline` its process group is killed and the result is an error.
pub fn run(command: &mut Command, deadline: Duration) -> Result<Output> {
    run_with_input(command, "", deadline)
}

/// Like [`run`], with `input` on standard input.
pub fn run_with_input(command: &mut Command, input: &str, deadline: Duration) -> Result<Output> {
    let shown = command_line(command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().with_context(|| format!("cannot start {shown}"))?;
    let group = group_of(&child);
    let (stdin, input) = (child.stdin.take(), input.to_owned());
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        // A program that does not read its input closes the pipe; what it did then is in its status.
        let _ = stdin.map(|mut stdin| stdin.write_all(input.as_bytes()));
    });
    thread::spawn(move || send.send(child.wait_with_output()));
    let mut patience = Patience::new(deadline);
    let output = loop {
        match receive.recv_timeout(patience.turn()) {
            Ok(output) => break output.with_context(|| format!("cannot wait for {shown}"))?,
            Err(_) if !patience.is_over() => {}
            Err(_) => {
                let _ = killpg(group, Signal::SIGKILL);
                bail!("{shown} did not end within {deadline:?}{}", what_it_printed(&receive));
            }
        }
    };
    Ok(Output {
        command: shown,
        status: output.status,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// What a killed program had printed. A grandchild in another process group may still hold the pipes: then nothing.
fn what_it_printed(receive: &mpsc::Receiver<io::Result<std::process::Output>>) -> String {
    let Ok(Ok(output)) = receive.recv_timeout(Duration::from_secs(20)) else { return String::new() };
    format!("\n{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A command from a program and its arguments.
pub fn command<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// The command line as a person would type it, without its environment.
pub fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// A command that runs `inner` after the words of `prefix`, if any, with `inner`'s arguments, environment and folder.
pub fn prefixed(prefix: &[&str], inner: &Command) -> Command {
    let mut words = prefix.iter().map(OsStr::new).chain([inner.get_program()]).chain(inner.get_args());
    let mut outer = Command::new(words.next().unwrap_or_default());
    outer.args(words);
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    if let Some(folder) = inner.get_current_dir() {
        outer.current_dir(folder);
    }
    outer
}

/// A child that is killed, and waited for, when the value is dropped.
#[derive(Debug)]
pub struct Killed(pub Child);

impl Deref for Killed {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Killed {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program in the background, its output in a log file. Dropping it ends its process group.
///
/// It gets SIGKILL when the test process dies, however that dies. A program that leaves its process group must be ended by other means.
#[derive(Debug)]
pub struct Background {
    name: String,
    child: Mutex<Child>,
    group: Pid,
    log: PathBuf,
    stop_signal: Signal,
    patience: Duration,
}

impl Background {
    /// Starts `command`. Standard output and error go to the end of the file `log`.
    /// User, group and process group of `command` are not kept.
    pub fn start(name: &str, command: &Command, log: &Path) -> Result<Self> {
        let output = File::options().create(true).append(true).open(log)?;
        let mut mortal = prefixed(&["setpriv", "--pdeathsig", "KILL", "--"], command);
        mortal.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let child = spawn_from_lasting_thread(mortal).with_context(|| format!("cannot start {name}"))?;
        let group = group_of(&child);
        Ok(Self {
            name: name.to_owned(),
            child: Mutex::new(child),
            group,
            log: log.to_owned(),
            stop_signal: Signal::SIGTERM,
            patience: Duration::from_secs(60),
        })
    }

    /// Ends it with SIGKILL at once: for programs that have nothing to save.
    #[must_use]
    pub fn killed_on_drop(mut self) -> Self {
        self.stop_signal = Signal::SIGKILL;
        self
    }

    /// Its process id, which is also its process group.
    pub fn id(&self) -> u32 {
        self.group.as_raw().unsigned_abs()
    }

    /// How it ended, or nothing while it runs.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.child.lock().ok()?.try_wait().ok()?
    }

    /// All it has printed so far.
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
    }

    /// Sends a signal to its process group.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        killpg(self.group, signal).with_context(|| format!("cannot send {signal} to {}", self.name))
    }

    /// Waits until it ends by itself.
    pub fn wait(&self, deadline: Duration) -> Result<ExitStatus> {
        until(&format!("{} to end", self.name), deadline, &[], || Ok(self.ended()))
            .map_err(|error| anyhow!("{error:#}\n{}", self.tail()))
    }

    /// The last lines of its log, under its name.
    pub fn tail(&self) -> String {
        let state = self.ended().map_or("runs".to_owned(), |status| format!("ended with {status}"));
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(TAIL)..];
        format!("--- {} ({state}), end of its log:\n{}\n", self.name, last.join("\n"))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = killpg(self.group, self.stop_signal);
        let ended = until(&self.name, self.patience, &[], || Ok(self.ended()));
        // Also the members of its group that outlived it.
        let _ = killpg(self.group, Signal::SIGKILL);
        if ended.is_err()
            && let Ok(child) = self.child.get_mut()
        {
            let _ = child.wait();
        }
    }
}

/// Asks `probe` until it answers. Gives up when the deadline is over by [`Patience`], when the probe fails, or when one of `processes` has ended; the error shows
/// the end of their logs.
pub fn until<T>(
    what: &str,
    deadline: Duration,
    processes: &[&Background],
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let mut patience = Patience::new(deadline);
    let mut pause = Duration::from_millis(2);
    let problem = loop {
        match probe() {
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) => {}
            Err(error) => break format!("waiting for {what} failed: {error:#}"),
        }
        if let Some(ended) = processes.iter().find(|process| process.ended().is_some()) {
            break format!("{} ended while waiting for {what}", ended.name);
        }
        if patience.is_over() {
            break format!("waited {deadline:?} in vain for {what}");
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(100));
    };
    let tails: String = processes.iter().map(|process| process.tail()).collect();
    Err(anyhow!("{problem}\n{tails}"))
}

/// Children of this process that live, by id and name. What they leave behind when they end is among them where this process is a
/// subreaper.
pub fn children() -> Result<Vec<String>> {
    let parent = format!(" {} ", std::process::id());
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // `ID (NAME) STATE PARENT ...`; the name may hold anything.
        let Some((name, rest)) = stat.rsplit_once(") ") else { continue };
        if !rest.starts_with('Z') && rest[1..].starts_with(&parent) {
            children.push(name.to_owned());
        }
    }
    Ok(children)
}

fn group_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).expect("a process id is a positive i32"))
}

/// The parent-death signal fires when the *thread* dies that started the process, and the threads of tests are short-lived.
/// So one thread that lives as long as the test process starts them all.
fn spawn_from_lasting_thread(command: Command) -> Result<Child> {
    type Job = (Command, mpsc::Sender<io::Result<Child>>);
    static THREAD: Mutex<Option<mpsc::Sender<Job>>> = Mutex::new(None);

    let (send, receive) = mpsc::channel();
    THREAD
        .lock()
        .map_err(|_| anyhow!("the thread that starts processes panicked"))?
        .get_or_insert_with(|| {
            let (send, jobs) = mpsc::channel::<Job>();
            thread::spawn(move || {
                for (mut command, answer) in jobs {
                    let _ = answer.send(command.spawn());
                }
            });
            send
        })
        .send((command, send))?;
    Ok(receive.recv()??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_stands_still_uses_up_little_patience() {
        let mut patience = Patience::new(Duration::from_secs(20));
        let turns = std::iter::repeat_with(|| {
            // An hour passes.
            patience.asked -= Duration::from_secs(3600);
            patience.is_over()
        });
        assert_eq!(turns.take_while(|is_over| !is_over).count(), 9);
    }
}
