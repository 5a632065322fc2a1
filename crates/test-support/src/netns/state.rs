//! What the kernel holds in a namespace, in a form that two moments or a recording can be compared in.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Error, Result};
use serde_json::Value;

use super::Namespace;
use crate::process::{self, SHORT};
use crate::rewrites::{Printed, Rewrites};

/// Chain name to its lines, in order.
pub type Chains = BTreeMap<String, Vec<String>>;
/// Table name to its chains. Built-in chains without a rule are left out.
pub type Tables = BTreeMap<String, Chains>;

/// The table name under which [`State`] shows that both iptables variants hold rules: never right, equal to no recording.
const BOTH_VARIANTS: &str = "BOTH BACKENDS PROGRAMMED";

/// Everything that traffic redirection may leave in a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// `iptables-save`, of whichever variant holds rules.
    pub v4: Tables,
    /// `ip6tables-save`, of whichever variant holds rules.
    pub v6: Tables,
    /// `ip -4 rule list`, sorted, without priorities and the kernel's own three.
    pub rule4: Vec<String>,
    /// `ip -6 rule list`, sorted, without priorities and the kernel's own three.
    pub rule6: Vec<String>,
    /// Local default routes of any IPv4 table, sorted.
    pub route4: Vec<String>,
    /// Local default routes of any IPv6 table, sorted.
    pub route6: Vec<String>,
    /// Addresses on `lo` with prefix length, sorted.
    pub lo: Vec<String>,
    /// Chains of native nftables tables that have `istio` in their name: `table inet x / chain y` to its lines.
    pub nft: Chains,
}

impl State {
    /// What a namespace holds now.
    pub(super) fn of(namespace: &Namespace, with_nft: bool) -> Result<Self> {
        namespace.enter(|| {
            let (v4, v6) = (routing(&["-4"], "all type local")?, routing(&["-6"], "all type local")?);
            let nft = with_nft.then(|| print("nft", &["-s", "list", "ruleset"], "")).transpose()?;
            let nft = nft.as_deref();
            Ok(Self {
                v4: of_either("iptables", nft)?,
                v6: of_either("ip6tables", nft)?,
                rule4: rules(&v4),
                rule6: rules(&v6),
                route4: default_routes(&v4),
                route6: default_routes(&v6),
                lo: sorted(addresses(&v4).into_iter().chain(addresses(&v6))),
                nft: nft_chains(nft.unwrap_or_default()),
            })
        })?
    }

    /// What a conformance case recorded: its `state_v4`, `state_v6`, `ip_rule_v4`, `ip_rule_v6` and `nft`, as the
    /// [rewrites](crate::rewrites) have them.
    /// Routes and loopback addresses are not compared against recordings and stay empty.
    pub fn recorded(case: &Value) -> Result<Self> {
        let rewrites = Rewrites::named().map_err(Error::msg)?;
        let rewritten = |mut tables: Tables, printed| {
            tables.values_mut().for_each(|chains| rewrite(rewrites, printed, chains));
            tables
        };
        let mut nft = nft_chains(&strings(&case["nft"])?.join("\n"));
        rewrite(rewrites, Printed::Nft, &mut nft);
        Ok(Self {
            v4: rewritten(recorded_tables(&case["state_v4"])?, Printed::V4),
            v6: rewritten(recorded_tables(&case["state_v6"])?, Printed::V6),
            rule4: recorded_rules(&case["ip_rule_v4"])?,
            rule6: recorded_rules(&case["ip_rule_v6"])?,
            nft,
            ..Self::default()
        })
    }

    /// The same without what recordings do not hold: routes and loopback addresses.
    #[must_use]
    pub fn without_routes_and_addresses(mut self) -> Self {
        self.route4.clear();
        self.route6.clear();
        self.lo.clear();
        self
    }

    /// Whether it has no rule, ip rule, route or native table. Addresses are not checked.
    pub fn is_pristine(&self) -> bool {
        let lo = self.lo.clone();
        *self == Self { lo, ..Self::default() }
    }

    /// One text per difference, each with both sides; none if the two are equal.
    pub fn differences(&self, want: &Self) -> Vec<String> {
        let (got, want) = (self.parts(), want.parts());
        let names: BTreeSet<&String> = want.keys().chain(got.keys()).collect();
        let unlike = names.into_iter().filter(|name| want.get(*name) != got.get(*name));
        unlike
            .map(|name| format!("{name}:\n   want {:?}\n   got  {:?}", want.get(name), got.get(name)))
            .collect()
    }

    /// Its lists of lines by their names, such as `v4 nat OUTPUT`.
    fn parts(&self) -> BTreeMap<String, &Vec<String>> {
        let of_family = |family: &'static str, tables| {
            let chains =
                Tables::iter(tables).flat_map(|(table, chains)| chains.iter().map(move |of| (table, of)));
            chains.map(move |(table, (chain, rules))| (format!("{family} {table} {chain}"), rules))
        };
        let nft = self.nft.iter().map(|(chain, rules)| (format!("nft {chain}"), rules));
        let lists = [
            ("rule4", &self.rule4),
            ("rule6", &self.rule6),
            ("route4", &self.route4),
            ("route6", &self.route6),
            ("lo", &self.lo),
        ];
        let lists = lists.map(|(name, lines)| (name.to_owned(), lines));
        of_family("v4", &self.v4).chain(of_family("v6", &self.v6)).chain(nft).chain(lists).collect()
    }
}

/// Runs a program in the namespace of this thread and returns what it prints.
pub(super) fn print(program: &str, args: &[&str], input: &str) -> Result<String> {
    Ok(process::run_with_input(&mut process::command(program, args), input, SHORT)?.ok()?.stdout)
}

/// The policy rules, some routes and the addresses of `lo`, by one `ip` with these options: a process takes longer than an answer.
pub(super) fn routing(options: &[&str], routes: &str) -> Result<String> {
    let questions = format!("rule list\nroute show table {routes}\naddr show dev lo\n");
    print("ip", &[options, &["-batch", "-"]].concat(), &questions)
}

/// What a variant's save program prints, such as `ip6tables-legacy`'s. Nothing is asked for tables that are not there, as `nft list ruleset` and
/// `/proc` say: asking takes long, and could make one.
pub(super) fn saved(variant: &str, ruleset: Option<&str>) -> Result<Tables> {
    let (family, kind) = variant.split_once("tables-").context("no variant")?;
    let names = || fs::read_to_string(format!("/proc/thread-self/net/{family}_tables_names"));
    let has_table = |ruleset: &str| ruleset.lines().any(|line| line.starts_with(&format!("table {family} ")));
    let is_there = if kind == "legacy" {
        names().is_ok_and(|all| !all.is_empty())
    } else {
        ruleset.is_none_or(has_table)
    };
    let text = if is_there { print(&format!("{variant}-save"), &[], "")? } else { String::new() };
    Ok(tables(&text))
}

/// Of whichever variant holds rules.
fn of_either(family: &str, ruleset: Option<&str>) -> Result<Tables> {
    let saved = |variant| saved(&format!("{family}-{variant}"), ruleset);
    let (nft, legacy) = (saved("nft")?, saved("legacy")?);
    Ok(match (nft.is_empty(), legacy.is_empty()) {
        (false, false) => {
            let sides = [("nft", nft), ("legacy", legacy)];
            let lines = sides.map(|(side, tables)| (side.to_owned(), vec![format!("{tables:?}")]));
            Tables::from([(BOTH_VARIANTS.to_owned(), Chains::from(lines))])
        }
        (true, _) => legacy,
        (false, true) => nft,
    })
}

/// Parses the text of `iptables-save`.
fn tables(text: &str) -> Tables {
    let mut tables = Tables::new();
    let mut current = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('*') {
            current = name.to_owned();
        } else if let Some(chain) = line.strip_prefix(':') {
            let mut words = chain.split_whitespace();
            let (name, policy) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            if !is_untouched_builtin(name, policy) {
                tables.entry(current.clone()).or_default().entry(name.to_owned()).or_default();
            }
        } else if !line.is_empty() && !line.starts_with('#') && line != "COMMIT" {
            let chain = line.split_whitespace().nth(1).unwrap_or_default().to_owned();
            tables.entry(current.clone()).or_default().entry(chain).or_default().push(line.to_owned());
        }
    }
    tables
}

fn is_untouched_builtin(chain: &str, policy: &str) -> bool {
    policy == "ACCEPT" && matches!(chain, "PREROUTING" | "INPUT" | "FORWARD" | "OUTPUT" | "POSTROUTING")
}

/// The lines of `ip rule list`: `PRIORITY:\tRULE`.
fn rules(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.split_once(":\t"));
    let added = lines.filter(|(priority, _)| !matches!(*priority, "0" | "32766" | "32767"));
    sorted(added.map(|(_, rule)| rule.trim().to_owned()))
}

/// The lines of `ip route show type local` that lead everywhere.
fn default_routes(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| line.starts_with("local default"));
    sorted(lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")))
}

/// Of `ip addr show` the word after `inet` and `inet6`.
fn addresses(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("inet"));
    let words = lines.filter_map(|line| line.trim_start_matches('6').split_whitespace().next());
    sorted(words.map(str::to_owned))
}

/// The chains of `nft list ruleset` that have `istio` in their name.
fn nft_chains(text: &str) -> Chains {
    let mut blocks = nft_blocks(text);
    blocks.retain(|name, _| name.contains(" / chain ") && name.contains("istio"));
    blocks
}

/// The lines of `nft list ruleset` by the table and chain that they are in: `table inet x`, or `table inet x / chain y`.
pub(super) fn nft_blocks(text: &str) -> Chains {
    let mut blocks = Chains::new();
    let (mut table, mut block) = (String::new(), String::new());
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        let depth = line.len() - line.trim_start_matches('\t').len();
        let line = line.trim();
        match (depth, line, line.strip_suffix(" {")) {
            (0, _, Some(name)) => {
                name.clone_into(&mut table);
                block.clone_from(&table);
            }
            (1, _, Some(name)) => block = format!("{table} / {name}"),
            (0 | 1, "}", _) => block.clone_from(&table),
            _ => {
                blocks.entry(block.clone()).or_default().push(line.to_owned());
                continue;
            }
        }
        blocks.entry(block.clone()).or_default();
    }
    blocks
}

fn rewrite(rewrites: &Rewrites, printed: Printed, chains: &mut Chains) {
    for (chain, lines) in chains {
        *lines = lines.iter().flat_map(|line| rewrites.of(printed, chain, line)).collect();
    }
}

/// A recording keeps the lines of `iptables-save` per table.
fn recorded_tables(value: &Value) -> Result<Tables> {
    let mut text = String::new();
    for (table, lines) in value.as_object().into_iter().flatten() {
        text.push_str(&format!("*{table}\n{}\n", strings(lines)?.join("\n")));
    }
    Ok(tables(&text))
}

fn recorded_rules(value: &Value) -> Result<Vec<String>> {
    let lines = strings(value)?.into_iter();
    Ok(sorted(
        lines.map(|line| line.split_once('\t').map_or(line.clone(), |(_, rule)| rule.trim().to_owned())),
    ))
}

fn strings(value: &Value) -> Result<Vec<String>> {
    let lines = value.as_array().into_iter().flatten();
    lines
        .map(|line| line.as_str().map(str::to_owned).with_context(|| format!("{line} is not text")))
        .collect()
}

fn sorted(lines: impl Iterator<Item = String>) -> Vec<String> {
    let mut lines: Vec<String> = lines.collect();
    lines.sort();
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_keep_chains_without_rules_and_drop_untouched_builtins() {
        let parsed = tables(
            "# x\n*nat\n:OUTPUT ACCEPT [0:0]\n:MINE - [0:0]\n-A PREROUTING -j MINE\nCOMMIT\n*raw\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n",
        );
        let nat = Chains::from([
            ("MINE".to_owned(), vec![]),
            ("PREROUTING".to_owned(), vec!["-A PREROUTING -j MINE".to_owned()]),
        ]);
        assert_eq!(parsed, Tables::from([("nat".to_owned(), nat)]));
    }

    #[test]
    fn what_one_program_prints_is_told_apart() {
        let text = "0:\tfrom all lookup local\n32765:\tfrom all fwmark 0x539 lookup 133\n32766:\tfrom all lookup main\n\
                    local default dev lo table 133 scope host \nlocal 127.0.0.0/8 dev lo table local\n\
                    1: lo: <LOOPBACK,UP> mtu 65536 qdisc noqueue state UNKNOWN\n    inet 127.0.0.1/8 scope host lo\n";
        assert_eq!(rules(text), ["from all fwmark 0x539 lookup 133"]);
        assert_eq!(default_routes(text), ["local default dev lo table 133 scope host"]);
        assert_eq!(addresses(text), ["127.0.0.1/8"]);
    }

    #[test]
    fn loopback_addresses_of_both_families() {
        let text = "1: lo: <LOOPBACK>\n    link/loopback 00:00\n    inet 127.0.0.1/8 scope host lo\n    inet6 ::1/128 scope host\n";
        assert_eq!(addresses(text), ["127.0.0.1/8", "::1/128"]);
    }

    #[test]
    fn differences_name_table_and_chain() {
        let with = |rule: &str| State {
            v4: Tables::from([(
                "nat".to_owned(),
                Chains::from([("OUTPUT".to_owned(), vec![rule.to_owned()])]),
            )]),
            ..State::default()
        };
        let differences = with("-A OUTPUT -j A").differences(&with("-A OUTPUT -j B"));
        assert_eq!(
            differences,
            ["v4 nat OUTPUT:\n   want Some([\"-A OUTPUT -j B\"])\n   got  Some([\"-A OUTPUT -j A\"])"]
        );
        assert_eq!(with("x").differences(&with("x")), Vec::<String>::new());
    }
}
