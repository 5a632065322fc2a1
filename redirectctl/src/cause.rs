//! What can be wrong: a closed set of causes, each with its weight, what it means and what to do.

pub use presentation::Severity;
use reasons::{AgentReason, ReasonDoc};

/// Something wrong, or worth knowing, about a pod: what, and where it shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFinding {
    /// What.
    pub cause: Cause,
    /// What was seen, a sentence each.
    pub seen: Vec<String>,
}

impl PodFinding {
    /// Whether it is more than a note.
    #[must_use]
    pub const fn is_trouble(&self) -> bool {
        !matches!(self.cause.severity(), Severity::Note)
    }
}

/// What was seen of it is read from the kernel, the settings of the mesh or the node's network configuration.
const QUOTABLE: bool = true;
/// What was seen of it may be anything, such as an event's message.
const PRIVATE: bool = false;

/// Makes the enum, the list of all and the table, so that none of them can lack a row.
macro_rules! causes {
    (
        $($name:ident: $code:literal, $severity:ident, $is_quotable:ident, $meaning:literal, $remedy:literal;)+
        => $($shared:ident: $of:ident, $doc:literal;)+
    ) => {
        /// What can be wrong. Codes are an interface: scripts and alerts match them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Cause {
            $(#[doc = $meaning] $name,)+
            $(#[doc = $doc] $shared,)+
        }

        impl Cause {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+ $(Self::$shared,)+];

            /// What it means, and what to do about it.
            #[must_use]
            pub const fn doc(self) -> ReasonDoc {
                match self {
                    $(Self::$name => ReasonDoc { word: $code, meaning: $meaning, remedy: $remedy },)+
                    // The agent reports it as well.
                    $(Self::$shared => AgentReason::$of.doc(),)+
                }
            }

            /// How bad it is.
            #[must_use]
            pub const fn severity(self) -> Severity {
                match self {
                    $(Self::$name => Severity::$severity,)+
                    $(Self::$shared)|+ => Severity::Error,
                }
            }

            /// Whether the archive of `bundle` may hold what was seen.
            #[must_use]
            pub const fn is_quotable(self) -> bool {
                match self {
                    $(Self::$name => $is_quotable,)+
                    $(Self::$shared)|+ => PRIVATE,
                }
            }
        }
    };
}

causes! {
    NotRedirected: "not-redirected", Error, QUOTABLE,
        "the pod is to be redirected and its network namespace holds no rule of the mesh: all of its traffic bypasses the proxy",
        "either the plugin did not run when the pod started, or its rules were removed later: if the plugin's log has no ADD of the pod, see that the node agent is ready and the plugin's entry is in the runtime's configuration; then delete the pod, and its successor is redirected";
    NotEnrolled: "not-enrolled", Error, PRIVATE,
        "the pod is in ambient mode, and is not verified to be enrolled: its traffic may bypass ztunnel, or hang",
        "the node agent tries again until it is; its /readyz?verbose has the reason";
    ProbesUnanswered: "probes-unanswered", Warning, PRIVATE,
        "the node probes the pod, and no answer comes back to it: the kubelet restarts the pod, or keeps it from being ready",
        "where the pod does answer, see that no network policy drops the probes' source address (169.254.7.127, fd16:9254:7127:1337:ffff:ffff:ffff:ffff); where the network plugin forwards by eBPF programs (eBPF host routing), set net.ipv4.conf.all.rp_filter and net.ipv4.conf.lo.rp_filter to 0 or 2 on the node, or Cilium's bpf.hostLegacyRouting=true";
    Unexpected: "unexpected-rules", Error, QUOTABLE,
        "the pod is not to be redirected, and rules of the mesh are in force in its network namespace",
        "if the pod was changed after it started, delete it; rules made by hand are removed by istio-iptables --cleanup-only in its network namespace";
    OneFamily: "one-family-missing", Error, QUOTABLE,
        "one address family is redirected as planned and the other has no rules: its traffic bypasses the proxy",
        "ISTIO_DUAL_STACK must be the same for the plugin and for the proxy; delete the pod, and its successor is programmed again";
    Drifted: "rules-differ", Error, QUOTABLE,
        "rules of the mesh are in force, and they are not those of the plan",
        "either another program changed them after the pod started, or the pod's annotations or the plugin's settings were changed; delete the pod, and its successor is programmed again";
    RoutingMissing: "routing-missing", Error, QUOTABLE,
        "the policy rule or route that delivers TPROXY's packets to the proxy is missing or does not work: inbound connections hang",
        "either a program removed it, in the pod or on the node, or another rule comes before it; see ip rule and ip route in its network namespace, and delete the pod";
    RoutingTaken: "routing-taken", Error, QUOTABLE,
        "a policy rule of another program takes packets on their way to the proxy, and no rule of the mesh can stand before it: connections hang",
        "give that rule a later priority or a narrower condition, or another mark; its priority and table are named, ip rule shows it";
    PassthroughMissing: "passthrough-address-missing", Error, QUOTABLE,
        "the address ::6 is missing on lo: the proxy cannot hand IPv6 connections to the application",
        "either a program removed it, in the pod or on the node, or IPv6 was switched off and on again in the pod; delete the pod, and its successor has it";
    TwoBackends: "two-backends", Error, QUOTABLE,
        "the mesh has rules in more than one backend: connections are translated twice, or by the older rules",
        "either an init container such as istio-init made rules beside those of the plugin, or a program on the node; remove it and delete the pod";
    Asleep: "table-dormant", Error, QUOTABLE,
        "a table with rules of the mesh is dormant: the kernel passes it over, and traffic bypasses the proxy",
        "nft add table wakes it; find out who put it to sleep, and delete the pod";
    Foreign: "foreign-rule", Error, QUOTABLE,
        "a rule of another program meets captured packets before those of the mesh",
        "either a container with NET_ADMIN made it, or a program on the node such as another network plugin; take it away there, then delete the pod";
    ForeignMaybe: "foreign-rule-may-interfere", Warning, QUOTABLE,
        "a rule of another program that is not wholly understood may meet captured packets before those of the mesh",
        "read the rule: if it takes, drops or rewrites packets, the program that made it must be reconfigured";
    ForeignAccepted: "foreign-rule-accepted", Note, PRIVATE,
        "a rule of another program meets captured packets before those of the mesh, and is accepted",
        "nothing is to be done; if this is not intended, take its name from the pod's annotation cni.istio.io/acceptedRules or the node's ACCEPTED_RULES";
    NotAccepted: "rules-not-accepted", Warning, PRIVATE,
        "the pod names rules of other programs that are to be accepted, and this counts for nothing",
        "correct the annotation, or let pods of the node name rules (ACCEPT_RULES_OF_PODS)";
    KernelLacks: "kernel-lacks", Error, QUOTABLE,
        "the kernel has no support for something that the rules need",
        "load the module on the node, and see that it is loaded at boot; docs/concepts/backends.md lists what is needed";
    NoAddress: "no-address", Error, QUOTABLE,
        "the network namespace has no address but loopback and link-local ones, so no plan can be made for it",
        "the primary network plugin gives addresses; see the pod's events and the runtime's log";
    LoopbackDown: "loopback-down", Error, QUOTABLE,
        "the interface lo has no address: proxy and application cannot talk to each other",
        "the container runtime brings lo up (the plugin loopback); see its log";
    NobodyListens: "nobody-listens", Error, QUOTABLE,
        "traffic is redirected to a port of the proxy with no listener: connections are refused",
        "the proxy is not running, not ready yet, or listens on other ports; see the log of container istio-proxy";
    DnsNobodyListens: "dns-nobody-listens", Error, QUOTABLE,
        "DNS queries are captured and nothing answers them: names cannot be resolved in the pod",
        "the proxy answers DNS only with ISTIO_META_DNS_CAPTURE=true in its own environment; see the log of container istio-proxy";
    StrangerListens: "stranger-listens", Warning, QUOTABLE,
        "a process that is not the proxy's user listens on a port that the rules redirect to",
        "give that process another port";
    UidCollision: "uid-collision", Warning, PRIVATE,
        "another container, or a process in one, runs as the proxy's user or group: its traffic bypasses the proxy",
        "give it another runAsUser and runAsGroup than the proxy's (1337 unless said otherwise)";
    RootIsProxy: "root-is-the-proxy", Warning, QUOTABLE,
        "root's traffic counts as the proxy's and passes by it",
        "run the proxy as a user of its own (runAsUser of container istio-proxy)";
    InitWithoutNetwork: "init-without-network", Warning, PRIVATE,
        "an init container runs before the proxy and after the rules: its connections are redirected to a port with no listener",
        "make the proxy a native sidecar before it (restartPolicy: Always), or run the init container as the proxy's user (runAsUser: 1337), or exclude what it needs (traffic.sidecar.istio.io/excludeOutboundPorts, excludeOutboundIPRanges)";
    PortNotCaptured: "port-not-captured", Warning, QUOTABLE,
        "the pod declares that the application listens on a port whose connections are not captured",
        "take the port out of traffic.sidecar.istio.io/excludeInboundPorts, or into includeInboundPorts; if intended, ignore this";
    FamilyNotCaptured: "family-not-captured", Note, QUOTABLE,
        "the pod has addresses of a family that its settings do not capture: that traffic bypasses the proxy, as is Istio's default",
        "ISTIO_DUAL_STACK=true on the proxy captures both families of a dual-stack pod; traffic.sidecar.istio.io/strictCapture: \"true\" those of any; or switch IPv6 off in pods (sysctl net.ipv6.conf.all.disable_ipv6=1)";
    NothingCaptured: "nothing-captured", Warning, PRIVATE,
        "the settings capture no traffic at all",
        "see the pod's traffic.sidecar.istio.io annotations; without any all TCP traffic is captured";
    BadSettings: "bad-settings", Error, QUOTABLE,
        "annotations of the pod cannot be understood: the plugin fails its creation",
        "correct what is named; docs/reference/settings.md says what each takes";
    Misspelt: "misspelt-setting", Warning, PRIVATE,
        "an annotation or a variable of the proxy resembles a setting but is not one; it has no effect",
        "write the name that is meant; docs/reference/settings.md lists all";
    HostNetwork: "host-network", Warning, PRIVATE,
        "the pod has a proxy and is on the host's network: no plugin runs for it, and it is never redirected",
        "take hostNetwork: true or the proxy away";
    Sandboxed: "sandboxed-runtime", Error, PRIVATE,
        "the pod's runtime is sandboxed (a network stack or a kernel of its own): rules in the network namespace do not bind it, and its traffic bypasses the proxy",
        "take runtimeClassName, or the proxy, from the pod; if its sandbox does obey these rules, which istio-validation proves, take its name out of SANDBOXED_RUNTIMES";
    NoEntry: "no-plugin-entry", Error, QUOTABLE,
        "the network configuration that the runtime uses has no entry of istio-cni: pods that start now are not redirected",
        "the node agent writes it; see whether it is ready, and which file sorts first in the configuration directory";
    NotSeenCalled: "plugin-not-seen-called", Warning, PRIVATE,
        "the plugin's entry is there, the files do not show that the runtime calls it, and no ready node agent has seen it called",
        "what is named decides: where Multus runs what these files do not show, a pod's events and the agent's /readyz show it; READY_BEFORE_CALLED is for nodes on which it is known";
    EntryUnreadable: "entry-unreadable", Error, PRIVATE,
        "the network configuration that the runtime uses cannot be read: no pod can start, unless the runtime passes over the file, as CRI-O does",
        "correct or remove the file; the node agent's log names who wrote it";
    ServicesTranslated: "services-translated", Warning, PRIVATE,
        "a BPF program of the node translates connect(2) to services before rules of pods see them: proxies and ztunnel receive connections to single pods, without the service's name, routes and policies",
        "keep it out of pods: socketLB.hostNamespaceOnly=true in Cilium, bpfConnectTimeLoadBalancing: Disabled in Calico";
    PluginOrder: "plugin-order", Warning, PRIVATE,
        "other plugins come after istio-cni in the network configuration: addresses, routes and rules that they make are not known when it plans",
        "istio-cni must be last, where the node agent puts it; see who wrote the file";
    AgentNotReady: "agent-not-ready", Error, PRIVATE,
        "the node agent is not ready: pods that start now may not be redirected, or may not start",
        "what it says is missing; its log has more: kubectl get pods -A -o wide -l k8s-app=istio-cni-node names its pod";
    AgentSilent: "agent-silent", Warning, PRIVATE,
        "a node agent ran on this node but none responds; nothing maintains the plugin's entry and credentials",
        "see why it does not run: kubectl get pods -A -o wide -l k8s-app=istio-cni-node; if it listens elsewhere, name its address with --agent";
    AgentLimited: "agent-limited", Warning, QUOTABLE,
        "the node agent works, and something limits it",
        "see the alert about it in docs/tasks/alerts.md";
    AgentCounts: "agent-counts", Note, QUOTABLE,
        "since its start the node agent counted what should not happen",
        "see the metric's alert in docs/tasks/alerts.md";
    NoCredentials: "no-credentials", Error, PRIVATE,
        "the plugin cannot read pods: no pod can start, except in excluded namespaces",
        "the node agent writes the plugin's kubeconfig: see whether it runs and is ready";
    NodeNotVerified: "node-not-verified", Error, PRIVATE,
        "the node's condition cni.istio.io/Ready reports that pods that start here would not be redirected",
        "redirectctl why REASON explains the reason; docs/concepts/taint.md says when the condition changes";
    NodeNotReady: "node-not-ready", Error, PRIVATE,
        "Kubernetes reports the node as not ready: no pod is scheduled there",
        "what the kubelet says is missing; NetworkPluginNotReady is about the network configuration, or a plugin's STATUS";
    NodeTainted: "node-tainted", Warning, PRIVATE,
        "the node has the mesh's taint: pods that do not tolerate it are not put there",
        "see whether the node agent is ready; docs/concepts/taint.md says who removes it, and when";
    NotSetUp: "not-set-up", Error, PRIVATE,
        "the runtime cannot set up the pod's network, and tries repeatedly: the pod does not start",
        "the message names the plugin that failed; where it is istio-cni, redirectctl why cni-CODE explains its code";
    HeldBack: "held-back", Error, PRIVATE,
        "istio-validation holds the pod back (exit code 126): the pod is not redirected, or that could not be proven",
        "redirectctl why REASON explains its reason; the node agent can repair such pods (docs/concepts/repair.md), or delete the pod, and its successor is redirected";
    AwaitsValidation: "awaits-validation", Warning, PRIVATE,
        "istio-validation held the pod back (exit code 126), and the pod's rules are as planned now",
        "either the rules were repaired since: then wait, the kubelet runs istio-validation again within five minutes; or it fails again, for what rules do not show: redirectctl why REASON explains its reason";
    ValidationEnded: "validation-ended", Error, PRIVATE,
        "istio-validation failed with an exit code that is not its own: its settings are wrong, or something ended it",
        "see the log of container istio-validation; 1 is bad input, 137 means that it was killed, often for memory";
    NotRepaired: "not-repaired", Error, PRIVATE,
        "the node agent tried to repair the pod and could not",
        "the event names the cause, and docs/concepts/repair.md what to do about it; or delete the pod, and its successor is redirected";
    NotHealed: "not-healed", Warning, PRIVATE,
        "the pod's rules were changed, and the node agent could not put them right for good",
        "the event names who changes them, where that is known: take that away, then delete the pod";
    Repaired: "repaired", Note, PRIVATE,
        "the node agent dealt with the pod, whose validation had failed",
        "nothing is to be done";
    Healed: "healed", Note, PRIVATE,
        "the pod's rules were changed, and the node agent put them right",
        "find out who changed them: the event names the process if the kernel reported it";
    NotStarted: "not-started", Note, PRIVATE,
        "the pod has no network yet, so nothing can be checked",
        "wait, or see kubectl describe pod for what it waits for";
    Untold: "not-told", Note, PRIVATE,
        "the API server did not answer every request; findings that depend on it are missing here",
        "name a kubeconfig that may read it with --kubeconfig";
    Excluded: "traffic-excluded", Note, PRIVATE,
        "settings leave traffic alone, as they say: it bypasses the proxy",
        "if this is not intended, change the annotation and delete the pod";
    ConnectionsKept: "connections-kept", Note, PRIVATE,
        "connections that were open when the pod was enrolled go past ztunnel until they end, or until their time is over",
        "nothing is to be done; remove the annotation or label cni.istio.io/keepConnections if this is not intended";
    DnsCaptured: "dns-captured", Note, PRIVATE,
        "DNS queries of the application go to the proxy, whatever server they are meant for",
        "nothing is to be done; without the proxy no name is resolved";
    Unexamined: "not-examined", Note, PRIVATE,
        "XDP programs or filters of traffic control, which are not examined, may take or change the pod's packets",
        "ip link and tc filter show list them in the pod's network namespace";
    Unowned: "unowned-rules", Warning, QUOTABLE,
        "rules of the mesh are in force in a network namespace that belongs to no pod that is known here",
        "a pod that is gone may have left it, or the list of pods is incomplete";
    =>
    Unfound: NotFound, "The pod's network namespace is not found.";
    Ambiguous: Ambiguous, "Several network namespaces may be the pod's.";
    Unverifiable: Unverifiable, "The mesh's rules are in force, and other rules cannot be read.";
    Unreadable: Unreadable, "It cannot be determined whether the pod is redirected.";
}

impl Cause {
    /// Its code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        self.doc().word
    }
}

impl PodFinding {
    /// With what was seen, one thing.
    #[must_use]
    pub fn new(cause: Cause, seen: impl Into<String>) -> Self {
        Self { cause, seen: vec![seen.into()] }
    }

    /// One, if anything was seen.
    #[must_use]
    pub fn some(cause: Cause, seen: Vec<String>) -> Option<Self> {
        (!seen.is_empty()).then_some(Self { cause, seen })
    }
}

/// Adds what was seen to a cause's finding, or a finding if that cause has none.
pub(crate) fn merge(all: &mut Vec<PodFinding>, cause: Cause, seen: Vec<String>) {
    match all.iter_mut().find(|finding| finding.cause == cause) {
        Some(finding) => finding.seen.extend(seen),
        None => all.extend(PodFinding::some(cause, seen)),
    }
}

/// Puts the worst first.
pub(crate) fn sort(all: &mut [PodFinding]) {
    all.sort_by_key(|finding| (std::cmp::Reverse(finding.cause.severity()), finding.cause));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_cause_that_is_not_known_is_told_as_either_of_two() {
        for cause in [
            Cause::NotRedirected,
            Cause::Drifted,
            Cause::RoutingMissing,
            Cause::PassthroughMissing,
            Cause::TwoBackends,
            Cause::Foreign,
            Cause::AwaitsValidation,
        ] {
            let remedy = cause.doc().remedy;
            assert!(remedy.starts_with("either ") && remedy.contains(" or "), "{}: {remedy}", cause.code());
        }
    }

    #[test]
    fn every_cause_has_a_code_of_its_own_and_says_what_to_do() {
        let codes: BTreeSet<&str> = Cause::ALL.iter().map(|cause| cause.code()).collect();
        assert_eq!(codes.len(), Cause::ALL.len());
        for cause in Cause::ALL {
            let is_word = |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
            assert!(is_word(cause.code()), "{}", cause.code());
            let ReasonDoc { word, meaning, remedy } = cause.doc();
            assert!(!meaning.ends_with('.') && !remedy.ends_with('.'), "{word}");
        }
    }
}
