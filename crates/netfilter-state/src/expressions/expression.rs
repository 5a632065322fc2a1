//! The expressions a rule is made of, one function each.

use super::{
    abi::{attribute, base, ct, direction, meta, operator, register, verdict},
    wire::MessageWriter,
    xt::Extension,
};
use crate::ruleset::Endpoint;
use ipnet::IpNet;
use redirect_core::{
    rule::{Direction, Equality, TcpFlags},
    values::{Family, InterfaceName, MaskedMark, PortRange},
};

/// The longest value an expression loads: an IPv6 address or the name of an interface.
const LONGEST: usize = 16;

/// Writes expressions into the list of a rule.
pub(crate) struct Expressions<'a>(pub(crate) &'a mut MessageWriter);

impl Expressions<'_> {
    fn expression(&mut self, name: &str, body: impl FnOnce(&mut MessageWriter)) {
        self.0.nested(attribute::ELEMENT, |element| {
            element.text(attribute::expression::NAME, name);
            element.nested(attribute::expression::DATA, body);
        });
    }

    /// One that has numbers only.
    fn numbers(&mut self, name: &str, numbers: &[(u16, u32)]) {
        self.expression(name, |data| numbers.iter().for_each(|(kind, number)| data.u32(*kind, *number)));
    }

    /// Loads bytes of a packet into this register.
    pub(crate) fn payload_in(&mut self, to: u32, base: u32, offset: u32, length: u32) {
        let numbers = [
            (attribute::payload::DESTINATION, to),
            (attribute::payload::BASE, base),
            (attribute::payload::OFFSET, offset),
            (attribute::payload::LENGTH, length),
        ];
        self.numbers("payload", &numbers);
    }

    /// Loads something about a packet.
    pub(crate) fn meta(&mut self, key: u32) {
        self.numbers("meta", &[(attribute::meta::KEY, key), (attribute::meta::DESTINATION, register::FIRST)]);
    }

    /// Sets something about a packet to what is loaded.
    pub(crate) fn set_meta(&mut self, key: u32) {
        self.numbers("meta", &[(attribute::meta::KEY, key), (attribute::meta::SOURCE, register::FIRST)]);
    }

    /// Loads something about a connection.
    pub(crate) fn ct(&mut self, key: u32) {
        self.numbers("ct", &[(attribute::ct::KEY, key), (attribute::ct::DESTINATION, register::FIRST)]);
    }

    /// Sets something about a connection to what is loaded.
    pub(crate) fn set_ct(&mut self, key: u32) {
        self.numbers("ct", &[(attribute::ct::KEY, key), (attribute::ct::SOURCE, register::FIRST)]);
    }

    /// Loads bytes of a packet.
    pub(crate) fn payload(&mut self, base: u32, offset: u32, length: u32) {
        self.payload_in(register::FIRST, base, offset, length);
    }

    /// Keeps the bits of the mask.
    pub(crate) fn mask(&mut self, mask: &[u8]) {
        let zero = [0; LONGEST];
        self.mask_and_flip(mask, zero.get(..mask.len()).unwrap_or_default());
    }

    /// The packet's mark is this, in the bits that count.
    pub(crate) fn mark(&mut self, is: &Equality<MaskedMark>) {
        self.meta(meta::MARK);
        self.masked(is);
    }

    /// What was loaded is a mark, in the bits that count.
    pub(crate) fn masked(&mut self, is: &Equality<MaskedMark>) {
        if is.value.mask() != u32::MAX {
            self.mask(&is.value.mask().to_ne_bytes());
        }
        self.is(is.not, &is.value.value().to_ne_bytes());
    }

    /// Keeps the bits of the mask, then flips those of the other value.
    pub(crate) fn mask_and_flip(&mut self, mask: &[u8], flip: &[u8]) {
        self.expression("bitwise", |data| {
            data.u32(attribute::bitwise::SOURCE, register::FIRST);
            data.u32(attribute::bitwise::DESTINATION, register::FIRST);
            data.u32(attribute::bitwise::LENGTH, u32::try_from(mask.len()).unwrap_or_default());
            data.value(attribute::bitwise::MASK, mask);
            data.value(attribute::bitwise::XOR, flip);
        });
    }

    /// Goes on only when what is loaded is, or is not, this.
    pub(crate) fn is(&mut self, not: bool, value: &[u8]) {
        let operator = if not { operator::NOT_EQUAL } else { operator::EQUAL };
        self.expression("cmp", |data| {
            data.u32(attribute::cmp::REGISTER, register::FIRST);
            data.u32(attribute::cmp::OPERATOR, operator);
            data.value(attribute::cmp::DATA, value);
        });
    }

    /// Goes on only when the port loaded lies, or does not lie, in a range.
    pub(crate) fn ports(&mut self, not: bool, ports: PortRange) {
        let (first, last) = (ports.first().to_be_bytes(), ports.last().to_be_bytes());
        if first == last {
            self.is(not, &first);
            return;
        }
        self.expression("range", |data| {
            data.u32(attribute::range::REGISTER, register::FIRST);
            let operator = if not { operator::NOT_EQUAL } else { operator::EQUAL };
            data.u32(attribute::range::OPERATOR, operator);
            data.value(attribute::range::FROM, &first);
            data.value(attribute::range::TO, &last);
        });
    }

    /// Goes on only when what is loaded is, or is not, in a set of this transaction.
    pub(crate) fn lookup(&mut self, not: bool, set: u32) {
        self.lookup_in(not, crate::expressions::abi::ANONYMOUS_SET, set);
    }

    /// Goes on only when what is loaded is, or is not, in the set of this name, which has this number in the transaction.
    pub(crate) fn lookup_in(&mut self, not: bool, name: &str, set: u32) {
        self.expression("lookup", |data| {
            data.text(attribute::lookup::SET, name);
            data.u32(attribute::lookup::SOURCE, register::FIRST);
            data.u32(attribute::lookup::SET_ID, set);
            if not {
                data.u32(attribute::lookup::FLAGS, 1);
            }
        });
    }

    /// Adds what is loaded to a set, or removes it from there.
    pub(crate) fn update(&mut self, operation: u32, name: &str, set: u32) {
        self.expression("dynset", |data| {
            data.text(attribute::dynamic_set::SET, name);
            data.u32(attribute::dynamic_set::SET_ID, set);
            data.u32(attribute::dynamic_set::OPERATION, operation);
            data.u32(attribute::dynamic_set::KEY, register::FIRST);
        });
    }

    /// Keeps a packet from connection tracking.
    pub(crate) fn untrack(&mut self) {
        self.expression("notrack", |_| {});
    }

    /// Loads a value.
    pub(crate) fn value(&mut self, value: &[u8]) {
        self.expression("immediate", |data| {
            data.u32(attribute::immediate::REGISTER, register::FIRST);
            data.value(attribute::immediate::DATA, value);
        });
    }

    /// Counts packets.
    pub(crate) fn counter(&mut self) {
        self.expression("counter", |data| {
            data.u64(attribute::counter::BYTES, 0);
            data.u64(attribute::counter::PACKETS, 0);
        });
    }

    /// Decides.
    pub(crate) fn verdict(&mut self, code: u32) {
        self.decide(code, None);
    }

    /// Jumps to a chain.
    pub(crate) fn jump(&mut self, chain: &str) {
        self.decide(verdict::JUMP, Some(chain));
    }

    fn decide(&mut self, code: u32, chain: Option<&str>) {
        self.expression("immediate", |data| {
            data.u32(attribute::immediate::REGISTER, register::VERDICT);
            data.nested(attribute::immediate::DATA, |data| {
                data.nested(attribute::data::VERDICT, |verdict| {
                    verdict.u32(attribute::verdict::CODE, code);
                    if let Some(chain) = chain {
                        verdict.text(attribute::verdict::CHAIN, chain);
                    }
                });
            });
        });
    }

    /// An xt match or target.
    pub(crate) fn xt(&mut self, extension: Extension, info: &[u8]) {
        self.expression(if extension.is_target { "target" } else { "match" }, |data| {
            data.text(attribute::xt::NAME, extension.name);
            data.u32(attribute::xt::REVISION, extension.revision);
            data.bytes(attribute::xt::INFO, info);
        });
    }

    /// To the local host's port that is loaded.
    pub(crate) fn redirect(&mut self) {
        self.expression("redir", |data| {
            data.u32(attribute::redir::FIRST_PORT, register::FIRST);
            data.u32(attribute::redir::LAST_PORT, register::FIRST);
            data.u32(attribute::redir::FLAGS, super::abi::PORTS_GIVEN);
        });
    }

    /// From the address that is loaded, instead of the packet's source.
    pub(crate) fn source_nat(&mut self, family: u8) {
        const SOURCE: u32 = 0;
        self.numbers(
            "nat",
            &[
                (attribute::nat::TYPE, SOURCE),
                (attribute::nat::FAMILY, u32::from(family)),
                (attribute::nat::FIRST_ADDRESS, register::FIRST),
                (attribute::nat::LAST_ADDRESS, register::FIRST),
            ],
        );
    }

    /// To the listener on the port that is loaded.
    pub(crate) fn tproxy(&mut self, family: u8) {
        let family = (attribute::tproxy::FAMILY, u32::from(family));
        self.numbers("tproxy", &[family, (attribute::tproxy::PORT, register::FIRST)]);
    }

    /// The transport protocol is this.
    pub(crate) fn protocol(&mut self, number: u8) {
        self.meta(meta::PROTOCOL);
        self.is(false, &[number]);
    }

    /// The packet's family is this: for tables that see both.
    pub(crate) fn family(&mut self, number: u8) {
        self.meta(meta::FAMILY);
        self.is(false, &[number]);
    }

    /// The name of an interface, compared in this length, or the beginning of names.
    pub(crate) fn interface(&mut self, key: u32, is: &Equality<InterfaceName>, whole: usize) {
        let name = is.value.name();
        let length = if is.value.is_prefix() { name.len() } else { whole };
        let mut padded = [0; LONGEST];
        for (to, from) in padded.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        self.meta(key);
        self.is(is.not, padded.get(..length).unwrap_or(&padded));
    }

    /// The connection is in one of these states.
    pub(crate) fn state(&mut self, bits: u32) {
        self.ct(ct::STATE);
        self.mask(&bits.to_ne_bytes());
        self.is(true, &[0; 4]);
    }

    /// The packet goes this way of its connection.
    pub(crate) fn direction(&mut self, direction: Direction) {
        self.ct(ct::DIRECTION);
        self.is(
            false,
            &[match direction {
                Direction::Original => direction::ORIGINAL,
                Direction::Reply => direction::REPLY,
            }],
        );
    }

    /// A TCP segment has, or has not, exactly these flags.
    pub(crate) fn flags(&mut self, is: &Equality<TcpFlags>) {
        self.payload(base::TRANSPORT, TCP_FLAGS, 1);
        self.mask(&[is.value.mask()]);
        self.is(is.not, &[is.value.set()]);
    }

    /// An address lies in a range: compared whole, by its first bytes, or with the others masked.
    pub(crate) fn address(&mut self, end: Endpoint, is: &Equality<IpNet>) {
        let offset = address_offset(end, Family::of(&is.value.addr()));
        match &is.value {
            IpNet::V4(net) => self.prefix(offset, is, &net.network().octets(), &net.netmask().octets()),
            IpNet::V6(net) => self.prefix(offset, is, &net.network().octets(), &net.netmask().octets()),
        }
    }

    fn prefix(&mut self, offset: u32, is: &Equality<IpNet>, address: &[u8], mask: &[u8]) {
        let (bytes, bits) = (is.value.prefix_len() / 8, is.value.prefix_len() % 8);
        if bits == 0 && bytes > 0 {
            self.payload(base::NETWORK, offset, u32::from(bytes));
            self.is(is.not, address.get(..usize::from(bytes)).unwrap_or(address));
            return;
        }
        self.payload(base::NETWORK, offset, u32::try_from(address.len()).unwrap_or_default());
        self.mask(mask);
        self.is(is.not, address);
    }
}

/// Where in the network header the address at this end stands.
pub(crate) const fn address_offset(end: Endpoint, family: Family) -> u32 {
    match (end, family) {
        (Endpoint::Source, Family::V4) => 12,
        (Endpoint::Source, Family::V6) => 8,
        (Endpoint::Destination, Family::V4) => 16,
        (Endpoint::Destination, Family::V6) => 24,
    }
}

/// The end whose address stands there, if one does.
pub(crate) fn end_at(offset: u32, family: Family) -> Option<Endpoint> {
    let ends = [Endpoint::Source, Endpoint::Destination];
    ends.into_iter().find(|end| address_offset(*end, family) == offset)
}

/// Where in the transport header the flags of a TCP segment stand.
pub(crate) const TCP_FLAGS: u32 = 13;
/// Where in the transport header the source port stands.
pub(crate) const SOURCE_PORT: u32 = 0;
/// Where in the transport header the destination port stands.
pub(crate) const DESTINATION_PORT: u32 = 2;

/// Expressions that rules of other programs have, and registers that this library does not use.
#[cfg(test)]
impl Expressions<'_> {
    pub(crate) fn value_in(&mut self, to: u32, value: &[u8]) {
        self.expression("immediate", |data| {
            data.u32(attribute::immediate::REGISTER, to);
            data.value(attribute::immediate::DATA, value);
        });
    }

    pub(crate) fn store_meta(&mut self, key: u32, from: u32) {
        self.numbers("meta", &[(attribute::meta::KEY, key), (attribute::meta::SOURCE, from)]);
    }

    pub(crate) fn bitwise(&mut self, from: u32, to: u32, mask: &[u8]) {
        self.expression("bitwise", |data| {
            data.u32(attribute::bitwise::SOURCE, from);
            data.u32(attribute::bitwise::DESTINATION, to);
            for (kind, value) in
                [(attribute::bitwise::MASK, mask), (attribute::bitwise::XOR, &[0; 8][..mask.len()])]
            {
                data.value(kind, value);
            }
        });
    }

    pub(crate) fn compare_in(&mut self, register: u32, value: &[u8]) {
        self.expression("cmp", |data| {
            data.u32(attribute::cmp::REGISTER, register);
            data.u32(attribute::cmp::OPERATOR, operator::EQUAL);
            data.value(attribute::cmp::DATA, value);
        });
    }
}
