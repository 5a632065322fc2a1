//! Network namespaces: opening, comparing, running something in one.
//!
//! A path says little: two paths may name the same namespace, and one path may name different ones over time. The
//! device and inode of the opened file say which it is (namespaces(7)).

use crate::system_error::SystemError;
use nix::{
    errno::Errno,
    fcntl::OFlag,
    sched::{CloneFlags, setns, unshare},
    sys::{
        stat::fstat,
        statfs::{FsType, fstatfs},
    },
};
use std::{
    fs::{self, File},
    marker::PhantomData,
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    thread,
};

/// The file system that namespace files live on (linux/magic.h).
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);

/// Which network namespace it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetnsId {
    device: u64,
    inode: u64,
}

impl NetnsId {
    /// That of whatever file is at a path; it is a namespace's only if it equals the identity of one. Takes one system call, where
    /// [`Netns::open`] takes three.
    ///
    /// # Errors
    /// Nothing is there.
    pub fn at(path: &Path) -> std::io::Result<Self> {
        let found = fs::metadata(path)?;
        Ok(Self { device: found.dev(), inode: found.ino() })
    }

    /// Its inode: all network namespaces are on one device.
    #[must_use]
    pub const fn inode(self) -> u64 {
        self.inode
    }
}

/// An open network namespace.
#[derive(Debug)]
pub struct Netns {
    path: PathBuf,
    file: File,
    id: NetnsId,
}

/// Why a network namespace cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetnsError {
    /// The file cannot be opened.
    #[error("cannot open network namespace {path}: {cause}; has the pod's sandbox been removed?", path = .path.display())]
    Open {
        /// The path as given.
        path: PathBuf,
        /// What the kernel said.
        cause: std::io::Error,
    },
    /// The file is something else.
    #[error("{path} is not a network namespace", path = .path.display())]
    NotANamespace {
        /// The path as given.
        path: PathBuf,
    },
    /// The kernel refuses to enter it.
    #[error("cannot enter network namespace {path}: {cause}; CAP_SYS_ADMIN is needed", path = .path.display())]
    Enter {
        /// The path as given.
        path: PathBuf,
        /// What the kernel said.
        cause: SystemError,
    },
    /// No thread could be started, or it died.
    #[error("the thread inside network namespace {path} failed: {cause}", path = .path.display())]
    Thread {
        /// The path as given.
        path: PathBuf,
        /// What happened.
        cause: String,
    },
}

impl Netns {
    /// The owner of the calling thread's network namespace: the root of the user namespace it belongs to, as an id out
    /// here; the kernel gives the namespace's settings to that user. `None` where /proc does not say.
    #[must_use]
    pub fn owner_here() -> Option<u32> {
        fs::metadata("/proc/sys/net/core/somaxconn").map(|metadata| metadata.uid()).ok()
    }

    /// Opens the namespace behind a path. Whether it is a network namespace turns out only on entering it.
    ///
    /// # Errors
    /// The path cannot be opened, or is not a namespace.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, NetnsError> {
        let path = path.as_ref().to_owned();
        // Do not wait: with a FIFO in place of a namespace, a writer may never come.
        let opened = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&path);
        let file = match opened {
            Ok(file) => file,
            Err(cause) => return Err(NetnsError::Open { path, cause }),
        };
        let on_nsfs = fstatfs(&file).is_ok_and(|fs| fs.filesystem_type() == NSFS_MAGIC);
        match fstat(&file) {
            Ok(stat) if on_nsfs => {
                Ok(Self { path, file, id: NetnsId { device: stat.st_dev, inode: stat.st_ino } })
            }
            Ok(_) | Err(_) => Err(NetnsError::NotANamespace { path }),
        }
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// /proc is not mounted.
    pub fn current() -> Result<Self, NetnsError> {
        Self::open("/proc/thread-self/ns/net")
    }

    /// Which namespace it is.
    #[must_use]
    pub const fn id(&self) -> NetnsId {
        self.id
    }

    /// The path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is the calling thread's own.
    ///
    /// # Errors
    /// /proc is not mounted.
    pub fn is_own(&self) -> Result<bool, NetnsError> {
        Ok(Self::current()?.id == self.id)
    }

    /// Runs something inside the namespace, on a thread that is made for it and never used again, so that no other
    /// work can end up in the wrong namespace. The rest of the process stays where it is.
    ///
    /// Namespaces of another user namespace (pods with `hostUsers: false`) can be entered as well: a privileged
    /// process of the node has its capabilities in all user namespaces below its own (user_namespaces(7)).
    ///
    /// # Errors
    /// It is not a network namespace or cannot be entered, no thread can be made, or `work` panics.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        let done = DisposableThread::run(|thread| {
            thread.enter(self)?;
            Ok(work())
        });
        done.unwrap_or_else(|cause| Err(NetnsError::Thread { path: self.path.clone(), cause }))
    }

    /// Runs something in the namespace that a setting names by this path. If the path is empty or names the calling
    /// thread's own namespace, it runs right here, which needs no privilege.
    ///
    /// # Errors
    /// Those of [`Netns::open`] and [`Netns::run`].
    pub fn run_in<T: Send>(path: &str, work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        if path.is_empty() {
            return Ok(work());
        }
        let namespace = Self::open(path)?;
        if namespace.is_own()? { Ok(work()) } else { namespace.run(work) }
    }
}

/// The calling thread, if it may change its network namespace: it is made for one piece of work and never used again.
#[derive(Debug)]
pub struct DisposableThread {
    /// Not to be handed to another thread.
    of_this_thread: PhantomData<*const ()>,
}

impl DisposableThread {
    /// Runs something on a new thread, which may enter one network namespace after the other, and waits for it.
    ///
    /// # Errors
    /// What happened: no thread can be made, or `work` panics.
    pub fn run<T: Send>(work: impl FnOnce(&Self) -> T + Send) -> Result<T, String> {
        thread::scope(|scope| {
            let thread = thread::Builder::new()
                .name("netns".to_owned())
                .spawn_scoped(scope, || work(&Self { of_this_thread: PhantomData }))
                .map_err(|cause| cause.to_string())?;
            thread.join().map_err(|panic| {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
            })
        })
    }

    /// Moves the thread into a new namespace, which has no name and ends with the thread, or when it enters another one.
    ///
    /// # Errors
    /// No namespace can be made; the thread is where it was.
    pub fn enter_new(&self) -> Result<(), SystemError> {
        unshare(CloneFlags::CLONE_NEWNET).map_err(SystemError)
    }

    /// Moves the thread into a namespace, where it stays until it enters another one.
    ///
    /// # Errors
    /// It is not a network namespace, or cannot be entered; the thread is where it was.
    pub fn enter(&self, namespace: &Netns) -> Result<(), NetnsError> {
        setns(namespace.file.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|cause| {
            let path = namespace.path.clone();
            // A namespace of another kind (setns(2)).
            let is_another = cause == Errno::EINVAL;
            if is_another {
                NetnsError::NotANamespace { path }
            } else {
                NetnsError::Enter { path, cause: SystemError(cause) }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_namespaces_can_be_opened() {
        assert!(matches!(Netns::open("/nonexistent"), Err(NetnsError::Open { .. })));
        for path in ["/etc/hostname", "/proc/self/status", "/proc/self/ns", "/dev/null", "/"] {
            let opened = Netns::open(path);
            assert!(matches!(opened, Err(NetnsError::NotANamespace { .. })), "{path}: {opened:?}");
        }
        let pipe = std::env::temp_dir().join(format!("netns-apply-{}-pipe", std::process::id()));
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let opened = Netns::open(&pipe);
        std::fs::remove_file(&pipe).unwrap();
        assert!(matches!(opened, Err(NetnsError::NotANamespace { .. })), "{opened:?}");
        let own = Netns::current().unwrap();
        assert!(own.is_own().unwrap());
    }

    #[test]
    fn a_pipe_nobody_writes_to_is_no_namespace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(Netns::open(&path), Err(NetnsError::NotANamespace { .. })));
    }

    #[test]
    fn a_namespace_of_another_kind_is_none_of_the_network() {
        let other = Netns::open("/proc/self/ns/uts").unwrap();
        let entered = other.run(|| ());
        assert!(matches!(entered, Err(NetnsError::NotANamespace { .. })), "{entered:?}");
    }
}
