//! The one table of settings: every flag, environment variable and annotation, with default, kind and meaning.
//!
//! Command-line definitions, the reference documentation and error messages are made from it.

/// Names a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // each is explained by its row in `SETTINGS`
pub enum Key {
    ProxyPort,
    InboundCapturePort,
    InboundTunnelPort,
    ProxyUid,
    ProxyGid,
    ProxyUser,
    InterceptionMode,
    InboundPorts,
    InboundExcludePorts,
    ExcludeInterfaces,
    OutboundRanges,
    OutboundExcludeRanges,
    OutboundPorts,
    OutboundExcludePorts,
    VirtualInterfaces,
    TproxyMark,
    TproxyRouteTable,
    RedirectDns,
    CaptureAllDns,
    DropInvalid,
    StrictCapture,
    DualStack,
    OwnerGroups,
    OwnerGroupsExclude,
    LoopbackRange,
    DryRun,
    DryRunFile,
    ProbePort,
    ProbeTimeout,
    TerminationLog,
    SkipRuleApply,
    RunValidation,
    NetworkNamespace,
    CniMode,
    Reconcile,
    CleanupOnly,
    ForceApply,
    NativeNftables,
    NftSets,
    ForceIptablesBinary,
    Backend,
}

/// What kind of value a setting takes; decides how a flag is written and completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Text of any form the setting's own reader understands.
    Text,
    /// A boolean; as a flag it may stand alone.
    Bool,
    /// One of a closed set of words.
    Choice(&'static [&'static str]),
    /// A path of a file or folder.
    Path,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Which setting this is.
    pub key: Key,
    /// Long flag, without dashes.
    pub flag: Option<&'static str>,
    /// Short flag.
    pub short: Option<char>,
    /// Environment variables; a later one wins over an earlier one.
    pub env: &'static [&'static str],
    /// Pod annotations; an earlier one wins over a later one.
    pub annotations: &'static [&'static str],
    /// Variable of the pod's proxy container.
    pub proxy_env: Option<&'static str>,
    /// The kind of value.
    pub kind: Kind,
    /// The value where nobody says anything.
    pub default: &'static str,
    /// The value the CNI plugin takes for a pod that says nothing, where it differs from `default`.
    pub pod_default: Option<&'static str>,
    /// What it does, for people.
    pub meaning: &'static str,
}

/// A row with nothing but a key; the table fills in the rest.
const fn row(key: Key, meaning: &'static str) -> Setting {
    Setting {
        key,
        flag: None,
        short: None,
        env: &[],
        annotations: &[],
        proxy_env: None,
        kind: Kind::Text,
        default: "",
        pod_default: None,
        meaning,
    }
}

/// Every setting, in the order in which the documentation lists them.
pub const SETTINGS: &[Setting] = &[
    Setting {
        flag: Some("envoy-port"),
        short: Some('p'),
        default: "15001",
        ..row(Key::ProxyPort, "Port the proxy listens on for outbound connections.")
    },
    Setting {
        flag: Some("inbound-capture-port"),
        short: Some('z'),
        env: &["INBOUND_CAPTURE_PORT"],
        default: "15006",
        ..row(Key::InboundCapturePort, "Port the proxy listens on for inbound connections.")
    },
    Setting {
        flag: Some("inbound-tunnel-port"),
        short: Some('e'),
        env: &["INBOUND_TUNNEL_PORT"],
        default: "15008",
        ..row(Key::InboundTunnelPort, "Port of tunnelled inbound connections (HBONE); it is never captured.")
    },
    Setting {
        flag: Some("proxy-uid"),
        short: Some('u'),
        env: &["PROXY_UID"],
        ..row(
            Key::ProxyUid,
            "User ids whose traffic is the proxy's own and passes, separated by commas. Where empty: the id of the user ENVOY_USER, else 1337. Of a pod, runAsUser of container istio-proxy, else of the pod; 0 counts as unset.",
        )
    },
    Setting {
        flag: Some("proxy-gid"),
        short: Some('g'),
        env: &["PROXY_GID"],
        ..row(
            Key::ProxyGid,
            "Group ids whose traffic is the proxy's own and passes, separated by commas. Where empty: the same as the user ids. Of a pod, runAsGroup of container istio-proxy, else of the pod; 0 counts as unset.",
        )
    },
    Setting {
        env: &["ENVOY_USER"],
        default: "istio-proxy",
        ..row(
            Key::ProxyUser,
            "Name of the proxy's user, looked up in /etc/passwd only while no user id is given.",
        )
    },
    Setting {
        flag: Some("istio-inbound-interception-mode"),
        short: Some('m'),
        env: &["ISTIO_INBOUND_INTERCEPTION_MODE"],
        annotations: &["sidecar.istio.io/interceptionMode"],
        kind: Kind::Choice(&["REDIRECT", "TPROXY"]),
        pod_default: Some("REDIRECT"),
        ..row(
            Key::InterceptionMode,
            "How inbound connections reach the proxy: REDIRECT (rewritten destination, the default) or TPROXY (the client's source address is kept).",
        )
    },
    Setting {
        flag: Some("istio-inbound-ports"),
        short: Some('b'),
        env: &["ISTIO_INBOUND_PORTS"],
        annotations: &["traffic.sidecar.istio.io/includeInboundPorts"],
        pod_default: Some("*"),
        ..row(
            Key::InboundPorts,
            "Inbound ports to capture: a list such as 80,8000:8099, * for all, empty for none.",
        )
    },
    Setting {
        flag: Some("istio-local-exclude-ports"),
        short: Some('d'),
        env: &["ISTIO_LOCAL_EXCLUDE_PORTS"],
        annotations: &["traffic.sidecar.istio.io/excludeInboundPorts"],
        pod_default: Some("15020,15021,15090"),
        ..row(
            Key::InboundExcludePorts,
            "Inbound ports not to capture; used only where all ports are captured. To what a pod's annotation lists, the proxy's own ports 15020, 15021 and 15090 are added.",
        )
    },
    Setting {
        flag: Some("istio-exclude-interfaces"),
        short: Some('c'),
        env: &["ISTIO_EXCLUDE_INTERFACES"],
        annotations: &["traffic.sidecar.istio.io/excludeInterfaces"],
        ..row(Key::ExcludeInterfaces, "Interfaces whose traffic is left alone, both ways.")
    },
    Setting {
        flag: Some("istio-service-cidr"),
        short: Some('i'),
        env: &["ISTIO_SERVICE_CIDR"],
        annotations: &["traffic.sidecar.istio.io/includeOutboundIPRanges"],
        pod_default: Some("*"),
        ..row(
            Key::OutboundRanges,
            "Destinations to capture: a list of ranges such as 10.0.0.0/8,fd00::/8, * for all, empty for none.",
        )
    },
    Setting {
        flag: Some("istio-service-exclude-cidr"),
        short: Some('x'),
        env: &["ISTIO_SERVICE_EXCLUDE_CIDR"],
        annotations: &["traffic.sidecar.istio.io/excludeOutboundIPRanges"],
        ..row(Key::OutboundExcludeRanges, "Destinations not to capture: a list of ranges.")
    },
    Setting {
        flag: Some("istio-outbound-ports"),
        short: Some('q'),
        env: &["ISTIO_OUTBOUND_PORTS"],
        annotations: &["traffic.sidecar.istio.io/includeOutboundPorts"],
        ..row(Key::OutboundPorts, "Outbound ports to capture whatever the destination.")
    },
    Setting {
        flag: Some("istio-local-outbound-ports-exclude"),
        short: Some('o'),
        env: &["ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE"],
        annotations: &["traffic.sidecar.istio.io/excludeOutboundPorts"],
        pod_default: Some("15020"),
        ..row(Key::OutboundExcludePorts, "Outbound ports not to capture, TCP and UDP.")
    },
    Setting {
        flag: Some("kube-virt-interfaces"),
        short: Some('k'),
        env: &["KUBE_VIRT_INTERFACES"],
        annotations: &["istio.io/reroute-virtual-interfaces", "traffic.sidecar.istio.io/kubevirtInterfaces"],
        ..row(
            Key::VirtualInterfaces,
            "Virtual interfaces whose inbound traffic is treated as outbound: virtual machines or containers inside the pod.",
        )
    },
    Setting {
        flag: Some("istio-inbound-tproxy-mark"),
        short: Some('t'),
        env: &["ISTIO_INBOUND_TPROXY_MARK"],
        default: "1337",
        ..row(Key::TproxyMark, "fwmark of inbound TPROXY packets.")
    },
    Setting {
        flag: Some("istio-inbound-tproxy-route-table"),
        short: Some('r'),
        env: &["ISTIO_INBOUND_TPROXY_ROUTE_TABLE"],
        default: "133",
        ..row(Key::TproxyRouteTable, "Routing table that delivers inbound TPROXY packets locally.")
    },
    Setting {
        flag: Some("redirect-dns"),
        env: &["REDIRECT_DNS", "ISTIO_META_DNS_CAPTURE"],
        proxy_env: Some("ISTIO_META_DNS_CAPTURE"),
        kind: Kind::Bool,
        default: "false",
        ..row(Key::RedirectDns, "Capture DNS queries to the servers of /etc/resolv.conf, to port 15053.")
    },
    Setting {
        flag: Some("capture-all-dns"),
        env: &["CAPTURE_ALL_DNS"],
        kind: Kind::Bool,
        default: "false",
        ..row(Key::CaptureAllDns, "With --redirect-dns: capture all queries to port 53, whatever the server.")
    },
    Setting {
        flag: Some("drop-invalid"),
        env: &["DROP_INVALID", "INVALID_DROP"],
        proxy_env: Some("INVALID_DROP"),
        kind: Kind::Bool,
        default: "false",
        ..row(Key::DropInvalid, "Drop inbound TCP packets that connection tracking finds invalid.")
    },
    Setting {
        flag: Some("strict-capture"),
        env: &["STRICT_CAPTURE"],
        annotations: &["traffic.sidecar.istio.io/strictCapture"],
        kind: Kind::Bool,
        default: "false",
        ..row(
            Key::StrictCapture,
            "Drop what would pass beside the proxy on a connection that was not captured: on one of the proxy's own, and on one opened over lo (docs/capture.md).",
        )
    },
    Setting {
        flag: Some("dual-stack"),
        env: &["DUAL_STACK", "ISTIO_DUAL_STACK"],
        proxy_env: Some("ISTIO_DUAL_STACK"),
        kind: Kind::Bool,
        default: "false",
        ..row(
            Key::DualStack,
            "Program IPv6 when the pod has any IPv6 address, not only when its first address is one.",
        )
    },
    Setting {
        env: &["ISTIO_OUTBOUND_OWNER_GROUPS"],
        default: "*",
        ..row(
            Key::OwnerGroups,
            "Groups whose outbound traffic is captured: ids or names of /etc/group, at most 64, * for all.",
        )
    },
    Setting {
        env: &["ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE"],
        ..row(
            Key::OwnerGroupsExclude,
            "Groups whose outbound traffic is not captured; used only where all groups are captured.",
        )
    },
    Setting {
        env: &["ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"],
        default: "127.0.0.1/32",
        ..row(
            Key::LoopbackRange,
            "IPv4 loopback range whose traffic the application may exchange with itself.",
        )
    },
    Setting {
        flag: Some("dry-run"),
        short: Some('n'),
        env: &["DRY_RUN"],
        kind: Kind::Bool,
        default: "false",
        ..row(Key::DryRun, "Print the plan on standard output and change nothing.")
    },
    Setting {
        env: &["DRY_RUN_FILE_PATH"],
        kind: Kind::Path,
        ..row(Key::DryRunFile, "File to which a dry run also appends the plan.")
    },
    Setting {
        flag: Some("iptables-probe-port"),
        env: &["IPTABLES_PROBE_PORT"],
        default: "15002",
        ..row(Key::ProbePort, "Port the validation connects to.")
    },
    Setting {
        flag: Some("probe-timeout"),
        env: &["PROBE_TIMEOUT"],
        default: "5s",
        ..row(Key::ProbeTimeout, "How long the validation may take, such as 500ms or 5s.")
    },
    Setting {
        flag: Some("termination-log"),
        env: &["TERMINATION_LOG"],
        kind: Kind::Path,
        default: "/dev/termination-log",
        ..row(
            Key::TerminationLog,
            "File the validation's verdict is written to as one JSON object; the container's terminationMessagePath. Where empty, none.",
        )
    },
    Setting {
        flag: Some("skip-rule-apply"),
        env: &["SKIP_RULE_APPLY"],
        kind: Kind::Bool,
        default: "false",
        ..row(Key::SkipRuleApply, "Do not program rules; with --run-validation: only validate.")
    },
    Setting {
        flag: Some("run-validation"),
        env: &["RUN_VALIDATION"],
        kind: Kind::Bool,
        default: "false",
        ..row(Key::RunValidation, "Prove by traffic that the redirection works; exit 126 when it does not.")
    },
    Setting {
        flag: Some("network-namespace"),
        env: &["NETWORK_NAMESPACE"],
        kind: Kind::Path,
        ..row(
            Key::NetworkNamespace,
            "Network namespace to work in, such as /run/netns/NAME. Where empty, the one the program runs in. Entering another needs CAP_SYS_ADMIN; files such as /etc/resolv.conf stay the program's own.",
        )
    },
    Setting {
        flag: Some("cni-mode"),
        env: &["CNI_MODE"],
        kind: Kind::Bool,
        default: "false",
        ..row(
            Key::CniMode,
            "Accepted for compatibility. No lock of the node is ever taken, only one of the network namespace.",
        )
    },
    Setting {
        flag: Some("reconcile"),
        env: &["RECONCILE"],
        kind: Kind::Bool,
        default: "false",
        ..row(
            Key::Reconcile,
            "Replace rules of another configuration. They are always replaced; the flag is accepted for compatibility.",
        )
    },
    Setting {
        flag: Some("cleanup-only"),
        env: &["CLEANUP_ONLY"],
        kind: Kind::Bool,
        default: "false",
        ..row(
            Key::CleanupOnly,
            "Remove everything an earlier run programmed, whatever its backend and settings.",
        )
    },
    Setting {
        flag: Some("force-apply"),
        env: &["FORCE_APPLY"],
        kind: Kind::Bool,
        default: "false",
        ..row(Key::ForceApply, "Program the rules anew even when they are in force.")
    },
    Setting {
        flag: Some("native-nftables"),
        env: &["NATIVE_NFTABLES"],
        kind: Kind::Bool,
        default: "false",
        ..row(
            Key::NativeNftables,
            "Program native nftables tables (inet istio-proxy-*) instead of iptables rules.",
        )
    },
    Setting {
        flag: Some("nft-sets"),
        env: &["NFT_SETS"],
        kind: Kind::Bool,
        default: "false",
        ..row(
            Key::NftSets,
            "With native nftables: gather long lists of ports and ranges in sets, so that a packet's cost does not grow with them.",
        )
    },
    Setting {
        flag: Some("force-iptables-binary"),
        env: &["FORCE_IPTABLES_BINARY"],
        kind: Kind::Choice(&["legacy", "nft"]),
        ..row(
            Key::ForceIptablesBinary,
            "The variant of iptables to use: legacy or nft. Where empty, the one the namespace uses already, else nft.",
        )
    },
    Setting {
        flag: Some("backend"),
        env: &["BACKEND"],
        kind: Kind::Choice(&["auto", "netlink", "restore"]),
        default: "auto",
        ..row(
            Key::Backend,
            "What programs iptables rules: netlink (one transaction, no helper program), restore (iptables-restore and ip6tables-restore), or auto: netlink, unless the kernel has no nf_tables or the namespace uses iptables-legacy.",
        )
    },
];

impl Key {
    /// This setting's row.
    #[must_use]
    pub fn setting(self) -> &'static Setting {
        // The table holds every key (a test sees to it); the fallback keeps the function free of panics.
        const UNLISTED: &Setting = &row(Key::ProxyPort, "");
        SETTINGS.iter().find(|setting| setting.key == self).unwrap_or(UNLISTED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use std::collections::BTreeSet;

    /// Every key, by a match that a new variant breaks.
    fn position(key: Key) -> usize {
        SETTINGS.iter().position(|setting| setting.key == key).unwrap()
    }

    #[test]
    fn names_are_unique() {
        let mut seen = BTreeSet::new();
        for setting in SETTINGS {
            assert!(seen.insert(setting.flag.map_or_else(|| std::format!("{:?}", setting.key), Into::into)));
            if let Some(short) = setting.short {
                assert!(seen.insert(short.to_string()), "-{short} twice");
            }
            for name in setting.env.iter().chain(setting.annotations) {
                assert!(seen.insert((*name).into()), "{name} twice");
            }
        }
        assert_eq!(position(Key::Backend), SETTINGS.len() - 1, "a key has two rows or none");
    }

    #[test]
    fn the_first_variable_is_the_flag_in_capitals() {
        for setting in SETTINGS {
            let (Some(flag), Some(first)) = (setting.flag, setting.env.first()) else { continue };
            assert_eq!(*first, flag.to_uppercase().replace('-', "_"));
        }
    }

    #[test]
    fn every_row_says_what_it_means() {
        for setting in SETTINGS {
            assert!(setting.meaning.ends_with('.'), "{:?}", setting.key);
            assert!(setting.flag.is_some() || !setting.env.is_empty(), "{:?} cannot be set", setting.key);
        }
    }
}
