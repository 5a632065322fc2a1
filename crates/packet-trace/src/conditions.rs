//! Conditions of rules, in terms of what packets differ in.

use super::{
    packets::{VariedField, of_interface, of_net, state},
    set::RangeSet,
};
use netfilter_state::ruleset::{Condition, Endpoint, Selector, SetLookup, StateBits};
use redirect_core::{
    rule::{ConnState, Direction, Equality, Match, Protocol, TcpFlags},
    values::{Family, InterfaceName, MaskedMark, PortRange},
};

/// A condition, in terms of what packets differ in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Test {
    Always(bool),
    In(VariedField, RangeSet),
    /// Likewise, of the interface it comes in by; not for a packet without one.
    ComesIn(RangeSet),
    GoesOut(RangeSet),
    /// Only packets that a local socket sends have an owner.
    Owner(VariedField, RangeSet),
    /// A mark's value, mask, and whether it is inverted.
    Bits(VariedField, u32, u32, bool),
    /// A mark's values, and whether they are inverted.
    Mark(VariedField, RangeSet, bool),
    /// It belongs to a connection that conntrack has an entry of.
    Entry,
    /// This end of its connection is translated, and whether that is inverted.
    Translated(VariedField, bool),
    /// An address is one of the network namespace's, and whether that is inverted.
    Local(VariedField, bool),
    /// All tests of one alternative, or of none if inverted.
    AnyOf(Vec<Vec<Test>>, bool),
    Unknown,
}

impl Test {
    pub(super) fn of(condition: &Condition, family: Family) -> Self {
        match condition {
            Condition::Plain(condition) => Self::of_plain(condition, family),
            Condition::Family(is) => Self::Always((is.value == family) != is.not),
            Condition::Protocol(is) => {
                Self::is(VariedField::Protocol, is, |number| RangeSet::one((*number).into()), family)
            }
            Condition::SourcePorts(is) => {
                Self::is(VariedField::SourcePort, is, |ports| of_ports(ports), family)
            }
            Condition::State(is) => Self::of_state(is, family),
            Condition::StateAndDirection { states, is_reply } => {
                let in_state = turned(VariedField::State, of_states(states.value), states.not, family);
                // A packet without a connection has no direction to compare.
                let of_none = RangeSet::range(state::INVALID, state::UNTRACKED);
                Self::In(VariedField::State, in_state.and(&of_direction(*is_reply).or(&of_none)))
            }
            Condition::MarkBits { mask, is } => Self::Bits(VariedField::Mark, is.value, *mask, is.not),
            Condition::ConnMarkBits { mask, is } => {
                Self::Bits(VariedField::ConnMark, is.value, *mask, is.not)
            }
            // Inverted, it is the other direction: a packet without a connection has none.
            Condition::IsReply(is_reply) => Self::of_entry(of_direction(*is_reply)),
            Condition::TcpFlags { mask, is } => {
                Self::is(VariedField::Flags, is, |value| of_flags(|flags| flags & mask == *value), family)
            }
            Condition::Local(is) => Self::Local(field_of(is.value), is.not),
            Condition::Among(is) => Self::among(is, family),
            Condition::Connection => Self::Entry,
            Condition::Translated(is) => {
                let is_translated = Self::Translated(field_of(is.value), is.not);
                Self::AnyOf([[Self::Entry, is_translated].into()].into(), false)
            }
            Condition::Unknown(_) => Self::Unknown,
        }
    }

    /// One of these states; of some it is that which an end of a translated connection has besides.
    fn of_state(is: &Equality<u32>, family: Family) -> Self {
        let ends = [
            (StateBits::SOURCE_TRANSLATED, Endpoint::Source),
            (StateBits::TRANSLATED, Endpoint::Destination),
        ];
        let named = ends.into_iter().filter(|(bit, _)| is.value & bit != 0);
        let mut any: Vec<Vec<Self>> =
            named.map(|(_, end)| [Self::Entry, Self::Translated(field_of(end), false)].into()).collect();
        if any.is_empty() {
            return Self::is(VariedField::State, is, |states| of_states(*states), family);
        }
        any.push([Self::In(VariedField::State, of_states(is.value))].into());
        Self::AnyOf(any, is.not)
    }

    /// A field of a conntrack entry: without one no comparison holds.
    fn of_entry(states: RangeSet) -> Self {
        Self::AnyOf([[Self::Entry, Self::In(VariedField::State, states)].into()].into(), false)
    }

    pub(super) fn of_protocol(protocol: Protocol) -> Self {
        Self::In(VariedField::Protocol, RangeSet::one(protocol.number().into()))
    }

    /// That connection tracking has found no connection of a packet.
    pub(super) fn of_no_connection() -> Self {
        Self::In(VariedField::State, of_states(StateBits::INVALID))
    }

    /// Makes one test of those of a known connection's state and direction, as a rule of a plan has it: nf_tables has an expression for each. A packet
    /// with such a state has an entry.
    pub(super) fn join_states(tests: &mut Vec<Self>) {
        let known = of_states(StateBits::RELATED | StateBits::ESTABLISHED);
        let is_known =
            |test: &Self| matches!(test, Self::In(VariedField::State, set) if set.without(&known).is_empty());
        let Some(at) = tests.iter().position(is_known) else { return };
        let Self::In(_, mut states) = tests.swap_remove(at) else { return };
        tests.retain(|test| {
            let Self::AnyOf(any, false) = test else { return true };
            let [all] = any.as_slice() else { return true };
            let [Self::Entry, Self::In(VariedField::State, of_entry)] = all.as_slice() else { return true };
            states = states.and(of_entry);
            false
        });
        tests.push(Self::In(VariedField::State, states));
    }

    /// Number of ranges and alternatives it compares.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::In(_, set)
            | Self::ComesIn(set)
            | Self::GoesOut(set)
            | Self::Owner(_, set)
            | Self::Mark(_, set, _) => set.ranges().len(),
            // These are asked one behind the other.
            Self::AnyOf(all, _) => all.iter().flatten().map(Self::size).sum::<usize>().saturating_mul(4),
            Self::Always(_)
            | Self::Bits(..)
            | Self::Local(..)
            | Self::Entry
            | Self::Translated(..)
            | Self::Unknown => 1,
        }
    }

    fn among(is: &Equality<SetLookup>, family: Family) -> Self {
        if let [selector] = is.value.selectors.as_slice() {
            let ranges = is.value.values.iter().filter_map(|values| values.first()).copied();
            return Self::of_ranges(*selector, &ranges.collect::<Vec<_>>(), is.not, family);
        }
        let values = is.value.values.iter();
        Self::AnyOf(values.map(|values| Self::each_in(&is.value.selectors, values, family)).collect(), is.not)
    }

    /// Whether each selector has a value of its range.
    pub(super) fn of_values(selectors: &[Selector], values: &[(u128, u128)], family: Family) -> Self {
        Self::AnyOf([Self::each_in(selectors, values, family)].into(), false)
    }

    fn each_in(selectors: &[Selector], values: &[(u128, u128)], family: Family) -> Vec<Self> {
        let each = selectors.iter().zip(values);
        each.map(|(selector, range)| Self::of_ranges(*selector, &[*range], false, family)).collect()
    }

    /// The field of packets that a selector is about, if it names one alone.
    pub(super) fn field_of(selector: Selector, family: Family) -> Option<VariedField> {
        let Self::In(field, _) = Self::of_ranges(selector, &[], false, family) else { return None };
        // A state is the packet's own only once connection tracking has seen it.
        (field != VariedField::State).then_some(field)
    }

    /// Whether a selector has one of these values.
    fn of_ranges(selector: Selector, ranges: &[(u128, u128)], not: bool, family: Family) -> Self {
        let has = |value: u128| ranges.iter().any(|(first, last)| (*first..=*last).contains(&value));
        let set = || RangeSet::of(ranges.iter().copied().filter(|(first, last)| first <= last).collect());
        let field = |field: VariedField| Self::In(field, turned(field, set(), not, family));
        let owner = |field: VariedField| Self::Owner(field, turned(field, set(), not, family));
        match selector {
            Selector::Source(of) | Selector::Destination(of) if of != family => Self::Always(not),
            Selector::Source(_) => field(VariedField::Source),
            Selector::Destination(_) => field(VariedField::Destination),
            Selector::Family => Self::Always(has(family.number().into()) != not),
            Selector::Protocol => field(VariedField::Protocol),
            Selector::SourcePort => field(VariedField::SourcePort),
            Selector::DestinationPort => field(VariedField::Port),
            Selector::TcpFlags => field(VariedField::Flags),
            Selector::InInterface => Self::ComesIn(turned(VariedField::Interface, set(), not, family)),
            Selector::OutInterface => Self::GoesOut(turned(VariedField::Interface, set(), not, family)),
            Selector::User => owner(VariedField::User),
            Selector::Group => owner(VariedField::Group),
            Selector::Mark => Self::Mark(VariedField::Mark, set(), not),
            Selector::ConnMark => Self::Mark(VariedField::ConnMark, set(), not),
            Selector::State => {
                let single =
                    StateBits::NAMES.into_iter().map(|(bit, _)| bit).filter(|bit| has((*bit).into()));
                let states = of_states(single.fold(0, |all, bit| all | bit));
                Self::In(VariedField::State, turned(VariedField::State, states, not, family))
            }
            Selector::Direction => {
                let each = [false, true].into_iter().filter(|reply| has(u128::from(*reply)) != not);
                Self::of_entry(each.map(of_direction).fold(RangeSet::empty(), |all, one| all.or(&one)))
            }
        }
    }

    fn of_plain(condition: &Match, family: Family) -> Self {
        let port = |range: &PortRange| of_ports(&[*range]);
        let interface = |is: &Equality<InterfaceName>| {
            turned(VariedField::Interface, of_interface(&is.value), is.not, family)
        };
        let bits = |mark: VariedField, is: &Equality<MaskedMark>| {
            Self::Bits(mark, is.value.value(), is.value.mask(), is.not)
        };
        match condition {
            Match::Source(is) | Match::Destination(is) if Family::of(&is.value.addr()) != family => {
                Self::Always(is.not)
            }
            Match::Source(is) => Self::is(VariedField::Source, is, of_net, family),
            Match::Destination(is) => Self::is(VariedField::Destination, is, of_net, family),
            Match::InInterface(is) => Self::ComesIn(interface(is)),
            Match::OutInterface(is) => Self::GoesOut(interface(is)),
            Match::Protocol(protocol) => Self::of_protocol(*protocol),
            Match::SourcePort(is) => Self::is(VariedField::SourcePort, is, port, family),
            Match::DestinationPort(is) => Self::is(VariedField::Port, is, port, family),
            Match::DestinationPorts(is) => Self::is(VariedField::Port, is, |ranges| of_ports(ranges), family),
            Match::TcpFlags(is) => {
                Self::is(VariedField::Flags, is, |flags: &TcpFlags| of_flags(|all| flags.covers(all)), family)
            }
            Match::Tracked(tracked) => {
                let known = of_states(StateBits::RELATED | StateBits::ESTABLISHED);
                let states = match (tracked.state, tracked.direction) {
                    (ConnState::Invalid, _) => of_states(StateBits::INVALID),
                    (ConnState::RelatedOrEstablished, None) => known,
                    (ConnState::RelatedOrEstablished, Some(direction)) => {
                        known.and(&of_direction(direction == Direction::Reply))
                    }
                };
                Self::In(VariedField::State, states)
            }
            Match::OwnerUid(is) => Self::owner(VariedField::User, is, family),
            Match::OwnerGid(is) => Self::owner(VariedField::Group, is, family),
            Match::Mark(is) => bits(VariedField::Mark, is),
            Match::ConnMark(is) => bits(VariedField::ConnMark, is),
        }
    }

    fn is<T>(field: VariedField, is: &Equality<T>, set: impl Fn(&T) -> RangeSet, family: Family) -> Self {
        Self::In(field, turned(field, set(&is.value), is.not, family))
    }

    fn owner(field: VariedField, is: &Equality<u32>, family: Family) -> Self {
        Self::Owner(field, turned(field, RangeSet::one(is.value.into()), is.not, family))
    }
}

const fn field_of(end: Endpoint) -> VariedField {
    match end {
        Endpoint::Source => VariedField::Source,
        Endpoint::Destination => VariedField::Destination,
    }
}

/// Values of a field, or if inverted all others.
fn turned(field: VariedField, set: RangeSet, not: bool, family: Family) -> RangeSet {
    if not { set.complement(field.most(family)) } else { set }
}

fn of_ports(ranges: &[PortRange]) -> RangeSet {
    RangeSet::of(ranges.iter().map(|range| (range.first().into(), range.last().into())).collect())
}

/// The numbers of these states of the kernel.
fn of_states(states: u32) -> RangeSet {
    let each = [
        (StateBits::NEW, state::NEW, state::NEW),
        (StateBits::RELATED, state::RELATED, state::RELATED),
        (StateBits::ESTABLISHED, state::ESTABLISHED, state::REPLY),
        (StateBits::INVALID, state::INVALID, state::INVALID),
        (StateBits::UNTRACKED, state::UNTRACKED, state::UNTRACKED),
    ];
    let named = each.into_iter().filter(|(bit, ..)| states & bit != 0);
    RangeSet::of(named.map(|(_, first, last)| (first, last)).collect())
}

fn of_direction(is_reply: bool) -> RangeSet {
    if is_reply { RangeSet::one(state::REPLY) } else { RangeSet::range(state::NEW, state::ESTABLISHED) }
}

/// The sets of flags of a segment for which something holds.
pub(crate) fn of_flags(covers: impl Fn(u8) -> bool) -> RangeSet {
    RangeSet::each((0..=u8::MAX).filter(|flags| covers(*flags)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::rule::Tracked;

    #[test]
    fn states_of_connections_are_those_that_a_rule_of_a_plan_names() {
        let held = |state: ConnState, direction: Option<Direction>| {
            let tracked = Match::Tracked(Tracked { state, direction });
            let Test::In(VariedField::State, set) = Test::of_plain(&tracked, Family::V4) else {
                panic!("{tracked:?}")
            };
            (0..=state::UNTRACKED).filter(|state| set.contains(*state)).collect::<Vec<_>>()
        };
        let related = ConnState::RelatedOrEstablished;
        assert_eq!(held(related, None), [state::RELATED, state::ESTABLISHED, state::REPLY]);
        assert_eq!(held(related, Some(Direction::Original)), [state::RELATED, state::ESTABLISHED]);
        assert_eq!(held(related, Some(Direction::Reply)), [state::REPLY]);
        assert_eq!(held(ConnState::Invalid, None), [state::INVALID]);
    }

    #[test]
    fn of_two_families_the_one_that_is_not_meant_is_the_other() {
        for (rules, packets, not) in [
            (Family::V4, Family::V4, false),
            (Family::V4, Family::V6, false),
            (Family::V6, Family::V6, true),
            (Family::V6, Family::V4, true),
        ] {
            let number = u128::from(rules.number());
            let test = Test::of_ranges(Selector::Family, &[(number, number)], not, packets);
            assert_eq!(test, Test::Always((rules == packets) != not), "{rules:?} {packets:?} {not}");
        }
    }

    #[test]
    fn a_direction_turned_round_is_the_other_one() {
        for (is_reply, not) in [(false, false), (false, true), (true, false), (true, true)] {
            let ranges = [(u128::from(is_reply), u128::from(is_reply))];
            let test = Test::of_ranges(Selector::Direction, &ranges, not, Family::V4);
            assert_eq!(test, Test::of_entry(of_direction(is_reply != not)));
        }
        let both = Test::of_ranges(Selector::Direction, &[(0, 1)], false, Family::V4);
        assert_eq!(both, Test::of_entry(of_direction(false).or(&of_direction(true))));
    }

    #[test]
    fn no_packet_has_an_address_of_the_other_family() {
        for not in [false, true] {
            let of_v4 = Match::Source(Equality { value: "10.0.0.0/8".parse().unwrap(), not });
            assert_eq!(Test::of_plain(&of_v4, Family::V6), Test::Always(not));
            assert!(matches!(Test::of_plain(&of_v4, Family::V4), Test::In(VariedField::Source, _)));
            let of_v6 = Match::Destination(Equality { value: "fd00::/8".parse().unwrap(), not });
            assert_eq!(Test::of_plain(&of_v6, Family::V4), Test::Always(not));
        }
    }
}
