//! Which network configuration a runtime runs for pods, as far as the files of its directory show. Pure.
//!
//! A runtime loads the first file, in byte order of the names, that ends in `.conf`, `.conflist` or `.json`. What it does about one that it
//! cannot load is its own: containerd (go-cni) then loads none at all, CRI-O (ocicni) takes the next. A list may have its plugins, or more
//! of them, in the folder of its name (libcni 1.3). Multus is a plugin that runs others: what it runs instead is in its own configuration.
//!
//! The node agent, `redirectctl` and the tests ask [`Directory::verdict`]; no other code judges it.

mod multus;
mod network;

use std::collections::BTreeSet;

pub use network::{Invalid, Network, Shape};
use reasons::ObstacleKind;

/// The plugin's type, which is also its binary's name. The only mark of an entry that is ours.
pub const PLUGIN_TYPE: &str = "istio-cni";
/// The plugin of the loopback interface, which runtimes run by themselves: alone it makes no pod's network.
const LOOPBACK: &str = "loopback";
/// The ends of names that a runtime loads.
pub const LOADED: [&str; 3] = [".conf", ".conflist", ".json"];
/// The end of the names of plugins in the folder of a list.
const IN_FOLDER: &str = ".conf";
/// Where runtimes have the directory, unless they are configured otherwise.
const USUAL: &str = "/etc/cni/net.d";

/// The files of a directory, in byte order of their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory {
    path: String,
    files: Vec<File>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its name; for a plugin in the folder of a list `FOLDER/NAME`.
    pub name: String,
    /// Its text, or why it cannot be read.
    pub text: Result<String, String>,
}

/// Why a runtime cannot load a file, or we cannot know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unloadable {
    /// We cannot read it; the runtime may.
    #[error("{0}")]
    Unreadable(String),
    /// It is not a network configuration.
    #[error("{0}")]
    Invalid(#[from] Invalid),
}

/// What runs the plugin.
#[derive(Debug, Clone, PartialEq)]
pub struct Caller<'d> {
    /// The file with the plugin's entry, or Multus's where that is inlined there.
    pub file: &'d str,
    /// The network that is run.
    pub network: Network,
    /// Whether it is inlined in Multus's own file.
    pub is_inlined: bool,
}

/// Whether every pod of the node gets the plugin.
#[derive(Debug, Clone, PartialEq)]
pub struct PluginCoverage<'d> {
    /// What runs it, if anything does.
    pub caller: Option<Caller<'d>>,
    /// Why nothing does; beside a caller, what the files leave open.
    pub uncalled: Option<Uncalled>,
}

/// The setting that names the file to chain into, for messages: the variable and the chart's value.
pub const CONF_NAME: &str = "CNI_CONF_NAME (chart: cniConfFileName)";

/// Why the runtime does not call the plugin for pods, or the files do not show whether it does.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Uncalled {
    /// No file is a network.
    #[error("no network configuration that the runtime can load in the directory{}", in_brackets(.unloadable))]
    NoNetwork {
        /// Files that are none, with the reason.
        unloadable: Vec<(String, String)>,
    },
    /// The runtime's file is without the plugin.
    #[error("the runtime uses {file}, which has {}", .plugins.join(", "))]
    Without {
        /// The file.
        file: String,
        /// Its plugins.
        plugins: Vec<String>,
    },
    /// The runtime's file makes no network.
    #[error(
        "the runtime uses {0}, which has the plugin loopback alone: pods get no network; remove it, or rename it to sort last"
    )]
    Loopback(String),
    /// Multus runs something else.
    #[error(
        "Multus ({multus}) runs {runs}, without {PLUGIN_TYPE}; put the entry there: name that network's file with {CONF_NAME}, or leave that empty to chain behind Multus"
    )]
    Multus {
        /// Multus's file.
        multus: String,
        /// What it runs, in words.
        runs: String,
    },
    /// Multus runs what is not in this directory.
    #[error("installed, not seen called: Multus ({multus}) runs {runs}, which these files do not show")]
    MultusElsewhere {
        /// Multus's file.
        multus: String,
        /// What it runs, in words.
        runs: String,
    },
    /// The plugin alone in a file, which no runtime reads beside a network.
    #[error(
        "installed, not seen called: no file of the directory calls {0}; only Multus reads it, by a NetworkAttachmentDefinition"
    )]
    Standalone(String),
    /// A file in front cannot be loaded.
    #[error(
        "installed, not seen called: {file} comes first and cannot be loaded ({reason}), and containerd loads none after it; remove or repair it"
    )]
    Broken {
        /// The file.
        file: String,
        /// Why not.
        reason: String,
    },
    /// A file in front cannot be read here.
    #[error("{file} comes first and cannot be read ({reason}), so what the runtime uses is unknown")]
    Unreadable {
        /// The file.
        file: String,
        /// Why not.
        reason: String,
    },
}

impl Uncalled {
    /// Whether the files leave it open. Then a call that was seen decides.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        match self {
            Self::NoNetwork { .. } | Self::Without { .. } | Self::Loopback(_) | Self::Multus { .. } => false,
            Self::MultusElsewhere { .. }
            | Self::Standalone(_)
            | Self::Broken { .. }
            | Self::Unreadable { .. } => true,
        }
    }

    /// The same for all of a kind, for metrics and events.
    #[must_use]
    pub const fn kind(&self) -> ObstacleKind {
        match self {
            Self::NoNetwork { .. } => ObstacleKind::NoNetwork,
            Self::Without { .. } => ObstacleKind::Preempted,
            Self::Loopback(_) => ObstacleKind::Loopback,
            Self::Multus { .. } => ObstacleKind::Multus,
            Self::MultusElsewhere { .. } | Self::Standalone(_) => ObstacleKind::NotSeenCalled,
            Self::Broken { .. } => ObstacleKind::Broken,
            Self::Unreadable { .. } => ObstacleKind::Unreadable,
        }
    }
}

impl Default for Directory {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl Directory {
    /// A directory of these files.
    #[must_use]
    pub fn new(mut files: Vec<File>) -> Self {
        files.sort_by(|one, other| one.name.as_bytes().cmp(other.name.as_bytes()));
        Self { path: USUAL.to_owned(), files }
    }

    /// The same at a path, by which Multus may name its files.
    #[must_use]
    pub fn at(self, path: impl Into<String>) -> Self {
        Self { path: path.into(), ..self }
    }

    /// The same without these files.
    #[must_use]
    pub fn without(&self, names: &[&str]) -> Self {
        let mut rest = self.clone();
        rest.files.retain(|file| !names.contains(&&*file.name));
        rest
    }

    /// Its files.
    #[must_use]
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The text of a file.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.files.iter().find(|file| file.name == name).and_then(|file| file.text.as_deref().ok())
    }

    /// Whether it has a file of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file.name == name)
    }

    /// The folders in which its lists may have plugins, which are to be read as well.
    #[must_use]
    pub fn folders(&self) -> BTreeSet<String> {
        let networks = self.files.iter().filter(|file| Shape::of(&file.name) == Shape::List);
        let networks =
            networks.filter_map(|file| Network::parse(&file.name, file.text.as_deref().ok()?).ok());
        networks.filter_map(|network| network.folder().map(str::to_owned)).collect()
    }

    /// The files that a runtime reads, in its order.
    pub fn read(&self) -> impl Iterator<Item = (&str, Result<Network, Unloadable>)> {
        let loaded = self.files.iter().filter(|file| is_loaded(&file.name));
        loaded.map(|file| (file.name.as_str(), self.network_of(file)))
    }

    fn network_of(&self, file: &File) -> Result<Network, Unloadable> {
        let text = file.text.as_deref().map_err(|reason| Unloadable::Unreadable(reason.clone()))?;
        let mut network = Network::parse(&file.name, text)?;
        if let Some(folder) = network.folder().map(str::to_owned) {
            for file in self.files.iter().filter(|file| is_in_folder(&file.name, &folder)) {
                let text = file.text.as_deref();
                let text = text.map_err(|why| Unloadable::Unreadable(format!("{}: {why}", file.name)))?;
                let plugin = network::plugin(text);
                let plugin = plugin.map_err(|why| Invalid::Plugin(file.name.clone(), why.to_string()))?;
                network.plugins.push(plugin);
            }
        }
        if network.plugins.is_empty() { Err(Invalid::Lacks("plugins").into()) } else { Ok(network) }
    }

    /// The files that make no network for pods, with the reason.
    #[must_use]
    pub fn unusable(&self) -> Vec<(String, String)> {
        let reason = |read: Result<Network, Unloadable>| match read {
            Ok(network) => network.is_loopback().then(|| "the plugin loopback alone".to_owned()),
            Err(unloadable) => Some(unloadable.to_string()),
        };
        self.read().filter_map(|(name, read)| Some((name.to_owned(), reason(read)?))).collect()
    }

    /// Whether every pod of the node gets the plugin.
    #[must_use]
    pub fn verdict(&self) -> PluginCoverage<'_> {
        let mut open = None;
        for (name, read) in self.read() {
            let file = name.to_owned();
            match read {
                Err(Unloadable::Unreadable(reason)) => {
                    open = open.or(Some(Uncalled::Unreadable { file, reason }));
                }
                Err(Unloadable::Invalid(reason)) => {
                    open = open.or(Some(Uncalled::Broken { file, reason: reason.to_string() }));
                }
                Ok(network) => {
                    let verdict = self.of_first(name, network);
                    // No runtime passes over what we cannot read, for all we know; what cannot be loaded, CRI-O does.
                    let is_unread = matches!(open, Some(Uncalled::Unreadable { .. }));
                    let uncalled = match verdict.uncalled {
                        Some(certain) if !certain.is_open() && !is_unread => Some(certain),
                        uncalled => open.or(uncalled),
                    };
                    return PluginCoverage { uncalled, ..verdict };
                }
            }
        }
        let unread = open.filter(|open| matches!(open, Uncalled::Unreadable { .. }));
        PluginCoverage::no(unread.unwrap_or_else(|| Uncalled::NoNetwork { unloadable: self.unusable() }))
    }

    /// The verdict about a file that the runtime uses.
    fn of_first<'d>(&'d self, name: &'d str, network: Network) -> PluginCoverage<'d> {
        let file = name.to_owned();
        if network.is_loopback() {
            return PluginCoverage::no(Uncalled::Loopback(file));
        }
        if network.has_ours() {
            let uncalled = network.is_only_ours().then_some(Uncalled::Standalone(file));
            return PluginCoverage {
                caller: Some(Caller { file: name, network, is_inlined: false }),
                uncalled,
            };
        }
        match network.plugins.iter().find(|plugin| multus::is(plugin)) {
            Some(plugin) => self.of_multus(name, plugin),
            None => {
                let plugins = network.types().map(str::to_owned).collect();
                PluginCoverage::no(Uncalled::Without { file, plugins })
            }
        }
    }
}

impl<'d> PluginCoverage<'d> {
    const fn no(uncalled: Uncalled) -> Self {
        Self { caller: None, uncalled: Some(uncalled) }
    }
}

/// Whether Multus is in a network.
#[must_use]
pub fn has_multus(network: &Network) -> bool {
    network.plugins.iter().any(multus::is)
}

/// Whether a runtime reads a file of this name.
#[must_use]
pub fn is_loaded(name: &str) -> bool {
    !name.contains('/') && LOADED.iter().any(|end| name.ends_with(end))
}

/// Whether a file is a plugin in the folder of a list.
#[must_use]
pub fn is_in_folder(name: &str, folder: &str) -> bool {
    let name = name.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/'));
    name.is_some_and(|name| !name.contains('/') && name.ends_with(IN_FOLDER))
}

/// Files with the problem of each, after a common text; as many as a person reads.
#[must_use]
pub fn in_brackets(files: &[(String, String)]) -> String {
    const SHOWN: usize = 3;
    let mut words: Vec<String> =
        files.iter().take(SHOWN).map(|(name, reason)| format!("{name}: {reason}")).collect();
    if files.len() > SHOWN {
        words.push(format!("{} more", files.len() - SHOWN));
    }
    if words.is_empty() { String::new() } else { format!(" ({})", words.join("; ")) }
}

#[cfg(test)]
mod tests;
