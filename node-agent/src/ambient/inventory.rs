//! The node's pods and the namespaces that decide about them, as the API server has them, kept current by the watch of the node's pods and one of
//! namespaces; and which pods to examine.
//!
//! Only what decides is kept of an object. Namespaces are watched by label where labels of no other name decide: a cluster has many, and each node needs few.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use agent_runtime::lock;
use agent_runtime::resync::{Collection, Followed, Freshness, Replica, Selection};
use cni_core::enablement::{DATAPLANE_LABEL, SIDECAR_ANNOTATION};
use redirect_core::accepted::AcceptedRules;
use redirect_core::settings::Setting;
use serde_json::{Map, Value, json};
use tokio::sync::Notify;

use super::pod::{AmbientPod, AmbientRules};
use crate::ambient_rules::KEEP_CONNECTIONS;
use crate::cluster::pods::{self, SPREAD, labels};

/// How annotations begin that decide without being settings.
const ANNOTATIONS: &str = "ambient.istio.io/";
/// Everything else of a pod that decides.
const OF_POD: [(&str, &str); 10] = [
    ("metadata", "namespace"),
    ("metadata", "name"),
    ("metadata", "uid"),
    ("metadata", "labels"),
    ("metadata", "deletionTimestamp"),
    ("spec", "hostNetwork"),
    ("spec", "runtimeClassName"),
    ("spec", "serviceAccountName"),
    ("status", "phase"),
    ("status", "podIPs"),
];

/// What is to be examined.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// All pods.
    pub all: bool,
    /// Pods, by UID.
    pub uids: BTreeSet<String>,
}

/// The copies, and what changed since the last [`take`](Inventory::take).
#[derive(Debug, Default)]
pub struct Inventory {
    state: Mutex<State>,
    changed: Notify,
}

/// What the inventory has.
#[derive(Debug, Default)]
struct State {
    /// By UID. None until they were listed.
    pods: Option<BTreeMap<String, Value>>,
    /// Labels, by name. None until they were listed.
    namespaces: Option<BTreeMap<String, Map<String, Value>>>,
    /// By the watch of namespaces.
    watch: Followed,
    due: Due,
}

impl Inventory {
    /// All pods that have a network namespace; none until pods and namespaces were listed.
    pub fn pods(&self, rules: &AmbientRules) -> Option<Vec<AmbientPod>> {
        let state = lock(&self.state);
        let (pods, namespaces) = (state.pods.as_ref()?, state.namespaces.as_ref()?);
        let none = Map::new();
        let labels = |pod: &Value| {
            let namespace = pod.pointer("/metadata/namespace").and_then(Value::as_str);
            namespace.and_then(|name| namespaces.get(name)).unwrap_or(&none)
        };
        Some(pods.values().filter_map(|pod| AmbientPod::read(pod, labels(pod), rules)).collect())
    }

    /// Whether the API server has a pod of this UID on the node, as far as that is known.
    pub fn has(&self, uid: &str) -> bool {
        lock(&self.state).pods.as_ref().is_some_and(|pods| pods.contains_key(uid))
    }

    /// The labels of a namespace, as far as they are known. None of a namespace that the watch leaves out, where it is one `by_label`.
    pub fn namespace_labels(&self, name: &str, by_label: bool) -> Option<Map<String, Value>> {
        let state = lock(&self.state);
        let labels = state.namespaces.as_ref()?.get(name);
        labels.cloned().or_else(|| by_label.then(Map::new))
    }

    /// How current namespaces are.
    pub fn namespace_watch(&self) -> Followed {
        lock(&self.state).watch
    }

    /// A pod is to be examined.
    pub fn examine(&self, uid: &str) {
        self.edit(|state| {
            state.due.uids.insert(uid.to_owned());
        });
    }

    /// Waits until something is to be examined. May be dropped and called again.
    pub async fn changed(&self) {
        while lock(&self.state).due == Due::default() {
            self.changed.notified().await;
        }
    }

    /// What is to be examined now; the caller does.
    pub fn take(&self) -> Due {
        std::mem::take(&mut lock(&self.state).due)
    }

    fn edit(&self, edit: impl FnOnce(&mut State)) {
        edit(&mut lock(&self.state));
        self.changed.notify_one();
    }
}

/// The namespaces that decide: with the usual selectors those that have the label, otherwise all.
pub fn namespaces(has_usual_selectors: bool) -> Collection {
    let labels = if has_usual_selectors { DATAPLANE_LABEL.to_owned() } else { String::new() };
    Collection {
        what: "namespaces of ambient mode",
        source: pods::namespaces(),
        selection: Selection { fields: String::new(), labels },
        // An older list would take pods out of ambient mode that are in it.
        freshness: Freshness::Newest,
        remedy: "give the agent's service account the verbs get, list and watch on namespaces (ClusterRole istio-cni)",
        spread: SPREAD,
    }
}

/// The copy of the pods, by UID. The watch of the node's pods has several copies.
impl Inventory {
    /// These are all pods, as [`condensed`] keeps them.
    pub fn replace_pods(&self, pods: Vec<(String, Value)>) {
        self.edit(|state| {
            state.pods = Some(pods.into_iter().collect());
            state.due.all = true;
        });
    }

    /// A pod is new, or changed.
    pub fn pod_changed(&self, pod: &Value) {
        let Some((uid, kept)) = condensed(pod) else { return };
        self.edit(|state| {
            if put(&mut state.pods, &uid, kept) {
                state.due.uids.insert(uid);
            }
        });
    }

    /// A pod is gone.
    pub fn pod_removed(&self, pod: &Value) {
        let Some((uid, _)) = condensed(pod) else { return };
        self.edit(|state| {
            drop(state.pods.as_mut().and_then(|pods| pods.remove(&uid)));
            state.due.uids.insert(uid);
        });
    }
}

/// The copy of the namespaces' labels, by name.
#[derive(Debug)]
pub struct NamespaceReplica<'a>(pub &'a Inventory);

impl Replica for NamespaceReplica<'_> {
    type Item = (String, Map<String, Value>);

    fn parser(&self) -> impl Fn(&Value) -> Option<Self::Item> + Clone + Send + Sync + 'static {
        labelled
    }

    fn replace(&self, namespaces: Vec<Self::Item>) {
        self.0.edit(|state| {
            state.namespaces = Some(namespaces.into_iter().collect());
            state.due.all = true;
        });
    }

    fn changed(&self, namespace: &Value) {
        let Some((name, labels)) = labelled(namespace) else { return };
        self.0.edit(|state| state.due.all |= put(&mut state.namespaces, &name, labels));
    }

    fn removed(&self, namespace: &Value) {
        let Some((name, _)) = labelled(namespace) else { return };
        self.0.edit(|state| {
            drop(state.namespaces.as_mut().and_then(|namespaces| namespaces.remove(&name)));
            state.due.all = true;
        });
    }

    fn followed(&self, is_followed: bool) {
        lock(&self.0.state).watch.set(is_followed);
    }

    fn interrupted(&self) -> bool {
        false
    }
}

/// Puts an object into a copy that was listed; whether that changes anything: other programs write much that decides nothing.
fn put<T: PartialEq>(copy: &mut Option<BTreeMap<String, T>>, key: &str, kept: T) -> bool {
    let copy = copy.as_mut().filter(|copy| copy.get(key) != Some(&kept));
    copy.map(|copy| copy.insert(key.to_owned(), kept)).is_some()
}

/// What decides of a pod, by its UID.
#[must_use]
pub fn condensed(pod: &Value) -> Option<(String, Value)> {
    let uid = pod.pointer("/metadata/uid")?.as_str()?.to_owned();
    let mut kept = json!({"metadata": {"annotations": {}}, "spec": {}, "status": {}});
    pods::copy_fields(pod, &OF_POD, &mut kept);
    let annotations = pod.pointer("/metadata/annotations").and_then(Value::as_object);
    for (name, value) in annotations.into_iter().flatten() {
        let is_accepting = || {
            name == AcceptedRules::ANNOTATION
                && value.as_str().is_some_and(|list| list.len() <= AcceptedRules::LONGEST_LIST)
        };
        let is_setting =
            || Setting::AMBIENT.iter().any(|setting| setting.annotations.contains(&name.as_str()));
        let is_kept = || name == KEEP_CONNECTIONS;
        if name.starts_with(ANNOTATIONS) || is_kept() || is_setting() || is_accepting() {
            kept["metadata"]["annotations"][name] = value.clone();
        } else if name == SIDECAR_ANNOTATION {
            // That it exists is enough; its value is long.
            kept["metadata"]["annotations"][name] = json!("");
        }
    }
    Some((uid, kept))
}

/// The labels of a namespace, by its name.
fn labelled(namespace: &Value) -> Option<(String, Map<String, Value>)> {
    Some((namespace.pointer("/metadata/name")?.as_str()?.to_owned(), labels(namespace)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::AmbientDefaults;
    use cni_core::enablement::Enablement;
    use cni_core::sandboxed::SandboxedRuntimes;
    use cni_core::selection::Acceptance;
    use redirect_core::ambient::ProbeSources;
    use std::time::Duration;

    fn rules() -> AmbientRules {
        AmbientRules {
            enablement: Enablement::usual([]),
            defaults: AmbientDefaults {
                dns_capture: true,
                ipv6: true,
                capture_scope: false,
                keep_connections: Duration::ZERO,
                probes: ProbeSources::USUAL,
            },
            sandboxed: SandboxedRuntimes::default(),
            acceptance: Acceptance::default(),
        }
    }

    fn pod(uid: &str) -> Value {
        json!({"metadata": {"namespace": "shop", "name": uid, "uid": uid, "resourceVersion": "7",
                "labels": {"app": "web"},
                "annotations": {"sidecar.istio.io/status": "{long}", "kubectl.kubernetes.io/last": "{}",
                    "istio.io/reroute-virtual-interfaces": "tap0", "traffic.istio.io/excludeOutboundPorts": "3306",
                    "traffic.istio.io/nodeSelector": "{}",
                    "ambient.istio.io/dns-capture": "false", "cni.istio.io/acceptedRules": "chain=BACKUP", "cni.istio.io/keepConnections": "10m"}},
            "spec": {"containers": [{"name": "web"}]},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.2"}], "conditions": []}})
    }

    fn namespace(mode: Option<&str>) -> Value {
        json!({"metadata": {"name": "shop", "labels": mode.map(|mode| json!({"istio.io/dataplane-mode": mode}))}})
    }

    #[test]
    fn only_what_decides_is_kept() {
        let (uid, kept) = condensed(&pod("u-1")).expect("a pod");
        assert_eq!(uid, "u-1");
        assert_eq!(
            kept,
            json!({"metadata": {"namespace": "shop", "name": "u-1", "uid": "u-1", "labels": {"app": "web"},
                    "annotations": {"sidecar.istio.io/status": "", "ambient.istio.io/dns-capture": "false",
                        "istio.io/reroute-virtual-interfaces": "tap0", "traffic.istio.io/excludeOutboundPorts": "3306",
                        "cni.istio.io/acceptedRules": "chain=BACKUP", "cni.istio.io/keepConnections": "10m"}},
                "spec": {}, "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.2"}]}})
        );
        assert_eq!(condensed(&json!({"metadata": {}})), None);
    }

    #[test]
    fn nothing_is_known_before_both_lists_are_there() {
        let inventory = Inventory::default();
        inventory.replace_pods(vec![condensed(&pod("u-1")).expect("a pod")]);
        assert_eq!(inventory.pods(&rules()), None, "without namespaces, pods would seem to have left");
        NamespaceReplica(&inventory).replace(Vec::new());
        assert_eq!(inventory.pods(&rules()).map(|pods| pods.len()), Some(1));
        assert!(inventory.has("u-1") && !inventory.has("u-2"));
    }

    #[test]
    fn changes_name_the_pods_that_they_decide_about() {
        let inventory = Inventory::default();
        let namespaces = NamespaceReplica(&inventory);
        inventory.replace_pods(vec![condensed(&pod("u-1")).expect("a pod")]);
        namespaces.replace(Vec::new());
        assert!(inventory.take().all);
        let is_wanted = || inventory.pods(&rules()).expect("lists")[0].is_wanted();

        let mut unlike = pod("u-1");
        unlike["status"]["conditions"] = json!([{"type": "Ready"}]);
        inventory.pod_changed(&unlike);
        assert_eq!(inventory.take(), Due::default(), "what the kubelet writes decides nothing");
        unlike["metadata"]["annotations"] = json!({});
        inventory.pod_changed(&unlike);
        assert_eq!(inventory.take().uids, BTreeSet::from(["u-1".to_owned()]));

        assert!(!is_wanted());
        namespaces.changed(&namespace(Some("ambient")));
        assert!(inventory.take().all && is_wanted());
        namespaces.changed(&namespace(Some("ambient")));
        assert_eq!(inventory.take(), Due::default());
        // A watch by label reports so that the label went.
        namespaces.removed(&namespace(None));
        assert!(inventory.take().all && !is_wanted());
        inventory.pod_removed(&unlike);
        assert_eq!(inventory.take().uids, BTreeSet::from(["u-1".to_owned()]));
        assert!(!inventory.has("u-1"));
    }
}
