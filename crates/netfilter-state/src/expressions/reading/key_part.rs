//! A part of a set's key: which field of the packet it is, and how a register holds its values.

use super::loaded::{Bits, Loaded};
use crate::ruleset::Selector;

/// Parts of a key begin at multiples of this.
pub(super) const ALIGNMENT: usize = 4;

/// A part of a key: a field of the packet, as a register holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyPart {
    pub(crate) selector: Selector,
    is_host_order: bool,
}

impl KeyPart {
    /// What is loaded; none where it is not understood.
    pub(crate) fn of(loaded: &Loaded<'_>) -> Option<Self> {
        let field = loaded.field_in_some_order()?;
        let selector = field.selected()?;
        let is_host_order = match loaded.bits {
            Bits::All => selector.is_host_order(),
            Bits::NetworkOrder if selector.is_host_order() => false,
            Bits::NetworkOrder | Bits::Masked(_) | Bits::Flipped { .. } | Bits::Unknown => return None,
        };
        Some(Self { selector, is_host_order })
    }

    /// The numbers of the first and the last value, in what a register of it holds; behind a value that is 0.
    pub(crate) fn range(&self, first: &[u8], last: &[u8]) -> Option<(u128, u128)> {
        let number = |bytes: &[u8]| {
            let (bytes, behind) = bytes.split_at_checked(self.length())?;
            if behind.iter().take(self.room().checked_sub(self.length())?).any(|byte| *byte != 0) {
                return None;
            }
            if self.is_host_order {
                return crate::expressions::wire::number(bytes).map(u128::from);
            }
            Some(crate::expressions::wire::big_endian(bytes.iter().copied()))
        };
        let (first, last) = (number(first)?, number(last)?);
        (first == last || !self.is_host_order).then_some((first, last))
    }

    /// All values.
    pub(crate) const fn every(&self) -> (u128, u128) {
        (0, self.selector.most())
    }

    /// Whether it is in the machine's order of bytes, in which comparisons of order mean nothing.
    pub(crate) const fn is_host_order(&self) -> bool {
        self.is_host_order
    }

    /// How many bytes it is.
    pub(super) const fn length(&self) -> usize {
        self.selector.length() as usize
    }

    /// How many bytes it takes in registers.
    pub(crate) const fn room(&self) -> usize {
        self.length().next_multiple_of(ALIGNMENT)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::loaded::ValueOrigin, *};
    use crate::expressions::{
        abi::{base, meta},
        reading::Field,
    };

    /// Bytes that are in the network's order already are in none after they were turned round.
    #[test]
    fn only_what_is_in_the_machines_order_can_be_brought_into_the_networks() {
        let port = Field::Payload { base: base::TRANSPORT, offset: 2, length: 2 };
        for (field, selector, is_host_order) in
            [(Field::Meta(meta::MARK), Selector::Mark, true), (port, Selector::DestinationPort, false)]
        {
            let part = |bits: Bits<'_>| {
                let part = KeyPart::of(&Loaded { origin: ValueOrigin::Field(field), bits, width: 4 })?;
                Some((part.selector, part.is_host_order))
            };
            assert_eq!(part(Bits::All), Some((selector, is_host_order)));
            assert_eq!(part(Bits::NetworkOrder), is_host_order.then_some((selector, false)));
            assert_eq!(part(Bits::Masked(&[0xff; 4])), None);
            assert_eq!(part(Bits::Unknown), None);
        }
    }
}
