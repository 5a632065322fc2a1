//! Rules and routes of other programs whose effect is easily misjudged (e2e/fixtures/predictions.yaml): marks from hook to hook, connection tracking's
//! place among the priorities, equal priorities, hooks below IP, routes. Each case is set up in a pod, packets are really sent, and three have to agree: the
//! kernel, the trace of what is in force, and CHECK, which names something if captured packets are lost, and nothing if none is.
//!
//! Each is played in one of its modes, or in all with SAMPLES=all. ONLY=P4 plays the cases whose names begin so in all of theirs, TRACES=1 shows the whole traces of those that are wrong.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::arrivals::{Ground, ROUTED, SentPacket, agrees, elsewhere, is_unsent, link_local};
use e2e::iptables::in_parallel;
use e2e::iptables::mesh::{loopback, passthrough};
use e2e::iptables::packets::{Arrived, FORMS, Said, plan, resolver};
use e2e::traffic::PROXY_ID;
use netns_apply::{ApplyOptions, Live, Mismatch, Snapshot, apply, verify};
use packet_trace::{Detail, Fate, Packet, TraceRules, interference::Certainty};
use redirect_core::{Family, RulePlan, settings::Key};
use serde::Deserialize;
use test_support::netns::{client_address, pod_address, remote_address};
use test_support::sample;

const THREADS: usize = 4;
/// A packet that is to arrive is waited for this long.
const PATIENCE: Duration = Duration::from_secs(20);

/// How the pod is redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Mode {
    Redirect,
    Tproxy,
    Native,
    NativeTproxy,
    /// By iptables-legacy.
    Legacy,
    LegacyTproxy,
    /// REDIRECT with strict capture.
    Strict,
    /// Native nftables of a plan for IPv4 alone, beside which the pod has an IPv6 address.
    NativeV4,
    /// REDIRECT with all DNS queries.
    Dns,
    /// Native nftables of the same with those to the servers of `resolv.conf`.
    NativeDnsServers,
}
use Mode::{
    Dns, Legacy, LegacyTproxy, Native, NativeDnsServers, NativeTproxy, NativeV4, Redirect, Strict, Tproxy,
};

impl Mode {
    fn said(self) -> Said {
        let mut said: Said = [(Key::InboundPorts, "*"), (Key::OutboundRanges, "*")].into();
        if self != NativeV4 {
            said.insert(Key::DualStack, "true");
        }
        if matches!(self, Tproxy | NativeTproxy | LegacyTproxy) {
            said.insert(Key::InterceptionMode, "TPROXY");
        }
        if self == Strict {
            said.insert(Key::StrictCapture, "true");
        }
        if self.captures_dns() {
            said.insert(Key::RedirectDns, "true");
        }
        if self == Dns {
            said.insert(Key::CaptureAllDns, "true");
        }
        said
    }

    const fn captures_dns(self) -> bool {
        matches!(self, Dns | NativeDnsServers)
    }

    /// The packets to send.
    fn probes(self) -> Vec<Probe> {
        if self.captures_dns() { [&PROBES[..], &QUERIES].concat() } else { PROBES.into() }
    }

    fn options(self) -> ApplyOptions {
        let name = match self {
            Redirect | Tproxy | Strict | Dns => "netlink",
            Native | NativeTproxy | NativeV4 | NativeDnsServers => "native nftables",
            Legacy | LegacyTproxy => "iptables-legacy",
        };
        let (_, backend, native_form) = FORMS.into_iter().find(|form| form.0 == name).expect("is a form");
        ApplyOptions::default().backend(backend).native_form(native_form)
    }
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Probe {
    /// From outside to the application.
    In,
    In6,
    /// From the application to a service far away, at port 80 and 443.
    Out,
    Out443,
    Out6,
    /// From the proxy to the application, at the pod's address.
    ToSelf,
    /// The same from a process that has the proxy's group alone: captured by TPROXY, which marks do, and not by REDIRECT.
    GroupToSelf443,
    /// From the application to itself, which no plan captures.
    AppToSelf,
    /// From the proxy to a service far away, which no plan captures.
    ByProxy443,
    /// A query of the application to a resolver in the pod that `resolv.conf` names, ...
    Query,
    Query6,
    /// ... over TCP, ...
    QueryByTcp,
    QueryByTcp6,
    /// ... and to one that it does not name.
    QueryOther,
    /// From the application to a service behind the tunnel t0.
    OutByTunnel,
    /// To a service far away with a mark that the application sets, ...
    OutMarked,
    /// ... and in a datagram, a query.
    QueryMarked,
    /// From outside to the proxy's own port for tunnels, and to the listener that the plan captures for.
    InTunnel,
    InListener,
    /// From the proxy to its own port for tunnels, and from the application to that of another proxy.
    ToTunnel,
    OutToTunnel,
    /// From a neighbour to the application at the pod's link-local address, and back.
    InByLink,
    OutByLink,
    /// From outside, and from the application, to an address that the pod has by a route to a prefix.
    InRouted,
    ToRouted,
    /// From the proxy to the application, as it connects there.
    ToApp,
}
use Probe::{
    AppToSelf, ByProxy443, GroupToSelf443, In, In6, InByLink, InListener, InRouted, InTunnel, Out, Out6,
    Out443, OutByLink, OutByTunnel, OutMarked, OutToTunnel, Query, Query6, QueryByTcp, QueryByTcp6,
    QueryMarked, QueryOther, ToApp, ToRouted, ToSelf, ToTunnel,
};

/// Those that are sent in every case, ...
const PROBES: [Probe; 9] = [In, In6, Out, Out443, Out6, ToSelf, GroupToSelf443, AppToSelf, ByProxy443];
/// ... and those that are sent where DNS is captured, too.
const QUERIES: [Probe; 5] = [Query, Query6, QueryByTcp, QueryByTcp6, QueryOther];

impl Probe {
    fn packet(self) -> Packet {
        let v6 = matches!(self, In6 | Out6 | Query6 | QueryByTcp6);
        let at = |ip, port| SocketAddr::new(ip, port);
        let (pod, far) = (pod_address(v6), remote_address(v6));
        let local = |user, to| Packet::from_pod(user, user, at(pod, 0), to);
        let outside = |port| Packet::from_outside(at(client_address(v6), 0), at(pod, port)).by("eth0");
        let query = |to| Packet::from_pod(1000, 1000, at(loopback(v6), 0), at(to, 53));
        match self {
            In | In6 => outside(8080),
            Out | Out6 => local(1000, at(far, 80)).by("eth0"),
            Out443 => local(1000, at(far, 443)).by("eth0"),
            ToSelf => local(PROXY_ID, at(pod, 8080)).by("lo"),
            GroupToSelf443 => Packet::from_pod(1000, PROXY_ID, at(pod, 0), at(pod, 443)).by("lo"),
            AppToSelf => local(1000, at(pod, 8080)).by("lo"),
            ByProxy443 => local(PROXY_ID, at(far, 443)).by("eth0"),
            Query | Query6 => query(resolver(v6)).over_udp(),
            QueryByTcp | QueryByTcp6 => query(resolver(v6)),
            QueryOther => query([127, 0, 0, 11].into()).over_udp(),
            OutByTunnel => local(1000, at(elsewhere(false), 80)).by("t0"),
            OutMarked => local(1000, at(far, 80)).by("eth0").with_mark(7),
            QueryMarked => local(1000, at(far, 53)).by("eth0").over_udp().with_mark(7),
            InTunnel => outside(15008),
            InListener => outside(15006),
            ToTunnel => local(PROXY_ID, at(pod, 15008)).by("lo"),
            OutToTunnel => local(1000, at(far, 15008)).by("eth0"),
            InByLink => Packet::from_outside(at(link_local(false), 0), at(link_local(true), 8080)).by("eth0"),
            OutByLink => {
                Packet::from_pod(1000, 1000, at(link_local(true), 0), at(link_local(false), 80)).by("eth0")
            }
            InRouted => Packet::from_outside(at(client_address(false), 0), at(ROUTED, 8080)).by("eth0"),
            ToRouted => local(1000, at(ROUTED, 8080)).by("lo"),
            ToApp => Packet::from_pod(PROXY_ID, PROXY_ID, at(passthrough(false), 0), at(pod, 8081)).by("lo"),
        }
    }
}

/// What another program does, and which packets do not end where the plan alone would have them end.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// The finding.
    name: String,
    #[serde(default = "usual_modes")]
    modes: Vec<Mode>,
    /// What is there before the plan is put in force.
    #[serde(default)]
    before: String,
    /// What comes after.
    #[serde(default)]
    after: String,
    /// By the kernel.
    #[serde(default)]
    lost: Vec<Probe>,
    /// Whether the kernel does not tell all that matters, so that neither the trace nor CHECK can be sure.
    #[serde(default)]
    untold: bool,
    /// Whether CHECK may name what is missing of the plan itself although no packet of these is lost.
    #[serde(default)]
    lacks: bool,
    /// Packets that are sent in this case alone.
    #[serde(default)]
    also: Vec<Probe>,
}

fn usual_modes() -> Vec<Mode> {
    vec![Redirect, Tproxy, Native, NativeTproxy, Legacy, LegacyTproxy]
}

/// A pod that a case is set up in.
struct Pod {
    ground: Ground,
    plan: RulePlan,
    options: ApplyOptions,
    probes: Vec<Probe>,
}

impl Pod {
    fn new(case: &Case, mode: Mode) -> Result<Self> {
        let (ground, plan, options) = (Ground::new()?, plan(&mode.said())?, mode.options());
        ground.pod().sh(&script(&case.before, mode))?;
        ground.pod().enter(|| apply(&plan, &options))??;
        ground.pod().settled()?;
        ground.pod().sh(&script(&case.after, mode))?;
        Ok(Self { ground, plan, options, probes: [mode.probes(), case.also.clone()].concat() })
    }

    fn judge(&self, case: &Case) -> Result<Vec<String>> {
        let live = self.ground.pod().enter(|| Live::now(None, &self.options))??;
        let packets: Vec<Packet> = self.probes.iter().map(|probe| probe.packet()).collect();
        let shots = self.ground.send(&packets)?;
        let planned = |probe: Probe, shot: &SentPacket| self.planned(probe, &shot.packet);
        let trace =
            |shot: &SentPacket| live.rules(shot.packet.family(), Some(&self.plan)).trace(&shot.packet);
        let may_be_lost = |shot: &SentPacket| {
            trace(shot).may.iter().any(|fate| agrees(&Arrived::Nothing, *fate, &shot.packet))
        };
        let probes = || self.probes.iter().copied();
        let pairs = probes().zip(&shots);
        let lost = pairs.filter(|(probe, shot)| {
            let is_by_mode = *probe == GroupToSelf443 || planned(*probe, shot) == Fate::Dropped;
            if is_by_mode { may_be_lost(shot) } else { case.lost.contains(probe) }
        });
        let lost: Vec<&Packet> = lost.map(|(_, shot)| &shot.packet).collect();
        let seen = self.ground.outcome(&shots, |shot| !lost.contains(&&shot.packet), PATIENCE);
        let mut problems = Vec::new();
        let (mut is_captured_lost, mut is_answer_lost) = (false, false);
        for ((probe, shot), seen) in probes().zip(&shots).zip(&seen) {
            let (planned, trace) = (planned(probe, shot), trace(shot));
            let is_lost = !agrees(seen, planned, &shot.packet);
            let is_captured = matches!(planned, Fate::Proxy { .. });
            // So is what is left alone because it is the proxy's, unless a service leads it elsewhere.
            let is_proxys = matches!(probe, ByProxy443 | InTunnel | ToApp);
            let is_judged = is_captured || is_proxys && !trace.may.contains(&Fate::Translated);
            is_captured_lost |= is_judged && is_lost && !is_unsent(&trace);
            is_answer_lost |= is_captured && !is_unsent(&trace) && !shot.is_answered();
            // What is captured by the group alone depends on the mode.
            if probe != GroupToSelf443 && is_lost != case.lost.contains(&probe) {
                problems.push(format!("kernel: {probe:?} {seen:?}, by the plan {planned:?}"));
            }
            let fits = trace
                .may
                .iter()
                .any(|fate| agrees(seen, *fate, &shot.packet) || case.untold && *fate == Fate::Unknown);
            if !fits || trace.fate() == Fate::Unknown && !case.untold {
                let detail =
                    std::env::var("TRACES").map_or_else(|_| String::new(), |_| trace.text(Detail::Every));
                problems.push(format!("trace: {probe:?} {seen:?}, not {:?}{detail}", trace.may));
            }
        }
        problems.extend(self.check(case, is_captured_lost, is_answer_lost)?);
        Ok(problems)
    }

    /// Where the packet would end if nobody else did anything.
    fn planned(&self, probe: Probe, packet: &Packet) -> Fate {
        if self.plan.families().contains(&packet.family()) {
            return TraceRules::of_plan(&self.plan, packet.family()).fate(packet);
        }
        // Native tables are of both families, so IPv6 goes the way of IPv4.
        let like = match probe {
            In6 => In.packet(),
            Out6 => Out.packet(),
            In | Out | Out443 | ToSelf | GroupToSelf443 | AppToSelf | ByProxy443 => packet.clone(),
            Query | Query6 | QueryByTcp | QueryByTcp6 | QueryOther => packet.clone(),
            OutByTunnel | OutMarked | QueryMarked | InTunnel | ToApp => packet.clone(),
            InListener | ToTunnel | OutToTunnel => packet.clone(),
            InByLink | OutByLink | InRouted | ToRouted => packet.clone(),
        };
        TraceRules::of_plan(&self.plan, Family::V4).fate(&like)
    }

    /// What CHECK names, if that is wrong. Where no captured packet is lost it may still be that an answer is.
    fn check(&self, case: &Case, is_lost: bool, is_answer_lost: bool) -> Result<Option<String>> {
        let look = || -> Result<_> {
            let Some(found) = verify(&self.plan, &self.options)? else { return Ok(None) };
            let snapshot = Snapshot::take(&self.plan, &self.options)?;
            let consequences = snapshot.impact(&found, &self.plan, &self.options)?.consequences;
            Ok(Some((found, consequences)))
        };
        let (found, consequences) = self.ground.pod().enter(look)??.unzip();
        Ok(match (found, is_lost) {
            (None, true) => Some("CHECK: silent".to_owned()),
            (None, false) if is_answer_lost => Some("CHECK: silent of answers".to_owned()),
            (Some(_), true) if consequences.is_none_or(|all| all.is_empty()) => {
                Some("CHECK: tells no consequence".to_owned())
            }
            (Some(_), true) | (None, false) => None,
            (Some(_), false) if case.lacks || is_answer_lost => None,
            (Some(Mismatch::Interference(findings, _)), false)
                if case.untold && findings.iter().all(|finding| finding.severity == Certainty::May) =>
            {
                None
            }
            (Some(named), false) => Some(format!("CHECK: names {}", report(&named))),
        })
    }
}

/// With how sure it is.
fn report(named: &Mismatch) -> String {
    let Mismatch::Interference(findings, _) = named else { return named.to_string() };
    let each = findings.iter().map(|finding| format!("{:?}: {finding}", finding.severity));
    each.collect::<Vec<_>>().join("; ")
}

/// `$ipt` is the variant of iptables that suits the mode.
fn script(text: &str, mode: Mode) -> String {
    let variant = if matches!(mode, Legacy | LegacyTproxy) { "legacy" } else { "nft" };
    // nft wants each of the braces that close a block on a line of its own.
    text.replace("} }", "}\n}").replace("$ipt", &format!("iptables-{variant} -w"))
}

#[test]
fn kernel_trace_and_check_agree() -> Result<()> {
    let cases: Vec<Case> = serde_saphyr::from_str(include_str!("../../fixtures/predictions.yaml"))?;
    let only = std::env::var("ONLY").ok();
    let wanted = |case: &Case| only.as_ref().is_none_or(|only| case.name.starts_with(only.as_str()));
    // Each case in one of its modes, by turns, where not everything is asked for.
    let takes_all = only.is_some() || sample::is_whole();
    let mut all: Vec<(&Case, Mode)> = Vec::new();
    for (number, case) in cases.iter().enumerate().filter(|(_, case)| wanted(case)) {
        let modes = case.modes.iter().enumerate();
        let taken = modes.filter(|(mode, _)| takes_all || number % case.modes.len() == *mode);
        all.extend(taken.map(|(_, mode)| (case, *mode)));
    }
    // What is wrong in several modes is reported once.
    let wrong: Mutex<BTreeMap<(&str, String), Vec<Mode>>> = Mutex::default();
    let failures = in_parallel(THREADS, &all, |_, (case, mode)| {
        let problems = Pod::new(case, *mode).and_then(|pod| pod.judge(case));
        let problems = problems.with_context(|| format!("{} {mode:?}", case.name))?;
        let mut wrong = wrong.lock().unwrap_or_else(PoisonError::into_inner);
        for problem in problems {
            wrong.entry((&case.name, problem)).or_default().push(*mode);
        }
        Ok(Vec::new())
    });
    let wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{} cases", all.len());
    let scripts = cases.iter().map(|case| (&*case.name, format!("{}{}", case.before, case.after)));
    let scripts: BTreeMap<&str, String> = scripts.collect();
    let mut text = failures.join("\n");
    let mut last = "";
    for ((name, problem), modes) in &wrong {
        if *name != last {
            text.push_str(&format!("\n{name}: {}", scripts[name]));
            last = name;
        }
        text.push_str(&format!("\n    {problem} {modes:?}"));
    }
    ensure!(text.is_empty(), "{} disagree:\n{text}", failures.len() + wrong.len());
    Ok(())
}
