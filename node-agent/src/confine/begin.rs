//! Confining a program that has read its settings and not begun its work.

use std::fs;
use std::path::Path;

use agent_runtime::SCOPE;
use netns_apply::Capability;
use pod_netns::remember_hosts;

use super::{Confined, allowed, confine, outside};
use crate::confine::rights::reads_processes;
use crate::install::once;
use crate::settings::{AgentCommand, Settings, TemplateSource};

/// Confines this thread and those that it makes, if settings and kernel allow it. `folder`: the settings folder. An agent that cannot be
/// confined continues, and logs that.
pub fn begin(action: AgentCommand, settings: &Settings, folder: Option<&Path>) {
    let level = match action {
        AgentCommand::Run => log::Level::Info,
        AgentCommand::Once
        | AgentCommand::Uninstall
        | AgentCommand::TaintController
        | AgentCommand::CleanNodes => log::Level::Debug,
    };
    if !settings.landlock {
        log::log!(target: SCOPE, level, "not confined by Landlock: LANDLOCK is false");
        return;
    }
    match try_begin(action, settings, folder) {
        Ok(confined) => log::log!(target: SCOPE, level, "{confined}"),
        // A short-lived program reports itself what it lacks.
        Err(error) if level == log::Level::Debug => {
            log::debug!(target: SCOPE, "not confined by Landlock: {error}");
        }
        Err(error) => log::warn!(target: SCOPE, "not confined by Landlock: {error}"),
    }
}

fn try_begin(action: AgentCommand, settings: &Settings, folder: Option<&Path>) -> anyhow::Result<Confined> {
    // A confined process does not see process 1.
    remember_hosts();
    // The run directory is gone after each boot. If it cannot be created, its users report that.
    match action {
        AgentCommand::Run => {
            drop(fs::create_dir_all(&settings.paths.run));
            let folder = settings.ambient.as_ref().and_then(|ambient| ambient.socket.parent());
            folder.into_iter().for_each(|folder| drop(fs::create_dir_all(folder)));
        }
        AgentCommand::Once => drop(once::prepare(&settings.paths)),
        AgentCommand::Uninstall | AgentCommand::TaintController | AgentCommand::CleanNodes => {}
    }
    let reads_processes = action == AgentCommand::Run && reads_processes(settings, folder.is_some());
    if reads_processes && Capability::SYS_PTRACE.is_held() != Some(false) {
        outside::start()?;
    }
    let template = match &settings.entry.template {
        Some(TemplateSource::File(file)) => fs::read_to_string(file).ok(),
        Some(TemplateSource::Text(_)) | None => None,
    };
    let search = std::env::var_os("PATH").unwrap_or_default();
    confine(&allowed(action, settings, folder, template.as_deref(), &search))
}
