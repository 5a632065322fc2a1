//! Reading the fields of JSON values: what is wrong is noted by field, and all of it is reported together.

use serde_json::{Map, Value};

/// Notes problems of a value during reading. A field that is null counts as missing.
///
/// Values of the wrong type are not shown: they may be anything, even secrets.
#[derive(Debug, Default)]
pub struct FieldReader {
    problems: Vec<String>,
}

impl FieldReader {
    /// Notes a problem; the text begins with the field.
    pub fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Everything noted.
    #[must_use]
    pub fn into_problems(self) -> Vec<String> {
        self.problems
    }

    /// A string.
    pub fn string<'a>(&mut self, path: &str, value: Option<&'a Value>) -> Option<&'a str> {
        self.typed(path, value, "a string", Value::as_str)
    }

    /// A boolean.
    pub fn bool(&mut self, path: &str, value: Option<&Value>) -> Option<bool> {
        self.typed(path, value, "true or false", Value::as_bool)
    }

    /// A whole number.
    pub fn integer(&mut self, path: &str, value: Option<&Value>) -> Option<i64> {
        self.typed(path, value, "a whole number", Value::as_i64)
    }

    /// An object.
    pub fn object<'a>(&mut self, path: &str, value: Option<&'a Value>) -> Option<&'a Map<String, Value>> {
        self.typed(path, value, "an object", Value::as_object)
    }

    /// A list; a missing one is empty.
    pub fn list<'a>(&mut self, path: &str, value: Option<&'a Value>) -> &'a [Value] {
        self.typed(path, value, "a list", Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// A list of strings; a missing one is empty.
    pub fn strings(&mut self, path: &str, value: Option<&Value>) -> Vec<String> {
        let items = self.list(path, value).iter().enumerate();
        items
            .filter_map(|(index, item)| {
                let text = item.as_str();
                if text.is_none() {
                    self.problem(format!("{path}[{index}]: is {}, not a string", kind(item)));
                }
                text.map(str::to_owned)
            })
            .collect()
    }

    fn typed<'a, T>(
        &mut self,
        path: &str,
        value: Option<&'a Value>,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Option<T> {
        let value = value.filter(|value| !value.is_null())?;
        let typed = read(value);
        if typed.is_none() {
            self.problem(format!("{path}: is {}, not {wanted}", kind(value)));
        }
        typed
    }
}

/// What a value is, in words.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
