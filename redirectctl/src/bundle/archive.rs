//! The archive as bytes, and as a file that is whole or not there.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;

/// A tar archive, packed by gzip, whose entries lie in one folder.
///
/// # Errors
/// A name that no archive can have.
pub fn packed(folder: &str, entries: &[(String, Vec<u8>)]) -> io::Result<Vec<u8>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for (name, bytes) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o600);
        header.set_mtime(now);
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, format!("{folder}/{name}"), bytes.as_slice())?;
    }
    archive.into_inner()?.finish()
}

/// Writes a file that only this user may read. It is there when it is whole: until then it has another name, and goes where
/// something fails.
///
/// # Errors
/// A file of this name exists and is unchanged; or the archive cannot be written.
pub fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The library gives it the mode 0600 and an unpredictable name.
    let mut file = tempfile::Builder::new().prefix(".redirectctl-").suffix(".partial").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist_noclobber(path).map_err(|error| error.error)?;
    // The name is safe once its folder is.
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_is_never_overwritten_and_only_its_owner_reads_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.tar.gz");
        write_new(&path, b"one").expect("writes");
        assert_eq!(fs::metadata(&path).expect("is there").permissions().mode() & 0o777, 0o600);
        let again = write_new(&path, b"two").expect_err("it is there");
        assert_eq!(
            (again.kind(), fs::read(&path).expect("reads")),
            (io::ErrorKind::AlreadyExists, b"one".to_vec())
        );
        std::os::unix::fs::symlink(folder.path().join("elsewhere"), folder.path().join("link"))
            .expect("links");
        assert!(write_new(&folder.path().join("link"), b"two").is_err(), "a link is something that is there");
        assert!(write_new(&folder.path().join("no/folder"), b"two").is_err());
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .expect("lists")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["a.tar.gz", "link"], "nothing half-written stays");
    }
}
