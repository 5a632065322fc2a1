//! The network namespaces of a node at one moment, and, where their addresses do not show which is a pod's, its processes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::OnceLock;

use pod_netns::{LookupError, MountedNetns, NamespaceIndex, ProcessIndex, SurveyError};
use reasons::AgentReason;

use super::{MeshPod, PodProblem};
use crate::confine::outside;
use crate::settings::Paths;

/// The network namespaces of a node.
#[derive(Debug)]
pub struct NodeNamespaces {
    index: NamespaceIndex,
    paths: Paths,
    /// Read at most once: a pod may have taken the addresses of all others.
    processes: OnceLock<Result<ProcessIndex, String>>,
}

impl NodeNamespaces {
    /// Looks into every namespace for these addresses. Not for an async thread.
    ///
    /// # Errors
    /// As [`NamespaceIndex::of`].
    pub fn of(paths: &Paths, wanted: &BTreeSet<IpAddr>) -> Result<Self, SurveyError> {
        let index = NamespaceIndex::of(&paths.netns, wanted)?;
        Ok(Self { index, paths: paths.clone(), processes: OnceLock::new() })
    }

    /// The numbers of namespaces and of other files.
    #[must_use]
    pub const fn counts(&self) -> (usize, usize) {
        self.index.counts()
    }

    /// The network namespace of a pod. May read every process of the node: not for an async thread.
    ///
    /// # Errors
    /// Why it cannot be determined.
    pub fn find(&self, pod: &MeshPod) -> Result<MountedNetns, PodProblem> {
        let ambiguous = match self.index.find(&pod.addresses) {
            Ok(sandbox) => return Ok(sandbox.clone()),
            Err(unfound @ LookupError::Ambiguous { .. }) => unfound,
            Err(unfound) => return Err(unfound.into()),
        };
        let undecided = match self.processes.get_or_init(|| self.read_processes()) {
            Ok(processes) => match self.index.find_by_processes(&pod.addresses, &pod.uid, processes) {
                Ok(sandbox) => return Ok(sandbox.clone()),
                Err(undecided) => undecided.to_string(),
            },
            Err(unreadable) => unreadable.clone(),
        };
        Err(PodProblem::new(AgentReason::Ambiguous, format!("{ambiguous}; {undecided}")))
    }

    fn read_processes(&self) -> Result<ProcessIndex, String> {
        let proc = self.paths.proc.clone();
        // A confined thread sees no processes.
        let processes = outside::run(move || ProcessIndex::of(&proc))
            .unwrap_or_else(|| Err(std::io::Error::other("the search panicked")));
        processes.map_err(|error| {
            format!(
                "the node's processes would decide, and cannot be read: {error}; give the agent SYS_PTRACE and the host's /proc, as marked drift-heal in its manifest"
            )
        })
    }
}
