//! What the agent holds of the node's pods, as the API server has them, for plugins that ask.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agent_runtime::lock;
use agent_runtime::resync::Followed;
use cni_core::plugin_event::PodRequest;
use cni_core::pod_source::PodName;
use redirect_core::pod::PodFacts;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::cluster::pods::{ObservedPod, PodText, copy_fields, identity};

/// The longest text that is held of a pod, in bytes: its owner chooses annotations, and a node has 250 pods. Longer ones are read when a plugin asks.
const LONGEST: usize = 32 * 1024;

/// What decides besides the decisive part: ambient mode and the drift watch read it.
const MORE: [(&str, &str); 5] = [
    ("spec", "hostNetwork"),
    ("spec", "serviceAccountName"),
    ("metadata", "deletionTimestamp"),
    ("status", "phase"),
    ("status", "podIPs"),
];

/// The node's pods, kept by the watch.
#[derive(Debug, Default)]
pub struct HeldPods {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// By UID.
    pods: BTreeMap<String, PodText>,
    /// Those that are not held because they are too long, by UID.
    too_long: BTreeSet<String>,
    watch: Followed,
}

/// A pod, or the UID of one that is too long to be held.
pub type Holding = Result<PodText, String>;

impl HeldPods {
    /// What decides of a pod, as JSON, if it is held.
    #[must_use]
    pub fn find(&self, wanted: &PodRequest) -> Option<Arc<str>> {
        lock(&self.state).find(wanted)
    }

    /// The same for a pod that was created a moment ago: waits until the watch brings it, where a watch is there.
    pub async fn wait_for(&self, wanted: &PodRequest, patience: Duration) -> Option<Arc<str>> {
        let deadline = Instant::now() + patience;
        loop {
            // What changes from now on is noticed, also before it is waited for.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let state = lock(&self.state);
                let found = state.find(wanted);
                if found.is_some() || !state.watch.is_followed() {
                    return found;
                }
            }
            timeout_at(deadline, changed).await.ok()?;
        }
    }

    /// All pods, where a sound watch keeps every one of them current.
    #[must_use]
    pub fn all(&self) -> Option<Vec<PodText>> {
        let state = lock(&self.state);
        let all = || state.pods.values().cloned().collect();
        (state.watch.is_sound() && state.too_long.is_empty()).then(all)
    }

    /// How many pods are held.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.state).pods.len()
    }

    /// How current they are.
    #[must_use]
    pub fn watch(&self) -> Followed {
        lock(&self.state).watch
    }

    /// These are all pods of the node.
    pub fn replace(&self, pods: Vec<Holding>) {
        {
            let mut state = lock(&self.state);
            (state.pods, state.too_long) = (BTreeMap::new(), BTreeSet::new());
            pods.into_iter().for_each(|holding| state.hold(holding));
        }
        self.changed.notify_waiters();
    }

    /// A pod is new, or changed.
    pub fn change(&self, pod: &Value) {
        let known = pod.get("metadata").and_then(identity);
        let is_held = known.is_some_and(|(uid, version)| {
            lock(&self.state).pods.get(uid).is_some_and(|held| held.pod.version == version)
        });
        if !is_held && let Some(holding) = held(pod) {
            lock(&self.state).hold(holding);
            self.changed.notify_waiters();
        }
    }

    /// A pod is gone.
    pub fn remove(&self, pod: &Value) {
        if let Some((uid, _)) = pod.get("metadata").and_then(identity) {
            lock(&self.state).forget(uid);
        }
    }

    /// Whether a watch keeps the pods current from now on; also that it brought something.
    pub fn followed(&self, is_followed: bool) {
        lock(&self.state).watch.set(is_followed);
        if !is_followed {
            self.changed.notify_waiters();
        }
    }
}

impl State {
    fn find(&self, wanted: &PodRequest) -> Option<Arc<str>> {
        let held = self.pods.get(&wanted.uid)?;
        let PodName { namespace, name } = &held.pod.name;
        (namespace == &wanted.namespace && name == &wanted.name).then(|| held.json.clone())
    }

    fn hold(&mut self, holding: Holding) {
        match holding {
            Ok(held) => {
                self.too_long.remove(&held.pod.uid);
                self.pods.insert(held.pod.uid.clone(), held);
            }
            Err(uid) => {
                self.pods.remove(&uid);
                self.too_long.insert(uid);
            }
        }
    }

    fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
        self.too_long.remove(uid);
    }
}

/// What is held of a pod; nothing of one without a name.
#[must_use]
pub fn held(pod: &Value) -> Option<Holding> {
    let (pod, json) = (ObservedPod::of(pod)?, kept_part(pod).to_string());
    Some(if json.len() > LONGEST { Err(pod.uid) } else { Ok(PodText { pod, json: json.into() }) })
}

/// What a plugin is given of a pod, and the drift watch reads: what the parts of the agent decide by.
#[must_use]
pub fn kept_part(pod: &Value) -> Value {
    let mut part = PodFacts::decisive_part(pod);
    if let Value::Object(part) = &mut part {
        // The items of a list lack it.
        part.insert("kind".to_owned(), "Pod".into());
    }
    copy_fields(pod, &MORE, &mut part);
    part
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::VecDeque;

    const PATIENCE: Duration = Duration::from_secs(600);

    fn pod(uid: &str, version: &str) -> Value {
        json!({"metadata": {"namespace": "shop", "name": "cart", "uid": uid, "resourceVersion": version,
                "annotations": {"version": version}, "managedFields": []},
            "spec": {"hostNetwork": false, "serviceAccountName": "cart", "containers": [{"name": "app", "image": "x"}]},
            "status": {"phase": "Running", "conditions": [], "podIPs": [{"ip": "10.1.0.2"}]}})
    }

    fn wanted(uid: &str) -> PodRequest {
        PodRequest { namespace: "shop".into(), name: "cart".into(), uid: uid.into() }
    }

    fn found(pods: &HeldPods, uid: &str) -> Option<Value> {
        pods.find(&wanted(uid)).map(|text| serde_json::from_str(&text).expect("JSON"))
    }

    #[test]
    fn a_pod_is_the_one_of_this_uid_whatever_has_its_name() {
        let pods = HeldPods::default();
        pods.replace([pod("u-1", "1")].iter().filter_map(held).collect());
        pods.change(&pod("u-2", "2"));
        let known = found(&pods, "u-1").expect("a pod");
        assert_eq!(
            known,
            json!({"kind": "Pod", "metadata": {"namespace": "shop", "name": "cart", "uid": "u-1", "resourceVersion": "1",
                    "annotations": {"version": "1"}},
                "spec": {"hostNetwork": false, "serviceAccountName": "cart", "containers": [{"name": "app"}]},
                "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.2"}]}})
        );
        assert_eq!(found(&pods, "u-2").expect("a pod")["metadata"]["resourceVersion"], "2");
        let other = PodRequest { namespace: "bank".into(), ..wanted("u-1") };
        assert_eq!(pods.find(&other), None, "a UID of another name");
        assert_eq!((found(&pods, ""), found(&pods, "u-3")), (None, None));
        pods.remove(&pod("u-1", "3"));
        assert!(found(&pods, "u-1").is_none() && found(&pods, "u-2").is_some());
    }

    /// Pods of ten names come and go, and the watch is up to thirty events late: whatever a plugin asks for, it gets that pod or none.
    #[test]
    fn no_pod_is_given_for_another_of_its_name_however_late_the_watch_is() {
        let named = |number: usize| {
            let mut pod = pod(&format!("u-{number}"), &format!("{number}"));
            pod["metadata"]["name"] = format!("cart-{}", number % 10).into();
            pod
        };
        let mut random = 7_u64;
        let mut below = |limit: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(random >> 33).expect("31 bits") % limit
        };
        let (pods, mut late, mut given) = (HeldPods::default(), VecDeque::new(), 0);
        for number in 0_usize..1000 {
            // The one before of this name is gone, and this one is there.
            late.extend(number.checked_sub(10).map(|gone| (gone, false)));
            late.push_back((number, true));
            while late.len() > below(30) {
                match late.pop_front() {
                    Some((number, true)) => pods.change(&named(number)),
                    Some((number, false)) => pods.remove(&named(number)),
                    None => break,
                }
            }
            for asked in [number, number.saturating_sub(10), below(number + 1)] {
                let (name, uid) = (format!("cart-{}", asked % 10), format!("u-{asked}"));
                let wanted = PodRequest { namespace: "shop".into(), name, uid: uid.clone() };
                let Some(text) = pods.find(&wanted) else { continue };
                given += 1;
                let found: Value = serde_json::from_str(&text).expect("JSON");
                assert_eq!(
                    (&found["metadata"]["uid"], &found["metadata"]["name"]),
                    (&json!(uid), &json!(wanted.name))
                );
                assert_eq!(found["metadata"]["annotations"]["version"], asked.to_string());
            }
        }
        assert!(given > 300, "{given}");
    }

    #[test]
    fn what_is_held_is_the_newest_and_what_became_too_long_is_not_held() {
        let pods = HeldPods::default();
        pods.change(&pod("u-1", "1"));
        pods.change(&pod("u-1", "2"));
        assert_eq!(found(&pods, "u-1").expect("a pod")["metadata"]["annotations"]["version"], "2");
        let mut long = pod("u-1", "3");
        long["metadata"]["annotations"]["long"] = "x".repeat(LONGEST).into();
        pods.followed(true);
        assert!(pods.all().is_some());
        pods.change(&long);
        assert_eq!((found(&pods, "u-1"), pods.all()), (None, None), "not all are held");
        pods.change(&pod("u-1", "4"));
        assert!(found(&pods, "u-1").is_some() && pods.all().is_some());
        pods.change(&long);
        pods.remove(&long);
        assert_eq!(pods.all(), Some(Vec::new()));
        assert!(pods.count() == 0 && pods.watch().is_sound());
        pods.followed(false);
        assert_eq!(pods.all(), None, "they may have changed");
    }

    #[tokio::test]
    async fn a_pod_is_waited_for_while_a_watch_may_bring_it() {
        let pods = HeldPods::default();
        assert_eq!(pods.wait_for(&wanted("u-1"), PATIENCE).await, None, "nothing would bring it");
        pods.followed(true);
        assert_eq!(pods.wait_for(&wanted("u-1"), Duration::ZERO).await, None);
        let one = wanted("u-1");
        let (found, ()) = tokio::join!(pods.wait_for(&one, PATIENCE), async {
            for pod in [pod("u-2", "1"), pod("u-1", "2")] {
                tokio::task::yield_now().await;
                pods.change(&pod);
            }
        });
        assert!(found.is_some());
        let none = wanted("u-3");
        let (found, ()) = tokio::join!(pods.wait_for(&none, PATIENCE), async {
            tokio::task::yield_now().await;
            pods.followed(false);
        });
        assert_eq!(found, None, "the watch broke");
    }
}
