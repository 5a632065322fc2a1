//! Where pods come from: the API server, or a folder of manifests.

mod api;
mod manifests;

pub use crate::pod_name::PodName;

use crate::{
    conf::Conf,
    plugin_event::GivenPod,
    wire::{CniError, Code},
};
use api::Tries;
use cluster_client::ApiError;
use cluster_client::kubeconfig::{self, KubeconfigError};
use redirect_core::pod::PodFacts;
use serde_json::{Map, Value};
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

/// A pod as it was read.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadPod {
    /// What a sidecar's redirection depends on.
    pub facts: PodFacts,
    /// The object.
    pub object: Value,
    /// The labels of its namespace, if they came with it.
    pub namespace_labels: Option<Map<String, Value>>,
    /// The handler of its runtime class, if it came with it.
    pub runtime_handler: Option<String>,
}

impl ReadPod {
    /// `origin`: what is prepended to problems.
    fn new(pod: &PodName, object: Value, origin: &str) -> Result<Self, PodError> {
        let facts = PodFacts::from_json(&object).map_err(|errors| PodError::Unreadable {
            what: format!("pod {pod}"),
            problems: errors.iter().map(|problem| format!("{origin}{problem}")).collect(),
        })?;
        Ok(Self { facts, object, namespace_labels: None, runtime_handler: None })
    }
}

/// Reads a pod from wherever the configuration says. A pod from the API server has to have this UID, unless that is empty.
///
/// # Errors
/// Why it cannot be read, at the latest when the deadline passes.
pub fn read(conf: &Conf, pod: &PodName, uid: &str, deadline: Instant) -> Result<ReadPod, PodError> {
    match &conf.manifest_dir {
        Some(folder) => manifests::read(folder, pod, conf.node_name.as_deref()),
        None => api::read(&conf.kubeconfig, pod, uid, Tries::until(deadline)),
    }
}

/// A pod as the node agent gave it; none if it is not the pod of this name and UID.
#[must_use]
pub fn given(pod: &PodName, uid: &str, given: GivenPod) -> Option<Result<ReadPod, PodError>> {
    let GivenPod { pod: object, namespace_labels, runtime_handler } = given;
    let is_it = api::check(&object, pod, uid, "").is_ok();
    let whole = |read| ReadPod { namespace_labels, runtime_handler, ..read };
    is_it.then(|| ReadPod::new(pod, object, "").map(whole))
}

/// The handler of a runtime class, where an API server has pods; none if it may not be read there.
///
/// # Errors
/// As [`read`].
pub fn handler(conf: &Conf, class: &str, deadline: Instant) -> Result<Option<String>, PodError> {
    match &conf.manifest_dir {
        Some(_) => Ok(None),
        None => api::handler(&conf.kubeconfig, class, Tries::until(deadline)),
    }
}

/// The labels of a namespace, where an API server has pods; a folder of manifests has none.
///
/// # Errors
/// As [`read`].
pub fn namespace_labels(
    conf: &Conf,
    namespace: &str,
    deadline: Instant,
) -> Result<Map<String, Value>, PodError> {
    match &conf.manifest_dir {
        Some(_) => Ok(Map::new()),
        None => api::namespace_labels(&conf.kubeconfig, namespace, Tries::until(deadline)),
    }
}

/// Whether ADD could read pods now: one request of each kind that it needs, for this pod, which need not exist. A folder of
/// manifests takes none.
///
/// # Errors
/// Why it could not.
pub fn try_access(conf: &Conf, pod: &PodName, patience: Duration) -> Result<(), PodError> {
    if conf.manifest_dir.is_some() {
        return Ok(());
    }
    let tries = || Tries::once(Instant::now() + patience);
    let is_answer = |error: &PodError| {
        matches!(error, PodError::Absent(_) | PodError::Another { .. } | PodError::Unreadable { .. })
    };
    let unless_answered = |error: PodError| if is_answer(&error) { Ok(()) } else { Err(error) };
    api::read(&conf.kubeconfig, pod, "", tries()).map(drop).or_else(unless_answered)?;
    if conf.ambient_enabled {
        api::namespace_labels(&conf.kubeconfig, &pod.namespace, tries())
            .map(drop)
            .or_else(unless_answered)?;
    }
    Ok(())
}

/// Whether pods could be read now, judging by this machine alone.
///
/// # Errors
/// Why not.
pub fn check(conf: &Conf) -> Result<(), PodError> {
    match &conf.manifest_dir {
        Some(folder) => manifests::check(folder),
        None => kubeconfig::check(&conf.kubeconfig).map_err(PodError::Kubeconfig),
    }
}

/// Why a pod cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodError {
    /// The kubeconfig cannot be used.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigError),
    /// The API server does not take our credentials (401).
    #[error("the API server does not accept the credentials in {kubeconfig} (401): {message}", kubeconfig = .kubeconfig.display())]
    Unauthorized {
        /// Where they are.
        kubeconfig: PathBuf,
        /// What the server says.
        message: String,
    },
    /// The API server does not let us read the pod (403).
    #[error("the API server does not let this plugin read pods (403): {0}")]
    Forbidden(String),
    /// The API server does not let us read the pod's namespace (403).
    #[error("the API server does not let this plugin read namespaces (403): {0}")]
    NamespaceForbidden(String),
    /// No such object (404): its kind and name, and what it has to do with the pod.
    #[error("the API server has no {0}")]
    Absent(String),
    /// The API server cannot be reached or trusted, or is perhaps another server.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The API server gives another answer.
    #[error("the API server cannot serve the pod now ({code}): {message}")]
    Busy {
        /// The HTTP status.
        code: u16,
        /// What the server says.
        message: String,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// The pod of this name is not the one the runtime starts.
    #[error("pod {pod} was recreated: its UID is {found}, not {wanted}")]
    Another {
        /// The name of both.
        pod: PodName,
        /// The UID the API server has.
        found: String,
        /// The UID the runtime named.
        wanted: String,
    },
    /// The object cannot be read as what it should be.
    #[error("{what}: {}", .problems.join("; "))]
    Unreadable {
        /// Its kind and name.
        what: String,
        /// Everything wrong with it, each with its field.
        problems: Vec<String>,
    },
    /// The manifest folder cannot be read.
    #[error("pod_manifest_dir: cannot read {path}: {message}", path = .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the kernel says.
        message: String,
    },
    /// No manifest is the pod's.
    #[error("pod_manifest_dir: no manifest in {path} is that of pod {pod}{}", and_unreadable(.unreadable), path = .path.display())]
    NoManifest {
        /// The folder.
        path: PathBuf,
        /// Which pod.
        pod: PodName,
        /// Files that could not be read, with the reason.
        unreadable: Vec<String>,
    },
}

fn and_unreadable(files: &[String]) -> String {
    if files.is_empty() { String::new() } else { format!("; unreadable: {}", files.join("; ")) }
}

impl PodError {
    /// The code of the error object, and what to do.
    #[must_use]
    pub const fn advice(&self) -> (Code, &'static str) {
        match self {
            Self::Kubeconfig(KubeconfigError::Missing { .. }) => {
                (Code::TryAgain, "the node agent writes it when it starts: is its pod on this node running?")
            }
            Self::Kubeconfig(KubeconfigError::Unusable { .. }) => {
                (Code::Kubeconfig, "the node agent writes it; check its log")
            }
            Self::Unauthorized { .. } => {
                (Code::TryAgain, "the node agent renews the token; check its log if this goes on")
            }
            Self::Forbidden(_) => (
                Code::Forbidden,
                "give the service account that the message names the verb get on pods (ClusterRole and \
                 ClusterRoleBinding istio-cni-plugin, or istio-cni where the plugin has no account of its own)",
            ),
            Self::NamespaceForbidden(_) => (
                Code::Forbidden,
                "give the service account that the message names the verb get on namespaces, by which ambient mode selects pods \
                 (ClusterRole and ClusterRoleBinding istio-cni-plugin, or istio-cni where the plugin has no account of its own)",
            ),
            Self::Absent(_) => {
                (Code::TryAgain, "it may have been deleted, or the API server may lag behind the kubelet")
            }
            Self::Api(ApiError::Untrusted { .. }) => (
                Code::Untrusted,
                "the certificate authority in the kubeconfig is not the API server's; the node agent writes it",
            ),
            Self::Api(ApiError::Garbled { .. }) => (
                Code::TryAgain,
                "a proxy or load balancer may answer in the API server's place, at the address in the kubeconfig",
            ),
            Self::Api(_) | Self::Busy { .. } => {
                (Code::TryAgain, "the API server may be starting, or the node may have no route to it")
            }
            Self::Another { .. } => {
                (Code::TryAgain, "the pod was deleted, and recreated; the runtime drops this sandbox")
            }
            Self::Unreadable { .. } => (Code::Pod, ""),
            Self::Folder { .. } => (Code::Config, ""),
            Self::NoManifest { .. } => (
                Code::TryAgain,
                "a manifest counts where namespace and name are the pod's; static pods are named NAME-NODE",
            ),
        }
    }
}

impl From<PodError> for CniError {
    fn from(error: PodError) -> Self {
        let (code, details) = error.advice();
        Self::new(code, error.to_string()).with_details(details)
    }
}
