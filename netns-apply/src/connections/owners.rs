//! The groups of the processes that have sockets open.

use crate::netns::{Netns, NetnsId};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// Which group has each of these sockets open, by inode, among the processes in a network namespace that a mounted procfs shows. What is gone by
/// then, or cannot be read because the capability SYS_PTRACE is missing, is missing here, too.
#[must_use]
pub fn socket_groups(proc: &Path, namespace: NetnsId, inodes: &BTreeSet<u32>) -> BTreeMap<u32, u32> {
    let mut groups = BTreeMap::new();
    for process in fs::read_dir(proc).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let is_there = Netns::open(process.join("ns/net")).is_ok_and(|found| found.id() == namespace);
        if let Some(group) = is_there.then(|| group(&process)).flatten() {
            let open = open_sockets(&process).filter(|inode| inodes.contains(inode));
            groups.extend(open.map(|inode| (inode, group)));
        }
    }
    groups
}

/// The group of the sockets that a process opens: the last of real, effective, saved and file system's.
fn group(process: &Path) -> Option<u32> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Gid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

fn open_sockets(process: &Path) -> impl Iterator<Item = u32> {
    let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    files.filter_map(|file| {
        let target = fs::read_link(file.path()).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    })
}
