//! One network configuration, as libcni reads it.

use serde_json::{Map, Value};

use super::{LOOPBACK, PLUGIN_TYPE};

/// A network configuration that a runtime can load.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// Its name.
    pub name: Option<String>,
    /// The version of the specification that it is written in.
    pub version: Option<String>,
    /// Its plugins in their order, those of its folder last.
    pub plugins: Vec<Value>,
    /// What kind of file it is.
    pub shape: Shape,
    /// Whether its owner has forbidden plugins in its folder.
    pub only_inlined: bool,
    /// Whether a runtime is not to CHECK it.
    pub disable_check: bool,
}

/// What kind of file it is; its name decides, as for the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A `.conflist`: several plugins.
    List,
    /// A `.conf` or `.json`: one plugin.
    Single,
}

/// Why a runtime cannot load a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// It is not JSON.
    #[error("not JSON: {0}")]
    Json(String),
    /// It is JSON, but no object.
    #[error("not a JSON object")]
    NoObject,
    /// A key is missing or of the wrong type.
    #[error("no {0}")]
    Lacks(&'static str),
    /// A plugin in its folder is not one.
    #[error("{0}: {1}")]
    Plugin(String, String),
}

impl Shape {
    /// The shape of a file by its name.
    #[must_use]
    pub fn of(file: &str) -> Self {
        if file.ends_with(".conflist") { Self::List } else { Self::Single }
    }
}

impl Network {
    /// Reads a file. A list that is read alone may have no plugins: those of its folder are not seen here.
    ///
    /// # Errors
    /// When a runtime could not load it.
    pub fn parse(file: &str, text: &str) -> Result<Self, Invalid> {
        let keys = object(text)?;
        match Shape::of(file) {
            Shape::List => Self::list(&keys),
            Shape::Single => Self::single(keys),
        }
    }

    /// What Multus is given: a list if it has plugins, else a plugin.
    pub(super) fn inlined(value: &Value) -> Option<Self> {
        let keys = value.as_object()?;
        if keys.contains_key("plugins") { Self::list(keys).ok() } else { Self::single(keys.clone()).ok() }
    }

    fn single(keys: Map<String, Value>) -> Result<Self, Invalid> {
        let (name, version) = (text_of(&keys, "name"), text_of(&keys, "cniVersion"));
        let plugins = vec![with_type(Value::Object(keys)).ok_or(Invalid::Lacks("type"))?];
        let (only_inlined, disable_check) = (false, false);
        Ok(Self { name, version, plugins, shape: Shape::Single, only_inlined, disable_check })
    }

    fn list(keys: &Map<String, Value>) -> Result<Self, Invalid> {
        let name = text_of(keys, "name").ok_or(Invalid::Lacks("name"))?;
        if keys.get("cniVersion").is_some_and(|version| !version.is_string()) {
            return Err(Invalid::Lacks("cniVersion that is a text"));
        }
        let is_set = |key: &str| keys.get(key).is_some_and(is_true);
        let only_inlined = is_set("loadOnlyInlinedPlugins");
        let plugins = match keys.get("plugins") {
            None if only_inlined => return Err(Invalid::Lacks("plugins")),
            None => Vec::new(),
            Some(Value::Array(plugins)) if !plugins.is_empty() => plugins.clone(),
            Some(_) => return Err(Invalid::Lacks("plugins")),
        };
        let plugins: Option<Vec<Value>> = plugins.into_iter().map(with_type).collect();
        Ok(Self {
            plugins: plugins.ok_or(Invalid::Lacks("type in every plugin"))?,
            only_inlined,
            name: Some(name),
            version: text_of(keys, "cniVersion"),
            shape: Shape::List,
            disable_check: is_set("disableCheck"),
        })
    }

    /// The name of the folder that may have plugins of it.
    #[must_use]
    pub fn folder(&self) -> Option<&str> {
        let is_plain = |name: &&str| !matches!(*name, "" | "." | "..") && !name.contains(['/', '\0']);
        let has_folder = self.shape == Shape::List && !self.only_inlined;
        self.name.as_deref().filter(|_| has_folder).filter(is_plain)
    }

    /// The text of its file, with the plugins of its folder in the list if it has none of its own.
    #[must_use]
    pub fn inlined_text(&self, text: &str) -> String {
        let mut keys = object(text).unwrap_or_default();
        if self.shape == Shape::Single || keys.contains_key("plugins") {
            return text.to_owned();
        }
        keys.insert("plugins".to_owned(), self.plugins.clone().into());
        keys.insert("loadOnlyInlinedPlugins".to_owned(), true.into());
        format!("{:#}\n", Value::Object(keys))
    }

    /// The types of its plugins in order.
    pub fn types(&self) -> impl Iterator<Item = &str> {
        self.plugins.iter().map(kind)
    }

    /// Whether our entry is in it, in any version.
    #[must_use]
    pub fn has_ours(&self) -> bool {
        self.types().any(|kind| kind == PLUGIN_TYPE)
    }

    /// Whether nothing but our entry is in it.
    #[must_use]
    pub fn is_only_ours(&self) -> bool {
        self.types().all(|kind| kind == PLUGIN_TYPE)
    }

    /// Whether it makes no network for pods: the loopback interface is all that its plugins know.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        !self.is_only_ours() && self.types().all(|kind| [LOOPBACK, PLUGIN_TYPE].contains(&kind))
    }

    /// What the runtime hands to our plugin: the entry with the network's name and version.
    #[must_use]
    pub fn handed(&self) -> Option<Value> {
        let mut entry = self.plugins.iter().rfind(|plugin| kind(plugin) == PLUGIN_TYPE)?.clone();
        let network = [("name", &self.name), ("cniVersion", &self.version)];
        for (key, value) in network.into_iter().filter_map(|(key, value)| Some((key, value.clone()?))) {
            entry.as_object_mut()?.insert(key.to_owned(), value.into());
        }
        Some(entry)
    }
}

/// A text as one plugin.
pub(super) fn plugin(text: &str) -> Result<Value, Invalid> {
    with_type(Value::Object(object(text)?)).ok_or(Invalid::Lacks("type"))
}

/// The type of a plugin.
pub(super) fn kind(plugin: &Value) -> &str {
    plugin.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn with_type(plugin: Value) -> Option<Value> {
    (!kind(&plugin).is_empty()).then_some(plugin)
}

/// A text as a JSON object: strict, as the runtime's parser is.
fn object(text: &str) -> Result<Map<String, Value>, Invalid> {
    match serde_json::from_str(text).map_err(|error| Invalid::Json(error.to_string()))? {
        Value::Object(keys) => Ok(keys),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Err(Invalid::NoObject)
        }
    }
}

fn text_of(keys: &Map<String, Value>, key: &str) -> Option<String> {
    keys.get(key)?.as_str().map(str::to_owned)
}

/// libcni takes a text for a truth value, too.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Bool(is_true) => *is_true,
        Value::String(text) => text.eq_ignore_ascii_case("true"),
        Value::Null | Value::Number(_) | Value::Array(_) | Value::Object(_) => false,
    }
}
