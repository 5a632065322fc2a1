//! A JSON object whose values stay as they were written.

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::{Value, value::RawValue};
use std::fmt;

/// A JSON object with its keys in order and its values as text: numbers keep their digits, unknown fields their form.
#[derive(Debug)]
pub struct RawObject<'a>(Vec<(String, &'a RawValue)>);

impl<'a> RawObject<'a> {
    /// The value of a key; if a key comes twice, the last one, as with most JSON readers.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| *value)
    }

    /// The value of a key, parsed; `None` if it is missing or null.
    ///
    /// For looking at, not for handing on: numbers too large for 64 bits become the largest, and what is nested deeper
    /// than any field of the specification becomes null.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<Value> {
        let value = read(self.get(key)?, DEEPEST);
        (value != Value::Null).then_some(value)
    }

    /// The value at a path: of a key, or of a key of an object inside, behind a dot.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<Value> {
        match path.split_once('.') {
            Some((outer, inner)) => self.value(outer)?.get(inner).cloned(),
            None => self.value(path),
        }
    }

    /// The keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(key, _)| key.as_str())
    }
}

/// How deep values are read.
const DEEPEST: usize = 16;

/// Reads level by level, because reading at once fails as a whole on numbers and depths that are not ours to judge.
fn read(raw: &RawValue, depth: usize) -> Value {
    let text = raw.get();
    match text.as_bytes().first() {
        Some(b'{' | b'[') if depth == 0 => Value::Null,
        Some(b'{') => {
            let RawObject(pairs) = serde_json::from_str(text).unwrap_or(RawObject(Vec::new()));
            pairs.into_iter().map(|(key, value)| (key, read(value, depth - 1))).collect()
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(text).unwrap_or_default();
            items.into_iter().map(|item| read(item, depth - 1)).collect()
        }
        Some(_) | None => serde_json::from_str(text).unwrap_or_else(|_| Value::from(f64::MAX)),
    }
}

impl<'de> Deserialize<'de> for RawObject<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = RawObject<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(RawObject(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_as_written() {
        let text = r#"{ "a": 1.10e400, "b": {"x" : 18446744073709551617}, "a": null, "\u0063": "\u0064" }"#;
        let object: RawObject<'_> = serde_json::from_str(text).unwrap();
        assert_eq!(object.get("b").map(RawValue::get), Some(r#"{"x" : 18446744073709551617}"#));
        assert_eq!(object.get("a").map(RawValue::get), Some("null"));
        assert_eq!(object.value("a"), None);
        assert_eq!(object.value("c"), Some(Value::from("d")));
        assert_eq!(object.keys().collect::<Vec<_>>(), ["a", "b", "a", "c"]);
        let text = format!(r#"{{"deep":{}{},"n":[1e999]}}"#, "[".repeat(100_000), "]".repeat(100_000));
        let object: RawObject<'_> = serde_json::from_str(&text).unwrap();
        assert!(object.value("deep").is_some_and(|value| value.is_array()));
        assert_eq!(object.value("n"), Some(Value::from(vec![f64::MAX])));
        for bad in ["", "[]", "{", "{} {}", "{\"a\"}", "5"] {
            assert!(serde_json::from_str::<RawObject<'_>>(bad).is_err(), "{bad}");
        }
    }
}
