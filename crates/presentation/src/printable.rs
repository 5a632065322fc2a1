//! Text that a terminal only shows. What is printed may come from pods, tenants and servers: control characters, which move cursors, set
//! clipboards and end lines, and marks that turn the direction of writing are written out.
//!
//! This is the only place where text becomes a [`Printable`], and programs print nothing else.

use std::fmt::{self, Write as _};
use std::ops::Deref;

use serde_json::Value;

/// Text without anything that a terminal obeys, except what programs put into it themselves: line breaks, colours.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Printable(String);

impl Printable {
    /// The program's own text.
    #[must_use]
    pub fn own(text: &'static str) -> Self {
        Self(text.to_owned())
    }

    /// A part of a line, of any origin.
    #[must_use]
    pub fn of(text: &str) -> Self {
        Self(harmless(text))
    }

    /// A line of any origin.
    #[must_use]
    pub fn line(text: &str) -> Self {
        Self(harmless(text) + "\n")
    }

    /// Lines whose breaks and tabulators are the program's own, because each was escaped before or has none.
    #[must_use]
    pub fn lines(text: &str) -> Self {
        let mut safe = String::with_capacity(text.len());
        push_lines(text, &mut safe, Style::Text);
        Self(safe)
    }

    /// JSON as it is written for people and programs. It may hold such characters in strings, and there only.
    #[must_use]
    pub fn json(value: &Value) -> Self {
        Self::compact_json(&format!("{value:#}"))
    }

    /// JSON in one line.
    #[must_use]
    pub fn json_line(value: &Value) -> Self {
        Self::compact_json(&value.to_string())
    }

    fn compact_json(text: &str) -> Self {
        let mut safe = String::with_capacity(text.len() + 1);
        for line in text.split_inclusive('\n') {
            escape(line.trim_end_matches('\n'), &mut safe, Style::Json);
            safe.push('\n');
        }
        Self(safe)
    }

    /// The same in a style of this program's.
    pub(crate) fn written(text: String) -> Self {
        Self(text)
    }

    /// At most so many characters, the last of which shows that more followed.
    #[must_use]
    pub fn clipped(self, width: usize) -> Self {
        if self.0.chars().count() <= width {
            return self;
        }
        let mut kept: String = self.0.chars().take(width.saturating_sub(1)).collect();
        kept.push('…');
        Self(kept)
    }

    /// Adds what follows.
    pub fn push(&mut self, rest: &Self) {
        self.0.push_str(&rest.0);
    }
}

impl Deref for Printable {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Printable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Printable> for String {
    fn from(text: Printable) -> Self {
        text.0
    }
}

impl FromIterator<Printable> for Printable {
    fn from_iter<T: IntoIterator<Item = Self>>(parts: T) -> Self {
        Self(parts.into_iter().map(String::from).collect())
    }
}

/// How characters are written out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    Text,
    /// As in JSON's strings, where a program still reads the same.
    Json,
}

/// What a terminal may obey, and marks that lie about what follows.
fn is_obeyed(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escape(text: &str, into: &mut String, style: Style) {
    for character in text.chars() {
        if !is_obeyed(character) {
            into.push(character);
        } else if style == Style::Text {
            into.extend(character.escape_default());
        } else {
            // All of them have sixteen bits. Writing to a string cannot fail.
            let _ = write!(into, "\\u{:04x}", u32::from(character));
        }
    }
}

/// The same with what a terminal obeys written out.
#[must_use]
pub fn harmless(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    escape(text, &mut safe, Style::Text);
    safe
}

/// The longest sequence that [`Passage`] lets through.
const LONGEST_COLOUR: usize = 5;
/// The colours of [`TextStyle`](crate::text_writer::TextStyle), and their end.
const COLOURS: [&str; 6] = ["\u{1b}[0m", "\u{1b}[1m", "\u{1b}[2m", "\u{1b}[31m", "\u{1b}[32m", "\u{1b}[33m"];

/// Passes on what another program prints, piece by piece: text with line breaks, tabs and, if they are wanted, colours.
#[derive(Debug, Default)]
pub struct Passage {
    has_colours: bool,
    /// The beginning of a character or colour whose rest has not come yet.
    rest: Vec<u8>,
}

impl Passage {
    /// Nothing has come yet.
    #[must_use]
    pub const fn new(has_colours: bool) -> Self {
        Self { has_colours, rest: Vec::new() }
    }

    /// What can be printed so far.
    pub fn pass(&mut self, piece: &[u8]) -> Printable {
        self.rest.extend_from_slice(piece);
        self.take(false)
    }

    /// The last piece.
    #[must_use]
    pub fn end(mut self) -> Printable {
        self.take(true)
    }

    fn take(&mut self, is_end: bool) -> Printable {
        let bytes = std::mem::take(&mut self.rest);
        let mut safe = String::with_capacity(bytes.len());
        for chunk in bytes.utf8_chunks() {
            let mut text = chunk.valid();
            while let Some(at) = text.find('\u{1b}') {
                let (before, sequence) = text.split_at(at);
                push_lines(before, &mut safe, Style::Json);
                let colour = COLOURS.iter().find(|colour| self.has_colours && sequence.starts_with(**colour));
                let may_become = |colour: &&str| colour.starts_with(sequence);
                if let Some(colour) = colour {
                    safe.push_str(colour);
                } else if !is_end
                    && sequence.len() < LONGEST_COLOUR
                    && COLOURS.iter().any(may_become)
                    && chunk.invalid().is_empty()
                {
                    self.rest = sequence.as_bytes().to_vec();
                    return Printable(safe);
                } else {
                    escape("\u{1b}", &mut safe, Style::Json);
                }
                text = &sequence[colour.map_or(1, |colour| colour.len())..];
            }
            push_lines(text, &mut safe, Style::Json);
            let invalid = chunk.invalid();
            // Only at the end of the text a character can be incomplete.
            let is_last = invalid.last().is_some_and(|last| std::ptr::eq(last, bytes.last().unwrap_or(last)));
            if is_last && !is_end && is_beginning(invalid) {
                self.rest = invalid.to_vec();
            } else {
                for byte in invalid {
                    let _ = write!(safe, "\\x{byte:02x}");
                }
            }
        }
        Printable(safe)
    }
}

/// Whether these bytes are the beginning of a character.
fn is_beginning(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

fn push_lines(text: &str, safe: &mut String, style: Style) {
    // Tabs separate the fields of a log's lines.
    let is_own = |c: char| matches!(c, '\n' | '\t');
    for part in text.split_inclusive(is_own) {
        let words = part.trim_end_matches(is_own);
        escape(words, safe, style);
        safe.push_str(&part[words.len()..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Clipboards, clearing, C1's way to begin a sequence, a line of its own, other directions.
    const HOSTILE: &str =
        "a\u{1b}]52;c;eA==\u{7}\u{1b}[2Jb\u{9b}31m\rc\nd\u{202e}e\u{2066}f\u{7f}g\u{2028}h\u{200f}";

    fn is_safe(text: &str) -> bool {
        !text.chars().any(|c| is_obeyed(c) && c != '\n')
    }

    #[test]
    fn nothing_that_a_terminal_obeys_is_printable() {
        let line = Printable::line(HOSTILE);
        assert_eq!(line.matches('\n').count(), 1);
        assert!(is_safe(&line) && line.contains("\\u{1b}]52") && line.contains("c\\nd\\u{202e}e"), "{line}");
        let lines = Printable::lines("a\tb\r\nc\u{1b}");
        assert_eq!(&*lines, "a\tb\\r\nc\\u{1b}");
    }

    #[test]
    fn json_stays_the_same_json() {
        let value = json!({HOSTILE: [HOSTILE, "ü", 7]});
        for text in [Printable::json(&value), Printable::json_line(&value)] {
            assert!(is_safe(&text) && text.ends_with('\n'), "{text}");
            assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON"), value);
        }
        assert_eq!(Printable::json_line(&value).lines().count(), 1);
    }

    /// What passes in pieces of this length.
    fn passed(bytes: &[u8], length: usize, has_colours: bool) -> String {
        let mut passage = Passage::new(has_colours);
        let mut text: String = bytes.chunks(length).map(|piece| String::from(passage.pass(piece))).collect();
        text.push_str(&passage.end());
        text
    }

    #[test]
    fn lines_and_wanted_colours_of_another_program_pass_in_pieces_of_any_size() {
        let text = "\u{1b}[1mpod ü\u{1b}[0m\n  \u{1b}[31mERROR\u{1b}[0m €\u{1b}[2J\u{1b}[5m\u{9b}2J\u{1b}]0;x\u{7}\u{1b}";
        for length in [1, 2, 3, 7, 100] {
            let shown = passed(text.as_bytes(), length, true);
            let wanted = "\u{1b}[1mpod ü\u{1b}[0m\n  \u{1b}[31mERROR\u{1b}[0m €\\u001b[2J\\u001b[5m\\u009b2J\\u001b]0;x\\u0007\\u001b";
            assert_eq!(shown, wanted, "{length}");
            assert!(is_safe(&passed(text.as_bytes(), length, false)), "{length}");
            assert_eq!(passed(b"a\tb\n\t\tc\r\t", length, true), "a\tb\n\t\tc\\u000d\t", "{length}");
            assert_eq!(passed(b"a\xff\xc3\xbc\xe2\x82", length, true), "a\\xffü\\xe2\\x82", "{length}");
            let json = json!({"a": "\u{9b}\u{202e}", "b": [HOSTILE]});
            let shown = passed(format!("{json:#}").as_bytes(), length, false);
            assert_eq!(serde_json::from_str::<Value>(&shown).expect("JSON"), json);
        }
    }
}
