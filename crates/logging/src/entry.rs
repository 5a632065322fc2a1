//! A log entry and its two forms: console line and JSON line.

use crate::{DEFAULT_SCOPE, Level};
use serde_json::{Map, Value};
use std::{fmt::Write as _, time::SystemTime};

/// How a line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineFormat {
    /// Time, level, scope, message and labels, separated by tabs.
    Console,
    /// One JSON object.
    Json,
}

/// One thing that was logged.
#[derive(Debug, Clone, PartialEq)]
pub struct LogEntry {
    /// When.
    pub time: SystemTime,
    /// How grave.
    pub level: Level,
    /// Which part of the program; none is the default scope.
    pub scope: Option<String>,
    /// The place in the source, where that was asked for.
    pub caller: Option<String>,
    /// What.
    pub message: String,
    /// About which things: names and plain values.
    pub labels: Vec<(String, Value)>,
}

/// The keys of a JSON line that are not labels.
const RESERVED: [&str; 6] = ["time", "level", "scope", "caller", "msg", "stack"];

impl LogEntry {
    /// What a record of the facade says, now.
    pub(crate) fn of(record: &log::Record<'_>, caller: bool) -> Self {
        let mut labels = Labels(Vec::new());
        // The visitor below never fails.
        let _ = record.key_values().visit(&mut labels);
        let place = || Some(format!("{}:{}", record.file()?, record.line()?));
        Self {
            time: SystemTime::now(),
            level: record.level().into(),
            scope: Some(record.target().to_owned()).filter(|scope| scope != DEFAULT_SCOPE),
            caller: if caller { place() } else { None },
            message: record.args().to_string(),
            labels: labels.0,
        }
    }

    /// Reads a JSON line; none if it is not an object or lacks time, level or message.
    #[must_use]
    pub fn from_json(line: &str) -> Option<Self> {
        let mut fields: Map<String, Value> = serde_json::from_str(line).ok()?;
        let mut text = |key: &str| match fields.remove(key) {
            Some(Value::String(text)) => Some(text),
            Some(_) | None => None,
        };
        let (time, level, message) = (text("time")?, text("level")?, text("msg")?);
        let (scope, caller) = (text("scope"), text("caller"));
        Some(Self {
            time: humantime::parse_rfc3339(&time).ok()?,
            level: level.parse().ok()?,
            scope,
            caller,
            message,
            labels: fields.into_iter().collect(),
        })
    }

    /// One line in a form.
    #[must_use]
    pub fn line(&self, format: LineFormat) -> String {
        match format {
            LineFormat::Console => self.console(),
            LineFormat::Json => self.json(),
        }
    }

    /// `TIME\tLEVEL\t[SCOPE\t][CALLER\t]MESSAGE[\tKEY=VALUE …]`, without a newline anywhere.
    #[must_use]
    pub fn console(&self) -> String {
        let mut line = format!("{}\t{}\t", self.rfc3339(), self.level);
        for part in [&self.scope, &self.caller].into_iter().flatten() {
            push_escaped(&mut line, part);
            line.push('\t');
        }
        push_escaped(&mut line, &self.message);
        for (index, (key, value)) in self.labels.iter().enumerate() {
            line.push(if index == 0 { '\t' } else { ' ' });
            push_escaped(&mut line, key);
            line.push('=');
            push_value(&mut line, value);
        }
        line
    }

    /// One JSON object, without a newline anywhere.
    #[must_use]
    pub fn json(&self) -> String {
        let mut line = String::from("{");
        let mut field = |key: &str, value: &Value| {
            let comma = if line.len() > 1 { "," } else { "" };
            // Writing to a string does not fail.
            let _ = write!(line, "{comma}{}:{value}", Value::from(key));
        };
        field("level", &self.level.name().into());
        field("time", &self.rfc3339().into());
        for (key, text) in [("scope", &self.scope), ("caller", &self.caller)] {
            if let Some(text) = text {
                field(key, &text.as_str().into());
            }
        }
        field("msg", &self.message.as_str().into());
        for (key, value) in &self.labels {
            if RESERVED.contains(&key.as_str()) {
                field(&format!("label_{key}"), value);
            } else {
                field(key, value);
            }
        }
        line.push('}');
        in_json(&line)
    }

    fn rfc3339(&self) -> String {
        humantime::format_rfc3339_micros(self.time).to_string()
    }
}

struct Labels(Vec<(String, Value)>);

impl<'kvs> log::kv::VisitSource<'kvs> for Labels {
    fn visit_pair(
        &mut self,
        key: log::kv::Key<'kvs>,
        value: log::kv::Value<'kvs>,
    ) -> Result<(), log::kv::Error> {
        let plain = (value.to_bool().map(Value::from))
            .or_else(|| value.to_u64().map(Value::from))
            .or_else(|| value.to_i64().map(Value::from))
            .or_else(|| value.to_f64().map(Value::from));
        self.0.push((key.to_string(), plain.unwrap_or_else(|| Value::from(value.to_string()))));
        Ok(())
    }
}

/// Whether a character would end a line, separate fields, steer a terminal or turn the direction of writing.
fn is_harmful(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A text with what would end a line, separate fields, steer a terminal or turn the direction of writing written out.
#[must_use]
pub fn escaped(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    push_escaped(&mut line, text);
    line
}

fn push_escaped(line: &mut String, text: &str) {
    for character in text.chars() {
        if is_harmful(character) {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
}

/// JSON without characters that JSON allows in strings and a terminal obeys. They occur only in strings.
fn in_json(line: &str) -> String {
    let mut safe = String::with_capacity(line.len());
    for character in line.chars() {
        if is_harmful(character) {
            // All of them have sixteen bits.
            let _ = write!(safe, "\\u{:04x}", u32::from(character));
        } else {
            safe.push(character);
        }
    }
    safe
}

fn push_value(line: &mut String, value: &Value) {
    match value {
        Value::String(text) if text.is_empty() || text.contains([' ', '"', '=']) => {
            line.push('"');
            push_escaped(line, &text.replace('\\', "\\\\").replace('"', "\\\""));
            line.push('"');
        }
        Value::String(text) => push_escaped(line, text),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            push_escaped(line, &value.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::{Duration, UNIX_EPOCH};

    fn entry(message: &str, labels: &[(&str, Value)]) -> LogEntry {
        LogEntry {
            time: UNIX_EPOCH + Duration::from_micros(1_780_000_000_000_001),
            level: Level::Warn,
            scope: Some("cni-plugin".into()),
            caller: None,
            message: message.into(),
            labels: labels.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect(),
        }
    }

    #[test]
    fn lines_have_the_fields_of_the_format() {
        let entry = entry("done", &[("pod", json!("a/b")), ("ms", json!(3)), ("why", json!("no \"proxy\""))]);
        assert_eq!(
            entry.console(),
            "2026-05-28T20:26:40.000001Z\twarn\tcni-plugin\tdone\tpod=a/b ms=3 why=\"no \\\"proxy\\\"\""
        );
        assert_eq!(
            entry.json(),
            r#"{"level":"warn","time":"2026-05-28T20:26:40.000001Z","scope":"cni-plugin","msg":"done","pod":"a/b","ms":3,"why":"no \"proxy\""}"#
        );
    }

    #[test]
    fn a_json_line_reads_back() {
        let entry = entry("a\nb", &[("pod", json!("a/b"))]);
        assert_eq!(LogEntry::from_json(&entry.json()), Some(entry));
        for bad in ["", "[]", "{}", r#"{"level":"x","time":"2026-05-28T20:26:40Z","msg":""}"#] {
            assert_eq!(LogEntry::from_json(bad), None, "{bad}");
        }
    }

    #[test]
    fn hostile_text_stays_on_its_line() {
        let text = "x\n2026-01-01\terror\tforged\u{1b}[2J\u{2028}\u{202e}\r";
        let entry =
            entry(text, &[("a\nb", json!(text)), ("msg", json!("second")), ("n", json!({"a": text}))]);
        for line in [entry.console(), entry.json()] {
            assert!(!line.contains(['\n', '\r', '\u{1b}']), "{line}");
        }
        assert_eq!(entry.console().matches('\t').count(), 4);
        let control = "\u{7f}\u{9b}2J\u{85}\u{2028}\u{202e}\u{2067}\u{1b}";
        let json = self::entry(control, &[(control, json!(control))]).json();
        assert!(json.chars().all(|c| !is_harmful(c)), "{json}");
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["msg"], control);
        let isolated = self::entry("a\u{2066}b\u{2069}c\u{2067}\u{2068}", &[]).console();
        assert!(!isolated.contains(|c| matches!(c, '\u{2066}'..='\u{2069}')), "{isolated}");
        let read: Map<String, Value> = serde_json::from_str(&entry.json()).unwrap();
        assert_eq!((&read["msg"], &read["label_msg"]), (&json!(text), &json!("second")));
    }
}
