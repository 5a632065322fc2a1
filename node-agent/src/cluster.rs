//! The API server, as far as the agent needs it: its own DaemonSet, its node's labels and pods, events.

mod pods;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, EventSource, Node, NodeSelectorRequirement, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{PostParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::json;

use crate::leave::{Lookup, Seen};
use crate::settings::{Identity, Settings, Trust};

pub use pods::PodsError;

/// How long one request may take. A request that hangs must not hold up the agent's end.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait, at least, before a broken watch is made anew.
const RETRY: Duration = Duration::from_secs(10);
/// The most that is added to it, so that the agents of many nodes do not come back all at once.
const MOST_JITTER_MS: u32 = 10_000;
const NO_NAMESPACE: &str = "POD_NAMESPACE is not set, so the agent cannot find its DaemonSet";

/// A connection to the API server.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    identity: Identity,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// The connection to the API server, made when it is first needed and possible.
#[derive(Debug)]
pub struct Connection {
    settings: Settings,
    made: tokio::sync::OnceCell<Cluster>,
}

impl Connection {
    /// Nothing is sent or read yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self { settings, made: tokio::sync::OnceCell::new() }
    }

    /// The connection.
    ///
    /// # Errors
    /// See [`Cluster::prepare`].
    pub async fn get(&self) -> anyhow::Result<&Cluster> {
        self.made.get_or_try_init(|| Cluster::prepare(&self.settings)).await
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
    /// Prepares a connection with the service account's files; nothing is sent yet. The token file is read again as it is rotated.
    ///
    /// # Errors
    /// When the authority cannot be read or is none.
    pub async fn prepare(settings: &Settings) -> anyhow::Result<Self> {
        let trust = match &settings.kubeconfig.trust {
            Trust::Authority(file) => json!({"certificate-authority": file}),
            Trust::Anybody => json!({"insecure-skip-tls-verify": true}),
        };
        let mut cluster = trust;
        cluster["server"] = json!(settings.kubeconfig.server);
        let kubeconfig: Kubeconfig = serde_json::from_value(json!({
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": "agent", "user": {"tokenFile": settings.paths.service_account.join("token")}}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": "agent"}}],
            "current-context": "local",
        }))?;
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        config.connect_timeout = Some(PATIENCE);
        Ok(Self { client: Client::try_from(config)?, identity: settings.identity.clone() })
    }

    /// Asks for the agent's DaemonSet.
    pub async fn daemon_set(&self) -> Lookup {
        if self.identity.namespace.is_empty() {
            return Lookup::Unreachable(NO_NAMESPACE.to_owned());
        }
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), &self.identity.namespace);
        let found = match self.within(api.get_opt(&self.identity.daemon_set)).await {
            Ok(Some(found)) => found,
            Ok(None) => return Lookup::Absent,
            Err(lookup) => return lookup,
        };
        let deleting = found.metadata.deletion_timestamp.is_some();
        let wants_node = match self.node_labels().await {
            Some(labels) => wants(&found, &self.identity.node, &labels),
            // Who cannot tell stays.
            None => true,
        };
        Lookup::Present { deleting, wants_node }
    }

    async fn node_labels(&self) -> Option<BTreeMap<String, String>> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = self.within(nodes.get_metadata_opt(&self.identity.node)).await.ok().flatten()?;
        Some(node.metadata.labels.unwrap_or_default())
    }

    /// The result of a request, or why there is none.
    async fn within<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Result<T, Lookup> {
        match tokio::time::timeout(PATIENCE, request).await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 401 | 403) => Err(Lookup::Denied),
            Ok(Err(kube::Error::Api(status))) => Err(Lookup::Unreachable(status.message)),
            Ok(Err(error)) => Err(Lookup::Unreachable(error.to_string())),
            Err(_) => Err(Lookup::Unreachable("no answer within 5 s".to_owned())),
        }
    }

    /// Watches the agent's DaemonSet, one object without its content, for as long as the agent lives. `restarted` is told of each
    /// time the watch broke.
    pub async fn watch_daemon_set(&self, seen: &LastSeen, restarted: impl Fn(&str)) {
        let mut last = String::new();
        loop {
            match self.watch_once(seen).await {
                Ok(()) => last.clear(),
                Err(error) => {
                    restarted(&error);
                    // An API server that is down for an hour is one line.
                    if error != last {
                        log::warn!(target: "cni-agent", "cannot watch the agent's DaemonSet: {error}");
                    }
                    last = error;
                    let jitter = Timestamp::now().subsec_nanosecond().unsigned_abs() / 1000 % MOST_JITTER_MS;
                    tokio::time::sleep(RETRY + Duration::from_millis(jitter.into())).await;
                }
            }
        }
    }

    async fn watch_once(&self, seen: &LastSeen) -> Result<(), String> {
        use futures_util::TryStreamExt as _;
        if self.identity.namespace.is_empty() {
            return Err(NO_NAMESPACE.to_owned());
        }
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), &self.identity.namespace);
        let name = &self.identity.daemon_set;
        let text = |lookup: Lookup| match lookup {
            Lookup::Unreachable(error) => error,
            Lookup::Denied | Lookup::Absent | Lookup::Present { .. } => {
                format!(
                    "the agent may not get DaemonSet {name}; at its end it will not tell an upgrade from removal"
                )
            }
        };
        let found = self.within(api.get_metadata_opt(name)).await.map_err(text)?;
        let version = match found {
            Some(found) => {
                let deleting = found.metadata.deletion_timestamp.is_some();
                seen.set(if deleting { Seen::Gone } else { Seen::Present });
                found.metadata.resource_version.unwrap_or_default()
            }
            None if seen.get() == Seen::Never => {
                return Err(format!(
                    "there is no DaemonSet {name}; if the agent's has another name, set DAEMONSET_NAME"
                ));
            }
            None => {
                seen.set(Seen::Gone);
                "0".to_owned()
            }
        };
        let only = WatchParams::default().fields(&format!("metadata.name={name}"));
        let stream = api.watch_metadata(&only, &version).await.map_err(|error| error.to_string())?;
        let mut stream = std::pin::pin!(stream);
        while let Some(event) = stream.try_next().await.map_err(|error| error.to_string())? {
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let deleting = object.metadata.deletion_timestamp.is_some();
                    seen.set(if deleting { Seen::Gone } else { Seen::Present });
                }
                WatchEvent::Deleted(_) => seen.set(Seen::Gone),
                WatchEvent::Bookmark(_) => {}
                WatchEvent::Error(status) => return Err(status.message),
            }
        }
        Ok(())
    }

    /// Sends a warning event about the agent's pod.
    ///
    /// # Errors
    /// When the agent does not know its pod, or the server does not take the event.
    pub async fn warn(&self, reason: &str, message: &str) -> Result<(), String> {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(self.identity.pod.clone()),
            namespace: Some(self.identity.namespace.clone()),
            ..ObjectReference::default()
        };
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
        let namespace = about.namespace.clone().unwrap_or_default();
        if namespace.is_empty() || about.name.as_deref().unwrap_or_default().is_empty() {
            return Err("POD_NAME or POD_NAMESPACE is not set".to_owned());
        }
        let now = Time(Timestamp::now());
        let event = Event {
            metadata: ObjectMeta {
                generate_name: about.name.as_deref().map(|name| format!("{name}.")),
                namespace: Some(namespace.clone()),
                ..ObjectMeta::default()
            },
            involved_object: about,
            reason: Some(reason.to_owned()),
            // The API server takes 1024 bytes.
            message: Some(message.chars().take(1000).collect()),
            type_: Some("Warning".to_owned()),
            source: Some(EventSource {
                component: Some("install-cni".to_owned()),
                host: Some(self.identity.node.clone()),
            }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Event::default()
        };
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let sent = tokio::time::timeout(PATIENCE, api.create(&PostParams::default(), &event)).await;
        sent.map_err(|_| "no answer within 5 s".to_owned())?.map(drop).map_err(|error| error.to_string())
    }
}

/// Whether a DaemonSet puts pods on a node with these labels, as far as its selector and its required affinity say.
fn wants(daemon_set: &DaemonSet, node: &str, labels: &BTreeMap<String, String>) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

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
