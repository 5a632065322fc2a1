//! Shutting in a program that has read its settings and not begun its work.

use std::fs;
use std::path::Path;

use controller_runtime::SCOPE;
use netns_apply::capabilities::{self, SYS_PTRACE};
use netns_apply::pod::remember_hosts;

use super::{Confined, allowed, confine, outside};
use crate::once;
use crate::rights::looks_at_processes;
use crate::settings::{Action, Settings, TemplateSource};

/// Shuts in this thread and those that it makes, if the settings and the kernel say so. `folder` is that of settings that are read anew. An agent that cannot be
/// shut in goes on, and says so.
pub fn begin(action: Action, settings: &Settings, folder: Option<&Path>) {
    let level = match action {
        Action::Run => log::Level::Info,
        Action::Once | Action::Uninstall | Action::TaintController => log::Level::Debug,
    };
    if !settings.landlock {
        log::log!(target: SCOPE, level, "not confined by Landlock: LANDLOCK is false");
        return;
    }
    match try_begin(action, settings, folder) {
        Ok(confined) => log::log!(target: SCOPE, level, "{confined}"),
        // What ends at once says itself what it misses.
        Err(error) if level == log::Level::Debug => {
            log::debug!(target: SCOPE, "not confined by Landlock: {error}");
        }
        Err(error) => log::warn!(target: SCOPE, "not confined by Landlock: {error}"),
    }
}

fn try_begin(action: Action, settings: &Settings, folder: Option<&Path>) -> anyhow::Result<Confined> {
    // What a confined process sees of process 1 is nothing.
    remember_hosts();
    // The run directory is gone after each boot. Where it cannot be made, what needs it will say so.
    match action {
        Action::Run => drop(fs::create_dir_all(&settings.paths.run)),
        Action::Once => drop(once::prepare(&settings.paths)),
        Action::Uninstall | Action::TaintController => {}
    }
    let looks = action == Action::Run && looks_at_processes(settings, folder.is_some());
    if looks && capabilities::has(SYS_PTRACE) != Some(false) {
        outside::start()?;
    }
    let template = match &settings.entry.template {
        Some(TemplateSource::File(file)) => fs::read_to_string(file).ok(),
        Some(TemplateSource::Text(_)) | None => None,
    };
    let search = std::env::var_os("PATH").unwrap_or_default();
    Ok(confine(&allowed(action, settings, folder, template.as_deref(), &search))?)
}
