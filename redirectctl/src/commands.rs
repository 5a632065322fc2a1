//! The command line: the commands, and what each does with its words.

mod bundle;
mod cni;
mod given;
mod in_force;
mod planned;
mod table;
mod target;
mod watch;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;
use logging::DEFAULT_SCOPE;
use presentation::Printable;
use settings_cli::{LineRequest, Program};

pub use given::Given;
pub use table::{COMMANDS, Definition, PROGRAM};

use crate::error::PodInputError;
use crate::text_writer::short;
use crate::{FAILED, FINE, why};

/// Where runtimes keep pods' network namespaces.
pub(crate) const NETNS_DIR: &str = "/var/run/netns";

/// How many errors are reported, and how much of each: an annotation may have 256 KiB.
const MOST_ERRORS: usize = 50;
const LONGEST_ERROR: usize = 2000;

/// What a command answers: text for standard output, and the exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandOutput {
    /// For standard output.
    pub text: Printable,
    /// The exit code.
    pub code: u8,
}

/// Runs the program.
pub(crate) fn run(words: Vec<OsString>, env: Vec<(OsString, OsString)>) -> ExitCode {
    let mut words = words.into_iter();
    let first = words.next().and_then(|word| word.into_string().ok()).unwrap_or_default();
    if let Some(command) =
        COMMANDS.iter().find(|command| command.name() == first || command.alias == Some(&*first))
    {
        return run_command(command, words.collect(), env);
    }
    let rest: Vec<String> = words.filter_map(|word| word.into_string().ok()).collect();
    match general(&first, &rest) {
        Ok(text) => settings_cli::print(&text),
        Err(text) => settings_cli::complain(&text),
    }
}

/// The subcommands that all programs have.
fn general(first: &str, rest: &[String]) -> Result<String, String> {
    match (first, rest) {
        ("help" | "--help" | "-h", []) => Ok(whole().render_long_help().to_string()),
        ("version" | "--version" | "-V", []) => Ok(format!("redirectctl {}\n", env!("CARGO_PKG_VERSION"))),
        ("man", []) => Ok(PROGRAM.manual(whole())),
        ("completion", [shell]) => {
            let shell: Shell =
                shell.parse().map_err(|_| format!("{shell:?} is not a supported shell: bash, zsh, fish"))?;
            Ok(settings_cli::completions(shell, whole(), "redirectctl"))
        }
        ("completion", _) => Err("completion needs a shell: bash, zsh or fish".to_owned()),
        ("", _) => Err(whole().render_help().to_string()),
        (word, _) => {
            let names: Vec<&str> = COMMANDS.iter().map(Definition::name).collect();
            Err(format!("redirectctl: {word:?} is not one of {}; see redirectctl --help", names.join(", ")))
        }
    }
}

/// The whole command line, for help, manual and completions.
#[must_use]
pub fn whole() -> Command {
    let commands = COMMANDS.iter().map(|command| command.line().completed().name(command.name()));
    Command::new("redirectctl")
        .about("Shows what is planned, in force and wrong in pods' network namespaces. It never changes anything.")
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_subcommand(true)
        .subcommands(commands)
        .subcommands(settings_cli::general_commands())
        .after_help(PROGRAM.examples_text() + "redirectctl COMMAND --help shows the flags and examples of a command.\n")
}

fn run_command(command: &Definition, words: Vec<OsString>, env: Vec<(OsString, OsString)>) -> ExitCode {
    let line = match command.line().read(words) {
        Ok(LineRequest::Work(line)) => line,
        Ok(LineRequest::Print(text)) => return settings_cli::print(&text),
        Err(usage) => return settings_cli::complain(&usage),
    };
    let (operands, flags) = (line.operands.clone(), line.flags.clone());
    let text_env: BTreeMap<String, String> = env
        .iter()
        .filter_map(|(name, value)| {
            Some((name.clone().into_string().ok()?, value.clone().into_string().ok()?))
        })
        .collect();
    let input = command.program().input(&line, env);
    let logs = match logging::init(input.log.clone()) {
        Ok(logs) => logs,
        Err(error) => return settings_cli::complain(&error.to_string()),
    };
    if command.takes_settings {
        for notice in input.notices() {
            log::warn!(target: DEFAULT_SCOPE, "{notice}");
        }
    }
    let layout = given::layout(&flags, &text_env);
    let given = Given { operands, flags, input, env: text_env, layout };
    let code = match answer(command, &given) {
        Ok(answer) => {
            settings_cli::print(&answer.text);
            answer.code
        }
        Err(PodInputError(all)) => {
            for error in all.iter().take(MOST_ERRORS) {
                log::error!(target: DEFAULT_SCOPE, "{}", short(error, LONGEST_ERROR));
            }
            if let Some(more) = all.len().checked_sub(MOST_ERRORS).filter(|more| *more > 0) {
                log::error!(target: DEFAULT_SCOPE, "and {more} more errors like these");
            }
            FAILED
        }
    };
    logs.flush();
    ExitCode::from(code)
}

/// What a command answers.
///
/// # Errors
/// Everything wrong with its words, or why it could not be done.
fn answer(command: &Definition, given: &Given) -> Result<CommandOutput, PodInputError> {
    let mut wrong: Vec<String> = given.input.settings.refused().iter().map(ToString::to_string).collect();
    wrong.extend(command.missing(&given.operands));
    wrong.extend(command.wrong_words(given));
    if command.takes_settings {
        wrong.extend(given.wrong_settings());
    }
    if !wrong.is_empty() {
        return Err(PodInputError(wrong));
    }
    (command.run)(given)
}

/// `why`
fn explain(given: &Given) -> Result<CommandOutput, PodInputError> {
    let text = match given.operands.first() {
        Some(word) => why::explain(word, given.layout).map_err(PodInputError::of)?,
        None => why::list(given.layout),
    };
    Ok(CommandOutput { text, code: FINE })
}

impl Definition {
    /// The program that reads its settings.
    #[must_use]
    pub fn program(&self) -> Program {
        Program {
            name: self.name(),
            about: self.about,
            version: env!("CARGO_PKG_VERSION"),
            pages: self.pages,
            statuses: presentation::flags::STATUSES,
        }
    }
}
