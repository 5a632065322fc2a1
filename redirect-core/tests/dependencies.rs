//! The library depends on nothing that does I/O.

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

#[test]
fn nothing_that_does_io_is_linked() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "tree",
            "--locked",
            "--offline",
            "--package",
            "redirect-core",
            "--edges",
            "normal",
            "--prefix",
            "none",
        ])
        .args(["--format", "{lib} {p}"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().filter_map(|line| line.split(' ').nth(1)).collect::<BTreeSet<_>>();
    let allowed = ALLOWED.iter().copied().collect::<BTreeSet<_>>();
    assert!(names.contains("redirect-core"), "{text}");
    assert_eq!(names.difference(&allowed).collect::<Vec<_>>(), Vec::<&&str>::new());
}
