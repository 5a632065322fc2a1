//! Undoing what a run did, from its last step to its first.

use super::Run;
use crate::{
    error::{ApplyError, RollbackOutcome},
    lock::LockError,
    netlink::NetlinkError,
    observe::NamespaceState,
    pause::{deadline, grace},
};
use netfilter_state::{
    change::IptablesChange,
    netlink::NativeState,
    state::IptablesTables,
    steps::{Inverse, Transaction},
};
use redirect_core::{Family, options::Variant};

type Tables = (Variant, Family, IptablesChange, IptablesTables);

impl Run<'_> {
    /// Undoes everything that can be undone, and says what could not be.
    pub(super) fn undo(&mut self) -> RollbackOutcome {
        // The run may have spent its time waiting for other programs; the rollback gets the same time again.
        self.deadline = deadline(self.options.patience);
        let mut failures = Vec::new();
        while let Some(inverse) = self.done.pop() {
            if let Err(error) = self.take_back(&inverse) {
                failures.push(error.to_string());
            }
        }
        match self.left() {
            Ok(left) if left.is_empty() => RollbackOutcome::Undone,
            Ok(left) => RollbackOutcome::Left { left, failures },
            Err(error) => {
                failures.push(error.to_string());
                RollbackOutcome::Left { left: Vec::new(), failures }
            }
        }
    }

    fn take_back(&mut self, inverse: &Inverse) -> Result<(), ApplyError> {
        match inverse {
            Inverse::Routing { change, before } => Ok(self.handles.routes.take_back(change, before)?),
            Inverse::Grace => {
                grace();
                Ok(())
            }
            Inverse::Nothing => Ok(()),
            Inverse::Rules { iptables, native } => self.put_back_rules(iptables, native.as_ref()),
        }
    }

    fn put_back_rules(
        &mut self,
        iptables: &[Tables],
        native: Option<&NativeState>,
    ) -> Result<(), ApplyError> {
        loop {
            let now = NamespaceState::now(&mut self.handles, self.deadline)?;
            let mut transaction = Transaction { iptables: Vec::new(), native: native.cloned() };
            for (variant, family, done, before) in iptables {
                let mut change = IptablesChange::back(now.state.rules(*variant).of(*family), before, done);
                let touched = |table| done.tables.iter().any(|change| change.table == table);
                change.tables.retain(|change| touched(change.table));
                match variant {
                    Variant::Nft if self.handles.nft_in_transaction => {
                        transaction.iptables.push((*family, change));
                    }
                    Variant::Nft | Variant::Legacy => {
                        let lock = self.lock.as_ref().ok_or(LockError::NotHeld)?;
                        self.handles.programs.iptables(*variant, *family).commit(&change, lock)?;
                    }
                }
            }
            if transaction.is_empty() {
                return Ok(());
            }
            let (Some(connection), Some(base)) = (&mut self.handles.netlink, &now.nf_tables) else {
                return Err(NetlinkError::NoNfTables.into());
            };
            log::debug!("taking back: {transaction}");
            match connection.commit(&transaction, base, self.deadline) {
                // Returned only before the deadline, so this ends.
                Err(NetlinkError::Changed) => {}
                result => return Ok(result?),
            }
        }
    }

    /// What is not as it was before the run's first step.
    fn left(&mut self) -> Result<Vec<String>, ApplyError> {
        let mut now = NamespaceState::now(&mut self.handles, self.deadline)?;
        now.state.routing = self.handles.routes.place(self.plan, now.state.routing)?.found;
        Ok(self.start.as_ref().map(|start| now.state.differences_to(start)).unwrap_or_default())
    }
}
