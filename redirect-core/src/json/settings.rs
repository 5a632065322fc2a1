//! Settings as text, with who said what. Values are not checked; that is what [`Redirect::parse`](crate::Redirect::parse) does. Read
//! back, they say the same and name the same sources, but for the words of [`Source::Caller`].

use super::VERSION;
use crate::settings::{Key, RawSettings, Setting, Source};
use alloc::{collections::BTreeMap, string::String};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

/// The keys of the plugin's configuration that are settings.
const CONFIGURATION_KEYS: [&str; 1] = ["strict_capture"];
/// The fields of a pod's proxy container that are settings.
const PROXY_FIELDS: [&str; 2] = ["securityContext.runAsUser", "securityContext.runAsGroup"];

/// What a program that has written settings is called by one that has read them.
const FROM_JSON: &str = "settings from JSON";

/// What was said, by the name of the setting ([`Key::json_name`]).
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document<Name: Ord, Value, Who> {
    version: u32,
    #[serde(default)]
    pod: bool,
    settings: BTreeMap<Name, Said<Value, Who>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Said<Value, Who> {
    value: Value,
    source: Who,
}

/// A [`Source`] before it is known whether its name exists.
#[derive(Deserialize)]
struct ReadSource {
    kind: String,
    name: Option<String>,
}

impl Key {
    /// What the setting is called in JSON: its flag, else its first environment variable, else its first annotation, else
    /// the variable of the pod's proxy container.
    #[must_use]
    pub fn json_name(self) -> &'static str {
        self.setting().first_name()
    }
}

/// Fails where something was said that is not a setting's ([`RawSettings::refuse`]).
impl Serialize for RawSettings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.refused().clone().into_result(()).map_err(ser::Error::custom)?;
        let said = self.said().map(|(key, value, source)| (key.json_name(), Said { value, source }));
        Document { version: VERSION, pod: self.is_pod(), settings: said.collect() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RawSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let document = Document::<String, String, ReadSource>::deserialize(deserializer)?;
        if document.version != VERSION {
            return Err(de::Error::custom(format_args!(
                "version {} of the schema is not known; this release reads version {VERSION}",
                document.version
            )));
        }
        let mut raw = if document.pod { Self::for_pod() } else { Self::new() };
        for (setting, Said { value, source }) in document.settings {
            let row = Setting::ALL.iter().find(|row| row.first_name() == setting);
            let row = row.ok_or_else(|| de::Error::custom(format_args!("{setting:?} is not a setting")))?;
            let source = source.known(row).ok_or_else(|| {
                let name = source.name.as_ref().unwrap_or(&source.kind);
                de::Error::custom(format_args!("{setting}: no setting is read from {name:?}"))
            })?;
            raw.set(row.key, value, source);
        }
        Ok(raw)
    }
}

impl ReadSource {
    /// The same source with a name that lives as long as the program, if this setting is read from it.
    fn known(&self, setting: &Setting) -> Option<Source> {
        fn find<'a>(name: &str, known: impl IntoIterator<Item = &'a &'static str>) -> Option<&'static str> {
            known.into_iter().copied().find(|known| *known == name)
        }
        Some(match (self.kind.as_str(), self.name.as_deref()) {
            ("default", None) => Source::Default,
            ("environment", Some(name)) => Source::Environment(find(name, setting.env)?),
            ("flag", Some(name)) => Source::Flag(find(name, &setting.flag)?),
            ("commandLine", None) => Source::CommandLine,
            ("configuration", Some(name)) => Source::Configuration(find(name, &CONFIGURATION_KEYS)?),
            ("annotation", Some(name)) => Source::Annotation(find(name, setting.annotations)?),
            ("proxyEnvironment", Some(name)) => Source::ProxyEnvironment(find(name, &setting.proxy_env)?),
            ("proxyField", Some(name)) => Source::ProxyField(find(name, &PROXY_FIELDS)?),
            ("namespace", None) => Source::Namespace,
            // Its words end with the program that wrote them.
            ("caller", Some(_)) => Source::Caller(FROM_JSON),
            _ => return None,
        })
    }
}
