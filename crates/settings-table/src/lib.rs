//! What a setting is, wherever it is given: as a flag, as a variable, as a key of the plugin's configuration.
//!
//! Every table of settings in the workspace is a list of [`SettingSpec`]s, or can be read as one. Help, the reference pages and the
//! warnings at start come from the rows, so that all three say the same of a setting; above all, whether it is in force ([`Status`]).

#![no_std]

extern crate alloc;

mod duration;

pub use duration::parse_duration;

use alloc::{borrow::ToOwned, format, string::String, vec, vec::Vec};
use core::fmt;
use redirect_core::values::parse_bool;

/// One setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SettingSpec {
    /// Its flag, without dashes.
    pub flag: Option<&'static str>,
    /// Its short flag.
    pub short: Option<char>,
    /// Its variables: its name, then other names that are understood.
    pub env: &'static [&'static str],
    /// Its key in the plugin's configuration; a dot stands before the key of an object inside.
    pub key: Option<&'static str>,
    /// What it takes.
    pub takes: ValueKind,
    /// The value if unset.
    pub default: &'static str,
    /// What it does: sentences.
    pub meaning: &'static str,
    /// Whether the program does so.
    pub status: Status,
}

/// A program's settings: the keys by which its code names them, and their rows. A misspelt key does not compile.
///
/// ```
/// settings_table::settings! {
///     /// What can be set.
///     pub enum GreeterKey;
///     /// Everything that can be set.
///     pub const GREETER;
///     WHOM(settings_table::ValueKind::Text("NAME"), "Whom it greets.").default("you"),
/// }
/// assert_eq!(GreeterKey::WHOM.row(), &GREETER[0]);
/// assert_eq!(GreeterKey::WHOM.row().env, ["WHOM"]);
/// ```
///
/// ```compile_fail,E0599
/// settings_table::settings! {
///     /// What can be set.
///     pub enum GreeterKey;
///     /// Everything that can be set.
///     pub const GREETER;
///     WHOM(settings_table::ValueKind::Text("NAME"), "Whom it greets.").default("you"),
/// }
/// GreeterKey::WHOMM.row();
/// ```
#[macro_export]
macro_rules! settings {
    (
        $(#[$about_keys:meta])* pub enum $Key:ident;
        $(#[$about_rows:meta])* pub const $ROWS:ident;
        $($key:ident($takes:expr, $meaning:expr) $(.$with:ident($value:expr))*,)+
    ) => {
        $(#[$about_keys])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(non_camel_case_types, reason = "keys are spelt as variables")]
        pub enum $Key {
            $(#[doc = $meaning] $key,)+
        }

        $(#[$about_rows])*
        pub const $ROWS: &[$crate::SettingSpec] = &[$(*$Key::$key.row(),)+];

        impl $Key {
            /// What is said of it. Its variable is its name, unless its row has others.
            #[must_use]
            pub const fn row(self) -> &'static $crate::SettingSpec {
                match self {
                    $(Self::$key => &const { $crate::SettingSpec::new($takes, $meaning).env(&[stringify!($key)])$(.$with($value))* },)+
                }
            }
        }
    };
}

/// What a setting takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// A text; what it is called in help.
    Text(&'static str),
    /// A boolean; as a flag it may stand alone.
    Switch,
    /// One of a closed set of words.
    Choice(&'static [&'static str]),
    /// A path of a file or folder.
    Path,
    /// A whole number.
    Number,
    /// A list; what it is called in help.
    List(&'static str),
    /// A duration with units, such as `1m30s`.
    Duration,
    /// Levels of scopes, as a list of `scope:level`.
    Levels,
}

/// Whether a program does what a setting says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It does.
    InForce,
    /// It is accepted, and nothing depends on it, because …
    WithoutEffect(&'static str),
    /// It is accepted because the reference has it, and is not done: …
    NotImplemented(&'static str),
    /// It would ask this program for something it never does: an error, because it …
    Refused(&'static str),
}

impl SettingSpec {
    /// A setting without a name.
    #[must_use]
    pub const fn new(takes: ValueKind, meaning: &'static str) -> Self {
        Self {
            flag: None,
            short: None,
            env: &[],
            key: None,
            takes,
            default: "",
            meaning,
            status: Status::InForce,
        }
    }

    /// The same with a flag.
    #[must_use]
    pub const fn flag(self, flag: &'static str) -> Self {
        Self { flag: Some(flag), ..self }
    }

    /// The same with variables.
    #[must_use]
    pub const fn env(self, env: &'static [&'static str]) -> Self {
        Self { env, ..self }
    }

    /// The same with a key.
    #[must_use]
    pub const fn key(self, key: &'static str) -> Self {
        Self { key: Some(key), ..self }
    }

    /// The same with a default.
    #[must_use]
    pub const fn default(self, default: &'static str) -> Self {
        Self { default, ..self }
    }

    /// The same with a status.
    #[must_use]
    pub const fn status(self, status: Status) -> Self {
        Self { status, ..self }
    }

    /// What people know it by: its variable if it has one, else its flag, else its key.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.env.first().copied().or(self.flag).or(self.key).unwrap_or_default()
    }

    /// What it does and, where the program does not do so, that.
    #[must_use]
    pub fn description(&self) -> String {
        format!("{} {}", self.meaning, self.status).trim_end().to_owned()
    }
}

impl ValueKind {
    /// The word for it in the documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Switch => "boolean",
            Self::Choice(_) => "word",
            Self::Path => "path",
            Self::Number => "number",
            Self::List(_) | Self::Levels => "list",
            Self::Duration => "duration",
        }
    }

    /// What the value is called in help.
    #[must_use]
    pub const fn value_name(self) -> &'static str {
        match self {
            Self::Text(name) | Self::List(name) => name,
            Self::Switch => "BOOL",
            Self::Choice(_) => "WORD",
            Self::Path => "PATH",
            Self::Number => "NUMBER",
            Self::Duration => "DURATION",
            Self::Levels => "LEVELS",
        }
    }

    /// The words that can be given, where these are all.
    #[must_use]
    pub const fn words(self) -> Option<&'static [&'static str]> {
        match self {
            Self::Choice(words) => Some(words),
            Self::Switch => Some(&["true", "false"]),
            Self::Text(_) | Self::Path | Self::Number | Self::List(_) | Self::Duration | Self::Levels => None,
        }
    }

    /// Whether a value asks for nothing: it is empty, or switches off.
    #[must_use]
    pub fn is_off(self, value: &str) -> bool {
        let value = value.trim();
        let is_none = |level: &str| level == "none" || level.ends_with(":none");
        value.is_empty()
            || match self {
                Self::Switch => parse_bool(value) == Ok(false),
                Self::Levels => value.split(',').all(|level| is_none(level.trim())),
                Self::Text(_)
                | Self::Choice(_)
                | Self::Path
                | Self::Number
                | Self::List(_)
                | Self::Duration => false,
            }
    }
}

/// What help and documentation say beside the meaning; nothing where the setting is in force.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InForce => Ok(()),
            Self::WithoutEffect(why) => write!(f, "Has no effect: {why}."),
            Self::NotImplemented(why) => write!(f, "Accepted but not implemented: {why}."),
            Self::Refused(why) => write!(f, "Refused: it {why}."),
        }
    }
}

/// A setting that was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GivenSetting<'a> {
    /// Which.
    pub row: &'a SettingSpec,
    /// Where, in words, such as `flag --frob`.
    pub said: String,
    /// Its value.
    pub value: String,
}

/// Settings that were given and are not in force, all for the same reason: charts give a dozen of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotInForce {
    /// Where they were given.
    pub said: Vec<String>,
    /// The reason.
    pub status: Status,
}

impl NotInForce {
    /// What was asked for and is not done, in the order in which it was given. A setting that is off asks for nothing.
    /// What is refused is not a notice but an error.
    #[must_use]
    pub fn among(given: &[GivenSetting<'_>]) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for GivenSetting { row, said, value } in given {
            let counts = matches!(row.status, Status::WithoutEffect(_) | Status::NotImplemented(_));
            if !counts || row.takes.is_off(value) {
                continue;
            }
            match all.iter_mut().find(|one| one.status == row.status) {
                Some(one) => one.said.push(said.clone()),
                None => all.push(Self { said: vec![said.clone()], status: row.status }),
            }
        }
        all
    }
}

impl fmt::Display for NotInForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (said, have) = (self.said.join(", "), if self.said.len() == 1 { "has" } else { "have" });
        match self.status {
            Status::WithoutEffect(why) => write!(f, "{said} {have} no effect: {why}"),
            Status::NotImplemented(why) => write!(f, "{said}: accepted but not implemented: {why}"),
            Status::InForce | Status::Refused(_) => write!(f, "{said}"),
        }
    }
}

/// Rows as a list in Markdown: names, what each takes unless it is a text, its default (that of a boolean if it is true), what it means.
#[must_use]
pub fn markdown(rows: &[SettingSpec]) -> String {
    let code = |text: &&str| format!("`{text}`");
    let mut list = String::new();
    for row in rows {
        let flag = row.flag.map(|flag| format!("`--{flag}`"));
        let names = row.key.iter().chain(row.env).map(code).collect::<Vec<_>>();
        let names = flag.into_iter().chain(names).collect::<Vec<_>>().join(", ");
        let words = row.takes.words().filter(|_| row.takes != ValueKind::Switch);
        let takes = words.map_or_else(
            || row.takes.name().to_owned(),
            |words| words.iter().map(code).collect::<Vec<_>>().join(", "),
        );
        let is_usual = row.default.is_empty() || (row.takes == ValueKind::Switch && row.default == "false");
        let default = (!is_usual).then(|| format!("default `{}`", row.default));
        let facts: Vec<String> = (takes != "text").then_some(takes).into_iter().chain(default).collect();
        let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
        list += &wrapped(&format!("- {names}{facts}: {}", row.description()), "  ");
    }
    list
}

/// A paragraph of Markdown in lines of at most 120 characters, all but the first behind an indent.
#[must_use]
pub fn wrapped(paragraph: &str, indent: &str) -> String {
    const WIDTH: usize = 120;
    // Such a word would begin a list or a heading.
    let begins_something = |word: &str| word.starts_with(['-', '+', '*', '#', '>']);
    let mut lines = String::new();
    let mut line = String::new();
    for word in paragraph.split_whitespace() {
        let width = line.chars().count() + 1 + word.chars().count();
        if width > WIDTH && !line.is_empty() && !begins_something(word) {
            lines.push_str(line.trim_end());
            lines.push('\n');
            line = indent.to_owned();
        } else if !line.trim().is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines + &line + "\n"
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;
    use alloc::vec;

    const AMBIENT: Status = Status::NotImplemented("ambient mode does not exist");
    const ROWS: [SettingSpec; 5] = [
        SettingSpec::new(ValueKind::Switch, "Whether it runs.").flag("run").env(&["RUN"]).default("true"),
        SettingSpec::new(ValueKind::Text("NAME"), "Whom it greets.").env(&["WHOM"]).status(AMBIENT),
        SettingSpec::new(ValueKind::Switch, "Whether it bows.").env(&["BOW"]).status(AMBIENT),
        SettingSpec::new(ValueKind::Levels, "Stack traces.")
            .flag("traces")
            .status(Status::WithoutEffect("none exist")),
        SettingSpec::new(ValueKind::Choice(&["a", "b"]), "Removes.")
            .env(&["REMOVE"])
            .status(Status::Refused("removes")),
    ];

    fn report(values: &[(usize, &str)]) -> Vec<String> {
        let given = |(row, value): &(usize, &str)| GivenSetting {
            row: &ROWS[*row],
            said: ROWS[*row].name().to_owned(),
            value: (*value).to_owned(),
        };
        let given: Vec<GivenSetting<'_>> = values.iter().map(given).collect();
        NotInForce::among(&given).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_was_asked_for_and_is_not_done_is_told_once_for_each_reason() {
        assert_eq!(
            report(&[(0, "true"), (1, "x"), (3, "a:debug,b:none"), (2, "1"), (4, "a")]),
            [
                "WHOM, BOW: accepted but not implemented: ambient mode does not exist",
                "traces has no effect: none exist"
            ]
        );
    }

    #[test]
    fn what_is_off_asks_for_nothing() {
        assert_eq!(report(&[(0, "true"), (1, ""), (2, "False"), (3, "none,x:none")]), [""; 0]);
    }

    #[test]
    fn each_row_is_an_item_of_the_list() {
        let list = markdown(&ROWS);
        let lines: Vec<&str> = list.lines().collect();
        assert_eq!(lines[0], "- `--run`, `RUN` (boolean, default `true`): Whether it runs.");
        assert_eq!(
            lines[1],
            "- `WHOM`: Whom it greets. Accepted but not implemented: ambient mode does not exist."
        );
        assert!(lines.contains(&"- `REMOVE` (`a`, `b`): Removes. Refused: it removes."), "{list}");
        assert_eq!(vec![lines.len()], [5]);
    }

    #[test]
    fn a_long_paragraph_is_wrapped() {
        let long = format!("- {} - {}", "word ".repeat(23), "x ".repeat(3));
        let lines: Vec<String> = wrapped(&long, "  ").lines().map(str::to_owned).collect();
        assert!(lines.iter().all(|line| line.chars().count() <= 120), "{lines:?}");
        assert!(lines.len() == 2 && lines[1].starts_with("  ") && !lines[1].starts_with("  -"), "{lines:?}");
    }
}
