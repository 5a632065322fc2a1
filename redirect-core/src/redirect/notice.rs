//! Which notices a redirection and its settings deserve.

use super::{
    fields::Redirect,
    parts::{DnsCapture, InboundPorts, OutboundRanges, OwnerGroups},
};
use crate::{
    settings::{Key, NamespaceFacts, Notice, RawSettings, Source},
    values::{Family, Port, PortRange, is_routable, parse_bool},
};
use alloc::vec::Vec;

/// What is worth saying about a redirection, the settings it was read from, and the namespace it was read for.
pub(super) fn of_settings(raw: &RawSettings, redirect: &Redirect, facts: &NamespaceFacts<'_>) -> Vec<Notice> {
    let mut notices = Vec::new();
    notices.extend(inbound_exclude(raw, redirect));
    notices.extend(owner_groups_exclude(raw, redirect));
    notices.extend(dns(raw, redirect));
    notices.extend(left_out(redirect, facts));
    notices.extend(of_redirect(redirect));
    notices
}

/// What is worth saying about a redirection, however it was made.
pub(super) fn of_redirect(redirect: &Redirect) -> impl Iterator<Item = Notice> {
    let owners =
        [(Key::ProxyUid, "user", redirect.proxy_uids()), (Key::ProxyGid, "group", redirect.proxy_gids())];
    let of_root = owners.into_iter().filter(|(_, _, ids)| ids.contains(&0));
    let of_root = of_root.map(|(key, what, _)| Notice::RootIsTheProxy { said: redirect.source(key), what });
    of_root.chain(captures_nothing(redirect).then_some(Notice::NothingCaptured))
}

/// The injector always lists the proxy's own ports; only others show intent.
fn inbound_exclude(raw: &RawSettings, redirect: &Redirect) -> Option<Notice> {
    let (text, said) = raw.get(Key::InboundExcludePorts);
    let mut listed = text.split(',').map(str::trim).filter(|port| !port.is_empty());
    let is_usual = |port: Port| Redirect::ALWAYS_EXCLUDED_INBOUND.contains(&PortRange::from(port));
    let anything = listed.any(|port| !port.parse().is_ok_and(is_usual));
    let effective = matches!(redirect.inbound(), InboundPorts::AllExcept(_));
    (said != Source::Default && anything && !effective).then(|| exclusions_without_effect(redirect))
}

/// Inbound ports are excluded where not all others are captured.
pub(super) fn exclusions_without_effect(redirect: &Redirect) -> Notice {
    let because = "it counts only where all inbound ports are captured (--istio-inbound-ports '*')";
    Notice::NoEffect { said: redirect.source(Key::InboundExcludePorts), because }
}

fn owner_groups_exclude(raw: &RawSettings, redirect: &Redirect) -> Option<Notice> {
    let (text, said) = raw.get(Key::OwnerGroupsExclude);
    let because = "ISTIO_OUTBOUND_OWNER_GROUPS lists the groups that are captured";
    let effective = matches!(redirect.owner_groups(), OwnerGroups::AllExcept(_));
    (!text.is_empty() && !effective).then_some(Notice::NoEffect { said, because })
}

fn dns(raw: &RawSettings, redirect: &Redirect) -> Option<Notice> {
    let on = |key| parse_bool(raw.get(key).0) == Ok(true);
    match (on(Key::RedirectDns), on(Key::CaptureAllDns)) {
        (true, _) if *redirect.dns() == DnsCapture::Off => {
            Some(Notice::NoDnsServer { said: raw.get(Key::RedirectDns).1 })
        }
        (false, true) => {
            let because = "DNS is captured only with --redirect-dns";
            Some(Notice::NoEffect { said: raw.get(Key::CaptureAllDns).1, because })
        }
        (true, _) | (false, false) => None,
    }
}

/// The namespace's addresses of a family that no rule is about.
fn left_out(redirect: &Redirect, facts: &NamespaceFacts<'_>) -> Option<Notice> {
    let is_covered = |family| redirect.families().contains(family);
    let mut routable = facts.addresses.iter().filter(|address| is_routable(address));
    let address = routable.find(|address| !is_covered(Family::of(address)))?;
    Some(Notice::Ipv6NotCaptured { address: *address })
}

fn captures_nothing(redirect: &Redirect) -> bool {
    let inbound = match redirect.inbound() {
        InboundPorts::None => false,
        InboundPorts::AllExcept(except) => !except.contains(&PortRange::ALL),
        InboundPorts::Only(ports) => !ports.is_empty(),
    };
    let outbound = match redirect.outbound() {
        OutboundRanges::All => true,
        OutboundRanges::Only(ranges) => !ranges.is_empty(),
    };
    let asked = inbound
        || outbound
        || !redirect.outbound_ports().is_empty()
        || !redirect.virtual_interfaces().is_empty()
        || *redirect.dns() != DnsCapture::Off;
    !asked
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        pod::PodFacts,
        settings::{NamespaceFacts, Setting},
    };
    use alloc::string::{String, ToString};
    use core::net::IpAddr;

    fn report(flags: &[(&'static str, &'static str)], nameservers: &[IpAddr]) -> Vec<String> {
        let mut raw = RawSettings::new();
        for (name, text) in flags {
            let setting = Setting::ALL.iter().find(|setting| setting.flag == Some(*name)).unwrap();
            raw.set(setting.key, *text, Source::Flag(name));
        }
        let addresses = ["10.1.0.2".parse().unwrap()];
        let facts = NamespaceFacts::new(&addresses).with_nameservers(nameservers);
        Redirect::parse(&raw, &facts).unwrap().notices().iter().map(ToString::to_string).collect()
    }

    #[track_caller]
    fn assert_told(flags: &[(&'static str, &'static str)], words: &[&str]) {
        let all: Vec<_> = [("istio-inbound-ports", "*")].iter().chain(flags).copied().collect();
        let told = report(&all, &[]);
        assert_eq!(told.len(), 1, "{told:?}");
        for word in words {
            assert!(told[0].contains(word), "{word:?} is not in {told:?}");
        }
    }

    #[test]
    fn what_does_less_than_it_seems_is_told() {
        let listed = [("istio-inbound-ports", "80"), ("istio-local-exclude-ports", "22")];
        assert_told(
            &listed,
            &["flag --istio-local-exclude-ports has no effect", "--istio-inbound-ports '*'"],
        );
        assert_told(
            &[("redirect-dns", "true")],
            &["flag --redirect-dns", "resolv.conf", "--capture-all-dns"],
        );
        assert_told(&[("capture-all-dns", "true")], &["flag --capture-all-dns has no effect"]);
    }

    #[test]
    fn groups_that_are_left_alone_count_only_where_none_are_listed() {
        let told = |settings: &[(Key, &'static str)]| {
            let mut raw = RawSettings::new();
            raw.set(Key::InboundPorts, "*", Source::Flag("b"));
            for (key, text) in settings {
                raw.set(*key, *text, Source::Environment("GROUPS"));
            }
            let facts = ["10.1.0.2".parse().unwrap()];
            let redirect = Redirect::parse(&raw, &NamespaceFacts::new(&facts)).unwrap();
            redirect.notices().len()
        };
        let (only, except) = ((Key::OwnerGroups, "101"), (Key::OwnerGroupsExclude, "202"));
        assert_eq!([told(&[]), told(&[only]), told(&[except]), told(&[only, except])], [0, 0, 0, 1]);
    }

    #[test]
    fn what_does_more_than_it_seems_is_told() {
        assert_told(&[("proxy-uid", "0"), ("proxy-gid", "7")], &["flag --proxy-uid: user 0", "root"]);
        assert_told(&[("proxy-gid", "0")], &["flag --proxy-gid: group 0"]);
    }

    #[test]
    fn a_run_that_captures_nothing_is_told() {
        assert!(report(&[], &[])[0].starts_with("nothing is captured"));
        let server = ["10.96.0.10".parse().unwrap()];
        for captured in [
            [("istio-inbound-ports", "80")],
            [("istio-service-cidr", "10.0.0.0/8")],
            [("istio-outbound-ports", "80")],
            [("kube-virt-interfaces", "eth1")],
            [("redirect-dns", "true")],
        ] {
            assert_eq!(report(&captured, &server), Vec::<String>::new(), "{captured:?}");
        }
    }

    #[test]
    fn what_the_injector_writes_is_nothing_to_tell() {
        let injected = [
            ("envoy-port", "15001"),
            ("inbound-capture-port", "15006"),
            ("proxy-uid", "1337"),
            ("istio-inbound-interception-mode", "REDIRECT"),
            ("istio-service-cidr", "*"),
            ("istio-service-exclude-cidr", ""),
            ("istio-inbound-ports", "80"),
            ("istio-local-exclude-ports", "15090,15021,15020"),
        ];
        assert_eq!(report(&injected, &[]), Vec::<String>::new());
    }

    #[test]
    fn a_pod_that_says_nothing_is_nothing_to_tell() {
        let addresses: [IpAddr; 1] = ["10.1.0.2".parse().unwrap()];
        let raw = PodFacts::sidecar([("a", "b")]).settings(RawSettings::for_pod());
        let redirect = Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap();
        assert_eq!(redirect.notices(), []);
        let listed = [
            ("traffic.sidecar.istio.io/includeInboundPorts", "80"),
            ("traffic.sidecar.istio.io/excludeInboundPorts", "15020,22"),
        ];
        let raw = PodFacts::sidecar(listed).settings(RawSettings::for_pod());
        let redirect = Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap();
        let told = redirect.notices()[0].to_string();
        assert!(
            told.starts_with("annotation traffic.sidecar.istio.io/excludeInboundPorts has no effect"),
            "{told}"
        );
    }
}
