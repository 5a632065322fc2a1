//! Command line and environment, from redirect-core's settings table and logging's flag table.
//!
//! The tables say which flags and variables there are; nothing is defined here a second time. Flags are read as the
//! reference reads them: a switch may stand alone or be given `=value`, the last of a repeated flag wins, a value may
//! begin with a dash.

mod options;
mod pages;
mod reference;
mod words;

pub use options::{Action, RunOptions, Validation};
pub use pages::{Pages, completions};
pub use reference::reference;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, builder::PossibleValuesParser};
use clap_complete::Shell;
use logging::LevelError;
use redirect_core::{
    settings::{InputErrors, Kind, Misspelt, RawSettings, SETTINGS, Setting, Source, misspelt_variables},
    values::Problem,
};
use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fmt::Write as _,
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
}

/// What a command line and an environment ask for.
#[derive(Debug)]
pub enum Asked {
    /// To run with these settings.
    Run(Box<Input>),
    /// To print this on standard output, and end well.
    Print(String),
}

/// What a program runs with.
#[derive(Debug)]
pub struct Input {
    /// The settings, each with where it came from; and what was said and is no setting's.
    pub settings: RawSettings,
    /// How and where to log.
    pub log: logging::Config,
    /// Variables that look like settings and are none.
    pub misspelt: Vec<Misspelt>,
}

/// A subcommand that cannot be understood: what is wrong, for standard error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageError(pub String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.trim_end())
    }
}

impl std::error::Error for UsageError {}

impl Program {
    /// The program's `main`: reads the command line (without the program's name) and the environment, prints what was
    /// asked for, or starts the log, warns of misspelt names and runs. A command line that cannot be understood ends with
    /// exit code 1, like every other wrong input.
    pub fn main(
        &self,
        args: impl IntoIterator<Item = OsString>,
        run: impl FnOnce(&RawSettings) -> ExitCode,
    ) -> ExitCode {
        let input = match self.read(args, env::vars_os()) {
            Ok(Asked::Run(input)) => input,
            Ok(Asked::Print(text)) => return print(&text),
            Err(usage) => return complain(&usage.to_string()),
        };
        let logs = match logging::init(input.log) {
            Ok(logs) => logs,
            Err(error) => return complain(&error.to_string()),
        };
        for misspelt in &input.misspelt {
            log::warn!(target: logging::DEFAULT_SCOPE, "{misspelt}");
        }
        let code = run(&input.settings);
        logs.flush();
        code
    }

    /// Reads a command line (without the program's name) and an environment. Flags that nobody knows and stray words are
    /// noted in the settings, to be told with everything else that is wrong.
    ///
    /// # Errors
    /// A subcommand that cannot be understood.
    pub fn read(
        &self,
        args: impl IntoIterator<Item = OsString>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Asked, UsageError> {
        let mut command = self.command();
        command.build();
        let sorted = words::sort(&command, args);
        let name = std::iter::once(OsString::from(self.name));
        let matches = match command.try_get_matches_from(name.chain(sorted.understood)) {
            Ok(matches) => matches,
            Err(error) if error.use_stderr() => return Err(UsageError(error.to_string())),
            Err(help) => return Ok(Asked::Print(help.to_string())),
        };
        if let Some((name, matches)) = matches.subcommand() {
            return Ok(Asked::Print(self.generate(name, matches)));
        }
        let env: BTreeMap<String, String> =
            env.into_iter().map(|(name, value)| (lossy(name), lossy(value))).collect();
        let mut settings = RawSettings::new();
        for (given, problem) in sorted.refused {
            settings.refuse(Source::CommandLine, &given, problem);
        }
        settings.read_environment(|_| true, |name| env.get(name).cloned());
        for setting in SETTINGS {
            if let Some((flag, text)) = setting.flag.zip(given(&matches, setting.flag)) {
                settings.set(setting.key, text, Source::Flag(flag));
            }
        }
        let log = logging::Config::from_flags(|name| given(&matches, Some(name))).unwrap_or_else(|errors| {
            for error in errors {
                refuse(&mut settings, error);
            }
            logging::Config::default()
        });
        let misspelt = misspelt_variables(env.keys().map(String::as_str), |_| true);
        Ok(Asked::Run(Box::new(Input { settings, log, misspelt })))
    }

    /// The definition of the command line.
    #[must_use]
    pub fn command(&self) -> Command {
        let shells =
            Arg::new("shell").required(true).value_parser(clap::value_parser!(Shell)).help("The shell");
        Command::new(self.name)
            .about(self.about)
            .version(self.version)
            .args_override_self(true)
            .args_conflicts_with_subcommands(true)
            .disable_help_subcommand(true)
            .after_help(self.pages.examples_text() + &environment_only())
            .args(SETTINGS.iter().filter_map(setting_arg))
            .args(logging::FLAGS.iter().map(log_arg))
            .subcommand(Command::new("help").about("Print this"))
            .subcommand(Command::new("version").about("Print the version"))
            .subcommand(Command::new("man").about("Print the manual page (man 8 form)"))
            .subcommand(Command::new("completion").about("Print completions for a shell").arg(shells))
    }

    fn generate(&self, subcommand: &str, matches: &ArgMatches) -> String {
        match (subcommand, matches.try_get_one::<Shell>("shell")) {
            ("completion", Ok(Some(shell))) => pages::completions(*shell, self.completed(), self.name),
            ("version", _) => format!("{} {}\n", self.name, self.version),
            ("man", _) => self.pages.manual(self.command()),
            _ => self.command().render_long_help().to_string(),
        }
    }

    /// The command line as shells complete it: with the words that a flag takes. The parser does without, because what is
    /// wrong is told with everything else that is.
    fn completed(&self) -> Command {
        SETTINGS.iter().fold(self.command(), |command, setting| match (setting.flag, setting.kind) {
            (Some(flag), Kind::Choice(words)) => {
                command.mut_arg(flag, |arg| arg.value_parser(PossibleValuesParser::new(words)))
            }
            (Some(flag), Kind::Bool) => {
                command.mut_arg(flag, |arg| arg.value_parser(PossibleValuesParser::new(["true", "false"])))
            }
            _ => command,
        })
    }
}

fn refuse(settings: &mut RawSettings, error: logging::ConfigError) {
    let (flag, value, problem) = match error {
        logging::ConfigError::Level { flag, error: LevelError(value) } => (
            flag,
            value,
            Problem::Usage("is no log level such as info or default:debug; see --help".to_owned()),
        ),
        logging::ConfigError::Bool { flag, value } => (flag, value, Problem::NotABool),
    };
    settings.refuse(Source::Flag(flag), &value, problem);
}

fn lossy(text: OsString) -> String {
    text.into_string().unwrap_or_else(|text| text.to_string_lossy().into_owned())
}

/// Standard output belongs to what the user asked for. A reader that has gone away is no failure.
fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            complain(&format!("cannot write to standard output: {error}"))
        }
        Ok(()) | Err(_) => ExitCode::SUCCESS,
    }
}

/// What goes wrong before there is a log goes to standard error as it is.
fn complain(text: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "{text}");
    ExitCode::FAILURE
}

/// Logs everything wrong with an input, a line each.
pub fn report(errors: &InputErrors) {
    for error in errors {
        log::error!(target: logging::DEFAULT_SCOPE, "{error}");
    }
}

/// What the command line gives for a flag; nothing where only a default holds.
fn given(matches: &ArgMatches, flag: Option<&str>) -> Option<String> {
    let values = matches.get_many::<String>(flag?)?;
    Some(values.map(String::as_str).collect::<Vec<_>>().join(","))
}

fn setting_arg(setting: &Setting) -> Option<Arg> {
    let flag = setting.flag?;
    let mut help = setting.meaning.to_owned();
    if !setting.env.is_empty() {
        let _ = write!(help, " [env: {}]", setting.env.join(", "));
    }
    if !setting.default.is_empty() && setting.kind != Kind::Bool {
        let _ = write!(help, " [default: {}]", setting.default);
    }
    let arg = Arg::new(flag).long(flag).short(setting.short).help(help);
    if setting.kind == Kind::Bool {
        return Some(switch(arg));
    }
    let arg = text(arg, setting.kind.value_name());
    Some(if setting.kind == Kind::Path { arg.value_hint(ValueHint::AnyPath) } else { arg })
}

fn log_arg(flag: &logging::Flag) -> Arg {
    let arg = Arg::new(flag.name).long(flag.name).help(flag.meaning).help_heading("Logging");
    match flag.kind {
        logging::FlagKind::Switch => switch(arg),
        logging::FlagKind::Text => text(arg, "VALUE"),
        logging::FlagKind::List => text(arg, "LIST").action(ArgAction::Append),
    }
}

/// `--flag` or `--flag=value`.
fn switch(arg: Arg) -> Arg {
    arg.num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .value_name("BOOL")
        .action(ArgAction::Set)
}

fn text(arg: Arg, value: &'static str) -> Arg {
    arg.num_args(1).allow_hyphen_values(true).value_name(value).action(ArgAction::Set)
}

/// The settings that have no flag.
fn environment_only() -> String {
    let mut text = "Environment only:\n".to_owned();
    for setting in SETTINGS.iter().filter(|setting| setting.flag.is_none()) {
        for name in setting.env {
            let _ = writeln!(text, "  {name}\n          {}", setting.meaning);
        }
    }
    text
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
    };

    fn read_with(args: &[&str], env: &[(&str, &str)]) -> Result<Asked, UsageError> {
        let env = env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        PROGRAM.read(args.iter().map(OsString::from), env)
    }

    fn read(args: &[&str]) -> Result<Asked, UsageError> {
        read_with(args, &[("PROXY_UID", "7")])
    }

    fn settings(args: &[&str]) -> RawSettings {
        match read(args) {
            Ok(Asked::Run(input)) => input.settings,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        PROGRAM.command().debug_assert();
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
    fn misspelt_variables_are_found() {
        let Ok(Asked::Run(input)) = read_with(&[], &[("ISTIO_INBOUND_PORT", "80"), ("PATH", "/bin")]) else {
            panic!("it runs")
        };
        let told: Vec<String> = input.misspelt.iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            [
                "environment variable ISTIO_INBOUND_PORT is no setting and is ignored; is ISTIO_INBOUND_PORTS meant?"
            ]
        );
    }

    #[test]
    fn subcommands_print() {
        let print = |args: &[&str]| match read(args) {
            Ok(Asked::Print(text)) => text,
            other => panic!("{args:?}: {other:?}"),
        };
        assert_eq!(print(&["version"]), "istio-iptables 1.2.3\n");
        assert_eq!(print(&["--version"]), "istio-iptables 1.2.3\n");
        assert!(print(&["help"]).contains("istio-iptables -b '*' -n"));
        assert!(print(&["help"]).contains("ENVOY_USER"));
        for args in
            [&["completion"][..], &["completion", "tcsh"], &["--dual-stack", "completion", "bash", "x"]]
        {
            assert!(!matches!(read(args), Ok(Asked::Print(_))), "{args:?}");
        }
    }

    #[test]
    fn help_names_every_flag_and_variable() {
        let Ok(Asked::Print(help)) = read(&["--help"]) else { panic!("help is printed") };
        for setting in SETTINGS {
            for name in setting.env.iter().chain(setting.flag.iter()) {
                assert!(help.contains(name), "{name} is missing");
            }
        }
    }

    #[test]
    fn completions_and_the_manual_are_generated() {
        for shell in ["bash", "zsh", "fish"] {
            let Ok(Asked::Print(text)) = read(&["completion", shell]) else { panic!("{shell}") };
            assert!(text.contains("istio-service-cidr"), "{shell}");
        }
        let Ok(Asked::Print(text)) = read(&["man"]) else { panic!("man") };
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
            Ok(Asked::Print(text)) => text,
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
