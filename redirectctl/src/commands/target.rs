//! The network namespace that a command works on, named by itself or by its pod.

use std::path::PathBuf;

use super::Given;
use crate::error::PodInputError;
use crate::input;
use crate::pod::Pod;
use crate::show;

/// The network namespace that this runs in.
pub(super) const OWN: &str = "/proc/self/ns/net";

/// A network namespace, and the pod it is of where one is known.
#[derive(Debug)]
pub(super) struct NamespaceTarget {
    pub(super) pod: Option<Pod>,
    pub(super) path: PathBuf,
}

impl NamespaceTarget {
    /// The one that `POD`, `--file` and `--netns` name; by default the one this runs in. Not kept open, which
    /// would keep it alive.
    pub(super) fn of(given: &Given, pod: Option<&str>) -> Result<Self, PodInputError> {
        let pod = match (pod, given.flag("file")) {
            (Some(name), _) => Some(given.pod_named(name)?),
            (None, Some(file)) => Some(input::pod_of_file(file)?),
            (None, None) => None,
        };
        match pod {
            Some(pod) => Self::of_pod(pod, given),
            None => Ok(Self { pod: None, path: given.flag("netns").unwrap_or(OWN).into() }),
        }
    }

    /// That of a pod, unless `--netns` names it.
    pub(super) fn of_pod(pod: Pod, given: &Given) -> Result<Self, PodInputError> {
        let path = path_of(&pod, given)?;
        Ok(Self { pod: Some(pod), path })
    }

    /// What it is called.
    pub(super) fn subject(&self) -> String {
        self.pod.as_ref().map_or_else(|| self.path.display().to_string(), |pod| format!("pod {}", pod.name))
    }
}

/// The one that `--netns` names, else that of the pod that `--pod` names; none without both, because a manifest may be of a pod that does not run.
pub(super) fn named(given: &Given, pod: Option<&Pod>) -> Result<Option<PathBuf>, PodInputError> {
    match given.flag("pod").and(pod) {
        Some(pod) => path_of(pod, given).map(Some),
        None => Ok(given.flag("netns").map(Into::into)),
    }
}

/// The one that `--netns` names, else that of a pod.
fn path_of(pod: &Pod, given: &Given) -> Result<PathBuf, PodInputError> {
    if let Some(path) = given.flag("netns") {
        return Ok(path.into());
    }
    if pod.host_network {
        return Err(PodInputError::of(format!(
            "pod {} is on the host's network, and has no network namespace of its own",
            pod.name
        )));
    }
    let directory = given.netns_dir();
    let found = show::find(pod, &directory, &given.processes()).map_err(|why| {
        let pod = &pod.name;
        PodInputError::of(format!(
            "the network namespace of pod {pod} is not found: {why}; name it with --netns"
        ))
    })?;
    Ok(found.0)
}
