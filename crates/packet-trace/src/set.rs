//! Sets of numbers, as ranges: every field of a packet is a number here.

use std::{
    cmp::{Ordering, max, min},
    collections::BTreeMap,
    sync::Arc,
};

/// Ranges in order, both ends included, no two of which touch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct RangeSet(Ranges);

/// Most sets are one range, and walks copy them constantly: only larger sets allocate, and their copies share that.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Ranges {
    None,
    One([(u128, u128); 1]),
    /// Two or more.
    Many(Arc<[(u128, u128)]>),
}

impl From<Vec<(u128, u128)>> for Ranges {
    fn from(ranges: Vec<(u128, u128)>) -> Self {
        match ranges.as_slice() {
            [] => Self::None,
            [one] => Self::One([*one]),
            _ => Self::Many(ranges.into()),
        }
    }
}

impl PartialOrd for RangeSet {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for RangeSet {
    fn cmp(&self, other: &Self) -> Ordering {
        self.ranges().cmp(other.ranges())
    }
}

/// The relation of one set to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SetRelation {
    Inside,
    Outside,
    Across,
}

impl RangeSet {
    pub(super) const fn empty() -> Self {
        Self(Ranges::None)
    }

    pub(super) const fn one(value: u128) -> Self {
        Self(Ranges::One([(value, value)]))
    }

    pub(super) const fn range(first: u128, last: u128) -> Self {
        if first > last { Self::empty() } else { Self(Ranges::One([(first, last)])) }
    }

    /// These values.
    pub(super) fn each<T: Into<u128>>(values: impl IntoIterator<Item = T>) -> Self {
        let values = values.into_iter().map(Into::into);
        Self::of(values.map(|value| (value, value)).collect())
    }

    pub(super) fn of(mut ranges: Vec<(u128, u128)>) -> Self {
        ranges.sort_unstable();
        ranges.dedup_by(|(first, last), (_, end)| {
            let touches = *first <= end.saturating_add(1);
            if touches {
                *end = max(*end, *last);
            }
            touches
        });
        Self(ranges.into())
    }

    pub(crate) fn ranges(&self) -> &[(u128, u128)] {
        match &self.0 {
            Ranges::None => &[],
            Ranges::One(one) => one,
            Ranges::Many(ranges) => ranges,
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        matches!(self.0, Ranges::None)
    }

    pub(super) fn first(&self) -> Option<u128> {
        self.ranges().first().map(|(first, _)| *first)
    }

    /// The one value it holds, if it holds only one.
    pub(super) fn single(&self) -> Option<u128> {
        match self.ranges() {
            [(first, last)] if first == last => Some(*first),
            _ => None,
        }
    }

    /// Its values, if they are at most so many.
    pub(super) fn few(&self, most: u128) -> Option<impl Iterator<Item = u128> + '_> {
        let sizes = self.ranges().iter().map(|(first, last)| last.saturating_sub(*first).saturating_add(1));
        let all = sizes.fold(0_u128, u128::saturating_add);
        (all <= most).then(|| self.ranges().iter().flat_map(|(first, last)| *first..=*last))
    }

    /// What is not in it, of numbers up to `most`.
    pub(super) fn complement(&self, most: u128) -> Self {
        let mut gaps = Vec::with_capacity(self.ranges().len().saturating_add(1));
        self.add_gaps_in((0, most), &mut gaps);
        Self(gaps.into())
    }

    pub(super) fn and(&self, other: &Self) -> Self {
        if let (Ranges::One([(a, b)]), Ranges::One([(c, d)])) = (&self.0, &other.0) {
            return Self::range(max(*a, *c), min(*b, *d));
        }
        // What is shared is not made again.
        if let Ranges::One([all]) = &self.0
            && other.is_within(*all)
        {
            return other.clone();
        }
        if let Ranges::One([all]) = &other.0
            && self.is_within(*all)
        {
            return self.clone();
        }
        let (mut ours, mut theirs) = (self.ranges().iter().peekable(), other.ranges().iter().peekable());
        let mut both = Vec::new();
        while let (Some((a, b)), Some((c, d))) = (ours.peek(), theirs.peek()) {
            let (first, last) = (*max(a, c), *min(b, d));
            if first <= last {
                both.push((first, last));
            }
            if b < d {
                ours.next()
            } else {
                theirs.next()
            };
        }
        Self(both.into())
    }

    pub(super) fn without(&self, other: &Self) -> Self {
        match (&self.0, &other.0) {
            (Ranges::None, _) | (_, Ranges::None) => self.clone(),
            (Ranges::One([(a, b)]), Ranges::One([(c, d)])) => {
                let below = c.checked_sub(1).map_or(Self::empty(), |last| Self::range(*a, min(*b, last)));
                let above = d.checked_add(1).map_or(Self::empty(), |first| Self::range(max(*a, first), *b));
                match (below.0, above.0) {
                    (Ranges::One([one]), Ranges::One([other])) => Self(Ranges::Many([one, other].into())),
                    (Ranges::None, rest) | (rest, _) => Self(rest),
                }
            }
            _ => {
                let most = self.ranges().len().saturating_add(other.ranges().len());
                let mut rest = Vec::with_capacity(most);
                self.ranges().iter().for_each(|range| other.add_gaps_in(*range, &mut rest));
                Self(rest.into())
            }
        }
    }

    /// Whether it has no value beside a range.
    fn is_within(&self, (first, last): (u128, u128)) -> bool {
        let ranges = self.ranges();
        ranges.first().is_none_or(|(begin, _)| first <= *begin)
            && ranges.last().is_none_or(|(_, end)| *end <= last)
    }

    /// Adds the parts of a range that it has no value of.
    fn add_gaps_in(&self, (first, last): (u128, u128), gaps: &mut Vec<(u128, u128)>) {
        let begin = self.ranges().partition_point(|(_, end)| *end < first);
        let mut next = Some(first);
        for (from, to) in self.ranges().iter().skip(begin).take_while(|(from, _)| *from <= last) {
            gaps.extend(next.filter(|next| next < from).map(|next| (next, from.saturating_sub(1))));
            next = to.checked_add(1);
        }
        gaps.extend(next.filter(|next| *next <= last).map(|next| (next, last)));
    }

    pub(super) fn or(&self, other: &Self) -> Self {
        Self::of(self.ranges().iter().chain(other.ranges()).copied().collect())
    }

    pub(super) fn contains(&self, value: u128) -> bool {
        let above = self.ranges().partition_point(|(_, last)| *last < value);
        self.ranges().get(above).is_some_and(|(first, _)| *first <= value)
    }

    /// Whether it has some value of a range.
    fn meets(&self, (first, last): (u128, u128)) -> bool {
        let at = self.ranges().partition_point(|(_, end)| *end < first);
        self.ranges().get(at).is_some_and(|(begin, _)| *begin <= last)
    }

    /// Its values by what these ranges, in order and apart, say of each; of the rest nothing is said. And how many ranges were touched.
    pub(super) fn sorted_by<T: Copy + Ord>(
        &self,
        by: &[(u128, u128, T)],
    ) -> (BTreeMap<Option<T>, Self>, usize) {
        let mut parts: BTreeMap<Option<T>, Vec<(u128, u128)>> = BTreeMap::new();
        let mut touched = 0_usize;
        for (first, last) in self.ranges() {
            let mut next = Some(*first);
            let begin = by.partition_point(|(_, end, _)| end < first);
            let met = by.iter().skip(begin).take_while(|(from, ..)| from <= last);
            for (from, to, says) in met {
                let (from, to) = (max(*from, *first), min(*to, *last));
                if let Some(gap) = next.filter(|next| *next < from) {
                    parts.entry(None).or_default().push((gap, from.saturating_sub(1)));
                }
                parts.entry(Some(*says)).or_default().push((from, to));
                (next, touched) = (to.checked_add(1), touched.saturating_add(1));
            }
            if let Some(rest) = next.filter(|next| next <= last) {
                parts.entry(None).or_default().push((rest, *last));
            }
            touched = touched.saturating_add(1);
        }
        (parts.into_iter().map(|(says, ranges)| (says, Self::of(ranges))).collect(), touched)
    }

    pub(super) fn lies_to(&self, other: &Self) -> SetRelation {
        if let Some(value) = self.single() {
            return if other.contains(value) { SetRelation::Inside } else { SetRelation::Outside };
        }
        // One range is found among many without looking at each, ...
        if let ([(first, last)], [(begin, _), .., (_, end)] | [(begin, end)]) =
            (other.ranges(), self.ranges())
        {
            return match first <= begin && end <= last {
                true => SetRelation::Inside,
                false if self.meets((*first, *last)) => SetRelation::Across,
                false => SetRelation::Outside,
            };
        }
        // ... and so are a few.
        if other.ranges().len().saturating_mul(8) < self.ranges().len() {
            let beyond = other.complement(u128::MAX);
            let meets = |set: &Self| set.ranges().iter().any(|range| self.meets(*range));
            return match (meets(other), meets(&beyond)) {
                (true, true) => SetRelation::Across,
                (true, false) => SetRelation::Inside,
                (false, _) => SetRelation::Outside,
            };
        }
        let (mut is_inside, mut is_outside, mut from) = (false, false, 0);
        for (first, last) in self.ranges() {
            let rest = other.ranges().get(from..).unwrap_or_default();
            // Mostly it is one of the next.
            let near = rest.iter().take(4).position(|(_, end)| end >= first);
            from = from.saturating_add(near.unwrap_or_else(|| rest.partition_point(|(_, end)| end < first)));
            match other.ranges().get(from) {
                Some((start, end)) if start <= first && last <= end => is_inside = true,
                Some((start, _)) if start <= last => return SetRelation::Across,
                Some(_) | None => is_outside = true,
            }
            if is_inside && is_outside {
                return SetRelation::Across;
            }
        }
        if is_inside { SetRelation::Inside } else { SetRelation::Outside }
    }
}

/// The numbers of 32 bits that have `value` in the bits of `mask`; `None` where these are too many ranges.
pub(super) fn masked(value: u32, mask: u32) -> Option<RangeSet> {
    /// Limit on free bits above a mask's lowest bit: each doubles the ranges.
    const MOST_FREE: u32 = 16;
    if value & !mask != 0 {
        return Some(RangeSet::empty());
    }
    if mask == 0 {
        return Some(RangeSet::range(0, u128::from(u32::MAX)));
    }
    let low = mask.trailing_zeros();
    // Below the lowest bit of the mask all values are contiguous.
    let below = 1_u32.checked_shl(low)?.checked_sub(1)?;
    let free = !mask & !below;
    if free.count_ones() > MOST_FREE {
        return None;
    }
    let mut ranges = Vec::new();
    // All subsets of the free bits, from the smallest.
    let mut subset = 0_u32;
    loop {
        let first = value | subset;
        ranges.push((u128::from(first), u128::from(first | below)));
        if subset == free {
            return Some(RangeSet::of(ranges));
        }
        subset = subset.wrapping_sub(free) & free;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    fn sets() -> impl Strategy<Value = RangeSet> {
        vec((0_u128..40, 0_u128..6), 0..5).prop_map(|ranges| {
            RangeSet::of(ranges.into_iter().map(|(first, more)| (first, first + more)).collect())
        })
    }

    #[test]
    fn sixteen_bits_may_be_free_above_the_lowest_of_a_mask() {
        assert_eq!(masked(1, !(0xffff << 1)).map(|set| set.ranges().len()), Some(1 << 16));
        assert_eq!(masked(1, !(0x1_ffff << 1)), None);
    }

    proptest! {
        #[test]
        fn sets_are_what_their_members_are(a in sets(), b in sets()) {
            for value in 0..60 {
                let (is_a, is_b) = (a.contains(value), b.contains(value));
                prop_assert_eq!(a.and(&b).contains(value), is_a && is_b);
                prop_assert_eq!(a.or(&b).contains(value), is_a || is_b);
                prop_assert_eq!(a.without(&b).contains(value), is_a && !is_b);
                prop_assert_eq!(a.complement(99).contains(value), !is_a);
            }
            let (both, rest) = (a.and(&b), a.without(&b));
            let lies = a.lies_to(&b);
            let expected = match (both.is_empty(), rest.is_empty()) {
                (false, true) => SetRelation::Inside,
                (true, _) => SetRelation::Outside,
                (false, false) => SetRelation::Across,
            };
            prop_assert!(a.is_empty() || lies == expected);
            prop_assert_eq!(both.or(&rest), a);
        }

        #[test]
        fn few_ranges_lie_to_many_as_each_of_their_values(few in (0_u128..400, 0_u128..40), holes in vec(0_u128..400, 0..90)) {
            let many = RangeSet::each(holes);
            let few = RangeSet::range(few.0, few.0 + few.1);
            for many in [many.clone(), many.complement(400), many.and(&few)] {
                let (both, rest) = (many.and(&few), many.without(&few));
                let expected = match (both.is_empty(), rest.is_empty()) {
                    (false, true) => SetRelation::Inside,
                    (true, _) => SetRelation::Outside,
                    (false, false) => SetRelation::Across,
                };
                prop_assert!(many.is_empty() || many.lies_to(&few) == expected);
            }
        }

        #[test]
        fn values_are_sorted_by_what_is_said_of_each(set in sets(), says in vec((0_u128..40, 0_u8..3), 0..20)) {
            let by: std::collections::BTreeMap<u128, u8> = says.into_iter().collect();
            let ranges: Vec<_> = by.iter().map(|(value, says)| (*value, *value, *says)).collect();
            let (parts, _) = set.sorted_by(&ranges);
            for value in 0..60 {
                let found: Vec<_> = parts.iter().filter(|(_, part)| part.contains(value)).collect();
                let said = found.first().map(|(says, _)| **says);
                prop_assert_eq!(found.len(), usize::from(set.contains(value)));
                prop_assert!(!set.contains(value) || said == Some(by.get(&value).copied()));
            }
        }

        #[test]
        fn masked_bits_are_found_one_by_one(value in any::<u32>(), mask in any::<u32>(), probes in vec(any::<u32>(), 20)) {
            let value = value & mask;
            let Some(set) = masked(value, mask) else { return Ok(()) };
            for probe in probes {
                for probe in [probe, probe & !mask | value] {
                    prop_assert_eq!(set.contains(u128::from(probe)), probe & mask == value);
                }
            }
        }
    }
}
