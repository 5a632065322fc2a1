//! Recorded rules that this project writes otherwise, because packets pass beside the reference's: the named rewrites of
//! `fixtures/divergences.json`, regular expressions over lines of iptables-save and nft.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;
use serde::Deserialize;

/// Where a recorded line was printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Printed {
    /// By iptables-save.
    V4,
    /// By ip6tables-save.
    V6,
    /// By nft.
    Nft,
}

/// All rewrites.
#[derive(Clone, Debug)]
pub struct Rewrites(Vec<(Written, Regex)>);

#[derive(Deserialize)]
struct Divergences {
    rewrites: Vec<Written>,
}

/// A rewrite as it is written.
#[derive(Clone, Debug, Deserialize)]
struct Written {
    r#in: Vec<Printed>,
    chain: String,
    from: String,
    to: String,
}

impl Rewrites {
    /// Those of the recordings; what is wrong with them otherwise. Compiling them takes longer than most comparisons.
    pub fn named() -> Result<&'static Self, String> {
        static NAMED: LazyLock<Result<Rewrites, String>> =
            LazyLock::new(|| Rewrites::read(include_str!("../../../e2e/fixtures/divergences.json")));
        NAMED.as_ref().map_err(Clone::clone)
    }

    /// Those in the text of `divergences.json`; what is wrong with it otherwise.
    fn read(divergences: &str) -> Result<Self, String> {
        let divergences: Divergences =
            serde_json::from_str(divergences).map_err(|error| error.to_string())?;
        // Groups and line ends are written as in Python.
        let groups = Regex::new(r"\\([0-9])").map_err(|error| error.to_string())?;
        let read = |mut written: Written| {
            written.to = groups.replace_all(&written.to, "$${$1}").replace(r"\n", "\n");
            let from = Regex::new(&written.from).map_err(|error| error.to_string())?;
            Ok((written, from))
        };
        divergences.rewrites.into_iter().map(read).collect::<Result<_, _>>().map(Self)
    }

    /// What stands in the place of a recorded line of a chain; the chain's name may have more around it.
    pub fn of(&self, printed: Printed, chain: &str, line: &str) -> Vec<String> {
        let mut lines = vec![line.to_owned()];
        for (written, from) in &self.0 {
            if chain.contains(&written.chain) && written.r#in.contains(&printed) {
                let rewritten = lines.iter().map(|line| from.replace(line, &written.to));
                lines =
                    rewritten.flat_map(|line| line.lines().map(str::to_owned).collect::<Vec<_>>()).collect();
            }
        }
        lines
    }
}

/// A line of nft without what its counter had counted.
pub fn without_counts(line: &str) -> Cow<'_, str> {
    static COUNTED: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(" packets [0-9]+ bytes [0-9]+").expect("a regular expression"));
    COUNTED.replace(line, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIVERGENCES: &str = r#"{"rewrites": [
        {"in": ["v4", "v6"], "chain": "IN", "from": "^-A IN( --dport \\S+)? -j X$", "to": "-A IN\\1 -j Y"},
        {"in": ["nft"], "chain": "in", "from": "^(a) b$", "to": "\\1 c\\n\\1 d"}
    ]}"#;

    #[test]
    fn lines_are_rewritten_where_the_rewrite_belongs() {
        let rewrites = Rewrites::read(DIVERGENCES).expect("is read");
        let of = |printed, chain, line| rewrites.of(printed, chain, line);
        assert_eq!(of(Printed::V6, "IN", "-A IN --dport 80 -j X"), ["-A IN --dport 80 -j Y"]);
        assert_eq!(of(Printed::V4, "IN", "-A IN -j X"), ["-A IN -j Y"]);
        assert_eq!(of(Printed::V4, "OUT", "-A IN -j X"), ["-A IN -j X"]);
        assert_eq!(of(Printed::Nft, "table inet x / chain in", "a b"), ["a c", "a d"]);
        assert_eq!(of(Printed::V4, "in", "a b"), ["a b"]);
    }

    #[test]
    fn a_rewrite_that_cannot_be_read_is_an_error() {
        assert!(Rewrites::read("{}").is_err());
        assert!(
            Rewrites::read(r#"{"rewrites": [{"in": ["v4"], "chain": "x", "from": "(", "to": ""}]}"#).is_err()
        );
    }
}
