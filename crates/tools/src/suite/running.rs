//! The process groups of the tests that run: a terminal's signals reach this program alone, which passes the end on to all of them.

use std::collections::BTreeSet;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::process::set_parent_process_death_signal;
use tokio::signal::unix::{SignalKind, signal};

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

/// From now on all groups are killed on a signal to end, or when the process that started this one has ended.
pub fn end_all_on_signals() -> Result<()> {
    // A signal that is waited for in another way is blocked, and stays so in all programs that are started.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (mut hangup, mut interrupt, mut terminate) = {
        let _entered = runtime.enter();
        (signal(SignalKind::hangup())?, signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    thread::spawn(move || {
        let received = runtime.block_on(async {
            tokio::select! {
                _ = hangup.recv() => Signal::SIGHUP,
                _ = interrupt.recv() => Signal::SIGINT,
                _ = terminate.recv() => Signal::SIGTERM,
            }
        });
        // Held to the end, so that none is started any more.
        let groups = groups();
        for group in groups.iter() {
            let _ = killpg(*group, Signal::SIGKILL);
        }
        std::process::exit(128 + received as i32);
    });
    Ok(())
}
