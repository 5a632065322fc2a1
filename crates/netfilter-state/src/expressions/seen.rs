//! Any program's rule, read expression by expression, so that an unsupported one does not hide the rest.

mod comparisons;
mod extensions;

use super::{
    abi::{self, attribute, base, ct, meta, object, verdict},
    expression::TCP_FLAGS,
    reading::{
        self, Bits, Expression, Field, Loaded, Lookup, Origin, Registers, Xt,
        sets::{Found, Why},
    },
    wire::{Attribute, Attributes, number},
};
use crate::ruleset::{
    Condition, Counter, Endpoint, SeenRule, Selector, SetLookup, Sets, Statement, VerdictMap,
};
use alloc::{
    borrow::{Cow, ToOwned},
    string::String,
    vec::Vec,
};
pub(crate) use comparisons::{address, interface, prefix_of, protocol};
use comparisons::{compared, ranged};
pub(crate) use extensions::{extension_match, extension_target};
use redirect_core::{
    rule::{Equality, Match},
    values::{Family, PortRange},
};

/// `NF_NAT_MANIP_DST` of a nat expression.
const TRANSLATE_DESTINATION: u32 = 1;
/// A goto (`NFT_GOTO`), and handing to a process (`NF_QUEUE` in the low bits).
const GOTO: u32 = 0xffff_fffc;
const QUEUE: u32 = 3;
const VERDICT_MASK: u32 = 0xff;
/// The type of an address of our own (`RTN_LOCAL`).
const LOCAL_TYPE: u32 = 2;
/// Limit on set elements that all rules of a ruleset look up: other programs may create any number of rules and elements.
pub(crate) const MOST_LOOKED_UP: usize = 1 << 18;

/// Reads the expressions of a rule; the family of its table and the elements of sets are unknown.
pub(crate) fn rule(expressions: Attributes<'_>) -> SeenRule {
    rule_with(expressions, None, &Sets::new(), &mut 0)
}

/// Reads the expressions of a rule of a table of this family, unless it is of both, with these sets. Counts how many elements are looked up.
pub(crate) fn rule_with(
    expressions: Attributes<'_>,
    family: Option<Family>,
    sets: &Sets,
    looked_up: &mut usize,
) -> SeenRule {
    let mut reader = Reader::new(family, sets, looked_up);
    for (_, element) in expressions {
        if let Some(("counter", data)) = reading::name_and_data(element) {
            reader.rule.counter = counter(data).or(reader.rule.counter);
        } else if let Some(expression) = Expression::read(element) {
            reader.expression(expression);
        }
    }
    // Two comparisons of order, one behind the other, are how nft writes a range.
    reader.rule.conditions.dedup_by(|two, one| narrow(one, two));
    reader.rule
}

/// Of several counters the last is nearest to what the rule does.
fn counter(data: Attributes<'_>) -> Option<Counter> {
    let number = |kind| data.find(kind)?.u64();
    Some(Counter { packets: number(attribute::counter::PACKETS)?, bytes: number(attribute::counter::BYTES)? })
}

pub(crate) fn port(value: &[u8]) -> Option<u16> {
    <[u8; 2]>::try_from(value).ok().map(u16::from_be_bytes)
}

/// What a field is called in nft.
fn field_name(field: Field) -> Cow<'static, str> {
    match field {
        Field::Meta(key) => {
            meta_name(key).map_or_else(|| Cow::Owned(alloc::format!("meta {key}")), Cow::Borrowed)
        }
        Field::Ct(ct::STATE) => "ct state".into(),
        Field::Ct(ct::MARK) => "ct mark".into(),
        Field::Ct(ct::ZONE) | Field::CtOneWay(ct::ZONE, _) => "ct zone".into(),
        Field::Ct(key) | Field::CtOneWay(key, _) => alloc::format!("ct {key}").into(),
        Field::Payload { base, offset, length } => {
            payload_name(base, offset, length).unwrap_or("payload").into()
        }
        Field::AddressType(Endpoint::Source) => "fib saddr type".into(),
        Field::AddressType(Endpoint::Destination) => "fib daddr type".into(),
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
        meta::ETHERTYPE => "meta protocol",
        meta::IN_INDEX => "iif",
        meta::OUT_INDEX => "oif",
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

/// Reads expressions, one behind the other.
pub(crate) struct Reader<'a, 's> {
    /// That of the table, or what was compared with one so far.
    family: Option<Family>,
    pub(crate) registers: Registers<'a>,
    pub(crate) rule: SeenRule,
    sets: &'s Sets,
    looked_up: &'s mut usize,
}

impl<'a, 's> Reader<'a, 's> {
    pub(crate) fn new(family: Option<Family>, sets: &'s Sets, looked_up: &'s mut usize) -> Self {
        Self { family, registers: Registers::default(), rule: SeenRule::default(), sets, looked_up }
    }

    fn statement(&mut self, statement: Statement) {
        self.rule.statements.push(statement);
    }

    pub(crate) fn expression(&mut self, expression: Expression<'a>) {
        match expression {
            Expression::Counter => {}
            Expression::Load { to, field } => self.registers.load(to, Origin::Field(field)),
            Expression::Value { to, value } => self.registers.load(to, Origin::Value(value)),
            Expression::Bitwise { from, to, mask, flip, .. } => {
                if self.registers.change(from, to, mask, flip).is_none() {
                    self.registers.forget(Origin::Other("bitwise"));
                }
            }
            Expression::Byteorder { from, to, operation, length, size } => {
                if self.registers.reorder(from, to, (operation, length, size)).is_none() {
                    self.registers.forget(Origin::Other("byteorder"));
                }
            }
            Expression::Compare { register, operator, value } => {
                let family = self.family;
                self.asked("cmp", register, |loaded| compared(loaded, operator, value, family));
            }
            Expression::Range { register, operator, from, to } => {
                self.asked("range", register, |loaded| ranged(loaded, operator, from, to));
            }
            Expression::Match(Xt { name: "comment", info, .. }) => {
                self.rule.comment = Attribute(info).text().unwrap_or_default().to_owned();
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
            Expression::Tproxy { family, port } => {
                // What is not of its family ends the rule.
                let of = family.and_then(|family| u8::try_from(family).ok()).and_then(abi::family_of);
                if let Some(value) = of {
                    let is_of_family = Condition::Family(Equality { value, not: false });
                    if !self.rule.conditions.contains(&is_of_family) {
                        self.condition(is_of_family);
                    }
                }
                let port = port.and_then(|port| self.port_in(port));
                self.statement(Statement::Tproxy { port, mark: None, ends: false });
            }
            Expression::Other { name, data } => match statement_named(name, data) {
                Some(statement) => self.rule.statements.extend(statement),
                None => self.other(name, data),
            },
        }
    }

    /// The condition that an expression puts on a register.
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

    /// What was found, or that the condition is unsupported.
    fn conditions<C: IntoIterator<Item = Condition>>(
        &mut self,
        found: Option<C>,
        words: impl FnOnce() -> String,
    ) {
        match found {
            Some(found) => found.into_iter().for_each(|one| self.condition(one)),
            None => self.unknown(words()),
        }
    }

    fn condition(&mut self, condition: Condition) {
        if let Condition::Family(Equality { value, not: false }) = condition {
            self.family = Some(value);
        }
        self.rule.conditions.push(condition);
    }

    fn unknown(&mut self, words: impl Into<String>) {
        self.rule.conditions.push(Condition::Unknown(words.into()));
    }

    /// The port that a register holds.
    fn port_in(&self, register: u32) -> Option<u16> {
        self.registers.get(register)?.value().and_then(port)
    }

    fn redirected(&self, first: Option<u32>, last: Option<u32>) -> Statement {
        if first.is_none() {
            return Statement::RedirectHere;
        }
        let [first, last] = [first, last.or(first)].map(|port| port.and_then(|port| self.port_in(port)));
        match first {
            Some(port) if first == last => Statement::Redirect(port),
            Some(_) | None => Statement::Translate("REDIRECT".to_owned()),
        }
    }

    fn lookup(&mut self, lookup: Lookup<'a>) {
        match self.found(lookup) {
            Ok(found) if lookup.is_verdict_map() => self.map(found),
            Ok(found) => self.rule.conditions.push(among(found.among, lookup.is_inverted())),
            Err(why) => {
                let loaded = self.registers.looked_up(lookup);
                let what = loaded.map_or_else(|| "something".to_owned(), |loaded| name_of(&loaded));
                if lookup.is_verdict_map() {
                    self.statement(Statement::Unknown(alloc::format!("{what} in a verdict map, {why}")));
                } else {
                    self.unknown(alloc::format!("{what} in {why}"));
                }
            }
        }
        if let Some(to) = lookup.loads() {
            self.registers.load(to, Origin::Other("map"));
        }
    }

    fn found(&mut self, lookup: Lookup<'a>) -> Result<Found, Why> {
        let name = lookup.set().ok_or("a set without a name")?;
        let set = self.sets.get(&name).ok_or("a set")?;
        let looked_up = self.looked_up.saturating_add(set.len());
        if looked_up > MOST_LOOKED_UP {
            return Err("a set, where more is looked up than is followed");
        }
        let parts = self.registers.parts_looked_up(lookup, set.key_length());
        let found = set.look_up(&name, &parts.ok_or("a set")?)?;
        *self.looked_up = looked_up;
        Ok(found)
    }

    fn map(&mut self, found: Found) {
        let decided = |(code, chain): &(u32, Option<String>)| decided(*code, chain.as_deref());
        match found.verdicts.iter().map(decided).collect::<Option<Vec<_>>>() {
            Some(verdicts) if verdicts.len() == found.among.values.len() => {
                self.statement(Statement::Map(VerdictMap { among: found.among, verdicts }));
            }
            Some(_) | None => self.statement(Statement::Unknown("verdict map".to_owned())),
        }
    }

    /// An unsupported one: a condition, unless it loads or changes a register and compares nothing.
    fn other(&mut self, name: &'a str, data: Attributes<'a>) {
        // These begin with the register they check.
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

/// Makes one condition of two where both say between which values the same one is.
fn narrow(one: &mut Condition, two: &Condition) -> bool {
    match (one, two) {
        (
            Condition::Among(Equality { value: one, not: false }),
            Condition::Among(Equality { value: two, not: false }),
        ) if one.selectors == two.selectors && one.name.is_none() && two.name.is_none() => {
            let ([ones], [twos]) = (one.values.as_mut_slice(), two.values.as_slice()) else { return false };
            let ([range], [(first, last)]) = (ones.as_mut_slice(), twos.as_slice()) else { return false };
            *range = (range.0.max(*first), range.1.min(*last));
            true
        }
        (
            Condition::Plain(Match::DestinationPort(Equality { value: one, not: false })),
            Condition::Plain(Match::DestinationPort(Equality { value: two, not: false })),
        )
        | (
            Condition::Plain(Match::SourcePort(Equality { value: one, not: false })),
            Condition::Plain(Match::SourcePort(Equality { value: two, not: false })),
        ) => {
            let both = PortRange::new(one.first().max(two.first()), one.last().min(two.last()));
            both.is_some_and(|both| {
                *one = both;
                true
            })
        }
        _ => false,
    }
}

/// What a lookup in a set asks; few ports have conditions of their own.
fn among(among: SetLookup, not: bool) -> Condition {
    /// As many as callers try packets for.
    const FEW: usize = 3;
    let ports = || {
        let port = |number: u128| u16::try_from(number).ok();
        let range = |values: &Vec<(u128, u128)>| match values.as_slice() {
            [(first, last)] => PortRange::new(port(*first)?, port(*last)?),
            _ => None,
        };
        let few = &among.values.get(..=FEW).map_or(among.values.as_slice(), |_| &[]);
        if few.is_empty() { None } else { few.iter().map(range).collect::<Option<Vec<_>>>() }
    };
    let found = match (among.selectors.as_slice(), &among.name) {
        ([Selector::DestinationPort], None) => {
            ports().map(|value| Condition::Plain(Match::DestinationPorts(Equality { value, not })))
        }
        ([Selector::SourcePort], None) => {
            ports().map(|value| Condition::SourcePorts(Equality { value, not }))
        }
        _ => None,
    };
    found.unwrap_or(Condition::Among(Equality { value: among, not }))
}

/// What an expression does that is known by its name alone, if it does anything; `None` for another.
fn statement_named(name: &str, data: Attributes<'_>) -> Option<Option<Statement>> {
    Some(Some(match name {
        "last" => return Some(None),
        "objref" => match data.find(attribute::object_reference::TYPE).and_then(Attribute::u32) {
            // These are conditions: packets beyond the limit skip the rest of the rule. Any of them may also come from a map.
            Some(object::QUOTA | object::LIMIT | object::CONNECTION_LIMIT) | None => return None,
            Some(object::SYNPROXY) => Statement::Rewrite("synproxy".to_owned()),
            Some(_) => Statement::Harmless(name.to_owned()),
        },
        // What it does for each element, such as limiting it, may be a condition.
        "dynset"
            if [attribute::dynamic_set::EXPRESSION, attribute::dynamic_set::EXPRESSIONS]
                .into_iter()
                .any(|kind| data.find(kind).is_some()) =>
        {
            return None;
        }
        "log" | "dynset" | "dup" => Statement::Harmless(name.to_owned()),
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
    let bytes = from.and_then(|from| from.value());
    let value = bytes.and_then(number);
    // Of another field than its own, some bits: `meta mark set ct mark & 0xff`.
    let part = |of: Field| changed(of, from).map(|(cleared, flip)| (u32::MAX, !cleared, flip));
    match (field, part(Field::Ct(ct::MARK)), part(Field::Meta(meta::MARK))) {
        (Field::Meta(meta::MARK), Some((cleared, mask, flip)), _) if loaded.is_none() => {
            return Statement::RestoreMarkBits { cleared, mask, flip };
        }
        (Field::Ct(ct::MARK), _, Some((cleared, mask, flip))) if loaded.is_none() => {
            return Statement::SaveMarkBits { cleared, mask, flip };
        }
        _ => {}
    }
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
        (Field::Ct(ct::ZONE), ..) => bytes.and_then(|bytes| bytes.try_into().ok()).map_or_else(
            || Statement::Harmless("ct zone set".to_owned()),
            |zone| Statement::Zone(u16::from_ne_bytes(zone)),
        ),
        (
            Field::Meta(_)
            | Field::Ct(_)
            | Field::CtOneWay(..)
            | Field::Payload { .. }
            | Field::AddressType(_),
            _,
            _,
        ) => Statement::Harmless(alloc::format!("{} set", field_name(field))),
    }
}

/// The bits of a field that are cleared, and those that are then flipped, where it is stored again like this.
fn changed(field: Field, from: Option<Loaded<'_>>) -> Option<(u32, u32)> {
    let loaded = from.filter(|from| matches!(from.origin, Origin::Field(origin) if origin == field))?;
    match loaded.bits {
        Bits::All => Some((0, 0)),
        Bits::Masked(mask) => Some((!number(mask)?, 0)),
        Bits::Flipped { mask, flip } => Some((!number(mask)?, number(flip)?)),
        Bits::NetworkOrder | Bits::Unknown => None,
    }
}

/// What writing to the packet does.
fn written(field: Field) -> Statement {
    match field {
        Field::Payload { base, offset, length } if payload_name(base, offset, length).is_some() => {
            Statement::Rewrite(alloc::format!("{} set", field_name(field)))
        }
        Field::Meta(_)
        | Field::Ct(_)
        | Field::CtOneWay(..)
        | Field::Payload { .. }
        | Field::AddressType(_) => Statement::Harmless("payload set".to_owned()),
    }
}

/// `None` for a jump without a target.
fn decided(code: u32, chain: Option<&str>) -> Option<Statement> {
    Some(match code {
        verdict::ACCEPT => Statement::Accept,
        verdict::DROP => Statement::Drop,
        verdict::RETURN => Statement::Return,
        verdict::CONTINUE => Statement::Continue,
        verdict::JUMP => Statement::Jump(chain?.to_owned()),
        GOTO => Statement::Goto(chain?.to_owned()),
        code if code & VERDICT_MASK == QUEUE => Statement::Queue,
        _ => Statement::Unknown("verdict".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use redirect_core::rule::Equality;

    #[test]
    fn verdicts_have_the_numbers_of_the_kernel() {
        let queue_of = |number: u32| number << 16 | 3;
        for (code, wanted) in [
            (0, Statement::Drop),
            (1, Statement::Accept),
            (queue_of(0), Statement::Queue),
            (queue_of(7), Statement::Queue),
            (4, Statement::Unknown("verdict".into())),
            (u32::MAX, Statement::Continue),
            (u32::MAX - 2, Statement::Jump("there".into())),
            (u32::MAX - 3, Statement::Goto("there".into())),
            (u32::MAX - 4, Statement::Return),
        ] {
            assert_eq!(decided(code, Some("there")), Some(wanted), "{code:#x}");
        }
        assert_eq!((decided(u32::MAX - 2, None), decided(u32::MAX - 3, None)), (None, None));
    }

    #[test]
    fn two_conditions_become_one_where_both_are_ranges_of_the_same() {
        let range = |selector, name: Option<&str>, first, last| {
            let name = name.map(ToOwned::to_owned);
            let among = SetLookup { selectors: vec![selector], name, values: vec![vec![(first, last)]] };
            Condition::Among(Equality { value: among, not: false })
        };
        let narrowed = |mut one: Condition, two: &Condition| narrow(&mut one, two).then_some(one);
        let (mark, conn_mark) = (Selector::Mark, Selector::ConnMark);
        let five_to_nine = range(mark, None, 5, 9);
        assert_eq!(narrowed(five_to_nine.clone(), &range(mark, None, 7, 12)), Some(range(mark, None, 7, 9)));
        for other in [range(conn_mark, None, 7, 12), range(mark, Some("theirs"), 7, 12)] {
            assert_eq!(narrowed(five_to_nine.clone(), &other), None);
            assert_eq!(narrowed(other, &five_to_nine), None);
        }
    }
}
