//! An API server for objects of any kind, by their paths: nodes, Leases, ConfigMaps, DaemonSets, pods, events. It holds to versions as a real one does,
//! and fails on demand. Selectors select everything.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use test_support::port;

use e2e::agent::{Node, daemon_set};
use e2e::http::{CLOSE, HttpRequest, WATCH, answer, failure};

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

/// What is asked, by the verb that a role has for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Create,
    Delete,
    Get,
    List,
    Patch,
    Update,
    Watch,
}

/// A verb and a resource, by the names that roles have for them: `nodes/status` is another one than `nodes`.
pub type Asked = (Verb, &'static str);

/// The agents' DaemonSet.
pub const AGENTS: &str = "/apis/apps/v1/namespaces/istio-system/daemonsets/istio-cni-node";
pub const TO_LIST: Asked = (Verb::List, "pods");
pub const TO_WATCH: Asked = (Verb::Watch, "pods");
pub const TO_DELETE: Asked = (Verb::Delete, "pods");
pub const TO_LABEL: Asked = (Verb::Patch, "pods/status");
pub const TO_TELL: Asked = (Verb::Create, "events");

/// A request that came, however it was answered.
#[derive(Debug, Clone)]
pub struct Request {
    pub verb: Verb,
    pub resource: String,
    pub name: String,
    pub at: Instant,
    pub body: Value,
    /// As it came.
    pub http: HttpRequest,
    /// Whether it was done, whatever became of the answer.
    pub is_done: bool,
}

impl Request {
    fn is(&self, asked: Asked) -> bool {
        self.verb == asked.0 && self.resource == asked.1
    }
}

#[derive(Default)]
pub struct State {
    /// By their paths.
    objects: BTreeMap<String, Value>,
    version: u64,
    /// What happened: to what, from which version on, and how.
    history: Vec<(u64, String, &'static str, Value)>,
    /// A watch from an older version is rejected.
    oldest: u64,
    /// Each goes wrong once.
    pub faults: VecDeque<(Asked, Fault)>,
    /// These go wrong until further notice.
    outages: Vec<(Asked, Fault)>,
    pub requests: Vec<Request>,
    /// Counts up when all watches are to end.
    epoch: u64,
    /// Whether connections are closed at once.
    down: bool,
    /// Happens to an object just before the next request of this kind for it: another client was faster.
    pub faster: Option<(Asked, Change)>,
}

type Change = fn(&mut Value);
type Shared = (Mutex<State>, Condvar);

pub struct Objects {
    shared: Arc<Shared>,
}

impl Objects {
    pub fn start(node: &mut Node) -> Self {
        let shared = Arc::new((Mutex::new(State { version: 99, ..State::default() }), Condvar::new()));
        let served = Arc::clone(&shared);
        let port = port::serve(move |stream| serve(stream, &served)).expect("a port");
        node.set("KUBERNETES_SERVICE_PORT", &port.to_string());
        node.set("PLUGIN_SERVICE_ACCOUNT", "");
        Self { shared }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared)
    }

    /// Makes an object, or replaces it; its version is the server's.
    pub fn put(&self, path: &str, object: Value) {
        self.state().put(path, object);
        self.shared.1.notify_all();
    }

    pub fn change(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut state = self.state();
        let mut object = state.objects[path].clone();
        change(&mut object);
        state.put(path, object);
        drop(state);
        self.shared.1.notify_all();
    }

    pub fn remove(&self, path: &str) {
        let mut state = self.state();
        let mut object = state.objects.remove(path).expect("the object");
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let version = state.version;
        state.history.push((version, path.to_owned(), "DELETED", object));
        drop(state);
        self.shared.1.notify_all();
    }

    pub fn object(&self, path: &str) -> Option<Value> {
        self.state().objects.get(path).cloned()
    }

    /// Each of these goes wrong once, in this order.
    pub fn fail(&self, asked: Asked, faults: &[Fault]) {
        self.state().faults.extend(faults.iter().map(|fault| (asked, *fault)));
    }

    /// This goes wrong until [`Self::recover`].
    pub fn fail_always(&self, asked: Asked, fault: Fault) {
        self.state().outages.push((asked, fault));
    }

    pub fn recover(&self) {
        self.state().outages.clear();
    }

    /// Ends all watches; earlier events are forgotten, so a watch from there is rejected.
    pub fn forget_history(&self) {
        let mut state = self.state();
        state.history.clear();
        state.version += 1000;
        state.oldest = state.version;
        state.epoch += 1;
        drop(state);
        self.shared.1.notify_all();
    }

    /// Ends all watches.
    pub fn end_watches(&self) {
        self.state().epoch += 1;
        self.shared.1.notify_all();
    }

    /// Ends all watches, and goes or comes back.
    pub fn set_down(&self, down: bool) {
        self.state().down = down;
        self.end_watches();
    }

    /// The requests of a kind that came.
    pub fn requests(&self, asked: Asked) -> Vec<Request> {
        self.state().requests.iter().filter(|request| request.is(asked)).cloned().collect()
    }

    /// Those about one object.
    pub fn requests_about(&self, asked: Asked, name: &str) -> Vec<Request> {
        self.requests(asked).into_iter().filter(|request| request.name == name).collect()
    }

    /// The reasons of events about an object.
    pub fn events_about(&self, name: &str) -> Vec<String> {
        let events = self.requests(TO_TELL);
        let about = events.iter().filter(|event| event.body["involvedObject"]["name"] == name);
        about.map(|event| event.body["reason"].as_str().unwrap_or_default().to_owned()).collect()
    }
}

/// An API server that has the agents' DaemonSet, and pods, most of them of the namespace `shop`.
pub struct Api(Objects);

impl Deref for Api {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.0
    }
}

fn path_in(namespace: &str, pod: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods/{pod}")
}

fn pod_path(name: &str) -> String {
    path_in("shop", name)
}

impl Api {
    pub fn start(node: &mut Node) -> Self {
        let objects = Objects::start(node);
        objects.put(AGENTS, serde_json::from_str(&daemon_set(false)).expect("JSON"));
        Self(objects)
    }

    /// Makes a pod, or changes it; its version is the server's.
    pub fn put(&self, pod: Value) {
        let text = |field: &str| pod["metadata"][field].as_str().expect("text");
        self.0.put(&path_in(text("namespace"), text("name")), pod);
    }

    pub fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.0.change(&pod_path(name), change);
    }

    pub fn remove(&self, name: &str) {
        self.0.remove(&pod_path(name));
    }

    pub fn pod(&self, name: &str) -> Option<Value> {
        self.object(&pod_path(name))
    }

    /// The requests of a kind that were done.
    pub fn done(&self, asked: Asked) -> Vec<Request> {
        self.requests(asked).into_iter().filter(|request| request.is_done).collect()
    }

    /// How often pods were listed, and how many watches of them began.
    pub fn lists_and_watches(&self) -> (usize, usize) {
        (self.done(TO_LIST).len(), self.done(TO_WATCH).len())
    }

    pub fn events_about(&self, pod: &str) -> Vec<Value> {
        let events = self.done(TO_TELL).into_iter().map(|event| event.body);
        events.filter(|event| event["involvedObject"]["name"] == pod).collect()
    }

    /// The deletes and patches that were done, or refused for what they said.
    pub fn changes(&self) -> Vec<Request> {
        [TO_DELETE, TO_LABEL].into_iter().flat_map(|asked| self.done(asked)).collect()
    }

    pub fn changes_of(&self, pod: &str) -> Vec<Request> {
        self.changes().into_iter().filter(|change| change.name == pod).collect()
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn put(&mut self, path: &str, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        // An empty list is omitted, as in a real server's store.
        if let Some(spec) = object["spec"].as_object_mut() {
            spec.retain(|_, value| *value != json!([]));
        }
        let kind = if self.objects.contains_key(path) { "MODIFIED" } else { "ADDED" };
        self.history.push((self.version, path.to_owned(), kind, object.clone()));
        self.objects.insert(path.to_owned(), object);
    }

    fn fault(&mut self, target: &Target, verb: Verb) -> Option<Fault> {
        let is = |(of, resource): &Asked| *of == verb && *resource == target.resource;
        if let Some(at) = self.faults.iter().position(|(asked, _)| is(asked)) {
            return self.faults.remove(at).map(|(_, fault)| fault);
        }
        self.outages.iter().find(|(asked, _)| is(asked)).map(|(_, fault)| *fault)
    }

    /// The object of a request, once a faster client has changed it.
    fn seen(&mut self, verb: Verb, target: &Target) -> Option<Value> {
        let mut object = self.objects.get(&target.object).cloned()?;
        if let Some((_, change)) = self.faster.take_if(|((of, to), _)| *of == verb && *to == target.resource)
        {
            change(&mut object);
            self.put(&target.object, object);
        }
        self.objects.get(&target.object).cloned()
    }

    /// Does what is asked; the status, and the answer of success.
    fn answer(&mut self, verb: Verb, target: &Target, body: &Value) -> (u16, Value) {
        let path = &target.object;
        match verb {
            Verb::List => {
                let items: Vec<&Value> = self.of(path).collect();
                let kind = match target.resource.as_str() {
                    "nodes" => "NodeList",
                    "pods" => "PodList",
                    "namespaces" => "NamespaceList",
                    _ => "List",
                };
                (
                    200,
                    json!({"kind": kind, "metadata": {"resourceVersion": self.version.to_string()}, "items": items}),
                )
            }
            Verb::Get => self.seen(verb, target).map_or((404, Value::Null), |object| (200, object)),
            Verb::Delete => self.delete(target, &body["preconditions"]),
            Verb::Create => {
                let name = body["metadata"]["name"].as_str().unwrap_or("generated");
                let path = format!("{path}/{name}");
                if self.objects.contains_key(&path) && target.resource != "events" {
                    return (409, Value::Null);
                }
                if target.resource != "events" {
                    self.put(&path, body.clone());
                }
                (201, body.clone())
            }
            Verb::Update => {
                let seen = &body["metadata"]["resourceVersion"];
                match self.objects.get(path) {
                    None => (404, Value::Null),
                    Some(now) if *seen != now["metadata"]["resourceVersion"] => (409, Value::Null),
                    Some(_) => {
                        self.put(path, body.clone());
                        (200, body.clone())
                    }
                }
            }
            Verb::Patch => self.patch(target, body),
            Verb::Watch => unreachable!("answered by a stream"),
        }
    }

    /// Begins a pod's end, if it is as the request says.
    fn delete(&mut self, target: &Target, wanted: &Value) -> (u16, Value) {
        let Some(mut object) = self.seen(Verb::Delete, target) else { return (404, Value::Null) };
        if ["uid", "resourceVersion"].iter().any(|field| object["metadata"][field] != wanted[field]) {
            return (409, Value::Null);
        }
        object["metadata"]["deletionTimestamp"] = json!("2026-11-21T00:00:00Z");
        self.put(&target.object, object.clone());
        (200, object)
    }

    fn patch(&mut self, target: &Target, patch: &Value) -> (u16, Value) {
        let Some(mut object) = self.seen(Verb::Patch, target) else { return (404, Value::Null) };
        let status = match patch.as_array() {
            Some(steps) => {
                if steps.iter().all(|step| apply(step, &mut object)) {
                    200
                } else {
                    422
                }
            }
            None => merge_conditions(patch, &mut object),
        };
        if status == 200 {
            self.put(&target.object, object.clone());
        }
        (status, object)
    }

    /// The objects of a collection.
    fn of(&self, collection: &str) -> impl Iterator<Item = &Value> {
        let is_in = move |path: &str| is_in(path, collection);
        self.objects.iter().filter(move |(path, _)| is_in(path)).map(|(_, object)| object)
    }
}

/// Whether an object is in a collection: of its namespace, or of all.
fn is_in(path: &str, collection: &str) -> bool {
    let Some((parent, _)) = path.rsplit_once('/') else { return false };
    let of_all = || {
        let (group, rest) = parent.split_once("/namespaces/")?;
        Some(format!("{group}/{}", rest.split_once('/')?.1))
    };
    parent == collection || of_all().is_some_and(|all| all == collection)
}

/// One step of a JSON patch (RFC 6902), as far as these tests need it; false if its test fails.
fn apply(step: &Value, object: &mut Value) -> bool {
    let path = step["path"].as_str().expect("a path");
    let (parent, key) = path.rsplit_once('/').expect("a path");
    let value = &step["value"];
    if step["op"] == "test" {
        return object.pointer(path).unwrap_or(&Value::Null) == value;
    }
    let parent = object.pointer_mut(parent).expect("what holds it");
    match (step["op"].as_str(), parent) {
        (Some("add"), Value::Array(list)) if key == "-" => list.push(value.clone()),
        (Some("add"), Value::Object(map)) => drop(map.insert(key.replace("~1", "/"), value.clone())),
        (Some("remove"), Value::Array(list)) => drop(list.remove(key.parse().expect("a place"))),
        (op, _) => panic!("{op:?} of {path}"),
    }
    true
}

/// A strategic merge of conditions, which are known by their types.
fn merge_conditions(patch: &Value, object: &mut Value) -> u16 {
    if patch["metadata"]["uid"] != object["metadata"]["uid"] {
        return 409;
    }
    if object["status"]["conditions"].is_null() {
        object["status"]["conditions"] = json!([]);
    }
    let conditions = object["status"]["conditions"].as_array_mut().expect("conditions");
    for new in patch["status"]["conditions"].as_array().expect("conditions") {
        conditions.retain(|old| old["type"] != new["type"]);
        conditions.push(new.clone());
    }
    200
}

/// What a request is about.
struct Target {
    /// By the name that roles have for it, with its subresource.
    resource: String,
    name: String,
    /// The path of the object, or of the collection.
    object: String,
}

impl Target {
    fn of(path: &str) -> Self {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        // api/v1, or apis, a group and a version; then perhaps a namespace.
        let group = if parts[0] == "api" { 2 } else { 3 };
        let namespaced = parts.get(group) == Some(&"namespaces") && parts.len() > group + 2;
        let at = if namespaced { group + 2 } else { group };
        let part = |place: usize| parts.get(place).copied().unwrap_or_default().to_owned();
        let end = parts.len().min(at + 2);
        let resource = [part(at), part(at + 2)].join("/");
        let resource = resource.trim_end_matches('/').to_owned();
        Self { resource, name: part(at + 1), object: format!("/{}", parts[..end].join("/")) }
    }
}

fn serve(mut stream: TcpStream, shared: &Shared) {
    let Ok(Some(request)) = HttpRequest::read(&mut stream) else { return };
    if lock(shared).down {
        return;
    }
    let query = request.query();
    let target = Target::of(request.path());
    let verb = match request.method() {
        "POST" => Verb::Create,
        "DELETE" => Verb::Delete,
        "PUT" => Verb::Update,
        "PATCH" => Verb::Patch,
        _ if query.contains("watch=true") => Verb::Watch,
        _ if target.name.is_empty() => Verb::List,
        _ => Verb::Get,
    };
    let body: Value = serde_json::from_slice(&request.body).unwrap_or(Value::Null);
    let mut state = lock(shared);
    let (resource, name) = (target.resource.clone(), target.name.clone());
    let fault = state.fault(&target, verb);
    let is_done = !matches!(fault, Some(Fault::Status(_) | Fault::Later(_) | Fault::Silence | Fault::Hang));
    let (at, http) = (Instant::now(), request.clone());
    state.requests.push(Request { verb, resource, name, at, body: body.clone(), http, is_done });
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
    if verb == Verb::Watch {
        drop(state);
        return watch(stream, &target.object, query, shared, fault);
    }
    let (status, object) = state.answer(verb, &target, &body);
    drop(state);
    shared.1.notify_all();
    match fault {
        Some(Fault::DoneInSilence) => {}
        Some(Fault::DoneAndHang) => hang(&mut stream),
        _ if status < 300 => send(&mut stream, status, &object.to_string(), None),
        _ => send(&mut stream, status, &failure(status), None),
    }
}

fn watch(mut stream: TcpStream, collection: &str, query: &str, shared: &Shared, fault: Option<Fault>) {
    let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion=")).unwrap_or_default();
    let mut sent: u64 = from.parse().unwrap_or_default();
    let state = lock(shared);
    if sent < state.oldest {
        drop(state);
        return send(&mut stream, 410, &failure(410), None);
    }
    let epoch = state.epoch;
    drop(state);
    stream_events(stream, fault, || {
        let state = lock(shared);
        if state.epoch != epoch {
            return if state.down { News::Cut } else { News::End };
        }
        let new: Vec<_> = state.history.iter().filter(|(version, ..)| *version > sent).cloned().collect();
        if new.is_empty() {
            drop(shared.1.wait_timeout(state, PAUSE).unwrap_or_else(PoisonError::into_inner));
        }
        sent = new.last().map_or(sent, |(version, ..)| *version);
        let wanted = new.into_iter().filter(|(_, path, ..)| is_in(path, collection));
        News::Events(wanted.map(|(_, _, kind, object)| (kind, object)).collect())
    });
}

/// Until the client has enough.
fn hang(stream: &mut TcpStream) {
    let _ = stream.read(&mut [0]);
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
    let mut alive = stream.write_all(WATCH.as_bytes()).is_ok();
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
    let _ = stream.write_all(answer(status, &format!("{CLOSE}{retry}"), body).as_bytes());
}
