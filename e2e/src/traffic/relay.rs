//! Making a server on the machine's loopback reachable in a namespace.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::Result;

use super::server::{Server, listener, push};
use test_support::netns::Namespace;

/// Takes connections to a port on any IPv4 address of a namespace to the same port of the machine's 127.0.0.1.
/// While nothing listens there, a connection is closed as soon as it is made.
#[derive(Debug)]
pub(crate) struct Relay {
    server: Server,
    connections: Arc<Mutex<Vec<Connection>>>,
}

#[derive(Debug)]
struct Connection {
    ends: [TcpStream; 2],
    threads: [JoinHandle<()>; 2],
}

impl Relay {
    /// A relay for a port.
    pub(crate) fn start(namespace: &Namespace, port: u16) -> Result<Self> {
        Self::between(namespace, port, port)
    }

    /// A relay for a port that has another number inside.
    pub(crate) fn between(namespace: &Namespace, inside: u16, port: u16) -> Result<Self> {
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, inside));
        let listener = namespace.enter(|| listener(address, false))??;
        let connections = Arc::new(Mutex::new(Vec::new()));
        let open = Arc::clone(&connections);
        // The handler's thread is one of the machine's namespace, and so is the connection it makes.
        let server = Server::start(address, listener.as_fd().try_clone_to_owned()?, move |_| {
            let (inside, _) = listener.accept()?;
            let outside = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
            let threads = [copying(&inside, &outside)?, copying(&outside, &inside)?];
            push(&open, Connection { ends: [inside, outside], threads });
            Ok(())
        })?;
        Ok(Self { server, connections })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.server.stop();
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        for Connection { ends, threads } in connections.drain(..) {
            for end in ends {
                let _ = end.shutdown(Shutdown::Both);
            }
            for thread in threads {
                let _ = thread.join();
            }
        }
    }
}

fn copying(from: &TcpStream, to: &TcpStream) -> io::Result<JoinHandle<()>> {
    let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
    Ok(thread::spawn(move || {
        // Either side may break the connection at any time; the other side learns of it by the shutdown.
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    }))
}
