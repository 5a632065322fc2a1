//! Any program's rule, read expression by expression, so that an unsupported one does not hide the rest.

mod comparisons;
mod extensions;

use super::{
    abi::{self, attribute, base, ct, meta, object, verdict},
    expression::TCP_FLAGS,
    reading::{
        self, Bits, Expression, Field, Loaded, LookupExpression, Registers, ValueOrigin, WIDEST_OF_MAPS, Xt,
        sets::{self, FoundElements, Why},
    },
    wire::{Attribute, Attributes, number},
};
use crate::ruleset::{
    Condition, CopiedMark, Counter, Endpoint, KernelRule, Selector, SetLookup, Sets, Statement, VerdictMap,
};
use comparisons::{FIRST_HEADER, compared, ranged};
pub(crate) use comparisons::{address, interface, prefix_of, protocol};
pub(crate) use extensions::{extension_match, extension_target, matched_socket_marks};
use redirect_core::{
    rule::{Equality, Match, Protocol},
    values::{Family, PortRange},
};
use std::borrow::Cow;

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
pub(crate) fn rule(expressions: Attributes<'_>) -> KernelRule {
    rule_with(expressions, None, &Sets::new(), &mut 0)
}

/// Reads the expressions of a rule of a table of this family, unless it is of both, with these sets. Counts how many elements are looked up.
pub(crate) fn rule_with(
    expressions: Attributes<'_>,
    family: Option<Family>,
    sets: &Sets,
    looked_up: &mut usize,
) -> KernelRule {
    let mut reader = ExpressionReader::new(family, sets, looked_up);
    let mut rest = expressions;
    while let Some((_, element)) = rest.next() {
        reader.is_last = rest.clone().next().is_none();
        if let Some(("counter", data)) = reading::name_and_data(element) {
            reader.rule.counter = counter(data).or(reader.rule.counter);
        } else {
            let nameless = Expression::Other { name: "?", data: element.attributes() };
            reader.expression(Expression::read(element).unwrap_or(nameless));
        }
    }
    // Two comparisons of order, one behind the other, are how nft writes a range.
    reader.rule.conditions.dedup_by(|two, one| narrow(one, two));
    reader.rule
}

/// Of several counters the last is nearest to what the rule does.
fn counter(data: Attributes<'_>) -> Option<Counter> {
    let (packets, bytes) = (data.u64(attribute::counter::PACKETS)?, data.u64(attribute::counter::BYTES)?);
    Some(Counter { packets, bytes })
}

pub(crate) fn port(value: &[u8]) -> Option<u16> {
    <[u8; 2]>::try_from(value).ok().map(u16::from_be_bytes)
}

/// What a field is called in nft.
fn field_name(field: Field) -> Cow<'static, str> {
    match field {
        Field::Meta(meta::ETHERTYPE) => "meta protocol".into(),
        Field::Meta(meta::IN_INDEX) => "iif".into(),
        Field::Meta(meta::OUT_INDEX) => "oif".into(),
        Field::Meta(key) => {
            field.selected().map_or_else(|| format!("meta {key}").into(), |selector| selector.name().into())
        }
        Field::Ct(ct::STATE) => "ct state".into(),
        Field::Ct(ct::MARK) => "ct mark".into(),
        Field::Ct(ct::ZONE) | Field::CtOneWay(ct::ZONE, _) => "ct zone".into(),
        Field::Ct(key) | Field::CtOneWay(key, _) => format!("ct {key}").into(),
        Field::Payload { .. } => payload_name(field).into(),
        Field::AddressType(Endpoint::Source) => "fib saddr type".into(),
        Field::AddressType(Endpoint::Destination) => "fib daddr type".into(),
    }
}

/// What a part of the packet is called in nft.
const fn payload_name(field: Field) -> &'static str {
    match field.selected() {
        Some(Selector::SourcePort) => "sport",
        Some(Selector::DestinationPort) => "dport",
        Some(part @ (Selector::Source(_) | Selector::Destination(_) | Selector::TcpFlags)) => part.name(),
        Some(_) | None => "payload",
    }
}

/// What a register holds, as nft calls it.
fn name_of(origin: ValueOrigin<'_>) -> String {
    match origin {
        ValueOrigin::Field(field) => field_name(field).into_owned(),
        ValueOrigin::Value(_) => "value".to_owned(),
        ValueOrigin::Other(name) => name.to_owned(),
    }
}

/// Reads expressions, one behind the other.
pub(crate) struct ExpressionReader<'a, 's> {
    /// That of the table, or what was compared with one so far.
    family: Option<Family>,
    pub(crate) registers: Registers<'a>,
    pub(crate) rule: KernelRule,
    /// What was loaded that a packet may lack, and what it has to have. A comparison states it itself.
    lacking: Vec<(ValueOrigin<'a>, Condition)>,
    /// Whether the rule has done something by then.
    has_acted: bool,
    /// Whether no expression follows.
    is_last: bool,
    sets: &'s Sets,
    looked_up: &'s mut usize,
}

impl<'a, 's> ExpressionReader<'a, 's> {
    pub(crate) fn new(family: Option<Family>, sets: &'s Sets, looked_up: &'s mut usize) -> Self {
        Self {
            family,
            registers: Registers::default(),
            rule: KernelRule::default(),
            lacking: Vec::new(),
            has_acted: false,
            is_last: false,
            sets,
            looked_up,
        }
    }

    /// Something that the rule does with the packets that it has not let go by then.
    pub(crate) fn statement(&mut self, statement: Statement) {
        if !statement.leaves_all() {
            for (_, lacks) in std::mem::take(&mut self.lacking) {
                self.condition(lacks);
            }
            self.has_acted = true;
            self.registers.outdate(|field| is_changed(field, &statement));
        }
        self.rule.statements.push(statement);
    }

    pub(crate) fn expression(&mut self, expression: Expression<'a>) {
        match expression {
            Expression::Counter => {}
            Expression::Load { to, field } => {
                let origin = self.understood(field);
                if field.may_lack() {
                    self.may_lack(origin);
                }
                self.registers.load(to, origin, field.width());
            }
            Expression::Value { to, value } => {
                self.registers.load(to, ValueOrigin::Value(value), value.len());
            }
            Expression::Bitwise { from, to, mask, flip, .. } => {
                self.registers.change((from, to), "bitwise", |loaded| loaded.changed(mask, flip));
            }
            // No piece fits, and nothing is written: nft has this for numbers of one byte.
            Expression::Byteorder { length, size, .. } if length < size => {}
            Expression::Byteorder { from, to, operation, length, size } => {
                let reordered = |loaded: Loaded<'a>| loaded.reordered(operation, length, size);
                self.registers.change((from, to), "byteorder", reordered);
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
                self.conditions(extension_match(name, revision, info), || format!("-m {name}"));
                if matched_socket_marks(name, info) {
                    self.statement(Statement::SetMark(None));
                }
            }
            Expression::Target(Xt { name, revision, info }) => {
                let statement = extension_target(name, revision, info);
                let unknown = || Statement::Unknown(format!("-j {name}"));
                self.statement(statement.unwrap_or_else(unknown));
            }
            Expression::Store { field, from } => {
                let from = from.and_then(|from| self.registers.get(from));
                let statement = stored(field, from);
                // These know themselves what becomes of a packet without a connection.
                let keeps_bits = matches!(statement, Statement::SetConnMark { mask, .. } if mask != u32::MAX);
                let restores = matches!(statement, Statement::RestoreMark(_));
                if keeps_bits || restores {
                    self.lacking.retain(|(origin, _)| *origin != ValueOrigin::Field(Field::Ct(ct::MARK)));
                }
                self.statement(statement);
            }
            Expression::Write { field, data } => {
                let from = data.u32(attribute::payload::SOURCE).and_then(|from| self.registers.get(from));
                let keeps_checksum = keeps_checksum(data, self.family);
                self.statement(written(field, from, self.family.filter(|_| keeps_checksum)));
            }
            Expression::Verdict { code, chain } => {
                let decided = decided(code, chain.map(Attribute::name));
                self.statement(decided.unwrap_or_else(|| Statement::Unknown("immediate".to_owned())));
            }
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
            Expression::Other { name, data } => self.other(name, data),
        }
    }

    /// The field that a load is about, if that is certain: of a header of IP only for a family that is known by then, and of TCP's only
    /// for its segments.
    fn understood(&self, field: Field) -> ValueOrigin<'a> {
        let is_known = match (field, self.family) {
            (Field::Payload { base: base::NETWORK, offset, length }, Some(Family::V4)) => {
                matches!((offset, length), (12 | 16, 1..=4) | (9, 1) | (0, 2) | (1, 1))
            }
            (Field::Payload { base: base::NETWORK, offset, length }, Some(Family::V6)) => {
                matches!((offset, length), (8 | 24, 1..=16) | (FIRST_HEADER, 1) | (0, 2))
            }
            (Field::Payload { base: base::TRANSPORT, offset: TCP_FLAGS, .. }, _) => {
                self.rule.conditions.contains(&Condition::Plain(Match::Protocol(Protocol::Tcp)))
            }
            (Field::Payload { base: base::TRANSPORT, .. }, _) => true,
            (Field::Payload { .. }, _) => false,
            (Field::Meta(_) | Field::Ct(_) | Field::CtOneWay(..) | Field::AddressType(_), _) => true,
        };
        if is_known { ValueOrigin::Field(field) } else { ValueOrigin::Other(payload_name(field)) }
    }

    /// Packets that lack what was loaded go no farther in the rule.
    fn may_lack(&mut self, origin: ValueOrigin<'a>) {
        const WITH_A_CONNECTION: [u32; 6] =
            [ct::DIRECTION, ct::STATUS, ct::MARK, ct::SECURITY_MARK, ct::ZONE, ct::ID];
        let is_of_all = |origin: ValueOrigin<'_>| matches!(origin, ValueOrigin::Field(Field::Ct(key)) if WITH_A_CONNECTION.contains(&key));
        let lacks =
            if is_of_all(origin) { Condition::Connection } else { Condition::Unknown(name_of(origin)) };
        self.lacking.push((origin, lacks));
    }

    /// The condition that an expression puts on a register.
    fn asked<C: IntoIterator<Item = Condition>>(
        &mut self,
        name: &str,
        register: u32,
        read: impl FnOnce(&Loaded<'_>) -> Option<C>,
    ) {
        let loaded = self.registers.get(register);
        if let Some(loaded) = loaded {
            self.lacking.retain(|(origin, _)| *origin != loaded.origin);
        }
        self.conditions(loaded.as_ref().and_then(read), || {
            loaded.map_or_else(|| name.to_owned(), |loaded| name_of(loaded.origin))
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

    pub(crate) fn condition(&mut self, condition: Condition) {
        if let Condition::Family(Equality { value, not: false }) = condition {
            self.family = Some(value);
        }
        // In the kernel's order: of a rule that has done something already, only the rest depends on it.
        if self.has_acted {
            self.rule.statements.push(Statement::If(condition));
        } else {
            self.rule.conditions.push(condition);
        }
    }

    fn unknown(&mut self, words: impl Into<String>) {
        self.condition(Condition::Unknown(words.into()));
    }

    /// The port that a register holds.
    fn port_in(&self, register: u32) -> Option<u16> {
        self.registers.get(register)?.value().and_then(port)
    }

    fn redirected(&self, first: Option<u32>, last: Option<u32>) -> Statement {
        if first.is_none() {
            return Statement::Redirect(None);
        }
        let [first, last] = [first, last.or(first)].map(|port| port.and_then(|port| self.port_in(port)));
        match first {
            Some(port) if first == last => Statement::Redirect(Some(port)),
            Some(_) | None => Statement::Translate("REDIRECT".to_owned()),
        }
    }

    fn lookup(&mut self, lookup: LookupExpression<'a>) {
        match self.found(lookup) {
            Ok(found) if lookup.is_verdict_map() => self.map(found),
            Ok(found) => self.condition(among(found.among, lookup.is_inverted())),
            Err(why) => {
                let loaded = self.registers.looked_up(lookup);
                let what = loaded.map_or_else(|| "something".to_owned(), |loaded| name_of(loaded.origin));
                if lookup.is_verdict_map() {
                    self.statement(Statement::Unknown(format!("{what} in a verdict map, {why}")));
                } else {
                    self.unknown(format!("{what} in {why}"));
                }
            }
        }
        if let Some(to) = lookup.loads() {
            self.registers.load(to, ValueOrigin::Other("map"), WIDEST_OF_MAPS);
        }
    }

    fn found(&mut self, lookup: LookupExpression<'a>) -> Result<FoundElements, Why> {
        let name = lookup.set().ok_or("a set without a name")?;
        let set = self.sets.get(&name).ok_or("a set")?;
        let looked_up = self.looked_up.saturating_add(set.elements.len());
        if looked_up > MOST_LOOKED_UP {
            return Err("a set, where more is looked up than is followed");
        }
        let parts = self.registers.parts_looked_up(lookup, set.key_length);
        let found = set.look_up(&name, &parts.ok_or("a set")?)?;
        *self.looked_up = looked_up;
        // A packet that lacks one has none of the set's values; nor does it have any other.
        if !(lookup.is_inverted() && found.among.selectors.len() > 1) {
            let registers = &self.registers;
            self.lacking.retain(|(origin, _)| !registers.looks_up(lookup, set.key_length, *origin));
        }
        Ok(found)
    }

    fn map(&mut self, found: FoundElements) {
        let decided = |(code, chain): &(u32, Option<String>)| decided(*code, chain.clone());
        match found.verdicts.iter().map(decided).collect::<Option<Vec<_>>>() {
            Some(verdicts) if verdicts.len() == found.among.values.len() => {
                self.statement(Statement::Map(VerdictMap { among: found.among, verdicts }));
            }
            Some(_) | None => self.statement(Statement::Unknown("verdict map".to_owned())),
        }
    }

    /// An object, or one that a map may have for a packet.
    fn object(&mut self, data: Attributes<'a>) {
        use attribute::object_reference::{SET, SET_ID, TYPE};
        let map = sets::name_of(data, SET, SET_ID);
        let kind = match &map {
            Some(name) => self.sets.get(name).and_then(|set| set.object),
            None => data.u32(TYPE),
        };
        let statement = object(kind);
        if map.is_some() || statement.is_none() {
            self.unknown("objref");
        }
        if let Some(statement) = statement {
            self.statement(statement);
        }
    }

    /// Translation to or from an address. In a table of both families packets of the other one than that address's go on behind it.
    fn translate(&mut self, data: Attributes<'a>) {
        let of = data.u32(attribute::nat::FAMILY).and_then(|family| u8::try_from(family).ok());
        let of = of.and_then(abi::family_of);
        if let Some(value) = of.filter(|_| self.family.is_none()) {
            if self.is_last {
                self.condition(Condition::Family(Equality { value, not: false }));
            } else {
                self.unknown("nat");
            }
        }
        self.statement(if data.u32(attribute::nat::TYPE) == Some(TRANSLATE_DESTINATION) {
            Statement::Translate("DNAT".to_owned())
        } else {
            Statement::TranslateSource("SNAT".to_owned())
        });
    }

    /// One of those that are known by name. What is on no list may do anything.
    fn other(&mut self, name: &'a str, data: Attributes<'a>) {
        // These begin with the register they check.
        let looked_at = || data.u32(1).and_then(|register| self.registers.get(register));
        match name {
            "exthdr" if data.find(attribute::extension_header::DESTINATION).is_none() => {
                self.unknown("exthdr");
                self.statement(header_written(data));
            }
            "fib" | "socket" | "rt" | "osf" | "exthdr" | "tunnel" | "xfrm" | "inner" => {
                self.may_lack(ValueOrigin::Other(name));
                self.registers.forget(ValueOrigin::Other(name));
            }
            // These always have a value.
            "numgen" | "hash" | "byteorder" | "bitwise" => self.registers.forget(ValueOrigin::Other(name)),
            "cmp" | "range" => {
                let words = looked_at().map_or_else(|| name.to_owned(), |loaded| name_of(loaded.origin));
                self.unknown(words);
            }
            "match" => {
                let name = data.text(attribute::xt::NAME).unwrap_or("?");
                self.unknown(format!("-m {name}"));
            }
            // Packets beyond them skip the rest of the rule.
            "limit" | "quota" | "connlimit" => self.unknown(name),
            "dynset" => {
                // A full set ends the rule, and so may what it does for each element.
                self.unknown(name);
                let set = sets::name_of(data, attribute::dynamic_set::SET, attribute::dynamic_set::SET_ID);
                self.statement(Statement::Updates(set.unwrap_or_default()));
            }
            "objref" => self.object(data),
            "nat" => self.translate(data),
            // `nft_last.c`: notes when.
            "last" => {}
            name => match statement_named(name) {
                Some(statement) => self.statement(statement),
                None => {
                    self.registers.forget(ValueOrigin::Other(name));
                    self.statement(Statement::Unknown(name.to_owned()));
                }
            },
        }
    }
}

/// Whether a field is another one behind a statement: every one, if what the statement does is not known.
const fn is_changed(field: Field, statement: &Statement) -> bool {
    if matches!(statement, Statement::SetMark(_) | Statement::RestoreMark(_)) {
        return matches!(field, Field::Meta(meta::MARK));
    }
    if matches!(statement, Statement::SaveMark(_) | Statement::SetConnMark { .. }) {
        return matches!(field, Field::Ct(ct::MARK));
    }
    if matches!(statement, Statement::Untrack | Statement::Zone(_)) {
        return matches!(field, Field::Ct(_) | Field::CtOneWay(..));
    }
    true
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

/// What an expression does that is known by its name alone; `None` for an unknown name.
fn statement_named(name: &str) -> Option<Statement> {
    Some(match name {
        // `nft_log.c`: reports the packet.
        "log" => Statement::Harmless(name.to_owned()),
        "masq" => Statement::TranslateSource("MASQUERADE".to_owned()),
        "notrack" => Statement::Untrack,
        "queue" => Statement::Queue,
        "reject" => Statement::Reject,
        // A copy of a segment may end the connection.
        "dup" | "synproxy" | "fwd" | "flow_offload" => Statement::Rewrite(name.to_owned()),
        _ => return None,
    })
}

/// What a reference to a stateful object does; `None` for a condition: packets beyond a limit skip the rest of the rule.
fn object(kind: Option<u32>) -> Option<Statement> {
    Some(match kind {
        Some(object::QUOTA | object::LIMIT | object::CONNECTION_LIMIT) => return None,
        // `nft_counter.c` counts; `nft_meta.c` sets what security modules read.
        Some(object::COUNTER | object::SECURITY_MARK) => Statement::Harmless("objref".to_owned()),
        Some(object::SYNPROXY) => Statement::Rewrite("synproxy".to_owned()),
        // A helper may drop what it cannot read, and a connection with other timeouts may end at once.
        Some(_) | None => Statement::Rewrite("objref".to_owned()),
    })
}

/// What writing an extension header or an option of TCP does.
fn header_written(data: Attributes<'_>) -> Statement {
    use attribute::extension_header::{LENGTH, OFFSET, OPERATION, SOURCE, TYPE};
    let is_segment_size = data.u32(OPERATION) == Some(abi::extension_header::TCP_OPTION)
        && (data.u32(OFFSET), data.u32(LENGTH)) == abi::extension_header::PLACE_OF_SIZE
        && data.find(TYPE).is_some_and(|kind| kind.0 == [abi::extension_header::SEGMENT_SIZE])
        && data.find(SOURCE).is_some();
    if is_segment_size {
        // `nft_exthdr_tcp_set_eval`: only ever makes it smaller.
        Statement::Harmless("tcp option maxseg set".to_owned())
    } else {
        Statement::Rewrite("exthdr set".to_owned())
    }
}

/// What storing something in a field does.
fn stored(field: Field, from: Option<Loaded<'_>>) -> Statement {
    let bytes = from.and_then(|from| from.value());
    // A value, or the field itself with other bits.
    let set = bytes.and_then(number).map(|value| (u32::MAX, value)).or_else(|| changed(field, from));
    // Another field, or some bits of it: `meta mark set ct mark & 0xff`.
    let copied =
        |of: Field| changed(of, from).map(|(rest, flip)| CopiedMark { cleared: u32::MAX, mask: !rest, flip });
    match (field, copied(Field::Ct(ct::MARK)), copied(Field::Meta(meta::MARK))) {
        (Field::Meta(meta::MARK), Some(copied), _) => Statement::RestoreMark(copied),
        (Field::Meta(meta::MARK), None, _) => Statement::SetMark(set),
        (Field::Ct(ct::MARK), _, Some(copied)) => Statement::SaveMark(copied),
        (Field::Ct(ct::MARK), _, None) => match set {
            Some((mask, value)) => Statement::SetConnMark { mask, value },
            None => Statement::Unknown(format!("{} set", field_name(field))),
        },
        (Field::Ct(ct::ZONE), ..) => bytes.and_then(|bytes| bytes.try_into().ok()).map_or_else(
            || Statement::Unknown("ct zone set".to_owned()),
            |zone| Statement::Zone(u16::from_ne_bytes(zone)),
        ),
        // `nft_meta_set_eval`: for queues, for traces, for security modules; `nft_ct_set_eval`: for who listens to connection tracking.
        (
            Field::Meta(meta::PRIORITY | meta::TRACE | meta::SECURITY_MARK)
            | Field::Ct(ct::LABELS | ct::EVENTS | ct::SECURITY_MARK),
            ..,
        ) => Statement::Harmless(format!("{} set", field_name(field))),
        (
            Field::Meta(_)
            | Field::Ct(_)
            | Field::CtOneWay(..)
            | Field::Payload { .. }
            | Field::AddressType(_),
            _,
            _,
        ) => Statement::Rewrite(format!("{} set", field_name(field))),
    }
}

/// The bits of a field that are cleared, and those that are then flipped, where it is stored again like this.
fn changed(field: Field, from: Option<Loaded<'_>>) -> Option<(u32, u32)> {
    let loaded = from.filter(|from| matches!(from.origin, ValueOrigin::Field(origin) if origin == field))?;
    match loaded.bits {
        Bits::All => Some((0, 0)),
        Bits::Masked(mask) => Some((!number(mask)?, 0)),
        Bits::Flipped { mask, flip } => Some((!number(mask)?, number(flip)?)),
        Bits::NetworkOrder | Bits::Unknown => None,
    }
}

/// What writing to the packet does: everything but the class of traffic, which no rule of netfilter is known to ask for, may matter.
fn written(field: Field, from: Option<Loaded<'_>>, family: Option<Family>) -> Statement {
    let kept: Option<&[u8]> = match (field, family) {
        (Field::Payload { base: base::NETWORK, offset: 0, length: 2 }, Some(Family::V4)) => Some(&[0xff, 0]),
        (Field::Payload { base: base::NETWORK, offset: 0, length: 2 }, Some(Family::V6)) => {
            Some(&[0xf0, 0x0f])
        }
        (Field::Payload { base: base::NETWORK, offset: 1, length: 1 }, Some(Family::V4)) => Some(&[0]),
        _ => None,
    };
    let (mask, flip): (&[u8], &[u8]) = match from.filter(|from| from.origin == ValueOrigin::Field(field)) {
        Some(Loaded { bits: Bits::Masked(mask), .. }) => (mask, &[0; 2]),
        Some(Loaded { bits: Bits::Flipped { mask, flip }, .. }) => (mask, flip),
        _ => (&[0; 2], &[0; 2]),
    };
    let keeps = |kept: &[u8]| {
        kept.iter().zip(mask).zip(flip).all(|((kept, mask), flip)| kept & !mask == 0 && kept & flip == 0)
    };
    if kept.is_some_and(keeps) {
        return Statement::SetClass("payload set".to_owned());
    }
    Statement::Rewrite(format!("{} set", field_name(field)))
}

/// Whether writing the class of traffic leaves a header whose checksum is right: of IPv4 alone the header has one.
fn keeps_checksum(data: Attributes<'_>, family: Option<Family>) -> bool {
    use attribute::payload::{CHECKSUM_FLAGS, CHECKSUM_OFFSET, CHECKSUM_TYPE};
    let number = |kind| data.u32(kind).unwrap_or_default();
    let corrected = match number(CHECKSUM_TYPE) {
        0 => None,
        kind => Some((kind, number(CHECKSUM_OFFSET))),
    };
    let wanted = if family == Some(Family::V4) { Some(abi::HEADER_CHECKSUM) } else { None };
    corrected == wanted && number(CHECKSUM_FLAGS) == 0
}

/// `None` for a jump without a target.
fn decided(code: u32, chain: Option<String>) -> Option<Statement> {
    Some(match code {
        verdict::ACCEPT => Statement::Accept,
        verdict::DROP => Statement::Drop,
        verdict::RETURN => Statement::Return,
        verdict::CONTINUE => Statement::Continue,
        verdict::JUMP => Statement::Jump(chain?),
        GOTO => Statement::Goto(chain?),
        code if code & VERDICT_MASK == QUEUE => Statement::Queue,
        _ => Statement::Unknown("verdict".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expressions::{
        expression::{Expressions, address_offset},
        wire::MessageWriter,
    };

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
            assert_eq!(decided(code, Some("there".into())), Some(wanted), "{code:#x}");
        }
        assert_eq!((decided(u32::MAX - 2, None), decided(u32::MAX - 3, None)), (None, None));
    }

    /// The words of a rule of these expressions, in a table of IPv4.
    fn words(write: impl FnOnce(&mut Expressions<'_>)) -> String {
        words_of(Some(Family::V4), write)
    }

    fn words_of(family: Option<Family>, write: impl FnOnce(&mut Expressions<'_>)) -> String {
        let mut writer = MessageWriter::default();
        write(&mut Expressions(&mut writer));
        rule_with(writer.attributes(), family, &Sets::new(), &mut 0).to_string()
    }

    /// An expression of which only a name is known, and attributes of 32 bits.
    fn named(out: &mut Expressions<'_>, name: &str, numbers: &[(u16, u32)]) {
        out.0.nested(attribute::ELEMENT, |element| {
            element.text(attribute::expression::NAME, name);
            element.nested(attribute::expression::DATA, |data| {
                numbers.iter().for_each(|(kind, number)| data.u32(*kind, *number));
            });
        });
    }

    #[test]
    fn what_a_rule_has_done_does_not_depend_on_what_it_asks_then() {
        let rule = words(|out| {
            named(out, "notrack", &[]);
            out.protocol(17);
            out.verdict(verdict::ACCEPT);
        });
        assert_eq!(rule, "-j NOTRACK -p udp -j ACCEPT");
        let rule = words(|out| {
            named(out, "log", &[]);
            out.protocol(17);
            out.verdict(verdict::ACCEPT);
        });
        assert_eq!(rule, "-p udp log -j ACCEPT", "what leaves packets alone has no order");
        let rule = words(|out| {
            out.meta(meta::MARK);
            out.value_in(2, &7_u32.to_ne_bytes());
            out.store_meta(meta::MARK, 2);
            out.is(false, &[0; 4]);
        });
        assert_eq!(rule, "-j MARK --set-mark 0x7 [an earlier value]");
    }

    #[test]
    fn a_packet_that_lacks_what_is_loaded_goes_no_farther() {
        let marked = |load: &dyn Fn(&mut Expressions<'_>)| {
            words(|out| {
                load(out);
                out.store_meta(meta::MARK, 1);
                out.verdict(verdict::RETURN);
            })
        };
        assert_eq!(marked(&|out| out.ct(ct::ID)), "ct id -j MARK -j RETURN");
        assert_eq!(marked(&|out| out.ct(ct::MARK)), "-j CONNMARK --restore-mark -j RETURN");
        assert_eq!(marked(&|out| out.ct(9)), "[ct 9] -j MARK -j RETURN");
        assert_eq!(marked(&|out| out.meta(meta::SOCKET_USER)), "[meta skuid] -j MARK -j RETURN");
        assert_eq!(marked(&|out| out.payload(base::TRANSPORT, 30, 4)), "[payload] -j MARK -j RETURN");
        assert_eq!(marked(&|out| named(out, "socket", &[])), "[socket] -j MARK -j RETURN");
        for known in [meta::LENGTH, meta::PRIORITY, meta::IN_INDEX, meta::IN_INTERFACE] {
            assert_eq!(marked(&|out| out.meta(known)), "-j MARK -j RETURN", "{known}");
        }
    }

    #[test]
    fn only_what_was_loaded_is_compared() {
        let source = address_offset(Endpoint::Source, Family::V4);
        let seen = |length: u32, value: &[u8]| {
            words(|out| {
                out.payload(base::NETWORK, source, length);
                out.is(false, value);
            })
        };
        assert_eq!(seen(4, &[10, 1, 0, 2]), "-s 10.1.0.2/32");
        assert_eq!(seen(2, &[10, 1]), "-s 10.1.0.0/16");
        assert_eq!(seen(1, &[10, 1, 0, 2]), "[payload]", "one byte is loaded, four are compared");
        assert_eq!(seen(8, &[10, 1, 0, 2]), "[payload]", "more than one field");
        let overwritten = |to: u32| {
            words(|out| {
                out.payload_in(to, base::NETWORK, source, 4);
                out.meta(meta::IN_INTERFACE);
                out.compare_in(to, &[10, 1, 0, 2]);
            })
        };
        assert_eq!(overwritten(2), "-s 10.1.0.2/32");
        // Registers of four bytes are parts of those of sixteen.
        for part in [1, 8, 9, 11] {
            assert!(overwritten(part).starts_with('['), "{part}: {}", overwritten(part));
        }
    }

    #[test]
    fn a_header_is_read_for_the_family_that_is_known() {
        let nothing = |_: &mut Expressions<'_>| {};
        let v4 = |out: &mut Expressions<'_>| out.family(Family::V4.number());
        type Before<'a> = &'a dyn Fn(&mut Expressions<'_>);
        for (family, before, wanted) in [
            (Some(Family::V4), &nothing as Before<'_>, "-s 10.1.0.2/32"),
            (Some(Family::V6), &nothing, "[ip saddr]"),
            (None, &nothing, "[ip saddr]"),
            (None, &v4, "-s 10.1.0.2/32 nfproto IPv4"),
        ] {
            let rule = words_of(family, |out| {
                before(out);
                out.payload(base::NETWORK, 12, 4);
                out.is(false, &[10, 1, 0, 2]);
            });
            assert_eq!(rule, wanted);
        }
        // The first of IPv6's headers behind its own may be another one than the transport's.
        for (not, wanted) in [(false, "-p tcp [ip6 nexthdr]"), (true, "[ip6 nexthdr]")] {
            let rule = words_of(Some(Family::V6), |out| {
                out.payload(base::NETWORK, 6, 1);
                out.is(not, &[6]);
            });
            assert_eq!(rule, wanted);
        }
        let flags = |asks_protocol: bool| {
            words(|out| {
                if asks_protocol {
                    out.protocol(6);
                }
                out.payload(base::TRANSPORT, TCP_FLAGS, 1);
                out.is(false, &[2]);
            })
        };
        assert_eq!(flags(true), "-p tcp --tcp-flags 0xff 0x02");
        assert_eq!(flags(false), "[tcp flags]");
    }

    #[test]
    fn what_is_on_no_list_may_do_anything() {
        let does = |name: &str, numbers: &[(u16, u32)]| words(|out| named(out, name, numbers));
        assert_eq!(does("brandnew", &[]), "[brandnew]");
        assert_eq!(does("dup", &[]), "dup");
        assert_eq!(does("limit", &[]), "[limit]");
        assert_eq!(does("objref", &[(attribute::object_reference::TYPE, object::COUNTER)]), "objref");
        let kinds = |rule: &dyn Fn(&mut Expressions<'_>)| {
            let mut writer = MessageWriter::default();
            rule(&mut Expressions(&mut writer));
            rule_with(writer.attributes(), Some(Family::V4), &Sets::new(), &mut 0).statements
        };
        let matters =
            |rule: &dyn Fn(&mut Expressions<'_>)| kinds(rule).iter().any(|statement| !statement.leaves_all());
        let stores = |key: u32| {
            move |out: &mut Expressions<'_>| {
                out.value(&[1; 4]);
                out.set_meta(key);
            }
        };
        assert!(!matters(&stores(meta::PRIORITY)) && !matters(&stores(meta::TRACE)));
        assert!(matters(&stores(19)), "the kind of packet, and with it who gets it");
        let writes = |length: u32, mask: &'static [u8], checksum: u32| {
            move |out: &mut Expressions<'_>| {
                out.payload(base::NETWORK, 0, length);
                out.mask(mask);
                let write = [
                    (attribute::payload::SOURCE, 1),
                    (attribute::payload::BASE, base::NETWORK),
                    (attribute::payload::OFFSET, 0),
                    (attribute::payload::LENGTH, length),
                    (attribute::payload::CHECKSUM_TYPE, u32::from(checksum != 0)),
                    (attribute::payload::CHECKSUM_OFFSET, checksum),
                ];
                named(out, "payload", &write);
            }
        };
        assert_eq!(kinds(&writes(2, &[0xff, 0x03], 10)), [Statement::SetClass("payload set".into())]);
        for (length, mask, checksum, why) in [
            (2, &[0x0f, 0xff][..], 10, "and the version with it"),
            (8, &[0xff; 8], 10, "and the length with it"),
            (2, &[0xff, 0x03], 0, "a header without a new checksum"),
            (2, &[0xff, 0x03], 12, "a header whose checksum is elsewhere"),
        ] {
            let seen = kinds(&writes(length, mask, checksum));
            assert!(matches!(seen.as_slice(), [Statement::Rewrite(_)]), "{why}: {seen:?}");
        }
    }

    #[test]
    fn what_is_written_over_a_register_is_not_what_was_there() {
        // The destination port is in the second register of four bytes, something else in the first and in the third.
        let seen = |write: &dyn Fn(&mut Expressions<'_>)| {
            words(|out| {
                out.payload_in(9, base::TRANSPORT, 2, 2);
                out.payload_in(10, base::NETWORK, 12, 4);
                write(out);
                out.compare_in(9, &[0, 80]);
            })
        };
        let nothing = seen(&|_| ());
        assert!(!nothing.starts_with('['), "{nothing}");
        let mask = |out: &mut Expressions<'_>| out.bitwise(10, 8, &[0xff; 8]);
        let order = |length: u32, size: u32| {
            move |out: &mut Expressions<'_>| {
                use attribute::byteorder::{DESTINATION, LENGTH, OPERATION, SIZE, SOURCE};
                let numbers =
                    [(SOURCE, 10), (DESTINATION, 8), (OPERATION, 1), (LENGTH, length), (SIZE, size)];
                named(out, "byteorder", &numbers);
            }
        };
        let map = |out: &mut Expressions<'_>| {
            named(out, "lookup", &[(attribute::lookup::SOURCE, 10), (attribute::lookup::DESTINATION, 1)]);
        };
        type Write<'a> = &'a dyn Fn(&mut Expressions<'_>);
        for (number, write) in [&mask as Write<'_>, &order(8, 4), &map].into_iter().enumerate() {
            let rule = seen(write);
            assert!(rule.ends_with(']'), "{number}: {rule}");
        }
        // No piece fits, so nothing is written.
        let port_over_address = words(|out| {
            out.payload_in(8, base::TRANSPORT, 2, 2);
            out.payload_in(10, base::TRANSPORT, 0, 2);
            order(1, 2)(out);
            out.compare_in(8, &[0, 80]);
        });
        assert_eq!(port_over_address, nothing);
    }

    #[test]
    fn a_value_that_was_shifted_is_another_one() {
        let shifted = words(|out| {
            out.value(&1_u32.to_ne_bytes());
            // `NFT_BITWISE_LSHIFT`
            named(
                out,
                "bitwise",
                &[(attribute::bitwise::SOURCE, 1), (attribute::bitwise::DESTINATION, 1), (6, 1)],
            );
            out.set_meta(meta::MARK);
        });
        assert_eq!(shifted, "-j MARK");
    }

    #[test]
    fn a_value_that_the_kernel_never_has_is_none_of_its_own() {
        let compared = |key: u32, value: &[u8]| {
            words(|out| {
                out.ct(key);
                out.is(true, value);
            })
        };
        assert_eq!(compared(ct::DIRECTION, &[1]), "-m conntrack --ctdir ORIGINAL");
        assert_eq!(compared(ct::DIRECTION, &[7]), "[ct 1]");
        let masked = |mask: u32| {
            words(|out| {
                out.state(mask);
            })
        };
        for bit in [crate::ruleset::StateBits::SOURCE_TRANSLATED, crate::ruleset::StateBits::TRANSLATED, 32] {
            assert_eq!(compared(ct::STATE, &bit.to_ne_bytes()), "[ct state]", "{bit:#x}");
            assert_eq!(masked(bit | 8), "[ct state]", "{bit:#x}");
        }
        assert_eq!(masked(8 | 64), "-m conntrack --ctstate NEW,UNTRACKED");
    }

    #[test]
    fn an_object_of_a_map_is_met_by_some_packets() {
        use attribute::object_reference::{SET, TYPE};
        let of_map = |object: u32| {
            let mut declared = MessageWriter::default();
            declared.u32(attribute::set::OBJECT_TYPE, object);
            let mut set = crate::ruleset::Set::default();
            set.declare(declared.attributes());
            let mut rule = MessageWriter::default();
            rule.nested(attribute::ELEMENT, |element| {
                element.text(attribute::expression::NAME, "objref");
                element.nested(attribute::expression::DATA, |data| data.text(SET, "map"));
            });
            let sets = [("map".to_owned(), set)].into();
            rule_with(rule.attributes(), None, &sets, &mut 0)
        };
        assert_eq!(of_map(object::SYNPROXY).to_string(), "[objref] synproxy");
        assert_eq!(of_map(object::LIMIT).to_string(), "[objref]");
        let counted = of_map(object::COUNTER);
        assert!(counted.statements.iter().all(Statement::leaves_all), "{counted}");
        let referred = |kind: u32| words_statements(|out| named(out, "objref", &[(TYPE, kind)]));
        assert!(referred(object::COUNTER).iter().all(Statement::leaves_all));
        // `NFT_OBJECT_CT_TIMEOUT`, `NFT_OBJECT_CT_HELPER`: connections that end at once, and what a helper cannot read.
        for kind in [7, 3, 99] {
            assert!(!referred(kind).iter().all(Statement::leaves_all), "{kind}");
        }
    }

    fn words_statements(write: impl FnOnce(&mut Expressions<'_>)) -> Vec<Statement> {
        let mut writer = MessageWriter::default();
        write(&mut Expressions(&mut writer));
        rule_with(writer.attributes(), Some(Family::V4), &Sets::new(), &mut 0).statements
    }

    #[test]
    fn only_the_size_itself_is_harmless_to_write_in_its_option() {
        let writes = |offset: u32, length: u32| {
            words_statements(|out| {
                out.0.nested(attribute::ELEMENT, |element| {
                    use attribute::extension_header::{LENGTH, OFFSET, OPERATION, SOURCE, TYPE};
                    element.text(attribute::expression::NAME, "exthdr");
                    element.nested(attribute::expression::DATA, |data| {
                        data.bytes(TYPE, &[abi::extension_header::SEGMENT_SIZE]);
                        data.u32(OFFSET, offset);
                        data.u32(LENGTH, length);
                        data.u32(OPERATION, abi::extension_header::TCP_OPTION);
                        data.u32(SOURCE, 1);
                    });
                });
            })
        };
        assert!(writes(2, 2).iter().all(Statement::leaves_all));
        for (offset, length) in [(0, 2), (1, 2), (0, 4), (2, 1)] {
            assert!(!writes(offset, length).iter().all(Statement::leaves_all), "{offset} {length}");
        }
    }

    #[test]
    fn of_a_table_of_both_families_a_translation_is_about_its_own() {
        let translated = |family: u32, behind: &dyn Fn(&mut Expressions<'_>)| {
            words_of(None, |out| {
                named(out, "nat", &[(attribute::nat::TYPE, 1), (attribute::nat::FAMILY, family)]);
                behind(out);
            })
        };
        assert_eq!(translated(2, &|_| ()), "nfproto IPv4 -j DNAT");
        assert_eq!(translated(10, &|_| ()), "nfproto IPv6 -j DNAT");
        assert_eq!(translated(1, &|_| ()), "-j DNAT", "of both");
        // Packets of the other family go on behind it.
        let verdict = |out: &mut Expressions<'_>| out.verdict(verdict::ACCEPT);
        assert_eq!(translated(2, &verdict), "[nat] -j DNAT -j ACCEPT");
        let of_one =
            words(|out| named(out, "nat", &[(attribute::nat::TYPE, 1), (attribute::nat::FAMILY, 2)]));
        assert_eq!(of_one, "-j DNAT");
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
