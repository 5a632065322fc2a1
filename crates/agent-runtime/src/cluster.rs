//! The API server: a client with the service account's current files, and events.

use std::sync::Mutex;
use std::time::Duration;

use cluster_client::params::{GetParams, PostParams};
use cluster_client::{
    AccessError, Account, ApiError, Built, Client, PartialObjectMeta, Request, RequestError,
};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::{Timestamp, Unit};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use reasons::{AgentReason, EventReason};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::metrics::ResultLabel;
use crate::{SCOPE, lock};

/// How long one request may take. A request that hangs must not delay the shutdown.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// The longest event message that the API server accepts is 1024 bytes.
const LONGEST_MESSAGE: usize = 1000;

/// Who a controller is in the cluster. Empty texts are unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerIdentity {
    /// Its namespace.
    pub namespace: String,
    /// Its pod.
    pub pod: String,
    /// Its node.
    pub node: String,
    /// The DaemonSet of the agents.
    pub daemon_set: String,
}

/// How a controller gets a client of the API server.
#[derive(Debug)]
pub struct ApiHandle {
    account: Account,
    identity: ControllerIdentity,
    problem: Mutex<Option<String>>,
}

impl ApiHandle {
    /// Sends and reads nothing yet.
    #[must_use]
    pub const fn new(account: Account, identity: ControllerIdentity) -> Self {
        Self { account, identity, problem: Mutex::new(None) }
    }

    /// The API server, with the service account's files as they are now.
    ///
    /// # Errors
    /// They cannot be read, or do not make a client.
    pub fn get(&self) -> Result<Cluster, AccessError> {
        let client = self.account.client();
        let problem = client.as_ref().err().map(ToString::to_string);
        *lock(&self.problem) = problem;
        Ok(Cluster { client: client?, identity: self.identity.clone() })
    }

    /// Why the last [`get`](Self::get) returned no client, if so.
    pub fn problem(&self) -> Option<String> {
        lock(&self.problem).clone()
    }

    /// The same API server for the owner of another token.
    ///
    /// # Errors
    /// The authority cannot be read, or does not make a client.
    pub fn with_token(&self, token: &str) -> Result<Cluster, AccessError> {
        Ok(Cluster { client: self.account.client_with(token)?, identity: self.identity.clone() })
    }

    /// Sends an event about an object, and counts it. A failure is logged for debugging: whatever an event reports is in the log too.
    ///
    /// # Errors
    /// The API server did not accept it.
    pub async fn publish(
        &self,
        counter: &Family<ResultLabel, Counter>,
        event: EventMessage,
    ) -> Result<(), String> {
        let reason = event.reason;
        let sent = match self.get() {
            Ok(cluster) => cluster.send_event(event).await,
            Err(error) => Err(error.to_string()),
        };
        let result = if sent.is_ok() { AgentReason::Sent } else { AgentReason::Failed };
        counter.get_or_create(&result.into()).inc();
        if let Err(error) = &sent {
            log::debug!(target: SCOPE, reason = reason.word(); "cannot send an event, which needs the verb create on events: {error}");
        }
        sent
    }

    /// The controller's own pod, for events about it.
    #[must_use]
    pub fn own_pod(&self) -> ObjectReference {
        pod_reference(&self.identity.namespace, &self.identity.pod, None)
    }
}

/// An event.
#[derive(Debug)]
pub struct EventMessage {
    /// The object.
    pub about: ObjectReference,
    /// What reports it.
    pub component: &'static str,
    /// Normal or Warning.
    pub kind: &'static str,
    /// Its reason, for people and programs.
    pub reason: EventReason,
    /// Its message.
    pub message: String,
}

/// The API server.
#[derive(Debug, Clone)]
pub struct Cluster {
    client: Client,
    identity: ControllerIdentity,
}

impl Cluster {
    /// The client.
    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// The identity of this controller.
    #[must_use]
    pub const fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    /// Sends a request, and returns the object that answers it.
    ///
    /// # Errors
    /// Why none is available.
    pub async fn json<T: DeserializeOwned>(&self, request: Built) -> Result<T, ApiError> {
        self.client.json(request, PATIENCE).await
    }

    /// The same for an object that may not exist; none if the API server reports that it does not.
    ///
    /// # Errors
    /// Why that cannot be determined.
    pub async fn find<T: DeserializeOwned>(&self, request: Built) -> Result<Option<T>, ApiError> {
        self.client.find(request, PATIENCE).await
    }

    /// The UID of a pod of this name, if it can be read. `kubectl describe` shows no event about a pod without it.
    async fn uid_of_pod(&self, namespace: &str, name: &str) -> Option<String> {
        let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
        let request = pods.get_metadata(name, &GetParams::default());
        let found = self.find::<PartialObjectMeta<Pod>>(request).await;
        found.ok().flatten().and_then(|pod| pod.metadata.uid)
    }

    async fn send_event(&self, event: EventMessage) -> Result<(), String> {
        let EventMessage { mut about, component, kind, reason, message } = event;
        let is_named = |part: Option<&String>| part.is_some_and(|part| !part.is_empty());
        // The API server keeps events about what has no namespace in this one.
        let is_global = about.kind.as_deref() == Some("Node");
        let namespace = if is_global { Some("default".to_owned()) } else { about.namespace.clone() };
        let Some(namespace) =
            namespace.filter(|name| !name.is_empty()).filter(|_| is_named(about.name.as_ref()))
        else {
            return Err("POD_NAME or POD_NAMESPACE is not set".to_owned());
        };
        if let (None, Some("Pod"), Some(name)) = (&about.uid, about.kind.as_deref(), &about.name) {
            about.uid = self.uid_of_pod(&namespace, name).await;
        }
        let now = Time(Timestamp::now());
        let event = Event {
            metadata: ObjectMeta {
                generate_name: about.name.as_deref().map(|name| format!("{name}.")),
                namespace: Some(namespace.clone()),
                ..ObjectMeta::default()
            },
            involved_object: about,
            reason: Some(reason.to_string()),
            message: Some(message.chars().take(LONGEST_MESSAGE).collect()),
            type_: Some(kind.to_owned()),
            source: Some(EventSource {
                component: Some(component.to_owned()),
                host: Some(self.identity.node.clone()),
            }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Event::default()
        };
        let request = creation(&format!("/api/v1/namespaces/{namespace}/events"), &event);
        let sent = self.json::<Value>(request).await;
        sent.map(drop).map_err(|error| error.to_string())
    }
}

fn creation(path: &str, event: &Event) -> Built {
    let data = serde_json::to_vec(event).map_err(RequestError::SerializeBody)?;
    Request::new(path).create(&PostParams::default(), data)
}

/// Makes a request a JSON patch (RFC 6902) that was made a merge patch. The library's own JSON patches need two more crates and produce the
/// same bytes.
pub fn as_json_patch(mut request: Built) -> Built {
    if let Ok(request) = &mut request {
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json-patch+json"));
    }
    request
}

/// A pod, for events about it; with its UID if that is known.
#[must_use]
pub fn pod_reference(namespace: &str, name: &str, uid: Option<&str>) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(name.to_owned()),
        namespace: Some(namespace.to_owned()),
        uid: uid.map(str::to_owned),
        ..ObjectReference::default()
    }
}

/// The current time as the API server writes it, in seconds.
#[must_use]
pub fn timestamp() -> String {
    Timestamp::now().round(Unit::Second).unwrap_or_else(|_| Timestamp::now()).to_string()
}
