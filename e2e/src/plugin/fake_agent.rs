//! A stand-in for the agent at the socket where the plugin asks it to enrol pods.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use serde_json::Value;

use super::RunDir;
use crate::http::HttpRequest;

/// What a stand-in for the agent does with each request.
#[derive(Clone)]
pub enum Does {
    /// Answers, byte for byte, and closes.
    Answers(String),
    /// Sends this, and keeps the connection open for longer than the plugin waits.
    Hangs(&'static str),
    /// Closes when it has read the request.
    Closes,
}

/// A stand-in for the agent at its socket.
pub struct FakeAgent(Arc<Mutex<Vec<(String, Value)>>>);

/// What a stand-in for the agent does.
#[derive(Clone)]
struct Plan {
    /// With each request for a pod.
    pods: Does,
    /// With each request to enrol one.
    events: Does,
}

impl FakeAgent {
    /// Starts one that enrols pods, and gives none.
    pub fn start(run_dir: &RunDir, does: Does) -> Result<Self> {
        Self::of_both(run_dir, http("404 Not Found", ""), does)
    }

    /// Starts one that gives pods, and enrols none.
    pub fn of_pods(run_dir: &RunDir, does: Does) -> Result<Self> {
        Self::of_both(run_dir, does, http("404 Not Found", ""))
    }

    /// Starts one that does the first for pods, and the second to enrol them.
    pub fn of_both(run_dir: &RunDir, pods: Does, events: Does) -> Result<Self> {
        let plan = Plan { pods, events };
        let path = run_dir.path().join("pluginevent.sock");
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(path)?;
        let events = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&events);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (kept, plan) = (Arc::clone(&kept), plan.clone());
                thread::spawn(move || serve(stream, &plan, &kept));
            }
        });
        Ok(Self(events))
    }

    /// Request lines and bodies since the last call, without those for pods that it does not give.
    pub fn take_events(&self) -> Vec<(String, Value)> {
        std::mem::take(&mut self.0.lock().expect("events"))
    }
}

fn serve(mut stream: UnixStream, plan: &Plan, events: &Mutex<Vec<(String, Value)>>) -> Result<()> {
    let Some(request) = HttpRequest::read(&mut stream)? else { return Ok(()) };
    let line = request.head.lines().next().unwrap_or_default().to_owned();
    let does = if line.contains(" /v1/pod ") { &plan.pods } else { &plan.events };
    if !matches!(does, Does::Answers(answer) if answer.starts_with("HTTP/1.1 404 ")) {
        events.lock().expect("events").push((line, serde_json::from_slice(&request.body)?));
    }
    match does {
        Does::Answers(answer) => stream.write_all(answer.as_bytes())?,
        Does::Hangs(beginning) => {
            stream.write_all(beginning.as_bytes())?;
            thread::sleep(Duration::from_secs(600));
        }
        Does::Closes => {}
    }
    Ok(())
}

/// An answer of HTTP.
pub fn http(status: &str, body: &str) -> Does {
    let length = body.len();
    Does::Answers(format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}"))
}

/// The answer that a pod is enrolled.
pub fn ok() -> Does {
    http("200 OK", "")
}
