//! Which settings are behind a rule that is in force: those of the planned rule that means the same, or of several, if one rule with a
//! set stands for them.

use super::{Test, WalkedRule};
use crate::RuleOrigin;
use netfilter_state::ruleset::{KernelRule, Statement};
use redirect_core::{rule::Protocol, values::Family};

/// For how many rules of a chain all of the plan's are compared, to find those that they stand for. One for each list of the settings is needed; a pod that
/// fills a chain with rules for all ports would cost the product of both, in time and in memory. What is beyond counts as another program's.
const MOST_COMPARED: usize = 32;

/// The rules that a plan has for a chain, in its order.
pub(super) struct Planned<'a> {
    rules: &'a [WalkedRule],
    /// The number of each, by what it means: once one is asked that is not written as in the plan.
    meanings: Option<Vec<(Meaning, usize)>>,
    /// The number of the last that was found.
    last: usize,
    /// For how many rules all of them were compared.
    compared: usize,
}

impl<'a> Planned<'a> {
    pub(super) const fn of(rules: &'a [WalkedRule]) -> Self {
        Self { rules, meanings: None, last: 0, compared: 0 }
    }

    /// The planned rules that the next rule of the chain equals, or stands for; and whether it is in their place, not before another that
    /// was found already.
    pub(super) fn find(
        &mut self,
        seen: &KernelRule,
        family: Family,
    ) -> (Vec<(Option<Test>, RuleOrigin)>, bool) {
        let is_written = |planned: &&WalkedRule| {
            let rule = &planned.seen;
            rule.statements == seen.statements
                && rule.conditions.len() == seen.conditions.len()
                && rule.conditions.iter().all(|one| seen.conditions.contains(one))
        };
        // Usually it is the next one.
        for number in [self.last, self.last.saturating_add(1)] {
            if let Some(planned) = self.rules.get(number).filter(is_written) {
                self.last = number;
                return (planned.origins.clone(), true);
            }
        }
        let found: Vec<(Option<Test>, usize)> = self.meaning(&Meaning::of(seen, family), family);
        let first = found.iter().map(|(_, number)| *number).min();
        let is_in_place = first.is_some_and(|first| first >= self.last);
        if is_in_place {
            self.last = first.unwrap_or(self.last);
        }
        let origin = |(test, number): (Option<Test>, usize)| {
            let (_, origin) = self.rules.get(number)?.origins.first()?;
            Some((test, *origin))
        };
        (found.into_iter().filter_map(origin).collect(), is_in_place)
    }

    fn meaning(&mut self, of: &Meaning, family: Family) -> Vec<(Option<Test>, usize)> {
        let meanings = self.meanings.get_or_insert_with(|| {
            let numbered = self.rules.iter().enumerate();
            let mut all: Vec<_> = numbered
                .flat_map(|(number, rule)| {
                    Meaning::in_either_form(&rule.seen, family).map(move |meaning| (meaning, number))
                })
                .collect();
            all.sort_by(|(one, _), (other, _)| one.tests.cmp(&other.tests));
            all
        });
        let begin = meanings.partition_point(|(meaning, _)| meaning.tests < of.tests);
        let alike = meanings.iter().skip(begin).take_while(|(meaning, _)| meaning.tests == of.tests);
        let mut equal = alike.filter(|(meaning, _)| meaning.acts == of.acts).peekable();
        if let Some((_, first)) = equal.peek() {
            // Of equal ones the next; behind the last of them, the first.
            let next = equal.find(|(_, number)| *number >= self.last).map_or(*first, |(_, number)| *number);
            return [(None, next)].into();
        }
        self.compared = self.compared.saturating_add(1);
        if self.compared > MOST_COMPARED {
            return Vec::new();
        }
        let stands_for = |(meaning, number): &(Meaning, usize)| Some((Some(of.extends(meaning)?), *number));
        let mut all: Vec<_> = meanings.iter().filter_map(stands_for).collect();
        all.sort_by_key(|(_, number)| *number);
        all
    }
}

/// What a rule means, however it is written.
#[derive(Clone, PartialEq)]
struct Meaning {
    tests: Vec<Test>,
    acts: Vec<Act>,
}

/// What a statement means.
#[derive(Clone, PartialEq)]
enum Act {
    /// To the chain of this name, as iptables writes it.
    GoesTo(String),
    /// In native tables the mark and the end are statements of their own.
    Tproxy(Option<u16>),
    Does(Statement),
}

impl Meaning {
    /// What a rule of a plan means; and what it does in native tables, where one about packets of no connection is about TCP alone.
    fn in_either_form(seen: &KernelRule, family: Family) -> impl Iterator<Item = Self> {
        let one = Self::of(seen, family);
        let native = (one.tests == [Test::of_no_connection()]).then(|| {
            let tests = [Test::of_protocol(Protocol::Tcp)].into_iter().chain(one.tests.clone());
            Self { tests: tests.collect(), acts: one.acts.clone() }
        });
        [Some(one), native].into_iter().flatten()
    }

    fn of(seen: &KernelRule, family: Family) -> Self {
        let tests = seen.conditions.iter().map(|condition| Test::of(condition, family));
        let mut tests: Vec<Test> = tests.filter(|test| *test != Test::Always(true)).collect();
        Test::join_states(&mut tests);
        tests.sort();
        tests.dedup();
        let mut acts = Vec::new();
        for statement in &seen.statements {
            if let Statement::Jump(to) | Statement::Goto(to) = statement {
                acts.push(Act::GoesTo(to.to_ascii_uppercase().replace('-', "_")));
            } else if let Statement::Tproxy { port, .. } = statement {
                acts.push(Act::Tproxy(*port));
                break;
            } else {
                acts.push(Act::Does(statement.clone()));
            }
        }
        Self { tests, acts }
    }

    /// The test of `one` that this rule also covers, as a rule that stands for several that differ in one test; `None` if it
    /// does not cover it.
    fn extends(&self, one: &Self) -> Option<Test> {
        let mut others = one.tests.iter().filter(|test| !self.tests.contains(test));
        let mut ours = self.tests.iter().filter(|test| !one.tests.contains(test));
        let (Some(narrow), None, Some(wide), None) = (others.next(), others.next(), ours.next(), ours.next())
        else {
            return None;
        };
        let (Test::In(field, narrow_set), Test::In(wide_field, wide_set)) = (narrow, wide) else {
            return None;
        };
        let is_within = field == wide_field && narrow_set.without(wide_set).is_empty();
        (is_within && self.acts == one.acts).then(|| narrow.clone())
    }
}
