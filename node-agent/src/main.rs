//! `install-cni`: reads its settings, starts logging, runs what was asked for.

use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use agent_runtime::SCOPE;
use anyhow::anyhow;
use install_cni::agent;
use install_cni::ambient_command;
use install_cni::cluster;
use install_cni::confine;
use install_cni::confine::rights;
use install_cni::install::disk::Real;
use install_cni::install::installer::Installer;
use install_cni::install::once::{self, Installed};
use install_cni::install::plugin::PluginProgram;
use install_cni::install::plugin_token::PluginToken;
use install_cni::install::reload::{Reading, Reloader, SettingsFiles};
use install_cni::pods::check;
use install_cni::settings::{
    AgentCommand, InstallMode, RepairAction, SettingProblem, Settings, command_line,
};
use privileges::keep_only;
use settings_cli::{LineRequest, ParsedArgs};
use taint_controller::ControllerSettings;
use tokio::runtime::Runtime;

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1).peekable();
    if words.next_if(|word| word == ambient_command::WORD).is_some() {
        return ambient_command::run(words);
    }
    let given = match command_line().read(words) {
        Ok(LineRequest::Work(given)) if is_ambient(&given) => {
            return settings_cli::complain(
                "install-cni: flags stand before the word ambient; write install-cni ambient first",
            );
        }
        Ok(LineRequest::Work(given)) => given,
        Ok(LineRequest::Print(text)) => return settings_cli::print(&text),
        Err(usage) => return settings_cli::complain(&usage),
    };
    let env: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let action = AgentCommand::of(&given);
    let Reading { settings, notices, reloader } = match SettingsFiles::new(given, env).read() {
        Ok(read) => read,
        Err(problems) => return refuse(&problems),
    };
    let logs = match logging::init(settings.logging.clone()) {
        Ok(logs) => logs,
        Err(error) => return settings_cli::complain(&error.to_string()),
    };
    for notice in notices {
        log::warn!(target: SCOPE, "{notice}");
    }
    give_up_what_is_not_needed(action, &settings, reloader.as_ref());
    let done = match action {
        AgentCommand::Run => run(settings, reloader, &logs),
        AgentCommand::Once => install_once(settings),
        AgentCommand::Uninstall => uninstall(settings),
        AgentCommand::TaintController => block_on(taint_controller::run(for_the_cluster(settings))),
        AgentCommand::CleanNodes => block_on(taint_controller::cleanup::run(for_the_cluster(settings))),
    };
    logs.flush();
    done
}

/// Whether the word stands behind flags: it must not start an agent.
fn is_ambient(given: &ParsedArgs) -> bool {
    given.command.as_ref().is_some_and(|(name, _)| name == ambient_command::WORD)
}

/// Before any other thread exists.
fn give_up_what_is_not_needed(action: AgentCommand, settings: &Settings, reloader: Option<&Reloader>) {
    if let Err(error) = keep_only(rights::needed(action, settings, reloader.is_some())) {
        log::warn!(target: SCOPE, "{error}");
    }
    check::remember_memory();
    confine::begin(action, settings, reloader.map(Reloader::folder).as_deref());
}

fn run(settings: Settings, reloader: Option<Reloader>, logs: &logging::LogHandle) -> ExitCode {
    block_on(agent::run(settings, reloader, Some(logs.clone())))
}

fn for_the_cluster(settings: Settings) -> ControllerSettings {
    ControllerSettings {
        account: cluster::account(&settings),
        identity: settings.identity,
        marking: settings.taint.marking,
        config_map: settings.taint.config_map,
        broken_label: (settings.repair.action == Some(RepairAction::Label)).then_some(settings.repair.label),
        health: settings.serve.health,
        monitoring: settings.serve.monitoring,
    }
}

/// How long an idle thread is kept: for ever. At a limit on processes, work waits for an existing thread;
/// without any, tokio would panic.
const KEPT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long a check of a pod, which is being made when the agent ends, may take. One that goes on behind that is killed, which every
/// run survives.
const LAST_CHECK: Duration = Duration::from_secs(1);

/// One thread does the work; others wait for the disk or check pods: more than checks run at once, so that nothing else waits for
/// these.
fn block_on(work: impl Future<Output = anyhow::Result<()>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(12)
        .thread_keep_alive(KEPT)
        .build();
    let done = match runtime.map_err(anyhow::Error::from).and_then(with_a_thread) {
        Ok(runtime) => {
            let done = runtime.block_on(work);
            runtime.shutdown_timeout(LAST_CHECK);
            done
        }
        Err(error) => Err(error),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error!(target: SCOPE, "{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Ensures that a second thread exists. If the kernel cannot create one, tokio panics, and has no other way to report that.
fn with_a_thread(runtime: Runtime) -> anyhow::Result<Runtime> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| ()));
    let made = panic::catch_unwind(AssertUnwindSafe(|| runtime.spawn_blocking(|| ())));
    panic::set_hook(hook);
    let made = made.map_err(|panicked| {
        let why = panicked.downcast_ref::<String>().map_or("the kernel refuses", String::as_str);
        anyhow!(
            "cannot create a thread: {why}; check the limits on processes (pids.max of the container, podPidsLimit, ulimit -u)"
        )
    })?;
    runtime.block_on(made)?;
    Ok(runtime)
}

fn install_once(mut settings: Settings) -> ExitCode {
    // Nothing here learns whether a runtime reads another place than the list.
    if settings.install == InstallMode::Auto {
        settings.install = InstallMode::Inline;
    }
    if let Err(error) = once::prepare(&settings.paths) {
        return fail(&error);
    }
    let token = Arc::new(PluginToken::unasked(&settings.plugin, &settings.identity));
    let installer = installer(settings).with_token(token);
    let done = match once::install(&installer) {
        Ok(None) => "an agent runs on this node and keeps the plugin installed; nothing is changed",
        Ok(Some(Installed { changed, credentials })) => {
            agent::report(&changed);
            if !credentials {
                log::warn!(target: SCOPE, "{}", once::without_credentials(&installer));
            }
            if changed.has_changed() { "the plugin is installed" } else { "the plugin was installed already" }
        }
        Err(error) => return fail(&error),
    };
    log::info!(target: SCOPE, "{done}");
    ExitCode::SUCCESS
}

fn uninstall(settings: Settings) -> ExitCode {
    match once::uninstall(&installer(settings)) {
        Ok(()) => {
            log::info!(target: SCOPE, "the plugin is removed");
            ExitCode::SUCCESS
        }
        Err(errors) => {
            for error in errors {
                log::error!(target: SCOPE, "removal: {error}");
            }
            ExitCode::FAILURE
        }
    }
}

fn installer(settings: Settings) -> Installer {
    Installer::new(Arc::new(Real), Arc::new(PluginProgram), settings)
}

fn fail(error: &anyhow::Error) -> ExitCode {
    log::error!(target: SCOPE, "{error}");
    ExitCode::FAILURE
}

fn refuse(problems: &[SettingProblem]) -> ExitCode {
    let lines: Vec<String> = problems.iter().map(|problem| format!("install-cni: {problem}")).collect();
    settings_cli::complain(&lines.join("\n"))
}
