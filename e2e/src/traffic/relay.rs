//! Making a server on the machine's loopback reachable in a namespace, or the other way round.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::Result;

use super::server::{Connection, Server, listener, push};
use test_support::netns::{Namespace, enter};

/// Takes connections from a port of one namespace to a port of another. While nothing listens there, a connection is closed as soon as it is made.
#[derive(Debug)]
pub struct Relay(Server);

impl Relay {
    /// From a port on any IPv4 address of a namespace to the same port of the machine's 127.0.0.1.
    pub(crate) fn start(namespace: &Namespace, port: u16) -> Result<Self> {
        Self::between(namespace, port, port)
    }

    /// The same for a port that has another number inside.
    pub(crate) fn between(namespace: &Namespace, inside: u16, port: u16) -> Result<Self> {
        let listener = namespace.enter(|| listener((Ipv4Addr::UNSPECIFIED, inside).into(), false))??;
        // The handler's thread is one of the machine's namespace, and so is the connection it makes.
        Self::of(listener, move || TcpStream::connect((Ipv4Addr::LOCALHOST, port)))
    }

    /// From a free port of the machine's 127.0.0.1 to a port of a namespace's.
    pub fn into_namespace(namespace: &Namespace, port: u16) -> Result<Self> {
        let path = namespace.path();
        Self::of(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, move || {
            enter(&path, || TcpStream::connect((Ipv4Addr::LOCALHOST, port))).map_err(io::Error::other)?
        })
    }

    fn of(
        listener: TcpListener,
        connect: impl Fn() -> io::Result<TcpStream> + Send + 'static,
    ) -> Result<Self> {
        let (address, socket) = (listener.local_addr()?, listener.as_fd().try_clone_to_owned()?);
        let server = Server::start(address, socket, move |seen| {
            let ends = [listener.accept()?.0, connect()?].map(Arc::new);
            let [here, there] = &ends;
            let threads = vec![copying(here, there), copying(there, here)];
            let ends = ends.iter().map(Arc::downgrade).collect();
            push(&seen.connections, Connection { ends, threads });
            Ok(())
        })?;
        Ok(Self(server))
    }

    /// Where it takes connections.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }
}

fn copying(from: &Arc<TcpStream>, to: &Arc<TcpStream>) -> JoinHandle<Option<Arc<TcpStream>>> {
    let (from, to) = (Arc::clone(from), Arc::clone(to));
    thread::spawn(move || {
        // Either side may break the connection at any time; the other side learns of it by the shutdown.
        let _ = io::copy(&mut &*from, &mut &*to);
        let _ = to.shutdown(Shutdown::Write);
        None
    })
}
