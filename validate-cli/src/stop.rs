//! Signals that end the program, as an event among others.
//!
//! Process 1 of a container ignores a signal it has no handler for, so the default action is not enough.

use nix::sys::{
    signal::{SigSet, SigmaskHow, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use std::os::fd::{AsFd, BorrowedFd};

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

    /// The signal that came, if one did.
    pub(crate) fn signal(&self) -> Option<&'static str> {
        let info = self.signals.read_signal().ok()??;
        let number = i32::try_from(info.ssi_signo).ok()?;
        Signal::try_from(number).ok().map(Signal::as_str)
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        let _ = self.before.thread_set_mask();
    }
}
