//! Sets of native tables as the kernel receives them.

use super::native_state::SetState;
use crate::expressions::{
    abi::{attribute, key_type, set},
    wire::MessageWriter,
};
use crate::ruleset::Selector;
use redirect_core::{
    plan::native::{Ranges, SetKind},
    values::Family,
};

/// An element of a set: a key, and whether an interval ends before it.
type Element = (u128, bool);

/// A set that belongs to one rule and holds these ranges.
pub(super) fn state(ranges: &Ranges) -> SetState {
    let elements = elements(ranges);
    let mut body = MessageWriter::default();
    declare(&mut body, ranges, elements.len());
    let mut set = SetState::default();
    set.attributes = body.attributes().raw().into();
    for (key, ends) in elements {
        let mut body = MessageWriter::default();
        element(&mut body, ranges.kind(), key, ends);
        set.add(body.attributes());
    }
    set
}

/// The elements. Intervals are a key where one starts and a key where it has ended.
fn elements(ranges: &Ranges) -> Vec<Element> {
    let all = ranges.list();
    if !has_intervals(ranges) {
        return all.iter().map(|(first, _)| (*first, false)).collect();
    }
    let mut elements: Vec<Element> = Vec::new();
    if all.first().is_some_and(|(first, _)| *first > 0) {
        elements.push((0, true));
    }
    for (first, last) in all {
        elements.push((*first, false));
        if *last < selector(ranges.kind()).most() {
            elements.push((last.saturating_add(1), true));
        }
    }
    elements
}

fn has_intervals(ranges: &Ranges) -> bool {
    ranges.list().iter().any(|(first, last)| first != last)
}

/// Writes what a set is.
fn declare(body: &mut MessageWriter, ranges: &Ranges, size: usize) {
    let interval = if has_intervals(ranges) { set::INTERVAL } else { 0 };
    body.u32(attribute::set::FLAGS, set::ANONYMOUS | set::CONSTANT | interval);
    body.u32(attribute::set::KEY_TYPE, key_type(ranges.kind()));
    body.u32(attribute::set::KEY_LENGTH, length(ranges.kind()));
    body.nested(attribute::set::DESCRIPTION, |description| {
        description.u32(attribute::set_description::SIZE, u32::try_from(size).unwrap_or(u32::MAX));
    });
}

/// Writes an element of a set.
fn element(body: &mut MessageWriter, kind: SetKind, key: u128, ends: bool) {
    if ends {
        body.u32(attribute::element::FLAGS, set::END_OF_INTERVAL);
    }
    let bytes = key.to_be_bytes();
    let length = usize::try_from(length(kind)).unwrap_or_default();
    let start = bytes.len().saturating_sub(length);
    body.value(attribute::element::KEY, bytes.get(start..).unwrap_or(&bytes));
}

/// The type of a key.
pub(super) const fn key_type(kind: SetKind) -> u32 {
    match kind {
        SetKind::Ports => key_type::PORT,
        SetKind::Addresses(Family::V4) => key_type::IPV4_ADDRESS,
        SetKind::Addresses(Family::V6) => key_type::IPV6_ADDRESS,
    }
}

/// The length of a key in bytes.
pub(super) const fn length(kind: SetKind) -> u32 {
    selector(kind).length()
}

/// What a key is looked up for.
const fn selector(kind: SetKind) -> Selector {
    match kind {
        SetKind::Ports => Selector::DestinationPort,
        SetKind::Addresses(family) => Selector::Destination(family),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements_of(ranges: &[(u128, u128)]) -> Vec<Element> {
        elements(&Ranges::new(SetKind::Ports, ranges.into()))
    }

    #[test]
    fn intervals_are_keys_where_they_begin_and_where_they_have_ended() {
        let wanted = [(0, true), (7, false), (8, true), (80, false), (102, true), (65535, false)];
        assert_eq!(elements_of(&[(7, 7), (80, 101), (65535, 65535)]), wanted);
        assert_eq!(elements_of(&[(0, 5), (60_000, 65_535)]), [(0, false), (6, true), (60_000, false)]);
        assert_eq!(elements_of(&[(0, 0), (5, 5)]), [(0, false), (5, false)], "no intervals at all");
    }

    #[test]
    fn single_keys_are_no_intervals() {
        assert_eq!(elements_of(&[(15008, 15008), (53, 53)]), [(53, false), (15008, false)]);
    }
}
