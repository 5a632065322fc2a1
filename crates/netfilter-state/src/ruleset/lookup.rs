//! Sets and maps of nf_tables that rules look something up in.

use super::{Plain, StateBits, Statement};
use redirect_core::values::Family;
use std::fmt;

/// Combinations of values to search: a set of nf_tables, or a range.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetLookup {
    /// What is looked up.
    pub selectors: Vec<Selector>,
    /// The set's name; none where it belongs to the rule.
    pub name: Option<String>,
    /// The combinations: for each selector the first and the last value. Addresses and names of interfaces (16 bytes, filled up with 0)
    /// are numbers whose most significant byte comes first.
    pub values: Vec<Vec<(u128, u128)>>,
}

/// A property of a packet or its connection to compare with values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Selector {
    /// The family: 2 is IPv4, 10 IPv6.
    Family,
    /// The number of the transport protocol.
    Protocol,
    /// The source address; packets of another family have none.
    Source(Family),
    /// The destination address; packets of another family have none.
    Destination(Family),
    /// The source port.
    SourcePort,
    /// The destination port.
    DestinationPort,
    /// The name of the interface by which the packet comes in.
    InInterface,
    /// The name of the interface by which it goes out.
    OutInterface,
    /// The user whose socket sends it.
    User,
    /// The group whose socket sends it.
    Group,
    /// Its mark.
    Mark,
    /// The mark of its connection.
    ConnMark,
    /// The state of its connection: one bit, as the kernel has them.
    State,
    /// Its direction: 1 where it answers those that opened the connection.
    Direction,
    /// TCP's flags.
    TcpFlags,
}

/// A map of nf_tables from combinations of values to verdicts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerdictMap {
    /// What is looked up.
    pub among: SetLookup,
    /// What happens, for each combination. Without a match, the next rule follows.
    pub verdicts: Vec<Statement>,
}

impl VerdictMap {
    /// The numbers of its combinations in the order in which the kernel tries them, catch-all last.
    pub fn asked(&self) -> impl Iterator<Item = usize> {
        let of = move |every: bool| {
            (0..self.among.values.len()).filter(move |number| self.among.is_every(*number) == every)
        };
        of(false).chain(of(true))
    }
}

impl SetLookup {
    /// One range of one selector.
    #[must_use]
    pub fn range(selector: Selector, range: (u128, u128)) -> Self {
        Self { selectors: [selector].into(), name: None, values: [[range].into()].into() }
    }

    /// Whether a combination stands for all that no other is.
    #[must_use]
    pub fn is_every(&self, number: usize) -> bool {
        let values = self.values.get(number).map_or(&[][..], Vec::as_slice);
        self.selectors.iter().zip(values).all(|(selector, range)| selector.is_every(*range))
    }

    /// Number of combinations printed for an anonymous set.
    const TOLD: usize = 6;

    /// In the words of nft, with something behind each combination.
    pub(super) fn write(
        &self,
        f: &mut fmt::Formatter<'_>,
        before: &str,
        behind: impl Fn(usize) -> String,
    ) -> fmt::Result {
        for (index, selector) in self.selectors.iter().enumerate() {
            write!(f, "{}{}", if index == 0 { "" } else { " . " }, selector.name())?;
        }
        write!(f, " {before}")?;
        if let Some(name) = &self.name {
            return write!(f, "@{}", Plain(name));
        }
        f.write_str("{ ")?;
        for (index, values) in self.values.iter().enumerate().take(Self::TOLD) {
            f.write_str(if index == 0 { "" } else { ", " })?;
            for (part, (selector, range)) in self.selectors.iter().zip(values).enumerate() {
                write!(f, "{}{}", if part == 0 { "" } else { " . " }, selector.words(*range))?;
            }
            f.write_str(&behind(index))?;
        }
        let untold = self.values.len().saturating_sub(Self::TOLD);
        if untold > 0 { write!(f, ", {untold} more }}") } else { f.write_str(" }") }
    }
}

impl Selector {
    /// Its name in nft, how many bytes a value takes, and whether registers hold it in the machine's order of bytes.
    const fn facts(self) -> (&'static str, u32, bool) {
        match self {
            Self::Family => ("meta nfproto", 1, false),
            Self::Protocol => ("meta l4proto", 1, false),
            Self::Source(Family::V4) => ("ip saddr", 4, false),
            Self::Source(Family::V6) => ("ip6 saddr", 16, false),
            Self::Destination(Family::V4) => ("ip daddr", 4, false),
            Self::Destination(Family::V6) => ("ip6 daddr", 16, false),
            Self::SourcePort => ("th sport", 2, false),
            Self::DestinationPort => ("th dport", 2, false),
            Self::InInterface => ("iifname", 16, false),
            Self::OutInterface => ("oifname", 16, false),
            Self::User => ("meta skuid", 4, true),
            Self::Group => ("meta skgid", 4, true),
            Self::Mark => ("meta mark", 4, true),
            Self::ConnMark => ("ct mark", 4, true),
            Self::State => ("ct state", 4, true),
            Self::Direction => ("ct direction", 1, false),
            Self::TcpFlags => ("tcp flags", 1, false),
        }
    }

    /// Its name in nft.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.facts().0
    }

    /// A range of its values in words.
    fn words(self, (first, last): (u128, u128)) -> String {
        if self.is_every((first, last)) {
            return "*".into();
        }
        if matches!(self, Self::InInterface | Self::OutInterface) && is_every_name_from(first, last) {
            return format!("{}*", self.word(first));
        }
        let one = |value| self.word(value);
        if first == last { one(first) } else { format!("{}-{}", one(first), one(last)) }
    }

    fn word(self, value: u128) -> String {
        match self {
            Self::Source(family) | Self::Destination(family) => family.address(value).to_string(),
            Self::InInterface | Self::OutInterface => {
                let bytes = value.to_be_bytes();
                let name: String =
                    bytes.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect();
                Plain(&name).text()
            }
            Self::Mark | Self::ConnMark | Self::TcpFlags => format!("{value:#x}"),
            Self::State => {
                let named = StateBits::NAMES.into_iter().find(|(bit, _)| u128::from(*bit) == value);
                named.map_or_else(|| value.to_string(), |(_, name)| name.to_ascii_lowercase())
            }
            Self::Family
            | Self::Protocol
            | Self::SourcePort
            | Self::DestinationPort
            | Self::User
            | Self::Group
            | Self::Direction => value.to_string(),
        }
    }

    /// Whether a range has all of its values.
    const fn is_every(self, (first, last): (u128, u128)) -> bool {
        first == 0 && last == self.most()
    }

    /// Its largest value.
    #[must_use]
    pub const fn most(self) -> u128 {
        match self.length() {
            1 => u8::MAX as u128,
            2 => u16::MAX as u128,
            4 => u32::MAX as u128,
            _ => u128::MAX,
        }
    }

    /// How many bytes a value takes.
    pub(crate) const fn length(self) -> u32 {
        self.facts().1
    }

    /// Whether registers hold it in the machine's order of bytes.
    pub(crate) const fn is_host_order(self) -> bool {
        self.facts().2
    }
}

/// Whether these are the names of interfaces that begin with the first.
const fn is_every_name_from(first: u128, last: u128) -> bool {
    let free = first.trailing_zeros() & !7;
    match u128::MAX.checked_shr(u128::BITS.saturating_sub(free)) {
        Some(rest) => first != last && first | rest == last,
        None => false,
    }
}

impl fmt::Display for VerdictMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.among.write(f, "vmap ", |index| {
            self.verdicts.get(index).map_or_else(String::new, |verdict| format!(" : {verdict}"))
        })
    }
}
