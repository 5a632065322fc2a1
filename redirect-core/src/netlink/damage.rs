//! Native tables damaged as somebody else would, for the model of a kernel.

use super::NativeState;
use crate::{
    render::{nft_chain_name, nft_table},
    rule::{Chain, Table},
};
use alloc::sync::Arc;

impl NativeState {
    /// Deletes a rule by its number, counted from 1; whether it was there.
    pub(crate) fn delete_rule(&mut self, table: Table, chain: &Chain, number: usize) -> bool {
        let chains = self.tables.get_mut(nft_table(table)).map(|table| &mut Arc::make_mut(table).chains);
        let Some(chain) = chains.and_then(|chains| chains.get_mut(&nft_chain_name(chain))) else {
            return false;
        };
        match number.checked_sub(1) {
            Some(index) if index < chain.rules.len() => {
                chain.rules.remove(index);
                true
            }
            Some(_) | None => false,
        }
    }
}
