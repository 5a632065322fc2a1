//! What is written as JSON is what the schema says, and nothing of the schema is made up.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::collections::BTreeSet;
use std::path::Path;

use cni_core::pod_source::PodName;
use jsonschema::Validator;
use netfilter_state::netlink::kept::KeptTable;
use netfilter_state::ruleset::{Api, Counter, TableFamily, TableName};
use netns_apply::connections::WaitingSocket;
use netns_apply::netns::Netns;
use netns_apply::{ApplyOptions, Impact, Live};
use packet_trace::interference::{self, Accepted, Certainty, Effect, RuleRef};
use packet_trace::{RuleLocation, RuleOrigin};
use reasons::PodState;
use redirect_core::accepted::AcceptedBy;
use redirect_core::options::BackendChoice;
use redirect_core::plan::DataPlane;
use redirect_core::rule::Protocol;
use redirect_core::settings::{Key, NamespaceFacts, Source};
use redirectctl::bundle::{Bundle, written_json};
use redirectctl::cause::{Cause, PodFinding};
use redirectctl::cni::{AttachedPod, PluginReply, PluginRequest};
use redirectctl::commands::{COMMANDS, Definition};
use redirectctl::diagnosis::PodDecision;
use redirectctl::inspect::{InForce, Inspection};
use redirectctl::node::NodeConfiguration;
use redirectctl::pod::Pod;
use redirectctl::report::Report;
use redirectctl::scan::{Scan, ScanEntry};
use redirectctl::show;
use redirectctl::traffic::{PlanComparison, Programmed};
use redirectctl::watch::{CounterSnapshot, WatchExit, WatchedRule, counted_json, end_json, rules_json};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::project;

const OF_CORE: &str = "../../redirect-core/schema/redirect-core-1.schema.json#";

fn read(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(project::file(path)).unwrap()).unwrap()
}

fn own() -> Value {
    read("redirectctl/schema/redirectctl-1.schema.json")
}

/// Both schemas as one: a validator without a network finds no other file.
fn validator(document: &str) -> Validator {
    let text = own().to_string().replace(OF_CORE, "#/$defs/core");
    let mut schema: Value = serde_json::from_str(&text).unwrap();
    let core = read("redirect-core/schema/redirect-core-1.schema.json").to_string();
    schema["$defs"]["core"] = serde_json::from_str(&core.replace("#/$defs/", "#/$defs/core/$defs/")).unwrap();
    let schema = json!({"$ref": format!("#/$defs/{document}"), "$defs": schema["$defs"]});
    jsonschema::draft202012::new(&schema).unwrap()
}

fn checked(document: &str, written: Vec<Value>) -> Vec<Value> {
    let validator = validator(document);
    for value in &written {
        let wrong: Vec<String> =
            validator.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect();
        assert!(wrong.is_empty(), "{document}: {wrong:#?}\n{value:#}");
    }
    written
}

fn findings() -> Vec<PodFinding> {
    Cause::ALL.iter().copied().map(|cause| PodFinding::new(cause, "seen")).collect()
}

fn accepted(by: AcceptedBy) -> Accepted {
    let table = TableName { api: Api::NfTables, family: TableFamily::Ip, name: "nat".into() };
    let place =
        RuleRef { table, base_chain: "OUTPUT".into(), hook: None, chain: "BACKUP".into(), rule: Some(1) };
    let (severity, effect, rule) = (Certainty::Does, Effect::Translates, "-j DNAT".into());
    let finding =
        interference::Finding { severity, place, rule, effect, traffic: BTreeSet::new(), example: None };
    Accepted { finding, by }
}

fn pod(annotations: &Value) -> Pod {
    let pod = json!({"kind": "Pod", "metadata": {"name": "web", "namespace": "shop", "annotations": annotations}, "spec": {
        "containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]}, "status": {"podIP": "10.1.0.2"}});
    Pod::from_json(&pod).unwrap()
}

/// Reports of everything that can be decided, made, and of the network namespace that the test runs in, checked.
fn reports() -> Vec<Value> {
    let node = NodeConfiguration::default();
    let redirected = pod(
        &json!({"sidecar.istio.io/status": "{}", "traffic.sidecar.istio.io/excludeOutboundPorts": "3306"}),
    );
    let wrong = pod(
        &json!({"sidecar.istio.io/status": "{}", "traffic.sidecar.istio.io/excludeOutboundPorts": "http"}),
    );
    let skipped = pod(&json!({"sidecar.istio.io/inject": "false"}));
    let own = Path::new("/proc/self/ns/net");
    let mut reports: Vec<Value> = [Some(&redirected), Some(&wrong), Some(&skipped), None]
        .into_iter()
        .map(|pod| show::netns(own, pod, &node).json())
        .collect();
    reports.push(show::pod(&redirected, Path::new("/nonexistent"), &node).json());
    let inspection = Inspection {
        addresses: vec!["10.1.0.2".parse().unwrap()],
        in_force: vec![
            InForce { backend: "iptables-nft", rules: Some(3) },
            InForce { backend: "iptables-legacy", rules: Some(3) },
            InForce { backend: "native nftables", rules: None },
        ],
        listeners: [
            WaitingSocket { protocol: Protocol::Udp, port: 53, user: 0 },
            WaitingSocket { protocol: Protocol::Tcp, port: 1, user: 1337 },
        ]
        .into(),
        unexamined: vec!["the XDP program 7 of eth0".into()],
        mismatch: None,
        accepted: [AcceptedBy::Node, AcceptedBy::Pod, AcceptedBy::KubeVirt].map(accepted).into(),
        not_accepted: None,
        impact: Impact::default(),
        lacking: Vec::new(),
        kept: KeptTable::default(),
        foreign: false,
    };
    let made = Report {
        subject: "pod shop/web".into(),
        netns: Some(own.into()),
        decided: PodDecision::Unknown,
        order: Some(("/etc/cni/net.d/10-k8s.conflist".into(), vec!["ptp".into(), "istio-cni".into()])),
        inspection: Some(inspection),
        findings: findings(),
    };
    reports.push(made.json());
    assert!(reports.iter().any(|report| report["decision"]["decision"] == "redirect"), "{reports:#?}");
    assert!(reports.iter().any(|report| report["decision"]["decision"] == "skip"), "{reports:#?}");
    checked("report", reports)
}

fn scans() -> Vec<Value> {
    let entry = |state, data_plane| ScanEntry {
        subject: "shop/web".into(),
        state,
        data_plane,
        consequences: vec!["all outbound connections bypass the proxy".into()],
        findings: findings(),
    };
    let planes = [None, Some(DataPlane::Sidecar), Some(DataPlane::Ambient)].into_iter().cycle();
    let entries = PodState::ALL.iter().zip(planes).map(|(state, plane)| entry(*state, plane));
    let scan = Scan { node: findings(), entries: entries.collect() };
    checked("scan", vec![scan.json()])
}

fn watches() -> Vec<Value> {
    let table = |api, family, name: &str| TableName { api, family, name: name.into() };
    let rule = |table: TableName, counter, origins| WatchedRule {
        place: RuleLocation { table, chain: "ISTIO_OUTPUT".into(), rule: Some(1) },
        text: "-j RETURN".into(),
        origins,
        counter,
    };
    let counter = Counter { packets: 3, bytes: u64::MAX };
    let origin = RuleOrigin { setting: Key::ProxyUid, source: Source::Default, purpose: "for the proxy" };
    let look = CounterSnapshot {
        rules: vec![
            rule(table(Api::XTables, TableFamily::Ip6, "nat"), Some(counter), vec![origin]),
            rule(table(Api::NfTables, TableFamily::Inet, "istio-proxy-nat"), None, Vec::new()),
        ],
    };
    let time = "2026-11-22T04:10:08.123Z";
    let netns = Netns::current().unwrap();
    let live = netns.run(|| Live::now(None, &ApplyOptions::default())).unwrap().unwrap();
    checked(
        "watch",
        vec![
            rules_json("pod shop/web", "/run/netns/x", time, &look),
            rules_json("here", "/proc/self/ns/net", time, &CounterSnapshot::of(&live, None)),
            counted_json(time, &look.rules[0], counter),
            end_json(time, WatchExit::Signal),
            end_json(time, WatchExit::Gone),
        ],
    )
}

fn pod_name() -> PodName {
    PodName { namespace: "shop".into(), name: "web".into() }
}

fn checks() -> Vec<Value> {
    let attachment = AttachedPod {
        pod: pod_name(),
        netns: "/run/netns/x".into(),
        addresses: vec!["10.1.0.2".parse().unwrap()],
        interface: None,
        cached: None,
    };
    let entry = json!({"cniVersion": "1.0.0", "name": "k8s", "type": "istio-cni", "disableCheck": true});
    let environment = [("PATH".to_owned(), "/bin".to_owned())].into();
    let question = PluginRequest::check(&attachment, entry, "/opt/cni/bin/istio-cni".into(), environment);
    let refused = PluginReply::Refused { code: 111, message: "m".into(), details: "d".into() };
    checked(
        "check",
        [None, Some(PluginReply::AsPlanned), Some(refused)]
            .iter()
            .map(|one| question.json(one.as_ref()))
            .collect(),
    )
}

fn bundles() -> Vec<Value> {
    let mut bundle = Bundle::default();
    bundle.add_json("machine.json", &json!({}));
    bundle.leave_out("pods", "no API server");
    let left_out = bundle.left_out().to_vec();
    let entries = bundle.into_entries();
    let answer = written_json(Path::new("ticket.tar.gz"), 7, &entries, &left_out);
    let contents = serde_json::from_slice(&entries[0].1).unwrap();
    [checked("bundle", vec![answer]), checked("contents", vec![contents])].concat()
}

fn diffs() -> Vec<Value> {
    let plan = |ports: &str| {
        let annotations =
            json!({"sidecar.istio.io/status": "{}", "traffic.sidecar.istio.io/excludeOutboundPorts": ports});
        let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        let mut pod = pod(&annotations);
        pod.facts.proxy.as_mut().unwrap().env.insert("ISTIO_DUAL_STACK".into(), "true".into());
        let plan =
            NodeConfiguration::default().decide(&pod, &NamespaceFacts::new(&addresses)).plan().unwrap();
        Programmed { plan, backend: BackendChoice::Auto }
    };
    let (before, after) = (plan("3306"), plan("5432"));
    checked(
        "traffic",
        vec![PlanComparison::of(&before, &after).json(), PlanComparison::of(&before, &before).json()],
    )
}

#[test]
fn what_is_written_is_what_the_schema_says() {
    let documents: Vec<Value> = [reports(), scans(), watches(), checks(), bundles(), diffs()].concat();
    let mut written = BTreeSet::new();
    documents.iter().for_each(|document| words(document, &mut written));
    let mut described = BTreeSet::new();
    defined(&own(), &mut described);
    let made_up: Vec<&String> = described.difference(&written).collect();
    assert!(made_up.is_empty(), "no program writes {made_up:?}");
}

/// The program itself, as somebody calls it: no command with `--output json` is without a schema.
#[test]
fn every_command_writes_what_its_schema_says() {
    let there = Namespace::pod(Families::V4).unwrap();
    let netns = there.path().display().to_string();
    let directory = there.path().parent().unwrap().display().to_string();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let pod = json!({"kind": "Pod", "metadata": {"name": "web", "namespace": "shop", "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]}, "status": {"podIP": "192.0.2.77"}});
    let list = json!({"cniVersion": "1.0.0", "name": "k8s", "plugins": [{"type": "istio-cni"}]});
    let (manifest, archive, conf) = (file("pod.json"), file("ticket.tar.gz"), file("10-k8s.conflist"));
    std::fs::write(&manifest, pod.to_string()).unwrap();
    std::fs::write(conf, list.to_string()).unwrap();
    let conf = folder.path().display().to_string();
    let node = ["--netns-dir", &directory, "--cni-conf-dir", &conf];
    let lines: Vec<(&str, Vec<&str>)> = vec![
        ("core/$defs/plan", vec!["plan", "-b", "*", "-i", "*", "--address", "10.1.0.2"]),
        ("report", vec!["verify", "--netns", &netns, "-b", "*", "-i", "*"]),
        ("report", vec!["netns", &netns, "-f", &manifest]),
        ("report", [["pod", "shop/web", "-f", &manifest].as_slice(), &node].concat()),
        ("scan", [["scan", "-f", &manifest].as_slice(), &node].concat()),
        ("watch", vec!["watch", "--netns", &netns, "--once"]),
        (
            "check",
            vec!["cni", "check", "-f", &manifest, "--netns", &netns, "--cni-conf-dir", &conf, "--dry-run"],
        ),
        ("core/$defs/trace", vec!["trace", "-f", &manifest, "--to", "198.51.100.1:80"]),
        ("traffic", vec!["diff", &manifest, "flags:-b *"]),
        (
            "bundle",
            [["bundle", &archive, "-f", &manifest, "--metrics", "127.0.0.1:1"].as_slice(), &node].concat(),
        ),
    ];
    for (document, words) in &lines {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_redirectctl"));
        let output = command.args(words).args(["--output", "json"]).env_clear().output().unwrap();
        let written = serde_json::from_slice(&output.stdout);
        let written =
            written.unwrap_or_else(|_| panic!("{words:?}: {}", String::from_utf8_lossy(&output.stderr)));
        checked(document, vec![written]);
    }
    let asked: BTreeSet<&str> = lines.iter().map(|(_, words)| words[0]).collect();
    let can: BTreeSet<&str> = COMMANDS
        .iter()
        .filter(|command| command.rows.iter().any(|row| row.flag == Some("output")))
        .map(Definition::name)
        .collect();
    assert_eq!(asked, can);
}

#[test]
fn what_the_schema_does_not_say_is_refused() {
    let report = reports().pop().unwrap();
    for (at, value) in [
        ("/version", json!(2)),
        ("/findings/0/code", json!("unheard-of")),
        ("/findings/0/severity", json!("fatal")),
        ("/rules/0/backend", json!("ipset")),
        ("/listeners/0/port", json!(65536)),
        ("/decision", json!({"decision": "perhaps"})),
    ] {
        let mut other = report.clone();
        *other.pointer_mut(at).unwrap() = value;
        assert!(!validator("report").is_valid(&other), "{at}");
    }
    let mut more = report;
    more["more"] = json!(1);
    assert!(!validator("report").is_valid(&more));
}

#[test]
fn the_codes_are_those_of_the_findings() {
    let listed: Vec<String> =
        serde_json::from_value(own()["$defs"]["finding"]["properties"]["code"]["enum"].clone()).unwrap();
    let wanted: Vec<&str> = Cause::ALL.iter().copied().map(Cause::code).collect();
    assert_eq!(listed, wanted, "$defs.finding.properties.code.enum must be {}", json!(wanted));
}

/// Every property and every word that a document has.
fn words(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                into.insert(key.clone());
                words(value, into);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| words(item, into)),
        Value::String(text) => {
            into.insert(text.clone());
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Every property and every word that a schema lists.
fn defined(schema: &Value, into: &mut BTreeSet<String>) {
    match schema {
        Value::Object(object) => {
            for (key, value) in object {
                match (key.as_str(), value) {
                    ("properties", Value::Object(properties)) => into.extend(properties.keys().cloned()),
                    ("enum", Value::Array(all)) => {
                        into.extend(all.iter().filter_map(Value::as_str).map(str::to_owned));
                    }
                    ("const", Value::String(text)) => {
                        into.insert(text.clone());
                    }
                    _ => {}
                }
                defined(value, into);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| defined(item, into)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
