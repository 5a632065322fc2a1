//! Archives that programs write.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Result;

use test_support::process;

/// All files of a packed archive (`.tar.gz`) by their names, without the folder they lie in.
pub fn entries(archive: &Path) -> Result<BTreeMap<String, String>> {
    let folder = tempfile::tempdir()?;
    let mut tar = process::command("tar", ["-xzf"]);
    tar.arg(archive).arg("-C").arg(folder.path()).arg("--strip-components=1");
    process::run(&mut tar, process::SHORT)?.ok()?;
    let mut find = process::command("find", [".", "-type", "f"]);
    let found = process::run(find.current_dir(folder.path()), process::SHORT)?.ok()?;
    let read = |name: &str| {
        Ok((name.trim_start_matches("./").to_owned(), fs::read_to_string(folder.path().join(name))?))
    };
    found.stdout.lines().map(read).collect()
}
