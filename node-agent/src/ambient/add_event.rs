//! Plugins ask to enrol pods that are being created: `POST /cmdadd`, as in the reference. The answer comes when the pod is enrolled, so that its containers
//! start behind ztunnel; any other answer fails the pod's creation, and the kubelet tries again.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_runtime::SCOPE;
use cni_core::plugin_event::{AddEvent, PodRequest};
use hyper::StatusCode;
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::pod::{AmbientPod, AmbientRules};
use super::state::{AmbientState, ambient_rules};
use crate::cluster::pods::{self, is_name};
use crate::parts::AgentParts;
use crate::pods::held_pods::HeldPods;
use crate::settings::{AmbientSettings, Paths};

/// How long enrolment may take: less than the plugin waits, so that it learns why.
const PATIENCE: Duration = Duration::from_millis(4200);
/// How much longer the controller may take to say why a pod is not enrolled.
const GRACE: Duration = Duration::from_millis(500);

/// A pod that is to be enrolled, and whose creation waits for that.
#[derive(Debug)]
pub struct AddRequest {
    /// The pod, with the addresses that the plugins before gave it.
    pub pod: AmbientPod,
    /// Its network namespace, where the agent finds it.
    pub netns: PathBuf,
    /// When the answer is due.
    pub deadline: Instant,
    /// Takes the answer.
    pub reply: oneshot::Sender<Result<(), String>>,
}

/// How pods of plugins are enrolled.
pub struct AddEvents {
    /// How pods are enrolled.
    pub settings: AmbientSettings,
    /// Where network namespaces are.
    pub paths: Paths,
    /// The plugin's configuration decides as it does for the plugin; pods that the watch has not brought are read.
    pub parts: AgentParts,
    /// Those that it has.
    pub held: Arc<HeldPods>,
    /// What is known of namespaces.
    pub state: Arc<AmbientState>,
    /// Enrols pods.
    pub adds: mpsc::Sender<AddRequest>,
}

impl AddEvents {
    /// Enrols the pod of an event.
    ///
    /// # Errors
    /// It is not enrolled: with what status to answer, and why.
    pub async fn add(&self, body: &[u8]) -> Result<(), (StatusCode, String)> {
        let deadline = Instant::now() + PATIENCE;
        let event = read_event(body).map_err(|why| (StatusCode::BAD_REQUEST, why))?;
        let enrolled = self.enrol(&event, deadline).await;
        enrolled.map_err(|why| {
            log::warn!(target: SCOPE, pod = format!("{}/{}", event.pod_namespace, event.pod_name); "a pod that is being created is not enrolled, so it does not start: {why}");
            (StatusCode::INTERNAL_SERVER_ERROR, why)
        })
    }

    async fn enrol(&self, event: &AddEvent, deadline: Instant) -> Result<(), String> {
        let pod = tokio::time::timeout_at(deadline, self.read(event)).await;
        let mut pod = pod.map_err(|_| "the API server did not answer in time".to_owned())??;
        pod.addresses = event.ips.iter().map(|ip| ip.address.addr()).collect::<Vec<IpAddr>>();
        let uid = pod.workload.uid().to_owned();
        let netns = visible(Path::new(&event.netns), &self.paths);
        let (reply, answer) = oneshot::channel();
        let request = AddRequest { pod, netns, deadline, reply };
        let ending = || "the agent is ending; another one follows".to_owned();
        self.adds.send(request).await.map_err(|_| ending())?;
        // The controller answers in time; this is for an agent that is stuck.
        match tokio::time::timeout_at(deadline + GRACE, answer).await {
            Ok(answer) => answer.map_err(|_| ending())?,
            // The machine is slow; the controller has seen why, if it has seen the pod.
            Err(_) => Err(self.state.reason(&uid).unwrap_or_else(|| {
                "the agent is busy with other pods, or has not read the node's pods yet".to_owned()
            })),
        }
    }

    /// The pod, and what of its namespace decides.
    async fn read(&self, event: &AddEvent) -> Result<AmbientPod, String> {
        let (rules, _) = ambient_rules(&self.parts.installer, &self.settings)?;
        let known = self.namespace_labels(&event.pod_namespace);
        let wanted_as_known = |pod: &Value| wanted(pod, known.as_ref()?, &rules).ok();
        if let Some(pod) = self.held(event).as_ref().and_then(wanted_as_known) {
            return Ok(pod);
        }
        // The watches may be behind what the plugin has read.
        let cluster = self.parts.connection.get().map_err(|error| error.to_string())?;
        let pod = pods::get(&cluster, &event.pod_namespace, &event.pod_name).await;
        let pod = pod.map_err(|error| format!("the pod cannot be read: {error}"))?;
        let pod = pod.ok_or("the API server does not have the pod (any more)")?;
        if let Some(pod) = wanted_as_known(&pod) {
            return Ok(pod);
        }
        let labels = pods::namespace_labels(&cluster, &event.pod_namespace).await;
        let labels = labels.map_err(|error| format!("the pod's namespace cannot be read: {error}"))?;
        wanted(&pod, &labels.unwrap_or_default(), &rules)
    }

    /// The pod as the watch has brought it.
    fn held(&self, event: &AddEvent) -> Option<Value> {
        let AddEvent { pod_namespace: namespace, pod_name: name, pod_uid: uid, .. } = event.clone();
        let held = self.held.find(&PodRequest { namespace, name, uid })?;
        serde_json::from_str(&held).ok()
    }

    /// The labels of a namespace, as far as the watch of namespaces has brought them.
    #[must_use]
    pub fn namespace_labels(&self, namespace: &str) -> Option<Map<String, Value>> {
        self.state.inventory.namespace_labels(namespace, self.settings.has_usual_selectors)
    }
}

fn wanted(pod: &Value, labels: &Map<String, Value>, rules: &AmbientRules) -> Result<AmbientPod, String> {
    let read = AmbientPod::starting(pod, labels, rules).ok_or("the pod is on the node's network")?;
    match &read.wanted {
        Ok(_) => Ok(read),
        Err(why) => Err(why.to_string()),
    }
}

/// The event in a body.
///
/// # Errors
/// It is not one, or its names are not a pod's: why, on one line.
pub fn read_event(body: &[u8]) -> Result<AddEvent, String> {
    let event: AddEvent = serde_json::from_slice(body).map_err(|error| format!("not an event: {error}"))?;
    if !is_name(&event.pod_name) || !is_name(&event.pod_namespace) {
        return Err(format!("{:?} in {:?} is not the name of a pod", event.pod_name, event.pod_namespace));
    }
    Ok(event)
}

/// Where the agent finds a network namespace of which the container runtime has this path.
fn visible(netns: &Path, paths: &Paths) -> PathBuf {
    match (netns.strip_prefix("/proc"), netns.file_name()) {
        (Ok(of_process), _) => paths.proc.join(of_process),
        (Err(_), Some(name)) if paths.netns.join(name).exists() => paths.netns.join(name),
        (Err(_), _) => netns.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_opened_where_the_agent_sees_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let none = PathBuf::new();
        let paths = Paths {
            source_bin: none.clone(),
            bin: none.clone(),
            net: none.clone(),
            netns: folder.path().to_owned(),
            proc: "/host/proc".into(),
            run: none.clone(),
            service_account: none,
        };
        std::fs::write(folder.path().join("cni-1"), "").expect("a file");
        let seen = |path: &str| visible(Path::new(path), &paths);
        assert_eq!(seen("/var/run/netns/cni-1"), folder.path().join("cni-1"));
        assert_eq!(seen("/elsewhere/cni-2"), Path::new("/elsewhere/cni-2"));
        assert_eq!(seen("/proc/7/ns/net"), Path::new("/host/proc/7/ns/net"));
    }
}
