//! Looking at one pod or network namespace.

use std::path::{Path, PathBuf};

use netns_apply::netns::Netns;
use pod_netns::{NamespaceIndex, SurveyError};

use crate::cause::{Cause, Finding};
use crate::diagnosis::{PodDecision, findings};
use crate::inspect::{Inspection, inspect};
use crate::node::Node;
use crate::pod::Pod;
use crate::report::Report;

/// What is to be done with a pod, and what its namespace holds.
pub type Looked = (PodDecision, Option<Inspection>);

/// Checks a network namespace, as that of this pod if any.
#[must_use]
pub fn netns(path: &Path, pod: Option<&Pod>, node: &Node) -> Report {
    let opened = Netns::open(path).map_err(|error| error.to_string());
    let looked = opened.and_then(|netns| read_or_cause(&netns, pod, node));
    let subject = pod.map_or_else(|| path.display().to_string(), |pod| format!("pod {}", pod.name));
    let without = || pod.map_or(PodDecision::Unknown, |pod| node.decide_without_namespace(pod));
    report(subject, Some(path.to_owned()), pod, node, looked, Cause::Unreadable, without)
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
        return report(subject, None, Some(pod), node, Ok((without(), None)), Cause::Unfound, without);
    }
    match survey.map_err(ToString::to_string).and_then(|survey| find_among(pod, survey)) {
        Ok((path, netns)) => {
            let looked = read_or_cause(&netns, Some(pod), node);
            report(subject, Some(path), Some(pod), node, looked, Cause::Unreadable, without)
        }
        Err(why) => report(subject, None, Some(pod), node, Err(why), Cause::Unfound, without),
    }
}

/// Looks into a namespace.
///
/// # Errors
/// It cannot be looked into.
pub fn read_or_cause(netns: &Netns, pod: Option<&Pod>, node: &Node) -> Result<Looked, String> {
    let looked = inspect(netns, node.programming(), |facts| {
        let decided = pod.map_or(PodDecision::Unknown, |pod| node.decide(pod, facts));
        (decided.plan(), decided)
    });
    looked.map(|(seen, decided)| (decided, Some(seen))).map_err(|error| error.to_string())
}

/// The network namespace of a pod among those of a directory.
pub(crate) fn find(pod: &Pod, directory: &Path) -> Result<(PathBuf, Netns), String> {
    let wanted = pod.addresses.iter().copied().collect();
    find_among(pod, &NamespaceIndex::of(directory, &wanted).map_err(|error| error.to_string())?)
}

fn find_among(pod: &Pod, survey: &NamespaceIndex) -> Result<(PathBuf, Netns), String> {
    let sandbox = survey.find(&pod.addresses).map_err(|error| pod.unfound(&error))?;
    let netns = sandbox.open().map_err(|error| error.to_string())?;
    Ok((sandbox.path().to_owned(), netns))
}

fn report(
    subject: String,
    netns: Option<PathBuf>,
    pod: Option<&Pod>,
    node: &Node,
    looked: Result<Looked, String>,
    cause: Cause,
    without: impl FnOnce() -> PodDecision,
) -> Report {
    let mut all = node.findings.clone();
    let (decided, inspection) = looked.unwrap_or_else(|why| {
        all.push(Finding::new(cause, why));
        (without(), None)
    });
    all.extend(findings(pod, &decided, inspection.as_ref()));
    let order = node.file.clone().map(|file| (file, node.order.clone()));
    Report { subject, netns, decided, order, inspection, findings: all }
}
