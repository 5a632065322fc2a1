//! Routes by which answers to probes come back to the node, in the calling thread's network namespace, which must be the node's: network plugins whose
//! eBPF programs forward what pods send find no other way for them.
//!
//! ```text
//! 169.254.7.127 dev lo scope link          (of the table local)
//! ```
//!
//! Elsewhere the node's rules have given such answers their destination before a route is looked up, so nothing takes these routes.

use crate::{
    facts::Ipv6,
    routes::{RouteError, RouteSocket},
};
use redirect_core::{Family, ambient::ProbeSources};
use std::{collections::BTreeSet, net::IpAddr};

/// These addresses, each with the source of probes whose answers it sends, if that can have a route. Where IPv6 is off on `lo`, IPv6's cannot.
fn sources_of(addresses: &BTreeSet<IpAddr>, sources: ProbeSources) -> impl Iterator<Item = (IpAddr, IpAddr)> {
    let has_v6 = Ipv6::here().is_everywhere();
    addresses
        .iter()
        .filter(move |address| address.is_ipv4() || has_v6)
        .map(move |address| (*address, sources.of(Family::of(address))))
}

/// Why answers to probes may not come back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbeRouteError {
    /// The kernel refuses.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The node masquerades what it forwards with its own addresses, so that other hosts' traffic would pass for probes.
    #[error(
        "{0} is an address of the node, which masqueraded traffic of other hosts has, too; choose another source of probes (HOST_PROBE_SNAT_IP, HOST_PROBE_SNAT_IPV6)"
    )]
    OfNode(IpAddr),
}

impl RouteSocket {
    /// Those of these addresses whose answers to probes from these sources have no route.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn missing_probe_routes(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
        sources: ProbeSources,
    ) -> Result<BTreeSet<IpAddr>, ProbeRouteError> {
        if addresses.is_empty() {
            return Ok(BTreeSet::new());
        }
        let found = self.local_addresses()?.back;
        let lacking = sources_of(addresses, sources).filter(|(_, source)| !found.contains(source));
        Ok(lacking.map(|(address, _)| address).collect())
    }

    /// Makes the routes for answers of these addresses, and no others, exist. Returns whether that changed anything.
    ///
    /// # Errors
    /// The kernel refuses; some may have been changed. Or a source is an address of the node; nothing was changed.
    pub fn set_probe_routes(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
        sources: ProbeSources,
    ) -> Result<bool, ProbeRouteError> {
        let found = self.local_addresses()?;
        let wanted: BTreeSet<IpAddr> = sources_of(addresses, sources).map(|(_, source)| source).collect();
        if let Some(source) = wanted.intersection(&found.own).next() {
            return Err(ProbeRouteError::OfNode(*source));
        }
        for to in wanted.difference(&found.back) {
            self.add_route_back(*to)?;
        }
        for to in found.back.difference(&wanted) {
            self.remove_route_back(*to)?;
        }
        Ok(found.back != wanted)
    }
}
