//! One writer per network namespace.
//!
//! The lock is an nf_tables table that belongs to the socket that made it (`flags owner`). Making one needs
//! CAP_NET_ADMIN in the namespace, so no process of a pod without it can hold the lock. No other process can create the table
//! while it exists, and it disappears with the last descriptor of the socket, so the lock is gone when its holder dies.
//! Helper programs inherit the socket (as their standard output, which they do not use): if we are killed, the lock is
//! held until they are gone, and no process acts on a state that they are about to change.
//!
//! Kernels before 5.12 know no table owners, and some have no nf_tables. There the lock is a flock(2) on the
//! namespace's own file. Any process in the namespace can take that, so we wait for it only briefly.

use crate::{
    pause::{deadline, pause},
    socket::{NetlinkSocket, code},
};
use netfilter_state::netlink::Batch;
use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    process::Stdio,
    time::{Duration, Instant},
};

/// How long to wait before trying again for a lock that is taken.
const RETRY: Duration = Duration::from_millis(2);
/// How long to wait for the lock that any process in the namespace can hold.
const FILE_PATIENCE: Duration = Duration::from_secs(1);

/// Held until dropped, and until every program started with [`NetnsLock::inherit`] has ended.
pub(crate) enum NetnsLock {
    /// By a table that belongs to this socket.
    Table(NetlinkSocket),
    /// By the namespace's file.
    File(Flock<File>),
    /// A process holds the namespace's file for longer than any run takes.
    Without(File),
}

/// Why the namespace cannot be locked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// The kernel does not answer, or the namespace's file cannot be opened or locked.
    #[error("cannot lock the network namespace: {0}")]
    Failed(#[from] io::Error),
    /// A step that needs the lock was taken without it: a bug in this program.
    #[error("the network namespace is not locked; please report this")]
    NotHeld,
    /// CAP_NET_ADMIN is missing.
    #[error("cannot lock the network namespace: CAP_NET_ADMIN is missing")]
    NotPermitted,
    /// Another program is at work and does not finish.
    #[error("another program has locked this network namespace for {0:?}; it may be stuck")]
    Busy(Duration),
}

/// How an attempt to make the table ended.
enum Attempt {
    Held,
    Taken,
    /// This kernel has no tables with owners.
    Unsupported,
}

impl NetnsLock {
    /// Locks the calling thread's network namespace.
    pub(crate) fn take(patience: Duration) -> Result<Self, LockError> {
        let deadline = deadline(patience);
        let Ok(mut socket) = NetlinkSocket::open(NETLINK_NETFILTER) else { return Self::by_file(patience) };
        loop {
            match attempt(&mut socket)? {
                Attempt::Held => return Ok(Self::Table(socket)),
                Attempt::Unsupported => return Self::by_file(patience),
                Attempt::Taken if Instant::now() >= deadline => return Err(LockError::Busy(patience)),
                Attempt::Taken => pause(RETRY),
            }
        }
    }

    fn by_file(patience: Duration) -> Result<Self, LockError> {
        let deadline = deadline(patience.min(FILE_PATIENCE));
        let mut file = File::open("/proc/thread-self/ns/net")?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self::File(lock)),
                Err((back, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                    return Ok(Self::Without(back));
                }
                Err((back, Errno::EWOULDBLOCK | Errno::EINTR)) => file = back,
                Err((_, errno)) => return Err(LockError::Failed(errno.into())),
            }
            pause(RETRY);
        }
    }

    /// What an operator should know about how the lock is held.
    pub(crate) const fn warning(&self) -> Option<&'static str> {
        match self {
            Self::Table(_) | Self::File(_) => None,
            Self::Without(_) => Some(
                "a process in this network namespace keeps its file locked (flock on /proc/PID/ns/net); went on without the lock",
            ),
        }
    }

    /// A standard stream for a helper program; it keeps the lock held while the program runs.
    pub(crate) fn inherit(&self) -> io::Result<Stdio> {
        match self {
            Self::Table(socket) => socket.duplicate().map(Stdio::from),
            Self::File(lock) => lock.try_clone().map(OwnedFd::from).map(Stdio::from),
            Self::Without(file) => file.try_clone().map(OwnedFd::from).map(Stdio::from),
        }
    }
}

impl Drop for NetnsLock {
    /// The table would disappear with the socket anyway, but then the kernel waits for packets as it cleans up.
    fn drop(&mut self) {
        if let Self::Table(socket) = self
            && let Some(release) = Batch::release_lock(socket.next_sequence())
        {
            // When it cannot be sent, closing the socket does the same.
            let _ = socket.send(&release);
        }
    }
}

/// Tries to make the table. An error about the table itself is about the lock; one about the transaction is not.
fn attempt(socket: &mut NetlinkSocket) -> Result<Attempt, LockError> {
    let failed = |errno: Errno| LockError::Failed(errno.into());
    let sequence = socket.next_sequence();
    let table = socket.next_sequence();
    let Some(request) = Batch::take_lock(sequence, table) else { return Ok(Attempt::Unsupported) };
    socket.send(&request).map_err(failed)?;
    let deadline = NetlinkSocket::deadline();
    loop {
        let mut answers = socket.receive(deadline).map_err(failed)?.filter_map(|message| message.answer());
        let own = answers.find(|answer| [sequence, table].contains(&answer.sequence));
        let Some(answer) = own else { continue };
        return match (code(&answer), answer.sequence == table) {
            (errno, true) if errno as i32 == 0 => Ok(Attempt::Held),
            // For another program's table, the kernel may not even reveal that it exists.
            (Errno::EEXIST | Errno::EPERM, true) => Ok(Attempt::Taken),
            (Errno::EPERM, false) => Err(LockError::NotPermitted),
            // The generation moved while the transaction was being prepared, or the removal of a table is still in progress.
            (Errno::ERESTART | Errno::EAGAIN | Errno::EINTR | Errno::EBUSY, _) => Ok(Attempt::Taken),
            (Errno::EINVAL | Errno::EOPNOTSUPP, _) => Ok(Attempt::Unsupported),
            (errno, _) => Err(failed(errno)),
        };
    }
}
