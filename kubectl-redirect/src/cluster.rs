//! The API server, with a user's kubeconfig.

use kube::api::{GetParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Request;
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::time::Duration;

use crate::Failure;
use crate::objects::List;

/// Objects of a page: large clusters answer in many.
const PAGE: u32 = 500;
/// How long the API server may take for one answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// How the API server is found, as kubectl's flags of the same names say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// A kubeconfig file in place of `KUBECONFIG` and `~/.kube/config`.
    pub kubeconfig: Option<String>,
    /// A context of it in place of the current one.
    pub context: Option<String>,
    /// A namespace in place of the context's.
    pub namespace: Option<String>,
}

/// A kind of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Where its API begins.
    root: &'static str,
    /// Its plural, as in paths and rights.
    resource: &'static str,
}

/// Pods.
pub const PODS: Kind = Kind { root: "/api/v1", resource: "pods" };
/// Nodes.
pub const NODES: Kind = Kind { root: "/api/v1", resource: "nodes" };
/// Namespaces.
pub const NAMESPACES: Kind = Kind { root: "/api/v1", resource: "namespaces" };
/// DaemonSets.
pub const DAEMON_SETS: Kind = Kind { root: "/apis/apps/v1", resource: "daemonsets" };
/// Deployments.
pub const DEPLOYMENTS: Kind = Kind { root: "/apis/apps/v1", resource: "deployments" };
/// ConfigMaps.
pub const CONFIG_MAPS: Kind = Kind { root: "/api/v1", resource: "configmaps" };

impl Kind {
    fn path(self, namespace: Option<&str>) -> String {
        let scope = namespace.map(|name| format!("/namespaces/{name}")).unwrap_or_default();
        format!("{}{scope}/{}", self.root, self.resource)
    }
}

/// The API server.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    url: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Contacts no server yet, unless a credential helper does.
    ///
    /// # Errors
    /// The kubeconfig is of no use.
    pub async fn new(access: &Access) -> Result<Self, Failure> {
        let advice = "name a kubeconfig with --kubeconfig or KUBECONFIG, and a context of it with --context";
        let unusable = |error: &dyn std::error::Error| Failure(format!("{}; {advice}", chain(error)));
        let options = KubeConfigOptions { context: access.context.clone(), ..KubeConfigOptions::default() };
        let config = match &access.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(|error| unusable(&error))?;
                Config::from_custom_kubeconfig(file, &options).await
            }
            None => Config::from_kubeconfig(&options).await,
        };
        let mut config = config.map_err(|error| unusable(&error))?;
        if let Some(namespace) = &access.namespace {
            config.default_namespace.clone_from(namespace);
        }
        let url = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let client = Client::try_from(config).map_err(|error| unusable(&error))?;
        Ok(Self { client, url })
    }

    /// The client itself, for `exec`.
    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// Its address.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The namespace where none is said.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.client.default_namespace()
    }

    /// All objects of a kind, page by page; each page is dropped before the next is read.
    ///
    /// # Errors
    /// They cannot be listed: why, with the right that is missing.
    pub async fn each<T: DeserializeOwned>(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        mut params: ListParams,
        mut see: impl FnMut(T),
    ) -> Result<(), Failure> {
        params.limit = Some(PAGE);
        let what = || format!("list {}", kind.resource);
        loop {
            let request = Request::new(kind.path(namespace)).list(&params);
            let request = request.map_err(|error| Failure(format!("cannot {}: {error}", what())))?;
            let asked = self.patiently(self.client.request::<List<T>>(request)).await;
            let page = asked.map_err(|error| error.about(&what(), &self.url))?;
            page.items.into_iter().for_each(&mut see);
            match page.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => params.continue_token = Some(next),
                None => return Ok(()),
            }
        }
    }

    /// All of a kind, as a list.
    ///
    /// # Errors
    /// As [`Cluster::each`].
    pub async fn list<T: DeserializeOwned>(&self, kind: Kind) -> Result<Vec<T>, Failure> {
        let mut all = Vec::new();
        self.each(kind, None, ListParams::default(), |object| all.push(object)).await?;
        Ok(all)
    }

    /// One object, if it exists.
    ///
    /// # Errors
    /// It cannot be read: why, with the right that is missing.
    pub async fn get<T: DeserializeOwned>(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<T>, Failure> {
        let what = format!("get {} {name}", kind.resource);
        let request = Request::new(kind.path(namespace)).get(name, &GetParams::default());
        let request = request.map_err(|error| Failure(format!("cannot {what}: {error}")))?;
        match self.patiently(self.client.request::<T>(request)).await {
            Ok(object) => Ok(Some(object)),
            Err(AskError::Api(status)) if status.is_not_found() => Ok(None),
            Err(error) => Err(error.about(&what, &self.url)),
        }
    }

    /// Its version.
    ///
    /// # Errors
    /// It does not respond.
    pub async fn version(&self) -> Result<String, Failure> {
        let asked = self.patiently(self.client.apiserver_version()).await;
        asked.map(|info| info.git_version).map_err(|error| error.about("read the version", &self.url))
    }

    /// Whether the user may do something, by the server's own account.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn may(&self, right: &Right) -> Result<bool, Failure> {
        let (resource, subresource) = right.resource.split_once('/').unwrap_or((right.resource, ""));
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {
                "verb": right.verb, "group": right.group, "resource": resource, "subresource": subresource,
                "namespace": right.namespace.as_deref().unwrap_or_default(),
            }},
        });
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let request = Request::new(path).create(&PostParams::default(), review.to_string().into_bytes());
        let request = request.map_err(Failure::of)?;
        let answer = self.patiently(self.client.request::<Value>(request)).await;
        let answer = answer.map_err(|error| error.about("ask for rights", &self.url))?;
        Ok(answer.pointer("/status/allowed").and_then(Value::as_bool) == Some(true))
    }

    async fn patiently<T>(&self, asked: impl Future<Output = kube::Result<T>>) -> Result<T, AskError> {
        match tokio::time::timeout(PATIENCE, asked).await {
            Ok(answer) => answer.map_err(AskError::from),
            Err(_) => Err(AskError::Other(format!("no response within {}s", PATIENCE.as_secs()))),
        }
    }
}

/// A right on objects of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Right {
    /// What may be done.
    pub verb: &'static str,
    /// The API group.
    pub group: &'static str,
    /// The plural of the kind, with a subresource behind a slash.
    pub resource: &'static str,
    /// Where; everywhere if none is named.
    pub namespace: Option<String>,
}

impl std::fmt::Display for Right {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { verb, group, resource, namespace } = self;
        write!(f, "{verb} {resource}")?;
        if !group.is_empty() {
            write!(f, ".{group}")?;
        }
        namespace.as_ref().map_or(Ok(()), |name| write!(f, " in namespace {name}"))
    }
}

/// Why a request failed.
#[derive(Debug)]
pub enum AskError {
    /// The server refused it.
    Api(Box<kube::core::Status>),
    /// It did not come to that.
    Other(String),
}

impl From<kube::Error> for AskError {
    fn from(error: kube::Error) -> Self {
        if let kube::Error::Api(status) = error { Self::Api(status) } else { Self::Other(chain(&error)) }
    }
}

impl AskError {
    /// As a sentence about what was asked for.
    #[must_use]
    pub fn about(&self, what: &str, server: &str) -> Failure {
        Failure(match self {
            Self::Api(status) if status.is_forbidden() => {
                format!("missing right: {what}: {}", status.message)
            }
            Self::Api(status) if status.code == 401 => format!(
                "cannot {what}: {server} does not accept the credentials (401); log in again, or name another context with --context"
            ),
            Self::Api(status) => format!("cannot {what}: {} ({})", status.message, status.code),
            Self::Other(why) => {
                format!("cannot {what}: {why}; does the kubeconfig name the right API server ({server})?")
            }
        })
    }
}

/// An error with all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_paths_of_the_api() {
        assert_eq!(PODS.path(None), "/api/v1/pods");
        assert_eq!(DAEMON_SETS.path(Some("shop")), "/apis/apps/v1/namespaces/shop/daemonsets");
    }

    #[test]
    fn a_missing_right_is_named() {
        let status = kube::core::Status::failure("pods is forbidden: User \"a\" cannot list", "Forbidden")
            .with_code(403);
        let failure = AskError::Api(status.boxed()).about("list pods", "https://x");
        assert_eq!(failure.0, "missing right: list pods: pods is forbidden: User \"a\" cannot list");
        let right = Right {
            verb: "create",
            group: "apps",
            resource: "daemonsets",
            namespace: Some("mesh".to_owned()),
        };
        assert_eq!(right.to_string(), "create daemonsets.apps in namespace mesh");
    }
}
