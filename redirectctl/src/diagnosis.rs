//! From what was read to what is wrong. Pure: the same reading gives the same findings.

use std::collections::BTreeMap;
use std::net::IpAddr;

use cni_core::enablement::REDIRECTION_ANNOTATION;
use netfilter_state::change::DifferenceKind;
use netfilter_state::differences::{Difference, Differences};
use netfilter_state::netlink::kept::KeptTable;
use netfilter_state::routing::RoutingItem;
use netns_apply::Mismatch;
use packet_trace::interference::{self, Certainty as Sureness, Effect};
use reasons::{EventReason, PodState};
use redirect_core::plan::DataPlane;
use redirect_core::pod::{PodFacts, SkipReason};
use redirect_core::rule::{Protocol, Table, Target};
use redirect_core::settings::{Key, Notice, RawSettings, Source};
use redirect_core::values::{PortRange, is_routable};
use redirect_core::{DnsCapture, Families, Family, InboundPorts, InterceptionMode, Redirect, RulePlan};

pub use presentation::decision::PodDecision;

use crate::cause::{self, Cause, PodFinding};
use crate::inspect::{Inspection, NATIVE};
use crate::meaning;
use crate::pod::{Container, ContainerKind, Pod};
use crate::status;
use crate::validation::{LastValidation, VALIDATION_CONTAINER};

/// Settings that leave traffic alone.
const EXCLUDING: [Key; 12] = [
    Key::InboundExcludePorts,
    Key::OutboundExcludePorts,
    Key::OutboundExcludeRanges,
    Key::ExcludeInterfaces,
    Key::OutboundRanges,
    Key::InboundPorts,
    Key::AmbientInboundExcludePorts,
    Key::AmbientOutboundExcludePorts,
    Key::AmbientOutboundExcludeRanges,
    Key::AmbientExcludeInterfaces,
    Key::AmbientOutboundRanges,
    Key::AmbientInboundPorts,
];

/// What rules as planned do not prove: such a pod is not verified.
const UNPROVEN: [Cause; 4] =
    [Cause::NotEnrolled, Cause::HeldBack, Cause::AwaitsValidation, Cause::ValidationEnded];

/// What is wrong, or worth knowing: the worst first.
#[must_use]
pub fn findings(pod: Option<&Pod>, decided: &PodDecision, seen: Option<&Inspection>) -> Vec<PodFinding> {
    let mut all = Vec::new();
    match decided {
        PodDecision::Redirect(redirect, settings) => {
            if let Some(seen) = seen {
                namespace(&redirect.plan(), Some(redirect.proxy_uids()), pod, seen, &mut all);
            }
            all.extend(of_settings(redirect, settings, pod, seen));
            if let Some(pod) = pod {
                of_pod(pod, redirect, &mut all);
            }
        }
        PodDecision::Ambient(redirect, settings) => {
            if let Some(seen) = seen {
                // Which user the node's ztunnel runs as is not known here.
                namespace(&redirect.plan(), None, pod, seen, &mut all);
            }
            if let Some(pod) = pod {
                not_enrolled(pod, &mut all);
            }
            all.extend(seen.and_then(|seen| connections_kept(&seen.kept)));
            if !redirect.captures_everything() {
                all.extend(excluded(settings));
            }
            if redirect.captures_dns() {
                all.push(dns_captured("all queries to port 53", redirect.source(redirect.dns_key())));
            }
            all.extend(beside_families(redirect.families(), true, pod, seen));
        }
        PodDecision::Skip(reason) => all.extend(skipped(*reason, seen)),
        PodDecision::HostNetwork => {
            if pod.is_some_and(|pod| pod.proxy().is_some()) {
                all.push(PodFinding::new(Cause::HostNetwork, "hostNetwork: true"));
            }
        }
        PodDecision::Wrong(errors) => {
            // A namespace without addresses has a finding of its own.
            let seen = errors.iter().map(ToString::to_string).collect();
            all.push(PodFinding { cause: Cause::BadSettings, seen });
        }
        PodDecision::Unknown => {}
    }
    all.extend(pod.and_then(misspellings));
    if let Some(why_not) = seen.and_then(|seen| seen.not_accepted.clone()) {
        all.push(PodFinding::new(Cause::NotAccepted, why_not));
    }
    all.extend(pod.into_iter().flat_map(status::findings));
    if let (PodDecision::Redirect(..), Some(seen), Some(pod)) = (decided, seen, pod) {
        await_validation(pod, seen, &mut all);
    }
    if let Some(seen) = seen {
        all.extend(of_any_namespace(seen));
    }
    cause::sort(&mut all);
    all
}

/// A validation that found a pod not redirected is out of date once its rules are as planned.
fn await_validation(pod: &Pod, seen: &Inspection, all: &mut [PodFinding]) {
    let is_outdated = seen.is_as_planned() && pod.validation.as_ref().is_some_and(LastValidation::denies);
    let held = all.iter_mut().find(|finding| is_outdated && finding.cause == Cause::HeldBack);
    if let Some(held) = held {
        // What was to be done about it then is not to be done now.
        held.cause = Cause::AwaitsValidation;
        held.seen.truncate(2);
    }
}

/// How a pod stands, by what was decided and what its network namespace shows, if that could be read.
#[must_use]
pub fn state(decided: &PodDecision, seen: Option<&Inspection>, findings: &[PodFinding]) -> PodState {
    let has = |causes: &[Cause]| findings.iter().any(|finding| causes.contains(&finding.cause));
    let has_rules = seen.is_some_and(|seen| !seen.in_force.is_empty());
    if has(&[Cause::Sandboxed]) {
        return PodState::Sandboxed;
    }
    match (decided, seen) {
        (PodDecision::Skip(SkipReason::HasInitContainer), Some(_)) if !has_rules => PodState::NotRedirected,
        (PodDecision::Skip(SkipReason::HasInitContainer) | PodDecision::HostNetwork, _) => {
            PodState::LeftAlone
        }
        (PodDecision::Skip(_) | PodDecision::Unknown, _) if has_rules => PodState::Unexpected,
        (PodDecision::Skip(_) | PodDecision::Unknown, _) => PodState::LeftAlone,
        (PodDecision::Redirect(..) | PodDecision::Ambient(..) | PodDecision::Wrong(_), None)
            if has(&[Cause::NotStarted, Cause::NotSetUp]) =>
        {
            PodState::Unseen
        }
        (PodDecision::Wrong(_), _) | (PodDecision::Redirect(..) | PodDecision::Ambient(..), None) => {
            PodState::Unknown
        }
        (PodDecision::Redirect(..) | PodDecision::Ambient(..), Some(_)) if !has_rules => {
            PodState::NotRedirected
        }
        (PodDecision::Redirect(..) | PodDecision::Ambient(..), Some(seen)) => match &seen.mismatch {
            None if has(&UNPROVEN) => PodState::Pending,
            None => PodState::Verified,
            Some(Mismatch::Interference(..) | Mismatch::DoesNotConverge(_)) => PodState::Interference,
            Some(_) => PodState::Drifted,
        },
    }
}

/// Adds that the agent has not enrolled a pod yet, or not any more, as its annotation says, with the reason in the last event about it.
/// What its namespace shows is part of the same finding.
fn not_enrolled(pod: &Pod, all: &mut Vec<PodFinding>) {
    let Some(annotation) = pod.ambient_annotation() else { return };
    let is_pending = annotation == "pending";
    if !is_pending && all.iter().all(|finding| finding.cause != Cause::NotEnrolled) {
        return;
    }
    let last = pod
        .events
        .iter()
        .rfind(|event| is_pending && EventReason::of(&event.reason) == Some(EventReason::AmbientPending));
    let event = last.map(|event| format!("{}: {}", event.reason, event.message));
    let annotation = format!("annotation {REDIRECTION_ANNOTATION}: {annotation}");
    cause::merge(all, Cause::NotEnrolled, event.into_iter().chain([annotation]).collect());
}

/// Whatever the plan.
fn of_any_namespace(seen: &Inspection) -> Vec<PodFinding> {
    let mut all = Vec::new();
    if !seen.addresses.iter().any(IpAddr::is_loopback) {
        all.push(PodFinding::new(Cause::LoopbackDown, "neither 127.0.0.1 nor ::1 is there"));
    }
    if !seen.addresses.iter().any(is_routable) {
        all.push(PodFinding::new(Cause::NoAddress, format!("it has {}", list(&seen.addresses))));
    }
    all.extend(PodFinding::some(Cause::Unexamined, seen.unexamined.clone()));
    if seen.in_force.len() > 1 {
        all.push(PodFinding::new(Cause::TwoBackends, seen.backends()));
    }
    all
}

/// Every interface has one while IPv6 is switched on.
const fn is_link_local_v6(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// The namespace against the plan, and who serves what is captured: one of these users, where they are known.
fn namespace(
    plan: &RulePlan,
    proxy_uids: Option<&[u32]>,
    pod: Option<&Pod>,
    seen: &Inspection,
    all: &mut Vec<PodFinding>,
) {
    all.extend(PodFinding::some(Cause::KernelLacks, seen.lacking.clone()));
    all.extend(foreign(&seen.impact.foreign, seen));
    all.extend(PodFinding::some(
        Cause::ForeignAccepted,
        seen.accepted.iter().map(ToString::to_string).collect(),
    ));
    if seen.in_force.is_empty() {
        let cause = match plan.data_plane() {
            DataPlane::Sidecar => Cause::NotRedirected,
            DataPlane::Ambient => Cause::NotEnrolled,
        };
        all.push(PodFinding::new(cause, "no table has a chain of the mesh"));
        return;
    }
    match &seen.mismatch {
        // Reported of any namespace.
        None | Some(Mismatch::TwoBackends | Mismatch::Interference(..)) => {}
        Some(Mismatch::Different(differences)) => all.extend(different(plan, differences)),
        Some(Mismatch::DoesNotConverge(obstacle)) => {
            all.push(PodFinding::new(Cause::RoutingTaken, obstacle.to_string()));
        }
        Some(Mismatch::Asleep(what)) => all.push(PodFinding::new(Cause::Asleep, what.clone())),
        // A kind that this program does not know yet.
        Some(other) => all.push(PodFinding::new(Cause::Drifted, other.to_string())),
    }
    // Before its containers run nothing listens yet.
    if pod.is_none_or(|pod| pod.phase.as_deref().is_none_or(|phase| phase == "Running")) {
        all.extend(unserved(proxy_uids, plan, seen));
    }
}

fn different(plan: &RulePlan, differences: &Differences) -> Vec<PodFinding> {
    let mut by_cause: BTreeMap<Cause, Vec<String>> = BTreeMap::new();
    for difference in differences.iter() {
        let cause = match difference {
            Difference::MissingRouting(item) => of_routing(*item),
            Difference::BrokenRouting(found) => of_routing(found.item),
            Difference::Rule { family, .. } if is_without(plan, differences, *family) => Cause::OneFamily,
            // Of rules, in whatever form.
            Difference::Rule { .. } | Difference::NoNativeTables | Difference::Native(_) => Cause::Drifted,
        };
        by_cause.entry(cause).or_default().push(meaning::of(difference, plan));
    }
    by_cause.into_iter().map(|(cause, seen)| PodFinding { cause, seen }).collect()
}

const fn of_routing(item: RoutingItem) -> Cause {
    match item {
        RoutingItem::LoopbackAddress => Cause::PassthroughMissing,
        RoutingItem::Route(..) | RoutingItem::Rule(..) => Cause::RoutingMissing,
    }
}

/// Whether a family lacks every chain of the mesh that the plan has for it.
fn is_without(plan: &RulePlan, differences: &Differences, family: Family) -> bool {
    let rules = plan.rules(family);
    let chains = |table: &Table| rules.chains(*table).filter(|(chain, _)| chain.belongs_to_mesh()).count();
    let wanted: usize = Table::ALL.iter().map(chains).sum();
    let missing = differences.iter().filter(|difference| {
        matches!(difference, Difference::Rule { family: of, difference } if *of == family && difference.kind == DifferenceKind::MissingChain)
    });
    wanted > 0 && missing.count() >= wanted
}

/// Without the routing that is missing because `lo` has no address, which is reported by itself.
fn foreign(findings: &[interference::Finding], seen: &Inspection) -> Vec<PodFinding> {
    let has_loopback = seen.addresses.iter().any(IpAddr::is_loopback);
    let is_told = |finding: &&interference::Finding| has_loopback || finding.effect != Effect::Routes;
    [(Cause::Foreign, Sureness::Does), (Cause::ForeignMaybe, Sureness::May)]
        .into_iter()
        .filter_map(|(cause, sureness)| {
            let told = findings.iter().filter(is_told).filter(|finding| finding.severity == sureness);
            PodFinding::some(cause, told.map(ToString::to_string).collect())
        })
        .collect()
}

/// The ports that rules redirect to, each with its protocols.
#[must_use]
pub fn served_ports(plan: &RulePlan) -> BTreeMap<u16, Vec<Protocol>> {
    let mut ports: BTreeMap<u16, Vec<Protocol>> = BTreeMap::new();
    for planned in plan.planned_rules() {
        let rule = planned.rule();
        let (Target::Redirect(port) | Target::Tproxy { port, .. }) = &rule.target else { continue };
        let protocols = ports.entry(port.number()).or_default();
        let protocol = rule.protocol().unwrap_or(Protocol::Tcp);
        if !protocols.contains(&protocol) {
            protocols.push(protocol);
        }
    }
    ports
}

fn unserved(proxy_uids: Option<&[u32]>, plan: &RulePlan, seen: &Inspection) -> Vec<PodFinding> {
    let mut all: BTreeMap<Cause, Vec<String>> = BTreeMap::new();
    for (port, protocols) in served_ports(plan) {
        let is_dns = port == DnsCapture::PORT.number();
        for protocol in protocols {
            let word = protocol.name();
            let there = seen.listeners.iter().filter(|one| one.port == port && one.protocol == protocol);
            let users: Vec<u32> = there.map(|listener| listener.user).collect();
            if users.is_empty() {
                let cause = match plan.data_plane() {
                    // ztunnel listens on all of them as soon as it serves the pod.
                    DataPlane::Ambient => Cause::NotEnrolled,
                    DataPlane::Sidecar if is_dns => Cause::DnsNobodyListens,
                    DataPlane::Sidecar => Cause::NobodyListens,
                };
                all.entry(cause).or_default().push(format!("nothing listens on {word} port {port}"));
            }
            let is_stranger = |user: &&u32| {
                !seen.foreign && proxy_uids.is_some_and(|proxy_uids| !proxy_uids.contains(user))
            };
            for user in users.iter().filter(is_stranger) {
                let told = format!("user {user} listens on {word} port {port}");
                all.entry(Cause::StrangerListens).or_default().push(told);
            }
        }
    }
    all.into_iter().map(|(cause, seen)| PodFinding { cause, seen }).collect()
}

fn skipped(reason: SkipReason, seen: Option<&Inspection>) -> Option<PodFinding> {
    let seen = seen?;
    // Such a pod makes its rules itself.
    let (cause, told) = match (reason == SkipReason::HasInitContainer, seen.in_force.is_empty()) {
        (true, true) => (Cause::NotRedirected, format!("{}, and has made none", reason.explanation())),
        (false, false) => (Cause::Unexpected, format!("{}; {}", reason.explanation(), seen.backends())),
        (true, false) | (false, true) => return None,
    };
    Some(PodFinding::new(cause, told))
}

fn of_settings(
    redirect: &Redirect,
    settings: &RawSettings,
    pod: Option<&Pod>,
    seen: Option<&Inspection>,
) -> Vec<PodFinding> {
    let mut all = Vec::new();
    for notice in redirect.notices() {
        let cause = match notice {
            Notice::NothingCaptured => Cause::NothingCaptured,
            Notice::RootIsTheProxy { .. } => Cause::RootIsProxy,
            Notice::NoEffect { .. } | Notice::NoDnsServer { .. } => Cause::Misspelt,
            // Findings of `misspellings`, `of_pod` and `beside_families`.
            Notice::Ipv6NotCaptured { .. }
            | Notice::Misspelt(_)
            | Notice::UnreadableSwitch { .. }
            | Notice::RunsAsTheProxy(_) => continue,
        };
        all.push(PodFinding::new(cause, notice.to_string()));
    }
    all.extend(excluded(settings));
    if *redirect.dns() != DnsCapture::Off {
        let which = if let DnsCapture::Servers(servers) = redirect.dns() {
            format!("queries to {}", list(servers))
        } else {
            "all queries to port 53".to_owned()
        };
        all.push(dns_captured(&which, redirect.source(Key::RedirectDns)));
    }
    all.extend(beside_families(
        redirect.families(),
        redirect.mode() == InterceptionMode::Redirect,
        pod,
        seen,
    ));
    all
}

/// What a pod's annotations leave alone.
fn excluded(settings: &RawSettings) -> Option<PodFinding> {
    let excluded = settings
        .said()
        .filter(|(key, _, source)| EXCLUDING.contains(key) && matches!(source, Source::Annotation(_)))
        .map(|(_, value, source)| format!("{source}: {value:?}"));
    PodFinding::some(Cause::Excluded, excluded.collect())
}

/// What goes past ztunnel for a while.
fn connections_kept(table: &KeptTable) -> Option<PodFinding> {
    let (count, left) = (table.connections().len(), table.left().as_secs());
    let until = format!("{count} connections, kept until they end or {left}s have passed");
    (count > 0).then(|| PodFinding::new(Cause::ConnectionsKept, until))
}

fn dns_captured(which: &str, source: Source) -> PodFinding {
    PodFinding::new(Cause::DnsCaptured, format!("{which} ({source})"))
}

/// Addresses of a family without rules, also those by which only neighbours reach the pod.
fn beside_families(
    families: Families,
    redirects: bool,
    pod: Option<&Pod>,
    seen: Option<&Inspection>,
) -> Option<PodFinding> {
    // Native nftables redirect the other family as well: their tables are of both. TPROXY has a rule for each.
    let is_native =
        redirects && seen.is_some_and(|seen| seen.in_force.iter().any(|in_force| in_force.backend == NATIVE));
    let addresses = seen.map(|seen| &seen.addresses).or(pod.map(|pod| &pod.addresses));
    let beside: Vec<&IpAddr> = addresses
        .into_iter()
        .flatten()
        .filter(|address| is_routable(address) || is_link_local_v6(address))
        .filter(|address| !families.contains(Family::of(address)))
        .collect();
    (!beside.is_empty() && !is_native).then(|| PodFinding::new(Cause::FamilyNotCaptured, list(&beside)))
}

fn of_pod(pod: &Pod, redirect: &Redirect, all: &mut Vec<PodFinding>) {
    let collisions = redirect.notices().iter().filter_map(|notice| {
        if let Notice::RunsAsTheProxy(collision) = notice { Some(collision.to_string()) } else { None }
    });
    all.extend(PodFinding::some(Cause::UidCollision, collisions.collect()));
    all.extend(PodFinding::some(Cause::InitWithoutNetwork, without_network(pod, redirect)));
    all.extend(PodFinding::some(Cause::PortNotCaptured, beside_capture(pod, redirect)));
}

/// Init containers whose connections are captured before the proxy is there.
fn without_network(pod: &Pod, redirect: &Redirect) -> Vec<String> {
    let proxy = pod
        .containers
        .iter()
        .position(|one| one.name == PodFacts::PROXY_CONTAINER && one.kind == ContainerKind::Sidecar);
    let before = pod.containers.iter().take(proxy.unwrap_or(pod.containers.len()));
    let is_exempt = |one: &Container| {
        let user = one.user.and_then(|id| u32::try_from(id).ok());
        user.is_some_and(|id| redirect.proxy_uids().contains(&id))
    };
    before
        .filter(|one| one.kind == ContainerKind::Init && one.name != VALIDATION_CONTAINER && !is_exempt(one))
        .map(|one| format!("init container {} runs before the proxy", one.name))
        .collect()
}

/// Ports of the application that are not captured.
fn beside_capture(pod: &Pod, redirect: &Redirect) -> Vec<String> {
    let is_captured = |port: u16| {
        let is_in = |ranges: &[PortRange]| ranges.iter().any(|range| range.contains(port));
        match redirect.inbound() {
            InboundPorts::None => false,
            InboundPorts::AllExcept(ranges) => !is_in(ranges),
            InboundPorts::Only(ranges) => is_in(ranges),
        }
    };
    let others = pod
        .containers
        .iter()
        .filter(|one| one.name != PodFacts::PROXY_CONTAINER && one.kind != ContainerKind::Init);
    let ports = others.flat_map(|one| one.ports.iter().map(move |port| (one, *port)));
    ports
        .filter(|(_, port)| !is_captured(*port))
        .map(|(one, port)| {
            let is_excluded = matches!(redirect.inbound(), InboundPorts::AllExcept(_));
            let said =
                redirect.source(if is_excluded { Key::InboundExcludePorts } else { Key::InboundPorts });
            format!("container {} listens on port {port}, which is not captured ({said})", one.name)
        })
        .collect()
}

fn misspellings(pod: &Pod) -> Option<PodFinding> {
    PodFinding::some(Cause::Misspelt, pod.facts.notices().map(|notice| notice.to_string()).collect())
}

fn list<T: ToString>(values: &[T]) -> String {
    if values.is_empty() {
        return "none".to_owned();
    }
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use netfilter_state::netlink::Messages;
    use netns_apply::Impact;
    use redirect_core::AmbientRedirect;
    use serde_json::json;

    use super::*;
    use crate::inspect::InForce;
    use crate::node::NodeConfiguration;

    fn seen(mismatch: Option<Mismatch>) -> Inspection {
        Inspection {
            addresses: vec![IpAddr::from([127, 0, 0, 1]), IpAddr::from([10, 1, 0, 2])],
            in_force: vec![InForce { backend: "iptables-nft", rules: Some(20) }],
            listeners: BTreeSet::new(),
            unexamined: Vec::new(),
            mismatch,
            accepted: Vec::new(),
            not_accepted: None,
            impact: Impact::default(),
            lacking: Vec::new(),
            kept: KeptTable::default(),
            foreign: false,
        }
    }

    /// The state of a pod with this in its network namespace, and what holds it back.
    fn stands(ended: Option<(i64, &str)>, mismatch: Option<Mismatch>) -> (PodState, Vec<&'static str>) {
        let container = ended.map_or_else(
            || json!({"running": {}}),
            |(code, reason)| json!({"terminated": {"exitCode": code, "message": json!({"reason": reason}).to_string()}}),
        );
        let pod = json!({"metadata": {"annotations": {"sidecar.istio.io/status": "{}"}},
            "spec": {"containers": [{"name": "istio-proxy"}]},
            "status": {"phase": "Pending", "podIP": "10.1.0.2",
                "initContainerStatuses": [{"name": "istio-validation", "state": container}]}});
        let pod = Pod::from_json(&pod).expect("a pod");
        let (decided, seen) = (NodeConfiguration::default().decide_without_namespace(&pod), seen(mismatch));
        let all = findings(Some(&pod), &decided, Some(&seen));
        let held = all.iter().map(|finding| finding.cause).filter(|cause| UNPROVEN.contains(cause));
        (state(&decided, Some(&seen), &all), held.map(Cause::code).collect())
    }

    #[test]
    fn connections_that_are_kept_are_named_and_nothing_is_wrong_with_them() {
        let decided = PodDecision::Ambient(Box::new(AmbientRedirect::new(Families::Both)), Box::default());
        let told = |kept: KeptTable| {
            let seen = Inspection { kept, ..seen(None) };
            let all = findings(None, &decided, Some(&seen));
            let kept = all.into_iter().find(|finding| finding.cause == Cause::ConnectionsKept);
            (kept.map(|finding| finding.seen), state(&decided, Some(&seen), &[]))
        };
        let connection = ["10.1.0.2:8080", "10.1.0.9:40000"].map(|at| at.parse().expect("an address"));
        let made = KeptTable::make(1, &[connection.into()].into(), std::time::Duration::from_secs(60));
        let mut table = KeptTable::default();
        let made = made.expect("it fits");
        // The kernel shows what it was sent, but for the removal of an older one.
        Messages::new(&made).for_each(|message| table.take(&message));
        let (seen, state) = told(table);
        let seen = seen.expect("a finding");
        assert_eq!(seen, ["1 connections, kept until they end or 0s have passed"]);
        assert_eq!(state, PodState::Verified);
        assert_eq!(told(KeptTable::default()).0, None);
    }

    #[test]
    fn a_pod_has_one_state_after_its_repair() {
        assert_eq!(stands(None, None), (PodState::Verified, vec![]));
        assert_eq!(stands(Some((0, "redirected")), None), (PodState::Verified, vec![]));
        for outdated in ["no-rules", "rules-not-in-effect", "one-family-only", "", "of another release"] {
            let (state, held) = stands(Some((126, outdated)), None);
            assert_eq!((state, held), (PodState::Pending, vec!["awaits-validation"]), "{outdated}");
        }
        for unproven in ["nothing-proven", "out-of-resources"] {
            let (state, held) = stands(Some((126, unproven)), None);
            assert_eq!(
                (state, held),
                (PodState::Pending, vec!["held-back"]),
                "rules do not explain {unproven}"
            );
        }
        assert_eq!(stands(Some((137, "")), None), (PodState::Pending, vec!["validation-ended"]));
        let asleep = Some(Mismatch::Asleep("table".to_owned()));
        assert_eq!(stands(Some((126, "no-rules")), asleep), (PodState::Drifted, vec!["held-back"]));
    }
}
