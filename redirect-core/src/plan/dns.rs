//! DNS capture.

use super::builder::*;
use crate::{
    redirect::{DnsCapture, Redirect},
    rule::{Hook, OurChain, Scope, Table, Target},
    settings::Key,
    values::{Family, PortRange},
};
use alloc::{vec, vec::Vec};
use ipnet::IpNet;

/// The port of DNS servers.
pub(super) const DNS: PortRange = PortRange::single(53);
/// Conntrack zone of queries between the proxy and the real servers.
const UPSTREAM_ZONE: Target = Target::ConntrackZone(1);
/// Conntrack zone of queries between the application and the proxy.
const LOCAL_ZONE: Target = Target::ConntrackZone(2);

impl RuleListBuilder<'_> {
    /// DNS capture: nat rules that send queries to the proxy, and conntrack zones that keep the two legs apart.
    pub(super) fn dns_capture(&mut self, r: &Redirect) {
        if *r.dns() == DnsCapture::Off {
            return;
        }
        let queries = Target::Jump(OurChain::OutputDns.into());
        self.group(Key::RedirectDns, "DNS queries").append((Table::Raw, Hook::Output), [], queries.clone());
        if let Some(scope) = dns_scope(r) {
            let group = self.group(Key::RedirectDns, "DNS queries");
            group.scoped(scope).append((Table::Nat, OurChain::Output), [], queries.clone());
        }
        self.dns_redirects(r);
        self.dns_proxy_zones(r);
        self.dns_application_zones(r);
    }

    fn dns_redirects(&mut self, r: &Redirect) {
        for protocol in [tcp(), udp()] {
            for (scope, server) in dns_servers(r) {
                let query: Vec<_> =
                    server.map(to).into_iter().chain([protocol.clone(), to_port(DNS)]).collect();
                let mut group = self.group(Key::RedirectDns, "to the proxy's DNS server").scoped(scope);
                group.append((Table::Nat, OurChain::OutputDns), query, Target::Redirect(DnsCapture::PORT));
            }
        }
    }

    fn dns_proxy_zones(&mut self, r: &Redirect) {
        for (setting, owned) in proxy_owners(r) {
            let mut group =
                self.group(setting, "the proxy's queries and answers, kept apart by conntrack zone");
            let query = [udp(), to_port(DNS), owned.clone()];
            group.append((Table::Raw, OurChain::OutputDns), query, UPSTREAM_ZONE);
            let answer = [udp(), from_port(DnsCapture::PORT), owned];
            group.append((Table::Raw, OurChain::OutputDns), answer, LOCAL_ZONE);
        }
    }

    fn dns_application_zones(&mut self, r: &Redirect) {
        let answers = Target::Jump(OurChain::Inbound.into());
        if let Some(scope) = dns_scope(r) {
            let mut group = self.group(Key::RedirectDns, "DNS answers").scoped(scope);
            group.append((Table::Raw, Hook::Prerouting), [], answers.clone());
        }
        for (scope, server) in dns_servers(r) {
            let query: Vec<_> = [udp(), to_port(DNS)].into_iter().chain(server.map(to)).collect();
            let answer: Vec<_> = [udp(), from_port(DNS)].into_iter().chain(server.map(from)).collect();
            let group = self.group(Key::RedirectDns, "queries and answers, kept apart by conntrack zone");
            let mut group = group.scoped(scope);
            group.append((Table::Raw, OurChain::OutputDns), query, LOCAL_ZONE);
            group.append((Table::Raw, OurChain::Inbound), answer, UPSTREAM_ZONE);
        }
    }
}

/// The families whose queries are captured, if any are.
fn dns_scope(r: &Redirect) -> Option<Scope> {
    match r.dns() {
        DnsCapture::Off => None,
        DnsCapture::All => Some(Scope::Every),
        DnsCapture::Servers(servers) => {
            let mut families = servers.iter().map(Family::of);
            let first = families.next()?;
            Some(if families.all(|family| family == first) { Scope::Only(first) } else { Scope::Every })
        }
    }
}

/// The servers whose queries are captured: each alone, or all at once.
fn dns_servers(r: &Redirect) -> Vec<(Scope, Option<IpNet>)> {
    match r.dns() {
        DnsCapture::Off => vec![],
        DnsCapture::All => vec![(Scope::Every, None)],
        DnsCapture::Servers(servers) => {
            // The families one after the other: both use one table in native nftables.
            let of = |family: Family| servers.iter().filter(move |server| Family::of(server) == family);
            let all = of(Family::V4).chain(of(Family::V6)).map(|server| IpNet::from(*server));
            all.map(|server| (scope_of(&server), Some(server))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Families, options::NativeForm};

    #[test]
    fn servers_are_named_family_by_family_whatever_their_order() {
        let nft = |servers: [&str; 3]| {
            let servers = servers.map(|server| server.parse().unwrap()).to_vec();
            let redirect = Redirect::sidecar(Families::Both).dns(DnsCapture::Servers(servers)).build();
            redirect.unwrap().plan().nft_text(NativeForm::Plain)
        };
        let mixed = nft(["fd00::a", "10.96.0.10", "10.96.0.11"]);
        let place = |server: &str| mixed.find(server).unwrap();
        assert!(
            place("10.96.0.10") < place("10.96.0.11") && place("10.96.0.11") < place("fd00::a"),
            "{mixed}"
        );
        assert_eq!(nft(["10.96.0.10", "fd00::a", "10.96.0.11"]), mixed);
    }
}
