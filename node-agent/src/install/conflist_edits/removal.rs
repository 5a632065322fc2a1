//! What has to change so that nothing of ours is left.

use super::ownership::{self, MARK, made_of, retire};
use super::{Directory, Edit, ORIGINAL, read, valid};
use crate::conflist::{NetConf, PLUGIN_TYPE, Shape};
use crate::settings::{EntryPlacement, OWNED_FILE};

/// The changes that take us out of a directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removal {
    /// The changes of each file, in order: when one fails, those after it in its group depend on it.
    pub edits: Vec<Vec<Edit>>,
    /// Originals and marks, to be deleted when all changes are made.
    pub originals: Vec<Edit>,
    /// What stays and why.
    pub leftovers: Vec<Leftover>,
}

/// A file that may hold our entry and was not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Leftover {
    /// The runtime cannot load it either.
    #[error("{file} names istio-cni and cannot be edited ({reason}); the runtime cannot load it either. Repair it without istio-cni{}", .original.as_ref().map(|name| format!(", its last good text is in {name}")).unwrap_or_default())]
    Corrupt {
        /// The file.
        file: String,
        /// Why not.
        reason: String,
        /// Where its last good text is.
        original: Option<String>,
    },
    /// It could not be read, so the entry may be in it and the plugin has to stay.
    #[error("{file} cannot be read ({reason}); it may hold the istio-cni entry")]
    Unreadable {
        /// The file.
        file: String,
        /// Why not.
        reason: String,
    },
}

impl Leftover {
    /// Whether the runtime may still call the plugin because of it.
    #[must_use]
    pub const fn may_call(&self) -> bool {
        match self {
            Self::Corrupt { .. } => false,
            Self::Unreadable { .. } => true,
        }
    }
}

/// The changes that take us out of a directory: out of every file, whichever of them we are in now.
#[must_use]
pub fn removal(directory: &Directory, placement: &EntryPlacement) -> Removal {
    let owned = match placement {
        EntryPlacement::Owned { file, .. } => Some(file.as_str()),
        EntryPlacement::Chained { .. } | EntryPlacement::Standalone { .. } => None,
    };
    let broken: Vec<&str> = ownership::broken_copies(directory).collect();
    let mut removal = Removal::default();
    for (name, conf) in read(directory) {
        match conf {
            Ok(conf) if conf.network.has_ours() || ownership::is_our_copy(directory, name, &conf) => {
                removal.edits.push(take_out(directory, name, &conf, owned));
            }
            Ok(_) => {}
            Err(_) if broken.contains(&name) => removal.edits.push(retire(directory, name)),
            Err(reason) => removal.leftovers.extend(leftover(directory, name, reason)),
        }
    }
    let in_folders = ownership::in_folders(directory).chain(ownership::broken_in_folders(directory));
    removal.edits.extend(in_folders.map(|name| retire(directory, name)));
    let unread = ownership::unread_in_folders(directory)
        .map(|(file, reason)| Leftover::Unreadable { file: file.to_owned(), reason: reason.to_owned() });
    removal.leftovers.extend(unread);
    let corrupt = |name: &str| {
        removal.leftovers.iter().any(|leftover| match leftover {
            Leftover::Corrupt { original, .. } => original.as_deref() == Some(name),
            Leftover::Unreadable { .. } => false,
        })
    };
    let names = directory.files().iter().map(|file| &file.name);
    let originals = names.filter(|name| name.ends_with(ORIGINAL) || name.ends_with(MARK));
    removal.originals =
        originals.filter(|name| !corrupt(name)).map(|name| Edit::Delete { name: name.clone() }).collect();
    removal
}

/// The edits that remove the originals of lists from which removal alone gives the same text. They are of no use to another agent, which
/// may be Istio's; the next one of ours keeps them again. The default name of copies is an exception: there the original distinguishes another
/// program's list from a copy.
#[must_use]
pub fn spent_originals(directory: &Directory) -> Vec<Edit> {
    let is_spent = |name: &str, conf: &NetConf<'_>| {
        let original = directory.text(&format!("{name}{ORIGINAL}"));
        let is_derived = matches!(conf.without(), Some(rest) if original == Some(rest.as_str()));
        conf.network.shape == Shape::List && name != OWNED_FILE && is_derived
    };
    let spent = valid(directory).filter(|(name, conf)| is_spent(name, conf));
    spent.map(|(name, _)| Edit::Delete { name: format!("{name}{ORIGINAL}") }).collect()
}

/// The edits that take our entry out of a file that has it; `owned` is where the settings want a copy in front.
pub(super) fn take_out(
    directory: &Directory,
    name: &str,
    conf: &NetConf<'_>,
    owned: Option<&str>,
) -> Vec<Edit> {
    let is_copy = ownership::is_our_copy(directory, name, conf)
        || (Some(name) == owned && ownership::is_copy_of_another(directory, name, conf));
    let delete = || Edit::Delete { name: name.to_owned() };
    let write = |text: String| Edit::Write { name: name.to_owned(), text, like: name.to_owned() };
    let Some(rest) = conf.without().filter(|_| !is_copy) else { return retire(directory, name) };
    let Some((single, text)) = made_of(directory, name, &rest) else { return vec![write(rest)] };
    // A program that rewrote the single plugin has decided its content.
    let text = directory.text(&single).unwrap_or(&text).to_owned();
    let replaced = directory.text(&format!("{name}{ORIGINAL}"));
    vec![
        // The single plugin is back before the list goes.
        Edit::Write { name: single, text, like: name.to_owned() },
        replaced.map_or_else(delete, |text| write(text.to_owned())),
    ]
}

fn leftover(directory: &Directory, name: &str, reason: String) -> Option<Leftover> {
    let file = name.to_owned();
    match directory.text(name) {
        None => Some(Leftover::Unreadable { file, reason }),
        Some(text) if text.contains(&format!("\"{PLUGIN_TYPE}\"")) => {
            let original = Some(format!("{name}{ORIGINAL}")).filter(|name| directory.has(name));
            Some(Leftover::Corrupt { file, reason, original })
        }
        Some(_) => None,
    }
}
