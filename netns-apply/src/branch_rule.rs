//! Probes of pods with network interfaces of their own in Amazon's VPC ("branch interfaces", which security groups for pods
//! need).
//!
//! Its network plugin sends what such a pod sends to the VPC, and the node's packets to the pod take the same way; the VPC drops
//! the source address of probes. The pod's veth interface is a shorter way: its table has the pod's route. Two policy
//! rules lead there and back, as those of Istio's agent do:
//!
//! ```text
//! 512:  from all to 10.0.3.7 lookup 101
//! 9:    from all iif vlan8a1 lookup local        (10:  from all iif vlan8a1 lookup 101  is the network plugin's)
//! ```
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::panic)
)]

use std::{collections::BTreeSet, fmt, net::IpAddr};

use netfilter_state::route_tables::{PolicyRule, RouteTables, RuleAction};
use redirect_core::ipnet::IpNet;
use redirect_core::values::Family;

/// Where the network plugin's own rules for pods' addresses are.
const TO_POD_PRIORITY: u32 = 512;

/// One of the policy rules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BranchRule {
    /// Packets to a pod are looked up in its own table.
    ToPod {
        /// The pod's address.
        address: IpAddr,
        /// The table.
        table: u32,
    },
    /// Packets that come in through a pod's interface are delivered to the node where they are its own.
    Answers {
        /// The family of the packets.
        family: Family,
        /// The interface's name.
        interface: String,
        /// The rule's priority: the one before the network plugin's.
        priority: u32,
    },
}

impl BranchRule {
    /// Its family.
    #[must_use]
    pub const fn family(&self) -> Family {
        match self {
            Self::ToPod { address: IpAddr::V4(_), .. } => Family::V4,
            Self::ToPod { address: IpAddr::V6(_), .. } => Family::V6,
            Self::Answers { family, .. } => *family,
        }
    }

    /// Its priority.
    #[must_use]
    pub const fn priority(&self) -> u32 {
        match self {
            Self::ToPod { .. } => TO_POD_PRIORITY,
            Self::Answers { priority, .. } => *priority,
        }
    }

    /// The table it leads to.
    #[must_use]
    pub const fn table(&self) -> u32 {
        match self {
            Self::ToPod { table, .. } => *table,
            Self::Answers { .. } => RouteTables::LOCAL,
        }
    }

    /// The rules that an address needs; none unless it is that of a pod with a branch interface: a policy rule for an interface leads
    /// to a table that has a route to this address alone, through the same interface.
    #[must_use]
    pub fn wanted(tables: &RouteTables, address: IpAddr) -> Vec<Self> {
        let host = IpNet::from(address);
        let route = tables.routes.iter().find_map(|route| {
            let interface =
                route.interface.as_ref().filter(|_| route.to == host && is_of_pods(route.table))?;
            let leads = |rule: &&PolicyRule| {
                rule.in_interface.as_ref() == Some(interface)
                    && rule.action == RuleAction::Lookup(route.table)
                    && rule.family == route.family
            };
            let rule = tables.rules.iter().filter(leads).min_by_key(|rule| rule.priority)?;
            Some((route, interface, rule.priority))
        });
        let Some((route, interface, priority)) = route else { return Vec::new() };
        Vec::from([
            Self::ToPod { address, table: route.table },
            Self::Answers {
                family: route.family,
                interface: interface.clone(),
                priority: priority.saturating_sub(1),
            },
        ])
    }

    /// The rules of these shapes that exist.
    #[must_use]
    pub fn found(tables: &RouteTables) -> BTreeSet<Self> {
        tables.rules.iter().filter_map(Self::read).collect()
    }

    /// A policy rule of one of these shapes. Only Istio's agent and this program make them on such nodes: the network plugin's own
    /// at this priority lead to the table `main`, and its rules for interfaces to their tables.
    fn read(rule: &PolicyRule) -> Option<Self> {
        let RuleAction::Lookup(table) = rule.action else { return None };
        let plain = PolicyRule::lookup(rule.family, rule.priority, table);
        match (&rule.to, &rule.in_interface) {
            (Some(to), None) if *rule == (PolicyRule { to: Some(*to), ..plain.clone() }) => {
                let is_it = rule.priority == TO_POD_PRIORITY && to.prefix_len() == to.max_prefix_len();
                (is_it && is_of_pods(table)).then(|| Self::ToPod { address: to.addr(), table })
            }
            (None, Some(name)) if *rule == (PolicyRule { in_interface: Some(name.clone()), ..plain }) => {
                (table == RouteTables::LOCAL).then(|| Self::Answers {
                    family: rule.family,
                    interface: name.clone(),
                    priority: rule.priority,
                })
            }
            _ => None,
        }
    }
}

/// In the words of `ip rule`.
impl fmt::Display for BranchRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ToPod { address, table } => write!(f, "to {address} lookup {table} pref {TO_POD_PRIORITY}"),
            Self::Answers { interface, priority, .. } => {
                write!(f, "iif {interface} lookup local pref {priority}")
            }
        }
    }
}

const fn is_of_pods(table: u32) -> bool {
    !matches!(table, 0 | RouteTables::DEFAULT | RouteTables::MAIN | RouteTables::LOCAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use netfilter_state::route_tables::{Route, RouteKind};

    const POD: &str = "10.0.3.7";

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn to(rule: PolicyRule, text: &str) -> PolicyRule {
        PolicyRule { to: Some(IpNet::from(address(text))), ..rule }
    }

    fn through(rule: PolicyRule, interface: &str) -> PolicyRule {
        PolicyRule { in_interface: Some(interface.to_string()), ..rule }
    }

    fn route(text: &str, table: u32, interface: &str) -> Route {
        Route {
            family: Family::V4,
            table,
            to: IpNet::from(address(text)),
            kind: RouteKind::Unicast,
            interface: Some(interface.to_string()),
            metric: 0,
            unknown: false,
        }
    }

    fn lookup(priority: u32, table: u32) -> PolicyRule {
        PolicyRule::lookup(Family::V4, priority, table)
    }

    /// A node with one pod of each kind.
    fn node() -> RouteTables {
        RouteTables {
            rules: [
                through(lookup(10, 101), "vlan1"),
                lookup(20, RouteTables::LOCAL),
                to(lookup(512, RouteTables::MAIN), "10.0.1.9"),
                lookup(32766, RouteTables::MAIN),
            ]
            .into(),
            routes: [route(POD, 101, "vlan1"), route("10.0.1.9", RouteTables::MAIN, "eni1")].into(),
            loopback_is_up: true,
            complete: true,
        }
    }

    #[test]
    fn a_pod_with_a_branch_interface_needs_two_rules_and_any_other_none() {
        let words: Vec<String> =
            BranchRule::wanted(&node(), address(POD)).iter().map(ToString::to_string).collect();
        assert_eq!(words, ["to 10.0.3.7 lookup 101 pref 512", "iif vlan1 lookup local pref 9"]);
        assert_eq!(BranchRule::wanted(&node(), address("10.0.1.9")), []);
        assert_eq!(BranchRule::wanted(&node(), address("10.0.3.8")), []);

        let mut other = node();
        other.routes[0].interface = Some("vlan2".to_string());
        assert_eq!(BranchRule::wanted(&other, address(POD)), [], "the rule is another interface's");
    }

    #[test]
    fn only_rules_of_these_shapes_are_found() {
        assert_eq!(BranchRule::found(&node()), BTreeSet::new(), "those are the network plugin's");
        let mut node = node();
        let two = BranchRule::wanted(&node, address(POD));
        node.rules.push(to(lookup(512, 101), POD));
        node.rules.push(through(lookup(9, RouteTables::LOCAL), "vlan1"));
        assert_eq!(BranchRule::found(&node), two.iter().cloned().collect());

        for other in [
            to(lookup(511, 101), POD),
            PolicyRule { mark: Some((1, 1)), ..to(lookup(512, 101), POD) },
            PolicyRule { to: Some("10.0.0.0/16".parse().expect("a range")), ..lookup(512, 101) },
            PolicyRule { protocol: Some(6), ..through(lookup(9, RouteTables::LOCAL), "vlan1") },
        ] {
            node.rules = [other].into();
            assert_eq!(BranchRule::found(&node), BTreeSet::new(), "{:?}", node.rules);
        }
    }
}
