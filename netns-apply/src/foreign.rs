//! Other programs' rules that interfere with a plan's: what hangs on the hooks of nf_tables and of the legacy tables, and what
//! the pod's traffic looks like.

use crate::{
    ApplyError, ApplyOptions,
    handles::Handles,
    legacy,
    netlink::{Connection, NetlinkError},
    noted::Noted,
    options::MOST_READ,
    pause::{deadline, pause},
    routes::{Addresses, Links, RouteSocket},
};
use netfilter_state::{route_tables::RouteTables, routing::FoundRouting, ruleset::Ruleset};
use packet_trace::{
    TraceRules,
    interference::{self, Effect, Finding, Judgement, Pod},
};
use redirect_core::{Family, RulePlan};
use std::{net::IpAddr, time::Duration};

/// What interferes with a plan's rules in the calling thread's network namespace, the most certain first. This presumes that
/// the rules are in force; [`verify`](crate::verify()) checks that first.
///
/// # Errors
/// The namespace cannot be inspected.
pub fn interference(plan: &RulePlan, options: &ApplyOptions) -> Result<Vec<Finding>, ApplyError> {
    Ok(judged(plan, options)?.findings)
}

/// The same, and what interferes because it is meant to (`options.accepted`).
///
/// # Errors
/// The namespace cannot be inspected.
pub fn judged(plan: &RulePlan, options: &ApplyOptions) -> Result<Judgement, ApplyError> {
    let mut looks = 1;
    loop {
        let Look { judgement, .. } = look(plan, options)?;
        if !judgement.findings.iter().any(is_about_routes) || looks == MOST_LOOKS {
            return Ok(judgement);
        }
        pause(BETWEEN_LOOKS);
        looks += 1;
    }
}

/// Which of other programs' rules interfere with a plan that a run has just put in force with these handles, each in a line for a log.
pub(crate) fn warnings(plan: &RulePlan, options: &ApplyOptions, handles: &mut Handles<'_>) -> Vec<String> {
    if is_alone(plan, options, handles) {
        return Vec::new();
    }
    let options = ApplyOptions {
        patience: options.patience.min(PATIENCE_OF_WARNINGS),
        most_read: options.most_read.or(Some(MOST_READ)),
        ..options.clone()
    };
    let findings = match look(plan, &options) {
        // Routing comes with the interfaces, and no run waits for them.
        Ok(Look { mut judgement, are_interfaces_up: false }) => {
            judgement.findings.retain(|finding| !is_about_routes(finding));
            Ok(judgement.findings)
        }
        Ok(Look { judgement, .. }) if judgement.findings.iter().any(is_about_routes) => {
            interference(plan, &options)
        }
        look => look.map(|look| look.judgement.findings),
    };
    match findings {
        Ok(findings) => in_the_way(&findings),
        Err(error) => vec![format!("cannot determine whether rules of other programs interfere: {error}")],
    }
}

fn is_about_routes(finding: &Finding) -> bool {
    finding.effect == Effect::Routes
}

/// What interferes with a plan, each in a line for a log.
#[must_use]
pub fn in_the_way(findings: &[Finding]) -> Vec<String> {
    let line = |finding: &Finding| {
        // What routing does may be for the lack of a route, or of an interface.
        let by_a_rule = if is_about_routes(finding) { "" } else { "a rule of another program: " };
        format!("{by_a_rule}{finding}")
    };
    findings.iter().map(line).collect()
}

/// How long a run that is done waits for another program that keeps changing rules, before it reports that it could not look.
const PATIENCE_OF_WARNINGS: Duration = Duration::from_secs(1);

/// How often to recheck routing that keeps packets from the proxy, and how long to wait in between: the kernel lists an IPv6
/// address a moment before its work queue has added the local route to it.
const MOST_LOOKS: usize = 6;
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// What interferes at one moment.
struct Look {
    judgement: Judgement,
    /// Whether the namespace has a loopback address, and uses every address that it has: a moment after an interface came up, IPv6 still
    /// looks for duplicates of its address.
    are_interfaces_up: bool,
}

fn look(plan: &RulePlan, options: &ApplyOptions) -> Result<Look, ApplyError> {
    let mut routes = RouteSocket::open(options.most_routing())?;
    let links = routes.links()?;
    let live = Live::hooks(plan, options, &mut routes, &links)?;
    Ok(Look {
        judgement: interference::judge(&live.ruleset, plan, &live.pod(options)),
        are_interfaces_up: live.addresses.iter().any(IpAddr::is_loopback)
            && live.by_interface.len() == live.addresses.len(),
    })
}

/// Whether what a run has noted shows that nothing interferes with its plan. Asks only for what the run could not know: what hangs on the hooks
/// besides rules of nf_tables.
fn is_alone(plan: &RulePlan, options: &ApplyOptions, handles: &mut Handles<'_>) -> bool {
    let Some(Noted { ruleset: Some(mut ruleset), surroundings: Some((survey, since)) }) =
        handles.noted.take()
    else {
        return false;
    };
    let has_legacy = Family::BOTH.into_iter().any(legacy::has_tables);
    let hooks = handles.netlink.as_mut().map(|socket| socket.hooks_into(&mut ruleset, plan.families()));
    if has_legacy || !matches!(hooks, Some(Ok(true))) || !since.is_quiet() {
        return false;
    }
    let live = Live::of(ruleset, survey.tables, survey.addresses);
    interference::judge(&live.ruleset, plan, &live.pod(options)).findings.is_empty()
}

/// What packets meet in a network namespace, from any program.
#[derive(Debug, Clone, Default)]
pub struct Live {
    /// Everything that hangs on the hooks, of nf_tables and of the legacy tables.
    pub ruleset: Ruleset,
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
    /// The interfaces through which it reaches other hosts ([`facts::interfaces`](crate::facts::interfaces)).
    pub interfaces: Vec<String>,
}

impl Live {
    /// Checks the calling thread's network namespace.
    ///
    /// # Errors
    /// The namespace cannot be inspected.
    pub fn now(options: &ApplyOptions) -> Result<Self, ApplyError> {
        Self::now_for(&RulePlan::empty(), options)
    }

    /// The same of a namespace that may hold this plan, whose own rules are always readable.
    ///
    /// # Errors
    /// As [`now`](Self::now).
    pub fn now_for(plan: &RulePlan, options: &ApplyOptions) -> Result<Self, ApplyError> {
        let mut routes = RouteSocket::open(options.most_routing())?;
        let links = routes.links()?;
        let mut live = Self::routed(plan, options, &mut routes, &links)?;
        live.unexamined = routes.unexamined(&links)?;
        Ok(live)
    }

    /// The same without what is not examined, of a namespace that may hold a plan.
    pub(crate) fn examined(plan: &RulePlan, options: &ApplyOptions) -> Result<Self, ApplyError> {
        let mut routes = RouteSocket::open(options.most_routing())?;
        let links = routes.links()?;
        Self::routed(plan, options, &mut routes, &links)
    }

    /// The rules that packets of a family meet. If a plan is given, its own rules know the settings behind them.
    #[must_use]
    pub fn rules(&self, family: Family, plan: Option<&RulePlan>) -> TraceRules {
        self.seen().trace_rules(&self.ruleset, &self.routing, family, plan)
    }

    /// What its packets look like.
    pub(crate) const fn pod<'a>(&'a self, options: &'a ApplyOptions) -> Pod<'a> {
        Pod { accepted: Some(&options.accepted), ..self.seen() }
    }

    const fn seen(&self) -> Pod<'_> {
        Pod {
            addresses: self.addresses.as_slice(),
            interfaces: self.interfaces.as_slice(),
            by_interface: Some(self.by_interface.as_slice()),
            routes: Some(&self.route_tables),
            accepted: None,
        }
    }

    fn routed(
        plan: &RulePlan,
        options: &ApplyOptions,
        routes: &mut RouteSocket,
        links: &Links,
    ) -> Result<Self, ApplyError> {
        let mut live = Self::hooks(plan, options, routes, links)?;
        live.routing = routes.observe()?;
        Ok(live)
    }

    /// All but the routing of a plan and what is not examined.
    fn hooks(
        plan: &RulePlan,
        options: &ApplyOptions,
        routes: &mut RouteSocket,
        links: &Links,
    ) -> Result<Self, ApplyError> {
        let most = options.most_read(plan);
        let mut ruleset = nf_tables(options, most)?;
        for family in Family::BOTH {
            legacy::add_to(&mut ruleset, family, most)?;
        }
        let addresses = routes.addresses_and_interfaces(links)?;
        Ok(Self::of(ruleset, routes.tables_with(links)?, addresses))
    }

    fn of(ruleset: Ruleset, route_tables: RouteTables, addresses: Addresses) -> Self {
        let Addresses { all: addresses, by_interface, interfaces } = addresses;
        Self { ruleset, route_tables, addresses, by_interface, interfaces, ..Self::default() }
    }
}

/// What sees the packets of the calling thread's network namespace and is not examined (XDP programs, filters of traffic
/// control), each in words.
///
/// # Errors
/// The kernel does not report it.
pub fn unexamined() -> Result<Vec<String>, ApplyError> {
    let mut routes = RouteSocket::open(usize::MAX)?;
    let links = routes.links()?;
    Ok(routes.unexamined(&links)?)
}

/// What hangs on the hooks of nf_tables; nothing where the kernel has none.
fn nf_tables(options: &ApplyOptions, most: usize) -> Result<Ruleset, ApplyError> {
    let read = || {
        let mut connection = Connection::open()?;
        connection.limit(most);
        connection.ruleset(deadline(options.patience))
    };
    match read() {
        Err(NetlinkError::NoNfTables) => Ok(Ruleset::default()),
        Err(NetlinkError::NotPermitted) => Err(ApplyError::NotPermitted),
        ruleset => Ok(ruleset?),
    }
}
