//! Finding the network namespace of a pod, surely or not at all.
//!
//! The pod's cgroup shows which namespaces its processes are in; the pod's status lists the addresses of its namespace. The one that both
//! name is the pod's. The runtime's directory of mounted namespaces shows whether a namespace with the pod's addresses exists
//! without processes.

use std::net::IpAddr;
use std::path::Path;

use netns_apply::facts;
use netns_apply::netns::Netns;
use pod_netns::{LookupError, NamespaceIndex, ProcessIndex, hosts, namespace_of};
use reasons::AgentReason;

use super::{MeshPod, PodProblem};
use crate::confine::outside;
use crate::settings::Paths;

/// Opens the network namespace of a pod. Reads every process of the node: not for an async thread.
///
/// # Errors
/// Why it cannot be determined.
pub fn open(pod: &MeshPod, paths: &Paths) -> Result<Netns, PodProblem> {
    let (pod, paths) = (pod.clone(), paths.clone());
    // A confined thread sees no processes.
    outside::run(move || find(&pod.uid, &pod.addresses, &census(&paths)?, &paths)).unwrap_or_else(|| {
        Err(PodProblem::new(AgentReason::NotFound, "the search for the pod's processes panicked"))
    })
}

/// The node's processes, as [`find`] needs them. A confined thread sees none.
///
/// # Errors
/// They cannot be read.
pub fn census(paths: &Paths) -> Result<ProcessIndex, PodProblem> {
    ProcessIndex::of(&paths.proc).map_err(|error| {
        let text = format!(
            "cannot determine the pod's processes: {error}; mount the host's /proc there, or name it in MOUNTED_PROC_DIR, and add SYS_PTRACE to the capabilities"
        );
        PodProblem::new(AgentReason::NotFound, text)
    })
}

/// Opens the network namespace of the pod with this UID and these addresses, by the node's processes. A confined thread cannot.
///
/// # Errors
/// Why it cannot be determined.
pub fn find(
    uid: &str,
    addresses: &[IpAddr],
    processes: &ProcessIndex,
    paths: &Paths,
) -> Result<Netns, PodProblem> {
    if addresses.is_empty() {
        return Err(PodProblem::new(AgentReason::NotFound, LookupError::NoAddress));
    }
    let mut found = Vec::new();
    let mut others = None;
    for (id, inside) in &processes.namespaces {
        if !inside.pods.contains(uid) {
            continue;
        }
        let netns = match Netns::open(namespace_of(&paths.proc, inside.process)) {
            Ok(netns) if netns.id() == *id => netns,
            // The process has ended; the next try finds another one.
            Ok(_) | Err(_) => continue,
        };
        if !belongs_to_pod(&netns, addresses, processes)? {
            continue;
        }
        if inside.pods.len() > 1 {
            others = inside.pods.iter().find(|other| *other != uid);
            continue;
        }
        found.push(netns);
    }
    match (found.len(), others) {
        (1, None) => found.pop().ok_or_else(|| nowhere(uid, addresses, processes, &paths.netns)),
        (0, None) => Err(nowhere(uid, addresses, processes, &paths.netns)),
        (_, Some(other)) => {
            let text = format!(
                "processes of another pod (UID {other}) are in the network namespace that has the pod's addresses; not changing it"
            );
            Err(PodProblem::new(AgentReason::OtherPod, text))
        }
        (several, None) => {
            let text = format!(
                "processes of the pod are in {several} network namespaces that have its addresses; ownership is ambiguous"
            );
            Err(PodProblem::new(AgentReason::Ambiguous, text))
        }
    }
}

/// Whether a namespace has all the addresses, and is not the host's.
fn belongs_to_pod(netns: &Netns, addresses: &[IpAddr], processes: &ProcessIndex) -> Result<bool, PodProblem> {
    if processes.hosts == Some(netns.id()) {
        return Ok(false);
    }
    let there = pod_addresses(netns).map_err(|error| PodProblem::new(AgentReason::NotFound, error))?;
    Ok(there.is_some_and(|there| addresses.iter().all(|address| there.contains(address))))
}

/// The addresses in a network namespace; none if it is the host's.
///
/// # Errors
/// What the kernel says.
pub fn pod_addresses(netns: &Netns) -> Result<Option<Vec<IpAddr>>, String> {
    if hosts(netns).map_err(|error| error.to_string())?.is_some() {
        return Ok(None);
    }
    let there = netns.run(facts::addresses).map_err(|error| error.to_string())?;
    there.map(Some).map_err(|error| error.to_string())
}

/// Why none was found.
fn nowhere(uid: &str, addresses: &[IpAddr], processes: &ProcessIndex, mounted: &Path) -> PodProblem {
    if let Some(error) = processes.hidden.get(uid) {
        let text = format!("cannot read the pod's processes: {error}; add SYS_PTRACE to the capabilities");
        return PodProblem::new(AgentReason::NotFound, text);
    }
    let survey = NamespaceIndex::of(mounted, &addresses.iter().copied().collect());
    let (reason, why) = match survey.as_ref().map(|survey| survey.find(addresses)) {
        Ok(Ok(sandbox)) => {
            let text = format!(
                "{} has the pod's addresses, but no process of the pod is in it, so it may belong to another pod; the agent retries when a container of the pod runs",
                sandbox.path().display()
            );
            return PodProblem::new(AgentReason::NoProcess, text);
        }
        Ok(Err(unfound)) => {
            let PodProblem { reason, text } = unfound.into();
            (reason, text)
        }
        Err(error) => (AgentReason::NotFound, error.to_string()),
    };
    let text = format!("none of the pod's processes is in a network namespace that has its addresses; {why}");
    PodProblem::new(reason, text)
}
