//! One writer per network namespace.
//!
//! The lock is a flock(2) on the namespace's own file, so it is shared by everybody who works on this namespace and
//! by nobody else: no lock of the node. Helper programs inherit it (as their standard output, which they do not use);
//! when we are killed it is held until they are gone, so that nobody acts on a state they are about to change.

use nix::fcntl::{Flock, FlockArg};
use std::{fs::File, io, os::fd::OwnedFd, process::Stdio, thread, time::Duration};

/// How often a lock that is taken is tried again.
const RETRY: Duration = Duration::from_millis(2);

/// Held until dropped, and until every program started with [`NetnsLock::inherit`] has ended.
pub(crate) struct NetnsLock {
    lock: Flock<File>,
}

/// Why the namespace cannot be locked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// The namespace's file cannot be opened or locked.
    #[error("cannot lock the network namespace (/proc/thread-self/ns/net): {0}")]
    Failed(#[from] io::Error),
    /// Somebody else is at work and does not finish.
    #[error("another program has been changing this network namespace for {0:?}; it may hang")]
    Busy(Duration),
}

impl NetnsLock {
    /// Locks the calling thread's network namespace.
    pub(crate) fn take(patience: Duration) -> Result<Self, LockError> {
        let mut waited = Duration::ZERO;
        let mut file = File::open("/proc/thread-self/ns/net")?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self { lock }),
                Err((_, nix::Error::EWOULDBLOCK)) if waited >= patience => {
                    return Err(LockError::Busy(patience));
                }
                Err((back, nix::Error::EWOULDBLOCK | nix::Error::EINTR)) => file = back,
                Err((_, errno)) => return Err(LockError::Failed(errno.into())),
            }
            thread::sleep(RETRY);
            // Not by the clock: while the machine stands still, nobody can finish.
            waited += RETRY;
        }
    }

    /// A standard stream for a helper program that keeps the lock while the program lives.
    pub(crate) fn inherit(&self) -> io::Result<Stdio> {
        self.lock.try_clone().map(OwnedFd::from).map(Stdio::from)
    }
}
