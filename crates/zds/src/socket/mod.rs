//! Serving ztunnel at a socket file.
//!
//! One thread waits for connections, datagrams, orders and deadlines, passes them to the [`Server`], and does what that returns.
//! It keeps no descriptor of a network namespace, because an open one outlives its pod: each is opened for its message.

mod connections;
mod file;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::{ConnectionId, NetnsInode, Newcomer, PodState, Server, ServerAction, ServerInput, ZdsWorkload};
use connections::{Connections, Ready};
pub use file::{Place, SocketFile, SocketKind};

/// How often to check that the socket file is in its place.
const PLACE_CHECK: Duration = Duration::from_secs(5);

/// Opens the network namespace of the pod with this UID. It runs on the server's thread, and may block for milliseconds.
pub type NetnsOpener = Box<dyn Fn(&str, NetnsInode) -> io::Result<File> + Send>;
/// Receives what happens, on the server's thread.
pub type Observer = Box<dyn FnMut(SocketEvent) + Send>;

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SocketEvent {
    /// The state of a pod, by its UID, in this network namespace changed.
    Pod(String, Option<NetnsInode>, PodState),
    /// This many ztunnels are connected and have sent a hello.
    Ztunnels(usize),
    /// A connection ended, or could not begin; with the reason.
    Closed(String),
    /// The socket file was removed, or another agent that had it is gone: it is ours again.
    Restored,
    /// The socket cannot be served for now; with the reason.
    Failed(String),
}

/// Gives orders to a server, which ends with its last handle.
#[derive(Debug, Clone)]
pub struct ServerHandle {
    orders: Sender<ServerInput<'static>>,
    bell: Arc<Bell>,
}

/// Wakes the thread.
#[derive(Debug)]
struct Bell(OwnedFd);

impl Bell {
    fn ring(&self) {
        // The counter of an eventfd that is not read overflows after 2^64 rings; before that, no write fails.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl ServerHandle {
    /// All pods of the node, with their network namespaces where these are known. Until then no ztunnel receives anything.
    pub fn pods(&self, pods: Vec<(ZdsWorkload, Option<NetnsInode>)>) {
        self.order(ServerInput::Pods(pods));
    }

    /// A pod that is to be served in this network namespace.
    pub fn add(&self, workload: ZdsWorkload, netns: NetnsInode) {
        self.order(ServerInput::Add(workload, netns));
    }

    /// A pod, by its UID, that is not to be served any more.
    pub fn remove(&self, uid: String) {
        self.order(ServerInput::Remove(uid));
    }

    /// The thread ends before its handles only if it panics, and then its owner learns it by joining it.
    fn order(&self, order: ServerInput<'static>) {
        let _ = self.orders.send(order);
        self.bell.ring();
    }
}

/// Serves ztunnel at this path from now on, in place of an earlier agent, until the last handle is dropped. The file stays.
///
/// # Errors
/// Socket or thread cannot be made.
pub fn serve(
    path: &Path,
    newcomer: Newcomer,
    open: NetnsOpener,
    observe: Observer,
) -> io::Result<(ServerHandle, JoinHandle<()>)> {
    let (file, listener) = SocketFile::bind(path, SocketKind::Packets)?;
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let (ringing, heard) = (Bell(bell.try_clone()?), Bell(bell));
    let (orders, received) = mpsc::channel();
    let thread = Thread {
        server: Server::new().with(newcomer),
        file,
        listener,
        is_taken: false,
        bell: heard,
        orders: received,
        connections: Connections::default(),
        ztunnels: 0,
        begin: Instant::now(),
        open,
        observe,
    };
    let thread = thread::Builder::new().name("zds".to_owned()).spawn(move || thread.run())?;
    Ok((ServerHandle { orders, bell: Arc::new(ringing) }, thread))
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        // After each ring the thread checks whether a handle is left, so the sender goes first.
        let (closed, _) = mpsc::channel();
        drop(std::mem::replace(&mut self.orders, closed));
        self.bell.ring();
    }
}

/// The server's thread.
struct Thread {
    server: Server,
    file: SocketFile,
    listener: OwnedFd,
    /// Another agent's socket was seen in the file's place.
    is_taken: bool,
    bell: Bell,
    orders: Receiver<ServerInput<'static>>,
    connections: Connections,
    ztunnels: usize,
    begin: Instant,
    open: NetnsOpener,
    observe: Observer,
}

impl Thread {
    fn run(mut self) {
        let mut place_due = PLACE_CHECK;
        loop {
            let now = self.now();
            let due = self.server.next_deadline().map_or(place_due, |deadline| deadline.min(place_due));
            let ready = self.connections.wait(&self.listener, &self.bell.0, due.saturating_sub(now));
            for ready in ready.unwrap_or_else(|error| {
                (self.observe)(SocketEvent::Failed(format!("cannot wait for ztunnel: {error}")));
                thread::sleep(Duration::from_secs(1));
                Vec::new()
            }) {
                match ready {
                    Ready::Orders => {
                        if !self.follow_orders() {
                            return;
                        }
                    }
                    Ready::Connection => self.accept(),
                    Ready::Datagram(id) => self.receive(id),
                }
            }
            self.handle(ServerInput::Tick);
            if self.now() >= place_due {
                self.keep_in_place();
                place_due = self.now() + PLACE_CHECK;
            }
        }
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Whether more orders may come.
    fn follow_orders(&mut self) -> bool {
        self.bell.silence();
        loop {
            match self.orders.try_recv() {
                Ok(order) => self.handle(order),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn accept(&mut self) {
        match self.connections.accept(&self.listener, Instant::now()) {
            Ok(Some(id)) => self.handle(ServerInput::Accepted(id)),
            Ok(None) => {}
            Err(error) => (self.observe)(SocketEvent::Closed(error)),
        }
    }

    fn receive(&mut self, id: ConnectionId) {
        match self.connections.receive(id) {
            Ok(Some(datagram)) => self.handle(ServerInput::Received(id, &datagram)),
            Ok(None) => {}
            Err(why) => self.disconnected(id, why),
        }
    }

    fn disconnected(&mut self, id: ConnectionId, why: String) {
        self.connections.close(id);
        (self.observe)(SocketEvent::Closed(why));
        self.handle(ServerInput::Disconnected(id));
    }

    /// Passes this on, and does what the server returns, and what follows from that.
    fn handle(&mut self, input: ServerInput<'_>) {
        let mut outputs = VecDeque::from(self.server.handle(self.now(), input));
        while let Some(output) = outputs.pop_front() {
            match output {
                ServerAction::Report { uid, netns, state } => {
                    (self.observe)(SocketEvent::Pod(uid, netns, state));
                }
                ServerAction::Close { connection, reason } => {
                    self.connections.close(connection);
                    (self.observe)(SocketEvent::Closed(reason.to_string()));
                }
                ServerAction::Send { connection, datagram, descriptor } => {
                    if let Some(follows) = self.send(connection, &datagram, descriptor) {
                        outputs.extend(self.server.handle(self.now(), follows));
                    }
                }
            }
        }
        let ztunnels = self.server.ztunnels();
        if ztunnels != self.ztunnels {
            self.ztunnels = ztunnels;
            (self.observe)(SocketEvent::Ztunnels(ztunnels));
        }
    }

    /// Sends a datagram, and returns what the server has to know if that failed.
    fn send(
        &mut self,
        id: ConnectionId,
        datagram: &[u8],
        descriptor: Option<(String, NetnsInode)>,
    ) -> Option<ServerInput<'static>> {
        let netns = match descriptor.map(|(uid, netns)| self.open(&uid, netns)).transpose() {
            Ok(netns) => netns,
            Err(error) => return Some(ServerInput::Unopened(id, error.to_string())),
        };
        match self.connections.send(id, datagram, netns.as_ref()) {
            Ok(()) => None,
            Err(why) => {
                self.connections.close(id);
                (self.observe)(SocketEvent::Closed(why));
                Some(ServerInput::Disconnected(id))
            }
        }
    }

    /// Opens a network namespace, and makes sure that it is that one: another pod's would get a wrong identity.
    fn open(&self, uid: &str, netns: NetnsInode) -> io::Result<File> {
        let file = (self.open)(uid, netns)?;
        if file.metadata()?.ino() == netns.0 {
            Ok(file)
        } else {
            Err(io::Error::other("its path is now another network namespace"))
        }
    }

    /// A socket file that was removed is made again. One that another agent made is that agent's, for as long as that lives.
    fn keep_in_place(&mut self) {
        match self.file.place() {
            Place::Ours => self.is_taken = false,
            Place::Taken if self.is_taken => {}
            Place::Taken => {
                self.is_taken = true;
                let path = self.file.path.display();
                (self.observe)(SocketEvent::Failed(format!(
                    "{path} is another agent's now; ztunnel connects there"
                )));
            }
            Place::Missing | Place::Abandoned => match self.file.bind_again() {
                Ok(listener) => {
                    self.listener = listener;
                    self.is_taken = false;
                    (self.observe)(SocketEvent::Restored);
                }
                Err(error) => {
                    let path = self.file.path.display();
                    (self.observe)(SocketEvent::Failed(format!(
                        "{path} was removed or abandoned, and cannot be made again: {error}"
                    )));
                }
            },
        }
    }
}
