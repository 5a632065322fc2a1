//! Settings as texts, each with where it was given, and their reading into values.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::table::{Kind, SETTINGS, Setting};
use clap::{Arg, ArgAction, ArgMatches, Command, builder::PossibleValuesParser};
use clap_complete::Shell;
use redirect_core::values::parse_duration;
use settings_cli::Pages;

/// What `localhost` stands for.
pub(super) const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The flag of the log levels.
const LEVEL_FLAG: &str = "log_output_level";

/// What the agent is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Install and keep installed.
    Run,
    /// Take everything out of the node and end.
    Cleanup,
    /// Say the version and end.
    Version,
    /// Print help and end.
    Help,
    /// Print the manual page and end.
    Man,
    /// Print completions for a shell and end.
    Completion(Shell),
}

/// What help and the manual say besides the flags.
const PAGES: Pages = Pages {
    examples: &[
        ("Install into the list that the runtime uses, and keep it there", "install-cni"),
        (
            "Once by hand, with the node's directories in place of those of a container",
            "install-cni --mounted-cni-net-dir /etc/cni/net.d",
        ),
        ("Take everything out of the node again", "install-cni cleanup"),
    ],
    exit_status: &[
        (0, "Done: ended by SIGTERM or SIGINT, or there is nothing left to do."),
        (
            1,
            "A flag or variable is wrong, or what a start needs is not there. Nothing on the node was changed by it.",
        ),
    ],
    files: &[
        ("/opt/cni/bin", "The plugin's binary in the image."),
        ("/host/opt/cni/bin", "The node's plugin binaries."),
        ("/host/etc/cni/net.d", "The node's network configurations."),
        ("/var/run/istio-cni", "The plugin's kubeconfig and log, and the socket it sends log lines to."),
        ("/var/run/secrets/kubernetes.io/serviceaccount", "The service account's token and authority."),
    ],
    see_also: &["istio-cni(8)", "istio-iptables(8)", "istio-validation(8)"],
};

impl Action {
    /// What a command line asks for.
    #[must_use]
    pub fn of(given: &ArgMatches) -> Self {
        match given.subcommand() {
            Some(("cleanup", _)) => Self::Cleanup,
            Some(("version", _)) => Self::Version,
            Some(("help", _)) => Self::Help,
            Some(("man", _)) => Self::Man,
            Some(("completion", of)) => of.get_one("shell").copied().map_or(Self::Run, Self::Completion),
            Some(_) | None => Self::Run,
        }
    }
}

/// A setting with a value that it cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {}{reason}", .value.as_ref().map(|value| format!("{value:?}: ")).unwrap_or_default())]
pub struct Problem {
    /// The flag or variable.
    pub origin: String,
    /// Its value; none where it lacks one.
    pub value: Option<String>,
    /// What is wrong, and what would be right.
    pub reason: String,
}

/// The parser of the command line, made from the tables.
#[must_use]
pub fn command() -> Command {
    let flags = SETTINGS.iter().filter(|setting| !setting.flag.is_empty()).map(flag);
    let logging = logging::FLAGS.iter().map(|flag| {
        let arg = Arg::new(flag.name).long(flag.name).help(flag.meaning).value_name("VALUE");
        match flag.kind {
            logging::FlagKind::Text => arg.action(ArgAction::Set),
            logging::FlagKind::Switch => switch(arg),
            logging::FlagKind::List => arg.action(ArgAction::Append),
        }
    });
    let shell = Arg::new("shell").required(true).value_parser(clap::value_parser!(Shell)).help("The shell");
    Command::new("install-cni")
        .about("Puts the istio-cni plugin on the node and keeps it there")
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_subcommand(true)
        .after_help(PAGES.examples_text())
        .args(flags.chain(logging).map(|arg| arg.global(true)))
        .subcommand(
            Command::new("cleanup").about("Takes the plugin out of the node: entry, kubeconfig, binary"),
        )
        .subcommand(Command::new("help").about("Prints this"))
        .subcommand(Command::new("version").about("Says the version"))
        .subcommand(Command::new("man").about("Prints the manual page (man 8 form)"))
        .subcommand(Command::new("completion").about("Prints completions for a shell").arg(shell))
}

/// Completions of the command line for a shell.
#[must_use]
pub fn completions(shell: Shell) -> String {
    let switches = SETTINGS.iter().filter(|setting| setting.kind == Kind::Switch && !setting.flag.is_empty());
    let command = switches.fold(command(), |command, setting| {
        command.mut_arg(setting.flag, |arg| arg.value_parser(PossibleValuesParser::new(["true", "false"])))
    });
    settings_cli::completions(shell, command, "install-cni")
}

/// The manual page.
#[must_use]
pub fn manual() -> String {
    PAGES.manual(command())
}

fn flag(setting: &Setting) -> Arg {
    let env = setting.env.first().map(|env| format!(" [{env}]")).unwrap_or_default();
    let default =
        if setting.default.is_empty() { String::new() } else { format!(" (default {})", setting.default) };
    let arg = Arg::new(setting.flag)
        .long(setting.flag)
        .help(format!("{}{default}{env}", setting.description()))
        .value_name("VALUE")
        .allow_hyphen_values(true)
        .action(ArgAction::Set);
    if setting.kind == Kind::Switch { switch(arg) } else { arg }
}

/// A file mode: octal with a leading 0, otherwise decimal.
pub(super) fn file_mode(text: &str) -> Option<u32> {
    match text.strip_prefix("0o").or_else(|| text.strip_prefix('0')) {
        Some(octal) => u32::from_str_radix(octal, 8).ok(),
        None => text.parse().ok(),
    }
}

/// A flag that may stand alone, or be given a boolean after `=`.
fn switch(arg: Arg) -> Arg {
    arg.num_args(0..=1).require_equals(true).default_missing_value("true").action(ArgAction::Set)
}

/// Where a value was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    Flag(&'static str),
    Env(&'static str),
    Default(&'static str),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flag(name) => write!(f, "flag --{name}"),
            Self::Env(name) | Self::Default(name) => write!(f, "{name}"),
        }
    }
}

/// All values as texts.
pub(super) struct Raw<'a> {
    given: &'a ArgMatches,
    values: Vec<(&'static Setting, Origin, String)>,
    problems: Vec<Problem>,
}

impl<'a> Raw<'a> {
    pub(super) fn new(given: &'a ArgMatches, env: &[(String, String)]) -> Self {
        let find = |setting: &'static Setting| {
            let flag = (!setting.flag.is_empty()).then(|| given.get_one::<String>(setting.flag)).flatten();
            let variable = || {
                let value = |name: &&'static str| {
                    env.iter().find(|(key, _)| key == name).map(|(_, value)| (*name, value))
                };
                setting.env.iter().find_map(value)
            };
            match (flag, variable()) {
                (Some(value), _) => (setting, Origin::Flag(setting.flag), value.clone()),
                (None, Some((name, value))) => (setting, Origin::Env(name), value.clone()),
                (None, None) => (setting, Origin::Default(setting.name()), setting.default.to_owned()),
            }
        };
        Self { given, values: SETTINGS.iter().map(find).collect(), problems: Vec::new() }
    }

    /// The settings that somebody gave, with where and what.
    pub(super) fn given(&self) -> impl Iterator<Item = (&'static Setting, &Origin, &str)> {
        let somebody = |origin: &Origin| !matches!(origin, Origin::Default(_));
        let values = self.values.iter().filter(move |(_, origin, _)| somebody(origin));
        values.map(|(setting, origin, value)| (*setting, origin, value.as_str()))
    }

    pub(super) fn finish(self) -> Result<(), Vec<Problem>> {
        if self.problems.is_empty() { Ok(()) } else { Err(self.problems) }
    }

    pub(super) fn text(&self, name: &str) -> String {
        self.value(name).1.to_owned()
    }

    pub(super) fn required(&mut self, name: &'static str) -> String {
        let value = self.text(name);
        if value.is_empty() {
            let reason = "missing; the kubelet gives it to every container, and a test has to set it";
            self.problems.push(Problem { origin: name.to_owned(), value: None, reason: reason.to_owned() });
        }
        value
    }

    /// A name of a file in a directory of ours; none if empty.
    pub(super) fn file_name(&mut self, name: &'static str) -> Option<String> {
        let value = self.text(name);
        if value.is_empty() {
            return None;
        }
        if value.contains('/') {
            self.reject(name, "a file name, without a directory");
        } else if ![".conf", ".conflist", ".json"].iter().any(|end| value.ends_with(end)) {
            self.reject(name, "the runtime reads only names that end in .conf, .conflist or .json");
        }
        Some(value)
    }

    pub(super) fn list(&self, name: &str) -> Vec<String> {
        let value = self.text(name);
        value.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }

    /// A boolean. Set but empty means false, as it always has.
    pub(super) fn switch(&mut self, name: &'static str) -> bool {
        match self.text(name).as_str() {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => true,
            "" | "0" | "f" | "F" | "false" | "FALSE" | "False" => false,
            _ => {
                self.reject(name, "neither true nor false");
                false
            }
        }
    }

    /// A number. Set but empty means 0, as it always has.
    pub(super) fn number(&mut self, name: &'static str) -> i64 {
        let text = self.text(name);
        let value = if text.is_empty() { Some(0) } else { text.trim().parse().ok() };
        value.unwrap_or_else(|| {
            self.reject(name, "not a whole number");
            0
        })
    }

    /// A duration. Set but empty means 0, like a number.
    pub(super) fn duration(&mut self, name: &'static str) -> Duration {
        let text = self.text(name);
        if matches!(text.as_str(), "" | "0") {
            return Duration::ZERO;
        }
        parse_duration(&text).unwrap_or_else(|_| {
            self.reject(name, "not a duration such as 30s, 5m or 1h30m");
            Duration::ZERO
        })
    }

    /// A port; none for 0 and less.
    pub(super) fn port(&mut self, name: &'static str) -> Option<u16> {
        let port = u16::try_from(self.number(name).max(0));
        if port.is_err() {
            self.reject(name, "not a port: the highest is 65535");
        }
        port.ok().filter(|port| *port != 0)
    }

    /// An address; none if empty.
    pub(super) fn address(&mut self, name: &'static str) -> Option<IpAddr> {
        match self.text(name).as_str() {
            "" => None,
            "localhost" => Some(LOCALHOST),
            other => {
                let address = other.parse().ok();
                if address.is_none() {
                    self.reject(name, "neither an IP address nor localhost");
                }
                address
            }
        }
    }

    pub(super) fn file_mode(&mut self, name: &'static str) -> u32 {
        let text = self.text(name);
        match file_mode(&text) {
            Some(mode) if mode & 0o600 == 0o600 && mode <= 0o777 => return mode,
            Some(mode) => {
                let octal = text.trim_start_matches('0');
                let reason = format!(
                    "this is mode {mode:04o}; it must let the owner read and write, and be 0777 at most. Octal needs a leading 0: 0{octal}"
                );
                self.reject(name, &reason);
            }
            None => self.reject(name, "not a file mode such as 0600"),
        }
        0o600
    }

    /// Whether the flag of the log levels is given.
    pub(super) fn has_level_flag(&self) -> bool {
        self.given.try_contains_id(LEVEL_FLAG).unwrap_or_default()
    }

    /// Whether somebody asked for stack traces at any level.
    pub(super) fn stack_traces(&self) -> bool {
        let asked = self.given.try_get_one::<String>("log_stacktrace_level").ok().flatten();
        asked
            .is_some_and(|levels| levels.split(',').any(|level| level != "none" && !level.ends_with(":none")))
    }

    pub(super) fn logging(&mut self) -> logging::Config {
        let given = self.given;
        let level = (!self.has_level_flag()).then(|| self.text("LOG_OUTPUT_LEVEL"));
        let level = level.filter(|level| !level.is_empty());
        let values = |name: &str| {
            if let (LEVEL_FLAG, Some(level)) = (name, &level) {
                return Some(level.clone());
            }
            let values = given.try_get_many::<String>(name).ok().flatten()?;
            Some(values.cloned().collect::<Vec<_>>().join(","))
        };
        let mut config = logging::Config::from_flags(values).unwrap_or_else(|errors| {
            self.problems.extend(errors.iter().map(|error| {
                let text = error.to_string();
                let (origin, reason) = text.split_once(": ").unwrap_or(("logging", &text));
                let is_variable = level.is_some() && origin.ends_with(LEVEL_FLAG);
                let origin = if is_variable { "LOG_OUTPUT_LEVEL" } else { origin };
                Problem { origin: origin.to_owned(), value: None, reason: reason.to_owned() }
            }));
            logging::Config::default()
        });
        config.levels = cni_core::logs::quiet(config.levels);
        config
    }

    /// Notes that a setting cannot have its value.
    pub(super) fn reject(&mut self, name: &str, reason: &str) {
        let (origin, value) = self.value(name);
        let problem =
            Problem { origin: origin.to_string(), value: Some(value.to_owned()), reason: reason.to_owned() };
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn value(&self, name: &str) -> (&Origin, &str) {
        let found = self.values.iter().find(|(setting, _, _)| setting.name() == name);
        found.map_or((&Origin::Default(""), ""), |(_, origin, value)| (origin, value))
    }
}
