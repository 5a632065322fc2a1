//! What is worth saying about settings that are not wrong: they do less, or more, than their author may think.

use super::Source;

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
}
