//! A node with pods of every kind: one pass finds exactly those that are not as they should be, each with its cause.
//!
//! `make scan` (SCANNED=200) does so with 200 pods, 40 of them broken, and prints how long the pass takes.

mod plugin_support;
mod redirectctl_support;

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::process;
use redirectctl_support::{Patient, State, States, redirectctl};
use serde_json::{Value, json};
use tempfile::TempDir;

/// How many pods are broken at most.
const BROKEN: usize = 40;
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory with the network namespaces of some pods and nothing else, as a runtime has one.
struct Runtime(TempDir);

impl Runtime {
    fn new(patients: &[Patient]) -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix(&format!("e2e-{}-netns", std::process::id())).tempdir()?;
        // From here on dropping the value unmounts.
        let runtime = Self(folder);
        for patient in patients {
            let path = runtime.0.path().join(patient.namespace().name());
            File::create(&path)?;
            let mut mount = process::command("mount", ["--bind"]);
            mount.arg(patient.namespace().path()).arg(&path);
            process::run(&mut mount, PATIENCE)?.ok()?;
        }
        Ok(runtime)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.path()).into_iter().flatten().flatten() {
            // What is not mounted is only a file.
            let _ = process::run(process::command("umount", [""; 0]).arg(entry.path()), PATIENCE);
        }
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
    let runtime = Runtime::new(&patients)?;
    let pods =
        json!({"kind": "List", "items": patients.iter().flat_map(Patient::objects).collect::<Vec<_>>()});
    let file = runtime.path().with_extension("json");
    fs::write(&file, pods.to_string())?;
    let (directory, file) = (runtime.path().display().to_string(), file.display().to_string());
    let scan = |output: &str| {
        redirectctl(&[
            "scan",
            "-f",
            &file,
            "--netns-dir",
            &directory,
            "--cni-conf-dir",
            "/nonexistent",
            "--output",
            output,
        ])
    };

    let start = Instant::now();
    let output = scan("json")?;
    println!("{} pods in {:?}", patients.len(), start.elapsed());
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
    assert_eq!(table.lines().filter(|line| line.contains("default/web-")).count(), broken, "{table}");
    let metrics = scan("prometheus")?.stdout;
    let not_redirected = states.iter().filter(|state| state.cause == "not-redirected").count();
    let wanted = format!("redirectctl_pods{{state=\"not-redirected\"}} {not_redirected}\n");
    assert!(metrics.contains(&wanted), "{metrics}");
    fs::remove_file(file)?;
    Ok(())
}

/// The codes of a pod's findings that are more than notes.
fn causes(pod: &Value) -> Vec<&str> {
    let findings = pod["findings"].as_array().into_iter().flatten();
    findings.filter(|one| one["severity"] != "note").filter_map(|one| one["code"].as_str()).collect()
}
