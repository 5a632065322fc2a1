//! Which settings are behind a rule that is in force: those of the planned rule that means the same, or of several, if one rule with a
//! set stands for them.

use super::Test;
use crate::Origin;
use alloc::{format, string::String, vec::Vec};
use netfilter_state::ruleset::{SeenRule, Statement};
use redirect_core::{plan::PlannedRule, values::Family};

/// The rules that a plan has for a chain, by what they mean.
#[derive(Default)]
pub(super) struct Planned(Vec<(Meaning, Origin)>);

impl Planned {
    pub(super) fn of(candidates: &[&PlannedRule], family: Family) -> Self {
        let meaning = |planned: &&PlannedRule| {
            (Meaning::of(&SeenRule::from(planned.rule()), family), Origin::of(planned))
        };
        let mut all: Vec<(Meaning, Origin)> = candidates.iter().map(meaning).collect();
        // Of equal ones the first counts: the sort is stable.
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        Self(all)
    }

    /// The planned rules that a rule equals, or stands for.
    pub(super) fn origins(&self, seen: &SeenRule, family: Family) -> Vec<(Option<Test>, Origin)> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let of = Meaning::of(seen, family);
        let first = self.0.partition_point(|(meaning, _)| *meaning < of);
        if let Some((_, origin)) = self.0.get(first).filter(|(meaning, _)| *meaning == of) {
            return [(None, *origin)].into();
        }
        let stands_for = |(meaning, origin): &(Meaning, Origin)| Some((Some(of.extends(meaning)?), *origin));
        self.0.iter().filter_map(stands_for).collect()
    }
}

/// What a rule means, however it is written.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Meaning {
    tests: Vec<Test>,
    acts: Vec<String>,
}

impl Meaning {
    fn of(seen: &SeenRule, family: Family) -> Self {
        let tests = seen.conditions.iter().map(|condition| Test::of(condition, family));
        let mut tests: Vec<Test> = tests.filter(|test| *test != Test::Always(true)).collect();
        tests.sort();
        tests.dedup();
        let mut acts: Vec<String> = Vec::new();
        for statement in &seen.statements {
            if let Statement::Jump(to) | Statement::Goto(to) = statement {
                acts.push(to.to_ascii_uppercase().replace('-', "_"));
            } else if let Statement::Tproxy { port, .. } = statement {
                // In native tables the mark and the end are statements of their own.
                acts.push(format!("tproxy {port:?}"));
                break;
            } else {
                acts.push(format!("{statement:?}"));
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
