//! What a rule does with the packets that fulfil its conditions.

use super::{
    super::{
        Change, Fate, Listener,
        packets::{Field, MarkNow},
        rules::{Leads, Test, WalkedChain, WalkedRule},
    },
    End, Walk,
};
use crate::{
    interference::ruleset::{Statement, VerdictMap},
    rule::{Hook, OurChain},
    values::{Family, PASSTHROUGH_V4},
};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

impl<'a> Walk<'a, '_> {
    pub(super) fn rule(&mut self, chain: &'a WalkedChain, rule: &'a WalkedRule, depth: usize) -> End {
        let step = self.steps.len().checked_sub(1);
        for (statement, leads) in rule.seen.statements.iter().zip(&rule.leads) {
            let end = match (statement, leads) {
                (Statement::Map(map), Leads::By(elements)) => match self.looked_up(map, elements) {
                    Some((Statement::Continue, _)) => End::Next,
                    // Whatever is found, and nothing as well, ends the rule.
                    Some((verdict, to)) => return self.statement(chain, rule, (verdict, to), step, depth),
                    None => return End::Next,
                },
                (statement, Leads::To(to)) => {
                    self.statement(chain, rule, (statement, Some(*to)), step, depth)
                }
                (statement, Leads::Nowhere | Leads::By(_)) => {
                    self.statement(chain, rule, (statement, None), step, depth)
                }
            };
            if end != End::Next {
                return end;
            }
        }
        End::Next
    }

    /// What a map says, and the chain that it leads to; none where it says nothing.
    fn looked_up(
        &mut self,
        map: &'a VerdictMap,
        elements: &'a [(Test, Option<usize>)],
    ) -> Option<(&'a Statement, Option<usize>)> {
        for ((test, to), verdict) in elements.iter().zip(&map.verdicts) {
            let is_it = self.asked(test).unwrap_or_else(|| self.choices.choose());
            if is_it {
                return Some((verdict, *to));
            }
        }
        None
    }

    fn statement(
        &mut self,
        chain: &'a WalkedChain,
        rule: &'a WalkedRule,
        (statement, to): (&Statement, Option<usize>),
        step: Option<usize>,
        depth: usize,
    ) -> End {
        match statement {
            Statement::Jump(_) => self.jump(to, step, depth),
            Statement::Goto(_) => match self.jump(to, step, depth) {
                End::Next => End::Returned,
                end @ (End::Returned | End::Left | End::At(_)) => end,
            },
            Statement::Accept | Statement::Return => {
                let end = if *statement == Statement::Accept { End::Left } else { End::Returned };
                self.leaves_alone(rule, step, end == End::Left || depth == 0);
                end
            }
            Statement::TranslateSource(_) => End::Left,
            Statement::Drop => self.ends(chain, step, Fate::Dropped),
            Statement::Reject => self.ends(chain, step, Fate::Rejected),
            Statement::Redirect(port) => self.redirect(chain, step, *port),
            Statement::Translate(_) if self.is_handed_over() => self.ends(chain, step, Fate::Broken),
            Statement::Translate(_) => self.ends(chain, step, Fate::Translated),
            Statement::Tproxy { port, mark, ends } => self.tproxy(chain, step, *port, *mark, *ends),
            Statement::Queue | Statement::Unknown(_) | Statement::Rewrite(_) => {
                self.not_understood(chain, step)
            }
            Statement::Untrack => {
                if !self.is_tracked {
                    // Nat, which is where rules of the mesh may stand, is not asked.
                    self.is_untracked = true;
                    self.decided = step;
                }
                End::Next
            }
            Statement::SetMark(Some(mark)) => self.set_mark(MarkNow::is(*mark)),
            Statement::SetMark(None) => self.set_mark(MarkNow::unknown()),
            Statement::SetMarkBits { mask, value } => self.set_mark(self.mark.changed(*mask, *value)),
            Statement::RestoreMark => self.set_mark(self.connection_mark),
            Statement::SaveMark => self.set_connection_mark(self.mark),
            Statement::SetConnMark { mask, value } => {
                self.set_connection_mark(self.connection_mark.changed(*mask, *value))
            }
            Statement::Zone(zone) => {
                if !self.is_tracked {
                    self.changed(Change::Zone(*zone));
                }
                End::Next
            }
            Statement::Harmless(_) | Statement::Continue => End::Next,
            // A map holds verdicts, and no verdict is one.
            Statement::Map(_) => self.not_understood(chain, step),
        }
    }

    fn jump(&mut self, to: Option<usize>, step: Option<usize>, depth: usize) -> End {
        let Some(chain) = to.and_then(|to| self.rules.chains.get(to)) else { return End::Next };
        self.jumps.extend(step);
        let end = self.chain(chain, depth.saturating_add(1));
        if step.is_some() {
            self.jumps.pop();
        }
        match end {
            End::Returned => End::Next,
            end @ (End::Next | End::Left | End::At(_)) => end,
        }
    }

    /// A rule of the mesh that ends a chain without a capture is why there is none, and so is one of somebody else's that ends the base chain before the
    /// mesh's.
    fn leaves_alone(&mut self, rule: &WalkedRule, step: Option<usize>, ends_base: bool) {
        let mut ahead = self.at.into_iter().flat_map(|(chain, number)| chain.rules.iter().skip(number));
        if self.captured.is_none() && (rule.is_own || ends_base && ahead.any(|rule| rule.is_own)) {
            self.decided = step;
        }
    }

    fn decides(&mut self, chain: &WalkedChain, step: Option<usize>) {
        let only_carries_out = match chain.ours {
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
                | OurChain::OutputDns,
            )
            | None => false,
        };
        // What sends a packet to such a chain decides, not what stands in it.
        self.decided = if only_carries_out { self.jumps.last().copied().or(step) } else { step };
    }

    fn ends(&mut self, chain: &WalkedChain, step: Option<usize>, fate: Fate) -> End {
        self.decides(chain, step);
        End::At(fate)
    }

    fn not_understood(&mut self, chain: &WalkedChain, step: Option<usize>) -> End {
        if self.choices.choose() { self.ends(chain, step, Fate::Unknown) } else { End::Next }
    }

    /// Whether TPROXY has chosen the socket already. What is translated after that comes to a connection that this socket
    /// does not have.
    const fn is_handed_over(&self) -> bool {
        matches!(self.captured, Some(Fate::Proxy { rewritten: false, .. } | Fate::Unknown))
    }

    fn redirect(&mut self, chain: &WalkedChain, step: Option<usize>, port: u16) -> End {
        let at = match (self.hook, self.packets.family, self.given.own) {
            (Hook::Output, Family::V4, _) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            (Hook::Output, Family::V6, _) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            (Hook::Prerouting | Hook::Input | Hook::Forward | Hook::Postrouting, _, Some(own)) => own,
            (Hook::Prerouting | Hook::Input | Hook::Forward | Hook::Postrouting, family, None) => {
                self.original_destination(family)
            }
        };
        let to = SocketAddr::new(at, port);
        if self.is_handed_over() {
            return self.ends(chain, step, Fate::Broken);
        }
        self.destination = Some(to);
        self.captured = Some(match listener(chain.ours) {
            Some(listener) => Fate::Proxy { listener, port, rewritten: true },
            None => Fate::Redirected(port),
        });
        self.changed(Change::Destination(to));
        self.decides(chain, step);
        End::Left
    }

    /// One of the destinations the packets have.
    fn original_destination(&self, family: Family) -> IpAddr {
        let number = self.packets.get(Field::Destination).first().unwrap_or(0);
        match family {
            Family::V4 => IpAddr::V4(u32::try_from(number).map_or(PASSTHROUGH_V4, Ipv4Addr::from)),
            Family::V6 => IpAddr::V6(number.into()),
        }
    }

    fn tproxy(
        &mut self,
        chain: &WalkedChain,
        step: Option<usize>,
        port: Option<u16>,
        mark: Option<(u32, u32)>,
        ends: bool,
    ) -> End {
        if let Some((mask, value)) = mark {
            self.set_mark(self.mark.changed(mask, value));
        }
        let port =
            port.or_else(|| self.packets.get(Field::Port).single().and_then(|port| u16::try_from(port).ok()));
        self.captured = Some(match (listener(chain.ours), port) {
            (Some(listener), Some(port)) => Fate::Proxy { listener, port, rewritten: false },
            (None, Some(port)) => Fate::Redirected(port),
            (_, None) => Fate::Unknown,
        });
        self.decides(chain, step);
        if ends { End::Left } else { End::Next }
    }

    fn set_mark(&mut self, mark: MarkNow) -> End {
        if mark != self.mark {
            self.mark = mark;
            let now = mark.value(&self.packets);
            self.changed(Change::Mark(now));
        }
        End::Next
    }

    fn set_connection_mark(&mut self, mark: MarkNow) -> End {
        if mark != self.connection_mark {
            self.connection_mark = mark;
            let now = mark.value(&self.packets);
            self.changed(Change::ConnectionMark(now));
        }
        End::Next
    }
}

/// Whose chain sends packets where.
const fn listener(chain: Option<OurChain>) -> Option<Listener> {
    match chain {
        Some(OurChain::Redirect) => Some(Listener::Outbound),
        Some(OurChain::InRedirect | OurChain::Tproxy) => Some(Listener::Inbound),
        Some(OurChain::OutputDns) => Some(Listener::Dns),
        Some(
            OurChain::Divert
            | OurChain::Drop
            | OurChain::GuardIn
            | OurChain::GuardOut
            | OurChain::Inbound
            | OurChain::Output,
        )
        | None => None,
    }
}
