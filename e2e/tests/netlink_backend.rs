//! The default backend runs no helper program, and is never half done.

mod common;

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use common::{in_parallel, istio_iptables_command};
use e2e::netns::{Families, Namespace, State};
use e2e::process;

/// Runs that have to be killed before they end.
const KILLS: usize = 500;
const THREADS: usize = 4;

/// Plans in REDIRECT mode: their rules are all there is to see. Nothing stands for a cleanup.
const PLANS: [&str; 3] = [
    "--dual-stack -b * -d 15090,15021,15020 -i * --redirect-dns --capture-all-dns --drop-invalid",
    "--dual-stack -b 80,443 -i 10.0.0.0/8,fd00::/8 -o 3306,6379 -x 10.9.0.0/16",
    "--cleanup-only",
];

#[test]
fn nothing_is_executed_and_no_lock_of_the_node_is_opened() -> Result<()> {
    for args in PLANS {
        let namespace = Namespace::pod(Families::Dual)?;
        let trace = tempfile::NamedTempFile::new()?;
        let words: Vec<&str> = args.split_whitespace().collect();
        let mut strace = process::command("strace", ["-f", "-qq", "-e", "trace=execve,open,openat", "-o"]);
        strace.arg(trace.path());
        let traced = common::istio_iptables();
        strace.arg(traced).args(words).env("PATH", common::PATH);
        namespace.run(&strace)?.ok()?;
        let trace = std::fs::read_to_string(trace.path())?;
        let executed: Vec<&str> = trace.lines().filter(|line| line.contains("execve(")).collect();
        ensure!(executed.len() == 1, "{args}: executes {executed:#?}");
        ensure!(!trace.contains("xtables.lock"), "{args}: opens the node's lock:\n{trace}");
    }
    Ok(())
}

#[test]
fn a_killed_run_leaves_the_old_rules_or_the_new_ones() -> Result<()> {
    let states = PLANS.map(|args| -> Result<State> {
        let namespace = Namespace::pod(Families::Dual)?;
        run(&namespace, args)?;
        rules(&namespace)
    });
    let states = states.into_iter().collect::<Result<Vec<_>>>()?;
    let whole = duration()?;
    let (old, new) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let walks: Vec<usize> = (0..THREADS).collect();
    let problems = in_parallel(THREADS, &walks, |walk, _| {
        let namespace = Namespace::pod(Families::Dual)?;
        let (mut killed, mut now) = (0, PLANS.len() - 1);
        let mut random = seed(walk);
        while killed < KILLS / THREADS {
            let next = (now + 1 + killed % (PLANS.len() - 1)) % PLANS.len();
            run(&namespace, PLANS[now])?;
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let after = Duration::from_micros((random >> 33) % whole);
            if kill(&namespace, PLANS[next], after)? {
                killed += 1;
                let found = rules(&namespace)?;
                if found == states[now] {
                    old.fetch_add(1, Ordering::Relaxed);
                } else if found == states[next] {
                    new.fetch_add(1, Ordering::Relaxed);
                } else {
                    return Ok(found.differences(&states[next]));
                }
            }
            now = next;
        }
        Ok(Vec::new())
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    println!("{old:?} runs were killed before, {new:?} after the rules changed");
    ensure!(old.into_inner() > 0 && new.into_inner() > 0, "the moments are not spread over the run");
    Ok(())
}

/// How many microseconds a run takes under the same load.
fn duration() -> Result<u64> {
    let walks: Vec<usize> = (0..THREADS).collect();
    let longest = AtomicU64::new(0);
    in_parallel(THREADS, &walks, |_, _| {
        let namespace = Namespace::pod(Families::Dual)?;
        for args in PLANS {
            let begin = Instant::now();
            let mut child = namespace.enter(|| quiet(args).spawn())??;
            child.wait()?;
            longest.fetch_max(u64::try_from(begin.elapsed().as_micros())?, Ordering::Relaxed);
        }
        Ok(Vec::new())
    });
    Ok(longest.into_inner())
}

fn seed(walk: usize) -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::from(time.subsec_nanos()) ^ ((walk as u64) << 32)
}

/// The rules of a namespace, nothing else.
fn rules(namespace: &Namespace) -> Result<State> {
    let state = namespace.state()?;
    Ok(State { v4: state.v4, v6: state.v6, ..State::default() })
}

fn command(args: &str) -> Command {
    istio_iptables_command(&args.split_whitespace().collect::<Vec<_>>())
}

fn quiet(args: &str) -> Command {
    let mut command = command(args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn run(namespace: &Namespace, args: &str) -> Result<()> {
    namespace.run(&command(args))?.ok().map(drop)
}

/// Starts a run and kills it after a while; whether it had not ended by itself.
fn kill(namespace: &Namespace, args: &str, after: Duration) -> Result<bool> {
    let mut child = namespace.enter(|| quiet(args).spawn())?.context("cannot start istio-iptables")?;
    let end = Instant::now() + after;
    while Instant::now() < end {
        thread::yield_now();
    }
    child.kill()?;
    Ok(!child.wait()?.success())
}
