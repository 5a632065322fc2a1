//! What the kernel holds, compared with a plan: rule by rule in the program's own words, and counted by programs that know nothing of it.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use netfilter_state::change::RuleDifference;
use netfilter_state::netlink::{NativeState, Observed};
use netfilter_state::state::IptablesTables;
use redirect_core::options::NativeForm;
use redirect_core::rule::Table;
use redirect_core::{Family, RulePlan};
use serde_json::Value;
use test_support::netns::Namespace;

/// What programs the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Netlink,
    RestoreNft,
    RestoreLegacy,
    Native,
    Sets,
}

impl Backend {
    pub const ALL: [Self; 5] =
        [Self::Netlink, Self::RestoreNft, Self::RestoreLegacy, Self::Native, Self::Sets];

    /// The flags of `istio-iptables` that choose it.
    pub const fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Netlink => &["--backend=netlink"],
            Self::RestoreNft => &["--force-iptables-binary=nft"],
            Self::RestoreLegacy => &["--force-iptables-binary=legacy"],
            Self::Native => &["--native-nftables"],
            Self::Sets => &["--native-nftables", "--nft-sets"],
        }
    }

    /// The program that prints a family's rules of its tables, if they are iptables'.
    const fn save(self, family: Family) -> Option<&'static str> {
        match (self, family) {
            (Self::Netlink | Self::RestoreNft, Family::V4) => Some("iptables-nft-save"),
            (Self::Netlink | Self::RestoreNft, Family::V6) => Some("ip6tables-nft-save"),
            (Self::RestoreLegacy, Family::V4) => Some("iptables-legacy-save"),
            (Self::RestoreLegacy, Family::V6) => Some("ip6tables-legacy-save"),
            (Self::Native | Self::Sets, _) => None,
        }
    }

    const fn native_form(self) -> Option<NativeForm> {
        match self {
            Self::Native => Some(NativeForm::Plain),
            Self::Sets => Some(NativeForm::Sets),
            Self::Netlink | Self::RestoreNft | Self::RestoreLegacy => None,
        }
    }
}

/// Whether the kernel holds a plan's rules in a namespace, all of them and no other.
pub fn is_exactly(namespace: &Namespace, plan: &RulePlan, backend: Backend) -> Result<()> {
    let families = Family::BOTH.map(|family| {
        let rules = plan.rules(family);
        let count =
            Table::ALL.iter().flat_map(|table| rules.chains(*table)).map(|(_, rules)| rules.len()).sum();
        (family, rules, count)
    });
    for (family, rules, count) in &families {
        let Some(program) = backend.save(*family) else { continue };
        let text = print(namespace, program)?;
        let lines: usize = text.lines().filter(|line| line.starts_with("-A ")).count();
        ensure!(lines == *count, "{family}: {lines} rules, {count} planned:\n{text}");
        if lines > 0 {
            let difference = RuleDifference::all(&IptablesTables::saved(&text)?, rules).into_iter().next();
            ensure!(
                difference.is_none(),
                "{family}: {}",
                difference.map(|one| one.to_string()).unwrap_or_default()
            );
        }
    }
    let iptables: usize = families.iter().map(|(_, _, count)| count).sum();
    let (rules, tables) = counted_by_nft(namespace)?;
    let (wanted, names): (usize, &[&str]) = match (backend, backend.native_form()) {
        (_, Some(form)) => {
            let text = plan.nft_text(form);
            (
                text.lines().filter(|line| line.starts_with("add rule ")).count(),
                &["istio-proxy-raw", "istio-proxy-mangle", "istio-proxy-nat"],
            )
        }
        (Backend::RestoreLegacy, None) => (0, &[]),
        (_, None) => (iptables, &["raw", "mangle", "nat"]),
    };
    ensure!(rules == wanted, "nft counts {rules} rules, {wanted} are planned");
    ensure!(tables.iter().all(|table| names.contains(&table.as_str())), "tables of nobody: {tables:?}");
    if let Some(form) = backend.native_form() {
        let wanted = NativeState::wanted(plan, form);
        let observed = observe(namespace)?;
        let differences = observed.native().differences_to(&wanted);
        ensure!(differences.is_empty() && observed.native() == &wanted, "{differences:?}");
    }
    routing(namespace, plan)
}

fn observe(namespace: &Namespace) -> Result<Observed> {
    let deadline = std::time::Instant::now() + test_support::process::SHORT;
    namespace.enter(|| netns_apply::netlink::NftConnection::open()?.observe(deadline))?.context("cannot look")
}

/// All rules and tables that nft knows, whoever's.
fn counted_by_nft(namespace: &Namespace) -> Result<(usize, BTreeSet<String>)> {
    let ruleset: Value = serde_json::from_str(&print(namespace, "nft -j list ruleset")?)?;
    let objects = ruleset["nftables"].as_array().context("objects")?;
    let rules = objects.iter().filter(|object| object.get("rule").is_some()).count();
    let tables =
        objects.iter().filter_map(|object| object["table"]["name"].as_str().map(str::to_owned)).collect();
    Ok((rules, tables))
}

/// Policy rules and the address of lo.
fn routing(namespace: &Namespace, plan: &RulePlan) -> Result<()> {
    let routes = plan.policy_routes();
    for (family, option, own) in [(Family::V4, "-4", 3), (Family::V6, "-6", 2)] {
        let text = print(namespace, &format!("ip {option} rule list"))?;
        let wanted = routes.is_some_and(|routes| routes.families().contains(&family));
        let there = text.lines().count();
        ensure!(there == own + usize::from(wanted), "{family}: policy rules:\n{text}");
        if let Some(routes) = routes.filter(|_| wanted) {
            let (mark, table) = (routes.mark(), routes.table());
            let rule = format!("fwmark {:#x} lookup {table}", mark.value());
            ensure!(text.contains(&rule), "{family}: no {rule} in:\n{text}");
        }
    }
    let addresses = print(namespace, "ip -oneline -6 addr show dev lo")?;
    ensure!(addresses.contains(" ::6/128 ") == plan.loopback_address().is_some(), "{addresses}");
    Ok(())
}

fn print(namespace: &Namespace, words: &str) -> Result<String> {
    let mut words = words.split(' ');
    let command = test_support::process::command(words.next().unwrap_or_default(), words);
    Ok(namespace.run(&command)?.ok()?.stdout)
}
