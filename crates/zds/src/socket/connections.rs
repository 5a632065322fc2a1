//! The open connections: waiting for them, accepting, receiving, sending.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with, recv, sendmsg,
};

use crate::ConnectionId;
use crate::wire::LARGEST_RESPONSE;

/// The least time between two connections: one that ends at once and comes again must not keep the processor busy.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The time before the next try to accept one, after a failure.
const FAILURE_PAUSE: Duration = Duration::from_secs(5);

/// What can be done without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// Orders can be received.
    Orders,
    /// A connection can be accepted.
    Connection,
    /// A datagram can be received, or the end.
    Datagram(ConnectionId),
}

/// The open connections.
#[derive(Debug, Default)]
pub struct Connections {
    open: BTreeMap<ConnectionId, OwnedFd>,
    /// The number of the last one.
    count: u64,
    /// When the next one may be accepted.
    accept_at: Option<Instant>,
}

impl Connections {
    /// Waits at most this long.
    pub fn wait(&self, listener: &OwnedFd, bell: &OwnedFd, longest: Duration) -> io::Result<Vec<Ready>> {
        let pause = self.accept_at.map(|at| at.saturating_duration_since(Instant::now()));
        let pause = pause.filter(|pause| !pause.is_zero());
        let mut waiting = vec![Ready::Orders];
        let mut polled = vec![PollFd::new(bell, PollFlags::IN)];
        if pause.is_none() {
            waiting.push(Ready::Connection);
            polled.push(PollFd::new(listener, PollFlags::IN));
        }
        for (id, socket) in &self.open {
            waiting.push(Ready::Datagram(*id));
            polled.push(PollFd::new(socket, PollFlags::IN));
        }
        let longest = pause.map_or(longest, |pause| pause.min(longest));
        match poll(&mut polled, Timespec::try_from(longest).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |(ready, polled): (Ready, PollFd<'_>)| (!polled.revents().is_empty()).then_some(ready);
        Ok(waiting.into_iter().zip(polled).filter_map(is_ready).collect())
    }

    /// Accepts a connection of root or of this process's own user. All others are closed, even if the file's mode was changed.
    ///
    /// # Errors
    /// Why nothing was accepted.
    pub fn accept(&mut self, listener: &OwnedFd, now: Instant) -> Result<Option<ConnectionId>, String> {
        self.accept_at = Some(now + ACCEPT_PAUSE);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(listener, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
            Err(error) => {
                // No descriptor is left, or no memory: that takes time.
                self.accept_at = Some(now + FAILURE_PAUSE);
                return Err(format!("cannot accept ztunnel's connection: {error}"));
            }
        };
        // rustix fails where the peer has no process id here, as ztunnel has none in the agent's container.
        let peer = getsockopt(&socket, PeerCredentials)
            .map_err(|error| format!("cannot determine who connected: {error}"))?;
        if peer.uid() != 0 && peer.uid() != rustix::process::geteuid().as_raw() {
            return Err(format!(
                "refused a connection: the peer is neither root nor the agent's user, but user {}",
                peer.uid()
            ));
        }
        self.count += 1;
        let id = ConnectionId(self.count);
        self.open.insert(id, socket);
        Ok(Some(id))
    }

    /// Receives a datagram; none if none is there.
    ///
    /// # Errors
    /// The connection has ended, and why.
    pub fn receive(&self, id: ConnectionId) -> Result<Option<Vec<u8>>, String> {
        let Some(socket) = self.open.get(&id) else { return Ok(None) };
        // One byte more shows that a datagram is too long. Descriptors that come with it are not received.
        let mut buffer = vec![0; LARGEST_RESPONSE + 1];
        match recv(socket, buffer.as_mut_slice(), RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err("ztunnel disconnected".to_owned()),
            Ok((length, _)) => {
                buffer.truncate(length);
                Ok(Some(buffer))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(format!("ztunnel's connection failed: {error}")),
        }
    }

    /// Sends a datagram, with this descriptor. As ztunnel has answered all before, it never waits.
    ///
    /// # Errors
    /// The connection is of no use any more, and why.
    pub fn send(&self, id: ConnectionId, datagram: &[u8], descriptor: Option<&File>) -> Result<(), String> {
        let Some(socket) = self.open.get(&id) else { return Ok(()) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.map(|file| [file.as_fd()]);
        if let Some(descriptors) = &descriptors {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(socket, &[IoSlice::new(datagram)], &mut control, flags) {
            Ok(length) if length == datagram.len() => Ok(()),
            Ok(length) => Err(format!("only {length} of {} bytes were sent to ztunnel", datagram.len())),
            Err(error) => Err(format!("cannot send to ztunnel: {error}")),
        }
    }

    /// Closes a connection.
    pub fn close(&mut self, id: ConnectionId) {
        self.open.remove(&id);
    }
}
