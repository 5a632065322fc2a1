//! A plan's rules as lines of native nftables: one each, or with sets, in which many ports or ranges are looked up at once.

use super::PlannedRule;
use crate::{
    options::NativeForm,
    rule::{Equality, Match, Scope, Target},
    values::{Family, PortRange},
};
use alloc::{collections::BTreeMap, vec::Vec};
use ipnet::IpNet;

/// From how many rules on a set takes their place.
const WORTHWHILE: usize = 3;

/// What a set holds. Closed: who writes sets has to know every kind of key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SetKind {
    /// Ports.
    Ports,
    /// Addresses of a family.
    Addresses(Family),
}

/// Ranges of keys, in order, none touching another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranges {
    kind: SetKind,
    ranges: Vec<(u128, u128)>,
}

impl Ranges {
    /// Ranges of keys of a kind, each by its first and last key; those that overlap or touch become one.
    #[must_use]
    pub fn new(kind: SetKind, mut all: Vec<(u128, u128)>) -> Self {
        all.sort_unstable();
        let mut ranges: Vec<(u128, u128)> = Vec::with_capacity(all.len());
        for (first, last) in all {
            match ranges.last_mut() {
                // The kernel refuses intervals that overlap.
                Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
                Some(_) | None => ranges.push((first, last)),
            }
        }
        Self { kind, ranges }
    }

    fn of_ports(ports: &[PortRange]) -> Self {
        Self::new(SetKind::Ports, ports.iter().map(keys).collect())
    }

    /// What they are ranges of.
    #[must_use]
    pub const fn kind(&self) -> SetKind {
        self.kind
    }

    /// First and last key of each.
    #[must_use]
    pub fn list(&self) -> &[(u128, u128)] {
        &self.ranges
    }
}

/// A rule of a native chain, or several that a set makes one.
#[derive(Debug)]
pub enum Line<'a> {
    /// A planned rule as it is.
    Rule(&'a PlannedRule),
    /// A set in the place of one condition of a planned rule, and of similar ones.
    Set {
        /// The first of the rules.
        planned: &'a PlannedRule,
        /// Which of its conditions the set replaces.
        variable: usize,
        /// What the set holds.
        ranges: Ranges,
    },
    /// Drops what a planned rule was to hand over and did not: nft's tproxy lets a packet that it finds no listener for
    /// go on to the application, iptables' target drops it.
    OrDrop(&'a PlannedRule),
}

impl<'a> Line<'a> {
    /// The lines that the rules of a chain become.
    pub fn of(rules: &[&'a PlannedRule], form: NativeForm) -> impl Iterator<Item = Self> {
        let lines = match form {
            NativeForm::Plain => rules.iter().copied().map(Self::Rule).collect(),
            NativeForm::Sets => gather(rules),
        };
        lines.into_iter().flat_map(Self::complete)
    }

    /// The line, and behind it what it takes to mean what the planned rule means.
    fn complete(self) -> impl Iterator<Item = Self> {
        let planned = self.planned();
        let or_drop = matches!(planned.rule.target, Target::Tproxy { .. }).then_some(Self::OrDrop(planned));
        [Some(self), or_drop].into_iter().flatten()
    }

    /// The planned rule that it stands for, or the first of them.
    #[must_use]
    pub const fn planned(&self) -> &'a PlannedRule {
        match self {
            Self::Rule(planned) | Self::Set { planned, .. } | Self::OrDrop(planned) => planned,
        }
    }

    /// What it does with a packet that fulfils all conditions.
    #[must_use]
    pub const fn target(&self) -> &'a Target {
        match self {
            Self::Rule(planned) | Self::Set { planned, .. } => &planned.rule.target,
            Self::OrDrop(_) => &Target::Drop,
        }
    }

    /// The set it needs.
    #[must_use]
    pub fn set(&self) -> Option<Ranges> {
        match self {
            Self::Set { ranges, .. } => Some(ranges.clone()),
            Self::Rule(planned) | Self::OrDrop(planned) => {
                planned.rule.matches.iter().find_map(|condition| {
                    let Match::DestinationPorts(is) = condition else { return None };
                    Some(Ranges::of_ports(&is.value))
                })
            }
        }
    }
}

/// What rules have in common that a set can make one of.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape<'a> {
    scope: Scope,
    kind: SetKind,
    others: Vec<&'a Match>,
}

/// Makes rules that stand behind each other, have the same target and differ in one port or destination into one rule.
///
/// Within such a run the order of rules means nothing: whichever matches, the same happens.
fn gather<'a>(rules: &[&'a PlannedRule]) -> Vec<Line<'a>> {
    rules.chunk_by(|a, b| a.rule.target == b.rule.target && decides(&a.rule.target)).flat_map(run).collect()
}

/// Whether a packet is done with a run of rules with this target once it has met one of them: it goes elsewhere, or comes back from where the others would
/// only lead it again.
const fn decides(target: &Target) -> bool {
    match target {
        Target::Accept | Target::Drop | Target::Return | Target::Jump(_) | Target::Redirect(_) => true,
        Target::Tproxy { .. }
        | Target::SetMark(_)
        | Target::SaveMark
        | Target::RestoreMark
        | Target::SetConnMark(_)
        | Target::ConntrackZone(_) => false,
    }
}

fn run<'a>(rules: &[&'a PlannedRule]) -> Vec<Line<'a>> {
    let mut groups: BTreeMap<Shape<'a>, Vec<(u128, u128)>> = BTreeMap::new();
    for (shape, _, range) in rules.iter().filter_map(|planned| candidate(planned)) {
        groups.entry(shape).or_default().push(range);
    }
    groups.retain(|_, ranges| ranges.len() >= WORTHWHILE);
    let line = |planned: &&'a PlannedRule| {
        let group = candidate(planned)
            .and_then(|(shape, variable, _)| Some((shape.kind, variable, groups.get_mut(&shape)?)));
        let Some((kind, variable, ranges)) = group else { return Some(Line::Rule(planned)) };
        // The first of a group stands for all; those behind it are in its set.
        let all = core::mem::take(ranges);
        (!all.is_empty()).then(|| Line::Set { planned, variable, ranges: Ranges::new(kind, all) })
    };
    rules.iter().filter_map(line).collect()
}

/// What a rule has in common with others, which of its conditions a set would replace, and what the set would hold of it.
fn candidate(planned: &PlannedRule) -> Option<(Shape<'_>, usize, (u128, u128))> {
    let matches = &planned.rule.matches;
    if matches.iter().any(|condition| matches!(condition, Match::DestinationPorts(_))) {
        return None;
    }
    let find = |of: fn(&Match) -> Option<Span>| {
        matches.iter().enumerate().find_map(|(index, condition)| Some((index, of(condition)?)))
    };
    let (variable, (kind, range)) = find(of_destination).or_else(|| find(of_port))?;
    let others = matches.iter().enumerate().filter(|(index, _)| *index != variable).map(|(_, other)| other);
    Some((Shape { scope: planned.scope, kind, others: others.collect() }, variable, range))
}

/// What a condition covers, as a range of keys.
type Span = (SetKind, (u128, u128));

fn of_destination(condition: &Match) -> Option<Span> {
    let Match::Destination(Equality { value, not: false }) = condition else { return None };
    let (first, last) = match value {
        IpNet::V4(net) => (u32::from(net.network()).into(), u32::from(net.broadcast()).into()),
        IpNet::V6(net) => (net.network().into(), net.broadcast().into()),
    };
    Some((SetKind::Addresses(Family::of(&value.addr())), (first, last)))
}

fn of_port(condition: &Match) -> Option<Span> {
    let Match::DestinationPort(Equality { value, not: false }) = condition else { return None };
    Some((SetKind::Ports, keys(value)))
}

fn keys(ports: &PortRange) -> (u128, u128) {
    (ports.first().into(), ports.last().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_overlap_or_touch_become_one() {
        let ranges =
            Ranges::new(SetKind::Ports, [(80, 90), (85, 100), (101, 101), (7, 7), (65535, 65535)].into());
        assert_eq!(ranges.ranges, [(7, 7), (80, 101), (65535, 65535)]);
    }

    /// They are few, and so tables that earlier versions have programmed keep their form.
    #[test]
    fn rules_that_a_packet_goes_on_behind_stay_what_they_are() {
        let servers = (1..=9).map(|last| [10, 96, 0, last].into()).collect();
        let redirect = crate::Redirect::sidecar(crate::Families::V4);
        let plan = redirect.dns(crate::redirect::DnsCapture::Servers(servers)).build().unwrap().plan();
        let chains = plan.merged_rules();
        let rules: Vec<_> = chains.values().flat_map(BTreeMap::values).collect();
        let number = |lines: Vec<Line<'_>>, of: fn(&Target) -> bool| {
            lines.iter().filter(|line| of(line.target())).count()
        };
        let both = |of: fn(&Target) -> bool| {
            let plain = rules.iter().flat_map(|rules| rules.iter().copied().map(Line::Rule));
            let gathered = rules.iter().flat_map(|rules| gather(rules));
            (number(plain.collect(), of), number(gathered.collect(), of))
        };
        assert_eq!(both(|target| matches!(target, Target::ConntrackZone(_))), (22, 22));
        assert_eq!(both(|target| matches!(target, Target::Redirect(_))), (20, 4));
    }
}
