//! A stand-in for the API server that knows a DaemonSet, some pods and what is done to them, and fails as it is reported.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use e2e::agent::daemon_set;
use e2e::http::{self, HttpRequest, WATCH, failure};
use serde_json::{Value, json};
use test_support::port;

/// What it does in the place of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiFault {
    /// This status.
    Status(u16),
    /// The connection ends before a word.
    Silent,
    /// The connection ends in the head of the answer.
    CutInHead,
    /// The connection ends in the body.
    CutInBody,
    /// No answer, and the connection stays.
    Hangs,
    /// A byte at a time, all of it.
    Slow,
    /// What is not a HTTP.
    NoHttp,
    /// A page for people.
    Page,
}

pub const API_FAULTS: [ApiFault; 15] = [
    ApiFault::Status(401),
    ApiFault::Status(403),
    ApiFault::Status(404),
    ApiFault::Status(409),
    ApiFault::Status(410),
    ApiFault::Status(429),
    ApiFault::Status(500),
    ApiFault::Status(503),
    ApiFault::Silent,
    ApiFault::CutInHead,
    ApiFault::CutInBody,
    ApiFault::Hangs,
    ApiFault::Slow,
    ApiFault::NoHttp,
    ApiFault::Page,
];

impl ApiFault {
    /// What a message about it says, in any of these words.
    pub fn causes(self) -> Vec<String> {
        let words: &[&str] = match self {
            Self::Status(status) => return vec![status.to_string()],
            Self::Silent | Self::CutInHead | Self::CutInBody => &["connection", "clos", "end", "incomplete"],
            Self::Hangs | Self::Slow => &["in time", "timed out", "deadline", "within", "no answer"],
            Self::NoHttp | Self::Page => &["no api server", "http", "json", "is this the api server"],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }
}

#[derive(Default)]
struct State {
    pods: BTreeMap<String, Value>,
    /// What is done in the place of answers, and to how many requests.
    fault: Option<(ApiFault, usize)>,
    met: bool,
}

/// The server, on a free port of loopback. It answers for as long as the test process lives.
pub struct Api {
    port: u16,
    state: Arc<Mutex<State>>,
}

impl Api {
    pub fn start() -> Result<Self> {
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        Ok(Self { port: port::serve(move |stream| serve(&stream, &shared))?, state })
    }

    pub const fn port(&self) -> u16 {
        self.port
    }

    pub fn put(&self, pod: Value) {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        self.state().pods.insert(name, pod);
    }

    /// The pod as it is now, if there is one.
    pub fn pod(&self, name: &str) -> Option<Value> {
        self.state().pods.get(name).cloned()
    }

    /// From now on so many requests go wrong.
    pub fn fail(&self, fault: ApiFault, times: usize) {
        self.state().fault = Some((fault, times));
    }

    /// All is well again; whether anything went wrong before.
    pub fn heal(&self) -> bool {
        let mut state = self.state();
        state.fault = None;
        state.met
    }

    /// The pods there are, and their labels.
    pub fn facts(&self) -> Vec<(String, String)> {
        let pods = &self.state().pods;
        pods.iter()
            .map(|(name, pod)| (format!("pod {name}"), pod["metadata"]["labels"].to_string()))
            .collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(stream: &TcpStream, shared: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    while let Some(request) = HttpRequest::read(&mut reader)? {
        let fault = {
            let mut state = lock(shared);
            let fault = state.fault.filter(|(_, times)| *times > 0);
            state.fault = fault.map(|(fault, times)| (fault, times - 1));
            state.met |= fault.is_some();
            fault.map(|(fault, _)| fault)
        };
        if fault.is_none() && request.head.contains("watch=true") {
            return watch(stream);
        }
        if !answer(stream, fault, || respond(&request, shared))? {
            return stream.shutdown(Shutdown::Both);
        }
    }
    Ok(())
}

/// A watch on which nothing happens, until the client has enough.
fn watch(mut stream: &TcpStream) -> std::io::Result<()> {
    stream.write_all(WATCH.as_bytes())?;
    stream.read(&mut [0]).map(drop)
}

/// Answers a request, or does something else; whether the connection is of further use.
fn answer(
    mut stream: &TcpStream,
    fault: Option<ApiFault>,
    respond: impl FnOnce() -> (u16, String),
) -> std::io::Result<bool> {
    let json = |(status, body): (u16, String)| http::answer(status, "", &body);
    let (text, goes_on) = match fault {
        None => (json(respond()), true),
        Some(ApiFault::Status(status)) => (json((status, failure(status))), true),
        Some(ApiFault::Silent) => return Ok(false),
        Some(ApiFault::CutInHead) => ("HTTP/1.1 200 OK\r\nContent-Ty".to_owned(), false),
        Some(ApiFault::CutInBody) => {
            let text = json(respond());
            (text[..text.len() - 5].to_owned(), false)
        }
        Some(ApiFault::Hangs) => {
            stream.read_exact(&mut [0])?;
            return Ok(false);
        }
        Some(ApiFault::Slow) => {
            for byte in json(respond()).as_bytes() {
                stream.write_all(&[*byte])?;
                thread::sleep(Duration::from_micros(300));
            }
            return Ok(true);
        }
        Some(ApiFault::NoHttp) => ("SSH-2.0-OpenSSH_9.2\r\n".to_owned(), false),
        Some(ApiFault::Page) => {
            let page = "<html><body>Log in</body></html>";
            (http::answer(200, "", page).replace("application/json", "text/html"), true)
        }
    };
    stream.write_all(text.as_bytes())?;
    Ok(goes_on)
}

fn respond(request: &HttpRequest, shared: &Mutex<State>) -> (u16, String) {
    let path = request.path();
    if path.contains("/daemonsets") {
        return (200, daemon_set(false));
    }
    if path.ends_with("/events") {
        return (201, String::from_utf8_lossy(&request.body).into_owned());
    }
    let mut state = lock(shared);
    let Some((_, name)) = path.rsplit_once("/pods/") else {
        if !path.ends_with("/pods") {
            return (404, failure(404));
        }
        let items: Vec<&Value> = state.pods.values().collect();
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": items});
        return (200, list.to_string());
    };
    // Labels are patched by way of the status, for which fewer rights are needed.
    let name = name.trim_end_matches("/status");
    match (request.method(), state.pods.get_mut(name)) {
        (_, None) => (404, failure(404)),
        ("DELETE", Some(_)) => (200, state.pods.remove(name).unwrap_or_default().to_string()),
        ("PATCH", Some(pod)) => {
            let patch: Value = serde_json::from_slice(&request.body).unwrap_or_default();
            for step in patch.as_array().into_iter().flatten().filter(|step| step["op"] != "test") {
                let label = step["path"].as_str().and_then(|path| path.strip_prefix("/metadata/labels"));
                match label.map(|label| label.trim_start_matches('/').replace("~1", "/")) {
                    Some(label) if label.is_empty() => pod["metadata"]["labels"] = step["value"].clone(),
                    Some(label) => pod["metadata"]["labels"][label] = step["value"].clone(),
                    None => {}
                }
            }
            (200, pod.to_string())
        }
        (_, Some(pod)) => (200, pod.to_string()),
    }
}
