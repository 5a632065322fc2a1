//! Settings valid by construction, and the redirections they ask for.

#![allow(clippy::unwrap_used, dead_code)] // a panic is how a test fails; not every test uses everything

use proptest::{collection::vec, option, prelude::*, sample::select};
use redirect_core::{
    Redirect, RulePlan,
    settings::{Key, NamespaceFacts, RawSettings, Source},
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
        NamespaceFacts { nameservers: &self.nameservers, ..NamespaceFacts::new(&self.addresses) }
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
    let said: Vec<BoxedStrategy<Option<(Key, String)>>> = vec![
        say(Key::ProxyPort, port()),
        say(Key::InboundCapturePort, port()),
        say(Key::InboundTunnelPort, port()),
        say(Key::ProxyUid, list(id(), 1..4)),
        say(Key::ProxyGid, list(id(), 0..4)),
        say(Key::InterceptionMode, select(vec!["REDIRECT", "TPROXY", "TPROXY"]).prop_map(str::to_owned)),
        say(Key::InboundPorts, star_or(ports())),
        say(Key::InboundExcludePorts, ports()),
        say(Key::ExcludeInterfaces, list(interface(), 0..3)),
        say(Key::OutboundRanges, star_or(list(cidr(), 0..6))),
        say(Key::OutboundExcludeRanges, list(cidr(), 0..6)),
        say(Key::OutboundPorts, ports()),
        say(Key::OutboundExcludePorts, ports()),
        say(Key::VirtualInterfaces, list(interface(), 0..3)),
        say(Key::TproxyMark, (1_u32..1338).prop_map(|mark| mark.to_string())),
        say(Key::TproxyRouteTable, (1_u32..253).prop_map(|table| table.to_string())),
        say(Key::RedirectDns, switch()),
        say(Key::CaptureAllDns, switch()),
        say(Key::DropInvalid, switch()),
        say(Key::StrictCapture, switch()),
        say(Key::DualStack, switch()),
        say(Key::OwnerGroups, star_or(list(id(), 0..6))),
        say(Key::OwnerGroupsExclude, list(id(), 0..4)),
        say(Key::LoopbackRange, (8_u8..=32).prop_map(|bits| format!("127.0.0.1/{bits}"))),
    ];
    said.prop_map(|said| said.into_iter().flatten().collect())
}

fn say(key: Key, text: impl Strategy<Value = String> + 'static) -> BoxedStrategy<Option<(Key, String)>> {
    option::of(text.prop_map(move |text| (key, text))).boxed()
}

fn list(of: impl Strategy<Value = String>, length: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    vec(of, length).prop_map(|items| items.join(","))
}

fn star_or(other: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    prop_oneof![1 => Just("*".to_owned()), 2 => other]
}

fn switch() -> impl Strategy<Value = String> {
    any::<bool>().prop_map(|on| on.to_string())
}

fn port() -> impl Strategy<Value = String> {
    (1_u16..).prop_map(|port| port.to_string())
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
