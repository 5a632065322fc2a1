//! A folder of settings, read as it was at one moment.
//!
//! The kubelet writes a new version of a ConfigMap beside the old one, and then lets the link `..data` lead there: who follows the link once has
//! one version. A folder without that link is read as it is, and again if it changed during that.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use cluster_client::files;

use super::Files;

/// The link to the version that counts.
const CURRENT: &str = "..data";
/// The most that a setting may have: what a ConfigMap may have as a whole.
const LARGEST: u64 = 1 << 20;
/// How often a folder that changes while it is read is read again.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(10);

/// All settings of the folder, by name. A line end at the end of a file does not count.
///
/// # Errors
/// It cannot be read, or a file in it is not text, or it never stops changing.
pub(super) fn read(folder: &Path) -> io::Result<Files> {
    for _ in 0..ATTEMPTS {
        let directory = current(folder);
        let before = version(&directory);
        let read = before.as_ref().map_or_else(
            |error| Err(io::Error::new(error.kind(), error.to_string())),
            |version| texts(&directory, version),
        );
        let is_same = match (&before, version(&directory)) {
            (Ok(before), Ok(after)) => *before == after,
            (Err(_), Err(_)) => true,
            (Ok(_), Err(_)) | (Err(_), Ok(_)) => false,
        };
        // A version that is gone before it is read does not matter for the next one.
        if is_same && current(folder) == directory {
            return read;
        }
        thread::sleep(PAUSE);
    }
    Err(io::Error::other("it changes all the time"))
}

/// Where the version is that counts.
fn current(folder: &Path) -> PathBuf {
    match fs::read_link(folder.join(CURRENT)) {
        Ok(target) => folder.join(target),
        Err(_) => folder.to_owned(),
    }
}

/// Identifies the content of a directory without reading it: names with inode, length and time of the last change.
type Version = Vec<(OsString, [i64; 4])>;

fn version(directory: &Path) -> io::Result<Version> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // Editors and the kubelet keep their own things under names with a dot.
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let stat = fs::metadata(entry.path())?;
        if !stat.is_dir() {
            let numbers =
                [stat.ino().cast_signed(), stat.len().cast_signed(), stat.mtime(), stat.mtime_nsec()];
            files.push((entry.file_name(), numbers));
        }
    }
    files.sort();
    Ok(files)
}

fn texts(directory: &Path, files: &[(OsString, [i64; 4])]) -> io::Result<Files> {
    let text = |name: &str| {
        let read = files::read_text(&directory.join(name), LARGEST);
        let text = read.map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
        Ok((name.to_owned(), text.trim_end_matches(['\n', '\r']).to_owned()))
    };
    files.iter().filter_map(|(name, _)| name.to_str()).map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_folder_that_is_not_there_is_an_error_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        symlink("..1", folder.path().join(CURRENT)).expect("links");
        for missing in [folder.path().join("settings"), folder.path().to_owned()] {
            assert_eq!(read(&missing).expect_err("nothing there").kind(), io::ErrorKind::NotFound);
        }
    }

    #[test]
    fn a_version_is_never_mixed_with_the_next() {
        let folder = tempfile::tempdir().expect("a folder");
        let publish = |count: usize| {
            let version = format!("..{count}");
            let new = folder.path().join(&version);
            fs::create_dir(&new).expect("makes");
            for name in ["A", "B", "C"] {
                fs::write(new.join(name), count.to_string()).expect("writes");
            }
            symlink(&version, folder.path().join("..data_tmp")).expect("links");
            fs::rename(folder.path().join("..data_tmp"), folder.path().join(CURRENT)).expect("renames");
            if count > 0 {
                fs::remove_dir_all(folder.path().join(format!("..{}", count - 1))).expect("removes");
            }
        };
        publish(0);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                (1..2000).for_each(publish);
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                match read(folder.path()) {
                    Ok(files) => {
                        assert_eq!(files.len(), 3);
                        assert!(files.values().all(|value| *value == files["A"]), "{files:?}");
                    }
                    Err(error) => assert_eq!(error.to_string(), "it changes all the time"),
                }
            }
        });
        assert_eq!(read(folder.path()).expect("reads")["B"], "1999");
    }
}
