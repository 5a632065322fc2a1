//! What a namespace holds: rules of both variants, native tables, routing.

use super::{Means, NativeTables, chains, restore};
use crate::{ApplyError, exec::Programs, routes::Routing};
use redirect_core::{Family, netlink, options::Variant, state::RuleState};
use std::fs;

/// Rules of both families.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PerFamily {
    v4: RuleState,
    v6: RuleState,
}

impl PerFamily {
    pub(crate) const fn of(&self, family: Family) -> &RuleState {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }
}

/// What a namespace holds. A variant that is not installed, or that the kernel has no tables of, holds nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observed {
    legacy: PerFamily,
    nft: PerFamily,
    /// What a transaction over netlink is based on.
    pub(crate) dump: Option<netlink::Observed>,
    pub(crate) native: NativeTables,
    pub(crate) routing: Routing,
}

impl Observed {
    /// Looks at the calling thread's network namespace. Nothing is loaded or changed by looking.
    pub(crate) fn now(means: &mut Means<'_>) -> Result<Self, ApplyError> {
        let programs = means.programs;
        let both = |variant| -> Result<PerFamily, ApplyError> {
            Ok(PerFamily {
                v4: rules(programs, variant, Family::V4)?,
                v6: rules(programs, variant, Family::V6)?,
            })
        };
        let legacy = both(Variant::Legacy)?;
        let routing = means.routes.observe()?;
        let Some(connection) = &mut means.netlink else {
            let (nft, native) = (both(Variant::Nft)?, NativeTables::observe(programs)?);
            return Ok(Self { legacy, nft, dump: None, native, routing });
        };
        let dump = connection.observe()?;
        let of = |family| dump.state(family).clone();
        let nft = PerFamily { v4: of(Family::V4), v6: of(Family::V6) };
        let native = NativeTables::read(connection.native_state(&dump)?);
        Ok(Self { legacy, nft, dump: Some(dump), native, routing })
    }

    pub(crate) const fn rules(&self, variant: Variant) -> &PerFamily {
        match variant {
            Variant::Legacy => &self.legacy,
            Variant::Nft => &self.nft,
        }
    }

    /// Whether there are rules of a variant, whoever's.
    pub(crate) fn in_use(&self, variant: Variant) -> bool {
        Family::BOTH.into_iter().any(|family| !self.rules(variant).of(family).is_empty())
    }

    /// Whether there are rules of the mesh in a variant.
    pub(crate) fn redirected_by(&self, variant: Variant) -> bool {
        Family::BOTH.into_iter().any(|family| self.rules(variant).of(family).is_redirected())
    }

    /// Whether there are rules of the mesh at all.
    pub(crate) fn is_redirected(&self) -> bool {
        self.redirected_by(Variant::Legacy) || self.redirected_by(Variant::Nft) || !self.native.is_empty()
    }
}

fn rules(programs: &Programs, variant: Variant, family: Family) -> Result<RuleState, ApplyError> {
    let installed = || restore::find(programs, variant, family, "save").is_ok();
    let ask = match variant {
        Variant::Nft => installed(),
        // The kernel says first whether there is anything to ask for.
        Variant::Legacy => {
            let tables = legacy_tables(family);
            !tables.is_empty()
                && installed()
                && tables.iter().any(|table| chains::legacy_table_is_used(family, table) != Some(false))
        }
    };
    if ask { restore::save(programs, variant, family) } else { Ok(RuleState::new()) }
}

/// The legacy tables that this namespace has and nothing installed here can list.
pub(crate) fn unreadable(programs: &Programs) -> Vec<(Family, String)> {
    let hidden = |family: &Family| restore::find(programs, Variant::Legacy, *family, "save").is_err();
    let tables = |family| legacy_tables(family).into_iter().map(move |table| (family, table));
    Family::BOTH.into_iter().filter(hidden).flat_map(tables).collect()
}

/// The tables of the legacy variant that this namespace has (ip_tables_names); reading this makes none.
pub(crate) fn legacy_tables(family: Family) -> Vec<String> {
    let file = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    fs::read_to_string(file).map(|text| text.lines().map(str::to_owned).collect()).unwrap_or_default()
}
