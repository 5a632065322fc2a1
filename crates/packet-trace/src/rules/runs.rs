//! Rules that are asked at once.

use super::{Test, WalkedRule, cost};
use crate::{packets::VariedField, set::RangeSet};
use netfilter_state::ruleset::Statement;
use std::collections::BTreeMap;

/// Rules, one behind the other, that do the same with packets that differ in one field. They are asked at once.
#[derive(Debug, Clone)]
pub(in super::super) struct Run {
    pub(in super::super) count: usize,
    /// What a packet has to fulfil for one of them.
    pub(in super::super) tests: Vec<Test>,
}

/// Joins rules, one behind the other, that do the same and together are about packets that one list of tests describes: first those
/// that differ in one field (a port of TCP and of UDP), then what came of them (many such ports).
pub(super) fn find_runs(rules: &mut [WalkedRule]) {
    // Most chains have none: neighbours, or neighbours but one, that begin some.
    let are_alike = |one: &WalkedRule, other: &WalkedRule| {
        differing((one, &one.tests), (other, &other.tests), None).is_some()
    };
    let begin = |rules: &[WalkedRule]| matches!(rules, [one, rest @ ..] if rest.iter().any(|other| are_alike(one, other)));
    if !rules.windows(2).any(begin) && !rules.windows(3).any(begin) {
        return;
    }
    let mut runs: Vec<(usize, Run)> = rules
        .iter()
        .enumerate()
        .map(|(first, rule)| (first, Run { count: 1, tests: rule.tests.clone() }))
        .collect();
    loop {
        let before = runs.len();
        runs = joined(runs, rules);
        if runs.len() == before {
            break;
        }
    }
    for (first, run) in paired(&runs, rules) {
        if let Some(rule) = rules.get_mut(first).filter(|rule| run.count > 1 || run.tests != rule.tests) {
            rule.cost = cost(&run.tests);
            rule.run = Some(run);
        }
    }
}

/// The test by which rules that are being joined differ, and the values of its field that they have.
struct Joining {
    number: usize,
    ranges: Vec<(u128, u128)>,
    /// The same in order: first and last of each.
    taken: BTreeMap<u128, u128>,
}

impl Joining {
    fn of(number: usize, set: &RangeSet) -> Self {
        let mut joining = Self { number, ranges: Vec::new(), taken: BTreeMap::new() };
        joining.add(set);
        joining
    }

    fn add(&mut self, set: &RangeSet) {
        self.ranges.extend(set.ranges());
        self.taken.extend(set.ranges().iter().copied());
    }

    fn overlaps(&self, set: &RangeSet) -> bool {
        let is_taken = |(first, last): &(u128, u128)| {
            self.taken.range(..=*last).next_back().is_some_and(|(_, end)| end >= first)
        };
        set.ranges().iter().any(is_taken)
    }
}

fn joined(runs: Vec<(usize, Run)>, rules: &[WalkedRule]) -> Vec<(usize, Run)> {
    let mut all: Vec<(usize, Run)> = Vec::with_capacity(runs.len());
    let mut varies: Option<Joining> = None;
    for (first, run) in runs {
        let joins = all.last().and_then(|(last, known)| {
            let (one, other) = (rules.get(*last)?, rules.get(first)?);
            let only = varies.as_ref().map(|joining| joining.number);
            let number = differing((one, &known.tests), (other, &run.tests), only)?;
            let (had, has) = (set_of(known, number)?, set_of(&run, number)?);
            // What comes back from a chain would meet the next of them, too, if their values overlapped.
            let overlap = || match &varies {
                Some(joining) => joining.overlaps(has),
                None => Joining::of(number, had).overlaps(has),
            };
            (ends(one) || !overlap()).then(|| (number, had.clone(), has.clone()))
        });
        let Some((number, had, has)) = joins else {
            close(all.last_mut(), varies.take());
            all.push((first, run));
            continue;
        };
        varies.get_or_insert_with(|| Joining::of(number, &had)).add(&has);
        if let Some((_, known)) = all.last_mut() {
            known.count = known.count.saturating_add(run.count);
        }
    }
    close(all.last_mut(), varies);
    all
}

/// Joins pairs of the mesh's rules, one behind the other: each pair is about ports that no other has, so that a packet meets those of one
/// pair at most, and all first ones may be asked before all second ones (what TPROXY does with each of many ports).
fn paired(runs: &[(usize, Run)], rules: &[WalkedRule]) -> Vec<(usize, Run)> {
    let mut all: Vec<(usize, Run)> = Vec::with_capacity(runs.len());
    let mut rest = runs;
    while let [(first, one), (second, other), behind @ ..] = rest {
        let Some(pairs) = Pairs::of([(*first, one), (*second, other)], behind, rules) else {
            all.push((*first, one.clone()));
            rest = rest.get(1..).unwrap_or_default();
            continue;
        };
        let end = pairs.behind.first().map_or(rules.len(), |(next, _)| *next);
        all.push((*first, Run { count: one.count, tests: pairs.tests(one, 0) }));
        all.push((*second, Run { count: end.saturating_sub(*second), tests: pairs.tests(other, 1) }));
        rest = pairs.behind;
    }
    all.extend_from_slice(rest);
    all
}

/// Pairs of rules that are asked at once.
struct Pairs<'a> {
    /// The tests by which they differ: of the first ones, and of the second ones.
    numbers: [usize; 2],
    ports: RangeSet,
    /// The runs behind the last pair.
    behind: &'a [(usize, Run)],
}

impl<'a> Pairs<'a> {
    /// A pair, and those behind it that differ from it in their ports alone, if any.
    fn of(pair: [(usize, &Run); 2], mut behind: &'a [(usize, Run)], rules: &[WalkedRule]) -> Option<Self> {
        let ([one, other], after_pair) = (pair, behind.len());
        let mut found: Option<([usize; 2], Joining)> = None;
        while let [(next, like_one), (following, like_other), rest @ ..] = behind {
            let numbers = port_by_which(one, (*next, like_one), rules).zip(port_by_which(
                other,
                (*following, like_other),
                rules,
            ));
            let Some((first, second)) = numbers else { break };
            let of_pair = |one: &Run, other: &Run| {
                let (set, same) = (set_of(one, first)?.clone(), set_of(other, second)?);
                (set == *same).then_some(set)
            };
            let Some((had, has)) = of_pair(one.1, other.1).zip(of_pair(like_one, like_other)) else { break };
            let known = found.take().unwrap_or_else(|| ([first, second], Joining::of(first, &had)));
            let (numbers, mut joining) = known;
            let overlaps = joining.overlaps(&has);
            if !overlaps {
                joining.add(&has);
                behind = rest;
            }
            found = Some((numbers, joining));
            if overlaps {
                break;
            }
        }
        let (numbers, joining) = found.filter(|_| behind.len() < after_pair)?;
        Some(Self { numbers, ports: RangeSet::of(joining.ranges), behind })
    }

    /// The tests of the first or the second ones, all together.
    fn tests(&self, run: &Run, which: usize) -> Vec<Test> {
        let mut tests = run.tests.clone();
        let number = self.numbers.get(which).copied().unwrap_or_default();
        if let Some(Test::In(_, set)) = tests.get_mut(number) {
            *set = self.ports.clone();
        }
        tests
    }
}

/// The test by which two runs of the mesh's rules differ, if it is one of a port. Whichever of several such rules is met matters to no finding
/// only where they are the mesh's.
fn port_by_which(one: (usize, &Run), other: (usize, &Run), rules: &[WalkedRule]) -> Option<usize> {
    let (first, second) = (rules.get(one.0)?, rules.get(other.0)?);
    let number = differing((first, &one.1.tests), (second, &other.1.tests), None)?;
    let is_port = matches!(one.1.tests.get(number), Some(Test::In(VariedField::Port, _)));
    (first.is_own && is_port).then_some(number)
}

/// The values that a test of a run is about.
fn set_of(run: &Run, number: usize) -> Option<&RangeSet> {
    match run.tests.get(number) {
        Some(Test::In(_, set)) => Some(set),
        Some(_) | None => None,
    }
}

/// Gives the last run all ranges of the field in which its rules differ.
fn close(last: Option<&mut (usize, Run)>, varies: Option<Joining>) {
    let Some(Joining { number, ranges, .. }) = varies else { return };
    if let Some(Test::In(_, set)) = last.and_then(|(_, run)| run.tests.get_mut(number)) {
        *set = RangeSet::of(ranges);
    }
}

/// Whether no packet that meets a rule comes to the next one.
fn ends(rule: &WalkedRule) -> bool {
    matches!(
        rule.seen.statements.as_slice(),
        [Statement::Accept
            | Statement::Return
            | Statement::Drop
            | Statement::Reject
            | Statement::Redirect(Some(_))]
    )
}

/// The test by which rules that do the same differ, if it is one, of one field; once rules have been joined by a test, that one.
fn differing(
    (one, tests): (&WalkedRule, &[Test]),
    (other, other_tests): (&WalkedRule, &[Test]),
    only: Option<usize>,
) -> Option<usize> {
    let jumps = matches!(one.seen.statements.as_slice(), [Statement::Jump(_)]);
    if one.is_own != other.is_own
        || tests.len() != other_tests.len()
        || !(jumps || ends(one))
        || one.seen.statements != other.seen.statements
    {
        return None;
    }
    let differ = |number: &usize| tests.get(*number) != other_tests.get(*number);
    let mut numbers = (0..tests.len()).filter(|number| only == Some(*number) || differ(number));
    let (Some(number), None) = (numbers.next(), numbers.next()) else { return None };
    match (tests.get(number), other_tests.get(number)) {
        (Some(Test::In(field, _)), Some(Test::In(of, _))) if field == of && *field != VariedField::State => {
            Some(number)
        }
        _ => None,
    }
}
