//! Expressions read back into a rule: those of our encoder, of iptables-nft of any version, and nf_tables' own where they say
//! the same.

use super::{
    abi::{PORTS_GIVEN, base, ct, direction, meta, verdict},
    expression::{AddressOffset, DESTINATION_PORT, SOURCE_PORT, TCP_FLAGS},
    reading::{Bits, Expression, Field, Loaded, Origin, Registers, Xt, negated},
    wire::{Attributes, read_array},
    xt,
};
use crate::{
    rule::{Chain, Direction, Is, Match, Protocol, Rule, Target, TcpFlags},
    values::{Family, InterfaceName, Mark, MaskedMark, Port, PortRange},
};
use alloc::{string::String, vec::Vec};
use core::net::{Ipv4Addr, Ipv6Addr};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Reads the expressions of a rule; `None` for a rule that none of ours can be.
pub(super) fn rule(expressions: Attributes<'_>, family: Family) -> Option<Rule> {
    let mut reader = Reader {
        family,
        direction: None,
        registers: Registers::default(),
        matches: Vec::new(),
        target: None,
    };
    for (_, element) in expressions {
        let expression = Expression::read(element)?;
        // Behind the target nothing more can happen.
        if reader.target.is_some() {
            return None;
        }
        reader.expression(expression)?;
    }
    if reader.direction.is_some() {
        return None;
    }
    let rule = Rule { matches: reader.matches, target: reader.target? }.canonical();
    // Ports without a protocol would read as something else; flags are TCP's.
    let has_flags = || rule.matches.iter().any(|m| matches!(m, Match::TcpFlags(_)));
    let understood = match rule.protocol() {
        None => !rule.matches.iter().any(Match::is_of_protocol),
        Some(Protocol::Tcp) => true,
        Some(Protocol::Udp) => !has_flags(),
    };
    understood.then_some(rule)
}

struct Reader<'a> {
    family: Family,
    /// A direction that belongs to the state that follows.
    direction: Option<Direction>,
    registers: Registers<'a>,
    matches: Vec<Match>,
    target: Option<Target>,
}

impl<'a> Reader<'a> {
    fn expression(&mut self, expression: Expression<'a>) -> Option<()> {
        match expression {
            Expression::Counter => {}
            Expression::Load { to, field } => self.registers.load(to, field),
            Expression::Value { to, value } => self.registers.set(to, value),
            Expression::Bitwise { from, to, mask, flip, .. } => {
                self.registers.change(from, to, mask, flip)?;
            }
            Expression::Compare { register, operator, value } => {
                let loaded = self.registers.get(register)?;
                self.compared(&loaded, negated(operator)?, value)?;
            }
            Expression::Range { register, operator, from, to } => {
                let loaded = self.registers.get(register)?;
                let is = Is { value: PortRange::new(port(from)?, port(to)?)?, not: negated(operator)? };
                self.matches.push(ports(loaded.field()?, is)?);
            }
            Expression::Store { field, from } => {
                self.target = Some(stored(field, &self.registers.get(from?)?)?);
            }
            Expression::Verdict { code, chain } => self.target = Some(decided(code, chain)?),
            Expression::Match(Xt { name, revision, info }) => {
                self.matches.extend(xt::decode_match(name, revision, info)?);
            }
            Expression::Target(Xt { name, revision, info }) => {
                self.target = Some(xt::decode_target(name, revision, info, self.family)?);
            }
            Expression::Redirect { first, last, flags: None | Some(PORTS_GIVEN) } => {
                let value = self.registers.port(first, last)?;
                self.target = Some(Target::Redirect(port(value).and_then(Port::new)?));
            }
            Expression::Redirect { .. }
            | Expression::Byteorder { .. }
            | Expression::Tproxy { .. }
            | Expression::Write { .. }
            | Expression::Lookup(_)
            | Expression::Other { .. } => return None,
        }
        Some(())
    }

    fn compared(&mut self, loaded: &Loaded<'_>, not: bool, value: &[u8]) -> Option<()> {
        if loaded.field() == Some(Field::Ct(ct::DIRECTION)) {
            let found = match (value, not) {
                ([direction::ORIGINAL], false) => Direction::Original,
                ([direction::REPLY], false) => Direction::Reply,
                _ => return None,
            };
            return self.direction.replace(found).is_none().then_some(());
        }
        let mut found = compared(loaded, not, value, self.family)?;
        if let [Match::Tracked(tracked)] = found.as_mut_slice() {
            tracked.direction = self.direction.take();
        }
        self.matches.extend(found);
        Some(())
    }
}

/// What storing something in a field does.
fn stored(field: Field, from: &Loaded<'_>) -> Option<Target> {
    let whole = (field, from.field(), from.value());
    Some(match (whole, from.origin, from.bits) {
        ((Field::Meta(meta::MARK), _, Some(value)), ..) => Target::SetMark(mark(value)?),
        ((Field::Meta(meta::MARK), Some(Field::Ct(ct::MARK)), _), ..) => Target::RestoreMark,
        ((Field::Ct(ct::MARK), Some(Field::Meta(meta::MARK)), _), ..) => Target::SaveMark,
        ((Field::Ct(ct::MARK), _, Some(value)), ..) => Target::SetConnMark(mark(value)?.into()),
        ((Field::Ct(ct::ZONE), _, Some(value)), ..) => {
            Target::ConntrackZone(u16::from_ne_bytes(value.first_chunk().copied()?))
        }
        ((Field::Ct(ct::MARK), ..), Origin::Field(Field::Ct(ct::MARK)), Bits::Flipped { mask, flip }) => {
            Target::SetConnMark(set_bits(mask, flip)?)
        }
        _ => return None,
    })
}

/// The bits that keeping those of the mask and flipping others sets.
fn set_bits(mask: &[u8], flip: &[u8]) -> Option<MaskedMark> {
    MaskedMark::new(number(flip)?, !number(mask)?)
}

fn decided(code: u32, chain: Option<&str>) -> Option<Target> {
    match code {
        verdict::ACCEPT => Some(Target::Accept),
        verdict::DROP => Some(Target::Drop),
        verdict::RETURN => Some(Target::Return),
        verdict::JUMP => {
            let chain = Chain::named(chain?);
            // Jumps of others are not understood, as in the text of iptables-save.
            chain.belongs_to_mesh().then_some(Target::Jump(chain))
        }
        _ => None,
    }
}

pub(super) fn port(value: &[u8]) -> Option<u16> {
    <[u8; 2]>::try_from(value).ok().map(u16::from_be_bytes)
}

pub(super) fn number(value: &[u8]) -> Option<u32> {
    <[u8; 4]>::try_from(value).ok().map(u32::from_ne_bytes)
}

fn mark(value: &[u8]) -> Option<Mark> {
    number(value).and_then(xt::mark)
}

/// What a comparison of a register with a value says.
fn compared(loaded: &Loaded<'_>, not: bool, value: &[u8], family: Family) -> Option<Vec<Match>> {
    let Origin::Field(field) = loaded.origin else { return None };
    match loaded.bits {
        Bits::All => field_is(field, not, value, family),
        Bits::Masked(mask) => Some([masked_is(field, mask, not, value, family)?].into()),
        Bits::Flipped { .. } | Bits::NetworkOrder | Bits::Unknown => None,
    }
}

fn field_is(field: Field, not: bool, value: &[u8], family: Family) -> Option<Vec<Match>> {
    let one = |condition| Some([condition].into());
    match field {
        Field::Meta(key) => meta_is(key, not, value).and_then(one),
        Field::Ct(ct::MARK) => one(Match::ConnMark(Is { value: mark(value)?.into(), not })),
        Field::Payload { base: base::TRANSPORT, offset: SOURCE_PORT, length: 4 } if !not => {
            Some(both_ports(value)?.into())
        }
        Field::Payload { base: base::TRANSPORT, .. } => {
            ports(field, Is { value: PortRange::single(port(value)?), not }).and_then(one)
        }
        Field::Payload { base: base::NETWORK, offset, length } => {
            let prefix = u8::try_from(value.len().checked_mul(8)?).ok()?;
            (usize::try_from(length).ok()? == value.len()).then_some(())?;
            address(offset, not, value, prefix, family).and_then(one)
        }
        Field::Ct(_) | Field::CtOneWay(..) | Field::Payload { .. } | Field::AddressType(_) => None,
    }
}

/// Both ports, compared at once.
pub(super) fn both_ports(value: &[u8]) -> Option<[Match; 2]> {
    let [a, b, c, d] = <[u8; 4]>::try_from(value).ok()?;
    let is = |bytes| Is::equals(PortRange::single(u16::from_be_bytes(bytes)));
    Some([Match::SourcePort(is([a, b])), Match::DestinationPort(is([c, d]))])
}

fn masked_is(field: Field, mask: &[u8], not: bool, value: &[u8], family: Family) -> Option<Match> {
    match field {
        Field::Payload { base: base::NETWORK, offset, .. } => {
            (mask.len() == value.len()).then_some(())?;
            address(offset, not, value, prefix_of(mask)?, family)
        }
        Field::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 } => {
            let ([mask], [set]) = (mask, value) else { return None };
            Some(Match::TcpFlags(Is { value: TcpFlags::new(*mask, *set)?, not }))
        }
        Field::Meta(meta::MARK) if *mask == [0xff; 4] => Some(Match::Mark(Is { value: mark(value)?, not })),
        Field::Ct(ct::MARK) => {
            Some(Match::ConnMark(Is { value: MaskedMark::new(number(value)?, number(mask)?)?, not }))
        }
        Field::Ct(ct::STATE) if not && value.iter().all(|byte| *byte == 0) => {
            Some(Match::Tracked(xt::conn_state(number(mask)?)?.into()))
        }
        Field::Meta(_)
        | Field::Ct(_)
        | Field::CtOneWay(..)
        | Field::Payload { .. }
        | Field::AddressType(_) => None,
    }
}

fn meta_is(key: u32, not: bool, value: &[u8]) -> Option<Match> {
    let id = || <[u8; 4]>::try_from(value).ok().map(u32::from_ne_bytes).map(|value| Is { value, not });
    Some(match key {
        meta::PROTOCOL if !not => Match::Protocol(protocol(*value.first()?)?),
        meta::IN_INTERFACE => Match::InInterface(Is { value: interface(value)?, not }),
        meta::OUT_INTERFACE => Match::OutInterface(Is { value: interface(value)?, not }),
        meta::MARK => Match::Mark(Is { value: mark(value)?, not }),
        meta::SOCKET_USER => Match::OwnerUid(id()?),
        meta::SOCKET_GROUP => Match::OwnerGid(id()?),
        _ => return None,
    })
}

fn protocol(number: u8) -> Option<Protocol> {
    [Protocol::Tcp, Protocol::Udp].into_iter().find(|protocol| protocol.number() == number)
}

/// A name with a NUL behind it is a whole one, without it the beginning of names.
pub(super) fn interface(value: &[u8]) -> Option<InterfaceName> {
    let end = value.iter().position(|byte| *byte == 0);
    let name = core::str::from_utf8(value.get(..end.unwrap_or(value.len()))?).ok()?;
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

/// A comparison of a field that holds a port.
pub(super) const fn ports(field: Field, is: Is<PortRange>) -> Option<Match> {
    match field {
        Field::Payload { base: base::TRANSPORT, offset: SOURCE_PORT, length: 2 } => {
            Some(Match::SourcePort(is))
        }
        Field::Payload { base: base::TRANSPORT, offset: DESTINATION_PORT, length: 2 } => {
            Some(Match::DestinationPort(is))
        }
        Field::Meta(_)
        | Field::Ct(_)
        | Field::CtOneWay(..)
        | Field::Payload { .. }
        | Field::AddressType(_) => None,
    }
}

/// An address of which the first bytes were compared.
fn address(offset: u32, not: bool, value: &[u8], prefix: u8, family: Family) -> Option<Match> {
    let mut octets = [0; 16];
    for (to, from) in octets.iter_mut().zip(value) {
        *to = *from;
    }
    let net = match family {
        Family::V4 => {
            let octets: [u8; 4] = read_array(&octets, 0)?;
            IpNet::V4(Ipv4Net::new(Ipv4Addr::from(octets), prefix).ok()?)
        }
        Family::V6 => IpNet::V6(Ipv6Net::new(Ipv6Addr::from(octets), prefix).ok()?),
    };
    // Bits that the mask has cleared can equal nothing but 0.
    (net == net.trunc()).then_some(())?;
    let is = Is { value: net, not };
    let at = AddressOffset(offset);
    if at == AddressOffset::source(family) {
        Some(Match::Source(is))
    } else if at == AddressOffset::destination(family) {
        Some(Match::Destination(is))
    } else {
        None
    }
}

/// The prefix length of a mask whose set bits come first.
pub(super) fn prefix_of(mask: &[u8]) -> Option<u8> {
    let ones: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
    let mut bits = mask.iter().flat_map(|byte| (0..8_u32).rev().map(move |bit| byte.wrapping_shr(bit) & 1));
    let leading = bits.by_ref().take_while(|bit| *bit == 1).count();
    (u32::try_from(leading) == Ok(ones)).then(|| u8::try_from(ones).ok()).flatten()
}
