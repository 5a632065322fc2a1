//! Which traffic two plans treat differently: all of it, computed by walking all packets at once.

use super::{
    ConnectionState, ConntrackEntry, Fate, Interface, Packet, RuleOrigin, Sender, TraceEvent,
    packets::{LO, Packets, VariedField, interface, interface_name, loopback, state},
    rules::TraceRules,
    set::RangeSet,
    walk::{self, WalkInput, WorkBudget},
};
use redirect_core::{plan::RulePlan, rule::Protocol, settings::Source, values::Family};
use std::{collections::BTreeMap, fmt, net::SocketAddr};

/// Packets that two plans treat differently.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TrafficDifference {
    /// The packets.
    pub region: Region,
    /// Their fate under the first plan.
    pub before: Fate,
    /// Their fate under the second plan.
    pub after: Fate,
    /// The setting behind the difference: of the rule that decides under the second plan or, where that has none or its default, under
    /// the first.
    pub cause: Option<RuleOrigin>,
}

impl TrafficDifference {
    /// All traffic that two plans treat differently, as few sets of packets that do not overlap. Empty if both plans mean the same.
    ///
    /// It walks packets of TCP and UDP in all states of connection tracking, from outside without a mark and from processes of the
    /// pod with any. Nothing comes in over `lo` from outside, or with a loopback address; nothing goes to a loopback
    /// address by another interface.
    ///
    /// ```
    /// use packet_trace::TrafficDifference;
    /// use redirect_core::{Families, Redirect, values::PortRange};
    ///
    /// let before = Redirect::sidecar(Families::V4).build()?.plan();
    /// let after = Redirect::sidecar(Families::V4).exclude_outbound([PortRange::single(3306)]).build()?.plan();
    /// assert_eq!(TrafficDifference::of_plans(&before, &before), []);
    /// let differences = TrafficDifference::of_plans(&before, &after);
    /// assert!(!differences.is_empty());
    /// assert!(differences.iter().all(|one| one.region.ports() == Some(vec![(3306, 3306)])));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn of_plans(before: &RulePlan, after: &RulePlan) -> Vec<Self> {
        let rules = |plan: &RulePlan, family| TraceRules::of_plan(plan, family);
        let differ = |family| between(&rules(before, family), &rules(after, family), &mut WorkBudget::any());
        Family::BOTH.into_iter().flat_map(differ).collect()
    }

    /// All traffic of a family that two sets of rules treat differently, likewise: those of plans in either form ([`TraceRules::of_plan`],
    /// [`TraceRules::of_native_plan`]).
    /// Rules of different families have nothing in common, and no difference.
    #[must_use]
    pub fn between(before: &TraceRules, after: &TraceRules) -> Vec<Self> {
        if before.family == after.family {
            between(before, after, &mut WorkBudget::any())
        } else {
            Vec::new()
        }
    }

    /// Differences in words, by what causes them: for each setting and change of fate a line, with the first of the packets and the
    /// number of further sets of them. Settings have the words of the program or user that made them.
    ///
    /// ```
    /// use packet_trace::TrafficDifference;
    /// use redirect_core::{Families, Redirect, settings::Source, values::PortRange};
    ///
    /// let before = Redirect::sidecar(Families::Both).build()?.plan();
    /// let excluded = [3306, 5432].map(PortRange::single);
    /// let after = Redirect::sidecar(Families::Both).asked_by(Source::Caller("databases")).exclude_outbound(excluded).build()?;
    /// let summary = TrafficDifference::summary(&TrafficDifference::of_plans(&before, &after.plan()));
    /// assert!(summary.starts_with("databases: proxy, outbound listener (port 15001) \u{2192} untouched, to its destination: "), "{summary}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn summary(differences: &[Self]) -> String {
        let mut groups: Vec<(&Self, usize)> = Vec::new();
        for one in differences {
            let is_alike = |(first, _): &&mut (&Self, usize)| {
                (first.before, first.after, first.cause) == (one.before, one.after, one.cause)
            };
            match groups.iter_mut().find(is_alike) {
                Some((_, more)) => *more = more.saturating_add(1),
                None => groups.push((one, 0)),
            }
        }
        let line = |(first, more): (&Self, usize)| {
            let cause = first.cause.map(|origin| format!("{}: ", origin.source)).unwrap_or_default();
            let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
            format!("{cause}{} \u{2192} {}: {}{more}\n", first.before, first.after, first.region)
        };
        groups.into_iter().map(line).collect()
    }

    /// Whether packets bypass the proxy that came to it before, or may.
    #[must_use]
    pub const fn bypasses(&self) -> bool {
        let lands_elsewhere = matches!(
            self.after,
            Fate::Untouched | Fate::Redirected { .. } | Fate::Translated | Fate::Unknown
        );
        matches!(self.before, Fate::Proxy { .. }) && lands_elsewhere
    }
}

/// A set of packets: those that have in every field one of these values. A field without values may have any.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Region {
    is_local: bool,
    packets: Packets,
}

impl Region {
    /// The description without the obvious: loopback addresses occur only on `lo`.
    pub(super) fn new(is_local: bool, mut packets: Packets) -> Self {
        let family = packets.family;
        let far = far(family);
        if packets.get(VariedField::Interface).and(&RangeSet::one(LO)).is_empty() {
            for field in [VariedField::Source, VariedField::Destination] {
                if *packets.get(field) == far && (field == VariedField::Destination || !is_local) {
                    packets.set(field, RangeSet::range(0, field.most(family)));
                }
            }
        }
        Self { is_local, packets }
    }

    /// Their family.
    #[must_use]
    pub const fn family(&self) -> Family {
        self.packets.family
    }

    /// Whether processes of the pod send them; a peer outside otherwise.
    #[must_use]
    pub const fn is_local(&self) -> bool {
        self.is_local
    }

    /// Their protocols.
    #[must_use]
    pub fn protocols(&self) -> Vec<Protocol> {
        let all = [Protocol::Tcp, Protocol::Udp].into_iter();
        all.filter(|one| self.packets.get(VariedField::Protocol).contains(one.number().into())).collect()
    }

    /// The first and last of the ranges of ports they go to; `None` for any.
    #[must_use]
    pub fn ports(&self) -> Option<Vec<(u16, u16)>> {
        let port = |number: u128| u16::try_from(number).ok();
        let ranges = self.limited(VariedField::Port)?.ranges().iter();
        ranges.map(|(first, last)| Some((port(*first)?, port(*last)?))).collect()
    }

    /// What connection tracking says about them.
    #[must_use]
    pub fn states(&self) -> Vec<ConnectionState> {
        let all = ConnectionState::ALL.into_iter();
        all.filter(|state| self.packets.get(VariedField::State).contains(*state as u128)).collect()
    }

    /// By which interfaces they come in or go out, in words: `lo`, `not lo`, `eth0`, `veth+`.
    #[must_use]
    pub fn interfaces(&self) -> String {
        interfaces(self.packets.get(VariedField::Interface))
    }

    /// Whether a packet is one of them.
    #[must_use]
    pub fn contains(&self, packet: &Packet) -> bool {
        let one = packet.packets();
        let is_local = matches!(packet.sender, Sender::Local { .. });
        self.is_local == is_local
            && self.packets.family == one.family
            && VariedField::ALL.into_iter().all(|field| {
                let owned = matches!(field, VariedField::User | VariedField::Group);
                owned && !is_local || one.get(field).without(self.packets.get(field)).is_empty()
            })
    }

    /// One of them.
    #[must_use]
    pub fn example(&self) -> Packet {
        let first = |field: VariedField| self.packets.get(field).first().unwrap_or_default();
        let number = |field: VariedField| u32::try_from(first(field)).unwrap_or_default();
        let port = |field: VariedField| u16::try_from(first(field)).unwrap_or_default();
        let family = self.packets.family;
        let state = self.states().first().copied().unwrap_or(ConnectionState::New);
        let is_known = matches!(state, ConnectionState::Established | ConnectionState::Reply);
        let by = self.packets.get(VariedField::Interface);
        let usual = ["lo", "eth0", "eth1"].into_iter().find(|name| by.contains(interface(name)));
        Packet {
            sender: if self.is_local {
                Sender::Local { uid: number(VariedField::User), gid: number(VariedField::Group) }
            } else {
                Sender::Outside
            },
            protocol: self.protocols().first().copied().unwrap_or(Protocol::Tcp),
            source: Some(family.address(first(VariedField::Source))),
            source_port: Some(port(VariedField::SourcePort)),
            destination: SocketAddr::new(
                family.address(first(VariedField::Destination)),
                port(VariedField::Port),
            ),
            interface: Interface::Named(
                usual.map_or_else(|| interface_name(first(VariedField::Interface)), String::from),
            ),
            flags: u8::try_from(first(VariedField::Flags)).unwrap_or_default(),
            mark: number(VariedField::Mark),
            connection: ConntrackEntry {
                state,
                mark: if is_known { number(VariedField::ConnMark) } else { 0 },
                translated_to: None,
            },
        }
    }

    /// What its packets have in common, in words, with so many ranges of each field at most; empty for all packets.
    pub(super) fn conditions(&self, most: usize) -> Vec<String> {
        let family = self.packets.family;
        let decimal = |number: u128| number.to_string();
        let hexadecimal = |number: u128| format!("{number:#x}");
        let all = [
            self.words((VariedField::Source, most), "from", |number| family.address(number).to_string()),
            self.words((VariedField::SourcePort, most), "source port", decimal),
            self.words((VariedField::Destination, most), "to", |number| family.address(number).to_string()),
            self.words((VariedField::Port, most), "port", decimal),
            self.words((VariedField::User, most), "user", decimal).filter(|_| self.is_local),
            self.words((VariedField::Group, most), "group", decimal).filter(|_| self.is_local),
            states(self.packets.get(VariedField::State)),
            self.words((VariedField::Flags, most), "flags", hexadecimal),
            self.words((VariedField::Mark, most), "mark", hexadecimal),
            self.words((VariedField::ConnMark, most), "connection mark", hexadecimal),
        ];
        all.into_iter().flatten().collect()
    }

    /// The values of a field, where it has not all.
    pub(crate) fn limited(&self, field: VariedField) -> Option<&RangeSet> {
        let (set, most) = (self.packets.get(field), field.most(self.packets.family));
        (*set != RangeSet::range(0, most)).then_some(set)
    }

    /// In words; empty if every value of the field is included.
    fn words(
        &self,
        (field, most): (VariedField, usize),
        name: &str,
        one: impl Fn(u128) -> String,
    ) -> Option<String> {
        let (set, not) = shorter(self.limited(field)?, field.most(self.packets.family));
        let ranges = set.ranges().iter().map(|(first, last)| {
            if first == last { one(*first) } else { format!("{}-{}", one(*first), one(*last)) }
        });
        let mut ranges: Vec<String> = ranges.take(most).collect();
        let more = set.ranges().len().saturating_sub(most);
        ranges.extend((more > 0).then(|| format!("and {more} more")));
        Some(format!("{name} {not}{}", ranges.join(", ")))
    }
}

/// The shorter description of a set of numbers up to `most`: its values, or all others.
fn shorter(set: &RangeSet, most: u128) -> (RangeSet, &'static str) {
    let rest = set.complement(most);
    if rest.ranges().len() < set.ranges().len() { (rest, "not ") } else { (set.clone(), "") }
}

fn interfaces(set: &RangeSet) -> String {
    let name = |(first, last): &(u128, u128)| {
        let name = interface_name(*first);
        if first == last { name } else { format!("{name}+") }
    };
    if *set == RangeSet::range(0, u128::MAX) {
        return String::from("any");
    }
    // A range between the names in rules is described as not those names.
    let (set, not) = shorter(set, u128::MAX);
    let names: Vec<String> = set.ranges().iter().map(name).collect();
    format!("{not}{}", names.join(", "))
}

/// `TCP, outbound by not lo, to 10.0.0.0-10.255.255.255, port 3306, user not 1337`.
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = self.packets.family;
        let protocols: Vec<String> =
            self.protocols().iter().map(|one| one.name().to_ascii_uppercase()).collect();
        let by = self.interfaces();
        let way = match (self.is_local, by.as_str()) {
            (false, _) => "inbound",
            (true, "lo") => "within the pod",
            (true, _) => "outbound",
        };
        write!(f, "{family} {} {way}", protocols.join(" and "))?;
        if !matches!(by.as_str(), "lo" | "not lo" | "any") {
            write!(f, " by {by}")?;
        }
        for words in self.conditions(usize::MAX) {
            write!(f, ", {words}")?;
        }
        Ok(())
    }
}

/// Which packets of a connection they are; empty for all of them.
fn states(set: &RangeSet) -> Option<String> {
    let named = [
        (state::NEW, "first packets"),
        (state::RELATED, "first packets of related connections"),
        (state::ESTABLISHED, "later packets"),
        (state::REPLY, "answers"),
        (state::INVALID, "packets of no connection"),
    ];
    let names: Vec<&str> =
        named.iter().filter(|(number, _)| set.contains(*number)).map(|(_, name)| *name).collect();
    match names.as_slice() {
        ["first packets", "first packets of related connections"] => Some("first packets".into()),
        names if names.len() == named.len() => None,
        names => Some(names.join(" and ")),
    }
}

impl fmt::Display for TrafficDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} → {}", self.region, self.before, self.after)
    }
}

fn between(from: &TraceRules, to: &TraceRules, work: &mut WorkBudget) -> Vec<TrafficDifference> {
    let mut found: BTreeMap<(bool, Fate, Fate), Vec<Packets>> = BTreeMap::new();
    for (is_local, packets) in starts(from.family) {
        let given = WalkInput { is_local, ..WalkInput::default() };
        for way in walk::all(from, &packets, &given, work, false).ways {
            for other in walk::all(to, &way.packets, &given, work, false).ways {
                if way.fate != other.fate {
                    let packets = without_impossible(other.packets);
                    found.entry((is_local, way.fate, other.fate)).or_default().push(packets);
                }
            }
        }
    }
    let mut differences = Vec::new();
    for ((is_local, before, after), packets) in found {
        let regions = merged(packets).into_iter().map(|packets| Region::new(is_local, packets));
        differences.extend(regions.map(|region| {
            let cause = cause(from, to, &region);
            TrafficDifference { region, before, after, cause }
        }));
    }
    differences
}

/// The setting behind what becomes of packets; a default only where both are defaults.
fn cause(from: &TraceRules, to: &TraceRules, region: &Region) -> Option<RuleOrigin> {
    let example = region.example();
    let of = |rules: &TraceRules| {
        if let TraceEvent::Rule { origin, .. } = rules.trace(&example).deciding()? { *origin } else { None }
    };
    let (after, before) = (of(to), of(from));
    let is_made = |origin: &RuleOrigin| origin.source != Source::Default;
    after.filter(is_made).or_else(|| before.filter(is_made)).or(after).or(before)
}

/// All addresses but those of loopback.
fn far(family: Family) -> RangeSet {
    loopback(family).complement(VariedField::Destination.most(family))
}

/// All possible packets, and whether the pod sends them.
fn starts(family: Family) -> Vec<(bool, Packets)> {
    let lo = RangeSet::one(LO);
    let all = Packets::all(family);
    let elsewhere = all.get(VariedField::Interface).without(&lo);
    let far = far(family);
    let outside = all
        .with(VariedField::Interface, elsewhere.clone())
        .with(VariedField::Source, far.clone())
        .with(VariedField::Destination, far.clone())
        .with(VariedField::Mark, RangeSet::one(0));
    let out = all.with(VariedField::Interface, elsewhere).with(VariedField::Destination, far);
    let within = all.with(VariedField::Interface, lo);
    let mut starts = Vec::new();
    for (is_local, packets) in [(false, outside), (true, out), (true, within)] {
        // A connection has no mark before its first packet.
        let first = RangeSet::each([state::NEW, state::RELATED, state::INVALID]);
        let known = RangeSet::range(state::ESTABLISHED, state::REPLY);
        starts.push((
            is_local,
            packets.with(VariedField::State, first).with(VariedField::ConnMark, RangeSet::one(0)),
        ));
        starts.push((is_local, packets.with(VariedField::State, known)));
    }
    starts
}

/// The description without the obvious: first packets have no connection mark.
fn without_impossible(mut packets: Packets) -> Packets {
    let known = RangeSet::range(state::ESTABLISHED, state::REPLY);
    if packets.get(VariedField::State).and(&known).is_empty() {
        packets.set(VariedField::ConnMark, RangeSet::range(0, u32::MAX.into()));
    }
    packets
}

/// Fewer sets for the same packets: two that differ in one field become one.
pub(super) fn merged(mut all: Vec<Packets>) -> Vec<Packets> {
    /// Merges the least interesting fields first.
    const ORDER: [VariedField; 12] = [
        VariedField::Flags,
        VariedField::ConnMark,
        VariedField::State,
        VariedField::Mark,
        VariedField::SourcePort,
        VariedField::Group,
        VariedField::User,
        VariedField::Protocol,
        VariedField::Interface,
        VariedField::Source,
        VariedField::Destination,
        VariedField::Port,
    ];
    loop {
        let before = all.len();
        for field in ORDER {
            let mut alike: BTreeMap<Packets, Vec<(u128, u128)>> = BTreeMap::new();
            for mut packets in all {
                let set = packets.get(field).clone();
                packets.set(field, RangeSet::empty());
                alike.entry(packets).or_default().extend(set.ranges());
            }
            let joined = |(packets, ranges): (Packets, Vec<_>)| packets.with(field, RangeSet::of(ranges));
            all = alike.into_iter().map(joined).collect();
        }
        if all.len() == before {
            return all;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::{Families, Redirect, values::PortRange};

    /// Odd ports against even ones: no rule of the one plan is a rule of the other.
    #[test]
    fn comparing_long_lists_takes_work_in_proportion_to_them() {
        let work = |many: u16| {
            let rules = |first: u16| {
                let ports = (0..many).map(|number| PortRange::single(10_000 + first + 2 * number));
                let plan = Redirect::sidecar(Families::V4)
                    .replace_outbound_exclusions(ports)
                    .build()
                    .unwrap()
                    .plan();
                TraceRules::of_plan(&plan, Family::V4)
            };
            let mut work = WorkBudget::any();
            let differences = between(&rules(0), &rules(1), &mut work);
            let ports: usize =
                differences.iter().map(|one| one.region.ports().map_or(0, |all| all.len())).sum();
            assert!(ports >= 2 * usize::from(many), "{ports}");
            usize::MAX - work.left
        };
        let (one, two, four) = (work(500), work(1000), work(2000));
        assert!(two < 3 * one && four < 3 * two, "{one} {two} {four}");
    }

    #[test]
    fn packets_are_named_by_the_states_of_their_connections() {
        let all = [state::NEW, state::RELATED, state::ESTABLISHED, state::REPLY, state::INVALID];
        let named = |numbers: &[u128]| states(&RangeSet::each(numbers.iter().copied()));
        assert_eq!(named(&all), None);
        assert_eq!(named(&all[..1]).as_deref(), Some("first packets"));
        assert_eq!(named(&all[..2]).as_deref(), Some("first packets"));
        assert_eq!(named(&all[2..4]).as_deref(), Some("later packets and answers"));
        assert_eq!(named(&all[4..]).as_deref(), Some("packets of no connection"));
        assert_eq!(named(&all[1..]).unwrap().matches(" and ").count(), 3);
    }

    #[test]
    fn sets_of_packets_become_as_few_as_they_can() {
        let packets = |flags: (u128, u128), ports: (u128, u128)| {
            let all = Packets::all(Family::V4).with(VariedField::Flags, RangeSet::range(flags.0, flags.1));
            all.with(VariedField::Port, RangeSet::range(ports.0, ports.1))
        };
        // What differs in two fields stays two.
        let apart = [packets((1, 1), (1, 1)), packets((3, 3), (3, 3))];
        assert_eq!(merged(apart.to_vec()), apart);
        // Only when the first two are one does the third fit.
        let all = [packets((1, 1), (1, 1)), packets((1, 1), (2, 2)), packets((2, 2), (1, 2))];
        assert_eq!(merged(all.to_vec()), [packets((1, 2), (1, 2))]);
        assert!(merged(Vec::new()).is_empty());
    }

    fn region(is_local: bool, limited: &[(VariedField, u128, u128)]) -> Region {
        let mut packets = Packets::all(Family::V4);
        packets.set_one(VariedField::Interface, LO);
        for (field, first, last) in limited {
            packets.set(*field, RangeSet::range(*first, *last));
        }
        Region::new(is_local, packets)
    }

    #[test]
    fn each_field_of_packets_is_told_by_itself() {
        let any = region(true, &[]);
        assert_eq!((any.family(), any.is_local()), (Family::V4, true));
        assert!(!region(false, &[]).is_local());
        assert_eq!(any.protocols(), [Protocol::Tcp, Protocol::Udp]);
        assert_eq!(any.states().len(), 5);
        let said = |region: &Region| serde_json::to_value(region).unwrap();
        let of_any = said(&any);
        for (field, name) in [
            (VariedField::Source, "sources"),
            (VariedField::Destination, "destinations"),
            (VariedField::SourcePort, "sourcePorts"),
            (VariedField::Port, "ports"),
            (VariedField::User, "users"),
            (VariedField::Group, "groups"),
            (VariedField::Flags, "flags"),
            (VariedField::Mark, "marks"),
            (VariedField::ConnMark, "connectionMarks"),
        ] {
            assert_eq!(of_any.get(name), None);
            let mut limited = of_any.clone();
            limited[name] = if matches!(field, VariedField::Source | VariedField::Destination) {
                serde_json::json!([{ "first": "0.0.0.5", "last": "0.0.0.7" }])
            } else {
                serde_json::json!([{ "first": 5, "last": 7 }])
            };
            assert_eq!(said(&region(true, &[(field, 5, 7)])), limited);
        }
        assert_eq!(
            (any.ports(), region(true, &[(VariedField::Port, 5, 7)]).ports()),
            (None, Some(vec![(5, 7)]))
        );
        let udp = Protocol::Udp.number().into();
        assert_eq!(region(true, &[(VariedField::Protocol, udp, udp)]).protocols(), [Protocol::Udp]);
        let replies = region(true, &[(VariedField::State, state::REPLY, state::REPLY)]);
        assert_eq!(replies.states(), [ConnectionState::Reply]);
    }

    #[test]
    fn of_two_ways_to_say_a_field_the_shorter_one_is_taken() {
        let words = |ranges: &[(u128, u128)]| {
            let mut packets = Packets::all(Family::V4);
            packets.set(VariedField::Port, RangeSet::of(ranges.to_vec()));
            Region::new(true, packets)
                .words((VariedField::Port, usize::MAX), "port", |port| format!("{port}"))
        };
        let last = u128::from(u16::MAX);
        assert_eq!(words(&[(0, 79)]).as_deref(), Some("port 0-79"), "as short as the other way");
        assert_eq!(words(&[(80, 80)]).as_deref(), Some("port 80"));
        assert_eq!(words(&[(0, 79), (81, last)]).as_deref(), Some("port not 80"));
        assert_eq!(words(&[(0, last)]), None);
    }

    #[test]
    fn an_example_of_packets_is_one_of_them_and_others_are_not() {
        let limited = [
            (VariedField::Source, 5, 9),
            (VariedField::Destination, 6, 9),
            (VariedField::SourcePort, 7, 9),
            (VariedField::Port, 8, 9),
            (VariedField::User, 1, 2),
            (VariedField::Group, 3, 4),
            (VariedField::Flags, 2, 2),
            (VariedField::Mark, 11, 12),
            (VariedField::ConnMark, 13, 14),
            (VariedField::State, state::REPLY, state::REPLY),
            (VariedField::Protocol, Protocol::Tcp.number().into(), Protocol::Tcp.number().into()),
        ];
        let local = region(true, &limited);
        let example = local.example();
        assert_eq!(example.sender, Sender::Local { uid: 1, gid: 3 });
        assert_eq!(example.source, Some("0.0.0.5".parse().unwrap()));
        assert_eq!((example.source_port, example.destination), (Some(7), "0.0.0.6:8".parse().unwrap()));
        assert_eq!((example.flags, example.mark, example.connection.mark), (2, 11, 13));
        assert_eq!((example.connection.state, example.protocol), (ConnectionState::Reply, Protocol::Tcp));
        let come = region(false, &limited);
        assert!(local.contains(&example) && come.contains(&come.example()));
        assert!(!come.contains(&example) && !local.contains(&come.example()));
        // A connection that nothing is known of has no mark.
        assert_eq!(region(true, &[(VariedField::ConnMark, 13, 14)]).example().connection.mark, 0);
        // Those from outside have no owner.
        assert_eq!(come.example().sender, Sender::Outside);
        for (field, first, last) in limited {
            let others = region(true, &[&limited[..], &[(field, last + 1, last + 1)]].concat());
            assert!(!others.contains(&example), "{field:?} {first}");
            let is_owner = matches!(field, VariedField::User | VariedField::Group);
            let others = region(false, &[&limited[..], &[(field, last + 1, last + 1)]].concat());
            assert_eq!(others.contains(&come.example()), is_owner, "{field:?}");
        }
    }
}
