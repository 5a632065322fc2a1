//! Times `istio-validation` as a whole process, as the proxy's user, in a programmed pod; beside its own start-up.
//!
//! `validation [RUNS]`; the programs are taken from `BENCH_BIN`. Needs root. Fails when a median is not below 50 ms.

#![allow(clippy::print_stdout)] // a table for people is what this program is for

use anyhow::{Context, Result, ensure};
use std::{
    env,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use test_support::netns::{Families, Namespace};

/// What a run may take.
const LIMIT: Duration = Duration::from_millis(50);
/// The user and group of the proxy.
const PROXY: u32 = 1337;
const INJECTED: &str = "-p 15001 -z 15006 -u 1337 -i * -b * -d 15090,15021,15020 --dual-stack";
/// How a pod is programmed and validated: a name, and flags behind [`INJECTED`].
const MODES: [(&str, &str); 4] = [
    ("REDIRECT, both families", "-m REDIRECT"),
    ("REDIRECT, both families, DNS", "-m REDIRECT --redirect-dns --capture-all-dns"),
    ("TPROXY, both families", "-m TPROXY"),
    ("REDIRECT, both families, native nftables", "-m REDIRECT --native-nftables"),
];

fn main() -> Result<()> {
    let runs: usize = env::args().nth(1).map_or(Ok(200), |text| text.parse()).context("RUNS")?;
    let folder = benches::programs()?;
    let (iptables, validation) = (folder.join("istio-iptables"), folder.join("istio-validation"));
    println!("{runs} runs each, milliseconds{:>38} {:>9} {:>9}", "median", "p95", "longest");
    for (name, flags) in MODES {
        let pod = Namespace::pod(Families::Dual)?;
        let flags = format!("{INJECTED} {flags}");
        let (validated, start_up) = pod.enter(|| -> Result<_> {
            let status = command(&iptables, &flags).status()?;
            ensure!(status.success(), "istio-iptables {flags}: {status}");
            let validated = times(&validation, &format!("{flags} --termination-log="), runs)?;
            Ok((validated, times(&validation, "--version", runs)?))
        })??;
        let median = row(name, &validated)?;
        row("  of that, start-up (--version)", &start_up)?;
        ensure!(median < LIMIT, "{name}: the median is not below {LIMIT:?}");
    }
    Ok(())
}

fn command(program: &Path, flags: &str) -> Command {
    let mut command = Command::new(program);
    command.args(flags.split_whitespace()).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Wall time of each run, from before the fork to after the wait, sorted.
fn times(validation: &Path, flags: &str, runs: usize) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(runs);
    for _ in 0..runs {
        let mut command = command(validation, flags);
        // Leaving root drops every capability.
        command.uid(PROXY).gid(PROXY);
        let start = Instant::now();
        let status = command.status()?;
        times.push(start.elapsed());
        ensure!(status.success(), "istio-validation {flags}: {status}");
    }
    times.sort();
    Ok(times)
}

/// Prints a row and returns the median.
fn row(name: &str, sorted: &[Duration]) -> Result<Duration> {
    let at = |part: usize| sorted.get((sorted.len() - 1) * part / 100).copied().context("no runs");
    let (median, p95, longest) = (at(50)?, at(95)?, at(100)?);
    let millis = |time: Duration| time.as_secs_f64() * 1000.0;
    println!("{name:50} {:>9.2} {:>9.2} {:>9.2}", millis(median), millis(p95), millis(longest));
    Ok(median)
}
