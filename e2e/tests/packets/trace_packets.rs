//! A trace says what the kernel does: random packets through random plans, with other programs' rules among theirs, are really sent,
//! and arrive where the trace of the live rules, and that of the plan where nobody else has rules, says.
//!
//! TRACE_PLANS says how many plans are tried (`make trace`: 200), TRACE_SEED with which numbers the tests begin. Each plan gets 25
//! packets.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use e2e::iptables::in_parallel;
use e2e::iptables::mesh::other_address;
use e2e::iptables::packets::{Arrived, FORMS, IMPATIENT, World, plan, random_packet, random_settings};
use e2e::traffic::{ANSWER, PROXY_ID};
use netfilter_state::ruleset::{Condition, HookedRules, KernelRule, Statement};
use netns_apply::{ApplyOptions, Live, apply};
use packet_trace::{
    ConnectionState, ConntrackEntry, Detail, Fate, Outcome, Packet, PacketEdit, Sender, Trace, TraceEvent,
    TraceRules,
};
use redirect_core::{Family, RulePlan, rule::TcpFlags, settings::Key};
use test_support::dice::Dice;
use test_support::netns::{Families, Namespace, pod_address, remote_address};
use test_support::sample;

const THREADS: usize = 2;
const FEW_PLANS: usize = 20;
const PACKETS: usize = 25;

/// Other programs' rules.
static FOREIGN: LazyLock<Vec<String>> = LazyLock::new(|| {
    serde_saphyr::from_str(include_str!("../../fixtures/foreign-rules.yaml")).expect("a list")
});

/// A pod with a plan and other programs' rules.
struct Pod {
    world: World,
    words: String,
    plan: RulePlan,
    foreign: Vec<String>,
    live: [TraceRules; 2],
}

impl Pod {
    fn new(dice: &mut Dice) -> Result<Self> {
        let world = World::new()?;
        let (form, backend, native_form) = dice.pick(&FORMS);
        let said = random_settings(dice);
        let (plan, words) = (plan(&said)?, format!("{said:?} by {form}"));
        let options = ApplyOptions::default().backend(backend).native_form(native_form);
        world.pod().enter(|| apply(&plan, &options))?.with_context(|| words.clone())?;
        let foreign = if dice.one_in(2) { random_rules(dice, form) } else { Vec::new() };
        for script in &foreign {
            world.pod().sh(script).with_context(|| words.clone())?;
        }
        let live = world.pod().enter(|| Live::now(None, &ApplyOptions::default()))??;
        let live = Family::BOTH.map(|family| live.rules(family, Some(&plan)));
        Ok(Self { world, words, plan, foreign, live })
    }

    /// What the trace says against what the kernel does; nothing where they agree.
    fn judge(&self, packet: &Packet, seen: &Arrived, tally: &mut Tally) -> Option<String> {
        let live = &self.live[usize::from(packet.family() == Family::V6)];
        let trace = live.trace(packet);
        tally.count(&trace);
        let agrees = trace.may.iter().any(|fate| seen.is(*fate, packet))
            || *seen == Arrived::Nothing && packet.sender == Sender::Outside && stays(&trace, live);
        // Where nobody else has rules every rule is understood, and the plan alone says the same.
        let planned = TraceRules::of_plan(&self.plan, packet.family()).fate(packet);
        let says_the_same = trace.fate() == planned && seen.is(planned, packet);
        if agrees && (!self.foreign.is_empty() || says_the_same) {
            return None;
        }
        Some(format!(
            "{seen:?} instead of {:?} (by the plan {planned:?})\n{}\n{}\n{}",
            trace.may,
            self.words,
            self.foreign.join("\n"),
            trace.text(Detail::Every)
        ))
    }
}

/// The commands of other programs' rules, for a family and a variant of iptables.
fn script(rules: &str, ipt: &str, v6: bool) -> String {
    let icmp = if v6 { "$ipt -t filter -A INPUT -p icmpv6 -j ACCEPT;" } else { "" };
    rules
        .replace("$icmp", icmp)
        .replace("$ipt", &format!("{}-{ipt} -w", if v6 { "ip6tables" } else { "iptables" }))
        .replace("$far", &remote_address(v6).to_string())
        .replace("$other", &other_address(v6).to_string())
}

fn random_rules(dice: &mut Dice, form: &str) -> Vec<String> {
    let ipt = if form == "iptables-legacy" { "legacy" } else { "nft" };
    let mut chosen = BTreeSet::new();
    for _ in 0..=dice.below(3) {
        chosen.insert(dice.below(FOREIGN.len()));
    }
    let both = |index: usize| {
        let each = if FOREIGN[index].starts_with("nft") { 1 } else { 2 };
        [false, true].into_iter().take(each).map(move |v6| script(&FOREIGN[index], ipt, v6))
    };
    // Only one table can have the name.
    let mut nft = chosen.iter().copied().filter(|index| FOREIGN[*index].starts_with("nft"));
    let kept = nft.next();
    chosen
        .iter()
        .copied()
        .filter(|index| !FOREIGN[*index].starts_with("nft") || Some(*index) == kept)
        .flat_map(both)
        .collect()
}

/// Whether what the pod answers never leaves it, so that nobody sees where the packet has come to: a rule of other programs gave the packet
/// TPROXY's mark, and the answer gets the connection's.
fn stays(trace: &Trace, live: &TraceRules) -> bool {
    let mark = trace.steps.iter().rev().find_map(|step| {
        if let TraceEvent::Changed(PacketEdit::ConnectionMark { mark }) = step { *mark } else { None }
    });
    let Some((mark, source)) = mark.zip(trace.packet.source) else { return false };
    let to = SocketAddr::new(source, trace.packet.source_port.unwrap_or_default());
    let mut answer = Packet::from_pod(0, 0, trace.packet.destination, to).by("eth0");
    let connection = ConntrackEntry { state: ConnectionState::Reply, mark, translated_to: None };
    (answer.connection, answer.flags) = (connection, TcpFlags::SYN | TcpFlags::ACK);
    let answer = live.trace(&answer);
    answer.steps.contains(&TraceEvent::Changed(PacketEdit::Rerouted { interface: Some("lo".into()) }))
}

/// How many packets had which fate, and what was not understood on the way of those whose fate is unknown.
#[derive(Default)]
struct Tally {
    fates: BTreeMap<String, usize>,
    causes: BTreeMap<String, usize>,
}

impl Tally {
    fn count(&mut self, trace: &Trace) {
        *self.fates.entry(trace.fate().to_string()).or_default() += 1;
        if trace.fate() != Fate::Unknown {
            return;
        }
        for step in &trace.steps {
            if let TraceEvent::Rule { rule, outcome: Outcome::Unknown(_), .. } = step {
                *self.causes.entry(rule.clone()).or_default() += 1;
            }
        }
    }

    fn add(&mut self, other: Self) {
        for (all, more) in [(&mut self.fates, other.fates), (&mut self.causes, other.causes)] {
            for (name, count) in more {
                *all.entry(name).or_default() += count;
            }
        }
    }
}

fn try_plan(seed: u64) -> Result<(Vec<String>, Tally)> {
    let mut dice = Dice::new(seed);
    let pod = Pod::new(&mut dice)?;
    let (mut problems, mut tally) = (Vec::new(), Tally::default());
    for _ in 0..PACKETS {
        let packet = random_packet(&mut dice);
        let live = &pod.live[usize::from(packet.family() == Family::V6)];
        // Who expects no answer need not wait long for it.
        let trace = live.trace(&packet);
        let may_be_lost =
            trace.may.contains(&Fate::Dropped) || packet.sender == Sender::Outside && stays(&trace, live);
        let patience = if may_be_lost { IMPATIENT } else { ANSWER };
        let (packet, seen) = pod.world.play(&packet, patience)?;
        problems
            .extend(pod.judge(&packet, &seen, &mut tally).map(|problem| format!("seed {seed}: {problem}")));
    }
    Ok((problems, tally))
}

#[test]
fn the_kernel_does_with_every_packet_what_its_trace_says() -> Result<()> {
    let (first, plans) = (sample::number("TRACE_SEED", 1), sample::number("TRACE_PLANS", FEW_PLANS));
    let seeds: Vec<u64> = (first..first + plans).map(|seed| seed as u64).collect();
    let all = std::sync::Mutex::new(Tally::default());
    let problems = in_parallel(THREADS, &seeds, |_, seed| {
        let (problems, tally) = try_plan(*seed).with_context(|| format!("seed {seed}"))?;
        all.lock().unwrap_or_else(std::sync::PoisonError::into_inner).add(tally);
        Ok(problems)
    });
    let Tally { fates: tally, causes } = all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let packets: usize = tally.values().sum();
    println!("{packets} packets over {plans} plans: {tally:#?}, unknown because of {causes:#?}");
    ensure!(problems.is_empty(), "{} disagree\n{}", problems.len(), problems.join("\n\n"));
    ensure!(packets == plans * PACKETS, "only {packets} packets were sent");
    let fates = [Fate::Untouched, Fate::Dropped].map(|fate| fate.to_string());
    ensure!(
        fates.iter().all(|fate| tally.contains_key(fate)) && tally.len() >= 6,
        "hardly a variety: {tally:?}"
    );
    Ok(())
}

/// Also where the kernel has a single port to choose: the proxy's query would be taken for the application's, which was captured.
#[test]
fn no_packet_is_taken_for_an_earlier_one() -> Result<()> {
    let world = World::new()?;
    let plan = plan(&[(Key::DualStack, "true"), (Key::RedirectDns, "true")].into())?;
    world.pod().enter(|| apply(&plan, &ApplyOptions::default()))??;
    world.pod().enter(|| fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40000"))??;
    for v6 in [false, true] {
        let resolver = SocketAddr::new(remote_address(v6), 53);
        for (user, server) in [(1000, "dns"), (PROXY_ID, "resolver"), (1000, "dns")] {
            let query = Packet::from_pod(user, user, SocketAddr::new(pod_address(v6), 0), resolver);
            let (query, seen) = world.play(&query.by("eth0").over_udp(), ANSWER)?;
            ensure!(matches!(&seen, Arrived::At(name, _) if name == server), "{query}: {seen:?}");
        }
    }
    Ok(())
}

/// What is not understood in all rules of a namespace.
fn not_understood(ruleset: &HookedRules) -> Vec<String> {
    let chains = ruleset.tables.values().flat_map(|table| table.chains.values());
    let is_unknown = |rule: &&KernelRule| {
        rule.conditions.iter().any(|one| matches!(one, Condition::Unknown(_)))
            || rule.statements.iter().any(|one| matches!(one, Statement::Unknown(_)))
    };
    chains.flat_map(|chain| &chain.rules).filter(is_unknown).map(ToString::to_string).collect()
}

#[test]
fn rules_that_peers_write_are_understood_in_either_variant() -> Result<()> {
    for rules in FOREIGN.iter() {
        let variants: &[&str] = if rules.starts_with("nft") { &[""] } else { &["nft", "legacy"] };
        for ipt in variants {
            let pod = Namespace::pod(Families::Dual)?;
            for v6 in [false, true].into_iter().take(if rules.starts_with("nft") { 1 } else { 2 }) {
                pod.sh(&script(rules, ipt, v6))?;
            }
            let live = pod.enter(|| Live::now(None, &ApplyOptions::default()))??;
            let unknown = not_understood(&live.ruleset);
            let by_chance = unknown.iter().all(|rule| rule.contains("[-m statistic"));
            let wanted = if rules.contains("statistic") { 2 } else { 0 };
            ensure!(by_chance && unknown.len() == wanted, "{ipt} {rules}: {unknown:#?}");
        }
    }
    Ok(())
}
