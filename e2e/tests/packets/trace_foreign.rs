//! Random rules, hooks and routes of other programs around a random plan: the trace of what is in force says where each packet arrives, and
//! CHECK names something if captured packets are lost, and nothing as certain unless some are.
//!
//! TRACE_FOREIGN says how many packets are sent (`make trace`: 10,000), TRACE_SEED with which number the tests begin. Each ruleset gets
//! 10 packets and more for what CHECK names. TRACE_SEED=N TRACE_FOREIGN=10 repeats the ruleset of seed N; TRACE_SCRIPT=FILE has the commands
//! of that file in place of the random ones, to find out which of them matter.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::iptables::arrivals::{Ground, SentPacket, agrees, elsewhere, is_unsent};
use e2e::iptables::foreign::{Foreign, random};
use e2e::iptables::in_parallel;
use e2e::iptables::mesh::{loopback, other_address, passthrough};
use e2e::iptables::packets::{Arrived, FORMS, plan, random_packet, random_settings, resolver};
use e2e::iptables::vocabulary::{self, EVALUATED, NOT_EVALUATED, NOT_MADE};
use e2e::traffic::PROXY_ID;
use netns_apply::{ApplyOptions, Live, apply};
use packet_trace::{
    Detail, Fate, Interface, Listener, Outcome, Packet, Sender, Trace, TraceEvent, TraceRules,
    interference::{Certainty, Finding, Traffic},
};
use redirect_core::{Family, RulePlan, rule::Protocol};
use test_support::dice::Dice;
use test_support::netns::{client_address, pod_address, remote_address};
use test_support::sample;

const THREADS: usize = 4;
/// How many packets `make test` sends, and how many each ruleset gets.
const FEW: usize = 300;
const PACKETS: usize = 10;
/// A packet that is to arrive is waited for this long, and one that seems lost a second time for longer.
const PATIENCE: Duration = Duration::from_secs(2);
const LONGER: Duration = Duration::from_secs(10);
/// How many packets are checked, and how many sent at most, to find one that is lost to what CHECK names.
const DRAWS: usize = 2000;
const SUSPECTS: usize = 6;

/// A pod with a plan among what others do.
struct Pod {
    seed: u64,
    ground: Ground,
    words: String,
    plan: RulePlan,
    options: ApplyOptions,
    foreign: Foreign,
    live: [TraceRules; 2],
    planned: [TraceRules; 2],
}

impl Pod {
    fn new(seed: u64, dice: &mut Dice) -> Result<Self> {
        let ground = Ground::new()?;
        let (form, backend, native_form) = dice.pick(&FORMS);
        let said = random_settings(dice);
        let (plan, words) = (plan(&said)?, format!("{said:?} by {form}"));
        let options = ApplyOptions::default().backend(backend).native_form(native_form);
        let mut foreign = random(dice, form == "iptables-legacy");
        if let Ok(file) = std::env::var("TRACE_SCRIPT") {
            let after = std::fs::read_to_string(&file).with_context(|| file.clone())?;
            foreign = Foreign { before: String::new(), after };
        }
        let about = || format!("{words}\n{foreign:?}");
        ground.pod().sh(&foreign.before).with_context(about)?;
        ground.pod().enter(|| apply(&plan, &options))?.with_context(about)?;
        if !foreign.before.contains("route del local") {
            ground.pod().settled()?;
        }
        ground.pod().sh(&foreign.after).with_context(about)?;
        let live = ground.pod().enter(|| Live::now(None, &options))?.with_context(about)?;
        let live = Family::BOTH.map(|family| live.rules(family, Some(&plan)));
        let planned = Family::BOTH.map(|family| TraceRules::of_plan(&plan, family));
        Ok(Self { seed, ground, words, plan, options, foreign, live, planned })
    }

    fn trace(&self, packet: &Packet) -> Trace {
        self.live[usize::from(packet.family() == Family::V6)].trace(packet)
    }

    fn planned(&self, packet: &Packet) -> Fate {
        self.planned[usize::from(packet.family() == Family::V6)].fate(packet)
    }

    /// Sends packets; where they arrive, with the shots themselves. What disagrees with its trace is sent once more and waited for longer.
    ///
    /// Nothing is said of a packet that has come to a listener who has no route for an answer, and so drops it: it has arrived, and yet the
    /// connection is lost.
    fn play(&self, packets: &[Packet]) -> Result<Vec<(SentPacket, Arrived)>> {
        let arrives = |shot: &SentPacket| {
            let may = self.trace(&shot.packet).may;
            !may.iter()
                .any(|fate| matches!(fate, Fate::Unknown) || agrees(&Arrived::Nothing, *fate, &shot.packet))
        };
        let shots = self.ground.send(packets)?;
        let seen = self.ground.outcome(&shots, arrives, PATIENCE);
        let mut all = Vec::new();
        for (shot, seen) in shots.into_iter().zip(seen) {
            if seen == Arrived::Nothing && arrives(&shot) {
                all.extend(self.play_again(&shot.packet)?);
            } else {
                all.push((shot, seen));
            }
        }
        Ok(all)
    }

    fn play_again(&self, packet: &Packet) -> Result<Option<(SentPacket, Arrived)>> {
        let before = self.ground.dropped_by_listeners()?;
        let again = self.ground.send(std::slice::from_ref(packet))?;
        let seen = self.ground.outcome(&again, |_| true, LONGER);
        let is_refused = seen == [Arrived::Nothing] && self.ground.dropped_by_listeners()? != before;
        Ok(again.into_iter().zip(seen).next().filter(|_| !is_refused))
    }

    fn problem(&self, kind: &str, text: &str, trace: &Trace) -> Problem {
        let Self { seed, words, foreign, .. } = self;
        let Foreign { before, after } = foreign;
        let before =
            if before.is_empty() { String::new() } else { format!("{before}-- then the plan, then\n") };
        Problem {
            kind: kind.to_owned(),
            text: format!(
                "seed {seed}: {kind}: {text}\n{words}\n{before}{after}{}",
                trace.text(Detail::Every)
            ),
        }
    }

    /// What the trace says against what the kernel does.
    fn judge_trace(&self, shot: &SentPacket, seen: &Arrived) -> Option<Problem> {
        let trace = self.trace(&shot.packet);
        let agreed = trace.may.iter().any(|fate| *fate == Fate::Unknown || agrees(seen, *fate, &shot.packet));
        let text =
            || format!("{seen:?} instead of {:?} (by the plan {:?})", trace.may, self.planned(&shot.packet));
        (!agreed).then(|| self.problem("trace", &text(), &trace))
    }

    /// Captured packets that are lost have to be named, with the traffic that they are of; over lo, where there is more of it than CHECK tells
    /// apart, with any. One with a mark of its own is not an usual packet.
    fn judge_silence(
        &self,
        shot: &SentPacket,
        seen: &Arrived,
        findings: &[Finding],
    ) -> Result<Option<Problem>> {
        let Some((planned, traffic)) =
            self.judged(&shot.packet).filter(|(fate, _)| !agrees(seen, *fate, &shot.packet))
        else {
            return Ok(None);
        };
        if traffic == Traffic::ByProxy {
            // A service may lead it elsewhere; and the plan may leave it alone for another reason than the proxy's.
            let mut application = shot.packet.clone();
            application.sender = Sender::Local { uid: 1000, gid: 1000 };
            let is_left_alone = self.planned(&application) == Fate::Untouched;
            if is_left_alone || self.trace(&shot.packet).may.contains(&Fate::Translated) {
                return Ok(None);
            }
        }
        let is_about = |finding: &Finding| {
            let kinds = &finding.traffic;
            traffic == Traffic::ProxyToSelf
                || kinds.is_empty()
                || kinds.contains(&(shot.packet.family(), traffic))
        };
        if shot.packet.mark != 0 || findings.iter().any(is_about) || is_unsent(&self.trace(&shot.packet)) {
            return Ok(None);
        }
        // It may have been late.
        let again = self.ground.play(std::slice::from_ref(&shot.packet), LONGER)?;
        let Some((packet, seen)) = again.into_iter().find(|(packet, seen)| !agrees(seen, planned, packet))
        else {
            return Ok(None);
        };
        let text = format!("{seen:?} instead of {planned:?}, and CHECK is silent");
        Ok(Some(self.problem("silent", &text, &self.trace(&packet))))
    }

    /// Where the plan has a packet end that CHECK judges, and its traffic: what it captures, and what it leaves alone only because it is the
    /// proxy's.
    fn judged(&self, packet: &Packet) -> Option<(Fate, Traffic)> {
        let fate = self.planned(packet);
        if matches!(fate, Fate::Proxy { .. }) {
            return Some((fate, kind_of(packet, fate)));
        }
        let Sender::Local { uid, gid } = packet.sender else { return None };
        let is_asked = packet.protocol == Protocol::Tcp || packet.destination.port() == 53;
        let is_out = is_asked && packet.interface == Interface::Named("eth0".into());
        let is_of_proxy = is_out
            && fate == Fate::Untouched
            && (self.plan.proxy_users().any(|user| user == uid)
                || self.plan.proxy_groups().any(|group| group == gid));
        is_of_proxy.then_some((fate, Traffic::ByProxy))
    }

    /// What is named as certain must be lost: some packet of the traffic that it is about is.
    fn judge_certainty(&self, finding: &Finding, dice: &mut Dice) -> Result<Option<Problem>> {
        // Segments that open a connection with more flags than SYN are not sent here.
        if finding.to_string().contains("--tcp-flags") {
            return Ok(None);
        }
        let mut unharmed = None;
        for (family, traffic) in &finding.traffic {
            let shots = self.play(&self.suspects(*traffic, *family == Family::V6, dice))?;
            let is_lost = |(shot, seen): &(SentPacket, Arrived)| {
                !agrees(seen, self.planned(&shot.packet), &shot.packet) || !shot.is_answered()
            };
            if shots.iter().any(is_lost) {
                return Ok(None);
            }
            unharmed = unharmed.or(shots.into_iter().next());
        }
        Ok(unharmed.map(|(shot, _)| {
            self.problem("named", &format!("nothing is lost to {finding}"), &self.trace(&shot.packet))
        }))
    }

    /// Captured packets of this traffic: first those that are lost by their traces, then those that may be.
    fn suspects(&self, traffic: Traffic, v6: bool, dice: &mut Dice) -> Vec<Packet> {
        let mut all = Vec::new();
        for _ in 0..DRAWS {
            let packet = captured_packet(dice, traffic, v6);
            let kind = self.judged(&packet).map(|(_, kind)| kind);
            if kind == Some(traffic) && !all.contains(&packet) {
                all.push(packet);
            }
        }
        all.sort_by_cached_key(|packet| {
            let (may, planned) = (self.trace(packet).may, self.planned(packet));
            (may.contains(&planned), may.len() == 1)
        });
        all.truncate(SUSPECTS);
        all
    }
}

fn kind_of(packet: &Packet, fate: Fate) -> Traffic {
    let is_in_pod = packet.destination.ip().is_loopback();
    let is_dns = matches!(fate, Fate::Proxy { listener: Listener::Dns, .. })
        && (packet.protocol == Protocol::Udp || is_in_pod);
    match packet.sender {
        Sender::Outside => Traffic::Inbound,
        Sender::Local { .. } if is_dns => Traffic::Dns,
        Sender::Local { .. } if packet.interface == Interface::Named("lo".into()) => Traffic::ProxyToSelf,
        Sender::Local { .. } => Traffic::Outbound,
    }
}

/// A packet of this traffic, if the plan captures it: more of them than [`random_packet`] makes, none marked.
fn captured_packet(dice: &mut Dice, traffic: Traffic, v6: bool) -> Packet {
    let at = |ip, port| SocketAddr::new(ip, port);
    let client = client_address(v6);
    let far = dice.pick(&[remote_address(v6), other_address(v6), elsewhere(v6), client]);
    let pod = pod_address(v6);
    let id = |dice: &mut Dice| dice.pick(&[1000, 1000, 2000, 0, 7, PROXY_ID]);
    let port = dice.pick(&[80, 81, 443, 4443, 53, 8080, 8081, 15008, 15001, 15006, 9]);
    let (uid, gid) = (id(dice), id(dice));
    match traffic {
        Traffic::Inbound => Packet::from_outside(at(dice.pick(&[client, far]), 0), at(pod, port)).by("eth0"),
        Traffic::Dns => query(dice, [uid, gid], v6, far),
        Traffic::ProxyToSelf if dice.one_in(4) => {
            Packet::from_pod(uid, gid, at(loopback(v6), 0), at(passthrough(v6), port)).by("lo")
        }
        Traffic::ProxyToSelf => Packet::from_pod(uid, gid, at(pod, 0), at(pod, port)).by("lo"),
        Traffic::ByProxy if dice.one_in(4) => query(dice, [uid, gid], v6, far),
        Traffic::ByProxy | Traffic::Outbound | _ => {
            Packet::from_pod(uid, gid, at(pod, 0), at(far, port)).by("eth0")
        }
    }
}

/// A query to a server far away, or to a resolver in the pod.
fn query(dice: &mut Dice, [uid, gid]: [u32; 2], v6: bool, far: IpAddr) -> Packet {
    let at = |ip, port| SocketAddr::new(ip, port);
    if dice.one_in(2) {
        return Packet::from_pod(uid, gid, at(pod_address(v6), 0), at(far, 53)).by("eth0").over_udp();
    }
    let itself = Packet::from_pod(uid, gid, at(loopback(v6), 0), at(resolver(v6), 53)).by("lo");
    if dice.one_in(2) { itself } else { itself.over_udp() }
}

/// What is wrong, in one word and at length.
struct Problem {
    kind: String,
    text: String,
}

/// How many packets had which fate, and what was not understood on the way of those whose fate is unknown.
#[derive(Default)]
struct Tally {
    fates: BTreeMap<String, usize>,
    causes: BTreeMap<String, usize>,
    findings: BTreeMap<String, usize>,
    problems: BTreeMap<String, usize>,
}

impl Tally {
    fn count(&mut self, trace: &Trace) {
        *self.fates.entry(trace.fate().to_string()).or_default() += 1;
        if trace.fate() != Fate::Unknown {
            return;
        }
        let cause = |step| {
            if let &TraceEvent::Rule { ref rule, outcome: Outcome::Unknown(_), .. } = step {
                Some(rule)
            } else {
                None
            }
        };
        let causes: BTreeSet<&String> = trace.steps.iter().filter_map(cause).collect();
        let text = if causes.is_empty() {
            format!("{:?}", trace.may)
        } else {
            causes.into_iter().map(String::as_str).collect::<Vec<_>>().join(" | ")
        };
        *self.causes.entry(text).or_default() += 1;
    }

    fn add(&mut self, other: Self) {
        let own = [&mut self.fates, &mut self.causes, &mut self.findings, &mut self.problems];
        let others = [other.fates, other.causes, other.findings, other.problems];
        for (all, more) in own.into_iter().zip(others) {
            for (name, count) in more {
                *all.entry(name).or_default() += count;
            }
        }
    }
}

fn try_seed(seed: u64) -> Result<(Vec<String>, Tally)> {
    let mut dice = Dice::new(seed);
    let pod = Pod::new(seed, &mut dice)?;
    let mut tally = Tally::default();
    let findings = pod.ground.pod().enter(|| Live::interference(&pod.plan, &pod.options))??;
    for finding in &findings {
        *tally.findings.entry(format!("{:?}", finding.severity)).or_default() += 1;
    }
    let packets: Vec<Packet> = (0..PACKETS).map(|_| random_packet(&mut dice)).collect();
    let mut problems = Vec::new();
    for (shot, seen) in pod.play(&packets)? {
        tally.count(&pod.trace(&shot.packet));
        problems.extend(pod.judge_trace(&shot, &seen));
        problems.extend(pod.judge_silence(&shot, &seen, &findings)?);
    }
    for finding in findings.iter().filter(|finding| finding.severity == Certainty::Does) {
        problems.extend(pod.judge_certainty(finding, &mut dice)?);
    }
    for problem in &problems {
        *tally.problems.entry(problem.kind.clone()).or_default() += 1;
    }
    Ok((problems.into_iter().map(|problem| problem.text).collect(), tally))
}

#[test]
fn packets_among_rules_of_others_arrive_where_their_traces_say() -> Result<()> {
    let (first, packets) = (sample::number("TRACE_SEED", 1), sample::number("TRACE_FOREIGN", FEW));
    let rulesets = packets.div_ceil(PACKETS);
    let seeds: Vec<u64> = (first..first + rulesets).map(|seed| seed as u64).collect();
    let all = Mutex::new(Tally::default());
    let problems = in_parallel(THREADS, &seeds, |_, seed| {
        let (problems, tally) = try_seed(*seed).with_context(|| format!("seed {seed}"))?;
        all.lock().unwrap_or_else(PoisonError::into_inner).add(tally);
        Ok(problems)
    });
    let Tally { fates, causes, findings, problems: kinds } =
        all.into_inner().unwrap_or_else(PoisonError::into_inner);
    let packets: usize = fates.values().sum();
    println!(
        "{packets} packets among {rulesets} rulesets: {fates:#?}, unknown because of {causes:#?}\nCHECK: {findings:?}"
    );
    ensure!(problems.is_empty(), "{} disagree: {kinds:?}\n{}", problems.len(), problems.join("\n\n"));
    // But for those of which nothing is said.
    ensure!(packets * 100 >= rulesets * PACKETS * 97, "only {packets} packets were judged");
    let unknown = fates.get(&Fate::Unknown.to_string()).copied().unwrap_or_default();
    ensure!(
        unknown * 100 <= packets * 15 || rulesets == 1,
        "of {packets} packets {unknown} have an unknown fate: {causes:#?}"
    );
    let usual = [Fate::Untouched, Fate::Dropped].map(|fate| fate.to_string());
    ensure!(
        rulesets == 1 || usual.iter().all(|fate| fates.contains_key(fate)) && fates.len() >= 6,
        "hardly a variety: {fates:?}"
    );
    Ok(())
}

/// The names of what a table of `/proc` lists, one a line.
fn listed(file: &str) -> Result<Vec<String>> {
    let text = fs::read_to_string(file).with_context(|| file.to_owned())?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// The extensions that the kernel has, or that iptables has a library for.
fn extensions() -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for family in ["ip", "ip6"] {
        for kind in ["matches", "targets"] {
            names.extend(listed(&format!("/proc/net/{family}_tables_{kind}"))?);
        }
    }
    let libraries = format!("/usr/lib/{}-linux-gnu/xtables", std::env::consts::ARCH);
    for file in fs::read_dir(&libraries).with_context(|| libraries.clone())? {
        let name = file?.file_name().to_string_lossy().into_owned();
        let of_ip = ["libxt_", "libipt_", "libip6t_"].into_iter().find_map(|begin| name.strip_prefix(begin));
        names.extend(of_ip.and_then(|name| name.strip_suffix(".so")).map(str::to_owned));
    }
    Ok(names)
}

#[test]
fn every_extension_and_expression_is_made_or_it_is_said_why_not() -> Result<()> {
    let (made, mut missing) = (vocabulary::extensions(), Vec::new());
    let is_excused = |list, name: &str| vocabulary::listed(list, name).is_some();
    for name in extensions()? {
        if made.contains(name.as_str()) == is_excused(NOT_MADE, &name) {
            missing.push(name);
        }
    }
    let symbols = listed("/proc/kallsyms")?;
    let evaluated = symbols.iter().filter_map(|line| {
        let name = line.split_whitespace().nth(2)?.strip_prefix("nft_")?.strip_suffix("_eval")?;
        // Of several kinds of one expression the words are the same.
        Some(["_bytes", "_pkts", "_obj", "_inet", "_ipv4", "_ipv6", "_netdev", "_do", "_large"].iter().fold(
            name,
            |name, kind| {
                let is_known = is_excused(EVALUATED, name) || is_excused(NOT_EVALUATED, name);
                if is_known { name } else { name.strip_suffix(kind).unwrap_or(name) }
            },
        ))
    });
    let evaluated: BTreeSet<&str> = evaluated.collect();
    ensure!(evaluated.contains("payload"), "the kernel's names cannot be read");
    for name in evaluated {
        let is_made = vocabulary::listed(EVALUATED, name).is_some_and(vocabulary::has_words);
        if is_made == is_excused(NOT_EVALUATED, name) {
            missing.push(format!("nft {name}"));
        }
    }
    ensure!(missing.is_empty(), "neither made nor listed, or both: {missing:?}");
    Ok(())
}

#[test]
fn every_rule_that_is_made_is_taken_by_the_kernel() -> Result<()> {
    let ground = Ground::new()?;
    for commands in sample::part(vocabulary::every_rule(), 4, 0).chunks(20) {
        // A command reads all rules that are there.
        ground.pod().sh(&format!("{}nft flush ruleset\n", commands.concat()))?.ok()?;
    }
    Ok(())
}
