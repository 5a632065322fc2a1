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

impl ZdsWorkload {
    /// A pod by UID, name, Kubernetes namespace and service account; none if they are too long for one datagram, which names that
    /// Kubernetes accepts never are.
    #[must_use]
    pub fn new(uid: String, name: String, namespace: String, service_account: String) -> Option<Self> {
        let workload = Self { uid, name, namespace, service_account };
        (workload.add().len() <= wire::LARGEST_REQUEST).then_some(workload)
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

    #[test]
    fn the_longest_names_of_kubernetes_fit_and_longer_ones_are_refused() {
        let of = |length: usize| {
            ZdsWorkload::new("u".repeat(36), "p".repeat(length), "n".repeat(63), "s".repeat(253))
        };
        assert_eq!(of(253).map(|pod| pod.name.len()), Some(253));
        assert_eq!(of(700), None);
    }
}
