//! Whether a plan captures one observed connection, such as one opened before the plan's rules existed.

use super::PodTraffic;
use crate::{Fate, Packet, TraceRules};
use netfilter_state::state::PerFamily;
use redirect_core::{
    RulePlan,
    rule::{Match, Protocol},
    values::Family,
};
use std::net::{IpAddr, SocketAddr};

/// A connection, from the end that opened it to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Opening {
    /// Its protocol.
    pub protocol: Protocol,
    /// The end that opened it.
    pub source: SocketAddr,
    /// The other end, as that one named it.
    pub destination: SocketAddr,
    /// Who opened it.
    pub by: Opener,
}

/// Who opened a connection. Closed: no fourth kind exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Opener {
    /// A peer outside the pod.
    Outside,
    /// A socket in the pod.
    Socket {
        /// Its user.
        user: u32,
        /// Its group, if known.
        group: Option<u32>,
    },
    /// A socket in the pod, of an unknown user and group.
    UnknownUser,
}

/// Users and groups of applications, when unknown.
const USUAL: u32 = 1000;
/// The interface by which a pod reaches itself.
const LOOPBACK: &str = "lo";

/// What a plan captures, prepared for queries about any number of connections.
#[derive(Debug, Clone)]
pub struct Captures {
    rules: PerFamily<TraceRules>,
    /// The groups that the plan's rules match.
    groups: Vec<u32>,
}

impl Captures {
    /// What this plan captures.
    #[must_use]
    pub fn of(plan: &RulePlan) -> Self {
        let rules = PerFamily::each(|family| TraceRules::of_plan(plan, family));
        let conditions = plan.planned_rules().iter().flat_map(|planned| &planned.rule().matches);
        let group =
            |condition: &Match| if let Match::OwnerGid(is) = condition { Some(is.value) } else { None };
        Self { rules, groups: conditions.filter_map(group).collect() }
    }

    /// Whether it captures a connection in a pod. If the kernel does not report its opener, it counts as captured if it would be for
    /// one of those who may have.
    #[must_use]
    pub fn captures(&self, pod: &PodTraffic<'_>, opening: &Opening) -> bool {
        let rules = self.rules.of(Family::of(&opening.destination.ip()));
        let packets = self.packets(pod, opening);
        packets.iter().any(|packet| matches!(rules.fate(packet), Fate::Proxy { .. }))
    }

    /// The packets that may have opened it.
    fn packets(&self, pod: &PodTraffic<'_>, opening: &Opening) -> Vec<Packet> {
        let Opening { protocol, source, destination, by } = *opening;
        let of_protocol = |packet: Packet| match protocol {
            Protocol::Tcp => packet,
            Protocol::Udp => packet.over_udp(),
        };
        let (user, group) = match by {
            Opener::Outside => {
                let packet = of_protocol(Packet::from_outside(source, destination));
                let ways = interfaces(pod, destination.ip());
                return ways.iter().map(|name| packet.clone().by(name)).collect();
            }
            Opener::Socket { user, group } => (user, group),
            Opener::UnknownUser => (USUAL, None),
        };
        let is_local = pod.owns(&destination.ip());
        let ways = if is_local { vec![LOOPBACK.into()] } else { interfaces(pod, source.ip()) };
        let groups = match group {
            Some(group) => vec![group],
            None => [user, USUAL].into_iter().chain(self.groups.iter().copied()).collect(),
        };
        let sent: Vec<Packet> = groups
            .into_iter()
            .map(|group| of_protocol(Packet::from_pod(user, group, source, destination)))
            .collect();
        ways.iter().flat_map(|way| sent.iter().map(|packet| packet.clone().by(way))).collect()
    }
}

/// The interfaces by which the connection of this address of the pod's may go: that of the address, where it is known.
fn interfaces(pod: &PodTraffic<'_>, own: IpAddr) -> Vec<String> {
    let by_interface = pod.by_interface.unwrap_or_default().iter();
    let of_address: Vec<String> =
        by_interface.filter(|(_, address)| *address == own).map(|(name, _)| name.clone()).collect();
    match (of_address.as_slice(), pod.interfaces) {
        ([_, ..], _) => of_address,
        ([], []) => vec!["eth0".into()],
        ([], names) => names.to_vec(),
    }
}

impl PodTraffic<'_> {
    /// Whether an address is the pod's own, by which it reaches itself.
    #[must_use]
    pub fn owns(&self, address: &IpAddr) -> bool {
        address.is_loopback() || self.addresses.contains(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::{
        pod::{Decision, PodFacts},
        settings::NamespaceFacts,
    };

    const TCP: Protocol = Protocol::Tcp;

    fn plan(annotations: &[(&str, &str)]) -> RulePlan {
        let addresses = ["10.1.0.2", "fd00::2"].map(|address| address.parse().unwrap());
        let mut facts = PodFacts::sidecar(annotations.iter().copied());
        let proxy = facts.proxy.as_mut().unwrap();
        proxy.env.insert("ISTIO_DUAL_STACK".into(), "true".into());
        match facts.decide(&NamespaceFacts::new(&addresses)).unwrap() {
            Decision::Redirect(redirect) => redirect.plan(),
            Decision::Skip(reason) => panic!("{reason}"),
        }
    }

    fn is_captured(plan: &RulePlan, by: Opener, protocol: Protocol, from: &str, to: &str) -> bool {
        let addresses = ["10.1.0.2", "fd00::2"].map(|address| address.parse().unwrap());
        let pod =
            PodTraffic { addresses: &addresses, interfaces: &["eth0".to_string()], ..PodTraffic::default() };
        let opening =
            Opening { protocol, source: from.parse().unwrap(), destination: to.parse().unwrap(), by };
        Captures::of(plan).captures(&pod, &opening)
    }

    #[test]
    fn what_the_rules_would_have_captured_is_captured() {
        let plan = plan(&[]);
        let out = |by, to: &str| {
            let from = if to.starts_with('[') { "[fd00::2]:4000" } else { "10.1.0.2:4000" };
            is_captured(&plan, by, TCP, from, to)
        };
        for to in ["192.0.2.1:80", "[2001:db8::1]:443"] {
            assert!(
                out(Opener::Socket { user: 0, group: None }, to)
                    && out(Opener::UnknownUser, to)
                    && out(Opener::Socket { user: 1000, group: None }, to),
                "{to}"
            );
            assert!(!out(Opener::Socket { user: 1337, group: None }, to), "the proxy's own: {to}");
        }
        assert!(
            !out(Opener::Socket { user: 0, group: None }, "127.0.0.1:80")
                && !out(Opener::Socket { user: 0, group: None }, "10.1.0.2:80"),
            "to itself"
        );
        let come = |to| is_captured(&plan, Opener::Outside, TCP, "192.0.2.1:4000", to);
        assert!(come("10.1.0.2:80"));
        assert!(!come("10.1.0.2:15021"), "the proxy's own port");
        assert!(!is_captured(&plan, Opener::Outside, Protocol::Udp, "192.0.2.1:53", "10.1.0.2:5353"));
    }

    #[test]
    fn exceptions_are_left_alone() {
        let plan = plan(&[
            ("traffic.sidecar.istio.io/excludeOutboundPorts", "3306"),
            ("traffic.sidecar.istio.io/excludeInboundPorts", "81"),
            ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "198.51.100.0/24"),
        ]);
        let out = |to| is_captured(&plan, Opener::Socket { user: 0, group: None }, TCP, "10.1.0.2:4000", to);
        assert!(out("192.0.2.1:80") && !out("192.0.2.1:3306") && !out("198.51.100.7:80"));
        let come = |to| is_captured(&plan, Opener::Outside, TCP, "192.0.2.1:4000", to);
        assert!(come("10.1.0.2:80") && !come("10.1.0.2:81"));
    }

    #[test]
    fn an_interface_that_is_left_alone_is_so_both_ways() {
        for (interface, is_left_alone) in [("eth0", true), ("eth1", false)] {
            let plan = plan(&[("traffic.sidecar.istio.io/excludeInterfaces", interface)]);
            let out = is_captured(
                &plan,
                Opener::Socket { user: 0, group: None },
                TCP,
                "10.1.0.2:4000",
                "192.0.2.1:80",
            );
            let come = is_captured(&plan, Opener::Outside, TCP, "192.0.2.1:4000", "10.1.0.2:80");
            assert_eq!((out, come), (!is_left_alone, !is_left_alone), "{interface}");
        }
    }

    #[test]
    fn a_family_without_rules_captures_nothing() {
        let addresses = ["10.1.0.2".parse().unwrap()];
        let only_v4 = PodFacts::sidecar([("a", "b")]).decide(&NamespaceFacts::new(&addresses));
        let Ok(Decision::Redirect(redirect)) = only_v4 else { panic!("{only_v4:?}") };
        assert!(!is_captured(
            &redirect.plan(),
            Opener::Socket { user: 0, group: None },
            TCP,
            "[fd00::2]:1",
            "[2001:db8::1]:80"
        ));
        assert!(redirect.plan().proxy_users().all(|user| user == 1337));
        assert!(redirect.plan().proxy_groups().all(|group| group == 1337));
    }

    #[test]
    fn what_an_interface_that_is_excluded_carries_is_left_alone() {
        let plan = plan(&[("traffic.sidecar.istio.io/excludeInterfaces", "net1")]);
        let addresses = ["10.1.0.2", "10.2.0.2"].map(|address| address.parse().unwrap());
        let interfaces = ["eth0", "net1", "tunl0"].map(ToString::to_string);
        let by_interface = [(interfaces[0].clone(), addresses[0]), (interfaces[1].clone(), addresses[1])];
        let pod = PodTraffic {
            addresses: &addresses,
            interfaces: &interfaces,
            by_interface: Some(&by_interface),
            ..PodTraffic::default()
        };
        let captured = |by, source: &str, destination: &str| {
            let (source, destination) = (source.parse().unwrap(), destination.parse().unwrap());
            Captures::of(&plan).captures(&pod, &Opening { protocol: TCP, source, destination, by })
        };
        let socket = Opener::Socket { user: 0, group: None };
        assert!(captured(socket, "10.1.0.2:4000", "192.0.2.1:80"));
        assert!(!captured(socket, "10.2.0.2:4000", "192.0.2.1:80"));
        assert!(captured(Opener::Outside, "192.0.2.1:4000", "10.1.0.2:80"));
        assert!(!captured(Opener::Outside, "192.0.2.1:4000", "10.2.0.2:80"));
    }
}
