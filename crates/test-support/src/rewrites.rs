//! Recorded rules that this project writes otherwise, because packets pass beside the reference's: the named rewrites of
//! `fixtures/divergences.json`, regular expressions over lines of iptables-save and nft.

use regex::Regex;
use serde_json::Value;

/// Where a recorded line was printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Printed {
    /// By iptables-save.
    V4,
    /// By ip6tables-save.
    V6,
    /// By nft.
    Nft,
}

impl Printed {
    const fn word(self) -> &'static str {
        match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
            Self::Nft => "nft",
        }
    }
}

/// All rewrites.
#[derive(Clone, Debug)]
pub struct Rewrites(Vec<Rewrite>);

#[derive(Clone, Debug)]
struct Rewrite {
    printed: Vec<String>,
    chain: String,
    from: Regex,
    to: String,
}

impl Rewrites {
    /// Those in the text of `divergences.json`; what is wrong with it otherwise.
    pub fn read(divergences: &str) -> Result<Self, String> {
        let all: Value = serde_json::from_str(divergences).map_err(|error| error.to_string())?;
        let list = all["rewrites"].as_array().ok_or("no rewrites")?;
        list.iter()
            .map(|rewrite| Rewrite::read(rewrite).ok_or_else(|| rewrite.to_string()))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// What stands in the place of a recorded line of a chain; the chain's name may have more around it.
    pub fn of(&self, printed: Printed, chain: &str, line: &str) -> Vec<String> {
        let mut lines = vec![line.to_owned()];
        for rewrite in &self.0 {
            if chain.contains(&rewrite.chain) && rewrite.printed.iter().any(|word| word == printed.word()) {
                lines = lines.iter().flat_map(|line| rewrite.of(line)).collect();
            }
        }
        lines
    }
}

impl Rewrite {
    fn read(rewrite: &Value) -> Option<Self> {
        let text = |key: &str| rewrite[key].as_str();
        let printed = rewrite["in"].as_array()?.iter().map(|word| word.as_str().map(str::to_owned));
        // Groups and line ends are written as in Python.
        let groups = Regex::new(r"\\([0-9])").ok()?;
        Some(Self {
            printed: printed.collect::<Option<_>>()?,
            chain: text("chain")?.to_owned(),
            from: Regex::new(text("from")?).ok()?,
            to: groups.replace_all(text("to")?, "$${$1}").replace(r"\n", "\n"),
        })
    }

    fn of(&self, line: &str) -> Vec<String> {
        self.from.replace(line, &self.to).lines().map(str::to_owned).collect()
    }
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
