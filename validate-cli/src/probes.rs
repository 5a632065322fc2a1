//! Which probes a redirection is proven by: for each family, every path that the plan decides about and that this
//! user's packets can take. What to expect of each is worked out from the plan's own rules.

use crate::{
    ValidationRequest,
    engine::ProbeSpec,
    reason::Reason,
    sockets::{StandIn, is_lack},
    verdict::{Path, PathCheck, Unproven},
    walk::{ProbeFate, ProcessIdentity, fate, loopback, packet},
};
use nix::errno::Errno;
use packet_trace::TraceRules;
use redirect_core::{DnsCapture, Family, InboundPorts, InterceptionMode, rule::Protocol};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Unused addresses, for documentation (RFC 5737, RFC 3849): uncaptured packets disturb no host.
const NOWHERE_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const NOWHERE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0xc000, 0x201);
const DNS: u16 = 53;

const OWN_CALLS: &str = "the rules exempt the proxy's user, so only the application's user can see it";
const NOT_SEEN: &str = "the settings capture nothing that this user could send";

/// A probe, and what the plan does with it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probe {
    pub(crate) family: Family,
    pub(crate) path: Path,
    pub(crate) shot: ProbeSpec,
    pub(crate) fate: ProbeFate,
    /// Who sends it.
    pub(crate) who: ProcessIdentity,
}

/// Everything of one round: stand-ins that listen, probes to send, and what is known without sending.
#[derive(Default)]
pub(crate) struct Aims {
    pub(crate) stand_ins: Vec<StandIn>,
    pub(crate) probes: Vec<Probe>,
    pub(crate) checks: Vec<PathCheck>,
    pub(crate) unproven: Vec<Unproven>,
    /// The ports of the proxy that another program has.
    pub(crate) busy: Vec<SocketAddr>,
    /// Outbound probes that the plan leaves alone: sent only to find out why something else failed.
    pub(crate) curious: Vec<Probe>,
}

impl Aims {
    /// Takes aim for these families of the pod.
    pub(crate) fn take(request: &ValidationRequest<'_>, families: &[(Family, IpAddr)]) -> Self {
        let plan = request.redirect.plan();
        let mut aims = Self::default();
        let rules: Vec<TraceRules> =
            families.iter().map(|(family, _)| TraceRules::of_plan(&plan, *family)).collect();
        let each = || families.iter().zip(&rules);
        // The probe that is expected to vanish goes first: whatever arrives after it was sent after it.
        for ((family, own), rules) in each() {
            let mut aim = Aim { request, family: *family, own: *own, rules, aims: &mut aims };
            aim.proxy();
            aim.tproxy();
        }
        for ((family, own), rules) in each() {
            let mut aim = Aim { request, family: *family, own: *own, rules, aims: &mut aims };
            aim.proxy_to_self();
            aim.own_address();
            aim.passthrough();
            aim.loopback();
            aim.outbound();
            aim.dns();
            aim.inbound();
        }
        aims
    }
}

/// Takes aim for one family.
struct Aim<'a, 'r> {
    request: &'a ValidationRequest<'r>,
    family: Family,
    own: IpAddr,
    rules: &'a TraceRules,
    aims: &'a mut Aims,
}

impl Aim<'_, '_> {
    /// Stand-ins for the proxy. They listen on the loopback address, where redirected packets of the pod arrive;
    /// no host outside the pod can reach them.
    fn proxy(&mut self) {
        let redirect = self.request.redirect;
        let mut wanted =
            vec![(Protocol::Tcp, redirect.inbound_port()), (Protocol::Tcp, redirect.proxy_port())];
        if *redirect.dns() != DnsCapture::Off {
            wanted.extend([(Protocol::Tcp, DnsCapture::PORT), (Protocol::Udp, DnsCapture::PORT)]);
        }
        for (protocol, port) in wanted {
            let at = SocketAddr::new(loopback(self.family), port.number());
            match StandIn::listen(protocol, at) {
                Ok(stand_in) => self.aims.stand_ins.push(stand_in),
                Err(error) if error != Errno::EADDRINUSE && is_lack(error) => {
                    self.failed(Path::ProxyToSelf, Reason::OutOfResources, format!("{at}: {}", error.desc()));
                }
                Err(_) => self.aims.busy.push(at),
            }
        }
    }

    /// TPROXY hands packets to transparent sockets only, which an unprivileged process cannot have: a packet of its
    /// own that is caught vanishes. The tunnel's port shows it, since REDIRECT does not capture that one.
    fn tproxy(&mut self) {
        if !matches!(self.request.redirect.mode(), InterceptionMode::Tproxy(_)) {
            return;
        }
        if *self.request.redirect.inbound() == InboundPorts::None {
            return;
        }
        if self.request.native_nftables {
            let why =
                "native nftables passes packets on that have no transparent listener, so nothing can be seen";
            return self.unproven(Path::Tproxy, why);
        }
        let tunnel = SocketAddr::new(self.own, self.request.redirect.tunnel_port().number());
        if self.fate(Protocol::Tcp, Some(self.own), tunnel, true) != ProbeFate::Tproxied {
            return self.unproven(Path::Tproxy, NOT_SEEN);
        }
        match StandIn::listen(Protocol::Tcp, tunnel) {
            Ok(stand_in) => self.aims.stand_ins.push(stand_in),
            Err(_) => return self.unproven(Path::Tproxy, "the tunnel port is taken by another process"),
        }
        self.probe(Path::Tproxy, Protocol::Tcp, Some(self.own), tunnel, ProbeFate::Tproxied);
    }

    /// The reference's own probe. Nothing to say where the settings take its target for loopback or exclude it.
    fn proxy_to_self(&mut self) {
        let (source, to) = (loopback(self.family), self.family.passthrough());
        match self.target(source, to, self.request.validation.probe_port.number()) {
            Ok((target, fate @ ProbeFate::Redirected(_))) => {
                self.probe(Path::ProxyToSelf, Protocol::Tcp, Some(source), target, fate);
            }
            Ok(_) => {}
            Err(error) => self.not_local(Path::ProxyToSelf, to, error),
        }
    }

    fn own_address(&mut self) {
        let port = self.request.validation.probe_port.number();
        match self.target(self.own, self.own, port) {
            Ok((_, ProbeFate::Unknown | ProbeFate::Tproxied)) => {}
            Ok((target, fate)) => self.probe(Path::OwnAddress, Protocol::Tcp, Some(self.own), target, fate),
            Err(error) if is_lack(error) => self.not_local(Path::OwnAddress, self.own, error),
            Err(_) => self.unproven(Path::OwnAddress, "the pod's address cannot be used yet"),
        }
    }

    fn passthrough(&mut self) {
        let source = self.family.passthrough();
        if let Ok((target, fate @ ProbeFate::Untouched)) = self.target(source, self.own, 0) {
            self.probe(Path::Passthrough, Protocol::Tcp, Some(source), target, fate);
        }
    }

    fn loopback(&mut self) {
        let address = loopback(self.family);
        match self.target(address, address, 0) {
            Ok((_, ProbeFate::Unknown | ProbeFate::Tproxied)) => {}
            Ok((target, fate)) => self.probe(Path::Loopback, Protocol::Tcp, Some(address), target, fate),
            Err(error) => self.not_local(Path::Loopback, address, error),
        }
    }

    fn outbound(&mut self) {
        let ports = self.request.redirect.outbound_ports().iter().map(|range| range.first());
        let ports = std::iter::once(self.request.validation.probe_port.number()).chain(ports);
        let mut fates = ports.map(|port| {
            let target = SocketAddr::new(nowhere(self.family), port);
            (target, self.fate(Protocol::Tcp, Some(self.own), target, false))
        });
        let captured = fates.find(|(_, fate)| matches!(fate, ProbeFate::Redirected(_)));
        if let Some((target, fate)) = captured {
            return self.probe(Path::Outbound, Protocol::Tcp, None, target, fate);
        }
        let target = SocketAddr::new(nowhere(self.family), self.request.validation.probe_port.number());
        let shot = ProbeSpec { protocol: Protocol::Tcp, source: None, destination: target, vanishes: false };
        let (family, path, who) = (self.family, Path::Outbound, self.request.who);
        self.aims.curious.push(Probe { family, path, shot, fate: ProbeFate::Untouched, who });
        self.unproven(Path::Outbound, if self.is_proxy() { OWN_CALLS } else { NOT_SEEN });
    }

    fn dns(&mut self) {
        let server = match self.request.redirect.dns() {
            DnsCapture::Off => return,
            DnsCapture::All => Some(nowhere(self.family)),
            DnsCapture::Servers(servers) => {
                servers.iter().copied().find(|server| Family::of(server) == self.family)
            }
        };
        let Some(server) = server else { return };
        let target = SocketAddr::new(server, DNS);
        for (path, protocol) in [(Path::DnsUdp, Protocol::Udp), (Path::DnsTcp, Protocol::Tcp)] {
            match self.fate(protocol, Some(self.own), target, false) {
                fate @ ProbeFate::Redirected(_) => self.probe(path, protocol, None, target, fate),
                ProbeFate::Untouched | ProbeFate::Tproxied | ProbeFate::Unknown => {
                    self.unproven(path, if self.is_proxy() { OWN_CALLS } else { NOT_SEEN });
                }
            }
        }
    }

    fn inbound(&mut self) {
        if *self.request.redirect.inbound() != InboundPorts::None {
            let why = "only packets from outside the pod meet the rules that decide about it (PREROUTING)";
            self.unproven(Path::Inbound, why);
        }
    }

    fn is_proxy(&self) -> bool {
        let (redirect, who) = (self.request.redirect, self.request.who);
        redirect.proxy_uids().contains(&who.uid) || redirect.proxy_gids().contains(&who.gid)
    }

    /// A stand-in where packets of the pod to itself arrive that nothing diverts, and what the plan does with them.
    /// The port is the one asked for; where that is taken, or excluded by the plan, one of the kernel's choice, or
    /// else the highest that the plan does not leave alone.
    fn target(&mut self, source: IpAddr, to: IpAddr, port: u16) -> Result<(SocketAddr, ProbeFate), Errno> {
        let excluded = self.request.redirect.outbound_ports_exclude();
        let highest =
            (1024..=u16::MAX).rev().find(|port| !excluded.iter().any(|range| range.contains(*port)));
        let mut kept = None;
        for port in [port, 0, highest.unwrap_or(0)] {
            let stand_in = match StandIn::listen(Protocol::Tcp, SocketAddr::new(to, port)) {
                Ok(stand_in) => stand_in,
                Err(Errno::EADDRINUSE | Errno::EACCES) if port != 0 => continue,
                Err(error) => return Err(error),
            };
            let target = stand_in.address().map_err(|_| Errno::EADDRNOTAVAIL)?;
            let fate = self.fate(Protocol::Tcp, Some(source), target, true);
            kept = Some((stand_in, target, fate));
            if matches!(fate, ProbeFate::Redirected(_)) || excluded.is_empty() && port == 0 {
                break;
            }
        }
        let (stand_in, target, fate) = kept.ok_or(Errno::EADDRINUSE)?;
        self.aims.stand_ins.push(stand_in);
        Ok((target, fate))
    }

    fn fate(
        &self,
        protocol: Protocol,
        source: Option<IpAddr>,
        destination: SocketAddr,
        stays: bool,
    ) -> ProbeFate {
        fate(self.rules, &packet(self.request.who, protocol, source, destination, stays))
    }

    fn probe(
        &mut self,
        path: Path,
        protocol: Protocol,
        source: Option<IpAddr>,
        to: SocketAddr,
        fate: ProbeFate,
    ) {
        let shot = ProbeSpec { protocol, source, destination: to, vanishes: fate == ProbeFate::Tproxied };
        self.aims.probes.push(Probe { family: self.family, path, shot, fate, who: self.request.who });
    }

    fn unproven(&mut self, path: Path, why: &'static str) {
        self.aims.unproven.push(Unproven { family: self.family, path, why });
    }

    /// An address cannot be listened on: it is missing on `lo`, or descriptors or ports are exhausted.
    fn not_local(&mut self, path: Path, address: IpAddr, error: Errno) {
        let missing = || format!("{address} is not an address of lo");
        if is_lack(error) {
            self.failed(
                path,
                Reason::OutOfResources,
                format!("cannot listen on {address}: {}", error.desc()),
            );
        } else if address == IpAddr::V6(Family::PASSTHROUGH_V6) {
            self.failed(path, Reason::NoPassthroughAddress, missing());
        } else {
            self.failed(path, Reason::LoopbackDown, missing());
        }
    }

    fn failed(&mut self, path: Path, reason: Reason, detail: String) {
        self.aims.checks.push(PathCheck::without_probe(self.family, path, Err(reason), detail));
    }
}

const fn nowhere(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(NOWHERE_V4),
        Family::V6 => IpAddr::V6(NOWHERE_V6),
    }
}
