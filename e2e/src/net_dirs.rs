//! Configuration directories, and whether the next pod gets the plugin: what the agent and `redirectctl` both have to say.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

/// Whether the next pod gets the plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Expected {
    /// It does.
    #[default]
    Called,
    /// It does not; a part of the reason.
    NotCalled(String),
    /// The files leave it open; a part of the reason.
    Open(String),
}

/// A directory with the plugin's entry in its place, and what follows from it.
#[derive(Clone, Debug, Deserialize)]
pub struct NetDir {
    /// What it is.
    pub name: String,
    /// Settings of the agent that has the entry there.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Its files: names below it and texts, or the target of a symbolic link behind `-> `.
    pub files: BTreeMap<String, String>,
    /// Whether the next pod gets the plugin.
    #[serde(default)]
    pub expected: Expected,
    /// The finding of `redirectctl`, if any.
    pub finding: Option<String>,
}

#[derive(Deserialize)]
struct Table {
    /// What files have in common, by names.
    texts: BTreeMap<String, String>,
    directories: Vec<NetDir>,
}

/// All of them.
///
/// # Panics
/// The table cannot be read.
pub fn all() -> Vec<NetDir> {
    let Table { texts, mut directories } =
        serde_saphyr::from_str(include_str!("../fixtures/net-dirs.yaml")).expect("a table");
    for text in directories.iter_mut().flat_map(|directory| directory.files.values_mut()) {
        if let Some(named) = texts.get(text) {
            text.clone_from(named);
        }
    }
    directories
}

/// The types of the plugins that a runtime runs, as libcni loads a list; `beside` has the texts of the files in the folder of its name, in their order,
/// or none where libcni is older than 1.3.
///
/// # Panics
/// A text cannot be loaded, with which libcni fails.
pub fn plugins_run<'t>(list: &str, beside: impl IntoIterator<Item = &'t str>) -> Vec<String> {
    let parsed = |text: &str| -> Value {
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
    };
    let kind = |plugin: &Value| plugin["type"].as_str().expect("a type").to_owned();
    let inlined = parsed(list)["plugins"].as_array().cloned().unwrap_or_default();
    inlined.into_iter().chain(beside.into_iter().map(parsed)).map(|plugin| kind(&plugin)).collect()
}

impl NetDir {
    /// Writes its files into a folder.
    ///
    /// # Panics
    /// They cannot be written.
    pub fn write(&self, folder: &Path) {
        for (name, text) in &self.files {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("makes");
            match text.strip_prefix("-> ") {
                Some(target) => symlink(target, path).expect("links"),
                None => fs::write(path, text).expect("writes"),
            }
        }
    }
}
