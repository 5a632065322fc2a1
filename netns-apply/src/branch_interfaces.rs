//! Policy rules for probes of pods with branch interfaces, in the calling thread's network namespace, which must be the node's.
//! [`branch_rule`] has their form.

use crate::branch_rule;
use crate::routes::{RouteError, RouteSocket};
use netfilter_state::route_tables::PolicyRule;
use std::{collections::BTreeSet, fs, net::IpAddr};

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
        let lacks = |address: &&IpAddr| {
            branch_rule::wanted(&tables, **address).iter().any(|rule| !tables.rules.contains(rule))
        };
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
            addresses.iter().flat_map(|address| branch_rule::wanted(&tables, *address)).collect();
        // What was not read may be the route of a rule.
        let is_stale =
            |rule: &&PolicyRule| tables.complete && branch_rule::is_one(rule) && !wanted.contains(rule);
        let stale: Vec<_> = tables.rules.iter().filter(is_stale).collect();
        let missing: Vec<_> = wanted.iter().filter(|rule| !tables.rules.contains(rule)).collect();
        for rule in &missing {
            self.add_branch_rule(rule)?;
        }
        for rule in &stale {
            self.remove_branch_rule(rule)?;
        }
        Ok(!missing.is_empty() || !stale.is_empty())
    }
}
