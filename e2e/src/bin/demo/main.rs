//! `make demo`: what this project does, shown on real network namespaces with real packets.
//!
//! The first part runs `istio-iptables` in a namespace that looks like a pod's, the second the plugin `istio-cni` through
//! `cnitool`. Every line with a ✓ was checked; a line that is not as expected gets a ✗, and the demo fails.
//! Whatever it makes is gone when it ends, also after a failure or Ctrl-C.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::unistd::Uid;

mod connection;
mod interrupt;
mod leftovers;
mod plugin;
mod proxy;
mod redirection;
mod screen;

use screen::Screen;

fn main() -> ExitCode {
    match demo() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Whether everything was as expected.
fn demo() -> Result<bool> {
    let start = Instant::now();
    ensure!(Uid::effective().is_root(), "the demo makes network namespaces: run it as root");
    // Before any other thread begins: they all have to leave the signals to the one that waits for them.
    let interrupt = interrupt::watch()?;
    let mut screen = Screen::new(io::stdout(), interrupt);

    let shown = redirection::show(&mut screen).and_then(|()| plugin::show(&mut screen));
    // Every value that stands for something on this machine has been dropped.
    let gone = leftovers::show(&mut screen);
    shown?;
    gone?;
    screen.end(start.elapsed())
}

/// A program of this project, built beside this one.
fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let program = own.parent().context("this program has no folder")?.join(name);
    ensure!(program.exists(), "{} is missing: `make demo` builds it", program.display());
    Ok(program)
}

#[allow(clippy::print_stderr, reason = "a person reads why the demo cannot go on")]
fn complain(error: &anyhow::Error) {
    eprintln!("\ndemo: {error:#}");
}
