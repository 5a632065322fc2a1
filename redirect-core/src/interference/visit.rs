//! One packet in one base chain: from rule to rule, as far as it is understood.

use super::{
    Effect, Place, Severity,
    packet::{Capture, Packet, tried_map},
    path::{DEEPEST, Hooked, Position, Search, Stage, Station, is_native, leads_to},
    ruleset::{ChainState, SeenRule, Statement, VerdictMap},
};
use crate::rule::{Chain, Hook, Is};
use alloc::string::{String, ToString};
use core::cmp::Ordering;

/// Where connection tracking begins (`NF_IP_PRI_CONNTRACK`).
const TRACKING: i32 = -200;

/// Where a packet goes from a rule or chain.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// To the next rule.
    Next,
    /// Back to the calling chain.
    Returned,
    /// Out of the base chain.
    Left,
    /// To the mesh's rules.
    Own,
    /// Nowhere, or to somebody else.
    Gone,
}

/// One packet in one base chain.
pub(super) struct Visit<'v, 'a, 's> {
    pub(super) search: &'v mut Search<'a, 's>,
    pub(super) station: &'v Station<'a>,
    pub(super) packet: Packet,
    pub(super) capture: Capture,
    /// The mesh's chain that the packet is sent to here, and whether the table is a native one.
    pub(super) to: Option<(&'a Chain, bool)>,
    /// Whether the packet comes here for sure.
    pub(super) sure: bool,
    /// Whether the rule at hand, or one that led to it, is only perhaps met.
    pub(super) conditional: bool,
}

impl<'a> Visit<'_, 'a, '_> {
    pub(super) fn base(&mut self) -> End {
        let Hooked { name, chain, base, .. } = self.station.hooked;
        let end = self.chain(name, chain, 0);
        match end {
            End::Next | End::Returned if base.drops => {
                let severity = self.severity();
                self.search.note(
                    severity,
                    self.station.place(name, None),
                    String::new(),
                    Effect::PolicyDrops,
                );
                if self.sure { End::Gone } else { End::Left }
            }
            End::Gone if !self.sure => End::Left,
            End::Next | End::Returned | End::Left | End::Own | End::Gone => end,
        }
    }

    fn severity(&self) -> Severity {
        let sure = self.is_certain() && self.station.position != Position::Unsure;
        if sure { Severity::Does } else { Severity::May }
    }

    const fn is_certain(&self) -> bool {
        self.sure && !self.conditional
    }

    fn chain(&mut self, name: &str, chain: &'a ChainState, depth: usize) -> End {
        if depth > DEEPEST {
            return End::Next;
        }
        for (number, rule) in (1_usize..).zip(&chain.rules) {
            if *self.search.steps == 0 {
                return End::Gone;
            }
            *self.search.steps = self.search.steps.saturating_sub(1);
            let met = self.packet.fulfils_all(&rule.conditions);
            match self.if_met(met, |visit| visit.rule(name, number, rule, depth)) {
                End::Next => {}
                End::Returned => return if depth == 0 { End::Returned } else { End::Next },
                end @ (End::Left | End::Own | End::Gone) => return end,
            }
        }
        End::Next
    }

    /// Where the packet goes from what happens if conditions are met. Whether they are may not be known: then everything behind is reached only perhaps.
    fn if_met(&mut self, met: Option<bool>, happens: impl FnOnce(&mut Self) -> End) -> End {
        if met == Some(false) {
            return End::Next;
        }
        let conditional = self.conditional;
        self.conditional |= met.is_none();
        let end = happens(self);
        self.conditional = conditional;
        if met.is_none() && end != End::Next {
            self.sure = false;
            return End::Next;
        }
        end
    }

    fn rule(&mut self, chain: &str, number: usize, rule: &'a SeenRule, depth: usize) -> End {
        for statement in &rule.statements {
            let place = self.station.place(chain, Some(number));
            let end = self.statement(statement, rule, place, depth);
            if end != End::Next {
                return end;
            }
        }
        End::Next
    }

    fn statement(&mut self, statement: &'a Statement, rule: &'a SeenRule, place: Place, depth: usize) -> End {
        match statement {
            Statement::Jump(to) => self.jump(to, rule, depth),
            Statement::Goto(to) => match self.jump(to, rule, depth) {
                End::Next => {
                    if depth == 0 {
                        self.ends(place, rule);
                    }
                    End::Returned
                }
                end @ (End::Returned | End::Left | End::Own | End::Gone) => end,
            },
            Statement::Accept | Statement::TranslateSource(_) => {
                self.ends(place, rule);
                End::Left
            }
            Statement::Return => {
                if depth == 0 {
                    self.ends(place, rule);
                }
                End::Returned
            }
            Statement::Redirect(_) | Statement::Translate(_) if self.is_translated_here() => {
                self.note(place, rule, Effect::Translates);
                // Which of two chains of the same priority is asked first is not known.
                if self.station.position == Position::Unsure { End::Left } else { End::Gone }
            }
            Statement::Redirect(_) | Statement::Translate(_) => End::Left,
            Statement::Drop | Statement::Reject => {
                self.note(place, rule, Effect::Drops);
                End::Gone
            }
            Statement::Tproxy { .. } => {
                self.tproxy(place, rule);
                End::Next
            }
            Statement::Untrack => {
                self.untrack(place, rule);
                End::Next
            }
            Statement::SetMark(mark) => {
                self.mark(*mark, place, rule);
                End::Next
            }
            Statement::SetMarkBits { .. } => {
                self.mark(None, place, rule);
                End::Next
            }
            Statement::RestoreMark => {
                // The connection is new: nothing has marked it.
                self.mark(Some(0), place, rule);
                End::Next
            }
            Statement::Queue => {
                self.search.note(Severity::May, place, rule.to_string(), Effect::Queues);
                End::Left
            }
            Statement::Rewrite(_) => {
                self.note(place, rule, Effect::Rewrites);
                End::Next
            }
            // What is in a large map names more packets than are tried.
            Statement::Map(_) | Statement::Unknown(_) => match tried_map(statement) {
                Some(map) => self.map(map, rule, &place, depth),
                None => {
                    self.search.note(Severity::May, place, rule.to_string(), Effect::Unknown);
                    End::Next
                }
            },
            Statement::SaveMark
            | Statement::SetConnMark { .. }
            | Statement::Zone(_)
            | Statement::Continue
            | Statement::Harmless(_) => End::Next,
        }
    }

    fn jump(&mut self, to: &str, rule: &SeenRule, depth: usize) -> End {
        if let Some((chain, native)) = self.to
            && rule.statements.iter().any(|statement| leads_to(statement, chain, native))
        {
            return End::Own;
        }
        // Others of the mesh's chains leave the packet alone.
        if Chain::named(to).belongs_to_mesh() || is_native(self.station.hooked.table_name) {
            return End::Next;
        }
        match self.station.hooked.table.chains.get_key_value(to) {
            Some((name, chain)) => self.chain(name, chain, depth.saturating_add(1)),
            None => End::Next,
        }
    }

    /// What a map says of the packet.
    fn map(&mut self, map: &'a VerdictMap, rule: &'a SeenRule, place: &Place, depth: usize) -> End {
        for (among, verdict) in map.each() {
            let met = self.packet.is_among(&Is { value: among, not: false });
            let end = self.if_met(met, |visit| visit.statement(verdict, rule, place.clone(), depth));
            // Of all combinations a packet has one.
            if met == Some(true) {
                return end;
            }
        }
        End::Next
    }

    /// A rule that ends the chain the mesh's rules are in.
    fn ends(&mut self, place: Place, rule: &SeenRule) {
        if self.station.position == Position::Own {
            self.note(place, rule, Effect::EndsChain);
        }
    }

    /// Whether destinations are translated here, before the mesh does or after TPROXY.
    fn is_translated_here(&self) -> bool {
        self.station.hooked.base.is_nat && matches!(self.station.hook(), Hook::Prerouting | Hook::Output)
    }

    /// The packet is handed to another transparent proxy.
    fn tproxy(&mut self, place: Place, rule: &SeenRule) {
        if self.is_on_arrival() {
            self.note(place, rule, Effect::Tproxies);
        }
    }

    fn untrack(&mut self, place: Place, rule: &SeenRule) {
        let severity = match self.station.hooked.base.priority.cmp(&TRACKING) {
            Ordering::Less => self.severity(),
            // Which of the two is asked first is not known.
            Ordering::Equal => Severity::May,
            Ordering::Greater => return,
        };
        if self.station.stage == Stage::Original && matches!(self.capture, Capture::Redirect(_)) {
            self.search.note(severity, place, rule.to_string(), Effect::Untracks);
        }
    }

    /// The packet gets a mark; none where nobody knows which.
    fn mark(&mut self, mark: Option<u32>, place: Place, rule: &SeenRule) {
        let before = self.station.stage == Stage::Original;
        if let (Capture::Tproxy(wanted), true) = (self.capture, self.is_on_arrival()) {
            // The mesh's rules leave alone what has the mark already. Behind them another mark leads elsewhere what
            // is not for an address of the pod.
            match (before, mark) {
                (_, None) => self.search.note(Severity::May, place, rule.to_string(), Effect::Remarks),
                (true, Some(mark)) if mark == wanted => self.note(place, rule, Effect::Remarks),
                (false, Some(mark)) if mark != wanted => {
                    self.search.note(Severity::May, place, rule.to_string(), Effect::Remarks);
                }
                (_, Some(_)) => {}
            }
        }
        self.packet.mark = mark.filter(|_| self.is_certain());
    }

    fn is_on_arrival(&self) -> bool {
        self.station.hook() == Hook::Prerouting && self.search.flow.hook == Hook::Prerouting
    }

    fn note(&mut self, place: Place, rule: &SeenRule, effect: Effect) {
        let severity = self.severity();
        self.search.note(severity, place, rule.to_string(), effect);
    }
}
