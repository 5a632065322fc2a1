//! Rules as plans have them: those of our encoder, of iptables-nft of any version, and nf_tables' own where they say the same.

use super::{
    abi::{PORTS_GIVEN, base, ct, direction, meta},
    expression::end_at,
    reading::{Bits, Expression, Field, Loaded, ValueOrigin, Xt, negated},
    seen::{self, ExpressionReader},
    wire::Attributes,
    xt::{self, ConntrackInfo, WRITTEN_AS_STATE},
};
use crate::ruleset::{Condition, CopiedMark, Sets, Statement};
use redirect_core::{
    rule::{Chain, Direction, Equality, Match, Rule, Target, TcpFlags, Tracked},
    values::{Family, Mark, MaskedMark, Port},
};

/// Reads the expressions of a rule; `None` for a rule that none of ours can be.
pub(crate) fn rule(expressions: Attributes<'_>, family: Family) -> Option<Rule> {
    let (sets, mut looked_up, mut target) = (Sets::new(), 0, None);
    let mut reader = ExpressionReader::new(Some(family), &sets, &mut looked_up);
    for (_, element) in expressions {
        let expression = Expression::read(element)?;
        // Behind the target nothing more can happen.
        if target.is_some() {
            return None;
        }
        target = read(&mut reader, expression, family)?;
    }
    let rule = Rule { matches: asked(reader.rule.conditions)?, target: target? }.canonical();
    rule.says_its_protocol().then_some(rule)
}

/// Reads an expression; the target if it is one. `None` if it does more than the decoded view shows, or in a form no plan uses.
fn read<'a>(
    reader: &mut ExpressionReader<'a, '_>,
    expression: Expression<'a>,
    family: Family,
) -> Option<Option<Target>> {
    match expression {
        Expression::Match(Xt { name, revision, info }) => {
            let found = matched(name, revision, info)?;
            reader.rule.conditions.extend(found.into_iter().map(Condition::Plain));
            return Some(None);
        }
        Expression::Target(Xt { name, revision, info }) => {
            return targeted(name, revision, info).map(Some);
        }
        Expression::Store { field: Field::Ct(ct::ZONE), from } => {
            // The kernel takes the first bytes of a longer value.
            let value = reader.registers.get(from?)?.value()?.first_chunk()?;
            return Some(Some(Target::ConntrackZone(u16::from_ne_bytes(*value))));
        }
        Expression::Compare { register, operator, value } => {
            negated(operator)?;
            is_exact(&reader.registers.get(register)?, value, family).then_some(())?;
        }
        Expression::Bitwise { from, .. } => {
            reader.registers.get(from)?;
        }
        Expression::Range { from, to, .. } if (from.len(), to.len()) == (2, 2) => {}
        Expression::Redirect { first, last, flags: None | Some(PORTS_GIVEN) }
            if last.is_none() || first == last => {}
        Expression::Counter
        | Expression::Load { .. }
        | Expression::Value { .. }
        | Expression::Store { .. }
        | Expression::Verdict { .. } => {}
        Expression::Range { .. }
        | Expression::Redirect { .. }
        | Expression::Byteorder { .. }
        | Expression::Tproxy { .. }
        | Expression::Write { .. }
        | Expression::Lookup(_)
        | Expression::Other { .. } => return None,
    }
    reader.expression(expression);
    done(&reader.rule.statements)
}

/// The conditions an xt match stands for; `None` for one that no rule of ours has.
pub(crate) fn matched(name: &str, revision: u32, info: &[u8]) -> Option<Vec<Match>> {
    let conditions = seen::extension_match(name, revision, info)?;
    let is_to_the_letter = match name {
        // A rule with a comment is another program's.
        "comment" => false,
        "conntrack" => {
            let ConntrackInfo { flags, inverted, .. } = ConntrackInfo::read(revision, info)?;
            flags & WRITTEN_AS_STATE == 0 && inverted & !flags == 0
        }
        _ => true,
    };
    if is_to_the_letter { asked(conditions) } else { None }
}

/// The target an xt target stands for; `None` for one that no rule of ours has.
pub(crate) fn targeted(name: &str, revision: u32, info: &[u8]) -> Option<Target> {
    if !matches!(name, "REDIRECT" | "TPROXY" | "MARK" | "CONNMARK" | "CT") {
        return None;
    }
    let does = seen::extension_target(name, revision, info)?;
    // What the kernel does not ask for is as iptables leaves it.
    let is_to_the_letter = match (name, &does) {
        ("TPROXY", _) => revision == 1 && info.get(8..24)?.iter().all(|byte| *byte == 0),
        // An older one is filled up to the length of the newer.
        ("CONNMARK", _) if info.get(12..15).is_none() => false,
        ("CONNMARK", Statement::SetConnMark { .. }) => info.get(8..12)? == [0xff; 4],
        ("CONNMARK", _) => info.get(..4)? == [0; 4],
        _ => true,
    };
    if is_to_the_letter { done(&[does])? } else { None }
}

/// Whether a comparison is one of all that is loaded, with something that it can be, and not another way of asking the same.
fn is_exact(loaded: &Loaded<'_>, value: &[u8], family: Family) -> bool {
    match (loaded.origin, loaded.bits) {
        (ValueOrigin::Field(Field::Ct(ct::STATE)), Bits::All)
        | (ValueOrigin::Field(Field::Meta(meta::IN_INDEX | meta::OUT_INDEX)), _) => false,
        (ValueOrigin::Field(Field::Ct(ct::DIRECTION)), _) => {
            matches!(value, [direction::ORIGINAL | direction::REPLY])
        }
        (ValueOrigin::Field(Field::Payload { base, offset, length }), bits) => {
            let is_whole = usize::try_from(length) == Ok(value.len());
            match (base, bits) {
                // Bits that the mask has cleared can equal nothing but 0.
                (base::NETWORK, Bits::Masked(mask)) => {
                    end_at(offset, family).is_some()
                        && mask.iter().zip(value).all(|(mask, value)| value & !mask == 0)
                }
                (base::NETWORK, _) => is_whole && end_at(offset, family).is_some(),
                (_, Bits::Masked(mask)) => is_whole && mask.len() == value.len(),
                _ => is_whole,
            }
        }
        _ => true,
    }
}

/// What a rule asks; `None` where plans do not ask that.
pub(crate) fn asked(conditions: Vec<Condition>) -> Option<Vec<Match>> {
    let mut matches = Vec::with_capacity(conditions.len());
    let direction_of = |is_reply: bool| if is_reply { Direction::Reply } else { Direction::Original };
    // One that belongs to the state that follows.
    let mut direction = None;
    let tracked = |bits, direction| Some(Match::Tracked(Tracked { state: xt::conn_state(bits)?, direction }));
    for condition in conditions {
        matches.push(match condition {
            Condition::IsReply(is_reply) if direction.is_none() => {
                direction = Some(direction_of(is_reply));
                continue;
            }
            Condition::Plain(condition) => condition,
            Condition::State(Equality { value, not: false }) => tracked(value, direction.take())?,
            Condition::StateAndDirection { states: Equality { value, not: false }, is_reply } => {
                tracked(value, Some(direction_of(is_reply)))?
            }
            Condition::MarkBits { mask, is: Equality { value, not } } => {
                Match::Mark(Equality { value: MaskedMark::new(value, mask)?, not })
            }
            Condition::ConnMarkBits { mask, is: Equality { value, not } } => {
                Match::ConnMark(Equality { value: MaskedMark::new(value, mask)?, not })
            }
            Condition::TcpFlags { mask, is: Equality { value, not } } => {
                Match::TcpFlags(Equality { value: TcpFlags::new(mask, value)?, not })
            }
            Condition::Family(_)
            | Condition::Protocol(_)
            | Condition::SourcePorts(_)
            | Condition::State(_)
            | Condition::StateAndDirection { .. }
            | Condition::IsReply(_)
            | Condition::Local(_)
            | Condition::Among(_)
            | Condition::Connection
            | Condition::Translated(_)
            | Condition::Unknown(_) => return None,
        });
    }
    direction.is_none().then_some(matches)
}

/// What a rule does, if it does anything; `None` where plans do not do that.
pub(crate) fn done(statements: &[Statement]) -> Option<Option<Target>> {
    Some(Some(match statements {
        [] => return Some(None),
        [Statement::Accept] => Target::Accept,
        [Statement::Drop] => Target::Drop,
        [Statement::Return] => Target::Return,
        [Statement::Jump(chain)] => {
            // Jumps of other programs are not understood, as in the text of iptables-save.
            Target::Jump(Some(Chain::named(chain)).filter(Chain::belongs_to_mesh)?)
        }
        [Statement::Tproxy { port: Some(port), mark: Some((u32::MAX, mark)), ends: true }] => {
            Target::Tproxy { port: Port::new(*port)?, mark: Mark::new(*mark)? }
        }
        [Statement::Zone(zone)] => Target::ConntrackZone(*zone),
        [Statement::Redirect(Some(port))] => Target::Redirect(Port::new(*port)?),
        [Statement::SetMark(Some((u32::MAX, mark)))] => Target::SetMark(Mark::new(*mark)?),
        [Statement::SaveMark(CopiedMark::WHOLE)] => Target::SaveMark,
        [Statement::RestoreMark(CopiedMark::WHOLE)] => Target::RestoreMark,
        [Statement::SetConnMark { mask, value }] => Target::SetConnMark(MaskedMark::new(*value, *mask)?),
        _ => return None,
    }))
}
