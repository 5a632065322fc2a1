//! Text for people: wrapped at the terminal's width, coloured on a terminal, and never able to do anything to it. What is printed may
//! come from pods, so control characters are shown instead of sent.

use std::fmt::Write as _;

use serde::Deserialize;

use crate::printable::{Printable, harmless};

/// The width without a terminal.
pub const USUAL_WIDTH: usize = 80;
/// Narrower than this nothing can be laid out.
const NARROWEST: usize = 40;
/// Longer lines are hard to read.
const WIDEST: usize = 120;
/// How much of what was seen text for people shows: a pod's annotations may have 256 KiB.
pub const LONGEST_SEEN: usize = 800;

/// How a word stands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextStyle {
    /// A heading.
    Bold,
    /// Something that goes with something else.
    Dim,
    /// Something good.
    Green,
    /// Something to check.
    Yellow,
    /// Something wrong.
    Red,
}

impl TextStyle {
    const fn code(self) -> &'static str {
        match self {
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Red => "31",
        }
    }

    /// A text in this colour.
    #[must_use]
    pub fn ink(self, text: &Printable) -> Printable {
        Printable::written(self.around(text))
    }

    fn around(self, text: &str) -> String {
        format!("\u{1b}[{}m{text}\u{1b}[0m", self.code())
    }
}

/// When text is coloured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ColorChoice {
    /// On a terminal that has colours, unless NO_COLOR is set.
    #[default]
    Auto,
    /// Wherever it goes.
    Always,
    /// Nowhere.
    Never,
}

impl ColorChoice {
    /// All of them, by their words.
    pub const WORDS: &'static [&'static str] = &["auto", "always", "never"];

    /// That of a word.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        serde_json::from_value(word.into()).ok()
    }
}

/// How text is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextLayout {
    /// How many characters a line has at most; only a word that is longer makes a longer line.
    pub width: usize,
    /// Whether to use colours.
    pub colour: bool,
}

impl TextLayout {
    /// That of an output: as wide as the terminal, if it is one.
    #[must_use]
    pub fn new(
        is_terminal: bool,
        terminal: Option<usize>,
        colour: ColorChoice,
        env: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let is_said = |name| env(name).is_some_and(|text| !text.is_empty());
        let has_colours = env("TERM").is_none_or(|term| term != "dumb");
        let width = terminal.filter(|_| is_terminal).unwrap_or(USUAL_WIDTH);
        let colour = match colour {
            ColorChoice::Auto => is_terminal && has_colours && !is_said("NO_COLOR"),
            ColorChoice::Always => true,
            ColorChoice::Never => false,
        };
        Self { width: width.clamp(NARROWEST, WIDEST), colour }
    }
}

impl Default for TextLayout {
    fn default() -> Self {
        Self { width: USUAL_WIDTH, colour: false }
    }
}

/// A text that grows line by line.
#[derive(Debug)]
pub struct TextWriter {
    layout: TextLayout,
    text: String,
}

impl TextWriter {
    /// An empty one.
    #[must_use]
    pub const fn new(layout: TextLayout) -> Self {
        Self { layout, text: String::new() }
    }

    /// What is on it.
    #[must_use]
    pub fn into_text(self) -> Printable {
        Printable::written(self.text)
    }

    /// An empty line.
    pub fn gap(&mut self) {
        self.text.push('\n');
    }

    /// A heading.
    pub fn heading(&mut self, text: &str) {
        self.write(0, "", text, Some(TextStyle::Bold));
    }

    /// Words at this indent; further lines keep it.
    pub fn line(&mut self, indent: usize, text: &str) {
        self.write(indent, "", text, None);
    }

    /// The same, inked.
    pub fn inked(&mut self, indent: usize, text: &str, ink: TextStyle) {
        self.write(indent, "", text, Some(ink));
    }

    /// A label, and words beside it; further lines begin under the words.
    pub fn labelled(&mut self, indent: usize, label: &str, text: &str) {
        self.write(indent, label, text, None);
    }

    /// A label, and several lines beside it.
    pub fn listed(&mut self, indent: usize, label: &str, lines: impl IntoIterator<Item = String>) {
        let blank = " ".repeat(label.len());
        for (index, line) in lines.into_iter().enumerate() {
            self.labelled(indent, if index == 0 { label } else { &blank }, &line);
        }
    }

    /// A label that stands out, and words beside it.
    pub fn marked(&mut self, indent: usize, label: &str, ink: TextStyle, text: &str) {
        let start = self.text.len();
        self.write(indent, label, text, None);
        if self.layout.colour {
            let at = start + indent;
            let end = at + harmless(label).trim_end().len();
            let inked = ink.around(&self.text[at..end]);
            self.text.replace_range(at..end, &inked);
        }
    }

    fn write(&mut self, indent: usize, label: &str, text: &str, ink: Option<TextStyle>) {
        let label = harmless(label);
        let hanging = indent + label.chars().count();
        let room = self.layout.width.saturating_sub(hanging).max(1);
        for (index, line) in wrap(&harmless(text), room).into_iter().enumerate() {
            let margin = if index == 0 { format!("{:indent$}{label}", "") } else { " ".repeat(hanging) };
            // Writing to a string cannot fail.
            let _ = match ink.filter(|_| self.layout.colour) {
                Some(ink) => writeln!(self.text, "{margin}{}", ink.around(&line)),
                None => writeln!(self.text, "{}", format!("{margin}{line}").trim_end()),
            };
        }
    }

    /// A table: every column as wide as its widest cell, the last one wrapped in what is left. Where that is too little, rows are
    /// described line by line.
    pub fn table(&mut self, heads: &[&str], rows: &[Vec<String>]) {
        let cells = |row: &Vec<String>| row.iter().map(|cell| harmless(cell)).collect();
        let heads: Vec<String> = heads.iter().map(|head| (*head).to_owned()).collect();
        let rows: Vec<Vec<String>> = [&heads].into_iter().chain(rows).map(cells).collect();
        let wide = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..heads.len().saturating_sub(1)).map(wide).collect();
        let taken: usize = widths.iter().map(|width| width + 2).sum();
        if self.layout.width < taken + 20 {
            for row in rows.iter().skip(1) {
                self.gap();
                for (head, cell) in heads.iter().zip(row) {
                    self.labelled(0, &format!("{head}: "), cell);
                }
            }
            return;
        }
        for row in &rows {
            let Some((last, begin)) = row.split_last() else { continue };
            let begin = begin.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  "));
            self.labelled(0, &begin.collect::<String>(), last);
        }
    }
}

/// The beginning of a text that is longer, and how long it is.
#[must_use]
pub fn short(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{} ... ({} bytes)", text.get(..end).unwrap_or_default(), text.len()),
        None => text.to_owned(),
    }
}

/// Lines of at most `width` characters, broken between words; a word that is longer is broken itself.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        let mut word = word;
        loop {
            let used = line.chars().count();
            let gap = usize::from(used > 0);
            let long = word.chars().count();
            if used + gap + long <= width {
                if gap == 1 {
                    line.push(' ');
                }
                line.push_str(word);
                break;
            }
            if used > 0 {
                lines.push(std::mem::take(&mut line));
                continue;
            }
            let at = word.char_indices().nth(width).map_or(word.len(), |(at, _)| at);
            let (first, rest) = word.split_at(at);
            lines.push(first.to_owned());
            word = rest;
        }
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paper(width: usize, colour: bool) -> TextWriter {
        TextWriter::new(TextLayout { width, colour })
    }

    #[test]
    fn a_long_text_is_cut_at_a_character_and_says_how_long_it_is() {
        assert_eq!(short("abc", 3), "abc");
        assert_eq!(short("\u{e9}\u{e9}\u{e9}", 2), "\u{e9}\u{e9} ... (6 bytes)");
    }

    #[test]
    fn words_are_wrapped_under_each_other() {
        let mut paper = paper(20, false);
        paper.labelled(2, "why: ", "one two three four abcdefghijklmnopq");
        let lines: Vec<String> = paper.into_text().lines().map(str::to_owned).collect();
        assert_eq!(lines, ["  why: one two three", "       four", "       abcdefghijklm", "       nopq"]);
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in [40, 80, 120] {
            let mut paper = paper(width, false);
            paper.line(4, &"word ".repeat(50));
            paper.line(0, &"x".repeat(300));
            let row = |text: &str| vec!["short".to_owned(), text.repeat(30)];
            paper.table(&["A", "B"], &[row("many words "), row("y")]);
            paper.table(&["A", "B"], &[vec!["z".repeat(70), "b".to_owned()]]);
            let text = paper.into_text();
            assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
        }
    }

    #[test]
    fn what_pods_say_does_nothing_to_the_terminal() {
        let mut paper = paper(80, true);
        paper.line(0, "red \u{1b}[31m bell \u{7} new\nline \u{202e}txt");
        paper.marked(0, "co\u{1b}[2Jde\n: ", TextStyle::Red, "x");
        paper.labelled(0, "\u{9b}2J ", "y");
        let wanted = "red \\u{1b}[31m bell \\u{7} new\\nline \\u{202e}txt\n\u{1b}[31mco\\u{1b}[2Jde\\n:\u{1b}[0m x\n\\u{9b}2J y\n";
        assert_eq!(&*paper.into_text(), wanted);
    }

    #[test]
    fn colours_are_for_terminals_that_want_them() {
        let env = |pairs: &'static [(&str, &str)]| {
            move |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        assert!(TextLayout::new(true, Some(100), ColorChoice::Auto, env(&[])).colour);
        assert!(
            TextLayout::new(true, None, ColorChoice::Auto, env(&[("NO_COLOR", "")])).colour,
            "empty counts as unset"
        );
        assert!(!TextLayout::new(true, None, ColorChoice::Auto, env(&[("NO_COLOR", "1")])).colour);
        assert!(!TextLayout::new(true, None, ColorChoice::Auto, env(&[("TERM", "dumb")])).colour);
        assert_eq!(
            TextLayout::new(false, Some(200), ColorChoice::Auto, env(&[])),
            TextLayout { width: 80, colour: false }
        );
        assert_eq!(TextLayout::new(true, Some(7), ColorChoice::Auto, env(&[])).width, NARROWEST);
        assert_eq!(TextLayout::new(true, Some(500), ColorChoice::Auto, env(&[])).width, WIDEST);
        let no = env(&[("NO_COLOR", "1"), ("TERM", "dumb")]);
        assert!(
            TextLayout::new(false, None, ColorChoice::Always, no).colour,
            "who asks for colours gets them"
        );
        assert!(!TextLayout::new(true, None, ColorChoice::Never, env(&[])).colour);
        assert!(ColorChoice::WORDS.iter().all(|word| ColorChoice::named(word).is_some()));
    }

    #[test]
    fn ink_is_only_around_the_words() {
        let mut paper = paper(80, true);
        paper.marked(0, "ERROR  ", TextStyle::Red, "bad");
        paper.inked(2, "good", TextStyle::Green);
        assert_eq!(&*paper.into_text(), "\u{1b}[31mERROR\u{1b}[0m  bad\n  \u{1b}[32mgood\u{1b}[0m\n");
    }
}
