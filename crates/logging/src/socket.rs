//! Lines for the node agent, sent in one request over its unix socket.

use crate::{LogEntry, Sink};
use agent_socket::AgentRequest;
use serde_json::Value;
use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// The socket's name in the run directory.
pub const SOCKET_NAME: &str = "log.sock";
/// How long the agent may take: the start of a pod waits for it. What was written by then arrives all the same.
const PATIENCE: Duration = Duration::from_millis(50);
/// How many lines a process keeps for the agent at most; later ones are dropped.
const MOST_LINES: usize = 1000;

/// Keeps JSON lines and sends them on [`Sink::flush`]: `POST /log` with a JSON array of strings, each one line.
#[derive(Debug)]
pub struct AgentSocket {
    path: PathBuf,
    lines: Mutex<Vec<String>>,
}

impl AgentSocket {
    /// For the socket of this path; none where no such file, because then nothing listens.
    #[must_use]
    pub fn find(path: PathBuf) -> Option<Self> {
        path.exists().then(|| Self { path, lines: Mutex::default() })
    }
}

impl Sink for AgentSocket {
    fn write(&self, entry: &LogEntry) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() < MOST_LINES {
            lines.push(entry.json());
        }
    }

    fn flush(&self) {
        let lines = std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        if !lines.is_empty() {
            let body = Value::from(lines).to_string();
            let request = AgentRequest { method: "POST", path: "/log", body: body.as_bytes() };
            // Waits for the answer, so that the agent has the lines before the process ends. Lines that do not arrive went to the other sinks.
            let _ = request.send(&self.path, PATIENCE, |_status| 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;
    use std::{
        io::{self, BufRead, Read, Write},
        os::unix::net::UnixListener,
        sync::mpsc,
        thread,
        time::SystemTime,
    };

    fn entry(message: &str) -> LogEntry {
        LogEntry {
            time: SystemTime::now(),
            level: Level::Info,
            scope: None,
            caller: None,
            message: message.to_owned(),
            labels: Vec::new(),
        }
    }

    #[test]
    fn all_lines_arrive_in_one_request() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SOCKET_NAME);
        assert!(AgentSocket::find(path.clone()).is_none());
        let listener = UnixListener::bind(&path).unwrap();
        let agent = thread::spawn(move || {
            let mut reader = io::BufReader::new(listener.accept().unwrap().0);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                reader.read_line(&mut head).unwrap();
            }
            let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
            let mut body = vec![0; length.parse().unwrap()];
            reader.read_exact(&mut body).unwrap();
            reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            (head, body)
        });
        let socket = AgentSocket::find(path).unwrap();
        for message in ["one", "two\n"] {
            socket.write(&entry(message));
        }
        socket.flush();
        socket.flush();
        let (head, body) = agent.join().unwrap();
        assert!(head.starts_with("POST /log HTTP/1.0\r\n"), "{head}");
        let lines: Vec<String> = serde_json::from_slice(&body).unwrap();
        let messages: Vec<String> =
            lines.iter().map(|line| LogEntry::from_json(line).unwrap().message).collect();
        assert_eq!(messages, ["one", "two\n"]);
    }

    #[test]
    fn an_agent_that_hangs_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SOCKET_NAME);
        let _listener = UnixListener::bind(&path).unwrap();
        let socket = AgentSocket::find(path).unwrap();
        socket.write(&entry("lost"));
        let (done, wait) = mpsc::channel();
        thread::spawn(move || {
            socket.flush();
            let _ = done.send(());
        });
        // The caller would wait for ever; a busy machine does not take minutes.
        assert_eq!(wait.recv_timeout(Duration::from_secs(240)), Ok(()));
    }

    /// A pod's start waits for it. The machine may stand still for a second, but not each time.
    #[test]
    fn an_agent_that_hangs_costs_a_fraction_of_a_second() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SOCKET_NAME);
        let _listener = UnixListener::bind(&path).unwrap();
        let waits = (0..20).map(|_| {
            let socket = AgentSocket::find(path.clone()).unwrap();
            socket.write(&entry("lost"));
            let start = std::time::Instant::now();
            socket.flush();
            start.elapsed()
        });
        let shortest = waits.min().unwrap();
        assert!(shortest < Duration::from_millis(500), "{shortest:?}");
    }

    #[test]
    fn an_agent_that_is_gone_is_no_problem() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SOCKET_NAME);
        drop(UnixListener::bind(&path).unwrap());
        let socket = AgentSocket::find(path).unwrap();
        socket.write(&entry("lost"));
        socket.flush();
    }
}
