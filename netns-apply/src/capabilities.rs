//! What the calling thread may do (capabilities(7)).

use rustix::thread::{CapabilitySet, capabilities};

/// A capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    set: CapabilitySet,
    /// Its name, as manuals and container runtimes write it.
    pub name: &'static str,
}

impl Capability {
    /// Reading and changing rules, routes and addresses.
    pub const NET_ADMIN: Self = Self { set: CapabilitySet::NET_ADMIN, name: "CAP_NET_ADMIN" };
    /// What the legacy variant of iptables needs besides that: a raw socket.
    pub const NET_RAW: Self = Self { set: CapabilitySet::NET_RAW, name: "CAP_NET_RAW" };
    /// Entering a network namespace.
    pub const SYS_ADMIN: Self = Self { set: CapabilitySet::SYS_ADMIN, name: "CAP_SYS_ADMIN" };
    /// Inspecting other users' processes.
    pub const SYS_PTRACE: Self = Self { set: CapabilitySet::SYS_PTRACE, name: "CAP_SYS_PTRACE" };

    /// Whether the calling thread has it in its effective set; `None` where the kernel does not say.
    #[must_use]
    pub fn is_held(self) -> Option<bool> {
        Some(capabilities(None).ok()?.effective.contains(self.set))
    }
}
