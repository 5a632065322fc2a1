//! A part of a set's key: which field of the packet it is, and how a register holds its values.

use super::{
    super::{
        abi::{base, ct, meta},
        expression::TCP_FLAGS,
    },
    Field,
    loaded::{Bits, Loaded},
};
use crate::ruleset::Selector;
use redirect_core::values::Family;

/// Parts of a key begin at multiples of this.
pub(super) const ALIGNMENT: usize = 4;

/// A part of a key: a field of the packet, as a register holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyPart {
    pub(crate) selector: Selector,
    length: usize,
    is_host_order: bool,
}

impl KeyPart {
    /// What is loaded; none where it is not understood.
    pub(crate) fn of(loaded: &Loaded<'_>) -> Option<Self> {
        let field = loaded.field_in_some_order()?;
        let (selector, length) = selected(field)?;
        let is_host_order = match loaded.bits {
            Bits::All => is_host_order(selector),
            Bits::NetworkOrder if is_host_order(selector) => false,
            Bits::NetworkOrder | Bits::Masked(_) | Bits::Flipped { .. } | Bits::Unknown => return None,
        };
        Some(Self { selector, length, is_host_order })
    }

    /// The numbers of the first and the last value, in what a register of it holds.
    pub(crate) fn range(&self, first: &[u8], last: &[u8]) -> Option<(u128, u128)> {
        let number = |bytes: &[u8]| {
            let bytes = bytes.get(..self.length)?;
            if self.is_host_order {
                return crate::expressions::wire::number(bytes).map(u128::from);
            }
            Some(bytes.iter().fold(0_u128, |number, byte| number << 8 | u128::from(*byte)))
        };
        let (first, last) = (number(first)?, number(last)?);
        (first == last || !self.is_host_order).then_some((first, last))
    }

    /// All values.
    pub(crate) fn every(&self) -> (u128, u128) {
        let bits = u32::try_from(self.length.saturating_mul(8)).unwrap_or(u128::BITS);
        (0, u128::MAX.checked_shr(u128::BITS.saturating_sub(bits)).unwrap_or(0))
    }

    /// Whether it is in the machine's order of bytes, in which comparisons of order mean nothing.
    pub(crate) const fn is_host_order(&self) -> bool {
        self.is_host_order
    }

    /// How many bytes it takes in registers.
    pub(crate) const fn room(&self) -> usize {
        self.length.next_multiple_of(ALIGNMENT)
    }
}

/// What a field is, and its length.
const fn selected(field: Field) -> Option<(Selector, usize)> {
    Some(match field {
        Field::Meta(meta::FAMILY) => (Selector::Family, 1),
        Field::Meta(meta::PROTOCOL) => (Selector::Protocol, 1),
        Field::Meta(meta::IN_INTERFACE) => (Selector::InInterface, 16),
        Field::Meta(meta::OUT_INTERFACE) => (Selector::OutInterface, 16),
        Field::Meta(meta::SOCKET_USER) => (Selector::User, 4),
        Field::Meta(meta::SOCKET_GROUP) => (Selector::Group, 4),
        Field::Meta(meta::MARK) => (Selector::Mark, 4),
        Field::Ct(ct::MARK) => (Selector::ConnMark, 4),
        Field::Ct(ct::STATE) => (Selector::State, 4),
        Field::Ct(ct::DIRECTION) => (Selector::Direction, 1),
        Field::Payload { base: base::NETWORK, offset: 12, length: 4 } => (Selector::Source(Family::V4), 4),
        Field::Payload { base: base::NETWORK, offset: 16, length: 4 } => {
            (Selector::Destination(Family::V4), 4)
        }
        Field::Payload { base: base::NETWORK, offset: 8, length: 16 } => (Selector::Source(Family::V6), 16),
        Field::Payload { base: base::NETWORK, offset: 24, length: 16 } => {
            (Selector::Destination(Family::V6), 16)
        }
        Field::Payload { base: base::NETWORK, offset: 9 | 6, length: 1 } => (Selector::Protocol, 1),
        Field::Payload { base: base::TRANSPORT, offset: 0, length: 2 } => (Selector::SourcePort, 2),
        Field::Payload { base: base::TRANSPORT, offset: 2, length: 2 } => (Selector::DestinationPort, 2),
        Field::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 } => (Selector::TcpFlags, 1),
        Field::Meta(_)
        | Field::Ct(_)
        | Field::CtOneWay(..)
        | Field::Payload { .. }
        | Field::AddressType(_) => return None,
    })
}

/// Whether registers hold it in the machine's order of bytes.
const fn is_host_order(selector: Selector) -> bool {
    match selector {
        Selector::User | Selector::Group | Selector::Mark | Selector::ConnMark | Selector::State => true,
        Selector::Family
        | Selector::Protocol
        | Selector::Source(_)
        | Selector::Destination(_)
        | Selector::SourcePort
        | Selector::DestinationPort
        | Selector::InInterface
        | Selector::OutInterface
        | Selector::Direction
        | Selector::TcpFlags => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::loaded::Origin, *};

    /// Bytes that are in the network's order already are in none after they were turned round.
    #[test]
    fn only_what_is_in_the_machines_order_can_be_brought_into_the_networks() {
        let port = Field::Payload { base: base::TRANSPORT, offset: 2, length: 2 };
        for (field, selector, is_host_order) in
            [(Field::Meta(meta::MARK), Selector::Mark, true), (port, Selector::DestinationPort, false)]
        {
            let part = |bits: Bits<'_>| {
                let part = KeyPart::of(&Loaded { origin: Origin::Field(field), bits })?;
                Some((part.selector, part.is_host_order))
            };
            assert_eq!(part(Bits::All), Some((selector, is_host_order)));
            assert_eq!(part(Bits::NetworkOrder), is_host_order.then_some((selector, false)));
            assert_eq!(part(Bits::Masked(&[0xff; 4])), None);
            assert_eq!(part(Bits::Unknown), None);
        }
    }
}
