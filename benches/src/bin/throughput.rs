//! Pods per second: the plugin's ADD on fresh network namespaces, several at a time; and its peak memory.
//!
//! `throughput [PODS] [AT ONCE]`; the plugin is taken from `BENCH_BIN`. Needs root.

#![allow(clippy::print_stdout)] // a line for people is what this program is for

use anyhow::{Context, Result, bail, ensure};
use benches::{
    plugin::{Plugin, Pod},
    report,
};
use nix::sys::resource::{UsageWho, getrusage};
use std::{
    env,
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Instant,
};
use test_support::netns::{Families, Namespace};

/// Set in the process that runs one plugin only, to see how much memory it takes.
const MEASURE: &str = "BENCH_MEASURE_MEMORY";

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let plugin = Plugin::new(&benches::programs()?.join("istio-cni"), folder.path())?;
    if env::var_os(MEASURE).is_some() {
        return memory(&plugin);
    }
    let number = |index, default| env::args().nth(index).map_or(Ok(default), |text| text.parse::<usize>());
    let (pods, at_once) = (number(1, 200).context("PODS")?, number(2, 8).context("AT ONCE")?);
    let namespaces: Vec<Namespace> =
        (0..pods).map(|_| Namespace::pod(Families::Dual)).collect::<Result<_>>()?;
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some(namespace) = namespaces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let done =
                plugin.add(Pod::Injected, namespace).and_then(|mut command| Ok(command.status()?.success()));
            failed.fetch_add(usize::from(!matches!(done, Ok(true))), Ordering::Relaxed);
        }
    };
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(work);
        }
    });
    let rate = pods as f64 / start.elapsed().as_secs_f64();
    ensure!(failed.into_inner() == 0, "some pods could not be added");
    let memory = Command::new(env::current_exe()?).env(MEASURE, "1").output()?;
    let kibibytes = String::from_utf8_lossy(&memory.stdout).trim().to_owned();
    let text = format!(
        "{pods} pods, {at_once} at a time: {rate:.0} pods per second; peak memory of a plugin process: {kibibytes} KiB\n"
    );
    print!("{text}");
    report::write(&report::folder()?, "throughput.md", &text)
}

fn memory(plugin: &Plugin) -> Result<()> {
    let namespace = Namespace::pod(Families::Dual)?;
    if !plugin.add(Pod::Injected, &namespace)?.status()?.success() {
        bail!("the plugin failed");
    }
    // The greatest of all children: besides the plugin only `ip`, which takes less.
    println!("{}", getrusage(UsageWho::RUSAGE_CHILDREN)?.max_rss());
    Ok(())
}
