//! What was seen, held against what was planned.

use crate::{
    engine::{ProbeObservation, ProbeSpec},
    probes::Probe,
    reason::Reason,
    sockets::is_lack,
    verdict::{Path, PathCheck, Unproven},
    walk::{ProbeFate, loopback, packet},
};
use nix::errno::Errno;
use redirect_core::{Family, values::Port};
use std::net::SocketAddr;

/// Holds one probe against the plan. `busy` are the proxy's ports that another program has.
///
/// # Errors
/// It proves nothing.
pub(crate) fn judge(
    probe: &Probe,
    seen: ProbeObservation,
    busy: &[SocketAddr],
) -> Result<PathCheck, Unproven> {
    let result = match (seen, probe.fate) {
        (ProbeObservation::NotSent(error), _) if is_lack(error) => Err(Reason::OutOfResources),
        (ProbeObservation::NotSent(_), _) if !stays(probe.path) => {
            let why = "the pod has no route to anywhere";
            return Err(Unproven { family: probe.family, path: probe.path, why });
        }
        (_, ProbeFate::Redirected(port)) => redirected(probe, port, seen, busy),
        (_, ProbeFate::Untouched | ProbeFate::Unknown) => untouched(probe, seen),
        (ProbeObservation::Silent, ProbeFate::Tproxied) => Ok(()),
        (_, ProbeFate::Tproxied) => Err(Reason::TproxyNotInEffect),
    };
    Ok(PathCheck {
        family: probe.family,
        path: probe.path,
        target: Some(probe.shot.destination),
        sent: Some(sent(probe)),
        captures: matches!(probe.fate, ProbeFate::Redirected(_) | ProbeFate::Tproxied),
        detail: detail(probe, seen, result),
        result,
    })
}

/// The packet that a probe is.
fn sent(probe: &Probe) -> packet_trace::Packet {
    let ProbeSpec { protocol, source, destination, .. } = probe.shot;
    let stays = stays(probe.path) || destination.ip().is_loopback();
    packet(probe.who, protocol, source, destination, stays)
}

fn redirected(probe: &Probe, port: Port, seen: ProbeObservation, busy: &[SocketAddr]) -> Result<(), Reason> {
    let destination = probe.shot.destination;
    let wanted = SocketAddr::new(loopback(probe.family), port.number());
    let taken = busy.contains(&wanted);
    match seen {
        ProbeObservation::Arrived { at, original } if at == wanted => match original {
            // Asked of connections only; a datagram's answer is rewritten by the kernel.
            Some(original) if original != destination => Err(Reason::DestinationLost),
            None if probe.path != Path::DnsUdp => Err(Reason::DestinationLost),
            Some(_) | None => Ok(()),
        },
        ProbeObservation::Arrived { at, .. } if at == destination => Err(passed_by(probe.path)),
        // Captured like any other connection, perhaps; but not to the DNS server.
        ProbeObservation::Arrived { .. } | ProbeObservation::Refused if is_dns(probe.path) && !taken => {
            Err(passed_by(probe.path))
        }
        ProbeObservation::Arrived { .. } => Err(Reason::WrongPort),
        ProbeObservation::Refused | ProbeObservation::Stranger | ProbeObservation::Silent if taken => {
            Err(Reason::PortsBusy)
        }
        ProbeObservation::Refused => Err(Reason::WrongPort),
        ProbeObservation::Stranger => Err(Reason::Stranger),
        ProbeObservation::NotSent(Errno::EADDRNOTAVAIL) if probe.path == Path::ProxyToSelf => {
            Err(Reason::NoPassthroughAddress)
        }
        ProbeObservation::NotSent(_) => Err(Reason::LoopbackDown),
        ProbeObservation::Undelivered(_) => Err(passed_by(probe.path)),
        // It left the pod, and the unused address never answers.
        ProbeObservation::Silent if !stays(probe.path) => Err(passed_by(probe.path)),
        ProbeObservation::Silent => Err(Reason::NoAnswer),
    }
}

fn untouched(probe: &Probe, seen: ProbeObservation) -> Result<(), Reason> {
    match seen {
        ProbeObservation::Arrived { at, .. } if at == probe.shot.destination => Ok(()),
        ProbeObservation::Arrived { .. } | ProbeObservation::Refused | ProbeObservation::Stranger => {
            // Captured although it is not the proxy's; or not captured although it is.
            let is_of_owner = matches!(probe.path, Path::OwnAddress | Path::Outbound);
            Err(if is_of_owner { Reason::WrongOwner } else { Reason::LoopbackCaptured })
        }
        ProbeObservation::NotSent(Errno::EADDRNOTAVAIL) if probe.path == Path::Passthrough => {
            Err(Reason::NoPassthroughAddress)
        }
        ProbeObservation::NotSent(_) | ProbeObservation::Undelivered(_) => Err(Reason::LoopbackDown),
        ProbeObservation::Silent if probe.path == Path::Loopback => Err(Reason::LoopbackDown),
        ProbeObservation::Silent => Err(Reason::NoAnswer),
    }
}

const fn is_dns(path: Path) -> bool {
    matches!(path, Path::DnsUdp | Path::DnsTcp)
}

/// Whether a path stays inside the pod.
const fn stays(path: Path) -> bool {
    !matches!(path, Path::Outbound | Path::DnsUdp | Path::DnsTcp)
}

/// The reason of a path that should be captured and is not, before others are checked.
const fn passed_by(path: Path) -> Reason {
    if is_dns(path) { Reason::DnsNotCaptured } else { Reason::RulesNotInEffect }
}

fn detail(probe: &Probe, seen: ProbeObservation, result: Result<(), Reason>) -> String {
    let to = probe.shot.destination;
    let wanted = match probe.fate {
        ProbeFate::Redirected(port) => format!("; it should have been redirected to port {port}"),
        ProbeFate::Untouched | ProbeFate::Unknown => "; it should not have been captured".to_owned(),
        ProbeFate::Tproxied => "; it should have been taken by TPROXY".to_owned(),
    };
    let seen = match seen {
        ProbeObservation::Arrived { at, original: Some(original) } if at != to && original != to => {
            format!("arrived at port {}, where it seemed to be meant for {original}", at.port())
        }
        ProbeObservation::Arrived { at, .. } if at == to => "arrived where it was sent".to_owned(),
        ProbeObservation::Arrived { at, .. } => format!("was redirected to port {}", at.port()),
        ProbeObservation::Refused if result == Err(Reason::PortsBusy) => {
            "was redirected, and refused".to_owned()
        }
        ProbeObservation::Refused => {
            "was refused: redirected to a port where nothing listens, or rejected by a rule".to_owned()
        }
        ProbeObservation::NotSent(error) => format!("could not be sent: {}", error.desc()),
        ProbeObservation::Undelivered(error) => format!("left the pod and came back: {}", error.desc()),
        ProbeObservation::Stranger => "was taken by a process that did not know the token".to_owned(),
        ProbeObservation::Silent if probe.fate == ProbeFate::Tproxied => "was taken by TPROXY".to_owned(),
        ProbeObservation::Silent => "was not answered".to_owned(),
    };
    match result {
        Ok(()) => format!("{to} {seen}"),
        Err(_) => format!("{to} {seen}{wanted}"),
    }
}

/// What is known of connection tracking, which is at work only where rules need it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TrackingKnowledge {
    /// The namespace tracks connections.
    pub(crate) any: bool,
    /// It tracks those of IPv4, those of IPv6, as far as connections that arrived show.
    pub(crate) families: [bool; 2],
}

/// The one reason that explains the checks best.
pub(crate) fn conclude(checks: &mut [PathCheck], mistaken: bool, tracked: TrackingKnowledge) -> Reason {
    let TrackingKnowledge { any: tracked, families: tracked_families } = tracked;
    // Where nothing translates addresses, a host outside refused.
    let passed = |check: &PathCheck| match check.result {
        Err(Reason::RulesNotInEffect) => check.captures,
        Err(Reason::WrongPort) => check.captures && !tracked && !stays(check.path),
        Ok(()) | Err(_) => false,
    };
    let families = |wanted: &dyn Fn(&PathCheck) -> bool| {
        Family::BOTH.map(|family| checks.iter().any(|check| check.family == family && wanted(check)))
    };
    let bypassed = families(&passed);
    let captured = families(&|check| check.captures && check.result.is_ok());
    // One is captured and the other is not at all: nothing there needs connection tracking, so it has no rules.
    let without_rules = |one: usize, other: usize| {
        bypassed[one] && !captured[one] && captured[other] && !tracked_families[one]
    };
    let one_only = without_rules(0, 1) || without_rules(1, 0);
    let instead = match () {
        () if mistaken => Reason::WrongOwner,
        () if one_only => Reason::OneFamilyOnly,
        () if captured.contains(&true) || tracked => Reason::RulesNotInEffect,
        () => Reason::NoRules,
    };
    for check in checks.iter_mut().filter(|check| passed(check)) {
        check.result = Err(instead);
    }
    let failed = |reason: &Reason| checks.iter().any(|check| check.result == Err(*reason));
    match Reason::ALL.into_iter().find(failed) {
        Some(reason) => reason,
        None if captured.contains(&true) => Reason::Redirected,
        None => Reason::NothingProven,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a panic is how a test fails
    use super::*;
    use crate::walk::ProcessIdentity;
    use redirect_core::rule::Protocol;

    fn probe(path: Path, to: &str, fate: ProbeFate) -> Probe {
        let destination: SocketAddr = to.parse().unwrap();
        let shot = ProbeSpec { protocol: Protocol::Tcp, source: None, destination, vanishes: false };
        Probe {
            family: Family::of(&destination.ip()),
            path,
            shot,
            fate,
            who: ProcessIdentity { uid: 1337, gid: 1337 },
        }
    }

    fn tracked(any: bool) -> TrackingKnowledge {
        TrackingKnowledge { any, families: [false; 2] }
    }

    fn inbound() -> ProbeFate {
        ProbeFate::Redirected(Port::new(15006).unwrap())
    }

    fn arrived(at: &str, original: Option<&str>) -> ProbeObservation {
        ProbeObservation::Arrived {
            at: at.parse().unwrap(),
            original: original.map(|text| text.parse().unwrap()),
        }
    }

    fn check(probe: &Probe, seen: ProbeObservation) -> PathCheck {
        match judge(probe, seen, &[]) {
            Ok(check) => check,
            Err(unproven) => panic!("{unproven}"),
        }
    }

    #[test]
    fn the_original_destination_has_to_be_known_and_true() {
        let probe = probe(Path::ProxyToSelf, "127.0.0.6:15002", inbound());
        let result = |original| check(&probe, arrived("127.0.0.1:15006", original)).result;
        assert_eq!(result(Some("127.0.0.6:15002")), Ok(()));
        assert_eq!(result(Some("127.0.0.6:80")), Err(Reason::DestinationLost));
        assert_eq!(result(None), Err(Reason::DestinationLost));
    }

    #[test]
    fn a_stranger_is_blamed_for_a_busy_port_only_where_it_is_busy() {
        let probe = probe(Path::ProxyToSelf, "127.0.0.6:15002", inbound());
        assert_eq!(check(&probe, ProbeObservation::Stranger).result, Err(Reason::Stranger));
        let busy = ["127.0.0.1:15006".parse().unwrap()];
        let Ok(check) = judge(&probe, ProbeObservation::Stranger, &busy) else { panic!("a finding") };
        assert_eq!(check.result, Err(Reason::PortsBusy));
        assert!(!check.detail.contains("arrived"), "{}", check.detail);
    }

    #[test]
    fn a_refusal_far_away_is_no_redirection() {
        let outbound =
            probe(Path::Outbound, "192.0.2.1:15002", ProbeFate::Redirected(Port::new(15001).unwrap()));
        let refused = || vec![check(&outbound, ProbeObservation::Refused)];
        assert_eq!(conclude(&mut refused(), false, tracked(false)), Reason::NoRules);
        assert_eq!(conclude(&mut refused(), false, tracked(true)), Reason::WrongPort);
    }

    #[test]
    fn what_this_process_may_not_have_says_nothing_about_the_pod() {
        let v4 = probe(Path::ProxyToSelf, "127.0.0.6:15002", inbound());
        for error in [Errno::EMFILE, Errno::ENOBUFS, Errno::EADDRINUSE] {
            let checks = &mut [check(&v4, ProbeObservation::NotSent(error))];
            assert_eq!(conclude(checks, false, tracked(false)), Reason::OutOfResources, "{error}");
        }
        assert_eq!(Reason::OutOfResources.is_redirected(), None);
    }

    #[test]
    fn a_route_is_not_the_rules_business() {
        let outbound =
            probe(Path::Outbound, "192.0.2.1:15002", ProbeFate::Redirected(Port::new(15001).unwrap()));
        assert!(judge(&outbound, ProbeObservation::NotSent(Errno::ENETUNREACH), &[]).is_err());
    }

    #[test]
    fn the_reason_explains_the_most() {
        let v4 = probe(Path::ProxyToSelf, "127.0.0.6:15002", inbound());
        let v6 = probe(Path::ProxyToSelf, "[::6]:15002", inbound());
        let good = || check(&v4, arrived("127.0.0.1:15006", Some("127.0.0.6:15002")));
        let passed = || check(&v6, arrived("[::6]:15002", None));
        assert_eq!(conclude(&mut [], false, tracked(true)), Reason::NothingProven);
        assert_eq!(conclude(&mut [good()], false, tracked(true)), Reason::Redirected);
        assert_eq!(conclude(&mut [good(), passed()], false, tracked(true)), Reason::OneFamilyOnly);
        let v6_tracked = TrackingKnowledge { any: true, families: [true; 2] };
        assert_eq!(conclude(&mut [good(), passed()], false, v6_tracked), Reason::RulesNotInEffect);
        assert_eq!(conclude(&mut [passed()], false, tracked(true)), Reason::RulesNotInEffect);
        assert_eq!(conclude(&mut [passed()], false, tracked(false)), Reason::NoRules);
        assert_eq!(conclude(&mut [passed()], true, tracked(true)), Reason::WrongOwner);
        assert_eq!(
            conclude(&mut [good(), check(&v6, ProbeObservation::Refused), passed()], false, tracked(true)),
            Reason::WrongPort
        );
    }
}
