//! The validator agrees with the planner: each recorded configuration, programmed by `istio-iptables`, is proven by
//! `istio-validation` with the same flags; and is not once it was removed.

use anyhow::{Context, Result};
use e2e::iptables::{self, recording::Recording};
use e2e::validation::validate_with;
use serde_json::Value;
use test_support::netns::Namespace;

const THREADS: usize = 2;
/// Recorded runs in which the proxy's path is programmed, at least.
const AGREED: usize = 300;

struct Case {
    recording: Recording,
    who: (u32, u32),
}

/// The successful cases in which the rules send a user's own calls to the inbound listener.
fn cases() -> Result<Vec<Case>> {
    let agreed = Recording::all()?
        .into_iter()
        .filter(|recording| recording.succeeded() && recording.divergence.is_none());
    Ok(agreed.filter_map(|recording| Some(Case { who: proxy(&recording.recorded)?, recording })).collect())
}

/// The first user and group whose calls to their own pod are sent to the inbound listener, by what was recorded.
fn proxy(case: &Value) -> Option<(u32, u32)> {
    let id = |iptables: &str, nft: &str| {
        let lines = |value: &Value| {
            value
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let all = lines(&case["state_v4"]["nat"]).into_iter().chain(lines(&case["nft"]));
        let to_inbound =
            |line: &String| line.contains("-j ISTIO_IN_REDIRECT") || line.contains("jump istio-in-redirect");
        all.filter(to_inbound).find_map(|line| {
            let (_, rest) = line.split_once(iptables).or_else(|| line.split_once(nft))?;
            rest.split_whitespace().next()?.parse().ok()
        })
    };
    Some((id("--uid-owner ", "skuid ")?, id("--gid-owner ", "skgid ")?))
}

impl Case {
    fn play(&self) -> Result<Vec<String>> {
        let namespace = Namespace::pod(self.recording.families)?;
        self.recording.run(&namespace, &[])?.ok()?;
        let mut problems = self.problems(&namespace, &["redirected"])?;
        self.recording.run(&namespace, &["--cleanup-only"])?.ok()?;
        problems.extend(self.problems(&namespace, &["no-rules"])?);
        Ok(problems)
    }

    fn problems(&self, namespace: &Namespace, expected: &[&str]) -> Result<Vec<String>> {
        let timeout = if expected == ["redirected"] { "5s" } else { "200ms" };
        let Recording { name, args, env, .. } = &self.recording;
        let args = args.iter().map(String::as_str).chain(["--probe-timeout", timeout]);
        let verdict = validate_with(namespace, self.who, &args.collect::<Vec<_>>(), env)?;
        let problems = expected.iter().flat_map(|expected| verdict.problems(expected));
        Ok(problems.map(|problem| format!("{name} as {:?}: {problem}", self.who)).collect())
    }
}

#[test]
fn what_is_programmed_is_proven_and_what_is_removed_is_not() -> Result<()> {
    let cases = cases()?;
    assert!(cases.len() >= AGREED, "{} cases", cases.len());
    let cases = test_support::sample::part(cases, 4, 1);
    let problems = iptables::in_parallel(THREADS, &cases, |_, case| {
        case.play().with_context(|| case.recording.name.clone())
    });
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}
