//! A stand-in for ztunnel as the agent sees it: a client of ZDS that is as strict as the real one. It reads messages by itself, and ends the
//! connection at what the real one would end it at.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::poll::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
};

use test_support::parallel::Worker;
use test_support::process::{Patience, SHORT};

pub mod stock;

/// An acknowledgement.
pub const ACK: &[u8] = &[0x0a, 0];
/// A refusal, with the text `no`.
pub const NACK: &[u8] = b"\x0a\x04\x0a\x02no";
/// The hello of version 1.
pub const HELLO: &[u8] = &[8, 1];
/// The most that ztunnel reads.
const LARGEST: usize = 1024;
/// The most descriptors that are received, to find surplus ones.
const MOST_DESCRIPTORS: usize = 4;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A pod, by UID.
    Add(String),
    /// A pod to drop.
    Del(String),
    /// The end of the snapshot.
    SnapshotSent,
    /// A pod that exists.
    Keep(String),
}

/// What one ztunnel knows on one connection.
#[derive(Debug, Default)]
pub struct State {
    /// The pods that it serves, by UID, with the inodes of their network namespaces.
    pub served: BTreeMap<String, u64>,
    /// Those that it failed to serve, and goes on trying by itself.
    pub pending: BTreeMap<String, u64>,
    /// What was in the snapshot.
    pub named: BTreeSet<String>,
    /// The snapshot is complete.
    pub has_snapshot: bool,
    /// What it received and has not answered.
    pub inbox: Option<(Message, Option<u64>)>,
}

impl State {
    /// That of a ztunnel that serves these pods of an earlier agent.
    pub fn serving(served: BTreeMap<String, u64>) -> Self {
        Self { served, ..Self::default() }
    }

    /// Receives a datagram, and the inodes of the network namespaces whose descriptors came with it. Fails where ztunnel ends the connection.
    pub fn receive(&mut self, datagram: &[u8], descriptors: &[u64]) -> Result<()> {
        ensure!(self.inbox.is_none(), "a message before the last one was answered");
        ensure!(datagram.len() <= LARGEST, "a truncated message");
        ensure!(descriptors.len() <= 1, "{} descriptors", descriptors.len());
        let (message, descriptor) = (Message::read(datagram)?, descriptors.first().copied());
        match (&message, descriptor) {
            (Message::Add(_), None) => bail!("an add without a descriptor"),
            (Message::Add(_), Some(_)) => {}
            (_, Some(_)) => bail!("a descriptor with {message:?}"),
            (Message::Del(_), None) => ensure!(self.has_snapshot, "a del in the snapshot"),
            (Message::Keep(_) | Message::SnapshotSent, None) => {
                ensure!(!self.has_snapshot, "{message:?} after the snapshot");
            }
        }
        self.inbox = Some((message, descriptor));
        Ok(())
    }

    /// Does what it received last, and returns its answer; `fails` is for adds.
    pub fn answer(&mut self, fails: bool) -> Option<&'static [u8]> {
        match self.inbox.take()? {
            (Message::Add(uid), netns) => {
                let netns = netns?;
                if !self.has_snapshot {
                    self.named.insert(uid.clone());
                }
                if self.served.get(&uid) == Some(&netns) {
                    return Some(ACK);
                }
                self.served.remove(&uid);
                if fails {
                    self.pending.insert(uid, netns);
                    return Some(NACK);
                }
                self.pending.remove(&uid);
                self.served.insert(uid, netns);
            }
            (Message::Del(uid), _) => {
                self.served.remove(&uid);
                self.pending.remove(&uid);
            }
            (Message::Keep(uid), _) => drop(self.named.insert(uid)),
            (Message::SnapshotSent, _) => {
                self.served.retain(|uid, _| self.named.contains(uid));
                self.has_snapshot = true;
            }
        }
        Some(ACK)
    }

    /// Whether it reports that it is ready: it has the snapshot, and no pod waits in it.
    pub fn is_ready(&self) -> bool {
        self.has_snapshot && self.pending.is_empty()
    }
}

impl Message {
    /// Reads a request: one field, which contains a message whose first field, if any, is the UID.
    fn read(datagram: &[u8]) -> Result<Self> {
        let (number, content) = field(datagram)?;
        let uid = |expected: u8| {
            let (number, uid) = field(content)?;
            ensure!(number == expected, "field {number} comes first, and the UID is field {expected}");
            Ok(String::from_utf8(uid.to_vec())?)
        };
        Ok(match number {
            1 => Self::Add(uid(1)?),
            2 => Self::Del(uid(2)?),
            3 => Self::SnapshotSent,
            5 => Self::Keep(uid(1)?),
            other => bail!("field {other} is not a request"),
        })
    }
}

/// The first field, of less than 16 KiB.
fn field(bytes: &[u8]) -> Result<(u8, &[u8])> {
    let [key, low, rest @ ..] = bytes else { bail!("{bytes:?} has no field") };
    ensure!(key & 7 == 2, "{bytes:?} is not a field of bytes");
    let (length, rest) = match (low & 0x80, rest) {
        (0, rest) => (usize::from(*low), rest),
        (_, [high, rest @ ..]) => (usize::from(low & 0x7f) | usize::from(*high) << 7, rest),
        (_, []) => bail!("{bytes:?} ends in a length"),
    };
    Ok((key >> 3, rest.get(..length).context("a field is longer than its message")?))
}

/// A connection of a ztunnel.
#[derive(Debug)]
pub struct Ztunnel {
    socket: OwnedFd,
    /// What it knows.
    pub state: State,
}

impl Ztunnel {
    /// Connects, and sends nothing yet.
    pub fn connect(path: &Path) -> Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)
            .with_context(|| format!("cannot connect to {}", path.display()))?;
        Ok(Self { socket, state: State::default() })
    }

    /// Connects and sends its hello.
    pub fn greet(path: &Path) -> Result<Self> {
        let ztunnel = Self::connect(path)?;
        ztunnel.send(HELLO)?;
        Ok(ztunnel)
    }

    /// One end of a connection without a server, and the other end.
    pub fn pair() -> Result<(Self, OwnedFd)> {
        let (socket, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self { socket, state: State::default() }, other))
    }

    /// Sends a datagram.
    pub fn send(&self, datagram: &[u8]) -> Result<()> {
        let flags = SendFlags::NOSIGNAL;
        sendmsg(&self.socket, &[IoSlice::new(datagram)], &mut SendAncillaryBuffer::default(), flags)?;
        Ok(())
    }

    /// Whether nothing comes for a moment.
    pub fn is_quiet(&self) -> bool {
        Patience::new(Duration::from_millis(20)).wait_for(&self.socket, PollFlags::POLLIN).is_err()
    }

    /// The next message, and not yet an answer to it; none if the agent closed the connection. Waits at most this long.
    pub fn receive(&mut self, longest: Duration) -> Result<Option<Message>> {
        let mut patience = Patience::new(longest);
        patience.wait_for(&self.socket, PollFlags::POLLIN).context("no message came")?;
        let mut buffer = [0; LARGEST];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut buffer)];
        let received = match recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            // The agent had not read the last answer when it closed the connection.
            Err(Errno::CONNRESET) => return Ok(None),
            received => received?,
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                for descriptor in received {
                    descriptors.push(File::from(descriptor).metadata()?.ino());
                }
            }
        }
        ensure!(!received.flags.contains(ReturnFlags::TRUNC), "a truncated message");
        ensure!(!received.flags.contains(ReturnFlags::CTRUNC), "too many descriptors");
        if received.bytes == 0 {
            return Ok(None);
        }
        self.state.receive(&buffer[..received.bytes], &descriptors)?;
        Ok(self.state.inbox.as_ref().map(|(message, _)| message.clone()))
    }

    /// Answers the last message; `fails` is for adds.
    pub fn answer(&mut self, fails: bool) -> Result<()> {
        let answer = self.state.answer(fails).context("nothing to answer")?;
        self.send(answer)
    }

    /// Receives the next message and acknowledges it; none if the agent closed the connection.
    pub fn obey(&mut self, longest: Duration) -> Result<Option<Message>> {
        self.answer_next(longest, |_| false)
    }

    /// Receives the next message and answers it, adds by whether they `fail`; none if the agent closed the connection.
    pub fn answer_next(
        &mut self,
        longest: Duration,
        fails: impl Fn(&Message) -> bool,
    ) -> Result<Option<Message>> {
        let message = self.receive(longest)?;
        let answered = message.as_ref().map_or(Ok(()), |message| self.answer(fails(message)));
        match answered {
            Ok(()) => Ok(message),
            // The agent ended before it could learn the answer.
            Err(error) if error.downcast_ref() == Some(&Errno::PIPE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Receives and acknowledges a snapshot to its end.
    pub fn obey_snapshot(&mut self, longest: Duration) -> Result<Vec<Message>> {
        let mut messages = Vec::new();
        while !self.state.has_snapshot {
            messages.push(self.obey(longest)?.context("the agent closed the connection in the snapshot")?);
        }
        Ok(messages)
    }
}

/// ztunnel, which obeys until it is dropped, and comes back when the agent does.
#[derive(Debug)]
pub struct Obedient {
    /// What it serves.
    served: Arc<Mutex<BTreeMap<String, u64>>>,
    /// The UIDs of pods whose adds it refuses.
    refused: Arc<Mutex<BTreeSet<String>>>,
    _obeying: Worker,
}

impl Obedient {
    /// Connects to this socket as soon as that is possible, and again.
    pub fn start(socket: PathBuf) -> Self {
        let served = Arc::new(Mutex::new(BTreeMap::new()));
        let refused = Arc::new(Mutex::new(BTreeSet::new()));
        let (shown, refuses) = (served.clone(), refused.clone());
        let is_refused = move |message: &Message| matches!(message, Message::Add(uid) if refuses.lock().expect("not poisoned").contains(uid));
        let obey = move |stopped: &AtomicBool| {
            let mut ztunnel: Option<Ztunnel> = None;
            while !stopped.load(Ordering::Relaxed) {
                let Some(connected) = &mut ztunnel else {
                    std::thread::sleep(Duration::from_millis(5));
                    ztunnel = Ztunnel::greet(&socket).ok();
                    // It keeps its pods until the new agent's snapshot is complete.
                    if let Some(ztunnel) = &mut ztunnel {
                        ztunnel.state.served.clone_from(&shown.lock().expect("not poisoned"));
                    }
                    continue;
                };
                if connected.is_quiet() {
                    continue;
                }
                match connected.answer_next(SHORT, &is_refused) {
                    Ok(message) => {
                        shown.lock().expect("not poisoned").clone_from(&connected.state.served);
                        if message.is_none() {
                            ztunnel = None;
                        }
                    }
                    Err(error) => panic!("ztunnel would end this connection: {error:#}"),
                }
            }
        };
        Self { served, refused, _obeying: Worker::start(obey) }
    }

    /// From now on it refuses adds of these pods, by UID, and of no others.
    pub fn refuse(&self, uids: &[&str]) {
        *self.refused.lock().expect("not poisoned") = uids.iter().map(|uid| (*uid).to_owned()).collect();
    }

    /// The pods that it serves, by UID, with the inodes of their network namespaces.
    pub fn served(&self) -> BTreeMap<String, u64> {
        self.served.lock().expect("not poisoned").clone()
    }
}
