//! Whether packets fulfil the conditions of a rule.

use super::{
    super::{
        conditions::Test,
        packets::{FieldMatch, LO, MarkNow, VariedField, number, state},
        set::RangeSet,
    },
    Interface, Split, Tracking, Unknown, Walk,
};
use netfilter_state::ruleset::{Api, TableFamily};
use redirect_core::rule::Table;

impl Walk<'_> {
    /// Whether a test holds; `None` if unknown.
    pub(super) fn evaluate(&self, test: &Test) -> Result<Option<bool>, Split> {
        let Test::AnyOf(alternatives, not) = test else { return decided(self.holds(test)) };
        let mut found = Some(false);
        for alternative in alternatives {
            match all_of(alternative.iter().map(|test| self.evaluate(test)))? {
                Some(true) => return Ok(Some(!not)),
                Some(false) => {}
                None => found = None,
            }
        }
        Ok(found.map(|found| found != *not))
    }

    pub(super) fn holds(&self, test: &Test) -> FieldMatch {
        match test {
            Test::Always(holds) => FieldMatch::when(*holds),
            Test::In(VariedField::State, set) => self.is_in_state(set),
            Test::In(field, set) => self.has(*field, set),
            Test::Local(field, not) => {
                let own = self.rules.routes.as_ref().map(|routes| &routes.local);
                let own = own.or(self.rules.addresses.as_ref());
                self.turned(*not, own.map_or(FieldMatch::Unknown, |own| self.has(*field, own)))
            }
            Test::Entry => self.has_entry(),
            Test::Translated(field, not) => self.turned(*not, self.is_translated(*field)),
            Test::ComesIn(set) => self.by(self.now.came_in, set),
            Test::GoesOut(set) => self.by(self.now.goes_out, set),
            Test::Owner(field, set) if self.now.has_owner => FieldMatch::of(&self.now.packets, *field, set),
            // That of the socket that TPROXY has chosen.
            Test::Owner(..) if self.now.handed_over.is_some() => FieldMatch::Unknown,
            Test::Owner(..) => FieldMatch::No,
            Test::Bits(VariedField::ConnMark, value, mask, not) => {
                self.of_connection(*not, |mark| mark.has(&self.now.packets, *value, *mask))
            }
            Test::Mark(VariedField::ConnMark, set, not) => {
                self.of_connection(*not, |mark| mark.is_in(&self.now.packets, set))
            }
            Test::Bits(_, value, mask, not) => {
                self.turned(*not, self.now.mark.has(&self.now.packets, *value, *mask))
            }
            Test::Mark(_, set, not) => self.turned(*not, self.now.mark.is_in(&self.now.packets, set)),
            // Several fields at once are compared one after the other: see `asked`.
            Test::AnyOf(..) | Test::Unknown => FieldMatch::Unknown,
        }
    }

    fn turned(&self, not: bool, holds: FieldMatch) -> FieldMatch {
        if not { holds.not(self.now.packets.family) } else { holds }
    }

    /// Whether a field now has one of these values.
    pub(super) fn has(&self, field: VariedField, set: &RangeSet) -> FieldMatch {
        match self.value_of(field) {
            Some(KnownField::Value(value)) => FieldMatch::when(set.contains(value)),
            Some(KnownField::Packets) => FieldMatch::of(&self.now.packets, field, set),
            None => FieldMatch::Unknown,
        }
    }

    /// What is known of a field now; none where nothing is.
    pub(super) fn value_of(&self, field: VariedField) -> Option<KnownField> {
        match (field, self.now.destination) {
            (VariedField::Destination, Some(to)) => Some(KnownField::Value(number(to.ip()))),
            (VariedField::Port, Some(to)) => Some(KnownField::Value(to.port().into())),
            (VariedField::Source | VariedField::SourcePort, _) if self.now.is_source_translated => None,
            _ => Some(KnownField::Packets),
        }
    }

    /// What connection tracking says: before it has seen a packet, that it belongs to no connection (`nf_ct_get`).
    fn is_in_state(&self, set: &RangeSet) -> FieldMatch {
        match self.now.tracking {
            Tracking::NotYet => FieldMatch::when(set.contains(state::INVALID)),
            Tracking::Template => FieldMatch::when(set.contains(state::NEW)),
            Tracking::Never => FieldMatch::when(set.contains(state::UNTRACKED)),
            Tracking::Seen => FieldMatch::of(&self.now.packets, VariedField::State, set),
        }
    }

    /// What a connection's entry says. Without one no comparison holds, not even an inverted one.
    fn of_connection(&self, not: bool, says: impl FnOnce(MarkNow) -> FieldMatch) -> FieldMatch {
        match self.has_entry() {
            FieldMatch::Yes => self.turned(not, says(self.mark_of_entry())),
            without @ (FieldMatch::No | FieldMatch::For(..) | FieldMatch::Unknown) => without,
        }
    }

    /// The mark that an entry has; none of the structure that holds a zone.
    pub(super) fn mark_of_entry(&self) -> MarkNow {
        if self.now.tracking == Tracking::Template { MarkNow::is(0) } else { self.now.connection_mark }
    }

    /// Whether the packet belongs to a connection that has an entry.
    pub(super) fn has_entry(&self) -> FieldMatch {
        match self.now.tracking {
            Tracking::NotYet | Tracking::Never => FieldMatch::No,
            // x_tables mistake the structure that holds a zone for an entry.
            Tracking::Template => FieldMatch::when(!self.is_in_native_table()),
            Tracking::Seen => FieldMatch::of(
                &self.now.packets,
                VariedField::State,
                &RangeSet::range(state::NEW, state::REPLY),
            ),
        }
    }

    /// Whether the connection's destination, or its source, is another one than the packet had at first.
    fn is_translated(&self, field: VariedField) -> FieldMatch {
        let is_first = FieldMatch::of(
            &self.now.packets,
            VariedField::State,
            &RangeSet::range(state::NEW, state::RELATED),
        );
        if field == VariedField::Source {
            return match is_first {
                FieldMatch::Yes if !self.now.is_source_translated => FieldMatch::No,
                // To itself, perhaps, which changes nothing (`nf_nat_setup_info`).
                FieldMatch::Yes => FieldMatch::Unknown,
                // How its first packet was translated is not known.
                FieldMatch::No => FieldMatch::Unknown,
                either @ (FieldMatch::For(..) | FieldMatch::Unknown) => either,
            };
        }
        let Some(to) = self.now.destination.or(self.given.translated_to) else { return FieldMatch::No };
        let addressed = RangeSet::one(number(to.ip()));
        let is_addressed = FieldMatch::of(&self.now.packets, VariedField::Destination, &addressed);
        let is_same = if is_addressed == FieldMatch::Yes {
            FieldMatch::of(&self.now.packets, VariedField::Port, &RangeSet::one(to.port().into()))
        } else {
            is_addressed
        };
        is_same.not(self.now.packets.family)
    }

    /// Whether the rule at hand is one of nft's own. iptables' are in tables named `raw` where this makes a difference.
    pub(super) fn is_in_native_table(&self) -> bool {
        self.here().is_some_and(|(chain, _)| {
            chain.table.api == Api::NfTables
                && (chain.table.family == TableFamily::Inet || chain.table.name != Table::Raw.name())
        })
    }

    pub(super) fn by(&self, by: Interface, set: &RangeSet) -> FieldMatch {
        match by {
            // The kernel compares with an empty name.
            Interface::None => FieldMatch::when(set.contains(0)),
            Interface::Loopback => FieldMatch::when(set.contains(LO)),
            Interface::Named(name) => FieldMatch::when(set.contains(name)),
            Interface::Own => FieldMatch::of(&self.now.packets, VariedField::Interface, set),
        }
    }

    pub(super) fn ask(&mut self, field: VariedField, set: &RangeSet) -> Result<bool, Split> {
        let holds = FieldMatch::of(&self.now.packets, field, set);
        self.decide(holds, || Unknown::Work)
    }

    /// The answer for all packets of the walk; if they differ, or it is unknown, the walk splits in two.
    pub(super) fn decide(
        &mut self,
        holds: FieldMatch,
        unknown: impl FnOnce() -> Unknown,
    ) -> Result<bool, Split> {
        self.settle(decided(holds)?, unknown)
    }

    /// The answer, or what is assumed where it is unknown.
    pub(super) fn settle(
        &mut self,
        holds: Option<bool>,
        unknown: impl FnOnce() -> Unknown,
    ) -> Result<bool, Split> {
        holds.map_or_else(|| self.assume(unknown), Ok)
    }
}

/// Whether all of these hold; none where that is unknown.
pub(super) fn all_of(
    answers: impl IntoIterator<Item = Result<Option<bool>, Split>>,
) -> Result<Option<bool>, Split> {
    let mut all = Some(true);
    for answer in answers {
        match answer? {
            Some(true) => {}
            Some(false) => return Ok(Some(false)),
            None => all = None,
        }
    }
    Ok(all)
}

/// What is known of a field.
pub(super) enum KnownField {
    /// It is as the packets had it at first.
    Packets,
    /// It is this, by translation.
    Value(u128),
}

pub(super) fn decided(holds: FieldMatch) -> Result<Option<bool>, Split> {
    match holds {
        FieldMatch::Yes => Ok(Some(true)),
        FieldMatch::No => Ok(Some(false)),
        FieldMatch::For(field, set) => Err(Split::By(field, set)),
        FieldMatch::Unknown => Ok(None),
    }
}
