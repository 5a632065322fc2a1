//! The one table of settings: every flag, environment variable and annotation, with default, kind and meaning.
//!
//! Command-line definitions, the reference documentation and error messages are made from it, and so are [`Key`] and
//! the generators of the tests: a setting that is not in the table is nowhere.

use alloc::borrow::Cow;

/// What kind of value a setting takes: decides how a flag is written, completed and called in help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    /// An address of a host.
    Address,
    /// A boolean; as a flag it may stand alone.
    Bool,
    /// One of a closed set of words.
    Choice(&'static [&'static str]),
    /// A duration such as `500ms`.
    Duration,
    /// A list of group ids or names; may be empty.
    Groups,
    /// A list of user or group ids or names; where empty, another program decides.
    Ids,
    /// A list of interface names; may be empty.
    Interfaces,
    /// A range inside 127.0.0.0/8.
    LoopbackRange,
    /// A packet mark.
    Mark,
    /// The name of a user.
    Name,
    /// A path of a file or folder.
    Path,
    /// The port of a listener.
    Port,
    /// A list of ports and ranges of ports; may be empty.
    Ports,
    /// A list of address ranges; may be empty.
    Ranges,
    /// The number of a routing table.
    RouteTable,
}

impl SettingKind {
    /// What the value is called in help texts.
    #[must_use]
    pub const fn value_name(self) -> &'static str {
        match self {
            Self::Address => "ADDRESS",
            Self::Bool => "BOOL",
            Self::Choice(_) => "WORD",
            Self::Groups | Self::Ids => "IDS",
            Self::Interfaces => "INTERFACES",
            Self::Path => "PATH",
            Self::Port => "PORT",
            Self::Ports => "PORTS",
            Self::Ranges => "RANGES",
            Self::Duration | Self::LoopbackRange | Self::Mark | Self::Name | Self::RouteTable => "VALUE",
        }
    }

    /// Whether an empty environment variable says "none" rather than nothing.
    #[must_use]
    pub const fn empty_means_none(self) -> bool {
        match self {
            Self::Groups | Self::Interfaces | Self::Ports | Self::Ranges => true,
            Self::Address
            | Self::Bool
            | Self::Choice(_)
            | Self::Duration
            | Self::Ids
            | Self::LoopbackRange
            | Self::Mark
            | Self::Name
            | Self::Path
            | Self::Port
            | Self::RouteTable => false,
        }
    }
}

/// What `*` says as the value of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Star {
    /// Everything is captured.
    Everything,
    /// Everything would be excluded, which is refused: to capture nothing, list nothing.
    Nothing,
    /// Nothing at all; it is refused.
    Refused,
}

/// What a setting is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// The redirection: a [`Redirect`](crate::Redirect) depends on it.
    Plan,
    /// How a program carries it out.
    Run,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Setting {
    /// Which setting this is.
    pub key: Key,
    /// What it does, for people.
    pub meaning: &'static str,
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
    pub kind: SettingKind,
    /// What `*` says.
    pub star: Star,
    /// The value if unset.
    pub default: &'static str,
    /// The value the CNI plugin takes for a pod that sets nothing, where it differs from `default`.
    pub pod_default: Option<&'static str>,
    /// What it is about.
    pub part: Part,
}

impl Setting {
    /// A row with a key, a meaning and a kind, and nothing else. A boolean is false by default.
    const fn row(key: Key, meaning: &'static str, kind: SettingKind) -> Self {
        Self {
            key,
            meaning,
            flag: None,
            short: None,
            env: &[],
            annotations: &[],
            proxy_env: None,
            kind,
            star: Star::Refused,
            default: if matches!(kind, SettingKind::Bool) { "false" } else { "" },
            pod_default: None,
            part: Part::Plan,
        }
    }

    /// The name under which most people set it: its flag with dashes, else its first variable, else its annotation.
    #[must_use]
    pub fn name(&self) -> Cow<'static, str> {
        match self.flag {
            Some(flag) => Cow::Owned(alloc::format!("--{flag}")),
            None => Cow::Borrowed(self.first_name()),
        }
    }

    /// The same, a flag without its dashes.
    pub(crate) fn first_name(&self) -> &'static str {
        let names = self.flag.iter().chain(self.env).chain(self.annotations).chain(&self.proxy_env);
        names.copied().next().unwrap_or_default()
    }
}

/// Makes the keys and their rows from one list, so that neither can be without the other.
macro_rules! settings {
    ($($key:ident {
        meaning: $meaning:literal,
        kind: $kind:expr,
        $($field:ident: $value:expr,)*
    })+
    ; ambient {$($ambient_key:ident {
        meaning: $ambient_meaning:literal,
        kind: $ambient_kind:expr,
        $($ambient_field:ident: $ambient_value:expr,)*
    })+}) => {
        /// Names a setting; each is explained by its row in [`Setting::ALL`] or [`Setting::AMBIENT`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Key {
            $(#[doc = $meaning] $key,)+
            $(#[doc = $ambient_meaning] $ambient_key,)+
        }

        impl Key {
            /// All of [`Setting::ALL`], in its order.
            pub const ALL: &'static [Self] = &[$(Self::$key),+];

            /// This setting's row.
            #[must_use]
            pub const fn setting(self) -> &'static Setting {
                match self {
                    $(Self::$key => &const { Setting { $($field: $value,)* ..Setting::row(Self::$key, $meaning, $kind) } },)+
                    $(Self::$ambient_key => &const { Setting { $($ambient_field: $ambient_value,)* ..Setting::row(Self::$ambient_key, $ambient_meaning, $ambient_kind) } },)+
                }
            }
        }

        impl Setting {
            /// Every setting of a sidecar, in the order in which the documentation lists them.
            pub const ALL: &'static [Self] = &[$(*Key::$key.setting()),+];

            /// Every setting of ambient mode.
            pub const AMBIENT: &'static [Self] = &[$(*Key::$ambient_key.setting()),+];
        }
    };
}

settings! {
    ProxyPort {
        meaning: "Port the proxy listens on for outbound connections.",
        kind: SettingKind::Port,
        flag: Some("envoy-port"),
        short: Some('p'),
        default: "15001",
    }
    InboundCapturePort {
        meaning: "Port the proxy listens on for inbound connections.",
        kind: SettingKind::Port,
        flag: Some("inbound-capture-port"),
        short: Some('z'),
        env: &["INBOUND_CAPTURE_PORT"],
        default: "15006",
    }
    InboundTunnelPort {
        meaning: "Port of tunnelled inbound connections (HBONE); it is never captured.",
        kind: SettingKind::Port,
        flag: Some("inbound-tunnel-port"),
        short: Some('e'),
        env: &["INBOUND_TUNNEL_PORT"],
        default: "15008",
    }
    ProxyUid {
        meaning: "User ids exempt from capture as the proxy's, separated by commas. Where empty: the id of the user ENVOY_USER, else 1337. Of a pod, runAsUser of container istio-proxy, else of the pod; 0 counts as unset.",
        kind: SettingKind::Ids,
        flag: Some("proxy-uid"),
        short: Some('u'),
        env: &["PROXY_UID"],
    }
    ProxyGid {
        meaning: "Group ids exempt from capture as the proxy's, separated by commas. Where empty: the same as the user ids. Of a pod, runAsGroup of container istio-proxy, else of the pod; 0 counts as unset.",
        kind: SettingKind::Ids,
        flag: Some("proxy-gid"),
        short: Some('g'),
        env: &["PROXY_GID"],
    }
    ProxyUser {
        meaning: "Name of the proxy's user, looked up in /etc/passwd only while no user id is given.",
        kind: SettingKind::Name,
        env: &["ENVOY_USER"],
        default: "istio-proxy",
    }
    InterceptionMode {
        meaning: "How inbound connections reach the proxy: REDIRECT (rewritten destination, the default) or TPROXY (the client's source address is kept).",
        kind: SettingKind::Choice(&["REDIRECT", "TPROXY"]),
        flag: Some("istio-inbound-interception-mode"),
        short: Some('m'),
        env: &["ISTIO_INBOUND_INTERCEPTION_MODE"],
        annotations: &["sidecar.istio.io/interceptionMode"],
        pod_default: Some("REDIRECT"),
    }
    InboundPorts {
        meaning: "Inbound ports to capture: a list such as 80,8000:8099, * for all, empty for none.",
        kind: SettingKind::Ports,
        flag: Some("istio-inbound-ports"),
        short: Some('b'),
        env: &["ISTIO_INBOUND_PORTS"],
        annotations: &["traffic.sidecar.istio.io/includeInboundPorts"],
        star: Star::Everything,
        pod_default: Some("*"),
    }
    InboundExcludePorts {
        meaning: "Inbound ports not to capture; used only where all ports are captured. To what a pod's annotation lists, the proxy's own ports 15020, 15021 and 15090 are added.",
        kind: SettingKind::Ports,
        flag: Some("istio-local-exclude-ports"),
        short: Some('d'),
        env: &["ISTIO_LOCAL_EXCLUDE_PORTS"],
        annotations: &["traffic.sidecar.istio.io/excludeInboundPorts"],
        star: Star::Nothing,
        pod_default: Some("15020,15021,15090"),
    }
    ExcludeInterfaces {
        meaning: "Interfaces excluded in both directions.",
        kind: SettingKind::Interfaces,
        flag: Some("istio-exclude-interfaces"),
        short: Some('c'),
        env: &["ISTIO_EXCLUDE_INTERFACES"],
        annotations: &["traffic.sidecar.istio.io/excludeInterfaces"],
    }
    OutboundRanges {
        meaning: "Destinations to capture: a list of ranges such as 10.0.0.0/8,fd00::/8, * for all, empty for none.",
        kind: SettingKind::Ranges,
        flag: Some("istio-service-cidr"),
        short: Some('i'),
        env: &["ISTIO_SERVICE_CIDR"],
        annotations: &["traffic.sidecar.istio.io/includeOutboundIPRanges"],
        star: Star::Everything,
        pod_default: Some("*"),
    }
    OutboundExcludeRanges {
        meaning: "Destinations not to capture: a list of ranges.",
        kind: SettingKind::Ranges,
        flag: Some("istio-service-exclude-cidr"),
        short: Some('x'),
        env: &["ISTIO_SERVICE_EXCLUDE_CIDR"],
        annotations: &["traffic.sidecar.istio.io/excludeOutboundIPRanges"],
        star: Star::Nothing,
    }
    OutboundPorts {
        meaning: "Outbound ports to capture whatever the destination.",
        kind: SettingKind::Ports,
        flag: Some("istio-outbound-ports"),
        short: Some('q'),
        env: &["ISTIO_OUTBOUND_PORTS"],
        annotations: &["traffic.sidecar.istio.io/includeOutboundPorts"],
    }
    OutboundExcludePorts {
        meaning: "Outbound ports not to capture, TCP and UDP.",
        kind: SettingKind::Ports,
        flag: Some("istio-local-outbound-ports-exclude"),
        short: Some('o'),
        env: &["ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE"],
        annotations: &["traffic.sidecar.istio.io/excludeOutboundPorts"],
        star: Star::Nothing,
        pod_default: Some("15020"),
    }
    VirtualInterfaces {
        meaning: "Virtual interfaces whose inbound traffic is treated as outbound: virtual machines or containers inside the pod.",
        kind: SettingKind::Interfaces,
        flag: Some("kube-virt-interfaces"),
        short: Some('k'),
        env: &["KUBE_VIRT_INTERFACES"],
        annotations: &["istio.io/reroute-virtual-interfaces", "traffic.sidecar.istio.io/kubevirtInterfaces"],
    }
    TproxyMark {
        meaning: "fwmark of inbound TPROXY packets.",
        kind: SettingKind::Mark,
        flag: Some("istio-inbound-tproxy-mark"),
        short: Some('t'),
        env: &["ISTIO_INBOUND_TPROXY_MARK"],
        default: "1337",
    }
    TproxyRouteTable {
        meaning: "Routing table that delivers inbound TPROXY packets locally.",
        kind: SettingKind::RouteTable,
        flag: Some("istio-inbound-tproxy-route-table"),
        short: Some('r'),
        env: &["ISTIO_INBOUND_TPROXY_ROUTE_TABLE"],
        default: "133",
    }
    RedirectDns {
        meaning: "Capture DNS queries to the servers of /etc/resolv.conf, to port 15053.",
        kind: SettingKind::Bool,
        flag: Some("redirect-dns"),
        env: &["REDIRECT_DNS", "ISTIO_META_DNS_CAPTURE"],
        proxy_env: Some("ISTIO_META_DNS_CAPTURE"),
    }
    CaptureAllDns {
        meaning: "With --redirect-dns: capture all queries to port 53, whatever the server.",
        kind: SettingKind::Bool,
        flag: Some("capture-all-dns"),
        env: &["CAPTURE_ALL_DNS"],
    }
    DropInvalid {
        meaning: "Drop inbound TCP packets that connection tracking finds invalid.",
        kind: SettingKind::Bool,
        flag: Some("drop-invalid"),
        env: &["DROP_INVALID", "INVALID_DROP"],
        proxy_env: Some("INVALID_DROP"),
    }
    StrictCapture {
        meaning: "Drop what would pass beside the proxy on a connection that was not captured: on one of the proxy's own, and on one opened over lo; program IPv6 as well, whatever the pod's addresses (docs/concepts/capture.md).",
        kind: SettingKind::Bool,
        flag: Some("strict-capture"),
        env: &["STRICT_CAPTURE"],
        annotations: &["traffic.sidecar.istio.io/strictCapture"],
    }
    DualStack {
        meaning: "Program IPv6 when the pod has any IPv6 address, not only when its first address is one.",
        kind: SettingKind::Bool,
        flag: Some("dual-stack"),
        env: &["DUAL_STACK", "ISTIO_DUAL_STACK"],
        proxy_env: Some("ISTIO_DUAL_STACK"),
    }
    OwnerGroups {
        meaning: "Groups whose outbound traffic is captured: ids or names of /etc/group, at most 64, * for all.",
        kind: SettingKind::Groups,
        env: &["ISTIO_OUTBOUND_OWNER_GROUPS"],
        star: Star::Everything,
        default: "*",
    }
    OwnerGroupsExclude {
        meaning: "Groups whose outbound traffic is not captured; used only where all groups are captured.",
        kind: SettingKind::Groups,
        env: &["ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE"],
    }
    LoopbackRange {
        meaning: "IPv4 loopback range whose traffic the application may exchange with itself.",
        kind: SettingKind::LoopbackRange,
        env: &["ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"],
        default: "127.0.0.1/32",
    }
    DryRun {
        meaning: "Print the plan on standard output and change nothing.",
        kind: SettingKind::Bool,
        flag: Some("dry-run"),
        short: Some('n'),
        env: &["DRY_RUN"],
        part: Part::Run,
    }
    DryRunFile {
        meaning: "File to which a dry run also appends the plan.",
        kind: SettingKind::Path,
        env: &["DRY_RUN_FILE_PATH"],
        part: Part::Run,
    }
    ProbePort {
        meaning: "Port the validation connects to.",
        kind: SettingKind::Port,
        flag: Some("iptables-probe-port"),
        env: &["IPTABLES_PROBE_PORT"],
        default: "15002",
        part: Part::Run,
    }
    ProbeTimeout {
        meaning: "How long the validation may take, such as 500ms or 5s.",
        kind: SettingKind::Duration,
        flag: Some("probe-timeout"),
        env: &["PROBE_TIMEOUT"],
        default: "5s",
        part: Part::Run,
    }
    TerminationLog {
        meaning: "File the validation's verdict is written to as one JSON object; the container's terminationMessagePath. Where empty, none.",
        kind: SettingKind::Path,
        flag: Some("termination-log"),
        env: &["TERMINATION_LOG"],
        default: "/dev/termination-log",
        part: Part::Run,
    }
    SkipRuleApply {
        meaning: "Do not program rules; with --run-validation: only validate.",
        kind: SettingKind::Bool,
        flag: Some("skip-rule-apply"),
        env: &["SKIP_RULE_APPLY"],
        part: Part::Run,
    }
    RunValidation {
        meaning: "Verify redirection with test traffic; exit 126 on failure.",
        kind: SettingKind::Bool,
        flag: Some("run-validation"),
        env: &["RUN_VALIDATION"],
        part: Part::Run,
    }
    NetworkNamespace {
        meaning: "Network namespace to work in, such as /run/netns/NAME. Where empty, the one the program runs in. Entering another needs CAP_SYS_ADMIN; files such as /etc/resolv.conf stay the program's own.",
        kind: SettingKind::Path,
        flag: Some("network-namespace"),
        env: &["NETWORK_NAMESPACE"],
        part: Part::Run,
    }
    CniMode {
        meaning: "Work as for the CNI plugin.",
        kind: SettingKind::Bool,
        flag: Some("cni-mode"),
        env: &["CNI_MODE"],
        part: Part::Run,
    }
    Reconcile {
        meaning: "Replace rules of another configuration.",
        kind: SettingKind::Bool,
        flag: Some("reconcile"),
        env: &["RECONCILE"],
        part: Part::Run,
    }
    CleanupOnly {
        meaning: "Remove everything an earlier run programmed, whatever its backend and settings.",
        kind: SettingKind::Bool,
        flag: Some("cleanup-only"),
        env: &["CLEANUP_ONLY"],
        part: Part::Run,
    }
    ForceApply {
        meaning: "Program the rules again even when they are in force.",
        kind: SettingKind::Bool,
        flag: Some("force-apply"),
        env: &["FORCE_APPLY"],
        part: Part::Run,
    }
    NativeNftables {
        meaning: "Program native nftables tables (inet istio-proxy-*) instead of iptables rules.",
        kind: SettingKind::Bool,
        flag: Some("native-nftables"),
        env: &["NATIVE_NFTABLES"],
        part: Part::Run,
    }
    NftSets {
        meaning: "With native nftables: gather long lists of ports and ranges in sets, so that a packet's cost does not grow with them.",
        kind: SettingKind::Bool,
        flag: Some("nft-sets"),
        env: &["NFT_SETS"],
        part: Part::Run,
    }
    ForceIptablesBinary {
        meaning: "The variant of iptables to use: legacy or nft. Where empty, the one the namespace uses already, else nft.",
        kind: SettingKind::Choice(&["legacy", "nft"]),
        flag: Some("force-iptables-binary"),
        env: &["FORCE_IPTABLES_BINARY"],
        part: Part::Run,
    }
    Backend {
        meaning: "What programs iptables rules: netlink (one transaction, no helper program), restore (iptables-restore and ip6tables-restore), or auto: netlink, unless the kernel has no nf_tables or the namespace uses iptables-legacy.",
        kind: SettingKind::Choice(&["auto", "netlink", "restore"]),
        flag: Some("backend"),
        env: &["BACKEND"],
        default: "auto",
        part: Part::Run,
    }
    ; ambient {
        Ambient {
            meaning: "Capture for ambient mode: the node's ztunnel listens in the pod's network namespace.",
            kind: SettingKind::Bool,
            flag: Some("ambient"),
        }
        AmbientIpv6 {
            meaning: "Capture IPv6 as well as IPv4.",
            kind: SettingKind::Bool,
            flag: Some("ipv6"),
            env: &["AMBIENT_IPV6"],
            default: "true",
        }
        AmbientDnsCapture {
            meaning: "Capture DNS queries to port 53, to ztunnel's port 15053.",
            kind: SettingKind::Bool,
            flag: Some("redirect-dns"),
            env: &["AMBIENT_DNS_CAPTURE"],
        }
        AmbientDnsOverride {
            meaning: "The pod's own choice about DNS capture, which overrides the node's. Where empty, none.",
            kind: SettingKind::Bool,
            flag: Some("dns-proxy"),
            annotations: &["ambient.istio.io/dns-capture"],
            default: "",
        }
        AmbientVirtualInterfaces {
            meaning: "Virtual interfaces whose inbound traffic is treated as outbound: virtual machines or containers inside the pod.",
            kind: SettingKind::Interfaces,
            flag: Some("virtual-interfaces"),
            annotations: &["istio.io/reroute-virtual-interfaces"],
        }
        AmbientIngress {
            meaning: "Do not capture inbound connections: the pod is a gateway that clients reach from outside the mesh.",
            kind: SettingKind::Bool,
            flag: Some("ingress"),
            annotations: &["ambient.istio.io/bypass-inbound-capture"],
        }
        AmbientCaptureScope {
            meaning: "Whether pods may limit by annotation what is captured of their traffic.",
            kind: SettingKind::Bool,
            flag: Some("capture-scope"),
            env: &["AMBIENT_CAPTURE_SCOPE"],
        }
        AmbientOutboundRanges {
            meaning: "Destinations to capture: a list of ranges such as 10.0.0.0/8,fd00::/8, * for all, empty for none.",
            kind: SettingKind::Ranges,
            flag: Some("istio-service-cidr"),
            annotations: &["traffic.istio.io/includeOutboundIPRanges"],
            star: Star::Everything,
            default: "*",
        }
        AmbientOutboundExcludeRanges {
            meaning: "Destinations not to capture: a list of ranges.",
            kind: SettingKind::Ranges,
            flag: Some("istio-service-exclude-cidr"),
            annotations: &["traffic.istio.io/excludeOutboundIPRanges"],
            star: Star::Nothing,
        }
        AmbientOutboundPorts {
            meaning: "Outbound ports to capture whatever the destination.",
            kind: SettingKind::Ports,
            flag: Some("istio-outbound-ports"),
            annotations: &["traffic.istio.io/includeOutboundPorts"],
        }
        AmbientOutboundExcludePorts {
            meaning: "Outbound ports not to capture, TCP and UDP.",
            kind: SettingKind::Ports,
            flag: Some("istio-local-outbound-ports-exclude"),
            annotations: &["traffic.istio.io/excludeOutboundPorts"],
            star: Star::Nothing,
        }
        AmbientInboundPorts {
            meaning: "Inbound ports to capture: a list such as 80,8000:8099, * for all, empty for none. Port 15008 is never captured.",
            kind: SettingKind::Ports,
            flag: Some("istio-inbound-ports"),
            annotations: &["traffic.istio.io/includeInboundPorts"],
            star: Star::Everything,
            default: "*",
        }
        AmbientInboundExcludePorts {
            meaning: "Inbound ports not to capture; used only where all ports are captured.",
            kind: SettingKind::Ports,
            flag: Some("istio-local-exclude-ports"),
            annotations: &["traffic.istio.io/excludeInboundPorts"],
            star: Star::Nothing,
        }
        AmbientExcludeInterfaces {
            meaning: "Interfaces excluded in both directions.",
            kind: SettingKind::Interfaces,
            flag: Some("istio-exclude-interfaces"),
            annotations: &["traffic.istio.io/excludeInterfaces"],
        }
        AmbientProbeV4 {
            meaning: "The source address that the node gives to the kubelet's probes over IPv4, so that pods' rules recognize them: one that no host has.",
            kind: SettingKind::Address,
            flag: Some("host-probe-snat-ip"),
            env: &["HOST_PROBE_SNAT_IP"],
            default: "169.254.7.127",
        }
        AmbientProbeV6 {
            meaning: "The same over IPv6.",
            kind: SettingKind::Address,
            flag: Some("host-probe-snat-ipv6"),
            env: &["HOST_PROBE_SNAT_IPV6"],
            default: "fd16:9254:7127:1337:ffff:ffff:ffff:ffff",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique() {
        are_unique(Setting::ALL);
        are_unique(Setting::AMBIENT);
    }

    fn are_unique(settings: &[Setting]) {
        let mut seen = BTreeSet::new();
        for setting in settings {
            assert!(seen.insert(setting.flag.map_or_else(|| std::format!("{:?}", setting.key), Into::into)));
            if let Some(short) = setting.short {
                assert!(seen.insert(short.to_string()), "-{short} twice");
            }
            for name in setting.env.iter().chain(setting.annotations) {
                assert!(seen.insert((*name).into()), "{name} twice");
            }
        }
    }

    #[test]
    fn the_first_variable_is_the_flag_in_capitals() {
        for setting in Setting::ALL {
            let (Some(flag), Some(first)) = (setting.flag, setting.env.first()) else { continue };
            assert_eq!(*first, flag.to_uppercase().replace('-', "_"));
        }
    }

    #[test]
    fn every_key_has_the_row_in_its_place() {
        assert_eq!(Key::ALL.len(), Setting::ALL.len());
        for (key, setting) in Key::ALL.iter().zip(Setting::ALL) {
            assert_eq!((*key, setting.meaning), (setting.key, key.setting().meaning));
        }
    }

    #[test]
    fn a_setting_may_have_nothing_but_an_annotation() {
        let row = Setting {
            annotations: &["traffic.sidecar.istio.io/example"],
            ..Setting::row(Key::ProxyPort, "Only pods say this.", SettingKind::Bool)
        };
        assert_eq!(row.name(), "traffic.sidecar.istio.io/example");
        let row = Setting { proxy_env: Some("EXAMPLE"), annotations: &[], ..row };
        assert_eq!(row.name(), "EXAMPLE");
    }

    #[test]
    fn help_says_what_a_value_is() {
        for (key, name) in [
            (Key::ProxyPort, "PORT"),
            (Key::InboundPorts, "PORTS"),
            (Key::OutboundRanges, "RANGES"),
            (Key::ExcludeInterfaces, "INTERFACES"),
            (Key::InterceptionMode, "WORD"),
            (Key::DualStack, "BOOL"),
            (Key::OwnerGroups, "IDS"),
            (Key::AmbientProbeV6, "ADDRESS"),
        ] {
            assert_eq!(key.setting().kind.value_name(), name, "{key:?}");
        }
    }

    #[test]
    fn every_row_says_what_it_means() {
        for setting in Setting::ALL.iter().chain(Setting::AMBIENT) {
            assert!(setting.meaning.ends_with('.'), "{:?}", setting.key);
            assert!(!setting.name().is_empty(), "{:?} cannot be set", setting.key);
        }
    }
}
