//! What is written as JSON is what the schema says, nothing of the schema is made up, and settings come back.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::generated::settings;
use crate::model_kernel::{Kernel, Tables};
use crate::recorded::fixtures;
use jsonschema::Validator;
use netfilter_state::{
    differences::{Difference, Differences},
    netlink::{NativeDifference, NativeDifferenceKind},
    routing::FoundRouting,
    state::{Entry, IptablesTables},
    steps::{Goal, RulesIn},
};
use packet_trace::{
    self, ConnectionState, ConntrackEntry, Fate, Listener, Outcome, Packet, PacketEdit, Trace, TraceEvent,
    TraceRules,
};
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};
use redirect_core::{
    Families, Family, Redirect, RulePlan, Tproxy,
    options::{NativeForm, Variant},
    pod::{Decision, SkipReason},
    rule::{Chain, Hook, OurChain, Rule, Table},
    settings::{Key, Part, RawSettings, Setting, Source},
    values::Problem,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::{collections::BTreeSet, sync::LazyLock};
use test_support::project;

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let path = project::file("redirect-core/schema/redirect-core-1.schema.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
});
static SETTINGS_SCHEMA: LazyLock<Validator> = LazyLock::new(|| validator("settings"));
static DECISION_SCHEMA: LazyLock<Validator> = LazyLock::new(|| validator("decision"));
static PLAN_SCHEMA: LazyLock<Validator> = LazyLock::new(|| validator("plan"));
static DIFFERENCES_SCHEMA: LazyLock<Validator> = LazyLock::new(|| validator("differences"));
static DIFFERENCE_SCHEMA: LazyLock<Validator> = LazyLock::new(|| validator("difference"));

fn validator(document: &str) -> Validator {
    let schema = json!({"$ref": format!("#/$defs/{document}"), "$defs": SCHEMA["$defs"]});
    jsonschema::draft202012::new(&schema).unwrap()
}

/// The document as JSON, once the schema is found to describe it.
fn valid(document: &impl Serialize, schema: &Validator) -> Value {
    let written = serde_json::to_value(document).unwrap();
    let errors: Vec<String> =
        schema.iter_errors(&written).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(errors.is_empty(), "{errors:#?}\n{written:#}");
    written
}

fn plan_document(plan: &RulePlan) -> Value {
    valid(plan, &PLAN_SCHEMA)
}

fn settings_document(raw: &RawSettings) -> Value {
    let written = valid(raw, &SETTINGS_SCHEMA);
    assert_eq!(&serde_json::from_value::<RawSettings>(written.clone()).unwrap(), raw);
    written
}

/// The documents of every recorded case, and of every reason to skip a pod.
fn documents() -> Vec<Value> {
    let mut documents = Vec::new();
    for case in fixtures("rules.json").as_array().unwrap() {
        if let Some((raw, redirect)) = crate::recorded::redirect(case) {
            documents.push(settings_document(&raw));
            documents.push(plan_document(&redirect.plan()));
            documents.push(valid(&Decision::Redirect(Box::new(redirect)), &DECISION_SCHEMA));
        }
    }
    assert!(documents.len() > 900, "{}", documents.len());
    for reason in SkipReason::ALL.iter().copied() {
        documents.push(valid(&Decision::Skip(reason), &DECISION_SCHEMA));
    }
    documents.push(every_source());
    documents.push(plan_document(&strict_plan()));
    documents.extend(ambient_plans().iter().map(plan_document));
    documents.extend(differences());
    documents.extend(traces());
    documents
}

/// Traces of all kinds of packets and steps, and what two plans treat differently.
fn traces() -> Vec<Value> {
    let plan = strict_plan();
    let outside = Packet::from_outside("192.0.2.1:4000".parse().unwrap(), "10.1.0.2:80".parse().unwrap());
    let of_app =
        Packet::from_pod(1000, 1000, "10.1.0.2:4000".parse().unwrap(), "192.0.2.1:80".parse().unwrap());
    let states = [
        ConnectionState::New,
        ConnectionState::Related,
        ConnectionState::Established,
        ConnectionState::Reply,
        ConnectionState::Invalid,
    ];
    let rules = TraceRules::of_plan(&plan, Family::V4);
    let mut traces: Vec<Trace> = Vec::new();
    for packet in [outside.by("eth0"), of_app.clone(), of_app.over_udp()] {
        traces.extend(states.into_iter().map(|state| {
            let to = "127.0.0.1:15001".parse().unwrap();
            let connection = ConntrackEntry { state, mark: 1337, translated_to: Some(to) };
            let mut packet = packet.clone();
            packet.connection = connection;
            rules.trace(&packet)
        }));
    }
    let fates = [
        Fate::Proxy { listener: Listener::Outbound, port: 15001, rewritten: true },
        Fate::Proxy { listener: Listener::Dns, port: 15053, rewritten: true },
        Fate::Redirected { port: 9 },
        Fate::Translated,
        Fate::Broken,
        Fate::Rejected,
        Fate::Dropped,
    ];
    let mut odd = traces.first().unwrap().clone();
    odd.may.extend(fates);
    let place = traces
        .iter()
        .flat_map(|trace| &trace.steps)
        .find_map(|step| if let TraceEvent::Chain { place, .. } = step { Some(place.clone()) } else { None });
    let place = place.unwrap();
    odd.steps.extend([
        TraceEvent::Policy { place: place.clone() },
        TraceEvent::Changed(PacketEdit::Zone { zone: 1 }),
        TraceEvent::Route { decides: "route blackhole 127.0.0.0/8 table local".into() },
        TraceEvent::Changed(PacketEdit::Mark { mark: None }),
        TraceEvent::Changed(PacketEdit::Rerouted { interface: Some("lo".into()) }),
        TraceEvent::Rule {
            place: packet_trace::RuleLocation { rule: Some(1), ..place },
            depth: 0,
            rule: "-m set -j DROP".into(),
            outcome: Outcome::Unknown("-m set".into()),
            is_own: false,
            origin: None,
        },
    ]);
    traces.push(odd);
    let trace_schema = validator("trace");
    let mut documents: Vec<Value> = traces.iter().map(|trace| valid(trace, &trace_schema)).collect();
    let mut not_all = documents.first().unwrap().clone();
    not_all["unexamined"] = json!(["the XDP program 7 of eth0"]);
    documents.push(valid(&not_all, &trace_schema));
    let others = Redirect::sidecar(Families::V4).build().unwrap().plan();
    let differences = packet_trace::TrafficDifference::of_plans(&plan, &others);
    let differences = packet_trace::json::TrafficDifferences::from(differences.as_slice());
    documents.push(valid(&differences, &validator("trafficDifferences")));
    documents
}

/// What no recording has, because the reference has it not; made by a program.
fn strict_plan() -> RulePlan {
    let redirect = Redirect::sidecar(Families::Both).tproxy(Tproxy::default()).strict_capture(true);
    redirect.build().unwrap().plan()
}

/// Those of the recorded cases of ambient mode.
fn ambient_plans() -> Vec<RulePlan> {
    crate::recorded::ambient_cases()
        .iter()
        .map(|case| crate::recorded::ambient_redirect(case).plan())
        .collect()
}

fn every_source() -> Value {
    let mut raw = RawSettings::for_pod();
    let mut sources = vec![
        Source::Default,
        Source::CommandLine,
        Source::Namespace,
        Source::Configuration("strict_capture"),
        Source::ProxyField("securityContext.runAsUser"),
    ];
    for setting in Setting::ALL {
        let of_setting = setting.annotations.iter().copied().map(Source::Annotation);
        let of_setting = of_setting.chain(setting.proxy_env.map(Source::ProxyEnvironment));
        let source = of_setting.last().or_else(|| sources.pop()).unwrap_or(Source::Default);
        raw.set(setting.key, "x", source);
    }
    assert!(sources.is_empty(), "{sources:?}");
    settings_document(&raw)
}

/// What a document says of a rule, in the words of iptables.
fn in_words(rule: &Value) -> String {
    let conditions = rule["conditions"].as_array().unwrap();
    let protocol = conditions.iter().find_map(|condition| condition["protocol"].as_str());
    let mut words: Vec<String> = Vec::new();
    for condition in conditions {
        let text = |field: &str| condition[field].as_str().unwrap().to_owned();
        let list = |field: &str| {
            let items = condition[field].as_array().unwrap().iter();
            items.map(|item| item.as_str().unwrap()).collect::<Vec<_>>().join(",")
        };
        let number = |field: &str| condition[field].as_u64().unwrap();
        let (module, option) = match condition["match"].as_str().unwrap() {
            "source" => (None, format!("-s {}", text("range"))),
            "destination" => (None, format!("-d {}", text("range"))),
            "inInterface" => (None, format!("-i {}", text("interface"))),
            "outInterface" => (None, format!("-o {}", text("interface"))),
            "protocol" => (None, format!("-p {}", text("protocol"))),
            "sourcePort" => (protocol, format!("--sport {}", text("port"))),
            "destinationPort" => (protocol, format!("--dport {}", text("port"))),
            "destinationPorts" => (Some("multiport"), format!("--dports {}", list("ports"))),
            "tcpFlags" => (Some("tcp"), format!("--tcp-flags {} {}", list("mask"), list("set"))),
            "connectionTracking" => {
                let state = match text("state").as_str() {
                    "relatedOrEstablished" => "RELATED,ESTABLISHED".to_owned(),
                    other => other.to_uppercase(),
                };
                let direction = condition.get("direction").map(|way| way.as_str().unwrap().to_uppercase());
                let direction = direction.map(|way| format!(" --ctdir {way}")).unwrap_or_default();
                (Some("conntrack"), format!("--ctstate {state}{direction}"))
            }
            "ownerUid" => (Some("owner"), format!("--uid-owner {}", number("uid"))),
            "ownerGid" => (Some("owner"), format!("--gid-owner {}", number("gid"))),
            "mark" => {
                let mask = condition.get("mask").and_then(Value::as_u64);
                let mask = mask.map(|mask| format!("/{mask:#x}")).unwrap_or_default();
                (Some("mark"), format!("--mark {:#x}{mask}", number("mark")))
            }
            "connectionMark" => {
                (Some("connmark"), format!("--mark {:#x}/{:#x}", number("value"), number("mask")))
            }
            other => panic!("{other}"),
        };
        words.extend(module.map(|module| format!("-m {module}")));
        words.extend((condition.get("not") == Some(&json!(true))).then(|| "!".to_owned()));
        words.push(option);
    }
    let target = &rule["target"];
    let number = |field: &str| target[field].as_u64().unwrap();
    words.push(match target["action"].as_str().unwrap() {
        "jump" => format!("-j {}", target["chain"].as_str().unwrap()),
        "redirect" => format!("-j REDIRECT --to-ports {}", number("port")),
        "tproxy" => {
            format!("-j TPROXY --on-port {} --tproxy-mark {:#x}/0xffffffff", number("port"), number("mark"))
        }
        "setMark" => format!("-j MARK --set-xmark {:#x}/0xffffffff", number("mark")),
        "saveMark" => "-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned(),
        "restoreMark" => "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff".to_owned(),
        "setConnectionMark" => {
            format!("-j CONNMARK --set-xmark {:#x}/{:#x}", number("value"), number("mask"))
        }
        "conntrackZone" => format!("-j CT --zone {}", number("zone")),
        word => format!("-j {}", word.to_uppercase()),
    });
    words.join(" ")
}

fn list<'a>(document: &'a Value, name: &str) -> &'a [Value] {
    document[name].as_array().unwrap()
}

/// A rule in the words of iptables-save, from any that iptables takes.
fn as_saved(words: &str) -> String {
    let state = IptablesTables::saved(&format!("*mangle\n-A OUTPUT {words}\n")).unwrap();
    let [entry] = state.rules(Table::Mangle, &Hook::Output.into()) else { panic!("{words}") };
    entry.understood().unwrap_or_else(|| panic!("{words}")).text()
}

/// Documents of a plan in force that was damaged in every way that a kernel in memory can be.
fn differences() -> Vec<Value> {
    let plan = strict_plan();
    let mut documents = Vec::new();
    for place in [RulesIn::Iptables(Variant::Nft), RulesIn::Native(NativeForm::Plain)] {
        let document = |kernel: &Kernel| {
            let found = Differences::between(&kernel.observe(), &plan, place);
            let written = valid(&found, &DIFFERENCES_SCHEMA);
            assert_eq!(written["differences"].as_array().unwrap().len(), found.len());
            written
        };
        documents.push(document(&Kernel::new()));
        let mut whole = Kernel::new();
        whole.run(&Goal::new(&plan, place)).unwrap();
        assert_eq!(document(&whole)["differences"], json!([]));
        documents.extend(damaged(&whole).iter().map(document));
    }
    documents.extend(native_differences());
    documents
}

/// What becomes of native tables in a real kernel only.
fn native_differences() -> Vec<Value> {
    use NativeDifferenceKind::{Dormancy, Hook, MissingChain, MissingTable, StrayChain, StrayTable};
    let chain = || Some("istio-output".to_owned());
    let all = [
        (None, MissingTable),
        (None, StrayTable),
        (None, Dormancy),
        (chain(), MissingChain),
        (chain(), StrayChain),
        (chain(), Hook),
    ];
    let document = |(chain, kind)| {
        let difference = Difference::Native(NativeDifference { table: "istio-proxy-nat", chain, kind });
        valid(&difference, &DIFFERENCE_SCHEMA)
    };
    all.map(document).into()
}

fn damaged(whole: &Kernel) -> Vec<Kernel> {
    let (output, chain) = (Chain::Hook(Hook::Output), Chain::Ours(OurChain::Output));
    let theirs = || Entry::saved("-p tcp -m comment --comment \"x\" -j ACCEPT");
    let changed = |change: &dyn Fn(&mut Kernel)| {
        let mut kernel = whole.clone();
        change(&mut kernel);
        kernel
    };
    let tables = |kernel: &mut Kernel, change: &dyn Fn(&mut Tables)| {
        change(kernel.tables_mut(Variant::Nft, Family::V4));
    };
    vec![
        changed(&Kernel::lose_routing),
        changed(&|kernel| {
            let mut broken: Vec<FoundRouting> = kernel.routing().to_vec();
            broken.iter_mut().for_each(|found| found.flaw = Some("it leads to another table".to_owned()));
            kernel.lose_routing();
            broken.into_iter().for_each(|found| kernel.insert_routing(found));
        }),
        changed(&|kernel| tables(kernel, &|tables| *tables = without_chain(&tables.observe(), &chain))),
        changed(&|kernel| tables(kernel, &|tables| drop(tables.delete(Table::Nat, &output, 1)))),
        changed(&|kernel| {
            tables(kernel, &|tables| tables.insert(Table::Nat, Chain::named("ISTIO_OLDER"), 1, theirs()));
        }),
        changed(&|kernel| tables(kernel, &|tables| tables.insert(Table::Nat, chain.clone(), 1000, theirs()))),
        changed(&|kernel| tables(kernel, &|tables| tables.insert(Table::Nat, chain.clone(), 1, theirs()))),
        changed(&|kernel| {
            kernel.delete_native_rule(Table::Nat, &chain, 1);
        }),
    ]
}

/// The same rules, but for one chain.
fn without_chain(from: &IptablesTables, chain: &Chain) -> Tables {
    let mut state = IptablesTables::new();
    for table in Table::ALL.iter().copied() {
        for (other, rules) in from.chains(table).filter(|(other, _)| *other != chain) {
            *state.declare(table, other.clone()) = rules.to_vec();
        }
    }
    Tables::holding(&state)
}

/// Properties whose value is one of a closed set of words, with the words that occur.
fn words(value: &Value, found: &mut BTreeSet<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if let Value::String(word) = value {
                    found.insert((name.clone(), word.clone()));
                }
                words(value, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| words(item, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The same of the schema.
fn words_of_schema(value: &Value, found: &mut BTreeSet<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (name, property) in fields.get("properties").and_then(Value::as_object).into_iter().flatten()
            {
                let listed = property.get("enum").and_then(Value::as_array).into_iter().flatten();
                let all = listed.chain(property.get("const")).filter_map(Value::as_str);
                found.extend(all.map(|word| (name.clone(), word.to_owned())));
            }
            fields.values().for_each(|field| words_of_schema(field, found));
        }
        Value::Array(items) => items.iter().for_each(|item| words_of_schema(item, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// What nothing here makes: rules of this form are only read.
const ONLY_READ: [(&str, &str); 1] = [("direction", "original")];

#[test]
fn every_recorded_case_is_what_the_schema_says_and_the_schema_says_no_more() {
    let (mut written, mut described) = (BTreeSet::new(), BTreeSet::new());
    documents().iter().for_each(|document| words(document, &mut written));
    words_of_schema(&SCHEMA, &mut described);
    let unused: Vec<(&str, &str)> =
        described.difference(&written).map(|(name, word)| (name.as_str(), word.as_str())).collect();
    assert_eq!(unused, ONLY_READ);
}

#[test]
fn conditions_and_targets_say_what_the_text_of_a_rule_says() {
    let cases = fixtures("rules.json");
    let recorded = cases.as_array().unwrap().iter().filter_map(crate::recorded::redirect);
    let plans = recorded.map(|(_, redirect)| redirect.plan()).chain([strict_plan()]).chain(ambient_plans());
    let mut kinds = BTreeSet::new();
    for plan in plans {
        let document = serde_json::to_value(&plan).unwrap();
        let tables = list(&document, "families").iter().flat_map(|family| list(family, "tables"));
        let chains = tables.flat_map(|table| list(table, "chains"));
        for rule in chains.flat_map(|chain| list(chain, "rules")) {
            assert_eq!(as_saved(&in_words(rule)), rule["text"]);
            words(rule, &mut kinds);
        }
    }
    let kinds = |name: &str| kinds.iter().filter(|(kind, _)| kind == name).count();
    assert_eq!((kinds("match"), kinds("action")), (14, 11));
}

#[test]
fn the_schema_refuses_what_it_does_not_describe() {
    let plan = plan_document(&strict_plan());
    for (pointer, value) in [
        ("/version", json!(2)),
        ("/families/0/tables/0/table", json!("filter")),
        ("/families/0/tables/0/chains/0/rules/0/target", json!({"action": "reject"})),
        ("/families/0/tables/0/chains/0/rules/0/conditions/0/not", json!(false)),
        ("/families/0/tables/0/chains/0/rules/0/source", json!({"kind": "flag"})),
    ] {
        let mut wrong = plan.clone();
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        let parent = if parent.is_empty() { &mut wrong } else { wrong.pointer_mut(parent).unwrap() };
        parent[name] = value;
        assert!(!PLAN_SCHEMA.is_valid(&wrong), "{pointer}");
    }
    let mut wrong = plan;
    wrong["unknown"] = json!(1);
    assert!(!PLAN_SCHEMA.is_valid(&wrong));
}

#[test]
fn settings_that_are_none_are_refused() {
    let read = |text: Value| {
        serde_json::from_value::<RawSettings>(text).map(drop).map_err(|error| error.to_string())
    };
    let said = |name: &str, source: Value| json!({"version": 1, "settings": {name: {"value": "1", "source": source}}});
    assert_eq!(read(json!({"version": 1, "settings": {}})), Ok(()));
    assert_eq!(
        read(json!({"version": 2, "settings": {}})),
        Err("version 2 of the schema is not known; this release reads version 1".to_owned())
    );
    assert_eq!(
        read(said("envoy-prot", json!({"kind": "default"}))),
        Err("\"envoy-prot\" is not a setting".to_owned())
    );
    assert_eq!(
        read(said("envoy-port", json!({"kind": "flag", "name": "proxy-uid"}))),
        Err("envoy-port: no setting is read from \"proxy-uid\"".to_owned())
    );
    assert_eq!(
        read(said("envoy-port", json!({"kind": "flga", "name": "envoy-port"}))),
        Err("envoy-port: no setting is read from \"envoy-port\"".to_owned())
    );
    assert!(read(json!({"version": 1, "setings": {}})).is_err());
    let mut raw = RawSettings::new();
    raw.refuse(Source::Flag("unheard-of"), "1", Problem::NotANumber);
    assert!(serde_json::to_value(&raw).is_err());
}

/// Whatever setting makes two redirections different, their documents are.
#[test]
fn a_document_holds_every_setting() {
    let mut runner = TestRunner::deterministic();
    let mut make = || settings().new_tree(&mut runner).unwrap().current();
    // Who is looked up by name is told as an id.
    let plan =
        Setting::ALL.iter().filter(|setting| setting.part == Part::Plan && setting.key != Key::ProxyUser);
    for key in plan.map(|setting| setting.key) {
        let mut different = 0;
        for _ in 0..300 {
            let (one, other) = (make(), make());
            let mut two = one.clone();
            two.said.retain(|(said, _)| *said != key);
            two.said.extend(other.said.into_iter().filter(|(said, _)| *said == key));
            let (one, two) = (one.redirect(), two.redirect());
            let same = serde_json::to_value(&one).unwrap() == serde_json::to_value(&two).unwrap();
            assert_eq!(same, one == two, "{key:?}: {one:?} and {two:?}");
            different += usize::from(!same);
        }
        assert!(different > 0, "no two values of {key:?} make a difference");
    }
}

#[test]
fn every_setting_has_a_name_of_its_own() {
    let names: BTreeSet<&str> = Setting::ALL.iter().map(|setting| setting.key.json_name()).collect();
    assert!(!names.contains(""));
    assert_eq!(names.len(), Setting::ALL.len());
}

proptest! {
    #[test]
    fn any_settings_come_back_and_any_plan_is_what_the_schema_says(settings in settings()) {
        let mut raw = if settings.pod { RawSettings::for_pod() } else { RawSettings::new() };
        settings.said.iter().for_each(|(key, text)| raw.set(*key, text.clone(), Source::Default));
        settings_document(&raw);
        let redirect = settings.redirect();
        let plan = redirect.plan();
        plan_document(&plan);
        valid(&Decision::Redirect(Box::new(redirect)), &DECISION_SCHEMA);
    }

    #[test]
    fn a_family_has_its_rules_in_their_order(settings in settings()) {
        let plan = settings.plan();
        let document = serde_json::to_value(&plan).unwrap();
        let families = list(&document, "families");
        prop_assert_eq!(families.len(), plan.families().len());
        for (family, listed) in plan.families().iter().zip(families) {
            prop_assert_eq!(&listed["family"], &family.to_string());
            let rules = plan.rules(*family);
            let mut count = 0;
            for table in list(listed, "tables") {
                for chain in list(table, "chains") {
                    let table = Table::named(table["table"].as_str().unwrap()).unwrap();
                    let name = Chain::named(chain["chain"].as_str().unwrap());
                    let written = list(chain, "rules");
                    let wanted: Vec<String> = rules.rules(table, &name).iter().map(Rule::text).collect();
                    count += wanted.len();
                    prop_assert_eq!(written.iter().map(|rule| rule["text"].clone()).collect::<Vec<_>>(), wanted);
                    let is_first = |rule: &&Value| rule.get("beforeOthers").is_some();
                    let leading = written.iter().filter(is_first).count();
                    prop_assert_eq!(written.iter().take_while(is_first).count(), leading);
                    prop_assert_eq!(leading, rules.leading(table, &name));
                }
            }
            let all = Table::ALL.iter().flat_map(|table| rules.chains(*table));
            prop_assert_eq!(all.map(|(_, rules)| rules.len()).sum::<usize>(), count);
        }
    }
}
