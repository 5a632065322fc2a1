//! The agent's end: an upgrade leaves a working plugin, removal leaves nothing.

use std::path::PathBuf;

use cni_core::plugin_event;

use crate::cluster::own::{OwnDaemonSet, OwnPod};
use crate::conflist::PLUGIN_TYPE;
use crate::install::conflist_edits::{self, Edit, Leftover};
use crate::install::disk::{self, DiskError};
use crate::install::drop_in_reader;
use crate::install::installer::Installer;
use crate::install::seen_calls;
use crate::settings::{KUBECONFIG, Paths, TOKEN_FILE};

/// What the agent does at its end, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// Another agent follows; the plugin stays.
    Stay(&'static str),
    /// The agent has no successor; the plugin goes.
    Remove(&'static str),
}

/// Distinguishes an upgrade from removal.
///
/// Uninstalling deletes the DaemonSet, the roles and the service accounts at nearly the same time, so a refusal means removal as well: a plugin
/// that stays without credentials would fail every pod of the node. Where the plugin has credentials of its own and these work, only the agent's
/// pod is gone, as after a forced deletion. An agent that never had the right to ask goes by what it can see of its own pod.
#[must_use]
pub const fn decide(lookup: &OwnDaemonSet) -> Departure {
    match lookup {
        OwnDaemonSet::Present { deleting: true, .. } => Departure::Remove("the DaemonSet is being deleted"),
        OwnDaemonSet::Present { wants_node: false, .. } => {
            Departure::Remove("the DaemonSet no longer wants this node")
        }
        OwnDaemonSet::Present { .. } => Departure::Stay("the DaemonSet exists; another agent takes over"),
        OwnDaemonSet::Absent => Departure::Remove("the DaemonSet does not exist"),
        OwnDaemonSet::Denied { plugin_works, pod } => without_asking(*plugin_works, *pod),
        OwnDaemonSet::Unreachable(_) => Departure::Stay("the API server does not respond"),
    }
}

/// The same for an agent that may not ask for its DaemonSet.
const fn without_asking(plugin_works: Option<bool>, pod: OwnPod) -> Departure {
    match (pod, plugin_works) {
        (OwnPod::Stays, _) => Departure::Stay("only the container ends, not its pod"),
        (OwnPod::Unowned, _) => {
            Departure::Remove("a DaemonSet does not own the agent's pod, so no other agent takes over")
        }
        (
            OwnPod::Replaced | OwnPod::Gone | OwnPod::Refused | OwnPod::Unknown | OwnPod::Silent,
            Some(true),
        ) => Departure::Stay("the agent may not read its DaemonSet, and the plugin's own credentials work"),
        (OwnPod::Silent, _) | (OwnPod::Refused | OwnPod::Unknown, None) => Departure::Stay(
            "the agent may not read its DaemonSet, and the API server does not respond, so removal and upgrade look alike",
        ),
        (OwnPod::Replaced | OwnPod::Gone, Some(false) | None) => Departure::Stay(
            "the agent may not read its DaemonSet, and kept its other rights, so its pod is replaced",
        ),
        (OwnPod::Refused | OwnPod::Unknown, Some(false)) => {
            Departure::Remove("the agent's credentials or roles are gone, and the plugin's with them")
        }
    }
}

/// What was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemovalError {
    /// Nothing: an agent runs on this node and would put everything back.
    #[error(
        "an agent runs on this node ({}) and would put back what is removed; delete its DaemonSet, which uninstalls as well, or end it",
        .0.display()
    )]
    AgentRuns(PathBuf),
    /// A file resisted.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A configuration could not be edited.
    #[error(transparent)]
    Leftover(#[from] Leftover),
    /// The entry may still be there, so what it needs stays.
    #[error("kubeconfig and binary stay, because a network configuration may still call the plugin")]
    Kept,
}

impl RemovalError {
    /// Whether another process is changing the directories.
    fn is_busy(&self) -> bool {
        matches!(self, Self::Disk(error) if error.error.kind() == std::io::ErrorKind::WouldBlock)
    }
}

/// How often removal is tried while another process is changing the node's directories; each attempt waits some seconds.
const REMOVALS: usize = 4;

/// [`remove`], waiting for another process that is changing the directories: an agent that shuts down has the pod's grace period.
///
/// # Errors
/// Everything that could not be removed.
pub fn remove_patiently(installer: &Installer) -> Result<(), Vec<RemovalError>> {
    let mut removed = remove(installer);
    for _ in 1..REMOVALS {
        match &removed {
            Err(errors) if errors.iter().any(RemovalError::is_busy) => removed = remove(installer),
            Ok(()) | Err(_) => break,
        }
    }
    removed
}

/// Takes everything of ours out of the node: entries, then the kubeconfig, then the binaries. Every step is tried whatever became of the
/// others, but what an entry needs stays as long as the entry does.
///
/// # Errors
/// Everything that could not be removed.
pub fn remove(installer: &Installer) -> Result<(), Vec<RemovalError>> {
    let _lock = installer.lock().map_err(|error| vec![RemovalError::from(error)])?;
    installer.note_durability(remove_locked(installer))
}

fn remove_locked(installer: &Installer) -> Result<(), Vec<RemovalError>> {
    // What cannot be synced is tried all the same, so that at least a runtime that reads now does not call a removed plugin.
    let mut errors: Vec<RemovalError> = installer.make_durable().err().map(Into::into).into_iter().collect();
    let (resisting, may_call) = remove_entries(installer);
    errors.extend(resisting);
    errors.extend(hidden(installer));
    if may_call {
        errors.push(RemovalError::Kept);
    } else {
        let run = &installer.settings.paths.run;
        let sockets = [logging::SOCKET_NAME, plugin_event::SOCKET_NAME];
        let names = [KUBECONFIG, TOKEN_FILE, seen_calls::FILE_NAME, drop_in_reader::FILE_NAME]
            .into_iter()
            .chain(sockets);
        let mut files: Vec<PathBuf> = names.map(|name| run.join(name)).collect();
        files.extend(binaries(installer));
        errors.extend(
            files.iter().filter_map(|file| disk::remove(installer.disk(), file).err().map(Into::into)),
        );
    }
    errors.extend(installer.sweep_locked().err().map(RemovalError::from));
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// The directories that are links to nowhere: what is behind them on the node, this container does not see.
fn hidden(installer: &Installer) -> impl Iterator<Item = RemovalError> {
    let Paths { net, bin, run, .. } = &installer.settings.paths;
    [net, bin, run].into_iter().filter(|path| installer.disk().leads_nowhere(path)).map(|path| {
        let error = std::io::Error::new(
            std::io::ErrorKind::NotFound,
            "the target of this link does not exist or is not mounted here; it stays",
        );
        DiskError { doing: "remove anything from", path: path.clone(), error }.into()
    })
}

/// Removes our entry from every configuration; true if one may still call the plugin.
fn remove_entries(installer: &Installer) -> (Vec<RemovalError>, bool) {
    let (directory, stats) = match installer.directory() {
        Ok(read) => read,
        // A missing directory has no entry.
        Err(error) if error.error.kind() == std::io::ErrorKind::NotFound => return (Vec::new(), false),
        Err(error) => return (vec![error.into()], true),
    };
    let mut removal = conflist_edits::removal(&directory, &installer.settings.placement);
    removal.leftovers.retain(|leftover| !is_without_entry(installer, leftover));
    let mut may_call = removal.leftovers.iter().any(Leftover::may_call);
    let mut errors: Vec<RemovalError> = removal.leftovers.into_iter().map(Into::into).collect();
    let edit = |edit: &Edit| installer.edit(edit, &directory, &stats).err();
    for group in &removal.edits {
        let failed = group.iter().find_map(edit);
        may_call |= failed.is_some();
        errors.extend(failed.map(RemovalError::from));
    }
    if !may_call {
        errors.extend(removal.originals.iter().filter_map(edit).map(RemovalError::from));
    }
    (errors, may_call)
}

/// Removes what only an agent of ours would use, because another may follow.
///
/// # Errors
/// When something resists; the next agent of ours can do without this.
pub fn hand_over(installer: &Installer) -> Result<(), DiskError> {
    let _lock = installer.lock()?;
    let (directory, stats) = installer.directory()?;
    let removed = conflist_edits::spent_originals(&directory)
        .iter()
        .try_for_each(|edit| installer.edit(edit, &directory, &stats).map(drop));
    installer.note_durability(removed)
}

/// Whether a file that cannot be read as text certainly lacks the entry. Runtimes read more than we do: invalid text, any size.
fn is_without_entry(installer: &Installer, leftover: &Leftover) -> bool {
    match leftover {
        Leftover::Corrupt { .. } => false,
        Leftover::Unreadable { file, .. } => {
            let path = installer.settings.paths.net.join(file.trim_end_matches('/'));
            // The agent has nothing in a folder behind a link.
            if file.ends_with('/') && installer.disk().link(&path).is_some() {
                return true;
            }
            let entry = format!("\"{PLUGIN_TYPE}\"");
            // Writing makes a file of a link.
            installer.disk().leads_nowhere(&path)
                || disk::mentions(installer.disk(), &path, entry.as_bytes()).is_ok_and(|mentions| !mentions)
        }
    }
}

/// The binaries that are ours: the plugin, and others of the image that are the same on the node.
fn binaries(installer: &Installer) -> Vec<PathBuf> {
    let paths = &installer.settings.paths;
    // Where the image is not there, or is the node's own directory, only the plugin is known to be ours.
    let names = installer.source_names().unwrap_or_else(|_| vec![PLUGIN_TYPE.to_owned()]);
    let is_ours = |name: &String| {
        let content = || {
            let mut source = installer.disk().open(&paths.source_bin.join(name))?;
            disk::has_content(installer.disk(), &paths.bin.join(name), &mut *source)
        };
        name == PLUGIN_TYPE || content().unwrap_or(false)
    };
    let mut ours: Vec<PathBuf> =
        names.iter().filter(|name| is_ours(name)).map(|name| paths.bin.join(name)).collect();
    // The plugin is the last to go.
    ours.sort_by_key(|path| path.ends_with(PLUGIN_TYPE));
    ours
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_and_a_removal_are_distinguished() {
        let present = |deleting, wants_node| OwnDaemonSet::Present { deleting, wants_node };
        let stays = |lookup: OwnDaemonSet| matches!(decide(&lookup), Departure::Stay(_));
        let denied = |plugin_works, pod| OwnDaemonSet::Denied { plugin_works, pod };
        assert!(stays(present(false, true)));
        assert!(!stays(present(true, true)));
        assert!(!stays(present(false, false)));
        assert!(!stays(OwnDaemonSet::Absent));
        assert!(stays(OwnDaemonSet::Unreachable("timeout".into())));
        for pod in [OwnPod::Refused, OwnPod::Unknown] {
            assert!(!stays(denied(Some(false), pod)));
            assert!(stays(denied(Some(true), pod)));
            assert!(stays(denied(None, pod)));
        }
        for plugin_works in [Some(true), Some(false), None] {
            for pod in [OwnPod::Stays, OwnPod::Replaced, OwnPod::Gone, OwnPod::Silent] {
                assert!(stays(denied(plugin_works, pod)));
            }
            assert!(!stays(denied(plugin_works, OwnPod::Unowned)));
        }
    }
}
