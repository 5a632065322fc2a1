//! Network configuration files, edited without rewriting them.
//!
//! A file is read as libcni reads it, and changed by cutting and pasting text: what is not ours keeps its bytes, key order,
//! number forms, indentation and line ends included. Putting an entry in and taking it out again gives the same bytes.
//!
//! ```
//! use install_cni::conflist::{Entry, NetConf};
//! let text = r#"{ "name": "k8s", "mtu": 1.50e3, "plugins": [ {"type":"calico"} ] }"#;
//! let ours = Entry::parse(r#"{"type":"istio-cni","pod_namespace":"istio-system"}"#).expect("an entry");
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
pub use entry::{Entry, EntryError, Facts, Template};

/// The specification's version of our own files.
pub const OWN_VERSION: &str = "0.3.1";

/// A network configuration file that a runtime can load.
#[derive(Debug)]
pub struct NetConf<'a> {
    text: &'a str,
    root: Object<'a>,
    shape: Shape,
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
        if Network::parse(file, text)?.plugins.is_empty() {
            return Err(Invalid::Lacks("plugins"));
        }
        Ok(Self { text, root: object(text)?, shape: Shape::of(file) })
    }

    /// The network's name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.root_value("name").and_then(Value::as_string_lit).map(|name| name.value.as_ref())
    }

    /// The version of the specification that it is written in.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.root_value("cniVersion").and_then(Value::as_string_lit).map(|version| version.value.as_ref())
    }

    /// Whether it is a list or a single plugin.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// The types of its plugins in order.
    #[must_use]
    pub fn types(&self) -> Vec<&str> {
        match self.shape {
            Shape::List => self.objects().into_iter().filter_map(kind).collect(),
            Shape::Single => kind(&self.root).into_iter().collect(),
        }
    }

    /// Whether nothing but our entry is in it.
    #[must_use]
    pub fn is_only_ours(&self) -> bool {
        self.types().iter().all(|kind| *kind == PLUGIN_TYPE)
    }

    /// Whether our entry is in it, in any version.
    #[must_use]
    pub fn has_ours(&self) -> bool {
        self.types().contains(&PLUGIN_TYPE)
    }

    /// How our entry stands in it.
    #[must_use]
    pub fn entry_state(&self, entry: &Entry) -> EntryState {
        let types = self.types();
        let mut places = types.iter().enumerate().filter(|(_, kind)| **kind == PLUGIN_TYPE).map(|(at, _)| at);
        let (Some(at), None) = (places.next(), places.next()) else {
            return if types.contains(&PLUGIN_TYPE) { EntryState::Repeated } else { EntryState::Absent };
        };
        let there = match self.shape {
            Shape::List => self.objects()[at],
            Shape::Single => &self.root,
        };
        let edited = entry.differing_keys(&self.text[there.range.start..there.range.end]);
        match types.get(at + 1) {
            _ if !edited.is_empty() => EntryState::Edited(edited),
            Some(next) => EntryState::Followed((*next).to_owned()),
            None => EntryState::Right,
        }
    }

    /// Its text with our entry as the last plugin, once. A single plugin becomes a list of its own name and version.
    #[must_use]
    pub fn with(&self, entry: &Entry) -> String {
        if self.shape == Shape::List && self.entry_state(entry) == EntryState::Right {
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
        match self.shape {
            Shape::Single if self.has_ours() => None,
            Shape::Single => Some(self.listed()),
            Shape::List => match self.cut() {
                None => Some(self.text.to_owned()),
                Some(_) if self.is_only_ours() => None,
                // Each cut makes the text shorter by one entry, so this ends.
                Some(rest) => match object(&rest) {
                    Ok(root) => NetConf { text: &rest, root, shape: Shape::List }.without(),
                    Err(_) => Some(self.text.to_owned()),
                },
            },
        }
    }

    /// The text without the first of our entries: from the end of the plugin before it, or to the start of the one after it.
    fn cut(&self) -> Option<String> {
        let plugins = self.objects();
        let at = plugins.iter().position(|plugin| kind(plugin) == Some(PLUGIN_TYPE))?;
        let ours = plugins[at].range;
        let (start, end) = match (at.checked_sub(1), plugins.get(at + 1)) {
            (Some(before), _) => (plugins[before].range.end, ours.end),
            (None, Some(after)) => (ours.start, after.range.start),
            (None, None) => (ours.start, ours.end),
        };
        Some(format!("{}{}", &self.text[..start], &self.text[end..]))
    }

    /// A single plugin as a list of one, with its own name and version; its lines move to the right, nothing else changes.
    fn listed(&self) -> String {
        let plugin = self.text[self.root.range.start..self.root.range.end].replace('\n', "\n    ");
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let version = self
            .version()
            .map(|version| format!("  \"cniVersion\": {},\n", quoted(version)))
            .unwrap_or_default();
        // A list without a name cannot be loaded; a single plugin without one can.
        let name = quoted(self.name().unwrap_or("k8s-pod-network"));
        format!("{{\n{version}  \"name\": {name},\n  \"plugins\": [\n    {plugin}\n  ]\n}}\n")
    }

    fn plugins(&self) -> Option<&Array<'a>> {
        self.root_value("plugins").and_then(Value::as_array)
    }

    fn objects(&self) -> Vec<&Object<'a>> {
        self.plugins()
            .map(|list| list.elements.iter().filter_map(Value::as_object).collect())
            .unwrap_or_default()
    }

    fn root_value(&self, key: &str) -> Option<&Value<'a>> {
        value_of(&self.root, key)
    }
}

/// Whether a text is a list of plugins, whatever its file is called.
#[must_use]
pub fn is_list(text: &str) -> bool {
    NetConf::parse("x.conflist", text).is_ok()
}

/// Appends our entry to a list that has plugins and none of ours, in the style of its last plugin.
fn append_to(text: &str, entry: &Entry) -> String {
    let Ok(root) = object(text) else { return text.to_owned() };
    let conf = NetConf { text, root, shape: Shape::List };
    let Some(plugins) = conf.plugins() else { return text.to_owned() };
    let Some(last) = plugins.elements.last() else { return text.to_owned() };
    let end = last.range().end;
    let separator = match plugins.elements.len().checked_sub(2) {
        Some(previous) => text[plugins.elements[previous].range().end..last.range().start].to_owned(),
        None => format!(",{}", &text[plugins.range.start + 1..last.range().start]),
    };
    let style = format::JsonStyle::of(text, last);
    format!("{}{separator}{}{}", &text[..end], entry.formatted(&style), &text[end..])
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
