//! Finding the network namespace of a pod, surely or not at all.
//!
//! The pod's cgroup shows which namespaces its processes are in; the pod's status lists the addresses of its namespace. The one that both
//! name is the pod's. The runtime's directory of mounted namespaces shows whether a namespace with the pod's addresses exists
//! without processes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use netns_apply::facts;
use netns_apply::netns::Netns;
use netns_apply::pod::hosts;
use pod_netns::{LookupError, NamespaceIndex, ProcessIndex, namespace_of};

use super::{AMBIGUOUS, MeshPod, NOT_FOUND, RepairError};
use crate::confine::outside;
use crate::settings::Paths;

/// Opens the network namespace of a pod. Reads every process of the node: not for an async thread.
///
/// # Errors
/// Why it cannot be determined.
pub fn open(pod: &MeshPod, paths: &Paths) -> Result<Netns, RepairError> {
    if pod.addresses.is_empty() {
        return Err(RepairError::new(NOT_FOUND, LookupError::NoAddress));
    }
    let (pod, mounted, proc) = (pod.clone(), paths.netns.clone(), paths.proc.clone());
    // A confined thread sees no processes.
    outside::run(move || find(&pod, &mounted, &proc))
        .unwrap_or_else(|| Err(RepairError::new(NOT_FOUND, "the search for the pod's processes panicked")))
}

fn find(pod: &MeshPod, mounted: &Path, proc: &Path) -> Result<Netns, RepairError> {
    let unknown = |error: std::io::Error| {
        let text = format!(
            "cannot determine the pod's processes: {error}; mount the host's /proc there, or name it in MOUNTED_PROC_DIR, and add SYS_PTRACE to the capabilities"
        );
        RepairError::new(NOT_FOUND, text)
    };
    let processes = ProcessIndex::of(proc).map_err(unknown)?;
    let mut found = Vec::new();
    let mut others = None;
    for (id, inside) in &processes.namespaces {
        if !inside.pods.contains(&pod.uid) {
            continue;
        }
        let netns = match Netns::open(namespace_of(proc, inside.process)) {
            Ok(netns) if netns.id() == *id => netns,
            // The process has ended; the next try finds another one.
            Ok(_) | Err(_) => continue,
        };
        if !belongs_to_pod(&netns, &pod.addresses, &processes)? {
            continue;
        }
        if inside.pods.len() > 1 {
            others = inside.pods.iter().find(|uid| **uid != pod.uid);
            continue;
        }
        found.push(netns);
    }
    match (found.len(), others) {
        (1, None) => found.pop().ok_or_else(|| nowhere(pod, mounted, &processes)),
        (0, None) => Err(nowhere(pod, mounted, &processes)),
        (_, Some(other)) => {
            let text = format!(
                "processes of another pod (UID {other}) are in the network namespace that has the pod's addresses; not changing it"
            );
            Err(RepairError::new("other_pod", text))
        }
        (several, None) => {
            let text = format!(
                "processes of the pod are in {several} network namespaces that have its addresses; ownership is ambiguous"
            );
            Err(RepairError::new(AMBIGUOUS, text))
        }
    }
}

/// Whether a namespace has all the addresses, and is not the host's.
fn belongs_to_pod(
    netns: &Netns,
    addresses: &[IpAddr],
    processes: &ProcessIndex,
) -> Result<bool, RepairError> {
    let failed = |error: &dyn std::fmt::Display| RepairError::new(NOT_FOUND, error.to_string());
    if processes.hosts == Some(netns.id()) || hosts(netns).map_err(|error| failed(&error))?.is_some() {
        return Ok(false);
    }
    let there = netns.run(facts::addresses).map_err(|error| failed(&error))?;
    let there = there.map_err(|error| failed(&error))?;
    Ok(addresses.iter().all(|address| there.contains(address)))
}

/// Why none was found.
fn nowhere(pod: &MeshPod, mounted: &Path, processes: &ProcessIndex) -> RepairError {
    if let Some(error) = processes.hidden.get(&pod.uid) {
        let text = format!("cannot read the pod's processes: {error}; add SYS_PTRACE to the capabilities");
        return RepairError::new(NOT_FOUND, text);
    }
    let addresses: BTreeSet<IpAddr> = pod.addresses.iter().copied().collect();
    let survey = NamespaceIndex::of(mounted, &addresses);
    match survey.as_ref().map(|survey| survey.find(&pod.addresses)) {
        Ok(Ok(sandbox)) => {
            let text = format!(
                "{} has the pod's addresses, but no process of the pod is in it, so it may belong to another pod; the agent retries when a container of the pod runs",
                sandbox.path().display()
            );
            RepairError::new("no_process", text)
        }
        Ok(Err(unfound)) => RepairError::new(
            if matches!(unfound, LookupError::Ambiguous { .. }) { AMBIGUOUS } else { NOT_FOUND },
            format!(
                "none of the pod's processes is in a network namespace that has its addresses; {unfound}"
            ),
        ),
        Err(error) => RepairError::new(
            NOT_FOUND,
            format!("none of the pod's processes is in a network namespace that has its addresses; {error}"),
        ),
    }
}
