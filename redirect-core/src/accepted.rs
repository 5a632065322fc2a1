//! Rules of other programs whose effect on capture is meant: by whom they are named, and how.
//!
//! A list of names is text, such as an annotation of a pod, with a name in each of its parts, which semicolons separate:
//! `comment=proxy for backups; chain=nat/BACKUP; table=vpn`. A name is about a whole comment, chain or table, never about a part
//! of one, and never about what several programs share, so that no list can accept everything.

use crate::{
    plan::DataPlane,
    rule::{Chain, Hook},
};
use alloc::{borrow::ToOwned, string::String, vec::Vec};
use core::fmt;

/// The tables of iptables, which any program may use.
const TABLES: [&str; 5] = ["raw", "mangle", "nat", "filter", "security"];
/// The most names of a list.
const MOST_NAMES: usize = 16;
/// The most bytes of a name: what iptables keeps of a comment.
const LONGEST_NAME: usize = 255;

/// Names a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleName {
    /// It has this comment.
    Comment(String),
    /// It is in a chain of this name.
    Chain {
        /// The table of the chain; of any table without one.
        table: Option<String>,
        /// The chain.
        chain: String,
    },
    /// It is in a table of this name.
    Table(String),
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Comment(text) => write!(f, "comment={text}"),
            Self::Chain { table: Some(table), chain } => write!(f, "chain={table}/{chain}"),
            Self::Chain { table: None, chain } => write!(f, "chain={chain}"),
            Self::Table(table) => write!(f, "table={table}"),
        }
    }
}

/// Who accepts the effect of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum AcceptedBy {
    /// The node's operator.
    Node,
    /// The pod's owner, by annotation.
    Pod,
    /// The project: the rule is one of those that KubeVirt makes for a virtual machine in a mesh.
    KubeVirt,
}

impl AcceptedBy {
    /// The word for it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Pod => "pod",
            Self::KubeVirt => "kubevirt",
        }
    }
}

impl fmt::Display for AcceptedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Node => "the node's setting ACCEPTED_RULES",
            Self::Pod => "the pod's annotation cni.istio.io/acceptedRules",
            Self::KubeVirt => "being KubeVirt's",
        })
    }
}

/// What is wrong with a list of names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptedProblem {
    /// It is longer than is read.
    #[error("is longer than {} bytes", AcceptedRules::LONGEST_LIST)]
    TooLong,
    /// It has more names than are read.
    #[error("names more than {MOST_NAMES} rules")]
    TooMany,
    /// A part of it has another form than the three.
    #[error("{0:?} is not comment=TEXT, chain=CHAIN, chain=TABLE/CHAIN or table=TABLE")]
    NoForm(String),
    /// A name is empty, too long, or has characters that cannot be printed.
    #[error("{0:?} needs a name of 1 to {LONGEST_NAME} printable ASCII characters, without *")]
    NoName(String),
    /// A name is of what several programs share, or of the mesh.
    #[error("{0:?} names what several programs share, or the mesh's own; name a comment or a chain")]
    Shared(String),
}

/// The rules whose effect is meant, by name and by who accepts them. KubeVirt's are always among them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct AcceptedRules {
    names: Vec<(RuleName, AcceptedBy)>,
}

impl AcceptedRules {
    /// The annotation by which a pod names rules whose effect is meant.
    pub const ANNOTATION: &str = "cni.istio.io/acceptedRules";

    /// The most bytes of a list. A longer one counts for nothing.
    pub const LONGEST_LIST: usize = 2048;

    /// Adds the names of a list.
    ///
    /// # Errors
    /// The first thing that is wrong with it; then none of its names counts.
    ///
    /// ```
    /// use redirect_core::accepted::{AcceptedBy, AcceptedRules};
    ///
    /// let mut accepted = AcceptedRules::default();
    /// accepted.add("chain=nat/BACKUP; comment=backups, by night", AcceptedBy::Pod)?;
    /// assert_eq!(accepted.names().len(), 2);
    /// assert!(accepted.add("table=nat", AcceptedBy::Pod).is_err(), "several programs share it");
    /// # Ok::<(), redirect_core::accepted::AcceptedProblem>(())
    /// ```
    pub fn add(&mut self, list: &str, by: AcceptedBy) -> Result<(), AcceptedProblem> {
        if list.len() > Self::LONGEST_LIST {
            return Err(AcceptedProblem::TooLong);
        }
        let parts = list.split(';').map(str::trim).filter(|part| !part.is_empty());
        let names = parts.map(name).collect::<Result<Vec<_>, _>>()?;
        if names.len() > MOST_NAMES {
            return Err(AcceptedProblem::TooMany);
        }
        self.names.extend(names.into_iter().map(|name| (name, by)));
        Ok(())
    }

    /// The names, with who says them.
    #[must_use]
    pub fn names(&self) -> &[(RuleName, AcceptedBy)] {
        &self.names
    }
}

fn name(part: &str) -> Result<RuleName, AcceptedProblem> {
    let (kind, name) = part.split_once('=').ok_or_else(|| AcceptedProblem::NoForm(shown(part)))?;
    let (kind, name) = (kind.trim(), name.trim());
    let is_printable = |c: char| (c.is_ascii_graphic() || c == ' ') && c != '*';
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(is_printable) {
        return Err(AcceptedProblem::NoName(shown(part)));
    }
    let shared = |is_shared: bool, name: RuleName| {
        if is_shared { Err(AcceptedProblem::Shared(shown(part))) } else { Ok(name) }
    };
    match kind {
        "comment" => Ok(RuleName::Comment(name.to_owned())),
        "table" => shared(
            TABLES.contains(&name) || DataPlane::NFT_TABLES.contains(&name),
            RuleName::Table(name.to_owned()),
        ),
        "chain" => {
            let (table, chain) = match name.rsplit_once('/') {
                Some((table, chain)) => (Some(table.to_owned()), chain),
                None => (None, name),
            };
            if chain.is_empty() || table.as_deref() == Some("") {
                return Err(AcceptedProblem::NoName(shown(part)));
            }
            let is_shared = Hook::named(chain).is_some() || Chain::named(chain).belongs_to_mesh();
            shared(is_shared, RuleName::Chain { table, chain: chain.to_owned() })
        }
        _ => Err(AcceptedProblem::NoForm(shown(part))),
    }
}

/// A part of a list in a message.
fn shown(part: &str) -> String {
    const SHOWN: usize = 60;
    part.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::{string::ToString, vec};

    fn names(list: &str) -> Result<Vec<String>, AcceptedProblem> {
        let mut accepted = AcceptedRules::default();
        accepted.add(list, AcceptedBy::Pod)?;
        Ok(accepted.names().iter().map(|(name, _)| name.to_string()).collect())
    }

    #[test]
    fn a_list_has_names_of_three_kinds() {
        assert_eq!(names(""), Ok(vec![]));
        assert_eq!(names(" ; ;"), Ok(vec![]));
        let all = "comment=backups, by night = always;chain=nat/BACKUP ; chain=BACKUP;table = vpn";
        let wanted = ["comment=backups, by night = always", "chain=nat/BACKUP", "chain=BACKUP", "table=vpn"];
        assert_eq!(names(all).unwrap(), wanted);
    }

    #[test]
    fn nothing_names_what_is_shared_or_everything() {
        for list in [
            "chain=OUTPUT",
            "chain=nat/OUTPUT",
            "chain=theirs/PREROUTING",
            "chain=ISTIO_OUTPUT",
            "table=nat",
            "table=mangle",
            "table=raw",
            "table=filter",
            "table=istio-proxy-nat",
        ] {
            assert!(matches!(names(list), Err(AcceptedProblem::Shared(_))), "{list}");
        }
        for list in [
            "comment=*",
            "chain=*",
            "chain=nat/*",
            "table=",
            "comment= ",
            "comment=a\u{1b}[2J",
            "chain=/x",
            "chain=x/",
        ] {
            assert!(matches!(names(list), Err(AcceptedProblem::NoName(_))), "{list}");
        }
        for list in ["everything", "rule=1", "BACKUP"] {
            assert!(matches!(names(list), Err(AcceptedProblem::NoForm(_))), "{list}");
        }
    }

    #[test]
    fn a_list_is_short_and_one_that_is_wrong_counts_for_nothing() {
        let many = |count: usize| "chain=X;".repeat(count);
        assert_eq!(names(&many(16)).unwrap().len(), 16);
        assert_eq!(names(&many(17)), Err(AcceptedProblem::TooMany));
        assert_eq!(names(&many(300)), Err(AcceptedProblem::TooLong));
        assert!(names(&alloc::format!("comment={}", "x".repeat(256))).is_err());
        let mut accepted = AcceptedRules::default();
        assert!(accepted.add("chain=X; table=nat", AcceptedBy::Pod).is_err() && accepted.names().is_empty());
        let problem = names("chain=\u{1b}]0;x").unwrap_err().to_string();
        assert!(!problem.contains('\u{1b}') && problem.contains("\\u{1b}"), "{problem}");
    }
}
