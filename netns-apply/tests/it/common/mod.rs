//! The recordings of the reference as plans, and what this crate and iptables make of them in a namespace.

#![allow(clippy::unwrap_used, dead_code)] // a panic is how a test fails; not every test uses everything

#[path = "../../../../redirect-core/tests/it/recorded/mod.rs"]
mod recorded;

pub mod dumps;

use netfilter_state::{
    change::IptablesChange,
    netlink::Observed,
    state::IptablesTables,
    steps::{Observation, Transaction},
};
use netns_apply::{
    ApplyError, ApplyOptions, Snapshot,
    netlink::{NetlinkError, NftConnection},
};
use recorded::{fixtures, plan};
use redirect_core::{Family, RulePlan};
use serde_json::Value;
use std::{process::Command, time::Instant};
use test_support::{
    netns::{Families, Namespace},
    sample,
};

/// A recording that has a plan.
pub struct Recording {
    pub name: String,
    pub case: Value,
    pub plan: RulePlan,
}

impl Recording {
    /// Whether it was made with native nftables.
    pub fn is_native(&self) -> bool {
        self.case.get("nft").is_some()
    }
}

/// The recordings of successful runs, or every fourth of them from one on.
pub fn recordings(first: usize) -> Vec<Recording> {
    sample::part(all_recordings(), 4, first)
}

/// The recordings of successful runs.
pub fn all_recordings() -> Vec<Recording> {
    let divergent: Vec<String> = fixtures("divergences.json")["rules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|divergence| divergence["case"].as_str().unwrap().to_owned())
        .collect();
    let all = fixtures("rules.json").as_array().unwrap().clone();
    let name = |case: &Value| case["name"].as_str().unwrap().to_owned();
    let alike = all.into_iter().filter(|case| case["exit"] == 0 && !divergent.contains(&name(case)));
    let all: Vec<_> =
        alike.filter_map(|case| Some(Recording { name: name(&case), plan: plan(&case)?, case })).collect();
    let native = all.iter().filter(|recording| recording.is_native()).count();
    assert!(native > 0 && all.len() - native >= 250, "{} recordings, {native} of them native", all.len());
    all
}

/// Some of the recordings, as they would be with strict capture.
pub fn strict_recordings() -> Vec<Recording> {
    let strict = |Recording { name, mut case, .. }: Recording| {
        case["args"].as_array_mut()?.push("--strict-capture".into());
        Some(Recording { name: format!("{name}, strict"), plan: plan(&case)?, case })
    };
    let strict: Vec<Recording> = all_recordings().into_iter().step_by(6).filter_map(strict).collect();
    assert!(strict.iter().any(|recording| recording.plan.policy_routes().is_some()), "none in TPROXY mode");
    sample::part(strict, 4, 0)
}

pub fn namespace() -> Namespace {
    Namespace::empty(Families::Dual).unwrap()
}

pub fn soon() -> Instant {
    Instant::now() + test_support::process::SHORT
}

pub fn observe() -> Observed {
    NftConnection::open().unwrap().observe(soon()).unwrap()
}

/// What concerns the mesh in this thread's namespace.
pub fn observation(options: &ApplyOptions) -> Result<Observation, ApplyError> {
    Ok(Snapshot::take(&RulePlan::empty(), options)?.observation().clone())
}

/// The changes of both families that put a plan in the place of what is there.
pub fn changes(observed: &Observed, plan: &RulePlan) -> Vec<(Family, IptablesChange)> {
    let change = |family| (family, IptablesChange::between(observed.state(family), &plan.rules(family)));
    Family::BOTH.map(change).into_iter().filter(|(_, change)| !change.is_empty()).collect()
}

/// Puts a plan in force in this thread's namespace; whether there was anything to do.
pub fn apply(plan: &RulePlan) -> Result<bool, NetlinkError> {
    let mut connection = NftConnection::open()?;
    let observed = connection.observe(soon())?;
    let transaction = Transaction { iptables: changes(&observed, plan), native: None };
    connection.commit(&transaction, &observed, soon())?;
    Ok(!transaction.is_empty())
}

/// Whether the rules observed are those of a plan, rule for rule.
pub fn is_in_force(observed: &Observed, plan: &RulePlan) -> bool {
    Family::BOTH
        .into_iter()
        .all(|family| *observed.state(family) == IptablesTables::from(&plan.rules(family)))
}

/// Runs a program in this thread's namespace with some input.
pub fn run(program: &str, args: &[&str], input: &str) -> String {
    let mut command = Command::new(program);
    let output =
        test_support::process::run_with_input(command.args(args), input, test_support::process::SHORT)
            .unwrap();
    output.ok().unwrap().stdout
}

/// The words of a rule, sorted: in which order the kernel tells the elements of a set is its own affair.
pub fn sorted_words(rule: &str) -> Vec<String> {
    let mut words: Vec<String> = rule.split([' ', ',']).map(str::to_owned).collect();
    words.sort_unstable();
    words
}
