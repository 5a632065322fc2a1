//! Connections that stay.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use test_support::netns::Namespace;

/// A connection to a [`TcpServer`](super::TcpServer), which has greeted and sends back what it gets.
#[derive(Debug)]
pub struct Stream(BufReader<TcpStream>);

impl Stream {
    /// From a namespace.
    pub fn open(from: &Namespace, target: SocketAddr, patience: Duration) -> io::Result<Self> {
        from.enter(|| Self::connect(target, patience)).map_err(io::Error::other)?
    }

    /// From the calling thread's network namespace. Neither the connection nor an answer may take longer than `patience`.
    pub fn connect(target: SocketAddr, patience: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&target, patience)?;
        stream.set_read_timeout(Some(patience))?;
        let mut stream = Self(BufReader::new(stream));
        stream.line()?;
        Ok(stream)
    }

    /// Says a line, and waits until it comes back.
    pub fn echo(&mut self, line: &str) -> io::Result<()> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes())?;
        let echo = self.line()?;
        if echo.trim_end() != line {
            return Err(io::Error::other(format!("{echo:?} came back")));
        }
        Ok(())
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line)
    }
}
