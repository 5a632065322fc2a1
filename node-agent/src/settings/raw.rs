//! Settings as texts, each with where it was given, and their reading into values.

use settings_table::parse_duration;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::table::{Key, SETTINGS, SettingSpec};
use crate::ambient_command;
use clap::{Arg, ArgAction, Command};
use redirect_core::values::parse_bool;
use settings_cli::{CommandLine, Pages, ParsedArgs};
use settings_table::{GivenSetting, NotInForce, ValueKind};

/// What `localhost` stands for.
pub(super) const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The flag of the log levels.
const LEVEL_FLAG: &str = "log_output_level";

/// What the agent is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentCommand {
    /// Install and keep installed.
    Run,
    /// Install and end.
    Once,
    /// Take everything out of the node and end.
    Uninstall,
    /// Taint nodes of the cluster whose agent is not there.
    TaintController,
    /// Take conditions and taints from the cluster's nodes, once agents are gone.
    CleanNodes,
}

/// Texts of help and manual besides the flags.
const PAGES: Pages = Pages {
    examples: &[
        ("Install into the list that the runtime uses, and keep it there", "install-cni"),
        (
            "Once, on the node itself instead of in a container (docs/get-started/node-image.md)",
            "install-cni install --once --source-cni-bin-dir /usr/local/lib/istio-cni \\\n      --mounted-cni-bin-dir /opt/cni/bin --mounted-cni-net-dir /etc/cni/net.d",
        ),
        ("Remove everything from the node", "install-cni uninstall"),
        (
            "Taint nodes of the cluster that have no agent (docs/concepts/taint.md)",
            "install-cni taint-controller",
        ),
    ],
    exit_status: &[
        (
            0,
            "Done: ended by SIGTERM or SIGINT; with install --once, the runtime calls the plugin; with uninstall, nothing is left; with clean-nodes, every node is clean.",
        ),
        (
            1,
            "A flag or variable is wrong, or something the start needs is missing: nothing on the node was changed. With install --once, pods would not be redirected; with uninstall, not everything could be removed, or an agent runs; with clean-nodes, some nodes were not reached. The log has the reason.",
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

impl AgentCommand {
    /// What a command line asks for.
    #[must_use]
    pub fn of(words: &ParsedArgs) -> Self {
        match &words.command {
            Some((name, of)) if name == INSTALL && of.get_flag(ONCE) => Self::Once,
            Some((name, _)) if name == UNINSTALL => Self::Uninstall,
            Some((name, _)) if name == TAINT_CONTROLLER => Self::TaintController,
            Some((name, _)) if name == CLEAN_NODES => Self::CleanNodes,
            Some(_) | None => Self::Run,
        }
    }
}

/// A setting with a value that it cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {}{reason}", .value.as_ref().map(|value| format!("{value:?}: ")).unwrap_or_default())]
pub struct SettingProblem {
    /// The flag or variable.
    pub origin: String,
    /// Its value; none where it lacks one.
    pub value: Option<String>,
    /// What is wrong, and what would be right.
    pub reason: String,
}

const INSTALL: &str = "install";
const UNINSTALL: &str = "uninstall";
const ONCE: &str = "once";
const TAINT_CONTROLLER: &str = "taint-controller";
const CLEAN_NODES: &str = "clean-nodes";

/// The command line.
#[must_use]
pub fn command_line() -> CommandLine {
    let once = Arg::new(ONCE).long(ONCE).action(ArgAction::SetTrue);
    let once = once.help("Exit once the plugin is installed; exit 1 on failure");
    let install = Command::new(INSTALL)
        .about("Install the plugin and keep it installed, the default; with --once, exit afterwards")
        .arg(once);
    let uninstall = Command::new(UNINSTALL)
        .visible_alias("cleanup")
        .about("Remove the plugin from the node: entry, kubeconfig, binary");
    let taint_controller = Command::new(TAINT_CONTROLLER)
        .about("Run in the cluster instead of on a node: taint nodes without a ready agent");
    let clean_nodes = Command::new(CLEAN_NODES)
        .about("Run in the cluster after the agents: remove their conditions and taints from every node");
    CommandLine {
        name: "install-cni",
        about: "Puts the istio-cni plugin on the node and keeps it there",
        version: env!("CARGO_PKG_VERSION"),
        pages: PAGES,
        rows: SETTINGS.to_vec(),
        operands: &[],
        ignores_rest: true,
        commands: vec![install, uninstall, taint_controller, clean_nodes, ambient_command::in_help()],
    }
}

/// A file mode: octal with a leading 0, otherwise decimal.
pub(super) fn file_mode(text: &str) -> Option<u32> {
    match text.strip_prefix("0o").or_else(|| text.strip_prefix('0')) {
        Some(octal) => u32::from_str_radix(octal, 8).ok(),
        None => text.parse().ok(),
    }
}

/// Where a value was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SettingOrigin {
    Flag(&'static str),
    Env(&'static str),
    Default(&'static str),
}

impl std::fmt::Display for SettingOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flag(name) => write!(f, "flag --{name}"),
            Self::Env(name) | Self::Default(name) => write!(f, "{name}"),
        }
    }
}

/// All values as texts.
pub(super) struct Raw<'a> {
    given: &'a ParsedArgs,
    /// Whether the API server is required.
    needs_server: bool,
    env: &'a [(String, String)],
    problems: Vec<SettingProblem>,
}

impl<'a> Raw<'a> {
    pub(super) fn new(given: &'a ParsedArgs, env: &'a [(String, String)]) -> Self {
        let needs_server = !matches!(AgentCommand::of(given), AgentCommand::Once | AgentCommand::Uninstall);
        let problems = given.refused.iter().map(|(word, problem)| SettingProblem {
            origin: "command line".to_owned(),
            value: Some(word.clone()),
            reason: problem.to_string(),
        });
        Self { given, needs_server, env, problems: problems.collect() }
    }

    /// The settings that were given, with their origins and values.
    pub(super) fn given(&self) -> impl Iterator<Item = (&'static SettingSpec, SettingOrigin, &'a str)> {
        SETTINGS.iter().filter_map(|row| {
            let (origin, value) = self.find(row);
            (!matches!(origin, SettingOrigin::Default(_))).then_some((row, origin, value))
        })
    }

    fn find(&self, row: &'static SettingSpec) -> (SettingOrigin, &'a str) {
        let flag = row.flag.and_then(|flag| Some((SettingOrigin::Flag(flag), self.given.flags.get(flag)?)));
        let variable = |name: &&'static str| {
            self.env.iter().find(|(key, _)| key == name).map(|(_, value)| (SettingOrigin::Env(name), value))
        };
        let found = flag.or_else(|| row.env.iter().find_map(variable));
        found.map_or((SettingOrigin::Default(row.name()), row.default), |(origin, value)| {
            (origin, value.as_str())
        })
    }

    pub(super) fn finish(self) -> Result<(), Vec<SettingProblem>> {
        if self.problems.is_empty() { Ok(()) } else { Err(self.problems) }
    }

    pub(super) fn text(&self, key: Key) -> String {
        self.value(key).1.to_owned()
    }

    /// Host and port of the API server. If neither is given and it is not required, both are empty.
    pub(super) fn server(&mut self) -> [String; 2] {
        let keys = [Key::KUBERNETES_SERVICE_HOST, Key::KUBERNETES_SERVICE_PORT];
        let is_needed = self.needs_server || keys.iter().any(|key| !self.text(*key).is_empty());
        keys.map(|key| if is_needed { self.required(key) } else { String::new() })
    }

    fn required(&mut self, key: Key) -> String {
        let value = self.text(key);
        if value.is_empty() {
            let reason =
                "missing; the kubelet gives it to every container, and who runs this elsewhere has to set it";
            let origin = key.row().name().to_owned();
            self.problems.push(SettingProblem { origin, value: None, reason: reason.to_owned() });
        }
        value
    }

    /// A name of a file in a directory of ours; none if empty.
    pub(super) fn file_name(&mut self, key: Key) -> Option<String> {
        let value = self.text(key);
        if value.is_empty() {
            return None;
        }
        if value.contains('/') {
            self.reject(key, "a file name, without a directory");
        } else if ![".conf", ".conflist", ".json"].iter().any(|end| value.ends_with(end)) {
            self.reject(key, "the runtime reads only names that end in .conf, .conflist or .json");
        }
        Some(value)
    }

    pub(super) fn list(&self, key: Key) -> Vec<String> {
        let value = self.text(key);
        value.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }

    /// What a text is read as; `otherwise` if it is rejected.
    pub(super) fn read<T, E: ToString>(
        &mut self,
        key: Key,
        otherwise: T,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> T {
        read(self.value(key).1).unwrap_or_else(|wrong| {
            self.reject(key, &wrong.to_string());
            otherwise
        })
    }

    /// The same, but set and empty means false, 0 or none, as it always has.
    fn parsed<T: Default>(&mut self, key: Key, parse: impl FnOnce(&str) -> Option<T>, wrong: &str) -> T {
        let parse = |text: &str| if text.is_empty() { Some(T::default()) } else { parse(text) };
        self.read(key, T::default(), |text| parse(text).ok_or(wrong))
    }

    pub(super) fn switch(&mut self, key: Key) -> bool {
        self.parsed(key, |text| parse_bool(text).ok(), "neither true nor false")
    }

    pub(super) fn number(&mut self, key: Key) -> i64 {
        self.parsed(key, |text| text.trim().parse().ok(), "not a whole number")
    }

    pub(super) fn duration(&mut self, key: Key) -> Duration {
        let parse = |text: &str| if text == "0" { Some(Duration::ZERO) } else { parse_duration(text).ok() };
        self.parsed(key, parse, "not a duration such as 30s, 5m or 1h30m")
    }

    /// A port; none for 0 and less.
    pub(super) fn port(&mut self, key: Key) -> Option<u16> {
        let port = u16::try_from(self.number(key).max(0));
        if port.is_err() {
            self.reject(key, "not a port: the highest is 65535");
        }
        port.ok().filter(|port| *port != 0)
    }

    /// An address; none if empty.
    pub(super) fn address(&mut self, key: Key) -> Option<IpAddr> {
        let parse = |text: &str| if text == "localhost" { Some(LOCALHOST) } else { text.parse().ok() };
        self.parsed(key, |text| parse(text).map(Some), "neither an IP address nor localhost")
    }

    pub(super) fn file_mode(&mut self, key: Key) -> u32 {
        let text = self.text(key);
        match file_mode(&text) {
            Some(mode) if mode & 0o600 == 0o600 && mode <= 0o777 => return mode,
            Some(mode) => {
                let octal = text.trim_start_matches('0');
                let reason = format!(
                    "this is mode {mode:04o}; it must let the owner read and write, and be 0777 at most. Octal needs a leading 0: 0{octal}"
                );
                self.reject(key, &reason);
            }
            None => self.reject(key, "not a file mode such as 0600"),
        }
        0o600
    }

    /// That words of the command line are ignored, if any are.
    pub(super) fn ignored_words(&self) -> Option<String> {
        self.given.ignored_words()
    }

    /// What was asked for and is not done.
    pub(super) fn not_in_force(&self) -> Vec<NotInForce> {
        let of_ours = self.given().map(|(row, origin, value)| GivenSetting {
            row,
            said: origin.to_string(),
            value: value.to_owned(),
        });
        let given: Vec<GivenSetting<'_>> = of_ours.chain(self.given.given_of_logging()).collect();
        NotInForce::among(&given)
    }

    /// Whether this is for the cluster instead of a node.
    pub(super) fn is_for_cluster(&self) -> bool {
        matches!(AgentCommand::of(self.given), AgentCommand::TaintController | AgentCommand::CleanNodes)
    }

    /// Whether a switch is on, or cannot be read.
    pub(super) fn is_on(&self, key: Key) -> bool {
        !ValueKind::Switch.is_off(&self.text(key))
    }

    /// Whether the flag of the log levels is given.
    pub(super) fn has_level_flag(&self) -> bool {
        self.given.flags.contains_key(LEVEL_FLAG)
    }

    pub(super) fn logging(&mut self) -> logging::Config {
        let given = self.given;
        let level = (!self.has_level_flag()).then(|| self.text(Key::LOG_OUTPUT_LEVEL));
        let level = level.filter(|level| !level.is_empty());
        let value = |name: &str| match (name, &level) {
            (LEVEL_FLAG, Some(level)) => Some(level.clone()),
            _ => given.flags.get(name).cloned(),
        };
        let mut config = logging::Config::from_flags(value).unwrap_or_else(|errors| {
            self.problems.extend(errors.iter().map(|error| {
                let text = error.to_string();
                let (origin, reason) = text.split_once(": ").unwrap_or(("logging", &text));
                let is_variable = level.is_some() && origin.ends_with(LEVEL_FLAG);
                let origin = if is_variable { Key::LOG_OUTPUT_LEVEL.row().name() } else { origin };
                SettingProblem { origin: origin.to_owned(), value: None, reason: reason.to_owned() }
            }));
            logging::Config::default()
        });
        config.levels = cni_core::logs::quiet(config.levels);
        config
    }

    /// Notes that a setting cannot have its value.
    pub(super) fn reject(&mut self, key: Key, reason: &str) {
        let (origin, value) = self.value(key);
        let problem = SettingProblem {
            origin: origin.to_string(),
            value: Some(value.to_owned()),
            reason: reason.to_owned(),
        };
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// What holds for a setting, and where it was given.
    pub(super) fn value(&self, key: Key) -> (SettingOrigin, &'a str) {
        self.find(key.row())
    }
}
