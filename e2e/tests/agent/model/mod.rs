//! A file system in memory that can lose power.
//!
//! What a program sees is not what outlasts a power failure: content lasts once its file is synced, names last once their directory is.
//! Until then a crash may keep any part of the content, and any number of the directory's changes in their order; directories are
//! independent of each other. Faults can be put into any operation.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use install_cni::install::disk::{Disk, FileAttributes, Lock, PendingFile, Stat};

#[derive(Clone, Default)]
struct Inode {
    seen: (Vec<u8>, u32),
    durable: Option<(Vec<u8>, u32)>,
    changes: i64,
    /// What is in it, if it is a folder in another one.
    inside: Option<Folder>,
}

#[derive(Clone, Default)]
struct Folder {
    seen: BTreeMap<String, usize>,
    durable: BTreeMap<String, usize>,
    /// Changes since the last sync.
    pending: Vec<BTreeMap<String, usize>>,
}

#[derive(Clone, Default)]
struct Files {
    inodes: Vec<Inode>,
    folders: BTreeMap<PathBuf, Folder>,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Everything from this operation on fails: the program is dead.
    Death { at: usize },
    /// This operation fails, and those after it of the same kind; the rest goes on.
    Error { at: usize, errno: i32 },
    /// Writes take a few bytes at a time.
    ShortWrites,
}

/// What the kernel writes at once, at least.
const PAGE: usize = 4096;

/// The file system.
#[derive(Default)]
pub struct Model {
    files: Mutex<Files>,
    fault: Mutex<Option<Fault>>,
    operations: Mutex<usize>,
}

impl Model {
    pub fn folder(&self, path: &str) {
        self.files().folders.insert(path.into(), Folder::default());
    }

    /// Puts a file there for good.
    pub fn put(&self, path: &str, content: &[u8], mode: u32) {
        let path = Path::new(path);
        let mut files = self.files();
        let id = files.inodes.len();
        let seen = (content.to_vec(), mode);
        files.inodes.push(Inode { durable: Some(seen.clone()), seen, ..Inode::default() });
        let folder = files.folder_mut(path.parent().unwrap()).expect("a folder");
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        folder.seen.insert(name.clone(), id);
        folder.durable.insert(name, id);
    }

    pub fn content(&self, path: &str) -> Option<(Vec<u8>, u32)> {
        let files = self.files();
        let id = files.find(Path::new(path)).ok()?;
        Some(files.inodes[id].seen.clone())
    }

    pub fn names(&self, folder: &str) -> Vec<String> {
        self.files().folders[Path::new(folder)].seen.keys().cloned().collect()
    }

    /// All files with their content, shortened if it is long.
    pub fn everything(&self) -> BTreeMap<String, (String, u32)> {
        let shown = |content: Vec<u8>| match content.len() {
            ..3000 => String::from_utf8_lossy(&content).into_owned(),
            length => format!("{length} bytes"),
        };
        self.seen().into_iter().map(|(path, (content, mode))| (path, (shown(content), mode))).collect()
    }

    /// All files with all of their content: what a program can go by.
    pub fn seen(&self) -> BTreeMap<String, (Vec<u8>, u32)> {
        let files = self.files();
        let mut folders: Vec<(PathBuf, &Folder)> =
            files.folders.iter().map(|(path, folder)| (path.clone(), folder)).collect();
        for (path, folder) in folders.clone() {
            let inner = folder
                .seen
                .iter()
                .filter_map(|(name, id)| Some((path.join(name), files.inodes[*id].inside.as_ref()?)));
            folders.extend(inner);
        }
        let all = folders.iter().flat_map(|(path, folder)| {
            folder.seen.iter().map(move |(name, id)| (path.join(name).display().to_string(), *id))
        });
        all.map(|(path, id)| (path, files.inodes[id].seen.clone())).collect()
    }

    pub fn break_at(&self, fault: Option<Fault>) {
        *self.fault.lock().unwrap() = fault;
        *self.operations.lock().unwrap() = 0;
    }

    /// The number of operations since the fault was set.
    pub fn operations(&self) -> usize {
        *self.operations.lock().unwrap()
    }

    pub fn copy(&self) -> Self {
        Self { files: Mutex::new(self.files().clone()), ..Self::default() }
    }

    /// What is left after a power failure; `chance` gives numbers below its argument.
    pub fn after_power_failure(&self, mut chance: impl FnMut(usize) -> usize) -> Self {
        let mut files = self.files().clone();
        let Files { folders, inodes } = &mut files;
        let inner = inodes.iter_mut().filter_map(|inode| inode.inside.as_mut());
        for folder in folders.values_mut().chain(inner) {
            let kept = chance(folder.pending.len() + 1);
            if kept > 0 {
                folder.durable = folder.pending[kept - 1].clone();
            }
            folder.pending.clear();
            folder.seen = folder.durable.clone();
        }
        for inode in &mut files.inodes {
            if inode.durable.as_ref() != Some(&inode.seen) {
                let (content, mode) = inode.seen.clone();
                // Of what is long, whole pages.
                let unit = if content.len() > PAGE { PAGE } else { 1 };
                let kept = chance(content.len() / unit + 1) * unit;
                inode.seen = match (chance(2), &inode.durable) {
                    (0, Some(durable)) => durable.clone(),
                    _ => (content[..kept].to_vec(), mode),
                };
            }
            inode.durable = Some(inode.seen.clone());
        }
        Self { files: Mutex::new(files), ..Self::default() }
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap()
    }

    /// Makes a file or a folder; its number.
    fn make(&self, path: &Path, inode: Inode) -> io::Result<usize> {
        self.operate()?;
        let mut files = self.files();
        if files.find(path).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let id = files.inodes.len();
        files.inodes.push(inode);
        files.change(path.parent().unwrap(), |names| {
            names.insert(name(path), id);
        })?;
        Ok(id)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        self.files().change(path.parent().unwrap(), |names| {
            names.remove(&name(path));
        })
    }

    /// Counts an operation and fails it if that is its fate. Reading is not counted: it changes nothing.
    fn operate(&self) -> io::Result<()> {
        let mut operations = self.operations.lock().unwrap();
        let number = *operations;
        *operations += 1;
        match *self.fault.lock().unwrap() {
            Some(Fault::Death { at }) if number >= at => Err(io::Error::other("dead")),
            Some(Fault::Error { at, errno }) if number >= at => Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::Death { .. } | Fault::Error { .. } | Fault::ShortWrites) | None => Ok(()),
        }
    }
}

impl Files {
    fn folder(&self, path: &Path) -> io::Result<&Folder> {
        match self.folders.get(path) {
            Some(folder) => Ok(folder),
            None => {
                let inode = &self.inodes[self.find(path)?];
                inode.inside.as_ref().ok_or_else(|| io::ErrorKind::NotADirectory.into())
            }
        }
    }

    fn folder_mut(&mut self, path: &Path) -> io::Result<&mut Folder> {
        if !self.folders.contains_key(path) {
            let id = self.find(path)?;
            return self.inodes[id].inside.as_mut().ok_or_else(|| io::ErrorKind::NotADirectory.into());
        }
        self.folders.get_mut(path).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn find(&self, path: &Path) -> io::Result<usize> {
        let folder = self.folder(path.parent().unwrap())?;
        let id = folder.seen.get(path.file_name().unwrap().to_str().unwrap());
        Ok(*id.ok_or(io::ErrorKind::NotFound)?)
    }

    fn change(&mut self, folder: &Path, change: impl FnOnce(&mut BTreeMap<String, usize>)) -> io::Result<()> {
        let folder = self.folder_mut(folder)?;
        change(&mut folder.seen);
        folder.pending.push(folder.seen.clone());
        Ok(())
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

impl Disk for Model {
    fn list(&self, directory: &Path) -> io::Result<Vec<OsString>> {
        let files = self.files();
        let folder = files.folder(directory)?;
        Ok(folder.seen.keys().map(OsString::from).collect())
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        let files = self.files();
        let folder = Stat {
            is_file: false,
            mode: 0o755,
            uid: 0,
            gid: 0,
            links: 1,
            length: 0,
            inode: (0, 0),
            changed: (0, 0),
        };
        if let Some(index) = files.folders.keys().position(|folder| folder == path) {
            return Ok(Stat { inode: (0, index as u64), ..folder });
        }
        let id = files.find(path)?;
        let Inode { seen: (content, mode), changes, inside, .. } = &files.inodes[id];
        let (length, inode) = (content.len() as u64, (1, id as u64));
        Ok(Stat { is_file: inside.is_none(), mode: *mode, length, inode, changed: (*changes, 0), ..folder })
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + '_>> {
        let files = self.files();
        let content = files.inodes[files.find(path)?].seen.0.clone();
        Ok(Box::new(io::Cursor::new(content)))
    }

    fn create(&self, path: &Path, mode: u32) -> io::Result<Box<dyn PendingFile + '_>> {
        let id = self.make(path, Inode { seen: (Vec::new(), mode), ..Inode::default() })?;
        Ok(Box::new(Open { model: self, id }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operate()?;
        assert_eq!(from.parent(), to.parent());
        let mut files = self.files();
        let id = files.find(from)?;
        if files.folder(to).is_ok_and(|there| !there.seen.is_empty()) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        files.change(from.parent().unwrap(), |names| {
            names.remove(&name(from));
            names.insert(name(to), id);
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.files().find(path)?;
        self.unlink(path)
    }

    fn make_directory(&self, path: &Path) -> io::Result<()> {
        let seen = (Vec::new(), 0o755);
        self.make(path, Inode { seen, inside: Some(Folder::default()), ..Inode::default() }).map(drop)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        if !self.files().folder(path)?.seen.is_empty() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        self.unlink(path)
    }

    /// Each model has one agent at a time.
    fn lock(&self, _: &[&Path]) -> io::Result<Lock> {
        Ok(Lock::default())
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        self.operate()?;
        let mut files = self.files();
        let folder = files.folder_mut(directory)?;
        folder.durable = folder.seen.clone();
        folder.pending.clear();
        Ok(())
    }
}

struct Open<'m> {
    model: &'m Model,
    id: usize,
}

impl Write for Open<'_> {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        let short = *self.model.fault.lock().unwrap() == Some(Fault::ShortWrites);
        // What fails has written a part.
        let failed = self.model.operate();
        let length = if short || failed.is_err() { content.len().min(7) } else { content.len() };
        let mut files = self.model.files();
        let inode = &mut files.inodes[self.id];
        inode.seen.0.extend_from_slice(&content[..length]);
        inode.changes += 1;
        failed.map(|()| length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl PendingFile for Open<'_> {
    fn set_attributes(&mut self, attributes: FileAttributes) -> io::Result<()> {
        self.model.operate()?;
        let mode = match attributes {
            FileAttributes::Mode(mode) => mode,
            FileAttributes::Like(stat) => stat.mode,
        };
        self.model.files().inodes[self.id].seen.1 = mode;
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.model.operate()?;
        let mut files = self.model.files();
        let inode = &mut files.inodes[self.id];
        inode.durable = Some(inode.seen.clone());
        Ok(())
    }
}
