//! The process groups of the tests that run. All of them end with this program, however that ends: a terminal's signals do not reach them.

use std::collections::BTreeSet;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::Pid;
use rustix::process::set_parent_process_death_signal;

static GROUPS: Mutex<BTreeSet<Pid>> = Mutex::new(BTreeSet::new());

fn groups() -> MutexGuard<'static, BTreeSet<Pid>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a program that leads a group of its own, and returns it with the group.
pub fn start(command: &mut Command) -> Result<(Child, Pid)> {
    let mut groups = groups();
    let child =
        command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let group = Pid::from_raw(i32::try_from(child.id())?);
    groups.insert(group);
    Ok((child, group))
}

/// Kills what is left of a group.
pub fn end(group: Pid) {
    // It may have ended by itself.
    let _ = killpg(group, Signal::SIGKILL);
    groups().remove(&group);
}

/// From now on all groups are killed when this process is told to end, or when whoever started it has ended.
pub fn end_all_on_signals() -> Result<()> {
    let signals = SigSet::from_iter([Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM]);
    // All threads that are started from here on leave them to the one that waits for them; programs begin with none blocked.
    signals.thread_block()?;
    set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    thread::spawn(move || {
        let signal = signals.wait().unwrap_or(Signal::SIGTERM);
        // Held to the end, so that none is started any more.
        let groups = groups();
        for group in groups.iter() {
            let _ = killpg(*group, Signal::SIGKILL);
        }
        std::process::exit(128 + signal as i32);
    });
    Ok(())
}
