//! What a plan depends on in a network namespace and its files.

use crate::routes::{RouteError, RouteSocket};
use nix::fcntl::OFlag;
use redirect_core::settings::{NameLookup, NamespaceFacts, RawSettings, id_in_passwd, nameservers};
use redirect_core::{AmbientRedirect, Families};
use std::{
    fs::{self, File},
    io::{self, Read},
    net::IpAddr,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// The addresses of the calling thread's network namespace: interface by interface in the kernel's order, each
/// interface's IPv4 addresses before its IPv6 addresses. That order decides which family is "first".
///
/// # Errors
/// The kernel does not report it.
pub fn addresses() -> Result<Vec<IpAddr>, RouteError> {
    RouteSocket::open(usize::MAX)?.addresses_by_interface()
}

/// Whether IPv6 is off on the loopback interface of the calling thread's network namespace.
const LOOPBACK_WITHOUT_V6: &str = "/proc/sys/net/ipv6/conf/lo/disable_ipv6";

/// The facts of the calling thread's network namespace with these addresses, and of the program's `/etc/passwd` and `/etc/group`.
#[must_use]
pub fn of_namespace(addresses: &[IpAddr]) -> NamespaceFacts<'_> {
    NamespaceFacts::new(addresses).with_names(&NameFiles).with_ipv6(Ipv6::here().is_everywhere())
}

/// How far the calling thread's network namespace has IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ipv6 {
    /// Also on the loopback interface, to which a plan of both families adds an address.
    Everywhere,
    /// Not on the loopback interface.
    NotOnLoopback,
    /// Its kernel has none.
    Nowhere,
}

impl Ipv6 {
    /// As the kernel says.
    #[must_use]
    pub fn here() -> Self {
        match fs::read_to_string(LOOPBACK_WITHOUT_V6) {
            Ok(text) if text.trim() == "0" => Self::Everywhere,
            Ok(_) => Self::NotOnLoopback,
            Err(_) => Self::Nowhere,
        }
    }

    /// Whether it is there, also on the loopback interface.
    #[must_use]
    pub fn is_everywhere(self) -> bool {
        self == Self::Everywhere
    }

    /// A redirection of ambient mode, as far as IPv6 is there.
    #[must_use]
    pub fn limit(self, redirect: AmbientRedirect) -> AmbientRedirect {
        match self {
            Self::Everywhere => redirect,
            Self::NotOnLoopback => redirect.with_local_routes(Families::V4),
            Self::Nowhere => redirect.with_families(Families::V4),
        }
    }
}

fn servers_in(path: &Path) -> io::Result<Vec<IpAddr>> {
    match read_small(path) {
        Ok(text) => Ok(nameservers(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// How much is read at most of a file in the program's root. Resolvers read three servers from theirs; a passwd file of this
/// size has twenty thousand users.
const MOST_READ: u64 = 1 << 20;

/// Reads a file that may be anything, because it comes with the container's files: it never waits, and never reads
/// more than a file of its kind has. Bytes that are not text are replaced.
fn read_small(path: &Path) -> io::Result<String> {
    // A FIFO would wait for a writer, a device for whatever it waits for.
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let metadata = file.metadata()?;
    let refusal = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if !metadata.is_file() {
        return refusal("it is not a regular file");
    }
    let expected = metadata.len().saturating_add(1).min(MOST_READ);
    let mut bytes = Vec::with_capacity(usize::try_from(expected).unwrap_or_default());
    file.take(MOST_READ.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_READ {
        return refusal("it is longer than 1 MiB");
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Looks names up in `/etc/passwd` and `/etc/group`, and servers in `/etc/resolv.conf`, and nowhere else: no name service, no network.
#[derive(Debug, Clone, Copy, Default)]
pub struct NameFiles;

impl NameFiles {
    /// The DNS servers of `/etc/resolv.conf`, if a plan of these settings depends on them; none where no such file.
    ///
    /// # Errors
    /// The file cannot be read, or is not a regular file.
    pub fn dns_servers(settings: &RawSettings) -> io::Result<Vec<IpAddr>> {
        if settings.needs_nameservers() { servers_in(Path::new("/etc/resolv.conf")) } else { Ok(Vec::new()) }
    }
}

impl NameLookup for NameFiles {
    fn user(&self, name: &str) -> Option<u32> {
        id_in_passwd(&read_small(Path::new("/etc/passwd")).ok()?, name)
    }

    fn group(&self, name: &str) -> Option<u32> {
        id_in_passwd(&read_small(Path::new("/etc/group")).ok()?, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::{sys::stat::Mode, unistd::mkfifo};
    use std::fs;

    #[test]
    fn servers_are_read_from_whatever_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        assert_eq!(servers_in(&path).unwrap(), Vec::<IpAddr>::new());
        fs::write(&path, b"# caf\xe9\nnameserver 10.96.0.10\nsearch \xff\nnameserver ::1\n").unwrap();
        let wanted: [IpAddr; 2] = ["10.96.0.10".parse().unwrap(), "::1".parse().unwrap()];
        assert_eq!(servers_in(&path).unwrap(), wanted);
    }

    #[test]
    fn what_is_no_file_of_its_kind_is_refused_and_never_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let long = folder.path().join("long");
        fs::write(&long, "nameserver 10.96.0.10\n".repeat(60_000)).unwrap();
        for (path, why) in [
            (fifo.as_path(), "not a regular file"),
            (folder.path(), "not a regular file"),
            (Path::new("/dev/zero"), "not a regular file"),
            (long.as_path(), "longer than 1 MiB"),
        ] {
            let error = servers_in(path).unwrap_err().to_string();
            assert!(error.contains(why), "{}: {error}", path.display());
        }
    }
}
