//! The part of tables that is the mesh's, for tests and fuzz targets.

use netfilter_state::state::{Entry, IptablesTables};
use redirect_core::rule::Table;

/// The mesh's chains, and its rules in built-in chains, while `wanted` is being put in force.
#[must_use]
pub fn of_mesh(observed: &IptablesTables, wanted: &IptablesTables) -> IptablesTables {
    let mut ours = IptablesTables::new();
    for table in Table::ALL.iter().copied() {
        for (chain, entries) in observed.chains(table) {
            let is_ours = |entry: &&Entry| observed.owns_beside(wanted, table, chain, entry);
            let kept: Vec<Entry> = entries.iter().filter(is_ours).cloned().collect();
            if chain.belongs_to_mesh() || !kept.is_empty() {
                *ours.declare(table, chain.clone()) = kept;
            }
        }
    }
    ours
}
