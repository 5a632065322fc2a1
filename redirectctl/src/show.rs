//! Looking at one pod or network namespace.

use std::path::{Path, PathBuf};

use netns_apply::facts::{NameFiles, ambient_here};
use netns_apply::netns::Netns;
use netns_apply::{ApplyError, ApplyOptions, Live};
use pod_netns::{LookupError, NamespaceIndex, SurveyError};
use redirect_core::settings::NamespaceFacts;

use crate::cause::{Cause, Finding};
use crate::diagnosis::{PodDecision, findings};
use crate::inspect::{Inspection, LookError, MOST_RULES, inspect};
use crate::node::Node;
use crate::pod::Pod;
use crate::processes::NodeProcesses;
use crate::report::Report;
use crate::watch::CounterSnapshot;

/// What is to be done with a pod, and what its namespace holds.
pub type Looked = (PodDecision, Option<Inspection>);

/// Checks a network namespace, as that of this pod if any.
#[must_use]
pub fn netns(path: &Path, pod: Option<&Pod>, node: &Node) -> Report {
    let opened = Netns::open(path).map_err(|error| Finding::new(Cause::Unreadable, error.to_string()));
    let looked = opened.and_then(|netns| read_or_cause(&netns, pod, node));
    let subject = pod.map_or_else(|| path.display().to_string(), |pod| format!("pod {}", pod.name));
    let without = || pod.map_or(PodDecision::Unknown, |pod| node.decide_without_namespace(pod));
    report(subject, Some(path.to_owned()), pod, node, looked, without)
}

/// Checks a pod, whose namespace is looked for among those of a directory.
#[must_use]
pub fn pod(pod: &Pod, directory: &Path, node: &Node) -> Report {
    let survey = NamespaceIndex::of(directory, &pod.addresses.iter().copied().collect());
    pod_among(pod, survey.as_ref(), node)
}

/// Checks a pod, whose namespace is looked for among those of a survey for its addresses.
#[must_use]
pub fn pod_among(pod: &Pod, survey: Result<&NamespaceIndex, &SurveyError>, node: &Node) -> Report {
    let without = || node.decide_without_namespace(pod);
    let subject = format!("pod {}", pod.name);
    if pod.host_network || pod.is_over() || pod.addresses.is_empty() {
        return report(subject, None, Some(pod), node, Ok((without(), None)), without);
    }
    let found = survey.map_err(|error| Finding::new(Cause::Unfound, error.to_string()));
    match found.and_then(|survey| find_among(pod, survey, &node.processes)) {
        Ok((path, netns)) => {
            let looked = read_or_cause(&netns, Some(pod), node);
            report(subject, Some(path), Some(pod), node, looked, without)
        }
        Err(unknown) => report(subject, None, Some(pod), node, Err(unknown), without),
    }
}

/// Looks into a namespace.
///
/// # Errors
/// It cannot be looked into.
pub fn read_or_cause(netns: &Netns, pod: Option<&Pod>, node: &Node) -> Result<Looked, Finding> {
    let looked = inspect(netns, node.programming(), |facts| {
        let decided = pod.map_or(PodDecision::Unknown, |pod| here(node.decide(pod, facts)));
        (decided.plan(), decided)
    });
    looked.map(|(seen, decided)| (decided, Some(seen))).map_err(|error| {
        let cause = match error {
            LookError::OthersUnread(_) => Cause::Unverifiable,
            LookError::Netns(_) | LookError::Kernel(_) => Cause::Unreadable,
        };
        Finding::new(cause, error.to_string())
    })
}

/// What the mesh's rules in a network namespace have counted, each with what it is for if the pod is known.
///
/// # Errors
/// The namespace cannot be entered, or its rules cannot be read.
pub(crate) fn counters(netns: &Netns, pod: Option<&Pod>, node: &Node) -> Result<CounterSnapshot, String> {
    let read = netns.run(|| {
        let options = ApplyOptions { most_read: Some(MOST_RULES), ..ApplyOptions::default() };
        let live = Live::now(&options)?;
        let facts = NamespaceFacts::new(&live.addresses).with_names(&NameFiles);
        let plan = pod.and_then(|pod| node.decide(pod, &facts).plan());
        Ok::<_, ApplyError>(CounterSnapshot::of(&live, plan.as_ref()))
    });
    read.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

/// A decision as far as the calling thread's network namespace has IPv6.
pub(crate) fn here(decided: PodDecision) -> PodDecision {
    if let PodDecision::Ambient(redirect, settings) = decided {
        return PodDecision::Ambient(Box::new(ambient_here(*redirect)), settings);
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
) -> Result<(PathBuf, Netns), Finding> {
    let sandbox = processes.find(pod, survey).map_err(|error| unfound(pod, &error))?;
    let netns = sandbox.open().map_err(|error| Finding::new(Cause::Unfound, error.to_string()))?;
    Ok((sandbox.path().to_owned(), netns))
}

/// Why no network namespace is surely the pod's.
pub(crate) fn unfound(pod: &Pod, error: &LookupError) -> Finding {
    let cause = match error {
        LookupError::Ambiguous { .. } => Cause::Ambiguous,
        LookupError::NoAddress | LookupError::Nowhere(_) => Cause::Unfound,
    };
    Finding::new(cause, pod.unfound(error))
}

fn report(
    subject: String,
    netns: Option<PathBuf>,
    pod: Option<&Pod>,
    node: &Node,
    looked: Result<Looked, Finding>,
    without: impl FnOnce() -> PodDecision,
) -> Report {
    let mut all = node.findings.clone();
    let (decided, inspection) = looked.unwrap_or_else(|unknown| {
        all.push(unknown);
        (without(), None)
    });
    let mut of_pod = findings(pod, &decided, inspection.as_ref());
    if let Some(pod) = pod {
        node.add_findings(pod, &decided, &mut of_pod);
    }
    all.extend(of_pod);
    let order = node.file.clone().map(|file| (file, node.order.clone()));
    Report { subject, netns, decided, order, inspection, findings: all }
}
