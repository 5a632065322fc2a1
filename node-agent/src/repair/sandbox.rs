//! Finding the network namespace of a pod, surely or not at all.
//!
//! The pod's cgroup says in which namespaces its processes are; the pod's status says which addresses its namespace has. The one that both
//! name is the pod's. The runtime's directory of mounted namespaces says beside whether there is one with the pod's addresses in which
//! nobody lives at present.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use netns_apply::facts;
use netns_apply::netns::Netns;
use netns_apply::pod::hosts;

use super::action::Trouble;
use super::processes::{Census, namespace_of};
use crate::confine::outside;
use pod_netns::{LookupError, NamespaceIndex};

/// A pod, as it is looked for.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Its UID.
    pub uid: &'a str,
    /// All its addresses.
    pub addresses: &'a [IpAddr],
}

/// Opens the network namespace of a pod. Looks at every process of the node: not for an async thread.
///
/// # Errors
/// Why it is not known for sure which one it is.
pub fn open(wanted: &Wanted<'_>, mounted: &Path, proc: &Path) -> Result<Netns, Trouble> {
    if wanted.addresses.is_empty() {
        return Err(Trouble::new("not_found", LookupError::NoAddress));
    }
    let (uid, addresses) = (wanted.uid.to_owned(), wanted.addresses.to_vec());
    let (mounted, proc) = (mounted.to_owned(), proc.to_owned());
    // Who is confined sees no processes.
    outside::run(move || find(&Wanted { uid: &uid, addresses: &addresses }, &mounted, &proc))
        .unwrap_or_else(|| Err(Trouble::new("not_found", "the search for the pod's processes panicked")))
}

fn find(wanted: &Wanted<'_>, mounted: &Path, proc: &Path) -> Result<Netns, Trouble> {
    let unknown = |error: std::io::Error| {
        let text = format!(
            "cannot tell which processes are the pod's: {error}; mount the host's /proc there, or name it in MOUNTED_PROC_DIR, and add SYS_PTRACE to the capabilities"
        );
        Trouble::new("not_found", text)
    };
    let census = Census::of(proc).map_err(unknown)?;
    let mut found = Vec::new();
    let mut others = None;
    for (id, inhabitants) in &census.namespaces {
        if !inhabitants.pods.contains(wanted.uid) {
            continue;
        }
        let netns = match Netns::open(namespace_of(proc, inhabitants.process)) {
            Ok(netns) if netns.id() == *id => netns,
            // The process has ended; the next try finds another one.
            Ok(_) | Err(_) => continue,
        };
        if !is_the_pods(&netns, wanted.addresses, &census)? {
            continue;
        }
        if inhabitants.pods.len() > 1 {
            others = inhabitants.pods.iter().find(|uid| *uid != wanted.uid);
            continue;
        }
        found.push(netns);
    }
    match (found.len(), others) {
        (1, None) => found.pop().ok_or_else(|| nowhere(wanted, mounted, &census)),
        (0, None) => Err(nowhere(wanted, mounted, &census)),
        (_, Some(other)) => {
            let text = format!(
                "processes of another pod (UID {other}) are in the network namespace that has the pod's addresses; it is left alone"
            );
            Err(Trouble::new("other_pod", text))
        }
        (several, None) => {
            let text = format!(
                "processes of the pod are in {several} network namespaces that have its addresses; which one is the pod's cannot be told"
            );
            Err(Trouble::new("ambiguous", text))
        }
    }
}

/// Whether a namespace has all the addresses, and is not the host's.
fn is_the_pods(netns: &Netns, addresses: &[IpAddr], census: &Census) -> Result<bool, Trouble> {
    let failed = |error: &dyn std::fmt::Display| Trouble::new("not_found", error.to_string());
    if census.hosts == Some(netns.id()) || hosts(netns).map_err(|error| failed(&error))?.is_some() {
        return Ok(false);
    }
    let there = netns.run(facts::addresses).map_err(|error| failed(&error))?;
    let there = there.map_err(|error| failed(&error))?;
    Ok(addresses.iter().all(|address| there.contains(address)))
}

/// Why there is none.
fn nowhere(wanted: &Wanted<'_>, mounted: &Path, census: &Census) -> Trouble {
    if let Some(error) = census.hidden.get(wanted.uid) {
        let text =
            format!("processes of the pod cannot be looked at: {error}; add SYS_PTRACE to the capabilities");
        return Trouble::new("not_found", text);
    }
    let addresses: BTreeSet<IpAddr> = wanted.addresses.iter().copied().collect();
    let survey = NamespaceIndex::of(mounted, &addresses);
    match survey.as_ref().map(|survey| survey.find(wanted.addresses)) {
        Ok(Ok(sandbox)) => {
            let text = format!(
                "{} has the pod's addresses, but no process of the pod is in it at present, so it may be another one's; it is looked at again when a container of the pod runs",
                sandbox.path().display()
            );
            Trouble::new("no_process", text)
        }
        Ok(Err(unfound)) => Trouble::new(
            if matches!(unfound, LookupError::Ambiguous { .. }) { "ambiguous" } else { "not_found" },
            format!("no process of the pod is in a network namespace that has its addresses; {unfound}"),
        ),
        Err(error) => Trouble::new(
            "not_found",
            format!("no process of the pod is in a network namespace that has its addresses; {error}"),
        ),
    }
}
