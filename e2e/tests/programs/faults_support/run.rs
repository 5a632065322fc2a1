//! Running a program with a fault, to its end or to its goal, and seeing that nothing of it lives on.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::faults::Ending;
use e2e::program::{self, PATH};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use test_support::process::Patience;

/// When a program counts as one that never ends, or never reaches its goal. Deadlines of the programs' own are shorter.
const GIVEN_UP: Duration = Duration::from_secs(100);
const TURN: Duration = Duration::from_millis(5);

/// A program, and how it is started.
#[derive(Clone, Debug)]
pub struct Invoked {
    /// Its whole environment.
    pub env: Vec<(String, String)>,
    /// Words before the program, such as those that give it another user.
    pub prefix: Vec<String>,
    pub program: PathBuf,
    pub args: Vec<String>,
    pub input: String,
    /// The network namespace it runs in, by its name.
    pub namespace: Option<String>,
}

/// Nobody takes what it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// Standard output is a pipe without a reader.
    OutputPipe,
    /// Standard error is a pipe without a reader.
    ErrorPipe,
    /// Standard output is a full device.
    OutputFull,
    /// Standard error is a full device.
    ErrorFull,
}

/// What is done to a program, all of it through how it is started.
#[derive(Clone, Debug, Default)]
pub struct Wrapping {
    /// Words around the program and what it inherits: strace.
    pub outer: Vec<String>,
    /// Words between environment and program: limits.
    pub inner: Vec<String>,
    /// More of its environment.
    pub env: Vec<(String, String)>,
    pub closed: Option<Closed>,
    /// Whether it is woken up whenever it stands still.
    pub woken: bool,
}

/// How it ended.
#[derive(Clone, Debug)]
pub struct Ended {
    pub ending: Ending,
    pub stdout: String,
    pub stderr: String,
    /// Processes of it that go on.
    pub left: Vec<String>,
}

impl Invoked {
    /// A program under test with nothing but a PATH in its environment, with arguments as on a command line without quotes.
    pub fn of(program: &str, args: &str) -> Result<Self> {
        Ok(Self {
            env: vec![("PATH".to_owned(), PATH.to_owned())],
            prefix: Vec::new(),
            program: program::under_test(program)?,
            args: args.split_whitespace().map(str::to_owned).collect(),
            input: String::new(),
            namespace: None,
        })
    }

    fn command(&self, with: &Wrapping) -> Command {
        let mut words: Vec<String> = Vec::new();
        if let Some(namespace) = &self.namespace {
            words.extend(["ip", "netns", "exec", namespace].map(str::to_owned));
        }
        words.extend(with.outer.iter().cloned());
        words.extend(["env".to_owned(), "-i".to_owned()]);
        words.extend(self.env.iter().chain(&with.env).map(|(name, value)| format!("{name}={value}")));
        words.extend(with.inner.iter().chain(&self.prefix).cloned());
        words.push(self.program.display().to_string());
        words.extend(self.args.iter().cloned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// Runs it to its end. One that goes on by itself is ended by SIGTERM when it has reached its goal.
    pub fn run(&self, with: &Wrapping, goal: Option<&dyn Fn(u32) -> bool>) -> Result<Ended> {
        // Pipes: a limit on the size of files is not meant for these.
        let ((stdout, writes_out), (stderr, writes_err)) = (std::io::pipe()?, std::io::pipe()?);
        let [stdout, stderr] = [stdout, stderr].map(|reader| thread::spawn(move || all(reader)));
        let mut stdin = tempfile::tempfile()?;
        stdin.write_all(self.input.as_bytes())?;
        stdin.seek(SeekFrom::Start(0))?;
        let mut command = self.command(with);
        command.stdin(stdin).stdout(writes_out).stderr(writes_err).process_group(0);
        match with.closed {
            Some(Closed::OutputPipe) => command.stdout(without_reader()?),
            Some(Closed::ErrorPipe) => command.stderr(without_reader()?),
            Some(Closed::OutputFull) => command.stdout(full()?),
            Some(Closed::ErrorFull) => command.stderr(full()?),
            None => &mut command,
        };
        let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        drop(command);
        let group = Pid::from_raw(i32::try_from(child.id())?);
        let status = wait(&mut child, group, with.woken, goal)?;
        let left = lasting(group, with.woken);
        let _ = killpg(group, Signal::SIGKILL);
        child.wait()?;
        let [stdout, stderr] = [stdout, stderr].map(|text| text.join().unwrap_or_default());
        Ok(Ended { ending: ending(status), stdout, stderr, left })
    }
}

fn without_reader() -> Result<Stdio> {
    let (_, writer) = std::io::pipe()?;
    Ok(writer.into())
}

fn full() -> Result<Stdio> {
    Ok(File::options().write(true).open("/dev/full")?.into())
}

fn all(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = from.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn ending(status: Option<ExitStatus>) -> Ending {
    match status.map(|status| (status.code(), status.signal())) {
        Some((Some(code), _)) => Ending::Code(code),
        Some((None, signal)) => Ending::Signal(signal.unwrap_or_default()),
        None => Ending::Never,
    }
}

fn wait(
    child: &mut Child,
    group: Pid,
    is_woken: bool,
    goal: Option<&dyn Fn(u32) -> bool>,
) -> Result<Option<ExitStatus>> {
    let (mut patience, mut goal) = (Patience::new(GIVEN_UP), goal);
    let mut turns = 0;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if patience.is_over() {
            return Ok(None);
        }
        thread::sleep(TURN);
        turns += 1;
        // It has stood still for some turns by then.
        if is_woken && turns % 10 == 0 {
            let _ = killpg(group, Signal::SIGCONT);
        }
        if turns % 4 == 0 && goal.is_some_and(|is_reached| is_reached(child.id())) {
            goal = None;
            killpg(group, Signal::SIGTERM)?;
        }
    }
}

/// The processes of a group that do not end when the one who started them has ended.
fn lasting(group: Pid, is_woken: bool) -> Vec<String> {
    let mut patience = Patience::new(Duration::from_secs(30));
    loop {
        let found = members(group.as_raw().unsigned_abs());
        if found.is_empty() || patience.is_over() {
            return found;
        }
        if is_woken {
            let _ = killpg(group, Signal::SIGCONT);
        }
        thread::sleep(TURN);
    }
}

/// The processes of a group: number and name of each.
pub fn members(group: u32) -> Vec<String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = processes.filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
    let of_group = |stat: &String| {
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        fields.first().is_some_and(|state| *state != "Z")
            && fields.get(2).is_some_and(|id| *id == group.to_string())
    };
    stats.filter(of_group).map(|stat| stat.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect()
}
