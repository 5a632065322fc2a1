//! The API server, with a user's kubeconfig.

use api_lists::{ListLimits, Listing};
use http_body_util::BodyExt as _;
use kube::api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::request::Error as RequestError;
use kube::core::{Request, Status};
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::time::Duration;

use crate::CommandFailure;

type Built = Result<http::Request<Vec<u8>>, RequestError>;

/// Objects of a page: large clusters answer in many.
const PAGE: u32 = 500;
/// How long the API server may take for one answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// The largest list: Kubernetes is tested with 150,000 pods.
const MOST: ListLimits = ListLimits { objects: 500_000, bytes: 32 << 30 };
/// The largest page of one.
const MOST_PAGE: usize = 128 << 20;
/// The largest object.
const MOST_OBJECT: usize = 8 << 20;
/// The most that is read of what a server says about a failure, and that is shown of it.
const MOST_WORDS: usize = 64 << 10;
const MOST_SHOWN: usize = 1000;

/// How the API server is found, as kubectl's flags of the same names say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubectlFlags {
    /// A kubeconfig file in place of `KUBECONFIG` and `~/.kube/config`.
    pub kubeconfig: Option<String>,
    /// A context of it in place of the current one.
    pub context: Option<String>,
    /// A namespace in place of the context's.
    pub namespace: Option<String>,
    /// The namespace of the agents, in place of the one that the chart's objects name.
    pub agents: Option<String>,
    /// As which user, and as a member of which groups, to ask, in place of those that the kubeconfig impersonates.
    pub user: Option<String>,
    /// The groups.
    pub groups: Vec<String>,
}

/// A kind of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectKind {
    /// Where its API begins.
    root: &'static str,
    /// Its plural, as in paths and rights.
    resource: &'static str,
    /// Of its lists.
    list: &'static str,
}

/// Pods.
pub const PODS: ObjectKind = kind("/api/v1", "pods", "PodList");
/// Events.
pub const EVENTS: ObjectKind = kind("/api/v1", "events", "EventList");
/// Nodes.
pub const NODES: ObjectKind = kind("/api/v1", "nodes", "NodeList");
/// Namespaces.
pub const NAMESPACES: ObjectKind = kind("/api/v1", "namespaces", "NamespaceList");
/// DaemonSets.
pub const DAEMON_SETS: ObjectKind = kind("/apis/apps/v1", "daemonsets", "DaemonSetList");
/// Deployments.
pub const DEPLOYMENTS: ObjectKind = kind("/apis/apps/v1", "deployments", "DeploymentList");
/// ConfigMaps.
pub const CONFIG_MAPS: ObjectKind = kind("/api/v1", "configmaps", "ConfigMapList");
/// ClusterRoleBindings.
pub const BINDINGS: ObjectKind =
    kind("/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", "ClusterRoleBindingList");

const fn kind(root: &'static str, resource: &'static str, list: &'static str) -> ObjectKind {
    ObjectKind { root, resource, list }
}

impl ObjectKind {
    fn path(self, namespace: Option<&str>) -> String {
        let scope = namespace.map(|name| format!("/namespaces/{name}")).unwrap_or_default();
        format!("{}{scope}/{}", self.root, self.resource)
    }
}

/// The API server.
#[derive(Clone)]
pub struct KubeApi {
    client: Client,
    url: String,
    agents: Option<String>,
}

impl std::fmt::Debug for KubeApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubeApi").field("url", &self.url).finish_non_exhaustive()
    }
}

impl KubeApi {
    /// Contacts no server yet, unless a credential helper does.
    ///
    /// # Errors
    /// The kubeconfig is of no use.
    pub async fn new(access: &KubectlFlags) -> Result<Self, CommandFailure> {
        let advice = "name a kubeconfig with --kubeconfig or KUBECONFIG, and a context of it with --context";
        let unusable = |error: &dyn std::error::Error| {
            let text = chain(error);
            // The library blames the key where it cannot read the certificate.
            if text.contains("UnsupportedCertVersion") {
                return CommandFailure::of(
                    "the kubeconfig's client certificate is of X.509 version 1; have one of version 3 issued",
                );
            }
            CommandFailure(format!("{text}; {advice}"))
        };
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
        if let Some(user) = &access.user {
            let auth = &mut config.auth_info;
            auth.impersonate = Some(user.clone());
            auth.impersonate_groups = Some(access.groups.clone());
            (auth.impersonate_uid, auth.impersonate_user_extra) = (None, None);
        }
        let url = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let client = Client::try_from(config).map_err(|error| unusable(&error))?;
        Ok(Self { client, url, agents: access.agents.clone() })
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

    /// The namespace of the agents, if one is named.
    #[must_use]
    pub fn agents(&self) -> Option<&str> {
        self.agents.as_deref()
    }

    /// All objects of a kind, page by page; each page is dropped before the next is read.
    ///
    /// # Errors
    /// They cannot be listed: why, with the right that is missing.
    pub async fn each<T: DeserializeOwned>(
        &self,
        kind: ObjectKind,
        namespace: Option<&str>,
        mut params: ListParams,
        mut see: impl FnMut(T),
    ) -> Result<(), CommandFailure> {
        params.limit = Some(PAGE);
        let what = format!("list {}", kind.resource);
        let failed = |error: AskError| error.about(&what, &self.url);
        let mut listing = Listing::new(kind.list, MOST);
        let keep = |object: &Value| Some(T::deserialize(object).map_err(|error| error.to_string()));
        loop {
            let request = Request::new(kind.path(namespace)).list(&params);
            let text = self.ask(request, MOST_PAGE).await.map_err(failed)?;
            let page =
                listing.page(&*text, &keep).map_err(|error| failed(AskError::Other(error.to_string())))?;
            for object in page.kept {
                see(object.map_err(|error| failed(AskError::Other(error)))?);
            }
            match page.rest {
                Some(next) => params.continue_token = Some(next),
                None => return Ok(()),
            }
        }
    }

    /// All of a kind, as a list.
    ///
    /// # Errors
    /// As [`KubeApi::each`].
    pub async fn list<T: DeserializeOwned>(&self, kind: ObjectKind) -> Result<Vec<T>, CommandFailure> {
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
        kind: ObjectKind,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<T>, CommandFailure> {
        let request = Request::new(kind.path(namespace)).get(name, &GetParams::default());
        self.unless_missing(&format!("get {} {name}", kind.resource), request).await
    }

    /// Creates an object in a namespace.
    ///
    /// # Errors
    /// It does not exist afterwards, or it is not known whether it does: why, with the right that is missing.
    pub async fn create(
        &self,
        kind: ObjectKind,
        namespace: &str,
        object: &Value,
    ) -> Result<(), CommandFailure> {
        let objects = Request::new(kind.path(Some(namespace)));
        let request = objects.create(&PostParams::default(), object.to_string().into_bytes());
        self.done(&format!("create {} in namespace {namespace}", kind.resource), request).await.map(drop)
    }

    /// Deletes an object, if it exists.
    ///
    /// # Errors
    /// It may exist for longer: why, with the right that is missing.
    pub async fn delete(&self, kind: ObjectKind, namespace: &str, name: &str) -> Result<(), CommandFailure> {
        let request = Request::new(kind.path(Some(namespace))).delete(name, &DeleteParams::default());
        let what = format!("delete {} {namespace}/{name}", kind.resource);
        self.unless_missing::<Value>(&what, request).await.map(drop)
    }

    /// Changes an object by a JSON patch (RFC 6902).
    ///
    /// # Errors
    /// It stays as it is: why, with the right that is missing.
    pub async fn patch_json(
        &self,
        kind: ObjectKind,
        name: &str,
        patch: &Value,
    ) -> Result<(), CommandFailure> {
        // The library's own type for it takes another crate, and has the same bytes.
        let mut request =
            Request::new(kind.path(None)).patch(name, &PatchParams::default(), &Patch::Merge(patch));
        if let Ok(request) = &mut request {
            let media = http::HeaderValue::from_static("application/json-patch+json");
            request.headers_mut().insert(http::header::CONTENT_TYPE, media);
        }
        self.done(&format!("patch {} {name}", kind.resource), request).await.map(drop)
    }

    /// Changes an object's status by a strategic merge patch.
    ///
    /// # Errors
    /// As [`KubeApi::patch_json`].
    pub async fn patch_status(
        &self,
        kind: ObjectKind,
        name: &str,
        patch: &Value,
    ) -> Result<(), CommandFailure> {
        let objects = Request::new(kind.path(None));
        let request =
            objects.patch_subresource("status", name, &PatchParams::default(), &Patch::Strategic(patch));
        self.done(&format!("patch {}/status {name}", kind.resource), request).await.map(drop)
    }

    /// Its version.
    ///
    /// # Errors
    /// It does not respond.
    pub async fn version(&self) -> Result<String, CommandFailure> {
        // `/version` is not a collection, and read as if it were an object of one.
        let what = "read the version";
        let info = self.done(what, Request::new("").get("version", &GetParams::default())).await?;
        let version = info.get("gitVersion").and_then(Value::as_str).map(str::to_owned);
        version.ok_or_else(|| AskError::Other("the answer has no version".to_owned()).about(what, &self.url))
    }

    /// Whether the user may do something, by the server's own account.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn may(&self, right: &Right) -> Result<bool, CommandFailure> {
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
        let answer = self.done("ask for rights", request).await?;
        Ok(answer.pointer("/status/allowed").and_then(Value::as_bool) == Some(true))
    }

    /// The answer to a request to do something.
    async fn done(&self, what: &str, request: Built) -> Result<Value, CommandFailure> {
        self.json(request).await.map_err(|error| error.about(what, &self.url))
    }

    /// The same; none where the object does not exist.
    async fn unless_missing<T: DeserializeOwned>(
        &self,
        what: &str,
        request: Built,
    ) -> Result<Option<T>, CommandFailure> {
        match self.json(request).await {
            Ok(answer) => Ok(Some(answer)),
            Err(AskError::Api(status)) if status.is_not_found() => Ok(None),
            Err(error) => Err(error.about(what, &self.url)),
        }
    }

    async fn json<T: DeserializeOwned>(&self, request: Built) -> Result<T, AskError> {
        let text = self.ask(request, MOST_OBJECT).await?;
        serde_json::from_slice(&text)
            .map_err(|error| AskError::Other(format!("the answer is not what was asked for: {error}")))
    }

    /// The answer, which has at most so many bytes.
    async fn ask(&self, request: Built, most: usize) -> Result<Vec<u8>, AskError> {
        let request = request.map_err(|error| AskError::Other(error.to_string()))?;
        let answer = tokio::time::timeout(PATIENCE, self.answer(request, most)).await;
        answer.unwrap_or_else(|_| Err(AskError::Other(format!("no response within {}s", PATIENCE.as_secs()))))
    }

    async fn answer(&self, request: http::Request<Vec<u8>>, most: usize) -> Result<Vec<u8>, AskError> {
        let (head, body) = self.client.send(request.map(Body::from)).await?.into_parts();
        if head.status.is_success() {
            return whole(body, most).await;
        }
        // The status says enough where the words do not come.
        let words = whole(body, MOST_WORDS).await.unwrap_or_default();
        let status = serde_json::from_slice::<Status>(&words).ok().filter(|status| status.code != 0);
        Err(AskError::Api(Box::new(status.unwrap_or_else(|| {
            let words = String::from_utf8_lossy(&words);
            Status::failure(&words, head.status.canonical_reason().unwrap_or_default())
                .with_code(head.status.as_u16())
        }))))
    }
}

/// A whole body; a larger one is an error.
async fn whole(mut body: Body, most: usize) -> Result<Vec<u8>, AskError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(piece) = frame?.into_data() else { continue };
        if bytes.len() + piece.len() > most {
            return Err(AskError::Other(format!("the answer has more than {most} bytes")));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

/// The beginning of what a server says.
pub(crate) fn shown(words: &str) -> String {
    words.chars().take(MOST_SHOWN).collect()
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
    pub fn about(&self, what: &str, server: &str) -> CommandFailure {
        CommandFailure(match self {
            Self::Api(status) if status.is_forbidden() => {
                format!("missing right: {what}: {}", shown(&status.message))
            }
            Self::Api(status) if status.code == 401 => format!(
                "cannot {what}: {server} does not accept the credentials (401); log in again, or name another context with --context"
            ),
            Self::Api(status) => format!("cannot {what}: {} ({})", shown(&status.message), status.code),
            Self::Other(why) => {
                let why = shown(why);
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
