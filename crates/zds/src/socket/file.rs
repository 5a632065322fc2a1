//! The socket file: taken over from an earlier agent, and still in its place.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;
/// How often to begin again, if another agent takes the temporary name at the same moment.
const TRIES: u32 = 3;

/// A socket that listens, and its file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    listener: OwnedFd,
    id: (u64, u64),
}

/// What is at the file's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Our socket.
    Ours,
    /// Nothing.
    Missing,
    /// Something else: another agent has taken over.
    Taken,
}

impl SocketFile {
    /// Listens at this path, in place of what was there. ztunnel finds the earlier socket or this one, but never none, and only the owner and
    /// root may connect from the beginning.
    ///
    /// # Errors
    /// The socket cannot be made. A directory at its path stays.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let mut tries = 1;
        loop {
            match Self::try_bind(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && tries < TRIES => tries += 1,
                result => return result,
            }
        }
    }

    fn try_bind(path: &Path) -> io::Result<Self> {
        let temporary = temporary(path);
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new(&temporary)?)?;
        fs::set_permissions(&temporary, Permissions::from_mode(0o600))?;
        listen(&listener, BACKLOG)?;
        let id = id(&temporary)?;
        fs::rename(&temporary, path)?;
        Ok(Self { path: path.to_owned(), listener, id })
    }

    /// The socket that listens.
    #[must_use]
    pub const fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is at the path now.
    #[must_use]
    pub fn place(&self) -> Place {
        match id(&self.path) {
            Ok(id) if id == self.id => Place::Ours,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Place::Missing,
            Ok(_) | Err(_) => Place::Taken,
        }
    }
}

/// The same for all agents, so that the next agent finds the leftover of a killed one.
fn temporary(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    path.with_file_name(name)
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_replaces_that_of_an_earlier_agent_and_what_one_left_half_made() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ztunnel.sock");
        drop(UnixListener::bind(&path).expect("an earlier socket"));
        drop(UnixListener::bind(folder.path().join(".ztunnel.sock.new")).expect("a leftover"));
        let socket = SocketFile::bind(&path).expect("is taken over");
        assert_eq!(socket.place(), Place::Ours);
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
        let next = SocketFile::bind(&path).expect("is taken over");
        assert_eq!((socket.place(), next.place()), (Place::Taken, Place::Ours));
        fs::remove_file(&path).expect("removes");
        assert_eq!(next.place(), Place::Missing);
    }

    #[test]
    fn a_directory_in_its_place_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ztunnel.sock");
        fs::create_dir(&path).expect("a directory");
        SocketFile::bind(&path).expect_err("it is a directory");
        assert!(path.is_dir());
        let missing = SocketFile::bind(&folder.path().join("none/ztunnel.sock")).expect_err("no directory");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
