//! What the controller of ambient mode knows, and other parts of the agent show.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use agent_runtime::lock;
use cni_core::enrolment_report::EnrolmentReport;
use cni_core::pod_source::PodName;
use cni_core::selection::Programming;
use tokio::sync::watch;

use super::enrolment::Enrolled;
use super::inventory::Inventory;
use super::pod::AmbientRules;
use crate::install::installer::Installer;
use crate::settings::AmbientSettings;

/// The state of ambient mode on this node.
#[derive(Debug, Default)]
pub struct AmbientState {
    /// What is known of pods and namespaces.
    pub inventory: Arc<Inventory>,
    progress: Mutex<Progress>,
    begun: watch::Sender<bool>,
}

/// How far the node's pods are.
#[derive(Debug, Default, Clone)]
struct Progress {
    enrolled: Enrolled,
    /// The names of pods, by UID.
    names: BTreeMap<String, PodName>,
    /// Why nothing can be enrolled.
    obstacle: Option<String>,
}

impl AmbientState {
    /// Nothing can be enrolled, because of this. Returns whether that is new.
    pub fn hinder(&self, why: String) -> bool {
        let mut progress = lock(&self.progress);
        let is_new = progress.obstacle.as_ref() != Some(&why);
        progress.obstacle = Some(why);
        is_new
    }

    /// All pods that were due have been examined. Names are those of pods, by UID.
    pub fn examined(&self, enrolled: Enrolled, names: BTreeMap<String, PodName>) {
        *lock(&self.progress) = Progress { enrolled, names, obstacle: None };
        self.begun.send_replace(true);
    }

    /// Why a pod was not as wanted when it was examined last.
    #[must_use]
    pub fn reason(&self, uid: &str) -> Option<String> {
        lock(&self.progress).enrolled.pending.get(uid).cloned()
    }

    /// Whether some pods are not as wanted.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        !lock(&self.progress).enrolled.pending.is_empty()
    }

    /// Waits until every pod was examined once.
    pub async fn begun(&self) {
        // The sender lives as long as this does.
        let _ = self.begun.subscribe().wait_for(|begun| *begun).await;
    }

    /// Whether pods can be enrolled.
    ///
    /// # Errors
    /// Why not, for people.
    pub fn verdict(&self) -> Result<(), String> {
        match &lock(&self.progress).obstacle {
            Some(why) => Err(format!("ambient mode: {why}")),
            None if *self.begun.borrow() => Ok(()),
            None => Err("ambient mode: the node's pods and namespaces have not been listed yet".to_owned()),
        }
    }

    /// How far pods are, and why some are not, for people.
    #[must_use]
    pub fn words(&self) -> String {
        let Progress { enrolled: Enrolled { wanted, enrolled, pending }, names, .. } =
            lock(&self.progress).clone();
        let name = |uid: String| names.get(&uid).map(ToString::to_string).unwrap_or(uid);
        let named = pending.into_iter().map(|(uid, why)| (name(uid), why));
        EnrolmentReport { wanted, enrolled, pending: named.collect() }.to_string()
    }
}

/// Which pods are in ambient mode and how they are redirected, from the plugin's configuration, so that both decide alike.
///
/// # Errors
/// It cannot be read.
pub fn ambient_rules(
    installer: &Installer,
    settings: &AmbientSettings,
) -> Result<(AmbientRules, Programming), String> {
    let conf =
        installer.plugin_conf().map_err(|error| format!("the plugin's entry cannot be read: {error}"))?;
    let (enablement, sandboxed, acceptance) = (conf.enablement, conf.sandboxed, conf.acceptance);
    Ok((AmbientRules { enablement, defaults: settings.defaults, sandboxed, acceptance }, conf.programming))
}
