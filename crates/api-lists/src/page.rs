//! The parser of one page.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{Budget, Keep, ListLimits, MOST_OBJECT};

/// What a response had of a page.
pub(super) struct ReadPage<T> {
    pub(super) kind: Option<String>,
    /// None if it has no field of this name.
    pub(super) items: Option<Vec<T>>,
    pub(super) rest: Option<String>,
    pub(super) version: String,
}

/// Reads a list, one item after the other.
pub(super) struct PageSeed<'a, K> {
    pub(super) keep: &'a K,
    pub(super) limits: ListLimits,
    pub(super) budget: &'a Budget,
}

impl<'de, K: Keep> DeserializeSeed<'de> for PageSeed<'_, K> {
    type Value = ReadPage<K::Kept>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, K: Keep> Visitor<'de> for PageSeed<'_, K> {
    type Value = ReadPage<K::Kept>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct ListMetadata {
            r#continue: Option<String>,
            resource_version: Option<String>,
        }
        let mut page = ReadPage { kind: None, items: None, rest: None, version: String::new() };
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "kind" => page.kind = Some(map.next_value()?),
                // The last one would hide the others.
                "items" if page.items.is_some() => return Err(A::Error::duplicate_field("items")),
                "items" => page.items = Some(map.next_value_seed(ItemsSeed(&self))?),
                "metadata" => {
                    let metadata = map.next_value::<ListMetadata>()?;
                    page.rest = metadata.r#continue.filter(|token| !token.is_empty());
                    page.version = metadata.resource_version.unwrap_or_default();
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(page)
    }
}

struct ItemsSeed<'a, K>(&'a PageSeed<'a, K>);

impl<'de, K: Keep> DeserializeSeed<'de> for ItemsSeed<'_, K> {
    type Value = Vec<K::Kept>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, K: Keep> Visitor<'de> for ItemsSeed<'_, K> {
    type Value = Vec<K::Kept>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    /// The API server writes null for none.
    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let PageSeed { keep, limits, budget } = *self.0;
        let mut all = Vec::new();
        while let Some(kept) = items.next_element_seed(ObjectSeed(keep))? {
            budget.object.set(MOST_OBJECT);
            let Some(left) = budget.objects.get().checked_sub(1) else {
                return Err(A::Error::custom(budget.exceed(format!("{} objects", limits.objects))));
            };
            budget.objects.set(left);
            all.extend(kept);
        }
        Ok(all)
    }
}

/// Reads what is kept of an object.
struct ObjectSeed<'a, K>(&'a K);

impl<'de, K: Keep> DeserializeSeed<'de> for ObjectSeed<'_, K> {
    type Value = Option<K::Kept>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, K: Keep> Visitor<'de> for ObjectSeed<'_, K> {
    type Value = Option<K::Kept>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let is_metadata = key == "metadata";
            let value = if is_metadata {
                Value::Object(map.next_value::<Metadata>()?.kept)
            } else {
                map.next_value()?
            };
            if is_metadata && let Some(kept) = self.0.by_metadata(&value) {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                return Ok(Some(kept));
            }
            fields.insert(key, value);
        }
        Ok(self.0.of(&Value::Object(fields)))
    }
}

/// Metadata without the `managedFields`: no controller reads them, and they are a third of many objects.
#[derive(Deserialize)]
struct Metadata {
    #[serde(rename = "managedFields")]
    _passed_over: Option<IgnoredAny>,
    #[serde(flatten)]
    kept: Map<String, Value>,
}
