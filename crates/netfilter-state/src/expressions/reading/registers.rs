//! What the registers hold while a rule is walked through.

use super::{
    super::abi::{byteorder, register},
    Field, Lookup, sets,
};
use alloc::{collections::BTreeMap, vec::Vec};

/// What a register holds: something, of which bits were kept or flipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loaded<'a> {
    pub(crate) origin: Origin<'a>,
    pub(crate) bits: Bits<'a>,
}

/// Where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin<'a> {
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
    const fn whole(origin: Origin<'a>) -> Self {
        Self { origin, bits: Bits::All }
    }

    /// The field it is, if it is as it was loaded.
    pub(crate) fn field(&self) -> Option<Field> {
        match (self.origin, self.bits) {
            (Origin::Field(field), Bits::All) => Some(field),
            (_, _) => None,
        }
    }

    /// The field it is, whatever the order of its bytes.
    pub(crate) const fn field_in_some_order(&self) -> Option<Field> {
        match (self.origin, self.bits) {
            (Origin::Field(field), Bits::All | Bits::NetworkOrder) => Some(field),
            (_, _) => None,
        }
    }

    /// The value it is, if it is as it was loaded.
    pub(crate) fn value(&self) -> Option<&'a [u8]> {
        match (self.origin, self.bits) {
            (Origin::Value(value), Bits::All) => Some(value),
            (_, _) => None,
        }
    }

    fn changed(self, mask: &'a [u8], flip: &'a [u8]) -> Self {
        let bits = match self.bits {
            Bits::All if flip.iter().all(|byte| *byte == 0) => Bits::Masked(mask),
            Bits::All => Bits::Flipped { mask, flip },
            Bits::Masked(_) | Bits::Flipped { .. } | Bits::NetworkOrder | Bits::Unknown => Bits::Unknown,
        };
        Self { bits, ..self }
    }

    /// Turns each piece of so many bytes of the first ones round.
    fn reordered(self, operation: u32, length: u32, size: u32) -> Self {
        let bits = match self.bits {
            // No piece fits: nft writes this for numbers of one byte.
            bits if length < size => bits,
            Bits::All if operation == byteorder::TO_NETWORK && length == size => Bits::NetworkOrder,
            Bits::All | Bits::Masked(_) | Bits::Flipped { .. } | Bits::NetworkOrder | Bits::Unknown => {
                Bits::Unknown
            }
        };
        Self { bits, ..self }
    }
}

/// What the registers hold while a rule is walked through, by the number of their first four bytes.
#[derive(Debug, Default)]
pub(crate) struct Registers<'a>(BTreeMap<u32, Loaded<'a>>);

/// How many registers of four bytes one of sixteen is.
const PARTS: u32 = 4;

/// The number of a register's first four bytes.
const fn slot(register: u32) -> u32 {
    match register.checked_sub(register::FIRST_PART) {
        Some(part) => part,
        None => register.saturating_sub(register::FIRST).saturating_mul(PARTS),
    }
}

impl<'a> Registers<'a> {
    pub(crate) fn get(&self, register: u32) -> Option<Loaded<'a>> {
        self.0.get(&slot(register)).copied()
    }

    /// What a lookup looks for.
    pub(crate) fn looked_up(&self, lookup: Lookup<'a>) -> Option<Loaded<'a>> {
        self.get(lookup.from?)
    }

    /// All parts of what a lookup looks for, in a set with keys of this length; none where one is not understood.
    pub(crate) fn parts_looked_up(&self, lookup: Lookup<'a>, length: usize) -> Option<Vec<sets::Part>> {
        let mut at = slot(lookup.from?);
        let (mut parts, mut taken) = (Vec::new(), 0_usize);
        while taken < length {
            let part = sets::Part::of(self.0.get(&at)?)?;
            at = at.checked_add(u32::try_from(part.room().checked_div(4)?).ok()?)?;
            taken = taken.checked_add(part.room())?;
            parts.push(part);
        }
        Some(parts)
    }

    pub(crate) fn load(&mut self, to: u32, origin: Origin<'a>) {
        self.put(to, Loaded::whole(origin));
    }

    /// Changes bits of what is loaded; none where nothing is loaded.
    pub(crate) fn change(&mut self, from: u32, to: u32, mask: &'a [u8], flip: &'a [u8]) -> Option<()> {
        let loaded = self.get(from)?.changed(mask, flip);
        self.put(to, loaded);
        Some(())
    }

    /// Changes the order of bytes of what is loaded; none where nothing is loaded.
    pub(crate) fn reorder(&mut self, from: u32, to: u32, reordered: (u32, u32, u32)) -> Option<()> {
        let (operation, length, size) = reordered;
        let loaded = self.get(from)?.reordered(operation, length, size);
        self.put(to, loaded);
        Some(())
    }

    /// The loaded register is unknown: all may hold this.
    pub(crate) fn forget(&mut self, origin: Origin<'a>) {
        self.0.insert(slot(register::FIRST), Loaded::whole(origin));
        for held in self.0.values_mut() {
            *held = Loaded::whole(origin);
        }
    }

    fn put(&mut self, to: u32, loaded: Loaded<'a>) {
        self.0.insert(slot(to), loaded);
    }
}
