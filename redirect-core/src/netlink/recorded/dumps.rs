//! What the dumps in `tests/dumps` are dumps of, for the tests that read them and for the one that takes them again
//! (`netns-apply/tests/dumps.rs`).

use super::{
    Family, Key, Messages, NamespaceFacts, NativeForm, RawSettings, Redirect, RulePlan, Ruleset, Source,
};
use std::{env, fmt::Write as _, format, fs, path::PathBuf, string::String, vec::Vec};

/// Rules that nft and iptables made of `others.nft` and of the `others*.iptables`.
pub const OF_OTHERS: &str = "others";

/// Native tables of the mesh with things of another program in them: what nft made of `extended.nft`.
pub const EXTENDED: &str = "extended";

/// Tables that hang on interfaces: what nft made of `devices.nft`.
pub const ON_DEVICES: &str = "devices";

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

/// The dump of what iptables-nft made of a plan.
pub fn of_iptables(plan: &str) -> String {
    format!("{plan}-iptables")
}

/// The dump of a plan's native table.
pub fn of_native(plan: &str, form: NativeForm) -> String {
    format!("{plan}-{form:?}").to_lowercase()
}

/// The input with which nft makes a plan's native tables.
pub fn script(plan: &str) -> String {
    format!("{plan}.nft")
}

/// What iptables-legacy-save prints of the other programs' rules, or of a plan's.
pub fn saved(what: &str, family: Family) -> String {
    format!("{what}-{family:?}.saved").to_lowercase()
}

/// What a text says is what is recorded. With `UPDATE_DUMPS=1` it is what is recorded from now on.
pub fn assert_recorded(name: &str, text: &str) {
    let file = file(name);
    if env::var_os("UPDATE_DUMPS").is_some() {
        fs::write(&file, text).unwrap();
    }
    let recorded = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let lines = text.lines().zip(recorded.lines());
    let differing: Vec<_> = lines.filter(|(now, then)| now != then).take(20).collect();
    assert!(
        text == recorded,
        "{name} is recorded otherwise; UPDATE_DUMPS=1 records what is true now, for the review (now, then): {differing:#?}"
    );
}

/// Where a file of the folder lies.
pub fn file(name: &str) -> PathBuf {
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    package.with_file_name("redirect-core").join("tests/dumps").join(name)
}

/// Where a dump lies.
pub fn dump_file(name: &str) -> PathBuf {
    file(&format!("{name}.dump"))
}

/// A dump, as the kernel gave it.
pub fn dump(name: &str) -> Vec<u8> {
    let file = dump_file(name);
    fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// The tables in a dump.
pub fn dumped(dump: &[u8]) -> Ruleset {
    let mut ruleset = Ruleset::default();
    Messages::new(dump).for_each(|message| ruleset.take(&message));
    ruleset
}

/// What is seen of tables, chains and rules.
pub fn seen(ruleset: &Ruleset) -> String {
    let mut text = String::new();
    for (name, table) in &ruleset.tables {
        writeln!(text, "table {name}{}", if table.dormant { " (dormant)" } else { "" }).unwrap();
        for (name, chain) in &table.chains {
            let base = chain.base.map(|base| format!(" {base:?}")).unwrap_or_default();
            let device = chain.device.as_ref().map(|device| format!(" {device:?}")).unwrap_or_default();
            writeln!(text, "chain {name}{base}{device}").unwrap();
            for rule in &chain.rules {
                writeln!(text, "\t{rule}").unwrap();
            }
        }
    }
    text
}
