//! A socket file: taken over from an earlier agent, and still in its place.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;
/// How often to begin again, if another agent takes the temporary name at the same moment.
const TRIES: u32 = 3;

/// The file of a socket that listens.
#[derive(Debug)]
pub struct SocketFile {
    pub(super) path: PathBuf,
    kind: SocketKind,
    id: (u64, u64),
}

/// How clients write to a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketKind {
    /// In packets, as ztunnel does.
    Packets,
    /// In a stream.
    Stream,
}

/// What is at the file's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Our socket.
    Ours,
    /// Nothing.
    Missing,
    /// The socket of another program that lives: an agent that has taken over.
    Taken,
    /// A socket that no process has, as of an agent that was killed.
    Abandoned,
}

impl SocketFile {
    /// Listens at this path, in place of what was there. ztunnel finds the earlier socket or this one, but never none, and only the owner and
    /// root may connect from the beginning.
    ///
    /// # Errors
    /// The socket cannot be made. A directory at its path stays.
    pub fn bind(path: &Path, kind: SocketKind) -> io::Result<(Self, OwnedFd)> {
        let mut tries = 1;
        loop {
            match Self::try_bind(path, kind) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && tries < TRIES => tries += 1,
                result => return result,
            }
        }
    }

    fn try_bind(path: &Path, kind: SocketKind) -> io::Result<(Self, OwnedFd)> {
        let temporary = temporary(path);
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let of_kind = match kind {
            SocketKind::Packets => SocketType::SEQPACKET,
            SocketKind::Stream => SocketType::STREAM,
        };
        let listener = socket(of_kind)?;
        bind(&listener, &SocketAddrUnix::new(&temporary)?)?;
        fs::set_permissions(&temporary, Permissions::from_mode(0o600))?;
        listen(&listener, BACKLOG)?;
        let id = id(&temporary)?;
        fs::rename(&temporary, path)?;
        Ok((Self { path: path.to_owned(), kind, id }, listener))
    }

    /// Listens there again, in place of the present socket.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_again(&mut self) -> io::Result<OwnedFd> {
        let (file, listener) = Self::bind(&self.path, self.kind)?;
        *self = file;
        Ok(listener)
    }

    /// What is at the path now.
    #[must_use]
    pub fn place(&self) -> Place {
        match id(&self.path) {
            Ok(id) if id == self.id => Place::Ours,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Place::Missing,
            Ok(_) if is_abandoned(&self.path) => Place::Abandoned,
            Ok(_) | Err(_) => Place::Taken,
        }
    }
}

/// Whether no process has the socket of this path. A datagram socket is refused by what listens, because that is of another kind, so no process
/// sees a client.
fn is_abandoned(path: &Path) -> bool {
    let probe = socket(SocketType::DGRAM).and_then(|probe| connect(&probe, &SocketAddrUnix::new(path)?));
    probe == Err(Errno::CONNREFUSED)
}

fn socket(kind: SocketType) -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
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
        let bind = || SocketFile::bind(&path, SocketKind::Packets);
        let (mut socket, _listener) = bind().expect("is taken over");
        assert_eq!(socket.place(), Place::Ours);
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
        let (next, listener) = bind().expect("is taken over");
        assert_eq!((socket.place(), next.place()), (Place::Taken, Place::Ours));
        // The next agent is killed: its file stays, without a process.
        drop(listener);
        assert_eq!(socket.place(), Place::Abandoned);
        let _listener = socket.bind_again().expect("is taken back");
        assert_eq!((socket.place(), next.place()), (Place::Ours, Place::Taken));
        fs::remove_file(&path).expect("removes");
        assert_eq!(socket.place(), Place::Missing);
    }

    #[test]
    fn looking_at_another_agents_socket_disturbs_nobody() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.sock");
        let (old, _listener) = SocketFile::bind(&path, SocketKind::Stream).expect("a socket");
        let next = UnixListener::bind(folder.path().join("new")).expect("a socket");
        fs::rename(folder.path().join("new"), &path).expect("renames");
        assert_eq!(old.place(), Place::Taken);
        next.set_nonblocking(true).expect("is set");
        assert_eq!(next.accept().expect_err("no client").kind(), io::ErrorKind::WouldBlock);
        drop(next);
        assert_eq!(old.place(), Place::Abandoned);
        fs::remove_file(&path).expect("removes");
        fs::write(&path, "no socket").expect("writes");
        assert_eq!(old.place(), Place::Abandoned);
    }

    #[test]
    fn a_directory_in_its_place_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ztunnel.sock");
        fs::create_dir(&path).expect("a directory");
        SocketFile::bind(&path, SocketKind::Packets).expect_err("it is a directory");
        assert!(path.is_dir());
        let missing = SocketFile::bind(&folder.path().join("none/ztunnel.sock"), SocketKind::Packets);
        let missing = missing.expect_err("no directory");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
