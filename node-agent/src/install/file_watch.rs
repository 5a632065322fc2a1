//! The node's directories, watched with inotify(7).
//!
//! Only what can change the outcome wakes the agent: reading does not, other files do not, and a burst of changes is one wake-up.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::unix::AsyncFd;

/// How long a burst of changes may last before the agent handles it.
const BURST: Duration = Duration::from_millis(100);

/// A directory, and which of its names matter.
pub struct WatchedDir {
    /// The directory.
    pub directory: PathBuf,
    /// Whether a name matters.
    pub matters: Box<dyn Fn(&str) -> bool + Send + Sync>,
}

impl WatchedDir {
    /// A directory all of whose names matter.
    #[must_use]
    pub fn all(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), matters: Box::new(|_| true) }
    }
}

/// What has happened; the graver one is the greater one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileEvent {
    /// Files changed.
    Files,
    /// A directory went away or too much happened at once: the caller recreates the watch, and anything may have changed.
    Lost,
}

/// Watches directories.
pub struct FileWatch {
    queue: AsyncFd<InotifyQueue>,
    watched: Vec<(WatchDescriptor, WatchedDir)>,
    /// The events of the current burst.
    pending: Option<FileEvent>,
}

/// The run-time asks for a raw descriptor as well, which the library does not give away itself.
struct InotifyQueue(Inotify);

impl AsRawFd for InotifyQueue {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl FileWatch {
    /// Starts watching. Needs a tokio run-time.
    ///
    /// # Errors
    /// When a directory is missing, or the user has no inotify instance or watch left.
    pub fn new(watched: Vec<WatchedDir>) -> io::Result<Self> {
        let queue = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(explain)?;
        let flags = AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let add = |watched: WatchedDir| {
            let added = queue.add_watch(&watched.directory, flags);
            let named = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", watched.directory.display()))
            };
            Ok((added.map_err(explain).map_err(named)?, watched))
        };
        let watched = watched.into_iter().map(add).collect::<io::Result<_>>()?;
        Ok(Self { queue: to_be_read(InotifyQueue(queue))?, watched, pending: None })
    }

    /// Waits for a change and for the end of the burst it belongs to. May be dropped and called again.
    ///
    /// # Errors
    /// When events cannot be read.
    pub async fn changed(&mut self) -> io::Result<FileEvent> {
        while self.pending.is_none() {
            self.pending = self.next().await?;
        }
        tokio::time::sleep(BURST).await;
        let rest = self.drain()?;
        Ok(self.pending.take().max(rest).unwrap_or(FileEvent::Files))
    }

    async fn next(&mut self) -> io::Result<Option<FileEvent>> {
        let mut ready = self.queue.readable().await?;
        ready.clear_ready();
        drop(ready);
        self.drain()
    }

    /// All pending events, as one.
    fn drain(&self) -> io::Result<Option<FileEvent>> {
        let mut change = None;
        loop {
            match self.queue.get_ref().0.read_events() {
                Ok(events) => {
                    for event in &events {
                        change = change.max(self.meaning(event));
                    }
                }
                Err(Errno::EAGAIN) => return Ok(change),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn meaning(&self, event: &InotifyEvent) -> Option<FileEvent> {
        let lost = AddWatchFlags::IN_Q_OVERFLOW
            | AddWatchFlags::IN_IGNORED
            | AddWatchFlags::IN_UNMOUNT
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        if event.mask.intersects(lost) {
            return Some(FileEvent::Lost);
        }
        let name = event.name.as_deref().and_then(OsStr::to_str)?;
        let watched = self.watched.iter().filter(|(descriptor, _)| *descriptor == event.wd);
        watched.map(|(_, watched)| &watched.matters).any(|matters| matters(name)).then_some(FileEvent::Files)
    }
}

/// Has the run-time wait until something can be read. Needs a tokio run-time.
#[expect(
    deprecated,
    reason = "the replacement is unsafe, for types that may change their descriptor; ours has the same for life"
)]
pub(crate) fn to_be_read<T: AsRawFd>(source: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(source, tokio::io::Interest::READABLE)
}

fn explain(error: Errno) -> io::Error {
    if error == Errno::EMFILE {
        io::Error::other("no inotify instance left; raise the node's fs.inotify.max_user_instances")
    } else if error == Errno::ENOSPC {
        io::Error::other("no inotify watch left; raise the node's fs.inotify.max_user_watches")
    } else {
        error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    fn conf_files(directory: &Path) -> Vec<WatchedDir> {
        let matters = Box::new(|name: &str| Path::new(name).extension().is_some_and(|end| end == "conf"));
        vec![WatchedDir { directory: directory.to_owned(), matters }]
    }

    async fn within(seconds: u64, watch: &mut FileWatch) -> Option<FileEvent> {
        tokio::time::timeout(Duration::from_secs(seconds), watch.changed())
            .await
            .ok()
            .map(|change| change.expect("reads"))
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_burst_is_one_change() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut watch = FileWatch::new(conf_files(folder.path())).expect("watches");
        for count in 0..500 {
            fs::write(folder.path().join(format!("{}.conf", count % 7)), "x").expect("writes");
        }
        assert_eq!(within(60, &mut watch).await, Some(FileEvent::Files));
        assert_eq!(within(1, &mut watch).await, None);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn reading_and_other_names_are_no_change() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("a.conf"), "x").expect("writes");
        let mut watch = FileWatch::new(conf_files(folder.path())).expect("watches");
        fs::read(folder.path().join("a.conf")).expect("reads");
        fs::write(folder.path().join("a.conf.tmp"), "x").expect("writes");
        assert_eq!(within(1, &mut watch).await, None);
        fs::rename(folder.path().join("a.conf.tmp"), folder.path().join("b.conf")).expect("renames");
        assert_eq!(within(60, &mut watch).await, Some(FileEvent::Files));
        fs::remove_file(folder.path().join("a.conf")).expect("removes");
        assert_eq!(within(60, &mut watch).await, Some(FileEvent::Files));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_directory_that_goes_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("net.d");
        fs::create_dir(&inner).expect("makes");
        let mut watch = FileWatch::new(conf_files(&inner)).expect("watches");
        fs::rename(&inner, folder.path().join("gone")).expect("renames");
        assert_eq!(within(60, &mut watch).await, Some(FileEvent::Lost));
        assert!(FileWatch::new(conf_files(&inner)).is_err_and(|error| error.to_string().contains("net.d")));
    }
}
