//! Traces and traffic differences as JSON. A document is another than its type where it says what the type works out.

use netfilter_state::ruleset::Plain;
use redirect_core::json::VERSION;
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::{Interface, Region, Trace, TrafficDifference, Unknown, packets::VariedField};
use std::net::IpAddr;

/// An interface that is not known has no name to write.
pub(crate) const fn is_elsewhere(interface: &Interface) -> bool {
    matches!(interface, Interface::Elsewhere)
}

/// A chain's name, which another program chose, in printable characters.
pub(crate) fn plain<S: Serializer>(name: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&Plain(name))
}

impl Serialize for Unknown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// `may` and `unknown` are absent where the end is certain, `decided` where no rule decides.
impl Serialize for Trace {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut document = serializer.serialize_map(None)?;
        document.serialize_entry("version", &VERSION)?;
        document.serialize_entry("packet", &self.packet)?;
        document.serialize_entry("end", &self.fate())?;
        if self.may.len() > 1 {
            document.serialize_entry("may", &self.may)?;
        }
        if !self.unknown.is_empty() {
            document.serialize_entry("unknown", &self.unknown)?;
        }
        if let Some(decided) = self.decided {
            document.serialize_entry("decided", &decided)?;
        }
        document.serialize_entry("steps", &self.steps)?;
        document.end()
    }
}

/// The document of all traffic that two plans treat differently: of what [`TrafficDifference::of_plans`] returns.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct TrafficDifferences<'a> {
    version: u32,
    traffic: &'a [TrafficDifference],
}

impl<'a> From<&'a [TrafficDifference]> for TrafficDifferences<'a> {
    fn from(traffic: &'a [TrafficDifference]) -> Self {
        Self { version: VERSION, traffic }
    }
}

impl Serialize for TrafficDifference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut document = serializer.serialize_map(None)?;
        document.serialize_entry("packets", &self.region)?;
        document.serialize_entry("before", &self.before)?;
        document.serialize_entry("after", &self.after)?;
        document.serialize_entry("text", &self.to_string())?;
        document.end()
    }
}

/// A value of a field.
#[derive(Serialize)]
#[serde(untagged)]
enum Value {
    Address(IpAddr),
    Number(u32),
}

/// Values that lie next to each other.
#[derive(Serialize)]
struct Range {
    first: Value,
    last: Value,
}

/// Fields with ranges of values, and their names.
const RANGES: [(&str, VariedField); 9] = [
    ("sources", VariedField::Source),
    ("sourcePorts", VariedField::SourcePort),
    ("destinations", VariedField::Destination),
    ("ports", VariedField::Port),
    ("users", VariedField::User),
    ("groups", VariedField::Group),
    ("flags", VariedField::Flags),
    ("marks", VariedField::Mark),
    ("connectionMarks", VariedField::ConnMark),
];

impl Serialize for Region {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut region = serializer.serialize_map(None)?;
        region.serialize_entry("family", &self.family())?;
        region.serialize_entry("sender", if self.is_local() { "pod" } else { "outside" })?;
        region.serialize_entry("protocols", &self.protocols())?;
        region.serialize_entry("interfaces", &self.interfaces())?;
        for (name, field) in RANGES {
            // One that is missing may have any value.
            let Some(set) = self.limited(field) else { continue };
            let value = |number: u128| {
                if matches!(field, VariedField::Source | VariedField::Destination) {
                    Value::Address(self.family().address(number))
                } else {
                    Value::Number(u32::try_from(number).unwrap_or(u32::MAX))
                }
            };
            let ranges =
                set.ranges().iter().map(|(first, last)| Range { first: value(*first), last: value(*last) });
            region.serialize_entry(name, &ranges.collect::<Vec<_>>())?;
        }
        region.serialize_entry("states", &self.states())?;
        region.end()
    }
}
