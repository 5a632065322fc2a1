//! What Multus runs instead of itself.
//!
//! The network of every pod is `clusterNetwork`, further ones are `defaultNetworks`; without the former it is the first of the inlined
//! `delegates`, and the others are the further ones. A network is a path (of a file, or of a directory whose first file counts), or the name of
//! a network: of a NetworkAttachmentDefinition, which is in the cluster, else of a file in `confDir`.

use serde_json::Value;

use super::network::kind;
use super::{Caller, Directory, Network, PluginCoverage, Uncalled, Unloadable};

/// The types of Multus's plugins begin with it: `multus` does the work itself, `multus-shim` asks the node's daemon.
const PREFIX: &str = "multus";
/// The one that asks a daemon, which has settings of its own.
const SHIM: &str = "multus-shim";
/// Its directory, unless it is configured otherwise.
const USUAL: &str = "/etc/cni/multus/net.d";
/// Where containers mount the node's root.
const MOUNTS: [&str; 2] = ["/hostroot/", "/host/"];

/// A network that Multus runs.
enum Run<'d> {
    /// In a file of the directory; whether that is surely what Multus means.
    File(&'d str, Network, bool),
    /// Inlined.
    Inlined(Network),
    /// Multus cannot load it; in words.
    Fails(String),
    /// Not here; in words.
    Elsewhere(String),
}

/// Whether a plugin is Multus.
pub(super) fn is(plugin: &Value) -> bool {
    kind(plugin).starts_with(PREFIX)
}

impl Directory {
    /// The verdict where the runtime's file has Multus, and not our plugin.
    pub(super) fn of_multus<'d>(&'d self, file: &'d str, plugin: &Value) -> PluginCoverage<'d> {
        let multus = file.to_owned();
        let runs = self.multus_runs(plugin);
        for run in &runs {
            let (name, network, is_sure, is_inlined) = match run {
                Run::File(name, network, is_sure) => (*name, network, *is_sure, false),
                Run::Inlined(network) => (file, network, true, true),
                Run::Fails(_) | Run::Elsewhere(_) => continue,
            };
            if network.has_ours() {
                let runs = format!("the network {}", network.name.as_deref().unwrap_or("without a name"));
                let uncalled = (!is_sure).then(|| Uncalled::MultusElsewhere { multus: multus.clone(), runs });
                let caller = Some(Caller { file: name, network: network.clone(), is_inlined });
                return PluginCoverage { caller, uncalled };
            }
        }
        let elsewhere =
            |run: &Run<'_>| if let Run::Elsewhere(words) = run { Some(words.clone()) } else { None };
        if let Some(runs) = runs.iter().find_map(elsewhere) {
            return PluginCoverage::no(Uncalled::MultusElsewhere { multus, runs });
        }
        let words: Vec<String> = runs.iter().map(Run::words).collect();
        PluginCoverage::no(Uncalled::Multus { multus, runs: words.join(", ") })
    }

    /// Whether a Multus of the directory names a file of it by its path, and so depends on the name.
    #[must_use]
    pub fn is_named_by_multus(&self, file: &str) -> bool {
        let is_it = |path: &str| {
            path.rsplit_once('/').is_some_and(|(directory, name)| name == file && self.is_at(directory))
        };
        let names = |plugin: &Value| {
            let texts = ["clusterNetwork", "readinessindicatorfile"].map(|key| plugin.get(key));
            let others = plugin.get("defaultNetworks").and_then(Value::as_array);
            let mut paths = texts.into_iter().flatten().chain(others.into_iter().flatten());
            paths.any(|path| path.as_str().is_some_and(is_it))
        };
        let networks = self.read().filter_map(|(_, network)| network.ok());
        networks.flat_map(|network| network.plugins).any(|plugin| is(&plugin) && names(&plugin))
    }

    fn multus_runs<'d>(&'d self, plugin: &Value) -> Vec<Run<'d>> {
        let text = |key: &str| plugin.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
        let list =
            |key: &str| plugin.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        // The daemon's settings, which are not seen, name another directory: usually the runtime's.
        let is_here = match text("confDir") {
            Some(directory) => self.is_at(directory),
            None => kind(plugin) == SHIM || self.is_at(USUAL),
        };
        if let Some(cluster) = text("clusterNetwork") {
            let others = list("defaultNetworks").iter().filter_map(Value::as_str);
            return [cluster]
                .into_iter()
                .chain(others)
                .map(|network| self.multus_run(network, is_here))
                .collect();
        }
        let inlined: Vec<Run<'_>> =
            list("delegates").iter().filter_map(Network::inlined).map(Run::Inlined).collect();
        if inlined.is_empty() {
            let words =
                "what its daemon is configured with, with neither clusterNetwork nor delegates in the file";
            return vec![Run::Elsewhere(words.to_owned())];
        }
        inlined
    }

    /// The network that Multus takes for a name or path; `is_here` is whether this is the directory in which it looks for names.
    fn multus_run(&self, network: &str, is_here: bool) -> Run<'_> {
        let (found, is_sure) = match network.trim_end_matches('/').rsplit_once('/') {
            None => (self.named(Some(network)), is_here),
            Some(_) if self.is_at(network) => (self.named(None), true),
            Some((directory, file)) if self.is_at(directory) => {
                match self.read().find(|(name, _)| *name == file) {
                    Some((file, Ok(network))) => (Ok(Some((file, network))), true),
                    Some((file, Err(why))) => (Err((file, why)), true),
                    None => return Run::Fails(format!("{file}, which is missing")),
                }
            }
            Some(_) => (Ok(None), true),
        };
        match found {
            Ok(Some((file, network))) => Run::File(file, network, is_sure),
            Ok(None) => Run::Elsewhere(format!("the network {network}")),
            Err((file, Unloadable::Unreadable(_))) => {
                Run::Elsewhere(format!("{file}, which cannot be read,"))
            }
            Err((file, why)) => Run::Fails(format!("{network}, and {file} cannot be loaded ({why})")),
        }
    }

    /// The first network of a name, or of any: Multus gives up at a file that it cannot load.
    fn named(&self, wanted: Option<&str>) -> Result<Option<(&str, Network)>, (&str, Unloadable)> {
        for (file, read) in self.read() {
            let network = read.map_err(|why| (file, why))?;
            if wanted.is_none() || network.name.as_deref() == wanted {
                return Ok(Some((file, network)));
            }
        }
        Ok(None)
    }

    /// Whether a path is this directory. Multus's container and ours may have it mounted at different places, so the mount point does not count.
    fn is_at(&self, path: &str) -> bool {
        on_node(path) == on_node(&self.path) || {
            let last = |path: &str| path.trim_end_matches('/').rsplit('/').next().map(str::to_owned);
            let is_multus = |path: &str| path.split('/').any(|part| part == PREFIX);
            last(path) == last(&self.path) && is_multus(path) == is_multus(&self.path)
        }
    }
}

impl Run<'_> {
    fn words(&self) -> String {
        let types = |network: &Network| network.types().collect::<Vec<_>>().join(", ");
        match self {
            Self::File(file, network, _) => format!("{file} ({})", types(network)),
            Self::Inlined(network) => {
                let name = network.name.as_deref().map(|name| format!("{name}: ")).unwrap_or_default();
                format!("its own delegates ({name}{})", types(network))
            }
            Self::Fails(words) | Self::Elsewhere(words) => words.clone(),
        }
    }
}

/// A mounted directory by its path on the node.
fn on_node(path: &str) -> String {
    let rest = MOUNTS.iter().find_map(|mount| path.strip_prefix(mount));
    rest.map_or_else(|| path.to_owned(), |rest| format!("/{rest}")).trim_end_matches('/').to_owned()
}
