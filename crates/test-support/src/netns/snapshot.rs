//! Everything a namespace holds, line by line, from any program.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::Namespace;
use super::state::{Tables, nft_blocks, print, routing, saved};

/// What is compared before and after: both variants of iptables, all of nftables, policy rules, the routes of all tables, the addresses of `lo`.
///
/// Left out is what comes and goes by itself, or does nothing: counters, link-local addresses, the routes that addresses bring with them a moment
/// later, and built-in chains of iptables that accept everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot(BTreeMap<&'static str, Vec<String>>);

/// One line that is on one side only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotDiff {
    /// Where: a program and its family, such as `ip6tables-legacy` or `ip -4 rule`.
    pub section: &'static str,
    /// Whether the line was there before and is not now.
    pub is_lost: bool,
    /// The line, with its table and chain.
    pub line: String,
}

impl std::fmt::Display for SnapshotDiff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", if self.is_lost { "-" } else { "+" }, self.section, self.line)
    }
}

impl Snapshot {
    /// What a namespace holds now.
    pub(super) fn of(namespace: &Namespace) -> Result<Self> {
        namespace.enter(|| {
            let mut sections = BTreeMap::new();
            let nft = print("nft", &["--stateless", "list", "ruleset"], "")?;
            for section in ["iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"] {
                sections.insert(section, chain_lines(&saved(section, Some(&nft))?));
            }
            sections.insert("nft", ruleset(&nft));
            for (family, rule, route) in
                [("-4", "ip -4 rule", "ip -4 route"), ("-6", "ip -6 rule", "ip -6 route")]
            {
                let told = routing(&[family, "-details"], "all")?;
                // Where a family is off, `lo` is not shown.
                let (routing, lo) = told.split_once("1: lo: ").unwrap_or((&told, ""));
                let (rules, routes) = routing.lines().partition::<Vec<_>, _>(|line| line.contains(":\t"));
                sections.insert(rule, lines(rules));
                sections.insert(route, lines(routes));
                sections.entry("lo").or_insert_with(Vec::new).extend(addresses(lo));
            }
            Ok(Self(sections))
        })?
    }

    /// The lines that differ between an earlier moment and this one.
    pub fn changes_since(&self, before: &Self) -> Vec<SnapshotDiff> {
        let mut changes = Vec::new();
        for (section, now) in &self.0 {
            let then = before.0.get(section).map(Vec::as_slice).unwrap_or_default();
            let only_in = |one: &[String], other: &[String], is_lost| -> Vec<SnapshotDiff> {
                let missing = one.iter().filter(|line| count(one, line) > count(other, line));
                let missing = missing.cloned().collect::<BTreeSet<String>>().into_iter();
                missing.map(|line| SnapshotDiff { section, is_lost, line }).collect()
            };
            let mut found = [only_in(then, now, true), only_in(now, then, false)].concat();
            if found.is_empty() && now != then {
                let line = format!("the same lines in another order: {now:?}, before {then:?}");
                found.push(SnapshotDiff { section, is_lost: false, line });
            }
            changes.extend(found);
        }
        changes
    }

    /// Whether a line of a section has all these words.
    pub fn has(&self, section: &str, words: &[&str]) -> bool {
        let lines = self.0.get(section).map(Vec::as_slice).unwrap_or_default();
        lines.iter().any(|line| words.iter().all(|word| line.contains(word)))
    }

    /// All lines, each with its section.
    pub fn lines(&self) -> Vec<String> {
        let lines = self.0.iter().flat_map(|(section, lines)| lines.iter().map(move |line| (section, line)));
        lines.map(|(section, line)| format!("{section}: {line}")).collect()
    }
}

fn count(lines: &[String], wanted: &str) -> usize {
    lines.iter().filter(|line| *line == wanted).count()
}

/// Each chain, and each of its rules, with its table.
fn chain_lines(all: &Tables) -> Vec<String> {
    let chains = all.iter().flat_map(|(table, chains)| chains.iter().map(move |chain| (table, chain)));
    let mut found = Vec::new();
    for (table, (chain, rules)) in chains {
        found.push(format!("{table} chain {chain}"));
        found.extend(rules.iter().map(|rule| format!("{table} {rule}")));
    }
    found
}

fn lines<'a>(all: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let is_brought = |line: &String| line.contains("fe80:") || line.contains(" proto kernel ");
    let kept = |line: &String| !line.is_empty() && !is_brought(line);
    all.into_iter().map(words).filter(kept).collect()
}

/// Parses `ip addr`: the words that say address and scope. A new address is tentative for a moment.
fn addresses(text: &str) -> Vec<String> {
    let lines = lines(text.lines().filter(|line| line.trim_start().starts_with("inet"))).into_iter();
    lines.map(|line| line.split(" scope global").next().unwrap_or_default().to_owned()).collect()
}

/// The lines of `nft list ruleset`, each behind its table and chain, sorted by those; without what iptables-nft leaves of tables and chains that
/// hold nothing.
fn ruleset(text: &str) -> Vec<String> {
    let mut blocks = nft_blocks(text);
    blocks.retain(|name, lines| {
        !(lines.len() == 1 && lines[0].ends_with("policy accept;") && is_of_iptables(name))
    });
    let is_idle = |name: &String, lines: &Vec<String>| {
        let has_chains = blocks.keys().any(|other| other.starts_with(&format!("{name} / ")));
        lines.is_empty() && !has_chains && is_of_iptables(name)
    };
    let kept = blocks.iter().filter(|(name, lines)| !is_idle(name, lines));
    kept.flat_map(|(name, lines)| {
        std::iter::once(name.clone()).chain(lines.iter().map(move |line| format!("{name} / {line}")))
    })
    .collect()
}

fn is_of_iptables(table: &str) -> bool {
    let names = ["raw", "mangle", "nat", "filter", "security"];
    let mut words = table.split_whitespace();
    let (kind, family, name) = (words.next(), words.next(), words.next().unwrap_or_default());
    kind == Some("table") && matches!(family, Some("ip" | "ip6")) && names.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_iptables_leaves_behind_counts_for_nothing_and_everything_else_counts() {
        let text = "table ip nat {\n\tchain PREROUTING {\n\t\ttype nat hook prerouting priority dstnat; policy accept;\n\t}\n}\n\
                    table ip raw {\n\tflags dormant\n\n\tchain OUTPUT {\n\t\ttype filter hook output priority raw; policy drop;\n\t}\n}\n\
                    table inet nat {\n}\n";
        assert_eq!(
            ruleset(text),
            [
                "table inet nat",
                "table ip raw",
                "table ip raw / flags dormant",
                "table ip raw / chain OUTPUT",
                "table ip raw / chain OUTPUT / type filter hook output priority raw; policy drop;",
            ]
        );
    }

    #[test]
    fn changes_know_lost_lines_new_lines_duplicates_and_order() {
        let of = |lines: &[&str]| {
            Snapshot(BTreeMap::from([("nft", lines.iter().map(|line| (*line).to_owned()).collect())]))
        };
        let shown = |now: &[&str], then: &[&str]| -> Vec<String> {
            of(now).changes_since(&of(then)).iter().map(ToString::to_string).collect()
        };
        assert_eq!(shown(&["a", "b"], &["a", "b"]), Vec::<String>::new());
        assert_eq!(shown(&["a", "c"], &["a", "b"]), ["- nft: b", "+ nft: c"]);
        assert_eq!(shown(&["a", "a"], &["a"]), ["+ nft: a"]);
        assert_eq!(shown(&["b", "a"], &["a", "b"]).len(), 1);
    }
}
