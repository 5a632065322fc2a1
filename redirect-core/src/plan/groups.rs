//! The rule groups, one short function each, in the order in which they are emitted.

use super::{PlannedRule, builder::*, dns::DNS, guard};
use crate::{
    redirect::{DnsCapture, InboundPorts, InterceptionMode, OutboundRanges, OwnerGroups, Redirect, Tproxy},
    rule::{ConnState, Equality, Hook, Match, OurChain, Scope, Table, Target},
    settings::Key,
    values::{Family, Mark},
};
use alloc::{vec, vec::Vec};
use ipnet::IpNet;

const REDIRECT: Target = Target::Jump(crate::rule::Chain::Ours(OurChain::Redirect));
const IN_REDIRECT: Target = Target::Jump(crate::rule::Chain::Ours(OurChain::InRedirect));
/// The chain that decides about outbound packets.
const NAT_OUTPUT: (Table, OurChain) = (Table::Nat, OurChain::Output);

/// All rules of a redirection.
pub(super) fn rules(r: &Redirect) -> Vec<PlannedRule> {
    let excluded_ports = r.outbound_ports_exclude().len().saturating_mul(2);
    let listed = r.outbound_exclude().len().saturating_add(excluded_ports);
    let mut rules = RuleListBuilder::of(r.sources(), listed);
    rules.excluded_interfaces(r);
    rules.virtual_interfaces_return(r);
    rules.drop_invalid(r);
    rules.redirect_chains(r);
    rules.inbound(r);
    rules.output_hook();
    rules.excluded_outbound_ports(r);
    rules.passthrough();
    rules.proxy_owners(r);
    rules.owner_groups(r);
    rules.dns_capture(r);
    rules.loopback(r);
    rules.excluded_ranges(r);
    rules.included_ports(r);
    rules.included_ranges(r);
    if let InterceptionMode::Tproxy(tproxy) = r.mode() {
        rules.tproxy_marks(r, tproxy);
        rules.tproxy_inbound_exceptions(tproxy);
    }
    rules.strict_capture(r);
    rules.into_vec()
}

impl RuleListBuilder<'_> {
    /// `-i IFACE -j RETURN`, `-o IFACE -j RETURN`, before everything else; in TPROXY mode in mangle, too.
    fn excluded_interfaces(&mut self, r: &Redirect) {
        let tables: &[Table] = match r.mode() {
            InterceptionMode::Redirect => &[Table::Nat],
            InterceptionMode::Tproxy(_) => &[Table::Nat, Table::Mangle],
        };
        let mut group = self.group(Key::ExcludeInterfaces, "excluded interface");
        for table in tables {
            for interface in r.exclude_interfaces() {
                group.append((*table, Hook::Prerouting), [coming_in(interface)], Target::Return);
                group.append((*table, Hook::Output), [going_out(interface)], Target::Return);
            }
        }
    }

    /// `-I PREROUTING 1 -i IFACE -j RETURN`: what is not captured as outbound is not captured as inbound either.
    fn virtual_interfaces_return(&mut self, r: &Redirect) {
        let mut group = self.group(Key::VirtualInterfaces, "not inbound: it comes from inside the pod");
        for interface in r.virtual_interfaces() {
            group.insert((Table::Nat, Hook::Prerouting), 1, [coming_in(interface)], Target::Return);
        }
    }

    /// `-m conntrack --ctstate INVALID -j ISTIO_DROP`.
    fn drop_invalid(&mut self, r: &Redirect) {
        if !r.drop_invalid() {
            return;
        }
        let mut group = self.group(Key::DropInvalid, "packets of no connection would be reset by the kernel");
        let invalid = Match::Tracked(ConnState::Invalid.into());
        group.append((Table::Mangle, Hook::Prerouting), [invalid], Target::Jump(OurChain::Drop.into()));
        group.append((Table::Mangle, OurChain::Drop), [], Target::Drop);
    }

    /// The chains that send to the proxy, and the tunnel port's exemption.
    fn redirect_chains(&mut self, r: &Redirect) {
        let mut group =
            self.group(Key::InboundTunnelPort, "tunnelled connections reach the proxy by themselves");
        let tunnel = [tcp(), to_port(r.tunnel_port())];
        group.append((Table::Nat, OurChain::Inbound), tunnel, Target::Return);
        let mut group = self.group(Key::ProxyPort, "to the proxy's outbound listener");
        group.append((Table::Nat, OurChain::Redirect), [tcp()], Target::Redirect(r.proxy_port()));
        let mut group = self.group(Key::InboundCapturePort, "to the proxy's inbound listener");
        group.append((Table::Nat, OurChain::InRedirect), [tcp()], Target::Redirect(r.inbound_port()));
    }

    /// Inbound capture, in nat or, with TPROXY, in mangle.
    fn inbound(&mut self, r: &Redirect) {
        let table = match r.mode() {
            _ if *r.inbound() == InboundPorts::None => return,
            InterceptionMode::Redirect => Table::Nat,
            InterceptionMode::Tproxy(tproxy) => {
                self.tproxy_chains(r, tproxy);
                Table::Mangle
            }
        };
        let to_inbound = Target::Jump(OurChain::Inbound.into());
        let mut group = self.group(Key::InboundPorts, "inbound connections");
        group.append((table, Hook::Prerouting), [tcp()], to_inbound);
        match r.inbound() {
            InboundPorts::None => {}
            InboundPorts::AllExcept(ports) => {
                for (place, port) in ports.iter().enumerate() {
                    self.group(Key::InboundExcludePorts, "excluded inbound port")
                        .said_by(r.source_of_excluded_inbound(place))
                        .append((table, OurChain::Inbound), [tcp(), to_port(*port)], Target::Return);
                }
                self.capture_inbound(r, &[tcp()]);
            }
            InboundPorts::Only(ports) => {
                for port in ports {
                    self.capture_inbound(r, &[tcp(), to_port(*port)]);
                }
            }
        }
    }

    /// ISTIO_DIVERT marks and accepts what the application answers to connections that the proxy opens in a client's name;
    /// ISTIO_TPROXY hands over everything else: the socket of a known connection, else the listener.
    fn tproxy_chains(&mut self, r: &Redirect, tproxy: Tproxy) {
        let mut group = self.group(
            Key::InterceptionMode,
            "answers to the proxy's connections in a client's name go to the proxy",
        );
        group.append((Table::Mangle, OurChain::Divert), [], Target::SetMark(tproxy.mark()));
        group.append((Table::Mangle, OurChain::Divert), [], Target::Accept);
        let group = self.group(Key::InterceptionMode, "inbound connections go to the proxy, unchanged");
        let target = Target::Tproxy { port: r.inbound_port(), mark: tproxy.mark() };
        let inbound = |family| [tcp(), not_to(r.loopback(family))];
        group.append_for_each((Table::Mangle, OurChain::Tproxy), inbound, &target);
    }

    /// Captures inbound packets with these conditions: a protocol and perhaps a port.
    fn capture_inbound(&mut self, r: &Redirect, conditions: &[Match]) {
        let mut group = self.group(Key::InboundPorts, "captured inbound");
        match r.mode() {
            InterceptionMode::Redirect => {
                group.append((Table::Nat, OurChain::Inbound), conditions, IN_REDIRECT);
            }
            InterceptionMode::Tproxy(_) => {
                let inbound = (Table::Mangle, OurChain::Inbound);
                // Only answers. What comes the other way may be a new connection on an entry that an earlier one left.
                let answers = [conditions, &[not_opening(), reply()]].concat();
                group.append(inbound, answers, Target::Jump(OurChain::Divert.into()));
                group.append(inbound, conditions, Target::Jump(OurChain::Tproxy.into()));
            }
        }
    }

    /// `-A OUTPUT -j ISTIO_OUTPUT`.
    fn output_hook(&mut self) {
        let mut group = self.group(Key::OutboundRanges, "outbound packets");
        group.append((Table::Nat, Hook::Output), [], Target::Jump(OurChain::Output.into()));
    }

    fn excluded_outbound_ports(&mut self, r: &Redirect) {
        let mut group = self.group(Key::OutboundExcludePorts, "excluded outbound port");
        for port in r.outbound_ports_exclude() {
            group.append(NAT_OUTPUT, [tcp(), to_port(*port)], Target::Return);
            group.append(NAT_OUTPUT, [udp(), to_port(*port)], Target::Return);
        }
    }

    /// `-s 127.0.0.6 -o lo -j RETURN`: the proxy's connections to the application.
    fn passthrough(&mut self) {
        let group = self.group(Key::InboundCapturePort, "the proxy's connections to the application");
        let passed = |family: Family| [out_by_loopback(), from(IpNet::from(family.passthrough()))];
        group.append_for_each(NAT_OUTPUT, passed, &Target::Return);
    }

    fn proxy_owners(&mut self, r: &Redirect) {
        let tunnel = r.tunnel_port();
        let ports_of_users = if *r.dns() == DnsCapture::Off {
            not_to_port(tunnel)
        } else {
            Match::DestinationPorts(Equality::not_equals(vec![DNS, tunnel.into()]))
        };
        for uid in r.proxy_uids() {
            let owner = |not| Match::OwnerUid(Equality { value: *uid, not });
            self.proxy_owner(r, Key::ProxyUid, &ports_of_users, owner);
        }
        for gid in r.proxy_gids() {
            let owner = |not| Match::OwnerGid(Equality { value: *gid, not });
            self.proxy_owner(r, Key::ProxyGid, &not_to_port(tunnel), owner);
        }
    }

    /// The proxy calling itself is inbound; the application calling itself, and the proxy's own calls, are not captured. `owner` makes the
    /// condition that packets are the proxy's, or with true that they are not.
    fn proxy_owner(&mut self, r: &Redirect, setting: Key, ports: &Match, owner: impl Fn(bool) -> Match) {
        let group = self.group(setting, "the proxy calling its own pod is an inbound call");
        let called =
            |family| [out_by_loopback(), not_to(r.loopback(family)), tcp(), ports.clone(), owner(false)];
        group.append_for_each(NAT_OUTPUT, called, &IN_REDIRECT);
        if !includes_loopback(r) {
            let mut group = self.group(setting, "the application calling itself, not captured");
            if *r.dns() == DnsCapture::Off {
                group.append(NAT_OUTPUT, [out_by_loopback(), owner(true)], Target::Return);
            } else {
                let matches = [out_by_loopback(), tcp(), not_to_port(DNS), owner(true)];
                group.append(NAT_OUTPUT, matches, Target::Return);
            }
        }
        let mut group = self.group(setting, "the proxy's own calls, not captured");
        group.append(NAT_OUTPUT, [owner(false)], Target::Return);
    }

    fn owner_groups(&mut self, r: &Redirect) {
        match r.owner_groups() {
            OwnerGroups::AllExcept(groups) => {
                let mut group = self.group(Key::OwnerGroupsExclude, "excluded group");
                for gid in groups {
                    group.append(NAT_OUTPUT, [Match::OwnerGid(Equality::equals(*gid))], Target::Return);
                }
            }
            OwnerGroups::Only(groups) => {
                let others = groups.iter().map(|gid| Match::OwnerGid(Equality::not_equals(*gid)));
                let mut group = self.group(Key::OwnerGroups, "only these groups' traffic is captured");
                group.append(NAT_OUTPUT, others.collect::<Vec<_>>(), Target::Return);
            }
        }
    }

    /// `-d 127.0.0.1/32 -j RETURN`.
    fn loopback(&mut self, r: &Redirect) {
        let group = self.group(Key::LoopbackRange, "excluded loopback destination");
        group.append_for_each(NAT_OUTPUT, |family| [to(r.loopback(family))], &Target::Return);
    }

    fn excluded_ranges(&mut self, r: &Redirect) {
        for range in r.outbound_exclude().iter() {
            let group = self.group(Key::OutboundExcludeRanges, "excluded destination");
            group.scoped(scope_of(&range)).append(NAT_OUTPUT, [to(range)], Target::Return);
        }
    }

    fn included_ports(&mut self, r: &Redirect) {
        let mut group = self.group(Key::OutboundPorts, "captured outbound, whatever the destination");
        for port in r.outbound_ports() {
            group.append(NAT_OUTPUT, [tcp(), to_port(*port)], REDIRECT);
        }
    }

    fn included_ranges(&mut self, r: &Redirect) {
        match r.outbound() {
            OutboundRanges::All => {
                self.group(Key::OutboundRanges, "captured outbound").append(NAT_OUTPUT, [], REDIRECT);
                let mut group = self.group(Key::VirtualInterfaces, "captured as outbound");
                for interface in r.virtual_interfaces() {
                    group.insert((Table::Nat, Hook::Prerouting), 1, [coming_in(interface)], REDIRECT);
                }
            }
            OutboundRanges::Only(cidrs) => {
                for range in cidrs.iter() {
                    self.included_range(r, range);
                }
            }
        }
    }

    fn included_range(&mut self, r: &Redirect, range: IpNet) {
        let mut group = self.group(Key::VirtualInterfaces, "captured as outbound").scoped(scope_of(&range));
        for interface in r.virtual_interfaces() {
            group.insert((Table::Nat, Hook::Prerouting), 1, [coming_in(interface), to(range)], REDIRECT);
        }
        let group = self.group(Key::OutboundRanges, "captured outbound");
        group.scoped(scope_of(&range)).append(NAT_OUTPUT, [to(range)], REDIRECT);
    }

    /// Marks follow connections, and the proxy's own calls to its pod get a mark of their own.
    fn tproxy_marks(&mut self, r: &Redirect, tproxy: Tproxy) {
        let mark = tproxy.mark();
        let shared = guard::shared_mark(r, tproxy);
        let mut group = self.group(Key::TproxyMark, "the connection remembers the packet's mark");
        let remember = shared.map_or(Target::SaveMark, Target::SetConnMark);
        group.append((Table::Mangle, Hook::Prerouting), [tcp(), marked(mark)], remember);
        let mut group = self.group(Key::TproxyMark, "the proxy's answers on loopback, not captured");
        let output = (Table::Mangle, Hook::Output);
        group.append(output, [out_by_loopback(), tcp(), marked(mark)], Target::Return);
        for (setting, owned) in proxy_owners(r) {
            let group = self.group(setting, "the proxy calling its own pod is an inbound call");
            let called = |family| [out_by_loopback(), tcp(), not_to(r.loopback(family)), owned.clone()];
            group.append_for_each(output, called, &Target::SetMark(Mark::PROXY));
        }
        let mut group = self.group(Key::TproxyMark, "packets get the mark their connection remembers");
        let remembered = Match::ConnMark(Equality::equals(shared.unwrap_or(mark.into())));
        let restore = if shared.is_some() { Target::SetMark(mark) } else { Target::RestoreMark };
        group.append(output, [tcp(), remembered], restore);
    }

    /// Inbound packets that are not captured, before all other inbound rules.
    fn tproxy_inbound_exceptions(&mut self, tproxy: Tproxy) {
        let inbound = (Table::Mangle, OurChain::Inbound);
        let mut group = self.group(Key::TproxyMark, "already handed over");
        group.insert(inbound, 1, [tcp(), marked(tproxy.mark())], Target::Return);
        for family in Family::BOTH {
            let group = self.group(Key::InterceptionMode, "the proxy's connections to the application");
            let passed = [in_by_loopback(), tcp(), from(IpNet::from(family.passthrough()))];
            group.scoped(Scope::Only(family)).insert(inbound, 2, passed, Target::Return);
        }
        let mut group = self.group(Key::InterceptionMode, "loopback traffic that is not the proxy's");
        let others = [in_by_loopback(), tcp(), not_marked(Mark::PROXY)];
        group.insert(inbound, 3, others, Target::Return);
    }
}

/// Whether the user asked for loopback destinations to be captured, in either family.
fn includes_loopback(r: &Redirect) -> bool {
    match r.outbound() {
        OutboundRanges::All => false,
        OutboundRanges::Only(cidrs) => cidrs.touches_loopback(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Families, RedirectBuilder,
        pod::{Decision, PodFacts},
        rule::Chain,
        settings::{NamespaceFacts, Source},
        values::PortRange,
    };
    use alloc::string::String;
    use core::net::IpAddr;

    /// The rules that a setting asks for, in their order, with their chains.
    fn rules_for(key: Key, builder: RedirectBuilder) -> Vec<(Chain, String)> {
        let plan = builder.build().unwrap().plan();
        let asked = plan.planned_rules().iter().filter(|planned| planned.setting == key);
        asked.map(|planned| (planned.chain.clone(), planned.rule.text())).collect()
    }

    fn sidecar() -> RedirectBuilder {
        Redirect::sidecar(Families::Both)
    }

    #[test]
    fn a_rule_says_what_it_is_for() {
        let plan = sidecar().build().unwrap().plan();
        let what = |text: &str| {
            let said = plan.planned_rules().iter().find(|planned| planned.rule.text() == text);
            said.unwrap_or_else(|| panic!("no rule {text}")).purpose()
        };
        assert_eq!(what("-j ISTIO_REDIRECT"), "captured outbound");
        assert_eq!(what("-j ISTIO_OUTPUT"), "outbound packets");
        assert!(plan.planned_rules().iter().all(|planned| !planned.purpose().is_empty()));
    }

    #[test]
    fn what_every_pod_excludes_is_not_said_to_be_annotated() {
        let name = "traffic.sidecar.istio.io/excludeInboundPorts";
        let pod = PodFacts::sidecar([(name, "9000,15021")]);
        let addresses = [IpAddr::from([10, 1, 0, 2])];
        let Ok(Decision::Redirect(redirect)) = pod.decide(&NamespaceFacts::new(&addresses)) else { panic!() };
        let plan = redirect.plan();
        let excluded =
            plan.planned_rules().iter().filter(|planned| planned.setting == Key::InboundExcludePorts);
        let told: Vec<(String, Source)> =
            excluded.map(|planned| (planned.rule.text(), planned.source())).collect();
        let rule = |port: u16| alloc::format!("-p tcp -m tcp --dport {port} -j RETURN");
        let annotated = Source::Annotation(name);
        assert_eq!(
            told,
            [
                (rule(9000), annotated),
                (rule(15021), annotated),
                (rule(15020), Source::Default),
                (rule(15090), Source::Default)
            ]
        );
    }

    #[test]
    fn excluded_outbound_ports_are_left_alone_over_tcp_and_udp() {
        let ports = [PortRange::single(3306), PortRange::new(80, 90).unwrap()];
        let rules = rules_for(Key::OutboundExcludePorts, sidecar().replace_outbound_exclusions(ports));
        let texts = [
            "-p tcp -m tcp --dport 3306 -j RETURN",
            "-p udp -m udp --dport 3306 -j RETURN",
            "-p tcp -m tcp --dport 80:90 -j RETURN",
            "-p udp -m udp --dport 80:90 -j RETURN",
        ];
        assert_eq!(rules, texts.map(|text| (OurChain::Output.into(), text.into())));
    }
}
