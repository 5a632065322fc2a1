//! Expressions read back into a rule: those of our encoder, of iptables-nft of any version, and nf_tables' own where they say
//! the same.

use super::{
    abi::{attribute, base, ct, direction, meta, operator, register, verdict},
    expression::{AddressOffset, DESTINATION_PORT, SOURCE_PORT, TCP_FLAGS},
    wire::{Attribute, Attributes, read_array},
    xt,
};
use crate::{
    rule::{Chain, Direction, Is, Match, Protocol, Rule, Target, TcpFlags},
    values::{Family, InterfaceName, Mark, MaskedMark, Port, PortRange},
};
use alloc::{collections::BTreeMap, string::String, vec::Vec};
use core::net::{Ipv4Addr, Ipv6Addr};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Reads the expressions of a rule; `None` for a rule that none of ours can be.
pub(super) fn rule(expressions: Attributes<'_>, family: Family) -> Option<Rule> {
    let mut reader =
        Reader { family, direction: None, registers: BTreeMap::new(), matches: Vec::new(), target: None };
    for (_, element) in expressions {
        let (name, data) = expression(element)?;
        // Behind the target nothing more can happen.
        if reader.target.is_some() {
            return None;
        }
        reader.expression(name, data)?;
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

/// The name of an expression and its attributes.
pub(super) fn expression(element: Attribute<'_>) -> Option<(&str, Attributes<'_>)> {
    let attributes = element.attributes();
    let data = attributes.find(attribute::expression::DATA).unwrap_or(Attribute(&[]));
    Some((attributes.find(attribute::expression::NAME)?.text()?, data.attributes()))
}

/// The chain a rule jumps or goes to.
pub(super) fn jump_of(expressions: Attributes<'_>) -> Option<&str> {
    expressions.filter_map(|(_, element)| expression(element)).find_map(|(name, data)| {
        let verdict = (name == "immediate").then(|| data.find(attribute::immediate::DATA)).flatten()?;
        let verdict = verdict.attributes().find(attribute::data::VERDICT)?;
        verdict.attributes().find(attribute::verdict::CHAIN)?.text()
    })
}

/// What can be loaded into a register.
#[derive(Debug, Clone, Copy)]
enum Field {
    Meta(u32),
    Ct(u32),
    Payload { base: u32, offset: u32, length: u32 },
}

/// What a register holds.
#[derive(Debug, Clone)]
enum Loaded {
    Field(Field),
    /// Some of a field's bits.
    Masked(Field, Vec<u8>),
    /// The connection's mark with some bits set anew.
    Remarked(MaskedMark),
    Value(Vec<u8>),
}

struct Reader {
    family: Family,
    /// A direction that belongs to the state that follows.
    direction: Option<Direction>,
    registers: BTreeMap<u32, Loaded>,
    matches: Vec<Match>,
    target: Option<Target>,
}

impl Reader {
    fn expression(&mut self, name: &str, data: Attributes<'_>) -> Option<()> {
        let u32_of = |kind| data.find(kind).and_then(Attribute::u32);
        match name {
            "counter" => {}
            "meta" => self.meta(data)?,
            "ct" => self.ct(data)?,
            "payload" => {
                let loaded = Field::Payload {
                    base: u32_of(attribute::payload::BASE)?,
                    offset: u32_of(attribute::payload::OFFSET)?,
                    length: u32_of(attribute::payload::LENGTH)?,
                };
                self.registers.insert(u32_of(attribute::payload::DESTINATION)?, Loaded::Field(loaded));
            }
            "bitwise" => self.bitwise(data)?,
            "cmp" => {
                let not = negated(u32_of(attribute::cmp::OPERATOR)?)?;
                let value = value_of(data, attribute::cmp::DATA)?;
                let loaded = self.registers.get(&u32_of(attribute::cmp::REGISTER)?)?.clone();
                self.compared(&loaded, not, value)?;
            }
            "range" => {
                let not = negated(u32_of(attribute::range::OPERATOR)?)?;
                let (from, to) =
                    (value_of(data, attribute::range::FROM)?, value_of(data, attribute::range::TO)?);
                let loaded = self.registers.get(&u32_of(attribute::range::REGISTER)?)?;
                let found = port_range(loaded, not, PortRange::new(port(from)?, port(to)?)?)?;
                self.matches.push(found);
            }
            "immediate" => self.immediate(data)?,
            "match" => {
                let (name, revision, info) = extension(data)?;
                self.matches.extend(xt::decode_match(name, revision, info)?);
            }
            "target" => {
                let (name, revision, info) = extension(data)?;
                self.target = Some(xt::decode_target(name, revision, info, self.family)?);
            }
            "redir" => {
                let first = u32_of(attribute::redir::FIRST_PORT)?;
                let last = u32_of(attribute::redir::LAST_PORT).unwrap_or(first);
                let plain =
                    u32_of(attribute::redir::FLAGS).is_none_or(|flags| flags == super::abi::PORTS_GIVEN);
                let Loaded::Value(value) = self.registers.get(&first)? else { return None };
                self.target = (first == last && plain)
                    .then(|| port(value).and_then(Port::new).map(Target::Redirect))
                    .flatten();
                self.target.as_ref()?;
            }
            _ => return None,
        }
        Some(())
    }

    fn compared(&mut self, loaded: &Loaded, not: bool, value: &[u8]) -> Option<()> {
        if let Loaded::Field(Field::Ct(ct::DIRECTION)) = loaded {
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

    fn meta(&mut self, data: Attributes<'_>) -> Option<()> {
        let key = data.find(attribute::meta::KEY)?.u32()?;
        if let Some(to) = data.find(attribute::meta::DESTINATION) {
            self.registers.insert(to.u32()?, Loaded::Field(Field::Meta(key)));
            return Some(());
        }
        let source = data.find(attribute::meta::SOURCE)?.u32()?;
        self.target = match (key, self.registers.get(&source)?) {
            (meta::MARK, Loaded::Value(value)) => Some(Target::SetMark(mark(value)?)),
            (meta::MARK, Loaded::Field(Field::Ct(ct::MARK))) => Some(Target::RestoreMark),
            _ => return None,
        };
        Some(())
    }

    fn ct(&mut self, data: Attributes<'_>) -> Option<()> {
        let key = data.find(attribute::ct::KEY)?.u32()?;
        if let Some(to) = data.find(attribute::ct::DESTINATION) {
            self.registers.insert(to.u32()?, Loaded::Field(Field::Ct(key)));
            return Some(());
        }
        let source = data.find(attribute::ct::SOURCE)?.u32()?;
        self.target = match (key, self.registers.get(&source)?) {
            (ct::MARK, Loaded::Field(Field::Meta(meta::MARK))) => Some(Target::SaveMark),
            (ct::MARK, Loaded::Value(value)) => Some(Target::SetConnMark(mark(value)?.into())),
            (ct::MARK, Loaded::Remarked(mark)) => Some(Target::SetConnMark(*mark)),
            (ct::ZONE, Loaded::Value(value)) => {
                Some(Target::ConntrackZone(u16::from_ne_bytes(value.first_chunk().copied()?)))
            }
            _ => return None,
        };
        Some(())
    }

    fn bitwise(&mut self, data: Attributes<'_>) -> Option<()> {
        let register = |kind| data.find(kind).and_then(Attribute::u32);
        let mask = value_of(data, attribute::bitwise::MASK)?;
        let flip = value_of(data, attribute::bitwise::XOR)?;
        let Loaded::Field(field) = *self.registers.get(&register(attribute::bitwise::SOURCE)?)? else {
            return None;
        };
        let loaded = match field {
            _ if flip.iter().all(|byte| *byte == 0) => Loaded::Masked(field, mask.to_vec()),
            Field::Ct(ct::MARK) => Loaded::Remarked(MaskedMark::new(number(flip)?, !number(mask)?)?),
            Field::Ct(_) | Field::Meta(_) | Field::Payload { .. } => return None,
        };
        self.registers.insert(register(attribute::bitwise::DESTINATION)?, loaded);
        Some(())
    }

    fn immediate(&mut self, data: Attributes<'_>) -> Option<()> {
        let to = data.find(attribute::immediate::REGISTER)?.u32()?;
        let content = data.find(attribute::immediate::DATA)?.attributes();
        if to != register::VERDICT {
            let value = content.find(attribute::data::VALUE)?.0.to_vec();
            self.registers.insert(to, Loaded::Value(value));
            return Some(());
        }
        let decision = content.find(attribute::data::VERDICT)?.attributes();
        self.target = Some(match decision.find(attribute::verdict::CODE)?.u32()? {
            verdict::ACCEPT => Target::Accept,
            verdict::DROP => Target::Drop,
            verdict::RETURN => Target::Return,
            verdict::JUMP => {
                let chain = Chain::named(decision.find(attribute::verdict::CHAIN)?.text()?);
                // Jumps of others are not understood, as in the text of iptables-save.
                chain.belongs_to_mesh().then_some(Target::Jump(chain))?
            }
            _ => return None,
        });
        Some(())
    }
}

/// The name, revision and structure of an xt match or target.
pub(super) fn extension(data: Attributes<'_>) -> Option<(&str, u32, &[u8])> {
    let name = data.find(attribute::xt::NAME)?.text()?;
    Some((name, data.find(attribute::xt::REVISION)?.u32()?, data.find(attribute::xt::INFO)?.0))
}

pub(super) const fn negated(operator: u32) -> Option<bool> {
    match operator {
        operator::EQUAL => Some(false),
        operator::NOT_EQUAL => Some(true),
        _ => None,
    }
}

pub(super) fn value_of(data: Attributes<'_>, kind: u16) -> Option<&[u8]> {
    Some(data.find(kind)?.attributes().find(attribute::data::VALUE)?.0)
}

pub(super) fn port(value: &[u8]) -> Option<u16> {
    <[u8; 2]>::try_from(value).ok().map(u16::from_be_bytes)
}

fn number(value: &[u8]) -> Option<u32> {
    <[u8; 4]>::try_from(value).ok().map(u32::from_ne_bytes)
}

fn mark(value: &[u8]) -> Option<Mark> {
    number(value).and_then(xt::mark)
}

/// What a comparison of a register with a value says.
fn compared(loaded: &Loaded, not: bool, value: &[u8], family: Family) -> Option<Vec<Match>> {
    let one = |condition| Some([condition].into());
    match loaded {
        Loaded::Field(Field::Meta(key)) => meta_is(*key, not, value).and_then(one),
        Loaded::Field(Field::Ct(ct::MARK)) => one(Match::ConnMark(Is { value: mark(value)?.into(), not })),
        Loaded::Field(Field::Ct(_)) | Loaded::Value(_) | Loaded::Remarked(_) => None,
        Loaded::Field(Field::Payload { base: base::TRANSPORT, offset: SOURCE_PORT, length: 4 }) if !not => {
            let [a, b, c, d] = <[u8; 4]>::try_from(value).ok()?;
            let is = |bytes| Is::equals(PortRange::single(u16::from_be_bytes(bytes)));
            Some([Match::SourcePort(is([a, b])), Match::DestinationPort(is([c, d]))].into())
        }
        Loaded::Field(Field::Payload { base: base::TRANSPORT, .. }) => {
            one(port_range(loaded, not, PortRange::single(port(value)?))?)
        }
        Loaded::Field(Field::Payload { base: base::NETWORK, offset, length }) => {
            let prefix = u8::try_from(value.len().checked_mul(8)?).ok()?;
            (usize::try_from(*length).ok()? == value.len()).then_some(())?;
            address(*offset, not, value, prefix, family).and_then(one)
        }
        Loaded::Field(Field::Payload { .. }) => None,
        Loaded::Masked(Field::Payload { base: base::NETWORK, offset, .. }, mask) => {
            (mask.len() == value.len()).then_some(())?;
            address(*offset, not, value, prefix_of(mask)?, family).and_then(one)
        }
        Loaded::Masked(Field::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 }, mask) => {
            let ([mask], [set]) = (mask.as_slice(), value) else { return None };
            one(Match::TcpFlags(Is { value: TcpFlags::new(*mask, *set)?, not }))
        }
        Loaded::Masked(Field::Meta(meta::MARK), mask) if *mask == [0xff; 4] => {
            one(Match::Mark(Is { value: mark(value)?, not }))
        }
        Loaded::Masked(Field::Ct(ct::MARK), mask) => {
            one(Match::ConnMark(Is { value: MaskedMark::new(number(value)?, number(mask)?)?, not }))
        }
        Loaded::Masked(Field::Ct(ct::STATE), mask) if not && value.iter().all(|byte| *byte == 0) => {
            one(Match::Tracked(xt::conn_state(number(mask)?)?.into()))
        }
        Loaded::Masked(..) => None,
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

fn port_range(loaded: &Loaded, not: bool, value: PortRange) -> Option<Match> {
    let Loaded::Field(Field::Payload { base: base::TRANSPORT, offset, length: 2 }) = loaded else {
        return None;
    };
    match *offset {
        SOURCE_PORT => Some(Match::SourcePort(Is { value, not })),
        DESTINATION_PORT => Some(Match::DestinationPort(Is { value, not })),
        _ => None,
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
