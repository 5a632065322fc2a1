//! What the registers hold while a rule is walked through.

use super::{
    super::abi::register,
    Field, LookupExpression,
    key_part::KeyPart,
    loaded::{Loaded, ValueOrigin},
};
use std::collections::BTreeMap;

/// What the registers hold while a rule is walked through, by the number of their first four bytes.
#[derive(Debug, Default)]
pub(crate) struct Registers<'a>(BTreeMap<u32, Loaded<'a>>);

/// How many registers of four bytes one of sixteen is.
const PARTS: u32 = 4;
/// The length of one of those.
const PART: usize = 4;

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
    pub(crate) fn looked_up(&self, lookup: LookupExpression<'a>) -> Option<Loaded<'a>> {
        self.get(lookup.from?)
    }

    /// Whether something is among what a lookup looks for, in a set with keys of this length.
    pub(crate) fn looks_up(
        &self,
        lookup: LookupExpression<'a>,
        length: usize,
        origin: ValueOrigin<'a>,
    ) -> bool {
        let Some(from) = lookup.from.map(slot) else { return false };
        let slots = u32::try_from(length.div_ceil(PART)).unwrap_or(u32::MAX);
        self.0.range(from..from.saturating_add(slots)).any(|(_, held)| held.origin == origin)
    }

    /// All parts of what a lookup looks for, in a set with keys of this length; none where one is not understood.
    pub(crate) fn parts_looked_up(
        &self,
        lookup: LookupExpression<'a>,
        length: usize,
    ) -> Option<Vec<KeyPart>> {
        let mut at = slot(lookup.from?);
        let (mut parts, mut taken) = (Vec::new(), 0_usize);
        while taken < length {
            let part = KeyPart::of(self.0.get(&at)?)?;
            at = at.checked_add(u32::try_from(part.room().checked_div(4)?).ok()?)?;
            taken = taken.checked_add(part.room())?;
            parts.push(part);
        }
        Some(parts)
    }

    /// Loads something of so many bytes.
    pub(crate) fn load(&mut self, to: u32, origin: ValueOrigin<'a>, width: usize) {
        self.put(to, Loaded { width, ..Loaded::whole(origin) });
    }

    /// Makes something else of what is loaded. Where nothing is, the expression of this name leads to something that is not known.
    pub(crate) fn change(
        &mut self,
        (from, to): (u32, u32),
        name: &'a str,
        change: impl FnOnce(Loaded<'a>) -> Loaded<'a>,
    ) {
        match self.get(from) {
            Some(loaded) => self.put(to, change(loaded)),
            None => self.forget(ValueOrigin::Other(name)),
        }
    }

    /// The loaded register is unknown: all may hold this.
    pub(crate) fn forget(&mut self, origin: ValueOrigin<'a>) {
        self.0.insert(slot(register::FIRST), Loaded::whole(origin));
        for held in self.0.values_mut() {
            *held = Loaded::whole(origin);
        }
    }

    /// These fields have changed since they were loaded.
    pub(crate) fn outdate(&mut self, of: impl Fn(Field) -> bool) {
        for held in self.0.values_mut() {
            if matches!(held.origin, ValueOrigin::Field(field) if of(field)) {
                held.origin = ValueOrigin::Other("an earlier value");
            }
        }
    }

    /// What other registers hold in its place is gone.
    fn put(&mut self, to: u32, loaded: Loaded<'a>) {
        let slots = |width: usize| u32::try_from(width.div_ceil(PART)).unwrap_or(PARTS).max(1);
        let (begin, end) = (slot(to), slot(to).saturating_add(slots(loaded.width)));
        self.0.retain(|other, held| *other >= end || other.saturating_add(slots(held.width)) <= begin);
        self.0.insert(begin, loaded);
    }
}
