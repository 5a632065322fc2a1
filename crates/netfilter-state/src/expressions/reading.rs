//! A rule's expressions, read in one place: each by itself ([`Expression`]), and what they leave in the registers
//! ([`Registers`]). Readers give them meaning: `seen` keeps unknown ones as unknown, `decode` refuses them,
//! `native_state` compares. Nothing is copied: what is read borrows the bytes it was read from.

mod key_part;
mod loaded;
mod registers;
pub(crate) mod sets;

pub(crate) use key_part::KeyPart;
pub(crate) use loaded::{Bits, Loaded, ValueOrigin, WIDEST_OF_MAPS};
pub(crate) use registers::Registers;

use super::{
    abi::{attribute, base, ct, meta, operator, register},
    expression::TCP_FLAGS,
    wire::{Attribute, Attributes},
};
use crate::ruleset::{Endpoint, Selector};
use redirect_core::values::Family;

/// A lookup holds for what is not in the set (`NFT_LOOKUP_F_INV`).
const INVERTED: u32 = 1;

/// Something about a packet or its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    Meta(u32),
    Ct(u32),
    /// Of one direction of the connection.
    CtOneWay(u32, u8),
    Payload {
        base: u32,
        offset: u32,
        length: u32,
    },
    /// What kind of address it has at this end, by the routing tables.
    AddressType(Endpoint),
}

impl Field {
    /// What a set or a range has values of; none where it has no selector.
    pub(crate) const fn selected(self) -> Option<Selector> {
        Some(match self {
            Self::Meta(meta::FAMILY) => Selector::Family,
            Self::Meta(meta::PROTOCOL) => Selector::Protocol,
            Self::Meta(meta::IN_INTERFACE) => Selector::InInterface,
            Self::Meta(meta::OUT_INTERFACE) => Selector::OutInterface,
            Self::Meta(meta::SOCKET_USER) => Selector::User,
            Self::Meta(meta::SOCKET_GROUP) => Selector::Group,
            Self::Meta(meta::MARK) => Selector::Mark,
            Self::Ct(ct::MARK) => Selector::ConnMark,
            Self::Ct(ct::STATE) => Selector::State,
            Self::Ct(ct::DIRECTION) => Selector::Direction,
            Self::Payload { base: base::NETWORK, offset: 12, length: 4 } => Selector::Source(Family::V4),
            Self::Payload { base: base::NETWORK, offset: 16, length: 4 } => Selector::Destination(Family::V4),
            Self::Payload { base: base::NETWORK, offset: 8, length: 16 } => Selector::Source(Family::V6),
            Self::Payload { base: base::NETWORK, offset: 24, length: 16 } => {
                Selector::Destination(Family::V6)
            }
            Self::Payload { base: base::NETWORK, offset: 9, length: 1 } => Selector::Protocol,
            Self::Payload { base: base::TRANSPORT, offset: 0, length: 2 } => Selector::SourcePort,
            Self::Payload { base: base::TRANSPORT, offset: 2, length: 2 } => Selector::DestinationPort,
            Self::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, length: 1 } => Selector::TcpFlags,
            Self::Meta(_)
            | Self::Ct(_)
            | Self::CtOneWay(..)
            | Self::Payload { .. }
            | Self::AddressType(_) => return None,
        })
    }

    /// How many bytes a load of it takes in a register; of what is not known, the most.
    pub(crate) const fn width(self) -> usize {
        if let Some(selector) = self.selected() {
            return selector.length() as usize;
        }
        match self {
            Self::Meta(meta::ETHERTYPE) | Self::Ct(ct::ZONE) => 2,
            Self::Meta(
                meta::LENGTH
                | meta::PRIORITY
                | meta::IN_INDEX
                | meta::OUT_INDEX
                | meta::SECURITY_MARK
                | meta::PROCESSOR
                | meta::RANDOM,
            )
            | Self::Ct(ct::STATUS | ct::SECURITY_MARK | ct::EVENTS | ct::ID)
            | Self::AddressType(_) => 4,
            Self::Meta(_) | Self::Ct(_) | Self::CtOneWay(..) => loaded::WIDEST,
            Self::Payload { length, .. } => length as usize,
        }
    }

    /// Whether a packet may lack it: loading it then ends the rule (`NFT_BREAK`). Each that no packet of IP lacks is listed.
    pub(crate) const fn may_lack(self) -> bool {
        match self {
            // `nft_meta_get_eval`: kept in the packet itself, or 0 or an empty name without one.
            Self::Meta(
                meta::LENGTH
                | meta::ETHERTYPE
                | meta::PRIORITY
                | meta::MARK
                | meta::IN_INDEX
                | meta::OUT_INDEX
                | meta::IN_INTERFACE
                | meta::OUT_INTERFACE
                | meta::TRACE
                | meta::SECURITY_MARK
                | meta::FAMILY
                | meta::PROTOCOL
                | meta::PROCESSOR
                | meta::RANDOM,
            )
            // `nft_ct_get_eval`: known before a connection is looked for.
            | Self::Ct(ct::STATE)
            // `nft_fib4_eval_type`: some type every address has.
            | Self::AddressType(_) => false,
            // `nft_payload_eval`: within the headers that a segment or a datagram has.
            Self::Payload { base: base::NETWORK, offset, length } => {
                offset.saturating_add(length) > SHORTEST_HEADER
                    && !matches!((offset, length), (8 | 24, ..=16))
            }
            Self::Payload { base: base::TRANSPORT, offset, length } => {
                offset.saturating_add(length) > SHORTEST_TRANSPORT && !(offset == TCP_FLAGS && length == 1)
            }
            Self::Meta(_) | Self::Ct(_) | Self::CtOneWay(..) | Self::Payload { .. } => true,
        }
    }
}

/// The shortest header of IP, and of a datagram.
const SHORTEST_HEADER: u32 = 20;
const SHORTEST_TRANSPORT: u32 = 8;

/// An expression. Two are equal when they do the same; what they use of sets is not compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expression<'a> {
    Counter,
    Load {
        to: u32,
        field: Field,
    },
    Value {
        to: u32,
        value: &'a [u8],
    },
    /// Keeps the bits of the mask, then flips those of the other value.
    Bitwise {
        from: u32,
        to: u32,
        length: Option<u32>,
        mask: &'a [u8],
        flip: &'a [u8],
    },
    /// Changes the order of bytes.
    Byteorder {
        from: u32,
        to: u32,
        operation: u32,
        length: u32,
        size: u32,
    },
    /// Sets a field of the packet's or connection's metadata.
    Store {
        field: Field,
        from: Option<u32>,
    },
    /// Writes to the packet.
    Write {
        field: Field,
        data: Attributes<'a>,
    },
    Compare {
        register: u32,
        operator: u32,
        value: &'a [u8],
    },
    Range {
        register: u32,
        operator: u32,
        from: &'a [u8],
        to: &'a [u8],
    },
    Verdict {
        code: u32,
        chain: Option<Attribute<'a>>,
    },
    Redirect {
        first: Option<u32>,
        last: Option<u32>,
        flags: Option<u32>,
    },
    Tproxy {
        family: Option<u32>,
        port: Option<u32>,
    },
    Lookup(LookupExpression<'a>),
    Match(Xt<'a>),
    Target(Xt<'a>),
    /// An unsupported one, or one that lacks what its kind needs.
    Other {
        name: &'a str,
        data: Attributes<'a>,
    },
}

/// A lookup in a set or map.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LookupExpression<'a> {
    from: Option<u32>,
    to: Option<u32>,
    flags: u32,
    /// All of it: sets have names or numbers.
    pub(crate) data: Attributes<'a>,
}

/// Sets are compared by what is in them.
impl PartialEq for LookupExpression<'_> {
    fn eq(&self, other: &Self) -> bool {
        (self.from, self.to, self.flags) == (other.from, other.to, other.flags)
    }
}

impl Eq for LookupExpression<'_> {}

impl LookupExpression<'_> {
    pub(crate) fn is_verdict_map(&self) -> bool {
        self.to == Some(register::VERDICT)
    }

    /// The register that gets what a map has for the key.
    pub(crate) fn loads(&self) -> Option<u32> {
        self.to.filter(|to| *to != register::VERDICT)
    }

    /// Whether it holds for what is not in the set.
    pub(crate) const fn is_inverted(&self) -> bool {
        self.flags & INVERTED != 0
    }

    /// The name of its set.
    pub(crate) fn set(&self) -> Option<String> {
        sets::name_of(self.data, attribute::lookup::SET, attribute::lookup::SET_ID)
    }
}

/// An xt match or target: name, revision and structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Xt<'a> {
    pub(crate) name: &'a str,
    pub(crate) revision: u32,
    pub(crate) info: &'a [u8],
}

/// The name of an expression and its attributes.
pub(crate) fn name_and_data(element: Attribute<'_>) -> Option<(&str, Attributes<'_>)> {
    let (name, data) = parts(element);
    Some((name?.text()?, data))
}

fn parts(element: Attribute<'_>) -> (Option<Attribute<'_>>, Attributes<'_>) {
    let (mut name, mut data) = (None, None);
    for (kind, value) in element.attributes() {
        match kind {
            attribute::expression::NAME => name = name.or(Some(value)),
            attribute::expression::DATA => data = data.or(Some(value)),
            _ => {}
        }
    }
    (name, data.unwrap_or(Attribute(&[])).attributes())
}

impl<'a> Expression<'a> {
    /// Reads an element of a rule's list; none where it has no name.
    pub(crate) fn read(element: Attribute<'a>) -> Option<Self> {
        let (name, data) = parts(element);
        let name = name?;
        match Self::of(name.text_bytes(), data) {
            Some(read) => Some(read),
            None => Some(Self::Other { name: name.text()?, data }),
        }
    }

    fn of(name: &[u8], data: Attributes<'a>) -> Option<Self> {
        match name {
            b"counter" => Some(Self::Counter),
            b"meta" => Self::meta(data),
            b"ct" => Self::ct(data),
            b"payload" => Self::payload(data),
            b"bitwise" => Self::bitwise(data),
            b"byteorder" => Some(Self::Byteorder {
                from: data.u32(attribute::byteorder::SOURCE)?,
                to: data.u32(attribute::byteorder::DESTINATION)?,
                operation: data.u32(attribute::byteorder::OPERATION)?,
                length: data.u32(attribute::byteorder::LENGTH)?,
                size: data.u32(attribute::byteorder::SIZE)?,
            }),
            b"cmp" => Some(Self::Compare {
                register: data.u32(attribute::cmp::REGISTER)?,
                operator: data.u32(attribute::cmp::OPERATOR)?,
                value: data.value(attribute::cmp::DATA)?,
            }),
            b"fib" => Self::fib(data),
            b"range" => Self::range(data),
            b"immediate" => Self::immediate(data),
            b"redir" => Some(Self::Redirect {
                first: data.u32(attribute::redir::FIRST_PORT),
                last: data.u32(attribute::redir::LAST_PORT),
                flags: data.u32(attribute::redir::FLAGS),
            }),
            b"tproxy" => Some(Self::Tproxy {
                family: data.u32(attribute::tproxy::FAMILY),
                port: data.u32(attribute::tproxy::PORT),
            }),
            b"lookup" => Some(Self::Lookup(LookupExpression {
                from: data.u32(attribute::lookup::SOURCE),
                to: data.u32(attribute::lookup::DESTINATION),
                flags: data.u32(attribute::lookup::FLAGS).unwrap_or_default(),
                data,
            })),
            b"match" => xt(data).map(Self::Match),
            b"target" => xt(data).map(Self::Target),
            _ => None,
        }
    }

    fn meta(data: Attributes<'a>) -> Option<Self> {
        let field = Field::Meta(data.u32(attribute::meta::KEY)?);
        match data.find(attribute::meta::DESTINATION) {
            Some(to) => Some(Self::Load { to: to.u32()?, field }),
            None => Some(Self::Store { field, from: Some(data.u32(attribute::meta::SOURCE)?) }),
        }
    }

    fn ct(data: Attributes<'a>) -> Option<Self> {
        let key = data.u32(attribute::ct::KEY)?;
        let field = match data.find(attribute::ct::DIRECTION) {
            Some(direction) => Field::CtOneWay(key, *direction.0.first()?),
            None => Field::Ct(key),
        };
        match data.find(attribute::ct::DESTINATION) {
            Some(to) => Some(Self::Load { to: to.u32()?, field }),
            None => Some(Self::Store { field, from: data.u32(attribute::ct::SOURCE) }),
        }
    }

    fn payload(data: Attributes<'a>) -> Option<Self> {
        let field = Field::Payload {
            base: data.u32(attribute::payload::BASE)?,
            offset: data.u32(attribute::payload::OFFSET)?,
            length: data.u32(attribute::payload::LENGTH)?,
        };
        Some(match data.u32(attribute::payload::DESTINATION) {
            Some(to) => Self::Load { to, field },
            None => Self::Write { field, data },
        })
    }

    fn fib(data: Attributes<'a>) -> Option<Self> {
        use super::abi::fib;
        let is_type = data.u32(attribute::fib::RESULT)? == fib::ADDRESS_TYPE;
        let end = match data.u32(attribute::fib::FLAGS)? {
            fib::SOURCE if is_type => Endpoint::Source,
            fib::DESTINATION if is_type => Endpoint::Destination,
            _ => return None,
        };
        Some(Self::Load { to: data.u32(attribute::fib::DESTINATION)?, field: Field::AddressType(end) })
    }

    fn bitwise(data: Attributes<'a>) -> Option<Self> {
        if data.u32(attribute::bitwise::OPERATION).is_some_and(|operation| operation != 0) {
            return None;
        }
        Some(Self::Bitwise {
            from: data.u32(attribute::bitwise::SOURCE)?,
            to: data.u32(attribute::bitwise::DESTINATION)?,
            length: data.u32(attribute::bitwise::LENGTH),
            mask: data.value(attribute::bitwise::MASK)?,
            flip: data.value(attribute::bitwise::XOR)?,
        })
    }

    fn range(data: Attributes<'a>) -> Option<Self> {
        Some(Self::Range {
            register: data.u32(attribute::range::REGISTER)?,
            operator: data.u32(attribute::range::OPERATOR)?,
            from: data.value(attribute::range::FROM)?,
            to: data.value(attribute::range::TO)?,
        })
    }

    fn immediate(data: Attributes<'a>) -> Option<Self> {
        let to = data.u32(attribute::immediate::REGISTER)?;
        let content = data.nested(attribute::immediate::DATA)?;
        if to != register::VERDICT {
            return Some(Self::Value { to, value: content.find(attribute::data::VALUE)?.0 });
        }
        let verdict = content.nested(attribute::data::VERDICT)?;
        Some(Self::Verdict {
            code: verdict.u32(attribute::verdict::CODE)?,
            chain: verdict.find(attribute::verdict::CHAIN),
        })
    }
}

fn xt(data: Attributes<'_>) -> Option<Xt<'_>> {
    Some(Xt {
        name: data.text(attribute::xt::NAME)?,
        revision: data.u32(attribute::xt::REVISION)?,
        info: data.find(attribute::xt::INFO)?.0,
    })
}

/// Whether an operator is `!=`; none for one of order.
pub(crate) const fn negated(operator: u32) -> Option<bool> {
    match operator {
        operator::EQUAL => Some(false),
        operator::NOT_EQUAL => Some(true),
        _ => None,
    }
}

/// The chain a rule jumps or goes to.
pub(crate) fn jump_of(expressions: Attributes<'_>) -> Option<&str> {
    let mut expressions = expressions.filter_map(|(_, element)| Expression::read(element));
    expressions
        .find_map(|read| if let Expression::Verdict { chain, .. } = read { chain?.text() } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        expressions::{abi::verdict, decode, expression::Expressions, seen, wire::MessageWriter},
        ruleset::{Condition, Statement},
    };
    use redirect_core::{
        rule::{Equality, Match},
        values::PortRange,
    };

    type Body = fn(&mut MessageWriter);

    fn list(expressions: &[(&str, Body)]) -> MessageWriter {
        let mut writer = MessageWriter::default();
        for (name, body) in expressions {
            writer.nested(attribute::ELEMENT, |element| {
                element.text(attribute::expression::NAME, name);
                element.nested(attribute::expression::DATA, body);
            });
        }
        writer
    }

    fn value_in_first(out: &mut MessageWriter, value: &[u8]) {
        out.u32(attribute::immediate::REGISTER, register::FIRST);
        out.nested(attribute::immediate::DATA, |data| data.bytes(attribute::data::VALUE, value));
    }

    fn store_zone(out: &mut MessageWriter) {
        out.u32(attribute::ct::KEY, ct::ZONE);
        out.u32(attribute::ct::SOURCE, register::FIRST);
    }

    fn same(one: (&str, Body), two: (&str, Body)) -> bool {
        let (one, two) = (list(&[one]), list(&[two]));
        let read = |(_, element)| Expression::read(element);
        let (one, two) = (one.attributes().find_map(read), two.attributes().find_map(read));
        assert!(one.is_some(), "it is an expression");
        one == two
    }

    #[test]
    fn the_zone_of_one_direction_is_not_that_of_both() {
        let zone: Body = |out| value_in_first(out, &1_u16.to_ne_bytes());
        let both = list(&[("immediate", zone), ("ct", store_zone)]);
        assert!(decode::rule(both.attributes(), Family::V4).is_some());
        let one_way: Body = |out| {
            store_zone(out);
            out.bytes(attribute::ct::DIRECTION, &[1]);
        };
        let one_way = list(&[("immediate", zone), ("ct", one_way)]);
        assert_eq!(decode::rule(one_way.attributes(), Family::V4), None);
    }

    #[test]
    fn changing_one_register_leaves_the_others() {
        fn load(out: &mut MessageWriter, key: u32, to: u32) {
            out.u32(attribute::meta::KEY, key);
            out.u32(attribute::meta::DESTINATION, to);
        }
        let rule = list(&[
            ("meta", |out| load(out, meta::PROTOCOL, 1)),
            ("meta", |out| load(out, meta::MARK, 2)),
            ("bitwise", |out| {
                out.u32(attribute::bitwise::SOURCE, 2);
                out.u32(attribute::bitwise::DESTINATION, 2);
                for kind in [attribute::bitwise::MASK, attribute::bitwise::XOR] {
                    out.nested(kind, |data| data.bytes(attribute::data::VALUE, &[1; 4]));
                }
            }),
            ("cmp", |out| {
                out.u32(attribute::cmp::REGISTER, 1);
                out.u32(attribute::cmp::OPERATOR, operator::EQUAL);
                out.nested(attribute::cmp::DATA, |data| data.bytes(attribute::data::VALUE, &[6]));
            }),
        ]);
        assert_eq!(seen::rule(rule.attributes()).to_string(), "-p tcp");
    }

    #[test]
    fn what_is_not_understood_is_a_condition() {
        let limit: Body = |out| out.u64(1, 5);
        let match_by_name: Body = |out| out.text(attribute::xt::NAME, "connlimit");
        for (name, body, words) in [("limit", limit, "limit"), ("match", match_by_name, "-m connlimit")] {
            let conditions = seen::rule(list(&[(name, body)]).attributes()).conditions;
            assert_eq!(conditions, [Condition::Unknown(words.into())], "{name}");
        }
    }

    #[test]
    fn a_comparison_of_order_reaches_to_the_first_or_the_last_value() {
        fn compare(out: &mut MessageWriter, operator: u32) {
            out.u32(attribute::cmp::REGISTER, 1);
            out.u32(attribute::cmp::OPERATOR, operator);
            out.nested(attribute::cmp::DATA, |data| {
                data.bytes(attribute::data::VALUE, &1024_u16.to_be_bytes());
            });
        }
        let port: Body = |out| {
            out.u32(attribute::payload::DESTINATION, 1);
            out.u32(attribute::payload::BASE, base::TRANSPORT);
            out.u32(attribute::payload::OFFSET, 2);
            out.u32(attribute::payload::LENGTH, 2);
        };
        let (at_most, at_least): (Body, Body) = (|out| compare(out, 3), |out| compare(out, 5));
        for (order, first, last) in [(at_most, 0, 1024), (at_least, 1024, u16::MAX)] {
            let conditions = seen::rule(list(&[("payload", port), ("cmp", order)]).attributes()).conditions;
            let range = Match::DestinationPort(Equality::equals(PortRange::new(first, last).unwrap()));
            assert_eq!(conditions, [Condition::Plain(range)]);
        }
    }

    #[test]
    fn a_map_loads_what_is_no_verdict() {
        let loads = |to: Option<u32>| {
            let mut list = MessageWriter::default();
            list.nested(attribute::ELEMENT, |element| {
                element.text(attribute::expression::NAME, "lookup");
                element.nested(attribute::expression::DATA, |data| {
                    data.text(attribute::lookup::SET, "map");
                    data.u32(attribute::lookup::SOURCE, register::FIRST);
                    if let Some(to) = to {
                        data.u32(attribute::lookup::DESTINATION, to);
                    }
                });
            });
            let Some(Expression::Lookup(lookup)) =
                list.attributes().find_map(|(_, element)| Expression::read(element))
            else {
                panic!("it is a lookup")
            };
            (lookup.loads(), lookup.is_verdict_map())
        };
        assert_eq!(loads(None), (None, false));
        assert_eq!(loads(Some(register::VERDICT)), (None, true));
        assert_eq!(loads(Some(register::FIRST)), (Some(register::FIRST), false));
    }

    #[test]
    fn what_a_map_has_loaded_is_not_what_was_there_before() {
        let zone: Body = |out| value_in_first(out, &1_u16.to_ne_bytes());
        let map: Body = |out| {
            out.text(attribute::lookup::SET, "zones");
            out.u32(attribute::lookup::SOURCE, register::FIRST_PART);
            out.u32(attribute::lookup::DESTINATION, register::FIRST);
        };
        let seen = |expressions: &[(&str, Body)]| seen::rule(list(expressions).attributes()).statements;
        assert_eq!(seen(&[("immediate", zone), ("ct", store_zone)]), [Statement::Zone(1)]);
        let after = seen(&[("immediate", zone), ("lookup", map), ("ct", store_zone)]);
        assert!(!after.contains(&Statement::Zone(1)), "{after:?}");
    }

    #[test]
    fn when_a_rule_was_last_met_is_no_condition() {
        let seen = |first: &str| {
            let mut list = list(&[(first, |_| ())]);
            Expressions(&mut list).verdict(verdict::DROP);
            seen::rule(list.attributes()).to_string()
        };
        assert_eq!(seen("last"), "-j DROP");
        assert_eq!(seen("latest"), "[latest] -j DROP");
    }

    #[test]
    fn expressions_are_equal_when_they_do_the_same() {
        let zone = ("ct", store_zone as Body);
        let turned: Body = |out| {
            out.u32(attribute::ct::SOURCE, register::FIRST);
            out.u32(attribute::ct::KEY, ct::ZONE);
        };
        let from_second: Body = |out| {
            out.u32(attribute::ct::KEY, ct::ZONE);
            out.u32(attribute::ct::SOURCE, 2);
        };
        assert!(same(zone, ("ct", turned)));
        assert!(!same(zone, ("ct", from_second)));
        assert!(!same(zone, ("meta", store_zone)));
        assert!(same(("counter", |out| out.u64(1, 1)), ("counter", |out| out.u64(1, 2))));
        assert!(!same(("strange", |out| out.u64(1, 1)), ("strange", |out| out.u64(1, 2))));
    }
    #[test]
    fn only_the_type_of_an_address_is_told_by_where_it_leads() {
        use crate::expressions::abi::fib;
        let looked_up = |result: u32, flags: u32| {
            let mut data = MessageWriter::default();
            data.u32(attribute::fib::DESTINATION, 1);
            data.u32(attribute::fib::RESULT, result);
            data.u32(attribute::fib::FLAGS, flags);
            match Expression::fib(data.attributes()) {
                Some(Expression::Load { to: 1, field }) => Some(field),
                Some(other) => panic!("{other:?}"),
                None => None,
            }
        };
        let loads = |end| Some(Field::AddressType(end));
        assert_eq!(looked_up(fib::ADDRESS_TYPE, fib::SOURCE), loads(Endpoint::Source));
        assert_eq!(looked_up(fib::ADDRESS_TYPE, fib::DESTINATION), loads(Endpoint::Destination));
        // By which interface, and of an address that comes in by the same.
        assert_eq!(looked_up(1, fib::SOURCE), None);
        assert_eq!(looked_up(1, fib::DESTINATION), None);
        assert_eq!(looked_up(fib::ADDRESS_TYPE, fib::SOURCE | 8), None);
    }

    /// A rule that looks up in a set what an expression loads into the first register.
    fn look_up(load: (&str, Body), set: &str) -> MessageWriter {
        let mut writer = list(&[load]);
        writer.nested(attribute::ELEMENT, |element| {
            element.text(attribute::expression::NAME, "lookup");
            element.nested(attribute::expression::DATA, |data| {
                data.text(attribute::lookup::SET, set);
                data.u32(attribute::lookup::SOURCE, 1);
            });
        });
        writer
    }

    #[test]
    fn what_is_looked_up_in_a_set_that_is_not_known_is_told_by_its_name() {
        macro_rules! load {
            ($key:ident) => {
                |out| {
                    out.u32(attribute::meta::KEY, meta::$key);
                    out.u32(attribute::meta::DESTINATION, 1);
                }
            };
        }
        let loads: [(Body, &str); 9] = [
            (load!(MARK), "meta mark"),
            (load!(IN_INTERFACE), "iifname"),
            (load!(OUT_INTERFACE), "oifname"),
            (load!(SOCKET_USER), "meta skuid"),
            (load!(SOCKET_GROUP), "meta skgid"),
            (load!(FAMILY), "meta nfproto"),
            (load!(PROTOCOL), "meta l4proto"),
            (load!(IN_INDEX), "iif"),
            (load!(OUT_INDEX), "oif"),
        ];
        for (load, name) in loads {
            let conditions = seen::rule(look_up(("meta", load), "gone").attributes()).conditions;
            assert_eq!(conditions, [Condition::Unknown(format!("{name} in a set"))]);
        }
    }

    #[test]
    fn sets_are_followed_up_to_a_number_of_elements() {
        let mut elements = MessageWriter::default();
        for port in [80_u16, 443] {
            elements.nested(attribute::ELEMENT, |element| {
                element.nested(attribute::element::KEY, |key| {
                    key.bytes(attribute::data::VALUE, &port.to_be_bytes());
                });
            });
        }
        let mut declared = MessageWriter::default();
        declared.u32(attribute::set::KEY_LENGTH, 2);
        let mut set = crate::ruleset::Set::default();
        set.declare(declared.attributes());
        set.take(elements.attributes());
        let sets = [("ports".to_string(), set)].into();
        let port: Body = |out| {
            out.u32(attribute::payload::DESTINATION, 1);
            out.u32(attribute::payload::BASE, base::TRANSPORT);
            out.u32(attribute::payload::OFFSET, 2);
            out.u32(attribute::payload::LENGTH, 2);
        };
        let rule = look_up(("payload", port), "ports");
        let told = |before: usize| {
            let mut looked_up = before;
            let rule = seen::rule_with(rule.attributes(), None, &sets, &mut looked_up);
            (rule.to_string(), looked_up)
        };
        let (all, most) = ("th dport @ports".to_string(), seen::MOST_LOOKED_UP);
        assert_eq!(told(most - 2), (all, most));
        for before in [most - 1, most] {
            let (rule, looked_up) = told(before);
            assert!(rule.contains("more is looked up than is followed"), "{rule}");
            assert_eq!(looked_up, before);
        }
    }
}
