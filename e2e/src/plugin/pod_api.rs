//! A stand-in for the API server that serves pods and namespaces and nothing else.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::http::{HttpRequest, StandIn, failure};

/// The server.
pub type PodApi = StandIn<Served>;

/// What it has and was asked.
#[derive(Debug, Default)]
pub struct Served {
    /// By path.
    objects: BTreeMap<String, String>,
    /// The paths that were asked for.
    requests: Vec<String>,
}

impl PodApi {
    /// Starts it on a free port of loopback.
    pub fn start() -> Self {
        Self::of(Served::default(), respond)
    }

    /// Adds a pod, whatever it is.
    pub fn add(&self, namespace: &str, name: &str, pod: &Value) {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        self.state().objects.insert(path, pod.to_string());
    }

    /// Adds a namespace with these labels.
    pub fn add_namespace(&self, name: &str, labels: &Value) {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
        self.state().objects.insert(format!("/api/v1/namespaces/{name}"), namespace.to_string());
    }

    /// The paths that were asked for since the last call.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state().requests)
    }
}

fn respond(request: &HttpRequest, served: &mut Served) -> (u16, String) {
    served.requests.push(request.path().to_owned());
    served.objects.get(request.path()).map_or_else(|| (404, failure(404)), |body| (200, body.clone()))
}
