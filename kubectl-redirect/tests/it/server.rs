//! A stand-in for an API server: lists by labels and node, objects by name, and `exec` over WebSockets.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_support::port;
use test_support::process::{self, Background, Output};
use tungstenite::Message;
use tungstenite::handshake::server::{Request, Response};

/// How long a run may take, however slow the machine.
pub const LIMIT: Duration = Duration::from_secs(180);

/// A program that is run in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `NAMESPACE/NAME/CONTAINER`.
    pub container: String,
    /// Its words, without the program.
    pub words: Vec<String>,
}

/// What becomes of a call.
pub enum Reply {
    /// It ends with these outputs and this exit code.
    Ended { stdout: Vec<u8>, stderr: Vec<u8>, code: u8 },
    /// It writes this, and does not end.
    Endless(Vec<u8>),
    /// It writes this again and again.
    Flood(Vec<u8>),
}

impl Reply {
    pub fn of(stdout: impl Into<Vec<u8>>) -> Self {
        Self::Ended { stdout: stdout.into(), stderr: Vec::new(), code: 0 }
    }
}

/// What answers a request for what the stand-in has no object for: the whole body.
type Special = Box<dyn Fn(&str, &mut TcpStream) -> bool + Send + Sync>;

struct State {
    objects: Vec<(&'static str, Value)>,
    special: Special,
    answer: Box<dyn Fn(&Call) -> Reply + Send + Sync>,
    calls: Mutex<Vec<Call>>,
    heads: Mutex<Vec<String>>,
}

/// The server, and a kubeconfig for it.
pub struct Server {
    state: Arc<State>,
    folder: tempfile::TempDir,
}

impl Server {
    /// Objects by their resources, and what calls are answered with.
    pub fn start(
        objects: Vec<(&'static str, Value)>,
        answer: impl Fn(&Call) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::with(objects, answer, |_, _| false)
    }

    /// The same; the last one may answer a request, by its target, itself.
    pub fn with(
        objects: Vec<(&'static str, Value)>,
        answer: impl Fn(&Call) -> Reply + Send + Sync + 'static,
        special: impl Fn(&str, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Self {
        let (special, answer): (Special, _) = (Box::new(special), Box::new(answer));
        let state =
            Arc::new(State { objects, special, answer, calls: Mutex::default(), heads: Mutex::default() });
        let served = state.clone();
        let port = port::serve(move |stream| serve(stream, &served)).expect("a port");
        let folder = tempfile::tempdir().expect("a folder");
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://127.0.0.1:{port}")}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "tenant"}}]});
        std::fs::write(folder.path().join("config"), config.to_string()).expect("writes");
        Self { state, folder }
    }

    pub fn run(&self, words: &[&str]) -> Output {
        process::run(&mut self.command(words), LIMIT).expect("it runs")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = process::command(env!("CARGO_BIN_EXE_kubectl-redirect"), words);
        command.env("KUBECONFIG", self.folder.path().join("config")).current_dir(self.folder.path());
        command
    }

    /// Runs it until its output or the server are so, sends it this signal, and waits for its end: its exit code, and all it printed.
    pub fn interrupted(
        &self,
        words: &[&str],
        signal: Signal,
        is_time: impl Fn(&str) -> bool,
    ) -> (Option<i32>, String) {
        let log = self.folder.path().join("log");
        let program = Background::start("kubectl-redirect", &self.command(words), &log).expect("it starts");
        let program = program.killed_on_drop();
        process::until(
            "the time to end it",
            LIMIT,
            &[&program],
            || Ok(is_time(&program.log()).then_some(())),
        )
        .expect("it gets there");
        program.signal(signal).expect("is sent");
        let code = program.wait(LIMIT).expect("it ends").code();
        (code, program.log())
    }

    /// What was run so far.
    pub fn calls(&self) -> Vec<Call> {
        self.state.calls.lock().expect("not poisoned").clone()
    }

    /// The beginnings of all requests so far, in lower case.
    pub fn heads(&self) -> Vec<String> {
        self.state.heads.lock().expect("not poisoned").clone()
    }
}

fn serve(mut stream: TcpStream, state: &State) {
    // A connection that is to become a WebSocket is left as it is.
    let mut begin = vec![0; 16 << 10];
    let target = loop {
        let Ok(count) = stream.peek(&mut begin) else { return };
        let text = String::from_utf8_lossy(&begin[..count]).into_owned();
        if count == 0 || text.contains("\r\n\r\n") {
            state.heads.lock().expect("not poisoned").push(text.to_lowercase());
            break text.split(' ').nth(1).unwrap_or_default().to_owned();
        }
    };
    if target.contains("/exec?") {
        return exec(stream, &target, state);
    }
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        if !stream.read(&mut byte).is_ok_and(|count| count == 1) {
            return;
        }
        head.push(byte[0]);
    }
    if (state.special)(&target, &mut stream) {
        return;
    }
    let (code, body) = answered(&target, state);
    let body = body.to_string();
    let head = format!("HTTP/1.1 {code} X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    let _ = stream.write_all((head + &body).as_bytes());
}

fn unescaped(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().replace('+', " ").into_bytes();
    for part in parts {
        let (code, rest) = part.split_at(2);
        bytes.push(u8::from_str_radix(code, 16).expect("a code"));
        bytes.extend(rest.replace('+', " ").bytes());
    }
    String::from_utf8(bytes).expect("text")
}

fn parameters(target: &str) -> Vec<(String, String)> {
    let query = target.split_once('?').map_or("", |(_, query)| query);
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), unescaped(value))).collect()
}

/// The status and the body: a list, or an object.
fn answered(target: &str, state: &State) -> (u16, Value) {
    let path = target.split('?').next().unwrap_or_default();
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let at = parts.iter().position(|part| *part == "namespaces").filter(|at| parts.len() > at + 2);
    let namespace = at.and_then(|at| parts.get(at + 1));
    let begin = at.map_or_else(|| if parts[0] == "api" { 2 } else { 3 }, |at| at + 2);
    let (Some(resource), name) = (parts.get(begin), parts.get(begin + 1)) else { return (404, Value::Null) };
    let is_there =
        |object: &Value| namespace.is_none_or(|namespace| object["metadata"]["namespace"] == *namespace);
    let of_kind = state.objects.iter().filter(|(of, _)| of == resource).map(|(_, object)| object);
    let mut found: Vec<&Value> = of_kind.filter(|object| is_there(object)).collect();
    if let Some(name) = name {
        let object = found.into_iter().find(|object| object["metadata"]["name"] == *name);
        let missing = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": "none"});
        return object.map_or((404, missing), |object| (200, object.clone()));
    }
    for (parameter, value) in parameters(target) {
        let Some((key, wanted)) = value.split_once('=') else { continue };
        match parameter.as_str() {
            "labelSelector" => found.retain(|object| object["metadata"]["labels"][key] == wanted),
            "fieldSelector" => {
                let pointer = format!("/{}", key.replace('.', "/"));
                found.retain(|object| object.pointer(&pointer).is_some_and(|value| value == wanted));
            }
            _ => {}
        }
    }
    let kind = match *resource {
        "pods" => "PodList",
        "nodes" => "NodeList",
        "daemonsets" => "DaemonSetList",
        "events" => "EventList",
        _ => "ClusterRoleBindingList",
    };
    (200, json!({"kind": kind, "metadata": {}, "items": found}))
}

#[expect(clippy::result_large_err, reason = "what the library wants to be called")]
fn exec(stream: TcpStream, target: &str, state: &State) {
    let protocol = |_: &Request, mut response: Response| {
        response
            .headers_mut()
            .insert("Sec-WebSocket-Protocol", "v4.channel.k8s.io".parse().expect("a header"));
        Ok(response)
    };
    let parts: Vec<&str> = target.split(['/', '?']).collect();
    let place =
        |of: &str| parts.iter().position(|part| *part == of).map(|at| parts[at + 1]).unwrap_or_default();
    let all = parameters(target);
    let those = |name: &str| {
        all.iter().filter(|(of, _)| of == name).map(|(_, value)| value.clone()).collect::<Vec<_>>()
    };
    let container = format!("{}/{}/{}", place("namespaces"), place("pods"), those("container").join(""));
    let call = Call { container, words: those("command").split_off(1) };
    state.calls.lock().expect("not poisoned").push(call.clone());
    let reply = (state.answer)(&call);
    let Ok(mut socket) = tungstenite::accept_hdr(stream, protocol) else { return };
    let mut send =
        |channel: u8, bytes: &[u8]| socket.send(Message::binary([&[channel], bytes].concat())).is_ok();
    match reply {
        Reply::Ended { stdout, stderr, code } => {
            let status = if code == 0 {
                json!({"metadata": {}, "status": "Success"})
            } else {
                json!({"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
                    "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]}})
            };
            let _ = send(1, &stdout) && send(2, &stderr) && send(3, status.to_string().as_bytes());
            let _ = socket.close(None);
            while socket.read().is_ok() {}
        }
        Reply::Endless(bytes) => {
            send(1, &bytes);
            while socket.read().is_ok() {}
        }
        Reply::Flood(bytes) => while send(1, &bytes) {},
    }
}
