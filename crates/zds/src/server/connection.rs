//! One connection: how far it is, what was sent on it, what ztunnel answered, and what comes next.

use alloc::collections::BTreeMap;
use alloc::string::String;
use core::time::Duration;

use super::{CloseReason, ConnectionId, DEADLINE, Pod, shortened};
use crate::NetnsInode;
use crate::wire::{self, ZtunnelReply};

/// A connection to a ztunnel.
#[derive(Debug)]
pub struct ZtunnelConnection {
    phase: Phase,
    in_flight: Option<InFlight>,
    announced: BTreeMap<String, Announced>,
}

/// What was sent and is not answered.
#[derive(Debug)]
struct InFlight {
    request: ZtunnelRequest,
    /// When the answer is due.
    deadline: Duration,
    /// What ztunnel had received of the pod before.
    before: Option<Announced>,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// Its hello is due at this time.
    Hello(Duration),
    /// It receives the snapshot. Its hello was the one with this number.
    Snapshot(u64),
    /// It receives changes.
    Changes(u64),
}

/// A message to ztunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ZtunnelRequest {
    /// A pod, by UID, and its network namespace.
    Add(String, NetnsInode),
    /// A pod that exists.
    Keep(String),
    /// A pod to drop.
    Del(String),
    /// The end of the snapshot.
    SnapshotSent,
}

/// What ztunnel received of a pod.
#[derive(Debug, Clone)]
struct Announced {
    /// The network namespace that it received; none after a keep, so what it has is unknown.
    netns: Option<NetnsInode>,
    /// What it answered last to that.
    answer: Option<AddAnswer>,
}

/// How ztunnel answered an add.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AddAnswer {
    /// It serves the pod.
    Acknowledged,
    /// It does not. It keeps the pod in a queue, and reports that it is not ready, until a del takes the pod out.
    Refused,
}

/// Which pods a connection is to receive.
#[derive(Debug, Clone, Copy)]
pub struct PodShare<'a> {
    /// It is that of the newest ztunnel.
    pub is_newest: bool,
    /// All connections, if each pod is for one of them.
    pub shared_by: Option<&'a BTreeMap<ConnectionId, ZtunnelConnection>>,
}

impl PodShare<'_> {
    /// Whether the pod is another one's.
    fn is_elsewhere(&self, uid: &str, netns: NetnsInode) -> bool {
        self.shared_by.is_some_and(|all| all.values().any(|connection| connection.may_serve(uid, netns)))
    }
}

/// What became of an add.
#[derive(Debug)]
pub struct Added {
    /// The pod, by UID.
    pub uid: String,
    /// The network namespace that ztunnel received.
    pub netns: NetnsInode,
    /// What ztunnel answered.
    pub answer: ZtunnelReply,
}

impl ZtunnelConnection {
    /// One that was accepted at this time.
    pub const fn new(now: Duration) -> Self {
        Self {
            phase: Phase::Hello(now.saturating_add(DEADLINE)),
            in_flight: None,
            announced: BTreeMap::new(),
        }
    }

    /// The number of its hello, if that came.
    pub const fn hello(&self) -> Option<u64> {
        match self.phase {
            Phase::Hello(_) => None,
            Phase::Snapshot(number) | Phase::Changes(number) => Some(number),
        }
    }

    /// When ztunnel must have sent what is due.
    pub fn deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Hello(deadline) => Some(deadline),
            Phase::Snapshot(_) | Phase::Changes(_) => self.in_flight.as_ref().map(|sent| sent.deadline),
        }
    }

    /// What is due, in words.
    pub fn lateness(&self) -> CloseReason {
        match &self.in_flight {
            None => CloseReason::NoHello,
            Some(sent) => CloseReason::NoAnswer(sent.request.name()),
        }
    }

    /// Whether ztunnel acknowledged this pod in this network namespace.
    pub fn has_acknowledged(&self, uid: &str, netns: NetnsInode) -> bool {
        let serves = |announced: &Announced| {
            announced.netns == Some(netns) && announced.answer == Some(AddAnswer::Acknowledged)
        };
        self.announced.get(uid).is_some_and(serves)
    }

    /// Whether ztunnel acknowledged this pod in this network namespace, or may do so.
    pub fn may_serve(&self, uid: &str, netns: NetnsInode) -> bool {
        let may_serve = |announced: &Announced| {
            announced.netns == Some(netns) && announced.answer != Some(AddAnswer::Refused)
        };
        self.announced.get(uid).is_some_and(may_serve)
    }

    /// The pod, by UID and network namespace, whose add ztunnel has not answered.
    pub fn unanswered(self) -> Option<(String, NetnsInode)> {
        self.in_flight?.request.descriptor()
    }

    /// Takes the first datagram.
    pub fn greeted(&mut self, datagram: &[u8], number: u64) -> Result<(), CloseReason> {
        match wire::hello(datagram).map_err(CloseReason::Malformed)? {
            wire::VERSION => {
                self.phase = Phase::Snapshot(number);
                Ok(())
            }
            version => Err(CloseReason::Version(version)),
        }
    }

    /// Takes any later datagram, and returns what became of the pod if that was the answer to an add.
    pub fn answered(&mut self, datagram: &[u8]) -> Result<Option<Added>, CloseReason> {
        let answer = wire::answer(datagram).map_err(CloseReason::Malformed)?;
        match (self.in_flight.take().ok_or(CloseReason::Unasked)?.request, answer) {
            (ZtunnelRequest::Add(uid, netns), answer) => {
                let settled = match answer {
                    ZtunnelReply::Ack => AddAnswer::Acknowledged,
                    ZtunnelReply::Nack(_) => AddAnswer::Refused,
                };
                let announced = Announced { netns: Some(netns), answer: Some(settled) };
                self.announced.insert(uid.clone(), announced);
                return Ok(Some(Added { uid, netns, answer }));
            }
            // ztunnel keeps what it has and drops what it can, so no answer changes what comes next.
            (ZtunnelRequest::Keep(uid), _) => {
                self.announced.insert(uid, Announced { netns: None, answer: None });
            }
            (ZtunnelRequest::Del(uid), _) => {
                self.announced.remove(&uid);
            }
            (ZtunnelRequest::SnapshotSent, ZtunnelReply::Nack(error)) => {
                return Err(CloseReason::SnapshotRefused(shortened(&error)));
            }
            (ZtunnelRequest::SnapshotSent, ZtunnelReply::Ack) => {
                if let Phase::Snapshot(number) = self.phase {
                    self.phase = Phase::Changes(number);
                }
            }
        }
        Ok(None)
    }

    /// Notes what was sent at this time.
    pub fn sent(&mut self, request: ZtunnelRequest, now: Duration) {
        let before = match &request {
            ZtunnelRequest::Add(uid, netns) => {
                // From now on ztunnel may have it.
                self.announced.insert(uid.clone(), Announced { netns: Some(*netns), answer: None })
            }
            ZtunnelRequest::Del(uid) => {
                // From now on ztunnel may have dropped it.
                self.announced
                    .get_mut(uid)
                    .map(|announced| Announced { answer: announced.answer.take(), ..announced.clone() })
            }
            ZtunnelRequest::Keep(_) | ZtunnelRequest::SnapshotSent => None,
        };
        self.in_flight = Some(InFlight { request, deadline: now.saturating_add(DEADLINE), before });
    }

    /// Forgets the add that is in flight, because it was not sent after all.
    pub fn take_back_add(&mut self) -> Option<(String, NetnsInode)> {
        let sent = self.in_flight.take_if(|sent| matches!(sent.request, ZtunnelRequest::Add(..)))?;
        let ZtunnelRequest::Add(uid, netns) = sent.request else { return None };
        match sent.before {
            Some(before) => self.announced.insert(uid.clone(), before),
            None => self.announced.remove(&uid),
        };
        Some((uid, netns))
    }

    /// What to send next, if nothing is in flight.
    pub fn next(
        &self,
        pods: &BTreeMap<String, Pod>,
        part: PodShare<'_>,
        now: Duration,
    ) -> Option<ZtunnelRequest> {
        if self.in_flight.is_some() {
            return None;
        }
        match self.phase {
            Phase::Hello(_) => None,
            Phase::Snapshot(_) => Some(self.next_of_snapshot(pods, part)),
            Phase::Changes(_) => self.next_del(pods).map(ZtunnelRequest::Del).or_else(|| {
                let (add, due) = self.next_add(pods, part)?;
                (due <= now).then_some(add)
            }),
        }
    }

    /// A pod that ztunnel has not received, or the end. A del in a snapshot is an error of the protocol, so changes come later.
    fn next_of_snapshot(&self, pods: &BTreeMap<String, Pod>, part: PodShare<'_>) -> ZtunnelRequest {
        let Some((uid, pod)) = pods.iter().find(|(uid, _)| !self.announced.contains_key(*uid)) else {
            return ZtunnelRequest::SnapshotSent;
        };
        // One of which an add failed before would fail the snapshot's end, or hold it up; its next add follows the end.
        // One of another ztunnel may be here, too, since an earlier agent.
        match pod.netns.filter(|netns| pod.failed.is_none() && !part.is_elsewhere(uid, *netns)) {
            Some(netns) => ZtunnelRequest::Add(uid.clone(), netns),
            None => ZtunnelRequest::Keep(uid.clone()),
        }
    }

    /// A pod that is not to be served any more, or not in the network namespace that ztunnel has; or one that waits in ztunnel's queue.
    fn next_del(&self, pods: &BTreeMap<String, Pod>) -> Option<String> {
        let is_over = |(uid, announced): &(&String, &Announced)| match pods.get(*uid) {
            None => true,
            Some(_) if announced.answer == Some(AddAnswer::Refused) => true,
            Some(pod) => {
                pod.netns.zip(announced.netns).is_some_and(|(wanted, announced)| wanted != announced)
            }
        };
        self.announced.iter().find(is_over).map(|(uid, _)| uid.clone())
    }

    /// The pod to be added first, and when. New pods are for the newest ztunnel; a keep is followed by its add on every connection, unless each pod is
    /// for one.
    pub fn next_add(
        &self,
        pods: &BTreeMap<String, Pod>,
        part: PodShare<'_>,
    ) -> Option<(ZtunnelRequest, Duration)> {
        if !matches!(self.phase, Phase::Changes(_)) {
            return None;
        }
        let due = |(uid, pod): (&String, &Pod)| {
            let (netns, announced) = (pod.netns?, self.announced.get(uid));
            let is_new = announced.is_none_or(|announced| announced.netns.is_some());
            if !part.is_newest && (is_new || part.shared_by.is_some()) {
                return None;
            }
            if self.has_acknowledged(uid, netns) || part.is_elsewhere(uid, netns) {
                return None;
            }
            let due = pod.failed.as_ref().map_or(Duration::ZERO, |retry| retry.due);
            Some((ZtunnelRequest::Add(uid.clone(), netns), due))
        };
        pods.iter().filter_map(due).min_by_key(|(_, due)| *due)
    }
}

impl ZtunnelRequest {
    /// The pod whose network namespace's descriptor goes with it.
    pub fn descriptor(&self) -> Option<(String, NetnsInode)> {
        match self {
            Self::Add(uid, netns) => Some((uid.clone(), *netns)),
            Self::Keep(_) | Self::Del(_) | Self::SnapshotSent => None,
        }
    }

    const fn name(&self) -> &'static str {
        match self {
            Self::Add(..) => "an added pod",
            Self::Keep(_) => "a kept pod",
            Self::Del(_) => "a removed pod",
            Self::SnapshotSent => "the snapshot",
        }
    }
}
