use super::*;
use crate::conflist::EntryContent;
use crate::settings::STANDALONE_FILE;
use cni_core::sandboxed::SandboxedRuntimes;

const CALICO: &str = "{\n  \"name\": \"net\",\n  \"cniVersion\": \"0.3.1\",\n  \"plugins\": [\n    {\n      \"type\": \"calico\"\n    }\n  ]\n}\n";
const OTHER: &str = r#"{"name":"other","plugins":[{"type":"bridge"}]}"#;
const SINGLE: &str = "{\n  \"cniVersion\": \"0.4.0\",\n  \"name\": \"single\",\n  \"type\": \"ptp\"\n}";

fn entry() -> PluginEntry {
    PluginEntry::of(&EntryContent {
        log_level: "info".into(),
        run_dir: "/var/run/istio-cni".into(),
        exclude_namespaces: Vec::new(),
        pod_namespace: "istio-system".into(),
        agent_host_network: false,
        native_nftables: false,
        nft_sets: false,
        strict_capture: false,
        accepted_rules: String::new(),
        accept_rules_of_pods: true,
        sandboxed: SandboxedRuntimes::default(),
        ambient_enabled: false,
        enablement_selectors: serde_json::json!([]),
    })
}

fn chained() -> Want {
    Want { placement: EntryPlacement::Chained { pinned: None }, entry: entry(), drop_in: DropIn::Never }
}

fn pinned(name: &str) -> Want {
    Want {
        placement: EntryPlacement::Chained { pinned: Some(name.into()) },
        entry: entry(),
        drop_in: DropIn::Never,
    }
}

fn owned() -> Want {
    Want {
        placement: EntryPlacement::Owned { file: OWNED_FILE.into(), pinned: None },
        entry: entry(),
        drop_in: DropIn::Never,
    }
}

fn standalone() -> Want {
    Want {
        placement: EntryPlacement::Standalone { file: STANDALONE_FILE.into() },
        entry: entry(),
        drop_in: DropIn::Never,
    }
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
        at = made(at, edit);
        // At every moment the runtime finds a network, if it ever did.
        assert!(first(&at).is_some(), "{edit:?} leaves no network: {at:?}");
    }
    at
}

fn made(at: Directory, edit: &Edit) -> Directory {
    match edit {
        Edit::Write { name, text, .. } => rewritten(at, name, Some(text)),
        Edit::Delete { name } => rewritten(at, name, None),
    }
}

/// The directory with another text in a file, or none.
#[expect(clippy::needless_pass_by_value, reason = "a step of a fold")]
fn rewritten(at: Directory, name: &str, text: Option<&str>) -> Directory {
    let mut files = at.files().to_vec();
    files.retain(|file| file.name != name);
    files.extend(text.map(|text| File { name: name.into(), text: Ok(text.into()) }));
    Directory::new(files)
}

/// The first file that a runtime can load, with the types of its plugins.
fn first(at: &Directory) -> Option<(&str, Vec<String>)> {
    at.read().find_map(|(name, network)| Some((name, network.ok()?.types().map(str::to_owned).collect())))
}

fn removed(at: Directory, placement: &EntryPlacement) -> Directory {
    let removal = removal(&at, placement);
    assert_eq!(removal.leftovers, []);
    removal.edits.iter().flatten().chain(&removal.originals).fold(at, made)
}

fn calls_us(at: &Directory) -> bool {
    first(at).is_some_and(|(_, types)| types.iter().any(|kind| kind == "istio-cni"))
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
    assert_eq!(first.obstacle, Some(EntryObstacle::Missing("10-calico.conflist".into())));
    let (end, last) = settled(start.clone(), &chained());
    let broken = last.obstacle.expect("containerd loads none of them");
    assert!(broken.is_open() && broken.kind() == ObstacleKind::Broken, "{broken}");
    assert!(calls_us(&end));
    assert_eq!(end.text("10-calico.conflist.istio-cni-original"), Some(CALICO));
    assert_eq!(end.text("20-other.conflist"), Some(OTHER));
    assert_eq!(removed(end, &chained().placement), start);
}

#[test]
fn what_cannot_be_loaded_in_front_leaves_it_open() {
    for text in ["", "{broken", &CALICO[..40], "[]", r#"{"name":"x"}"#, r#"{"name":"x","plugins":[]}"#] {
        let at = directory(&[("00-first.conflist", text), ("10-calico.conflist", CALICO)]);
        let obstacle = settled(at, &chained()).1.obstacle.expect(text);
        assert!(obstacle.is_open() && obstacle.concerns_pods(), "{obstacle}");
        assert!(obstacle.to_string().contains("00-first.conflist"), "{obstacle}");
        let behind = directory(&[("10-calico.conflist", CALICO), ("20-last.conflist", text)]);
        assert_eq!(settled(behind, &chained()).1.obstacle, None, "{text}");
    }
}

#[test]
fn a_first_file_that_cannot_be_read_is_not_passed_over() {
    let link = "a symbolic link to /nix/store/flannel.conflist, which is missing here";
    let files = vec![
        File { name: "10-flannel.conflist".into(), text: Err(link.into()) },
        File { name: "87-podman-bridge.conflist".into(), text: Ok(OTHER.into()) },
    ];
    let at = Directory::new(files);
    for want in [chained(), owned()] {
        let plan = plan(&at, &want);
        assert_eq!((plan.edits, plan.target), (Vec::new(), None));
        let text = plan.obstacle.expect("an obstacle").to_string();
        assert!(text.contains("10-flannel.conflist") && text.contains(link), "{text}");
    }
    // The user has said which.
    let named = plan(&at, &pinned("87-podman-bridge.conflist"));
    assert_eq!(named.target.as_deref(), Some("87-podman-bridge.conflist"));
}

#[test]
fn loopback_alone_is_not_a_network() {
    const LO: &str = r#"{"cniVersion":"0.3.1","type":"loopback"}"#;
    let alone = directory(&[("99-loopback.conf", LO)]);
    let waits = plan(&alone, &chained());
    assert_eq!(
        (waits.edits, waits.obstacle.expect("an obstacle").kind()),
        (Vec::new(), ObstacleKind::NoNetwork)
    );
    // As an agent before left it.
    let listed = format!(r#"{{"name":"l","plugins":[{LO},{{"type":"istio-cni"}}]}}"#);
    let left = directory(&[("99-loopback.conflist", &listed)]);
    assert_eq!(plan(&left, &chained()).obstacle.expect("an obstacle").kind(), ObstacleKind::NoNetwork);
    let (end, last) = settled(rewritten(left, "10-calico.conflist", Some(CALICO)), &chained());
    assert_eq!((last.target.as_deref(), last.obstacle), (Some("10-calico.conflist"), None));
    assert!(!end.text("99-loopback.conflist").expect("stays").contains("istio-cni"));
    let first = directory(&[("00-loopback.conf", LO), ("10-calico.conflist", CALICO)]);
    assert_eq!(settled(first, &chained()).1.obstacle.expect("an obstacle").kind(), ObstacleKind::Loopback);
}

const OVN: &str =
    r#"{"cniVersion":"0.4.0","name":"ovn-kubernetes","type":"ovn-k8s-cni-overlay","ipam":{},"dns":{}}"#;

#[test]
fn a_single_plugin_whose_owner_depends_on_its_name_gets_a_copy_in_front() {
    let name = "10-ovn-kubernetes.conf";
    let start = directory(&[(name, OVN)]);
    for want in [chained(), pinned(name)] {
        let (end, last) = settled(start.clone(), &want);
        assert_eq!((last.target.as_deref(), last.obstacle), (Some(OWNED_FILE), None));
        assert_eq!(end.text(name), Some(OVN));
        assert!(calls_us(&end));
        // Its owner writes it again, and takes it away when it ends: then the runtime has no network either.
        let newer = OVN.replace("0.4.0", "1.0.0");
        let (again, _) = settled(rewritten(end.clone(), name, Some(&newer)), &want);
        assert!(again.text(OWNED_FILE).expect("a copy").contains("1.0.0"));
        let gone = plan(&rewritten(again, name, None), &want);
        let left = gone.edits.iter().fold(rewritten(end.clone(), name, None), made);
        assert_eq!(left, directory(&[]), "{gone:?}");
        assert_eq!(removed(end, &want.placement), start);
    }
    // An agent before made a list of it.
    let listed = format!(
        r#"{{"name":"ovn-kubernetes","cniVersion":"0.4.0","plugins":[{OVN},{{"type":"istio-cni"}}]}}"#
    );
    let original = NetConf::parse(name, OVN).expect("valid").with(&entry());
    let renamed = directory(&[
        ("10-ovn-kubernetes.conflist", &original),
        ("10-ovn-kubernetes.conf.istio-cni-original", OVN),
    ]);
    let (end, last) = settled(renamed, &chained());
    assert_eq!((last.obstacle, end.text(name)), (None, Some(OVN)), "{end:?}");
    assert_eq!(removed(end, &chained().placement), start);
    // A list of its owner's own is a list.
    let theirs = directory(&[("10-ovn-kubernetes.conflist", &listed)]);
    assert_eq!(settled(theirs, &chained()).1.target.as_deref(), Some("10-ovn-kubernetes.conflist"));
}

#[test]
fn a_single_plugin_that_multus_names_keeps_its_name() {
    let multus = r#"{"name":"m","type":"multus","clusterNetwork":"/etc/cni/net.d/10-a.conf"}"#;
    let at = directory(&[("00-multus.conf", multus), ("10-a.conf", SINGLE)]);
    let refused = plan(&at, &pinned("10-a.conf"));
    assert_eq!(refused.edits, []);
    let text = refused.obstacle.expect("an obstacle").to_string();
    assert!(text.contains("named by Multus") && text.contains("CNI_CONF_NAME"), "{text}");
}

#[test]
fn multus_that_runs_something_else_is_not_an_excuse() {
    let list = CALICO;
    let with = r#"{"name":"net","plugins":[{"type":"calico"},{"type":"istio-cni"}]}"#;
    let path = |name: &str| format!(r#""clusterNetwork":"/host/etc/cni/net.d/{name}""#);
    for (keys, kind) in [
        (format!(r#""delegates":[{list}]"#), Some(ObstacleKind::Multus)),
        (format!(r#""delegates":[{with}]"#), None),
        (format!(r#""delegates":[{list},{with}]"#), None),
        (path("10-calico.conflist"), None),
        (path("20-other.conflist"), Some(ObstacleKind::Multus)),
        (path("30-missing.conflist"), Some(ObstacleKind::Multus)),
        (format!(r#"{},"delegates":[{with}]"#, path("20-other.conflist")), Some(ObstacleKind::Multus)),
        (r#""clusterNetwork":"net""#.to_owned(), None),
        (r#""clusterNetwork":"other""#.to_owned(), Some(ObstacleKind::Multus)),
        (r#""clusterNetwork":"a-definition""#.to_owned(), Some(ObstacleKind::NotSeenCalled)),
        (r#""clusterNetwork":"other","defaultNetworks":["net"]"#.to_owned(), None),
        (
            r#""clusterNetwork":"/etc/cni/multus/net.d/10-calico.conflist""#.to_owned(),
            Some(ObstacleKind::NotSeenCalled),
        ),
        (
            r#""clusterNetwork":"net","confDir":"/etc/cni/multus/net.d""#.to_owned(),
            Some(ObstacleKind::NotSeenCalled),
        ),
        (r#""logLevel":"debug""#.to_owned(), Some(ObstacleKind::NotSeenCalled)),
    ] {
        let multus = format!(r#"{{"name":"m","type":"multus-shim",{keys}}}"#);
        let at = directory(&[
            ("00-multus.conf", &multus),
            ("10-calico.conflist", CALICO),
            ("20-other.conflist", OTHER),
        ]);
        let (end, last) = settled(at, &pinned("10-calico.conflist"));
        assert_eq!(last.obstacle.as_ref().map(EntryObstacle::kind), kind, "{keys}: {:?}", last.obstacle);
        assert!(end.text("10-calico.conflist").expect("is there").contains("istio-cni"));
        // Behind Multus itself the plugin is called whatever Multus runs.
        let (end, last) = settled(end, &chained());
        assert_eq!(last.obstacle, None, "{keys}");
        assert_eq!(end.text("10-calico.conflist"), Some(CALICO));
    }
}

#[test]
fn a_list_whose_plugins_are_in_its_folder_gets_the_entry_there() {
    let files = [
        ("10-net.conflist", r#"{"cniVersion":"1.1.0","name":"net"}"#),
        ("net/10-bridge.conf", r#"{"type":"bridge"}"#),
        ("net/20-tuning.conf", r#"{"type":"tuning"}"#),
    ];
    let start = directory(&files);
    let (end, last) = settled(start.clone(), &chained());
    assert_eq!((last.target.as_deref(), last.obstacle), (Some("net/zz-istio-cni.conf"), None));
    assert_eq!(first(&end).expect("a network").1, ["bridge", "tuning", "istio-cni"]);
    assert_eq!(removed(end.clone(), &chained().placement), start);
    let followed = rewritten(end.clone(), "net/zzz.conf", Some(r#"{"type":"portmap"}"#));
    assert_eq!(plan(&followed, &chained()).obstacle.expect("an obstacle").kind(), ObstacleKind::Followed);
    // Another file comes to be first.
    let (moved, _) = settled(rewritten(end, "05-x.conflist", Some(OTHER)), &chained());
    assert_eq!(moved.text("net/zz-istio-cni.conf"), None);
    assert!(calls_us(&moved));
    let (copied, last) = settled(start.clone(), &owned());
    assert_eq!(last.obstacle, None);
    assert_eq!(
        first(&copied).expect("a copy"),
        (OWNED_FILE, ["bridge", "tuning", "istio-cni"].map(str::to_owned).to_vec())
    );
    assert_eq!(removed(copied, &owned().placement), start);
    // libcni before 1.3 reads no folders; without one it has no plugin.
    let empty = directory(&files[..1]);
    assert_eq!(plan(&empty, &chained()).obstacle.expect("an obstacle").kind(), ObstacleKind::NoNetwork);
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
    assert_eq!(first(&end).expect("a network").0, "B.conflist");
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
        let obstacle = EntryObstacle::NoNetwork { unloadable: directory.unusable() };
        assert_eq!(plan(&directory, &chained()), Plan::wait(obstacle));
    }
}

#[test]
fn a_file_that_comes_to_be_first_is_followed() {
    let (at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &chained());
    let at = rewritten(at, "05-cilium.conflist", Some(OTHER));
    let follow = plan(&at, &chained());
    assert_eq!(follow.target.as_deref(), Some("05-cilium.conflist"));
    assert_eq!(follow.obstacle, Some(EntryObstacle::Missing("05-cilium.conflist".into())));
    let (at, _) = settled(at, &chained());
    assert!(calls_us(&at));
    assert_eq!(at.text("10-calico.conflist"), Some(CALICO), "no agent would maintain an entry there");
    let start = directory(&[("05-cilium.conflist", OTHER), ("10-calico.conflist", CALICO)]);
    assert_eq!(removed(at, &chained().placement), start);
}

#[test]
fn a_pinned_file_is_waited_for_and_taken_with_either_extension() {
    let at = directory(&[("10-calico.conflist", CALICO)]);
    let wait = plan(&at, &pinned("20-mine.conf"));
    let missing = EntryObstacle::NoPinned { file: "20-mine.conf".into(), because: "is missing".into() };
    assert_eq!(wait.obstacle, Some(missing));
    assert_eq!(wait.edits, []);
    let found = plan(&at, &pinned("10-calico.conf"));
    assert_eq!(found.target.as_deref(), Some("10-calico.conflist"));
}

#[test]
fn a_pinned_file_that_the_runtime_does_not_use_is_preempted() {
    let at = directory(&[("05-x.conflist", OTHER), ("10-calico.conflist", CALICO)]);
    let (at, last) = settled(at, &pinned("10-calico.conflist"));
    let preempted =
        EntryObstacle::Preempted { active: "05-x.conflist".into(), ours: "10-calico.conflist".into() };
    assert!(preempted.concerns_pods());
    assert_eq!(last.obstacle, Some(preempted));
    assert!(at.text("10-calico.conflist").expect("is there").contains("istio-cni"));
    assert_eq!(at.text("05-x.conflist"), Some(OTHER));
}

#[test]
fn a_pinned_file_behind_multus_is_used_by_multus() {
    let multus =
        r#"{"name":"m","type":"multus-shim","clusterNetwork":"/host/etc/cni/net.d/10-calico.conflist"}"#;
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
    assert_eq!(plan(&at, &chained()).obstacle, Some(EntryObstacle::Missing("10-a.conf".into())));
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
        (CALICO.to_owned(), ObstacleKind::Missing, true),
        (
            right.replace("\"native_nftables\": false", "\"native_nftables\": true"),
            ObstacleKind::Edited,
            true,
        ),
        (right.replace("\n  ]", ",\n    {\"type\": \"portmap\"}\n  ]"), ObstacleKind::Followed, false),
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
    assert_eq!(first(&end).expect("a network").0, OWNED_FILE);
    assert!(calls_us(&end));
    assert_eq!(removed(end, &owned().placement), start);
}

#[test]
fn a_copy_in_front_follows_its_original() {
    let (at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &owned());
    let newer = CALICO.replace("calico", "calico2");
    let at =
        edited(at, &[Edit::Write { name: "10-calico.conflist".into(), text: newer, like: String::new() }]);
    assert_eq!(plan(&at, &owned()).obstacle, Some(EntryObstacle::Stale(OWNED_FILE.into())));
    let (at, _) = settled(at, &owned());
    assert!(at.text(OWNED_FILE).expect("is there").contains("calico2"));
}

#[test]
fn a_copy_that_lost_the_entry_is_written_anew() {
    for file in [OWNED_FILE, "00-mesh.conflist"] {
        let want = owned_as(file);
        let (right, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &want);
        // Another program's edit, another program's own list, an interrupted write, and an empty file.
        for (text, kind) in [
            (CALICO, ObstacleKind::Missing),
            (OTHER, ObstacleKind::Missing),
            ("{\"name\"", ObstacleKind::Stale),
            ("", ObstacleKind::Stale),
        ] {
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
    assert_eq!(
        (refused.obstacle.expect("an obstacle").kind(), refused.edits),
        (ObstacleKind::Foreign, Vec::new())
    );
}

#[test]
fn a_copy_that_lost_the_entry_and_its_original_gets_the_entry() {
    let want = owned();
    let (right, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &want);
    let alone = rewritten(right.clone(), "10-calico.conflist", None);
    let at = rewritten(alone.clone(), OWNED_FILE, Some(CALICO));
    assert_eq!(plan(&at, &want).obstacle.expect("an obstacle").kind(), ObstacleKind::NoOriginal);
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
            assert_eq!(last.obstacle.filter(|obstacle| !obstacle.is_open()), None, "{text} {to:?}");
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
        let want = Want {
            placement: EntryPlacement::Owned { file: OWNED_FILE.into(), pinned },
            entry: entry(),
            drop_in: DropIn::Never,
        };
        let (at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &want);
        let at = rewritten(at, "10-calico.conflist", None);
        let orphan = plan(&at, &want);
        assert_eq!(orphan.edits, [], "{want:?}");
        let obstacle = orphan.obstacle.expect("an obstacle");
        assert!(obstacle.concerns_pods() && obstacle.to_string().contains("stays"), "{obstacle}");
        let (at, back) = settled(rewritten(at, "10-calico.conflist", Some(CALICO)), &want);
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
    Want {
        placement: EntryPlacement::Owned { file: file.into(), pinned: None },
        entry: entry(),
        drop_in: DropIn::Never,
    }
}

#[test]
fn an_owned_name_of_another_programs_file_is_refused() {
    let setting = "ISTIO_OWNED_CNI_CONFIG_FILENAME (chart: istioOwnedCNIConfigFileName)";
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
    let without_original = rewritten(chained_into, "10-calico.conflist.istio-cni-original", None);
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
    let want = |file: &str| Want {
        placement: EntryPlacement::Standalone { file: file.into() },
        entry: entry(),
        drop_in: DropIn::Never,
    };
    let multus = r#"{"name":"m","type":"multus-shim"}"#;
    let files = [("00-multus.conf", multus), ("10-calico.conflist", CALICO)];
    belongs_to_others(
        &files,
        &want("00-multus.conf"),
        "00-multus.conf",
        "CNI_CONF_NAME (chart: cniConfFileName)",
    );
    belongs_to_others(
        &[(STANDALONE_FILE, SINGLE)],
        &standalone(),
        STANDALONE_FILE,
        "CNI_CONF_NAME (chart: cniConfFileName)",
    );
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
    assert_eq!(first(&end).expect("a network").1, ["ptp", "istio-cni"]);
}

#[test]
fn a_copy_that_is_not_in_front_is_preempted() {
    let at = directory(&[("00-first.conflist", OTHER), ("10-calico.conflist", CALICO)]);
    let (_, last) = settled(at, &owned());
    let preempted = EntryObstacle::Preempted { active: "00-first.conflist".into(), ours: OWNED_FILE.into() };
    assert_eq!(last.obstacle, Some(preempted));
}

#[test]
fn a_standalone_file_touches_no_other_file() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    let (end, last) = settled(start.clone(), &standalone());
    assert_eq!(last.obstacle, Some(EntryObstacle::Uncalled(Uncalled::Standalone(STANDALONE_FILE.into()))));
    assert_eq!(end.text("10-calico.conflist"), Some(CALICO));
    let own = end.text(STANDALONE_FILE).expect("is there").replace("info", "debug");
    let at =
        edited(end.clone(), &[Edit::Write { name: STANDALONE_FILE.into(), text: own, like: String::new() }]);
    assert_eq!(plan(&at, &standalone()).obstacle.expect("an obstacle").kind(), ObstacleKind::Edited);
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
        assert_eq!(last.obstacle.filter(|obstacle| !obstacle.is_open()), None, "{from:?} {to:?}");
        let holders = valid(&at).filter(|(_, conf)| conf.network.has_ours()).count();
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
    let (at, _) = settled(directory(&[("10-calico.conflist", CALICO)]), &chained());
    let cut = at.text("10-calico.conflist").expect("is there").trim_end().trim_end_matches('}').to_owned();
    let at = rewritten(rewritten(at, "10-calico.conflist", Some(&cut)), "30-corrupt.conf", Some("{"));
    let mut files = at.files().to_vec();
    files.push(File { name: "20-secret.conflist".into(), text: Err("permission denied".into()) });
    let removal = removal(&Directory::new(files), &chained().placement);
    assert_eq!(removal.edits, [[]; 0]);
    assert_eq!(removal.originals, [], "the last good text stays");
    let [corrupt, unreadable] = &removal.leftovers[..] else { panic!("{removal:?}") };
    assert!(
        !corrupt.may_call() && corrupt.to_string().contains("10-calico.conflist.istio-cni-original"),
        "{corrupt}"
    );
    assert!(unreadable.may_call() && unreadable.to_string().contains("permission denied"), "{unreadable}");
}

const BESIDE: &str = "net/zz-istio-cni.conf";

#[test]
fn removal_reports_what_it_cannot_read_beside_a_list() {
    let list = File { name: "10-calico.conflist".into(), text: Ok(CALICO.into()) };
    for (name, counts) in [(BESIDE, true), ("net/", true), ("net/10-other.conf", false)] {
        let file = File { name: name.into(), text: Err("input/output error".into()) };
        let removal = removal(&Directory::new(vec![list.clone(), file]), &chained().placement);
        let messages: Vec<String> = removal.leftovers.iter().map(ToString::to_string).collect();
        assert_eq!(removal.leftovers.iter().any(Leftover::may_call), counts, "{messages:?}");
        assert!(messages.iter().all(|message| message.contains(name)), "{messages:?}");
    }
}

fn beside(drop_in: DropIn) -> Want {
    Want { drop_in, ..chained() }
}

fn with_ours() -> String {
    NetConf::parse("10-calico.conflist", CALICO).expect("valid").with(&entry())
}

#[test]
fn beside_the_list_and_in_it_until_the_runtime_is_seen_to_read_the_one_beside() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    let (both, plan) = settled(start.clone(), &beside(DropIn::Offered));
    assert_eq!((plan.target.as_deref(), plan.obstacle), (Some("10-calico.conflist"), None));
    assert!(plan.inlined_because.is_some_and(|why| why.contains(BESIDE)));
    assert_eq!(both.text("10-calico.conflist"), Some(&*with_ours()));
    assert!(both.text(BESIDE).is_some_and(|text| text.contains("\"drop_in\": true")), "{both:?}");

    let (read, plan) = settled(both.clone(), &beside(DropIn::Read));
    assert_eq!((plan.target.as_deref(), plan.obstacle), (Some(BESIDE), None));
    assert_eq!(plan.list.as_deref(), Some("10-calico.conflist"));
    let names: Vec<&str> = read.files().iter().map(|file| &*file.name).collect();
    assert_eq!(names, ["10-calico.conflist", BESIDE], "no copy of the original stays");
    assert_eq!(read.text("10-calico.conflist"), Some(CALICO));

    // And back, when that runtime is gone; and where the settings want it.
    assert_eq!(settled(read.clone(), &beside(DropIn::Offered)).0, both);
    let (inlined, plan) = settled(read.clone(), &chained());
    assert_eq!((plan.inlined_because, inlined.text(BESIDE)), (None, None));
    assert_eq!(inlined, settled(start.clone(), &chained()).0);
    for at in [both, read, inlined] {
        assert_eq!(removed(at, &chained().placement), start);
    }
}

/// At no moment, whatever was there, is the plugin in neither place; and never in the place alone that may not be read.
#[test]
fn no_edit_takes_the_entry_from_where_it_is_read() {
    const STATES: [DropIn; 4] = [DropIn::Never, DropIn::Offered, DropIn::Demanded, DropIn::Read];
    for (was, now) in STATES.iter().flat_map(|was| STATES.map(|now| (*was, now))) {
        let start = directory(&[("10-calico.conflist", CALICO)]);
        let mut at = settled(start, &beside(was)).0;
        let is_called = |at: &Directory| {
            let types =
                |name: &str| NetConf::parse(name, at.text(name)?).ok().map(|conf| conf.network.has_ours());
            let [inlined, beside] = ["10-calico.conflist", BESIDE].map(|name| types(name) == Some(true));
            inlined || (now == DropIn::Read && beside)
        };
        let was_called = is_called(&at);
        for edit in plan(&at, &beside(now)).edits {
            at = made(at, &edit);
            assert!(!was_called || is_called(&at), "{was:?} to {now:?}: {edit:?}");
        }
        assert_eq!(plan(&at, &beside(now)).edits, [], "{was:?} to {now:?}");
    }
}

#[test]
fn where_the_entry_cannot_be_beside_the_list_it_is_in_it_and_the_reason_is_said() {
    let named = |name: &str| CALICO.replace("\"net\"", &serde_json::Value::from(name).to_string());
    let only = CALICO.replace("\"name\"", "\"loadOnlyInlinedPlugins\": true,\n  \"name\"");
    let texts = CALICO.replace("\"name\"", "\"loadOnlyInlinedPlugins\": \"TRUE\",\n  \"name\"");
    let multus = CALICO.replace("calico", "multus-shim");
    for (list, why) in [
        (named("a/b"), "is not one of a folder"),
        (named("../b"), "is not one of a folder"),
        (named(".."), "is not one of a folder"),
        (named("."), "is not one of a folder"),
        (named(""), "is not one of a folder"),
        (named("a\0b"), "is not one of a folder"),
        (named(&"x".repeat(200)), "too long"),
        (only, "loadOnlyInlinedPlugins"),
        (texts, "loadOnlyInlinedPlugins"),
        (multus, "Multus"),
    ] {
        for drop_in in [DropIn::Offered, DropIn::Read] {
            let at = directory(&[("10-calico.conflist", &list)]);
            let (end, plan) = settled(at.clone(), &beside(drop_in));
            assert_eq!(end, settled(at.clone(), &chained()).0, "{list}");
            assert!(plan.inlined_because.as_ref().is_some_and(|said| said.contains(why)), "{plan:?}");
        }
        let at = directory(&[("10-calico.conflist", &list)]);
        let plan = plan(&at, &beside(DropIn::Demanded));
        assert_eq!(plan.edits, []);
        let obstacle = plan.obstacle.expect("an obstacle");
        assert!(
            obstacle.kind() == ObstacleKind::NoDropIn && obstacle.to_string().contains(why),
            "{obstacle}"
        );
    }
    for drop_in in [DropIn::Offered, DropIn::Read] {
        let at = directory(&[("10-single.conf", SINGLE)]);
        let (end, plan) = settled(at.clone(), &beside(drop_in));
        assert_eq!(end, settled(at, &chained()).0);
        assert!(plan.inlined_because.is_some_and(|why| why.contains("single plugin")));
        let at = directory(&[("05-other.conflist", OTHER), ("10-calico.conflist", CALICO)]);
        let want = Want { drop_in, ..pinned("10-calico.conflist") };
        assert!(settled(at, &want).1.inlined_because.is_some_and(|why| why.contains("first")));
    }
}

#[test]
fn a_list_that_comes_to_forbid_it_gets_the_entry_before_the_one_beside_goes() {
    let at = settled(directory(&[("10-calico.conflist", CALICO)]), &beside(DropIn::Read)).0;
    let only = CALICO.replace("\"name\"", "\"loadOnlyInlinedPlugins\": true,\n  \"name\"");
    let at = rewritten(at, "10-calico.conflist", Some(&only));
    let plan = plan(&at, &beside(DropIn::Read));
    assert!(
        matches!(plan.obstacle, Some(EntryObstacle::Preempted { .. } | EntryObstacle::Missing(_))),
        "{plan:?}"
    );
    let names: Vec<&str> = plan
        .edits
        .iter()
        .map(|edit| match edit {
            Edit::Write { name, .. } | Edit::Delete { name } => &**name,
        })
        .collect();
    assert_eq!(names, ["10-calico.conflist.istio-cni-original", "10-calico.conflist", BESIDE]);
}

#[test]
fn others_files_in_the_folder_stay_and_one_of_our_name_is_not_overwritten() {
    let theirs = r#"{"type":"bandwidth"}"#;
    let start = directory(&[("10-calico.conflist", CALICO), ("net/50-bandwidth.conf", theirs)]);
    let (end, plan) = settled(start.clone(), &beside(DropIn::Read));
    assert_eq!((plan.target.as_deref(), plan.obstacle), (Some(BESIDE), None));
    assert_eq!(removed(end, &chained().placement), start);
    let start = directory(&[("10-calico.conflist", CALICO), (BESIDE, theirs)]);
    let (end, plan) = settled(start.clone(), &beside(DropIn::Read));
    assert_eq!(end.text(BESIDE), Some(theirs));
    assert!(plan.inlined_because.is_some_and(|why| why.contains("another program (its plugins: bandwidth)")));
    assert!(calls_us(&end));
    let mut files = directory(&[("10-calico.conflist", CALICO)]).files().to_vec();
    files.push(File { name: "net/".into(), text: Err("it is a symbolic link to /srv".into()) });
    let plan = settled(Directory::new(files), &beside(DropIn::Read)).1;
    assert!(plan.inlined_because.is_some_and(|why| why.contains("symbolic link to /srv")));
}

#[test]
fn demanded_beside_the_list_it_leaves_the_list_alone_and_waits_to_be_read() {
    let start = directory(&[("10-calico.conflist", CALICO)]);
    let (end, plan) = settled(start, &beside(DropIn::Demanded));
    assert_eq!(end.text("10-calico.conflist"), Some(CALICO));
    let obstacle = plan.obstacle.expect("not seen to be read");
    assert!(obstacle.is_open() && obstacle.kind() == ObstacleKind::NotSeenCalled, "{obstacle}");
    // An entry that an earlier agent has put into the list is not taken out before.
    let start = directory(&[("10-calico.conflist", &with_ours())]);
    let (end, plan) = settled(start, &beside(DropIn::Demanded));
    assert_eq!((plan.obstacle, end.text("10-calico.conflist")), (None, Some(&*with_ours())));
    assert!(end.has(BESIDE));
}

/// One that knows only the list, and one that knows both, may follow each other.
#[test]
fn a_settings_change_and_a_meddler_are_corrected_beside_the_list_alone() {
    let at = settled(directory(&[("10-calico.conflist", CALICO)]), &beside(DropIn::Read)).0;
    for text in [None, Some("{"), Some(r#"{"type":"istio-cni"}"#)] {
        let changed = rewritten(at.clone(), BESIDE, text);
        let edits = plan(&changed, &beside(DropIn::Read)).edits;
        let is_beside = |edit: &Edit| matches!(edit, Edit::Write { name, .. } if name == BESIDE);
        assert!(edits.len() == 1 && edits.iter().all(is_beside), "{text:?}: {edits:?}");
        for want in [chained(), owned()] {
            let (end, _) = settled(changed.clone(), &want);
            assert!(calls_us(&end) && !end.has(BESIDE), "{text:?}: {end:?}");
        }
        assert!(!removed(changed, &chained().placement).has(BESIDE));
    }
}
