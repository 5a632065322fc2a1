//! What the dumps in `tests/dumps` are dumps of, for the tests that read them and for the one that takes them again
//! (`netns-apply/tests/it/dumps.rs`).

#[path = "../../../../../redirect-core/src/recorded/plans.rs"]
pub mod plans;

pub use plans::plans;

use super::{
    Family, HookedRules, Key, Messages, NamespaceFacts, NativeForm, RawSettings, Redirect, RulePlan, Source,
};
use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

/// Rules that nft and iptables made of `others.nft` and of the `others*.iptables`.
pub const OF_OTHERS: &str = "others";

/// Native tables of the mesh with things of another program in them: what nft made of `extended.nft`.
pub const EXTENDED: &str = "extended";

/// Tables that hang on interfaces: what nft made of `devices.nft`.
pub const ON_DEVICES: &str = "devices";

/// The dump of what iptables-nft made of a plan.
pub fn of_iptables(plan: &str) -> String {
    format!("{plan}-iptables")
}

/// The dump of a plan's native table.
pub fn of_native(plan: &str, form: NativeForm) -> String {
    format!("{plan}-{form:?}").to_lowercase()
}

/// The input with which nft makes a plan's native tables.
pub fn script(plan: &str) -> String {
    format!("{plan}.nft")
}

/// What iptables-legacy-save prints of the other programs' rules, or of a plan's.
pub fn saved(what: &str, family: Family) -> String {
    format!("{what}-{family:?}.saved").to_lowercase()
}

/// What a text says is what is recorded in a file of the folder. With `UPDATE_DUMPS=1` it is what is recorded from now on.
pub fn assert_recorded(name: &str, text: &str) {
    plans::assert_recorded(&file(name), text);
}

/// Where a file of the folder lies.
pub fn file(name: &str) -> PathBuf {
    // Whichever package reads them.
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let project = folders.find(|folder| folder.join("crates/netfilter-state").is_dir()).unwrap();
    project.join("crates/netfilter-state/tests/dumps").join(name)
}

/// Where a dump lies.
pub fn dump_file(name: &str) -> PathBuf {
    file(&format!("{name}.dump"))
}

/// A dump, as the kernel gave it.
pub fn dump(name: &str) -> Vec<u8> {
    let file = dump_file(name);
    fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// The tables in a dump.
pub fn dumped(dump: &[u8]) -> HookedRules {
    let mut ruleset = HookedRules::default();
    Messages::new(dump).for_each(|message| ruleset.take(&message));
    ruleset
}

/// What is seen of tables, chains and rules.
pub fn seen(ruleset: &HookedRules) -> String {
    let mut text = String::new();
    for (name, table) in &ruleset.tables {
        writeln!(text, "table {name}{}", if table.dormant { " (dormant)" } else { "" }).unwrap();
        for (name, chain) in &table.chains {
            let base = chain.base.map(|base| format!(" {base:?}")).unwrap_or_default();
            let device = chain.device.as_ref().map(|device| format!(" {device:?}")).unwrap_or_default();
            writeln!(text, "chain {name}{base}{device}").unwrap();
            for rule in &chain.rules {
                writeln!(text, "\t{rule}").unwrap();
            }
        }
    }
    text
}

/// The tables that iptables-legacy saved.
pub fn read_saved(what: &str) -> HookedRules {
    let mut ruleset = HookedRules::default();
    for family in Family::BOTH {
        let text = fs::read_to_string(file(&saved(what, family))).unwrap();
        ruleset.add_saved(family, &text).unwrap();
    }
    ruleset
}
