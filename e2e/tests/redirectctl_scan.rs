//! A node with pods of every kind: one pass finds exactly those that are not as they should be, each with its cause.
//!
//! `make scan` (SCANNED=200) does so with 200 pods, 40 of them broken, and fails where the pass takes a second or more.

mod plugin_support;
mod redirectctl_support;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::netns::NetnsDirectory;
use e2e::process::{self, Output};
use e2e::strace::Strace;
use redirectctl_support::{Patient, State, States};
use serde_json::{Value, json};
use tempfile::TempDir;

/// How many pods are broken at most.
const BROKEN: usize = 40;
/// How many questions a pod costs at most, sets of native rules among them, and one for each hook of each family where the kernel
/// lists what hangs there.
const MOST_QUESTIONS: usize = 48;
/// What a pass may take with a release build, where SCANNED names the pods.
const IN_TIME: Duration = Duration::from_secs(1);
/// How many passes are timed; the fastest counts.
const PASSES: usize = 5;
/// Longer than a pass takes on any machine.
const PATIENCE: Duration = Duration::from_secs(900);

/// The namespaces and the list of a node's pods.
struct Node {
    runtime: NetnsDirectory,
    folder: TempDir,
}

impl Node {
    fn new(patients: &[Patient]) -> Result<Self> {
        let node = Self {
            runtime: NetnsDirectory::of(patients.iter().map(Patient::namespace))?,
            folder: tempfile::tempdir()?,
        };
        let objects: Vec<&Value> = patients.iter().flat_map(Patient::objects).collect();
        fs::write(node.pods(), json!({"kind": "List", "items": objects}).to_string())?;
        Ok(node)
    }

    fn pods(&self) -> String {
        self.folder.path().join("pods.json").display().to_string()
    }

    fn command(&self, output: &str) -> Command {
        let (pods, directory) = (self.pods(), self.runtime.path().display().to_string());
        let args = ["scan", "-f", &pods, "--netns-dir", &directory, "--cni-conf-dir", "/nonexistent"];
        let mut command = redirectctl_support::command(&args);
        command.args(["--output", output]);
        command
    }

    fn scan(&self, output: &str) -> Result<Output> {
        process::run(&mut self.command(output), PATIENCE)
    }
}

/// The pods of a node, the broken ones first.
fn patients(count: usize) -> Result<Vec<(State, Patient)>> {
    let broken = BROKEN.min(States::broken().len().max(count / 5));
    let states = States::broken().iter().copied().cycle().take(broken);
    let whole = States::whole();
    let all = states.chain(whole.iter().copied().cycle()).take(count.max(broken + whole.len()));
    let patient = |(number, state): (usize, State)| Ok((state, state.patient(u8::try_from(number)?)?));
    all.enumerate().map(patient).collect()
}

#[test]
fn one_pass_finds_exactly_the_pods_that_are_broken() -> Result<()> {
    let count = match env::var("SCANNED") {
        Ok(text) => text.parse().context("SCANNED is a number of pods")?,
        Err(_) => 0,
    };
    let (states, patients): (Vec<State>, Vec<Patient>) = patients(count)?.into_iter().unzip();
    let node = Node::new(&patients)?;
    let scan = |output: &str| node.scan(output);

    let mut output = scan("json")?;
    if env::var_os("SCANNED").is_some() {
        // Other work on the machine makes a pass slower, and nothing makes it faster than it is.
        let mut fastest = Duration::MAX;
        for _ in 0..PASSES {
            let start = Instant::now();
            output = scan("json")?;
            fastest = fastest.min(start.elapsed());
        }
        println!("{} pods in {fastest:?}", patients.len());
        ensure!(fastest < IN_TIME, "it took {fastest:?}, more than {IN_TIME:?}");
    }
    ensure!(output.code() == Some(2), "{output:?}");
    let found: Value = serde_json::from_str(&output.stdout)?;
    let found: BTreeMap<&str, Vec<&str>> = found["pods"]
        .as_array()
        .context("pods")?
        .iter()
        .map(|pod| (pod["subject"].as_str().unwrap_or("?"), causes(pod)))
        .collect();
    assert_eq!(found.len(), patients.len(), "every pod once, and nothing else");
    for (number, state) in states.iter().enumerate() {
        let wanted = state.causes();
        assert_eq!(found[format!("default/web-{number}").as_str()], wanted, "{}", state.name);
    }

    let table = scan("text")?.stdout;
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let broken = states.iter().filter(|state| !state.cause.is_empty()).count();
    // The advice about the node names one as well.
    let rows = table.lines().filter(|line| line.contains("default/web-") && !line.contains("- pod "));
    assert_eq!(rows.count(), broken, "{table}");
    let metrics = scan("prometheus")?.stdout;
    let not_redirected = states.iter().filter(|state| state.cause == "not-redirected").count();
    let wanted = format!("redirectctl_pods{{state=\"not-redirected\"}} {not_redirected}\n");
    assert!(metrics.contains(&wanted), "{metrics}");
    Ok(())
}

/// What a look may cost: the time it takes is a matter of the machine, what is asked of the kernel is not.
#[test]
fn a_pod_costs_a_bounded_number_of_questions() -> Result<()> {
    let numbered = States::whole().into_iter().zip(200..);
    let patients = numbered.map(|(state, number)| state.patient(number)).collect::<Result<Vec<_>>>()?;
    let strace = Strace::noting("sendto,openat,execve")?;
    let node = Node::new(&patients)?;
    process::run(&mut strace.command(&node.command("json")), PATIENCE)?.ok()?;
    let calls = strace.calls()?;
    let count = |name: &str, text: &str| {
        calls.iter().filter(|call| call.name == name && call.text.contains(text)).count()
    };
    let mut wrong = Vec::new();
    for (what, counted, most) in [
        ("programs that were run", count("execve", ""), 1),
        (
            "lists of the machine's connections that were read",
            count("openat", "net/tcp") + count("openat", "net/udp"),
            0,
        ),
        ("questions for the kernel", count("sendto", ""), MOST_QUESTIONS * patients.len()),
    ] {
        println!("{what}: {counted}");
        if counted > most {
            wrong.push(format!("{what}: {counted}, at most {most}"));
        }
    }
    assert!(wrong.is_empty(), "{} pods: {wrong:#?}", patients.len());
    Ok(())
}

/// The codes of a pod's findings that are more than notes.
fn causes(pod: &Value) -> Vec<&str> {
    let findings = pod["findings"].as_array().into_iter().flatten();
    findings.filter(|one| one["severity"] != "note").filter_map(|one| one["code"].as_str()).collect()
}
