//! The command line for people who run the plugin by hand: the subcommands that the other programs have. A container runtime
//! passes no arguments, but a command in the environment.

use cni_core::keys::{KEYS, SettingSpec};
use std::{
    ffi::OsString,
    io::{self, ErrorKind, Write},
    process::ExitCode,
};

const HELP: &str = "\
The chained CNI plugin that redirects pods' traffic to their sidecar proxies. A container runtime executes it for every pod;
it reads its command from the environment and its configuration from standard input.

Usage: istio-cni [COMMAND]

Commands:
  help        Print this
  version     Print the version
  man         Print the manual page (man 8 form)
  completion  Print completions for a shell: bash, zsh or fish

Options:
  -h, --help     Print help
  -V, --version  Print version

Environment (of the specification, https://www.cni.dev/docs/spec/):
  CNI_COMMAND      ADD, CHECK, DEL, GC, STATUS or VERSION; without it, the above
  CNI_CONTAINERID, CNI_NETNS, CNI_IFNAME, CNI_ARGS, CNI_PATH
                   The container, its network namespace and interface, its pod, where plugins are

Examples:
  # List supported CNI versions
  CNI_COMMAND=VERSION istio-cni
  # Whether pods could be added now, with the configuration that is installed
  jq '.plugins[] | select(.type == \"istio-cni\") + {name: \"n\", cniVersion: \"1.1.0\"}' /etc/cni/net.d/10-calico.conflist |
    CNI_COMMAND=STATUS CNI_PATH=/opt/cni/bin istio-cni
";
const MANUAL: &str = include_str!("istio-cni.8");
/// Where the manual lists the keys of the configuration.
const KEYS_HERE: &str = "@KEYS@\n";
/// The shells, each with completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "complete -W 'help version man completion bash zsh fish --help --version' istio-cni\n"),
    (
        "zsh",
        "#compdef istio-cni\n_arguments '1:command:(help version man completion --help --version)' '2:shell:(bash zsh fish)'\n",
    ),
    (
        "fish",
        "complete -c istio-cni -f -n __fish_use_subcommand -a 'help version man completion'\n\
         complete -c istio-cni -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'\n",
    ),
];

/// What is printed for these arguments, without the program's name: text for standard output, or what is wrong with them.
fn answer(words: &[&str]) -> Result<String, String> {
    let shells = || COMPLETIONS.map(|(shell, _)| shell).join(", ");
    match words {
        [] => Err(help()),
        ["help" | "--help" | "-h", ..] => Ok(help()),
        ["version" | "--version" | "-V"] => Ok(format!("istio-cni {}\n", env!("CARGO_PKG_VERSION"))),
        ["man"] => {
            Ok(MANUAL.replace("@VERSION@", env!("CARGO_PKG_VERSION")).replace(KEYS_HERE, &manual_keys()))
        }
        ["completion", shell] => COMPLETIONS
            .iter()
            .find(|(known, _)| known == shell)
            .map(|(_, text)| (*text).to_owned())
            .ok_or_else(|| format!("istio-cni: {shell:?} is not one of {}; see --help\n", shells())),
        ["completion"] => Err(format!("istio-cni: completion needs a shell: {}; see --help\n", shells())),
        [word, ..] => Err(format!(
            "istio-cni: {word:?} is not understood; a container runtime gives CNI_COMMAND instead; see --help\n"
        )),
    }
}

fn help() -> String {
    let keys = KEYS.iter().map(|row| format!("  {}\n          {}\n", heading(row), row.description()));
    format!("{HELP}\nConfiguration (on standard input, as JSON):\n{}", keys.collect::<String>())
}

fn manual_keys() -> String {
    let escape = |text: &str| text.replace('\\', "\\\\").replace('-', "\\-");
    let key =
        |row: &SettingSpec| format!(".TP\n.B {}\n{}\n", escape(&heading(row)), escape(&row.description()));
    KEYS.iter().map(key).collect()
}

/// A key with what it takes.
fn heading(row: &SettingSpec) -> String {
    let default = if row.default.is_empty() { String::new() } else { format!(", default {}", row.default) };
    format!("{} ({}{default})", row.key.unwrap_or_default(), row.takes.name())
}

/// Answers a person. `None` for a runtime: the environment has a command, or arguments and terminal are both missing.
pub(crate) fn for_people(words: &[OsString], has_command: bool, is_terminal: bool) -> Option<ExitCode> {
    if has_command || words.is_empty() && !is_terminal {
        return None;
    }
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    Some(match answer(&words) {
        Ok(text) => match io::stdout().write_all(text.as_bytes()) {
            // A reader that has gone away is not an error.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => ExitCode::FAILURE,
            Ok(()) | Err(_) => ExitCode::SUCCESS,
        },
        Err(text) => {
            let safe: Vec<String> = text.split('\n').map(logging::escaped).collect();
            let _ = io::stderr().write_all(safe.join("\n").as_bytes());
            ExitCode::FAILURE
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_no_person() {
        let words = [OsString::from("--help")];
        assert_eq!(for_people(&words, true, true), None);
        assert_eq!(for_people(&[], true, true), None);
        assert_eq!(for_people(&[], false, false), None);
    }

    #[test]
    fn subcommands_print_and_everything_else_is_refused() {
        for words in
            [&["help"][..], &["--help"], &["-h"], &["version"], &["-V"], &["man"], &["completion", "zsh"]]
        {
            assert!(answer(words).is_ok_and(|text| text.contains("istio-cni")), "{words:?}");
        }
        for words in [&[][..], &["completion"], &["completion", "csh"], &["ADD"], &["man", "x"]] {
            assert!(answer(words).is_err_and(|text| text.contains("--help")), "{words:?}");
        }
    }

    #[test]
    fn the_manual_has_the_sections_of_the_others() {
        let manual = answer(&["man"]).unwrap();
        for section in [
            "NAME",
            "SYNOPSIS",
            "DESCRIPTION",
            "CONFIGURATION",
            "ENVIRONMENT",
            "EXIT STATUS",
            "FILES",
            "EXAMPLES",
            "SEE ALSO",
        ] {
            assert!(manual.contains(&format!(".SH {section}\n")), "{section}");
        }
        assert!(manual.contains(env!("CARGO_PKG_VERSION")) && manual.is_ascii() && !manual.contains('@'));
        let (plain, help) = (manual.replace("\\-", "-"), answer(&["help"]).unwrap());
        for row in KEYS {
            for text in [&plain, &help] {
                assert!(text.contains(&row.description()) && text.contains(&heading(row)), "{row:?}");
            }
        }
    }
}
