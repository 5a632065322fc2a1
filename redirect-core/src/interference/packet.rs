//! The first packet of a connection: which conditions it fulfils, and what a plan does with it.

use super::ruleset::{Among, Condition, Selector, Statement, VerdictMap, state};
use crate::{
    plan::FamilyRules,
    rule::{Chain, Hook, Is, Match, Rule, Table, Target},
    state::Entry,
    trace::{interface, number},
    values::{Family, InterfaceName, PortRange},
};
use alloc::{string::String, vec::Vec};
use core::net::IpAddr;

/// The first packet of a connection, at a hook.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Packet {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// The number of its protocol: TCP or UDP.
    pub(super) protocol: u8,
    pub(super) source_port: u16,
    pub(super) port: u16,
    /// The interface it came in by, at hooks that know one.
    pub(super) came_in: Option<String>,
    /// The interface it goes out by, at hooks that know one.
    pub(super) goes_out: Option<String>,
    /// The user and group of the socket that sends it, in the pod.
    pub(super) owner: Option<(u32, u32)>,
    /// Its mark; none where somebody has set it to an unknown value.
    pub(super) mark: Option<u32>,
}

/// How many combinations of values are tried; each has two ends.
const MOST_AMONG: usize = 6;
/// SYN alone.
const FIRST_FLAGS: u8 = 2;

/// The map of a statement, if packets with all that it names are tried.
pub(super) fn tried_map(statement: &Statement) -> Option<&VerdictMap> {
    let Statement::Map(map) = statement else { return None };
    (map.among.values.len() <= MOST_AMONG).then_some(map)
}

impl Packet {
    pub(super) fn family(&self) -> Family {
        Family::of(&self.destination)
    }

    /// Whether a condition holds; `None` where that cannot be told.
    pub(super) fn fulfils(&self, condition: &Condition) -> Option<bool> {
        match condition {
            Condition::Plain(condition) => self.fulfils_plain(condition),
            Condition::Family(is) => Some(holds(is, |family| *family == self.family())),
            Condition::Protocol(is) => Some(holds(is, |number| *number == self.protocol)),
            Condition::SourcePorts(is) => Some(holds(is, |ranges| any(ranges, self.source_port))),
            Condition::State(is) => Some(holds(is, |states| states & state::NEW != 0)),
            Condition::MarkBits { mask, is } => {
                self.mark.map(|mark| holds(is, |value| mark & mask == *value))
            }
            // The connection is new: nothing has marked it.
            Condition::ConnMarkBits { is, .. } => Some(holds(is, |value| *value == 0)),
            // The packet is the first.
            Condition::IsReply(is) => Some(holds(is, |reply| !reply)),
            Condition::TcpFlags { mask, is } => {
                Some(self.is_tcp() && holds(is, |value| FIRST_FLAGS & mask == *value))
            }
            Condition::Among(is) => self.is_among(is),
            Condition::Local(_) | Condition::Unknown(_) => None,
        }
    }

    /// Whether it has one of these combinations of values, or none of them; `None` where that cannot be told, or where
    /// packets with all of them are too many to be tried.
    pub(super) fn is_among(&self, is: &Is<Among>) -> Option<bool> {
        let among = &is.value;
        if among.values.len() > MOST_AMONG {
            return None;
        }
        let values =
            among.selectors.iter().map(|selector| self.value(*selector)).collect::<Option<Vec<_>>>()?;
        let has = |ranges: &Vec<(u128, u128)>| {
            let mut both = values.iter().zip(ranges);
            both.all(|(value, (first, last))| value.is_some_and(|value| (*first..=*last).contains(&value)))
        };
        Some(among.values.iter().any(has) != is.not)
    }

    /// What it has of this; none where it has nothing of the kind, `None` where that is not known.
    fn value(&self, selector: Selector) -> Option<Option<u128>> {
        let of_family = |of: Family, address| (of == self.family()).then(|| number(address));
        let name = |name: &Option<String>| Some(name.as_deref().map_or(0, interface));
        Some(match selector {
            Selector::Family => Some(crate::netlink::family_number(self.family()).into()),
            Selector::Protocol => Some(self.protocol.into()),
            Selector::Source(of) => of_family(of, self.source),
            Selector::Destination(of) => of_family(of, self.destination),
            Selector::SourcePort => Some(self.source_port.into()),
            Selector::DestinationPort => Some(self.port.into()),
            Selector::InInterface => name(&self.came_in),
            Selector::OutInterface => name(&self.goes_out),
            Selector::User => self.owner.map(|(uid, _)| uid.into()),
            Selector::Group => self.owner.map(|(_, gid)| gid.into()),
            Selector::Mark => Some(self.mark?.into()),
            // The connection is new: nothing has marked it.
            Selector::ConnMark => Some(0),
            Selector::State => Some(state::NEW.into()),
            Selector::Direction => Some(0),
            Selector::TcpFlags => self.is_tcp().then_some(FIRST_FLAGS.into()),
        })
    }

    fn is_tcp(&self) -> bool {
        self.protocol == crate::rule::Protocol::Tcp.number()
    }

    pub(super) fn fulfils_plain(&self, condition: &Match) -> Option<bool> {
        Some(match condition {
            Match::Source(is) => holds(is, |net| net.contains(&self.source)),
            Match::Destination(is) => holds(is, |net| net.contains(&self.destination)),
            Match::InInterface(is) => holds(is, |name| covers(name, self.came_in.as_deref())),
            Match::OutInterface(is) => holds(is, |name| covers(name, self.goes_out.as_deref())),
            Match::Protocol(protocol) => protocol.number() == self.protocol,
            Match::SourcePort(is) => holds(is, |range| range.contains(self.source_port)),
            Match::DestinationPort(is) => holds(is, |range| range.contains(self.port)),
            Match::DestinationPorts(is) => holds(is, |ranges| any(ranges, self.port)),
            Match::TcpFlags(is) => self.is_tcp() && holds(is, |flags| flags.covers(FIRST_FLAGS)),
            // It is new, and valid.
            Match::Tracked(_) => false,
            // A packet that no socket here sends has no owner, which no comparison holds for.
            Match::OwnerUid(is) => self.owner.is_some_and(|(uid, _)| holds(is, |id| *id == uid)),
            Match::OwnerGid(is) => self.owner.is_some_and(|(_, gid)| holds(is, |id| *id == gid)),
            Match::Mark(is) => return self.mark.map(|mark| holds(is, |value| value.value() == mark)),
            Match::ConnMark(is) => holds(is, |value| value.covers(0)),
        })
    }

    /// Whether all conditions hold; `None` where that cannot be told and none fails.
    pub(super) fn fulfils_all(&self, conditions: &[Condition]) -> Option<bool> {
        let mut all = Some(true);
        for condition in conditions {
            match self.fulfils(condition) {
                Some(true) => {}
                Some(false) => return Some(false),
                None => all = None,
            }
        }
        all
    }
}

fn holds<T>(is: &Is<T>, test: impl Fn(&T) -> bool) -> bool {
    test(&is.value) != is.not
}

fn any(ranges: &[PortRange], port: u16) -> bool {
    ranges.iter().any(|range| range.contains(port))
}

/// At a hook that knows no such interface, the kernel compares with an empty name.
fn covers(name: &InterfaceName, interface: Option<&str>) -> bool {
    interface.is_some_and(|interface| name.covers(interface))
}

/// What a plan does with a packet it captures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Capture {
    /// It is redirected to this port of the pod.
    Redirect(u16),
    /// It is handed over as it is, with this mark.
    Tproxy(u32),
}

/// A rule of a plan in a built-in chain that begins what is done with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Act<'a> {
    /// In this table.
    pub(super) table: Table,
    /// The chain that rule jumps to.
    pub(super) to: &'a Chain,
    /// Whether it ends in the packet's capture.
    pub(super) capture: Option<Capture>,
}

/// What a plan does with a packet at the hook it comes by first; nothing where it does not capture it.
pub(super) fn acts<'a>(rules: &'a FamilyRules, hook: Hook, packet: &Packet) -> Vec<Act<'a>> {
    let mut acts: Vec<Act<'a>> = Vec::new();
    for table in Table::ALL.iter().copied() {
        let mut walk = Walk { rules, table, packet, touched: false };
        for entry in rules.state().rules(table, &Chain::Hook(hook)) {
            let Entry::Rule(rule) = entry else { return Vec::new() };
            let end = walk.rule(rule);
            let capture = match end {
                None if walk.touched => None,
                None => continue,
                Some(End::Redirected(port)) => Some(Capture::Redirect(port)),
                Some(End::Tproxied(mark)) => Some(Capture::Tproxy(mark)),
                Some(End::Dropped) => return Vec::new(),
                Some(End::Left) => break,
            };
            if let Target::Jump(to) = &rule.target {
                acts.push(Act { table, to, capture });
            }
            if capture.is_some() {
                return acts;
            }
            break;
        }
    }
    Vec::new()
}

/// Where a plan's chains end.
enum End {
    /// In nothing: accepted, or returned from the built-in chain.
    Left,
    Dropped,
    Redirected(u16),
    Tproxied(u32),
}

/// A packet in the chains of a plan, which are few and make no loops.
struct Walk<'a, 'p> {
    rules: &'a FamilyRules,
    table: Table,
    packet: &'p Packet,
    /// Whether something was changed on the way.
    touched: bool,
}

impl Walk<'_, '_> {
    /// `None` when the next rule is to be looked at.
    fn rule(&mut self, rule: &Rule) -> Option<End> {
        let fulfilled = rule.matches.iter().all(|one| self.packet.fulfils_plain(one) == Some(true));
        if !fulfilled {
            return None;
        }
        match &rule.target {
            Target::Accept | Target::Return => Some(End::Left),
            Target::Drop => Some(End::Dropped),
            Target::Redirect(port) => Some(End::Redirected(port.number())),
            Target::Tproxy { mark, .. } => Some(End::Tproxied(mark.value())),
            Target::Jump(to) => self.chain(to),
            Target::SetMark(_) | Target::ConntrackZone(_) => {
                self.touched = true;
                None
            }
            // The connection is new: there is no mark to remember, and its own decides nothing about its first packet.
            Target::SaveMark | Target::RestoreMark | Target::SetConnMark(_) => None,
        }
    }

    /// A chain that is jumped to: what returns from it goes on behind the jump.
    fn chain(&mut self, chain: &Chain) -> Option<End> {
        for entry in self.rules.state().rules(self.table, chain) {
            let Entry::Rule(rule) = entry else { return Some(End::Left) };
            if matches!(rule.target, Target::Return)
                && rule.matches.iter().all(|one| self.packet.fulfils_plain(one) == Some(true))
            {
                return None;
            }
            if let Some(end) = self.rule(rule) {
                return Some(end);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn packet() -> Packet {
        Packet {
            source: "10.0.0.1".parse().unwrap(),
            destination: "192.0.2.1".parse().unwrap(),
            protocol: 6,
            source_port: 40000,
            port: 80,
            came_in: None,
            goes_out: Some("eth0".into()),
            owner: Some((1000, 1001)),
            mark: Some(7),
        }
    }

    fn is_among(packet: &Packet, selectors: &[Selector], values: Vec<Vec<(u128, u128)>>) -> Option<bool> {
        let value = Among { selectors: selectors.to_vec(), name: None, values };
        let [same, other] = [false, true].map(|not| packet.is_among(&Is { value: value.clone(), not }));
        assert_eq!(same.map(|is| !is), other);
        same
    }

    #[test]
    fn each_selector_looks_at_its_own_field() {
        let udp = Packet { protocol: 17, owner: None, ..packet() };
        for (selector, value, of_udp) in [
            (Selector::Family, 2, Some(true)),
            (Selector::Protocol, 6, Some(false)),
            (Selector::Source(Family::V4), 0x0a00_0001, Some(true)),
            (Selector::Destination(Family::V4), 0xc000_0201, Some(true)),
            (Selector::SourcePort, 40000, Some(true)),
            (Selector::DestinationPort, 80, Some(true)),
            (Selector::InInterface, 0, Some(true)),
            (Selector::OutInterface, interface("eth0"), Some(true)),
            (Selector::User, 1000, Some(false)),
            (Selector::Group, 1001, Some(false)),
            (Selector::Mark, 7, Some(true)),
            (Selector::ConnMark, 0, Some(true)),
            (Selector::State, state::NEW.into(), Some(true)),
            (Selector::Direction, 0, Some(true)),
            (Selector::TcpFlags, 2, Some(false)),
        ] {
            let within =
                |packet: &Packet, first, last| is_among(packet, &[selector], vec![vec![(first, last)]]);
            assert_eq!(within(&packet(), value, value), Some(true), "{selector:?}");
            assert_eq!(within(&packet(), value + 1, u128::MAX), Some(false), "{selector:?}");
            assert_eq!(within(&udp, value, value), of_udp, "{selector:?}");
        }
        for selector in [Selector::Source(Family::V6), Selector::Destination(Family::V6)] {
            assert_eq!(is_among(&packet(), &[selector], vec![vec![(0, u128::MAX)]]), Some(false));
        }
        let unmarked = Packet { mark: None, ..packet() };
        assert_eq!(is_among(&unmarked, &[Selector::Mark], vec![vec![(0, u128::MAX)]]), None);
    }

    #[test]
    fn a_combination_is_had_as_a_whole() {
        let selectors = [Selector::Protocol, Selector::DestinationPort];
        let of = |protocol, port| vec![(protocol, protocol), (port, port)];
        assert_eq!(is_among(&packet(), &selectors, vec![of(17, 80), of(6, 80)]), Some(true));
        assert_eq!(is_among(&packet(), &selectors, vec![of(17, 80), of(6, 81)]), Some(false));
    }

    #[test]
    fn of_too_many_combinations_it_is_not_known_which_are_had() {
        for (number, wanted) in [(MOST_AMONG, Some(true)), (MOST_AMONG + 1, None), (MOST_AMONG + 2, None)] {
            let values = vec![vec![(80, 80)]; number];
            assert_eq!(is_among(&packet(), &[Selector::DestinationPort], values), wanted, "{number}");
        }
    }
}
