//! A rule of anybody read expression by expression, so that one that is not understood does not hide the rest.

use super::{
    abi::{self, attribute, base, ct, meta, register, verdict},
    decode::{self, expression, extension, prefix_of, value_of},
    wire::{Attribute, Attributes, read_array},
    xt,
};
use crate::{
    interference::{
        ruleset::{Condition, SeenRule, Statement, state},
        target_named,
    },
    rule::{Is, Match, Protocol},
    values::PortRange,
};
use alloc::{borrow::ToOwned, boxed::Box, collections::BTreeMap, string::String, vec::Vec};
use core::net::{Ipv4Addr, Ipv6Addr};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Operators of comparisons of order.
const LESS: u32 = 2;
const AT_MOST: u32 = 3;
const MORE: u32 = 4;
const AT_LEAST: u32 = 5;
/// `NF_NAT_MANIP_DST` of a nat expression.
const TRANSLATE_DESTINATION: u32 = 1;
/// A goto (`NFT_GOTO`), and handing to a process (`NF_QUEUE` in the low bits).
const GOTO: u32 = 0xffff_fffc;
const QUEUE: u32 = 3;
const VERDICT_MASK: u32 = 0xff;
/// Where TCP's flags stand.
const TCP_FLAGS: u32 = 13;
/// `XT_CT_NOTRACK`.
const XT_NOTRACK: u8 = 1;
/// `XT_CONNTRACK_DIRECTION`.
const XT_DIRECTION: u16 = 1 << 12;
/// Modes of CONNMARK.
const RESTORE_MARK: u8 = 2;

/// Reads the expressions of a rule.
pub(super) fn rule(expressions: Attributes<'_>) -> SeenRule {
    let mut reader = Reader { registers: BTreeMap::new(), rule: SeenRule::default() };
    for (_, element) in expressions {
        let Some((name, data)) = expression(element) else { continue };
        if reader.expression(name, data).is_none() {
            reader.unknown(name, data);
        }
    }
    reader.rule
}

/// What a register holds.
#[derive(Debug, Clone)]
enum Loaded {
    Meta(u32),
    Ct(u32),
    Payload {
        base: u32,
        offset: u32,
        length: u32,
    },
    Masked(Box<Loaded>, Vec<u8>),
    Value(Vec<u8>),
    /// Something else, by its name.
    Other(String),
}

impl Loaded {
    /// What it is called in nft.
    fn name(&self) -> String {
        match self {
            Self::Meta(key) => {
                meta_name(*key).map_or_else(|| alloc::format!("meta {key}"), ToOwned::to_owned)
            }
            Self::Ct(ct::STATE) => "ct state".to_owned(),
            Self::Ct(ct::MARK) => "ct mark".to_owned(),
            Self::Ct(key) => alloc::format!("ct {key}"),
            Self::Payload { base, offset, length } => {
                payload_name(*base, *offset, *length).map_or_else(|| "payload".to_owned(), ToOwned::to_owned)
            }
            Self::Masked(of, _) => of.name(),
            Self::Value(_) => "value".to_owned(),
            Self::Other(name) => name.clone(),
        }
    }
}

const fn meta_name(key: u32) -> Option<&'static str> {
    Some(match key {
        meta::MARK => "meta mark",
        meta::IN_INTERFACE => "iifname",
        meta::OUT_INTERFACE => "oifname",
        meta::SOCKET_USER => "meta skuid",
        meta::SOCKET_GROUP => "meta skgid",
        meta::FAMILY => "meta nfproto",
        meta::PROTOCOL => "meta l4proto",
        4 => "iif",
        5 => "oif",
        _ => return None,
    })
}

const fn payload_name(from: u32, offset: u32, length: u32) -> Option<&'static str> {
    Some(match (from, offset, length) {
        (base::NETWORK, 12, 4) => "ip saddr",
        (base::NETWORK, 16, 4) => "ip daddr",
        (base::NETWORK, 8, 16) => "ip6 saddr",
        (base::NETWORK, 24, 16) => "ip6 daddr",
        (base::TRANSPORT, 0, 2) => "sport",
        (base::TRANSPORT, 2, 2) => "dport",
        (base::TRANSPORT, TCP_FLAGS, 1) => "tcp flags",
        _ => return None,
    })
}

struct Reader {
    registers: BTreeMap<u32, Loaded>,
    rule: SeenRule,
}

impl Reader {
    fn condition(&mut self, condition: Condition) {
        self.rule.conditions.push(condition);
    }

    fn plain(&mut self, condition: Match) {
        self.condition(Condition::Plain(condition));
    }

    fn statement(&mut self, statement: Statement) {
        self.rule.statements.push(statement);
    }

    /// `None` for an expression that is not understood.
    fn expression(&mut self, name: &str, data: Attributes<'_>) -> Option<()> {
        let u32_of = |kind| data.find(kind).and_then(Attribute::u32);
        match name {
            "counter" | "last" => {}
            "log" | "objref" | "dynset" | "dup" | "connlimit_reset" => {
                self.statement(Statement::Harmless(name.to_owned()));
            }
            "meta" => self.meta(data)?,
            "ct" => self.ct(data)?,
            "payload" => self.payload(data)?,
            "bitwise" => self.bitwise(data)?,
            "cmp" => {
                let operator = u32_of(attribute::cmp::OPERATOR)?;
                let value = value_of(data, attribute::cmp::DATA)?;
                let loaded = self.registers.get(&u32_of(attribute::cmp::REGISTER)?)?.clone();
                let condition = compared(&loaded, operator, value)?;
                self.rule.conditions.extend(condition);
            }
            "range" => {
                let not = decode::negated(u32_of(attribute::range::OPERATOR)?)?;
                let from = decode::port(value_of(data, attribute::range::FROM)?)?;
                let to = decode::port(value_of(data, attribute::range::TO)?)?;
                let loaded = self.registers.get(&u32_of(attribute::range::REGISTER)?)?;
                let condition = ports(loaded, Is { value: PortRange::new(from, to)?, not })?;
                self.plain(condition);
            }
            "immediate" => self.immediate(data)?,
            "match" => {
                let (name, revision, info) = extension(data)?;
                let conditions = extension_match(name, revision, info)?;
                self.rule.conditions.extend(conditions);
            }
            "target" => {
                let (name, revision, info) = extension(data)?;
                let statement = extension_target(name, revision, info)
                    .unwrap_or_else(|| Statement::Unknown(alloc::format!("-j {name}")));
                self.statement(statement);
            }
            "nat" => {
                let of_destination = u32_of(1)? == TRANSLATE_DESTINATION;
                self.statement(if of_destination {
                    Statement::Translate("DNAT".to_owned())
                } else {
                    Statement::TranslateSource("SNAT".to_owned())
                });
            }
            "redir" => self.statement(Statement::Translate("REDIRECT".to_owned())),
            "masq" => self.statement(Statement::TranslateSource("MASQUERADE".to_owned())),
            "tproxy" => self.statement(Statement::Tproxy),
            "notrack" => self.statement(Statement::Untrack),
            "queue" => self.statement(Statement::Queue),
            "reject" => self.statement(Statement::Reject),
            "synproxy" | "fwd" | "flow_offload" => self.statement(Statement::Rewrite(name.to_owned())),
            _ => return None,
        }
        Some(())
    }

    /// Something that is not understood: a condition, unless it leaves a verdict.
    fn unknown(&mut self, name: &str, data: Attributes<'_>) {
        let u32_of = |kind| data.find(kind).and_then(Attribute::u32);
        let words = match name {
            "lookup" => {
                let what =
                    u32_of(attribute::lookup::SOURCE).and_then(|register| self.registers.get(&register));
                let what = what.map_or_else(|| "something".to_owned(), Loaded::name);
                if u32_of(attribute::lookup::DESTINATION) == Some(register::VERDICT) {
                    return self.statement(Statement::Unknown(alloc::format!("{what} in a verdict map")));
                }
                alloc::format!("{what} in a set")
            }
            "cmp" | "range" | "bitwise" => {
                // All three begin with the register they look at.
                let what = u32_of(1).and_then(|register| self.registers.get(&register));
                what.map_or_else(|| name.to_owned(), Loaded::name)
            }
            "match" => {
                let name = data.find(attribute::xt::NAME).and_then(Attribute::text).unwrap_or("?");
                alloc::format!("-m {name}")
            }
            name => name.to_owned(),
        };
        match name {
            // They load or change a register, and compare nothing.
            "fib" | "socket" | "rt" | "osf" | "numgen" | "hash" | "exthdr" | "tunnel" | "xfrm"
            | "byteorder" | "bitwise" | "meta" | "ct" | "payload" | "inner" => {
                self.registers.insert(register::FIRST, Loaded::Other(words.clone()));
                for held in self.registers.values_mut() {
                    *held = Loaded::Other(words.clone());
                }
            }
            _ => self.condition(Condition::Unknown(words)),
        }
    }

    fn meta(&mut self, data: Attributes<'_>) -> Option<()> {
        let key = data.find(attribute::meta::KEY)?.u32()?;
        if let Some(to) = data.find(attribute::meta::DESTINATION) {
            self.registers.insert(to.u32()?, Loaded::Meta(key));
            return Some(());
        }
        let source = data.find(attribute::meta::SOURCE)?.u32()?;
        self.statement(match (key, self.registers.get(&source)) {
            (meta::MARK, Some(Loaded::Value(value))) => Statement::SetMark(number(value)),
            // The connection is new: nothing has marked it.
            (meta::MARK, Some(Loaded::Ct(ct::MARK))) => Statement::SetMark(Some(0)),
            (meta::MARK, _) => Statement::SetMark(None),
            (_, _) => Statement::Harmless(alloc::format!("{} set", Loaded::Meta(key).name())),
        });
        Some(())
    }

    fn ct(&mut self, data: Attributes<'_>) -> Option<()> {
        let key = data.find(attribute::ct::KEY)?.u32()?;
        if let Some(to) = data.find(attribute::ct::DESTINATION) {
            self.registers.insert(to.u32()?, Loaded::Ct(key));
        } else {
            self.statement(Statement::Harmless(alloc::format!("{} set", Loaded::Ct(key).name())));
        }
        Some(())
    }

    fn payload(&mut self, data: Attributes<'_>) -> Option<()> {
        let u32_of = |kind| data.find(kind).and_then(Attribute::u32);
        let (from, offset, length) = (
            u32_of(attribute::payload::BASE)?,
            u32_of(attribute::payload::OFFSET)?,
            u32_of(attribute::payload::LENGTH)?,
        );
        let field = Loaded::Payload { base: from, offset, length };
        match u32_of(attribute::payload::DESTINATION) {
            Some(to) => {
                self.registers.insert(to, field);
            }
            None if payload_name(from, offset, length).is_some() => {
                self.statement(Statement::Rewrite(alloc::format!("{} set", field.name())));
            }
            None => self.statement(Statement::Harmless("payload set".to_owned())),
        }
        Some(())
    }

    fn bitwise(&mut self, data: Attributes<'_>) -> Option<()> {
        let register = |kind| data.find(kind).and_then(Attribute::u32);
        let mask = value_of(data, attribute::bitwise::MASK)?;
        if value_of(data, attribute::bitwise::XOR)?.iter().any(|byte| *byte != 0) {
            return None;
        }
        let of = self.registers.get(&register(attribute::bitwise::SOURCE)?)?.clone();
        let masked = Loaded::Masked(Box::new(of), mask.to_vec());
        self.registers.insert(register(attribute::bitwise::DESTINATION)?, masked);
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
        let chain = || Some(decision.find(attribute::verdict::CHAIN)?.text()?.to_owned());
        self.statement(match decision.find(attribute::verdict::CODE)?.u32()? {
            verdict::ACCEPT => Statement::Accept,
            verdict::DROP => Statement::Drop,
            verdict::RETURN => Statement::Return,
            verdict::JUMP => Statement::Jump(chain()?),
            GOTO => Statement::Goto(chain()?),
            code if code & VERDICT_MASK == QUEUE => Statement::Queue,
            _ => Statement::Unknown("verdict".to_owned()),
        });
        Some(())
    }
}

fn number(value: &[u8]) -> Option<u32> {
    <[u8; 4]>::try_from(value).ok().map(u32::from_ne_bytes)
}

/// What a comparison of a register with a value says; nothing where it always holds.
fn compared(loaded: &Loaded, operator: u32, value: &[u8]) -> Option<Vec<Condition>> {
    let one = |condition| Some([condition].into());
    if let LESS | AT_MOST | MORE | AT_LEAST = operator {
        let number = decode::port(value)?;
        let range = match operator {
            LESS => PortRange::new(0, number.checked_sub(1)?)?,
            AT_MOST => PortRange::new(0, number)?,
            MORE => PortRange::new(number.checked_add(1)?, u16::MAX)?,
            _ => PortRange::new(number, u16::MAX)?,
        };
        return one(Condition::Plain(ports(loaded, Is::equals(range))?));
    }
    let not = decode::negated(operator)?;
    match loaded {
        Loaded::Meta(key) => one(meta_is(*key, not, value)?),
        Loaded::Ct(ct::MARK) => {
            one(Condition::ConnMarkBits { mask: u32::MAX, is: Is { value: number(value)?, not } })
        }
        Loaded::Ct(ct::DIRECTION) => {
            one(Condition::IsReply(Is { value: *value.first()? == abi::direction::REPLY, not }))
        }
        Loaded::Payload { base: base::TRANSPORT, offset: 0, length: 4 } if !not => {
            let [a, b, c, d] = <[u8; 4]>::try_from(value).ok()?;
            let is = |bytes| Is::equals(PortRange::single(u16::from_be_bytes(bytes)));
            let source = Condition::Plain(Match::SourcePort(is([a, b])));
            Some([source, Condition::Plain(Match::DestinationPort(is([c, d])))].into())
        }
        Loaded::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 } => {
            one(Condition::TcpFlags { mask: u8::MAX, is: Is { value: *value.first()?, not } })
        }
        Loaded::Payload { base: base::TRANSPORT, .. } => {
            one(Condition::Plain(ports(loaded, Is { value: PortRange::single(decode::port(value)?), not })?))
        }
        Loaded::Payload { base: base::NETWORK, offset, .. } => {
            let prefix = u8::try_from(value.len().checked_mul(8)?).ok()?;
            one(address(*offset, not, value, prefix)?)
        }
        Loaded::Masked(of, mask) => one(masked(of, mask, not, value)?),
        Loaded::Ct(_) | Loaded::Payload { .. } | Loaded::Value(_) | Loaded::Other(_) => None,
    }
}

fn masked(of: &Loaded, mask: &[u8], not: bool, value: &[u8]) -> Option<Condition> {
    let bits = || Some((number(mask)?, Is { value: number(value)?, not }));
    match of {
        Loaded::Payload { base: base::NETWORK, offset, .. } if mask.len() == value.len() => {
            address(*offset, not, value, prefix_of(mask)?)
        }
        Loaded::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 } => {
            Some(Condition::TcpFlags { mask: *mask.first()?, is: Is { value: *value.first()?, not } })
        }
        Loaded::Meta(meta::MARK) => bits().map(|(mask, is)| Condition::MarkBits { mask, is }),
        Loaded::Ct(ct::MARK) => bits().map(|(mask, is)| Condition::ConnMarkBits { mask, is }),
        // Compared with 0: none of these states, or with `!=` one of them.
        Loaded::Ct(ct::STATE) if value.iter().all(|byte| *byte == 0) => {
            Some(Condition::State(Is { value: number(mask)?, not: !not }))
        }
        Loaded::Meta(_)
        | Loaded::Ct(_)
        | Loaded::Payload { .. }
        | Loaded::Masked(..)
        | Loaded::Value(_)
        | Loaded::Other(_) => None,
    }
}

fn meta_is(key: u32, not: bool, value: &[u8]) -> Option<Condition> {
    let id = || number(value).map(|value| Is { value, not });
    Some(match key {
        meta::FAMILY => {
            let of = abi::family_of(*value.first()?)?;
            Condition::Family(Is { value: of, not })
        }
        meta::PROTOCOL => protocol(*value.first()?, not),
        meta::IN_INTERFACE => {
            Condition::Plain(Match::InInterface(Is { value: decode::interface(value)?, not }))
        }
        meta::OUT_INTERFACE => {
            Condition::Plain(Match::OutInterface(Is { value: decode::interface(value)?, not }))
        }
        meta::MARK => Condition::MarkBits { mask: u32::MAX, is: id()? },
        meta::SOCKET_USER => Condition::Plain(Match::OwnerUid(id()?)),
        meta::SOCKET_GROUP => Condition::Plain(Match::OwnerGid(id()?)),
        _ => return None,
    })
}

fn protocol(number: u8, not: bool) -> Condition {
    let known = [Protocol::Tcp, Protocol::Udp].into_iter().find(|known| known.number() == number);
    match known {
        Some(protocol) if !not => Condition::Plain(Match::Protocol(protocol)),
        Some(_) | None => Condition::Protocol(Is { value: number, not }),
    }
}

fn ports(loaded: &Loaded, is: Is<PortRange>) -> Option<Match> {
    match loaded {
        Loaded::Payload { base: base::TRANSPORT, offset: 0, length: 2 } => Some(Match::SourcePort(is)),
        Loaded::Payload { base: base::TRANSPORT, offset: 2, length: 2 } => Some(Match::DestinationPort(is)),
        Loaded::Meta(_)
        | Loaded::Ct(_)
        | Loaded::Payload { .. }
        | Loaded::Masked(..)
        | Loaded::Value(_)
        | Loaded::Other(_) => None,
    }
}

/// An address of which the first bytes were compared. Its offset says which, and of which family.
fn address(offset: u32, not: bool, value: &[u8], prefix: u8) -> Option<Condition> {
    let mut octets = [0; 16];
    for (to, from) in octets.iter_mut().zip(value) {
        *to = *from;
    }
    let v4 = || {
        let octets: [u8; 4] = read_array(&octets, 0)?;
        Ipv4Net::new(Ipv4Addr::from(octets), prefix).ok().map(IpNet::V4)
    };
    let v6 = || Ipv6Net::new(Ipv6Addr::from(octets), prefix).ok().map(IpNet::V6);
    let (net, of_source) = match offset {
        12 => (v4()?, true),
        16 => (v4()?, false),
        8 => (v6()?, true),
        24 => (v6()?, false),
        // The protocol of IPv4's and IPv6's header.
        9 | 6 => return Some(protocol(*value.first()?, not)),
        _ => return None,
    };
    let is = Is { value: net.trunc(), not };
    Some(Condition::Plain(if of_source { Match::Source(is) } else { Match::Destination(is) }))
}

/// The conditions an xt match stands for.
fn extension_match(name: &str, revision: u32, info: &[u8]) -> Option<Vec<Condition>> {
    match (name, revision) {
        ("comment", _) => Some(Vec::new()),
        ("conntrack", 1..=3) => {
            let (flags, inverted) = (xt::read_u16(info, 146)?, xt::read_u16(info, 148)?);
            let states = if revision == 1 { u16::from(*info.get(150)?) } else { xt::read_u16(info, 150)? };
            // These alone; translated connections have states of their own here.
            let known = state::INVALID | state::NEW | state::RELATED | state::ESTABLISHED;
            let states = u32::from(states);
            let understood = flags & !XT_DIRECTION == 1 && states & !known == 0;
            // The direction is the other one where it is inverted.
            let is_reply = Is { value: true, not: inverted & XT_DIRECTION == 0 };
            let direction = (flags & XT_DIRECTION != 0).then_some(Condition::IsReply(is_reply));
            let state = Condition::State(Is { value: states, not: inverted & 1 != 0 });
            understood.then(|| direction.into_iter().chain([state]).collect())
        }
        ("mark" | "connmark", 1) => {
            let (value, mask) = (xt::read_u32(info, 0)?, xt::read_u32(info, 4)?);
            let is = Is { value, not: *info.get(8)? != 0 };
            let condition = if name == "mark" {
                Condition::MarkBits { mask, is }
            } else {
                Condition::ConnMarkBits { mask, is }
            };
            Some([condition].into())
        }
        _ => {
            let conditions = xt::decode_match(name, revision, info)?;
            Some(conditions.into_iter().map(Condition::Plain).collect())
        }
    }
}

/// What an xt target does.
fn extension_target(name: &str, revision: u32, info: &[u8]) -> Option<Statement> {
    match (name, revision) {
        ("CT", _) if info.first().is_some_and(|flags| flags & XT_NOTRACK != 0) => Some(Statement::Untrack),
        ("MARK", 2) => {
            let whole = xt::read_u32(info, 4)? == u32::MAX;
            Some(Statement::SetMark(xt::read_u32(info, 0).filter(|_| whole)))
        }
        ("CONNMARK", 1 | 2) => {
            let mode = *info.get(if revision == 1 { 12 } else { 14 })?;
            // The connection is new: nothing has marked it.
            Some(if mode == RESTORE_MARK {
                Statement::SetMark(Some(0))
            } else {
                Statement::Harmless("-j CONNMARK".to_owned())
            })
        }
        _ => target_named(name),
    }
}
