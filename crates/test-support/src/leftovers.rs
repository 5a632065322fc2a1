//! Removes the leftovers of killed test processes.
//!
//! Names of namespaces, folders and cgroups are `e2e-PID-NUMBER`: the leftovers of a dead process have no owner.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

/// Where `ip netns` keeps the named network namespaces.
pub const NAMESPACES: &str = "/run/netns";
/// Where `ip netns exec` looks for files to put over those of `/etc`.
pub const ETC_NETNS: &str = "/etc/netns";

/// A name no other value of this or any other living test process has.
pub fn fresh_name() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    static SWEEP: Once = Once::new();

    SWEEP.call_once(sweep);
    format!("e2e-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// A temporary folder whose name shows its owner.
pub fn temp_dir() -> std::io::Result<TempDir> {
    tempfile::Builder::new().prefix(&format!("{}-", fresh_name())).tempdir()
}

fn sweep() {
    for name in orphans(Path::new(NAMESPACES)) {
        remove_namespace(&name);
    }
    for name in orphans(&std::env::temp_dir()) {
        let folder = std::env::temp_dir().join(name);
        let _ = nix::mount::umount2(&folder, nix::mount::MntFlags::MNT_DETACH);
        let _ = fs::remove_dir_all(folder);
    }
    for root in cgroup_roots() {
        for name in orphans(&root) {
            remove_cgroup(&root.join(name));
        }
    }
}

/// The root folder of every cgroup hierarchy of the machine: one per controller, or one for all.
pub fn cgroup_roots() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let cgroups = fields.filter(|fields| fields.len() > 2 && matches!(fields[2], "cgroup" | "cgroup2"));
    cgroups.map(|fields| PathBuf::from(fields[1])).collect()
}

/// Removes a cgroup and those below it. One that still has processes stays.
pub fn remove_cgroup(path: &Path) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    let _ = fs::remove_dir(path);
}

/// Unmounts and deletes a named namespace and its folder in `/etc/netns`. Ignores a missing one.
pub fn remove_namespace(name: &str) {
    let path = Path::new(NAMESPACES).join(name);
    let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
    let _ = fs::remove_file(&path);
    let _ = fs::remove_dir_all(Path::new(ETC_NETNS).join(name));
}

fn orphans(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| is_orphan(name)).collect()
}

fn is_orphan(name: &str) -> bool {
    let mut parts = name.split('-');
    let (Some("e2e"), Some(process)) = (parts.next(), parts.next()) else { return false };
    process.parse::<u32>().is_ok() && !Path::new("/proc").join(process).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_dead_processes_are_orphans() {
        assert!(!is_orphan(&format!("e2e-{}-0", std::process::id())));
        assert!(is_orphan("e2e-4294967295-0"));
        assert!(!is_orphan("e2e-"));
        assert!(!is_orphan("cni-4294967295-0"));
    }
}
