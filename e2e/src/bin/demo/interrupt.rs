//! Ending in order on Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Result, bail};
use nix::sys::signal::{SigSet, Signal};

/// Whether the demo was asked to end.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// An error once the demo was asked to end. Dropping everything on the way out is what cleans up.
    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            bail!("interrupted; everything made so far was removed");
        }
        Ok(())
    }
}

/// Takes Ctrl-C, a closed terminal and a polite kill from all threads that begin after this call.
pub(crate) fn watch() -> Result<Interrupt> {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    signals.thread_block()?;
    let interrupt = Interrupt(Arc::default());
    let asked = Arc::clone(&interrupt.0);
    thread::spawn(move || {
        while signals.wait().is_ok() {
            asked.store(true, Ordering::Relaxed);
        }
    });
    Ok(interrupt)
}
