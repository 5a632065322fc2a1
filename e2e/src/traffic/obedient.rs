//! A server that ends its connections on its clients' command.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};

use super::server::{Server, listener, push};
use test_support::netns::Namespace;

/// What an [`Obedient`] server says first.
pub const GREETING: &str = "obedient\n";

/// A TCP server that greets, on a socket as TPROXY needs it, and then does what the first byte it gets says:
/// `r` resets the connection, `c` closes it. Anything else comes back with all that follows until the client has finished;
/// then it closes after `f`, and else leaves the connection half open.
#[derive(Debug)]
pub struct Obedient {
    server: Server,
    connections: Arc<Mutex<Vec<Connection>>>,
    half_open: Arc<Mutex<Vec<Arc<TcpStream>>>>,
}

#[derive(Debug)]
struct Connection {
    /// Only the thread holds the socket: what it closes is closed.
    stream: Weak<TcpStream>,
    thread: JoinHandle<()>,
}

impl Obedient {
    /// A server in a namespace.
    pub fn start(namespace: &Namespace, address: impl Into<SocketAddr>) -> Result<Self> {
        let address = address.into();
        let listener = namespace
            .enter(|| listener(address, true))?
            .with_context(|| format!("cannot listen on {address}"))?;
        let (connections, half_open) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let (open, waiting) = (Arc::clone(&connections), Arc::clone(&half_open));
        let server = Server::start(address, listener.as_fd().try_clone_to_owned()?, move |_| {
            let served = Arc::new(listener.accept()?.0);
            let (stream, waiting) = (Arc::downgrade(&served), Arc::clone(&waiting));
            let thread = thread::spawn(move || {
                // The client may break the connection at any time.
                if let Ok(true) = obey(&served) {
                    push(&waiting, served);
                }
            });
            push(&open, Connection { stream, thread });
            Ok(())
        })?;
        Ok(Self { server, connections, half_open })
    }
}

/// Whether the connection stays half open.
fn obey(mut stream: &TcpStream) -> io::Result<bool> {
    stream.write_all(GREETING.as_bytes())?;
    let mut first = [0];
    stream.peek(&mut first)?;
    match first[0] {
        // What is not read makes a reset of the end.
        b'r' => Ok(false),
        b'c' => stream.read(&mut first).map(|_| false),
        _ => {
            let mut buffer = [0; 65_536];
            loop {
                match stream.read(&mut buffer)? {
                    0 => return Ok(first[0] != b'f'),
                    length => stream.write_all(&buffer[..length])?,
                }
            }
        }
    }
}

impl Drop for Obedient {
    fn drop(&mut self) {
        self.server.stop();
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        for Connection { stream, thread } in connections.drain(..) {
            if let Some(stream) = stream.upgrade() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            let _ = thread.join();
        }
        self.half_open.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
