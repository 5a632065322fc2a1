//! What packets are asked: whether they fulfil the conditions of a rule.

use super::{
    super::{
        packets::{Field, Holds, interface, number, state},
        rules::Test,
        set::Set,
    },
    Interface, Walk,
};

impl Walk<'_, '_> {
    /// Whether a test holds, for those of the packets that go on; none where nobody knows.
    pub(super) fn asked(&mut self, test: &Test) -> Option<bool> {
        let Test::AnyOf(alternatives, not) = test else {
            return match self.holds(test) {
                Holds::Unknown => None,
                holds @ (Holds::Yes | Holds::No | Holds::For(..)) => Some(self.decide(holds)),
            };
        };
        let mut found = Some(false);
        for alternative in alternatives {
            match self.all_hold(alternative) {
                Some(true) => return Some(!not),
                Some(false) => {}
                None => found = None,
            }
        }
        found.map(|found| found != *not)
    }

    fn all_hold(&mut self, tests: &[Test]) -> Option<bool> {
        let mut all = Some(true);
        for test in tests {
            match self.asked(test) {
                Some(true) => {}
                Some(false) => return Some(false),
                None => all = None,
            }
        }
        all
    }

    pub(super) fn holds(&self, test: &Test) -> Holds {
        match test {
            Test::Always(holds) => Holds::when(*holds),
            Test::In(field, set) => self.has(*field, set),
            Test::Local(field, not) => match &self.rules.addresses {
                Some(own) if *not => self.has(*field, own).not(self.packets.family),
                Some(own) => self.has(*field, own),
                None => Holds::Unknown,
            },
            Test::ComesIn(set, not) => self.by(self.came_in, set, *not),
            Test::GoesOut(set, not) => self.by(self.goes_out, set, *not),
            Test::Owner(field, set) if self.has_owner => Holds::of(&self.packets, *field, set),
            Test::Owner(..) => Holds::No,
            Test::Bits(field, value, mask, not) => {
                let mark = if *field == Field::Mark { self.mark } else { self.connection_mark };
                let holds = mark.has(&self.packets, *value, *mask);
                if *not { holds.not(self.packets.family) } else { holds }
            }
            Test::Mark(field, set, not) => {
                let mark = if *field == Field::Mark { self.mark } else { self.connection_mark };
                let holds = mark.is_in(&self.packets, set);
                if *not { holds.not(self.packets.family) } else { holds }
            }
            // Several fields at once are asked one after the other: see `asked`.
            Test::AnyOf(..) | Test::Unknown => Holds::Unknown,
        }
    }

    /// Whether a field has one of these values by now.
    fn has(&self, field: Field, set: &Set) -> Holds {
        match (field, self.destination) {
            (Field::Destination, Some(to)) => Holds::when(set.contains(number(to.ip()))),
            (Field::Port, Some(to)) => Holds::when(set.contains(to.port().into())),
            (Field::State, _) if self.is_untracked => Holds::when(set.contains(state::UNTRACKED)),
            (field, _) => Holds::of(&self.packets, field, set),
        }
    }

    fn by(&self, by: Interface, set: &Set, not: bool) -> Holds {
        let holds = match by {
            // The kernel compares with an empty name.
            Interface::None => Holds::No,
            Interface::Loopback => Holds::when(set.contains(interface("lo"))),
            Interface::Own => Holds::of(&self.packets, Field::Interface, set),
        };
        if not { holds.not(self.packets.family) } else { holds }
    }

    pub(super) fn ask(&mut self, field: Field, set: &Set) -> bool {
        let holds = Holds::of(&self.packets, field, set);
        self.decide(holds)
    }

    /// Takes one of the ways, with the packets that go it.
    pub(super) fn decide(&mut self, holds: Holds) -> bool {
        match holds {
            Holds::Yes => true,
            Holds::No => false,
            Holds::For(field, set) => {
                let chosen = self.choices.choose();
                let all = self.packets.get(field);
                let taken = if chosen { all.and(&set) } else { all.without(&set) };
                self.packets.set(field, taken);
                chosen
            }
            Holds::Unknown => self.choices.choose(),
        }
    }
}
