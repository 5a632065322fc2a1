//! What packets meet in a network namespace, and which of other programs' rules interfere with a plan's: what hangs on the hooks of
//! nf_tables and of the legacy tables, and what the pod's traffic looks like.

use crate::{
    ApplyError, ApplyOptions,
    handles::{Handles, Surroundings},
    legacy,
    netlink::{NetlinkError, NftConnection},
    observe::NamespaceState,
    pause::{deadline, pause},
    routes::{Addresses, Links, RouteSocket, Routing, Survey},
};
use netfilter_state::{
    netlink::Observed, route_tables::RouteTables, routing::FoundRouting, ruleset::HookedRules,
    steps::Observation,
};
use packet_trace::{
    TraceRules,
    interference::{Effect, Finding, Judgement, PodTraffic},
};
use redirect_core::{Family, RulePlan};
use std::{net::IpAddr, time::Duration};

/// What interferes with a plan's rules, and what interferes because it is meant to (`options.accepted`). Where what was read already shows nothing, nothing else is read.
pub(crate) fn judged(
    read: Option<Live>,
    plan: &RulePlan,
    options: &ApplyOptions,
) -> Result<Judgement, ApplyError> {
    if let Some(judgement) = read.and_then(|live| live.clears(plan, options)) {
        return Ok(judgement);
    }
    let mut looks = 1;
    loop {
        let judgement = Live::examined(plan, options)?.judge(plan, options);
        if !judgement.findings.iter().any(is_about_routes) || looks == MOST_LOOKS {
            return Ok(judgement);
        }
        pause(BETWEEN_LOOKS);
        looks += 1;
    }
}

/// Which of other programs' rules interfere with a plan that a run has just put in force, each in a line for a log. Where what the run has
/// read already shows nothing, nothing else is read.
pub(crate) fn warnings(read: Option<Live>, plan: &RulePlan, options: &ApplyOptions) -> Vec<String> {
    if read.and_then(|live| live.clears(plan, options)).is_some() {
        return Vec::new();
    }
    let options = ApplyOptions {
        patience: options.patience.min(PATIENCE_OF_WARNINGS),
        most_read: options.most_read.or(Some(ApplyOptions::MOST_READ)),
        ..options.clone()
    };
    let findings = Live::examined(plan, &options).and_then(|live| {
        let mut findings = live.judge(plan, &options).findings;
        if !findings.iter().any(is_about_routes) {
            return Ok(findings);
        }
        // Routing comes with the interfaces, and no run waits for them.
        if live.has_interfaces_up() {
            return Live::interference(plan, &options);
        }
        findings.retain(|finding| !is_about_routes(finding));
        Ok(findings)
    });
    match findings {
        Ok(findings) => findings.iter().map(Finding::log_line).collect(),
        Err(error) => vec![format!("cannot determine whether rules of other programs interfere: {error}")],
    }
}

fn is_about_routes(finding: &Finding) -> bool {
    finding.effect == Effect::Routes
}

/// How long a run that is done waits for another program that keeps changing rules, before it reports that it could not look.
const PATIENCE_OF_WARNINGS: Duration = Duration::from_secs(1);

/// How often to recheck routing that keeps packets from the proxy, and how long to wait in between: the kernel lists an IPv6
/// address a moment before its work queue has added the local route to it.
const MOST_LOOKS: usize = 6;
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// What packets meet in a network namespace, from any program.
#[derive(Debug, Clone, Default)]
pub struct Live {
    /// Everything that hangs on the hooks, of nf_tables and of the legacy tables.
    pub ruleset: HookedRules,
    /// Policy rules and routes of the kind TPROXY needs.
    pub routing: Vec<FoundRouting>,
    /// All policy rules and routes.
    pub route_tables: RouteTables,
    /// What else sees its packets and is not examined (XDP programs, filters of traffic control), each in words.
    pub unexamined: Vec<String>,
    /// The addresses of its interfaces.
    pub addresses: Vec<IpAddr>,
    /// Those in use, each with its interface, in the kernel's order.
    pub by_interface: Vec<(String, IpAddr)>,
    /// The interfaces through which it reaches other hosts ([`RouteSocket::interfaces`]).
    pub interfaces: Vec<String>,
}

impl Live {
    /// What interferes with a plan's rules in the calling thread's network namespace, the most certain first. This presumes that
    /// the rules are in force; [`verify`](crate::verify()) checks that first.
    ///
    /// # Errors
    /// The namespace cannot be inspected.
    pub fn interference(plan: &RulePlan, options: &ApplyOptions) -> Result<Vec<Finding>, ApplyError> {
        Ok(judged(None, plan, options)?.findings)
    }

    /// What sees the packets of the calling thread's network namespace and is not examined (XDP programs, filters of traffic
    /// control), each in words.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn unexamined_here() -> Result<Vec<String>, ApplyError> {
        let mut routes = RouteSocket::open(usize::MAX)?;
        let links = routes.links()?;
        Ok(routes.unexamined(&links)?)
    }

    /// Checks the calling thread's network namespace. If it may hold a plan, that plan's own rules are always readable.
    ///
    /// # Errors
    /// The namespace cannot be inspected.
    pub fn now(plan: Option<&RulePlan>, options: &ApplyOptions) -> Result<Self, ApplyError> {
        let (live, mut routes, links) = Self::read(plan.unwrap_or(&RulePlan::empty()), options)?;
        Ok(Self { unexamined: routes.unexamined(&links)?, ..live })
    }

    /// The same without what is not examined.
    pub(crate) fn examined(plan: &RulePlan, options: &ApplyOptions) -> Result<Self, ApplyError> {
        Ok(Self::read(plan, options)?.0)
    }

    /// The same, with what it takes to ask for the rest.
    fn read(plan: &RulePlan, options: &ApplyOptions) -> Result<(Self, RouteSocket, Links), ApplyError> {
        let mut routes = RouteSocket::open(options.most_routing())?;
        let links = routes.links()?;
        let most = options.most_read_with(plan);
        let mut ruleset = nf_tables(options, most)?;
        for family in Family::BOTH {
            legacy::add_to(&mut ruleset, family, most)?;
        }
        let assigned = routes.assigned()?;
        let survey = routes.survey(&links, &assigned)?;
        Ok((Self::of(ruleset, survey), routes, links))
    }

    /// The same from what a look has shown (of rules, from the messages of a transaction that has `made` all since), and from what hangs on the
    /// hooks of a plan's families, which is read now. `None` if that is not all, or something has changed.
    pub(crate) fn from_look(
        seen: NamespaceState,
        made: Option<Vec<u8>>,
        plan: &RulePlan,
        handles: &mut Handles<'_>,
    ) -> Option<Self> {
        let NamespaceState { state, surroundings, nf_tables, .. } = seen;
        let Observation { routing, legacy, nft, native } = state;
        // They may be as large as the plan: they are gone before packets are followed.
        drop((legacy, nft, native));
        let (Surroundings { survey, since }, socket) = (surroundings?, handles.netlink.as_mut()?);
        // A run's own transaction has moved the generation.
        let generation = nf_tables.as_ref().filter(|_| made.is_none()).map(Observed::generation);
        let mut ruleset = match made {
            Some(made) => HookedRules::of_messages(&made),
            None => nf_tables?.into_everything(socket.most_rules())?,
        };
        let has_all_hooks = socket.hooks_into(&mut ruleset, plan.families()).ok()?;
        let has_changed = match generation {
            Some(generation) => generation != Some(socket.generation().ok()?),
            None => false,
        };
        let has_legacy_tables = Family::BOTH.into_iter().any(legacy::has_tables);
        let is_all = has_all_hooks && !has_changed && !has_legacy_tables && since.is_quiet();
        is_all.then(|| {
            Self::of(ruleset, Survey { routing: Routing { found: routing, ..survey.routing }, ..survey })
        })
    }

    /// The rules that packets of a family meet. If a plan is given, its own rules know the settings behind them.
    #[must_use]
    pub fn rules(&self, family: Family, plan: Option<&RulePlan>) -> TraceRules {
        self.seen().trace_rules(&self.ruleset, &self.routing, family, plan)
    }
    /// What interferes with a plan that is in force.
    fn judge(&self, plan: &RulePlan, options: &ApplyOptions) -> Judgement {
        self.pod(options).judge(&self.ruleset, plan)
    }

    /// The judgement about a plan that is in force, if nothing interferes.
    fn clears(&self, plan: &RulePlan, options: &ApplyOptions) -> Option<Judgement> {
        Some(self.judge(plan, options)).filter(|judgement| judgement.findings.is_empty())
    }

    /// Whether it has a loopback address, and uses every address that it has: a moment after an interface came up, IPv6 still looks for
    /// duplicates of its address.
    fn has_interfaces_up(&self) -> bool {
        self.addresses.iter().any(IpAddr::is_loopback) && self.by_interface.len() == self.addresses.len()
    }

    /// What its packets look like.
    pub(crate) const fn pod<'a>(&'a self, options: &'a ApplyOptions) -> PodTraffic<'a> {
        PodTraffic { accepted: Some(&options.accepted), ..self.seen() }
    }

    const fn seen(&self) -> PodTraffic<'_> {
        PodTraffic {
            addresses: self.addresses.as_slice(),
            interfaces: self.interfaces.as_slice(),
            by_interface: Some(self.by_interface.as_slice()),
            routes: Some(&self.route_tables),
            accepted: None,
        }
    }

    fn of(ruleset: HookedRules, survey: Survey) -> Self {
        let Survey { routing: Routing { found: routing, tables: route_tables, .. }, addresses } = survey;
        let Addresses { all: addresses, by_interface, interfaces } = addresses;
        Self { ruleset, routing, route_tables, unexamined: Vec::new(), addresses, by_interface, interfaces }
    }
}

/// What hangs on the hooks of nf_tables; nothing where the kernel has none.
fn nf_tables(options: &ApplyOptions, most: usize) -> Result<HookedRules, ApplyError> {
    let read = || {
        let mut connection = NftConnection::open()?;
        connection.limit(most);
        connection.ruleset(deadline(options.patience))
    };
    match read() {
        Err(NetlinkError::NoNfTables) => Ok(HookedRules::default()),
        Err(NetlinkError::NotPermitted) => Err(ApplyError::NotPermitted),
        ruleset => Ok(ruleset?),
    }
}
