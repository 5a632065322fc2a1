//! Any rules that iptables-save can print: what is sent to the kernel of them reads back as them, or is refused before anything is sent.

#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter_state::{
    change::IptablesChange,
    netlink::{Batch, Messages, Observed},
    state::IptablesTables,
};
use redirect_core::{Family, rule::Table};
use redirect_core_fuzz::{kernel::dumped, of_mesh::of_mesh};

fuzz_target!(|text: &str| {
    // The kernel ends names with a zero byte, so iptables-save prints none.
    if text.contains('\0') {
        return;
    }
    let Ok(state) = IptablesTables::saved(text) else { return };
    let wanted = of_mesh(&state, &IptablesTables::new());
    let change = IptablesChange::back(&IptablesTables::new(), &wanted, &IptablesChange::default());
    for family in Family::BOTH {
        let nothing = Observed::at(1);
        let mut batch = Batch::new(&nothing);
        if let Err(refused) = batch.change(family, &change) {
            assert!(!refused.to_string().is_empty());
            continue;
        }
        let Ok(finished) = batch.finish() else { continue };
        let dump = dumped(finished.bytes());
        let mut observed = Observed::at(2);
        Messages::new(&dump).for_each(|message| observed.take(&message));
        for table in Table::ALL.iter().copied() {
            for (chain, rules) in wanted.chains(table) {
                assert_eq!(
                    observed.state(family).rules(table, chain),
                    rules,
                    "{family} {} {chain}",
                    table.name()
                );
            }
        }
    }
});
