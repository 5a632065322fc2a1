//! Text of an entry in the style of the text around it.

use jsonc_parser::ast::{Object, Value};
use jsonc_parser::common::{Range, Ranged};

/// How the neighbour of an entry is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct JsonStyle {
    /// Between a key and its value.
    colon: String,
    layout: Layout,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Layout {
    /// All on one line.
    Line {
        /// After a comma between keys.
        comma: String,
        /// Inside the braces.
        padding: String,
    },
    /// A line for each key.
    Block {
        /// The line end.
        newline: &'static str,
        /// The indentation of the closing brace.
        indent: String,
        /// One step of indentation.
        unit: String,
    },
}

impl JsonStyle {
    /// Two spaces, a line for each key.
    pub(super) fn plain() -> Self {
        let layout = Layout::Block { newline: "\n", indent: String::new(), unit: "  ".to_owned() };
        Self { colon: ": ".to_owned(), layout }
    }

    /// The style of a plugin in a text.
    pub(super) fn of(text: &str, plugin: &Value<'_>) -> Self {
        let range = plugin.range();
        let properties = plugin.as_object().map(|object| object.properties.as_slice()).unwrap_or_default();
        let Some(first) = properties.first() else { return Self::plain() };
        let colon = text[first.name.range().end..first.value.range().start].to_owned();
        let layout = if text[range.start..range.end].contains('\n') {
            let indent = line_indent(text, range.end - 1);
            let inner = line_indent(text, first.range.start);
            let unit = inner.strip_prefix(indent).filter(|unit| !unit.is_empty());
            Layout::Block {
                newline: if text[range.start..range.end].contains("\r\n") { "\r\n" } else { "\n" },
                indent: indent.to_owned(),
                unit: unit.unwrap_or(if indent.contains('\t') { "\t" } else { "  " }).to_owned(),
            }
        } else {
            let comma = properties.get(1).map(|second| &text[first.range.end..second.range.start]);
            Layout::Line {
                comma: comma.unwrap_or(if colon.ends_with(' ') { ", " } else { "," }).to_owned(),
                padding: text[range.start + 1..first.range.start].to_owned(),
            }
        };
        Self { colon, layout }
    }

    /// An object in this style. Values other than objects keep their text.
    pub(super) fn write(&self, text: &str, object: &Object<'_>) -> String {
        self.object(text, object, 1)
    }

    fn object(&self, text: &str, object: &Object<'_>, depth: usize) -> String {
        if object.properties.is_empty() {
            return "{}".to_owned();
        }
        let members = object.properties.iter().map(|property| {
            let value = match property.value.as_object() {
                Some(inner) => self.object(text, inner, depth + 1),
                None => one_line(slice(text, property.value.range())),
            };
            format!("{}{}{value}", slice(text, property.name.range()), self.colon)
        });
        match &self.layout {
            Layout::Line { comma, padding } => {
                format!("{{{padding}{}{padding}}}", members.collect::<Vec<_>>().join(comma))
            }
            Layout::Block { newline, indent, unit } => {
                let inner = format!("{newline}{indent}{}", unit.repeat(depth));
                let lines = members.collect::<Vec<_>>().join(&format!(",{inner}"));
                format!("{{{inner}{lines}{newline}{indent}{}}}", unit.repeat(depth - 1))
            }
        }
    }
}

fn slice(text: &str, range: Range) -> &str {
    &text[range.start..range.end]
}

/// Text of a value with its line breaks and indentation made single spaces. Strings have no raw line breaks, so none is touched.
fn one_line(value: &str) -> String {
    value.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

/// The white space at the start of the line that has the byte `at`.
fn line_indent(text: &str, at: usize) -> &str {
    let line = &text[text[..at].rfind('\n').map_or(0, |newline| newline + 1)..];
    let width = line.find(|character| character != ' ' && character != '\t').unwrap_or(line.len());
    &line[..width]
}
