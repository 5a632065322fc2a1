//! Tables of legacy iptables in the calling thread's network namespace, read without a helper program.

use crate::{
    error::{ApplyError, LegacyError},
    exec::{ExecError, Programs},
};
use netfilter_state::{
    ruleset::{Api, ChainState, HookedRules, TableName, built_in},
    state::IptablesTables,
    xtables::{LegacyChains, LegacyTable},
};
use redirect_core::{
    Family,
    options::Variant,
    rule::{Hook, Table},
};
use std::{fs, io};

/// An entry takes fewer bytes than a rule of nf_tables, and as much work.
const SMALLER: usize = 3;

/// Adds the tables of a family to a ruleset. Of one that is too large, only the built-in chains.
pub(crate) fn add_to(ruleset: &mut HookedRules, family: Family, most_read: usize) -> Result<(), ApplyError> {
    for name in names(family) {
        match read(family, &name, most_read / SMALLER) {
            Ok(Some(chains)) => chains.add_to(ruleset, family, &name),
            Ok(None) => {}
            Err(ApplyError::Legacy(LegacyError::TooMuch { .. })) => add_unread(ruleset, family, name),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn add_unread(ruleset: &mut HookedRules, family: Family, name: String) {
    let is_one = |hook: &&Hook| match name.as_str() {
        "filter" | "security" => matches!(hook, Hook::Input | Hook::Forward | Hook::Output),
        "raw" => matches!(hook, Hook::Prerouting | Hook::Output),
        _ => true,
    };
    let chains = Hook::ALL.iter().filter(is_one).filter_map(|hook| {
        let base = built_in(&name, *hook, false)?;
        let chain = ChainState { base: Some(base), is_partial: true, ..ChainState::default() };
        Some((hook.name().to_owned(), chain))
    });
    let chains: Vec<(String, ChainState)> = chains.collect();
    let table = TableName { api: Api::XTables, family: family.into(), name };
    ruleset.table(table).chains.extend(chains);
}

/// The rules of a family in tables that plans use. Those that no plan can have are as iptables-legacy-save prints them, where that is
/// installed: a run may have to remove them.
pub(crate) fn state(
    programs: &Programs,
    family: Family,
    most_read: usize,
) -> Result<IptablesTables, ApplyError> {
    let (mut state, mut used, mut are_understood) = (IptablesTables::new(), Vec::new(), true);
    for table in names(family).iter().filter_map(|name| Table::named(name)) {
        if let Some(chains) = read(family, table.name(), most_read)? {
            chains.add_to_state(&mut state, table);
            are_understood &= chains.are_understood();
            used.push(table.name());
        }
    }
    if are_understood {
        return Ok(state);
    }
    match programs.iptables(Variant::Legacy, family).save_tables(used.into_iter(), most_read) {
        Err(ApplyError::Exec(ExecError::Missing { .. })) => Ok(state),
        saved => saved,
    }
}

/// Whether any table holds a rule, a chain or a policy to drop. Empty tables do not count: listing one with iptables-legacy
/// creates it.
pub(crate) fn is_in_use(most_read: usize) -> Result<bool, ApplyError> {
    for family in Family::BOTH {
        for name in names(family) {
            if read(family, &name, most_read)?.is_some() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Whether this namespace has any table of a family.
pub(crate) fn has_tables(family: Family) -> bool {
    !names(family).is_empty()
}

/// Reads a table; none if it is empty or gone.
fn read(family: Family, name: &str, most: usize) -> Result<Option<LegacyChains>, ApplyError> {
    let of = match family {
        Family::V4 => xtables_read::XtablesFamily::V4,
        Family::V6 => xtables_read::XtablesFamily::V6,
    };
    let table = match xtables_read::table(of, name, most) {
        Ok(table) => table,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(refused(family, name, most, cause)),
    };
    let chains = LegacyTable {
        family,
        name,
        valid_hooks: table.valid_hooks,
        begins: table.begins,
        policies: table.policies,
        entries: &table.entries,
    };
    let chains = chains.chains().map_err(LegacyError::from)?;
    Ok(Some(chains).filter(|chains| !chains.is_empty()))
}

fn refused(family: Family, name: &str, most: usize, cause: io::Error) -> ApplyError {
    let table = name.to_owned();
    if cause.kind() == io::ErrorKind::PermissionDenied {
        ApplyError::NotPermitted
    } else if cause.kind() == io::ErrorKind::ArgumentListTooLong {
        LegacyError::TooMuch { family, table, most }.into()
    } else {
        LegacyError::Refused { family, table, cause }.into()
    }
}

/// The tables that this namespace has (`ip_tables_names`). Reading this creates none; asking for another one would.
fn names(family: Family) -> Vec<String> {
    let file = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    fs::read_to_string(file).map(|text| text.lines().map(str::to_owned).collect()).unwrap_or_default()
}
