//! Any bytes on a connection to one of the agent's servers: nothing, or answers in HTTP that can be printed; and the next client is served.
//!
//! The first byte says which server: health, metrics, run-time control or the log socket.

#![no_main]

use agent_runtime::{
    serve::{Acceptor, Handler, connections, handler},
    supervisor::Supervisor,
};
use install_cni::{
    cluster::{self, events::EventPublisher},
    install::{
        disk::Real,
        drop_in_reader::DropInReader,
        installer::Installer,
        plugin::{Ask, PluginQuestion, PluginRefusal},
        seen_calls::SeenCalls,
    },
    metrics::Metrics,
    parts::AgentParts,
    pods::drift::NodeSummary,
    serve::{log_socket::Receiver, server::AgentContext},
    settings::Settings,
};
use libfuzzer_sys::fuzz_target;
use logging::{Config, LogEntry};
use redirect_core_fuzz::text;
use settings_cli::ParsedArgs;
use std::{
    future::pending,
    io,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, Mutex},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    runtime::{Builder, Runtime},
    task::yield_now,
};

/// More than any input or answer.
const BUFFER: usize = 1 << 20;
/// How many turns a server has before its client ends.
const TURNS: usize = 32;
const HEALTHY: &[u8] = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

struct Agent {
    runtime: Runtime,
    served: Arc<AgentContext>,
    receiver: Arc<Receiver>,
}

static AGENT: LazyLock<Agent> = LazyLock::new(|| {
    let env = [
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
        ("KUBERNETES_SERVICE_PORT", "443"),
        ("MOUNTED_CNI_NET_DIR", "/nonexistent"),
    ];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let (settings, _) = Settings::read(&ParsedArgs::default(), &env).expect("settings");
    let (metrics, registry) = Metrics::new();
    let logs = logging::init(Config { targets: Vec::new(), ..Config::default() }).expect("logs");
    // Calls are kept when readiness is judged, and nothing judges it here.
    let calls = Arc::new(SeenCalls::new(Arc::new(Real), PathBuf::new()));
    let reader = Arc::new(DropInReader::new(Arc::new(Real), PathBuf::new(), PathBuf::new()));
    let emit = |entry: &LogEntry| text::is_one_safe_line(&entry.console().replace('\t', " "));
    let runtime = Builder::new_current_thread().enable_time().build().expect("a run-time");
    let (connection, tasks) = (Arc::new(cluster::connection(&settings)), Supervisor::default());
    let inside = runtime.enter();
    let events = EventPublisher::start("agent events", connection.clone(), metrics.clone(), &tasks);
    drop(inside);
    Agent {
        runtime,
        served: Arc::new(AgentContext {
            events,
            transitions: Mutex::default(),
            parts: AgentParts {
                connection,
                installer: Arc::new(Installer::new(Arc::new(Real), Arc::new(Nobody), settings)),
                handlers: Arc::default(),
                metrics: metrics.clone(),
            },
            plugin: Arc::default(),
            state: Arc::default(),
            summary: Arc::new(NodeSummary::new(metrics.clone())),
            held: Arc::default(),
            ambient: None,
            registry,
            logs: Some(logs),
            tasks,
        }),
        receiver: Arc::new(Receiver::new(metrics, (calls, reader, Arc::default()), Box::new(emit))),
    }
});

/// No plugin is ever run.
struct Nobody;

impl Ask for Nobody {
    fn ask(&self, path: &Path, _: PluginQuestion<'_>) -> Result<(), PluginRefusal> {
        Err(PluginRefusal::NoPlugin { path: path.to_owned(), why: "there is none".to_owned() })
    }
}

/// Connections that are there already, and none after them.
struct Once(Mutex<Vec<DuplexStream>>);

impl Acceptor for Once {
    type Stream = DuplexStream;

    async fn next(&self) -> io::Result<DuplexStream> {
        let stream = self.0.lock().expect("streams").pop();
        match stream {
            Some(stream) => Ok(stream),
            None => pending().await,
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((server, bytes)) = input.split_first() else { return };
    let Agent { runtime, served, receiver } = &*AGENT;
    let is_log_socket = server % 4 == 3;
    let answer = match server % 4 {
        0 => handler(served, AgentContext::health),
        1 => handler(served, AgentContext::metrics),
        2 => handler(served, AgentContext::control),
        _ => handler(receiver, Receiver::answer),
    };
    let [answer, next] = runtime.block_on(talk(answer, bytes));
    check(&answer);
    let next = check(&next).expect("the next client is answered");
    assert!(next == 200 || next == 404, "{next}");
    assert!(!is_log_socket || next == 404);
});

/// Says these bytes on one connection, asks for health on another, and gives what comes back on each.
async fn talk(answer: Handler, bytes: &[u8]) -> [Vec<u8>; 2] {
    let ((mut client, server), (mut next, next_server)) = (duplex(BUFFER), duplex(BUFFER));
    #[expect(clippy::disallowed_methods, reason = "it is ended below")]
    let serving = tokio::spawn(connections(Once(Mutex::new(vec![next_server, server])), answer));
    let answers = [said(&mut client, bytes).await, said(&mut next, HEALTHY).await];
    serving.abort();
    answers
}

async fn said(client: &mut DuplexStream, bytes: &[u8]) -> Vec<u8> {
    let mut answer = Vec::new();
    // A server may hang up on what it does not understand.
    let _ = client.write_all(&bytes[..bytes.len().min(BUFFER / 2)]).await;
    // A server that hears of the end before it has answered may leave the answer out; one that hears of none waits for seconds.
    for _ in 0..TURNS {
        yield_now().await;
    }
    let _ = client.shutdown().await;
    let _ = client.read_to_end(&mut answer).await;
    answer
}

/// The status of the first answer, if there is one. The interim answer to a client that waits before it sends a body (`expect: 100-continue`,
/// RFC 9110, 10.1.1) is none.
fn check(answer: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(answer).expect("answers are text");
    text::is_safe(&text.replace("\r\n", "\n"));
    let text = text.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap_or(text);
    if text.is_empty() {
        return None;
    }
    let status =
        text.strip_prefix("HTTP/1.1 ").or_else(|| text.strip_prefix("HTTP/1.0 ")).expect("an answer in HTTP");
    let status = status.get(..3).and_then(|status| status.parse().ok()).expect("a status");
    assert!(matches!(status, 200 | 400 | 404 | 405 | 408 | 413 | 414 | 431 | 503), "{text}");
    Some(status)
}
