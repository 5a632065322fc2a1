//! Tables of legacy iptables as the kernel lays them out: entries of `linux/netfilter_ipv4/ip_tables.h` and
//! `linux/netfilter_ipv6/ip6_tables.h`, one behind the other. Their matches and targets are those that iptables-nft uses, too.

use crate::{
    expressions::{
        abi::hook_number,
        decode,
        expression::address_offset,
        reading::{Expression, Xt},
        seen::{self, ExpressionReader},
        wire::{Attribute, read_array},
    },
    ruleset::{
        Api, ChainState, Condition, Counter, Endpoint, HookedRules, KernelRule, Sets, Statement, TableName,
        built_in,
    },
    state::{Entry, ForeignRule, IptablesTables},
};
use redirect_core::{
    rule::{Chain, Equality, Hook, Match, Rule, Table},
    values::Family,
};
use std::collections::BTreeMap;

/// A table of legacy iptables, as `IPT_SO_GET_INFO` and `IPT_SO_GET_ENTRIES` describe it.
#[derive(Debug, Clone, Copy)]
pub struct LegacyTable<'a> {
    /// Its family.
    pub family: Family,
    /// Its name.
    pub name: &'a str,
    /// The hooks at which it has a built-in chain, a bit for each.
    pub valid_hooks: u32,
    /// The offset of the first entry of each hook's chain.
    pub begins: [u32; 5],
    /// The offset of the entry that is each chain's policy.
    pub policies: [u32; 5],
    /// Its entries.
    pub entries: &'a [u8],
}

/// Entries that no kernel writes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("table {table} of legacy iptables cannot be read: the entry at byte {offset} is malformed")]
pub struct MalformedTable {
    /// The table's name.
    pub table: String,
    /// Where the entry begins.
    pub offset: usize,
}

/// The chains of a table, with the rules of each in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LegacyChains {
    chains: BTreeMap<String, LegacyChain>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct LegacyChain {
    /// The hook of a built-in chain, and whether its policy is to drop.
    hook: Option<(Hook, bool)>,
    rules: Vec<LegacyRule>,
}

/// A rule: all that is understood of it, and as a plan has it, if one can have it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LegacyRule {
    seen: KernelRule,
    planned: Option<Rule>,
}

impl LegacyChains {
    /// Whether the table lets everything pass: it has no rule, no chain of its own, and no policy to drop.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chains.values().all(|chain| chain.rules.is_empty() && matches!(chain.hook, Some((_, false))))
    }

    /// Adds the table to a ruleset.
    pub fn add_to(self, ruleset: &mut HookedRules, family: Family, name: &str) {
        let table = TableName { api: Api::XTables, family: family.into(), name: name.to_owned() };
        let chains = self.chains.into_iter().map(|(chain_name, chain)| {
            let base = chain.hook.and_then(|(hook, drops)| built_in(name, hook, drops));
            let rules = chain.rules.into_iter().map(|rule| rule.seen).collect();
            (chain_name, ChainState { base, rules, ..ChainState::default() })
        });
        ruleset.table(table).chains.extend(chains);
    }

    /// Adds the table, which has this name, to the state of its family. An unsupported rule is described in words that
    /// iptables-restore does not take.
    pub fn add_to_state(&self, state: &mut IptablesTables, table: Table) {
        for (name, chain) in &self.chains {
            if chain.hook.is_some() && chain.rules.is_empty() {
                continue;
            }
            let entry = |rule: &LegacyRule| match &rule.planned {
                Some(planned) => Entry::from(planned),
                None => Entry::Foreign(ForeignRule::saved(&rule.seen.to_string())),
            };
            state.declare(table, Chain::named(name)).extend(chain.rules.iter().map(entry));
        }
    }

    /// Whether every rule is understood, so that it can be removed by what was read of it.
    #[must_use]
    pub fn are_understood(&self) -> bool {
        self.chains.values().flat_map(|chain| &chain.rules).all(|rule| rule.planned.is_some())
    }
}

impl LegacyTable<'_> {
    /// Reads its entries.
    ///
    /// # Errors
    /// They are not as the kernel lays them out.
    pub fn chains(&self) -> Result<LegacyChains, MalformedTable> {
        let entries = self.entries()?;
        // Jumps name the offset of a chain's first entry, which is behind the one that names the chain.
        let named: BTreeMap<usize, String> =
            entries.iter().filter_map(|entry| Some((entry.end(), entry.chain_name()?))).collect();
        let (mut chains, mut here) = (BTreeMap::<String, LegacyChain>::new(), None);
        for (number, entry) in entries.iter().enumerate() {
            let ends_chain =
                entries.get(number.saturating_add(1)).is_none_or(|next| next.chain_name().is_some());
            if let Some(hook) = self.hook_at(self.begins, entry.offset) {
                here = Some(hook.name().to_owned());
                chains.entry(hook.name().to_owned()).or_default().hook = Some((hook, false));
            }
            let policy_of = self.hook_at(self.policies, entry.offset);
            match (entry.chain_name(), policy_of, &here) {
                // The last entry ends the table.
                (Some(_), ..) if number.saturating_add(1) == entries.len() => {}
                (Some(name), ..) => {
                    chains.entry(name.clone()).or_default();
                    here = Some(name);
                }
                (None, Some(hook), _) => {
                    let drops = entry.verdict() == Some(verdict::DROP);
                    chains.entry(hook.name().to_owned()).or_default().hook = Some((hook, drops));
                    here = None;
                }
                // The last entry of a chain returns to the one that called it.
                (None, None, Some(_)) if ends_chain => {}
                (None, None, Some(name)) => {
                    let rule = entry.rule(self.family, &named);
                    chains.entry(name.clone()).or_default().rules.push(rule);
                }
                (None, None, None) => return Err(self.malformed(entry.offset)),
            }
        }
        Ok(LegacyChains { chains })
    }

    fn hook_at(&self, offsets: [u32; 5], offset: usize) -> Option<Hook> {
        let is_valid =
            |hook| self.valid_hooks.checked_shr(hook_number(hook)).is_some_and(|bits| bits & 1 != 0);
        let mut valid = Hook::ALL.iter().copied().zip(offsets).filter(|(hook, _)| is_valid(*hook));
        valid.find(|(_, at)| usize::try_from(*at) == Ok(offset)).map(|(hook, _)| hook)
    }

    fn entries(&self) -> Result<Vec<LegacyEntry<'_>>, MalformedTable> {
        let (mut entries, mut offset) = (Vec::new(), 0);
        while offset < self.entries.len() {
            let entry = LegacyEntry::read(self.entries, offset, self.family);
            let entry = entry.ok_or_else(|| self.malformed(offset))?;
            offset = entry.end();
            entries.push(entry);
        }
        Ok(entries)
    }

    fn malformed(&self, offset: usize) -> MalformedTable {
        MalformedTable { table: self.name.to_owned(), offset }
    }
}

/// Where the fields of an entry are.
struct Layout {
    /// The length of an address.
    address: usize,
    interfaces: usize,
    protocol: usize,
    flags: usize,
    inverted: usize,
    /// The flag of a rule that goes to a chain for good.
    goto: u8,
    /// `nfcache`, and behind it the offsets of target and next entry.
    offsets: usize,
    counters: usize,
    /// The length of an entry before its matches.
    length: usize,
}

const V4: Layout = Layout {
    address: 4,
    interfaces: 16,
    protocol: 80,
    flags: 82,
    inverted: 83,
    goto: 2,
    offsets: 88,
    counters: 96,
    length: 112,
};
const V6: Layout = Layout {
    address: 16,
    interfaces: 64,
    protocol: 128,
    flags: 131,
    inverted: 132,
    goto: 4,
    offsets: 140,
    counters: 152,
    length: 168,
};

/// `IP6T_F_PROTO`: the protocol counts. It counts without the flag, too, unless it is 0.
const PROTOCOL_COUNTS: u8 = 1;
/// Bits of the inverted flags, the same in both families.
mod inverted {
    pub(super) const IN_INTERFACE: u8 = 1;
    pub(super) const OUT_INTERFACE: u8 = 2;
    pub(super) const SOURCE: u8 = 8;
    pub(super) const DESTINATION: u8 = 0x10;
    pub(super) const PROTOCOL: u8 = 0x40;
}
/// The length of an interface's name, the final zero included (`IFNAMSIZ`).
const INTERFACE: usize = 16;
/// The length of `struct xt_entry_match` and `struct xt_entry_target`: size, name, revision.
const HEAD: usize = 32;
/// The name of the target that names a chain, and of those that are verdicts.
const ERROR: &str = "ERROR";
const STANDARD: &str = "";

/// The match or target at the beginning of these bytes, and how many it takes.
fn extension(bytes: &[u8]) -> Option<(Xt<'_>, usize)> {
    let size = usize::from(u16::from_ne_bytes(read_array(bytes, 0)?));
    let info = bytes.get(HEAD..size)?;
    // Those that exist have names of ASCII.
    let name = Attribute(bytes.get(2..HEAD.checked_sub(1)?)?).text().unwrap_or("?");
    let [revision] = read_array(bytes, HEAD.checked_sub(1)?)?;
    Some((Xt { name, revision: revision.into(), info }, size))
}

/// Verdicts of the standard target; numbers that are not negative are offsets of entries.
mod verdict {
    pub(super) const DROP: i32 = -1;
    pub(super) const ACCEPT: i32 = -2;
    pub(super) const QUEUE: i32 = -4;
    pub(super) const RETURN: i32 = -5;
}

struct LegacyEntry<'a> {
    offset: usize,
    bytes: &'a [u8],
    layout: &'static Layout,
    matches: Vec<Xt<'a>>,
    target: Xt<'a>,
}

impl<'a> LegacyEntry<'a> {
    fn read(all: &'a [u8], offset: usize, family: Family) -> Option<Self> {
        let layout = match family {
            Family::V4 => &V4,
            Family::V6 => &V6,
        };
        let rest = all.get(offset..)?;
        let target_at = usize::from(u16::from_ne_bytes(read_array(rest, layout.offsets)?));
        let next = usize::from(u16::from_ne_bytes(read_array(rest, layout.offsets.checked_add(2)?)?));
        let bytes = rest.get(..next)?;
        let mut parts = bytes.get(layout.length..target_at)?;
        let mut matches = Vec::new();
        while !parts.is_empty() {
            let (part, size) = extension(parts)?;
            matches.push(part);
            parts = parts.get(size..)?;
        }
        let (target, _) = extension(bytes.get(target_at..)?)?;
        Some(Self { offset, bytes, layout, matches, target })
    }

    fn end(&self) -> usize {
        self.offset.saturating_add(self.bytes.len())
    }

    /// The name of the chain that begins behind it.
    fn chain_name(&self) -> Option<String> {
        (self.target.name == ERROR).then(|| Attribute(self.target.info).name())
    }

    /// What the standard target decides.
    fn verdict(&self) -> Option<i32> {
        (self.target.name == STANDARD).then_some(())?;
        read_array(self.target.info, 0).map(i32::from_ne_bytes)
    }

    fn rule(&self, family: Family, chains: &BTreeMap<usize, String>) -> LegacyRule {
        let is_standard = self.target.name == STANDARD;
        let (header, target) = (self.header(), self.standard(chains).filter(|_| is_standard));
        let planned = self.planned(&header, target.as_slice());
        let (sets, mut looked_up) = (Sets::new(), 0);
        let mut reader = ExpressionReader::new(Some(family), &sets, &mut looked_up);
        header.into_iter().for_each(|condition| reader.condition(condition));
        self.matches.iter().for_each(|one| reader.expression(Expression::Match(*one)));
        match target {
            Some(statement) => reader.statement(statement),
            None if is_standard => {}
            None => reader.expression(Expression::Target(self.target)),
        }
        LegacyRule { seen: KernelRule { counter: self.counter(), ..reader.rule }, planned }
    }

    /// The rule as a plan has it, if one can have it.
    fn planned(&self, header: &[Condition], statements: &[Statement]) -> Option<Rule> {
        let mut matches: Vec<Match> = decode::asked(header.to_vec())?;
        for one in &self.matches {
            matches.extend(decode::matched(one.name, one.revision, one.info)?);
        }
        let target = match self.target.name {
            STANDARD => decode::done(statements)??,
            name => decode::targeted(name, self.target.revision, self.target.info)?,
        };
        let rule = Rule { matches, target }.canonical();
        rule.says_its_protocol().then_some(rule)
    }

    fn counter(&self) -> Option<Counter> {
        let number = |at: usize| Some(u64::from_ne_bytes(read_array(self.bytes, at)?));
        let packets = number(self.layout.counters)?;
        Some(Counter { packets, bytes: number(self.layout.counters.checked_add(8)?)? })
    }

    /// What a standard target does; nothing in a rule without a target, which leads to the next one.
    fn standard(&self, chains: &BTreeMap<usize, String>) -> Option<Statement> {
        let goes = self.bytes.get(self.layout.flags).is_some_and(|flags| flags & self.layout.goto != 0);
        let verdict = self.verdict();
        let offset = verdict.and_then(|offset| usize::try_from(offset).ok());
        if offset == Some(self.end()) {
            return None;
        }
        Some(match (verdict, offset.and_then(|offset| chains.get(&offset))) {
            (Some(verdict::DROP), _) => Statement::Drop,
            (Some(verdict::ACCEPT), _) => Statement::Accept,
            (Some(verdict::QUEUE), _) => Statement::Queue,
            (Some(verdict::RETURN), _) => Statement::Return,
            (_, Some(chain)) if goes => Statement::Goto(chain.clone()),
            (_, Some(chain)) => Statement::Jump(chain.clone()),
            (_, None) => Statement::Unknown("-j".to_owned()),
        })
    }

    /// What the entry asks by itself: addresses, interfaces, protocol.
    fn header(&self) -> Vec<Condition> {
        let [inverted] = read_array(self.bytes, self.layout.inverted).unwrap_or_default();
        let not = |bit: u8| inverted & bit != 0;
        let mut conditions = Vec::new();
        conditions.extend(self.address(Endpoint::Source, not(inverted::SOURCE)));
        conditions.extend(self.address(Endpoint::Destination, not(inverted::DESTINATION)));
        conditions.extend(self.interface(0, not(inverted::IN_INTERFACE)));
        conditions.extend(self.interface(1, not(inverted::OUT_INTERFACE)));
        let protocol = u16::from_ne_bytes(read_array(self.bytes, self.layout.protocol).unwrap_or_default());
        if protocol != 0 {
            let known = u8::try_from(protocol).map(|one| seen::protocol(one, not(inverted::PROTOCOL)));
            conditions.push(known.unwrap_or_else(|_| Condition::Unknown("-p".to_owned())));
        }
        let [flags] = read_array(self.bytes, self.layout.flags).unwrap_or_default();
        let known_flags = if self.layout.goto == V6.goto { PROTOCOL_COUNTS | V6.goto } else { V4.goto };
        let known_inverted = inverted::IN_INTERFACE
            | inverted::OUT_INTERFACE
            | inverted::SOURCE
            | inverted::DESTINATION
            | inverted::PROTOCOL;
        if flags & !known_flags != 0 || inverted & !known_inverted != 0 {
            conditions.push(Condition::Unknown("-f".to_owned()));
        }
        conditions
    }

    /// One of two fields of the same length that begin here, and its mask: the masks of both are behind them.
    fn masked(&self, begin: usize, length: usize, number: usize) -> Option<(&'a [u8], &'a [u8])> {
        let mut fields = self.bytes.get(begin..)?.chunks_exact(length);
        Some((fields.nth(number)?, fields.nth(1)?))
    }

    fn address(&self, end: Endpoint, not: bool) -> Option<Condition> {
        let (number, which) = match end {
            Endpoint::Source => (0, "-s"),
            Endpoint::Destination => (1, "-d"),
        };
        let length = self.layout.address;
        let (value, mask) = self.masked(0, length, number)?;
        if mask.iter().chain(value).all(|byte| *byte == 0) && !not {
            return None;
        }
        let family = if length == V4.address { Family::V4 } else { Family::V6 };
        let at = (address_offset(end, family), Some(family));
        let known = seen::prefix_of(mask).and_then(|prefix| seen::address(at, not, value, prefix));
        Some(known.unwrap_or_else(|| Condition::Unknown(which.to_owned())))
    }

    fn interface(&self, number: usize, not: bool) -> Option<Condition> {
        let (name, mask) = self.masked(self.layout.interfaces, INTERFACE, number)?;
        if mask.iter().all(|byte| *byte == 0) && !not {
            return None;
        }
        let (whole, rest) = mask.split_at(mask.iter().take_while(|byte| **byte == 0xff).count());
        let compared = name.get(..whole.len()).filter(|_| rest.iter().all(|byte| *byte == 0));
        let which = if number == 0 { "-i" } else { "-o" };
        let known = compared.and_then(seen::interface).map(|value| {
            let is = Equality { value, not };
            Condition::Plain(if number == 0 { Match::InInterface(is) } else { Match::OutInterface(is) })
        });
        Some(known.unwrap_or_else(|| Condition::Unknown(which.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An entry without conditions and with the standard target, as the kernel lays it out for IPv4.
    fn entry(verdict: i32) -> Vec<u8> {
        let mut bytes = [0; 112 + 40];
        bytes[88..90].copy_from_slice(&112_u16.to_ne_bytes());
        bytes[90..92].copy_from_slice(&152_u16.to_ne_bytes());
        bytes[112..114].copy_from_slice(&40_u16.to_ne_bytes());
        bytes[144..148].copy_from_slice(&verdict.to_ne_bytes());
        bytes.into()
    }

    fn chains(entries: &[u8], policy: u32) -> Result<LegacyChains, MalformedTable> {
        let table = LegacyTable {
            family: Family::V4,
            name: "nat",
            valid_hooks: 1 << 3,
            begins: [0; 5],
            policies: [0, 0, 0, policy, 0],
            entries,
        };
        table.chains()
    }

    #[test]
    fn a_jump_that_leads_to_no_chain_is_told_as_unknown() {
        let entries = [entry(7), entry(-2)].concat();
        let chains = chains(&entries, 152).unwrap();
        let rules = &chains.chains["OUTPUT"].rules;
        assert_eq!(rules[0].seen.statements, [Statement::Unknown("-j".to_owned())]);
        assert!(!chains.are_understood() && !chains.is_empty());
    }

    #[test]
    fn a_target_that_is_an_extension_is_not_passed_over() {
        let mut named = entry(0);
        named[114..121].copy_from_slice(b"NETMAP\0");
        let chains = chains(&[named, entry(-2)].concat(), 152).unwrap();
        let rules = &chains.chains["OUTPUT"].rules;
        assert_eq!(rules[0].seen.statements, [Statement::Translate("NETMAP".to_owned())]);
    }

    #[test]
    fn what_an_entry_asks_is_what_the_kernel_compares() {
        let asked = |changes: &[(usize, &[u8])]| {
            let mut first = entry(-1);
            for (at, bytes) in changes {
                first[*at..*at + bytes.len()].copy_from_slice(bytes);
            }
            let chains = chains(&[first, entry(-2)].concat(), 152).unwrap();
            chains.chains["OUTPUT"].rules[0].seen.to_string()
        };
        let (source, mask, interface, bits) = (0, 8, 16, 48);
        let net: (usize, &[u8]) = (source, &[10, 1, 0, 0]);
        assert_eq!(asked(&[net, (mask, &[255, 255, 0, 0])]), "-s 10.1.0.0/16 -j DROP");
        assert_eq!(asked(&[net, (mask, &[255, 0, 0, 0])]), "[-s] -j DROP");
        assert_eq!(asked(&[net]), "[-s] -j DROP", "of no bits");
        let name: (usize, &[u8]) = (interface, b"eth0");
        assert_eq!(asked(&[name, (bits, &[0xff; 5])]), "-i eth0 -j DROP");
        assert_eq!(asked(&[name, (bits, &[0xff; 3])]), "-i eth+ -j DROP");
        for others in [&[0xff, 0xff, 0, 0xff, 0xff], &[0xff, 0xff, 0xff, 0xf0, 0], &[0, 0xff, 0, 0, 0]] {
            assert_eq!(asked(&[name, (bits, others)]), "[-i] -j DROP", "{others:x?}");
        }
        assert_eq!(asked(&[(80, &6_u16.to_ne_bytes())]), "-p tcp -j DROP");
        assert_eq!(asked(&[(80, &300_u16.to_ne_bytes())]), "[-p] -j DROP");
        let (flags, inverted) = (82, 83);
        let tcp = 6_u16.to_ne_bytes();
        let (tcp, slash_16): ((usize, &[u8]), &[u8]) = ((80, &tcp), &[255, 255, 0, 0]);
        for (changes, bit, expected) in [
            (vec![name, (bits, &[0xff; 5])], 0x01, "! -i eth0"),
            (vec![(interface + 16, b"eth0"), (bits + 16, &[0xff; 5])], 0x02, "! -o eth0"),
            (vec![net, (mask, slash_16)], 0x08, "! -s 10.1.0.0/16"),
            (vec![(source + 4, net.1), (mask + 4, slash_16)], 0x10, "! -d 10.1.0.0/16"),
            (vec![tcp], 0x40, "! -p 6"),
        ] {
            let bits = [bit];
            let changes = [changes, vec![(inverted, &bits[..])]].concat();
            assert_eq!(asked(&changes), format!("{expected} -j DROP"));
        }
        for at in [flags, inverted] {
            assert_eq!(asked(&[(at, &[0x20])]), "[-f] -j DROP", "a bit that is not known");
        }
    }

    /// A chain may have a name of any bytes.
    #[test]
    fn a_chain_whose_name_is_no_text_is_read() {
        let mut named = [0; 112 + 64];
        named[88..90].copy_from_slice(&112_u16.to_ne_bytes());
        named[90..92].copy_from_slice(&176_u16.to_ne_bytes());
        named[112..114].copy_from_slice(&64_u16.to_ne_bytes());
        named[114..119].copy_from_slice(ERROR.as_bytes());
        named[144..146].copy_from_slice(b"X\xff");
        // A policy, the chain with one rule and the entry that ends it, and the entry that ends the table.
        let entries = [entry(-2), named.into(), entry(-1), entry(-5), named.into()].concat();
        let chains = chains(&entries, 0).unwrap();
        let name = crate::ruleset::name_of_bytes(b"X\xff");
        assert_eq!(chains.chains[&name].rules[0].seen.statements, [Statement::Drop]);
    }

    #[test]
    fn entries_outside_of_any_chain_are_an_error_that_says_where() {
        let entries = [entry(-2), entry(-2), entry(-2)].concat();
        let error = chains(&entries, 0).unwrap_err();
        assert_eq!(error.offset, 152);
        assert!(error.to_string().contains("byte 152"), "{error}");
        for cut in [1, 100, 151] {
            assert_eq!(chains(&entries[..cut], 0).unwrap_err().offset, 0);
        }
    }

    proptest! {
        #[test]
        fn damaged_entries_are_read_or_an_error(
            changes in proptest::collection::vec((0_usize..456, any::<u8>()), 0..8),
            policy in 0_u32..500,
        ) {
            let mut entries = [entry(-1), entry(-5), entry(-2)].concat();
            for (at, byte) in changes {
                entries[at] = byte;
            }
            let _ = chains(&entries, policy);
        }
    }
}
