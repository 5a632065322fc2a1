//! A copy of this machine: commands on it may write where they like, and nothing of it is left.
//!
//! It has namespaces of its own for its network, processes and mounts. Its files are those of this machine, and what is written goes to memory;
//! `/run`, `/var/lib` and `/var/log` are empty at first, and commands are run in the project's folder.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::node::Host;
use crate::traffic::Relay;
use test_support::leftovers::temp_dir;
use test_support::netns::{Families, Namespace};
use test_support::process::{self, Output};
use test_support::project;

/// Folders that can be written to beside those that are empty at first, and the project's. `/tmp` is the last: what is written is kept below it.
const WRITABLE: [&str; 5] = ["/etc", "/opt", "/root", "/usr/local", "/tmp"];

/// Deadline of what may build programs, or wait for pods.
const LONG: Duration = Duration::from_secs(1200);

/// A machine. Dropping it ends whatever runs on it.
#[derive(Debug)]
pub struct Machine {
    // Dropped in this order.
    _relays: Vec<Relay>,
    host: Host,
    _folder: TempDir,
    path: OsString,
}

impl Machine {
    /// A machine with these folders of programs before those of its PATH. Servers on these ports of loopback are reached at their own addresses.
    pub fn start(programs: &[&Path], ports: &[u16]) -> Result<Self> {
        let folder = temp_dir()?;
        let host = Host::start(folder.path(), Families::Dual)?;
        let relays = ports.iter().map(|port| Relay::start(host.namespace(), *port)).collect::<Result<_>>()?;
        let own = std::env::var_os("PATH").context("no PATH")?;
        let own: Vec<PathBuf> = std::env::split_paths(&own).collect();
        let path = std::env::join_paths(programs.iter().map(|folder| folder.to_path_buf()).chain(own))?;
        let project = project::file("").canonicalize()?;
        let mut writable = vec![&*project];
        writable.extend(WRITABLE.map(Path::new));
        host.make_writable(folder.path(), &writable)?;
        Ok(Self { _relays: relays, host, _folder: folder, path })
    }

    /// Runs a shell command in the project's folder to its end.
    pub fn run(&self, script: &str, environment: &[(&str, &str)]) -> Result<Output> {
        // The folder is entered inside: what this machine has under that name is hidden there.
        let mut shell = process::command("env", ["--chdir"]);
        shell.arg(project::file("").canonicalize()?).args(["sh", "-c", script]);
        shell.env("PATH", &self.path).envs(environment.iter().copied());
        process::run(&mut self.command(&shell), LONG)
    }

    /// A command that runs on the machine.
    pub fn command(&self, command: &Command) -> Command {
        self.host.command(command)
    }

    /// Its network namespace.
    pub fn namespace(&self) -> &Namespace {
        self.host.namespace()
    }
}
