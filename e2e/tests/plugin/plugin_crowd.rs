//! Two hundred pods at once: all are redirected, nobody waits for a lock of the node, and nothing is left behind.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::plugin::{Answer, Invocation, PodApi, RunDir, plain_kubeconfig, sidecar};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_child_subreaper;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{LATE, children};

const PODS: usize = 200;

#[test]
fn two_hundred_adds_at_once_succeed_and_leave_nothing() -> Result<()> {
    let (api, run_dir) = (PodApi::start(), RunDir::new()?);
    run_dir.write_kubeconfig(&plain_kubeconfig(api.port))?;
    api.add("default", "web", &sidecar("web", &[]));
    let namespaces = namespaces()?;
    let mut conf = run_dir.conf();
    conf["add_timeout"] = json!(LATE);

    // What a plugin leaves running becomes this process's child.
    set_child_subreaper(true)?;
    let mut times = thread::scope(|scope| {
        let adding = scope.spawn(|| in_private_mounts(&run_dir, || add_all(&namespaces, &conf)));
        adding.join().expect("no panic")
    })?;
    ensure!(children()?.is_empty(), "processes are left: {:?}", children()?);
    let left = names(run_dir.path())?;
    assert_eq!(left, ["istio-cni-kubeconfig", "istio-cni.log", "xtables.lock"]);
    let log = fs::read_to_string(run_dir.path().join("istio-cni.log"))?;
    assert_eq!(log.lines().filter(|line| line.contains("\"redirected\"")).count(), PODS);

    let rules = namespaces[0].state()?;
    ensure!(!rules.is_pristine(), "nothing was programmed");
    for namespace in &namespaces[1..] {
        let other = namespace.state()?;
        ensure!(other == rules, "namespaces differ: {:?}", other.differences(&rules));
    }
    times.sort();
    println!("{PODS} ADDs at once: median {:?}, slowest {:?}", times[PODS / 2], times[PODS - 1]);
    Ok(())
}

fn namespaces() -> Result<Vec<Namespace>> {
    (0..PODS).map(|_| Namespace::pod(Families::Dual)).collect()
}

/// Works in a mount namespace in which nobody else mounts anything, and in which somebody holds the lock that iptables
/// of a whole node shares: whoever takes that would wait for ever. No mount may be left.
fn in_private_mounts<T>(run_dir: &RunDir, work: impl FnOnce() -> Result<T>) -> Result<T> {
    unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)?;
    let none = None::<&Path>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let (lock, shared) = (run_dir.path().join("xtables.lock"), Path::new("/run/xtables.lock"));
    let held = File::create_new(&lock)?;
    held.lock()?;
    File::options().create(true).append(true).open(shared)?;
    mount(Some(&lock), shared, none, MsFlags::MS_BIND, none)?;
    let mounts = || fs::read_to_string("/proc/thread-self/mounts").context("/proc is mounted");
    let before = mounts()?;
    let done = work()?;
    // Mounts of others do vanish here too, when the file below them is removed.
    let after = mounts()?;
    let new: Vec<&str> = after.lines().filter(|line| !before.lines().any(|known| known == *line)).collect();
    ensure!(new.is_empty(), "mounts are left: {new:?}");
    Ok(done)
}

/// All of them at the same time; how long each took.
fn add_all(namespaces: &[Namespace], conf: &Value) -> Result<Vec<Duration>> {
    let problems = Mutex::new(Vec::new());
    let times = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for namespace in namespaces {
            scope.spawn(|| {
                let start = Instant::now();
                let add = Invocation::new("ADD", conf).netns(namespace).pod("default", "web");
                match add.run().and_then(Answer::result) {
                    Ok(_) => times.lock().expect("nobody panics with it").push(start.elapsed()),
                    Err(error) => problems.lock().expect("nobody panics with it").push(format!("{error:#}")),
                }
            });
        }
    });
    let problems = problems.into_inner()?;
    ensure!(problems.is_empty(), "{} of {PODS} failed, such as: {}", problems.len(), problems[0]);
    Ok(times.into_inner()?)
}

/// Names in a folder, sorted.
fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().display().to_string()));
    let mut names = entries.collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
