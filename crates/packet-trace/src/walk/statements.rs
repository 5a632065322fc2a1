//! What a rule does with the packets that fulfil its conditions.

use super::{
    super::{
        Fate, Listener, PacketEdit,
        packets::{LO, MarkNow, VariedField, link_local, localhost, number},
        routes::NO_RECEIVER,
        rules::{Answers, ChainRule, Next},
        set::RangeSet,
    },
    Call, Cause, DEEPEST, Interface, MOST_MARKS, Point, Split, Tracking, Unknown, Walk,
    conditions::KnownField,
};
use netfilter_state::ruleset::{Statement, VerdictMap};
use redirect_core::{
    AmbientRedirect, DnsCapture,
    rule::{Hook, OurChain},
    values::Family,
};
use std::net::{IpAddr, SocketAddr};

/// Where a packet goes from a statement.
#[derive(Clone, Copy)]
enum Then {
    /// To the next statement of the rule.
    Statement,
    /// To the next rule: skips the rest of this one.
    Rule,
    /// To a chain and back; nowhere if the chain is missing.
    Jump(Option<usize>),
    /// To a chain, and back to where this one was called from.
    Goto(Option<usize>),
    /// Back to the calling chain.
    Return,
    /// Out of the base chain, untouched.
    Leave,
    /// Likewise, translated or handed over.
    Captured,
    /// Nowhere else.
    End(Fate),
}

impl<'a> Walk<'a> {
    /// The next statement of the rule at hand.
    pub(super) fn statement_here(&mut self, number: usize) -> Result<Option<Fate>, Split> {
        let rule = self.here().map(|(_, rule)| rule);
        let statement = rule.and_then(|rule| rule.seen.statements.get(number));
        let leads = rule.and_then(|rule| rule.leads.iter().find(|(of, _)| *of == number));
        let then = match (statement, leads.map(|(_, leads)| leads)) {
            (Some(Statement::Map(map)), Some(Next::By(answers))) => match self.looked_up(map, answers)? {
                Some((Statement::Continue, _)) => Then::Statement,
                Some((verdict, to)) => self.statement(verdict, to)?,
                // A failed lookup ends the rule.
                None => Then::Rule,
            },
            (Some(Statement::If(condition)), Some(Next::If(test))) => {
                let holds = self.evaluate(test)?;
                let holds = self.settle(holds, || Unknown::Rule(condition.to_string()))?;
                if holds { Then::Statement } else { Then::Rule }
            }
            (Some(statement), Some(Next::To(to))) => self.statement(statement, Some(*to))?,
            (Some(statement), Some(Next::If(_) | Next::By(_)) | None) => self.statement(statement, None)?,
            (None, _) => Then::Rule,
        };
        Ok(self.goes(then, number))
    }

    fn goes(&mut self, then: Then, statement: usize) -> Option<Fate> {
        match then {
            Then::Statement => self.now.point = Point::Statement(statement.saturating_add(1)),
            Then::Rule => self.goes_on(),
            Then::Jump(to) => match to.filter(|_| self.now.calls.len() <= DEEPEST) {
                Some(chain) => {
                    self.now.calls.push(Call { step: self.rule_step, ..Call::to(chain) });
                    self.now.point = Point::Rule;
                }
                None => self.goes_on(),
            },
            Then::Goto(to) => {
                let by = self.rule_here();
                let is_base = self.now.calls.len() == 1;
                let step = self.rule_step;
                match (to, self.now.calls.last_mut()) {
                    (Some(chain), Some(call)) => {
                        let gone_by = if is_base { call.gone_by.or(by) } else { None };
                        *call = Call { step, gone_by, ..Call::to(chain) };
                        self.now.point = Point::Rule;
                    }
                    (None, _) | (_, None) => self.ends_chain(),
                }
            }
            Then::Return => {
                self.leaves_alone(false);
                self.ends_chain();
            }
            Then::Leave => {
                self.leaves_alone(true);
                self.now.point = Point::Left;
            }
            Then::Captured => self.now.point = Point::Left,
            Then::End(fate) => return Some(fate),
        }
        None
    }

    /// A map's verdict, and the chain that it leads to; `None` without one.
    fn looked_up(
        &mut self,
        map: &'a VerdictMap,
        answers: &Answers,
    ) -> Result<Option<(&'a Statement, Option<usize>)>, Split> {
        let verdict = |number: usize, to| map.verdicts.get(number).map(|verdict| (verdict, to));
        match answers {
            Answers::OfField(field, ranges, rest, leads) => {
                let said = match self.value_of(*field) {
                    Some(KnownField::Packets) => {
                        let (mut parts, touched) = self.now.packets.get(*field).sorted_by(ranges);
                        self.spent = self.spent.saturating_add(touched.div_ceil(4));
                        if parts.len() > 1 {
                            return Err(Split::Into(*field, parts.into_values().collect()));
                        }
                        parts.pop_first().and_then(|(says, _)| says)
                    }
                    Some(KnownField::Value(value)) => {
                        let at = ranges.partition_point(|(_, last, _)| *last < value);
                        ranges.get(at).filter(|(first, ..)| *first <= value).map(|(.., says)| *says)
                    }
                    None => {
                        let mut said = None;
                        for number in leads.keys().filter(|number| Some(**number) != *rest) {
                            if self.assume(|| Unknown::Rule(map.to_string()))? {
                                said = Some(*number);
                                break;
                            }
                        }
                        said
                    }
                };
                let said = said.or(*rest);
                Ok(said.and_then(|number| verdict(number, leads.get(&number).copied().flatten())))
            }
            Answers::Each(elements) => {
                for element in elements {
                    let compared = self.now.packets.ranges().saturating_div(16).saturating_add(1);
                    self.spent = self.spent.saturating_add(compared);
                    let is_it = self.evaluate(&element.test)?;
                    if self.settle(is_it, || Unknown::Rule(map.to_string()))? {
                        return Ok(verdict(element.verdict, element.to));
                    }
                }
                Ok(None)
            }
        }
    }

    fn statement(&mut self, statement: &Statement, to: Option<usize>) -> Result<Then, Split> {
        Ok(match statement {
            Statement::Jump(_) => Then::Jump(to),
            Statement::Goto(_) => Then::Goto(to),
            Statement::Accept => Then::Leave,
            Statement::Return => Then::Return,
            // Where an address that is not the interface's own leads answers is not known.
            Statement::TranslateSource(how) if how != "MASQUERADE" && self.may_matter(statement)? => {
                self.ends(Fate::Unknown)
            }
            Statement::TranslateSource(_) => {
                (self.now.is_source_translated, self.now.is_source_bound) = (true, true);
                Then::Captured
            }
            Statement::Drop => self.ends(Fate::Dropped),
            Statement::Reject => self.ends(Fate::Rejected),
            Statement::Redirect(port) => self.redirect(*port)?,
            Statement::Translate(_) if self.now.handed_over.is_some() => self.breaks(),
            Statement::Translate(_) => self.ends(Fate::Translated),
            // Without a listener, nftables go on with the next rule, and iptables drop the packet.
            Statement::Tproxy { ends, .. } if !self.is_own_rule() && !self.may_matter(statement)? => {
                if *ends { self.ends(Fate::Dropped) } else { Then::Rule }
            }
            Statement::Tproxy { port, mark, ends } => self.tproxy(*port, *mark, *ends),
            Statement::Unknown(_) if self.here().is_some_and(|(_, rule)| rule.is_unread) => {
                self.ends(Fate::Unknown)
            }
            Statement::Queue
            | Statement::Unknown(_)
            | Statement::Rewrite(_)
            | Statement::Map(_)
            | Statement::If(_) => self.not_understood(statement)?,
            Statement::Untrack => {
                if self.now.tracking == Tracking::NotYet {
                    // Nat, which is where rules of the mesh may stand, is not asked.
                    self.now.tracking = Tracking::Never;
                    self.decided = self.rule_step;
                    self.now.causes.untracked = self.foreign_rule();
                }
                Then::Statement
            }
            Statement::SetMark(Some((mask, value))) => self.set_mark(self.now.mark.changed(*mask, *value)),
            Statement::SetMark(None) => self.set_mark(MarkNow::unknown()),
            Statement::RestoreMark(_) if !self.is_of_connection()? => Then::Rule,
            Statement::RestoreMark(copied) => {
                let from = self.mark_of_entry();
                self.set_mark(self.now.mark.with_copied(from, *copied, &self.now.packets))
            }
            // Without a connection no bits remain.
            Statement::SetConnMark { mask, .. } if *mask != u32::MAX && !self.is_of_connection()? => {
                Then::Rule
            }
            // What holds a chosen zone keeps no mark.
            Statement::SaveMark(_) | Statement::SetConnMark { .. }
                if self.now.tracking == Tracking::Template || !self.is_of_connection()? =>
            {
                Then::Statement
            }
            Statement::SaveMark(copied) => {
                let (from, mark) = (self.told_mark()?, self.now.connection_mark);
                self.set_connection_mark(mark.with_copied(from, *copied, &self.now.packets))
            }
            Statement::SetConnMark { mask, value } => {
                self.set_connection_mark(self.now.connection_mark.changed(*mask, *value))
            }
            Statement::Zone(zone) => self.set_zone(*zone),
            Statement::SetClass(_) => {
                self.now.is_reclassed = true;
                Then::Statement
            }
            Statement::Harmless(_) | Statement::Updates(_) | Statement::Continue => Then::Statement,
        })
    }

    /// The mark that a connection is to remember: packets with one of a few are distinguished before.
    fn told_mark(&self) -> Result<MarkNow, Split> {
        let marks = self.now.packets.get(VariedField::Mark);
        match marks.few(MOST_MARKS) {
            Some(few) if self.now.mark.is_theirs() && marks.single().is_none() => {
                Err(Split::Into(VariedField::Mark, few.map(RangeSet::one).collect()))
            }
            Some(_) | None => Ok(self.now.mark),
        }
    }

    /// Whether the packet belongs to a connection that has an entry.
    fn is_of_connection(&mut self) -> Result<bool, Split> {
        let holds = self.has_entry();
        self.decide(holds, || Unknown::Work)
    }

    /// Of the rule at hand.
    pub(super) fn rule_here(&self) -> Option<ChainRule> {
        let call = self.now.calls.last()?;
        Some(ChainRule { base: self.now.in_base?, chain: call.chain, rule: call.rule, count: call.count })
    }

    /// The chain of a plan it is in.
    fn chain_of_plan(&self) -> Option<OurChain> {
        self.here()?.0.ours
    }

    /// Whether the rule at hand is one of the mesh's.
    fn is_own_rule(&self) -> bool {
        self.here().is_some_and(|(_, rule)| rule.is_own)
    }

    /// The rule at hand, if it is not one of the mesh's.
    fn foreign_rule(&self) -> Option<ChainRule> {
        self.rule_here().filter(|_| !self.is_own_rule())
    }

    /// A rule of the mesh that ends a chain without a capture is the reason that none happens; so is another program's rule that ends the base chain before the
    /// mesh's.
    fn leaves_alone(&mut self, leaves: bool) {
        let is_own = self.is_own_rule();
        let call = self.now.calls.last().copied();
        let is_base = self.now.calls.len() == 1 && call.is_some_and(|call| call.gone_by.is_none());
        if is_own && self.now.captured.is_none() {
            self.decided = self.rule_step;
            self.now.causes.last = self.rule_here().map(Cause::Rule);
        }
        if let Some(by) = self.foreign_rule().filter(|_| self.chain_of_plan().is_some()) {
            self.now.causes.left_early = self.now.causes.left_early.or(Some(by));
        }
        if let Some(by) = self.rule_here().filter(|_| leaves || is_base) {
            self.ends_early(call.and_then(|call| call.gone_by).unwrap_or(by));
        }
    }

    /// A rule ends the base chain; if rules of the mesh come behind it there, packets skip them.
    pub(super) fn ends_early(&mut self, by: ChainRule) {
        let base = self.now.in_base.and_then(|base| self.rules.chains.get(base));
        let behind = self.now.base_rule.map_or(0, |rule| rule.saturating_add(1));
        let is_ahead = base.is_some_and(|base| base.rules.iter().skip(behind).any(|rule| rule.is_own));
        let is_own = self.rules.is_own(by);
        if is_ahead && !is_own {
            self.now.causes.left_early = self.now.causes.left_early.or(Some(by));
            if self.now.captured.is_none() {
                self.decided = self.rule_step;
                self.now.causes.last = Some(Cause::Rule(by));
            }
        }
    }

    fn decides(&mut self) {
        let only_carries_out = match self.chain_of_plan() {
            Some(
                OurChain::Redirect
                | OurChain::InRedirect
                | OurChain::Tproxy
                | OurChain::Divert
                | OurChain::Drop,
            ) => true,
            Some(
                OurChain::GuardIn
                | OurChain::GuardOut
                | OurChain::Inbound
                | OurChain::Output
                | OurChain::OutputDns
                | OurChain::Prerouting,
            )
            | None => false,
        };
        // The rule that sends a packet to such a chain decides, not the chain's rules.
        let jumped = self.now.calls.last().and_then(|call| call.step).filter(|_| only_carries_out);
        self.decided = jumped.or(self.rule_step);
        self.now.causes.last = self.rule_here().map(Cause::Rule);
    }

    fn ends(&mut self, fate: Fate) -> Then {
        self.decides();
        Then::End(fate)
    }

    fn not_understood(&mut self, statement: &Statement) -> Result<Then, Split> {
        Ok(if self.may_matter(statement)? { self.ends(Fate::Unknown) } else { Then::Statement })
    }

    fn may_matter(&mut self, statement: &Statement) -> Result<bool, Split> {
        self.assume(|| Unknown::Rule(statement.to_string()))
    }

    /// TPROXY has chosen the socket already. A later translation makes the packet miss that socket's connection.
    fn breaks(&mut self) -> Then {
        let is_own = self.foreign_rule().is_none();
        let then = self.ends(Fate::Broken);
        // Of the two rules, the one of other programs is to blame.
        if let Some(by) = self.now.handed_over.filter(|_| is_own) {
            self.now.causes.last = Some(Cause::Rule(by));
        }
        then
    }

    /// The destination becomes an address of the pod and this port, or the port that it has.
    fn redirect(&mut self, port: Option<u16>) -> Result<Then, Split> {
        let at = if self.now.hook == Hook::Output {
            localhost(self.now.packets.family)
        } else {
            match self.receiver()? {
                Receiver::Address(address) => address,
                Receiver::None => return Ok(Then::End(self.is_lost(NO_RECEIVER))),
                Receiver::Unknown => self.given.own.unwrap_or_else(|| self.original_destination()),
            }
        };
        // A packet that already has this address, and keeps its port, is unchanged.
        let has_address = self.now.destination.is_none()
            && self.now.packets.get(VariedField::Destination).single() == Some(number(at));
        if self.now.hook == Hook::Prerouting && has_address && port.is_none() {
            // Its destination is decided by that: no other chain of type nat is asked about it.
            self.now.is_bound = true;
            self.now.causes.bound = self.now.causes.bound.or(self.foreign_rule());
            return Ok(Then::Leave);
        }
        let Some(port) = port.or_else(|| self.port()) else { return Ok(self.ends(Fate::Translated)) };
        if self.now.handed_over.is_some() {
            return Ok(self.breaks());
        }
        let to = SocketAddr::new(at, port);
        (self.now.destination, self.now.is_bound) = (Some(to), true);
        self.now.captured = Some(match listener(self.chain_of_plan(), port) {
            Some(listener) => Fate::Proxy { listener, port, rewritten: true },
            None => Fate::Redirected { port },
        });
        self.changed(PacketEdit::Destination { destination: to });
        self.decides();
        Ok(Then::Captured)
    }

    /// The address to which the kernel redirects what comes in: one of the interface by which it does.
    fn receiver(&mut self) -> Result<Receiver, Split> {
        let rules = self.rules;
        let Some(receivers) = &rules.receivers else { return Ok(Receiver::Unknown) };
        // Of IPv4 the kernel knows no such addresses here.
        let is_of_link = self.now.packets.family == Family::V6
            && self.now.packets.get(VariedField::Destination).without(&link_local(Family::V6)).is_empty();
        let of = if is_of_link { &receivers.first_of_link } else { &receivers.first };
        for (by, address) in of {
            let holds = self.by(self.now.came_in, &RangeSet::one(*by));
            if self.decide(holds, || Unknown::Interface)? {
                return Ok(Receiver::Address(*address));
            }
        }
        // An interface without a name here is taken to have an address if any has one.
        let is_named = self.now.came_in != Interface::Own
            || self.now.packets.get(VariedField::Interface).single().is_some();
        let is_any = of.keys().any(|by| *by != LO);
        Ok(if is_any && !is_named { Receiver::Unknown } else { Receiver::None })
    }

    /// The port it has, if it has exactly one.
    pub(super) fn port(&self) -> Option<u16> {
        self.now.packets.get(VariedField::Port).single().and_then(|port| u16::try_from(port).ok())
    }

    /// One of the destinations the packets have.
    fn original_destination(&self) -> IpAddr {
        let packets = &self.now.packets;
        packets.family.address(packets.get(VariedField::Destination).first().unwrap_or(0))
    }

    fn tproxy(&mut self, port: Option<u16>, mark: Option<(u32, u32)>, ends: bool) -> Then {
        if let Some((mask, value)) = mark {
            self.set_mark(self.now.mark.changed(mask, value));
        }
        let port = port.or_else(|| self.port());
        self.now.captured = Some(match port.map(|port| (listener(self.chain_of_plan(), port), port)) {
            Some((Some(listener), port)) => Fate::Proxy { listener, port, rewritten: false },
            Some((None, port)) => Fate::Redirected { port },
            None => Fate::Unknown,
        });
        self.decides();
        self.now.handed_over = self.rule_here();
        if ends { Then::Captured } else { Then::Statement }
    }

    fn set_mark(&mut self, mark: MarkNow) -> Then {
        if mark != self.now.mark {
            self.now.mark = mark;
            self.is_marked();
            let now = mark.value(&self.now.packets);
            self.changed(PacketEdit::Mark { mark: now });
        }
        Then::Statement
    }

    fn set_connection_mark(&mut self, mark: MarkNow) -> Then {
        if mark != self.now.connection_mark {
            self.now.connection_mark = mark;
            self.is_marked();
            let now = mark.value(&self.now.packets);
            self.changed(PacketEdit::ConnectionMark { mark: now });
        }
        Then::Statement
    }

    /// A rule has changed a mark. At input, routing and the rules of the mesh have checked marks already.
    fn is_marked(&mut self) {
        if self.now.hook != Hook::Input {
            self.now.causes.marked = self.foreign_rule().or(self.now.causes.marked);
        }
    }

    /// Only before connection tracking has seen it. Native nftables choose a zone even for untracked packets, and so
    /// track them after all; x_tables, whose rules are in tables named `raw`, do not.
    fn set_zone(&mut self, zone: u16) -> Then {
        let is_native = self.is_in_native_table();
        let is_chosen = match self.now.tracking {
            Tracking::NotYet => true,
            Tracking::Never => is_native,
            Tracking::Template | Tracking::Seen => false,
        };
        if is_chosen {
            (self.now.tracking, self.now.zone) = (Tracking::Template, Some(zone));
            self.now.causes.zoned = self.foreign_rule();
            self.changed(PacketEdit::Zone { zone });
        }
        Then::Statement
    }
}

/// Where REDIRECT sends what comes in.
enum Receiver {
    Address(IpAddr),
    /// Nowhere.
    None,
    Unknown,
}

/// The listener that a rule of this chain sends packets to. In ambient mode one chain has rules for several, each with its
/// port.
fn listener(chain: Option<OurChain>, port: u16) -> Option<Listener> {
    match chain {
        Some(OurChain::Redirect) => Some(Listener::Outbound),
        Some(OurChain::InRedirect | OurChain::Tproxy) => Some(Listener::Inbound),
        Some(OurChain::OutputDns) => Some(Listener::Dns),
        Some(
            OurChain::Divert | OurChain::Drop | OurChain::GuardIn | OurChain::GuardOut | OurChain::Inbound,
        )
        | None => None,
        Some(OurChain::Output | OurChain::Prerouting) => {
            let of_port = [
                (AmbientRedirect::OUTBOUND_PORT, Listener::Outbound),
                (AmbientRedirect::INBOUND_PORT, Listener::Inbound),
                (DnsCapture::PORT, Listener::Dns),
            ];
            of_port.into_iter().find(|(own, _)| own.number() == port).map(|(_, listener)| listener)
        }
    }
}
