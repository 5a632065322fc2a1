//! Directories of network namespaces, as container runtimes have them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use super::Namespace;

/// A directory in which files are network namespaces, as `/run/netns` of a node. The mounts go with the value.
#[derive(Debug)]
pub struct NetnsDirectory(TempDir);

impl NetnsDirectory {
    /// An empty one.
    pub fn new() -> Result<Self> {
        Ok(Self(tempfile::Builder::new().prefix(&format!("e2e-{}-netns", std::process::id())).tempdir()?))
    }

    /// One with these namespaces, under their names.
    pub fn of<'n>(namespaces: impl IntoIterator<Item = &'n Namespace>) -> Result<Self> {
        let directory = Self::new()?;
        for namespace in namespaces {
            directory.mount(namespace.name(), &namespace.path())?;
        }
        Ok(directory)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Mounts a namespace's file under a name.
    pub fn mount(&self, name: &str, namespace: &Path) -> Result<PathBuf> {
        let path = self.path().join(name);
        File::create(&path)?;
        mount(Some(namespace), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .with_context(|| format!("cannot mount {} as {}", namespace.display(), path.display()))?;
        Ok(path)
    }

    /// What a runtime does at a pod's end: its namespace is not mounted any more, and the file is gone. As containerd does it, also while
    /// a reader checks the file.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.path().join(name);
        umount2(&path, MntFlags::MNT_DETACH)?;
        Ok(fs::remove_file(&path)?)
    }
}

impl Drop for NetnsDirectory {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.path()).into_iter().flatten().flatten() {
            // What is not mounted is only a file.
            let _ = umount2(&entry.path(), MntFlags::MNT_DETACH);
        }
    }
}
