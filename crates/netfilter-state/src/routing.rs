//! Routing beside the rules: what TPROXY's marks need, and the `::6` address. What is present, what is absent, what is
//! left of an earlier plan.

use crate::expressions::wire::{Attribute, Attributes, MessageWriter};
use redirect_core::{
    AmbientRedirect, Tproxy,
    plan::{DataPlane, RulePlan},
    values::{Family, Mark, MaskedMark, RouteTable},
};
use std::{collections::BTreeSet, fmt, ops::RangeInclusive};

/// One thing a plan needs besides rules. Closed on purpose: who puts a plan in force has to make every kind of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RoutingItem {
    /// `::6/128` on the loopback interface.
    LoopbackAddress,
    /// `local default dev lo` in this table.
    Route(Family, RouteTable),
    /// `ip rule`: packets with this mark are looked up in this table. Its priority is the plan's to choose, and none of those
    /// before the table `main` is better than another.
    Rule(Family, MaskedMark, RouteTable),
}

/// Something of that kind that is in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundRouting {
    /// What it is.
    pub item: RoutingItem,
    /// Why it does not do what a plan wants of it, if it does not.
    pub flaw: Option<String>,
    /// A policy rule that a run has marked as its own to remove, before it removed the rules that proved it.
    pub marked_for_removal: bool,
    /// The kernel's message about it: everything that is needed to remove this very one, or to make it again.
    pub message: Vec<u8>,
}

impl FoundRouting {
    /// The protocol (`FRA_PROTOCOL`) of a policy rule that is about to be removed: a number without a registered meaning.
    pub const REMOVAL_PROTOCOL: u8 = 0x69;

    /// One that does what a plan wants of it, not read from a kernel.
    #[must_use]
    pub const fn working(item: RoutingItem) -> Self {
        Self { item, flaw: None, marked_for_removal: false, message: Vec::new() }
    }

    /// What a plan needs, all of it working.
    #[must_use]
    pub fn all_working(plan: &RulePlan) -> Vec<Self> {
        RoutingItem::wanted(plan).into_iter().map(Self::working).collect()
    }

    /// Whether it does what a plan wants of it, and stays.
    #[must_use]
    pub const fn works(&self) -> bool {
        self.flaw.is_none() && !self.marked_for_removal
    }

    /// Whether the kernel would take one for the other. What it counts or measures about a route or an address makes no difference, nor
    /// does the position among others.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        let is_same = match self.item {
            // An interface has an address once.
            RoutingItem::LoopbackAddress => true,
            RoutingItem::Route(..) => without_counters(&self.message).eq(without_counters(&other.message)),
            RoutingItem::Rule(..) => self.message == other.message,
        };
        is_same && (self.item, self.marked_for_removal) == (other.item, other.marked_for_removal)
    }

    /// The same, marked as to be removed; a policy rule by its protocol.
    #[must_use]
    pub fn mark_for_removal(&self) -> Self {
        let message = if let RoutingItem::Rule(..) = self.item {
            with_removal_protocol(&self.message)
        } else {
            self.message.clone()
        };
        Self { marked_for_removal: true, message, ..self.clone() }
    }

    /// Those of `all` that are more than those of `than`: of several that are the same, each counts.
    #[must_use]
    pub fn surplus<'a>(
        all: impl IntoIterator<Item = &'a Self>,
        than: impl IntoIterator<Item = &'a Self>,
    ) -> Vec<&'a Self> {
        let mut than: Vec<&Self> = than.into_iter().collect();
        let is_more = |one: &&Self| match than.iter().position(|other| one.is_same_as(other)) {
            Some(place) => {
                than.swap_remove(place);
                false
            }
            None => true,
        };
        all.into_iter().filter(is_more).collect()
    }

    /// Remnants of earlier plans, in the order in which to remove it: routes, then the rules that lead to them and
    /// identify their owner.
    ///
    /// Other programs do transparent proxying, too, with the same routing. So a policy rule counts as the mesh's when its
    /// mark is one that rules of the mesh use (`marks`), or when mark and table are those of `tproxy`, the usual ones or those of
    /// ambient mode, or the table is one of [`RoutingItem::CHOSEN_TABLES`]; a route when such a rule leads to it, and no rule of another
    /// program does; a rule that an earlier run has marked for removal always counts. Of several that are the same, one that works
    /// is kept where the plan wants it.
    pub(crate) fn stale<'a>(
        plan: &RulePlan,
        found: &'a [Self],
        marks: &BTreeSet<Mark>,
        tproxy: Option<Tproxy>,
    ) -> Vec<&'a Self> {
        let of_tproxy = |tproxy: Tproxy| (MaskedMark::from(tproxy.mark()), tproxy.table());
        let mut named: Vec<(MaskedMark, RouteTable)> =
            plan.policy_routes().map(|routes| (routes.mark(), routes.table())).into_iter().collect();
        named.extend(tproxy.into_iter().chain([Tproxy::default()]).map(of_tproxy));
        named.push((AmbientRedirect::ANSWER_MARK, AmbientRedirect::ANSWER_TABLE));
        let has_route = |family, table| found.iter().any(|one| one.item == RoutingItem::Route(family, table));
        let marked_for_removal: BTreeSet<RoutingItem> =
            found.iter().filter(|one| one.marked_for_removal).map(|one| one.item).collect();
        let ours = |item: &RoutingItem| match *item {
            _ if marked_for_removal.contains(item) => true,
            RoutingItem::LoopbackAddress => true,
            RoutingItem::Rule(family, mark, table) => {
                let is_used = mark.whole().is_some_and(|mark| marks.contains(&mark));
                let is_chosen = RoutingItem::CHOSEN_TABLES.contains(&table.number())
                    && named.iter().any(|(named, _)| *named == mark);
                named.contains(&(mark, table)) || is_chosen || is_used && has_route(family, table)
            }
            RoutingItem::Route(..) => false,
        };
        let rules = || {
            found.iter().filter_map(|one| match one.item {
                RoutingItem::Rule(family, _, table) => Some((ours(&one.item), family, table)),
                RoutingItem::LoopbackAddress | RoutingItem::Route(..) => None,
            })
        };
        let usual =
            named.iter().map(|(_, table)| *table).filter(|table| *table != AmbientRedirect::ANSWER_TABLE);
        let mut tables: BTreeSet<(Family, RouteTable)> =
            usual.flat_map(|table| Family::BOTH.map(|family| (family, table))).collect();
        let own = rules().filter(|(is_ours, ..)| *is_ours);
        tables.extend(own.map(|(_, family, table)| (family, table)));
        for (_, family, table) in rules().filter(|(is_ours, ..)| !is_ours) {
            // Beside other routes another program has no use for it, and a table that was chosen was free.
            let is_beside = |one: &Self| {
                one.item == RoutingItem::Route(family, table)
                    && (one.flaw.is_some() || RoutingItem::CHOSEN_TABLES.contains(&table.number()))
            };
            let leads_there = rules().any(|rule| rule == (true, family, table));
            if !(leads_there && found.iter().any(is_beside)) {
                tables.remove(&(family, table));
            }
        }
        let is_ours = |item: &RoutingItem| match item {
            RoutingItem::Route(family, table) => tables.contains(&(*family, *table)),
            RoutingItem::LoopbackAddress | RoutingItem::Rule(..) => ours(item),
        };
        let mut kept = BTreeSet::new();
        let wanted = RoutingItem::wanted(plan);
        let mut stays = |one: &&Self| one.works() && wanted.contains(&one.item) && kept.insert(one.item);
        let mut stale: Vec<&Self> =
            found.iter().filter(|one| is_ours(&one.item)).filter(|one| !stays(one)).collect();
        stale.sort_by_key(|one| one.item);
        stale
    }
}

impl RoutingItem {
    /// The tables among which one is chosen where the plan's own is another program's. With a plan's mark, the number says whose a policy rule
    /// is.
    pub const CHOSEN_TABLES: RangeInclusive<u32> = 15_100..=15_199;

    /// What a plan needs, in the order in which to add it: the address, then routes, then the rules that lead to them; in ambient mode
    /// the rules first.
    #[must_use]
    pub fn wanted(plan: &RulePlan) -> Vec<Self> {
        let mut items: Vec<Self> =
            plan.loopback_address().map(|_| Self::LoopbackAddress).into_iter().collect();
        if let Some(routes) = plan.policy_routes() {
            for family in routes.families().iter().copied() {
                items.push(Self::Route(family, routes.table()));
                items.push(Self::Rule(family, routes.mark(), routes.table()));
            }
        }
        items.sort_unstable();
        let table = plan.policy_routes().map(|routes| routes.table().number());
        if plan.data_plane() == DataPlane::Ambient
            || table.is_some_and(|table| RoutingItem::CHOSEN_TABLES.contains(&table))
        {
            // Only the rule says whose a route is in such a table, and a run may end in between.
            items.reverse();
        }
        items
    }

    /// What a plan needs and is not there, or does not work, in the order in which to add it.
    #[must_use]
    pub fn missing(plan: &RulePlan, found: &[FoundRouting]) -> Vec<Self> {
        let works = |item: &Self| found.iter().any(|one| one.item == *item && one.works());
        Self::wanted(plan).into_iter().filter(|item| !works(item)).collect()
    }

    /// The family whose policy routing it concerns; the address is not routing.
    #[must_use]
    pub const fn family(self) -> Option<Family> {
        match self {
            Self::Rule(family, ..) | Self::Route(family, _) => Some(family),
            Self::LoopbackAddress => None,
        }
    }
}

/// The message about a policy rule, with the protocol of one that is to be removed: since 4.17 the kernel repeats this attribute in every one.
fn with_removal_protocol(message: &[u8]) -> Vec<u8> {
    const PROTOCOL: u16 = 21;
    let (header, attributes) = parts(message);
    let mut marked = MessageWriter::default();
    marked.raw(header);
    for (kind, value) in attributes {
        marked.bytes(kind, if kind == PROTOCOL { &[FoundRouting::REMOVAL_PROTOCOL] } else { value.0 });
    }
    marked.finish().unwrap_or_default()
}

/// The kernel's message about a route, attribute by attribute, without the one that changes by itself (`RTA_CACHEINFO`).
fn without_counters(message: &[u8]) -> impl Iterator<Item = (u16, Attribute<'_>)> {
    const CACHE_INFO: u16 = 12;
    let (header, attributes) = parts(message);
    std::iter::once((0, Attribute(header))).chain(attributes.filter(|(kind, _)| *kind != CACHE_INFO))
}

/// The header and the attributes of a message about a policy rule or a route (`fib_rule_hdr`, `rtmsg`).
fn parts(message: &[u8]) -> (&[u8], Attributes<'_>) {
    const HEADER: usize = 12;
    let (header, attributes) = message.split_at_checked(HEADER).unwrap_or((message, &[]));
    (header, Attribute(attributes).attributes())
}

/// What a step does to routing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoutingChange {
    /// It adds one.
    Added(RoutingItem),
    /// It removes this one.
    Removed(FoundRouting),
    /// It replaces this one with its like that is marked for removal.
    Marked(FoundRouting),
}

/// What takes a change back, where it was made, and only as far as it was: a kernel may hold any number of the same policy rule, and
/// removes another than the one that was meant if it comes first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TakingBack {
    /// The items to make, ...
    pub make: Vec<FoundRouting>,
    /// ... and what is too much, to be removed after that.
    pub remove: Option<FoundRouting>,
}

impl RoutingChange {
    /// What it is about.
    #[must_use]
    pub const fn item(&self) -> RoutingItem {
        match self {
            Self::Added(item) => *item,
            Self::Removed(found) | Self::Marked(found) => found.item,
        }
    }

    /// What takes it back where `now` is there, and `before` was before the change.
    #[must_use]
    pub fn taking_back(&self, now: &[FoundRouting], before: &[FoundRouting]) -> TakingBack {
        let concerned = |one: &&FoundRouting| one.item == self.item();
        let now: Vec<&FoundRouting> = now.iter().filter(concerned).collect();
        let before: Vec<&FoundRouting> = before.iter().filter(concerned).collect();
        let missing = FoundRouting::surplus(before.iter().copied(), now.iter().copied());
        let mut extra = FoundRouting::surplus(now.iter().copied(), before.iter().copied()).into_iter();
        let remove = match self {
            Self::Added(_) if now.len().saturating_add(missing.len()) > before.len() => extra.next(),
            Self::Added(_) | Self::Removed(_) => None,
            Self::Marked(found) => extra.find(|one| one.is_same_as(&found.mark_for_removal())),
        };
        TakingBack { make: missing.into_iter().cloned().collect(), remove: remove.cloned() }
    }
}

impl fmt::Display for RoutingItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(family, mark, table) => {
                write!(f, "{family} policy rule: fwmark {mark} lookup {table}")
            }
            Self::Route(family, table) => write!(f, "{family} route: local default dev lo table {table}"),
            Self::LoopbackAddress => write!(f, "address {}/128 on lo", Family::PASSTHROUGH_V6),
        }
    }
}

impl fmt::Display for FoundRouting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.item)?;
        self.flaw.as_ref().map_or(Ok(()), |flaw| write!(f, " ({flaw})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::{
        AmbientRedirect, Families, Redirect,
        settings::{Key, NamespaceFacts, RawSettings, Source},
    };

    fn plan(mode: &'static str) -> RulePlan {
        let mut raw = RawSettings::new();
        raw.set(Key::InterceptionMode, mode, Source::Flag("test"));
        raw.set(Key::InboundPorts, "*", Source::Flag("test"));
        let addresses = ["10.1.0.2".parse().unwrap()];
        Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
    }

    fn stale_of(plan: &RulePlan, found: &[RoutingItem], marks: &[u32]) -> Vec<RoutingItem> {
        let found: Vec<_> = found.iter().copied().map(FoundRouting::working).collect();
        let marks = marks.iter().copied().map(|one| Mark::new(one).unwrap()).collect();
        FoundRouting::stale(plan, &found, &marks, None).into_iter().map(|one| one.item).collect()
    }

    #[test]
    fn only_what_marks_of_the_mesh_lead_to_is_left_of_an_earlier_plan() {
        let (mark, usual) = (Tproxy::default().mark().into(), Tproxy::default().table());
        let [theirs, other] = [200, 201].map(|table| RouteTable::new(table).unwrap());
        let rule = |mark: u32, table| RoutingItem::Rule(Family::V4, Mark::new(mark).unwrap().into(), table);
        let route = |table| RoutingItem::Route(Family::V4, table);
        let both = [route(usual), RoutingItem::Rule(Family::V4, mark, usual)];
        // They are the usual ones; a plan that wants them keeps them.
        assert_eq!(stale_of(&plan("REDIRECT"), &both, &[]), both);
        assert_eq!(stale_of(&plan("TPROXY"), &both, &[]), []);
        // A mark that rules of the mesh use says whose a rule is, and so whose route it leads to; nothing else does.
        let found = [route(theirs), rule(7, theirs), rule(7, other), route(other)];
        assert_eq!(stale_of(&plan("TPROXY"), &found, &[]), []);
        assert_eq!(stale_of(&plan("TPROXY"), &found[..2], &[7]), found[..2]);
        assert_eq!(stale_of(&plan("TPROXY"), &found[..2], &[8]), []);
        // Of the usual mark and table one is not enough.
        let half = [route(theirs), RoutingItem::Rule(Family::V4, mark, theirs), rule(7, usual)];
        assert_eq!(stale_of(&plan("TPROXY"), &half, &[]), []);
        // Nor does a rule that leads nowhere.
        assert_eq!(stale_of(&plan("TPROXY"), &[rule(7, theirs), route(other)], &[7]), []);
    }

    #[test]
    fn what_is_left_of_ambient_mode_goes_unless_another_program_needs_its_route() {
        let ambient = AmbientRedirect::new(Families::V4).plan();
        let [route, rule] = [
            RoutingItem::Route(Family::V4, AmbientRedirect::ANSWER_TABLE),
            RoutingItem::Rule(Family::V4, AmbientRedirect::ANSWER_MARK, AmbientRedirect::ANSWER_TABLE),
        ];
        assert_eq!(RoutingItem::wanted(&ambient), [rule, route]);
        assert_eq!(stale_of(&ambient, &[route, rule], &[]), []);
        assert_eq!(stale_of(&RulePlan::empty(), &[route, rule], &[]), [route, rule]);
        assert_eq!(stale_of(&plan("TPROXY"), &[route, rule], &[]), [route, rule]);
        // The number 100 is in every handbook.
        let theirs =
            RoutingItem::Rule(Family::V4, Mark::new(1).unwrap().into(), AmbientRedirect::ANSWER_TABLE);
        assert_eq!(stale_of(&RulePlan::empty(), &[route], &[]), []);
        assert_eq!(stale_of(&RulePlan::empty(), &[route, theirs], &[]), []);
        assert_eq!(stale_of(&RulePlan::empty(), &[route, rule, theirs], &[]), [rule]);
    }

    #[test]
    fn a_table_that_was_chosen_is_known_by_the_mark_of_its_rule() {
        let chosen = RouteTable::new(*RoutingItem::CHOSEN_TABLES.start()).unwrap();
        let route = RoutingItem::Route(Family::V4, chosen);
        let theirs = RoutingItem::Rule(Family::V4, Mark::new(7).unwrap().into(), chosen);
        for mark in [AmbientRedirect::ANSWER_MARK, Tproxy::default().mark().into()] {
            let rule = RoutingItem::Rule(Family::V4, mark, chosen);
            for wanted in [RulePlan::empty(), plan("TPROXY"), AmbientRedirect::new(Families::V4).plan()] {
                assert_eq!(stale_of(&wanted, &[rule, route], &[]), [route, rule]);
                assert_eq!(stale_of(&wanted, &[theirs, rule, route], &[]), [route, rule]);
            }
        }
        assert_eq!(stale_of(&RulePlan::empty(), &[theirs, route], &[]), []);
        // Only the rule names its owner, so it comes first, and goes last.
        let ambient = AmbientRedirect::new(Families::V4).plan().with_policy_routing(chosen, None);
        let tproxy = plan("TPROXY").with_policy_routing(chosen, None);
        for wanted in [ambient, tproxy] {
            assert!(matches!(
                RoutingItem::wanted(&wanted)[..],
                [RoutingItem::Rule(..), RoutingItem::Route(..)]
            ));
            assert_eq!(stale_of(&wanted, &RoutingItem::wanted(&wanted), &[]), []);
        }
    }

    #[test]
    fn a_route_among_others_is_ours_whoever_leads_to_its_table() {
        let route = FoundRouting::working(RoutingItem::Route(Family::V4, AmbientRedirect::ANSWER_TABLE));
        let rule = FoundRouting::working(RoutingItem::Rule(
            Family::V4,
            AmbientRedirect::ANSWER_MARK,
            AmbientRedirect::ANSWER_TABLE,
        ));
        let theirs =
            RoutingItem::Rule(Family::V4, Mark::new(1).unwrap().into(), AmbientRedirect::ANSWER_TABLE);
        let beside = FoundRouting { flaw: Some("the table also has another".into()), ..route };
        let found = [beside.clone(), rule.clone(), FoundRouting::working(theirs)];
        assert_eq!(FoundRouting::stale(&RulePlan::empty(), &found, &BTreeSet::new(), None), [&beside, &rule]);
        // Unless no rule of ours does.
        let found = [beside, FoundRouting::working(theirs)];
        assert!(FoundRouting::stale(&RulePlan::empty(), &found, &BTreeSet::new(), None).is_empty());
        let usual = Tproxy::default().table();
        let theirs = RoutingItem::Rule(Family::V4, Mark::new(7).unwrap().into(), usual);
        let route = RoutingItem::Route(Family::V4, usual);
        let beside =
            FoundRouting { flaw: Some("the table also has another".into()), ..FoundRouting::working(route) };
        let found = [beside, FoundRouting::working(theirs)];
        assert!(FoundRouting::stale(&RulePlan::empty(), &found, &BTreeSet::new(), None).is_empty());
    }

    #[test]
    fn what_an_earlier_run_has_marked_is_left_of_it_whatever_its_mark() {
        let table = RouteTable::new(200).unwrap();
        let rule = FoundRouting::working(RoutingItem::Rule(Family::V4, Mark::new(7).unwrap().into(), table));
        let route = FoundRouting::working(RoutingItem::Route(Family::V4, table));
        let none = BTreeSet::new();
        let found = [rule.mark_for_removal(), route.clone()];
        assert_eq!(
            FoundRouting::stale(&plan("TPROXY"), &found, &none, None),
            [&route, &rule.mark_for_removal()]
        );
        assert!(FoundRouting::stale(&plan("TPROXY"), &[rule, route], &none, None).is_empty());
    }

    #[test]
    fn what_has_a_flaw_or_is_to_go_does_not_work() {
        let whole = FoundRouting::working(RoutingItem::LoopbackAddress);
        let flawed = FoundRouting { flaw: Some("it is shadowed".into()), ..whole.clone() };
        assert!(whole.works());
        assert!(!flawed.works());
        assert!(!whole.mark_for_removal().works());
        assert!(!flawed.mark_for_removal().works());
    }
}
