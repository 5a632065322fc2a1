//! The command line of a program, made from rows: flags, help, completions, manual, and the subcommands that all programs have.

use crate::{Pages, args, pages, rows::LOG_ROWS, safe_lines};
use clap::{
    Arg, ArgAction, ArgMatches, Command, ValueHint,
    builder::{PossibleValuesParser, StyledStr},
};
use clap_complete::Shell;
use redirect_core::values::Problem;
use settings_table::{GivenSetting, SettingSpec, ValueKind};
use std::{collections::BTreeMap, ffi::OsString, fmt::Write as _};

/// The heading of the flags that all programs have.
const LOGGING: &str = "Logging";

/// The command line of a program.
#[derive(Debug, Clone)]
pub struct CommandLine {
    /// The program's name.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub about: &'static str,
    /// Its version.
    pub version: &'static str,
    /// What help and the manual say besides the flags.
    pub pages: Pages,
    /// Its settings, without those of logging, which every program has.
    pub rows: Vec<SettingSpec>,
    /// The words that are not flags: what it works on, each with its name and what it is. Whether one must be given is for the program to say.
    pub operands: &'static [(&'static str, &'static str)],
    /// Whether words behind `--` are ignored, as by the reference's programs; otherwise `--` is a mistake.
    pub ignores_rest: bool,
    /// Subcommands of its own. They take the flags as well.
    pub commands: Vec<Command>,
}

/// The request of a command line.
#[derive(Debug)]
pub enum LineRequest {
    /// To print this on standard output, and end well.
    Print(String),
    /// To work.
    Work(ParsedArgs),
}

/// What a command line says, as texts.
#[derive(Debug, Clone, Default)]
pub struct ParsedArgs {
    /// The subcommand of the program's own, if one is given.
    pub command: Option<(String, ArgMatches)>,
    /// What it works on, in the order of the command line's operands.
    pub operands: Vec<String>,
    /// The flags that are given, without dashes, with their values.
    pub flags: BTreeMap<String, String>,
    /// Unknown words, with corrections.
    pub refused: Vec<(String, Problem)>,
    /// Words behind `--`, where they are ignored.
    pub ignored: Vec<String>,
}

impl ParsedArgs {
    /// The flags of logging that are given.
    pub fn given_of_logging<'a>(&self) -> impl Iterator<Item = GivenSetting<'a>> {
        LOG_ROWS.iter().filter_map(|row| {
            let flag = row.flag?;
            Some(GivenSetting { row, said: format!("flag --{flag}"), value: self.flags.get(flag)?.clone() })
        })
    }

    /// That words are ignored, if any are.
    #[must_use]
    pub fn ignored_words(&self) -> Option<String> {
        let words = self.ignored.join(" ");
        (!words.is_empty()).then(|| format!("command line: {words:?} is ignored, because it is behind --"))
    }
}

impl CommandLine {
    /// Reads a command line without the program's name.
    ///
    /// # Errors
    /// A subcommand that cannot be understood: what is wrong, for standard error.
    pub fn read(&self, args: impl IntoIterator<Item = OsString>) -> Result<LineRequest, String> {
        let sorter = self.bare_parser();
        let sorted = args::sort(&sorter, self.ignores_rest, args);
        let words: Vec<OsString> =
            std::iter::once(OsString::from(self.name)).chain(sorted.understood).collect();
        let parser = if sorted.has_subcommand { self.parser() } else { sorter };
        let matches = match parser.try_get_matches_from(&words) {
            Ok(matches) => matches,
            Err(error) if error.use_stderr() => return Err(safe_lines(error.to_string().trim_end())),
            Err(_) => return Ok(LineRequest::Print(self.help(&words))),
        };
        let flags = self.all_rows().filter_map(|row| {
            let values = matches.get_many::<String>(row.flag?)?;
            let text = values.map(String::as_str).collect::<Vec<_>>().join(",");
            Some((row.flag?.to_owned(), text))
        });
        let flags = flags.collect();
        let operands = self.operands.iter().filter_map(|(name, _)| matches.get_one::<String>(name).cloned());
        let operands = operands.collect();
        let command = match matches.subcommand() {
            Some((command, given)) if self.is_own(command) => Some((command.to_owned(), given.clone())),
            Some((command, given)) => return Ok(LineRequest::Print(self.generate(command, given))),
            None => None,
        };
        let (refused, ignored) = (sorted.refused, sorted.ignored);
        Ok(LineRequest::Work(ParsedArgs { command, operands, flags, refused, ignored }))
    }

    /// The definition of the command line.
    #[must_use]
    pub fn parser(&self) -> Command {
        self.definition(true).after_help(self.pages.examples_text() + &self.environment_only())
    }

    /// The same as far as words without a subcommand need it: nearly every start needs the names of the flags and not what
    /// help says of them, which takes longer to make. Flags for help and version are named here, because the parser adds its
    /// own only when it is built, and words are sorted before.
    fn bare_parser(&self) -> Command {
        let help = Arg::new("help").short('h').long("help").action(ArgAction::Help);
        let version = Arg::new("version").short('V').long("version").action(ArgAction::Version);
        self.definition(false).disable_help_flag(true).disable_version_flag(true).args([help, version])
    }

    /// What these words, which ask for help or the version, print.
    fn help(&self, words: &[OsString]) -> String {
        self.parser().try_get_matches_from(words).err().map_or_else(String::new, |help| help.to_string())
    }

    /// The definition, with what help says of each flag where it is explained.
    fn definition(&self, is_explained: bool) -> Command {
        let logging = LOG_ROWS.iter().filter_map(|row| {
            let arg = arg(row, is_explained)?.help_heading(LOGGING);
            let repeats = matches!(row.takes, ValueKind::List(_));
            Some(if repeats { arg.action(ArgAction::Append) } else { arg })
        });
        // Flags stand before or behind subcommands that do work; those that only print take none.
        let works = !self.commands.is_empty();
        let args = self
            .rows
            .iter()
            .filter_map(|row| arg(row, is_explained))
            .chain(logging)
            .map(|arg| arg.global(works));
        let operands = self.operands.iter().map(|(name, help)| Arg::new(*name).value_name(*name).help(*help));
        Command::new(self.name)
            .about(self.about)
            .version(self.version)
            .args_override_self(true)
            .args_conflicts_with_subcommands(!works)
            .disable_help_subcommand(true)
            .args(args)
            .args(operands)
            .subcommands(&self.commands)
            .subcommands(general_commands())
    }

    fn is_own(&self, command: &str) -> bool {
        self.commands.iter().any(|own| own.get_name() == command)
    }

    fn all_rows(&self) -> impl Iterator<Item = SettingSpec> {
        self.rows.iter().chain(LOG_ROWS).copied()
    }

    fn generate(&self, subcommand: &str, matches: &ArgMatches) -> String {
        match (subcommand, matches.try_get_one::<Shell>("shell")) {
            ("completion", Ok(Some(shell))) => pages::completions(*shell, self.completed(), self.name),
            ("version", _) => format!("{} {}\n", self.name, self.version),
            ("man", _) => self.pages.manual(self.parser()),
            _ => self.parser().render_long_help().to_string(),
        }
    }

    /// The command line as shells complete it: with the words that a flag takes. The parser does without, because what is
    /// wrong is reported with everything else that is.
    #[must_use]
    pub fn completed(&self) -> Command {
        self.all_rows().fold(self.parser(), |command, row| match (row.flag, row.takes.words()) {
            (Some(flag), Some(words)) => {
                command.mut_arg(flag, |arg| arg.value_parser(PossibleValuesParser::new(words)))
            }
            (Some(_) | None, _) => command,
        })
    }

    /// The settings that have no flag.
    fn environment_only(&self) -> String {
        let mut text = "Environment only:\n".to_owned();
        for row in self.rows.iter().filter(|row| row.flag.is_none()) {
            for name in row.env {
                let _ = writeln!(text, "  {name}\n          {}", row.description());
            }
        }
        text
    }
}

/// What every program does besides its work.
#[must_use]
pub fn general_commands() -> [Command; 4] {
    let shell = Arg::new("shell").required(true).value_parser(clap::value_parser!(Shell)).help("The shell");
    [
        Command::new("help").about("Print this"),
        Command::new("version").about("Print the version"),
        Command::new("man").about("Print the manual page (man 8 form)"),
        Command::new("completion").about("Print completions for a shell").arg(shell),
    ]
}

fn arg(row: &SettingSpec, is_explained: bool) -> Option<Arg> {
    let flag = row.flag?;
    let help = if is_explained { help(row).into() } else { StyledStr::new() };
    let arg = Arg::new(flag).long(flag).short(row.short).help(help).value_name(row.takes.value_name());
    Some(match row.takes {
        // `--flag` or `--flag=value`.
        ValueKind::Switch => {
            arg.num_args(0..=1).require_equals(true).default_missing_value("true").action(ArgAction::Set)
        }
        ValueKind::Path => text(arg).value_hint(ValueHint::AnyPath),
        ValueKind::Text(_)
        | ValueKind::Choice(_)
        | ValueKind::Number
        | ValueKind::List(_)
        | ValueKind::Duration
        | ValueKind::Levels => text(arg),
    })
}

fn help(row: &SettingSpec) -> String {
    let mut help = row.description();
    if !row.env.is_empty() {
        let _ = write!(help, " [env: {}]", row.env.join(", "));
    }
    let is_obvious = row.default.is_empty() || row.takes == ValueKind::Switch && row.default == "false";
    if !is_obvious {
        let _ = write!(help, " [default: {}]", row.default);
    }
    help
}

fn text(arg: Arg) -> Arg {
    arg.num_args(1).allow_hyphen_values(true).action(ArgAction::Set)
}
