//! Finding a pod's network namespace among those a container runtime has mounted into a directory.
//!
//! A pod's status names its addresses, and the runtime's directory has a file per namespace; which belong together, the addresses inside the
//! namespaces say. A container with CAP_NET_ADMIN can give its own namespace the address of another pod: then two have it, and neither is
//! the answer: then the cgroups of the processes in them say whose they are. No namespace is held open between two looks, because an open one outlives its pod.

mod processes;
mod special;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use netns_apply::netns::{DisposableThread, Netns, NetnsError, NetnsId};
use netns_apply::routes::RouteSocket;

pub use processes::{NamespaceProcesses, PodProcess, ProcessIndex, namespace_of, processes_of_pods};
pub use special::{FOREIGN, HostNamespace, HostNamespaces, Outside, hosts, remember_hosts, suitable};

/// How many bytes of addresses are read of a namespace; a container with CAP_NET_ADMIN can add as many as it likes.
const MOST_READ: usize = 16 << 20;

/// The namespaces of a directory, as they were at one moment.
#[derive(Debug, Default)]
pub struct NamespaceIndex {
    found: Vec<MountedNetns>,
    /// Files that are not namespaces, or could not be looked into.
    passed_over: usize,
}

/// A network namespace that may be a pod's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedNetns {
    path: PathBuf,
    id: NetnsId,
    /// Those that were wanted.
    addresses: Vec<IpAddr>,
}

/// Why a directory's namespaces cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// It cannot be read.
    #[error(
        "{directory}: {cause}; mount the directory in which the container runtime keeps its network namespaces there, or name it in \
         MOUNTED_CNI_NETNS_DIR",
        directory = .directory.display()
    )]
    Directory {
        /// Which.
        directory: PathBuf,
        /// What the kernel says.
        cause: io::Error,
    },
    /// It has no file of a namespace that can be inspected.
    #[error(
        "{directory} has {files} files and none is a network namespace of a pod; is it the container runtime's directory, and mounted with \
         mountPropagation: HostToContainer?{}",
        .example.as_ref().map(|error| format!(" The last one: {error}")).unwrap_or_default(),
        directory = .directory.display()
    )]
    Nothing {
        /// Which.
        directory: PathBuf,
        /// How many files it has.
        files: usize,
        /// What came of one of them.
        example: Option<String>,
    },
    /// The host's namespace is not known, no thread could be made, or it panicked.
    #[error("cannot look into the network namespaces of the node: {0}")]
    Stopped(String),
}

/// Why a pod's namespace is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// The pod has no addresses yet.
    #[error("the pod has no address")]
    NoAddress,
    /// No namespace has all of the pod's addresses.
    #[error("no network namespace has the pod's addresses {}", list(.0))]
    Nowhere(Vec<IpAddr>),
    /// Several have.
    #[error("{} network namespaces have the pod's addresses {}: {}; ownership is ambiguous", .paths.len(), list(.addresses), list(&.paths.iter().map(|path| path.display()).collect::<Vec<_>>()))]
    Ambiguous {
        /// The pod's addresses.
        addresses: Vec<IpAddr>,
        /// The namespaces' files, of each namespace one.
        paths: Vec<PathBuf>,
    },
}

/// Why processes do not show which of several namespaces is a pod's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UndecidedError {
    /// None of the pod's is in any of them.
    #[error("no process of the pod is in one of them")]
    NoProcess,
    /// Some of the pod's cannot be read.
    #[error("the pod's processes cannot be read: {0}; add SYS_PTRACE to the capabilities")]
    Hidden(String),
    /// Some of the pod's are in more than one of them.
    #[error("processes of the pod are in {0} of them")]
    Several(usize),
    /// Another pod's are in the same one.
    #[error("processes of another pod (UID {0}) are in the same one as the pod's")]
    Shared(String),
}

fn list<T: ToString>(values: &[T]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Why a namespace that was found cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReopenError {
    /// It cannot be opened any more.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// Its file now belongs to another namespace.
    #[error("{path} is now another network namespace", path = .0.display())]
    Replaced(PathBuf),
}

impl NamespaceIndex {
    /// Looks into every namespace of a directory, but never into the host's, for addresses that pods have. Keeps nothing of other namespaces:
    /// a container with CAP_NET_ADMIN may make as many as it likes. Takes some ten milliseconds of a processor for 200 of them:
    /// not for an async thread.
    ///
    /// # Errors
    /// The directory has nothing that can be looked into.
    pub fn of(directory: &Path, wanted: &BTreeSet<IpAddr>) -> Result<Self, SurveyError> {
        let hosts = HostNamespaces::now().map_err(|error| SurveyError::Stopped(error.to_string()))?;
        let surveyed = DisposableThread::run(|thread| Self::survey(directory, wanted, &hosts, thread));
        surveyed.unwrap_or_else(|cause| Err(SurveyError::Stopped(cause)))
    }

    fn survey(
        directory: &Path,
        wanted: &BTreeSet<IpAddr>,
        hosts: &HostNamespaces,
        thread: &DisposableThread,
    ) -> Result<Self, SurveyError> {
        let unreadable = |cause| SurveyError::Directory { directory: directory.to_owned(), cause };
        let mut by_path: BTreeMap<PathBuf, MountedNetns> = BTreeMap::new();
        let (mut files, mut example) = (0, None);
        for entry in fs::read_dir(directory).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            // To open anything else may mean to wait.
            if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
                continue;
            }
            let path = entry.path();
            files += 1;
            match MountedNetns::look(&path, wanted, hosts, thread) {
                Ok(Some(sandbox)) => drop(by_path.insert(path, sandbox)),
                Ok(None) => {}
                Err(error) => example = Some(error.to_string()),
            }
        }
        let mut found: Vec<MountedNetns> = Vec::with_capacity(by_path.len());
        for sandbox in by_path.into_values() {
            // A namespace may be mounted at two places.
            if !found.iter().any(|other| other.id == sandbox.id) {
                found.push(sandbox);
            }
        }
        if found.is_empty() {
            return Err(SurveyError::Nothing { directory: directory.to_owned(), files, example });
        }
        Ok(Self { passed_over: files - found.len(), found })
    }

    /// The one namespace that has all these addresses, which must be among those that were wanted.
    ///
    /// # Errors
    /// None has them, or several have.
    pub fn find(&self, addresses: &[IpAddr]) -> Result<&MountedNetns, LookupError> {
        if addresses.is_empty() {
            return Err(LookupError::NoAddress);
        }
        let mut having = self.having(addresses);
        match (having.next(), having.next()) {
            (None, _) => Err(LookupError::Nowhere(addresses.to_owned())),
            (Some(one), None) => Ok(one),
            (Some(_), Some(_)) => {
                let paths = self.having(addresses).map(|sandbox| sandbox.path.clone()).collect();
                Err(LookupError::Ambiguous { addresses: addresses.to_owned(), paths })
            }
        }
    }

    /// Of several namespaces that have all these addresses, the one with processes of this pod and of no other: into another pod's
    /// cgroup no container gets.
    ///
    /// # Errors
    /// Why the processes do not decide.
    pub fn find_by_processes(
        &self,
        addresses: &[IpAddr],
        uid: &str,
        processes: &ProcessIndex,
    ) -> Result<&MountedNetns, UndecidedError> {
        let inside = |sandbox: &MountedNetns| processes.namespaces.get(&sandbox.id);
        let having = self.having(addresses).filter_map(|sandbox| Some((sandbox, inside(sandbox)?)));
        the_pods(having, uid).map_err(|undecided| match (undecided, processes.hidden.get(uid)) {
            (UndecidedError::NoProcess, Some(error)) => UndecidedError::Hidden(error.clone()),
            (other, _) => other,
        })
    }

    fn having<'s, 'a>(
        &'s self,
        addresses: &'a [IpAddr],
    ) -> impl Iterator<Item = &'s MountedNetns> + use<'s, 'a> {
        self.found.iter().filter(|sandbox| sandbox.has(addresses))
    }

    /// All of them, in the order of their paths.
    #[must_use]
    pub fn sandboxes(&self) -> &[MountedNetns] {
        &self.found
    }

    /// The numbers of namespaces and of other files.
    #[must_use]
    pub const fn counts(&self) -> (usize, usize) {
        (self.found.len(), self.passed_over)
    }
}

/// The one of several candidates with processes of this pod and of no other.
fn the_pods<'a, T>(
    candidates: impl Iterator<Item = (T, &'a NamespaceProcesses)>,
    uid: &str,
) -> Result<T, UndecidedError> {
    let mut with: Vec<(T, &NamespaceProcesses)> =
        candidates.filter(|(_, inside)| inside.pods.contains(uid)).collect();
    let count = with.len();
    match (with.pop(), count) {
        (None, _) => Err(UndecidedError::NoProcess),
        (Some((one, inside)), 1) => match inside.pods.iter().find(|other| *other != uid) {
            None => Ok(one),
            Some(other) => Err(UndecidedError::Shared(other.clone())),
        },
        (Some(_), several) => Err(UndecidedError::Several(several)),
    }
}

impl MountedNetns {
    /// None for the host's.
    fn look(
        path: &Path,
        wanted: &BTreeSet<IpAddr>,
        hosts: &HostNamespaces,
        thread: &DisposableThread,
    ) -> Result<Option<Self>, NetnsError> {
        let netns = Netns::open(path)?;
        if hosts.contain(netns.id()).is_some() {
            return Ok(None);
        }
        thread.enter(&netns)?;
        // A namespace with unreadable addresses matches no pod.
        let there = RouteSocket::open(MOST_READ).and_then(|mut routes| routes.addresses());
        let addresses = there.unwrap_or_default().into_iter().filter(|one| wanted.contains(one)).collect();
        Ok(Some(Self { path: path.to_owned(), id: netns.id(), addresses }))
    }

    /// Opens it again, if it is still the same. It was not the host's, which keeps its identity as long as the host runs.
    ///
    /// # Errors
    /// It is gone, or another one.
    pub fn open(&self) -> Result<Netns, ReopenError> {
        let netns = Netns::open(&self.path)?;
        if netns.id() != self.id {
            return Err(ReopenError::Replaced(self.path.clone()));
        }
        Ok(netns)
    }

    /// The file it was found by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Those of its addresses that were wanted.
    #[must_use]
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Which namespace it is.
    #[must_use]
    pub const fn id(&self) -> NetnsId {
        self.id
    }

    fn has(&self, addresses: &[IpAddr]) -> bool {
        addresses.iter().all(|address| self.addresses.contains(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn survey(namespaces: &[&[&str]]) -> NamespaceIndex {
        let id = Netns::current().expect("a namespace").id();
        let sandbox = |(index, addresses): (usize, &&[&str])| MountedNetns {
            path: format!("/n/{index}").into(),
            id,
            addresses: addresses.iter().map(|text| ip(text)).collect(),
        };
        NamespaceIndex { found: namespaces.iter().enumerate().map(sandbox).collect(), passed_over: 0 }
    }

    #[test]
    fn a_namespace_is_the_pods_if_it_alone_has_all_addresses() {
        let survey =
            survey(&[&["127.0.0.1", "10.1.0.2", "fd00::2"], &["10.1.0.3", "fd00::3"], &["10.1.0.2"]]);
        let find = |addresses: &[&str]| {
            let addresses: Vec<IpAddr> = addresses.iter().map(|text| ip(text)).collect();
            survey.find(&addresses).map(|sandbox| sandbox.path.display().to_string())
        };
        assert_eq!(find(&["10.1.0.3"]).as_deref(), Ok("/n/1"));
        assert_eq!(
            find(&["10.1.0.2", "fd00::2"]).as_deref(),
            Ok("/n/0"),
            "the third lacks the second address"
        );
        assert_eq!(
            find(&["10.1.0.3", "fd00::2"]),
            Err(LookupError::Nowhere(vec![ip("10.1.0.3"), ip("fd00::2")]))
        );
        assert_eq!(find(&[]), Err(LookupError::NoAddress));
        let ambiguous = find(&["10.1.0.2"]).expect_err("two have it").to_string();
        assert!(
            ambiguous.contains("/n/0, /n/2") && ambiguous.contains("ownership is ambiguous"),
            "{ambiguous}"
        );
    }

    #[test]
    fn of_several_namespaces_the_one_with_the_pods_processes_is_the_pods() {
        let inside = |pods: &[&str]| NamespaceProcesses {
            pods: pods.iter().map(ToString::to_string).collect(),
            process: 7,
        };
        let owner = |namespaces: &[&[&str]]| {
            let all: Vec<NamespaceProcesses> = namespaces.iter().map(|pods| inside(pods)).collect();
            the_pods(all.iter().enumerate(), "own")
        };
        assert_eq!(owner(&[&["other"], &["own"], &[]]), Ok(1));
        assert_eq!(owner(&[&["other"], &[]]), Err(UndecidedError::NoProcess));
        assert_eq!(owner(&[&["own"], &["own"]]), Err(UndecidedError::Several(2)));
        // A neighbour that is in the pod's own namespace, too, does not make another one the pod's.
        assert_eq!(owner(&[&["own", "other"], &["other"]]), Err(UndecidedError::Shared("other".into())));
        assert_eq!(owner(&[&["own", "other"], &["own"]]), Err(UndecidedError::Several(2)));
    }

    #[test]
    fn a_directory_without_namespaces_says_what_may_be_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("cni-1"), "").expect("writes");
        let error = NamespaceIndex::of(folder.path(), &BTreeSet::new()).expect_err("nothing").to_string();
        assert!(error.contains("1 files") && error.contains("HostToContainer"), "{error}");
        assert!(error.contains("cni-1 is not a network namespace"), "{error}");
        let error = NamespaceIndex::of(&folder.path().join("none"), &BTreeSet::new())
            .expect_err("no directory")
            .to_string();
        assert!(error.contains("none: No such file") && error.contains("MOUNTED_CNI_NETNS_DIR"), "{error}");
    }
}
