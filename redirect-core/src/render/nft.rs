//! Text for `nft -f`: native tables that hold a plan's rules for both families.

use crate::{
    plan::{PlannedRule, RulePlan},
    rule::{Chain, ConnState, Direction, Hook, Is, Match, Scope, Table, Target, TcpFlags, Tracked},
    values::{Family, InterfaceName, Mark, MaskedMark, PortRange},
};
use alloc::{
    collections::BTreeMap,
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::fmt::{Display, Write};
use ipnet::IpNet;

/// The names of the native tables, all of family inet.
pub const NFT_TABLES: [&str; 3] = [nft_table(Table::Raw), nft_table(Table::Mangle), nft_table(Table::Nat)];

/// The name of the table, of family inet, that a run holds while it works in several steps. It has no chain.
pub const NFT_LOCK_TABLE: &str = "istio-proxy-lock";

/// The name of a native table.
pub(crate) const fn nft_table(table: Table) -> &'static str {
    match table {
        Table::Raw => "istio-proxy-raw",
        Table::Mangle => "istio-proxy-mangle",
        Table::Nat => "istio-proxy-nat",
    }
}

/// One transaction that replaces whatever native tables there are by the plan's.
#[must_use]
pub fn nft_text(plan: &RulePlan) -> String {
    let mut text = nft_remove();
    for (table, chains) in plan.merged_rules() {
        let name = nft_table(table);
        line(&mut text, &format!("add table inet {name}"));
        for chain in chains.keys() {
            line(&mut text, &format!("add chain inet {name} {}", chain_declaration(table, chain)));
        }
        for (chain, rules) in &chains {
            for rule in rules.iter().copied().flat_map(rule_texts) {
                line(&mut text, &format!("add rule inet {name} {} {rule}", chain_name(chain)));
            }
        }
    }
    text
}

/// The rules of each native chain, by table and chain, in the words in which `nft --stateless list` prints them.
#[must_use]
pub fn nft_rules(plan: &RulePlan) -> BTreeMap<(&'static str, String), Vec<String>> {
    let tables = plan.merged_rules().into_iter();
    let chains =
        tables.flat_map(|(table, chains)| chains.into_iter().map(move |chain| (nft_table(table), chain)));
    let named = chains.map(|(table, (chain, rules))| {
        ((table, chain_name(&chain)), rules.into_iter().flat_map(rule_texts).collect())
    });
    named.collect()
}

/// One transaction that removes the native tables. Adding first makes removing succeed where there are none.
#[must_use]
pub fn nft_remove() -> String {
    let mut text = String::new();
    for name in NFT_TABLES {
        line(&mut text, &format!("add table inet {name}"));
        line(&mut text, &format!("delete table inet {name}"));
    }
    text
}

fn line(text: &mut String, words: &str) {
    text.push_str(words);
    text.push('\n');
}

/// Chains of hooks say their type, hook and priority: those of iptables.
fn chain_declaration(table: Table, chain: &Chain) -> String {
    let name = chain_name(chain);
    let Chain::Hook(hook) = chain else { return name };
    let kind = match (table, hook) {
        (Table::Nat, _) => "nat",
        (Table::Mangle, Hook::Output) => "route",
        (Table::Mangle | Table::Raw, _) => "filter",
    };
    let priority = match (table, hook) {
        (Table::Raw, _) => -300,
        (Table::Mangle, _) => -150,
        (Table::Nat, Hook::Prerouting | Hook::Output) => -100,
        (Table::Nat, Hook::Input | Hook::Forward | Hook::Postrouting) => 100,
    };
    format!("{name} {{ type {kind} hook {name} priority {priority}; policy accept; }}")
}

/// In small letters, with dashes: `istio-in-redirect`.
pub(crate) fn chain_name(chain: &Chain) -> String {
    chain.name().to_ascii_lowercase().replace('_', "-")
}

/// A planned rule; two where nftables needs a second one to say the same.
fn rule_texts(planned: &PlannedRule) -> impl Iterator<Item = String> {
    // What nft's tproxy finds no listener for goes on to the application; iptables' target drops it.
    let or_drop = matches!(planned.rule.target, Target::Tproxy { .. }).then_some(&Target::Drop);
    [Some(&planned.rule.target), or_drop].into_iter().flatten().map(|target| rule_text(planned, target))
}

fn rule_text(planned: &PlannedRule, target: &Target) -> String {
    let rule = &planned.rule;
    let protocol = rule.protocol().map_or("", |protocol| protocol.name());
    let says_protocol = rule.matches.iter().any(Match::is_of_protocol);
    // A comparison of ports or flags says the protocol itself.
    let said = |condition: &&Match| !(says_protocol && matches!(condition, Match::Protocol(_)));
    let mut words: Vec<String> =
        rule.matches.iter().filter(said).map(|condition| condition_text(condition, protocol)).collect();
    words.push(target_text(target, planned.scope));
    words.join(" ")
}

fn condition_text(condition: &Match, protocol: &str) -> String {
    match condition {
        Match::Source(is) => address("saddr", is),
        Match::Destination(is) => address("daddr", is),
        Match::InInterface(is) => compare("iifname", is, interface(&is.value)),
        Match::OutInterface(is) => compare("oifname", is, interface(&is.value)),
        Match::Protocol(protocol) => format!("meta l4proto {}", protocol.name()),
        Match::SourcePort(is) => compare(&format!("{protocol} sport"), is, ports(is.value)),
        Match::DestinationPort(is) => compare(&format!("{protocol} dport"), is, ports(is.value)),
        Match::DestinationPorts(is) => {
            let list: Vec<String> = is.value.iter().map(|range| ports(*range)).collect();
            compare(&format!("{protocol} dport"), is, format!("{{ {} }}", list.join(", ")))
        }
        Match::TcpFlags(is) => flags(is),
        Match::Tracked(Tracked { state, direction }) => {
            let direction = match direction {
                None => "",
                Some(Direction::Original) => "ct direction original ",
                Some(Direction::Reply) => "ct direction reply ",
            };
            let state = match state {
                // In native tables the reference drops only TCP.
                ConnState::Invalid if protocol.is_empty() => "meta l4proto tcp ct state invalid",
                ConnState::Invalid => "ct state invalid",
                ConnState::RelatedOrEstablished => "ct state established,related",
            };
            format!("{direction}{state}")
        }
        Match::OwnerUid(is) => compare("meta skuid", is, is.value),
        Match::OwnerGid(is) => compare("meta skgid", is, is.value),
        Match::Mark(is) => compare("meta mark", is, mark(is.value)),
        Match::ConnMark(is) => connection_mark(is),
    }
}

fn compare<T>(what: &str, is: &Is<T>, value: impl Display) -> String {
    format!("{what} {}{value}", if is.not { "!= " } else { "" })
}

fn address(what: &str, is: &Is<IpNet>) -> String {
    let family = match is.value {
        IpNet::V4(_) => "ip",
        IpNet::V6(_) => "ip6",
    };
    let what = format!("{family} {what}");
    // As nft lists it: a single address without its prefix length.
    if is.value.prefix_len() == is.value.max_prefix_len() {
        compare(&what, is, is.value.addr())
    } else {
        compare(&what, is, is.value)
    }
}

/// As nft lists it: all eight digits.
fn mark(mark: Mark) -> String {
    format!("{:#010x}", mark.0)
}

/// As nft lists it: `tcp flags != syn / fin,syn,rst,ack`, a single flag as `tcp flags & syn == syn`.
fn flags(is: &Is<TcpFlags>) -> String {
    let names = |flags: u8| -> String {
        let set = TcpFlags::NAMED.into_iter().filter(|(flag, _)| flags & flag != 0);
        let names: Vec<String> = set.map(|(_, name)| name.to_ascii_lowercase()).collect();
        if names.is_empty() { "0x0".to_string() } else { names.join(",") }
    };
    let (mask, set) = (is.value.mask(), is.value.set());
    if mask.is_power_of_two() {
        let operator = if is.not { "!=" } else { "==" };
        format!("tcp flags & {} {operator} {}", names(mask), names(set))
    } else {
        compare("tcp flags", is, format!("{} / {}", names(set), names(mask)))
    }
}

fn connection_mark(is: &Is<MaskedMark>) -> String {
    let (value, mask) = (is.value.value(), is.value.mask());
    if mask == u32::MAX {
        return compare("ct mark", is, mark(Mark(value)));
    }
    format!("ct mark & {mask:#010x} {} {value:#010x}", if is.not { "!=" } else { "==" })
}

fn interface(name: &InterfaceName) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(text, "\"{}{}\"", name.name(), if name.is_prefix() { "*" } else { "" });
    text
}

fn ports(range: PortRange) -> String {
    if range.first() == range.last() {
        range.first().to_string()
    } else {
        format!("{}-{}", range.first(), range.last())
    }
}

fn target_text(target: &Target, scope: Scope) -> String {
    match target {
        Target::Accept => "counter accept".to_string(),
        Target::Drop => "counter drop".to_string(),
        Target::Return => "counter return".to_string(),
        Target::Jump(chain) => format!("counter jump {}", chain_name(chain)),
        Target::Redirect(port) => format!("counter redirect to :{port}"),
        Target::Tproxy { port, mark: value } => {
            let family = match scope {
                Scope::Every => "",
                Scope::Only(Family::V4) => "ip ",
                Scope::Only(Family::V6) => "ip6 ",
            };
            format!("tproxy {family}to :{port} meta mark set {} counter accept", mark(*value))
        }
        Target::SetMark(value) => format!("counter meta mark set {}", mark(*value)),
        Target::SaveMark => "counter ct mark set meta mark".to_string(),
        Target::RestoreMark => "counter meta mark set ct mark".to_string(),
        Target::SetConnMark(masked) if masked.mask() == u32::MAX => {
            format!("counter ct mark set {}", mark(Mark(masked.value())))
        }
        Target::SetConnMark(masked) => {
            // As nft lists it: what is kept, together with what is put there.
            let kept = !masked.mask() | masked.value();
            format!("counter ct mark set ct mark & {kept:#010x} | {:#010x}", masked.value())
        }
        Target::ConntrackZone(zone) => format!("counter ct zone set {zone}"),
    }
}
