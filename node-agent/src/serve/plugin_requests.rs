//! The socket in the run directory at which plugins ask: for a pod that is being created ([`POD_PATH`]), and to enrol one of ambient mode
//! ([`ADD_PATH`]).
//!
//! A pod is answered from what the watch of the node's pods holds, so that its creation needs no API server. The agent reads any other
//! pod over its own connection, which is open and has another token than the plugin. A plugin that gets no pod here asks the API server itself.

use std::sync::Arc;
use std::time::Duration;

use agent_runtime::serve::{self, HttpResponse, handler};
use agent_runtime::supervisor::Supervisor;
use cni_core::plugin_event::{ADD_PATH, GivenPod, POD_PATH, PodRequest, SOCKET_NAME};
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::ambient::add_event::AddEvents;
use crate::cluster::pods::{self, is_name};
use crate::cluster::runtime_classes::ReadHandler;
use crate::metrics::CodeLabel;
use crate::parts::AgentParts;
use crate::pods::held_pods::{HeldPods, kept_part};
use crate::serve::plugin_socket::PluginSocket;
use crate::settings::Paths;

/// The largest body.
const LARGEST: usize = 64 * 1024;
/// How long the watch may take to bring a pod that is created: the kubelet has it from a watch, too.
const WATCH_PATIENCE: Duration = Duration::from_millis(100);
/// How long the API server may take for one that the watch has not brought: less than the plugin waits, so that it learns why.
const READ_PATIENCE: Duration = Duration::from_millis(600);
/// And for its runtime class.
const CLASS_PATIENCE: Duration = Duration::from_millis(200);

/// What plugins are answered with.
pub struct PluginRequests {
    /// Other pods are read with these, and requests to enrol a pod are counted.
    pub parts: AgentParts,
    /// The node's pods.
    pub held: Arc<HeldPods>,
    /// Enrols pods, if ambient mode is on.
    pub adds: Option<AddEvents>,
}

impl PluginRequests {
    /// Serves plugins. Needs a tokio run-time.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn serve(self, paths: &Paths, tasks: Supervisor) -> anyhow::Result<PluginSocket> {
        let (metrics, answer) = (self.parts.metrics.clone(), handler(&Arc::new(self), Self::answer));
        PluginSocket::start("plugin event socket", (&paths.run, SOCKET_NAME), metrics, tasks, answer)
    }

    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> HttpResponse {
        let path = request.uri().path();
        let adds = self.adds.as_ref().filter(|_| path == ADD_PATH);
        if adds.is_none() && path != POD_PATH {
            return serve::text(StatusCode::NOT_FOUND, format!("{path} is not served here\n"));
        }
        if request.method() != Method::POST {
            return serve::text(StatusCode::METHOD_NOT_ALLOWED, "only POST\n");
        }
        let body = serve::body(request, LARGEST).await;
        let body = body.map_err(|why| (StatusCode::BAD_REQUEST, why.to_string()));
        let answer = match (body, adds) {
            (Err(refused), _) => Err(refused),
            (Ok(body), Some(adds)) => adds.add(&body).await.map(|()| String::new()),
            (Ok(body), None) => self.pod(&body).await,
        };
        let (status, text) = match answer {
            Ok(text) => (StatusCode::OK, text),
            Err((status, why)) => (status, format!("{why}\n")),
        };
        if adds.is_some() {
            self.parts
                .metrics
                .plugin_requests
                .get_or_create(&CodeLabel { response_code: status.as_u16() })
                .inc();
        }
        serve::text(status, text)
    }

    async fn pod(&self, body: &[u8]) -> Result<String, (StatusCode, String)> {
        let wanted = read_request(body).map_err(|why| (StatusCode::BAD_REQUEST, why))?;
        let given = match self.held.wait_for(&wanted, WATCH_PATIENCE).await {
            Some(held) => self.given(&wanted, &held).await,
            None => self.read_in_time(&wanted).await.map(|pod| GivenPod {
                pod,
                namespace_labels: None,
                runtime_handler: None,
            }),
        };
        let text = given.and_then(|given| serde_json::to_string(&given).map_err(|error| error.to_string()));
        text.map_err(|why| (StatusCode::SERVICE_UNAVAILABLE, why))
    }

    /// A pod that is held, and what else decides about it.
    async fn given(&self, wanted: &PodRequest, held: &str) -> Result<GivenPod, String> {
        let pod: Value = serde_json::from_str(held).map_err(|error| error.to_string())?;
        let class = pod.pointer("/spec/runtimeClassName").and_then(Value::as_str);
        let runtime_handler = match class.filter(|class| is_name(class)) {
            Some(class) => self.handler(class).await,
            None => None,
        };
        Ok(GivenPod { namespace_labels: self.namespace_labels(&wanted.namespace), pod, runtime_handler })
    }

    /// The handler of a runtime class; one that was read long ago is better than none while the API server does not answer.
    async fn handler(&self, class: &str) -> Option<String> {
        let known = self.parts.handlers.known(class);
        let is_current = |known: &&ReadHandler| known.handler.is_some() && known.is_believed(Instant::now());
        if let Some(known) = known.as_ref().filter(is_current) {
            return known.handler.clone();
        }
        let read = async { self.parts.handlers.read(&self.parts.connection.get().ok()?, class).await.ok() };
        let read = tokio::time::timeout(CLASS_PATIENCE, read).await.ok().flatten();
        read.unwrap_or_else(|| known?.handler)
    }

    /// The labels of a held pod's namespace, if they are as current as the pod.
    fn namespace_labels(&self, namespace: &str) -> Option<Map<String, Value>> {
        let adds = self.adds.as_ref()?;
        let is_current = adds.state.inventory.namespace_watch().is_sound() || !self.held.watch().is_sound();
        adds.namespace_labels(namespace).filter(|_| is_current)
    }

    async fn read_in_time(&self, wanted: &PodRequest) -> Result<Value, String> {
        let read = tokio::time::timeout(READ_PATIENCE, self.read(wanted)).await;
        read.unwrap_or_else(|_| Err("the API server did not answer in time".to_owned()))
    }

    async fn read(&self, wanted: &PodRequest) -> Result<Value, String> {
        let cluster = self.parts.connection.get().map_err(|error| error.to_string())?;
        let pod = pods::get(&cluster, &wanted.namespace, &wanted.name).await;
        let pod = pod.map_err(|error| error.to_string())?.ok_or("the API server does not have the pod")?;
        match pod.pointer("/metadata/uid").and_then(Value::as_str) {
            Some(uid) if uid == wanted.uid => Ok(kept_part(&pod)),
            Some(_) | None => Err("the API server has another pod of this name".to_owned()),
        }
    }
}

/// The request in a body.
///
/// # Errors
/// It is not one, or its names are not a pod's: why, on one line.
pub fn read_request(body: &[u8]) -> Result<PodRequest, String> {
    let wanted: PodRequest =
        serde_json::from_slice(body).map_err(|error| format!("not a request: {error}"))?;
    if !is_name(&wanted.name) || !is_name(&wanted.namespace) || wanted.uid.is_empty() {
        let PodRequest { namespace, name, uid } = &wanted;
        return Err(format!("{name:?} in {namespace:?} with UID {uid:?} is not a pod"));
    }
    Ok(wanted)
}
