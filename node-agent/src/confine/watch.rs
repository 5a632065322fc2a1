//! Whether the directories that may be written to are still those that have the names.
//!
//! The kernel's rules are about directories, not about names. One that was recreated, exchanged, mounted over, or linked to since, may not be written
//! to. In a container a mounted directory never changes; on a node itself any may.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// What the process is confined to, once it is.
static WRITTEN: OnceLock<Vec<(PathBuf, DirectoryId)>> = OnceLock::new();

/// Device and inode, if they can be read.
type DirectoryId = Option<(u64, u64)>;

/// Takes note of what the names mean now.
pub(super) fn remember(paths: &[PathBuf]) {
    WRITTEN.get_or_init(|| paths.iter().map(|path| (path.clone(), id_of(path))).collect());
}

fn id_of(path: &Path) -> DirectoryId {
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// A directory that is another one than when the process was confined, so that it can do its work no more. One that is gone may come back, and one that
/// could not be read then cannot be compared.
#[must_use]
pub fn moved() -> Option<&'static Path> {
    WRITTEN.get()?.iter().find(|(path, id)| is_another(path, *id)).map(|(path, _)| &**path)
}

fn is_another(path: &Path, was: DirectoryId) -> bool {
    was.zip(id_of(path)).is_some_and(|(was, is)| was != is)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreadable_directory_does_not_count_as_another_one() {
        let root = Path::new("/");
        assert!(!is_another(root, id_of(root)));
        assert!(is_another(root, Some((0, 0))));
        assert!(!is_another(root, None));
        assert!(!is_another(Path::new("/nowhere"), Some((0, 0))));
    }
}
