//! A pod as ztunnel knows it.

use alloc::string::String;
use alloc::vec::Vec;

use crate::wire;

/// The inode of a network namespace. With the pod's UID it identifies what ztunnel serves: a pod whose sandbox is made again keeps its UID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NetnsInode(pub u64);

/// A pod's UID and identity, of which an add fits into one datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZdsWorkload {
    uid: String,
    name: String,
    namespace: String,
    service_account: String,
}

/// An add of this pod exceeds a datagram.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the names of pod {namespace}/{name} take {bytes} bytes, and ztunnel accepts at most {most}; shorten the names of the pod or its service \
     account",
    most = wire::LARGEST_REQUEST
)]
pub struct TooLong {
    /// The pod's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// How long the message would be.
    pub bytes: usize,
}

impl ZdsWorkload {
    /// A pod by UID, name, Kubernetes namespace and service account.
    ///
    /// # Errors
    /// They are too long for one datagram. Names that Kubernetes accepts never are.
    pub fn new(
        uid: String,
        name: String,
        namespace: String,
        service_account: String,
    ) -> Result<Self, TooLong> {
        let workload = Self { uid, name, namespace, service_account };
        let bytes = workload.add().len();
        if bytes > wire::LARGEST_REQUEST {
            return Err(TooLong { namespace: workload.namespace, name: workload.name, bytes });
        }
        Ok(workload)
    }

    /// The message that passes it to ztunnel.
    #[must_use]
    pub fn add(&self) -> Vec<u8> {
        wire::add(&self.uid, &self.name, &self.namespace, &self.service_account)
    }

    /// Its UID.
    #[must_use]
    pub fn uid(&self) -> &str {
        &self.uid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString as _;

    #[test]
    fn the_longest_names_of_kubernetes_fit_and_longer_ones_are_refused() {
        let of = |length: usize| {
            ZdsWorkload::new("u".repeat(36), "p".repeat(length), "n".repeat(63), "s".repeat(253))
        };
        assert_eq!(of(253).map(|pod| pod.name.len()), Ok(253));
        let error = of(700).expect_err("too long").to_string();
        assert!(error.contains("at most 1024"), "{error}");
    }
}
