//! What a look into a pod costs, whatever other programs have put there: processor time and growth of peak memory, for each
//! ruleset that a container with `CAP_NET_ADMIN` may make, in a process of its own.
//!
//! `looks [RULESET...]`. Results go to `BENCH_OUT` (target/bench). Needs root.

#![allow(clippy::print_stdout)] // a table for people is what this program is for

use anyhow::{Context, Result, bail};
use benches::{
    report,
    rulesets::{self, Place, Rules},
    usual_plan,
};
use netns_apply::{ApplyOptions, Snapshot, apply, netns::Netns};
use nix::time::{ClockId, clock_gettime};
use redirect_core::RulePlan;
use std::{
    env, fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};
use test_support::{netns::Topology, process};

/// The first argument of a process that looks once.
const LOOK: &str = "--look";

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [LOOK, file] => look(Path::new(file)),
        names => measure(names),
    }
}

fn measure(names: &[&str]) -> Result<()> {
    let all = rulesets::all();
    let wanted = |rules: &&Rules| names.is_empty() || names.contains(&rules.name);
    let mut text = String::from("| rules of another program | ms | MiB | verdict |\n|---|---:|---:|---|\n");
    for rules in all.iter().filter(wanted) {
        let row = format!("| {} | {} |\n", rules.name, measured(rules)?);
        print!("{row}");
        text += &row;
    }
    report::write(&report::folder()?, "looks.md", &text)
}

/// Makes a pod with a plan in force and these rules, and looks into it.
fn measured(rules: &Rules) -> Result<String> {
    let topology = Topology::new(test_support::netns::Families::Dual)?;
    let pod = &topology.pod;
    let plan = usual_plan();
    let applied = pod.enter(|| apply(&plan, &options()).map_err(|error| error.to_string()))?;
    applied.map_err(anyhow::Error::msg)?;
    for (place, text) in &rules.texts {
        let command = match place {
            Place::Nft => process::command("nft", ["-f", "-"]),
            Place::Iptables => process::command("iptables-nft-restore", ["--noflush"]),
            Place::Legacy => process::command("iptables-legacy-restore", ["--noflush"]),
            Place::Routes => process::command("ip", ["-batch", "-"]),
        };
        let loaded = process::run_with_input(&mut pod.command(&command), text, Duration::from_secs(300))?;
        loaded.ok().with_context(|| rules.name)?;
    }
    let own = env::current_exe()?;
    let output = Command::new(own).arg(LOOK).arg(pod.path()).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        bail!("{}: the look failed", rules.name);
    }
    Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
}

fn options() -> ApplyOptions {
    ApplyOptions::default().most_read(Some(ApplyOptions::MOST_READ))
}

/// Looks once, and prints what that cost and what came of it.
fn look(file: &Path) -> Result<()> {
    let netns = Netns::open(file)?;
    let plan = usual_plan();
    let (before, room) = (spent()?, memory("VmRSS")?);
    let verdict = netns.run(|| verdict(&plan))?;
    let (after, peak) = (spent()?, memory("VmHWM")?);
    let (milliseconds, mebibytes) =
        ((after - before).as_secs_f64() * 1e3, peak.saturating_sub(room) as f64 / 1024.0);
    let length = verdict.len();
    let verdict: String = verdict.chars().take(160).collect();
    print!("{milliseconds:.1} | {mebibytes:.1} | {verdict} [{length}]");
    Ok(())
}

/// What the drift watch and `redirectctl verify` find.
fn verdict(plan: &RulePlan) -> String {
    let options = options();
    let snapshot = Snapshot::take(plan, &options);
    match snapshot.and_then(|snapshot| snapshot.verify_in_words(plan, &options)) {
        Ok((_, None)) => "verified".into(),
        Ok((_, Some(words))) => words,
        Err(error) => format!("error: {error}"),
    }
}

fn spent() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}

/// A line of this process's status, in KiB.
fn memory(line: &str) -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let text =
        status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':')).context("no such line")?;
    Ok(text.trim().trim_end_matches(" kB").parse()?)
}
