//! What is read of rules that differ in one bit, or lack a part, from those that a kernel, iptables-save or this library writes: something else, or
//! nothing. `tests/dumps/*.damaged` says what; a line `as it was` lists what makes no difference, and that must be padding, names and numbers
//! that mean nothing.

use super::{
    super::{Message, Messages, Observed},
    dumps::{self, dump},
};
use crate::expressions::{
    abi::{attribute, family_of, kind},
    decode, seen,
    wire::Attribute,
    xt,
};
use crate::{
    ruleset::{HookedRules, KernelRule},
    state::Entry,
};
use redirect_core::{
    Family,
    rule::{Match, Rule, Target},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

/// Which outcomes come of which damage.
#[derive(Default)]
struct Outcomes(BTreeMap<String, Vec<usize>>);

impl Outcomes {
    fn add(&mut self, at: usize, outcome: String) {
        self.0.entry(outcome).or_default().push(at);
    }

    /// A line for each outcome, with the places of the damage that leads to it.
    fn write(&self, text: &mut String, whole: &str) {
        for (outcome, places) in &self.0 {
            let outcome = if outcome == whole { "as it was" } else { outcome.as_str() };
            writeln!(text, "\t{outcome}\n\t\t{}", ranges(places)).unwrap();
        }
    }
}

/// `1-3 7`.
fn ranges(numbers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => ranges.push((*number, *number)),
        }
    }
    let words = ranges
        .into_iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") });
    words.collect::<Vec<_>>().join(" ")
}

/// A copy with the lowest bit of one byte turned round, for each byte.
fn flipped(bytes: &[u8]) -> impl Iterator<Item = (usize, Vec<u8>)> {
    (0..bytes.len()).map(|at| {
        let mut damaged = bytes.to_vec();
        damaged[at] ^= 1;
        (at, damaged)
    })
}

/// What a rule reads as, and whether it may be one of a plan.
fn read(list: &[u8], family: Option<Family>, ruleset: &HookedRules, message: &Message<'_>) -> String {
    let list = Attribute(list).attributes();
    let name = message.attributes().text(attribute::TABLE).unwrap();
    let table = ruleset.tables.iter().find(|(table, _)| {
        let families = Family::BOTH.into_iter().filter(|one| family.is_none_or(|only| only == *one));
        table.name == name && families.eq(Family::BOTH.into_iter().filter(|one| table.family.covers(*one)))
    });
    let seen = seen::rule_with(list, family, &table.unwrap().1.sets, &mut 0);
    match decode::rule(list, family.unwrap_or(Family::V4)) {
        Some(rule) => format!("{seen}, as a plan has it: {}", Entry::Rule(rule)),
        None => seen.to_string(),
    }
}

#[test]
fn rules_of_the_kernel_that_differ_in_one_bit_are_other_rules() {
    let plans = dumps::plans().map(|(name, _)| dumps::of_iptables(name));
    let mut met = BTreeSet::new();
    let mut text = String::new();
    for dump in plans.iter().map(String::as_str).chain([dumps::OF_OTHERS]).map(dump) {
        let mut ruleset = HookedRules::default();
        for message in Messages::new(&dump) {
            ruleset.take(&message);
            let list = message.attributes().find(attribute::rule::EXPRESSIONS);
            let Some(list) = list.filter(|_| message.kind == kind::NEW_RULE) else { continue };
            let family = family_of(message.family);
            let whole = read(list.0, family, &ruleset, &message);
            if !met.insert(whole.clone()) {
                continue;
            }
            writeln!(text, "{whole}").unwrap();
            let mut outcomes = Outcomes::default();
            for (at, damaged) in flipped(list.0) {
                let read = read(&damaged, family, &ruleset, &message);
                // How that is put is others.seen's affair.
                outcomes.add(at, if read.contains('[') { "something not understood".into() } else { read });
            }
            outcomes.write(&mut text, &whole);
        }
    }
    dumps::assert_recorded("kernel.damaged", &text);
}

/// The matches and targets of plans that x_tables has an extension for.
fn extended() -> Vec<(Vec<Match>, Target)> {
    let texts = [
        "-m owner --uid-owner 1337 -j RETURN",
        "-m owner ! --gid-owner 1337 -j RETURN",
        "-p tcp -m multiport --dports 80,443,8000:8080 -j RETURN",
        "-p tcp -m multiport ! --dports 80 -j RETURN",
        "-m conntrack --ctstate INVALID -j DROP",
        "-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN",
        "-m conntrack --ctstate RELATED,ESTABLISHED --ctdir REPLY -j RETURN",
        "-m connmark --mark 0x539 -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
        "-m connmark --mark 0x53b00000/0xfff00000 -j CONNMARK --set-xmark 0x53b00000/0xfff00000",
        "-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
        "-p tcp -j REDIRECT --to-ports 15006",
        "-p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff",
        "-j MARK --set-xmark 0x539/0xffffffff",
        "-p udp -j CT --zone 2",
    ];
    let rule = |text: &str| match Entry::saved(text) {
        Entry::Rule(Rule { matches, target }) => (matches, target),
        Entry::Foreign(_) => panic!("{text} is not a rule of ours"),
    };
    texts.map(rule).into()
}

#[test]
fn structures_that_differ_in_one_bit_or_end_early_say_something_else() {
    let mut text = String::new();
    let plain = |rule: Option<String>| rule.unwrap_or_else(|| "nothing".into());
    let seen_match = |name: &str, revision: u32, info: &[u8]| {
        let conditions = seen::extension_match(name, revision, info)
            .map(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
        let of_plan = decode::matched(name, revision, info).map(|all| format!(", as a plan has it: {all:?}"));
        plain(conditions) + &of_plan.unwrap_or_default()
    };
    let seen_target = |name: &str, revision: u32, info: &[u8]| {
        let does = seen::extension_target(name, revision, info)
            .map(|does| KernelRule { statements: [does].into(), ..KernelRule::default() }.to_string());
        let of_plan = decode::targeted(name, revision, info);
        plain(does) + &of_plan.map(|target| format!(", as a plan has it: {target:?}")).unwrap_or_default()
    };
    let mut write = |title: String, info: &[u8], read: &dyn Fn(&[u8]) -> String| {
        let whole = read(info);
        writeln!(text, "{title}: {whole}").unwrap();
        let mut outcomes = Outcomes::default();
        flipped(info).for_each(|(at, damaged)| outcomes.add(at, read(&damaged)));
        outcomes.write(&mut text, &whole);
        let mut cut = Outcomes::default();
        (0..info.len()).for_each(|length| cut.add(length, read(&info[..length])));
        writeln!(text, "\tof that length alone:").unwrap();
        cut.write(&mut text, &whole);
    };
    for (matches, target) in extended() {
        for condition in &matches {
            let Some((of, Some(info))) = xt::of_match(condition) else { continue };
            for revision in 0..=of.revision + 1 {
                let title = format!("-m {} of revision {revision}", of.name);
                write(title, &info, &|info| seen_match(of.name, revision, info));
            }
        }
        for family in Family::BOTH {
            let Some((of, info)) = xt::of_target(&target, family) else { continue };
            for revision in 0..=of.revision + 1 {
                let title = format!("{family}: -j {} of revision {revision}", of.name);
                write(title, &info, &|info| seen_target(of.name, revision, info));
            }
        }
    }
    dumps::assert_recorded("extensions.damaged", &text);
}

#[test]
fn rules_that_lack_a_word_are_other_rules() {
    let mut met = BTreeSet::new();
    let mut text = String::new();
    let names = dumps::plans().map(|(name, _)| name);
    for (name, family) in
        names.into_iter().chain([dumps::OF_OTHERS]).flat_map(|name| Family::BOTH.map(|of| (name, of)))
    {
        let saved = std::fs::read_to_string(dumps::file(&dumps::saved(name, family))).unwrap();
        let rules = saved.lines().filter_map(|line| line.strip_prefix("-A ")?.split_once(' '));
        for (_, rule) in rules.filter(|(_, rule)| met.insert((*rule).to_string())) {
            let read =
                |rule: &str| format!("{}, as a plan has it: {}", KernelRule::saved(rule), Entry::saved(rule));
            let whole = read(rule);
            writeln!(text, "{rule}").unwrap();
            let words: Vec<&str> = rule.split(' ').collect();
            let mut outcomes = Outcomes::default();
            for without in 0..words.len() {
                let rest: Vec<&str> = [&words[..without], &words[without + 1..]].concat();
                outcomes.add(without, read(&rest.join(" ")));
            }
            outcomes.write(&mut text, &whole);
        }
    }
    dumps::assert_recorded("saved.damaged", &text);
}

/// The messages of a dump, each with its own header.
fn messages(mut dump: &[u8]) -> Vec<&[u8]> {
    let mut messages = Vec::new();
    while let Some(length) = dump.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes)) {
        let (message, rest) = dump.split_at(usize::try_from(length.next_multiple_of(4)).unwrap());
        messages.push(message);
        dump = rest;
    }
    messages
}

/// What is known of a namespace, in each of the ways in which it is checked.
#[derive(Clone, Default)]
struct ReadNamespace {
    ruleset: HookedRules,
    observed: Observed,
}

impl ReadNamespace {
    fn with(&self, bytes: &[u8]) -> Self {
        let mut known = self.clone();
        for message in Messages::new(bytes) {
            known.ruleset.take(&message);
            known.observed.take(&message);
        }
        known
    }

    fn differences(&self, from: &Self) -> String {
        let differs = [
            (self.ruleset != from.ruleset, "tables"),
            (self.observed.native() != from.observed.native(), "native state"),
            (!self.observed.reads_like(&from.observed), "what a change may touch"),
            (!self.observed.obstacles().eq(from.observed.obstacles()), "what interferes"),
        ];
        let words: Vec<_> =
            differs.into_iter().filter(|(differs, _)| *differs).map(|(_, word)| word).collect();
        if words.is_empty() { "as it was".into() } else { words.join(", ") + " differ" }
    }
}

#[test]
fn messages_that_differ_in_one_bit_say_something_else() {
    /// Of each kind in each dump.
    const MOST: usize = 6;
    /// The end of an answer, which carries nothing (`NLMSG_DONE`).
    const DONE: u16 = 3;
    let mut text = String::new();
    for name in [dumps::EXTENDED, "strict-sets", "redirect-plain", "redirect-iptables", dumps::OF_OTHERS] {
        let bytes = dump(name);
        let mut known = ReadNamespace::default();
        let mut met: BTreeMap<u16, usize> = BTreeMap::new();
        for bytes in messages(&bytes) {
            let whole = known.with(bytes);
            let kind = Messages::new(bytes).next().unwrap().kind;
            let number = met.entry(kind).or_default();
            *number += 1;
            if *number <= MOST && kind != DONE {
                writeln!(text, "{name}: message {kind}, {number}").unwrap();
                let mut outcomes = Outcomes::default();
                for (at, damaged) in flipped(bytes) {
                    outcomes.add(at, known.with(&damaged).differences(&whole));
                }
                outcomes.write(&mut text, "");
            }
            known = whole;
        }
    }
    dumps::assert_recorded("messages.damaged", &text);
}
