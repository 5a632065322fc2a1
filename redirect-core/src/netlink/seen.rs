//! A rule of anybody read expression by expression, so that one that is not understood does not hide the rest.

use super::{
    abi::{self, attribute, base, ct, meta, verdict},
    decode::{self, both_ports, number, ports, prefix_of},
    expression::TCP_FLAGS,
    reading::{self, Bits, Expression, Field, Loaded, Lookup, Origin, Registers, Xt, negated},
    wire::{Attribute, Attributes, read_array},
    xt,
};
use crate::{
    interference::{
        marked,
        ruleset::{Condition, Counter, SeenRule, Statement, state},
        target_named,
    },
    rule::{Is, Match, Protocol},
    values::{Family, PortRange},
};
use alloc::{
    borrow::{Cow, ToOwned},
    string::String,
    vec::Vec,
};
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
/// `XT_CT_NOTRACK`.
const XT_NOTRACK: u8 = 1;
/// `XT_CONNTRACK_DIRECTION`.
const XT_DIRECTION: u16 = 1 << 12;
/// Modes of CONNMARK.
const SET_MARK: u8 = 0;
const SAVE_MARK: u8 = 1;
const RESTORE_MARK: u8 = 2;

/// Reads the expressions of a rule.
pub(super) fn rule(expressions: Attributes<'_>) -> SeenRule {
    let mut reader = Reader { registers: Registers::default(), rule: SeenRule::default() };
    for (_, element) in expressions {
        if let Some(("counter", data)) = reading::name_and_data(element) {
            reader.rule.counter = counter(data).or(reader.rule.counter);
        } else if let Some(expression) = Expression::read(element) {
            reader.expression(expression);
        }
    }
    reader.rule
}

/// Of several counters the last is nearest to what the rule does.
fn counter(data: Attributes<'_>) -> Option<Counter> {
    let number = |kind| data.find(kind)?.u64();
    Some(Counter { packets: number(attribute::counter::PACKETS)?, bytes: number(attribute::counter::BYTES)? })
}

/// What a field is called in nft.
fn field_name(field: Field) -> Cow<'static, str> {
    match field {
        Field::Meta(key) => {
            meta_name(key).map_or_else(|| Cow::Owned(alloc::format!("meta {key}")), Cow::Borrowed)
        }
        Field::Ct(ct::STATE) => "ct state".into(),
        Field::Ct(ct::MARK) => "ct mark".into(),
        Field::Ct(key) | Field::CtOneWay(key, _) => alloc::format!("ct {key}").into(),
        Field::Payload { base, offset, length } => {
            payload_name(base, offset, length).unwrap_or("payload").into()
        }
    }
}

/// What a register holds, as nft calls it.
fn name_of(loaded: &Loaded<'_>) -> String {
    match loaded.origin {
        Origin::Field(field) => field_name(field).into_owned(),
        Origin::Value(_) => "value".to_owned(),
        Origin::Other(name) => name.to_owned(),
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

struct Reader<'a> {
    registers: Registers<'a>,
    rule: SeenRule,
}

impl<'a> Reader<'a> {
    fn statement(&mut self, statement: Statement) {
        self.rule.statements.push(statement);
    }

    fn expression(&mut self, expression: Expression<'a>) {
        match expression {
            Expression::Counter => {}
            Expression::Load { to, field } => self.registers.load(to, field),
            Expression::Value { to, value } => self.registers.set(to, value),
            Expression::Bitwise { from, to, mask, flip, .. } => {
                if self.registers.change(from, to, mask, flip).is_none() {
                    self.registers.forget(Origin::Other("bitwise"));
                }
            }
            Expression::Compare { register, operator, value } => {
                self.asked("cmp", register, |loaded| compared(loaded, operator, value));
            }
            Expression::Range { register, operator, from, to } => {
                self.asked("range", register, |loaded| ranged(loaded, operator, from, to));
            }
            Expression::Match(Xt { name, revision, info }) => {
                self.conditions(extension_match(name, revision, info), || alloc::format!("-m {name}"));
            }
            Expression::Target(Xt { name, revision, info }) => {
                let statement = extension_target(name, revision, info);
                let unknown = || Statement::Unknown(alloc::format!("-j {name}"));
                self.statement(statement.unwrap_or_else(unknown));
            }
            Expression::Store { field, from } => {
                let from = from.and_then(|from| self.registers.get(from));
                self.statement(stored(field, from));
            }
            Expression::Write { field, .. } => self.statement(written(field)),
            Expression::Verdict { code, chain } => match decided(code, chain) {
                Some(statement) => self.statement(statement),
                None => self.unknown("immediate"),
            },
            Expression::Lookup(lookup) => self.lookup(lookup),
            Expression::Redirect { first, last, .. } => {
                let statement = self.redirected(first, last);
                self.statement(statement);
            }
            Expression::Tproxy { port, .. } => {
                let port = port.and_then(|port| self.port_in(port));
                self.statement(Statement::Tproxy { port, mark: None, ends: false });
            }
            Expression::Other { name, data } => match statement_named(name, data) {
                Some(statement) => self.rule.statements.extend(statement),
                None => self.other(name, data),
            },
        }
    }

    /// What an expression asks of a register.
    fn asked<C: IntoIterator<Item = Condition>>(
        &mut self,
        name: &str,
        register: u32,
        read: impl FnOnce(&Loaded<'_>) -> Option<C>,
    ) {
        let loaded = self.registers.get(register);
        self.conditions(loaded.as_ref().and_then(read), || {
            loaded.map_or_else(|| name.to_owned(), |loaded| name_of(&loaded))
        });
    }

    /// What was found, or that something is asked that is not understood.
    fn conditions<C: IntoIterator<Item = Condition>>(
        &mut self,
        found: Option<C>,
        words: impl FnOnce() -> String,
    ) {
        match found {
            Some(found) => self.rule.conditions.extend(found),
            None => self.unknown(words()),
        }
    }

    fn unknown(&mut self, words: impl Into<String>) {
        self.rule.conditions.push(Condition::Unknown(words.into()));
    }

    /// The port that a register holds.
    fn port_in(&self, register: u32) -> Option<u16> {
        self.registers.get(register)?.value().and_then(decode::port)
    }

    fn redirected(&self, first: Option<u32>, last: Option<u32>) -> Statement {
        let [first, last] = [first, last.or(first)].map(|port| port.and_then(|port| self.port_in(port)));
        match first {
            Some(port) if first == last => Statement::Redirect(port),
            Some(_) | None => Statement::Translate("REDIRECT".to_owned()),
        }
    }

    fn lookup(&mut self, lookup: Lookup<'a>) {
        let loaded = self.registers.looked_up(lookup);
        let what = loaded.map_or_else(|| "something".to_owned(), |loaded| name_of(&loaded));
        if lookup.is_verdict_map() {
            self.statement(Statement::Unknown(alloc::format!("{what} in a verdict map")));
        } else {
            self.unknown(alloc::format!("{what} in a set"));
        }
    }

    /// One that is not understood: a condition, unless it loads or changes a register and compares nothing.
    fn other(&mut self, name: &'a str, data: Attributes<'a>) {
        // These begin with the register they look at.
        let looked_at =
            || data.find(1).and_then(Attribute::u32).and_then(|register| self.registers.get(register));
        match name {
            "fib" | "socket" | "rt" | "osf" | "numgen" | "hash" | "exthdr" | "tunnel" | "xfrm"
            | "byteorder" | "meta" | "ct" | "payload" | "inner" => {
                self.registers.forget(Origin::Other(name));
            }
            "bitwise" => {
                let origin = looked_at().map_or(Origin::Other(name), |loaded| loaded.origin);
                self.registers.forget(origin);
            }
            "cmp" | "range" => {
                let words = looked_at().map_or_else(|| name.to_owned(), |loaded| name_of(&loaded));
                self.unknown(words);
            }
            "match" => {
                let name = data.find(attribute::xt::NAME).and_then(Attribute::text).unwrap_or("?");
                self.unknown(alloc::format!("-m {name}"));
            }
            name => self.unknown(name),
        }
    }
}

/// What an expression does that is known by its name alone, if it does anything; `None` for another.
fn statement_named(name: &str, data: Attributes<'_>) -> Option<Option<Statement>> {
    Some(Some(match name {
        "last" => return Some(None),
        "log" | "objref" | "dynset" | "dup" | "connlimit_reset" => Statement::Harmless(name.to_owned()),
        "nat" if data.find(1)?.u32()? == TRANSLATE_DESTINATION => Statement::Translate("DNAT".to_owned()),
        "nat" => Statement::TranslateSource("SNAT".to_owned()),
        "masq" => Statement::TranslateSource("MASQUERADE".to_owned()),
        "notrack" => Statement::Untrack,
        "queue" => Statement::Queue,
        "reject" => Statement::Reject,
        "synproxy" | "fwd" | "flow_offload" => Statement::Rewrite(name.to_owned()),
        _ => return None,
    }))
}

/// What storing something in a field does.
fn stored(field: Field, from: Option<Loaded<'_>>) -> Statement {
    let loaded = from.and_then(|from| from.field());
    let value = from.and_then(|from| from.value().and_then(number));
    match (field, loaded, value) {
        (Field::Meta(meta::MARK), Some(Field::Ct(ct::MARK)), _) => Statement::RestoreMark,
        (Field::Meta(meta::MARK), _, Some(value)) => Statement::SetMark(Some(value)),
        (Field::Meta(meta::MARK), _, None) => changed(field, from)
            .map_or(Statement::SetMark(None), |(mask, value)| Statement::SetMarkBits { mask, value }),
        (Field::Ct(ct::MARK), Some(Field::Meta(meta::MARK)), _) => Statement::SaveMark,
        (Field::Ct(ct::MARK), _, Some(value)) => Statement::SetConnMark { mask: u32::MAX, value },
        (Field::Ct(ct::MARK), _, None) => match changed(field, from) {
            Some((mask, value)) => Statement::SetConnMark { mask, value },
            None => Statement::Unknown(alloc::format!("{} set", field_name(field))),
        },
        (Field::Meta(_) | Field::Ct(_) | Field::CtOneWay(..) | Field::Payload { .. }, _, _) => {
            Statement::Harmless(alloc::format!("{} set", field_name(field)))
        }
    }
}

/// The bits of a field that are cleared, and those that are then flipped, where it is stored again like this.
fn changed(field: Field, from: Option<Loaded<'_>>) -> Option<(u32, u32)> {
    let loaded = from.filter(|from| matches!(from.origin, Origin::Field(origin) if origin == field))?;
    match loaded.bits {
        Bits::All => Some((0, 0)),
        Bits::Masked(mask) => Some((!number(mask)?, 0)),
        Bits::Flipped { mask, flip } => Some((!number(mask)?, number(flip)?)),
        Bits::Unknown => None,
    }
}

/// What writing to the packet does.
fn written(field: Field) -> Statement {
    match field {
        Field::Payload { base, offset, length } if payload_name(base, offset, length).is_some() => {
            Statement::Rewrite(alloc::format!("{} set", field_name(field)))
        }
        Field::Meta(_) | Field::Ct(_) | Field::CtOneWay(..) | Field::Payload { .. } => {
            Statement::Harmless("payload set".to_owned())
        }
    }
}

/// `None` for a jump to nowhere.
fn decided(code: u32, chain: Option<&str>) -> Option<Statement> {
    Some(match code {
        verdict::ACCEPT => Statement::Accept,
        verdict::DROP => Statement::Drop,
        verdict::RETURN => Statement::Return,
        verdict::JUMP => Statement::Jump(chain?.to_owned()),
        GOTO => Statement::Goto(chain?.to_owned()),
        code if code & VERDICT_MASK == QUEUE => Statement::Queue,
        _ => Statement::Unknown("verdict".to_owned()),
    })
}

fn ranged(loaded: &Loaded<'_>, operator: u32, from: &[u8], to: &[u8]) -> Option<[Condition; 1]> {
    let value = PortRange::new(decode::port(from)?, decode::port(to)?)?;
    Some([Condition::Plain(ports(loaded.field()?, Is { value, not: negated(operator)? })?)])
}

/// What a comparison of order with a port says.
fn ordered(field: Field, operator: u32, value: &[u8]) -> Option<Condition> {
    let number = decode::port(value)?;
    let range = match operator {
        LESS => PortRange::new(0, number.checked_sub(1)?)?,
        AT_MOST => PortRange::new(0, number)?,
        MORE => PortRange::new(number.checked_add(1)?, u16::MAX)?,
        _ => PortRange::new(number, u16::MAX)?,
    };
    ports(field, Is::equals(range)).map(Condition::Plain)
}

/// What a comparison of a register with a value says.
fn compared(loaded: &Loaded<'_>, operator: u32, value: &[u8]) -> Option<Vec<Condition>> {
    let Origin::Field(field) = loaded.origin else { return None };
    match loaded.bits {
        Bits::All if matches!(operator, LESS | AT_MOST | MORE | AT_LEAST) => {
            Some([ordered(field, operator, value)?].into())
        }
        Bits::All => field_is(field, negated(operator)?, value),
        Bits::Masked(mask) => Some([masked_is(field, mask, negated(operator)?, value)?].into()),
        Bits::Flipped { .. } | Bits::Unknown => None,
    }
}

fn field_is(field: Field, not: bool, value: &[u8]) -> Option<Vec<Condition>> {
    if let Field::Payload { base: base::TRANSPORT, offset: 0, length: 4 } = field
        && !not
    {
        return Some(both_ports(value)?.map(Condition::Plain).into());
    }
    let condition = match field {
        Field::Meta(key) => meta_is(key, not, value)?,
        Field::Ct(ct::MARK) => {
            Condition::ConnMarkBits { mask: u32::MAX, is: Is { value: number(value)?, not } }
        }
        Field::Ct(ct::DIRECTION) => {
            Condition::IsReply(Is { value: *value.first()? == abi::direction::REPLY, not })
        }
        Field::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 } => {
            Condition::TcpFlags { mask: u8::MAX, is: Is { value: *value.first()?, not } }
        }
        Field::Payload { base: base::TRANSPORT, .. } => {
            Condition::Plain(ports(field, Is { value: PortRange::single(decode::port(value)?), not })?)
        }
        Field::Payload { base: base::NETWORK, offset, .. } => {
            let prefix = u8::try_from(value.len().checked_mul(8)?).ok()?;
            address(offset, not, value, prefix)?
        }
        Field::Ct(_) | Field::CtOneWay(..) | Field::Payload { .. } => return None,
    };
    Some([condition].into())
}

fn masked_is(field: Field, mask: &[u8], not: bool, value: &[u8]) -> Option<Condition> {
    let bits = || Some((number(mask)?, Is { value: number(value)?, not }));
    match field {
        Field::Payload { base: base::NETWORK, offset, .. } if mask.len() == value.len() => {
            address(offset, not, value, prefix_of(mask)?)
        }
        Field::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 } => {
            Some(Condition::TcpFlags { mask: *mask.first()?, is: Is { value: *value.first()?, not } })
        }
        Field::Meta(meta::MARK) => bits().map(|(mask, is)| Condition::MarkBits { mask, is }),
        Field::Ct(ct::MARK) => bits().map(|(mask, is)| Condition::ConnMarkBits { mask, is }),
        // Compared with 0: none of these states, or with `!=` one of them.
        Field::Ct(ct::STATE) if value.iter().all(|byte| *byte == 0) => {
            Some(Condition::State(Is { value: number(mask)?, not: !not }))
        }
        Field::Meta(_) | Field::Ct(_) | Field::CtOneWay(..) | Field::Payload { .. } => None,
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

/// What CONNMARK does, without shifts and with masks only where it sets a mark.
fn connection_marked(revision: u32, info: &[u8]) -> Option<Statement> {
    let [value, mask, from] = [xt::read_u32(info, 0)?, xt::read_u32(info, 4)?, xt::read_u32(info, 8)?];
    let mode = *info.get(if revision == 1 { 12 } else { 14 })?;
    let is_shifted = revision != 1 && info.get(12..14)? != [0, 0];
    Some(match mode {
        SET_MARK if !is_shifted => Statement::SetConnMark { mask, value },
        RESTORE_MARK if (mask, from, is_shifted) == (u32::MAX, u32::MAX, false) => Statement::RestoreMark,
        RESTORE_MARK => Statement::SetMark(None),
        SAVE_MARK if (mask, from, is_shifted) == (u32::MAX, u32::MAX, false) => Statement::SaveMark,
        _ => Statement::Unknown("-j CONNMARK".to_owned()),
    })
}

/// What an xt target does.
fn extension_target(name: &str, revision: u32, info: &[u8]) -> Option<Statement> {
    match (name, revision) {
        ("CT", _) if info.first().is_some_and(|flags| flags & XT_NOTRACK != 0) => Some(Statement::Untrack),
        // The mask comes behind the value.
        ("MARK", 2) => Some(marked(xt::read_u32(info, 0).zip(xt::read_u32(info, 4)))),
        ("CONNMARK", 1 | 2) => connection_marked(revision, info),
        ("REDIRECT" | "TPROXY" | "CT", _) => {
            let families = [Family::V4, Family::V6].into_iter();
            let plain = families.filter_map(|family| xt::decode_target(name, revision, info, family)).next();
            plain.as_ref().map(Statement::from).or_else(|| target_named(name))
        }
        _ => target_named(name),
    }
}
