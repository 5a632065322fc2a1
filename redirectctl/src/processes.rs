//! The node's processes: whose a network namespace is where addresses do not show it, and which of a pod run as its proxy.

use redirect_core::pod::PodFacts;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use pod_netns::{LookupError, MountedNetns, NamespaceIndex, PodProcess, ProcessIndex, processes_of_pods};
use presentation::decision::PodDecision;
use redirect_core::Redirect;

use crate::cause::{self, Cause, PodFinding};
use crate::pod::{ContainerKind, Pod};

/// Where the node's processes are shown, unless another place is named.
pub const PROC: &str = "/proc";
/// How many processes of a pod are named.
const MOST_NAMED: usize = 5;

/// The processes of a node, each read at most once; none where no place is named.
#[derive(Debug, Default)]
pub struct NodeProcesses {
    proc: Option<PathBuf>,
    by_namespace: OnceLock<Option<ProcessIndex>>,
    by_pod: OnceLock<BTreeMap<String, Vec<PodProcess>>>,
}

impl NodeProcesses {
    /// Those that a mounted procfs shows.
    #[must_use]
    pub fn in_proc(proc: &Path) -> Self {
        Self { proc: Some(proc.to_owned()), ..Self::default() }
    }

    /// The mounted procfs that shows them.
    #[must_use]
    pub fn proc(&self) -> Option<&Path> {
        self.proc.as_deref()
    }

    /// The network namespace of a pod: by its addresses; if several have these, by its processes.
    ///
    /// # Errors
    /// Neither shows it.
    pub fn find<'a>(&self, pod: &Pod, index: &'a NamespaceIndex) -> Result<&'a MountedNetns, LookupError> {
        let by_processes = |ambiguous: LookupError| {
            let read = || self.proc.as_ref().and_then(|proc| ProcessIndex::of(proc).ok());
            let processes = self.by_namespace.get_or_init(read).as_ref();
            let found = processes
                .and_then(|processes| index.find_by_processes(&pod.addresses, &pod.uid, processes).ok());
            found.ok_or(ambiguous)
        };
        match index.find(&pod.addresses) {
            Err(ambiguous @ LookupError::Ambiguous { .. }) => by_processes(ambiguous),
            found => found,
        }
    }

    /// Adds to what was found about a pod the processes beside its proxy that run as it.
    pub fn add_collisions(&self, pod: &Pod, decided: &PodDecision, all: &mut Vec<PodFinding>) {
        let PodDecision::Redirect(redirect, _) = decided else { return };
        cause::merge(all, Cause::UidCollision, self.collisions(pod, redirect));
    }

    fn collisions(&self, pod: &Pod, redirect: &Redirect) -> Vec<String> {
        let read = || self.proc.as_ref().and_then(|proc| processes_of_pods(proc).ok()).unwrap_or_default();
        let processes = self.by_pod.get_or_init(read).get(&pod.uid).map_or(&[][..], Vec::as_slice);
        let collision = |process: &PodProcess| {
            let container = beside_proxy(pod, process)?;
            let user = process.user.filter(|user| redirect.proxy_uids().contains(user));
            let group = process.group.filter(|group| redirect.proxy_gids().contains(group));
            let who =
                user.map(|user| format!("user {user}")).or_else(|| Some(format!("group {}", group?)))?;
            let PodProcess { id, name, .. } = process;
            Some(format!("process {id} ({name}) of container {container} runs as {who}, as the proxy does"))
        };
        let mut seen: Vec<String> = processes.iter().filter_map(collision).collect();
        if let Some(more) = seen.len().checked_sub(MOST_NAMED).filter(|more| *more > 0) {
            seen.truncate(MOST_NAMED);
            seen.push(format!("and {more} more processes"));
        }
        seen
    }
}

/// The container of a process, if it is known, and neither the proxy's nor one that ends before it.
fn beside_proxy<'a>(pod: &'a Pod, process: &PodProcess) -> Option<&'a str> {
    let (_, name) = pod.container_ids.iter().find(|(id, _)| process.container.contains(id.as_str()))?;
    let ends_before = pod.containers.iter().any(|one| one.name == *name && one.kind == ContainerKind::Init);
    (name != PodFacts::PROXY_CONTAINER && !ends_before).then_some(name)
}
