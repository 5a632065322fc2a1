//! A log file of limited size that several processes may write to.

use crate::{Level, LogEntry, Sink};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::OnceLock,
    time::{Duration, SystemTime},
};

/// The size at which the file becomes the backup.
const LIMIT: u64 = 10 << 20;
/// How long the backup is kept.
const KEPT: Duration = Duration::from_secs(2 * 24 * 3600);

/// A file of JSON lines: at 10 MB it becomes the one backup (`NAME.1`), which is removed after 2 days.
///
/// The file is opened with the first line. Processes share it without waiting for each other: whichever finds it too
/// large and gets its lock at once moves it away, the others write on.
#[derive(Debug)]
pub struct RollingFile {
    path: PathBuf,
    least: Level,
    limit: u64,
    file: OnceLock<Option<File>>,
}

impl RollingFile {
    /// A file that takes entries of this level and graver ones.
    #[must_use]
    pub fn new(path: PathBuf, least: Level) -> Self {
        Self { path, least, limit: LIMIT, file: OnceLock::new() }
    }

    fn open(&self) -> io::Result<File> {
        let backup = backup(&self.path);
        remove_if_old(&backup);
        let file = append(&self.path)?;
        if file.metadata()?.len() < self.limit {
            return Ok(file);
        }
        // Not `lock`: never block here.
        let moved =
            file.try_lock().is_ok() && is_at(&file, &self.path) && fs::rename(&self.path, &backup).is_ok();
        if moved { append(&self.path) } else { Ok(file) }
    }
}

impl Sink for RollingFile {
    fn write(&self, entry: &LogEntry) {
        if entry.level > self.least {
            return;
        }
        if let Some(mut file) = self.file.get_or_init(|| self.open().ok()).as_ref() {
            let _ = file.write_all((entry.json() + "\n").as_bytes());
        }
    }
}

fn append(path: &Path) -> io::Result<File> {
    // Opening a pipe blocks until it has a reader.
    if fs::metadata(path).is_ok_and(|known| !known.is_file()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
    }
    File::options().create(true).append(true).mode(0o640).open(path)
}

fn backup(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Whether the open file is still the one of this name, or another process has moved it.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((file.metadata(), fs::metadata(path)), (Ok(open), Ok(named)) if id(&open) == id(&named))
}

fn remove_if_old(backup: &Path) {
    let age = fs::metadata(backup)
        .and_then(|metadata| metadata.modified())
        .map(|time| SystemTime::now().duration_since(time).unwrap_or_default());
    if age.is_ok_and(|age| age > KEPT) {
        let _ = fs::remove_file(backup);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(level: Level, message: &str) -> LogEntry {
        let message = message.to_owned();
        LogEntry { time: SystemTime::now(), level, scope: None, caller: None, message, labels: Vec::new() }
    }

    fn rolling(path: &Path, limit: u64) -> RollingFile {
        RollingFile { limit, ..RollingFile::new(path.to_owned(), Level::Info) }
    }

    #[test]
    fn a_full_file_becomes_the_backup() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.log");
        for round in 0..4 {
            let file = rolling(&path, 100);
            file.write(&entry(Level::Debug, "left out"));
            file.write(&entry(Level::Info, &format!("round {round}{}", "x".repeat(100))));
        }
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        assert!(read(&path).contains("round 3") && read(&path).lines().count() == 1);
        assert!(read(&backup(&path)).contains("round 2"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_process_that_does_not_get_the_lock_writes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.log");
        fs::write(&path, "x".repeat(200)).unwrap();
        let other = File::open(&path).unwrap();
        other.lock().unwrap();
        rolling(&path, 100).write(&entry(Level::Info, "on"));
        assert!(fs::read_to_string(&path).unwrap().contains("on") && !backup(&path).exists());
    }

    #[test]
    fn an_old_backup_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.log");
        let old = File::create(backup(&path)).unwrap();
        rolling(&path, 100).write(&entry(Level::Info, "a"));
        assert!(backup(&path).exists());
        old.set_modified(SystemTime::now() - KEPT - Duration::from_secs(1)).unwrap();
        rolling(&path, 100).write(&entry(Level::Info, "b"));
        assert!(!backup(&path).exists());
    }

    #[test]
    fn a_pipe_in_the_files_place_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.log");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        rolling(&path, 100).write(&entry(Level::Error, "lost"));
    }

    #[test]
    fn a_file_that_cannot_be_opened_loses_lines_and_nothing_else() {
        rolling(Path::new("/nonexistent/x.log"), 100).write(&entry(Level::Error, "lost"));
    }
}
