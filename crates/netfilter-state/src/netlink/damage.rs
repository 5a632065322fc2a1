//! Native tables damaged as another program would, for the model of a kernel.

use super::NativeState;
use redirect_core::{
    plan::DataPlane,
    rule::{Chain, Table},
};
use std::sync::Arc;

impl NativeState {
    /// Deletes a sidecar's rule by its number, counted from 1; whether it was there.
    pub(crate) fn delete_rule(&mut self, table: Table, chain: &Chain, number: usize) -> bool {
        let name = DataPlane::Sidecar.nft_table(table);
        let chains = self.tables.get_mut(name).map(|table| &mut Arc::make_mut(table).chains);
        let Some(chain) = chains.and_then(|chains| chains.get_mut(&chain.nft_name())) else {
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

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::{Families, Redirect, options::NativeForm, rule::Hook};

    #[test]
    fn rules_are_deleted_by_numbers_from_1_to_the_last() {
        let plan = Redirect::sidecar(Families::V4).build().unwrap().plan();
        let whole = NativeState::wanted(&plan, NativeForm::Plain);
        let hook = Chain::Hook(Hook::Output);
        for (number, is_there) in [(0, false), (1, true), (2, false), (1000, false)] {
            let mut damaged = whole.clone();
            assert_eq!(damaged.delete_rule(Table::Nat, &hook, number), is_there, "{number}");
            assert_eq!(damaged != whole, is_there, "{number}");
        }
    }
}
