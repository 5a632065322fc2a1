//! A redirection: everything a plan needs, typed and valid.

use crate::{
    settings::{InputErrors, Key, NamespaceFacts, RawSettings, Source},
    values::{
        Cidrs, Family, InterfaceName, Mark, MaskedMark, PASSTHROUGH_V6, Port, PortRange, PortSyntax, Problem,
        RouteTable, decimal, parse_bool, parse_cidr, parse_word,
    },
};
use alloc::{collections::BTreeSet, vec, vec::Vec};
use core::net::{IpAddr, Ipv4Addr};
use ipnet::{IpNet, Ipv4Net};

/// The mark of the proxy's own packets in TPROXY mode: 1338.
pub const PROXY_MARK: Mark = Mark(1338);
/// The mark of connections that are not captured, with strict capture. It leaves room for that of TPROXY and for others'.
pub const GUARD_MARK: MaskedMark = MaskedMark::GUARD;
/// The port the proxy answers DNS queries on.
pub const DNS_PORT: Port = Port::known(15053);
/// The user and group of the proxy where nobody says otherwise.
pub const PROXY_ID: u32 = 1337;
/// Ports never captured inbound in a pod: status, health and metrics of the proxy.
pub const ALWAYS_EXCLUDED_INBOUND: [&str; 3] = ["15020", "15021", "15090"];
/// How many owner groups the reference takes at most.
const MOST_OWNER_GROUPS: usize = 64;

/// How inbound connections reach the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterceptionMode {
    /// By rewriting their destination (nat table).
    Redirect,
    /// By handing them to the proxy as they are (mangle table, policy routing).
    Tproxy(Tproxy),
}

/// What TPROXY mode needs besides rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tproxy {
    /// The mark of inbound packets.
    pub mark: Mark,
    /// The routing table that delivers marked packets locally.
    pub table: RouteTable,
}

impl Tproxy {
    /// Mark and table where nobody says otherwise.
    pub(crate) fn usual() -> Option<Self> {
        let mark = Key::TproxyMark.setting().default.parse().ok()?;
        let table = Key::TproxyRouteTable.setting().default.parse().ok()?;
        Some(Self { mark, table })
    }
}

/// Which inbound TCP ports are captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InboundPorts {
    /// None.
    None,
    /// All but these, in this order.
    AllExcept(Vec<PortRange>),
    /// These, in this order.
    Only(Vec<PortRange>),
}

/// Which outbound destinations are captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutboundRanges {
    /// All.
    All,
    /// These; none where there is none.
    Only(Cidrs),
}

/// Whose outbound traffic is captured, by group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnerGroups {
    /// Every group but these.
    AllExcept(Vec<u32>),
    /// These groups; none where there is none.
    Only(Vec<u32>),
}

/// Which DNS queries are captured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DnsCapture {
    /// None.
    Off,
    /// Those to these servers; at least one, of either family.
    Servers(Vec<IpAddr>),
    /// All to port 53.
    All,
}

/// A redirection. Every value of this type is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// How inbound connections reach the proxy.
    pub mode: InterceptionMode,
    /// Where the proxy listens for outbound connections.
    pub proxy_port: Port,
    /// Where the proxy listens for inbound connections.
    pub inbound_port: Port,
    /// Where tunnelled inbound connections arrive; never captured.
    pub tunnel_port: Port,
    /// The proxy's users; never empty.
    pub proxy_uids: Vec<u32>,
    /// The proxy's groups; never empty.
    pub proxy_gids: Vec<u32>,
    /// Which inbound ports are captured.
    pub inbound: InboundPorts,
    /// Which destinations are captured.
    pub outbound: OutboundRanges,
    /// Which destinations are not, whatever `outbound` says.
    pub outbound_exclude: Cidrs,
    /// Which ports are captured whatever the destination.
    pub outbound_ports: Vec<PortRange>,
    /// Which ports are not captured, TCP and UDP.
    pub outbound_ports_exclude: Vec<PortRange>,
    /// Whose traffic is captured.
    pub owner_groups: OwnerGroups,
    /// Which DNS queries are captured.
    pub dns: DnsCapture,
    /// Interfaces left alone.
    pub exclude_interfaces: Vec<InterfaceName>,
    /// Interfaces whose inbound traffic counts as outbound.
    pub virtual_interfaces: Vec<InterfaceName>,
    /// Whether inbound packets that connection tracking finds invalid are dropped.
    pub drop_invalid: bool,
    /// Whether what would pass on a connection that was not captured is dropped.
    pub strict_capture: bool,
    /// Whether IPv6 is programmed besides IPv4.
    pub ipv6: bool,
    /// The IPv4 loopback range the application may use with itself.
    pub loopback: Ipv4Net,
}

impl Redirect {
    /// Reads a redirection from settings, for a network namespace with these facts.
    ///
    /// # Errors
    /// Everything wrong with the settings, together.
    pub fn parse(raw: &RawSettings, facts: &NamespaceFacts<'_>) -> Result<Self, InputErrors> {
        let mut reader = Reader { raw, facts, errors: InputErrors::default() };
        let redirect = reader.redirect();
        let Reader { errors, .. } = reader;
        match redirect {
            Some(redirect) => errors.into_result(redirect),
            None => Err(errors),
        }
    }

    /// The families a plan has rules for. IPv4 always has, as in the reference.
    #[must_use]
    pub fn families(&self) -> &'static [Family] {
        if self.ipv6 { &Family::BOTH } else { &[Family::V4] }
    }

    /// The range of loopback addresses the application may use with itself.
    #[must_use]
    pub fn loopback(&self, family: Family) -> IpNet {
        match family {
            Family::V4 => IpNet::V4(self.loopback),
            Family::V6 => crate::values::host(IpAddr::V6(core::net::Ipv6Addr::LOCALHOST)),
        }
    }
}

/// Reads settings one by one and notes what is wrong.
struct Reader<'a> {
    raw: &'a RawSettings,
    facts: &'a NamespaceFacts<'a>,
    errors: InputErrors,
}

impl Reader<'_> {
    /// `None` only when an error was noted. Everything is read before anything is given up.
    fn redirect(&mut self) -> Option<Redirect> {
        let strict_capture = self.switch(Key::StrictCapture);
        let mode = self.mode(strict_capture.unwrap_or_default());
        let proxy_port = self.value::<Port>(Key::ProxyPort);
        let inbound_port = self.value::<Port>(Key::InboundCapturePort);
        let tunnel_port = self.value::<Port>(Key::InboundTunnelPort);
        let owners = self.proxy_owners();
        let inbound = self.inbound();
        let outbound = self.outbound();
        let outbound_exclude = self.cidrs(Key::OutboundExcludeRanges);
        let outbound_ports = self.ports(Key::OutboundPorts);
        let outbound_ports_exclude = self.ports(Key::OutboundExcludePorts);
        let owner_groups = self.owner_groups();
        let exclude_interfaces = self.interfaces(Key::ExcludeInterfaces);
        let virtual_interfaces = self.interfaces(Key::VirtualInterfaces);
        let dns = self.dns();
        let drop_invalid = self.switch(Key::DropInvalid);
        let ipv6 = self.ipv6();
        let loopback = self.loopback();
        let (proxy_uids, proxy_gids) = owners?;
        Some(Redirect {
            mode: mode?,
            proxy_port: proxy_port?,
            inbound_port: inbound_port?,
            tunnel_port: tunnel_port?,
            proxy_uids,
            proxy_gids,
            inbound: inbound?,
            outbound: outbound?,
            outbound_exclude: outbound_exclude?,
            outbound_ports: outbound_ports?,
            outbound_ports_exclude: outbound_ports_exclude?,
            owner_groups: owner_groups?,
            dns: dns?,
            exclude_interfaces: exclude_interfaces?,
            virtual_interfaces: virtual_interfaces?,
            drop_invalid: drop_invalid?,
            strict_capture: strict_capture?,
            ipv6: ipv6?,
            loopback: loopback?,
        })
    }

    /// The mark and the table are read even where they are not used, so that a typing error never waits to bite.
    fn mode(&mut self, strict: bool) -> Option<InterceptionMode> {
        let mark = self.value::<Mark>(Key::TproxyMark);
        let table = self.value::<RouteTable>(Key::TproxyRouteTable);
        let (text, source) = self.raw.get(Key::InterceptionMode);
        let words = [("REDIRECT", false), ("TPROXY", true), ("NONE", false)];
        let (words, listed) = if self.is_annotation(Key::InterceptionMode) {
            // A pod that says NONE is left alone before anything of this is read.
            (&words[..], "REDIRECT, TPROXY, NONE")
        } else if text.is_empty() {
            return Some(InterceptionMode::Redirect);
        } else {
            (&words[..2], "REDIRECT, TPROXY")
        };
        match self.errors.keep(source, text, parse_word(text, words, listed))? {
            true => {
                if let Some(problem) = mark.and_then(|mark| clash(mark, strict)) {
                    let (text, source) = self.raw.get(Key::TproxyMark);
                    self.errors.push(source, text, problem);
                }
                Some(InterceptionMode::Tproxy(Tproxy { mark: mark?, table: table? }))
            }
            false => Some(InterceptionMode::Redirect),
        }
    }

    /// Users, then groups; empty groups are the same as the users.
    fn proxy_owners(&mut self) -> Option<(Vec<u32>, Vec<u32>)> {
        let uids = match self.raw.get(Key::ProxyUid).0 {
            "" => Some(vec![self.facts.names.user(self.raw.get(Key::ProxyUser).0).unwrap_or(PROXY_ID)]),
            _ => self.ids(Key::ProxyUid, "/etc/passwd", |names, name| names.user(name)),
        };
        let gids = match self.raw.get(Key::ProxyGid).0 {
            "" => uids.clone(),
            _ => self.ids(Key::ProxyGid, "/etc/group", |names, name| names.group(name)),
        };
        Some((uids?, gids?))
    }

    fn inbound(&mut self) -> Option<InboundPorts> {
        let exclude = self.inbound_exclude();
        match self.raw.get(Key::InboundPorts).0 {
            "" => exclude.map(|_| InboundPorts::None),
            "*" => exclude.map(InboundPorts::AllExcept),
            _ => {
                let only = self.ports(Key::InboundPorts)?;
                exclude.map(|_| InboundPorts::Only(only))
            }
        }
    }

    /// In a pod, the proxy's own ports follow what the user excluded; a port written twice counts once.
    fn inbound_exclude(&mut self) -> Option<Vec<PortRange>> {
        let said = self.ports(Key::InboundExcludePorts)?;
        if !self.raw.is_pod() {
            return Some(said);
        }
        let texts =
            self.raw.get(Key::InboundExcludePorts).0.trim().split(',').filter(|text| !text.is_empty());
        let always = ALWAYS_EXCLUDED_INBOUND
            .iter()
            .filter_map(|port| PortRange::parse(port, PortSyntax::Annotation).ok());
        let all = texts.zip(said).chain(ALWAYS_EXCLUDED_INBOUND.into_iter().zip(always));
        // As in the reference, the texts are compared: " 8080" and "8080" are two rules, which is harmless.
        let mut seen = BTreeSet::new();
        Some(all.filter(|(text, _)| seen.insert(*text)).map(|(_, range)| range).collect())
    }

    fn outbound(&mut self) -> Option<OutboundRanges> {
        match self.raw.get(Key::OutboundRanges).0 {
            "*" => Some(OutboundRanges::All),
            _ => self.cidrs(Key::OutboundRanges).map(OutboundRanges::Only),
        }
    }

    fn owner_groups(&mut self) -> Option<OwnerGroups> {
        let (text, source) = self.raw.get(Key::OwnerGroups);
        let group = |names: &dyn crate::settings::NameLookup, name: &str| names.group(name);
        if text == "*" {
            return self.ids(Key::OwnerGroupsExclude, "/etc/group", group).map(OwnerGroups::AllExcept);
        }
        let only = self.ids(Key::OwnerGroups, "/etc/group", group)?;
        if only.len() > MOST_OWNER_GROUPS {
            let problem = Problem::TooMany { found: only.len(), most: MOST_OWNER_GROUPS };
            self.errors.push(source, text, problem);
            return None;
        }
        Some(OwnerGroups::Only(only))
    }

    /// Limited to the servers of resolv.conf unless all queries are asked for; in a pod, all are meant.
    fn dns(&mut self) -> Option<DnsCapture> {
        let redirect = self.switch(Key::RedirectDns);
        let all = self.switch(Key::CaptureAllDns);
        Some(match (redirect?, all? || self.raw.is_pod()) {
            (false, _) => DnsCapture::Off,
            (true, true) => DnsCapture::All,
            (true, false) if self.facts.nameservers.is_empty() => DnsCapture::Off,
            (true, false) => DnsCapture::Servers(self.facts.nameservers.to_vec()),
        })
    }

    /// The first address that is neither loopback nor link-local decides; with dual stack, any IPv6 address does.
    fn ipv6(&mut self) -> Option<bool> {
        let dual = self.switch(Key::DualStack);
        let mut usable = self.facts.addresses.iter().filter(|address| is_routable(address)).peekable();
        let Some(first) = usable.peek() else {
            self.errors.push(Source::Namespace, "", Problem::NoAddress);
            return None;
        };
        Some(first.is_ipv6() || dual? && usable.any(IpAddr::is_ipv6))
    }

    fn loopback(&mut self) -> Option<Ipv4Net> {
        let (text, source) = self.raw.get(Key::LoopbackRange);
        let all = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);
        let parsed = match parse_cidr(text) {
            Ok(IpNet::V4(net)) if all.contains(&net) => Ok(net),
            Ok(_) | Err(_) => Err(Problem::NotLoopback),
        };
        self.errors.keep(source, text, parsed)
    }

    /// A single value of a type that reads itself.
    fn value<T: core::str::FromStr<Err = Problem>>(&mut self, key: Key) -> Option<T> {
        let (text, source) = self.raw.get(key);
        self.errors.keep(source, text, text.parse())
    }

    fn switch(&mut self, key: Key) -> Option<bool> {
        let (text, source) = self.raw.get(key);
        self.errors.keep(source, text, parse_bool(text))
    }

    /// Ports: blanks around them are dropped. `a:b` is a range; in an annotation also `a-b`.
    fn ports(&mut self, key: Key) -> Option<Vec<PortRange>> {
        let syntax = if self.is_annotation(key) { PortSyntax::Annotation } else { PortSyntax::Flag };
        self.list(key, |text| match text.trim() {
            "" => Err(Problem::EmptyElement),
            "*" if key.leaves_alone() => Err(Problem::StarExcludes),
            "*" => Err(Problem::StarNotAllowed),
            text => PortRange::parse(text, syntax),
        })
    }

    fn cidrs(&mut self, key: Key) -> Option<Cidrs> {
        self.list(key, |text| match text {
            "*" if key.leaves_alone() => Err(Problem::StarExcludes),
            _ => parse_cidr(text),
        })
        .map(Cidrs::from_iter)
    }

    fn interfaces(&mut self, key: Key) -> Option<Vec<InterfaceName>> {
        let strict = self.is_annotation(key);
        self.list(key, |text| match text.trim() {
            "" => Err(Problem::EmptyElement),
            text if strict => InterfaceName::parse_exact(text),
            text => text.parse(),
        })
    }

    fn ids(
        &mut self,
        key: Key,
        file: &'static str,
        look_up: fn(&dyn crate::settings::NameLookup, &str) -> Option<u32>,
    ) -> Option<Vec<u32>> {
        let names = self.facts.names;
        self.list(key, |text| match text.trim() {
            text if text.bytes().any(|b| !b.is_ascii_digit()) => {
                look_up(names, text).ok_or(Problem::UnknownName(file))
            }
            // The largest id means "no id" to the kernel.
            text => decimal(text, "ids", 0, u32::MAX.saturating_sub(1)),
        })
    }

    /// A list separated by commas. An empty list is empty. Empty elements are skipped, as the reference does,
    /// except in annotations, which it reads strictly.
    fn list<T>(&mut self, key: Key, parse: impl Fn(&str) -> Result<T, Problem>) -> Option<Vec<T>> {
        let (text, source) = self.raw.get(key);
        let strict = self.is_annotation(key);
        if text.is_empty() {
            return Some(Vec::new());
        }
        let elements = text.split(',').filter(|element| strict || !element.trim().is_empty());
        let mut good = true;
        let values = elements
            .filter_map(|element| {
                let value = self.errors.keep(source, element, parse(element));
                good &= value.is_some();
                value
            })
            .collect();
        good.then_some(values)
    }

    fn is_annotation(&self, key: Key) -> bool {
        matches!(self.raw.get(key).1, Source::Annotation(_))
    }
}

/// The mark of ours that a mark of inbound packets would be taken for.
fn clash(mark: Mark, strict: bool) -> Option<Problem> {
    if mark == PROXY_MARK {
        Some(Problem::ProxyMark)
    } else if strict && GUARD_MARK.beside(mark).is_none() {
        Some(Problem::GuardMark(GUARD_MARK))
    } else {
        None
    }
}

/// Whether an address can be reached from outside: not loopback, link-local, unspecified, nor the one an earlier run
/// gave the loopback interface.
fn is_routable(address: &IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let ours = *address == IpAddr::V6(PASSTHROUGH_V6);
    !address.is_loopback() && !address.is_unspecified() && !link_local && !ours
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn v4() -> [IpAddr; 1] {
        ["10.1.0.2".parse().unwrap()]
    }

    fn parse(flags: &[(Key, &'static str)], addresses: &[IpAddr]) -> Result<Redirect, InputErrors> {
        let mut raw = RawSettings::new();
        for (key, text) in flags {
            raw.set(*key, *text, Source::Flag(key.setting().flag.unwrap_or("")));
        }
        Redirect::parse(&raw, &NamespaceFacts::new(addresses))
    }

    #[test]
    fn all_errors_are_reported_together() {
        let errors = parse(
            &[
                (Key::InboundPorts, "80,http,70000"),
                (Key::OutboundRanges, "10.0.0.0/33,*"),
                (Key::TproxyMark, "red"),
                (Key::InterceptionMode, "tproxy"),
            ],
            &[],
        )
        .unwrap_err();
        let text = errors.to_string();
        for expected in [
            "flag --istio-inbound-ports: \"http\" is not a whole number",
            "flag --istio-inbound-ports: \"70000\" is out of range; ports are 0 to 65535",
            "flag --istio-service-cidr: \"10.0.0.0/33\" has a prefix length larger than 32",
            "flag --istio-service-cidr: \"*\" stands for everything",
            "flag --istio-inbound-tproxy-mark: \"red\" is not a whole number",
            "flag --istio-inbound-interception-mode: \"tproxy\" is not one of REDIRECT, TPROXY; write TPROXY",
            "network namespace: no address",
        ] {
            assert!(text.contains(expected), "{expected} is missing in {text}");
        }
        assert_eq!(errors.iter().count(), 7);
    }

    #[test]
    fn a_star_among_what_is_left_alone_is_no_star_among_others() {
        for key in [Key::OutboundExcludeRanges, Key::InboundExcludePorts, Key::OutboundExcludePorts] {
            let told = parse(&[(key, "*")], &v4()).unwrap_err().to_string();
            assert!(told.contains("would leave everything alone; to capture nothing,"), "{told}");
            assert!(!told.contains("only value"), "{told}");
        }
    }

    #[test]
    fn the_first_address_decides_the_families_unless_dual() {
        let v6: IpAddr = "fd00::2".parse().unwrap();
        let [v4] = v4();
        let local: IpAddr = "fe80::1".parse().unwrap();
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        let ipv6 = |dual, addresses: &[IpAddr]| parse(&[(Key::DualStack, dual)], addresses).map(|r| r.ipv6);
        assert_eq!(ipv6("false", &[loopback, v4, v6]), Ok(false));
        assert_eq!(ipv6("true", &[loopback, v4, v6]), Ok(true));
        assert_eq!(ipv6("false", &[local, v6, v4]), Ok(true));
        assert_eq!(ipv6("true", &[v4, local]), Ok(false));
        // What an earlier run added says nothing about the pod.
        assert_eq!(ipv6("false", &[PASSTHROUGH_V6.into(), v4, v6]), Ok(false));
        assert!(ipv6("true", &[loopback, local]).is_err());
    }

    #[test]
    fn groups_follow_users() {
        let redirect = parse(&[(Key::ProxyUid, "1,2")], &v4()).unwrap();
        assert_eq!((redirect.proxy_uids, redirect.proxy_gids), (vec![1, 2], vec![1, 2]));
    }

    #[test]
    fn sixty_four_groups_are_possible() {
        let groups = |count: u32| (0..count).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
        let parse = |count| {
            let mut raw = RawSettings::new();
            raw.set(Key::OwnerGroups, groups(count), Source::Environment("ISTIO_OUTBOUND_OWNER_GROUPS"));
            Redirect::parse(&raw, &NamespaceFacts::new(&v4()))
        };
        assert!(parse(64).is_ok());
        assert_eq!(
            parse(65).unwrap_err().iter().next().map(|error| error.problem.clone()),
            Some(Problem::TooMany { found: 65, most: 64 })
        );
    }

    #[test]
    fn the_mark_of_the_proxys_packets_is_taken() {
        let errors =
            parse(&[(Key::InterceptionMode, "TPROXY"), (Key::TproxyMark, "1338")], &v4()).unwrap_err();
        assert!(errors.to_string().contains("is the mark of the proxy's own packets"));
        assert!(parse(&[(Key::TproxyMark, "1338")], &v4()).is_ok());
    }

    #[test]
    fn the_mark_of_strict_capture_is_taken_where_both_are_used() {
        let parse = |mode, strict, mark| {
            let flags =
                [(Key::InterceptionMode, mode), (Key::StrictCapture, strict), (Key::TproxyMark, mark)];
            parse(&flags, &v4()).map_err(|errors| errors.to_string())
        };
        let error = parse("TPROXY", "true", "0x010000").unwrap_err();
        let wanted = "flag --istio-inbound-tproxy-mark: \"0x010000\" has bits of 0x53b0000/0xfff0000, the mark of strict capture";
        assert!(error.contains(wanted), "{error}");
        assert!(parse("TPROXY", "true", "0xf000ffff").is_ok());
        assert!(
            parse("TPROXY", "false", "0x010000").is_ok() && parse("REDIRECT", "true", "0x010000").is_ok()
        );
    }
}
