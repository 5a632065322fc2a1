//! Rules of others: described for people, and, where this program may have to put them back, with all their bytes.

use super::{
    abi::{attribute, meta},
    decode,
    wire::{Attribute, Attributes, Writer},
};
use crate::{render, state::Entry};
use alloc::{string::String, vec::Vec};
use core::fmt::Write;

/// What stands between the description and the bytes.
const BYTES: &str = " # nft:";

/// The text of a rule that is not understood. With `whole` it holds everything that is needed to make the rule again.
pub(super) fn text(expressions: Attribute<'_>, user_data: Option<Attribute<'_>>, whole: bool) -> String {
    let mut text = decode::description(expressions.attributes());
    if user_data.is_some() {
        text.push_str(" (with a comment)");
    }
    if whole {
        text.push_str(BYTES);
        hex(&mut text, &without_counts(expressions.attributes()));
        if let Some(user_data) = user_data {
            text.push('/');
            hex(&mut text, user_data.0);
        }
    }
    text
}

/// A rule for people: the bytes of another's are left away.
pub(super) fn entry_text(entry: &Entry) -> String {
    match entry {
        Entry::Rule(rule) => render::rule_text(rule),
        Entry::Foreign(text) => text.rsplit_once(BYTES).map_or(text.as_str(), |(words, _)| words).into(),
    }
}

/// A rule as people read it: another's without the bytes that would make it again.
#[must_use]
pub fn without_bytes(entry: Entry) -> Entry {
    match entry {
        Entry::Rule(_) => entry,
        Entry::Foreign(_) => Entry::Foreign(entry_text(&entry)),
    }
}

/// What is needed to make a rule again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Whole {
    /// Its expressions.
    pub(super) expressions: Vec<u8>,
    /// Its comment and the like.
    pub(super) user_data: Option<Vec<u8>>,
    /// The protocol it compares with; xt matches and targets ask for it.
    pub(super) protocol: u32,
}

/// The bytes in the text of a rule.
pub(super) fn whole(text: &str) -> Option<Whole> {
    let (_, bytes) = text.rsplit_once(BYTES)?;
    let (expressions, user_data) = match bytes.split_once('/') {
        Some((expressions, user_data)) => (expressions, Some(unhex(user_data)?)),
        None => (bytes, None),
    };
    let expressions = unhex(expressions)?;
    let protocol = protocol(Attribute(&expressions).attributes()).unwrap_or_default();
    Some(Whole { expressions, user_data, protocol })
}

/// The same expressions with their counters at zero: they are what two looks at the same rule differ in.
fn without_counts(expressions: Attributes<'_>) -> Vec<u8> {
    let mut writer = Writer::default();
    for (_, element) in expressions {
        match decode::expression(element) {
            Some(("counter", _)) => super::expression::Expressions(&mut writer).counter(),
            _ => writer.nested(attribute::list::ELEMENT, |out| out.raw(element.0)),
        }
    }
    writer.finish().unwrap_or_default()
}

fn protocol(expressions: Attributes<'_>) -> Option<u32> {
    let mut loaded = false;
    for (name, data) in expressions.filter_map(|(_, element)| decode::expression(element)) {
        match name {
            "meta" => {
                loaded = data.find(attribute::meta::KEY).and_then(Attribute::u32) == Some(meta::PROTOCOL);
            }
            "cmp" if loaded => {
                let value = data.find(attribute::cmp::DATA)?.attributes().find(attribute::data::VALUE)?;
                return value.0.first().copied().map(u32::from);
            }
            _ => {}
        }
    }
    None
}

fn hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    pairs.iter().map(|[high, low]| Some(digit(*high)?.wrapping_shl(4) | digit(*low)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_being_text() {
        let mut writer = Writer::default();
        let mut out = super::super::expression::Expressions(&mut writer);
        out.protocol(6);
        out.counter();
        out.jump("DOCKER");
        let bytes = writer.finish().unwrap();
        let text = text(Attribute(&bytes), Some(Attribute(&[0, 2, b'x', 0])), true);
        assert!(text.starts_with("meta cmp immediate -j DOCKER (with a comment) # nft:"), "{text}");
        let whole = whole(&text).unwrap();
        assert_eq!(whole, Whole { expressions: bytes, user_data: Some([0, 2, b'x', 0].into()), protocol: 6 });
    }

    #[test]
    fn other_text_holds_no_bytes() {
        for text in ["", "-j X", "-j X # nft:0", "-j X # nft:zz", "x # nft:00/0"] {
            assert_eq!(whole(text), None, "{text}");
        }
    }
}
