//! Reads what iptables-save prints back into the types a plan is made of.
//!
//! Other programs' rules are kept as text. The same words a plan is rendered in are understood, so that reading a rendered
//! plan gives the plan.

use crate::{
    expressions::decode,
    ruleset::{Condition, KernelRule},
    state::{Entry, ForeignRule, IptablesTables},
};
use redirect_core::{
    rule::{Chain, Equality, Match, Rule, Table, Target},
    values::{Family, PortRange},
};

/// How much of a line an error shows, in characters.
const SHOWN: usize = 200;

/// Text that is not what iptables-save prints for a family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// A line that cannot be part of such output.
    #[error("line {number} is not iptables-save output: {line:?}")]
    Line {
        /// Its number, counted from 1.
        number: usize,
        /// Its text.
        line: String,
    },
    /// A line of the other family's dump.
    #[error("line {number} is not of {family}, as which the dump is read, but of the other family: {line:?}")]
    OtherFamily {
        /// Its number, counted from 1.
        number: usize,
        /// Its text.
        line: String,
        /// The family asked for.
        family: Family,
    },
    /// Not one table.
    #[error(
        "the dump has no table: run iptables-save as root in the network namespace in question; if it prints nothing there, use the variant whose rules those are (iptables-legacy-save or iptables-nft-save)"
    )]
    NoTable,
}

impl SaveError {
    pub(crate) fn line(number: usize, line: &str) -> Self {
        Self::Line { number, line: shown(line) }
    }
}

pub(crate) fn shown(line: &str) -> String {
    line.chars().take(SHOWN).collect()
}

impl IptablesTables {
    /// Of the output of iptables-save, ip6tables-save, or of a rendered plan, the tables that plans have rules in.
    ///
    /// The others are passed over, and so are policies, counters and comments: it shows what of a plan is in force, not where a packet ends.
    /// [`Dump`](crate::saved::Dump) reads everything.
    ///
    /// # Errors
    /// A line that cannot be part of such output.
    pub fn saved(text: &str) -> Result<Self, SaveError> {
        let mut state = Self::new();
        let mut table = None;
        for (number, line) in (1_usize..).zip(text.lines()) {
            let error = || SaveError::line(number, line);
            let line = line.trim();
            match line.split_at_checked(1) {
                None | Some(("#", _)) => {}
                Some(("*", name)) => table = Some(Table::named(name.trim())),
                Some(_) if line == "COMMIT" => table = None,
                Some((":", chain)) => {
                    let name = chain.split_ascii_whitespace().next().ok_or_else(error)?;
                    if let Some(table) = table.ok_or_else(error)? {
                        declare(&mut state, table, name);
                    }
                }
                Some(_) => {
                    if let Some(table) = table.ok_or_else(error)? {
                        rule_line(&mut state, table, line).ok_or_else(error)?;
                    }
                }
            }
        }
        Ok(state)
    }
}

impl Entry {
    /// What stands behind `-A CHAIN`: a rule this library understands, or text of another's.
    #[must_use]
    pub fn saved(text: &str) -> Self {
        rule(text).map_or_else(|| Self::Foreign(ForeignRule::saved(text)), Self::from)
    }
}

/// Built-in chains are always there; only their rules say something.
fn declare(state: &mut IptablesTables, table: Table, name: &str) {
    let chain = Chain::named(name);
    if !matches!(chain, Chain::Hook(_)) {
        state.declare(table, chain);
    }
}

/// `-A CHAIN rule`, or `-I CHAIN number rule` as a rendered plan has it; perhaps with counters in front.
fn rule_line(state: &mut IptablesTables, table: Table, line: &str) -> Option<()> {
    let line = match line.strip_prefix('[') {
        Some(counters) => counters.split_once(']')?.1.trim_start(),
        None => line,
    };
    let (command, rest) = split_word(line);
    let (name, rest) = split_word(rest);
    if name.is_empty() {
        return None;
    }
    let entries = state.declare(table, Chain::named(name));
    match command {
        "-A" => entries.push(Entry::saved(rest)),
        "-I" => {
            let (number, rest) = split_word(rest);
            let index = number.parse::<usize>().ok()?.checked_sub(1)?;
            entries.insert(index.min(entries.len()), Entry::saved(rest));
        }
        _ => return None,
    }
    Some(())
}

fn split_word(text: &str) -> (&str, &str) {
    let (word, rest) = text.split_once(|c: char| c.is_ascii_whitespace()).unwrap_or((text, ""));
    (word, rest.trim_start())
}

/// The matches of which plans' rules use options, and those of their options that may be inverted.
const MATCHES: [&str; 7] = ["tcp", "udp", "multiport", "conntrack", "owner", "mark", "connmark"];
const INVERTIBLE: [&str; 11] = [
    "-s",
    "-d",
    "-i",
    "-o",
    "--sport",
    "--dport",
    "--dports",
    "--tcp-flags",
    "--uid-owner",
    "--gid-owner",
    "--mark",
];

/// The rule of a plan, if it is one to the letter: programs find it again by the words in which it is rendered.
fn rule(text: &str) -> Option<Rule> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    if text.contains('"') || !has_options_of_plans(&words) {
        return None;
    }
    let KernelRule { conditions, statements, .. } = KernelRule::saved(text);
    // One that is asked apart from the state also asks whether a packet has a connection.
    if conditions.iter().any(|one| matches!(one, Condition::IsReply(_))) {
        return None;
    }
    let (mut matches, target) = (decode::asked(conditions)?, decode::done(&statements)??);
    let options = words.iter().rev().take_while(|word| **word != "-j").skip(1).count();
    if !options_of(&target).contains(&options) {
        return None;
    }
    let has_flags = matches.iter().any(|m| matches!(m, Match::TcpFlags(_)));
    if names_port_module(&words) && !has_flags && !matches.iter().any(Match::compares_ports) {
        // iptables-save leaves away a comparison with all ports, and prints only the module that would make it.
        matches.push(Match::DestinationPort(Equality::equals(PortRange::ALL)));
    }
    let rule = Rule { matches, target };
    let protocols = rule.matches.iter().filter(|m| matches!(m, Match::Protocol(_))).count();
    (protocols <= 1 && rule.says_its_protocol()).then_some(rule)
}

/// Whether what stands before the target are matches and options of plans' rules, each with its values and no more.
fn has_options_of_plans(mut words: &[&str]) -> bool {
    loop {
        words = match words {
            ["-j", ..] => return true,
            ["!", rest @ ..] if rest.first().is_some_and(|option| INVERTIBLE.contains(option)) => rest,
            ["-m", module, rest @ ..] if MATCHES.contains(module) => rest,
            ["!" | "-m", ..] => return false,
            ["--tcp-flags", _, _, rest @ ..] => rest,
            [option, _, rest @ ..] if option.starts_with('-') => rest,
            _ => return false,
        };
    }
}

fn names_port_module(words: &[&str]) -> bool {
    words.windows(2).any(|pair| matches!(pair, ["-m", "tcp" | "udp"]))
}

/// How many words of options the target has where it does nothing else.
const fn options_of(target: &Target) -> &'static [usize] {
    match target {
        Target::Accept | Target::Drop | Target::Return | Target::Jump(_) => &[0],
        Target::Redirect(_) | Target::SetMark(_) | Target::SetConnMark(_) | Target::ConntrackZone(_) => &[2],
        Target::SaveMark | Target::RestoreMark => &[5],
        // The unspecified address may be named.
        Target::Tproxy { .. } => &[4, 6],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::rule::{Hook, OurChain, Protocol, TcpFlags};

    #[test]
    fn rules_of_others_are_kept_as_text() {
        for text in [
            "-p tcp -m comment --comment \"a b\" -j ISTIO_OUTPUT",
            "-m addrtype --dst-type LOCAL -j DOCKER",
            "-p icmp -j ACCEPT",
            "-j CNI-HOSTPORT-DNAT",
            "-m mark --mark 0x0/0xff -j RETURN",
            "! -p tcp -j RETURN",
            "-j",
            "",
            "-p tcp",
            "-m tcp --dport 80 -j RETURN",
            "-p tcp -p udp -j RETURN",
            "-p tcp ! -j RETURN",
            "! -m mark --mark 0x1 -j RETURN",
            "-m conntrack --ctstate RELATED,ESTABLISHED ! --ctdir REPLY -j RETURN",
            "-m conntrack ! --ctstate RELATED,ESTABLISHED -j RETURN",
            "-m state --state INVALID -j DROP",
            "-m conntrack --ctdir REPLY -m conntrack --ctstate INVALID -j DROP",
            "-m socket -j RETURN",
            "-m owner -j RETURN",
            "-p tcp -m tcp 80 -j RETURN",
            "-j RETURN --more",
            "-j CT --zone 1 --notrack",
            "-j REDIRECT --to-ports 80-90",
            "-j REDIRECT --to-ports 80 --random",
        ] {
            assert_eq!(Entry::saved(text), Entry::Foreign(ForeignRule::saved(text)));
        }
    }

    #[test]
    fn a_comparison_with_all_ports_is_read_back() {
        let all = Entry::saved("-p tcp -m tcp --dport 0:65535 -j RETURN");
        assert!(matches!(all, Entry::Rule(_)));
        assert_eq!(Entry::saved("-p tcp -m tcp -j RETURN"), all);
    }

    #[test]
    fn saved_tables_are_read() {
        let state = IptablesTables::saved(
            "# Generated by iptables-save\n*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j DROP\nCOMMIT\n*nat\n:PREROUTING ACCEPT [0:0]\n:ISTIO_INBOUND - [0:0]\n[3:180] -A PREROUTING -p tcp -j ISTIO_INBOUND\nCOMMIT\n",
        )
        .unwrap();
        assert!(state.has(Table::Nat, &OurChain::Inbound.into()));
        let rule = Rule {
            matches: [Match::Protocol(Protocol::Tcp)].into(),
            target: Target::Jump(OurChain::Inbound.into()),
        };
        assert_eq!(state.rules(Table::Nat, &Hook::Prerouting.into()), [Entry::Rule(rule)]);
    }

    #[test]
    fn flags_have_names_and_words_for_all_and_none() {
        let read = |words: &str| match Entry::saved(&format!("-p tcp -m tcp --tcp-flags {words} -j DROP")) {
            Entry::Rule(rule) => rule.matches.into_iter().find_map(|condition| {
                if let Match::TcpFlags(is) = condition {
                    Some((is.value.mask(), is.value.set()))
                } else {
                    None
                }
            }),
            Entry::Foreign(_) => None,
        };
        assert_eq!(read("ALL NONE"), Some((0x3f, 0)));
        assert_eq!(read("ALL ALL"), Some((0x3f, 0x3f)));
        assert_eq!(read("FIN,ACK ACK"), Some((TcpFlags::FIN | TcpFlags::ACK, TcpFlags::ACK)));
        assert_eq!(read("SYN,FIN,SYN SYN,SYN"), Some((TcpFlags::FIN | TcpFlags::SYN, TcpFlags::SYN)));
        assert_eq!(read("FIN,ECE FIN"), None);
    }

    #[test]
    fn anything_else_is_an_error_with_its_line() {
        for (text, number) in [("hello", 1), ("*nat\n:X - [0:0]\n-Z X", 3), ("*nat\n-A", 2), ("-A X -j Y", 1)]
        {
            assert_eq!(
                IptablesTables::saved(text).err(),
                Some(SaveError::line(number, text.lines().nth(number - 1).unwrap())),
                "{text:?}"
            );
        }
    }
}
