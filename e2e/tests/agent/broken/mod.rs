//! An API server for pods that are watched and changed, which fails on demand; [`objects`] is one for all other objects.

pub mod objects;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use test_support::port;

use serde_json::{Value, json};

use e2e::agent::{Node, daemon_set};
use e2e::http::HttpRequest;

/// What goes wrong with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// This status.
    Status(u16),
    /// 429, with a time to come back in seconds.
    Later(u16),
    /// The connection is closed without a word.
    Silence,
    /// It is done, and then the connection is closed without a word.
    DoneInSilence,
    /// It never answers, and keeps the connection.
    Hang,
    /// It is done, and never answered.
    DoneAndHang,
    /// A watch begins, and nothing ever comes.
    SilentWatch,
    /// A watch says in its stream that it has an error of this code.
    InStream(u16),
}

/// A request for pods or events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    List,
    Watch,
    Get,
    Delete,
    Patch,
    Event,
}

#[derive(Default)]
pub struct State {
    pods: Vec<Value>,
    version: u64,
    /// What happened to pods: from which version on, and how.
    history: Vec<(u64, &'static str, Value)>,
    pub faults: VecDeque<(Verb, Fault)>,
    pub events: Vec<Value>,
    /// Deletes and patches that came, with their bodies and types, however they were answered.
    pub changes: Vec<(String, String, Value)>,
    pub lists: usize,
    pub watches: usize,
    /// The names of pods that were requested, in their order.
    pub gets: Vec<String>,
    /// The versions that watches began at.
    pub watched_from: Vec<String>,
    /// Selectors that lists and watches had.
    pub queries: Vec<String>,
    /// Counts up when all watches are to end.
    epoch: u64,
    /// Whether connections are closed at once.
    pub down: bool,
    /// Happens to a pod just before it is deleted or patched: another client was faster.
    pub before_patch: Option<fn(&mut Value)>,
    /// The same just before it is read.
    pub before_get: Option<fn(&mut Value)>,
}

/// Makes a node's API server: a thread for each connection. Returns its port.
fn listen<S: Send + Sync + 'static>(node: &mut Node, shared: &Arc<S>, serve: fn(TcpStream, &S)) {
    let shared = shared.clone();
    let port = port::serve(move |stream| serve(stream, &shared)).expect("a port");
    node.set("KUBERNETES_SERVICE_PORT", &port.to_string());
    node.set("PLUGIN_SERVICE_ACCOUNT", "");
}

pub struct Api(Arc<(Mutex<State>, Condvar)>);

impl Api {
    pub fn start(node: &mut Node) -> Self {
        let shared = Arc::new((Mutex::new(State { version: 100, ..State::default() }), Condvar::new()));
        listen(node, &shared, serve);
        Self(shared)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.0)
    }

    /// Makes a pod, or changes it; its version is the server's.
    pub fn put(&self, pod: Value) {
        self.state().put(pod);
        self.0.1.notify_all();
    }

    /// Changes a pod.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut pod = self.pod(name).expect("the pod");
        change(&mut pod);
        self.put(pod);
    }

    pub fn remove(&self, name: &str) {
        let mut state = self.state();
        let at = state.pods.iter().position(|pod| pod["metadata"]["name"] == name).expect("the pod");
        let mut pod = state.pods.remove(at);
        state.version += 1;
        pod["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let version = state.version;
        state.history.push((version, "DELETED", pod));
        drop(state);
        self.0.1.notify_all();
    }

    pub fn pod(&self, name: &str) -> Option<Value> {
        self.state().pods.iter().find(|pod| pod["metadata"]["name"] == name).cloned()
    }

    /// Ends all watches; earlier events are forgotten, so a watch from there is rejected.
    pub fn forget_history(&self) {
        let mut state = self.state();
        state.history.clear();
        state.version += 1000;
        state.epoch += 1;
        drop(state);
        self.0.1.notify_all();
    }

    /// Ends all watches, and goes.
    pub fn set_down(&self, down: bool) {
        let mut state = self.state();
        state.down = down;
        state.epoch += 1;
        drop(state);
        self.0.1.notify_all();
    }

    pub fn fail(&self, faults: &[(Verb, Fault)]) {
        self.state().faults.extend(faults);
    }

    pub fn events_about(&self, pod: &str) -> Vec<Value> {
        let about = |event: &&Value| event["involvedObject"]["name"] == pod;
        self.state().events.iter().filter(about).cloned().collect()
    }

    /// Deletes or patches of a pod that came.
    pub fn changes_of(&self, pod: &str) -> Vec<(String, String, Value)> {
        let of_pod = |(path, _, _): &&(String, String, Value)| {
            path.split("/pods/").nth(1).and_then(|rest| rest.split('/').next()) == Some(pod)
        };
        self.state().changes.iter().filter(of_pod).cloned().collect()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn put(&mut self, mut pod: Value) {
        self.version += 1;
        pod["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let name = pod["metadata"]["name"].clone();
        let at = self.pods.iter().position(|other| other["metadata"]["name"] == name);
        let kind = if at.is_some() { "MODIFIED" } else { "ADDED" };
        self.history.push((self.version, kind, pod.clone()));
        match at {
            Some(at) => self.pods[at] = pod,
            None => self.pods.push(pod),
        }
    }

    fn fault(&mut self, verb: Verb) -> Option<Fault> {
        let at = self.faults.iter().position(|(of, _)| *of == verb)?;
        self.faults.remove(at).map(|(_, fault)| fault)
    }

    /// Reads a pod.
    fn get(&mut self, name: &str) -> Option<Value> {
        let pod = self.pods.iter().find(|pod| pod["metadata"]["name"] == name).cloned()?;
        Some(match self.before_get.take() {
            Some(before_get) => self.change_first(pod, before_get),
            None => pod,
        })
    }

    /// Another client is faster; the pod as it is then.
    fn change_first(&mut self, mut pod: Value, change: fn(&mut Value)) -> Value {
        change(&mut pod);
        self.put(pod.clone());
        pod["metadata"]["resourceVersion"] = json!(self.version.to_string());
        pod
    }

    /// Deletes or patches a pod if it is as the request says; the status.
    fn change(&mut self, verb: Verb, name: &str, body: &Value) -> u16 {
        let Some(mut pod) = self.pods.iter().find(|pod| pod["metadata"]["name"] == name).cloned() else {
            return 404;
        };
        if let Some(before_patch) = self.before_patch.take() {
            pod = self.change_first(pod, before_patch);
        }
        let is = |field: &str, value: &Value| pod["metadata"][field] == *value;
        if verb == Verb::Delete {
            let seen = &body["preconditions"];
            if !is("uid", &seen["uid"]) || !is("resourceVersion", &seen["resourceVersion"]) {
                return 409;
            }
            pod["metadata"]["deletionTimestamp"] = json!("2026-11-21T00:00:00Z");
            self.put(pod);
            return 200;
        }
        for step in body.as_array().expect("a JSON patch") {
            let path = step["path"].as_str().expect("a path");
            let field = path.strip_prefix("/metadata/").expect("metadata");
            match step["op"].as_str() {
                Some("test") if pod["metadata"][field] == step["value"] => {}
                Some("test") => return 422,
                _ if field == "labels" => pod["metadata"]["labels"] = step["value"].clone(),
                _ => {
                    let key = field.strip_prefix("labels/").expect("a label").replace("~1", "/");
                    pod["metadata"]["labels"]
                        .as_object_mut()
                        .expect("labels")
                        .insert(key, step["value"].clone());
                }
            }
        }
        self.put(pod);
        200
    }
}

fn serve(mut stream: TcpStream, shared: &(Mutex<State>, Condvar)) {
    let Ok(Some(request)) = HttpRequest::read(&mut stream) else { return };
    if lock(&shared.0).down {
        return;
    }
    let (path, query) = (request.path(), request.query());
    let verb = match request.method() {
        _ if path.contains("/daemonsets") && query.contains("watch=true") => {
            return drop(stream.read(&mut [0]));
        }
        _ if path.contains("/daemonsets") => return send(&mut stream, 200, &daemon_set(false), None),
        _ if path.ends_with("/events") => Verb::Event,
        "DELETE" => Verb::Delete,
        "PATCH" => Verb::Patch,
        _ if path != "/api/v1/pods" => Verb::Get,
        _ if query.contains("watch=true") => Verb::Watch,
        _ => Verb::List,
    };
    let mut state = lock(&shared.0);
    let fault = state.fault(verb);
    match fault {
        Some(Fault::Status(status)) => return send(&mut stream, status, &failure(status), None),
        Some(Fault::Later(seconds)) => return send(&mut stream, 429, &failure(429), Some(seconds)),
        Some(Fault::Silence) => return,
        Some(Fault::Hang) => {
            drop(state);
            return hang(&mut stream);
        }
        Some(Fault::DoneInSilence | Fault::DoneAndHang | Fault::SilentWatch | Fault::InStream(_)) | None => {}
    }
    let name = path.split("/pods/").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
    let body: Value = serde_json::from_slice(&request.body).unwrap_or(Value::Null);
    let (status, answer) = match verb {
        Verb::Event => {
            state.events.push(body.clone());
            (201, body.to_string())
        }
        Verb::List => {
            state.lists += 1;
            state.queries.push(query.to_owned());
            let metadata = json!({"resourceVersion": state.version.to_string()});
            (200, json!({"kind": "PodList", "metadata": metadata, "items": state.pods}).to_string())
        }
        Verb::Get => {
            state.gets.push(name.to_owned());
            match state.get(name) {
                Some(pod) => (200, pod.to_string()),
                None => (404, failure(404)),
            }
        }
        Verb::Delete | Verb::Patch => {
            let kind = request
                .head
                .lines()
                .find_map(|line| line.to_lowercase().strip_prefix("content-type: ").map(str::to_owned));
            state.changes.push((path.to_owned(), kind.unwrap_or_default(), body.clone()));
            let status = state.change(verb, name, &body);
            shared.1.notify_all();
            (status, if status == 200 { "{}".to_owned() } else { failure(status) })
        }
        Verb::Watch => {
            drop(state);
            return watch(stream, query, shared, fault);
        }
    };
    drop(state);
    match fault {
        Some(Fault::DoneInSilence) => {}
        Some(Fault::DoneAndHang) => hang(&mut stream),
        _ => send(&mut stream, status, &answer, None),
    }
}

/// Until the client has enough.
fn hang(stream: &mut TcpStream) {
    let _ = stream.read(&mut [0]);
}

fn watch(mut stream: TcpStream, query: &str, shared: &(Mutex<State>, Condvar), fault: Option<Fault>) {
    let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion=")).unwrap_or_default();
    let mut state = lock(&shared.0);
    state.watches += 1;
    state.watched_from.push(from.to_owned());
    state.queries.push(query.to_owned());
    let oldest = state.version - state.history.len() as u64;
    let mut sent: u64 = from.parse().expect("a version");
    if sent < oldest {
        drop(state);
        return send(&mut stream, 410, &failure(410), None);
    }
    let epoch = state.epoch;
    drop(state);
    stream_events(stream, fault, || {
        let state = lock(&shared.0);
        if state.epoch != epoch {
            return if state.down { News::Cut } else { News::End };
        }
        let new: Vec<_> = state.history.iter().filter(|(version, ..)| *version > sent).cloned().collect();
        if new.is_empty() {
            drop(shared.1.wait_timeout(state, PAUSE).unwrap_or_else(PoisonError::into_inner));
        }
        sent = new.last().map_or(sent, |(version, ..)| *version);
        News::Events(new.into_iter().map(|(_, kind, object)| (kind, object)).collect())
    });
}

/// How long a watch waits before it looks again whether it is to go on.
const PAUSE: Duration = Duration::from_millis(200);

/// What a watch has to say.
enum News {
    /// These events, by kind and object; perhaps none for now.
    Events(Vec<(&'static str, Value)>),
    /// No more.
    End,
    /// Nothing, not even that.
    Cut,
}

/// Answers a watch with events as they come, unless it is to fail.
fn stream_events(mut stream: TcpStream, fault: Option<Fault>, mut next: impl FnMut() -> News) {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut alive = stream.write_all(head.as_bytes()).is_ok();
    if fault == Some(Fault::SilentWatch) {
        return hang(&mut stream);
    }
    let mut chunk =
        |text: &str| stream.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).is_ok();
    if let Some(Fault::InStream(code)) = fault {
        let status: Value = serde_json::from_str(&failure(code)).expect("JSON");
        chunk(&(json!({"type": "ERROR", "object": status}).to_string() + "\n"));
        chunk("");
        return;
    }
    while alive {
        match next() {
            News::Events(events) => {
                for (kind, object) in events {
                    alive &= chunk(&(json!({"type": kind, "object": object}).to_string() + "\n"));
                }
            }
            News::End => {
                chunk("");
                return;
            }
            News::Cut => return,
        }
    }
}

fn send(stream: &mut TcpStream, status: u16, body: &str, retry_after: Option<u16>) {
    let retry = retry_after.map(|seconds| format!("Retry-After: {seconds}\r\n")).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{retry}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all((head + body).as_bytes());
}

fn failure(code: u16) -> String {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "so it was said", "reason": "x", "code": code}).to_string()
}
