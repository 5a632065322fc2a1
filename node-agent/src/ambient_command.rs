//! `install-cni ambient`: ambient mode's rules in one network namespace, by hand: for node images, for tests, and for those who
//! look for an error. No agent is needed, and none is asked.

use std::ffi::OsString;
use std::process::ExitCode;

use agent_runtime::SCOPE;
use clap::Command;
use netns_apply::netns::Netns;
use netns_apply::{ApplyOptions, ApplyOutcome};
use pod_netns::{FOREIGN, HostNamespace, Outside, hosts, remember_hosts, suitable};
use privileges::{CapabilitySet, keep_only};
use redirect_core::AmbientRedirect;
use redirect_core::options::BackendChoice;
use redirect_core::settings::{Key, RawSettings, Setting, Source};
use redirect_core::values::parse_word;
use settings_cli::{CommandLine, LineRequest, Pages, ParsedArgs, setting_row};
use settings_table::{SettingSpec, ValueKind};

use crate::ambient_rules::{apply_here, remove, verify_applied};

/// The word that begins such a command line.
pub const WORD: &str = "ambient";

const APPLY: &str = "apply";
const REMOVE: &str = "remove";
const NETWORK_NAMESPACE: &str = "network-namespace";
const BACKEND: &str = "backend";
const BACKENDS: &[(&str, BackendChoice)] =
    &[("netlink", BackendChoice::Netlink), ("native", BackendChoice::NativeNft)];
const BACKEND_WORDS: &[&str] = &["netlink", "native"];

const PAGES: Pages = Pages {
    examples: &[
        (
            "Program a pod's network namespace",
            "install-cni ambient apply --network-namespace /run/netns/cni-1234",
        ),
        (
            "In native nftables, and with DNS capture",
            "install-cni ambient apply --network-namespace /run/netns/cni-1234 --backend native --redirect-dns",
        ),
        ("Remove all of it", "install-cni ambient remove --network-namespace /run/netns/cni-1234"),
        ("Compare", "redirectctl verify --ambient --netns /run/netns/cni-1234"),
    ],
    exit_status: &[
        (0, "Done: with apply, the whole plan is in force, or was; with remove, nothing is left."),
        (
            1,
            "Not done: a flag is wrong, or a step failed. The network namespace is as it was, or the log says what is left.",
        ),
    ],
    files: &[],
    see_also: &["install-cni(8)", "redirectctl(8)", "ip-netns(8)", "network_namespaces(7)"],
};

/// Runs a command line without its first word.
#[must_use]
pub fn run(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    let line = match command_line().read(words) {
        Ok(LineRequest::Work(line)) => line,
        Ok(LineRequest::Print(text)) => return settings_cli::print(&text),
        Err(usage) => return settings_cli::complain(&usage),
    };
    let config = match logging::Config::from_flags(|name| line.flags.get(name).cloned()) {
        Ok(config) => config,
        Err(errors) => {
            let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
            return settings_cli::complain(&lines.join("\n"));
        }
    };
    let logs = match logging::init(config) {
        Ok(logs) => logs,
        Err(error) => return settings_cli::complain(&error.to_string()),
    };
    let done = match Task::of(&line) {
        Ok(task) => task.done(),
        Err(wrong) => Err(wrong),
    };
    let code = match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(wrong) => {
            for one in wrong {
                log::error!(target: SCOPE, "{one}");
            }
            ExitCode::FAILURE
        }
    };
    logs.flush();
    code
}

/// What help of the agent says about it.
#[must_use]
pub fn in_help() -> Command {
    Command::new(WORD).about(
        "Program or remove ambient mode's rules in one network namespace; see install-cni ambient --help",
    )
}

/// The command line.
#[must_use]
pub fn command_line() -> CommandLine {
    let netns = SettingSpec::new(
        ValueKind::Path,
        "The pod's network namespace, such as /run/netns/cni-1234; never the host's.",
    );
    let backend = SettingSpec::new(
        ValueKind::Choice(BACKEND_WORDS),
        "What programs the rules: netlink (iptables' tables in one transaction, no helper program) or native (nftables tables inet istio-ambient-*).",
    );
    // By hand, the agent's environment does not count.
    let settings = settings().map(|setting| SettingSpec { env: &[], ..setting_row(setting, &[]) });
    let own = [netns.flag(NETWORK_NAMESPACE), backend.flag(BACKEND).default("netlink")];
    CommandLine {
        name: "install-cni ambient",
        about: "Programs or removes ambient mode's rules in one network namespace, without an agent",
        version: env!("CARGO_PKG_VERSION"),
        pages: PAGES,
        rows: own.into_iter().chain(settings).collect(),
        operands: &[],
        ignores_rest: false,
        commands: vec![
            Command::new(APPLY).about("Put the plan in force, over whatever ambient rules are there"),
            Command::new(REMOVE).about("Remove all rules and routing of ambient mode, of any program"),
        ],
    }
}

fn settings() -> impl Iterator<Item = &'static Setting> {
    Setting::AMBIENT.iter().filter(|setting| setting.key != Key::Ambient)
}

/// What to do, and where.
struct Task {
    netns: Netns,
    backend: BackendChoice,
    /// None to remove everything.
    redirect: Option<AmbientRedirect>,
}

impl Task {
    /// Reads everything, and reports all errors at once, before it changes anything.
    fn of(line: &ParsedArgs) -> Result<Self, Vec<String>> {
        let flag = |name: &str| line.flags.get(name).map(String::as_str);
        let mut wrong: Vec<String> =
            line.refused.iter().map(|(word, problem)| format!("command line: {word:?} {problem}")).collect();
        let redirect = match line.command.as_ref().map(|(name, _)| name.as_str()) {
            Some(REMOVE) => Ok(None),
            Some(_) => redirect(line).map(Some),
            None => {
                Err(vec![format!("command line: no action; write install-cni {WORD} {APPLY} or {REMOVE}")])
            }
        };
        let redirect = redirect.map_err(|problems| wrong.extend(problems));
        let backend = parse_word(flag(BACKEND).unwrap_or("netlink"), BACKENDS, "netlink, native");
        let backend = backend.map_err(|problem| {
            wrong.push(format!("flag --{BACKEND}: {:?} {problem}", flag(BACKEND).unwrap_or_default()));
        });
        let netns = netns(flag(NETWORK_NAMESPACE)).map_err(|why| {
            wrong.push(format!("flag --{NETWORK_NAMESPACE}: {why}"));
        });
        match (netns, backend, redirect) {
            (Ok(netns), Ok(backend), Ok(redirect)) if wrong.is_empty() => {
                Ok(Self { netns, backend, redirect })
            }
            _ => Err(wrong),
        }
    }

    fn done(self) -> Result<(), Vec<String>> {
        let outside = Outside::of_this_process();
        // The programs of iptables-legacy need the last one: the reference may have left rules there.
        let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW;
        if let Err(error) = keep_only(needed) {
            log::warn!(target: SCOPE, "{error}");
        }
        let done = self.netns.run(|| self.done_here(outside.finds_this_foreign()));
        done.map_err(|error| error.to_string()).and_then(|done| done).map_err(|error| vec![error])
    }

    /// In the network namespace.
    fn done_here(&self, is_foreign: bool) -> Result<(), String> {
        let options = ApplyOptions::default().backend(suitable(self.backend, is_foreign));
        if options.backend != self.backend {
            log::info!(target: SCOPE, backend = "native"; "the backend is chosen by the namespace: {FOREIGN}");
        }
        let Some(redirect) = &self.redirect else {
            let outcome = remove(&options)?;
            report(&outcome, if outcome.changed { "removed all redirection" } else { "nothing to remove" });
            return Ok(());
        };
        let (plan, outcome) = apply_here(redirect, &options)?;
        let what =
            if outcome.changed { "redirection is in force" } else { "redirection was in force already" };
        report(&outcome, what);
        for warning in verify_applied(&plan, &options)? {
            log::warn!(target: SCOPE, "{warning}");
        }
        Ok(())
    }
}

/// The redirection that the flags ask for.
fn redirect(line: &ParsedArgs) -> Result<AmbientRedirect, Vec<String>> {
    let mut raw = RawSettings::new();
    for setting in settings() {
        if let Some((flag, text)) = setting.flag.and_then(|flag| Some((flag, line.flags.get(flag)?))) {
            raw.set(setting.key, text.clone(), Source::Flag(flag));
        }
    }
    raw.set(Key::Ambient, "true", Source::CommandLine);
    AmbientRedirect::parse(&raw).map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

/// The pod's network namespace: never the host's.
fn netns(path: Option<&str>) -> Result<Netns, String> {
    let Some(path) = path.filter(|path| !path.is_empty()) else {
        return Err("is missing; name the pod's network namespace, such as /run/netns/cni-1234".to_owned());
    };
    let netns = Netns::open(path).map_err(|error| error.to_string())?;
    remember_hosts();
    match hosts(&netns).map_err(|error| error.to_string())? {
        None => Ok(netns),
        Some(host @ (HostNamespace::Own | HostNamespace::Inits)) => {
            Err(format!("{path:?} is {host}; name a pod's"))
        }
    }
}

fn report(outcome: &ApplyOutcome, what: &str) {
    for warning in &outcome.warnings {
        log::warn!(target: SCOPE, "{warning}");
    }
    log::info!(target: SCOPE, backend:% = outcome.backend, because:% = outcome.because; "{what}");
}
