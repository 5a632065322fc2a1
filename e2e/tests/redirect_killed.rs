//! `istio-iptables` killed at random moments: the next run succeeds and ends in the planned state, whatever was left.

mod common;

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use common::in_parallel;
use e2e::netns::{Families, Namespace, State};

/// Runs that have to be killed before they end, of each kind.
const KILLS: usize = 200;
const THREADS: usize = 4;

/// Configurations as unlike each other as possible; each leaves something the next must not keep.
const CONFIGURATIONS: [&str; 5] = [
    "--dual-stack --backend restore -b * -d 15090,15021,15020 -i * --redirect-dns --capture-all-dns --drop-invalid",
    "--dual-stack -m TPROXY -b * -i * -t 0x77 -r 200 -c dummy0 -k dummy1",
    "--dual-stack --native-nftables -m TPROXY -b 80,443 -i 10.0.0.0/8,fd00::/8",
    "--dual-stack --force-iptables-binary legacy -b * -i * -x 10.9.0.0/16 -o 3306",
    "--backend restore -m TPROXY -b 8080 -i 10.0.0.0/8 -q 4443",
];

#[test]
fn an_apply_killed_at_any_moment_is_mended_by_the_next_run() -> Result<()> {
    let plans = plans()?;
    let random = Random::of_this_run();
    let attempts: Vec<usize> = (0..KILLS).collect();
    let problems = in_parallel(THREADS, &attempts, |index, _| {
        let (plan, mut random) = (&plans[index % plans.len()], random.branch(index));
        let killed = until_killed(&mut random, plan.duration, || {
            let namespace = Namespace::pod(Families::Dual)?;
            Ok((start(&namespace, plan.args, &[])?, namespace))
        })?;
        plan.mends(&killed.with, &format!("{random:?}, killed after {:?}", killed.after), &[])
    });
    assert!(problems.is_empty(), "{} of {KILLS}:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

#[test]
fn a_reconcile_killed_at_any_moment_is_mended_by_the_next_run() -> Result<()> {
    let plans = plans()?;
    let random = Random::of_this_run();
    // One namespace for each: from configuration to configuration, as long as it lives.
    let walks: Vec<usize> = (0..THREADS).collect();
    let problems = in_parallel(THREADS, &walks, |walk, _| {
        let namespace = Namespace::pod(Families::Dual)?;
        let mut problems = Vec::new();
        for step in 0..KILLS / THREADS {
            // Every other configuration comes after every other: the distance changes with each round.
            let distance = 1 + (step / plans.len()) % (plans.len() - 1);
            let before = &plans[(walk + step * distance) % plans.len()];
            let plan = &plans[(walk + (step + 1) * distance) % plans.len()];
            before.put_in_force(&namespace)?;
            let mut random = random.branch(walk * KILLS + step);
            let killed = until_killed(&mut random, plan.duration, || {
                before.put_in_force(&namespace)?;
                Ok((start(&namespace, plan.args, &["--reconcile"])?, ()))
            })?;
            let when = format!("{random:?}, over {:?}, killed after {:?}", before.args, killed.after);
            problems.extend(plan.mends(&namespace, &when, &["--reconcile"])?);
        }
        Ok(problems)
    });
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// A configuration, what it leads to, and how long that takes.
struct Plan {
    args: &'static str,
    state: State,
    duration: Duration,
}

fn plans() -> Result<Vec<Plan>> {
    let plan = |args| {
        let namespace = Namespace::pod(Families::Dual)?;
        let began = Instant::now();
        finish(start(&namespace, args, &[])?)?;
        let duration = began.elapsed();
        Ok(Plan { args, state: namespace.state_with_nft()?, duration })
    };
    CONFIGURATIONS.into_iter().map(plan).collect()
}

impl Plan {
    fn put_in_force(&self, namespace: &Namespace) -> Result<()> {
        finish(start(namespace, self.args, &[])?)
    }

    /// Runs it where another run was killed a moment ago.
    fn mends(&self, namespace: &Namespace, when: &str, more: &[&str]) -> Result<Vec<String>> {
        let context = || format!("{:?}, {when}", self.args);
        finish(start(namespace, self.args, more)?).with_context(context)?;
        let differences = namespace.state_with_nft()?.differences(&self.state);
        Ok(differences.into_iter().map(|difference| format!("{}: {difference}", context())).collect())
    }
}

struct Killed<T> {
    with: T,
    after: Duration,
}

/// Starts a run and kills it at a random moment, again until it was killed before it ended.
fn until_killed<T>(
    random: &mut Random,
    duration: Duration,
    mut start: impl FnMut() -> Result<(Child, T)>,
) -> Result<Killed<T>> {
    for _ in 0..50 {
        let after = random.moment(duration);
        let (mut child, with) = start()?;
        thread::sleep(after);
        let ended = child.try_wait()?.is_some();
        // Only the program: what it has started lives on.
        let _ = child.kill();
        child.wait()?;
        if !ended {
            return Ok(Killed { with, after });
        }
    }
    anyhow::bail!("always ended before it was killed, although it takes {duration:?}")
}

/// Starts the program itself, with nothing between it and the kill.
fn start(namespace: &Namespace, args: &str, more: &[&str]) -> Result<Child> {
    let mut command = Command::new(common::istio_iptables());
    command.env_clear().env("PATH", common::PATH);
    command.args(args.split(' ')).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(namespace.enter(|| command.spawn())??)
}

fn finish(child: Child) -> Result<()> {
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Random numbers that can be had again: REDIRECT_SEED brings back those of another run.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "the seed is for messages")]
struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    fn of_this_run() -> Self {
        let given = std::env::var("REDIRECT_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let seed = given.unwrap_or_else(now);
        Self { seed, state: seed }
    }

    /// Numbers of its own for one of many, whatever the others draw.
    fn branch(&self, index: usize) -> Self {
        let mut branch = self.clone();
        branch.state ^= (index as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
        branch.next();
        branch
    }

    /// A moment between the beginning and, on a busy machine, the end.
    fn moment(&mut self, duration: Duration) -> Duration {
        let fraction = f64::from((self.next() >> 32) as u32) / f64::from(u32::MAX);
        (duration * 2).mul_f64(fraction)
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
