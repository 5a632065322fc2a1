//! `istio-iptables` killed at random moments: the next run succeeds and ends in the planned state, whatever was left.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use e2e::iptables::{self, in_parallel};
use e2e::killing::Moments;
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, State};
use test_support::sample;

/// Runs that have to be killed before they end, of each kind: each configuration four times, or forty.
const KILLS: [usize; 2] = [20, 200];
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
    let dice = Dice::of_this_run("REDIRECT_SEED");
    let kills = sample::times(KILLS[0], KILLS[1]);
    let attempts: Vec<usize> = (0..kills).collect();
    let problems = in_parallel(THREADS, &attempts, |index, _| {
        let (plan, mut dice) = (&plans[index % plans.len()], dice.branch(index));
        let (after, namespace) = plan.moments.kill_one(&mut dice, || {
            let namespace = Namespace::pod(Families::Dual)?;
            Ok((start(&namespace, plan.args, &[])?, namespace))
        })?;
        plan.mends(&namespace, &format!("{dice:?}, killed after {after:?}"), &[])
    });
    assert!(problems.is_empty(), "{} of {kills}:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

#[test]
fn a_reconcile_killed_at_any_moment_is_mended_by_the_next_run() -> Result<()> {
    let plans = plans()?;
    let dice = Dice::of_this_run("REDIRECT_SEED");
    // One namespace for each: from configuration to configuration, as long as it lives.
    let kills = sample::times(KILLS[0], KILLS[1]);
    let walks: Vec<usize> = (0..THREADS).collect();
    let problems = in_parallel(THREADS, &walks, |walk, _| {
        let namespace = Namespace::pod(Families::Dual)?;
        let mut problems = Vec::new();
        for step in 0..kills / THREADS {
            // Every other configuration comes after every other: the distance changes with each round.
            let distance = 1 + (step / plans.len()) % (plans.len() - 1);
            let before = &plans[(walk + step * distance) % plans.len()];
            let plan = &plans[(walk + (step + 1) * distance) % plans.len()];
            before.put_in_force(&namespace)?;
            let mut dice = dice.branch(walk * kills + step);
            let (after, ()) = plan.moments.kill_one(&mut dice, || {
                before.put_in_force(&namespace)?;
                Ok((start(&namespace, plan.args, &["--reconcile"])?, ()))
            })?;
            let when = format!("{dice:?}, over {:?}, killed after {after:?}", before.args);
            problems.extend(plan.mends(&namespace, &when, &["--reconcile"])?);
        }
        Ok(problems)
    });
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// A configuration, what it leads to, and when its runs are killed.
struct Plan {
    args: &'static str,
    state: State,
    moments: Moments,
}

fn plans() -> Result<Vec<Plan>> {
    let plan = |args| {
        let namespace = Namespace::pod(Families::Dual)?;
        let moments = Moments::of(|| finish(start(&namespace, args, &[])?))?;
        Ok(Plan { args, state: namespace.state_with_nft()?, moments })
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

/// Starts the program itself, with nothing between it and the kill.
fn start(namespace: &Namespace, args: &str, more: &[&str]) -> Result<Child> {
    let mut command = Command::new(iptables::istio_iptables());
    command.env_clear().env("PATH", e2e::program::PATH);
    command.args(args.split(' ')).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(namespace.enter(|| command.spawn())??)
}

fn finish(child: Child) -> Result<()> {
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(())
}
