//! Reading a redirection from settings as text.

use super::{
    fields::{Redirect, rows},
    notice,
    parts::{DnsCapture, Families, InboundPorts, InterceptionMode, OutboundRanges, OwnerGroups, Tproxy},
};
use crate::{
    settings::{InputErrors, Key, NameLookup, NamespaceFacts, RawSettings, Source, Sources, Star},
    values::{
        Cidrs, InterfaceName, Mark, Port, PortRange, PortSyntax, Problem, RouteTable, decimal, parse_bool,
        parse_word,
    },
};
use alloc::{
    collections::BTreeSet,
    string::{String, ToString},
    vec,
    vec::Vec,
};
use ipnet::{IpNet, Ipv4Net};

impl Redirect {
    /// Reads a redirection from settings, for a network namespace with these facts.
    ///
    /// # Errors
    /// Everything wrong with the settings, together.
    ///
    /// ```
    /// use redirect_core::{Redirect, settings::{Key, NamespaceFacts, RawSettings, Source}};
    ///
    /// let mut raw = RawSettings::new();
    /// raw.set(Key::InboundPorts, "80,443", Source::Flag("istio-inbound-ports"));
    /// raw.set(Key::OutboundRanges, "10.0.0.0/33", Source::Environment("ISTIO_SERVICE_CIDR"));
    /// let addresses = ["10.1.0.2".parse().unwrap()];
    /// let errors = Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap_err();
    /// assert_eq!(
    ///     errors.to_string(),
    ///     "environment variable ISTIO_SERVICE_CIDR: \"10.0.0.0/33\" has a prefix length larger than 32"
    /// );
    /// ```
    pub fn parse(raw: &RawSettings, facts: &NamespaceFacts<'_>) -> Result<Self, InputErrors> {
        let mut reader = SettingsReader::new(raw, facts, InputErrors::default());
        let draft = reader.draft();
        let mut redirect = draft.validated(reader.errors, |key| Some(raw.get(key).0))?;
        redirect.notices.0 = notice::of_settings(raw, &redirect, facts);
        Ok(redirect)
    }
}

/// Reads settings one by one and notes what is wrong.
pub(crate) struct SettingsReader<'a> {
    raw: &'a RawSettings,
    facts: &'a NamespaceFacts<'a>,
    errors: InputErrors,
}

impl<'a> SettingsReader<'a> {
    /// For settings of a namespace with these facts, after these errors.
    pub(crate) const fn new(
        raw: &'a RawSettings,
        facts: &'a NamespaceFacts<'a>,
        errors: InputErrors,
    ) -> Self {
        Self { raw, facts, errors }
    }

    /// Everything that was wrong.
    pub(crate) fn into_errors(self) -> InputErrors {
        self.errors
    }
}

impl SettingsReader<'_> {
    /// Everything is read, and every error noted; where something cannot be read, a value stays that nothing is wrong with.
    fn draft(&mut self) -> Redirect {
        let families = self.families().unwrap_or(Families::V4);
        let mut draft = Redirect::without_lists(families);
        draft.sources.0 = self.raw.sources();
        put(&mut draft.mode, self.mode());
        self.fields(&mut draft);
        if draft.strict_capture && self.facts.has_v6 {
            // An IPv4 pod has link-local addresses of IPv6 as well, and gets others from any router that advertises them.
            draft.families = Families::Both;
        }
        // Groups that follow users that could not be read are not wrong as well.
        draft.proxy_uids = self.proxy_uids(&mut draft).unwrap_or_else(|| vec![Redirect::PROXY_ID]);
        let gids = self.proxy_gids(&mut draft);
        put(&mut draft.proxy_gids, gids);
        let exclude = self.inbound_exclude(&mut draft.sources.0);
        let inbound = self.inbound(Key::InboundPorts, exclude);
        put(&mut draft.inbound, inbound);
        put(&mut draft.outbound, self.outbound(Key::OutboundRanges));
        put(&mut draft.outbound_exclude, Cidrs::read(self, Key::OutboundExcludeRanges));
        put(&mut draft.owner_groups, self.owner_groups());
        put(&mut draft.dns, self.dns());
        put(&mut draft.loopback, self.loopback());
        draft
    }

    /// The mark and the table are read even where they are not used, so that a typing error never waits to bite.
    fn mode(&mut self) -> Option<InterceptionMode> {
        let mark = self.value::<Mark>(Key::TproxyMark);
        let table = self.value::<RouteTable>(Key::TproxyRouteTable);
        let words = [("REDIRECT", false), ("TPROXY", true), ("NONE", false)];
        let (text, source) = self.raw.get(Key::InterceptionMode);
        let (words, listed) = if source.is_annotation() {
            // A pod with mode NONE is skipped before anything of this is read.
            (&words[..], "REDIRECT, TPROXY, NONE")
        } else if text.is_empty() {
            return Some(InterceptionMode::Redirect);
        } else {
            (&words[..2], "REDIRECT, TPROXY")
        };
        let parse = |text: &str| parse_word(text, words, listed);
        match self.raw.read(Key::InterceptionMode, &mut self.errors, parse)? {
            true => Some(InterceptionMode::Tproxy(Tproxy::new(mark?, table?))),
            false => Some(InterceptionMode::Redirect),
        }
    }

    fn proxy_uids(&mut self, draft: &mut Redirect) -> Option<Vec<u32>> {
        if !self.raw.get(Key::ProxyUid).0.is_empty() {
            return self.ids(Key::ProxyUid, "/etc/passwd", |names, name| names.user(name));
        }
        let (name, source) = self.raw.get(Key::ProxyUser);
        let named = self.facts.names.user(name);
        if named.is_some() {
            draft.sources.0.set(Key::ProxyUid, source);
        }
        Some(vec![named.unwrap_or(Redirect::PROXY_ID)])
    }

    /// Empty groups are the same as the users.
    fn proxy_gids(&mut self, draft: &mut Redirect) -> Option<Vec<u32>> {
        if !self.raw.get(Key::ProxyGid).0.is_empty() {
            return self.ids(Key::ProxyGid, "/etc/group", |names, name| names.group(name));
        }
        let source = draft.source(Key::ProxyUid);
        if source != Source::Default {
            draft.sources.0.set(Key::ProxyGid, source);
        }
        Some(draft.proxy_uids.clone())
    }

    /// The inbound ports of this setting: with `*`, all but the excluded ones.
    pub(crate) fn inbound(&mut self, key: Key, exclude: Option<Vec<PortRange>>) -> Option<InboundPorts> {
        match self.raw.get(key).0 {
            "" => exclude.map(|_| InboundPorts::None),
            "*" => exclude.map(InboundPorts::AllExcept),
            _ => {
                let only = Vec::read(self, key)?;
                exclude.map(|_| InboundPorts::Only(only))
            }
        }
    }

    /// In a pod, the proxy's own ports follow what the user excluded; a port written twice counts once.
    fn inbound_exclude(&mut self, sources: &mut Sources) -> Option<Vec<PortRange>> {
        let said = Vec::<PortRange>::read(self, Key::InboundExcludePorts)?;
        if !self.raw.is_pod() {
            return Some(said);
        }
        let text = self.raw.get(Key::InboundExcludePorts).0.trim();
        let texts = text.split(',').filter(|text| !text.is_empty()).map(ToString::to_string);
        let always = Redirect::ALWAYS_EXCLUDED_INBOUND.iter().map(|port| (port.to_string(), *port));
        // As in the reference, the texts are compared: " 8080" and "8080" are two rules, which is harmless.
        let mut seen = BTreeSet::new();
        let mut first = |(text, range): (String, PortRange)| seen.insert(text).then_some(range);
        let mut all: Vec<PortRange> = texts.zip(said).filter_map(&mut first).collect();
        sources.list_inbound(all.len());
        all.extend(always.filter_map(first));
        Some(all)
    }

    /// The destinations of this setting.
    pub(crate) fn outbound(&mut self, key: Key) -> Option<OutboundRanges> {
        match self.raw.get(key).0 {
            "*" => Some(OutboundRanges::All),
            _ => Cidrs::read(self, key).map(OutboundRanges::Only),
        }
    }

    fn owner_groups(&mut self) -> Option<OwnerGroups> {
        let group = |names: &dyn NameLookup, name: &str| names.group(name);
        match self.raw.get(Key::OwnerGroups).0 {
            "*" => self.ids(Key::OwnerGroupsExclude, "/etc/group", group).map(OwnerGroups::AllExcept),
            _ => self.ids(Key::OwnerGroups, "/etc/group", group).map(OwnerGroups::Only),
        }
    }

    /// Limited to the servers of resolv.conf unless all queries are asked for; in a pod, all are meant.
    fn dns(&mut self) -> Option<DnsCapture> {
        let redirect = bool::read(self, Key::RedirectDns);
        let all = bool::read(self, Key::CaptureAllDns);
        Some(match (redirect?, all? || self.raw.is_pod()) {
            (false, _) => DnsCapture::Off,
            (true, true) => DnsCapture::All,
            (true, false) if self.facts.nameservers.is_empty() => DnsCapture::Off,
            (true, false) => DnsCapture::Servers(self.facts.nameservers.to_vec()),
        })
    }

    /// The first address that is neither loopback nor link-local decides; with dual stack, any IPv6 address does. Strict capture adds
    /// IPv6 to either.
    fn families(&mut self) -> Option<Families> {
        let dual = bool::read(self, Key::DualStack);
        let Some(families) = Families::of(self.facts.addresses, dual.unwrap_or_default()) else {
            self.errors.push(Source::Namespace, "", Problem::NoAddress);
            return None;
        };
        Some(families)
    }

    fn loopback(&mut self) -> Option<Ipv4Net> {
        self.raw.read(Key::LoopbackRange, &mut self.errors, |text| match Cidrs::parse_one(text) {
            Ok(IpNet::V4(net)) => Ok(net),
            Ok(IpNet::V6(_)) | Err(_) => Err(Problem::NotLoopback),
        })
    }

    /// A single value of a type that reads itself.
    fn value<T: core::str::FromStr<Err = Problem>>(&mut self, key: Key) -> Option<T> {
        self.raw.read(key, &mut self.errors, str::parse)
    }

    fn ids(
        &mut self,
        key: Key,
        file: &'static str,
        look_up: fn(&dyn NameLookup, &str) -> Option<u32>,
    ) -> Option<Vec<u32>> {
        let names = self.facts.names;
        self.list(key, |text, _| match text.trim() {
            text if text.bytes().any(|b| !b.is_ascii_digit()) => {
                look_up(names, text).ok_or(Problem::UnknownName(file))
            }
            // The largest id means "no id" to the kernel.
            text => decimal(text, "ids", 0, u32::MAX.saturating_sub(1)),
        })
    }

    /// A list, as [`RawSettings::read_list`] reads it.
    fn list<T>(&mut self, key: Key, parse: impl Fn(&str, bool) -> Result<T, Problem>) -> Option<Vec<T>> {
        self.raw.read_list(key, &mut self.errors, parse)
    }
}

/// Makes the reading of the text of each row's setting.
macro_rules! readings {
    (
        values { $($(#[doc = $value_doc:literal])+ $value:ident: $value_type:ident = $value_key:ident, $value_default:expr;)+ }
        lists { $($(#[doc = $list_doc:literal])+ $list:ident by $list_setter:ident: $item:ident = $list_key:ident, $list_default:expr;)+ }
    ) => {
        impl SettingsReader<'_> {
            /// Reads the settings that stand for themselves.
            fn fields(&mut self, draft: &mut Redirect) {
                $(put(&mut draft.$value, Read::read(self, Key::$value_key));)+
                $(put(&mut draft.$list, Read::read(self, Key::$list_key));)+
            }
        }
    };
}

rows!(readings);

/// Replaces a value by what could be read.
fn put<T>(place: &mut T, read: Option<T>) {
    if let Some(value) = read {
        *place = value;
    }
}

/// A type that stands for one setting.
pub(crate) trait Read: Sized {
    /// Reads it; `None` where something was wrong and noted.
    fn read(reader: &mut SettingsReader<'_>, key: Key) -> Option<Self>;
}

impl Read for Port {
    fn read(reader: &mut SettingsReader<'_>, key: Key) -> Option<Self> {
        reader.value(key)
    }
}

impl Read for bool {
    fn read(reader: &mut SettingsReader<'_>, key: Key) -> Option<Self> {
        reader.raw.read(key, &mut reader.errors, parse_bool)
    }
}

/// Blanks around ports are dropped. `a:b` is a range; in an annotation also `a-b`.
impl Read for Vec<PortRange> {
    fn read(reader: &mut SettingsReader<'_>, key: Key) -> Option<Self> {
        reader.list(key, |text, is_annotation| match text.trim() {
            "" => Err(Problem::EmptyElement),
            "*" if key.setting().star == Star::Nothing => Err(Problem::StarExcludes),
            "*" => Err(Problem::StarNotAllowed),
            text if is_annotation => PortRange::parse(text, PortSyntax::Annotation),
            text => PortRange::parse(text, PortSyntax::Flag),
        })
    }
}

impl Read for Vec<InterfaceName> {
    fn read(reader: &mut SettingsReader<'_>, key: Key) -> Option<Self> {
        reader.raw.read_interfaces(key, &mut reader.errors)
    }
}

impl Read for Cidrs {
    fn read(reader: &mut SettingsReader<'_>, key: Key) -> Option<Self> {
        let ranges = reader.list(key, |text, _| match text {
            "*" if key.setting().star == Star::Nothing => Err(Problem::StarExcludes),
            _ => Cidrs::parse_one(text),
        })?;
        Some(Self::from_iter(ranges))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{settings::Setting, values::Family};
    use alloc::string::ToString;
    use core::net::IpAddr;

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
            assert!(told.contains("excludes everything; to capture nothing,"), "{told}");
            assert!(!told.contains("only value"), "{told}");
        }
    }

    #[test]
    fn the_first_address_decides_the_families_unless_dual() {
        let v6: IpAddr = "fd00::2".parse().unwrap();
        let [v4] = v4();
        let local: IpAddr = "fe80::1".parse().unwrap();
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        let ipv6 = |dual, addresses: &[IpAddr]| {
            parse(&[(Key::DualStack, dual)], addresses).map(|r| r.families() == Families::Both)
        };
        assert_eq!(ipv6("false", &[loopback, v4, v6]), Ok(false));
        assert_eq!(ipv6("true", &[loopback, v4, v6]), Ok(true));
        assert_eq!(ipv6("false", &[local, v6, v4]), Ok(true));
        assert_eq!(ipv6("true", &[v4, local]), Ok(false));
        // What an earlier run added does not count as the pod's.
        assert_eq!(ipv6("false", &[Family::PASSTHROUGH_V6.into(), v4, v6]), Ok(false));
        assert!(ipv6("true", &[loopback, local]).is_err());
    }

    #[test]
    fn groups_follow_users() {
        let redirect = parse(&[(Key::ProxyUid, "1,2")], &v4()).unwrap();
        assert_eq!((redirect.proxy_uids(), redirect.proxy_gids()), (&[1, 2][..], &[1, 2][..]));
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

    #[test]
    fn an_identity_that_names_nobody_is_refused_as_it_was_written() {
        let told = parse(&[(Key::ProxyUid, ","), (Key::ProxyGid, " , ")], &v4()).unwrap_err().to_string();
        assert!(told.contains("flag --proxy-uid: \",\" lists no ID"), "{told}");
        assert!(told.contains("flag --proxy-gid: \" , \" lists no ID"), "{told}");
    }

    #[test]
    fn two_listeners_on_one_port_are_told_by_the_one_that_was_set() {
        let told = |flags: &[(Key, &'static str)]| parse(flags, &v4()).unwrap_err().to_string();
        for (key, text, wanted) in [
            (
                Key::InboundCapturePort,
                "15001",
                "flag --inbound-capture-port: \"15001\" is the port of --envoy-port",
            ),
            (Key::ProxyPort, "15006", "flag --envoy-port: \"15006\" is the port of --inbound-capture-port"),
            (
                Key::InboundTunnelPort,
                "0x3a9e",
                "flag --inbound-tunnel-port: \"0x3a9e\" is the port of --inbound-capture-port",
            ),
        ] {
            let told = told(&[(key, text)]);
            assert!(told.starts_with(wanted) && !told.contains("; flag"), "{told}");
        }
        // What cannot be read is reported as such, and not as another listener's port.
        let told = told(&[(Key::ProxyPort, "http"), (Key::InboundCapturePort, "15001")]);
        assert_eq!(told, "flag --envoy-port: \"http\" is not a whole number");
    }

    #[test]
    fn every_setting_of_a_plan_is_read() {
        for setting in Setting::ALL.iter().filter(|one| one.part == crate::settings::Part::Plan) {
            let errors = parse(&[(setting.key, "\u{1}")], &v4()).err().unwrap_or_default();
            let keys: Vec<_> = errors.iter().map(|error| error.key).collect();
            // An unknown name is not an error: the ID is 1337.
            let wanted = if setting.key == Key::ProxyUser { vec![] } else { vec![Some(setting.key)] };
            assert_eq!(keys, wanted, "{:?}", setting.key);
        }
    }

    #[test]
    fn who_is_asked_for_the_proxys_identity_is_who_said_it() {
        let redirect = parse(&[(Key::ProxyUid, "7")], &v4()).unwrap();
        assert_eq!(redirect.source(Key::ProxyGid), Source::Flag("proxy-uid"), "the groups follow the users");
        assert_eq!(parse(&[], &v4()).unwrap().source(Key::ProxyUid), Source::Default);
    }
}
