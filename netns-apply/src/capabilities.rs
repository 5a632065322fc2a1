//! What the calling thread may do (capabilities(7)).

use std::fs;

/// A capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    bit: u32,
    /// Its name, as manuals and container runtimes write it.
    pub name: &'static str,
}

impl Capability {
    /// Reading and changing rules, routes and addresses.
    pub const NET_ADMIN: Self = Self { bit: 12, name: "CAP_NET_ADMIN" };
    /// What the legacy variant of iptables needs besides that: a raw socket.
    pub const NET_RAW: Self = Self { bit: 13, name: "CAP_NET_RAW" };
    /// Entering a network namespace.
    pub const SYS_ADMIN: Self = Self { bit: 21, name: "CAP_SYS_ADMIN" };
    /// Inspecting other users' processes.
    pub const SYS_PTRACE: Self = Self { bit: 19, name: "CAP_SYS_PTRACE" };

    /// Whether the calling thread has it in its effective set; `None` where /proc does not say.
    #[must_use]
    pub fn is_held(self) -> Option<bool> {
        self.is_in(&fs::read_to_string("/proc/thread-self/status").ok()?)
    }

    fn is_in(self, status: &str) -> Option<bool> {
        let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        let bits = u64::from_str_radix(bits.trim(), 16).ok()?;
        Some(bits >> self.bit & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_set_counts() {
        let status = "CapPrm:\t000001ffffffffff\nCapEff:\t0000000000201000\nCapBnd:\t0000000000000000\n";
        let (admin, entering) = (Capability::NET_ADMIN, Capability::SYS_ADMIN);
        assert_eq!((admin.is_in(status), entering.is_in(status)), (Some(true), Some(true)));
        let none = status.replace("201000", "000000");
        assert_eq!((admin.is_in(&none), entering.is_in("")), (Some(false), None));
    }
}
