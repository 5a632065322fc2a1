//! Text for `nft -f`: native tables that hold a plan's rules for both families.

use super::line;
use crate::{
    options::NativeForm,
    plan::{
        DataPlane, RulePlan,
        native::{Line, Ranges, SetKind},
    },
    rule::{Chain, ConnState, Direction, Equality, Match, Scope, Table, Target, TcpFlags, Tracked},
    values::{Family, InterfaceName, Mark, MaskedMark, PortRange},
};
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::fmt::Display;
use ipnet::IpNet;

impl DataPlane {
    /// The name of the table, of family inet, that a run holds while it works in several steps. It has no chain.
    pub const NFT_LOCK_TABLE: &'static str = "istio-proxy-lock";

    /// The names of the native tables of both data planes, all of family inet.
    pub const NFT_TABLES: [&'static str; 6] = {
        let [raw, mangle, nat] = Self::Sidecar.nft_tables();
        let [ambient_raw, ambient_mangle, ambient_nat] = Self::Ambient.nft_tables();
        [raw, mangle, nat, ambient_raw, ambient_mangle, ambient_nat]
    };

    /// One transaction that removes the native tables of both data planes.
    #[must_use]
    pub fn nft_removal() -> String {
        removal(&Self::NFT_TABLES)
    }

    /// The name of a native table. Those of ambient mode are the reference's, so that each agent finds the rules of the other.
    #[must_use]
    pub const fn nft_table(self, table: Table) -> &'static str {
        match (self, table) {
            (Self::Sidecar, Table::Raw) => "istio-proxy-raw",
            (Self::Sidecar, Table::Mangle) => "istio-proxy-mangle",
            (Self::Sidecar, Table::Nat) => "istio-proxy-nat",
            (Self::Ambient, Table::Raw) => "istio-ambient-raw",
            (Self::Ambient, Table::Mangle) => "istio-ambient-mangle",
            (Self::Ambient, Table::Nat) => "istio-ambient-nat",
        }
    }

    const fn nft_tables(self) -> [&'static str; 3] {
        [self.nft_table(Table::Raw), self.nft_table(Table::Mangle), self.nft_table(Table::Nat)]
    }
}

impl RulePlan {
    /// One transaction that replaces any native tables of the plan's data plane by the plan's, with rules in this form.
    #[must_use]
    pub fn nft_text(&self, form: NativeForm) -> String {
        let mut text = removal(&self.data_plane().nft_tables());
        for (table, chains) in self.merged_rules() {
            let name = self.data_plane().nft_table(table);
            line(&mut text, format_args!("add table inet {name}"));
            for chain in chains.keys() {
                line(&mut text, format_args!("add chain inet {name} {}", chain_declaration(table, chain)));
            }
            for (chain, rules) in &chains {
                for rule in Line::of(rules, form) {
                    let (chain, rule) = (chain.nft_name(), line_text(&rule));
                    line(&mut text, format_args!("add rule inet {name} {chain} {rule}"));
                }
            }
        }
        text
    }
}

/// Adding first makes removing succeed if they do not exist.
fn removal(tables: &[&str]) -> String {
    let mut text = String::new();
    for name in tables {
        line(&mut text, format_args!("add table inet {name}"));
        line(&mut text, format_args!("delete table inet {name}"));
    }
    text
}

/// Chains of hooks say their type, hook and priority: those of iptables.
fn chain_declaration(table: Table, chain: &Chain) -> String {
    let name = chain.nft_name();
    let Chain::Hook(hook) = chain else { return name };
    let (kind, priority) = (table.chain_type(*hook), table.priority(*hook));
    format!("{name} {{ type {kind} hook {name} priority {priority}; policy accept; }}")
}

impl Chain {
    /// Its name in a native table, in small letters, with dashes: `istio-in-redirect`.
    #[must_use]
    pub fn nft_name(&self) -> String {
        self.name().to_ascii_lowercase().replace('_', "-")
    }
}

fn line_text(line: &Line<'_>) -> String {
    let planned = line.planned();
    let rule = &planned.rule;
    let protocol = rule.protocol().map_or("", |protocol| protocol.name());
    let says_protocol = rule.matches.iter().any(Match::is_of_protocol);
    // A comparison of ports or flags says the protocol itself.
    let said = |(_, condition): &(usize, &Match)| !(says_protocol && matches!(condition, Match::Protocol(_)));
    let text = |(index, condition)| match line {
        Line::Set { variable, ranges, .. } if *variable == index => set_text(ranges, protocol),
        Line::Set { .. } | Line::Rule(_) | Line::OrDrop(_) => condition_text(condition, protocol),
    };
    let mut words: Vec<String> = rule.matches.iter().enumerate().filter(said).map(text).collect();
    words.push(target_text(line.target(), planned.scope));
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
        Match::Mark(is) => masked_mark("meta mark", is),
        Match::ConnMark(is) => masked_mark("ct mark", is),
    }
}

/// A condition that a set has taken the place of: `tcp dport { 22, 8000-8099 }`.
fn set_text(ranges: &Ranges, protocol: &str) -> String {
    let what = match ranges.kind() {
        SetKind::Ports => format!("{protocol} dport"),
        SetKind::Addresses(Family::V4) => "ip daddr".to_string(),
        SetKind::Addresses(Family::V6) => "ip6 daddr".to_string(),
    };
    let key = |key: u128| match ranges.kind() {
        SetKind::Ports => key.to_string(),
        SetKind::Addresses(family) => family.address(key).to_string(),
    };
    let element = |(first, last): &(u128, u128)| {
        if first == last { key(*first) } else { format!("{}-{}", key(*first), key(*last)) }
    };
    format!("{what} {{ {} }}", ranges.list().iter().map(element).collect::<Vec<_>>().join(", "))
}

fn compare<T>(what: &str, is: &Equality<T>, value: impl Display) -> String {
    format!("{what} {}{value}", if is.not { "!= " } else { "" })
}

fn address(what: &str, is: &Equality<IpNet>) -> String {
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
    format!("{:#010x}", mark.value())
}

/// As nft lists it: `tcp flags != syn / fin,syn,rst,ack`, a single flag as `tcp flags & syn == syn`.
fn flags(is: &Equality<TcpFlags>) -> String {
    let names = |flags: u8| -> String {
        let names: Vec<String> = TcpFlags::names(flags).map(str::to_ascii_lowercase).collect();
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

fn masked_mark(what: &str, is: &Equality<MaskedMark>) -> String {
    if let Some(value) = is.value.whole() {
        return compare(what, is, mark(value));
    }
    let (value, mask) = (is.value.value(), is.value.mask());
    format!("{what} & {mask:#010x} {} {value:#010x}", if is.not { "!=" } else { "==" })
}

fn interface(name: &InterfaceName) -> String {
    format!("\"{}{}\"", name.name(), if name.is_prefix() { "*" } else { "" })
}

/// With a dash where iptables has a colon.
fn ports(range: PortRange) -> String {
    range.to_string().replace(':', "-")
}

fn target_text(target: &Target, scope: Scope) -> String {
    match target {
        Target::Accept => "counter accept".to_string(),
        Target::Drop => "counter drop".to_string(),
        Target::Return => "counter return".to_string(),
        Target::Jump(chain) => format!("counter jump {}", chain.nft_name()),
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
        Target::SetConnMark(masked) => {
            if let Some(value) = masked.whole() {
                return format!("counter ct mark set {}", mark(value));
            }
            // As nft lists it: without the bits that are cleared, with those that are set.
            let cleared = masked.mask() & !masked.value();
            format!("counter ct mark set ct mark & {:#010x} | {:#010x}", !cleared, masked.value())
        }
        Target::ConntrackZone(zone) => format!("counter ct zone set {zone}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Redirect,
        settings::{Key, NamespaceFacts, RawSettings, Source},
    };

    #[test]
    fn long_lists_are_shown_as_the_sets_they_become() {
        let mut raw = RawSettings::new();
        for (key, text) in [
            (Key::InboundPorts, "*"),
            (Key::InboundExcludePorts, "22,8000:8099,15090"),
            (Key::OutboundRanges, "10.0.0.0/8,192.0.2.1/32,198.51.100.0/24,fd00::/8"),
        ] {
            raw.set(key, text, Source::Default);
        }
        let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        raw.set(Key::DualStack, "true", Source::Default);
        let plan = Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan();
        let (plain, sets) = (plan.nft_text(NativeForm::Plain), plan.nft_text(NativeForm::Sets));
        let added = |text: &str| text.lines().filter(|line| line.starts_with("add rule")).count();
        assert_eq!(
            added(&plain) - added(&sets),
            5,
            "3 and the tunnel's port become one, 3 ranges one: {sets}"
        );
        for wanted in [
            "add rule inet istio-proxy-nat istio-inbound tcp dport { 22, 8000-8099, 15008, 15090 } counter return\n",
            "ip daddr { 10.0.0.0-10.255.255.255, 192.0.2.1, 198.51.100.0-198.51.100.255 } counter jump istio-redirect\n",
            "ip6 daddr fd00::/8 counter jump istio-redirect\n",
        ] {
            assert!(sets.contains(wanted), "{wanted:?} is not in {sets}");
        }
    }
    #[test]
    fn of_several_conditions_one_becomes_a_set() {
        let servers = ["10.96.0.10", "10.96.0.11", "10.96.0.12"].map(|server| server.parse().unwrap());
        let redirect = Redirect::sidecar(crate::Families::V4);
        let plan = redirect.dns(crate::redirect::DnsCapture::Servers(servers.into())).build().unwrap().plan();
        let sets = plan.nft_text(NativeForm::Sets);
        let wanted = "ip daddr { 10.96.0.10-10.96.0.12 } udp dport 53 counter redirect to :15053\n";
        assert!(sets.contains(wanted), "{wanted:?} is not in {sets}");
    }
}
