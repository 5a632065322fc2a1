//! Other programs' rules as the kernel sends them: described for people, and made again with all their bytes.

use crate::expressions::{
    abi::{attribute, meta},
    reading::{self, Expression, Field},
    seen,
    wire::{Attribute, Attributes, MessageWriter},
};
use redirect_core::rule::Chain;
use std::fmt;

/// A comment in what a rule carries besides its expressions (`NFTNL_UDATA_RULE_COMMENT`).
const COMMENT: u8 = 0;
/// The longest piece of a comment that is shown.
const SHOWN: usize = 64;

/// A rule as the kernel sent it, its counters at zero: they differ between two readings of the same rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawRule {
    /// Its expressions.
    pub(crate) expressions: Vec<u8>,
    /// Its comment and the like.
    pub(crate) user_data: Option<Vec<u8>>,
}

impl RawRule {
    pub(crate) fn new(expressions: Attributes<'_>, user_data: Option<Attribute<'_>>) -> Self {
        Self {
            expressions: without_counts(expressions),
            user_data: user_data.map(|user_data| user_data.0.into()),
        }
    }

    /// The chain it jumps or goes to.
    pub(crate) fn jumps_to(&self) -> Option<Chain> {
        reading::jump_of(self.list()).map(Chain::named)
    }

    /// The protocol it compares with; xt matches and targets ask for it.
    pub(crate) fn protocol(&self) -> u32 {
        protocol(self.list()).unwrap_or_default()
    }

    fn list(&self) -> Attributes<'_> {
        Attribute(&self.expressions).attributes()
    }

    /// The comment, as far as it is shown.
    fn comment(&self) -> Option<String> {
        let shown = comment_in(self.user_data.as_deref()?)?.chars().take(SHOWN);
        Some(shown.map(|c| if c.is_ascii_graphic() && c != '"' || c == ' ' { c } else { '?' }).collect())
    }
}

/// The comment in what a rule carries besides its expressions.
pub(crate) fn comment_in(user_data: &[u8]) -> Option<&str> {
    let [COMMENT, length, rest @ ..] = user_data else { return None };
    Some(std::str::from_utf8(rest.get(..usize::from(*length))?).ok()?.trim_end_matches('\0'))
}

/// In the words of iptables, as far as it has any; what is not understood is named in brackets.
impl fmt::Display for RawRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        seen::rule(self.list()).fmt(f)?;
        match (self.comment(), &self.user_data) {
            (Some(comment), _) => write!(f, " (comment \"{comment}\")"),
            (None, Some(_)) => f.write_str(" (with a comment)"),
            (None, None) => Ok(()),
        }
    }
}

fn without_counts(expressions: Attributes<'_>) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    for (_, element) in expressions {
        match reading::name_and_data(element) {
            Some(("counter", _)) => crate::expressions::expression::Expressions(&mut writer).counter(),
            _ => writer.nested(attribute::ELEMENT, |out| out.raw(element.0)),
        }
    }
    writer.finish().unwrap_or_default()
}

fn protocol(expressions: Attributes<'_>) -> Option<u32> {
    let mut loaded = false;
    for expression in expressions.filter_map(|(_, element)| Expression::read(element)) {
        if let Expression::Load { field, .. } = expression {
            loaded = field == Field::Meta(meta::PROTOCOL);
        } else if let Expression::Compare { value, .. } = expression
            && loaded
        {
            return value.first().copied().map(u32::from);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{expressions::expression::Expressions, state::ForeignRule};

    fn rule(user_data: Option<&[u8]>) -> ForeignRule {
        let mut writer = MessageWriter::default();
        let mut out = Expressions(&mut writer);
        out.protocol(6);
        out.counter();
        out.jump("DOCKER");
        RawRule::new(writer.attributes(), user_data.map(Attribute)).into()
    }

    #[test]
    fn a_rule_of_somebody_elses_is_told_in_words_and_keeps_its_bytes() {
        let commented = rule(Some(&[0, 6, b'a', b'"', 0x1b, b'b', b'c', 0]));
        assert_eq!(commented.to_string(), "-p tcp -j DOCKER (comment \"a??bc\")");
        assert_eq!(rule(None).to_string(), "-p tcp -j DOCKER");
        assert_eq!(rule(Some(&[9, 1, 0])).to_string(), "-p tcp -j DOCKER (with a comment)");
        for other in [rule(None), rule(Some(&[]))] {
            assert_ne!(commented, other, "a comment belongs to a rule");
        }
        let raw = commented.raw().unwrap();
        assert_eq!((raw.protocol(), commented.jumps_to()), (6, Some(Chain::named("DOCKER"))));
        let again = RawRule::new(raw.list(), raw.user_data.as_deref().map(Attribute));
        assert_eq!(&again, raw);
    }

    #[test]
    fn counters_are_no_difference() {
        let counted = |packets: u64| {
            let mut writer = MessageWriter::default();
            writer.nested(attribute::ELEMENT, |element| {
                element.text(attribute::expression::NAME, "counter");
                element.nested(attribute::expression::DATA, |data| data.u64(2, packets));
            });
            RawRule::new(writer.attributes(), None)
        };
        assert_eq!(counted(1), counted(2));
    }
}
