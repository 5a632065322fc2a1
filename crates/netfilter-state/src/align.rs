//! Two lists of rules side by side.

use std::fmt;

/// A rule of a chain that is not as wanted. Rules are numbered from 1, those found and those wanted each by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "difference"))]
pub enum DifferingRule<T> {
    /// This rule is missing.
    #[cfg_attr(feature = "serde", serde(rename = "missingRule"))]
    Missing {
        /// Its number.
        number: usize,
        /// The rule.
        wanted: T,
    },
    /// This rule should not be there.
    #[cfg_attr(feature = "serde", serde(rename = "strayRule"))]
    Stray {
        /// Its number.
        number: usize,
        /// The rule.
        found: T,
    },
    /// Another rule is in its place.
    #[cfg_attr(feature = "serde", serde(rename = "otherRule"))]
    Other {
        /// Its number.
        number: usize,
        /// The rule wanted.
        wanted: T,
        /// The rule found.
        found: T,
    },
}

impl<T> DifferingRule<T> {
    /// The same about what is made of each rule.
    pub(crate) fn map<U>(self, of: impl Fn(T) -> U) -> DifferingRule<U> {
        match self {
            Self::Missing { number, wanted } => DifferingRule::Missing { number, wanted: of(wanted) },
            Self::Stray { number, found } => DifferingRule::Stray { number, found: of(found) },
            Self::Other { number, wanted, found } => {
                DifferingRule::Other { number, wanted: of(wanted), found: of(found) }
            }
        }
    }
}

impl<T: fmt::Display> fmt::Display for DifferingRule<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { number, wanted } => write!(f, "rule {number} is missing: {wanted}"),
            Self::Stray { number, found } => write!(f, "unexpected rule {number}: {found}"),
            Self::Other { number, wanted, found } => write!(f, "rule {number} is {found}, not {wanted}"),
        }
    }
}

/// How far ahead a rule is looked for that has moved.
const FARTHEST: usize = 1000;

/// Where two lists of rules differ. Where one list has rules that the other lacks, the first of them is reported against what
/// stands in its place, the rest as missing or stray.
pub(crate) fn align<T: Copy>(
    wanted: &[T],
    found: &[T],
    same: impl Fn(T, T) -> bool,
) -> Vec<DifferingRule<T>> {
    let (mut missing, mut stray) = (0, 0);
    let mut differing = Vec::new();
    loop {
        let (rest_wanted, rest_found) =
            (wanted.get(missing..).unwrap_or_default(), found.get(stray..).unwrap_or_default());
        let number = |index: usize| index.saturating_add(1);
        let (skip_wanted, skip_found) = match (rest_wanted, rest_found) {
            ([], []) => return differing,
            ([one, ..], [two, ..]) if same(*one, *two) => {
                missing = number(missing);
                stray = number(stray);
                continue;
            }
            ([one, ..], [two, ..]) => {
                differing.push(DifferingRule::Other { number: number(missing), wanted: *one, found: *two });
                let ahead = |list: &[T], of: &dyn Fn(T) -> bool| {
                    list.iter().take(FARTHEST).position(|candidate| of(*candidate))
                };
                match (
                    ahead(rest_wanted, &|candidate| same(candidate, *two)),
                    ahead(rest_found, &|candidate| same(*one, candidate)),
                ) {
                    (Some(wanted), None) => (wanted, 0),
                    (None, Some(found)) => (0, found),
                    (Some(wanted), Some(found)) if wanted <= found => (wanted, 0),
                    (Some(_), Some(found)) => (0, found),
                    (None, None) => (1, 1),
                }
            }
            ([..], []) => (rest_wanted.len(), 0),
            ([], [..]) => (0, rest_found.len()),
        };
        // One of each is reported already where both lists go on.
        let told = usize::from(!rest_wanted.is_empty() && !rest_found.is_empty());
        let numbered = |start: usize| number(start.saturating_add(told))..;
        let lacking = rest_wanted.iter().take(skip_wanted).skip(told);
        differing.extend(
            numbered(missing)
                .zip(lacking)
                .map(|(number, wanted)| DifferingRule::Missing { number, wanted: *wanted }),
        );
        let extra = rest_found.iter().take(skip_found).skip(told);
        differing.extend(
            numbered(stray).zip(extra).map(|(number, found)| DifferingRule::Stray { number, found: *found }),
        );
        missing = missing.saturating_add(skip_wanted);
        stray = stray.saturating_add(skip_found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(wanted: &str, found: &str) -> Vec<String> {
        let letters = |text: &str| text.chars().collect::<Vec<char>>();
        let differing = align(&letters(wanted), &letters(found), |one, two| one == two);
        let words = differing.into_iter().map(|one| match one {
            DifferingRule::Missing { number, wanted } => format!("{number}-{wanted}"),
            DifferingRule::Stray { number, found } => format!("{number}+{found}"),
            DifferingRule::Other { number, wanted, found } => format!("{number}{wanted}/{found}"),
        });
        words.collect()
    }

    #[test]
    fn every_rule_that_differs_is_told_once() {
        for (wanted, found, all) in [
            ("", "", &[][..]),
            ("abc", "abc", &[]),
            ("abc", "", &["1-a", "2-b", "3-c"]),
            ("", "ab", &["1+a", "2+b"]),
            ("abc", "ab", &["3-c"]),
            ("ab", "abc", &["3+c"]),
            // One that lacks is reported against what stands in its place.
            ("abc", "ac", &["2b/c"]),
            ("abcd", "ad", &["2b/d", "3-c"]),
            ("ac", "abc", &["2c/b"]),
            ("ad", "abcd", &["2d/b", "3+c"]),
            ("abc", "axc", &["2b/x"]),
            ("abc", "xbz", &["1a/x", "3c/z"]),
            ("abcdef", "bcxef", &["1a/b", "4d/x"]),
            // Of two that have moved, the one that is nearer where it belongs is met again.
            ("ab", "ba", &["1a/b", "2+a"]),
            ("cabd", "abcd", &["1c/a", "4d/c"]),
            ("abcd", "cabd", &["1a/c", "3c/d"]),
        ] {
            assert_eq!(told(wanted, found), all, "{wanted} {found}");
        }
    }
}
