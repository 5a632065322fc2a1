//! Other programs' rules that interfere with a plan's.
//!
//! Rules in force do not prove that traffic is captured: a packet meets all base chains of its hooks, by
//! priority, and a chain of another program may translate it first, drop it, or hide it from connection tracking; within a
//! built-in chain a rule before the mesh's may end it. [`PodTraffic::judge`] sends packets that the plan captures through everything that hangs on their way, and
//! names what they meet.
//!
//! A rule with supported conditions that no captured packet fulfils is not a finding. One with an unsupported condition or
//! statement [may](Certainty::May) interfere. The search judges first packets, in the direction in
//! which a connection is opened.

mod consequences;
mod finding;
mod lost;
mod opening;
mod starts;

pub use consequences::Consequence;
pub use finding::{Accepted, Certainty, Effect, Finding, RuleRef, Traffic};
pub use opening::{Captures, Opener, Opening};

use crate::TraceRules;
use consequences::Outcomes;
pub(crate) use lost::example;
use lost::{AcceptedFindings, Compared, Findings, most_work, search};
use netfilter_state::ruleset::{ChainState, HookedRules, Statement, TableFamily, TableName};
use netfilter_state::{route_tables::RouteTables, routing::FoundRouting};
use redirect_core::{
    accepted::AcceptedRules,
    plan::{DataPlane, RulePlan},
    rule::Chain,
    values::{Family, is_routable},
};
pub(crate) use starts::multicast;
use std::{collections::BTreeSet, net::IpAddr};

/// What captured packets look like in a pod.
#[derive(Debug, Clone, Copy, Default)]
pub struct PodTraffic<'a> {
    /// Its addresses. Traffic of a family it has no address of is not judged.
    pub addresses: &'a [IpAddr],
    /// The interfaces by which it may talk to others, all but loopback; any, if none is named.
    pub interfaces: &'a [String],
    /// The addresses of each interface, in the kernel's order. Where they are not known, REDIRECT is taken to keep what is for an
    /// address of the pod.
    pub by_interface: Option<&'a [(String, IpAddr)]>,
    /// Its policy rules and routes. Where they are not known, packets with a plan's mark are taken to be delivered in the pod, and so
    /// is everything that arrives.
    pub routes: Option<&'a RouteTables>,
    /// The rules whose effect is meant; without them those of KubeVirt alone.
    pub accepted: Option<&'a AcceptedRules>,
}

impl PodTraffic<'_> {
    /// The rules that its packets of a family meet, by a verdict and in a trace of one packet. With a plan, its own rules know the
    /// settings behind them.
    #[must_use]
    pub fn trace_rules(
        &self,
        ruleset: &HookedRules,
        routing: &[FoundRouting],
        family: Family,
        plan: Option<&RulePlan>,
    ) -> TraceRules {
        self.in_pod(TraceRules::of_ruleset(ruleset, routing, family, plan))
    }

    /// The same rules where its addresses, interfaces and routes are known.
    fn in_pod(&self, rules: TraceRules) -> TraceRules {
        let mut rules = rules.with_addresses(self.addresses).with_links(self.interfaces);
        if let Some(addresses) = self.by_interface {
            rules = rules.with_interfaces(addresses);
        }
        match self.routes {
            Some(tables) => rules.with_routes(tables),
            None => rules,
        }
    }

    /// What interferes with a plan's rules, and what is meant to do so. A rule that is accepted hides no other's: packets that are lost
    /// to it are walked again as if it did nothing. What is lost because rules of the plan are missing is not among it:
    /// [`consequences`](Self::consequences) has that.
    #[must_use]
    pub fn judge(&self, ruleset: &HookedRules, plan: &RulePlan) -> Judgement {
        let (mut findings, mut accepted) = (Findings::default(), AcceptedFindings::default());
        own_tables(ruleset, &mut findings);
        let routing = FoundRouting::all_working(plan);
        let (addresses, mut work, mut outcomes) =
            (FollowedAddresses::of(self), most_work(), Outcomes::default());
        let followed = addresses.pod(self);
        if followed.addresses.len() < self.addresses.len() {
            let place = RuleRef::table(TableName::of_family(Family::V4));
            findings.add(Finding::of_place(Certainty::May, Effect::Unfollowed, place));
        }
        for family in plan.families() {
            let rules = self.compared(ruleset, &routing, *family, plan);
            let found = (&mut findings, &mut accepted);
            search(plan, &rules, &followed, &mut work, found, |judge| outcomes.add(judge));
        }
        outcomes.are_unknown = work.left == 0;
        let findings = findings.into_sorted();
        let consequences = if findings.is_empty() { Vec::new() } else { outcomes.consequences(plan) };
        Judgement { findings, accepted: accepted.into_sorted(), consequences }
    }

    /// What a verdict compares, which needs less of the plan's rules and knows what is meant.
    fn compared(
        &self,
        ruleset: &HookedRules,
        routing: &[FoundRouting],
        family: Family,
        plan: &RulePlan,
    ) -> Compared {
        let of_kubevirt_alone = AcceptedRules::default();
        let planned = TraceRules::of_plan(plan, family);
        let rules = TraceRules::of_ruleset_beside(ruleset, routing, family, &planned.chains);
        let live = self.in_pod(rules).thinned();
        let live = live.with_accepted(self.accepted.unwrap_or(&of_kubevirt_alone));
        Compared { planned: planned.thinned(), live }
    }
}

/// What interferes with a plan's rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judgement {
    /// What should not: the surest first. At most a few; another program's ruleset may be made to have any number.
    pub findings: Vec<Finding>,
    /// What is meant to.
    pub accepted: Vec<Accepted>,
    /// What the findings mean for captured traffic.
    pub consequences: Vec<Consequence>,
}

/// How many addresses of each family are judged one by one. A pod has one or two; a container with `CAP_NET_ADMIN` may add any number.
const MOST_ADDRESSES: usize = 16;

/// The addresses of a pod that are followed.
struct FollowedAddresses {
    addresses: Vec<IpAddr>,
    /// The first address of each family and kind of each interface, which is all that matters.
    by_interface: Option<Vec<(String, IpAddr)>>,
}

impl FollowedAddresses {
    fn of(pod: &PodTraffic<'_>) -> Self {
        let of_family = |family| pod.addresses.iter().filter(move |address| Family::of(address) == family);
        let addresses = Family::BOTH.into_iter().flat_map(|family| of_family(family).take(MOST_ADDRESSES));
        let by_interface = pod.by_interface.map(|all| {
            let mut known = BTreeSet::new();
            let mut is_first = |(name, address): (&'_ str, &IpAddr)| {
                known.insert((String::from(name), Family::of(address), is_routable(address)))
            };
            all.iter().filter(|(name, address)| is_first((name, address))).cloned().collect()
        });
        Self { addresses: addresses.copied().collect(), by_interface }
    }

    fn pod<'a>(&'a self, pod: &PodTraffic<'a>) -> PodTraffic<'a> {
        PodTraffic { addresses: &self.addresses, by_interface: self.by_interface.as_deref(), ..*pod }
    }
}

/// What is wrong with the tables of the mesh themselves: dormant, or a policy that drops what the rules leave alone.
fn own_tables(ruleset: &HookedRules, findings: &mut Findings) {
    for (name, table) in &ruleset.tables {
        let whole = RuleRef::table(name.clone());
        let mut own = table.chains.iter().filter(|(_, chain)| is_of_the_mesh(name, chain)).peekable();
        if table.dormant && own.peek().is_some() {
            findings.add(Finding::of_place(Certainty::Does, Effect::Dormant, whole));
            continue;
        }
        for (chain_name, chain) in own {
            if let Some(base) = chain.base.filter(|base| base.drops) {
                let hook = Some((base.hook, base.priority));
                let (base_chain, chain) = (chain_name.clone(), chain_name.clone());
                let place = RuleRef { base_chain, hook, chain, ..whole.clone() };
                findings.add(Finding::of_place(Certainty::Does, Effect::PolicyDrops, place));
            }
        }
    }
}

/// Whether a chain is the mesh's, or holds jumps to the mesh's.
fn is_of_the_mesh(table: &TableName, chain: &ChainState) -> bool {
    let is_native = table.family == TableFamily::Inet && DataPlane::NFT_TABLES.contains(&table.name.as_str());
    let jumps = |statement: &Statement| matches!(statement, Statement::Jump(to) | Statement::Goto(to) if Chain::named(to).belongs_to_mesh());
    is_native || chain.rules.iter().flat_map(|rule| &rule.statements).any(jumps)
}

#[cfg(test)]
pub(crate) mod recorded;
#[cfg(test)]
mod tests;
