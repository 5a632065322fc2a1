//! Traces and traffic differences as JSON. A document is another than its type where it says what the type works out.

use netfilter_state::ruleset::Plain;
use redirect_core::json::VERSION;
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::{Difference, Interface, Region, Trace, Unknown};

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

/// The document of all traffic that two plans treat differently: of what [`Difference::of_plans`] returns.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct TrafficDifferences<'a> {
    version: u32,
    traffic: &'a [Difference],
}

impl<'a> From<&'a [Difference]> for TrafficDifferences<'a> {
    fn from(traffic: &'a [Difference]) -> Self {
        Self { version: VERSION, traffic }
    }
}

impl Serialize for Difference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut document = serializer.serialize_map(None)?;
        document.serialize_entry("packets", &self.region)?;
        document.serialize_entry("before", &self.before)?;
        document.serialize_entry("after", &self.after)?;
        document.serialize_entry("text", &self.to_string())?;
        document.end()
    }
}

/// Values that lie next to each other.
#[derive(Serialize)]
struct Range<T> {
    first: T,
    last: T,
}

/// Writes a field of a region; one that is missing may have any value.
fn ranges<M: SerializeMap, T: Serialize>(
    region: &mut M,
    name: &str,
    ranges: Option<Vec<(T, T)>>,
) -> Result<(), M::Error> {
    let Some(ranges) = ranges else { return Ok(()) };
    let ranges = ranges.into_iter().map(|(first, last)| Range { first, last });
    region.serialize_entry(name, &ranges.collect::<Vec<_>>())
}

impl Serialize for Region {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut region = serializer.serialize_map(None)?;
        region.serialize_entry("family", &self.family())?;
        region.serialize_entry("sender", if self.is_local() { "pod" } else { "outside" })?;
        region.serialize_entry("protocols", &self.protocols())?;
        region.serialize_entry("interfaces", &self.interfaces())?;
        ranges(&mut region, "sources", self.sources())?;
        ranges(&mut region, "sourcePorts", self.source_ports())?;
        ranges(&mut region, "destinations", self.destinations())?;
        ranges(&mut region, "ports", self.ports())?;
        ranges(&mut region, "users", self.users())?;
        ranges(&mut region, "groups", self.groups())?;
        ranges(&mut region, "flags", self.flags())?;
        ranges(&mut region, "marks", self.marks())?;
        ranges(&mut region, "connectionMarks", self.connection_marks())?;
        region.serialize_entry("states", &self.states())?;
        region.end()
    }
}
