//! The library depends on nothing that does I/O, with its features neither.

use std::{collections::BTreeSet, process::Command};

/// Every crate the library may be built from. Derive macros run in the compiler, not in the library.
const ALLOWED: &[&str] = &[
    "ipnet",
    "proc-macro2",
    "quote",
    "redirect-core",
    "syn",
    "thiserror",
    "thiserror-impl",
    "unicode-ident",
];
/// What features add: data formats and what they are built from, without their own standard-library features.
const ALLOWED_WITH_FEATURES: &[&str] =
    &["itoa", "memchr", "serde", "serde_core", "serde_derive", "serde_json", "zmij"];

fn dependencies(features: &[&str]) -> BTreeSet<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--locked", "--offline", "--package", "redirect-core", "--edges", "normal"])
        .args(["--prefix", "none", "--format", "{lib} {p}"])
        .args(features)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|line| line.split(' ').nth(1)).map(str::to_owned).collect()
}

#[test]
fn nothing_that_does_io_is_linked() {
    let found = dependencies(&[]);
    assert_eq!(found, ALLOWED.iter().map(|name| (*name).to_owned()).collect());
}

#[test]
fn features_add_data_formats_and_nothing_else() {
    let found = dependencies(&["--all-features"]);
    let allowed = ALLOWED.iter().chain(ALLOWED_WITH_FEATURES);
    assert_eq!(found, allowed.map(|name| (*name).to_owned()).collect());
}
