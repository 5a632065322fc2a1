//! What the tests of `istio-iptables` share: the program, running it in a namespace, spreading work.

pub mod arrivals;
pub mod crafted;
pub mod foreign;
pub mod mesh;
pub mod packets;
pub mod recording;
pub mod stubs;
pub mod told;
pub mod vocabulary;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::program::{self, PATH};
use anyhow::{Result, ensure};
use test_support::netns::Namespace;
use test_support::process::{self, Output};

pub use test_support::parallel::in_parallel;

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
