//! The marks by which rules distinguish packets: a process that may set marks can choose any of them.

use super::{super::packets::VariedField, Answers, Next, RangeSet, Test, WalkedRule};
use std::collections::{BTreeMap, BTreeSet};

/// How many marks are made of the bits that several conditions ask for.
const MOST_JOINED: usize = 128;

/// The values that conditions ask for, by the bits that they ask.
#[derive(Default)]
pub(super) struct Marks(BTreeMap<u32, BTreeSet<u32>>);

impl Marks {
    pub(super) fn add(&mut self, test: &Test) {
        if let Test::Bits(VariedField::Mark | VariedField::ConnMark, value, mask, _) = test {
            self.0.entry(*mask).or_default().insert(value & mask);
        }
        if let Test::Mark(VariedField::Mark | VariedField::ConnMark, set, _) = test {
            let ends = set.ranges().iter().flat_map(|(first, last)| [*first, *last, last.saturating_add(1)]);
            self.0.entry(u32::MAX).or_default().extend(ends.filter_map(|end| u32::try_from(end).ok()));
        }
    }

    /// For each condition marks that fulfil it and that do not, and what several make together; all but none.
    pub(super) fn into_set(self) -> RangeSet {
        let mut marks = BTreeSet::from([0]);
        for (mask, mut values) in self.0 {
            values.extend(another(mask, &values));
            for value in values {
                let room = MOST_JOINED.saturating_sub(marks.len()).max(1);
                let joined: Vec<u32> = marks.iter().take(room).map(|mark| mark & !mask | value).collect();
                marks.extend(joined);
            }
        }
        marks.remove(&0);
        RangeSet::each(marks)
    }
}

/// Some of these bits, other than those and not none.
fn another(mask: u32, than: &BTreeSet<u32>) -> Option<u32> {
    let next = |bits: &u32| Some(bits.wrapping_sub(mask) & mask).filter(|next| *next != 0);
    std::iter::successors(next(&0), next).find(|bits| !than.contains(bits))
}

impl WalkedRule {
    /// Its conditions, and those among its statements.
    pub(super) fn each_test(&self, take: &mut impl FnMut(&Test)) {
        self.tests.iter().for_each(|test| test.each(take));
        for (_, leads) in &self.leads {
            match leads {
                Next::If(test) => test.each(take),
                Next::By(Answers::Each(elements)) => {
                    elements.iter().for_each(|element| element.test.each(take));
                }
                Next::By(Answers::OfField(..)) | Next::To(_) => {}
            }
        }
    }
}

impl Test {
    fn each(&self, take: &mut impl FnMut(&Self)) {
        if let Self::AnyOf(alternatives, _) = self {
            alternatives.iter().flatten().for_each(|test| test.each(take));
        } else {
            take(self);
        }
    }
}
