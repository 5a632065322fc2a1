//! What traffic does a change of a manifest treat differently, and does anything bypass the proxy that did not?
//!
//! ```text
//! pr_check BEFORE.json AFTER.json     a Pod, or anything with a pod template; ends with 1 if anything bypasses the proxy
//! ```
//!
//! `kubectl create --dry-run=client -o json -f FILE` makes JSON of YAML.

#![allow(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)] // a program, unlike the library

use packet_trace::TrafficDifference;
use redirect_core::{RulePlan, pod::PodFacts, settings::NamespaceFacts};
use std::{env, error::Error, fs, process::ExitCode};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let differences = TrafficDifference::of_plans(&plan(1)?, &plan(2)?);
    print!("{}", TrafficDifference::summary(&differences));
    Ok(ExitCode::from(u8::from(differences.iter().any(TrafficDifference::bypasses))))
}

/// The plan of the manifest that an argument names, for a pod with an address of IPv4.
fn plan(argument: usize) -> Result<RulePlan, Box<dyn Error>> {
    let file = env::args().nth(argument).ok_or("usage: pr_check BEFORE.json AFTER.json")?;
    let manifest = serde_json::from_slice(&fs::read(&file)?)?;
    let addresses = ["192.0.2.1".parse()?];
    let decision = PodFacts::from_manifest(&manifest)?.decide(&NamespaceFacts::new(&addresses))?;
    decision.notices().iter().for_each(|notice| eprintln!("{file}: {notice}"));
    Ok(decision.plan())
}
