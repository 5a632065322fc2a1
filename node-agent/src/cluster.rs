//! The API server, as far as the agent needs it: its own DaemonSet, its node's labels and pods, events.

mod change;
mod follow;
mod nodes;
mod own_pod;
mod pods;
mod token;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use cluster_client::params::{GetParams, PostParams, WatchParams};
use cluster_client::{
    AccessError, Account, ApiError, Backoff, Client, Limits, Outage, PartialObjectMeta, Request, WatchEvent,
};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, EventSource, Node, NodeSelectorRequirement, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use crate::leave::{Lookup, OwnPod, Seen};
use crate::ready::State;
use crate::settings::{Identity, Settings};
use crate::supervisor::Unneeded;

pub use change::{ChangeError, SeenPod};
pub use follow::{PodEvent, WatchEnd};
pub use nodes::{NODES, NodeError, TRIES};
pub use pods::{Freshness, Listed, PodsError, Selection};
pub use token::{Granted, TokenError};

/// The scope of the agent's lines.
const SCOPE: &str = "cni-agent";
/// How long one request may take. A request that hangs must not hold up the agent's end.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a watch may last. The server is asked to end it before, so one that takes longer says nothing any more.
const WATCH_PATIENCE: Duration = Duration::from_secs(300);
/// The pauses before a broken watch is made anew.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// How long, and how often, the agent asks again at its end where it is refused.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(10);
const REFUSAL_PAUSE: Duration = Duration::from_millis(500);
const NO_NAMESPACE: &str = "POD_NAMESPACE is not set, so the agent cannot find its DaemonSet";

/// The API server, asked by the agent.
#[derive(Debug, Clone)]
pub struct Cluster {
    client: Client,
    identity: Identity,
}

/// What an event says.
#[derive(Debug, Clone, Copy)]
pub struct Telling<'a> {
    /// Who says it.
    pub component: &'a str,
    /// Normal or Warning.
    pub kind: &'a str,
    /// The word that people and programs know it by.
    pub reason: &'a str,
    /// The sentence.
    pub message: &'a str,
}

/// How the agent comes to a client of the API server.
#[derive(Debug)]
pub struct Connection {
    account: Account,
    identity: Identity,
    state: Arc<State>,
}

impl Connection {
    /// Nothing is sent or read yet. The state learns whether there can be a client.
    #[must_use]
    pub fn new(settings: &Settings, state: Arc<State>) -> Self {
        let token = settings.paths.service_account.join("token");
        let kubeconfig = &settings.kubeconfig;
        let account = Account::new(kubeconfig.server.clone(), kubeconfig.trust.clone(), token);
        Self { account, identity: settings.identity.clone(), state }
    }

    /// The API server, with the service account's files as they are now.
    ///
    /// # Errors
    /// They cannot be read, or no client can be made of them.
    pub fn get(&self) -> Result<Cluster, AccessError> {
        let client = self.account.client();
        self.state.set_client(client.as_ref().err().map(ToString::to_string));
        Ok(Cluster { client: client?, identity: self.identity.clone() })
    }

    /// Asks for the agent's DaemonSet at the agent's end. One refusal is not believed where the DaemonSet was there a moment ago: while an
    /// API server starts, or roles are applied anew, it refuses what it allows a second later.
    pub async fn last_look(&self, seen: &LastSeen) -> Lookup {
        let start = Instant::now();
        loop {
            let lookup = match self.get() {
                Ok(cluster) => cluster.daemon_set().await,
                Err(error) => Lookup::Unreachable(error.to_string()),
            };
            let is_refused = matches!(lookup, Lookup::Denied { .. });
            if !is_refused || seen.get() != Seen::Present || start.elapsed() >= REFUSAL_PATIENCE {
                return lookup;
            }
            tokio::time::sleep(REFUSAL_PAUSE).await;
        }
    }

    /// Watches the agent's DaemonSet for as long as the agent lives. `restarted` is told of each time the watch broke.
    pub async fn watch_daemon_set(&self, seen: &LastSeen, restarted: impl Fn()) -> Unneeded {
        let mut outage = Outage::default();
        let mut pauses = Backoff::new(FIRST_RETRY, LONGEST_RETRY);
        loop {
            let done = match self.get() {
                Ok(cluster) => cluster.watch_once(seen).await,
                Err(error) => Err(format!("the agent has no working API client: {error}").into()),
            };
            let retry_after = match done {
                Ok(()) => {
                    pauses.reset();
                    if let Some(lasted) = outage.ends(Instant::now()) {
                        log::info!(target: SCOPE, seconds = lasted.as_secs(); "the agent's DaemonSet is watched again");
                    }
                    // Also a server that ends each watch at once is not asked all the time.
                    None
                }
                Err(error) => {
                    restarted();
                    let text = error.text;
                    // An API server that is down for an hour is one line, however it says so.
                    if outage.begins(Instant::now()) {
                        log::warn!(target: SCOPE, "cannot watch the agent's DaemonSet: {text}");
                    } else {
                        log::debug!(target: SCOPE, "still cannot watch the agent's DaemonSet: {text}");
                    }
                    error.retry_after
                }
            };
            tokio::time::sleep(pauses.pause(retry_after)).await;
        }
    }
}

/// Why a watch broke.
struct WatchError {
    text: String,
    retry_after: Option<Duration>,
}

impl From<String> for WatchError {
    fn from(text: String) -> Self {
        Self { text, retry_after: None }
    }
}

impl From<ApiError> for WatchError {
    fn from(failure: ApiError) -> Self {
        Self { retry_after: failure.retry_after(), text: failure.to_string() }
    }
}

/// What was last seen of the DaemonSet, shared by the watch and the agent's end.
#[derive(Debug, Default)]
pub struct LastSeen(AtomicU8);

impl LastSeen {
    /// What it was.
    #[must_use]
    pub fn get(&self) -> Seen {
        match self.0.load(Ordering::Relaxed) {
            1 => Seen::Present,
            2 => Seen::Gone,
            _ => Seen::Never,
        }
    }

    fn note(&self, object: &PartialObjectMeta<DaemonSet>) {
        let deleting = object.metadata.deletion_timestamp.is_some();
        self.set(if deleting { Seen::Gone } else { Seen::Present });
    }

    fn set(&self, seen: Seen) {
        let value = match seen {
            Seen::Never => 0,
            Seen::Present => 1,
            Seen::Gone => 2,
        };
        self.0.store(value, Ordering::Relaxed);
    }
}

impl Cluster {
    /// The client, for what is asked elsewhere.
    pub(crate) const fn client(&self) -> &Client {
        &self.client
    }

    /// The agent's DaemonSet; none where there is none, or where it is being deleted.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn agents(&self) -> Result<Option<DaemonSet>, ApiError> {
        let request = self.daemon_sets().get(&self.identity.daemon_set, &GetParams::default());
        match self.client.json::<DaemonSet>(request, Limits::object(PATIENCE)).await {
            Ok(found) => Ok(found.metadata.deletion_timestamp.is_none().then_some(found)),
            Err(ApiError::NotFound(words)) if words.by_api => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Asks for the agent's DaemonSet.
    pub async fn daemon_set(&self) -> Lookup {
        if self.identity.namespace.is_empty() {
            return Lookup::Unreachable(NO_NAMESPACE.to_owned());
        }
        let request = self.daemon_sets().get(&self.identity.daemon_set, &GetParams::default());
        let found: DaemonSet = match self.client.json(request, Limits::object(PATIENCE)).await {
            Ok(found) => found,
            Err(ApiError::NotFound(words)) if words.by_api => return Lookup::Absent,
            Err(failure) if failure.is_refusal() => {
                return Lookup::Denied { plugin_works: None, pod: OwnPod::Unknown };
            }
            Err(failure) => return Lookup::Unreachable(failure.to_string()),
        };
        let deleting = found.metadata.deletion_timestamp.is_some();
        let wants_node = match self.node_labels().await {
            Some(labels) => wants(&found, &self.identity.node, &labels),
            // Who cannot tell stays.
            None => true,
        };
        Lookup::Present { deleting, wants_node }
    }

    fn daemon_sets(&self) -> Request {
        Request::new(format!("/apis/apps/v1/namespaces/{}/daemonsets", self.identity.namespace))
    }

    async fn node_labels(&self) -> Option<BTreeMap<String, String>> {
        let request = Request::new("/api/v1/nodes").get_metadata(&self.identity.node, &GetParams::default());
        let node = self.client.json::<PartialObjectMeta<Node>>(request, Limits::object(PATIENCE)).await;
        Some(node.ok()?.metadata.labels.unwrap_or_default())
    }

    /// Watches the agent's DaemonSet, one object without its content, until the server ends the watch.
    ///
    /// A watcher of the library's would list first, which needs one more verb than a get of this one object.
    async fn watch_once(&self, seen: &LastSeen) -> Result<(), WatchError> {
        if self.identity.namespace.is_empty() {
            return Err(NO_NAMESPACE.to_owned().into());
        }
        let name = &self.identity.daemon_set;
        let version = self.look(name, seen).await?;
        let only = WatchParams::default().fields(&format!("metadata.name={name}"));
        let request = self.daemon_sets().watch_metadata(&only, &version);
        let start = Instant::now();
        let mut answer = self.client.open(request, PATIENCE).await?;
        loop {
            let left = WATCH_PATIENCE.saturating_sub(start.elapsed());
            match answer.line::<WatchEvent<PartialObjectMeta<DaemonSet>>>(left).await? {
                Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                    seen.note(&object);
                }
                Some(WatchEvent::Deleted(_)) => seen.set(Seen::Gone),
                Some(WatchEvent::Bookmark(_)) => {}
                Some(WatchEvent::Error(status)) => return Err(status.message.into()),
                None => return Ok(()),
            }
        }
    }

    /// Looks at the DaemonSet before it is watched; the version to watch from.
    async fn look(&self, name: &str, seen: &LastSeen) -> Result<String, WatchError> {
        let request = self.daemon_sets().get_metadata(name, &GetParams::default());
        let found = self.client.json::<PartialObjectMeta<DaemonSet>>(request, Limits::object(PATIENCE)).await;
        match found {
            Ok(found) => {
                seen.note(&found);
                Ok(found.metadata.resource_version.unwrap_or_default())
            }
            Err(ApiError::NotFound(words)) if words.by_api && seen.get() == Seen::Never => Err(format!(
                "there is no DaemonSet {name}; if the agent's has another name, set DAEMONSET_NAME"
            )
            .into()),
            Err(ApiError::NotFound(words)) if words.by_api => {
                seen.set(Seen::Gone);
                Ok("0".to_owned())
            }
            Err(failure) if failure.is_refusal() => Err(format!(
                "the agent may not get DaemonSet {name}; at its end it takes it for removed if its own rights go within seconds ({failure})"
            )
            .into()),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Sends a warning event about the agent's pod.
    ///
    /// # Errors
    /// When the agent does not know its pod, or the server does not take the event.
    pub async fn warn(&self, reason: &str, message: &str) -> Result<(), String> {
        let about = pod_reference(&self.identity.namespace, &self.identity.pod, None);
        self.warn_about(about, reason, message).await
    }

    /// Sends a warning event about an object.
    ///
    /// # Errors
    /// When the server does not take it.
    pub async fn warn_about(
        &self,
        about: ObjectReference,
        reason: &str,
        message: &str,
    ) -> Result<(), String> {
        self.tell(about, &Telling { component: "install-cni", kind: "Warning", reason, message }).await
    }

    /// Sends an event about an object.
    ///
    /// # Errors
    /// When the server does not take it.
    pub async fn tell(&self, about: ObjectReference, telling: &Telling<'_>) -> Result<(), String> {
        let namespace = about.namespace.clone().unwrap_or_default();
        if namespace.is_empty() || about.name.as_deref().unwrap_or_default().is_empty() {
            return Err("POD_NAME or POD_NAMESPACE is not set".to_owned());
        }
        self.send_event(&namespace, about, telling).await
    }

    async fn send_event(
        &self,
        namespace: &str,
        about: ObjectReference,
        telling: &Telling<'_>,
    ) -> Result<(), String> {
        let now = Time(Timestamp::now());
        let event = Event {
            metadata: ObjectMeta {
                generate_name: about.name.as_deref().map(|name| format!("{name}.")),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            involved_object: about,
            reason: Some(telling.reason.to_owned()),
            // The API server takes 1024 bytes.
            message: Some(telling.message.chars().take(1000).collect()),
            type_: Some(telling.kind.to_owned()),
            source: Some(EventSource {
                component: Some(telling.component.to_owned()),
                host: Some(self.identity.node.clone()),
            }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Event::default()
        };
        let request = post(&format!("/api/v1/namespaces/{namespace}/events"), &event);
        let sent = self.client.json::<Value>(request, Limits::object(PATIENCE)).await;
        sent.map(drop).map_err(|error| error.to_string())
    }
}

/// A request that creates an object.
fn post(path: &str, object: &impl Serialize) -> cluster_client::Built {
    let data = serde_json::to_vec(object).map_err(cluster_client::RequestError::SerializeBody)?;
    Request::new(path).create(&PostParams::default(), data)
}

/// Whether a DaemonSet puts pods on a node with these labels, as far as its selector and its required affinity say.
pub(crate) fn wants(daemon_set: &DaemonSet, node: &str, labels: &BTreeMap<String, String>) -> bool {
    let Some(pod) = daemon_set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()) else {
        return true;
    };
    let selector = pod.node_selector.iter().flatten();
    let is_selected = selector.into_iter().all(|(key, value)| labels.get(key) == Some(value));
    let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required =
        affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    let fields = BTreeMap::from([("metadata.name".to_owned(), node.to_owned())]);
    let is_required = required.is_none_or(|required| {
        required.node_selector_terms.iter().any(|term| {
            let by_label = term.match_expressions.iter().flatten().all(|wanted| matches(wanted, labels));
            by_label && term.match_fields.iter().flatten().all(|wanted| matches(wanted, &fields))
        })
    });
    is_selected && is_required
}

fn matches(wanted: &NodeSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let (value, values) = (labels.get(&wanted.key), wanted.values.as_deref().unwrap_or_default());
    let number = |text: &String| text.parse::<i64>().ok();
    let ordering = || Some(value.and_then(number)?.cmp(&values.first().and_then(number)?));
    match wanted.operator.as_str() {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => ordering() == Some(std::cmp::Ordering::Greater),
        "Lt" => ordering() == Some(std::cmp::Ordering::Less),
        // An operator of the future: who cannot tell stays.
        _ => true,
    }
}

/// A pod, for events about it; with its UID where that is known.
pub(crate) fn pod_reference(namespace: &str, name: &str, uid: Option<&str>) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(name.to_owned()),
        namespace: Some(namespace.to_owned()),
        uid: uid.map(str::to_owned),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn daemon_set(pod: &serde_json::Value) -> DaemonSet {
        let spec = json!({"selector": {}, "template": {"spec": pod}});
        serde_json::from_value(json!({"metadata": {}, "spec": spec})).expect("a DaemonSet")
    }

    fn affinity(term: &serde_json::Value) -> serde_json::Value {
        let required = json!({"nodeSelectorTerms": [term]});
        json!({"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}})
    }

    #[test]
    fn a_daemon_set_wants_the_nodes_it_selects() {
        let labels =
            BTreeMap::from([("os".to_owned(), "linux".to_owned()), ("gen".to_owned(), "7".to_owned())]);
        let wants = |pod: serde_json::Value| wants(&daemon_set(&pod), "node-1", &labels);
        assert!(wants(json!({"containers": []})));
        assert!(wants(json!({"containers": [], "nodeSelector": {"os": "linux"}})));
        assert!(!wants(json!({"containers": [], "nodeSelector": {"os": "linux", "mesh": "yes"}})));
        for (operator, key, values, expected) in [
            ("In", "os", json!(["linux", "bsd"]), true),
            ("In", "os", json!(["bsd"]), false),
            ("NotIn", "os", json!(["linux"]), false),
            ("NotIn", "zone", json!(["a"]), true),
            ("Exists", "gen", json!([]), true),
            ("DoesNotExist", "gen", json!([]), false),
            ("Gt", "gen", json!(["6"]), true),
            ("Lt", "gen", json!(["7"]), false),
        ] {
            let term = json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
            assert_eq!(wants(affinity(&term)), expected, "{operator} {key}");
        }
        let named = |name: &str| {
            affinity(&json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}))
        };
        assert!(wants(named("node-1")) && !wants(named("node-2")));
    }
}
