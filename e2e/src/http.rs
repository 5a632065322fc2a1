//! HTTP as far as stand-ins for servers need it, and reading a page.

use std::io::{Error, ErrorKind, Read, Result, Write as _};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::json;
use test_support::port;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpRequest {
    /// The request line and the fields, up to the empty line.
    pub head: String,
    /// As long as the head says; empty where it does not.
    pub body: Vec<u8>,
}

impl HttpRequest {
    /// Reads the next one from a connection, and nothing behind it. None if the connection ends before its head does.
    pub fn read(stream: &mut impl Read) -> Result<Option<Self>> {
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_exact(&mut byte) {
                Ok(()) => head.push(byte[0]),
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let length =
            head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        stream.read_exact(&mut body)?;
        Ok(Some(Self { head, body }))
    }

    /// Such as `GET`.
    pub fn method(&self) -> &str {
        self.head.split(' ').next().unwrap_or_default()
    }

    /// What is asked for, without the query.
    pub fn path(&self) -> &str {
        self.target().0
    }

    /// What stands behind the `?`.
    pub fn query(&self) -> &str {
        self.target().1
    }

    fn target(&self) -> (&str, &str) {
        let target = self.head.split(' ').nth(1).unwrap_or_default();
        target.split_once('?').unwrap_or((target, ""))
    }
}

/// The status and body of a page of a server without TLS that is never silent for longer than `patience`.
pub fn get(server: impl ToSocketAddrs, path: &str, patience: Duration) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(patience))?;
    // Of this version, the body ends with the connection.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    answered(&answer).ok_or_else(|| Error::new(ErrorKind::InvalidData, answer))
}

/// The status and body of a whole answer; none for other text.
pub fn answered(text: &str) -> Option<(u16, String)> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

/// A stand-in for a server, without TLS, and what it has and was asked. It answers for as long as the test process lives.
#[derive(Debug)]
pub struct StandIn<S> {
    /// Its port of loopback.
    pub port: u16,
    state: Arc<Mutex<S>>,
}

impl<S: Send + 'static> StandIn<S> {
    /// One that begins with this state, and answers with the status and the object that `respond` has. A watch is one on which nothing happens,
    /// whatever the answer.
    ///
    /// # Panics
    /// No port is free.
    pub fn of(state: S, respond: fn(&HttpRequest, &mut S) -> (u16, String)) -> Self {
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        let serve = move |mut stream: TcpStream| {
            let Some(request) = HttpRequest::read(&mut stream)? else { return Ok(()) };
            let (status, object) =
                respond(&request, &mut shared.lock().unwrap_or_else(PoisonError::into_inner));
            if request.head.contains("watch=true") {
                stream.write_all(WATCH.as_bytes())?;
                return stream.read(&mut [0]).map(drop);
            }
            stream.write_all(answer(status, CLOSE, &object).as_bytes())
        };
        Self { port: port::serve(serve).expect("a port"), state }
    }

    /// What it has and was asked. No request is answered while the caller holds it.
    pub fn state(&self) -> MutexGuard<'_, S> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The beginning of a watch of Kubernetes' API, which goes on until one side has enough.
pub const WATCH: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";

/// A field of an answer after which the server closes the connection.
pub const CLOSE: &str = "Connection: close\r\n";

/// An answer of JSON, with these fields beside those that every one has.
pub fn answer(status: u16, fields: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{fields}Content-Length: {length}\r\n\r\n{body}"
    )
}

/// The API server's answer that something failed.
pub fn failure(code: u16) -> String {
    let reason = match code {
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        _ => "InternalError",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "no",
        "reason": reason, "code": code});
    status.to_string()
}

/// The value of a metric in a text of metrics, by its name with labels.
pub fn metric(text: &str, name: &str) -> Option<f64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_one_by_one() -> Result<()> {
        let mut stream = &b"POST /a/b?c=d HTTP/1.1\r\nContent-Length: 3\r\n\r\nxyzGET /e HTTP/1.1\r\nhost: f\r\n\r\nGET /g"[..];
        let first = HttpRequest::read(&mut stream)?.expect("a request");
        assert_eq!(
            (first.method(), first.path(), first.query(), &*first.body),
            ("POST", "/a/b", "c=d", &b"xyz"[..])
        );
        let second = HttpRequest::read(&mut stream)?.expect("a request");
        assert_eq!((second.method(), second.path(), second.query(), second.body.len()), ("GET", "/e", "", 0));
        assert_eq!(HttpRequest::read(&mut stream)?, None);
        Ok(())
    }
}
