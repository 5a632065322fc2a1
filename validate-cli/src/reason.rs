//! Why a pod is held back: a closed set of codes, each with what it means and what to do.

use std::fmt;

/// The outcome of a validation in one word. Codes are an interface: repair controllers and alerts match them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Everything that can be proven was.
    Redirected,
    /// A signal came first.
    Interrupted,
    /// No interface got an address.
    NoAddress,
    /// Something listens on the proxy's ports.
    PortsBusy,
    /// The rules take this user for another program: the proxy for the application, or the other way round.
    WrongOwner,
    /// Traffic is redirected to a port that is not the proxy's.
    WrongPort,
    /// The connection was redirected to a process that is not ours.
    Stranger,
    /// Nothing redirects traffic.
    NoRules,
    /// One of the pod's address families is redirected, the other is not.
    OneFamilyOnly,
    /// Something tracks or translates connections, but traffic bypasses the proxy all the same.
    RulesNotInEffect,
    /// Traffic is redirected, DNS queries are not.
    DnsNotCaptured,
    /// Traffic that must not be captured is redirected: it would loop.
    LoopbackCaptured,
    /// `::6` is missing on `lo`.
    NoPassthroughAddress,
    /// The proxy would not learn where a connection was meant to go.
    DestinationLost,
    /// TPROXY's rules do not take inbound connections.
    TproxyNotInEffect,
    /// TPROXY's policy rule or route is missing.
    NoPolicyRoute,
    /// Packets vanish.
    NoAnswer,
    /// The loopback interface does not work.
    LoopbackDown,
    /// This process may not have the sockets or ports it needs.
    OutOfResources,
    /// Nothing failed, but no redirection was seen either.
    NothingProven,
}

impl Reason {
    /// All of them, the one that explains the most first.
    pub const ALL: [Self; 20] = [
        Self::Redirected,
        Self::Interrupted,
        Self::NoAddress,
        Self::OutOfResources,
        Self::LoopbackDown,
        Self::PortsBusy,
        Self::WrongOwner,
        Self::WrongPort,
        Self::Stranger,
        Self::NoRules,
        Self::OneFamilyOnly,
        Self::RulesNotInEffect,
        Self::DnsNotCaptured,
        Self::LoopbackCaptured,
        Self::NoPassthroughAddress,
        Self::DestinationLost,
        Self::TproxyNotInEffect,
        Self::NoPolicyRoute,
        Self::NoAnswer,
        Self::NothingProven,
    ];

    /// Its code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Redirected => "redirected",
            Self::Interrupted => "interrupted",
            Self::NoAddress => "no-address",
            Self::PortsBusy => "ports-busy",
            Self::WrongOwner => "wrong-owner",
            Self::WrongPort => "wrong-port",
            Self::Stranger => "stranger",
            Self::NoRules => "no-rules",
            Self::OneFamilyOnly => "one-family-only",
            Self::RulesNotInEffect => "rules-not-in-effect",
            Self::DnsNotCaptured => "dns-not-captured",
            Self::LoopbackCaptured => "loopback-captured",
            Self::NoPassthroughAddress => "no-passthrough-address",
            Self::DestinationLost => "destination-lost",
            Self::TproxyNotInEffect => "tproxy-not-in-effect",
            Self::NoPolicyRoute => "no-policy-route",
            Self::NoAnswer => "no-answer",
            Self::LoopbackDown => "loopback-down",
            Self::OutOfResources => "out-of-resources",
            Self::NothingProven => "nothing-proven",
        }
    }

    /// What it means, in a sentence without its end.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Redirected => {
                "every path that can be proven from inside the pod is redirected to the proxy"
            }
            Self::Interrupted => "a signal ended the validation before anything was proven",
            Self::NoAddress => {
                "the pod has no address yet, on any interface but loopback and link-local ones"
            }
            Self::PortsBusy => {
                "unknown: another process, the proxy if it runs already, listens on the proxy's ports, so where redirected traffic arrives cannot be seen"
            }
            Self::WrongOwner => {
                "the rules exempt other users or groups than the settings say: the proxy's traffic is captured, or the application's is not"
            }
            Self::WrongPort => "traffic is redirected, but not to the ports the proxy will listen on",
            Self::Stranger => "a process that is not part of this validation took a probe's connection",
            Self::NoRules => {
                "nothing in the pod's network namespace redirects traffic: it would bypass the proxy"
            }
            Self::OneFamilyOnly => {
                "one address family of the pod is redirected, the other would bypass the proxy"
            }
            Self::RulesNotInEffect => {
                "the network namespace tracks connections, so something has rules there, but traffic bypasses the proxy: the rules are incomplete, not hooked in, emptied, or exempt this user"
            }
            Self::DnsNotCaptured => "connections are redirected to the proxy, DNS queries are not",
            Self::LoopbackCaptured => {
                "connections that must not be captured are redirected: the proxy and the application could not talk to each other"
            }
            Self::NoPassthroughAddress => {
                "the address ::6 is missing on lo: the proxy could not pass IPv6 connections to the application"
            }
            Self::DestinationLost => {
                "redirected connections arrive, but the proxy could not learn where they were meant to go"
            }
            Self::TproxyNotInEffect => "inbound connections are not handed to the proxy by TPROXY",
            Self::NoPolicyRoute => {
                "the policy rule or route that delivers TPROXY's packets to the proxy is missing"
            }
            Self::NoAnswer => "probes vanish: a rule drops them",
            Self::LoopbackDown => "the pod cannot reach itself over lo",
            Self::OutOfResources => {
                "unknown: the validation may not have the file descriptors, memory or local ports it needs"
            }
            Self::NothingProven => {
                "unknown: nothing failed, but no redirection can be seen by the user this runs as, so none is proven"
            }
        }
    }

    /// Whether the pod is redirected, as far as this says: `None` where it may be or may not.
    #[must_use]
    pub const fn is_redirected(self) -> Option<bool> {
        match self {
            Self::Redirected => Some(true),
            Self::Interrupted
            | Self::NoAddress
            | Self::PortsBusy
            | Self::OutOfResources
            | Self::NothingProven => None,
            Self::WrongOwner
            | Self::WrongPort
            | Self::Stranger
            | Self::NoRules
            | Self::OneFamilyOnly
            | Self::RulesNotInEffect
            | Self::DnsNotCaptured
            | Self::LoopbackCaptured
            | Self::NoPassthroughAddress
            | Self::DestinationLost
            | Self::TproxyNotInEffect
            | Self::NoPolicyRoute
            | Self::NoAnswer
            | Self::LoopbackDown => Some(false),
        }
    }

    /// What to do about it: which part of the system, and which setting.
    #[must_use]
    pub const fn remedy(self) -> Remedy {
        let (agent, setting) = match self {
            Self::Redirected => (NOBODY, "nothing to do"),
            Self::Interrupted => {
                (NOBODY, "the container runs again by itself unless the pod is being deleted")
            }
            Self::NoAddress => (
                "the primary network plugin on this node",
                "see the pod's events; raise --probe-timeout if addresses come late",
            ),
            Self::PortsBusy => (
                "the pod's other containers, unless the proxy already runs",
                "run it before the proxy starts, as an init container; nothing else may listen on the proxy's ports: see --envoy-port, --inbound-capture-port",
            ),
            Self::WrongOwner => (
                NODE_AGENT,
                "--proxy-uid and --proxy-gid have to be the runAsUser and runAsGroup of istio-proxy, and of no other container",
            ),
            Self::WrongPort => (
                NODE_AGENT,
                "--envoy-port and --inbound-capture-port have to be the same for the rules and for the proxy",
            ),
            Self::Stranger => (
                "the pod's other containers",
                "nothing may listen on the probe port: see --iptables-probe-port",
            ),
            Self::NoRules => (
                NODE_AGENT,
                "it must be ready before pods start; delete the pod, and its successor is redirected",
            ),
            Self::OneFamilyOnly => (
                NODE_AGENT,
                "ISTIO_DUAL_STACK must be the same for the plugin and for the proxy; ip6tables or nf_tables must support the family",
            ),
            Self::RulesNotInEffect => (
                NODE_AGENT,
                "see whether another program changes rules in this namespace, and delete the pod; its successor is programmed again",
            ),
            Self::DnsNotCaptured => {
                (NODE_AGENT, "ISTIO_META_DNS_CAPTURE must be set on the proxy when the pod is created")
            }
            Self::LoopbackCaptured => (
                NODE_AGENT,
                "see ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR and --istio-service-cidr, and delete the pod; its successor is programmed again",
            ),
            Self::NoPassthroughAddress => (NODE_AGENT, "delete the pod; its successor is programmed again"),
            Self::DestinationLost => (
                NODE_AGENT,
                "another program translates addresses in this namespace; see the pod's other network plugins",
            ),
            Self::TproxyNotInEffect => (
                NODE_AGENT,
                "the interception mode must be TPROXY for the rules too (sidecar.istio.io/interceptionMode); the kernel needs xt_TPROXY or nft_tproxy",
            ),
            Self::NoPolicyRoute => (
                NODE_AGENT,
                "see --istio-inbound-tproxy-mark and --istio-inbound-tproxy-route-table; the kernel needs policy routing",
            ),
            Self::NoAnswer => (
                "whatever drops packets in this pod",
                "see network policies and other rules of this namespace",
            ),
            Self::LoopbackDown => ("the container runtime", "the interface lo must be up with its addresses"),
            Self::OutOfResources => (
                "the pod's specification",
                "about 50 file descriptors (ulimit -n) and 20 local ports (net.ipv4.ip_local_port_range) are needed",
            ),
            Self::NothingProven => {
                ("the pod's specification", "run it with the proxy's runAsUser and runAsGroup (1337)")
            }
        };
        Remedy { agent, setting, code: self.code() }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

const NOBODY: &str = "no one";
const NODE_AGENT: &str =
    "the istio-cni agent on this node (kubectl get pods -A -o wide -l k8s-app=istio-cni-node)";

/// What to do: who, which setting, and where to read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remedy {
    /// The part of the system that can fix it.
    pub agent: &'static str,
    /// The setting to check.
    pub setting: &'static str,
    code: &'static str,
}

impl Remedy {
    /// Where it is explained.
    #[must_use]
    pub fn document(&self) -> String {
        format!("docs/reference/validation.md#{}", self.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_reason_has_its_place_and_code() {
        let all: BTreeSet<Reason> = Reason::ALL.into_iter().collect();
        let codes: BTreeSet<&str> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        assert_eq!((all.len(), codes.len()), (Reason::ALL.len(), Reason::ALL.len()));
    }

    #[test]
    fn every_reason_is_documented() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/validation.md");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        for reason in Reason::ALL {
            assert!(
                text.contains(&format!("### {reason}\n")),
                "{reason} is not in docs/reference/validation.md"
            );
        }
    }
}
