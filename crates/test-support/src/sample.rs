//! How much of a list a test takes: all of it, or a part that is the same every time.
//!
//! `make test` takes parts where a whole proves the same of more cases; with `SAMPLES=all`, as in `make test-all`, tests take the whole.
//! `RECORDINGS_EVERY=N` takes every Nth of all that, for machines on which the rest would take hours, and makes crowds that much smaller.

use std::env;
use std::str::FromStr;

/// All recordings; where RECORDINGS_EVERY is a number, every one of that number, which is said on standard output.
///
/// # Panics
/// RECORDINGS_EVERY is not a number, or 0.
#[allow(clippy::print_stdout, reason = "the reader of a test's log has to know")]
pub fn of<T>(recordings: Vec<T>) -> Vec<T> {
    let Some(number) = every() else { return recordings };
    let all = recordings.len();
    let sample: Vec<T> = recordings.into_iter().step_by(number).collect();
    println!("RECORDINGS_EVERY={number}: {} of {all} recordings", sample.len());
    sample
}

fn every() -> Option<usize> {
    let every = env::var_os("RECORDINGS_EVERY")?;
    let number = every.to_str().and_then(|every| every.parse().ok()).filter(|every| *every > 0);
    Some(number.unwrap_or_else(|| panic!("RECORDINGS_EVERY is {every:?}, and no number")))
}

/// The size of a crowd: `all`, or with RECORDINGS_EVERY the same part of it as of recordings.
///
/// # Panics
/// RECORDINGS_EVERY is not a number, or 0.
pub fn crowd(all: usize) -> usize {
    every().map_or(all, |every| all.div_ceil(every))
}

/// Every one of `every` recordings, from the one at `first` on: tests that each take others meet all of them together.
pub fn part<T>(recordings: Vec<T>, every: usize, first: usize) -> Vec<T> {
    if is_whole() {
        return of(recordings);
    }
    of(recordings.into_iter().skip(first).step_by(every).collect())
}

/// How often something is repeated: `few` times, or `all`.
pub fn times(few: usize, all: usize) -> usize {
    if is_whole() { all } else { few }
}

/// How much an environment variable asks for, and what is usual without it.
///
/// # Panics
/// It is not such a number.
pub fn number<N: FromStr>(variable: &str, usual: N) -> N {
    env::var(variable).map_or(usual, |text| {
        text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, and no such number"))
    })
}

/// Whether the whole is asked for.
///
/// # Panics
/// SAMPLES is set to something other than `all`.
pub fn is_whole() -> bool {
    match env::var_os("SAMPLES") {
        None => false,
        Some(all) if all == "all" => true,
        Some(other) => panic!("SAMPLES is {other:?}, and can only be all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_together_are_the_whole() {
        let list = || (0..10).collect::<Vec<_>>();
        let mut all: Vec<i32> = (0..3).flat_map(|first| part(list(), 3, first)).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all, list());
        if !is_whole() {
            assert_eq!((part(list(), 3, 1), times(2, 9)), (vec![1, 4, 7], 2));
        }
    }
}
