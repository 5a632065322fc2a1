use super::*;
use cni_core::sandboxed::{SandboxedPods, SandboxedRuntimes};
use proptest::prelude::*;

/// One file of each network plugin, written as its installer writes it.
const REAL: [(&str, &str); 14] = [
    ("10-calico.conflist", include_str!("../../../e2e/fixtures/conflists/10-calico.conflist")),
    ("05-cilium.conflist", include_str!("../../../e2e/fixtures/conflists/05-cilium.conflist")),
    ("10-flannel.conflist", include_str!("../../../e2e/fixtures/conflists/10-flannel.conflist")),
    ("10-aws.conflist", include_str!("../../../e2e/fixtures/conflists/10-aws.conflist")),
    ("10-kindnet.conflist", include_str!("../../../e2e/fixtures/conflists/10-kindnet.conflist")),
    ("10-ovn-kubernetes.conf", include_str!("../../../e2e/fixtures/conflists/10-ovn-kubernetes.conf")),
    ("10-azure.conflist", include_str!("../../../e2e/fixtures/conflists/10-azure.conflist")),
    ("10-weave.conflist", include_str!("../../../e2e/fixtures/conflists/10-weave.conflist")),
    ("10-k3s-flannel.conflist", include_str!("../../../e2e/fixtures/conflists/10-k3s-flannel.conflist")),
    ("00-multus.conf", include_str!("../../../e2e/fixtures/conflists/00-multus.conf")),
    ("10-antrea.conflist", include_str!("../../../e2e/fixtures/conflists/10-antrea.conflist")),
    ("100-crio-bridge.conflist", include_str!("../../../e2e/fixtures/conflists/100-crio-bridge.conflist")),
    ("10-gke-ptp.conflist", include_str!("../../../e2e/fixtures/conflists/10-gke-ptp.conflist")),
    ("87-podman-bridge.conflist", include_str!("../../../e2e/fixtures/conflists/87-podman-bridge.conflist")),
];

fn entry() -> PluginEntry {
    PluginEntry::of(&facts())
}

fn facts() -> EntryContent {
    EntryContent {
        log_level: "info".into(),
        run_dir: "/var/run/istio-cni".into(),
        exclude_namespaces: vec!["kube-system".into(), "istio-system".into()],
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
    }
}

fn with(file: &str, text: &str) -> String {
    NetConf::parse(file, text).expect("valid").with(&entry())
}

fn without(text: &str) -> Option<String> {
    NetConf::parse("x.conflist", text).expect("valid").without()
}

fn named<'c>(conf: &'c NetConf<'_>) -> (Option<&'c str>, Option<&'c str>) {
    (conf.network.name.as_deref(), conf.network.version.as_deref())
}

fn entry_state(text: &str) -> EntryState {
    NetConf::parse("x.conflist", text).expect("valid").entry_state(&entry())
}

#[test]
fn real_lists_go_in_and_out_byte_for_byte() {
    let lists = REAL.iter().filter(|(file, _)| Shape::of(file) == Shape::List);
    let mut count = 0;
    for (file, text) in lists {
        let with = with(file, text);
        assert_eq!(entry_state(&with), EntryState::Right, "{file}");
        assert_eq!(without(&with), Some((*text).to_owned()), "{file}");
        // Nothing but the entry was added.
        let (before, after): (serde_json::Value, serde_json::Value) =
            (serde_json::from_str(text).unwrap(), serde_json::from_str(&with).unwrap());
        let mut expected = before.clone();
        let plugins = expected["plugins"].as_array_mut().unwrap();
        plugins.push(after["plugins"].as_array().unwrap().last().unwrap().clone());
        assert_eq!(expected, after, "{file}");
        assert_eq!(after["plugins"].as_array().unwrap().last().unwrap()["type"], "istio-cni");
        count += 1;
    }
    assert!(count >= 12);
}

#[test]
fn a_second_time_changes_nothing() {
    for (file, text) in REAL {
        let once = with(file, text);
        assert_eq!(with("x.conflist", &once), once, "{file}");
    }
}

#[test]
fn an_entry_looks_like_its_neighbours() {
    let text = "{\n\t\"name\": \"a\",\n\t\"plugins\": [\n\t\t{\n\t\t\t\"type\": \"b\"\n\t\t}\n\t]\n}\n";
    let with = with("x.conflist", text);
    assert!(with.contains("\n\t\t},\n\t\t{\n\t\t\t\"name\": \"istio-cni\",\n"), "{with}");
    assert!(with.contains("\n\t\t\t\"exclude_namespaces\": [\"kube-system\",\"istio-system\"],\n"), "{with}");
    assert!(with.ends_with("\n\t\t}\n\t]\n}\n"), "{with}");

    let text = r#"{"name":"a","plugins":[{"type":"b","x":1}]}"#;
    let with_compact = self::with("x.conflist", text);
    assert!(
        with_compact.starts_with(r#"{"name":"a","plugins":[{"type":"b","x":1},{"name":"istio-cni","type":"#)
    );
    assert!(!with_compact.contains(": "), "{with_compact}");

    let text = "{\r\n \"name\": \"a\",\r\n \"plugins\": [\r\n  {\r\n   \"type\": \"b\"\r\n  }\r\n ]\r\n}";
    let with_dos = self::with("x.conflist", text);
    assert_eq!(with_dos.matches('\n').count(), with_dos.matches("\r\n").count());
    assert_eq!(without(&with_dos), Some(text.to_owned()));
}

#[test]
fn numbers_keys_and_blanks_keep_their_form() {
    let text = "{ \"plugins\" : [ {\"b\":1.0E+2,\"a\":12345678901234567890123,\"type\":\"x\\u002dy\"}\n ,\n{\"type\" : \"z\"} ], \"name\":\"n\", \"name\":\"m\"}  ";
    let with = with("x.conflist", text);
    assert!(with.starts_with(&text[..text.find(" ], ").unwrap()]), "{with}");
    assert!(with.ends_with(" ], \"name\":\"n\", \"name\":\"m\"}  "), "{with}");
    assert!(with.contains("\n ,\n{\"name\" : \"istio-cni\""), "{with}");
    assert_eq!(NetConf::parse("x.conflist", &with).unwrap().network.name.as_deref(), Some("m"));
}

#[test]
fn a_single_plugin_becomes_a_list_of_its_name_and_version() {
    for (file, name, version) in [
        ("10-ovn-kubernetes.conf", "ovn-kubernetes", "1.1.0"),
        ("00-multus.conf", "multus-cni-network", "0.3.1"),
    ] {
        let text = REAL.iter().find(|(real, _)| *real == file).unwrap().1;
        let list = with(file, text);
        let conf = NetConf::parse("x.conflist", &list).unwrap();
        assert_eq!(named(&conf), (Some(name), Some(version)), "{list}");
        let single: serde_json::Value = serde_json::from_str(text).unwrap();
        let listed: serde_json::Value = serde_json::from_str(&list).unwrap();
        assert_eq!(listed["plugins"][0], single);
        assert_eq!(conf.network.types().last(), Some("istio-cni"));
    }
}

#[test]
fn a_single_plugin_without_name_or_version_gets_only_the_name() {
    let list = with("10-a.conf", r#"{"type":"bridge"}"#);
    let conf = NetConf::parse("x.conflist", &list).unwrap();
    assert_eq!(named(&conf), (Some("k8s-pod-network"), None), "{list}");
}

#[test]
fn the_state_of_an_entry_names_the_problem() {
    let base = "{\"name\":\"a\",\"plugins\":[{\"type\":\"b\"}]}";
    assert_eq!(entry_state(base), EntryState::Absent);
    let right = with("x.conflist", base);
    assert_eq!(entry_state(&right), EntryState::Right);
    let edited = right.replace("\"plugin_log_level\":\"info\"", "\"plugin_log_level\":\"debug\",\"extra\":1");
    assert_eq!(entry_state(&edited), EntryState::Edited(vec!["plugin_log_level".into(), "extra".into()]));
    let followed = right.replace("}]}", "},{\"type\":\"portmap\"}]}");
    assert_eq!(entry_state(&followed), EntryState::Followed("portmap".into()));
    let repeated = right.replace("{\"type\":\"b\"}", "{\"type\":\"istio-cni\"},{\"type\":\"b\"}");
    assert_eq!(entry_state(&repeated), EntryState::Repeated);
    for wrong in [edited, followed.clone(), repeated] {
        assert_eq!(entry_state(&with("x.conflist", &wrong)), EntryState::Right, "{wrong}");
    }
    let moved = with("x.conflist", &followed);
    let conf = NetConf::parse("x.conflist", &moved).unwrap();
    assert_eq!(conf.network.types().collect::<Vec<_>>(), ["b", "portmap", "istio-cni"]);
}

#[test]
fn key_order_and_form_of_our_entry_do_not_matter() {
    let text = with("x.conflist", "{\"name\":\"a\",\"plugins\":[{\"type\":\"b\"}]}");
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    // A list's own name and version are put into its plugins by the runtime.
    value["plugins"][1]["cniVersion"] = "0.3.1".into();
    assert_eq!(entry_state(&serde_json::to_string_pretty(&value).unwrap()), EntryState::Right);
}

#[test]
fn an_entry_is_taken_out_wherever_it_is() {
    let ours = "{\"type\":\"istio-cni\"}";
    for (list, rest) in [
        (format!("[ {ours} , {{\"type\":\"b\"}} ]"), "[ {\"type\":\"b\"} ]"),
        (
            format!("[ {{\"type\":\"b\"}} , {ours} , {{\"type\":\"c\"}} ]"),
            "[ {\"type\":\"b\"} , {\"type\":\"c\"} ]",
        ),
        (format!("[{ours},{{\"type\":\"b\"}},{ours}]"), "[{\"type\":\"b\"}]"),
    ] {
        let text = format!("{{\"name\":\"a\",\"plugins\":{list}}}");
        assert_eq!(without(&text), Some(format!("{{\"name\":\"a\",\"plugins\":{rest}}}")));
    }
    let only = format!("{{\"name\":\"a\",\"plugins\":[{ours}]}}");
    assert_eq!(without(&only), None);
    assert_eq!(NetConf::parse("x.conf", ours).unwrap().without(), None);
}

#[test]
fn what_a_runtime_cannot_load_is_invalid() {
    let invalid = |file: &str, text: &str| NetConf::parse(file, text).unwrap_err();
    assert!(matches!(invalid("a.conflist", ""), Invalid::Json(_)));
    assert!(matches!(invalid("a.conflist", "{\"name\":\"a\", // no\n\"plugins\":[]}"), Invalid::Json(_)));
    assert!(matches!(
        invalid("a.conflist", "{\"name\":\"a\",\"plugins\":[{\"type\":\"b\"},]}"),
        Invalid::Json(_)
    ));
    assert!(matches!(invalid("a.conflist", "{\"name\":\"a\"} x"), Invalid::Json(_)));
    assert!(matches!(invalid("a.conflist", &"[".repeat(100_000)), Invalid::Json(_)));
    assert_eq!(invalid("a.conflist", "[]"), Invalid::NoObject);
    assert_eq!(invalid("a.conflist", "{\"plugins\":[{\"type\":\"b\"}]}"), Invalid::Lacks("name"));
    assert_eq!(invalid("a.conflist", "{\"name\":\"a\"}"), Invalid::Lacks("plugins"));
    assert_eq!(invalid("a.conflist", "{\"name\":\"a\",\"plugins\":[]}"), Invalid::Lacks("plugins"));
    assert_eq!(
        invalid("a.conflist", "{\"name\":\"a\",\"plugins\":[{\"type\":\"\"}]}"),
        Invalid::Lacks("type in every plugin")
    );
    assert_eq!(invalid("a.conf", "{\"name\":\"a\",\"plugins\":[{\"type\":\"b\"}]}"), Invalid::Lacks("type"));
    assert_eq!(
        invalid("a.conflist", "{\"name\":\"a\",\"cniVersion\":1,\"plugins\":[{\"type\":\"b\"}]}"),
        Invalid::Lacks("cniVersion that is a text")
    );
}

#[test]
fn the_entry_has_the_keys_of_the_reference() {
    let standalone: serde_json::Value = serde_json::from_str(&entry().standalone()).unwrap();
    let expected = serde_json::json!({
        "cniVersion": "0.3.1", "name": "istio-cni", "type": "istio-cni", "ipam": {}, "dns": {}, "capabilities": {"io.kubernetes.cri.pod-annotations": true},
        "plugin_log_level": "info", "cni_agent_run_dir": "/var/run/istio-cni", "ambient_enabled": false,
        "enablement_selectors": [], "exclude_namespaces": ["kube-system", "istio-system"],
        "pod_namespace": "istio-system", "native_nftables": false, "enable_ambient_detection_retry": false,
    });
    assert_eq!(standalone, expected);
    assert!(
        entry().standalone().starts_with("{\n  \"cniVersion\": \"0.3.1\",\n  \"name\": \"istio-cni\",\n")
    );
    let chained = with("x.conflist", "{\"name\":\"a\",\"plugins\":[{\"type\":\"b\"}]}");
    assert!(!chained.contains("cniVersion") && !chained.contains("nft_sets"));
    assert!(!chained.contains("strict_capture"));
    let with_both =
        PluginEntry::of(&EntryContent { nft_sets: true, strict_capture: true, ..facts() }).standalone();
    assert!(with_both.contains("\"nft_sets\": true,\n  \"strict_capture\": true"), "{with_both}");
    assert!(!chained.contains("accept"));
    let accepted_rules = "comment=ours".to_owned();
    let accepting = PluginEntry::of(&EntryContent { accepted_rules, accept_rules_of_pods: false, ..facts() })
        .standalone();
    let wanted = "\"accepted_rules\": \"comment=ours\",\n  \"accept_rules_of_pods\": false";
    assert!(accepting.contains(wanted), "{accepting}");
    assert!(!chained.contains("sandboxed"));
    let sandboxed = SandboxedRuntimes { names: vec!["vm".into()], pods: SandboxedPods::Skip };
    let entry: serde_json::Value =
        serde_json::from_str(&PluginEntry::of(&EntryContent { sandboxed, ..facts() }).standalone()).unwrap();
    assert_eq!((&entry["sandboxed_runtimes"], &entry["sandboxed_pods"]), (&["vm"].into(), &"skip".into()));
}

#[test]
fn a_template_becomes_the_entry() {
    let text = r#"{ "cniVersion": "0.3.1", "type": "istio-cni", "log_level": "__LOG_LEVEL__",
        "kubernetes": { "kubeconfig": "__KUBECONFIG_FILEPATH__", "n": 1.0e3 } }"#;
    let values = [("LOG_LEVEL", "war\"n".to_owned()), ("KUBECONFIG_FILEPATH", "/run/kc".to_owned())];
    let entry = PluginEntry::from_template(text, &values).unwrap();
    let base = "{\"name\":\"a\",\"plugins\":[{\"type\":\"b\"}]}";
    let with = NetConf::parse("x.conflist", base).unwrap().with(&entry);
    assert!(
        with.contains(
            r#",{"type":"istio-cni","log_level":"war\"n","kubernetes":{"kubeconfig":"/run/kc","n":1.0e3}}]"#
        ),
        "{with}"
    );
    assert!(entry.standalone().contains("\"cniVersion\": \"0.3.1\""));
    assert_eq!(entry.standalone().matches("cniVersion").count(), 1);
}

#[test]
fn templates_that_are_no_entry_are_refused() {
    let parse = |text: &str| PluginEntry::from_template(text, &[("A", "b".into())]).unwrap_err();
    assert!(matches!(parse("{"), EntryError::NoObject(_)));
    assert_eq!(parse(r#"{"type":"other"}"#), EntryError::Type("other".into()));
    let unknown = parse(r#"{"type":"istio-cni","x":"__NO_SUCH__"}"#);
    assert_eq!(unknown, EntryError::Placeholder("__NO_SUCH__".into(), "__A__".into()));
    // Templates older than this agent have placeholders that nothing fills any more.
    assert!(
        unknown.to_string().contains("unset CNI_NETWORK_CONFIG and CNI_NETWORK_CONFIG_FILE"),
        "{unknown}"
    );
}

fn blank() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec![" ", "\n", "\t", "\r\n"]), 0..3)
        .prop_map(|parts| parts.concat())
}

fn plugin() -> impl Strategy<Value = String> {
    let scalar = prop_oneof![
        Just("1.50".to_owned()),
        Just("true".to_owned()),
        Just("null".to_owned()),
        Just("\"}],{\\\"istio-cni\\\\\"".to_owned()),
        Just("[ 1 , {\"type\":\"istio-cni\"} ]".to_owned()),
    ];
    (blank(), blank(), blank(), scalar)
        .prop_map(|(a, b, c, scalar)| format!("{{{a}\"type\"{b}:{c}\"plug\",{a}\"k\"{b}:{c}{scalar}{b}}}"))
}

proptest! {
    #[test]
    fn whatever_the_form_in_and_out_is_the_identity(
        plugins in prop::collection::vec((plugin(), blank(), blank()), 1..4),
        (a, b, c) in (blank(), blank(), blank()),
    ) {
        let list: Vec<String> = plugins.iter().map(|(text, before, after)| format!("{before}{text}{after}")).collect();
        let text = format!("{a}{{{b}\"name\":{c}\"n\",{a}\"plugins\"{b}:{c}[{}]{a}}}{b}", list.join(","));
        let with = with("x.conflist", &text);
        prop_assert_eq!(entry_state(&with), EntryState::Right);
        prop_assert_eq!(without(&with), Some(text));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,60}", file in "[a-z]{1,3}\\.(conf|conflist)") {
        if let Ok(conf) = NetConf::parse(&file, &text) {
            let _ = (conf.with(&entry()), conf.without());
        }
    }
}
