//! What has to change in the configuration directory, and whether the runtime calls the plugin as the directory stands.
//!
//! Pure: a [`Directory`] that was read and a [`Want`] give a [`Plan`]. Edits are in an order in which power may fail between any two.
//!
//! The runtime loads the first file, in byte order of the names, that it can load. Originals of files we edit are kept beside them under
//! a name that no runtime loads.

use std::collections::BTreeMap;

use cni_core::net_dir::{self, CONF_NAME, Caller, Network, Uncalled, Unloadable, is_loaded};

use reasons::ObstacleKind;

use crate::conflist::{self, EntryState, NetConf, PluginEntry, Shape};
use crate::settings::{EntryPlacement, OWNED_FILE};

mod drop_in;
mod ownership;
mod removal;
pub use cni_core::net_dir::{Directory, File};
pub use drop_in::DropIn;
pub use ownership::MARK;
pub use removal::{Leftover, Removal, removal, spent_originals};

/// What is appended to a file's name for its original.
pub const ORIGINAL: &str = ".istio-cni-original";
/// The file with the entry in the folder of a list that has its plugins there: behind those of its usual names.
pub const FOLDER_FILE: &str = "zz-istio-cni.conf";

/// Whether a name in the directory is one of those that matter.
#[must_use]
pub fn matters(name: &str) -> bool {
    is_loaded(name) || name.ends_with(ORIGINAL) || name.ends_with(MARK)
}

/// The files that a runtime reads, in its order, as far as they can be edited: those with plugins of their own.
fn read(directory: &Directory) -> impl Iterator<Item = (&str, Result<NetConf<'_>, String>)> {
    directory.files().iter().filter(|file| is_loaded(&file.name)).map(|file| {
        let conf = file.text.as_deref().map_err(Clone::clone);
        let parsed = |text| NetConf::parse(&file.name, text).map_err(|invalid| invalid.to_string());
        (file.name.as_str(), conf.and_then(parsed))
    })
}

fn valid(directory: &Directory) -> impl Iterator<Item = (&str, NetConf<'_>)> {
    read(directory).filter_map(|(name, conf)| Some((name, conf.ok()?)))
}

/// What the directory should hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Want {
    /// Where the entry goes.
    pub placement: EntryPlacement,
    /// The entry.
    pub entry: PluginEntry,
    /// Whether the entry is in a file beside the list that it is chained into.
    pub drop_in: DropIn,
}

/// A change of one file, at once and whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// The file gets this text.
    Write {
        /// Its name.
        name: String,
        /// Its text.
        text: String,
        /// The file whose mode and owner it gets; its own by default, ours if it is new.
        like: String,
    },
    /// The file goes.
    Delete {
        /// Its name.
        name: String,
    },
}

/// The setting that names our copy in front, for messages: the variable and the chart's value.
const OWNED_NAME: &str = "ISTIO_OWNED_CNI_CONFIG_FILENAME (chart: istioOwnedCNIConfigFileName)";

/// Why the runtime does not call the plugin as the entry wants it, or will not for long.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryObstacle {
    /// A file to chain into does not exist.
    #[error(
        "no network configuration that the runtime can load in the directory{}; waiting for the network plugin to write one",
        net_dir::in_brackets(.unloadable)
    )]
    NoNetwork {
        /// Files that it cannot load, with the reason.
        unloadable: Vec<(String, String)>,
    },
    /// The file that the user named is missing or cannot be loaded.
    #[error("{file}, named by {CONF_NAME}, {because}; waiting for it")]
    NoPinned {
        /// Which.
        file: String,
        /// What is the matter with it.
        because: String,
    },
    /// The file that our copy is a copy of is gone.
    #[error(
        "the network configuration of which {0} is a copy is gone; the copy stays, waiting for the network plugin to write it again"
    )]
    NoOriginal(String),
    /// The file of our settings belongs to another program.
    #[error(
        "{file} belongs to another program ({whose}) and stays as it is; set {setting} to an unused file"
    )]
    Foreign {
        /// Which.
        file: String,
        /// How it shows.
        whose: String,
        /// The setting that names it.
        setting: &'static str,
    },
    /// The runtime uses another file than the one with our entry.
    #[error("the runtime uses {active}, which comes before {ours}")]
    Preempted {
        /// The file it uses.
        active: String,
        /// The file with our entry.
        ours: String,
    },
    /// Our entry is missing.
    #[error("{0} has no istio-cni entry")]
    Missing(String),
    /// Our entry differs.
    #[error("the istio-cni entry of {file} was edited: {}", .keys.join(", "))]
    Edited {
        /// Where.
        file: String,
        /// What.
        keys: Vec<String>,
    },
    /// Our entry is there more than once.
    #[error("{0} has several istio-cni entries")]
    Repeated(String),
    /// A plugin comes after ours. The runtime calls ours all the same.
    #[error("in {file} the plugin {next} comes after istio-cni")]
    Followed {
        /// Where.
        file: String,
        /// Which.
        next: String,
    },
    /// The copy in front is not what it should be.
    #[error("{0} is not the copy of the runtime's list that it should be")]
    Stale(String),
    /// The entry is beside the list alone, and the runtime was not seen to read it there.
    #[error(
        "installed, not seen called: {0} is read only by a runtime with libcni 1.3 (containerd 2.1), and the settings want the entry there alone; set CNI_INSTALL=auto (chart: install) to have it in the network's list until it is read"
    )]
    UnreadDropIn(String),
    /// The settings want the entry beside the list, and it cannot be there.
    #[error(
        "the entry cannot be a file beside {file}, as CNI_INSTALL=drop-in (chart: install) wants it: {why}"
    )]
    NoDropIn {
        /// The list.
        file: String,
        /// Why not.
        why: String,
    },
    /// The entry is there, and the runtime does not call it, or the files do not show whether it does.
    #[error("{0}")]
    Uncalled(Uncalled),
}

impl EntryObstacle {
    /// Whether pods miss the plugin, or get it with another configuration, until this is corrected.
    #[must_use]
    pub const fn concerns_pods(&self) -> bool {
        !matches!(self, Self::Followed { .. })
    }

    /// The same for every obstacle of a kind, for metrics and events.
    #[must_use]
    pub const fn kind(&self) -> ObstacleKind {
        match self {
            Self::NoNetwork { .. } => ObstacleKind::NoNetwork,
            Self::NoPinned { .. } => ObstacleKind::NoPinned,
            Self::NoOriginal(_) => ObstacleKind::NoOriginal,
            Self::Foreign { .. } => ObstacleKind::Foreign,
            Self::Preempted { .. } => ObstacleKind::Preempted,
            Self::Missing(_) => ObstacleKind::Missing,
            Self::Edited { .. } => ObstacleKind::Edited,
            Self::Repeated(_) => ObstacleKind::Repeated,
            Self::Followed { .. } => ObstacleKind::Followed,
            Self::Stale(_) => ObstacleKind::Stale,
            Self::UnreadDropIn(_) => ObstacleKind::NotSeenCalled,
            Self::NoDropIn { .. } => ObstacleKind::NoDropIn,
            Self::Uncalled(uncalled) => uncalled.kind(),
        }
    }

    /// Whether only our entry is not what it should be, and the agent corrects that.
    #[must_use]
    pub const fn is_of_entry(&self) -> bool {
        matches!(self, Self::Missing(_) | Self::Edited { .. } | Self::Repeated(_) | Self::Stale(_))
    }

    /// Whether the files leave open that the plugin is called, and a call that was seen decides.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        matches!(self, Self::UnreadDropIn(_))
            || matches!(self, Self::Uncalled(uncalled) if uncalled.is_open())
    }
}

/// What has to change, and what is wrong as long as it has not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The file that has or gets our entry.
    pub target: Option<String>,
    /// What is wrong now.
    pub obstacle: Option<EntryObstacle>,
    /// The changes, in order.
    pub edits: Vec<Edit>,
    /// The list that the entry is chained into or beside.
    pub list: Option<String>,
    /// Why the entry is in the list where the settings would rather have it beside the list.
    pub inlined_because: Option<String>,
}

impl Plan {
    const fn new(target: Option<String>, obstacle: Option<EntryObstacle>, edits: Vec<Edit>) -> Self {
        Self { target, obstacle, edits, list: None, inlined_because: None }
    }

    const fn wait(obstacle: EntryObstacle) -> Self {
        Self::new(None, Some(obstacle), Vec::new())
    }

    /// The file with our entry, and what the runtime hands to the plugin from it, once the edits are made.
    #[must_use]
    pub fn handed(&self, directory: &Directory) -> Option<(&str, String)> {
        let target = self.target.as_deref()?;
        let written = self.edits.iter().rev().find_map(|edit| match edit {
            Edit::Write { name, text, .. } if name == target => Some(text.as_str()),
            Edit::Write { .. } | Edit::Delete { .. } => None,
        });
        let text = written.or_else(|| directory.text(target))?;
        Some((target, Network::parse(target, text).ok()?.handed()?.to_string()))
    }

    /// What a call of the plugin was made with where the files leave it open: why they do, and all that the runtime may read but our entries,
    /// which the agent changes itself.
    #[must_use]
    pub fn left_open(&self, directory: &Directory) -> Option<String> {
        let obstacle = self.obstacle.as_ref().filter(|obstacle| obstacle.is_open())?;
        let is_read = |file: &&File| is_loaded(&file.name) || file.name.contains('/');
        let text = |file: &File| match &file.text {
            Ok(text) => without_ours(&file.name, text),
            Err(reason) => reason.clone(),
        };
        let files: BTreeMap<&str, String> =
            directory.files().iter().filter(is_read).map(|file| (&*file.name, text(file))).collect();
        Some(
            serde_json::json!({"open": obstacle.to_string(), "target": self.target, "files": files})
                .to_string(),
        )
    }

    fn foreign(file: &str, whose: String, setting: &'static str) -> Self {
        Self::wait(EntryObstacle::Foreign { file: file.to_owned(), whose, setting })
    }
}

/// What other programs have written into a file.
fn without_ours(name: &str, text: &str) -> String {
    match NetConf::parse(name, text) {
        Ok(conf) if conf.network.has_ours() => conf.without().unwrap_or_default(),
        Ok(_) | Err(_) => text.to_owned(),
    }
}

/// The plan that makes a directory hold what it should.
#[must_use]
pub fn plan(directory: &Directory, want: &Want) -> Plan {
    // With one of ours that is broken, no runtime loads the list.
    let broken: Vec<&str> = ownership::broken_in_folders(directory).collect();
    let mut plan = plan_of_sound(&directory.without(&broken), want);
    let is_written = |name: &str| {
        plan.edits.iter().any(|edit| matches!(edit, Edit::Write { name: written, .. } if written == name))
    };
    let (_, spare): (Vec<&str>, Vec<&str>) = broken.into_iter().partition(|name| is_written(name));
    plan.edits.splice(0..0, spare.into_iter().map(|name| Edit::Delete { name: name.to_owned() }));
    plan
}

fn plan_of_sound(directory: &Directory, want: &Want) -> Plan {
    match &want.placement {
        EntryPlacement::Chained { pinned } => chained(directory, pinned.as_deref(), want),
        EntryPlacement::Owned { file, pinned } => owned(directory, file, pinned.as_deref(), &want.entry),
        EntryPlacement::Standalone { file } => standalone(directory, file, &want.entry),
    }
}

/// The entry in the list of another plugin, or beside it.
fn chained(directory: &Directory, pinned: Option<&str>, want: &Want) -> Plan {
    let (name, network) = match network(directory, pinned, None) {
        Ok(found) => found,
        // Its owner took the file away so that the runtime has no network.
        Err(obstacle) => return Plan { edits: ownership::orphans(directory), ..Plan::wait(obstacle) },
    };
    let Some(conf) = directory.text(name).and_then(|text| NetConf::parse(name, text).ok()) else {
        return in_folder(directory, name, &network, &want.entry);
    };
    if ownership::is_bound(directory, name, &conf) {
        return owned(directory, OWNED_FILE, pinned, &want.entry);
    }
    if conf.network.shape == Shape::Single && directory.is_named_by_multus(name) {
        let because = "holds a single plugin and is named by Multus, so it cannot become a list; leave the setting empty to chain behind Multus";
        return Plan::wait(EntryObstacle::NoPinned { file: name.to_owned(), because: because.to_owned() });
    }
    let plan = drop_in::plan(directory, (name, &conf, &network), want);
    Plan { list: Some(name.to_owned()), ..plan }
}

/// The entry in the list; `beside` is the file of ours that has it as well.
fn inlined(
    directory: &Directory,
    name: &str,
    conf: &NetConf<'_>,
    entry: &PluginEntry,
    beside: Option<&str>,
) -> Plan {
    let target = list_name(name);
    let standing = conf.entry_state(entry);
    // Before the entry goes into a file that once was a copy.
    let mut edits = ownership::stale_marks(directory, None);
    edits.extend(keep_original(directory, name, conf));
    if standing != EntryState::Right {
        edits.extend(keep_replaced(directory, name, &target));
        edits.push(Edit::Write { name: target.clone(), text: conf.with(entry), like: name.to_owned() });
        if target != name {
            // The list exists before the single plugin goes, so a network exists at every moment.
            edits.push(Edit::Delete { name: name.to_owned() });
        }
    }
    edits.extend(finish(directory, name, conf));
    let kept: Vec<&str> = [name, &target].into_iter().chain(beside).collect();
    edits.extend(strays(directory, &kept));
    Plan::new(Some(target), judged(directory, standing, name, name), edits)
}

/// The entry in a file of its own in the folder of a list, which may have its other plugins there as well.
fn in_folder(directory: &Directory, name: &str, network: &Network, entry: &PluginEntry) -> Plan {
    let file = drop_in::file_of(network);
    if let Some(whose) = drop_in::others(directory, &file) {
        return Plan::foreign(&file, whose, CONF_NAME);
    }
    let mut standing = drop_in::standing(directory, &file, entry);
    let types: Vec<&str> = network.types().collect();
    let last = types.iter().rposition(|kind| *kind == conflist::PLUGIN_TYPE);
    if let (EntryState::Right, Some(next)) = (&standing, last.and_then(|last| types.get(last + 1))) {
        standing = EntryState::Followed((*next).to_owned());
    }
    let mut edits = ownership::stale_marks(directory, None);
    edits.extend(drop_in::write(&file, name, entry, &standing));
    edits.extend(strays(directory, &[&file]));
    let obstacle = judged(directory, standing, &file, name);
    Plan::new(Some(file), obstacle, edits)
}

/// What keeps pods from getting the plugin from the file with the entry; `network` is the runtime's file that leads to it.
fn judged(directory: &Directory, standing: EntryState, file: &str, network: &str) -> Option<EntryObstacle> {
    let own = obstacle(standing, file);
    if own.as_ref().is_some_and(EntryObstacle::concerns_pods) {
        return own;
    }
    uncalled(directory, network).or(own)
}

/// Why the runtime does not call the plugin by this file, or the files do not show whether it does.
fn uncalled(directory: &Directory, ours: &str) -> Option<EntryObstacle> {
    let verdict = directory.verdict();
    let preempted =
        |active: &str| EntryObstacle::Preempted { active: active.to_owned(), ours: ours.to_owned() };
    match (verdict.caller, verdict.uncalled) {
        (Some(Caller { file, is_inlined: false, .. }), _) if file != ours => Some(preempted(file)),
        (None, Some(Uncalled::Without { file, .. })) => Some(preempted(&file)),
        (_, uncalled) => uncalled.map(EntryObstacle::Uncalled),
    }
}

/// The entry in a copy of the runtime's list, in front of it.
fn owned(directory: &Directory, file: &str, pinned: Option<&str>, entry: &PluginEntry) -> Plan {
    if let Some(whose) = ownership::others_copy(directory, file) {
        return Plan::foreign(file, whose, OWNED_NAME);
    }
    let (name, network) = match network(directory, pinned, Some(file)) {
        Ok(found) => found,
        Err(obstacle) if obstacle.is_open() => return Plan::wait(obstacle),
        Err(_) if directory.has(file) => return orphan(directory, file, entry),
        Err(obstacle) => return Plan::wait(obstacle),
    };
    let whole = directory.text(name).map(|text| network.inlined_text(text)).unwrap_or_default();
    let Ok(conf) = NetConf::parse(name, &whole) else {
        return Plan::wait(EntryObstacle::Stale(file.to_owned()));
    };
    let text = conf.with(entry);
    let mut edits = ownership::stale_marks(directory, Some(file));
    edits.extend(ownership::mark_copy(directory, file));
    let mut obstacle = None;
    if directory.text(file) != Some(text.as_str()) {
        let there = directory.text(file).map(|text| NetConf::parse(file, text));
        // Without the entry, or without the file.
        let is_missing = there.is_none_or(|conf| conf.is_ok_and(|conf| !conf.network.has_ours()));
        obstacle = Some(if is_missing {
            EntryObstacle::Missing(file.to_owned())
        } else {
            EntryObstacle::Stale(file.to_owned())
        });
        edits.push(Edit::Write { name: file.to_owned(), text, like: name.to_owned() });
    }
    edits.extend(strays(directory, &[file]));
    let obstacle = obstacle.or_else(|| uncalled(directory, file));
    Plan::new(Some(file.to_owned()), obstacle, edits)
}

/// A copy of which the original is gone. It stays, with the entry: without it, pods that start before the network plugin has written its
/// file again would start outside the mesh.
fn orphan(directory: &Directory, file: &str, entry: &PluginEntry) -> Plan {
    let there =
        directory.text(file).and_then(|text| Some((text, NetConf::parse(file, text).ok()?.with(entry))));
    let completed = there.filter(|(text, completed)| text != completed);
    let write = |text: String| Edit::Write { name: file.to_owned(), text, like: file.to_owned() };
    let target = completed.as_ref().map(|_| file.to_owned());
    let edits = completed.into_iter().map(|(_, text)| write(text)).collect();
    Plan::new(target, Some(EntryObstacle::NoOriginal(file.to_owned())), edits)
}

/// The entry in a file of its own.
fn standalone(directory: &Directory, file: &str, entry: &PluginEntry) -> Plan {
    if let Some(whose) = ownership::others_single(directory, file) {
        return Plan::foreign(file, whose, CONF_NAME);
    }
    let there = directory.text(file).and_then(|text| NetConf::parse(file, text).ok());
    let standing = there.map_or(EntryState::Absent, |conf| conf.entry_state(entry));
    let mut edits = ownership::stale_marks(directory, None);
    if standing != EntryState::Right {
        edits.push(Edit::Write { name: file.to_owned(), text: entry.standalone(), like: file.to_owned() });
    }
    edits.extend(strays(directory, &[file]));
    let obstacle = obstacle(standing, file).or_else(|| {
        let verdict = directory.verdict();
        let is_called =
            verdict.caller.is_some_and(|caller| caller.file == file) && verdict.uncalled.is_none();
        (!is_called).then(|| EntryObstacle::Uncalled(Uncalled::Standalone(file.to_owned())))
    });
    Plan::new(Some(file.to_owned()), obstacle, edits)
}

/// The network that the entry joins: the file the user named, or the one the runtime uses apart from our own. `copy` is the copy in front,
/// which does not make a network by itself.
fn network<'d>(
    directory: &'d Directory,
    pinned: Option<&str>,
    copy: Option<&str>,
) -> Result<(&'d str, Network), EntryObstacle> {
    let mut others = directory.read().filter(|(name, _)| Some(*name) != copy);
    if let Some(pinned) = pinned {
        let names = siblings(pinned);
        let mut named = others.filter(|(name, _)| names.iter().any(|sibling| sibling == name));
        let found = named.find_map(|(name, network)| Some((name, network.ok()?)));
        return found.ok_or_else(|| no_pinned(directory, pinned));
    }
    let is_copy = |name: &str| {
        let conf = directory.text(name).and_then(|text| NetConf::parse(name, text).ok());
        conf.is_some_and(|conf| ownership::is_our_copy(directory, name, &conf))
    };
    let found = others.find_map(|(name, network)| match network {
        // The runtime can read it, perhaps: what is behind it is another program's, and not used.
        Err(Unloadable::Unreadable(reason)) => {
            let file = name.to_owned();
            Some(Err(EntryObstacle::Uncalled(Uncalled::Unreadable { file, reason })))
        }
        Ok(network) if !network.is_only_ours() && !network.is_loopback() && !is_copy(name) => {
            Some(Ok((name, network)))
        }
        Ok(_) | Err(Unloadable::Invalid(_)) => None,
    });
    found.unwrap_or_else(|| Err(EntryObstacle::NoNetwork { unloadable: directory.unusable() }))
}

/// Why the file that the user named cannot be used.
fn no_pinned(directory: &Directory, pinned: &str) -> EntryObstacle {
    let names = siblings(pinned);
    let mut there = directory.unusable().into_iter().filter(|(name, _)| names.contains(name));
    let because = match there.next() {
        None => "is missing".to_owned(),
        Some((name, _)) if directory.text(&name).is_some_and(conflist::is_list) => format!(
            "holds a list of plugins, which a runtime reads only from a name that ends in .conflist: {} would do",
            list_name(&name)
        ),
        Some((_, reason)) => format!("cannot be loaded: {reason}"),
    };
    EntryObstacle::NoPinned { file: pinned.to_owned(), because }
}

/// A name with each extension that a runtime loads, in the runtime's order.
fn siblings(name: &str) -> Vec<String> {
    let stem = net_dir::LOADED.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
    net_dir::LOADED.iter().map(|end| format!("{stem}{end}")).collect()
}

/// The name that a file has as a list.
fn list_name(name: &str) -> String {
    match Shape::of(name) {
        Shape::List => name.to_owned(),
        Shape::Single => {
            let stem = net_dir::LOADED.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            format!("{stem}.conflist")
        }
    }
}

/// The edit that keeps a file as it is without us, if it is not kept already.
fn keep_original(directory: &Directory, name: &str, conf: &NetConf<'_>) -> Option<Edit> {
    let original = match conf.network.shape {
        Shape::Single => directory.text(name)?.to_owned(),
        Shape::List => conf.without()?,
    };
    let kept = format!("{name}{ORIGINAL}");
    // Of a list that was made of a single plugin the single plugin is the original.
    let is_made = single_names(name).any(|single| directory.has(&format!("{single}{ORIGINAL}")));
    let is_kept = directory.text(&kept) == Some(original.as_str());
    (!is_made && !is_kept).then(|| Edit::Write { name: kept, text: original, like: name.to_owned() })
}

/// The edit that keeps another program's list that a single plugin has to replace.
fn keep_replaced(directory: &Directory, name: &str, target: &str) -> Option<Edit> {
    let text = directory.text(target).filter(|_| name != target)?;
    let without = NetConf::parse(target, text).ok().and_then(|conf| conf.without());
    if without.as_ref().is_some_and(|rest| ownership::is_made_by_us(directory, target, rest)) {
        return None;
    }
    let text = without.unwrap_or_else(|| text.to_owned());
    let kept = format!("{target}{ORIGINAL}");
    let is_kept = directory.text(&kept) == Some(text.as_str());
    (!is_kept).then(|| Edit::Write { name: kept, text, like: target.to_owned() })
}

/// The edit that ends a change from a single plugin to a list which was cut short: the plugin was to go and is still there.
fn finish(directory: &Directory, list: &str, conf: &NetConf<'_>) -> Option<Edit> {
    let rest = conf.without()?;
    let left = single_names(list).find(|single| {
        let text = directory.text(single);
        text.is_some() && text == directory.text(&format!("{single}{ORIGINAL}"))
    })?;
    ownership::is_made_by_us(directory, list, &rest).then_some(Edit::Delete { name: left })
}

/// The names that the single plugin may have had of which a list was made.
fn single_names(list: &str) -> impl Iterator<Item = String> {
    let stem = list.strip_suffix(".conflist").map(str::to_owned);
    stem.into_iter().flat_map(|stem| [format!("{stem}.conf"), format!("{stem}.json")])
}

/// The edits that take us out of every file but these.
fn strays(directory: &Directory, but: &[&str]) -> Vec<Edit> {
    let is_ours = |name: &str, conf: &NetConf<'_>| {
        conf.network.has_ours() || ownership::is_our_copy(directory, name, conf)
    };
    let others = valid(directory).filter(|(name, conf)| !but.contains(name) && is_ours(name, conf));
    let taken_out = others.flat_map(|(name, conf)| removal::take_out(directory, name, &conf, None));
    let broken = ownership::broken_copies(directory).filter(|name| !but.contains(name));
    let in_folders = ownership::in_folders(directory).filter(|name| !but.contains(name));
    let retired = broken.chain(in_folders).flat_map(|name| ownership::retire(directory, name));
    taken_out.chain(retired).collect()
}

fn obstacle(standing: EntryState, file: &str) -> Option<EntryObstacle> {
    let file = file.to_owned();
    match standing {
        EntryState::Right => None,
        EntryState::Absent => Some(EntryObstacle::Missing(file)),
        EntryState::Edited(keys) => Some(EntryObstacle::Edited { file, keys }),
        EntryState::Followed(next) => Some(EntryObstacle::Followed { file, next }),
        EntryState::Repeated => Some(EntryObstacle::Repeated(file)),
    }
}

#[cfg(test)]
mod tests;
