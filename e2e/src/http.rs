//! HTTP/1.1 as far as stand-ins for servers need it.

use std::io::{ErrorKind, Read, Result};

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
