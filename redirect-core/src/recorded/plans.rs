//! Plans that tests record what comes of, and what is recorded. The other crates' tests read it, too.

use super::{Key, NamespaceFacts, RawSettings, Redirect, RulePlan, Source};
use std::{env, fs, path::Path, vec::Vec};

/// Plans that have every kind of rule between them, by the name of their dumps.
pub fn plans() -> [(&'static str, RulePlan); 3] {
    let common = [
        (Key::OutboundRanges, "*"),
        (Key::RedirectDns, "true"),
        (Key::CaptureAllDns, "true"),
        (Key::DropInvalid, "true"),
        (Key::DualStack, "true"),
        (Key::VirtualInterfaces, "eth1,tap+"),
        (Key::ExcludeInterfaces, "eth8"),
        (Key::OutboundExcludePorts, "1,2,3:5"),
        (Key::OutboundExcludeRanges, "10.0.0.0/8,172.16.0.0/12,192.168.0.0/17,fd00::/33"),
        (Key::OwnerGroupsExclude, "5,6"),
    ];
    let redirect = [(Key::InboundPorts, "80,443,8000:8080,9090"), (Key::OutboundPorts, "25")];
    let tproxy = [
        (Key::InterceptionMode, "TPROXY"),
        (Key::InboundPorts, "*"),
        (Key::InboundExcludePorts, "22,15090,100:200"),
    ];
    let strict = tproxy.iter().chain(&[(Key::StrictCapture, "true")]);
    [
        ("redirect", plan(common.iter().chain(&redirect))),
        ("tproxy", plan(common.iter().chain(&tproxy))),
        ("strict", plan(common.iter().chain(strict))),
    ]
}

fn plan<'a>(settings: impl Iterator<Item = &'a (Key, &'static str)>) -> RulePlan {
    let mut raw = RawSettings::new();
    for (key, text) in settings {
        raw.set(*key, *text, Source::Flag("test"));
    }
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    let nameservers = ["10.96.0.10".parse().unwrap(), "fd00:96::a".parse().unwrap()];
    Redirect::parse(&raw, &NamespaceFacts::new(&addresses).with_nameservers(&nameservers)).unwrap().plan()
}

/// What a text says is what is recorded in a file. With `UPDATE_DUMPS=1` it is what is recorded from now on.
pub fn assert_recorded(file: &Path, text: &str) {
    let name = file.display();
    if env::var_os("UPDATE_DUMPS").is_some() {
        fs::write(file, text).unwrap();
    }
    let recorded = fs::read_to_string(file).unwrap_or_else(|error| panic!("{name}: {error}"));
    let lines = text.lines().zip(recorded.lines());
    let differing: Vec<_> = lines.filter(|(now, then)| now != then).take(20).collect();
    assert!(
        text == recorded,
        "{name} is recorded otherwise; UPDATE_DUMPS=1 records what is true now, for the review (now, then): {differing:#?}"
    );
}
