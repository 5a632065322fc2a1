//! Rules that are asked at once.

use super::{Test, WalkedRule, cost};
use crate::{packets::Field, set::Set};
use alloc::vec::Vec;
use netfilter_state::ruleset::Statement;

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
    for (first, run) in runs {
        if let Some(rule) = rules.get_mut(first).filter(|_| run.count > 1) {
            rule.cost = cost(&run.tests);
            rule.run = Some(run);
        }
    }
}

fn joined(runs: Vec<(usize, Run)>, rules: &[WalkedRule]) -> Vec<(usize, Run)> {
    let mut all: Vec<(usize, Run)> = Vec::with_capacity(runs.len());
    // The test by which those that are being joined differ, and the ranges of its field.
    let mut varies: Option<(usize, Vec<(u128, u128)>)> = None;
    for (first, run) in runs {
        let joins = all.last().and_then(|(last, known)| {
            let (one, other) = (rules.get(*last)?, rules.get(first)?);
            let number = differing(
                (one, &known.tests),
                (other, &run.tests),
                varies.as_ref().map(|(number, _)| *number),
            )?;
            let (Some(Test::In(_, had)), Some(Test::In(_, has))) =
                (known.tests.get(number), run.tests.get(number))
            else {
                return None;
            };
            let ranges = varies.as_ref().map_or_else(|| had.ranges(), |(_, ranges)| ranges);
            // What comes back from a chain would meet the next of them, too, if their values overlapped.
            let is_behind = ranges.last().map(|(_, last)| *last) < has.first();
            (ends(one) || is_behind).then(|| (number, ranges.iter().chain(has.ranges()).copied().collect()))
        });
        match (joins, all.last_mut()) {
            (Some(now), Some((_, known))) => {
                known.count = known.count.saturating_add(run.count);
                varies = Some(now);
            }
            (None, _) | (_, None) => {
                close(&mut all, varies.take());
                all.push((first, run));
            }
        }
    }
    close(&mut all, varies);
    all
}

/// Gives the last run all ranges of the field in which its rules differ.
fn close(runs: &mut [(usize, Run)], varies: Option<(usize, Vec<(u128, u128)>)>) {
    let Some((number, ranges)) = varies else { return };
    if let Some(Test::In(_, set)) = runs.last_mut().and_then(|(_, run)| run.tests.get_mut(number)) {
        *set = Set::of(ranges);
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
            | Statement::Redirect(_)]
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
        (Some(Test::In(field, _)), Some(Test::In(of, _))) if field == of && *field != Field::State => {
            Some(number)
        }
        _ => None,
    }
}
