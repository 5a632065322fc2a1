//! Packets, one or many: a set of values for each field.

use super::set::{RangeSet, SetRelation, masked};
use ipnet::IpNet;
use netfilter_state::ruleset::{CopiedMark, name_bytes};
use redirect_core::{
    rule::Protocol,
    values::{Family, InterfaceName},
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What packets differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum VariedField {
    Protocol,
    Source,
    Destination,
    SourcePort,
    Port,
    User,
    Group,
    /// By which it comes in, or goes out at first.
    Interface,
    State,
    Flags,
    Mark,
    ConnMark,
}

impl VariedField {
    pub(super) const ALL: [Self; 12] = [
        Self::Protocol,
        Self::Source,
        Self::Destination,
        Self::SourcePort,
        Self::Port,
        Self::User,
        Self::Group,
        Self::Interface,
        Self::State,
        Self::Flags,
        Self::Mark,
        Self::ConnMark,
    ];

    /// The largest number it has.
    pub(super) const fn most(self, family: Family) -> u128 {
        match self {
            Self::Protocol | Self::Flags => u8::MAX as u128,
            Self::Source | Self::Destination => match family {
                Family::V4 => u32::MAX as u128,
                Family::V6 => u128::MAX,
            },
            Self::SourcePort | Self::Port => u16::MAX as u128,
            // The largest is not a valid ID.
            Self::User | Self::Group | Self::Mark | Self::ConnMark => u32::MAX as u128,
            Self::Interface => u128::MAX,
            Self::State => state::MOST,
        }
    }
}

/// States of connection tracking, as numbers of a field.
pub(super) mod state {
    use crate::ConnectionState;

    pub(in super::super) const NEW: u128 = ConnectionState::New as u128;
    pub(in super::super) const RELATED: u128 = ConnectionState::Related as u128;
    pub(in super::super) const ESTABLISHED: u128 = ConnectionState::Established as u128;
    pub(in super::super) const REPLY: u128 = ConnectionState::Reply as u128;
    pub(in super::super) const INVALID: u128 = ConnectionState::Invalid as u128;
    pub(in super::super) const UNTRACKED: u128 = INVALID + 1;
    pub(super) const MOST: u128 = UNTRACKED;
}

/// Packets of one family: those that have in each field one of these values.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Packets {
    pub(crate) family: Family,
    sets: [RangeSet; 12],
    /// How many ranges those have.
    ranges: usize,
}

impl Packets {
    /// All of a family.
    pub(super) fn all(family: Family) -> Self {
        let sets = VariedField::ALL.map(|field| RangeSet::range(0, field.most(family)));
        let mut all = Self { family, sets, ranges: VariedField::ALL.len() };
        all.set(VariedField::Protocol, RangeSet::each([Protocol::Tcp, Protocol::Udp].map(Protocol::number)));
        all
    }

    #[allow(clippy::indexing_slicing)] // the array has one set per field
    pub(crate) const fn get(&self, field: VariedField) -> &RangeSet {
        &self.sets[field as usize]
    }

    #[allow(clippy::indexing_slicing)] // the array has one set per field
    pub(super) fn set(&mut self, field: VariedField, set: RangeSet) {
        let had = self.sets[field as usize].ranges().len();
        self.ranges = self.ranges.saturating_sub(had).saturating_add(set.ranges().len());
        self.sets[field as usize] = set;
    }

    pub(super) fn set_one(&mut self, field: VariedField, value: impl Into<u128>) {
        self.set(field, RangeSet::one(value.into()));
    }

    /// Number of ranges in their description.
    pub(super) const fn ranges(&self) -> usize {
        self.ranges
    }

    /// The same with another set for a field.
    pub(super) fn with(&self, field: VariedField, set: RangeSet) -> Self {
        let mut packets = self.clone();
        packets.set(field, set);
        packets
    }
}

/// Whether packets have one of these values in a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FieldMatch {
    Yes,
    No,
    /// Packets with such a value in this field match.
    For(VariedField, RangeSet),
    /// Unknown.
    Unknown,
}

impl FieldMatch {
    pub(super) fn not(self, family: Family) -> Self {
        match self {
            Self::Yes => Self::No,
            Self::No => Self::Yes,
            Self::For(field, set) => Self::For(field, set.complement(field.most(family))),
            Self::Unknown => Self::Unknown,
        }
    }

    pub(super) fn when(holds: bool) -> Self {
        if holds { Self::Yes } else { Self::No }
    }

    pub(super) fn of(packets: &Packets, field: VariedField, set: &RangeSet) -> Self {
        match packets.get(field).lies_to(set) {
            SetRelation::Inside => Self::Yes,
            SetRelation::Outside => Self::No,
            SetRelation::Across => Self::For(field, set.clone()),
        }
    }
}

/// Of how many marks each is asked, whatever bits a condition compares.
const MOST_ASKED: u128 = 256;

/// A mark on its way: what it was at first, some bits cleared, and then some flipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MarkNow {
    of: VariedField,
    cleared: u32,
    flipped: u32,
    /// Whether a rule set it to an unknown value.
    unknown: bool,
}

impl MarkNow {
    pub(super) const fn of(field: VariedField) -> Self {
        Self { of: field, cleared: 0, flipped: 0, unknown: false }
    }

    pub(super) const fn is(value: u32) -> Self {
        Self { of: VariedField::Mark, cleared: u32::MAX, flipped: value, unknown: false }
    }

    pub(super) const fn unknown() -> Self {
        Self { of: VariedField::Mark, cleared: u32::MAX, flipped: 0, unknown: true }
    }

    /// Some bits cleared, and then those of the value flipped.
    pub(super) const fn changed(self, mask: u32, value: u32) -> Self {
        if mask == u32::MAX {
            return Self::is(value);
        }
        Self { cleared: self.cleared | mask, flipped: (self.flipped & !mask) ^ value, ..self }
    }

    /// With another mark copied to it.
    pub(super) fn with_copied(self, from: Self, copied: CopiedMark, packets: &Packets) -> Self {
        if copied == CopiedMark::WHOLE {
            return from;
        }
        let value = from.value(packets).map(|from| from & copied.mask ^ copied.flip);
        value.map_or_else(Self::unknown, |value| self.changed(copied.cleared, value))
    }

    /// Whether it is what the packets had, in some bits.
    pub(super) const fn is_theirs(self) -> bool {
        !self.unknown && self.cleared != u32::MAX
    }

    /// The mark, where it is known.
    pub(super) fn value(self, packets: &Packets) -> Option<u32> {
        let was =
            if self.cleared == u32::MAX { 0 } else { u32::try_from(packets.get(self.of).single()?).ok()? };
        (!self.unknown).then_some((was & !self.cleared) ^ self.flipped)
    }

    /// Whether the mark has this value in these bits.
    pub(super) fn has(self, packets: &Packets, value: u32, mask: u32) -> FieldMatch {
        if self.unknown {
            return FieldMatch::Unknown;
        }
        let wanted = value ^ (self.flipped & mask);
        if wanted & self.cleared & mask != 0 || value & !mask != 0 {
            return FieldMatch::No;
        }
        if let Some(known) = self.of_few(packets, |mark| mark & mask == value) {
            return known;
        }
        let asked = mask & !self.cleared;
        match masked(wanted & asked, asked) {
            Some(set) => FieldMatch::of(packets, self.of, &set),
            None => FieldMatch::Unknown,
        }
    }

    /// Whether the mark is one of these values.
    pub(super) fn is_in(self, packets: &Packets, set: &RangeSet) -> FieldMatch {
        if let Some(known) = self.of_few(packets, |mark| set.contains(mark.into())) {
            return known;
        }
        let is_unchanged = !self.unknown && self.cleared == 0 && self.flipped == 0;
        if is_unchanged { FieldMatch::of(packets, self.of, set) } else { FieldMatch::Unknown }
    }

    /// Whether this holds of the mark, of few packets' marks asked of each.
    fn of_few(self, packets: &Packets, holds: impl Fn(u32) -> bool) -> Option<FieldMatch> {
        if let Some(mark) = self.value(packets) {
            return Some(FieldMatch::when(holds(mark)));
        }
        let now = |was: u128| Some((u32::try_from(was).ok()? & !self.cleared) ^ self.flipped);
        let those = packets.get(self.of).few(MOST_ASKED).filter(|_| !self.unknown)?;
        let those = those.filter(|was| now(*was).is_some_and(&holds));
        Some(FieldMatch::of(packets, self.of, &RangeSet::each(those)))
    }
}

pub(super) fn of_net(net: &IpNet) -> RangeSet {
    RangeSet::range(number(net.network()), number(net.broadcast()))
}

pub(crate) fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u32::from(address).into(),
        IpAddr::V6(address) => address.into(),
    }
}

/// The loopback addresses of a family.
pub(super) fn loopback(family: Family) -> RangeSet {
    match family {
        Family::V4 => RangeSet::range(0x7f00_0000, 0x7fff_ffff),
        Family::V6 => RangeSet::one(1),
    }
}

/// The loopback address of a family that everything uses.
pub(crate) const fn localhost(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

/// Addresses of one link alone.
pub(super) fn link_local(family: Family) -> RangeSet {
    match family {
        // 169.254.0.0/16
        Family::V4 => RangeSet::range(0xa9fe_0000, 0xa9fe_ffff),
        // fe80::/10
        Family::V6 => RangeSet::range(0xfe80 << 112, (0xfec0_u128 << 112).saturating_sub(1)),
    }
}

/// Names of interfaces as numbers: their bytes, so that those with the same beginning lie next to each other.
pub(super) fn of_interface(name: &InterfaceName) -> RangeSet {
    if name.is_prefix() {
        let (first, last) = beginning(name.name());
        RangeSet::range(first, last)
    } else {
        RangeSet::one(interface(name.name()))
    }
}

/// The first and the last of the names that begin so.
fn beginning(start: &str) -> (u128, u128) {
    let bits = u32::try_from(start.len()).unwrap_or(0).saturating_mul(8);
    let first = interface(start);
    (first, first | u128::MAX.checked_shr(bits).unwrap_or(0))
}

/// Names of interfaces, each of which may end in `*`.
pub(super) fn of_names(names: &[String]) -> RangeSet {
    let ranges = names.iter().map(|name| match name.strip_suffix('*') {
        None => (interface(name), interface(name)),
        Some(start) => beginning(start),
    });
    RangeSet::of(ranges.collect())
}

/// The number of `lo`.
pub(crate) const LO: u128 = u16::from_be_bytes(*b"lo") as u128 * (1 << 112);

/// The number of an interface's name: its bytes.
pub(crate) fn interface(name: &str) -> u128 {
    let mut bytes = [0; 16];
    for (to, from) in bytes.iter_mut().zip(name_bytes(name)) {
        *to = from;
    }
    u128::from_be_bytes(bytes)
}

/// The name of a number, as far as it is one.
pub(super) fn interface_name(number: u128) -> String {
    let bytes = number.to_be_bytes();
    bytes.into_iter().take_while(|byte| *byte != 0).map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_the_number_of_its_name() {
        assert_eq!(LO, interface("lo"));
    }

    #[test]
    fn a_mark_changed_in_some_bits_keeps_the_others() {
        let mut packets = Packets::all(Family::V4);
        packets.set_one(VariedField::Mark, 0xff_u32);
        let mark = MarkNow::of(VariedField::Mark).changed(0xf, 0x1);
        assert_eq!(mark.value(&packets), Some(0xf1));
        assert_eq!(mark.changed(0xf0, 0x20).value(&packets), Some(0x21));
        assert_eq!(mark.changed(u32::MAX, 7).value(&packets), Some(7));
        assert_eq!(MarkNow::unknown().changed(0xf, 1).value(&packets), None);
    }

    /// As `--set-xmark 0x6/0x3` does: bits beyond the mask are flipped, too.
    #[test]
    fn bits_of_a_mark_are_cleared_first_and_flipped_then() {
        let mut packets = Packets::all(Family::V4);
        packets.set(VariedField::Mark, RangeSet::one(0xd));
        let changed = MarkNow::of(VariedField::Mark).changed(0x3, 0x6);
        assert_eq!(changed.value(&packets), Some(0xa));
        assert_eq!(changed.changed(0x2, 0x8).value(&packets), Some(0x0));
        assert_eq!(MarkNow::is(7).changed(0, 0x2).value(&packets), Some(5));
        for value in 0..16 {
            assert!(
                matches!(changed.has(&packets, value, 0xf), FieldMatch::Yes) == (value == 0xa),
                "{value}"
            );
        }
    }

    #[test]
    fn which_of_many_marks_a_changed_one_was_is_unknown() {
        let mut packets = Packets::all(Family::V4);
        packets.set(VariedField::Mark, RangeSet::range(0, 0x2000));
        let is_in = |mark: MarkNow| mark.is_in(&packets, &RangeSet::range(0x3000, 0x4000));
        let mark = MarkNow::of(VariedField::Mark);
        assert!(matches!(is_in(mark), FieldMatch::No));
        for changed in [mark.changed(0xf, 0), mark.changed(0xf, 1), MarkNow::unknown()] {
            assert!(matches!(is_in(changed), FieldMatch::Unknown));
        }
    }

    #[test]
    fn of_few_marks_each_is_asked_whatever_the_mask() {
        let mut packets = Packets::all(Family::V4);
        packets.set(VariedField::Mark, RangeSet::of([(0, 3), (0x4000, 0x4000)].into()));
        let mark = MarkNow::of(VariedField::Mark);
        let odd = RangeSet::of([(1, 1), (3, 3)].into());
        assert_eq!(mark.has(&packets, 1, 1), FieldMatch::For(VariedField::Mark, odd.clone()));
        assert_eq!(
            mark.changed(0xf000, 0x8000).has(&packets, 0x8001, 0xf001),
            FieldMatch::For(VariedField::Mark, odd)
        );
        assert_eq!(
            mark.has(&packets, 0x4000, 0x4000),
            FieldMatch::For(VariedField::Mark, RangeSet::one(0x4000))
        );
        assert_eq!(mark.has(&packets, 0x8000, 0x8000), FieldMatch::No);
        let many = packets.with(VariedField::Mark, RangeSet::range(0, u32::MAX.into()));
        assert_eq!(mark.has(&many, 0x4000, 0x4000), FieldMatch::Unknown);
    }
}
