//! What programs the rules, and how it is chosen without trying anything out.

use crate::{ApplyError, handles::Handles, netlink::NetlinkError, observe::NamespaceState};
use netfilter_state::steps::RulesIn;
use redirect_core::{
    Family, RulePlan,
    options::{BackendChoice, NativeForm, Variant},
    plan::DataPlane,
    rule::Table,
};
use std::fmt;

/// What programs the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// The tables of iptables-nft, in one transaction over netlink, without helper programs.
    Netlink,
    /// `iptables-restore` and `ip6tables-restore` of this variant.
    Restore(Variant),
    /// Native nftables, over netlink.
    NativeNft,
}

impl Backend {
    /// Where its rules stand.
    pub(crate) const fn rules_in(self, form: NativeForm) -> RulesIn {
        match self {
            Self::Netlink => RulesIn::Iptables(Variant::Nft),
            Self::Restore(variant) => RulesIn::Iptables(variant),
            Self::NativeNft => RulesIn::Native(form),
        }
    }
}

/// The nf_tables tables that hold a plan's rules, as nft names them.
pub(crate) fn tables(plan: &RulePlan, backend: Backend) -> Vec<String> {
    match backend {
        Backend::Restore(Variant::Legacy) => Vec::new(),
        Backend::NativeNft => DataPlane::NFT_TABLES.map(|name| format!("inet {name}")).into(),
        Backend::Netlink | Backend::Restore(Variant::Nft) => {
            let of = |family: &Family| {
                let rules = plan.rules(*family);
                let word = match family {
                    Family::V4 => "ip",
                    Family::V6 => "ip6",
                };
                let used =
                    Table::ALL.iter().copied().filter(move |table| rules.chains(*table).next().is_some());
                used.map(move |table| format!("{word} {}", table.name()))
            };
            plan.families().iter().flat_map(of).collect()
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Netlink => f.write_str("netlink"),
            Self::Restore(variant) => write!(f, "restore ({})", variant.name()),
            Self::NativeNft => f.write_str("native nftables"),
        }
    }
}

/// Why a backend was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Because {
    /// The user asked for it.
    Asked,
    /// The namespace has rules of this backend.
    InUse,
    /// The kernel supports it, and nothing speaks against it.
    Supported,
    /// The other one cannot be used here.
    OnlyOne,
}

impl fmt::Display for Because {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "asked for",
            Self::InUse => "the namespace uses it already",
            Self::Supported => "supported by the kernel",
            Self::OnlyOne => "the only one that can be used here",
        })
    }
}

/// Chooses by what the user asked for, then by what the namespace uses, then by what is available.
///
/// The kernel is asked beforehand what it lacks for a plan; nothing is tried out.
pub(crate) fn choose(
    choice: BackendChoice,
    seen: &NamespaceState,
    handles: &mut Handles<'_>,
    plan: &RulePlan,
) -> Result<(Backend, Because), ApplyError> {
    let (programs, most, observed) = (handles.programs, handles.most_read, &seen.state);
    let usable = |variant| programs.iptables(variant, Family::V4).usable(most);
    match choice {
        BackendChoice::Netlink => {
            let missing = missing(handles, plan)?;
            if missing.is_empty() {
                return Ok((Backend::Netlink, Because::Asked));
            }
            return Err(NetlinkError::Lacking(missing).into());
        }
        BackendChoice::NativeNft => return Ok((Backend::NativeNft, Because::Asked)),
        BackendChoice::Restore(Some(variant)) => return Ok((Backend::Restore(variant), Because::Asked)),
        BackendChoice::Auto | BackendChoice::Restore(None) => {}
    }
    if observed.in_use(Variant::Legacy) && !observed.redirected_by(Variant::Nft) {
        return Ok((Backend::Restore(Variant::Legacy), Because::InUse));
    }
    if handles.nft_in_transaction {
        if missing(handles, plan)?.is_empty() {
            let in_use = observed.in_use(Variant::Nft);
            return Ok((Backend::Netlink, if in_use { Because::InUse } else { Because::Supported }));
        }
        // iptables-nft would lack the same.
        return match usable(Variant::Legacy) {
            Ok(()) => Ok((Backend::Restore(Variant::Legacy), Because::OnlyOne)),
            Err(cause) if !cause.is_lasting() => Err(cause.into()),
            Err(_) => Err(NetlinkError::Lacking(missing(handles, plan)?).into()),
        };
    }
    if observed.in_use(Variant::Nft) {
        return Ok((Backend::Restore(Variant::Nft), Because::InUse));
    }
    // A program that has just listed its tables is not asked again: a second answer could only be about another moment.
    let nft = if seen.nft_by_programs { Ok(()) } else { usable(Variant::Nft) };
    match (nft, usable(Variant::Legacy)) {
        (Ok(()), _) => Ok((Backend::Restore(Variant::Nft), Because::Supported)),
        // A failure that may pass decides nothing: otherwise rules would land in the other variant's tables.
        (Err(cause), _) | (_, Err(cause)) if !cause.is_lasting() => Err(cause.into()),
        (Err(_), Ok(())) => Ok((Backend::Restore(Variant::Legacy), Because::OnlyOne)),
        (Err(nft), Err(legacy)) => {
            let (nft, legacy) = (Box::new(nft), Box::new(legacy));
            Err(ApplyError::NoIptables { family: Family::V4, nft, legacy })
        }
    }
}

fn missing(handles: &mut Handles<'_>, plan: &RulePlan) -> Result<Vec<crate::netlink::Missing>, ApplyError> {
    match &mut handles.netlink {
        Some(connection) => Ok(connection.missing_for(plan)?),
        None => Ok(Vec::new()),
    }
}
