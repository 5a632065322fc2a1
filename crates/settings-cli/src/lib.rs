//! Command line and environment, from redirect-core's settings table and logging's flag table.
//!
//! The tables list the flags and variables; nothing is defined here a second time. Flags are read as the
//! reference reads them: a switch may stand alone or be given `=value`, the last of a repeated flag wins, a value may
//! begin with a dash.

mod args;
mod command;
mod options;
mod pages;
mod rows;

pub use command::{CommandLine, LineRequest, ParsedArgs, general_commands};
pub use options::{Action, RunOptions, ValidationOptions};
pub use pages::{Pages, completions};
pub use rows::{IPTABLES, LOG_ROWS, VALIDATION, row as setting_row};

use logging::LevelError;
use redirect_core::{
    settings::{InputErrors, Key, Misspelt, RawSettings, Setting, Source},
    values::{Problem, parse_bool},
};
use settings_table::{GivenSetting, NotInForce, SettingSpec, Status, ValueKind};
use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    io::{self, ErrorKind, Write as _},
    process::ExitCode,
};

/// A program that takes the settings.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Its name.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub about: &'static str,
    /// Its version.
    pub version: &'static str,
    /// What help and the manual say besides the flags.
    pub pages: Pages,
    /// The settings that are not in force in this program.
    pub statuses: &'static [(Key, Status)],
}

/// How a command line of the sidecar injector's begins: it is written for an image whose entry point takes the program's name first.
const INJECTED_WORD: &str = "istio-iptables";

/// What a command line and an environment ask for.
#[derive(Debug)]
pub enum ParsedCommand {
    /// To run with these settings.
    Run(Box<ProgramInput>),
    /// To print this on standard output, and end well.
    Print(String),
}

/// What a program runs with.
#[derive(Debug)]
pub struct ProgramInput {
    /// The settings, each with where it came from; and what was said and is not a setting's.
    pub settings: RawSettings,
    /// How and where to log.
    pub log: logging::Config,
    /// Variables that look like settings and are none.
    pub misspelt: Vec<Misspelt>,
    /// What was asked for and is not done.
    pub not_in_force: Vec<NotInForce>,
    /// That words of the command line are ignored, if any are.
    pub ignored: Option<String>,
}

impl ProgramInput {
    /// What of it has no effect, to be warned of.
    pub fn notices(&self) -> impl Iterator<Item = String> {
        let misspelt = self.misspelt.iter().map(ToString::to_string);
        let not_in_force = self.not_in_force.iter().map(ToString::to_string);
        self.ignored.clone().into_iter().chain(misspelt).chain(not_in_force)
    }
}

impl Program {
    /// The program's `main`: reads the command line (without the program's name) and the environment, prints what was
    /// asked for, or starts the log, warns of misspelt names and of settings that are not in force, and runs. A command line that cannot be understood ends with
    /// exit code 1, like every other wrong input.
    pub fn main(
        &self,
        args: impl IntoIterator<Item = OsString>,
        run: impl FnOnce(&RawSettings) -> ExitCode,
    ) -> ExitCode {
        let input = match self.read(args, env::vars_os()) {
            Ok(ParsedCommand::Run(input)) => input,
            Ok(ParsedCommand::Print(text)) => return print(&text),
            Err(usage) => return complain(&usage),
        };
        let logs = match logging::init(input.log.clone()) {
            Ok(logs) => logs,
            Err(error) => return complain(&error.to_string()),
        };
        for notice in input.notices() {
            log::warn!(target: logging::DEFAULT_SCOPE, "{notice}");
        }
        let code = run(&input.settings);
        logs.flush();
        code
    }

    /// Reads a command line (without the program's name) and an environment. Unknown flags and stray words are
    /// noted in the settings, to be reported with everything else that is wrong; except a first word `istio-iptables`.
    ///
    /// # Errors
    /// A subcommand that cannot be understood: what is wrong, for standard error.
    pub fn read(
        &self,
        args: impl IntoIterator<Item = OsString>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<ParsedCommand, String> {
        let mut args = args.into_iter().peekable();
        let _ = args.next_if(|first| first == INJECTED_WORD);
        let line = match self.command_line().read(args)? {
            LineRequest::Print(text) => return Ok(ParsedCommand::Print(text)),
            LineRequest::Work(line) => line,
        };
        Ok(ParsedCommand::Run(Box::new(self.input(&line, env))))
    }

    /// The settings of a command line that is read already, and of an environment: for programs whose command line has more
    /// than the settings.
    pub fn input(
        &self,
        line: &ParsedArgs,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> ProgramInput {
        let flag = |name: &str| line.flags.get(name).cloned();
        let env: Vec<(OsString, OsString)> = env.into_iter().collect();
        let variable = |wanted: &str| {
            env.iter().find(|(name, _)| name.as_os_str() == wanted).map(|(_, value)| lossy(value))
        };
        let mut settings = RawSettings::new();
        let ignored = line.ignored_words();
        for (given, problem) in &line.refused {
            settings.refuse(Source::CommandLine, given, problem.clone());
        }
        settings.read_environment(|_| true, variable);
        for setting in said_by_flags(&line.flags) {
            if let Some((flag, text)) = setting.flag.zip(setting.flag.and_then(flag)) {
                settings.set(setting.key, text, Source::Flag(flag));
            }
        }
        let log = logging::Config::from_flags(flag).unwrap_or_else(|errors| {
            for error in errors {
                refuse(&mut settings, error);
            }
            logging::Config::default()
        });
        let misspelt = Misspelt::variables(env.iter().filter_map(|(name, _)| name.to_str()), |_| true);
        let not_in_force = self.judge(&mut settings, line);
        ProgramInput { settings, log, misspelt, not_in_force, ignored }
    }

    /// Refuses what this program never does, and notes what it does not do.
    fn judge(&self, settings: &mut RawSettings, line: &ParsedArgs) -> Vec<NotInForce> {
        let rows = Setting::ALL.iter().map(|setting| (setting.key, rows::row(setting, self.statuses)));
        let rows: Vec<(Key, SettingSpec)> = rows.collect();
        let mut given = Vec::new();
        for (key, row) in &rows {
            let (value, source) = settings.get(*key);
            if source == Source::Default {
                continue;
            }
            let value = value.to_owned();
            match refusal(row, &value) {
                Some(why) => settings.refuse(source, &value, Problem::Contradiction(why)),
                None => given.push(GivenSetting { row, said: source.to_string(), value }),
            }
        }
        given.extend(line.given_of_logging());
        NotInForce::among(&given)
    }

    /// The command line.
    #[must_use]
    pub fn command_line(&self) -> CommandLine {
        let Self { name, about, version, pages, statuses } = *self;
        let rows = Setting::ALL.iter().map(|setting| rows::row(setting, statuses)).collect();
        let (operands, ignores_rest, commands) = (&[][..], true, Vec::new());
        CommandLine { name, about, version, pages, rows, operands, ignores_rest, commands }
    }
}

/// The settings that flags are about: of those with one flag the sidecar's, and with `--ambient` ambient mode's.
fn said_by_flags(flags: &BTreeMap<String, String>) -> impl Iterator<Item = &'static Setting> {
    let is_ambient = Key::Ambient
        .setting()
        .flag
        .and_then(|flag| flags.get(flag))
        .is_some_and(|text| parse_bool(text) == Ok(true));
    let (others, own) =
        if is_ambient { (Setting::ALL, Setting::AMBIENT) } else { (Setting::AMBIENT, Setting::ALL) };
    let is_shared = |setting: &&Setting| own.iter().any(|one| one.flag == setting.flag);
    own.iter().chain(others.iter().filter(move |setting| setting.flag.is_some() && !is_shared(setting)))
}

/// Why a program refuses a value, if it does.
fn refusal(row: &SettingSpec, value: &str) -> Option<&'static str> {
    match row.status {
        Status::Refused(why) => {
            (row.takes != ValueKind::Switch || parse_bool(value) == Ok(true)).then_some(why)
        }
        Status::InForce | Status::WithoutEffect(_) | Status::NotImplemented(_) => None,
    }
}

fn refuse(settings: &mut RawSettings, error: logging::ConfigError) {
    let (flag, value, problem) = match error {
        logging::ConfigError::Level { flag, error: LevelError(value) } => (
            flag,
            value,
            Problem::Usage("is not a log level such as info or default:debug; see --help".to_owned()),
        ),
        logging::ConfigError::Bool { flag, value } => (flag, value, Problem::NotABool),
    };
    settings.refuse(Source::Flag(flag), &value, problem);
}

fn lossy(text: &OsStr) -> String {
    text.to_string_lossy().into_owned()
}

/// Prints what the user asked for on standard output, which belongs to that. A reader that has gone away is not an error.
pub fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            complain(&format!("cannot write to standard output: {error}"))
        }
        Ok(()) | Err(_) => ExitCode::SUCCESS,
    }
}

/// Reports errors before the log exists: on standard error, in lines that steer no terminal.
pub fn complain(text: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "{}", safe_lines(text));
    ExitCode::FAILURE
}

/// Lines free of control characters: what is wrong with a command line may quote it.
fn safe_lines(text: &str) -> String {
    text.split('\n').map(logging::escaped).collect::<Vec<_>>().join("\n")
}

/// Logs everything wrong with an input, a line each.
pub fn report(errors: &InputErrors) {
    for error in errors {
        log::error!(target: logging::DEFAULT_SCOPE, "{error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::settings::Key;

    pub(crate) const PROGRAM: Program = Program {
        name: "istio-iptables",
        about: "About.",
        version: "1.2.3",
        pages: Pages {
            examples: &[("Look before it leaps", "istio-iptables -b '*' -n")],
            exit_status: &[(0, "Done."), (1, "Not done.")],
            files: &[("/etc/resolv.conf", "The servers.")],
            see_also: &["nft(8)"],
        },
        statuses: IPTABLES,
    };

    #[test]
    fn a_usage_error_steers_no_terminal() {
        for word in ["\u{1b}[2J", "\u{1b}]0;owned\u{7}", "a\rb", "\u{202e}", "\u{2066}"] {
            let usage = read(&["completion", word]).expect_err("no shell");
            let harmful = |c: char| c.is_control() && c != '\n' || matches!(c, '\u{202e}' | '\u{2066}');
            assert!(!usage.contains(harmful), "{usage:?}");
            assert!(usage.contains(&word.escape_default().to_string()), "{usage}");
        }
    }

    fn read_with(args: &[&str], env: &[(&str, &str)]) -> Result<ParsedCommand, String> {
        let env = env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        PROGRAM.read(args.iter().map(OsString::from), env)
    }

    fn read(args: &[&str]) -> Result<ParsedCommand, String> {
        read_with(args, &[("PROXY_UID", "7")])
    }

    fn settings(args: &[&str]) -> RawSettings {
        match read(args) {
            Ok(ParsedCommand::Run(input)) => input.settings,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        PROGRAM.command_line().parser().debug_assert();
    }

    #[test]
    fn flags_win_over_the_environment() {
        assert_eq!(settings(&[]).get(Key::ProxyUid), ("7", Source::Environment("PROXY_UID")));
        assert_eq!(settings(&["-u", "8"]).get(Key::ProxyUid), ("8", Source::Flag("proxy-uid")));
    }

    #[test]
    fn switches_stand_alone_or_take_a_value_behind_an_equals_sign() {
        for (args, text) in [
            (vec!["--dual-stack"], "true"),
            (vec!["--dual-stack=false"], "false"),
            (vec!["-n"], "false"),
            (vec!["--dual-stack", "--dual-stack=0"], "0"),
        ] {
            assert_eq!(settings(&args).get(Key::DualStack).0, text, "{args:?}");
        }
        assert_eq!(settings(&["-n"]).get(Key::DryRun).0, "true");
    }

    #[test]
    fn values_may_be_empty_or_begin_with_a_dash() {
        assert_eq!(settings(&["-b", "", "-d", "-1"]).get(Key::InboundExcludePorts).0, "-1");
        assert_eq!(settings(&["-b", ""]).get(Key::InboundPorts), ("", Source::Flag("istio-inbound-ports")));
    }

    #[test]
    fn what_is_not_understood_is_told_with_everything_else() {
        let args = [
            "-b",
            "http",
            "extra",
            "--frobnicate",
            "--log_as_json=maybe",
            "--log_output_level",
            "loud",
            "--probe-timeout",
            "5",
            "-d",
        ];
        let settings = settings(&args);
        let told = RunOptions::parse(&settings).unwrap_err();
        let sources: Vec<String> =
            told.iter().map(|error| format!("{}: {}", error.source, error.value)).collect();
        assert_eq!(
            sources,
            [
                "command line: extra",
                "command line: --frobnicate",
                "command line: -d",
                "flag --log_output_level: loud",
                "flag --log_as_json: maybe",
                "flag --probe-timeout: 5",
            ]
        );
        // What was understood is there to be checked as well.
        assert_eq!(settings.get(Key::InboundPorts).0, "http");
    }

    #[test]
    fn what_is_behind_two_dashes_is_warned_of_and_changes_nothing() {
        let Ok(ParsedCommand::Run(input)) = read(&["-b", "80", "--", "-b", "90", "word"]) else {
            panic!("it runs")
        };
        assert_eq!(input.settings.get(Key::InboundPorts).0, "80");
        assert_eq!(RunOptions::parse(&input.settings).err().map(|told| told.iter().count()), None);
        let notices: Vec<String> = input.notices().collect();
        assert_eq!(notices, ["command line: \"-b 90 word\" is ignored, because it is behind --"]);
    }

    #[test]
    fn the_injectors_first_word_is_the_programs_name() {
        let named = settings(&[INJECTED_WORD, "-b", "80"]);
        assert_eq!(named.get(Key::InboundPorts).0, "80");
        assert_eq!(RunOptions::parse(&named).err().map(|told| told.iter().count()), None);
        // Once, and nowhere else.
        for args in [&[INJECTED_WORD, INJECTED_WORD][..], &["-b", "80", INJECTED_WORD]] {
            let told = RunOptions::parse(&settings(args)).expect_err("a stray word");
            assert_eq!(told.iter().map(|error| error.value.as_str()).collect::<Vec<_>>(), [INJECTED_WORD]);
        }
    }

    #[test]
    fn misspelt_variables_are_found() {
        let Ok(ParsedCommand::Run(input)) = read_with(&[], &[("ISTIO_INBOUND_PORT", "80"), ("PATH", "/bin")])
        else {
            panic!("it runs")
        };
        let told: Vec<String> = input.misspelt.iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            [
                "environment variable ISTIO_INBOUND_PORT is not a setting and is ignored; did you mean ISTIO_INBOUND_PORTS?"
            ]
        );
    }

    #[test]
    fn what_is_not_in_force_is_told_in_the_words_of_help() {
        let told = |args: &[&str], env: &[(&str, &str)]| match read_with(args, env) {
            Ok(ParsedCommand::Run(input)) => {
                input.not_in_force.iter().map(ToString::to_string).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        };
        let Ok(ParsedCommand::Print(help)) = read(&["--help"]) else { panic!("help is printed") };
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for (key, status) in IPTABLES {
            let flag = key.setting().flag.unwrap_or_default();
            let told = told(&[&format!("--{flag}")], &[]);
            let Status::WithoutEffect(why) = status else { panic!("{key:?}") };
            assert_eq!(told, [format!("flag --{flag} has no effect: {why}")]);
            assert!(help.contains(&status.to_string()), "{status} is not in {help}");
        }
        assert_eq!(
            told(&["--cni-mode=false"], &[("RECONCILE", "0")]),
            [""; 0],
            "what is off asks for nothing"
        );
        let traces = told(&["--log_stacktrace_level", "default:debug"], &[]);
        assert_eq!(traces, ["flag --log_stacktrace_level has no effect: stack traces are never logged"]);
    }

    #[test]
    fn what_a_program_never_does_is_refused() {
        let program = Program { statuses: VALIDATION, ..PROGRAM };
        let read = |value: &str| match program.read([OsString::from(format!("--cleanup-only={value}"))], []) {
            Ok(ParsedCommand::Run(input)) => {
                RunOptions::parse(&input.settings).map_err(|errors| errors.to_string())
            }
            other => panic!("{other:?}"),
        };
        let refused = read("true").unwrap_err();
        assert!(refused.starts_with("flag --cleanup-only: \"true\" asks to remove rules"), "{refused}");
        assert!(read("false").is_ok());
        assert!(read("maybe").unwrap_err().contains("\"maybe\""));
    }

    #[test]
    fn subcommands_print() {
        let print = |args: &[&str]| match read(args) {
            Ok(ParsedCommand::Print(text)) => text,
            other => panic!("{args:?}: {other:?}"),
        };
        assert_eq!(print(&["version"]), "istio-iptables 1.2.3\n");
        assert_eq!(print(&["--version"]), "istio-iptables 1.2.3\n");
        assert!(print(&["help"]).contains("istio-iptables -b '*' -n"));
        assert!(print(&["help"]).contains("ENVOY_USER"));
        for args in
            [&["completion"][..], &["completion", "tcsh"], &["--dual-stack", "completion", "bash", "x"]]
        {
            assert!(!matches!(read(args), Ok(ParsedCommand::Print(_))), "{args:?}");
        }
    }

    #[test]
    fn help_names_every_flag_and_variable() {
        let Ok(ParsedCommand::Print(help)) = read(&["--help"]) else { panic!("help is printed") };
        for setting in Setting::ALL {
            for name in setting.env.iter().chain(setting.flag.iter()) {
                assert!(help.contains(name), "{name} is missing");
            }
        }
    }

    #[test]
    fn completions_and_the_manual_are_generated() {
        for shell in ["bash", "zsh", "fish"] {
            let Ok(ParsedCommand::Print(text)) = read(&["completion", shell]) else { panic!("{shell}") };
            assert!(text.contains("istio-service-cidr"), "{shell}");
        }
        let Ok(ParsedCommand::Print(text)) = read(&["man"]) else { panic!("man") };
        assert!(text.contains("istio\\-service\\-cidr") && text.starts_with(".ie"), "{text}");
        for section in ["EXIT STATUS", "FILES", "EXAMPLES", "SEE ALSO", "ENVIRONMENT"] {
            assert_eq!(
                text.matches(&format!(".SH \"{section}\"")).count()
                    + text.matches(&format!(".SH {section}\n")).count(),
                1,
                "{section}"
            );
        }
        assert!(text.contains("istio\\-iptables \\-b") && text.contains("nft(8)"), "{text}");
    }

    #[test]
    fn completions_know_the_words_of_a_flag() {
        let script = |shell| match read(&["completion", shell]) {
            Ok(ParsedCommand::Print(text)) => text,
            other => panic!("{other:?}"),
        };
        let bash = script("bash");
        let behind = |flag: &str| {
            let at =
                bash.find(&format!("                {flag})")).unwrap_or_else(|| panic!("{flag} in {bash}"));
            bash[at..].lines().nth(1).unwrap_or_default().trim().to_owned()
        };
        assert_eq!(behind("--backend"), "COMPREPLY=($(compgen -W \"auto netlink restore\" -- \"${cur}\"))");
        assert!(behind("--termination-log").contains("compgen -f"), "a path is completed with files");
        assert!(!bash.contains("                --dual-stack)"), "a switch has no next word");
        let zsh = script("zsh");
        assert!(
            zsh.lines().any(|line| line.contains("--dual-stack=") && line.contains("(true false)")),
            "{zsh}"
        );
        assert!(
            zsh.lines().any(|line| line.contains("--backend=") && line.contains("(auto netlink restore)"))
        );
        let fish = script("fish");
        let line = |flag: &str| {
            let wanted = format!("-l {flag} ");
            fish.lines().find(|line| line.contains(&wanted)).unwrap_or_else(|| panic!("{flag}")).to_owned()
        };
        assert!(
            line("backend").contains("netlink") && line("backend").contains(" -f"),
            "{}",
            line("backend")
        );
        assert!(!line("dual-stack").contains(" -r"), "{}", line("dual-stack"));
    }
}
