//! Network configuration files, edited without rewriting them.
//!
//! A file is read as libcni reads it, and changed by cutting and pasting text: what is not ours keeps its bytes, key order,
//! number forms, indentation and line ends included. Putting an entry in and taking it out again gives the same bytes.
//!
//! ```
//! use install_cni::conflist::{PluginEntry, NetConf};
//! let text = r#"{ "name": "k8s", "mtu": 1.50e3, "plugins": [ {"type":"calico"} ] }"#;
//! let ours = PluginEntry::parse(r#"{"type":"istio-cni","pod_namespace":"istio-system"}"#).expect("an entry");
//! let with = NetConf::parse("10-calico.conflist", text).expect("valid").with(&ours);
//! assert_eq!(
//!     with,
//!     r#"{ "name": "k8s", "mtu": 1.50e3, "plugins": [ {"type":"calico"}, {"type":"istio-cni","pod_namespace":"istio-system"} ] }"#
//! );
//! let without = NetConf::parse("10-calico.conflist", &with).expect("valid").without();
//! assert_eq!(without, Some(text.to_owned()));
//! ```

mod entry;
mod format;

use cni_core::net_dir::Network;
use jsonc_parser::ast::{Array, Object, Value};
use jsonc_parser::common::Ranged;
use jsonc_parser::{CollectOptions, ParseOptions};

pub use cni_core::net_dir::{Invalid, PLUGIN_TYPE, Shape};
pub use entry::{EntryContent, EntryError, PluginEntry};

/// The specification's version of our own files.
pub const OWN_VERSION: &str = "0.3.1";

/// A network configuration file that a runtime can load.
#[derive(Debug)]
pub struct NetConf<'a> {
    text: &'a str,
    root: Object<'a>,
    /// As the runtime reads it.
    pub network: Network,
}

/// The state of our entry in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryState {
    /// It is the last plugin and up to date.
    Right,
    /// It does not exist.
    Absent,
    /// These keys of it differ from what they should be.
    Edited(Vec<String>),
    /// It is up to date, but plugins follow; the first of them is of this type.
    Followed(String),
    /// It exists several times.
    Repeated,
}

impl<'a> NetConf<'a> {
    /// Reads a file as a runtime does that knows no folders of lists: a list has plugins of its own.
    ///
    /// # Errors
    /// When a runtime could not load it.
    pub fn parse(file: &str, text: &'a str) -> Result<Self, Invalid> {
        let network = Network::parse(file, text)?;
        if network.plugins.is_empty() {
            return Err(Invalid::Lacks("plugins"));
        }
        Ok(Self { text, root: object(text)?, network })
    }

    /// How our entry stands in it.
    #[must_use]
    pub fn entry_state(&self, entry: &PluginEntry) -> EntryState {
        let plugins = match self.network.shape {
            Shape::List => objects(&self.root),
            Shape::Single => vec![&self.root],
        };
        let mut ours = plugins.iter().enumerate().filter(|(_, plugin)| kind(plugin) == Some(PLUGIN_TYPE));
        let (at, there) = match (ours.next(), ours.next()) {
            (None, _) => return EntryState::Absent,
            (Some(_), Some(_)) => return EntryState::Repeated,
            (Some(only), None) => only,
        };
        let edited = entry.differing_keys(&self.text[there.range.start..there.range.end]);
        match plugins.get(at + 1) {
            _ if !edited.is_empty() => EntryState::Edited(edited),
            Some(next) => EntryState::Followed(kind(next).unwrap_or_default().to_owned()),
            None => EntryState::Right,
        }
    }

    /// Its text with our entry as the last plugin, once. A single plugin becomes a list of its own name and version.
    #[must_use]
    pub fn with(&self, entry: &PluginEntry) -> String {
        if self.network.shape == Shape::List && self.entry_state(entry) == EntryState::Right {
            return self.text.to_owned();
        }
        match self.without() {
            Some(rest) => append_to(&rest, entry),
            // A list with our entry alone is not a network; its content stays.
            None => self.text.to_owned(),
        }
    }

    /// Its text without our entry; none if nothing else is in it. A single plugin of another type becomes a list, which is what our entry needs.
    #[must_use]
    pub fn without(&self) -> Option<String> {
        match self.network.shape {
            Shape::Single if self.network.has_ours() => None,
            Shape::Single => Some(self.listed()),
            Shape::List if self.network.is_only_ours() => None,
            Shape::List => {
                let mut rest = self.text.to_owned();
                // Each cut makes the text shorter by one entry, so this ends.
                while let Some(shorter) = cut(&rest) {
                    rest = shorter;
                }
                Some(rest)
            }
        }
    }

    /// A single plugin as a list of one, with its own name and version; its lines move to the right, nothing else changes.
    fn listed(&self) -> String {
        let plugin = self.text[self.root.range.start..self.root.range.end].replace('\n', "\n    ");
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let version = self.network.version.as_deref();
        let version = version.map(|version| format!("  \"cniVersion\": {},\n", quoted(version)));
        let version = version.unwrap_or_default();
        // A list without a name cannot be loaded; a single plugin without one can.
        let name = quoted(self.network.name.as_deref().unwrap_or("k8s-pod-network"));
        format!("{{\n{version}  \"name\": {name},\n  \"plugins\": [\n    {plugin}\n  ]\n}}\n")
    }
}

/// Whether a text is a list of plugins, whatever its file is called.
#[must_use]
pub fn is_list(text: &str) -> bool {
    NetConf::parse("x.conflist", text).is_ok()
}

/// Appends our entry to a list that has plugins and none of ours, in the style of its last plugin.
fn append_to(text: &str, entry: &PluginEntry) -> String {
    let Ok(root) = object(text) else { return text.to_owned() };
    let Some(plugins) = plugins(&root) else { return text.to_owned() };
    let Some(last) = plugins.elements.last() else { return text.to_owned() };
    let end = last.range().end;
    let separator = match plugins.elements.len().checked_sub(2) {
        Some(previous) => text[plugins.elements[previous].range().end..last.range().start].to_owned(),
        None => format!(",{}", &text[plugins.range.start + 1..last.range().start]),
    };
    let style = format::JsonStyle::of(text, last);
    format!("{}{separator}{}{}", &text[..end], entry.formatted(&style), &text[end..])
}

/// The text of a list without the first of our entries: from the end of the plugin before it, or to the start of the one after it.
fn cut(text: &str) -> Option<String> {
    let root = object(text).ok()?;
    let plugins = objects(&root);
    let at = plugins.iter().position(|plugin| kind(plugin) == Some(PLUGIN_TYPE))?;
    let ours = plugins[at].range;
    let (start, end) = match (at.checked_sub(1), plugins.get(at + 1)) {
        (Some(before), _) => (plugins[before].range.end, ours.end),
        (None, Some(after)) => (ours.start, after.range.start),
        (None, None) => (ours.start, ours.end),
    };
    Some(format!("{}{}", &text[..start], &text[end..]))
}

fn plugins<'o, 'a>(list: &'o Object<'a>) -> Option<&'o Array<'a>> {
    value_of(list, "plugins").and_then(Value::as_array)
}

fn objects<'o, 'a>(list: &'o Object<'a>) -> Vec<&'o Object<'a>> {
    let plugins = plugins(list).map(|plugins| plugins.elements.as_slice()).unwrap_or_default();
    plugins.iter().filter_map(Value::as_object).collect()
}

/// A text as a JSON object with the places of its parts: strict, as the runtime's parser is.
fn object(text: &str) -> Result<Object<'_>, Invalid> {
    // serde_json is strict and bounds the depth; the parser with places does neither. Entries and what was cut come here unread.
    serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|error| Invalid::Json(error.to_string()))?;
    let parsed = jsonc_parser::parse_to_ast(text, &CollectOptions::default(), &ParseOptions::default());
    match parsed.map_err(|error| Invalid::Json(error.to_string()))?.value {
        Some(Value::Object(object)) => Ok(object),
        Some(_) | None => Err(Invalid::NoObject),
    }
}

/// The value of a key. The last of several counts, as for the runtime.
fn value_of<'o, 'a>(object: &'o Object<'a>, key: &str) -> Option<&'o Value<'a>> {
    object.properties.iter().rfind(|property| property.name.as_str() == key).map(|property| &property.value)
}

/// The type of a plugin; none if it has none or an empty one.
fn kind<'o>(plugin: &'o Object<'_>) -> Option<&'o str> {
    let kind = value_of(plugin, "type")?.as_string_lit()?.value.as_ref();
    (!kind.is_empty()).then_some(kind)
}

#[cfg(test)]
mod tests;
