//! The errors of the operating system, in a type of this crate.

use nix::errno::Errno;

/// What the kernel answered to a request that it refused (errno(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SystemError(pub(crate) Errno);

impl SystemError {
    /// Its number, such as 1 for EPERM.
    #[must_use]
    pub const fn number(self) -> i32 {
        self.0 as i32
    }
}
