//! Any network configuration file, and any entry: what a runtime can load it can load afterwards, bytes of others stay, and taking out is
//! the reverse of putting in. For a whole directory as for one file.
//!
//! The file's name is the first line, the entry is behind the first zero byte; without one it is the built-in entry.

#![no_main]

use install_cni::conflist::{EntryState, NetConf, PluginEntry, Shape};
use install_cni::install::conflist_edits::{Directory, DropIn, Edit, File, Want, plan, removal};
use install_cni::settings::EntryPlacement;
use libfuzzer_sys::fuzz_target;
use redirect_core_fuzz::{parts, text};
use serde_json::Value;
use std::collections::BTreeMap;

const BUILT_IN: &str = r#"{"name":"istio-cni","type":"istio-cni","plugin_log_level":"info","exclude_namespaces":["kube-system"],"dns":{}}"#;

fuzz_target!(|input: &str| {
    let (file, entry) = parts::halves(input);
    let (name, file) = file.split_once('\n').unwrap_or(("", file));
    let name = if name.starts_with('s') { "10-net.conf" } else { "10-net.conflist" };
    let entry = if entry.is_empty() { BUILT_IN } else { entry };
    let entry = match PluginEntry::parse(entry) {
        Ok(entry) => entry,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    match NetConf::parse(name, file) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(conf) => edited(file, &conf, &entry),
    }
    for drop_in in [DropIn::Never, DropIn::Offered, DropIn::Demanded, DropIn::Read] {
        installed(name, file, &entry, drop_in);
    }
});

/// One file.
fn edited(text: &str, conf: &NetConf<'_>, entry: &PluginEntry) {
    let before = json(text);
    let with = conf.with(entry);
    let Some(rest) = conf.without() else {
        return assert_eq!(with, text, "a list of ours alone is kept");
    };
    let list = NetConf::parse("x.conflist", &with).expect("what was loaded can be loaded afterwards");
    assert_eq!(list.entry_state(entry), EntryState::Right, "{with}");
    assert_eq!(list.with(entry), with, "putting in twice is putting in once");
    assert_eq!(list.without(), Some(rest.clone()), "{with}");
    // Others keep what they say, to the last key.
    let (rest, with) = (json(&rest), json(&with));
    let plugins = |list: &Value| list["plugins"].as_array().cloned().unwrap_or_default();
    assert_eq!(plugins(&with)[..plugins(&with).len() - 1], plugins(&rest)[..]);
    match conf.network.shape {
        Shape::Single => assert_eq!(plugins(&rest), [before]),
        Shape::List => {
            let others = |list: &Value| {
                plugins(list).into_iter().filter(|plugin| plugin["type"] != "istio-cni").collect::<Vec<_>>()
            };
            assert_eq!(others(&before), others(&with));
            assert_eq!(outside_plugins(&before), outside_plugins(&with));
            // Where nothing of ours was, not even a blank is another one.
            assert!(conf.network.has_ours() || conf.without() == Some(text.to_owned()));
        }
    }
}

fn outside_plugins(list: &Value) -> Value {
    let mut list = list.clone();
    list.as_object_mut().map(|keys| keys.remove("plugins"));
    list
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

/// A directory with this file and another behind it: a second pass finds nothing to do, and what is taken away leaves what was there.
fn installed(name: &str, text: &str, entry: &PluginEntry, drop_in: DropIn) {
    let before = BTreeMap::from([
        (name.to_owned(), text.to_owned()),
        ("99-loopback.conf".to_owned(), r#"{"cniVersion":"1.0.0","name":"lo","type":"loopback"}"#.to_owned()),
    ]);
    let placement = EntryPlacement::Chained { pinned: None };
    let want = Want { placement: placement.clone(), entry: entry.clone(), drop_in };
    let mut files = before.clone();
    let first = plan(&directory(&files), &want);
    if let Some(obstacle) = &first.obstacle {
        text::is_one_safe_line(&obstacle.to_string());
    }
    carry_out(&first.edits, &mut files);
    let second = plan(&directory(&files), &want);
    assert_eq!(second.edits, [], "a second pass has something to do: {files:?}");
    let had_ours = NetConf::parse(name, text).is_ok_and(|conf| conf.network.has_ours());
    let gone = removal(&directory(&files), &placement);
    gone.edits.iter().for_each(|edits| carry_out(edits, &mut files));
    carry_out(&gone.originals, &mut files);
    if !had_ours && gone.leftovers.is_empty() {
        assert_eq!(files, before);
    }
}

fn directory(files: &BTreeMap<String, String>) -> Directory {
    let files = files.iter().map(|(name, text)| File { name: name.clone(), text: Ok(text.clone()) });
    Directory::new(files.collect())
}

fn carry_out(edits: &[Edit], files: &mut BTreeMap<String, String>) {
    for edit in edits {
        match edit {
            Edit::Write { name, text, .. } => drop(files.insert(name.clone(), text.clone())),
            Edit::Delete { name } => drop(files.remove(name)),
        }
    }
}
