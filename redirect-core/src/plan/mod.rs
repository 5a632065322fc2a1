//! The plan: ordered rules, policy routes and addresses that make a redirection real.
//!
//! A plan is made in the order in which the reference emits its rules; each rule group is one short function. Folding
//! the plan gives the rules of a family as they will stand in the kernel.

mod ambient;
mod builder;
mod dns;
mod groups;
mod guard;
pub mod native;

use crate::{
    redirect::{InboundPorts, InterceptionMode, Redirect},
    rule::{Chain, Hook, Match, Rule, Scope, Table, Target},
    settings::{Key, Provenance, Source},
    values::{Family, MaskedMark, RouteTable},
};
use alloc::{collections::BTreeMap, vec::Vec};
use core::net::Ipv6Addr;

/// Where in its chain a rule goes at the moment it is emitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum Position {
    /// Behind the last rule.
    Last,
    /// Before the rule with this number, counted from 1.
    Before(usize),
}

/// A rule of a plan: the rule, where it goes, and which setting asked for it.
///
/// Two are equal when they are the same rule for the same setting in the same place; who said so does not matter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedRule {
    pub(crate) table: Table,
    pub(crate) chain: Chain,
    pub(crate) position: Position,
    pub(crate) scope: Scope,
    pub(crate) rule: Rule,
    pub(crate) setting: Key,
    pub(crate) source: Provenance<Source>,
    pub(crate) purpose: &'static str,
}

impl PlannedRule {
    /// Its table.
    #[must_use]
    pub const fn table(&self) -> Table {
        self.table
    }

    /// Its chain.
    #[must_use]
    pub const fn chain(&self) -> &Chain {
        &self.chain
    }

    /// The families it is for.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        self.scope
    }

    /// The rule.
    #[must_use]
    pub const fn rule(&self) -> &Rule {
        &self.rule
    }

    /// The setting that asked for it.
    #[must_use]
    pub const fn setting(&self) -> Key {
        self.setting
    }

    /// Who said so: the flag, variable or annotation that was set, [`Source::Default`] where none was.
    #[must_use]
    pub const fn source(&self) -> Source {
        self.source.0
    }

    /// What it is for, in a few words.
    #[must_use]
    pub const fn purpose(&self) -> &'static str {
        self.purpose
    }
}

/// Policy routing that delivers marked packets to the proxy: `ip rule` and a route per family.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct PolicyRoutes {
    #[cfg_attr(feature = "serde", serde(flatten, serialize_with = "crate::rule::json::masked_mark"))]
    pub(crate) mark: MaskedMark,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub(crate) priority: Option<u32>,
    pub(crate) table: RouteTable,
    pub(crate) families: Vec<Family>,
}

impl PolicyRoutes {
    /// The mark of the packets.
    #[must_use]
    pub const fn mark(&self) -> MaskedMark {
        self.mark
    }

    /// The routing table.
    #[must_use]
    pub const fn table(&self) -> RouteTable {
        self.table
    }

    /// The priority of the policy rule; where `None`, the kernel chooses one before all others but its own.
    #[must_use]
    pub const fn priority(&self) -> Option<u32> {
        self.priority
    }

    /// The families that have them.
    #[must_use]
    pub fn families(&self) -> &[Family] {
        &self.families
    }
}

/// Who a pod's traffic goes to. Closed: native tables of each have names of their own, which who reads or writes them has to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DataPlane {
    /// The pod's own proxy.
    Sidecar,
    /// The node's ztunnel.
    Ambient,
}

impl DataPlane {
    /// Both of them.
    pub const BOTH: [Self; 2] = [Self::Sidecar, Self::Ambient];
}

/// What makes a redirection real.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RulePlan {
    data_plane: DataPlane,
    rules: Vec<PlannedRule>,
    families: Vec<Family>,
    policy_routes: Option<PolicyRoutes>,
}

impl Redirect {
    /// The plan of this redirection.
    #[must_use]
    pub fn plan(&self) -> RulePlan {
        let families = self.families().list().to_vec();
        let policy_routes = match (self.mode(), self.inbound()) {
            (InterceptionMode::Redirect, _) | (InterceptionMode::Tproxy(_), InboundPorts::None) => None,
            (InterceptionMode::Tproxy(tproxy), InboundPorts::AllExcept(_) | InboundPorts::Only(_)) => {
                let (mark, table) = (tproxy.mark().into(), tproxy.table());
                Some(PolicyRoutes { mark, table, priority: None, families: families.clone() })
            }
        };
        RulePlan { data_plane: DataPlane::Sidecar, rules: groups::rules(self), families, policy_routes }
    }
}

impl RulePlan {
    /// The users whose connections it lets pass: the proxy's.
    pub fn proxy_users(&self) -> impl Iterator<Item = u32> + '_ {
        let conditions = self.planned_rules().iter().flat_map(|planned| &planned.rule().matches);
        conditions
            .filter_map(|condition| if let Match::OwnerUid(is) = condition { Some(is.value) } else { None })
    }

    /// The groups whose connections it lets pass because they are the proxy's.
    pub fn proxy_groups(&self) -> impl Iterator<Item = u32> + '_ {
        let proxys = self.planned_rules().iter().filter(|planned| planned.setting() == Key::ProxyGid);
        let conditions = proxys.flat_map(|planned| &planned.rule().matches);
        conditions
            .filter_map(|condition| if let Match::OwnerGid(is) = condition { Some(is.value) } else { None })
    }

    /// The plan of nothing: what a namespace holds that is not redirected.
    #[must_use]
    pub const fn empty() -> Self {
        Self { data_plane: DataPlane::Sidecar, rules: Vec::new(), families: Vec::new(), policy_routes: None }
    }

    /// Who the pod's traffic goes to.
    #[must_use]
    pub const fn data_plane(&self) -> DataPlane {
        self.data_plane
    }

    /// The rules, in the order of emission.
    #[must_use]
    pub fn planned_rules(&self) -> &[PlannedRule] {
        &self.rules
    }

    /// The families with rules.
    #[must_use]
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// The policy routes: in TPROXY mode with captured inbound ports, and in ambient mode.
    #[must_use]
    pub const fn policy_routes(&self) -> Option<&PolicyRoutes> {
        self.policy_routes.as_ref()
    }

    /// The same, its policy routing in this table and at this priority: where it fits beside that of other programs.
    #[must_use]
    pub const fn with_policy_routing(mut self, table: RouteTable, priority: Option<u32>) -> Self {
        if let Some(routes) = &mut self.policy_routes {
            routes.table = table;
            routes.priority = priority;
        }
        self
    }

    /// The address to be added to the loopback interface: `::6`, wherever IPv6 is programmed for a sidecar.
    ///
    /// It is the source address of the proxy's connections to the application; IPv4's 127.0.0.6 needs no adding.
    #[must_use]
    pub fn loopback_address(&self) -> Option<Ipv6Addr> {
        let is_needed = self.data_plane == DataPlane::Sidecar && self.families.contains(&Family::V6);
        is_needed.then_some(Family::PASSTHROUGH_V6)
    }

    /// The rules of a family as they will stand. Nothing where the plan has no rules for it.
    #[must_use]
    pub fn rules(&self, family: Family) -> FamilyRules {
        let mut rules = FamilyRules::default();
        for (table, chains) in self.explained_rules(family) {
            for (chain, planned) in chains {
                if let Chain::Hook(hook) = chain {
                    let first = planned.iter().filter(|rule| matches!(rule.position, Position::Before(_)));
                    rules.leading.insert((table, hook), first.count());
                }
                let canonical = planned.iter().map(|planned| planned.rule.canonical()).collect();
                rules.tables.entry(table).or_default().insert(chain, canonical);
            }
        }
        rules
    }

    /// The rules of all families as they will stand where one table serves both (native nftables), each with the
    /// planned rule it comes from.
    ///
    /// A rule that goes before another is counted in among those of both families, as the reference does it. So in TPROXY
    /// mode two rules of `ISTIO_INBOUND` stand the other way round than in the tables of IPv4 alone: what comes from
    /// 127.0.0.6, and what is loopback traffic but not the proxy's. Both return, so it makes no difference to a packet.
    #[must_use]
    pub fn merged_rules(&self) -> BTreeMap<Table, BTreeMap<Chain, Vec<&PlannedRule>>> {
        self.folded(|planned| match planned.scope {
            Scope::Every => true,
            Scope::Only(family) => self.families.contains(&family),
        })
    }

    /// The rules of a family as they will stand in tables of its own, each with the planned rule it comes from. Nothing
    /// where the plan has no rules for it.
    #[must_use]
    pub fn explained_rules(&self, family: Family) -> BTreeMap<Table, BTreeMap<Chain, Vec<&PlannedRule>>> {
        self.folded(|planned| self.families.contains(&family) && planned.scope.covers(family))
    }

    fn folded(
        &self,
        wanted: impl Fn(&PlannedRule) -> bool,
    ) -> BTreeMap<Table, BTreeMap<Chain, Vec<&PlannedRule>>> {
        let mut tables: BTreeMap<Table, BTreeMap<Chain, Vec<&PlannedRule>>> = BTreeMap::new();
        for planned in self.rules.iter().filter(|planned| wanted(planned)) {
            let chains = tables.entry(planned.table).or_default();
            if let Target::Jump(to) = &planned.rule.target {
                chains.entry(to.clone()).or_default();
            }
            place(chains.entry(planned.chain.clone()).or_default(), planned.position, planned);
        }
        tables
    }
}

/// The rules of one family as they will stand, in canonical form.
///
/// In built-in chains, where other programs' rules may stand, some go before all others and the rest behind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FamilyRules {
    tables: BTreeMap<Table, BTreeMap<Chain, Vec<Rule>>>,
    /// How many rules of a built-in chain go before all others.
    leading: BTreeMap<(Table, Hook), usize>,
}

impl FamilyRules {
    /// Whether it holds no rule.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// The tables, in the order in which they are to be written: the one that takes over inbound capture goes first, so that
    /// capture never lapses.
    #[must_use]
    pub fn table_order(&self) -> &'static [Table] {
        if self.rules(Table::Nat, &Hook::Prerouting.into()).is_empty() {
            Table::ALL
        } else {
            &[Table::Raw, Table::Nat, Table::Mangle]
        }
    }

    /// The chains of a table, by name, each with its rules in order, as if no other program had any.
    pub fn chains(&self, table: Table) -> impl Iterator<Item = (&Chain, &[Rule])> {
        self.tables.get(&table).into_iter().flatten().map(|(chain, rules)| (chain, rules.as_slice()))
    }

    /// The rules of a chain; none if the chain does not exist.
    #[must_use]
    pub fn rules(&self, table: Table, chain: &Chain) -> &[Rule] {
        self.tables.get(&table).and_then(|chains| chains.get(chain)).map_or(&[], Vec::as_slice)
    }

    /// How many rules of this chain go before other programs' rules: only built-in chains have any.
    #[must_use]
    pub fn leading(&self, table: Table, chain: &Chain) -> usize {
        match chain {
            Chain::Hook(hook) => self.leading.get(&(table, *hook)).copied().unwrap_or(0),
            Chain::Ours(_) | Chain::Other(_) => 0,
        }
    }
}

/// Puts a rule where its position says; a number beyond the end means the end.
fn place<T>(entries: &mut Vec<T>, position: Position, entry: T) {
    match position {
        Position::Last => entries.push(entry),
        Position::Before(number) => {
            let index = number.saturating_sub(1).min(entries.len());
            entries.insert(index, entry);
        }
    }
}
