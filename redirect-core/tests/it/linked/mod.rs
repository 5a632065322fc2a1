//! The crates that a package is built from, without those that only its tests need.

use std::{collections::BTreeSet, process::Command};

/// What any of the pure libraries is built from besides each other. Derive macros run in the compiler, not in the library.
const ALLOWED: [&str; 7] =
    ["ipnet", "proc-macro2", "quote", "syn", "thiserror", "thiserror-impl", "unicode-ident"];

/// What the feature `serde` adds, without its own standard-library features.
pub const SERDE: [&str; 3] = ["serde", "serde_core", "serde_derive"];

fn linked(features: &[&str]) -> BTreeSet<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--locked", "--offline", "--package", env!("CARGO_PKG_NAME"), "--edges", "normal"])
        .args(["--prefix", "none", "--format", "{lib} {p}"])
        .args(features)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|line| line.split(' ').nth(1)).map(str::to_owned).collect()
}

/// Checks that the package is built from the crates that all are built from, these, and nothing else.
pub fn assert_linked(features: &[&str], ours: &[&str], others: &[&str]) {
    let allowed = ALLOWED.iter().chain(ours).chain(others);
    assert_eq!(linked(features), allowed.map(|name| (*name).to_owned()).collect());
}
