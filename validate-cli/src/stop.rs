//! Signals that end the program, as an event among others.
//!
//! Process 1 of a container ignores a signal it has no handler for, so the default action is not enough.

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, SigmaskHow, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use std::{os::fd::AsFd, time::Duration};

const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// Holds SIGTERM, SIGINT and SIGHUP back from the calling thread and notes them. Dropping it lets them through again.
#[derive(Debug)]
pub(crate) struct Stop {
    signals: SignalFd,
    before: SigSet,
}

impl Stop {
    /// Begins to hold signals back.
    pub(crate) fn on_signals() -> std::io::Result<Self> {
        let ending: SigSet = ENDING.into_iter().collect();
        let signals = SignalFd::with_flags(&ending, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let before = ending.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        Ok(Self { signals, before })
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        let _ = self.before.thread_set_mask();
    }
}

/// A signal ended the wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interrupted;

/// Waits for something to happen on these files; false when time is up.
pub(crate) fn wait<'a>(
    mut fds: Vec<PollFd<'a>>,
    time: Duration,
    stop: Option<&'a Stop>,
) -> Result<bool, Interrupted> {
    // Rounded up, so that nothing spins.
    let millis = u32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u32::MAX);
    fds.extend(stop.map(|stop| PollFd::new(stop.signals.as_fd(), PollFlags::POLLIN)));
    let ready = poll(&mut fds, PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX));
    match stop.map(|stop| stop.signals.read_signal()) {
        Some(Ok(Some(_))) => Err(Interrupted),
        Some(Ok(None) | Err(_)) | None => Ok(ready != Ok(0)),
    }
}
