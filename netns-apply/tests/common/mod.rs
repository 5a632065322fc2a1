//! The recordings of the reference as plans, and what this crate and iptables make of them in a namespace.

#![allow(clippy::unwrap_used, dead_code)] // a panic is how a test fails; not every test uses everything

use e2e::netns::{Families, Namespace};
use netns_apply::netlink::{Connection, NativeChange, NetlinkError, Transaction};
use redirect_core::{
    Family, Redirect, RulePlan,
    change::Change,
    netlink::Observed,
    plan::FamilyRules,
    settings::{Kind, NameLookup, NamespaceFacts, RawSettings, SETTINGS, Setting, Source},
};
use serde_json::Value;
use std::{collections::BTreeMap, net::IpAddr, process::Command, time::Instant};

/// The users and groups of the machine the recordings were made on, as far as they matter.
struct Recorded;

impl NameLookup for Recorded {
    fn user(&self, name: &str) -> Option<u32> {
        (name == "root").then_some(0)
    }

    fn group(&self, name: &str) -> Option<u32> {
        (name == "root").then_some(0)
    }
}

fn fixtures(file: &str) -> Value {
    let path = format!("{}/../e2e/fixtures/{file}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|item| item.as_str().unwrap().to_owned()).collect()
}

fn flags(args: &[String], raw: &mut RawSettings) -> Option<()> {
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let by_name = |setting: &&Setting| match (arg.strip_prefix("--"), setting.flag, setting.short) {
            (Some(long), Some(flag), _) => long == flag,
            (Some(_), None, _) => false,
            (None, _, short) => short.is_some_and(|short| *arg == format!("-{short}")),
        };
        let setting = SETTINGS.iter().find(by_name)?;
        let text = if setting.kind == Kind::Bool { "true".to_owned() } else { args.next()?.clone() };
        raw.set(setting.key, text, Source::Flag(setting.flag.unwrap()));
    }
    Some(())
}

fn plan(case: &Value) -> Option<RulePlan> {
    let mut raw = RawSettings::new();
    let env: BTreeMap<String, String> = serde_json::from_value(case["env"].clone()).unwrap_or_default();
    raw.read_environment(|_| true, |name| env.get(name).cloned());
    flags(&strings(&case["args"]), &mut raw)?;
    let families = case["families"].as_str().unwrap_or("46");
    let mut addresses: Vec<IpAddr> = vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()];
    addresses.extend(families.contains('4').then(|| "10.1.0.2".parse::<IpAddr>().unwrap()));
    addresses.extend(families.contains('6').then(|| "fd00:10::2".parse::<IpAddr>().unwrap()));
    let nameservers: Vec<IpAddr> = match case.get("nameservers") {
        Some(list) if !list.is_null() => strings(list).iter().map(|text| text.parse().unwrap()).collect(),
        _ => vec!["10.96.0.10".parse().unwrap()],
    };
    let facts = NamespaceFacts { addresses: &addresses, nameservers: &nameservers, names: &Recorded };
    Redirect::parse(&raw, &facts).ok().map(|redirect| redirect.plan())
}

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

/// The recordings of successful runs.
pub fn recordings() -> Vec<Recording> {
    let divergent: Vec<String> = fixtures("divergences.json")["rules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|divergence| divergence["case"].as_str().unwrap().to_owned())
        .collect();
    let all = fixtures("rules.json").as_array().unwrap().clone();
    let name = |case: &Value| case["name"].as_str().unwrap().to_owned();
    let alike = all.into_iter().filter(|case| case["exit"] == 0 && !divergent.contains(&name(case)));
    alike.filter_map(|case| Some(Recording { name: name(&case), plan: plan(&case)?, case })).collect()
}

pub fn namespace() -> Namespace {
    Namespace::empty(Families::Dual).unwrap()
}

pub fn soon() -> Instant {
    Instant::now() + e2e::process::SHORT
}

pub fn observe() -> Observed {
    Connection::open().unwrap().observe().unwrap()
}

/// The changes of both families that put a plan in the place of what is there.
pub fn changes(observed: &Observed, plan: &RulePlan) -> Vec<(Family, Change)> {
    let change = |family| (family, Change::between(observed.state(family), &plan.rules(family)));
    Family::BOTH.map(change).into_iter().filter(|(_, change)| !change.is_empty()).collect()
}

/// Puts a plan in force in this thread's namespace; whether there was anything to do.
pub fn apply(plan: &RulePlan) -> Result<bool, NetlinkError> {
    let mut connection = Connection::open()?;
    let observed = connection.observe()?;
    let rules = changes(&observed, plan);
    let transaction = Transaction { rules: &rules, native: NativeChange::Keep };
    connection.commit(&transaction, &observed, soon())?;
    Ok(!rules.is_empty())
}

/// Whether the rules observed are those of a plan, rule for rule.
pub fn is_in_force(observed: &Observed, plan: &RulePlan) -> bool {
    Family::BOTH.into_iter().all(|family| {
        let wanted: FamilyRules = plan.rules(family);
        observed.state(family) == wanted.state()
    })
}

/// Runs a program in this thread's namespace with some input.
pub fn run(program: &str, args: &[&str], input: &str) -> String {
    let mut command = Command::new(program);
    let output = e2e::process::run_with_input(command.args(args), input, e2e::process::SHORT).unwrap();
    output.ok().unwrap().stdout
}
