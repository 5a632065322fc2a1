//! The terminal that `watch` draws on, and the signals it receives.

use std::future::poll_fn;
use std::io::{self, Write};
use std::task::Poll;
use std::time::Instant;

use nix::libc::SIGTSTP;
use nix::sys::signal::{self, raise};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::printable::Printable;

/// The alternate screen, without a cursor: what was on the terminal is there again afterwards (xterm's control sequences).
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l\u{1b}[2J";
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";

/// The alternate screen of the terminal, for as long as the value lives.
#[derive(Debug)]
pub(super) struct AlternateScreen(());

impl AlternateScreen {
    pub(super) fn enter() -> io::Result<Self> {
        // From here on dropping the value leaves it.
        let screen = Self(());
        write(&Printable::own(ENTER))?;
        Ok(screen)
    }
}

impl Drop for AlternateScreen {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = write(&Printable::own(LEAVE));
    }
}

/// Stops this process as Ctrl-Z does, until it is continued.
pub(super) fn stop() -> io::Result<()> {
    Ok(raise(signal::Signal::SIGSTOP)?)
}

pub(super) fn write(text: &Printable) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Why waiting ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// It is time.
    Due,
    /// A signal asks for the end.
    Ended,
    /// The terminal has another size.
    Resized,
    /// Ctrl-Z.
    Suspended,
}

/// The signals that it handles.
#[derive(Debug)]
pub(super) struct TerminalSignals([(Signal, WakeReason); 4]);

impl TerminalSignals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self([
            (signal(SignalKind::interrupt())?, WakeReason::Ended),
            (signal(SignalKind::terminate())?, WakeReason::Ended),
            (signal(SignalKind::from_raw(SIGTSTP))?, WakeReason::Suspended),
            (signal(SignalKind::window_change())?, WakeReason::Resized),
        ]))
    }

    /// Waits for the first of them, and no longer than until then.
    pub(super) async fn wait(&mut self, due: Instant) -> WakeReason {
        let any = poll_fn(|context| {
            let mut came = self
                .0
                .iter_mut()
                .filter_map(|(signal, woken)| signal.poll_recv(context).is_ready().then_some(*woken));
            came.next().map_or(Poll::Pending, Poll::Ready)
        });
        tokio::time::timeout_at(due.into(), any).await.unwrap_or(WakeReason::Due)
    }
}
