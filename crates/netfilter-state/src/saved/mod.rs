//! The text of iptables-save, read whole: every table of every program, policies and counters.
//!
//! ```
//! use netfilter_state::saved::Dump;
//! use redirect_core::{Families, Family, Redirect, render::restore_text};
//!
//! let plan = Redirect::sidecar(Families::V4).build()?.plan();
//! let saved = restore_text(&plan.rules(Family::V4)) + "*filter\n:OUTPUT DROP [0:0]\nCOMMIT\n";
//! let dump = Dump::read(Family::V4, &saved)?;
//! assert_eq!(dump.differences(&plan), []);
//! assert!(dump.ruleset().tables.keys().any(|table| table.name == "filter"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::{
    change::RuleDifference,
    parse::mesh_tables,
    ruleset::{
        Api, Base, ChainState, Condition, Counter, Endpoint, HookEntry, HookList, HookOwner, HookedRules,
        KernelRule, Selector, Statement, TableName, built_in, marked, owned_by, state, target_named,
    },
    state::IptablesTables,
};
use redirect_core::{
    plan::RulePlan,
    rule::{Equality, Hook, Match, Protocol},
    values::{Family, PortRange, PortSyntax, parse_cidr},
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

fn shown(line: &str) -> String {
    line.chars().take(SHOWN).collect()
}

/// What iptables-save or ip6tables-save printed of a network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    family: Family,
    ours: IptablesTables,
    ruleset: HookedRules,
}

impl Dump {
    /// Reads all of the text: rules of any program in any table, with policies and counters. What of a rule is not understood, it says.
    ///
    /// A remark that there are rules which the dump does not show (`# Warning: iptables-legacy tables present`, `# Table ... is
    /// incompatible`) counts as rules that are not known. Without it, the text is taken to be all there is, though rules of nft are
    /// never part of it; whoever can reach the namespace, reads it with netns-apply and misses nothing.
    ///
    /// # Errors
    /// A line that cannot be part of such output, or is of the other family; no table at all.
    pub fn read(family: Family, text: &str) -> Result<Self, SaveError> {
        let ours = mesh_tables(text)?;
        let mut ruleset = HookedRules::default();
        ruleset.add_saved(family, text)?;
        if ruleset.tables.is_empty() {
            return Err(SaveError::NoTable);
        }
        let hidden = text.lines().map(str::trim).find(|line| {
            line.starts_with("# Warning: ") || line.starts_with("# Table ") && line.contains("incompatible")
        });
        if let Some(remark) = hidden {
            ruleset.hooks = Some(unknown_everywhere(family, remark));
        }
        Ok(Self { family, ours, ruleset })
    }

    /// The family of its rules.
    #[must_use]
    pub const fn family(&self) -> Family {
        self.family
    }

    /// All of it.
    #[must_use]
    pub const fn ruleset(&self) -> &HookedRules {
        &self.ruleset
    }

    /// What is not as a plan wants it for this family, rule by rule, in the tables that plans have rules in; empty if the rules are in
    /// force. What other programs' rules do to the traffic, packet-trace says (`TraceRules::of_dump`).
    #[must_use]
    pub fn differences(&self, plan: &RulePlan) -> Vec<RuleDifference> {
        RuleDifference::all(&self.ours, &plan.rules(self.family))
    }
}

/// Something before all rules of every hook of which only this remark is known.
fn unknown_everywhere(family: Family, remark: &str) -> HookList {
    let entry = || HookEntry { priority: i32::MIN, owner: HookOwner::Unknown(shown(remark)) };
    HookList { entries: Hook::ALL.iter().map(|hook| ((family, *hook), [entry()].into())).collect() }
}

impl HookedRules {
    /// Adds the tables that iptables-save or ip6tables-save printed, of either variant: its first line says which.
    ///
    /// # Errors
    /// A line that cannot be part of such output, or is of the other family.
    pub fn add_saved(&mut self, family: Family, text: &str) -> Result<(), SaveError> {
        let (mut table, mut api) = (None, Api::XTables);
        for (number, line) in (1_usize..).zip(text.lines().map(str::trim)) {
            let error = || SaveError::line(number, line);
            if is_of_other_family(family, line) {
                return Err(SaveError::OtherFamily { number, line: shown(line), family });
            }
            match line.split_at_checked(1) {
                Some(("#", remark)) if remark.starts_with(" Generated by ") => {
                    api = if remark.contains("(nf_tables)") { Api::NfTables } else { Api::XTables };
                }
                None | Some(("#", _)) => {}
                Some(("*", name)) => {
                    let name = TableName { api, family: family.into(), name: name.trim().into() };
                    self.table(name.clone());
                    table = Some(name);
                }
                Some(_) if line == "COMMIT" => table = None,
                Some((":", chain)) => {
                    let table = table.clone().ok_or_else(error)?;
                    declare(self, table, chain).ok_or_else(error)?;
                }
                Some(_) => {
                    let table = table.clone().ok_or_else(error)?;
                    let (counter, rule_line) = counted(line);
                    let words = words(rule_line);
                    let [command, chain, rest @ ..] = words.as_slice() else { return Err(error()) };
                    if command != "-A" {
                        return Err(error());
                    }
                    let base = built_in_base(&table.name, chain, false);
                    let chains = &mut self.table(table).chains;
                    let rule = KernelRule { counter, ..rule(rest) };
                    // A rendered plan does not declare the chains that are always there.
                    let chain = chains.entry(chain.clone());
                    chain.or_insert_with(|| ChainState { base, ..ChainState::default() }).rules.push(rule);
                }
            }
        }
        Ok(())
    }
}

impl KernelRule {
    /// A rule in the words of iptables-save, without `-A` and the chain. What of it is not understood is
    /// [`Condition::Unknown`] or [`Statement::Unknown`].
    #[must_use]
    pub fn saved(text: &str) -> Self {
        rule(&words(text))
    }
}

/// Whether a line names the program of the other family, or compares with one of its addresses.
fn is_of_other_family(family: Family, line: &str) -> bool {
    if let Some(program) = line.strip_prefix("# Generated by ") {
        return program.starts_with("ip6tables") != (family == Family::V6);
    }
    let mut words = line.split_ascii_whitespace();
    while let Some(word) = words.next() {
        let value = if matches!(word, "-s" | "-d") { words.next() } else { None };
        if value.and_then(|text| parse_cidr(text).ok()).is_some_and(|net| Family::of(&net.addr()) != family) {
            return true;
        }
    }
    false
}

/// What stands in front of a rule where counters were asked for, `[packets:bytes]`, and the rule.
fn counted(line: &str) -> (Option<Counter>, &str) {
    let read = || {
        let (numbers, rule) = line.strip_prefix('[')?.split_once(']')?;
        let (packets, bytes) = numbers.split_once(':')?;
        let counter = Counter { packets: packets.parse().ok()?, bytes: bytes.parse().ok()? };
        Some((Some(counter), rule.trim_start()))
    };
    read().unwrap_or((None, line))
}

/// `NAME POLICY [packets:bytes]`
fn declare(ruleset: &mut HookedRules, table: TableName, line: &str) -> Option<()> {
    let mut words = line.split_ascii_whitespace();
    let name = words.next()?;
    let drops = words.next() == Some("DROP");
    let base = built_in_base(&table.name, name, drops);
    ruleset.table(table).chains.entry(name.to_owned()).or_default().base = base;
    Some(())
}

/// Where a chain hangs, if it is one of those that are always there.
fn built_in_base(table: &str, chain: &str, drops: bool) -> Option<Base> {
    let hook = Hook::ALL.iter().copied().find(|hook| hook.name() == chain)?;
    built_in(table, hook, drops)
}

/// The words of a line; what stands between quotation marks is one.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted, mut begun) = (Vec::new(), String::new(), false, false);
    let mut characters = line.chars();
    while let Some(c) = characters.next() {
        match c {
            '\\' if quoted => word.extend(characters.next()),
            '"' => (quoted, begun) = (!quoted, true),
            ' ' if !quoted => {
                if begun || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            c => word.push(c),
        }
    }
    if begun || !word.is_empty() {
        words.push(word);
    }
    words
}

fn rule(words: &[String]) -> KernelRule {
    let mut rule = KernelRule::default();
    let (mut module, mut words) = ("", words);
    // Where the conditions of the match at hand begin.
    let mut of_match = 0;
    // A match without options; most of those compare something all the same.
    let mut bare = None;
    while let Some((word, rest)) = words.split_first() {
        let (not, word, rest) = match (word.as_str(), rest.split_first()) {
            ("!", Some((word, rest))) => (true, word.as_str(), rest),
            (word, _) => (false, word, rest),
        };
        if word == "-m" || matches!(word, "-j" | "-g") {
            rule.conditions.extend(bare.take().and_then(without_options));
        }
        if let ("-j" | "-g", Some((target, options))) = (word, rest.split_first()) {
            rule.statements = [statement(word, target, options)].into();
            return rule;
        }
        // Its values: everything up to the next option.
        let is_option = |word: &String| word == "!" || word.starts_with('-');
        let count = rest.iter().position(is_option).unwrap_or(rest.len());
        let (values, behind) = rest.split_at_checked(count).unwrap_or((rest, &[]));
        words = behind;
        if word == "-m" {
            module = values.first().map_or("", String::as_str);
            of_match = rule.conditions.len();
            bare = Some(module);
            continue;
        }
        bare = None;
        // One that always holds.
        if (module, word) == ("comment", "--comment") {
            rule.comment = values.join(" ");
            continue;
        }
        let condition = condition(module, word, not, values);
        rule.conditions.push(condition.unwrap_or_else(|| Condition::Unknown(unknown(module, word))));
        join_state_and_direction(&mut rule.conditions, of_match);
    }
    rule.conditions.extend(bare.and_then(without_options));
    rule
}

/// What a match without options compares: of a protocol nothing that `-p` does not say.
fn without_options(module: &str) -> Option<Condition> {
    let is_of_protocol = matches!(module, "tcp" | "udp" | "udplite" | "sctp" | "dccp" | "icmp" | "icmp6");
    (!is_of_protocol).then(|| Condition::Unknown(format!("-m {module}")))
}

/// A single match on state and direction ignores the direction of a packet without a connection.
fn join_state_and_direction(conditions: &mut Vec<Condition>, of_match: usize) {
    let joined = match conditions.get(of_match..) {
        Some(
            [Condition::State(states), Condition::IsReply(is)]
            | [Condition::IsReply(is), Condition::State(states)],
        ) => Condition::StateAndDirection { states: states.clone(), is_reply: is.value != is.not },
        _ => return,
    };
    conditions.truncate(of_match);
    conditions.push(joined);
}

fn unknown(module: &str, word: &str) -> String {
    if module.is_empty() { word.to_owned() } else { format!("-m {module} {word}") }
}

/// A condition; `None` if unsupported.
fn condition(module: &str, word: &str, not: bool, values: &[String]) -> Option<Condition> {
    let (value, second) = (values.first(), values.get(1));
    let port = || {
        value
            .and_then(|value| PortRange::parse(value, PortSyntax::Saved).ok())
            .map(|value| Equality { value, not })
    };
    let net = || value.and_then(|value| parse_cidr(value).ok()).map(|value| Equality { value, not });
    let interface = || value.and_then(|value| value.parse().ok()).map(|value| Equality { value, not });
    let plain = |condition: Match| Some(Condition::Plain(condition));
    match (module, word) {
        (_, "-s") => plain(Match::Source(net()?)),
        (_, "-d") => plain(Match::Destination(net()?)),
        (_, "-i") => plain(Match::InInterface(interface()?)),
        (_, "-o") => plain(Match::OutInterface(interface()?)),
        (_, "-p") => protocol(value?, not),
        ("tcp" | "udp", "--sport") => plain(Match::SourcePort(port()?)),
        ("tcp" | "udp", "--dport") => plain(Match::DestinationPort(port()?)),
        ("tcp", "--tcp-flags") => tcp_flags(value?, second?, not),
        ("multiport", "--dports") => plain(Match::DestinationPorts(Equality { value: ports(value?)?, not })),
        ("multiport", "--sports") => Some(Condition::SourcePorts(Equality { value: ports(value?)?, not })),
        ("conntrack", "--ctstate") | ("state", "--state") => {
            Some(Condition::State(Equality { value: states(value?)?, not }))
        }
        ("conntrack", "--ctdir") => {
            let is_reply = match value?.as_str() {
                "REPLY" => !not,
                "ORIGINAL" => not,
                _ => return None,
            };
            Some(Condition::IsReply(Equality { value: true, not: !is_reply }))
        }
        ("owner", "--uid-owner") => owner(Selector::User, value?, not),
        ("owner", "--gid-owner") => owner(Selector::Group, value?, not),
        ("addrtype", "--src-type") if value? == "LOCAL" => {
            Some(Condition::Local(Equality { value: Endpoint::Source, not }))
        }
        ("addrtype", "--dst-type") if value? == "LOCAL" => {
            Some(Condition::Local(Equality { value: Endpoint::Destination, not }))
        }
        ("mark", "--mark") => {
            let (value, mask) = bits(value?)?;
            Some(Condition::MarkBits { mask, is: Equality { value, not } })
        }
        ("connmark", "--mark") => {
            let (value, mask) = bits(value?)?;
            Some(Condition::ConnMarkBits { mask, is: Equality { value, not } })
        }
        _ => None,
    }
}

fn protocol(name: &str, not: bool) -> Option<Condition> {
    let known = [Protocol::Tcp, Protocol::Udp].into_iter().find(|protocol| protocol.name() == name);
    if let (Some(protocol), false) = (known, not) {
        return Some(Condition::Plain(Match::Protocol(protocol)));
    }
    let number = match name {
        "icmp" => 1,
        "ipv6-icmp" | "icmpv6" => 58,
        "sctp" => 132,
        "esp" => 50,
        "gre" => 47,
        _ => known.map(Protocol::number).or_else(|| name.parse().ok())?,
    };
    Some(Condition::Protocol(Equality { value: number, not }))
}

/// `ID` or `FIRST-LAST`.
fn owner(selector: Selector, text: &str, not: bool) -> Option<Condition> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(owned_by(selector, (first.parse().ok()?, last.parse().ok()?), not))
}

fn ports(list: &str) -> Option<Vec<PortRange>> {
    list.split(',').map(|port| PortRange::parse(port, PortSyntax::Saved).ok()).collect()
}

fn states(list: &str) -> Option<u32> {
    list.split(',').try_fold(0, |bits, name| {
        let (bit, _) = state::NAMES.into_iter().find(|(_, known)| *known == name)?;
        Some(bits | bit)
    })
}

fn tcp_flags(mask: &str, set: &str, not: bool) -> Option<Condition> {
    const NAMES: [(&str, u8); 8] =
        [("FIN", 1), ("SYN", 2), ("RST", 4), ("PSH", 8), ("ACK", 16), ("URG", 32), ("ALL", 63), ("NONE", 0)];
    let bits = |list: &str| {
        list.split(',').try_fold(0, |bits, name| {
            let (_, bit) = NAMES.into_iter().find(|(known, _)| *known == name)?;
            Some(bits | bit)
        })
    };
    Some(Condition::TcpFlags { mask: bits(mask)?, is: Equality { value: bits(set)?, not } })
}

/// `VALUE` or `VALUE/MASK`, in hexadecimal digits.
fn bits(text: &str) -> Option<(u32, u32)> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    match text.split_once('/') {
        Some((value, mask)) => Some((number(value)?, number(mask)?)),
        None => Some((number(text)?, u32::MAX)),
    }
}

fn statement(word: &str, target: &str, options: &[String]) -> Statement {
    if word == "-g" {
        return Statement::Goto(target.to_owned());
    }
    let option = |name: &str| option(options, name);
    match target {
        "CT" if has(options, "--notrack") => Statement::Untrack,
        "CT" if has(options, "--zone") => option("--zone")
            .and_then(|zone| zone.parse().ok())
            .map_or_else(|| Statement::Harmless("-j CT".into()), Statement::Zone),
        "MARK" => marked(option("--set-xmark").and_then(bits)),
        "CONNMARK" => connection_marked(options),
        "REDIRECT" => match option("--to-ports").and_then(|port| port.parse().ok()) {
            None if options.is_empty() => Statement::RedirectHere,
            Some(port) if options.len() == 2 => Statement::Redirect(port),
            _ => Statement::Translate(target.to_owned()),
        },
        "TPROXY" if option("--on-ip").is_some_and(|ip| !is_unspecified(ip)) => {
            Statement::Unknown("-j TPROXY --on-ip".into())
        }
        "TPROXY" => Statement::Tproxy {
            port: option("--on-port").and_then(|port| port.parse().ok()).filter(|port| *port != 0),
            mark: option("--tproxy-mark").and_then(bits).map(|(value, mask)| (mask, value)),
            ends: true,
        },
        name => target_named(name).unwrap_or_else(|| Statement::Jump(name.to_owned())),
    }
}

fn has(options: &[String], name: &str) -> bool {
    options.iter().any(|word| word == name)
}

/// The word behind this one.
fn option<'a>(options: &'a [String], name: &str) -> Option<&'a str> {
    options.iter().skip_while(|word| *word != name).nth(1).map(String::as_str)
}

/// `-j CONNMARK` without shifts.
fn connection_marked(options: &[String]) -> Statement {
    let has = |name: &str| has(options, name);
    let is_shifted = has("--left-shift-mark") || has("--right-shift-mark");
    // A whole mask may be printed, and so may none; `--mask` is both of them.
    let mask_of = |name: &str| match option(options, name).or_else(|| option(options, "--mask")) {
        Some(text) => bits(text).map(|(value, _)| value),
        None => Some(u32::MAX),
    };
    let masks = mask_of("--nfmask").zip(mask_of("--ctmask")).filter(|_| !is_shifted);
    let set = option(options, "--set-xmark").and_then(bits);
    match (set, masks) {
        (Some((value, mask)), Some(_)) => Statement::SetConnMark { mask, value },
        (None, Some((u32::MAX, u32::MAX))) if has("--restore-mark") => Statement::RestoreMark,
        (None, Some((cleared, mask))) if has("--restore-mark") => {
            Statement::RestoreMarkBits { cleared, mask, flip: 0 }
        }
        (None, None) if has("--restore-mark") => Statement::SetMark(None),
        (None, Some((u32::MAX, u32::MAX))) if has("--save-mark") => Statement::SaveMark,
        (None, Some((mask, cleared))) if has("--save-mark") => {
            Statement::SaveMarkBits { cleared, mask, flip: 0 }
        }
        _ => Statement::Unknown("-j CONNMARK".into()),
    }
}

/// Whether an address is the packet's own destination to TPROXY.
fn is_unspecified(text: &str) -> bool {
    text.parse().is_ok_and(|address: std::net::IpAddr| address.is_unspecified())
}

#[cfg(test)]
mod tests;
