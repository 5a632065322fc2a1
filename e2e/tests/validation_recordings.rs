//! The validator agrees with the planner: each recorded configuration, programmed by `istio-iptables`, is proven by
//! `istio-validation` with the same flags; and is not once it was removed.

mod common;
mod validation_support;

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use e2e::netns::{Families, Namespace};
use serde_json::Value;
use validation_support::validate_with;

const THREADS: usize = 2;
/// Recorded runs in which the proxy's path is programmed, at least.
const AGREED: usize = 300;

struct Case {
    name: String,
    args: Vec<String>,
    env: Vec<(String, String)>,
    families: Families,
    nameservers: Vec<String>,
    who: (u32, u32),
}

/// The successful cases in which the rules send a user's own calls to the inbound listener.
fn cases() -> Result<Vec<Case>> {
    let divergences: Value = serde_json::from_str(include_str!("../fixtures/divergences.json"))?;
    let divergences: Vec<&Value> = divergences["rules"].as_array().into_iter().flatten().collect();
    let recorded: Vec<Value> = serde_json::from_str(include_str!("../fixtures/rules.json"))?;
    let differs = |case: &Value| divergences.iter().any(|divergence| divergence["case"] == case["name"]);
    recorded
        .iter()
        .filter(|case| case["exit"] == 0 && !differs(case))
        .filter_map(|case| read(case).transpose())
        .collect()
}

fn read(case: &Value) -> Result<Option<Case>> {
    let Some(who) = proxy(case) else { return Ok(None) };
    let env: Option<BTreeMap<String, String>> = serde_json::from_value(case["env"].clone())?;
    let nameservers: Option<Vec<String>> = serde_json::from_value(case["nameservers"].clone())?;
    Ok(Some(Case {
        name: case["name"].as_str().context("a case without a name")?.to_owned(),
        args: serde_json::from_value(case["args"].clone())?,
        env: env.into_iter().flatten().collect(),
        families: Families::from_digits(case["families"].as_str().unwrap_or("46"))?,
        nameservers: nameservers.unwrap_or_else(|| vec!["10.96.0.10".to_owned()]),
        who,
    }))
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
    fn programmed(&self, namespace: &Namespace, more: &[&str]) -> Result<()> {
        let args: Vec<&str> = self.args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        namespace.run(&common::with_environment(common::istio_iptables(), &args, &self.env))?.ok()?;
        Ok(())
    }

    fn play(&self) -> Result<Vec<String>> {
        let namespace = Namespace::pod(self.families)?;
        namespace.set_nameservers(&self.nameservers)?;
        self.programmed(&namespace, &[])?;
        let mut problems = self.problems(&namespace, &["redirected"])?;
        self.programmed(&namespace, &["--cleanup-only"])?;
        problems.extend(self.problems(&namespace, &["no-rules"])?);
        Ok(problems)
    }

    fn problems(&self, namespace: &Namespace, expected: &[&str]) -> Result<Vec<String>> {
        let timeout = if expected == ["redirected"] { "5s" } else { "200ms" };
        let args = self.args.iter().map(String::as_str).chain(["--probe-timeout", timeout]);
        let verdict = validate_with(namespace, self.who, &args.collect::<Vec<_>>(), &self.env)?;
        let problems = expected.iter().flat_map(|expected| verdict.problems(expected));
        Ok(problems.map(|problem| format!("{} as {:?}: {problem}", self.name, self.who)).collect())
    }
}

#[test]
fn what_is_programmed_is_proven_and_what_is_removed_is_not() -> Result<()> {
    let cases = cases()?;
    assert!(cases.len() >= AGREED, "{} cases", cases.len());
    let problems =
        common::in_parallel(THREADS, &cases, |_, case| case.play().with_context(|| case.name.clone()));
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    Ok(())
}
