//! What two plans treat differently is what the kernel treats differently: packets from within and from beside the computed set
//! are really sent, each in a pod with the one plan and in a pod with the other. Those of the set have two fates, the two that are
//! said; those beside it have one.
//!
//! DIFF_PAIRS says how many pairs of plans are tried (`make trace`: 100), DIFF_SEED with which numbers they begin. Each pair gets 20
//! packets.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use e2e::iptables::in_parallel;
use e2e::iptables::packets::{
    Arrived, FORMS, IMPATIENT, World, plan, random_packet, random_settings, with_changes,
};
use e2e::traffic::ANSWER;
use netns_apply::{ApplyOptions, apply};
use packet_trace::{Fate, Packet, TraceRules, TrafficDifference};
use redirect_core::{Family, RulePlan};
use test_support::dice::Dice;
use test_support::sample;

const THREADS: usize = 2;
const FEW_PAIRS: usize = 6;
/// How many packets each pair gets, and how many of them from within the set at most.
const PACKETS: usize = 20;
const WITHIN: usize = 12;
/// How many packets are drawn to find these: few plans differ in much.
const DRAWS: usize = 4000;

/// A pod that a plan is in force in.
struct Pod {
    world: World,
    rules: [TraceRules; 2],
}

impl Pod {
    fn new(plan: &RulePlan, dice: &mut Dice, words: &mut String) -> Result<Self> {
        let world = World::new()?;
        let (form, backend, native_form) = dice.pick(&FORMS);
        writeln!(words, "by {form}")?;
        let options = ApplyOptions::default().backend(backend).native_form(native_form);
        world.pod().enter(|| apply(plan, &options))?.with_context(|| words.clone())?;
        Ok(Self { world, rules: Family::BOTH.map(|family| TraceRules::of_plan(plan, family)) })
    }

    /// Sends a packet. Who expects no answer need not wait long for it.
    fn play(&self, packet: &Packet) -> Result<(Packet, Arrived)> {
        let fate = self.rules[usize::from(packet.family() == Family::V6)].fate(packet);
        self.world.play(packet, if fate == Fate::Dropped { IMPATIENT } else { ANSWER })
    }
}

/// How many packets were sent, and what was found out.
#[derive(Default)]
struct Tally {
    within: usize,
    beside: usize,
    problems: Vec<String>,
}

fn said_of<'a>(differences: &'a [TrafficDifference], packet: &Packet) -> Option<&'a TrafficDifference> {
    differences.iter().find(|one| one.region.contains(packet))
}

/// Packets to send, as many from within the set as there are to be, the others from beside it.
fn packets(differences: &[TrafficDifference], dice: &mut Dice) -> Vec<Packet> {
    let (mut within, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..DRAWS {
        let packet = random_packet(dice);
        let is_within = said_of(differences, &packet).is_some();
        if is_within && within.len() < WITHIN {
            within.push(packet);
        } else if !is_within && beside.len() < PACKETS {
            beside.push(packet);
        }
    }
    within.extend(beside);
    within.truncate(PACKETS);
    within
}

/// What is wrong with a packet that was sent in both pods; nothing where the kernel does what is said.
fn judge(sent: &[(Packet, Arrived); 2], differences: &[TrafficDifference]) -> Option<String> {
    let [(one, seen), (two, seen_then)] = sent;
    let (said, said_then) = (said_of(differences, one), said_of(differences, two));
    let is_right = match (said, said_then) {
        (None, None) => seen == seen_then,
        (Some(said), Some(then)) => {
            let fates = (said.before, said.after) == (then.before, then.after);
            fates && seen != seen_then && seen.is(said.before, one) && seen_then.is(said.after, two)
        }
        (Some(_), None) | (None, Some(_)) => false,
    };
    let said = said.map_or_else(|| "no difference".to_owned(), ToString::to_string);
    (!is_right).then(|| format!("{one} and {two}: {seen:?} and {seen_then:?}, said is {said}"))
}

fn try_pair(seed: u64) -> Result<Tally> {
    let mut dice = Dice::new(seed);
    let before = random_settings(&mut dice);
    let after = with_changes(&before, &mut dice);
    let mut words = format!("seed {seed}: {before:?}\nand {after:?}\n");
    let plans = [plan(&before)?, plan(&after)?];
    let [from, to] = &plans;
    let differences = TrafficDifference::of_plans(from, to);
    let pods = [Pod::new(from, &mut dice, &mut words)?, Pod::new(to, &mut dice, &mut words)?];
    let mut tally = Tally::default();
    for packet in packets(&differences, &mut dice) {
        let [one, two] = &pods;
        let sent = [one.play(&packet)?, two.play(&packet)?];
        if said_of(&differences, &packet).is_some() {
            tally.within += 1;
        } else {
            tally.beside += 1;
        }
        tally.problems.extend(judge(&sent, &differences).map(|problem| format!("{problem}\n{words}")));
    }
    Ok(tally)
}

#[test]
fn the_kernel_treats_differently_exactly_what_the_difference_of_two_plans_says() -> Result<()> {
    let (first, pairs) = (sample::number("DIFF_SEED", 1), sample::number("DIFF_PAIRS", FEW_PAIRS));
    let seeds: Vec<u64> = (first..first + pairs).map(|seed| seed as u64).collect();
    let counts = Mutex::new((0, 0));
    let problems = in_parallel(THREADS, &seeds, |_, seed| {
        let tally = try_pair(*seed).with_context(|| format!("seed {seed}"))?;
        let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts = (counts.0 + tally.within, counts.1 + tally.beside);
        Ok(tally.problems)
    });
    let (within, beside) = counts.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!(
        "{} packets, each in two pods, over {pairs} pairs of plans: {within} of the set, {beside} beside it",
        within + beside
    );
    ensure!(problems.is_empty(), "{} disagree\n{}", problems.len(), problems.join("\n\n"));
    ensure!(within + beside == pairs * PACKETS, "only {} packets were sent", within + beside);
    ensure!(within * 5 > beside, "hardly a packet of the set was sent: {within}");
    Ok(())
}
