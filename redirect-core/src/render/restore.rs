//! Text for `iptables-restore --noflush`, in the words iptables-save prints.

use super::line;
use crate::{
    plan::FamilyRules,
    rule::{ConnState, Equality, Match, Protocol, Rule, Table, Target, TcpFlags, Tracked},
};
use alloc::string::{String, ToString};
use core::fmt;
use ipnet::IpNet;

impl FamilyRules {
    /// All of them for iptables-restore, as input for an empty namespace. Empty without rules.
    #[must_use]
    pub fn restore_text(&self) -> String {
        let mut text = String::new();
        for table in self.table_order() {
            table_text(*table, self, &mut text);
        }
        text
    }
}

fn table_text(table: Table, rules: &FamilyRules, text: &mut String) {
    let mut chains = rules.chains(table).peekable();
    if chains.peek().is_none() {
        return;
    }
    line(text, format_args!("*{}", table.name()));
    for (chain, _) in rules.chains(table).filter(|(chain, _)| chain.belongs_to_mesh()) {
        line(text, format_args!(":{chain} - [0:0]"));
    }
    for (chain, rules_of_chain) in chains {
        let leading = rules.leading(table, chain);
        for (number, rule) in (1_usize..).zip(rules_of_chain) {
            if number <= leading {
                line(text, format_args!("-I {chain} {number} {rule}"));
            } else {
                line(text, format_args!("-A {chain} {rule}"));
            }
        }
    }
    text.push_str("COMMIT\n");
}

impl Rule {
    /// In the words of iptables-save, without table and chain: `-p tcp -m tcp --dport 80 -j RETURN`.
    #[must_use]
    pub fn text(&self) -> String {
        self.canonical().to_string()
    }
}

/// The same, for a rule in [canonical](Rule::canonical) form.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_rule(f, self)
    }
}

fn write_rule(out: &mut fmt::Formatter<'_>, rule: &Rule) -> fmt::Result {
    let mut port_module = false;
    for condition in &rule.matches {
        if let (
            Match::SourcePort(_) | Match::DestinationPort(_) | Match::TcpFlags(_),
            Some(protocol),
            false,
        ) = (condition, rule.protocol(), port_module)
        {
            write!(out, "-m {} ", protocol.name())?;
            port_module = true;
        }
        write_match(out, condition)?;
        out.write_str(" ")?;
    }
    write_target(out, &rule.target)
}

fn write_match(out: &mut fmt::Formatter<'_>, condition: &Match) -> fmt::Result {
    match condition {
        Match::Source(is) => write!(out, "{}-s {}", Not(is), Net(is.value)),
        Match::Destination(is) => write!(out, "{}-d {}", Not(is), Net(is.value)),
        Match::InInterface(is) => write!(out, "{}-i {}", Not(is), is.value),
        Match::OutInterface(is) => write!(out, "{}-o {}", Not(is), is.value),
        Match::Protocol(protocol) => write!(out, "-p {}", Protocol::name(*protocol)),
        Match::SourcePort(is) => write!(out, "{}--sport {}", Not(is), is.value),
        Match::DestinationPort(is) => write!(out, "{}--dport {}", Not(is), is.value),
        Match::DestinationPorts(is) => {
            write!(out, "-m multiport {}--dports ", Not(is))?;
            for (index, ports) in is.value.iter().enumerate() {
                write!(out, "{}{}", if index == 0 { "" } else { "," }, ports)?;
            }
            Ok(())
        }
        Match::TcpFlags(is) => {
            write!(out, "{}--tcp-flags {} {}", Not(is), Flags(is.value.mask()), Flags(is.value.set()))
        }
        Match::Tracked(Tracked { state, direction }) => {
            out.write_str(match state {
                ConnState::Invalid => "-m conntrack --ctstate INVALID",
                ConnState::RelatedOrEstablished => "-m conntrack --ctstate RELATED,ESTABLISHED",
            })?;
            direction.map_or(Ok(()), |direction| write!(out, " --ctdir {}", direction.name()))
        }
        Match::OwnerUid(is) => write!(out, "-m owner {}--uid-owner {}", Not(is), is.value),
        Match::OwnerGid(is) => write!(out, "-m owner {}--gid-owner {}", Not(is), is.value),
        Match::Mark(is) => write!(out, "-m mark {}--mark {}", Not(is), is.value),
        Match::ConnMark(is) => write!(out, "-m connmark {}--mark {}", Not(is), is.value),
    }
}

fn write_target(out: &mut fmt::Formatter<'_>, target: &Target) -> fmt::Result {
    match target {
        Target::Accept => out.write_str("-j ACCEPT"),
        Target::Drop => out.write_str("-j DROP"),
        Target::Return => out.write_str("-j RETURN"),
        Target::Jump(chain) => write!(out, "-j {chain}"),
        Target::Redirect(port) => write!(out, "-j REDIRECT --to-ports {port}"),
        // The address is left away: iptables-save prints the unspecified one, which is another for each family.
        Target::Tproxy { port, mark } => {
            write!(out, "-j TPROXY --on-port {port} --tproxy-mark {mark}/0xffffffff")
        }
        Target::SetMark(mark) => write!(out, "-j MARK --set-xmark {mark}/0xffffffff"),
        Target::SaveMark => out.write_str("-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff"),
        Target::RestoreMark => {
            out.write_str("-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff")
        }
        Target::SetConnMark(mark) => {
            write!(out, "-j CONNMARK --set-xmark {:#x}/{:#x}", mark.value(), mark.mask())
        }
        Target::ConntrackZone(zone) => write!(out, "-j CT --zone {zone}"),
    }
}

/// `! ` where a comparison is turned round.
struct Not<'a, T>(&'a Equality<T>);

impl<T> fmt::Display for Not<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.not { "! " } else { "" })
    }
}

/// An address range with its prefix length, always.
struct Net(IpNet);

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0.network(), self.0.prefix_len())
    }
}

/// `FIN,SYN`, or `NONE`.
struct Flags(u8);

impl fmt::Display for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names = TcpFlags::names(self.0);
        f.write_str(names.next().unwrap_or("NONE"))?;
        names.try_for_each(|name| write!(f, ",{name}"))
    }
}
