//! The parts of a redirection.

use crate::values::{Cidrs, Family, Mark, Port, PortRange, RouteTable, is_routable};
use alloc::vec::Vec;
use core::net::IpAddr;

/// The families a redirection has rules for. IPv4 always has some, as in the reference: a pod may get an IPv4 address
/// late, and without rules it would bypass the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Families {
    /// IPv4 only.
    V4,
    /// IPv4 and IPv6.
    Both,
}

impl Families {
    /// Those of a network namespace with these addresses: with `dual_stack`, IPv6 whenever one of them is IPv6;
    /// without, only when the first address is one. Loopback and link-local addresses, and the one that an earlier run
    /// gave the loopback interface, do not count. `None` without another.
    ///
    /// ```
    /// use redirect_core::Families;
    ///
    /// let addresses = ["127.0.0.1", "10.1.0.2", "fd00::2"].map(|text| text.parse().unwrap());
    /// assert_eq!(Families::of(&addresses, true), Some(Families::Both));
    /// assert_eq!(Families::of(&addresses, false), Some(Families::V4));
    /// assert_eq!(Families::of(&addresses[..1], true), None);
    /// ```
    #[must_use]
    pub fn of(addresses: &[IpAddr], dual_stack: bool) -> Option<Self> {
        let mut usable = addresses.iter().filter(|address| is_routable(address)).peekable();
        let first = usable.peek()?;
        let has_v6 = first.is_ipv6() || dual_stack && usable.any(IpAddr::is_ipv6);
        Some(if has_v6 { Self::Both } else { Self::V4 })
    }

    /// The families, in the order in which they are programmed.
    #[must_use]
    pub const fn list(self) -> &'static [Family] {
        match self {
            Self::V4 => &[Family::V4],
            Self::Both => &Family::BOTH,
        }
    }

    /// The families, one after the other.
    pub fn iter(self) -> impl Iterator<Item = Family> {
        self.list().iter().copied()
    }

    /// Whether a family is among them.
    #[must_use]
    pub const fn contains(self, family: Family) -> bool {
        match family {
            Family::V4 => true,
            Family::V6 => matches!(self, Self::Both),
        }
    }
}

/// How inbound connections reach the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "mode", rename_all = "UPPERCASE"))]
#[non_exhaustive]
pub enum InterceptionMode {
    /// By rewriting their destination (nat table).
    Redirect,
    /// By handing them to the proxy as they are (mangle table, policy routing).
    Tproxy(Tproxy),
}

impl InterceptionMode {
    /// The word for it in settings and logs.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Redirect => "REDIRECT",
            Self::Tproxy(_) => "TPROXY",
        }
    }
}

/// What TPROXY mode needs besides rules: the mark of inbound packets, and the routing table that delivers marked packets
/// locally. By default 1337 and 133.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Tproxy {
    mark: Mark,
    table: RouteTable,
}

impl Tproxy {
    /// With this mark and this routing table. A [`Redirect`](crate::Redirect) refuses the mark of the proxy's own
    /// packets ([`Mark::PROXY`]) and, with strict capture, one that needs bits of [`MaskedMark::GUARD`](crate::values::MaskedMark::GUARD).
    #[must_use]
    pub const fn new(mark: Mark, table: RouteTable) -> Self {
        Self { mark, table }
    }

    /// The mark of inbound packets.
    #[must_use]
    pub const fn mark(self) -> Mark {
        self.mark
    }

    /// The routing table that delivers marked packets locally.
    #[must_use]
    pub const fn table(self) -> RouteTable {
        self.table
    }
}

impl Default for Tproxy {
    fn default() -> Self {
        Self { mark: Mark::known(1337), table: RouteTable::known(133) }
    }
}

/// Which inbound TCP ports are captured.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(tag = "capture", content = "ports", rename_all = "camelCase")
)]
pub enum InboundPorts {
    /// None.
    None,
    /// All but these, in this order.
    AllExcept(Vec<PortRange>),
    /// These, in this order.
    Only(Vec<PortRange>),
}

/// Which outbound destinations are captured.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(tag = "capture", content = "ranges", rename_all = "camelCase")
)]
#[non_exhaustive]
pub enum OutboundRanges {
    /// All.
    All,
    /// These; empty if unset.
    Only(Cidrs),
}

/// Whose outbound traffic is captured, by group id: 0 to 4294967294.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(tag = "capture", content = "groups", rename_all = "camelCase")
)]
#[non_exhaustive]
pub enum OwnerGroups {
    /// Every group but these.
    AllExcept(Vec<u32>),
    /// These groups, at most [`MOST`](Self::MOST); empty if unset.
    Only(Vec<u32>),
}

impl OwnerGroups {
    /// How many groups can be captured: each is one condition of the same rule.
    pub const MOST: usize = 64;
}

/// Which DNS queries are captured.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(tag = "capture", content = "servers", rename_all = "camelCase")
)]
pub enum DnsCapture {
    /// None.
    Off,
    /// Those to these servers; at least one, of either family.
    Servers(Vec<IpAddr>),
    /// All to port 53.
    All,
}

impl DnsCapture {
    /// The port the proxy answers DNS queries on, over UDP and TCP: 15053.
    pub const PORT: Port = Port::known(15053);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Redirect,
        settings::{Key, NamespaceFacts, RawSettings, Source},
    };

    #[test]
    fn a_mode_has_the_word_that_settings_have_for_it() {
        for (mode, word) in [
            (InterceptionMode::Redirect, "REDIRECT"),
            (InterceptionMode::Tproxy(Tproxy::default()), "TPROXY"),
        ] {
            assert_eq!(mode.word(), word);
            let mut raw = RawSettings::new();
            raw.set(Key::InterceptionMode, mode.word(), Source::Flag("m"));
            let addresses = ["10.1.0.2".parse().unwrap()];
            assert_eq!(Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().mode(), mode);
        }
    }

    #[test]
    fn families_contain_those_that_they_list() {
        for (families, has_v6) in [(Families::V4, false), (Families::Both, true)] {
            assert_eq!(Family::BOTH.map(|family| families.contains(family)), [true, has_v6]);
            assert!(families.iter().eq(Family::BOTH.into_iter().filter(|family| families.contains(*family))));
        }
    }
}
