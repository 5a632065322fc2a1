//! TraceRules and routes of other programs whose effect is easily misjudged: marks from hook to hook, connection tracking's place among the
//! priorities, equal priorities, hooks below IP, routes. Each case is set up in a pod, packets are really sent, and three have to agree: the
//! kernel, the trace of what is in force, and CHECK, which names something if captured packets are lost, and nothing if none is.
//!
//! Each is played in one of its modes, or in all with SAMPLES=all. ONLY=P4 plays the cases whose names begin so in all of theirs, TRACES=1 shows the whole traces of those that are wrong.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::arrivals::{Ground, ROUTED, SentPacket, agrees, elsewhere, is_unsent, link_local};
use e2e::iptables::in_parallel;
use e2e::iptables::mesh::{loopback, passthrough};
use e2e::iptables::packets::{Arrived, FORMS, Said, plan, resolver};
use e2e::traffic::PROXY_ID;
use netns_apply::{ApplyOptions, Live, Mismatch, Snapshot, apply, verify};
use packet_trace::{Detail, Fate, Packet, TraceRules, interference::Severity};
use redirect_core::{Family, RulePlan, settings::Key};
use test_support::netns::{client_address, pod_address, remote_address};
use test_support::sample;

const THREADS: usize = 4;
/// A packet that is to arrive is waited for this long.
const PATIENCE: Duration = Duration::from_secs(20);

/// How the pod is redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Redirect,
    Tproxy,
    Native,
    NativeTproxy,
    /// By iptables-legacy.
    Legacy,
    LegacyTproxy,
    /// REDIRECT with strict capture.
    Strict,
    /// Native nftables of a plan for IPv4 alone, beside which the pod has an IPv6 address.
    NativeV4,
    /// REDIRECT with all DNS queries.
    Dns,
    /// Native nftables of the same with those to the servers of `resolv.conf`.
    NativeDnsServers,
}
use Mode::{
    Dns, Legacy, LegacyTproxy, Native, NativeDnsServers, NativeTproxy, NativeV4, Redirect, Strict, Tproxy,
};

const ALL: &[Mode] = &[Redirect, Tproxy, Native, NativeTproxy, Legacy, LegacyTproxy];

impl Mode {
    fn said(self) -> Said {
        let mut said: Said = [(Key::InboundPorts, "*"), (Key::OutboundRanges, "*")].into();
        if self != NativeV4 {
            said.insert(Key::DualStack, "true");
        }
        if matches!(self, Tproxy | NativeTproxy | LegacyTproxy) {
            said.insert(Key::InterceptionMode, "TPROXY");
        }
        if self == Strict {
            said.insert(Key::StrictCapture, "true");
        }
        if self.captures_dns() {
            said.insert(Key::RedirectDns, "true");
        }
        if self == Dns {
            said.insert(Key::CaptureAllDns, "true");
        }
        said
    }

    const fn captures_dns(self) -> bool {
        matches!(self, Dns | NativeDnsServers)
    }

    /// The packets to send.
    fn probes(self) -> Vec<Probe> {
        if self.captures_dns() { [&PROBES[..], &QUERIES].concat() } else { PROBES.into() }
    }

    fn options(self) -> ApplyOptions {
        let name = match self {
            Redirect | Tproxy | Strict | Dns => "netlink",
            Native | NativeTproxy | NativeV4 | NativeDnsServers => "native nftables",
            Legacy | LegacyTproxy => "iptables-legacy",
        };
        let (_, backend, native_form) = FORMS.into_iter().find(|form| form.0 == name).expect("is a form");
        ApplyOptions::default().backend(backend).native_form(native_form)
    }
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    /// From outside to the application.
    In,
    In6,
    /// From the application to a service far away, at port 80 and 443.
    Out,
    Out443,
    Out6,
    /// From the proxy to the application, at the pod's address.
    ToSelf,
    /// The same from a process that has the proxy's group alone: captured by TPROXY, which marks do, and not by REDIRECT.
    GroupToSelf443,
    /// From the application to itself, which no plan captures.
    AppToSelf,
    /// From the proxy to a service far away, which no plan captures.
    ByProxy443,
    /// A query of the application to a resolver in the pod that `resolv.conf` names, ...
    Query,
    Query6,
    /// ... over TCP, ...
    QueryByTcp,
    QueryByTcp6,
    /// ... and to one that it does not name.
    QueryOther,
    /// From the application to a service behind the tunnel t0.
    OutByTunnel,
    /// To a service far away with a mark that the application sets, ...
    OutMarked,
    /// ... and in a datagram, a query.
    QueryMarked,
    /// From outside to the proxy's own port for tunnels, and to the listener that the plan captures for.
    InTunnel,
    InListener,
    /// From the proxy to its own port for tunnels, and from the application to that of another proxy.
    ToTunnel,
    OutToTunnel,
    /// From a neighbour to the application at the pod's link-local address, and back.
    InByLink,
    OutByLink,
    /// From outside, and from the application, to an address that the pod has by a route to a prefix.
    InRouted,
    ToRouted,
    /// From the proxy to the application, as it connects there.
    ToApp,
}
use Probe::{
    AppToSelf, ByProxy443, GroupToSelf443, In, In6, InByLink, InListener, InRouted, InTunnel, Out, Out6,
    Out443, OutByLink, OutByTunnel, OutMarked, OutToTunnel, Query, Query6, QueryByTcp, QueryByTcp6,
    QueryMarked, QueryOther, ToApp, ToRouted, ToSelf, ToTunnel,
};

/// Those that are sent in every case, ...
const PROBES: [Probe; 9] = [In, In6, Out, Out443, Out6, ToSelf, GroupToSelf443, AppToSelf, ByProxy443];
/// ... and those that are sent where DNS is captured, too.
const QUERIES: [Probe; 5] = [Query, Query6, QueryByTcp, QueryByTcp6, QueryOther];

impl Probe {
    fn packet(self) -> Packet {
        let v6 = matches!(self, In6 | Out6 | Query6 | QueryByTcp6);
        let at = |ip, port| SocketAddr::new(ip, port);
        let (pod, far) = (pod_address(v6), remote_address(v6));
        let local = |user, to| Packet::from_pod(user, user, at(pod, 0), to);
        let outside = |port| Packet::from_outside(at(client_address(v6), 0), at(pod, port)).by("eth0");
        let query = |to| Packet::from_pod(1000, 1000, at(loopback(v6), 0), at(to, 53));
        match self {
            In | In6 => outside(8080),
            Out | Out6 => local(1000, at(far, 80)).by("eth0"),
            Out443 => local(1000, at(far, 443)).by("eth0"),
            ToSelf => local(PROXY_ID, at(pod, 8080)).by("lo"),
            GroupToSelf443 => Packet::from_pod(1000, PROXY_ID, at(pod, 0), at(pod, 443)).by("lo"),
            AppToSelf => local(1000, at(pod, 8080)).by("lo"),
            ByProxy443 => local(PROXY_ID, at(far, 443)).by("eth0"),
            Query | Query6 => query(resolver(v6)).over_udp(),
            QueryByTcp | QueryByTcp6 => query(resolver(v6)),
            QueryOther => query([127, 0, 0, 11].into()).over_udp(),
            OutByTunnel => local(1000, at(elsewhere(false), 80)).by("t0"),
            OutMarked => local(1000, at(far, 80)).by("eth0").with_mark(7),
            QueryMarked => local(1000, at(far, 53)).by("eth0").over_udp().with_mark(7),
            InTunnel => outside(15008),
            InListener => outside(15006),
            ToTunnel => local(PROXY_ID, at(pod, 15008)).by("lo"),
            OutToTunnel => local(1000, at(far, 15008)).by("eth0"),
            InByLink => Packet::from_outside(at(link_local(false), 0), at(link_local(true), 8080)).by("eth0"),
            OutByLink => {
                Packet::from_pod(1000, 1000, at(link_local(true), 0), at(link_local(false), 80)).by("eth0")
            }
            InRouted => Packet::from_outside(at(client_address(false), 0), at(ROUTED, 8080)).by("eth0"),
            ToRouted => local(1000, at(ROUTED, 8080)).by("lo"),
            ToApp => Packet::from_pod(PROXY_ID, PROXY_ID, at(passthrough(false), 0), at(pod, 8081)).by("lo"),
        }
    }
}

/// What another program does, and which packets do not end where the plan alone would have them end.
#[derive(Clone, Copy)]
struct Case {
    /// The finding.
    name: &'static str,
    modes: &'static [Mode],
    /// What is there before the plan is put in force.
    before: &'static str,
    /// What comes after.
    after: &'static str,
    /// By the kernel.
    lost: &'static [Probe],
    /// Whether the kernel does not tell all that matters, so that neither the trace nor CHECK can be sure.
    untold: bool,
    /// Whether CHECK may name what is missing of the plan itself although no packet of these is lost.
    lacks: bool,
    /// Packets that are sent in this case alone.
    also: &'static [Probe],
}

const fn case(
    name: &'static str,
    modes: &'static [Mode],
    after: &'static str,
    lost: &'static [Probe],
) -> Case {
    Case { name, modes, before: "", after, lost, untold: false, lacks: false, also: &[] }
}

/// One of which neither the trace nor CHECK can be sure.
const fn maybe(
    name: &'static str,
    modes: &'static [Mode],
    after: &'static str,
    lost: &'static [Probe],
) -> Case {
    Case { untold: true, ..case(name, modes, after, lost) }
}

/// All that leaves the application or the proxy by way of `output` in IPv4, ...
const OUTPUT: &[Probe] = &[Out, Out443, ToSelf, AppToSelf, ByProxy443];
/// ... and in both families.
const OUTPUTS: &[Probe] = &[Out, Out443, Out6, ToSelf, AppToSelf, ByProxy443];
const NONE: &[Probe] = &[];
/// All that is captured, ...
const CAPTURED: &[Probe] = &[In, In6, Out, Out443, Out6, ToSelf];
/// ... by translating addresses.
const REDIRECTING: &[Mode] = &[Redirect, Native, Legacy];
const NFT_NOTRACK_FIRST: &str = "nft 'table inet f {
    chain o { type filter hook output priority -300; notrack udp dport 1 counter; }
    chain p { type filter hook prerouting priority -300; notrack udp dport 1 counter; } }'";
const NFT_FAILING_LOAD: &str = "nft 'table inet f {
    chain o { type filter hook output priority -300; meta mark set ct id return; notrack; }
    chain p { type filter hook prerouting priority -300; meta mark set ct id return; notrack; } }'";
const NFT_FILLED_SET: &str = "nft add set ip nat s '{ type ipv4_addr; flags dynamic; size 100; }'
    nft insert rule ip nat OUTPUT ip daddr @s accept
    nft insert rule ip nat OUTPUT add @s '{ ip daddr }'";
const NFT_TRANSLATED: &str = "nft 'table ip f {
    chain o { type filter hook output priority 50; ct status dnat accept; ct state established accept; meta l4proto tcp drop; } }'";

/// A tunnel without an address, by which some of what the pod sends leaves.
const TUNNEL: &str = "ip tuntap add dev t0 mode tun; ip link set t0 up; ip route add 203.0.113.0/24 dev t0";
const MARKED: &str = "$ipt -t nat -I OUTPUT -m mark --mark 0x1/0x1 -j ACCEPT";
const MARKED_MASQUERADE: &str = "$ipt -t nat -N KUBE-POSTROUTING
    $ipt -t nat -A KUBE-POSTROUTING -m mark ! --mark 0x1/0x1 -j RETURN
    $ipt -t nat -A KUBE-POSTROUTING -j MARK --xor-mark 0x1
    $ipt -t nat -A KUBE-POSTROUTING -j MASQUERADE
    $ipt -t nat -I POSTROUTING -j KUBE-POSTROUTING";

const KUBE_MARK_DROP: &str = "$ipt -t nat -N KUBE-MARK-DROP
    $ipt -t nat -A KUBE-MARK-DROP -j MARK --or-mark 0x8000
    $ipt -t nat -I OUTPUT -p tcp --dport 443 -j KUBE-MARK-DROP
    $ipt -A OUTPUT -m mark --mark 0x8000/0x8000 -j DROP";
const MARK_443: &str = "$ipt -t mangle -A OUTPUT -p tcp --dport 443 -j MARK --set-mark 7
    $ipt -A OUTPUT -m mark --mark 7 -j DROP";
const MARK_IN: &str = "$ipt -t mangle -I PREROUTING -i eth0 -p tcp -j MARK --set-mark 7
    $ipt -A INPUT -m mark --mark 7 -j DROP";
const NFT_MARK_443: &str = "nft 'table inet theirs {
    chain a { type filter hook output priority -149; tcp dport 443 meta mark set 7; }
    chain b { type filter hook output priority 0; meta mark 7 drop; } }'";
const NFT_MARK_IN: &str = "nft 'table inet theirs {
    chain a { type filter hook prerouting priority -160; iifname eth0 meta l4proto tcp meta mark set 7; }
    chain b { type filter hook input priority 0; meta mark 7 drop; } }'";
const NFT_MARK_IN_AFTER: &str = "nft 'table inet theirs {
    chain a { type filter hook prerouting priority -140; iifname eth0 meta l4proto tcp meta mark set 7; }
    chain b { type filter hook input priority 0; meta mark 7 drop; } }'";
const CONNMARK_BYPASS: &str = "$ipt -t mangle -A OUTPUT -p tcp -j CONNMARK --set-mark 7
    $ipt -t nat -I OUTPUT -p tcp -m connmark --mark 7 -j RETURN";
const CONNMARK_DROP: &str = "$ipt -t mangle -A OUTPUT -p tcp --dport 443 -j CONNMARK --set-mark 7
    $ipt -A OUTPUT -m connmark --mark 7 -j DROP";
const CONNMARK_SAVE: &str = "$ipt -t mangle -A OUTPUT -p tcp --dport 443 -j MARK --set-mark 0x17
    $ipt -t mangle -A OUTPUT -j CONNMARK --save-mark --mask 0xf
    $ipt -A OUTPUT -m connmark --mark 7 -j DROP";
const CONNMARK_RESTORE: &str = "$ipt -t mangle -I PREROUTING -i eth0 -p tcp -j CONNMARK --set-mark 7
    $ipt -t mangle -I INPUT -j CONNMARK --restore-mark
    $ipt -A INPUT -m mark --mark 7 -j DROP";
const NFT_CONNMARK: &str = "nft 'table inet theirs {
    chain a { type filter hook output priority -150; tcp dport 443 ct mark set 0x17; }
    chain b { type filter hook output priority -120; meta mark set ct mark & 0x0000000f; }
    chain c { type filter hook output priority 0; meta mark 7 drop; } }'";
const NFT_CONNMARK_BYPASS: &str = "nft 'table inet theirs {
    chain a { type filter hook output priority -150; tcp dport 443 meta mark set 7 ct mark set meta mark; }
    chain b { type nat hook output priority -110; ct mark 7 dnat ip to 198.51.100.2; } }'";

const DROP_UNMARKED: &str = "$ipt -t mangle -A OUTPUT -p tcp -j MARK --set-mark 7
    $ipt -A OUTPUT -p tcp -m mark ! --mark 7 -j DROP";
const DROP_UNCONNMARKED: &str = "$ipt -t mangle -A OUTPUT -p tcp -j CONNMARK --set-mark 7
    $ipt -A OUTPUT -p tcp -m connmark ! --mark 7 -j DROP";
const NFT_DROP_UNMARKED: &str = "nft 'table inet theirs {
    chain a { type filter hook output priority -140; meta l4proto tcp meta mark set 7 ct mark set 8; }
    chain b { type filter hook output priority 0; meta l4proto tcp meta mark != 7 drop; }
    chain c { type filter hook output priority 1; meta l4proto tcp ct mark != 8 drop; } }'";

/// The same before TPROXY's own mark, which the connections of the proxy to its pod get.
const NFT_DROP_REMARKED: &str = "nft 'table inet theirs {
    chain a { type filter hook output priority -151; meta l4proto tcp meta mark set 7; }
    chain b { type filter hook output priority 0; meta l4proto tcp meta mark != 7 drop; } }'";

const NFT_EARLY_INVALID: &str = "nft 'table inet theirs {
    chain out { type filter hook output priority -250; ct state vmap { invalid : drop }; } }'";
const NFT_EARLY_INVALID_IN: &str = "nft 'table inet theirs {
    chain in { type filter hook prerouting priority -250; ct state vmap { invalid : drop }; } }'";
const NFT_EARLY_POLICY: &str = "nft 'table ip theirs {
    chain out { type filter hook output priority -250; policy drop; ct state new,established accept; } }'";
const NFT_TRACKED: &str = "nft 'table inet theirs {
    chain out { type filter hook output priority -199; ct state vmap { invalid : drop, untracked : drop }; }
    chain in { type filter hook prerouting priority -199; policy drop; ct state new,established accept
        meta l4proto != tcp accept; } }'";

const EARLY: [&str; 4] = [
    "nft 'table inet theirs { chain out { type filter hook output priority -250; ct mark 0 drop; } }'",
    "nft 'table inet theirs { chain out { type filter hook output priority -250; ct state new drop; } }'",
    "nft 'table inet theirs { chain out { type filter hook output priority -250; ct direction original drop; } }'",
    "$ipt -t raw -A OUTPUT -p tcp -m connmark --mark 0 -j DROP",
];
const EARLY_IN: &str =
    "nft 'table inet theirs { chain in { type filter hook prerouting priority -250; iifname eth0 jump every
        iifname eth0 ct state new drop; }
    chain every { ct mark 0 drop
        ct direction original drop; } }'";

const LATE_NAT: &str = "nft 'table ip zz { chain out { type nat hook output priority -100; tcp dport { 80, 443 } redirect to :3128; } }'";

const ZONE_MARK: &str =
    "nft 'table inet theirs { chain out { type filter hook output priority -300; ct zone set 5
        ct mark 0 drop
        ct mark != 0 drop
        ct direction original drop
        ct state . ct mark { new . 0 } drop; } }'";
const TPROXY_V6: &str = "nft 'table inet theirs {
    chain in { type filter hook prerouting priority 10; iifname eth0 meta l4proto tcp tproxy ip6 to :3128 meta mark set 1 accept; } }'";
const NO_OWN_ADDRESS: &str = "ip route del local 10.1.0.2 table local";

const OWN_ADDRESS_ELSEWHERE: &str = "ip route del local 10.1.0.2 table local
    ip route add local 10.1.0.2 dev lo table 300; ip rule add pref 5 lookup 300";
/// The pod keeps what is for a network that it has not, and has not its own address.
const KEPT: &str = "ip route add local 198.51.100.0/24 dev lo table 216
    ip rule add pref 20000 to 198.51.100.0/24 lookup 216
    ip route del local 10.1.0.2 table local";
const MARKED_FOR_LATER: &str = "nft 'table ip theirs {
    chain out { type filter hook output priority -1; tcp dport 15001 ct mark set 0x539; }
    chain in { type filter hook input priority -149; tcp dport 15001 meta mark != 0x539 drop; } }'";

/// As Docker's resolver has it, and the same for IPv6.
const DNS_DNAT: &str = "iptables-nft -w -t nat -N DOCKER_OUTPUT
    iptables-nft -w -t nat -A DOCKER_OUTPUT -d 127.0.0.53 -p tcp --dport 53 -j DNAT --to-destination 127.0.0.53:81
    iptables-nft -w -t nat -A DOCKER_OUTPUT -d 127.0.0.53 -p udp --dport 53 -j DNAT --to-destination 127.0.0.53:5353
    iptables-nft -w -t nat -A OUTPUT -d 127.0.0.53 -j DOCKER_OUTPUT
    ip6tables-nft -w -t nat -A OUTPUT -d ::1 -p udp --dport 53 -j DNAT --to-destination [::1]:5353";
const NFT_DROP_RESOLVER: &str = "nft 'table inet theirs {
    chain out { type filter hook output priority -150; ip daddr 127.0.0.53 drop
        ip6 daddr ::1 udp dport 53 drop; } }'";
const DROP_OTHER: &str = "iptables-nft -w -t mangle -A OUTPUT -d 127.0.0.11 -j DROP";

const IPSET_MARK: &str = "ipset create m hash:ip skbinfo; ipset add m 10.1.0.2 skbmark 0x7
    $ipt -t mangle -A OUTPUT -p tcp -j SET --map-set m src --map-mark
    $ipt -t nat -I OUTPUT -m mark --mark 7 -j ACCEPT";
const NFT_SAME_SOURCE: &str =
    "nft 'table ip f { chain p { type nat hook postrouting priority 100; masquerade; }
    chain q { type filter hook postrouting priority 200; ct status snat accept; tcp dport 443 drop; } }'";
const NFT_LISTENER: &str =
    "nft 'table inet f { chain i { type filter hook input priority 0; meta skuid 0 drop; } }'";
const NFT_NOBODY: &str = "nft 'table inet f { chain p { type filter hook prerouting priority -160;
    meta l4proto tcp tproxy to :9999 meta mark set 1 accept; } }'";
const NFT_NO_STATE: &str = "nft 'table inet f { chain i { type filter hook input priority 0;
    ct state & 0x80000000 != 0 accept; tcp dport 15006 drop; } }'";
const NFT_QUOTAS: &str =
    "nft 'table inet f { set s { type inet_service; quota 1 bytes; elements = { 15006, 15001 }; }
    chain i { type filter hook input priority 0; tcp dport @s accept; tcp dport { 15001, 15006 } drop; } }'";
const BY_CLASS: &str = "ip rule add pref 10 tos 0x10 blackhole
    $ipt -t mangle -A OUTPUT -p tcp -j TOS --set-tos 0x10";
const ZONE_IN: &str = "$ipt -t raw -A PREROUTING -i eth0 -p tcp -j CT --zone 5";
const TO_PROXY: &str = "$ipt -t nat -I OUTPUT -p tcp -m owner ! --uid-owner 1337 ! --gid-owner 1337 -j REDIRECT --to-ports 15001";

/// What P16 sends.
const NEAR: &[Probe] =
    &[InTunnel, InListener, ToTunnel, OutToTunnel, InByLink, OutByLink, InRouted, ToRouted];
/// A network all of whose addresses are the pod's, which has none of them but by this route.
const ANY: &str = "ip route add local 192.0.2.0/24 dev lo";
const CLOSED: &str = "$ipt -A INPUT -p tcp --dport 15008 -j DROP";
const ACCEPT_BY_LINK: &str = "ip6tables-nft -w -t nat -I PREROUTING -d fe80::/10 -j ACCEPT
    ip6tables-nft -w -t nat -I OUTPUT -d fe80::/10 -j ACCEPT";
const ACCEPT_ROUTED: &str = "$ipt -t nat -I PREROUTING -d 192.0.2.0/24 -j ACCEPT";
const DIVERT_ROUTED: &str = "$ipt -t mangle -I PREROUTING -d 192.0.2.0/24 -j ACCEPT";

const CASES: &[Case] = &[
    // Marks from hook to hook.
    case("P1 nat and filter", &[Redirect, Tproxy, Legacy, LegacyTproxy], KUBE_MARK_DROP, &[Out443, ByProxy443]),
    // Where the mesh's rules have a table of their own its priority is the same. Theirs is asked first: it was added last.
    Case {
        untold: true,
        ..case("P1 nat and filter beside native rules", &[Native, NativeTproxy], KUBE_MARK_DROP, &[Out443, ByProxy443])
    },
    case("P1 mangle and filter", &[Redirect, Tproxy, Native, Legacy, LegacyTproxy], MARK_443, &[Out443, ByProxy443]),
    // TPROXY's mark is set at the same priority.
    Case { untold: true, ..case("P1 beside native TPROXY", &[NativeTproxy], MARK_443, &[Out443, ByProxy443]) },
    case("P1 inbound", &[Redirect, Native, Legacy], MARK_IN, &[In]),
    case("P1 inbound, TPROXY's mark comes after", &[Tproxy, LegacyTproxy], MARK_IN, NONE),
    Case { untold: true, ..case("P1 inbound, native TPROXY", &[NativeTproxy], MARK_IN, NONE) },
    case("P1 nft", &[Redirect, Tproxy, Native, NativeTproxy, Legacy], NFT_MARK_443, &[Out443, ByProxy443]),
    case("P1 nft inbound", &[Redirect, Native, Legacy], NFT_MARK_IN, &[In, In6]),
    case("P1 nft inbound, TPROXY's mark comes after", &[Tproxy, NativeTproxy, LegacyTproxy], NFT_MARK_IN, NONE),
    case("P1 nft inbound after TPROXY", &[Tproxy, NativeTproxy], NFT_MARK_IN_AFTER, &[In, In6]),
    // Marks of connections.
    case("P2 bypass", &[Redirect, Legacy], CONNMARK_BYPASS, &[Out, Out443, ToSelf]),
    case("P2 bypass of native rules", &[Native], CONNMARK_BYPASS, NONE),
    case("P2 bypass, inbound by TPROXY", &[Tproxy, LegacyTproxy], CONNMARK_BYPASS, &[Out, Out443, ToSelf]),
    case("P2 drop", ALL, CONNMARK_DROP, &[Out443, ByProxy443]),
    case("P2 saved", ALL, CONNMARK_SAVE, &[Out443, ByProxy443]),
    case("P2 restored", ALL, CONNMARK_RESTORE, &[In]),
    case("P2 nft", ALL, NFT_CONNMARK, &[Out443, ByProxy443]),
    case("P2 nft bypass", &[Redirect, Tproxy, Native, NativeTproxy], NFT_CONNMARK_BYPASS, &[Out443]),
    case("P3", &[Strict], "$ipt -I OUTPUT -p tcp -m connmark ! --mark 0 -o lo -j DROP", &[ToSelf, AppToSelf]),
    case("P4 marks", &[Redirect, Tproxy, Native, Legacy, LegacyTproxy], DROP_UNMARKED, NONE),
    // Their table has the same priority as the mesh's native one, and was added last.
    Case { untold: true, ..case("P4 marks, native TPROXY", &[NativeTproxy], DROP_UNMARKED, &[ToSelf]) },
    case("P4 connection marks", ALL, DROP_UNCONNMARKED, NONE),
    case("P4 nft", ALL, NFT_DROP_UNMARKED, NONE),
    case("P4 nft, TPROXY's mark comes after", &[Tproxy, NativeTproxy, LegacyTproxy], NFT_DROP_REMARKED, &[ToSelf]),
    // Before connection tracking.
    case("P5 output", ALL, "$ipt -t raw -A OUTPUT -m conntrack --ctstate INVALID -j DROP", OUTPUT),
    case("P5 output, state", ALL, "$ipt -t raw -A OUTPUT -m state --state INVALID -j DROP", OUTPUT),
    case("P5 output, not new", ALL, "$ipt -t raw -A OUTPUT -m conntrack ! --ctstate NEW -j DROP", OUTPUT),
    case("P5 prerouting", ALL, "$ipt -t raw -A PREROUTING -m conntrack --ctstate INVALID -j DROP", &[In]),
    case("P5 prerouting, state", ALL, "$ipt -t raw -A PREROUTING -i eth0 -m state ! --state NEW -j DROP", &[In]),
    case("P5 nft", ALL, NFT_EARLY_INVALID, OUTPUTS),
    case("P5 nft inbound", ALL, NFT_EARLY_INVALID_IN, &[In, In6]),
    case("P5 nft policy", ALL, NFT_EARLY_POLICY, OUTPUT),
    case("P5 after connection tracking", ALL, NFT_TRACKED, NONE),
    case("P6 mark", ALL, EARLY[0], NONE),
    case("P6 state", ALL, EARLY[1], NONE),
    case("P6 direction", ALL, EARLY[2], NONE),
    case("P6 raw", ALL, EARLY[3], NONE),
    case("P6 inbound", ALL, EARLY_IN, NONE),
    case("P7", &[NativeV4], "", NONE),
    // Equal priorities: the kernel calls the chain first that was added last. It tells this only where nfnetlink_hook is there.
    Case { untold: true, ..case("P8 after", &[Redirect, Tproxy, Legacy], LATE_NAT, &[Out, Out443, ByProxy443]) },
    Case {
        before: "nft 'table ip aa { chain out { type nat hook output priority -100; tcp dport { 80, 443 } redirect to :3128; } }'",
        untold: true,
        ..case("P8 before", &[Redirect, Tproxy], "", &[ByProxy443])
    },
    Case {
        untold: true,
        ..case(
            "P8 legacy",
            &[Redirect],
            "iptables-legacy -t nat -A OUTPUT -p tcp --dport 443 -j REDIRECT --to-ports 3128",
            &[Out443, ByProxy443],
        )
    },
    // Hooks below IP.
    case(
        "P9 ingress",
        ALL,
        "nft 'table netdev f { chain c { type filter hook ingress device eth0 priority 0; tcp dport 8080 drop; } }'",
        &[In, In6],
    ),
    case(
        "P9 egress",
        ALL,
        "nft 'table netdev f { chain c { type filter hook egress device eth0 priority 0; tcp dport 443 drop; } }'",
        &[ByProxy443],
    ),
    case(
        "P9 ingress of lo",
        ALL,
        "nft 'table netdev f { chain c { type filter hook ingress device lo priority 0; ip protocol tcp tcp dport 15001 drop; } }'",
        &[Out, Out443],
    ),
    case(
        "P9 inet ingress",
        ALL,
        "nft 'table inet f { chain c { type filter hook ingress device eth0 priority 0; tcp dport 8080 drop; } }'",
        &[In, In6],
    ),
    case(
        "P9 marked at ingress",
        &[Redirect, Native, Legacy],
        "nft 'table netdev f { chain c { type filter hook ingress device eth0 priority 0; ip protocol tcp meta mark set 7; } }'
         $ipt -A INPUT -m mark --mark 7 -j DROP",
        &[In],
    ),
    // Calls to the inbound listener's own port reach it without TPROXY as well.
    case(
        "marked on lo, for the listener",
        &[Tproxy, NativeTproxy, LegacyTproxy],
        "nft 'table netdev f { chain c { type filter hook ingress device lo priority 0; tcp dport 15006 meta mark set 7; } }'",
        NONE,
    ),
    // The first packet marks its connection and is lost, and the mark lets TCP's repetition in.
    Case { untold: true, ..case("lost at first", &[Tproxy], MARKED_FOR_LATER, NONE) },
    // Routes.
    case(
        "P10 main before local",
        &[Redirect, Tproxy],
        "ip rule add pref 100 lookup local; ip rule del pref 0; ip rule add pref 50 lookup main",
        &[In, Out, Out443, ToSelf, AppToSelf],
    ),
    case("P10 no loopback", ALL, "ip route del local 127.0.0.1 dev lo table local; ip route del local 127.0.0.0/8 dev lo table local
         ip route add blackhole 127.0.0.0/8 table local", &[Out, Out443, ToSelf]),
    case("P10 no own address", &[Redirect, Native, Legacy], NO_OWN_ADDRESS, &[In, Out, Out443, ToSelf, AppToSelf]),
    case("own address in another table", &[Redirect, Native, Legacy], OWN_ADDRESS_ELSEWHERE, NONE),
    // What TPROXY has marked is delivered by the mark's table.
    case("P10 no own address, TPROXY", &[Tproxy, NativeTproxy, LegacyTproxy], NO_OWN_ADDRESS, &[Out, Out443, ToSelf, AppToSelf]),
    case("P10 lo is down", ALL, "ip link set lo down", &[Out, Out443, Out6, ToSelf, AppToSelf]),
    case("P10 marked to nowhere", &[Tproxy, NativeTproxy], "ip rule del pref 0; ip rule add pref 1 lookup local
         ip rule add pref 0 fwmark 1337 blackhole", &[In]),
    // Who listens gets what the pod keeps, and answers by eth0.
    case("P10 no own address, kept", REDIRECTING, KEPT, &[In, Out, Out443, ToSelf, AppToSelf, ByProxy443]),
    Case {
        lacks: true,
        ..case("P10 blackhole in the mark's table", &[Tproxy], "ip route flush table 133; ip route add blackhole 0.0.0.0/0 table 133", NONE)
    },
    case(
        "P12",
        ALL,
        "nft 'table inet f { chain c { type nat hook input priority 100; iifname lo drop; } }'",
        NONE,
    ),
    // A socket looks for a route before it sends anything.
    case("no route for the user", ALL, "ip rule add pref 20000 uidrange 1000-1000 prohibit", &[Out, Out443]),
    case("no route to the service", ALL, "ip route add blackhole 198.51.100.1/32", &[Out, Out443, ByProxy443]),
    // What comes over lo is not routed again, and IPv6 does not ask where a source is.
    case("no own IPv6 address", &[Redirect, Native, Legacy], "ip -6 route del local fd00:10::2 table local", &[In6]),
    // For packets of the other family the rule ends there.
    maybe("TPROXY for IPv6", &[Redirect, Native, Legacy], TPROXY_V6, &[In6]),
    // Where a zone is chosen before connection tracking, there is a template, which counts as new. nftables asks nothing else of it.
    case("zone, then new", ALL, "$ipt -t raw -A OUTPUT -j CT --zone 5; $ipt -t raw -A OUTPUT -m conntrack --ctstate NEW -j DROP", OUTPUT),
    maybe("zone, then not new", ALL, "$ipt -t raw -A OUTPUT -j CT --zone 5; $ipt -t raw -A OUTPUT -m conntrack ! --ctstate NEW -j DROP", NONE),
    case("zone, then mark", ALL, "$ipt -t raw -A OUTPUT -j CT --zone 5; $ipt -t raw -A OUTPUT -m connmark --mark 0 -j DROP", OUTPUT),
    maybe("zone, then mark of nft", ALL, ZONE_MARK, NONE),
    // REDIRECT changes the route, and the hook goes on with the interface it began with.
    case("output by eth0", ALL, "$ipt -A OUTPUT -o eth0 -p tcp --dport 15001 -j DROP", &[Out, Out443]),
    case("output by lo", ALL, "$ipt -A OUTPUT -o lo -d 127.0.0.1 -p tcp --dport 15001 -j DROP", NONE),
    // What others have translated goes on, too.
    case(
        "translated, then dropped",
        &[Redirect, Legacy],
        "$ipt -t nat -I PREROUTING -i eth0 -p tcp -j DNAT --to-destination 10.1.0.2:3128; $ipt -A INPUT -p tcp --dport 3128 -j DROP",
        &[In],
    ),
    // What the kernel ignores, and what it does all the same.
    maybe("P13 zone, then notrack", ALL, "$ipt -t raw -A OUTPUT -j CT --zone 5; $ipt -t raw -A OUTPUT -p tcp --dport 443 -j CT --notrack", NONE),
    case("P13 notrack", ALL, "$ipt -t raw -A OUTPUT -p tcp --dport 443 -j CT --notrack", &[Out443]),
    case(
        "P13 nft zone, then notrack",
        ALL,
        "nft 'table inet f { chain c { type filter hook prerouting priority -300; ct zone set 5 notrack; } }'",
        NONE,
    ),
    case("P13 redirect to itself", &[Tproxy, LegacyTproxy], "$ipt -t nat -A PREROUTING -i eth0 -p tcp -j REDIRECT", NONE),
    // A rule is its expressions, one by one.
    case("P14 notrack, then a condition", REDIRECTING, NFT_NOTRACK_FIRST, CAPTURED),
    case("P14 a load that fails", REDIRECTING, NFT_FAILING_LOAD, CAPTURED),
    case(
        "P14 two changes, a condition between",
        ALL,
        "nft 'table inet f { chain c { type filter hook output priority 1; meta mark set 7 tcp dport 443 drop; meta mark 7 tcp dport 8080 drop; } }'",
        &[AppToSelf, ByProxy443],
    ),
    Case {
        untold: true,
        ..case("P14 packets fill the set", &[Redirect], NFT_FILLED_SET, &[Out, Out443, ToSelf])
    },
    // Decided is decided, also if nothing changes.
    case(
        "P14 bound to itself",
        REDIRECTING,
        "nft 'table ip f { chain c { type nat hook prerouting priority -150; redirect; } }'",
        &[In],
    ),
    case("P14 translated", REDIRECTING, NFT_TRANSLATED, &[AppToSelf, ByProxy443]),
    case(
        "P14 translated, by xt",
        REDIRECTING,
        "$ipt -A OUTPUT -m conntrack --ctstate ESTABLISHED,DNAT -j ACCEPT; $ipt -A OUTPUT -p tcp -j DROP",
        &[AppToSelf, ByProxy443],
    ),
    // Names are no proof, and may be any bytes.
    case(
        "P14 a name like the mesh's",
        REDIRECTING,
        "nft 'table ip f { chain ISTIO_X { type filter hook output priority -300; notrack; } }'",
        &[Out, Out443, ToSelf],
    ),
    Case {
        before: "iptables-legacy -w -t nat -N \"$(printf 'X\\377')\"",
        ..case("P14 a name of any bytes", &[Legacy], "iptables-legacy -w -t nat -N \"$(printf 'Y\\376')\"", NONE)
    },
    Case {
        untold: true,
        ..case(
            "P14 for another host",
            &[Redirect, Native],
            "nft 'table inet f { chain c { type filter hook prerouting priority 0; iifname eth0 meta pkttype set other; } }'",
            &[In, In6],
        )
    },
    case(
        "P13 TPROXY's mark",
        &[Tproxy, NativeTproxy, LegacyTproxy],
        "$ipt -t mangle -A OUTPUT -p tcp --dport 443 -j MARK --set-mark 0x539",
        &[ByProxy443],
    ),
    // What no usual application sends, and what the plan leaves alone.
    Case { also: &[OutByTunnel], ..case("P15 a tunnel", ALL, TUNNEL, NONE) },
    Case { also: &[OutMarked], ..case("P15 marked", &[Redirect, Tproxy, Legacy], MARKED, &[OutMarked]) },
    Case { also: &[QueryMarked], ..case("P15 query", &[Dns], MARKED, &[QueryMarked]) },
    Case { also: &[OutMarked], ..case("P15 marked by kube-proxy", &[Redirect, Legacy], MARKED_MASQUERADE, NONE) },
    Case {
        also: &[InTunnel],
        ..case("P15 to the proxy", &[Redirect, Legacy], "$ipt -A INPUT -p tcp --dport 15008 -j DROP", &[InTunnel])
    },
    Case {
        also: &[ToApp],
        ..case("P15 to the application", &[Redirect, Native, Legacy], "$ipt -A INPUT -s 127.0.0.6 -j DROP", &[ToApp])
    },
    Case { also: &[InTunnel, ToApp], ..case("P15 exempt", &[Redirect, Native, Legacy], "", NONE) },
    // Own ports, and addresses that are easily forgotten.
    Case { before: ANY, also: NEAR, ..case("P16 as planned", ALL, "", NONE) },
    Case { before: ANY, also: NEAR, ..case("P16 own ports closed", REDIRECTING, CLOSED, &[InTunnel, ToTunnel]) },
    Case { before: ANY, also: NEAR, ..case("P16 by link", &[Redirect], ACCEPT_BY_LINK, &[InByLink, OutByLink]) },
    Case { before: ANY, also: NEAR, ..case("P16 routed", &[Redirect, Legacy], ACCEPT_ROUTED, &[InRouted]) },
    Case { before: ANY, also: NEAR, ..case("P16 routed, TPROXY", &[Tproxy, LegacyTproxy], DIVERT_ROUTED, &[InRouted]) },
    // Resolvers in the pod.

    // What the kernel compares and does where it is easily taken for less.
    maybe("P30 marks of ipset", &[Redirect, Legacy], IPSET_MARK, &[Out, Out443, ToSelf]),
    maybe("P31 a source that stays the same", &[Redirect], NFT_SAME_SOURCE, &[ByProxy443]),
    maybe("P32 the listener's owner", &[Tproxy, NativeTproxy], NFT_LISTENER, &[In, In6]),
    maybe("P33 nobody listens", &[Redirect, Native], NFT_NOBODY, NONE),
    maybe("P34 a state that nothing has", &[Redirect], NFT_NO_STATE, &[In, In6, ToSelf]),
    maybe("P35 a direction that nothing has", &[Redirect], "nft insert rule ip nat OUTPUT ct direction != 7 accept", &[Out, Out443, ToSelf]),
    maybe("P36 elements with quotas", &[Redirect], NFT_QUOTAS, &[In, In6, Out, Out6, Out443, ToSelf]),
    maybe("P37 class of traffic", &[Redirect, Legacy], BY_CLASS, &[Out, Out443, ByProxy443]),
    case("P38 to the proxy by another rule", &[Redirect], TO_PROXY, &[AppToSelf]),
    maybe("P39 source on lo", &[Redirect], "$ipt -t nat -A POSTROUTING -o lo -p tcp -j SNAT --to-source 240.0.0.1", &[Out, Out443, ToSelf]),
    maybe("P39 source to nowhere", &[Redirect], "$ipt -t nat -A POSTROUTING -o eth0 -p tcp -j SNAT --to-source 240.0.0.1", &[ByProxy443]),
    maybe("P40 no bits of an address", &[Redirect], "nft insert rule ip nat OUTPUT ip daddr \\& 0.0.0.0 != 1.0.0.0 accept", &[Out, Out443, ToSelf]),
    maybe("P41 zone of what comes in", &[Redirect, Native], ZONE_IN, NONE),
    maybe("P42 source at input", &[Redirect], "$ipt -t nat -A INPUT -p tcp -j SNAT --to-source 240.0.0.1", NONE),
    case("DNS", &[Dns, NativeDnsServers], "", NONE),
    Case { before: DNS_DNAT, ..case("DNS to a resolver in the pod", &[Dns], "", &[Query, QueryByTcp, Query6]) },
    // Native rules are asked first, which were added last.
    Case {
        before: DNS_DNAT,
        untold: true,
        ..case("DNS to a resolver in the pod, native", &[NativeDnsServers], "", NONE)
    },
    case("DNS over lo is dropped", &[Dns, NativeDnsServers], NFT_DROP_RESOLVER, &[Query, QueryByTcp, Query6]),
    case("DNS to one that no file names", &[NativeDnsServers], DROP_OTHER, &[QueryOther]),
    case("DNS to any", &[Dns], DROP_OTHER, &[QueryOther]),
];

/// A pod that a case is set up in.
struct Pod {
    ground: Ground,
    plan: RulePlan,
    options: ApplyOptions,
    probes: Vec<Probe>,
}

impl Pod {
    fn new(case: &Case, mode: Mode) -> Result<Self> {
        let (ground, plan, options) = (Ground::new()?, plan(&mode.said())?, mode.options());
        ground.pod().sh(&script(case.before, mode))?;
        ground.pod().enter(|| apply(&plan, &options))??;
        ground.settled()?;
        ground.pod().sh(&script(case.after, mode))?;
        Ok(Self { ground, plan, options, probes: [&mode.probes(), case.also].concat() })
    }

    fn judge(&self, case: &Case) -> Result<Vec<String>> {
        let live = self.ground.pod().enter(|| Live::now(None, &self.options))??;
        let packets: Vec<Packet> = self.probes.iter().map(|probe| probe.packet()).collect();
        let shots = self.ground.send(&packets)?;
        let planned = |probe: Probe, shot: &SentPacket| self.planned(probe, &shot.packet);
        let trace =
            |shot: &SentPacket| live.rules(shot.packet.family(), Some(&self.plan)).trace(&shot.packet);
        let may_be_lost = |shot: &SentPacket| {
            trace(shot).may.iter().any(|fate| agrees(&Arrived::Nothing, *fate, &shot.packet))
        };
        let probes = || self.probes.iter().copied();
        let pairs = probes().zip(&shots);
        let lost = pairs.filter(|(probe, shot)| {
            let is_by_mode = *probe == GroupToSelf443 || planned(*probe, shot) == Fate::Dropped;
            if is_by_mode { may_be_lost(shot) } else { case.lost.contains(probe) }
        });
        let lost: Vec<&Packet> = lost.map(|(_, shot)| &shot.packet).collect();
        let seen = self.ground.outcome(&shots, |shot| !lost.contains(&&shot.packet), PATIENCE);
        let mut problems = Vec::new();
        let (mut is_captured_lost, mut is_answer_lost) = (false, false);
        for ((probe, shot), seen) in probes().zip(&shots).zip(&seen) {
            let (planned, trace) = (planned(probe, shot), trace(shot));
            let is_lost = !agrees(seen, planned, &shot.packet);
            let is_captured = matches!(planned, Fate::Proxy { .. });
            // So is what is left alone because it is the proxy's, unless a service leads it elsewhere.
            let is_proxys = matches!(probe, ByProxy443 | InTunnel | ToApp);
            let is_judged = is_captured || is_proxys && !trace.may.contains(&Fate::Translated);
            is_captured_lost |= is_judged && is_lost && !is_unsent(&trace);
            is_answer_lost |= is_captured && !is_unsent(&trace) && !shot.is_answered();
            // What is captured by the group alone depends on the mode.
            if probe != GroupToSelf443 && is_lost != case.lost.contains(&probe) {
                problems.push(format!("kernel: {probe:?} {seen:?}, by the plan {planned:?}"));
            }
            let fits = trace
                .may
                .iter()
                .any(|fate| agrees(seen, *fate, &shot.packet) || case.untold && *fate == Fate::Unknown);
            if !fits || trace.fate() == Fate::Unknown && !case.untold {
                let detail =
                    std::env::var("TRACES").map_or_else(|_| String::new(), |_| trace.text(Detail::Every));
                problems.push(format!("trace: {probe:?} {seen:?}, not {:?}{detail}", trace.may));
            }
        }
        problems.extend(self.check(case, is_captured_lost, is_answer_lost)?);
        Ok(problems)
    }

    /// Where the packet would end if nobody else did anything.
    fn planned(&self, probe: Probe, packet: &Packet) -> Fate {
        if self.plan.families().contains(&packet.family()) {
            return TraceRules::of_plan(&self.plan, packet.family()).fate(packet);
        }
        // Native tables are of both families, so IPv6 goes the way of IPv4.
        let like = match probe {
            In6 => In.packet(),
            Out6 => Out.packet(),
            In | Out | Out443 | ToSelf | GroupToSelf443 | AppToSelf | ByProxy443 => packet.clone(),
            Query | Query6 | QueryByTcp | QueryByTcp6 | QueryOther => packet.clone(),
            OutByTunnel | OutMarked | QueryMarked | InTunnel | ToApp => packet.clone(),
            InListener | ToTunnel | OutToTunnel => packet.clone(),
            InByLink | OutByLink | InRouted | ToRouted => packet.clone(),
        };
        TraceRules::of_plan(&self.plan, Family::V4).fate(&like)
    }

    /// What CHECK names, if that is wrong. Where no captured packet is lost it may still be that an answer is.
    fn check(&self, case: &Case, is_lost: bool, is_answer_lost: bool) -> Result<Option<String>> {
        let look = || -> Result<_> {
            let Some(found) = verify(&self.plan, &self.options)? else { return Ok(None) };
            let snapshot = Snapshot::take(&self.plan, &self.options)?;
            let consequences = snapshot.impact(&found, &self.plan, &self.options)?.consequences;
            Ok(Some((found, consequences)))
        };
        let (found, consequences) = self.ground.pod().enter(look)??.unzip();
        Ok(match (found, is_lost) {
            (None, true) => Some("CHECK: silent".to_owned()),
            (None, false) if is_answer_lost => Some("CHECK: silent of answers".to_owned()),
            (Some(_), true) if consequences.is_none_or(|all| all.is_empty()) => {
                Some("CHECK: tells no consequence".to_owned())
            }
            (Some(_), true) | (None, false) => None,
            (Some(_), false) if case.lacks || is_answer_lost => None,
            (Some(Mismatch::Interference(findings, _)), false)
                if case.untold && findings.iter().all(|finding| finding.severity == Severity::May) =>
            {
                None
            }
            (Some(named), false) => Some(format!("CHECK: names {}", report(&named))),
        })
    }
}

/// With how sure it is.
fn report(named: &Mismatch) -> String {
    let Mismatch::Interference(findings, _) = named else { return named.to_string() };
    let each = findings.iter().map(|finding| format!("{:?}: {finding}", finding.severity));
    each.collect::<Vec<_>>().join("; ")
}

/// `$ipt` is the variant of iptables that suits the mode.
fn script(text: &str, mode: Mode) -> String {
    let variant = if matches!(mode, Legacy | LegacyTproxy) { "legacy" } else { "nft" };
    // nft wants each of the braces that close a block on a line of its own.
    text.replace("} }", "}\n}").replace("$ipt", &format!("iptables-{variant} -w"))
}

#[test]
fn kernel_trace_and_check_agree() -> Result<()> {
    let only = std::env::var("ONLY").ok();
    let wanted = |case: &Case| only.as_ref().is_none_or(|only| case.name.starts_with(only.as_str()));
    // Each case in one of its modes, by turns, where not everything is asked for.
    let takes_all = only.is_some() || sample::is_whole();
    let is_taken = |number: usize, case: &Case, mode: usize| takes_all || number % case.modes.len() == mode;
    let modes = |(number, case): (usize, &'static Case)| {
        let modes = case.modes.iter().enumerate().filter(move |(mode, _)| is_taken(number, case, *mode));
        modes.map(move |(_, mode)| (case, *mode))
    };
    let all: Vec<(&Case, Mode)> =
        CASES.iter().enumerate().filter(|(_, case)| wanted(case)).flat_map(modes).collect();
    // What is wrong in several modes is reported once.
    let wrong: Mutex<BTreeMap<(&str, String), Vec<Mode>>> = Mutex::default();
    let failures = in_parallel(THREADS, &all, |_, (case, mode)| {
        let problems = Pod::new(case, *mode).and_then(|pod| pod.judge(case));
        let problems = problems.with_context(|| format!("{} {mode:?}", case.name))?;
        let mut wrong = wrong.lock().unwrap_or_else(PoisonError::into_inner);
        for problem in problems {
            wrong.entry((case.name, problem)).or_default().push(*mode);
        }
        Ok(Vec::new())
    });
    let wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{} cases", all.len());
    let scripts = CASES.iter().map(|case| (case.name, format!("{}{}", case.before, case.after)));
    let scripts: BTreeMap<&str, String> = scripts.collect();
    let mut text = failures.join("\n");
    let mut last = "";
    for ((name, problem), modes) in &wrong {
        if *name != last {
            text.push_str(&format!("\n{name}: {}", scripts[name]));
            last = name;
        }
        text.push_str(&format!("\n    {problem} {modes:?}"));
    }
    ensure!(text.is_empty(), "{} disagree:\n{text}", failures.len() + wrong.len());
    Ok(())
}
