//! Why a pod is held back: a closed set of codes, each with what it means and what to do.

use reasons::{ReasonDoc, linked};
use std::fmt;

const NO_ONE: &str = "no one";
const NODE_AGENT: &str =
    "the istio-cni agent on this node (kubectl get pods -A -o wide -l k8s-app=istio-cni-node)";
const OTHERS: &str = "the pod's other containers";
const SPECIFICATION: &str = "the pod's specification";

/// Makes the enum, the list of all and the table, so that none of them can lack a row.
macro_rules! reasons {
    ($($name:ident: $code:literal, $is_redirected:expr, $agent:expr, $meaning:literal, $remedy:literal;)+) => {
        /// The outcome of a validation in one word. Codes are an interface: repair controllers and alerts match them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $(#[doc = $meaning] $name,)+
        }

        impl Reason {
            /// All of them, the one that explains the most first.
            pub const ALL: [Self; 20] = [$(Self::$name,)+];

            /// Its code, what it means, and what to do about it: which setting to check.
            #[must_use]
            pub const fn doc(self) -> ReasonDoc {
                match self {
                    $(Self::$name => ReasonDoc { word: $code, meaning: $meaning, remedy: $remedy },)+
                }
            }

            /// Whether the pod is redirected, as far as this says: `None` where it may be or may not.
            #[must_use]
            pub const fn is_redirected(self) -> Option<bool> {
                match self {
                    $(Self::$name => $is_redirected,)+
                }
            }

            /// The part of the system that can fix it.
            #[must_use]
            pub const fn agent(self) -> &'static str {
                match self {
                    $(Self::$name => $agent,)+
                }
            }
        }
    };
}

reasons! {
    Redirected: "redirected", Some(true), NO_ONE,
        "every path that can be proven from inside the pod is redirected to the proxy",
        "nothing to do";
    Interrupted: "interrupted", None, NO_ONE,
        "a signal ended the validation before anything was proven",
        "the container runs again by itself unless the pod is being deleted";
    NoAddress: "no-address", None, "the primary network plugin on this node",
        "the pod has no address yet, on any interface but loopback and link-local ones",
        "see the pod's events; raise --probe-timeout if addresses come late";
    OutOfResources: "out-of-resources", None, SPECIFICATION,
        "unknown: the validation may not have the file descriptors, memory or local ports it needs",
        "about 50 file descriptors (ulimit -n) and 20 local ports (net.ipv4.ip_local_port_range) are needed";
    LoopbackDown: "loopback-down", Some(false), "the container runtime",
        "the pod cannot reach itself over lo",
        "the interface lo must be up with its addresses";
    PortsBusy: "ports-busy", None, "the pod's other containers, unless the proxy already runs",
        "unknown: another process, the proxy if it runs already, listens on the proxy's ports, so where redirected traffic arrives cannot be seen",
        "run it before the proxy starts, as an init container; nothing else may listen on the proxy's ports: see --envoy-port, --inbound-capture-port";
    WrongOwner: "wrong-owner", Some(false), NODE_AGENT,
        "the rules exempt other users or groups than the settings say: the proxy's traffic is captured, or the application's is not",
        "--proxy-uid and --proxy-gid have to be the runAsUser and runAsGroup of istio-proxy, and of no other container";
    WrongPort: "wrong-port", Some(false), NODE_AGENT,
        "traffic is redirected, but not to the ports the proxy will listen on",
        "--envoy-port and --inbound-capture-port have to be the same for the rules and for the proxy";
    Stranger: "stranger", Some(false), OTHERS,
        "a process that is not part of this validation took a probe's connection",
        "nothing may listen on the probe port: see --iptables-probe-port";
    NoRules: "no-rules", Some(false), NODE_AGENT,
        "nothing in the pod's network namespace redirects traffic: it would bypass the proxy",
        "it must be ready before pods start; delete the pod, and its successor is redirected";
    OneFamilyOnly: "one-family-only", Some(false), NODE_AGENT,
        "one address family of the pod is redirected, the other would bypass the proxy",
        "ISTIO_DUAL_STACK must be the same for the plugin and for the proxy; ip6tables or nf_tables must support the family";
    RulesNotInEffect: "rules-not-in-effect", Some(false), NODE_AGENT,
        "the network namespace tracks connections, so something has rules there, but traffic bypasses the proxy: the rules are incomplete, not hooked in, emptied, or exempt this user",
        "see whether another program changes rules in this namespace, and delete the pod; its successor is programmed again";
    DnsNotCaptured: "dns-not-captured", Some(false), NODE_AGENT,
        "connections are redirected to the proxy, DNS queries are not",
        "ISTIO_META_DNS_CAPTURE must be set on the proxy when the pod is created";
    LoopbackCaptured: "loopback-captured", Some(false), NODE_AGENT,
        "connections that must not be captured are redirected: the proxy and the application could not talk to each other",
        "another program's rule, such as another mesh's, may do that (on the node, redirectctl verify names it): remove it; or see ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR and --istio-service-cidr, and delete the pod";
    NoPassthroughAddress: "no-passthrough-address", Some(false), NODE_AGENT,
        "the address ::6 is missing on lo: the proxy could not pass IPv6 connections to the application",
        "delete the pod; its successor is programmed again";
    DestinationLost: "destination-lost", Some(false), NODE_AGENT,
        "redirected connections arrive, but the proxy could not learn where they were meant to go",
        "another program translates addresses in this namespace; see the pod's other network plugins";
    TproxyNotInEffect: "tproxy-not-in-effect", Some(false), NODE_AGENT,
        "inbound connections are not handed to the proxy by TPROXY",
        "the interception mode must be TPROXY for the rules too (sidecar.istio.io/interceptionMode); the kernel needs xt_TPROXY or nft_tproxy";
    NoPolicyRoute: "no-policy-route", Some(false), NODE_AGENT,
        "the policy rule or route that delivers TPROXY's packets to the proxy is missing",
        "see --istio-inbound-tproxy-mark and --istio-inbound-tproxy-route-table; the kernel needs policy routing";
    NoAnswer: "no-answer", Some(false), "whatever drops packets in this pod",
        "probes vanish: a rule drops them",
        "see network policies and other rules of this namespace";
    NothingProven: "nothing-proven", None, SPECIFICATION,
        "unknown: nothing failed, but no redirection can be seen by the user this runs as, so none is proven",
        "run it with the proxy's runAsUser and runAsGroup (1337)";
}

impl Reason {
    /// Its code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        self.doc().word
    }

    /// Where it is explained.
    #[must_use]
    pub fn document(self) -> String {
        linked(&format!("docs/reference/validation.md#{self}"))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
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
