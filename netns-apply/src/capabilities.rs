//! What the calling thread may do (capabilities(7)).

use std::fs;

/// A capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    bit: u32,
    /// Its name, as manuals and container runtimes write it.
    pub name: &'static str,
}

/// Reading and changing rules, routes and addresses.
pub const NET_ADMIN: Capability = Capability { bit: 12, name: "CAP_NET_ADMIN" };
/// What the legacy variant of iptables needs besides that: a raw socket.
pub const NET_RAW: Capability = Capability { bit: 13, name: "CAP_NET_RAW" };
/// Entering a network namespace.
pub const SYS_ADMIN: Capability = Capability { bit: 21, name: "CAP_SYS_ADMIN" };

/// Inspecting other users' processes.
pub const SYS_PTRACE: Capability = Capability { bit: 19, name: "CAP_SYS_PTRACE" };

/// Whether the calling thread has a capability in its effective set; `None` where /proc does not say.
#[must_use]
pub fn has(capability: Capability) -> Option<bool> {
    in_status(&fs::read_to_string("/proc/thread-self/status").ok()?, capability)
}

fn in_status(status: &str, capability: Capability) -> Option<bool> {
    let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let bits = u64::from_str_radix(bits.trim(), 16).ok()?;
    Some(bits >> capability.bit & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_set_counts() {
        let status = "CapPrm:\t000001ffffffffff\nCapEff:\t0000000000201000\nCapBnd:\t0000000000000000\n";
        assert_eq!((in_status(status, NET_ADMIN), in_status(status, SYS_ADMIN)), (Some(true), Some(true)));
        let none = status.replace("201000", "000000");
        assert_eq!((in_status(&none, NET_ADMIN), in_status("", SYS_ADMIN)), (Some(false), None));
    }
}
