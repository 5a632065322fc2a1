//! The agent shut in by Landlock (landlock(7)), where the kernel has it: it writes where the plugin, its configuration and its sockets are, reads what it has to
//! know, starts programs of the image and the plugin, and nothing else, whatever path it is led to.
//!
//! [`allowed`] lists the paths, purely; [`confine`] enforces them, for the calling thread and those that it makes: call it before other threads exist. A
//! child process inherits it. It cannot be undone.
//!
//! A confined thread may not read processes outside, whatever its capabilities (`/proc/PID/ns`, as ptrace(2)). If the agent has to, to find the owner of a
//! network namespace is, [`outside`] keeps one unconfined thread for that alone.

mod begin;
mod kernel;
pub mod outside;
pub mod rights;
mod watch;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::settings::{AgentCommand, Settings, TemplateSource, Trust};

pub use begin::begin;
pub use kernel::{Confined, confine};
pub use watch::moved;

/// What may be done beneath a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathAccess {
    /// Files may be read and directories listed.
    Read,
    /// That, and programs started.
    Run,
    /// Files and sockets may be made, changed and removed as well. Devices, pipes and links may not.
    Write,
    /// All of these: the plugin's directory, for the plugin is asked for its STATUS.
    WriteAndRun,
    /// A file alone may be read and written.
    Device,
}

/// A path, and what may be done beneath it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Allowed {
    /// The path. What it leads to is decided when the agent shuts itself in.
    pub path: PathBuf,
    /// What may be done.
    pub access: PathAccess,
}

/// Where programs and their libraries are, in an image that has any, and on a node.
const SYSTEM: [&str; 5] = ["/usr", "/bin", "/sbin", "/lib", "/lib64"];
/// Names, servers and addresses (resolv.conf, hosts, passwd) beneath the first; the kernel's account of itself beneath the others.
const FACTS: [&str; 3] = ["/etc", "/proc", "/sys"];
/// Where these files really are, if `/etc` has only links to them.
const LINKED: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

/// What an agent with these settings may do. `folder` is that of the settings; `template` is the text of the entry's template, if it is a file's; `search` is the
/// search path for programs.
#[must_use]
pub fn allowed(
    action: AgentCommand,
    settings: &Settings,
    folder: Option<&Path>,
    template: Option<&str>,
    search: &OsStr,
) -> Vec<Allowed> {
    let paths = &settings.paths;
    let mut all = Vec::new();
    let mut allow = |access: PathAccess, path: &Path| {
        all.extend(path.is_absolute().then(|| Allowed { path: path.to_owned(), access }));
    };
    match action {
        AgentCommand::Run | AgentCommand::Once | AgentCommand::Uninstall => {
            allow(PathAccess::WriteAndRun, &paths.bin);
            allow(PathAccess::Write, &paths.net);
            allow(PathAccess::Write, &paths.run);
            allow(PathAccess::Run, &paths.source_bin);
            allow(PathAccess::Read, &paths.netns);
            allow(PathAccess::Read, &paths.proc);
            if let Some(ambient) = &settings.ambient {
                // Its directory is ztunnel's as well.
                ambient.socket.parent().iter().for_each(|folder| allow(PathAccess::Write, folder));
            }
            named(settings, template).iter().for_each(|path| allow(PathAccess::Read, path));
        }
        AgentCommand::TaintController | AgentCommand::CleanNodes => {}
    }
    allow(PathAccess::Read, &paths.service_account);
    if let Trust::Authority(file) = &settings.kubeconfig.trust {
        allow(PathAccess::Read, file);
    }
    if let Some(TemplateSource::File(file)) = &settings.entry.template {
        allow(PathAccess::Read, file);
    }
    folder.iter().for_each(|folder| allow(PathAccess::Read, folder));
    SYSTEM.iter().for_each(|path| allow(PathAccess::Run, Path::new(path)));
    std::env::split_paths(search).for_each(|path| allow(PathAccess::Run, &path));
    FACTS.iter().chain(&LINKED).for_each(|path| allow(PathAccess::Read, Path::new(path)));
    allow(PathAccess::Device, Path::new("/dev/null"));
    all.sort();
    all.dedup();
    all
}

/// The paths that the plugin's entry names: its kubeconfig, a folder of manifests. The plugin is asked for its STATUS from here.
fn named(settings: &Settings, template: Option<&str>) -> Vec<PathBuf> {
    let entry =
        settings.entry.entry(&settings.paths, &settings.kubeconfig, &settings.identity.node, template);
    // The installer reports problems of a template.
    let text = entry.map(|entry| entry.standalone()).unwrap_or_default();
    let mut found = Vec::new();
    paths_in(&serde_json::from_str(&text).unwrap_or_default(), &mut found);
    found
}

fn paths_in(value: &Value, found: &mut Vec<PathBuf>) {
    match value {
        Value::String(text) => found.extend(text.starts_with('/').then(|| PathBuf::from(text))),
        Value::Array(values) => values.iter().for_each(|value| paths_in(value, found)),
        Value::Object(values) => values.values().for_each(|value| paths_in(value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests;
