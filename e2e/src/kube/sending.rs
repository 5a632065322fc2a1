//! Requests of the admin, over connections that are kept: each kubectl takes a tenth of a second of a processor, and a handshake.

use std::sync::{LazyLock, mpsc};
use std::time::Instant;

use anyhow::{Context, Result};
use cluster_client::{Client, kubeconfig};
use hyper::Request;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::ApiServer;
use test_support::process::SHORT;

/// How many requests are on their way at once.
const AT_ONCE: usize = 16;
/// The most that an answer has: a list of all pods of the largest tests, the counters of a server.
const MOST_ANSWER: usize = 256 << 20;

/// What sends. The tests' own threads may belong to another runtime, and to network namespaces from which no API server is reached.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime of one thread")
});

/// A request of the admin.
#[derive(Clone, Debug)]
pub struct Sending {
    method: &'static str,
    /// The media type of the body.
    kind: &'static str,
    accept: &'static str,
    path: String,
    body: String,
}

impl Sending {
    /// Reads what is at a path.
    pub(super) fn get(path: &str) -> Self {
        Self::of("GET", path, "application/json", String::new())
    }

    /// Creates an object.
    pub fn post(path: &str, object: &Value) -> Self {
        Self::of("POST", path, "application/json", object.to_string())
    }

    /// Changes a part of an object.
    pub fn merge(path: &str, part: &Value) -> Self {
        Self::of("PATCH", path, "application/merge-patch+json", part.to_string())
    }

    /// Makes an object be as this one says, created or changed; by force also where another program has set it otherwise.
    pub(super) fn apply(path: &str, object: &Value, force: bool) -> Self {
        let path = format!("{path}?fieldManager=kubectl&force={force}&fieldValidation=Strict");
        Self::of("PATCH", &path, "application/apply-patch+yaml", object.to_string())
    }

    /// Deletes an object at once.
    pub fn delete(path: &str) -> Self {
        let body = json!({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0});
        Self::of("DELETE", path, "application/json", body.to_string())
    }

    /// Deletes an object as kubectl does: pods end by themselves, and what it owns goes with it.
    pub(super) fn delete_in_its_time(path: &str) -> Self {
        let body = json!({"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"});
        Self::of("DELETE", path, "application/json", body.to_string())
    }

    /// The same for an answer in another form than the usual one.
    pub(super) fn accepting(self, accept: &'static str) -> Self {
        Self { accept, ..self }
    }

    fn of(method: &'static str, path: &str, kind: &'static str, body: String) -> Self {
        Self { method, kind, accept: "application/json", path: path.to_owned(), body }
    }

    fn built(&self) -> Result<Request<Vec<u8>>> {
        let request = Request::builder().method(self.method).uri(&self.path);
        let request = request.header("Accept", self.accept).header("Content-Type", self.kind);
        Ok(request.body(self.body.clone().into_bytes())?)
    }
}

impl ApiServer {
    /// Sends a request and returns the object that answers it; an answer that is not one of success is an error.
    pub fn send(&self, request: &Sending) -> Result<Value> {
        let text = self.text(request)?;
        serde_json::from_str(&text).context("the API server answers no JSON")
    }

    /// Reads what is at a path.
    pub fn read(&self, path: &str) -> Result<Value> {
        self.send(&Sending::get(path))
    }

    /// Sends requests side by side; an answer that is not one of success is an error.
    pub fn send_all(&self, requests: &[Sending]) -> Result<()> {
        for some in requests.chunks(AT_ONCE) {
            let answers: Result<Vec<_>> = some.iter().map(|request| self.start_sending(request)).collect();
            answers?.iter().try_for_each(|answer| answer.recv()?.map(drop))?;
        }
        Ok(())
    }

    /// Sends a request and returns the text that answers it.
    pub(super) fn text(&self, request: &Sending) -> Result<String> {
        self.start_sending(request)?.recv()?
    }

    fn start_sending(&self, request: &Sending) -> Result<mpsc::Receiver<Result<String>>> {
        let (client, built) = (self.client().clone(), request.built()?);
        let what = format!("{} {}", request.method, request.path);
        let (sender, receiver) = mpsc::channel();
        RUNTIME.spawn(async move {
            let deadline = Instant::now() + SHORT;
            let answer: Result<String> = async {
                let bytes = client.open(Ok(built), SHORT).await?.whole(MOST_ANSWER, deadline).await?;
                Ok(String::from_utf8(bytes)?)
            }
            .await;
            // Who has sent the others of a row no longer waits once one has failed.
            sender.send(answer.context(what)).ok();
        });
        Ok(receiver)
    }

    fn client(&self) -> &Client {
        self.client.get_or_init(|| {
            let _inside = RUNTIME.enter();
            kubeconfig::client(&self.admin_kubeconfig()).expect("the admin's kubeconfig is good for a client")
        })
    }
}
