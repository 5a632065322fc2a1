//! Settings that change while the agent runs: a folder with a file for every setting, as the kubelet mounts a ConfigMap.
//!
//! The folder is read and checked as a whole, with the flags and the environment for everything else, before any of
//! it is used.

mod folder;

use std::collections::BTreeMap;
use std::path::PathBuf;

use settings_cli::ParsedArgs;

use crate::settings::table::{Key, SETTINGS};
use crate::settings::{self, SettingProblem, Settings};

/// The settings that are read from the folder, whenever it changes. If a folder is set, the environment does not count for them: it may be
/// an earlier version of the same ConfigMap.
pub const RELOADED: [Key; 16] = [
    Key::EXCLUDE_NAMESPACES,
    Key::NATIVE_NFTABLES,
    Key::NFT_SETS,
    Key::STRICT_CAPTURE,
    Key::ACCEPTED_RULES,
    Key::ACCEPT_RULES_OF_PODS,
    Key::SANDBOXED_RUNTIMES,
    Key::SANDBOXED_PODS,
    Key::CNI_NETWORK_CONFIG,
    Key::LOG_LEVEL,
    Key::LOG_OUTPUT_LEVEL,
    Key::DRIFT_WATCH_INTERVAL,
    Key::DRIFT_HEAL,
    Key::ISTIO_OUTBOUND_OWNER_GROUPS,
    Key::ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE,
    Key::ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR,
];

fn is_reloaded(name: &str) -> bool {
    RELOADED.iter().any(|key| key.row().name() == name)
}

/// What the folder holds: names of settings, and values.
type Files = BTreeMap<String, String>;

/// Where settings come from.
#[derive(Debug)]
pub struct SettingsFiles {
    given: ParsedArgs,
    env: Vec<(String, String)>,
    folder: Option<PathBuf>,
}

/// The result of reading the sources.
#[derive(Debug)]
pub struct Reading {
    /// The settings.
    pub settings: Settings,
    /// The notices about them.
    pub notices: Vec<String>,
    /// Reads them again; none where no folder is named.
    pub reloader: Option<Reloader>,
}

impl SettingsFiles {
    /// A command line and an environment, which may name a folder.
    #[must_use]
    pub fn new(given: ParsedArgs, env: Vec<(String, String)>) -> Self {
        let folder = settings::folder(&given, &env);
        Self { given, env, folder }
    }

    /// Reads all of them.
    ///
    /// # Errors
    /// Everything wrong with them, together.
    pub fn read(self) -> Result<Reading, Vec<SettingProblem>> {
        let Some(folder) = &self.folder else {
            let (settings, notices) = Settings::read(&self.given, &self.env)?;
            return Ok(Reading { settings, notices, reloader: None });
        };
        let files = folder::read(folder).map_err(|error| {
            let (origin, value) = ("SETTINGS_DIR".to_owned(), Some(folder.display().to_string()));
            vec![SettingProblem { origin, value, reason: format!("cannot be read: {error}") }]
        })?;
        let mut reloader =
            Reloader { sources: self, at_start: files.clone(), last: Ok(files.clone()), noticed: Vec::new() };
        let (settings, notices) = reloader.sources.with(&files)?;
        let mut notices = reloader.news(&files, notices);
        notices.extend(reloader.sources.overridden(&files));
        Ok(Reading { settings, notices, reloader: Some(reloader) })
    }

    /// The settings with what the folder held.
    fn with(&self, files: &Files) -> Result<(Settings, Vec<String>), Vec<SettingProblem>> {
        let known = |name: &str| SETTINGS.iter().any(|setting| setting.env.contains(&name));
        let of_environment = self.env.iter().filter(|(name, _)| !is_reloaded(name)).cloned();
        // Names that are not settings are passed on, so that a misspelt one is noticed.
        let of_folder = files.iter().filter(|(name, _)| is_reloaded(name) || !known(name));
        let of_folder = of_folder.map(|(name, value)| (name.clone(), value.clone()));
        Settings::read(&self.given, &of_environment.chain(of_folder).collect::<Vec<_>>())
    }

    /// Reloaded settings that only the environment sets. At the start, these cannot come from the same ConfigMap.
    fn overridden(&self, files: &Files) -> Option<String> {
        let given = self.env.iter().map(|(name, _)| name.as_str());
        let names: Vec<&str> = given.filter(|name| is_reloaded(name) && !files.contains_key(*name)).collect();
        (!names.is_empty()).then(|| {
            format!(
                "{}: no effect in the environment, because SETTINGS_DIR is given; write them there",
                names.join(", ")
            )
        })
    }

    /// The value in force of a setting of the environment.
    fn value(&self, setting: &settings::table::SettingSpec) -> &str {
        let given = self.env.iter().find(|(name, _)| setting.env.contains(&name.as_str()));
        given.map_or(setting.default, |(_, value)| value.trim_end_matches('\n'))
    }
}

/// What became of the folder.
#[derive(Debug)]
pub enum Reload {
    /// It holds what it held.
    Unchanged,
    /// It holds something that cannot be used, for these reasons.
    Refused(String),
    /// It can be used.
    Taken {
        /// With these settings.
        settings: Box<Settings>,
        /// New notices about them.
        notices: Vec<String>,
    },
}

/// Reads the folder repeatedly.
#[derive(Debug)]
pub struct Reloader {
    sources: SettingsFiles,
    at_start: Files,
    /// What was read last, or why it could not be read.
    last: Result<Files, String>,
    noticed: Vec<String>,
}

impl Reloader {
    /// The folder.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.sources.folder.clone().unwrap_or_default()
    }

    /// Reads the folder if it has changed. `accept` has to accept the settings too.
    pub fn read(&mut self, accept: impl FnOnce(&Settings) -> Result<(), String>) -> Reload {
        let now = folder::read(&self.folder()).map_err(|error| error.to_string());
        if now == self.last {
            return Reload::Unchanged;
        }
        self.last.clone_from(&now);
        let read = now.and_then(|files| {
            let (settings, notices) = self.sources.with(&files).map_err(|problems| {
                problems.iter().map(SettingProblem::to_string).collect::<Vec<_>>().join("; ")
            })?;
            accept(&settings).map(|()| (settings, self.news(&files, notices)))
        });
        match read {
            Ok((settings, notices)) => Reload::Taken { settings: Box::new(settings), notices },
            Err(why) => Reload::Refused(why),
        }
    }

    /// The notices that were not logged yet.
    fn news(&mut self, files: &Files, mut all: Vec<String>) -> Vec<String> {
        let pending = self.pending(files);
        if !pending.is_empty() {
            all.push(format!(
                "{}: the environment counts for these and differs from the settings folder; a change takes effect when the container is restarted",
                pending.join(", ")
            ));
        }
        let news = all.iter().filter(|text| !self.noticed.contains(text)).cloned().collect();
        self.noticed = all;
        news
    }

    /// Settings whose value in the folder is not in force, because they are read from the environment.
    fn pending(&self, files: &Files) -> Vec<&'static str> {
        let fixed = SETTINGS.iter().filter(|setting| !is_reloaded(setting.name()));
        let differs = |setting: &&settings::table::SettingSpec| {
            setting.env.iter().any(|name| match files.get(*name) {
                Some(value) => value != self.sources.value(setting),
                None => self.at_start.contains_key(*name),
            })
        };
        fixed.filter(differs).map(settings::table::SettingSpec::name).collect()
    }
}
