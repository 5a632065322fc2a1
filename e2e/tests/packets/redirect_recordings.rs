//! The recorded runs of the reference, played back to `istio-iptables` in fresh namespaces: the kernel must end in the
//! recorded state, a second run must change nothing, and a cleanup must leave nothing.

use std::ops::Deref;

use anyhow::{Context, Result};
use e2e::iptables::{self, recording::Recording};
use serde_json::Value;
use test_support::netns::{Families, Namespace, State};
use test_support::process::{self, Output, SHORT};
use test_support::sample;

/// Recorded runs at least; so that a lost fixture does not look like success.
const RECORDINGS: usize = 353;
const THREADS: usize = 3;

/// One recorded run, and what is expected of ours.
struct Case {
    recording: Recording,
    expect: Expect,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    /// To end in the recorded state.
    Recorded,
    /// To fail with a message and change nothing.
    Failure,
    /// Anything: what the reference does makes no sense.
    Anything,
}

/// What was recorded, and what is expected of ours.
fn all_cases() -> Result<Vec<Case>> {
    let case = |recording: Recording| {
        let expect = match recording.divergence.as_deref() {
            Some("free") => Expect::Anything,
            Some("reject") => Expect::Failure,
            _ if recording.succeeded() => Expect::Recorded,
            _ => Expect::Failure,
        };
        let state = State::recorded(&recording.recorded)?;
        Ok(Case { recording, expect, state })
    };
    let all = Recording::all()?;
    assert_eq!(all.len(), RECORDINGS);
    all.into_iter().map(case).collect()
}

impl Deref for Case {
    type Target = Recording;

    fn deref(&self) -> &Recording {
        &self.recording
    }
}

impl Case {
    /// Problems of a run that had to end in the recorded state.
    fn compare(&self, namespace: &Namespace, run: &Output) -> Result<Vec<String>> {
        if !run.status.success() {
            return Ok(vec![format!("{}: {}: {}", self.name, run.status, run.stderr)]);
        }
        Ok(self.differs(namespace.state_with_nft()?))
    }

    /// How a namespace that holds this differs from the recording.
    fn differs(&self, state: State) -> Vec<String> {
        self.named("", state.without_routes_and_addresses().differences(&self.state))
    }

    fn named(&self, what: &str, differences: Vec<String>) -> Vec<String> {
        differences.into_iter().map(|difference| format!("{}: {what}{difference}", self.name)).collect()
    }
}

#[test]
fn every_recording_is_reproduced_kept_and_cleaned_up() -> Result<()> {
    let cases = sample::part(all_cases()?, 4, 0);
    let problems =
        iptables::in_parallel(THREADS, &cases, |_, case| play(case).with_context(|| case.name.clone()));
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

fn play(case: &Case) -> Result<Vec<String>> {
    let namespace = Namespace::pod(case.families)?;
    match case.expect {
        Expect::Anything => Ok(Vec::new()),
        Expect::Failure => refused(case, &namespace),
        Expect::Recorded => recorded(case, &namespace),
    }
}

fn refused(case: &Case, namespace: &Namespace) -> Result<Vec<String>> {
    let before = namespace.state_with_nft()?;
    let run = case.run(namespace, &[])?;
    let mut problems = case.named("changed: ", namespace.state_with_nft()?.differences(&before));
    if run.code() != Some(1) || run.stderr.trim().is_empty() || !run.stdout.is_empty() {
        problems.push(format!("{}: not refused with a message: {run:?}", case.name));
    }
    Ok(problems)
}

fn recorded(case: &Case, namespace: &Namespace) -> Result<Vec<String>> {
    case.run(namespace, &[])?.ok()?;
    let first = namespace.state_with_nft()?;
    let mut problems = case.differs(first.clone());
    case.run(namespace, &[])?.ok()?;
    problems.extend(case.named("run twice: ", namespace.state_with_nft()?.differences(&first)));
    case.run(namespace, &["--cleanup-only"])?.ok()?;
    let left = namespace.state_with_nft()?;
    if !left.is_pristine() || left.lo.iter().any(|address| address == "::6/128") {
        problems.push(format!("{}: left after cleanup: {left:?}", case.name));
    }
    Ok(problems)
}

/// The default backend needs no helper program; this is the one that does.
#[test]
fn every_recording_is_reproduced_with_iptables_restore() -> Result<()> {
    let cases = sample::part(all_cases()?, 8, 1);
    let good: Vec<&Case> = cases.iter().filter(|case| case.expect == Expect::Recorded).collect();
    let problems = iptables::in_parallel(THREADS, &good, |_, case| {
        let namespace = Namespace::pod(case.families)?;
        let run = case.run(&namespace, &["--backend", "restore"])?;
        case.compare(&namespace, &run)
    });
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// Each configuration over the one before it, in one namespace after the other as long as they look the same.
#[test]
fn every_recording_replaces_the_one_before_it() -> Result<()> {
    let cases = sample::part(all_cases()?, 8, 3);
    let good: Vec<&Case> = cases.iter().filter(|case| case.expect == Expect::Recorded).collect();
    let walks: Vec<&[&Case]> = walks(&good);
    assert!(walks.iter().map(|walk| walk.len() - 1).sum::<usize>() == good.len() - 1);
    let problems = iptables::in_parallel(THREADS, &walks, |_, walk| replay(walk));
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// What the reference has written, with every backend, byte for byte as recorded: also the rules that ours are not.
#[test]
fn what_the_reference_left_is_replaced_and_cleaned_up() -> Result<()> {
    let cases = all_cases()?;
    let rewritten = |case: &&Case| {
        let state = case.recorded.to_string();
        case.expect == Expect::Recorded
            && (state.contains("ESTABLISHED -j ISTIO_DIVERT") || state.contains("jump istio-divert"))
    };
    let all: Vec<&Case> = cases.iter().filter(rewritten).collect();
    assert!(all.len() >= 20, "{} recordings hold a rule that ours do not", all.len());
    let all = sample::part(all, 2, 0);
    let problems = iptables::in_parallel(THREADS, &all, |index, case| {
        let namespace = Namespace::pod(case.families)?;
        let variant = if index % 3 == 0 { "legacy" } else { "nft" };
        leave_as_recorded(&namespace, &case.recorded, variant)?;
        let left = namespace.state_with_nft()?.without_routes_and_addresses();
        let mut problems = Vec::new();
        if left.v4 == case.state.v4 && left.nft == case.state.nft {
            problems.push(format!("{}: nothing of it is rewritten", case.name));
        }
        if index % 2 == 0 {
            let run = case.run(&namespace, &["--reconcile"])?;
            problems.extend(case.compare(&namespace, &run)?);
        }
        case.run(&namespace, &["--cleanup-only"])?.ok()?;
        let left = namespace.state_with_nft()?;
        if !left.is_pristine() {
            problems.push(format!("{}: left after cleanup: {left:?}", case.name));
        }
        Ok(problems)
    });
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}

/// Writes the rules of a recording with the field's own tools.
fn leave_as_recorded(namespace: &Namespace, recorded: &Value, variant: &str) -> Result<()> {
    let lines = |value: &Value| -> String {
        let lines = value.as_array().into_iter().flatten().filter_map(Value::as_str);
        lines.map(|line| format!("{line}\n")).collect()
    };
    let feed = |program: &str, args: &[&str], text: &str| -> Result<()> {
        let mut command = namespace.command(&process::command(program, args));
        process::run_with_input(&mut command, text, SHORT)?.ok()?;
        Ok(())
    };
    for (key, family) in [("state_v4", "iptables"), ("state_v6", "ip6tables")] {
        for (table, rules) in recorded[key].as_object().into_iter().flatten() {
            let text = format!("*{table}\n{}COMMIT\n", lines(rules));
            feed(&format!("{family}-{variant}-restore"), &["--noflush"], &text)?;
        }
    }
    feed("nft", &["-f", "-"], &lines(&recorded["nft"]))
}

/// Pieces of the list, each beginning with the last case of the piece before it.
fn walks<'a>(cases: &'a [&'a Case]) -> Vec<&'a [&'a Case]> {
    const LENGTH: usize = 12;
    (0..cases.len() - 1)
        .step_by(LENGTH)
        .map(|start| &cases[start..cases.len().min(start + LENGTH + 1)])
        .collect()
}

fn replay(walk: &[&Case]) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let mut namespace: Option<(Families, Namespace)> = None;
    for (index, pair) in walk.windows(2).enumerate() {
        let (before, case) = (pair[0], pair[1]);
        let namespace = match &mut namespace {
            Some((families, namespace)) if *families == case.families => namespace,
            other => {
                let fresh = Namespace::pod(case.families)?;
                before.run(&fresh, &[])?.ok()?;
                &other.insert((case.families, fresh)).1
            }
        };
        // Over what either backend has written.
        let more =
            if index % 2 == 0 { &["--reconcile"][..] } else { &["--reconcile", "--backend", "restore"] };
        let run = case.run(namespace, more)?;
        let found = case.compare(namespace, &run)?;
        problems.extend(found.into_iter().map(|problem| format!("over {}: {problem}", before.name)));
    }
    Ok(problems)
}
