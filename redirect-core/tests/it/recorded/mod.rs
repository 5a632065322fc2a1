//! What was recorded of the reference, as plans of ours. The tests of netns-apply read it, too.

#![allow(clippy::unwrap_used, dead_code)] // a panic is how a test fails; not every test uses everything

use redirect_core::{
    AmbientRedirect, Redirect, RulePlan,
    settings::{Key, NameLookup, NamespaceFacts, RawSettings, Setting, SettingKind, Source},
};
use serde_json::Value;
use std::{collections::BTreeMap, net::IpAddr, path::Path};

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

/// A file of the recordings, from whichever package asks.
pub fn fixtures(file: &str) -> Value {
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let fixtures = folders.map(|folder| folder.join("e2e/fixtures")).find(|folder| folder.is_dir());
    serde_json::from_str(&std::fs::read_to_string(fixtures.unwrap().join(file)).unwrap()).unwrap()
}

/// A list of texts; none where there is no list.
pub fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// Reads a command line by the table, as simply as possible; `None` for one that is no use of the table.
fn flags(args: &[String], raw: &mut RawSettings) -> Option<()> {
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let by_name = |setting: &&Setting| match (arg.strip_prefix("--"), setting.flag, setting.short) {
            (Some(long), Some(flag), _) => long == flag,
            (Some(_), None, _) => false,
            (None, _, short) => short.is_some_and(|short| *arg == format!("-{short}")),
        };
        let setting = Setting::ALL.iter().find(by_name)?;
        let text = if setting.kind == SettingKind::Bool { "true".to_owned() } else { args.next()?.clone() };
        raw.set(setting.key, text, Source::Flag(setting.flag.unwrap()));
    }
    Some(())
}

/// The plan of what was recorded; none where its input is wrong.
pub fn plan(case: &Value) -> Option<RulePlan> {
    redirect(case).map(|(_, redirect)| redirect.plan())
}

/// The settings that were recorded, and the redirection they ask for; none where they are wrong.
pub fn redirect(case: &Value) -> Option<(RawSettings, Redirect)> {
    let mut raw = RawSettings::new();
    let env: BTreeMap<String, String> = serde_json::from_value(case["env"].clone()).unwrap_or_default();
    raw.read_environment(|_| true, |name| env.get(name).cloned());
    flags(&strings(&case["args"]), &mut raw)?;
    let families = case["families"].as_str().unwrap_or("46");
    let mut addresses: Vec<IpAddr> = vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()];
    addresses.extend(families.contains('4').then(|| "10.1.0.2".parse::<IpAddr>().unwrap()));
    addresses.extend(families.contains('6').then(|| "fd00:10::2".parse::<IpAddr>().unwrap()));
    let nameservers: Vec<IpAddr> = match case.get("nameservers") {
        Some(list) if !list.is_null() => strings(list).iter().map(|text| text.parse().unwrap()).collect(),
        _ => vec!["10.96.0.10".parse().unwrap()],
    };
    let facts = NamespaceFacts::new(&addresses).with_nameservers(&nameservers).with_names(&Recorded);
    Redirect::parse(&raw, &facts).ok().map(|redirect| (raw, redirect))
}

/// What was recorded of ambient mode.
pub fn ambient_cases() -> Vec<Value> {
    fixtures("ambient.json")["cases"].as_array().unwrap().clone()
}

/// The redirection that a recorded case of ambient mode asks for.
pub fn ambient_redirect(case: &Value) -> AmbientRedirect {
    let asked = &case["in"];
    let mut raw = RawSettings::new();
    for (key, flag, name) in [
        (Key::AmbientIpv6, "ipv6", "ipv6"),
        (Key::AmbientDnsCapture, "redirect-dns", "dns_global"),
        (Key::AmbientDnsOverride, "dns-proxy", "dns_pod"),
        (Key::AmbientIngress, "ingress", "ingress"),
    ] {
        if let Some(is_on) = asked[name].as_bool() {
            raw.set(key, is_on.to_string(), Source::Flag(flag));
        }
    }
    let interfaces = strings(&asked["virtual_interfaces"]).join(",");
    raw.set(Key::AmbientVirtualInterfaces, interfaces, Source::Flag("virtual-interfaces"));
    AmbientRedirect::parse(&raw).unwrap()
}
