//! Which files are ours. A name proves nothing: files of other programs stay, whatever their names.

use serde_json::Value;

use super::{Directory, Edit, FOLDER_FILE, File, ORIGINAL, read, single_names, valid};
use crate::conflist::{NetConf, PLUGIN_TYPE, Shape};
use crate::settings::{OWNED_FILE, STANDALONE_FILE};

/// What is appended to the name of a copy of ours for the mark beside it.
pub const MARK: &str = ".istio-cni-owned";

/// The name of a copy's mark.
pub(super) fn mark(copy: &str) -> String {
    format!("{copy}{MARK}")
}

/// The edit that marks a copy as ours, unless it is marked. The mark comes before the copy.
pub(super) fn mark_copy(directory: &Directory, copy: &str) -> Option<Edit> {
    let name = mark(copy);
    let text = format!("{copy} is a copy with the {PLUGIN_TYPE} entry; it is removed with {PLUGIN_TYPE}.\n");
    (!directory.has(&name)).then(|| Edit::Write { like: name.clone(), name, text })
}

/// Whether a file has a mark of ours beside it.
fn is_marked(directory: &Directory, name: &str) -> bool {
    directory.has(&mark(name))
}

/// The edits that remove marks that mark no copy of ours, except for `but`.
pub(super) fn stale_marks(directory: &Directory, but: Option<&str>) -> Vec<Edit> {
    let marked = directory.files().iter().filter_map(|file| file.name.strip_suffix(MARK));
    let is_copy = |name: &str| {
        let conf = directory.text(name).map(|text| NetConf::parse(name, text));
        conf.is_some_and(|conf| conf.map_or(true, |conf| is_our_copy(directory, name, &conf)))
    };
    let stale = marked.filter(|name| Some(*name) != but && !is_copy(name));
    stale.map(|name| Edit::Delete { name: mark(name) }).collect()
}

/// Whether a file is a copy that we made. With our entry it has a mark beside it, or, made by Istio's agent, the name of copies; in another
/// program's list of that name, our entry would have an original kept beside it. Without the entry, which another program took out, it is
/// a copy as long as nothing would be lost with it: in the place of a copy another program may have put a list of its own.
pub(super) fn is_our_copy(directory: &Directory, name: &str, conf: &NetConf<'_>) -> bool {
    let is_marked = is_marked(directory, name);
    if conf.network.has_ours() {
        is_marked || (name == OWNED_FILE && !directory.has(&format!("{name}{ORIGINAL}")))
    } else {
        is_marked && is_in_another(directory, name, conf)
    }
}

/// The copies of ours that no runtime can load, because another program wrote half of them.
pub(super) fn broken_copies(directory: &Directory) -> impl Iterator<Item = &str> {
    let broken = read(directory).filter(|(_, conf)| conf.is_err()).map(|(name, _)| name);
    broken.filter(|name| is_marked(directory, name) && directory.text(name).is_some())
}

/// The edits that remove a file of ours, and its mark.
pub(super) fn retire(directory: &Directory, name: &str) -> Vec<Edit> {
    let mark = Some(mark(name)).filter(|mark| directory.has(mark));
    [name.to_owned()].into_iter().chain(mark).map(|name| Edit::Delete { name }).collect()
}

/// Whether a list without our entry is the one we made of a single plugin, unchanged.
pub(super) fn is_made_by_us(directory: &Directory, list: &str, rest: &str) -> bool {
    made_of(directory, list, rest).is_some()
}

/// The single plugin, its name and text, that an unchanged list was made of.
pub(super) fn made_of(directory: &Directory, list: &str, rest: &str) -> Option<(String, String)> {
    single_names(list).find_map(|single| {
        let original = directory.text(&format!("{single}{ORIGINAL}"))?;
        let conf = NetConf::parse(&single, original).ok()?;
        let is_unchanged = conf.network.shape == Shape::Single && conf.without() == Some(rest.to_owned());
        is_unchanged.then(|| (single, original.to_owned()))
    })
}

/// The plugins whose program depends on the name of their file: OVN-Kubernetes' node pod probes for `10-ovn-kubernetes.conf` while it is ready,
/// and takes it away when it ends, so that the runtime has no network until it is back.
const BOUND: [&str; 1] = ["ovn-k8s-cni-overlay"];

fn has_bound(conf: &NetConf<'_>) -> bool {
    conf.network.types().any(|kind| BOUND.contains(&kind))
}

/// Whether a single plugin has to keep its name, or has lost it to a list of ours.
pub(super) fn is_bound(directory: &Directory, name: &str, conf: &NetConf<'_>) -> bool {
    let is_single = || match conf.network.shape {
        Shape::Single => true,
        Shape::List => conf.without().is_some_and(|rest| is_made_by_us(directory, name, &rest)),
    };
    has_bound(conf) && is_single()
}

/// The edits that remove copies of such plugins, whose original is gone.
pub(super) fn orphans(directory: &Directory) -> Vec<Edit> {
    let copies = valid(directory)
        .filter(|(name, conf)| is_marked(directory, name) && conf.network.has_ours() && has_bound(conf));
    copies.flat_map(|(name, _)| retire(directory, name)).collect()
}

/// The files of ours in folders of lists.
pub(super) fn in_folders(directory: &Directory) -> impl Iterator<Item = &str> {
    let is_ours =
        |name: &str, text: &str| NetConf::parse(name, text).is_ok_and(|conf| conf.network.is_only_ours());
    let files = directory.files().iter().filter(|file| file.name.contains('/'));
    files
        .filter(move |file| file.text.as_deref().is_ok_and(|text| is_ours(&file.name, text)))
        .map(|file| file.name.as_str())
}

/// Those of our name there that cannot be loaded: of this plugin's name, so an earlier agent's.
pub(super) fn broken_in_folders(directory: &Directory) -> impl Iterator<Item = &str> {
    let is_ours = |name: &str| name.ends_with(&format!("/{FOLDER_FILE}"));
    let is_broken = move |file: &&File| {
        is_ours(&file.name)
            && file.text.as_deref().is_ok_and(|text| NetConf::parse(&file.name, text).is_err())
    };
    directory.files().iter().filter(is_broken).map(|file| file.name.as_str())
}

/// What could not be read where ours may be: files of our name, and folders of lists. Their names, and why not.
pub(super) fn unread_in_folders(directory: &Directory) -> impl Iterator<Item = (&str, &str)> {
    let may_be_ours = |name: &str| name.ends_with('/') || name.ends_with(&format!("/{FOLDER_FILE}"));
    let files = directory.files().iter().filter(move |file| may_be_ours(&file.name));
    files.filter_map(|file| Some((file.name.as_str(), file.text.as_deref().err()?.as_str())))
}

/// Whether nothing would be lost with a file that has our entry: what else is in it is in another file as well.
pub(super) fn is_copy_of_another(directory: &Directory, name: &str, conf: &NetConf<'_>) -> bool {
    let is_kept = directory.has(&format!("{name}{ORIGINAL}"));
    conf.network.has_ours() && !is_kept && is_in_another(directory, name, conf)
}

/// Whether what is in a file beside our entry is in another file as well.
fn is_in_another(directory: &Directory, name: &str, conf: &NetConf<'_>) -> bool {
    let values = |conf: &NetConf<'_>| serde_json::from_str::<Value>(&conf.without()?).ok();
    let Some(there) = values(conf) else { return false };
    valid(directory).any(|(other, conf)| other != name && values(&conf).as_ref() == Some(&there))
}

/// The owner of the file to write a copy to, in words, if it is another program. A marked file is ours, whatever became of it.
pub(super) fn others_copy(directory: &Directory, file: &str) -> Option<String> {
    if is_marked(directory, file) {
        return None;
    }
    let is_copy =
        |conf: &NetConf<'_>| is_our_copy(directory, file, conf) || is_copy_of_another(directory, file, conf);
    others(directory, file, is_copy, OWNED_FILE)
}

/// The owner of the file to hold our entry alone, in words, if it is another program.
pub(super) fn others_single(directory: &Directory, file: &str) -> Option<String> {
    others(directory, file, |_| false, STANDALONE_FILE)
}

/// The plugins of another program's file.
pub(super) fn neighbours(conf: &NetConf<'_>) -> String {
    format!("its plugins: {}", conf.network.types().collect::<Vec<_>>().join(", "))
}

fn others(
    directory: &Directory,
    file: &str,
    is_copy: impl Fn(&NetConf<'_>) -> bool,
    default: &str,
) -> Option<String> {
    match read(directory).find(|(name, _)| *name == file)?.1 {
        Ok(conf) if conf.network.is_only_ours() || is_copy(&conf) => None,
        Ok(conf) => Some(neighbours(&conf)),
        // Truncated by a program that does not write atomically. With this plugin's name, that is an earlier agent.
        Err(_) if file == default && directory.text(file).is_some() => None,
        Err(reason) => Some(format!("it cannot be loaded: {reason}")),
    }
}
