//! `watch`: checks the mesh's rules repeatedly, until a signal comes or the network namespace goes.
//!
//! Between two looks nothing of the namespace is held: an open file of it would keep a dead pod's namespace alive.

mod terminal;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant, SystemTime};

use logging::DEFAULT_SCOPE;
use netns_apply::netns::{Netns, NetnsError, NetnsId};
use settings_table::parse_duration;
use terminal::{AlternateScreen, TerminalSignals, WakeReason, write};

use super::target::NamespaceTarget;
use super::{CommandOutput, Given};
use crate::error::PodInputError;
use crate::node::NodeConfiguration;
use crate::printable::Printable;
use crate::watch::{
    Counter, CounterSnapshot, CounterUpdate, Screen, WatchExit, counted, counted_json, end_json, rules_json,
    started, totals,
};
use crate::{FINE, show};

/// The shortest and the longest pause between two looks.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(3600)];
/// How many looks may fail in a row: another program may change rules faster than they can be read.
const MOST_FAILURES: u32 = 5;
/// The height of a terminal that does not report it.
const USUAL_HEIGHT: usize = 24;

/// `watch`
pub(super) fn watch(given: &Given) -> Result<CommandOutput, PodInputError> {
    let pause = pause(given.flag("interval").unwrap_or("1s"))?;
    let target = NamespaceTarget::of(given, given.operands.first().map(String::as_str))?;
    let node = if target.pod.is_some() { given.node()? } else { NodeConfiguration::default() };
    let id = Netns::open(&target.path).map_err(PodInputError::of)?.id();
    let watch = Watch { given, target, node, id, pause };
    let first = match watch.look() {
        Ok(look) => look,
        Err(ReadFailure::Gone) => return Err(PodInputError::of("the network namespace is gone")),
        Err(ReadFailure::Failed(why)) => return Err(PodInputError::of(why)),
    };
    if given.flag("once") == Some("true") {
        let subject = watch.target.subject();
        let text = if given.is_json() {
            Printable::json_line(&rules_json(&subject, &watch.path(), &now(), &first))
        } else {
            totals(&subject, &first, given.layout)
        };
        return Ok(CommandOutput { text, code: FINE });
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(PodInputError::of)?;
    match runtime.block_on(watch.go_on(first)) {
        Ok(done) => done?,
        // Who read it has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        Err(error) => return Err(PodInputError::of(format!("cannot write to standard output: {error}"))),
    }
    Ok(CommandOutput { text: Printable::default(), code: FINE })
}

fn pause(text: &str) -> Result<Duration, PodInputError> {
    let [least, most] = PAUSES;
    let parsed = parse_duration(text).ok().filter(|pause| (least..=most).contains(pause));
    let wrong = || {
        PodInputError::of(format!("flag --interval: {text:?} is not a duration such as 1s, from 100ms to 1h"))
    };
    parsed.ok_or_else(wrong)
}

/// Why nothing was seen.
enum ReadFailure {
    /// The namespace is gone, or its file now names another one.
    Gone,
    /// It is there and cannot be checked.
    Failed(String),
}

struct Watch<'a> {
    given: &'a Given,
    target: NamespaceTarget,
    node: NodeConfiguration,
    id: NetnsId,
    pause: Duration,
}

impl Watch<'_> {
    fn path(&self) -> String {
        self.target.path.display().to_string()
    }

    fn look(&self) -> Result<CounterSnapshot, ReadFailure> {
        let netns = match Netns::open(&self.target.path) {
            Ok(netns) if netns.id() == self.id => netns,
            // What was unmounted is an empty file until it is removed.
            Ok(_) | Err(NetnsError::NotANamespace { .. }) => return Err(ReadFailure::Gone),
            Err(NetnsError::Open { cause, .. }) if is_gone(&cause) => return Err(ReadFailure::Gone),
            Err(error) => return Err(ReadFailure::Failed(error.to_string())),
        };
        show::counters(&netns, self.target.pod.as_ref(), &self.node).map_err(ReadFailure::Failed)
    }

    async fn go_on(&self, first: CounterSnapshot) -> io::Result<Result<(), PodInputError>> {
        let mut signals = TerminalSignals::new()?;
        let mut writer = Writer::new(self)?;
        let mut shown = Shown { look: first, added: Vec::new(), since: Duration::ZERO };
        let mut looked_at = Instant::now();
        writer.start(&shown)?;
        let mut failures = 0;
        loop {
            if self.wait(&mut signals, &mut writer, &shown).await? {
                return writer.end(WatchExit::Signal).map(Ok);
            }
            let at = Instant::now();
            match self.look() {
                Ok(look) => {
                    let news = look.since(&shown.look);
                    shown = Shown { look, added: Vec::new(), since: at.duration_since(looked_at) };
                    (looked_at, failures) = (at, 0);
                    writer.next(&mut shown, news)?;
                }
                Err(ReadFailure::Gone) => return writer.end(WatchExit::Gone).map(Ok),
                Err(ReadFailure::Failed(why)) => {
                    failures += 1;
                    if failures == MOST_FAILURES {
                        return Ok(Err(PodInputError::of(why)));
                    }
                    log::warn!(target: DEFAULT_SCOPE, "{why}; looking again");
                }
            }
        }
    }

    /// Waits until the next round is due; returns whether a signal requests the end.
    async fn wait(
        &self,
        signals: &mut TerminalSignals,
        writer: &mut Writer<'_>,
        shown: &Shown,
    ) -> io::Result<bool> {
        let due = Instant::now() + self.pause;
        loop {
            match signals.wait(due).await {
                WakeReason::Due => return Ok(false),
                WakeReason::Ended => return Ok(true),
                WakeReason::Resized => writer.redraw(shown)?,
                WakeReason::Suspended => writer.suspend(shown)?,
            }
        }
    }
}

fn is_gone(cause: &io::Error) -> bool {
    // The process of /proc/PID/ns/net has ended (ESRCH), which io has no word for.
    const NO_SUCH_PROCESS: i32 = 3;
    cause.kind() == io::ErrorKind::NotFound || cause.raw_os_error() == Some(NO_SUCH_PROCESS)
}

/// What is shown: a look, and what its rules counted since the one before.
struct Shown {
    look: CounterSnapshot,
    added: Vec<(usize, Counter)>,
    since: Duration,
}

/// How what is seen is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutputMode {
    /// Drawn over what was there.
    Screen,
    /// A line for each rule that counted.
    Lines,
    /// The same as JSON.
    Json,
}

struct Writer<'a> {
    watch: &'a Watch<'a>,
    subject: String,
    manner: OutputMode,
    /// While it draws on one.
    screen: Option<AlternateScreen>,
}

impl<'a> Writer<'a> {
    fn new(watch: &'a Watch<'a>) -> io::Result<Self> {
        let is_screen =
            io::stdout().is_terminal() && watch.given.env.get("TERM").is_none_or(|term| term != "dumb");
        let manner = match (watch.given.is_json(), is_screen) {
            (true, _) => OutputMode::Json,
            (false, true) => OutputMode::Screen,
            (false, false) => OutputMode::Lines,
        };
        let screen = if manner == OutputMode::Screen { Some(AlternateScreen::enter()?) } else { None };
        Ok(Self { watch, subject: watch.target.subject(), manner, screen })
    }

    fn start(&self, shown: &Shown) -> io::Result<()> {
        let look = &shown.look;
        match self.manner {
            OutputMode::Screen => self.redraw(shown),
            OutputMode::Lines => write(&started(&now(), &self.subject, look, self.watch.given.layout)),
            OutputMode::Json => {
                write(&Printable::json_line(&rules_json(&self.subject, &self.watch.path(), &now(), look)))
            }
        }
    }

    fn next(&self, shown: &mut Shown, news: CounterUpdate) -> io::Result<()> {
        match news {
            CounterUpdate::OtherRules => return self.start(shown),
            CounterUpdate::Counted(added) => shown.added = added,
        }
        if self.manner == OutputMode::Screen {
            return self.redraw(shown);
        }
        let time = now();
        let mut text = Printable::default();
        for (index, added) in &shown.added {
            let Some(rule) = shown.look.rules.get(*index) else { continue };
            text.push(&match self.manner {
                OutputMode::Json => Printable::json_line(&counted_json(&time, rule, *added)),
                OutputMode::Lines | OutputMode::Screen => {
                    counted(&time, rule, *added, self.watch.given.layout)
                }
            });
        }
        write(&text)
    }

    /// Draws everything again, at the terminal's current size.
    fn redraw(&self, shown: &Shown) -> io::Result<()> {
        if self.screen.is_none() {
            return Ok(());
        }
        let height = terminal_size::terminal_size().map_or(USUAL_HEIGHT, |(_, height)| height.0.into());
        let screen =
            Screen { subject: &self.subject, look: &shown.look, added: &shown.added, since: shown.since };
        write(&screen.text(self.watch.given.layout_now(), height))
    }

    /// Gives the terminal back and stops; draws again when it is continued.
    fn suspend(&mut self, shown: &Shown) -> io::Result<()> {
        let was_drawing = self.screen.take().is_some();
        terminal::stop()?;
        if was_drawing {
            self.screen = Some(AlternateScreen::enter()?);
        }
        self.redraw(shown)
    }

    fn end(mut self, end: WatchExit) -> io::Result<()> {
        self.screen = None;
        match (self.manner, end) {
            (OutputMode::Json, _) => write(&Printable::json_line(&end_json(&now(), end))),
            (OutputMode::Screen | OutputMode::Lines, WatchExit::Gone) => {
                write(&Printable::own("the network namespace is gone\n"))
            }
            (OutputMode::Screen | OutputMode::Lines, WatchExit::Signal) => Ok(()),
        }
    }
}

fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_neither_nothing_nor_forever() {
        assert_eq!(pause("1m30s"), Ok(Duration::from_secs(90)));
        for bad in ["", "0s", "99ms", "2h", "soon", "-1s"] {
            assert!(pause(bad).is_err(), "{bad}");
        }
    }
}
