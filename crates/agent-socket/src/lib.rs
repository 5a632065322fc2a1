//! One request to the node agent over its unix socket, with a deadline and without an asynchronous runtime or a thread.
//!
//! In HTTP/1.0: an answer comes in one piece, and ends with its connection.

use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt::SendTimeout,
        },
        time::{TimeVal, TimeValLike},
    },
};
use std::{
    io::{self, ErrorKind, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    time::{Duration, Instant},
};

/// The longest status line with headers, in bytes.
const MOST_HEAD: usize = 16 << 10;
/// Most headers of an answer.
const MOST_HEADERS: usize = 64;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct AgentRequest<'a> {
    /// Such as `POST`.
    pub method: &'a str,
    /// The path of its URL.
    pub path: &'a str,
    /// A JSON document, or nothing.
    pub body: &'a [u8],
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentReply {
    /// The HTTP status.
    pub status: u16,
    /// What arrived of the body before the deadline, up to a little more than the limit.
    pub body: Vec<u8>,
}

/// Why no answer came.
#[derive(Debug, thiserror::Error)]
pub enum RequestFailure {
    /// Nothing listens at the socket.
    #[error("{0}")]
    Unreachable(io::Error),
    /// No status came in time.
    #[error("no response in time")]
    Silent,
    /// What listens does not speak HTTP, or ended the connection.
    #[error("{0}")]
    Garbled(String),
}

impl AgentRequest<'_> {
    /// Sends it to a socket, and waits for the answer at most this long. Of a body, `most` bytes for a status are waited for: a status alone may be
    /// enough.
    ///
    /// # Errors
    /// No status arrived.
    pub fn send(
        self,
        socket: &Path,
        patience: Duration,
        most: impl Fn(u16) -> usize,
    ) -> Result<AgentReply, RequestFailure> {
        let deadline = Instant::now() + patience;
        let mut stream = connected(socket, patience)?;
        let Self { method, path, body } = self;
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.0\r\nHost: unix\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(&[head.as_bytes(), body].concat()).map_err(|error| broken(&error))?;
        let mut answer = Vec::new();
        let (status, start) = loop {
            if let Some(head) = head_of(&answer)? {
                break head;
            }
            if receive(&mut stream, deadline, &mut answer)? == 0 {
                return Err(RequestFailure::Garbled("the connection ended before the answer".to_owned()));
            }
        };
        let end = start + most(status);
        while answer.len() < end && receive(&mut stream, deadline, &mut answer).is_ok_and(|count| count > 0) {
        }
        Ok(AgentReply { status, body: answer.split_off(start) })
    }
}

/// Connects before the time is over: where an agent is stopped and its queue full, the kernel would keep the caller waiting.
fn connected(path: &Path, patience: Duration) -> Result<UnixStream, RequestFailure> {
    // Zero would be for ever.
    let patience = i64::try_from(patience.as_micros()).unwrap_or(i64::MAX).max(1);
    let stream = || {
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&socket, SendTimeout, &TimeVal::microseconds(patience))?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(UnixStream::from(socket))
    };
    stream().map_err(|errno: Errno| {
        if errno == Errno::EAGAIN {
            RequestFailure::Silent
        } else {
            RequestFailure::Unreachable(errno.into())
        }
    })
}

/// Adds what has arrived, and says how much: nothing at the end.
fn receive(stream: &mut UnixStream, deadline: Instant, into: &mut Vec<u8>) -> Result<usize, RequestFailure> {
    let mut part = [0; 16 << 10];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RequestFailure::Silent);
        }
        match stream.set_read_timeout(Some(left)).and_then(|()| stream.read(&mut part)) {
            Ok(count) => {
                into.extend_from_slice(part.get(..count).unwrap_or_default());
                return Ok(count);
            }
            // This process was stopped, and goes on.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(broken(&error)),
        }
    }
}

fn broken(error: &io::Error) -> RequestFailure {
    let is_late = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    if is_late { RequestFailure::Silent } else { RequestFailure::Garbled(error.to_string()) }
}

/// The status of an answer, and where its body begins; nothing while its head is not whole.
fn head_of(bytes: &[u8]) -> Result<Option<(u16, usize)>, RequestFailure> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut head = httparse::Response::new(&mut headers);
    match head.parse(bytes) {
        Ok(httparse::Status::Complete(start)) => Ok(head.code.map(|code| (code, start))),
        Ok(httparse::Status::Partial) if bytes.len() < MOST_HEAD => Ok(None),
        Ok(httparse::Status::Partial) => {
            Err(RequestFailure::Garbled(format!("headers of more than {MOST_HEAD} bytes")))
        }
        Err(error) => Err(RequestFailure::Garbled(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{Backlog, bind, listen};
    use std::{os::fd::OwnedFd, os::unix::net::UnixListener, path::PathBuf, thread};
    use tempfile::TempDir;

    const LONG: Duration = Duration::from_secs(240);
    const SHORT: Duration = Duration::from_millis(100);

    /// Sends a request to a listener that answers this, and says what it was sent.
    fn ask(answer: &'static [u8], most: usize) -> (Result<AgentReply, RequestFailure>, Vec<u8>) {
        let (_folder, path) = somewhere();
        let listener = UnixListener::bind(&path).unwrap();
        let agent = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n[1]") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            // A caller that knows enough hangs up.
            let _ = stream.write_all(answer);
            request
        });
        let request = AgentRequest { method: "POST", path: "/x", body: b"[1]" };
        let answer = request.send(&path, LONG, |_status| most);
        (answer, agent.join().unwrap())
    }

    fn somewhere() -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        (folder, path)
    }

    #[test]
    fn an_answer_is_its_status_and_what_is_wanted_of_its_body() {
        let (answer, request) = ask(b"HTTP/1.0 200 OK\r\nA: b\r\n\r\nwhole", usize::MAX >> 1);
        assert_eq!(answer.unwrap(), AgentReply { status: 200, body: b"whole".to_vec() });
        let request = String::from_utf8(request).unwrap();
        assert!(request.starts_with("POST /x HTTP/1.0\r\n"), "{request}");
        assert!(request.contains("\r\nContent-Length: 3\r\n"), "{request}");
        let (answer, _) = ask(b"HTTP/1.1 503 No\r\n\r\n", 1000);
        assert_eq!(answer.unwrap(), AgentReply { status: 503, body: Vec::new() });
    }

    #[test]
    fn what_is_no_answer_is_told_from_silence() {
        for garbled in [&b"SSH-2.0-OpenSSH_9\r\n\r\n"[..], b"HTTP/1.1 2", b""] {
            let (answer, _) = ask(garbled, 0);
            assert!(matches!(answer, Err(RequestFailure::Garbled(_))), "{answer:?}");
        }
        let (answer, _) = ask(b"HTTP/1.1 200 OK\r\nA: ".repeat(MOST_HEAD).leak(), 0);
        assert!(matches!(answer, Err(RequestFailure::Garbled(_))), "{answer:?}");
        let (_folder, path) = somewhere();
        let request = AgentRequest { method: "GET", path: "/", body: &[] };
        let answer = request.send(&path, LONG, |_status| 0);
        assert!(matches!(answer, Err(RequestFailure::Unreachable(_))), "{answer:?}");
        let _listener = UnixListener::bind(&path).unwrap();
        let answer = request.send(&path, SHORT, |_status| 0);
        assert!(matches!(answer, Err(RequestFailure::Silent)), "{answer:?}");
    }

    /// An agent that is stopped while many pods start.
    #[test]
    fn a_queue_that_is_full_is_silence() {
        let (_folder, path) = somewhere();
        let new = || socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).unwrap();
        let address = UnixAddr::new(&path).unwrap();
        let listener = new();
        bind(listener.as_raw_fd(), &address).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let waiting: Vec<OwnedFd> = std::iter::repeat_with(new)
            .take_while(|caller| connect(caller.as_raw_fd(), &address) == Ok(()))
            .collect();
        assert!(!waiting.is_empty());
        let request = AgentRequest { method: "GET", path: "/", body: &[] };
        let answer = request.send(&path, SHORT, |_status| 0);
        assert!(matches!(answer, Err(RequestFailure::Silent)), "{answer:?}");
    }
}
