//! The outcome of every setting with texts of every kind, from a flag and from an annotation: `tests/dumps/settings.told`. With `UPDATE_DUMPS=1` it is written
//! again, and what changes is for the review.

use super::{Key, NamespaceFacts, RawSettings, Setting, Source};
use crate::{Family, Redirect, recorded::assert_recorded};
use std::{collections::BTreeMap, fmt::Write as _, format, net::IpAddr, string::String, vec::Vec};

const TEXTS: [&str; 44] = [
    "",
    " ",
    "*",
    "**",
    "*,80",
    "true",
    "FALSE",
    "1",
    "yes",
    "-1",
    "0",
    "80",
    " 80 ",
    "80,443",
    "80,,443",
    "80:90",
    "80-90",
    "90:80",
    "1:65535",
    "0:7",
    "65535",
    "65536",
    "4294967295",
    "4294967296",
    "0x539",
    "0xfffffffff",
    "10.0.0.0/8",
    "10.0.0.1/8",
    "10.0.0.1",
    "10.0.0.0/33",
    "fd00::/8",
    "::1",
    "fd00::/129",
    "10.0.0.0/8,fd00::/8,*",
    "eth0",
    "eth0,tap+",
    "an-interface-that-is-long",
    "eth 0",
    "redirect",
    "TPROXY",
    "NONE",
    "$(reboot)",
    "-j ACCEPT",
    "\u{fc}\n",
];

fn outcome(key: Key, text: &'static str, source: Source) -> String {
    let mut raw = RawSettings::new();
    raw.set(Key::InboundPorts, "*", Source::Flag("test"));
    raw.set(Key::OutboundRanges, "*", Source::Flag("test"));
    raw.set(key, text, source);
    let addresses: [IpAddr; 2] = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    match Redirect::parse(&raw, &NamespaceFacts::new(&addresses)) {
        Err(errors) => format!("{errors}"),
        Ok(redirect) => {
            let plan = redirect.plan();
            let rules = Family::BOTH.map(|family| {
                let chains = plan.explained_rules(family);
                chains.values().flat_map(|chains| chains.values()).map(Vec::len).sum::<usize>()
            });
            format!("ok, {} and {} rules", rules[0], rules[1])
        }
    }
}

#[test]
fn every_text_of_every_setting_is_taken_or_refused_as_recorded() {
    let mut text = String::new();
    for setting in Setting::ALL {
        writeln!(text, "{}", setting.name()).unwrap();
        // What is reported, and of which texts.
        let mut outcomes: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for given in TEXTS {
            for source in [Source::Flag("f"), Source::Annotation("a")] {
                let (words, quoted) = (outcome(setting.key, given, source), format!("{given:?}"));
                outcomes.entry(words.replace(&quoted, "_")).or_default().push(quoted);
            }
        }
        for (words, texts) in outcomes {
            writeln!(text, "\t{words}\n\t\t{}", texts.join(" ")).unwrap();
        }
    }
    assert_recorded("settings.told", &text);
}
