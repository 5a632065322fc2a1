//! What the tools make, and the checks of documents.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

#[path = "../../src/page/contents.rs"]
mod contents;
mod images;
mod interrupted;
mod links;
mod named_tests;
mod page_contents;
mod release_candidate;
mod seccomp_profile;

/// The files that belong to the project, those that git has, or would take, of these patterns.
fn project_files(patterns: &[&str]) -> Vec<PathBuf> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the project's folder");
    let list = ["-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(list).args(patterns).current_dir(&root).output().expect("git");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("UTF-8");
    names.lines().map(|name| root.join(name)).filter(|file| file.exists()).collect()
}
