//! One list and one watch of the node's pods, for all parts of the agent that follow them, and for plugins that ask.

use std::convert::Infallible;
use std::sync::Arc;

use agent_runtime::metrics::WatchLabel;
use agent_runtime::resync::{self, Collection, Freshness, Replica, Selection};
use serde_json::Value;

use crate::ambient::inventory::{Inventory, condensed};
use crate::cluster::ApiHandle;
use crate::cluster::pods;
use crate::metrics::Metrics;
use crate::pods::held_pods::{HeldPods, Holding, held};
use crate::pods::repair::RepairController;
use crate::pods::repair::filter::Broken;

/// Who follows the pods of a node.
pub struct Followers {
    /// What plugins are answered from.
    pub held: Arc<HeldPods>,
    /// Repairs broken ones.
    pub repair: Option<Arc<RepairController>>,
    /// Enrols those of ambient mode.
    pub ambient: Option<Arc<Inventory>>,
    /// Watches that broke are counted.
    pub metrics: Arc<Metrics>,
}

/// Follows pods for ever.
pub async fn run(connection: &ApiHandle, selection: Selection, followers: &Followers) -> Infallible {
    let collection = Collection {
        what: "the node's pods",
        source: pods::source(),
        selection,
        freshness: Freshness::Remembered,
        remedy: pods::REMEDY,
        spread: pods::SPREAD,
    };
    resync::run(connection, &collection, followers).await
}

/// What each follower keeps of a pod, decided on another thread than theirs.
pub struct ListedPod {
    held: Option<Holding>,
    broken: Option<Broken>,
    ambient: Option<(String, Value)>,
}

impl Replica for Followers {
    type Item = ListedPod;

    fn parser(&self) -> impl Fn(&Value) -> Option<ListedPod> + Clone + Send + Sync + 'static {
        let filter = self.repair.as_ref().map(|repair| repair.filter.clone());
        let is_ambient = self.ambient.is_some();
        move |pod| {
            Some(ListedPod {
                held: held(pod),
                broken: filter.as_ref().and_then(|filter| filter.check(pod).ok()),
                ambient: is_ambient.then(|| condensed(pod)).flatten(),
            })
        }
    }

    fn replace(&self, pods: Vec<ListedPod>) {
        let (mut all_held, mut all_broken, mut all_ambient) = (Vec::new(), Vec::new(), Vec::new());
        for pod in pods {
            all_held.extend(pod.held);
            all_broken.extend(pod.broken);
            all_ambient.extend(pod.ambient);
        }
        self.held.replace(all_held);
        if let Some(repair) = &self.repair {
            repair.replace(all_broken);
        }
        if let Some(ambient) = &self.ambient {
            ambient.replace_pods(all_ambient);
        }
    }

    fn changed(&self, pod: &Value) {
        self.held.change(pod);
        if let Some(repair) = &self.repair {
            repair.changed(pod);
        }
        if let Some(ambient) = &self.ambient {
            ambient.pod_changed(pod);
        }
    }

    fn removed(&self, pod: &Value) {
        self.held.remove(pod);
        if let Some(repair) = &self.repair {
            repair.removed(pod);
        }
        if let Some(ambient) = &self.ambient {
            ambient.pod_removed(pod);
        }
    }

    fn followed(&self, is_followed: bool) {
        self.held.followed(is_followed);
    }

    /// The next watch continues from the version of the last event, so no copy is stale.
    fn interrupted(&self) -> bool {
        self.metrics.watch_restarts.get_or_create(&WatchLabel { watch: "pods" }).inc();
        false
    }

    fn is_incomplete(&self) -> bool {
        self.repair.as_ref().is_some_and(|repair| repair.is_incomplete())
    }

    async fn wants_list(&self) {
        match &self.repair {
            Some(repair) => repair.wants_list().await,
            None => std::future::pending().await,
        }
    }
}
