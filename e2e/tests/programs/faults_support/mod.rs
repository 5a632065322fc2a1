//! The operations of the fault matrix, and putting one fault into one of them.

#![allow(clippy::wildcard_enum_match_arm, reason = "most columns need nothing of their own here")]

pub mod agent;
pub mod api;
pub mod look;
pub mod place;
pub mod plugin;
pub mod rules;
pub mod run;

use std::cell::Cell;
use std::fmt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::agent::faketime;
use e2e::faults::{Ending, Evidence, Facts, FaultResult, Injection, Kind, injections, judge, noted, spread};
use e2e::strace::{Call, Strace};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use api::{API_FAULTS, ApiFault};
use place::{FOLDERS, Happening, INSTEAD, Instead, Place};
use run::{Closed, Ended, Invoked, Wrapping};

/// What no program may say.
pub const SECRET: &str = "SECRET-TOKEN-OF-THE-ACCOUNT";

/// A row of the matrix.
pub trait Operation: Sync + Send {
    fn name(&self) -> &'static str;
    /// A place as it is before.
    fn stage(&self) -> Result<Place>;
    fn invoked(&self, place: &Place) -> Result<Invoked>;
    /// The exit code without a fault.
    fn expected(&self) -> i32 {
        0
    }
    /// Whether faults are for its main thread alone, not for other threads and the programs it starts.
    fn is_alone(&self) -> bool {
        false
    }
    /// Whether it goes on until it is told to end, and then is to have reached its goal.
    fn goes_on(&self) -> bool {
        false
    }
    /// Whether it has done what it is for.
    fn is_reached(&self, _place: &Place) -> bool {
        false
    }
    /// Files and folders it reads or writes, which can be something else.
    fn files(&self) -> &'static [&'static str] {
        &[]
    }
    /// Folders it writes to; `""` is all of them.
    fn writes_to(&self) -> &'static [&'static str] {
        &[]
    }
    fn asks_api(&self) -> bool {
        false
    }
    /// What is wrong with its standard output, if anything.
    fn bad_answer(&self, _ended: &Ended) -> Option<String> {
        None
    }
}

/// What is put into an operation.
#[derive(Clone, Debug)]
pub enum Fault {
    Call(Injection),
    Limit { kind: Kind, words: String },
    Clock(&'static str),
    Closed(Closed),
    Happens(Kind, Happening),
    Api(ApiFault),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(injection) => write!(f, "{}", injection.what),
            Self::Limit { words, .. } => write!(f, "prlimit {words}"),
            Self::Clock(clock) => write!(f, "the clock says {clock}"),
            Self::Closed(closed) => write!(f, "{closed:?}"),
            Self::Happens(_, happening) => write!(f, "{happening:?}"),
            Self::Api(fault) => write!(f, "the API server: {fault:?}"),
        }
    }
}

/// An operation, and how it goes without a fault.
pub struct Story {
    pub operation: Box<dyn Operation>,
    before: Facts,
    wanted: Facts,
    calls: Vec<Call>,
}

impl Story {
    pub fn of(operation: Box<dyn Operation>) -> Result<Self> {
        let name = operation.name();
        let place = operation.stage().with_context(|| format!("{name}: stage"))?;
        let before = place.facts()?;
        let strace = Strace::noting(&noted())?.raw();
        let wrapping = Wrapping { outer: strace.words().to_vec(), ..Wrapping::default() };
        let ended = play_once(&*operation, &place, &wrapping, None)?;
        ensure!(ended.ending == Ending::Code(operation.expected()), "{name} without a fault: {ended:?}");
        ensure!(ended.left.is_empty(), "{name} without a fault: {ended:?}");
        if let Some(bad) = operation.bad_answer(&ended) {
            anyhow::bail!("{name} without a fault: {bad}");
        }
        let wanted = place.facts()?;
        ensure!(before.broken.is_empty() && wanted.broken.is_empty(), "{name}: {before:?} {wanted:?}");
        let mut calls = strace.calls()?;
        let main = calls.first().map(|call| call.process);
        calls.retain(|call| !operation.is_alone() || Some(call.process) == main);
        Ok(Self { calls, operation, before, wanted })
    }

    /// What is injected of a kind, at most so many of it; or why nothing is.
    pub fn faults(&self, kind: Kind, most: usize) -> Result<Vec<Fault>, &'static str> {
        let operation = &self.operation;
        let found: Vec<Fault> = match kind {
            Kind::MemoryLimit => limits(kind, "--as", &[3, 8, 12, 20, 32, 64, 128], 1 << 20),
            Kind::FileLimit => limits(kind, "--nofile", &[3, 4, 5, 6, 7, 8, 9, 10, 12], 1),
            Kind::SizeLimit if operation.writes_to().is_empty() => return Err("writes no file"),
            Kind::SizeLimit => limits(kind, "--fsize", &[0, 100, 1000], 1),
            Kind::Clock => ["-20y", "+30y", "@1970-01-01 00:00:01"].map(Fault::Clock).to_vec(),
            Kind::ClosedOutput => {
                [Closed::OutputPipe, Closed::ErrorPipe, Closed::OutputFull, Closed::ErrorFull]
                    .map(Fault::Closed)
                    .to_vec()
            }
            Kind::FullDisk | Kind::ReadOnly if operation.writes_to().is_empty() => {
                return Err("writes no file");
            }
            Kind::FullDisk => {
                let full = [0, 1, 2, 3, 5, 9].map(|pages| Happening::Full { pages });
                full.map(|happening| Fault::Happens(kind, happening)).to_vec()
            }
            Kind::ReadOnly => {
                let parts = operation.writes_to().iter();
                parts.map(|part| Fault::Happens(kind, Happening::ReadOnly { part })).collect()
            }
            Kind::Replaced if operation.files().is_empty() => return Err("has no file of its own"),
            Kind::Replaced => {
                let each = |part: &&'static str| {
                    let part = *part;
                    // A folder in the place of a folder is nothing else.
                    let other =
                        move |instead: &Instead| *instead != Instead::Directory || !FOLDERS.contains(&part);
                    let happening =
                        move |instead| Fault::Happens(kind, Happening::Replaced { part, instead });
                    INSTEAD.into_iter().filter(other).map(happening)
                };
                operation.files().iter().flat_map(each).collect()
            }
            Kind::Api if !operation.asks_api() => return Err("asks no API server"),
            Kind::Api => API_FAULTS.map(Fault::Api).to_vec(),
            _ => injections(&self.calls, kind, most).into_iter().map(Fault::Call).collect(),
        };
        if found.is_empty() {
            return Err("makes no call that can fail so");
        }
        Ok(spread(&found, most))
    }

    /// Puts a fault into the operation, in a place of its own, and judges what came of it.
    pub fn play(&self, fault: &Fault) -> Result<FaultResult> {
        let operation = &*self.operation;
        let place = operation.stage()?;
        let Begun { wrapping, causes, strace } = self.begin(&place, fault)?;
        let is_over = Cell::new(false);
        let recover = || {
            if !is_over.replace(true) {
                end(&place, fault)?;
            }
            Ok(())
        };
        let ended = play_once(operation, &place, &wrapping, Some(&recover))?;
        recover()?;
        let mut after = place.facts()?;
        after.broken.extend(ended.left.iter().map(|process| format!("a process goes on: {process}")));
        let again = play_once(operation, &place, &Wrapping::default(), None)?;
        let finally = place.facts()?;
        let kind = fault.kind();
        let said = format!("{}{}", ended.stdout, ended.stderr);
        // Who was killed says nothing, nor does anybody whose words nobody takes.
        let is_mute = kind == Kind::ClosedOutput || strace.is_some_and(|strace| is_silenced(&strace));
        let speaks = !is_mute && matches!(ended.ending, Ending::Code(_)) && !never_began(&ended);
        let (ending, kind) = self.seen_as(&ended, kind);
        let verdict = judge(&Evidence {
            kind,
            causes: if is_mute || never_began(&ended) { &[] } else { &causes },
            is_mute,
            secrets: &[SECRET.to_owned()],
            expected: operation.expected(),
            ending,
            said: &said,
            bad_answer: operation.bad_answer(&ended).filter(|_| speaks),
            before: &self.before,
            wanted: &self.wanted,
            after: &after,
            again: (again.ending, &finally),
        });
        Ok(match verdict {
            FaultResult::Red(why) if why.contains("the next run ends") => {
                FaultResult::Red(format!("{why} | then {}", again.stderr))
            }
            other => other,
        })
    }

    /// How an end counts.
    fn seen_as(&self, ended: &Ended, kind: Kind) -> (Ending, Kind) {
        // Told to end before its goal, it may end in order.
        let is_told = self.operation.goes_on() && matches!(kind, Kind::Terminated | Kind::OtherSignal);
        let is_excused = EXCUSED.iter().any(|(words, _)| ended.stderr.contains(words));
        if (is_told && ended.ending == Ending::Code(0)) || is_excused {
            return (Ending::Signal(Signal::SIGTERM as i32), Kind::Terminated);
        }
        (ended.ending, kind)
    }

    /// Lets the fault begin: what is around the program then, and what a message names.
    fn begin(&self, place: &Place, fault: &Fault) -> Result<Begun> {
        let (mut wrapping, mut traced) = (Wrapping::default(), None);
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let causes = match fault {
            Fault::Call(injection) => {
                let strace = Strace::noting(&injection.call)?.tampering(&injection.tampering);
                // A program that goes on makes threads repeatedly, each of which counts its calls again: the fault is to end before it does.
                let strace = if self.operation.goes_on() { strace.beside() } else { strace };
                let strace = if self.operation.is_alone() { strace.alone() } else { strace };
                wrapping.outer = strace.words().to_vec();
                traced = Some(strace);
                wrapping.woken = injection.kind == Kind::Standstill;
                let mut causes = injection.causes.clone();
                // What fails in the plugin that the agent tries out is the plugin's to say, and has no place there.
                if !causes.is_empty() {
                    causes.push("cannot be run as a plugin".to_owned());
                }
                causes
            }
            Fault::Limit { kind, words: limit } => {
                wrapping.inner = words(&["prlimit", limit, "--"]);
                match kind {
                    // The loader of a program that is linked dynamically knows numbers only.
                    // What the plugin lacks that the agent tries out is the plugin's to say.
                    Kind::FileLimit => {
                        words(&["too many open files", "error 24", "cannot be run as a plugin"])
                    }
                    Kind::SizeLimit => words(&["too large"]),
                    _ => words(&["memory", "cannot map", "failed to map", "temporarily unavailable"]),
                }
            }
            Fault::Clock(clock) => {
                for (name, value) in
                    [("LD_PRELOAD", &*faketime()), ("FAKETIME", clock), ("FAKETIME_DONT_FAKE_MONOTONIC", "1")]
                {
                    wrapping.env.push((name.to_owned(), value.to_owned()));
                }
                Vec::new()
            }
            Fault::Closed(closed) => {
                wrapping.closed = Some(*closed);
                Vec::new()
            }
            Fault::Happens(kind, happening) => {
                place.suffer(*happening)?;
                match (kind, happening) {
                    (Kind::FullDisk, _) => words(&["no space left"]),
                    (Kind::ReadOnly, _) => words(&["read-only"]),
                    (_, Happening::Replaced { part, .. }) => {
                        // By its name, or by the folder it was looked for in.
                        part.rsplit('/').take(2).map(str::to_lowercase).collect()
                    }
                    _ => Vec::new(),
                }
            }
            Fault::Api(fault) => {
                let api = place.api.as_ref().context("an API server")?;
                api.fail(*fault, if self.operation.goes_on() { 4 } else { usize::MAX });
                fault.causes()
            }
        };
        Ok(Begun { wrapping, causes, strace: traced })
    }
}

/// A fault that has begun: what is around the program, what a message names, and what notes the calls that fail.
struct Begun {
    wrapping: Wrapping,
    causes: Vec<String>,
    strace: Option<Strace>,
}

/// Whether it was the words of a program that could not be written.
fn is_silenced(strace: &Strace) -> bool {
    let trace = strace.trace().unwrap_or_default();
    let is_words = |line: &str| {
        ["write(1<", "write(2<", "writev(1<", "writev(2<"].iter().any(|call| line.contains(call))
    };
    trace.lines().any(|line| line.contains("INJECTED") && is_words(line))
}

/// Ends that count as if the program had been killed, for a reason each.
const EXCUSED: [(&str, &str); 2] = [
    (
        "Bad read on self-pipe",
        "tokio gives up where its own pair of sockets fails, which the kernel has no reason to do",
    ),
    (
        "failed to wake I/O driver",
        "tokio gives up where writing to its own eventfd fails, which the kernel has no reason to do",
    ),
];

/// Whether the loader gave up. The programs as shipped are static and have none.
fn never_began(ended: &Ended) -> bool {
    ended.ending == Ending::Code(127) && ended.stderr.contains("error while loading shared libraries")
}

/// Ends a fault that lasts.
fn end(place: &Place, fault: &Fault) -> Result<()> {
    match fault {
        Fault::Happens(_, happening) => place.recover(*happening),
        Fault::Api(_) => {
            place.api.as_ref().map(api::Api::heal);
            Ok(())
        }
        Fault::Call(_) | Fault::Limit { .. } | Fault::Clock(_) | Fault::Closed(_) => Ok(()),
    }
}

/// How many checks a program that goes on a lasting fault stays for.
const LOOKS: u32 = 40;

/// Runs the operation once. Where it goes on, a lasting fault ends after a while, and the program when its goal is reached. Without a fault nothing is
/// ended: what notes its calls stays.
fn play_once(
    operation: &dyn Operation,
    place: &Place,
    wrapping: &Wrapping,
    recover: Option<&dyn Fn() -> Result<()>>,
) -> Result<Ended> {
    let invoked = operation.invoked(place)?;
    if !operation.goes_on() {
        return invoked.run(wrapping, None);
    }
    place.rule_lost.set(None);
    let looks = Cell::new(0);
    let goal = |process: u32| {
        looks.set(looks.get() + 1);
        if let Some(recover) = recover.filter(|_| looks.get() == LOOKS) {
            recover().expect("a fault can be ended");
            lift(process, wrapping);
            end_tampering(process);
        }
        operation.is_reached(place)
    };
    invoked.run(wrapping, Some(&goal))
}

/// Lifts the limits of a process.
fn lift(process: u32, wrapping: &Wrapping) {
    if wrapping.inner.first().is_some_and(|word| word == "prlimit") {
        let pid = process.to_string();
        let words = ["--pid", &pid, "--nofile=1024", "--as=unlimited", "--fsize=unlimited"];
        // It may have ended by itself.
        let _ = Command::new("prlimit").args(words).output();
    }
}

/// Ends the tampering with a process that strace runs beside.
fn end_tampering(process: u32) {
    for tracer in run::members(process).iter().filter(|member| member.ends_with("(strace)")) {
        if let Some(Ok(tracer)) = tracer.split(' ').next().map(str::parse) {
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(tracer), Signal::SIGKILL);
        }
    }
}

fn limits(kind: Kind, name: &str, values: &[u64], unit: u64) -> Vec<Fault> {
    // The hard limit stays, so that it can be lifted.
    values.iter().map(|value| Fault::Limit { kind, words: format!("{name}={}:", value * unit) }).collect()
}

impl Fault {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Call(injection) => injection.kind,
            Self::Limit { kind, .. } | Self::Happens(kind, _) => *kind,
            Self::Clock(_) => Kind::Clock,
            Self::Closed(_) => Kind::ClosedOutput,
            Self::Api(_) => Kind::Api,
        }
    }
}

/// Every operation, in the order of the rows.
pub fn operations() -> Vec<Box<dyn Operation>> {
    let mut all: Vec<Box<dyn Operation>> = Vec::new();
    all.extend(rules::operations());
    all.extend(plugin::operations());
    all.extend(look::operations());
    all.extend(agent::operations());
    all
}
