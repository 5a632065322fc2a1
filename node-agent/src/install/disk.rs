//! Effects on files, behind a seam: production has [`Real`], tests put faults and power failures in.
//!
//! [`replace`] is the only way a file of the node changes: a complete temporary file, synced, renamed over the old one, the directory
//! synced. A reader sees the old file or the new one.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

/// The end of a temporary file's name. No runtime loads such a file or executes it.
pub const TEMPORARY: &str = ".istio-cni-tmp";
/// The end of the name of a directory that is being prepared. Agents that know no such directories leave it alone.
pub const PREPARED: &str = ".istio-cni-new";
/// How much is copied at a time.
const CHUNK: usize = 64 * 1024;
/// How long another agent is waited for. It holds a lock for some milliseconds, and longer only where the disk is slow.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// How often it is asked for.
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// The largest file that is read whole. Configurations have a few KiB; a larger one is a mistake.
pub const LARGEST: u64 = 4 * 1024 * 1024;

/// What the agent does with files.
pub trait Disk: Send + Sync {
    /// The names in a directory.
    ///
    /// # Errors
    /// When it cannot be listed.
    fn list(&self, directory: &Path) -> io::Result<Vec<OsString>>;
    /// What is known of a file without opening it; links are followed.
    ///
    /// # Errors
    /// It does not exist.
    fn stat(&self, path: &Path) -> io::Result<Stat>;
    /// Whether a path is a link with a missing target. A disk without links has none.
    fn leads_nowhere(&self, _path: &Path) -> bool {
        false
    }
    /// Where a symbolic link leads, if a path is one. A disk without links has none.
    fn link(&self, _path: &Path) -> Option<PathBuf> {
        None
    }
    /// Opens a file to be read.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + '_>>;
    /// Makes a new file.
    ///
    /// # Errors
    /// When it is there or cannot be made.
    fn create(&self, path: &Path, mode: u32) -> io::Result<Box<dyn PendingFile + '_>>;
    /// Makes an empty directory. A disk without directories of its own makes none.
    ///
    /// # Errors
    /// When it is there or cannot be made.
    fn make_directory(&self, _path: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Removes a directory.
    ///
    /// # Errors
    /// It is not empty, cannot be removed, or does not exist.
    fn remove_directory(&self, _path: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Gives a file or directory another name in the same directory, in place of the file or empty directory that had that name.
    ///
    /// # Errors
    /// When it cannot.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    ///
    /// # Errors
    /// It cannot be removed, or does not exist.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Keeps other agents from working on directories until the lock is dropped. Missing ones are skipped.
    ///
    /// # Errors
    /// Another process keeps working on one; the error is [`io::ErrorKind::WouldBlock`].
    fn lock(&self, directories: &[&Path]) -> io::Result<Lock>;
    /// Makes the names in a directory outlast a power failure.
    ///
    /// # Errors
    /// When it cannot.
    fn sync_directory(&self, directory: &Path) -> io::Result<()>;
}

/// A lock on directories, by flock(2) on themselves: a container sees the node's own inodes, and no lock file remains.
#[derive(Debug, Default)]
pub struct Lock {
    _held: Vec<File>,
}

impl Lock {
    /// Always in the same order, whatever the names, so that two agents never wait for each other; each once, because a directory that is given
    /// twice would wait for itself.
    fn take(directories: &[&Path]) -> io::Result<Self> {
        let mut opened = BTreeMap::new();
        for directory in directories {
            match File::open(directory) {
                Ok(file) => {
                    let known = file.metadata()?;
                    opened.insert((known.dev(), known.ino()), file);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let mut left = LOCK_PATIENCE;
        for file in opened.values() {
            while let Err(refused) = file.try_lock() {
                match refused {
                    TryLockError::WouldBlock if !left.is_zero() => {
                        // Not by the clock: while the machine stands still, locks are not released.
                        thread::sleep(LOCK_PAUSE);
                        left = left.saturating_sub(LOCK_PAUSE);
                    }
                    TryLockError::WouldBlock => return Err(io::ErrorKind::WouldBlock.into()),
                    // Some file systems have no locks.
                    TryLockError::Error(error) if error.kind() == io::ErrorKind::Unsupported => break,
                    TryLockError::Error(error) => return Err(error),
                }
            }
        }
        Ok(Self { _held: opened.into_values().collect() })
    }
}

/// A file that is being written.
pub trait PendingFile: Write {
    /// Sets its owner and mode.
    ///
    /// # Errors
    /// When it cannot.
    fn set_attributes(&mut self, attributes: FileAttributes) -> io::Result<()>;
    /// Makes the content outlast a power failure.
    ///
    /// # Errors
    /// When it cannot.
    fn sync(&mut self) -> io::Result<()>;
}

/// What is known of a file without reading it. Two equal ones mean that the file has not been written in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Whether it is a regular file.
    pub is_file: bool,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// How many names it has. A directory without one was removed, and lives on under a mount only.
    pub links: u64,
    /// Length in bytes.
    pub length: u64,
    /// Device and inode.
    pub inode: (u64, u64),
    /// Last change of the file or of what is known of it: seconds and nanoseconds.
    pub changed: (i64, i64),
}

/// The files of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Real;

impl Disk for Real {
    fn list(&self, directory: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect()
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        fs::metadata(path).map(|known| Stat::from(&known))
    }

    fn leads_nowhere(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok() && matches!(path.try_exists(), Ok(false))
    }

    fn link(&self, path: &Path) -> Option<PathBuf> {
        fs::read_link(path).ok()
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + '_>> {
        // A pipe with a configuration's name must not stop the agent.
        let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
        Ok(Box::new(file))
    }

    fn create(&self, path: &Path, mode: u32) -> io::Result<Box<dyn PendingFile + '_>> {
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
        Ok(Box::new(file))
    }

    fn make_directory(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o755).create(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn lock(&self, directories: &[&Path]) -> io::Result<Lock> {
        Lock::take(directories)
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        File::open(directory)?.sync_all()
    }
}

impl PendingFile for File {
    fn set_attributes(&mut self, attributes: FileAttributes) -> io::Result<()> {
        if let FileAttributes::Like(stat) = attributes {
            // Without CAP_CHOWN the owner is us. The mode comes second, because a change of owner clears set-id bits.
            let _ = std::os::unix::fs::fchown(&*self, Some(stat.uid), Some(stat.gid));
        }
        self.set_permissions(fs::Permissions::from_mode(attributes.mode()))
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()?;
        // The page cache of these files need not count as this container's memory.
        let _ = nix::fcntl::posix_fadvise(&*self, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        Ok(())
    }
}

impl From<&fs::Metadata> for Stat {
    fn from(known: &fs::Metadata) -> Self {
        Self {
            is_file: known.is_file(),
            mode: known.mode() & 0o7777,
            uid: known.uid(),
            gid: known.gid(),
            links: known.nlink(),
            length: known.len(),
            inode: (known.dev(), known.ino()),
            changed: (known.ctime(), known.ctime_nsec()),
        }
    }
}

/// Something that failed, and with which file.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {}: {error}{}", .path.display(), hint(error))]
pub struct DiskError {
    /// What was being done.
    pub doing: &'static str,
    /// With which file.
    pub path: PathBuf,
    /// What went wrong.
    #[source]
    pub error: io::Error,
}

/// What an operator can do about an error.
fn hint(error: &io::Error) -> &'static str {
    let hints = [
        (
            io::ErrorKind::ReadOnlyFilesystem,
            " (the node keeps this directory read-only; mount the directories its runtime uses instead)",
        ),
        (io::ErrorKind::StorageFull, " (free some space on the node)"),
        (
            io::ErrorKind::WouldBlock,
            " (another agent is at work on the node's directories, or a run by hand)",
        ),
        (
            io::ErrorKind::PermissionDenied,
            " (if another user owns it, add CAP_DAC_OVERRIDE; otherwise check the container's user and the node's SELinux labels)",
        ),
    ];
    hints.iter().find(|(kind, _)| *kind == error.kind()).map_or("", |(_, hint)| hint)
}

/// Adds to an error what was being done with which file.
pub(crate) fn context<T>(result: io::Result<T>, doing: &'static str, path: &Path) -> Result<T, DiskError> {
    result.map_err(|error| DiskError { doing, path: path.to_owned(), error })
}

/// Why a file could not be read, for people. Of a symbolic link, with where it leads: on the node that may be another place than here.
#[must_use]
pub fn unread(disk: &dyn Disk, path: &Path, error: &io::Error) -> String {
    let Some(target) = disk.link(path) else { return error.to_string() };
    let (target, remedy) = (target.display(), "or put a copy in the link's place");
    let is = |kind: io::ErrorKind| error.kind() == kind;
    if is(io::ErrorKind::NotFound) {
        format!(
            "a symbolic link to {target}, which is missing here; mount that path of the node into the agent's container, {remedy}"
        )
    } else if is(io::ErrorKind::PermissionDenied) {
        format!(
            "a symbolic link to {target}, which the agent may not read: {error}; set LANDLOCK=false (chart: landlock) if the node's permissions allow it, {remedy}"
        )
    } else {
        format!("a symbolic link to {target}: {error}")
    }
}

/// Reads a small file.
///
/// # Errors
/// When it cannot be read or is not small.
pub fn read(disk: &dyn Disk, path: &Path) -> Result<Vec<u8>, DiskError> {
    let read = || {
        let mut content = Vec::new();
        disk.open(path)?.take(LARGEST + 1).read_to_end(&mut content)?;
        if content.len() as u64 > LARGEST {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "larger than 4 MiB"));
        }
        Ok(content)
    };
    context(read(), "read", path)
}

/// Reads a small file as text.
///
/// # Errors
/// It cannot be read or is not text.
pub fn read_text(disk: &dyn Disk, path: &Path) -> Result<String, DiskError> {
    let text = String::from_utf8(read(disk, path)?);
    let text = text.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not UTF-8"));
    context(text, "read", path)
}

/// The owner and mode of a file that is written.
#[derive(Debug, Clone, Copy)]
pub enum FileAttributes {
    /// A mode; the owner is us.
    Mode(u32),
    /// Like another file.
    Like(Stat),
}

impl FileAttributes {
    const fn mode(self) -> u32 {
        match self {
            Self::Mode(mode) => mode,
            Self::Like(stat) => stat.mode,
        }
    }
}

/// Puts content at a path, at once and whole, so that it outlasts a power failure. On failure the path is as it was, and no temporary
/// file stays; only where the last step failed, the sync of the directory, the new content is there and may be lost with the power.
///
/// # Errors
/// When a step fails.
pub fn replace(
    disk: &dyn Disk,
    path: &Path,
    content: &mut dyn Read,
    attributes: FileAttributes,
) -> Result<(), DiskError> {
    replace_if(disk, path, content, attributes, &|_| Ok(()))
}

/// Like [`replace`], but only if `approve` does not object once the content is on disk, in the temporary file it is given; otherwise the path
/// stays as it is.
///
/// # Errors
/// When a step fails, or the objection.
pub fn replace_if(
    disk: &dyn Disk,
    path: &Path,
    content: &mut dyn Read,
    attributes: FileAttributes,
    approve: &dyn Fn(&Path) -> io::Result<()>,
) -> Result<(), DiskError> {
    let temporary = temporary(path, TEMPORARY);
    let written = write(disk, &temporary, content, attributes)
        .and_then(|()| context(approve(&temporary), "replace", path))
        .and_then(|()| context(disk.rename(&temporary, path), "replace", path));
    match written {
        Ok(()) => context(disk.sync_directory(directory_of(path)), "sync the directory of", path),
        Err(error) => {
            // What cannot be removed now is removed at the next start.
            let _ = disk.remove(&temporary);
            Err(error)
        }
    }
}

fn write(
    disk: &dyn Disk,
    path: &Path,
    content: &mut dyn Read,
    attributes: FileAttributes,
) -> Result<(), DiskError> {
    let mut file = context(disk.create(path, attributes.mode() & 0o700), "create", path)?;
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = context(content.read(&mut chunk), "read the source of", path)?;
        if count == 0 {
            break;
        }
        context(file.write_all(&chunk[..count]), "write", path)?;
    }
    context(file.set_attributes(attributes), "set the mode of", path)?;
    context(file.sync(), "sync", path)
}

/// The error for a file that another program changed concurrently.
pub(crate) fn moved() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "another program changed it concurrently")
}

/// Puts a directory with these files at a path where none is, at once and whole. On failure the path is as it was.
///
/// # Errors
/// When a step fails; an interrupted one where another program has made the directory concurrently.
pub fn place_directory(
    disk: &dyn Disk,
    path: &Path,
    files: &[(&str, &str)],
    attributes: FileAttributes,
) -> Result<(), DiskError> {
    let prepared = temporary(path, PREPARED);
    context(disk.make_directory(&prepared), "create", &prepared)?;
    let fill =
        |(name, text): &(&str, &str)| write(disk, &prepared.join(name), &mut text.as_bytes(), attributes);
    let placed = files
        .iter()
        .try_for_each(fill)
        .and_then(|()| context(disk.sync_directory(&prepared), "sync", &prepared))
        .and_then(|()| context(disk.rename(&prepared, path).map_err(concurrent), "place", path));
    match placed {
        Ok(()) => context(disk.sync_directory(directory_of(path)), "sync the directory of", path),
        Err(error) => {
            // What cannot be removed now is removed at the next start.
            let _ = remove_directory(disk, &prepared);
            Err(error)
        }
    }
}

fn concurrent(error: io::Error) -> io::Error {
    let is_there = [io::ErrorKind::DirectoryNotEmpty, io::ErrorKind::AlreadyExists].contains(&error.kind());
    if is_there { moved() } else { error }
}

/// Removes a directory with the files in it.
///
/// # Errors
/// When it cannot.
pub fn remove_directory(disk: &dyn Disk, path: &Path) -> Result<(), DiskError> {
    for name in context(disk.list(path), "list", path)? {
        context(disk.remove(&path.join(&name)), "remove a file of", path)?;
    }
    context(disk.remove_directory(path), "remove", path)?;
    context(disk.sync_directory(directory_of(path)), "sync the directory of", path)
}

/// Removes a directory of which the file of this name is all that is left; where another program keeps files there, that file alone. A directory that is
/// being removed has the name of one that is being prepared.
///
/// # Errors
/// When it cannot.
pub fn discard_directory(disk: &dyn Disk, path: &Path, own: &str) -> Result<(), DiskError> {
    let has_own_alone = |path: &Path| context(disk.list(path), "list", path).map(|names| names == [own]);
    if !has_own_alone(path)? {
        return remove(disk, &path.join(own));
    }
    let aside = temporary(path, PREPARED);
    context(disk.rename(path, &aside), "remove", path)?;
    // Else a power failure may bring it back without that file.
    let synced = context(disk.sync_directory(directory_of(path)), "sync the directory of", path);
    let removed = match synced.and_then(|()| has_own_alone(&aside)) {
        Ok(true) => remove_directory(disk, &aside),
        Ok(false) => Ok(()),
        Err(error) => Err(error),
    };
    // Another program has just put a file there, or a later attempt may succeed.
    if disk.stat(&aside.join(own)).is_ok() {
        context(disk.rename(&aside, path), "restore", path)?;
    }
    removed
}

/// Has a runtime that watches a directory, but not those in it, read everything again: a file comes and goes that no runtime loads.
/// CRI-O reads when one is made, containerd when one is removed.
///
/// # Errors
/// When it cannot be made or removed.
pub fn nudge(disk: &dyn Disk, directory: &Path) -> Result<(), DiskError> {
    let scratch = temporary(&directory.join("reload"), TEMPORARY);
    context(disk.create(&scratch, 0o600).map(drop), "create", &scratch)?;
    context(disk.remove(&scratch), "remove", &scratch)
}

/// Removes a file so that it stays away after a power failure. A missing file is fine.
///
/// # Errors
/// When it cannot.
pub fn remove(disk: &dyn Disk, path: &Path) -> Result<(), DiskError> {
    match disk.remove(path) {
        Ok(()) => context(disk.sync_directory(directory_of(path)), "sync the directory of", path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => context(Err(error), "remove", path),
    }
}

/// Removes the files of a directory whose names are those of leftovers.
///
/// # Errors
/// When it cannot.
pub fn sweep(
    disk: &dyn Disk,
    directory: &Path,
    is_leftover: &dyn Fn(&str) -> bool,
) -> Result<usize, DiskError> {
    let names = context(disk.list(directory), "list", directory)?;
    let mut count = 0;
    for name in names.iter().filter(|name| is_leftover(&name.to_string_lossy())) {
        remove(disk, &directory.join(name))?;
        count += 1;
    }
    Ok(count)
}

/// Whether bytes occur in a file, however long it is and whatever else is in it.
///
/// # Errors
/// When it cannot be read.
pub fn mentions(disk: &dyn Disk, path: &Path, wanted: &[u8]) -> io::Result<bool> {
    let mut file = disk.open(path)?;
    let mut window = Vec::new();
    loop {
        let count = (&mut *file).take(CHUNK as u64).read_to_end(&mut window)?;
        if window.windows(wanted.len()).any(|part| part == wanted) {
            return Ok(true);
        }
        if count < CHUNK {
            return Ok(false);
        }
        // It may begin in this piece and end in the next one.
        window.drain(..window.len() - (wanted.len() - 1));
    }
}

/// Whether a file has this content.
///
/// # Errors
/// One of them cannot be read. A missing file is not an error.
pub fn has_content(disk: &dyn Disk, path: &Path, content: &mut dyn Read) -> io::Result<bool> {
    let mut file = match disk.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let (mut there, mut wanted) = (Vec::new(), Vec::new());
    loop {
        there.clear();
        wanted.clear();
        (&mut *file).take(CHUNK as u64).read_to_end(&mut there)?;
        (&mut *content).take(CHUNK as u64).read_to_end(&mut wanted)?;
        if there != wanted || there.is_empty() {
            return Ok(there == wanted);
        }
    }
}

/// An unused name beside a file, with this end.
fn temporary(path: &Path, end: &str) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // Agents in containers all have the same process id; two of them may overlap.
    let unique = format!(".{:x}.{:x}", now.as_nanos(), COUNT.fetch_add(1, Ordering::Relaxed));
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(unique);
    name.push(end);
    path.with_file_name(name)
}

fn directory_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}
