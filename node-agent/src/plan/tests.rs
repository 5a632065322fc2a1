use super::*;
use crate::conflist::Facts;
use crate::settings::OWNED_FILE;
use cni_core::sandboxed::SandboxedRuntimes;

const CALICO: &str = "{\n  \"name\": \"net\",\n  \"cniVersion\": \"0.3.1\",\n  \"plugins\": [\n    {\n      \"type\": \"calico\"\n    }\n  ]\n}\n";
const OTHER: &str = r#"{"name":"other","plugins":[{"type":"bridge"}]}"#;
const SINGLE: &str = "{\n  \"cniVersion\": \"0.4.0\",\n  \"name\": \"single\",\n  \"type\": \"ptp\"\n}";

fn entry() -> Entry {
    Entry::of(&Facts {
        log_level: "info".into(),
        run_dir: "/var/run/istio-cni".into(),
        exclude_namespaces: Vec::new(),
        pod_namespace: "istio-system".into(),
        agent_host_network: false,
        native_nftables: false,
        nft_sets: false,
        strict_capture: false,
        sandboxed: SandboxedRuntimes::default(),
        ambient: None,
    })
}

fn chained() -> Want {
    Want { placement: Placement::Chained { pinned: None }, entry: entry() }
}

fn pinned(name: &str) -> Want {
    Want { placement: Placement::Chained { pinned: Some(name.into()) }, entry: entry() }
}

fn owned() -> Want {
    Want { placement: Placement::Owned { file: OWNED_FILE.into(), pinned: None }, entry: entry() }
}

fn standalone() -> Want {
    Want { placement: Placement::Standalone { file: STANDALONE_FILE.into() }, entry: entry() }
}

fn directory(files: &[(&str, &str)]) -> Directory {
    let file = |(name, text): &(&str, &str)| File { name: (*name).into(), text: Ok((*text).into()) };
    Directory::new(files.iter().map(file).collect())
}

/// The directory after edits, repeated until the plan is empty.
fn settled(mut at: Directory, want: &Want) -> (Directory, Plan) {
    for _ in 0..5 {
        let plan = plan(&at, want);
        if plan.edits.is_empty() {
            return (at, plan);
        }
        at = edited(at, &plan.edits);
    }
    panic!("never settles: {at:?}");
}

fn edited(mut at: Directory, edits: &[Edit]) -> Directory {
    for edit in edits {
        match edit {
            Edit::Write { name, text, .. } => {
                at.files.retain(|file| file.name != *name);
                at.files.push(File { name: name.clone(), text: Ok(text.clone()) });
            }
            Edit::Delete { name } => at.files.retain(|file| file.name != *name),
        }
        at = Directory::new(at.files);
        // At every moment the runtime finds a network, if it ever did.
        assert!(at.active().is_some(), "{edit:?} leaves no network: {at:?}");
    }
    at
}

fn removed(at: Directory, placement: &Placement) -> Directory {
    let removal = removal(&at, placement);
    assert_eq!(removal.leftovers, []);
    let mut files = at.files;
    for edit in removal.edits.iter().flatten().chain(&removal.originals) {
        match edit {
            Edit::Write { name, text, .. } => {
                files.retain(|file| file.name != *name);
                files.push(File { name: name.clone(), text: Ok(text.clone()) });
            }
            Edit::Delete { name } => files.retain(|file| file.name != *name),
        }
    }
    Directory::new(files)
}

fn calls_us(at: &Directory) -> bool {
    at.active().is_some_and(|(_, conf)| conf.has_ours())
}

#[test]
fn the_entry_goes_into_the_first_file_that_can_be_loaded() {
    let start = directory(&[
        ("00-broken.conf", "{"),
        ("10-calico.conflist", CALICO),
        ("20-other.conflist", OTHER),
        ("05-empty.conflist", ""),
    ]);
    let first = plan(&start, &chained());
    assert_eq!(first.target.as_deref(), Some("10-calico.conflist"));
    assert_eq!(first.obstacle, Some(Obstacle::Missing("10-calico.conflist".into())));
    let (end, last) = settled(start.clone(), &chained());
    assert_eq!(last.obstacle, None);
    assert!(calls_us(&end));
    assert_eq!(end.text("10-calico.conflist.istio-cni-original"), Some(CALICO));
    assert_eq!(end.text("20-other.conflist"), Some(OTHER));
    assert_eq!(removed(end, &chained().placement), start);
}

#[test]
fn the_original_is_kept_before_the_file_is_changed() {
    let plan = plan(&directory(&[("10-calico.conflist", CALICO)]), &chained());
    let names: Vec<&str> = plan
        .edits
        .iter()
        .map(|edit| match edit {
            Edit::Write { name, .. } | Edit::Delete { name } => name.as_str(),
        })
        .collect();
    assert_eq!(names, ["10-calico.conflist.istio-cni-original", "10-calico.conflist"]);
}

/// What follows may be Istio's agent, which knows no originals.
#[test]
fn originals_that_say_nothing_new_go_when_another_agent_follows() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    let (end, _) = settled(start.clone(), &chained());
    let goes = [Edit::Delete { name: "10-calico.conflist.istio-cni-original".into() }];
    assert_eq!(spent_originals(&end), goes);
    let left = edited(end.clone(), &goes);
    assert_eq!(removed(left.clone(), &chained().placement), start);
    assert_eq!(settled(left, &chained()).0, end, "the next agent of ours keeps it again");
    // An agent before wrote the entry elsewhere.
    assert_eq!(spent_originals(&settled(end, &owned()).0), goes);
}

#[test]
fn originals_that_are_of_use_stay_when_another_agent_follows() {
    let mark = "10-a.conf.istio-cni-original";
    let theirs = [(OWNED_FILE, OTHER), ("10-calico.conflist", CALICO)];
    for start in [
        directory(&[("10-a.conf", SINGLE)]),
        directory(&[("10-a.conf", SINGLE), ("10-a.conflist", OTHER)]),
        // Only the original distinguishes it from a copy.
        directory(&theirs),
    ] {
        assert_eq!(spent_originals(&settled(start.clone(), &chained()).0), [], "{start:?}");
    }
    let other = "10-calico.conflist.istio-cni-original";
    for text in [CALICO, "{", ""] {
        let at = directory(&[("10-calico.conflist", text), (other, OTHER), (mark, SINGLE)]);
        assert_eq!(spent_originals(&at), [], "{text}");
    }
    assert_eq!(spent_originals(&directory(&[(other, CALICO)])), [], "its file is gone");
}

#[test]
fn the_order_is_that_of_bytes_and_covers_every_extension() {
    let start = directory(&[("b.conflist", OTHER), ("B.conflist", CALICO), ("a.json", SINGLE)]);
    let (end, _) = settled(start.clone(), &chained());
    assert_eq!(end.active().expect("a network").0, "B.conflist");
    assert!(calls_us(&end));
    let start = directory(&[("10-a.json", SINGLE), ("20-b.conflist", OTHER)]);
    let (end, plan) = settled(start.clone(), &chained());
    assert_eq!(plan.target.as_deref(), Some("10-a.conflist"));
    assert_eq!(removed(end, &chained().placement), start);
}

#[test]
fn nothing_to_chain_into_means_waiting() {
    for files in
        [&[] as &[(&str, &str)], &[("00-x.conf", "{")], &[("YYY-istio-cni.conf", r#"{"type":"istio-cni"}"#)]]
    {
        let directory = directory(files);
        let obstacle = Obstacle::NoNetwork { unloadable: directory.invalid() };
        assert_eq!(
            plan(&directory, &chained()),
            Plan { target: None, obstacle: Some(obstacle), edits: Vec::new() }
        );
    }
}

#[test]
fn a_file_that_comes_to_be_first_is_followed() {
    let (mut at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &chained());
    at.files.push(File { name: "05-cilium.conflist".into(), text: Ok(OTHER.into()) });
    let at = Directory::new(at.files);
    let follow = plan(&at, &chained());
    assert_eq!(follow.target.as_deref(), Some("05-cilium.conflist"));
    assert_eq!(follow.obstacle, Some(Obstacle::Missing("05-cilium.conflist".into())));
    let (at, _) = settled(at, &chained());
    assert!(calls_us(&at));
    // The entry stays in the other file, for when the new one goes again.
    assert!(at.text("10-calico.conflist").expect("is there").contains("istio-cni"));
    let start = directory(&[("05-cilium.conflist", OTHER), ("10-calico.conflist", CALICO)]);
    assert_eq!(removed(at, &chained().placement), start);
}

#[test]
fn a_pinned_file_is_waited_for_and_taken_with_either_extension() {
    let at = directory(&[("10-calico.conflist", CALICO)]);
    let wait = plan(&at, &pinned("20-mine.conf"));
    let missing = Obstacle::NoPinned { file: "20-mine.conf".into(), because: "is missing".into() };
    assert_eq!(wait.obstacle, Some(missing));
    assert_eq!(wait.edits, []);
    let found = plan(&at, &pinned("10-calico.conf"));
    assert_eq!(found.target.as_deref(), Some("10-calico.conflist"));
}

#[test]
fn a_pinned_file_that_the_runtime_does_not_use_is_preempted() {
    let at = directory(&[("05-x.conflist", OTHER), ("10-calico.conflist", CALICO)]);
    let (at, last) = settled(at, &pinned("10-calico.conflist"));
    let preempted = Obstacle::Preempted { active: "05-x.conflist".into(), ours: "10-calico.conflist".into() };
    assert!(preempted.concerns_pods());
    assert_eq!(last.obstacle, Some(preempted));
    assert!(at.text("10-calico.conflist").expect("is there").contains("istio-cni"));
    assert_eq!(at.text("05-x.conflist"), Some(OTHER));
}

#[test]
fn a_pinned_file_behind_multus_is_used_by_multus() {
    let multus = r#"{"name":"m","type":"multus-shim"}"#;
    let at = directory(&[("00-multus.conf", multus), ("10-calico.conflist", CALICO)]);
    let (_, last) = settled(at, &pinned("10-calico.conflist"));
    assert_eq!(last.obstacle, None);
}

#[test]
fn a_single_plugin_becomes_a_list_and_comes_back() {
    let start = directory(&[("10-a.conf", SINGLE), ("99-loopback.conf", r#"{"type":"loopback"}"#)]);
    let (end, last) = settled(start.clone(), &chained());
    assert_eq!((last.target.as_deref(), last.obstacle), (Some("10-a.conflist"), None));
    assert_eq!(end.text("10-a.conf"), None);
    assert!(calls_us(&end));
    assert_eq!(removed(end, &chained().placement), start);
}

#[test]
fn a_list_made_of_a_single_plugin_stays_when_others_changed_it() {
    let (mut at, _) = settled(directory(&[("10-a.conf", SINGLE)]), &chained());
    let text =
        at.text("10-a.conflist").expect("is there").replace("\"type\": \"ptp\"", "\"type\": \"bridge\"");
    at = edited(at, &[Edit::Write { name: "10-a.conflist".into(), text, like: String::new() }]);
    let end = removed(at, &chained().placement);
    assert_eq!(end.text("10-a.conf"), None);
    let rest = end.text("10-a.conflist").expect("is there");
    assert!(rest.contains("bridge") && !rest.contains("istio-cni"), "{rest}");
}

#[test]
fn a_single_plugin_that_its_owner_writes_again_is_taken_in_again() {
    let (at, _) = settled(directory(&[("10-a.conf", SINGLE)]), &chained());
    let newer = SINGLE.replace("ptp", "macvlan");
    let at =
        edited(at, &[Edit::Write { name: "10-a.conf".into(), text: newer.clone(), like: String::new() }]);
    assert_eq!(plan(&at, &chained()).obstacle, Some(Obstacle::Missing("10-a.conf".into())));
    let (at, _) = settled(at, &chained());
    assert!(calls_us(&at) && at.text("10-a.conflist").expect("is there").contains("macvlan"));
    assert_eq!(removed(at, &chained().placement), directory(&[("10-a.conf", &newer)]));
}

#[test]
fn another_programs_list_replaced_by_a_single_plugin_comes_back() {
    let start = directory(&[("10-a.conf", SINGLE), ("10-a.conflist", OTHER)]);
    let (end, _) = settled(start.clone(), &chained());
    assert!(calls_us(&end) && end.text("10-a.conflist").expect("is there").contains("ptp"));
    assert_eq!(removed(end, &chained().placement), start);
}

#[test]
fn changed_entries_are_restored() {
    let (at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &chained());
    let right = at.text("10-calico.conflist").expect("is there").to_owned();
    let cases = [
        (CALICO.to_owned(), "missing", true),
        (right.replace("\"native_nftables\": false", "\"native_nftables\": true"), "edited", true),
        (right.replace("\n  ]", ",\n    {\"type\": \"portmap\"}\n  ]"), "followed", false),
    ];
    for (text, kind, concerns_pods) in cases {
        let at = edited(
            at.clone(),
            &[Edit::Write { name: "10-calico.conflist".into(), text, like: String::new() }],
        );
        let obstacle = plan(&at, &chained()).obstacle.expect("an obstacle");
        assert_eq!((obstacle.kind(), obstacle.concerns_pods()), (kind, concerns_pods));
        let (at, last) = settled(at, &chained());
        assert_eq!(last.obstacle, None);
        assert!(calls_us(&at));
    }
}

#[test]
fn a_file_that_its_owner_rewrote_has_a_new_original() {
    let (at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &chained());
    let newer = CALICO.replace("calico", "calico2");
    let at = edited(
        at,
        &[Edit::Write { name: "10-calico.conflist".into(), text: newer.clone(), like: String::new() }],
    );
    let (at, _) = settled(at, &chained());
    assert_eq!(at.text("10-calico.conflist.istio-cni-original"), Some(newer.as_str()));
    assert_eq!(removed(at, &chained().placement), directory(&[("10-calico.conflist", &newer)]));
}

#[test]
fn a_copy_in_front_leaves_the_original_untouched() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    let (end, last) = settled(start.clone(), &owned());
    assert_eq!(last.obstacle, None);
    assert_eq!(end.text("10-calico.conflist"), Some(CALICO));
    assert_eq!(end.active().expect("a network").0, OWNED_FILE);
    assert!(calls_us(&end));
    assert_eq!(removed(end, &owned().placement), start);
}

#[test]
fn a_copy_in_front_follows_its_original() {
    let (at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &owned());
    let newer = CALICO.replace("calico", "calico2");
    let at =
        edited(at, &[Edit::Write { name: "10-calico.conflist".into(), text: newer, like: String::new() }]);
    assert_eq!(plan(&at, &owned()).obstacle, Some(Obstacle::Stale(OWNED_FILE.into())));
    let (at, _) = settled(at, &owned());
    assert!(at.text(OWNED_FILE).expect("is there").contains("calico2"));
}

/// The directory with another text in a file, or none.
fn rewritten(mut at: Directory, name: &str, text: Option<&str>) -> Directory {
    at.files.retain(|file| file.name != name);
    at.files.extend(text.map(|text| File { name: name.into(), text: Ok(text.into()) }));
    Directory::new(at.files)
}

#[test]
fn a_copy_that_lost_the_entry_is_written_anew() {
    for file in [OWNED_FILE, "00-mesh.conflist"] {
        let want = owned_as(file);
        let (right, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &want);
        // Another program's edit, another program's own list, an interrupted write, and an empty file.
        for (text, kind) in [(CALICO, "missing"), (OTHER, "missing"), ("{\"name\"", "stale"), ("", "stale")] {
            let at = rewritten(right.clone(), file, Some(text));
            let rewrite = plan(&at, &want);
            assert_eq!(
                rewrite.target.as_deref(),
                Some(file),
                "who keeps undoing this is found by the file's name"
            );
            let obstacle = rewrite.obstacle.expect("an obstacle");
            assert_eq!((obstacle.kind(), obstacle.concerns_pods()), (kind, true), "{file} {text}");
            let (end, last) = settled(at, &want);
            assert_eq!((end, last.obstacle), (right.clone(), None), "{file} {text}");
        }
    }
}

/// The mark alone makes a file ours, and only in its place.
#[test]
fn a_file_that_never_was_ours_stays_beside_marks_of_others() {
    let mark = "02-istio-cni.conflist.istio-cni-owned";
    let start = directory(&[("00-theirs.conflist", OTHER), ("10-calico.conflist", CALICO), (mark, "")]);
    let refused = plan(&start, &owned_as("00-theirs.conflist"));
    assert_eq!((refused.obstacle.expect("an obstacle").kind(), refused.edits), ("foreign", Vec::new()));
}

#[test]
fn a_copy_that_lost_the_entry_and_its_original_gets_the_entry() {
    let want = owned();
    let (right, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &want);
    let alone = rewritten(right.clone(), "10-calico.conflist", None);
    let at = rewritten(alone.clone(), OWNED_FILE, Some(CALICO));
    assert_eq!(plan(&at, &want).obstacle.expect("an obstacle").kind(), "no_original");
    assert_eq!(settled(at, &want).0, alone);
    // Without a list to put the entry into, this waits.
    let at = rewritten(alone, OWNED_FILE, Some("{"));
    assert_eq!(plan(&at, &want).edits, []);
}

#[test]
fn a_copy_that_lost_the_entry_goes_with_us() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    for text in [CALICO, "{\"name\"", "{\"type\":\"istio-cni\""] {
        let (right, _) = settled(start.clone(), &owned());
        let at = rewritten(right, OWNED_FILE, Some(text));
        for to in [chained(), standalone(), owned_as("00-mesh.conflist")] {
            let (moved, last) = settled(at.clone(), &to);
            assert_eq!(last.obstacle, None, "{text} {to:?}");
            assert_eq!(moved.text(OWNED_FILE), None, "{text} {to:?}");
            assert_eq!(removed(moved, &to.placement), start, "{text} {to:?}");
        }
        for placement in [owned().placement, chained().placement] {
            assert_eq!(removed(at.clone(), &placement), start, "{text}");
        }
    }
}

/// Nothing of another program is lost: a list that exists nowhere else stays where it is.
#[test]
fn another_programs_list_in_the_place_of_a_copy_stays_when_we_go() {
    let (right, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &owned());
    let at = rewritten(right, OWNED_FILE, Some(OTHER));
    let theirs = directory(&[(OWNED_FILE, OTHER), ("10-calico.conflist", CALICO)]);
    assert_eq!(removed(at.clone(), &owned().placement), theirs);
    let (moved, _) = settled(at, &chained());
    assert!(calls_us(&moved), "the runtime uses it, so the entry goes into it");
    assert_eq!(removed(moved, &chained().placement), theirs);
}

/// A network plugin may remove its file when it ends and write it when it starts: in between, pods must not start outside the mesh.
#[test]
fn a_copy_stays_while_its_original_is_gone() {
    for pinned in [None, Some("10-calico.conflist".to_owned())] {
        let want = Want { placement: Placement::Owned { file: OWNED_FILE.into(), pinned }, entry: entry() };
        let (mut at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &want);
        at.files.retain(|file| file.name != "10-calico.conflist");
        let orphan = plan(&at, &want);
        assert_eq!(orphan.edits, [], "{want:?}");
        let obstacle = orphan.obstacle.expect("an obstacle");
        assert!(obstacle.concerns_pods() && obstacle.to_string().contains("stays"), "{obstacle}");
        at.files.push(File { name: "10-calico.conflist".into(), text: Ok(CALICO.into()) });
        let (at, back) = settled(Directory::new(at.files), &want);
        assert_eq!(back.obstacle, None);
        assert_eq!(removed(at, &want.placement), directory(&[("10-calico.conflist", CALICO)]));
    }
}

/// A file of another program with the name from our settings.
fn belongs_to_others(files: &[(&str, &str)], want: &Want, name: &str, setting: &str) {
    let start = directory(files);
    let refused = plan(&start, want);
    assert_eq!(refused.edits, [], "{files:?}");
    let obstacle = refused.obstacle.expect("an obstacle");
    assert!(obstacle.concerns_pods(), "{obstacle}");
    let text = obstacle.to_string();
    assert!(text.contains(name) && text.contains("belongs to another program"), "{text}");
    assert!(text.contains(setting), "{text}");
    assert_eq!(removed(start.clone(), &want.placement), start, "removal leaves it alone as well");
}

fn owned_as(file: &str) -> Want {
    Want { placement: Placement::Owned { file: file.into(), pinned: None }, entry: entry() }
}

#[test]
fn an_owned_name_of_another_programs_file_is_refused() {
    let setting = "ISTIO_OWNED_CNI_CONFIG_FILENAME";
    let alone = [("10-calico.conflist", CALICO)];
    belongs_to_others(&alone, &owned_as("10-calico.conflist"), "10-calico.conflist", setting);
    let beside = [("00-multus.conflist", OTHER), ("10-calico.conflist", CALICO)];
    belongs_to_others(&beside, &owned_as("00-multus.conflist"), "00-multus.conflist", setting);
    belongs_to_others(&[(OWNED_FILE, OTHER), ("10-calico.conflist", CALICO)], &owned(), OWNED_FILE, setting);
    let broken = [("00-x.conflist", "{\"name\""), ("10-calico.conflist", CALICO)];
    let want = owned_as("00-x.conflist");
    assert_eq!(plan(&directory(&broken), &want).edits, [], "another program may be writing it");
}

/// The entry in it makes a file no copy of ours: it may have been put there by chaining, ours or that of Istio's agent.
#[test]
fn a_list_that_was_chained_into_is_not_taken_for_a_copy() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    let (chained_into, _) = settled(start.clone(), &chained());
    let want = owned_as("10-calico.conflist");
    assert_eq!(plan(&chained_into, &want).edits, []);
    assert_eq!(removed(chained_into.clone(), &want.placement), start);
    let mut without_original = chained_into;
    without_original.files.retain(|file| file.name == "10-calico.conflist");
    assert_eq!(plan(&without_original, &want).edits, []);
    assert_eq!(removed(without_original, &want.placement), start);
}

#[test]
fn a_copy_under_another_name_is_known_again_whatever_became_of_its_original() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    let (mut at, last) = settled(start, &owned_as("00-mesh.conflist"));
    assert_eq!(last.obstacle, None);
    let newer = CALICO.replace("calico", "calico2");
    at = edited(
        at,
        &[Edit::Write { name: "10-calico.conflist".into(), text: newer.clone(), like: String::new() }],
    );
    let (at, last) = settled(at, &owned_as("00-mesh.conflist"));
    assert_eq!(last.obstacle, None);
    assert!(at.text("00-mesh.conflist").expect("is there").contains("calico2"));
    // It goes when the placement changes, and with us.
    let (moved, _) = settled(at.clone(), &chained());
    assert_eq!(moved.text("00-mesh.conflist"), None);
    let clean = directory(&[("10-calico.conflist", &newer)]);
    assert_eq!(removed(moved, &chained().placement), clean);
    assert_eq!(removed(at, &owned_as("00-mesh.conflist").placement), clean);
}

/// Istio's agent writes its copy with sorted keys and leaves no mark.
#[test]
fn a_copy_that_another_agent_made_is_taken_over() {
    let (at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &owned_as("00-mesh.conflist"));
    let copy: serde_json::Value =
        serde_json::from_str(at.text("00-mesh.conflist").expect("is there")).expect("JSON");
    let copy = copy.to_string().replace("\"native_nftables\":false,", "");
    let start = directory(&[("00-mesh.conflist", &copy), ("10-calico.conflist", CALICO)]);
    let (at, last) = settled(start, &owned_as("00-mesh.conflist"));
    assert_eq!(last.obstacle, None);
    assert_eq!(
        removed(at, &owned_as("00-mesh.conflist").placement),
        directory(&[("10-calico.conflist", CALICO)])
    );
}

#[test]
fn a_name_of_ours_does_not_make_a_file_ours() {
    let theirs = [
        (OWNED_FILE, OTHER),
        ("10-calico.conflist", CALICO),
        (STANDALONE_FILE, r#"{"name":"x","type":"ptp"}"#),
    ];
    let start = directory(&theirs);
    let (end, last) = settled(start.clone(), &chained());
    assert_eq!((last.target.as_deref(), last.obstacle), (Some(OWNED_FILE), None), "the runtime uses it");
    assert!(calls_us(&end));
    assert_eq!(removed(end.clone(), &chained().placement), start);
    // Also where it is found a second time, with the entry in it.
    assert_eq!(settled(end.clone(), &chained()).0, end);
}

#[test]
fn a_standalone_name_of_another_programs_file_is_refused() {
    let want = |file: &str| Want { placement: Placement::Standalone { file: file.into() }, entry: entry() };
    let multus = r#"{"name":"m","type":"multus-shim"}"#;
    let files = [("00-multus.conf", multus), ("10-calico.conflist", CALICO)];
    belongs_to_others(&files, &want("00-multus.conf"), "00-multus.conf", "CNI_CONF_NAME");
    belongs_to_others(&[(STANDALONE_FILE, SINGLE)], &standalone(), STANDALONE_FILE, "CNI_CONF_NAME");
    assert_eq!(plan(&directory(&[("x.conf", "{"), ("y.conf", SINGLE)]), &want("x.conf")).edits, []);
}

#[test]
fn a_list_under_a_pinned_name_of_a_single_plugin_is_reported() {
    let at = directory(&[("10-calico.conf", CALICO), ("20-b.conflist", OTHER)]);
    let text = plan(&at, &pinned("10-calico.conf")).obstacle.expect("an obstacle").to_string();
    assert!(text.contains("10-calico.conf") && text.contains("holds a list"), "{text}");
    assert!(text.contains("10-calico.conflist would do"), "{text}");
    let broken = directory(&[("10-calico.conf", "{")]);
    let text = plan(&broken, &pinned("10-calico.conf")).obstacle.expect("an obstacle").to_string();
    assert!(text.contains("cannot be loaded: not JSON"), "{text}");
    let text = plan(&directory(&[]), &pinned("10-calico.conf")).obstacle.expect("an obstacle").to_string();
    assert!(text.contains("is missing"), "{text}");
}

#[test]
fn a_copy_of_a_single_plugin_is_a_list() {
    let (end, _) = settled(directory(&[("10-a.conf", SINGLE)]), &owned());
    assert_eq!(end.text("10-a.conf"), Some(SINGLE));
    assert_eq!(end.active().expect("a network").1.types(), ["ptp", "istio-cni"]);
}

#[test]
fn a_copy_that_is_not_in_front_is_preempted() {
    let at = directory(&[("00-first.conflist", OTHER), ("10-calico.conflist", CALICO)]);
    let (_, last) = settled(at, &owned());
    let preempted = Obstacle::Preempted { active: "00-first.conflist".into(), ours: OWNED_FILE.into() };
    assert_eq!(last.obstacle, Some(preempted));
}

#[test]
fn a_standalone_file_touches_no_other_file() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    let (end, last) = settled(start.clone(), &standalone());
    assert_eq!(last.obstacle, None);
    assert_eq!(end.text("10-calico.conflist"), Some(CALICO));
    let own = end.text(STANDALONE_FILE).expect("is there").replace("info", "debug");
    let at =
        edited(end.clone(), &[Edit::Write { name: STANDALONE_FILE.into(), text: own, like: String::new() }]);
    assert_eq!(plan(&at, &standalone()).obstacle.expect("an obstacle").kind(), "edited");
    assert_eq!(removed(end, &standalone().placement), start);
}

#[test]
fn changing_the_placement_moves_the_entry() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    for (from, to) in [
        (chained(), owned()),
        (chained(), standalone()),
        (owned(), chained()),
        (owned(), standalone()),
        (standalone(), chained()),
        (standalone(), owned()),
    ] {
        let (at, _) = settled(start.clone(), &from);
        let (at, last) = settled(at, &to);
        assert_eq!(last.obstacle, None, "{from:?} {to:?}");
        let holders = at.valid().filter(|(_, conf)| conf.has_ours()).count();
        assert_eq!(holders, 1, "{from:?} {to:?} {at:?}");
        assert_eq!(removed(at, &to.placement), start);
    }
}

#[test]
fn a_power_failure_between_any_two_edits_is_made_good() {
    let start = directory(&[("10-a.conf", SINGLE), ("10-a.conflist", OTHER), ("20-b.conflist", CALICO)]);
    let (goal, _) = settled(start.clone(), &chained());
    let edits = plan(&start, &chained()).edits;
    assert!(edits.len() >= 4, "{edits:?}");
    for done in 0..=edits.len() {
        let cut_short = edited(start.clone(), &edits[..done]);
        assert_eq!(settled(cut_short.clone(), &chained()).0, goal, "after {done}");
        assert_eq!(removed(cut_short, &chained().placement), start, "after {done}");
    }
}

#[test]
fn removal_reports_files_it_cannot_edit() {
    let (mut at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &chained());
    let cut = at.text("10-calico.conflist").expect("is there").trim_end().trim_end_matches('}').to_owned();
    at.files.retain(|file| file.name != "10-calico.conflist");
    at.files.push(File { name: "10-calico.conflist".into(), text: Ok(cut) });
    at.files.push(File { name: "20-secret.conflist".into(), text: Err("permission denied".into()) });
    at.files.push(File { name: "30-corrupt.conf".into(), text: Ok("{".into()) });
    let removal = removal(&Directory::new(at.files), &chained().placement);
    assert_eq!(removal.edits, [[]; 0]);
    assert_eq!(removal.originals, [], "the last good text stays");
    let [corrupt, unreadable] = &removal.leftovers[..] else { panic!("{removal:?}") };
    assert!(
        !corrupt.may_call() && corrupt.to_string().contains("10-calico.conflist.istio-cni-original"),
        "{corrupt}"
    );
    assert!(unreadable.may_call() && unreadable.to_string().contains("permission denied"), "{unreadable}");
}
