//! The server's side of the protocol: what to send to which ztunnel, and which pods are served.
//!
//! The server compares the pods that there should be with what it sent on each connection, and sends the next message that brings them
//! together. So a pod that is removed while its add waits is never added, and one that a lost ztunnel had goes to the one that is left.

mod connection;
mod retry;

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use core::time::Duration;

use crate::wire::{self, DecodeError, ZtunnelReply};
use crate::{NetnsInode, ZdsWorkload};
use connection::{Added, PodShare, ZtunnelConnection, ZtunnelRequest};
use retry::AddRetry;

pub use retry::LONGEST as LONGEST_RETRY;

/// How long ztunnel may take for its hello, and for each answer.
pub const DEADLINE: Duration = Duration::from_secs(5);
/// The most connections at once. A node has one ztunnel, and two during an upgrade.
pub const MOST_CONNECTIONS: usize = 16;
/// The most characters kept of an error of ztunnel.
const LONGEST_ERROR: usize = 256;

/// A connection, by a number that its owner never uses again. Of two, the larger was accepted later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// Which pods a ztunnel receives that connects while others serve pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Newcomer {
    /// All. ztunnel listens with SO_REUSEPORT, so both accept new connections of each pod, and either may end without the other.
    #[default]
    AllPods,
    /// Those that no other one serves, so it cannot harm the others.
    NewPods,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerInput<'a> {
    /// These are all pods, with their network namespaces where these are known. Before the first of it no ztunnel receives a snapshot:
    /// it would drop the pods that are missing there.
    Pods(Vec<(ZdsWorkload, Option<NetnsInode>)>),
    /// A pod is to be served in this network namespace.
    Add(ZdsWorkload, NetnsInode),
    /// A pod, by its UID, is not to be served any more.
    Remove(String),
    /// ztunnel connected.
    Accepted(ConnectionId),
    /// ztunnel sent a datagram.
    Received(ConnectionId, &'a [u8]),
    /// ztunnel is gone.
    Disconnected(ConnectionId),
    /// The network namespace of the message that was to be sent cannot be opened, so that the message was not sent.
    Unopened(ConnectionId, String),
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerAction {
    /// Send this datagram.
    Send {
        /// To whom.
        connection: ConnectionId,
        /// Its bytes.
        datagram: Vec<u8>,
        /// The pod, by UID and network namespace, whose namespace's descriptor goes with it.
        descriptor: Option<(String, NetnsInode)>,
    },
    /// Close this connection, of which nothing more is expected.
    Close {
        /// Which.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
    },
    /// The state of a pod changed.
    Report {
        /// The pod's UID.
        uid: String,
        /// The network namespace that the state is about.
        netns: Option<NetnsInode>,
        /// Its state.
        state: PodState,
    },
}

/// Whether ztunnel serves a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodState {
    /// The ztunnel that connected last acknowledged the pod, in its network namespace; with [`Newcomer::NewPods`] any that is connected.
    #[error("ztunnel acknowledged the pod")]
    Acknowledged,
    /// ztunnel's answer is due.
    #[error("ztunnel has not answered yet")]
    Waiting,
    /// No ztunnel is connected.
    #[error("no ztunnel is connected; start one on this node")]
    NoZtunnel,
    /// ztunnel refused it. The server tries again, at most every [`LONGEST_RETRY`].
    #[error("ztunnel refused the pod, and the agent retries: {0}")]
    Refused(String),
    /// The connection ended before ztunnel answered. The server tries again likewise, after it has sent the other pods.
    #[error("ztunnel's connection ended before it answered, and the agent retries after the other pods")]
    Unanswered,
    /// Its network namespace cannot be opened. The server tries again likewise.
    #[error("the pod's network namespace cannot be opened, and the agent retries: {0}")]
    Unopened(String),
    /// Its network namespace is unknown.
    #[error("the pod's network namespace is unknown")]
    NamespaceUnknown,
}

/// Why a connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// No hello came in time.
    #[error("ztunnel sent no hello within {} s", DEADLINE.as_secs())]
    NoHello,
    /// The hello has another version.
    #[error("ztunnel uses version {0} of the protocol, and this agent only {version}; update the agent", version = wire::VERSION)]
    Version(i32),
    /// No answer came in time.
    #[error("ztunnel did not answer {0} within {seconds} s", seconds = DEADLINE.as_secs())]
    NoAnswer(&'static str),
    /// A message cannot be decoded.
    #[error(transparent)]
    Malformed(DecodeError),
    /// A message came that answers nothing.
    #[error("ztunnel sent a message that answers no request")]
    Unasked,
    /// It refused the snapshot, so what it serves is unknown.
    #[error("ztunnel refused the snapshot: {0}")]
    SnapshotRefused(String),
    /// More connections than a node needs.
    #[error("{MOST_CONNECTIONS} ztunnels are connected already")]
    TooMany,
}

/// The server: pods, connections, and what was sent on them. Times are those of any clock that only advances.
#[derive(Debug, Default)]
pub struct Server {
    newcomer: Newcomer,
    pods: BTreeMap<String, Pod>,
    /// The pods are known.
    is_complete: bool,
    connections: BTreeMap<ConnectionId, ZtunnelConnection>,
    /// How many hellos were received.
    hellos: u64,
}

/// A pod that is to be served.
#[derive(Debug)]
struct Pod {
    workload: ZdsWorkload,
    netns: Option<NetnsInode>,
    /// How its last add failed, on whichever connection.
    failed: Option<AddRetry>,
    reported: Option<(Option<NetnsInode>, PodState)>,
}

impl Server {
    /// A server without pods and connections.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with this choice.
    #[must_use]
    pub fn with(self, newcomer: Newcomer) -> Self {
        Self { newcomer, ..self }
    }

    /// Takes what happened, at this time, and returns what to do, in this order.
    #[must_use]
    pub fn handle(&mut self, now: Duration, input: ServerInput<'_>) -> Vec<ServerAction> {
        let mut outputs = Vec::new();
        match input {
            ServerInput::Pods(pods) => self.replace_pods(pods),
            ServerInput::Add(workload, netns) => self.want(workload, Some(netns)),
            ServerInput::Remove(uid) => drop(self.pods.remove(&uid)),
            ServerInput::Accepted(id) => self.accept(id, now, &mut outputs),
            ServerInput::Received(id, datagram) => self.receive(id, datagram, now, &mut outputs),
            ServerInput::Disconnected(id) => self.forget(id, now),
            ServerInput::Unopened(id, error) => self.unopened(id, &error, now),
            ServerInput::Tick => {}
        }
        self.expire(now, &mut outputs);
        self.send(now, &mut outputs);
        self.report(&mut outputs);
        outputs
    }

    /// When [`ServerInput::Tick`] is due, if nothing else happens before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        let newest = self.newest();
        let due = |(id, connection): (&ConnectionId, &ZtunnelConnection)| {
            let next_add = || connection.next_add(&self.pods, self.part(*id, newest)).map(|(_, due)| due);
            connection.deadline().or_else(next_add)
        };
        self.connections.iter().filter_map(due).min()
    }

    /// How many ztunnels are connected and have sent a hello.
    #[must_use]
    pub fn ztunnels(&self) -> usize {
        self.connections.values().filter(|connection| connection.hello().is_some()).count()
    }

    /// The ztunnel whose hello came last.
    fn newest(&self) -> Option<ConnectionId> {
        let greeted = self.connections.iter().filter_map(|(id, connection)| Some((connection.hello()?, *id)));
        greeted.max().map(|(_, id)| id)
    }

    fn replace_pods(&mut self, pods: Vec<(ZdsWorkload, Option<NetnsInode>)>) {
        self.pods.retain(|uid, _| pods.iter().any(|(workload, _)| workload.uid() == uid));
        for (workload, netns) in pods {
            self.want(workload, netns);
        }
        self.is_complete = true;
    }

    fn want(&mut self, workload: ZdsWorkload, netns: Option<NetnsInode>) {
        let uid = workload.uid().to_string();
        let before = self.pods.remove(&uid);
        let failed = before.as_ref().filter(|pod| pod.netns == netns).and_then(|pod| pod.failed.clone());
        let reported = before.and_then(|pod| pod.reported);
        self.pods.insert(uid, Pod { workload, netns, failed, reported });
    }

    fn accept(&mut self, id: ConnectionId, now: Duration, outputs: &mut Vec<ServerAction>) {
        if self.connections.len() < MOST_CONNECTIONS {
            self.connections.entry(id).or_insert_with(|| ZtunnelConnection::new(now));
        } else {
            outputs.push(ServerAction::Close { connection: id, reason: CloseReason::TooMany });
        }
    }

    fn receive(&mut self, id: ConnectionId, datagram: &[u8], now: Duration, outputs: &mut Vec<ServerAction>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let received = if connection.hello().is_some() {
            connection.answered(datagram)
        } else {
            self.hellos += 1;
            connection.greeted(datagram, self.hellos).map(|()| None)
        };
        match received {
            Ok(Some(Added { uid, netns, answer: ZtunnelReply::Nack(error) })) => {
                self.failed(&uid, netns, PodState::Refused(shortened(&error)), now);
            }
            Ok(Some(Added { uid, answer: ZtunnelReply::Ack, .. })) => {
                if let Some(pod) = self.pods.get_mut(&uid) {
                    pod.failed = None;
                }
            }
            Ok(None) => {}
            Err(reason) => self.close(id, reason, now, outputs),
        }
    }

    fn unopened(&mut self, id: ConnectionId, error: &str, now: Duration) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some((uid, netns)) = connection.take_back_add() else { return };
        self.failed(&uid, netns, PodState::Unopened(shortened(error)), now);
    }

    /// An add of this pod failed. The pod may have moved on.
    fn failed(&mut self, uid: &str, netns: NetnsInode, state: PodState, now: Duration) {
        if let Some(pod) = self.pods.get_mut(uid).filter(|pod| pod.netns == Some(netns)) {
            pod.failed = Some(AddRetry::after(pod.failed.as_ref(), state, now));
        }
    }

    /// A connection has ended, perhaps because of the pod that it was about.
    fn forget(&mut self, id: ConnectionId, now: Duration) {
        let unanswered = self.connections.remove(&id).and_then(ZtunnelConnection::unanswered);
        if let Some((uid, netns)) = unanswered {
            self.failed(&uid, netns, PodState::Unanswered, now);
        }
    }

    fn close(
        &mut self,
        id: ConnectionId,
        reason: CloseReason,
        now: Duration,
        outputs: &mut Vec<ServerAction>,
    ) {
        self.forget(id, now);
        outputs.push(ServerAction::Close { connection: id, reason });
    }

    fn expire(&mut self, now: Duration, outputs: &mut Vec<ServerAction>) {
        let is_late =
            |connection: &ZtunnelConnection| connection.deadline().is_some_and(|deadline| deadline <= now);
        let late = self.connections.iter().filter(|(_, connection)| is_late(connection));
        let late: Vec<_> = late.map(|(id, connection)| (*id, connection.lateness())).collect();
        for (id, reason) in late {
            self.close(id, reason, now, outputs);
        }
    }

    /// Sends what is next on each connection that waits for nothing.
    fn send(&mut self, now: Duration, outputs: &mut Vec<ServerAction>) {
        if !self.is_complete {
            return;
        }
        let newest = self.newest();
        let ids: Vec<_> = self.connections.keys().copied().collect();
        for id in ids {
            let part = self.part(id, newest);
            let next =
                self.connections.get(&id).and_then(|connection| connection.next(&self.pods, part, now));
            let Some((request, datagram)) =
                next.and_then(|next| encode(&next, &self.pods).map(|datagram| (next, datagram)))
            else {
                continue;
            };
            let descriptor = request.descriptor();
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.sent(request, now);
            }
            outputs.push(ServerAction::Send { connection: id, datagram, descriptor });
        }
    }

    /// Which pods this connection is to receive.
    fn part(&self, id: ConnectionId, newest: Option<ConnectionId>) -> PodShare<'_> {
        let shared_by = (self.newcomer == Newcomer::NewPods).then_some(&self.connections);
        PodShare { is_newest: newest == Some(id), shared_by }
    }

    fn report(&mut self, outputs: &mut Vec<ServerAction>) {
        let newest = self.newest();
        let counts = |id: &ConnectionId| self.newcomer == Newcomer::NewPods || newest == Some(*id);
        let counted: Vec<_> =
            self.connections.iter().filter(|(id, _)| counts(id)).map(|(_, connection)| connection).collect();
        for (uid, pod) in &mut self.pods {
            let state = state(uid, pod, newest.map(|_| counted.as_slice()));
            let news = Some((pod.netns, state.clone()));
            if pod.reported != news {
                pod.reported = news;
                outputs.push(ServerAction::Report { uid: uid.clone(), netns: pod.netns, state });
            }
        }
    }
}

/// A request's bytes; none for an add of a pod that is gone.
fn encode(request: &ZtunnelRequest, pods: &BTreeMap<String, Pod>) -> Option<Vec<u8>> {
    Some(match request {
        ZtunnelRequest::Add(uid, _) => pods.get(uid)?.workload.add(),
        ZtunnelRequest::Keep(uid) => wire::keep(uid),
        ZtunnelRequest::Del(uid) => wire::del(uid),
        ZtunnelRequest::SnapshotSent => wire::snapshot_sent(),
    })
}

/// The pod's state, from those connections that count, if ztunnel has connected.
fn state(uid: &str, pod: &Pod, counted: Option<&[&ZtunnelConnection]>) -> PodState {
    let Some(netns) = pod.netns else { return PodState::NamespaceUnknown };
    let Some(counted) = counted else { return PodState::NoZtunnel };
    match &pod.failed {
        _ if counted.iter().any(|connection| connection.has_acknowledged(uid, netns)) => {
            PodState::Acknowledged
        }
        Some(failed) => failed.state.clone(),
        None => PodState::Waiting,
    }
}

/// The beginning of an error's text, on one line that steers no terminal.
fn shortened(error: &str) -> String {
    let is_harmful =
        |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}');
    error.chars().take(LONGEST_ERROR).map(|c| if is_harmful(c) { ' ' } else { c }).collect()
}
