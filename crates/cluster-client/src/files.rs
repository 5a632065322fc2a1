//! Reading files that another program writes: regular files only, and no more of them than makes sense.
//!
//! A pipe, a device or an endless file in the place of a token must not block the reader or exhaust its memory.

use nix::fcntl::OFlag;
use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// The most a token file may have.
pub const TOKEN: u64 = 64 << 10;
/// The most a file of certificates or a key may have.
pub const CERTIFICATES: u64 = 1 << 20;
/// The most a kubeconfig may have.
pub const KUBECONFIG: u64 = 4 << 20;

/// The content of a regular file.
///
/// # Errors
/// It is missing, is not a regular file, it has more than `most` bytes, or it cannot be read.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let mut content = Vec::new();
    // A file may grow, and those of /proc do not say how long they are.
    file.take(most + 1).read_to_end(&mut content)?;
    if content.len() as u64 > most {
        let error = format!("is larger than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, error));
    }
    Ok(content)
}

/// The content of a regular file as text.
///
/// # Errors
/// As [`read`], or it is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read(path, most)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "is not UTF-8"))
}

/// Opens a regular file to be read. Nothing is waited for, whatever it is instead.
///
/// # Errors
/// It is missing, is not a regular file, or cannot be opened.
pub fn open(path: &Path) -> io::Result<File> {
    // Opening some devices does something, so they are not opened at all.
    regular(&path.metadata()?)?;
    let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

fn regular(known: &std::fs::Metadata) -> io::Result<()> {
    if known.is_file() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::{sys::stat::Mode, unistd::mkfifo};
    use std::fs;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "abc").unwrap();
        assert_eq!(read(&path, 3).unwrap(), b"abc");
        assert_eq!(read(&path, 2).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(read(&folder.path().join("x"), 3).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!read(Path::new("/proc/self/status"), TOKEN).unwrap().is_empty());
        assert_eq!(
            read_text(Path::new("/proc/self/exe"), 1 << 40).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn what_is_not_a_regular_file_is_refused_and_never_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        for path in [&pipe, Path::new("/dev/zero"), folder.path()] {
            let error = read(path, TOKEN).unwrap_err();
            assert!(error.to_string().contains("not a regular file"), "{}: {error}", path.display());
        }
    }
}
