//! A transaction for nf_tables as the kernel would show it afterwards.

use netfilter_state::{
    change::IptablesChange,
    netlink::{Batch, Messages, NativeState, Observed},
    state::IptablesTables,
};
use redirect_core::{Family, RulePlan, options::NativeForm};

/// nf_tables' message for a new rule, as it stands in a message's header.
const NEW_RULE: u16 = 10 << 8 | 6;
/// A rule's handle, which only the kernel gives.
const HANDLE: u16 = 3;

/// The header of a netlink message: its length in the first four bytes, its type in the next two.
const HEADER: usize = 16;

/// The bytes of a transaction, each rule with a handle, as a dump has them.
#[must_use]
pub fn dumped(transaction: &[u8]) -> Vec<u8> {
    let (mut rest, mut dump, mut handle) = (transaction, Vec::new(), 0_u64);
    while rest.len() >= HEADER {
        let length = u32::from_ne_bytes(rest[..4].try_into().expect("four bytes")) as usize;
        let kind = u16::from_ne_bytes(rest[4..6].try_into().expect("two bytes"));
        let (message, others) = rest.split_at(length.next_multiple_of(4));
        let start = dump.len();
        dump.extend(message);
        if kind == NEW_RULE {
            handle += 1;
            dump.extend([12_u16, HANDLE].into_iter().flat_map(u16::to_ne_bytes));
            dump.extend(handle.to_be_bytes());
            let longer = u32::try_from(dump.len() - start).expect("short").to_ne_bytes();
            dump[start..start + 4].copy_from_slice(&longer);
        }
        rest = others;
    }
    dump
}

/// What an empty namespace holds once a plan's transaction is in force in the tables of iptables.
///
/// # Panics
/// The plan cannot be encoded.
#[must_use]
pub fn after_iptables(plan: &RulePlan) -> Observed {
    let changes = Family::BOTH
        .map(|family| (family, IptablesChange::between(&IptablesTables::new(), &plan.rules(family))));
    let nothing = Observed::at(1);
    let mut batch = Batch::new(&nothing);
    for (family, change) in &changes {
        batch.change(*family, change).expect("a plan has an encoding");
    }
    observed(batch.finish().expect("a plan fits into a transaction").bytes())
}

/// The same for native tables.
///
/// # Panics
/// The plan cannot be encoded.
#[must_use]
pub fn after_native(plan: &RulePlan, form: NativeForm) -> Observed {
    let (nothing, wanted) = (Observed::at(1), NativeState::wanted(plan, form));
    let mut batch = Batch::new(&nothing);
    batch.native_change(nothing.native(), &wanted);
    observed(batch.finish().expect("a plan fits into a transaction").bytes())
}

fn observed(transaction: &[u8]) -> Observed {
    let dump = dumped(transaction);
    let mut observed = Observed::at(2);
    Messages::new(&dump).for_each(|message| observed.take(&message));
    observed
}
