//! Whether the directories that may be written to are still those that have the names.
//!
//! The kernel's rules are about directories, not about names. One that was recreated, exchanged, mounted over, or linked to since, may not be written
//! to. In a container a mounted directory never changes; on a node itself any may.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// What the process is confined to, once it is.
static WRITTEN: OnceLock<Vec<ConfinedDir>> = OnceLock::new();

#[derive(Debug)]
struct ConfinedDir {
    path: PathBuf,
    /// Device and inode.
    id: Option<(u64, u64)>,
}

impl ConfinedDir {
    fn is_another_now(&self) -> bool {
        self.id.zip(id_of(&self.path)).is_some_and(|(was, is)| was != is)
    }
}

/// Takes note of what the names mean now.
pub(super) fn remember(paths: &[PathBuf]) {
    let place = |path: &PathBuf| ConfinedDir { path: path.clone(), id: id_of(path) };
    WRITTEN.get_or_init(|| paths.iter().map(place).collect());
}

fn id_of(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// A directory that is another one than when the process was confined, so that it can do its work no more. One that is gone may come back, and one that
/// could not be read then cannot be compared.
#[must_use]
pub fn moved() -> Option<&'static Path> {
    WRITTEN.get()?.iter().find(|place| place.is_another_now()).map(|place| &*place.path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreadable_directory_does_not_count_as_another_one() {
        let place = |id| ConfinedDir { path: "/".into(), id };
        assert!(!place(id_of(Path::new("/"))).is_another_now());
        assert!(place(Some((0, 0))).is_another_now());
        assert!(!place(None).is_another_now());
        assert!(!ConfinedDir { path: "/nowhere".into(), id: Some((0, 0)) }.is_another_now());
    }
}
