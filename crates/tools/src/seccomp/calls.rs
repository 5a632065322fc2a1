//! Lists of system calls. A line is a call, an optional condition, and its reason:
//!
//! ```text
//! accept4                        seen
//! socket[0 = 1|2]                seen
//! clone[0 & 0x7e020000 = 0]      seen
//! clone3 -> 38                   cannot be looked into; libraries go back to clone
//! open                           what musl calls where glibc calls openat
//! ```
//!
//! The word `seen` is for what `seccomp compare` sees.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};

/// What an argument must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Condition {
    /// One of these.
    OneOf(Vec<u64>),
    /// None of these bits set.
    Without(u64),
}

/// A call of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: String,
    /// Of the argument with this index, from 0.
    pub(crate) condition: Option<(u8, Condition)>,
    /// It is answered with this error instead of being let through.
    pub(crate) errno: Option<u16>,
    is_seen: bool,
}

/// A list of system calls.
#[derive(Debug)]
pub(crate) struct Calls {
    pub(crate) all: Vec<Call>,
}

impl Calls {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut all: Vec<Call> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let call = Call::parse(line).with_context(|| format!("line {}: {line}", index + 1))?;
            if let Some(before) = all.last() {
                ensure!(
                    before.name < call.name,
                    "line {}: {} comes after {}",
                    index + 1,
                    call.name,
                    before.name
                );
            }
            all.push(call);
        }
        Ok(Self { all })
    }

    /// What was seen and is not listed, or is listed as seen and was not.
    pub(crate) fn differences(&self, seen: &BTreeSet<String>) -> Vec<String> {
        let listed = |name: &String| self.all.iter().any(|call| call.name == *name);
        let missing =
            seen.iter().filter(|name| !listed(name)).map(|name| format!("{name} was seen and is not listed"));
        let stale = self.all.iter().filter(|call| call.is_seen && !seen.contains(&call.name));
        missing
            .chain(
                stale.map(|call| format!("{} was not seen; say why it is listed, or take it out", call.name)),
            )
            .collect()
    }
}

impl Call {
    fn parse(line: &str) -> Result<Self> {
        let (head, rest) = line.split_at(line.find([' ', '[']).context("it does not say why")?);
        let (condition, rest) = match rest.strip_prefix('[') {
            Some(rest) => {
                let (inside, rest) = rest.split_once(']').context("a bracket is open")?;
                (Some(parse_condition(inside)?), rest)
            }
            None => (None, rest),
        };
        let (errno, why) = match rest.trim().strip_prefix("-> ") {
            Some(rest) => {
                let (errno, why) = rest.split_once(' ').context("it does not say why")?;
                (Some(errno.parse().context("no error number")?), why)
            }
            None => (None, rest),
        };
        let why = why.trim();
        ensure!(!why.is_empty(), "it does not say why");
        let is_name = !head.is_empty()
            && head.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        ensure!(is_name, "{head} is not a system call");
        let is_seen = why.split(|letter: char| !letter.is_ascii_alphabetic()).next() == Some("seen");
        Ok(Self { name: head.to_owned(), condition, errno, is_seen })
    }
}

fn parse_condition(text: &str) -> Result<(u8, Condition)> {
    let (what, values) = text.split_once('=').context("a condition has a =")?;
    if let Some((index, mask)) = what.split_once('&') {
        ensure!(number(values)? == 0, "bits can be asked to be 0 only");
        return Ok((parse_index(index)?, Condition::Without(number(mask)?)));
    }
    let values = values.split('|').map(number).collect::<Result<_>>()?;
    Ok((parse_index(what)?, Condition::OneOf(values)))
}

fn parse_index(text: &str) -> Result<u8> {
    match text.trim().parse() {
        Ok(index @ 0..=5) => Ok(index),
        Ok(_) | Err(_) => bail!("{} is not an index of an argument", text.trim()),
    }
}

fn number(text: &str) -> Result<u64> {
    let text = text.trim();
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.with_context(|| format!("{text} is not a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# why\naccept4   seen\nclone[0 & 0x7e = 0] seen\nclone3 -> 38 libraries go back\nopen musl\nsocket[0 = 1|16] seen, by netlink\n";

    #[test]
    fn a_list_is_read() {
        let calls = Calls::parse(LIST).expect("a list").all;
        let is = |index: usize| calls.get(index).cloned().expect("a call");
        assert_eq!(is(1).condition, Some((0, Condition::Without(0x7e))));
        assert_eq!((is(2).errno, is(2).is_seen), (Some(38), false));
        assert_eq!(is(4).condition, Some((0, Condition::OneOf(vec![1, 16]))));
        assert!(is(4).is_seen && !is(3).is_seen && is(0).is_seen);
    }

    #[test]
    fn what_is_unclear_is_refused() {
        for line in [
            "read",
            "read[0 = 1 seen",
            "read[7 = 1] seen",
            "read[0 = x] seen",
            "read[0 & 1 = 1] seen",
            "Read seen",
            "write seen\nread seen",
            "read -> x y",
        ] {
            assert!(Calls::parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn both_differences_are_told() {
        let seen = ["accept4", "clone", "ptrace"].map(str::to_owned).into();
        let told = Calls::parse(LIST).expect("a list").differences(&seen);
        assert!(
            told.len() == 2
                && told[0].starts_with("ptrace was seen")
                && told[1].starts_with("socket was not"),
            "{told:?}"
        );
    }
}
