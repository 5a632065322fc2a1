//! Settings as text, with who said what.

use super::VERSION;
use crate::settings::{self, InputErrors, Key, RawSettings, SETTINGS, Setting};
use alloc::{
    borrow::ToOwned,
    collections::BTreeMap,
    string::{String, ToString},
};
use serde::{Deserialize, Serialize};

/// The keys of the plugin's configuration that are settings.
const CONFIGURATION_KEYS: [&str; 1] = ["strict_capture"];
/// The fields of a pod's proxy container that are settings.
const PROXY_FIELDS: [&str; 2] = ["securityContext.runAsUser", "securityContext.runAsGroup"];

/// What a program that has written settings is called by one that has read them.
const SOMEBODY: &str = "settings from JSON";

/// What was said about settings: the counterpart of [`RawSettings`].
///
/// Values are not checked; that is what [`Redirect::parse`](crate::Redirect::parse) does. Read back, they say the same and
/// name the same sources, but for the words of [`Source::Caller`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[non_exhaustive]
pub struct Settings {
    /// The version of the schema.
    pub version: u32,
    /// Whether the settings of a pod are meant: a few defaults differ.
    #[serde(default)]
    pub pod: bool,
    /// What was said, by the name of the setting ([`setting_name`]).
    pub settings: BTreeMap<String, Said>,
}

/// What was said about a setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Said {
    /// The value, as it was written.
    pub value: String,
    /// Who said it.
    pub source: Source,
}

/// Where a value came from: the counterpart of [`settings::Source`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "name", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Source {
    /// Unset.
    Default,
    /// This environment variable.
    Environment(String),
    /// This flag, without dashes.
    Flag(String),
    /// The command line, where no flag is concerned.
    CommandLine,
    /// This key of the plugin's configuration.
    Configuration(String),
    /// This annotation of the pod.
    Annotation(String),
    /// This variable of the pod's proxy container.
    ProxyEnvironment(String),
    /// This field of the pod's proxy container.
    ProxyField(String),
    /// The addresses of the network namespace.
    Namespace,
    /// A program that uses the library, in its own words.
    Caller(String),
}

/// Why settings that were read from JSON are none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// Another version of the schema.
    #[error("version {0} of the schema is not known; this release reads version {VERSION}")]
    Version(u32),
    /// A name that is not a setting's.
    #[error("{0:?} is not a setting")]
    UnknownSetting(String),
    /// A source that does not exist: a flag, variable or annotation that no setting has.
    #[error("{setting}: no setting is read from {name:?}")]
    UnknownSource {
        /// The setting.
        setting: String,
        /// The name of the source.
        name: String,
    },
}

/// What a setting is called in JSON: its flag, else its first environment variable, else its first annotation, else
/// the variable of the pod's proxy container.
#[must_use]
pub fn setting_name(key: Key) -> &'static str {
    name(key.setting())
}

fn name(setting: &Setting) -> &'static str {
    let names = setting.flag.iter().chain(setting.env).chain(setting.annotations).chain(&setting.proxy_env);
    names.copied().next().unwrap_or_default()
}

impl TryFrom<&RawSettings> for Settings {
    type Error = InputErrors;

    /// Fails where something was said that is not a setting's ([`RawSettings::refuse`]).
    fn try_from(raw: &RawSettings) -> Result<Self, InputErrors> {
        let said =
            |value: &str, source: settings::Source| Said { value: value.to_owned(), source: source.into() };
        let all = raw.said().map(|(key, value, source)| (setting_name(key).to_owned(), said(value, source)));
        let settings = all.collect();
        raw.refused().clone().into_result(Self { version: VERSION, pod: raw.is_pod(), settings })
    }
}

impl TryFrom<&Settings> for RawSettings {
    type Error = SettingsError;

    fn try_from(said: &Settings) -> Result<Self, SettingsError> {
        if said.version != VERSION {
            return Err(SettingsError::Version(said.version));
        }
        let mut raw = if said.pod { Self::for_pod() } else { Self::new() };
        for (setting, Said { value, source }) in &said.settings {
            let row = SETTINGS.iter().find(|row| name(row) == setting);
            let row = row.ok_or_else(|| SettingsError::UnknownSetting(setting.clone()))?;
            let source = known_source(row, source)
                .map_err(|name| SettingsError::UnknownSource { setting: setting.clone(), name })?;
            raw.set(row.key, value.clone(), source);
        }
        Ok(raw)
    }
}

/// The same source with a name that lives as long as the program, or its unknown name.
fn known_source(setting: &Setting, source: &Source) -> Result<settings::Source, String> {
    use settings::Source as Known;
    fn find<'a>(
        name: &str,
        known: impl IntoIterator<Item = &'a &'static str>,
    ) -> Result<&'static str, String> {
        known.into_iter().copied().find(|known| *known == name).ok_or_else(|| name.to_owned())
    }
    Ok(match source {
        Source::Default => Known::Default,
        Source::Environment(name) => Known::Environment(find(name, setting.env)?),
        Source::Flag(name) => Known::Flag(find(name, &setting.flag)?),
        Source::CommandLine => Known::CommandLine,
        Source::Configuration(name) => Known::Configuration(find(name, &CONFIGURATION_KEYS)?),
        Source::Annotation(name) => Known::Annotation(find(name, setting.annotations)?),
        Source::ProxyEnvironment(name) => Known::ProxyEnvironment(find(name, &setting.proxy_env)?),
        Source::ProxyField(name) => Known::ProxyField(find(name, &PROXY_FIELDS)?),
        Source::Namespace => Known::Namespace,
        // Its words end with the program that wrote them.
        Source::Caller(_) => Known::Caller(SOMEBODY),
    })
}

impl From<settings::Source> for Source {
    fn from(source: settings::Source) -> Self {
        use settings::Source as Known;
        match source {
            Known::Default => Self::Default,
            Known::Environment(name) => Self::Environment(name.to_string()),
            Known::Flag(name) => Self::Flag(name.to_string()),
            Known::CommandLine => Self::CommandLine,
            Known::Configuration(key) => Self::Configuration(key.to_string()),
            Known::Annotation(name) => Self::Annotation(name.to_string()),
            Known::ProxyEnvironment(name) => Self::ProxyEnvironment(name.to_string()),
            Known::ProxyField(name) => Self::ProxyField(name.to_string()),
            Known::Namespace => Self::Namespace,
            Known::Caller(words) => Self::Caller(words.to_string()),
        }
    }
}
