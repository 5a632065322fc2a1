//! Looking at one pod or network namespace.

use std::path::{Path, PathBuf};

use netns_apply::facts::{self, Ipv6};
use netns_apply::netns::Netns;
use netns_apply::{ApplyOptions, Live};
use pod_netns::{LookupError, NamespaceIndex, SurveyError};

use crate::cause::{Cause, PodFinding};
use crate::diagnosis::{PodDecision, findings};
use crate::inspect::{Inspection, inspect};
use crate::node::NodeConfiguration;
use crate::pod::Pod;
use crate::processes::NodeProcesses;
use crate::report::Report;
use crate::watch::CounterSnapshot;

/// Checks a network namespace, as that of this pod if any.
#[must_use]
pub fn netns(path: &Path, pod: Option<&Pod>, node: &NodeConfiguration) -> Report {
    let opened = Netns::open(path).map_err(|error| PodFinding::new(Cause::Unreadable, error.to_string()));
    let looked = opened.and_then(|netns| read_or_cause(&netns, pod, node));
    report(pod, Some(path.to_owned()), node, looked.map(Some))
}

/// Checks a pod, whose namespace is looked for among those of a directory.
#[must_use]
pub fn pod(pod: &Pod, directory: &Path, node: &NodeConfiguration) -> Report {
    let survey = NamespaceIndex::of(directory, &pod.addresses.iter().copied().collect());
    pod_among(pod, survey.as_ref(), node)
}

/// Checks a pod, whose namespace is looked for among those of a survey for its addresses.
#[must_use]
pub fn pod_among(
    pod: &Pod,
    survey: Result<&NamespaceIndex, &SurveyError>,
    node: &NodeConfiguration,
) -> Report {
    if pod.host_network || pod.is_over() || pod.addresses.is_empty() {
        return report(Some(pod), None, node, Ok(None));
    }
    let found = survey.map_err(|error| PodFinding::new(Cause::Unfound, error.to_string()));
    match found.and_then(|survey| find_among(pod, survey, &node.processes)) {
        Ok((path, netns)) => {
            report(Some(pod), Some(path), node, read_or_cause(&netns, Some(pod), node).map(Some))
        }
        Err(unknown) => report(Some(pod), None, node, Err(unknown)),
    }
}

/// Reads a namespace: its contents, and the pod's decision.
///
/// # Errors
/// It cannot be looked into.
pub fn read_or_cause(
    netns: &Netns,
    pod: Option<&Pod>,
    node: &NodeConfiguration,
) -> Result<(Inspection, PodDecision), PodFinding> {
    inspect(netns, node.programming(), node.accepted(pod), |facts| {
        let decided = pod.map_or(PodDecision::Unknown, |pod| here(node.decide(pod, facts)));
        (decided.plan(), decided)
    })
}

/// What the mesh's rules in a network namespace have counted, each with what it is for if the pod is known.
///
/// # Errors
/// The namespace cannot be entered, or its rules cannot be read.
pub(crate) fn counters(
    netns: &Netns,
    pod: Option<&Pod>,
    node: &NodeConfiguration,
) -> Result<CounterSnapshot, String> {
    let read = netns.run(|| {
        let options = ApplyOptions::default().most_read(Some(ApplyOptions::MOST_READ));
        let there = facts::addresses().map_err(|error| error.to_string())?;
        let plan = pod.and_then(|pod| node.decide(pod, &facts::of_namespace(&there)).plan());
        let live = Live::now(plan.as_ref(), &options);
        Ok(CounterSnapshot::of(&live.map_err(|error| error.to_string())?, plan.as_ref()))
    });
    read.map_err(|error| error.to_string())?
}

/// A decision as far as the calling thread's network namespace has IPv6.
pub(crate) fn here(decided: PodDecision) -> PodDecision {
    if let PodDecision::Ambient(redirect, settings) = decided {
        return PodDecision::Ambient(Box::new(Ipv6::here().limit(*redirect)), settings);
    }
    decided
}

/// The network namespace of a pod among those of a directory.
pub(crate) fn find(
    pod: &Pod,
    directory: &Path,
    processes: &NodeProcesses,
) -> Result<(PathBuf, Netns), String> {
    let wanted = pod.addresses.iter().copied().collect();
    let survey = NamespaceIndex::of(directory, &wanted).map_err(|error| error.to_string())?;
    find_among(pod, &survey, processes).map_err(|unknown| unknown.seen.join("; "))
}

fn find_among(
    pod: &Pod,
    survey: &NamespaceIndex,
    processes: &NodeProcesses,
) -> Result<(PathBuf, Netns), PodFinding> {
    let sandbox = processes.find(pod, survey).map_err(|error| unfound(pod, &error))?;
    let netns = sandbox.open().map_err(|error| PodFinding::new(Cause::Unfound, error.to_string()))?;
    Ok((sandbox.path().to_owned(), netns))
}

/// Why no network namespace is surely the pod's.
pub(crate) fn unfound(pod: &Pod, error: &LookupError) -> PodFinding {
    let cause = match error {
        LookupError::Ambiguous { .. } => Cause::Ambiguous,
        LookupError::NoAddress | LookupError::Nowhere(_) => Cause::Unfound,
    };
    PodFinding::new(cause, pod.unfound(error))
}

fn report(
    pod: Option<&Pod>,
    netns: Option<PathBuf>,
    node: &NodeConfiguration,
    looked: Result<Option<(Inspection, PodDecision)>, PodFinding>,
) -> Report {
    let mut all = node.findings.clone();
    let without = || pod.map_or(PodDecision::Unknown, |pod| node.decide_without_namespace(pod));
    let (inspection, decided) = match looked {
        Ok(Some((seen, decided))) => (Some(seen), decided),
        Ok(None) => (None, without()),
        Err(unknown) => {
            all.push(unknown);
            (None, without())
        }
    };
    let mut of_pod = findings(pod, &decided, inspection.as_ref());
    if let Some(pod) = pod {
        node.add_findings(pod, &decided, &mut of_pod);
    }
    all.extend(of_pod);
    let path = || netns.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let subject = pod.map_or_else(path, |pod| format!("pod {}", pod.name));
    let order = node.file.clone().map(|file| (file, node.order.clone()));
    Report { subject, netns, decided, order, inspection, findings: all }
}
