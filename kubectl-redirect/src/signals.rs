//! The signals that ask for the end.

use std::io;

#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::CommandFailure;

/// Ctrl-C, and on Unix whatever else asks a program to end. From here on none of them ends it by itself.
pub(crate) struct EndSignals {
    #[cfg(unix)]
    all: [Signal; 3],
}

impl EndSignals {
    pub(crate) fn new() -> Result<Self, CommandFailure> {
        Self::try_new().map_err(|error| CommandFailure(format!("cannot receive signals: {error}")))
    }

    #[cfg(unix)]
    fn try_new() -> io::Result<Self> {
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok(Self { all: [interrupt?, terminate?, hangup?] })
    }

    #[cfg(not(unix))]
    fn try_new() -> io::Result<Self> {
        Ok(Self {})
    }

    /// Waits for one of them.
    #[cfg(unix)]
    pub(crate) async fn received(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.all;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }

    /// Waits for one of them.
    #[cfg(not(unix))]
    pub(crate) async fn received(&mut self) {
        // Where it cannot be received, it ends the program.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
