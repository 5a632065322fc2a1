//! Native nftables: the same rules in tables of their own that serve both families, in the words of `nft list ruleset`.

use super::{
    abi::{self, attribute, base, ct, family, flags, kind, meta, state, verdict},
    batch::{Batch, base_chain},
    expression::{AddressOffset, DESTINATION_PORT, Expressions, SOURCE_PORT},
    part::{Part, Place},
    sets::{self, Line, Ranges},
};
use crate::{
    plan::{PlannedRule, RulePlan},
    render,
    rule::{Chain, ConnState, Is, Match, Protocol, Rule, Scope, Table, Target, Tracked},
    values::{Family, InterfaceName, PortRange},
};
use alloc::{collections::BTreeMap, vec::Vec};
use ipnet::IpNet;

/// How native rules are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NativeForm {
    /// One rule for each planned one, as the reference writes them.
    Plain,
    /// Lists of ports and ranges with the same consequence become sets: what a packet costs does not grow with them.
    Sets,
}

/// The length of an interface's name, padding included (`IFNAMSIZ`).
const INTERFACE_LENGTH: usize = 16;

impl<'a> Batch<'a> {
    /// Adds native tables with a plan's rules, where there are none.
    /// [`native_change`](Self::native_change) is for those that are there.
    pub fn native(&mut self, rules: &'a NativeRules<'a>) {
        for NativeTable { table, chains } in &rules.tables {
            let name = render::nft_table(*table);
            self.part(kind::NEW_TABLE, flags::CREATE, family::INET, Part::Table(name), |body| {
                body.text(attribute::table::NAME, name);
            });
            for (chain, _) in chains {
                let place = Place { family: None, table: *table, chain };
                self.part(kind::NEW_CHAIN, flags::CREATE, family::INET, Part::Chain(place), |body| {
                    body.text(attribute::chain::TABLE, name);
                    body.text(attribute::chain::NAME, &render::nft_chain_name(chain));
                    if let Chain::Hook(hook) = chain {
                        base_chain(body, *table, *hook);
                    }
                });
            }
            for (chain, lines) in chains {
                let place = Place { family: None, table: *table, chain };
                for line in lines {
                    self.native_line(place, name, line);
                }
            }
        }
    }

    fn native_line(&mut self, place: Place<'a>, table: &str, line: &Line<'a>) {
        let set = line.set().map(|ranges| self.set(place, table, &ranges));
        let part = Part::NativeRule(place, line.planned());
        self.part(kind::NEW_RULE, flags::CREATE | flags::APPEND, family::INET, part, |body| {
            body.text(attribute::rule::TABLE, table);
            body.text(attribute::rule::CHAIN, &render::nft_chain_name(place.chain));
            body.nested(attribute::rule::EXPRESSIONS, |list| {
                rule(&mut Expressions(list), line, set);
            });
        });
    }

    /// Writes a set; its number in this transaction.
    fn set(&mut self, place: Place<'a>, table: &str, ranges: &Ranges) -> u32 {
        self.sets = self.sets.saturating_add(1);
        let id = self.sets;
        self.part(kind::NEW_SET, flags::CREATE, family::INET, Part::Set(place), |body| {
            sets::declare(body, table, id, ranges);
        });
        for elements in ranges.messages() {
            self.part(kind::NEW_SET_ELEMENT, flags::CREATE, family::INET, Part::Set(place), |body| {
                sets::fill(body, table, id, ranges.kind, &elements);
            });
        }
        id
    }
}

/// The rules of a plan as native tables hold them.
#[derive(Debug)]
pub struct NativeRules<'a> {
    tables: Vec<NativeTable<'a>>,
}

#[derive(Debug)]
struct NativeTable<'a> {
    table: Table,
    chains: Vec<(Chain, Vec<Line<'a>>)>,
}

impl<'a> NativeRules<'a> {
    /// The rules of a plan in this form.
    #[must_use]
    pub fn new(plan: &'a RulePlan, form: NativeForm) -> Self {
        let lines = |planned: Vec<&'a PlannedRule>| -> Vec<Line<'a>> {
            let lines = match form {
                NativeForm::Plain => planned.into_iter().map(Line::Rule).collect(),
                NativeForm::Sets => sets::gather(&planned),
            };
            lines.into_iter().flat_map(Line::complete).collect()
        };
        let chains = |chains: BTreeMap<Chain, Vec<&'a PlannedRule>>| {
            chains.into_iter().map(|(chain, planned)| (chain, lines(planned))).collect()
        };
        let tables = plan.merged_rules().into_iter();
        Self { tables: tables.map(|(table, of)| NativeTable { table, chains: chains(of) }).collect() }
    }
}

/// Conditions in the plan's order, the counter, the target. `set` is the number of the set that the line needs.
fn rule(out: &mut Expressions<'_>, line: &Line<'_>, set: Option<u32>) {
    let planned = line.planned();
    let rule = &planned.rule;
    for (index, condition) in rule.matches.iter().enumerate() {
        match (line, set) {
            (Line::Set { variable, ranges, .. }, Some(set)) if *variable == index => {
                in_set(out, rule, ranges.kind, set);
            }
            _ => self::condition(out, rule, condition, set),
        }
    }
    target(out, line.target(), planned.scope);
}

fn in_set(out: &mut Expressions<'_>, rule: &Rule, kind: sets::Kind, set: u32) {
    match kind {
        sets::Kind::Ports => load_port(out, rule, DESTINATION_PORT),
        sets::Kind::Addresses(family) => {
            out.family(abi::family_number(family));
            let length = match family {
                Family::V4 => 4,
                Family::V6 => 16,
            };
            out.payload(base::NETWORK, AddressOffset::destination(family).0, length);
        }
    }
    out.lookup(false, set);
}

fn condition(out: &mut Expressions<'_>, rule: &Rule, condition: &Match, set: Option<u32>) {
    match condition {
        Match::Source(is) => address(out, AddressOffset::source, is),
        Match::Destination(is) => address(out, AddressOffset::destination, is),
        Match::InInterface(is) => interface(out, meta::IN_INTERFACE, is),
        Match::OutInterface(is) => interface(out, meta::OUT_INTERFACE, is),
        // A comparison of ports or flags says the protocol itself.
        Match::Protocol(_) if rule.matches.iter().any(Match::is_of_protocol) => {}
        Match::Protocol(protocol) => out.protocol(protocol.number()),
        Match::SourcePort(is) => port(out, rule, SOURCE_PORT, is),
        Match::DestinationPort(is) => port(out, rule, DESTINATION_PORT, is),
        Match::DestinationPorts(is) => {
            load_port(out, rule, DESTINATION_PORT);
            out.lookup(is.not, set.unwrap_or_default());
        }
        Match::TcpFlags(is) => {
            // As nft does: a comparison of ports before it has said the protocol already.
            if !rule.matches.iter().any(compares_ports) {
                out.protocol(Protocol::Tcp.number());
            }
            out.flags(is);
        }
        Match::Tracked(tracked) => self::tracked(out, rule, *tracked),
        Match::OwnerUid(is) => number(out, meta::SOCKET_USER, is.not, is.value),
        Match::OwnerGid(is) => number(out, meta::SOCKET_GROUP, is.not, is.value),
        Match::Mark(is) => number(out, meta::MARK, is.not, is.value.value()),
        Match::ConnMark(is) => {
            out.ct(ct::MARK);
            if is.value.mask() != u32::MAX {
                out.mask(&is.value.mask().to_ne_bytes());
            }
            out.is(is.not, &is.value.value().to_ne_bytes());
        }
    }
}

const fn compares_ports(condition: &Match) -> bool {
    matches!(condition, Match::SourcePort(_) | Match::DestinationPort(_) | Match::DestinationPorts(_))
}

fn tracked(out: &mut Expressions<'_>, rule: &Rule, Tracked { state, direction }: Tracked) {
    // In native tables the reference drops only TCP.
    if state == ConnState::Invalid && rule.protocol().is_none() {
        out.protocol(Protocol::Tcp.number());
    }

    if let Some(direction) = direction {
        out.direction(direction);
    }
    out.state(match state {
        ConnState::Invalid => state::INVALID,
        ConnState::RelatedOrEstablished => state::RELATED_OR_ESTABLISHED,
    });
}

fn number(out: &mut Expressions<'_>, key: u32, not: bool, value: u32) {
    out.meta(key);
    out.is(not, &value.to_ne_bytes());
}

fn port(out: &mut Expressions<'_>, rule: &Rule, offset: u32, is: &Is<PortRange>) {
    load_port(out, rule, offset);
    out.ports(is.not, is.value);
}

fn load_port(out: &mut Expressions<'_>, rule: &Rule, offset: u32) {
    if let Some(protocol) = rule.protocol() {
        out.protocol(protocol.number());
    }
    out.payload(base::TRANSPORT, offset, 2);
}

fn address(out: &mut Expressions<'_>, offset: fn(Family) -> AddressOffset, is: &Is<IpNet>) {
    let family = Family::of(&is.value.addr());
    out.family(abi::family_number(family));
    if !is.not && is.value.prefix_len() == 0 {
        return;
    }
    match is.value {
        IpNet::V4(net) => out.address(offset(family), is.not, &net.network().octets(), net.prefix_len()),
        IpNet::V6(net) => out.address(offset(family), is.not, &net.network().octets(), net.prefix_len()),
    }
}

/// A whole name is compared in all its length, a beginning in its own.
fn interface(out: &mut Expressions<'_>, key: u32, is: &Is<InterfaceName>) {
    let name = is.value.name();
    let length = if is.value.is_prefix() { name.len() } else { INTERFACE_LENGTH };
    out.interface(key, is.not, name, length);
}

fn target(out: &mut Expressions<'_>, target: &Target, scope: Scope) {
    if !matches!(target, Target::Tproxy { .. }) {
        out.counter();
    }
    match target {
        Target::Accept => out.verdict(verdict::ACCEPT),
        Target::Drop => out.verdict(verdict::DROP),
        Target::Return => out.verdict(verdict::RETURN),
        Target::Jump(chain) => out.jump(&render::nft_chain_name(chain)),
        Target::Redirect(port) => {
            out.value(&port.number().to_be_bytes());
            out.redirect();
        }
        Target::Tproxy { port, mark } => {
            let family = match scope {
                Scope::Every => family::UNSPECIFIED,
                Scope::Only(family) => abi::family_number(family),
            };
            out.value(&port.number().to_be_bytes());
            out.tproxy(family);
            out.value(&mark.value().to_ne_bytes());
            out.set_meta(meta::MARK);
            out.counter();
            out.verdict(verdict::ACCEPT);
        }
        Target::SetMark(mark) => {
            out.value(&mark.value().to_ne_bytes());
            out.set_meta(meta::MARK);
        }
        Target::SaveMark => {
            out.meta(meta::MARK);
            out.set_ct(ct::MARK);
        }
        Target::RestoreMark => {
            out.ct(ct::MARK);
            out.set_meta(meta::MARK);
        }
        Target::SetConnMark(mark) if mark.mask() == u32::MAX => {
            out.value(&mark.value().to_ne_bytes());
            out.set_ct(ct::MARK);
        }
        Target::SetConnMark(mark) => {
            out.ct(ct::MARK);
            out.mask_and_flip(&(!mark.mask()).to_ne_bytes(), &mark.value().to_ne_bytes());
            out.set_ct(ct::MARK);
        }
        Target::ConntrackZone(zone) => {
            out.value(&zone.to_ne_bytes());
            out.set_ct(ct::ZONE);
        }
    }
}
