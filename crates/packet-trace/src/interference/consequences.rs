//! What it means for traffic that a network namespace is not as planned: which captured packets do not come to the proxy, and
//! where they end instead.

use super::{
    Certainty, FollowedAddresses, PodTraffic, Traffic,
    lost::{AcceptedFindings, Judge, are_related, each_start, most_work},
    starts::starts,
};
use crate::{
    Fate,
    difference::{Region, merged},
    packets::{Packets, VariedField},
    set::RangeSet,
};
use netfilter_state::{routing::FoundRouting, ruleset::HookedRules};
use redirect_core::{plan::RulePlan, values::Family};
use std::{collections::BTreeMap, fmt};

/// How many sets of packets a text names, and how many ranges of each field.
const MOST_NAMED: usize = 3;
const MOST_RANGES: usize = 12;

/// What becomes of traffic that a plan captures and a network namespace does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consequence {
    /// How sure it is.
    pub severity: Certainty,
    /// The traffic.
    pub traffic: Traffic,
    /// Its family; none if it is the same for all families of the plan.
    pub family: Option<Family>,
    /// Where it ends.
    pub fate: Fate,
    /// Which of it; empty for all of it.
    pub parts: Vec<Region>,
}

/// The words for [`Fate`], and for what may be.
const fn words(fate: Fate, severity: Certainty) -> &'static str {
    let (does, may) = match fate {
        Fate::Untouched => ("bypass the proxy", "may bypass the proxy"),
        Fate::Proxy { .. } => {
            ("reach the wrong port of the proxy:", "may reach the wrong port of the proxy:")
        }
        Fate::Redirected { .. } => ("reach another program, at port", "may reach another program, at port"),
        Fate::Translated => ("go to another destination", "may go to another destination"),
        Fate::Broken => ("break after the first packet", "may break after the first packet"),
        Fate::Dropped => ("are dropped", "may be dropped"),
        Fate::Rejected => ("are refused", "may be refused"),
        Fate::Unknown => ("may not reach the proxy", "may not reach the proxy"),
    };
    match severity {
        Certainty::Does => does,
        Certainty::May => may,
    }
}

/// `all outbound connections bypass the proxy`, `IPv4 inbound connections are dropped (port 8080)`.
impl fmt::Display for Consequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = self.family.map(|family| format!("{family} ")).unwrap_or_default();
        if self.traffic == Traffic::ProxyToSelf {
            let all = if self.parts.is_empty() { "all of " } else { "" };
            write!(f, "{all}the proxy's {family}connections to its own pod")?;
        } else {
            let all = if self.parts.is_empty() { "all " } else { "" };
            write!(f, "{all}{family}{}", self.traffic.name())?;
        }
        write!(f, " {}", words(self.fate, self.severity))?;
        if let Fate::Proxy { port, .. } | Fate::Redirected { port } = self.fate {
            write!(f, " {port}")?;
        }
        if self.parts.is_empty() {
            return Ok(());
        }
        let named = self.parts.iter().take(MOST_NAMED).map(|part| part.conditions(MOST_RANGES).join(", "));
        let named: Vec<String> = named.filter(|words| !words.is_empty()).collect();
        if named.is_empty() {
            return if self.severity == Certainty::Does { f.write_str(" in part") } else { Ok(()) };
        }
        write!(f, " ({}", named.join("; "))?;
        match self.parts.len().saturating_sub(MOST_NAMED) {
            0 => f.write_str(")"),
            more => write!(f, "; and {more} more)"),
        }
    }
}

impl PodTraffic<'_> {
    /// What becomes of captured traffic in a network namespace with these rules and this routing, where that is not what the plan
    /// means: whole kinds of traffic first. Empty if all of it comes to the proxy, and if the ruleset is too large
    /// to be followed.
    #[must_use]
    pub fn consequences(
        &self,
        ruleset: &HookedRules,
        routing: &[FoundRouting],
        plan: &RulePlan,
    ) -> Vec<Consequence> {
        let addresses = FollowedAddresses::of(self);
        let (mut outcomes, mut work) = (Outcomes::default(), most_work());
        for family in plan.families() {
            let rules = self.compared(ruleset, routing, *family, plan);
            let starts = starts(plan, &rules.live, &addresses.pod(self));
            let mut accepted = AcceptedFindings::default();
            each_start(plan, &starts, &rules, &mut work, &mut accepted, |judge| outcomes.add(judge));
            outcomes.are_unknown |= work.left == 0;
        }
        outcomes.consequences(plan)
    }
}

/// What becomes of all traffic that is judged, by its kind.
#[derive(Default)]
pub(super) struct Outcomes {
    kinds: BTreeMap<(Family, Traffic), Kind>,
    /// Whether some of it was not followed.
    pub(super) are_unknown: bool,
}

impl Outcomes {
    /// Takes in what becomes of some of it.
    pub(super) fn add(&mut self, judge: &Judge<'_>) {
        self.kinds.entry(judge.traffic).or_default().add(judge);
    }

    /// Whole kinds of traffic first; none where some was not followed.
    pub(super) fn consequences(self, plan: &RulePlan) -> Vec<Consequence> {
        if self.are_unknown {
            return Vec::new();
        }
        let each =
            self.kinds.into_iter().flat_map(|((family, traffic), kind)| kind.consequences(family, traffic));
        let mut all: Vec<Consequence> = each.collect();
        // What the pod sends to itself shares its rules with what it sends to others, which matters more.
        let outbound: Vec<Option<Family>> =
            all.iter().filter(|one| one.traffic == Traffic::Outbound).map(|one| one.family).collect();
        let is_within_pod =
            |one: &Consequence| matches!(one.traffic, Traffic::ProxyToSelf | Traffic::ToApplication);
        all.retain(|one| !is_within_pod(one) || !outbound.contains(&one.family));
        of_all_families(&mut all, plan.families().len());
        all.sort_by_key(|one| (!one.parts.is_empty(), std::cmp::Reverse(one.severity), one.traffic));
        all
    }
}

/// What is the same for all families is said once.
fn of_all_families(all: &mut Vec<Consequence>, families: usize) {
    let is_same = |one: &Consequence, other: &Consequence| {
        one.parts.is_empty()
            && Consequence { family: None, ..one.clone() } == Consequence { family: None, ..other.clone() }
    };
    let mut merged: Vec<Consequence> = Vec::new();
    for one in all.drain(..) {
        match merged.iter_mut().find(|known| is_same(known, &one)) {
            Some(known) => known.family = None,
            None => merged.push(one),
        }
    }
    if families == 1 {
        merged.iter_mut().for_each(|one| one.family = None);
    }
    *all = merged;
}

/// What is captured of a kind of traffic, and what of that is lost.
#[derive(Default)]
struct Kind {
    is_sent: bool,
    captured: Vec<Packets>,
    /// Whether some of it comes to the proxy, on one way at least.
    arrives: bool,
    lost: BTreeMap<(Fate, Certainty), Vec<Packets>>,
    /// What only an application that may set marks loses.
    marked: BTreeMap<(Fate, Certainty), Vec<Packets>>,
}

impl Kind {
    fn add(&mut self, judge: &Judge<'_>) {
        // What the kernel drops under the plan itself comes to no proxy.
        let is_captured = judge.wanted.fate != Fate::Dropped;
        self.is_sent = judge.is_sent;
        self.captured.extend(judge.unmarked(judge.wanted).filter(|_| is_captured));
        let sent = || judge.found.ways.iter().filter(|way| !way.is_unsent);
        let some_arrive = sent().any(|way| !judge.is_lost(way) && !judge.is_marked(way));
        self.arrives |= some_arrive && is_captured;
        let is_certain = !judge.found.are_doubtful || !some_arrive;
        for way in sent().filter(|way| judge.is_lost(way)) {
            let Some(packets) = judge.unmarked(way) else {
                self.marked.entry((way.fate, Certainty::May)).or_default().push(way.packets.clone());
                continue;
            };
            let is_known = is_certain && way.fate != Fate::Unknown && !are_related(&way.packets);
            let severity = if is_known { Certainty::Does } else { Certainty::May };
            self.lost.entry((way.fate, severity)).or_default().push(packets);
        }
    }

    fn consequences(self, family: Family, traffic: Traffic) -> Vec<Consequence> {
        let Self { is_sent, captured, arrives, lost, marked } = self;
        let lost = if lost.is_empty() { marked } else { lost };
        let is_all = !arrives && lost.len() == 1;
        let of = |((fate, severity), packets): ((Fate, Certainty), Vec<Packets>)| {
            let parts = if is_all { Vec::new() } else { regions(is_sent, traffic, packets, &captured) };
            Consequence { severity, traffic, family: Some(family), fate, parts }
        };
        lost.into_iter().map(of).collect()
    }
}

/// The sets of packets by what distinguishes them from the rest of what is captured.
fn regions(is_sent: bool, traffic: Traffic, packets: Vec<Packets>, captured: &[Packets]) -> Vec<Region> {
    let mut of_interest = merged(packets);
    for field in VariedField::ALL {
        for one in &mut of_interest {
            // Datagrams have no flags, which distinguishes no segment from others.
            let shares_protocol = |other: &&Packets| {
                !one.get(VariedField::Protocol).and(other.get(VariedField::Protocol)).is_empty()
            };
            let alike = captured.iter().filter(|other| field != VariedField::Flags || shares_protocol(other));
            let all = alike.fold(RangeSet::empty(), |all, other| all.or(other.get(field)));
            // What a pod sends to itself comes from a few addresses, which mean nothing.
            let is_within_pod = matches!(traffic, Traffic::ProxyToSelf | Traffic::ToApplication);
            let is_usual = is_within_pod && matches!(field, VariedField::Source | VariedField::Destination);
            if is_usual || all.without(one.get(field)).is_empty() {
                let family = one.family;
                one.set(field, RangeSet::range(0, field.most(family)));
            }
        }
    }
    merged(of_interest).into_iter().map(|packets| Region::new(is_sent, packets)).collect()
}
