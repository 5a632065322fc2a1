//! What is special about pods' network namespaces: which ones are never a pod's, and what a pod with users of its own
//! (`hostUsers: false`) needs.

use netns_apply::netns::{Netns, NetnsError, NetnsId};
use redirect_core::options::BackendChoice;
use std::{fmt, io::ErrorKind, sync::OnceLock};

/// Why a network namespace is not a pod's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostNamespace {
    /// The calling thread is in it, and no program of this project is ever run in the pod it works for.
    Own,
    /// Process 1 is in it.
    Inits,
}

impl fmt::Display for HostNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => "the network namespace this program runs in",
            Self::Inits => "the network namespace of process 1, the host's",
        })
    }
}

/// The network namespace of process 1, if [`remember_hosts`] could see it.
static INITS: OnceLock<Option<NetnsId>> = OnceLock::new();

/// Remembers the network namespace of process 1, for all later comparisons with [`HostNamespaces`]. A process that gives up the right to inspect other
/// processes calls this first; if it has not been called, that namespace is looked up each time.
pub fn remember_hosts() {
    INITS.get_or_init(|| Netns::open("/proc/1/ns/net").ok().map(|namespace| namespace.id()));
}

/// The network namespaces that are off limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostNamespaces {
    own: NetnsId,
    inits: Option<NetnsId>,
}

impl HostNamespaces {
    /// Those seen from the calling thread.
    ///
    /// # Errors
    /// They cannot be determined.
    pub fn now() -> Result<Self, NetnsError> {
        let own = Netns::current()?.id();
        if let Some(Some(inits)) = INITS.get() {
            return Ok(Self { own, inits: Some(*inits) });
        }
        let inits = match Netns::open("/proc/1/ns/net") {
            Ok(inits) => Some(inits.id()),
            // If process 1 has more privileges than we have, it is that of a container we are in, and we cannot reach the
            // host's namespace by a path.
            Err(NetnsError::Open { cause, .. }) if cause.kind() == ErrorKind::PermissionDenied => None,
            Err(error) => return Err(error),
        };
        Ok(Self { own, inits })
    }

    /// Why a namespace is the host's; `None` if it may be a pod's.
    #[must_use]
    pub fn contain(&self, namespace: NetnsId) -> Option<HostNamespace> {
        if self.own == namespace {
            return Some(HostNamespace::Own);
        }
        (self.inits == Some(namespace)).then_some(HostNamespace::Inits)
    }
}

/// Why a namespace is the host's and is off limits; `None` if it may be a pod's.
///
/// # Errors
/// It cannot be determined.
pub fn hosts(namespace: &Netns) -> Result<Option<HostNamespace>, NetnsError> {
    Ok(HostNamespaces::now()?.contain(namespace.id()))
}

/// Why the backend is what [`suitable`] says in a foreign namespace, for logs.
pub const FOREIGN: &str = "the namespace belongs to another user namespace";

/// Where a process works from. A pod's namespace with a different owner is foreign: the pod has users of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outside(Option<u32>);

impl Outside {
    /// The calling thread's network namespace at the first call in this process, which has to come before the process
    /// enters any other. Looked up only once: the kernel searches for the file among those of all namespaces, one by one.
    #[must_use]
    pub fn of_this_process() -> Self {
        static OUTSIDE: OnceLock<Outside> = OnceLock::new();
        *OUTSIDE.get_or_init(|| Self(Netns::owner_here()))
    }

    /// Whether the calling thread's network namespace, which it has entered since, is foreign.
    #[must_use]
    pub fn finds_this_foreign(self) -> bool {
        Netns::owner_here() != self.0
    }
}

/// The backend for a namespace, which may be foreign. In a network namespace of another user namespace, the kernel
/// accepts the owner match of iptables only from processes of that user namespace (net/netfilter/xt_owner.c), which a
/// process with threads cannot enter (setns(2)). Native rules compare owners without that match.
#[must_use]
pub const fn suitable(backend: BackendChoice, foreign: bool) -> BackendChoice {
    if foreign { BackendChoice::NativeNft } else { backend }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_own_namespace_is_the_hosts_by_any_path() {
        for path in ["/proc/thread-self/ns/net", "/proc/self/ns/net"] {
            assert_eq!(hosts(&Netns::open(path).unwrap()).unwrap(), Some(HostNamespace::Own));
        }
    }

    #[test]
    fn the_hosts_namespaces_are_these_and_no_others() {
        // Like a pod's, it is the identity of neither this nor process 1's network namespace.
        let pods = NetnsId::at(Path::new("/proc/self/ns/uts")).unwrap();
        let own = Netns::current().unwrap().id();
        let hosts = HostNamespaces { own, inits: Some(pods) };
        assert_eq!(hosts.contain(own), Some(HostNamespace::Own));
        assert_eq!(hosts.contain(pods), Some(HostNamespace::Inits));
        assert_eq!(HostNamespaces { own, inits: None }.contain(pods), None);
        assert_eq!(HostNamespaces::now().unwrap().contain(pods), None);
    }

    #[test]
    fn foreign_namespaces_get_native_rules_whatever_was_chosen() {
        for choice in [BackendChoice::Auto, BackendChoice::Netlink, BackendChoice::Restore(None)] {
            assert_eq!((suitable(choice, false), suitable(choice, true)), (choice, BackendChoice::NativeNft));
        }
    }

    #[test]
    fn this_namespace_has_an_owner() {
        assert!(Netns::owner_here().is_some());
    }
}
