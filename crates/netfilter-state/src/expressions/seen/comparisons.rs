//! What a rule compares with a value.

use super::{
    super::{
        abi::{self, base, ct, ethertype, meta, status},
        expression::{DESTINATION_PORT, SOURCE_PORT, TCP_FLAGS, end_at},
        reading::{Bits, Field, KeyPart, Loaded, ValueOrigin, negated},
        wire::big_endian,
    },
    LOCAL_TYPE, number, port,
};
use crate::ruleset::{Condition, Endpoint, Selector, SetLookup, StateBits};
use ipnet::IpNet;
use redirect_core::{
    rule::{Equality, Match, Protocol},
    values::{Family, InterfaceName, PortRange},
};
use std::iter;

/// Operators of comparisons of order.
const LESS: u32 = 2;
const AT_MOST: u32 = 3;
const MORE: u32 = 4;
const AT_LEAST: u32 = 5;
/// The index of `lo` (`LOOPBACK_IFINDEX`).
const LOOPBACK_INDEX: u32 = 1;
/// Where IPv4 has the number of the transport protocol.
const PROTOCOL: u32 = 9;
/// Where IPv6 has the number of the first header behind its own.
pub(super) const FIRST_HEADER: u32 = 6;

/// What a comparison with a range says.
pub(crate) fn ranged(loaded: &Loaded<'_>, operator: u32, from: &[u8], to: &[u8]) -> Option<[Condition; 1]> {
    let not = negated(operator)?;
    let part = KeyPart::of(loaded)?;
    if from.len().max(to.len()) > loaded.width {
        return None;
    }
    Some([within(part.selector, part.range(from, to)?, not)])
}

/// What a comparison of order says.
fn ordered(loaded: &Loaded<'_>, operator: u32, value: &[u8]) -> Option<Condition> {
    let part = KeyPart::of(loaded)?;
    let ((number, _), (least, most)) = (part.range(value, value)?, part.every());
    if part.is_host_order() {
        return None;
    }
    let range = match operator {
        LESS => (least, number.checked_sub(1)?),
        AT_MOST => (least, number),
        MORE => (number.checked_add(1)?, most),
        _ => (number, most),
    };
    (range.0 <= range.1).then(|| within(part.selector, range, false))
}

/// A value between two others, both included.
fn within(selector: Selector, range: (u128, u128), not: bool) -> Condition {
    let port = |number: u128| u16::try_from(number).ok();
    let ports = port(range.0).zip(port(range.1)).and_then(|(first, last)| PortRange::new(first, last));
    match (selector, ports) {
        (Selector::SourcePort, Some(value)) => Condition::Plain(Match::SourcePort(Equality { value, not })),
        (Selector::DestinationPort, Some(value)) => {
            Condition::Plain(Match::DestinationPort(Equality { value, not }))
        }
        _ => Condition::Among(Equality { value: SetLookup::range(selector, range), not }),
    }
}

/// What a comparison of a register with a value says.
pub(crate) fn compared(
    loaded: &Loaded<'_>,
    operator: u32,
    value: &[u8],
    family: Option<Family>,
) -> Option<Vec<Condition>> {
    let ValueOrigin::Field(field) = loaded.origin else { return None };
    // Behind what was loaded the register holds something else.
    if value.len() > loaded.width {
        return None;
    }
    match loaded.bits {
        Bits::All | Bits::NetworkOrder if matches!(operator, LESS | AT_MOST | MORE | AT_LEAST) => {
            Some([ordered(loaded, operator, value)?].into())
        }
        Bits::All => field_is(field, negated(operator)?, value, family),
        Bits::Masked(mask) => Some([masked_is(field, mask, negated(operator)?, value, family)?].into()),
        Bits::NetworkOrder => ranged(loaded, operator, value, value).map(Vec::from),
        Bits::Flipped { .. } | Bits::Unknown => None,
    }
}

fn field_is(field: Field, not: bool, value: &[u8], family: Option<Family>) -> Option<Vec<Condition>> {
    if let Field::Payload { base: base::TRANSPORT, offset: SOURCE_PORT, length: 4 } = field
        && !not
    {
        return Some(both_ports(value)?.map(Condition::Plain).into());
    }
    let condition = match field {
        // An extension header may come before the transport's.
        Field::Payload { base: base::NETWORK, offset: FIRST_HEADER, length: 1 } => {
            let unknown = Condition::Unknown("ip6 nexthdr".into());
            let is = if not { None } else { Some(protocol(*value.first()?, false)) };
            return Some(is.into_iter().chain([unknown]).collect());
        }
        // All bits of what is asked by bits, too.
        Field::Meta(meta::MARK)
        | Field::Ct(ct::MARK)
        | Field::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 }
        | Field::Payload { base: base::NETWORK, .. } => {
            masked_is(field, [u8::MAX; 16].get(..value.len())?, not, value, family)?
        }
        Field::Meta(key) => meta_is(key, not, value)?,
        // One of the kernel's bits; a connection is in one state.
        Field::Ct(ct::STATE) => {
            let value = states(value).filter(|value| value.count_ones() == 1)?;
            Condition::State(Equality { value, not })
        }
        Field::Ct(ct::DIRECTION) => Condition::IsReply(match *value.first()? {
            abi::direction::ORIGINAL => not,
            abi::direction::REPLY => !not,
            _ => return None,
        }),
        Field::Payload { base: base::TRANSPORT, offset: SOURCE_PORT | DESTINATION_PORT, length: 2 } => {
            let port = u128::from(port(value)?);
            within(field.selected()?, (port, port), not)
        }
        Field::AddressType(end) if number(value)? == LOCAL_TYPE => {
            Condition::Local(Equality { value: end, not })
        }
        Field::Ct(_) | Field::CtOneWay(..) | Field::Payload { .. } | Field::AddressType(_) => return None,
    };
    Some([condition].into())
}

/// States that the kernel knows, and no others.
fn states(value: &[u8]) -> Option<u32> {
    const KNOWN: u32 = StateBits::INVALID
        | StateBits::ESTABLISHED
        | StateBits::RELATED
        | StateBits::NEW
        | StateBits::UNTRACKED;
    number(value).filter(|value| value & !KNOWN == 0)
}

/// Both ports, compared at once.
fn both_ports(value: &[u8]) -> Option<[Match; 2]> {
    let [a, b, c, d] = <[u8; 4]>::try_from(value).ok()?;
    let is = |bytes| Equality::equals(PortRange::single(u16::from_be_bytes(bytes)));
    Some([Match::SourcePort(is([a, b])), Match::DestinationPort(is([c, d]))])
}

fn masked_is(
    field: Field,
    mask: &[u8],
    not: bool,
    value: &[u8],
    family: Option<Family>,
) -> Option<Condition> {
    let bits = || Some((number(mask)?, Equality { value: number(value)?, not }));
    match field {
        Field::Payload { base: base::NETWORK, offset, .. } if mask.len() == value.len() => {
            address((offset, family), not, value, prefix_of(mask)?)
        }
        Field::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 } => {
            Some(Condition::TcpFlags { mask: *mask.first()?, is: Equality { value: *value.first()?, not } })
        }
        Field::Meta(meta::MARK) => bits().map(|(mask, is)| Condition::MarkBits { mask, is }),
        Field::Ct(ct::MARK) => bits().map(|(mask, is)| Condition::ConnMarkBits { mask, is }),
        Field::Ct(ct::STATUS) => {
            let (mask, is) = bits()?;
            let end = match mask {
                status::SOURCE_TRANSLATED => Endpoint::Source,
                status::DESTINATION_TRANSLATED => Endpoint::Destination,
                _ => return None,
            };
            let not = if is.value == mask { not } else { !not };
            (is.value == 0 || is.value == mask).then_some(Condition::Translated(Equality { value: end, not }))
        }
        // Compared with 0: none of these states, or with `!=` one of them.
        Field::Ct(ct::STATE) if value == [0; 4] => {
            Some(Condition::State(Equality { value: states(mask)?, not: !not }))
        }
        Field::Meta(_)
        | Field::Ct(_)
        | Field::CtOneWay(..)
        | Field::Payload { .. }
        | Field::AddressType(_) => None,
    }
}

fn meta_is(key: u32, not: bool, value: &[u8]) -> Option<Condition> {
    let id = || number(value).map(|value| Equality { value, not });
    let family = |value: Family| Condition::Family(Equality { value, not });
    let name = || interface(value).map(|value| Equality { value, not });
    // The first interface of every network namespace.
    let lo = || {
        let value = if number(value)? == LOOPBACK_INDEX { "lo".parse().ok() } else { None };
        Some(Equality { value: value?, not })
    };
    Some(match key {
        meta::FAMILY => family(abi::family_of(*value.first()?)?),
        meta::ETHERTYPE => family(match <[u8; 2]>::try_from(value).ok()? {
            ethertype::IPV4 => Family::V4,
            ethertype::IPV6 => Family::V6,
            _ => return None,
        }),
        meta::PROTOCOL => protocol(*value.first()?, not),
        meta::IN_INTERFACE => Condition::Plain(Match::InInterface(name()?)),
        meta::OUT_INTERFACE => Condition::Plain(Match::OutInterface(name()?)),
        meta::IN_INDEX => Condition::Plain(Match::InInterface(lo()?)),
        meta::OUT_INDEX => Condition::Plain(Match::OutInterface(lo()?)),
        meta::SOCKET_USER => Condition::Plain(Match::OwnerUid(id()?)),
        meta::SOCKET_GROUP => Condition::Plain(Match::OwnerGid(id()?)),
        _ => return None,
    })
}

pub(crate) fn protocol(number: u8, not: bool) -> Condition {
    let known = [Protocol::Tcp, Protocol::Udp].into_iter().find(|known| known.number() == number);
    match known {
        Some(protocol) if !not => Condition::Plain(Match::Protocol(protocol)),
        Some(_) | None => Condition::Protocol(Equality { value: number, not }),
    }
}

/// A name with a NUL behind it is a whole one, without it the beginning of names.
pub(crate) fn interface(value: &[u8]) -> Option<InterfaceName> {
    let end = value.iter().position(|byte| *byte == 0);
    let name = std::str::from_utf8(value.get(..end.unwrap_or(value.len()))?).ok()?;
    let whole =
        end.is_some_and(|end| value.get(end..).is_some_and(|rest| rest.iter().all(|byte| *byte == 0)));
    match (whole, end) {
        (true, _) => name.parse().ok(),
        (false, Some(_)) => None,
        (false, None) => {
            let mut beginning = String::from(name);
            beginning.push('+');
            beginning.parse().ok()
        }
    }
}

/// What the first bytes of a header's field were compared with: of an address as many as its prefix has, or the transport protocol. Where the field
/// begins says which it is, once the family is known: where IPv6 has the source, IPv4 has the time to live.
pub(crate) fn address(
    (offset, family): (u32, Option<Family>),
    not: bool,
    value: &[u8],
    prefix: u8,
) -> Option<Condition> {
    let family = family?;
    if (offset, value.len(), prefix, family) == (PROTOCOL, 1, 8, Family::V4) {
        return Some(protocol(*value.first()?, not));
    }
    let end = end_at(offset, family)?;
    let length = Selector::Source(family).length() as usize;
    if value.is_empty() || value.len() > length {
        return None;
    }
    let octets = value.iter().copied().chain(iter::repeat(0)).take(length);
    let net = IpNet::new(family.address(big_endian(octets)), prefix).ok()?;
    // What a mask has cleared equals nothing but 0.
    let is = Equality { value: Some(net).filter(|net| *net == net.trunc())?, not };
    Some(Condition::Plain(match end {
        Endpoint::Source => Match::Source(is),
        Endpoint::Destination => Match::Destination(is),
    }))
}

/// The prefix length of an address's mask whose set bits come first.
pub(crate) fn prefix_of(mask: &[u8]) -> Option<u8> {
    let bits = big_endian(mask.iter().copied().chain(iter::repeat(0)).take(16));
    (bits.count_ones() == bits.leading_ones()).then(|| u8::try_from(bits.count_ones()).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_understood_where_they_are_compared_with_none() {
        let seen = |value: [u8; 4], not: bool| {
            masked_is(Field::Ct(ct::STATE), &8_u32.to_ne_bytes(), not, &value, None)
                .map(|one| one.to_string())
        };
        assert_eq!(seen([0; 4], true).as_deref(), Some("-m conntrack --ctstate NEW"));
        assert_eq!(seen([0; 4], false).as_deref(), Some("-m conntrack ! --ctstate NEW"));
        assert_eq!(seen(8_u32.to_ne_bytes(), false), None);
    }

    #[test]
    fn a_field_is_that_of_its_family() {
        let seen = |offset: u32, length: usize, family: Option<Family>| {
            let prefix = u8::try_from(8 * length).unwrap();
            address((offset, family), false, &[6; 16][..length], prefix).map(|one| one.to_string())
        };
        let (v4, v6) = (Some(Family::V4), Some(Family::V6));
        let six = "606:606:606:606:606:606:606:606";
        for (offset, length, of_v4, of_v6) in [
            (12, 4, Some("-s 6.6.6.6/32"), None),
            (16, 2, Some("-d 6.6.0.0/16"), None),
            (9, 1, Some("-p tcp"), None),
            (6, 1, None, None),
            (8, 16, None, Some(&*format!("-s {six}/128"))),
            (24, 16, None, Some(&*format!("-d {six}/128"))),
            (8, 2, None, Some("-s 606::/16")),
            (24, 2, None, Some("-d 606::/16")),
            (12, 5, None, None),
            (10, 4, None, None),
        ] {
            let told = [v4, v6, None].map(|family| seen(offset, length, family));
            assert_eq!(told.each_ref().map(Option::as_deref), [of_v4, of_v6, None], "{offset} {length}");
        }
        let masked = |prefix| address((9, v4), false, &[6], prefix);
        assert!(masked(8).is_some() && masked(4).is_none(), "part of the protocol");
    }

    #[test]
    fn part_of_an_address_is_not_taken_for_all_of_it() {
        let source = Field::Payload { base: base::NETWORK, offset: 12, length: 4 };
        let seen =
            |mask: &[u8], value: &[u8]| masked_is(source, mask, false, value, Some(Family::V4)).is_some();
        assert!(seen(&[255, 0, 0, 0], &[10, 0, 0, 0]));
        assert!(!seen(&[255], &[10, 0, 0, 0]));
        assert!(!seen(&[255, 0, 0, 0], &[10, 1, 0, 0]), "what the mask has cleared is 0");
        assert!(!seen(&[0; 4], &[1, 0, 0, 0]));
        assert!(!seen(&[255, 0, 0, 0], &[10]));
    }
}
