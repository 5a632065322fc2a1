//! What a run observes and acts with: helper programs, a routing socket and, where it answers, a socket for nf_tables.

use crate::{
    ApplyError, ApplyOptions,
    capabilities::Capability,
    exec::Programs,
    netlink::{NetlinkError, NftConnection},
    notify::Subscription,
    routes::{RouteError, RouteSocket, Survey},
};
use netfilter_state::routing::FoundRouting;
use redirect_core::{RulePlan, options::BackendChoice};

/// What a run observes and acts with, in the calling thread's network namespace.
pub(crate) struct Handles<'a> {
    pub(crate) programs: &'a Programs,
    /// How many bytes of rules a look reads at most, of each kind.
    pub(crate) most_read: usize,
    pub(crate) routes: RouteSocket,
    /// Where the kernel has nf_tables.
    pub(crate) netlink: Option<NftConnection>,
    /// Whether the tables of iptables-nft are read and changed over netlink, or by iptables' programs.
    pub(crate) nft_in_transaction: bool,
    /// The generation of the ruleset, until the first look.
    generation: Option<u32>,
}

impl<'a> Handles<'a> {
    /// Opens the sockets, for a namespace that may hold a plan. If iptables' programs are asked for, they are used for the tables of iptables.
    pub(crate) fn open(options: &'a ApplyOptions, plan: &RulePlan) -> Result<Self, ApplyError> {
        let most_read = options.most_read_with(plan);
        let netlink = match (options.backend, connect(most_read)) {
            (
                BackendChoice::Auto | BackendChoice::Restore(_),
                Err(ApplyError::Netlink(NetlinkError::NoNfTables)),
            ) => without_netlink()?,
            (_, connected) => Some(connected?),
        };
        let (netlink, generation) = netlink.unzip();
        let by_programs = matches!(options.backend, BackendChoice::Restore(_));
        let nft_in_transaction = netlink.is_some() && !by_programs;
        let (programs, routes) = (&options.programs, RouteSocket::open(options.most_routing())?);
        Ok(Self { programs, most_read, routes, netlink, nft_in_transaction, generation })
    }

    /// The generation of the ruleset, where the kernel has nf_tables; that of opening the socket at the first call.
    pub(crate) fn generation(&mut self) -> Result<Option<u32>, NetlinkError> {
        match (self.generation.take(), &mut self.netlink) {
            (None, Some(connection)) => connection.generation().map(Some),
            (generation, _) => Ok(generation),
        }
    }

    /// What exists of the routing that a plan needs, and what is around it.
    pub(crate) fn observe_routing(
        &mut self,
    ) -> Result<(Vec<FoundRouting>, Option<Surroundings>), RouteError> {
        let mut surroundings = Surroundings::now(&mut self.routes)?;
        let found = match &mut surroundings {
            Some(surroundings) => std::mem::take(&mut surroundings.survey.routing.found),
            None => self.routes.observe()?,
        };
        Ok((found, surroundings))
    }
}

/// A connection that the kernel answers on, and the ruleset's generation.
fn connect(most_read: usize) -> Result<(NftConnection, u32), ApplyError> {
    let mut connection = NftConnection::open()?;
    connection.limit(most_read);
    match connection.generation() {
        Err(NetlinkError::NotPermitted) => Err(ApplyError::NotPermitted),
        answered => Ok(answered.map(|generation| (connection, generation))?),
    }
}

/// Helper programs report a missing CAP_NET_ADMIN in many ways, some only after a change; so it is checked beforehand, for
/// one message about it. Over netlink the kernel reports it in answer to the first question.
fn without_netlink() -> Result<Option<(NftConnection, u32)>, ApplyError> {
    match Capability::NET_ADMIN.is_held() {
        Some(false) => Err(ApplyError::NotPermitted),
        // Where it cannot be determined, the kernel will say.
        Some(true) | None => Ok(None),
    }
}

/// Routing, interfaces and addresses, and what has changed since they were read: they have no generation.
pub(crate) struct Surroundings {
    pub(crate) survey: Survey,
    pub(crate) since: Subscription,
}

impl Surroundings {
    /// Those of the calling thread's network namespace; nothing where interfaces or addresses cannot be read: no run fails for what its plan does not need.
    pub(crate) fn now(routes: &mut RouteSocket) -> Result<Option<Self>, RouteError> {
        let Ok(since) = Subscription::to_surroundings() else { return Ok(None) };
        let (Ok(links), Ok(assigned)) = (routes.links(), routes.assigned()) else { return Ok(None) };
        Ok(Some(Self { survey: routes.survey(&links, &assigned)?, since }))
    }
}
