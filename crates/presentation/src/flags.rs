//! Flags and variables of `istio-iptables`, as typed into a shell.

use std::ffi::OsString;

use redirect_core::settings::{Key, NameLookup, NamespaceFacts, Part, RawSettings, Setting, Source};
use redirect_core::values::parse_bool;
use redirect_core::{AmbientRedirect, Redirect};
use settings_cli::{CommandLine, LineRequest, Pages, Program, ProgramInput, RunOptions, setting_row};
use settings_table::{SettingSpec, Status};

/// The settings that are not in force where a plan is only shown.
pub const STATUSES: &[(Key, Status)] = &[
    (Key::CniMode, LOOKS),
    (Key::Reconcile, LOOKS),
    (Key::DryRun, LOOKS),
    (Key::DryRunFile, LOOKS),
    (Key::ForceApply, LOOKS),
    (Key::CleanupOnly, LOOKS),
    (Key::SkipRuleApply, LOOKS),
    (Key::RunValidation, LOOKS),
];
const LOOKS: Status = Status::WithoutEffect("redirectctl only looks, and changes nothing");

/// What a command line may begin with: programs that take these flags.
const PROGRAMS: &[&[&str]] = &[
    &["istio-iptables"],
    &["pilot-agent", "istio-iptables"],
    &["redirectctl", "plan"],
    &["redirectctl", "explain"],
];

/// A command line, and the variables that are set for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommandInput {
    /// `NAME=VALUE` before the program's name.
    pub variables: Vec<(String, String)>,
    /// What follows it.
    pub words: Vec<String>,
}

/// Takes a line apart as a shell does: blanks separate words, quotes hold them together.
///
/// # Errors
/// A quote that is not closed.
pub fn typed(line: &str) -> Result<CommandInput, String> {
    // shlex makes an empty word of a line that goes on between two words.
    let line = line.replace("\\\r\n", "").replace("\\\n", "");
    let mut words = shlex::split(&line).ok_or_else(|| "a quote is opened and not closed".to_owned())?;
    let variables: Vec<(String, String)> = words.iter().map_while(|word| variable(word)).collect();
    words.drain(..variables.len());
    let program = PROGRAMS.iter().find(|program| {
        words.len() >= program.len() && program.iter().zip(&words).all(|(one, word)| one == word)
    });
    words.drain(..program.map_or(0, |program| program.len()));
    Ok(CommandInput { variables, words })
}

/// `NAME=VALUE`.
fn variable(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let is_name = name.chars().all(is_of_name) && name.starts_with(|letter: char| !letter.is_ascii_digit());
    is_name.then(|| (name.to_owned(), value.to_owned()))
}

/// Whether a text is a command line, rather than a manifest: it begins with a flag, with one of the programs, or with a variable.
#[must_use]
pub fn looks_typed(text: &str) -> bool {
    let first = text.split_whitespace().next().unwrap_or_default();
    let is_flag = first.starts_with('-') && first != "-" && !first.starts_with("---");
    let is_program = PROGRAMS.iter().any(|program| program.first() == Some(&first));
    first.is_empty() || is_flag || is_program || variable(first).is_some()
}

/// The settings of a command line.
///
/// # Errors
/// It asks for something else than rules.
pub fn input(typed: CommandInput) -> Result<ProgramInput, String> {
    let program = Program {
        name: "redirectctl plan",
        about: "",
        version: env!("CARGO_PKG_VERSION"),
        pages: Pages { examples: &[], exit_status: &[], files: &[], see_also: &[] },
        statuses: STATUSES,
    };
    let line = CommandLine { rows: rows().collect(), ..program.command_line() };
    let LineRequest::Work(words) = line.read(typed.words.into_iter().map(OsString::from))? else {
        return Err("asks for help, not for rules".to_owned());
    };
    let variables = typed.variables.into_iter().map(|(name, value)| (name.into(), value.into()));
    Ok(program.input(&words, variables))
}

/// The rows of all settings. A flag that ambient mode has as well is about the same.
pub fn rows() -> impl Iterator<Item = SettingSpec> {
    let is_shared = |setting: &&Setting| Setting::ALL.iter().any(|one| one.flag == setting.flag);
    let sidecar = Setting::ALL.iter().map(|setting| setting_row(setting, STATUSES));
    let ambient = Setting::AMBIENT.iter().filter(move |setting| !is_shared(setting));
    // The agent's environment is of no effect here.
    sidecar.chain(ambient.map(|setting| SettingSpec { env: &[], ..setting_row(setting, &[]) }))
}

/// Whether settings ask for a plan of ambient mode.
#[must_use]
pub fn is_ambient(settings: &RawSettings) -> bool {
    parse_bool(settings.get(Key::Ambient).0) == Ok(true)
}

/// What of settings belongs to the other data plane.
fn astray(settings: &RawSettings) -> Vec<String> {
    let is_ambient = is_ambient(settings);
    let of_ambient = |key: Key| Setting::AMBIENT.iter().any(|setting| setting.key == key);
    let flags = settings.said().filter_map(|(key, _, source)| {
        let Source::Flag(flag) = source else { return None };
        (key.setting().part == Part::Plan && key != Key::Ambient).then_some((key, flag))
    });
    let astray = flags.filter(|(key, _)| of_ambient(*key) != is_ambient);
    let problem = |(_, flag)| match is_ambient {
        true => format!("flag --{flag}: is a sidecar's and has no effect with --ambient; omit one of them"),
        false => format!("flag --{flag}: has no effect without --ambient; add it, or omit this"),
    };
    astray.map(problem).collect()
}

/// What was refused of settings while they were gathered.
#[must_use]
pub fn refused(settings: &RawSettings) -> Vec<String> {
    settings.refused().iter().map(ToString::to_string).collect()
}

/// Everything else wrong with settings that can be determined without a network namespace.
#[must_use]
pub fn wrong(settings: &RawSettings, names: &dyn NameLookup) -> Vec<String> {
    let refused = refused(settings);
    let mut wrong = astray(settings);
    let options = RunOptions::parse(settings).err().unwrap_or_default();
    let facts = NamespaceFacts::new(&[]).with_names(names);
    let redirect = if is_ambient(settings) {
        AmbientRedirect::parse(settings).err()
    } else {
        Redirect::parse(settings, &facts).err()
    };
    let redirect = redirect.unwrap_or_default().without_namespace();
    for error in options.iter().chain(redirect.iter()).map(ToString::to_string) {
        if !refused.contains(&error) && !wrong.contains(&error) {
            wrong.push(error);
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apart(line: &str) -> (Vec<String>, Vec<String>) {
        let typed = typed(line).expect("a line");
        (typed.variables.into_iter().map(|(name, value)| format!("{name} {value}")).collect(), typed.words)
    }

    #[test]
    fn a_line_is_taken_apart_as_a_shell_does() {
        let (variables, words) = apart("A_1=x B='y z' istio-iptables -b '*' -d \"1,2\" \\\n  --envoy-port=1");
        assert_eq!(variables, ["A_1 x", "B y z"]);
        assert_eq!(words, ["-b", "*", "-d", "1,2", "--envoy-port=1"]);
        assert_eq!(apart("redirectctl plan -b 80").1, ["-b", "80"]);
        assert_eq!(apart("plan -b 80").1, ["plan", "-b", "80"], "to be reported as a stray word");
        assert_eq!(apart(""), (vec![], vec![]));
        assert!(typed("-b 'x").is_err());
    }

    #[test]
    fn manifests_do_not_look_typed() {
        for line in
            ["", " \n", "-b '*'", "--dual-stack", "PROXY_UID=7 -i '*'", "istio-iptables", "redirectctl plan"]
        {
            assert!(looks_typed(line), "{line}");
        }
        for text in ["---\nkind: Pod", "kind: Pod", "{\"kind\":\"Pod\"}", "- a", "a/b: x=y", "# c\nkind: Pod"]
        {
            assert!(!looks_typed(text), "{text}");
        }
    }

    #[test]
    fn flags_of_the_other_data_plane_are_refused() {
        let wrong = |line: &str| {
            let input = input(typed(line).expect("a line")).expect("flags");
            assert_eq!(refused(&input.settings), [] as [&str; 0], "{line}");
            wrong(&input.settings, &redirect_core::settings::NoNames)
        };
        assert_eq!(wrong("--ambient --redirect-dns --ingress --ipv6=false --dns-proxy=true"), [""; 0]);
        assert_eq!(wrong("--redirect-dns -b 80"), [""; 0]);
        let [one] = &*wrong("--ambient --native-nftables --proxy-uid 7") else { panic!("one is wrong") };
        assert!(one.starts_with("flag --proxy-uid: is a sidecar's"), "{one}");
        let [one] = &*wrong("--ingress") else { panic!("one is wrong") };
        assert!(one.starts_with("flag --ingress: has no effect without --ambient"), "{one}");
        let [one] = &*wrong("--ambient --redirect-dns=perhaps") else { panic!("one is wrong") };
        assert!(one.starts_with("flag --redirect-dns: \"perhaps\""), "{one}");
    }

    #[test]
    fn everything_wrong_is_told_once() {
        let input = input(typed("-b http -i 10.0.0.0/33 --frob").expect("a line")).expect("flags");
        assert_eq!(refused(&input.settings), ["command line: \"--frob\" is not a flag; see --help"]);
        let wrong = wrong(&input.settings, &redirect_core::settings::NoNames);
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong.iter().any(|one| one.contains("\"http\"")), "{wrong:?}");
    }
}
