//! Plans as `redirectctl plan` writes them, from the command lines and environments that were recorded of the reference.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::IpAddr;

use netfilter_state::state::IptablesTables;
use redirect_core::options::NativeForm;
use redirect_core::settings::{NameLookup, NamespaceFacts};
use redirect_core::{AmbientRedirect, Families, Family, Redirect, RulePlan};
use redirectctl::commands::COMMANDS;
use redirectctl::picture::of_trace;
use redirectctl::plan::{PlanLanguage, written};
use redirectctl::text_writer::TextLayout;
use serde::de::DeserializeOwned;
use serde_json::Value;
use settings_cli::LineRequest;
use test_support::project;

/// The users and groups of the machine the recordings were made on, as far as they matter.
struct Recorded;

impl NameLookup for Recorded {
    fn user(&self, name: &str) -> Option<u32> {
        (name == "root").then_some(0)
    }

    fn group(&self, name: &str) -> Option<u32> {
        (name == "root").then_some(0)
    }
}

fn fixture<T: DeserializeOwned>(file: &str) -> T {
    let path = project::file("e2e/fixtures").join(file);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn recorded() -> Vec<Value> {
    fixture("rules.json")
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// The plan of a recorded command line, read as the command reads it; none where it is wrong.
fn plan(case: &Value) -> Option<RulePlan> {
    let command = COMMANDS.iter().find(|command| command.name() == "plan").unwrap();
    let Ok(LineRequest::Work(line)) =
        command.line().read(strings(&case["args"]).into_iter().map(OsString::from))
    else {
        panic!("{}: is a command line", case["name"]);
    };
    let env: BTreeMap<String, String> = serde_json::from_value(case["env"].clone()).unwrap_or_default();
    let env = env.into_iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    let settings = command.program().input(&line, env).settings;
    if settings.refused().iter().next().is_some() {
        return None;
    }
    let families = case["families"].as_str().unwrap_or("46");
    let mut addresses: Vec<IpAddr> = vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()];
    addresses.extend(families.contains('4').then(|| "10.1.0.2".parse::<IpAddr>().unwrap()));
    addresses.extend(families.contains('6').then(|| "fd00:10::2".parse::<IpAddr>().unwrap()));
    let nameservers = match case.get("nameservers") {
        Some(list) if !list.is_null() => strings(list),
        _ => vec!["10.96.0.10".to_owned()],
    };
    let nameservers: Vec<IpAddr> = nameservers.iter().map(|text| text.parse().unwrap()).collect();
    let facts = NamespaceFacts::new(&addresses).with_nameservers(&nameservers).with_names(&Recorded);
    Redirect::parse(&settings, &facts).ok().map(|redirect| redirect.plan())
}

/// What restore text of both families holds.
fn read_back(text: &str) -> BTreeMap<Family, IptablesTables> {
    let mut of: BTreeMap<Family, String> = BTreeMap::new();
    let mut family = None;
    for line in text.lines() {
        match line {
            "# IPv4" => family = Some(Family::V4),
            "# IPv6" => family = Some(Family::V6),
            _ => *of.entry(family.expect("a family first")).or_default() += &format!("{line}\n"),
        }
    }
    of.into_iter().map(|(family, text)| (family, IptablesTables::saved(&text).unwrap())).collect()
}

#[test]
fn every_recorded_plan_reads_back_from_its_restore_text() {
    let mut compared = 0;
    for case in recorded() {
        let Some(plan) = plan(&case) else { continue };
        let text = written(&plan, PlanLanguage::Restore, NativeForm::Plain, TextLayout::default());
        let back = read_back(&text);
        for family in plan.families() {
            let none = IptablesTables::new();
            let back = back.get(family).unwrap_or(&none);
            assert_eq!(*back, IptablesTables::from(&plan.rules(*family)), "{}: {family}", case["name"]);
        }
        compared += 1;
    }
    assert!(compared >= 300, "{compared}");
}

#[test]
fn every_language_has_every_rule_of_every_plan() {
    for case in recorded() {
        let Some(plan) = plan(&case) else { continue };
        let name = &case["name"];
        let of = |format| written(&plan, format, NativeForm::Plain, TextLayout::default());
        let rules =
            plan.merged_rules().values().flat_map(|chains| chains.values()).map(Vec::len).sum::<usize>();
        let text = of(PlanLanguage::Text);
        assert_eq!(text.lines().filter(|line| line.starts_with("      # ")).count(), rules, "{name}: {text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{name}: {text}");
        let svg = of(PlanLanguage::Svg);
        let chains = plan.merged_rules().values().map(std::collections::BTreeMap::len).sum::<usize>();
        assert_eq!(svg.matches("<text ").count(), rules + chains, "{name}: {svg}");
        let json: serde_json::Value = serde_json::from_str(&of(PlanLanguage::Json)).unwrap();
        assert_eq!(json, serde_json::to_value(&plan).unwrap(), "{name}");
    }
}

#[test]
fn a_way_is_drawn_as_it_is_told() {
    use packet_trace::{Detail, Packet, TraceRules};
    let redirect = Redirect::sidecar(redirect_core::Families::V4).build().unwrap();
    let packet =
        Packet::from_pod(1000, 1000, "10.1.0.2:40000".parse().unwrap(), "192.0.2.1:80".parse().unwrap());
    let trace = TraceRules::of_plan(&redirect.plan(), Family::V4).trace(&packet);
    for detail in [Detail::Met, Detail::Every] {
        let lines = trace.text(detail).lines().count();
        let svg = of_trace(&trace, detail);
        assert_eq!(svg.matches("<text ").count(), lines, "{svg}");
        assert!(svg.contains("ends at: proxy, outbound listener (port 15001)"), "{svg}");
        let boxes = svg.matches("<rect x=").count();
        assert_eq!(svg.matches("marker-end").count(), boxes - 1, "{svg}");
    }
}

/// The flags of ambient mode lead to the recorded rules, and beside `--ambient` to those of no sidecar.
#[test]
fn flags_of_ambient_mode_are_read_as_recorded() {
    let recorded: Value = fixture("ambient.json");
    let mut compared = 0;
    for case in recorded["cases"].as_array().unwrap() {
        let asked = &case["in"];
        let mut words = vec!["--ambient".to_owned()];
        for (name, flag) in [
            ("ipv6", "ipv6"),
            ("dns_global", "redirect-dns"),
            ("dns_pod", "dns-proxy"),
            ("ingress", "ingress"),
        ] {
            words.extend(asked[name].as_bool().map(|is_on| format!("--{flag}={is_on}")));
        }
        let interfaces = strings(&asked["virtual_interfaces"]);
        words.extend(
            (!interfaces.is_empty()).then(|| format!("--virtual-interfaces={}", interfaces.join(","))),
        );
        for name in ["plan", "trace", "verify"] {
            let command = COMMANDS.iter().find(|command| command.name() == name).unwrap();
            let Ok(LineRequest::Work(line)) = command.line().read(words.iter().map(OsString::from)) else {
                panic!("{name} {words:?}: is a command line")
            };
            let settings = command.program().input(&line, []).settings;
            let plan = AmbientRedirect::parse(&settings).unwrap().plan();
            let is_on = |name: &str| asked[name] == true;
            let wanted = AmbientRedirect::new(if is_on("ipv6") { Families::Both } else { Families::V4 })
                .with_dns_capture(asked["dns_pod"].as_bool().unwrap_or(is_on("dns_global")))
                .with_inbound_capture(!is_on("ingress"))
                .with_virtual_interfaces(interfaces.iter().map(|name| name.parse().unwrap()));
            assert_eq!(plan.rules(Family::V4), wanted.plan().rules(Family::V4), "{name} {words:?}");
            assert_eq!(plan.rules(Family::V6), wanted.plan().rules(Family::V6), "{name} {words:?}");
            compared += 1;
        }
    }
    assert_eq!(compared, 3 * 96);
}
