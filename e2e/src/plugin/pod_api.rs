//! A stand-in for the API server that serves pods and namespaces and nothing else, on a thread, without TLS.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use serde_json::{Value, json};
use test_support::port;

use crate::http::{HttpRequest, answer, failure};

/// The server. It answers for as long as the test process lives.
#[derive(Debug)]
pub struct PodApi {
    port: u16,
    served: Arc<Mutex<Served>>,
}

#[derive(Debug, Default)]
struct Served {
    /// By path.
    objects: BTreeMap<String, String>,
    /// The paths that were asked for.
    requests: Vec<String>,
}

impl PodApi {
    /// Starts it on a free port of loopback.
    pub fn start() -> Result<Self> {
        let served: Arc<Mutex<Served>> = Arc::default();
        let kept = Arc::clone(&served);
        Ok(Self { port: port::serve(move |stream| serve(stream, &kept))?, served })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Adds a pod, whatever it is.
    pub fn add(&self, namespace: &str, name: &str, pod: &Value) {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        lock(&self.served).objects.insert(path, pod.to_string());
    }

    /// Adds a namespace with these labels.
    pub fn add_namespace(&self, name: &str, labels: &Value) {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}});
        lock(&self.served).objects.insert(format!("/api/v1/namespaces/{name}"), namespace.to_string());
    }

    /// The paths that were asked for since the last call.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.served).requests)
    }
}

fn lock(served: &Mutex<Served>) -> MutexGuard<'_, Served> {
    served.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(mut stream: TcpStream, served: &Mutex<Served>) -> std::io::Result<()> {
    while let Some(request) = HttpRequest::read(&mut stream)? {
        let path = request.path();
        let found = {
            let mut served = lock(served);
            served.requests.push(path.to_owned());
            served.objects.get(path).cloned()
        };
        let answer = found.map_or_else(|| answer(404, "", &failure(404)), |body| answer(200, "", &body));
        stream.write_all(answer.as_bytes())?;
    }
    Ok(())
}
