//! Whether a runtime has called the plugin, for what the node's files leave open. Kept in the run directory, so that a restarted agent knows it.
//!
//! The run directory is one of memory: after a reboot the runtime has to call the plugin again.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use agent_runtime::{SCOPE, lock};

use crate::install::conflist_edits::EntryObstacle;
use crate::install::disk::{self, Disk, DiskError, FileAttributes};

/// The file in the run directory: what a call that was seen was made with.
pub const FILE_NAME: &str = "plugin-called.json";

/// When a runtime called the plugin, for what the node's files leave open. A call counts from the moment at which an obstacle was there first.
pub struct SeenCalls {
    calls: Mutex<Calls>,
    /// Locked apart: a call that is noted does not wait for the disk.
    kept: Mutex<Kept>,
    disk: Arc<dyn Disk>,
    path: PathBuf,
}

#[derive(Debug, Default)]
struct Calls {
    /// What is open.
    open: Option<EntryObstacle>,
    /// Whether a call was seen since.
    is_seen: bool,
}

/// What the file says.
#[derive(Debug, PartialEq, Eq)]
enum Kept {
    /// An earlier agent may have written it.
    Unread,
    /// It is not there.
    Nothing,
    /// A call made with this.
    Call(String),
}

impl SeenCalls {
    /// Calls that are kept at a path.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, path: PathBuf) -> Self {
        Self { calls: Mutex::default(), kept: Mutex::new(Kept::Unread), disk, path }
    }

    /// Notes a call of the plugin by a runtime.
    pub fn see(&self) {
        lock(&self.calls).is_seen = true;
    }

    /// Notes what the node's files say now, and what a call proves if they leave it open ([`Plan::left_open`](crate::install::conflist_edits::Plan::left_open)).
    /// Returns whether a call was seen since they leave this open.
    pub fn note(&self, obstacle: Option<&EntryObstacle>, left_open: Option<String>) -> bool {
        // The agent restores the entry, and the files around it are what they were.
        if obstacle.is_some_and(EntryObstacle::is_of_entry) {
            return self.was_seen();
        }
        let mut kept = lock(&self.kept);
        self.note_open(obstacle.filter(|obstacle| obstacle.is_open()));
        match left_open {
            Some(open) => self.keep(&mut kept, open),
            None => self.forget(&mut kept),
        }
        self.was_seen()
    }

    fn was_seen(&self) -> bool {
        lock(&self.calls).is_seen
    }

    fn note_open(&self, open: Option<&EntryObstacle>) {
        let mut calls = lock(&self.calls);
        if calls.open.as_ref() != open {
            *calls = Calls { open: open.cloned(), is_seen: false };
        }
    }

    /// Keeps a call beyond the agent's end, or finds one that an earlier agent has kept of the very same files.
    fn keep(&self, kept: &mut Kept, open: String) {
        if *kept == Kept::Unread {
            let is_same = disk::read_text(&*self.disk, &self.path).is_ok_and(|text| text == open);
            if is_same {
                self.see();
                *kept = Kept::Call(open);
                return;
            }
        }
        if !self.was_seen() {
            self.forget(kept);
        } else if *kept != Kept::Call(open.clone()) {
            let content = &mut open.as_bytes();
            warn_of(disk::replace(&*self.disk, &self.path, content, FileAttributes::Mode(0o600)));
            *kept = Kept::Call(open);
        }
    }

    fn forget(&self, kept: &mut Kept) {
        if *kept != Kept::Nothing {
            warn_of(disk::remove(&*self.disk, &self.path));
            *kept = Kept::Nothing;
        }
    }
}

/// Without the file a later agent waits for another call, or believes a call of the same files at an earlier time.
fn warn_of(done: Result<(), DiskError>) {
    if let Err(error) = done {
        log::warn!(target: SCOPE, "a restarted agent may not know whether the runtime called the plugin: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::disk::Real;
    use cni_core::net_dir::Uncalled;
    use std::fs;
    use std::path::Path;

    fn agent(folder: &Path) -> SeenCalls {
        SeenCalls::new(Arc::new(Real), folder.join(FILE_NAME))
    }

    fn open(file: &str) -> EntryObstacle {
        EntryObstacle::Uncalled(Uncalled::Standalone(file.to_owned()))
    }

    fn note(agent: &SeenCalls, files: &str) -> bool {
        agent.note(Some(&open("a.conf")), Some(files.to_owned()))
    }

    #[test]
    fn a_restarted_agent_knows_the_call_of_the_same_files_and_of_no_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = agent(folder.path());
        assert!(!note(&first, "files"));
        assert!(!note(&agent(folder.path()), "files"), "no call was seen");
        first.see();
        assert!(note(&first, "files"));
        assert!(note(&agent(folder.path()), "files"));
        assert!(!note(&agent(folder.path()), "other files"));
        assert!(!note(&agent(folder.path()), "files"), "it was about other files since");
    }

    #[test]
    fn the_files_of_the_last_moment_count() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = agent(folder.path());
        note(&first, "files");
        first.see();
        assert!(note(&first, "files") && note(&first, "changed while it ran"));
        assert!(note(&agent(folder.path()), "changed while it ran"));
    }

    #[test]
    fn what_was_not_open_meanwhile_is_forgotten() {
        for earlier in [true, false] {
            let folder = tempfile::tempdir().expect("a folder");
            let mut one = agent(folder.path());
            note(&one, "files");
            one.see();
            note(&one, "files");
            if earlier {
                one = agent(folder.path());
            }
            assert!(!one.note(None, None));
            assert!(!note(&one, "files") && !note(&agent(folder.path()), "files"));
        }
    }

    #[test]
    fn an_entry_that_the_agent_restores_changes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let missing = EntryObstacle::Missing("a.conf".to_owned());
        let first = agent(folder.path());
        note(&first, "files");
        first.see();
        note(&first, "files");
        assert!(first.note(Some(&missing), None));
        let second = agent(folder.path());
        assert!(!second.note(Some(&missing), None));
        assert!(note(&second, "files"));
    }

    #[test]
    fn junk_proves_nothing_and_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE_NAME);
        for junk in [&b""[..], b"file", b"files\n", b"\xff\xfe", &[b'x'; 5 << 20]] {
            fs::write(&path, junk).expect("writes");
            let one = agent(folder.path());
            assert!(!note(&one, "files"));
            one.see();
            assert!(note(&one, "files"));
            assert_eq!(fs::read_to_string(&path).expect("a text"), "files");
        }
    }

    /// The run directory may be read-only or full: the agent that saw the call is ready all the same.
    #[test]
    fn what_cannot_be_kept_counts_for_this_agent() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join(FILE_NAME)).expect("makes");
        let one = agent(folder.path());
        assert!(!note(&one, "files"));
        one.see();
        assert!(note(&one, "files") && !note(&agent(folder.path()), "files"));
    }
}
