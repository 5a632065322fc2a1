//! Command line and environment, from redirect-core's settings table and logging's flag table.
//!
//! The tables say which flags and variables there are; nothing is defined here a second time. Flags are read as the
//! reference reads them: a switch may stand alone or be given `=value`, the last of a repeated flag wins, a value may
//! begin with a dash.

mod reference;

pub use reference::reference;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};
use clap_complete::Shell;
use redirect_core::settings::{Key, Kind, RawSettings, SETTINGS, Setting, Source};
use std::{ffi::OsString, fmt::Write};

/// A program that takes the settings.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Its name.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub about: &'static str,
    /// Its version.
    pub version: &'static str,
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
    /// The settings, each with where it came from.
    pub settings: RawSettings,
    /// How and where to log.
    pub log: logging::Config,
}

/// A command line that cannot be understood: what is wrong, for standard error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageError(pub String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.trim_end())
    }
}

impl std::error::Error for UsageError {}

impl Program {
    /// Reads a command line (without the program's name) and an environment.
    ///
    /// # Errors
    /// An unknown flag, a stray word, a missing or unreadable value of a logging flag.
    pub fn read(
        &self,
        args: impl IntoIterator<Item = OsString>,
        env: impl FnMut(&'static str) -> Option<String>,
    ) -> Result<Asked, UsageError> {
        let name = std::iter::once(OsString::from(self.name));
        let matches = match self.command().try_get_matches_from(name.chain(args)) {
            Ok(matches) => matches,
            Err(error) if error.use_stderr() => return Err(UsageError(error.to_string())),
            Err(help) => return Ok(Asked::Print(help.to_string())),
        };
        if let Some((name, matches)) = matches.subcommand() {
            return Ok(Asked::Print(self.generate(name, matches)));
        }
        let mut settings = RawSettings::new();
        settings.read_environment(|_| true, env);
        for setting in SETTINGS {
            if let Some((flag, text)) = setting.flag.zip(given(&matches, setting.flag)) {
                settings.set(setting.key, text, Source::Flag(flag));
            }
        }
        let log = logging::Config::from_flags(|name| given(&matches, Some(name))).map_err(|errors| {
            UsageError(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
        })?;
        Ok(Asked::Run(Box::new(Input { settings, log })))
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
            .after_help(environment_only())
            .args(SETTINGS.iter().filter_map(setting_arg))
            .args(logging::FLAGS.iter().map(log_arg))
            .subcommand(Command::new("completion").about("Print completions for a shell").arg(shells))
            .subcommand(Command::new("man").about("Print the manual page (man 8 form)"))
    }

    fn generate(&self, subcommand: &str, matches: &ArgMatches) -> String {
        let mut bytes = Vec::new();
        let mut command = self.command();
        match (subcommand, matches.try_get_one::<Shell>("shell")) {
            ("completion", Ok(Some(shell))) => {
                clap_complete::generate(*shell, &mut command, self.name, &mut bytes);
            }
            // Writing to memory cannot fail.
            _ => drop(clap_mangen::Man::new(command).section("8").render(&mut bytes)),
        }
        String::from_utf8_lossy(&bytes).into_owned()
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
    Some(match setting.kind {
        Kind::Bool => switch(arg),
        Kind::Path => text(arg, "PATH").value_hint(ValueHint::AnyPath),
        Kind::Choice(_) => text(arg, "WORD"),
        Kind::Text => text(arg, value_name(setting.key)),
    })
}

/// What the value is called in the help text.
fn value_name(key: Key) -> &'static str {
    let names: [(&[Key], &str); 5] = [
        (&[Key::ProxyPort, Key::InboundCapturePort, Key::InboundTunnelPort, Key::ProbePort], "PORT"),
        (
            &[Key::InboundPorts, Key::InboundExcludePorts, Key::OutboundPorts, Key::OutboundExcludePorts],
            "PORTS",
        ),
        (&[Key::OutboundRanges, Key::OutboundExcludeRanges], "RANGES"),
        (&[Key::ProxyUid, Key::ProxyGid], "IDS"),
        (&[Key::ExcludeInterfaces, Key::VirtualInterfaces], "INTERFACES"),
    ];
    names.iter().find(|(keys, _)| keys.contains(&key)).map_or("VALUE", |(_, name)| name)
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

    const PROGRAM: Program = Program { name: "istio-iptables", about: "About.", version: "1.2.3" };

    fn read(args: &[&str]) -> Result<Asked, UsageError> {
        PROGRAM.read(args.iter().map(OsString::from), |name| (name == "PROXY_UID").then(|| "7".to_owned()))
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
    fn stray_words_and_unknown_flags_are_refused() {
        for args in [&["-b", "*", "extra"][..], &["--frobnicate"], &["-b"], &["--log_as_json=maybe"]] {
            assert!(read(args).is_err(), "{args:?}");
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
    }
}
