//! Ambient mode: a pod without a proxy of its own, whose traffic the node's ztunnel takes over by listeners that it opens in
//! the pod's network namespace.

mod scope;

use crate::{
    redirect::Families,
    settings::{InputErrors, Key, Provenance, RawSettings, Setting, Source, Sources},
    values::{Family, InterfaceName, MaskedMark, Port, Problem, RouteTable, parse_bool},
};
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub(crate) use scope::CaptureScope;

/// The source addresses that the node gives to the kubelet's probes, by which pods' rules recognize them. No host has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProbeSources {
    v4: Ipv4Addr,
    v6: Ipv6Addr,
}

impl Default for ProbeSources {
    fn default() -> Self {
        Self::USUAL
    }
}

impl ProbeSources {
    /// Those that Istio's agent uses: `169.254.7.127` and `fd16:9254:7127:1337:ffff:ffff:ffff:ffff`.
    pub const USUAL: Self = Self {
        v4: Ipv4Addr::new(169, 254, 7, 127),
        v6: Ipv6Addr::new(0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff),
    };

    /// The one of a family.
    #[must_use]
    pub const fn of(self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::V4(self.v4),
            Family::V6 => IpAddr::V6(self.v6),
        }
    }

    /// The same with another one of this family.
    ///
    /// # Errors
    /// The text is not a unicast address of that family, or one of loopback, or an address that holds on one link only in IPv6.
    ///
    /// ```
    /// use redirect_core::{Family, ambient::ProbeSources};
    ///
    /// let sources = ProbeSources::USUAL.with(Family::V4, "169.254.8.1")?;
    /// assert_eq!(sources.of(Family::V4).to_string(), "169.254.8.1");
    /// assert!(sources.with(Family::V6, "fe80::1").is_err());
    /// # Ok::<(), redirect_core::values::Problem>(())
    /// ```
    pub fn with(self, family: Family, text: &str) -> Result<Self, Problem> {
        let is_v4 = |at: &Ipv4Addr| !(at.octets()[0] == 0 || at.is_loopback() || at.octets()[0] >= 224);
        let is_v6 = |at: &Ipv6Addr| {
            let is_special = at.is_unspecified() || at.is_loopback() || at.is_multicast();
            !(is_special || at.is_unicast_link_local() || at.to_ipv4_mapped().is_some())
        };
        let read = match family {
            Family::V4 => text.parse().ok().filter(is_v4).map(|v4| Self { v4, ..self }),
            Family::V6 => text.parse().ok().filter(is_v6).map(|v6| Self { v6, ..self }),
        };
        read.ok_or(Problem::NotAProbeSource { family, usual: Self::USUAL.of(family) })
    }

    fn read(raw: &RawSettings, errors: &mut InputErrors) -> Self {
        let keys = [(Key::AmbientProbeV4, Family::V4), (Key::AmbientProbeV6, Family::V6)];
        keys.into_iter().fold(Self::USUAL, |sources, (key, family)| {
            raw.read(key, errors, |text| sources.with(family, text)).unwrap_or(sources)
        })
    }
}

/// The redirection of a pod in ambient mode. Every value of this type is valid.
///
/// Two are equal when they ask for the same; who asked for it does not matter.
///
/// ```
/// use redirect_core::{AmbientRedirect, Families, Family};
///
/// let redirect = AmbientRedirect::new(Families::Both).with_dns_capture(true);
/// let rules = redirect.plan().rules(Family::V4).restore_text();
/// assert!(rules.contains("-A ISTIO_PRERT -s 169.254.7.127/32 -p tcp -j ACCEPT"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AmbientRedirect {
    families: Families,
    /// Those of which `lo` has addresses.
    local: Families,
    captures_dns: bool,
    captures_inbound: bool,
    virtual_interfaces: Vec<InterfaceName>,
    probes: ProbeSources,
    scope: CaptureScope,
    /// The setting that decided about DNS: the node's, unless the pod has its own.
    dns_key: Provenance<Key>,
    sources: Provenance<Sources>,
}

impl AmbientRedirect {
    /// Where ztunnel listens in a pod for outbound connections: 15001.
    pub const OUTBOUND_PORT: Port = Port::known(15001);
    /// Where ztunnel listens in a pod for inbound connections of plain TCP: 15006.
    pub const INBOUND_PORT: Port = Port::known(15006);
    /// Where ztunnel listens in a pod for tunnelled inbound connections (HBONE): 15008. It is never captured.
    pub const TUNNEL_PORT: Port = Port::known(15008);
    /// The mark of ztunnel's own packets: `0x539/0xfff`.
    pub const ZTUNNEL_MARK: MaskedMark = MaskedMark::known(0x539, 0xfff);
    /// The mark of connections that ztunnel opens to the application, and of the application's answers on them: `0x111/0xfff`.
    pub const ANSWER_MARK: MaskedMark = MaskedMark::known(0x111, 0xfff);
    /// The routing table that delivers these answers to ztunnel: 100.
    pub const ANSWER_TABLE: RouteTable = RouteTable::known(100);
    /// The priority of the policy rule that leads there: 32764, before the table `main`.
    pub const ANSWER_PRIORITY: u32 = 32764;

    /// Captures all TCP both ways, and no DNS.
    #[must_use]
    pub fn new(families: Families) -> Self {
        Self {
            families,
            local: Families::Both,
            captures_dns: false,
            captures_inbound: true,
            virtual_interfaces: Vec::new(),
            probes: ProbeSources::USUAL,
            scope: CaptureScope::everything(),
            dns_key: Provenance(Key::AmbientDnsCapture),
            sources: Provenance::default(),
        }
    }

    /// The families it has rules for.
    #[must_use]
    pub const fn with_families(mut self, families: Families) -> Self {
        self.families = families;
        self
    }

    /// The families that routes on `lo` can be made for. Where IPv6 is off on `lo` alone, the rules stay, so that nothing bypasses
    /// ztunnel.
    #[must_use]
    pub const fn with_local_routes(mut self, families: Families) -> Self {
        self.local = families;
        self
    }

    /// Whether DNS queries go to ztunnel.
    #[must_use]
    pub fn with_dns_capture(mut self, captures: bool) -> Self {
        self.captures_dns = captures;
        self.said(Key::AmbientDnsCapture, "setter with_dns_capture")
    }

    /// Interfaces whose inbound traffic counts as outbound: virtual machines or containers inside the pod.
    #[must_use]
    pub fn with_virtual_interfaces(mut self, interfaces: impl IntoIterator<Item = InterfaceName>) -> Self {
        self.virtual_interfaces = interfaces.into_iter().collect();
        self.said(Key::AmbientVirtualInterfaces, "setter with_virtual_interfaces")
    }

    /// Whether inbound connections that are not tunnelled go to ztunnel. They do not in a gateway that ambient mode's clients
    /// reach from outside the mesh.
    #[must_use]
    pub fn with_inbound_capture(mut self, captures: bool) -> Self {
        self.captures_inbound = captures;
        self.said(Key::AmbientIngress, "setter with_inbound_capture")
    }

    /// Reads a redirection from settings.
    ///
    /// # Errors
    /// Everything wrong with the settings, together.
    ///
    /// ```
    /// use redirect_core::{AmbientRedirect, settings::{Key, RawSettings, Source}};
    ///
    /// let mut raw = RawSettings::new();
    /// raw.set(Key::AmbientDnsOverride, "perhaps", Source::Annotation("ambient.istio.io/dns-capture"));
    /// let errors = AmbientRedirect::parse(&raw).unwrap_err();
    /// assert!(errors.to_string().starts_with("annotation ambient.istio.io/dns-capture: \"perhaps\""));
    /// ```
    pub fn parse(raw: &RawSettings) -> Result<Self, InputErrors> {
        let mut errors = raw.refused().clone();
        let mut is_on = |key| raw.read(key, &mut errors, parse_bool).unwrap_or_default();
        let (has_v6, of_node, bypasses_inbound) =
            (is_on(Key::AmbientIpv6), is_on(Key::AmbientDnsCapture), is_on(Key::AmbientIngress));
        let is_overridden = !raw.get(Key::AmbientDnsOverride).0.is_empty();
        let (dns_key, captures_dns) = if is_overridden {
            (Key::AmbientDnsOverride, is_on(Key::AmbientDnsOverride))
        } else {
            (Key::AmbientDnsCapture, of_node)
        };
        let virtual_interfaces = raw.read_interfaces(Key::AmbientVirtualInterfaces, &mut errors);
        let probes = ProbeSources::read(raw, &mut errors);
        // Read even where nothing depends on it, so that a typing error never waits to bite.
        let _ = raw.read(Key::AmbientCaptureScope, &mut errors, parse_bool);
        let scope = CaptureScope::read(raw, &mut errors);
        errors.into_result(Self {
            captures_dns,
            captures_inbound: !bypasses_inbound,
            virtual_interfaces: virtual_interfaces.unwrap_or_default(),
            probes,
            scope,
            dns_key: Provenance(dns_key),
            sources: Provenance(raw.sources()),
            ..Self::new(if has_v6 { Families::Both } else { Families::V4 })
        })
    }

    /// The families it has rules for.
    #[must_use]
    pub const fn families(&self) -> Families {
        self.families
    }

    /// The families whose marked packets are delivered to ztunnel by routes on `lo`.
    pub fn local_routes(&self) -> impl Iterator<Item = Family> {
        let local = self.local;
        self.families.iter().filter(move |family| local.contains(*family))
    }

    /// Whether DNS queries go to ztunnel.
    #[must_use]
    pub const fn captures_dns(&self) -> bool {
        self.captures_dns
    }

    /// Whether inbound connections that are not tunnelled go to ztunnel.
    #[must_use]
    pub const fn captures_inbound(&self) -> bool {
        self.captures_inbound
    }

    /// Interfaces whose inbound traffic counts as outbound.
    #[must_use]
    pub fn virtual_interfaces(&self) -> &[InterfaceName] {
        &self.virtual_interfaces
    }

    /// The source addresses by which the kubelet's probes are recognized.
    #[must_use]
    pub const fn probe_sources(&self) -> ProbeSources {
        self.probes
    }

    /// Whether all TCP is captured both ways, as far as the pod's owner decides: no port, destination or interface is excluded.
    #[must_use]
    pub fn captures_everything(&self) -> bool {
        self.scope.is_everything()
    }

    /// Which traffic is captured.
    pub(crate) const fn scope(&self) -> &CaptureScope {
        &self.scope
    }

    /// Who asked for what it has of a setting; [`Source::Default`] if unset.
    #[must_use]
    pub fn source(&self, key: Key) -> Source {
        self.sources.0.of(key)
    }

    /// Who asked for each setting.
    pub(crate) const fn sources(&self) -> &Sources {
        &self.sources.0
    }

    /// The setting that decided about DNS: the pod's own choice, where it has one.
    #[must_use]
    pub const fn dns_key(&self) -> Key {
        self.dns_key.0
    }

    fn said(mut self, key: Key, setter: &'static str) -> Self {
        self.sources.0.set(key, Source::Caller(setter));
        self
    }
}

impl RawSettings {
    /// Takes what a pod's annotations say about ambient mode, over whatever was said before. Of a setting's annotations an
    /// earlier one wins. Those that limit what is captured count only where that was allowed before ([`Key::AmbientCaptureScope`]).
    pub fn read_ambient_annotations<'a>(&mut self, annotation: impl Fn(&'static str) -> Option<&'a str>) {
        let may_limit = parse_bool(self.get(Key::AmbientCaptureScope).0) == Ok(true);
        let counts = |setting: &&Setting| may_limit || !scope::is_of_owners(setting);
        self.read_annotations(Setting::AMBIENT.iter().filter(counts), annotation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::{String, ToString};

    fn of(
        annotations: &[(&str, &'static str)],
        node: &[(Key, &'static str)],
    ) -> Result<AmbientRedirect, InputErrors> {
        let mut raw = RawSettings::new();
        for (key, text) in node {
            raw.set(*key, *text, Source::Flag("test"));
        }
        raw.read_ambient_annotations(|name| {
            annotations.iter().find(|(given, _)| *given == name).map(|(_, text)| *text)
        });
        AmbientRedirect::parse(&raw)
    }

    #[test]
    fn what_is_not_said_is_as_the_reference_has_it() {
        assert_eq!(of(&[], &[]).unwrap(), AmbientRedirect::new(Families::Both));
        assert_eq!(of(&[], &[(Key::AmbientIpv6, "false")]).unwrap(), AmbientRedirect::new(Families::V4));
    }

    #[test]
    fn where_lo_has_no_ipv6_there_are_rules_and_no_route() {
        let redirect = AmbientRedirect::new(Families::Both).with_local_routes(Families::V4);
        let plan = redirect.plan();
        assert_eq!(plan.families(), Family::BOTH);
        assert_eq!(plan.policy_routes().unwrap().families(), [Family::V4]);
        let v4 = redirect.with_local_routes(Families::Both).with_families(Families::V4);
        assert_eq!(v4.plan().policy_routes().unwrap().families(), [Family::V4]);
    }

    #[test]
    fn a_pod_overrides_what_the_node_captures_of_dns() {
        for (node, pod, captures) in [
            ("false", None, false),
            ("true", None, true),
            ("false", Some("true"), true),
            ("true", Some("false"), false),
            ("true", Some("true"), true),
        ] {
            let annotation = pod.map(|text| ("ambient.istio.io/dns-capture", text));
            let redirect = of(annotation.as_slice(), &[(Key::AmbientDnsCapture, node)]).unwrap();
            assert_eq!(redirect.captures_dns(), captures, "{node} {pod:?}");
            let decided = if pod.is_some() { Key::AmbientDnsOverride } else { Key::AmbientDnsCapture };
            assert_eq!(redirect.dns_key(), decided);
        }
    }

    #[test]
    fn a_pods_annotations_are_read_and_named() {
        let redirect = of(
            &[
                ("ambient.istio.io/bypass-inbound-capture", "true"),
                ("istio.io/reroute-virtual-interfaces", "eth1,net1"),
            ],
            &[],
        )
        .unwrap();
        let interfaces = ["eth1", "net1"].map(|name| name.parse().unwrap());
        let wanted = AmbientRedirect::new(Families::Both).with_inbound_capture(false);
        assert_eq!(redirect, wanted.with_virtual_interfaces(interfaces));
        assert_eq!(
            redirect.source(Key::AmbientIngress),
            Source::Annotation("ambient.istio.io/bypass-inbound-capture")
        );
    }

    #[test]
    fn everything_wrong_is_said_at_once() {
        let errors = of(
            &[
                ("ambient.istio.io/bypass-inbound-capture", "ja"),
                ("ambient.istio.io/dns-capture", "2"),
                ("istio.io/reroute-virtual-interfaces", "eth1,a/b"),
            ],
            &[(Key::AmbientIpv6, "6")],
        )
        .unwrap_err();
        let text = errors.to_string();
        assert_eq!(errors.iter().count(), 4, "{text}");
        for part in ["\"ja\"", "dns-capture: \"2\"", "\"a/b\"", "flag --test: \"6\""] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    /// The lines that a scope adds to the plan of everything, and those that it lacks, in both families.
    fn changes(annotations: &[(&str, &'static str)]) -> (Vec<String>, Vec<String>) {
        let lines = |annotations: &[(&str, &'static str)]| -> Vec<String> {
            let scope = [(Key::AmbientCaptureScope, "true"), (Key::AmbientDnsCapture, "true")];
            let plan = of(annotations, &scope).unwrap().plan();
            let text = Family::BOTH.map(|family| plan.rules(family).restore_text());
            text.concat().lines().map(ToString::to_string).collect()
        };
        let (all, limited) = (lines(&[]), lines(annotations));
        let only = |these: &[String], others: &[String]| {
            these.iter().filter(|line| !others.contains(line)).cloned().collect()
        };
        (only(&limited, &all), only(&all, &limited))
    }

    const CAPTURED_V4: &str =
        "-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001";
    const CAPTURED_V6: &str =
        "-A ISTIO_OUTPUT ! -d ::1/128 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001";

    #[test]
    fn each_annotation_limits_what_is_captured() {
        type Case = (&'static [(&'static str, &'static str)], &'static [&'static str], usize);
        let cases: [Case; 7] = [
            (
                &[("traffic.istio.io/excludeOutboundIPRanges", "10.0.0.0/8,fd00::/8")],
                &["-A ISTIO_OUTPUT -d 10.0.0.0/8 -j RETURN", "-A ISTIO_OUTPUT -d fd00::/8 -j RETURN"],
                0,
            ),
            (
                &[("traffic.istio.io/excludeOutboundPorts", "3306")],
                &[
                    "-A ISTIO_OUTPUT -p tcp -m tcp --dport 3306 -j RETURN",
                    "-A ISTIO_OUTPUT -p udp -m udp --dport 3306 -j RETURN",
                ],
                0,
            ),
            (
                &[
                    ("traffic.istio.io/includeOutboundIPRanges", "10.0.0.0/8"),
                    ("traffic.istio.io/includeOutboundPorts", "443"),
                ],
                &[
                    "-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN",
                    "-A ISTIO_OUTPUT -p tcp -m tcp --dport 443 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001",
                    "-A ISTIO_OUTPUT -d 10.0.0.0/8 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001",
                    "-A ISTIO_OUTPUT -d ::1/128 -j RETURN",
                ],
                2,
            ),
            (
                &[("traffic.istio.io/excludeInboundPorts", "9090,9100-9199")],
                &[
                    "-A ISTIO_PRERT -p tcp -m tcp --dport 9090 -j RETURN",
                    "-A ISTIO_PRERT -p tcp -m tcp --dport 9100:9199 -j RETURN",
                ],
                0,
            ),
            (
                &[("traffic.istio.io/includeInboundPorts", "80")],
                &[
                    "-A ISTIO_PRERT -p tcp -m tcp --dport 15008 -j RETURN",
                    "-A ISTIO_PRERT ! -d 127.0.0.1/32 -p tcp -m tcp --dport 80 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006",
                    "-A ISTIO_PRERT ! -d ::1/128 -p tcp -m tcp --dport 80 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006",
                ],
                2,
            ),
            (&[("traffic.istio.io/includeInboundPorts", "")], &[], 4),
            (
                &[("traffic.istio.io/excludeInterfaces", "eth1")],
                &["-A ISTIO_PRERT -i eth1 -j RETURN", "-A ISTIO_OUTPUT -o eth1 -j RETURN"],
                0,
            ),
        ];
        for (annotations, added, lost) in cases {
            let (found, missing) = changes(annotations);
            let unlike: Vec<_> = added.iter().filter(|line| !found.iter().any(|one| one == *line)).collect();
            assert!(unlike.is_empty(), "{unlike:?} of {annotations:?}: {found:#?}");
            assert!(found.iter().all(|line| added.contains(&line.as_str())), "{annotations:?}: {found:#?}");
            assert_eq!(missing.len(), lost, "{annotations:?}: {missing:#?}");
            let is_captured = missing.iter().any(|line| [CAPTURED_V4, CAPTURED_V6].contains(&line.as_str()));
            assert_eq!(is_captured, annotations[0].0.contains("includeOutbound"), "{missing:#?}");
        }
    }

    #[test]
    fn scope_counts_only_where_an_operator_allows_it() {
        let excluded = [("traffic.istio.io/excludeOutboundPorts", "3306")];
        let all = of(&excluded, &[]).unwrap();
        assert_eq!(all, AmbientRedirect::new(Families::Both));
        assert!(all.captures_everything());
        let allowed = [(Key::AmbientCaptureScope, "true")];
        let limited = of(&excluded, &allowed).unwrap();
        assert!(!limited.captures_everything());
        assert_eq!(limited.source(Key::AmbientOutboundExcludePorts), Source::Annotation(excluded[0].0));
        // What adds nothing excludes nothing.
        for said in [
            ("traffic.istio.io/includeOutboundPorts", "443"),
            ("traffic.istio.io/includeOutboundIPRanges", "*"),
            ("traffic.istio.io/includeInboundPorts", "*"),
        ] {
            assert!(of(&[said], &allowed).unwrap().captures_everything(), "{said:?}");
        }
        for (name, wrong) in [
            ("traffic.istio.io/excludeOutboundPorts", "*"),
            ("traffic.istio.io/excludeInboundPorts", "http"),
            ("traffic.istio.io/includeInboundPorts", "80,,90"),
            ("traffic.istio.io/includeOutboundIPRanges", "10.0.0.0/33"),
            ("traffic.istio.io/excludeInterfaces", "a/b"),
        ] {
            let told = of(&[(name, wrong)], &allowed).unwrap_err().to_string();
            assert!(told.starts_with(&alloc::format!("annotation {name}: ")), "{told}");
            assert!(of(&[(name, wrong)], &[]).is_ok(), "what does not count cannot be wrong");
        }
    }

    #[test]
    fn what_comes_by_a_virtual_interface_has_the_scope_of_outbound() {
        let interface = ("istio.io/reroute-virtual-interfaces", "tap0");
        let (with, _) = changes(&[
            interface,
            ("traffic.istio.io/excludeOutboundIPRanges", "10.0.0.0/8"),
            ("traffic.istio.io/excludeOutboundPorts", "3306"),
        ]);
        for line in [
            "-A ISTIO_PRERT -i tap0 -p tcp -m tcp --dport 3306 -j RETURN",
            "-A ISTIO_PRERT -d 10.0.0.0/8 -i tap0 -j RETURN",
            "-A ISTIO_PRERT -i tap0 -p tcp -j REDIRECT --to-ports 15001",
        ] {
            assert!(with.iter().any(|one| one == line), "{line}: {with:#?}");
        }
    }

    #[test]
    fn probes_may_have_other_sources_that_no_host_has() {
        let other = [(Key::AmbientProbeV4, "169.254.8.1"), (Key::AmbientProbeV6, "fd00::7")];
        let redirect = of(&[], &other).unwrap();
        assert_ne!(redirect, AmbientRedirect::new(Families::Both));
        assert_eq!(
            Family::BOTH.map(|family| redirect.probe_sources().of(family).to_string()),
            other.map(|one| one.1)
        );
        let rules = Family::BOTH.map(|family| redirect.plan().rules(family).restore_text()).concat();
        for rule in [
            "-A ISTIO_PRERT -s 169.254.8.1/32 -p tcp -j ACCEPT",
            "-A ISTIO_OUTPUT -d 169.254.8.1/32 -p tcp -j ACCEPT",
            "-A ISTIO_PRERT -s fd00::7/128 -p tcp -j ACCEPT",
            "-A ISTIO_OUTPUT -d fd00::7/128 -p tcp -j ACCEPT",
        ] {
            assert!(rules.contains(rule), "{rules}");
        }
        assert!(!rules.contains("169.254.7.127") && !rules.contains("fd16:9254"), "{rules}");
        for (key, wrong) in [
            (Key::AmbientProbeV4, ["127.0.0.1", "224.0.0.1", "0.0.0.0", "fd00::7", "10.0.0.0/8", ""]),
            (Key::AmbientProbeV6, ["::1", "fe80::1", "ff02::1", "::ffff:10.0.0.1", "10.0.0.1", "::"]),
        ] {
            for text in wrong {
                let told = of(&[], &[(key, text)]).unwrap_err().to_string();
                assert!(told.contains("write one that no host has, such as "), "{text}: {told}");
            }
        }
    }

    #[test]
    fn what_is_refused_elsewhere_is_told_with_it() {
        let mut raw = RawSettings::new();
        raw.refuse(Source::Flag("unheard-of"), "1", crate::values::Problem::NotANumber);
        assert_eq!(AmbientRedirect::parse(&raw).unwrap_err().iter().count(), 1);
    }
}
