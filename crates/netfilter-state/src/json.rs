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

/// What no other type says of a difference.
#[derive(Serialize)]
#[serde(tag = "difference", rename_all = "camelCase")]
enum Other {
    NoNativeTables,
    MissingRouting { wanted: String },
    BrokenRouting { found: String },
}

/// Rules are numbered from 1, those of other programs not counted. Rules of iptables' tables are written in the words of
/// iptables-save, others for people.
impl Serialize for Difference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = self.to_string();
        let (family, what) = match self {
            Self::Rule { family, difference } => {
                return Document { family: Some(*family), what: difference, text }.serialize(serializer);
            }
            Self::Native(what) => return Document { family: None, what, text }.serialize(serializer),
            Self::NoNativeTables => (None, Other::NoNativeTables),
            Self::MissingRouting(item) => (item.family(), Other::MissingRouting { wanted: item.to_string() }),
            Self::BrokenRouting(routing) => {
                (routing.item.family(), Other::BrokenRouting { found: routing.to_string() })
            }
        };
        Document { family, what, text }.serialize(serializer)
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
