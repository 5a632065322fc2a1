//! What is worth saying about settings that are not wrong: they do less, or more, than their author may think.

use super::{Misspelt, Source};
use alloc::string::String;
use core::net::IpAddr;

/// A container that runs as the proxy does: the rules exempt its traffic as well.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("container {container} runs as {what} {id}, as the proxy does")]
#[non_exhaustive]
pub struct IdentityCollision {
    /// The container's name.
    pub container: String,
    /// "user" or "group".
    pub what: &'static str,
    /// The user's or group's ID.
    pub id: u32,
}

/// Something about settings that an operator should know although nothing is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Notice {
    /// A setting has no effect.
    #[error("{said} has no effect: {because}")]
    NoEffect {
        /// Who said it.
        said: Source,
        /// Why.
        because: &'static str,
    },
    /// No DNS query is captured although that was asked for.
    #[error(
        "{said}: no DNS query is captured, because /etc/resolv.conf names no server; --capture-all-dns captures all of them"
    )]
    NoDnsServer {
        /// Who asked.
        said: Source,
    },
    /// The rules capture no packet.
    #[error(
        "nothing is captured: neither inbound ports (--istio-inbound-ports), outbound destinations (--istio-service-cidr) or ports (--istio-outbound-ports), nor DNS are asked for; for all TCP traffic write -b '*' -i '*'"
    )]
    NothingCaptured,
    /// The traffic of root, or of root's group, counts as the proxy's.
    #[error(
        "{said}: {what} 0 counts as the proxy's, so the traffic of every process that runs as root's {what} bypasses the proxy"
    )]
    RootIsTheProxy {
        /// Who said it.
        said: Source,
        /// "user" or "group".
        what: &'static str,
    },
    /// The network namespace has an address of IPv6, and the redirection has no rules for it.
    #[error(
        "the first address is one of IPv4, so traffic by IPv6 ({address}) is not captured; ISTIO_DUAL_STACK=true captures both"
    )]
    Ipv6NotCaptured {
        /// The first such address.
        address: IpAddr,
    },
    /// A name that resembles a setting's and is not one.
    #[error("{0}")]
    Misspelt(Misspelt),
    /// A variable of the proxy's container that should be a boolean.
    #[error(
        "variable {name} of container istio-proxy: {value:?} is not a boolean and counts as false; use true or false"
    )]
    UnreadableSwitch {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// A container runs as the proxy does.
    #[error("{0}, so its traffic bypasses the proxy; give it another runAsUser or runAsGroup")]
    RunsAsTheProxy(IdentityCollision),
}

impl Notice {
    /// Whether it holds for all pods of a cluster alike, so that a program that runs for each of them does not repeat it.
    #[must_use]
    pub const fn concerns_all_pods(&self) -> bool {
        matches!(self, Self::Ipv6NotCaptured { .. })
    }
}
