//! Whether the directories that may be written to are still those that have the names.
//!
//! The kernel's rules are about directories, not about names. One that is made anew, exchanged, mounted over, or that a link leads to since, may not be written
//! to. In a container a mounted directory never changes; on a node itself any may.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// What the process is confined to, once it is.
static WRITTEN: OnceLock<Vec<Place>> = OnceLock::new();

#[derive(Debug)]
struct Place {
    path: PathBuf,
    /// Device and inode.
    id: Option<(u64, u64)>,
}

/// Takes note of what the names mean now.
pub(super) fn remember(paths: &[PathBuf]) {
    let place = |path: &PathBuf| Place { path: path.clone(), id: id_of(path) };
    WRITTEN.get_or_init(|| paths.iter().map(place).collect());
}

fn id_of(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// A directory that is another one than when the process was confined, so that it can do its work no more. One that is gone may come back.
#[must_use]
pub fn moved() -> Option<&'static Path> {
    let is_another = |place: &&Place| id_of(&place.path).is_some_and(|now| Some(now) != place.id);
    WRITTEN.get()?.iter().find(is_another).map(|place| &*place.path)
}
