//! Why the kernel could not be asked, or refused.

#![allow(clippy::wildcard_enum_match_arm)] // error numbers are many, and may grow

use crate::system_error::SystemError;
use netfilter_state::netlink::{BatchError, Extension, TableObstacle};
use nix::errno::Errno;
use redirect_core::Family;
use std::fmt;

/// Why the kernel could not be asked, or refused. Nothing was changed, but for [`Socket`](Self::Socket): if the answer to a transaction
/// is lost, the transaction may be in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetlinkError {
    /// The kernel has no nf_tables.
    #[error(
        "the kernel has no nf_tables: load the module nf_tables on the node, or use iptables-legacy (--backend restore --force-iptables-binary legacy)"
    )]
    NoNfTables,
    /// CAP_NET_ADMIN is missing.
    #[error("CAP_NET_ADMIN is missing in the network namespace's user namespace: run as root")]
    NotPermitted,
    /// The socket failed.
    #[error("netlink: cannot {what}: {}", .cause.0.desc())]
    Socket {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        cause: SystemError,
    },
    /// The kernel refused a question.
    #[error("netlink: the kernel refuses to {what}: {}{}", .cause.0.desc(), explained(.text.as_deref()))]
    Question {
        /// What it was asked to do.
        what: &'static str,
        /// Its reason.
        cause: SystemError,
        /// Its words.
        text: Option<String>,
    },
    /// The kernel refused a part of a transaction, and so all of it.
    #[error("the kernel refuses {part}: {}{}{}", .cause.0.desc(), explained(.text.as_deref()), remedy(.missing, .cause.0))]
    Refused {
        /// What it refused: a table, a chain, a rule.
        part: String,
        /// Its reason.
        cause: SystemError,
        /// Its words.
        text: Option<String>,
        /// What the part needs and the kernel lacks.
        missing: Vec<Missing>,
    },
    /// A plan needs matches or targets that the kernel lacks; nothing was tried.
    #[error("the kernel lacks {}: load on the node", list(.0))]
    Lacking(Vec<Missing>),
    /// A table that rules are to go into is dormant, or belongs to another program.
    #[error("{0}")]
    Obstacle(TableObstacle),
    /// The rules exceed the caller's limit.
    #[error(
        "this network namespace has more than {0} bytes of rules, more than the plan and a usual share of other programs' take; remove those of other programs, or of an earlier plan: nft list ruleset shows them"
    )]
    TooMuch(usize),
    /// The changes do not fit the rules in force, or cannot be sent.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// Another program has changed the same rules since they were checked.
    #[error("another program has changed the rules of this network namespace concurrently")]
    Changed,
    /// Another program keeps changing rules.
    #[error("another program keeps changing rules of this network namespace; gave up waiting")]
    Contended,
}

fn explained(text: Option<&str>) -> String {
    text.map(|text| format!(" ({text})")).unwrap_or_default()
}

fn remedy(missing: &[Missing], cause: Errno) -> String {
    if !missing.is_empty() {
        return format!("; it lacks {}: load on the node", list(missing));
    }
    match cause {
        Errno::ENOENT | Errno::EOPNOTSUPP => {
            "; it lacks something this needs: load the modules nft_compat, nft_chain_nat, nft_ct, nft_redir, nft_tproxy on the node".into()
        }
        Errno::EMSGSIZE | Errno::ENOBUFS | Errno::ENOMEM => "; the plan is too large for it".into(),
        _ => String::new(),
    }
}

fn list(missing: &[Missing]) -> String {
    missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// An xt match or target that the kernel lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// For this family.
    pub family: Family,
    /// The match or target.
    pub extension: Extension,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Extension { name, revision, is_target } = self.extension;
        let kind = if is_target { "target" } else { "match" };
        let module = self.extension.module();
        write!(f, "the {kind} {name} revision {revision} for {} (module {module} or nft_compat)", self.family)
    }
}
