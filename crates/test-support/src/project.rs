//! The project's own files: what tests hold the documents and manifests to.

use crate::process;
use anyhow::Result;
use std::path::{Path, PathBuf};

/// A file or folder of the project, by its path from the top.
pub fn file(path: impl AsRef<Path>) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    folder.expect("this crate is two folders below").join(path)
}

/// The names of the files of these patterns that git has, or would take.
///
/// # Errors
/// Git fails: it is not a repository.
pub fn names(patterns: &[&str]) -> Result<Vec<String>> {
    let list = ["-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"];
    let mut git = process::command("git", list);
    let listed = process::run(git.args(patterns).current_dir(file("")), process::SHORT)?.ok()?;
    Ok(listed.stdout.lines().filter(|name| file(name).exists()).map(str::to_owned).collect())
}
