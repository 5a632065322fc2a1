//! The steps of a walk, recorded for people.

use super::{
    super::{
        Outcome, PacketEdit, RuleOrigin, TraceEvent,
        conditions::Test,
        packets::{FieldMatch, VariedField, interface_name},
        rules::{WalkedChain, WalkedRule},
    },
    Interface, Walk,
};

impl Walk<'_> {
    pub(super) fn name_of(&self, by: Interface) -> Option<String> {
        match by {
            Interface::None => None,
            Interface::Loopback => Some("lo".into()),
            Interface::Own => self.now.packets.get(VariedField::Interface).single().map(interface_name),
            Interface::Named(name) => Some(interface_name(name)),
        }
    }

    pub(super) fn changed(&mut self, change: PacketEdit) {
        self.note(|_| TraceEvent::Changed(change));
    }

    pub(super) fn note_rule(
        &mut self,
        chain: &WalkedChain,
        rule: &WalkedRule,
        outcome: impl FnOnce(&Self) -> Outcome,
    ) {
        self.note(|walk| TraceEvent::Rule {
            place: chain.place(walk.now.calls.last().map(|call| call.rule.saturating_add(1))),
            depth: walk.now.calls.len().saturating_sub(1),
            rule: rule.seen.to_string(),
            outcome: outcome(walk),
            is_own: rule.is_own,
            origin: walk.origin(rule),
        });
    }

    /// The setting behind a rule; where several are, the one of the planned rule that is about the packets.
    fn origin(&self, rule: &WalkedRule) -> Option<RuleOrigin> {
        let is_about =
            |test: &Option<Test>| test.as_ref().is_none_or(|test| self.holds(test) == FieldMatch::Yes);
        let mut all = rule.origins.iter();
        all.find(|(test, _)| is_about(test)).or_else(|| rule.origins.first()).map(|(_, origin)| *origin)
    }

    pub(super) fn note(&mut self, step: impl FnOnce(&Self) -> TraceEvent) {
        if self.records {
            let step = step(self);
            self.steps.push(step);
        }
    }
}
