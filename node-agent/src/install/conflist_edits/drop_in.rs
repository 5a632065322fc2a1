//! The entry in a file beside the network's list: in the folder of its name, which libcni reads since 1.3. The list then stays as its owner wrote it.
//!
//! No file shows whether a runtime reads that folder. So the entry is in both until the plugin was called by the drop-in, which does no harm:
//! a second ADD finds everything in force. Then it leaves the list, until the process that called it is gone.

use cni_core::net_dir::{Network, has_multus};

use super::{
    Directory, Edit, EntryObstacle, FOLDER_FILE, ORIGINAL, Plan, Want, in_folder, inlined, ownership,
};
use crate::conflist::{EntryState, NetConf, PluginEntry, Shape};

/// The longest name of a folder: with what is appended while it is prepared, a file system takes it.
const LONGEST_FOLDER: usize = 180;

/// Whether the entry is in a file beside the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropIn {
    /// In the list alone.
    Never,
    /// In both: the runtime was not seen to read the file.
    Offered,
    /// The settings want it in the file alone, and the runtime was not seen to read it.
    Demanded,
    /// In the file alone: the runtime reads it.
    Read,
}

/// The plan for a list that has plugins of its own: its file, and what is in it.
pub(super) fn plan(
    directory: &Directory,
    (name, conf, network): (&str, &NetConf<'_>, &Network),
    want: &Want,
) -> Plan {
    let entry = &want.entry;
    let file = match (want.drop_in, place(directory, name, conf, network)) {
        (DropIn::Never, _) => return inlined(directory, name, conf, entry, None),
        (DropIn::Demanded, Err(why)) if !conf.network.has_ours() => {
            return Plan::wait(EntryObstacle::NoDropIn { file: name.to_owned(), why });
        }
        (DropIn::Offered | DropIn::Demanded | DropIn::Read, Err(why)) => {
            let plan = inlined(directory, name, conf, entry, None);
            return Plan { inlined_because: Some(why), ..plan };
        }
        (DropIn::Offered | DropIn::Demanded | DropIn::Read, Ok(file)) => file,
    };
    let beside = &entry.as_drop_in();
    match want.drop_in {
        // An entry of the list stays until the other is read, whatever the settings want.
        DropIn::Demanded if !conf.network.has_ours() => {
            let plan = in_folder(directory, name, network, beside);
            let unread = || Some(EntryObstacle::UnreadDropIn(file));
            Plan { obstacle: plan.obstacle.filter(EntryObstacle::concerns_pods).or_else(unread), ..plan }
        }
        DropIn::Never | DropIn::Offered | DropIn::Demanded => {
            let mut plan = inlined(directory, name, conf, entry, Some(&file));
            plan.edits.extend(write(&file, name, beside, &standing(directory, &file, beside)));
            let because = format!("until the runtime is seen to read {file}, which has it as well");
            Plan { inlined_because: Some(because), ..plan }
        }
        DropIn::Read => {
            let mut plan = in_folder(directory, name, network, beside);
            let original = format!("{name}{ORIGINAL}");
            plan.edits.extend(directory.has(&original).then_some(Edit::Delete { name: original }));
            plan
        }
    }
}

/// The file beside a list, or why the entry cannot be there.
fn place(directory: &Directory, name: &str, conf: &NetConf<'_>, network: &Network) -> Result<String, String> {
    if conf.network.shape == Shape::Single {
        return Err("a file with a single plugin has no folder".to_owned());
    }
    let Some(folder) = network.folder() else {
        return Err(if network.only_inlined {
            "loadOnlyInlinedPlugins is set there".to_owned()
        } else {
            format!(
                "its network's name, {:?}, is not one of a folder",
                network.name.as_deref().unwrap_or_default()
            )
        });
    };
    if folder.len() > LONGEST_FOLDER {
        return Err(format!("its network's name has {} bytes, which is too long for a folder", folder.len()));
    }
    if has_multus(network) {
        return Err("it is Multus's, which has its own rules for what it runs".to_owned());
    }
    if directory.read().next().is_none_or(|(first, _)| first != name) {
        return Err("the runtime does not use it first".to_owned());
    }
    let made = conf.without().is_some_and(|rest| ownership::is_made_by_us(directory, name, &rest));
    if made {
        return Err("it was made of a file with a single plugin".to_owned());
    }
    if let Some(Err(why)) =
        directory.files().iter().find(|file| file.name == format!("{folder}/")).map(|file| &file.text)
    {
        return Err(format!("{folder} is not a folder that the agent can use: {why}"));
    }
    let file = file_of(network);
    match others(directory, &file) {
        Some(whose) => Err(format!("{file} belongs to another program ({whose})")),
        None => Ok(file),
    }
}

/// The file of ours in the folder of a list.
pub(super) fn file_of(network: &Network) -> String {
    format!("{}/{FOLDER_FILE}", network.folder().unwrap_or_default())
}

/// The owner of the file of that name, in words, if it is another program.
pub(super) fn others(directory: &Directory, file: &str) -> Option<String> {
    let conf = NetConf::parse(file, directory.text(file)?).ok()?;
    (!conf.network.is_only_ours()).then(|| ownership::neighbours(&conf))
}

/// How our entry stands in that file.
pub(super) fn standing(directory: &Directory, file: &str, entry: &PluginEntry) -> EntryState {
    let conf = directory.text(file).and_then(|text| NetConf::parse(file, text).ok());
    conf.map_or(EntryState::Absent, |conf| conf.entry_state(entry))
}

/// The edit that makes it right.
pub(super) fn write(file: &str, list: &str, entry: &PluginEntry, standing: &EntryState) -> Option<Edit> {
    let is_right = matches!(standing, EntryState::Right | EntryState::Followed(_));
    let edit = || Edit::Write { name: file.to_owned(), text: entry.standalone(), like: list.to_owned() };
    (!is_right).then(edit)
}
