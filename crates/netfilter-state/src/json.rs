//! Where the rules in force differ from those wanted, as JSON. The document of a difference names its family and adds a sentence, which
//! its type does not hold.

use crate::{
    differences::{Difference, Differences},
    ruleset::TableName,
    state::Entry,
};
use redirect_core::{json::VERSION, values::Family};
use serde::{Serialize, Serializer, ser::SerializeStruct as _};

impl Serialize for Differences {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut document = serializer.serialize_struct("Differences", 2)?;
        document.serialize_field("version", &VERSION)?;
        document.serialize_field("differences", &self.all)?;
        document.end()
    }
}

#[derive(Serialize)]
struct Document<What> {
    #[serde(skip_serializing_if = "Option::is_none")]
    family: Option<Family>,
    #[serde(flatten)]
    what: What,
    text: String,
}

/// Rules are numbered from 1, those of other programs not counted. Rules of iptables' tables are written in the words of
/// iptables-save, others for people.
impl Serialize for Difference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = self.to_string();
        match self {
            Self::Rule { family, difference } => {
                Document { family: Some(*family), what: difference, text }.serialize(serializer)
            }
            Self::Native(what) => Document { family: None, what, text }.serialize(serializer),
            Self::NoNativeTables => {
                let what = [("difference", "noNativeTables")];
                Document { family: None, what: Fields(what), text }.serialize(serializer)
            }
            Self::MissingRouting(item) => {
                let wanted = item.to_string();
                let what = [("difference", "missingRouting"), ("wanted", wanted.as_str())];
                Document { family: item.family(), what: Fields(what), text }.serialize(serializer)
            }
            Self::BrokenRouting(routing) => {
                let found = routing.to_string();
                let what = [("difference", "brokenRouting"), ("found", found.as_str())];
                Document { family: routing.item.family(), what: Fields(what), text }.serialize(serializer)
            }
        }
    }
}

struct Fields<'a, const COUNT: usize>([(&'static str, &'a str); COUNT]);

impl<const COUNT: usize> Serialize for Fields<'_, COUNT> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0)
    }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for TableName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
