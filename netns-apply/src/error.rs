//! Why a plan could not be put in force, or checked.

use crate::{exec::ExecError, lock::LockError, netlink::NetlinkError, routes::RouteError};
use netfilter_state::xtables::MalformedTable;
use packet_trace::placement::RoutingObstacle;
use redirect_core::{Family, options::Variant};
use std::{fmt, io};

/// Why a run failed, and in which state it left the network namespace.
#[derive(Debug, thiserror::Error)]
#[error("{cause}{aftermath}")]
pub struct RunError {
    /// What went wrong.
    pub cause: Box<ApplyError>,
    /// The state after the run.
    pub aftermath: RollbackOutcome,
}

impl ApplyError {
    /// Whether the kernel has refused what was asked of it, so that none of it is in force. If its answer is lost, or a
    /// helper program fails, that cannot be determined.
    pub(crate) fn says_that_nothing_was_done(&self) -> bool {
        if let Self::Netlink(error) = self {
            return !matches!(error, NetlinkError::Socket { .. });
        }
        matches!(self, Self::Route(error) if error.says_that_nothing_was_done())
    }
}

/// The state after a failed run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RollbackOutcome {
    /// It had not begun to change anything.
    Untouched,
    /// Everything it did was undone.
    Undone,
    /// Not everything could be undone.
    Left {
        /// What is not as it was; empty if that could not be found out.
        left: Vec<String>,
        /// Why.
        failures: Vec<String>,
    },
}

impl fmt::Display for RollbackOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Untouched => f.write_str("; nothing was changed"),
            Self::Undone => f.write_str("; all changes were rolled back"),
            Self::Left { left, failures } => {
                let what = if left.is_empty() { "unknown".to_owned() } else { left.join(", ") };
                write!(f, "; rollback also failed; not restored: {what}")?;
                if !failures.is_empty() {
                    write!(f, " ({})", failures.join("; "))?;
                }
                f.write_str("; run with --cleanup-only, or run again")
            }
        }
    }
}

/// Why a plan could not be put in force, or checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// CAP_NET_ADMIN is missing.
    #[error(
        "CAP_NET_ADMIN is missing: rules cannot be programmed; run as root, or in the container's securityContext add NET_ADMIN and NET_RAW to capabilities"
    )]
    NotPermitted,
    /// Another program is at work, or that cannot be determined.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A helper program is missing or failed.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// Routing could not be read or changed.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// nf_tables could not be asked, or refused.
    #[error(transparent)]
    Netlink(#[from] crate::netlink::NetlinkError),
    /// No variant of iptables can be used here.
    #[error("{family}: neither iptables-nft nor iptables-legacy can be used here: {nft}; {legacy}")]
    NoIptables {
        /// For this family.
        family: Family,
        /// What is wrong with the one.
        nft: Box<ExecError>,
        /// What is wrong with the other.
        legacy: Box<ExecError>,
    },
    /// Tables of legacy iptables could not be read.
    #[error(transparent)]
    Legacy(#[from] LegacyError),
    /// The rules would not be accepted.
    #[error("{family}: iptables-{variant} does not accept the plan: {cause}{hint}", variant = .variant.name())]
    Rejected {
        /// For this family.
        family: Family,
        /// By this variant.
        variant: Variant,
        /// Why.
        cause: ExecError,
        /// What the operator may do.
        hint: &'static str,
    },
    /// What iptables-save printed could not be read.
    #[error("{program}: {cause}")]
    Unreadable {
        /// The program.
        program: String,
        /// What was wrong.
        cause: netfilter_state::saved::SaveError,
    },
    /// All rules of the plan are in force, but the rules of other programs could not be read.
    #[error("the rules are in force, but cannot determine whether other programs' rules interfere: {cause}")]
    OthersUnread {
        /// Why not.
        cause: Box<ApplyError>,
    },
    /// Packets with the plan's mark do not reach the proxy, because of what other programs route.
    #[error("{0}")]
    DoesNotConverge(Box<RoutingObstacle>),
    /// Policy routing is not as planned whatever is added and removed.
    #[error(
        "does not converge: after {attempts} attempts the kernel still does not have policy routing as planned: {difference}"
    )]
    RoutingNotKept {
        /// How many times it was tried.
        attempts: usize,
        /// What is not as planned.
        difference: String,
    },
    /// Another program keeps changing the same rules.
    #[error(
        "the rules are not as planned after {attempts} attempts, because another program changes them: {difference}"
    )]
    Contended {
        /// How many times it was tried.
        attempts: usize,
        /// What is not as planned.
        difference: String,
    },
}

/// Why a table of legacy iptables could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LegacyError {
    /// The kernel refuses.
    #[error("cannot read table {table} of legacy iptables ({family}): {cause}")]
    Refused {
        /// Its family.
        family: Family,
        /// Its name.
        table: String,
        /// Why.
        cause: io::Error,
    },
    /// It holds more than a run may read.
    #[error(
        "table {table} of legacy iptables ({family}) takes more than {most} bytes, more than the plan and a usual share of other programs' rules; remove those of other programs, or of an earlier plan: iptables-legacy-save shows them"
    )]
    TooMuch {
        /// Its family.
        family: Family,
        /// Its name.
        table: String,
        /// How many bytes may be read.
        most: usize,
    },
    /// Its entries are not as the kernel lays them out.
    #[error(transparent)]
    Malformed(#[from] MalformedTable),
}
