//! The objects of a JSON text one by one: a list of all pods of a cluster is never in memory as a whole.

use std::fmt;
use std::io::Read;

use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Hands over each object of a JSON text, as [`objects`](super::objects) returns them: a list counts as its items. What was handed over
/// before an error is of no use.
///
/// # Errors
/// It is not one JSON text, or cannot be read.
pub fn each_of_json(reader: impl Read, mut take: impl FnMut(Value)) -> serde_json::Result<()> {
    let mut take = |object| take(super::PodFacts::pod_of(object));
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    if let Some(document) = deserializer.deserialize_any(Document(&mut take))? {
        take(document);
    }
    deserializer.end()
}

/// A text to deserialize: passes the items of a list to the closure; returns anything else.
struct Document<'a, F>(&'a mut F);

impl<'de, F: FnMut(Value)> Visitor<'de> for Document<'_, F> {
    type Value = Option<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut object, mut is_list) = (Map::new(), false);
        while let Some(key) = map.next_key::<String>()? {
            if is_list {
                map.next_value::<IgnoredAny>()?;
            } else if key == "items" {
                match map.next_value_seed(Items(&mut *self.0))? {
                    None => is_list = true,
                    Some(value) => drop(object.insert(key, value)),
                }
            } else {
                object.insert(key, map.next_value()?);
            }
        }
        Ok((!is_list).then_some(Value::Object(object)))
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}

/// Passes the items of a list to the closure; returns anything else.
struct Items<'a, F>(&'a mut F);

impl<'de, F: FnMut(Value)> DeserializeSeed<'de> for Items<'_, F> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, F: FnMut(Value)> Visitor<'de> for Items<'_, F> {
    type Value = Option<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        while let Some(item) = items.next_element()? {
            (self.0)(item);
        }
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        serde::Deserialize::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Some(Value::Null))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::objects;

    fn streamed(text: &str) -> serde_json::Result<Vec<Value>> {
        let mut all = Vec::new();
        each_of_json(text.as_bytes(), |object| all.push(object))?;
        Ok(all)
    }

    #[test]
    fn the_objects_are_those_of_the_whole_text() {
        for text in [
            r#"{"kind":"List","items":[{"a":1},{"b":[2]}],"metadata":{"items":[]}}"#,
            r#"{"items":[],"kind":"List"}"#,
            r#"{"kind":"Pod","metadata":{"items":[1]}}"#,
            r#"{"kind":"Pod","items":null,"spec":{}}"#,
            r#"{"kind":"Pod","items":{"a":[1]}}"#,
            " null ",
        ] {
            assert_eq!(streamed(text).unwrap(), objects(text).unwrap(), "{text}");
        }
    }

    #[test]
    fn what_is_no_json_is_left_to_others() {
        for text in
            ["", "kind: Pod", r#"{"items":[{}]} {}"#, r#"{"items":[{},]}"#, r#"{"items":[{}"#, "7", "[]"]
        {
            assert!(streamed(text).is_err(), "{text}");
        }
    }
}
