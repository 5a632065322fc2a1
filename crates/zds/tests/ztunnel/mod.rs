//! A ztunnel as strict as the real one, in memory: what it has, and which messages it accepts when. It reads messages by itself.

use std::collections::{BTreeMap, BTreeSet};

use zds::NetnsInode;

/// Pods by UID, in their network namespaces.
pub type Served = BTreeMap<String, NetnsInode>;

/// One connection of a ztunnel.
#[derive(Debug, Default)]
pub struct Ztunnel {
    /// The pods that it serves.
    pub served: Served,
    /// Those that it failed to serve, and goes on trying by itself.
    pub pending: Served,
    /// What was in the snapshot.
    named: BTreeSet<String>,
    /// The snapshot is complete.
    pub has_snapshot: bool,
    /// What it received and has not answered.
    pub inbox: Option<(Message, Option<NetnsInode>)>,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    Add(String),
    Del(String),
    SnapshotSent,
    Keep(String),
}

impl Ztunnel {
    /// One that serves these pods of an earlier agent.
    pub fn with(served: Served) -> Self {
        Self { served, ..Self::default() }
    }

    /// Receives a datagram. Panics where the real one ends the connection.
    pub fn receive(&mut self, datagram: &[u8], descriptor: Option<NetnsInode>) {
        assert!(self.inbox.is_none(), "two messages at once");
        assert!(datagram.len() <= 1024, "{} bytes", datagram.len());
        let message = read(datagram);
        match (&message, descriptor) {
            (Message::Add(_), Some(_)) => {}
            (Message::Del(_), None) => assert!(self.has_snapshot, "a del in the snapshot"),
            (Message::Keep(_) | Message::SnapshotSent, None) => {
                assert!(!self.has_snapshot, "{message:?} after the snapshot");
            }
            wrong => panic!("a descriptor missing, or one too many: {wrong:?}"),
        }
        self.inbox = Some((message, descriptor));
    }

    /// Does what it received, and answers; `fails` is for adds.
    pub fn answer(&mut self, fails: bool) -> Option<Vec<u8>> {
        let (message, netns) = self.inbox.take()?;
        match message {
            Message::Add(uid) => {
                let netns = netns.expect("a descriptor");
                if !self.has_snapshot {
                    self.named.insert(uid.clone());
                }
                if self.served.get(&uid) == Some(&netns) {
                    return Some(vec![0x0a, 0]);
                }
                self.served.remove(&uid);
                if fails {
                    self.pending.insert(uid, netns);
                    return Some(b"\x0a\x07\x0a\x05a\xf0\x9f\x99\x82"[..].to_vec());
                }
                self.pending.remove(&uid);
                self.served.insert(uid, netns);
            }
            Message::Del(uid) => {
                self.served.remove(&uid);
                self.pending.remove(&uid);
            }
            Message::Keep(uid) => drop(self.named.insert(uid)),
            Message::SnapshotSent => {
                self.served.retain(|uid, _| self.named.contains(uid));
                self.has_snapshot = true;
            }
        }
        Some(vec![0x0a, 0])
    }

    /// Whether it was told of this pod, or does not need to be any more.
    pub fn knows(&self, uid: &str) -> bool {
        self.named.contains(uid)
    }
}

/// Reads a request: one field, which contains a message whose first field, if any, is the UID.
fn read(datagram: &[u8]) -> Message {
    let (field, content) = field(datagram);
    let uid = || {
        let (field, uid) = self::field(content);
        assert_eq!(field, 1, "the UID comes first: {datagram:?}");
        String::from_utf8(uid.to_vec()).expect("UTF-8")
    };
    match field {
        1 => Message::Add(uid()),
        2 => Message::Del(uid()),
        3 => Message::SnapshotSent,
        5 => Message::Keep(uid()),
        other => panic!("field {other}"),
    }
}

/// The first field, of less than 16 KiB.
fn field(bytes: &[u8]) -> (u8, &[u8]) {
    let [key, low, rest @ ..] = bytes else { panic!("too short: {bytes:?}") };
    assert_eq!(key & 7, 2, "not a field of bytes: {bytes:?}");
    let (length, rest) = match (low & 0x80, rest) {
        (0, rest) => (usize::from(*low), rest),
        (_, [high, rest @ ..]) => (usize::from(low & 0x7f) | usize::from(*high) << 7, rest),
        (_, []) => panic!("too short: {bytes:?}"),
    };
    (key >> 3, &rest[..length])
}
