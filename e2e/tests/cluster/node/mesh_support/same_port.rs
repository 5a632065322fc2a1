//! What a proxy that keeps its client's address (TPROXY) loses by chance, whoever redirects.
//!
//! For each connection to its application it takes a port of the client's address. If that is the port of the client's own connection
//! to the proxy, two connections of the pod have the same addresses and ports: the kernel ends the client's, and nobody answers what
//! the client's proxy still sends on it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use test_support::netns::{Namespace, enter};
use test_support::process;

/// The verdict about such a request.
pub const SAME_PORT: &str = "lost: the server's proxy took its client's port";
/// Only a request that is lost takes longer.
const LATE: Duration = Duration::from_secs(3);
const BETWEEN_LOOKS: Duration = Duration::from_millis(300);

/// Makes a call from a pod. If it fails, and another pod was seen to have a connection of the same addresses and ports as one of the pod's,
/// the verdict says so.
pub fn or_same_port(pod: &Namespace, call: impl FnOnce() -> Result<String>) -> Result<String> {
    let done = AtomicBool::new(false);
    let (verdict, seen) = thread::scope(|scope| {
        let watch = scope.spawn(|| watch(pod, &done));
        let verdict = call();
        done.store(true, Ordering::Relaxed);
        watch.thread().unpark();
        (verdict, watch.join())
    });
    let seen = seen.map_err(|_| anyhow::anyhow!("the watch panicked"))??;
    let verdict = verdict?;
    Ok(if seen && !verdict.starts_with("200") { SAME_PORT.to_owned() } else { verdict })
}

/// Whether such a pair is seen before a call that takes long is done.
fn watch(pod: &Namespace, done: &AtomicBool) -> Result<bool> {
    let late = Instant::now() + LATE;
    while !done.load(Ordering::Relaxed) {
        let left = late.saturating_duration_since(Instant::now());
        if left.is_zero() && same_port(pod)? {
            return Ok(true);
        }
        thread::park_timeout(left.max(BETWEEN_LOOKS));
    }
    Ok(false)
}

/// Whether another network namespace has a connection of the same addresses and ports as one of the pod's.
fn same_port(pod: &Namespace) -> Result<bool> {
    let own = connections(&pod.path())?;
    let inode = |path: &Path| fs::metadata(path).map(|file| file.ino()).ok();
    let folder = pod.path();
    for other in fs::read_dir(folder.parent().context("a namespace has a folder")?)? {
        let other = other?.path();
        // One that goes meanwhile has none.
        if inode(&other) != inode(&folder) && !own.is_disjoint(&connections(&other).unwrap_or_default()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The connections of a namespace beyond loopback, each with its own address and port and the other end's.
fn connections(namespace: &Path) -> Result<BTreeSet<(String, String)>> {
    let mut list = process::command("ss", ["--tcp", "--numeric", "--no-header", "state", "established"]);
    let listed = enter(namespace, || process::run(&mut list, LATE))??.ok()?;
    let ends = listed.stdout.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(2);
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    });
    Ok(ends.filter(|(own, _)| !own.starts_with("127.") && !own.starts_with('[')).collect())
}
