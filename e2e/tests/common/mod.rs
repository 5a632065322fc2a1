//! What the tests of `istio-iptables` share: the program, running it in a namespace, spreading work.

// Every test program takes what it needs of this module.
#![allow(dead_code)]

pub mod crafted;
pub mod killing;
pub mod mesh;
pub mod packets;
pub mod recording;
pub mod stubs;
pub mod told;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use anyhow::{Result, ensure};
use e2e::netns::Namespace;
use e2e::process::{self, Output};
use e2e::program;

/// The PATH programs under test get.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The program under test: the one ISTIO_IPTABLES names, else the workspace's, built once per test process.
pub fn istio_iptables() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| program::under_test("istio-iptables").expect("istio-iptables is built"))
}

/// `istio-iptables ARGS` with nothing but a PATH in its environment.
pub fn istio_iptables_command<S: AsRef<str>>(args: &[S]) -> Command {
    with_environment(istio_iptables(), args, &[])
}

/// A program with nothing but a PATH and these variables in its environment; a PATH among them is the one it gets.
pub fn with_environment<S: AsRef<str>>(program: &Path, args: &[S], env: &[(String, String)]) -> Command {
    let mut command = process::command("env", ["-i".to_owned(), format!("PATH={PATH}")]);
    command.args(env.iter().map(|(name, value)| format!("{name}={value}")));
    command.arg(program).args(args.iter().map(AsRef::as_ref));
    command
}

/// Runs `istio-iptables ARGS` in a namespace to its end, whatever that is.
pub fn run<S: AsRef<str>>(namespace: &Namespace, args: &[S]) -> Result<Output> {
    namespace.run(&istio_iptables_command(args))
}

/// Runs `istio-iptables` in a namespace, with arguments as on a command line without quotes; it has to succeed and
/// to keep its standard output clean.
pub fn apply(namespace: &Namespace, args: &str) -> Result<Output> {
    let words: Vec<&str> = args.split_whitespace().collect();
    let output = run(namespace, &words)?.ok()?;
    ensure!(output.stdout.is_empty(), "standard output: {}", output.stdout);
    Ok(output)
}

/// Runs `work` on every item, on a few threads; returns the problems in the order of the items.
pub fn in_parallel<T: Sync>(
    threads: usize,
    items: &[T],
    work: impl Fn(usize, &T) -> Result<Vec<String>> + Sync,
) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let problems = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    let found = work(index, item).unwrap_or_else(|error| vec![format!("{error:#}")]);
                    let found = found.into_iter().map(|problem| (index, problem));
                    problems.lock().unwrap_or_else(PoisonError::into_inner).extend(found);
                }
            });
        }
    });
    let mut problems = problems.into_inner().unwrap_or_else(PoisonError::into_inner);
    problems.sort();
    problems.into_iter().map(|(_, problem)| problem).collect()
}
