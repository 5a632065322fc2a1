//! What one register holds.

use super::{super::abi::TO_NETWORK_ORDER, Field};

/// How many bytes a register has at most.
pub(super) const WIDEST: usize = 16;
/// How many bytes a map's value takes at most (`NFT_DATA_VALUE_MAXLEN`).
pub(crate) const WIDEST_OF_MAPS: usize = 64;

/// What a register holds: something, of which bits were kept or flipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loaded<'a> {
    pub(crate) origin: ValueOrigin<'a>,
    pub(crate) bits: Bits<'a>,
    /// How many bytes it is.
    pub(crate) width: usize,
}

/// Where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueOrigin<'a> {
    Field(Field),
    Value(&'a [u8]),
    /// From an expression of this name.
    Other(&'a str),
}

/// What has become of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bits<'a> {
    All,
    Masked(&'a [u8]),
    Flipped {
        mask: &'a [u8],
        flip: &'a [u8],
    },
    /// Their bytes are in the network's order, no longer in the machine's.
    NetworkOrder,
    /// More than that.
    Unknown,
}

impl<'a> Loaded<'a> {
    pub(super) const fn whole(origin: ValueOrigin<'a>) -> Self {
        let width = match origin {
            ValueOrigin::Field(field) => field.width(),
            ValueOrigin::Value(value) => value.len(),
            ValueOrigin::Other(_) => WIDEST,
        };
        Self { origin, bits: Bits::All, width }
    }

    /// The field it is, whatever the order of its bytes.
    pub(crate) const fn field_in_some_order(&self) -> Option<Field> {
        match (self.origin, self.bits) {
            (ValueOrigin::Field(field), Bits::All | Bits::NetworkOrder) => Some(field),
            (_, _) => None,
        }
    }

    /// The value it is, if it is as it was loaded.
    pub(crate) fn value(&self) -> Option<&'a [u8]> {
        match (self.origin, self.bits) {
            (ValueOrigin::Value(value), Bits::All) => Some(value),
            (_, _) => None,
        }
    }

    pub(crate) fn changed(self, mask: &'a [u8], flip: &'a [u8]) -> Self {
        let bits = match self.bits {
            Bits::All if (mask.len(), flip.len()) != (self.width, self.width) => Bits::Unknown,
            Bits::All if flip.iter().all(|byte| *byte == 0) => Bits::Masked(mask),
            Bits::All => Bits::Flipped { mask, flip },
            Bits::Masked(_) | Bits::Flipped { .. } | Bits::NetworkOrder | Bits::Unknown => Bits::Unknown,
        };
        Self { bits, width: self.width.max(mask.len()), ..self }
    }

    /// Turns each piece of so many bytes of the first ones round.
    pub(crate) fn reordered(self, operation: u32, length: u32, size: u32) -> Self {
        let bits = match self.bits {
            Bits::All if operation == TO_NETWORK_ORDER && length == size => Bits::NetworkOrder,
            Bits::All | Bits::Masked(_) | Bits::Flipped { .. } | Bits::NetworkOrder | Bits::Unknown => {
                Bits::Unknown
            }
        };
        Self { bits, width: self.width.max(length as usize), ..self }
    }
}
