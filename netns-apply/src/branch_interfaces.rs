//! Probes of pods with network interfaces of their own in Amazon's VPC ("branch interfaces", which security groups for pods
//! need).
//!
//! Its network plugin sends what such a pod sends to the VPC, and the node's packets to the pod take the same way; the VPC drops
//! the source address of probes. The pod's veth interface is a shorter way: its table has the pod's route. Two policy
//! rules in the node's network namespace, which must be the calling thread's, lead there and back, as those of Istio's agent do:
//!
//! ```text
//! 512:  from all to 10.0.3.7 lookup 101
//! 9:    from all iif vlan8a1 lookup local        (10:  from all iif vlan8a1 lookup 101  is the network plugin's)
//! ```

use crate::routes::{RouteError, RouteSocket};
use netfilter_state::route_tables::{PolicyRule, RouteTables, RuleAction};
use redirect_core::ipnet::IpNet;
use std::{collections::BTreeSet, fs, net::IpAddr};

/// Where the network plugin's own rules for pods' addresses are.
const TO_POD_PRIORITY: u32 = 512;
/// Security groups for pods need this to be 0, and nothing else does (Amazon's guide to them).
const EARLY_DEMUX: &str = "/proc/sys/net/ipv4/tcp_early_demux";

/// Whether the node may have pods with branch interfaces.
fn may_have_any() -> bool {
    fs::read_to_string(EARLY_DEMUX).is_ok_and(|text| text.trim() == "0")
}

impl RouteSocket {
    /// Those of these addresses that lack a policy rule.
    ///
    /// # Errors
    /// The kernel does not report them.
    pub fn missing_branch_rules(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<BTreeSet<IpAddr>, RouteError> {
        if !may_have_any() {
            return Ok(BTreeSet::new());
        }
        let tables = self.tables()?;
        let lacks =
            |address: &&IpAddr| wanted(&tables, **address).iter().any(|rule| !tables.rules.contains(rule));
        Ok(addresses.iter().filter(lacks).copied().collect())
    }

    /// Makes the policy rules of these addresses, and no others, exist. Returns whether that changed anything.
    ///
    /// # Errors
    /// The kernel refuses; some may have been changed.
    pub fn set_branch_rules(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<bool, RouteError> {
        if !may_have_any() {
            return Ok(false);
        }
        let tables = self.tables()?;
        let wanted: Vec<PolicyRule> =
            addresses.iter().flat_map(|address| wanted(&tables, *address)).collect();
        // What was not read may be the route of a rule.
        let is_stale = |rule: &&PolicyRule| tables.complete && is_one(rule) && !wanted.contains(rule);
        let stale: Vec<_> = tables.rules.iter().filter(is_stale).collect();
        let missing: Vec<_> = wanted.iter().filter(|rule| !tables.rules.contains(rule)).collect();
        for rule in &missing {
            self.add_rule(rule, &words(rule))?;
        }
        for rule in &stale {
            self.remove_rule(rule, &words(rule))?;
        }
        Ok(!missing.is_empty() || !stale.is_empty())
    }
}

/// The rules that an address needs: packets to the pod are looked up in its own table, and what comes in through its interface is
/// delivered to the node where it is its own. None unless the address is that of a pod with a branch interface: a policy rule for an
/// interface leads to a table that has a route to this address alone, through the same interface.
fn wanted(tables: &RouteTables, address: IpAddr) -> Vec<PolicyRule> {
    let host = IpNet::from(address);
    let route = tables.routes.iter().find_map(|route| {
        let interface = route.interface.as_ref().filter(|_| route.to == host && is_of_pods(route.table))?;
        let leads = |rule: &&PolicyRule| {
            rule.in_interface.as_ref() == Some(interface)
                && rule.action == RuleAction::Lookup(route.table)
                && rule.family == route.family
        };
        let rule = tables.rules.iter().filter(leads).min_by_key(|rule| rule.priority)?;
        Some((route, interface, rule.priority))
    });
    let Some((route, interface, priority)) = route else { return Vec::new() };
    let to_pod = PolicyRule::lookup(route.family, TO_POD_PRIORITY, route.table);
    // Before the network plugin's.
    let answers = PolicyRule::lookup(route.family, priority.saturating_sub(1), RouteTables::LOCAL);
    vec![
        PolicyRule { to: Some(host), ..to_pod },
        PolicyRule { in_interface: Some(interface.clone()), ..answers },
    ]
}

/// Whether a policy rule is of one of these shapes. Only Istio's agent and this program make them on such nodes: the network plugin's own
/// at this priority lead to the table `main`, and its rules for interfaces to their tables.
fn is_one(rule: &PolicyRule) -> bool {
    let RuleAction::Lookup(table) = rule.action else { return false };
    let plain = PolicyRule::lookup(rule.family, rule.priority, table);
    let has_shape = match (rule.to, &rule.in_interface) {
        (Some(to), None) => {
            rule.priority == TO_POD_PRIORITY && to.prefix_len() == to.max_prefix_len() && is_of_pods(table)
        }
        (None, Some(_)) => table == RouteTables::LOCAL,
        (None, None) | (Some(_), Some(_)) => false,
    };
    has_shape && *rule == PolicyRule { to: rule.to, in_interface: rule.in_interface.clone(), ..plain }
}

/// One of these rules in the words of `ip rule`.
fn words(rule: &PolicyRule) -> String {
    let PolicyRule { to, in_interface, action, priority, .. } = rule;
    let to = to.map(|to| format!("to {}", to.addr()));
    let from = in_interface.as_ref().map(|name| format!("iif {name}"));
    format!("{}{action} pref {priority}", to.or(from).unwrap_or_default())
}

const fn is_of_pods(table: u32) -> bool {
    !matches!(table, 0 | RouteTables::DEFAULT | RouteTables::MAIN | RouteTables::LOCAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use netfilter_state::route_tables::{Route, RouteKind};
    use redirect_core::Family;

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
        let told: Vec<String> = wanted(&node(), address(POD)).iter().map(words).collect();
        assert_eq!(told, ["to 10.0.3.7 lookup 101 pref 512", "iif vlan1 lookup local pref 9"]);
        assert_eq!(wanted(&node(), address("10.0.1.9")), []);
        assert_eq!(wanted(&node(), address("10.0.3.8")), []);

        let mut other = node();
        other.routes[0].interface = Some("vlan2".to_string());
        assert_eq!(wanted(&other, address(POD)), [], "the rule is another interface's");
    }

    fn found(tables: &RouteTables) -> Vec<PolicyRule> {
        tables.rules.iter().filter(|rule| is_one(rule)).cloned().collect()
    }

    #[test]
    fn only_rules_of_these_shapes_are_found() {
        assert_eq!(found(&node()), Vec::<PolicyRule>::new(), "those are the network plugin's");
        let mut node = node();
        let two = wanted(&node, address(POD));
        node.rules.push(to(lookup(512, 101), POD));
        node.rules.push(through(lookup(9, RouteTables::LOCAL), "vlan1"));
        assert_eq!(found(&node), two);

        for other in [
            to(lookup(511, 101), POD),
            PolicyRule { mark: Some((1, 1)), ..to(lookup(512, 101), POD) },
            PolicyRule { to: Some("10.0.0.0/16".parse().expect("a range")), ..lookup(512, 101) },
            PolicyRule { protocol: Some(6), ..through(lookup(9, RouteTables::LOCAL), "vlan1") },
        ] {
            node.rules = [other].into();
            assert_eq!(found(&node), Vec::<PolicyRule>::new(), "{:?}", node.rules);
        }
    }
}
