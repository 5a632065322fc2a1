//! One netlink socket for all its uses here: nf_tables, connection tracking, socket diagnosis and routing.
//!
//! The care that every question needs is taken here, once: numbers that distinguish an answer from a late one, interrupted
//! dumps, signals, a receive buffer that overflowed, and a time limit.

use netfilter_state::netlink::{AnswerEnd, Message, Messages};
use netlink_packet_core::{NlaBuffer, NlasIterator};
use netlink_sys::{Socket, SocketAddr};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{MsgFlags, setsockopt, sockopt},
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The kernel sends at most 32 KiB at once.
const RECEIVE_BUFFER: usize = 64 * 1024;
/// How many receive buffers are kept for later sockets. A drift watch opens three sockets for each pod, one after the other; for each buffer that it
/// allocates, the C library asks the kernel for memory, and returns it.
const MOST_SPARE: usize = 2;
/// Receive buffers of sockets that were closed.
static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
/// The kernel answers while it is being asked; this is for the case that it does not.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a message needs of the send buffer beyond its own size.
const SEND_OVERHEAD: usize = 64 * 1024;
/// The size a send buffer has anyway (net.core.wmem_default is at least that much).
const USUAL_SEND_BUFFER: usize = 128 * 1024;

/// A netlink socket of the network namespace it was opened in; it accepts messages only from the kernel.
#[derive(Debug)]
pub(crate) struct NetlinkSocket {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

/// How an answer to a question ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It is whole.
    Whole,
    /// What was asked for changed concurrently, or a part was lost: ask again.
    Interrupted,
    /// The kernel refused the question.
    Refused(AnswerEnd),
}

impl NetlinkSocket {
    /// Opens one for a protocol of netlink(7).
    pub(crate) fn open(protocol: isize) -> Result<Self, Errno> {
        let open = || -> io::Result<Socket> {
            let mut socket = Socket::new(protocol)?;
            socket.bind_auto()?;
            // From now on it accepts only the kernel's messages.
            socket.connect(&SocketAddr::new(0, 0))?;
            // Older kernels explain less, that is all.
            let _ = socket.set_ext_ack(true);
            let _ = socket.set_cap_ack(true);
            Ok(socket)
        };
        let socket = open().map_err(|cause| errno(&cause))?;
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let buffer = spare.unwrap_or_else(|| Vec::with_capacity(RECEIVE_BUFFER));
        Ok(Self { socket, sequence: 0, buffer })
    }

    /// A number that no earlier question had. Transactions number their messages from 1; questions use the upper half
    /// of the range.
    pub(crate) const fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1) | 1 << 31;
        self.sequence
    }

    /// Sends messages, as one datagram.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        if bytes.len().saturating_add(SEND_OVERHEAD) > USUAL_SEND_BUFFER {
            let size = bytes.len().saturating_add(SEND_OVERHEAD);
            // Without the right to exceed the limit the kernel says EMSGSIZE below.
            let _ = setsockopt(&self.socket, sockopt::SndBufForce, &size);
        }
        loop {
            match self.socket.send(bytes, 0).map_err(|cause| errno(&cause)) {
                Err(Errno::EINTR) => {}
                sent => return sent.map(drop),
            }
        }
    }

    /// The messages of the next datagram; `ETIMEDOUT` if none comes before the deadline.
    pub(crate) fn receive(&mut self, deadline: Instant) -> Result<Messages<'_>, Errno> {
        loop {
            match self.receive_at_once() {
                Err(Errno::EAGAIN) => self.wait(deadline)?,
                Ok(()) => return Ok(Messages::new(&self.buffer)),
                Err(cause) => return Err(cause),
            }
        }
    }

    /// The messages of a datagram that is there already.
    pub(crate) fn received(&mut self) -> Result<Option<Messages<'_>>, Errno> {
        match self.receive_at_once() {
            Ok(()) => Ok(Some(Messages::new(&self.buffer))),
            Err(Errno::EAGAIN) => Ok(None),
            Err(cause) => Err(cause),
        }
    }

    /// Asks for a list and hands over the messages of the answer; answers to earlier questions are passed over.
    ///
    /// `take` may stop the reading with an error.
    pub(crate) fn ask<E: From<Errno>>(
        &mut self,
        question: &[u8],
        sequence: u32,
        take: impl FnMut(&Message<'_>) -> Result<(), E>,
    ) -> Result<Ended, E> {
        self.send(question)?;
        let is_change = |answer: &AnswerEnd| [Errno::EINTR, Errno::EAGAIN].contains(&code(answer));
        let ended = self.answer(sequence, take)?;
        // What was being listed changed concurrently.
        Ok(if matches!(&ended, Ended::Refused(answer) if is_change(answer)) {
            Ended::Interrupted
        } else {
            ended
        })
    }

    /// Hands over the messages that answer what was sent under this number, up to the last.
    pub(crate) fn answer<E: From<Errno>>(
        &mut self,
        sequence: u32,
        mut take: impl FnMut(&Message<'_>) -> Result<(), E>,
    ) -> Result<Ended, E> {
        let deadline = Self::deadline();
        let mut interrupted = false;
        loop {
            let messages = match self.receive(deadline) {
                Ok(messages) => messages,
                // Messages were lost because they were not fetched fast enough; the end of the dump still comes.
                Err(Errno::ENOBUFS) => {
                    interrupted = true;
                    continue;
                }
                Err(cause) => return Err(cause.into()),
            };
            for message in messages.filter(|message| message.sequence == sequence) {
                interrupted |= message.is_interrupted();
                match message.answer() {
                    None => take(&message)?,
                    Some(AnswerEnd { code: 0, .. }) if interrupted => return Ok(Ended::Interrupted),
                    Some(AnswerEnd { code: 0, .. }) => return Ok(Ended::Whole),
                    Some(answer) => return Ok(Ended::Refused(answer)),
                }
            }
        }
    }

    /// Whether the kernel compares what it lists with all that a question says (`NETLINK_GET_STRICT_CHK`).
    pub(crate) fn only_what_is_asked_for(&self, strict: bool) -> io::Result<()> {
        self.socket.set_netlink_get_strict_chk(strict)
    }

    /// Until when to wait for the kernel.
    pub(crate) fn deadline() -> Instant {
        Instant::now() + PATIENCE
    }

    /// A second descriptor of the same socket.
    pub(crate) fn duplicate(&self) -> io::Result<std::os::fd::OwnedFd> {
        self.fd().try_clone_to_owned()
    }

    fn receive_at_once(&mut self) -> Result<(), Errno> {
        loop {
            self.buffer.clear();
            match self.socket.recv(&mut self.buffer, MsgFlags::MSG_DONTWAIT.bits()) {
                Ok(_) => return Ok(()),
                Err(cause) if errno(&cause) == Errno::EINTR => {}
                Err(cause) => return Err(errno(&cause)),
            }
        }
    }

    fn wait(&self, deadline: Instant) -> Result<(), Errno> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.fd(), PollFlags::POLLIN)], timeout) {
                Ok(0) if left.is_zero() => return Err(Errno::ETIMEDOUT),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(cause) => return Err(cause),
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for NetlinkSocket {
    fn drop(&mut self) {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < MOST_SPARE {
            spare.push(std::mem::take(&mut self.buffer));
        }
    }
}

/// A message of this type: netlink's own header (`nlmsghdr`), and behind it `payload`.
pub(crate) fn message(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    const HEADER: usize = 16;
    let length = u32::try_from(HEADER.saturating_add(payload.len())).unwrap_or_default();
    let (length, kind) = (length.to_ne_bytes(), kind.to_ne_bytes());
    [&length[..], &kind, &flags.to_ne_bytes(), &sequence.to_ne_bytes(), &[0; 4], payload].concat()
}

/// An attribute that holds a number.
pub(crate) fn number_attribute(kind: u16, number: u32) -> Vec<u8> {
    [&8_u16.to_ne_bytes()[..], &kind.to_ne_bytes(), &number.to_ne_bytes()].concat()
}

/// The attributes in these bytes. Bytes that are none end them.
pub(crate) fn attributes(bytes: &[u8]) -> impl Iterator<Item = NlaBuffer<&[u8]>> {
    NlasIterator::new(bytes).map_while(Result::ok)
}

/// The error number in an answer.
pub(crate) fn code(answer: &AnswerEnd) -> Errno {
    Errno::from_raw(answer.code.saturating_neg())
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or_default())
}
