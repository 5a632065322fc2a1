//! What a plan does with one packet of this process, from the socket to where it arrives: the trace of the plan's rules, in the words
//! of a validation.

use packet_trace::{Interface, Packet, TraceRules};
use redirect_core::{Family, rule::Protocol, values::Port};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Whose packets: user and group of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProbeFate {
    /// It arrives where it was sent.
    Untouched,
    /// It arrives at this port of the loopback address.
    Redirected(Port),
    /// It is handed to a transparent listener; without one, iptables drops it.
    Tproxied,
    /// It is dropped, or the rules ask for something that cannot be determined beforehand.
    Unknown,
}

/// The address that REDIRECT sends packets of the pod itself to.
pub(crate) const fn loopback(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

/// The first packet of a connection of `who`; from `source`, or where the kernel chooses. Whether it `stays`: goes to the pod itself, over `lo`.
pub(crate) fn packet(
    who: ProcessIdentity,
    protocol: Protocol,
    source: Option<IpAddr>,
    destination: SocketAddr,
    stays: bool,
) -> Packet {
    let mut packet = Packet::from_pod(who.uid, who.gid, destination, destination);
    packet.interface = if stays { Interface::Named("lo".to_owned()) } else { Interface::Elsewhere };
    (packet.source, packet.source_port) = (source, None);
    if protocol == Protocol::Tcp { packet } else { packet.over_udp() }
}

/// What these rules do with a packet.
pub(crate) fn fate(rules: &TraceRules, packet: &Packet) -> ProbeFate {
    match rules.fate(packet) {
        packet_trace::Fate::Untouched => ProbeFate::Untouched,
        packet_trace::Fate::Proxy { rewritten: false, .. } => ProbeFate::Tproxied,
        packet_trace::Fate::Proxy { rewritten: true, port, .. } => {
            Port::new(port).map_or(ProbeFate::Unknown, ProbeFate::Redirected)
        }
        // No other program has rules here, and a dropped packet proves nothing.
        packet_trace::Fate::Redirected { .. }
        | packet_trace::Fate::Translated
        | packet_trace::Fate::Broken
        | packet_trace::Fate::Dropped
        | packet_trace::Fate::Rejected
        | packet_trace::Fate::Unknown => ProbeFate::Unknown,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a panic is how a test fails
    use super::*;
    use redirect_core::{
        Redirect,
        settings::{Key, NamespaceFacts, RawSettings, Source},
    };

    const PROXY: ProcessIdentity = ProcessIdentity { uid: 1337, gid: 1337 };
    const APP: ProcessIdentity = ProcessIdentity { uid: 1000, gid: 1000 };

    fn rules(flags: &[(Key, &'static str)]) -> TraceRules {
        let mut raw = RawSettings::new();
        raw.set(Key::InboundPorts, "*", Source::Flag("b"));
        raw.set(Key::OutboundRanges, "*", Source::Flag("i"));
        for (key, text) in flags {
            raw.set(*key, *text, Source::Flag("x"));
        }
        let addresses = ["10.1.0.2".parse().unwrap()];
        let plan = Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan();
        TraceRules::of_plan(&plan, Family::V4)
    }

    fn packet(who: ProcessIdentity, source: Option<&str>, destination: &str, stays: bool) -> Packet {
        let source = source.map(|source| source.parse().unwrap());
        super::packet(who, Protocol::Tcp, source, destination.parse().unwrap(), stays)
    }

    fn redirected(port: u16) -> ProbeFate {
        ProbeFate::Redirected(Port::new(port).unwrap())
    }

    #[test]
    fn the_proxys_own_paths() {
        let rules = rules(&[]);
        let fate = |source, to, stays| fate(&rules, &packet(PROXY, source, to, stays));
        assert_eq!(fate(Some("127.0.0.1"), "127.0.0.6:15002", true), redirected(15006));
        assert_eq!(fate(Some("10.1.0.2"), "10.1.0.2:15002", true), redirected(15006));
        assert_eq!(fate(Some("127.0.0.6"), "10.1.0.2:8080", true), ProbeFate::Untouched);
        assert_eq!(fate(Some("127.0.0.1"), "127.0.0.1:8080", true), ProbeFate::Untouched);
        assert_eq!(fate(None, "192.0.2.1:80", false), ProbeFate::Untouched);
    }

    #[test]
    fn the_applications_paths() {
        let rules = rules(&[(Key::RedirectDns, "true"), (Key::CaptureAllDns, "true")]);
        let fate = |to, stays| fate(&rules, &packet(APP, None, to, stays));
        assert_eq!(fate("192.0.2.1:80", false), redirected(15001));
        assert_eq!(fate("192.0.2.1:53", false), redirected(15053));
        assert_eq!(fate("127.0.0.1:8080", true), ProbeFate::Untouched, "wherever it comes from");
    }

    #[test]
    fn tproxy_takes_what_redirect_leaves() {
        let rules = rules(&[(Key::InterceptionMode, "TPROXY")]);
        let fate = |source, to| fate(&rules, &packet(PROXY, Some(source), to, true));
        assert_eq!(fate("10.1.0.2", "10.1.0.2:15008"), ProbeFate::Tproxied);
        assert_eq!(fate("127.0.0.1", "127.0.0.6:15002"), redirected(15006));
        assert_eq!(fate("127.0.0.6", "10.1.0.2:8080"), ProbeFate::Untouched);
        assert_eq!(fate("127.0.0.1", "127.0.0.1:15008"), ProbeFate::Untouched);
    }

    #[test]
    fn strict_capture_changes_nothing_for_a_first_packet() {
        for mode in ["REDIRECT", "TPROXY"] {
            let [usual, strict] = ["false", "true"]
                .map(|strict| rules(&[(Key::InterceptionMode, mode), (Key::StrictCapture, strict)]));
            for who in [PROXY, APP] {
                for (source, to, stays) in [
                    (Some("10.1.0.2"), "10.1.0.2:15008", true),
                    (Some("127.0.0.1"), "127.0.0.6:15002", true),
                    (Some("127.0.0.6"), "10.1.0.2:8080", true),
                    (None, "192.0.2.1:80", false),
                ] {
                    let packet = packet(who, source, to, stays);
                    assert_eq!(fate(&strict, &packet), fate(&usual, &packet), "{mode} {packet:?}");
                }
            }
        }
    }

    #[test]
    fn an_interface_that_may_be_meant_makes_it_unknown() {
        let rules = rules(&[(Key::ExcludeInterfaces, "eth1")]);
        assert_eq!(fate(&rules, &packet(APP, None, "192.0.2.1:80", false)), ProbeFate::Unknown);
        assert_eq!(fate(&rules, &packet(PROXY, Some("127.0.0.1"), "127.0.0.6:1", true)), redirected(15006));
    }
}
