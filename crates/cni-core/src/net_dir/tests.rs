use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn directory(files: &[(&str, &str)]) -> Directory {
    let file = |(name, text): &(&str, &str)| File { name: (*name).into(), text: Ok((*text).into()) };
    Directory::new(files.iter().map(file).collect())
}

fn kind(at: &Directory) -> Option<ObstacleKind> {
    at.verdict().uncalled.map(|uncalled| uncalled.kind())
}

const WITH: &str = r#"{"name":"k8s","plugins":[{"type":"calico"},{"type":"istio-cni"}]}"#;
const OTHER: &str = r#"{"name":"other","plugins":[{"type":"bridge"}]}"#;

#[test]
fn files_are_read_as_libcni_reads_them() {
    let read = |name: &str, text: &str| Network::parse(name, text).is_ok();
    for (text, is_list, is_single) in [
        (r#"{"name":"a","plugins":[{"type":"x"}]}"#, true, false),
        (r#"{"name":"a","type":"x","plugins":[{"type":"x"}]}"#, true, true),
        (r#"{"plugins":[{"type":"x"}]}"#, false, false),
        (r#"{"name":"a","plugins":[]}"#, false, false),
        (r#"{"name":"a","plugins":{}}"#, false, false),
        (r#"{"name":"a","plugins":[{}]}"#, false, false),
        (r#"{"name":"a","cniVersion":1,"plugins":[{"type":"x"}]}"#, false, false),
        (r#"{"name":"a"}"#, true, false),
        (r#"{"name":"a","loadOnlyInlinedPlugins":true}"#, false, false),
        (r#"{"type":"x"}"#, false, true),
        (r#"{"type":""}"#, false, false),
        (r#"{"type":"x"},"#, false, false),
        ("", false, false),
        ("null", false, false),
        ("[]", false, false),
        ("\u{feff}{\"type\":\"x\"}", false, false),
    ] {
        assert_eq!((read("a.conflist", text), read("a.conf", text)), (is_list, is_single), "{text}");
    }
    for name in ["", ".", "..", "../x", "a/b"] {
        let text = json!({"name": name}).to_string();
        assert_eq!(Network::parse("a.conflist", &text).expect("a list").folder(), None, "{name}");
    }
}

#[test]
fn the_folder_of_a_list_is_behind_its_own_plugins() {
    let files = [
        ("10-a.conflist", WITH),
        ("k8s/10-x.conf", r#"{"type":"tuning"}"#),
        ("k8s/x.json", "{"),
        ("other/y.conf", "{"),
    ];
    let at = directory(&files);
    assert_eq!(at.folders(), BTreeSet::from(["k8s".to_owned()]));
    let types: Vec<String> =
        at.verdict().caller.expect("called").network.types().map(str::to_owned).collect();
    assert_eq!(types, ["calico", "istio-cni", "tuning"]);
    let broken = directory(&[files[0], ("k8s/10-x.conf", "{")]);
    let text = broken.verdict().uncalled.expect("broken").to_string();
    assert!(text.contains("k8s/10-x.conf") && text.contains("not JSON"), "{text}");
    let alone = WITH.replacen('{', r#"{"loadOnlyInlinedPlugins":"true","#, 1);
    assert_eq!(kind(&directory(&[("10-a.conflist", &alone), ("k8s/10-x.conf", "{")])), None);
}

#[test]
fn the_loopback_plugin_alone_makes_no_network() {
    let with = r#"{"name":"lo","plugins":[{"type":"loopback"},{"type":"istio-cni"}]}"#;
    for (name, text) in [("99-loopback.conf", r#"{"name":"lo","type":"loopback"}"#), ("99-lo.conflist", with)]
    {
        assert_eq!(kind(&directory(&[(name, text)])), Some(ObstacleKind::Loopback), "{name}");
    }
    let more = r#"{"name":"lo","plugins":[{"type":"loopback"},{"type":"ptp"},{"type":"istio-cni"}]}"#;
    assert_eq!(kind(&directory(&[("99-lo.conflist", more)])), None);
}

#[test]
fn what_is_behind_the_first_file_does_not_matter() {
    for (name, text) in
        [("20-x.conf", "{"), ("20-x.conflist", OTHER), ("99-loopback.conf", r#"{"type":"loopback"}"#)]
    {
        assert_eq!(kind(&directory(&[("10-a.conflist", WITH), (name, text)])), None);
    }
    for name in ["00-x.txt", "00-x.conf.bak", ".conf.swp", "00-x"] {
        assert_eq!(kind(&directory(&[("10-a.conflist", WITH), (name, "{")])), None, "{name}");
    }
}

#[test]
fn directories_are_the_same_wherever_they_are_mounted() {
    for (ours, theirs, is_same) in [
        ("/host/etc/cni/net.d", "/etc/cni/net.d", true),
        ("/host/etc/cni/net.d", "/hostroot/etc/cni/net.d/", true),
        ("/host/etc/cni/net.d", "/host/var/lib/rancher/k3s/agent/etc/cni/net.d", true),
        ("/host/etc/cni/net.d", "/etc/cni/multus/net.d", false),
        ("/host/etc/cni/net.d", "/run/multus/cni/net.d", false),
        ("/host/etc/cni/multus/net.d", "/etc/cni/multus/net.d", true),
        ("/host/etc/cni/multus/net.d", "/etc/cni/net.d", false),
        ("/host/etc/cni/net.d", "/etc/kubernetes", false),
    ] {
        let multus =
            json!({"type": "multus-shim", "clusterNetwork": format!("{theirs}/10-a.conflist")}).to_string();
        let at = directory(&[("00-m.conf", &multus), ("10-a.conflist", WITH)]).at(ours);
        assert_eq!(kind(&at).is_none(), is_same, "{ours} {theirs}");
        assert_eq!(at.is_named_by_multus("10-a.conflist"), is_same, "{ours} {theirs}");
    }
}

/// How Multus learns what to run.
#[derive(Debug, Clone)]
enum Target {
    Inlined(usize),
    Path(&'static str, usize),
    Name(usize),
    Directory,
    Definition,
    Nothing,
}

/// A network of the directory: its file's name, whether our entry is in it, and what Multus would make of it.
#[derive(Debug, Clone)]
struct Net {
    has_ours: bool,
    is_single: bool,
}

impl Net {
    fn file(&self, index: usize) -> String {
        format!("{}0-n.{}", index + 1, if self.is_single { "conf" } else { "conflist" })
    }

    fn value(&self, index: usize) -> Value {
        let own = json!({"name": format!("n{index}"), "cniVersion": "1.0.0", "type": "bridge"});
        let ours = json!({"type": "istio-cni"});
        match (self.is_single, self.has_ours) {
            (true, _) => own,
            (false, false) => json!({"name": format!("n{index}"), "plugins": [{"type": "bridge"}]}),
            (false, true) => json!({"name": format!("n{index}"), "plugins": [{"type": "bridge"}, ours]}),
        }
    }

    fn calls_us(&self) -> bool {
        self.has_ours && !self.is_single
    }
}

fn nets() -> impl Strategy<Value = Vec<Net>> {
    let net = (any::<bool>(), any::<bool>()).prop_map(|(has_ours, is_single)| Net { has_ours, is_single });
    prop::collection::vec(net, 1..5)
}

fn target() -> impl Strategy<Value = Target> {
    let mounts = prop::sample::select(vec![
        "/etc/cni/net.d",
        "/host/etc/cni/net.d",
        "/hostroot/etc/cni/net.d",
        "/opt/nets",
    ]);
    prop_oneof![
        (0..4_usize).prop_map(Target::Inlined),
        (mounts, 0..4_usize).prop_map(|(mount, at)| Target::Path(mount, at)),
        (0..4_usize).prop_map(Target::Name),
        Just(Target::Directory),
        Just(Target::Definition),
        Just(Target::Nothing),
    ]
}

proptest! {
    /// Ready exactly if what Multus runs has the entry; open exactly if that is not in the directory.
    #[test]
    fn multus_in_any_form_is_followed(
        nets in nets(),
        target in target(),
        is_thick in any::<bool>(),
        conf_dir in prop::sample::select(vec![None, Some("/etc/cni/net.d"), Some("/etc/cni/multus/net.d")]),
        is_chained in any::<bool>(),
    ) {
        let at = |index: usize| index % nets.len();
        let mut multus = json!({"type": if is_thick { "multus-shim" } else { "multus" }, "readinessindicatorfile": "/x"});
        if let Some(directory) = conf_dir {
            multus["confDir"] = directory.into();
        }
        let looks_here = conf_dir.map_or(is_thick, |directory| directory == "/etc/cni/net.d");
        // Whether the plugin is called, and whether that is certain.
        let (calls, is_certain) = match &target {
            Target::Inlined(index) => {
                multus["delegates"] = json!([nets[at(*index)].value(at(*index))]);
                (nets[at(*index)].calls_us(), true)
            }
            Target::Path(mount, index) => {
                multus["clusterNetwork"] = format!("{mount}/{}", nets[at(*index)].file(at(*index))).into();
                let is_here = *mount != "/opt/nets";
                (is_here && nets[at(*index)].calls_us(), is_here)
            }
            Target::Name(index) => {
                multus["clusterNetwork"] = format!("n{}", at(*index)).into();
                (nets[at(*index)].calls_us(), looks_here || !nets[at(*index)].calls_us())
            }
            Target::Directory => {
                multus["clusterNetwork"] = "/host/etc/cni/net.d/".into();
                // The first file is Multus's own.
                (is_chained, true)
            }
            Target::Definition => {
                multus["clusterNetwork"] = "tenant".into();
                (false, false)
            }
            Target::Nothing => (false, false),
        };
        let mut files: Vec<File> = nets.iter().enumerate()
            .map(|(index, net)| File { name: net.file(index), text: Ok(net.value(index).to_string()) })
            .collect();
        let (name, text) = match is_chained {
            true => ("00-multus.conflist", json!({"name": "m", "plugins": [multus, {"type": "istio-cni"}]})),
            false => ("00-multus.conf", multus),
        };
        files.push(File { name: name.into(), text: Ok(text.to_string()) });
        let directory = Directory::new(files).at("/host/etc/cni/net.d");
        let verdict = directory.verdict();
        if is_chained {
            // Behind Multus itself, whatever that runs.
            prop_assert_eq!((verdict.caller.map(|caller| caller.file), verdict.uncalled), (Some(name), None));
        } else {
            prop_assert_eq!(verdict.caller.is_some(), calls, "{:?}", &verdict);
            let is_open = verdict.uncalled.as_ref().is_some_and(Uncalled::is_open);
            prop_assert_eq!(is_open, !is_certain, "{:?}", &verdict);
            prop_assert_eq!(verdict.uncalled.is_none(), calls && is_certain, "{:?}", &verdict);
        }
    }

    /// Without Multus the first file that can be loaded decides, and anything in front of it leaves it open.
    #[test]
    fn the_first_file_decides(texts in prop::collection::vec(0..6_usize, 0..6)) {
        let kinds = [WITH, OTHER, "", "{broken", r#"{"name":"lo","plugins":[{"type":"loopback"}]}"#];
        let file = |(index, kind): (usize, &usize)| File {
            name: format!("{index}-x.conflist"),
            text: kinds.get(*kind).map(|text| (*text).to_owned()).ok_or_else(|| "permission denied".to_owned()),
        };
        let directory = Directory::new(texts.iter().enumerate().map(file).collect());
        let verdict = directory.verdict();
        let first = texts.iter().position(|kind| ![2, 3, 5].contains(kind));
        let is_first_with = first.is_some_and(|first| texts[first] == 0);
        prop_assert_eq!(verdict.caller.is_some(), is_first_with);
        prop_assert_eq!(verdict.uncalled.is_none(), is_first_with && first == Some(0));
        prop_assert!(verdict.uncalled.is_none_or(|uncalled| !uncalled.to_string().contains('\n')));
    }
}
