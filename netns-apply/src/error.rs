//! Why a plan could not be put in force, or looked at.

use crate::{exec::ExecError, lock::LockError, routes::RouteError};
use redirect_core::{Family, options::Variant};

/// Why a plan could not be put in force, or looked at. In every case but [`ApplyError::Rollback`] the namespace is as
/// it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// We may not.
    #[error(
        "CAP_NET_ADMIN is missing: rules cannot be programmed; run as root, or in the container's securityContext add NET_ADMIN and NET_RAW to capabilities"
    )]
    NotPermitted,
    /// Somebody else is at work.
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
    /// The rules would not be accepted; nothing was changed.
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
        cause: redirect_core::parse::SaveError,
    },
    /// The namespace's addresses and interfaces could not be read.
    #[error("cannot read the network namespace's addresses: {cause}")]
    Addresses {
        /// What the kernel said.
        cause: std::io::Error,
    },
    /// Somebody else changes the same rules all the time.
    #[error(
        "the rules are not as planned after {attempts} attempts, somebody else changes them: {difference}"
    )]
    Contended {
        /// How often it was tried.
        attempts: usize,
        /// The first difference.
        difference: String,
    },
    /// Undoing failed, too.
    #[error("{cause}; undoing what was done failed as well: {undo}; run with --cleanup-only")]
    Rollback {
        /// Why the plan could not be put in force.
        cause: Box<ApplyError>,
        /// Why it could not be undone.
        undo: Box<ApplyError>,
    },
}
