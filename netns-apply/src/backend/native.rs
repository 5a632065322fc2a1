//! Native nftables tables: as read over netlink, or as `nft` lists them.

use crate::{
    ApplyError,
    exec::{self, ExecError, Programs},
    lock::NetnsLock,
};
use redirect_core::{
    RulePlan,
    netlink::{NativeForm, NativeState},
    render,
};
use std::{collections::BTreeMap, path::PathBuf};

/// The mesh's native tables as found: text that makes them again. Empty where there is none.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NativeTables {
    text: String,
    /// The same as read over netlink, where that serves; then there is no text.
    state: Option<NativeState>,
}

impl NativeTables {
    /// Lists the mesh's tables; none where there is no `nft`.
    pub(crate) fn observe(programs: &Programs) -> Result<Self, ApplyError> {
        let Ok(nft) = find(programs) else { return Ok(Self::default()) };
        let tables = exec::read(&nft, &["list", "tables", "inet"])?;
        let mut text = String::new();
        for name in render::NFT_TABLES {
            if tables.lines().any(|line| line.trim() == format!("table inet {name}")) {
                text += &exec::read(&nft, &["--stateless", "list", "table", "inet", name])?;
            }
        }
        Ok(Self { text, state: None })
    }

    /// What was read over netlink.
    pub(crate) const fn read(state: NativeState) -> Self {
        Self { text: String::new(), state: Some(state) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.state.as_ref().is_none_or(NativeState::is_empty)
    }

    /// Whether the tables hold exactly a plan's rules, in order.
    pub(crate) fn hold(&self, plan: &RulePlan, form: NativeForm) -> bool {
        if let Some(state) = &self.state {
            return *state == NativeState::wanted(plan, form);
        }
        listed_rules(&self.text) == render::nft_rules(plan)
    }

    /// Puts these tables in the place of whatever tables there are, at once.
    pub(crate) fn put_back(&self, programs: &Programs, lock: &NetnsLock) -> Result<(), ApplyError> {
        run(programs, &["-f", "-"], &(render::nft_remove() + &self.text), lock)
    }
}

/// The rules of each chain in what `nft list` printed.
fn listed_rules(text: &str) -> BTreeMap<(&'static str, String), Vec<String>> {
    let mut chains = BTreeMap::new();
    let (mut table, mut chain) = (None, None);
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("table inet ").and_then(|rest| rest.strip_suffix(" {")) {
            table = render::NFT_TABLES.into_iter().find(|known| *known == name);
        } else if let Some(name) = line.strip_prefix("chain ").and_then(|rest| rest.strip_suffix(" {")) {
            chain = table.map(|table| (table, name.to_owned()));
            chain.clone().map(|key| chains.entry(key).or_insert_with(Vec::new));
        } else if line == "}" {
            chain = None;
        } else if let Some(rules) = chain.as_ref().and_then(|key| chains.get_mut(key))
            && !line.is_empty()
            && !line.starts_with("type ")
        {
            rules.push(line.to_owned());
        }
    }
    chains
}

/// Asks whether a plan would be accepted. Nothing is changed.
pub(crate) fn test(programs: &Programs, plan: &RulePlan, lock: &NetnsLock) -> Result<(), ApplyError> {
    run(programs, &["--check", "-f", "-"], &render::nft_text(plan), lock)
}

/// Puts a plan's tables in the place of whatever tables there are, at once.
pub(crate) fn commit(programs: &Programs, plan: &RulePlan, lock: &NetnsLock) -> Result<(), ApplyError> {
    run(programs, &["-f", "-"], &render::nft_text(plan), lock)
}

/// Removes the tables, at once.
pub(crate) fn remove(programs: &Programs, lock: &NetnsLock) -> Result<(), ApplyError> {
    run(programs, &["-f", "-"], &render::nft_remove(), lock)
}

fn run(programs: &Programs, args: &[&str], input: &str, lock: &NetnsLock) -> Result<(), ApplyError> {
    Ok(exec::write(&find(programs)?, args, input, lock)?)
}

fn find(programs: &Programs) -> Result<PathBuf, ExecError> {
    programs.find("nft").ok_or_else(|| programs.missing("nft", "nftables"))
}
