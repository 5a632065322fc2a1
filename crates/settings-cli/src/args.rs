//! Sorting the words of a command line: those the parser understands, and the others, each with what to write instead.
//!
//! The parser stops at the first word it does not know. An operator wants to see all of them, together with whatever
//! else is wrong, so they are taken out beforehand.

use clap::{Arg, Command};
use clap_lex::{ParsedArg, RawArgs};
use redirect_core::{
    settings::{Misspelt, Setting, SettingKind, Star},
    values::Problem,
};
use std::ffi::OsString;

/// How many stray words in a row a message shows.
const SHOWN: usize = 3;

/// A command line, sorted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassifiedArgs {
    /// What the parser understands.
    pub(crate) understood: Vec<OsString>,
    /// What it does not, with the reason.
    pub(crate) refused: Vec<(String, Problem)>,
    /// What is behind `--`, where that is ignored.
    pub(crate) ignored: Vec<String>,
    /// Whether a subcommand is among what it understands; then nothing is sorted out.
    pub(crate) has_subcommand: bool,
}

/// What stands before a word.
#[derive(Clone, Copy)]
enum Before<'a> {
    Nothing,
    /// A flag that takes no word of its own.
    Switch(&'a Arg),
    /// A flag with its value.
    Value(&'a Arg),
    /// An unknown flag: the word may be its value.
    Unknown,
    /// So many stray words, which are one mistake: the last message covers them.
    Strays(usize),
}

/// Sorts the words of a command line, without the program's name, for a parser that is built; `ignores_rest` as
/// [`CommandLine`](crate::CommandLine) has it.
pub(crate) fn sort(
    command: &Command,
    ignores_rest: bool,
    words: impl IntoIterator<Item = OsString>,
) -> ClassifiedArgs {
    let words: Vec<OsString> = words.into_iter().map(lossy).collect();
    let raw = RawArgs::new(&words);
    let mut cursor = raw.cursor();
    let operands = command.get_positionals().count();
    let mut sorter =
        ArgClassifier { command, sorted: ClassifiedArgs::default(), before: Before::Nothing, operands };
    while let Some(word) = raw.next(&mut cursor) {
        let wants_value = if word.is_escape() && ignores_rest {
            let rest = raw.remaining(&mut cursor).map(|word| word.to_string_lossy().into_owned());
            sorter.sorted.ignored = rest.collect();
            break;
        } else if word.is_escape() {
            sorter.refuse("--", "separates nothing here; leave it out");
            continue;
        } else if word.is_long() {
            sorter.long(&word)
        } else if word.is_short() {
            sorter.short(&word)
        } else {
            let text = word.to_value_os().to_string_lossy().into_owned();
            let may_follow = match sorter.before {
                Before::Nothing => true,
                Before::Switch(_) | Before::Value(_) => !command.is_args_conflicts_with_subcommands_set(),
                Before::Unknown | Before::Strays(_) => false,
            };
            if command.find_subcommand(&text).is_some() && may_follow {
                return ClassifiedArgs {
                    understood: words,
                    has_subcommand: true,
                    ..ClassifiedArgs::default()
                };
            }
            sorter.word(&text);
            continue;
        };
        if let Some((flag, written)) = wants_value {
            match raw.next_os(&mut cursor) {
                Some(value) => {
                    sorter.understand(flag, true, written);
                    sorter.sorted.understood.push(value.to_owned());
                }
                None => sorter.refuse(&written.to_string_lossy(), "lacks its value; see --help"),
            }
        }
    }
    sorter.sorted
}

/// A word that is not UTF-8 is not a valid value of anything; it is refused with the value it is part of.
fn lossy(word: OsString) -> OsString {
    word.into_string().unwrap_or_else(|word| word.to_string_lossy().into_owned()).into()
}

struct ArgClassifier<'a> {
    command: &'a Command,
    sorted: ClassifiedArgs,
    before: Before<'a>,
    /// How many more words are what the program works on.
    operands: usize,
}

/// A flag that waits for its value, and how it is written.
type Waiting<'a> = Option<(&'a Arg, OsString)>;

impl<'a> ArgClassifier<'a> {
    /// `--flag` or `--flag=value`.
    fn long(&mut self, word: &ParsedArg<'_>) -> Waiting<'a> {
        let (name, value) = word.to_long().map_or(("", None), |(name, value)| (name.unwrap_or(""), value));
        let Some(flag) = self.command.get_arguments().find(|arg| arg.get_long() == Some(name)) else {
            let given = format!("--{name}");
            let flags = self.command.get_arguments().filter_map(Arg::get_long);
            self.unknown(&given, Misspelt::nearest(name, flags));
            return None;
        };
        let written = word.to_value_os().to_owned();
        if value.is_some() || !takes_word(flag) {
            self.understand(flag, value.is_some(), written);
            return None;
        }
        Some((flag, written))
    }

    /// `-f`, `-f=value`, `-fvalue`, `-abc`.
    fn short(&mut self, word: &ParsedArg<'_>) -> Waiting<'a> {
        let mut letters = word.to_short()?;
        while let Some(letter) = letters.next_flag() {
            let letter = letter.unwrap_or(char::REPLACEMENT_CHARACTER);
            let known = self.command.get_arguments().find(|arg| arg.get_short() == Some(letter));
            let Some(flag) = known else {
                // What follows may be its value, or more letters: it goes with it.
                self.unknown(&format!("-{letter}"), None);
                return None;
            };
            let written = OsString::from(format!("-{letter}"));
            // A switch takes a value behind an equals sign only; other letters behind it are flags.
            let rest = letters.clone().next_value_os().map(|rest| rest.to_string_lossy().into_owned());
            match rest {
                Some(rest) if takes_word(flag) || rest.starts_with('=') => {
                    self.understand(flag, true, format!("-{letter}{rest}").into());
                    return None;
                }
                None if takes_word(flag) => return Some((flag, written)),
                Some(_) | None => self.understand(flag, false, written),
            }
        }
        None
    }

    /// A word that is neither flag nor value.
    fn word(&mut self, text: &str) {
        if self.operands > 0 && self.may_be_an_operand(text) {
            self.operands -= 1;
            self.sorted.understood.push(text.into());
            self.before = Before::Nothing;
            return;
        }
        let write = match self.before {
            // It may be the value of the unknown flag, which is reported already.
            Before::Unknown => {
                self.before = Before::Nothing;
                return;
            }
            Before::Strays(count) => {
                self.before = Before::Strays(count + 1);
                if let Some((given, _)) = self.sorted.refused.last_mut().filter(|_| count <= SHOWN) {
                    given.push(' ');
                    given.push_str(if count < SHOWN { text } else { "…" });
                }
                return;
            }
            Before::Switch(flag) => after_switch(flag, text),
            Before::Value(_) if self.command.get_arguments().any(|arg| arg.get_long() == Some(text)) => None,
            Before::Value(flag) => after_value(flag),
            Before::Nothing => None,
        };
        let flags = || self.command.get_arguments().filter_map(Arg::get_long);
        let is_flag = || {
            let name = flags().find(|flag| *flag == text).or_else(|| Misspelt::nearest(text, flags()))?;
            Some(format!("needs dashes; did you mean --{name}?"))
        };
        let subcommands: Vec<&str> = self.command.get_subcommands().map(Command::get_name).collect();
        let unknown =
            || format!("is neither flag nor value nor one of {}; see --help", subcommands.join(", "));
        let why = write.or_else(is_flag).unwrap_or_else(unknown);
        self.refuse(text, &why);
        self.before = Before::Strays(1);
    }

    /// The word behind an unknown flag may be its value, and that behind a switch is one where it says yes or no.
    fn may_be_an_operand(&self, text: &str) -> bool {
        match self.before {
            Before::Nothing | Before::Value(_) | Before::Strays(_) => true,
            Before::Switch(flag) => after_switch(flag, text).is_none(),
            Before::Unknown => false,
        }
    }

    fn understand(&mut self, flag: &'a Arg, with_value: bool, written: OsString) {
        self.sorted.understood.push(written);
        self.before = if with_value { Before::Value(flag) } else { Before::Switch(flag) };
    }

    fn unknown(&mut self, given: &str, meant: Option<&str>) {
        let why = match meant {
            Some(meant) => format!("is not a flag; did you mean --{meant}?"),
            None => "is not a flag; see --help".to_owned(),
        };
        self.refuse(given, &why);
        self.before = Before::Unknown;
    }

    fn refuse(&mut self, given: &str, why: &str) {
        self.sorted.refused.push((given.to_owned(), Problem::Usage(why.to_owned())));
        self.before = Before::Nothing;
    }
}

/// Whether a flag's value may be the next word.
fn takes_word(flag: &Arg) -> bool {
    flag.get_action().takes_values() && !flag.is_require_equals_set()
}

/// What to write instead of a word behind a switch.
fn after_switch(flag: &Arg, text: &str) -> Option<String> {
    let name = flag.get_long()?;
    let value = match text.to_ascii_lowercase().as_str() {
        "yes" | "y" | "on" | "true" | "t" | "1" => "true",
        "no" | "n" | "off" | "false" | "f" | "0" => "false",
        _ => return None,
    };
    Some(format!("stands alone: a switch takes its value behind an equals sign; write --{name}={value}"))
}

/// What to write instead of words behind a flag and its value.
fn after_value(flag: &Arg) -> Option<String> {
    let name = flag.get_long()?;
    let setting = Setting::ALL.iter().find(|setting| setting.flag == Some(name))?;
    let dashes = setting.short.map_or_else(|| format!("--{name}"), |short| format!("-{short}"));
    let is_list = matches!(
        setting.kind,
        SettingKind::Ports | SettingKind::Ranges | SettingKind::Ids | SettingKind::Interfaces
    );
    let takes_star = setting.star == Star::Everything;
    let mut write = format!("follows the one value of --{name}: a list has commas and no blanks");
    if takes_star {
        let more = format!(", and an unquoted * was expanded by the shell; use {dashes} '*'");
        write.push_str(&more);
    }
    is_list.then_some(write)
}

#[cfg(test)]
mod tests {
    use crate::tests::PROGRAM;
    use std::ffi::OsString;

    /// What is understood, in one line; what is refused, a line each.
    fn sort(line: &str) -> (String, Vec<String>) {
        let sorted = sort_with(false, line);
        let understood: Vec<String> =
            sorted.understood.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let refused = sorted.refused.iter().map(|(given, problem)| format!("{given} {problem}"));
        (understood.join(" "), refused.collect())
    }

    fn sort_with(ignores_rest: bool, line: &str) -> super::ClassifiedArgs {
        let words = line.split(' ').filter(|word| !word.is_empty()).map(OsString::from);
        let mut command = PROGRAM.command_line().parser();
        command.build();
        super::sort(&command, ignores_rest, words)
    }

    #[test]
    fn what_is_behind_two_dashes_is_ignored_as_the_reference_does_and_nothing_before() {
        for (line, understood, ignored, refused) in [
            ("-b 80 -- word", "-b 80", "word", 0),
            ("-b 80 -n -- -b 90 --frob -- stray", "-b 80 -n", "-b 90 --frob -- stray", 0),
            ("--", "", "", 0),
            ("-- completion", "", "completion", 0),
            // It is the flag's value.
            ("-b -- -n", "-b -- -n", "", 0),
            ("--istio-inbound-ports -- -n -- x", "--istio-inbound-ports -- -n", "x", 0),
            // Before it, a stray word stays a mistake.
            ("-b 80 stray -- word", "-b 80", "word", 1),
            ("--frob -- word", "", "word", 1),
        ] {
            let sorted = sort_with(true, line);
            let told: Vec<String> =
                sorted.understood.iter().map(|word| word.to_string_lossy().into_owned()).collect();
            assert_eq!(
                (told.join(" ").as_str(), sorted.ignored.join(" ").as_str()),
                (understood, ignored),
                "{line}"
            );
            assert_eq!(sorted.refused.len(), refused, "{line}: {:?}", sorted.refused);
        }
    }

    #[test]
    fn what_the_parser_understands_stays_as_it_is() {
        for line in [
            "",
            "-b 80 -d -1 -n --dual-stack",
            "-b80 -d=22 -n=false --dual-stack=0 --istio-service-cidr=10.0.0.0/8",
            "--envoy-port 1 --envoy-port=2 -p 3",
            "--log_target stdout --log_target stderr --log_as_json",
            "-h --help -V --version",
            "-b -n",
        ] {
            assert_eq!(sort(line), (line.to_owned(), Vec::new()));
        }
        assert_eq!(sort("-nb 80"), ("-n -b 80".to_owned(), Vec::new()));
        assert_eq!(sort("-nb80"), ("-n -b80".to_owned(), Vec::new()));
    }

    #[test]
    fn every_word_that_is_not_understood_is_told() {
        let (understood, refused) = sort("--frob -b 80 --istio-inbound-port=90 stray -Q --dual-stack=0 -d");
        assert_eq!(understood, "-b 80 --dual-stack=0");
        assert_eq!(
            refused,
            [
                "--frob is not a flag; see --help",
                "--istio-inbound-port is not a flag; did you mean --istio-inbound-ports?",
                "-Q is not a flag; see --help",
                "-d lacks its value; see --help",
            ],
            "\"stray\" may be the value of the flag that is unknown"
        );
    }

    #[test]
    fn a_word_behind_a_switch_is_told_how_to_be_written() {
        let (understood, refused) = sort("--dual-stack yes -n no -b 80");
        assert_eq!(understood, "--dual-stack -n -b 80");
        assert!(
            refused[0].starts_with("yes ") && refused[0].ends_with("write --dual-stack=true"),
            "{refused:?}"
        );
        assert!(
            refused[1].starts_with("no ") && refused[1].ends_with("write --dry-run=false"),
            "{refused:?}"
        );
    }

    #[test]
    fn names_of_files_in_the_place_of_a_star_are_one_mistake() {
        let (understood, refused) = sort("-b bin boot dev etc home -i bin boot -m TPROXY");
        assert_eq!(understood, "-b bin -i bin -m TPROXY");
        assert_eq!(refused.len(), 2, "{refused:?}");
        assert!(
            refused[0].starts_with("boot dev etc … ") && refused[0].ends_with("use -b '*'"),
            "{refused:?}"
        );
        assert!(refused[1].starts_with("boot ") && refused[1].ends_with("use -i '*'"), "{refused:?}");
    }

    #[test]
    fn other_stray_words_are_told_what_they_may_be() {
        let told = |line: &str| sort(line).1.join("\n");
        assert!(told("dry-run").contains("did you mean --dry-run?"));
        assert!(told("-b 80 dry-run").contains("did you mean --dry-run?"));
        assert!(
            told("-d 80 90")
                .contains("follows the one value of --istio-local-exclude-ports: a list has commas")
        );
        assert!(told("-n extra").starts_with("extra is neither flag nor value nor one of "));
        assert!(told("--").contains("leave it out"));
        assert!(told("-").starts_with("- is neither"));
    }

    #[test]
    fn subcommands_are_left_to_the_parser() {
        let words = ["completion", "--frob"].map(OsString::from);
        let sorted = super::sort(&PROGRAM.command_line().parser(), true, words.clone());
        assert!(sorted.has_subcommand && sorted.understood == words && sorted.refused.is_empty());
        assert_eq!(sort("-b man").0, "-b man");
    }
}
