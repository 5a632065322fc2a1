//! Native nftables: the same rules in tables of their own that serve both families, in the words of `nft list ruleset`.

use super::{
    native_state::{ChainHook, NativeRule, NativeState, NativeTable, SetKey},
    sets,
};
use crate::expressions::{
    abi::{base, ct, family, meta, verdict},
    expression::{DESTINATION_PORT, Expressions, SOURCE_PORT, address_offset},
    wire::MessageWriter,
    xt::state_bits,
};
use crate::ruleset::Endpoint;
use ipnet::IpNet;
use redirect_core::{
    options::NativeForm,
    plan::{
        PlannedRule, RulePlan,
        native::{Line, SetKind},
    },
    rule::{Chain, ConnState, Equality, Match, Protocol, Rule, Scope, Table, Target, Tracked},
    values::{Family, PortRange},
};
use std::{collections::BTreeMap, sync::Arc};

/// The length of an interface's name, padding included (`IFNAMSIZ`).
const INTERFACE_LENGTH: usize = 16;

impl NativeState {
    /// What a plan would put there.
    #[must_use]
    pub fn wanted(plan: &RulePlan, form: NativeForm) -> Self {
        // Sets are numbered here and again in the transaction that makes them: these numbers distinguish them in between.
        let mut sets = 0;
        let tables = plan.merged_rules().into_iter().map(|(table, chains)| {
            (plan.data_plane().nft_table(table), Arc::new(self::table(table, chains, form, &mut sets)))
        });
        Self { tables: tables.collect() }
    }
}

fn table(
    table: Table,
    chains: BTreeMap<Chain, Vec<&PlannedRule>>,
    form: NativeForm,
    sets: &mut u32,
) -> NativeTable {
    let mut state = NativeTable::default();
    let mut expressions = MessageWriter::default();
    for (chain, planned) in chains {
        let mut rules = Vec::new();
        for line in Line::of(&planned, form) {
            let set = line.set().map(|ranges| {
                *sets = sets.saturating_add(1);
                state.sets.insert(SetKey::Number(*sets), sets::state(&ranges));
                *sets
            });
            rule(&mut Expressions(&mut expressions), &line, set);
            // Names of interfaces and chains are short: no attribute is too long.
            let expressions = expressions.take().unwrap_or_default();
            rules.push(NativeRule { handle: None, expressions, user_data: None });
        }
        let to = state.chain(&chain.nft_name());
        to.rules = rules;
        if let Chain::Hook(hook) = chain {
            to.hook = Some(ChainHook::built_in(table, hook));
        }
    }
    state
}

/// Conditions in the plan's order, the counter, the target. `set` is the number of the set that the line needs.
fn rule(out: &mut Expressions<'_>, line: &Line<'_>, set: Option<u32>) {
    let planned = line.planned();
    let rule = planned.rule();
    for (index, condition) in rule.matches.iter().enumerate() {
        match (line, set) {
            (Line::Set { variable, ranges, .. }, Some(set)) if *variable == index => {
                in_set(out, rule, ranges.kind(), set);
            }
            _ => self::condition(out, rule, condition, set),
        }
    }
    target(out, line.target(), planned.scope());
}

fn in_set(out: &mut Expressions<'_>, rule: &Rule, kind: SetKind, set: u32) {
    match kind {
        SetKind::Ports => load_port(out, rule, DESTINATION_PORT),
        SetKind::Addresses(family) => {
            out.family(family.number());
            out.payload(base::NETWORK, address_offset(Endpoint::Destination, family), sets::length(kind));
        }
    }
    out.lookup(false, set);
}

fn condition(out: &mut Expressions<'_>, rule: &Rule, condition: &Match, set: Option<u32>) {
    match condition {
        Match::Source(is) => address(out, Endpoint::Source, is),
        Match::Destination(is) => address(out, Endpoint::Destination, is),
        Match::InInterface(is) => out.interface(meta::IN_INTERFACE, is, INTERFACE_LENGTH),
        Match::OutInterface(is) => out.interface(meta::OUT_INTERFACE, is, INTERFACE_LENGTH),
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
            if !rule.matches.iter().any(Match::compares_ports) {
                out.protocol(Protocol::Tcp.number());
            }
            out.flags(is);
        }
        Match::Tracked(tracked) => self::tracked(out, rule, *tracked),
        Match::OwnerUid(is) => number(out, meta::SOCKET_USER, is.not, is.value),
        Match::OwnerGid(is) => number(out, meta::SOCKET_GROUP, is.not, is.value),
        Match::Mark(is) => out.mark(is),
        Match::ConnMark(is) => {
            out.ct(ct::MARK);
            out.masked(is);
        }
    }
}

fn tracked(out: &mut Expressions<'_>, rule: &Rule, Tracked { state, direction }: Tracked) {
    // In native tables the reference drops only TCP.
    if state == ConnState::Invalid && rule.protocol().is_none() {
        out.protocol(Protocol::Tcp.number());
    }

    if let Some(direction) = direction {
        out.direction(direction);
    }
    out.state(state_bits(state));
}

fn number(out: &mut Expressions<'_>, key: u32, not: bool, value: u32) {
    out.meta(key);
    out.is(not, &value.to_ne_bytes());
}

fn port(out: &mut Expressions<'_>, rule: &Rule, offset: u32, is: &Equality<PortRange>) {
    load_port(out, rule, offset);
    out.ports(is.not, is.value);
}

fn load_port(out: &mut Expressions<'_>, rule: &Rule, offset: u32) {
    if let Some(protocol) = rule.protocol() {
        out.protocol(protocol.number());
    }
    out.payload(base::TRANSPORT, offset, 2);
}

fn address(out: &mut Expressions<'_>, end: Endpoint, is: &Equality<IpNet>) {
    let family = Family::of(&is.value.addr());
    out.family(family.number());
    if !is.not && is.value.prefix_len() == 0 {
        return;
    }
    out.address(end, is);
}

fn target(out: &mut Expressions<'_>, target: &Target, scope: Scope) {
    if !matches!(target, Target::Tproxy { .. }) {
        out.counter();
    }
    match target {
        Target::Accept => out.verdict(verdict::ACCEPT),
        Target::Drop => out.verdict(verdict::DROP),
        Target::Return => out.verdict(verdict::RETURN),
        Target::Jump(chain) => out.jump(&chain.nft_name()),
        Target::Redirect(port) => {
            out.value(&port.number().to_be_bytes());
            out.redirect();
        }
        Target::Tproxy { port, mark } => {
            let family = match scope {
                Scope::Every => family::UNSPECIFIED,
                Scope::Only(family) => family.number(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expressions::reading;

    #[test]
    fn any_address_of_a_family_is_compared_only_where_it_must_not_be() {
        let written = |is: &Equality<IpNet>| {
            let mut list = MessageWriter::default();
            address(&mut Expressions(&mut list), Endpoint::Source, is);
            let names =
                list.attributes().filter_map(|(_, element)| Some(reading::name_and_data(element)?.0.into()));
            names.collect::<Vec<String>>()
        };
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        for any in ["0.0.0.0/0", "::/0"] {
            assert_eq!(written(&Equality::equals(net(any))), ["meta", "cmp"]);
            assert_eq!(
                written(&Equality::not_equals(net(any))),
                ["meta", "cmp", "payload", "bitwise", "cmp"]
            );
        }
        for is in [Equality::equals, Equality::not_equals] {
            assert_eq!(written(&is(net("10.0.0.0/8"))), ["meta", "cmp", "payload", "cmp"]);
        }
    }
}
