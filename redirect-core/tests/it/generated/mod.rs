//! Settings valid by construction, and the redirections they ask for.

#![allow(clippy::unwrap_used, dead_code)] // a panic is how a test fails; not every test uses everything

pub mod typed;

use proptest::{collection::vec, option, prelude::*, sample::select};
use redirect_core::{
    Redirect, RulePlan,
    settings::{Key, NamespaceFacts, Part, RawSettings, Setting, SettingKind, Source, Star},
};
use std::net::IpAddr;

/// What somebody says, valid by construction, and where.
#[derive(Debug, Clone)]
pub struct Settings {
    pub said: Vec<(Key, String)>,
    pub pod: bool,
    pub addresses: Vec<IpAddr>,
    pub nameservers: Vec<IpAddr>,
}

impl Settings {
    pub fn redirect(&self) -> Redirect {
        self.redirect_said_as(self.said.iter().map(|(key, text)| (*key, text.as_str(), Source::Default)))
    }

    pub fn redirect_said_as<'a>(&self, said: impl Iterator<Item = (Key, &'a str, Source)>) -> Redirect {
        let mut raw = if self.pod { RawSettings::for_pod() } else { RawSettings::new() };
        said.for_each(|(key, text, source)| raw.set(key, text.to_owned(), source));
        Redirect::parse(&raw, &self.facts()).unwrap()
    }

    pub fn plan(&self) -> RulePlan {
        self.redirect().plan()
    }

    pub fn facts(&self) -> NamespaceFacts<'_> {
        NamespaceFacts::new(&self.addresses).with_nameservers(&self.nameservers)
    }
}

pub fn settings() -> impl Strategy<Value = Settings> {
    let addresses = select(vec![
        vec!["10.1.0.2"],
        vec!["fd00:10::2"],
        vec!["127.0.0.1", "10.1.0.2", "::1", "fd00:10::2"],
        vec!["fe80::1", "fd00:10::2", "10.1.0.2"],
    ]);
    let nameservers = vec(select(vec!["10.96.0.10", "1.1.1.1", "127.0.0.53", "fd00:96::a", "::1"]), 0..4);
    (said(), any::<bool>(), addresses, nameservers).prop_map(|(said, pod, addresses, nameservers)| Settings {
        said,
        pod,
        addresses: addresses.into_iter().map(|text| text.parse().unwrap()).collect(),
        nameservers: nameservers.into_iter().map(|text| text.parse().unwrap()).collect(),
    })
}

/// A value, or none, for each setting that a plan depends on.
fn said() -> impl Strategy<Value = Vec<(Key, String)>> {
    let of_a_plan = Setting::ALL.iter().filter(|setting| setting.part == Part::Plan);
    let said: Vec<BoxedStrategy<Option<(Key, String)>>> = of_a_plan
        .map(|setting| {
            let key = setting.key;
            option::of(text(setting).prop_map(move |text| (key, text))).boxed()
        })
        .collect();
    said.prop_map(|said| said.into_iter().flatten().collect())
}

/// Valid values of a setting, by its kind: a new setting of a known kind is covered without a word here.
fn text(setting: &Setting) -> BoxedStrategy<String> {
    let values = match setting.kind {
        SettingKind::Address => "169\\.254\\.[0-9]{1,2}\\.7".boxed(),
        SettingKind::Bool => any::<bool>().prop_map(|on| on.to_string()).boxed(),
        // TPROXY has the most rules.
        SettingKind::Choice(words) => {
            select([words, &words[words.len() - 1..]].concat()).prop_map(str::to_owned).boxed()
        }
        SettingKind::Duration => (1_u32..10_000).prop_map(|ms| format!("{ms}ms")).boxed(),
        SettingKind::Groups => list(id(), 0..6).boxed(),
        SettingKind::Ids => list(id(), 1..4).boxed(),
        SettingKind::Interfaces => list(interface(), 0..3).boxed(),
        SettingKind::LoopbackRange => (8_u8..=32).prop_map(|bits| format!("127.0.0.1/{bits}")).boxed(),
        SettingKind::Mark => (1_u32..0x1_0000)
            .prop_filter("the proxy's", |mark| *mark != 1338)
            .prop_map(|mark| mark.to_string())
            .boxed(),
        SettingKind::Name => select(vec!["istio-proxy", "somebody"]).prop_map(str::to_owned).boxed(),
        SettingKind::Path => "/[a-z]{1,8}".boxed(),
        SettingKind::Port => port(setting.key),
        SettingKind::Ports => ports().boxed(),
        SettingKind::Ranges => list(cidr(), 0..6).boxed(),
        SettingKind::RouteTable => (1_u32..253).prop_map(|table| table.to_string()).boxed(),
    };
    if setting.star == Star::Everything {
        prop_oneof![1 => Just("*".to_owned()), 2 => values].boxed()
    } else {
        values
    }
}

/// A port that no other setting gets, and that is not a default: each listener has its own.
fn port(key: Key) -> BoxedStrategy<String> {
    let place = Key::ALL.iter().position(|one| *one == key).unwrap();
    assert!(place < 16, "more settings than classes of ports");
    let port = (1_usize..4096).prop_map(move |number| number * 16 + place);
    port.prop_filter("a default", |port| !(15000..15100).contains(port))
        .prop_map(|port| port.to_string())
        .boxed()
}

fn list(of: impl Strategy<Value = String>, length: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    vec(of, length).prop_map(|items| items.join(","))
}

fn ports() -> impl Strategy<Value = String> {
    let range = (any::<u16>(), any::<u16>()).prop_map(|(a, b)| format!("{}:{}", a.min(b), a.max(b)));
    list(prop_oneof![any::<u16>().prop_map(|port| port.to_string()), range], 0..5)
}

fn id() -> impl Strategy<Value = String> {
    prop_oneof![0_u32..3000, 0..u32::MAX].prop_map(|id| id.to_string())
}

fn interface() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9_.-]{0,12}\\+?"
}

fn cidr() -> impl Strategy<Value = String> {
    let v4 =
        (any::<[u8; 4]>(), 0_u8..=32).prop_map(|(bytes, bits)| format!("{}/{bits}", IpAddr::from(bytes)));
    let v6 =
        (any::<[u8; 16]>(), 0_u8..=128).prop_map(|(bytes, bits)| format!("{}/{bits}", IpAddr::from(bytes)));
    let loopback = select(vec!["127.0.0.1/32", "127.0.0.0/8", "::1/128", "0.0.0.0/0", "::/0"]);
    prop_oneof![4 => v4, 4 => v6, 1 => loopback.prop_map(str::to_owned)]
}
